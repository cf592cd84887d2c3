"""What was seen in a part of the score matrix, as bits: with both, a mask cuts it."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

VISIBLE, HIDDEN = 1, 2
BOTH = VISIBLE | HIDDEN


@cute.jit
def seen_by_warp(sees_visible: Boolean, sees_hidden: Boolean) -> Int32:
    """What the lanes of a warp have seen together."""
    seen = Int32(0)
    if cute.arch.vote_any_sync(sees_visible):
        seen = seen | VISIBLE
    if cute.arch.vote_any_sync(sees_hidden):
        seen = seen | HIDDEN
    return seen
