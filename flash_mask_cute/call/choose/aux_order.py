"""Whether gradients of aux tensors are summed in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.mods.traits import HasScoreMod, find_reads
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.target import Target

AuxFacts = tuple[tuple[str, int], ...]


class ScoreModFacts(NamedTuple):
    """What the classes of reads depend on. score_mod: its `callable_key`. aux: (dtype, rank) of
    each aux tensor."""

    score_mod: str | None
    aux: AuxFacts


def why_unordered(
    score_mod: Callable[..., Any], problem: HasScoreMod, wants_aux: Sequence[int], target: Target
) -> str | None:
    """Why gradients of the aux tensors with numbers in wants_aux have no fixed order of sums, in
    words; None if they have one."""
    if not arch_spec(target).backward.orders_aux:
        return f"gradients of aux tensors are summed in no fixed order on {arch_spec(target).name}"
    unordered = find_reads(score_mod, problem, wants_aux).unordered()
    if unordered is None:
        return None
    number, how = unordered
    return (
        "gradients of aux tensors that score_mod reads otherwise than by head or by key are summed "
        f"in no fixed order, and it reads aux_tensors[{number}] {how}"
    )


def why_unordered_on(
    device: torch.device, score_mod: Callable[..., Any], aux: AuxFacts, wants_aux: Sequence[int]
) -> str | None:
    """`why_unordered` on a device, before a call is planned."""
    target = Target.from_device(device) if device.type == "cuda" else Target.default()
    facts = ScoreModFacts(callable_key(score_mod), aux)
    return why_unordered(score_mod, facts, wants_aux, target)
