"""The mods of one attention call, of either convention, as CuTe mods over one list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.flex.convention import is_torch_mod

if TYPE_CHECKING:
    from flash_mask_cute.flex.lower import LoweredMod


class CuteMods(NamedTuple):
    """The mods that attention takes: two CuTe mods, or None, and the aux tensors that they read."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: list[Tensor] | None


def as_cute_mods(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device | str | None,
) -> CuteMods:
    """Lower torch mods; leave CuTe mods and objects that are no mods unchanged.

    aux_tensors: the caller's, for CuTe mods; tensors captured by torch mods are appended. A tensor
    that only a mask_mod reads has no gradient, because a mask is a step function. device: as in
    `lower_mod`.

    Raises:
        TypeError, NotImplementedError: as `is_torch_mod` and `lower_mod`.
        ValueError: aux_tensors are given, but both mods are written in torch and read none.
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
    # what traces is loaded when there is something to trace
    from flash_mask_cute.flex.lower import lower_mod

    lowered = put_together(
        lower_mod(score_mod, "score_mod", device) if score_mod and lowers_score else None,
        lower_mod(mask_mod, "mask_mod", device) if mask_mod and lowers_mask else None,
        aux_tensors or (),
    )
    return CuteMods(
        lowered.score_mod or score_mod, lowered.mask_mod or mask_mod, lowered.aux_tensors
    )


def form_of(mask_mod: Any) -> str:
    """The form that `flex_attention` gives to a mask_mod written in torch, in words."""
    from flash_mask_cute.flex.lower import lower_mod

    return lower_mod(mask_mod, "mask_mod").form


def put_together(
    score: LoweredMod | None, mask: LoweredMod | None, others: Sequence[Tensor] = ()
) -> CuteMods:
    """Lowered mods that share one list of tensors, which begins with `others`."""
    from flash_mask_cute.flex.lower import shifted

    aux = list(others)
    if score is not None:
        score = shifted(score, len(aux))
        aux += score.aux_tensors
    if mask is not None:
        mask = shifted(mask, len(aux))
        aux += [x.detach() if x.requires_grad else x for x in mask.aux_tensors]
    return CuteMods(
        None if score is None else score.mod, None if mask is None else mask.mod, aux or None
    )
