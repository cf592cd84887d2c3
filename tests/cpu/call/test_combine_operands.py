"""What the kernel that combines partial results gets of a caller's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_mask_cute.call import splits as combine
from flash_mask_cute.runtime.target import Target


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_lse_of_attention_is_read_where_it_is(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(parts, batch, heads, rows), turned: neither it nor the output is copied."""
    given: list[Any] = []
    compiled = SimpleNamespace(function=lambda *operands: given.append(operands))
    monkeypatch.setattr(combine, "compile_combine", lambda *_: compiled)
    rows = (5,) if is_packed else (2, 5)
    outs = torch.zeros(3, *rows, 4, 64)
    lses = torch.zeros(3, *rows[:-1], 4, 5).mT
    out, lse = torch.zeros(*rows, 4, 64), torch.zeros(*rows[:-1], 4, 5).mT
    combine.combine_partials(outs, lses, out, lse, Target("sm_90a", num_sms=2))
    (operands,) = given
    for found, of_caller in zip(
        (operands[0], operands[1], operands[4], operands[5]), (outs, lses, out, lse), strict=True
    ):
        assert found.data_ptr() == of_caller.data_ptr()
        assert found.stride()[-2:] == of_caller.stride()[-2:]
