"""python -m bench.block_sparse [PATTERN ...]: lists of blocks of 64 x 64, each head with its own.

A case is lists over one sequence, without causality. In one run, in turns, forward and backward:

ours        block_sparse_tensors of full blocks, the same in all calls, as layers share them
ours_new    the same, but lists that no call has seen, whose work is part of the call
cudnn       cudnn.block_sparse_attention of nvidia-cudnn-frontend, which makes the lists of its
            backward in each call
cudnn_auto  the same with kv_splits="auto"; forward only

vsa-*: each query block sees its own block and others drawn at random, half of which its neighbour
sees, too. frames-*: 21 frames of 1600 tokens, which see the frames before them, all or four of them
and the first. Our forward walks over the blocks of three query blocks together, the backward over
those of two key blocks. A row has the share of blocks that are listed, and the share of tiles of
128 x 128 that hold one.

Nothing is timed before out and gradients are right: at 2048 tokens, against attention in float64.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench import Json, runner
from bench.oracle import attend
from bench.runner import Ratio, Run, Table
from flash_mask_cute import BlockSparseTensorsTorch, flash_attn_func
from flash_mask_cute.interface import _flash_attn_bwd

BLOCK, TILE, HEAD_DIM = 64, 128, 128
FRAMES, SHORT = 21, 2048
OURS, CUDNN = ("ours", "ours_new"), ("cudnn", "cudnn_auto")
# Of the largest number of a result in bf16, against float64.
ALLOWED = 2e-2


@dataclass(frozen=True)
class Case:
    """kind: "vsa", count blocks of each query block; "frames", count frames before its own beside
    the first one, 0: all. blocks: of the sequence; frame: those of a frame."""

    kind: str
    count: int
    heads: int = 24
    blocks: int = 512
    frame: int = 25
    d: int = HEAD_DIM

    @property
    def name(self) -> str:
        what = f"k{self.count}" if self.kind == "vsa" else f"{self.count or 'all'}"
        return f"{self.kind}-{what}-h{self.heads}"

    @property
    def n(self) -> int:
        return self.blocks * BLOCK

    def listed(self, device: str) -> Tensor:
        """bool (heads, query blocks, key blocks)."""
        place = torch.arange(self.blocks, device=device)
        if self.kind == "frames":
            frame = place // self.frame
            before = frame[:, None] - frame
            near = before <= (self.count or self.blocks)
            return ((before >= 0) & (near | (frame == 0))).expand(self.heads, -1, -1)
        generator = torch.Generator(device).manual_seed(self.count)
        seen = torch.zeros(self.heads, self.blocks, self.blocks, dtype=torch.bool, device=device)
        picks = None
        for q in range(self.blocks):
            score = torch.rand(self.heads, self.blocks, generator=generator, device=device)
            if picks is not None:
                order = torch.rand(picks.shape, generator=generator, device=device).argsort(-1)
                kept = picks.gather(-1, order[:, : self.count // 2])
                score = score.scatter_add(-1, kept, torch.full_like(score, 2.0))
            score[:, q] += 4.0
            picks = score.topk(self.count, dim=-1).indices
            seen[:, q].scatter_(-1, picks, True)
        return seen


def all_cases() -> Iterator[Case]:
    for heads in (12, 24):
        yield from (Case("frames", count, heads, FRAMES * Case.frame) for count in (0, 4))
        yield from (Case("vsa", count, heads) for count in (128, 64, 32))


def short(case: Case, n: int) -> Case:
    """The same kind of lists over n tokens."""
    blocks = n // BLOCK
    count = min(case.count, blocks // 4) if case.kind == "vsa" else case.count
    return replace(case, blocks=blocks, count=count, frame=max(1, blocks // FRAMES), heads=2)


class Problem:
    """Tensors and lists of a case."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        self.case, self.seen = case, case.listed(device)
        shape = 1, case.n, case.heads, case.d
        self.q, self.k, self.v, self.dout = runner.normal(device, dtype, *[shape] * 4)
        self.count = self.seen.sum(-1, dtype=torch.int32)[None].contiguous()
        # the numbers of blocks that are listed, in order, and then of those that are not
        order = (~self.seen).byte().argsort(dim=-1, stable=True)
        self.index = order.int()[None].contiguous()

    @property
    def density(self) -> float:
        return float(self.seen.double().mean())

    @property
    def tile_density(self) -> float:
        """Of tiles of 128 x 128, those that hold a listed block."""
        size = TILE // BLOCK
        missing = -self.case.blocks % size
        whole = pad(self.seen, (0, missing, 0, missing)).unflatten(2, (-1, size))
        return float(whole.unflatten(1, (-1, size)).any(4).any(2).double().mean())

    def lists_of(self, peer: str) -> Callable[[], Any]:
        """Makes the lists of a call of ours."""

        def lists() -> Any:
            count, index = self.count.clone(), self.index.clone()
            none = torch.zeros_like(count), torch.zeros_like(index[..., :1]).expand_as(index)
            return BlockSparseTensorsTorch(*none, count, index, block_size=(BLOCK, BLOCK))

        if peer == "ours_new":
            return lists
        kept = lists()
        return lambda: kept

    def cudnn(self, direction: str, *tensors: Any, **more: Any) -> Any:
        """Lists of equal length go without their lengths: only then does it split keys."""
        attention = importlib.import_module("cudnn.block_sparse_attention")
        told: dict[str, Any] = {"q2k_block_index": self.index, "q2k_block_nums": self.count}
        if self.case.kind == "vsa":
            told = {"q2k_block_index": self.index[..., : self.case.count].contiguous()}
        function = getattr(attention, f"block_sparse_attention_{direction}")
        return lambda: function(*tensors, **told, sparse_block_size=BLOCK, layout="bshd", **more)

    def forward_of(self, peer: str) -> Callable[[], Any]:
        """Returns out and lse."""
        if peer in CUDNN:
            splits = "auto" if peer == "cudnn_auto" else 1
            call = self.cudnn("forward", self.q, self.k, self.v, kv_splits=splits)
            return lambda: [call()[name] for name in ("o_tensor", "lse_tensor")]
        lists, tensors = self.lists_of(peer), (self.q, self.k, self.v)
        return lambda: flash_attn_func(*tensors, return_lse=True, block_sparse_tensors=lists())

    def backward_of(self, peer: str) -> Callable[[], Any]:
        """Returns dq, dk, dv; out and lse are those of the peer's forward, run once."""
        out, lse = self.forward_of(peer)()[:2]
        if peer in CUDNN:
            call = self.cudnn("backward", self.dout, self.q, self.k, self.v, out, lse)
            return lambda: [call()[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor")]
        lists, tensors = self.lists_of(peer), (self.q, self.k, self.v, out, self.dout, lse)
        return lambda: _flash_attn_bwd(*tensors, block_sparse_tensors_torch=lists())

    def reference(self) -> list[Tensor]:
        """out, dq, dk, dv in float64."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        hidden = ~self.seen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        outs = []
        for h in range(self.case.heads):
            scores = q[0, :, h] @ k[0, :, h].T * self.case.d**-0.5
            outs.append(attend(scores.masked_fill(hidden[h], -torch.inf), v[0, :, h]).out)
        out = torch.stack(outs, 1)[None]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout.double())]

    def check(self, peer: str, expected: list[Tensor]) -> float:
        """The largest error of out and gradients. Raises ValueError."""
        found = [self.forward_of(peer)()[0]]
        if peer != "cudnn_auto":
            found += self.backward_of(peer)()
        exact = [x.double() for x in found]
        right = expected[: len(found)]
        return runner.compare(peer, ("out", "dq", "dk", "dv")[: len(found)], exact, right, ALLOWED)


def measure(case: Case, run: Run) -> Iterator[Json]:
    few = Problem(short(case, 8 * BLOCK if run.is_dry else SHORT), run.device, run.dtype)
    expected, others = few.reference(), () if run.is_dry else CUDNN
    peers, told = runner.taking_part(OURS, others, lambda peer: few.check(peer, expected))
    row: Json = {"case": case.name, "n": case.n, "note": told}
    if not run.is_dry:
        row |= times_of(Problem(case, run.device, run.dtype), peers, run)
    yield row


def times_of(problem: Problem, peers: Sequence[str], run: Run) -> Json:
    case, density = problem.case, problem.density
    row: Json = {"blocks": round(density, 4), "tiles": round(problem.tile_density, 4)}
    flops = 4 * case.heads * density * case.n**2 * case.d
    for way, factor in (("fwd", 1.0), ("bwd", 2.5)):
        of_peer = problem.forward_of if way == "fwd" else problem.backward_of
        calls = {x: of_peer(x) for x in peers if way == "fwd" or x != "cudnn_auto"}
        for call in calls.values():
            call()
        row |= runner.figures(run.time(calls), factor * flops, f"_{way}")
    return row


TABLE = Table(
    command="bench.block_sparse", about=__doc__, cases=all_cases, measure=measure,
    small=lambda cases: [replace(case, d=32) for case in cases],
    ratios=tuple(
        Ratio(f"{way}: {x} of cudnn", tuple(f"{peer}_{way}_ms" for peer in CUDNN), f"{x}_{way}_ms")
        for way in ("fwd", "bwd") for x in OURS
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
