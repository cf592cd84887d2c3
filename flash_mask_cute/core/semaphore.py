"""Global-memory semaphores that either single out the first CTA to add, or order all CTAs.

Each place that CTAs add to has a word, initially 0. In a fixed order, it names the CTA that added
last. Otherwise it says whether the first CTA has written; that CTA stores instead of adding. A
whole warp runs each function. The functions are for bulk copies.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

# values of the word if there is no fixed order
BEGUN, THERE = 1, 2
# in place of a predecessor: there is nothing to add
NO_PREDECESSOR = -1


@cute.jit
def is_first(place: cute.Pointer) -> Boolean:
    """Whether this warp is the first to arrive. The first warp stores, calls `release`, and waits
    for no other warp before that. The others may add when this returns."""
    before = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_cas(
            place, cmp=Int32(0), val=Int32(BEGUN), sem="acquire", scope="gpu"
        )
    before = cute.arch.shuffle_sync(before, 0)
    if before == BEGUN:
        wait(place, Int32(THERE))
    else:
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
    return before == 0


@cute.jit
def wait(place: cute.Pointer, value: Int32) -> None:
    """Wait until the word at `place` is `value`; the additions of its writer are complete then."""
    is_mine = Boolean(False)
    while not is_mine:
        is_mine = cute.arch.load(place, Int32, sem="relaxed", scope="gpu") == value
    cute.arch.fence_acq_rel_gpu()
    # whoever adds next does so by the async proxy
    cute.arch.fence_proxy("async.global")


@cute.jit
def release(place: cute.Pointer, value: Int32) -> None:
    """Write `value`, after this warp's additions, which must be complete."""
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.store(place, value, sem="release", scope="gpu")
