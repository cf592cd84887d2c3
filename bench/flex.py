"""python -m bench.flex [PATTERN ...]: mods of torch through flex_attention, ours and torch's.

A case is a mod at a length and a head dimension, forward and backward. In one run, in turns:

ours   `flash_mask_cute.flex_attention` with the mod and its block mask, which is kept
own    `flash_attn_func` with the same mask in its own form: flags, column intervals, a CuTe mod by
       hand; without such a form (`by_hand` false in the row), the lowered mod with the same lists
torch  torch.compile(flex_attention), which compiles to Triton

Beside them `prep-*`, wall time of `create_block_mask`, ours and torch's compiled one, and `host-*`,
host time of a warm forward, flex_attention against flash_attn_func with the same lowered mods;
`unkept_us`: flex_attention with a block mask that is not kept.

Nothing is timed before the results are right: rows of O against float64, gradients against torch's.
Cases of this commit that --out or --resume hold already are left out. `--ahead` processes compile
first, as a case compiles for longer than it is timed.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as torch_flex

import flash_mask_cute
from bench import Json, commit_here, runner, timing
from bench.flex_mods import BY_NAME, NAMED, OTHERS, Sizes
from bench.oracle import attend
from bench.runner import Ratio, Run, Table
from flash_mask_cute.lowering.pair import resolve_mods

TOKENS, HIDDEN = 32768, 4096
PEERS, DIRECTIONS = ("ours", "own", "torch"), ("fwd", "bwd")
HOSTED = ("causal", "document_causal", "alibi", "t5_bias")
# Of an output by bf16 against float64 on the same numbers, and of gradients against torch's.
OUT_ERROR, GRADIENT_ERROR = 0.01, 0.03
Calls = dict[str, dict[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Case:
    """kind: "attention", "prep" or "host"."""

    mod: str
    n: int
    d: int = 128
    kind: str = "attention"
    batch: int = 1
    heads: int = 32

    @property
    def name(self) -> str:
        if self.kind != "attention":
            return f"{self.kind}-{self.mod}-n{self.n}"
        return f"flex-{self.mod}-n{self.n}-d{self.d}"


def all_cases() -> list[Case]:
    def at(name: str, n: int, d: int) -> Case:
        return Case(name, n, d, batch=max(1, TOKENS // n), heads=HIDDEN // d)

    found = [at(x.name, 8192, d) for d in (128, 64) for x in NAMED]
    found += [Case(x, 128, 64, "host", heads=8) for x in HOSTED]
    found += [at(x.name, 8192, 128) for x in OTHERS]
    found += [at(x.name, 32768, d) for d in (128, 64) for x in NAMED]
    masked = [x.name for x in NAMED if x.name not in ("alibi", "soft_cap", "t5_bias")]
    return found + [Case(x, n, kind="prep") for n in (8192, 32768) for x in masked]


class Problem:
    """Tensors and calls of one case."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        self.case, entry = case, BY_NAME[case.mod]
        self.made = entry.make(Sizes(case.batch, case.heads, case.n, device))
        shape = case.batch, case.n, case.heads, case.d
        *leaves, self.dout = runner.normal(device, dtype, *[shape] * 4)
        self.q, self.k, self.v = (x.requires_grad_() for x in leaves)
        self.block_mask = None
        if (mask_mod := self.made.mask_mod) is not None:
            batch = case.batch if "b" in entry.by else None
            heads = case.heads if "h" in entry.by else None
            sizes = case.n, case.n
            lists = flash_mask_cute.create_block_mask(mask_mod, batch, heads, *sizes, device)
            mask = torch_flex.BlockMask.from_kv_blocks(*lists[:4], 128, mask_mod, sizes)
            self.block_mask = flash_mask_cute.keep_block_mask(mask)

    def call_of(self, peer: str) -> Callable[[], Any]:
        """Returns out (batch, n, heads, d)."""
        if peer == "own":
            keywords = self.own_keywords()
            return partial(flash_mask_cute.flash_attn_func, self.q, self.k, self.v, **keywords)
        function: Any = flash_mask_cute.flex_attention
        if peer == "torch":
            function = torch_flex.flex_attention
            if self.q.is_cuda:
                torch._dynamo.reset()
                function = torch.compile(function, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        options = {"score_mod": self.made.score_mod, "block_mask": self.block_mask}
        return lambda: function(q, k, v, **options).transpose(1, 2)

    def own_keywords(self) -> dict[str, Any]:
        if self.made.own is not None:
            return self.made.own
        mods = resolve_mods(self.made.score_mod, self.made.mask_mod, None, self.q.device)
        return {**mods._asdict(), "block_sparse_tensors": self.block_mask}

    def check_rows(self, out: Any, count: int = 6) -> float:
        """The largest error of rows of out, as a share of the largest value. Raises ValueError."""
        case, errors = self.case, []
        for i in range(count):
            b, h, q = i % case.batch, (7 * i + 1) % case.heads, (i * 2741 + case.n // 3) % case.n
            expected = self._row(b, h, q)
            error = (out[b, q, h] - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
            errors.append(error.item())
        if not (worst := runner.worst(errors)) < OUT_ERROR:
            raise ValueError(f"rows of O are off by {worst:.3g} of the largest value")
        return worst

    def _row(self, b: int, h: int, q: int) -> Any:
        """A row of O in float64."""
        mask_mod: Any = self.made.mask_mod
        score_mod: Any = self.made.score_mod
        keys = torch.arange(self.case.n, device=self.q.device)
        place = [torch.tensor(x, device=self.q.device) for x in (b, h, q)]
        with torch.no_grad(), TransformGetItemToIndex():
            scores = (self.k[b, :, h].double() @ self.q[b, q, h].double()) * self.case.d**-0.5
            if score_mod is not None:
                scores = torch.vmap(lambda s, k: score_mod(s, *place, k))(scores.float(), keys)
            if mask_mod is not None:
                seen = torch.vmap(lambda k: mask_mod(*place, k))(keys)
                scores = scores.masked_fill(~seen, -torch.inf)
            return attend(scores.double()[None], self.v[b, :, h].double()).out[0]

    def gradients(self, out: Any) -> Callable[[], Any]:
        leaves = [self.q, self.k, self.v, *self.made.trained]
        return partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)


def ready_calls(problem: Problem) -> tuple[Calls, list[str]]:
    """Checked calls by direction and peer, and remarks on others; raises where ours is wrong."""
    # the buffers of a forward are read again by the next backward
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    calls: Calls = {way: {} for way in DIRECTIONS}
    remarks: list[str] = []
    found: dict[str, Any] = {}
    for peer in PEERS:
        what = "torch"
        try:
            call = problem.call_of(peer)
            # without a graph it is another kernel
            alone = torch.no_grad()(call)
            problem.check_rows(alone())
            calls["fwd"][peer], what = alone, "torch's backward"
            problem.check_rows(out := call())
            backward = problem.gradients(out)
            found[peer] = backward()
            calls["bwd"][peer] = backward
        except Exception as error:
            if peer != "torch":
                raise
            remarks.append(runner.left_out(what, error))
    for peer in found.keys() - {"ours"}:
        for leaf, (ours, theirs) in enumerate(zip(found["ours"], found[peer], strict=True)):
            off = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-9))
            if not off < GRADIENT_ERROR:
                raise ValueError(f"gradient {leaf} is off by {off:.3g} from that of {peer}")
    return calls, remarks


def done(run: Run, cases: Sequence[Case]) -> set[str]:
    """Cases that kept rows of this commit hold."""
    kept = runner.rows_in([run.given.out, *run.given.resume])
    return {row["case"] for row in kept if row["commit"] == commit_here()}


def hands(run: Run, cases: Sequence[Case]) -> list[list[Any]]:
    """torch's compiler takes the longer, so it has jobs of its own."""
    named = [case.name for case in cases if case.kind == "attention"]
    jobs = [(name, peers) for name in named for peers in (("torch",), ("ours", "own"))]
    return [jobs[first :: run.given.ahead] for first in range(run.given.ahead)]


def compile_calls(run: Run, job: Any) -> None:
    """What `ready_calls` compiles for these peers."""
    name, peers = job
    (case,) = (case for case in all_cases() if case.name == name)
    problem = Problem(case, run.device, run.dtype)
    for peer in peers:
        call = problem.call_of(peer)
        torch.no_grad()(call)()
        problem.gradients(call())()


def measure(case: Case, run: Run) -> list[Json]:
    if case.kind == "prep":
        return [measure_prep(case)]
    problem = Problem(case, run.device, run.dtype)
    if case.kind == "host":
        return [measure_host(problem)]
    calls, remarks = ready_calls(problem)
    row: Json = {"case": case.name}
    told: Json = {"by_hand": problem.made.own is not None, "note": "; ".join(remarks)}
    if run.is_dry:
        return [row | told]
    of_ways = {way: runner.figures(run.time(calls[way])) for way in DIRECTIONS}
    return [row | {"direction": way} | times | told for way, times in of_ways.items()]


def measure_host(problem: Problem) -> Json:
    """Microseconds of the host, without a graph; the length is short, so that no queue fills."""
    ours, made = problem.call_of("ours"), problem.made
    problem.made = made._replace(own=None)
    calls = {"ours": ours, "own": problem.call_of("own")}
    if problem.block_mask is not None:
        problem.block_mask = copy.copy(problem.block_mask)
        calls["unkept"] = problem.call_of("ours")
    samples = timing.time_host({peer: torch.no_grad()(call) for peer, call in calls.items()})
    row: Json = {"case": problem.case.name}
    return row | {f"{peer}_us": round(timing.median(x), 3) for peer, x in samples.items()}


def measure_prep(case: Case) -> Json:
    """Microseconds of create_block_mask until the device is idle."""
    entry = BY_NAME[case.mod]
    told = entry.make(Sizes(1, 1, case.n, "cuda")).mask_mod, 1 if "b" in entry.by else None
    torch._dynamo.reset()
    makers: dict[str, Any] = {"ours": flash_mask_cute.create_block_mask}
    makers["torch"] = torch.compile(torch_flex.create_block_mask, dynamic=False)
    row: Json = {"case": case.name}
    for peer, make in makers.items():
        call = partial(make, *told, None, case.n, case.n, "cuda")
        row[f"{peer}_us"] = round(timing.median(timing.time_wall(call)), 2)
    return row


def summary(rows: Sequence[Json]) -> Iterator[str]:
    """Geometric means and extremes over the latest row of each case and direction."""
    latest = {(row["case"], row.get("direction", "")): row for row in rows}
    for label, over, under, by_hand in (
        ("torch / ours, attention", "torch_ms", "ours_ms", (True, False)),
        ("ours / own, by hand", "ours_ms", "own_ms", (True,)),
        ("ours / own, host time", "ours_us", "own_us", (None,)),
        ("torch / ours, create_block_mask", "torch_us", "ours_us", (None,)),
    ):
        for way in DIRECTIONS if over.endswith("ms") else ("",):
            ratios = sorted(
                (row[over] / row[under], name)
                for (name, direction), row in latest.items()
                if {over, under} <= row.keys()
                and direction == way
                and row.get("by_hand") in by_hand
            )
            if ratios:
                mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
                (least, where), (most, there) = ratios[0], ratios[-1]
                ends = f"least {least:.3f} ({where}), most {most:.3f} ({there})"
                figures = f"geometric mean {mean:.3f}, {ends}, {len(ratios)} cases"
                yield f"{label}, {way or 'all'}: {figures}"


def small(cases: Sequence[Case]) -> list[Case]:
    """Each mod once."""
    return [Case(x, 256, 16, batch=2, heads=2) for x in dict.fromkeys(case.mod for case in cases)]


TABLE = Table(
    command="bench.flex", about=__doc__, cases=all_cases, measure=measure, small=small,
    rounds=5, burst_s=0.06, seconds=560.0, summary=summary,
    head=lambda run: {"run": run.name, **runner.provenance(run)},
    ratios=tuple(
        Ratio(f"{a} / {b}", (f"{a}_{unit}",), f"{b}_{unit}")
        for unit in ("ms", "us") for a, b in (("torch", "ours"), ("ours", "own"))
    ),
    isolated=runner.Isolated(hands, compile_calls, done),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
