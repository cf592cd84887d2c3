"""Rows of tables that stay in shared memory from one batch entry to the next, on a GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import flash_attn_func

# queries and keys, and head dimensions
SHAPES = [(256, 32), (384, 32), (768, 32), (200, 24), (301, 40), (384, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triangles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of a pair representation, against float64, with the same bits each time."""
    (n, head_dim), batch, heads = shape, 160, 4
    generator = torch.Generator("cuda").manual_seed(n)
    sizes = batch, n, heads, head_dim
    q, k, v = (torch.randn(sizes, device="cuda", generator=generator).bfloat16() for _ in range(3))
    table = torch.randn(heads, n, n, device="cuda", generator=generator).to(dtype)
    valid = torch.rand(batch, n, device="cuda", generator=generator) > 0.1
    # rows of padding, and keys of padding
    valid[150:], valid[:, n - n // 5 :] = False, False
    mods = {
        "score_mod": lambda s, b, h, q, k: s + table[h, q, k],
        "mask_mod": lambda b, h, q, k: valid[b, k],
    }

    def attend() -> Tensor:
        return flash_attn_func(q, k, v, **mods)

    out = attend()
    for b in (0, 77, 149):
        wanted = attend_rows(q[b], k[b], v[b], valid[b], bias=table).out
        assert torch.allclose(out[b].double(), wanted, atol=2e-2)
    assert not out[150:].any()
    assert all(torch.equal(out, attend()) for _ in range(3))
