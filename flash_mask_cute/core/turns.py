"""Turns: CTAs that add to one place in global memory do so in a fixed order.

A place has a word that names whoever added last. Both functions are run by a whole warp.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def wait_for_turn(place: cute.Pointer, turn: Int32) -> None:
    """Wait until the word at `place` is `turn`; what its writer added is complete then."""
    is_mine = Boolean(False)
    while not is_mine:
        is_mine = cute.arch.load(place, Int32, sem="relaxed", scope="gpu") == turn
    cute.arch.fence_acq_rel_gpu()
    # whoever adds next does so by the async proxy
    cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(place: cute.Pointer, turn: Int32) -> None:
    """Write `turn`, after this warp's additions, which must be complete."""
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.store(place, turn, sem="release", scope="gpu")
