"""The Blackwell backward between its products: P from S, dS from dP, two values per instruction."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_mask_cute.core.softmax import round_pair
from flash_mask_cute.rules import bit_tile


@cute.jit
def probabilities(scores: cute.Tensor, sLSE: cute.Tensor, scale_log2: Float32) -> None:
    """P = exp(S - LSE) in place of S, (1, columns)."""
    lse = cute.make_rmem_tensor(sLSE.layout.shape, Float32)
    cute.autovec_copy(sLSE, lse)
    for c in cutlass.range_constexpr(0, cute.size(scores), 2):
        exponents = cute.arch.fma_packed_f32x2(
            (scores[0, c], scores[0, c + 1]), (scale_log2, scale_log2), (-lse[c], -lse[c + 1])
        )
        for i in cutlass.range_constexpr(2):
            scores[0, c + i] = cute.math.exp2(exponents[i], fastmath=True)


@cute.jit
def score_gradients(grads: cute.Tensor, factors: cute.Tensor, sDelta: cute.Tensor) -> None:
    """dS = factor * (dP - delta) in place of dP, (1, columns)."""
    delta = cute.make_rmem_tensor(sDelta.layout.shape, Float32)
    cute.autovec_copy(sDelta, delta)
    for c in cutlass.range_constexpr(0, cute.size(grads), 2):
        difference = cute.arch.add_packed_f32x2(
            (grads[0, c], grads[0, c + 1]), (-delta[c], -delta[c + 1])
        )
        product = cute.arch.mul_packed_f32x2((factors[0, c], factors[0, c + 1]), difference)
        grads[0, c], grads[0, c + 1] = product[0], product[1]


def keep_rounded(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Neighbouring values in 16 bits, two to a word."""
    words = cute.make_rmem_tensor(cute.size(values) // 2, Int32)
    for i in range(cute.size(words)):
        words[i] = round_pair(values[0, 2 * i], values[0, 2 * i + 1], dtype)
    return words


class KeyElements:
    """`Elements` for a thread that has one key, and its half of a block's queries."""

    num_rows = lanes_per_row = 1

    def row_of(self, thread: Int32, r: int) -> Int32:
        return thread

    def first_col_of(self, thread: Int32) -> Int32:
        return Int32(0)

    def col_offset(self, c: int) -> int:
        return c

    def is_set(self, bits: tuple, r: int, c: int):
        return bit_tile.is_set(bits[c // bit_tile.WORD], c % bit_tile.WORD)

    def keep_pair(self, words: cute.Tensor, dtype: type, r: int, c: int, p, q) -> None:
        words[c // 2] = round_pair(p, q, dtype)


ELEMENTS = KeyElements()
