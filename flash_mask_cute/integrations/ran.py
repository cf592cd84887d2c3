"""Which kernel computed a call of an integration: this package's, or the library's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from flash_mask_cute.runtime.warn_once import warn_once

# What this package raises, before any launch, for calls that it does not take.
REFUSALS = (TypeError, ValueError, NotImplementedError)


class Ran(NamedTuple):
    """One call. operator: what was called, by its name in torch; reason: why it was left to torch,
    None where a kernel of this package ran."""

    operator: str
    kernel: Literal["flash_mask_cute", "torch"]
    reason: str | None


_records: tuple[list[Ran], ...] = ()
"""Those of the contexts that are open. A tuple: other threads read it while contexts open."""


@contextmanager
def kernels_run() -> Iterator[list[Ran]]:
    """Record which kernel ran, forward and backward, of calls in any thread.

    Replays of a CUDA graph are not seen: they call no operator. Inside of torch.compile, `sdpa`
    records nothing.

    Example:
        >>> import torch
        >>> from flash_mask_cute.integrations.torch import kernels_run, sdpa
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with sdpa(), kernels_run() as ran:
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> ran
        [Ran(operator='scaled_dot_product_attention', kernel='flash_mask_cute', reason=None)]
    """
    global _records
    record: list[Ran] = []
    _records = (*_records, record)
    try:
        yield record
    finally:
        _records = tuple(x for x in _records if x is not record)


def ran_here(operator: str) -> None:
    """A kernel of this package computed a call."""
    for record in _records:
        record.append(Ran(operator, "flash_mask_cute", None))


def left_to_torch(operator: str, reason: str) -> None:
    """Torch computes a call. A warning gives each reason once, whatever numbers it has."""
    for record in _records:
        record.append(Ran(operator, "torch", reason))
    topic = f"{operator}: {re.sub(r'[0-9.]+', '', reason)}"
    warn_once(topic, f"{operator} runs on torch's own kernel: {reason} (said once)")
