"""Statistics of P on the CPU, against the whole matrix in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import FP32, FP64, Case
from drawn_share import Draws
from inputs import make_inputs
from statistics_cases import STATISTICS, Wanted, assert_right, draw_case, draw_wanted

import flash_mask_cute
from flash_mask_cute import (
    SelectedBlocks,
    attention_statistics,
    attention_statistics_varlen,
    builders,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_mask_cute.call.arguments import AttentionCall, Tensors
from flash_mask_cute.call.statistics import StatisticsRequest, plan_statistics
from flash_mask_cute.runtime.target import Target

DRAWN = Draws.of("STATISTICS", 40, 0)

# p has the rounding error of an fp32 LSE, up to 20 here, and results that of fp32 sums
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
# 2,000 in a run of all, FLASH_MASK_STATISTICS_DRAWS=2000; they differ by a seed

MASKED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": 40, "window_right": 9},
    "shifted": {"window_left": 90, "window_right": -7},
    "columns1": {"causal": True, "column": "random1"},
    "columns2": {"column": "stepped2", "column_heads": "q"},
    "columns4": {"column": "documents4", "column_heads": "kv"},
    "blind-columns": {"column": "blinding4"},
    "lists": {"blocks": (64, 128)},
    "mask_mod": {"mask_mod": "eviction"},
    "blind-rows": {"mask_mod": "blinding"},
    "score_mod": {"score_mod": "t5", "causal": True},
    "blind-scores": {"score_mod": "blinding"},
    "softcap": {"softcap": 15.0},
}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"batch": 2, "seqlen_q": 200, "seqlen_k": 257, "heads_q": 4, "heads_kv": 2},
    "group-3": {"batch": 1, "seqlen_q": 129, "seqlen_k": 129, "heads_q": 6, "heads_kv": 2},
    "group-32": {"batch": 1, "seqlen_q": 37, "seqlen_k": 300, "heads_q": 32, "heads_kv": 1},
    "sink": {"batch": 2, "seqlen_q": 65, "seqlen_k": 129, "sink": FP32},
    "packed": {"lengths_q": (3, 0, 130, 65), "lengths_k": (200, 17, 0, 65)},
    "used": {
        **{"batch": 3, "seqlen_q": 140, "seqlen_k": 190, "heads_q": 4, "heads_kv": 1},
        **{"seqused_q": (140, 0, 65), "seqused_k": (64, 190, 1), "sink": FP64},
    },
}


def run(name: str, *operands: Any, **keywords: Any) -> Any:
    return getattr(flash_mask_cute, name)(*operands, **keywords)


@pytest.mark.shares(8)
@pytest.mark.parametrize("block_size", [(1, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", MASKED)
def test_right(masked: str, form: str, block_size: tuple[int, int]) -> None:
    case = Case(f"{masked}-{form}", **({"head_dim": 32} | FORMS[form] | MASKED[masked]))
    assert_right(run, make_inputs(case), Wanted(STATISTICS, block_size), **TOLERANCE)


@pytest.mark.shares(8)
@pytest.mark.parametrize("number", range(DRAWN.most))
def test_drawn(number: int) -> None:
    rng = random.Random(f"statistics {DRAWN.seed} {number}")
    assert_right(run, make_inputs(draw_case(rng)), draw_wanted(rng), **TOLERANCE)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_lse_of_the_forward(kind: str) -> None:
    """With the LSE that a forward returns, rows of P sum up to 1."""
    q, (k, v) = torch.randn(100, 4, 16), torch.randn(2, 100, 2, 16)
    ends = torch.tensor([0, 30, 100], dtype=torch.int32)
    if kind == "packed":
        _, lse = flash_attn_varlen_func(q, k, v, ends, ends, causal=True, return_lse=True)
        given: Any = (q, k, lse, STATISTICS, ends, ends)
        found = attention_statistics_varlen(*given, max_seqlen_k=70, causal=True)
    else:
        q, k, v = q[None], k[None], v[None]
        _, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        found = attention_statistics(q, k, lse, STATISTICS, causal=True)
    ones = torch.full_like(found.block_sums.sum(-1), 2.0)
    torch.testing.assert_close(found.block_sums.sum(-1), ones)
    torch.testing.assert_close(found.key_sums.sum(), torch.tensor(400.0))
    assert (found.block_maxima <= 1.0 + 1e-5).all() and (found.block_maxima > 0).any()


def test_tensors_in_float64() -> None:
    """Whose LSE may be so, too."""
    q, k = torch.randn(1, 30, 2, 8, dtype=FP64), torch.randn(1, 30, 1, 8, dtype=FP64)
    _, lse = flash_attn_func(q, k, k, return_lse=True)
    found: Any = attention_statistics(q, k, lse, "block_sums")
    torch.testing.assert_close(found.block_sums, torch.full((1, 1, 30, 1), 2.0))


def test_masks_of_torch_and_builders() -> None:
    """Mods written in torch, and positions of the first query, mean what they mean in attention."""
    q, k = torch.randn(1, 60, 2, 16), torch.randn(1, 60, 2, 16)
    mask = builders.causal_document([25, 35])

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx < 25) == (kv_idx < 25))

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 0.1 * (q_idx - kv_idx)

    _, lse = flash_attn_func(q, k, k, startend_row_indices=mask, score_mod=bias, return_lse=True)
    by_columns = attention_statistics(
        q, k, lse, STATISTICS, startend_row_indices=mask, score_mod=bias
    )
    by_mod = attention_statistics(q, k, lse, STATISTICS, mask_mod=document, score_mod=bias)
    for x, y in zip(by_columns, by_mod, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(by_mod.key_sums.sum(), torch.tensor(120.0))
    last = attention_statistics(q[:, -8:], k, lse[..., -8:], "entropy", q_start="end",
        startend_row_indices=mask, score_mod=bias)  # fmt: skip
    torch.testing.assert_close(last.entropy, by_columns.entropy[..., -8:])


@pytest.mark.parametrize("shared", ["packed queries", "expanded"])
def test_keys_in_common(shared: str) -> None:
    q, k = torch.randn(3, 20, 2, 16), torch.randn(1, 50, 1, 16)
    lse = flash_attn_func(q, k.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), return_lse=True)[1]
    each = attention_statistics(q, k.expand(3, -1, -1, -1), lse, "key_sums").key_sums
    assert each.shape == (3, 1, 50)
    torch.testing.assert_close(each.sum(-1), torch.full((3, 1), 40.0))
    if shared == "packed queries":
        ends = torch.arange(0, 61, 20, dtype=torch.int32)
        of_all = attention_statistics_varlen(
            q.flatten(0, 1), k, lse.transpose(0, 1).flatten(1), "key_sums", ends
        )
        torch.testing.assert_close(of_all.key_sums, each.sum(0, keepdim=True))


@pytest.mark.parametrize("lengths", [(0, 40), (40, 0)])
def test_nothing_to_reduce(lengths: tuple[int, int]) -> None:
    q, k = torch.randn(2, lengths[0], 2, 16), torch.randn(2, lengths[1], 2, 16)
    found = attention_statistics(q, k, torch.zeros(2, 2, lengths[0]), STATISTICS)
    assert found.key_sums.shape == (2, 2, lengths[1]) and found.entropy.shape == (2, 2, lengths[0])
    assert all((x == 0).all() for x in found)


def test_no_gradient() -> None:
    q, k = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(2))
    lse = flash_attn_func(q, k, k, return_lse=True)[1]
    found = attention_statistics(q, k, lse, STATISTICS)
    assert not any(x.requires_grad for x in found)
    lse.sum().backward()


SELECTION = SelectedBlocks(torch.zeros(1, 2, 20, 1, dtype=torch.int64), 64)
TYPE, VALUE, NO = TypeError, ValueError, NotImplementedError
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no lse": (TYPE, "lse must be a torch.Tensor, got None", {"lse": None}),
    "lse of 16 bits": (*(TYPE, "lse must have dtype float32"),
                       {"lse": torch.zeros(1, 2, 20, dtype=torch.bfloat16)}),
    "shape of lse": (*(VALUE, r"lse must have shape \(1, 2, 20\), got \(1, 20, 2\)"),
                     {"lse": torch.zeros(1, 20, 2)}),
    "reduce": (*(NO, "reduce supports key_sums, entropy, .*, got 'row_sums'"),
               {"reduce": ["entropy", "row_sums"]}),
    "no name": (TYPE, r"reduce must be a name, or a list of names, got \[\]", {"reduce": []}),
    "no names": (TYPE, "reduce must be a name, or a list of names, got 1", {"reduce": 1}),
    "queries of a block": (
        *(NO, r"1 query or a multiple of 64, and .* keys out of \(64, 128\), got \(32, 128\)"),
        {"block_size": (32, 128)},
    ),
    "keys of a block": (NO, r"got \(1, 32\)", {"block_size": (1, 32)}),
    "block": (VALUE, r"must be two ints, \(queries, keys\), got 128", {"block_size": 128}),
    "no ints": (VALUE, r"block_size must be two ints, .*, got \(64.0, 64\)",
                {"block_size": (64.0, 64)}),
    "deterministic": (TYPE, "deterministic must be", {"deterministic": 1}),
    "selection": (*(NO, "does not support block_sparse_tensors as SelectedBlocks"),
                  {"block_sparse_tensors": SELECTION}),
    "keyword": (*(TYPE, r"attention_statistics\(\) has no argument page_table"),
                {"page_table": torch.zeros(1, 1, dtype=torch.int32)}),
    "k": (VALUE, "k must have the head_dim of q", {"k": torch.zeros(1, 20, 2, 24)}),
    "causal": (TYPE, "causal must be", {"causal": "yes"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, text, changed = REFUSED[name]
    q, k = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    given = {"q": q, "k": k, "lse": torch.zeros(1, 2, 20), "reduce": "entropy"} | changed
    with pytest.raises(error, match=text):
        attention_statistics(**given)


def test_fp8_is_refused() -> None:
    q, k = torch.zeros(1, 20, 2, 16).bfloat16(), torch.zeros(1, 20, 2, 16)
    used = torch.tensor([20], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="does not support k in torch.float8_e4m3fn"):
        attention_statistics_varlen(
            q, k.to(torch.float8_e4m3fn), torch.zeros(1, 2, 20), "entropy", seqused_k=used
        )


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_refused_on_a_gpu(target: str) -> None:
    """What no kernel computes, or what would take too much scratch memory."""

    def planned(head_dim: int, heads: int, block_size: tuple[int, int], sequence: int = 128) -> Any:
        shape = 1, sequence, heads, head_dim
        q = torch.zeros(1, dtype=torch.bfloat16).expand(shape).contiguous()
        call = AttentionCall(Tensors(q, q, q))
        request = StatisticsRequest.of("block_sums", block_size, False)
        lse = torch.zeros(1, heads, sequence)
        return plan_statistics(call, lse, request, Target.named(target))

    if target == "sm_100a":
        with pytest.raises(NotImplementedError, match="does not support GPUs of Blackwell"):
            planned(64, 1, (1, 128))
        return
    assert planned(256, 1, (1, 128)).problem.statistics == ("block_sums",)
    with pytest.raises(NotImplementedError, match="does not support head_dim above 256, got 264"):
        planned(264, 1, (1, 128))
    # 33 heads, 2^15 queries, 2^9 key blocks, 4 bytes
    with pytest.raises(NotImplementedError, match=r"would take 2214592512 bytes of scratch memory"):
        planned(8, 33, (1, 64), 1 << 15)
    assert planned(8, 33, (64, 64), 1 << 15).problem.statistics_block == (16, 64, False)


PLANS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    # tile_m, tile_n, heads in a tile, (rows and keys of a sum of blocks, rows follow each other)
    "long": ({}, (192, 128, 4, (4, 128, True))),
    "long-d64": ({"d": 64}, (192, 128, 4, (4, 128, True))),
    "long-d256": ({"d": 256, "m": 64}, (128, 64, 1, (16, 64, False))),
    "many-queries": ({"m": 128}, (192, 128, 1, (16, 128, False))),
    "few-queries": ({"queries": 32}, (128, 128, 4, (4, 128, True))),
    "decode": ({"queries": 1}, (64, 128, 4, (4, 128, True))),
    "group-of-3": ({"heads": (6, 2), "queries": 32}, (64, 128, 1, (1, 128, True))),
    "group-of-32": ({"heads": (32, 1), "n": 64}, (192, 128, 32, (16, 64, True))),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    given, expected = PLANS[name]
    heads_q, heads_kv = given.get("heads", (8, 2))
    d, queries = given.get("d", 128), given.get("queries", 4096)
    zero = torch.zeros(1, dtype=torch.bfloat16)
    q, k = zero.expand(1, queries, heads_q, d), zero.expand(1, 8192, heads_kv, d)
    request = StatisticsRequest.of("block_sums", (given.get("m", 1), given.get("n", 128)), False)
    lse = torch.zeros(1, heads_q, queries)
    plan = plan_statistics(AttentionCall(Tensors(q, k, k)), lse, request, Target.named("sm_90a"))
    tiles, problem = plan.fwd_choice.tiles, plan.problem
    found = tiles.tile_m, tiles.tile_n, problem.packed_heads, problem.statistics_block
    assert found == expected


def test_refused_under_transforms() -> None:
    q, k = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.vmap(lambda x: attention_statistics(x, k, torch.zeros(1, 2, 20), "entropy"))(
            q[None]
        )
