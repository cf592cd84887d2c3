"""What the Hopper kernels have in common: who is who in a CTA, and what an SM gives it."""

from enum import IntEnum
from typing import Any

import cutlass.cute as cute

from flash_mask_cute.core.ring import Ring
from flash_mask_cute.core.walk_ring import WalkRing
from flash_mask_cute.core.work_ring import WorkRing

SMEM_CAPACITY = 232448
REGISTER_FILE = 65536
THREADS_PER_WARPGROUP = 128
WARPS_PER_WARPGROUP = 4
# bytes of shared memory kept for barriers and rings
SMEM_BOOKKEEPING = 1024
RING_STAGES = 4
WALK_STAGES = 4


class Role(IntEnum):
    """First warp of each role of warpgroup 0, and of the MMA warpgroups after it."""

    LOAD = 0
    PLAN = 1
    PAINT = 2
    MMA = 4


def registers_left(num_warpgroups: int, taken: int) -> int:
    """Registers of a thread of the one warpgroup that gives to the others.

    :param taken: what the others have together. Asking for more than the launch gave the CTA would
        block for ever.
    """
    pool = REGISTER_FILE // (THREADS_PER_WARPGROUP * num_warpgroups) // 8 * 8 * num_warpgroups
    return pool - taken


def planning_rings(
    storage: Any,
    num_painters: int,
    num_mma_warps: int,
    ascending: bool,
    turns: cute.Tensor | None = None,
) -> tuple[WorkRing, WalkRing]:
    """What the planning warp writes: work tiles, for all others, and walks, for load and paint.

    :param storage: shared memory of the CTA, with `ring` and `walk` and the barriers of both
    :param ascending, turns: see `WalkRing`
    """
    walkers = 1 + num_painters
    work = Ring.create(
        storage.ring.data_ptr(),
        storage.ring_barriers.data_ptr(),
        RING_STAGES,
        walkers + num_mma_warps,
    )
    walk = Ring.create(
        storage.walk.data_ptr(), storage.walk_barriers.data_ptr(), WALK_STAGES, walkers
    )
    return WorkRing(work), WalkRing(walk, ascending, turns)
