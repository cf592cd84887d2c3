"""Keys in front that all queries see by a mask_mod, on the software GPU of either architecture."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
import torch
from conftest import ACTIVE_ARCH
from drawn_builders import ancestors
from oracle import attend_rows
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator
from torch import Tensor

from flash_mask_cute import builders
from flash_mask_cute.lowering.pair import resolve_mods

ARCH = ACTIVE_ARCH
# a block of keys of any kernel ends there
FIRST, KEYS = 384, 500


def sees_nothing(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k < 0 * b


def in_front(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k[0] < aux[0][b[0]]


# It does not hold of the mask, so that results show which blocks were asked about.
sees_nothing.__flash_mask_prefix__ = in_front  # type: ignore[attr-defined]


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """In float64. visible: (batch, 1, queries, keys)."""
    return attend_rows(q, k, v, visible)[:2]


def tensors(queries: int, heads_q: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries)
    shapes = (queries, heads_q), (KEYS, 2), (KEYS, 2)
    return [torch.randn(2, *x, 64, generator=generator).bfloat16() for x in shapes]


@pytest.mark.parametrize(("queries", "num_splits"), [(4, 1), (4, 0), (130, 1)])
def test_blocks_in_front_are_not_asked(
    simulator: ModuleType, queries: int, num_splits: int
) -> None:
    q, k, v = tensors(queries)
    first = torch.tensor([FIRST, 0], dtype=torch.int32)
    masks = {"mask_mod": sees_nothing, "aux_tensors": [first]}
    with quiet_run(simulator, 1):
        out, lse = run_on_simulator(forward_call(q, k, v, num_splits=num_splits, **masks))
    visible = (torch.arange(KEYS) < first[:, None])[:, None, None]
    right, of_lse = attend(q, k, v, visible)
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, of_lse.float(), atol=1e-3, rtol=0)


def test_backward(simulator: ModuleType) -> None:
    given = tensors(130, 2)
    first = torch.tensor([FIRST, 0], dtype=torch.int32)
    leaves = [x.double().requires_grad_() for x in given]
    right, lse = attend(*leaves, (torch.arange(KEYS) < first[:, None])[:, None, None])
    dout = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    operands = *given, right.detach().bfloat16(), dout, lse.detach().float()
    with quiet_run(simulator, 2):
        masks = {"mask_mod": sees_nothing, "aux_tensors": [first]}
        found = simulated_backward.launch(operands, masks)
    for one, other in zip(found, torch.autograd.grad(right, leaves, dout.double()), strict=False):
        torch.testing.assert_close(one.double(), other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_splits", [1, 0])
def test_draft_trees(simulator: ModuleType, num_splits: int) -> None:
    """Of other lengths, which end inside a block, at its end, and behind its first key."""
    rng = random.Random(num_splits)
    for drafts, first in ((4, [300, 17]), (7, [256, 121]), (3, [385, 1])):
        parents = [[rng.randint(-1, i - 1) for i in range(drafts)] for _ in range(2)]
        lengths = torch.tensor(first, dtype=torch.int32)
        tree = builders.draft_tree(parents)
        mods = resolve_mods(None, tree.mask_mod(lengths), None, "cpu")
        q, k, v = tensors(drafts)
        made = forward_call(
            q, k, v, seqused_k=lengths + drafts, num_splits=num_splits, q_start="end",
            mask_mod=mods.mask_mod, aux_tensors=mods.aux_tensors,
        )  # fmt: skip
        with quiet_run(simulator, drafts):
            out, lse = run_on_simulator(made)
        visible = torch.zeros(2, 1, drafts, KEYS, dtype=torch.bool)
        for b in range(2):
            visible[b, :, :, : first[b]] = True
            for i, nodes in enumerate(ancestors(parents[b])):
                visible[b, 0, i, [first[b] + j for j in nodes]] = True
        right, of_lse = attend(q, k, v, visible)
        torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, of_lse.float(), atol=1e-3, rtol=0)
