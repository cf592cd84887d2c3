"""Statistics of P = exp(S - LSE) for Hopper: a forward without values and output.

Roles, channels, walks and masks are those of `flash_fwd`. An MMA warpgroup has 64 query rows. It
takes turns with the others to issue S of a key block, waits for it, and reduces P while the others
multiply: entropies to registers, and sums and largest numbers of a few rows and keys to memory.
Sums of keys, which other CTAs have too, are those of all its rows when it adds them to memory.

LSE is known, so key ranges are independent, and a work tile may be split without a combination.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.arch import fmax
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core.cta import (
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    thread_in_warpgroup,
)
from flash_mask_cute.core.exp2 import LN_2, LOG2_E
from flash_mask_cute.core.lengths import Lengths, row_place
from flash_mask_cute.core.operand_loads import N_BLOCK_SHIFT
from flash_mask_cute.core.softmax import CHAINS, ScoreScales, quad_reduce, rounded_difference
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Kind
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.aux_gradients import add_without_a_branch, offset_in
from flash_mask_cute.mods.calling import head_of_row
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskArgs
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90
from flash_mask_cute.sm90.flash_fwd_epilogue import Epilogue
from flash_mask_cute.sm90.flash_fwd_mainloop import BlockFacts, KeyBlocks, tile_rows
from flash_mask_cute.sm90.flash_fwd_traits import Barrier, FwdTraits
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx, sync_warpgroup
from flash_mask_cute.sm90.wgmma import ROWS_PER_THREAD

# An exponent of 2 far below that of any LSE, and a finite score.
LOWEST_EXPONENT, LOWEST_SCORE = -(2.0**100), -(2.0**127)
# Columns of the tile of V, which nobody loads.
NO_VALUES = 16
# A warp may store sums of keys of a block while others read those of the block before.
_STAGES_OF_SUMS = 2


@dataclass(frozen=True)
class StatisticsTraits(FwdTraits):
    """`FwdTraits` without values and output: the place of V has sums of keys, fp32 (keys, warps,
    warpgroups, stages), and that of O is in the query's place."""

    tile_dv = NO_VALUES  # type: ignore[assignment]
    _stage_bytes_v = 0  # type: ignore[assignment]

    def layout_sums(self) -> cute.Layout:
        warpgroups, stages = self.num_mma_warpgroups, _STAGES_OF_SUMS
        return cute.make_layout((self.tile_n, WARPS_PER_WARPGROUP, warpgroups, stages))

    @property
    def _smem_without_spare_key(self) -> int:
        sums = 4 * self.tile_n * self.num_mma_warps * _STAGES_OF_SUMS
        return super()._smem_without_spare_key + sums

    def layout_v(self) -> cute.ComposedLayout:
        columns = 8
        rows = cute.size(self.layout_sums()) * Float32.width // self.dtype.width // columns
        return wgmma.rows_layout(self.dtype, rows, columns, 1)


class StatisticsTensors(NamedTuple):
    """The destination of statistics, in the place of `Partials`.

    key_sums: fp32 (batch, heads_kv, keys), or (heads_kv, keys) of packed keys, or words of exact
    sums (`fixed_point_sums`), one mode more. entropy: (splits, ...) of a tensor like LSE.
    block_sums, block_maxima: (batch, head, rows, keys), each of several, where packed heads count
    once. heads_per_kv: such heads of a KV head.
    """

    key_sums: cute.Tensor | None
    entropy: cute.Tensor | None
    block_sums: cute.Tensor | None
    block_maxima: cute.Tensor | None
    num_splits: Int32
    heads_per_kv: Int32

    split_blocks = None

    def grid(self, by_tiles: Int32) -> Int32:
        return by_tiles


@dataclass(eq=False, repr=False)
class AttentionStatisticsSm90(FlashAttentionForwardSm90):
    """Kernel of statistics for Hopper. mPartials has the fields of `StatisticsTensors`; mV and mO
    are None, and mLSE is read.

    :param statistics: `AttentionProblem.statistics_block`; the others as of the forward
    """

    statistics: tuple[int, int, bool] = (1, 128, True)

    traits_type = StatisticsTraits
    destination_of = staticmethod(lambda given, split, has_low: StatisticsTensors(*given))

    def __post_init__(self) -> None:
        self.split = "keys"
        super().__post_init__()

    def _rules(self, masks: MaskArgs, lengths: Lengths) -> ForwardMask:
        # rows that do not exist are hidden by bits
        return replace(super()._rules(masks, lengths), cuts_overhang=True)

    @cute.jit
    def mma(self, epilogue: Epilogue, tiles, channels, scales: ScoreScales, masks: MaskArgs):
        """MMA warpgroup: 64 query rows of every work tile."""
        facts = BlockFacts(self._can_be_cut(masks), keeps_largest=False, rows_alone=False)
        blocks = KeyBlocks.create(
            *(self.traits, self.score_mod, tiles, channels, scales, masks.aux_tensors), facts
        )
        of_rows = (cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32) for _ in range(2))
        acc_S = wgmma.make_accumulator(self.traits.tile_n)
        blocks = RowStatistics(*vars(blocks).values(), epilogue, *of_rows, acc_S, self.statistics)
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while channels.ring.wait(tile):
            channels.q.wait(tile)
            blocks.begin(channels.ring.read(tile))
            flags = blocks.issue(tile, block)
            blocks.finish(block)
            while flags & KIND_MASK != Kind.END:
                flags, cut = blocks.visit(flags, tile, block, cut, has_next=True)
                block += 1
            _, cut = blocks.visit(flags, tile, block, cut, has_next=False)
            block += 1
            channels.q.release(tile)
            blocks.end(channels.ring.read(tile))
            channels.ring.release(tile)
            tile += 1


@dataclass(frozen=True)
class RowStatistics(KeyBlocks):
    """Key blocks, and what a thread keeps of its rows of a work tile.

    of: LSE, lengths, and as `partials` the `StatisticsTensors`. bias: LSE, to base 2 without a
    score_mod; 0 for a row that sees nothing. entropy: sums of p times its logarithm to base 2.
    block: rows and keys of a sum of blocks, and whether rows of all sequences follow each other.
    """

    of: Epilogue
    bias: cute.Tensor
    entropy: cute.Tensor
    acc_S: cute.Tensor
    block: cutlass.Constexpr[tuple[int, int, bool]]

    def _rows(self, work: Work) -> list[tuple[Int32, Int32, Int32]]:
        """Of each row of this thread: the row, its head and its query."""
        group = self.traits.packed_heads, self.traits.group_size
        rows = tile_rows(self.traits, work, thread_in_warpgroup())
        return [(row, head_of_row(work, row, *group), row // group[0]) for row in rows]

    @cute.jit
    def begin(self, work: Work) -> None:
        """Start with the rows of a work tile."""
        for r, (_, head_idx, q_idx) in enumerate(self._rows(work)):
            lse = Float32(0.0)
            if q_idx < work.seqlen_q:
                lse = self.of.lse.lse[row_place(self.of.lengths, work, head_idx, q_idx)]
            lse = cutlass.select_(lse == -Float32.inf, Float32(0.0), lse)
            self.bias[r] = lse * LOG2_E if const_expr(self.score_mod is None) else lse
            self.entropy[r] = Float32(0.0)

    def issue(self, tile: Int32, block: Int32) -> Int32:
        """Issue S of a key block. Returns its flags."""
        self.wait_for_keys(block)
        self.issue_scores(self.acc_S, tile, block)
        return self._block_flags(block)

    def finish(self, block: Int32) -> None:
        warpgroup.wait_group(0)
        self.channels.k.release(block)

    @cute.jit
    def visit(
        self, flags: Int32, tile: Int32, block: Int32, cut: Int32,
        has_next: cutlass.Constexpr[bool],
    ) -> tuple:  # fmt: skip
        """Reduce P of a key block, with S of the next one under the reduction. Returns the flags of
        the next, and the number of partial blocks so far."""
        channels, n_block = self.channels, flags >> N_BLOCK_SHIFT
        scores, work = wgmma.rows_by_cols(self.acc_S), channels.ring.read(tile)
        if const_expr(self.score_mod is None):
            self._modify(None, None, scores)
        elif work.has_scores:
            # a sequence without queries or keys has no position to evaluate
            loaded = self._load_table_rows(tile, flags)
            self._modify(self._places(tile, flags, True), loaded, scores)
        if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
            words = zip(self._bits(cut, Boolean(False)), self._rows(work), strict=True)
            # rows that do not exist would count for keys
            in_use = [(word, q_idx < work.seqlen_q) for word, (_, _, q_idx) in words]
            bits = tuple(cutlass.select_(is_used, word, Int32(0)) for word, is_used in in_use)
            hidden = -Float32.inf
            if const_expr(self.score_mod is None):
                # not -inf, which times a p of 0 is NaN
                hidden = cute.arch.rcp_approx(self.softmax.scale_log2) * LOWEST_EXPONENT
                hidden = fmax(hidden, Float32(LOWEST_SCORE))
            bit_tile.hide_unset(scores, bits, hidden)
            cut += 1
        probs = cute.make_rmem_tensor_like(scores)
        self._take_probabilities(scores, probs)
        if const_expr(has_next):
            flags = self.issue(tile, block + 1)
        self._store_blocks(probs, work, n_block)
        if const_expr(self.of.partials.key_sums is not None):
            self._add_columns(probs, work, block, n_block)
        if const_expr(has_next):
            self.finish(block + 1)
        return flags, cut

    def _take_probabilities(self, scores: cute.Tensor, probs: cute.Tensor) -> None:
        """Probabilities (rows, cols) of scores, and additions to the entropy of their rows."""
        for r in range(ROWS_PER_THREAD):
            sums = [Float32(0.0)] * CHAINS
            for c in range(cute.size(scores, mode=[1])):
                exponent = self._exponent(scores[r, c], r)
                p = cute.math.exp2(exponent, fastmath=True)
                sums[c % CHAINS] = cute.math.fma(p, exponent, sums[c % CHAINS])
                probs[r, c] = p
            if self.of.partials.entropy is not None:
                self.entropy[r] = self.entropy[r] + _reduced(sums, operator.add)

    def _exponent(self, score: Float32, r: int) -> Float32:
        """The logarithm of p to base 2."""
        if self.score_mod is None:
            return cute.math.fma(score, self.softmax.scale_log2, -self.bias[r])
        # scores of any size: first the difference, which is exact near 0
        exponent = rounded_difference(self.softmax.score(score), self.bias[r]) * LOG2_E
        return fmax(exponent, Float32(LOWEST_EXPONENT))

    # -- memory ---------------------------------------------------------------------------------

    @cute.jit
    def _store_blocks(self, probs: cute.Tensor, work: Work, n_block: Int32):
        """Store sums and largest numbers of `block` rows and keys. Others have other keys, or rows
        of other warps, so each is stored once."""
        of_sum, keys, follows = self.block
        parts = self.traits.tile_n // keys
        batch_idx, first = work.batch_idx, Int32(0)
        if const_expr(follows and self.of.lengths.cu_seqlens_q is not None):
            batch_idx, first = Int32(0), work.offset_q * self.traits.packed_heads
        is_first = cute.arch.lane_idx() % (4 * min(of_sum, wgmma.ROWS_OF_GROUP)) == 0
        rows = self._rows(work)
        for target, op in (
            (self.of.partials.block_sums, operator.add),
            (self.of.partials.block_maxima, fmax),
        ):
            for part in cutlass.range_constexpr(parts if target is not None else 0):
                values = _reduced_rows(probs, part, parts, of_sum, op)
                column = n_block * parts + part
                for r in cutlass.range_constexpr(len(values)):
                    row, _, q_idx = rows[r]
                    place = batch_idx, work.head_idx, (first + row) // of_sum, column
                    if is_first & (q_idx < work.slot) & (column < target.shape[3]):
                        target[place] = values[r]

    @cute.jit
    def _add_columns(self, probs: cute.Tensor, work: Work, block: Int32, n_block: Int32):
        """Add the sums over this warpgroup's rows to those of keys."""
        target, lengths, tile_n = self.of.partials.key_sums, self.of.lengths, self.traits.tile_n
        place: tuple = (work.head_idx // self.of.partials.heads_per_kv,)
        if const_expr(lengths.cu_seqlens_k is None):
            place = lengths.kv_entry(work.batch_idx), *place
        memory = cute.recast_ptr(self.tiles.v.iterator, dtype=Float32)
        of_all = cute.make_tensor(memory, self.traits.layout_sums())
        of_warps = of_all[None, None, mma_warpgroup_idx(), block % _STAGES_OF_SUMS]
        thread, (first, sums) = thread_in_warpgroup(), _sums_of_columns(probs)
        first += wgmma.first_col_of(thread)
        for i in cutlass.range_constexpr(len(sums)):
            of_warps[first + wgmma.col_offset(i), thread // WARP] = sums[i]
        sync_warpgroup(Barrier.EPILOGUE)
        for key in range(thread, tile_n, THREADS_PER_WARPGROUP):
            total = _reduced([of_warps[key, w] for w in range(WARPS_PER_WARPGROUP)], operator.add)
            k_idx = work.offset_k + n_block * tile_n + key
            # keys past the end are hidden, and a sum of 0 is not added
            add_without_a_branch(target, offset_in(target, (*place, k_idx)), total)

    @cute.jit
    def end(self, work: Work):
        """Store the entropy of the rows of a work tile."""
        if const_expr(self.of.partials.entropy is not None):
            for r, (_, head_idx, q_idx) in enumerate(self._rows(work)):
                total = quad_reduce(self.entropy[r], operator.add)
                # adding 0 makes a zero positive
                entropy = cute.math.fma(total, Float32(-LN_2), Float32(0.0))
                if (thread_in_warpgroup() % 4 == 0) & (q_idx < work.slot):
                    place = row_place(self.of.lengths, work, head_idx, q_idx)
                    self.of.partials.entropy[(work.place, *place)] = entropy


def _reduced(values: list[Float32], op: Callable[[Float32, Float32], Float32]) -> Float32:
    """A power of two of values, pair by pair."""
    while len(values) > 1:
        values = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _reduced_rows(
    probs: cute.Tensor, part: int, parts: int, rows: int, op: Callable[..., Float32]
) -> list[Float32]:
    """One of `parts` parts of a warp's columns, reduced over them and over groups of `rows` rows:
    a value for each accumulator row, or one for both."""
    count = cute.size(probs, mode=[1]) // parts
    columns = range(part * count, (part + 1) * count)
    values = [_reduced([probs[r, c] for c in columns], op) for r in range(ROWS_PER_THREAD)]
    if rows == ROWS_PER_THREAD * wgmma.ROWS_OF_GROUP:
        values = [op(*values)]
    # lanes of a row, then those of neighbouring rows
    for step in (1, 2, 4, 8, 16):
        if step < 4 * min(rows, wgmma.ROWS_OF_GROUP):
            values = [op(x, cute.arch.shuffle_sync_bfly(x, offset=step)) for x in values]
    return values


def _sums_of_columns(probs: cute.Tensor) -> tuple[Int32, list[Float32]]:
    """Sums over a warp's rows of the columns that this lane keeps, and how far the first of these
    is from its first one. Lanes with the same columns halve what they keep in each step."""
    lane, first = cute.arch.lane_idx(), Int32(0)
    sums = [probs[0, c] + probs[1, c] for c in range(cute.size(probs, mode=[1]))]
    for step in (16, 8, 4):
        is_upper, half = (lane & step) != 0, len(sums) // 2
        low, high = sums[:half], sums[half:]
        sums = [
            cutlass.select_(is_upper, b, a)
            + cute.arch.shuffle_sync_bfly(cutlass.select_(is_upper, a, b), offset=step)
            for a, b in zip(low, high, strict=True)
        ]
        first += cutlass.select_(is_upper, Int32(wgmma.col_offset(half)), Int32(0))
    return first, sums
