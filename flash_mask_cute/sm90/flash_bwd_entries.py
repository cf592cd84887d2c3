"""FlashAttention backward for Hopper of short sequences whose keys are several tiles.

If a score_mod adds what all batch entries share, a CTA keeps 64 keys of a head, and walks over
batch entries with all of their queries. As in `flash_bwd_short`, what is added stays in shared
memory, and dS is summed over entries in registers. Reading elements of a table for each score again
took as long as everything else.

    S^T = K Q^T        dP^T = V dO^T        P = exp(S - LSE)        dS = P * (dP - delta)
    dV += P^T dO       dK += scale dS^T Q   dQ = dS K, which is added to scratch memory

| warps             | role | work                                                      |
|-------------------|------|-----------------------------------------------------------|
| 0 of warpgroup 0  | load | TMA of K and V of an entry, and of its blocks of queries  |
| warpgroups 1, 2   | mma  | the same keys, and every second block of 64 queries       |

Each warpgroup has sums of dK and dV of its own blocks. At the end of an entry they exchange these
through shared memory; one stores dK, the other one dV.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import WARPS_PER_WARPGROUP, thread_in_warpgroup, transposed
from flash_mask_cute.core.row_blocks import MARKS_PER_WORD, marks_of
from flash_mask_cute.core.softmax import ScoreScales
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
from flash_mask_cute.sm90.entry_loads import EntryOutputs, EntrySources
from flash_mask_cute.sm90.entry_sums import Places, SummedTensors
from flash_mask_cute.sm90.flash_bwd_entries_traits import (
    HELPER_REGISTERS,
    MMA_REGISTERS,
    NUM_MMA_WARPGROUPS,
    EntryTiles,
    EntryTraits,
)
from flash_mask_cute.sm90.gradient_stores import scale, send_gradient
from flash_mask_cute.sm90.warpgroups import Role, mma_warp, mma_warpgroup_idx, sync_warpgroup
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP


class Barrier(IntEnum):
    """Named barriers (0 is __syncthreads). BOTH: of MMA warps. OWN and next: of a warpgroup."""

    BOTH = 1
    OWN = 2


class EntryExtents(NamedTuple):
    seqlen_q: Int32
    seqlen_k: Int32
    batch: Int32
    n_tiles: Int32
    heads: Int32

    @property
    def blocks_of_entry(self) -> Int32:
        """Blocks with queries."""
        return cute.ceil_div(self.seqlen_q, ROWS_PER_WARPGROUP)


class Work(NamedTuple):
    """Of a CTA: units up to `end`. A unit is an entry of a tile. Each tile has `entries` of them,
    which begin at `first` of the batch."""

    unit: Int32
    end: Int32
    entries: Int32
    first: Int32


class Stretch(NamedTuple):
    """Entries of a tile of a head, one after the other. number: of those that a CTA had before."""

    head_idx: Int32
    n_tile: Int32
    first: Int32
    count: Int32
    number: Int32


@dataclass(eq=False, repr=False)
class EntryBackwardSm90:
    """Kernel for Hopper, for `cute.compile`. Parameters are those of `SharedGradientsSm90`; no sums
    are stored, terms are added to all."""

    traits: EntryTraits
    score_mod: Callable[..., Any]
    wants_aux: tuple[int, ...] = ()
    is_causal: bool = False

    def __post_init__(self) -> None:
        if not self.traits.fits:
            raise ValueError(f"a CTA has no room for {self.traits}")
        self.summed = SummedTensors(self.score_mod, self.wants_aux, ())

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStats: cute.Tensor,
        mdQaccum: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        sums: tuple | None,
        aux_tensors,
        softmax_scale: Float32,
        scale_dq: Float32,
        num_ctas: Int32,
        stream,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
    ):
        """Launch on `stream`. Arguments are those of the main kernel, dense, with as many heads of
        keys as of queries, row blocks of 64 queries, and mdQaccum that is zeros at first. num_ctas:
        that share the work. sums: of each wanted tensor, fp32 (`AuxSums`)."""
        traits = self.traits
        tensors = zip((mQ, mdO, mK, mV), traits.layouts()[:4], strict=True)
        sources = EntrySources.create(mStats, *((*x, ROWS_PER_WARPGROUP) for x in tensors))
        batch, seqlen_q, heads, _ = mQ.shape
        n_tiles = cute.ceil_div(mK.shape[1], ROWS_PER_WARPGROUP)
        window = WindowArgs(window_size_left, window_size_right)
        scales = ScoreScales.create(softmax_scale, None, True)
        self.kernel(
            sources,
            EntryExtents(seqlen_q, mK.shape[1], batch, n_tiles, heads),
            EntryOutputs(mdQaccum, tma.key_rows(mdK, False), tma.key_rows(mdV, False), sums),
            ScoreArgs(scales, scale_dq, softmax_scale, window, aux_tensors),
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(traits.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        sources: EntrySources,
        extents: EntryExtents,
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
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(HELPER_REGISTERS)
            if warp_idx == Role.LOAD:
                self.load(sources, extents, tiles, channels)
        else:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            self.mma(extents, tiles, channels, outputs, score_args)

    @cute.jit
    def _own_work(self, extents: EntryExtents) -> Work:
        """The entries of a CTA. CTAs with the tiles of an entry visit it at the same time, so that
        its rows and sums of dQ are in L2: each has one tile, and a part of the batch that is as
        large as its share of all entries. What is left of the batch then is less than a part. Its
        tiles follow each other, and the CTAs that are left divide them."""
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        tiles = extents.heads * extents.n_tiles
        size = cute.ceil_div(tiles * extents.batch, num_ctas)
        num_parts = extents.batch // size
        part = cta // tiles
        unit = (cta - part * tiles) * size
        work = Work(unit, unit + size, size, part * size)
        if part >= num_parts:
            rest = extents.batch - num_parts * size
            others = cutlass.max(num_ctas - num_parts * tiles, 1)
            of_cta = cute.ceil_div(tiles * rest, others)
            unit = cutlass.min((cta - num_parts * tiles) * of_cta, tiles * rest)
            end = cutlass.min(unit + of_cta, tiles * rest)
            work = Work(unit, end, cutlass.max(rest, 1), num_parts * size)
        return work

    def _stretch(self, extents: EntryExtents, work: Work, unit: Int32, number: Int32) -> Stretch:
        tile = unit // work.entries
        head_idx = tile // extents.n_tiles
        first = unit - tile * work.entries
        count = cutlass.min(work.entries - first, work.end - unit)
        n_tile = tile - head_idx * extents.n_tiles
        return Stretch(head_idx, n_tile, work.first + first, count, number)

    def _block(self, stretch: Stretch, slot: Int32) -> Int32:
        """The query block in a place; CTAs with other keys of an entry begin elsewhere."""
        pair, own = slot // NUM_MMA_WARPGROUPS, slot % NUM_MMA_WARPGROUPS
        return (pair + stretch.n_tile) % self.traits.turns * NUM_MMA_WARPGROUPS + own

    # -- load -----------------------------------------------------------------------------------

    @cute.jit
    def load(
        self, sources: EntrySources, extents: EntryExtents, tiles: EntryTiles, channels: tuple
    ):
        traits, (of_keys, of_blocks) = self.traits, channels
        work = self._own_work(extents)
        unit, number = work.unit, Int32(0)
        while unit < work.end:
            stretch = self._stretch(extents, work, unit, number)
            for i in cutlass.range(stretch.count, unroll=1):
                entry, batch_idx = number + i, stretch.first + i
                of_keys.acquire(entry)
                of_keys.expect(entry, traits.bytes_of_rows)
                row = stretch.n_tile * ROWS_PER_WARPGROUP
                place = stretch.head_idx, row, batch_idx
                stage, barrier = of_keys.index(entry), of_keys.barrier(entry)
                self._load_rows(sources.second, (tiles.k, tiles.v), stage, barrier, place)
                for slot in cutlass.range(traits.num_blocks, unroll=1):
                    block = self._block(stretch, slot)
                    fill = entry * traits.num_blocks + slot
                    of_blocks.acquire(fill)
                    of_blocks.expect(fill, traits.bytes_of_rows + traits.stats_words * 4)
                    # TMA takes no box that lies behind the last row
                    row = cutlass.min(block * traits.block_m, extents.seqlen_q - 1)
                    place = stretch.head_idx, row, batch_idx
                    stage, barrier = of_blocks.index(fill), of_blocks.barrier(fill)
                    self._load_rows(sources.first, (tiles.q, tiles.do), stage, barrier, place)
                    of_entry = extents.blocks_of_entry
                    row_block = batch_idx * of_entry + cutlass.min(block, of_entry - 1)
                    stats = sources.stats[stretch.head_idx, row_block, None]
                    tma.copy_bulk(stats, tiles.stats[None, stage], barrier)
            unit += stretch.count
            number += stretch.count

    def _load_rows(
        self,
        sources: tuple,
        targets: tuple[cute.Tensor, cute.Tensor],
        stage: Int32,
        barrier: cute.Pointer,
        place: tuple[Int32, Int32, Int32],
    ) -> None:
        """64 rows of two tensors."""
        head_idx, row, batch_idx = place
        for i, (smem, cols) in enumerate(zip(targets, self.traits.cols, strict=True)):
            atom, tensor = sources[2 * i : 2 * i + 2]
            box = (1, ROWS_PER_WARPGROUP), cols
            gmem = tensor[None, None, batch_idx]
            src, dst = tma.tile_of(atom, gmem, (head_idx, row), box, smem)
            cute.copy(atom, src, dst[None, stage], tma_bar_ptr=barrier)

    # -- mma ------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        extents: EntryExtents,
        tiles: EntryTiles,
        channels: tuple,
        outputs: EntryOutputs,
        score_args: ScoreArgs,
    ):
        """MMA warpgroup: every second block of queries."""
        traits = self.traits
        work = self._own_work(extents)
        unit, number = work.unit, Int32(0)
        totals = [wgmma.make_accumulator(traits.block_m) for _ in range(traits.turns * traits.sums)]
        band = band_of(score_args.window, self.is_causal, extents.seqlen_q, extents.seqlen_k)
        while unit < work.end:
            stretch = self._stretch(extents, work, unit, number)
            for acc in totals:
                acc.fill(0.0)
            for turn in cutlass.range_constexpr(traits.turns):
                of_block = self._places(stretch, extents, turn), band, self.summed
                evaluate(*of_block, score_args.aux_tensors, self._added(tiles, turn))
            for i in cutlass.range(stretch.count, unroll=1):
                self._take(stretch, i, extents, tiles, channels, (outputs, score_args), totals)
            if const_expr(traits.sums):
                places = [
                    (self._places(stretch, extents, turn), wgmma.rows_by_cols(acc))
                    for turn, acc in enumerate(totals)
                ]
                self.summed.store(places, Int32(0), outputs.sums, score_args.aux_tensors)
            unit += stretch.count
            number += stretch.count

    @cute.jit
    def _take(
        self,
        stretch: Stretch,
        i: Int32,
        extents: EntryExtents,
        tiles: EntryTiles,
        channels: tuple,
        given: tuple,
        totals: list,
    ):
        """Compute the gradients of an entry, the i-th of a stretch."""
        traits, (of_keys, of_blocks), (outputs, score_args) = self.traits, channels, given
        group, entry = mma_warpgroup_idx(), stretch.number + i
        batch_idx = stretch.first + i
        acc_dK, acc_dV = (wgmma.make_accumulator(x) for x in traits.cols)
        exist = keys_exist(stretch.n_tile * ROWS_PER_WARPGROUP, extents.seqlen_k)
        of_keys.wait(entry)
        unit = of_keys.index(entry)
        for turn in cutlass.range_constexpr(traits.turns):
            slot = turn * NUM_MMA_WARPGROUPS + group
            block, fill = self._block(stretch, slot), entry * traits.num_blocks + slot
            of_blocks.wait(fill)
            stage = of_blocks.index(fill)
            if const_expr(traits.has_marks):
                self._clear_marked(tiles, stage, block < extents.blocks_of_entry)
            mma = traits.mma_scores()
            own = [wgmma.operand_a(mma, x)[None, None, None, unit] for x in (tiles.k, tiles.v)]
            of_queries = tiles.q, tiles.do
            queries = [wgmma.operand_b(mma, x)[None, None, None, stage] for x in of_queries]
            acc_S, acc_dP = scores_of(traits, own, queries)
            probs, grads = (cute.make_rmem_tensor(traits.block_m // 4, Int32) for _ in range(2))
            differentiate(
                traits, self._statistics(tiles, stage), self._added(tiles, turn), exist,
                score_args.scales, (acc_S, acc_dP, *totals[turn : turn + traits.sums]),
                (probs, grads),
            )  # fmt: skip
            store_grads(traits, tiles.ds, grads)
            self._free_sums()
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_warpgroup(Barrier.OWN)
            self._add(acc_dV, probs, tiles.do, stage, turn > 0)
            self._add(acc_dK, grads, tiles.q, stage, turn > 0)
            acc_dQ = self._dq(tiles, unit)
            warpgroup.wait_group(0)
            of_blocks.release(fill)
            self._stage(acc_dQ, tiles.sums[None, group])
            cute.arch.fence_proxy("async.shared", space="cta")
            sync_warpgroup(Barrier.OWN)
            self._send_sums(outputs.dq, tiles, stretch.head_idx, batch_idx, block, extents)
        of_keys.release(entry)
        place = stretch.head_idx, batch_idx, stretch.n_tile * ROWS_PER_WARPGROUP
        self._store(outputs, tiles, place, extents, score_args.scale_dk, (acc_dK, acc_dV))

    def _add(
        self, acc: cute.Tensor, words: cute.Tensor, smem: cute.Tensor, stage: Int32, adds: bool
    ) -> None:
        """Start adding to dV or dK; words: P or dS."""
        mma = self.traits.mma_words(wgmma.num_cols(acc))
        operand = wgmma.words_as_operand_a(words, self.traits.dtype)
        rows = wgmma.operand_b(mma, transposed(smem))[None, None, None, stage]
        wgmma.issue(mma, acc, operand, rows, adds)

    def _dq(self, tiles: EntryTiles, unit: Int32) -> cute.Tensor:
        mma, acc = self.traits.mma_dq(), wgmma.make_accumulator(self.traits.cols[0])
        a = wgmma.operand_a(mma, tiles.ds)[None, None, None, mma_warpgroup_idx()]
        b = wgmma.operand_b(mma, transposed(tiles.k))[None, None, None, unit]
        wgmma.issue(mma, acc, a, b, False)
        return acc

    def _clear_marked(self, tiles: EntryTiles, stage: Int32, has_queries: Boolean) -> None:
        """Clear rows of Q and dO of queries that see nothing, all rows in an empty block."""
        traits = self.traits
        marks = marks_of(tiles.stats[None, stage], traits.block_m, traits.num_stats)
        words = tuple(
            cutlass.select_(has_queries, marks[i], Int32(-1))
            for i in range(traits.block_m // MARKS_PER_WORD)
        )
        rows = tiles.q[None, None, stage], tiles.do[None, None, stage]
        warps = mma_warp() % WARPS_PER_WARPGROUP, WARPS_PER_WARPGROUP
        clear_marked(words, rows, traits.block_m, warps, lambda: sync_warpgroup(Barrier.OWN))

    # -- scores ---------------------------------------------------------------------------------

    def _places(self, stretch: Stretch, extents: EntryExtents, turn: int) -> Places:
        """Of this warpgroup's block of a turn."""
        slot = turn * NUM_MMA_WARPGROUPS + mma_warpgroup_idx()
        first = self._block(stretch, slot) * self.traits.block_m
        first_key = stretch.n_tile * ROWS_PER_WARPGROUP
        return Places.create(first, first_key, stretch.head_idx, *extents[:2])

    def _added(self, tiles: EntryTiles, turn: int) -> cute.Tensor:
        """What is added to this thread's scores in its block of a turn."""
        warp = mma_warp() % WARPS_PER_WARPGROUP
        own = tiles.added[None, cute.arch.lane_idx(), warp, None]
        slot = turn * NUM_MMA_WARPGROUPS + mma_warpgroup_idx()
        return cute.local_tile(own, (4, self.traits.block_m // 8), (0, slot))

    def _statistics(self, tiles: EntryTiles, stage: Int32) -> tuple[cute.Tensor, ...]:
        size, base = self.traits.block_m, tiles.stats[None, stage].iterator
        return tuple(statistic(base + i * size, size) for i in range(self.traits.num_stats))

    # -- sums -----------------------------------------------------------------------------------

    def _is_sender(self) -> Any:
        return mma_warp() % WARPS_PER_WARPGROUP == 0

    @cute.jit
    def _free_sums(self):
        """The warp that sends sums waits until they have left."""
        if self._is_sender():
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _stage(self, acc: cute.Tensor, sums: cute.Tensor) -> None:
        """Write sums in the order of two warpgroups with half the columns (`BwdPostprocess`)."""
        groups = wgmma.num_cols(acc) // 8
        shape = 4, 32, groups // 2, WARPS_PER_WARPGROUP, 2
        staged = cute.make_tensor(sums.iterator, cute.make_layout(shape))
        warp, quads = mma_warp() % WARPS_PER_WARPGROUP, _quads(acc)
        for g in range(groups):
            place = (None, cute.arch.lane_idx(), g % (groups // 2), warp, g // (groups // 2))
            cute.autovec_copy(quads[None, g], staged[place])

    @cute.jit
    def _send_sums(
        self,
        target: cute.Tensor,
        tiles: EntryTiles,
        head_idx: Int32,
        batch_idx: Int32,
        block: Int32,
        extents: EntryExtents,
    ):
        """Add this warpgroup's dQ of a block to the others', if it has queries."""
        size, of_entry = self.traits.block_m, extents.blocks_of_entry
        if self._is_sender() & (block < of_entry):
            sums = tiles.sums[None, mma_warpgroup_idx()].iterator
            added = target[head_idx, batch_idx * of_entry + block, None].iterator
            tma.add_bulk(sums, added, size * self.traits.cols[0])

    @cute.jit
    def _store(
        self,
        outputs: EntryOutputs,
        tiles: EntryTiles,
        place: tuple,
        extents: EntryExtents,
        scale_dk: Float32,
        accs: tuple,
    ):
        """Store dV and dK of an entry, a warpgroup each, with the sums of the other one."""
        acc_dK, acc_dV = accs
        head_idx, batch_idx, first = place
        self._free_sums()
        self._sync_both()
        if mma_warpgroup_idx() == 0:
            self._give(acc_dK, tiles.sums[None, 0])
        else:
            self._give(acc_dV, tiles.sums[None, 1])
        self._sync_both()
        count = extents.seqlen_k - first
        if mma_warpgroup_idx() == 0:
            self._take_over(acc_dV, tiles.sums[None, 1])
            target = outputs.dv[None, None, head_idx, batch_idx]
            send_gradient(self.traits, acc_dV, tiles.ds[None, None, 0], target, first, count)
        else:
            self._take_over(acc_dK, tiles.sums[None, 0])
            scale(acc_dK, scale_dk)
            target = outputs.dk[None, None, head_idx, batch_idx]
            send_gradient(self.traits, acc_dK, tiles.ds[None, None, 1], target, first, count)
        self._sync_both()

    def _sync_both(self) -> None:
        num_threads = self.traits.num_threads * NUM_MMA_WARPGROUPS // (1 + NUM_MMA_WARPGROUPS)
        cute.arch.barrier(barrier_id=Barrier.BOTH, number_of_threads=num_threads)

    def _give(self, acc: cute.Tensor, sums: cute.Tensor) -> None:
        own, quads = _of_thread(sums), _quads(acc)
        for g in range(wgmma.num_cols(acc) // 8):
            cute.autovec_copy(quads[None, g], own[None, g])

    def _take_over(self, acc: cute.Tensor, sums: cute.Tensor) -> None:
        """Add the sums of the other warpgroup's thread with the same part of the tile."""
        own, quads = _of_thread(sums), _quads(acc)
        for g in range(wgmma.num_cols(acc) // 8):
            values = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(own[None, g], values)
            for j in range(4):
                quads[j, g] = quads[j, g] + values[j]


def _quads(acc: cute.Tensor) -> cute.Tensor:
    """(4, group of 8 columns) of an accumulator."""
    return cute.make_tensor(acc.iterator, cute.make_layout((4, wgmma.num_cols(acc) // 8)))


def _of_thread(sums: cute.Tensor) -> cute.Tensor:
    """(4, group of 8 columns): this thread's part of exchanged sums."""
    groups = cute.size(sums) // (4 * 128)
    layout = cute.make_layout((4, groups), stride=(1, 4 * 128))
    return cute.make_tensor((sums.iterator + 4 * thread_in_warpgroup()).align(16), layout)
