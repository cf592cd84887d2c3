"""Tables of differences of a call, filled before attention each time it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.choose.execution_plan import DifferenceTables


class MakeDifferenceTables:
    """Adds the tables of a plan to the aux tensors of a call. function: fills them
    (`call/build/difference_tables.py`)."""

    __slots__ = "_dtypes", "_function", "_shapes"

    def __init__(self, tables: DifferenceTables, function: Callable[..., Any]) -> None:
        self._shapes = tables.shapes
        self._dtypes = tuple(getattr(torch, name) for name in tables.dtypes)
        self._function = function

    def __call__(self, aux_tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = tuple(aux_tensors)
        made = zip(self._shapes, self._dtypes, strict=True)
        tables = tuple(given[0].new_empty(shape, dtype=dtype) for shape, dtype in made)
        self._function(tables, given)
        return *given, *tables
