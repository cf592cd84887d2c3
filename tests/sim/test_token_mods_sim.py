"""The backward by query lists beside modified scores, sinks, and masks by head, against float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from drawn_selections import dense_selection
from planned import backward_call
from quiet_runs import quiet_run
from simulated_backward import run_on_simulator as run_backward
from test_selected_sim import BF16, Composed, positions
from test_token_backward_sim import uses_lists
from torch import Tensor
from trained_mods import TRAINED_MODS, Extents

from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# of the largest number of a gradient
ALLOWED = 1.5e-2


def check(
    simulator: ModuleType, drawn: Composed, name: str = "", sink: Tensor | None = None,
    wants: bool = True, **more: Any,
) -> None:  # fmt: skip
    """Gradients of a call, whose rows that see nothing hold NaN. name: of `TRAINED_MODS`, whose
    tensors have gradients if wanted; more: keywords of the backward."""
    n_q, n_k = drawn.visible.shape[2:]
    trained: list[Tensor] = []
    gen = torch.Generator().manual_seed(3)
    if name:
        extents = Extents(len(drawn.q), drawn.q.shape[2], n_q, n_k)
        for shape, dtype in TRAINED_MODS[name].trained(extents):
            trained.append((torch.randn(shape, generator=gen) / 4).to(dtype))
    given = [*drawn[:3], *([] if sink is None else [sink]), *trained]
    leaves = [x.double().requires_grad_() for x in given]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if name:
        i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
        of_mod = leaves[len(leaves) - len(trained) :]
        dense = TRAINED_MODS[name].dense
        scores = torch.stack(
            [
                torch.stack([dense(x, b, h, i, j, *of_mod) for h, x in enumerate(of_entry)])
                for b, of_entry in enumerate(scores)
            ]
        )
    scores = scores.masked_fill(~drawn.visible, -torch.inf)
    if sink is not None:
        column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.where(lse > -torch.inf, 0.0)[..., None]).exp()[..., :n_k]
    out = (probs @ v).transpose(1, 2)
    hidden = ~drawn.visible.any(-1).transpose(1, 2)
    dout = torch.randn(out.shape, generator=gen).to(BF16)
    dout[hidden] = 0.0
    wanted = torch.autograd.grad(out, leaves, dout.double())
    in_rows = drawn.q.clone()
    in_rows[hidden] = dout[hidden] = torch.nan
    new: list[Tensor] = []
    if sink is not None:
        new.append(torch.empty_like(sink))
        more |= {"learnable_sink": sink, "dsink": new[0]}
    if name:
        more |= {"score_mod": TRAINED_MODS[name].cute, "aux_tensors": trained}
    if wants and trained:
        new += (of_aux := [torch.full_like(x, torch.nan) for x in trained])
        more["daux"] = of_aux
    call = backward_call(
        in_rows, *drawn[1:3], out.detach().to(BF16), dout, lse.detach().float(),
        **drawn.arguments, **more,
    )  # fmt: skip
    assert uses_lists(call)
    with quiet_run(simulator, 1):
        got = [*run_backward(call), *new]
    for number, (x, y) in enumerate(zip(got, wanted, strict=False)):
        assert (x.double() - y).abs().amax() <= ALLOWED * y.abs().amax(), number


@pytest.mark.parametrize(
    ("name", "heads", "block", "wants"),
    [
        ("slopes", (16, 1, 1), 128, True),
        ("slopes", (16, 1, 1), 64, True),
        ("gain_and_bias", (8, 2, 1), 128, True),
        ("t5", (12, 1, 1), 128, True),
        ("key_bias", (4, 2, 2), 64, True),
        ("squared", (3, 1, 1), 64, False),
        ("slopes", (2, 2, 2), 128, False),
    ],
)
def test_modified_scores(
    simulator: ModuleType, name: str, heads: tuple[int, int, int], block: int, wants: bool
) -> None:
    """Position and head of each score, and gradients of what is read there."""
    i, j = positions(70, 300, 0)
    drawn = Composed.draw((2, 70, 300), heads, block, 2, q_start=0, causal=True)
    drawn.selection[..., 0] = 0
    visible = dense_selection(drawn.selection, block, 300).repeat_interleave(
        heads[0] // heads[2], 1
    )
    check(simulator, drawn._replace(visible=visible & (j <= i)), name, wants=wants)


def sees_by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i + 2 * j) % 7 != h) & (i % 5 != h)


def sees_by_query(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i + 2 * j) % 7 != 3) & (i % 5 != 1)


@pytest.mark.parametrize("heads", [(16, 2, 1), (6, 2, 2), (4, 4, 4), (64, 1, 1)])
@pytest.mark.parametrize("by_head", [True, False])
def test_a_mask_mod(simulator: ModuleType, heads: tuple[int, int, int], by_head: bool) -> None:
    """One by head, and one beside a sink."""
    i, j = positions(90, 300, 0)
    h = torch.arange(heads[0])[:, None, None]
    rule = sees_by_head if by_head else sees_by_query
    mods = resolve_mods(None, rule, None, "cpu")
    drawn = Composed.draw((1, 90, 300), heads, 128, 2, q_start=0)
    drawn = drawn.seen(rule(0, h, i, j), mask_mod=mods.mask_mod)
    assert (~drawn.visible.any(-1)).sum() > 18
    sink = None if by_head else torch.randn(heads[0], generator=torch.Generator().manual_seed(1))
    check(simulator, drawn, sink=sink)


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("mods", (16, 1, 1)),
        ("mask_mod", (6, 2, 2)),
        ("columns", (24, 2, 1)),
        ("window", (64, 1, 1)),
    ],
)
def test_wide_heads(simulator: ModuleType, kind: str, heads: tuple[int, int, int]) -> None:
    first = 0 if kind == "mods" else 200
    i, j = positions(70, 300, first)
    drawn = Composed.draw((1, 70, 300), heads, 64, 2, q_start=first)
    q, k, v = (x.repeat_interleave(4, -1).roll(1, -1) for x in drawn[:3])
    drawn = drawn._replace(q=q, k=k, v=v)
    if kind == "window":
        seen = (j <= i) & (j >= i - 150)
        drawn = drawn.seen(seen, causal=True, window_size_left=150)
    elif kind == "mask_mod":
        rule = sees_by_head(0, torch.arange(6)[:, None, None], i, j)
        mods = resolve_mods(None, sees_by_head, None, "cpu")
        drawn = drawn.seen(rule, mask_mod=mods.mask_mod)
    elif kind == "columns":
        start = (200 + j % 70).int().view(1, 1, 300, 1)
        mask = ColumnMask(start.expand(1, 2, 300, 1).contiguous(), causal=True)
        drawn = drawn.seen((j <= i) & (i < start.view(1, -1)), startend_row_indices=mask)
    check(simulator, drawn, "slopes" if kind == "mods" else "")


def hides_a_head(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where((h == 0) & (i % 3 == 0), -torch.inf, score)


@pytest.mark.parametrize("mask", [sees_by_query, None])
def test_a_score_mod_that_hides_a_head(simulator: ModuleType, mask: Any) -> None:
    """LSE of one head does not tell that the others of its group see nothing."""
    i, j = positions(40, 150, 0)
    h = torch.arange(4)[:, None, None]
    mods = resolve_mods(hides_a_head, mask, None, "cpu")
    drawn = Composed.draw((1, 40, 150), (4, 2, 1), 128, 1, q_start=0)
    sees = ~((h == 0) & (i % 3 == 0)) & (True if mask is None else mask(0, h, i, j))
    keywords = {"mask_mod": mods.mask_mod, "score_mod": mods.score_mod}
    check(simulator, drawn.seen(sees, **keywords))


@pytest.mark.parametrize(("heads", "of_mask"), [((8, 2, 2), 8), ((8, 2, 1), 2), ((2, 1, 1), 1)])
def test_intervals(simulator: ModuleType, heads: tuple[int, int, int], of_mask: int) -> None:
    """Of each head, or of each KV head where all share a list; the last beside a sink."""
    i, j = positions(90, 300, 0)
    h = torch.arange(of_mask)[:, None]
    start = (j // 4 + 3 * h).clamp(max=90).int()
    end = (start + 30).clamp(max=90)
    hides = torch.stack((start, end), -1).view(1, of_mask, 300, 2)
    hole = (i >= start[:, None]) & (i < end[:, None])
    sees = (~hole & (j <= i)).repeat_interleave(heads[0] // of_mask, 0)
    drawn = Composed.draw((1, 90, 300), heads, 128, 1, q_start=0)
    mask = ColumnMask(hides.contiguous(), causal=True)
    drawn = drawn.seen(sees, startend_row_indices=mask, causal=True)
    assert (~drawn.visible.any(-1)).sum() > 5
    check(simulator, drawn, sink=torch.zeros(heads[0]) if of_mask == 1 else None)
