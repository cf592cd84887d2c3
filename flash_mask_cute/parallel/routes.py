"""Which keys each rank needs of each other one, and the masks of a rank's own rows over them.

Both sides of a message compute its size from the mask and the plan (`agreement.py` compares these).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.key_rows import KeyRows
from flash_mask_cute.parallel.planning import Plan
from flash_mask_cute.parallel.visibility import Visibility, Window, rows_before


class Band(NamedTuple):
    """What a call hides beside its mask. window: sides, None if open."""

    causal: bool
    window: Window


class Settings(NamedTuple):
    """The options of a call. softmax_scale: None for the default."""

    softmax_scale: float | None
    softcap: float
    deterministic: bool
    band: Band


@dataclass(frozen=True)
class Routes:
    """Of one rank.

    sends: which of the own keys each rank needs, the own one too. receives: how many keys come from
    each rank. masks: of the own rows over these keys, None if there are none. whole: over all of
    them, in the order of ranks.
    """

    sends: tuple[KeyRows, ...]
    receives: tuple[int, ...]
    masks: tuple[ColumnMask | None, ...]
    whole: ColumnMask


_Key = tuple[Plan, int, Band, torch.device, int | None]
_OF_MASKS: WeakKeyDictionary[ColumnMask, dict[_Key, Routes]] = WeakKeyDictionary()
_OF_BANDS: dict[_Key, Routes] = {}
_MOST_KEPT = 64


def routes_of(
    mask: ColumnMask | None, band: Band, plan: Plan, rank: int, device: torch.device
) -> Routes:
    """Found once for a mask and its contents, with a wait for the device.

    Raises:
        NotImplementedError: column intervals cannot hold the mask together with the band.
    """
    version = version_of(mask)
    key = plan, rank, band, device, version
    kept = _OF_BANDS if mask is None else _OF_MASKS.setdefault(mask, {})
    found = kept.get(key)
    # torch counts no changes of a tensor of inference mode
    if found is None or version == -1:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        found = kept[key] = _find(mask, band, plan, rank, device)
    return found


def version_of(mask: ColumnMask | None) -> int | None:
    """How often torch has counted a change of a mask; -1 if it counts none."""
    if mask is None:
        return None
    indices = mask.startend_row_indices
    return -1 if indices.is_inference() else indices._version


@torch.no_grad()
def _find(
    mask: ColumnMask | None, band: Band, plan: Plan, rank: int, device: torch.device
) -> Routes:
    seqlen, count = plan.seqlen, plan.rows_per_rank
    seen = Visibility.of(mask, band.causal, band.window, seqlen, device)
    if not seen.fits(seqlen):
        raise NotImplementedError(
            "mask hides some key from more than two separate ranges of queries together with "
            f"causal={band.causal} and window_size={band.window}, which column intervals of a part "
            "cannot hold: use method='ulysses'"
        )
    indices = [plan.index(r, device) for r in range(plan.world)]
    own = indices[rank]
    sends = []
    for rows in indices:
        of_rank = seen.among(rows_before(rows, seqlen), own)
        sends.append(KeyRows.where(of_rank.is_seen(count)))
    before = rows_before(own, seqlen)
    needed = [keys[seen.among(before, keys).is_seen(count)] for keys in indices]
    masks = [seen.among(before, keys).mask(count) if len(keys) else None for keys in needed]
    whole = seen.among(before, torch.cat(needed)).mask(count)
    return Routes(tuple(sends), tuple(map(len, needed)), tuple(masks), whole)
