"""FlashAttention forward for Hopper: O = softmax(mask(Q K^T * scale)) V.

A persistent CTA computes one work tile of tile_m query rows after another. Its roles:

| warps                   | role | registers | work                                           |
|-------------------------|------|-----------|------------------------------------------------|
| 0 of warpgroup 0        | load | 40 / 32   | choose work tiles, TMA of Q, K, V              |
| 1-3 of warpgroup 0      | -    | 40 / 32   | nothing                                        |
| warpgroups 1..tile_m/64 | mma  | 232 / 160 | 64 rows each: S = Q K^T, softmax, P V, output  |

(registers for tile_m = 128 / 192). Pipelines (full/empty mbarrier pairs):

    load --ring--> mma   coordinates and lengths of the next work tile
    load --q-----> mma   all query rows of a tile
    load --k-----> mma   one key block      (released when its S is complete)
    load --v-----> mma   one value block    (released when its P V is complete)

S of the next key block is issued together with P V of this one, so the tensor cores have P V to do
while the exponentials of the next block are computed. At the end of a work tile the last P V goes
out together with the first S of the *next* tile, whose operands the load warp fetched meanwhile;
the output is scaled, staged in shared memory and stored by TMA under that product. Warpgroups take
turns to issue (FlashAttention-3's ping-pong), so that one computes exponentials while another
multiplies.

An empty walk (nothing visible) still visits one key block, all of it hidden: no role has a special
case, the softmax of a row that saw nothing is O = 0, LSE = -inf.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.core import softmax as softmax_math
from flash_mask_cute.core.cursor import Cursor
from flash_mask_cute.core.softmax import LOG2_E, OnlineSoftmax
from flash_mask_cute.core.tile_scheduler import ScheduleParams, TileScheduler, WorkTile
from flash_mask_cute.core.work_ring import NO_WORK, Work, WorkRing
from flash_mask_cute.masks.mask import ScoreFragment, UnmaskedBlocks, apply_band
from flash_mask_cute.seqlen_info import SeqlenInfoQK
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_fwd_plan import (
    RING_STAGES,
    THREADS_PER_WARPGROUP,
    Barrier,
    FwdPlan,
)

# Keys and values of the heads in flight should stay in the L2 cache of 50 MB. On an H200, 12 and
# 48 MB are slower for causal at 8K (docs/measured_facts.md).
L2_SHARE = 24 * 1024 * 1024
# bound of a ragged row coordinate: no sequence is longer (see `ragged_rows`)
RAGGED_BOUND = 1 << 26


class Operands(NamedTuple):
    """TMA atoms with their coordinate tensors.

    q, o: ((head, row), head_dim, ...); k: (row, head_dim, head, ...); v: (head_dim_v, row, head,
    ...); the last mode is the batch, absent where lengths vary.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    o_atom: cute.CopyAtom
    o: cute.Tensor


class Lengths(NamedTuple):
    """Where sequences start and how long they are; any of the tensors may be absent."""

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    seqlen_q: Int32
    seqlen_k: Int32


class ScoreArgs(NamedTuple):
    """What happens to a score.

    scale_log2 turns it into an exponent of two; before that, soft-capping multiplies by cap_in and
    applies tanh. Window sides and sink logits (heads_q,) may be absent.
    """

    scale_log2: Float32
    cap_in: Float32 | None
    window_left: Int32 | None
    window_right: Int32 | None
    sink: cute.Tensor | None


def ragged_rows(tensor: cute.Tensor) -> cute.Tensor:
    """View ((heads, rows), d) as ((heads, RAGGED_BOUND), d, rows).

    The sum of both row coordinates addresses a row, and the first one ends where the sequence ends,
    so TMA clips a tile there (the ragged tensors of Triton, in the form with a shifted base pointer
    that quack uses for stores).
    """
    (heads, _), dim = tensor.shape
    (stride_h, stride_row), stride_d = tensor.stride
    shifted = cute.domain_offset(((0, -RAGGED_BOUND), 0), tensor)
    layout = cute.make_layout(
        ((heads, RAGGED_BOUND), dim, (1 << 31) - 1),
        stride=((stride_h, stride_row), stride_d, stride_row),
    )
    return cute.make_tensor(shifted.iterator, layout)


def at_ragged_sequence(tensor: cute.Tensor, offset: Int32, length: Int32) -> cute.Tensor:
    """The rows of one sequence of a `ragged_rows` view."""
    return cute.domain_offset(((0, RAGGED_BOUND - length), 0), tensor[None, None, offset + length])


class FlashAttentionForwardSm90:
    """Forward kernel for Hopper, to be passed to `cute.compile`.

    :param dtype: cutlass.BFloat16 or cutlass.Float16, of Q, K, V and O
    :param head_dim, head_dim_v: multiples of 8 up to 256
    :param qhead_per_kvhead: query heads per KV head; fixed at compile time only with `pack_gqa`
    :param is_causal: bottom-right aligned causal masking
    :param is_local: the call's window sides apply
    :param pack_gqa: the query heads of a KV head (a divisor of 64) share a tile's rows
    :param tile_m, tile_n: query rows and keys of a tile
    :param num_stages: key and value blocks in flight
    :param stages_q: query tiles in flight, 1 or 2
    :param share_qo: the output is staged in the query's shared memory (needs stages_q=1)
    :param num_sms: CTAs to launch at most
    :raises NotImplementedError: for an option of other kernels that this one does not have
    :raises ValueError: for a shape or configuration that cannot run
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        head_dim_v: int | None = None,
        qhead_per_kvhead: int = 1,
        is_causal: bool = False,
        is_local: bool = False,
        pack_gqa: bool = False,
        tile_m: int = 128,
        tile_n: int = 128,
        num_stages: int = 2,
        num_threads: int | None = None,
        Q_in_regs: bool = False,
        intra_wg_overlap: bool = True,
        mma_pv_is_rs: bool = True,
        mask_mod=None,
        score_mod=None,
        has_aux_tensors: bool = False,
        stages_q: int = 2,
        share_qo: bool = False,
        num_sms: int = 132,
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.plan = FwdPlan(
            dtype,
            head_dim,
            head_dim_v,
            tile_m,
            tile_n,
            qhead_per_kvhead if pack_gqa else 1,
            num_stages,
            stages_q,
            share_qo,
        )
        refused = {
            "Q_in_regs": Q_in_regs,
            "intra_wg_overlap": not intra_wg_overlap,
            "mma_pv_is_rs": not mma_pv_is_rs,
            "mask_mod": mask_mod is not None,
            "score_mod": score_mod is not None,
            "has_aux_tensors": has_aux_tensors,
        }
        for name, given in refused.items():
            if given:
                raise NotImplementedError(f"FlashAttentionForwardSm90 does not support {name}")
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype must be BFloat16 or Float16, got {dtype}")
        reason = self.plan.infeasible()
        if reason is not None:
            raise ValueError(reason)
        if num_threads not in (None, self.plan.num_threads):
            raise ValueError(
                f"num_threads is {self.plan.num_threads} for tile_m={tile_m}, got {num_threads}"
            )
        self.is_causal = is_causal
        self.is_local = is_local
        self.num_sms = num_sms

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: Float32,
        stream,
        mCuSeqlensQ: cute.Tensor | None = None,
        mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None,
        mSeqUsedK: cute.Tensor | None = None,
        mPageTable: cute.Tensor | None = None,
        window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None,
        learnable_sink: cute.Tensor | None = None,
        blocksparse_tensors=None,
        aux_tensors=None,
        softcap: Float32 | None = None,
        tile_counter: cute.Tensor | None = None,
    ):
        """Launch on `stream`.

        Shapes: mQ (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with
        mCuSeqlensQ; mK, mV alike; mO like mQ with head_dim_v; mLSE (batch, heads_q, seqlen_q) or
        (heads_q, total_q). tile_counter (2,) int32, zero before the launch and after it: CTAs take
        work tiles as they get free instead of in turns; launches that may overlap need one each.
        """
        for name, arg in (
            ("mPageTable", mPageTable),
            ("blocksparse_tensors", blocksparse_tensors),
            ("aux_tensors", aux_tensors),
        ):
            if const_expr(arg is not None):
                raise NotImplementedError(f"FlashAttentionForwardSm90 does not support {name}")
        plan = self.plan
        varlen_q = const_expr(mCuSeqlensQ is not None)
        heads_first = [1, 0, 2] if varlen_q else [2, 1, 3, 0]
        q = cute.group_modes(
            cute.make_tensor(mQ.iterator, cute.select(mQ.layout, heads_first)), 0, 2
        )
        o = cute.group_modes(
            cute.make_tensor(mO.iterator, cute.select(mO.layout, heads_first)), 0, 2
        )
        if const_expr(varlen_q):
            o = ragged_rows(o)
        varlen_k = const_expr(mCuSeqlensK is not None)
        k = cute.make_tensor(
            mK.iterator, cute.select(mK.layout, [0, 2, 1] if varlen_k else [1, 3, 2, 0])
        )
        v = cute.make_tensor(
            mV.iterator, cute.select(mV.layout, [2, 0, 1] if varlen_k else [3, 1, 2, 0])
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tile, o_tile = (plan.row_tile, plan.tile_d), (plan.row_tile, plan.tile_dv)
        q_tma = cpasync.make_tiled_tma_atom(load, q, _one_stage(plan.layout_q()), q_tile)
        k_tma = cpasync.make_tiled_tma_atom(
            load, k, _one_stage(plan.layout_k()), (plan.tile_n, plan.tile_d)
        )
        v_tma = cpasync.make_tiled_tma_atom(
            load, v, _one_stage(plan.layout_v()), (plan.tile_dv, plan.tile_n)
        )
        o_tma = cpasync.make_tiled_tma_atom(store, o, _one_stage(plan.layout_o()), o_tile)
        operands = Operands(
            q_tma[0], q_tma[1], k_tma[0], k_tma[1], v_tma[0], v_tma[1], o_tma[0], o_tma[1]
        )

        seqlen_q = mQ.shape[0] if varlen_q else mQ.shape[1]
        seqlen_k = mK.shape[0] if varlen_k else mK.shape[1]
        lengths = Lengths(mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK, seqlen_q, seqlen_k)
        heads_q = mQ.shape[1] if varlen_q else mQ.shape[2]
        heads_kv = mK.shape[1] if varlen_k else mK.shape[2]
        num_heads = heads_q // plan.packed_heads
        num_batch = mQ.shape[0]
        if const_expr(varlen_q):
            num_batch = mCuSeqlensQ.shape[0] - 1
        num_m_blocks = cute.ceil_div(seqlen_q * plan.packed_heads, plan.tile_m)
        # heads that share keys stay together
        heads_per_kv = num_heads // heads_kv
        heads_per_group = heads_per_kv
        if const_expr(self.is_causal or window_size_right is not None):
            kv_bytes = Int64(cutlass.max(seqlen_k, 1)) * ((plan.head_dim + plan.head_dim_v) * 2)
            fitting = Int32(cutlass.max(cutlass.min(L2_SHARE // kv_bytes, heads_kv * num_batch), 1))
            heads_per_group = fitting * heads_per_kv
        schedule = ScheduleParams(num_m_blocks, num_heads, num_batch, heads_per_group)
        grid = Int32(self.num_sms)
        if const_expr(not varlen_q):
            grid = cutlass.min(grid, num_m_blocks * num_heads * num_batch)
        scale_log2 = softmax_scale * LOG2_E
        cap_in = None
        if const_expr(softcap is not None):
            cap_in = softmax_scale / softcap
            scale_log2 = softcap * LOG2_E
        score_args = ScoreArgs(
            scale_log2, cap_in, window_size_left, window_size_right, learnable_sink
        )
        self.kernel(
            operands, mLSE, lengths, score_args, schedule, heads_per_kv, tile_counter
        ).launch(
            grid=(grid, 1, 1),
            block=(plan.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        score_args: ScoreArgs,
        schedule: ScheduleParams,
        heads_per_kv: Int32,
        tile_counter: cute.Tensor | None,
    ):
        plan = self.plan
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (operands.q_atom, operands.k_atom, operands.v_atom, operands.o_atom):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(plan.storage())
        pipeline_q = self._tma_pipeline(storage.q_barriers, plan.stages_q, plan.bytes_q)
        pipeline_k = self._tma_pipeline(storage.k_barriers, plan.stages_kv, plan.bytes_k)
        pipeline_v = self._tma_pipeline(storage.v_barriers, plan.stages_kv, plan.bytes_v)
        ring = WorkRing.create(
            storage.ring.data_ptr(),
            storage.ring_barriers.data_ptr(),
            RING_STAGES,
            plan.num_mma_warps,
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        layout_q, layout_k, layout_v = plan.layout_q(), plan.layout_k(), plan.layout_v()
        layout_o = plan.layout_o()
        sQ = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sK = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sV = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        o_storage = storage.q if const_expr(plan.share_qo) else storage.o
        sO = o_storage.get_tensor(layout_o.outer, swizzle=layout_o.inner)
        pipelines = (pipeline_q, pipeline_k, pipeline_v)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(plan.load_registers)
            if warp_idx == 0:
                scheduler = TileScheduler(
                    schedule,
                    tile_counter,
                    self.is_causal or self.is_local,
                    lengths.cu_seqlens_q is not None,
                )
                self.load(
                    operands,
                    (sQ, sK, sV),
                    pipelines,
                    ring,
                    lengths,
                    score_args,
                    scheduler,
                    heads_per_kv,
                )
        else:
            cute.arch.setmaxregister_increase(plan.mma_registers)
            self.mma(operands, (sQ, sK, sV, sO), pipelines, ring, mLSE, lengths, score_args)

    def _tma_pipeline(self, barriers, stages: int, tx_count: int):
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, self.plan.num_mma_warps
            ),
            tx_count=tx_count,
            defer_sync=True,
        )

    def _block_info(self, score_args: ScoreArgs) -> BlockInfo:
        return BlockInfo(
            self.plan.tile_m,
            self.plan.tile_n,
            is_causal=self.is_causal,
            is_local=self.is_local,
            window_size_left=score_args.window_left,
            window_size_right=score_args.window_right,
            qhead_per_kvhead_packgqa=self.plan.packed_heads,
        )

    @cute.jit
    def load(
        self,
        operands: Operands,
        tiles,
        pipelines,
        ring: WorkRing,
        lengths: Lengths,
        score_args: ScoreArgs,
        scheduler: TileScheduler,
        heads_per_kv: Int32,
    ):
        """Load warp: decide on work tiles, announce them, and stream their operands.

        Values lag one block behind keys, as their consumers do, across work tiles too: the next
        tile's query and first keys go out before this tile's last values.
        """
        plan = self.plan
        sQ, sK, sV = tiles
        pipeline_q, pipeline_k, pipeline_v = pipelines
        block_info = self._block_info(score_args)
        # fills so far: of the ring and the query pipeline, of the key and value pipelines
        tiles_done, blocks_done = Int32(0), Int32(0)
        load_q = partial(self._load_query, operands, sQ, pipeline_q, lengths)
        k_loader = partial(self._k_loader, operands, sK, pipeline_k, lengths, heads_per_kv)
        v_loader = partial(self._v_loader, operands, sV, pipeline_v, lengths, heads_per_kv)
        num_m_blocks_of = partial(_num_m_blocks, plan, lengths.cu_seqlens_q)
        open_tile = partial(_open_tile, ring, load_q, k_loader, block_info)

        search = scheduler.start()
        tile, search = scheduler.locate(search, num_m_blocks_of)
        work = _describe(tile, lengths)
        open_tile(tiles_done, self._kv_fill(blocks_done), work, tile.is_valid)
        while tile.is_valid:
            search = scheduler.advance(search)
            n_block_min, n_block_last = _block_range(block_info, work)
            num_n_blocks = n_block_last - n_block_min + 1
            load_k, load_v = k_loader(work), v_loader(work)
            for i in cutlass.range(1, num_n_blocks, unroll=1):
                load_k(self._kv_fill(blocks_done + i), n_block_last - i)
                load_v(self._kv_fill(blocks_done + i - 1), n_block_last - i + 1)
            blocks_done += num_n_blocks
            tiles_done += 1
            if const_expr(plan.share_qo):
                # the next query has to wait for the output, which has to wait for these
                load_v(self._kv_fill(blocks_done - 1), n_block_min)
            tile, search = scheduler.locate(search, num_m_blocks_of)
            work = _describe(tile, lengths)
            open_tile(tiles_done, self._kv_fill(blocks_done), work, tile.is_valid)
            if const_expr(not plan.share_qo):
                load_v(self._kv_fill(blocks_done - 1), n_block_min)
        scheduler.finish()
        ring.write(tiles_done, NO_WORK)

    def _load_query(
        self, operands: Operands, sQ, pipeline_q, lengths: Lengths, number: Int32, work: Work
    ):
        """Fetch the query rows of work tile `number`."""
        plan = self.plan
        gQ = operands.q
        if const_expr(lengths.cu_seqlens_q is None):
            gQ = gQ[None, None, work.batch_idx]
        fill = Cursor(number, plan.stages_q, is_producer=True)
        pipeline_q.producer_acquire(fill)
        for w in range(plan.num_mma_warpgroups):
            tile_row = work.m_block * plan.tile_m + w * wgmma.ROWS_PER_WARPGROUP
            first = (
                work.head_idx * plan.packed_heads,
                work.offset_q + tile_row // plan.packed_heads,
            )
            src, dst = _tma_tile(operands.q_atom, gQ, first, (plan.row_tile, plan.tile_d), sQ)
            cute.copy(
                operands.q_atom,
                src,
                dst[None, fill.index * plan.num_mma_warpgroups + w],
                tma_bar_ptr=pipeline_q.producer_get_barrier(fill),
            )

    def _k_loader(self, operands: Operands, sK, pipeline_k, lengths: Lengths, heads_per_kv, work):
        """load(fill, n_block) for the keys of a work tile."""
        head_kv = work.head_idx // heads_per_kv
        if const_expr(lengths.cu_seqlens_k is None):
            gK = operands.k[None, None, head_kv, work.batch_idx]
        else:
            gK = cute.domain_offset((work.offset_k, 0), operands.k[None, None, head_kv])
        blocks = cute.local_tile(gK, (self.plan.tile_n, self.plan.tile_d), (None, 0))
        return _block_loader(operands.k_atom, pipeline_k, blocks, sK)

    def _v_loader(self, operands: Operands, sV, pipeline_v, lengths: Lengths, heads_per_kv, work):
        """load(fill, n_block) for the values of a work tile."""
        head_kv = work.head_idx // heads_per_kv
        if const_expr(lengths.cu_seqlens_k is None):
            gV = operands.v[None, None, head_kv, work.batch_idx]
        else:
            gV = cute.domain_offset((0, work.offset_k), operands.v[None, None, head_kv])
        blocks = cute.local_tile(gV, (self.plan.tile_dv, self.plan.tile_n), (0, None))
        return _block_loader(operands.v_atom, pipeline_v, blocks, sV)

    def _kv_fill(self, count: Int32) -> Cursor:
        return Cursor(count, self.plan.stages_kv, is_producer=True)

    @cute.jit
    def mma(
        self,
        operands: Operands,
        tiles,
        pipelines,
        ring: WorkRing,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        score_args: ScoreArgs,
    ):
        """MMA warpgroup: 64 query rows of every work tile."""
        plan = self.plan
        sQ, sK, sV, sO = tiles
        pipeline_q, pipeline_k, pipeline_v = pipelines
        block_info = self._block_info(score_args)
        mma_qk, mma_pv = plan.mma_qk(), plan.mma_pv()
        slice_qk, slice_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        tSrQ = mma_qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = mma_qk.make_fragment_B(slice_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(slice_pv.partition_B(sV))
        first_S = wgmma.make_accumulator(plan.tile_n)
        acc_O = wgmma.make_accumulator(plan.tile_dv)
        probs = cute.make_rmem_tensor(first_S.layout, plan.dtype)
        tOrP = wgmma.as_operand_a(probs)
        softmax = OnlineSoftmax.create(score_args.scale_log2, wgmma.ROWS_PER_THREAD)

        issue_scores = partial(self._issue_scores, mma_qk, tSrQ, tSrK)
        first_scores = partial(self._first_scores, pipelines, issue_scores, first_S)
        # the work tile and the key/value block at hand, numbered from 0
        tile, block = Int32(0), Int32(0)
        self._first_turn()
        is_valid = ring.wait(tile)
        first_scores(tile, block, is_valid)
        while is_valid:
            work = ring.read(tile)
            n_block_min, n_block = _block_range(block_info, work)
            unmasked = UnmaskedBlocks.create(block_info, work.seqlen, work.m_block, n_block_min)
            score = partial(self._score, score_args, block_info, ring, tile)

            scores = wgmma.rows_by_cols(first_S)
            score(scores, n_block, unmasked.cuts(n_block))
            softmax.start(scores)
            softmax.accumulate(scores)
            probs.store(first_S.load().to(plan.dtype))
            accumulate = Boolean(False)
            # The same loop for each run of blocks: one that asked every block whether it is masked
            # would have one branch more while P V is in flight, which ptxas answers by serialising
            # all products.
            for is_masked, n_block_stop in unmasked.descending_runs(n_block_min):
                while n_block > n_block_stop:
                    n_block -= 1
                    v_fill, k_fill = self._kv_read(block), self._kv_read(block + 1)
                    block += 1
                    pipeline_k.consumer_wait(k_fill)
                    self._wait_turn()
                    # a tensor of its own: one that lived on across the loops would cost as many
                    # registers again
                    acc_S = wgmma.make_accumulator(plan.tile_n)
                    issue_scores(acc_S, tile, block)
                    pipeline_v.consumer_wait(v_fill)
                    v_tile = tOrV[None, None, None, v_fill.index]
                    wgmma.issue(mma_pv, acc_O, tOrP, v_tile, accumulate)
                    self._pass_turn()
                    warpgroup.wait_group(1)
                    pipeline_k.consumer_release(k_fill)
                    scores = wgmma.rows_by_cols(acc_S)
                    score(scores, n_block, is_masked)
                    tile_max = softmax.tile_max(scores)
                    factors = (Float32(1.0), Float32(1.0))
                    if softmax.outgrown(tile_max):
                        factors = softmax.renew(tile_max)
                    softmax.accumulate(scores)
                    # The wait stands behind a branch, with a copy inside it, because ptxas moves it
                    # up to the start of its basic block: above the exponentials that should
                    # overlap P V.
                    if softmax_math.differ_from_one(factors):
                        warpgroup.wait_group(0)
                        softmax_math.rescale(wgmma.rows_by_cols(acc_O), factors)
                    warpgroup.wait_group(0)
                    pipeline_v.consumer_release(v_fill)
                    probs.store(acc_S.load().to(plan.dtype))
                    accumulate = Boolean(True)

            # the last P V of this tile, and with it the first S of the next
            next_is_valid = ring.wait(tile + 1)
            if const_expr(not plan.share_qo):
                # before the turn: another warpgroup may wait, in its own, for the query that takes
                # this one's place
                pipeline_q.consumer_release(Cursor(tile, plan.stages_q))
            v_fill = self._kv_read(block)
            pipeline_v.consumer_wait(v_fill)
            self._wait_turn()
            wgmma.issue(mma_pv, acc_O, tOrP, tOrV[None, None, None, v_fill.index], accumulate)
            if const_expr(not plan.share_qo):
                self._issue_next_scores(
                    pipelines, issue_scores, first_S, tile, block, next_is_valid
                )
            self._pass_turn()
            warpgroup.wait_group(0 if const_expr(plan.share_qo) else 1)
            pipeline_v.consumer_release(v_fill)
            work = ring.read(tile)
            self._epilogue(operands, sO, acc_O, softmax, mLSE, lengths, score_args.sink, work)
            ring.release(tile)
            if const_expr(plan.share_qo):
                # the output has left, and with it the query's last reader
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                pipeline_q.consumer_release(Cursor(tile, plan.stages_q))
                first_scores(tile + 1, block + 1, next_is_valid)
            else:
                warpgroup.wait_group(0)
                if next_is_valid:
                    pipeline_k.consumer_release(self._kv_read(block + 1))
            tile += 1
            block += 1
            is_valid = next_is_valid
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _kv_read(self, count: Int32) -> Cursor:
        return Cursor(count, self.plan.stages_kv)

    def _issue_scores(self, mma_qk, tSrQ, tSrK, acc_S: cute.Tensor, tile: Int32, block: Int32):
        """Start S = Q K^T of this warpgroup's rows of a work tile and a key block."""
        plan = self.plan
        q_stage = Cursor(tile, plan.stages_q).index * plan.num_mma_warpgroups + _warpgroup_idx()
        q_tile = tSrQ[None, None, None, q_stage]
        k_tile = tSrK[None, None, None, self._kv_read(block).index]
        wgmma.issue(mma_qk, acc_S, q_tile, k_tile, False)

    @cute.jit
    def _first_scores(self, pipelines, issue_scores, acc_S, tile, block, is_valid: Boolean):
        """S of a work tile's first key block, with nothing to overlap it."""
        pipeline_q, pipeline_k, _ = pipelines
        # gives the registers a value on the other path, so that they need not live on from before
        acc_S.fill(0.0)
        if is_valid:
            k_fill = self._kv_read(block)
            pipeline_q.consumer_wait(Cursor(tile, self.plan.stages_q))
            pipeline_k.consumer_wait(k_fill)
            issue_scores(acc_S, tile, block)
            warpgroup.wait_group(0)
            pipeline_k.consumer_release(k_fill)

    @cute.jit
    def _issue_next_scores(self, pipelines, issue_scores, acc_S, tile, block, is_valid: Boolean):
        """Issue S of the next tile's first key block.

        Where there is no next tile the product is issued all the same, for nothing, on this tile's
        operands: a product under a branch would make the compiler serialise all of them.
        """
        pipeline_q, pipeline_k, _ = pipelines
        if is_valid:
            tile += 1
            block += 1
            pipeline_q.consumer_wait(Cursor(tile, self.plan.stages_q))
            pipeline_k.consumer_wait(self._kv_read(block))
        issue_scores(acc_S, tile, block)

    @cute.jit
    def _score(
        self,
        score_args: ScoreArgs,
        block_info: BlockInfo,
        ring: WorkRing,
        tile,
        scores,
        n_block,
        is_masked,
    ):
        """Soft-cap the scores of a key block and, if `is_masked` (bool or Boolean), mask them."""
        if const_expr(score_args.cap_in is not None):
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = cute.math.tanh(scores[i] * score_args.cap_in, fastmath=True)
        if const_expr(is_masked is True):
            self._mask(block_info, ring, tile, scores, n_block)
        elif const_expr(is_masked is not False):  # noqa: SIM102 (decided while tracing)
            if is_masked:
                self._mask(block_info, ring, tile, scores, n_block)

    def _mask(self, block_info: BlockInfo, ring: WorkRing, tile, scores, n_block):
        work = ring.read(tile)
        thread = _thread_in_warpgroup()
        q_idx = tuple(row // self.plan.packed_heads for row in self._tile_rows(work, thread))
        first_k_idx = n_block * self.plan.tile_n + wgmma.first_col_of(thread)
        fragment = ScoreFragment(scores, q_idx, first_k_idx, wgmma.count_cols_below)
        apply_band(block_info.band(work.seqlen), fragment)

    def _tile_rows(self, work: Work, thread: Int32):
        """Rows of the sequence (of its packed rows) that a thread's accumulator holds."""
        first = work.m_block * self.plan.tile_m + _warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        return tuple(first + wgmma.row_of(thread, r) for r in range(wgmma.ROWS_PER_THREAD))

    @cute.jit
    def _epilogue(
        self,
        operands: Operands,
        sO: cute.Tensor,
        acc_O: cute.Tensor,
        softmax: OnlineSoftmax,
        mLSE: cute.Tensor | None,
        lengths: Lengths,
        mSink: cute.Tensor | None,
        work: Work,
    ):
        """Scale the accumulator, store it and the LSE of this warpgroup's rows."""
        plan = self.plan
        thread = _thread_in_warpgroup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_idx = warp_idx // 4 - 1
        rows = self._tile_rows(work, thread)
        q_idx = tuple(row // plan.packed_heads for row in rows)
        heads = tuple(work.head_idx * plan.packed_heads + row % plan.packed_heads for row in rows)
        sinks = None
        if const_expr(mSink is not None):
            sinks = tuple(mSink[head].to(Float32) for head in heads)
        output = wgmma.rows_by_cols(acc_O)
        for r, (factor, lse) in enumerate(softmax.finalize(sinks)):
            if const_expr(lengths.seqused_q is not None):
                used = q_idx[r] < work.seqlen_q
                lse = cutlass.select_(used, lse, -Float32.inf)
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = cutlass.select_(used, output[r, c] * factor, Float32(0.0))
            else:
                for c in cutlass.range_constexpr(cute.size(output, mode=[1])):
                    output[r, c] = output[r, c] * factor
            if const_expr(mLSE is not None):  # noqa: SIM102 (decided while tracing)
                if thread % 4 == 0 and q_idx[r] < work.slot_q:
                    if const_expr(lengths.cu_seqlens_q is None):
                        mLSE[work.batch_idx, heads[r], q_idx[r]] = lse
                    else:
                        mLSE[heads[r], work.offset_q + q_idx[r]] = lse

        # the previous tile's store must have read the staging memory, and all warps their queries
        is_storing_warp = warp_idx % 4 == 0
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        _warpgroup_sync()
        rounded = cute.make_rmem_tensor(acc_O.layout, plan.dtype)
        rounded.store(acc_O.load().to(plan.dtype))
        store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), plan.dtype)
        store = cute.make_tiled_copy_C(store_atom, plan.mma_pv()).get_slice(thread)
        cute.copy(
            store_atom, store.retile(rounded), store.partition_D(sO[None, None, warpgroup_idx])
        )
        cute.arch.fence_proxy("async.shared", space="cta")
        _warpgroup_sync()
        if is_storing_warp:
            tile_row = work.m_block * plan.tile_m + warpgroup_idx * wgmma.ROWS_PER_WARPGROUP
            first = (work.head_idx * plan.packed_heads, tile_row // plan.packed_heads)
            if const_expr(lengths.cu_seqlens_q is None):
                gO = operands.o[None, None, work.batch_idx]
            else:
                gO = at_ragged_sequence(operands.o, work.offset_q, work.slot_q)
            dst, src = _tma_tile(operands.o_atom, gO, first, (plan.row_tile, plan.tile_dv), sO)
            cute.copy(operands.o_atom, src[None, warpgroup_idx], dst)
            cute.arch.cp_async_bulk_commit_group()

    # Turns: a warpgroup issues its products after the one before it has issued, in a circle.
    @cute.jit
    def _first_turn(self):
        if _warpgroup_idx() == self.plan.num_mma_warpgroups - 1:
            self._pass_turn()

    def _wait_turn(self):
        cute.arch.barrier(
            barrier_id=Barrier.TURN + _warpgroup_idx(), number_of_threads=2 * THREADS_PER_WARPGROUP
        )

    def _pass_turn(self):
        warpgroup_idx = _warpgroup_idx()
        is_last = warpgroup_idx == self.plan.num_mma_warpgroups - 1
        following = cutlass.select_(is_last, Int32(0), warpgroup_idx + 1)
        cute.arch.barrier_arrive(
            barrier_id=Barrier.TURN + following, number_of_threads=2 * THREADS_PER_WARPGROUP
        )


def _warpgroup_idx() -> Int32:
    """This MMA warpgroup, counted from the first; uniform, so that descriptors are too."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1


def _thread_in_warpgroup() -> Int32:
    return cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP


def _warpgroup_sync():
    cute.arch.barrier(
        barrier_id=Barrier.EPILOGUE + _warpgroup_idx(), number_of_threads=THREADS_PER_WARPGROUP
    )


def _block_range(block_info: BlockInfo, work: Work):
    """First and last key block of a work tile's walk, which visits at least one."""
    n_block_min, n_block_max = block_info.get_n_block_min_max(work.seqlen, work.m_block)
    return n_block_min, cutlass.max(n_block_max - 1, n_block_min)


def _one_stage(layout):
    return cute.select(layout, mode=[0, 1])


def _tma_tile(atom: cute.CopyAtom, tensor: cute.Tensor, first, tile, smem: cute.Tensor):
    """TMA partitions (global, shared with stages) of the tile of rows from (head, row) `first`."""
    gmem = cute.local_tile(cute.domain_offset((first, 0), tensor), tile, (0, 0))
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )
    return g, s


def _block_loader(atom: cute.CopyAtom, pipe, blocks: cute.Tensor, smem: cute.Tensor):
    """load(fill, n_block), which fetches one of `blocks` (tile, tile, n_blocks) for a pipeline."""
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(blocks, 0, 2)
    )
    return partial(_load_block, atom, pipe, g, s)


@cute.jit
def _load_block(atom, pipe, gmem, smem, fill: Cursor, block: Int32):
    pipe.producer_acquire(fill)
    cute.copy(
        atom, gmem[None, block], smem[None, fill.index], tma_bar_ptr=pipe.producer_get_barrier(fill)
    )


@cute.jit
def _open_tile(ring: WorkRing, load_q, k_loader, block_info, number, fill, work, is_valid):
    """Announce work tile `number`, fetch its query, and its first key block as `fill`."""
    if is_valid:
        ring.write(number, work)
        load_q(number, work)
        _, n_block_last = _block_range(block_info, work)
        k_loader(work)(fill, n_block_last)


@cute.jit
def _describe(tile: WorkTile, lengths: Lengths) -> Work:
    """The ring entry of a work tile."""
    batch_idx = cutlass.select_(tile.is_valid, tile.batch_idx, Int32(0))
    slot = SeqlenInfoQK.create(
        batch_idx, lengths.seqlen_q, lengths.seqlen_k, lengths.cu_seqlens_q, lengths.cu_seqlens_k
    )
    used = SeqlenInfoQK.create(
        batch_idx,
        lengths.seqlen_q,
        lengths.seqlen_k,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.seqused_q,
        lengths.seqused_k,
    )
    return Work(
        tile.m_block,
        tile.head_idx,
        batch_idx,
        Int32(used.offset_q),
        Int32(slot.seqlen_q),
        Int32(used.seqlen_q),
        Int32(used.offset_k),
        Int32(used.seqlen_k),
    )


@cute.jit
def _num_m_blocks(plan: cutlass.Constexpr, cu_seqlens_q, batch_idx: Int32) -> Int32:
    slot = cu_seqlens_q[batch_idx + 1] - cu_seqlens_q[batch_idx]
    return cute.ceil_div(slot * plan.packed_heads, plan.tile_m)
