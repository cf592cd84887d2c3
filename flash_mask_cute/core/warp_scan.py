"""Running sums, maxima and minima over the lanes of a warp."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARP = 32


def running(value: Int32, op: Callable[[Int32, Int32], Int32], upwards: bool = True) -> Int32:
    """op over this lane's value and those of the lanes below it, or above it."""
    lane = cute.arch.lane_idx()
    for step in (1, 2, 4, 8, 16):
        if upwards:
            other = cute.arch.shuffle_sync_up(value, offset=step, mask_and_clamp=0)
            reaches = lane >= step
        else:
            other = cute.arch.shuffle_sync_down(value, offset=step)
            reaches = lane < WARP - step
        value = cutlass.select_(reaches, op(value, other), value)
    return value
