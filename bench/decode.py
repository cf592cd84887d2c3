"""python -m bench.decode: few queries over long caches, against peers and against the memory.

Times are of CUDA-graph replay. Calls take turns over copies of K and V of a gigabyte and more
together, so that nothing is found in the L2 cache; 100 % is a stream that only reads, of the same
run. Each output is compared with an fp32 reference of one sequence and one KV head before its time
counts; the call of a graph is the one that was compared. A case that somebody refuses is a row that
says why.

    python -m bench.decode                                 all cases and peers, within --budget
    python -m bench.decode --cases b1x131072 --peers ours,sdpa
    python -m bench.decode --dry                           on a CPU: cases, references, bookkeeping
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import Json, commit_here, versions, why_no_gpu
from bench.oracle import attend

# bytes of K and V that the calls of a graph take turns over
FOOTPRINT = 1e9
# relative to the largest element of the reference
TOLERANCE = 0.03
BURST_US = 15e3
STREAM_BYTES = 2**31
PEERS = ("ours", "fp8", "fa4", "sdpa", "flex", "fa3")
# by which numbers of keys and values in fp8 are multiplied
DESCALE = 0.5
# by case, the keys at which sums are cut (`seqlen_k_per_split`), one row of ours each
CUT_AT: dict[str, tuple[int, ...]] = {
    "b1x131072": (2048, 4096), "b64x4096": (4096,), "b128ragged": (4096,), "b1x16384": (2048,),
    "d64-sink-b64x4096": (4096,),
}  # fmt: skip
# the parents of draft tokens: two alternatives, and one that follows the first
TREE = (-1, 0, 0, 1)
Call = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecodeCase:
    """q (batch, queries, heads_q, d) over K and V (batch, keys, heads_kv, d).

    keys: of each sequence, or a range that they are drawn from. pages: page sizes, 0: contiguous.
    mask: "causal" (bottom right), "full", "sink" (a learnable sink, causal), "sink_window" (that,
    and a window of 128 keys), "blocks" (every fourth block of 128 keys hidden, by a mask_mod and
    its lists), "mod" (the same without lists), "tree" (the queries are drafts of TREE, as bits).
    decoding: sequences in front that have one query
    each; those behind them have `queries`, and half as many keys. appends: the last key is written
    into the cache by the call.
    """

    name: str
    batch: int
    keys: int | tuple[int, int]
    heads: tuple[int, int] = (32, 8)
    d: int = 128
    queries: int = 1
    pages: tuple[int, ...] = (0,)
    mask: str = "causal"
    decoding: int = 0
    appends: bool = False

    @property
    def most_keys(self) -> int:
        return self.keys if isinstance(self.keys, int) else self.keys[1]

    @property
    def lengths(self) -> list[int]:
        if isinstance(self.keys, int):
            in_front = self.decoding or self.batch
            return [self.keys] * in_front + [self.keys // 2] * (self.batch - in_front)
        generator = torch.Generator().manual_seed(0)
        low, high = self.keys
        return torch.randint(low, high + 1, (self.batch,), generator=generator).tolist()

    def bytes_read(self) -> int:
        """Of K and V that the mask leaves."""
        keys = sum(self.lengths)
        if self.mask == "sink_window":
            keys = sum(min(n, 128 + self.queries) for n in self.lengths)
        if self.mask == "blocks":
            keys = keys * 3 // 4
        return keys * self.heads[1] * self.d * 4


# those of most interest first: what the budget cuts off is at the end
CASES = (
    DecodeCase("b1x131072", 1, 131072, pages=(0, 16)),
    DecodeCase("b8x32768", 8, 32768, pages=(0, 1, 16)),
    DecodeCase("b64x4096", 64, 4096, (64, 8), pages=(0, 64)),
    DecodeCase("b128ragged", 128, (1024, 8192), pages=(0, 16)),
    DecodeCase("b1x4096", 1, 4096),
    DecodeCase("b1x16384", 1, 16384, pages=(0, 16)),
    DecodeCase("b8x4096", 8, 4096, pages=(0, 16)),
    DecodeCase("mha-b16x4096", 16, 4096, (32, 32), pages=(0, 1, 8, 16, 64)),
    DecodeCase("d64-b64x4096", 64, 4096, (64, 8), 64, pages=(0, 1, 16, 64)),
    DecodeCase("d64-b8x32768", 8, 32768, (64, 8), 64),
    DecodeCase("d64-b1x131072", 1, 131072, (64, 8), 64, pages=(0, 1, 16, 64)),
    DecodeCase("d256-b64x4096", 64, 4096, (24, 2), 256),
    DecodeCase("d256-b1x131072", 1, 131072, (24, 2), 256),
    DecodeCase("d64-sink-b64x4096", 64, 4096, (64, 8), 64, pages=(0, 16), mask="sink"),
    DecodeCase("d64-sink-b1x131072", 1, 131072, (64, 8), 64, mask="sink"),
    DecodeCase("d64-window-b64x4096", 64, 4096, (64, 8), 64, pages=(0, 16), mask="sink_window"),
    DecodeCase("q4-b1x131072", 1, 131072, queries=4),
    DecodeCase("q8-b1x131072", 1, 131072, queries=8),
    DecodeCase("tree4-b1x131072", 1, 131072, queries=len(TREE), mask="tree"),
    DecodeCase("q4-b16x32768", 16, 32768, queries=4, pages=(0, 64)),
    DecodeCase("blocks-b1x131072", 1, 131072, mask="blocks"),
    DecodeCase("mod-b1x131072", 1, 131072, mask="mod"),
    DecodeCase("append-b1x131072", 1, 131072, appends=True),
    DecodeCase("mixed-60x8192-4x512of4096", 64, 8192, queries=512, pages=(16,), decoding=60),
    DecodeCase("q985-b1x62208", 1, 62208, (9, 9), 64, queries=985, mask="full"),
    DecodeCase("group7-b8x32768", 8, 32768, (28, 4)),
    DecodeCase("chunk2048-b1x32768", 1, 32768, queries=2048),
)


@dataclass(frozen=True)
class Run:
    """What a process measures with. ceiling: bytes a microsecond of a stream that reads."""

    device: str
    deadline: float
    out: Path | None
    rows: list[Json]
    ceiling: dict[str, float]

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    def left(self) -> float:
        return self.deadline - time.time()

    def log(self, **row: Any) -> None:
        self.rows.append(row)
        shown = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(" ".join(shown), flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


# -- time ---------------------------------------------------------------------------------------


def timed_us(calls: Sequence[Callable[[], Any]], device: str) -> float:
    """Microseconds a call, over calls that are captured together and replayed."""
    if device == "cpu":
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls) * 1e6
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    todo = list(calls) * max(1, math.ceil(8 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in todo:
            call()

    def burst(count: int) -> float:
        make: Any = torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (count * len(todo))

    count = max(1, min(200, int(BURST_US / (burst(1) * len(todo)))))
    burst(count)
    return statistics.median(burst(count) for _ in range(5))


def measure_ceiling(run: Run) -> None:
    """Bytes a microsecond of a stream that only reads, and microseconds of an empty kernel."""
    words = torch.zeros(STREAM_BYTES // 4, device=run.device, dtype=torch.int32)
    best = 0.0
    for programs in (132 * 8, 132 * 16, 132 * 32):
        read = functools.partial(_read, words, programs)
        us = timed_us([read], run.device)
        best = max(best, words.nbytes / us)
    run.ceiling["read"] = best
    tiny = torch.zeros(1, device=run.device)
    run.log(
        kind="ceiling",
        read_tbs=best / 1e6,
        empty_us=timed_us([lambda: tiny.add_(1)] * 32, run.device),
        device=torch.cuda.get_device_name(),
        commit=commit_here(),
        **versions(),
    )


def _read(words: Tensor, programs: int) -> None:
    kernel, block = _read_kernel(), 4096
    steps = words.numel() // (programs * block)
    out = torch.empty(programs, device=words.device, dtype=torch.int32)
    kernel[(programs,)](words, out, steps, block, num_warps=8)


@functools.cache
def _read_kernel() -> Any:
    from bench.read_stream import read_words

    return read_words


# -- problems -----------------------------------------------------------------------------------


class Problem:
    """The tensors of a case: copies of K and V, lengths, and page tables over the same memory."""

    def __init__(self, case: DecodeCase, device: str) -> None:
        self.case, self.device = case, device
        (heads_q, self.heads_kv), d, most = case.heads, case.d, case.most_keys
        self.group = heads_q // self.heads_kv
        self.lengths = case.lengths
        self.full = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.used = None if isinstance(case.keys, int) and not case.decoding else self.full
        allocated = case.batch * most * self.heads_kv * d * 4
        copies = 2 if device == "cpu" else max(1, math.ceil(FOOTPRINT / allocated))

        def normal(rows: int, heads: int) -> Tensor:
            return torch.randn(case.batch, rows, heads, d, device=device, dtype=torch.bfloat16)

        self.q = normal(case.queries, heads_q)
        self.cu_seqlens_q = None
        if case.decoding:
            behind = case.batch - case.decoding
            queries = torch.tensor([0] + [1] * case.decoding + [case.queries] * behind)
            self.cu_seqlens_q = queries.cumsum(0).to(device, torch.int32)
            self.q = self.q.flatten(0, 1)[: int(queries.sum())]
        self.copies = [
            (normal(most, self.heads_kv), normal(most, self.heads_kv)) for _ in range(copies)
        ]
        self.sink = None
        if case.mask.startswith("sink"):
            self.sink = torch.randn(heads_q, device=device)
        self._tables: dict[int, Tensor] = {}

    def table(self, page: int) -> Tensor:
        if page not in self._tables:
            pages = self.case.batch * self.case.most_keys // page
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
            self._tables[page] = order.view(self.case.batch, -1).to(self.device, torch.int32)
        return self._tables[page]

    def pool(self, x: Tensor, page: int) -> Tensor:
        return x.view(-1, page, self.heads_kv, self.case.d)

    def visible(self, length: int) -> Tensor:
        """(queries, keys) of the last sequence."""
        case = self.case
        k = torch.arange(length, device=self.device)[None]
        last = torch.arange(case.queries, device=self.device)[:, None] + length - case.queries
        seen = (k <= last) if case.mask != "full" else k.expand(case.queries, -1) >= 0
        if case.mask == "sink_window":
            seen = seen & (k >= last - 127)
        if case.mask in ("blocks", "mod"):
            seen = seen & (k // 128 % 4 != 3)
        if case.mask == "tree":
            for draft, parent in enumerate(TREE):
                seen[draft, length - len(TREE) :] = seen[parent, length - len(TREE) :] & (
                    parent >= 0
                )
                seen[draft, length - len(TREE) + draft] = True
        return seen

    def of_last(self, x: Tensor) -> Tensor:
        """The queries, or outputs, of the last sequence."""
        return x[-1] if self.cu_seqlens_q is None else x[-self.case.queries :]

    def error(self, out: Tensor, page: int, numbers: tuple[Tensor, Tensor]) -> float:
        """Of the last sequence and KV head 0, relative to the largest element. numbers: keys and
        values."""
        k, v = numbers
        last, length = self.case.batch - 1, self.lengths[-1]
        if page:
            at = self.table(page)[last].long()
            k, v = (self.pool(x, page)[at, :, 0].flatten(0, 1)[:length] for x in (k, v))
        else:
            k, v = k[last, :length, 0], v[last, :length, 0]
        q = self.of_last(self.q)[:, : self.group].float()
        scores = torch.einsum("qgd,kd->qgk", q, k.float()) * self.case.d**-0.5
        scores = scores.masked_fill(~self.visible(length)[:, None], -math.inf)
        sink = None
        if self.sink is not None:
            sink = self.sink[: self.group].repeat(self.case.queries)[:, None]
        want = attend(scores.flatten(0, 1), v.float(), sink).out.view(q.shape)
        got = self.of_last(out)[:, : self.group].float()
        return ((got - want).abs().max() / want.abs().max()).item()


def measure(
    run: Run,
    problem: Problem,
    peer: str,
    call: Call,
    page: int = 0,
    codes: list[tuple[Tensor, Tensor]] | None = None,
) -> None:
    """A row of one peer: the call, compared and timed. codes: keys and values in fp8 instead of
    those of the problem."""
    case, given = problem.case, codes or problem.copies
    numbers = given[0]
    if codes is not None:
        numbers = tuple((x.float() * DESCALE).bfloat16() for x in numbers)  # type: ignore[assignment]
    row: Json = {"kind": "decode", "case": case.name, "peer": peer, "page": page}
    if run.left() < 3:
        return
    try:
        copies = given
        if page:
            copies = [tuple(problem.pool(x, page) for x in pair) for pair in copies]  # type: ignore[misc]
        begin = time.time()
        error = problem.error(call(*copies[0]), page, numbers)
        first_s = time.time() - begin
        us = timed_us([functools.partial(call, *pair) for pair in copies], run.device)
    except Exception as refused:
        text = f"{type(refused).__name__}: {str(refused)[:300]}".replace("\n", " ")
        run.log(**row | {"kind": "refused", "why": text})
        return
    size = case.bytes_read() // (2 if codes else 1)
    share = {"percent": 100 * size / us / run.ceiling["read"]} if run.ceiling else {}
    run.log(
        **row, us=us, tbs=size / us / 1e6, **share, error=error, ok=error < TOLERANCE,
        mb=size / 1e6, first_s=first_s,
    )  # fmt: skip


# -- peers --------------------------------------------------------------------------------------


def _hides_fourth_block(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """The mask_mod of "blocks" and "mod" as a CuTe callable."""
    from cutlass import Int32

    from flash_mask_cute.utils import scalar_to_ssa

    return (k // scalar_to_ssa(128, Int32)) % scalar_to_ssa(4, Int32) != scalar_to_ssa(3, Int32)


def _by_page(
    run: Run,
    p: Problem,
    peer: str,
    call: Call,
    codes: list[tuple[Tensor, Tensor]] | None = None,
    **more: Any,
) -> None:
    """A row for each page size of the case. codes: as in `measure`."""
    for page in p.case.pages:
        # a cache in fp8 has lengths
        where: Json = {"seqused_k": p.used if codes is None else p.full}
        if page:
            where = {"page_table": p.table(page), "seqused_k": p.full}
        measure(run, p, peer, functools.partial(call, **where, **more), page, codes)


def ours(run: Run, p: Problem) -> None:
    from flash_mask_cute.interface import _flash_attn_fwd

    case, keywords = p.case, _keywords(p)
    if case.mask in ("blocks", "mod"):
        keywords |= {"mask_mod": _hides_fourth_block, "causal": False}
    if case.mask == "blocks":
        from flash_mask_cute.compute_block_sparsity import compute_block_sparsity

        keywords["block_sparse_tensors_torch"] = compute_block_sparsity(
            128, 128, case.batch, 1, case.queries, case.most_keys, _hides_fourth_block, None,
            p.device,
        )  # fmt: skip
    if case.appends or case.mask == "tree":
        measure(run, p, "ours", appending(p) if case.appends else verifying(p))
        return

    def call(k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return _flash_attn_fwd(p.q, k, v, **keywords, **more)[0]

    _by_page(run, p, "ours", call, num_splits=0)
    one_pass = {"one_pass": 1}
    if run.left() > 60 and case.name in ("b1x131072", "q985-b1x62208"):
        one_pass |= {f"splits{splits}": splits for splits in (8, 16, 32)}
    for name, splits in one_pass.items():
        split = functools.partial(call, num_splits=splits, seqused_k=p.used)
        measure(run, p, f"ours:{name}", split)
    for keys in CUT_AT.get(case.name, ()):
        cut = functools.partial(call, seqlen_k_per_split=keys, seqused_k=p.used)
        measure(run, p, f"ours:same_bits{keys}", cut)


def _keywords(p: Problem) -> Json:
    """Of our call, without those of blocks and mods."""
    case = p.case
    keywords: Json = {"causal": case.mask != "full", "return_lse": False}
    keywords["learnable_sink"] = p.sink
    if case.mask == "sink_window":
        keywords["window_size_left"] = 127
    if p.cu_seqlens_q is not None:
        keywords |= {"cu_seqlens_q": p.cu_seqlens_q, "max_seqlen_q": case.queries}
    return keywords


def fp8(run: Run, p: Problem) -> None:
    """Ours over keys and values in fp8, with scales of heads and of tokens."""
    from flash_mask_cute.interface import _flash_attn_fwd

    case, keywords = p.case, _keywords(p)
    if case.mask in ("blocks", "mod", "tree"):
        return
    kind = torch.float8_e4m3fn
    codes = [(k.to(kind), v.to(kind)) for k, v in p.copies]
    by_head = torch.full((case.batch, p.heads_kv), DESCALE, device=p.device)
    by_token = torch.full(codes[0][0].shape[:3], DESCALE, device=p.device)
    if case.appends:
        measure(run, p, "fp8:head", appending(p, codes, by_head), codes=codes)
        measure(run, p, "fp8:token", appending(p, codes, by_token), codes=codes)
        return

    def call(k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor], **more: Any) -> Tensor:
        if scales[0].dim() == 3:
            scales = scales[0].view(k.shape[:3]), scales[1].view(k.shape[:3])
        of_cache: Json = {"k_descale": scales[0], "v_descale": scales[1]}
        return _flash_attn_fwd(p.q, k, v, **keywords, **of_cache, **more)[0]

    # keys and values have scales of their own, which are bytes to read if each token has some
    for name, x in (("head", by_head), ("token", by_token)):
        of_both = functools.partial(call, scales=(x, x.clone()))
        _by_page(run, p, f"fp8:{name}", of_both, codes)


def appending(
    p: Problem,
    codes: list[tuple[Tensor, Tensor]] | None = None,
    scales: Tensor | None = None,
) -> Call:
    """The call that writes the last key of each sequence, which is there already, once more. codes,
    scales: of a cache in fp8."""
    from flash_mask_cute import flash_attn_with_kvcache

    before = p.full - 1
    new = {k.data_ptr(): (k[:, -1:].clone(), v[:, -1:].clone()) for k, v in p.copies}
    if codes is not None:
        wide = [
            ((k[:, -1:].float() * DESCALE).bfloat16(), (v[:, -1:].float() * DESCALE).bfloat16())
            for k, v in codes
        ]
        new = {k.data_ptr(): pair for (k, _), pair in zip(codes, wide, strict=True)}
    of_rows = scales if scales is None or scales.dim() == 2 else scales.clone()

    def call(k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(
            p.q, k, v, *new[k.data_ptr()], cache_seqlens=before, causal=True, k_descale=scales,
            v_descale=of_rows,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return call


def verifying(p: Problem) -> Call:
    """The step that verifies a tree of draft tokens, which are in the cache."""
    from flash_mask_cute import builders, flash_attn_with_kvcache

    tree = builders.draft_tree([TREE] * p.case.batch, device=p.device)
    mask_mod = tree.mask_mod(p.full - len(TREE))

    def call(k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(p.q, k, v, cache_seqlens=p.full, mask_mod=mask_mod)
        assert isinstance(out, Tensor)
        return out

    return call


def fa4(run: Run, p: Problem) -> None:
    attend = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    case = p.case
    if case.mask in ("blocks", "mod", "tree"):
        return
    keywords: Json = {"causal": case.mask != "full", "learnable_sink": None}
    if p.sink is not None:
        keywords["learnable_sink"] = p.sink.bfloat16()
    if p.cu_seqlens_q is not None:
        keywords |= {"cu_seqlens_q": p.cu_seqlens_q, "max_seqlen_q": case.queries}
    if case.mask == "sink_window":
        keywords |= {"window_size_left": 127, "window_size_right": 0, "causal": False}

    def call(k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return attend(p.q, k, v, **keywords, **more)[0]

    _by_page(run, p, "fa4", call)


def fa3(run: Run, p: Problem) -> None:
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            decode = importlib.import_module(name).flash_attn_with_kvcache
            break
        except ImportError:
            continue
    else:
        raise ImportError("FlashAttention-3 is not installed")
    if p.case.mask not in ("causal", "full"):
        return

    def call(k: Tensor, v: Tensor) -> Tensor:
        causal = p.case.mask == "causal"
        return decode(p.q, k, v, cache_seqlens=p.used, causal=causal)

    measure(run, p, "fa3", call)


def sdpa(run: Run, p: Problem) -> None:
    """Uniform lengths only. Of several queries all see all keys here: it has no bottom-right mask,
    which is a few keys of many."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    is_chunk = p.case.mask == "causal" and p.case.queries > 8
    if p.used is not None or p.case.mask not in ("causal", "full") or is_chunk:
        return
    q = p.q.transpose(1, 2)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    if run.is_dry:
        backends = {"math": SDPBackend.MATH}

    def call(k: Tensor, v: Tensor, backend: Any) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
            )
        return out.transpose(1, 2)

    for name, backend in backends.items():
        measure(run, p, f"sdpa:{name}", functools.partial(call, backend=backend))


def flex(run: Run, p: Problem) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = p.case
    if run.is_dry or case.mask.startswith("sink") or run.left() < 30:
        return
    config: Any = torch._dynamo.config
    config.recompile_limit = 64
    attend = torch.compile(flex_attention, dynamic=False)
    q, lengths, queries = p.q.transpose(1, 2), p.full, case.queries

    def causal(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return k_idx <= lengths[b] - queries + q_idx

    def blocks(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return k_idx // 128 % 4 != 3

    def tree(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        first = lengths[b] - queries
        return (k_idx < first) | seen[q_idx, (k_idx - first).clamp(min=0)]

    seen, mods = p.visible(queries), {"causal": causal, "tree": tree}
    mask = None
    if case.mask in ("blocks", "mod", "tree") or (
        case.mask == "causal" and (p.used is not None or queries > 1)
    ):
        mod = mods.get(case.mask, blocks)
        mask = create_block_mask(mod, case.batch, None, queries, case.most_keys, device=p.device)

    def call(k: Tensor, v: Tensor) -> Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    measure(run, p, "flex", call)


_CALLED: dict[str, Callable[[Run, Problem], None]] = {
    "ours": ours, "fp8": fp8, "fa4": fa4, "fa3": fa3, "sdpa": sdpa, "flex": flex,
}  # fmt: skip


# -- a run --------------------------------------------------------------------------------------


def table(rows: Sequence[Json]) -> Iterator[str]:
    """A line for each case: everybody, fastest first; ! marks a wrong result."""
    done = [row for row in rows if row["kind"] == "decode"]
    for name in dict.fromkeys(row["case"] for row in done):
        of_case = sorted((r for r in done if r["case"] == name), key=lambda r: r["us"])
        cells = []
        for row in of_case:
            page = f"/page{row['page']}" if row["page"] else ""
            percent = f", {row['percent']:.1f} %" if "percent" in row else ""
            wrong = "" if row["ok"] else "!"
            cells.append(f"{row['peer']}{page}{wrong} {row['us']:.1f} us{percent}")
        yield f"{name}: " + "; ".join(cells)


def measure_case(run: Run, case: DecodeCase, peers: Sequence[str], absent: set[str]) -> None:
    problem = Problem(case, run.device)
    for peer in peers:
        if peer in absent:
            continue
        is_written = not case.appends and (peer == "fa4" or not case.decoding)
        if peer not in ("ours", "fp8") and not is_written:
            run.log(kind="refused", case=case.name, peer=peer, why="not written for this peer")
            continue
        try:
            _CALLED[peer](run, problem)
        except ImportError as error:
            absent.add(peer)
            run.log(kind="absent", peer=peer, why=str(error)[:200])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--cases", default="", help="names or beginnings of names, with commas")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    parser.add_argument("--out", type=Path, help="a file that rows are appended to")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without speed")
    given = parser.parse_args()
    if not given.dry and (refusal := why_no_gpu("bench.decode")):
        print(refusal, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    run = Run("cpu" if given.dry else "cuda", time.time() + given.budget, given.out, [], {})
    cases: tuple[DecodeCase, ...] = CASES
    peers = given.peers.split(",")
    if given.dry:
        cases = (
            DecodeCase("b1x512", 1, 512, (8, 2), 64, pages=(0, 16)),
            DecodeCase("ragged", 3, (100, 512), (8, 2), 64, 4),
            DecodeCase("append", 1, 512, (8, 2), 64, appends=True),
            DecodeCase("mixed", 3, 512, (8, 2), 64, 20, pages=(16,), decoding=2),
            DecodeCase("blocks", 1, 1024, (8, 2), 64, mask="blocks"),
            DecodeCase("tree4", 2, 512, (8, 2), 64, len(TREE), mask="tree"),
            DecodeCase("sink", 2, 512, (8, 2), 64, 3, pages=(0, 16), mask="sink"),
        )
        peers = ["ours", "fp8", "sdpa"]
    else:
        measure_ceiling(run)
    wanted = tuple(filter(None, given.cases.split(",")))
    absent: set[str] = set()
    for case in cases:
        if wanted and not case.name.startswith(wanted):
            continue
        if run.left() < 10:
            print("out of budget before", case.name)
            break
        with torch.no_grad():
            measure_case(run, case, peers, absent)
        if not run.is_dry:
            torch.cuda.empty_cache()
    print("\n".join(table(run.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
