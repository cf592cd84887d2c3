"""Statistics of the probabilities: which keys a cache keeps, and the teacher of an indexer.

    python examples/19_attention_statistics.py

A long prompt is compressed as by SnapKV: its last queries vote for keys, and each KV head keeps
those with the most votes. Then an indexer of key blocks takes a step towards the blocks that
attention uses. Checked against the whole matrix of probabilities. Runs on a Hopper GPU where there
is one, else on the CPU. Ends with an error if a result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import compare, pick_device
from torch import Tensor

from flash_mask_cute import attention_statistics, flash_attn_func

BLOCK, WINDOW, KEPT = 64, 32, 200


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """(batch, heads_q, queries, keys) of causal attention."""
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    precise = torch.promote_types(q.dtype, torch.float32)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=precise)


def main() -> None:
    device = pick_device()
    torch.manual_seed(0)
    n, heads_q, heads_kv, d = 500, 8, 2, 64
    q = torch.randn(1, n, heads_q, d, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, n, heads_kv, d, dtype=torch.bfloat16, device=device)
    _, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)

    found = attention_statistics(
        q, k, lse, ["key_sums", "entropy", "block_sums"], block_size=(1, BLOCK), causal=True
    )
    exact, eager = probabilities(q.double(), k.double()), probabilities(q, k)

    def reduced(p: Tensor) -> dict[str, Tensor]:
        of_group = p.unflatten(1, (heads_kv, -1)).sum(2)
        blocks = [x.sum(-1) for x in of_group.split(BLOCK, -1)]
        return {
            "key_sums": of_group.sum(2),
            "entropy": torch.special.entr(p).sum(-1),
            "block_sums": torch.stack(blocks, -1),
        }

    for name, expected in reduced(exact).items():
        ours = getattr(found, name)
        compare("19_attention_statistics", name, ours, expected, reduced(eager)[name])

    # SnapKV: the last queries vote
    votes = attention_statistics(q[:, -WINDOW:], k, lse[..., -WINDOW:], "key_sums", causal=True)
    of_last = exact[:, :, -WINDOW:].unflatten(1, (heads_kv, -1)).sum((2, 3))
    of_eager = eager[:, :, -WINDOW:].unflatten(1, (heads_kv, -1)).sum((2, 3))
    assert votes.key_sums is not None
    compare("19_attention_statistics", "votes", votes.key_sums, of_last, of_eager)
    kept = votes.key_sums.topk(KEPT, -1).indices
    share = of_last.gather(-1, kept).sum() / of_last.sum()
    print(f"{KEPT} of {n} keys have {share:.0%} of the last queries' attention")

    # the gradient of an indexer's scores is its own distribution minus that of its teacher
    assert found.block_sums is not None
    teacher = found.block_sums / found.block_sums.sum(-1, keepdim=True)
    scores = torch.zeros_like(teacher, requires_grad=True)
    visible = torch.arange(teacher.shape[-1], device=device) <= (
        torch.arange(n, device=device)[:, None] // BLOCK
    )
    student = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    (-(teacher * student.clamp(min=1e-9).log()).sum()).backward()
    assert scores.grad is not None
    of_exact = reduced(exact)["block_sums"]
    expected = student.detach() - of_exact / of_exact.sum(-1, keepdim=True)
    of_eager = reduced(eager)["block_sums"].double()
    rounded = student.detach() - of_eager / of_eager.sum(-1, keepdim=True)
    compare("19_attention_statistics", "the indexer's gradient", scores.grad, expected, rounded)


if __name__ == "__main__":
    main()
