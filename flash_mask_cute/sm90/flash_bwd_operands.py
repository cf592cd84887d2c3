"""Operands of the Hopper backward's products, as WGMMA reads them from shared memory."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.row_blocks import ColumnPart, dq_parts
from flash_mask_cute.sm90 import cta_pairs, wgmma
from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits, Tiles
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx


class Fragments(NamedTuple):
    """Shared memory as operands; names are product, then operand.

    dv_do and dk_q: one for each part of the product's columns. dq_k: one for each width of each
    part. peer_ds, peer_k: the operands of dQ for the other CTA's keys, in its only part.
    """

    dv_do: tuple[cute.Tensor, ...]
    dk_q: tuple[cute.Tensor, ...]
    dq_ds: cute.Tensor
    dq_k: tuple[tuple[cute.Tensor, ...], ...]
    peer_ds: cute.Tensor | None = None
    peer_k: tuple[cute.Tensor, ...] | None = None

    @staticmethod
    def create(traits: BwdTraits, tiles: Tiles) -> "Fragments":
        """The operands of this warpgroup."""
        operands, dq_k = _of_dq(traits, tiles.k, 0), []
        for widths in traits.parts_dq:
            dq_k.append(operands[: len(widths)])
            operands = operands[len(widths) :]
        mma_dq = traits.mma_dq(traits.parts_dq[0][0])
        peer_ds = peer_k = None
        if traits.cta_pair:
            peer_ds = wgmma.operand_a(mma_dq, tiles.peer_ds)
            peer_k = _of_dq(traits, tiles.peer_k, cta_pairs.rank() * traits.cols_dq)
        return Fragments(
            _of_keys(traits, tiles.do, traits.tile_dv),
            _of_keys(traits, tiles.q, traits.tile_d),
            wgmma.operand_a(mma_dq, tiles.ds),
            tuple(dq_k),
            peer_ds,
            peer_k,
        )


def _of_columns(
    smem: cute.Tensor, rows: int, make_mma: Callable, parts: tuple
) -> tuple[cute.Tensor, ...]:
    """This warpgroup's columns of (first, width) parts as operands B; the columns are operand
    rows."""
    operands = []
    for first, width in parts:
        part = wgmma.transposed(smem)
        if width < cute.size(part, mode=[0]):
            at = first // width + mma_warpgroup_idx()
            part = cute.local_tile(part, (width, rows), (at, 0, None))
        operands.append(wgmma.operand_b(make_mma(width), part))
    return tuple(operands)


def _of_keys(traits: BwdTraits, smem: cute.Tensor, cols: int) -> tuple[cute.Tensor, ...]:
    """Operand dO or Q, in the products that sum dV or dK."""
    parts = dq_parts(cols, 1) if traits.shares_keys else ((0, cols),)
    return _of_columns(smem, traits.tile_m, traits.mma_keys, parts)


def _of_dq(traits: BwdTraits, smem: cute.Tensor, skipped: Int32 | int) -> tuple[cute.Tensor, ...]:
    """Operand K, in the products that sum dQ; skipped: columns before the start of the memory."""

    def first_of(part: ColumnPart) -> Int32 | int:
        """The start of columns in this CTA: the second CTA's columns mirror the first's."""
        if not traits.cta_pair:
            return part.first
        mirrored = traits.tile_d - 2 * (part.first + part.width)
        return part.first + cta_pairs.rank() * mirrored

    parts = tuple((first_of(part) - skipped, part.width) for part in traits.columns_dq)
    return _of_columns(smem, wgmma.ROWS_PER_WARPGROUP, traits.mma_dq, parts)
