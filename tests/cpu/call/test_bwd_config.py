"""Tiles of the backward: the rows of its table, overrides, and pairs of CTAs."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest

from flash_mask_cute.call.problem import TuningClass
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.call.tiles.arch import SM100
from flash_mask_cute.call.tiles.config import BwdTiles, WalkFacts, select_bwd_config
from flash_mask_cute.call.tiles.tables import SM90_BWD, SM100_BWD

STAGES = ("stages_q", "stages_do", "stages_kv")


@pytest.mark.parametrize("row", SM90_BWD, ids=lambda row: f"{row.max_dim}-{row.tile_m}")
def test_a_row_runs_as_written(row: Any) -> None:
    dims, kind = (row.max_dim, row.max_dim_v), (row.masks or (TuningClass.EDGES,))[0]
    num_sms = 2 if row.cta_pair else 1
    seqlen_k = row.min_seqlen_k or row.max_seqlen_k or 8192
    more: dict[str, Any] = {}
    if row.query_lists:
        more = {"query_lists": row.query_lists, "listed_rows": 16}
    elif row.lists_per_warpgroup:
        more = {"walk": WalkFacts(has_lists=True, lists_per_warpgroup=(64, 64))}
    choice = select_bwd_config(*dims, kind, seqlen_k=seqlen_k, num_sms=num_sms, **more)
    for field in asdict(choice.tiles).keys() - {"skip_blocks", "splits_group"}:
        assert getattr(choice.tiles, field) == getattr(row, field)
    assert row.reason in choice.reason and "because" not in choice.reason
    assert not row.query_lists or choice.tile_n == row.query_lists


def runs(head_dim: int, head_dim_v: int, tiles: BwdTiles) -> bool:
    from cutlass import BFloat16

    from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

    of_plan = ("tile_m", *STAGES, "value_cols", "cta_pair", "splits_keys")
    fields = {name: x for name, x in asdict(tiles).items() if name in of_plan}
    return BwdTraits(BFloat16, head_dim, head_dim_v, **fields).infeasible() is None


def test_every_pair_of_head_dims_has_tiles_that_run() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            choice = select_bwd_config(head_dim, head_dim_v, "other")
            assert runs(head_dim, head_dim_v, choice.tiles)
            assert choice.tile_d >= head_dim
            splits_keys = head_dim > 128 and (
                max(head_dim, head_dim_v) <= 160 or (head_dim <= 192 and head_dim_v <= 128)
            )
            assert choice.tiles.splits_keys == splits_keys
            is_narrow = max(head_dim, head_dim_v) <= 128
            assert choice.tile_n == (128 if is_narrow or splits_keys else 64)
            in_pairs = head_dim > 192 or (head_dim > 128 and head_dim_v <= 192 and not splits_keys)
            assert choice.tiles.cta_pair == in_pairs
            assert choice.tiles.clears_dq == in_pairs
            assert choice.cluster_tile_n == choice.tile_n * (2 if choice.tiles.cta_pair else 1)


OVERRIDES = [
    {"tile_m": tile_m, "stages_kv": stages}
    for tile_m in (64, 128)
    for stages in (1, 2)
] + [{"stages_q": 1}, {"stages_do": 1, "skip_blocks": False}]  # fmt: skip


@pytest.mark.parametrize("given", OVERRIDES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_an_override_is_kept_and_the_rest_made_to_fit(dim: int, given: dict[str, Any]) -> None:
    """Refused only if nothing runs that has the given fields."""
    unchanged = select_bwd_config(dim, dim, "other").tiles
    free = {name: (1, 2) for name in STAGES if name not in given}
    free["value_cols"] = (0, unchanged.value_cols)
    row = {"tile_m": unchanged.tile_m} | given
    feasible = [
        tiles
        for in_pairs in {False, unchanged.cta_pair}
        for values in itertools.product(*free.values())
        if runs(
            *(dim, dim),
            tiles := BwdTiles(
                **row,
                **dict(zip(free, values, strict=True)),
                **dict.fromkeys(("clears_dq", "cta_pair"), in_pairs),
            ),
        )
    ]
    try:
        choice = select_bwd_config(dim, dim, "other", BwdConfig(**given))
    except ValueError as error:
        assert not feasible and str(given) in str(error)
        return
    assert choice.tiles in feasible
    assert f"config= sets {next(iter(given))}=" in choice.reason


WIDE = {"head_dim": 256, "head_dim_v": 256, "tuning_class": "full"}


def test_wide_heads_are_for_pairs_of_ctas() -> None:
    choice = select_bwd_config(**WIDE)
    assert choice.tiles.cta_pair and (choice.tile_n, choice.cluster_tile_n) == (64, 128)
    for said in ("192 < head_dim <= 256", "deterministic=False", "no soft cap and no score_mod"):
        assert said in choice.reason


SPLIT = {"head_dim": 192, "head_dim_v": 128, "tuning_class": "full"}
SHARED = {
    "score_mod": {"modifier": "score_mod", "tuning_class": "score_mod"},
    "softcap": {"modifier": "softcap"},
    "cta_pair=True": {"override": BwdConfig(cta_pair=True)},
    "splits_keys=False": {"override": BwdConfig(splits_keys=False)},
    "FlashAttentionBackwardSm100": {"kernel": SM100.backward},
}


def test_wide_heads_of_which_each_warpgroup_has_keys() -> None:
    """Each has half of the columns of dQ, in one product."""
    from cutlass import BFloat16

    from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

    for dims, cols in (((192, 128), 192), ((160, 160), 160), ((136, 8), 160)):
        choice = select_bwd_config(*dims, "causal", deterministic=True)
        assert choice.tiles.splits_keys and not choice.tiles.clears_dq
        assert choice.tile_n == choice.cluster_tile_n == 128
        for said in ("128 < head_dim <=", "half as often", "no soft cap and no score_mod"):
            assert said in choice.reason
        traits = BwdTraits(BFloat16, *dims, 64, stages_do=1, splits_keys=True)
        (product,) = traits.columns.products_dq(0)
        assert product == ((0, cols // 2, 2), 0)
        assert traits.columns.sizes_dq == (64 * cols,) and traits.bytes_dq == 64 * cols * 4


@pytest.mark.parametrize("what", SHARED)
def test_what_keeps_keys_shared(what: str) -> None:
    """Then another row is used, and what a config asks for is refused by name."""
    call = SPLIT | SHARED[what]
    assert not select_bwd_config(**call).tiles.splits_keys
    asks = replace(call.get("override", BwdConfig()), splits_keys=True)
    if what != "splits_keys=False":
        with pytest.raises(ValueError, match=f"splits_keys=True is not for .*{what}"):
            select_bwd_config(**call | {"override": asks})


def test_keys_of_each_warpgroup_that_cannot_run() -> None:
    def select(*dims: int, kind: str = "full", **given: Any) -> BwdTiles:
        return select_bwd_config(*dims, kind, BwdConfig(**given)).tiles

    for dims, why in (
        ((128, 128), "is for heads wider than 128, got 128/128"),
        ((192, 192), "is for at most 320 columns of keys and values, got 192 and 192"),
        ((128, 200), "is for at most 320 columns of keys and values, got 128 and 224"),
    ):
        with pytest.raises(ValueError, match=f"splits_keys=True {why}"):
            select(*dims, splits_keys=True)
    with pytest.raises(ValueError, match="splits_keys=True needs tile_m 64 .*got tile_m 128"):
        select(192, 128, splits_keys=True, tile_m=128)
    with pytest.raises(ValueError, match="bytes of shared memory exceed"):
        select(192, 128, splits_keys=True, stages_kv=2)
    # who does not ask for them gets what is asked for
    assert not select(192, 128, stages_do=2).splits_keys


def test_columns_of_heads_whose_dq_is_summed_in_turn() -> None:
    """In steps of 16 columns, of which a warpgroup sums all, for every second block."""
    from cutlass import BFloat16

    from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

    for dim, cols in ((72, 80), (80, 80), (88, 96), (96, 96)):
        choice = select_bwd_config(dim, dim, "full")
        assert (choice.tiles.tile_m, choice.tile_d) == (64, cols)
        traits = BwdTraits(BFloat16, dim, dim, 64)
        assert traits.columns.alternating and traits.columns.sizes_dq == (64 * cols,)
        assert traits.staging_warps == 4
        assert not BwdTraits(BFloat16, dim, dim, 128).columns.alternating
    assert not any(BwdTraits(BFloat16, dim, dim, 64).columns.alternating for dim in (64, 104, 128))


def test_products_end_with_the_head_dims() -> None:
    from cutlass import BFloat16

    from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

    for dim, dim_v, steps in ((136, 200, (9, 13)), (104, 40, (7, 3)), (128, 64, (8, 4))):
        traits = BwdTraits(BFloat16, dim, dim_v, 64)
        assert (traits.steps_d, traits.steps_dv) == steps
        assert 16 * steps[0] <= traits.tile_d and 16 * steps[1] <= traits.tile_dv


def test_warpgroups_of_a_pair_share_all_columns() -> None:
    from cutlass import BFloat16

    from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits

    for dim, dim_v in ((136, 32), (160, 160), (192, 64), (192, 256)):
        traits = BwdTraits(BFloat16, dim, dim_v, 64, stages_do=1, cta_pair=True)
        assert traits.columns.is_uneven and traits.infeasible() is None
        first, second = (traits.for_warpgroup(i).columns for i in range(2))
        for name, cols in (("dk", traits.tile_d), ("dv", traits.tile_dv)):
            parts = (*getattr(first, name), *getattr(second, name))
            held = sorted(x for part in parts for x in range(part.first, part.end))
            assert held == list(range(cols))
        # one product of dQ for each, whose sums follow each other
        placed = [*first.products_dq(0), *second.products_dq(0)]
        assert [(x.width, start) for x, start in placed] == [(64, 0), (32, 64 * 64)]
        assert traits.columns.sizes_dq == (96 * 64,)


ALONE = {
    "deterministic=True": {"deterministic": True},
    "score_mod": {"modifier": "score_mod", "tuning_class": "score_mod"},
    "softcap": {"modifier": "softcap"},
    "1 SM": {"num_sms": 1},
    "clears_dq=False": {"override": BwdConfig(clears_dq=False)},
    "cta_pair=False": {"override": BwdConfig(cta_pair=False)},
}


# what pairs of Blackwell do, whose CTAs have turns of their own
SEQUENTIAL_SPLITS = "deterministic=True", "clears_dq=False"


@pytest.mark.parametrize("what", ALONE)
def test_what_keeps_ctas_alone(what: str) -> None:
    """The last row is theirs, and pairs that a config asks for are refused by name."""
    call = WIDE | ALONE[what]
    choice = select_bwd_config(**call)
    assert choice.tiles == BwdTiles(64, 2, 1, 1) and choice.cluster_tile_n == choice.tile_n == 64
    assert SM90_BWD[-1].reason in choice.reason
    asks = replace(call.get("override", BwdConfig()), cta_pair=True)
    if what != "cta_pair=False":
        with pytest.raises(ValueError, match=f"cta_pair=True is not for .*{what}"):
            select_bwd_config(**call | {"override": asks})


def test_pairs_of_ctas_that_cannot_run() -> None:
    def select(*dims: int, **given: Any) -> BwdTiles:
        return select_bwd_config(*dims, "full", BwdConfig(**given)).tiles

    for dims in ((128, 256), (64, 64)):
        why = f"cta_pair=True is for head_dim above 128, got {dims[0]}"
        with pytest.raises(ValueError, match=why):
            select(*dims, cta_pair=True)
    with pytest.raises(ValueError, match=r"stages_kv must be 1 with cta_pair=True, got 2"):
        select(256, 64, cta_pair=True, stages_kv=2)
    with pytest.raises(ValueError, match=r"stages_q must be 2 .* got 1"):
        select(256, 64, cta_pair=True, stages_q=1)
    with pytest.raises(ValueError, match=r"bytes of shared memory exceed"):
        select(256, 256, cta_pair=True, stages_do=2)
    # who does not ask for pairs gets what is asked for
    assert not select(256, 64, stages_kv=2).cta_pair
    assert select(256, 128, stages_do=2).cta_pair


@pytest.mark.parametrize(
    "row",
    SM100_BWD,
    ids=lambda row: (
        f"{row.max_dim}-{row.max_dim_v}-{'cleared' if row.clears_dq else 'in-order'}"
        + ("-pair" if row.cta_pair else "")
    ),
)
def test_a_row_of_blackwell_runs_as_written(row: Any) -> None:
    choice = select_bwd_config(
        *(row.max_dim, row.max_dim_v, "full", BwdConfig(cta_pair=True) if row.if_asked else None),
        seqlen_k=row.min_seqlen_k,
        deterministic=not row.clears_dq,
        num_sms=2 if row.cta_pair else 1,
        kernel=SM100.backward,
    )
    for field in asdict(choice.tiles).keys() - {"skip_blocks", "splits_group"}:
        assert getattr(choice.tiles, field) == getattr(row, field)
    assert row.reason in choice.reason and "because" not in choice.reason
    # CTAs of a pair at 256 have half of the keys of others
    assert choice.tile_n == (64 if row.cta_pair and row.max_dim == 256 else 128)
    assert choice.cluster_tile_n == choice.tile_n * (1 + row.cta_pair)


def test_pairs_of_blackwell() -> None:
    """Where both CTAs need most blocks of a walk, and for whoever asks for them."""

    def takes_pairs(*dims: int, kind: str = "full", **more: Any) -> bool:
        return select_bwd_config(*dims, kind, kernel=SM100.backward, **more).tiles.cta_pair

    asks, long = BwdConfig(cta_pair=True), {"seqlen_k": 512}
    for walk in (WalkFacts(window=511), WalkFacts(has_lists=True)):
        assert not takes_pairs(128, 128, **long, walk=walk)
        assert takes_pairs(128, 128, override=asks, walk=walk)
        assert takes_pairs(256, 256, walk=walk)
    for what, more in ALONE.items():
        given = {"kind": more.get("tuning_class", "full"), **long} | more
        given.pop("tuning_class", None)
        is_refused = what not in SEQUENTIAL_SPLITS
        assert takes_pairs(128, 128, **given) != is_refused
        if is_refused and what != "cta_pair=False":
            with pytest.raises(ValueError, match=f"cta_pair=True is not for .*{what}"):
                takes_pairs(128, 128, **given | {"override": asks})
    for dims in ((64, 64), (192, 192), (96, 128), (200, 128), (128, 256)):
        with pytest.raises(ValueError, match=f"on Blackwell, got {dims[0]}/{dims[1]}"):
            takes_pairs(*dims, override=asks)
    with pytest.raises(ValueError, match="stages_do must be 1 with cta_pair=True"):
        takes_pairs(128, 128, override=BwdConfig(cta_pair=True, stages_do=2))


def test_head_dims_of_blackwell_are_rounded_up() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            choice = select_bwd_config(head_dim, head_dim_v, "other", kernel=SM100.backward)
            assert choice.tile_d == next(x for x in (64, 96, 128, 192, 256) if x >= head_dim)
            is_narrow = max(head_dim, head_dim_v) <= 128
            assert choice.tiles.tile_m == (128 if is_narrow or choice.tiles.cta_pair else 64)
            assert choice.smem_bytes <= 232448


def test_tensor_memory_of_wide_heads() -> None:
    """Nothing overlaps that is in use; without room for dQ two launches share the work."""
    from cutlass import BFloat16

    from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

    launches = {}
    for d, d_v in itertools.product((64, 96, 128, 192, 256), repeat=2):
        if max(d, d_v) > 128:
            found = BwdTraits(BFloat16, d, d_v, 64).launches()
            launches[d, d_v] = len(found)
            for x in found:
                taken = [(x.column_s, 64)]
                taken += [(x.column_dv, x.tile_dv)] if x.makes_dv else []
                taken += [(x.column_dk, d), (x.column_dp, 64)] if x.makes_dk else []
                columns = [c for first, width in taken for c in range(first, first + width)]
                assert len(set(columns)) == len(columns) and max(columns) < 512
                if x.makes_dk:
                    of_dq = range(x.column_dq, x.column_dq + x.widths_dq[0])
                    over = set(of_dq) & set(columns)
                    assert over <= set(range(x.column_s if x.is_serial else x.column_dp, 512))
                    assert of_dq[-1] < 512 and sum(x.widths_dq) == d
            assert sum(x.makes_dv for x in found) == sum(x.makes_dk for x in found) == 1
    assert {dims for dims, count in launches.items() if count == 2} == {
        (256, 256), (256, 192), (192, 256)
    }  # fmt: skip


def test_what_blackwell_does_not_take() -> None:
    for dims in ((264, 128), (128, 264)):
        with pytest.raises(NotImplementedError, match=f"up to 256, got {dims[0]}/{dims[1]}"):
            select_bwd_config(*dims, "full", kernel=SM100.backward)
    for given, why in (
        ({"tile_m": 64}, "tile_m must be 128 on Blackwell for 128/128, got 64"),
        ({"stages_q": 1}, "stages_q must be 2 on Blackwell for 128/128, got 1"),
        ({"stages_kv": 2}, "stages_kv must be 1 on Blackwell, got 2"),
        ({"value_cols": 16}, "value_cols must be 0 on Blackwell, got 16"),
    ):
        with pytest.raises(ValueError, match=why):
            select_bwd_config(128, 128, "full", BwdConfig(**given), kernel=SM100.backward)
    with pytest.raises(ValueError, match="tile_m must be 64 on Blackwell for 192/128, got 128"):
        select_bwd_config(192, 128, "full", BwdConfig(tile_m=128), kernel=SM100.backward)
    for d in (128, 256):
        with pytest.raises(ValueError, match="bytes of shared memory exceed"):
            select_bwd_config(d, d, "full", BwdConfig(stages_do=2), kernel=SM100.backward)
