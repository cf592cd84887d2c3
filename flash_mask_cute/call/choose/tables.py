"""Tile shapes by head dimension and mask, as data. The first row whose conditions hold is used.

The rows of Hopper for head dimensions 64, 128 and 256 were measured on an H200
(docs/facts/hopper_forward.md), the others follow from what fits. Nothing on Blackwell was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from flash_mask_cute.call.problem import TuningClass

# keys of a query, in units of the queries, from which on causal walks are about equal
_LATE = 8


class CallFacts(NamedTuple):
    """The facts about a call that conditions of rows use.

    tuning_class: of the `AttentionProblem`. window: the most keys that a query sees, if the window
    is closed on both sides. decode_rows: query rows that share keys, for a forward in splits, over
    pages, or of so few that one pass is decoding, else None. functions_under_causal: see the
    problem. block_size: of block lists that the kernel would read as they are. may_pair: two CTAs
    may share a walk. may_split_keys: warpgroups may have keys of their own in wide heads.
    is_ordered: sums have an order (deterministic). sequences: the number of sequences of
    `seqlen_q` queries and one head each; num_sms: CTAs that run at once. selected_block: keys
    of a block of each query's choice, 0 if there is none. has_lists: block lists or choices leave
    out blocks. token_lists: as in the problem. own_lists: the size of blocks of lists that the
    warpgroups of a tile may have of their own. asks_pair: the config has cta_pair=True.
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
    token_lists: int = 0
    own_lists: tuple[int, int] | None = None
    asks_pair: bool = False

    @property
    def splits_sectors(self) -> bool:
        """Whether rows of queries and keys begin inside L2 sectors, which have 32 bytes."""
        return self.head_dim % 16 != 0

    @property
    def has_equal_walks(self) -> bool:
        """Whether all queries see about as many keys: all, or all but a few under causal masking at
        the end of a long context."""
        is_late = self.seqlen_k >= _LATE * self.seqlen_q
        is_causal = self.tuning_class == TuningClass.CAUSAL
        return self.tuning_class == TuningClass.FULL or (is_causal and is_late)

    def fill(self, tile_m: int) -> float:
        """The fill of a launch's CTA waves with queries, with a tile of tile_m rows in each."""
        tiles = self.sequences * -(-self.seqlen_q // tile_m)
        waves = -(-tiles // self.num_sms)
        return self.sequences * self.seqlen_q / max(waves * self.num_sms * tile_m, 1)


class Condition(NamedTuple):
    """A row's condition on a call, in words and as a test."""

    text: str
    holds: Callable[[CallFacts], bool]


class FwdRow(NamedTuple):
    """Tiles for head_dim <= max_dim and head_dim_v <= max_dim_v, with the reasons.

    masks: the tuning classes of problems that it is for, all if empty. max_window: for windows that
    are closed on both sides and have at most this many keys. min_seqlen_q, min_seqlen_k: for at
    least this many queries and keys; max_seqlen_q: for at most this many queries. above_dim:
    head_dim is greater. splits_sectors: only if rows begin inside an L2 sector. gain: the speedup
    over tiles of 128 rows, if equally many SMs are busy; if walks are equal and the last wave of
    CTAs costs more than that, the row does not apply. cta_pair: a pair of CTAs, with a tile each,
    walks over the keys together. native_block_lists: only with block lists whose blocks consist of
    whole tiles of this row. The kernel then reads the lists as they are, and a block is partial
    only by its own mask. It does not apply to problems that read mask bits, which exist for tiles
    of any size. needs_sfu: only if functions of scores are computed under causal masking alone,
    which keeps the special function units busy. for_decode: only if the rows that share keys fit a
    tile, and `decode_rows` are told. max_selected: for choices of blocks of at most so many keys.
    own_lists: only with block lists of an odd multiple of 64 queries, of which each warpgroup reads
    its own. polynomial: see `FwdConfig`.
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
    own_lists: bool = False

    @property
    def is_general(self) -> bool:
        """Whether head dimensions are its only condition."""
        of_dims = _dims_up_to(self.max_dim, self.max_dim_v, self.above_dim)
        return len(list(self.conditions())) == len(list(of_dims))

    def conditions(self) -> Iterator[Condition]:
        yield from _dims_up_to(self.max_dim, self.max_dim_v, self.above_dim)
        if self.masks:
            yield Condition(" or ".join(self.masks), lambda call: call.tuning_class in self.masks)
        if self.min_seqlen_q:
            yield Condition(
                f"seqlen_q >= {self.min_seqlen_q}", lambda call: call.seqlen_q >= self.min_seqlen_q
            )
        if self.max_seqlen_q is not None:
            longest = self.max_seqlen_q
            yield Condition(f"seqlen_q <= {longest}", lambda call: call.seqlen_q <= longest)
        if self.min_seqlen_k:
            yield _keys_at_least(self.min_seqlen_k)
        if self.gain is not None:
            gain = self.gain
            yield Condition(
                f"waves as full as with 128 rows, or {gain - 1:.0%} less, of equal walks",
                lambda call: not call.has_equal_walks or call.fill(128) <= gain * call.fill(192),
            )
        if self.splits_sectors:
            yield Condition("rows that begin inside a sector", lambda call: call.splits_sectors)
        if self.max_window is not None:
            most = self.max_window
            yield Condition(
                f"window <= {most}", lambda call: call.window is not None and call.window <= most
            )
        if self.for_decode:
            most_rows = self.tile_m
            yield Condition(
                f"at most {most_rows} rows that share keys",
                lambda call: call.decode_rows is not None and call.decode_rows <= most_rows,
            )
        if self.max_selected is not None:
            largest = self.max_selected
            yield Condition(
                f"selected blocks of at most {largest} keys",
                lambda call: 0 < call.selected_block <= largest,
            )
        if self.needs_sfu:
            yield Condition("functions of scores, causal", lambda call: call.functions_under_causal)
        if self.native_block_lists:
            yield Condition(
                f"blocks of a multiple of {self.tile_m} x {self.tile_n}",
                lambda call: (
                    call.block_size is not None
                    and call.block_size[0] % (self.tile_m * (1 + self.cta_pair)) == 0
                    and call.block_size[1] % self.tile_n == 0
                ),
            )
        if self.own_lists:
            yield Condition(
                f"block lists of an odd multiple of 64 queries, and of a multiple of {self.tile_n} "
                "keys",
                lambda call: (
                    call.own_lists is not None
                    and call.own_lists[0] % 128 == 64
                    and call.own_lists[1] % self.tile_n == 0
                ),
            )
        if self.cta_pair:
            yield Condition("CTAs may form pairs", lambda call: call.may_pair)


class BwdRow(NamedTuple):
    """Query rows of a block and buffers of the backward, with the reasons.

    For head_dim <= max_dim and head_dim_v <= max_dim_v.

    masks: the tuning classes of problems that the row is for, None for all. min_seqlen_k,
    max_seqlen_k: keys of a sequence. above_dim: head_dim is greater. value_cols, clears_dq,
    cta_pair, splits_keys: see `BwdConfig`. Rows with clears_dq are for unordered sums, except those
    of token lists. Rows with cta_pair or splits_keys are also only for unmodified scores, those
    with cta_pair for devices with two SMs. if_asked: only if the config has cta_pair=True.
    min_window: of windows that are closed on both sides, those with at least so many keys.
    without_lists: no block lists or choices leave out blocks. token_lists: only for choices that
    are taken as token lists, with so many keys of a work tile. own_lists: only with block lists of
    a multiple of tile_m queries and an odd multiple of 64 keys, of which each warpgroup has its
    own.
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
    token_lists: int = 0
    if_asked: bool = False
    own_lists: bool = False

    def conditions(self) -> Iterator[Condition]:
        yield from _dims_up_to(self.max_dim, self.max_dim_v, self.above_dim)
        if self.masks is not None:
            kinds = self.masks
            yield Condition(f"masks {'/'.join(kinds)}", lambda call: call.tuning_class in kinds)
        if self.min_seqlen_k:
            yield _keys_at_least(self.min_seqlen_k)
        if self.max_seqlen_k is not None:
            longest = self.max_seqlen_k
            yield Condition(f"seqlen_k <= {longest}", lambda call: call.seqlen_k <= longest)
        if self.token_lists:
            keys = self.token_lists
            yield Condition(f"token lists of {keys} keys", lambda call: call.token_lists == keys)
        elif self.clears_dq:
            yield Condition("sums without an order", lambda call: not call.is_ordered)
        if self.min_window:
            narrowest = self.min_window
            yield Condition(
                f"no window below {narrowest}",
                lambda call: call.window is None or call.window >= narrowest,
            )
        if self.without_lists:
            yield Condition("no block lists", lambda call: not call.has_lists)
        if self.own_lists:
            yield Condition(
                f"block lists of a multiple of {self.tile_m} queries and an odd one of 64 keys",
                lambda call: (
                    call.own_lists is not None
                    and call.own_lists[0] % self.tile_m == 0
                    and call.own_lists[1] % 128 == 64
                ),
            )
        if self.cta_pair:
            yield Condition("scores that nothing modifies", lambda call: call.may_pair)
        if self.if_asked:
            yield Condition("config cta_pair=True", lambda call: call.asks_pair)
        if self.splits_keys:
            yield Condition("scores that nothing modifies", lambda call: call.may_split_keys)


def _dims_up_to(max_dim: int, max_dim_v: int, above_dim: int = 0) -> Iterator[Condition]:
    text = f"head_dim <= {max_dim}"
    yield Condition(
        f"{above_dim} < {text}" if above_dim else text,
        lambda call: above_dim < call.head_dim <= max_dim,
    )
    yield Condition(f"head_dim_v <= {max_dim_v}", lambda call: call.head_dim_v <= max_dim_v)


def _keys_at_least(least: int) -> Condition:
    return Condition(f"seqlen_k >= {least}", lambda call: call.seqlen_k >= least)


Row = TypeVar("Row", FwdRow, BwdRow)


def rows_for(rows: tuple[Row, ...], call: CallFacts) -> Iterator[Row]:
    """The rows that a call may use, best first."""
    return (row for row in rows if all(condition.holds(call) for condition in row.conditions()))


def describe_conditions(row: FwdRow | BwdRow) -> str:
    """The conditions of a row, in words."""
    return ", ".join(condition.text for condition in row.conditions())


SM90_FWD = (
    FwdRow(
        *(64, 64, 64, 64, 8, 2, False),
        "decoding waits for memory: one warpgroup, and no keys but those that were chosen",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 64, 64, 5, 2, True),
        "decoding waits for memory: one warpgroup, and no keys but those that were chosen",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(64, 64, 64, 128, 6, 2, False),
        "decoding waits for memory: one warpgroup, and as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 64, 128, 3, 2, True),
        "decoding waits for memory: one warpgroup, as many keys in flight as fit, and keys of the "
        "next tile before this one's last product",
        for_decode=True,
    ),
    FwdRow(
        *(192, 128, 64, 112, 2, 1, False),
        "decoding waits for memory: as many keys in flight as fit beside a separate output",
        for_decode=True,
    ),
    FwdRow(
        *(192, 192, 64, 96, 2, 1, True),
        "decoding waits for memory: as many keys in flight as fit, with a third stage of K",
        for_decode=True,
    ),
    FwdRow(
        *(256, 256, 64, 64, 3, 1, True),
        "decoding waits for memory: as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 128, 64, 3, 2, False),
        "a tile of keys has one block of a choice, and few queries a tile have few blocks together",
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "few queries a tile have few blocks of their choices together",
        max_selected=4096,
    ),
    FwdRow(
        *(192, 192, 128, 64, 2, 1, True),
        "a block of a choice consists of whole tiles; the output takes the query's place",
        max_selected=4096,
    ),
    FwdRow(
        *(64, 64, 192, 64, 6, 2, False),
        "each warpgroup passes over what its own lists do not have, and three share keys",
        min_seqlen_q=129,
        own_lists=True,
    ),
    FwdRow(
        *(128, 128, 192, 64, 5, 1, True),
        "each warpgroup passes over what its own lists do not have, and three share keys",
        min_seqlen_q=129,
        own_lists=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "tiles of which the usual blocks of block lists are made",
        native_block_lists=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "two warpgroups leave room for a warpgroup that evaluates mask_mod",
        masks=(TuningClass.MASK_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "a narrow window wastes less of a small tile, and short walks want keys early",
        max_window=1024,
    ),
    FwdRow(
        *(64, 64, 192, 96, 4, 2, False),
        "three warpgroups, with registers for what a score_mod computes",
        masks=(TuningClass.SCORE_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "short sequences fill small tiles better, and waste less along the diagonal",
        masks=(TuningClass.CAUSAL,),
        max_seqlen_q=1024,
    ),
    FwdRow(
        *(64, 64, 192, 128, 3, 2, False),
        "three warpgroups hide the latency of the exponentials",
        gain=1.2,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "smaller tiles fill the last wave of CTAs",
    ),
    FwdRow(
        *(80, 80, 192, 96, 2, 2, False),
        "three warpgroups hide the latency of the exponentials; the next query waits ready",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        above_dim=72,
        gain=1.15,
    ),
    FwdRow(
        *(96, 96, 192, 80, 3, 2, False),
        "reading such rows takes long, and here each key serves more queries",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        splits_sectors=True,
    ),
    FwdRow(
        *(96, 96, 192, 112, 3, 1, False),
        "three warpgroups hide the latency of the exponentials",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(96, 96, 128, 128, 3, 2, False, "two warpgroups take turns; the next query waits ready"),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups hide the latency of the exponentials, and each key serves more queries",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "reading such rows takes long, and here each key serves more queries",
        masks=(TuningClass.CAUSAL,),
        splits_sectors=True,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "each key serves more queries; in long walks waste along the diagonal weighs little",
        masks=(TuningClass.CAUSAL, TuningClass.SCORE_MOD),
        min_seqlen_k=32768,
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups hide the latency of a soft cap's functions",
        min_seqlen_k=8192,
        needs_sfu=True,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "square tiles waste least along a mask's edge; the next query waits ready",
    ),
    FwdRow(192, 128, 128, 112, 2, 1, False, "the largest key block beside a separate output"),
    FwdRow(192, 192, 128, 96, 2, 1, True, "the output takes the query's place in shared memory"),
    FwdRow(
        *(256, 256, 128, 64, 2, 1, True),
        "registers for scores and probabilities at once, and a third stage of K",
    ),
)

# On Blackwell a tile is 256 x 128, and of wide heads 128 x 128 (docs/forward_sm100.md says why). A
# pair of CTAs has two work tiles with one walk, which wastes nothing where every query sees the
# same keys and there is more than one tile.
_SM100_FWD = (
    *(
        FwdRow(
            *(d, d_v, 128, 128, stages, 1, False),
            "few rows share keys: one half of a tile, and its memory for keys in flight",
            for_decode=True,
        )
        for d, d_v, stages in ((64, 64, 5), (96, 96, 3), (128, 128, 2), (192, 128, 2))
    ),
    FwdRow(*(64, 64, 256, 128, 4, 2, False), "the next query waits ready, keys come early"),
    FwdRow(*(96, 96, 256, 128, 3, 1, False), "three blocks in flight rather than a second query"),
    FwdRow(
        *(128, 128, 256, 128, 2, 2, False),
        "a pair of CTAs reads half of each block, and the next query waits ready in its place",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(*(128, 128, 256, 128, 2, 1, False), "what fits beside a query and a staged output"),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "a pair of CTAs reads half of each block, and twice as many are in flight",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "a single CTA waits for its only place for keys; a pair visits a few blocks more",
        min_seqlen_q=1024,
        cta_pair=True,
    ),
    FwdRow(*(192, 128, 256, 128, 1, 1, False), "one key block and two value blocks fit"),
    *(
        row
        for d, pair_stages in ((192, 3), (256, 2))
        for row in (
            FwdRow(
                *(d, d, 128, 128, pair_stages, 1, False),
                "a pair of CTAs has the rows of one tile of narrower heads, and half of each block",
                min_seqlen_q=129,
                cta_pair=True,
            ),
            FwdRow(*(d, d, 128, 128, 1, 1, False), "one key block fits beside a query"),
        )
    ),
)

# exponentials of 128 by a polynomial on 10.0: as many as FlashAttention-4 has, and more where
# products would wait for the others; on 10.3, where they are computed at twice the rate, none
_POLYNOMIAL = {64: 28, 96: 32}
SM100_FWD = tuple(
    row._replace(polynomial=24 if row.for_decode else _POLYNOMIAL.get(row.max_dim, 24))
    for row in _SM100_FWD
)
SM103_FWD = _SM100_FWD

SM90_BWD = (
    BwdRow(
        *(64, 64, 64, 2, 2, 1, 64),
        "a few listed queries, all values in registers",
        clears_dq=True,
        token_lists=128,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "a few listed queries, with registers left for those who look them up",
        clears_dq=True,
        token_lists=128,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 0),
        "a few listed queries; both warpgroups have the same keys, and half of the columns each",
        clears_dq=True,
        token_lists=64,
    ),
    *(
        BwdRow(
            *(d, d, 64, 2, 2, 1, value_cols),
            "no CTA waits for one that stores first, and each warpgroup passes over what its lists "
            "do not have",
            masks,
            above_dim=above_dim,
            clears_dq=True,
            own_lists=True,
        )
        for d, above_dim, value_cols, masks in (
            (64, 0, 64, None),
            (96, 64, 96, (TuningClass.OTHER,)),
            (128, 0, 64, (TuningClass.OTHER,)),
            (128, 0, 32, None),
        )
    ),
    BwdRow(
        *(64, 64, 64, 2, 2, 1, 64),
        "user callables take the registers of 64 queries, but not those of the values",
        (TuningClass.SCORE_MOD, TuningClass.MASK_MOD),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 48),
        "registers for 128 queries and most values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 16),
        "registers for 128 queries and a few values, with enough left for the mask warps",
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "all values in registers; walks that begin at the same queries do not wait for each other",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "as for wider heads: in long walks sums that the first one stores cost more than clearing",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "registers for 64 queries and all values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
        above_dim=64,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "all walks begin at the same queries; each would wait for the first one to store a block",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "in walks of this length, sums that the first one stores came with 1.16 times the time",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "registers for 64 queries and half of the values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "registers for 64 queries and some values, with enough left for bits of many edges",
    ),
    *(
        BwdRow(
            *(d, d_v, 64, 2, stages_do, 1, 0),
            *(reason, masks, min_seqlen_k, max_seqlen_k),
            above_dim=128,
            clears_dq=clears_dq,
            splits_keys=True,
        )
        for d, d_v, stages_do in ((160, 160, 2), (192, 128, 1))
        for reason, masks, min_seqlen_k, max_seqlen_k, clears_dq in (
            (
                "as for narrower heads: all walks begin at the same queries",
                *((TuningClass.FULL,), 0, 6144, True),
            ),
            (
                "as for narrower heads: in long walks first stores cost more than clearing",
                *((TuningClass.CAUSAL,), 32768, None, True),
            ),
            (
                "a CTA with 128 keys adds dQ half as often, and reads Q and dO half as often",
                *(None, 0, None, False),
            ),
        )
    ),
    BwdRow(
        *(192, 192, 64, 2, 2, 1, 0),
        "two CTAs that sum dQ together add half as much of it to memory",
        above_dim=128,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(*(192, 192, 64, 2, 2, 1, 0), "half of the sums' columns in each warpgroup"),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "two CTAs that sum dQ together add half as much of it to memory",
        above_dim=192,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "as up to 192; a second query is worth more than a second dO",
    ),
)

# By the model of docs/backward_sm100.md, a pair at 128 columns takes 0.8 of the time of two CTAs
# for as many blocks. It visits a block that either CTA needs: with four key tiles under causal
# masking, or in a window of 512 keys, that is 1.2 times as many.
_SM100_PAIR = BwdRow(
    *(128, 128, 128, 2, 1, 1, 0),
    "two CTAs read half of the queries each, and add half as much of dQ to memory",
    min_seqlen_k=512,
    above_dim=96,
    clears_dq=True,
    cta_pair=True,
    min_window=512,
    without_lists=True,
)
# By the same model, a pair at 192/128 columns keeps them busy for 76 %, and single CTAs for 51 %.
_SM100_WIDE_PAIR = _SM100_PAIR._replace(
    max_dim=192,
    reason="two CTAs have room for blocks of 128 queries, and add half as much of dQ to memory",
    above_dim=128,
)
# The rows of single CTAs have blocks of 64 queries, which no pair has.
_SM100_ASKED_PAIR = _SM100_WIDE_PAIR._replace(
    if_asked=True, min_seqlen_k=0, min_window=0, without_lists=False
)
# Such a pair has the keys of one CTA, so it visits no more blocks.
_SM100_FOLDED_PAIR = BwdRow(
    *(256, 256, 128, 2, 1, 1, 0),
    "CTAs of 64 keys have room for all sums in one launch",
    above_dim=192,
    clears_dq=True,
    cta_pair=True,
)
# Each row with clears_dq is there again for sums that have an order.
# On Blackwell a block is 128 queries by 128 keys, or 64 by 128 (docs/backward_sm100.md says why).
SM100_BWD = tuple(
    row._replace(clears_dq=clears_dq)
    for row in (_SM100_PAIR, _SM100_WIDE_PAIR, _SM100_ASKED_PAIR, _SM100_FOLDED_PAIR)
    for clears_dq in (True, False)
) + tuple(
    row
    for d, d_v, tile_m, stages_q, stages_do, reason in (
        (64, 64, 128, 2, 2, "two query blocks in flight"),
        (96, 96, 128, 2, 2, "two query blocks in flight, and dQ in the columns of dP"),
        (128, 128, 128, 2, 1, "what fits beside two blocks of Q"),
        (192, 128, 64, 2, 2, "blocks of 64 queries leave room for both sums, and dQ over dP"),
        (192, 192, 64, 2, 1, "the same, with dQ over S"),
        (256, 128, 64, 2, 1, "the same, with dQ over S"),
        (128, 256, 64, 2, 1, "blocks of 64 queries leave room for both sums, and dQ over dP"),
        (256, 256, 64, 1, 1, "a launch for dV, and one for dK and dQ, which fills the memory"),
    )
    for row in (
        BwdRow(
            *(d, d_v, tile_m, stages_q, stages_do, 1, 0),
            f"{reason}; clearing costs once what asking for sums costs in every block",
            clears_dq=True,
        ),
        BwdRow(*(d, d_v, tile_m, stages_q, stages_do, 1, 0), reason),
    )
)
