"""Transfer of a CTA's sums of dQ to scratch memory, where all CTAs add theirs.

The summing warps write the parts of a block's dQ to staging memory in turn; one warp sends each
part to its row block. The order of additions is free or fixed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core import semaphore, tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.semaphore import NO_PREDECESSOR

# in place of a row block
NOTHING, UNSENT = -1, -2


class Scratch(NamedTuple):
    """stats (heads_q, row_blocks, stats_words) and dq (heads_q, row_blocks, -1), fp32; semaphores
    (heads_q, row_blocks), int32 (`core/semaphore.py`): in a fixed order, 1 + the key block that
    added last."""

    stats: cute.Tensor
    dq: cute.Tensor
    semaphores: cute.Tensor | None


class Summed(NamedTuple):
    """A row block for which this CTA has sums of dQ.

    row_block: NOTHING: there is none; UNSENT: sums over no keys, which are not sent. predecessor: 0
    if no CTA adds before this one; in a fixed order, else 1 + the key block that does.
    """

    head_idx: Int32
    row_block: Int32
    predecessor: Int32

    @staticmethod
    def nothing() -> "Summed":
        return Summed(Int32(0), Int32(NOTHING), Int32(0))


@dataclass(frozen=True)
class DqSums:
    """State of the warp that sends dQ.

    staged: shared memory of a part; fills of `channel` are numbered over all parts of all blocks.
    part_sizes: values of each part of a block; the parts follow each other in scratch memory.
    share: gives the start of the parts in a row block, and their sizes, if the CTA determines them.
    clears_dq: the scratch memory starts as zeros, so no CTA has to be first.
    """

    part_sizes: cutlass.Constexpr[tuple[int, ...]]
    deterministic: cutlass.Constexpr[bool]
    clears_dq: cutlass.Constexpr[bool]
    staged: cute.Pointer
    channel: Channel
    scratch: Scratch
    lengths: Lengths
    share: cutlass.Constexpr[Callable[[], tuple[Int32, Sequence[Int32 | int]]] | None] = None

    @cute.jit
    def with_predecessor(self, summed: Summed) -> Summed:
        """Set the predecessor: 0 without a fixed order, or if there is nothing to send."""
        predecessor = summed.predecessor
        if const_expr(self.clears_dq):
            predecessor = Int32(1)
        elif const_expr(not self.deterministic):  # noqa: SIM102 (decided while tracing)
            if summed.row_block >= 0:
                predecessor = cutlass.select_(
                    semaphore.is_first(self._semaphore_of(summed)), Int32(0), Int32(1)
                )
        if const_expr(self.lengths.seqused_k is not None):
            predecessor = cutlass.select_(summed.row_block >= 0, predecessor, Int32(NO_PREDECESSOR))
        return Summed(summed.head_idx, summed.row_block, predecessor)

    def _is_block(self, summed: Summed) -> Boolean:
        if self.lengths.seqused_k is None:
            return summed.row_block >= 0
        return summed.row_block != NOTHING

    @cute.jit
    def send(self, own_number: Int32, number: Int32, sent: Summed, summed: Summed):
        """Start adding the dQ of query block `number`, if it is one, to the scratch memory.

        Its last part then stays in the staging memory (`free_staging`). In a fixed order this waits
        for the predecessor, and releases the semaphore of `sent`, the previous block, whose
        addition is complete by now without a wait.
        """
        channel, sizes = self.channel, self.part_sizes
        if self._is_block(summed):
            if const_expr(self.deterministic):  # noqa: SIM102 (decided while tracing)
                # a block without a predecessor entry is zeros, and is not sent
                if summed.predecessor != NO_PREDECESSOR:
                    semaphore.wait(self._semaphore_of(summed), summed.predecessor)
            staged = self.staged
            target = self.scratch.dq[summed.head_idx, summed.row_block, None].iterator
            if const_expr(self.share is not None):
                first, sizes = self.share()
                target += first
            for i in cutlass.range_constexpr(len(sizes)):
                if const_expr(i > 0):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    channel.release(number * len(sizes) + i - 1)
                channel.wait(number * len(sizes) + i)
                size = sizes[i]
                if summed.predecessor > 0:
                    tma.add_bulk(staged, target, size)
                elif summed.predecessor != NO_PREDECESSOR:
                    tma.store_bulk(staged, target, size)
                target += size
            if const_expr(self.deterministic):
                cute.arch.cp_async_bulk_wait_group(len(sizes))
                self.release(own_number, sent)

    @cute.jit
    def free_staging(self, number: Int32, sent: Summed):
        """Wait until the last part of the dQ of block `number`, if it exists, has left. Without a
        fixed order, let others add if this CTA was the first."""
        if self._is_block(sent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.channel.release((number + 1) * len(self.part_sizes) - 1)
            if const_expr(not (self.deterministic or self.clears_dq)):  # noqa: SIM102 (as above)
                if sent.predecessor == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                    semaphore.release(self._semaphore_of(sent), Int32(semaphore.THERE))

    @cute.jit
    def release(self, own_number: Int32, sent: Summed):
        """Let the next CTA add to a row block, if this work tile has added to it."""
        if (sent.row_block >= 0) & (sent.predecessor != NO_PREDECESSOR):
            semaphore.release(self._semaphore_of(sent), own_number)

    def _semaphore_of(self, summed: Summed) -> cute.Pointer:
        place = (summed.head_idx, summed.row_block)
        return cute.domain_offset(place, self.scratch.semaphores).iterator
