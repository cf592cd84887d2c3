"""Full and empty mbarriers of a buffer with stages, shared by every pipeline of the kernels.

Fills are numbered from 0; stage and phase follow from the number (`Cursor`). A producer acquires a
stage, fills it, and then arrives, as a thread or by the bytes that TMA delivers. A consumer waits
for the fill and releases the stage. All methods are run by whole, converged warps.

A channel may cross a cluster. Each CTA has mbarriers to wait on. Threads of all CTAs arrive on the
mbarriers of one CTA (`home`), which waits on behalf of all. What TMA brings and what tcgen05 does
needs no release of memory to be in order (PTX ISA, canonical patterns of tcgen05 between threads),
and that would be a barrier for all memory of the GPU in the middle of a walk. So only `publish`
releases what a thread has written.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind

from flash_mask_cute.core.cursor import Cursor

# of a warp that publishes its copies: each lane when its own are there, and the warp for the rest
COPY_ARRIVALS = 33


@dataclass(frozen=True)
class Channel:
    """One full and one empty mbarrier per stage.

    home: cluster rank of the CTA on whose mbarriers threads arrive; None: their own CTA.
    of_both: readers release a stage in both CTAs of a cluster, each of which writes to both.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]
    home: cutlass.Constexpr[int | None] = None
    of_both: cutlass.Constexpr[bool] = False

    @staticmethod
    def create(
        barriers: cute.Pointer,
        stages: int,
        producers: int,
        consumers: int | Int32,
        home: int | None = None,
        of_both: bool = False,
    ) -> "Channel":
        """A channel over 2 * stages mbarriers, which warp 0 initialises.

        producers, consumers: warps that arrive for each fill and for each release, counted over all
        CTAs if there is a `home`.
        """
        channel = Channel(barriers, barriers + stages, stages, home, of_both)
        channel._init(producers, consumers * 2 if of_both else consumers)
        return channel

    @cute.jit
    def _init(self, producers: cutlass.Constexpr, consumers: int | Int32) -> None:
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(self.full + stage, producers)
                    cute.arch.mbarrier_init(self.empty + stage, consumers)

    @property
    def _scope(self) -> MemScopeKind:
        """Threads for which an arrival orders earlier accesses: by default those of one CTA."""
        return MemScopeKind.CTA if self.home is None else MemScopeKind.CLUSTER

    @property
    def _crosses(self) -> bool:
        return self.home is not None

    def index(self, number: Int32) -> Int32:
        return Cursor(number, self.stages).index

    def acquire(self, number: Int32) -> None:
        """Wait until the stage of fill `number` may be written."""
        at = Cursor(number, self.stages, is_producer=True)
        cute.arch.mbarrier_wait(self.empty + at.index, at.phase)

    def barrier(self, number: Int32) -> cute.Pointer:
        """The mbarrier that TMA copies of fill `number` complete on."""
        return self.full + self.index(number)

    def vacancy(self, number: Int32) -> cute.Pointer:
        """The mbarrier on which asynchronous readers of fill `number` complete."""
        return self.empty + self.index(number)

    @cute.jit
    def expect(self, number: Int32, num_bytes: int | Int32) -> None:
        """Arrive for fill `number`, which is full when `num_bytes` bytes have also arrived."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.barrier(number), num_bytes, self.home, self._crosses, self._scope
            )

    @cute.jit
    def publish(self, number: Int32, orders_memory: cutlass.Constexpr[bool] = True) -> None:
        """Signal that this warp has written its part of fill `number`. Across a cluster without
        orders_memory, the part is what TMA has brought, not the warp."""
        relaxed = self._crosses and not orders_memory
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(
                self.barrier(number), self.home, relaxed=relaxed, scope=self._scope
            )

    @cute.jit
    def publish_copies(self, number: Int32) -> None:
        """`publish`, when the asynchronous copies that this warp has started are there, for which
        nobody waits here. A warp counts as `COPY_ARRIVALS` producers."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.barrier(number))
        self.publish(number)

    def wait(self, number: Int32) -> None:
        """Wait until fill `number` is complete."""
        at = Cursor(number, self.stages)
        cute.arch.mbarrier_wait(self.full + at.index, at.phase)

    def is_full(self, number: Int32) -> Boolean:
        """Whether fill `number` is complete; the stage's previous fill must have completed."""
        at = Cursor(number, self.stages)
        return Boolean(cute.arch.mbarrier_test_wait(self.full + at.index, at.phase))

    @cute.jit
    def wait_unless(self, is_known: Boolean, number: Int32) -> None:
        """`wait`, unless an early `is_full` has shown that it is unnecessary."""
        if not is_known:
            self.wait(number)

    @cute.jit
    def release(self, number: Int32, word: Int32 | None = None) -> None:
        """Signal that all lanes of this warp have read fill `number` for the last time. Across a
        cluster this orders tcgen05 work alone, behind `umma.fence_before_arrival`. word: not -1, of
        this fill; it is loaded before the signal, which would not wait for it."""
        is_loaded = word != -1 if const_expr(self.of_both and word is not None) else True
        if (cute.arch.lane_idx() == 0) & is_loaded:
            if const_expr(self.of_both):
                # relaxed: what was read is in registers or multiplied, and TMA writes it anew
                for rank in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_arrive(
                        self.vacancy(number), rank, relaxed=True, scope=MemScopeKind.CLUSTER
                    )
            else:
                cute.arch.mbarrier_arrive(
                    self.vacancy(number), self.home, relaxed=self._crosses, scope=self._scope
                )

    def wait_until_released(self, number: Int32) -> None:
        """Wait until fill `number`, the last one, is released; -1 if there was none."""
        self.acquire(number + self.stages)

    def drain(self, number: Int32) -> None:
        """Wait until all fills before `number` are released."""
        for stage in range(self.stages):
            self.acquire(number + stage)
