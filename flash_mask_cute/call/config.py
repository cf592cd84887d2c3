"""Which tiles a kernel uses: a row of the table, made to fit, under the caller's override."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.call.tables import (
    SM90_BWD,
    SM90_FWD,
    SM100_BWD,
    SM100_FWD,
    BwdRow,
    FwdRow,
)
from flash_mask_cute.runtime.packages import tells_what_to_install
from flash_mask_cute.runtime.target import BLACKWELL, H200_SMS, HOPPER

# query rows that leave together, which packed heads must fill evenly: a warpgroup's, a warp's
PACKED_ROWS = {HOPPER: 64, BLACKWELL: 32}
FWD_ROWS = {HOPPER: SM90_FWD, BLACKWELL: SM100_FWD}
BWD_ROWS = {HOPPER: SM90_BWD, BLACKWELL: SM100_BWD}
# fewer queries than this leave most of a tile empty unless heads share it
SHORT_QUERY = 128
_TILE_N_STEP = 16


@dataclass(frozen=True)
class FwdConfig:
    """Tile shape of a forward kernel; None lets the library choose that field.

    tile_m, tile_n: query rows (128, 192 or 256) and keys (a multiple of 16) of a tile; on
    Blackwell 256 and 128.
    num_stages: key and value blocks in flight. stages_q: query tiles in flight, 1 or 2.
    share_qo: the output is staged in the query's shared memory.
    cta_pair: on Blackwell, two CTAs with neighbouring tiles walk over the keys together.
    skip_blocks: leave out hidden key blocks and the masking of those that nothing cuts. False
    visits and masks every block, to the same result bit for bit.

    Raises:
        TypeError, ValueError: a value's type is wrong, or a number is not positive.
    """

    tile_m: int | None = None
    tile_n: int | None = None
    num_stages: int | None = None
    stages_q: int | None = None
    share_qo: bool | None = None
    cta_pair: bool | None = None
    skip_blocks: bool | None = None

    def __post_init__(self) -> None:
        _check_values(self)

    @staticmethod
    def of(value: FwdConfig | Mapping[str, Any] | None) -> FwdConfig | None:
        """What the argument `config` of the public call means.

        Raises:
            TypeError: it is neither a FwdConfig, nor a mapping, nor None, or a value's type is
                wrong.
            ValueError: a mapping has a key that is no field, or a number is not positive.
        """
        return _config_of(FwdConfig, value)


@dataclass(frozen=True)
class BwdConfig:
    """Tile shape of a backward kernel; None lets the library choose that field.

    tile_m: query rows of a block, 64 or 128. stages_q, stages_do: blocks of queries and of their
    output gradients in flight. stages_kv: key tiles in flight. All stages are 1 or 2.
    value_cols: columns of the values that stay in registers, a multiple of 16, or 0.
    skip_blocks: as in `FwdConfig`. clears_dq: the sums of dQ are cleared before, and all add to
    them; otherwise who comes first stores (docs/backward_sm90.md). cta_pair: two CTAs with
    neighbouring keys sum dQ together, with cleared sums; for head_dim above 192, where scores are
    neither modified nor capped.

    Raises:
        TypeError, ValueError: as by `FwdConfig`; value_cols may be 0.
    """

    tile_m: int | None = None
    stages_q: int | None = None
    stages_do: int | None = None
    stages_kv: int | None = None
    value_cols: int | None = None
    skip_blocks: bool | None = None
    clears_dq: bool | None = None
    cta_pair: bool | None = None

    def __post_init__(self) -> None:
        _check_values(self)

    @staticmethod
    def of(value: BwdConfig | Mapping[str, Any] | None) -> BwdConfig | None:
        """What the argument `config` of the public backward means; errors as in `FwdConfig.of`."""
        return _config_of(BwdConfig, value)


_Config = TypeVar("_Config", FwdConfig, BwdConfig)


def _config_of(kind: type[_Config], value: Any) -> _Config | None:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"config must be a {kind.__name__}, a mapping or None, got {type(value).__name__}"
        )
    known = kind.__dataclass_fields__
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise ValueError(f"config has unknown keys {unknown}; it may have {list(known)}")
    return kind(**value)


def _check_values(config: FwdConfig | BwdConfig) -> None:
    for name, number in given_fields(config).items():
        wanted = bool if name in ("share_qo", "cta_pair", "skip_blocks", "clears_dq") else int
        if type(number) is not wanted:
            raise TypeError(f"config.{name} must be of type {wanted.__name__}, got {number!r}")
        smallest = 0 if name == "value_cols" else 1
        if wanted is int and number < smallest:
            raise ValueError(f"config.{name} must be at least {smallest}, got {number}")


def given_fields(config: FwdConfig | BwdConfig | None) -> dict[str, Any]:
    """The fields that are not None."""
    if config is None:
        return {}
    return {name: value for name, value in vars(config).items() if value is not None}


@dataclass(frozen=True)
class FwdTiles:
    """A complete configuration that can run: no field is open."""

    tile_m: int
    tile_n: int
    num_stages: int
    stages_q: int
    share_qo: bool
    cta_pair: bool = False
    skip_blocks: bool = True

    @property
    def walk_m(self) -> int:
        """Query rows that walk over the keys together: those of a work tile."""
        return self.tile_m * self.ctas_per_tile

    @property
    def ctas_per_tile(self) -> int:
        """CTAs that take a work tile together."""
        return 2 if self.cta_pair else 1

    def nest_in(self, block_size: tuple[int, int]) -> bool:
        """Whether blocks of (queries, keys) are made of whole tiles. Heads must not be packed."""
        return block_size[0] % self.walk_m == 0 and block_size[1] % self.tile_n == 0


@dataclass(frozen=True)
class FwdChoice:
    """The tiles of a problem, the query heads packed into them, and why."""

    tiles: FwdTiles
    packed_heads: int
    smem_bytes: int
    reason: str


def select_fwd_config(
    problem: AttentionProblem,
    shapes: FwdShapes,
    pack_gqa: bool | None = None,
    override: FwdConfig | None = None,
    window: int | None = None,
    block_size: tuple[int, int] | None = None,
    unpackable: str | None = None,
    family: str = HOPPER,
) -> FwdChoice:
    """Choose tiles for the problem, and whether to pack heads for its shapes. window: the keys
    that a query sees at most, if the mask has both a left and a right edge. block_size: that of
    block lists. unpackable: an argument under which the heads of a group cannot share a tile.
    family: whose kernel is to run (`Target.family`).

    Raises:
        ValueError: the override asks for what cannot run.
        NotImplementedError: no kernel of the family has these head dimensions; or pack_gqa is True
            for a group of heads that does not divide `PACKED_ROWS`, or that `unpackable` keeps
            apart.
    """
    if family == BLACKWELL:
        _check_blackwell_dims(problem.head_dim, problem.head_dim_v)
    tiles, smem_bytes, reason = _choose_tiles(family, problem, shapes, window, block_size, override)
    group = shapes.heads_q // shapes.heads_kv
    packed = _choose_packing(PACKED_ROWS[family], group, shapes.seqlen_q, pack_gqa, unpackable)
    if packed > 1:
        cause = "asked for" if pack_gqa else f"seqlen_q {shapes.seqlen_q} < {SHORT_QUERY}"
        reason = f"{reason}; {packed} query heads share a tile: {cause}"
    return FwdChoice(tiles, packed, smem_bytes, reason)


def _check_blackwell_dims(head_dim: int, head_dim_v: int) -> None:
    known = list(dict.fromkeys((row.max_dim, row.max_dim_v) for row in SM100_FWD))
    if (head_dim, head_dim_v) not in known:
        pairs = ", ".join(f"{d}/{dv}" for d, dv in known)
        raise NotImplementedError(
            f"the kernel for Blackwell takes head_dim/head_dim_v {pairs}, got "
            f"{head_dim}/{head_dim_v}"
        )


def _choose_packing(
    rows: int, group: int, seqlen_q: int, pack_gqa: bool | None, unpackable: str | None
) -> int:
    can_pack = rows % group == 0
    if pack_gqa and not can_pack:
        raise NotImplementedError(
            f"pack_gqa=True needs a group of query heads per KV head that divides {rows}, got "
            f"{group}"
        )
    if pack_gqa and group > 1 and unpackable is not None:
        raise NotImplementedError(
            f"pack_gqa=True is not supported together with {unpackable}; leave pack_gqa at None or "
            "False"
        )
    can_pack = can_pack and unpackable is None
    if pack_gqa is None:
        pack_gqa = can_pack and seqlen_q < SHORT_QUERY
    return group if pack_gqa else 1


def _choose_tiles(
    family: str,
    problem: AttentionProblem,
    shapes: FwdShapes,
    window: int | None,
    block_size: tuple[int, int] | None,
    override: FwdConfig | None,
) -> tuple[FwdTiles, int, str]:
    """The first candidate that fits, its shared memory in bytes, and the reason."""
    row = next(
        row
        for row in FWD_ROWS[family]
        if problem.head_dim <= row.max_dim
        and problem.head_dim_v <= row.max_dim_v
        and problem.mask_kind in (row.masks or (problem.mask_kind,))
        and shapes.seqlen_q >= row.min_seqlen_q
        and shapes.seqlen_k >= row.min_seqlen_k
        and (row.max_window is None or (window is not None and window <= row.max_window))
        and not (row.cta_pair and override is not None and override.cta_pair is False)
        and (not row.for_functions or problem.functions_under_causal)
        and (not row.for_lists or _takes_lists(row, problem, block_size))
    )
    return _fit(family, row, problem.head_dim, problem.head_dim_v, override)


def _takes_lists(
    row: FwdRow, problem: AttentionProblem, block_size: tuple[int, int] | None
) -> bool:
    """Whether a kernel with these tiles reads the lists as they are, and nothing but them."""
    return block_size is not None and not problem.reads_bits and _of_row(row).nest_in(block_size)


def _of_row(row: FwdRow) -> FwdTiles:
    return FwdTiles(
        row.tile_m, row.tile_n, row.num_stages, row.stages_q, row.share_qo, row.cta_pair
    )


@functools.lru_cache(maxsize=1024)
def _fit(
    family: str, row: FwdRow, head_dim: int, head_dim_v: int, override: FwdConfig | None
) -> tuple[FwdTiles, int, str]:
    given = given_fields(override)
    refusal = ""
    for tiles in _candidates(row, given):
        smem_bytes, why_not = check_feasible(head_dim, head_dim_v, tiles, family)
        if why_not is None:
            return tiles, smem_bytes, _explain_choice(row, tiles, given, refusal)
        refusal = refusal or why_not
    raise ValueError(
        f"config {given} cannot run for head_dim={head_dim}, head_dim_v={head_dim_v}: {refusal}"
    )


def _candidates(row: FwdRow, given: dict[str, Any]) -> Iterator[FwdTiles]:
    """The row under the override, then what is left when the fields not given are made smaller."""
    wanted = replace(_of_row(row), **given)
    queries = [(wanted.stages_q, wanted.share_qo), (1, False), (1, True)]
    for tile_n in range(wanted.tile_n, 0, -_TILE_N_STEP):
        for stages_q, share_qo in dict.fromkeys(queries):
            smaller: dict[str, Any] = {"tile_n": tile_n, "stages_q": stages_q, "share_qo": share_qo}
            if all(given.get(name, value) == value for name, value in smaller.items()):
                yield replace(wanted, **smaller)


def _explain_choice(row: FwdRow, tiles: FwdTiles, given: dict[str, Any], refusal: str) -> str:
    conditions = f"head_dim <= {row.max_dim}, head_dim_v <= {row.max_dim_v}"
    if row.masks:
        conditions += f", {' or '.join(row.masks)}"
    if row.min_seqlen_q:
        conditions += f", seqlen_q >= {row.min_seqlen_q}"
    if row.min_seqlen_k:
        conditions += f", seqlen_k >= {row.min_seqlen_k}"
    if row.max_window is not None:
        conditions += f", window <= {row.max_window}"
    if row.for_functions:
        conditions += ", functions of scores, causal"
    if row.for_lists:
        conditions += f", blocks of a multiple of {row.tile_m} x {row.tile_n}"
    changed = _changed(asdict(_of_row(row)), asdict(tiles), given)
    return _join_reasons(f"row {conditions}: {row.reason}", given, changed, refusal)


def _changed(row: dict[str, Any], tiles: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in tiles.items() if name not in given and value != row[name]
    }


def _join_reasons(reason: str, given: dict[str, Any], changed: dict[str, Any], refusal: str) -> str:
    parts = [reason]
    if given:
        parts.append("config= sets " + ", ".join(f"{name}={given[name]}" for name in given))
    if changed:
        text = ", ".join(f"{name}={value}" for name, value in changed.items())
        parts.append(f"{text} because {refusal}")
    return "; ".join(parts)


@tells_what_to_install()
def check_feasible(
    head_dim: int, head_dim_v: int, tiles: FwdTiles, family: str = HOPPER
) -> tuple[int, str | None]:
    """Shared memory in bytes, and why these tiles cannot run, if they cannot: the kernel's plan."""
    from cutlass import BFloat16  # here: a package import must not wait for the compiler's

    plan_type: Any
    if family == HOPPER:
        from flash_mask_cute.sm90.flash_fwd_plan import FwdPlan as plan_type
    else:
        from flash_mask_cute.sm100.flash_fwd_plan import FwdPlan as plan_type

    plan = plan_type(
        BFloat16,
        head_dim,
        head_dim_v,
        tiles.tile_m,
        tiles.tile_n,
        packed_heads=1,
        stages_kv=tiles.num_stages,
        stages_q=tiles.stages_q,
        share_qo=tiles.share_qo,
        cta_pair=tiles.cta_pair,
    )
    return plan.smem_bytes, plan.infeasible()


# -- the backward -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BwdTiles:
    """A complete configuration of the backward: no field is open."""

    tile_m: int
    stages_q: int
    stages_do: int
    stages_kv: int
    value_cols: int = 0
    skip_blocks: bool = True
    clears_dq: bool = False
    cta_pair: bool = False


@dataclass(frozen=True)
class BwdChoice:
    """The tiles of a problem, what the kernel's plan says about them, and why they were chosen.

    tile_n: keys of a CTA at a time, walk_n: of a walk. tile_d: columns of the scratch memory that
    dQ is summed in.
    """

    tiles: BwdTiles
    tile_n: int
    walk_n: int
    tile_d: int
    smem_bytes: int
    reason: str


@functools.lru_cache(maxsize=1024)
def select_bwd_config(
    head_dim: int,
    head_dim_v: int,
    mask_kind: str,
    override: BwdConfig | None = None,
    seqlen_k: int = 0,
    deterministic: bool = False,
    modifier: str | None = None,
    num_sms: int = H200_SMS,
    family: str = HOPPER,
) -> BwdChoice:
    """Choose tiles: the first row that takes the head dimensions, the `mask_kind` and the keys of a
    problem, with fewer stages where it does not fit beside the override, or without pairs of CTAs.

    modifier: `AttentionProblem.score_modifier`. family: whose kernel is to run (`Target.family`).

    Raises:
        ValueError: the override asks for what cannot run.
        NotImplementedError: no kernel of the family has these head dimensions.
    """
    given = given_fields(override)
    if deterministic and given.get("clears_dq"):
        raise ValueError("config clears_dq=True is not for deterministic=True: sums have an order")
    why_alone = _why_alone(given, deterministic, modifier, num_sms)
    if given.get("cta_pair") and why_alone is not None:
        raise ValueError(f"config cta_pair=True is not for {why_alone}")
    rows = [
        r
        for r in BWD_ROWS[family]
        if r.above_dim < head_dim <= r.max_dim
        and head_dim_v <= r.max_dim_v
        and (r.masks is None or mask_kind in r.masks)
        and seqlen_k >= r.min_seqlen_k
        and not (deterministic and r.clears_dq)
        and not (r.cta_pair and why_alone is not None)
    ]
    if not rows:
        largest = max(row.max_dim for row in BWD_ROWS[family])
        raise NotImplementedError(
            f"the backward for {family} takes head_dim and head_dim_v up to {largest}, got "
            f"{head_dim}/{head_dim_v}"
        )
    # an override may leave no room for pairs of CTAs: then the row behind theirs
    for row in rows[:2] if rows[0].cta_pair else rows[:1]:
        refusal = ""
        for tiles in _bwd_candidates(row, given):
            plan = _bwd_plan(head_dim, head_dim_v, tiles, modifier == "score_mod", family)
            why_not = plan.infeasible()
            if why_not is None:
                changed = _changed(asdict(_of_bwd_row(row)), asdict(tiles), given)
                told = f"row {_bwd_conditions(row)}: {row.reason}"
                reason = _join_reasons(told, given, changed, refusal)
                sizes = plan.tile_n, plan.walk_n, plan.tile_d, plan.smem_bytes
                return BwdChoice(tiles, *sizes, reason)
            refusal = refusal or why_not
    raise ValueError(
        f"config {given} cannot run for head_dim={head_dim}, head_dim_v={head_dim_v}: {refusal}"
    )


def _why_alone(
    given: dict[str, Any], deterministic: bool, modifier: str | None, num_sms: int
) -> str | None:
    """What keeps CTAs from summing dQ in pairs, whatever the table says, or None."""
    stores_first = given.get("clears_dq") is False
    reasons = {
        "config cta_pair=False": given.get("cta_pair") is False,
        "config clears_dq=False: one CTA would wait for another pair": stores_first,
        "deterministic=True: sums have an order": deterministic,
        f"a call with {modifier}: P has no place in shared memory": modifier is not None,
        f"a device with {num_sms} SM": num_sms < 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _bwd_conditions(row: BwdRow) -> str:
    """What a row is for, in words."""
    conditions = [f"head_dim <= {row.max_dim}", f"head_dim_v <= {row.max_dim_v}"]
    if row.above_dim:
        conditions[0] = f"{row.above_dim} < {conditions[0]}"
    if row.masks is not None:
        conditions.append(f"masks {'/'.join(row.masks)}")
    if row.min_seqlen_k:
        conditions.append(f"seqlen_k >= {row.min_seqlen_k}")
    if row.cta_pair:
        conditions.append("sums without an order, scores that nothing modifies")
    return ", ".join(conditions)


def _of_bwd_row(row: BwdRow) -> BwdTiles:
    stages = (row.stages_q, row.stages_do, row.stages_kv)
    of_dq = {"clears_dq": row.clears_dq, "cta_pair": row.cta_pair}
    return BwdTiles(row.tile_m, *stages, row.value_cols, **of_dq)


def _bwd_candidates(row: BwdRow, given: dict[str, Any]) -> Iterator[BwdTiles]:
    """The row under the override, then with less in the fields that were not given: no values in
    registers, fewer stages."""
    wanted = replace(_of_bwd_row(row), **given)
    # the last ones are given up first
    free = [x for x in ("stages_q", "stages_do", "stages_kv") if x not in given]
    kept = (wanted.value_cols,) if "value_cols" in given else (wanted.value_cols, 0)
    for stages in itertools.product(*(range(getattr(wanted, name), 0, -1) for name in free)):
        fewer: dict[str, Any] = dict(zip(free, stages, strict=True))
        for value_cols in dict.fromkeys(kept):
            yield replace(wanted, value_cols=value_cols, **fewer)


@tells_what_to_install()
def _bwd_plan(
    head_dim: int, head_dim_v: int, tiles: BwdTiles, has_score_mod: bool, family: str
) -> Any:
    from cutlass import BFloat16  # here: a package import must not wait for the compiler's

    plan_type: Any
    if family == HOPPER:
        from flash_mask_cute.sm90.flash_bwd_plan import BwdPlan as plan_type
    else:
        from flash_mask_cute.sm100.flash_bwd_plan import BwdPlan as plan_type

    return plan_type(
        BFloat16,
        head_dim,
        head_dim_v,
        tiles.tile_m,
        stages_q=tiles.stages_q,
        stages_do=tiles.stages_do,
        stages_kv=tiles.stages_kv,
        value_cols=tiles.value_cols,
        cta_pair=tiles.cta_pair,
        # tiles are chosen before it is known whether masks may empty rows
        has_marks=True,
        has_reference=has_score_mod,
    )
