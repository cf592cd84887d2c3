"""WGMMA: one warpgroup's products, and the shape of its accumulator.

A warpgroup (4 warps) computes 64 x N tiles. The accumulator of a thread is ((2, 2, N/8), 1, 1) fp32
values: pairs of adjacent columns, two rows 8 apart, N/8 column groups of 8 (PTX ISA,
"wgmma.mma_async D fragment").
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core.cta import transposed
from flash_mask_cute.core.softmax import round_pair
from flash_mask_cute.rules import bit_tile

ROWS_PER_WARPGROUP = 64
ROWS_PER_THREAD = 2
# neighbouring rows that belong to different quads of threads of a warp
ROWS_OF_GROUP = 8
# of a thread, for 64 rows by 16 columns of an operand A in registers
WORDS_PER_STEP = 4
# Where operand A lies; the other place is shared memory.
REGISTERS = warpgroup.OperandSource.RMEM
# The mode of an operand that is contiguous: that of the sum, or its rows (A) or columns (B).
K, MN = OperandMajorMode.K, OperandMajorMode.MN


def tile_columns(dim: int) -> int:
    """Columns of a tile in shared memory, for heads of a dimension; the columns past it are zeros.

    TMA loads boxes as wide as the swizzle, the widest of 64, 32 and 16 columns that divides a tile.
    If rows do not begin at multiples of 32 bytes, narrow boxes cost up to twice the L2 sectors,
    more than products of a wider tile (docs/facts/hopper_forward.md#tiles-and-order).
    """
    if dim <= 16 or dim in (48, 80):
        return -(-dim // 16) * 16
    return 128 if 96 < dim <= 128 else -(-dim // 32) * 32


def make_mma(
    dtype: type[cutlass.Numeric],
    n: int,
    a_major: OperandMajorMode = K,
    b_major: OperandMajorMode = K,
    source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
) -> cute.TiledMma:
    """The product of a warpgroup: 64 rows by n columns, in fp32. source: of operand A."""
    kind = dtype, dtype, a_major, b_major, Float32
    return hopper.make_trivial_tiled_mma(*kind, (1, 1, 1), (ROWS_PER_WARPGROUP, n), source)


def rows_layout(
    dtype: type[cutlass.Numeric],
    rows: int,
    cols: int,
    stages: int,
    swizzled_cols: int | None = None,
) -> cute.ComposedLayout:
    """(rows, cols, stages) with cols contiguous. Blocks of 64, 32 or 16 columns are swizzled, which
    divide swizzled_cols, or else cols."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, swizzled_cols or cols)
    atom = hopper.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


def make_accumulator(n: int) -> cute.Tensor:
    return cute.make_rmem_tensor(((2, 2, n // 8), 1, 1), Float32)


def make_operand_words(num_steps: int) -> cute.Tensor:
    """Words of a register operand A, 64 rows by 16 columns per step (`words_as_operand_a`)."""
    return cute.make_rmem_tensor(num_steps * WORDS_PER_STEP, Int32)


def num_cols(acc: cute.Tensor) -> int:
    """Columns of the tile that an accumulator is a thread's part of."""
    return cute.size(acc) // ROWS_PER_THREAD * 4


def rows_by_cols(acc: cute.Tensor, num_rows: int = ROWS_PER_THREAD) -> cute.Tensor:
    """View of an accumulator as (num_rows, n/4 columns) of this thread, columns ascending."""
    groups = cute.size(acc) // 4
    layout = cute.make_layout((num_rows, (2, groups)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


def columns(acc: cute.Tensor, first: int, end: int) -> cute.Tensor:
    """The part of an accumulator for some of its columns, multiples of 8."""
    return cute.make_tensor(acc.iterator + first // 2, make_accumulator(end - first).layout)


def row_of(thread: Int32, r: int) -> Int32:
    """Row, inside the warpgroup's 64, of accumulator row r of a thread (0..127)."""
    return (thread // 32) * 16 + (thread % 32) // 4 + row_offset(r)


def row_of_few(thread: Int32) -> Int32:
    """Which one is the first row of a thread, counting only first rows."""
    return (thread // 32) * ROWS_OF_GROUP + (thread % 32) // 4


def row_offset(r: int) -> int:
    """Distance of a thread's row r from its first row, whose fourth bit is 0."""
    return 8 * r


def first_col_of(thread: Int32) -> Int32:
    """First column a thread owns; pairs of columns follow, 8 apart."""
    return (thread % 4) * 2


def col_offset(c: int) -> int:
    """Distance of a thread's column c from its first."""
    return c // 2 * 8 + c % 2


class QuadColumns:
    """`Columns` of bit tiles: word w has the columns of the threads with index mod 4 equal to w."""

    num_words = 4

    def col_of(self, word: int, bit: int | Int32) -> int | Int32:
        return bit // 2 * 8 + word * 2 + bit % 2

    def count_below(self, word: int, distance: Int32) -> Int32:
        # of each 8 columns, two
        inside = cutlass.min(cutlass.max((distance & 7) - word * 2, 0), 2)
        return (distance >> 3) * 2 + inside


COLUMNS = QuadColumns()


def operand_a(tiled_mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of shared memory (rows, k, stages) as operand A: (1, rows, k-steps, stages)."""
    return tiled_mma.make_fragment_A(tiled_mma.get_slice(0).partition_A(smem))


def operand_b(tiled_mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of shared memory (columns, k, stages) as operand B."""
    return tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(smem))


def columns_as_rows(smem: cute.Tensor, first: Int32 | int, width: int) -> cute.Tensor:
    """The (cols, rows, stages) view of some columns of a (rows, cols, stages) tensor."""
    view = cute.domain_offset((first, 0, 0), transposed(smem))
    rows, stages = (cute.size(view, mode=[mode]) for mode in (1, 2))
    return cute.composition(view, tuple(cute.make_layout(n) for n in (width, rows, stages)))


def rounded(acc: cute.Tensor, dtype: type) -> cute.Tensor:
    values = cute.make_rmem_tensor(acc.layout, dtype)
    values.store(acc.load().to(dtype))
    return values


@cute.jit
def round_pairs(pairs: cute.Tensor, acc: cute.Tensor, dtype: cutlass.Constexpr) -> None:
    """Round an accumulator into pairs of 16-bit values, two to a word of `pairs` (Int32).

    Words are used because the compiler may swap the halves of 16-bit pairs that live across loops,
    and swap them back before each use.
    """
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = round_pair(acc[2 * i], acc[2 * i + 1], dtype)


def rounded_values(words: cute.Tensor, dtype: type) -> cute.Tensor:
    """The 16-bit values in words of `round_pairs`, in accumulator order."""
    values = cute.recast_tensor(words, dtype)
    return cute.make_tensor(values.iterator, make_accumulator(cute.size(values) * 2).layout)


def words_as_operand_a(words: cute.Tensor, dtype: type) -> cute.Tensor:
    """Words of `round_pairs` as the register operand A of the next product: column groups of 8 of
    the accumulator pair up into k-blocks of 16."""
    values = cute.recast_tensor(words, dtype)
    k_blocks = cute.size(values) // 8
    layout = cute.make_layout(((2, 2, 2), 1, k_blocks), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(values.iterator, layout)


def keep_pair(pairs: cute.Tensor, dtype: type, r: int, c: int, p: Float32, q: Float32) -> None:
    """Round columns c and c + 1 of a row into the words of `pairs`, as `round_pairs` would."""
    pairs[r + c] = round_pair(p, q, dtype)


class AccumulatorElements:
    """`Elements` of accumulators; a thread's rows and columns are those of `rows_by_cols`."""

    num_rows = ROWS_PER_THREAD
    lanes_per_row = 4
    row_of = staticmethod(row_of)
    first_col_of = staticmethod(first_col_of)
    col_offset = staticmethod(col_offset)
    keep_pair = staticmethod(keep_pair)

    def is_set(self, bits: tuple, r: int, c: int) -> Boolean:
        return bit_tile.is_set(bits[r], c)


ELEMENTS = AccumulatorElements()


def copy_words(target: cute.Tensor, source: cute.Tensor, opaque_one: Int32) -> None:
    """Copy operand words in a way that is opaque to the compiler, alternating between two pipes.

    Without the copy an operand of the next product would be written while this one is in flight:
    docs/facts/compiler.md#a-register-operand-of-the-next-product-must-not-be-written-under-a-product
    """
    opaque_zero = opaque_one - 1
    for i in range(cute.size(target)):
        target[i] = source[i] * opaque_one if i % 2 else source[i] ^ opaque_zero


def place_half(target: cute.Tensor, source: cute.Tensor, half: Int32) -> None:
    """Copy operand words into one half of `target`, 0 or 1, and zeros into the other one."""
    count = cute.size(source)
    for i in range(count):
        target[i] = cutlass.select_(half == 0, source[i], Int32(0))
        target[count + i] = cutlass.select_(half == 0, Int32(0), source[i])


def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: bool | Boolean,
    num_steps: int | None = None,
    first_step: int = 0,
) -> None:
    """Start acc (+)= a b as one commit group; `accumulate` False overwrites acc. num_steps: k-steps
    of a and b, if the others are zeros. first_step: the k-step of b with which a begins."""
    issue_sum(tiled_mma, acc, [(a, b)], accumulate, num_steps, first_step)


@cute.jit
def issue_with_kept(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    kept: tuple[cute.TiledMma, cute.Tensor],
    a: cute.Tensor,
    b: cute.Tensor,
    num_steps: cutlass.Constexpr[int],
) -> None:
    """Start acc = a b as one commit group. kept: the MMA for an operand A in registers, and the
    registers with the first k-steps of a."""
    tiled_kept, operand = kept
    mma_kept, mma = cute.make_mma_atom(tiled_kept.op), cute.make_mma_atom(tiled_mma.op)
    mma_kept.set(warpgroup.Field.ACCUMULATE, False)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    num_kept = cute.size(operand, mode=[2])
    warpgroup.fence()
    for k in cutlass.range_constexpr(num_steps):
        if cutlass.const_expr(k < num_kept):
            cute.gemm(mma_kept, acc, operand[None, None, k], b[None, None, k], acc)
            mma_kept.set(warpgroup.Field.ACCUMULATE, True)
        else:
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def issue_sum(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    pairs: list[tuple[cute.Tensor, cute.Tensor]],
    accumulate: bool | Boolean,
    num_steps: cutlass.Constexpr[int | None] = None,
    first_step: cutlass.Constexpr[int] = 0,
) -> None:
    """Start acc (+)= the sum of a b over `pairs`, a commit group. num_steps: see `issue`."""
    # an atom of its own, so that the flag set here is not carried out of a dynamic region
    mma = cute.make_mma_atom(tiled_mma.op)
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for a, b in pairs:
        steps = cute.size(a, mode=[2])
        if cutlass.const_expr(num_steps is not None):
            steps = num_steps
        for k in cutlass.range_constexpr(steps):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, first_step + k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def issue_parts(
    tiled_mma: cute.TiledMma,
    a: cute.Tensor,
    parts: list[tuple[cute.Tensor, cute.Tensor]],
    accumulate: bool | Boolean,
) -> None:
    """Start acc (+)= a b for each (acc, b) of `parts`, as one commit group."""
    warpgroup.fence()
    for acc, b in parts:
        mma = cute.make_mma_atom(tiled_mma.op)
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
