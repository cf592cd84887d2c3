"""The backward between its products, for any layout of scores: P from S, dS from dP.

Rows are keys and columns are queries. There are no pipelines here: everything works in registers,
and reads the statistics of the columns from shared memory.

The scores of a score_mod, and so their LSE, may have any magnitude. An exponent is one multiply-add
with LSE if LSE is near 0. Otherwise the query has a reference, which is subtracted from its scores
first. Blocks without such a query, nearly all, execute no additional instruction.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from flash_mask_cute.core.softmax import ScoreScales, any_in_warp


class BwdScoreArgs(NamedTuple):
    """Processing of the scores, and the tensors that the modifier reads and has gradients for.
    aux_grads: of each wanted tensor, its gradient, or the sums of it (`AuxSums`)."""

    scales: ScoreScales
    aux_tensors: Any
    aux_grads: tuple | None

    def of(self, wants_aux: tuple[int, ...], wanted: tuple[int, ...]) -> "BwdScoreArgs":
        """With the sums of some of the wanted tensors only."""
        assert self.aux_grads is not None
        pairs = zip(wants_aux, self.aux_grads, strict=True)
        return self._replace(aux_grads=tuple(x for i, x in pairs if i in wanted))


class Statistics(NamedTuple):
    """Statistics of queries in shared memory, for a thread's columns: LSE to base 2, delta, and the
    reference that is subtracted from scores of any magnitude, 0 for none.

    has_reference: whether some query of the block has one, a warp-uniform value; None: not checked.
    """

    lse: cute.Tensor
    delta: cute.Tensor
    reference: cute.Tensor | None = None
    has_reference: Boolean | None = None


def has_reference(references: cute.Tensor) -> Boolean:
    """Whether a query of a block has a reference, in shared memory; equal in the warp's lanes."""
    size = cute.size(references) // cute.arch.WARP_SIZE
    share = cute.make_rmem_tensor(size, Float32)
    cute.autovec_copy(cute.local_tile(references, (size,), (cute.arch.lane_idx(),)), share)
    return any_in_warp(tuple(share[i] != 0.0 for i in range(size)))


@cute.jit
def probabilities(scores: cute.Tensor, sLSE: cute.Tensor, scale_log2: Float32) -> None:
    """P = exp(S - LSE) in place of S."""
    lse = cute.make_rmem_tensor(sLSE.layout.shape, Float32)
    cute.autovec_copy(sLSE, lse)
    for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            exponent = cute.math.fma(scores[r, c], scale_log2, -lse[c])
            scores[r, c] = cute.math.exp2(exponent, fastmath=True)


@cute.jit
def score_gradients(grads: cute.Tensor, factors: cute.Tensor, sDelta: cute.Tensor) -> None:
    """dS = factor * (dP - delta) in place of dP. A factor is P, or the result of `ScoreChain`."""
    delta = cute.make_rmem_tensor(sDelta.layout.shape, Float32)
    cute.autovec_copy(sDelta, delta)
    for c in cutlass.range_constexpr(cute.size(grads, mode=[1])):
        for r in cutlass.range_constexpr(cute.size(grads, mode=[0])):
            grads[r, c] = factors[r, c] * (grads[r, c] - delta[c])
