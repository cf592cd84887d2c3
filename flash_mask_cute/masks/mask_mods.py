"""Column intervals of mask_mods written in torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.lowering.convention import check_torch_mod
from flash_mask_cute.lowering.interval_rows import Read, Rows
from flash_mask_cute.lowering.lower import IntervalForm, LoweredMod, lower_mod
from flash_mask_cute.lowering.pair import memo_entry, stays_mod
from flash_mask_cute.lowering.simplify import BandForm
from flash_mask_cute.lowering.trace import name_of
from flash_mask_cute.lowering.watch import Memo, MemoEntry, is_capturing
from flash_mask_cute.masks.column_mask import ColumnMask

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
    # what is hidden above the diagonal is then told by one flag
    is_causal = (is_empty | (rows.low == (place - (seqlen_k - seqlen_q)).clamp(min=0))).all()
    is_right = rows.is_right if agrees is None else rows.is_right & agrees
    flags = torch.stack(
        (is_right, is_causal, rows.are_documents, *(x.is_inside for x in rows.reads))
    )
    is_right_known, is_causal_known, are_documents, *are_inside = flags.tolist()
    if not is_right_known:
        return FoundMask(None, are_inside)
    vectors = (rows.high.where(~is_empty, 0),) if is_causal_known else (rows.high, rows.low)
    indices = torch.stack(torch.broadcast_tensors(*vectors), -1)[:, None].to(torch.int32)
    mask = ColumnMask(indices, is_causal_known, are_documents, seqlen_q, one_sequence=True)
    return FoundMask(mask, are_inside)


def mask_of_band(band: BandForm, seqlens: tuple[int, int]) -> ColumnMask:
    """A window as a mask, on the CPU."""
    seqlen_q, seqlen_k = seqlens
    place = torch.arange(seqlen_k, device=_CPU)
    high = torch.full_like(place, seqlen_q) if band.left is None else place + band.left + 1
    low = torch.zeros_like(place) if band.right is None else place - band.right
    is_causal = band.right == seqlen_k - seqlen_q
    vectors = [x.clamp(0, seqlen_q) for x in ((high,) if is_causal else (high, low))]
    indices = torch.stack(vectors, -1)[None, None].to(torch.int32)
    return ColumnMask(indices, is_causal, False, seqlen_q, one_sequence=True)


def mask_of_mod(
    mask_mod: Callable[..., Any],
    seqlens: tuple[int, int],
    batch: int,
    device: torch.device | None,
) -> ColumnMask | None:
    """As `builders.from_mask_mod`, whose arguments but mask_mod are checked."""
    check_torch_mod(mask_mod, "mask_mod")
    lowered = lower_mod(mask_mod, "mask_mod", device)
    made = mask_without_contents(lowered, seqlens)
    columns = lowered.columns
    if made is not None or columns is None:
        return made if made is None else _moved(made, device or torch.get_default_device())
    if not columns.captured:
        return None
    if is_capturing():
        raise RuntimeError(
            f"mask_mod {name_of(mask_mod)} reads tensors, and from_mask_mod waits for their "
            "contents, which the capture of a CUDA graph does not allow: make the mask before"
        )
    at = device or next((x.device for x in columns.captured if x.dim()), columns.captured[0].device)
    with torch.inference_mode(False):
        rows = columns.rows(seqlens, batch, at)
        if rows is None:
            return None
        for read in rows.reads:
            _check_entries(mask_mod, columns, read, batch)
        found = mask_of_rows(rows, seqlens)
    for read, is_inside in zip(rows.reads, found.are_inside, strict=True):
        if not is_inside:
            raise ValueError(
                f"mask_mod {name_of(mask_mod)} reads outside {_table(columns, read)}: it does not "
                f"fit seqlen_q={seqlens[0]}, seqlen_k={seqlens[1]}, batch={batch}"
            )
    return found.mask


class ModForm(NamedTuple):
    """A mask_mod without its callable: the sides of a window, bottom-right aligned, or a mask."""

    window: tuple[int | None, int | None] | None
    mask: ColumnMask | None


# None: the mod stays one.
_forms: Memo[ModForm | None] = Memo()


def form_without_contents(
    mask_mod: Callable[..., Any], seqlens: tuple[int, int], device: torch.device
) -> ModForm | None:
    """The form of a torch mask_mod that reads no tensor, whose contents might change unseen.

    None: it reads one, or has no such form. It waits for no device, and is kept for the mod.

    Raises:
        NotImplementedError, TypeError: as `lower_mod`.
    """
    key = id(mask_mod), seqlens, device
    entry = _forms.get(key)
    if entry is not None and entry.holds():
        form = entry.value
    else:
        lowered = lower_mod(mask_mod, "mask_mod", device)
        form = _form_without_contents(lowered, seqlens, device)
        # of an object without weak references nothing is kept
        with suppress(TypeError):
            if lowered.band is None and (lowered.columns is None or lowered.columns.captured):
                # right ever after, whatever changes
                stays_mod.keep(id(mask_mod), MemoEntry(None, (), None, False), [mask_mod])
            elif made := memo_entry(form, [(lowered, False)], None):
                _forms.keep(key, made, [mask_mod])
    # what a captured graph reads must outlive it, and what is kept here may be dropped
    return None if form is not None and form.mask is not None and is_capturing() else form


def _form_without_contents(
    lowered: LoweredMod, seqlens: tuple[int, int], device: torch.device
) -> ModForm | None:
    if lowered.band is not None:
        window = lowered.band.as_window(*seqlens)
        if window is not None:
            return ModForm(window, None)
    mask = None if is_capturing() else mask_without_contents(lowered, seqlens)
    return None if mask is None else ModForm(None, _moved(mask, device))


def mask_without_contents(lowered: LoweredMod, seqlens: tuple[int, int]) -> ColumnMask | None:
    """The mask of a mod that reads no tensor, on the CPU; None if it reads one, or if it is no
    intervals. It waits for no device."""
    with torch.inference_mode(False):
        if lowered.band is not None:
            return mask_of_band(lowered.band, seqlens)
        if lowered.columns is None or lowered.columns.captured:
            return None
        rows = lowered.columns.rows(seqlens, 1, _CPU)
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


def _check_entries(
    mask_mod: Callable[..., Any], columns: IntervalForm, read: Read, batch: int
) -> None:
    """Refuse to make one entry's mask, which serves all, of a table for several."""
    if batch == 1 and read.entries > 1:
        raise ValueError(
            f"mask_mod {name_of(mask_mod)} reads the batch entry of {_table(columns, read)}: pass "
            f"batch={read.entries}; got batch=1, and the mask of one entry would serve all"
        )
