"""The reduction of a row's fixed splits (`core/fixed_splits.py`), the same wherever it is computed.

Each operation is rounded on its own, so that no compiler merges two of them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_mask_cute.core.exp2 import LN_2, LOG2_E
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, SEQUENTIAL_SPLITS
from flash_mask_cute.core.partials import Partials
from flash_mask_cute.core.softmax import NEAREST, RowResult, rounded_difference

# numbers of a vector in memory
VECTOR = 4


class RowSums(NamedTuple):
    """The fixed splits of a row so far: the largest of their LSE, -inf if the row saw nothing, and
    the sum of exp(LSE - largest)."""

    largest: Float32
    total: Float32

    @staticmethod
    def empty() -> "RowSums":
        return RowSums(-Float32.inf, Float32(0.0))

    def add(self, lse: Float32, low: Float32 | None = None) -> tuple["RowSums", Float32, Float32]:
        """The sums with another fixed split, the factor for the output so far, and that of the
        fixed split's own. low: the rounding error of its LSE, if scores may have any size."""
        largest = cute.arch.fmax(self.largest, lse)
        reference = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        scale = _exp(rounded_difference(self.largest, reference), None)
        weight = _exp(rounded_difference(lse, reference), low)
        return RowSums(largest, cute.math.fma(self.total, scale, weight)), scale, weight

    def finish(self, sink: Float32 | None, has_low: bool) -> RowResult:
        """The factor for the output, LSE, and the rounding error of LSE. sink: one more logit of
        the row, or None. It comes last, whatever the row sees."""
        sums, scale = self, Float32(1.0)
        if sink is not None:
            sums, scale, _ = self.add(sink)
        # NaN is not empty
        is_empty = sums.total == Float32(0.0)
        log_total = cute.math.mul(
            cute.math.log2(sums.total, fastmath=True), Float32(LN_2), rounding=NEAREST
        )
        lse = cute.math.add(sums.largest, log_total, rounding=NEAREST)
        lse = cutlass.select_(is_empty, -Float32.inf, lse)
        factor = cute.math.mul(scale, cute.arch.rcp_approx(sums.total), rounding=NEAREST)
        factor = cutlass.select_(is_empty, Float32(0.0), factor)
        if not has_low:
            return RowResult(factor, lse)
        low = rounded_difference(sums.largest, lse) + log_total
        return RowResult(factor, lse, cutlass.select_(is_empty, Float32(0.0), low))


def reduced(before: Float32, scale: Float32, own: Float32, weight: Float32) -> Float32:
    """An element of the output with another fixed split, by the factors of `RowSums.add`."""
    return cute.math.fma(own, weight, cute.math.mul(before, scale, rounding=NEAREST))


def normalised(value: Float32, factor: Float32) -> Float32:
    """An element of the output; adding 0 makes every zero positive."""
    return cute.math.fma(value, factor, Float32(0.0))


def _exp(difference: Float32, low: Float32 | None) -> Float32:
    exponent = cute.math.mul(difference, Float32(LOG2_E), rounding=NEAREST)
    if low is not None:
        exponent = cute.math.fma(low, Float32(LOG2_E), exponent)
    return cute.math.exp2(exponent, fastmath=True)


class RunningSums(NamedTuple):
    """Memory for the state of a work tile between two of its fixed splits.

    memory: fp32 (CTAs, vectors, threads, VECTOR), of each thread the sums of its rows, their
    largest scores, and its elements of the output. split_blocks: key blocks of a fixed split.
    """

    memory: cute.Tensor
    split_blocks: Int32

    def of_thread(self, thread: Int32) -> cute.Tensor:
        """(vectors, VECTOR) of a thread of this CTA; thread: among those of MMA warpgroups."""
        cta, _, _ = cute.arch.block_idx()
        return self.memory[cta, None, thread, None]

    @property
    def num_splits(self) -> None:
        """As of `Partials`: work tiles are not counted by fixed splits."""
        return None

    def grid(self, by_tiles: Int32) -> Int32:
        return by_tiles

    @staticmethod
    def create(given: tuple | None) -> "RunningSums":
        """Raises ValueError: `given` is not for fixed splits in sequence."""
        if given is None or len(given) != len(RunningSums._fields):
            raise ValueError(
                "mPartials must be the memory of fixed splits in sequence, and their blocks"
            )
        return RunningSums(*given)


def destination_of(
    given: tuple | None, split: str | None, has_low: bool
) -> Partials | RunningSums | None:
    """As `Partials.create`, for any kernel with a `split`."""
    if split == SEQUENTIAL_SPLITS:
        return RunningSums.create(given)
    return Partials.create(given, None if split == ONE_FIXED_SPLIT else split, has_low)


@cute.jit
def read_vectors(memory: cute.Tensor, first: cutlass.Constexpr[int], target: cute.Tensor) -> None:
    """Copy vectors of a thread, from `first` on, to registers (VECTOR, n)."""
    for v in cutlass.range_constexpr(cute.size(target, mode=[1])):
        cute.autovec_copy(memory[first + v, None], target[None, v])


@cute.jit
def write_vectors(memory: cute.Tensor, first: cutlass.Constexpr[int], source: cute.Tensor) -> None:
    """Copy registers (VECTOR, n) to vectors of a thread, from `first` on."""
    for v in cutlass.range_constexpr(cute.size(source, mode=[1])):
        cute.autovec_copy(source[None, v], memory[first + v, None])
