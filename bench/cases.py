"""The named cases. A case is plain data: no torch is imported until its tensors are made."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import cudnn_cases, everyday, masks
from bench.masks import Draw, Mask, make_mask, paper_draw

if TYPE_CHECKING:
    import torch

HIDDEN = 4096
TOKENS = 131072
KINDS = (
    *("attention", "backward", "host", "host_train", "host_step", "cold", "prep", "sweep"),
    *("memory", "memory_backward"),
)
# A forward and its backward by autograd, in each call.
TRAINING = ("host_train", "host_step")
# Masks that a kernel can be asked for by flags and lengths.
NATIVE = ("full", "causal", "sliding_window", "varlen_causal")
MASKS = (*masks.MASKS, *masks.STATIC_MASKS, "varlen_causal")
FORMS = ("native", "columns", "mask_mod", "mask_mod_alone")
DTYPES = ("bfloat16", "float16")
SWEPT = ("causal_document", "share_question", "document")
# Sequence lengths at which memory is measured.
REMEMBERED = (8192, 32768, 131072, 524288, 1048576)
REMEMBERED_BACKWARD = REMEMBERED[:3]
PREPARED = (*SWEPT, "global_sliding_window", "random_eviction")
STEP_TOKENS, STEP_DIMS, STEP_LENGTHS = 4096, (128, 64), (512, 1024, 2048, 4096)
SCORE_MODS = ("", "alibi", "t5_bias", "softcap")
# Mean of the sinks that are drawn.
SINK_LEVEL = 4.0
# Masks that are also told by mask_mod and block lists.
LISTED = ("document", "random_eviction")


@dataclass(frozen=True)
class BenchCase:
    """One shape and mask.

    n: tokens of a sequence; with `doc_lengths`, of the longest document.
    tokens: tokens of the whole batch, so the batch is tokens // n, or the number of documents.
    n_k: keys of a sequence, where they are not its n tokens, else 0. Causality then aligns the last
        query with the last key, and no query may see nothing.
    window: keys visible before the query's own (sliding_window is causal as well; the global one
        is not, and sees as many after it).
    form: how our kernel is told: "native" flags and lengths, column intervals, a mask_mod with
        block lists, or a mask_mod alone. Peers have one way each, lists with a mask_mod.
    draw: the documents and the like of a mask that has them; every sequence of the batch has these.
    kind: "attention" (device time of the forward), "backward" (that of the backward alone), "host"
        (host time of a warm call), "host_train" (that of a forward and its backward by autograd),
        "host_step" (wall time of such steps one after the other, beside their device time),
        "cold" (start-up seconds), "prep" (preparing the metadata of the mask), "sweep" (latency
        over many draws), "memory" (bytes of a forward beyond inputs and outputs), "memory_backward"
        (those of the backward alone).
    deterministic: a backward that is measured with sums in a fixed order as well.
    sink: a learnable logit per head, that has no value.
    Raises ValueError where the fields contradict each other.
    """

    name: str
    mask: str
    d: int
    d_v: int
    n: int
    tokens: int
    heads: int
    heads_kv: int
    dtype: str = "bfloat16"
    window: int | None = None
    doc_lengths: tuple[int, ...] = ()
    softcap: float = 0.0
    kind: str = "attention"
    form: str = "native"
    draw: Draw | None = None
    score_mod: str = ""
    deterministic: bool = False
    n_k: int = 0
    sink: bool = False

    def __post_init__(self) -> None:
        known_values = {"kind": KINDS, "mask": MASKS, "dtype": DTYPES, "form": FORMS}
        for field, known in {**known_values, "score_mod": SCORE_MODS}.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r} is not in {known}")
        if self.tokens != sum(self.lengths):
            raise ValueError(f"{self.name}: sequences hold {sum(self.lengths)} of {self.tokens}")
        if self.n != max(self.lengths):
            raise ValueError(f"{self.name}: n={self.n}, longest sequence {max(self.lengths)}")
        if self.heads % self.heads_kv:
            raise ValueError(f"{self.name}: heads={self.heads}, heads_kv={self.heads_kv}")
        if (self.window is not None) != self.mask.endswith("window"):
            raise ValueError(f"{self.name}: window={self.window} with mask={self.mask!r}")
        if bool(self.doc_lengths) != self.mask.startswith("varlen"):
            raise ValueError(f"{self.name}: doc_lengths and mask={self.mask!r} contradict")
        if self.form == "native" and self.mask not in NATIVE:
            raise ValueError(f"{self.name}: mask={self.mask!r} has no native form")
        if self.form == "columns" and self.mask in masks.BEYOND_COLUMNS:
            raise ValueError(f"{self.name}: column intervals do not hold mask={self.mask!r}")
        if self.draw and sum(map(sum, self.draw.documents)) != self.n:
            raise ValueError(f"{self.name}: the documents of draw do not hold n={self.n} tokens")
        if self.deterministic and self.kind != "backward":
            raise ValueError(f"{self.name}: deterministic with kind={self.kind!r}")
        if self.sink and (self.form != "native" or self.kind not in ("attention", "backward")):
            raise ValueError(f"{self.name}: sink with form={self.form!r}, kind={self.kind!r}")
        aligned = self.mask == "full" or self.mask == "causal" and self.n_k >= self.n
        if self.n_k and (self.form != "native" or not aligned):
            raise ValueError(
                f"{self.name}: n_k={self.n_k} with n={self.n}, mask={self.mask!r}, "
                f"form={self.form!r}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.doc_lengths or (self.n,) * (self.tokens // self.n)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def causal(self) -> bool:
        """Whether k > q is hidden, whatever else is."""
        return self.mask == "varlen_causal" or self.mask in masks.CAUSAL

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return (self.n_k,) * self.batch if self.n_k else self.lengths

    @property
    def first_query(self) -> int:
        """Where the mask of a sequence has its first query: the last query is the last key's."""
        return max(0, self.n_k - self.n)

    def mask_of(self, length: int) -> Mask:
        """The mask of one sequence of `length` tokens, among as many tokens as the longer side has:
        queries from `first_query` on, keys from 0 on."""
        name = "causal" if self.varlen else self.mask
        return make_mask(name, max(length, self.n_k), self.window, self.draw)

    @property
    def varlen(self) -> bool:
        return bool(self.doc_lengths)

    @property
    def is_backward(self) -> bool:
        """Whether a call is a backward alone, over what a forward saved."""
        return self.kind in ("backward", "memory_backward")

    @property
    def returns_gradients(self) -> bool:
        """Whether a call returns (dq, dk, dv), else what a forward does."""
        return self.is_backward or self.kind in TRAINING


class Saved(NamedTuple):
    """What gradients need besides the inputs: out and lse of the forward, and dout."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


class CaseTensors(NamedTuple):
    """q (batch, n, heads, d), k and v with heads_kv and d_v, n_k rows where the case has them;
    varlen: (tokens, heads, d).

    cu_seqlens: int32 (documents + 1,), or None where the batch is dense. saved: where gradients are
    returned. sink: fp32 (heads,), or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor | None
    saved: Saved | None = None
    sink: torch.Tensor | None = None


def document_lengths(
    count: int, tokens: int, shortest: int, longest: int, seed: int
) -> tuple[int, ...]:
    """`count` lengths in [shortest, longest] of sum `tokens`; ValueError without any."""
    if not count * shortest <= tokens <= count * longest:
        raise ValueError(f"{count} documents of {shortest}..{longest} cannot hold {tokens} tokens")
    rng = random.Random(seed)
    lengths = [shortest + int(rng.random() * (longest - shortest + 1)) for _ in range(count)]
    missing = tokens - sum(lengths)
    while missing:
        i = int(rng.random() * count)
        changed = min(max(lengths[i] + missing, shortest), longest)
        missing -= changed - lengths[i]
        lengths[i] = changed
    return tuple(lengths)


def _size(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _case(name: str, mask: str, d: int, n: int, **fields: Any) -> BenchCase:
    """Of TOKENS tokens and hidden size HIDDEN, with a window where the mask has one."""
    fields = {"d_v": d, "tokens": TOKENS} | fields
    fields.setdefault("heads", HIDDEN // fields["d_v"])
    fields.setdefault("heads_kv", fields["heads"])
    fields.setdefault("window", n // 16 if mask.endswith("sliding_window") else None)
    return BenchCase(name, mask, d, n=n, **fields)


def _dense(d: int, mask: str, n: int, prefix: str = "", **fields: Any) -> BenchCase:
    name = f"{prefix}d{d}-{mask.replace('sliding_', '')}-{_size(n)}"
    return _case(name, mask, d, n, **fields)


def _packed(name: str, lengths: tuple[int, ...], **fields: Any) -> BenchCase:
    """Causal documents through cu_seqlens."""
    return _case(name, "varlen_causal", 128, max(lengths), doc_lengths=lengths, **fields)


def _masked(name: str, d: int, mask: str, n: int, **fields: Any) -> BenchCase:
    """A case of the FlashMask paper's size, said as a user would: by flags where there are any."""
    fields = {"form": "native" if mask in NATIVE else "columns"} | fields
    return _case(name, mask, d, n, draw=None if mask in NATIVE else paper_draw(n, mask), **fields)


def _mods(d: int, n: int) -> Iterator[BenchCase]:
    def named(name: str) -> str:
        return f"mod-d{d}-{_size(n)}-{name}"

    for mod in filter(None, SCORE_MODS):
        yield _masked(named(mod), d, "causal", n, score_mod=mod)
    for mask in LISTED:
        yield _masked(named(mask), d, mask, n, form="mask_mod")
    yield _masked(named("document-alone"), d, "document", n, form="mask_mod_alone")


def _memory(n: int, **fields: Any) -> BenchCase:
    """One sequence of as many documents at every length."""
    draw = Draw(masks.draw_documents(n, masks.DOCUMENT_COUNTS[131072], seed=0))
    fields = {"kind": "memory", "name": f"memory-{_size(n)}-causal_document"} | fields
    name = fields.pop("name")
    return _case(name, "causal_document", 128, n, tokens=n, form="columns", draw=draw, **fields)


def _memory_backwards() -> Iterator[BenchCase]:
    """Also of a mask that peers have a flag for."""
    for n in REMEMBERED_BACKWARD:
        yield _memory(n, name=f"memory-bwd-{_size(n)}-causal_document", kind="memory_backward")
    yield _masked("memory-bwd-128k-causal", 128, "causal", TOKENS, kind="memory_backward")


def _backwards() -> Iterator[BenchCase]:
    """The backward of the cases above."""
    back = {"kind": "backward"}
    for d in (128, 64):
        for mask in ("full", "causal"):
            yield from (_dense(d, mask, n, "bwd-", **back) for n in (8192, 32768))
    yield _dense(128, "sliding_window", 8192, "bwd-", **back)
    few_heads = {"tokens": 32768, "heads": 16, "heads_kv": 2}
    yield _case("bwd-extra-d128-h16-kv2-causal-8k", "causal", 128, 8192, **few_heads, **back)
    yield from (_dense(256, mask, 8192, "bwd-", **back) for mask in ("full", "causal"))
    for d in (128, 64):
        for n in (8192, 32768, 131072):
            for mask in masks.MASKS:
                yield _masked(f"bwd-mask-d{d}-{_size(n)}-{mask}", d, mask, n, **back)
    for mask in ("causal", "document"):
        yield _masked(f"bwd-det-d128-8k-{mask}", 128, mask, 8192, deterministic=True, **back)
    for n in (8192, 32768):
        for case in _mods(128, n):
            if not case.score_mod:
                yield replace(case, name=f"bwd-{case.name}", kind="backward")


WAYS = {False: "attention", True: "backward"}


def _everyday() -> Iterator[BenchCase]:
    """Each backward after its forward, widths of one mask and direction together."""
    masks_of = {"window": "sliding_window", "varlen causal": "varlen_causal"}
    for shape in everyday.SHAPES:
        for is_backward, kind in WAYS.items():
            yield BenchCase(
                name=shape.case_name(is_backward=is_backward),
                mask=masks_of.get(shape.mask, shape.mask),
                d=shape.head_dim,
                d_v=shape.head_dim_v,
                n=max(shape.documents, default=shape.seqlen),
                tokens=shape.batch * shape.seqlen,
                heads=shape.heads,
                heads_kv=shape.heads_kv,
                window=shape.window,
                doc_lengths=shape.documents,
                kind=kind,
                n_k=shape.seqlen_k,
                sink=shape.sink,
            )
    n, heads = everyday.WIDTH_TOKENS, everyday.WIDTH_HEADS
    for mask in everyday.WIDTH_MASKS:
        for is_backward, kind in WAYS.items():
            for width in everyday.WIDTHS:
                name = width.case_name(mask, is_backward=is_backward)
                sizes = {"tokens": everyday.WIDTH_BATCH * n, "heads": heads, "d_v": width.d_v}
                yield _case(name, mask, width.d, n, kind=kind, **sizes)


def _wide() -> Iterator[BenchCase]:
    """Widths of Gemma-4's global layers and below, with their heads."""
    for prefix, kind in (("wide-", "attention"), ("bwd-wide-", "backward")):
        for d, mask, n in (
            *((d, "full", 16384) for d in (512, 384, 320)),
            (512, "causal", 8192),
        ):
            yield _dense(d, mask, n, prefix, tokens=n, heads=16, heads_kv=2, kind=kind)


def _cudnn(case_name: str, name: str, width: everyday.Width, n: int, **fields: Any) -> BenchCase:
    """A mask that is measured beside `cudnn.flex_attention`, by its name in `cudnn_cases.MASKS`;
    ours is told it as a user would: by flags, else columns, else mask_mod with block lists."""
    mask = cudnn_cases.BENCHMARK.get(name, name)
    form = "mask_mod" if mask in masks.BEYOND_COLUMNS else "columns"
    fields = {
        "tokens": cudnn_cases.TOKENS,
        "d_v": width.d_v,
        "heads": cudnn_cases.HIDDEN // width.d_v,
        "window": cudnn_cases.window(name, n),
        "form": "native" if mask in NATIVE else form,
        "draw": cudnn_cases.draw(name, n),
    } | fields
    return _case(case_name, mask, width.d, n, **fields)


def _cudnn_table() -> Iterator[BenchCase]:
    for width in cudnn_cases.WIDTHS:
        for size, n in cudnn_cases.SIZES.items():
            for name in cudnn_cases.MASKS:
                for is_backward, kind in WAYS.items():
                    case_name = cudnn_cases.case_name(name, width, size, is_backward=is_backward)
                    yield _cudnn(case_name, name, width, n, kind=kind)
    width, kv = cudnn_cases.WIDTHS[0], cudnn_cases.GROUPED_KV_HEADS
    lengths = document_lengths(16, cudnn_cases.TOKENS, 256, 8192, seed=1)
    sizes = {"tokens": cudnn_cases.TOKENS, "heads": cudnn_cases.HIDDEN // 128}
    for is_backward, kind in WAYS.items():
        for name in cudnn_cases.GROUPED:
            case_name = cudnn_cases.grouped_name(name, is_backward=is_backward)
            yield _cudnn(case_name, name, width, cudnn_cases.SIZES["8k"], kind=kind, heads_kv=kv)
        for heads_kv in cudnn_cases.PACKED_KV_HEADS:
            name = cudnn_cases.packed_name(heads_kv, is_backward=is_backward)
            yield _packed(name, lengths, heads_kv=heads_kv, kind=kind, **sizes)
    for size, n in cudnn_cases.SIZES.items():
        for name in filter(cudnn_cases.is_planned, cudnn_cases.MASKS):
            case_name = cudnn_cases.plan_name(name, size)
            yield _cudnn(case_name, name, width, n, kind="prep", tokens=n)


_ALL = (
    *(_dense(128, mask, n) for mask in ("full", "causal") for n in (8192, 32768)),
    *(_dense(64, mask, n) for mask in ("full", "causal") for n in (8192, 32768)),
    *(_dense(256, mask, 8192) for mask in ("full", "causal")),
    *(_dense(d, "sliding_window", n) for d in (128, 64) for n in (8192, 32768)),
    *(
        _packed(f"d128-varlen-kv{kv}", document_lengths(32, TOKENS, 256, 8192, seed=1), heads_kv=kv)
        for kv in (32, 8)
    ),
    *(_dense(128, "causal", n) for n in (512, 1024, 2048)),
    _case("host-128", "causal", 128, 128, tokens=128, kind="host"),
    _case("host-128-train", "causal", 128, 128, tokens=128, kind="host_train"),
    *(
        # of a small model, with as many heads as the wider head dimension has
        _case(
            f"host-step-d{d}-{_size(n)}",
            "causal",
            d,
            n,
            tokens=STEP_TOKENS,
            heads=HIDDEN // 128,
            kind="host_step",
        )
        for d in STEP_DIMS
        for n in STEP_LENGTHS
    ),
    _case("extra-d192v128-causal-8k", "causal", 192, 8192, d_v=128),
    _case("extra-d128-gqa8-causal-8k", "causal", 128, 8192, heads_kv=8),
    _case("extra-d128-fp16-causal-8k", "causal", 128, 8192, dtype="float16"),
    _case("extra-d128-softcap-causal-8k", "causal", 128, 8192, softcap=30.0),
    _case("cold-128", "causal", 128, 128, tokens=128, kind="cold"),
    *(
        _masked(f"mask-d{d}-{_size(n)}-{mask}", d, mask, n)
        for d in (128, 64)
        for n in (8192, 32768, 131072)
        for mask in masks.MASKS
    ),
    *(case for d in (128, 64) for n in (8192, 32768, 131072) for case in _mods(d, n)),
    *(_masked(f"meta-128k-{mask}", 128, mask, 131072, kind="prep") for mask in PREPARED),
    *(_masked(f"sweep-32k-{mask}", 128, mask, 32768, kind="sweep") for mask in SWEPT),
    *_backwards(),
    *map(_memory, REMEMBERED),
    *_memory_backwards(),
    *_everyday(),
    *_cudnn_table(),
    *_wide(),
)
CASES: dict[str, BenchCase] = {case.name: case for case in _ALL}


def select(patterns: Sequence[str]) -> tuple[str, ...]:
    """Names that match any glob, in the order of the list. ValueError where one matches nothing."""
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise ValueError(f"no case matches {pattern!r}; --list names them")
    return tuple(n for n in CASES if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def make_tensors(case: BenchCase, device: str, seed: int) -> CaseTensors:
    """Normal random inputs of `case` on `device`, the same for the same seed and device."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    rows = (case.tokens,) if case.varlen else (case.batch, case.n)
    keys = (case.batch, case.n_k) if case.n_k else rows

    def draw(rows: tuple[int, ...], heads: int, width: int) -> torch.Tensor:
        shape = (*rows, heads, width)
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    cu_seqlens = None
    if case.varlen:
        ends = torch.tensor((0, *case.lengths), device=device).cumsum(0)
        cu_seqlens = ends.to(torch.int32)
    q = draw(rows, case.heads, case.d)
    k, v = (draw(keys, case.heads_kv, width) for width in (case.d, case.d_v))
    sink = None
    if case.sink:
        # near the LSE of a hundred keys, so that a result without it is wrong by much
        noise = torch.randn(case.heads, device=device, generator=generator)
        sink = SINK_LEVEL + noise
    return CaseTensors(q, k, v, cu_seqlens, sink=sink)
