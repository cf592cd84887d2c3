"""Stand-ins for tensors, which the compiler gets instead of the tensors of a call.

Extents and strides are symbols, so no fact about a particular call can enter the code.
"""

from __future__ import annotations

from typing import Any, Protocol

from flash_mask_cute.limits import STRIDE_STEP
from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES

BASE_ALIGNMENT = 16  # bytes


class HasWindow(Protocol):
    """A problem with fields for the sides of a window."""

    @property
    def has_window_left(self) -> bool: ...

    @property
    def has_window_right(self) -> bool: ...


def cutlass_dtype(name: str) -> Any:
    """The DSL's type of a torch dtype by name."""
    import cutlass

    return getattr(cutlass, CUTLASS_NAMES[name])


def extents(rank: int) -> tuple[Any, ...]:
    import cutlass.cute as cute

    return tuple(cute.sym_int() for _ in range(rank))


def operand(name: str, rank: int, dim: int) -> Any:
    """A tensor of rows of `dim` elements, with any strides that TMA allows."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = cutlass_dtype(name)
    step = BASE_ALIGNMENT if dtype.width == 8 else STRIDE_STEP
    strides = tuple(cute.sym_int64(divisibility=step) for _ in range(rank - 1))
    return make_fake_tensor(
        dtype,
        (*extents(rank - 1), dim),
        (*strides, 1),
        assumed_align=BASE_ALIGNMENT,
    )


def byte_rows(rank: int) -> Any:
    """A tensor of rows of bytes that begin at multiples of 16 bytes."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = tuple(cute.sym_int64(divisibility=BASE_ALIGNMENT) for _ in range(rank - 1))
    return make_fake_tensor(
        cutlass.Uint8, extents(rank), (*strides, 1), assumed_align=BASE_ALIGNMENT
    )


def vector(name: str | None) -> Any:
    """A contiguous vector, or None."""
    from cutlass.cute.runtime import make_fake_tensor

    if name is None:
        return None
    dtype = cutlass_dtype(name)
    return make_fake_tensor(dtype, extents(1), (1,), assumed_align=dtype.width // 8)


def int32_vector(present: bool) -> Any:
    return vector("int32" if present else None)


def strided(rank: int, name: str = "int32") -> Any:
    """A tensor with any strides; torch does not define the last one for extents of 1."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = cutlass_dtype(name)
    strides = tuple(cute.sym_int64() for _ in range(rank))
    # a Boolean has one bit, and a byte in memory
    align = max(dtype.width // 8, 1)
    return make_fake_tensor(dtype, extents(rank), strides, assumed_align=align)


def rows(name: str, rank: int) -> Any:
    """A tensor with contiguous rows."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = cutlass_dtype(name)
    strides: Any = (*(cute.sym_int64() for _ in range(rank - 1)), 1)
    return make_fake_tensor(dtype, extents(rank), strides, assumed_align=dtype.width // 8)


def scratch(*inner: int) -> Any:
    """A contiguous fp32 tensor (heads, row blocks, *inner)."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = [1]
    for extent in reversed(inner):
        strides.insert(0, strides[0] * extent)
    of_head = cute.sym_int64(divisibility=strides[0])
    align = BASE_ALIGNMENT if inner else 4
    return make_fake_tensor(
        cutlass.Float32, (*extents(2), *inner), (of_head, *strides), assumed_align=align
    )


def vectors_of_threads() -> Any:
    """A contiguous fp32 tensor (CTAs, vectors, threads, 4)."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    of_cta, of_vector = (cute.sym_int64(divisibility=4) for _ in range(2))
    return make_fake_tensor(
        cutlass.Float32, (*extents(3), 4), (of_cta, of_vector, 4, 1), assumed_align=BASE_ALIGNMENT
    )


def window(problem: HasWindow) -> tuple[Any, Any]:
    """window_left and window_right."""
    import cutlass

    left, right = problem.has_window_left, problem.has_window_right
    return cutlass.Int32(0) if left else None, cutlass.Int32(0) if right else None


def q_start(kind: str | None) -> Any:
    """Positions of first queries: a number for all sequences, or a vector. kind: `q_start` of
    `AttentionProblem`."""
    import cutlass

    if kind is None:
        return None
    return cutlass.Int32(0) if kind == "number" else int32_vector(True)


def aux_tensors(aux: tuple[tuple[str, int], ...]) -> tuple[Any, ...] | None:
    """aux: as in `AttentionProblem`."""
    return tuple(strided(rank, name) for name, rank in aux) or None


def block_bits(are_there: bool) -> tuple[Any, ...] | None:
    """Bits of visible and of full blocks, and the blocks' size."""
    return (strided(4), strided(4), *int32_pair()) if are_there else None


def selection_bits(entries: str | None, gathers: bool = False) -> tuple[Any, ...]:
    """The same of a choice, which has no full blocks, the bits of tiles of queries, and how many
    key tiles such a tile may have chosen. entries: their dtype, if they are given in place of
    bits. gathers: lists of blocks are given in place of bits of tiles."""
    import cutlass

    of_tiles = (None, None) if entries or gathers else (strided(4), strided(4))
    lists = (strided(2), strided(3)) if gathers else ()
    of_rows = strided(4, entries or "int32"), None, *int32_pair()
    return *of_rows, *of_tiles, cutlass.Int32(1), *lists


def query_lists() -> tuple[Any, ...]:
    """The queries of each key block, and the work that follows."""
    return strided(2), strided(3), strided(1)


def counter() -> Any:
    """The two numbers of a tile scheduler."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(cutlass.Int32, (2,), (1,), assumed_align=4)


def int32_pair() -> tuple[Any, Any]:
    import cutlass

    return cutlass.Int32(0), cutlass.Int32(0)


def stream() -> Any:
    """torch's current stream, which a call does not have to pass."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
