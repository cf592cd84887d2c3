"""What the software GPU reports, and what it does not, of kernels that leave out a synchronisation.

The rules: PTX ISA, "wgmma", "asynchronous proxy", "mbarrier". A test that asserts silence about a
wrong kernel states a guarantee that is missing; when it fails, the simulator has got better, and
docs/testing.md is to say so. Those of tensor memory are in `test_simulator_limits_sm100.py`.
"""

from __future__ import annotations

from types import ModuleType

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.experimental import primitives
from cutlass.tensor_utils import LayoutEnum
from hand_overs import READER, of_overwriting
from verdicts import SILENCE, WRONG_RESULT, verdicts

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import COPY_ARRIVALS, Channel

NOTHING = "nothing"
PROXY_FENCE = "fence.proxy.async"
UNFENCED = "async-proxy read of shared memory that was written without a fence.proxy.async"


class ProductOfOnes:
    """1 + the products of two matrices of ones by WGMMA, out[i] = 17. dropped: a step."""

    def __init__(self, dropped: str):
        self.dropped = dropped

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, 8)
        )
        layout_a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (64, 8, 16), BFloat16, 1)
        layout_b = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, 8, 16), BFloat16, 1)
        self.kernel(mma, layout_a, layout_b, out).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(  # type: ignore[no-untyped-def]
        self,
        mma: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        out: cute.Tensor,
    ):
        thread = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        a = smem.allocate_tensor(BFloat16, layout_a.outer, 1024, swizzle=layout_a.inner)
        b = smem.allocate_tensor(BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
        for operand in (a, b):
            for i in cutlass.range(thread, cute.size(operand), 128):
                operand[i] = BFloat16(1.0)
        if const_expr(self.dropped != PROXY_FENCE):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, 8)), Float32)
        acc.fill(1.0)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        if const_expr(self.dropped != "wgmma.fence"):
            warpgroup.fence()
        operand_a = mma.make_fragment_A(mma.get_slice(0).partition_A(a))
        operand_b = mma.make_fragment_B(mma.get_slice(0).partition_B(b))
        cute.gemm(atom, acc, operand_a[None, None, 0, 0], operand_b[None, None, 0, 0], acc)
        warpgroup.commit_group()
        if const_expr(self.dropped != "wgmma.wait_group"):
            warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            out[i * 128 + thread] = acc[i]


class OfOneWarp:
    """A kernel of one warp that leaves out a step. dropped: that step."""

    def __init__(self, dropped: str):
        self.dropped = dropped

    @cute.jit
    def __call__(self, values: cute.Tensor, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        self.kernel(values, out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


class ByBulkCopies(OfOneWarp):
    """A vector comes into shared memory by a bulk copy, is doubled there and leaves by another."""

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):  # type: ignore[no-untyped-def]
        lane = cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Float32, cute.make_layout(32), 128)
        barrier = smem.allocate_array(Int64, 1)
        if lane == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        staged[lane] = Float32(-1.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 128)
        tma.copy_bulk(values, staged, barrier)
        if const_expr(self.dropped != "mbarrier.try_wait"):
            cute.arch.mbarrier_wait(barrier, 0)
        staged[lane] = staged[lane] * Float32(2.0)
        if const_expr(self.dropped != PROXY_FENCE):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            primitives.cp_async_bulk_global_shared_cta(out.iterator, staged.iterator, 128)
        cute.arch.cp_async_bulk_commit_group()
        if const_expr(self.dropped != "cp.async.bulk.wait_group"):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        staged[lane] = Float32(-1.0)


class ByCopies(OfOneWarp):
    """Each lane copies a row into shared memory by cp.async; another lane reads it."""

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):  # type: ignore[no-untyped-def]
        lane = cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Float32, cute.make_layout(128), 128)
        waits = self.dropped != "cp.async.mbarrier.arrive"
        arrivals = COPY_ARRIVALS if const_expr(waits) else 1
        channel = Channel.create(smem.allocate_array(Int64, 2), 1, arrivals, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            staged[4 * lane + i] = Float32(-1.0)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        source, target = (cute.local_tile(x, (4,), (lane,)) for x in (values, staged))
        cute.copy_atom_call(atom, source, target)
        if const_expr(waits):
            channel.publish_copies(Int32(0))
        else:
            channel.publish(Int32(0))
        channel.wait(Int32(0))
        for i in cutlass.range_constexpr(4):
            out[4 * lane + i] = staged[4 * (31 - lane) + i]


def of_rows(simulator: ModuleType, dropped: str) -> set[str]:
    values = torch.arange(128.0)
    return verdicts(simulator, ByCopies(dropped), (values,), values.view(32, 4).flip(0).flatten())


def of_product(simulator: ModuleType, dropped: str) -> set[str]:
    return verdicts(simulator, ProductOfOnes(dropped), (), torch.full((512,), 17.0))


def of_copies(simulator: ModuleType, dropped: str) -> set[str]:
    values = torch.arange(32.0)
    return verdicts(simulator, ByBulkCopies(dropped), (values,), 2 * values)


def test_nothing_dropped(simulator: ModuleType) -> None:
    assert of_product(simulator, NOTHING) == {SILENCE}
    assert of_copies(simulator, NOTHING) == {SILENCE}
    assert of_rows(simulator, NOTHING) == {SILENCE}
    assert of_overwriting(simulator, 4, waits_for_reader=True) == {SILENCE}


def test_fence_before_product_is_not_missed(simulator: ModuleType) -> None:
    """No guarantee: without `wgmma.fence` a product may read its accumulator too early."""
    assert of_product(simulator, "wgmma.fence") == {SILENCE}


def test_wait_for_product(simulator: ModuleType) -> None:
    """Shown by what comes out, with a delay; it is not seen when products complete at once."""
    reported = of_product(simulator, "wgmma.wait_group")
    assert reported >= {SILENCE, WRONG_RESULT, "a warp exits with wgmma in flight"}


def test_proxy_fence_before_product(simulator: ModuleType) -> None:
    assert of_product(simulator, PROXY_FENCE) == {
        f"wgmma operand {operand}: {UNFENCED}" for operand in "AB"
    }


def test_proxy_fence_before_bulk_store(simulator: ModuleType) -> None:
    assert of_copies(simulator, PROXY_FENCE) == {UNFENCED}


def test_wait_for_bulk_load(simulator: ModuleType) -> None:
    """Shown by what comes out, with a delay; it is not seen when copies complete at once."""
    assert of_copies(simulator, "mbarrier.try_wait") == {SILENCE, WRONG_RESULT}


def test_arrival_behind_copies(simulator: ModuleType) -> None:
    """Shown by what comes out, with a delay; it is not seen when copies complete at once."""
    assert of_rows(simulator, "cp.async.mbarrier.arrive") == {SILENCE, WRONG_RESULT}


def test_wait_for_bulk_store(simulator: ModuleType) -> None:
    """Shown by what comes out, with a delay, and by new data that no fence has followed."""
    reported = of_copies(simulator, "cp.async.bulk.wait_group")
    assert reported >= {WRONG_RESULT, UNFENCED}


def test_overwriting_at_once(simulator: ModuleType) -> None:
    assert WRONG_RESULT in of_overwriting(simulator, 0, waits_for_reader=False)


def test_overwriting_after_hand_overs(simulator: ModuleType) -> None:
    """Shown only where the reader is slow. Otherwise warps take turns, and whoever is ready has one
    before others have handed over to each other several times: of 1000 seeds, 173 showed it with
    one hand-over, 14 with two, none with three."""
    assert of_overwriting(simulator, 4, waits_for_reader=False) == {SILENCE}
    assert of_overwriting(simulator, 4, waits_for_reader=False, slow=READER) == {WRONG_RESULT}
    assert of_overwriting(simulator, 4, waits_for_reader=True, slow=READER) == {SILENCE}
