"""Static facts of the Blackwell backward: tiles, TMEM, shared memory, warps and registers."""

from dataclasses import dataclass, replace
from enum import Enum, IntEnum

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import SMEM_CAPACITY, THREADS_PER_WARPGROUP
from flash_mask_cute.core.row_blocks import PART_OF_HALF, stats_words
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
PAIR_TILES = (MAX_DIM, MAX_DIM), (192, MAX_DIM), (256, 256)
# columns that leave in one part at most: of blocks of 64 queries, and where memory is short
MOST_OF_PART, LEAST_OF_PART = 64, 32
# dK and dV leave by so many keys and columns, from two places of each warp by turns
STORED_ROWS, STORED_COLS = 32, 32
# columns of a line that is swizzled as a whole, with 16 bits each
SWIZZLED_COLUMNS = 64
# bytes of shared memory kept for barriers, rings and bits
SMEM_BOOKKEEPING = 6144


class GradientPart(Enum):
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


@dataclass(frozen=True)
class BwdTraits:
    """Shape of one CTA's work: 128 keys, and a walk over blocks of tile_m queries.

    stages_q, stages_do: blocks of queries and of their output gradients in flight. has_marks: rows
    of queries that see nothing may be marked to be cleared. has_reference: the statistics of a
    query have a third number, for scores of any magnitude. stages_kv, value_cols: of Hopper.
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
    part: GradientPart = GradientPart.ALL

    # heads of a group pass by one after the other
    packed_heads = group_size = 1
    num_threads = NUM_WARPGROUPS * THREADS_PER_WARPGROUP

    @property
    def tile_d(self) -> int:
        return _rounded(self.head_dim)

    @property
    def tile_dv(self) -> int:
        least = MAX_DIM if self.is_wide_pair else 0
        return _rounded(max(self.head_dim_v, least))

    @property
    def tile_n(self) -> int:
        """Keys of a CTA."""
        return TILE_N // 2 if self.is_folded else TILE_N

    @property
    def is_wide(self) -> bool:
        return max(self.head_dim, self.head_dim_v) > MAX_DIM

    @property
    def is_wide_pair(self) -> bool:
        """Whether a pair has wide heads. P and later dS lie over half of S, dP over the other half,
        dQ over dP and some of S, and dS in shared memory over dO and Q by rows."""
        return self.is_wide and self.cta_pair and not self.is_folded

    @property
    def is_folded(self) -> bool:
        """Whether CTAs of a pair have 64 keys, so that sums of 256 columns fit into TMEM. Lanes 64
        to 127 have the second half of the columns of results. P and dS are operands in shared
        memory. Q has one place, which holds it by rows and then by columns; so does dO."""
        return self.cta_pair and self.tile_d == TILE_DIMS[-1]

    @property
    def halves_blocks(self) -> bool:
        """Whether blocks have 64 queries."""
        return self.is_wide and not self.cta_pair

    @property
    def queries(self) -> int:
        """Queries of a block that a compute thread has."""
        return self.tile_m // HALVES // (2 if self.is_folded else 1)

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
    def box_rows(self) -> int:
        """Queries of a box of Q and dO by rows. In a wide pair each CTA has every second chunk of
        32. Then the second chunks of all warpgroups are the half of S that dP overwrites."""
        return umma.CHUNK if self.is_wide_pair else self.rows_of_cta

    @property
    def box_columns(self) -> int | None:
        """Columns of a box of Q and dO by rows, if not all."""
        return SWIZZLED_COLUMNS if self.is_folded else None

    def key_box_columns(self, columns: int) -> int:
        """The same of K or V by rows, for so many columns."""
        has_many = self.cta_pair or self.is_wide
        return SWIZZLED_COLUMNS if has_many and columns % SWIZZLED_COLUMNS == 0 else columns

    def query_of(self, row: Int32 | int, rank: Int32 | int) -> Int32 | int:
        """The query of a block that a CTA has in a row of Q and dO by rows."""
        if not self.is_wide_pair:
            return rank * self.rows_of_cta + row
        box, in_box = row // self.box_rows, row % self.box_rows
        return (box * self.group.size + rank) * self.box_rows + in_box

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
        """The traits of each launch: of dV, and of dK and dQ, if TMEM has no room for all."""
        if self.part != GradientPart.ALL or self.column_dq is not None:
            return (self,)
        values = replace(self, part=GradientPart.VALUES, stages_q=2, stages_do=2)
        return values, replace(self, part=GradientPart.KEYS)

    @property
    def makes_dv(self) -> bool:
        return self.part != GradientPart.KEYS

    @property
    def makes_dk(self) -> bool:
        """Whether dK and dQ are computed."""
        return self.part != GradientPart.VALUES

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
    def half_step(self) -> int:
        """Columns of S and dP from a chunk of 32 queries to that of the other half."""
        return umma.CHUNK if self.is_wide_pair else self.queries

    @property
    def chunk_step(self) -> int:
        """Columns of S and dP from a chunk of 32 queries to the next one of its half."""
        return HALVES * umma.CHUNK if self.is_wide_pair else umma.CHUNK

    def _taken(self, columns: int) -> int:
        """Columns of TMEM that so many columns of a result take."""
        return columns // 2 if self.is_folded else columns

    @property
    def column_s(self) -> int:
        """For wide heads S and dP lie after the sums, so that dQ may begin in their place."""
        sums = self.makes_dv * self.tile_dv + self.makes_dk * self.tile_d
        return self._taken(sums) if self.is_wide else 0

    @property
    def column_dp(self) -> int:
        # of a wide pair, over the second half of S, which is in registers then
        half = self.tile_m // 2
        return self.column_s + (half if self.is_wide_pair else self._taken(self.tile_m))

    @property
    def column_dv(self) -> int:
        return 0 if self.is_wide else 2 * self.tile_m

    @property
    def column_dk(self) -> int:
        return self.column_dv + self._taken(self.makes_dv * self.tile_dv)

    @property
    def widths_dq(self) -> tuple[int, ...]:
        """Columns of each product of dQ. An accumulator of 64 rows has 16 of 32 lanes, so two of
        them share the columns of TMEM."""
        if not self.halves_blocks or self.tile_d <= ROWS // 2:
            return (self.tile_d,)
        first = ROWS if self.tile_d > ROWS else ROWS // 2
        return first, self.tile_d - first

    @property
    def column_dq(self) -> int | None:
        """The TMEM column of dQ: its own, or that of dP or S; None if it does not fit."""
        if self.is_wide_pair or self.is_folded:
            # of a wide pair with as few columns of S as possible
            return NUM_COLUMNS - self.tile_d // 2
        behind = self.column_dp + self.tile_m if self.is_wide else self.column_dk + self.tile_d
        places = behind, self.column_dp, self.column_s
        return next((x for x in places if x + self.widths_dq[0] <= NUM_COLUMNS), None)

    @property
    def dq_shares(self) -> bool:
        """Whether dQ lies over dP."""
        return self.column_dq == self.column_dp

    @property
    def dq_over_scores(self) -> bool:
        """Whether dQ lies over S; of a wide pair, over a part of it."""
        return self.makes_dk and (self.is_wide_pair or self.column_dq == self.column_s)

    @property
    def is_serial(self) -> bool:
        """Whether the products of a block are issued together: S of the next block would overwrite
        dQ of this one, or has no second place for its queries."""
        return self.part != GradientPart.ALL or self.dq_over_scores or self.is_folded

    @property
    def values_lag(self) -> bool:
        """Whether dV of a block is issued behind its dP, which needs room for dQ beside dP."""
        return not (self.dq_shares or self.is_serial)

    @property
    def holds_keys(self) -> bool:
        """Whether TMEM has room for K and V, two values a column: S and dP then read half."""
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
        if self.tile_d == MOST_OF_PART or (self.is_wide and self.part == GradientPart.ALL):
            width = MOST_OF_PART if self.tile_d % MOST_OF_PART == 0 else LEAST_OF_PART
        return (width,) * (self.tile_d // width)

    @property
    def held_parts(self) -> int:
        """The last so many parts of dQ that a thread holds in registers together."""
        # of many small parts, more would spill
        most = MOST_HELD // 2 if self.part == GradientPart.KEYS else MOST_HELD
        held_by_thread = max(self.parts_dq) // (ROWS // self.rows_of_cta)
        return min(len(self.parts_dq), most // held_by_thread)

    @property
    def parts_over_scores(self) -> int:
        """Of a wide pair, the first so many parts of dQ lie over S."""
        shared = self.column_s + self.tile_m - self.column_dq
        return shared // (self.parts_dq[0] // 2)

    def size_dq(self, width: int) -> int:
        """Values of a part of dQ."""
        return self.rows_of_cta * width

    @property
    def store_places(self) -> int:
        """Places of a warp from which dK and dV are stored: as many as the memory of dS has."""
        size = STORED_ROWS * STORED_COLS * COMPUTE_WARPS
        return min(2, self.tile_m * TILE_N // size)

    def stored_columns(self, dim: int) -> range:
        """First columns in TMEM of the parts of 32 of dK or dV, of dim columns."""
        return range(0, self.tile_d // 2 if self.is_folded else dim, STORED_COLS)

    @property
    def bytes_q(self) -> int:
        return self.rows_of_cta * self.tile_d * 2

    @property
    def bytes_do(self) -> int:
        return self.rows_of_cta * self.tile_dv * 2

    @property
    def bytes_with_q(self) -> int:
        """Bytes of keys, with the Q of a work tile's first block, and values, with its dO."""
        return self.tile_n * self.tile_d * 2

    @property
    def bytes_with_do(self) -> int:
        return self.makes_dk * self.tile_n * self.tile_dv * 2

    @property
    def keys_of_ds(self) -> int:
        """Keys that dS in shared memory has a place for: in a pair those of both CTAs, and its own
        again, whose dS it sends; if results are folded, its own twice, for dK."""
        again = HALVES if self.is_folded else 1
        return self.cluster_tile_n + (again * self.tile_n if self.cta_pair else 0)

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
        ways_of_queries = 1 if self.is_folded else ways
        places_q = 1 if self.is_folded else self.stages_q
        return (
            self.bytes_with_q * ways
            + self.bytes_with_do
            + places_q * self.bytes_q
            + self.stages_q * self.num_stats * self.tile_m * 4
            + self.stages_do * self.bytes_do * ways_of_queries
            + self.bytes_ds
            + self.is_folded * self.tile_n * self.tile_m * 2
            + self.bytes_dq
            + SMEM_BOOKKEEPING
        )

    def infeasible(self) -> str | None:
        dims = f"{self.head_dim}/{self.head_dim_v}"
        if max(self.head_dim, self.head_dim_v) > TILE_DIMS[-1]:
            return f"head_dim and head_dim_v go up to {TILE_DIMS[-1]} on Blackwell, got {dims}"
        if self.cta_pair and (self.tile_d, self.tile_dv) not in PAIR_TILES:
            return (
                "cta_pair=True is for head_dim and head_dim_v from 97 to 128 or above 192, or "
                "head_dim from 129 to 192 and head_dim_v up to 128, on Blackwell, got " + dims
            )
        tile_m = WIDE_TILE_M if self.halves_blocks else TILE_M
        if self.tile_m != tile_m:
            return f"tile_m must be {tile_m} on Blackwell for {dims}, got {self.tile_m}"
        if self.stages_q != 2 and not self.launches()[-1].is_serial:
            # Q of a block is multiplied once more when S of the next one has been
            return f"stages_q must be 2 on Blackwell for {dims}, got {self.stages_q}"
        for name in ("stages_q", "stages_do"):
            if getattr(self, name) not in (1, 2):
                return f"{name} must be 1 or 2, got {getattr(self, name)}"
        if self.cta_pair and self.stages_do != 1:
            return f"stages_do must be 1 with cta_pair=True on Blackwell, got {self.stages_do}"
        for name, value in (("stages_kv", 1), ("value_cols", 0)):
            if getattr(self, name) != value:
                return f"{name} must be {value} on Blackwell, got {getattr(self, name)}"
        if self.smem_bytes > SMEM_CAPACITY:
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        return None

    # -- products -------------------------------------------------------------------------------

    def mma_scores(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: keys by queries."""
        majors, shape = (OperandMajorMode.K,) * 2, (self.cluster_tile_n, self.tile_m)
        source = tcgen05.OperandSource.TMEM if self.holds_keys else tcgen05.OperandSource.SMEM
        return umma.make_mma(self.dtype, majors, self.group.kind, shape, source)

    def mma_sums(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: keys by n columns."""
        majors, shape = (OperandMajorMode.K, OperandMajorMode.MN), (self.cluster_tile_n, n)
        source = tcgen05.OperandSource.SMEM if self.is_folded else tcgen05.OperandSource.TMEM
        return umma.make_mma(self.dtype, majors, self.group.kind, shape, source)

    def mma_dq(self, n: int) -> cute.TiledMma:
        """dQ = dS K: queries by n columns."""
        majors = (OperandMajorMode.MN,) * 2
        return umma.make_mma(self.dtype, majors, self.group.kind, (self.tile_m, n))

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
        """Columns of keys in lines together: a product of dQ reads them of both CTAs."""
        return next(cols for cols in (64, 32) if self.columns_of_cta % cols == 0)

    def layout_key_columns(self) -> cute.ComposedLayout:
        """(tile_n keys, `key_columns`, (CTAs, parts of a CTA's columns))."""
        parts = self.columns_of_cta // self.key_columns
        return self._rows(self.tile_n, self.key_columns, self.group.size * parts)

    def layout_value_columns(self) -> cute.ComposedLayout:
        """(128, columns of a CTA, 1): of dO."""
        return self._rows(ROWS, self.value_columns_of_cta, 1)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`."""
        layout_q, layout_do = self.layout_q(), self.layout_do()
        if self.is_wide_pair or self.is_folded:
            layout_q, layout_do = (
                tma.rows_of_stage(tma.one_stage(x), self.box_rows, self.box_columns)
                for x in (layout_q, layout_do)
            )
        keys = []
        for layout, columns in ((self.layout_k(), self.tile_d), (self.layout_v(), self.tile_dv)):
            width = self.key_box_columns(columns)
            if width < columns:
                layout = tma.rows_of_stage(tma.one_stage(layout), self.tile_n, width)
            keys.append((layout, self.tile_n, width))
        return (
            (layout_q, self.box_rows, self.box_columns or self.tile_d),
            (layout_do, self.box_rows, self.box_columns or self.tile_dv),
            *keys,
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """(queries, keys, 1), a key's queries contiguous; in a pair half, and `keys_of_ds`."""
        tile = (ROWS, self.rows_of_cta, self.keys_of_ds)
        return hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.dtype, 1)

    def folded_operand(
        self, mma: cute.TiledMma, shape: tuple[int, int, int]
    ) -> cute.ComposedLayout:
        """P or dS in shared memory, (rows, queries or keys): lines of 32 queries of a key, so that
        a warp's lines follow each other. shape: (m, n, k) of the product."""
        m, _, k = shape
        is_dk = mma.op.a_major_mode == OperandMajorMode.K
        kind = tcgen05.SmemLayoutAtomKind
        atom = tcgen05.make_smem_layout_atom(kind.K_SW64 if is_dk else kind.MN_SW64, self.dtype)
        operand = cute.append(mma.partition_shape_A((m, k)), 1)
        return tcgen05.tile_to_mma_shape(atom, operand, order=(1, 2, 3) if is_dk else (2, 1, 3))

    def layout_stored(self) -> cute.ComposedLayout:
        """(32 keys, 32 columns, places of warps)."""
        tile = (STORED_ROWS, STORED_COLS)
        places = self.store_places * COMPUTE_WARPS
        return hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, places)


def _rounded(dim: int) -> int:
    return next(cols for cols in TILE_DIMS if cols >= min(dim, TILE_DIMS[-1]))
