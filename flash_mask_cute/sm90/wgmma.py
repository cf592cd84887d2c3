"""WGMMA: one warpgroup's products, and the shape of its accumulator.

A warpgroup (4 warps) computes 64 x N tiles. The accumulator of a thread is ((2, 2, N/8), 1, 1) fp32
values: pairs of adjacent columns, two rows 8 apart, N/8 column groups of 8 (PTX ISA,
"wgmma.mma_async D fragment").
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

ROWS_PER_WARPGROUP = 64
ROWS_PER_THREAD = 2


def make_accumulator(n: int) -> cute.Tensor:
    """fp32 accumulator of a 64 x n product."""
    return cute.make_rmem_tensor(((2, 2, n // 8), 1, 1), Float32)


def rows_by_cols(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator as (2 rows, n/4 columns) of this thread, columns ascending."""
    groups = cute.size(acc) // 4
    layout = cute.make_layout((2, (2, groups)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


def row_of(thread: Int32, r: int) -> Int32:
    """Row, inside the warpgroup's 64, of accumulator row r of a thread (0..127)."""
    return (thread // 32) * 16 + (thread % 32) // 4 + 8 * r


def first_col_of(thread: Int32) -> Int32:
    """First column a thread owns; pairs of columns follow, 8 apart."""
    return (thread % 4) * 2


def count_cols_below(distance: Int32) -> Int32:
    """How many of a thread's columns lie less than `distance` from its first; not positive if none.

    The columns are taken to go on for ever.
    """
    return (distance // 8) * 2 + cutlass.min(distance & 7, 2)


def as_operand_a(values: cute.Tensor) -> cute.Tensor:
    """View of 16-bit values in accumulator order as the register operand A of the next product.

    The accumulator's column groups of 8 pair up into the operand's k-blocks of 16.
    """
    k_blocks = cute.size(values) // 8
    layout = cute.make_layout(((2, 2, 2), 1, k_blocks), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(values.iterator, layout)


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: bool | Boolean,
) -> None:
    """Start acc (+)= a b as one commit group; `accumulate` False overwrites acc."""
    # an atom of its own, so that the flag set here is not carried out of a dynamic region
    mma = cute.make_mma_atom(tiled_mma.op)
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
