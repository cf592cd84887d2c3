"""Masks of mask_mods on a GPU: as on the CPU; tables cost one wait, and windows none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from public_call import no_waiting
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func

Mod = Callable[..., Tensor]
N = 3000


def packed_images(device: str) -> Mod:
    at = torch.arange(N, device=device)
    positions, ids = (at % 700)[None], (at // 700)[None]
    images = torch.where(at % 500 < 64, at // 500, -1)[None]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        image = (images[b, q] == images[b, k]) & (images[b, q] >= 0)
        return ((positions[b, k] <= positions[b, q]) | image) & (ids[b, q] == ids[b, k])

    return mod


def cached(device: str) -> Mod:
    first = torch.tensor(1000, device=device)
    is_real = torch.arange(N, device=device)[None] >= 40
    return lambda b, h, q, k: (k <= q + first) & (k > q + first - 300) & is_real[b, k]


def made(mod: Mod, waits: int) -> ColumnMask:
    """The mask, made twice; the second time nothing is traced, and waits are counted."""
    builders.from_mask_mod(mod, N, N)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            mask = builders.from_mask_mod(mod, N, N, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mask is not None and mask.device.type == "cuda"
    found = [str(x.message) for x in seen if "synchron" in str(x.message)]
    assert len(found) == waits, found
    return mask


@pytest.mark.parametrize("make", [packed_images, cached])
def test_masks_of_tables(make: Callable[[str], Mod]) -> None:
    mask, on_cpu = made(make("cuda"), 1), builders.from_mask_mod(make("cpu"), N, N)
    assert on_cpu is not None
    assert (mask.causal, mask.documents) == (on_cpu.causal, on_cpu.documents)
    assert torch.equal(mask.startend_row_indices.cpu(), on_cpu.startend_row_indices)


def test_windows_and_chunks_wait_for_nothing() -> None:
    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (abs(q - k) <= 200) & (q >= 0)

    def chunks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 512 == k // 512) & (k <= q)

    made(window, 0)
    made(chunks, 0)
    q, k, v = (torch.randn(1, N, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    at = torch.arange(N, device="cuda")
    for mod in (window, chunks):
        flash_attn_func(q, k, v, mask_mod=mod)
        with no_waiting():
            out = flash_attn_func(q, k, v, mask_mod=mod)
        heads = [x.transpose(1, 2).float() for x in (q, k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mod(at, at, at[:, None], at)
        )
        torch.testing.assert_close(out.transpose(1, 2).float(), wanted, rtol=2e-2, atol=2e-2)


def test_a_graph_follows_contents() -> None:
    """A mod that reads tables stays one, and a replay sees what was written into them."""
    ids = torch.arange(N, device="cuda") // 700
    mod = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    q, k, v = (torch.randn(1, N, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flash_attn_func(q, k, v, mask_mod=mod)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, mask_mod=mod)
        with pytest.raises(RuntimeError, match="capture of a CUDA graph"):
            builders.from_mask_mod(mod, N, N)
    ids.copy_(torch.arange(N, device="cuda") // 400)
    graph.replay()
    mask = builders.document([400] * 7 + [200], device="cuda")
    wanted = flash_attn_func(q, k, v, startend_row_indices=mask)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
