"""Three rates of a Blackwell SM that the model of `lab.model` lacks.

Small kernels repeat one thing; the time of a launch over the repetitions is the figure. On the
software GPU they run, and their times mean nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from bench import Json
from bench.timing import burst
from flash_mask_cute.core import tma
from flash_mask_cute.sm100 import umma

# values of a bulk add: 16 KB
VALUES = 4096
THREADS = 32


class BulkAdds:
    """Every CTA adds 16 KB from shared memory to its own 16 KB in memory, again and again.

    waits: it waits until each add has read shared memory before the next one.
    """

    def __init__(self, ctas: int, waits: bool):
        self.ctas, self.waits = ctas, waits

    @cute.jit
    def __call__(self, sums: cute.Tensor, rounds: Int32, stream):  # type: ignore[no-untyped-def]
        self.kernel(sums, rounds).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, rounds: Int32):  # type: ignore[no-untyped-def]
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Float32, cute.make_layout(VALUES), 128)
        lane, cta = cute.arch.lane_idx(), cute.arch.block_idx()[0]
        for i in cutlass.range(VALUES // THREADS, unroll=1):
            staged[i * THREADS + lane] = Float32(1.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        own: Any = sums[cta, None]
        for _ in cutlass.range(rounds, unroll=1):
            tma.add_bulk(staged.iterator, own.iterator, VALUES)
            if cutlass.const_expr(self.waits):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.cp_async_bulk_wait_group(0)


class Signals:
    """One warp issues a product of 128 x 16 x 16 and waits until it is complete, again and
    again."""

    @cute.jit
    def __call__(self, sums: cute.Tensor, rounds: Int32, stream):  # type: ignore[no-untyped-def]
        self.kernel(sums, rounds).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, sums: cute.Tensor, rounds: Int32):  # type: ignore[no-untyped-def]
        group = umma.Group(1)
        major = OperandMajorMode.K
        mma = blackwell.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, major, Float32, group.kind, (umma.ROWS, 16)
        )
        smem = cutlass.memory.SmemAllocator()
        tile = (umma.ROWS, 16, 16)
        layout_a = blackwell.make_smem_layout_a(mma, tile, BFloat16, 1)
        layout_b = blackwell.make_smem_layout_b(mma, tile, BFloat16, 1)
        a = smem.allocate_tensor(BFloat16, layout_a.outer, 1024, layout_a.inner)
        b = smem.allocate_tensor(BFloat16, layout_b.outer, 1024, layout_b.inner)
        lane = cute.arch.lane_idx()
        for x in (a, b):
            for i in cutlass.range(cute.size(x) // THREADS, unroll=1):
                x[i * THREADS + lane] = BFloat16(1.0)
        barrier = smem.allocate_array(Int64, 1)
        address = smem.allocate_array(Int32, 1)
        if lane == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")
        group.allocate(address)
        cute.arch.sync_threads()
        acc = umma.accumulator(mma, (umma.ROWS, 16), 0)
        operand_a, operand_b = mma.make_fragment_A(a), mma.make_fragment_B(b)
        for i in cutlass.range(rounds, unroll=1):
            umma.issue(
                mma, acc, operand_a[None, None, None, 0], operand_b[None, None, None, 0], False
            )
            group.commit(barrier)
            cute.arch.mbarrier_wait(barrier, i & 1)
        umma.fence_after_wait()
        values = umma.load_columns(0, 1, lane)
        umma.wait_loads()
        sums[0, lane] = values[0, 0]
        umma.fence_before_arrival()
        cute.arch.sync_threads()
        group.free()


def measure_rates(is_simulated: bool, num_sms: int, clock_mhz: float) -> list[Json]:
    """Rows with nanoseconds and cycles of one repetition; zeros on the software GPU.

    Raises AssertionError where the sums are wrong.
    """
    device = "cpu" if is_simulated else "cuda"
    rounds = 3 if is_simulated else 2000
    found: list[Json] = []
    for name, kernel, ctas in (
        ("bulk adds of 16 KB into L2 by all SMs", BulkAdds(num_sms, waits=False), num_sms),
        ("16 KB read of a bulk add", BulkAdds(1, waits=True), 1),
        ("product of 128 x 16 x 16 and its signal", Signals(), 1),
    ):
        sums = torch.zeros(ctas, VALUES, device=device)
        fake = make_fake_compact_tensor(Float32, tuple(sums.shape), stride_order=(1, 0))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled: Any = cute.compile(kernel, fake, Int32(1), stream, options="--enable-tvm-ffi")
        compiled(sums, rounds)
        is_product = isinstance(kernel, Signals)
        assert torch.all(sums[:, :THREADS] == (16 if is_product else rounds)), name
        ms = 0.0
        if not is_simulated:
            ms = burst(partial(compiled, sums, rounds), 3, 1)
        ns = ms * 1e6 / rounds
        found.append({"rate": name, "ns": round(ns, 2), "cycles": round(ns * clock_mhz / 1e3, 1)})
    return found
