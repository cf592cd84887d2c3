"""Outputs in memory of the caller: apart from inputs by element, in a warm call, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_recorder import Recorder
from test_bwd_interface import Recorder as BwdRecorder
from torch import Tensor

from flash_mask_cute import interface
from flash_mask_cute.call import given_outputs
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

SHAPE = (2, 24, 4, 64)
SLOTS = 12


def slots(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors that take turns in one buffer, head by head."""
    generator = torch.Generator().manual_seed(1)
    shape = torch.Size((2, 24, 4, SLOTS, 64))
    memory = torch.randn(shape.numel() + 2 * SLOTS * 64, generator=generator).to(dtype)
    buffer = memory[: shape.numel()].view(shape)
    return [buffer[:, :, :, i] for i in range(SLOTS)]


def later(x: Tensor, elements: int) -> Tensor:
    """Memory laid out as that of x, from elements after it."""
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + elements)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_operands_and_outputs_take_turns_in_a_buffer(dtype: torch.dtype) -> None:
    """With the bits of separate tensors."""
    q, k, v, out, dout, dq, dk, dv, *_ = slots(dtype)
    plain = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, dout)]
    expected, lse = _flash_attn_fwd(*plain[:3], causal=True)
    _flash_attn_fwd(q, k, v, causal=True, out=out)
    assert lse is not None and torch.equal(out, expected)
    gradients = _flash_attn_bwd(*plain[:3], expected, plain[3], lse, causal=True)
    found = _flash_attn_bwd(q, k, v, out, dout, lse, causal=True, dq=dq, dk=dk, dv=dv)
    assert all(x is y for x, y in zip(found, (dq, dk, dv), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(found, gradients, strict=True))
    for x, y in zip((q, k, v, dout), plain, strict=True):
        assert torch.equal(x, y)


def test_a_warm_forward_compares_elements(recorder: Recorder) -> None:
    q, k, v, out, *others = slots()
    lse = torch.empty(2, 4, 24)
    for target in (out, others[0], out):
        _flash_attn_fwd(q, k, v, out=target, lse=lse)
        assert recorder.calls[-1][3] is target
    assert len(recorder.prepared) == 1 and len(recorder.calls) == 3
    for elements, name in ((0, "q"), (64 * SLOTS, "q"), (64 + 8, "k"), (128 - 8, "k")):
        with pytest.raises(ValueError, match=f"^out must not share memory with {name}, got bytes"):
            _flash_attn_fwd(q, k, v, out=later(q, elements), lse=lse)
    contiguous = v.contiguous()
    _flash_attn_fwd(q, k, contiguous, out=out, lse=lse)
    within = contiguous.view(-1).view(torch.float32)[64:][: lse.numel()].view(lse.shape)
    with pytest.raises(ValueError, match="^lse must not share memory with v"):
        _flash_attn_fwd(q, k, contiguous, out=out, lse=within)
    assert len(recorder.prepared) == 2 and len(recorder.calls) == 4


@pytest.mark.parametrize("name", ["lse_low", "max_scores"])
def test_a_warm_forward_compares_all_outputs(name: str, recorder: Recorder) -> None:
    q, k, v = (x.contiguous() for x in slots()[:3])
    more: dict[str, Any] = {"lse": torch.empty(2, 4, 24)}
    if name == "lse_low":
        more["score_mod"] = lambda score, b, h, i, j, aux: score
    _flash_attn_fwd(q, k, v, **more, **{name: torch.empty(2, 4, 24)})
    with pytest.raises(ValueError, match=f"^{name} must not share memory with lse"):
        _flash_attn_fwd(q, k, v, **more, **{name: more["lse"]})
    assert len(recorder.calls) == 1


def test_a_warm_backward_compares_elements(bwd_recorder: BwdRecorder) -> None:
    q, k, v, out, dout, dq, dk, dv, *others = slots()
    lse, given = torch.zeros(2, 4, 24), {"dq": dq, "dk": dk, "dv": dv}
    for _ in range(2):
        _flash_attn_bwd(q, k, v, out, dout, lse, **given)
    _flash_attn_bwd(q, k, v, out, dout, lse, **given | {"dq": others[0]})
    launched = len(bwd_recorder.calls)
    assert len(bwd_recorder.prepared) == 1
    for name, tensor, other in (
        ("dq", later(dout, 8), "dout"),
        ("dk", later(dq, 64 * SLOTS), "dq"),
        ("dv", later(dk, 56), "dk"),
        ("dv", later(out, 8), "out"),
    ):
        text = f"^{name} must not share memory with {other}"
        with pytest.raises(ValueError, match=text):
            _flash_attn_bwd(q, k, v, out, dout, lse, **given | {name: tensor})
    assert len(bwd_recorder.calls) == launched


def test_addresses_that_were_proved_are_not_proved_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is a bound on how many are kept."""
    q, k, v, *outs = slots()
    monkeypatch.setattr(given_outputs, "_MOST_PROVED", 3)
    _flash_attn_fwd(q, k, v, out=outs[0])
    (kept,) = interface._prepared_fwd.values()
    for out in outs[:7]:
        _flash_attn_fwd(q, k, v, out=out)
        assert 1 <= len(kept.proved) <= 3  # type: ignore[attr-defined]
    monkeypatch.setattr(given_outputs, "check_outputs_apart", None)
    _flash_attn_fwd(q, k, v, out=outs[6])
    assert len(recorder.calls) == 9 and len(recorder.prepared) == 1
