"""Cases as calls of the CPU path, without the library's own way from arguments to them."""

from __future__ import annotations

from typing import Any

from inputs import Inputs

from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.problem import fold_window
from flash_mask_cute.cpu.call import CpuCall, CpuTiles


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
        ResolvedMasks(**masks),
        tiles,
        case.seqlen_q,
        case.seqlen_k,
        case.scale,
        case.softcap,
        window_left=sides[0],
        window_right=0 if is_causal else sides[1],
    )
    return call._replace(**more)
