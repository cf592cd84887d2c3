"""bench.block_sparse: its lists, and that wrong ones are noticed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from bench import block_sparse
from bench.block_sparse import Case, Problem, all_cases, short, shown


def test_names() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names) == 10
    assert {"vsa-k128-h24", "frames-all-h12", "frames-4-h24"} <= set(names)
    assert {case.n for case in all_cases()} == {32768, 33600}


def test_drawn_lists_share_half_with_their_neighbours() -> None:
    seen = Case("vsa", 32, heads=3).listed("cpu")
    assert (seen.sum(-1) == 32).all()
    assert seen.diagonal(dim1=1, dim2=2).all()
    shared = (seen[:, 1:] & seen[:, :-1]).sum(-1).double().mean() / 32
    assert 0.5 <= shared < 0.6
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("count", [0, 2])
def test_frames_see_the_frames_before_them(count: int) -> None:
    seen = Case("frames", count, heads=2, blocks=14, frame=3).listed("cpu")
    for q in range(14):
        for k in range(14):
            before = q // 3 - k // 3
            wanted = before >= 0 and (count == 0 or before <= count or k < 3)
            assert bool(seen[1, q, k]) == wanted


def test_tiles_that_hold_a_block() -> None:
    problem = Problem(Case("vsa", 2, heads=2, blocks=9, d=16), "cpu", torch.float32)
    whole = np.zeros((2, 10, 10), dtype=bool)
    whole[:, :9, :9] = problem.seen.numpy()
    held = [
        [whole[h, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].any() for i in range(5) for j in range(5)]
        for h in (0, 1)
    ]
    assert problem.tile_density == pytest.approx(np.mean(held))
    assert problem.density == pytest.approx(2 / 9)


@pytest.mark.parametrize("kind", ["vsa", "frames"])
def test_wrong_lists_are_noticed(kind: str) -> None:
    case = replace(short(Case(kind, 4), 512), d=16)
    problem = Problem(case, "cpu", torch.float32)
    expected = problem.reference()
    for peer in block_sparse.OURS:
        assert problem.check(peer, expected) < 1e-5
    problem.count = problem.count.clamp(max=1)
    with pytest.raises(ValueError, match="ours is off by"):
        problem.check("ours", expected)


def test_a_row_is_told_beside_the_better_of_the_peer() -> None:
    row = {"blocks": 0.25, "tiles": 0.5, "note": "right"}
    row |= {"ours_fwd_ms": 2.0, "ours_new_fwd_ms": 4.0, "cudnn_fwd_ms": 3.0}
    told = shown(row | {"cudnn_auto_fwd_ms": 2.2, "ours_bwd_ms": 5.0})
    assert "of cudnn: ours 1.100, ours_new 0.550" in told and "bwd ours 5.000" in told


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench.block_sparse"])
    assert block_sparse.main() == 2
    assert "python -m bench.block_sparse needs a GPU" in capsys.readouterr().out


def test_what_a_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the arguments and results that cuDNN documents."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor,
        nums: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        outs = []
        for h in range(q.shape[2]):
            hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
            for block in range(index.shape[2]):
                count = index.shape[3] if nums is None else int(nums[0, h, block])
                for place in index[0, h, block, :count].tolist():
                    rows, keys = (slice(64 * x, 64 * x + 64) for x in (block, place))
                    hidden[rows, keys] = False
            scores = (q[0, :, h] @ k[0, :, h].T * q.shape[3] ** -0.5).masked_fill(
                hidden, -torch.inf
            )
            outs.append(scores.softmax(-1) @ v[0, :, h])
        return torch.stack(outs, 1)[None]

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q2k_block_index: torch.Tensor, *,
        q2k_block_nums: torch.Tensor | None = None, sparse_block_size: int, layout: str,
        kv_splits: object,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert (sparse_block_size, layout) == (64, "bshd") and kv_splits in (1, "auto")
        out = attend(q, k, v, q2k_block_index, q2k_block_nums)
        return {"o_tensor": out, "lse_tensor": out[..., 0].mT}

    def backward(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, q2k_block_index: torch.Tensor, *,
        q2k_block_nums: torch.Tensor | None = None, sparse_block_size: int, layout: str,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found = attend(*leaves, q2k_block_index, q2k_block_nums)
        names = "dq_tensor", "dk_tensor", "dv_tensor"
        return dict(zip(names, torch.autograd.grad(found, leaves, dout), strict=True))

    module = ModuleType("cudnn.block_sparse_attention")
    vars(module).update(
        block_sparse_attention_forward=forward, block_sparse_attention_backward=backward
    )
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind in ("vsa", "frames"):
        problem = Problem(replace(short(Case(kind, 3), 512), d=16), "cpu", torch.float32)
        expected = problem.reference()
        for peer in block_sparse.CUDNN:
            assert problem.check(peer, expected) < 1e-5
