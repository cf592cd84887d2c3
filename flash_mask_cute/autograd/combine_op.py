"""The combination of partial results as an operator, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.splits import check_combine, combine_partials
from flash_mask_cute.cpu.combine import combine_by_torch, combine_gradients
from flash_mask_cute.runtime.checks import check_outputs_apart, check_own_memory
from flash_mask_cute.runtime.plain_tensors import check_plain, own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
_library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType out_dtype) "
    "-> (Tensor out, Tensor lse)"
)
_library.define(
    "combine_into(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor lse"
)


def _empty(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    return out, _empty_lse(out_partial, lse_partial, out)


def _empty_lse(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    """(..., row, head) like lse_partial, with the memory order of (..., head, row)."""
    *batch, rows, heads = lse_partial.shape[1:]
    return lse_partial.new_empty((*batch, heads, rows)).mT


def check_parts_plain(out_partial: Tensor, lse_partial: Tensor) -> None:
    """Refuse parts that are no readable memory, as `check_plain` does."""
    check_plain("out_partial", out_partial)
    check_plain("lse_partial", lse_partial)


@torch.library.impl(_library, "combine", "CompositeExplicitAutograd")
def _combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out_partial, lse_partial = own_memory(out_partial), own_memory(lse_partial)
    check_parts_plain(out_partial, lse_partial)
    out, lse = _empty(out_partial, lse_partial, dtype)
    _write_combined(out_partial, lse_partial, out, lse)
    return out, lse


@torch.library.impl(_library, "combine_into", "CompositeExplicitAutograd")
def _combine_into(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    out_partial, lse_partial, out = map(own_memory, (out_partial, lse_partial, out))
    check_parts_plain(out_partial, lse_partial)
    check_plain("out", out)
    check_own_memory("out", out)
    check_outputs_apart({"out": out}, {"out_partial": out_partial, "lse_partial": lse_partial})
    lse = _empty_lse(out_partial, lse_partial, out)
    _write_combined(out_partial, lse_partial, out, lse)
    if out.is_cuda:
        # torch does not see what a kernel writes
        torch._C._increment_version((out,))
    return lse


def _write_combined(out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor) -> None:
    if out.is_cuda:
        check_combine(out_partial, out.dtype)
        combine_partials(out_partial, lse_partial, out, lse)
        return
    results = combine_by_torch(out_partial, lse_partial)
    for target, values in zip((out, lse), results, strict=True):
        target.copy_(values)


# its errors are those of the combination
IMPLEMENTATIONS = frozenset((_combine.__code__, _combine_into.__code__))

torch.library.register_fake("flash_mask_cute::combine", _empty, lib=_library)
torch.library.register_fake("flash_mask_cute::combine_into", _empty_lse, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out_partial, lse_partial, _ = inputs
    ctx.save_for_backward(out_partial, lse_partial, output[0])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    out_partial, lse_partial, out = ctx.saved_tensors
    return *combine_gradients(out_partial, lse_partial, out, dout, dlse), None


def run_combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out in dtype, and lse, from splits in the first dimension. out: memory for it, or None."""
    if out is not None:
        return out, torch.ops.flash_mask_cute.combine_into(out_partial, lse_partial, out)
    out, lse = torch.ops.flash_mask_cute.combine(out_partial, lse_partial, dtype)
    return out, lse


torch.library.register_autograd(
    "flash_mask_cute::combine", _gradients, setup_context=_save, lib=_library
)
