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
from cutlass import Boolean, Int32
from cutlass.experimental import primitives

from flash_mask_cute.core.channel import Channel

CTAS = 2
LEADER = 0


def rank() -> Int32:
    """Rank of this CTA in its cluster, warp-uniform so that descriptors are uniform too."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def peer() -> Int32:
    return rank() ^ 1


def sync() -> None:
    """Wait until all threads of both CTAs have arrived."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


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
            primitives.cp_async_bulk_shared_cluster_shared_cta(
                cute.arch.map_dsmem_ptr(self.received, peer()),
                self.own,
                cute.arch.map_dsmem_ptr(barrier, peer()),
                self.num_bytes,
            )

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


@dataclass(frozen=True)
class Claims:
    """Work tile numbers that the leader claims for both CTAs, one at a time.

    word: the place where the other CTA reads them. channel: full is used on its side, empty on the
    leader's.
    """

    channel: Channel
    word: cute.Pointer

    @staticmethod
    def create(barriers: cute.Pointer, word: cute.Pointer) -> "Claims":
        return Claims(Channel.create(barriers, 1, 1, 1), word)

    def is_leader(self) -> Boolean:
        return rank() == LEADER

    @cute.jit
    def share(self, number: Int32, claimed: Int32) -> Int32:
        """Give the leader's claim `number` to both CTAs; claimed: the leader's, in the leader. Run
        by a
        whole warp of each."""
        if self.is_leader():
            self.channel.acquire(number)
            if cute.arch.lane_idx() == 0:
                barrier = self.channel.barrier(number)
                cute.arch.store_async_dsmem(self.word, claimed, barrier, peer())
        else:
            self.channel.expect(number, 4)
            self.channel.wait(number)
            claimed = cute.make_tensor(self.word, cute.make_layout(1))[0]
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(self.channel.vacancy(number), LEADER)
        return claimed
