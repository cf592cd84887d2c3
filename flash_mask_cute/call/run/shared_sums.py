"""Gradients of aux tensors that a kernel of its own sums over the batch, each time a call runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.choose.shared_sums import SharedSums
from flash_mask_cute.call.problem import FwdShapes


class MakeSharedSums:
    """Makes the sums of a plan. function: `call/build/shared_sums.py`."""

    __slots__ = "_count", "_function", "_parts", "numbers"

    def __init__(self, shared: SharedSums, shapes: FwdShapes, function: Callable[..., Any]) -> None:
        self.numbers, self._parts, self._function = shared.numbers, shared.parts, function
        self._count = shapes.heads_q * shapes.seqlen_q * shapes.seqlen_k

    def __call__(
        self,
        daux: Sequence[Tensor | None],
        operands: tuple[Tensor | None, ...],
        aux_tensors: Sequence[Tensor] | None,
        *more: Any,
    ) -> dict[int, Tensor]:
        """The sums by number of the tensor, with the parts as the first dimension. operands: q, k,
        v, dout, stats; more: the scale, both sides of the window, and mask bits."""
        sums: dict[int, Tensor] = {}
        for i in self.numbers:
            gradient = daux[i]
            assert gradient is not None
            shape = self._parts, *gradient.shape
            # no two scores read the same element, so as many scores read all
            new = gradient.new_empty if gradient.numel() == self._count else gradient.new_zeros
            sums[i] = new(shape, dtype=torch.float32)
        self._function(*operands, tuple(sums.values()), tuple(aux_tensors or ()), *more)
        return sums
