"""The warps of a Hopper CTA: their roles, and transfers between registers and shared memory."""

from collections.abc import Callable
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warp

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, WARPS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.sm90 import wgmma

# bytes of shared memory kept for barriers and rings
SMEM_BOOKKEEPING = 1024
# of a warpgroup's 64
ROWS_PER_WARP = 16
# values of 16 bits that a thread moves at once
VECTOR_16_BITS = 8


class Role(IntEnum):
    """First warp of each role of warpgroup 0, and of the MMA warpgroups after it."""

    LOAD = 0
    SCHEDULE = 1
    MASK = 2
    MMA = 4


def mma_warp() -> Int32:
    """The number of this warp among the MMA warps."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - Role.MMA


def mma_warpgroup_idx() -> Int32:
    """Index of this MMA warpgroup, counted from the first; uniform, so that descriptors are too."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP - 1


def sync_warpgroup(first_barrier: int) -> None:
    """Wait for all threads of this warpgroup, whose named barrier counts from `first_barrier`."""
    cute.arch.barrier(
        barrier_id=first_barrier + mma_warpgroup_idx(), number_of_threads=THREADS_PER_WARPGROUP
    )


def take_bits(
    bits: cute.Tensor,
    channel: Channel,
    first: Int32,
    number: Int32,
    is_ready: Boolean,
    row_of: Callable[[Int32, int], Int32] = wgmma.row_of,
    num_rows: int = wgmma.ROWS_PER_THREAD,
) -> tuple[Int32, ...]:
    """This thread's word of each of its accumulator's rows, from bit tile `number` of `channel`,
    which is free afterwards. bits: (word, row). first: this warpgroup's first row in the tile.
    is_ready: the tile is known to have arrived."""
    channel.wait_unless(is_ready, number)
    thread = thread_in_warpgroup()
    words = tuple(
        bits[thread % wgmma.COLUMNS.num_words, first + row_of(thread, r)] for r in range(num_rows)
    )
    cute.arch.sync_warp()
    channel.release(number)
    return words


def store_rows(
    values: cute.Tensor, tiled_mma: cute.TiledMma, smem: cute.Tensor, transposes: bool = False
) -> None:
    """stmatrix of 16-bit values in accumulator order. transposes: columns of the tile are
    contiguous, not rows."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposes, 4), values.element_type)
    store = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread_in_warpgroup())
    cute.copy(atom, store.retile(values), store.partition_D(smem))


@cute.jit
def send_rows(
    values: cute.Tensor,
    tiled_mma: cute.TiledMma,
    smem: cute.Tensor,
    gmem: cute.Tensor,
    num_rows: Int32,
    first_col: Int32,
) -> None:
    """`store_rows`, and from there to the first `num_rows` of `gmem`, (rows, columns).

    Each warp moves 16 rows, and waits for no other warp; `smem` is free again afterwards. The tile
    has 16, 32 or 64 columns, and first_col is a multiple of that number. `gmem` may end inside the
    tile, at a multiple of 8.
    """
    store_rows(values, tiled_mma, smem)
    cute.arch.sync_warp()
    width = smem.shape[1]
    per_row = width // VECTOR_16_BITS
    warp = thread_in_warpgroup() // WARP
    lanes = cute.make_layout((WARP // per_row, per_row), stride=(per_row, 1))
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), values.element_type, num_bits_per_copy=VECTOR_16_BITS * 16
    )
    vector = cute.make_layout((1, VECTOR_16_BITS))
    copy = cute.make_tiled_copy_tv(atom, lanes, vector).get_slice(cute.arch.lane_idx())
    source = copy.partition_S(cute.local_tile(smem, (ROWS_PER_WARP, width), (warp, 0)))
    read = cute.make_rmem_tensor(source.shape, values.element_type)
    cute.copy(atom, source, read)
    cute.arch.sync_warp()
    row = warp * ROWS_PER_WARP + cute.arch.lane_idx() // per_row
    col = first_col + cute.arch.lane_idx() % per_row * VECTOR_16_BITS
    target = cute.domain_offset((row, col), gmem).iterator
    for i in cutlass.range_constexpr(read.shape[1]):
        _store_if((row < num_rows) & (col < gmem.shape[1]), target, read[None, i, None])
        row += WARP // per_row
        target += WARP // per_row * gmem.stride[0]


def _store_if(condition: Boolean, target: cute.Pointer, values: cute.Tensor) -> None:
    """Write 16 bytes if the condition holds. In PTX: in a branch each store would have its address
    computed anew (docs/facts/compiler.md#memory-accesses)."""
    words = cute.recast_tensor(values, Int32)
    cute.arch.inline_ptx(
        "@{$r5} st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, *(words[i] for i in range(4)), condition],
    )


def load_rows(
    smem: cute.Tensor, tiled_mma: cute.TiledMma, operand: cute.Tensor, transposes: bool = False
) -> None:
    """ldmatrix of a 16-bit tile to the A registers of `tiled_mma`. transposes: `store_rows`."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposes, 4), operand.element_type)
    load = cute.make_tiled_copy_A(atom, tiled_mma).get_slice(thread_in_warpgroup())
    cute.copy(atom, load.partition_S(smem), load.retile(operand))


def keep_columns(words: cute.Tensor, tiled_mma: cute.TiledMma, smem: cute.Tensor) -> None:
    """Load the first columns of a (64, d) tile into the words of a register operand A."""
    per_step = wgmma.WORDS_PER_STEP
    for step in range(cute.size(words) // per_step):
        part = cute.make_tensor(words.iterator + step * per_step, cute.make_layout(per_step))
        operand = wgmma.words_as_operand_a(part, smem.element_type)
        columns = cute.local_tile(smem, (wgmma.ROWS_PER_WARPGROUP, 16), (0, step))
        load_rows(columns, tiled_mma, operand)
