"""Rows of the tables of tile shapes, and the conditions under which a call may use one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from flash_mask_cute.call.problem import TuningClass

# keys of a query, in units of the queries, from which on causal walks are about equal
_LATE = 8


class RowFacts(NamedTuple):
    """The facts about a call that conditions of rows use.

    window: the most keys that a query sees, if the window is closed on both sides. decode_rows:
    query rows that share keys, for a forward in splits, over pages, or of so few that one pass is
    decoding, else None. block_size: of block lists that the kernel would read as they are.
    may_split_keys: warpgroups may have keys of their own in wide heads. is_ordered: sums have an
    order (deterministic). sequences: of `seqlen_q` queries and one head each. num_sms: CTAs that
    run at once. selected_block: keys of a block of each query's selection, 0 if there is none.
    has_lists: block lists or selections leave out blocks. lists_per_warpgroup: the size of blocks
    of lists that warpgroups may have of their own. asks_pair: the config has cta_pair=True.
    """

    head_dim: int
    head_dim_v: int
    tuning_class: TuningClass
    seqlen_q: int = 0
    seqlen_k: int = 0
    window: int | None = None
    decode_rows: int | None = None
    functions_under_causal: bool = False
    block_size: tuple[int, int] | None = None
    may_pair: bool = True
    may_split_keys: bool = True
    is_ordered: bool = False
    sequences: int = 1
    num_sms: int = 1
    selected_block: int = 0
    has_lists: bool = False
    query_lists: int = 0
    lists_per_warpgroup: tuple[int, int] | None = None
    asks_pair: bool = False
    caches_bias: bool = False

    @property
    def splits_sectors(self) -> bool:
        """Whether rows of queries and keys begin inside L2 sectors of 32 bytes."""
        return self.head_dim % 16 != 0

    @property
    def has_equal_walks(self) -> bool:
        """Whether all queries see about as many keys."""
        is_late = self.seqlen_k >= _LATE * self.seqlen_q
        is_causal = self.tuning_class == TuningClass.CAUSAL
        return self.tuning_class == TuningClass.FULL or (is_causal and is_late)

    def fill(self, tile_m: int) -> float:
        """The part of a launch's CTA waves, with tiles of tile_m rows, that queries fill."""
        tiles = self.sequences * -(-self.seqlen_q // tile_m)
        waves = -(-tiles // self.num_sms)
        return self.sequences * self.seqlen_q / max(waves * self.num_sms * tile_m, 1)


class Condition(NamedTuple):
    """A row's condition on a call, in words and as a test."""

    text: str
    holds: Callable[[RowFacts], bool]


class FwdRow(NamedTuple):
    """Tiles of a forward, the reason for them, and conditions of calls that may use them
    (`conditions`).

    masks: tuning classes, all if empty. gain: the speedup over tiles of 128 rows, if equally many
    SMs are busy; if walks are equal and the last wave of CTAs costs more than that, the row does
    not apply. cta_pair: a pair of CTAs, with a tile each, walks over the keys together.
    native_block_lists: the kernel reads block lists as they are, and a block is partial only by its
    own mask. Mask bits exist for tiles of any size. needs_sfu: functions of scores under causal
    masking alone keep the special function units busy. lists_per_warpgroup: each warpgroup reads
    lists of its own. polynomial: see `FwdConfig`. needs_rows: not for splits, pages and selections.
    """

    max_dim: int
    max_dim_v: int
    tile_m: int
    tile_n: int
    num_stages: int
    stages_q: int
    share_qo: bool
    reason: str
    masks: tuple[TuningClass, ...] = ()
    max_window: int | None = None
    min_seqlen_k: int = 0
    min_seqlen_q: int = 0
    cta_pair: bool = False
    native_block_lists: bool = False
    needs_sfu: bool = False
    above_dim: int = 0
    max_seqlen_q: int | None = None
    gain: float | None = None
    for_decode: bool = False
    splits_sectors: bool = False
    max_selected: int | None = None
    polynomial: int = 0
    lists_per_warpgroup: bool = False
    max_seqlen_k: int | None = None
    caches_bias: bool = False
    needs_rows: bool = False

    @property
    def is_general(self) -> bool:
        """Whether head dimensions are its only condition."""
        of_dims = _dims_up_to(self.max_dim, self.max_dim_v, self.above_dim)
        return len(list(self.conditions())) == len(list(of_dims))

    def conditions(self) -> Iterator[Condition]:
        x = self
        yield from _dims_up_to(x.max_dim, x.max_dim_v, x.above_dim)
        if x.masks:
            yield Condition(" or ".join(x.masks), lambda call: call.tuning_class in x.masks)
        if x.min_seqlen_q:
            text = f"seqlen_q >= {x.min_seqlen_q}"
            yield Condition(text, lambda call: call.seqlen_q >= x.min_seqlen_q)
        if (longest := x.max_seqlen_q) is not None:
            yield Condition(f"seqlen_q <= {longest}", lambda call: call.seqlen_q <= longest)
        yield from _keys_within(x.min_seqlen_k, x.max_seqlen_k)
        if (gain := x.gain) is not None:
            yield Condition(
                f"at most {gain - 1:.0%} more idle time in the last wave than with 128 rows",
                lambda call: not call.has_equal_walks or call.fill(128) <= gain * call.fill(192),
            )
        if x.splits_sectors:
            text = "rows that start between multiples of 32 bytes"
            yield Condition(text, lambda call: call.splits_sectors)
        if (widest := x.max_window) is not None:
            text = f"window <= {widest}"
            yield Condition(text, lambda call: call.window is not None and call.window <= widest)
        if x.for_decode:
            yield Condition(
                f"at most {x.tile_m} query rows share keys",
                lambda call: call.decode_rows is not None and call.decode_rows <= x.tile_m,
            )
        if (largest := x.max_selected) is not None:
            text = f"selected blocks of at most {largest} keys"
            yield Condition(text, lambda call: 0 < call.selected_block <= largest)
        if x.needs_sfu:
            text = "causal, with functions of scores"
            yield Condition(text, lambda call: call.functions_under_causal)
        if x.native_block_lists:
            yield Condition(
                f"blocks of a multiple of {x.tile_m} x {x.tile_n}",
                lambda call: (
                    call.block_size is not None
                    and call.block_size[0] % (x.tile_m * (1 + x.cta_pair)) == 0
                    and call.block_size[1] % x.tile_n == 0
                ),
            )
        if x.lists_per_warpgroup:
            yield Condition(
                f"block lists of an odd multiple of 64 queries, and of a multiple of {x.tile_n} "
                "keys",
                lambda call: (
                    call.lists_per_warpgroup is not None
                    and call.lists_per_warpgroup[0] % 128 == 64
                    and call.lists_per_warpgroup[1] % x.tile_n == 0
                ),
            )
        if x.needs_rows:
            yield Condition(
                "one pass over keys in rows",
                lambda call: call.decode_rows is None and call.selected_block == 0,
            )
        if x.caches_bias:
            yield Condition("a bias that batch entries share", lambda call: call.caches_bias)
        if x.cta_pair:
            yield Condition("CTAs may form pairs", lambda call: call.may_pair)


class BwdRow(NamedTuple):
    """Query rows of a block and buffers of a backward (`BwdConfig`), the reason for them, and
    conditions of calls that may use them (`conditions`).

    masks: tuning classes, None for all. cta_pair: also only for devices with two SMs. query_lists:
    keys of a work tile. lists_per_warpgroup: each warpgroup has lists of its own.
    """

    max_dim: int
    max_dim_v: int
    tile_m: int
    stages_q: int
    stages_do: int
    stages_kv: int
    value_cols: int
    reason: str
    masks: tuple[TuningClass, ...] | None = None
    min_seqlen_k: int = 0
    max_seqlen_k: int | None = None
    above_dim: int = 0
    clears_dq: bool = False
    cta_pair: bool = False
    splits_keys: bool = False
    min_window: int = 0
    without_lists: bool = False
    query_lists: int = 0
    if_asked: bool = False
    lists_per_warpgroup: bool = False

    def conditions(self) -> Iterator[Condition]:
        x = self
        yield from _dims_up_to(x.max_dim, x.max_dim_v, x.above_dim)
        if (kinds := x.masks) is not None:
            yield Condition(f"masks {'/'.join(kinds)}", lambda call: call.tuning_class in kinds)
        yield from _keys_within(x.min_seqlen_k, x.max_seqlen_k)
        if x.query_lists:
            text = f"query lists of {x.query_lists} keys"
            yield Condition(text, lambda call: call.query_lists == x.query_lists)
        elif x.clears_dq:
            yield Condition("deterministic=False", lambda call: not call.is_ordered)
        if x.min_window:
            yield Condition(
                f"no window below {x.min_window}",
                lambda call: call.window is None or call.window >= x.min_window,
            )
        if x.without_lists:
            yield Condition("no block lists", lambda call: not call.has_lists)
        if x.lists_per_warpgroup:
            yield Condition(
                f"block lists of a multiple of {x.tile_m} queries and an odd one of 64 keys",
                lambda call: (
                    call.lists_per_warpgroup is not None
                    and call.lists_per_warpgroup[0] % x.tile_m == 0
                    and call.lists_per_warpgroup[1] % 128 == 64
                ),
            )
        if x.cta_pair:
            yield Condition("no soft cap and no score_mod", lambda call: call.may_pair)
        if x.if_asked:
            yield Condition("config cta_pair=True", lambda call: call.asks_pair)
        if x.splits_keys:
            yield Condition("no soft cap and no score_mod", lambda call: call.may_split_keys)


def _dims_up_to(max_dim: int, max_dim_v: int, above_dim: int = 0) -> Iterator[Condition]:
    text = f"head_dim <= {max_dim}"
    yield Condition(
        f"{above_dim} < {text}" if above_dim else text,
        lambda call: above_dim < call.head_dim <= max_dim,
    )
    yield Condition(f"head_dim_v <= {max_dim_v}", lambda call: call.head_dim_v <= max_dim_v)


def _keys_within(least: int, most: int | None) -> Iterator[Condition]:
    if least:
        yield Condition(f"seqlen_k >= {least}", lambda call: call.seqlen_k >= least)
    if most is not None:
        yield Condition(f"seqlen_k <= {most}", lambda call: call.seqlen_k <= most)


Row = TypeVar("Row", FwdRow, BwdRow)


def rows_for(rows: tuple[Row, ...], call: RowFacts) -> Iterator[Row]:
    """The rows that a call may use, best first."""
    return (row for row in rows if all(condition.holds(call) for condition in row.conditions()))


def describe_conditions(row: FwdRow | BwdRow) -> str:
    """The conditions of a row, in words."""
    return ", ".join(condition.text for condition in row.conditions())
