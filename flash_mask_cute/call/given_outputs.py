"""Outputs in memory of the caller, which must hold no input.

The key of a prepared call has layouts, and no addresses. So a call that writes tensors of the
caller compares addresses in each run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_mask_cute.call.arguments import (
    Direction,
    Masks,
    PreparedBwd,
    PreparedFwd,
    Tensors,
)
from flash_mask_cute.runtime.checks import check_outputs_apart

_OUTPUTS = {
    Direction.FORWARD: ("out", "lse", "lse_low", "max_scores"),
    Direction.BACKWARD: ("dq", "dk", "dv", "dsink"),
}
_INPUTS = {
    Direction.FORWARD: ("q", "k", "v"),
    Direction.BACKWARD: ("q", "k", "v", "out", "dout"),
}
_MOST_PROVED = 1024


class WithGivenOutputs:
    """A prepared call that writes tensors of the caller.

    A run raises ValueError, before anything is written, if an element of an output lies in memory
    of an input or of another output.
    """

    __slots__ = ("_inputs", "_outputs", "_places", "_proved", "prepared")

    def __init__(
        self, prepared: PreparedFwd | PreparedBwd, tensors: Tensors, direction: Direction
    ) -> None:
        self.prepared = prepared
        self._outputs = [x for x in _OUTPUTS[direction] if getattr(tensors, x) is not None]
        self._inputs = _INPUTS[direction]
        self._places = tuple(Tensors._fields.index(x) for x in (*self._outputs, *self._inputs))
        # Layouts are those of the first run, so addresses decide.
        self._proved: set[tuple[int, ...]] = set()

    @staticmethod
    def needed(tensors: Tensors, direction: Direction) -> bool:
        """Whether a call writes tensors of the caller."""
        if any(getattr(tensors, name) is not None for name in _OUTPUTS[direction]):
            return True
        return any(x is not None for x in tensors.daux or ())

    def __call__(self, tensors: Tensors, masks: Masks | None = None) -> Any:
        addresses = [tensors[place].data_ptr() for place in self._places]  # type: ignore[union-attr]
        if tensors.daux is not None:
            addresses += [x.data_ptr() for x in tensors.daux if x is not None]
        key = tuple(addresses)
        if key not in self._proved:
            self._prove(tensors)
            if len(self._proved) >= _MOST_PROVED:
                self._proved.clear()
            self._proved.add(key)
        return self.prepared(tensors, masks)

    def _prove(self, tensors: Tensors) -> None:
        outputs: dict[str, Tensor | None] = {x: getattr(tensors, x) for x in self._outputs}
        outputs |= {f"daux[{i}]": x for i, x in enumerate(tensors.daux or ())}
        check_outputs_apart(outputs, {x: getattr(tensors, x) for x in self._inputs})
