"""Static facts of the Blackwell backward: tiles, TMEM, shared memory, warps and registers.

Like `flash_fwd_traits`: Python ints decide; layouts and MMA atoms are made where they are needed.
"""

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    scheduler_rings,
    swizzled,
)
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.row_blocks import PART_OF_HALF, stats_words
from flash_mask_cute.core.walk_ring import CHUNK, WalkRing
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_registers import (
    HALVES,
    MORE_FOR_SCORES,
    MOST_HELD,
    NUM_WARPGROUPS,
    PAIR_REGISTERS,
    REGISTERS,
    WIDE_REGISTERS,
    Registers,
)
from flash_mask_cute.sm100.umma import NUM_COLUMNS, ROWS

TILE_N = ROWS
# queries of a block, up to MAX_DIM columns and above
TILE_M, WIDE_TILE_M = ROWS, ROWS // 2
MAX_DIM = 128
# columns of tiles: heads of other dimensions are rounded up
TILE_DIMS = (64, 96, 128, 192, 256)
# columns of the tiles of a pair of CTAs
PAIR_TILES = (MAX_DIM, MAX_DIM), (192, MAX_DIM)
# columns that leave in one part at most: of blocks of 64 queries, and where memory is short
MOST_OF_PART, LEAST_OF_PART = 64, 32
# dK and dV leave by so many keys and columns, from two places of each warp by turns
STORED_ROWS, STORED_COLS = 32, 32
# bytes of shared memory kept for barriers, rings and bits
SMEM_BOOKKEEPING = 6144


class Part(Enum):
    """The gradients that a launch computes: all, or those of the values, or of queries and keys."""

    ALL = "all"
    VALUES = "values"
    KEYS = "keys"


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
    """The channels between the roles of a CTA (see `flash_bwd`); kv: if `BwdTraits.holds_keys`; dp,
    dq and out: if `BwdTraits.makes_dk`. stats: q, but for pairs. The last ones are those of a pair:
    half of the columns of Q, dS in shared memory, and what is there in the CTA that does not issue
    products."""

    q: Channel
    stats: Channel
    do: Channel
    kv: Channel | None
    s: Channel
    dp: Channel | None
    dq: Channel | None
    sums: Channel
    out: Channel | None
    bits: Channel
    ring: WorkRing
    walk: WalkRing
    q_columns: Channel | None = None
    ds: Channel | None = None
    q_there: Channel | None = None
    do_there: Channel | None = None
    q_columns_there: Channel | None = None
    ds_there: Channel | None = None


class Tiles(NamedTuple):
    """The contents of shared memory: see `BwdTraits` for the layouts.

    ds: (queries, keys). stored: dK and dV before their store, in the place of ds. dq: fp32 sums of
    a part. stats: `core.row_blocks.stats_words` of a query block. bits: of a partial block.
    """

    q: cute.Tensor  # (tile_m, tile_d, stages_q)
    do: cute.Tensor  # (tile_m, tile_dv, stages_do)
    k: cute.Tensor  # (128, tile_d, 1)
    v: cute.Tensor | None  # (128, tile_dv, 1)
    ds: cute.Tensor  # (tile_m queries, 128 keys, 1); of a pair: see `BwdTraits.layout_ds`
    stored: cute.Tensor  # (32 keys, 32 columns, places of warps)
    dq: cute.Tensor | None  # (values of a part,)
    stats: cute.Tensor  # (stats_words, stages_q)
    bits: cute.Tensor  # (words, tile_n)
    words: None = None
    # of a pair: half of the columns of all queries of a block, and of the keys of both CTAs
    q_columns: cute.Tensor | None = None  # (128, 64 or 96, 1)
    do_columns: cute.Tensor | None = None  # (128, 64, 1)
    k_columns: cute.Tensor | None = None  # see `BwdTraits.layout_key_columns`


@dataclass(frozen=True)
class BwdTraits:
    """Shape of one CTA's work: 128 keys, and a walk over blocks of tile_m queries.

    S^T and dP^T have keys in lanes, so P^T and dS^T overwrite them in TMEM and are operands of dV
    and dK. dS also goes to shared memory, for dQ.

    stages_q, stages_do: blocks of queries and of their output gradients in flight. has_marks: rows
    of queries that see nothing may be marked to be cleared. has_reference: the statistics of a
    query have a third number, for scores of any magnitude. part: the gradients that a launch
    computes (`launches`). cta_pair: two CTAs compute products together (`flash_bwd_pairs`).
    stages_kv, value_cols: options of Hopper, not supported here.
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
    part: Part = Part.ALL

    # heads of a group pass by one after the other
    packed_heads = group_size = 1
    tile_n = TILE_N
    num_threads = NUM_WARPGROUPS * THREADS_PER_WARPGROUP

    @property
    def tile_d(self) -> int:
        return _rounded(self.head_dim)

    @property
    def tile_dv(self) -> int:
        least = MAX_DIM if self.is_wide_pair else 0
        return _rounded(max(self.head_dim_v, least))

    @property
    def is_wide(self) -> bool:
        return max(self.head_dim, self.head_dim_v) > MAX_DIM

    @property
    def is_wide_pair(self) -> bool:
        """Whether a pair has wide heads. TMEM and shared memory are short: dP lies over half of S,
        dQ over both, and dS in shared memory over dO and Q by rows, when products have read
        them."""
        return self.is_wide and self.cta_pair

    @property
    def halves_blocks(self) -> bool:
        """Whether blocks have 64 queries."""
        return self.is_wide and not self.cta_pair

    @property
    def queries(self) -> int:
        """Queries of a block that a compute thread has."""
        return self.tile_m // HALVES

    @property
    def columns(self) -> umma.RowColumns:
        """Of a row of the bit tile: the queries of a block."""
        return umma.RowColumns(self.tile_m // bit_tile.WORD)

    @property
    def group(self) -> umma.Group:
        return umma.Group(2 if self.cta_pair else 1)

    @property
    def cluster_tile_n(self) -> int:
        """Keys that walk over the queries together."""
        return self.tile_n * self.group.size

    @property
    def rows_of_cta(self) -> int:
        """Queries of a block that a CTA loads for S and dP, and whose dQ it sums."""
        return self.tile_m // self.group.size

    @property
    def columns_of_cta(self) -> int:
        """Columns of Q, and of the keys, that a CTA of a pair loads for dK and dQ."""
        return self.tile_d // self.group.size

    @property
    def value_columns_of_cta(self) -> int:
        """Columns of dO that a CTA of a pair loads for dV."""
        return self.tile_dv // self.group.size

    # -- launches -------------------------------------------------------------------------------

    def launches(self) -> tuple["BwdTraits", ...]:
        """The traits of each launch. If dV, dK and dQ do not fit into TMEM together, one launch
        computes dV, and another one dK and dQ, each from S of its own."""
        if self.part != Part.ALL or self.column_dq is not None:
            return (self,)
        values = replace(self, part=Part.VALUES, stages_q=2, stages_do=2)
        return values, replace(self, part=Part.KEYS)

    @property
    def makes_dv(self) -> bool:
        return self.part != Part.KEYS

    @property
    def makes_dk(self) -> bool:
        """Whether dK and dQ are computed."""
        return self.part != Part.VALUES

    def registers(self, needs_more: bool) -> Registers:
        """needs_more: scores have a soft cap, or lists beside intervals or in a fixed order."""
        if self.halves_blocks:
            return WIDE_REGISTERS
        if self.cta_pair:
            return PAIR_REGISTERS
        return MORE_FOR_SCORES if needs_more else REGISTERS

    # -- TMEM -----------------------------------------------------------------------------------
    # P of a half of the queries lies over that half's columns of S, two to a column, and dS over
    # those of dP: a warp writes only where it has read itself.

    @property
    def column_s(self) -> int:
        """Of wide heads S and dP lie behind the sums, so that dQ may begin in their place and be
        wider."""
        return self.makes_dv * self.tile_dv + self.makes_dk * self.tile_d if self.is_wide else 0

    @property
    def column_dp(self) -> int:
        # of a wide pair, over the second half of S, which has been read then
        return self.column_s + self.tile_m // (2 if self.is_wide_pair else 1)

    @property
    def column_dv(self) -> int:
        return 0 if self.is_wide else 2 * self.tile_m

    @property
    def column_dk(self) -> int:
        return self.column_dv + self.makes_dv * self.tile_dv

    @property
    def widths_dq(self) -> tuple[int, ...]:
        """Columns of each product of dQ. An accumulator of 64 rows has 16 of 32 lanes. So of 64
        queries, there are two in the same columns of TMEM, which share the columns of dQ."""
        if not self.halves_blocks or self.tile_d <= ROWS // 2:
            return (self.tile_d,)
        first = ROWS if self.tile_d > ROWS else ROWS // 2
        return first, self.tile_d - first

    @property
    def column_dq(self) -> int | None:
        """The TMEM column of dQ: its own, or that of dP, whose dS has already been multiplied by
        then, or that of S; None if it does not fit with dV and dK."""
        if self.is_wide_pair:
            return self.column_s
        behind = self.column_dp + self.tile_m if self.is_wide else self.column_dk + self.tile_d
        places = behind, self.column_dp, self.column_s
        return next((x for x in places if x + self.widths_dq[0] <= NUM_COLUMNS), None)

    @property
    def dq_shares(self) -> bool:
        """Whether dQ lies over dP."""
        return self.column_dq == self.column_dp

    @property
    def dq_over_scores(self) -> bool:
        return self.makes_dk and self.column_dq == self.column_s

    @property
    def is_serial(self) -> bool:
        """Whether the products of a block are issued together: S of the next block would overwrite
        dQ of this one, or has no second place for its queries."""
        return self.part != Part.ALL or self.dq_over_scores

    @property
    def values_lag(self) -> bool:
        """Whether dV of a block is issued behind dP of the block. That needs room for dQ beside dP:
        dP then waits for nothing but its operands."""
        return not (self.dq_shares or self.is_serial)

    @property
    def holds_keys(self) -> bool:
        """Whether TMEM has columns left for K and V, two values per column. S and dP then read half
        as much shared memory."""
        has_room = self.values_lag and not self.is_wide
        return has_room and self.column_v + self.tile_dv // 2 <= NUM_COLUMNS

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
        width = LEAST_OF_PART
        if self.cta_pair:
            # of each half of the columns, which are in lanes 0 to 63 and 64 to 127
            return (2 * PART_OF_HALF,) * (self.tile_d // (2 * PART_OF_HALF))
        if self.tile_d == MOST_OF_PART or (self.is_wide and self.part == Part.ALL):
            width = MOST_OF_PART if self.tile_d % MOST_OF_PART == 0 else LEAST_OF_PART
        return (width,) * (self.tile_d // width)

    @property
    def held_parts(self) -> int:
        """The last so many parts of dQ that a thread holds in registers together, so that TMEM is
        free before any of them is staged."""
        # of many small parts, more would spill
        most = MOST_HELD // 2 if self.part == Part.KEYS else MOST_HELD
        held_by_thread = max(self.parts_dq) // (ROWS // self.rows_of_cta)
        return min(len(self.parts_dq), most // held_by_thread)

    def size_dq(self, width: int) -> int:
        """Values of a part of dQ."""
        return self.rows_of_cta * width

    @property
    def store_places(self) -> int:
        """Places of a warp from which dK and dV are stored: as many as the memory of dS has."""
        size = STORED_ROWS * STORED_COLS * COMPUTE_WARPS
        return min(2, self.tile_m * self.tile_n // size)

    @property
    def bytes_q(self) -> int:
        return self.rows_of_cta * self.tile_d * 2

    @property
    def bytes_do(self) -> int:
        return self.rows_of_cta * self.tile_dv * 2

    @property
    def bytes_with_q(self) -> int:
        """Bytes of keys, which come with the Q of a work tile's first block, and of values with its
        dO."""
        return self.tile_n * self.tile_d * 2

    @property
    def bytes_with_do(self) -> int:
        return self.makes_dk * self.tile_n * self.tile_dv * 2

    @property
    def keys_of_ds(self) -> int:
        """Keys that dS in shared memory has a place for. In a pair these are those of both CTAs,
        and its own again, whose dS it sends to the other one."""
        return self.cluster_tile_n + (self.tile_n if self.cta_pair else 0)

    @property
    def bytes_ds(self) -> int:
        """Of memory of its own."""
        return 0 if self.is_wide_pair else self.rows_of_cta * self.keys_of_ds * 2

    @property
    def bytes_dq(self) -> int:
        return self.makes_dk * self.size_dq(max(self.parts_dq)) * 4

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
        """Of the launch that needs the most."""
        return max(x._smem_bytes for x in self.launches())

    @property
    def _smem_bytes(self) -> int:
        # a pair has Q, dO and K twice, by rows and by columns
        ways = self.group.size
        return (
            self.bytes_with_q * ways
            + self.bytes_with_do
            + self.stages_q * (self.bytes_q + self.num_stats * self.tile_m * 4)
            + self.stages_do * self.bytes_do * ways
            + self.bytes_ds
            + self.bytes_dq
            + SMEM_BOOKKEEPING
        )

    def infeasible(self) -> str | None:
        """The reason why a kernel with these traits cannot run, or None."""
        dims = f"{self.head_dim}/{self.head_dim_v}"
        if max(self.head_dim, self.head_dim_v) > TILE_DIMS[-1]:
            return f"head_dim and head_dim_v go up to {TILE_DIMS[-1]} on Blackwell, got {dims}"
        tile_m = WIDE_TILE_M if self.halves_blocks else TILE_M
        if self.tile_m != tile_m:
            return f"tile_m must be {tile_m} on Blackwell for {dims}, got {self.tile_m}"
        if self.stages_q != 2 and not self.launches()[-1].is_serial:
            # Q of a block is multiplied once more when S of the next one has been
            return f"stages_q must be 2 on Blackwell for {dims}, got {self.stages_q}"
        for name in ("stages_q", "stages_do"):
            if getattr(self, name) not in (1, 2):
                return f"{name} must be 1 or 2, got {getattr(self, name)}"
        if self.cta_pair and (self.tile_d, self.tile_dv) not in PAIR_TILES:
            return (
                "cta_pair=True is for head_dim and head_dim_v from 97 to 128, or head_dim from 129 "
                f"to 192 and head_dim_v up to 128, on Blackwell, got {dims}"
            )
        if self.cta_pair and self.stages_do != 1:
            return f"stages_do must be 1 with cta_pair=True on Blackwell, got {self.stages_do}"
        for name, value in (("stages_kv", 1), ("value_cols", 0)):
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
        rows: int = ROWS,
    ) -> cute.TiledMma:
        more = cutlass.Float32, self.group.kind, (rows, n), source
        return blackwell.make_trivial_tiled_mma(self.dtype, self.dtype, a_major, b_major, *more)

    def mma_scores(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: keys by queries."""
        source = tcgen05.OperandSource.TMEM if self.holds_keys else tcgen05.OperandSource.SMEM
        more = self.tile_m, source, self.group.rows
        return self._mma(OperandMajorMode.K, OperandMajorMode.K, *more)

    def mma_sums(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: keys by n columns, the scores in TMEM."""
        more = n, tcgen05.OperandSource.TMEM, self.group.rows
        return self._mma(OperandMajorMode.K, OperandMajorMode.MN, *more)

    def mma_dq(self, n: int) -> cute.TiledMma:
        """dQ = dS K: queries by n columns."""
        return self._mma(OperandMajorMode.MN, OperandMajorMode.MN, n, rows=self.tile_m)

    def _rows(self, rows: int, cols: int, stages: int) -> cute.ComposedLayout:
        """(rows, cols, stages) with cols contiguous."""
        tile = (ROWS, rows, cols)
        return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, stages)

    def layout_q(self) -> cute.ComposedLayout:
        stages = 1 if self.cta_pair else self.stages_q
        return self._rows(self.rows_of_cta, self.tile_d, stages)

    def layout_do(self) -> cute.ComposedLayout:
        return self._rows(self.rows_of_cta, self.tile_dv, self.stages_do)

    def layout_k(self) -> cute.ComposedLayout:
        return self._rows(self.tile_n, self.tile_d, 1)

    def layout_v(self) -> cute.ComposedLayout:
        return self._rows(self.tile_n, self.tile_dv, 1)

    def layout_columns(self) -> cute.ComposedLayout:
        """(128, columns of a CTA, 1): of Q."""
        return self._rows(ROWS, self.columns_of_cta, 1)

    @property
    def key_columns(self) -> int:
        """Columns of keys that lie together in lines: a product of dQ reads those of both CTAs
        before the next columns."""
        return next(cols for cols in (64, 32) if self.columns_of_cta % cols == 0)

    def layout_key_columns(self) -> cute.ComposedLayout:
        """(128 keys, `key_columns`, (CTAs, parts of a CTA's columns))."""
        parts = self.columns_of_cta // self.key_columns
        return self._rows(ROWS, self.key_columns, self.group.size * parts)

    def layout_value_columns(self) -> cute.ComposedLayout:
        """(128, columns of a CTA, 1): of dO."""
        return self._rows(ROWS, self.value_columns_of_cta, 1)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`."""
        return (
            (self.layout_q(), self.rows_of_cta, self.tile_d),
            (self.layout_do(), self.rows_of_cta, self.tile_dv),
            (self.layout_k(), self.tile_n, self.tile_d),
            (self.layout_v(), self.tile_n, self.tile_dv),
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """(queries, keys, 1), a key's queries contiguous; in a pair half of the queries, and
        `keys_of_ds`."""
        tile = (ROWS, self.rows_of_cta, self.keys_of_ds)
        return hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.dtype, 1)

    def layout_stored(self) -> cute.ComposedLayout:
        """(32 keys, 32 columns, places of warps)."""
        tile = (STORED_ROWS, STORED_COLS)
        places = self.store_places * COMPUTE_WARPS
        return hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, places)

    def storage(self) -> cute.struct:
        """The shared memory of a CTA."""

        def elements(layout: cute.ComposedLayout, is_there: bool = True) -> type:
            size = cute.cosize(layout) if is_there else 0
            return cute.struct.Align[cute.struct.MemRange[self.dtype, size], 1024]

        def barriers(stages: int) -> type:
            return cute.struct.MemRange[cutlass.Int64, 2 * stages]

        def words(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[cutlass.Int32, count], 16]

        def floats(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[cutlass.Float32, count], 128]

        @cute.struct
        class Storage:
            if self.is_wide_pair:
                # dS lies over these, in this order
                do: elements(self.layout_do())
                do_columns: elements(self.layout_value_columns())
            q: elements(self.layout_q())
            do: elements(self.layout_do())
            k: elements(self.layout_k())
            v: elements(self.layout_v(), self.makes_dk)
            q_columns: elements(self.layout_columns(), self.cta_pair)
            do_columns: elements(self.layout_value_columns(), self.cta_pair)
            k_columns: elements(self.layout_key_columns(), self.cta_pair)
            ds: elements(self.layout_ds(), not self.is_wide_pair)
            dq: floats(self.bytes_dq // 4)
            stats: floats(self.stats_words * self.stages_q)
            bits: words(self.columns.num_words * self.tile_n)
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
            stats_barriers: barriers(self.stages_q)
            q_columns_barriers: barriers(1)
            ds_barriers: barriers(1)
            there_barriers: barriers(4)
            tmem: cutlass.Int32

        return Storage

    def channels(
        self, storage: Any, predecessors: cute.Tensor | None, lengths: Lengths
    ) -> Channels:
        """The channels of a CTA, initialised by its first warp; predecessors: see `WalkRing`."""
        group = self.group
        # load and mma, and those of many warps; with dQ also send and reduce
        num_walkers = 2 + COMPUTE_WARPS + NUM_MASK_WARPS + self.makes_dk * (1 + REDUCE_WARPS)
        ring, walk = scheduler_rings(
            storage,
            (num_walkers, 0),
            ascending=True,
            uncut_first=False,
            predecessors=predecessors,
            fields=lengths.work_fields,
            chunk_fields=lengths.chunk_fields,
        )

        def channel(barriers: Any, producers: int, consumers: int, stages: int = 1) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, producers, consumers)

        def multiplied(barriers: Any, consumers: int) -> Channel:
            count = consumers * group.size
            return Channel.create(barriers.data_ptr(), 1, 1, count, group.home)

        dp = dq = out = None
        if self.makes_dk:
            dp = multiplied(storage.dp_barriers, COMPUTE_WARPS)
            dq = multiplied(storage.dq_barriers, REDUCE_WARPS)
            out = channel(storage.out_barriers, REDUCE_WARPS, 1)
        of_pair: dict[str, Channel] = {}
        if self.cta_pair:
            q = channel(storage.q_barriers, 1, 1)
            # who clears marked rows reads them, too
            readers = COMPUTE_WARPS + self.has_marks
            stats = channel(storage.stats_barriers, 1, readers, self.stages_q)
            of_pair["q_columns"] = channel(storage.q_columns_barriers, 1, 1)
            # the warps of one half, and the bytes of the other CTA's
            of_pair["ds"] = channel(storage.ds_barriers, COMPUTE_WARPS // HALVES, 1)
            first = storage.there_barriers.data_ptr()
            for i, name in enumerate(("q_there", "do_there", "q_columns_there", "ds_there")):
                of_pair[name] = Channel.create(first + 2 * i, 1, 1, 1, group.home)
        else:
            # products, and who reads the statistics
            q = stats = channel(storage.q_barriers, 1, 1 + COMPUTE_WARPS, self.stages_q)
        return Channels(
            q=q,
            stats=stats,
            do=channel(storage.do_barriers, 1, 1, self.stages_do),
            kv=channel(storage.kv_barriers, COMPUTE_WARPS, 1) if self.holds_keys else None,
            s=multiplied(storage.s_barriers, COMPUTE_WARPS),
            dp=dp,
            dq=dq,
            sums=multiplied(storage.sums_barriers, COMPUTE_WARPS),
            out=out,
            bits=channel(storage.bits_barriers, NUM_MASK_WARPS, COMPUTE_WARPS),
            ring=ring,
            walk=walk,
            **of_pair,
        )

    def memory_ds(self, storage: Any) -> Any:
        """Of a wide pair, dS begins in the place of dO."""
        return storage.do if self.is_wide_pair else storage.ds

    def tiles(self, storage: Any) -> Tiles:
        tensor = partial(swizzled, dtype=self.dtype)
        dq = None
        if self.makes_dk:
            dq = storage.dq.get_tensor(cute.make_layout(self.bytes_dq // 4))
        of_pair = {}
        if self.cta_pair:
            of_pair = {
                "q_columns": tensor(storage.q_columns, self.layout_columns()),
                "do_columns": tensor(storage.do_columns, self.layout_value_columns()),
                "k_columns": tensor(storage.k_columns, self.layout_key_columns()),
            }
        return Tiles(
            q=tensor(storage.q, self.layout_q()),
            do=tensor(storage.do, self.layout_do()),
            k=tensor(storage.k, self.layout_k()),
            v=tensor(storage.v, self.layout_v()) if self.makes_dk else None,
            ds=tensor(self.memory_ds(storage), self.layout_ds()),
            stored=tensor(self.memory_ds(storage), self.layout_stored()),
            dq=dq,
            stats=storage.stats.get_tensor(cute.make_layout((self.stats_words, self.stages_q))),
            bits=storage.bits.get_tensor(cute.make_layout((self.columns.num_words, self.tile_n))),
            **of_pair,
        )


def _rounded(dim: int) -> int:
    return next(cols for cols in TILE_DIMS if cols >= min(dim, TILE_DIMS[-1]))
