"""Small host functions to compile, and a cache asked for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flash_mask_cute.runtime.cache import CompileCache, Compiled

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"
META = {"registers": 168, "smem": 1024, "spills": 0}

# One text for this process and for its children: adds `addend` to n elements of an int32 array.
KERNEL = """
import cutlass
import cutlass.cute as cute

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"

def compile_adder(addend):
    @cute.jit
    def add(x: cute.Tensor, n: cutlass.Int32):
        for i in range(n):
            x[i] = x[i] + addend

    x = cute.runtime.make_fake_compact_tensor(
        cutlass.Int32, (cute.sym_int(),), memspace=cutlass.AddressSpace.generic
    )
    return cute.compile(add, x, cutlass.Int32(0), options=OPTIONS, no_jit_engine=True)

@cute.kernel
def fill(x: cute.Tensor, value: cutlass.Int32):
    x[cute.arch.thread_idx()[0]] = value

@cute.jit
def launch_fill(x: cute.Tensor, value: cutlass.Int32, stream):
    fill(x, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

def compile_fill():
    x = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_fill, x, cutlass.Int32(0), stream, options=OPTIONS)
"""


class Builder:
    """Builds an adder and counts how often it is asked to."""

    def __init__(self, adders: Callable[[int], Any]) -> None:
        self._adders = adders
        self.calls = 0

    def __call__(self, addend: int = 1) -> Callable[[], Compiled]:
        def build() -> Compiled:
            self.calls += 1
            return Compiled(self._adders(addend), META)

        return build


def get_adder(cache: CompileCache, build: Callable[[], Compiled], **change: Any) -> Compiled:
    arguments: dict[str, Any] = {
        "name": "adder",
        "key": {"addend": 1},
        "arch": "sm_90a",
        "options": OPTIONS,
    }
    arguments |= change
    key = arguments.pop("key")
    if not callable(key):
        arguments.setdefault("token", json.dumps(key, sort_keys=True, default=str))
    make_key = key if callable(key) else lambda: key
    return cache.get(arguments.pop("name"), make_key, build, **arguments)


def apply(compiled: Compiled) -> int:
    x = np.zeros(3, dtype=np.int32)
    compiled.function(x, 3)
    assert len(set(x.tolist())) == 1
    return int(x[0])


def files_of(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "v1").iterdir())


def entry_of(folder: Path, suffix: str) -> Path:
    (path,) = (folder / "v1").glob(f"*{suffix}")
    return path
