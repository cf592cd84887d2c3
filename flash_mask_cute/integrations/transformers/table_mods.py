"""Mods that read dense tables: a mask (batch, heads, queries, keys) of bools, or one that is added.

What is added is the first aux tensor, and the mask the last, so that one list serves both.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


@cute.jit
def visible_to_all(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    """A mask that all heads share, so that it is evaluated for one of them."""
    return aux_tensors[-1][b_idx[0], 0, q_idx[0], kv_idx[0]]


@cute.jit
def visible(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return aux_tensors[-1][b_idx[0], h_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def added(score: Any, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return score + aux_tensors[0][b_idx[0], h_idx[0], q_idx[0], kv_idx[0]]


@cute.jit
def added_alike(
    score: Any, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any
) -> Any:
    """What all batch entries get alike, so that its gradient has one entry."""
    return score + aux_tensors[0][0, h_idx[0], q_idx[0], kv_idx[0]]
