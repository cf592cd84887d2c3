"""The mods of one attention call, of either convention, as CuTe mods over one list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.flex.convention import is_torch_mod


class CuteMods(NamedTuple):
    """What attention takes: two CuTe mods, or None, and the aux tensors that they read."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: list[Tensor] | None


def as_cute_mods(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device | str | None,
) -> CuteMods:
    """Lower what is written in torch, and leave CuTe mods and what is no mod as they are.

    aux_tensors: those of CuTe mods, as the caller passed them; what torch mods captured follows.
    A tensor that only a mask_mod reads has no gradient, for a mask is a step. device: as in
    `lower_mod`.

    Raises:
        TypeError, NotImplementedError: as `is_torch_mod` and `lower_mod`.
        ValueError: aux_tensors are given, and both mods are written in torch, which read none.
    """
    lowers_score = score_mod is not None and is_torch_mod(score_mod, "score_mod")
    lowers_mask = mask_mod is not None and is_torch_mod(mask_mod, "mask_mod")
    if not lowers_score and not lowers_mask:
        return CuteMods(score_mod, mask_mod, aux_tensors)  # type: ignore[arg-type]
    if aux_tensors and (lowers_score or score_mod is None) and (lowers_mask or mask_mod is None):
        raise ValueError(
            "aux_tensors are read by CuTe mods, and those given are written in torch: let them "
            f"capture the tensors; got {len(aux_tensors)}"
        )
    given = list(aux_tensors or ())
    lowered = lowered_together(
        score_mod if lowers_score else None, mask_mod if lowers_mask else None, device, given
    )
    return CuteMods(
        lowered.score_mod or score_mod, lowered.mask_mod or mask_mod, lowered.aux_tensors
    )


def lowered_together(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    device: torch.device | str | None,
    others: Sequence[Tensor] = (),
) -> CuteMods:
    """Mods written in torch, over one list of tensors that begins with `others`."""
    # what traces is loaded when there is something to trace
    from flash_mask_cute.flex.lower import lower_mod, shifted

    aux = list(others)
    if score_mod is not None:
        lowered = shifted(lower_mod(score_mod, "score_mod", device), len(aux))
        aux += lowered.aux_tensors
        score_mod = lowered.mod
    if mask_mod is not None:
        lowered = shifted(lower_mod(mask_mod, "mask_mod", device), len(aux))
        aux += [x.detach() if x.requires_grad else x for x in lowered.aux_tensors]
        mask_mod = lowered.mod
    return CuteMods(score_mod, mask_mod, aux or None)
