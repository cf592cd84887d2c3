"""Training: gradients of attention, eager, compiled and checkpointed.

    python examples/08_autograd.py

A causal layer with a column mask (documents packed into one sequence) and a learnable sink. Checked
against autograd through attention written out in float64. Runs on a Hopper GPU where there is one,
else on the CPU. Ends with an error if a gradient is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from dense_check import compare, pick_device
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_mask_cute import ColumnMask, flash_attn_func

DOCUMENTS = (90, 150, 60)


def written_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, visible: Tensor) -> Tensor:
    """The same attention in the dtype of the operands; the sink is one more logit per head."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    logits = torch.cat((scores, sink.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), 3)
    probabilities = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :-1]
    return (probabilities.to(q.dtype) @ v).transpose(1, 2)


def gradients(
    attention: Callable[..., Tensor], operands: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in operands)
    return torch.autograd.grad(attention(*leaves), leaves, dout.to(leaves[0].dtype))


def main() -> None:
    device = pick_device()
    torch.manual_seed(0)
    seqlen, heads_q, heads_kv, d = sum(DOCUMENTS), 4, 2, 64
    q = torch.randn(1, seqlen, heads_q, d, dtype=torch.bfloat16, device=device)
    k = torch.randn(1, seqlen, heads_kv, d, dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)
    sink = torch.randn(heads_q, device=device)
    dout = torch.randn_like(q)

    # a key hides the queries from the end of its document on; made once, used by every layer
    ends = torch.tensor(DOCUMENTS, device=device).cumsum(0)
    end_of_key = ends.repeat_interleave(torch.tensor(DOCUMENTS, device=device))
    mask = ColumnMask(end_of_key.int().view(1, 1, seqlen, 1), causal=True)
    visible = mask.dense(seqlen)

    def layer(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, learnable_sink=sink, startend_row_indices=mask)

    ways: dict[str, Callable[..., Tensor]] = {
        "eager": layer,
        "checkpointed": partial(checkpoint, layer, use_reentrant=False),
        "compiled": torch.compile(
            layer, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager"
        ),
    }
    operands = (q, k, v, sink)
    plain = partial(written_out, visible=visible)
    exact = gradients(plain, tuple(x.double() for x in operands), dout)
    rounded = gradients(plain, operands, dout)
    for way, attention in ways.items():
        found = gradients(attention, operands, dout)
        for name, *results in zip(("dq", "dk", "dv", "dsink"), found, exact, rounded, strict=True):
            compare("08_autograd", f"{way}, {name}", *results)


if __name__ == "__main__":
    main()
