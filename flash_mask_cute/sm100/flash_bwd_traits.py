"""Static facts of the Blackwell backward: tiles, TMEM, shared memory, warps and registers.

Like `flash_fwd_traits`: Python ints decide; layouts and MMA atoms are made where they are needed.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    registers_left,
    scheduler_rings,
    swizzled,
)
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.row_blocks import stats_words
from flash_mask_cute.core.softmax import round_pair
from flash_mask_cute.core.walk_ring import CHUNK, WalkRing
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.umma import COLUMNS, NUM_COLUMNS, ROWS

TILE_M = TILE_N = ROWS
# columns of tiles: heads of other dimensions are rounded up
TILE_DIMS = (64, 96, 128)
NUM_WARPGROUPS = 5
MASK_REGISTERS = 48
# columns of dQ that a reduce thread holds, at most
MOST_HELD = 64
# warpgroups that share the queries of a block
HALVES = 2
QUERIES = TILE_M // HALVES
# dK and dV leave by so many keys and columns, from two places of each warp by turns
STORED_ROWS, STORED_COLS = 32, 32
STORE_PLACES = 2
# bytes of shared memory kept for barriers, rings and bits
SMEM_BOOKKEEPING = 6144


class Registers(NamedTuple):
    """Registers of a thread that computes, and of one that reduces."""

    compute: int
    reduce: int

    @property
    def holds_dq(self) -> bool:
        """Whether dQ of a block leaves TMEM at once (see `BwdTraits.held_parts`)."""
        return self.reduce > MOST_HELD

    @property
    def of_helpers(self) -> int:
        """Registers of a thread that loads, multiplies, schedules or sends."""
        taken = HALVES * self.compute + self.reduce + MASK_REGISTERS
        return registers_left(NUM_WARPGROUPS, taken)


REGISTERS = Registers(152, 96)
# for a soft cap, which has more values of a score at a time, and for lists beside intervals or in a
# fixed order: with fewer registers they spill
MORE_FOR_SCORES = Registers(176, 48)


class Role(IntEnum):
    """First warp of each role; COMPUTE has four warps for each half of the queries."""

    COMPUTE = 0
    REDUCE = 8
    LOAD = 12
    MMA = 13
    SCHEDULE = 14
    SEND = 15
    MASK = 16


COMPUTE_WARPS = Role.REDUCE - Role.COMPUTE
REDUCE_WARPS = Role.LOAD - Role.REDUCE
NUM_MASK_WARPS = 4


class Channels(NamedTuple):
    """The channels between the roles of a CTA (see `flash_bwd`); kv: if `BwdTraits.holds_keys`."""

    q: Channel
    do: Channel
    kv: Channel | None
    s: Channel
    dp: Channel
    dq: Channel
    sums: Channel
    out: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing


class Tiles(NamedTuple):
    """The contents of shared memory: see `BwdTraits` for the layouts.

    ds: (queries, keys). stored: dK and dV before their store, in the place of ds. dq: fp32 sums of
    a
    part. stats: `core.row_blocks.stats_words` of a query block. bits: of a partial block.
    """

    q: cute.Tensor  # (128, tile_d, stages_q)
    do: cute.Tensor  # (128, tile_dv, stages_do)
    k: cute.Tensor  # (128, tile_d, 1)
    v: cute.Tensor  # (128, tile_dv, 1)
    ds: cute.Tensor  # (128 queries, 128 keys, 1)
    stored: cute.Tensor  # (32 keys, 32 columns, places of warps)
    dq: cute.Tensor  # (values of a part,)
    stats: cute.Tensor  # (stats_words, stages_q)
    bits: cute.Tensor  # (words, tile_n)
    words: None = None


class Products(NamedTuple):
    """Fragments of the five products; names are result, then operand.

    p, ds: in TMEM, one for each half of the queries. s_k, dp_v: with one stage, in TMEM if
    `BwdTraits.holds_keys`.
    """

    s: cute.Tensor  # (128 keys, 128 queries)
    s_k: cute.Tensor
    s_q: cute.Tensor
    dp: cute.Tensor  # (128 keys, 128 queries)
    dp_v: cute.Tensor
    dp_do: cute.Tensor
    dv: cute.Tensor  # (128 keys, tile_dv)
    p: tuple[cute.Tensor, ...]  # (128 keys, 64 queries) each
    dv_do: cute.Tensor
    dk: cute.Tensor  # (128 keys, tile_d)
    ds: tuple[cute.Tensor, ...]  # (128 keys, 64 queries) each
    dk_q: cute.Tensor
    dq: cute.Tensor  # (128 queries, tile_d)
    dq_ds: cute.Tensor
    dq_k: cute.Tensor


@dataclass(frozen=True)
class BwdTraits:
    """Shape of one CTA's work: 128 keys, and a walk over blocks of 128 queries.

    S^T and dP^T have keys in lanes, so P^T and dS^T overwrite them in TMEM and are operands of dV
    and dK. dS also goes to shared memory, for dQ.

    stages_q, stages_do: blocks of queries and of their output gradients in flight. has_marks: rows
    of queries that see nothing may be marked to be cleared. has_reference: the statistics of a
    query have a third number, for scores of any magnitude. stages_kv, value_cols, cta_pair: options
    of Hopper, not supported here.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int = TILE_M
    stages_q: int = 2
    stages_do: int = 1
    stages_kv: int = 1
    value_cols: int = 0
    cta_pair: bool = False
    has_marks: bool = False
    has_reference: bool = False

    # heads of a group pass by one after the other
    packed_heads = group_size = 1
    tile_n = cluster_tile_n = TILE_N
    num_threads = NUM_WARPGROUPS * THREADS_PER_WARPGROUP

    @property
    def tile_d(self) -> int:
        return _rounded(self.head_dim)

    @property
    def tile_dv(self) -> int:
        return _rounded(self.head_dim_v)

    @property
    def group(self) -> umma.Group:
        return umma.Group(1)

    # -- TMEM -----------------------------------------------------------------------------------
    # P of a half of the queries lies over that half's columns of S, two to a column, and dS over
    # those of dP: a warp writes only where it has read itself.

    column_s = 0
    column_dp = TILE_M
    column_dv = 2 * TILE_M

    @property
    def column_dk(self) -> int:
        return self.column_dv + self.tile_dv

    @property
    def column_dq(self) -> int:
        """The TMEM column of dQ: its own, or that of dP, whose dS has already been multiplied by
        then."""
        return self.column_dp if self.dq_shares else self.column_dk + self.tile_d

    @property
    def dq_shares(self) -> bool:
        return self.column_dk + 2 * self.tile_d > NUM_COLUMNS

    @property
    def values_lag(self) -> bool:
        """Whether dV of a block is issued behind dP of the block. That needs room for dQ beside dP:
        dP then waits for nothing but its operands."""
        return not self.dq_shares

    @property
    def holds_keys(self) -> bool:
        """Whether TMEM has columns left for K and V, two values per column. S and dP then read half
        as much shared memory."""
        return not self.dq_shares and self.column_v + self.tile_dv // 2 <= NUM_COLUMNS

    @property
    def column_k(self) -> int:
        return self.column_dq + self.tile_d

    @property
    def column_v(self) -> int:
        return self.column_k + self.tile_d // 2

    # -- shared memory --------------------------------------------------------------------------

    @property
    def parts_dq(self) -> tuple[int, ...]:
        """Widths of the parts of dQ, which leave in turn."""
        return (64,) if self.tile_d == 64 else (32,) * (self.tile_d // 32)

    @property
    def held_parts(self) -> int:
        """The last so many parts of dQ that a thread holds in registers together, so that TMEM is
        free before any of them is staged."""
        return min(len(self.parts_dq), MOST_HELD // max(self.parts_dq))

    def size_dq(self, width: int) -> int:
        """Values of a part of dQ."""
        return self.tile_m * width

    @property
    def bytes_q(self) -> int:
        return self.tile_m * self.tile_d * 2

    @property
    def bytes_do(self) -> int:
        return self.tile_m * self.tile_dv * 2

    @property
    def bytes_with_q(self) -> int:
        """Bytes of keys, which come with the Q of a work tile's first block, and of values with its
        dO."""
        return self.tile_n * self.tile_d * 2

    @property
    def bytes_with_do(self) -> int:
        return self.tile_n * self.tile_dv * 2

    @property
    def bytes_ds(self) -> int:
        return self.tile_m * self.tile_n * 2

    @property
    def bytes_dq(self) -> int:
        return self.size_dq(max(self.parts_dq)) * 4

    @property
    def num_stats(self) -> int:
        """Statistics of a query: LSE, delta, and the reference of its scores, if they have one."""
        return 2 + self.has_reference

    @property
    def stats_words(self) -> int:
        """Statistics of a query block, and marks of its rows."""
        return stats_words(self.tile_m, self.num_stats, self.has_marks)

    @property
    def bytes_stats(self) -> int:
        return self.stats_words * 4

    @property
    def smem_bytes(self) -> int:
        return (
            self.bytes_with_q
            + self.bytes_with_do
            + self.stages_q * (self.bytes_q + self.num_stats * self.tile_m * 4)
            + self.stages_do * self.bytes_do
            + self.bytes_ds
            + self.bytes_dq
            + SMEM_BOOKKEEPING
        )

    def infeasible(self) -> str | None:
        """The reason why a kernel with these traits cannot run, or None."""
        if max(self.head_dim, self.head_dim_v) > TILE_DIMS[-1]:
            dims = f"{self.head_dim}, {self.head_dim_v}"
            return f"head_dim and head_dim_v go up to {TILE_DIMS[-1]} on Blackwell, got {dims}"
        if self.tile_m != TILE_M:
            return f"tile_m must be {TILE_M} on Blackwell, got {self.tile_m}"
        if self.stages_q != 2:
            # Q of a block is multiplied once more when S of the next one has been
            return f"stages_q must be 2 on Blackwell, got {self.stages_q}"
        if self.stages_do not in (1, 2):
            return f"stages_do must be 1 or 2, got {self.stages_do}"
        for name, value in (("stages_kv", 1), ("value_cols", 0), ("cta_pair", False)):
            if getattr(self, name) != value:
                return f"{name} must be {value} on Blackwell, got {getattr(self, name)}"
        if self.smem_bytes > SMEM_CAPACITY:
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        return None

    # -- products -------------------------------------------------------------------------------

    def _mma(
        self,
        a_major: OperandMajorMode,
        b_major: OperandMajorMode,
        n: int,
        source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM,
    ) -> cute.TiledMma:
        more = cutlass.Float32, self.group.kind, (ROWS, n), source
        return blackwell.make_trivial_tiled_mma(self.dtype, self.dtype, a_major, b_major, *more)

    def mma_scores(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: keys by queries."""
        source = tcgen05.OperandSource.TMEM if self.holds_keys else tcgen05.OperandSource.SMEM
        return self._mma(OperandMajorMode.K, OperandMajorMode.K, self.tile_m, source)

    def mma_sums(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: keys by n columns, the scores in TMEM."""
        return self._mma(OperandMajorMode.K, OperandMajorMode.MN, n, tcgen05.OperandSource.TMEM)

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K: queries by columns."""
        return self._mma(OperandMajorMode.MN, OperandMajorMode.MN, self.tile_d)

    def _rows(self, cols: int, stages: int) -> cute.ComposedLayout:
        """(128, cols, stages) with cols contiguous."""
        tile = (ROWS, ROWS, cols)
        return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, stages)

    def layout_q(self) -> cute.ComposedLayout:
        return self._rows(self.tile_d, self.stages_q)

    def layout_do(self) -> cute.ComposedLayout:
        return self._rows(self.tile_dv, self.stages_do)

    def layout_k(self) -> cute.ComposedLayout:
        return self._rows(self.tile_d, 1)

    def layout_v(self) -> cute.ComposedLayout:
        return self._rows(self.tile_dv, 1)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`."""
        return (
            (self.layout_q(), self.tile_m, self.tile_d),
            (self.layout_do(), self.tile_m, self.tile_dv),
            (self.layout_k(), self.tile_n, self.tile_d),
            (self.layout_v(), self.tile_n, self.tile_dv),
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """(queries, keys, 1), a key's queries contiguous."""
        tile = (ROWS, self.tile_m, self.tile_n)
        return hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.dtype, 1)

    def layout_stored(self) -> cute.ComposedLayout:
        """(32 keys, 32 columns, places of warps)."""
        tile = (STORED_ROWS, STORED_COLS)
        places = STORE_PLACES * COMPUTE_WARPS
        return hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, places)

    def storage(self) -> cute.struct:
        """The shared memory of a CTA."""

        def elements(layout: cute.ComposedLayout) -> type:
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        def barriers(stages: int) -> type:
            return cute.struct.MemRange[cutlass.Int64, 2 * stages]

        def words(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[cutlass.Int32, count], 16]

        def floats(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[cutlass.Float32, count], 128]

        @cute.struct
        class Storage:
            q: elements(self.layout_q())
            do: elements(self.layout_do())
            k: elements(self.layout_k())
            v: elements(self.layout_v())
            ds: elements(self.layout_ds())
            dq: floats(self.bytes_dq // 4)
            stats: floats(self.stats_words * self.stages_q)
            bits: words(COLUMNS.num_words * self.tile_n)
            ring: words(WORDS * RING_STAGES)
            walk: words(WORDS * WALK_STAGES)
            predecessors: words(CHUNK * WALK_STAGES)
            q_barriers: barriers(self.stages_q)
            do_barriers: barriers(self.stages_do)
            s_barriers: barriers(1)
            dp_barriers: barriers(1)
            dq_barriers: barriers(1)
            sums_barriers: barriers(1)
            out_barriers: barriers(1)
            bits_barriers: barriers(1)
            ring_barriers: barriers(RING_STAGES)
            walk_barriers: barriers(WALK_STAGES)
            kv_barriers: barriers(1)
            tmem: cutlass.Int32

        return Storage

    def channels(
        self, storage: Any, predecessors: cute.Tensor | None, lengths: Lengths
    ) -> Channels:
        """The channels of a CTA, initialised by its first warp; predecessors: see `WalkRing`."""
        # load, mma and send, and those of many warps
        num_walkers = 3 + COMPUTE_WARPS + REDUCE_WARPS + NUM_MASK_WARPS
        ring, walk = scheduler_rings(
            storage,
            num_walkers,
            0,
            ascending=True,
            uncut_first=False,
            predecessors=predecessors,
            fields=lengths.work_fields,
            chunk_fields=lengths.chunk_fields,
        )

        def channel(barriers: Any, producers: int, consumers: int, stages: int = 1) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, producers, consumers)

        return Channels(
            # products, and who reads the statistics
            q=channel(storage.q_barriers, 1, 1 + COMPUTE_WARPS, self.stages_q),
            do=channel(storage.do_barriers, 1, 1, self.stages_do),
            kv=channel(storage.kv_barriers, COMPUTE_WARPS, 1) if self.holds_keys else None,
            s=channel(storage.s_barriers, 1, COMPUTE_WARPS),
            dp=channel(storage.dp_barriers, 1, COMPUTE_WARPS),
            dq=channel(storage.dq_barriers, 1, REDUCE_WARPS),
            sums=channel(storage.sums_barriers, 1, COMPUTE_WARPS),
            out=channel(storage.out_barriers, REDUCE_WARPS, 1),
            bits=channel(storage.bits_barriers, NUM_MASK_WARPS, COMPUTE_WARPS),
            ring=ring,
            walk=walk,
        )

    def tiles(self, storage: Any) -> Tiles:
        tensor = partial(swizzled, dtype=self.dtype)
        return Tiles(
            q=tensor(storage.q, self.layout_q()),
            do=tensor(storage.do, self.layout_do()),
            k=tensor(storage.k, self.layout_k()),
            v=tensor(storage.v, self.layout_v()),
            ds=tensor(storage.ds, self.layout_ds()),
            stored=tensor(storage.ds, self.layout_stored()),
            dq=storage.dq.get_tensor(cute.make_layout(self.bytes_dq // 4)),
            stats=storage.stats.get_tensor(cute.make_layout((self.stats_words, self.stages_q))),
            bits=storage.bits.get_tensor(cute.make_layout((COLUMNS.num_words, self.tile_n))),
        )

    def products(self, tiles: Tiles) -> Products:
        scores, of_dq = self.mma_scores(), self.mma_dq()
        by_d, by_dv = self.mma_sums(self.tile_d), self.mma_sums(self.tile_dv)
        shape_s, shape_d, shape_dv = (ROWS, self.tile_m), (ROWS, self.tile_d), (ROWS, self.tile_dv)
        return Products(
            s=umma.accumulator(scores, shape_s, self.column_s),
            s_k=self._keys(scores, tiles.k, self.column_k, self.tile_d),
            s_q=umma.smem_operand_b(scores, tiles.q),
            dp=umma.accumulator(scores, shape_s, self.column_dp),
            dp_v=self._keys(scores, tiles.v, self.column_v, self.tile_dv),
            dp_do=umma.smem_operand_b(scores, tiles.do),
            dv=umma.accumulator(by_dv, shape_dv, self.column_dv),
            p=self._halves(by_dv, self.tile_dv, self.column_s),
            dv_do=umma.smem_operand_b(by_dv, umma.transposed(tiles.do)),
            dk=umma.accumulator(by_d, shape_d, self.column_dk),
            ds=self._halves(by_d, self.tile_d, self.column_dp),
            dk_q=umma.smem_operand_b(by_d, umma.transposed(tiles.q)),
            dq=umma.accumulator(of_dq, shape_d, self.column_dq),
            dq_ds=umma.smem_operand_a(of_dq, tiles.ds),
            dq_k=umma.smem_operand_b(of_dq, umma.transposed(tiles.k)),
        )

    def _keys(self, mma: cute.TiledMma, smem: cute.Tensor, first: int, cols: int) -> cute.Tensor:
        """K or V as operand A of the scores."""
        if self.holds_keys:
            layout = blackwell.make_smem_layout_a(mma, (ROWS, self.tile_m, cols), self.dtype, 1)
            return umma.operand_a(mma, layout, self.dtype, first)
        return umma.smem_operand_a(mma, smem)[None, None, None, 0]

    def _halves(self, mma: cute.TiledMma, n: int, first: int) -> tuple[cute.Tensor, ...]:
        """P or dS in TMEM, of both halves of the queries."""
        layout = blackwell.make_smem_layout_a(mma, (ROWS, n, QUERIES), self.dtype, 1)
        return tuple(
            umma.operand_a(mma, layout, self.dtype, first + half * QUERIES)
            for half in range(HALVES)
        )


def _rounded(dim: int) -> int:
    return next(cols for cols in TILE_DIMS if cols >= min(dim, TILE_DIMS[-1]))


class KeyElements:
    """`Elements` for a thread that has one key, and its half of a block's queries."""

    num_rows = lanes_per_row = 1

    def row_of(self, thread: Int32, r: int) -> Int32:
        return thread

    def first_col_of(self, thread: Int32) -> Int32:
        return Int32(0)

    def col_offset(self, c: int) -> int:
        return c

    def is_set(self, bits: tuple, r: int, c: int):
        return bit_tile.is_set(bits[c // bit_tile.WORD], c % bit_tile.WORD)

    def keep_pair(self, words: cute.Tensor, dtype: type, r: int, c: int, p, q) -> None:
        words[c // 2] = round_pair(p, q, dtype)


ELEMENTS = KeyElements()
