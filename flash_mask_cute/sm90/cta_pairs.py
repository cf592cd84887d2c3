"""Communication in a cluster of two CTAs with neighbouring keys, which sum dQ together.

Both CTAs visit the same query blocks, each with its own keys. Each sums half of the columns of dQ
over the keys of both. For this a CTA holds the keys of its peer in these columns, loaded once for a
work tile. With every query block it also gets dS of its peer, as one copy from shared memory to
shared memory. Nothing else is shared: dK and dV belong to a CTA's own keys, and each CTA loads its
own queries.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.clusters import CTAS, peer, send


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

    @staticmethod
    def create(
        barriers: cute.Pointer,
        own: cute.Pointer,
        received: cute.Pointer,
        num_bytes: int,
        num_mma_warps: int,
    ) -> "PeerGrads":
        channel = Channel.create(barriers, 1, 1, CTAS * num_mma_warps)
        return PeerGrads(channel, own, received, num_bytes)

    def acquire(self, block: Int32) -> None:
        """Wait until the place of this CTA's dS is free for that of query `block`."""
        self.channel.acquire(block)

    @cute.jit
    def send(self, block: Int32) -> None:
        """Start the copy of dS to the peer, and expect the peer's dS. All threads have written dS,
        and the calling warp has acquired the block."""
        with cute.arch.elect_one():
            barrier = self.channel.barrier(block)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.num_bytes)
            send(self.own, self.received, barrier, self.num_bytes, peer())

    def wait(self, block: Int32) -> None:
        """Wait until the peer's dS of query `block` is here."""
        self.channel.wait(block)

    @cute.jit
    def release(self, block: Int32) -> None:
        """Signal that this warp has read both for the last time."""
        if cute.arch.lane_idx() == 0:
            vacancy = self.channel.vacancy(block)
            cute.arch.mbarrier_arrive(vacancy)
            cute.arch.mbarrier_arrive(vacancy, peer())
