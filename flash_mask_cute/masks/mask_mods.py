"""Column intervals of mask_mods written in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.lowering.convention import check_torch_mod
from flash_mask_cute.lowering.pair import memo_entry, stays_mod
from flash_mask_cute.lowering.watch import Memo, MemoEntry, is_capturing
from flash_mask_cute.masks.builder_arguments import Device, check_int, refuse_in_graph
from flash_mask_cute.masks.column_mask import ColumnMask

# what traces is loaded when there is something to trace
if TYPE_CHECKING:
    from flash_mask_cute.lowering.interval_rows import Read, Rows
    from flash_mask_cute.lowering.lower import IntervalForm, LoweredMod
    from flash_mask_cute.lowering.simplify import BandForm

_CPU = torch.device("cpu")


class FoundMask(NamedTuple):
    """mask: None if the rows are no intervals. are_inside: of the reads of the rows."""

    mask: ColumnMask | None
    are_inside: list[bool]


def mask_of_rows(rows: Rows, seqlens: tuple[int, int], agrees: Tensor | None = None) -> FoundMask:
    """The rows as a mask. It waits for the device, once. seqlens: queries and keys. agrees: what
    must hold beside what the rows need."""
    seqlen_q, seqlen_k = seqlens
    place = torch.arange(seqlen_k, device=rows.low.device)
    is_empty = rows.high <= rows.low
    # one flag then says what is hidden above the diagonal
    is_causal = (is_empty | (rows.low == (place - (seqlen_k - seqlen_q)).clamp(min=0))).all()
    is_right = rows.is_right if agrees is None else rows.is_right & agrees
    are_documents = rows.are_documents
    if seqlen_q == seqlen_k:
        are_documents = are_documents | _are_apart(rows, is_empty, seqlen_q)
    flags = torch.stack((is_right, is_causal, are_documents, *(x.is_inside for x in rows.reads)))
    is_right_known, is_causal_known, are_documents_known, *are_inside = flags.tolist()
    if not is_right_known:
        return FoundMask(None, are_inside)
    vectors = (rows.high.where(~is_empty, 0),) if is_causal_known else (rows.high, rows.low)
    indices = torch.stack(torch.broadcast_tensors(*vectors), -1)[:, None].to(torch.int32)
    mask = ColumnMask(indices, is_causal_known, are_documents_known, seqlen_q, one_sequence=True)
    return FoundMask(mask, are_inside)


def _are_apart(rows: Rows, is_empty: Tensor, seqlen: int) -> Tensor:
    """Whether there are documents: a token from which on queries see no key before it, nor queries
    before it a key from it on, and keys of both sides are seen."""
    seen_before = rows.high.where(~is_empty, 0).cummax(-1).values[..., :-1]
    seen_behind = rows.low.where(~is_empty, seqlen).flip(-1).cummin(-1).values.flip(-1)[..., 1:]
    begin = torch.arange(1, seqlen, device=rows.low.device)
    is_apart = (seen_before <= begin) & (begin <= seen_behind)
    return (is_apart & (seen_before > 0) & (seen_behind < seqlen)).any()


def mask_of_band(
    band: BandForm, seqlens: tuple[int, int], device: torch.device = _CPU
) -> ColumnMask:
    """A window as a mask. It waits for no device."""
    seqlen_q, seqlen_k = seqlens
    place = torch.arange(seqlen_k, device=device)
    high = torch.full_like(place, seqlen_q) if band.left is None else place + band.left + 1
    low = torch.zeros_like(place) if band.right is None else place - band.right
    is_causal = band.right == seqlen_k - seqlen_q
    vectors = [x.clamp(0, seqlen_q) for x in ((high,) if is_causal else (high, low))]
    indices = torch.stack(vectors, -1)[None, None].to(torch.int32)
    return ColumnMask(indices, is_causal, False, seqlen_q, one_sequence=True)


def from_mask_mod(
    mask_mod: Callable[..., Tensor],
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    device: Device = None,
) -> ColumnMask | None:
    """The column intervals of a mask_mod written in torch, or None if it has others.

    mask_mod(b, h, q_idx, kv_idx) -> bool, as FlexAttention takes it: documents, packed positions,
    windows, chunks, prefixes, padding, groups of image tokens, and what joins them
    (docs/masks.md#intervals-of-a-mask_mod lists them). It is traced once for its code, and no dense
    mask is made. The mask has the contents that the captured tensors have now. If there are any,
    the call waits for their device once. None: a key is seen by several ranges of queries, or the
    mask depends on the head; `flash_attn_func(mask_mod=mask_mod)` takes it.

    batch: entries, if the mod uses b. device: where the mask will be; by default that of the
    captured tensors.

    Raises:
        TypeError, NotImplementedError: mask_mod is no such function, or does what no kernel can.
        ValueError: a captured tensor is too small for these lengths or this batch, which names it;
            or it has several batch entries, and batch is 1.
        RuntimeError: a CUDA graph is captured, and mask_mod reads tensors; or torch.compile traces
            the call.

    Example:
        >>> import torch
        >>> from flash_mask_cute import builders
        >>> group = torch.tensor([-1, 0, 0, -1])  # an image inside of text
        >>> def image(b, h, q, k):
        ...     return (k <= q) | ((group[q] == group[k]) & (group[q] >= 0))
        >>> builders.from_mask_mod(image, 4, 4).dense(4)[0, 0, 1].tolist()
        [True, True, True, False]
    """
    refuse_in_graph("of a mask_mod:")
    check_int("seqlen_q", seqlen_q)
    check_int("seqlen_k", seqlen_k)
    check_int("batch", batch, at_least=1)
    from flash_mask_cute.lowering.lower import lower_mod
    from flash_mask_cute.lowering.trace import name_of

    place = None if device is None else torch.empty(0, device=device).device
    seqlens = seqlen_q, seqlen_k
    check_torch_mod(mask_mod, "mask_mod")
    lowered = lower_mod(mask_mod, "mask_mod", place)
    made = mask_without_contents(lowered, seqlens, batch)
    columns = lowered.columns
    if made is not None or columns is None:
        return made if made is None else _moved(made, place or torch.get_default_device())
    if not columns.captured:
        return None
    if is_capturing():
        raise RuntimeError(
            f"mask_mod {name_of(mask_mod)} reads tensors, and from_mask_mod waits for their "
            "contents, which the capture of a CUDA graph does not allow: make the mask before"
        )
    at = place or next((x.device for x in columns.captured if x.dim()), columns.captured[0].device)
    with torch.inference_mode(False):
        rows = columns.rows(seqlens, batch, at)
        if rows is None:
            return None
        for read in rows.reads:
            _check_entries(name_of(mask_mod), columns, read, batch)
        found = mask_of_rows(rows, seqlens)
    for read, is_inside in zip(rows.reads, found.are_inside, strict=True):
        if not is_inside:
            raise ValueError(
                f"mask_mod {name_of(mask_mod)} reads outside {_table(columns, read)}: it does not "
                f"fit seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, batch={batch}"
            )
    return found.mask


class ModForm(NamedTuple):
    """A mask_mod without its callable: the sides of a window, bottom-right aligned, or a mask."""

    window: tuple[int | None, int | None] | None
    mask: ColumnMask | None


# None: the mod stays one.
_forms: Memo[ModForm | None] = Memo()


def form_without_contents(
    mask_mod: Callable[..., Any], seqlens: tuple[int, int], batch: int, device: torch.device
) -> ModForm | None:
    """The form of a torch mask_mod that reads no tensor (contents might change unseen).

    None: it reads one, or has no such form, or nothing shows whether it is the same at the next
    call. It waits for no device, and is kept for the mod.

    Raises:
        NotImplementedError, TypeError: as `lower_mod`.
    """
    key = id(mask_mod), seqlens, batch, device
    entry = _forms.get(key)
    if entry is not None and entry.holds():
        form = entry.value
    elif not isinstance(mask_mod, FunctionType | functools.partial):
        return None
    else:
        form = _new_form(mask_mod, key)
    # what a captured graph reads must outlive it, and what is kept here may be dropped
    return None if form is not None and form.mask is not None and is_capturing() else form


def _new_form(mask_mod: Callable[..., Any], key: tuple[Any, ...]) -> ModForm | None:
    from flash_mask_cute.lowering.lower import lower_mod

    _, seqlens, batch, device = key
    lowered = lower_mod(mask_mod, "mask_mod", device)
    # None is right ever after, whatever the mod becomes
    stays: MemoEntry[Any] = MemoEntry(None, (), None, False)
    reads = lowered.band is None and (lowered.columns is None or lowered.columns.captured)
    if reads or not lowered.is_lasting:
        stays_mod.keep(id(mask_mod), stays, [mask_mod])
        return None
    window = None if lowered.band is None else lowered.band.as_window(*seqlens)
    if window is not None:
        form = ModForm(window, None)
    elif is_capturing():
        return None
    else:
        mask = mask_without_contents(lowered, seqlens, batch)
        if mask is None:
            _forms.keep(key, stays, [mask_mod])
            return None
        form = ModForm(None, _moved(mask, device))
    made: MemoEntry[ModForm | None] | None = memo_entry(form, [(lowered, False)], None)
    if made is not None:
        _forms.keep(key, made, [mask_mod])
    elif not is_capturing():
        stays_mod.keep(id(mask_mod), stays, [mask_mod])
        return None
    return form


def mask_without_contents(
    lowered: LoweredMod, seqlens: tuple[int, int], batch: int
) -> ColumnMask | None:
    """The mask of a mod that reads no tensor, on the CPU; None if it reads one, or if it is no
    intervals. It waits for no device."""
    with torch.inference_mode(False):
        if lowered.band is not None:
            return mask_of_band(lowered.band, seqlens)
        if lowered.columns is None or lowered.columns.captured:
            return None
        rows = lowered.columns.rows(seqlens, batch, _CPU)
        return None if rows is None else mask_of_rows(rows, seqlens).mask


def _moved(mask: ColumnMask, device: torch.device) -> ColumnMask:
    with torch.inference_mode(False):
        if device.type != "cuda":
            return mask.to(device)
        return mask.pin_memory().to(device, non_blocking=True)


def _table(columns: IntervalForm, read: Read) -> str:
    if read.captured is None:
        return "a tensor that it computes"
    shape = tuple(columns.captured[read.captured].shape)
    return f"{columns.paths[read.captured]}, which has shape {shape}"


def _check_entries(name: str, columns: IntervalForm, read: Read, batch: int) -> None:
    """Refuse to make one entry's mask, which serves all, of a table for several."""
    if batch == 1 and read.entries > 1:
        raise ValueError(
            f"mask_mod {name} reads the batch entry of {_table(columns, read)}: pass "
            f"batch={read.entries}; got batch=1, and the mask of one entry would serve all"
        )
