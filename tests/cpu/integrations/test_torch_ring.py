"""Torch's context-parallel ring, of two processes, on this package's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from oracle import band, dense_attention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import attention

from bench import torch_ring
from flash_mask_cute.integrations import aten_flash
from flash_mask_cute.integrations.torch import kernels_run

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="torch has no registry"
)
WORLD, SEQLEN = 2, 64
# A causal call with load balance, one without, one that is not causal.
CALLS = (True, True), (True, False), (False, False)


def rows_of(rank: int, is_balanced: bool) -> Tensor:
    """A rank's queries and keys: with load balance, the first and the last chunks of all."""
    chunks = torch.arange(SEQLEN).chunk(2 * WORLD if is_balanced else WORLD)
    if not is_balanced:
        return chunks[rank]
    return torch.cat([chunks[rank], chunks[2 * WORLD - 1 - rank]])


def compare(rank: int, causal: bool, is_balanced: bool) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = is_balanced
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, SEQLEN, 16, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(1, 4, SEQLEN, 16)
    visible = band(SEQLEN, SEQLEN, right=0) if causal else None
    expected = dense_attention(q, k, v, visible)
    wanted = torch.autograd.grad(expected.out, (q, k, v), grad_out.double())
    rows = rows_of(rank, is_balanced)
    local = [x.detach()[:, :, rows].contiguous() for x in (q, k, v)]
    assert dist.group.WORLD is not None
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *state = ring._templated_ring_attention(
        dist.group.WORLD, 2, operator, *local, is_causal=causal
    )
    cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = state
    gradients = ring._templated_ring_attention_backward(
        dist.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        grad_out[:, :, rows].contiguous(), "grad_out", *local, out, lse, causal,
        cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k, max_q=max_q, max_k=max_k, dropout_p=0.0,
        philox_seed=seed, philox_offset=offset,
    )  # fmt: skip
    pairs = [(out, expected.out), *zip(gradients, wanted, strict=False)]
    for actual, dense in pairs:
        torch.testing.assert_close(
            actual.double(), dense.detach()[:, :, rows].double(), atol=4e-6, rtol=4e-6
        )


def compare_public(rank: int) -> None:
    """By torch's `context_parallel`, which on the CPU calls what it calls on a GPU here."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    operator = torch.ops.aten._scaled_dot_product_flash_attention

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
    ) -> Tensor:
        return operator(query, key, value, 0.0, is_causal)[0]

    ring._cp_options.enable_load_balance = True
    torch.manual_seed(1)
    q, k, v, grad_out = (torch.randn(1, SEQLEN, n, 16) for n in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    repeated = (
        x.repeat_interleave(n, 2).transpose(1, 2) for x, n in zip(leaves, (1, 2, 2), strict=True)
    )
    expected = dense_attention(*repeated, band(SEQLEN, SEQLEN, right=0)).out.transpose(1, 2)
    wanted = expected, *torch.autograd.grad(expected, leaves, grad_out.double())
    torchs = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        with torch_ring.ring(init_device_mesh("cpu", (WORLD,)), SEQLEN) as rows:
            own = [x.detach()[:, rows].requires_grad_() for x in leaves]
            out = torch_ring.attend(*own)
            gradients = torch.autograd.grad(out, own, grad_out[:, rows])
    finally:
        F.scaled_dot_product_attention = torchs
    assert rows.tolist() == rows_of(rank, is_balanced=True).tolist()
    for actual, dense in zip((out, *gradients), wanted, strict=True):
        torch.testing.assert_close(
            actual.double(), dense.detach()[:, rows].double(), atol=4e-6, rtol=4e-6
        )


def run_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    handle = aten_flash.Activated("CPU")
    with kernels_run() as ran:
        for causal, is_balanced in CALLS:
            compare(rank, causal, is_balanced)
    with kernels_run() as ran_in_public:
        compare_public(rank)
    handle.remove()
    # forward and backward of both steps; without balance the first rank skips what comes later
    assert len(ran) == 12 - 2 * (rank == 0) and {x.kernel for x in ran} == {"flash_mask_cute"}
    assert {x.kernel for x in ran_in_public} == {"flash_mask_cute"}
    dist.destroy_process_group()


@pytest.mark.shares(3)
def test_torchs_ring(tmp_path: Path) -> None:
    mp.spawn(run_rank, (str(tmp_path / "store"),), WORLD)
