"""python -m bench.trees [PATTERN ...]: rows of prefix trees, as TRL packs them.

TRL's `TreeRow` folds groups of roll-outs into a row of n tokens, which is as full as they make it.
A roll-out continues an earlier one of its group after a turn of that. In one run, in turns, forward
and backward:

ours      `flash_mask_cute.integrations.trl.tree_attention`, with the arguments that TRL passes
flex      torch.compile(flex_attention) with the same mask, whose block lists are kept
gathered  TRL's own function, which copies the keys of each path, over flash-attn-4 in place of the
          FlashAttention-3 that it fetches

Nothing is timed before rows of O are right, against float64 over the keys of their paths, nor
before gradients are: ours of one small row against float64, those of others against ours. --ahead
processes compile first.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flash_mask_cute
from bench import Json, runner
from bench.oracle import attend
from bench.runner import Ratio, Run, Table
from flash_mask_cute.integrations import trl as ours_in_trl

trl: Any = ours_in_trl
PEERS = ("ours", "flex", "gathered")
PROMPT, TURN, TURNS, GROUP = 1024, (128, 768), 4, 8
CHECKED_ROWS, ALLOWED = 64, 2e-2
PACKING = "trl.experimental.async_grpo.packing"
ENDS = ("tree_cu_seqlens_q", "tree_cu_seqlens_k")


class Case(NamedTuple):
    """short: roll-outs are so much shorter."""

    n: int
    d: int
    heads: tuple[int, int]
    short: int = 1

    @property
    def name(self) -> str:
        return f"tree-{self.n // 1024}k-d{self.d}"


CASES = [
    Case(n, d, heads)
    for n in (16384, 32768, 65536)
    for d, heads in ((128, (32, 8)), (256, (16, 4)))
]


def rollouts(rng: random.Random, short: int) -> list[list[int]]:
    """Tokens of a group."""

    def drawn(count: int) -> list[int]:
        return [rng.randrange(1 << 16) for _ in range(max(2, count // short))]

    prompt = drawn(PROMPT)
    turns: list[list[list[int]]] = []
    for _ in range(GROUP):
        kept = rng.choice(turns)[: rng.randrange(TURNS)] if turns else []
        turns.append(kept + [drawn(rng.randint(*TURN)) for _ in range(TURNS - len(kept))])
    return [prompt + [token for turn in x for token in turn] for x in turns]


def pack(case: Case, device: str) -> tuple[dict[str, Any], int]:
    """TRL's arguments for a row, and the scores that it sees."""
    row, rng, group = importlib.import_module(PACKING).TreeRow(), random.Random(case.n), 0
    while True:
        for tokens in rollouts(rng, case.short):
            ids = torch.tensor(tokens)
            sample = {"input_ids": ids, "completion_mask": torch.zeros_like(ids), "advantage": 0.0}
            sample |= {"old_log_probs": ids.float(), "group_id": group}
            if not row.fits(sample, case.n):
                packed = row.pack()
                names = ("tree_kv_index", *ENDS)
                longest_q, longest_k = packed["tree_max_seqlens"].tolist()
                told = {name: packed[name].to(device) for name in names}
                sizes = {"tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}
                return told | sizes, row.load
            row.add(sample)
        group += 1


class Problem:
    """Tensors, heads first as models have them, and calls."""

    def __init__(self, case: Case, run: Run) -> None:
        self.case = case
        self.row, self.load = pack(case, run.device)
        self.tokens = int(self.row["tree_cu_seqlens_q"][-1])
        heads_q, heads_kv = case.heads
        shapes = [(1, heads, self.tokens, case.d) for heads in (heads_q, heads_kv, heads_kv)]
        out = (1, self.tokens, heads_q, case.d)
        *leaves, self.dout = runner.normal(run.device, run.dtype, *shapes, out)
        self.leaves = [x.requires_grad_() for x in leaves]

    def attend(self, peer: str) -> Callable[..., Tensor]:
        """Returns (1, tokens, heads, d)."""
        module: Any = torch.nn.Linear(1, 1, dtype=self.dout.dtype)
        module.config = None
        if peer == "ours":
            return lambda *x: trl.tree_attention(module, *x, None, **self.row)[0]
        if peer == "gathered":
            packing: Any = importlib.import_module(PACKING)
            packing._flash_attn = lambda: FlashAttention4
            return lambda *x: packing.tree_attention(module, *x, None, **self.row)[0]
        tree = trl._tree_of(*(self.row[x] for x in ("tree_kv_index", *ENDS)), self.tokens)
        ends = tree.mask.startend_row_indices.flatten()

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q < ends[k])

        sizes = self.tokens, self.tokens
        device = str(ends.device)
        lists = flash_mask_cute.create_block_mask(mod, None, None, *sizes, device)
        mask = torch_flex.BlockMask.from_kv_blocks(*lists[:4], 128, mod, sizes)
        function: Any = torch_flex.flex_attention
        if ends.is_cuda:
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=False)
        function = partial(function, block_mask=mask, enable_gqa=True)
        return lambda *x: function(*x).transpose(1, 2)

    def path(self, q: int) -> Tensor:
        """The keys that a query sees, by TRL's arguments."""
        starts, ends = (self.row[x] for x in ENDS)
        segment = int(torch.searchsorted(starts, q, right=True)) - 1
        path: Tensor = self.row["tree_kv_index"][int(ends[segment]) : int(ends[segment + 1])]
        return path[: len(path) - (int(starts[segment + 1]) - 1 - q)]

    def error_of_rows(self, out: Tensor) -> float:
        (q, k, v), errors = (x[0].detach().double() for x in self.leaves), []
        for i in range(CHECKED_ROWS):
            at, h = i * (self.tokens - 1) // (CHECKED_ROWS - 1), i % len(q)
            keys, kv = self.path(at), h // (len(q) // len(k))
            scores = q[h, at] @ k[kv, keys].T * self.case.d**-0.5
            errors.append(runner.share_off(out[0, at, h], attend(scores[None], v[kv, keys]).out))
        return runner.worst(errors)

    def gradients(self) -> tuple[Tensor, ...]:
        """In float64."""
        seen = torch.zeros(self.tokens, self.tokens, dtype=torch.bool, device=self.dout.device)
        for at in range(self.tokens):
            seen[at, self.path(at)] = True
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        q, k, v = leaves
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = (q @ k.mT * self.case.d**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.autograd.grad((weights @ v).transpose(1, 2), leaves, self.dout.double())


class FlashAttention4:
    """What TRL calls of FlashAttention-3."""

    @staticmethod
    def flash_attn_varlen_func(
        *args: Any, softmax_scale: float | None, causal: bool, window_size: tuple[int, int]
    ) -> Any:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        told = dict(zip(names, args[3:], strict=True))
        options = {"softmax_scale": softmax_scale, "causal": causal}
        return interface.flash_attn_varlen_func(*args[:3], **told, **options)


def measure(case: Case, run: Run) -> Iterator[Json]:
    # the buffers of a forward are read again by the next backward
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    problem = Problem(case, run)
    calls: dict[str, dict[str, runner.Call]] = {"fwd": {}, "bwd": {}}
    found: dict[str, Sequence[Tensor]] = {}

    def check(peer: str) -> float:
        told = problem.attend(peer), problem.leaves, problem.leaves, problem.dout
        forward, backward, _ = runner.calls_of(*told)
        error = problem.error_of_rows(forward())
        if not error <= ALLOWED:
            raise ValueError(f"{peer}: rows of O are off by {error:.3g} of the largest number")
        found[peer] = backward()
        runner.compare(peer, ("dq", "dk", "dv"), found[peer], found["ours"], ALLOWED)
        calls["fwd"][peer], calls["bwd"][peer] = forward, backward
        return error

    few = Problem(small([case])[0], run)
    gradients = torch.autograd.grad(few.attend("ours")(*few.leaves), few.leaves, few.dout)
    runner.compare("ours", ("dq", "dk", "dv"), gradients, few.gradients(), ALLOWED)
    others = tuple(x for x in run.peers if x != "ours" and not (run.is_dry and x == "gathered"))
    _, note = runner.taking_part(("ours",), others, check)
    copied = len(problem.row["tree_kv_index"]) / problem.tokens
    row: Json = {"case": case.name, "tokens": problem.tokens, "heads": case.heads, "note": note}
    row |= {"keys_seen": round(problem.load / problem.tokens, 1), "copies": round(copied, 2)}
    if not run.is_dry:
        for way, products in (("fwd", 4), ("bwd", 10)):
            flops = products * case.d * case.heads[0] * problem.load
            row |= runner.figures(run.time(calls[way]), flops, f"_{way}")
    yield row


def small(cases: list[Case]) -> list[Case]:
    return [Case(1536, x.d, (x.heads[0] // x.heads[1], 1), short=24) for x in cases]


def hands(run: Run, cases: Sequence[Case]) -> list[list[Any]]:
    jobs = [(case.name, peer) for peer in run.peers for case in cases]
    return [jobs[first :: run.given.ahead] for first in range(run.given.ahead)]


def compile_calls(run: Run, job: Any) -> None:
    name, peer = job
    (case,) = (case for case in CASES if case.name == name)
    for problem in [Problem(case, run)] + (
        [Problem(small([case])[0], run)] if peer == "ours" else []
    ):
        out = problem.attend(peer)(*problem.leaves)
        torch.autograd.grad(out, problem.leaves, problem.dout)


TABLE = Table(
    command="bench.trees", about=__doc__, cases=lambda: CASES, measure=measure, small=small,
    peers=PEERS, rounds=5, burst_s=0.06, seconds=300.0,
    isolated=runner.Isolated(hands, compile_calls, lambda run, cases: ()),
    ratios=tuple(
        Ratio(f"{way}: {x} / ours", (f"{x}_{way}_ms",), f"ours_{way}_ms")
        for way in ("fwd", "bwd") for x in PEERS[1:]
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
