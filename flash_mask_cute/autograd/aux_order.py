"""Whether gradients of aux tensors have a fixed order of sums, for a call that is to have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_mask_cute.autograd.mod_names import optional_mod, optional_name
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.choose.aux_order import AuxFacts, why_unordered_on
from flash_mask_cute.runtime.constant_result import assume_constant_result
from flash_mask_cute.runtime.dtypes import dtype_name


def why_unordered(call: AttentionCall, wants_aux: Sequence[int]) -> str | None:
    """Why gradients of the aux tensors with numbers in wants_aux have no fixed order of sums; None
    if they have one. call: of a forward with a score_mod, eager or traced."""
    masks, device = call.masks or NO_MASKS, call.tensors.q.device
    aux = tuple([(dtype_name(x.dtype), x.dim()) for x in masks.aux_tensors or ()])
    score_mod: Any = masks.score_mod
    if torch.compiler.is_compiling():
        name = optional_name(score_mod)
        return _why_of_name(name, aux, tuple(wants_aux), device.type, device.index)
    return why_unordered_on(device, score_mod, aux, wants_aux)


@assume_constant_result
def _why_of_name(
    name: str | None, aux: AuxFacts, wants_aux: tuple[int, ...], device: str, index: int | None
) -> str | None:
    score_mod: Callable[..., Any] | None = optional_mod(name)
    assert score_mod is not None
    where = torch.device(device if index is None else f"{device}:{index}")
    return why_unordered_on(where, score_mod, aux, wants_aux)
