"""Keys and values in fp8 as tensors of numbers in 16 bits, before a prefill over them.

`(cache.float() * descale).to(dtype)`, of the rows in use alone. Rows of a sequence lie side by side
in the result, also if those of the cache lie in pages. Numbers of pages that do not exist are
clamped, as attention does.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from flash_mask_cute.core.fp8_codes import CODES, numbers_of

NUM_THREADS = 256
# Codes that a thread reads at once, so that a warp writes bytes side by side, and such reads of a
# thread that are not waited for at once.
UNIT, READS = 8, 8


class Dequantise:
    """Converts codes of float8_e4m3fn to BFloat16 or Float16; to be passed to `cute.compile`."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mK_in_16_bits: cute.Tensor,
        mV_in_16_bits: cute.Tensor,
        mSeqUsedK: cute.Tensor | None,
        mPageTable: cute.Tensor | None,
        mKDescale: cute.Tensor | None,
        mVDescale: cute.Tensor | None,
        stream,
    ):
        """Launch on `stream`.

        :param mK, mV: codes (batch, rows, heads, d), or with mPageTable (pages, page_size, heads,
            d); rows of d bytes begin at multiples of 16 bytes
        :param mK_in_16_bits, mV_in_16_bits: (batch, rows, heads, d), the last stride 1, d a
            multiple of 16
        :param mSeqUsedK: int32 (batch,), rows in use, or None: all
        :param mPageTable: int32 (batch, pages of a sequence), or None
        :param mKDescale, mVDescale: fp32 (batch, heads), or the shape of mK without d, or None: 1
        """
        batch, rows, heads, _ = mK_in_16_bits.shape
        least = min(_rows_of_step(x) for x in (mK_in_16_bits, mV_in_16_bits)) * READS
        tensors = (mK, mK_in_16_bits, mKDescale), (mV, mV_in_16_bits, mVDescale)
        parts = cute.ceil_div(rows, least)
        self.kernel(tensors, mSeqUsedK, mPageTable, parts).launch(
            # in one dimension: the others have at most 65535
            grid=(2 * heads * parts * batch, 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        mSeqUsedK: cute.Tensor | None,
        mPageTable: cute.Tensor | None,
        parts: Int32,
    ):
        number, _, _ = cute.arch.block_idx()
        keys, values = tensors
        heads = keys[1].shape[2]
        # CTAs of the heads of a row run at the same time
        of_batch = number // (2 * heads)
        head, batch_idx = number - of_batch * (2 * heads), of_batch // parts
        work = batch_idx, of_batch - batch_idx * parts
        if head < heads:
            self._dequantise(*keys, mSeqUsedK, mPageTable, (*work, head))
        else:
            self._dequantise(*values, mSeqUsedK, mPageTable, (*work, head - heads))

    @cute.jit
    def _dequantise(
        self,
        codes: cute.Tensor,
        wide: cute.Tensor,
        descale: cute.Tensor | None,
        used: cute.Tensor | None,
        table: cute.Tensor | None,
        work: tuple,
    ):
        """Convert this CTA's rows of keys or values. work: batch entry, part of its rows, head."""
        batch_idx, part, head = work
        thread, _, _ = cute.arch.thread_idx()
        rows, of_row, at_once = wide.shape[1], wide.shape[3] // UNIT, _rows_of_step(wide)
        if const_expr(used is not None):
            rows = cutlass.min(rows, used[batch_idx])
        first, column = part * (at_once * READS), thread % of_row * UNIT
        if first < rows:
            places, words, scales = [], [], []
            for i in range_constexpr(READS):
                # threads after the end have its last row once more
                row = cutlass.min(first + i * at_once + thread // of_row, rows - 1)
                entry, at = batch_idx, row
                if const_expr(table is not None):
                    page_size = codes.shape[1]
                    # unsigned, which takes half as many instructions
                    page = Int32(Uint32(row) // Uint32(page_size))
                    entry, at = table[batch_idx, page], row - page * page_size
                    entry = cutlass.max(cutlass.min(entry, codes.shape[0] - 1), 0)
                scale = None
                if const_expr(descale is not None):
                    if const_expr(cute.rank(descale) == 2):
                        scale = descale[batch_idx, head]
                    else:
                        scale = descale[entry, at, head]
                found = cute.make_rmem_tensor((UNIT // CODES,), Int32)
                found.store(_words(codes, (entry, at, head, column), UNIT // CODES).load())
                places.append((batch_idx, row, head, column))
                words.append(found)
                scales.append(scale)
            for place, found, scale in zip(places, words, scales, strict=True):
                pairs = cute.make_rmem_tensor((UNIT // 2,), Int32)
                for j in range_constexpr(UNIT // CODES):
                    pairs[2 * j], pairs[2 * j + 1] = numbers_of(found[j], scale, self.dtype)
                _words(wide, place, UNIT // 2).store(pairs.load())


def _rows_of_step(wide: cute.Tensor) -> int:
    """Rows of a head that the threads of a CTA read at once; some threads may read another one."""
    return NUM_THREADS // (wide.shape[3] // UNIT)


def _words(tensor: cute.Tensor, place: tuple, count: int) -> cute.Tensor:
    """Words of a tensor from an element on that begins at a multiple of `count` words."""
    begin = (tensor.iterator + cute.crd2idx(place, tensor.layout)).toint()
    pointer = cute.make_ptr(Int32, begin, tensor.memspace, assumed_align=count * 4)
    return cute.make_tensor(pointer, cute.make_layout(count))
