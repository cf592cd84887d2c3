"""Kernels of the host calls on the software GPU, in a process where it has been activated."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flash_mask_cute.runtime import cache

# of a compiled kernel, in its `meta`
PTX = "ptx"


class _Loaded:
    """A function from an object file, and the PTX of its kernels."""

    def __init__(self, function: Callable[..., Any], ptx: str | None) -> None:
        self._function, self.__ptx__ = function, ptx

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def run_what_caches_load(software_gpu: ModuleType) -> None:
    """The software GPU knows what `cute.compile` returns; a cache exports that and loads it. So
    the PTX goes with it, as one of the facts about the code. To call when the software GPU is
    active."""
    build_now, attempt = cache._built, cache.CompileCache._attempt

    def built_with_ptx(build: Callable[[], cache.Compiled]) -> cache.Compiled:
        built = build_now(build)
        compiled: Any = built.function
        if not isinstance(compiled, software_gpu.Compiled):
            return built  # without kernels, it runs on the CPU
        packed = base64.b85encode(zlib.compress(compiled.__ptx__.encode(), 1)).decode()
        return built._replace(meta={**built.meta, PTX: packed})

    def attempt_runnable(self: cache.CompileCache, *arguments: Any) -> cache.Compiled | None:
        found = attempt(self, *arguments)
        if found is None or PTX not in found.meta:
            return found
        ptx = zlib.decompress(base64.b85decode(found.meta[PTX])).decode()
        return found._replace(function=software_gpu.Compiled(_Loaded(found.function, ptx)))

    cache._built = built_with_ptx
    cache.CompileCache._attempt = attempt_runnable  # type: ignore[method-assign, assignment]
