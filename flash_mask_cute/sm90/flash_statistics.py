"""Statistics of P = exp(S - LSE) for Hopper: a forward without values and output.

Roles, channels, walks and masks are those of `flash_fwd`. An MMA warpgroup has 64 query rows. It
takes turns with the others to issue S of a key block, waits for it, and reduces P while the others
multiply: entropies to registers, and sums and largest numbers of a few rows and keys to memory.
Sums of keys, which other CTAs have too, are those of all its rows when it adds them to memory.

LSE is known, so key ranges are independent, and a work tile may be split without a combination.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.arch import fmax
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core.cta import WARPS_PER_WARPGROUP, thread_in_warpgroup
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

# An exponent of 2 far below that of any LSE.
LOWEST_EXPONENT = -(2.0**100)
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
    """The destination of statistics, in the place of `Partials`, contiguous in the last mode.

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
        kind = KeySums if const_expr(self._keys_are_rows(epilogue.partials)) else RowStatistics
        sizes = (self.traits.tile_n // 4, Float32), (2, Float32), (2, Int32), (1, Int64)
        of_tile = [cute.make_rmem_tensor((size,), dtype) for size, dtype in sizes]
        exponents = wgmma.rows_by_cols(wgmma.make_accumulator(self.traits.tile_n))
        blocks = kind(*vars(blocks).values(), epilogue, *of_tile, exponents, self.statistics)
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while channels.ring.wait(tile):
            channels.q.wait(tile)
            blocks.begin(channels.ring.read(tile))
            flags = blocks.take(tile, block, None)
            while flags & KIND_MASK != Kind.END:
                cut = blocks.hide(flags, tile, cut)
                flags = blocks.take(tile, block + 1, flags >> N_BLOCK_SHIFT)
                block += 1
            # its last reader, S, is complete: the next query may come under the reduction
            channels.q.release(tile)
            cut = blocks.hide(flags, tile, cut)
            blocks.reduce(block, flags >> N_BLOCK_SHIFT)
            block += 1
            blocks.end(channels.ring.read(tile))
            channels.ring.release(tile)
            tile += 1

    def _keys_are_rows(self, partials: StatisticsTensors) -> bool:
        others = partials.entropy, partials.block_sums, partials.block_maxima, self.score_mod
        return all(x is None for x in others) and self.tile_m == self.tile_n


@dataclass(frozen=True)
class RowStatistics(KeyBlocks):
    """Key blocks, and what a thread keeps of its rows of a work tile.

    of: LSE, lengths, and as `partials` the `StatisticsTensors`. bias: LSE, to base 2 without a
    score_mod; 0 for a row that sees nothing. entropy: sums of p times its logarithm to base 2.
    places: offsets of its sums of blocks, of each row, or -1. key_place: of the sum of its key.
    exponents: logarithms to base 2 of P of a key block, (rows, cols). block: rows and keys of a sum
    of blocks, and whether rows of all sequences follow each other.
    """

    of: Epilogue
    bias: cute.Tensor
    entropy: cute.Tensor
    places: cute.Tensor
    key_place: cute.Tensor
    exponents: cute.Tensor
    block: cutlass.Constexpr[tuple[int, int, bool]]

    # whose bias a score has
    bias_of = staticmethod(lambda r, c: r)

    def _tile_rows(self, work: Work) -> Iterable[Int32]:
        return tile_rows(self.traits, work, thread_in_warpgroup())

    def _own_key(self) -> Int32:
        """The key of a block whose sum this thread adds to memory."""
        return thread_in_warpgroup() % self.traits.tile_n

    def _rows(self, work: Work) -> list[tuple[Int32, Int32, Int32]]:
        """Of each row of this thread: the row, its head and its query."""
        group = self.traits.packed_heads, self.traits.group_size
        rows = self._tile_rows(work)
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
        self.entropy.fill(0.0)
        # once a tile: addresses are long chains of instructions, a head's one a division
        lengths, target = self.of.lengths, self.of.partials.key_sums
        if const_expr(target is not None):
            place: tuple = (work.head_idx // self.of.partials.heads_per_kv,)
            if const_expr(lengths.cu_seqlens_k is None):
                place = lengths.kv_entry(work.batch_idx), *place
            self.key_place[0] = offset_in(target, (*place, work.offset_k + self._own_key()))
        for target in (self.of.partials.block_sums, self.of.partials.block_maxima):
            if const_expr(target is not None):
                self._place_blocks(target, work)

    @cute.jit
    def _place_blocks(self, target: cute.Tensor, work: Work):
        of_sum, _, follows = self.block
        batch_idx, first = work.batch_idx, Int32(0)
        if const_expr(follows and self.of.lengths.cu_seqlens_q is not None):
            batch_idx, first = Int32(0), work.offset_q * self.traits.packed_heads
        is_first = cute.arch.lane_idx() % (4 * min(of_sum, wgmma.ROWS_OF_GROUP)) == 0
        for r, (row, _, q_idx) in enumerate(self._rows(work)):
            place = batch_idx, work.head_idx, (first + row) // of_sum, Int32(0)
            is_stored = is_first & (q_idx < work.slot)
            # below 2^31: `call/statistics.py` refuses larger ones
            offset = Int32(offset_in(target, place))
            self.places[r] = cutlass.select_(is_stored, offset, Int32(-1))

    @cute.jit
    def take(self, tile: Int32, block: Int32, reduced: cutlass.Constexpr[None] | Int32) -> Int32:
        """Issue S of a key block, reduce P of the one before, if any, with this n_block, and take
        the exponents. Returns the flags of the block."""
        self.wait_for_keys(block)
        acc_S = wgmma.make_accumulator(self.traits.tile_n)
        self.issue_scores(acc_S, tile, block)
        flags = self._block_flags(block)
        # always: the compiler places S ahead of a branch by what came with the keys
        if const_expr(reduced is not None):  # noqa: SIM102 (while tracing)
            if flags >= 0:
                self.reduce(block - 1, reduced)
        warpgroup.wait_group(0)
        self.channels.k.release(block)
        scores = wgmma.rows_by_cols(acc_S)
        if const_expr(self.score_mod is None):
            self._modify(None, None, scores)
        elif self.channels.ring.read(tile).has_scores:
            # a sequence without queries or keys has no position to evaluate
            loaded = self._load_table_rows(tile, flags)
            self._modify(self._places(tile, flags, True), loaded, scores)
        for r in range(ROWS_PER_THREAD):
            for c in range(cute.size(scores, mode=[1])):
                self.exponents[r, c] = self._exponent(scores[r, c], self.bias[self.bias_of(r, c)])
        return flags

    @cute.jit
    def hide(self, flags: Int32, tile: Int32, cut: Int32) -> Int32:
        """Hide what a partial block's bits do not have. Returns how many such blocks were seen."""
        if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
            work = self.channels.ring.read(tile)
            words = zip(self._bits(cut, Boolean(False)), self._rows(work), strict=True)
            # rows that do not exist would count for keys
            in_use = [(word, q_idx < work.seqlen_q) for word, (_, _, q_idx) in words]
            self._hide_unset([cutlass.select_(used, word, Int32(0)) for word, used in in_use])
            cut += 1
        return cut

    def _hide_unset(self, bits: list[Int32]) -> None:
        # not -inf, which times a p of 0 is NaN
        bit_tile.hide_unset(self.exponents, tuple(bits), Float32(LOWEST_EXPONENT))

    def reduce(self, block: Int32, n_block: Int32) -> None:
        """All statistics of P of a key block, by its exponents."""
        exponents = self.exponents
        probs = cute.make_rmem_tensor_like(exponents)
        for r in range(ROWS_PER_THREAD):
            sums = [Float32(0.0)] * CHAINS
            for c in range(cute.size(exponents, mode=[1])):
                probs[r, c] = cute.math.exp2(exponents[r, c], fastmath=True)
                sums[c % CHAINS] = cute.math.fma(probs[r, c], exponents[r, c], sums[c % CHAINS])
            if self.of.partials.entropy is not None:
                self.entropy[r] = self.entropy[r] + _reduced(sums, operator.add)
        self._store_blocks(probs, n_block)
        if self.of.partials.key_sums is not None:
            self._add_columns(probs, block, n_block)

    def _exponent(self, score: Float32, bias: Float32) -> Float32:
        """The logarithm of p to base 2."""
        if self.score_mod is None:
            return cute.math.fma(score, self.softmax.scale_log2, -bias)
        # scores of any size: first the difference, which is exact near 0
        exponent = rounded_difference(self.softmax.score(score), bias) * LOG2_E
        return fmax(exponent, Float32(LOWEST_EXPONENT))

    # -- memory ---------------------------------------------------------------------------------

    @cute.jit
    def _store_blocks(self, probs: cute.Tensor, n_block: Int32):
        """Store sums and largest numbers of `block` rows and keys. Others have other keys, or rows
        of other warps, so each is stored once."""
        of_sum, keys, _ = self.block
        parts = self.traits.tile_n // keys
        for target, op in (
            (self.of.partials.block_sums, operator.add),
            (self.of.partials.block_maxima, fmax),
        ):
            for part in cutlass.range_constexpr(parts if target is not None else 0):
                values = _reduced_rows(probs, part, parts, of_sum, op)
                column = n_block * parts + part
                for r in cutlass.range_constexpr(len(values)):
                    if (self.places[r] >= 0) & (column < target.shape[3]):
                        place = target.iterator + (self.places[r] + column)
                        word = cute.make_tensor(place, cute.make_layout(1))
                        word[0] = values[r]

    def _add_columns(self, probs: cute.Tensor, block: Int32, n_block: Int32) -> None:
        """Add the sums over this warpgroup's rows to those of keys."""
        memory = cute.recast_ptr(self.tiles.v.iterator, dtype=Float32)
        of_all = cute.make_tensor(memory, self.traits.layout_sums())
        of_warps = of_all[None, None, mma_warpgroup_idx(), block % _STAGES_OF_SUMS]
        thread, (first, sums) = thread_in_warpgroup(), _sums_of_columns(probs)
        first += wgmma.first_col_of(thread)
        for i in range(len(sums)):
            of_warps[first + wgmma.col_offset(i), thread // WARP] = sums[i]
        sync_warpgroup(Barrier.EPILOGUE)
        of_key = [of_warps[self._own_key(), w] for w in range(WARPS_PER_WARPGROUP)]
        self._add(_reduced(of_key, operator.add), thread < self.traits.tile_n, n_block)

    def _add(self, total: Float32, counts: Boolean, n_block: Int32) -> None:
        """Add a sum to that of this thread's key."""
        target = self.of.partials.key_sums
        place = self.key_place[0] + n_block * self.traits.tile_n
        # keys past the end are hidden, and a sum of 0 is not added
        total = cutlass.select_(counts, total, Float32(0.0))
        add_without_a_branch(target, place, total)

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


@dataclass(frozen=True)
class KeySums(RowStatistics):
    """Sums of keys alone, by S^T = K Q^T of 64 keys and all queries of the tile: a thread sums its
    own registers, and a sum is complete when it is added to memory."""

    bias_of = staticmethod(lambda r, c: c)

    def _tile_rows(self, work: Work) -> Iterable[Int32]:
        first = work.block * self.traits.tile_m + wgmma.first_col_of(thread_in_warpgroup())
        return (first + wgmma.col_offset(c) for c in range(self.traits.tile_m // 4))

    def _first_key(self) -> Int32:
        first = mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        return first + wgmma.row_of(thread_in_warpgroup(), 0)

    def _own_key(self) -> Int32:
        # an odd lane ends with the sum of its second key
        return self._first_key() + wgmma.row_offset(1) * (cute.arch.lane_idx() % 2)

    def issue_scores(self, acc_S: cute.Tensor, tile: Int32, block: Int32, half: Any = None) -> None:
        rows = wgmma.ROWS_PER_WARPGROUP
        mma, own = self.traits.mma_qk(num_keys=rows), (mma_warpgroup_idx(), 0, None)
        keys = cute.local_tile(self.tiles.k, (rows, self.traits.tile_d), own)
        keys = wgmma.operand_a(mma, keys)[None, None, None, self.channels.k.index(block)]
        queries, parts = wgmma.operand_b(mma, self.tiles.q), []
        first = self.channels.q.index(tile) * self.traits.num_mma_warpgroups
        for i in range(self.traits.num_mma_warpgroups):
            acc = wgmma.columns(acc_S, i * rows, (i + 1) * rows)
            parts.append((acc, queries[None, None, None, first + i]))
        wgmma.issue_parts(mma, keys, parts, False)

    def _bits(self, cut: Int32, is_ready: Boolean) -> tuple:
        channel, key = self.channels.bits, self._first_key()
        channel.wait_unless(is_ready, cut)
        # from the bit of the first key on; that of the second is the next but one
        shift, first = key // 8 * 2 + key % 2, wgmma.first_col_of(thread_in_warpgroup())
        columns = [first + wgmma.col_offset(c) for c in range(self.traits.tile_m // 4)]
        words = tuple(self.tiles.bits[key % 8 // 2, column] >> shift for column in columns)
        cute.arch.sync_warp()
        channel.release(cut)
        return words

    def _hide_unset(self, bits: list[Int32]) -> None:
        for c, word in enumerate(bits):
            for r in range(ROWS_PER_THREAD):
                keep, exponent = bit_tile.is_set(word, 2 * r), self.exponents[r, c]
                self.exponents[r, c] = cutlass.select_(keep, exponent, Float32(LOWEST_EXPONENT))

    def reduce(self, block: Int32, n_block: Int32) -> None:
        sums = [[Float32(0.0)] * CHAINS for _ in range(ROWS_PER_THREAD)]
        for c in range(cute.size(self.exponents, mode=[1])):
            for r in range(ROWS_PER_THREAD):
                sums[r][c % CHAINS] += cute.math.exp2(self.exponents[r, c], fastmath=True)
        total = _halved([_reduced(of_key, operator.add) for of_key in sums], 1)[0]
        total += cute.arch.shuffle_sync_bfly(total, offset=2)
        self._add(total, cute.arch.lane_idx() & 2 == 0, n_block)


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
        sums = _halved(sums, step)
        is_upper = (lane & step) != 0
        first += cutlass.select_(is_upper, Int32(wgmma.col_offset(len(sums))), Int32(0))
    return first, sums


def _halved(sums: list[Float32], step: int) -> list[Float32]:
    """The half of sums that this lane keeps, with those of the lane `step` away."""
    is_upper, half = (cute.arch.lane_idx() & step) != 0, len(sums) // 2
    return [
        cutlass.select_(is_upper, b, a)
        + cute.arch.shuffle_sync_bfly(cutlass.select_(is_upper, a, b), offset=step)
        for a, b in zip(sums[:half], sums[half:], strict=True)
    ]
