"""Keys of callables of libraries and in other processes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from own_modules import OBJECT_PARTS, OBJECTS, Import, window

import flash_mask_cute
from flash_mask_cute.runtime.callable_key import callable_key, code_facts, releases

ROOT = Path(flash_mask_cute.__file__).resolve().parents[1]


# -- libraries ----------------------------------------------------------------------------------


def test_library_functions_made_by_a_factory_keep_their_state() -> None:
    """The version of a library pins its code, not what one of its closures was made with."""
    assert callable_key(_library_closure(1)) == callable_key(_library_closure(1))
    assert callable_key(_library_closure(1)) != callable_key(_library_closure(2))


def _library_closure(size: int) -> Callable[..., Any]:
    """A closure as a factory in torch.nn.functional would make it."""
    own = window(size)
    assert isinstance(own, FunctionType)
    return FunctionType(
        own.__code__, {"__name__": "torch.nn.functional"}, "made", None, own.__closure__
    )


def test_version_of_a_library_counts(
    import_source: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    mod = import_source("import torch\ndef mod(q):\n    return torch.exp(q)\n").mod
    before = callable_key(mod)
    monkeypatch.setattr(torch, "__version__", "99.0")
    releases._release_of_top.cache_clear()
    try:
        assert callable_key(mod) != before
    finally:
        monkeypatch.undo()
        releases._release_of_top.cache_clear()
    assert callable_key(mod) == before


CUTE = """
import cutlass
import cutlass.cute as cute
from cutlass.cute.math import exp2

WIDTH = 5

@cute.jit
def callee(x: {annotation}, y: cutlass.Int32):
    r = y
    if x < WIDTH:
        r = y + {offset}
    return r

@cute.jit
def plain(x):
    return x + cutlass.Int32({constant})

def mod(b, h, q, k, aux):
    return callee(q, k) + plain(q) if {static} else exp2(q)

@cute.jit
def launch(x: cute.Tensor, n: cutlass.Int32):
    x[0] = mod(0, 0, n, x[0], None)
"""
CUTE_PARTS = {
    "annotation": "cutlass.Int32",
    "offset": 1,
    "constant": 2,
    "static": "cutlass.Float32(1).value",
}


def _cute_module(import_source: Import, **change: object) -> Any:
    return import_source(CUTE.format(**(CUTE_PARTS | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"annotation": "cutlass.Int64"},
        {"offset": 2},
        {"constant": 3},
        {"static": "cutlass.Float32(2).value"},
    ],
)
def test_jit_functions_are_looked_into(import_source: Import, change: dict[str, object]) -> None:
    base = callable_key(_cute_module(import_source).mod)
    assert callable_key(_cute_module(import_source).mod) == base
    assert callable_key(_cute_module(import_source, **change).mod) != base


def test_text_annotations_of_jit_functions_are_resolved(import_source: Import) -> None:
    source = (
        "from __future__ import annotations\nimport cutlass\nimport cutlass.cute as cute\n"
        "Index = cutlass.{}\n@cute.jit\ndef mod(x: Index):\n    return x\n"
    )
    keys = [callable_key(import_source(source.format(t)).mod) for t in ("Int32", "Int64", "Int32")]
    assert keys[0] == keys[2] != keys[1]


def test_cutlass_values() -> None:
    import cutlass

    values: list[Any] = [
        cutlass.Float32(0.5),
        cutlass.Float32(0.25),
        cutlass.Int32(1),
        cutlass.Int64(1),
    ]
    values += [cutlass.Float32, cutlass.BFloat16]
    assert len({callable_key(window(value)) for value in values}) == len(values)


def test_tracing_does_not_change_the_key(import_source: Import) -> None:
    """The DSL rewrites a decorated function when it traces it for the first time."""
    import cutlass
    from cutlass import cute

    module = _cute_module(import_source)
    before = [callable_key(fn) for fn in (module.mod, module.callee, module.launch)]
    code = module.callee.__wrapped__.__code__
    tensor = cute.runtime.make_fake_compact_tensor(
        cutlass.Int32, (cute.sym_int(),), memspace=cutlass.AddressSpace.generic
    )
    cute.compile(
        module.launch, tensor, cutlass.Int32(0), options="--enable-tvm-ffi --gpu-arch sm_90a"
    )
    assert module.callee.__wrapped__.__code__ is not code
    assert [callable_key(fn) for fn in (module.mod, module.callee, module.launch)] == before


# -- processes ----------------------------------------------------------------------------------

PORTABLE = (
    OBJECTS.format(**OBJECT_PARTS)
    + """
NAMES = {"alpha", "beta", "gamma", "delta", ("x", 1), frozenset({"p", "q"})}
FUNCTIONS = {len, max, functools.partial}

def make(size):
    def mask_mod(q, k, scale=0.5, *, kind=Kind.FAR):
        return q - k < size and mod(q) and "x" in NAMES and FUNCTIONS and isinstance(q, Base)
    return mask_mod

PARTIAL = functools.partial(make(3), k=1)
CALLABLES = [mod, mod.method, make(3), make(4), PARTIAL, lambda q: q in {"a", "b"}]
"""
)
CHILD = """
import importlib.util, sys
from flash_mask_cute.runtime.callable_key import callable_key
spec = importlib.util.spec_from_file_location("own_portable", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["own_portable"] = module
spec.loader.exec_module(module)
warm = [fn(1) for fn in module.CALLABLES[:1] for _ in range(500)]
print("\\n".join(callable_key(fn) for fn in module.CALLABLES))
"""


def test_equal_in_other_processes_and_places(tmp_path: Path) -> None:
    outputs = []
    for seed in ("0", "1", "2"):
        path = tmp_path / seed / "own_portable.py"
        path.parent.mkdir()
        path.write_text(PORTABLE)
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", CHILD, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(result.stdout.split())
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) == len(outputs[0]) == 6


def test_specialised_bytecode_does_not_leak_in() -> None:
    def mod(q: Any, k: Any) -> Any:
        return max(q, k) + q * k

    before = callable_key(mod)
    for _ in range(2000):
        mod(1, 2)
    code_facts._FACTS.clear()
    assert callable_key(mod) == before


def test_a_folder_that_pip_installed_into_is_not_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target` makes folders of any name, known by the records beside them."""
    package = tmp_path / "inner" / "recorded_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.2'\nodd = iter(())\n")
    record = tmp_path / "recorded_library-1.2.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("inner/recorded_library/__init__.py,sha256=abc,1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "inner"))
    library = importlib.import_module("recorded_library")

    def mod(x: Any) -> Any:
        return library.odd

    assert callable_key(mod)
    record.unlink()
    releases._release_of_top.cache_clear()
    with pytest.raises(TypeError, match="odd"):
        callable_key(mod)
    releases._release_of_top.cache_clear()
    monkeypatch.delitem(sys.modules, "recorded_library")
