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
    """`count` lengths in [shortest, longest] that sum to `tokens`, the same on every machine.

    Raises ValueError where no such lengths exist.
    """
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


def _dense(
    d: int,
    mask: str,
    n: int,
    *,
    name: str = "",
    d_v: int = 0,
    heads_kv: int = 0,
    dtype: str = "bfloat16",
    softcap: float = 0.0,
    kind: str = "attention",
) -> BenchCase:
    d_v = d_v or d
    heads = HIDDEN // d_v
    return BenchCase(
        name=name or f"d{d}-{mask.replace('sliding_', '')}-{_size(n)}",
        mask=mask,
        d=d,
        d_v=d_v,
        n=n,
        tokens=TOKENS,
        heads=heads,
        heads_kv=heads_kv or heads,
        dtype=dtype,
        window=n // 16 if mask == "sliding_window" else None,
        softcap=softcap,
        kind=kind,
    )


def _varlen(heads_kv: int) -> BenchCase:
    lengths = document_lengths(32, TOKENS, 256, 8192, seed=1)
    return BenchCase(
        name=f"d128-varlen-kv{heads_kv}",
        mask="varlen_causal",
        d=128,
        d_v=128,
        n=max(lengths),
        tokens=TOKENS,
        heads=32,
        heads_kv=heads_kv,
        doc_lengths=lengths,
    )


def _tiny(name: str, kind: str) -> BenchCase:
    return BenchCase(name, "causal", 128, 128, 128, 128, 32, 32, kind=kind)


def _step(d: int, n: int) -> BenchCase:
    """Of a small model: 4096 tokens, causal, as many heads as the wider head dimension has."""
    heads = HIDDEN // 128
    return BenchCase(
        f"host-step-d{d}-{_size(n)}", "causal", d, d, n, STEP_TOKENS, heads, heads, kind="host_step"
    )


def _masked(name: str, d: int, mask: str, n: int, **fields: Any) -> BenchCase:
    """A case of the FlashMask paper's size, said as a user would: by flags where there are any."""
    fields = {"form": "native" if mask in NATIVE else "columns"} | fields
    return BenchCase(
        name=name,
        mask=mask,
        d=d,
        d_v=d,
        n=n,
        tokens=TOKENS,
        heads=HIDDEN // d,
        heads_kv=HIDDEN // d,
        window=n // 16 if mask.endswith("sliding_window") else None,
        draw=None if mask in NATIVE else paper_draw(n, mask),
        **fields,
    )


def _mods(d: int, n: int) -> tuple[BenchCase, ...]:
    by_score = ((mod, "causal", mod, "native") for mod in SCORE_MODS if mod)
    by_mask = [(mask, mask, "", "mask_mod") for mask in LISTED]
    by_mask.append(("document-alone", "document", "", "mask_mod_alone"))
    return tuple(
        _masked(f"mod-d{d}-{_size(n)}-{name}", d, mask, n, score_mod=mod, form=form)
        for name, mask, mod, form in (*by_score, *by_mask)
    )


def _memory(n: int) -> BenchCase:
    """One sequence of as many documents at every length."""
    return BenchCase(
        name=f"memory-{_size(n)}-causal_document",
        mask="causal_document",
        d=128,
        d_v=128,
        n=n,
        tokens=n,
        heads=HIDDEN // 128,
        heads_kv=HIDDEN // 128,
        kind="memory",
        form="columns",
        draw=Draw(masks.draw_documents(n, masks.DOCUMENT_COUNTS[131072], seed=0)),
    )


def _memory_backwards() -> Iterator[BenchCase]:
    """Also of a mask that peers have a flag for."""
    for case in map(_memory, REMEMBERED_BACKWARD):
        name = case.name.replace("memory-", "memory-bwd-")
        yield replace(case, name=name, kind="memory_backward")
    yield _masked("memory-bwd-128k-causal", 128, "causal", TOKENS, kind="memory_backward")


def _backwards() -> Iterator[BenchCase]:
    """The backward of the cases above."""

    def dense(d: int, mask: str, n: int) -> BenchCase:
        name = f"bwd-d{d}-{mask.replace('sliding_', '')}-{_size(n)}"
        return _dense(d, mask, n, name=name, kind="backward")

    for d in (128, 64):
        yield from (dense(d, mask, n) for mask in ("full", "causal") for n in (8192, 32768))
    yield dense(128, "sliding_window", 8192)
    yield from (dense(256, mask, 8192) for mask in ("full", "causal"))
    for d in (128, 64):
        for n in (8192, 32768, 131072):
            for mask in masks.MASKS:
                yield _masked(f"bwd-mask-d{d}-{_size(n)}-{mask}", d, mask, n, kind="backward")
    for mask in ("causal", "document"):
        fields = {"kind": "backward", "deterministic": True}
        yield _masked(f"bwd-det-d128-8k-{mask}", 128, mask, 8192, **fields)
    for n in (8192, 32768):
        for mask in LISTED:
            fields = {"kind": "backward", "form": "mask_mod"}
            yield _masked(f"bwd-mod-d128-{_size(n)}-{mask}", 128, mask, n, **fields)
        fields = {"kind": "backward", "form": "mask_mod_alone"}
        yield _masked(f"bwd-mod-d128-{_size(n)}-document-alone", 128, "document", n, **fields)


def _shape(shape: everyday.Shape, *, is_backward: bool) -> BenchCase:
    masks_of = {"window": "sliding_window", "varlen causal": "varlen_causal"}
    return BenchCase(
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
        kind="backward" if is_backward else "attention",
        n_k=shape.seqlen_k,
        sink=shape.sink,
    )


def _width(width: everyday.Width, mask: str, *, is_backward: bool) -> BenchCase:
    return BenchCase(
        name=width.case_name(mask, is_backward=is_backward),
        mask=mask,
        d=width.d,
        d_v=width.d_v,
        n=everyday.WIDTH_TOKENS,
        tokens=everyday.WIDTH_BATCH * everyday.WIDTH_TOKENS,
        heads=everyday.WIDTH_HEADS,
        heads_kv=everyday.WIDTH_HEADS,
        kind="backward" if is_backward else "attention",
    )


def _everyday() -> Iterator[BenchCase]:
    """Each backward after its forward, widths of one mask and direction together."""
    ways = (False, True)
    yield from (_shape(shape, is_backward=way) for shape in everyday.SHAPES for way in ways)
    for mask in everyday.WIDTH_MASKS:
        for way in ways:
            yield from (_width(width, mask, is_backward=way) for width in everyday.WIDTHS)


def _cudnn(case_name: str, name: str, width: everyday.Width, n: int, **fields: Any) -> BenchCase:
    """A mask that is measured beside `cudnn.flex_attention`, by its name in `cudnn_cases.MASKS`;
    ours is told it as a user would: by flags, else columns, else mask_mod with block lists."""
    mask = cudnn_cases.BENCHMARK.get(name, name)
    form = "mask_mod" if mask in masks.BEYOND_COLUMNS else "columns"
    heads = cudnn_cases.HIDDEN // width.d_v
    return BenchCase(
        name=case_name,
        mask=mask,
        d=width.d,
        d_v=width.d_v,
        n=n,
        tokens=n if fields.get("kind") == "prep" else cudnn_cases.TOKENS,
        heads=heads,
        window=cudnn_cases.window(name, n),
        form="native" if mask in NATIVE else form,
        draw=cudnn_cases.draw(name, n),
        **({"heads_kv": heads} | fields),
    )


def _cudnn_packed(heads_kv: int, *, is_backward: bool) -> BenchCase:
    lengths = document_lengths(16, cudnn_cases.TOKENS, 256, 8192, seed=1)
    return BenchCase(
        name=cudnn_cases.packed_name(heads_kv, is_backward=is_backward),
        mask="varlen_causal",
        d=128,
        d_v=128,
        n=max(lengths),
        tokens=cudnn_cases.TOKENS,
        heads=cudnn_cases.HIDDEN // 128,
        heads_kv=heads_kv,
        doc_lengths=lengths,
        kind="backward" if is_backward else "attention",
    )


def _cudnn_table() -> Iterator[BenchCase]:
    ways = {False: "attention", True: "backward"}
    for width in cudnn_cases.WIDTHS:
        for size, n in cudnn_cases.SIZES.items():
            for name in cudnn_cases.MASKS:
                for way, kind in ways.items():
                    case_name = cudnn_cases.case_name(name, width, size, is_backward=way)
                    yield _cudnn(case_name, name, width, n, kind=kind)
    width, kv = cudnn_cases.WIDTHS[0], cudnn_cases.GROUPED_KV_HEADS
    for way, kind in ways.items():
        for name in cudnn_cases.GROUPED:
            case_name = cudnn_cases.grouped_name(name, is_backward=way)
            yield _cudnn(case_name, name, width, cudnn_cases.SIZES["8k"], kind=kind, heads_kv=kv)
        for heads_kv in cudnn_cases.PACKED_KV_HEADS:
            yield _cudnn_packed(heads_kv, is_backward=way)
    for size, n in cudnn_cases.SIZES.items():
        for name in filter(cudnn_cases.is_planned, cudnn_cases.MASKS):
            yield _cudnn(cudnn_cases.plan_name(name, size), name, width, n, kind="prep")


_ALL = (
    *(_dense(128, mask, n) for mask in ("full", "causal") for n in (8192, 32768)),
    *(_dense(64, mask, n) for mask in ("full", "causal") for n in (8192, 32768)),
    *(_dense(256, mask, 8192) for mask in ("full", "causal")),
    *(_dense(d, "sliding_window", n) for d in (128, 64) for n in (8192, 32768)),
    _varlen(32),
    _varlen(8),
    *(_dense(128, "causal", n) for n in (512, 1024, 2048)),
    _tiny("host-128", "host"),
    _tiny("host-128-train", "host_train"),
    *(_step(d, n) for d in STEP_DIMS for n in STEP_LENGTHS),
    _dense(192, "causal", 8192, d_v=128, name="extra-d192v128-causal-8k"),
    _dense(128, "causal", 8192, heads_kv=8, name="extra-d128-gqa8-causal-8k"),
    _dense(128, "causal", 8192, dtype="float16", name="extra-d128-fp16-causal-8k"),
    _dense(128, "causal", 8192, softcap=30.0, name="extra-d128-softcap-causal-8k"),
    _tiny("cold-128", "cold"),
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
