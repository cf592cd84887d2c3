"""Tensors that look like (batch, heads, seqlen, head_dim), the order of torch's own attention.

Both orders are valid shapes of a call; only the extents show which one was meant.
"""

from __future__ import annotations

from flash_mask_cute.runtime.warn_once import PACKAGE, modules_on_stack, warn_once

MOST_HEADS = 128
"""More heads than that, and fewer rows than heads, are taken for a length and heads."""
USUAL_HEADS = 64
"""More heads than that, or a number that 4 does not divide, are taken for a length if q, k and v
all have fewer rows than heads. Models have such numbers of heads rarely."""

_IN_TORCHS_ORDER = f"{PACKAGE}.flex", f"{PACKAGE}.integrations"


def hint(name: str, shape: tuple[int, ...]) -> str:
    """Advice about q, k or v of this shape, if it alone looks transposed; else an empty string.
    shape: (batch, seqlen, heads, head_dim) or, packed, (total, heads, head_dim)."""
    rows, heads = shape[-3:-1]
    return "" if heads <= MOST_HEADS or rows >= heads else _advice(name, shape)


def warn_if_transposed(q: tuple[int, ...], k: tuple[int, ...], is_paged: bool) -> None:
    """Emit a UserWarning if q, k and v look transposed, once per process. is_paged: the rows of k
    are those of a page."""
    advice = hint("q", q) or hint("k", k)
    if not advice and not is_paged and _is_unusual(q) and _is_unusual(k):
        advice = _advice("q", q)
    if advice and _has_our_order(modules_on_stack()):
        warn_once("axis order", advice)


def _has_our_order(modules: set[str]) -> bool:
    """Whether the function that was called takes (batch, seqlen, heads, head_dim). FlexAttention
    and the integrations take torch's order. A compiled graph does not say what was called."""
    if any(name.startswith(_IN_TORCHS_ORDER) for name in modules):
        return False
    is_graph = f"{PACKAGE}.autograd.torch_ops" in modules
    return not is_graph or f"{PACKAGE}.functional" in modules or f"{PACKAGE}.serving" in modules


def _is_unusual(shape: tuple[int, ...]) -> bool:
    rows, heads = shape[-3:-1]
    return 0 < rows < heads and (heads > USUAL_HEADS or heads % 4 != 0)


def _advice(name: str, shape: tuple[int, ...]) -> str:
    rows, heads = shape[-3:-1]
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
