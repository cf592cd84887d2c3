"""The scores of a tile that count, as bits.

A bit tile has a few words of 32 bits per query row. The architecture chooses the key column of each
bit (`Columns`), so that a thread finds the columns of its own scores in one word. Mask warps make
the bit tiles; the warps that hold scores only apply the bits.
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
    """The columns of a score tile that the bits of a row's words stand for."""

    num_words: int

    def col_of(self, word: int, bit: int | Int32) -> int | Int32:
        """The column of a bit; ascending in the bit."""
        ...

    def count_below(self, word: int, distance: Int32) -> Int32:
        """Number of bits in the word for columns < distance; distance may be any number."""
        ...


def bits_from(first: Int32) -> Int32:
    """A word with the bits i >= first set; first may be any number. Written as PTX, whose shifts
    clamp their amount; the compiler would add a second clamp to its own."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, -1, {$r0};",
        write_only_types=[Int32],
        read_only_args=[cutlass.max(first, 0)],
    )


def low_bits(count: Int32) -> Int32:
    """A word with its lowest `count` bits set, count clamped into 0..32."""
    return bits_from(count) ^ ALL


def bit_range(first: Int32, end: Int32) -> Int32:
    """A word with the bits first <= i < end set; none if end <= first."""
    return bits_from(first) & (bits_from(end) ^ ALL)


def bits_of(visible: tuple[Int32 | None, Int32 | None], *holes: tuple[Int32, Int32]) -> Int32:
    """A word with the bits of range (first, end) without holes; None: an open side."""
    first, end = visible
    word = Int32(ALL) if first is None else bits_from(first)
    if end is not None:
        word = word & low_bits(end)
    for hole in holes:
        word = word & (bit_range(*hole) ^ ALL)
    return word


def transpose(words: Sequence[Int32], lane: Int32) -> list[Int32]:
    """Transpose 32 x 32 bits held by a warp: bit i of lane j becomes bit j of lane i.

    Each of `words` is a separate square. Method: five butterfly steps that exchange off-diagonal
    blocks of decreasing size (Warren, Hacker's Delight, section 7-3).
    """
    squares = [Uint32(word) for word in words]
    for step, of_lower, of_upper in ((16, 0x5410, 0x3276), (8, 0x6240, 0x3715)):
        bytes_taken = cutlass.select_((lane & step) != 0, Uint32(of_upper), Uint32(of_lower))
        others = [Uint32(cute.arch.shuffle_sync_bfly(x, offset=step)) for x in squares]
        squares = [_permute_bytes(x, y, bytes_taken) for x, y in zip(squares, others, strict=True)]
    for step, low_half in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        is_upper = (lane & step) != 0
        rotation = cutlass.select_(is_upper, Uint32(WORD - step), Uint32(step))
        keep = cutlass.select_(is_upper, Uint32(low_half ^ 0xFFFFFFFF), Uint32(low_half))
        take = keep ^ Uint32(0xFFFFFFFF)
        others = [Uint32(cute.arch.shuffle_sync_bfly(x, offset=step)) for x in squares]
        rotated = [(x << rotation) | (x >> (Uint32(WORD) - rotation)) for x in others]
        squares = [(x & keep) | (y & take) for x, y in zip(squares, rotated, strict=True)]
    return [Int32(x) for x in squares]


def _permute_bytes(x: Uint32, y: Uint32, selector: Uint32) -> Uint32:
    """A word of the bytes selected by the digits of the selector: 0 to 3 of x, 4 to 7 of y."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[x, y, selector],
    )


@cute.jit
def transpose_if_mixed(words: tuple, lane: Int32) -> tuple:
    """`transpose`; if each lane's words are all ones or all zeros, a ballot is enough."""
    is_mixed = Boolean(False)
    for word in words:
        is_mixed = is_mixed | ((word != 0) & (word != ALL))
    rows = tuple(Int32(cute.arch.vote_ballot_sync(word != 0)) for word in words)
    if cute.arch.vote_any_sync(is_mixed):
        rows = tuple(transpose(words, lane))
    return rows


def set_if(condition: Boolean, word: Int32, bit: int) -> Int32:
    """The word with one more bit set if the condition holds.

    Written as PTX to get one predicated instruction. The compiler turns a select into one select
    for each term of the condition, and an addition
    (docs/facts/compiler.md#selects-predicates-and-bits). A condition that the compiler finds
    constant becomes an immediate operand: `mov.pred` takes one, a guard does not.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred is_set;\nmov.pred is_set, {$r1};\nmov.b32 {$w0}, {$r0};\n"
        f"@is_set or.b32 {{$w0}}, {{$w0}}, {1 << bit}; }}",
        write_only_types=[Int32],
        read_only_args=[word, condition],
    )


def push(word: Int32, bits: Int32, count: int, num_bits: int = WORD) -> Int32:
    """A word of num_bits shifted down by `count`, with `bits` in its highest places."""
    return Int32((Uint32(word) >> Uint32(count)) | (Uint32(bits) << Uint32(num_bits - count)))


def join_halves(words: Sequence[Int32]) -> tuple[Int32, ...]:
    return tuple(
        (low & LOW_HALF) | (high << HALF_WORD)
        for low, high in zip(words[::2], words[1::2], strict=True)
    )


def split_halves(words: Sequence[Int32]) -> tuple[Int32, ...]:
    """The words that `join_halves` joined; the bits above 16 may be anything."""
    return tuple(half for word in words for half in (word, word >> HALF_WORD))


def is_set(word: Int32, bit: int) -> Boolean:
    return (word & (1 << bit if bit < WORD - 1 else -(1 << bit))) != 0


@cute.jit
def hide_unset(scores: cute.Tensor, words: tuple, hidden: Float32 | float = -Float32.inf) -> None:
    """Set scores (rows, cols) to `hidden` in columns whose bit is not set in the word of their row.

    16 bits at a time, which become predicates together
    (docs/facts/compiler.md#selects-predicates-and-bits).
    """
    num_cols = cute.size(scores, mode=[1])
    for r in cutlass.range_constexpr(len(words)):
        for first in cutlass.range_constexpr(0, num_cols, HALF_WORD):
            half = words[r] >> first
            for c in cutlass.range_constexpr(first, min(first + HALF_WORD, num_cols)):
                keep = (half & (1 << (c - first))) != 0
                scores[r, c] = cutlass.select_(keep, scores[r, c], hidden)


def hide_unset_in_order(scores: cute.Tensor, word: Int32) -> None:
    """`hide_unset` of one row, with each test next to its select.

    Written as PTX: where neighbouring scores go into packed arithmetic, the compiler selects pairs,
    after all tests, and tests do not become predicates together any more.
    """
    for first in range(0, cute.size(scores), HALF_WORD):
        tests = [
            f"and.b32 bit, {{$r{HALF_WORD}}}, {1 << (first + i)};\n"
            "setp.ne.b32 is_set, bit, 0;\n"
            f"selp.f32 {{$w{i}}}, {{$r{i}}}, 0fFF800000, is_set;\n"
            for i in range(HALF_WORD)
        ]
        hidden = cute.arch.inline_ptx(
            "{ .reg .pred is_set; .reg .b32 bit;\n" + "".join(tests) + "}",
            write_only_types=[Float32] * HALF_WORD,
            read_only_args=[*(scores[0, first + i] for i in range(HALF_WORD)), word],
        )
        for i in range(HALF_WORD):
            scores[0, first + i] = hidden[i]
