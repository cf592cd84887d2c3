"""Head dimensions above those of kernels: computed on the CPU, refused for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_mask_cute import builders, explain, flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("explained_without_compiling")


def inputs(head_dim: int, head_dim_v: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(head_dim)
    shapes = (2, 45, 4, head_dim), (2, 45, 2, head_dim), (2, 45, 2, head_dim_v)
    return [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (264, 64), (64, 320)])
@pytest.mark.parametrize("masked", ["causal", "documents", "packed"])
def test_both_directions(head_dim: int, head_dim_v: int, masked: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(head_dim, head_dim_v))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    place = torch.arange(45)
    visible = place[:, None] >= place
    if masked != "causal":
        visible = visible & ((place[:, None] < 20) == (place < 20))
    exact = scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True).transpose(1, 2)
    dout = torch.randn_like(exact)
    if masked == "causal":
        out = flash_attn_func(q, k, v, causal=True)
    elif masked == "documents":
        mask = builders.causal_document([20, 25])
        out = flash_attn_func(q, k, v, startend_row_indices=mask)
    else:
        cu_seqlens = torch.tensor([0, 20, 45, 65, 90], dtype=torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*flat, cu_seqlens, cu_seqlens, 25, 25, causal=True)
        out = out.unflatten(0, (2, 45))
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    wanted = [exact, *torch.autograd.grad(exact, (q, k, v), dout)]
    for result, reference in zip(found, wanted, strict=True):
        # the backward starts from an LSE in float32
        torch.testing.assert_close(result, reference, rtol=0, atol=2e-5)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dims", "said"), [((264, 64), "head_dim .*q"), ((64, 264), "head_dim_v")])
def test_kernels_refuse_them(target: str, dims: tuple[int, int], said: str) -> None:
    q, k, v = (x.bfloat16() for x in inputs(*dims))
    with pytest.raises(ValueError, match=rf"{said}.* from 8 to 256, got 264"):
        explain(q, k, v, causal=True, target=target)


def test_explain_tells_of_the_cpu_path() -> None:
    assert "CPU" in str(explain(*inputs(512, 512), causal=True))


def test_the_least_and_the_step_hold_on_the_cpu() -> None:
    q, k, v = inputs(516, 516)
    with pytest.raises(ValueError, match=r"head_dim .*multiple of 8 from 8 on, got 516"):
        flash_attn_func(q, k, v)
