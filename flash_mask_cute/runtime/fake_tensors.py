"""Stand-ins for tensors, which the compiler gets instead of the tensors of a call.

Extents and strides are symbols, so no fact about a particular call can enter the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flash_mask_cute.limits import STRIDE_STEP
from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES

BASE_ALIGNMENT = 16  # bytes


def cutlass_dtype(name: str) -> Any:
    """The DSL's type of a torch dtype by name."""
    import cutlass

    return getattr(cutlass, CUTLASS_NAMES[name])


def tensor(
    name: str,
    shape: Sequence[Any],
    strides: Sequence[Any],
    align: int | None = None,
    *,
    step: int = 1,
    on_host: bool = False,
) -> Any:
    """A tensor of a torch dtype. None is any extent, or any stride that is a multiple of `step`.

    align: bytes, by default those of an element. on_host: in memory of the CPU.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype, spaces = cutlass_dtype(name), cutlass.AddressSpace
    return make_fake_tensor(
        dtype,
        tuple(cute.sym_int() if n is None else n for n in shape),
        tuple(cute.sym_int64(divisibility=step) if n is None else n for n in strides),
        memspace=spaces.generic if on_host else spaces.gmem,
        # a Boolean has one bit, and a byte in memory
        assumed_align=align or max(dtype.width // 8, 1),
    )


def operand(name: str, rank: int, dim: int) -> Any:
    """A tensor of rows of `dim` elements, with any strides that TMA allows."""
    step = BASE_ALIGNMENT if cutlass_dtype(name).width == 8 else STRIDE_STEP
    outer = [None] * (rank - 1)
    return tensor(name, (*outer, dim), (*outer, 1), BASE_ALIGNMENT, step=step)


def byte_rows(rank: int) -> Any:
    """A tensor of rows of bytes that begin at multiples of 16 bytes."""
    strides = *[None] * (rank - 1), 1
    return tensor("uint8", [None] * rank, strides, BASE_ALIGNMENT, step=BASE_ALIGNMENT)


def vector(name: str | None) -> Any:
    """A contiguous vector, or None."""
    return None if name is None else tensor(name, (None,), (1,))


def int32_vector(present: bool) -> Any:
    return vector("int32" if present else None)


def strided(rank: int, name: str = "int32", *, on_host: bool = False) -> Any:
    """A tensor with any strides; torch does not define the last one for extents of 1."""
    return tensor(name, [None] * rank, [None] * rank, on_host=on_host)


def rows(name: str, rank: int) -> Any:
    """A tensor with contiguous rows."""
    return tensor(name, [None] * rank, (*[None] * (rank - 1), 1))


def scratch(*inner: int) -> Any:
    """A contiguous fp32 tensor (heads, row blocks, *inner)."""
    strides = [1]
    for extent in reversed(inner):
        strides.insert(0, strides[0] * extent)
    align = BASE_ALIGNMENT if inner else None
    return tensor("float32", (None, None, *inner), (None, *strides), align, step=strides[0])


def vectors_of_threads() -> Any:
    """A contiguous fp32 tensor (CTAs, vectors, threads, 4)."""
    strides = None, None, 4, 1
    return tensor("float32", (None, None, None, 4), strides, BASE_ALIGNMENT, step=4)


def int32(present: bool = True) -> Any:
    """A number, or None."""
    import cutlass

    return cutlass.Int32(0) if present else None


def q_start(kind: str | None) -> Any:
    """Positions of first queries: a number for all sequences, or a vector. kind: `q_start` of
    `AttentionProblem`."""
    return int32_vector(True) if kind == "each" else int32(kind is not None)


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
    of_tiles = (None, None) if entries or gathers else (strided(4), strided(4))
    lists = (strided(2), strided(3)) if gathers and not entries else ()
    of_rows = strided(4, entries or "int32"), None, *int32_pair()
    return *of_rows, *of_tiles, int32(), *lists


def query_lists() -> tuple[Any, ...]:
    """The queries of each key block, and the work that follows."""
    return strided(2), strided(3), strided(1)


def counter() -> Any:
    """The two numbers of a tile scheduler."""
    return tensor("int32", (2,), (1,))


def int32_pair() -> tuple[Any, Any]:
    return int32(), int32()


def stream() -> Any:
    """torch's current stream, which a call does not have to pass."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
