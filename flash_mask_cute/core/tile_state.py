"""What was seen in a part of the score matrix, as bits: with both, a mask cuts it."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

VISIBLE, HIDDEN = 1, 2
BOTH = VISIBLE | HIDDEN


@cute.jit
def state_of_warp(sees_visible: Boolean, sees_hidden: Boolean) -> Int32:
    """What the lanes of a warp have seen together."""
    state = Int32(0)
    if cute.arch.vote_any_sync(sees_visible):
        state = state | VISIBLE
    if cute.arch.vote_any_sync(sees_hidden):
        state = state | HIDDEN
    return state
