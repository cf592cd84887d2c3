"""Smallest and largest of integers of any kind: Python ints, values of a kernel, tensors.

The rules of masks and lengths are written with them, so that one text runs on Python ints (host,
tests), on `cutlass.Int32` (traced into kernels) and elementwise on integer torch tensors (dense
masks). Importing this module imports neither cutlass nor torch.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

IntLike: TypeAlias = Any
"""An int, a `cutlass.Int32`, or an integer torch tensor; results follow the operands."""


def imin(a: IntLike, b: IntLike) -> IntLike:
    """Smaller of two integers; operands may be of mixed kinds (int with Int32, int with tensor)."""
    return _select("min", a, b)


def imax(a: IntLike, b: IntLike) -> IntLike:
    """Larger of two integers; operands may be of mixed kinds (int with Int32, int with tensor)."""
    return _select("max", a, b)


def _select(which: str, a: IntLike, b: IntLike) -> IntLike:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if which == "min" else max(a, b)
    # A tensor can only exist if torch was imported by somebody else.
    torch = sys.modules.get("torch")
    if torch is not None and (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)):
        tensor, bound = (a, b) if isinstance(a, torch.Tensor) else (b, a)
        return tensor.clamp(max=bound) if which == "min" else tensor.clamp(min=bound)
    import cutlass

    return cutlass.min(a, b) if which == "min" else cutlass.max(a, b)
