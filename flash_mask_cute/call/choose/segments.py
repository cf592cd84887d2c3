"""The choice how the segments of a forward's keys are computed (`core/segments.py`).

Bits are the same by each way, so shapes alone choose.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flash_mask_cute.call.choose.config import FwdTiles
from flash_mask_cute.call.choose.splits import are_enough_tiles
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.segments import BY_SEGMENTS, IN_TURN, ONE_SEGMENT
from flash_mask_cute.limits import OPEN_WINDOW

# bytes of partial results that a launch may leave to another one
MOST_BYTES = 256 << 20
# CTAs compute the segments of a tile in turn if it sees so few of them as a share of all
_FEW_SEEN = 0.5
_ROWS_PER_THREAD, _VECTOR = 2, 4


class Segments(NamedTuple):
    """Segments of the keys of a sequence.

    kind: how they are computed. num_blocks: key blocks of a segment, of tile_n keys. number: the
    most that a sequence may have.
    """

    kind: str
    num_blocks: int
    tile_n: int
    number: int

    @property
    def keys(self) -> int:
        """Keys of a segment."""
        return self.num_blocks * self.tile_n

    def memory_shape(self, tiles: FwdTiles, head_dim_v: int, num_ctas: int) -> tuple[int, ...]:
        """The fp32 memory of segments in turn (`RunningSums`), for so many CTAs."""
        # a thread has two rows, of which each of four threads has a quarter
        columns = -(-head_dim_v // 16) * 16 // 4
        vectors = 2 + _ROWS_PER_THREAD * columns // _VECTOR
        return num_ctas, vectors, 2 * tiles.tile_m, _VECTOR

    def describe(self) -> str:
        """The segments in words."""
        cut = (
            f"sums are cut at every {self.keys} keys of a sequence, {self.number} segments at most"
        )
        how = {
            ONE_SEGMENT: "one pass",
            IN_TURN: "each CTA folds those of its work tiles",
            BY_SEGMENTS: "any CTA computes any of them, and a launch folds them in their order",
        }
        return f"{cut}; {how[self.kind]}"


def choose_segments(
    seqlen_k_per_split: int,
    tiles: FwdTiles,
    problem: AttentionProblem,
    shapes: FwdShapes,
    window: int | None,
    num_sms: int,
    is_wide: bool,
) -> Segments:
    """seqlen_k_per_split: of the call, checked. window: the most keys that a query sees, None: all.
    is_wide: out is wider than q, which only a fold of another launch writes."""
    # a kernel counts in 32 bits, and no sequence has more keys
    num_blocks = min(seqlen_k_per_split, OPEN_WINDOW) // tiles.tile_n
    number = max(-(-shapes.seqlen_k // (num_blocks * tiles.tile_n)), 1)
    segments = Segments(ONE_SEGMENT, num_blocks, tiles.tile_n, number)
    if is_wide:
        return segments._replace(kind=BY_SEGMENTS)
    if number == 1:
        return segments
    in_turn = segments._replace(kind=IN_TURN)
    if problem.needs_lse_low or problem.needs_max_scores or problem.has_seqused_q:
        # which the launch that folds neither has nor knows
        return in_turn
    if window is not None:
        seen = math.ceil((window + shapes.seqlen_q) / segments.keys) + 1
        if seen <= _FEW_SEEN * number:
            return in_turn
    rows = shapes.seqlen_q * padded_group(problem.packed_heads)
    heads = shapes.heads_q // problem.packed_heads
    is_many = are_enough_tiles(problem, shapes, rows, heads, tiles.tile_m, num_sms)
    partial_rows = number * shapes.heads_q
    partial_rows *= shapes.total_q if problem.varlen_q else shapes.batch * shapes.seqlen_q
    is_large = 4 * partial_rows * (shapes.head_dim_v + 1) > MOST_BYTES
    return in_turn if is_many or is_large else segments._replace(kind=BY_SEGMENTS)
