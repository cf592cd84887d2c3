"""A small kernel, for every architecture, with a wait that only a slow reader needs."""

from __future__ import annotations

from types import ModuleType

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from verdicts import verdicts

WRITER, READER, HELPER = range(3)


class OverwrittenAfterHandOvers:
    """1 is handed over, the writer relieved, and 2 written, after the read if waits_for_reader."""

    def __init__(self, hand_overs: int, waits_for_reader: bool):
        self.hand_overs = hand_overs
        self.waits_for_reader = waits_for_reader

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        self.kernel(out).launch(grid=(1, 1, 1), block=(96, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):  # type: ignore[no-untyped-def]
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        value = smem.allocate_tensor(Float32, cute.make_layout(32), 16)
        full, empty, there, back = (smem.allocate_array(Int64, 1) for _ in range(4))
        if warp == WRITER:
            for barrier in (full, empty, there, back):
                if lane == 0:
                    cute.arch.mbarrier_init(barrier, 32)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == WRITER:
            value[lane] = Float32(1.0)
            cute.arch.mbarrier_arrive(full)
            for i in cutlass.range(self.hand_overs, unroll=1):
                cute.arch.mbarrier_arrive(there)
                cute.arch.mbarrier_wait(back, Int32(i) & 1)
            if const_expr(self.waits_for_reader):
                cute.arch.mbarrier_wait(empty, 0)
            value[lane] = Float32(2.0)
        elif warp == READER:
            cute.arch.mbarrier_wait(full, 0)
            out[lane] = value[lane]
            cute.arch.mbarrier_arrive(empty)
        else:
            for i in cutlass.range(self.hand_overs, unroll=1):
                cute.arch.mbarrier_wait(there, Int32(i) & 1)
                cute.arch.mbarrier_arrive(back)


def of_overwriting(
    simulator: ModuleType, hand_overs: int, waits_for_reader: bool, slow: int | None = None
) -> set[str]:
    """What is reported about that kernel; slow: the role that is slow, if one is."""
    launch = OverwrittenAfterHandOvers(hand_overs, waits_for_reader)
    return verdicts(simulator, launch, (), torch.ones(32), set() if slow is None else {slow})
