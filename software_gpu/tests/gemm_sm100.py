"""GEMM kernels of one tile for sm_100a in many operand variants, run on the software GPU.

Prints (M, N, K, major of A, major of B, note, warnings, is right) of each.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.experimental import primitives
from cutlass.tensor_utils import LayoutEnum


class Gemm:
    """C (M, N) f32 = A (M, K) B (N, K)^T, one MMA tile, two CTAs when two=True."""

    def __init__(self, M, N, K, am, bm, two=False, ld=None):
        self.M, self.N, self.K, self.am, self.bm, self.two, self.ld = M, N, K, am, bm, two, ld

    def vmnk(self, mma):
        return cute.tiled_divide(
            cute.make_layout((2 if self.two else 1, 1, 1)), (mma.thr_id.shape,)
        )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
        dt = mA.element_type
        M, N, K = self.M, self.N, self.K
        group = tcgen05.CtaGroup.TWO if const_expr(self.two) else tcgen05.CtaGroup.ONE
        mma = sm100.make_trivial_tiled_mma(dt, dt, self.am, self.bm, Float32, group, (M, N))
        lA, lB = (
            sm100.make_smem_layout_a(mma, (M, N, K), dt, 1),
            sm100.make_smem_layout_b(mma, (M, N, K), dt, 1),
        )
        cl = self.vmnk(mma)
        op = cpasync.CopyBulkTensorTileG2SOp(group)
        aA, tA = cute.nvgpu.make_tiled_tma_atom_A(
            op, mA, cute.select(lA, mode=[0, 1, 2]), (M, N, K), mma, cl.shape
        )
        aB, tB = cute.nvgpu.make_tiled_tma_atom_B(
            op, mB, cute.select(lB, mode=[0, 1, 2]), (M, N, K), mma, cl.shape
        )
        n = 2 if self.two else 1
        self.bytes = (M * K + N * K) * 2

        @cute.struct
        class SS:
            a: cute.struct.Align[cute.struct.MemRange[dt, cute.cosize(lA)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[dt, cute.cosize(lB)], 1024]
            tmem: Int32

        self.SS = SS
        self.kern(mma, aA, tA, aB, tB, mC, lA, lB).launch(
            grid=(n, 1, 1), block=(192, 1, 1), cluster=(n, 1, 1), stream=stream
        )

    @cute.kernel
    def kern(
        self,
        mma: cute.TiledMma,
        aA: cute.CopyAtom,
        tA: cute.Tensor,
        aB: cute.CopyAtom,
        tB: cute.Tensor,
        mC: cute.Tensor,
        lA: cute.ComposedLayout,
        lB: cute.ComposedLayout,
    ):
        M, N, K = self.M, self.N, self.K
        cl = self.vmnk(mma)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx, _, _ = cute.arch.thread_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        leader = rank % 2 == 0
        st = cutlass.memory.SmemAllocator().allocate(self.SS)

        def G(n=1):
            return pl.CooperativeGroup(pl.Agent.Thread, n)

        U = pl.PipelineUserType
        pa = pl.PipelineTmaUmma.create(
            num_stages=1,
            producer_group=G(),
            consumer_group=G(),
            tx_count=self.bytes,
            cta_layout_vmnk=cl,
            defer_sync=True,
        )
        pc = pl.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=G(),
            consumer_group=G(128 * (2 if self.two else 1)),
            cta_layout_vmnk=cl,
            defer_sync=True,
        )
        cute.arch.mbarrier_init_fence()
        if const_expr(self.two):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        tb = pl.NamedBarrier(barrier_id=1, num_threads=160)
        dealloc = st.tmem.ptr
        ta = (
            cutlass.memory.TmemAllocator(
                dealloc, barrier_for_retrieve=tb, allocator_warp_id=0, is_two_cta=False
            )
            if const_expr(not self.two)
            else cutlass.memory.TmemAllocator(
                dealloc,
                barrier_for_retrieve=tb,
                allocator_warp_id=0,
                is_two_cta=True,
                two_cta_tmem_dealloc_mbar_ptr=self.mbar(),
            )
        )
        sA, sB = (
            st.a.get_tensor(lA.outer, swizzle=lA.inner),
            st.b.get_tensor(lB.outer, swizzle=lB.inner),
        )
        thr = mma.get_slice(rank)
        gA, gB = (
            thr.partition_A(cute.local_tile(tA, (M, K), (0, 0))),
            thr.partition_B(cute.local_tile(tB, (N, K), (0, 0))),
        )
        L1 = cute.make_layout(1)
        tAs, tAg = cpasync.tma_partition(
            aA, 0, L1, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3)
        )
        tBs, tBg = cpasync.tma_partition(
            aB, 0, L1, cute.group_modes(sB, 0, 3), cute.group_modes(gB, 0, 3)
        )
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        lC = mma.make_fragment_C(mma.partition_shape_C((M, N))).layout
        if warp == 5:
            s1 = pl.make_pipeline_state(U.Producer, 1)
            pa.producer_acquire(s1)
            cute.copy(aA, tAg, tAs[None, 0], tma_bar_ptr=pa.producer_get_barrier(s1))
            cute.copy(aB, tBg, tBs[None, 0], tma_bar_ptr=pa.producer_get_barrier(s1))
        elif warp == 4:
            ta.wait_for_alloc()
            tC = cute.make_tensor(ta.retrieve_ptr(Float32), lC)
            if leader:
                s2 = pl.make_pipeline_state(U.Consumer, 1)
                s3 = pl.make_pipeline_state(U.Producer, 1)
                pa.consumer_wait(s2)
                m = cute.make_mma_atom(mma.op)
                m.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                    cute.gemm(m, tC, rA[None, None, k, 0], rB[None, None, k, 0], tC)
                    m.set(tcgen05.Field.ACCUMULATE, True)
                pc.producer_commit(s3)
        else:
            ta.allocate(512)
            ta.wait_for_alloc()
            tC = cute.make_tensor(ta.retrieve_ptr(Float32), lC)
            s4 = pl.make_pipeline_state(U.Consumer, 1)
            pc.consumer_wait(s4)
            primitives.tcgen05_fence("after_thread_sync")
            n = 2 if self.two else 1
            tile = (M // n, N)
            tCf = tC[(None, None), 0, 0]
            if const_expr(self.ld is None):
                atom = sm100.get_tmem_load_op(
                    (M // n, N, K), LayoutEnum.ROW_MAJOR, Float32, Float32, tile, self.two
                )
            else:
                atom = cute.make_copy_atom(self.ld, Float32)
            tc = tcgen05.make_tmem_copy(atom, tCf)
            th = tc.get_slice(tidx)
            gC = cute.local_tile(mC, tile, (rank, 0))
            g = th.partition_D(gC)
            r = cute.make_rmem_tensor(g.shape, Float32)
            cute.copy(tc, th.partition_S(tCf), r)
            cute.arch.fence_view_async_tmem_load()
            primitives.tcgen05_fence("before_thread_sync")
            cute.autovec_copy(r, g)
            ta.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            if const_expr(self.two):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
            ta.free(ta.retrieve_ptr(Float32))
        if const_expr(self.two):
            is_not_epilogue = warp >= 4
            if is_not_epilogue:
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()

    @cute.jit
    def mbar(self):
        p = cutlass.memory.SmemAllocator().allocate_array(cutlass.Int64, 1)
        return p


def run(M, N, K, am, bm, dt=torch.bfloat16, two=False, ld=None):
    cdt = cutlass.BFloat16 if dt == torch.bfloat16 else cutlass.Float16

    def mk(kmajor):
        lead = cute.sym_int64(divisibility=8)
        shape = (cute.sym_int(), cute.sym_int())
        return make_fake_tensor(cdt, shape, (lead, 1) if kmajor else (1, lead), assumed_align=16)

    A, B = am == OperandMajorMode.K, bm == OperandMajorMode.K
    c = cute.compile(
        Gemm(M, N, K, am, bm, two, ld),
        mk(A),
        mk(B),
        make_fake_tensor(
            Float32,
            (cute.sym_int(), cute.sym_int()),
            (cute.sym_int64(divisibility=4), 1),
            assumed_align=16,
        ),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    g = torch.Generator().manual_seed(M + N + K)
    a, b = [torch.randint(-4, 5, (r, K), generator=g).to(dt) for r in (M, N)]
    out = torch.full((M, N), float("nan"))
    c(a if A else a.t().contiguous().t(), b if B else b.t().contiguous().t(), out)
    return torch.equal(out, a.float() @ b.float().T), len(c.last["warnings"])


def main():
    K_, MN = OperandMajorMode.K, OperandMajorMode.MN
    R = tcgen05.Repetition
    cases = []
    for am in (K_, MN):
        for bm in (K_, MN):
            for M, N, K in (
                (128, 128, 64),
                (128, 192, 128),
                (64, 64, 64),
                (128, 64, 32),
                (64, 96, 16),
            ):
                cases.append((M, N, K, am, bm, torch.bfloat16, False, None, ""))
    cases.append((128, 128, 64, K_, K_, torch.float16, False, None, "f16"))
    cases.append(
        (128, 32, 64, K_, K_, torch.bfloat16, False, tcgen05.Ld32x32bOp(R.x8), "32x32b.x8")
    )
    for M, N, K in ((256, 128, 64), (256, 64, 128), (128, 128, 64), (128, 64, 64)):
        for am, bm in ((K_, K_), (K_, MN), (MN, K_)):
            cases.append((M, N, K, am, bm, torch.bfloat16, True, None, "two"))
    for *a, note in cases:
        try:
            ok, warn = run(*a)
        except Exception as e:
            ok, warn = False, f"{type(e).__name__}: {str(e)[:300]}"
        yield (a[0], a[1], a[2], str(a[3])[-2:], str(a[4])[-2:], note, warn, bool(ok))


if __name__ == "__main__":
    for row in main():
        print(row, flush=True)
