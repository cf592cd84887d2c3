"""What a mask of the bench says as a `mask_mod`, asked in the DSL on the CPU."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

from bench import mods
from bench.masks import Mask


@cute.jit
def _fill(out: cute.Tensor, one: cute.Tensor, two: cute.Tensor, mod: cutlass.Constexpr) -> None:
    for q in range(out.shape[0]):
        for k in range(out.shape[1]):
            zero = cute.full((1,), 0, cutlass.Int32)
            at = [cute.full((1,), i, cutlass.Int32) for i in (q, k)]
            out[q, k] = cutlass.Int32(mod(zero, zero, at[0], at[1], "lengths", [one, two])[0])


def visible_by_mask_mod(mask: Mask) -> Any:
    """(n, n) int32 numpy array: 1 where a query sees a key."""
    out = torch.full((mask.n, mask.n), -1, dtype=torch.int32)
    tables = mods.mask_tables(mask, torch.device("cpu")).values()
    views = [from_dlpack(tensor) for tensor in (*tables, out, out)]
    _fill(from_dlpack(out), *views[:2], mods.cute_mask_mod(mask))
    return out.numpy()
