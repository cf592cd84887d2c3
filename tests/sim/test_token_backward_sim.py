"""The backward by token lists, on the software GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from drawn_choices import Drawn, dense_choice, draw, draw_choice
from test_selected_sim import Composed, check_backward, positions

from flash_mask_cute import SelectedBlocks

BF16 = torch.bfloat16

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_groups(simulator: ModuleType, group: int) -> None:
    i, j = positions(150, 300, 150)
    drawn = Composed.draw((1, 150, 300), (2 * group, 2, 2), 128, 2, causal=True)
    drawn.seen(j <= i).check()


def regrouped(drawn: Drawn, group: int, head_dim: int, k: int = 3) -> Drawn:
    """The same sequences with other heads, a choice of blocks of 128 keys, and what they then
    see."""
    gen = torch.Generator().manual_seed(group)
    heads_kv = drawn.k.shape[-2]
    q = torch.randn(*drawn.q.shape[:-2], heads_kv * group, head_dim, generator=gen)
    key, v = (torch.randn(*drawn.k.shape[:-1], head_dim, generator=gen) for _ in range(2))
    shape = drawn.selected.indices.shape
    heads = heads_kv if drawn.selected.heads > 1 else 1
    num_blocks = -(-max(drawn.lens_k) // 128)
    choice = draw_choice(gen, (*shape[:-3], heads, shape[-2], k), num_blocks, torch.int32)
    visible = []
    for b, (n_q, n_k) in enumerate(zip(drawn.lens_q, drawn.lens_k, strict=True)):
        first = sum(drawn.lens_q[:b])
        own = choice[:, first : first + n_q] if drawn.is_packed else choice[min(b, len(choice) - 1)]
        seen = dense_choice(own, 128, n_k).repeat_interleave(heads_kv * group // heads, 0)
        at, j = positions(n_q, n_k, n_k - n_q)
        if drawn.keywords["causal"]:
            seen = seen & (j <= at)
        if "window_size" in drawn.keywords:
            seen = seen & (j >= at - 13)
        visible.append(seen)
    keywords = {name: x for name, x in drawn.keywords.items() if name != "learnable_sink"}
    return drawn._replace(
        q=q.double(), k=key.double(), v=v.double(), selected=SelectedBlocks(choice, 128),
        keywords=keywords, visible=visible,
    )  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_draws(simulator: ModuleType, number: int) -> None:
    """Packed and dense, causal or not, windows, soft caps; head dimensions 64 and 128."""
    drawn = draw(100 + number, 64, (128,), 330)
    check_backward(regrouped(drawn, (8, 16)[number % 2], (64, 128)[number // 2 % 2]), number)
