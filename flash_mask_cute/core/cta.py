"""Resources of a CTA on every architecture, and the rings that its scheduler warp writes."""

from dataclasses import fields
from typing import Any, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.ring import Ring
from flash_mask_cute.core.walk_ring import CHUNK_FIELDS, WalkRing
from flash_mask_cute.core.work_ring import WORK_FIELDS, WorkRing

SMEM_CAPACITY = 232448
REGISTER_FILE = 65536
# of a thread
MAX_REGISTERS = 255
THREADS_PER_WARPGROUP = 128
WARPS_PER_WARPGROUP = 4
RING_STAGES = 4
WALK_STAGES = 4
# 32-bit words of a vector of 16 bytes
WORDS_OF_VECTOR = 4


_Traits = TypeVar("_Traits")


def thread_in_warpgroup() -> Int32:
    return cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP


def swizzled(
    memory: Any, layout: cute.ComposedLayout, dtype: type[cutlass.Numeric] | None = None
) -> cute.Tensor:
    """The tensor with a layout in a member of a CTA's storage. dtype: if not the member's."""
    return memory.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)


def transposed(smem: cute.Tensor) -> cute.Tensor:
    """The (cols, rows, stages) view of a (rows, cols, stages) tensor."""
    return cute.make_tensor(smem.iterator, cute.select(smem.layout, [1, 0, 2]))


@cute.jit
def clear(smem: cute.Tensor, num_threads: cutlass.Constexpr[int]) -> None:
    """Write zeros to a tensor, with all threads of a CTA."""
    count = cute.cosize(smem.layout) * smem.element_type.width // Int32.width
    words = cute.make_tensor(cute.recast_ptr(smem.iterator, dtype=Int32), cute.make_layout(count))
    zeros = cute.make_rmem_tensor((WORDS_OF_VECTOR,), Int32)
    zeros.fill(0)
    for i in range(cute.arch.thread_idx()[0], count // WORDS_OF_VECTOR, num_threads):
        cute.autovec_copy(zeros, cute.local_tile(words, (WORDS_OF_VECTOR,), (i,)))
    # products and TMA use another proxy
    cute.arch.fence_proxy("async.shared", space="cta")


def launch_registers(num_warpgroups: int) -> int:
    """Registers per thread at launch, for a CTA that has an SM to itself."""
    return REGISTER_FILE // (THREADS_PER_WARPGROUP * num_warpgroups) // 8 * 8


def registers_left(num_warpgroups: int, taken: int) -> int:
    """Registers per thread of the warpgroup that gives registers to the others.

    :param taken: registers of the other warpgroups together. A request for more registers than the
        launch gave the CTA would block forever.
    """
    return launch_registers(num_warpgroups) * num_warpgroups - taken


def traits_of(kernel: Any, kind: type[_Traits], **given: Any) -> _Traits:
    """The traits of an attention kernel: those given, the others its options of the same names."""
    same = {x.name for x in fields(kernel)} & {x.name for x in fields(kind)} - given.keys()
    return kind(**{name: getattr(kernel, name) for name in same}, **given)


def check_can_run(traits: Any) -> None:
    """Raises ValueError if no kernel can run with the traits of an attention kernel."""
    if traits.dtype not in (cutlass.BFloat16, cutlass.Float16):
        raise ValueError(f"dtype must be BFloat16 or Float16, got {traits.dtype}")
    if (reason := traits.infeasible()) is not None:
        raise ValueError(reason)


def scheduler_rings(
    storage: Any,
    readers: tuple[int | Int32, int],
    ascending: bool,
    uncut_first: bool,
    predecessors: cute.Tensor | None = None,
    fields: tuple[str, ...] = WORK_FIELDS,
    chunk_fields: tuple[str, ...] = CHUNK_FIELDS,
    tokens: cute.Tensor | None = None,
) -> tuple[WorkRing, WalkRing]:
    """The rings that the scheduler warp writes: work tiles for all other warps, walks for some.

    :param storage: shared memory of the CTA, with `ring` and `walk` and the barriers of both
    :param readers: warps that read walks, and warps that read only work tiles
    """
    num_walkers, num_others = readers
    work_places = storage.ring.data_ptr(), storage.ring_barriers.data_ptr()
    work = Ring.create(*work_places, RING_STAGES, num_walkers + num_others)
    walk_places = storage.walk.data_ptr(), storage.walk_barriers.data_ptr()
    walk = Ring.create(*walk_places, WALK_STAGES, num_walkers)
    chunks = WalkRing(walk, ascending, uncut_first, predecessors, chunk_fields, tokens)
    return WorkRing(work, fields), chunks
