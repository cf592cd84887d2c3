"""Members of a CTA's shared memory, as the annotations of a `cute.struct`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def elements(
    dtype: type[cutlass.Numeric], layout: cute.ComposedLayout, is_there: bool = True
) -> type:
    """An operand of products in a layout, aligned for every swizzle; empty if it is not there."""
    size = cute.cosize(layout) if is_there else 0
    return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]


def barriers(stages: int) -> type:
    """The mbarriers of a `Channel`."""
    return cute.struct.MemRange[Int64, 2 * stages]


def words(count: int, align: int = 16) -> type:
    """Int32; by default threads read 16 bytes at a time."""
    return cute.struct.Align[cute.struct.MemRange[Int32, count], align]


def floats(count: int) -> type:
    """Float32, which bulk copies bring or fetch."""
    return cute.struct.Align[cute.struct.MemRange[Float32, count], 128]
