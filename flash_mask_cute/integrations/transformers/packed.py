"""Packed documents with a causal mask, a window or nothing else: column intervals in few operators.

transformers joins a mask function with `packed_sequence_mask_function`, and from 5.24 on counts
its places in each document (`remap_positions_for_packed_sequence`). The general search for
intervals takes milliseconds of host time for this, so the parts are taken out of the closures.
Contents that no documents have go through the general search.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from flash_mask_cute.lowering.lower import lower_mod
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.recent import Recent

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_causal = masking_utils.causal_mask_function
_JOINED = masking_utils.and_masks(_causal).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_NONE).__code__
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _remap is None else _remap(_causal, _NONE).__code__


class _Made(NamedTuple):
    """begins: (batch, seqlen - 1), whether a document begins at token i + 1."""

    begins: Tensor
    mask: ColumnMask


_last: dict[Any, _Made] = Recent(8)
"""The last mask of each kind and stream. Equal documents get it again, with what it keeps."""


def _captured(function: Any, code: CodeType | None) -> dict[str, Any]:
    if code is None or getattr(function, "__code__", None) != code:
        return {}
    names, cells = code.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def packed_columns(
    function: Any, batch: int, seqlen: int, device: torch.device
) -> ColumnMask | None:
    """The mask of a function for packed documents, with one wait; None for other functions."""
    joined = _captured(function, _JOINED).get("mask_functions", ())
    if len(joined) != 2:
        return None
    ids = _captured(joined[1], _PACKED).get("packed_sequence_mask")
    # joined[0] is of the places in the row, the function in it of those in a document
    remapped = _captured(joined[0], _REMAPPED)
    positions: Tensor | None = remapped.get("position_ids")
    if not isinstance(ids, Tensor):
        return None
    tensors = [x for x in (ids, positions) if x is not None]
    if any(x.shape != (batch, seqlen) or x.device != device for x in tensors):
        return None
    band = lower_mod(remapped.get("mask_function", joined[0]), "mask_mod", device).band
    window = None if band is None else band.as_window(seqlen, seqlen)
    if window is None:
        return None
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    place = device, stream, batch, seqlen, window
    with torch.inference_mode(False), torch.no_grad():
        steps = ids.diff(dim=1)
        begins = steps != 0
        is_known = (steps >= 0).all()
        if positions is not None:
            # each follows the one before it, so that differences are those of places in the row
            follows = positions.diff(dim=1) == 1
            is_known = is_known & (follows | begins).all() & (positions >= 0).all()
        last = _last.get(place)
        is_last = ~is_known if last is None else (begins == last.begins).all()
        is_known_here, is_last_here = torch.stack((is_known, is_last)).tolist()
        if not is_known_here:
            return None
        if last is None or not is_last_here:
            last = _last[place] = _Made(begins, _columns(begins, *window))
        return last.mask


def _columns(begins: Tensor, left: int | None, right: int | None) -> ColumnMask:
    seqlen = begins.shape[1] + 1
    place = torch.arange(seqlen, device=begins.device)
    pad = torch.nn.functional.pad
    is_last = pad(begins, (0, 1), value=True)
    ends = torch.where(is_last, place + 1, seqlen).flip(1).cummin(1).values.flip(1)
    vectors = [ends if left is None else ends.minimum(place + left + 1)]
    if right != 0:
        is_first = pad(begins, (1, 0), value=True)
        starts = torch.where(is_first, place, 0).cummax(1).values
        vectors.append(starts if right is None else starts.maximum(place - right))
    indices = torch.stack(vectors, -1)[:, None].int()
    return ColumnMask(indices, right == 0, True, seqlen, one_sequence=True)
