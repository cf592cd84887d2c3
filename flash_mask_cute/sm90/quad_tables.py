"""Rows of a table beside a warpgroup's scores.

Four threads hold a row's scores, each two of 8 keys. For elements of two bytes, a thread loads the
8 keys of its quad, which then exchanges pairs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.mods.table_rows import WORD_BITS, load_words
from flash_mask_cute.sm90 import wgmma

QUAD = 4
# the pairs of a quad
KEYS_OF_PAIR = 2 * QUAD


@dataclass(frozen=True)
class QuadTableColumns:
    """`TableColumns` of the rows of an accumulator, for blocks of a multiple of 16 keys."""

    def width(self, num_cols: int) -> int:
        return QUAD * num_cols

    def first(self) -> Int32:
        return wgmma.first_col_of(thread_in_warpgroup())

    def offset(self, c: int) -> int:
        return wgmma.col_offset(c)

    def load(self, row: cute.Pointer, words: cute.Tensor, bits: int) -> None:
        assert cute.size(words) * WORD_BITS // bits % QUAD == 0, "blocks have a multiple of 16 keys"
        lane = thread_in_warpgroup() % QUAD
        pairs = list(range(cute.size(words) * 16 // bits))
        while bits == 16 and len(pairs) >= QUAD:
            # 32 keys: a word is a pair
            of_lane = load_words(row + KEYS_OF_PAIR * (pairs[0] + lane), KEYS_OF_PAIR * bits)
            for pair, word in zip(pairs[:QUAD], transposed(of_lane, lane), strict=True):
                words[pair] = word
            del pairs[:QUAD]
        for pair in pairs:
            found = load_words(row + (KEYS_OF_PAIR * pair + 2 * lane), 2 * bits)
            at, shift = divmod(2 * pair * bits, WORD_BITS)
            for i, word in enumerate(found):
                words[at + i] = word if shift == 0 else words[at + i] | (word << shift)


def transposed(words: list[Int32], lane: Int32) -> list[Int32]:
    """Transpose 4 x 4 words of a quad: word i of lane j becomes word j of lane i."""
    found = list(words)
    for step in (1, 2):
        is_upper = (lane & step) != 0
        for i in (x for x in range(QUAD) if not x & step):
            low, high = found[i], found[i + step]
            sent = cutlass.select_(is_upper, low, high)
            received = Int32(cute.arch.shuffle_sync_bfly(sent, offset=step))
            found[i] = cutlass.select_(is_upper, received, low)
            found[i + step] = cutlass.select_(is_upper, high, received)
    return found
