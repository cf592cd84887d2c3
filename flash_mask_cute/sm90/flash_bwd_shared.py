"""Gradients of tables that all batch entries share, as a bias of pairs or of windows has them.

The gradient of an element is a sum of dS over the batch. In the main kernel each score would be an
addition to memory. Here a CTA owns 128 queries by 128 keys of a head, and walks over batch entries:
it computes

    S^T = K Q^T        dP^T = V dO^T        dS = exp(S + bias - LSE) * (dP - delta)

again and sums dS in registers. What the score_mod adds stays in registers, too. If no two scores of
an entry read the same element of a tensor, its sums are stored, and their order is fixed. Others
are added to memory, once for a query and a key.

| warps             | role | work                                                   |
|-------------------|------|--------------------------------------------------------|
| 0 of warpgroup 0  | load | TMA of Q, K, dO, V, and copies of LSE and delta        |
| warpgroups 1, 2   | mma  | 64 keys each, by two halves of 64 queries              |

A batch entry is two fills: Q, K and statistics for S, and dO and V for dP. Few tiles would leave
SMs idle, so the batch may have parts, which have stored sums of their own. Elements outside the
sequences are computed from whatever lies there, and not stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    registers_left,
    swizzled,
    thread_in_warpgroup,
)
from flash_mask_cute.core.row_blocks import mark_words
from flash_mask_cute.core.softmax import ScoreScales, rounded_difference
from flash_mask_cute.core.storage import barriers, elements, floats
from flash_mask_cute.core.tile_state import PARTIAL, has_visible
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.bit_tile import ALL, HALF_WORD
from flash_mask_cute.rules.mask_rules import MaskBitsArgs, WindowArgs
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cached_bias_tile import band_of, statistic
from flash_mask_cute.sm90.entry_loads import EntrySources, HeadColumns, load_words, stages_in
from flash_mask_cute.sm90.entry_sums import Places, SummedTensors
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING, Role, mma_warpgroup_idx
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP

NUM_MMA_WARPGROUPS = 2
MMA_REGISTERS = 240
# queries and keys of a CTA, and in how many halves of 64
TILE, HALVES = 128, 2
# boxes of 64 rows in a stage: two of keys, two of queries
BOXES = 4
MOST_STAGES = 4
# of a query: LSE, delta and reference
STATS = 3


@dataclass(frozen=True)
class SharedTraits(HeadColumns):
    """tile_m: queries of a row block and of a bit tile, 64 or 128. has_marks: as in `BwdTraits`."""

    tile_m: int
    has_marks: bool

    @property
    def box_bytes(self) -> tuple[int, int]:
        cols, cols_v = self.cols
        return ROWS_PER_WARPGROUP * cols * 2, ROWS_PER_WARPGROUP * cols_v * 2

    @property
    def mark_words(self) -> int:
        return mark_words(self.tile_m) if self.has_marks else 0

    @property
    def half_words(self) -> int:
        """Words of the statistics of 64 queries, and of the marks of their row block."""
        return STATS * ROWS_PER_WARPGROUP + self.mark_words

    @property
    def bytes_stats(self) -> int:
        return HALVES * self.half_words * 4

    @property
    def stages(self) -> tuple[int, int]:
        """Of the operands of S, and of those of dP."""
        for_s, for_dp = (BOXES * size for size in self.box_bytes)
        room = SMEM_CAPACITY - SMEM_BOOKKEEPING - MOST_STAGES * self.bytes_stats
        return stages_in(room, for_s, for_dp, MOST_STAGES)

    @property
    def fits(self) -> bool:
        return min(self.stages) > 0

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + NUM_MMA_WARPGROUPS)

    def layout(self, i: int) -> cute.ComposedLayout:
        """(64, columns, boxes of all stages) of the operands of S, or of dP."""
        boxes = BOXES * self.stages[i]
        return wgmma.rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.cols[i], boxes)

    def storage(self) -> cute.struct:
        for_s, for_dp = self.stages

        @cute.struct
        class Storage:
            s: elements(self.dtype, self.layout(0))
            dp: elements(self.dtype, self.layout(1))
            stats: floats(HALVES * self.half_words * for_s)
            s_barriers: barriers(for_s)
            dp_barriers: barriers(for_dp)

        return Storage


class SharedExtents(NamedTuple):
    seqlen_q: Int32
    seqlen_k: Int32
    batch: Int32
    group: Int32  # query heads of a KV head
    m_tiles: Int32
    n_tiles: Int32


class SharedPart(NamedTuple):
    """The work of a CTA: a tile of a head, and the batch entries that it visits."""

    number: Int32
    head_idx: Int32
    m_tile: Int32
    n_tile: Int32
    first: Int32
    count: Int32


class SharedSmem(NamedTuple):
    """s, dp: (64, columns, boxes); stats (words, halves * stages)."""

    s: cute.Tensor
    dp: cute.Tensor
    stats: cute.Tensor


@dataclass(eq=False, repr=False)
class SharedGradientsSm90:
    """Kernel for Hopper, for `cute.compile`.

    :param traits: that fit
    :param score_mod: adds a number that all batch entries share
        (`ModReads.is_batch_invariant_bias`)
    :param wants_aux: numbers of the tensors to sum for, which are among `ModReads.shared`
    :param once: those of them whose sums are stored, of `ModReads.shared_once`
    :param is_causal, is_local: as in the main kernel
    """

    traits: SharedTraits
    score_mod: Callable[..., Any]
    wants_aux: tuple[int, ...]
    once: tuple[int, ...]
    is_causal: bool
    is_local: bool

    def __post_init__(self) -> None:
        if not self.traits.fits:
            raise ValueError(f"a CTA has no room for {self.traits}")
        self.summed = SummedTensors(self.score_mod, self.wants_aux, self.once)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStats: cute.Tensor,
        sums: tuple,
        aux_tensors: tuple,
        softmax_scale: Float32,
        num_parts: Int32,
        stream,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        mask_bit_tensors: tuple | None = None,
    ):
        """Launch on `stream`. Arguments are those of the main kernel, dense. sums: of each wanted
        tensor, fp32 (parts of the batch, *its shape), written where some query, key and head read
        an element; or those to which terms are added (`AuxSums`)."""
        traits = self.traits
        sources = EntrySources.create(
            mStats,
            *((x, traits.layout(i), ROWS_PER_WARPGROUP)
              for x, i in ((mK, 0), (mQ, 0), (mV, 1), (mdO, 1))),
        )  # fmt: skip
        batch, seqlen_q, heads, _ = mQ.shape
        seqlen_k, heads_kv = mK.shape[1], mK.shape[2]
        m_tiles, n_tiles = cute.ceil_div(seqlen_q, TILE), cute.ceil_div(seqlen_k, TILE)
        extents = SharedExtents(seqlen_q, seqlen_k, batch, heads // heads_kv, m_tiles, n_tiles)
        mask_bits = None
        if const_expr(mask_bit_tensors is not None):
            mask_bits = MaskBitsArgs(*mask_bit_tensors)
        self.kernel(
            sources,
            extents,
            sums,
            aux_tensors,
            ScoreScales.create(softmax_scale, None, True),
            WindowArgs(window_size_left, window_size_right),
            mask_bits,
        ).launch(
            grid=(heads * m_tiles * n_tiles, num_parts, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        sources: EntrySources,
        extents: SharedExtents,
        sums: tuple,
        aux_tensors: tuple,
        scales: ScoreScales,
        window: WindowArgs,
        mask_bits: MaskBitsArgs | None,
    ):
        traits = self.traits
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(traits.storage())
        for_s, for_dp = traits.stages
        mma_warps = NUM_MMA_WARPGROUPS * WARPS_PER_WARPGROUP
        channels = (
            Channel.create(storage.s_barriers.data_ptr(), for_s, 1, mma_warps),
            Channel.create(storage.dp_barriers.data_ptr(), for_dp, 1, mma_warps),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        stats = cute.make_layout((traits.half_words, HALVES * for_s))
        tiles = SharedSmem(
            swizzled(storage.s, traits.layout(0)),
            swizzled(storage.dp, traits.layout(1)),
            storage.stats.get_tensor(stats),
        )
        part = self._part(extents, window)
        if warp_idx < Role.MMA:
            taken = NUM_MMA_WARPGROUPS * MMA_REGISTERS
            cute.arch.setmaxregister_decrease(registers_left(1 + NUM_MMA_WARPGROUPS, taken))
            if warp_idx == Role.LOAD:
                self.load(part, sources, extents, tiles, channels)
        else:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            of_scores = scales, window, mask_bits
            self.mma(part, extents, tiles, channels, sums, aux_tensors, *of_scores)

    @cute.jit
    def _part(self, extents: SharedExtents, window: WindowArgs) -> SharedPart:
        tile, number, _ = cute.arch.block_idx()
        _, num_parts, _ = cute.arch.grid_dim()
        rest = tile // extents.n_tiles
        head_idx = rest // extents.m_tiles
        m_tile, n_tile = rest - head_idx * extents.m_tiles, tile - rest * extents.n_tiles
        of_part = cute.ceil_div(extents.batch, num_parts)
        first = cutlass.min(number * of_part, extents.batch)
        count = cutlass.min(of_part, extents.batch - first)
        if const_expr(self.is_causal or self.is_local):
            band = band_of(window, self.is_causal, *extents[:2])
            lo, _ = band.k_range(m_tile * TILE)
            _, hi = band.k_range(cutlass.min((m_tile + 1) * TILE, extents.seqlen_q) - 1)
            sees = (lo < (n_tile + 1) * TILE) & (hi > n_tile * TILE)
            count = cutlass.select_(sees, count, Int32(0))
        return SharedPart(number, head_idx, m_tile, n_tile, first, count)

    # -- load -----------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        part: SharedPart,
        sources: EntrySources,
        extents: SharedExtents,
        tiles: SharedSmem,
        channels: tuple,
    ):
        for_s, for_dp = channels
        bytes_s, bytes_dp = self.traits.box_bytes
        for i in cutlass.range(part.count, unroll=1):
            place = part, extents, part.first + i
            for_s.acquire(i)
            for_s.expect(i, BOXES * bytes_s + self.traits.bytes_stats)
            self._load_boxes(0, sources.first, tiles.s, for_s, i, place)
            self._load_stats(sources.stats, tiles.stats, for_s, i, place)
            for_dp.acquire(i)
            for_dp.expect(i, BOXES * bytes_dp)
            self._load_boxes(1, sources.second, tiles.dp, for_dp, i, place)

    def _load_boxes(
        self,
        operand: int,
        sources: tuple,
        smem: cute.Tensor,
        channel: Channel,
        number: Int32,
        place: tuple[SharedPart, SharedExtents, Int32],
    ) -> None:
        """Two boxes of keys, and two of queries."""
        part, extents, batch_idx = place
        head_kv = part.head_idx // extents.group
        of_keys = sources[0], sources[1], head_kv, part.n_tile, extents.seqlen_k
        of_queries = sources[2], sources[3], part.head_idx, part.m_tile, extents.seqlen_q
        barrier = channel.barrier(number)
        for side, (atom, tensor, head_idx, tile, length) in enumerate((of_keys, of_queries)):
            for half in range(HALVES):
                # TMA takes no box that lies behind the last row
                row = cutlass.min(tile * TILE + half * ROWS_PER_WARPGROUP, length - 1)
                box = (1, ROWS_PER_WARPGROUP), self.traits.cols[operand]
                gmem = tensor[None, None, batch_idx]
                src, dst = tma.tile_of(atom, gmem, (head_idx, row), box, smem)
                unit = channel.index(number) * BOXES + side * HALVES + half
                cute.copy(atom, src, dst[None, unit], tma_bar_ptr=barrier)

    def _load_stats(
        self,
        stats: cute.Tensor,
        smem: cute.Tensor,
        channel: Channel,
        number: Int32,
        place: tuple[SharedPart, SharedExtents, Int32],
    ) -> None:
        part, extents, batch_idx = place
        tile_m, barrier = self.traits.tile_m, channel.barrier(number)
        of_entry = cute.ceil_div(extents.seqlen_q, tile_m)
        for half in range(HALVES):
            first = part.m_tile * TILE + half * ROWS_PER_WARPGROUP
            block = batch_idx * of_entry + cutlass.min(first // tile_m, of_entry - 1)
            source = stats[part.head_idx, block, None]
            target = smem[None, channel.index(number) * HALVES + half]
            pieces = [
                (i * tile_m + first % tile_m, i * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP)
                for i in range(STATS)
            ]
            if self.traits.has_marks:
                pieces.append((STATS * tile_m, STATS * ROWS_PER_WARPGROUP, self.traits.mark_words))
            load_words(source, target, pieces, barrier)

    # -- mma ------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        part: SharedPart,
        extents: SharedExtents,
        tiles: SharedSmem,
        channels: tuple,
        sums: tuple,
        aux_tensors: tuple,
        scales: ScoreScales,
        window: WindowArgs,
        mask_bits: MaskBitsArgs | None,
    ):
        """MMA warpgroup: 64 keys of the tile."""
        mma, (for_s, for_dp) = self.traits.mma_scores(), channels
        operands = tuple(
            (wgmma.operand_a(mma, x), wgmma.operand_b(mma, x)) for x in (tiles.s, tiles.dp)
        )
        # of each half, as accumulators: what the score_mod adds, and the sums of dS
        added, totals = (
            [wgmma.make_accumulator(ROWS_PER_WARPGROUP) for _ in range(HALVES)] for _ in range(2)
        )
        for acc in totals:
            acc.fill(0.0)
        words = cute.make_rmem_tensor(HALVES * wgmma.ROWS_PER_THREAD, Int32)
        words.fill(ALL)
        if part.count > 0:
            self._evaluate(part, extents, aux_tensors, added)
            self._load_words(part, extents, window, mask_bits, Int32(0), words)
        for i in cutlass.range(part.count, unroll=1):
            bits = [words[j] for j in range(cute.size(words))]
            self._load_words(part, extents, window, mask_bits, i + 1, words)
            for_s.wait(i)
            for_dp.wait(i)
            for half in cutlass.range_constexpr(HALVES):
                acc_S, acc_dP = (wgmma.make_accumulator(ROWS_PER_WARPGROUP) for _ in range(2))
                for acc, channel, (a, b), steps in zip(
                    (acc_S, acc_dP), channels, operands, self.traits.steps, strict=True
                ):
                    first = channel.index(i) * BOXES
                    keys = a[None, None, None, first + mma_warpgroup_idx()]
                    queries = b[None, None, None, first + HALVES + half]
                    wgmma.issue(mma, acc, keys, queries, False, steps)
                warpgroup.wait_group(0)
                stats = tiles.stats[None, for_s.index(i) * HALVES + half]
                first = half * wgmma.ROWS_PER_THREAD
                of_half = tuple(bits[first : first + wgmma.ROWS_PER_THREAD])
                if const_expr(mask_bits is None and not (self.is_causal or self.is_local)):
                    of_half = None
                self._add(half, stats, of_half, scales, added[half], acc_S, acc_dP, totals[half])
            for_s.release(i)
            for_dp.release(i)
        places = (self._places(part, extents, half) for half in range(HALVES))
        values = (wgmma.rows_by_cols(acc) for acc in totals)
        of_halves = list(zip(places, values, strict=True))
        self.summed.store(of_halves, part.number, sums, aux_tensors)

    @cute.jit
    def _add(
        self,
        half: cutlass.Constexpr[int],
        stats: cute.Tensor,
        bits: tuple | None,
        scales: ScoreScales,
        added: cute.Tensor,
        acc_S: cute.Tensor,
        acc_dP: cute.Tensor,
        total: cute.Tensor,
    ):
        """Add dS of 64 queries to their sums. bits: of the thread's keys; None: all count."""
        scores, grads, shifts, sums = (wgmma.rows_by_cols(x) for x in (acc_S, acc_dP, added, total))
        if const_expr(self.traits.has_marks):
            self._clear_marked(half, stats, scores, grads)
        size = ROWS_PER_WARPGROUP
        statistics = [statistic(stats.iterator + i * size, size) for i in range(STATS)]
        for first in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
            # loaded pair by pair: all would take 48 registers
            lse, delta, reference = (x[None, first // 2].load() for x in statistics)
            for i in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
                    c = first + i
                    score = cute.math.fma(scores[r, c], scales.scale_mod, shifts[r, c])
                    score = rounded_difference(score, reference[i])
                    exponent = cute.math.fma(score, scales.scale_log2, -lse[i])
                    prob = cute.math.exp2(exponent, fastmath=True)
                    more = cute.math.fma(prob, grads[r, c] - delta[i], sums[r, c])
                    if const_expr(bits is not None):
                        # what is hidden may be anything, and 0 times NaN is NaN
                        more = cutlass.select_(bit_tile.is_set(bits[r], c), more, sums[r, c])
                    sums[r, c] = more

    @cute.jit
    def _clear_marked(
        self,
        half: cutlass.Constexpr[int],
        stats: cute.Tensor,
        scores: cute.Tensor,
        grads: cute.Tensor,
    ):
        """Clear the columns of marked queries, whose Q or dO is not finite (`core.row_blocks`)."""
        marks = cute.recast_tensor(
            cute.make_tensor(
                stats.iterator + STATS * ROWS_PER_WARPGROUP,
                cute.make_layout(self.traits.mark_words),
            ),
            Int32,
        )
        # a row block of 128 queries has the marks of both halves
        first = half * 2 if const_expr(self.traits.tile_m == TILE) else 0
        low, high = marks[first], marks[first + 1]
        if (low | high) != 0:
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                at = wgmma.first_col_of(thread_in_warpgroup()) + wgmma.col_offset(c)
                word = low if const_expr(wgmma.col_offset(c) < bit_tile.WORD) else high
                is_marked = ((word >> (at % bit_tile.WORD)) & 1) != 0
                for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
                    scores[r, c] = cutlass.select_(is_marked, Float32(0.0), scores[r, c])
                    grads[r, c] = cutlass.select_(is_marked, Float32(0.0), grads[r, c])

    # -- what is the same for all entries -------------------------------------------------------

    def _places(self, part: SharedPart, extents: SharedExtents, half: int) -> Places:
        thread = thread_in_warpgroup()

        def of(r: int, c: int) -> tuple[Int32, Int32]:
            query = part.m_tile * TILE + half * ROWS_PER_WARPGROUP
            query += wgmma.first_col_of(thread) + wgmma.col_offset(c)
            return query, self._key(part, r)

        return Places(of, part.head_idx, extents.seqlen_q, extents.seqlen_k)

    def _key(self, part: SharedPart, r: int) -> Int32:
        line = mma_warpgroup_idx() * ROWS_PER_WARPGROUP + wgmma.row_of(thread_in_warpgroup(), r)
        return part.n_tile * TILE + line

    def _evaluate(
        self, part: SharedPart, extents: SharedExtents, aux_tensors: tuple, added: list[cute.Tensor]
    ) -> None:
        for half, acc in enumerate(added):
            values, places = wgmma.rows_by_cols(acc), self._places(part, extents, half)
            for c in range(cute.size(values, mode=[1])):
                for r in range(wgmma.ROWS_PER_THREAD):
                    values[r, c] = self.summed.added(places, r, c, aux_tensors)

    def _load_words(
        self,
        part: SharedPart,
        extents: SharedExtents,
        window: WindowArgs,
        mask_bits: MaskBitsArgs | None,
        number: Int32,
        words: cute.Tensor,
    ) -> None:
        """The bits of scores that count in a batch entry: of each half and key, of 16 queries."""
        if mask_bits is None and not (self.is_causal or self.is_local):
            return
        batch_idx = cutlass.min(part.first + number, extents.batch - 1)
        word = thread_in_warpgroup() % wgmma.COLUMNS.num_words
        for half in range(HALVES):
            for r in range(wgmma.ROWS_PER_THREAD):
                bits = Int32(ALL)
                if self.is_causal or self.is_local:
                    band = band_of(window, self.is_causal, *extents[:2])
                    lo, hi = band.q_range(self._key(part, r))
                    first = part.m_tile * TILE + half * ROWS_PER_WARPGROUP
                    ends = (wgmma.COLUMNS.count_below(word, x - first) for x in (lo, hi))
                    bits = bit_tile.bits_of(tuple(ends))
                if mask_bits is not None:
                    bits = bits & self._stored_bits(part, mask_bits, batch_idx, half, r)
                words[half * wgmma.ROWS_PER_THREAD + r] = bits

    def _stored_bits(
        self, part: SharedPart, mask_bits: MaskBitsArgs, batch_idx: Int32, half: int, r: int
    ) -> Int32:
        tile_m, word = self.traits.tile_m, thread_in_warpgroup() % wgmma.COLUMNS.num_words
        first = part.m_tile * TILE + half * ROWS_PER_WARPGROUP
        last = cute.size(mask_bits.states, mode=[1]) - 1
        place = batch_idx, cutlass.min(first // tile_m, last), part.n_tile
        lines = mask_bits.tile(*place)
        line = self._key(part, r) - part.n_tile * TILE
        if tile_m == TILE:
            bits = lines[word, line] >> (half * HALF_WORD)
        else:
            # two words of 16 bits are stored in one
            bits = lines[word // 2, line] >> (word % 2 * HALF_WORD)
        state = mask_bits.state(*place)
        uncut = cutlass.select_(has_visible(state), Int32(ALL), Int32(0))
        return cutlass.select_(state == PARTIAL, bits, uncut)
