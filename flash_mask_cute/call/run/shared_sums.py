"""What a kernel that walks over batch entries makes, each time a call runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.choose.execution_plan import SharedSums
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.call.run.aux_sums import new_sums
from flash_mask_cute.call.run.forward import count_writing


class MakeSharedSums:
    """Makes the sums of a plan, and all gradients of short sequences. function:
    `call/build/shared_sums.py`."""

    __slots__ = "_count", "_function", "shared"

    def __init__(self, shared: SharedSums, shapes: FwdShapes, function: Callable[..., Any]) -> None:
        self.shared, self._function = shared, function
        self._count = shapes.heads_q * shapes.seqlen_q * shapes.seqlen_k

    def __call__(
        self,
        daux: Sequence[Tensor | None],
        operands: tuple[Tensor | None, ...],
        gradients: tuple[Tensor, ...],
        aux_tensors: Sequence[Tensor] | None,
        scales: tuple[float, float],
        *more: Any,
    ) -> dict[int, Tensor]:
        """The sums by number of the tensor, with the parts as the first dimension, or as
        `new_sums` makes them; of one part in the gradient itself, if it can have them. operands:
        q, k, v, dout, stats; gradients: dq or sums of dq, dk, dv; scales: of scores and dk, and of
        dq; more: both sides of the window, and mask bits."""
        numbers, parts, once, exact, short = self.shared
        others = tuple(i for i in numbers if i not in once)
        sums = new_sums(daux, others, torch.float32, exact)
        for i in once:
            gradient = daux[i]
            assert gradient is not None
            # no two scores read the same element, so as many scores read all
            is_written = gradient.numel() == self._count
            if self.shared.is_in_place(gradient):
                # a table of all pairs is larger than everything else
                count_writing(gradient)
                sums[i] = (gradient if is_written else gradient.zero_())[None]
                continue
            new = gradient.new_empty if is_written else gradient.new_zeros
            sums[i] = new((parts, *gradient.shape), dtype=torch.float32)
        in_order = tuple(sums[i] for i in numbers)
        aux = tuple(aux_tensors or ())
        if short is None:
            self._function(*operands, in_order, aux, scales[0], parts, *more)
        else:
            given = (*operands, *gradients, in_order or None, aux or None, *scales, parts)
            self._function(*given, *more[:2])
        return sums
