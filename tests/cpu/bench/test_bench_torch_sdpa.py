"""bench.torch_sdpa: what is left out, and what is said. Times need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import torch_sdpa
from bench.torch_sdpa import SHAPES, Shape, Step, contenders, line_of, step_of, usable, why_wrong

needs_registry = pytest.mark.skipif(
    not hasattr(nn.attention, "register_flash_attention_impl"), reason="torch has no registry"
)
SMALL = Shape(1, 40, 4, 2, 16)


def test_names() -> None:
    assert "b2-n8192-h64/8-d128" in SHAPES


@needs_registry
def test_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU torch has flash attention and no cuDNN, and only the context runs ours."""
    step = step_of(SMALL.tensors("cpu", torch.float32))
    switch = torch_sdpa.Switch()
    found = dict(usable(contenders(step, switch)))
    assert sorted(found) == ["default", "flash", "sdpa"]
    told = capsys.readouterr().out
    assert "cudnn left out" in told and "register left out: it ran on []" in told
    assert nn.attention.current_flash_attention_impl() == (
        "mask_cute" if switch._is_active else None
    )
    switch.to(True)
    assert nn.attention.current_flash_attention_impl() == "mask_cute"
    switch.to(False)
    assert nn.attention.current_flash_attention_impl() is None


def test_wrong_results_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    right = step_of(SMALL.tensors("cpu", torch.float32))

    def wrong() -> tuple[Tensor, ...]:
        out, dq, dk, dv = right()
        return out, dq, dk * 1.1, dv

    def fails() -> tuple[Tensor, ...]:
        raise RuntimeError("no kernel")

    calls: dict[str, Step] = {"flash": right, "default": wrong, "cudnn": fails}
    assert list(dict(usable(calls))) == ["flash"]
    told = capsys.readouterr().out
    assert "default left out: dk differs from that of flash by" in told
    assert "cudnn left out: no kernel" in told
    assert "nan" in str(why_wrong([torch.tensor([torch.nan])] * 4, [torch.ones(1)] * 4))


def test_the_line() -> None:
    rows: list[dict[str, Any]] = [
        {"shape": "b2-n8192-h64/8-d128", "impl": name, "ms": ms}
        for name, ms in (("default", 3.4), ("register", 2.0), ("sdpa", 2.1))
    ]
    line = line_of(rows)
    assert "default 3.400 ms (1.70)" in line and "register 2.000 ms  sdpa 2.100 ms" in line


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_sdpa.main([]) == 2
    assert "python -m bench.torch_sdpa needs a GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        torch_sdpa.main(["b1"])
    assert "b1 is none of b2-n8192" in capsys.readouterr().err
