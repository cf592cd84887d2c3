"""The table of the FlashMask paper (arXiv 2410.01359, Tables 4 to 9): its cases and their order.

Twelve masks at three lengths and two head dimensions, forward and backward. The cases of one size
stand together, references first and the longest sequences last, so that a run that is cut off
leaves whole groups; the backward of a mask follows its forward.
"""

from __future__ import annotations

from bench.cases import BenchCase
from bench.masks import MASKS

LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072}
DIMS = (128, 64)
# Of FlexAttention, which compiles for seconds in every case, and needs lists of N^2 / 128^2 blocks.
FLEX_DIM, FLEX_TOKENS = 128, 32768


def table_name(d: int, size: str, mask: str, *, is_backward: bool = False) -> str:
    """The case of a cell of the table; `size` is a key of LENGTHS."""
    return f"{'bwd-' if is_backward else ''}mask-d{d}-{size}-{mask}"


def table_names() -> tuple[str, ...]:
    """All cases, in the order in which they are measured."""
    return tuple(
        table_name(d, size, mask, is_backward=is_backward)
        for size in LENGTHS
        for d in DIMS
        for mask in MASKS
        for is_backward in (False, True)
    )


def takes_part(peer: str, case: BenchCase) -> bool:
    """Native causal flash-attn-4 is the reference of all masks of its size, measured once."""
    if peer == "fa4":
        return case.mask == "causal"
    return not peer.startswith("flex") or (case.d == FLEX_DIM and case.n <= FLEX_TOKENS)
