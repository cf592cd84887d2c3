"""The backward by query lists, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ACTIVE_ARCH
from drawn_selections import dense_selection, draw, regroup
from oracle import attend_rows
from planned import backward_call, planned
from quiet_runs import quiet_run
from simulated_backward import run_on_simulator as run_backward
from test_selected_sim import Composed, check_backward, positions

from flash_mask_cute import SelectedBlocks
from flash_mask_cute.call import query_lists as choose_lists
from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.mask_prep import query_lists
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.target import Target

BF16 = torch.bfloat16


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 12, 16, 32, 64])
def test_groups(simulator: ModuleType, group: int) -> None:
    i, j = positions(150, 300, 150)
    drawn = Composed.draw((1, 150, 300), (2 * group, 2, 2), 128, 2, causal=True)
    drawn.seen(j <= i).check()


@pytest.mark.parametrize("number", range(8))
def test_draws(simulator: ModuleType, number: int) -> None:
    """Packed and dense, causal or not, windows, soft caps, d of 64 to 256, padded groups."""
    drawn = draw(100 + number, 64, (128,), 330)
    heads = (8, 4, 12, 2, 1, 6, 3, 32)[number], (64, 128, 64, 256)[number // 2]
    check_backward(regroup(drawn, *heads, (128, 64, 256)[number % 3]), number)


NARROW = [(128, 128), (64, 128), (128, 64), (40, 104), (72, 96)]
WIDE = [(256, 256), (192, 128), (160, 224), (64, 240)]


@pytest.mark.parametrize("dims", [*NARROW, *WIDE])
def test_blocks_of_64_keys(simulator: ModuleType, dims: tuple[int, int]) -> None:
    """Both warpgroups have the keys of a block, and half of the columns each."""
    gen = torch.Generator().manual_seed(dims[0])
    i, j = positions(100, 230, 130)
    drawn = Composed.draw((1, 100, 230), (16, 2, 2), 64, 2).seen(j <= i, causal=True)
    q, k, v = (
        torch.randn(1, rows, heads, dim, generator=gen).to(BF16)
        for rows, heads, dim in ((100, 16, dims[0]), (230, 2, dims[0]), (230, 2, dims[1]))
    )
    drawn._replace(q=q, k=k, v=v).check()


@pytest.mark.parametrize("heads", [(16, 2, 1), (8, 2, 2)])
def test_masks_that_all_heads_share(simulator: ModuleType, heads: tuple[int, int, int]) -> None:
    """A mask_mod, and intervals with holes: queries that see nothing hold NaN."""
    i, j = positions(150, 300, 0)
    mods = resolve_mods(None, lambda b, h, i, j: ((i + 2 * j) % 7 != 3) & (i % 5 != 1), None, "cpu")
    drawn = Composed.draw((1, 150, 300), heads, 128, 2, q_start=0)
    sees = ((i + 2 * j) % 7 != 3) & (i % 5 != 1)
    with_mod = drawn.seen(sees, mask_mod=mods.mask_mod)
    start = (j // 2).clamp(max=150).int().view(1, 1, 300, 1)
    end = (start + 40).clamp(max=150)
    hides = torch.cat((start, end), -1).expand(1, heads[2], 300, 2)
    hole = (i >= start.view(1, -1)) & (i < end.view(1, -1))
    mask = ColumnMask(hides.contiguous(), causal=True)
    with_hole = drawn.seen(~hole & (j <= i), startend_row_indices=mask, causal=True)
    for given in (with_mod, with_hole):
        call = backward_call(*given[:3], given.q, given.q, torch.zeros(1, heads[0], 150),
                             **given.arguments)  # fmt: skip
        assert uses_lists(call)
        given.check()
    empty = ~with_mod.visible.any(-1).any(1)[0]
    assert empty.sum() >= 30
    dout = torch.randn(drawn.q.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    out, lse = torch.zeros_like(dout), torch.zeros(1, heads[0], 150)
    lse[:, :, empty] = -torch.inf
    runs = []
    for value in (0.0, torch.nan):
        q = with_mod.q.clone()
        q[:, empty] = dout[:, empty] = value
        call = backward_call(q, *drawn[1:3], out, dout, lse, **with_mod.arguments)
        with quiet_run(simulator, 1):
            runs.append(run_backward(call))
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def uses_lists(call: Any) -> bool:
    return planned(call, Target(ACTIVE_ARCH, num_sms=2)).problem.query_lists > 0


def test_the_gradient_of_a_sink(simulator: ModuleType) -> None:
    i, j = positions(200, 260, 60)
    drawn = Composed.draw((2, 200, 260), (16, 2, 1), 128, 2).seen(j <= i, causal=True)
    sink = torch.randn(16, generator=torch.Generator().manual_seed(3))
    leaves = [x.double().requires_grad_() for x in (*drawn[:3], sink)]
    exact = attend_rows(*leaves[:3], drawn.visible, sink=leaves[3].view(-1, 1, 1))
    out = exact.out
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    wanted = torch.autograd.grad(out, leaves, dout.double())
    dsink = torch.empty_like(sink)
    lse = exact.lse.detach().float()
    call = backward_call(
        *drawn[:3], out.detach().to(BF16), dout, lse, **drawn.arguments, learnable_sink=sink,
        dsink=dsink,
    )  # fmt: skip
    assert uses_lists(call)
    with quiet_run(simulator, 1):
        got = run_backward(call)
    for name, x, y in zip(("dq", "dk", "dv", "dsink"), (*got, dsink), wanted, strict=True):
        assert (x.double() - y).abs().amax() <= 1.5e-2 * y.abs().amax(), name


def test_key_tiles_that_nobody_chose_and_unused_rows_hold_nan(simulator: ModuleType) -> None:
    """A query in a list sees something; the others, and what lies behind, reach no sum."""
    used_q, used_k = torch.tensor([130, 0, 77]).int(), torch.tensor([401, 300, 64]).int()
    drawn = Composed.draw((3, 130, 520), (8, 1, 1), 128, 3)
    selection = drawn.selection.where(drawn.selection != 1, 0)
    selection[:, :, 5:9] = -1
    visible = dense_selection(selection, 128, 520).expand(-1, 8, -1, -1)
    drawn = drawn._replace(selection=selection, visible=visible)
    drawn.q[:, 5:9] = torch.nan
    for x in (drawn.k, drawn.v):
        x[:, 128:256] = torch.nan
    dout = torch.randn(drawn.q.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    dout[:, 5:9] = torch.nan
    for b, (n_q, n_k) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        drawn.k[b, n_k:] = drawn.v[b, n_k:] = drawn.q[b, n_q:] = dout[b, n_q:] = torch.nan
    given = drawn[:3]
    out, lse = torch.zeros_like(drawn.q), torch.full((3, 8, 130), -torch.inf)
    wanted = [torch.zeros(x.shape, dtype=torch.float64) for x in given]
    for b, (n_q, n_k) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        if not n_q:
            continue
        own = drawn._replace(visible=drawn.visible[b : b + 1, :, :n_q, :n_k])
        rows = drawn.q[b : b + 1, :n_q], *(x[b : b + 1, :n_k] for x in (drawn.k, drawn.v))
        leaves = [x.nan_to_num(0.0).double().requires_grad_() for x in rows]
        of_rows = own.attend(*leaves)
        grads = torch.autograd.grad(of_rows, leaves, dout[b : b + 1, :n_q].nan_to_num(0.0).double())
        out[b, :n_q] = of_rows[0].detach().to(BF16)
        q, k, _ = (x.detach().transpose(1, 2) for x in leaves)
        scores = (q @ k.mT * 64**-0.5).masked_fill(~own.visible, -torch.inf)
        lse[b, :, :n_q] = scores.logsumexp(-1)[0].float()
        for x, y, n in zip(wanted, grads, (n_q, n_k, n_k), strict=True):
            x[b, :n] = y[0]
    call = backward_call(
        *given, out, dout, lse, seqused_q=used_q, seqused_k=used_k, **drawn.arguments
    )
    assert uses_lists(call)
    with quiet_run(simulator, 1):
        got = run_backward(call)
    for name, x, y in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert (x.double() - y).abs().amax() <= 1.5e-2 * y.abs().amax(), name


@pytest.mark.parametrize("segment", [40, 1024])
def test_several_segments(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    """Long lists, and lists that are cut at the same queries, of blocks of two key tiles."""
    monkeypatch.setattr(query_lists, "SEGMENT", segment)
    monkeypatch.setattr(choose_lists, "L2_BYTES", 1)
    monkeypatch.setattr(choose_lists, "MOST_BYTES", 1)
    i, j = positions(300, 600, 300)
    Composed.draw((1, 300, 600), (16, 1, 1), 256, 2).seen(j <= i, causal=True).check()


def test_first_positions(simulator: ModuleType) -> None:
    """The rows of the selection stay with the queries."""
    i, j = positions(150, 300, 0)
    starts = torch.tensor([140, -7], dtype=torch.int32)
    first = i + starts[:, None, None, None]
    drawn = Composed.draw((2, 150, 300), (16, 2, 1), 128, 2)
    drawn.seen(j <= first, causal=True, q_start=starts).check()


@pytest.mark.parametrize("spoils", ["order", "entry", "item"])
def test_faults_of_lists_are_noticed(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, spoils: str
) -> None:
    """An entry of another list, an entry twice, an item that is left out."""
    made_rightly = query_lists.lists_by_torch

    def made_wrongly(*given: Any) -> Any:
        made = made_rightly(*given)
        if spoils == "order":
            made.tokens[0, 3] = made.tokens[0, 2]
        elif spoils == "entry":
            made.items[0, 0, 3] += 1
        else:
            made.num_items[0] -= 1
        return made

    monkeypatch.setattr(query_lists, "lists_by_torch", made_wrongly)
    drawn = Composed.draw((1, 150, 300), (16, 1, 1), 128, 2)
    with pytest.raises(AssertionError):
        drawn.check()


@pytest.mark.parametrize("k", [0, 2])
def test_nobody_chose_anything(simulator: ModuleType, k: int) -> None:
    selection = torch.full((1, 1, 70, k), -1, dtype=torch.int32)
    q, key = torch.full((1, 70, 8, 64), torch.nan).to(BF16), torch.ones(1, 200, 1, 64).to(BF16)
    lse = torch.full((1, 8, 70), -torch.inf)
    given = {"block_sparse_tensors_torch": SelectedBlocks(selection, 128)}
    call = backward_call(q, key, key, torch.zeros_like(q), q, lse, **given)
    assert uses_lists(call)
    with quiet_run(simulator, 1):
        got = run_backward(call)
    assert not any(x.any() for x in got)
