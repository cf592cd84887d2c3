"""Outputs in memory of the caller, which must hold no input.

The key of a prepared call holds no addresses. So a prepared call that writes tensors of the caller
keeps the addresses for which it is proved that they lie apart.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_mask_cute.call.arguments import (
    AttentionCall,
    Direction,
    PreparedBwd,
    PreparedFwd,
    Tensors,
)
from flash_mask_cute.call.check.inputs import inputs_of
from flash_mask_cute.runtime.checks import check_outputs_apart

_OUTPUTS = {
    Direction.FORWARD: ("out", "lse", "lse_low", "max_scores"),
    Direction.BACKWARD: ("dq", "dk", "dv", "dsink"),
}
_MOST_PROVED = 1024


class WithGivenOutputs:
    """A prepared call that writes tensors of the caller. proved: addresses of calls with its key
    that were checked."""

    def __init__(self, prepared: PreparedFwd | PreparedBwd, direction: Direction) -> None:
        self.prepared = prepared
        self.proved: set[Any] = set()
        self._direction = direction

    def proved_for(self, addresses: Any, call: AttentionCall) -> PreparedFwd | PreparedBwd:
        """The prepared call. addresses: of the tensors of `call`. Raises ValueError: an output
        overlaps an input or another output."""
        if addresses not in self.proved:
            check_outputs_apart(_outputs_of(call.tensors, self._direction), inputs_of(call))
            if len(self.proved) >= _MOST_PROVED:
                self.proved.clear()
            self.proved.add(addresses)
        return self.prepared


def writes_tensors_of_caller(tensors: Tensors, direction: Direction) -> bool:
    return any(x is not None for x in _outputs_of(tensors, direction).values())


def _outputs_of(tensors: Tensors, direction: Direction) -> dict[str, Tensor | None]:
    """By name; None: a new tensor, or none."""
    given = tensors.by_name()
    found = {name: given[name] for name in _OUTPUTS[direction]}
    return found | {f"daux[{i}]": x for i, x in enumerate(tensors.gradients.daux or ())}
