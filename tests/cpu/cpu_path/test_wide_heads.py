"""Head dimensions above 256: computed on the CPU; on a GPU on Hopper, up to 512."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from planned import call_of, planned
from torch.nn.functional import scaled_dot_product_attention

from flash_mask_cute import (
    SelectedBlocks,
    builders,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.scratch import BwdScratch
from flash_mask_cute.core.cta import SMEM_CAPACITY
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")


def inputs(head_dim: int, head_dim_v: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(head_dim)
    shapes = (2, 45, 4, head_dim), (2, 45, 2, head_dim), (2, 45, 2, head_dim_v)
    return [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(512, 512), (264, 264), (320, 320), (264, 64), (64, 320)]
)
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


HOPPER, BLACKWELL = Target("sm_90a", num_sms=132), Target("sm_100a", num_sms=148)


def wide_case(head_dim: int, head_dim_v: int = 0, **fields: Any) -> Case:
    case = Case("wide", 1, 300, 300, 4, 2, head_dim, head_dim_v, causal=True)
    return replace(case, **fields)


def wide_call(head_dim: int, head_dim_v: int = 0, **fields: Any) -> AttentionCall:
    return call_of(wide_case(head_dim, head_dim_v, **fields))


@pytest.mark.parametrize(
    ("target", "dims", "message"),
    [
        (BLACKWELL, (264, 264), "are not supported on Blackwell; got 264 and 264"),
        (HOPPER, (264, 64), "are supported only where both are equal; got 264 and 64"),
        (HOPPER, (64, 264), "are supported only where both are equal; got 64 and 264"),
    ],
)
def test_refused_by_name(target: Target, dims: tuple[int, int], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"head_dim and head_dim_v above 256 {message}"):
        planned(wide_call(*dims), target)


def test_no_kernel_is_wider() -> None:
    with pytest.raises(ValueError, match=r"head_dim .*q\) .* from 8 to 512, got 520"):
        planned(wide_call(520), HOPPER)


CHOSEN = SelectedBlocks(torch.zeros(1, 1, 300, 1, dtype=torch.int32), 64)


@pytest.mark.parametrize(
    ("fields", "more", "name"),
    [
        ({"softcap": 9.0}, {}, "softcap"),
        ({"score_mod": "alibi"}, {}, "score_mod"),
        ({}, {"block_sparse_tensors_torch": CHOSEN}, "selected blocks"),
    ],
    ids=["softcap", "score_mod", "selection"],
)
def test_gradients_of_modified_scores_are_refused(
    fields: dict[str, Any], more: dict[str, Any], name: str
) -> None:
    """Before anything is computed whose gradient nobody could give."""
    case = wide_case(512, **fields)
    forward = call_of(case, **more)
    planned(forward, HOPPER)
    recorded = replaced(forward, options=forward.options.recorded())
    message = f"not supported with gradients and {name}: .*no_grad.*got 512 and 512"
    for call in (recorded, call_of(case, Direction.BACKWARD, **more)):
        with pytest.raises(NotImplementedError, match=message):
            planned(call, HOPPER)


@pytest.mark.parametrize("head_dim", range(264, 513, 8))
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_width_has_a_backward(head_dim: int, deterministic: bool) -> None:
    """By roles: dQ has no sums in memory, and neither turns nor scratch to be cleared."""
    case = wide_case(head_dim)
    forward = call_of(case)
    planned(replaced(forward, options=forward.options.recorded()), HOPPER)
    found = planned(case, HOPPER, direction=Direction.BACKWARD, deterministic=deterministic)
    choice, scratch = found.bwd_choice, BwdScratch.of(found)
    assert (choice.tiles.tile_m, choice.tile_n) == (64, 64)
    assert choice.tile_d >= head_dim and choice.smem_bytes <= SMEM_CAPACITY
    assert scratch.dq_sums is scratch.semaphores is None


def test_a_backward_evaluates_a_mask_mod_itself() -> None:
    """Its launches would read stored results in different orders."""
    for head_dim, stores in ((256, True), (512, False)):
        case = wide_case(head_dim, heads_q=16, seqlen_q=1024, seqlen_k=1024, mask_mod="checks")
        found = planned(case, HOPPER, direction=Direction.BACKWARD)
        assert (found.mask_bits is not None) == stores


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stages_q": 1}, "stages_q must be 2 where head_dim is above 256, got 1"),
        ({"tile_m": 128}, "tile_m must be 64 where head_dim is above 256, got 128"),
        ({"cta_pair": True}, "cta_pair must be False where head_dim is above 256, got True"),
    ],
)
def test_tiles_of_a_backward_are_given(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(wide_case(512), HOPPER, direction=Direction.BACKWARD, config=config)


def test_fp8_is_refused() -> None:
    call = wide_call(512, seqlen_q=1, seqused_k=(300,))
    k, v = (x.to(torch.float8_e4m3fn) for x in (call.tensors.k, call.tensors.v))
    in_fp8 = replaced(call, tensors=replaced(call.tensors, k=k, v=v))
    with pytest.raises(NotImplementedError, match="not supported with k and v in float8_e4m3fn"):
        planned(in_fp8, HOPPER)


@pytest.mark.parametrize("head_dim", range(264, 513, 8))
def test_every_width_has_tiles(head_dim: int) -> None:
    """Of many queries, and of decoding, whose shares of key blocks are for pairs of CTAs."""
    many = planned(wide_call(head_dim), HOPPER).fwd_choice
    assert (many.tiles.tile_m, many.tiles.share_qo) == (128, True)
    few = planned(wide_call(head_dim, seqlen_q=1, seqlen_k=4096), HOPPER)
    assert few.fwd_choice.tiles.tile_m == 64
    assert few.splits is not None and few.splits.kind == BY_STREAM_K
    assert few.splits.number <= HOPPER.num_sms // 2


def test_the_grid_counts_both_ctas_of_a_tile() -> None:
    q, k, v = (x.bfloat16() for x in inputs(512, 512))
    explained = explain(q, k, v, causal=True, target="sm_90a")
    assert explained.work_tiles is not None and explained.grid == 2 * explained.work_tiles
    assert explained.backward is not None
    assert explained.backward.kernel == "WideBackwardSm90"
    assert explained.kernel == "WideForwardSm90"
    assert re.search("two CTAs score half of the keys each", explained.reason)


def test_explain_tells_of_the_cpu_path() -> None:
    assert "CPU" in str(explain(*inputs(512, 512), causal=True))


def test_the_least_and_the_step_hold_on_the_cpu() -> None:
    q, k, v = inputs(516, 516)
    with pytest.raises(ValueError, match=r"head_dim .*multiple of 8 from 8 on, got 516"):
        flash_attn_func(q, k, v)
