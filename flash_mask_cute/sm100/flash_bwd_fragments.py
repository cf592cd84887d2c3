"""Operands and results of the products of the Blackwell backward, in TMEM and shared memory."""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell

from flash_mask_cute.core.cta import swizzled, transposed
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_registers import HALVES
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, memory_ds
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits
from flash_mask_cute.sm100.umma import ROWS


class PartOfDq(NamedTuple):
    """A product of dQ: result, and keys as operand B."""

    acc: cute.Tensor  # (tile_m queries, columns)
    k: cute.Tensor


class Products(NamedTuple):
    """Fragments of the products that a launch computes; names are result, then operand.

    p, ds: one for each half of the queries. dq: by `BwdTraits.widths_dq`.
    """

    s: cute.Tensor  # (128 keys, tile_m queries)
    s_k: cute.Tensor
    s_q: cute.Tensor
    dp: cute.Tensor | None  # (128 keys, tile_m queries)
    dp_v: cute.Tensor | None
    dp_do: cute.Tensor | None
    dv: cute.Tensor | None  # (128 keys, tile_dv)
    p: tuple[cute.Tensor, ...] | None  # (128 keys, tile_m / 2 queries) each
    dv_do: cute.Tensor | None
    dk: cute.Tensor | None  # (128 keys, tile_d)
    ds: tuple[cute.Tensor, ...] | None  # (128 keys, tile_m / 2 queries) each
    dk_q: cute.Tensor | None
    dq: tuple[PartOfDq, ...] | None
    dq_ds: cute.Tensor | None


def products(traits: BwdTraits, tiles: BwdSmem) -> Products:
    scores = traits.mma_scores()
    by_d, by_dv = traits.mma_sums(traits.tile_d), traits.mma_sums(traits.tile_dv)
    shape_s, shape_d, shape_dv = (
        (ROWS, traits.tile_m),
        (ROWS, traits.tile_d),
        (ROWS, traits.tile_dv),
    )
    of_dv, of_dk = traits.makes_dv, traits.makes_dk
    return Products(
        s=umma.accumulator(scores, shape_s, traits.column_s),
        s_k=_keys(traits, scores, tiles.k, traits.column_k, traits.tile_d),
        s_q=umma.smem_operand_b(scores, tiles.q),
        dp=umma.accumulator(scores, shape_s, traits.column_dp) if of_dk else None,
        dp_v=_keys(traits, scores, tiles.v, traits.column_v, traits.tile_dv) if of_dk else None,
        dp_do=umma.smem_operand_b(scores, tiles.do) if of_dk else None,
        dv=umma.accumulator(by_dv, shape_dv, traits.column_dv) if of_dv else None,
        p=_halves(traits, by_dv, traits.tile_dv, traits.column_s) if of_dv else None,
        dv_do=umma.smem_operand_b(by_dv, transposed(tiles.do)) if of_dv else None,
        dk=umma.accumulator(by_d, shape_d, traits.column_dk) if of_dk else None,
        ds=_halves(traits, by_d, traits.tile_d, traits.column_dp) if of_dk else None,
        dk_q=umma.smem_operand_b(by_d, transposed(tiles.q)) if of_dk else None,
        dq=_parts_of_dq(traits, tiles) if of_dk else None,
        dq_ds=umma.smem_operand_a(traits.mma_dq(traits.widths_dq[0]), tiles.ds) if of_dk else None,
    )


def _parts_of_dq(traits: BwdTraits, tiles: BwdSmem) -> tuple[PartOfDq, ...]:
    keys, parts, first = transposed(tiles.k), [], 0
    for i, width in enumerate(traits.widths_dq):
        mma = traits.mma_dq(width)
        acc = umma.accumulator(mma, (traits.tile_m, width), traits.column_dq + i * umma.HALF_LANES)
        columns = cute.local_tile(keys, (width, traits.tile_n, 1), (first // width, 0, 0))
        parts.append(PartOfDq(acc, umma.smem_operand_b(mma, columns)))
        first += width
    return tuple(parts)


def _keys(
    traits: BwdTraits, mma: cute.TiledMma, smem: cute.Tensor, first: int, cols: int
) -> cute.Tensor:
    if traits.holds_keys:
        layout = blackwell.make_smem_layout_a(mma, (ROWS, traits.tile_m, cols), traits.dtype, 1)
        return umma.operand_a(mma, layout, traits.dtype, first)
    return umma.smem_operand_a(mma, smem)[None, None, None, 0]


def _halves(traits: BwdTraits, mma: cute.TiledMma, n: int, first: int) -> tuple[cute.Tensor, ...]:
    """P or dS in TMEM, of both halves of the queries."""
    shape = traits.cluster_tile_n, n, traits.queries
    layout = blackwell.make_smem_layout_a(mma, shape, traits.dtype, 1)
    return tuple(
        umma.operand_a(mma, layout, traits.dtype, first + half * traits.half_step)
        for half in range(HALVES)
    )


def pair_products(traits: BwdTraits, storage: Any) -> Products:
    """`products` of a pair: layouts of operands as products see them, in TMA's bytes."""
    scores, of_dq = traits.mma_scores(), traits.mma_dq(traits.tile_d)
    by_d, by_dv = traits.mma_sums(traits.tile_d), traits.mma_sums(traits.tile_dv)
    keys = traits.cluster_tile_n
    by_columns = storage.q_columns, storage.do_columns
    if traits.is_folded:
        by_columns = storage.q, storage.do

    def operand_a(mma, memory, m: int, n: int, k: int) -> cute.Tensor:
        layout = blackwell.make_smem_layout_a(mma, (m, n, k), traits.dtype, 1)
        return mma.make_fragment_A(swizzled(memory, layout, traits.dtype))

    def operand_b(mma, memory, m: int, n: int, k: int) -> cute.Tensor:
        layout = blackwell.make_smem_layout_b(mma, (m, n, k), traits.dtype, 1)
        return mma.make_fragment_B(swizzled(memory, layout, traits.dtype))

    def folded(mma, memory, shape: tuple[int, int, int], skipped: int = 0) -> cute.Tensor:
        """P or dS in shared memory; skipped: values before it."""
        layout = traits.folded_operand(mma, shape)
        first = cute.recast_ptr(memory.data_ptr() + skipped, layout.inner, dtype=traits.dtype)
        return mma.make_fragment_A(cute.make_tensor(first, layout.outer))

    def probabilities(mma, n: int) -> tuple[cute.Tensor, ...]:
        if traits.is_folded:
            shape = keys, n, traits.tile_m
            return (folded(mma, storage.p, shape)[None, None, None, 0],)
        return _halves(traits, mma, n, traits.column_s)

    def score_gradients(mma, n: int) -> tuple[cute.Tensor, ...]:
        if traits.is_folded:
            # behind dS of dQ, for which the keys of both CTAs have places
            shape, of_dq = (keys, n, traits.tile_m), traits.rows_of_cta * keys
            return (folded(mma, storage.ds, shape, of_dq)[None, None, None, 0],)
        return _halves(traits, mma, n, traits.column_dp)

    def score_gradients_of_dq(mma) -> cute.Tensor:
        if traits.is_folded:
            return folded(mma, storage.ds, (*dq_shape, keys))
        return operand_a(mma, memory_ds(traits, storage), *dq_shape, keys)

    of_s, of_dp = (keys, traits.tile_m, traits.tile_d), (keys, traits.tile_m, traits.tile_dv)
    dq_shape = traits.tile_m, traits.tile_d
    dq_k = operand_b(of_dq, storage.k_columns, *dq_shape, keys)
    return Products(
        s=umma.accumulator(scores, of_s[:2], traits.column_s),
        s_k=operand_a(scores, storage.k, *of_s)[None, None, None, 0],
        s_q=operand_b(scores, storage.q, *of_s),
        dp=umma.accumulator(scores, of_dp[:2], traits.column_dp),
        dp_v=operand_a(scores, storage.v, *of_dp)[None, None, None, 0],
        dp_do=operand_b(scores, storage.do, *of_dp),
        dv=umma.accumulator(by_dv, (keys, traits.tile_dv), traits.column_dv),
        p=probabilities(by_dv, traits.tile_dv),
        dv_do=operand_b(by_dv, by_columns[1], keys, traits.tile_dv, traits.tile_m),
        dk=umma.accumulator(by_d, (keys, traits.tile_d), traits.column_dk),
        ds=score_gradients(by_d, traits.tile_d),
        dk_q=operand_b(by_d, by_columns[0], keys, traits.tile_d, traits.tile_m),
        dq=(PartOfDq(umma.accumulator(of_dq, dq_shape, traits.column_dq), dq_k),),
        dq_ds=score_gradients_of_dq(of_dq),
    )
