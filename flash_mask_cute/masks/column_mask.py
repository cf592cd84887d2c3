"""The column intervals of a mask, and data derived for each block of keys.

The minimum and maximum of each vector over the keys of a block decide whether the block is skipped
or left unmasked, as in FlashMask (Wang et al. 2024, section 4.2). These bounds belong to the mask:
every layer and every call that uses it shares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.limits import MAX_POSITION
from flash_mask_cute.mask_prep.column_bounds import fill_bounds, num_key_blocks
from flash_mask_cute.mask_prep.documents import BOUNDS_TILE, DocumentTensors
from flash_mask_cute.masks.builder_arguments import check_bool, check_int
from flash_mask_cute.masks.runs import MAX_INT32, fit_vectors, hidden_runs, in_form
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.runtime.checks import INTS
from flash_mask_cute.runtime.plain_tensors import check_plain, outside_inference_mode

NUM_VECTORS = (1, 2, 4)
ANY: Literal["any"] = "any"
# what a file or another process gets of a mask
_SAVED = "startend_row_indices", "causal", "documents", "seqlen_q", "one_sequence"

Versions: TypeAlias = tuple[int, int]
"""Of startend_row_indices and cu_seqlens_k, as torch counts their changes."""


@dataclass(frozen=True, eq=False, repr=False)
class ColumnMask:
    """For each key, the one or two ranges of queries that it is hidden from.

    startend_row_indices: int32 (batch, heads_mask, seqlen_k, n), any strides, n in {1, 2, 4}. batch
    may be 1 for all batch entries; heads_mask is 1, heads_kv or heads_q. A packed batch
    (cu_seqlens_k) has (1, heads_mask, total_k, n). By its n values, a key is hidden from the
    queries
        causal, n=1:     [c0, seqlen_q)
        causal, n=2:     [c0, c1)
        not causal, n=2: [c0, seqlen_q) and [0, c1)
        n=4:             [c0, c1) and [c2, c3)
    Rows are counted inside the sequence. A range that ends before it starts is empty. causal also
    hides the keys after a query, bottom-right aligned (k > q + seqlen_k - seqlen_q).

    documents: whether a sequence may hold documents, groups of tokens that see only each other.
    They are found on the device (`split`). Dense self-attention then computes each document as a
    sequence of its own, in both directions, if all heads share one mask and the call has no mods or
    block lists. The result is right in any case, but short sequences without documents are slower.
        True:  there probably are some, so calls are computed in this way.
        False: there are none, so they are not.
        None:  not known: large calls are (docs/masks.md).

    seqlen_q: the number of queries that the mask was made for, set by the builders; "any" if each
    key is hidden from all queries or from none. A call with another number of queries is refused,
    unless `q_start` gives their position in the mask. None: not known. It counts the queries of one
    batch entry, or of all packed sequences together if the mask belongs to a packed batch.

    one_sequence: whether each batch entry counts rows within one sequence, as masks of the builders
    do. Such a mask is refused if cu_seqlens_k packs several sequences.

    The tensor may be changed in place between calls; the host never reads its values.

    Bounds and documents are kept. They are computed on the stream of the first call that needs
    them. Later calls on other streams do not wait for it: order them after it by an event or
    `wait_stream`, and again after each change. A captured CUDA graph reads what was computed before
    the capture; with `refresh()` inside the capture, each replay computes it anew. torch does
    not count changes of tensors that were made in inference mode, so each call computes them for
    such a tensor. Builders never make one.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: the rank or n is another one, n is 1 without causal, or seqlen_q is negative or
            a string other than "any".

    Example:
        >>> import torch
        >>> from flash_mask_cute import ColumnMask
        >>> ends = torch.tensor([3, 3, 3, 8, 8, 8, 8, 8], dtype=torch.int32)  # of two documents
        >>> mask = ColumnMask(ends.view(1, 1, 8, 1), causal=True, documents=True, seqlen_q=8)
        >>> mask.dense(8)[0, 0, 4].tolist()  # what query 4 sees
        [False, False, False, True, True, False, False, False]
    """

    startend_row_indices: Tensor
    causal: bool
    documents: bool | None = None
    seqlen_q: int | Literal["any"] | None = None
    one_sequence: bool = False
    _bounds: dict[object, _Bounds] = field(default_factory=dict, init=False, repr=False)
    _documents: dict[int, _Found] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        indices = self.startend_row_indices
        if not isinstance(indices, Tensor):
            raise TypeError(
                "startend_row_indices must be an int32 tensor or a ColumnMask, got "
                f"{type(indices).__name__}"
            )
        check_bool("causal", self.causal)
        if not (self.documents is None or isinstance(self.documents, bool)):
            raise TypeError(f"documents={self.documents!r} is not a bool or None")
        check_bool("one_sequence", self.one_sequence)
        if indices.dtype != torch.int32:
            hint = ""
            if indices.dtype == torch.bool:
                hint = "; builders.from_dense(mask) makes column intervals of a dense mask"
            raise TypeError(
                f"startend_row_indices must have dtype int32, got {indices.dtype}{hint}"
            )
        if indices.dim() != 4 or indices.shape[3] not in NUM_VECTORS:
            raise ValueError(
                "startend_row_indices must have shape (batch, heads_mask, seqlen_k, n) with n in "
                f"{NUM_VECTORS}, got {tuple(indices.shape)}"
            )
        if indices.shape[3] == 1 and not self.causal:
            raise ValueError(
                "startend_row_indices with n = 1 hides rows below a key only and needs "
                f"causal=True, got causal={self.causal} and shape {tuple(indices.shape)}"
            )
        rows = self.seqlen_q
        if isinstance(rows, str):
            if rows != ANY:
                raise ValueError(f"seqlen_q={rows!r} is not an int, {ANY!r} or None")
        elif rows is not None:
            if isinstance(rows, bool) or not isinstance(rows, INTS):
                raise TypeError(f"seqlen_q={rows!r} is not an int, {ANY!r} or None")
            if rows < 0:
                raise ValueError(f"seqlen_q={rows} is negative")

    def __repr__(self) -> str:
        shape, documents = tuple(self.startend_row_indices.shape), ""
        if self.documents is not None:
            documents = f"documents={self.documents}, "
        return (
            f"ColumnMask(shape={shape}, causal={self.causal}, {documents}{self.extents}, "
            f"device={self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # bounds are kept by identity of tensors, which a copy in another process does not share
        return {name: getattr(self, name) for name in _SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # by name, and checked: `torch.load` hands on what a file holds
        told = {"documents": None, "seqlen_q": None, "one_sequence": False} | state
        for name in _SAVED:
            object.__setattr__(self, name, told[name])
        object.__setattr__(self, "_bounds", {})
        object.__setattr__(self, "_documents", {})
        self.__post_init__()

    @property
    def num_vectors(self) -> int:
        return self.startend_row_indices.shape[3]

    @property
    def device(self) -> torch.device:
        return self.startend_row_indices.device

    @property
    def extents(self) -> str:
        """The lengths that the mask was made for, in words: "64 queries x 64 keys"."""
        rows: Any = self.seqlen_q
        if rows is None or rows == ANY:
            rows = f"{rows or 'an unknown'} number of"
        return f"{rows} queries x {self.startend_row_indices.shape[2]} keys"

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ColumnMask:
        """The mask on a device: itself if it is there, else a copy without kept data.

        Raises:
            TypeError: device is no device; the dtype of a mask is always int32.
        """
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise TypeError(f"device={device!r} is not a device")
        indices = self.startend_row_indices
        moved = indices.to(torch.device(device), non_blocking=non_blocking)
        return self if moved is indices else self._with_indices(moved)

    def pin_memory(self) -> ColumnMask:
        """A mask in pinned memory, from which `to(device, non_blocking=True)` does not wait.

        A DataLoader with `pin_memory=True` calls this.
        """
        indices = self.startend_row_indices
        pinned = indices.pin_memory()
        return self if pinned is indices else self._with_indices(pinned)

    def _with_indices(self, indices: Tensor) -> ColumnMask:
        return ColumnMask(indices, self.causal, self.documents, self.seqlen_q, self.one_sequence)

    def __and__(self, other: ColumnMask) -> ColumnMask:
        """The mask that shows what both masks show, for every call that takes both.

        A side with one batch entry, or with one head, serves all of the other. The result is causal
        if one of the masks is, holds documents if one of them does, and has the fewest vectors that
        store it. The call waits for the device.

        Raises:
            TypeError: other is no ColumnMask.
            ValueError: the masks were made for other queries or keys, or do not fit each other; or
                they hide more than two separate ranges of queries of a key. The message names the
                first such column. Causal masking counts for none of them: what it hides depends on
                the lengths of a call.

        Example:
            >>> from flash_mask_cute import builders
            >>> (builders.causal_document([3, 5]) & builders.sliding_window(8, 2)).num_vectors
            1
        """
        if not isinstance(other, ColumnMask):
            return NotImplemented
        rows = _common_rows((self, other))
        indices = _broadcast_heads([self.startend_row_indices, other.startend_row_indices])
        batches = {x.shape[0] for x in indices} - {1}
        if len(batches) > 1:
            raise ValueError(f"masks have {_listed(x.shape[0] for x in indices)} batch entries")
        shape = (*(max(batches, default=1), *indices[0].shape[1:3]), -1)
        forms = [(x.expand(shape), y.causal) for x, y in zip(indices, (self, other), strict=True)]
        num_rows = rows if isinstance(rows, INTS) else MAX_INT32
        runs = hidden_runs(forms, int(num_rows))
        is_too_much = runs.num_runs > 2
        if bool(is_too_much.any()):
            batch_idx, head_idx, column = is_too_much.nonzero()[0].tolist()
            raise ValueError(
                f"column {column} (batch {batch_idx}, head {head_idx}) is hidden from "
                f"{int(runs.num_runs[batch_idx, head_idx, column])} separate ranges of queries by "
                "two masks together; column intervals hold two: give one of the masks as a mask_mod"
            )
        causal = self.causal or other.causal
        return ColumnMask(
            fit_vectors(runs, 0, int(num_rows), causal),
            causal,
            _common_documents((self, other)),
            rows,
            self.one_sequence or other.one_sequence,
        )

    @staticmethod
    def cat(masks: Sequence[ColumnMask]) -> ColumnMask:
        """The masks of several batches as the mask of one batch, in this order.

        The result holds documents if one of the masks does. Masks with fewer vectors, or with one
        head, take the form of the others. Nothing waits for the device.

        Raises:
            TypeError: masks is no sequence of ColumnMasks.
            ValueError: there are none; they were made for other queries or keys, do not fit each
                other, or only some are causal: causal masking holds for a whole batch.

        Example:
            >>> from flash_mask_cute import ColumnMask, builders
            >>> ColumnMask.cat([builders.causal_document([3, 5]), builders.causal(8)]).extents
            '8 queries x 8 keys'
        """
        if isinstance(masks, ColumnMask) or not isinstance(masks, Sequence):
            raise TypeError(f"masks={masks!r} is no sequence of ColumnMasks")
        for mask in masks:
            if not isinstance(mask, ColumnMask):
                raise TypeError(f"masks has a {type(mask).__name__}, which is no ColumnMask")
        if not masks:
            raise ValueError("masks is empty")
        rows, causal = _common_rows(masks), masks[0].causal
        if any(mask.causal is not causal for mask in masks):
            raise ValueError(
                f"masks have causal={_listed(mask.causal for mask in masks)}: causal masking holds "
                "for all entries of a batch, so all or none of them are causal"
            )
        most = max(mask.num_vectors for mask in masks)
        num_rows = int(rows) if isinstance(rows, INTS) else MAX_INT32
        forms = [in_form(x.startend_row_indices, causal, most, num_rows) for x in masks]
        return ColumnMask(
            torch.cat(_broadcast_heads(forms)),
            causal,
            _common_documents(masks),
            rows,
            any(mask.one_sequence for mask in masks),
        )

    def dense(self, seqlen_q: int, seqlen_k: int | None = None) -> Tensor:
        """The visible pairs, bool (batch, heads_mask, seqlen_q, seqlen_k).

        seqlen_k: the number of keys that count, by default all. A single sequence of a packed batch
        is `ColumnMask(mask.startend_row_indices[:, :, start:end], mask.causal)`.

        Raises:
            TypeError: a length is no integer.
            ValueError: a length is negative, or larger than the mask was made for.
        """
        indices = self.startend_row_indices
        check_int("seqlen_q", seqlen_q)
        if seqlen_k is not None:
            check_int("seqlen_k", seqlen_k)
        if isinstance(self.seqlen_q, INTS) and seqlen_q > self.seqlen_q:
            raise ValueError(f"seqlen_q={seqlen_q} of a mask with {self.seqlen_q} queries")
        if seqlen_k is None:
            seqlen_k = indices.shape[2]
        elif not 0 <= seqlen_k <= indices.shape[2]:
            raise ValueError(f"seqlen_k={seqlen_k} of a mask with {indices.shape[2]} keys")
        row = torch.arange(seqlen_q, device=self.device)[:, None]
        key = torch.arange(seqlen_k, device=self.device)
        values = [vector[:, :, None, :seqlen_k] for vector in indices.unbind(3)]
        visible = torch.ones(
            (*indices.shape[:2], seqlen_q, seqlen_k), dtype=torch.bool, device=self.device
        )
        for start, end in Intervals(self.num_vectors, self.causal).hidden_rows(values, seqlen_q):
            visible &= (row < start) | (row >= end)
        if self.causal:
            visible &= key <= row + (seqlen_k - seqlen_q)
        return visible

    def window(self, rows: tuple[int, int], keys: tuple[int, int]) -> tuple[ColumnMask, int]:
        """The mask between queries [a, b) and keys [c, d), and the `q_start` of a call with them.

        So `flash_attn_func(q[:, a:b], k[:, c:d], v[:, c:d], startend_row_indices=part,
        q_start=q_start)` scores what the whole call scores there, also beside causal= and a window.
        Rows of the part count from its first key, so q_start is negative for queries before that;
        with causal masking these see nothing. Parts of the keys are merged by
        `flash_attn_combine`. Nothing waits for the device. The part shares no kept data.

        Row r of a mask is at key r. If the mask was made for another number of queries than keys,
        the last row is at the last key, as in a call without q_start.

        Raises:
            TypeError: rows or keys is no pair of integers.
            ValueError: a range ends before it begins, or is not inside the mask.

        Example:
            >>> from flash_mask_cute import builders
            >>> part, q_start = builders.causal_document([6, 10]).window((8, 12), (4, 16))
            >>> part.startend_row_indices[0, 0, :, 0].tolist(), q_start
            ([4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8], 4)
        """
        indices = self.startend_row_indices
        num_keys = indices.shape[2]
        counted = self.seqlen_q if isinstance(self.seqlen_q, INTS) else None
        most = MAX_POSITION if counted is None else int(counted)
        first, end = _range("rows", rows, most, f"the {most} queries of the mask")
        first_key, end_key = _range("keys", keys, num_keys, f"the {num_keys} keys of the mask")
        # from rows of the mask to rows that count from the first key of the part
        shift = (0 if counted is None else num_keys - int(counted)) - first_key
        # what is outside of the rows makes no difference, and might not fit in an int32
        part = indices[:, :, first_key:end_key].clamp(first, end) + shift
        rows_of_part = max(end + shift, 0)
        return (
            ColumnMask(
                part, self.causal, self.documents, rows_of_part, one_sequence=self.one_sequence
            ),
            first + shift,
        )

    def bounds(self, tile_n: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
        """Minimum and maximum of each vector over each block of tile_n keys.

        Returns:
            int32 (batch, heads_mask, 2 * n, num_blocks), contiguous: entry 2 * v is the minimum of
            vector v over the keys of a block, entry 2 * v + 1 the maximum. With cu_seqlens_k, int32
            (num_sequences + 1,) on the same device, blocks do not cross sequences. The blocks of
            sequence b then start at `cu_seqlens_k[b] // tile_n + b`, and there are `total_k //
            tile_n + num_sequences` entries in all; unused entries hold anything.

        The tensor is kept: the next call with the same tile_n (and the same cu_seqlens_k) returns
        it again. If torch has recorded an in-place change of startend_row_indices or cu_seqlens_k
        since, the values are computed again first. Changes that torch does not record (through
        `.data` or numpy, by a collective of torch.distributed, in a replayed graph) need
        `refresh()`. Everything runs on the current stream without waiting, in one launch.

        Raises:
            TypeError, ValueError: an argument is unusable, such as a tensor subclass.
            NotImplementedError: no kernel for this GPU.
        """
        if not isinstance(tile_n, int) or isinstance(tile_n, bool):
            raise TypeError(f"tile_n={tile_n!r} is not an int")
        key = tile_n if cu_seqlens_k is None else (tile_n, id(cu_seqlens_k))
        kept = self._bounds.get(key)
        if kept is None or not kept.is_for(cu_seqlens_k):
            kept = self._bounds[key] = self._allocate(tile_n, cu_seqlens_k)
        versions = self._versions(cu_seqlens_k)
        if versions is None or kept.versions != versions:
            self._compute(kept, cu_seqlens_k, versions)
        return kept.values

    def split(self, batch: int) -> Documents:
        """The documents of `batch` sequences, as a packed batch.

        They are kept, and computed again after changes, like `bounds`. One host call makes four
        launches; these also compute the bounds of the packed mask for `BOUNDS_TILE` keys.

        Raises:
            TypeError: batch is no int, or startend_row_indices is of a tensor subclass.
            ValueError: batch is not positive or differs from the mask's batch, heads_mask is not 1,
                or there are no keys.
            NotImplementedError: no kernel for this GPU.
        """
        if not isinstance(batch, int) or isinstance(batch, bool):
            raise TypeError(f"batch={batch!r} is not an int")
        kept = self._documents.get(batch)
        if kept is None:
            kept = self._documents[batch] = self._allocate_documents(batch)
        version = _version(self.startend_row_indices)
        if version is None or kept.version != version:
            self._find_documents(kept)
        return kept.documents

    def refresh(self) -> None:
        """Compute again, in place, all bounds and documents that were requested.

        Each set of bounds takes one launch, documents take four.

        In a CUDA graph, each replay then computes them from what the tensors hold at that time.
        """
        self._refresh_bounds()
        for found in self._documents.values():
            self._find_documents(found)
            found.documents.mask._refresh_bounds(but=found.bounds)

    def _refresh_bounds(self, but: _Bounds | None = None) -> None:
        for kept in self._bounds.values():
            if kept is not but and not kept.is_orphan():
                cu_seqlens_k = None if kept.cu_seqlens_k is None else kept.cu_seqlens_k()
                self._compute(kept, cu_seqlens_k, self._versions(cu_seqlens_k))

    @outside_inference_mode
    def _allocate_documents(self, batch: int) -> _Found:
        if batch < 1:
            raise ValueError(f"batch={batch} is not positive")
        indices = self.startend_row_indices
        check_plain("startend_row_indices", indices)
        of_mask, heads, seqlen, _ = indices.shape
        if heads != 1 or seqlen == 0 or of_mask not in (1, batch):
            raise ValueError(
                f"startend_row_indices has shape {tuple(indices.shape)}; documents are found "
                f"where it is (1 or {batch}, 1, seqlen, n)"
            )
        split = DocumentTensors.empty_like(indices, batch)
        check_plain("cu_seqlens", split.cu_seqlens)
        mask = ColumnMask(split.rows, self.causal)
        bounds = _Bounds(BOUNDS_TILE, weakref.ref(split.cu_seqlens), split.bounds)
        mask._bounds[BOUNDS_TILE, id(split.cu_seqlens)] = bounds
        return _Found(split, Documents(split.cu_seqlens, mask), bounds)

    @outside_inference_mode
    def _find_documents(self, kept: _Found) -> None:
        kept.split.fill(self.startend_row_indices, self.causal)
        cu_seqlens, mask = kept.documents
        # so that bounds of them for other tiles are computed again
        for tensor in (cu_seqlens, mask.startend_row_indices):
            torch.autograd.graph.increment_version(tensor)
        if not self._is_captured():
            kept.version = _version(self.startend_row_indices)
            kept.bounds.versions = mask._versions(cu_seqlens)

    def _versions(self, cu_seqlens_k: Tensor | None) -> Versions | None:
        """None if torch does not count the changes of one of them."""
        of_indices = _version(self.startend_row_indices)
        of_lengths = 0 if cu_seqlens_k is None else _version(cu_seqlens_k)
        return None if of_indices is None or of_lengths is None else (of_indices, of_lengths)

    @outside_inference_mode
    def _allocate(self, tile_n: int, cu_seqlens_k: Tensor | None) -> _Bounds:
        if tile_n <= 0:
            raise ValueError(f"tile_n={tile_n} is not positive")
        check_plain("startend_row_indices", self.startend_row_indices)
        batch, heads, seqlen_k, num_vectors = self.startend_row_indices.shape
        reference = None
        if cu_seqlens_k is not None:
            self._check_cu_seqlens(cu_seqlens_k)
            reference = weakref.ref(cu_seqlens_k)
            for old in [key for key, kept in self._bounds.items() if kept.is_orphan()]:
                del self._bounds[old]
        num_blocks = num_key_blocks(seqlen_k, tile_n, cu_seqlens_k)
        values = torch.empty(
            (batch, heads, 2 * num_vectors, num_blocks), dtype=torch.int32, device=self.device
        )
        # a mode of torch may make others, which must not be kept
        check_plain("bounds", values)
        return _Bounds(tile_n, reference, values)

    def _check_cu_seqlens(self, cu_seqlens_k: Tensor) -> None:
        if not isinstance(cu_seqlens_k, Tensor):
            raise TypeError(f"cu_seqlens_k is a {type(cu_seqlens_k).__name__}, not a tensor")
        check_plain("cu_seqlens_k", cu_seqlens_k)
        if cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.dim() != 1 or len(cu_seqlens_k) < 1:
            raise ValueError(
                f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)} and dtype "
                f"{cu_seqlens_k.dtype}, not (num_sequences + 1,) and torch.int32"
            )
        if cu_seqlens_k.device != self.device:
            raise ValueError(f"cu_seqlens_k is on {cu_seqlens_k.device}, the mask on {self.device}")
        if self.startend_row_indices.shape[0] != 1:
            raise ValueError(
                f"startend_row_indices has batch {self.startend_row_indices.shape[0]}; with "
                "cu_seqlens_k it is (1, heads_mask, total_k, n)"
            )

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @outside_inference_mode
    def _compute(
        self, kept: _Bounds, cu_seqlens_k: Tensor | None, versions: Versions | None
    ) -> None:
        is_used = cu_seqlens_k is None or len(cu_seqlens_k) > 1
        if is_used and kept.values.numel() and self.startend_row_indices.numel():
            fill_bounds(self.startend_row_indices, kept.values, kept.tile_n, cu_seqlens_k)
            if self._is_captured():
                return  # nothing is computed before the graph runs
        kept.versions = versions


def _range(name: str, value: Any, most: int, what: str) -> tuple[int, int]:
    """A pair of integers inside [0, most]. what: in words."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_pair or not all(isinstance(x, INTS) and not isinstance(x, bool) for x in value):
        raise TypeError(f"{name}={value!r} is not (begin, end), two integers")
    begin, end = value
    if not 0 <= begin <= end <= most:
        raise ValueError(f"{name}={tuple(value)} is not a range inside {what}")
    return int(begin), int(end)


def _common_rows(masks: Sequence[ColumnMask]) -> int | Literal["any"] | None:
    """The common number of queries of masks of the same keys; an unknown one fits any."""
    keys = [mask.startend_row_indices.shape[2] for mask in masks]
    devices = [mask.device for mask in masks]
    rows: list[Any] = [mask.seqlen_q for mask in masks]
    if len(set(keys)) > 1:
        raise ValueError(f"masks have {_listed(keys)} keys")
    if len(set(devices)) > 1:
        raise ValueError(f"masks are on {_listed(devices)}")
    known = {int(x) for x in rows if isinstance(x, INTS)}
    if len(known) > 1:
        raise ValueError(f"masks were made for {_listed(rows)} queries")
    return known.pop() if known else ANY if all(x == ANY for x in rows) else None


def _common_documents(masks: Sequence[ColumnMask]) -> bool | None:
    told = [mask.documents for mask in masks]
    return True if True in told else None if None in told else False


def _broadcast_heads(indices: list[Tensor]) -> list[Tensor]:
    """Vectors of masks with as many heads as the one with the most.

    In a call that takes all of them, two numbers of heads above 1 are heads_kv and heads_q.
    """
    heads = {x.shape[1] for x in indices} - {1}
    most = max(heads, default=1)
    if len(heads) > 2 or any(most % n for n in heads):
        raise ValueError(
            f"masks have {_listed(x.shape[1] for x in indices)} heads; those of one call have 1, "
            "heads_kv or heads_q"
        )
    return [
        x.expand(-1, most, -1, -1)
        if x.shape[1] == 1
        else x.repeat_interleave(most // x.shape[1], 1)
        for x in indices
    ]


def _listed(values: Iterable[object]) -> str:
    return " and ".join(map(str, dict.fromkeys(values)))


class Documents(NamedTuple):
    """The documents of a mask as sequences of a packed batch.

    cu_seqlens: int32 (sequences + 1,), for both queries and keys; many sequences may be empty.
    mask: the mask of the packed batch.
    """

    cu_seqlens: Tensor
    mask: ColumnMask


@dataclass
class _Found:
    """Documents, their tensors, bounds for `BOUNDS_TILE`, and the version of their intervals."""

    split: DocumentTensors
    documents: Documents
    bounds: _Bounds
    version: int | None = None


@dataclass
class _Bounds:
    """Bounds for one tile_n and one cu_seqlens_k, and the versions of their inputs.

    cu_seqlens_k is a weak reference: the mask neither keeps old lengths alive, nor confuses them
    with another tensor that got the same `id`.
    """

    tile_n: int
    cu_seqlens_k: weakref.ref[Tensor] | None
    values: Tensor
    versions: Versions | None = None

    def is_for(self, cu_seqlens_k: Tensor | None) -> bool:
        return self.cu_seqlens_k is None or self.cu_seqlens_k() is cu_seqlens_k

    def is_orphan(self) -> bool:
        return self.cu_seqlens_k is not None and self.cu_seqlens_k() is None


# `torch.load`, which loads weights only, then takes files that hold masks
torch.serialization.add_safe_globals([ColumnMask])


def _version(tensor: Tensor) -> int | None:
    """The number of changes that torch counted; None if it counts none, in inference mode."""
    return None if tensor.is_inference() else tensor._version
