"""The choice whether a forward computes its work tiles in splits, and the destination of splits.

*By rows*: each work tile in the number of splits that the caller requests (`num_splits` of 2 and
more), as `BlockInfo` cuts it. *By slots*: all key blocks in equal shares, one for each CTA
(`core/shares.py`); the library chooses this if the choice is its own (`num_splits` 0, the default).
One split is one pass, without a combination.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.shares import (
    BY_ROWS,
    BY_SLOTS,
    DECODE_ROWS,
    SLOTS_PER_SHARE,
    are_busy,
)

# keys of a block, and query rows of a work tile of more than DECODE_ROWS, where the tiles are not
# known yet
_KEYS, _ROWS = 128, 128
# walks of fewer blocks are not worth a combination: of decoding, and of more queries than that
_LEAST_BLOCKS, _LEAST_BLOCKS_OF_MANY = 4, 32
# work tiles of decoding, in units of SMs, from which on the last wave weighs little
_MANY_WAVES = 8
# Equal work tiles that fill so much of their waves are faster as a whole: of 512 on 132 SMs, 0.97
# of the stream of a H100 against 0.94 (docs/serving.md).
_FULL_WAVES = 0.95


class Splits(NamedTuple):
    """Scratch of a forward that computes work tiles in splits.

    kind: BY_ROWS or BY_SLOTS. number: splits of each work tile, or CTAs that have a share.
    out_shape, lse_shape: shapes of the fp32 tensors that all splits are written to. has_low: there
    is another one like LSE, for its rounding error, because scores may have any size.
    """

    kind: str
    number: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    has_low: bool

    @staticmethod
    def by_rows(problem: AttentionProblem, shapes: FwdShapes, number: int) -> Splits:
        """number: splits of each work tile."""
        rows = (1, shapes.total_q) if problem.varlen_q else (shapes.batch, shapes.seqlen_q)
        lse_shape = (number, *rows, shapes.heads_q)
        has_low = problem.score_mod is not None
        return Splits(BY_ROWS, number, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)

    @staticmethod
    def by_slots(
        problem: AttentionProblem, shapes: FwdShapes, num_ctas: int, tile_m: int
    ) -> Splits:
        """num_ctas: at most. tile_m: query rows of a work tile."""
        rows = tile_m
        if not problem.varlen_q:
            of_sequence = shapes.seqlen_q * padded_group(problem.packed_heads)
            rows, tiles = min(rows, of_sequence), shapes.batch * math.ceil(of_sequence / tile_m)
            heads = shapes.heads_q // problem.packed_heads
            num_ctas = aligned_shares(tiles, heads, num_ctas, tile_m)
        lse_shape = SLOTS_PER_SHARE * num_ctas, rows
        has_low = problem.score_mod is not None
        return Splits(BY_SLOTS, num_ctas, (*lse_shape, shapes.head_dim_v), lse_shape, has_low)

    @property
    def num_bytes(self) -> int:
        numbers_of_lse = 2 if self.has_low else 1
        return 4 * (math.prod(self.out_shape) + numbers_of_lse * math.prod(self.lse_shape))

    def describe(self) -> str:
        """The splits in words."""
        scratch = f"{self.num_bytes} bytes of scratch, and a launch that combines"
        if self.kind == BY_SLOTS:
            return f"all key blocks in {self.number} equal shares, found on the device; {scratch}"
        return f"{self.number} of each work tile; {scratch}"


def aligned_shares(tiles: int, heads: int, num_ctas: int, tile_m: int) -> int:
    """CTAs that have shares: num_ctas, or a few less if each head has a line of its own, with so
    many work tiles, and equal tiles then fill whole shares."""
    most = num_ctas // heads
    if tile_m <= DECODE_ROWS:
        for of_head in range(most, 0, -1):
            if not are_busy(of_head * heads, num_ctas):
                break
            if tiles % of_head == 0:
                return num_ctas if of_head == most else of_head * heads
    return num_ctas


def decode_rows(shapes: FwdShapes, may_pack: bool) -> int:
    """Rows of a sequence that share keys: all heads of a group if they can share a tile."""
    return shapes.seqlen_q * (padded_group(shapes.heads_q // shapes.heads_kv) if may_pack else 1)


def refuse_splits(problem: AttentionProblem, what: str) -> None:
    """Refuse results that splits do not have. what: of the call asks for splits.

    Raises:
        NotImplementedError: lse_low or max_scores are asked for, too.
    """
    for name in ("lse_low", "max_scores"):
        if getattr(problem, f"needs_{name}"):
            raise NotImplementedError(
                f"{what} is not supported together with {name}: of splits, out and lse are combined"
            )


def choose_split(
    num_splits: int,
    problem: AttentionProblem,
    shapes: FwdShapes,
    may_pack: bool,
    window: int | None,
    num_sms: int,
    has_config: bool,
    equal_walks: bool = False,
) -> str | None:
    """BY_ROWS, BY_SLOTS, or None: one pass.

    num_splits: the caller's, checked. may_pack: heads of a group can share a tile. window: the most
    keys that a query sees, None: all. has_config: the caller chose tiles, which are for one pass
    unless the caller also asks for splits. equal_walks: walks are about as long, whatever the
    lengths of sequences.

    Raises:
        NotImplementedError: num_splits is requested together with lse_low or max_scores.
    """
    if num_splits > 1:
        refuse_splits(problem, f"num_splits={num_splits}")
        return BY_ROWS
    if num_splits == 1:
        return None
    if has_config or problem.needs_lse_low or problem.needs_max_scores:
        return None
    keys = shapes.seqlen_k if window is None else min(shapes.seqlen_k, window + shapes.seqlen_q)
    rows = decode_rows(shapes, may_pack)
    heads = shapes.heads_kv if may_pack else shapes.heads_q
    is_decoding = rows <= DECODE_ROWS
    if keys < _KEYS * (_LEAST_BLOCKS if is_decoding else _LEAST_BLOCKS_OF_MANY):
        return None
    tile_m = DECODE_ROWS if is_decoding else _ROWS
    of_tiles = rows, heads, tile_m, num_sms
    is_many = are_enough_tiles(problem, shapes, *of_tiles, equal_walks=equal_walks)
    return None if is_many else BY_SLOTS


def are_enough_tiles(
    problem: AttentionProblem,
    shapes: FwdShapes,
    rows: int,
    heads: int,
    tile_m: int,
    num_sms: int,
    equal_walks: bool = False,
) -> bool:
    """Whether work tiles keep all SMs busy without splits.

    rows: of a sequence that share keys. heads: of a sequence whose rows share nothing. tile_m: rows
    of a work tile. equal_walks: as for `choose_split`.
    """
    group, is_decoding = rows // max(shapes.seqlen_q, 1), rows <= DECODE_ROWS
    tiles = math.ceil(rows / tile_m) * shapes.batch
    if problem.varlen_q:
        tiles = min(tiles, shapes.total_q * group // tile_m + shapes.batch)
    tiles *= heads
    most = num_sms * _MANY_WAVES if is_decoding else num_sms
    if tiles >= most:
        return True
    are_equal = equal_walks or not (problem.varlen_q or problem.varlen_k or problem.has_seqused_k)
    return are_equal and tiles >= _FULL_WAVES * num_sms * math.ceil(tiles / num_sms)
