"""Choice of a kernel's tiles: a row of the table, adjusted to fit, under the caller's override."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, TuningClass
from flash_mask_cute.call.settings import BwdConfig, FwdConfig, given_fields
from flash_mask_cute.call.tiles.arch import (
    SM90,
    SM90_BACKWARD,
    ArchSpec,
    BackwardKernel,
    ForwardKernel,
)
from flash_mask_cute.call.tiles.rows import (
    BwdRow,
    FwdRow,
    RowFacts,
    describe_conditions,
    rows_for,
)
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.runtime.target import H200_SMS

# fewer queries than this leave most of a tile empty unless heads share it
SHORT_QUERY = 128
_TILE_N_STEP = 16
_OF_FP8 = "keys and values in fp8: tiles of 64 rows, and a warpgroup that converts"
# Warpgroups with block lists of their own: query rows of one, and of such a tile; keys of one in a
# backward.
ROWS_OF_LISTS, OWN_LISTS_TILE, KEYS_OF_LISTS = 64, 192, 64
# exponentials of 128
POLYNOMIAL_STEP, MOST_POLYNOMIAL = 4, 64


@dataclass(frozen=True)
class FwdTiles:
    """A complete configuration that can run: every field is set."""

    tile_m: int
    tile_n: int
    num_stages: int
    stages_q: int
    share_qo: bool
    cta_pair: bool = False
    skip_blocks: bool = True
    polynomial: int = 0

    @property
    def cluster_tile_m(self) -> int:
        """Query rows of a work tile, which walk over the keys together."""
        return self.tile_m * self.ctas_per_tile

    @property
    def ctas_per_tile(self) -> int:
        """CTAs that process a work tile together."""
        return 2 if self.cta_pair else 1

    def nest_in(self, block_size: tuple[int, int]) -> bool:
        """Whether blocks of (queries, keys) consist of whole tiles. Heads must not be packed."""
        return block_size[0] % self.cluster_tile_m == 0 and block_size[1] % self.tile_n == 0

    def own_rows_nest_in(self, block_size: tuple[int, int]) -> bool:
        """Whether blocks have the rows of whole warpgroups and not of whole tiles, and the keys of
        whole tiles. Warpgroups may then have lists of their own."""
        rows_nest = self.tile_m == OWN_LISTS_TILE and block_size[0] % ROWS_OF_LISTS == 0
        keys_nest = self.tile_n == KEYS_OF_LISTS and block_size[1] % self.tile_n == 0
        return rows_nest and keys_nest and not self.nest_in(block_size)


_Tiles = TypeVar("_Tiles", bound="FwdTiles | BwdTiles")


@dataclass(frozen=True)
class FwdChoice:
    """The tiles of a problem, the query heads packed into them, and the reason for the choice."""

    tiles: FwdTiles
    packed_heads: int
    smem_bytes: int
    reason: str


class HeadFacts(NamedTuple):
    """Facts about heads, and rows beside them in shared memory, that decide whether tiles fit.
    cached_bias_bits: see `AttentionProblem`."""

    head_dim: int
    head_dim_v: int
    in_fp8: bool = False
    cached_bias_bits: int = 0


class WalkFacts(NamedTuple):
    """Fields of `RowFacts` that a problem does not give. block_size: of the call's block lists,
    which another form of the mask may replace."""

    window: int | None = None
    block_size: tuple[int, int] | None = None
    decode_rows: int | None = None
    selected_block: int = 0
    has_lists: bool = False
    lists_per_warpgroup: tuple[int, int] | None = None


NO_WALK_FACTS = WalkFacts()


def select_fwd_config(
    problem: AttentionProblem,
    shapes: FwdShapes,
    pack_gqa: bool | None = None,
    override: FwdConfig | None = None,
    walk: WalkFacts = NO_WALK_FACTS,
    unpackable: str | None = None,
    spec: ArchSpec = SM90,
    num_sms: int = H200_SMS,
) -> FwdChoice:
    """Choose tiles for the problem, and whether to pack heads.

    unpackable: an argument that prevents the heads of a group from sharing a tile. Raises
    ValueError: the override asks for a configuration that cannot run; NotImplementedError: pack_gqa
    is True for a group of more heads than `packed_rows`, or beside the argument `unpackable`."""
    kernel = spec.forward
    call = RowFacts(
        problem.head_dim,
        problem.head_dim_v,
        problem.tuning_class,
        seqlen_q=shapes.seqlen_q,
        seqlen_k=shapes.seqlen_k,
        window=walk.window,
        decode_rows=walk.decode_rows,
        functions_under_causal=problem.functions_under_causal,
        block_size=None if problem.reads_mask_bits else walk.block_size,
        may_pair=walk.decode_rows is None and (override is None or override.cta_pair is not False),
        sequences=shapes.batch * shapes.heads_q,
        num_sms=num_sms,
        selected_block=walk.selected_block,
        lists_per_warpgroup=walk.block_size
        if kernel.has_lists_per_warpgroup and problem.may_have_lists_per_warpgroup
        else None,
        caches_bias=problem.cached_bias_bits > 0,
    )
    rows = list(rows_for(kernel.rows, call))
    row = rows[0]
    if problem.is_ordered:
        # Keys of a tile are added together, so their number follows from head dimensions alone.
        tile_n = next(x.tile_n for x in rows if x.is_general)
        row = next(x for x in rows if x.tile_n == tile_n)
    dims = problem.head_dim, problem.head_dim_v
    heads = HeadFacts(*dims, problem.in_fp8, problem.cached_bias_bits)
    tiles, smem_bytes, reason = _fit(kernel, row, heads, override, problem.is_ordered)
    group = shapes.heads_q // shapes.heads_kv
    queries = shapes.seqlen_q
    if problem.varlen_q and problem.has_seqused_k:
        # over a cache, where most of a batch decodes while few sequences have many queries
        queries = min(queries, shapes.mean_seqlen_q)
    packed = _choose_packing(
        kernel.packed_rows,
        group,
        0 if problem.has_selected else queries,
        pack_gqa,
        unpackable,
        walk.decode_rows is not None or problem.has_selected,
    )
    if packed > 1:
        cause = "asked for" if pack_gqa else f"{queries} queries a sequence < {SHORT_QUERY}"
        if problem.has_selected and not pack_gqa:
            cause = "fewer queries a tile, which have fewer blocks together"
        reason = f"{reason}; {packed} query heads share a tile: {cause}"
    return FwdChoice(tiles, packed, smem_bytes, reason)


def _choose_packing(
    rows: int,
    group: int,
    queries: int,
    pack_gqa: bool | None,
    unpackable: str | None,
    wastes_rows: bool,
) -> int:
    """wastes_rows: a group may be padded to a power of two."""
    if pack_gqa and group > rows:
        raise NotImplementedError(
            f"pack_gqa=True needs a group of at most {rows} query heads per KV head, got {group}"
        )
    if pack_gqa and group > 1 and unpackable is not None:
        raise NotImplementedError(
            f"pack_gqa=True is not supported together with {unpackable}; leave pack_gqa at None or "
            "False"
        )
    if pack_gqa is None:
        # rows without a head waste products, which pays where kernels wait for memory, and where
        # all heads walk over blocks that fewer queries chose
        can_pack = group <= rows and (wastes_rows or padded_group(group) == group)
        pack_gqa = can_pack and unpackable is None and queries < SHORT_QUERY
    return group if pack_gqa else 1


def _of_row(kind: type[_Tiles], row: FwdRow | BwdRow) -> _Tiles:
    """The tiles of a row, which has fields of the same names."""
    names = {x.name for x in fields(kind)} & set(row._fields)
    return kind(**{name: getattr(row, name) for name in names})


@functools.lru_cache(maxsize=1024)
def _fit(
    kernel: ForwardKernel,
    row: FwdRow,
    heads: HeadFacts,
    override: FwdConfig | None,
    keeps_tile_n: bool,
) -> tuple[FwdTiles, int, str]:
    """The first candidate that fits, its smem bytes, and the reason."""
    given = given_fields(override)
    refusal = ""
    if heads.in_fp8:
        # beside a warpgroup that converts
        row = row._replace(tile_m=64, num_stages=2)
    for tiles in _candidates(row, given, keeps_tile_n):
        smem_bytes, why_not = check_feasible(heads, tiles, kernel)
        if why_not is None:
            reason = _explain_choice(row, tiles, given, refusal)
            return tiles, smem_bytes, f"{reason}; {_OF_FP8}" if heads.in_fp8 else reason
        refusal = refusal or why_not
    raise ValueError(
        f"config {given} cannot run for head_dim={heads.head_dim}, head_dim_v={heads.head_dim_v}: "
        f"{refusal}"
    )


def _candidates(row: FwdRow, given: dict[str, Any], keeps_tile_n: bool) -> Iterator[FwdTiles]:
    """The row under the override, then smaller ones. keeps_tile_n: do not reduce tile_n."""
    wanted = replace(_of_row(FwdTiles, row), **given)
    queries = [(wanted.stages_q, wanted.share_qo), (1, False), (1, True)]
    least = wanted.tile_n - 1 if keeps_tile_n else 0
    for tile_n in range(wanted.tile_n, least, -_TILE_N_STEP):
        for stages_q, share_qo in dict.fromkeys(queries):
            smaller: dict[str, Any] = {"tile_n": tile_n, "stages_q": stages_q, "share_qo": share_qo}
            if all(given.get(name, value) == value for name, value in smaller.items()):
                yield replace(wanted, **smaller)


def _explain_choice(
    row: FwdRow | BwdRow, tiles: FwdTiles | BwdTiles, given: dict[str, Any], refusal: str
) -> str:
    """The row, the fields that the config sets, and others that differ because of the refusal."""
    changed = {
        name: value
        for name, value in asdict(tiles).items()
        if name not in given and value != getattr(row, name, value)
    }
    parts = [f"row {describe_conditions(row)}: {row.reason}"]
    if given:
        parts.append("config= sets " + ", ".join(f"{name}={given[name]}" for name in given))
    if changed:
        text = ", ".join(f"{name}={value}" for name, value in changed.items())
        parts.append(f"{text} because {refusal}")
    return "; ".join(parts)


def check_feasible(
    heads: HeadFacts, tiles: FwdTiles, kernel: ForwardKernel = SM90.forward
) -> tuple[int, str | None]:
    """Shared memory in bytes, and why these tiles cannot run (by the traits)."""
    if tiles.polynomial and not kernel.has_polynomial:
        return 0, f"polynomial must be 0 but on Blackwell, got {tiles.polynomial}"
    if tiles.polynomial % POLYNOMIAL_STEP or tiles.polynomial > MOST_POLYNOMIAL:
        steps = f"a multiple of {POLYNOMIAL_STEP} up to {MOST_POLYNOMIAL}"
        return 0, f"polynomial must be {steps}, got {tiles.polynomial}"
    # kernels without fp8 and cached rows have no such traits
    of_heads = {name: value for name, value in heads._asdict().items() if value}
    kernel = kernel.of(heads.head_dim_v, tiles.tile_n)
    traits = kernel.traits(tiles, packed_heads=1, stages_kv=tiles.num_stages, **of_heads)
    return traits.smem_bytes, traits.infeasible()


# -- the backward -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BwdTiles:
    """A complete configuration. splits_group: several CTAs share the query heads of a group."""

    tile_m: int
    stages_q: int
    stages_do: int
    stages_kv: int
    value_cols: int = 0
    skip_blocks: bool = True
    clears_dq: bool = False
    cta_pair: bool = False
    splits_keys: bool = False
    splits_group: bool = False


@dataclass(frozen=True)
class BwdChoice:
    """The tiles of a problem, the kernel's traits for them, and the reason for the choice.

    tile_n: keys of a CTA's tile. cluster_tile_n: keys of all tiles of a cluster. tile_d, tile_dv:
    columns of a tile of Q and K, and of V, and of the scratch memory for sums of their gradients.
    group_splits: CTAs that share the query heads of a group (`group_splits.py`).
    """

    tiles: BwdTiles
    tile_n: int
    cluster_tile_n: int
    tile_d: int
    tile_dv: int
    smem_bytes: int
    reason: str
    group_splits: int = 1

    @property
    def ctas_of_tile(self) -> int:
        """CTAs that walk over queries together, and sum parts of each row block."""
        return self.cluster_tile_n // self.tile_n

    def own_keys_nest_in(self, block_size: tuple[int, int]) -> bool:
        """Whether blocks have whole query blocks, and the keys of whole warpgroups and not of whole
        tiles. Warpgroups may then have lists of their own."""
        if self.tiles.splits_keys or self.tile_n != 2 * KEYS_OF_LISTS:
            return False
        nest = block_size[0] % self.tiles.tile_m == 0 and block_size[1] % KEYS_OF_LISTS == 0
        return nest and block_size[1] % self.tile_n != 0


@functools.lru_cache(maxsize=1024)
def select_bwd_config(
    head_dim: int,
    head_dim_v: int,
    tuning_class: TuningClass,
    override: BwdConfig | None = None,
    seqlen_k: int = 0,
    deterministic: bool = False,
    modifier: str | None = None,
    num_sms: int = H200_SMS,
    kernel: BackwardKernel = SM90_BACKWARD,
    walk: WalkFacts = NO_WALK_FACTS,
    listed_rows: int = 1,
    query_lists: int = 0,
) -> BwdChoice:
    """Choose tiles: the first row for these facts. If it does not fit beside the override, it gets
    fewer stages, or no pairs of CTAs.

    modifier: `AttentionProblem.score_modifier`. listed_rows, query_lists: as in `AttentionProblem`.
    The split of a group of heads is decided later. Raises ValueError: the override asks for a
    configuration that cannot run; NotImplementedError: the kernel does not support these head
    dimensions."""
    given = given_fields(override)
    given.pop("group_splits", None)
    if deterministic and given.get("clears_dq"):
        raise ValueError("config clears_dq=True is not for deterministic=True: sums have an order")
    why_alone = _why_alone(given, deterministic, modifier, num_sms, kernel)
    why_shared = _why_shared(given, modifier, kernel)
    if given.get("splits_keys") and why_shared is not None:
        raise ValueError(f"config splits_keys=True is not for {why_shared}")
    if given.get("cta_pair") and why_alone is not None:
        raise ValueError(f"config cta_pair=True is not for {why_alone}")
    call = RowFacts(
        head_dim,
        head_dim_v,
        tuning_class,
        seqlen_k=seqlen_k,
        may_pair=why_alone is None,
        asks_pair=given.get("cta_pair") is True,
        may_split_keys=why_shared is None,
        is_ordered=deterministic,
        window=walk.window,
        has_lists=walk.has_lists,
        query_lists=query_lists,
        lists_per_warpgroup=walk.lists_per_warpgroup,
    )
    rows = list(rows_for(kernel.rows, call))
    if not rows:
        most = max(row.max_dim for row in kernel.rows)
        raise NotImplementedError(
            f"{kernel.class_name} takes head_dim and head_dim_v up to {most}, got "
            f"{head_dim}/{head_dim_v}"
        )
    # an override may leave no room for keys of each warpgroup or pairs of CTAs: then a later row
    special = list(itertools.takewhile(lambda row: row.splits_keys or row.cta_pair, rows))
    for row in rows[: len(special) + 1]:
        refusal = ""
        for tiles in _bwd_candidates(row, given):
            of_lists = {"packed_heads": listed_rows, "shares_tile": query_lists == 64}
            traits = kernel.of(head_dim).traits(
                tiles,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                # tiles are chosen before it is known whether masks may empty rows
                has_marks=True,
                has_reference=modifier == "score_mod",
                **(of_lists if query_lists else {}),
            )
            why_not = traits.infeasible()
            if why_not is None:
                reason = _explain_choice(row, tiles, given, refusal)
                sizes = traits.tile_n, traits.cluster_tile_n, traits.tile_d, traits.tile_dv
                return BwdChoice(tiles, *sizes, traits.smem_bytes, reason)
            refusal = refusal or why_not
    raise ValueError(
        f"config {given} cannot run for head_dim={head_dim}, head_dim_v={head_dim_v}: {refusal}"
    )


def _why_alone(
    given: dict[str, Any],
    deterministic: bool,
    modifier: str | None,
    num_sms: int,
    kernel: BackwardKernel,
) -> str | None:
    """The reason why CTAs cannot sum dQ in pairs, regardless of the table, or None."""
    waits = not kernel.pairs_take_turns
    stores_first = waits and given.get("clears_dq") is False
    reasons = {
        "config cta_pair=False": given.get("cta_pair") is False,
        "config clears_dq=False: one CTA would wait for another pair": stores_first,
        "deterministic=True: sums have an order": waits and deterministic,
        f"a call with {modifier}: P has no place in shared memory": modifier is not None,
        f"a device with {num_sms} SM": num_sms < 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _why_shared(given: dict[str, Any], modifier: str | None, kernel: BackwardKernel) -> str | None:
    """Why warpgroups must share the keys of wide heads, regardless of the table, or None."""
    reasons = {
        kernel.class_name: not kernel.splits_keys,
        "config splits_keys=False": given.get("splits_keys") is False,
        "config cta_pair=True: these CTAs have 64 keys": given.get("cta_pair") is True,
        f"a call with {modifier}: registers do not suffice": modifier is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _bwd_candidates(row: BwdRow, given: dict[str, Any]) -> Iterator[BwdTiles]:
    """The row under the override, then with no values in registers, then with fewer stages."""
    wanted = replace(_of_row(BwdTiles, row), **given)
    # the last ones are given up first
    free = [x for x in ("stages_q", "stages_do", "stages_kv") if x not in given]
    kept = (wanted.value_cols,) if "value_cols" in given else (wanted.value_cols, 0)
    for stages in itertools.product(*(range(getattr(wanted, name), 0, -1) for name in free)):
        fewer: dict[str, Any] = dict(zip(free, stages, strict=True))
        for value_cols in dict.fromkeys(kept):
            yield replace(wanted, value_cols=value_cols, **fewer)
