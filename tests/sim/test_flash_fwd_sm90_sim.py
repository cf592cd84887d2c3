"""What is Hopper's own of the compiled forward, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import cutlass
import mask_cases
import pytest
import torch
from cases import (
    BF16,
    COLUMN_DOCUMENT_CASES,
    FP16,
    FP32,
    MASK_BITS_CASES,
    MASK_BITS_VARLEN_CASES,
    Case,
)
from eager import assert_close_to_oracle
from inputs import Inputs, make_growing_inputs, make_inputs, of_one_column_mask
from mask_cases import Extents, MaskRecipe, ScoreRecipe
from recording import calls_of
from simulated_forward import DELAY_SEEDS, launch_on_simulator, run_sim
from torch import Tensor

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call.documents import PackedForward
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.tiles.rows import FwdRow
from flash_mask_cute.call.tiles.tables import SM90_FWD
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.rules import stream_k_walks

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def test_operands_that_share_elements(simulator: ModuleType) -> None:
    """With themselves: rows that overlap, and heads and rows that are all one."""
    inputs = make_inputs(Case("shared", 1, 127, 129))
    q = inputs.q.as_strided(inputs.q.shape, (0, 64, 32, 1))
    k, v = inputs.k[:, :, :1].expand_as(inputs.k), inputs.v[:, :1].expand_as(inputs.v)
    run_sim(simulator, replace(inputs, q=q, k=k, v=v))


@pytest.mark.parametrize("case", MASK_BITS_CASES)
def test_mask_bits_for_all_heads(simulator: ModuleType, case: Case) -> None:
    inputs = make_inputs(case)
    run_sim(simulator, inputs)
    assert len(simulator.RESULTS) == 2, "one kernel stores, one reads"
    if case.blocks is not None:
        run_sim(simulator, inputs, seeds=(None,), config={"tile_m": 192, "tile_n": 80})
        run_sim(simulator, inputs, seeds=(None,), config={"skip_blocks": False})


@pytest.mark.parametrize("case", COLUMN_DOCUMENT_CASES)
def test_documents_of_a_mask(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """As packed sequences, many of them empty."""
    packed = calls_of(PackedForward, monkeypatch)
    inputs = make_inputs(case)
    mask = ColumnMask(inputs.keywords["startend_row_indices"], case.causal, documents=True)
    assert len(mask.split(case.batch).cu_seqlens.unique()) > case.batch + 1
    run_sim(simulator, inputs, seeds=(1,), startend_row_indices=mask)
    assert len(packed) == 1


@pytest.mark.parametrize("case", MASK_BITS_VARLEN_CASES)
def test_mask_bits_for_packed_sequences(simulator: ModuleType, case: Case) -> None:
    inputs = make_inputs(case)
    run_sim(simulator, inputs, seeds=(1,))
    assert len(simulator.RESULTS) == 2, "one call stores, one reads"
    run_sim(simulator, inputs, seeds=(None,), config={"skip_blocks": False})


@pytest.mark.parametrize(
    "position", range(len(MASK_BITS_CASES)), ids=lambda i: MASK_BITS_CASES[i].id
)
def test_mask_bits_by_parts_of_the_queries(simulator: ModuleType, position: int) -> None:
    """Room for the mask bits of one block of queries: a launch each, of a part of the call."""
    inputs = make_inputs(MASK_BITS_CASES[position])
    case = inputs.case
    entries = case.batch if case.mask_mod == "documents" else 1
    limits = Limits(max_pairs=entries * case.seqlen_k * 192, min_tiles=0)
    run_sim(simulator, inputs, seeds=((1,), (None,))[position % 2], limits=limits)
    tile_m = 192 if case.head_dim == 64 else 128
    assert len(simulator.RESULTS) == 2 * -(-case.seqlen_q // tile_m)


def test_results_by_head_are_no_mask_bits(simulator: ModuleType) -> None:
    run_sim(simulator, make_inputs(Case("by-head", 1, 129, 200, 4, 4, mask_mod="eviction")))
    assert len(simulator.RESULTS) == 1


@pytest.mark.parametrize("pack_gqa", [False, True])
def test_rows_that_are_never_reached_may_be_any_number(
    simulator: ModuleType, pack_gqa: bool
) -> None:
    case = Case("far", 1, 150, 300, 4, 1, column="documents2", pack_gqa=pack_gqa)
    inputs = make_inputs(case)
    indices = inputs.column_mask.startend_row_indices
    far = indices >= case.seqlen_q
    assert far.any()
    indices[far] = torch.iinfo(torch.int32).max
    run_sim(simulator, inputs, seeds=(None,))


@pytest.mark.parametrize("num_blocks", range(2, 6))
def test_whole_blocks_that_follow_each_other(simulator: ModuleType, num_blocks: int) -> None:
    """Their P changes places from one to the next, and has to lie in the first one in the end."""
    case = Case("whole", 1, 200, 128 * num_blocks, 1, 1, window_left=128 * num_blocks)
    run_sim(simulator, make_inputs(case), seeds=(None, 1), config={"tile_m": 128, "tile_n": 128})


# Blocks that only some warpgroups of a tile see: on the diagonal, at both sides of a window, and at
# short documents, of which some hide more blocks in a row from a warpgroup than there are stages.
OWN_ROWS_CASES = (
    Case("causal", 1, 400, 700, 1, 1, causal=True),
    Case("window", 1, 400, 700, 2, 1, window_left=150, window_right=0),
    Case("narrow-window", 1, 400, 400, 1, 1, window_left=9, window_right=3),
    Case("documents", 1, 600, 600, 1, 1, mask_mod="documents", blocks=(192, 640)),
    Case("columns", 1, 400, 900, 1, 1, column="stepped2"),
    Case("varlen", lengths_q=(250, 0, 129), lengths_k=(250, 77, 129), causal=True, window_left=40),
)
OWN_ROWS_TILES = {64: {"tile_m": 192, "tile_n": 128}, 128: {"tile_m": 192, "tile_n": 80}}


@pytest.mark.parametrize("case", OWN_ROWS_CASES)
@pytest.mark.parametrize("head_dim", OWN_ROWS_TILES)
def test_blocks_that_a_warpgroup_does_not_see(
    simulator: ModuleType, head_dim: int, case: Case
) -> None:
    tiles = OWN_ROWS_TILES[head_dim] | {"num_stages": 3, "stages_q": 1}
    inputs = make_inputs(replace(case, head_dim=head_dim, head_dim_v=head_dim))
    run_sim(simulator, inputs, config=tiles)


@pytest.mark.parametrize("tile_n, num_squares", [(64, 6), (128, 7)])
def test_a_warpgroup_computes_what_its_rows_see(
    simulator: ModuleType, tile_n: int, num_squares: int
) -> None:
    """6 of 9 squares of 64 x 64 are seen; one more is past the keys, in a block without halves."""
    inputs = make_inputs(Case("squares", 1, 192, 192, 1, 1, head_dim=64, causal=True))
    run_sim(simulator, inputs, seeds=(None,), config={"tile_m": 192, "tile_n": tile_n})
    computed = simulator.RESULTS[-1]["ops"]["ex2.approx.ftz.f32"]
    square = 64 * 64 // 32  # a warp's instruction is 32 exponentials
    assert num_squares * square <= computed < (num_squares + 1) * square


def test_one_column_mask_for_many_calls(simulator: ModuleType) -> None:
    """Its bounds are kept, and follow the tensor when it changes."""
    shape = {"batch": 1, "seqlen_q": 129, "seqlen_k": 200, "heads_q": 1, "heads_kv": 1}
    for inputs, more in of_one_column_mask(**shape):
        run_sim(simulator, inputs, seeds=(None,), **more)


def test_a_mask_mod_that_is_asked_for_wide_heads(simulator: ModuleType) -> None:
    """By two warps: beside a warpgroup of mask warps a product would be too wide for the launch."""
    case = Case("asked", 1, 70, 130, 1, 1, head_dim=256, head_dim_v=256, mask_mod="eviction")
    run_sim(simulator, make_inputs(case), seeds=(1,))


def test_lists_without_full_blocks(simulator: ModuleType) -> None:
    inputs = make_inputs(Case("no-full", 1, 200, 300, 1, 1, mask_mod="causal_offset"))
    idx = torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32)[None, None]
    cnt = torch.tensor([[[2, 2]]], dtype=torch.int32)  # key block 2 lies right of the diagonal
    lists = BlockSparseTensorsTorch(cnt, idx, block_size=(128, 128))
    run_sim(simulator, inputs, seeds=(None,), block_sparse_tensors_torch=lists)


@pytest.mark.parametrize("blocks", [(128, 128), (64, 128), (96, 64)], ids=str)
@pytest.mark.parametrize("heads_q", [8, 6])
@pytest.mark.parametrize("seqlen_q", [3, 100])
def test_heads_share_tiles_beside_lists_for_all_heads(
    simulator: ModuleType, blocks: tuple[int, int], heads_q: int, seqlen_q: int
) -> None:
    """In splits and in one pass. 100 queries of 4 heads are several tiles of a row of blocks."""
    case = Case("lists", 1, seqlen_q, 700, heads_q, 2, 64, mask_mod="documents", blocks=blocks)
    inputs = make_inputs(case)
    lists = inputs.keywords["block_sparse_tensors_torch"]
    assert lists.mask_block_cnt.shape[1] == 1
    for num_splits in (0, 1):
        run_sim(simulator, inputs, seeds=(1,), num_splits=num_splits, pack_gqa=True)


TILE_FIELDS = ("tile_m", "tile_n", "num_stages", "stages_q", "share_qo")


@pytest.mark.parametrize(
    "row",
    [row for row in SM90_FWD if not row.native_block_lists],
    ids=lambda row: f"{row.max_dim}-{row.tile_m}x{row.tile_n}",
)
def test_the_tiles_of_every_table_row(simulator: ModuleType, row: FwdRow) -> None:
    """Also those that only long inputs or wide heads would choose."""
    case = Case(
        "row", 1, 200, 230, 2, 1, head_dim=row.max_dim, head_dim_v=row.max_dim_v, causal=True
    )
    tiles = {name: getattr(row, name) for name in TILE_FIELDS}
    run_sim(simulator, make_inputs(case), config=tiles)


def test_four_warpgroups(simulator: ModuleType) -> None:
    """Tiles that no row has, but config= may ask for."""
    case = Case("four", 1, 300, 230, 2, 1, head_dim=64, causal=True)
    run_sim(simulator, make_inputs(case), config={"tile_m": 256, "tile_n": 64})


# How a maximum that grew is taken: scores are kept, computed again, or searched before.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "head_dim, tile_m, tile_n, column",
    [(64, 192, 128, 3), (64, 192, 128, 100), (128, 192, 80, 70), (128, 128, 128, 4)],
)
def test_maxima_that_outgrow_the_one_in_use(
    simulator: ModuleType, head_dim: int, tile_m: int, tile_n: int, column: int, causal: bool
) -> None:
    """P is taken anew and O rescaled, in some warps and rows and not in others."""
    inputs = make_growing_inputs(head_dim, tile_n, column, causal)
    run_sim(simulator, inputs, config={"tile_m": tile_m, "tile_n": tile_n})


@pytest.mark.parametrize(
    "head_dim, tile_m, tile_n, column, by_polynomial",
    [(128, 128, 128, 4, True), (128, 128, 128, 17, False), (64, 192, 96, 4, True)],
)
def test_maxima_that_outgrow_the_one_in_use_below_a_cap(
    simulator: ModuleType, head_dim: int, tile_m: int, tile_n: int, column: int, by_polynomial: bool
) -> None:
    """The exponential that says so is one of those for which the pipe of tanh is spared, or not."""
    from flash_mask_cute.core.softmax import PERIOD

    # a thread has two of every eight columns
    assert ((column // 8 * 2 + column % 2) % PERIOD == 0) == by_polynomial
    plain = make_growing_inputs(head_dim, tile_n, column)
    case = replace(plain.case, softcap=200.0)
    inputs = Inputs(case, plain.q, plain.k, plain.v, plain.keywords | {"softcap": 200.0})
    run_sim(simulator, inputs, config={"tile_m": tile_m, "tile_n": tile_n})


def test_a_sink_of_minus_infinity_is_no_sink(simulator: ModuleType) -> None:
    inputs = make_inputs(Case("sink-none", 1, 200, 65, causal=True, sink=FP32))
    inputs.keywords["learnable_sink"].fill_(float("-inf"))
    run_sim(simulator, inputs)


@pytest.mark.parametrize("used", [False, True], ids=["full", "seqused"])
def test_what_other_sequences_hold_does_not_matter(simulator: ModuleType, used: bool) -> None:
    """NaN in the keys and values of the neighbours, in rows not in use and behind the last row."""
    lengths_q, lengths_k = (65, 20, 5, 9, 130), (30, 65, 0, 7, 129)
    seqused_k = (29, 65, 0, 7, 65) if used else None
    case = Case(
        "neighbours", lengths_q=lengths_q, lengths_k=lengths_k, heads_q=2, heads_kv=1,
        head_dim=64, seqused_k=seqused_k,
    )  # fmt: skip
    inputs = make_inputs(case)
    tail = torch.zeros((9, 1, 64), dtype=BF16)
    k, v = (torch.cat([x, tail]) for x in (inputs.k, inputs.v))
    starts = [sum(lengths_k[:i]) for i in range(6)]
    wrong = torch.ones(len(k), dtype=torch.bool)
    for i in (0, 2, 4):
        wrong[starts[i] : starts[i] + (seqused_k or lengths_k)[i]] = False
    k[wrong] = v[wrong] = float("nan")
    poisoned = Inputs(case, inputs.q, k, v, inputs.keywords)
    expected, expected_lse = inputs.reference
    of_others = torch.cat([torch.full((n,), i % 2 == 1) for i, n in enumerate(lengths_q)])
    for seed in DELAY_SEEDS:
        simulator.OPTIONS["delay"] = seed
        if seed is None:
            del simulator.OPTIONS["delay"]
        out, lse = launch_on_simulator(poisoned)
        out[of_others] = expected[of_others].to(BF16)
        lse.mT[of_others] = expected_lse.mT[of_others].float()
        assert_close_to_oracle(out, lse, inputs)


def _distance_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, aux: Any) -> Any:
    return score + aux[0][q_idx[0]] + aux[0][kv_idx[0]]


@pytest.mark.parametrize("empty", ["seqused_q", "seqused_k"])
def test_score_mod_is_not_asked_in_an_empty_sequence(simulator: ModuleType, empty: str) -> None:
    """Its position would be -1; the simulator reports a read before the start of the table."""
    simulator.RESULTS.clear()
    q, k, v = (torch.randn(2, 70, 1, 64).bfloat16() for _ in range(3))
    used = torch.tensor([65, 0], dtype=torch.int32)
    keywords = {"score_mod": _distance_bias, "aux_tensors": [torch.zeros(70)], empty: used}
    launch_on_simulator(Inputs(Case("empty", 2, 70, 70, 1, 1, head_dim=64), q, k, v, keywords))
    assert not simulator.RESULTS[-1]["warnings"]


def test_lists_end_where_the_queries_do(simulator: ModuleType) -> None:
    """A slot of 300 rows of which 100 are in use has more query blocks than its lists."""
    edges = torch.tensor([0, 300], dtype=torch.int32)
    q, k, v = (torch.randn(300, 1, 64).bfloat16() for _ in range(3))
    cnt, idx = torch.ones((1, 1, 1), dtype=torch.int32), torch.zeros((1, 1, 1, 3)).int()
    keywords = {
        "cu_seqlens_q": edges,
        "cu_seqlens_k": edges,
        "max_seqlen_q": 100,
        "max_seqlen_k": 300,
        "seqused_q": torch.tensor([100], dtype=torch.int32),
        "block_sparse_tensors_torch": BlockSparseTensorsTorch(cnt, idx, block_size=(128, 128)),
    }
    inputs = Inputs(Case("slot", 1, 300, 300, 1, 1, head_dim=64), q, k, v, keywords)
    out, _ = launch_on_simulator(inputs)
    scores = q[:100, 0].double() @ k[:128, 0].double().T * 64**-0.5
    expected = torch.softmax(scores, -1) @ v[:128, 0].double()
    assert (out[:100, 0].double() - expected).abs().max() < 0.02
    assert not out[100:].any()


PLACE_BIAS = ScoreRecipe(
    lambda score, b, h, q_idx, kv_idx, aux: score + aux[-1][h[0], q_idx[0], kv_idx[0]],
    lambda score, b, h, q, k, aux: score + aux[-1][h, q, k].to(score.dtype),
    lambda extents, generator: 3 * torch.randn(
        (extents.heads_q, extents.seqlen_q, extents.seqlen_k), generator=generator
    ),
)  # fmt: skip


@pytest.mark.parametrize("heads, head_dim", [(1, 128), (2, 64), (8, 128), (16, 64)])
def test_score_mod_is_told_every_position(
    simulator: ModuleType, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles end inside the queries or reach past them; reads outside of the table are reported."""
    monkeypatch.setitem(mask_cases.SCORE_MODS, "place", PLACE_BIAS)
    queries = 320 // heads if heads < 16 else 21
    case = Case(
        "places", 1, queries, 300, heads, 1, head_dim=head_dim, score_mod="place", pack_gqa=True
    )
    run_sim(simulator, make_inputs(case), seeds=(None, 1))


def test_score_mod_is_told_the_positions_of_half_a_block(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mask_cases.SCORE_MODS, "place", PLACE_BIAS)
    case = Case(
        "half", 1, 400, 400, 1, 1, head_dim=64, causal=True, window_left=150, score_mod="place"
    )
    tiles = {"tile_m": 192, "tile_n": 128, "num_stages": 3, "stages_q": 1}
    run_sim(simulator, make_inputs(case), seeds=(None,), config=tiles)


def _strided(values: Tensor) -> Tensor:
    """The same tensor in another order of memory, batch innermost, with gaps between queries."""
    memory = values.permute(3, 1, 2, 0).repeat_interleave(2, dim=2).clone()
    memory[:, :, 1::2] = 77
    return memory[:, :, ::2].permute(3, 1, 2, 0)


def _four_dims_bias(dtype: torch.dtype) -> ScoreRecipe:
    def cute_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score + aux[-1][b[0], h[0], q[0], k[0]].to(cutlass.Float32) * 0.25

    def dense(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, aux: list[Tensor]) -> Tensor:
        return score + aux[-1][b, h, q, k].to(score.dtype) * 0.25

    def make(extents: Extents, generator: torch.Generator) -> Tensor:
        return _strided(torch.randint(-16, 17, extents, generator=generator).to(dtype))

    return ScoreRecipe(cute_mod, dense, make)


# an int64 whose lower half is 0: read as an int32, it would hide its key from every query
FAR = 2**40


def _four_dims_ends(dtype: torch.dtype) -> MaskRecipe:
    """Seen if the query comes before the pair's own end; a third are behind all queries."""

    def cute_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q[0] < aux[0][b[0], h[0], q[0], k[0]]

    def dense(b: int, h: int, q: Tensor, k: Tensor, aux: list[Tensor]) -> Tensor:
        return q < aux[0][b, h, q, k]

    def make(extents: Extents, generator: torch.Generator) -> Tensor:
        ends = torch.randint(0, 200, extents, generator=generator)
        never = torch.rand(extents, generator=generator) < 1 / 3
        far = FAR if dtype == torch.int64 else 256
        return _strided(ends.masked_fill(never, far).to(dtype))

    return MaskRecipe(cute_mod, dense, make, per_batch=True, per_head=True)


@pytest.mark.parametrize(
    "of_scores, of_mask",
    [(FP16, torch.int64), (BF16, FP16), (torch.int64, BF16)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_aux_tensors_of_four_strided_dimensions(
    simulator: ModuleType,
    of_scores: torch.dtype,
    of_mask: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(mask_cases.SCORE_MODS, "four", _four_dims_bias(of_scores))
    monkeypatch.setitem(mask_cases.MASK_MODS, "four", _four_dims_ends(of_mask))
    case = Case("four", 2, 100, 150, 2, 1, head_dim=64, score_mod="four", mask_mod="four")
    inputs = make_inputs(case)
    aux = inputs.mask_keywords["aux_tensors"]
    assert [x.dtype for x in aux] == [of_mask, of_scores]
    assert all(x.shape == (2, 2, 100, 150) and 1 not in x.stride()[1:] for x in aux)
    run_sim(simulator, inputs, seeds=(None, 1))


def test_work_tiles_claimed_late(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few long walks are; no other test has these head dimensions, so the kernel is new."""
    monkeypatch.setattr(stream_k_walks, "LATE_BLOCKS", 1)
    case = Case("late", 2, 400, 400, 3, 3, head_dim=56, head_dim_v=24, causal=True)
    run_sim(simulator, make_inputs(case), seeds=DELAY_SEEDS[:2])
