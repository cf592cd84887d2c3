"""Operands of the Hopper backward's products, as WGMMA reads them from shared memory."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core import clusters
from flash_mask_cute.core.cta import transposed
from flash_mask_cute.core.row_blocks import ColumnPart
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_traits import BwdSmem, BwdTraits


class Fragments(NamedTuple):
    """Of this warpgroup; names are product, then operand. dv_do and dk_q: one for each part of the
    product's columns. dq_k: one for each width of each part. peer_ds, peer_k: of dQ for the other
    CTA's keys."""

    dv_do: tuple[cute.Tensor, ...]
    dk_q: tuple[cute.Tensor, ...]
    dq_ds: cute.Tensor
    dq_k: tuple[tuple[cute.Tensor, ...], ...]
    peer_ds: cute.Tensor | None = None
    peer_k: tuple[cute.Tensor, ...] | None = None

    @staticmethod
    def create(traits: BwdTraits, tiles: BwdSmem) -> "Fragments":
        columns = traits.columns
        dq_k = tuple(_of_dq(traits, part, tiles.k, 0) for part in range(len(columns.parts_dq)))
        mma_dq = traits.mma_dq(columns.products_dq(0)[0][0].width)
        peer_ds = peer_k = None
        if traits.cta_pair:
            peer_ds = wgmma.operand_a(mma_dq, tiles.peer_ds)
            peer_k = _of_dq(traits, 0, tiles.peer_k, clusters.rank() * columns.second_dq)
        of_keys = traits.tile_m, traits.mma_words
        return Fragments(
            _of_columns(traits, tiles.do, *of_keys, columns.dv),
            _of_columns(traits, tiles.q, *of_keys, columns.dk),
            wgmma.operand_a(mma_dq, tiles.ds),
            dq_k,
            peer_ds,
            peer_k,
        )


def _of_columns(
    traits: BwdTraits,
    smem: cute.Tensor,
    rows: int,
    make_mma: Callable,
    parts: tuple[ColumnPart, ...],
    skipped: Int32 | int = 0,
) -> tuple[cute.Tensor, ...]:
    """This warpgroup's columns of parts as operands B. skipped: columns before the start."""
    operands = []
    for first, width, sharers in parts:
        part = transposed(smem)
        all_columns = cute.size(part, mode=[0])
        if traits.splits_keys and sharers == 1:
            # the first ones; the product alone decides how many
            operands.append(wgmma.operand_b(make_mma(all_columns), part))
            continue
        if width < all_columns:
            if sharers > 1:
                # parts of a width begin at multiples of it
                at = (first - skipped) // width + traits.warpgroup_idx()
                part = cute.local_tile(part, (width, rows), (at, 0, None))
            else:
                part = wgmma.columns_as_rows(smem, first - skipped, width)
        operands.append(wgmma.operand_b(make_mma(width), part))
    return tuple(operands)


def _of_dq(
    traits: BwdTraits, part: int, smem: cute.Tensor, skipped: Int32 | int
) -> tuple[cute.Tensor, ...]:
    """Operand K, in the products that sum a part of dQ."""

    def in_this_cta(columns: ColumnPart) -> ColumnPart:
        """The second CTA's columns mirror the first's."""
        if not traits.cta_pair:
            return columns
        mirrored = traits.tile_d - columns.end - columns.first
        return columns._replace(first=columns.first + clusters.rank() * mirrored)

    parts = tuple(in_this_cta(columns) for columns, _ in traits.columns.products_dq(part))
    rows = wgmma.ROWS_PER_WARPGROUP
    return _of_columns(traits, smem, rows, traits.mma_dq, parts, skipped)
