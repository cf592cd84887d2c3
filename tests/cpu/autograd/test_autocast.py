"""The public functions under autocast: as torch's scaled_dot_product_attention is treated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, FP64, int32
from functional_calls import qkv, rows_below
from planned import arguments_of
from torch.nn.functional import scaled_dot_product_attention

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func, flashmask_attention, interface
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.interface import _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DTYPES = (BF16, FP16, FP32, FP64)


@pytest.mark.shares(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_but_float64_is_cast(dtype: torch.dtype, lower: torch.dtype, compiled: bool) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv())
    expected = dtype if dtype == FP64 else lower
    cast = [x.detach().to(expected).requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*cast, causal=True)
    attend: Any = flash_attn_func
    if compiled:
        attend = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=lower):
        found = attend(q, k, v, causal=True)
        of_torch = scaled_dot_product_attention(q, k, v)
    assert found.dtype == of_torch.dtype == expected
    assert torch.equal(found, out)
    gradients = torch.autograd.grad(found.sum(), (q, k, v))
    for x, of_cast in zip(gradients, torch.autograd.grad(out.sum(), cast), strict=True):
        assert x.dtype == dtype and torch.equal(x, of_cast.to(dtype))


def test_operands_of_several_dtypes() -> None:
    q, k, v = (x.detach().to(dtype) for x, dtype in zip(qkv(), (FP32, BF16, FP16), strict=True))
    with torch.autocast("cpu", dtype=BF16):
        found = flash_attn_func(q, k, v)
    assert torch.equal(found, flash_attn_func(q.bfloat16(), k, v.bfloat16()))
    with torch.autocast("cpu"), pytest.raises(TypeError, match="k must have the dtype of q"):
        flash_attn_func(q.double(), k, v)


def test_sink_and_aux_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def forward(call: AttentionCall) -> Any:
        given.update(arguments_of(call))
        return call.tensors.q, None

    monkeypatch.setattr(interface, "forward", forward)
    q, k, v = (x.detach().float() for x in qkv())
    sink, aux = torch.zeros(2), torch.zeros(12)
    with torch.autocast("cpu"):
        flash_attn_func(q, k, v, learnable_sink=sink, mask_mod=lambda *_: True, aux_tensors=[aux])
    assert {given[name].dtype for name in ("q", "k", "v")} == {BF16}
    assert given["learnable_sink"] is sink and given["aux_tensors"][0] is aux


def test_the_other_functions() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    cast = [x.bfloat16() for x in (q, k, v)]
    ends, columns = int32(0, 5, 12), rows_below(9, 12)
    with torch.autocast("cpu"):
        packed = flash_attn_varlen_func(q[0], k[0], v[0], ends, ends)
        masked, lse = flashmask_attention(q, k, v, columns, causal=True, return_softmax_lse=True)
    assert torch.equal(packed, flash_attn_varlen_func(*(x[0] for x in cast), ends, ends))
    assert lse.dtype == FP32
    assert torch.equal(masked, flashmask_attention(*cast, columns, causal=True))


def test_where_nothing_is_cast() -> None:
    """Autocast that is off or of another device, and host calls."""
    q, k, v = (x.detach().float() for x in qkv())
    expected = flash_attn_func(q, k, v)
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        assert torch.equal(flash_attn_func(q, k, v), expected)
    with torch.autocast("cpu"):
        assert torch.equal(_flash_attn_fwd(q, k, v)[0], expected)
    was = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(flash_attn_func(q, k, v), expected)
    finally:
        torch.set_autocast_enabled("cuda", was)


def test_a_compiled_call_follows_autocast() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    for dtype in (None, BF16, FP16):
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            assert compiled(q, k, v).dtype == (dtype or FP32)
            assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v))


def test_what_is_no_tensor_is_refused_by_name() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    with torch.autocast("cpu"):
        for name in ("q", "k", "v"):
            wrong: Any = {"q": q, "k": k, "v": v} | {name: [1]}
            with pytest.raises((TypeError, ValueError), match=f"^{name} must be a torch.Tensor"):
                flash_attn_func(**wrong)
