"""python -m bench.decode: few queries over long caches, against peers and against the memory.

Times are of CUDA-graph replay. Calls take turns over copies of K and V of a gigabyte and more
together, so that nothing is found in the L2 cache; 100 % is a stream that only reads, of the same
run. Each output is compared with an fp32 reference of one sequence and one KV head before its time
counts; the call of a graph is the one that was compared. A call that somebody refuses is a row that
says why.

    python -m bench.decode                                 all cases and peers, within --seconds
    python -m bench.decode b1x131072 --peers ours,sdpa
    python -m bench.decode --dry                           on a CPU: cases, references, bookkeeping
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench import Json, commit_here, runner, timing, versions
from bench.oracle import attend
from bench.runner import Run, Table
from flash_mask_cute import builders, flash_attn_with_kvcache
from flash_mask_cute.compute_block_sparsity import compute_block_sparsity
from flash_mask_cute.interface import _flash_attn_fwd

# relative to the largest element of the reference
TOLERANCE = 0.03
# by which numbers of keys and values in fp8 are multiplied
DESCALE = 0.5
# by case, the keys at which sums are cut (`seqlen_k_per_split`), one row of ours each
CUT_AT: dict[str, tuple[int, ...]] = {
    "b1x131072": (2048, 4096), "b64x4096": (4096,), "b128ragged": (4096,), "b1x16384": (2048,),
    "d64-sink-b64x4096": (4096,),
}  # fmt: skip
# the parents of draft tokens: two alternatives, and one that follows the first
TREE = (-1, 0, 0, 1)
BY_MOD = ("blocks", "mod")


@dataclass(frozen=True)
class DecodeCase:
    """q (batch, queries, heads_q, d) over K and V (batch, keys, heads_kv, d).

    keys: of each sequence, or a range that they are drawn from. pages: page sizes, 0: contiguous.
    mask: "causal" (bottom right), "full", "sink" (a learnable sink, causal), "sink_window" (that,
    and a window of 128 keys), "blocks" (every fourth block of 128 keys hidden, by a mask_mod and
    its lists), "mod" (the same without lists), "tree" (the queries are drafts of TREE, as bits).
    decoding: sequences in front that have one query each; the others have `queries`, and half as
    many keys. appends: the call writes the last key into the cache.
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
    DecodeCase("d512-b64x4096", 64, 4096, (16, 2), 512, pages=(0, 16, 64)),
    DecodeCase("d512-b1x131072", 1, 131072, (16, 2), 512, pages=(0, 16, 64)),
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


SMALL = (
    DecodeCase("b1x512", 1, 512, (8, 2), 64, pages=(0, 16)),
    DecodeCase("ragged", 3, (100, 512), (8, 2), 64, 4),
    DecodeCase("append", 1, 512, (8, 2), 64, appends=True),
    DecodeCase("mixed", 3, 512, (8, 2), 64, 20, pages=(16,), decoding=2),
    DecodeCase("blocks", 1, 1024, (8, 2), 64, mask="blocks"),
    DecodeCase("tree4", 2, 512, (8, 2), 64, len(TREE), mask="tree"),
    DecodeCase("sink", 2, 512, (8, 2), 64, 3, pages=(0, 16), mask="sink"),
)


class Caches(NamedTuple):
    """Keys and values of the copies, and what they are multiplied by."""

    copies: Sequence[tuple[Tensor, Tensor]]
    descale: float = 1.0

    def numbers(self) -> list[Tensor]:
        """Those of the first copy."""
        k, v = self.copies[0]
        return (
            [k, v] if self.descale == 1 else [(x.float() * self.descale).bfloat16() for x in (k, v)]
        )


class Attempt(NamedTuple):
    """A call of k and v, by the name of its row. page: they are pools of pages of so many keys."""

    peer: str
    call: Callable[[Tensor, Tensor], Any]
    page: int = 0
    caches: Caches | None = None


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
        copies = 2 if device == "cpu" else timing.copies_of(allocated)

        def normal(rows: int, heads: int) -> Tensor:
            return torch.randn(case.batch, rows, heads, d, device=device, dtype=torch.bfloat16)

        self.q = normal(case.queries, heads_q)
        self.cu_seqlens_q = None
        if case.decoding:
            counts = [1] * case.decoding + [case.queries] * (case.batch - case.decoding)
            queries = torch.tensor([0, *counts])
            self.cu_seqlens_q = queries.cumsum(0).to(device, torch.int32)
            self.q = self.q.flatten(0, 1)[: int(queries.sum())]
        made = [(normal(most, self.heads_kv), normal(most, self.heads_kv)) for _ in range(copies)]
        self.caches = Caches(made)
        self.sink = torch.randn(heads_q, device=device) if case.mask.startswith("sink") else None

    @functools.cache  # noqa: B019
    def table(self, page: int) -> Tensor:
        pages = self.case.batch * self.case.most_keys // page
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        return order.view(self.case.batch, -1).to(self.device, torch.int32)

    def pool(self, x: Tensor, page: int) -> Tensor:
        return x.view(-1, page, self.heads_kv, self.case.d) if page else x

    def visible(self, length: int) -> Tensor:
        """(queries, keys) of the last sequence."""
        case = self.case
        k = torch.arange(length, device=self.device)[None]
        last = torch.arange(case.queries, device=self.device)[:, None] + length - case.queries
        seen = (k <= last) if case.mask != "full" else k.expand(case.queries, -1) >= 0
        if case.mask == "sink_window":
            seen = seen & (k >= last - 127)
        if case.mask in BY_MOD:
            seen = seen & (k // 128 % 4 != 3)
        if case.mask == "tree":
            drafts = seen[:, length - len(TREE) :]
            for draft, parent in enumerate(TREE):
                drafts[draft] = drafts[parent] & (parent >= 0)
                drafts[draft, draft] = True
        return seen

    def of_last(self, x: Tensor) -> Tensor:
        """The queries, or outputs, of the last sequence and KV head 0, in fp32."""
        return (x[-1] if x.dim() == 4 else x[-self.case.queries :])[:, : self.group].float()

    def error(self, out: Tensor, page: int, numbers: Sequence[Tensor]) -> float:
        """Of the last sequence and KV head 0. numbers: keys and values."""
        last, length = self.case.batch - 1, self.lengths[-1]
        if page:
            at = self.table(page)[last].long()
            rows = [self.pool(x, page)[at, :, 0].flatten(0, 1) for x in numbers]
        else:
            rows = [x[last, :, 0] for x in numbers]
        k, v = (x[:length].float() for x in rows)
        q, sink = self.of_last(self.q), None
        scores = torch.einsum("qgd,kd->qgk", q, k) * self.case.d**-0.5
        scores = scores.masked_fill(~self.visible(length)[:, None], -math.inf)
        if self.sink is not None:
            sink = self.sink[: self.group].repeat(self.case.queries)[:, None]
        want = attend(scores.flatten(0, 1), v, sink).out.view(q.shape)
        return runner.share_off(self.of_last(out), want)

    def keywords(self) -> Json:
        """Of our call and flash-attn-4's, without those of blocks and mods."""
        keywords: Json = {"causal": self.case.mask != "full", "learnable_sink": self.sink}
        if self.case.mask == "sink_window":
            keywords["window_size_left"] = 127
        if self.cu_seqlens_q is not None:
            keywords |= {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.case.queries}
        return keywords

    def by_page(
        self, peer: str, call: Callable[..., Any], caches: Caches | None = None
    ) -> Iterator[Attempt]:
        """An attempt for each page size of the case."""
        for page in self.case.pages:
            # a cache in fp8 has lengths
            where: Json = {"seqused_k": self.used if caches is None else self.full}
            if page:
                where = {"page_table": self.table(page), "seqused_k": self.full}
            yield Attempt(peer, functools.partial(call, **where), page, caches)


def row_of(run: Run, p: Problem, attempt: Attempt) -> Json:
    """The call, compared and timed."""
    peer, call, page, given = attempt
    caches = given or p.caches
    row: Json = {"kind": "decode", "case": p.case.name, "peer": peer, "page": page}
    try:
        copies = [[p.pool(x, page) for x in pair] for pair in caches.copies]
        # before the call, which may append to the cache
        numbers, begin = caches.numbers(), time.time()
        error = p.error(call(*copies[0]), page, numbers)
        first_s = time.time() - begin
        us = timing.time_graph([functools.partial(call, *pair) for pair in copies], run.device)
    except Exception as refused:
        text = f"{type(refused).__name__}: {str(refused)[:300]}".replace("\n", " ")
        return row | {"kind": "refused", "why": text}
    size = p.case.bytes_read() // (2 if given else 1)
    share = {"percent": 100 * size / us / run.ceiling} if run.ceiling else {}
    return {
        **row, "us": us, "tbs": size / us / 1e6, **share, "error": error,
        "ok": error < TOLERANCE, "mb": size / 1e6, "first_s": first_s,
    }  # fmt: skip


# -- peers --------------------------------------------------------------------------------------


def _hides_fourth_block(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """The mask_mod of "blocks" and "mod" as a CuTe callable."""
    from cutlass import Int32

    from flash_mask_cute.utils import scalar_to_ssa

    return (k // scalar_to_ssa(128, Int32)) % scalar_to_ssa(4, Int32) != scalar_to_ssa(3, Int32)


def ours(run: Run, p: Problem) -> Iterator[Attempt]:
    case, keywords = p.case, p.keywords()
    if case.mask in BY_MOD:
        keywords |= {"mask_mod": _hides_fourth_block, "causal": False}
    if case.mask == "blocks":
        sizes = 128, 128, case.batch, 1, case.queries, case.most_keys
        lists = compute_block_sparsity(*sizes, _hides_fourth_block, None, p.device)
        keywords["block_sparse_tensors_torch"] = lists
    if case.appends or case.mask == "tree":
        yield Attempt("ours", appending(p, p.caches) if case.appends else verifying(p))
        return

    def call(k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return _flash_attn_fwd(p.q, k, v, **keywords, return_lse=False, **more)[0]

    yield from p.by_page("ours", functools.partial(call, num_splits=0))
    variants: dict[str, Json] = {"one_pass": {"num_splits": 1}}
    if run.left() > 60 and case.name in ("b1x131072", "q985-b1x62208"):
        variants |= {f"splits{splits}": {"num_splits": splits} for splits in (8, 16, 32)}
    for keys in CUT_AT.get(case.name, ()):
        variants[f"same_bits{keys}"] = {"seqlen_k_per_split": keys}
    for name, more in variants.items():
        yield Attempt(f"ours:{name}", functools.partial(call, seqused_k=p.used, **more))


def fp8(run: Run, p: Problem) -> Iterator[Attempt]:
    """Ours over keys and values in fp8, with scales of heads and of tokens."""
    case, keywords = p.case, p.keywords()
    if case.mask in (*BY_MOD, "tree"):
        return
    kind = torch.float8_e4m3fn
    caches = Caches([(k.to(kind), v.to(kind)) for k, v in p.caches.copies], DESCALE)
    tokens = p.caches.copies[0][0].shape[:3]
    shapes = {"head": (case.batch, p.heads_kv), "token": tuple(tokens)}

    def call(k: Tensor, v: Tensor, scales: Sequence[Tensor], **more: Any) -> Tensor:
        of_k, of_v = (x.view(k.shape[:3]) if x.dim() == 3 else x for x in scales)
        of_cache: Json = {"k_descale": of_k, "v_descale": of_v, "return_lse": False}
        return _flash_attn_fwd(p.q, k, v, **keywords, **of_cache, **more)[0]

    # keys and values have scales of their own, which are bytes to read if each token has some
    for name, shape in shapes.items():
        scales = tuple(torch.full(shape, DESCALE, device=p.device) for _ in "kv")
        if case.appends:
            yield Attempt(f"fp8:{name}", appending(p, caches, *scales), 0, caches)
        else:
            yield from p.by_page(f"fp8:{name}", functools.partial(call, scales=scales), caches)


def appending(p: Problem, caches: Caches, *scales: Tensor) -> Callable[..., Any]:
    """The call that writes the last key of each sequence, which is there already, once more."""
    before, new = p.full - 1, {}
    for k, v in caches.copies:
        last = Caches([(k[:, -1:].clone(), v[:, -1:].clone())], caches.descale)
        new[k.data_ptr()] = last.numbers()
    of_cache = dict(zip(("k_descale", "v_descale"), scales, strict=False))

    def call(k: Tensor, v: Tensor) -> Any:
        last_k, last_v = new[k.data_ptr()]
        told: Json = {"cache_seqlens": before, "causal": True, **of_cache}
        return flash_attn_with_kvcache(p.q, k, v, last_k, last_v, **told)

    return call


def verifying(p: Problem) -> Callable[..., Any]:
    """The step that verifies a tree of draft tokens, which are in the cache."""
    tree = builders.draft_tree([TREE] * p.case.batch, device=p.device)
    told: Json = {"cache_seqlens": p.full, "mask_mod": tree.mask_mod(p.full - len(TREE))}
    return lambda k, v: flash_attn_with_kvcache(p.q, k, v, **told)


def fa4(run: Run, p: Problem) -> Iterator[Attempt]:
    function = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    if p.case.mask in (*BY_MOD, "tree"):
        return
    keywords = p.keywords()
    if p.sink is not None:
        keywords["learnable_sink"] = p.sink.bfloat16()
    if p.case.mask == "sink_window":
        keywords |= {"window_size_right": 0, "causal": False}
    yield from p.by_page("fa4", lambda k, v, **more: function(p.q, k, v, **keywords, **more)[0])


def fa3(run: Run, p: Problem) -> Iterator[Attempt]:
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            function = importlib.import_module(name).flash_attn_with_kvcache
            break
        except ImportError:
            continue
    else:
        raise ImportError("FlashAttention-3 is not installed")
    if p.case.mask in ("causal", "full"):
        told: Json = {"cache_seqlens": p.used, "causal": p.case.mask == "causal"}
        yield Attempt("fa3", lambda k, v: function(p.q, k, v, **told))


def sdpa(run: Run, p: Problem) -> Iterator[Attempt]:
    """Uniform lengths only. Of several queries all see all keys here: it has no bottom-right mask,
    which is a few keys of many."""
    is_chunk = p.case.mask == "causal" and p.case.queries > 8
    if p.used is not None or p.case.mask not in ("causal", "full") or is_chunk:
        return
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}

    def call(k: Tensor, v: Tensor, backend: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (p.q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    for name, backend in ({"math": SDPBackend.MATH} if run.is_dry else backends).items():
        yield Attempt(f"sdpa:{name}", functools.partial(call, backend=backend))


PEERS: dict[str, Callable[[Run, Problem], Iterator[Attempt]]] = {
    "ours": ours, "fp8": fp8, "fa4": fa4, "sdpa": sdpa, "fa3": fa3,
}  # fmt: skip


# -- a run --------------------------------------------------------------------------------------


@torch.no_grad()
def measure(case: DecodeCase, run: Run) -> Iterator[Json]:
    problem = Problem(case, run.device)
    for peer in run.peers:
        is_written = not case.appends and (peer == "fa4" or not case.decoding)
        row = {"case": case.name, "peer": peer}
        if peer not in ("ours", "fp8") and not is_written:
            yield {"kind": "refused", **row, "why": "not written for this peer"}
            continue
        try:
            for attempt in PEERS[peer](run, problem):
                if run.left() > 3:
                    yield row_of(run, problem, attempt)
        except ImportError as error:
            if not any(row["kind"] == "absent" and row["peer"] == peer for row in run.rows):
                yield {"kind": "absent", "peer": peer, "why": str(error)[:200]}


def ceiling_row(run: Run) -> Iterator[Json]:
    """A stream that only reads, and an empty kernel."""
    run.ceiling = timing.read_ceiling()
    tiny = torch.zeros(1, device=run.device)
    yield {
        "kind": "ceiling", "read_tbs": run.ceiling / 1e6,
        "empty_us": timing.time_graph([lambda: tiny.add_(1)] * 32),
        "device": torch.cuda.get_device_name(), "commit": commit_here(), **versions(),
    }  # fmt: skip


def summary(rows: Sequence[Json]) -> Iterator[str]:
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


TABLE = Table(
    command="bench.decode", about=__doc__, cases=lambda: CASES, measure=measure,
    small=lambda cases: SMALL, peers=tuple(PEERS), seconds=500.0, first=ceiling_row,
    head=lambda run: {}, summary=summary,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
