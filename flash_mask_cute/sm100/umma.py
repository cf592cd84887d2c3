"""tcgen05: products with results in tensor memory (TMEM), and transfers between TMEM and registers.

TMEM has 128 lanes of 512 columns of 32 bits. A product of 128 query rows puts row r into lane r.
Warp w of a warpgroup reaches only lanes 32 w .. 32 w + 31, so each thread holds a whole row.
Products are issued by one thread, complete in the order of issue, and signal an mbarrier when they
are complete (`commit`) (PTX ISA, "tcgen05 instructions").

The order is more than PTX promises. PTX orders products only if they have the same accumulator and
shape, and a commit behind all products before it. The kernels here also rely on the order of a
product that reads P or dS and a later one that overwrites these columns. CUTLASS and flash-attn-4
rely on the same.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.experimental import primitives

from flash_mask_cute.core import clusters
from flash_mask_cute.core.clusters import LEADER
from flash_mask_cute.core.warp_scan import WARP

ROWS = 128
NUM_COLUMNS = 512
# values of 16 bits of an operand in a k-step
STEP = 16
# columns that one instruction moves between a thread and its lane
CHUNK = 32
# k-steps of a round of a product that is rolled, at most
ROLLED_STEPS = 4
# the address of lane 16 of column 0. An accumulator of 64 rows has lanes 0 to 15 of each 32, or,
# from there on, lanes 16 to 31 (PTX ISA, data path layout F; CUTLASS interleaves two of them)
HALF_LANES = 16 << 16


@dataclass(frozen=True)
class RowColumns:
    """`Columns` of bit tiles: a thread has a whole row, so words are runs of 32 columns."""

    num_words: int = 4

    def col_of(self, word: int, bit: int | Int32) -> int | Int32:
        return word * 32 + bit

    def count_below(self, word: int, distance: Int32) -> Int32:
        return distance - word * 32


COLUMNS = RowColumns()


def column(number: int | Int32) -> cute.Pointer:
    """A column of TMEM. The kernel allocates all of TMEM, so its first column is number 0."""
    first = cute.make_ptr(Float32, 0, cutlass.AddressSpace.tmem, assumed_align=16)
    return first + number


@dataclass(frozen=True)
class Group:
    """The CTAs that compute a product together: one, or the two of a cluster.

    A product of two CTAs has 256 rows. Each CTA has 128 of them, with operand A and the result in
    its own memory. It also has half of the columns of operand B, at the same address as the other
    half in the other CTA. The leader issues the product and signals both CTAs when it is complete.
    """

    size: int

    @property
    def rows(self) -> int:
        return ROWS * self.size

    @property
    def is_pair(self) -> bool:
        return self.size > 1

    @property
    def kind(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.is_pair else tcgen05.CtaGroup.ONE

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        return (self.size, 1, 1) if self.is_pair else None

    @property
    def home(self) -> int | None:
        """`Channel.home` between products and the threads of all CTAs."""
        return LEADER if self.is_pair else None

    def load_op(self) -> cpasync.CopyBulkTensorTileG2SOp:
        """The TMA operation for operands: it completes on the leader's mbarrier."""
        return cpasync.CopyBulkTensorTileG2SOp(self.kind)

    def rank(self) -> int | Int32:
        return clusters.rank() if self.is_pair else LEADER

    def is_leader(self) -> Boolean:
        return Boolean(self.rank() == LEADER)

    def meet(self) -> None:
        """For all threads, before `allocate`, for which both CTAs must have started."""
        if self.is_pair:
            self.sync()

    def sync(self) -> None:
        if self.is_pair:
            clusters.sync()
        else:
            cute.arch.sync_threads()

    def allocate(self, address: cute.Pointer) -> None:
        """Allocate all TMEM of a CTA; no other kernel may have any. By a warp, after `meet`."""
        cute.arch.alloc_tmem(NUM_COLUMNS, address, is_two_cta=self.is_pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.is_pair)

    def free(self) -> None:
        """By the allocating warps, when all threads of the group are done."""
        cute.arch.dealloc_tmem(column(0), NUM_COLUMNS, is_two_cta=self.is_pair)

    @cute.jit
    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive on each CTA's mbarrier when all products issued so far are complete."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.is_pair):
                tcgen05.commit(barrier, (1 << self.size) - 1, self.kind)
            else:
                tcgen05.commit(barrier)


def make_mma(
    dtype: type[cutlass.Numeric],
    majors: tuple[OperandMajorMode, OperandMajorMode],
    kind: tcgen05.CtaGroup,
    shape: tuple[int, int],
    source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM,
) -> cute.TiledMma:
    """majors: of operands A and B. shape: (rows of all CTAs, columns). source: of A."""
    return blackwell.make_trivial_tiled_mma(dtype, dtype, *majors, Float32, kind, shape, source)


def accumulator(mma: cute.TiledMma, shape: tuple[int, int], first: int | Int32) -> cute.Tensor:
    """The result of a product (rows of all CTAs, columns), starting at a column."""
    layout = mma.make_fragment_C(mma.partition_shape_C(shape)).layout
    return cute.make_tensor(column(first), layout)


def operand_a(
    mma: cute.TiledMma, layout: cute.ComposedLayout, dtype: type, first: int | Int32
) -> cute.Tensor:
    """16-bit values in TMEM, two per column, starting at a column, as operand A of a product."""
    tile = cute.make_tensor(cute.recast_ptr(column(0), dtype=dtype), layout.outer)
    fragment = mma.make_fragment_A(tile)[None, None, None, 0]
    return cute.make_tensor(fragment.iterator + 2 * first, fragment.layout)


def smem_operand_a(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of shared memory (rows, k, stages) as operand A: (1, rows, k-steps, stages)."""
    return mma.make_fragment_A(mma.get_slice(0).partition_A(smem))


def smem_operand_b(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of shared memory (columns, k, stages) as operand B."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(smem))


@cute.jit
def issue_parts(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    parts: tuple[cute.Tensor, ...],
    b: cute.Tensor,
    accumulate: bool | Boolean,
    steps: cutlass.Constexpr[range | None] = None,
) -> None:
    """`issue` for k-steps of operand A in several places. steps: of each place, if not all."""
    mma, is_first = cute.make_mma_atom(tiled_mma.op), True
    for number, part in enumerate(parts):
        size = cute.size(part, mode=[2])
        of_part = range(size) if cutlass.const_expr(steps is None) else steps
        for i in of_part:
            mma.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) | (not is_first))
            cute.gemm(mma, acc, part[None, None, i], b[None, None, number * size + i], acc)
            is_first = False


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: bool | Boolean,
    most: cutlass.Constexpr[int] = 8,
    steps: cutlass.Constexpr[range | None] = None,
) -> None:
    """Start acc (+)= a b; `accumulate` False overwrites acc. most: the most k-steps without a
    rolled loop. steps: of the product, if not all."""
    # an atom of its own, so that the flag set here is not carried out of a dynamic region
    mma = cute.make_mma_atom(tiled_mma.op)
    steps = range(cute.size(a, mode=[2])) if cutlass.const_expr(steps is None) else steps
    num_steps = len(steps)
    # a longer product is rolled, since the descriptors of all its steps would take registers
    unrolled = num_steps
    if cutlass.const_expr(num_steps > most):
        unrolled = max(n for n in range(1, ROLLED_STEPS + 1) if num_steps % n == 0)
    for first in cutlass.range(steps.start, steps.stop, unrolled, unroll=1):
        for i in cutlass.range_constexpr(unrolled):
            k = first + i
            mma.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) | (k > 0))
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)


# By rule a fence follows the last wait before work in TMEM, and another one precedes the first
# arrival behind it, whatever the barrier is for. A fence is no instruction of the machine.


def fence_after_wait() -> None:
    """Order the following work behind tcgen05 work of others that a barrier has signalled."""
    primitives.tcgen05_fence("after_thread_sync")


def fence_before_arrival() -> None:
    """Order this thread's tcgen05 work before an arrival that signals it to others."""
    primitives.tcgen05_fence("before_thread_sync")


def _lanes(first: Int32, count: int) -> cute.Tensor:
    layout = cute.make_layout((ROWS, count), stride=(1 << 16, 1))
    return cute.make_tensor(column(first), layout)


def load_columns(first: int | Int32, count: int, thread: Int32) -> cute.Tensor:
    """(1, count) fp32 values of this thread's lane from a column on, after `wait_loads`."""
    lanes = _lanes(first, count)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(count)), Float32)
    load = tcgen05.make_tmem_copy(atom, lanes).get_slice(thread)
    source = load.partition_S(lanes)
    shape = load.partition_D(cute.make_identity_tensor((ROWS, count))).shape
    values = cute.make_rmem_tensor(shape, Float32)
    cute.copy(load, source, values)
    return cute.make_tensor(values.iterator, cute.make_layout((1, count)))


def load_half_lanes(first: int | Int32, count: int, thread: Int32) -> cute.Tensor:
    """(1, count / 2) fp32 values of an accumulator of 64 rows, as `load_columns`. Threads 0 to 15
    of a warp get the first half of the columns of 16 rows, and threads 16 to 31 the other half."""
    source = primitives.TmemAddr(Int32(first) + (thread // WARP * WARP << 16)).as_ptr(Int32)
    loaded = primitives.tcgen05_ld("16x32bx2", source, num=count // 2, offset=count // 2)
    words = cute.make_rmem_tensor((1, count // 2), Int32)
    for i in range(count // 2):
        words[0, i] = loaded[i]
    return cute.recast_tensor(words, Float32)


def store_columns(values: cute.Tensor, first: int | Int32, thread: Int32) -> None:
    """Write 32-bit values to this thread's lane from a column on, until `wait_stores`."""
    count = cute.size(values)
    lanes = _lanes(first, count)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32)
    store = tcgen05.make_tmem_copy(atom, lanes).get_slice(thread)
    shape = store.partition_S(cute.make_identity_tensor((ROWS, count))).shape
    words = cute.make_tensor(
        cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(shape)
    )
    cute.copy(store, words, store.partition_D(lanes))


def wait_loads() -> None:
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    cute.arch.fence_view_async_tmem_store()
