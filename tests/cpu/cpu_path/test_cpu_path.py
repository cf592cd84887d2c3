from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import BF16, FP32, FP64, MASK_CASES, QUICK_CASES, Case
from cpu_calls import WRONG_VERDICTS, WRONG_WALKS, cpu_call_of, patch_results
from eager import assert_close_to_oracle
from guarded_outputs import GuardedOutputs
from inputs import Inputs, make_inputs
from oracle import hidden_of, reference_attention
from random_cases import random_case, random_mask_case
from torch import Tensor

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.cpu import forward
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.forward import flash_attn_fwd_cpu
from flash_mask_cute.cpu.tiles import Tile, _ListsAndMod
from flash_mask_cute.rules.intervals import Intervals

# The CPU path computes in float64 and rounds LSE once, so 2^-24 of the largest |lse|, about 20.
LSE_ATOL = 2e-6
# A score_mod sees and returns float32: 2^-24 of the largest score, about 400 under ALiBi, twice.
SCORE_MOD_ATOL = 5e-5

WALK_CASES = (
    Case("causal", 1, 500, 500, causal=True),
    Case("window", 1, 300, 1000, window_left=127, window_right=128),
    Case("packed", 1, 200, 300, 4, 1, causal=True, pack_gqa=True),
    Case("varlen", lengths_q=(255, 63), lengths_k=(300, 200), causal=True),
)

kept_inputs = lru_cache(maxsize=8)(make_inputs)


def run_cpu_path(
    inputs: Inputs,
    tile_m: int = 128,
    tile_n: int = 128,
    pack_gqa: int = 1,
    skip_blocks: bool = True,
) -> GuardedOutputs:
    outputs = GuardedOutputs(inputs)
    tiles = CpuTiles(tile_m, tile_n, pack_gqa, skip_blocks)
    flash_attn_fwd_cpu(cpu_call_of(inputs, tiles, out=outputs.out, lse=outputs.lse))
    outputs.assert_guards_intact()
    return outputs


def check(outputs: GuardedOutputs, inputs: Inputs) -> None:
    lse_atol = SCORE_MOD_ATOL if inputs.case.score_mod else LSE_ATOL
    assert_close_to_oracle(outputs.out, outputs.lse, inputs, lse_atol=lse_atol, unused_rows=False)


@pytest.mark.shares(3)
@pytest.mark.parametrize("tile", [(128, 128), (64, 48)], ids=["128x128", "64x48"])
@pytest.mark.parametrize("case", QUICK_CASES + MASK_CASES)
def test_tile_walk_against_oracle(case: Case, tile: tuple[int, int]) -> None:
    inputs = kept_inputs(case)
    for pack_gqa in sorted({1, case.group}):
        check(run_cpu_path(inputs, *tile, pack_gqa), inputs)


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(60))
def test_fuzzed_feature_pairs(seed: int) -> None:
    inputs = make_inputs(random_case(random.Random(seed)))
    pack_gqa = inputs.case.group if inputs.case.pack_gqa else 1
    check(run_cpu_path(inputs, pack_gqa=pack_gqa), inputs)


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(60))
def test_fuzzed_masks(seed: int) -> None:
    rng = random.Random(seed)
    inputs = make_inputs(random_mask_case(rng))
    tile = rng.choice(((128, 128), (64, 128), (192, 80)))
    check(run_cpu_path(inputs, *tile, rng.choice((1, inputs.case.group))), inputs)


@pytest.mark.parametrize("case", (*WALK_CASES, *MASK_CASES))
def test_skipping_changes_no_bit(case: Case) -> None:
    inputs = kept_inputs(case)
    pack_gqa = case.group if case.pack_gqa else 1
    skipping = run_cpu_path(inputs, 64, 48, pack_gqa)
    visiting = run_cpu_path(inputs, 64, 48, pack_gqa, skip_blocks=False)
    assert torch.equal(skipping.out.view(torch.int16), visiting.out.view(torch.int16))
    assert torch.equal(skipping.lse.view(torch.int32), visiting.lse.view(torch.int32))


SKIP_CASES = (
    Case("causal", 1, 500, 500, causal=True),
    Case("window", 1, 300, 600, window_left=127, window_right=60),
    Case("documents1", 1, 500, 500, 1, 1, causal=True, column="documents1"),
    Case("documents2", 1, 500, 500, 1, 1, column="documents2"),
    Case("documents2-packed", 1, 300, 300, 2, 1, column="documents2", pack_gqa=True),
    Case("blocks", 1, 500, 500, 1, 1, blocks=(64, 48)),
    Case("blocks-mask", 1, 500, 500, 1, 1, mask_mod="documents", blocks=(32, 24)),
)


@pytest.mark.parametrize("case", SKIP_CASES)
def test_only_tiles_that_show_something_are_scored(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these cases the classification is exact, but for wrong block lists of a mask_mod."""
    inputs = make_inputs(case)
    pack_gqa = case.group if case.pack_gqa else 1
    visited = []
    score_tile = forward.score_tile

    def counted(q: Tensor, k: Tensor, tile: Tile, *args: Any) -> Tensor:
        visited.append((tile.m_block, tile.n_block))
        return score_tile(q, k, tile, *args)

    monkeypatch.setattr(forward, "score_tile", counted)
    run_cpu_path(inputs, 64, 48, pack_gqa)
    visible = ~hidden_of(inputs)[0]
    tiles = [row.split(48, dim=1) for row in visible.repeat_interleave(pack_gqa, 0).split(64)]
    shown = [(m, n) for m, row in enumerate(tiles) for n, tile in enumerate(row) if tile.any()]
    if case.mask_mod is None:
        assert visited == shown
    else:
        assert set(shown) <= set(visited)
    assert len(visited) < 0.8 * len(tiles) * len(tiles[0])


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_development_dtypes(dtype: torch.dtype) -> None:
    case = Case(f"{dtype}", 2, 127, 255, 4, 2, 40, 24, dtype=dtype, causal=True, window_left=90)
    inputs = make_inputs(case)
    outputs = run_cpu_path(inputs)
    assert_close_to_oracle(outputs.out, outputs.lse, inputs, lse_atol=LSE_ATOL)


@pytest.mark.shares(3)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", QUICK_CASES + MASK_CASES)
def test_public_call_against_oracle(case: Case) -> None:
    from flash_mask_cute.interface import _flash_attn_fwd

    inputs = kept_inputs(case.packed_if_supported())
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    lse_atol = SCORE_MOD_ATOL if case.score_mod else LSE_ATOL
    assert_close_to_oracle(out, lse, inputs, lse_atol=lse_atol)


def test_public_call_writes_the_callers_outputs() -> None:
    from flash_mask_cute.interface import _flash_attn_fwd

    inputs = make_inputs(Case("callers-outputs", 2, 129, 255, 4, 2, causal=True, sink=FP32))
    given = GuardedOutputs(inputs)
    out, lse = _flash_attn_fwd(
        inputs.q, inputs.k, inputs.v, **inputs.keywords, out=given.out, lse=given.lse
    )
    assert out.data_ptr() == given.out.data_ptr()
    assert lse.data_ptr() == given.lse.data_ptr()
    given.assert_guards_intact()
    assert_close_to_oracle(given.out, given.lse, inputs, lse_atol=LSE_ATOL)


@pytest.mark.parametrize("wrong", WRONG_WALKS)
@pytest.mark.parametrize("case", WALK_CASES)
def test_a_wrong_walk_is_caught(case: Case, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(case)
    patch_results(monkeypatch, BlockInfo, "get_n_block_min_max", WRONG_WALKS[wrong])
    outputs = run_cpu_path(inputs, pack_gqa=case.group if case.pack_gqa else 1)
    with pytest.raises(AssertionError, match="off by"):
        assert_close_to_oracle(outputs.out, outputs.lse, inputs)


VERDICT_CASES = (
    Case("stepped1", 1, 500, 500, causal=True, column="stepped1"),
    Case("stepped2-causal", 1, 500, 500, causal=True, column="stepped2"),
    Case("documents2", 1, 500, 500, column="documents2"),
    Case("stepped4-packed", 1, 300, 500, 4, 2, column="stepped4", pack_gqa=True),
    Case("varlen", lengths_q=(255, 200), lengths_k=(300, 200), causal=True, column="stepped1"),
    Case("blocks", 1, 500, 500, blocks=(50, 70)),
    Case("blocks-mask", 1, 500, 500, mask_mod="documents", blocks=(64, 48)),
)


@pytest.mark.parametrize("wrong", WRONG_VERDICTS)
@pytest.mark.parametrize("case", VERDICT_CASES)
def test_a_wrong_verdict_on_a_tile_is_caught(
    case: Case, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(case)
    judge = Intervals if case.column else _ListsAndMod
    patch_results(monkeypatch, judge, "classify", WRONG_VERDICTS[wrong])
    outputs = run_cpu_path(inputs, 64, 48, case.group if case.pack_gqa else 1)
    with pytest.raises(AssertionError, match="off by|sees nothing"):
        check(outputs, inputs)


@pytest.mark.parametrize("edge", ["causal_local_mask", "before_local_mask"])
def test_a_block_cut_by_the_band_but_not_masked_is_caught(
    edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(Case("window", 1, 300, 600, causal=True, window_left=127))
    name = f"get_n_block_min_{edge}"
    right_edge = getattr(BlockInfo, name)
    step = 1 if edge == "causal_local_mask" else -1
    monkeypatch.setattr(BlockInfo, name, lambda *args: right_edge(*args) + step)
    with pytest.raises(AssertionError, match="off by"):
        check(run_cpu_path(inputs), inputs)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_oracle_agrees_with_torch(causal: bool) -> None:
    inputs = make_inputs(Case("square", 2, 65, 65, 4, 2, 16, dtype=FP64, causal=causal))
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(inputs.reference[0], expected.transpose(1, 2))


def test_oracle_by_hand() -> None:
    """Three queries, two keys, d = 1, scale 1, window (0, 0): query 0 sees nothing, 1 sees key 0,
    2 sees key 1. The sink is log 2, a term of 2 in every denominator."""
    q = torch.tensor([1.0, 2.0, 3.0], dtype=FP64).view(1, 3, 1, 1)
    k = torch.tensor([0.5, -1.0], dtype=FP64).view(1, 2, 1, 1)
    v = torch.tensor([10.0, 100.0], dtype=FP64).view(1, 2, 1, 1)
    terms = torch.tensor([0.0, 1.0, -3.0], dtype=FP64).exp() * torch.tensor([0.0, 1.0, 1.0])
    values = torch.tensor([0.0, 10.0, 100.0], dtype=FP64)
    rule = {"softmax_scale": 1.0, "window_size_left": 0, "window_size_right": 0}

    out, lse = reference_attention(q, k, v, **rule)
    torch.testing.assert_close(out.flatten(), values)
    torch.testing.assert_close(lse.flatten(), terms.log())
    sink = torch.tensor([2.0], dtype=FP64).log()
    out, lse = reference_attention(q, k, v, **rule, learnable_sink=sink)
    torch.testing.assert_close(out.flatten(), values * terms / (terms + 2))
    torch.testing.assert_close(lse.flatten(), (terms + 2).log())


def spoil(outputs: GuardedOutputs, how: str) -> None:
    if how == "NaN left in out":
        outputs.out[0, 5, 0, 3] = float("nan")
    elif how == "empty row not 0":
        outputs.out[0, 0, 0, 0] = 1e-30
    elif how == "empty row of lse":
        outputs.lse[0, 0, 0] = -1e30
    elif how == "lse in base 2":
        outputs.lse /= torch.tensor(2.0).log()
    elif how == "one row unnormalised":
        outputs.out[0, -1, 0] *= 1.05
    elif how == "heads exchanged":
        outputs.out.copy_(outputs.out.flip(-2))


@pytest.mark.parametrize(
    "how",
    [
        "NaN left in out",
        "empty row not 0",
        "empty row of lse",
        "lse in base 2",
        "one row unnormalised",
        "heads exchanged",
    ],
)
def test_the_bound_can_fail(how: str) -> None:
    inputs = make_inputs(Case("spoiled", 1, 200, 150, dtype=BF16, causal=True))
    outputs = run_cpu_path(inputs)
    assert_close_to_oracle(outputs.out, outputs.lse, inputs)
    spoil(outputs, how)
    with pytest.raises(AssertionError, match="spoiled"):
        assert_close_to_oracle(outputs.out, outputs.lse, inputs)
