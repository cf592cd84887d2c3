"""The merge of partial results as an operator, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.run.combine import merge_partials
from flash_mask_cute.cpu.combine import combine_gradients, combine_partials
from flash_mask_cute.runtime.plain_tensors import check_plain, own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
_library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType out_dtype) "
    "-> (Tensor out, Tensor lse)"
)


def _empty(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lse is (..., row, head) like lse_partial, with the memory order of (..., head, row)."""
    *batch, rows, heads = lse_partial.shape[1:]
    lse = lse_partial.new_empty((*batch, heads, rows)).mT
    return out_partial.new_empty(out_partial.shape[1:], dtype=dtype), lse


def check_parts_plain(out_partial: Tensor, lse_partial: Tensor) -> None:
    """Refuse parts that are no readable memory, as `check_plain` does."""
    check_plain("out_partial", out_partial)
    check_plain("lse_partial", lse_partial)


@torch.library.impl(_library, "combine", "CompositeExplicitAutograd")
def _combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out_partial, lse_partial = own_memory(out_partial), own_memory(lse_partial)
    check_parts_plain(out_partial, lse_partial)
    out, lse = _empty(out_partial, lse_partial, dtype)
    if out.is_cuda:
        merge_partials(out_partial, lse_partial, out, lse)
    else:
        for target, values in zip(
            (out, lse), combine_partials(out_partial, lse_partial), strict=True
        ):
            target.copy_(values)
    return out, lse


# of which the errors are those of the merge
IMPLEMENTATIONS = frozenset((_combine.__code__,))
torch.library.register_fake("flash_mask_cute::combine", _empty, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out_partial, lse_partial, _ = inputs
    ctx.save_for_backward(out_partial, lse_partial, output[0])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    out_partial, lse_partial, out = ctx.saved_tensors
    return *combine_gradients(out_partial, lse_partial, out, dout, dlse), None


def run_combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out in dtype, and lse, from the pieces in the first dimension."""
    out, lse = torch.ops.flash_mask_cute.combine(out_partial, lse_partial, dtype)
    return out, lse


torch.library.register_autograd(
    "flash_mask_cute::combine", _gradients, setup_context=_save, lib=_library
)
