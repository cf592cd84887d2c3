"""The blocks that a work tile visits, sent from the scheduler warp to the other warps.

The forward visits blocks of keys. The backward visits blocks of queries, one query head after
another. A walk is sent as chunks of up to 32 neighbouring blocks, with one bit for each block.
Walks over keys go down from chunk to chunk, walks over queries go up (`BackwardMask`). Chunks
without a visible block are not sent, but a walk has at least one block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.ring import Ring

CHUNK = 32
# flags of a block, as its stage carries them: the kind of the next one, and its own
KIND_MASK, OWN_KIND_SHIFT = 3, 2
# where `Block.owners` begin, if there are any; numbers of blocks in between have 24 bits then
OWNERS_SHIFT = 28
# fields of a chunk with the blocks of one warpgroup each, if these have block lists of their own
OWN_FIELDS = ("own_0", "own_1", "own_2")


class Kind(IntEnum):
    """How a walk continues: with nothing, a full block, or a partial one."""

    END = 0
    FULL = 1
    PARTIAL = 2


class Block(NamedTuple):
    """A visited block: number, query head, the causes that make it partial, its kind and the next
    one's.

    predecessor, token, next_index: see `WalkRing`; 0 where there is none. sequence: that of its
    queries, if a walk visits several. owners: bit w says whether warpgroup w has the block in its
    lists, if each has its own.
    """

    index: Int32
    head_idx: Int32
    is_hidden: Boolean
    is_band: Boolean
    is_columns: Boolean
    needs_mask_mod: Boolean
    kind: Int32
    follower: Int32
    predecessor: Int32
    sequence: Int32 | None = None
    token: Int32 | None = None
    owners: Int32 | None = None
    next_index: Int32 | None = None


class Chunk(NamedTuple):
    """Words with one bit for each block, and the head of their scores. Bit 0 is block `base`.

    follower: the `Kind` of the first block of the walk's next chunk. visible: blocks to visit. The
    next four give the cause of a partial block: hidden (nothing of it is visible), band (an edge of
    the band or the end of the keys), columns (an edge of an interval), needs_mask_mod (mask_mod
    decides). uncut: fully visible blocks; it does not depend on skip_blocks, because it fixes the
    visiting order. sequence: as in `Block`. own_*: the blocks in the lists of one warpgroup each.
    """

    base: Int32
    head_idx: Int32
    follower: Int32
    visible: Int32
    hidden: Int32
    band: Int32
    columns: Int32
    needs_mask_mod: Int32
    uncut: Int32
    sequence: Int32 | None = None
    own_0: Int32 | None = None
    own_1: Int32 | None = None
    own_2: Int32 | None = None

    @staticmethod
    def hidden_block(index: Int32, head_idx: Int32) -> "Chunk":
        """A whole walk that visits one empty block."""
        words = (index, head_idx, Kind.END, 1, 1, 0, 0, 0, 0)
        return Chunk(*(Int32(word) for word in words))

    @staticmethod
    def from_votes(
        base: Int32, head_idx: Int32, visible: Int32, is_band: Boolean, is_columns: Boolean,
        needs_mask_mod: Int32,
    ) -> "Chunk":  # fmt: skip
        """The last chunk of a walk, from each lane's votes about its block."""
        band, columns = (cute.arch.vote_ballot_sync(x) for x in (is_band, is_columns))
        cuts = Int32(0), band, columns, needs_mask_mod
        uncut = visible & ((band | columns | needs_mask_mod) ^ -1)
        return Chunk(base, head_idx, Int32(Kind.END), visible, *cuts, uncut)

    def without_skipping(self, exists: Boolean, has_columns: bool) -> "Chunk":
        """The chunk with all existing blocks as partial ones; each lane votes for its block."""
        every = Int32(-1)
        return self._replace(
            visible=cute.arch.vote_ballot_sync(exists),
            hidden=self.visible ^ every,
            band=every,
            columns=every if has_columns else Int32(0),
        )

    def with_owners(self, words: Sequence[Int32]) -> "Chunk":
        """words: the blocks in the lists of each warpgroup."""
        return self._replace(**dict(zip(OWN_FIELDS, words, strict=False)))

    @property
    def cut(self) -> Int32:
        return self.hidden | self.band | self.columns | self.needs_mask_mod

    def kind_of(self, bit: Int32) -> Int32:
        return Int32(Kind.FULL) + ((self.cut >> bit) & 1)

    def block(self, bit: Int32, follower: Int32, predecessor: Int32) -> Block:
        cuts = (self.hidden, self.band, self.columns, self.needs_mask_mod)
        return Block(
            self.base + bit,
            self.head_idx,
            *(((word >> bit) & 1) != 0 for word in cuts),
            self.kind_of(bit),
            follower,
            predecessor,
            self.sequence,
            owners=self._owners(bit),
        )

    def _owners(self, bit: Int32) -> Int32 | None:
        words = [x for x in (self.own_0, self.own_1, self.own_2) if x is not None]
        if not words:
            return None
        owners = Int32(0)
        for w, word in enumerate(words):
            owners = owners | (((word >> bit) & 1) << w)
        return owners


# the fields of every launch
CHUNK_FIELDS = tuple(name for name in Chunk._fields if name not in Chunk._field_defaults)


@dataclass(frozen=True)
class WalkRing:
    """A ring of `Chunk`.

    ascending: a chunk's blocks are visited from the lowest one up, not from the highest one down.
    uncut_first: full blocks come first. The first product of a walk is issued before its bits are
    known, and would partly be wasted on a partial block.
    predecessors (CHUNK, stages) int32 or None: one more word for each block of a chunk. fields: the
    fields that an entry carries. tokens (tokens of a block, CHUNK, stages) int32 or None: the
    queries of each block, in lane i of a block those of i modulo their number, a power of two; -1
    where there is none. The first one exists. tells_next: blocks carry the number of the next one,
    which is seldom a neighbour. A chunk's `follower` then has it behind the kind.
    """

    ring: Ring
    ascending: cutlass.Constexpr[bool]
    uncut_first: cutlass.Constexpr[bool]
    predecessors: cute.Tensor | None = None
    fields: cutlass.Constexpr[tuple[str, ...]] = CHUNK_FIELDS
    tokens: cute.Tensor | None = None
    tells_next: cutlass.Constexpr[bool] = False

    def acquire(self, number: Int32) -> None:
        self.ring.channel.acquire(number)

    def write_token(self, number: Int32, i: int, token: Int32) -> None:
        """Write query i of this lane's block of chunk `number`, which is acquired and unwritten."""
        self.tokens[i, cute.arch.lane_idx(), self.ring.channel.index(number)] = token

    @cute.jit
    def write(self, number: Int32, chunk: Chunk, predecessor: Int32 | None = None) -> None:
        """Write chunk `number`, from 0 over all walks. predecessor: of each lane's block."""
        if const_expr(self.predecessors is not None):
            self.ring.channel.acquire(number)
            self.predecessors[cute.arch.lane_idx(), self.ring.channel.index(number)] = predecessor
        self.ring.write(number, [getattr(chunk, name) for name in self.fields])

    def _read(self, number: Int32) -> Chunk:
        words = self.ring.read(number, len(self.fields))
        return Chunk(**dict(zip(self.fields, words, strict=True)))

    def wait_until_read(self, number: Int32) -> None:
        """Wait until all chunks before `number` have been read, by the warp that writes them."""
        self.ring.channel.acquire(number - 1 + self.ring.channel.stages)

    def next_bit(self, chunk: Chunk, remaining: Int32) -> Int32:
        """The first bit that a walk visits among a chunk's remaining blocks, at least one."""
        if self.uncut_first:
            uncut = remaining & chunk.uncut
            remaining = Int32(cutlass.select_(uncut != 0, uncut, remaining))
        return highest_bit(remaining & -remaining if self.ascending else remaining)

    def number_of_first(self, chunk: Chunk) -> Int32:
        """`Chunk.follower` without its kind: the first block that a walk visits of the next."""
        return (chunk.base + self.next_bit(chunk, chunk.visible)) << OWN_KIND_SHIFT

    def _kind_of(self, follower: Int32) -> Int32:
        return follower & KIND_MASK if self.tells_next else follower

    @cute.jit
    def _next_index(self, chunk: Chunk, remaining: Int32) -> Int32:
        """The block that a walk visits after those of a chunk but the remaining ones."""
        index = chunk.follower >> OWN_KIND_SHIFT
        if remaining != 0:
            index = chunk.base + self.next_bit(chunk, remaining)
        return index

    @cute.jit
    def visit(
        self,
        number: Int32,
        state: Any,
        step: cutlass.Constexpr[Callable[..., Any]],
        only_cut: cutlass.Constexpr[bool] = False,
    ) -> Any:
        """Fold `state = step(state, block)` over a walk that starts with chunk `number`.

        Returns the number of the next walk's first chunk, and the state. With `only_cut` full
        blocks are skipped.
        """
        is_last = Boolean(False)
        while not is_last:
            self.ring.channel.wait(number)
            chunk = self._read(number)
            remaining = chunk.visible & (chunk.cut if const_expr(only_cut) else Int32(-1))
            while remaining != 0:
                bit = self.next_bit(chunk, remaining)
                remaining = remaining ^ (Int32(1) << bit)
                follower = self._kind_of(chunk.follower)
                if remaining != 0:
                    follower = chunk.kind_of(self.next_bit(chunk, remaining))
                predecessor = Int32(0)
                if const_expr(self.predecessors is not None):
                    predecessor = self.predecessors[bit, self.ring.channel.index(number)]
                token = None
                if const_expr(self.tokens is not None):
                    own = cute.arch.lane_idx() % cute.size(self.tokens, mode=[0])
                    token = self.tokens[own, bit, self.ring.channel.index(number)]
                if const_expr(not only_cut):  # noqa: SIM102 (decided while tracing)
                    if remaining == 0:
                        # before the last block is taken: what comes next is scheduled meanwhile
                        is_last = chunk.follower == Kind.END
                        self.ring.release(number)
                block = chunk.block(bit, follower, predecessor)
                next_index = None
                if const_expr(self.tells_next):
                    next_index = self._next_index(chunk, remaining)
                state = step(state, block._replace(token=token, next_index=next_index))
            if const_expr(only_cut):
                # read again rather than kept, for want of registers
                is_last = self._read(number).follower == Kind.END
                self.ring.release(number)
            number += 1
        return number, state


def highest_bit(word: Int32) -> Int32:
    """Index of the highest set bit of a nonzero word."""
    return CHUNK - 1 - Int32(cute.arch.clz(word))
