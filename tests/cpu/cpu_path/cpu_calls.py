"""Cases as calls of the CPU path, without the library's own way from arguments to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import Inputs

from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.call.problem import fold_window
from flash_mask_cute.cpu.call import CpuCall, CpuMasks, CpuTiles


def cpu_call_of(inputs: Inputs, tiles: CpuTiles, **more: Any) -> CpuCall:
    """more: tensors and masks by name, or fields of `CpuCall`, beside or instead of the case's."""
    case, given = inputs.case, inputs.keywords
    is_causal, *sides = fold_window(case.causal, case.window_left, case.window_right)
    names = "learnable_sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    tensors |= {name: given[name] for name in names if name in given}
    of_tensors = [name for name in Tensors.from_names(tensors).by_name() if name in more]
    tensors |= {name: more.pop(name) for name in of_tensors}
    masks = {
        "score_mod": given.get("score_mod"),
        "mask_mod": given.get("mask_mod"),
        "aux_tensors": given.get("aux_tensors"),
        "column_mask": inputs.column_mask,
        "block_lists": given.get("block_sparse_tensors_torch"),
    }
    masks |= {name: more.pop(name) for name in masks if name in more}
    call = CpuCall(
        Tensors.from_names(tensors),
        CpuMasks(**masks),
        tiles,
        case.seqlen_q,
        case.seqlen_k,
        case.scale,
        case.softcap,
        window_left=sides[0],
        window_right=0 if is_causal else sides[1],
    )
    return call._replace(**more)


# what `patch_results` makes of a walk's first block and its end, and of a verdict on a tile
WRONG_WALKS: dict[str, Callable[..., Any]] = {
    "first block left out": lambda first, end: (first + 1, max(end, first + 1)),
    "last block left out": lambda first, end: (first, max(end - 1, first)),
    "one block early": lambda first, end: (max(first - 1, 0), max(end - 1, 0)),
}
WRONG_VERDICTS: dict[str, Callable[..., Any]] = {
    "nothing cuts": lambda hidden, cuts: (hidden, torch.zeros_like(cuts)),
    "what cuts, hides": lambda hidden, cuts: (hidden | cuts, cuts),
    "what hides, shows": lambda hidden, cuts: (torch.zeros_like(hidden), cuts & ~hidden),
}


def patch_results(
    patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    """Make a method return what `wrong` makes of its results."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: wrong(*right(*args)))
