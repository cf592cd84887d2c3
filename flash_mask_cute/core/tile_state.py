"""The state of a tile of scores in device code, as two bits.

A tile is FULL if everything in it is visible, EMPTY if nothing is, and PARTIAL otherwise. The state
of a tile is the OR of the states of its parts.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

FULL, EMPTY = 1, 2
PARTIAL = FULL | EMPTY


def has_visible(state: Int32) -> Boolean:
    return (state & FULL) != 0


def has_hidden(state: Int32) -> Boolean:
    return (state & EMPTY) != 0


@cute.jit
def state_of_warp(sees_visible: Boolean, sees_hidden: Boolean) -> Int32:
    """The state of the scores that the lanes of a warp have examined."""
    state = Int32(0)
    if cute.arch.vote_any_sync(sees_visible):
        state = state | FULL
    if cute.arch.vote_any_sync(sees_hidden):
        state = state | EMPTY
    return state
