"""Sums along the diagonals of dS in shared memory, by the mask warps of the Hopper backward.

Gradients of elements that differences determine are such sums, within grid rectangles
(`mods/difference_sums.py`). The mask warps, which make bits of few blocks or none, sum dS where dQ
reads it while the MMA warps go on: of every second block, or of all (`SummedBy`).

A warp adds squares of 8 queries by 8 keys, element by element: four diagonals of squares at a time,
each by eight lanes. A lane has a query of a square, whose keys are 16 bytes. Element (r, c) of the
sum of diagonal i has the distance 8 i + c - r of key from query. Sums of different r lie apart in
shared memory, so all lanes of a warp add to different ones, in different banks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import arith

from flash_mask_cute.core.score_gradients import BwdScoreArgs
from flash_mask_cute.core.walk_ring import Block, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.difference_sums import (
    NO_HEAD,
    DifferenceSums,
    difference_at,
    is_mma_turn,
    summed_reads,
)
from flash_mask_cute.mods.line_sums import next_cut
from flash_mask_cute.mods.read_analysis import analyse_reads
from flash_mask_cute.mods.read_classes import Cut
from flash_mask_cute.sm90.flash_bwd_chain import words_of_warp
from flash_mask_cute.sm90.flash_bwd_traits import BwdSmem, BwdTraits, Channels
from flash_mask_cute.sm90.warpgroups import Role
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

# queries and keys of a square, and diagonals of squares that a warp sums at once
SQUARE, DIAGONALS = 8, 4
# bytes of a query's 64 keys, and of eight of these, which are swizzled
LINE, VECTOR = 128, 16
HIGH_HALF = -(1 << 16)


class Sides(NamedTuple):
    """A grid rectangle: its first query, the one behind its last, and the same of keys."""

    first_q: Int32
    end_q: Int32
    first_k: Int32
    end_k: Int32


class Pending(NamedTuple):
    """The block whose dS is to be summed next, if is_there. cuts: partial blocks so far."""

    cuts: Int32
    number: Int32
    m_block: Int32
    head_idx: Int32
    is_there: Boolean


class SumGroup(NamedTuple):
    """Reads with the same cuts, by their numbers among those of `DifferenceSums`."""

    cuts: tuple[Cut, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class DiagonalSums:
    traits: cutlass.Constexpr[BwdTraits]
    groups: cutlass.Constexpr[tuple[SumGroup, ...]]
    tiles: BwdSmem
    channels: Channels
    sums: DifferenceSums
    warp: Int32

    @property
    def _warps(self) -> int:
        return self.traits.num_mask_warps

    @property
    def _units(self) -> int:
        """Of 64 queries by 64 keys."""
        return self.traits.key_groups * self.traits.num_row_groups

    @property
    def _has_units(self) -> bool:
        """Whether each warp has units of its own, not diagonals."""
        return self._units % self._warps == 0

    @cute.jit
    def add_block(self, work: Work, pending: Pending) -> None:
        """Add dS of a block, when it is there."""
        traits, channel = self.traits, self.channels.summed
        head = self.sums.head
        if head[0] != pending.head_idx:
            self.sums.send(work.batch_idx)
            head[0] = pending.head_idx
        channel.wait(pending.number)
        is_own = work.has_scores
        if const_expr(self.sums.takes_turns):
            is_own = is_own & (is_mma_turn(pending.m_block) == Boolean(False))
        if is_own:
            stage = traits.ds_stage(pending.number)
            first, step = (self.warp, self._warps) if const_expr(self._has_units) else (0, 1)
            for number in cutlass.range(first, self._units, step, unroll=1):
                key_group = number // traits.num_row_groups
                row_group = number % traits.num_row_groups
                first_q = pending.m_block * traits.tile_m + row_group * ROWS_PER_WARPGROUP
                first_k = work.block * traits.tile_n + key_group * ROWS_PER_WARPGROUP
                unit = traits.ds_unit(stage, key_group, row_group)
                dscores = self.tiles.ds.iterator.toint() + unit * (ROWS_PER_WARPGROUP * LINE)
                for i in cutlass.range_constexpr(len(self.groups)):
                    self._add_unit(i, work, (first_q, first_k), dscores)
        cute.arch.sync_warp()
        channel.release(pending.number)

    @cute.jit
    def end_walk(self, work: Work) -> None:
        self.sums.send(work.batch_idx)
        self.sums.head[0] = Int32(NO_HEAD)

    @cute.jit
    def _add_unit(
        self,
        i: cutlass.Constexpr[int],
        work: Work,
        first: tuple[Int32, Int32],
        dscores: Int32,
    ) -> None:
        """Add 64 queries by 64 keys to the reads of a group, rectangle by rectangle."""
        cuts, (first_q, first_k) = self.groups[i].cuts, first
        end_q = cutlass.min(first_q + ROWS_PER_WARPGROUP, work.seqlen_q)
        end_k = cutlass.min(first_k + ROWS_PER_WARPGROUP, work.seqlen_k)
        from_k = first_k
        while from_k < end_k:
            next_k = next_cut(cuts, True, from_k, end_k)
            from_q = first_q
            while from_q < end_q:
                next_q = next_cut(cuts, False, from_q, end_q)
                self._add_rectangle(i, Sides(from_q, next_q, from_k, next_k), first, dscores)
                from_q = next_q
            from_k = next_k

    @cute.jit
    def _add_rectangle(
        self,
        i: cutlass.Constexpr[int],
        sides: Sides,
        first: tuple[Int32, Int32],
        dscores: Int32,
    ) -> None:
        first_q, first_k = first
        reads = [self.sums.reads[x] for x in self.groups[i].reads]
        corners = [difference_at(x.read, sides.first_q, sides.first_k) for x in reads]
        # from here on counted from the first query and key of the 64
        inside = Sides(*(x - first_q for x in sides[:2]), *(x - first_k for x in sides[2:]))
        top, bottom = inside.first_q // SQUARE, (inside.end_q - 1) // SQUARE
        left, right = inside.first_k // SQUARE, (inside.end_k - 1) // SQUARE
        row, number = cute.arch.lane_idx() % SQUARE, cute.arch.lane_idx() // SQUARE
        total = Float32(0.0)
        diagonal = left - bottom
        if const_expr(not self._has_units):
            diagonal += DIAGONALS * self.warp
        while diagonal <= right - top:
            rows = (
                cutlass.max(top, left - diagonal - DIAGONALS + 1),
                cutlass.min(bottom, right - diagonal),
            )
            acc = self._sum_squares(diagonal + number, rows, inside, dscores)
            for value in acc:
                total = total + value
            for read, x, corner in zip(reads, self.groups[i].reads, corners, strict=True):
                if read.summed.step != 0:
                    # keys from the corner, less queries
                    start = row + inside.first_k - inside.first_q
                    distance = SQUARE * (diagonal + number) - start
                    self.sums.add_run(x, acc, corner + distance * read.summed.step, row)
            diagonal += DIAGONALS * (1 if self._has_units else self._warps)
        if const_expr(any(read.summed.step == 0 for read in reads)):
            total = cute.arch.warp_reduction_sum(total)
        for read, x, corner in zip(reads, self.groups[i].reads, corners, strict=True):
            if read.summed.step == 0:
                self.sums.add_one(x, total, corner)

    @cute.jit
    def _sum_squares(
        self, diagonal: Int32, rows: tuple[Int32, Int32], inside: Sides, dscores: Int32
    ) -> tuple:
        """The sum of the squares of this lane's diagonal in some rows of squares, of a query."""
        acc = [Float32(0.0)] * SQUARE
        row = cute.arch.lane_idx() % SQUARE
        query, col = rows[0] * SQUARE + row, rows[0] + diagonal
        words = _load(dscores, query, col)
        for _ in cutlass.range(rows[1] - rows[0] + 1, unroll=1):
            key = col * SQUARE
            bits = _bits_from(inside.first_k - key) & ~_bits_from(inside.end_k - key)
            has_query = (query >= inside.first_q) & (query < inside.end_q)
            bits = cutlass.select_(has_query, bits, Int32(0))
            values = _values_of(self.traits.dtype, words)
            query += SQUARE
            col += 1
            # of the next row of squares, behind the last one any
            words = _load(dscores, query, col)
            acc = [
                x + cutlass.select_(((bits >> c) & 1) != 0, values[c], Float32(0.0))
                for c, x in enumerate(acc)
            ]
        return tuple(acc)


def _bits_from(c: Int32) -> Int32:
    """The bits of a square's keys from one on."""
    return Int32(-1) << cutlass.min(cutlass.max(c, 0), SQUARE)


def _load(dscores: Int32, query: Int32, col: Int32) -> list[Int32]:
    """dS of a query and the keys of a square, two in a word; of any ones outside the 64 by 64."""
    # `&`, because `%` of a number that may be negative takes more instructions
    row, chunk = query & (ROWS_PER_WARPGROUP - 1), (col ^ query) & (SQUARE - 1)
    at = dscores + row * LINE + chunk * VECTOR
    pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=VECTOR)
    words = cute.make_tensor(pointer, cute.make_layout(VECTOR // 4)).load()
    return [words[i] for i in range(VECTOR // 4)]


def _values_of(dtype: type, words: list[Int32]) -> list[Float32]:
    """Two values of 16 bits in each word, the first one below."""
    if dtype is cutlass.BFloat16:
        # the upper half of fp32
        halves = [half for word in words for half in (word << 16, word & HIGH_HALF)]
        return [Float32(arith.bitcast(Float32.mlir_type, Int32(x).ir_value())) for x in halves]
    pairs = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        pairs[i] = word
    values = cute.recast_tensor(pairs, dtype)
    return [Float32(values[i]) for i in range(2 * len(words))]


@cute.jit
def make_bits_and_sums(
    make_bits: cutlass.Constexpr[Callable[..., Any]],
    diagonals: DiagonalSums,
    channels: Channels,
) -> None:
    """`make_mask_bits`, and the sums of dS of all blocks. make_bits(work, cuts, block): returns the
    number of the next partial block. Bits come one block before sums: the MMA warps may wait."""
    tile, chunk = Int32(0), Int32(0)
    pending = Pending(Int32(0), Int32(-1), Int32(0), Int32(0), Boolean(False))
    while channels.ring.wait(tile):
        work = channels.ring.read(tile)
        visit = partial(_take_block, partial(make_bits, work), diagonals, work)
        chunk, pending = channels.walk.visit(chunk, pending, visit)
        diagonals.add_block(work, pending)
        diagonals.end_walk(work)
        pending = pending._replace(is_there=Boolean(False))
        channels.ring.release(tile)
        tile += 1


@cute.jit
def _take_block(
    make_bits: cutlass.Constexpr[Callable[..., Any]],
    diagonals: DiagonalSums,
    work: Work,
    pending: Pending,
    block: Block,
) -> Pending:
    cuts = pending.cuts
    if block.kind == Kind.PARTIAL:
        cuts = make_bits(cuts, block)
    if pending.is_there:
        diagonals.add_block(work, pending)
    return Pending(cuts, pending.number + 1, block.index, block.head_idx, Boolean(True))


def diagonal_sums(
    kernel: Any, tiles: BwdSmem, channels: Channels, score_args: BwdScoreArgs
) -> DiagonalSums:
    """The sums of a mask warp. kernel: a `FlashAttentionBackwardSm90`."""
    reads = analyse_reads(kernel.score_mod, score_args.aux_tensors, kernel.wants_aux)
    of_cuts: dict[tuple[Cut, ...], list[int]] = {}
    summed = summed_reads(kernel.score_mod, reads, of_masks=True)
    for i, read in enumerate(summed):
        of_cuts.setdefault(reads.tensors[read.number].cuts, []).append(i)
    targets = dict(zip(kernel.wants_aux, score_args.aux_grads, strict=True))
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - Role.MASK
    traits = kernel.traits
    start = traits.sums_of_warp * traits.num_mma_warps
    of_warp = words_of_warp(tiles.sums, start, warp, traits.sums_of_mask_warp)
    of_reads = summed, score_args.aux_tensors, tuple(targets[x.number] for x in summed)
    sums = DifferenceSums.create(kernel.score_mod, *of_reads, of_warp)
    groups = tuple(SumGroup(cuts, tuple(x)) for cuts, x in of_cuts.items())
    return DiagonalSums(traits, groups, tiles, channels, sums, warp)
