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
`--dry` checks that of ours on the CPU, with fewer tokens, and times nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import Json, say, timing
from bench.by_name import Bench
from bench.oracle import attend

BLOCK, TILE, HEAD_DIM = 64, 128, 128
FRAMES = 21
SHORT = 2048
OURS, CUDNN = ("ours", "ours_new"), ("cudnn", "cudnn_auto")
PEERS = OURS + CUDNN
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

    def listed(self, device: str) -> Any:
        """bool (heads, query blocks, key blocks)."""
        import torch

        place = torch.arange(self.blocks, device=device)
        if self.kind == "frames":
            frame = place // self.frame
            before = frame[:, None] - frame
            near = before <= (self.count or self.blocks)
            seen = (before >= 0) & (near | (frame == 0))
            return seen.expand(self.heads, -1, -1)
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


def all_cases() -> list[Case]:
    found = []
    for heads in (12, 24):
        found += [Case("frames", count, heads, FRAMES * Case.frame) for count in (0, 4)]
        found += [Case("vsa", count, heads) for count in (128, 64, 32)]
    return found


def short(case: Case, n: int) -> Case:
    """The same kind of lists over n tokens."""
    blocks = n // BLOCK
    count = min(case.count, blocks // 4) if case.kind == "vsa" else case.count
    frame = max(1, blocks // FRAMES)
    return replace(case, blocks=blocks, count=count, frame=frame, heads=2)


class Problem:
    """Tensors and lists of a case."""

    def __init__(self, case: Case, device: str, dtype: Any) -> None:
        import torch

        self.case = case
        generator = torch.Generator(device).manual_seed(0)
        shape = 1, case.n, case.heads, case.d
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4)
        )
        self.seen = case.listed(device)
        count = self.seen.sum(-1, dtype=torch.int32)[None]
        # the numbers of blocks that are listed, in order, and then of those that are not
        index = (~self.seen).byte().argsort(dim=-1, stable=True).int()[None]
        self.count, self.index = count.contiguous(), index.contiguous()

    @property
    def density(self) -> float:
        return float(self.seen.double().mean())

    @property
    def tile_density(self) -> float:
        """Of tiles of 128 x 128, those that hold a listed block."""
        from torch.nn.functional import pad

        size = TILE // BLOCK
        missing = -self.case.blocks % size
        whole = pad(self.seen, (0, missing, 0, missing))
        return float(
            whole.unflatten(2, (-1, size)).unflatten(1, (-1, size)).any(4).any(2).double().mean()
        )

    def lists(self, is_new: bool) -> Any:
        import torch

        from flash_mask_cute import BlockSparseTensorsTorch

        told = self.count, self.index
        if is_new:
            told = self.count.clone(), self.index.clone()
        count, index = told
        none = torch.zeros_like(count), torch.zeros_like(index[..., :1]).expand_as(index)
        return BlockSparseTensorsTorch(*none, count, index, block_size=(BLOCK, BLOCK))

    def told_to_cudnn(self) -> dict[str, Any]:
        """Lists of the same length without their lengths: only then does it split keys."""
        common: dict[str, Any] = {"sparse_block_size": BLOCK, "layout": "bshd"}
        if self.case.kind == "vsa":
            return common | {"q2k_block_index": self.index[..., : self.case.count].contiguous()}
        return common | {"q2k_block_index": self.index, "q2k_block_nums": self.count}

    def forward_of(self, peer: str) -> Callable[[], Any]:
        """Returns out, and what else a peer returns."""
        if peer in CUDNN:
            attention = importlib.import_module("cudnn.block_sparse_attention")
            told = self.told_to_cudnn() | {"kv_splits": "auto" if peer == "cudnn_auto" else 1}

            def forward() -> tuple[Any, Any]:
                found = attention.block_sparse_attention_forward(self.q, self.k, self.v, **told)
                return found["o_tensor"], found["lse_tensor"]

            return forward
        from flash_mask_cute import flash_attn_func

        kept = None if peer == "ours_new" else self.lists(False)
        return lambda: flash_attn_func(
            self.q, self.k, self.v, return_lse=True,
            block_sparse_tensors=self.lists(True) if kept is None else kept,
        )  # fmt: skip

    def backward_of(self, peer: str) -> Callable[[], Any]:
        """Returns dq, dk, dv; out and lse are those of the peer's forward, run once."""
        out, lse = self.forward_of(peer)()[:2]
        if peer in CUDNN:
            attention = importlib.import_module("cudnn.block_sparse_attention")
            told = self.told_to_cudnn()

            def backward() -> tuple[Any, ...]:
                found = attention.block_sparse_attention_backward(
                    self.dout, self.q, self.k, self.v, out, lse, **told
                )
                return tuple(found[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

            return backward
        from flash_mask_cute.interface import _flash_attn_bwd

        kept = None if peer == "ours_new" else self.lists(False)
        return lambda: _flash_attn_bwd(
            self.q, self.k, self.v, out, self.dout, lse,
            block_sparse_tensors_torch=self.lists(True) if kept is None else kept,
        )  # fmt: skip

    def reference(self) -> list[Any]:
        """out, dq, dk, dv in float64."""
        import torch

        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        hidden = ~self.seen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        outs = []
        for h in range(self.case.heads):
            scores = q[0, :, h] @ k[0, :, h].T * self.case.d**-0.5
            outs.append(attend(scores.masked_fill(hidden[h], -torch.inf), v[0, :, h]).out)
        out = torch.stack(outs, 1)[None]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout.double())]

    def check(self, peer: str, expected: list[Any]) -> float:
        """The largest error of out and gradients. Raises ValueError."""
        found = [self.forward_of(peer)()[0]]
        if peer != "cudnn_auto":
            found += self.backward_of(peer)()
        worst = max(
            float((x.double() - right).abs().max() / right.abs().max())
            for x, right in zip(found, expected, strict=False)
        )
        if not worst < ALLOWED:
            raise ValueError(f"{peer} is off by {worst:.3g} of the largest number")
        return worst


def check_case(case: Case, device: str, dtype: Any, n: int) -> tuple[list[str], str]:
    """The peers that take part, and what they are off by. Raises ValueError where ours is wrong."""
    problem = Problem(short(case, n), device, dtype)
    expected = problem.reference()
    peers, told = list(OURS), [f"{x} {problem.check(x, expected):.1e}" for x in OURS]
    for peer in CUDNN if device == "cuda" else ():
        try:
            told.append(f"{peer} {problem.check(peer, expected):.1e}")
            peers.append(peer)
        except Exception as error:
            told.append(f"{peer} left out: {type(error).__name__}: {str(error)[:200]}")
    return peers, ", ".join(told)


def measure(case: Case, rounds: int, burst_s: float) -> Json:
    import torch

    peers, told = check_case(case, "cuda", torch.bfloat16, SHORT)
    problem = Problem(case, "cuda", torch.bfloat16)
    row: Json = {
        "case": case.name, "n": case.n, "note": told, "blocks": round(problem.density, 4),
        "tiles": round(problem.tile_density, 4),
    }  # fmt: skip
    flops = 4 * case.heads * problem.density * case.n**2 * case.d
    for way, factor, of_peer in (
        ("fwd", 1.0, problem.forward_of),
        ("bwd", 2.5, problem.backward_of),
    ):
        calls = {x: of_peer(x) for x in peers if way == "fwd" or x != "cudnn_auto"}
        for call in calls.values():
            call()
        for peer, samples in timing.time_loop(calls, rounds, burst_s, least=1).items():
            row[f"{peer}_{way}_ms"] = round(timing.median(samples), 5)
            row[f"{peer}_{way}_spread"] = round(timing.spread(samples), 4)
            row[f"{peer}_{way}_tflops"] = round(factor * flops / timing.median(samples) * 1e-9, 1)
    return row


def shown(row: Json) -> str:
    parts = [f"blocks {row['blocks']:.3f} tiles {row['tiles']:.3f}"]
    for way in ("fwd", "bwd"):
        times = {x: row[f"{x}_{way}_ms"] for x in PEERS if f"{x}_{way}_ms" in row}
        parts.append(f"{way} " + " ".join(f"{x} {time:.3f}" for x, time in times.items()))
        theirs = [time for x, time in times.items() if x in CUDNN]
        if theirs:
            ratios = (f"{x} {min(theirs) / times[x]:.3f}" for x in OURS)
            parts.append(f"of cudnn: {', '.join(ratios)}")
    return "  ".join((*parts, row["note"]))


def dry(cases: Sequence[Case]) -> int:
    import torch

    for case in cases:
        _, told = check_case(replace(case, d=32), "cpu", torch.float32, 8 * BLOCK)
        say(f"{case.name:16} {told}")
    return 0


def main() -> int:
    return Bench("bench.block_sparse", __doc__ or "", all_cases, measure, shown, dry, 16).main()


if __name__ == "__main__":
    sys.exit(main())
