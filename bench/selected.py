"""python -m bench.selected: attention over blocks that each query chose, beside dense and fla.

    python -m bench.selected                                 every case that fits --budget
    python -m bench.selected --cases msa-32k,decode --out FILE
    python -m bench.selected --dry                           on a CPU: choices, references, counts

A choice of a case has the first block, the query's own, and the best k - 2 by scores that each
block draws along the tokens, s = r s + sqrt(1 - r^2) noise. "shared" is the part of a query's
blocks that the next query has, too; "union" the blocks in a tile of 128 rows. Useful work is 4 d a
visible score forward, 10 d backward. Results are compared with fp32 before they are timed: rows of
the case itself forward, gradients of the first 2048 tokens. Peers take turns burst by burst.

Decoding is of CUDA-graph replay over copies of the cache, so that nothing is found in L2; "percent"
is of a stream that only reads the chosen bytes.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import Json, say, timing, why_no_gpu
from bench.decode import FOOTPRINT, Run, measure_ceiling, timed_us
from bench.oracle import attend
from flash_mask_cute import SelectedBlocks, flash_attn_func, flash_attn_with_kvcache

COMMAND = "bench.selected"
TILE_ROWS = 128
ROUNDS, BURST_S = 5, 0.1
# of the largest number of a result: bf16 rounds to 2^-9, gradients are sums of rounded numbers
ALLOWED = 2e-2
CHECKED_ROWS, CHECKED_TOKENS = 64, 2048
# tokens whose scores are in memory at once
CHUNK = 1024


class Case(NamedTuple):
    """One sequence of n tokens with a causal mask, or, with `batch`, queries behind caches."""

    name: str
    n: int
    heads: tuple[int, int] = (64, 4)
    block: int = 128
    k: int = 16
    r: float = 0.99
    batch: int = 0
    queries: int = 1
    page: int = 0

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]


D = 128
CASES = (
    Case("msa-32k", 32768),
    Case("msa-32k-less", 32768, r=0.97),
    Case("msa-32k-random", 32768, r=0.3),
    Case("nsa-32k", 32768, block=64),
    Case("group8", 32768, (64, 8)),
    Case("group4", 32768, (32, 8)),
    Case("moba", 32768, (32, 32), block=512, k=4),
    Case("all", 16384, k=128),
    Case("msa-128k", 131072),
    Case("msa-128k-less", 131072, r=0.97),
    Case("decode-64x32k", 32768, batch=64, page=128),
    Case("decode-64x32k-pages16", 32768, batch=64, page=16),
    Case("decode-1x131072", 131072, batch=1, page=128),
    Case("decode-4-queries", 32768, batch=64, queries=4, page=128),
)


# -- choices ------------------------------------------------------------------------------------


def scores(tokens: int, columns: tuple[int, ...], r: float, device: str) -> Iterator[Tensor]:
    """Of all tokens, (CHUNK, *columns) a time: s = r s + sqrt(1 - r^2) noise."""
    torch.manual_seed(0)
    state = torch.randn(columns, device=device)
    for first in range(0, tokens, CHUNK):
        part = torch.randn(min(CHUNK, tokens - first), *columns, device=device)
        part *= math.sqrt(1 - r * r)
        for row in part:
            state = row.add_(state, alpha=r)
        state = state.clone()
        yield part


def choose(case: Case, tokens: int, device: str, first_token: int = 0) -> Tensor:
    """(1, heads_kv, tokens, k) int32: chosen numbers in front, -1 behind them."""
    heads, blocks = case.heads[1], -(-case.n // case.block)
    chosen, at = [], first_token
    for part in scores(tokens, (heads, blocks), case.r, device):
        own = (torch.arange(at, at + len(part), device=device) // case.block)[:, None, None]
        number = torch.arange(blocks, device=device)
        part = part.masked_fill((number >= own) | (number == 0), -math.inf)
        best = part.topk(min(case.k, blocks) - 2, -1)
        numbers = torch.where(best.values.isfinite(), best.indices, -1)
        ends = [torch.zeros_like(own), torch.where(own > 0, own, -1)]
        ends = [x.expand(-1, heads, 1) for x in ends]
        both = torch.cat([*ends, numbers], -1)
        chosen.append(both.sort(-1, descending=True).values.int())
        at += len(part)
    return torch.cat(chosen).transpose(0, 1)[None].contiguous()


class Counts(NamedTuple):
    """shared: of a query's blocks, the part that the next query has. union: blocks in a tile of
    TILE_ROWS rows. visible: scores of one query head."""

    shared: float
    union: float
    visible: float


def count(case: Case, choice: Tensor) -> Counts:
    heads, tokens = choice.shape[1:3]
    blocks = -(-case.n // case.block)
    of_tile = max(1, TILE_ROWS // case.group)
    shared = union = visible = 0.0
    for head in range(heads):
        numbers = choice[0, head].long()
        has = torch.zeros(tokens, blocks + 1, dtype=torch.bool, device=choice.device)
        has.scatter_(1, torch.where(numbers < 0, blocks, numbers), True)
        has = has[:, :blocks]
        shared += ((has[:-1] & has[1:]).sum(1) / has[:-1].sum(1)).mean().item() / heads
        tiles = has[: tokens // of_tile * of_tile].unflatten(0, (-1, of_tile)).any(1)
        union += tiles.sum(1).float().mean().item() / heads
        ends = torch.arange(tokens, device=choice.device)[:, None] + 1
        seen = (ends - numbers * case.block).clamp(0, case.block).masked_fill(numbers < 0, 0)
        visible += seen.sum().item() / heads
    return Counts(shared, union, visible)


# -- one sequence -------------------------------------------------------------------------------


class Given(NamedTuple):
    """q, k, v and the gradient of the output (1, tokens, heads, D), and a choice."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    chosen: SelectedBlocks

    @staticmethod
    def of(case: Case, device: str) -> Given:
        torch.manual_seed(1)
        q, k, v, dout = (
            torch.randn(1, case.n, h, D, device=device, dtype=torch.bfloat16)
            for h in (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
        )
        chosen = SelectedBlocks(choose(case, case.n, device), case.block)
        return Given(q, k, v, dout, chosen)

    def first(self, tokens: int) -> Given:
        q, k, v, dout = (x[:, :tokens] for x in (self.q, self.k, self.v, self.dout))
        numbers = self.chosen.indices[:, :, :tokens].contiguous()
        return Given(q, k, v, dout, self.chosen._replace(indices=numbers))

    def trained(self) -> tuple[Given, tuple[Tensor, ...]]:
        """The same with q, k and v that want gradients, and these."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v), (q, k, v)

    def seen(self, rows: Tensor) -> Tensor:
        """(heads_kv, rows, tokens): what these queries see."""
        numbers = self.chosen.indices[0, :, rows].long()
        keys = torch.arange(self.k.shape[1], device=rows.device)
        blocks = torch.zeros(
            *numbers.shape[:2], len(keys) // self.chosen.block_size + 2, device=rows.device
        ).bool()
        blocks.scatter_(2, torch.where(numbers < 0, blocks.shape[2] - 1, numbers), True)
        return blocks[:, :, keys // self.chosen.block_size] & (keys <= rows[:, None])


Attend = Callable[[Given], Tensor]


def ours(given: Given, **more: Any) -> Tensor:
    out = flash_attn_func(
        given.q, given.k, given.v, causal=True, block_sparse_tensors=given.chosen, **more
    )
    assert isinstance(out, Tensor)
    return out


def dense(given: Given) -> Tensor:
    out = flash_attn_func(given.q, given.k, given.v, causal=True)
    assert isinstance(out, Tensor)
    return out


def fla(given: Given) -> Tensor:
    # not parallel_nsa, which pools keys and values first
    from fla.ops.nsa.parallel import ParallelNSAFunction

    numbers = given.chosen.indices.transpose(1, 2).long().contiguous()
    counts, size = (numbers >= 0).sum(-1), given.chosen.block_size
    out: Tensor = ParallelNSAFunction.apply(
        given.q, given.k, given.v, numbers, counts, size, D**-0.5, None
    )
    return out


PEERS: dict[str, Attend] = {
    "ours": ours,
    "ours_deterministic": functools.partial(ours, deterministic=True),
    "dense": dense,
    "fla": fla,
}


def error_of_rows(given: Given, out: Tensor) -> float:
    """Of CHECKED_ROWS queries of the first KV head's group, relative to the largest element."""
    n, group = out.shape[1], out.shape[2] // given.k.shape[2]
    rows = torch.linspace(0, n - 1, CHECKED_ROWS, device=out.device).long()
    q, k, v = given.q[0, rows, :group].float(), given.k[0, :, 0].float(), given.v[0, :, 0].float()
    numbers = torch.einsum("rgd,kd->rgk", q, k) * D**-0.5
    numbers = numbers.masked_fill(~given.seen(rows)[0][:, None], -math.inf)
    wanted = attend(numbers.flatten(0, 1), v, None).out.view(q.shape)
    return ((out[0, rows, :group].float() - wanted).abs().max() / wanted.abs().max()).item()


def gradients(function: Attend, given: Given) -> tuple[Tensor, ...]:
    trained, leaves = given.trained()
    return torch.autograd.grad(function(trained), leaves, given.dout)


def error_of_gradients(function: Attend, given: Given) -> float:
    """The largest of dq, dk and dv, each relative to its largest element, over few tokens."""
    few = given.first(min(CHECKED_TOKENS, given.q.shape[1]))
    seen = few.seen(torch.arange(few.q.shape[1], device=few.q.device))

    def plainly(x: Given) -> Tensor:
        group = x.q.shape[2] // x.k.shape[2]
        q, k, v = (t[0].transpose(0, 1).float() for t in (x.q, x.k, x.v))
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        masks = seen.repeat_interleave(group, 0)
        weights = (q @ k.mT * D**-0.5).masked_fill(~masks, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)[None].to(x.q.dtype)

    pairs = zip(gradients(function, few), gradients(plainly, few), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def of_sequence(case: Case, run: Run, peers: Sequence[str]) -> None:
    given = Given.of(case, run.device)
    counts = count(case, given.chosen.indices)
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "backward": {}}
    errors: dict[str, Json] = {}
    for peer in peers:
        function, row = PEERS[peer], {"case": case.name, "peer": peer}
        try:
            with torch.no_grad():
                out = function(given)
            found: Json = {}
            if peer != "dense":
                found["error"] = error_of_rows(given, out)
                found["gradient_error"] = error_of_gradients(function, given)
            trained, leaves = given.trained()
            out = function(trained)
        except Exception as refused:
            run.log(kind="refused", **row, why=f"{type(refused).__name__}: {str(refused)[:200]}")
            continue
        errors[peer] = found
        if any(x > ALLOWED for x in found.values()):
            run.log(kind="wrong", **row, **found)
            continue

        def forward(function: Attend = function) -> None:
            with torch.no_grad():
                function(given)

        def backward(out: Tensor = out, leaves: tuple[Tensor, ...] = leaves) -> None:
            torch.autograd.grad(out, leaves, given.dout, retain_graph=True)

        calls["forward"][peer], calls["backward"][peer] = forward, backward
    for direction, contenders in calls.items():
        flops = (4 if direction == "forward" else 10) * D * counts.visible * case.heads[0]
        samples = timing.time_loop(contenders, 0 if run.is_dry else ROUNDS, BURST_S, 2)
        for peer, of_rounds in samples.items():
            ms = timing.median(of_rounds) if of_rounds else math.nan
            run.log(
                kind=direction, case=case.name, peer=peer, n=case.n, heads=case.heads,
                block=case.block, k=case.k, **counts._asdict(), ms=ms, useful=flops / ms / 1e9,
                **errors[peer],
            )  # fmt: skip


# -- decoding -----------------------------------------------------------------------------------


def of_caches(case: Case, run: Run) -> None:
    heads_q, heads_kv = case.heads
    pages = case.n // case.page
    size = 2 * case.batch * case.n * heads_kv * D * 2
    copies = 2 if run.is_dry else max(1, math.ceil(FOOTPRINT / size))
    normal = functools.partial(torch.randn, device=run.device, dtype=torch.bfloat16)
    q = normal(case.batch, case.queries, heads_q, D)
    caches = [
        tuple(normal(case.batch * pages, case.page, heads_kv, D) for _ in "kv")
        for _ in range(copies)
    ]
    table = torch.randperm(case.batch * pages, device=run.device).int().view(case.batch, pages)
    lengths = torch.full((case.batch,), case.n, dtype=torch.int32, device=run.device)
    first = case.n - case.queries * case.batch
    choice = choose(case, case.queries * case.batch, run.device, first)[0]
    # a sequence's queries are neighbours
    choice = choice.unflatten(1, (case.batch, case.queries)).transpose(0, 1).contiguous()
    own = (case.n - 1) // case.block
    choice = torch.where(choice == choice.amax(-1, keepdim=True), own, choice)
    chosen = SelectedBlocks(choice, case.block)

    def call(k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True,
            block_sparse_tensors=chosen,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    out = call(*caches[0])
    k, v = (x[table[0].long(), :, 0].flatten(0, 1) for x in caches[0])
    last = Given(q[:1], k[None, :, None], v[None, :, None], q[:1], SelectedBlocks(choice[:1], 0))
    error = error_of_cache(case, last, out[0])
    of_blocks = torch.zeros(case.batch, heads_kv, own + 2, device=run.device)
    of_blocks.scatter_(2, torch.where(choice < 0, own + 1, choice).flatten(2).long(), 1.0)
    read = of_blocks[..., : own + 1].sum().item() * case.block * D * 4
    us = timed_us([functools.partial(call, *pair) for pair in caches], run.device)
    percent = {"percent": 100 * read / us / run.ceiling["read"]} if run.ceiling else {}
    run.log(
        kind="decode", case=case.name, peer="ours", page=case.page, queries=case.queries,
        us=us, mb=read / 1e6, **percent, error=error,
    )  # fmt: skip


def error_of_cache(case: Case, first: Given, out: Tensor) -> float:
    """Of the first sequence's first group, relative to the largest element."""
    k, v, numbers = first.k[0, :, 0].float(), first.v[0, :, 0].float(), first.chosen.indices[0, 0]
    q = first.q[0, :, : case.group].float()
    keys = torch.arange(len(k), device=k.device)
    seen = (keys // case.block == numbers[:, :, None]).any(1)
    seen &= keys <= torch.arange(len(k) - len(q), len(k), device=k.device)[:, None]
    values = (torch.einsum("qgd,kd->qgk", q, k) * D**-0.5).masked_fill(~seen[:, None], -math.inf)
    wanted = attend(values.flatten(0, 1), v, None).out.view(q.shape)
    return ((out[:, : case.group].float() - wanted).abs().max() / wanted.abs().max()).item()


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="", help="names or beginnings of names, with commas")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--out", type=Path, help="a file that rows are appended to")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without speed")
    given = parser.parse_args()
    if not given.dry and (refusal := why_no_gpu(COMMAND)):
        say(refusal)
        return 2
    run = Run("cpu" if given.dry else "cuda", time.time() + given.budget, given.out, [], {})
    names = tuple(given.cases.split(",")) if given.cases else ("",)
    cases = [case for case in CASES if case.name.startswith(names)]
    if given.dry:
        cases = [
            case._replace(
                n=512, heads=(case.group, 1), block=32, k=min(case.k, 6),
                batch=min(case.batch, 2), page=min(case.page, 32),
            )
            for case in cases
        ]  # fmt: skip
    else:
        measure_ceiling(run)
    for case in cases:
        if run.left() < 10:
            run.log(kind="left", case=case.name)
            continue
        if case.batch:
            of_caches(case, run)
        else:
            of_sequence(case, run, given.peers.split(","))
    return 1 if any(row["kind"] == "wrong" for row in run.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
