"""Trees, images, block diffusion and draft tokens: many draws, batches, refusals, attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_builders import DRAW, ancestors, brute_force, draw_lengths, draw_tree
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import builders, flash_attn_func, flash_attn_with_kvcache
from flash_mask_cute.masks.draft_tree import DraftTree

NEW = ("prefix_tree", "from_tin_tout", "image_blocks", "block_diffusion")


@pytest.mark.parametrize("name", NEW)
def test_a_thousand_draws(name: str) -> None:
    rng = random.Random(f"many {name}")
    for _ in range(1000):
        drawn = DRAW[name](rng, rng.randint(1, 15))
        seqlen = drawn.mask.startend_row_indices.shape[2]
        assert torch.equal(drawn.mask.dense(seqlen)[0, 0], brute_force(drawn.rule, seqlen, seqlen))


def test_a_batch_of_trees_is_its_entries() -> None:
    """Of any numbers of nodes, from lists and from a tensor of lengths."""
    rng = random.Random(0)
    lengths = [draw_lengths(rng, 20) for _ in range(5)]
    parents = [draw_tree(rng, len(x)) for x in lengths]
    batch = builders.prefix_tree(parents, lengths, 20)
    for i in range(5):
        alone = builders.prefix_tree(parents[i], lengths[i], 20)
        assert torch.equal(batch.dense(20)[i], alone.dense(20)[0])
    parents = [[-1, 0, 1], [-1, -1, 1]]
    of_tensor = builders.prefix_tree(parents, torch.tensor([[3, 4, 5], [1, 9, 2]]), 12)
    of_lists = builders.prefix_tree(parents, [[3, 4, 5], [1, 9, 2]], 12)
    assert torch.equal(of_tensor.dense(12), of_lists.dense(12))
    touts = torch.stack([x.startend_row_indices[0, 0, :, 0] for x in (batch, batch)])
    assert builders.from_tin_tout(touts).startend_row_indices.shape == (2, 1, 20, 1)


def test_several_roots_are_documents() -> None:
    assert builders.prefix_tree([-1, 0, -1], [3, 1, 2]).documents is True
    assert builders.prefix_tree([-1, 0, 0], [3, 1, 2]).documents is False


def test_batches_of_images() -> None:
    ids = torch.tensor([[0, 0, -1, 2, 2], [-1, 5, 5, 5, -1]])
    batch = builders.image_blocks(ids, 1).dense(5)
    for i in range(2):
        assert torch.equal(batch[i], builders.image_blocks(ids[i], 1).dense(5)[0])


def test_a_tree_is_the_unshared_batch() -> None:
    """Outputs and gradients of roll-outs that share a prompt, in float64."""
    generator = torch.Generator().manual_seed(0)
    parents, lengths = [-1, 0, 1, 1, 0], [20, 7, 5, 6, 9]
    paths = [[0, 1, 2], [0, 1, 3], [0, 4]]
    total, starts = sum(lengths), [sum(lengths[:i]) for i in range(5)]
    q, k, v, dout = (
        torch.randn(1, total, heads, 16, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    tree = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*tree, startend_row_indices=builders.prefix_tree(parents, lengths))
    found = torch.autograd.grad(out, tree, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    loss = torch.zeros((), dtype=torch.float64)
    for path in paths:
        rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in path])
        of_path = flash_attn_func(*(x[:, rows] for x in leaves), causal=True)
        assert torch.allclose(of_path, out[:, rows], atol=1e-12)
        # a node counts once in the tree, and once for each path of the batch
        shares = torch.tensor([1 / sum(i in other for other in paths) for i in path])
        weight = shares.double().repeat_interleave(torch.tensor([lengths[i] for i in path]))
        loss = loss + (of_path * dout[:, rows] * weight[None, :, None, None]).sum()
    for one, right in zip(found, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.allclose(one, right, atol=1e-12)


# -- draft tokens -------------------------------------------------------------------------------


def draw_drafts(rng: random.Random, drafts: int) -> list[int]:
    """Parents in any order, each before its children."""
    return [rng.randint(-1, i - 1) for i in range(drafts)]


def test_words_are_the_ancestors() -> None:
    rng = random.Random(3)
    for drafts in (1, 2, 3, 4, 5, 8, 33, 63, 64):
        for _ in range(20):
            parents = [draw_drafts(rng, drafts) for _ in range(3)]
            tree = builders.draft_tree(parents)
            assert tree.bits.dtype == torch.int64 and tree.depths.dtype == torch.int32
            for i, of_sequence in enumerate(parents):
                seen = ancestors(of_sequence)
                words = [sum(1 << j for j in nodes) for nodes in seen]
                assert [word & (2**64 - 1) for word in tree.bits[i].tolist()] == words
                assert tree.depths[i].tolist() == [len(nodes) - 1 for nodes in seen]
            from_tensor = builders.draft_tree(torch.tensor(parents, dtype=torch.int32))
            assert torch.equal(from_tensor.bits, tree.bits)
    assert torch.equal(builders.draft_tree([-1, 0]).bits, builders.draft_tree([[-1, 0]]).bits)


def expected_step(q: Tensor, k: Tensor, v: Tensor, first: int, parents: list[int]) -> Tensor:
    """Attention of the drafts (drafts, heads, d) over the keys of their sequence, in float64."""
    drafts = len(parents)
    seen = torch.ones(drafts, first + drafts, dtype=torch.bool)
    for i, nodes in enumerate(ancestors(parents)):
        seen[i, first:] = torch.tensor([j in nodes for j in range(drafts)])
    return attend_rows(q, k[: first + drafts], v[: first + drafts], seen).out


@pytest.mark.parametrize("drafts", [5, 64])
@pytest.mark.parametrize("appends", [False, True])
def test_a_step_over_pages(appends: bool, drafts: int) -> None:
    """Sequences of other lengths with other trees, before and after both change in place."""
    rng, generator = random.Random(drafts), torch.Generator().manual_seed(1)
    pools = torch.randn(2, 24, 16, 2, 16, generator=generator, dtype=torch.float64)
    pages = torch.randperm(24, generator=generator).view(2, 12).int()
    lengths = torch.tensor([35, 20], dtype=torch.int32)
    tree = builders.draft_tree([draw_drafts(rng, drafts) for _ in range(2)])
    mask_mod = tree.mask_mod(lengths)
    for first in ([35, 20], [7, 81]):
        parents = [draw_drafts(rng, drafts) for _ in range(2)]
        lengths.copy_(torch.tensor(first))
        tree.bits.copy_(builders.draft_tree(parents).bits)
        q, k, v = (
            torch.randn(2, drafts, heads, 16, generator=generator, dtype=torch.float64)
            for heads in (4, 2, 2)
        )
        caches = [x.clone() for x in pools]
        keys = [x[pages.long()].flatten(1, 2) for x in caches]
        if appends:
            new, used = (k, v), lengths
            for i, start in enumerate(first):
                for whole, rows in zip(keys, (k, v), strict=True):
                    whole[i, start : start + drafts] = rows[i]
        else:
            new, used = (), lengths + drafts
        out = flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=used, page_table=pages, mask_mod=mask_mod
        )
        for i, start in enumerate(first):
            expected = expected_step(q[i], keys[0][i], keys[1][i], start, parents[i])
            assert torch.allclose(out[i], expected, atol=1e-12)


TREE = builders.draft_tree([[-1, 0], [-1, -1]])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: builders.prefix_tree([-1, 0, 1, 0, 1], [1] * 5), ValueError,
         r"parents\[4\]=1 is neither node 3 nor an ancestor of it: nodes must be in depth-first"),
        (lambda: builders.prefix_tree([-1, 2, 0], [1] * 3), ValueError, r"\[1\]=2 is neither"),
        (lambda: builders.prefix_tree([[-1], [-1, 0]], [[1], [1]]), ValueError,
         r"parents\[1\] has 2 nodes, lengths 1"),
        (lambda: builders.prefix_tree([[-1]], [[1], [1]]), ValueError, "1 forests, lengths 2"),
        (lambda: builders.prefix_tree([-2], [1]), ValueError, r"parents\[0\]=-2 is less than -1"),
        (lambda: builders.prefix_tree([-1.0], [1]), TypeError, r"parents\[0\]=-1\.0 is not an int"),
        (lambda: builders.prefix_tree(torch.tensor([-1]), [1]), TypeError, "from_tin_tout takes a"),
        (lambda: builders.prefix_tree([-1, 0], [3, -1]), ValueError, "lengths=-1"),
        (lambda: builders.prefix_tree([-1, 0], [3, 4], 6), ValueError, "adds up to 7"),
        (lambda: builders.from_tin_tout([3, 3, 3]), TypeError, "tout is a list"),
        (lambda: builders.from_tin_tout(torch.tensor([3, 3, 2])), ValueError, r"\[2\]=2 is not"),
        (lambda: builders.from_tin_tout(torch.tensor([4, 2, 3])), ValueError, r"\[0\]=4 is not"),
        (lambda: builders.from_tin_tout(torch.tensor([[1, 2, 3], [2, 3, 3]])), ValueError,
         r"tout\[1, 1\]=3 is past tout\[1, 0\]=2, where the subtree of token 0 ends"),
        (lambda: builders.image_blocks([0, 1]), TypeError, "ids is a list"),
        (lambda: builders.image_blocks(torch.zeros(3)), TypeError, "ids has dtype torch.float32"),
        (lambda: builders.image_blocks(torch.zeros(3).int(), -1), ValueError, "window=-1"),
        (lambda: builders.block_diffusion(8, 0), ValueError, "block=0 is less than 1"),
        (lambda: builders.block_diffusion(-1, 2), ValueError, "seqlen=-1"),
        (lambda: builders.block_diffusion(8.0, 2), TypeError, "seqlen"),
        (lambda: builders.draft_tree([-1, 1]), ValueError, r"parents\[0, 1\]=1 is neither -1 nor"),
        (lambda: builders.draft_tree(torch.tensor([[-1], [-2]])), ValueError, r"\[1, 0\]=-2"),
        (lambda: builders.draft_tree([-1] * 65), ValueError, r"shape \(1, 65\), not \(drafts,\)"),
        (lambda: builders.draft_tree([[-1, 0], [-1]]), ValueError, "other numbers of drafts"),
        (lambda: builders.draft_tree([-1.0]), TypeError, r"a number in parents=-1\.0"),
        (lambda: builders.draft_tree(7), TypeError, "parents=7 is no list"),
        (lambda: builders.draft_tree(torch.zeros(1, 3)), TypeError, "dtype torch.float32"),
        (lambda: TREE.mask_mod(5), TypeError, "first is a int, not a tensor"),
        (lambda: TREE.mask_mod(torch.zeros(2)), TypeError, "first has dtype torch.float32"),
        (lambda: TREE.mask_mod(torch.zeros(3).int()), ValueError, r"first is .*\(3,\) on cpu, not"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_tree_is_a_pair_of_tensors() -> None:
    assert isinstance(TREE, DraftTree) and TREE.bits.tolist() == [[1, 3], [1, 2]]
