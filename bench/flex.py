"""python -m bench.flex [PATTERN ...]: mods of torch through flex_attention, ours and torch's.

A case is a mod at a length and a head dimension, forward and backward. In one run, in turns:

ours   `flash_mask_cute.flex_attention` with the mod and its block mask, which is kept
own    `flash_attn_func` told the same in its own way: flags, column intervals, a CuTe mod by hand;
       where there is none (`by_hand` false in the row), the lowered mod with the same lists
torch  torch.compile(flex_attention), which compiles to Triton

Beside them `prep-*`, wall time of `create_block_mask`, ours and torch's compiled one, and `host-*`,
host time of a warm forward, flex_attention against flash_attn_func with the same lowered mods;
`unkept_us`: flex_attention with a block mask that is not kept.

Nothing is timed before the results are right: rows of O against float64, gradients against torch's.
A row is a line of JSON in --out; cases of this commit that --out or --resume hold already are left
out. `--ahead` processes compile first, as a case compiles for longer than it is timed. Cases run in
a worker process; when it dies the next one goes on behind the case that killed it. `--dry` computes
every case, small and on the CPU, and times nothing. `--report` prints what rows say, and ends.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from bench import ROOT, Json, commit_here, say, timing, versions, why_no_gpu
from bench.oracle import attend

TOKENS, HIDDEN = 32768, 4096
PEERS = ("ours", "own", "torch")
DIRECTIONS = ("fwd", "bwd")
# Peers that one job compiles ahead; torch's takes the longer.
AHEAD = (("torch",), ("ours", "own"))
HOSTED = ("causal", "document_causal", "alibi", "t5_bias")
# Seconds of a case that is compiled already, and of compiling one.
CASE_S, COMPILE_S = 7.0, 30.0
DIED = 3
# Of an output by bf16 against float64 on the same numbers, and of gradients against torch's.
OUT_ERROR, GRADIENT_ERROR = 0.01, 0.03


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
    """In the order in which they are measured: what the bars ask for first."""
    from bench.flex_mods import NAMED, OTHERS

    def at(name: str, n: int, d: int) -> Case:
        return Case(name, n, d, batch=max(1, TOKENS // n), heads=HIDDEN // d)

    found = [at(x.name, n, d) for n, d in ((8192, 128), (8192, 64)) for x in NAMED]
    found += [Case(x, 128, 64, "host", heads=8) for x in HOSTED]
    found += [at(x.name, 8192, 128) for x in OTHERS]
    found += [at(x.name, 32768, d) for d in (128, 64) for x in NAMED]
    masked = [x.name for x in NAMED if x.name not in ("alibi", "soft_cap", "t5_bias")]
    return found + [Case(x, n, kind="prep") for n in (8192, 32768) for x in masked]


# -- what is called -------------------------------------------------------------------------------


class Problem:
    """Tensors and calls of one case."""

    def __init__(self, case: Case, device: str, dtype: Any) -> None:
        import torch
        from torch.nn.attention.flex_attention import BlockMask

        from bench.flex_mods import BY_NAME, Sizes
        from flash_mask_cute import create_block_mask, keep_block_mask

        self.case = case
        self.entry = BY_NAME[case.mod]
        self.made = self.entry.make(Sizes(case.batch, case.heads, case.n, device))
        generator = torch.Generator(device).manual_seed(0)
        shape = case.batch, case.n, case.heads, case.d
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.block_mask = None
        if self.made.mask_mod is not None:
            batch = case.batch if "b" in self.entry.by else None
            heads = case.heads if "h" in self.entry.by else None
            lists = create_block_mask(self.made.mask_mod, batch, heads, case.n, case.n, device)
            sizes = 128, self.made.mask_mod, (case.n, case.n)
            self.block_mask = keep_block_mask(BlockMask.from_kv_blocks(*lists[:4], *sizes))

    @property
    def leaves(self) -> list[Any]:
        return [self.q, self.k, self.v, *self.made.trained]

    def call_of(self, peer: str) -> Callable[[], Any]:
        """Returns out (batch, n, heads, d)."""
        import torch
        from torch.nn.attention import flex_attention as torch_flex

        import flash_mask_cute

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
        from flash_mask_cute.lowering.pair import resolve_mods

        mods = resolve_mods(self.made.score_mod, self.made.mask_mod, None, self.q.device)
        return {**mods._asdict(), "block_sparse_tensors": self.block_mask}

    def check_rows(self, out: Any, count: int = 6) -> float:
        """The largest error of rows of out, as a share of the largest value. Raises ValueError."""
        case, worst = self.case, 0.0
        for i in range(count):
            b, h, q = i % case.batch, (7 * i + 1) % case.heads, (i * 2741 + case.n // 3) % case.n
            expected = self._row(b, h, q)
            error = (out[b, q, h] - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
            worst = max(worst, error.item())
        if not worst < OUT_ERROR:
            raise ValueError(f"rows of O are off by {worst:.3g} of the largest value")
        return worst

    def _row(self, b: int, h: int, q: int) -> Any:
        """A row of O in float64."""
        import torch
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

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
        import torch

        return partial(torch.autograd.grad, out, self.leaves, self.dout, retain_graph=True)


def ready_calls(problem: Problem) -> tuple[dict[str, dict[str, Callable[[], Any]]], list[str]]:
    """Checked calls by direction and peer, and remarks on peers that are left out. Raises where
    ours is wrong."""
    import torch

    # the buffers of a forward are read again by the next backward
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    calls: dict[str, dict[str, Callable[[], Any]]] = {way: {} for way in DIRECTIONS}
    remarks: list[str] = []
    found: dict[str, Any] = {}
    for peer in PEERS:
        what = "torch"
        try:
            call = problem.call_of(peer)
            # without a graph it is another kernel
            alone = torch.no_grad()(call)
            problem.check_rows(alone())
            calls["fwd"][peer] = alone
            what = "torch's backward"
            out = call()
            problem.check_rows(out)
            backward = problem.gradients(out)
            found[peer] = backward()
            calls["bwd"][peer] = backward
        except Exception as error:
            if peer != "torch":
                raise
            remarks.append(f"{what} left out: {type(error).__name__}: {str(error)[:200]}")
    for peer in found.keys() - {"ours"}:
        for leaf, (ours, theirs) in enumerate(zip(found["ours"], found[peer], strict=True)):
            off = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-9))
            if not off < GRADIENT_ERROR:
                raise ValueError(f"gradient {leaf} is off by {off:.3g} from that of {peer}")
    return calls, remarks


def compile_calls(problem: Problem, peers: Sequence[str]) -> None:
    """What `ready_calls` compiles for these peers, for the caches on disk."""
    import torch

    for peer in peers:
        call = problem.call_of(peer)
        torch.no_grad()(call)()
        problem.gradients(call())()


def measure(case: Case, rounds: int, burst_s: float) -> Iterator[Json]:
    """Rows of one case, without what a run has in common."""
    import torch

    if case.kind == "prep":
        yield measure_prep(case)
        return
    problem = Problem(case, "cuda", torch.bfloat16)
    if case.kind == "host":
        yield measure_host(problem)
        return
    calls, remarks = ready_calls(problem)
    by_hand = problem.made.own is not None
    for way in DIRECTIONS:
        samples = timing.time_loop(calls[way], rounds, burst_s, least=1)
        row: Json = {"case": case.name, "direction": way, "by_hand": by_hand}
        for peer, values in samples.items():
            row[f"{peer}_ms"] = round(timing.median(values), 5)
            row[f"{peer}_spread"] = round(timing.spread(values), 4)
        yield row | {"note": "; ".join(remarks)}


def measure_host(problem: Problem) -> Json:
    """Microseconds of the host, without a graph; the length is short, so that no queue fills."""
    import torch

    ours, made = problem.call_of("ours"), problem.made
    problem.made = made._replace(own=None)
    direct = problem.call_of("own")
    calls = {"ours": torch.no_grad()(ours), "own": torch.no_grad()(direct)}
    if problem.block_mask is not None:
        problem.block_mask = copy.copy(problem.block_mask)
        calls["unkept"] = torch.no_grad()(problem.call_of("ours"))
    samples = timing.time_host(calls)
    row: Json = {"case": problem.case.name}
    return row | {f"{peer}_us": round(timing.median(x), 3) for peer, x in samples.items()}


def measure_prep(case: Case) -> Json:
    """Microseconds of create_block_mask until the device is idle."""
    import torch
    from torch.nn.attention import flex_attention as torch_flex

    from bench.flex_mods import BY_NAME, Sizes
    from flash_mask_cute import create_block_mask

    entry = BY_NAME[case.mod]
    mod: Any = entry.make(Sizes(1, 1, case.n, "cuda")).mask_mod
    torch._dynamo.reset()
    compiled: Any = torch.compile(torch_flex.create_block_mask, dynamic=False)
    batch = 1 if "b" in entry.by else None
    row: Json = {"case": case.name}
    for peer, function in (("ours", create_block_mask), ("torch", compiled)):
        call = partial(function, mod, batch, None, case.n, case.n, "cuda")
        row[f"{peer}_us"] = round(timing.median(timing.time_wall(call)), 2)
    return row


# -- runs -----------------------------------------------------------------------------------------


def rows_in(paths: Sequence[str]) -> list[Json]:
    texts = (Path(path).read_text() for path in paths if Path(path).exists())
    return [json.loads(line) for text in texts for line in text.splitlines()]


def work(names: Sequence[Any], told: argparse.Namespace, is_ahead: bool) -> int:
    """Body of a worker process. names: of cases; of those to be compiled ahead, with the peers."""
    import torch

    common = {
        "run": told.run, "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name(), "commit": commit_here(), "versions": versions(),
    }  # fmt: skip
    cases = {case.name: case for case in all_cases()}
    for given in names:
        name, peers = given if is_ahead else (given, PEERS)
        case = cases[name]
        left = told.deadline - time.time()
        if left < (COMPILE_S if is_ahead else CASE_S):
            return 0
        watchdog = threading.Timer(min(told.limit, left), os._exit, (DIED,))
        watchdog.daemon = True
        watchdog.start()
        rows, note = list[Json](), ""
        try:
            if is_ahead:
                compile_calls(Problem(case, "cuda", torch.bfloat16), peers)
            else:
                say(name)
                for row in measure(case, told.rounds, told.burst):
                    rows.append(row)
                    say(f"    {shown(row)}")
        except Exception as error:
            torch.cuda.synchronize()
            note = f"failed: {type(error).__name__}: {str(error)[:300]}"
        watchdog.cancel()
        if is_ahead:
            continue
        if note:
            say(f"    {note}")
            rows.append({"case": name, "note": note})
        with open(told.out, "a") as file:
            file.writelines(json.dumps(common | row) + "\n" for row in rows)
        torch.cuda.empty_cache()
    return 0


def shown(row: Json) -> str:
    parts = [row.get("direction", "")]
    for unit in ("ms", "us"):
        parts += [f"{p} {row[f'{p}_{unit}']}" for p in PEERS if f"{p}_{unit}" in row]
        if f"torch_{unit}" in row:
            parts.append(f"torch / ours {row[f'torch_{unit}'] / row[f'ours_{unit}']:.2f}")
        if f"own_{unit}" in row:
            parts.append(f"ours / own {row[f'ours_{unit}'] / row[f'own_{unit}']:.3f}")
    return "  ".join((*parts, row.get("note", "")))


def child(
    names: Sequence[Any], told: argparse.Namespace, is_ahead: bool
) -> subprocess.Popen[bytes]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({**vars(told), "names": list(names), "is_ahead": is_ahead}, file)
    command = [sys.executable, "-m", "bench.flex", "--worker", file.name]
    return subprocess.Popen(command, cwd=ROOT)


def run(told: argparse.Namespace) -> int:
    if (reason := why_no_gpu("bench.flex")) is not None:
        say(reason)
        return 2
    told.run, told.deadline = f"{time.time():.0f}", time.time() + told.seconds
    commit = commit_here()
    known = [row for row in rows_in([told.out, *told.resume]) if row["commit"] == commit]
    done = {row["case"] for row in known}
    wanted = [case for case in all_cases() if is_wanted(case.name, told.patterns)]
    left = [case for case in wanted if case.name not in done]
    say(f"{len(left)} of {len(wanted)} cases are left")
    if told.ahead:
        reach = max(1, int((told.seconds - 100) / (CASE_S + COMPILE_S / told.ahead)))
        names = [case.name for case in left[:reach] if case.kind == "attention"]
        begin = time.time()
        jobs = [(name, peers) for name in names for peers in AHEAD]
        shares = [jobs[i :: told.ahead] for i in range(told.ahead)]
        compilers = [child(share, told, True) for share in shares if share]
        for process in compilers:
            process.wait()
        say(f"compiled {len(names)} cases ahead in {time.time() - begin:.0f} s")
    while left and time.time() + CASE_S < told.deadline:
        child([case.name for case in left], told, False).wait()
        finished = {row["case"] for row in rows_in([told.out])}
        before = len(left)
        left = [case for case in left if case.name not in finished]
        if len(left) == before:
            if time.time() + CASE_S >= told.deadline:
                break
            note = f"failed: a crash, or longer than {told.limit:.0f} s"
            say(f"{left[0].name} {note}")
            with open(told.out, "a") as file:
                row = {"case": left[0].name, "note": note, "commit": commit, "run": told.run}
                file.write(json.dumps(row) + "\n")
            left = left[1:]
    report(rows_in([*told.resume, told.out]))
    say(f"{len(left)} cases are left")
    return 0


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def report(rows: Sequence[Json]) -> None:
    """The latest row of each case and direction, geometric means and least ratios."""
    latest = {(row["case"], row.get("direction", "")): row for row in rows}
    for (name, _), row in sorted(latest.items()):
        say(f"{name:36} {shown(row)}")
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
                say(f"{label}, {way or 'all'}: {figures}")


def dry(patterns: Sequence[str]) -> int:
    """Every mod once on the CPU, forward and backward, float32; the errors of rows."""
    import torch

    from bench.flex_mods import BY_NAME

    failed = 0
    for name in BY_NAME:
        case = Case(name, 256, 16, batch=2, heads=2)
        if not is_wanted(case.name, patterns):
            continue
        begin, told = time.time(), ""
        try:
            problem = Problem(case, "cpu", torch.float32)
            for peer in ("ours", "own"):
                out = problem.call_of(peer)()
                told += f"{peer} {problem.check_rows(out):.1e}, "
                assert all(x.isfinite().all() for x in problem.gradients(out)())
            problem.q, problem.k, problem.v = (
                x.detach() for x in (problem.q, problem.k, problem.v)
            )
            try:
                told += f"torch's {problem.check_rows(problem.call_of('torch')().detach()):.1e}"
            except Exception as error:
                told += f"torch's none ({type(error).__name__})"
        except Exception as error:
            failed += 1
            told = f"failed: {type(error).__name__}: {error}"
        say(f"{name:24} {told}, {time.time() - begin:.1f} s")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("patterns", nargs="*", help="names of cases")
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "flex.jsonl"))
    parser.add_argument("--resume", nargs="*", default=[], help="files of rows that are there")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a case")
    parser.add_argument("--ahead", type=int, default=min(14, max(1, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.06, help="seconds of a peer's turn")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.worker:
        given = json.loads(Path(told.worker).read_text())
        names, is_ahead = given.pop("names"), given.pop("is_ahead")
        return work(names, argparse.Namespace(**given), is_ahead)
    if told.list:
        say("\n".join(case.name for case in all_cases() if is_wanted(case.name, told.patterns)))
        return 0
    if told.dry:
        return dry(told.patterns)
    if told.report:
        report(rows_in([*told.resume, told.out]))
        return 0
    return run(told)


if __name__ == "__main__":
    sys.exit(main())
