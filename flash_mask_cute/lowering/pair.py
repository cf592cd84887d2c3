"""The mods of one attention call, of either convention, as CuTe mods over one list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.lowering.convention import is_torch_mod
from flash_mask_cute.lowering.watch import Memo, MemoEntry, watches_of
from flash_mask_cute.mods.aux_tensors import OutsideError as OutsideError
from flash_mask_cute.runtime.checks import check_list

if TYPE_CHECKING:
    from flash_mask_cute.lowering.lower import LoweredMod
    from flash_mask_cute.lowering.paths import Path

T = TypeVar("T")


class CuteMods(NamedTuple):
    """The mods that attention takes: two CuTe mods, or None, and the aux tensors that they read."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: list[Tensor] | None


def resolve_mods(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device | str | None,
) -> CuteMods:
    """Lower torch mods; leave CuTe mods and objects that are no mods unchanged.

    aux_tensors: the caller's, for CuTe mods; tensors captured by torch mods are appended, those of
    a mask_mod detached. Raises TypeError, NotImplementedError: as `is_torch_mod` and `lower_mod`,
    or aux_tensors are no list; ValueError: aux_tensors that no CuTe mod reads."""
    lowers_score = score_mod is not None and is_torch_mod(score_mod, "score_mod")
    lowers_mask = mask_mod is not None and is_torch_mod(mask_mod, "mask_mod")
    if not lowers_score and not lowers_mask:
        return CuteMods(score_mod, mask_mod, aux_tensors)  # type: ignore[arg-type]
    if aux_tensors is not None:
        check_list("aux_tensors", aux_tensors)
    if aux_tensors and (lowers_score or score_mod is None) and (lowers_mask or mask_mod is None):
        raise ValueError(
            "aux_tensors are read by CuTe mods, and those given are written in torch: let them "
            f"capture the tensors; got {len(aux_tensors)}"
        )
    place = id(score_mod) if lowers_score else None, id(mask_mod) if lowers_mask else None, device
    if not aux_tensors:
        entry = _memo.get(place)
        if entry is not None and entry.holds():
            of_score, of_mask = entry.value
            return CuteMods(of_score or score_mod, of_mask or mask_mod, entry.aux_tensors())
    # what traces is loaded when there is something to trace
    from flash_mask_cute.lowering.lower import lower_mod

    score = lower_mod(score_mod, "score_mod", device) if lowers_score and score_mod else None
    mask = lower_mod(mask_mod, "mask_mod", device) if lowers_mask and mask_mod else None
    lowered = join_mods(score, mask, aux_tensors or ())
    if not aux_tensors:
        found = [(low, False) for low in (score, mask) if low is not None]
        entry = memo_entry((lowered.score_mod, lowered.mask_mod), found, lowered.aux_tensors)
        if entry is not None:
            _memo.keep(place, entry, [low.reached[0][0] for low, _ in found])
    return CuteMods(
        lowered.score_mod or score_mod, lowered.mask_mod or mask_mod, lowered.aux_tensors
    )


# The lowered mods, None where there is none.
_memo: Memo[tuple[Any, Any]] = Memo()
stays_mod: Memo[None] = Memo()
"""By identity: torch mask_mods that no window and no column intervals replace in a call, because
they read tensors, whose contents may change unseen, or because they are none."""


def form_of(mask_mod: Any) -> str:
    """The form that `flex_attention` gives to a mask_mod written in torch, in words."""
    from flash_mask_cute.lowering.lower import lower_mod

    return lower_mod(mask_mod, "mask_mod").form


def join_mods(
    score: LoweredMod | None, mask: LoweredMod | None, others: Sequence[Tensor] = ()
) -> CuteMods:
    """Lowered mods that share one list of tensors, which begins with `others`."""
    aux = list(others)
    if score is not None:
        score = score.written(len(aux))
        aux += score.aux_tensors
    if mask is not None:
        mask = mask.written(len(aux))
        aux += [x.detach() if x.requires_grad else x for x in mask.aux_tensors]
    return CuteMods(
        None if score is None else score.mod, None if mask is None else mask.mod, aux or None
    )


def memo_entry(
    value: T,
    mods: Sequence[tuple[LoweredMod, bool]],
    aux_tensors: Sequence[Tensor] | None,
) -> MemoEntry[T] | None:
    """None: a later call has to make it anew. mods: lowered, and whether the contents of their
    tensors count. aux_tensors: of all."""
    lowered = [low for low, _ in mods]
    if not all(low.is_lasting for low in lowered):
        return None
    watches = watches_of([(low.reached, by_contents) for low, by_contents in mods])
    if watches is None:
        return None
    # join_mods detaches them from it at each call
    masks = (low for low in lowered if low.kind == "mask_mod")
    if any(x.requires_grad for low in masks for x in low.aux_tensors):
        return None
    return MemoEntry(value, watches, aux_tensors, any(low.makes_tensors for low in lowered))


# -- errors that name what a mod captured --------------------------------------------------------


def named_as_captured(
    error: OutsideError, origins: Sequence[Path | None], mods: Mapping[str, Any]
) -> IndexError:
    """The same error of the tensor that the mod captured. origins: of the aux tensors, None for
    those of the caller. mods: the caller's mods, by kind."""
    from flash_mask_cute.lowering.trace import name_of

    is_known = error.kind in mods and 0 <= error.tensor < len(origins)
    path = origins[error.tensor] if is_known else None
    return as_captured(error, name_of(mods[error.kind]) if is_known else "", path)


def as_captured(error: OutsideError, name: str, path: Path | str | None) -> IndexError:
    """The error for what a mod of this name captured; None: the tensor is the caller's."""
    if path is None or error.tensor < 0:
        return OutsideError(*error.args)
    # what was below 0 has been counted from the end already
    index = error.index - error.extent * (error.index < 0)
    return IndexError(
        f"{error.kind} {name} reads {path} at index {index} of {error.where}, "
        f"whose extent is {error.extent} ({error.place})"
    )


def named_by_mods(
    error: OutsideError,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device | str | None,
) -> IndexError:
    """`named_as_captured` for what `resolve_mods` was given."""
    mods = {"score_mod": score_mod, "mask_mod": mask_mod}
    origins: list[Path | None] = [None] * len(aux_tensors or ())
    for kind, mod in mods.items():
        if mod is not None and is_torch_mod(mod, kind):
            from flash_mask_cute.lowering.lower import lower_mod

            origins.extend(lower_mod(mod, kind, device).origins)
    return named_as_captured(error, origins, mods)
