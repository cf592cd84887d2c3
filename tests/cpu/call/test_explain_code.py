"""`explain` says when it compiles, and gives the code of the kernel if asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash_mask_cute import explain
from flash_mask_cute.runtime import machine_code


@pytest.mark.shares(6)
def test_the_code_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn(3, 1, 256, 2, 64, dtype=torch.bfloat16)
    found = explain(q, k, v, causal=True, target="sm_90a", code=True)
    told = capsys.readouterr().err
    assert told.count("explain compiles a kernel") == 1
    assert ".target sm_90a" in found.ptx and "wgmma.mma_async" in found.ptx
    # bf16 in, so no instruction of another dtype
    assert "f32.bf16.bf16" in found.ptx and "f32.f16.f16" not in found.ptx
    assert "wgmma" not in str(found) and "wgmma" not in repr(found)
    has_disassembler = next(machine_code.disassemblers(), None) is not None
    assert ("HGMMA" in found.sass) == has_disassembler
    # a mod of the user is in it: tanh is one instruction
    capped = explain(q, k, v, causal=True, softcap=5.0, target="sm_90a", code=True)
    assert "tanh.approx" in capped.ptx and "tanh.approx" not in found.ptx
    plain = explain(q, k, v, causal=True, target="sm_90a")
    assert plain.ptx == plain.sass == "" and plain.registers == found.registers


@pytest.mark.shares(12)
def test_a_kept_kernel_compiles_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn(3, 1, 256, 2, 64, dtype=torch.bfloat16)
    explain(q, k, v, causal=True, target="sm_90a")
    capsys.readouterr()
    explain(q, k, v, causal=True, target="sm_90a")
    assert capsys.readouterr().err == ""


def test_no_disassembler_leaves_machine_code_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_code, "disassemblers", lambda: iter(()))
    assert machine_code.disassembly(b"", tmp_path) == ""


def test_code_is_a_bool() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="code"):
        explain(q, k, v, code="ptx", target="sm_90a")  # type: ignore[arg-type]
