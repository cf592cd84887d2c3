"""Calls of `context_parallel_attention` in the processes of a group, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from drawn_builders import DRAW
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func
from flash_mask_cute.parallel import Plan, context_parallel_attention, plan

METHODS = ("all_gather", "ring", "ulysses")
SEQLEN = 512


def _per_head() -> ColumnMask:
    lengths = ([200, 40, 120, 152], [512])
    indices = [builders.causal_document(x).startend_row_indices for x in lengths]
    return ColumnMask(torch.cat(indices, 1), True, seqlen_q=SEQLEN)


MASKS: dict[str, Callable[[], ColumnMask | None]] = {
    "causal": lambda: builders.causal(SEQLEN),
    "causal documents": lambda: builders.causal_document([200, 40, 120, 152]),
    "documents": lambda: builders.document([200, 40, 120, 152]),
    "sink window": lambda: builders.sink_window(SEQLEN, 4, 80),
    "shared questions": lambda: builders.share_question([[80, 60, 60], [120, 192]]),
    "prefixes": lambda: builders.prefix_lm_document([200, 312], [80, 60]),
    "global window": lambda: builders.global_sliding_window(SEQLEN, 5, 60),
    "a mask for each head": _per_head,
    "a batch": lambda: builders.causal_document([[200, 312], [400, 112]]),
}


class ParallelCall(NamedTuple):
    """keywords: of both functions. has_sink: with a learnable_sink."""

    mask: ColumnMask | None
    plan: Plan
    method: str
    keywords: dict[str, Any] = {}
    has_sink: bool = False
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float64


class Errors(NamedTuple):
    """The largest differences from one process, over all ranks."""

    out: float
    gradients: float


def interleaved(seqlen: int, world: int) -> Plan:
    """The first and the last rows together, as causal masking alone asks for."""
    size = seqlen // (2 * world)
    ranks = [
        [(r * size, (r + 1) * size), (seqlen - (r + 1) * size, seqlen - r * size)]
        for r in range(world - 1)
    ]
    return Plan([*ranks, [((world - 1) * size, seqlen - (world - 1) * size)]])


def compare(call: ParallelCall, group: dist.ProcessGroup | None = None, seed: int = 0) -> Errors:
    """Run it in this process of a group, and the whole call alone."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if call.mask is None else call.mask.startend_row_indices.shape[0]
    seqlen, (heads_q, heads_kv), (dim, dim_v) = call.plan.seqlen, call.heads, call.head_dims

    def normal(heads: int, dim: int) -> Tensor:
        shape = (batch, seqlen, heads, dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(call.dtype)

    tensors = [normal(heads_q, dim), normal(heads_kv, dim), normal(heads_kv, dim_v)]
    dout = normal(heads_q, dim_v)
    sink = [torch.randn(heads_q, generator=generator).double()] if call.has_sink else []
    # one process computes the whole, and tells the others
    wanted = [torch.empty_like(x) for x in (dout, *tensors, *sink)]
    if rank == 0:
        whole = [x.clone().requires_grad_() for x in (*tensors, *sink)]
        options = call.keywords | {"learnable_sink": whole[3] if sink else None}
        out = flash_attn_func(*whole[:3], startend_row_indices=call.mask, **options)
        wanted = [out.detach(), *torch.autograd.grad(out, whole, dout)]
    for x in wanted:
        dist.broadcast(x, group=group, group_src=0)
    own = [call.plan.shard(x, rank) for x in tensors] + sink
    own = [x.clone().requires_grad_() for x in own]
    options = call.keywords | {"learnable_sink": own[3] if sink else None}
    part = context_parallel_attention(*own[:3], call.mask, call.plan, group, call.method, **options)
    found = [part, *torch.autograd.grad(part, own, call.plan.shard(dout, rank))]
    differences = []
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        right = y if i == 4 else call.plan.shard(y, rank)
        assert x.dtype == right.dtype and x.shape == right.shape
        differences.append(float((x.double() - right.double()).detach().abs().max()))
    worst = torch.tensor([differences[0], max(differences[1:])], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return Errors(*worst.tolist())


class Row(NamedTuple):
    """A call of the table. world: how many ranks compute it. plan: "interleaved" or "by work"."""

    world: int
    mask: str
    method: str
    plan: str

    def call(self) -> ParallelCall:
        mask = MASKS[self.mask]()
        if self.plan == "interleaved":
            return ParallelCall(mask, interleaved(SEQLEN, self.world), self.method)
        return ParallelCall(mask, plan(mask, self.world, seqlen=SEQLEN), self.method)


TABLE = [Row(*x) for x in product((2, 4), MASKS, METHODS, ("interleaved", "by work"))]


def draw(seed: int, world: int) -> ParallelCall:
    """A mask of any builder, rows scattered over ranks, and any options."""
    rng = random.Random(f"parallel {seed}")
    step = rng.choice((1, 3, 8, 16))
    of_rank = step * rng.randint(1, 48 // step)
    seqlen = world * of_rank
    mask = DRAW[rng.choice(sorted(DRAW))](rng, seqlen).mask if rng.random() < 0.9 else None
    if mask is not None and mask.startend_row_indices.shape[2] != seqlen:
        # one that has an even number of tokens only
        mask = builders.causal(seqlen)
    starts = list(range(0, seqlen, step))
    rng.shuffle(starts)
    many = of_rank // step
    rows = [
        [(a, a + step) for a in sorted(starts[r * many : (r + 1) * many])] for r in range(world)
    ]
    keywords: dict[str, Any] = {}
    if rng.random() < 0.3:
        keywords["causal"] = True
    if rng.random() < 0.3:
        keywords["window_size"] = (rng.randint(0, 20), rng.choice((None, rng.randint(0, 20))))
    if rng.random() < 0.3:
        keywords["softcap"] = 5.0
    if rng.random() < 0.3:
        keywords["softmax_scale"] = rng.choice((0.3, -0.2))
    heads_kv = rng.choice((1, 2, world, 2 * world))
    group = rng.choice((1, 2)) * (world // heads_kv if heads_kv < world else 1)
    return ParallelCall(
        mask, Plan(rows), rng.choice(METHODS), keywords, rng.random() < 0.4,
        (heads_kv * group, heads_kv), rng.choice(((16, 16), (8, 16))),
    )  # fmt: skip


class Told(NamedTuple):
    """What a process of four tells.

    errors: of calls of the groups of which it is the first rank, or what was refused.
    failures: by method, what it was told where rank 1 of two called with wrong rows. differences:
    by method and what rank 1 of two had otherwise. copies_are_equal: see `with_a_copy`.
    half_precision: see there. swapped: see `swap`.
    """

    errors: dict[Row | int, Errors | str]
    failures: dict[str, str]
    differences: dict[tuple[str, str], str]
    copies_are_equal: bool
    half_precision: tuple[float, float]
    swapped: dict[str, list[str]]


def run_share(rank: int, rows: Sequence[Row], seeds: Sequence[int]) -> Told:
    """Rows of the table and draws, by four processes and groups of two; what else needs several."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    soon = timedelta(seconds=2)
    of_failures = [dist.new_group([0, 1], timeout=soon) for _ in METHODS]
    of_copies = [dist.new_group(ranks, timeout=soon) for ranks in ([0, 1], [2, 3])]
    of_swaps = [dist.new_group(ranks, timeout=soon) for ranks in ([0, 1], [2, 3])]
    failures = {}
    if rank < 2:
        for method, group in zip(METHODS, of_failures, strict=True):
            failures[method] = fail_in_one(group, method)
    differences = differ(pairs[rank // 2])
    equal = with_a_copy(of_copies[rank // 2])
    errors = run_calls(rank, rows, seeds, pairs)
    rounding = half_precision(pairs[rank // 2])
    return Told(errors, failures, differences, equal, rounding, swap(of_swaps[rank // 2]))


def run_calls(
    rank: int, rows: Sequence[Row], seeds: Sequence[int], pairs: Sequence[dist.ProcessGroup]
) -> dict[Row | int, Errors | str]:
    found: dict[Row | int, Errors | str] = {}
    for number, row in enumerate([*rows, *seeds]):
        world = row.world if isinstance(row, Row) else (2, 4)[row % 2]
        group = None if world == 4 else pairs[rank // 2]
        if world == 2 and number // 2 % 2 != rank // 2:
            continue
        call = row.call() if isinstance(row, Row) else draw(row, world)
        try:
            result: Errors | str = compare(call, group, number)
        except NotImplementedError as error:
            result = str(error)
        if dist.get_rank(group) == 0:
            found[row] = result
    return found


def fail_in_one(group: dist.ProcessGroup, method: str) -> str:
    """Rank 1 calls with wrong rows. What each rank was told."""
    rows = interleaved(64, 2)
    q, k, v = (torch.randn(1, 32 - dist.get_rank(group), 2, 8) for _ in range(3))
    try:
        context_parallel_attention(q, k, v, None, rows, group, method)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OTHERWISE = (
    *("mask", "plan", "softcap", "no sink", "dtype of sink"),
    *("gradient of q", "gradient of k", "gradient of v", "gradient of sink"),
)


def differ(group: dist.ProcessGroup) -> dict[tuple[str, str], str]:
    """Rank 1 has other documents, rows or options. What each rank was told."""
    told = {}
    q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
    for method, what in product(METHODS, OTHERWISE):
        is_other = dist.get_rank(group) == 1
        lengths = [30, 34] if is_other and what == "mask" else [40, 24]
        rows = Plan([[(0, 32)], [(32, 64)]]) if is_other and what == "plan" else interleaved(64, 2)
        softcap = 3.0 if is_other and what == "softcap" else 0.0
        mask = builders.causal_document(lengths)
        sink: Tensor | None = torch.zeros(2) if "sink" in what else None
        if is_other and what == "no sink":
            sink = None
        elif is_other and what == "dtype of sink":
            sink = torch.zeros(2, dtype=torch.float64)
        named = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "sink": sink}
        recorded = named.get(what.removeprefix("gradient of "))
        if is_other and recorded is not None:
            recorded.requires_grad_()
        operands: Any = [named[name] for name in "qkv"]
        try:
            context_parallel_attention(
                *operands, mask, rows, group, method, softcap=softcap, learnable_sink=sink
            )
            told[method, what] = "nothing"
        except ValueError as error:
            told[method, what] = str(error)
    return told


def with_a_copy(group: dist.ProcessGroup) -> bool:
    """Rank 0 passes its mask again, and rank 1 an equal one: whether results are equal, too."""
    q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
    masks = [builders.causal_document([40, 24]) for _ in range(2)]
    second = masks[dist.get_rank(group)]
    first, again = (
        context_parallel_attention(q, k, v, mask, interleaved(64, 2), group, "ring")
        for mask in (masks[0], second)
    )
    return torch.equal(first, again)


def swap(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """Ranks pass different masks that both know, and then the same ones. What they were told."""
    told: dict[str, list[str]] = {}
    rows, rank = interleaved(64, 2), dist.get_rank(group)

    def call(mask: ColumnMask, heads: int = 2) -> str:
        q, k, v = (torch.randn(1, 32, n, 8) for n in (heads, 2, 2))
        try:
            context_parallel_attention(q, k, v, mask, rows, group, "ulysses")
        except ValueError as error:
            return str(error)
        return "nothing"

    masks = [builders.causal_document(x) for x in ([40, 24], [24, 40], [8, 56], [16, 48])]
    # of the calls with what is known, the first, the second and the fourth are compared
    told["known"] = [call(x) for x in masks[:2]]
    told["swapped"] = [call(masks[rank])]
    told["fourth"] = [call(masks[0])]
    told["known"] += [call(x) for x in (*masks[:2], masks[0], masks[0])]
    told["swapped"] += [call(masks[rank]), call(masks[1 - rank])]
    told["with a new mask"] = [call(masks[2])]
    told["known"] += [call(masks[0]) for _ in range(2)]
    # both are new
    told["with other heads"] = [call(masks[0], (4, 6)[rank])]
    with torch.inference_mode():
        own = ColumnMask(masks[0].startend_row_indices.clone(), masks[0].causal)
        told["known"] += [call(own) for _ in range(3)]
        own.startend_row_indices.copy_(masks[3].startend_row_indices)
        told["known"] += [call((own, masks[3])[rank])]
    return told


def half_precision(group: dist.ProcessGroup) -> tuple[float, float]:
    """The errors of a ring and of one call in bfloat16, against float64."""
    mask = builders.causal_document([200, 40, 120, 152])
    rows, rank = interleaved(SEQLEN, 2), dist.get_rank(group)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, 2, 16, generator=generator).bfloat16() for _ in range(3))
    exact = flash_attn_func(q.double(), k.double(), v.double(), startend_row_indices=mask)
    alone = flash_attn_func(q, k, v, startend_row_indices=mask)
    own = [rows.shard(x, rank) for x in (q, k, v)]
    part = context_parallel_attention(*own, mask, rows, group, "ring")
    assert part.dtype == torch.bfloat16
    errors = (part.double() - rows.shard(exact, rank), (alone.double() - exact))
    of_part, of_whole = (float(x.abs().max()) for x in errors)
    return of_part, of_whole


def run_on_gpu(rank: int) -> dict[str, tuple[float, float]]:
    """In bfloat16, a GPU a rank: errors against float64, own rows and one call, by method."""
    world, device = dist.get_world_size(), torch.device("cuda", rank)
    seqlen = 1024 * world
    mask = builders.causal_document([seqlen * 5 // 8, seqlen * 3 // 8])
    rows = plan(mask, world, seqlen=seqlen)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, seqlen, h, 64, generator=generator).bfloat16() for h in (8, 4, 4, 8)]

    def alone(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        q, k, v, dout = (x.to(device, dtype).requires_grad_() for x in tensors)
        out = flash_attn_func(q, k, v, startend_row_indices=mask.to(device))
        return [
            x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))
        ]

    exact, of_one = alone(torch.float64, torch.device("cpu")), alone(torch.bfloat16, device)
    found = {}
    for method in METHODS:
        q, k, v, dout = (rows.shard(x, rank).to(device).requires_grad_() for x in tensors)
        out = context_parallel_attention(q, k, v, mask.to(device), rows, method=method)
        results = (out, *torch.autograd.grad(out, (q, k, v), dout))
        errors = [
            tuple(float(error.abs().max()) for error in
                  (x.detach().cpu().double() - rows.shard(right, rank), one - right))
            for x, right, one in zip(results, exact, of_one, strict=True)
        ]  # fmt: skip
        found[f"{method}, out"] = errors[0]
        found[f"{method}, gradients"] = max(errors[1:])
    return found
