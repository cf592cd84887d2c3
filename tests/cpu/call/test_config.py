from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from cutlass import BFloat16

from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.settings import BwdConfig, FwdConfig
from flash_mask_cute.call.tiles.arch import SM90, SM100, SM103
from flash_mask_cute.call.tiles.config import (
    FwdChoice,
    HeadFacts,
    WalkFacts,
    check_feasible,
    select_fwd_config,
)
from flash_mask_cute.call.tiles.rows import FwdRow
from flash_mask_cute.call.tiles.tables import SM90_FWD, SM100_FWD
from flash_mask_cute.limits import MAX_WIDE_HEAD_DIM
from flash_mask_cute.sm100.exponentials import spread

HEAD_DIMS = range(8, 257, 8)


# so many queries fill whole waves of CTAs, with tiles of 128 rows and of 192
FULL_WAVES = 132 * 128 * 192


def choose(
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    heads_q: int = 4,
    heads_kv: int = 4,
    seqlen_q: int = 1000,
    seqlen_k: int = 500,
    pack_gqa: bool | None = None,
    override: FwdConfig | None = None,
    is_causal: bool = False,
    window: int | None = None,
    block_size: tuple[int, int] | None = None,
    unpackable: str | None = None,
    mask_mod: str | None = None,
    score_mod: str | None = None,
    decode_rows: int | None = None,
    selected_block: int = 0,
    **fields: Any,
) -> FwdChoice:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    problem = AttentionProblem(
        "bfloat16",
        head_dim,
        head_dim_v,
        is_causal=is_causal,
        has_window_left=window is not None,
        has_window_right=window is not None and not is_causal,
        has_lists=block_size is not None,
        mask_mod=mask_mod,
        score_mod=score_mod,
        has_selected=selected_block > 0,
        **fields,
    )
    shapes = FwdShapes(
        1, seqlen_q, seqlen_k, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
    )
    walk = WalkFacts(window, block_size, decode_rows, selected_block)
    return select_fwd_config(problem, shapes, pack_gqa, override, walk, unpackable)


@pytest.mark.parametrize("row", SM100_FWD, ids=lambda row: f"{row.max_dim}-{row.max_dim_v}")
def test_rows_for_blackwell(row: FwdRow) -> None:
    """Each runs as it stands: no field had to be made smaller."""
    is_causal = "full" not in row.masks
    problem = AttentionProblem("bfloat16", row.max_dim, row.max_dim_v, is_causal=is_causal)
    seqlen = max(row.min_seqlen_q, 300 if row.tile_m == 256 or row.cta_pair else 100)
    shapes = FwdShapes(1, seqlen, 300, seqlen, 300, 64, 2, row.max_dim, row.max_dim_v)
    walk = WalkFacts(decode_rows=100 if row.for_decode else None)
    choice = select_fwd_config(problem, shapes, True, walk=walk, spec=SM100)
    assert (choice.tiles.tile_m, choice.tiles.tile_n) == (row.tile_m, 128)
    assert choice.tiles.num_stages == row.num_stages
    assert choice.tiles.stages_q == row.stages_q
    assert choice.tiles.cta_pair == row.cta_pair
    assert row.reason in choice.reason and "because" not in choice.reason
    assert choice.packed_heads == 32
    assert choice.smem_bytes <= 232448


@pytest.mark.parametrize(("dim", "is_refused"), [(192, False), (200, True)])
def test_a_product_that_is_too_wide_for_a_launch(dim: int, is_refused: bool) -> None:
    """Of 512 threads: ptxas would refuse the kernel."""
    shapes = FwdShapes(1, 300, 300, 300, 300, 2, 2, dim, dim)
    override = FwdConfig(tile_m=192, tile_n=16, num_stages=1)
    problem = AttentionProblem("bfloat16", dim, dim)
    if is_refused:
        message = "142 registers of a product exceed the 128 of a launch"
        with pytest.raises(ValueError, match=message):
            select_fwd_config(problem, shapes, override=override)
    else:
        assert select_fwd_config(problem, shapes, override=override).tiles.tile_m == 192


def test_all_head_dims_on_blackwell() -> None:
    """The tiles of a plan hold the heads and are those of its row; a single CTA can have them."""
    for head_dim in HEAD_DIMS:
        for head_dim_v in HEAD_DIMS:
            dims = head_dim, head_dim_v
            problem = AttentionProblem("bfloat16", *dims, is_causal=True)
            for seqlen_q in (100, 300):
                shapes = FwdShapes(1, seqlen_q, 300, seqlen_q, 300, 2, 2, *dims)
                choice = select_fwd_config(problem, shapes, spec=SM100)
                traits = SM100.forward.load_traits()(BFloat16, *dims, choice.tiles.tile_m, 128, 1)
                assert traits.tile_d >= head_dim and traits.tile_dv >= head_dim_v
                rows = ((row.max_dim, row.max_dim_v) for row in SM100_FWD)
                first = next(x for x in rows if x[0] >= head_dim and x[1] >= head_dim_v)
                assert (traits.tile_d, traits.tile_dv) == first
                is_wide = traits.tile_dv > 128
                assert choice.tiles.tile_m == (128 if is_wide else 256)
                assert choice.tiles.cta_pair == (is_wide and seqlen_q > 128)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (FwdConfig(tile_m=192), "tile_m must be 128 or 256 for .* 128/128 on Blackwell, got 192"),
        (FwdConfig(tile_n=64), "tile_n must be 128 on Blackwell, got 64"),
        (FwdConfig(share_qo=True), "share_qo is not supported on Blackwell"),
        (FwdConfig(polynomial=14), "polynomial must be a multiple of 4 up to 64, got 14"),
        (FwdConfig(polynomial=72), "polynomial must be a multiple of 4 up to 64, got 72"),
        (FwdConfig(stages_q=2, num_stages=3), "exceed 232448"),
    ],
)
def test_what_cannot_run_on_blackwell_is_named(override: FwdConfig, message: str) -> None:
    shapes = FwdShapes(1, 300, 300, 300, 300, 2, 2, 128, 128)
    with pytest.raises(ValueError, match=message):
        select_fwd_config(
            AttentionProblem("bfloat16", 128, 128), shapes, override=override, spec=SM100
        )


@pytest.mark.parametrize(("spec", "share"), [(SM100, 28), (SM103, 0)])
def test_exponentials_by_polynomial(spec: Any, share: int) -> None:
    """Of 128; 10.3 computes them at twice the rate."""
    problem, shapes = AttentionProblem("bfloat16", 64, 64), FwdShapes(1, 9, 9, 9, 9, 2, 2, 64, 64)
    assert select_fwd_config(problem, shapes, spec=spec).tiles.polynomial == share
    for other in (0, 8, 64):
        override = FwdConfig(polynomial=other)
        choice = select_fwd_config(problem, shapes, override=override, spec=spec)
        assert choice.tiles.polynomial == other
        assert spec.forward.options(choice.tiles)["polynomial"] == other


def test_a_polynomial_is_refused_on_hopper() -> None:
    problem, shapes = AttentionProblem("bfloat16", 64, 64), FwdShapes(1, 9, 9, 9, 9, 2, 2, 64, 64)
    assert "polynomial" not in SM90.forward.options(select_fwd_config(problem, shapes).tiles)
    with pytest.raises(ValueError, match="polynomial must be 0 but on Blackwell, got 8"):
        select_fwd_config(problem, shapes, override=FwdConfig(polynomial=8))


def test_places_of_exponentials_by_polynomial() -> None:
    """At equal distances, so that both pipes have work at any time, in the first columns."""
    assert spread(24, 96, 4) == [(2, 6, 10, 14)] * 3 + [()]
    for polynomial, columns in product(range(0, 68, 4), (96, 128)):
        places = spread(polynomial, columns, 4)
        assert [len(x) for x in places[columns // 32 :]] == [0] * (4 - columns // 32)
        counts = [len(x) for x in places[: columns // 32]]
        assert sum(counts) == polynomial // 2 and max(counts) - min(counts) <= 1
        assert all(0 <= i < 16 for x in places for i in x)


def test_pairs_of_ctas_are_refused_on_hopper() -> None:
    with pytest.raises(ValueError, match="cta_pair is not supported on Hopper"):
        choose(override=FwdConfig(cta_pair=True))


def test_heads_that_do_not_divide_a_warp_are_not_packed_on_blackwell() -> None:
    shapes = FwdShapes(1, 64, 300, 64, 300, 64, 1, 128, 128)
    problem = AttentionProblem("bfloat16", 128, 128)
    assert select_fwd_config(problem, shapes).packed_heads == 64
    assert select_fwd_config(problem, shapes, spec=SM100).packed_heads == 1
    with pytest.raises(NotImplementedError, match="at most 32 query heads.*got 64"):
        select_fwd_config(problem, shapes, True, spec=SM100)


def test_every_pair_of_head_dims_has_tiles_that_run() -> None:
    for head_dim in HEAD_DIMS:
        for head_dim_v in HEAD_DIMS:
            choice = choose(head_dim, head_dim_v)
            smem_bytes, refusal = check_feasible(HeadFacts(head_dim, head_dim_v), choice.tiles)
            assert refusal is None, (head_dim, head_dim_v, refusal)
            assert smem_bytes == choice.smem_bytes
            # smaller key blocks than this leave the tensor cores mostly waiting
            assert choice.tiles.tile_n >= 48, (head_dim, head_dim_v, choice)


def _blocks_of(row: FwdRow) -> tuple[int, int] | None:
    """The size of blocks of the lists that a row is for."""
    if row.lists_per_warpgroup:
        return 64, row.tile_n
    return (row.tile_m, row.tile_n) if row.native_block_lists else None


@pytest.mark.parametrize("row", SM90_FWD, ids=lambda row: f"{row.max_dim}-{row.max_dim_v}")
def test_a_row_runs_as_written_at_its_own_head_dims(row: Any) -> None:
    fills_no_wave = "last wave" in row.reason
    # where keys are in pages, or split
    is_shared = "share values" in row.reason
    choice = choose(
        row.max_dim - 8 * row.splits_sectors,
        row.max_dim_v,
        seqlen_q=row.max_seqlen_q or (1000 if fills_no_wave else FULL_WAVES),
        seqlen_k=row.min_seqlen_k or row.max_seqlen_k or 500,
        is_causal="full" not in row.masks and not fills_no_wave,
        has_softcap=row.needs_sfu,
        window=row.max_window,
        block_size=_blocks_of(row),
        decode_rows=row.tile_m if row.for_decode or is_shared else None,
        selected_block=row.max_selected or 0,
        bias_bits=32 * row.caches_bias,
        **{kind: "key" for kind in ("mask_mod", "score_mod") if kind in row.masks},
    )
    for field in ("tile_m", "tile_n", "num_stages", "stages_q", "share_qo", "cta_pair"):
        assert getattr(choice.tiles, field) == getattr(row, field)
    assert row.reason in choice.reason
    assert "because" not in choice.reason


def test_rows_are_reachable() -> None:
    """A row that an earlier one covers would never be used."""
    for position, row in enumerate(SM90_FWD):
        covered = any(
            before.max_dim >= row.max_dim
            and before.max_dim_v >= row.max_dim_v
            and (not before.masks or (row.masks and set(row.masks) <= set(before.masks)))
            and before.max_window is None
            and not before.native_block_lists
            and not before.lists_per_warpgroup
            and not before.needs_sfu
            and before.min_seqlen_k <= row.min_seqlen_k
            and before.gain is None
            and before.max_seqlen_q is None
            and not before.for_decode
            and _serves_choices_of(before, row)
            and before.above_dim <= row.above_dim
            and not before.splits_sectors
            and not before.caches_bias
            and not before.needs_rows
            for before in SM90_FWD[:position]
        )
        assert not covered, row
    assert (SM90_FWD[-1].max_dim, SM90_FWD[-1].max_dim_v) == (MAX_WIDE_HEAD_DIM, MAX_WIDE_HEAD_DIM)


def _serves_choices_of(before: FwdRow, row: FwdRow) -> bool:
    if before.max_selected is None:
        return True
    return row.max_selected is not None and row.max_selected <= before.max_selected


def test_a_row_that_does_not_fit_is_made_smaller_and_says_so() -> None:
    choice = choose(200, 256)
    assert not choice.tiles.share_qo  # the output would not fit the query's place
    assert choice.tiles.tile_n < 80
    assert "shared memory" in choice.reason or "share_qo" in choice.reason


# -- override -----------------------------------------------------------------------------------


def test_override_is_merged_field_by_field() -> None:
    plain = choose().tiles
    changed = choose(override=FwdConfig(tile_n=64))
    assert changed.tiles.tile_n == 64 != plain.tile_n
    assert changed.tiles.tile_m == plain.tile_m
    assert "tile_n=64" in changed.reason


def test_fields_not_given_make_room_for_those_given() -> None:
    choice = choose(128, is_causal=True, override=FwdConfig(num_stages=3))
    assert choice.tiles.num_stages == 3
    assert choice.tiles.stages_q == 1
    assert choose(128, is_causal=True).tiles.stages_q == 2
    assert check_feasible(HeadFacts(128, 128), choice.tiles)[1] is None


def test_a_mapping_is_a_config() -> None:
    assert FwdConfig.from_value({"tile_n": 64, "share_qo": False}) == FwdConfig(
        tile_n=64, share_qo=False
    )
    assert FwdConfig.from_value(None) is None
    config = FwdConfig(tile_m=128)
    assert FwdConfig.from_value(config) is config


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ({"tile_k": 3}, ValueError, "tile_k"),
        ({"tile_n": "64"}, TypeError, "tile_n"),
        ({"tile_n": True}, TypeError, "tile_n"),
        ({"share_qo": 1}, TypeError, "share_qo"),
        ({"cta_pair": 1}, TypeError, "cta_pair"),
        ({"skip_blocks": 0}, TypeError, "skip_blocks"),
        ({"tile_n": 0}, ValueError, "tile_n"),
        ([64], TypeError, "list"),
        (64, TypeError, "int"),
    ],
)
def test_bad_config_values(value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"config.*{said}"):
        FwdConfig.from_value(value)


def test_a_config_that_exists_has_valid_values() -> None:
    """So nobody checks it again."""
    with pytest.raises(TypeError, match="config.tile_m must be of type int, got 128.0"):
        FwdConfig(tile_m=128.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config.stages_q must be at least 1, got 0"):
        replace(BwdConfig(), stages_q=0)
    assert BwdConfig(value_cols=0).value_cols == 0


@pytest.mark.parametrize(
    ("head_dim", "config", "said"),
    [
        (128, FwdConfig(tile_m=100), "tile_m"),
        (128, FwdConfig(tile_n=40), "tile_n"),
        (128, FwdConfig(tile_n=512), "tile_n"),
        (256, FwdConfig(tile_n=128), "bytes of shared memory"),
        (256, FwdConfig(tile_n=80, share_qo=False), "bytes of shared memory"),
    ],
)
def test_a_config_that_cannot_run_is_refused(head_dim: int, config: FwdConfig, said: str) -> None:
    with pytest.raises(ValueError, match=f"config .*{said}"):
        choose(head_dim, override=config)


def test_an_output_larger_than_the_query_cannot_take_its_place() -> None:
    with pytest.raises(ValueError, match="config .*share_qo"):
        choose(64, 128, override=FwdConfig(share_qo=True))


# -- packing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqlen_q", "pack_gqa"), [(127, None), (128, None), (5000, True)])
def test_a_reason_says_whether_heads_share_a_tile(seqlen_q: int, pack_gqa: bool | None) -> None:
    choice = choose(heads_q=8, heads_kv=2, seqlen_q=seqlen_q, pack_gqa=pack_gqa)
    assert choice.packed_heads == (1 if seqlen_q == 128 else 4)
    assert ("4 query heads share a tile" in choice.reason) == (choice.packed_heads > 1)
    assert "share" not in choose(heads_q=8, heads_kv=8, seqlen_q=1).reason


def test_packing_them_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="pack_gqa=True .* some_argument"):
        choose(heads_q=8, heads_kv=2, pack_gqa=True, unpackable="some_argument")


def test_packing_that_cannot_be_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="pack_gqa=True .*at most 64 .*got 65"):
        choose(heads_q=2 * 65, heads_kv=2, pack_gqa=True)
