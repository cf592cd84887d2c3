"""A cluster of two CTAs: their ranks, and the work tiles that one of them claims for both."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind
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
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def send(
    source: cute.Pointer, target: cute.Pointer, barrier: cute.Pointer, num_bytes: int, to: Int32
) -> None:
    """Start the copy of shared memory to the CTA of a rank, at the address that `target` has in
    this one, completing on the `barrier` there. By one thread."""
    primitives.cp_async_bulk_shared_cluster_shared_cta(
        cute.arch.map_dsmem_ptr(target, to),
        source,
        cute.arch.map_dsmem_ptr(barrier, to),
        num_bytes,
    )


@dataclass(frozen=True)
class Claims:
    """Work tile numbers that the leader claims for both CTAs, one at a time. word: the place where
    the other CTA reads them. channel: full is used on its side, empty on the leader's."""

    channel: Channel
    word: cute.Pointer

    @staticmethod
    def create(barriers: cute.Pointer, word: cute.Pointer) -> "Claims":
        return Claims(Channel.create(barriers, 1, 1, 1), word)

    def is_leader(self) -> Boolean:
        return rank() == LEADER

    @cute.jit
    def share(self, number: Int32, claimed: Int32) -> Int32:
        """Give the leader's claim `number` to both CTAs, by a whole warp of each."""
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
            # No claim is negative, but an arrival alone would not wait for the load.
            if (cute.arch.lane_idx() == 0) & (claimed >= 0):
                # Relaxed: the word is in this CTA's shared memory. An arrival that releases would
                # also wait for what is written to memory of the GPU.
                cute.arch.mbarrier_arrive(
                    self.channel.vacancy(number), LEADER, relaxed=True, scope=MemScopeKind.CLUSTER
                )
        return claimed
