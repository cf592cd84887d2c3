"""Scores of a warp's own rows, computed once more.

Where registers do not suffice to keep scores beside their probabilities, and a maximum proves too
old only afterwards, a warp recomputes what it needs, by itself: the products of a warpgroup would
need all four warps. `mma.sync` with 16 x 8 tiles has the fragments that WGMMA has, so column c of
a thread is column c again; a few columns at a time need few registers.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from flash_mask_cute.core.cta import WARPS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.softmax import OnlineSoftmax, round_pair
from flash_mask_cute.masks import bit_tile
from flash_mask_cute.sm90 import wgmma

# keys whose scores are there at a time, and a thread's columns of them
KEYS = 8
COLUMNS = KEYS // 4
_ATOM = (16, 8, 16)


@dataclass(frozen=True)
class ScoreReplay:
    """S = Q K^T of 64 query rows and a key block, from shared memory.

    sQ (64, tile_d), sK (tile_n, tile_d), both K-major. bits: which scores count, one word per row
    of this thread, None if all do. opaque_one: 1, which the compiler must not know.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    bits: tuple | None
    opaque_one: Int32
    dtype: cutlass.Constexpr[type]

    @cute.jit
    def renew(
        self, softmax: OnlineSoftmax, is_old: tuple, sums: tuple, probs: cute.Tensor
    ) -> tuple:
        """Take newer maxima where `is_old` says so, and replace these rows' probabilities.

        sums: of this thread's probabilities, per row. probs: their words, as `wgmma.keep_pair`
        writes them. Returns the factor per row for what the old maxima accumulated, and the sums.
        """
        cols = range(0, cute.size(probs), COLUMNS)
        largest = tuple(Float32(-Float32.inf) for _ in is_old)
        for first in cols:
            tile_max = softmax.tile_max(self._scores(first))
            largest = tuple(cute.arch.fmax(x, y) for x, y in zip(largest, tile_max, strict=True))
        factors = softmax.renew(largest, is_old)
        is_new = tuple(factor != 1.0 for factor in factors)

        def keep(first: int, r: int, c: int, p: Float32, q: Float32) -> None:
            word = round_pair(p, q, self.dtype)
            i = r + first + c
            probs[i] = cutlass.select_(is_new[r], word, probs[i])

        new_sums = tuple(Float32(0.0) for _ in is_old)
        for first in cols:
            added = softmax.exponentials(self._scores(first), partial(keep, first))
            new_sums = tuple(x + y for x, y in zip(new_sums, added, strict=True))
        sums = tuple(
            cutlass.select_(new, x, y) for new, x, y in zip(is_new, new_sums, sums, strict=True)
        )
        return factors, sums

    @cute.jit
    def _scores(self, first: cutlass.Constexpr) -> cute.Tensor:
        """Scores (rows, COLUMNS) of this thread's columns from `first` on."""
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, Float32, _ATOM),
            (WARPS_PER_WARPGROUP, 1, 1),
            permutation_mnk=(wgmma.ROWS_PER_WARPGROUP, KEYS, _ATOM[2]),
        )
        thread = thread_in_warpgroup()
        mma = tiled_mma.get_slice(thread)
        copy_q = cute.make_tiled_copy_A(self._load_atom(4), tiled_mma).get_slice(thread)
        copy_k = cute.make_tiled_copy_B(self._load_atom(2), tiled_mma).get_slice(thread)
        acc = cute.make_rmem_tensor(((2, 2), 1, KEYS // _ATOM[1]), Float32)
        acc.fill(0.0)
        # a loop in any case: else the compiler would have the fragments of all columns at once
        num_steps = cute.size(self.sQ, mode=[1]) // _ATOM[2] * self.opaque_one
        for k in cutlass.range(num_steps, unroll=1):
            q_tile = cute.local_tile(self.sQ, (wgmma.ROWS_PER_WARPGROUP, _ATOM[2]), (0, k))
            k_tile = cute.local_tile(self.sK, (KEYS, _ATOM[2]), (first // COLUMNS, k))
            rows_q = mma.make_fragment_A(mma.partition_A(q_tile))
            rows_k = mma.make_fragment_B(mma.partition_B(k_tile))
            cute.copy(copy_q, copy_q.partition_S(q_tile), copy_q.retile(rows_q))
            cute.copy(copy_k, copy_k.partition_S(k_tile), copy_k.retile(rows_k))
            cute.gemm(tiled_mma, acc, rows_q, rows_k, acc)
        scores = wgmma.rows_by_cols(acc)
        if const_expr(self.bits is not None):
            # other words than the scores themselves had, or the compiler would keep what it made of
            # those until here
            words = tuple((word * self.opaque_one) >> first for word in self.bits)
            bit_tile.hide_unset(scores, words)
        return scores

    def _load_atom(self, num_matrices: int) -> cute.CopyAtom:
        return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=num_matrices), self.dtype)
