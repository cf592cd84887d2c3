"""Models that call attention by themselves: inside `sharded`, rows are those of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.attention import METHODS, Method
from flash_mask_cute.parallel.planning import Plan, check_plan_mask


class Sharding(NamedTuple):
    """The arguments of `sharded`."""

    plan: Plan
    mask: ColumnMask | None
    group: torch.distributed.ProcessGroup | None
    method: Method


# Of the process: a backward that computes layers again does it in a thread of its own.
_current: list[Sharding] = []


@contextmanager
def sharded(
    plan: Plan,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    mask: ColumnMask | None,
    method: Method = "all_gather",
) -> Iterator[None]:
    """Attention of models of transformers (`integrations.transformers`) is that of a whole sequence
    where this rank holds the rows of plan.

    It is around the forward of a step, and around a backward that computes layers again
    (checkpointing). The model is called with `plan.shard(input_ids, rank)` and the position_ids of
    these rows, which count in the whole sequence, or in its documents. mask says what the sequence
    shows, and layers with a sliding window have that as well. The other arguments are those of
    `context_parallel_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: plan, mask or method is wrong.

    Example:
        >>> with parallel.sharded(plan, group, mask=mask):  # doctest: +SKIP
        ...     out = model(plan.shard(input_ids, rank), position_ids=plan.shard(positions, rank))
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}, not a Plan")
    check_plan_mask("mask", mask, plan.seqlen)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is none of {', '.join(map(repr, METHODS))}")
    _current.append(Sharding(plan, mask, group, method))
    try:
        yield
    finally:
        _current.pop()


def current_sharding() -> Sharding | None:
    """That of the innermost `sharded`; None outside of one."""
    return _current[-1] if _current else None
