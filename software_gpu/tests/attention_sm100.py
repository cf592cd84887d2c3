"""A small attention-shaped kernel for sm_100a: TMA, tcgen05 with P in TMEM."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor
from cutlass.experimental import primitives

M, N, D, ST = 128, 128, 64, 2


class Attn100:
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        stream: cuda.CUstream,
    ):
        dt = mQ.element_type
        mVt = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0]))
        one = tcgen05.CtaGroup.ONE
        qk = sm100.make_trivial_tiled_mma(
            dt, dt, OperandMajorMode.K, OperandMajorMode.K, Float32, one, (M, N)
        )
        pv = sm100.make_trivial_tiled_mma(
            dt,
            dt,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            one,
            (M, D),
            tcgen05.OperandSource.TMEM,
        )
        lQ = sm100.make_smem_layout_a(qk, (M, N, D), dt, 1)
        lK = sm100.make_smem_layout_b(qk, (M, N, D), dt, ST)
        lP = sm100.make_smem_layout_a(pv, (M, D, N), dt, 1)
        lV = sm100.make_smem_layout_b(pv, (M, D, N), dt, ST)
        g2s = cpasync.CopyBulkTensorTileG2SOp(one)
        aQ, tQ = cute.nvgpu.make_tiled_tma_atom_A(
            g2s, mQ, cute.select(lQ, mode=[0, 1, 2]), (M, N, D), qk
        )
        aK, tK = cute.nvgpu.make_tiled_tma_atom_B(
            g2s, mK, cute.select(lK, mode=[0, 1, 2]), (M, N, D), qk
        )
        aV, tV = cute.nvgpu.make_tiled_tma_atom_B(
            g2s, mVt, cute.select(lV, mode=[0, 1, 2]), (M, D, N), pv
        )

        @cute.struct
        class SS:
            q: cute.struct.Align[cute.struct.MemRange[dt, cute.cosize(lQ)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dt, cute.cosize(lK)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dt, cute.cosize(lV)], 1024]
            tmem: Int32

        self.SS = SS
        self.kern(qk, pv, aQ, tQ, aK, tK, aV, tV, mO, lQ, lK, lP, lV).launch(
            grid=(cute.ceil_div(mQ.shape[0], M), 1, 1),
            block=(192, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kern(
        self,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        mO: cute.Tensor,
        lQ: cute.ComposedLayout,
        lK: cute.ComposedLayout,
        lP: cute.ComposedLayout,
        lV: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx, _, _ = cute.arch.thread_idx()
        bx, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        st = smem.allocate(self.SS)

        def G(n=1):
            return pl.CooperativeGroup(pl.Agent.Thread, n)

        pq = pl.PipelineTmaUmma.create(
            num_stages=1,
            producer_group=G(),
            consumer_group=G(),
            tx_count=M * D * 2,
            defer_sync=True,
        )
        pk = pl.PipelineTmaUmma.create(
            num_stages=ST,
            producer_group=G(),
            consumer_group=G(),
            tx_count=2 * N * D * 2,
            defer_sync=True,
        )
        ps = pl.PipelineUmmaAsync.create(
            num_stages=1, producer_group=G(), consumer_group=G(128), defer_sync=True
        )  # S full / S empty
        pp = pl.PipelineAsyncUmma.create(
            num_stages=1, producer_group=G(128), consumer_group=G(), defer_sync=True
        )  # P full
        po = pl.PipelineUmmaAsync.create(
            num_stages=1, producer_group=G(), consumer_group=G(128), defer_sync=True
        )  # O full
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tb = pl.NamedBarrier(barrier_id=1, num_threads=160)
        ta = cutlass.memory.TmemAllocator(st.tmem.ptr, barrier_for_retrieve=tb, allocator_warp_id=0)
        sQ = st.q.get_tensor(lQ.outer, swizzle=lQ.inner)
        sK = st.k.get_tensor(lK.outer, swizzle=lK.inner)
        sV = st.v.get_tensor(lV.outer, swizzle=lV.inner)
        thr = qk.get_slice(0)
        thv = pv.get_slice(0)
        gQ = cute.local_tile(tQ, (M, D), (bx, 0))
        gK = cute.local_tile(tK, (N, D), (None, 0))
        gV = cute.local_tile(tV, (D, N), (0, None))
        L1 = cute.make_layout(1)
        tQs, tQg = cpasync.tma_partition(
            aQ, 0, L1, cute.group_modes(sQ, 0, 3), cute.group_modes(thr.partition_A(gQ), 0, 3)
        )
        tKs, tKg = cpasync.tma_partition(
            aK, 0, L1, cute.group_modes(sK, 0, 3), cute.group_modes(thr.partition_B(gK), 0, 3)
        )
        tVs, tVg = cpasync.tma_partition(
            aV, 0, L1, cute.group_modes(sV, 0, 3), cute.group_modes(thv.partition_B(gV), 0, 3)
        )
        nb = cute.size(gK, mode=[2])
        rQ = qk.make_fragment_A(sQ)
        rK = qk.make_fragment_B(sK)
        rV = pv.make_fragment_B(sV)
        shS = qk.partition_shape_C((M, N))
        shO = pv.partition_shape_C((M, D))
        U = pl.PipelineUserType
        if warp == 5:
            s1 = pl.make_pipeline_state(U.Producer, 1)
            pq.producer_acquire(s1)
            cute.copy(aQ, tQg, tQs[None, 0], tma_bar_ptr=pq.producer_get_barrier(s1))
            s2 = pl.make_pipeline_state(U.Producer, ST)
            for i in cutlass.range(nb, unroll=1):
                pk.producer_acquire(s2)
                cute.copy(
                    aK, tKg[None, i], tKs[None, s2.index], tma_bar_ptr=pk.producer_get_barrier(s2)
                )
                cute.copy(
                    aV, tVg[None, i], tVs[None, s2.index], tma_bar_ptr=pk.producer_get_barrier(s2)
                )
                s2.advance()
        elif warp == 4:
            ta.wait_for_alloc()
            tp = ta.retrieve_ptr(Float32)
            tS = cute.make_tensor(tp, qk.make_fragment_C(shS).layout)
            tO = cute.make_tensor(tp + N, pv.make_fragment_C(shO).layout)
            tP = cute.make_tensor(cute.recast_ptr(tS.iterator, dtype=BFloat16), lP.outer)
            rP = pv.make_fragment_A(tP)
            cq = pl.make_pipeline_state(U.Consumer, 1)
            pq.consumer_wait(cq)
            ck = pl.make_pipeline_state(U.Consumer, ST)
            ss = pl.make_pipeline_state(U.Producer, 1)
            cp = pl.make_pipeline_state(U.Consumer, 1)
            so = pl.make_pipeline_state(U.Producer, 1)
            m1 = cute.make_mma_atom(qk.op)
            m2 = cute.make_mma_atom(pv.op)
            m2.set(tcgen05.Field.ACCUMULATE, False)
            po.producer_acquire(so)
            for _ in cutlass.range(nb, unroll=1):
                pk.consumer_wait(ck)
                ps.producer_acquire(ss)
                m1.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
                    cute.gemm(m1, tS, rQ[None, None, k, 0], rK[None, None, k, ck.index], tS)
                    m1.set(tcgen05.Field.ACCUMULATE, True)
                ps.producer_commit(ss)
                ss.advance()
                pp.consumer_wait(cp)
                primitives.tcgen05_fence("after_thread_sync")
                for k in cutlass.range_constexpr(cute.size(rP, mode=[2])):
                    cute.gemm(m2, tO, rP[None, None, k, 0], rV[None, None, k, ck.index], tO)
                    m2.set(tcgen05.Field.ACCUMULATE, True)
                pp.consumer_release(cp)
                cp.advance()
                pk.consumer_release(ck)
                ck.advance()
            po.producer_commit(so)
        else:
            ta.allocate(256)
            ta.wait_for_alloc()
            tp = ta.retrieve_ptr(Float32)
            tS = cute.make_tensor(tp, qk.make_fragment_C(shS).layout)
            tO = cute.make_tensor(tp + N, pv.make_fragment_C(shO).layout)
            tSf = tS[(None, None), 0, 0]
            ld = tcgen05.make_tmem_copy(
                cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32), tSf
            )
            thl = ld.get_slice(tidx)
            tPf = cute.make_tensor(
                tSf.iterator, cute.composition(tSf.layout, cute.make_layout((M, N // 2)))
            )
            sd = tcgen05.make_tmem_copy(
                cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition.x32), Float32), tPf
            )
            ths = sd.get_slice(tidx)
            cS = cute.make_identity_tensor((M, N))
            tSr_shape = thl.partition_D(cS).shape
            cP = cute.make_identity_tensor((M, N // 2))
            cs = pl.make_pipeline_state(U.Consumer, 1)
            sp = pl.make_pipeline_state(U.Producer, 1)
            for _ in cutlass.range(nb, unroll=1):
                ps.consumer_wait(cs)
                pp.producer_acquire(sp)
                primitives.tcgen05_fence("after_thread_sync")
                r = cute.make_rmem_tensor(tSr_shape, Float32)
                cute.copy(ld, thl.partition_S(tSf), r)
                cute.arch.fence_view_async_tmem_load()
                r.store(cute.math.exp2(r.load(), fastmath=True))
                rp = cute.make_rmem_tensor(ths.partition_S(cP).shape, Float32)
                rb = cute.make_tensor(cute.recast_ptr(rp.iterator, dtype=BFloat16), r.layout)
                rb.store(r.load().to(BFloat16))
                cute.copy(sd, rp, ths.partition_D(tPf))
                cute.arch.fence_view_async_tmem_store()
                primitives.tcgen05_fence("before_thread_sync")
                ps.consumer_release(cs)
                cs.advance()
                pp.producer_commit(sp)
                sp.advance()
            co = pl.make_pipeline_state(U.Consumer, 1)
            po.consumer_wait(co)
            primitives.tcgen05_fence("after_thread_sync")
            tOf = tO[(None, None), 0, 0]
            lo = tcgen05.make_tmem_copy(
                cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x16), Float32), tOf
            )
            thO = lo.get_slice(tidx)
            gO = cute.local_tile(mO, (M, D), (bx, 0))
            tg = thO.partition_D(gO)
            ro = cute.make_rmem_tensor(tg.shape, Float32)
            cute.copy(lo, thO.partition_S(tOf), ro)
            cute.arch.fence_view_async_tmem_load()
            primitives.tcgen05_fence("before_thread_sync")
            rob = cute.make_rmem_tensor_like(ro, BFloat16)
            rob.store(ro.load().to(BFloat16))
            cute.autovec_copy(rob, tg)
            ta.relinquish_alloc_permit()
            pl.sync(barrier_id=2) if False else cute.arch.barrier(
                barrier_id=2, number_of_threads=128
            )
            ta.free(tp)


def T(dt):
    s = cute.sym_int()
    ld = cute.sym_int64(divisibility=8)
    return make_fake_tensor(dt, (s, D), (ld, 1), assumed_align=16)
