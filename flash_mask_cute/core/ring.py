"""Entries of a few words in shared memory; one warp writes them, others read them in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel

# a multiple of 4, so that entries are read 16 bytes at a time
WORDS = 12


@dataclass(frozen=True)
class Ring:
    """Entries (WORDS, stages) int32, numbered from 0, and their channel."""

    entries: cute.Tensor
    channel: Channel

    @staticmethod
    def create(
        entries: cute.Pointer, barriers: cute.Pointer, stages: int, num_readers: int | Int32
    ) -> "Ring":
        """num_readers: warps that read every entry."""
        layout = cute.make_layout((WORDS, stages))
        channel = Channel.create(barriers, stages, 1, num_readers)
        return Ring(cute.make_tensor(entries, layout), channel)

    @cute.jit
    def write(self, number: Int32, words: Sequence[Int32]) -> None:
        """Write entry `number`: at most WORDS words."""
        self.channel.acquire(number)
        index = self.channel.index(number)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(words)):
                self.entries[i, index] = Int32(words[i])
        self.channel.publish(number)

    def read(self, number: Int32, num_words: int) -> list[Int32]:
        """The first words of entry `number`, between waiting for it and releasing it."""
        index = self.channel.index(number)
        return [self.entries[i, index] for i in range(num_words)]

    @cute.jit
    def release(self, number: Int32) -> None:
        cute.arch.sync_warp()
        self.channel.release(number)
