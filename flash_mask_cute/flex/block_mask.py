"""The lists of a torch `BlockMask`, converted to the form of this package.

torch does not count every change of a tensor (`keep_block_mask` names some). So each call converts
the lists on their device, and nothing is derived from their contents, unless the caller says that
they do not change.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    BlockSparseTensorsTorch,
    ComputedLists,
    LogicalBits,
    dense_states,
    from_block_mask,
    know_block_bits,
)
from flash_mask_cute.lowering.interval_rows import Rows
from flash_mask_cute.lowering.lower import IntervalForm
from flash_mask_cute.lowering.simplify import BandForm
from flash_mask_cute.lowering.watch import is_capturing
from flash_mask_cute.mask_prep.block_lists import order_lists
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.mask_mods import mask_of_rows
from flash_mask_cute.runtime.plain_tensors import are_plain


class _Intervals(NamedTuple):
    """The intervals of a mask_mod, for one state of its captured tensors, which stay alive."""

    key: tuple[Any, ...]
    captured: tuple[Tensor, ...]
    mask: ColumnMask | None


class _Kept(NamedTuple):
    """What was found of a block mask that its caller keeps, for one state of its tensors.

    says_no_more: by band, and (seqlen_q, seqlen_k). intervals: at most one entry.
    """

    state: tuple[Any, ...]
    lists: BlockSparseTensorsTorch
    says_no_more: dict[tuple[BandForm, tuple[int, int]], bool]
    intervals: list[_Intervals]


# By mask_block_cnt: what else the lists hold, and the block mask over aliases of their tensors,
# which do not keep them alive.
_adopted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def as_block_mask(lists: BlockSparseTensorsTorch | ComputedLists) -> BlockMask:
    """Lists of `create_block_mask` as a torch `BlockMask` over the same memory.

    The object is made once for the lists. Raises ValueError if they carry no mask_mod, or no block
    size.
    """
    given = from_block_mask(lists)
    if given.mask_mod is None:
        raise ValueError(
            f"block_mask is a {type(lists).__name__} without a mask_mod, which partial blocks "
            "need: pass what create_block_mask returned, or a BlockSparseTensorsTorch as "
            "block_mask=lists._replace(mask_mod=mask_mod)"
        )
    if given.block_size is None:
        raise ValueError(
            "block_mask has block_size None: lists._replace(block_size=(queries, keys))"
        )
    if torch.compiler.is_compiling():
        return _block_mask_of(given)
    state = *map(id, given[1:4]), given.block_size, given.seqlens, given.mask_mod
    known = _adopted.get(given.mask_block_cnt)
    if known is not None and known[0] == state:
        found: BlockMask = known[1]
        return found
    made = _block_mask_of(given)
    _adopted[given.mask_block_cnt] = state, made
    return made


def _block_mask_of(lists: BlockSparseTensorsTorch) -> BlockMask:
    assert lists.block_size is not None
    counts, indices, full_counts, full_indices = (
        None if x is None else x.detach() for x in lists[:4]
    )
    assert counts is not None and indices is not None
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, lists.block_size, lists.mask_mod, lists.seqlens
    )


class _Promise:
    """A call of `keep_block_mask`. is_over: there was another one since."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class CheckedLists:
    """The tensors and sizes of a block mask, for comparison at a later call.

    is_kept: its caller keeps it, and changes that torch counts matter.
    """

    __slots__ = ("_block_mask", "_promise", "_sizes", "_tensors", "is_kept")

    def __init__(self, block_mask: BlockMask) -> None:
        self._block_mask = weakref.ref(block_mask)
        self._promise = _promises.get(block_mask)
        self.is_kept = self._promise is not None
        self._sizes: Any = (block_mask.BLOCK_SIZE, block_mask.seq_lengths)
        self._tensors = [
            (None, None, None) if x is None else (weakref.ref(x), *_state(x)[1:])
            for x in _tensors_of(block_mask)
        ]

    def are_in(self, block_mask: BlockMask) -> bool:
        """Whether block_mask is the same object, with the same tensors; if it is kept, also not
        written to since."""
        if self._block_mask() is not block_mask:
            return False
        promise = self._promise
        is_kept = promise is not None
        # looking it up is slower
        if block_mask in _promises if promise is None else promise.is_over:
            return False
        found = zip(_tensors_of(block_mask), self._tensors, strict=True)
        for tensor, (ref, version, shape) in found:
            if tensor is None or ref is None:
                if tensor is not ref:
                    return False
                continue
            # a reference to what is gone gives None
            if tensor is not ref() or tensor.shape != shape:
                return False
            if is_kept and version is not None and tensor._version != version:
                return False
        sizes: Any = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        return bool(sizes == self._sizes)


def _tensors_of(block_mask: BlockMask) -> tuple[Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )  # fmt: skip


# Of block masks that their callers keep, and what was made since.
_promises: weakref.WeakKeyDictionary[BlockMask, _Promise] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[BlockMask, _Kept] = weakref.WeakKeyDictionary()


def keep_block_mask(block_mask: BlockMask) -> BlockMask:
    """Say that a block mask does not change, so `flex_attention` keeps what it derives from it.

    The promise covers contents of its lists and of tensors that its mask_mod captured. The first
    call of `flex_attention` then waits for the device once, and finds whether the mask is a window
    or column intervals (docs/flex.md). All later calls, such as those of other layers, run it in
    that form. They notice changes that torch counts. torch does not count changes by `.data` or
    numpy, by collectives of torch.distributed, by a replayed CUDA graph, or in inference mode to
    tensors that were made there. After such a change call this function again; a graph must be
    captured again.

    Returns:
        block_mask itself.

    Raises:
        TypeError: block_mask is no `BlockMask` of torch.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from flash_mask_cute import keep_block_mask
        >>> lists = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, "cpu")
        >>> mask = keep_block_mask(lists)
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask must be a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type(block_mask).__name__}"
        )
    before = _promises.get(block_mask)
    if before is not None:
        before.is_over = True
    _promises[block_mask] = _Promise()
    _kept.pop(block_mask, None)
    return block_mask


def is_kept(block_mask: BlockMask) -> bool:
    """Whether the caller called `keep_block_mask`."""
    return block_mask in _promises


def lists_of(block_mask: BlockMask) -> BlockSparseTensorsTorch:
    """int32 lists with ascending entries up to the count, as kernels walk them.

    torch's lists may have any order. The lists are made anew, on their device without waiting for
    it, unless the block mask is kept. They share no memory with the block mask. In a traced region
    operators of the graph make them.
    """
    if torch.compiler.is_compiling():
        return _sorted_lists(from_block_mask(block_mask))
    if not is_kept(block_mask):
        return _ordered_lists(from_block_mask(block_mask))
    return _kept_of(block_mask).lists


def says_no_more(block_mask: BlockMask, band: BandForm, seqlens: tuple[int, int]) -> bool:
    """Whether the lists of a kept block mask add nothing to a band: they hide nothing that the band
    shows, and call no block full that the band cuts. seqlens: queries and keys.

    It waits for the device once for a band and a state of the lists. In the capture of a CUDA graph
    the result is False if it is not known yet.
    """
    kept = _kept_of(block_mask)
    band_and_lengths = band, seqlens
    if band_and_lengths not in kept.says_no_more:
        if is_capturing():
            return False
        kept.says_no_more[band_and_lengths] = _agree(kept.lists, band, seqlens)
    return kept.says_no_more[band_and_lengths]


def intervals_of(
    block_mask: BlockMask, columns: IntervalForm, seqlens: tuple[int, int], batch: int
) -> ColumnMask | None:
    """A kept block mask as column intervals, or None if the mod has none or the lists add to it.

    It waits for the device once for a state of the lists and of the captured tensors. In the
    capture of a CUDA graph the result is None if it is not known yet.
    """
    kept = _kept_of(block_mask)
    captured = tuple(_state(x) for x in columns.captured)
    key = id(columns.form), captured, columns.numbers, seqlens, batch
    for known in kept.intervals:
        if known.key == key:
            return known.mask
    if is_capturing():
        return None
    with torch.inference_mode(False):
        mask = _column_mask(kept.lists, columns, seqlens, batch)
    kept.intervals[:] = [_Intervals(key, columns.captured, mask)]
    return mask


def _column_mask(
    lists: BlockSparseTensorsTorch, columns: IntervalForm, seqlens: tuple[int, int], batch: int
) -> ColumnMask | None:
    rows = columns.rows(seqlens, batch, lists.mask_block_cnt.device)
    if rows is None:
        return None
    return mask_of_rows(rows, seqlens, _lists_agree(lists, rows, seqlens)).mask


def _lists_agree(lists: BlockSparseTensorsTorch, rows: Rows, seqlens: tuple[int, int]) -> Tensor:
    """Whether no listed block hides visible scores of `rows`, and no full one has hidden ones."""
    states = dense_states(lists)
    block_q, block_k = lists.block_size or (1, 1)
    first = torch.arange(states.shape[-2], device=states.device)[:, None] * block_q
    last = (first + block_q).clamp(max=seqlens[0])
    low, high = (x[:, None] for x in (rows.low, rows.high))
    is_full = (low <= first) & (high >= last)
    is_empty = (high <= torch.maximum(low, first)) | (low >= last)
    by_block = (
        torch.nn.functional.pad(x, (0, -x.shape[-1] % block_k), value=True)
        .unflatten(-1, (-1, block_k))
        .all(-1)[:, None]
        for x in (is_full, is_empty)
    )
    is_full, is_empty = by_block
    return ~((states == EMPTY) & ~is_empty | (states == FULL) & ~is_full).any()


def _agree(lists: BlockSparseTensorsTorch, band: BandForm, seqlens: tuple[int, int]) -> bool:
    states = dense_states(lists)
    firsts, lasts = [], []
    for axis, (block, extent) in enumerate(zip(lists.block_size or (), seqlens, strict=True)):
        first = torch.arange(states.shape[axis - 2], device=states.device) * block
        firsts.append(first)
        lasts.append((first + block).clamp(max=extent) - 1)
    # kv_idx - q_idx in a block
    least = firsts[1] - lasts[0][:, None]
    most = lasts[1] - firsts[0][:, None]
    is_full = torch.ones_like(least, dtype=torch.bool)
    is_absent = torch.zeros_like(is_full)
    if band.right is not None:
        is_full, is_absent = is_full & (most <= band.right), is_absent | (least > band.right)
    if band.left is not None:
        is_full, is_absent = is_full & (least >= -band.left), is_absent | (most < -band.left)
    wrong = ((states == EMPTY) & ~is_absent) | ((states == FULL) & ~is_full)
    return not bool(wrong.any())


def _kept_of(block_mask: BlockMask) -> _Kept:
    given = from_block_mask(block_mask)
    state = tuple(_state(x) for x in given[:4]), given.block_size, given.seqlens
    kept = _kept.get(block_mask)
    if kept is None or kept.state != state:
        kept = _Kept(state, _ordered_lists(given), {}, [])
        if not is_capturing():
            _kept[block_mask] = kept
    return kept


def _state(tensor: Tensor | None) -> Any:
    """A value that changes when the tensor is replaced, or when torch counts a change."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.shape


def _ordered_lists(lists: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    # a dispatch mode may stand for other tensors
    if not lists.mask_block_idx.is_cuda or torch._C._len_torch_dispatch_stack() > 0:
        with torch.inference_mode(False), torch.no_grad():
            return _sorted_lists(lists)
    mask_cnt, mask_idx = _as_int32(lists.mask_block_cnt), _as_int32(lists.mask_block_idx)
    full_cnt = None if lists.full_block_cnt is None else _as_int32(lists.full_block_cnt)
    full_idx = None if lists.full_block_idx is None else _as_int32(lists.full_block_idx)
    shape = mask_idx.shape
    fits = mask_cnt.shape == shape[:3] and (full_cnt is None) is (full_idx is None)
    if full_cnt is not None and full_idx is not None:
        fits &= full_idx.shape == shape and full_cnt.shape == shape[:3]
    tensors = [x for x in (mask_cnt, mask_idx, full_cnt, full_idx) if x is not None]
    if not fits or len(shape) != 4 or not are_plain(*tensors):
        # to be refused by name
        return lists
    made = order_lists(mask_cnt, mask_idx, full_cnt, full_idx)
    ordered = BlockSparseTensorsTorch(*made.lists, lists.block_size, lists.seqlens)
    block_q, block_k = lists.block_size or (1, 1)
    know_block_bits(ordered, LogicalBits(*made.bits, block_q, block_k))
    return ordered


def _as_int32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int32 else tensor.int()


def _sorted_lists(lists: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    partial = _sorted(lists.mask_block_cnt, lists.mask_block_idx)
    full = _sorted(lists.full_block_cnt, lists.full_block_idx)
    return BlockSparseTensorsTorch(*partial, *full, lists.block_size, lists.seqlens)


def _sorted(count: Tensor | None, indices: Tensor | None) -> tuple[Any, Any]:
    if count is None or indices is None:
        return None, None
    blocks = indices.shape[-1]
    column = torch.arange(blocks, device=indices.device)
    is_used = column < count[..., None]
    ordered = torch.where(is_used, indices, blocks).sort(dim=-1).values
    ordered = torch.where(is_used, ordered, 0).to(torch.int32)
    return count.to(torch.int32, copy=True), ordered
