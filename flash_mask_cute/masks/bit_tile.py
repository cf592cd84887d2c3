"""Which scores of a tile count, as bits.

A bit tile has a few words of 32 bits per query row; which key column a bit stands for is the
architecture's choice (`Columns`), made so that a thread finds the columns of its own scores in one
word. Masks are painted into bit tiles by warps that do nothing else, and the warps that hold scores
only apply the bits: what a mask costs them does not depend on the mask.
"""

from collections.abc import Sequence
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

WORD = 32
# bits that are tested together: tests of a 16-bit word compile to register-to-predicate moves
HALF_WORD = 16
LOW_HALF = 0xFFFF
ALL = -1


class Columns(Protocol):
    """Where the columns of a score tile lie in the words of a row."""

    num_words: int

    def col_of(self, word: int, bit: int | Int32) -> int | Int32:
        """The column of a bit; ascending in the bit."""
        ...

    def count_below(self, word: int, distance: Int32) -> Int32:
        """How many bits of the word stand for columns < distance, which may be any number."""
        ...


def low_bits(count: Int32) -> Int32:
    """A word with its lowest `count` bits set, count clamped into 0..32."""
    shift = WORD - cutlass.min(cutlass.max(count, 1), WORD)
    ones = Int32(Uint32(0xFFFFFFFF) >> Uint32(shift))
    return cutlass.select_(count > 0, ones, Int32(0))


def bit_range(first: Int32, end: Int32) -> Int32:
    """A word with the bits first <= i < end set; none if end <= first."""
    return low_bits(end) & (low_bits(first) ^ ALL)


def transpose(words: Sequence[Int32], lane: Int32) -> list[Int32]:
    """Transpose 32 x 32 bits held by a warp: bit i of lane j becomes bit j of lane i.

    Each of `words` is a square of its own. Method: five butterfly steps that exchange ever smaller
    off-diagonal blocks (Warren, Hacker's Delight, section 7-3), a shuffle, a rotation and a blend
    each.
    """
    squares = [Uint32(word) for word in words]
    for step, low_half in (
        (16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555),
    ):  # fmt: skip
        is_upper = (lane & step) != 0
        turn = cutlass.select_(is_upper, Uint32(WORD - step), Uint32(step))
        keep = cutlass.select_(is_upper, Uint32(low_half ^ 0xFFFFFFFF), Uint32(low_half))
        take = keep ^ Uint32(0xFFFFFFFF)
        others = [Uint32(cute.arch.shuffle_sync_bfly(x, offset=step)) for x in squares]
        turned = [(x << turn) | (x >> (Uint32(WORD) - turn)) for x in others]
        squares = [(x & keep) | (y & take) for x, y in zip(squares, turned, strict=True)]
    return [Int32(x) for x in squares]


def set_if(condition: Boolean, word: Int32, bit: int) -> Int32:
    """The word with one bit more if the condition holds.

    As PTX, to make it one predicated instruction: of a select the compiler makes one for each term
    of the condition, and an addition (docs/measured_facts.md).
    """
    return cute.arch.inline_ptx(
        f"mov.b32 {{$w0}}, {{$r0}};\n@{{$r1}} or.b32 {{$w0}}, {{$w0}}, {1 << bit};",
        write_only_types=[Int32],
        read_only_args=[word, condition],
    )


def push(word: Int32, bits: Int32, count: int, num_bits: int = WORD) -> Int32:
    """A word of num_bits moved down by `count`, with `bits` as its highest ones."""
    return Int32((Uint32(word) >> Uint32(count)) | (Uint32(bits) << Uint32(num_bits - count)))


def join_halves(words: Sequence[Int32]) -> tuple[Int32, ...]:
    """Words of 16 bits, two to a word."""
    return tuple(
        (low & LOW_HALF) | (high << HALF_WORD)
        for low, high in zip(words[::2], words[1::2], strict=True)
    )


def split_halves(words: Sequence[Int32]) -> tuple[Int32, ...]:
    """The words that `join_halves` joined; bits above the 16 may be anything."""
    return tuple(half for word in words for half in (word, word >> HALF_WORD))


def is_set(word: Int32, bit: int) -> Boolean:
    return (word & (1 << bit if bit < WORD - 1 else -(1 << bit))) != 0


@cute.jit
def hide_unset(scores: cute.Tensor, words: tuple) -> None:
    """Hide (-inf) the columns of scores (rows, cols) whose bit in their row's word is not set."""
    num_cols = cute.size(scores, mode=[1])
    for r in cutlass.range_constexpr(len(words)):
        for first in cutlass.range_constexpr(0, num_cols, HALF_WORD):
            half = words[r] >> first
            for c in cutlass.range_constexpr(first, min(first + HALF_WORD, num_cols)):
                keep = (half & (1 << (c - first))) != 0
                scores[r, c] = cutlass.select_(keep, scores[r, c], -Float32.inf)
