"""torch.jit.trace is refused by a message that names torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from ways import WAYS

from flash_mask_cute import flash_attn_combine, flash_attn_func, flex_attention

CALLS = [
    pytest.param(function, way, id=f"{function.__name__}-{way}")
    for function, ways in WAYS.items()
    for way in list(ways)[:2]
    if function.__name__.startswith(("flash", "flex")) and function is not flash_attn_combine
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "way"), [*CALLS, (flash_attn_func, "score_mod"), (flex_attention, "block_mask")]
)
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_trace_is_refused(function: Any, way: str, is_warm: bool) -> None:
    given = WAYS[function][way]()
    names = [name for name, x in given.items() if isinstance(x, Tensor)]
    fixed = {name: x for name, x in given.items() if name not in names}
    if is_warm:
        function(**given)

    def call(*tensors: Tensor) -> Any:
        return function(**dict(zip(names, tensors, strict=True)), **fixed)

    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace .* torch\.export"):
        torch.jit.trace(call, tuple(given[name] for name in names), check_trace=False)
