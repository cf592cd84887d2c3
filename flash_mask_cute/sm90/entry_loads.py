"""What the backwards that walk over batch entries read, write, and have in shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core import tma
from flash_mask_cute.sm90 import wgmma


@dataclass(frozen=True)
class HeadColumns:
    """Head dimensions of a kernel over batch entries, and its products by blocks of queries."""

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int

    @property
    def block_m(self) -> int:
        """Queries whose S and dP are computed at a time."""
        return wgmma.ROWS_PER_WARPGROUP

    @property
    def cols(self) -> tuple[int, int]:
        """Columns of Q and K, and of dO and V, in shared memory."""
        return wgmma.tile_columns(self.head_dim), wgmma.tile_columns(self.head_dim_v)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of 16 columns, without those that are zeros."""
        return -(-self.head_dim // 16), -(-self.head_dim_v // 16)

    def mma_scores(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: 64 keys by the queries of a block."""
        return wgmma.make_mma(self.dtype, self.block_m)

    def mma_words(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: 64 keys by n columns, the scores in registers."""
        return wgmma.make_mma(self.dtype, n, b_major=wgmma.MN, source=wgmma.REGISTERS)

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K: 64 queries by columns."""
        return wgmma.make_mma(self.dtype, self.cols[0], b_major=wgmma.MN)


def stages_in(room: int, for_s: int, for_dp: int, most: int) -> tuple[int, int]:
    """The most stages that have room: of operands of S, and of those of dP as many or one less; or
    (0, 0). for_s, for_dp: bytes of a stage."""
    fitting = (
        (a, b)
        for a in range(most, 0, -1)
        for b in (a, a - 1)
        if b > 0 and a * for_s + b * for_dp <= room
    )
    return next(fitting, (0, 0))


class EntrySources(NamedTuple):
    """first, second: two operands that are loaded together, as (TMA atom, tensor ((head, row), d,
    batch), atom, tensor). stats: (heads, row_blocks, words)."""

    first: tuple
    second: tuple
    stats: cute.Tensor

    @staticmethod
    def create(stats: cute.Tensor, *operands: tuple[cute.Tensor, Any, int]) -> "EntrySources":
        """operands: four dense tensors, each with its layout in shared memory and a box's rows."""
        load, atoms = cpasync.CopyBulkTensorTileG2SOp(), []
        for tensor, layout, rows in operands:
            in_box = tma.one_stage(layout)
            box = (1, rows), cute.size(in_box, mode=[1])
            view = tma.sequence_rows(tensor, False)
            atoms += cpasync.make_tiled_tma_atom(load, view, in_box, box)
        return EntrySources(tuple(atoms[:4]), tuple(atoms[4:]), stats)


class EntryOutputs(NamedTuple):
    """dq, dk, dv: (row, d, head, batch); dq also as sums (heads, row_blocks, 64 * columns) that are
    zeros before. sums: of gradients of aux tensors."""

    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    sums: tuple | None


def load_words(
    source: cute.Tensor,
    target: cute.Tensor,
    pieces: Sequence[tuple[int, int, int]],
    barrier: cute.Pointer,
) -> None:
    """A piece of statistics: its first word in source (words,) and in target, and how many."""
    for start, at, count in pieces:
        layout = cute.make_layout(count)
        src = cute.make_tensor((source.iterator + start).align(16), layout)
        dst = cute.make_tensor((target.iterator + at).align(16), layout)
        tma.copy_bulk(src, dst, barrier)
