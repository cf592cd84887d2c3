"""Writes new keys and values after those of a cache, contiguous or paged, before attention.

A CTA processes a row of the new keys, of the new values or, with rotation, of the queries. The last
CTAs write the new number of keys of each sequence. Contents that the host would refuse on a CPU
(`call/cache_writes.py`) never cause a fault: rows and page numbers outside of the cache are
ignored, and positions outside of the rotary tables are moved to their ends. Of two rows for one
place, either may be written.

Into a cache in float8_e4m3fn a warp writes a row of a head: divided by its scale in fp32, which it
finds and writes if each row has one, and rounded to the nearest code, saturating.

Rotary embedding (RoFormer, Su et al., 2021) rotates the pairs of the first `2 * rotary_pairs`
elements of a key or query by the angles of its position, in fp32.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.limits import LARGEST_CODE, MAX_HEAD_DIM
from flash_mask_cute.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK

NUM_THREADS = 128
# elements that a thread has read before it writes the first one: attention waits for all this
AT_ONCE = 8
# codes of fp8 that a thread writes at once, as a word
CODES = 4
# words of a thread for a row of a head, at most
WORDS = MAX_HEAD_DIM // (CODES * WARP)


class NewRows(NamedTuple):
    """Keys and values (batch, row, heads, d), or (row, heads, d) with cu_seqlens (batch + 1,)."""

    k: cute.Tensor
    v: cute.Tensor
    cu_seqlens: cute.Tensor | None

    def seqlen(self) -> Int32:
        return self.k.shape[1] if self.cu_seqlens is None else Int32(0)


class Cache(NamedTuple):
    """k and v (entries, rows, heads, d), seqlens (batch,) with the padding, total (batch,) to be
    written. leftpad (batch,): rows before the first key. batch_idx (batch,): the entry of a
    sequence; page_table (batch, max_pages): its entries, which are pages. Both None: entry b. Both
    given: batch_idx has rows of page_table. k and v of bytes are codes of fp8, with the scales
    k_descale and v_descale: (batch, heads), or (entries, rows, heads), which are written, or 1."""

    k: cute.Tensor
    v: cute.Tensor
    seqlens: cute.Tensor
    total: cute.Tensor
    leftpad: cute.Tensor | None
    batch_idx: cute.Tensor | None
    page_table: cute.Tensor | None
    k_descale: cute.Tensor | None = None
    v_descale: cute.Tensor | None = None


class Rotary(NamedTuple):
    """cos and sin (positions, pairs); first (batch,): the position of new key 0, None: after the
    cached ones. q and q_out (batch, row, heads, d), or (row, heads, d) with cu_seqlens."""

    cos: cute.Tensor
    sin: cute.Tensor
    first: cute.Tensor | None
    q: cute.Tensor
    q_out: cute.Tensor
    cu_seqlens: cute.Tensor | None


class RowCoord(NamedTuple):
    """A row of a sequence: the sequence, and the row in it. is_valid: it exists."""

    batch_idx: Int32
    row: Int32
    is_valid: Boolean


class AppendKV:
    """Writes new rows into a cache; to be passed to `cute.compile`.

    :param interleaved: rotated pairs are neighbours, else they span the halves of the elements
    :param advances: query i is at the position of new key i, else all are at that of new key 0
    """

    def __init__(self, interleaved: bool = True, advances: bool = True):
        self.interleaved = interleaved
        self.advances = advances

    @cute.jit
    def __call__(self, new: tuple, cache: tuple, rotary: tuple | None, stream):
        """Launch on `stream`; the arguments are the fields of `NewRows`, `Cache` and `Rotary`."""
        new, cache = NewRows(*new), Cache(*cache)
        num_batch = cache.seqlens.shape[0]
        rows_k, rows_q = _num_rows(new.k), Int32(0)
        if const_expr(rotary is not None):
            rotary = Rotary(*rotary)
            rows_q = _num_rows(rotary.q)
        grid = 2 * rows_k + rows_q + cute.ceil_div(num_batch, NUM_THREADS)
        self.kernel(new, cache, rotary, rows_k, rows_q).launch(
            grid=(grid, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, new: NewRows, cache: Cache, rotary: Rotary | None, rows_k: Int32, rows_q: Int32
    ):
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if cta < rows_k:
            self._append(new, cache, rotary, cta, of_keys=True)
        elif cta < 2 * rows_k:
            self._append(new, cache, rotary, cta - rows_k, of_keys=False)
        elif cta < 2 * rows_k + rows_q:
            if const_expr(rotary is not None):
                self._rotate_query(cache, rotary, cta - 2 * rows_k)
        else:
            thread, _, _ = cute.arch.thread_idx()
            batch_idx = (cta - 2 * rows_k - rows_q) * NUM_THREADS + thread
            if batch_idx < cache.seqlens.shape[0]:
                cache.total[batch_idx] = Int32(_lengths(new, cache, batch_idx).seqlen_k)

    @cute.jit
    def _append(
        self,
        new: NewRows,
        cache: Cache,
        rotary: Rotary | None,
        row: Int32,
        of_keys: cutlass.Constexpr[bool],
    ):
        place = _place(new.cu_seqlens, new.seqlen(), row)
        if place.is_valid:
            info = _lengths(new, cache, place.batch_idx)
            entry, target, exists = _slot(
                cache, place.batch_idx, info.offset_k + info.seqlen_k_og + place.row
            )
            if exists:
                rows, slots = (new.k, cache.k) if const_expr(of_keys) else (new.v, cache.v)
                source = _row(rows, new.cu_seqlens, place, row)
                position = Int32(0)
                if const_expr(of_keys and rotary is not None):
                    first = cache.seqlens if const_expr(rotary.first is None) else rotary.first
                    position = first[place.batch_idx] + place.row
                if const_expr(slots.element_type.width == 8):
                    descale = cache.k_descale if const_expr(of_keys) else cache.v_descale
                    turned = rotary if const_expr(of_keys) else None
                    at = place.batch_idx, entry, target
                    self._quantise(turned, position, source, slots, descale, at)
                elif const_expr(of_keys and rotary is not None):
                    self._rotate(rotary, position, source, slots[entry, target, None, None])
                else:
                    _copy(source, slots[entry, target, None, None])

    @cute.jit
    def _rotate_query(self, cache: Cache, rotary: Rotary, row: Int32):
        seqlen = Int32(0)
        if const_expr(rotary.cu_seqlens is None):
            seqlen = rotary.q.shape[1]
        place = _place(rotary.cu_seqlens, seqlen, row)
        if place.is_valid:
            first = cache.seqlens if const_expr(rotary.first is None) else rotary.first
            position = first[place.batch_idx]
            if const_expr(self.advances):
                position += place.row
            source = _row(rotary.q, rotary.cu_seqlens, place, row)
            target = _row(rotary.q_out, rotary.cu_seqlens, place, row)
            self._rotate(rotary, position, source, target)

    @cute.jit
    def _rotate(self, rotary: Rotary, position: Int32, source: cute.Tensor, target: cute.Tensor):
        """A row (heads, d) with its first elements rotated, the others unchanged."""
        thread, _, _ = cute.arch.thread_idx()
        heads, dim = source.shape
        pairs = rotary.cos.shape[1]
        for i in range(thread, heads * pairs, NUM_THREADS):
            head_idx = i // pairs
            pair = i - head_idx * pairs
            turned = self._turned(rotary, position, source, head_idx, pair)
            for place, number in turned:
                target[head_idx, place] = number.to(target.element_type)
        rest = dim - 2 * pairs
        for i in range(thread, heads * rest, NUM_THREADS):
            head_idx = i // rest
            at_dim = 2 * pairs + i - head_idx * rest
            target[head_idx, at_dim] = source[head_idx, at_dim]

    @cute.jit
    def _quantise(
        self,
        rotary: Rotary | None,
        position: Int32,
        source: cute.Tensor,
        slots: cute.Tensor,
        descale: cute.Tensor | None,
        at: tuple[Int32, Int32, Int32],
    ):
        """Write a row (heads, d) as codes, perhaps rotated. at: sequence, entry, cache row."""
        thread, _, _ = cute.arch.thread_idx()
        batch_idx, entry, target = at
        heads, dim = source.shape
        lane = thread % WARP
        for head_idx in range(thread // WARP, heads, NUM_THREADS // WARP):
            numbers = cute.make_rmem_tensor(WORDS * CODES, Float32)
            largest = Float32(0.0)
            for i in range_constexpr(WORDS * CODES):
                element = (i // CODES * WARP + lane) * CODES + i % CODES
                # lanes after the end have the last element again
                element = cutlass.min(element, dim - 1)
                number = self._element(rotary, position, source, head_idx, element)
                # what a cache in 16 bits would hold
                numbers[i] = number.to(source.element_type).to(Float32)
                largest = cute.arch.fmax(largest, cute.math.absf(numbers[i]))
            scale = Float32(1.0)
            if const_expr(descale is not None):
                if const_expr(cute.rank(descale) == 2):
                    scale = descale[batch_idx, head_idx]
                else:
                    largest = cute.arch.warp_reduction_max(largest)
                    scale = _divided(largest, Float32(LARGEST_CODE))
                    if not scale > Float32(0.0):
                        scale = Float32(1.0)
                    if lane == 0:
                        descale[entry, target, head_idx] = scale
            for i in range_constexpr(WORDS):
                first = (i * WARP + lane) * CODES
                of_word = [numbers[i * CODES + j] for j in range(CODES)]
                if const_expr(descale is not None):
                    of_word = [_divided(x, scale) for x in of_word]
                word = _codes(*of_word)
                if first < dim:
                    begin = slots.iterator + cute.crd2idx(
                        (entry, target, head_idx, first), slots.layout
                    )
                    space = slots.memspace
                    place = cute.make_ptr(Int32, begin.toint(), space, assumed_align=CODES)
                    cute.make_tensor(place, cute.make_layout(1))[0] = word

    @cute.jit
    def _element(
        self,
        rotary: Rotary | None,
        position: Int32,
        source: cute.Tensor,
        head_idx: Int32,
        element: Int32,
    ) -> Float32:
        """An element of a row (heads, d), rotated if it is one of the first ones."""
        number = source[head_idx, element].to(Float32)
        if const_expr(rotary is not None):
            pairs = rotary.cos.shape[1]
            if element < 2 * pairs:
                pair, is_second = element // 2, element % 2
                if const_expr(not self.interleaved):
                    is_second = element // pairs
                    pair = element - is_second * pairs
                (_, x), (_, y) = self._turned(rotary, position, source, head_idx, pair)
                number = cutlass.select_(is_second == 0, x, y)
        return number

    def _turned(
        self, rotary: Rotary, position: Int32, source: cute.Tensor, head_idx: Int32, pair: Int32
    ) -> tuple[tuple[Int32, Float32], tuple[Int32, Float32]]:
        """A pair of elements of a row (heads, d), rotated, each with its place."""
        at = cutlass.max(cutlass.min(position, rotary.cos.shape[0] - 1), 0)
        a, b = (2 * pair, 2 * pair + 1) if self.interleaved else (pair, pair + rotary.cos.shape[1])
        cos, sin = rotary.cos[at, pair].to(Float32), rotary.sin[at, pair].to(Float32)
        x, y = source[head_idx, a].to(Float32), source[head_idx, b].to(Float32)
        return (a, x * cos - y * sin), (b, x * sin + y * cos)


def _divided(x: Float32, y: Float32) -> Float32:
    """x / y, rounded as IEEE 754 says."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def _codes(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Numbers as codes of e4m3: nearest, ties to even, saturating; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


def _num_rows(tensor: cute.Tensor) -> Int32:
    shape = tensor.shape
    return shape[0] if cute.rank(tensor) == 3 else shape[0] * shape[1]


@cute.jit
def _place(cu_seqlens: cute.Tensor | None, seqlen: Int32, row: Int32) -> RowCoord:
    """The place of a tensor's row. seqlen: of each sequence if they are not packed."""
    batch_idx, first, is_valid = Int32(0), Int32(0), Boolean(True)
    if const_expr(cu_seqlens is None):
        batch_idx = row // seqlen
        first = batch_idx * seqlen
    else:
        # the last sequence that begins at the row or before it
        beyond = cu_seqlens.shape[0] - 1
        while batch_idx + 1 < beyond:
            middle = (batch_idx + beyond) // 2
            if cu_seqlens[middle] <= row:
                batch_idx = middle
            else:
                beyond = middle
        first = cu_seqlens[batch_idx]
        is_valid = row < cu_seqlens[batch_idx + 1]
    return RowCoord(batch_idx, row - first, is_valid)


def _row(
    tensor: cute.Tensor, cu_seqlens: cute.Tensor | None, place: RowCoord, row: Int32
) -> cute.Tensor:
    """The (heads, d) of a row; of a packed tensor, it is `row`."""
    if cu_seqlens is not None:
        return tensor[row, None, None]
    return tensor[place.batch_idx, place.row, None, None]


def _lengths(new: NewRows, cache: Cache, batch_idx: Int32) -> SeqlenInfoQKNewK:
    cached = SeqlenInfoQK(0, 0, 0, cache.seqlens[batch_idx])
    return SeqlenInfoQKNewK.create(batch_idx, cached, new.seqlen(), new.cu_seqlens, cache.leftpad)


@cute.jit
def _slot(cache: Cache, batch_idx: Int32, row: Int32) -> tuple[Int32, Int32, Boolean]:
    """Entry and row of the cache for a row of a sequence, and whether they exist."""
    num_entries, entry_rows = cache.k.shape[0], cache.k.shape[1]
    entry, exists = batch_idx, row >= 0
    if const_expr(cache.page_table is not None):
        page = row // entry_rows
        row -= page * entry_rows
        last = cache.page_table.shape[1] - 1
        exists = exists & (page <= last)
        if const_expr(cache.batch_idx is not None):
            of_table = cache.batch_idx[batch_idx]
            last_row = cache.page_table.shape[0] - 1
            exists = exists & (of_table >= 0) & (of_table <= last_row)
            batch_idx = cutlass.max(cutlass.min(of_table, last_row), 0)
        entry = cache.page_table[batch_idx, cutlass.max(cutlass.min(page, last), 0)]
    elif const_expr(cache.batch_idx is not None):
        entry = cache.batch_idx[batch_idx]
    exists = exists & (row < entry_rows) & (entry >= 0) & (entry < num_entries)
    return entry, row, exists


@cute.jit
def _copy(source: cute.Tensor, target: cute.Tensor):
    """A row (heads, d)."""
    thread, _, _ = cute.arch.thread_idx()
    heads, dim = source.shape
    size = heads * dim
    for first in range(thread, size, AT_ONCE * NUM_THREADS):
        elements = cute.make_rmem_tensor(AT_ONCE, source.element_type)
        for i in range_constexpr(AT_ONCE):
            at = cutlass.min(first + i * NUM_THREADS, size - 1)
            elements[i] = source[at // dim, at % dim]
        for i in range_constexpr(AT_ONCE):
            at = first + i * NUM_THREADS
            if at < size:
                target[at // dim, at % dim] = elements[i]
