"""Zeros for the rows of new packed gradients after their last sequence.

No other kernel writes these rows, and only the device knows whether there are any.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from flash_mask_cute.kernels.bwd_preprocess import NUM_THREADS, VECTOR_16_BITS, vector_of

# a guess: enough to write a long tail fast, few enough to be started at once for none
NUM_CTAS = 128


class ZeroPadding:
    """Writes zeros after the last sequence; to be passed to `cute.compile`."""

    @cute.jit
    def __call__(
        self,
        mdQ: cute.Tensor | None,
        mdK: cute.Tensor | None,
        mdV: cute.Tensor | None,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`.

        :param mdQ: packed (total_q, heads_q, head_dim), 16 bits, rows contiguous and aligned to 16
            bytes, other strides free; None: it has no tail, or that is not to be written
        :param mdK, mdV: as mdQ, (total_k, heads_kv, head_dim) and (total_k, heads_kv, head_dim_v)
        :param mCuSeqlensQ, mCuSeqlensK: int32 (num_sequences + 1,); None where no tensor is given
            that they are for
        """
        padding = ((mdQ, mCuSeqlensQ), (mdK, mCuSeqlensK), (mdV, mCuSeqlensK))
        self.kernel(padding).launch(grid=(NUM_CTAS, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, padding: tuple):
        for i in range_constexpr(len(padding)):
            tensor, cu_seqlens = padding[i]
            if const_expr(tensor is not None):
                self._clear(tensor, cu_seqlens[cu_seqlens.shape[0] - 1])

    @cute.jit
    def _clear(self, tensor: cute.Tensor, end: Int32):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        num_rows, num_heads, dim = tensor.shape
        zeros = cute.make_rmem_tensor((VECTOR_16_BITS,), tensor.element_type)
        zeros.fill(0.0)
        per_head = dim // VECTOR_16_BITS
        for row in range(end + cta, num_rows, NUM_CTAS):
            for i in range(thread, num_heads * per_head, NUM_THREADS):
                head_idx = i // per_head
                target = vector_of(
                    tensor[row, head_idx, None], i - head_idx * per_head, VECTOR_16_BITS
                )
                cute.autovec_copy(zeros, target)
