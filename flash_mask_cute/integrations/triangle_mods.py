"""Mods of triangle attention: a bias that all rows share, and keys that each row hides."""

from typing import Any

import cutlass.cute as cute


@cute.jit
def biased(score: Any, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return score + aux_tensors[0][h_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def shown(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return aux_tensors[1][b_idx[0], kv_idx[0]]
