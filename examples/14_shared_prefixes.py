"""Roll-outs of one prompt as a tree: each shared part is computed once, and gradients are equal.

    python examples/14_shared_prefixes.py

GRPO and its relatives draw several answers to a prompt, and agents go on from a common turn. In a
batch the shared tokens are computed again for each answer. `builders.prefix_tree` makes one
sequence of all tokens, in which a token sees its ancestors: one causal vector, and no keys are
copied. Positions for rotary embeddings are those of each path, not of the sequence.

The loss of the unshared batch, a mean over answers, is computed for comparison: its gradients are
those of the tree. Ends with an error if the result is wrong.
"""

from __future__ import annotations

import torch
from dense_check import attend, compare, pick_device
from torch import Tensor

from flash_mask_cute import builders, flash_attn_func

# a prompt, two answers to it, and an agent's turn with two continuations
PARENTS = [-1, 0, 0, 0, 3, 3]
LENGTHS = [70, 30, 25, 20, 40, 33]
ANSWERS = [[0, 1], [0, 2], [0, 3, 4], [0, 3, 5]]


def rows_of(nodes: list[int]) -> Tensor:
    """The places of the tokens of these nodes in the tree."""
    starts = [sum(LENGTHS[:node]) for node in range(len(LENGTHS))]
    return torch.cat([torch.arange(starts[i], starts[i] + LENGTHS[i]) for i in nodes])


def main() -> None:
    device = pick_device()
    torch.manual_seed(0)
    shape = 1, sum(LENGTHS)
    q, k, v, weight = (
        torch.randn(*shape, heads, 64, dtype=torch.bfloat16, device=device)
        for heads in (4, 2, 2, 4)
    )
    mask = builders.prefix_tree(PARENTS, LENGTHS, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    leaf_q, leaf_k, leaf_v = leaves
    out = flash_attn_func(leaf_q, leaf_k, leaf_v, startend_row_indices=mask)
    # a shared token counts once for each answer that it is in
    times = torch.zeros(shape[1], device=device)
    for answer in ANSWERS:
        times[rows_of(answer).to(device)] += 1
    loss = (out.float() * weight * times[None, :, None, None]).sum() / len(ANSWERS)
    found = torch.autograd.grad(loss, leaves)

    def unshared(dtype: torch.dtype) -> list[Tensor]:
        """The output and the gradients of the batch of answers."""
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        total = torch.zeros((), dtype=torch.float64, device=device)
        results = torch.zeros_like(inputs[0])
        for answer in ANSWERS:
            rows = rows_of(answer).to(device)
            visible = torch.ones(len(rows), len(rows), dtype=torch.bool, device=device).tril()
            of_rows = [x[:, rows] for x in inputs]
            of_answer, _ = attend(of_rows[0], of_rows[1], of_rows[2], visible)
            results = results.index_copy(1, rows, of_answer)
            total = total + (of_answer.double() * weight[:, rows]).sum() / len(ANSWERS)
        return [results.detach(), *torch.autograd.grad(total, inputs)]

    exact, eager = unshared(torch.float64), unshared(torch.bfloat16)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        compare("14_shared_prefixes", name, [out, *found][i].detach(), exact[i], eager[i])
    tokens = sum(len(rows_of(answer)) for answer in ANSWERS)
    print(f"{shape[1]} tokens instead of {tokens}")


if __name__ == "__main__":
    main()
