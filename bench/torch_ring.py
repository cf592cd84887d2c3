"""Torch's own context_parallel, a peer of bench.parallel: one causal sequence, in a ring.

Rows are dealt by torch's load balance: to each rank a chunk from the front and one from the back.
Keys are repeated for all heads of queries, as they travel in the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_mask_cute.integrations.torch import register

# by torch's flash attention, and by this package in its place
WAYS = {"torch": False, "torch, ours": True}


@contextmanager
def ring(mesh: DeviceMesh, seqlen: int, *, is_ours: bool = False) -> Iterator[Tensor]:
    """Around forward and backward; gives the positions of the own rows, int64. is_ours: on the
    kernels of this package, on a GPU."""
    from torch.distributed.tensor.experimental import context_parallel

    if is_ours:
        register()
        nn.attention.activate_flash_attention_impl("mask_cute")
    try:
        # it takes at least one tensor to divide
        position_ids = torch.arange(seqlen, device=mesh.device_type)
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=[position_ids], buffer_seq_dims=[0]),
        ):
            yield position_ids.clone()
    finally:
        if is_ours:
            nn.attention.restore_flash_attention_impl()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Inside of `ring`: of q (batch, own rows, heads_q, head_dim), and k and v alike."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
