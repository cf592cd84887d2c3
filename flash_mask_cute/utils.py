"""Helpers for user callables (`score_mod`, `mask_mod`), beyond the CuTe DSL itself."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def scalar_to_ssa(val: Any, dtype: Any) -> cute.TensorSSA:
    """A one-element vector of `dtype` that holds `val`, a Python number or a DSL scalar.

    Indices reach a callable as such vectors, so a captured number or an element of an aux tensor
    becomes comparable to them: ``kv_idx <= q_idx + scalar_to_ssa(offset, cutlass.Int32)``.
    """
    return cute.full((1,), dtype(val), dtype)
