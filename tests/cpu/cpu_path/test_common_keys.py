"""Several sequences of queries with the keys of one batch entry in common, on the CPU path: against
dense attention that compares positions by itself."""

from __future__ import annotations

import pytest
import torch
from common_keys import CommonKeys

from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd


@pytest.mark.parametrize("earliest", [0, -200])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed: int, earliest: int) -> None:
    draw = CommonKeys(seed, torch.float64, 8, 260, earliest)
    draw.has_rows_behind = True
    for call in draw.calls(14):
        out, lse = _flash_attn_fwd(call.q, call.k, call.v, **call.keywords)
        assert lse is not None
        call.assert_output(out, lse)
        dout = draw.normal(*out.shape)
        operands = call.q, call.k, call.v, out, dout, lse
        call.assert_gradients(_flash_attn_bwd(*operands, **call.keywords), dout)


def test_random_calls_that_use_some_keys() -> None:
    draw = CommonKeys(5, torch.float64, 8, 260)
    draw.has_used_keys = True
    for call in draw.calls(20):
        out, lse = _flash_attn_fwd(call.q, call.k, call.v, **call.keywords)
        assert lse is not None
        call.assert_output(out, lse)
