"""FlashAttention backward for Hopper of many short sequences, as windows have them.

All queries and keys of a batch entry are one tile. A CTA keeps a head, and walks over batch
entries. It has all of P and dS of an entry, so it writes dQ, dK and dV once, in 16 bits:

    S^T = K Q^T        dP^T = V dO^T        P = exp(S - LSE)        dS = P * (dP - delta)
    dV = P^T dO        dK = scale dS^T Q    dQ = scale dS K

What a score_mod adds is the same for all entries. It is evaluated once, and stays in shared memory
(`cached_bias_tile`). For the gradients of its tensors, dS is summed over entries in registers
(`entry_sums`).

| warps             | role | work                                                   |
|-------------------|------|--------------------------------------------------------|
| 0 of warpgroup 0  | load | TMA of Q, K, dO, V, and copies of LSE and delta        |
| warpgroups 1 to 3 | mma  | 64 keys each; of dQ every third, second or each 64 queries |

A batch entry is two fills: Q, K and statistics, and dO and V. The order of an entry, in each
warpgroup:

    for each block of queries: S, dP -> P, dS; dS to shared memory -> dV
    barrier of all -> dK, dQ -> barrier of all -> store dV, dK, dQ by way of the place of dS
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import WARPS_PER_WARPGROUP, thread_in_warpgroup, transposed
from flash_mask_cute.core.marked_rows import clear_row
from flash_mask_cute.core.row_blocks import mark_words
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.rules.mask_rules import WindowArgs
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cached_bias_tile import (
    ScoreArgs,
    band_of,
    clear_marked,
    differentiate,
    evaluate,
    keys_exist,
    scores_of,
    statistic,
    store_grads,
)
from flash_mask_cute.sm90.entry_loads import EntryOutputs, EntrySources, load_words
from flash_mask_cute.sm90.entry_sums import Places, SummedTensors
from flash_mask_cute.sm90.flash_bwd_short_traits import (
    HELPER_REGISTERS,
    WORDS_OF_MARKS,
    ShortTiles,
    ShortTraits,
)
from flash_mask_cute.sm90.gradient_stores import scale, send_gradient
from flash_mask_cute.sm90.warpgroups import Role, mma_warp, mma_warpgroup_idx, sync_warpgroup
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP


class Barrier(IntEnum):
    """Named barriers (0 is __syncthreads). ALL: of MMA warps. SENT and next: of a warpgroup."""

    ALL = 1
    SENT = 2


class ShortExtents(NamedTuple):
    seqlen_q: Int32
    seqlen_k: Int32
    batch: Int32


class ShortPart(NamedTuple):
    """The work of a CTA: the batch entries of a head that it visits."""

    number: Int32
    head_idx: Int32
    first: Int32
    count: Int32


@dataclass(eq=False, repr=False)
class ShortBackwardSm90:
    """Kernel for Hopper, for `cute.compile`. Parameters are those of `SharedGradientsSm90`."""

    traits: ShortTraits
    score_mod: Callable[..., Any] | None = None
    wants_aux: tuple[int, ...] = ()
    once: tuple[int, ...] = ()
    is_causal: bool = False

    def __post_init__(self) -> None:
        if not self.traits.fits:
            raise ValueError(f"a CTA has no room for {self.traits}")
        self.summed = None
        if self.score_mod is not None:
            self.summed = SummedTensors(self.score_mod, self.wants_aux, self.once)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mdO: cute.Tensor,
        mStats: cute.Tensor, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, sums: tuple,
        aux_tensors, softmax_scale: Float32, scale_dq: Float32, num_parts: Int32, stream,
        window_size_left: Int32 | None = None, window_size_right: Int32 | None = None,
    ):  # fmt: skip
        """Launch on `stream`. Arguments are those of the main kernel, dense, with as many heads of
        keys as of queries. num_parts: of the batch. sums: as in `SharedGradientsSm90`."""
        traits = self.traits
        sources = EntrySources.create(
            mStats,
            (mQ, traits.layout_queries(0), traits.tile_m),
            (mK, traits.layout_keys(0), ROWS_PER_WARPGROUP),
            (mdO, traits.layout_queries(1), traits.tile_m),
            (mV, traits.layout_keys(1), ROWS_PER_WARPGROUP),
        )
        has_score_mod = self.summed is not None
        self.kernel(
            sources,
            ShortExtents(mQ.shape[1], mK.shape[1], mQ.shape[0]),
            EntryOutputs(*(tma.key_rows(x, False) for x in (mdQ, mdK, mdV)), sums),
            ScoreArgs(
                ScoreScales.create(softmax_scale, None, has_score_mod),
                scale_dq,
                softmax_scale,
                WindowArgs(window_size_left, window_size_right),
                aux_tensors if const_expr(has_score_mod) else None,
            ),
        ).launch(
            grid=(mQ.shape[2], num_parts, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=traits.ctas_of_sm,
            # in percent; else the compiler would ask a device
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        sources: EntrySources,
        extents: ShortExtents,
        outputs: EntryOutputs,
        score_args: ScoreArgs,
    ):
        traits = self.traits
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(traits.storage())
        channels = traits.channels(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles = traits.tiles(storage)
        head_idx, number, _ = cute.arch.block_idx()
        _, num_parts, _ = cute.arch.grid_dim()
        of_part = cute.ceil_div(extents.batch, num_parts)
        first = cutlass.min(number * of_part, extents.batch)
        part = ShortPart(number, head_idx, first, cutlass.min(of_part, extents.batch - first))
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(HELPER_REGISTERS)
            if warp_idx == Role.LOAD:
                self.load(part, sources, extents, tiles, channels)
        else:
            cute.arch.setmaxregister_increase(traits.mma_registers)
            self.mma(part, extents, tiles, channels, outputs, score_args)

    # -- load -----------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        part: ShortPart,
        sources: EntrySources,
        extents: ShortExtents,
        tiles: ShortTiles,
        channels: tuple,
    ):
        traits, (for_s, for_dp) = self.traits, channels
        bytes_s, bytes_dp = traits.bytes_of_operands
        for i in cutlass.range(part.count, unroll=1):
            place = part.head_idx, part.first + i
            for_s.acquire(i)
            for_s.expect(i, bytes_s + traits.bytes_stats)
            self._load_operands(0, sources.first, (tiles.q, tiles.k), for_s, i, place)
            self._load_stats(sources.stats, tiles.stats, extents, for_s, i, place)
            for_dp.acquire(i)
            for_dp.expect(i, bytes_dp)
            self._load_operands(1, sources.second, (tiles.do, tiles.v), for_dp, i, place)

    def _load_operands(
        self,
        operand: int,
        sources: tuple,
        targets: tuple[cute.Tensor, cute.Tensor],
        channel: Channel,
        number: Int32,
        place: tuple[Int32, Int32],
    ) -> None:
        """A box of queries, and one of keys for each warpgroup."""
        traits, cols = self.traits, self.traits.cols[operand]
        (of_queries, of_keys), (head_idx, batch_idx) = targets, place
        stage, barrier = channel.index(number), channel.barrier(number)
        boxes = [(*sources[:2], of_queries, traits.tile_m, 0, stage)]
        for group in range(traits.num_warpgroups):
            unit = stage * traits.num_warpgroups + group
            first = group * ROWS_PER_WARPGROUP
            boxes.append((*sources[2:], of_keys, ROWS_PER_WARPGROUP, first, unit))
        for atom, tensor, smem, rows, first, unit in boxes:
            gmem = tensor[None, None, batch_idx]
            src, dst = tma.tile_of(atom, gmem, (head_idx, first), ((1, rows), cols), smem)
            cute.copy(atom, src, dst[None, unit], tma_bar_ptr=barrier)

    def _load_stats(
        self,
        stats: cute.Tensor,
        smem: cute.Tensor,
        extents: ShortExtents,
        channel: Channel,
        number: Int32,
        place: tuple[Int32, Int32],
    ) -> None:
        """Statistics, 64 queries at a time, and marks of their row blocks."""
        traits, (head_idx, batch_idx) = self.traits, place
        stats_m, rows = traits.stats_m, ROWS_PER_WARPGROUP
        target, barrier = smem[None, channel.index(number)], channel.barrier(number)
        of_entry = cute.ceil_div(extents.seqlen_q, stats_m)
        for group in range(traits.row_groups):
            first = group * rows
            source = stats[head_idx, batch_idx * of_entry + first // stats_m, None]
            pieces = [
                (i * stats_m + first % stats_m, i * traits.stats_rows + first, rows)
                for i in range(traits.num_stats)
            ]
            if traits.has_marks:
                at = traits.num_stats * traits.stats_rows + group * WORDS_OF_MARKS
                pieces.append((traits.num_stats * stats_m, at, mark_words(stats_m)))
            load_words(source, target, pieces, barrier)

    # -- mma ------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        part: ShortPart,
        extents: ShortExtents,
        tiles: ShortTiles,
        channels: tuple,
        outputs: EntryOutputs,
        score_args: ScoreArgs,
    ):
        """MMA warpgroup: 64 keys."""
        traits, (for_s, for_dp) = self.traits, channels
        group = mma_warpgroup_idx()
        has_keys = mma_warp() < traits.key_warps
        exist = keys_exist(group * ROWS_PER_WARPGROUP, extents.seqlen_k)
        mma_scores, mma_dv = traits.mma_scores(), traits.mma_words(traits.cols[1])
        keys, values = (wgmma.operand_a(mma_scores, x) for x in (tiles.k, tiles.v))
        do_by_cols = wgmma.operand_b(mma_dv, transposed(tiles.do))
        # sums of dS over entries, of each block
        totals = [
            wgmma.make_accumulator(traits.block_m) for _ in range(traits.num_blocks * traits.sums)
        ]
        for acc in totals:
            acc.fill(0.0)
        if const_expr(traits.has_gaps):
            self._clear_grads(tiles)
        if has_keys & (part.count > 0):
            self._evaluate(part, extents, tiles, score_args)
        for i in cutlass.range(part.count, unroll=1):
            stage, dp_stage = for_s.index(i), for_dp.index(i)
            unit, dp_unit = (x * traits.num_warpgroups + group for x in (stage, dp_stage))
            for_s.wait(i)
            for_dp.wait(i)
            if const_expr(traits.has_marks):
                self._clear_marked(tiles, (stage, dp_stage))
            acc_dV = wgmma.make_accumulator(traits.cols[1])
            for b in cutlass.range_constexpr(traits.num_blocks):
                own = keys[None, None, None, unit], values[None, None, None, dp_unit]
                queries = self._queries(tiles.q, b, stage), self._queries(tiles.do, b, dp_stage)
                acc_S, acc_dP = scores_of(traits, own, queries)
                probs, grads = (cute.make_rmem_tensor(traits.block_m // 4, Int32) for _ in range(2))
                accs = (acc_S, acc_dP, *totals[b : b + traits.sums])
                if has_keys:
                    differentiate(
                        traits, self._statistics(tiles, stage, b), self._added(tiles, b), exist,
                        score_args.scales, accs, (probs, grads),
                    )  # fmt: skip
                    store_grads(traits, tiles.ds, grads, b)
                operand = wgmma.words_as_operand_a(probs, traits.dtype)
                first_step = b * traits.block_m // 16
                dO = do_by_cols[None, None, None, dp_stage]
                wgmma.issue(mma_dv, acc_dV, operand, dO, b > 0, first_step=first_step)
            warpgroup.wait_group(0)
            for_dp.release(i)
            cute.arch.fence_proxy("async.shared", space="cta")
            self._sync_all()
            acc_dK, accs_dQ = self._sum(tiles, stage)
            for_s.release(i)
            # dS has been read
            self._sync_all()
            self._send(part, extents, i, tiles, outputs, score_args, (acc_dV, acc_dK, accs_dQ))
        if const_expr(traits.sums):
            places = [
                (self._places(part, extents, b), wgmma.rows_by_cols(acc))
                for b, acc in enumerate(totals)
            ]
            self.summed.store(places, part.number, outputs.sums, score_args.aux_tensors)

    @cute.jit
    def _clear_grads(self, tiles: ShortTiles):
        """Clear dS of this warpgroup's keys: parts of it are never written."""
        warp = thread_in_warpgroup() // WARP
        for row in cutlass.range(warp, self.traits.rows_ds, WARPS_PER_WARPGROUP, unroll=1):
            clear_row(tiles.ds[row, None, mma_warpgroup_idx()])
        self._sync_all()

    def _sync_all(self) -> None:
        num_threads = self.traits.num_mma_threads
        cute.arch.barrier(barrier_id=Barrier.ALL, number_of_threads=num_threads)

    def _marks(self, tiles: ShortTiles, stage: Int32) -> tuple[Int32, ...]:
        """Words with a bit for each query of a tile."""
        traits = self.traits
        base = tiles.stats[None, stage].iterator + traits.num_stats * traits.stats_rows
        layout = cute.make_layout(WORDS_OF_MARKS * traits.row_groups)
        marks, found = cute.recast_tensor(cute.make_tensor(base, layout), Int32), []
        for group in range(traits.row_groups):
            # a row block of 128 queries has the marks of both groups
            second = 2 * (group % 2) if traits.stats_m > ROWS_PER_WARPGROUP else 0
            first = group * WORDS_OF_MARKS + second
            found += [marks[first], marks[first + 1]]
        return tuple(found)

    def _clear_marked(self, tiles: ShortTiles, stages: tuple[Int32, Int32]) -> None:
        rows = tiles.q[None, None, stages[0]], tiles.do[None, None, stages[1]]
        warps = mma_warp(), self.traits.num_mma_warps
        words = self._marks(tiles, stages[0])
        clear_marked(words, rows, self.traits.tile_m, warps, self._sync_all)

    # -- scores ---------------------------------------------------------------------------------

    def _queries(self, smem: cute.Tensor, b: int, stage: Int32) -> cute.Tensor:
        """Operand B of a block's S or dP."""
        traits, cols = self.traits, cute.size(smem, mode=[1])
        block = cute.local_tile(smem, (traits.block_m, cols), (b, 0, None))
        return wgmma.operand_b(traits.mma_scores(), block)[None, None, None, stage]

    def _places(self, part: ShortPart, extents: ShortExtents, b: int) -> Places:
        first_key = mma_warpgroup_idx() * ROWS_PER_WARPGROUP
        return Places.create(b * self.traits.block_m, first_key, part.head_idx, *extents[:2])

    def _added(self, tiles: ShortTiles, b: int) -> cute.Tensor | None:
        """What is added to this thread's scores in a block."""
        if not self.traits.adds:
            return None
        groups = self.traits.block_m // 8
        own = tiles.added[None, cute.arch.lane_idx(), mma_warp(), None]
        return cute.local_tile(own, (4, groups), (0, b))

    def _evaluate(
        self, part: ShortPart, extents: ShortExtents, tiles: ShortTiles, score_args: ScoreArgs
    ) -> None:
        """Write what is added to each score of this thread."""
        if not self.traits.adds:
            return
        band = band_of(score_args.window, self.is_causal, extents.seqlen_q, extents.seqlen_k)
        for b in range(self.traits.num_blocks):
            of_block = self._places(part, extents, b), band, self.summed, score_args.aux_tensors
            evaluate(*of_block, self._added(tiles, b))

    def _statistics(self, tiles: ShortTiles, stage: Int32, b: int) -> tuple[cute.Tensor, ...]:
        traits, base = self.traits, tiles.stats[None, stage].iterator
        starts = (i * traits.stats_rows + b * traits.block_m for i in range(traits.num_stats))
        return tuple(statistic(base + start, traits.block_m) for start in starts)

    # -- sums -----------------------------------------------------------------------------------

    def _row_groups(self) -> list[Int32]:
        """The groups of 64 queries whose dQ this warpgroup sums; the last may not exist."""
        count, groups = self.traits.num_warpgroups, self.traits.row_groups
        return [mma_warpgroup_idx() + i for i in range(0, groups, count)]

    def _sum(self, tiles: ShortTiles, stage: Int32) -> tuple[cute.Tensor, list[cute.Tensor]]:
        """dK of this warpgroup's keys, and dQ of its groups of queries, or of the last group."""
        traits = self.traits
        mma_dk, mma_dq = traits.mma_dk(), traits.mma_dq()
        by_keys = wgmma.operand_a(mma_dk, transposed(tiles.ds))
        q_by_cols = wgmma.operand_b(mma_dk, transposed(tiles.q))
        k_by_cols = wgmma.operand_b(mma_dq, transposed(tiles.k))
        acc_dK, accs_dQ = wgmma.make_accumulator(traits.cols[0]), []
        own = by_keys[None, None, None, mma_warpgroup_idx()]
        queries = q_by_cols[None, None, None, stage]
        wgmma.issue(mma_dk, acc_dK, own, queries, False, traits.tile_m // 16)
        for group in self._row_groups():
            row = cutlass.min(group, traits.row_groups - 1)
            by_queries = wgmma.operand_a(mma_dq, traits.rows_of_ds(tiles.ds, row))
            acc = wgmma.make_accumulator(traits.cols[0])
            for w, steps in enumerate(traits.key_steps):
                keys = k_by_cols[None, None, None, stage * traits.num_warpgroups + w]
                wgmma.issue(mma_dq, acc, by_queries[None, None, None, w], keys, w > 0, steps)
            accs_dQ.append(acc)
        warpgroup.wait_group(0)
        return acc_dK, accs_dQ

    @cute.jit
    def _send(
        self,
        part: ShortPart,
        extents: ShortExtents,
        i: Int32,
        tiles: ShortTiles,
        outputs: EntryOutputs,
        score_args: ScoreArgs,
        accs: tuple,
    ):
        """Store gradients of an entry, by way of this warpgroup's dS, warp by warp."""
        traits, (acc_dV, acc_dK, accs_dQ) = self.traits, accs
        group = mma_warpgroup_idx()
        smem = tiles.ds[None, None, group]
        dq, dk, dv = (x[None, None, part.head_idx, part.first + i] for x in outputs[:3])
        first = group * ROWS_PER_WARPGROUP
        keys = extents.seqlen_k - first
        scale(acc_dK, score_args.scale_dk)
        send_gradient(traits, acc_dV, smem, dv, first, keys)
        send_gradient(traits, acc_dK, smem, dk, first, keys)
        groups = self._row_groups()
        for j in cutlass.range_constexpr(len(groups)):
            scale(accs_dQ[j], score_args.scale_dq)
            row = groups[j] * ROWS_PER_WARPGROUP
            # not above 0 for groups that do not exist
            queries = extents.seqlen_q - row
            send_gradient(traits, accs_dQ[j], smem, dq, row, queries)
        sync_warpgroup(Barrier.SENT)
