"""Static facts of the Hopper backward: tiles, WGMMA shapes, shared memory, warps and registers.

Like `flash_fwd_plan`: Python ints decide, layouts and MMA atoms are made where they are needed.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core.cta import (
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    WARPS_PER_WARPGROUP,
    registers_left,
)
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.walk_ring import CHUNK
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING, Role
from flash_mask_cute.sm90.wgmma import COLUMNS, ROWS_PER_WARPGROUP

NUM_MMA_WARPGROUPS = 2
TILE_N = NUM_MMA_WARPGROUPS * ROWS_PER_WARPGROUP
# what MMA warpgroups may take: the more, the less is left for the others
MMA_REGISTERS = (216, 232)
# what a thread needs besides fragments, or nearly so
SCALAR_REGISTERS = 40
MAX_REGISTERS = 248
# words that go with a query block: its flags, number, head and row block
QUERY_WORDS = 4
# dS of a block is written while the other warpgroup may still sum that of the block before
DS_STAGES = 2


class Barrier(IntEnum):
    """Named barriers (0 is __syncthreads); one per MMA warpgroup counted from EPILOGUE."""

    BOTH = 1
    EPILOGUE = 2


@dataclass(frozen=True)
class BwdPlan:
    """Shape of one CTA's work: tile_n keys, and blocks of tile_m queries that pass by.

    Each of two MMA warpgroups owns 64 keys: its S^T and dP^T have keys as rows, so that P^T and
    dS^T are register operands of dV and dK. Only dS goes through shared memory, for dQ, which sums
    over the keys of both. stages_kv 2: the next work tile's keys and values arrive while this one
    computes.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    stages_q: int = 2
    stages_do: int = 2
    stages_kv: int = 1

    @property
    def tile_n(self) -> int:
        return TILE_N

    @property
    def tile_d(self) -> int:
        """head_dim as dQ sees it: where tile_m is 64, two warpgroups share its columns."""
        if self.num_row_groups > 1:
            return -(-self.head_dim // 16) * 16
        return next(d for d in (32, 64, 128) if d >= self.head_dim)

    @property
    def tile_dv(self) -> int:
        return -(-self.head_dim_v // 16) * 16

    @property
    def num_row_groups(self) -> int:
        """Groups of 64 query rows in a block."""
        return self.tile_m // ROWS_PER_WARPGROUP

    @property
    def dq_cols(self) -> int:
        """Columns of dQ that a warpgroup computes, for 64 rows."""
        return self.tile_d * self.num_row_groups // NUM_MMA_WARPGROUPS

    @property
    def num_mma_warps(self) -> int:
        return WARPS_PER_WARPGROUP * NUM_MMA_WARPGROUPS

    @property
    def num_painters(self) -> int:
        return Role.MMA - Role.PAINT

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + NUM_MMA_WARPGROUPS)

    @property
    def mma_registers(self) -> int:
        needed = self.fragment_registers + SCALAR_REGISTERS
        return next((n for n in MMA_REGISTERS if n >= needed), MMA_REGISTERS[-1])

    @property
    def helper_registers(self) -> int:
        """Registers of warpgroup 0."""
        taken = self.mma_registers * NUM_MMA_WARPGROUPS
        return registers_left(1 + NUM_MMA_WARPGROUPS, taken)

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread for dK, dV, S and dP."""
        return self.tile_d // 2 + self.tile_dv // 2 + self.tile_m

    @property
    def bytes_q(self) -> int:
        return self.tile_m * self.tile_d * 2

    @property
    def bytes_do(self) -> int:
        return self.tile_m * self.tile_dv * 2

    @property
    def bytes_kv(self) -> int:
        return self.tile_n * (self.tile_d + self.tile_dv) * 2

    @property
    def bytes_ds(self) -> int:
        return self.tile_m * self.tile_n * 2

    @property
    def bytes_dq(self) -> int:
        """fp32 sums of a query block on their way out."""
        return self.tile_m * self.tile_d * 4

    @property
    def bytes_stats(self) -> int:
        """LSE and delta of a query block."""
        return 2 * self.tile_m * 4

    @property
    def bytes_bits(self) -> int:
        return self.tile_n * COLUMNS.num_words * 4

    @property
    def smem_bytes(self) -> int:
        return (
            self.stages_q * (self.bytes_q + self.bytes_stats)
            + self.stages_do * self.bytes_do
            + DS_STAGES * self.bytes_ds
            + self.stages_kv * self.bytes_kv
            + self.bytes_dq
            + self.bytes_bits
            + SMEM_BOOKKEEPING
        )

    def infeasible(self) -> str | None:
        """Why this plan cannot run, or None."""
        if self.tile_m not in (64, 128):
            return f"tile_m must be 64 or 128, got {self.tile_m}"
        if max(self.head_dim, self.head_dim_v) > 128:
            return f"head_dim and head_dim_v go up to 128, got {self.head_dim}, {self.head_dim_v}"
        for name in ("stages_q", "stages_do", "stages_kv"):
            if getattr(self, name) not in (1, 2):
                return f"{name} must be 1 or 2, got {getattr(self, name)}"
        if self.smem_bytes > SMEM_CAPACITY:
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        if self.fragment_registers + SCALAR_REGISTERS > MAX_REGISTERS:
            return f"{self.fragment_registers} registers of fragments are too many for a thread"
        return None

    def _mma(
        self,
        a_major: OperandMajorMode,
        b_major: OperandMajorMode,
        n: int,
        source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
    ) -> cute.TiledMma:
        return hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            a_major,
            b_major,
            cutlass.Float32,
            (1, 1, 1),
            (ROWS_PER_WARPGROUP, n),
            source,
        )

    def mma_scores(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: 64 keys by tile_m queries."""
        return self._mma(OperandMajorMode.K, OperandMajorMode.K, self.tile_m)

    def mma_keys(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: 64 keys by n columns, the scores in registers."""
        source = warpgroup.OperandSource.RMEM
        return self._mma(OperandMajorMode.K, OperandMajorMode.MN, n, source)

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K: 64 queries by dq_cols columns."""
        return self._mma(OperandMajorMode.MN, OperandMajorMode.MN, self.dq_cols)

    def _rows(self, rows: int, cols: int, stages: int) -> cute.ComposedLayout:
        """(rows, cols, stages) with cols contiguous, as an operand whose K mode is cols."""
        tile = (ROWS_PER_WARPGROUP, rows, cols)
        return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, stages)

    def layout_q(self) -> cute.ComposedLayout:
        return self._rows(self.tile_m, self.tile_d, self.stages_q)

    def layout_do(self) -> cute.ComposedLayout:
        return self._rows(self.tile_m, self.tile_dv, self.stages_do)

    def layout_k(self) -> cute.ComposedLayout:
        """(64, tile_d, warpgroup * stages): a warpgroup's keys lie together."""
        return self._rows(ROWS_PER_WARPGROUP, self.tile_d, NUM_MMA_WARPGROUPS * self.stages_kv)

    def layout_v(self) -> cute.ComposedLayout:
        return self._rows(ROWS_PER_WARPGROUP, self.tile_dv, NUM_MMA_WARPGROUPS * self.stages_kv)

    def layout_ds(self) -> cute.ComposedLayout:
        """(64 keys, 64 queries, row group * warpgroup * stages), queries contiguous."""
        count = self.num_row_groups * NUM_MMA_WARPGROUPS * DS_STAGES
        return self._rows(ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP, count)

    def layout_dq(self) -> cute.Layout:
        """(4, lane, column group, warp): accumulators as their threads hold them."""
        return cute.make_layout((4, 32, self.dq_cols // 8, self.num_mma_warps))

    def storage(self) -> cute.struct:
        """The shared memory of a CTA."""

        def elements(layout: cute.ComposedLayout) -> type:
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class Storage:
            q: elements(self.layout_q())
            do: elements(self.layout_do())
            k: elements(self.layout_k())
            v: elements(self.layout_v())
            ds: elements(self.layout_ds())
            dq: cute.struct.Align[
                cute.struct.MemRange[cutlass.Float32, cute.cosize(self.layout_dq())], 128
            ]
            stats: cute.struct.Align[
                cute.struct.MemRange[cutlass.Float32, 2 * self.tile_m * self.stages_q], 128
            ]
            bits: cute.struct.Align[
                cute.struct.MemRange[cutlass.Int32, COLUMNS.num_words * self.tile_n], 16
            ]
            words: cute.struct.Align[
                cute.struct.MemRange[cutlass.Int32, QUERY_WORDS * self.stages_q], 16
            ]
            ring: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, WORDS * RING_STAGES], 16]
            walk: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, WORDS * WALK_STAGES], 16]
            turns: cute.struct.MemRange[cutlass.Int32, CHUNK * WALK_STAGES]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages_q]
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages_do]
            dq_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages_kv]
            bits_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            ring_barriers: cute.struct.MemRange[cutlass.Int64, 2 * RING_STAGES]
            walk_barriers: cute.struct.MemRange[cutlass.Int64, 2 * WALK_STAGES]

        return Storage
