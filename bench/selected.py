"""python -m bench.selected: attention over blocks that each query chose, beside dense and fla.

    python -m bench.selected                                 every case that fits --seconds
    python -m bench.selected 'msa-32k*' 'decode-*' --out FILE
    python -m bench.selected 'train-*'                       a training step, with its parts
    python -m bench.selected --dry                           on a CPU: selections, references,
    counts

A selection of a case has the first block, the query's own, and the best k - 2 by scores that each
block draws along the tokens, s = r s + sqrt(1 - r^2) noise. "shared" is the part of a query's
blocks that the next query has, too; "union" the blocks in a tile of 128 rows. Useful work is 4 d a
visible score forward, 10 d backward. Results are compared with fp32 before they are timed: rows of
the case itself forward, gradients of the first 2048 tokens. Peers take turns burst by burst.

A training step of "train-*" is that of one layer and its indexer: dense attention for LSE, the
teacher from it, the indexer's scores, loss, gradients and choice in plain torch, and attention on
the choice, forward and backward. Indexers score blocks by one key for each, and their queries go
along the tokens as scores above. The dense step is a dense forward and backward.

Decoding is of CUDA-graph replay over copies of the cache, so that nothing is found in L2; "percent"
is of a stream that only reads the chosen bytes.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import Json, runner, timing
from bench.decode import ceiling_row
from bench.oracle import attend
from bench.runner import Run, Table
from flash_mask_cute import (
    SelectedBlocks,
    attention_statistics,
    flash_attn_func,
    flash_attn_with_kvcache,
)

TILE_ROWS = 128
# of the largest number of a result: bf16 rounds to 2^-9, gradients are sums of rounded numbers
ALLOWED = 2e-2
CHECKED_ROWS, CHECKED_TOKENS = 64, 2048
# of selections that share 0.8 of their blocks with the next query
QSA_R = 0.95
# tokens whose scores are in memory at once
CHUNK = 1024


class Case(NamedTuple):
    """One sequence of n tokens with a causal mask, or, with `batch`, queries behind caches. trains:
    a training step of the sequence."""

    name: str
    n: int
    heads: tuple[int, int] = (64, 4)
    block: int = 128
    k: int = 16
    r: float = 0.99
    batch: int = 0
    queries: int = 1
    page: int = 0
    d: int = 128
    fp8: bool = False
    trains: bool = False

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]


CASES = (
    Case("msa-32k", 32768),
    Case("train-msa-32k", 32768, trains=True),
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
    Case("decode-64x32k-fp8", 32768, batch=64, page=128, fp8=True),
    Case("prefill-32k", 32768, batch=1, queries=32768, page=128),
    Case("prefill-32k-fp8", 32768, batch=1, queries=32768, page=128, fp8=True),
    Case("qsa-32k", 32768, (32, 2), block=4, k=256, r=QSA_R, d=256),
    Case("qsa-32k-blocks8", 32768, (32, 2), block=8, k=128, r=QSA_R, d=256),
    Case("decode-qsa", 32768, (32, 2), block=4, k=256, r=QSA_R, batch=64, page=64, d=256),
    Case("decode-qsa-blocks8", 32768, (32, 2), block=8, k=128, r=QSA_R, batch=64, page=64, d=256),
)


# -- selections ------------------------------------------------------------------------------------


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


def count(case: Case, selection: Tensor) -> Counts:
    heads, tokens = selection.shape[1:3]
    blocks = -(-case.n // case.block)
    of_tile = max(1, TILE_ROWS // case.group)
    shared = union = visible = 0.0
    for head in range(heads):
        numbers = selection[0, head].long()
        has = torch.zeros(tokens, blocks + 1, dtype=torch.bool, device=selection.device)
        has.scatter_(1, torch.where(numbers < 0, blocks, numbers), True)
        has = has[:, :blocks]
        shared += ((has[:-1] & has[1:]).sum(1) / has[:-1].sum(1)).mean().item() / heads
        tiles = has[: tokens // of_tile * of_tile].unflatten(0, (-1, of_tile)).any(1)
        union += tiles.sum(1).float().mean().item() / heads
        ends = torch.arange(tokens, device=selection.device)[:, None] + 1
        seen = (ends - numbers * case.block).clamp(0, case.block).masked_fill(numbers < 0, 0)
        visible += seen.sum().item() / heads
    return Counts(shared, union, visible)


# -- one sequence -------------------------------------------------------------------------------


class Given(NamedTuple):
    """q, k, v and the gradient of the output (1, tokens, heads, d), and a selection."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    chosen: SelectedBlocks

    @staticmethod
    def of(case: Case, device: str) -> Given:
        heads = case.heads[0], case.heads[1], case.heads[1], case.heads[0]
        shapes = [(1, case.n, h, case.d) for h in heads]
        q, k, v, dout = runner.normal(device, torch.bfloat16, *shapes, seed=1)
        return Given(q, k, v, dout, SelectedBlocks(choose(case, case.n, device), case.block))

    def first(self, tokens: int) -> Given:
        numbers = self.chosen.indices[:, :, :tokens].contiguous()
        q, k, v, dout = (x[:, :tokens] for x in (self.q, self.k, self.v, self.dout))
        return Given(q, k, v, dout, self.chosen._replace(indices=numbers))

    def seen(self, rows: Tensor) -> Tensor:
        """(heads_kv, rows, tokens): what these queries see."""
        size, numbers = self.chosen.block_size, self.chosen.indices[0, :, rows].long()
        keys = torch.arange(self.k.shape[1], device=rows.device)
        blocks = torch.zeros(*numbers.shape[:2], len(keys) // size + 2, device=rows.device).bool()
        blocks.scatter_(2, torch.where(numbers < 0, blocks.shape[2] - 1, numbers), True)
        return blocks[:, :, keys // size] & (keys <= rows[:, None])

    def calls(self, peer: str) -> tuple[runner.Call, runner.Call, runner.Call]:
        """A forward, a backward, and both."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        attention = functools.partial(PEERS[peer], chosen=self.chosen)
        return runner.calls_of(attention, leaves, leaves, self.dout)


def ours(q: Tensor, k: Tensor, v: Tensor, chosen: SelectedBlocks, **more: Any) -> Any:
    return flash_attn_func(q, k, v, causal=True, block_sparse_tensors=chosen, **more)


def dense(q: Tensor, k: Tensor, v: Tensor, chosen: SelectedBlocks) -> Any:
    return flash_attn_func(q, k, v, causal=True)


def fla(q: Tensor, k: Tensor, v: Tensor, chosen: SelectedBlocks) -> Any:
    # not parallel_nsa, which pools keys and values first
    from fla.ops.nsa.parallel import ParallelNSAFunction

    numbers = chosen.indices.transpose(1, 2).long().contiguous()
    counts, size = (numbers >= 0).sum(-1), chosen.block_size
    return ParallelNSAFunction.apply(q, k, v, numbers, counts, size, q.shape[-1] ** -0.5, None)


PEERS: dict[str, Callable[..., Any]] = {
    "ours": ours,
    "ours_deterministic": functools.partial(ours, deterministic=True),
    "dense": dense,
    "fla": fla,
}


def error_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, out: Tensor) -> float:
    """Of rows q (rows, group, d) of one KV head in fp32, which see (rows, keys)."""
    q, k, v = (x.float() for x in (q, k, v))
    numbers = torch.einsum("rgd,kd->rgk", q, k) * q.shape[-1] ** -0.5
    numbers = numbers.masked_fill(~seen[:, None], -math.inf)
    wanted = attend(numbers.flatten(0, 1), v, None).out.view(q.shape)
    return runner.share_off(out.float(), wanted)


def error_of_rows(given: Given, out: Tensor) -> float:
    """Of CHECKED_ROWS queries of the first KV head's group."""
    n, group = out.shape[1], out.shape[2] // given.k.shape[2]
    rows = torch.linspace(0, n - 1, CHECKED_ROWS, device=out.device).long()
    heads = given.q[0, rows, :group], given.k[0, :, 0], given.v[0, :, 0]
    return error_of(*heads, given.seen(rows)[0], out[0, rows, :group])


def error_of_gradients(peer: str, given: Given) -> float:
    """The largest of dq, dk and dv, over few tokens."""
    few = given.first(min(CHECKED_TOKENS, given.q.shape[1]))
    group = few.q.shape[2] // few.k.shape[2]
    seen = few.seen(torch.arange(few.q.shape[1], device=few.q.device))
    masks = seen.repeat_interleave(group, 0)

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1).float() for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~masks, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)[None].to(few.q.dtype)

    leaves = [x.detach().requires_grad_() for x in (few.q, few.k, few.v)]
    expected = torch.autograd.grad(plainly(*leaves), leaves, few.dout)
    return runner.worst(map(runner.share_off, few.calls(peer)[1](), expected))


def of_sequence(case: Case, run: Run) -> Iterator[Json]:
    given = Given.of(case, run.device)
    counts = count(case, given.chosen.indices)
    calls: dict[str, dict[str, runner.Call]] = {"forward": {}, "backward": {}}
    errors: dict[str, Json] = {}
    for peer in run.peers:
        row: Json = {"case": case.name, "peer": peer}
        try:
            forward, backward, _ = given.calls(peer)
            out, found = forward(), Json()
            if peer != "dense":
                found = {"error": error_of_rows(given, out)}
                found["gradient_error"] = error_of_gradients(peer, given)
            backward()
        except Exception as refused:
            why = f"{type(refused).__name__}: {str(refused)[:200]}"
            yield {"kind": "refused", **row, "why": why}
            continue
        errors[peer] = found
        if not all(x <= ALLOWED for x in found.values()):
            yield {"kind": "wrong", **row, **found}
            continue
        calls["forward"][peer], calls["backward"][peer] = forward, backward
    for direction, contenders in calls.items():
        flops = (4 if direction == "forward" else 10) * case.d * counts.visible * case.heads[0]
        for peer, of_rounds in run.time(contenders, 2).items():
            ms = timing.median(of_rounds) if of_rounds else math.nan
            yield {
                "kind": direction, "case": case.name, "peer": peer, "n": case.n,
                "heads": case.heads, "block": case.block, "k": case.k, **counts._asdict(),
                "ms": ms, "useful": flops / ms / 1e9, **errors[peer],
            }  # fmt: skip


# -- a training step ----------------------------------------------------------------------------


class Step(NamedTuple):
    """A training step of one layer and its indexer, of index_q (tokens, heads_kv, d) and index_k
    (blocks, heads_kv, d)."""

    given: Given
    index_q: Tensor
    index_k: Tensor
    case: Case

    @staticmethod
    def of(case: Case, device: str) -> Step:
        shape = -(-case.n // case.block), case.heads[1], case.d
        index_q = torch.cat(list(scores(case.n, shape[1:], case.r, device))).to(torch.bfloat16)
        (index_k,) = runner.normal(device, torch.bfloat16, shape, seed=2)
        step = Step(Given.of(case, device), index_q, index_k, case)
        target = step.teacher(step.lse())
        return step._replace(given=step.given._replace(chosen=step.indexer(target).chosen))

    def lse(self) -> Tensor:
        _, lse = flash_attn_func(*self.given[:3], causal=True, return_lse=True)
        return lse

    def teacher(self, lse: Tensor) -> Tensor:
        """The share of each block, (heads_kv, tokens, blocks)."""
        size = 1, self.case.block
        found = attention_statistics(
            *self.given[:2], lse, "block_sums", block_size=size, causal=True
        )
        assert found.block_sums is not None
        return found.block_sums[0] / self.case.group

    def indexer(self, target: Tensor) -> Indexed:
        leaves = [x.detach().requires_grad_() for x in (self.index_q, self.index_k)]
        numbers = torch.einsum("qhd,nhd->hqn", *leaves).float() * self.case.d**-0.5
        block = torch.arange(len(self.index_k), device=numbers.device)
        own = torch.arange(self.case.n, device=numbers.device)[:, None] // self.case.block
        shares = numbers.masked_fill(block > own, -math.inf).log_softmax(-1)
        # 0 times -inf where a block is hidden
        lesson = -(target * shares.clamp(min=-1e4)).sum(-1).mean()
        gradients = torch.autograd.grad(lesson, leaves)
        ranked = shares.detach().masked_fill((block == own) | (block == 0), math.inf)
        best = ranked.topk(min(self.case.k, len(block)), -1)
        chosen = torch.where(best.values > -math.inf, best.indices, -1).int()
        return Indexed(SelectedBlocks(chosen[None], self.case.block), gradients)

    def run(self) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and of the indexer."""
        found = self.indexer(self.teacher(self.lse()))
        given = self.given._replace(chosen=found.chosen)
        return *given.calls("ours")[2]()[1:], *found.gradients

    def parts(self) -> dict[str, runner.Call]:
        lse = self.lse()
        target = self.teacher(lse)
        forward, backward, _ = self.given.calls("ours")
        return {
            "lse": self.lse, "teacher": lambda: self.teacher(lse),
            "indexer": lambda: self.indexer(target), "forward": forward, "backward": backward,
            "step": self.run, "dense_step": self.given.calls("dense")[2],
        }  # fmt: skip

    def error_of_teacher(self) -> float:
        """Of CHECKED_ROWS queries of the first KV head's group, in fp32."""
        q, k = self.given.q, self.given.k
        rows = torch.linspace(0, self.case.n - 1, CHECKED_ROWS, device=q.device).long()
        numbers = torch.einsum(
            "rgd,kd->grk", q[0, rows, : self.case.group].float(), k[0, :, 0].float()
        )
        later = torch.arange(self.case.n, device=q.device) > rows[:, None]
        weights = (numbers * self.case.d**-0.5).masked_fill(later, -math.inf).softmax(-1).mean(0)
        wanted = torch.stack([x.sum(-1) for x in weights.split(self.case.block, -1)], -1)
        return runner.share_off(self.teacher(self.lse())[0, rows], wanted)


class Indexed(NamedTuple):
    """What an indexer chose, and the gradients of its queries and keys."""

    chosen: SelectedBlocks
    gradients: tuple[Tensor, ...]


def of_step(case: Case, run: Run) -> Iterator[Json]:
    step = Step.of(case, run.device)
    given = step.given
    errors = {
        "error": error_of_rows(given, given.calls("ours")[0]()),
        "gradient_error": error_of_gradients("ours", given),
        "teacher_error": step.error_of_teacher(),
    }
    if not all(x <= ALLOWED for x in errors.values()):
        yield {"kind": "wrong", "case": case.name, "peer": "ours", **errors}
        return
    step.run()
    times = {f"{x}_ms": timing.median(ms) for x, ms in run.time(step.parts(), 2).items() if ms}
    counts = count(case, given.chosen.indices)
    yield {"kind": "step", "case": case.name, **counts._asdict(), **times, **errors}


# -- decoding -----------------------------------------------------------------------------------


def of_caches(case: Case, run: Run) -> Iterator[Json]:
    heads_q, heads_kv = case.heads
    pages = case.n // case.page
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    size = 2 * case.batch * case.n * heads_kv * case.d * dtype.itemsize
    copies = 2 if run.is_dry else timing.copies_of(size)
    normal = functools.partial(torch.randn, device=run.device, dtype=torch.bfloat16)
    q = normal(case.batch, case.queries, heads_q, case.d)
    caches = [
        [normal(case.batch * pages, case.page, heads_kv, case.d).to(dtype) for _ in "kv"]
        for _ in range(copies)
    ]
    table = torch.randperm(case.batch * pages, device=run.device).int().view(case.batch, pages)
    lengths = torch.full((case.batch,), case.n, dtype=torch.int32, device=run.device)
    first = case.n - case.queries * case.batch
    selection = choose(case, case.queries * case.batch, run.device, first)[0]
    # a sequence's queries are neighbours
    selection = selection.unflatten(1, (case.batch, case.queries)).transpose(0, 1).contiguous()
    own = (case.n - 1) // case.block
    if case.queries < case.block:
        selection = torch.where(selection == selection.amax(-1, keepdim=True), own, selection)
    one = torch.ones(case.batch, heads_kv, device=run.device)
    scales: dict[str, Any] = {"k_descale": one, "v_descale": one} if case.fp8 else {}
    call = functools.partial(
        flash_attn_with_kvcache, q, cache_seqlens=lengths, page_table=table, causal=True,
        block_sparse_tensors=SelectedBlocks(selection, case.block), **scales,
    )  # fmt: skip
    out: Any = call(*caches[0])
    # of the first sequence's first group
    k, v = (x[table[0].long(), :, 0].flatten(0, 1) for x in caches[0])
    keys, rows = torch.arange(case.n, device=run.device), slice(-CHECKED_ROWS, None)
    seen = (keys // case.block == selection[0, 0, rows][:, :, None]).any(1)
    seen &= keys <= keys[case.n - case.queries :][rows, None]
    error = error_of(q[0, rows, : case.group], k, v, seen, out[0, rows, : case.group])
    of_blocks = torch.zeros(case.batch, heads_kv, own + 2, device=run.device)
    of_blocks.scatter_(2, torch.where(selection < 0, own + 1, selection).flatten(2).long(), 1.0)
    read = of_blocks[..., : own + 1].sum().item() * case.block * case.d * 2 * dtype.itemsize
    us = timing.time_graph([functools.partial(call, *pair) for pair in caches], run.device)
    percent = {"percent": 100 * read / us / run.ceiling} if run.ceiling else {}
    yield {
        "kind": "decode", "case": case.name, "peer": "ours", "page": case.page,
        "queries": case.queries, "us": us, "mb": read / 1e6, **percent, "error": error,
    }  # fmt: skip


def measure(case: Case, run: Run) -> Iterator[Json]:
    if case.trains:
        return of_step(case, run)
    return of_caches(case, run) if case.batch else of_sequence(case, run)


def small(cases: list[Case]) -> list[Case]:
    return [
        case._replace(
            n=512, heads=(case.group, 1), k=min(case.k, 6),
            block=64 if case.trains else min(case.block, 32),
            batch=min(case.batch, 2), page=min(case.page, 32), queries=min(case.queries, 512),
        )
        for case in cases
    ]  # fmt: skip


TABLE = Table(
    command="bench.selected", about=__doc__, cases=lambda: CASES, measure=measure, small=small,
    peers=tuple(PEERS), rounds=5, seconds=300.0, first=ceiling_row, head=lambda run: {},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
