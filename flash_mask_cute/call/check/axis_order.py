"""Tensors that look like (batch, heads, seqlen, head_dim), the order of torch's own attention.

Both orders are valid shapes of a call; only the extents show which one was meant.
"""

from __future__ import annotations

import sys
import warnings

MOST_HEADS = 128
"""More heads than that, and fewer rows than heads, are taken for a length and heads."""

_has_warned = False


def hint(name: str, shape: tuple[int, ...]) -> str:
    """Advice about q, k or v of this shape, if it looks transposed; else an empty string.

    shape: (batch, seqlen, heads, head_dim) or, packed, (total, heads, head_dim).
    """
    rows, heads = shape[-3:-1]
    if heads <= MOST_HEADS or rows >= heads:
        return ""
    packed = len(shape) == 3
    ours, other = "(batch, seqlen, heads, head_dim)", "(batch, heads, seqlen, head_dim)"
    if packed:
        ours, other = "(total, heads, head_dim)", "(heads, total, head_dim)"
    transposed = f"{name}.transpose({len(shape) - 3}, {len(shape) - 2})"
    return (
        f"{name} of shape {shape} is read as {ours}, {heads} heads of {rows} rows; if it is "
        f"{other}, as scaled_dot_product_attention takes it, pass {transposed}, and so for q, k "
        "and v"
    )


def warn_once(**shapes: tuple[int, ...]) -> None:
    """Emit a UserWarning if q, k or v looks transposed, once per process."""
    global _has_warned
    if _has_warned:
        return
    hints = [found for name, shape in shapes.items() if (found := hint(name, shape))]
    if hints:
        _has_warned = True
        warnings.warn(hints[0], UserWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Stack levels from the calling function to the first one outside this package."""
    package = __name__.partition(".")[0]
    frame, levels = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, levels = frame.f_back, levels + 1
    return levels
