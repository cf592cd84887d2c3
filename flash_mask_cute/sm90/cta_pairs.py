"""Communication between the two CTAs of a cluster.

Two CTAs with neighbouring keys that sum dQ together visit the same query blocks. Each sums half of
the columns of dQ over the keys of both. For this a CTA loads the keys of its peer in these columns,
once for a work tile. With every query block it gets dS of its peer by one copy from shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.clusters import peer, send
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, thread_in_warpgroup

# 32-bit words that a thread sends at once
VECTOR = 4


@dataclass(frozen=True)
class PeerGrads:
    """Exchange of dS of a query block, 64 queries by 64 keys, between the CTAs.

    own, received: the places of this CTA's dS and of its peer's; num_bytes of each. channel: this
    CTA's mbarriers. A fill is full when the peer's dS has arrived. It is empty when the MMA warps
    of both CTAs have read this CTA's dS, in both places.
    """

    channel: Channel
    own: cute.Pointer
    received: cute.Pointer
    num_bytes: cutlass.Constexpr[int]

    @cute.jit
    def send(self, block: Int32) -> None:
        """Start the copy of dS to the peer, and expect the peer's dS. All threads have written dS,
        and the calling warp has acquired the block."""
        with cute.arch.elect_one():
            barrier = self.channel.barrier(block)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.num_bytes)
            send(self.own, self.received, barrier, self.num_bytes, peer())

    @cute.jit
    def release(self, block: Int32) -> None:
        """Signal that this warp has read both for the last time."""
        if cute.arch.lane_idx() == 0:
            vacancy = self.channel.vacancy(block)
            cute.arch.mbarrier_arrive(vacancy)
            cute.arch.mbarrier_arrive(vacancy, peer())


@dataclass(frozen=True)
class PeerWords:
    """What a warpgroup's registers hold of a block, passed to the same threads of the other CTA.

    channel: this CTA's mbarriers. A fill is full when the peer's words have arrived in their place
    in `received`. It is empty when the peer has read those that this CTA sent. num_words: of a
    thread.
    """

    channel: Channel
    received: cute.Pointer
    num_words: cutlass.Constexpr[int]

    def expect(self, block: Int32) -> None:
        """Expect the peer's words of a block, by one warp."""
        self.channel.expect(block, THREADS_PER_WARPGROUP * self.num_words * 4)

    def _vector(self, block: Int32, i: int) -> cute.Pointer:
        """The place of this thread's words from VECTOR * i on."""
        of_slot = self.channel.index(block) * self.num_words // VECTOR + i
        at = of_slot * THREADS_PER_WARPGROUP + thread_in_warpgroup()
        return (self.received + at * VECTOR).align(4 * VECTOR)

    def send(self, block: Int32, words: cute.Tensor) -> None:
        """Send this thread's words of a block, when those before them have been read."""
        self.channel.acquire(block)
        for i in range(self.num_words // VECTOR):
            values = tuple(words[VECTOR * i + j] for j in range(VECTOR))
            barrier = self.channel.barrier(block)
            cute.arch.store_async_dsmem(self._vector(block, i), values, barrier, peer())

    def take(self, block: Int32, words: cute.Tensor) -> None:
        """Wait for the words of the peer's thread, and read them."""
        self.channel.wait(block)
        for i in range(self.num_words // VECTOR):
            vector = cute.make_tensor(self._vector(block, i), cute.make_layout(VECTOR))
            cute.autovec_copy(vector, cute.local_tile(words, (VECTOR,), (i,)))

    @cute.jit
    def release(self, block: Int32) -> None:
        """Signal to the peer that this warp has used its words. The arrival waits for no loads."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.channel.vacancy(block), peer())
