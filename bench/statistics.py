"""python -m bench.statistics: statistics of P beside our own forward, compiled flex and a stream.

    python -m bench.statistics                       every case that fits --seconds
    python -m bench.statistics 'd128-*' --out FILE
    python -m bench.statistics --dry                 small, on the CPU, compared and not timed

A case reduces key_sums, block_sums and entropy in one walk. "share" is its time as a part of our
forward with the same mask. "flex" is the forward that gives LSE, and the backward with dO = 1,
whose dV is key_sums; it is timed where the mask is full or causal. "tiles_per_us" are visible tiles
of 128 x 128 in a microsecond. "percent" of few queries is of a stream that only reads K. Results
are compared with float64 before they are timed: the entropy and the block sums of a few rows, and
the sums of a few keys, of the probabilities by our LSE.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import Json, runner
from bench.decode import ceiling_row
from bench.flops import visible_tiles
from bench.masks import MASKS, Mask, make_mask, paper_draw
from bench.runner import Run, Table
from flash_mask_cute import ColumnMask, attention_statistics, flash_attn_func

REDUCE = ("key_sums", "block_sums", "entropy")
BLOCK = 128
WINDOW = 2048
ALLOWED_ENTROPY, ALLOWED_SUMS = 1e-3, 2e-3
CHECKED = 64


class Case(NamedTuple):
    """One sequence of n queries and keys or, with few, batch caches of n keys and few queries."""

    name: str
    mask: str
    d: int = 128
    n: int = 32768
    heads: tuple[int, int] = (32, 8)
    batch: int = 1
    few: int = 0
    m: int = 1


CASES = (
    *(Case(f"d{d}-{mask}", mask, d) for d in (128, 64, 256) for mask in ("full", "causal")),
    Case("snapkv-8x131072", "causal", n=131072, batch=8, few=32),
    Case("blocks-of-128", "causal", m=128),
    *(Case(f"mask-{mask}", mask) for mask in MASKS if mask not in ("full", "causal")),
)


class Given(NamedTuple):
    """Tensors and masks of a case. mask: None where few queries see all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    keywords: dict[str, Any]

    @staticmethod
    def of(case: Case, run: Run) -> Given:
        heads_q, heads_kv = case.heads
        rows, keys = (case.batch, case.few or case.n), (case.batch, case.n)
        shapes = (*rows, heads_q, case.d), (*keys, heads_kv, case.d), (*keys, heads_kv, case.d)
        q, k, v = runner.normal(run.device, run.dtype, *shapes)
        is_drawn = case.mask not in ("full", "causal")
        draw = paper_draw(case.n, case.mask) if is_drawn else None
        mask = None if case.few else make_mask(case.mask, case.n, WINDOW, draw)
        keywords: dict[str, Any] = {"causal": case.mask == "causal"}
        if mask is not None and is_drawn:
            columns = torch.from_numpy(mask.hidden)[None, None].int().to(run.device)
            keywords = {"startend_row_indices": ColumnMask(columns, mask.causal)}
        return Given(q, k, v, mask, keywords)

    def probabilities(self, lse: Tensor, head: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Float64, (rows, keys), of the first batch entry."""
        group = self.q.shape[2] // self.k.shape[2]
        q, k = self.q[0, rows, head].double(), self.k[0, keys, head // group].double()
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.mask is None:
            first = self.k.shape[1] - self.q.shape[1]
            seen = keys <= rows[:, None] + first
        else:
            by_rows = rows[:, None].cpu().numpy(), keys[None].cpu().numpy()
            seen = torch.as_tensor(self.mask.sees(*by_rows)).to(scores.device)
            seen = seen.expand_as(scores)
        return (scores - lse[0, head, rows].double()[:, None]).exp().masked_fill(~seen, 0.0)


def check(case: Case, given: Given, lse: Tensor, found: Any) -> float:
    """The largest error, of the first batch entry and KV head. Raises ValueError where it is not
    allowed."""
    heads = range(case.heads[0] // case.heads[1])
    rows, keys = (torch.arange(x.shape[1], device=lse.device) for x in (given.q, given.k))
    few_rows, few_keys = (x[:: max(len(x) // CHECKED, 1)] for x in (rows, keys))

    def of_group(rows: Tensor, keys: Tensor) -> Any:
        return sum(given.probabilities(lse, head, rows, keys) for head in heads)

    sums = of_group(rows, few_keys).sum(0)
    errors = [
        runner.compare("ours", ["key_sums"], [found.key_sums[0, 0, few_keys]], [sums], ALLOWED_SUMS)
    ]
    if not case.few:
        entropy = torch.special.entr(given.probabilities(lse, 0, few_rows, keys)).sum(-1)
        ours = [found.entropy[0, 0, few_rows]]
        errors.append(runner.compare("ours", ["entropy"], ours, [entropy], ALLOWED_ENTROPY))
    if not case.few and case.m == 1:
        of_rows = of_group(few_rows, keys).split(BLOCK, -1)
        blocks = torch.stack([x.sum(-1) for x in of_rows], -1)
        ours = [found.block_sums[0, 0, few_rows]]
        errors.append(runner.compare("ours", ["block_sums"], ours, [blocks], ALLOWED_SUMS))
    return runner.worst(errors)


def flex_calls(case: Case, given: Given) -> runner.Call:
    """The forward for LSE and the backward with dO = 1 of compiled flex_attention, by v alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    block_mask = None
    if case.mask == "causal":
        block_mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, case.n, case.n, device=q.device.type
        )
    v = v.detach().requires_grad_()
    ones = torch.ones_like(q)

    def run() -> Any:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return torch.autograd.grad(out, v, ones)[0][..., 0]

    return run


def measure(case: Case, run: Run) -> Iterator[Json]:
    given = Given.of(case, run)
    _, lse = flash_attn_func(given.q, given.k, given.v, return_lse=True, **given.keywords)
    names = ("key_sums",) if case.few else REDUCE
    reduced = functools.partial(
        attention_statistics, given.q, given.k, lse, names, block_size=(case.m, BLOCK),
        **given.keywords,
    )  # fmt: skip
    row: Json = {"case": case.name, "d": case.d, "n": case.n, "batch": case.batch, "m": case.m}
    row["error"] = check(case, given, lse, reduced())
    exact = functools.partial(reduced, deterministic=True)
    twice = [exact(), exact()]
    if not all(torch.equal(x, y) for x, y in zip(*twice, strict=True) if x is not None):
        raise ValueError("ours: equal calls have other bits")
    forward = functools.partial(flash_attn_func, given.q, given.k, given.v, **given.keywords)
    calls: dict[str, runner.Call] = {"ours": reduced, "exact": exact, "forward": forward}
    if "flex" in run.peers and not (run.is_dry or case.few) and case.mask in ("full", "causal"):
        try:
            calls["flex"] = flex_calls(case, given)
            calls["flex"]()
        except Exception as refused:
            row["note"] = runner.left_out("flex", refused)
            del calls["flex"]
    samples = run.time(calls)
    if not run.is_dry:
        row |= runner.figures(samples)
        row["share"] = row["ours_ms"] / row["forward_ms"]
        if case.few and run.ceiling:
            read = given.k.numel() * given.k.element_size()
            row["percent"] = 100 * read / (row["ours_ms"] * 1e3) / run.ceiling
        if given.mask is not None:
            row["tiles_per_us"] = visible_tiles(given.mask) * case.heads[0] / row["ours_ms"] / 1e3
    yield row


def small(cases: list[Case]) -> list[Case]:
    few = [case for case in cases if case.mask in ("full", "causal")]
    return [case._replace(n=512, heads=(4, 1), batch=min(case.batch, 2)) for case in few]


TABLE = Table(
    command="bench.statistics", about=__doc__, cases=lambda: CASES, measure=measure, small=small,
    peers=("ours", "flex"), rounds=5, seconds=300.0, first=ceiling_row,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
