"""Static facts of the Blackwell forward: tiles, TMEM, shared memory, warps and registers.

Everything here follows from Python ints, so a configuration can be judged without a GPU. Layouts
and MMA atoms are made anew at each place of use.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Int32
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
from flash_mask_cute.core.packed_heads import PackedHeads
from flash_mask_cute.core.pages import why_no_boxes
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.storage import barriers, elements, words
from flash_mask_cute.core.walk_ring import WalkRing
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.umma import COLUMNS, NUM_COLUMNS, ROWS

TILE_N = 128
# accumulators of scores, of 128 rows each
BUFFERS_S = 2
# columns of P that are handed over first
FIRST_PART = 96
# columns of tiles, of queries and keys and of values; other heads get the first that hold them
TILE_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# the most columns of values for which TMEM holds the sums of two halves
MOST_OF_HALVES = 128
# rows of a warp, which the output leaves by
ROWS_PER_WARP = 32
NUM_WARPGROUPS = 5
SOFTMAX_REGISTERS = 168
# of them, for rows of tables (`mods/table_rows.py`)
TABLE_WORDS = 64
OUTPUT_REGISTERS = 64
MASK_REGISTERS = 48
# bytes of shared memory kept for barriers, rings and the sums of rows
SMEM_BOOKKEEPING = 3072


class Role(IntEnum):
    """First warp of each role; SOFTMAX has four warps for each half, OUTPUT and MASK have four."""

    SOFTMAX = 0
    OUTPUT = 8
    LOAD = 12
    MMA = 13
    SCHEDULE = 14
    MASK = 16


WARPS_OF_HALF = 4
OUTPUT_WARPS = Role.LOAD - Role.OUTPUT
NUM_MASK_WARPS = 4


class Channels(NamedTuple):
    """The channels between the roles of a CTA (see `flash_fwd`)."""

    q: Channel
    k: Channel
    v: Channel
    s: Channel
    p: Channel
    o: Channel
    sums: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing


class FwdSmem(NamedTuple):
    """The contents of shared memory: operands with stages, as TMA sees them; rows; one bit tile.
    sums (2, rows): maximum and sum of each row."""

    q: cute.Tensor  # (128, tile_d, halves * stages_q)
    k: cute.Tensor  # (keys of this CTA, tile_d, stages_kv)
    v: cute.Tensor  # (columns of this CTA, tile_n, stages_v)
    o: cute.Tensor
    sums: cute.Tensor  # (2, tile_m)
    bits: cute.Tensor  # (4 words, tile_m)


class Products(NamedTuple):
    """Operands of both products in shared memory."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


class SoftmaxState(NamedTuple):
    """Key blocks and cut blocks so far, and whether the next block begins a tile."""

    blocks: Int32
    cuts: Int32
    is_first: Boolean


@dataclass(frozen=True)
class FwdTraits(PackedHeads):
    """Shape of one CTA's work, by options of `FlashAttentionForwardSm100` and `PackedHeads`."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    packed_heads: int
    stages_kv: int = 2
    stages_q: int = 1
    share_qo: bool = False
    cta_pair: bool = False
    heads_there: int | None = None
    page_box: int | None = None

    # boxes of rows that TMA brings for a fill of the query channel
    q_boxes = 1
    overlaps_tiles = True
    num_threads = NUM_WARPGROUPS * THREADS_PER_WARPGROUP

    @property
    def tile_dims(self) -> tuple[int, int]:
        fitting = (x for x in TILE_DIMS if x[0] >= self.head_dim and x[1] >= self.head_dim_v)
        return next(fitting, TILE_DIMS[-1])

    @property
    def tile_d(self) -> int:
        """Columns of the tiles of queries and keys."""
        return self.tile_dims[0]

    @property
    def tile_dv(self) -> int:
        """Columns of the tiles of values."""
        return self.tile_dims[1]

    @property
    def halves(self) -> int:
        """A work tile has two halves of 128 rows, which take turns on the tensor cores, or a single
        one whose scores have two buffers."""
        return self.tile_m // ROWS

    @property
    def softmax_warps(self) -> int:
        """Softmax warps that have a half."""
        return self.halves * WARPS_OF_HALF

    # Rows that a warp copies are handed over when it has waited for them.
    copies_arrive = False
    multicasts_keys = False

    @property
    def q_fills(self) -> int:
        return self.halves

    @property
    def row_tile(self) -> tuple[int, int]:
        """Query rows of a half as (packed heads, positions)."""
        return (self.packed_heads, ROWS // self.packed_heads)

    @property
    def group(self) -> umma.Group:
        return umma.Group(2 if self.cta_pair else 1)

    @property
    def cluster_tile_m(self) -> int:
        """Query rows that walk over keys together."""
        return self.tile_m * self.group.size

    @property
    def box_k(self) -> tuple[int, int]:
        """The part of a key block that this CTA loads at a time, as rows of operand B."""
        return self.page_box or self.keys_of_cta, self.tile_d

    @property
    def keys_of_cta(self) -> int:
        return self.tile_n // self.group.size

    @property
    def box_v(self) -> tuple[tuple[int, int], int]:
        """The part of a value block that this CTA loads at a time, ((1, keys), columns)."""
        return (1, self.page_box or self.tile_n), self.tile_dv // self.group.size

    @property
    def box_o(self) -> tuple[tuple[int, int], int]:
        """The part of the output stored together: (packed heads, positions) and columns."""
        return (self.packed_heads, ROWS_PER_WARP // self.packed_heads), self.columns_o

    @property
    def helper_registers(self) -> int:
        """Registers of a thread that loads, multiplies or schedules."""
        taken = 2 * SOFTMAX_REGISTERS + OUTPUT_REGISTERS + MASK_REGISTERS
        return registers_left(NUM_WARPGROUPS, taken)

    # -- TMEM: two buffers of S, then O of each half; P takes the first half of its S -------------

    @property
    def num_columns(self) -> int:
        return BUFFERS_S * self.tile_n + self.halves * self.tile_dv

    def buffer_s(self, half: int | Int32, number: Int32) -> int | Int32:
        """The buffer of scores `number`: a half has one, a single half alternates between two."""
        return half if self.halves == BUFFERS_S else number % BUFFERS_S

    def column_s(self, buffer: int | Int32) -> int | Int32:
        return buffer * self.tile_n

    def column_o(self, half: int | Int32) -> int | Int32:
        return BUFFERS_S * self.tile_n + half * self.tile_dv

    # -- shared memory --------------------------------------------------------------------------

    @property
    def bytes_q(self) -> int:
        return ROWS * self.tile_d * 2

    @property
    def bytes_k(self) -> int:
        return self.keys_of_cta * self.tile_d * 2

    @property
    def bytes_v(self) -> int:
        return self.tile_n * self.box_v[1] * 2

    @property
    def columns_o(self) -> int:
        """Columns of the output that are stored together, for 32 rows."""
        return 64 if self.tile_d <= 128 and self.tile_dv % 64 == 0 else 32

    @property
    def bytes_o(self) -> int:
        return ROWS * self.columns_o * 2

    @property
    def _smem_without_spare_value(self) -> int:
        query_output = self.halves * self.stages_q * self.bytes_q + self.bytes_o
        keys_values = self.stages_kv * (self.bytes_k + self.bytes_v)
        bits = self.tile_m * COLUMNS.num_words * 4
        return query_output + keys_values + bits + SMEM_BOOKKEEPING

    @property
    def stages_v(self) -> int:
        """Value blocks in flight: used longer than keys, so one more if it fits."""
        return self.stages_kv + (self._smem_without_spare_value + self.bytes_v <= SMEM_CAPACITY)

    @property
    def smem_bytes(self) -> int:
        spare = self.stages_v - self.stages_kv
        return self._smem_without_spare_value + spare * self.bytes_v

    def infeasible(self) -> str | None:
        dims = f"head_dim/head_dim_v {self.head_dim}/{self.head_dim_v}"
        if max(self.head_dim, self.head_dim_v) > max(TILE_DIMS[-1]):
            return f"head_dim and head_dim_v go up to {max(TILE_DIMS[-1])}, got {dims}"
        rows = (ROWS, 2 * ROWS) if self.tile_dv <= MOST_OF_HALVES else (ROWS,)
        if self.tile_m not in rows:
            one_of = " or ".join(map(str, rows))
            return f"tile_m must be {one_of} for {dims} on Blackwell, got {self.tile_m}"
        if self.tile_n != TILE_N:
            return f"tile_n must be {TILE_N} on Blackwell, got {self.tile_n}"
        if self.stages_q not in (1, 2):
            return f"stages_q must be 1 or 2, got {self.stages_q}"
        if self.share_qo:
            return "share_qo is not supported on Blackwell"
        if ROWS_PER_WARP % self.packed_heads:
            return f"pack_gqa needs a group of at most 32 heads, got {self.group_size}"
        if self.page_box is not None and (why := why_no_boxes(self.tile_n, self.page_box)):
            return why
        if self.smem_bytes > SMEM_CAPACITY:
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        if self.num_columns > NUM_COLUMNS:
            return f"{self.num_columns} columns of TMEM exceed {NUM_COLUMNS}"
        return None

    # -- products -------------------------------------------------------------------------------

    def mma_qk(self) -> cute.TiledMma:
        majors, shape = (OperandMajorMode.K,) * 2, (self.group.rows, self.tile_n)
        return umma.make_mma(self.dtype, majors, self.group.kind, shape)

    def mma_pv(self) -> cute.TiledMma:
        majors, shape = (OperandMajorMode.K, OperandMajorMode.MN), (self.group.rows, self.tile_dv)
        source = tcgen05.OperandSource.TMEM
        return umma.make_mma(self.dtype, majors, self.group.kind, shape, source)

    # operands as products see them, in k-steps, and as TMA does, (rows, columns, stages)

    def operand_q(self) -> cute.ComposedLayout:
        tile = (self.group.rows, self.tile_n, self.tile_d)
        stages = self.halves * self.stages_q
        return blackwell.make_smem_layout_a(self.mma_qk(), tile, self.dtype, stages)

    def operand_k(self) -> cute.ComposedLayout:
        tile = (self.group.rows, self.tile_n, self.tile_d)
        return blackwell.make_smem_layout_b(self.mma_qk(), tile, self.dtype, self.stages_kv)

    def operand_v(self) -> cute.ComposedLayout:
        tile = (self.group.rows, self.tile_dv, self.tile_n)
        return blackwell.make_smem_layout_b(self.mma_pv(), tile, self.dtype, self.stages_v)

    def operand_p(self) -> cute.ComposedLayout:
        """The layout that `make_fragment_A` needs for TMEM, one stage."""
        tile = (self.group.rows, self.tile_dv, self.tile_n)
        return blackwell.make_smem_layout_a(self.mma_pv(), tile, self.dtype, 1)

    def layout_q(self) -> cute.ComposedLayout:
        """(128, tile_d, halves * stages_q)"""
        tile, stages = (ROWS, self.tile_n, self.tile_d), self.halves * self.stages_q
        return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, stages)

    def layout_k(self) -> cute.ComposedLayout:
        """(keys, tile_d, stages_kv)"""
        tile = (ROWS, self.keys_of_cta, self.tile_d)
        return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages_kv)

    def layout_v(self) -> cute.ComposedLayout:
        """(columns, tile_n, stages_v): V is the MN-major operand B of P V."""
        tile = (ROWS, self.box_v[1], self.tile_n)
        return hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.dtype, self.stages_v)

    def layouts_loaded(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        return self.layout_k(), self.layout_v()

    def layout_o(self) -> cute.ComposedLayout:
        """(32, columns_o, output warps)"""
        tile = (ROWS_PER_WARP, self.columns_o)
        return hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, OUTPUT_WARPS)

    def storage(self) -> cute.struct:
        @cute.struct
        class Storage:
            q: elements(self.dtype, self.layout_q())
            k: elements(self.dtype, self.layout_k())
            v: elements(self.dtype, self.layout_v())
            o: elements(self.dtype, self.layout_o())
            q_barriers: barriers(self.halves * self.stages_q)
            k_barriers: barriers(self.stages_kv)
            v_barriers: barriers(self.stages_v)
            s_barriers: barriers(BUFFERS_S)
            p_barriers: barriers(BUFFERS_S)
            o_barriers: barriers(self.halves)
            sums_barriers: barriers(self.halves)
            bits_barriers: barriers(1)
            ring_barriers: barriers(RING_STAGES)
            walk_barriers: barriers(WALK_STAGES)
            ring: words(WORDS * RING_STAGES)
            walk: words(WORDS * WALK_STAGES)
            sums: words(2 * self.tile_m)
            bits: words(COLUMNS.num_words * self.tile_m)
            tmem: cutlass.Int32

        return Storage

    def channels(self, storage: Any, fields: tuple[str, ...]) -> Channels:
        """The channels of a CTA, initialised by its first warp; fields: see `WorkRing`."""
        group = self.group
        # load, mma (the leader's), softmax and mask
        num_walkers = 2 + self.softmax_warps + NUM_MASK_WARPS - group.rank()
        ring, walk = scheduler_rings(
            storage, (num_walkers, OUTPUT_WARPS), ascending=False, uncut_first=False, fields=fields
        )

        def channel(barriers: Any, stages: int, producers: int, consumers: int) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, producers, consumers)

        def loaded(barriers: Any, stages: int) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, group.size, 1, group.home)

        def multiplied(barriers: Any, stages: int, consumers: int) -> Channel:
            return Channel.create(
                barriers.data_ptr(), stages, 1, consumers * group.size, group.home
            )

        return Channels(
            q=loaded(storage.q_barriers, self.halves * self.stages_q),
            k=loaded(storage.k_barriers, self.stages_kv),
            v=loaded(storage.v_barriers, self.stages_v),
            s=multiplied(storage.s_barriers, BUFFERS_S, WARPS_OF_HALF),
            # not released: the next P comes behind S, which is multiplied behind this one
            p=Channel.create(
                storage.p_barriers.data_ptr(), BUFFERS_S, WARPS_OF_HALF * group.size, 1, group.home
            ),
            o=multiplied(storage.o_barriers, self.halves, OUTPUT_WARPS),
            sums=channel(storage.sums_barriers, self.halves, WARPS_OF_HALF, OUTPUT_WARPS),
            bits=channel(storage.bits_barriers, 1, NUM_MASK_WARPS, self.softmax_warps),
            ring=ring,
            walk=walk,
        )

    def tiles(self, storage: Any) -> FwdSmem:
        sums = cute.recast_ptr(storage.sums.data_ptr(), dtype=cutlass.Float32)
        return FwdSmem(
            q=swizzled(storage.q, self.layout_q()),
            k=swizzled(storage.k, self.layout_k()),
            v=swizzled(storage.v, self.layout_v()),
            o=swizzled(storage.o, self.layout_o()),
            sums=cute.make_tensor(
                sums, cute.make_layout((2, self.tile_m), stride=(self.tile_m, 1))
            ),
            bits=storage.bits.get_tensor(cute.make_layout((COLUMNS.num_words, self.tile_m))),
        )

    def products(self, storage: Any) -> Products:
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        return Products(
            q=mma_qk.make_fragment_A(swizzled(storage.q, self.operand_q())),
            k=mma_qk.make_fragment_B(swizzled(storage.k, self.operand_k())),
            v=mma_pv.make_fragment_B(swizzled(storage.v, self.operand_v())),
        )

    def scores(self, buffer: int | Int32) -> cute.Tensor:
        shape = self.group.rows, self.tile_n
        return umma.accumulator(self.mma_qk(), shape, self.column_s(buffer))

    def probabilities(self, buffer: int | Int32) -> cute.Tensor:
        """P in TMEM, over S, as an operand."""
        first = self.column_s(buffer)
        return umma.operand_a(self.mma_pv(), self.operand_p(), self.dtype, first)

    def output(self, half: int) -> cute.Tensor:
        shape = self.group.rows, self.tile_dv
        return umma.accumulator(self.mma_pv(), shape, self.column_o(half))
