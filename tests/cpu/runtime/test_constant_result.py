"""What importing the package costs beside torch, and the decorator that keeps it low."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_mask_cute.autograd import mod_names, torch_ops
from flash_mask_cute.call.check import validate
from flash_mask_cute.runtime import packages
from flash_mask_cute.runtime.constant_result import assume_constant_result

ROOT = Path(__file__).resolve().parents[3]


def modules_of(program: str) -> set[str]:
    """What a program prints, in a process of its own: names of modules."""
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return set(child.stdout.split())


def modules_beside_torch(statement: str) -> set[str]:
    """The modules that `statement` loads into a process which has torch and nothing else."""
    before = "import sys, torch; before = set(sys.modules)"
    return modules_of(f"{before}; {statement}; print(*sorted(sys.modules.keys() - before))")


def test_import_loads_little_beside_torch() -> None:
    loaded = modules_beside_torch("import flash_mask_cute.functional")
    assert "flash_mask_cute.functional" in loaded
    foreign = {name for name in loaded if not name.startswith("flash_mask_cute")}
    assert foreign <= sys.stdlib_module_names, foreign - sys.stdlib_module_names
    assert len(foreign) <= 15


NO_COMPILER = {"cutlass", "tvm_ffi"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import flash_mask_cute", {"torch", *NO_COMPILER}),
        ("import flash_mask_cute.interface, flash_mask_cute.cpu.forward", NO_COMPILER),
        ("import flash_mask_cute.compute_block_sparsity", NO_COMPILER),
        ("import flash_mask_cute.mods.on_cpu", NO_COMPILER),
        ("import flash_mask_cute.runtime.cache, flash_mask_cute.runtime.callable_key", NO_COMPILER),
        ("import flash_mask_cute.rules.intervals", {"torch", *NO_COMPILER}),
        # the sources are not read again
        ("import flash_mask_cute; from flash_mask_cute.runtime import sources; sources.open = None;"
         "sources.SOURCES.fingerprint()", {"torch", *NO_COMPILER}),
        ("import flash_mask_cute.functional, flash_mask_cute.flex",
         {"flash_mask_cute.integrations"}),
        # nor does the doctor, or the first look at a function, load a library of a door
        ("import flash_mask_cute.__main__, flash_mask_cute.flex, flash_mask_cute.integrations;"
         "flash_mask_cute.flash_attn_func, flash_mask_cute.flex_attention", {*packages.EXTRAS}),
    ],
)  # fmt: skip
def test_what_an_import_leaves_out(statement: str, absent: set[str]) -> None:
    loaded = modules_of(f"import sys; {statement}; print(*sys.modules)")
    assert "flash_mask_cute" in loaded
    assert not [x for x in loaded for y in absent if f"{x}.".startswith(f"{y}.")]


@pytest.mark.shares(3)
def test_torchs_decorator_loads_dynamo() -> None:
    """If it no longer does, ours is not needed."""
    loaded = modules_beside_torch("torch.compiler.assume_constant_result(lambda: 1)")
    assert "torch._dynamo" in loaded


def test_the_mark_is_torchs() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert assume_constant_result(ours) is ours
    assert torch.compiler.assume_constant_result(theirs) is theirs
    assert vars(ours) == vars(theirs) != {}


def test_dynamo_does_not_trace_what_is_marked() -> None:
    calls = []

    @assume_constant_result
    def counted() -> int:
        calls.append(1)
        return len(calls)

    compiled = torch.compile(lambda x: x + counted(), backend="eager", fullgraph=True)
    results = [compiled(torch.zeros(2)).tolist() for _ in range(3)]
    assert results == [[1.0, 1.0]] * 3
    assert calls == [1]


def test_what_is_marked() -> None:
    for function in (mod_names._name_of, torch_ops._text_of, validate._only_warns):
        assert vars(function) == vars(assume_constant_result(lambda: None))
