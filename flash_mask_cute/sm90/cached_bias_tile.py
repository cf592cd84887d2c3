"""P and dS of a block of queries, where what is added to scores stays in shared memory.

Each thread reads what it has written: the values for two neighbouring queries and two keys, in 16
bytes. -inf hides a score.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core.cta import thread_in_warpgroup, transposed
from flash_mask_cute.core.marked_rows import clear_row
from flash_mask_cute.core.row_blocks import MARKS_PER_WORD
from flash_mask_cute.core.softmax import ScoreScales, rounded_difference
from flash_mask_cute.rules.band import Band
from flash_mask_cute.rules.mask_rules import WindowArgs
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.entry_sums import Places, SummedTensors
from flash_mask_cute.sm90.warpgroups import mma_warpgroup_idx, store_rows


class ScoreArgs(NamedTuple):
    """scale_dq: of dQ; scale_dk: of dK, the scale of the Q that the kernel reads."""

    scales: ScoreScales
    scale_dq: Float32
    scale_dk: Float32
    window: WindowArgs
    aux_tensors: tuple | None


def band_of(window: WindowArgs, is_causal: bool, seqlen_q: Int32, seqlen_k: Int32) -> Band:
    right = Int32(0) if is_causal else window.right
    return Band(seqlen_q, seqlen_k, window.left, right)


def evaluate(
    places: Places,
    band: Band,
    summed: SummedTensors | None,
    aux_tensors: tuple | None,
    added: cute.Tensor,
) -> None:
    """Write what is added to each score of a thread in a block, (4, groups of 8 queries)."""
    ranges = [band.q_range(places.of(r, 0)[1]) for r in range(wgmma.ROWS_PER_THREAD)]
    for g in range(cute.size(added, mode=[1])):
        values = cute.make_rmem_tensor(4, Float32)
        for r, (lo, hi) in enumerate(ranges):
            for j in range(2):
                q_idx, _ = places.of(r, 2 * g + j)
                is_visible = places.exists(r, 2 * g + j) & (q_idx >= lo) & (q_idx < hi)
                value = Float32(0.0)
                if summed is not None:
                    value = summed.added(places, r, 2 * g + j, aux_tensors)
                values[j + 2 * r] = cutlass.select_(is_visible, value, -Float32.inf)
        cute.autovec_copy(values, added[None, g])


def scores_of(
    traits: Any, own: Sequence[cute.Tensor], queries: Sequence[cute.Tensor]
) -> list[cute.Tensor]:
    """S and dP of a block. own: operands A of this warpgroup's keys and values. queries: operands B
    of Q and dO."""
    accs = []
    for a, b, steps in zip(own, queries, traits.steps, strict=True):
        acc = wgmma.make_accumulator(traits.block_m)
        wgmma.issue(traits.mma_scores(), acc, a, b, False, steps)
        accs.append(acc)
    warpgroup.wait_group(0)
    return accs


def statistic(first: cute.Pointer, block_m: int) -> cute.Tensor:
    """A statistic of a thread's columns' queries, in pairs. first: a block's first query's."""
    start = first + wgmma.first_col_of(thread_in_warpgroup())
    layout = cute.make_layout((2, block_m // 8), stride=(1, 8))
    return cute.make_tensor(start.align(8), layout)


@cute.jit
def differentiate(
    traits: cutlass.Constexpr[Any],
    statistics: tuple,
    added: cute.Tensor | None,
    exist: tuple,
    scales: ScoreScales,
    accs: tuple,
    words: tuple,
):
    """Round P and dS of a block into words, and add dS to its sums.

    traits: of a kernel with block_m queries in a block; adds: something to scores; sums: dS over
    batch entries. statistics: LSE, delta and, with a score_mod, reference (`statistic`). added: by
    `evaluate`. exist: whether each of the thread's keys does. accs: S, dP and the sums.
    """
    scores, dprobs = (wgmma.rows_by_cols(x) for x in accs[:2])
    for g in cutlass.range_constexpr(traits.block_m // 8):
        lse, delta, *reference = (x[None, g].load() for x in statistics)
        own = cute.make_rmem_tensor(4, Float32)
        if const_expr(traits.adds):
            cute.autovec_copy(added[None, g], own)
        for r in cutlass.range_constexpr(wgmma.ROWS_PER_THREAD):
            probs, grads = [], []
            for j in cutlass.range_constexpr(2):
                c, more = 2 * g + j, own[j + 2 * r]
                if const_expr(traits.has_score_mod):
                    score = cute.math.fma(scores[r, c], scales.scale_mod, more)
                    score = rounded_difference(score, reference[0][j])
                    exponent = cute.math.fma(score, scales.scale_log2, -lse[j])
                else:
                    low = more - lse[j] if const_expr(traits.adds) else -lse[j]
                    exponent = cute.math.fma(scores[r, c], scales.scale_log2, low)
                prob = cute.math.exp2(exponent, fastmath=True)
                if const_expr(not traits.adds):
                    prob = cutlass.select_(exist[r], prob, Float32(0.0))
                grad = prob * (dprobs[r, c] - delta[j])
                if const_expr(traits.is_banded):
                    # what is hidden may be anything, and 0 times NaN is NaN
                    grad = cutlass.select_(prob > 0.0, grad, Float32(0.0))
                if const_expr(traits.sums):
                    total = wgmma.rows_by_cols(accs[2])
                    total[r, c] = total[r, c] + grad
                probs.append(prob)
                grads.append(grad)
            for kept, pair in zip(words, (probs, grads), strict=True):
                wgmma.keep_pair(kept, traits.dtype, r, 2 * g, *pair)


def store_grads(traits: Any, smem: cute.Tensor, words: cute.Tensor, block: int = 0) -> None:
    """Write dS^T of a block in (queries, 64 keys, warpgroups), a query's keys contiguous."""
    values = wgmma.rounded_values(words, traits.dtype)
    by_keys = transposed(smem)[None, None, mma_warpgroup_idx()]
    tile = cute.local_tile(by_keys, (wgmma.ROWS_PER_WARPGROUP, traits.block_m), (0, block))
    store_rows(values, traits.mma_words(traits.block_m), tile, transposes=True)


@cute.jit
def clear_marked(
    words: tuple,
    rows: tuple,
    num_rows: cutlass.Constexpr[int],
    warps: tuple,
    sync: cutlass.Constexpr[Callable[[], None]],
):
    """Clear marked rows (`core.row_blocks`) of Q and dO, (row, column), by some warps, which `sync`
    waits for. words: of marks. warps: the number of this one, and how many."""
    some = Int32(0)
    for word in words:
        some = some | word
    if some != 0:
        for j in cutlass.range_constexpr(-(-num_rows // MARKS_PER_WORD)):
            first, count = j * MARKS_PER_WORD, min(MARKS_PER_WORD, num_rows - j * MARKS_PER_WORD)
            for row in cutlass.range(warps[0], count, warps[1], unroll=1):
                if (words[j] >> row) & 1 != 0:
                    for tensor in rows:
                        clear_row(tensor[first + row, None])
        cute.arch.fence_proxy("async.shared", space="cta")
        sync()


def keys_exist(first_key: Int32, seqlen_k: Int32) -> tuple[Boolean, ...]:
    """Of this thread's keys in a tile of this warpgroup."""
    thread = thread_in_warpgroup()
    rows = range(wgmma.ROWS_PER_THREAD)
    return tuple(first_key + wgmma.row_of(thread, r) < seqlen_k for r in rows)
