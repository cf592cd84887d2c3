"""Without the compiler, the first call that needs it says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flash_mask_cute.runtime.packages import tells_what_to_install

ROOT = Path(__file__).resolve().parents[3]
# {blocked} cannot be found, {call} is made.
PROGRAM = """
import sys, traceback

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import flash_mask_cute
from flash_mask_cute import *
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

def mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return q_idx >= kv_idx

def score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return score * 2.0

q = torch.zeros(1, 5, 2, 16)
b = q.bfloat16()
builders.causal_document([2, 3]).dense(5)
for call in {calls}:
    try:
        eval(call)
    except ImportError as error:
        print(type(error).__name__, type(error.__cause__).__name__, error, sep=": ")
    else:
        print("nothing was missing")
"""


def run(blocked: str, *calls: str) -> list[str]:
    program = PROGRAM.format(blocked=blocked, calls=calls)
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def said(package: str) -> str:
    return (
        f"ImportError: ModuleNotFoundError: flash_mask_cute needs the package {package}, on the "
        f"CPU, too: pip install {package}"
    )


@pytest.mark.shares(3)
def test_without_the_dsl() -> None:
    calls = (
        "_flash_attn_fwd(q, q, q)",
        "_flash_attn_fwd(q, q, q, score_mod=score_mod)",
        "_flash_attn_bwd(q, q, q, q, q, torch.zeros(1, 2, 5))",
        "flash_attn_func(q.clone().requires_grad_(), q, q)",
        "flashmask_attention(q, q, q, builders.causal(5))",
        "explain(b, b, b)",
        'create_block_mask(mask_mod, 1, 1, 5, 5, device="cpu")',
        "plot(mask_mod, 5)",
    )
    assert run("cutlass", *calls) == [said("nvidia-cutlass-dsl")] * len(calls)


@pytest.mark.shares(3)
def test_without_tvm_ffi() -> None:
    calls = (
        "_flash_attn_fwd(q, q, q, mask_mod=mask_mod)",
        "explain(b, b, b)",
        'create_block_mask(mask_mod, 1, 1, 5, 5, device="cpu")',
    )
    assert run("tvm_ffi", *calls) == [said("apache-tvm-ffi")] * len(calls)
    # attention on the CPU compiles nothing where there is no callable
    assert run("tvm_ffi", "_flash_attn_fwd(q, q, q)") == ["nothing was missing"]


def test_other_packages_are_not_its_matter() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), tells_what_to_install():
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
