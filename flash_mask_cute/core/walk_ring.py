"""The key blocks that a work tile visits, handed from the planning warp to those that fill stages.

A walk is sent as chunks of up to 32 neighbouring key blocks, a bit each, highest first: finding the
visible ones of a chunk is one vote of a warp, and iterating over them is counting leading zeros.
Chunks without a visible block are not sent, but a walk has at least one block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.ring import Ring

CHUNK = 32


class Kind(IntEnum):
    """What a walk goes on with: nothing, a block that no mask cuts, a block that one does."""

    END = 0
    WHOLE = 1
    CUT = 2


class Block(NamedTuple):
    """A visited key block: its number, what cuts it, its kind and that of the next."""

    n_block: Int32
    is_hidden: Boolean
    is_band: Boolean
    is_columns: Boolean
    asks: Boolean
    kind: Int32
    follower: Int32


class Chunk(NamedTuple):
    """Words of one bit per key block, of which bit 0 is block `base`.

    visible: blocks to visit. The others say what cuts them: hidden (nothing of the block is
    visible), band (an edge of it, or the end of the keys), columns (an edge of an interval), asks
    (mask_mod decides). follower: the `Kind` of the first block of the walk's next chunk.
    """

    base: Int32
    follower: Int32
    visible: Int32
    hidden: Int32
    band: Int32
    columns: Int32
    asks: Int32

    @property
    def cut(self) -> Int32:
        return self.hidden | self.band | self.columns | self.asks

    def kind_of(self, bit: Int32) -> Int32:
        return Int32(Kind.WHOLE) + ((self.cut >> bit) & 1)

    def block(self, bit: Int32, follower: Int32) -> Block:
        """The block of a bit."""
        cuts = (self.hidden, self.band, self.columns, self.asks)
        return Block(
            self.base + bit,
            *(((word >> bit) & 1) != 0 for word in cuts),
            self.kind_of(bit),
            follower,
        )


@dataclass(frozen=True)
class WalkRing:
    """A ring of `Chunk`."""

    ring: Ring

    def write(self, number: Int32, chunk: Chunk) -> None:
        """Write chunk `number`, counted from 0 over all walks."""
        self.ring.write(number, chunk)

    @cute.jit
    def visit(
        self,
        number: Int32,
        state: Any,
        step: cutlass.Constexpr[Callable[..., Any]],
        only_cut: cutlass.Constexpr[bool] = False,
    ) -> Any:
        """Fold `state = step(state, block)` over a walk that starts with chunk `number`.

        Returns the number of the next walk's first chunk, and the state. With `only_cut` the
        blocks that nothing cuts are passed over.
        """
        is_last = Boolean(False)
        while not is_last:
            self.ring.channel.wait(number)
            chunk = Chunk(*self.ring.read(number, len(Chunk._fields)))
            remaining = chunk.visible & (chunk.cut if const_expr(only_cut) else Int32(-1))
            is_last = chunk.follower == Kind.END
            while remaining != 0:
                bit = highest_bit(remaining)
                remaining = remaining ^ (Int32(1) << bit)
                follower = chunk.follower
                if remaining != 0:
                    follower = chunk.kind_of(highest_bit(remaining))
                state = step(state, chunk.block(bit, follower))
            self.ring.release(number)
            number += 1
        return number, state


def highest_bit(word: Int32) -> Int32:
    """Number of the highest bit that is set in a word that is not 0."""
    return CHUNK - 1 - Int32(cute.arch.clz(word))
