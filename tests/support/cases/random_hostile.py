"""Whole calls with hostile values, drawn from a seed: each is to be right, or refused by name.

What is hostile: additive masks of any finite size; NaN in what must not be read (rows past
seqused_*, packed rows of no sequence, dout of queries that see nothing); tensors that are
misaligned, overlap themselves or have odd strides; scales of any sign; shifted windows; aux tensors
of any dtype; slips, which must be refused. `hostile_runs` says what is right. Nothing here uses
the package but for the callables' own texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from cases import BF16, FP16, FP32, FP64
from dense_masks import DenseMasks
from mask_cases import (
    COLUMNS,
    FULL,
    PARTIAL,
    Extents,
    MaskRecipe,
    ScoreRecipe,
    lists_of,
    make_columns,
    pick,
    states_of,
)
from mask_cases import MASK_MODS as PLAIN_MASK_MODS
from oracle import rule_of
from torch import Tensor
from torch.utils._pytree import tree_map_only

LENGTHS = (0, 1, 2, 63, 64, 127, 128, 129)
FP32_MAX = torch.finfo(FP32).max
EXTREMES = (-1e10, -1e20, -1e30, -FP32_MAX, float(torch.finfo(BF16).min), 1e10, 1e30, FP32_MAX)
NAN, INF = float("nan"), float("inf")


# -- callables: the CuTe text, and the same in torch ---------------------------------------------


def _table(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return score + aux[-1][q[0], k[0]].to(Float32)


WRAPPABLE = ("learnable_sink", "aux_tensors")


class Wrapped(Tensor):
    """A tensor in another, which only sees operators: a subclass without memory of its own."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> Wrapped:
        wrapped: Any = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), storage_offset=plain.storage_offset(),
            dtype=plain.dtype, device=plain.device,
        )  # fmt: skip
        wrapped.plain = plain
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda x: x.plain, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, function(*args, **kwargs))


def _restrided(generator: torch.Generator, table: Tensor) -> Tensor:
    """The same, its last dimension not innermost at times, or its first one of stride 0."""
    columns, rows = table.mT.contiguous().mT, table[:1].expand_as(table)
    return pick(generator, columns, rows, table, table)


def _reads(dtype: torch.dtype) -> MaskRecipe:
    def aux(extents: Extents, generator: torch.Generator) -> Tensor:
        shape = max(extents.seqlen_q, 1), max(extents.seqlen_k, 1)
        return _restrided(generator, (torch.rand(shape, generator=generator) < 0.7).to(dtype))

    return MaskRecipe(
        lambda b, h, q, k, aux: aux[0][q[0], k[0]] != 0,
        lambda b, h, q, k, aux: aux[0][q, k] != 0,
        aux,
    )


def _adds(dtype: torch.dtype, per_head: bool = False) -> ScoreRecipe:
    """Of normal numbers, or of additive masks of any finite size and -inf."""

    def aux(extents: Extents, generator: torch.Generator) -> Tensor:
        rows = extents.heads_q if per_head else max(extents.seqlen_q, 1)
        shape = rows, max(extents.seqlen_k, 1)
        largest = torch.finfo(dtype).max
        sizes = torch.tensor([max(-largest, min(x, largest)) for x in EXTREMES], dtype=FP32)
        normal = torch.randn(shape, generator=generator)
        drawn = sizes[torch.randint(len(sizes), shape, generator=generator)]
        some = torch.rand(shape, generator=generator)
        table = pick(
            generator,
            *(normal, normal, torch.where(some < 0.5, normal, pick(generator, *sizes[:5]))),
            torch.where(some < 0.5, normal, drawn),
            pick(generator, *sizes).expand(shape),
            torch.where(some < 0.9, drawn, -INF),
        )
        return _restrided(generator, table.to(dtype))

    if per_head:
        return ScoreRecipe(
            lambda score, b, h, q, k, aux: score + aux[-1][h[0], k[0]],
            lambda s, b, h, q, k, aux: s + aux[-1][h, k],
            aux,
        )
    return ScoreRecipe(_table, lambda s, b, h, q, k, aux: s + aux[-1][q, k].float(), aux)


def _in_float32(recipe: ScoreRecipe) -> ScoreRecipe:
    """A score_mod gets and returns float32."""
    dense = recipe.dense
    return recipe._replace(dense=lambda s, *place: dense(s.float(), *place).to(s.dtype))


MASK_MODS = {
    "documents": PLAIN_MASK_MODS["documents"],
    "parity": MaskRecipe(
        lambda b, h, q, k, aux: (q * 7 + k * 13 + h) % 5 != 0,
        lambda b, h, q, k, aux: (q * 7 + k * 13 + h) % 5 != 0,
    ),
    "blind": MaskRecipe(
        lambda b, h, q, k, aux: q % 3 != 0, lambda b, h, q, k, aux: (q % 3 != 0) & (k >= 0)
    ),
    "bool": _reads(torch.bool),
    "uint8": _reads(torch.uint8),
    "int8": _reads(torch.int8),
    "int16": _reads(torch.int16),
    "uint32": _reads(torch.uint32),
    "int64": _reads(torch.int64),
}
SCORE_MODS = {
    name: _in_float32(recipe)
    for name, recipe in {
        "table32": _adds(FP32),
        "table16": _adds(FP16),
        "tableb16": _adds(BF16),
        "head_table": _adds(FP32, per_head=True),
        "alibi": ScoreRecipe(
            lambda score, b, h, q, k, aux: score - abs(q[0] - k[0]) * 0.25,
            lambda s, b, h, q, k, aux: s - 0.25 * (q - k).abs(),
        ),
        "scaled": ScoreRecipe(
            lambda score, b, h, q, k, aux: score * 1.25, lambda s, b, h, q, k, aux: s * 1.25
        ),
    }.items()
}
# Callables of a call, mask_mod and score_mod; a few pairs, as each costs a compilation.
PROGRAMS: tuple[tuple[str | None, str | None], ...] = (
    *((None, None),) * 8,
    *((mask, None) for mask in MASK_MODS),
    *((None, score) for score in SCORE_MODS),
    *((None, "table32"),) * 3,
    ("documents", "table32"),
    ("blind", "alibi"),
)


# -- what decides the code of a kernel -----------------------------------------------------------


class Frame(NamedTuple):
    """Everything of a call that changes generated code.

    sides: which sides the window has, "", "l", "r" or "lr". packed, used: of which of q and k
    ("", "q", "k", "qk") there are cu_seqlens and seqused. column: a recipe of `mask_cases`.
    """

    dtype: torch.dtype = BF16
    head_dim: int = 64
    head_dim_v: int = 64
    heads_q: int = 4
    heads_kv: int = 2
    causal: bool = False
    sides: str = ""
    softcap: bool = False
    sink: torch.dtype | None = None
    packed: str = ""
    used: str = ""
    column: str | None = None
    blocks: tuple[int, int] | None = None
    mask_mod: str | None = None
    score_mod: str | None = None


def draw_frame(rng: random.Random) -> Frame:
    """For the CPU, where code depends on callables and their aux tensors only."""
    heads_kv = rng.choice((1, 2))
    column = rng.choice((None, None, None, *COLUMNS))
    mask_mod, score_mod = rng.choice(PROGRAMS)
    dims = rng.choice(((8, 8), (16, 16), (40, 16), (64, 64), (24, 72)))
    return Frame(
        rng.choice((BF16, FP16, FP32, FP64)),
        *dims,
        heads_kv * rng.choice((1, 2, 3)),
        heads_kv,
        (column or "").endswith("1") or rng.random() < 0.4,
        rng.choice(("", "", "l", "r", "lr")),
        rng.random() < 0.2,
        rng.choice((None, None, BF16, FP16, FP32, FP64)),
        rng.choice(("", "", "q", "k", "qk", "qk")),
        rng.choice(("", "", "q", "k", "qk")),
        column,
        rng.choice((None, None, None, (64, 64), (48, 80), (128, 128))),
        mask_mod,
        score_mod,
    )


# For a GPU: each is a kernel or two in either direction.
GPU_FRAMES = (
    Frame(head_dim=128, head_dim_v=128, heads_q=2, causal=True, packed="qk", used="qk"),
    Frame(heads_q=2, sides="lr", used="k"),
    Frame(dtype=FP16, causal=True, sides="l", sink=FP32, packed="k"),
    Frame(head_dim=128, head_dim_v=128, heads_q=2, score_mod="table32"),
    Frame(heads_q=2, causal=True, softcap=True, used="k", score_mod="tableb16"),
    Frame(
        head_dim=128, head_dim_v=128, heads_q=2, packed="qk", used="qk", column="stepped2",
    ),
    Frame(heads_q=2, used="k", blocks=(64, 64), mask_mod="blind"),
    Frame(
        FP16, 128, 128, 2, 2, causal=True, sink=BF16, mask_mod="documents", score_mod="table32",
    ),
    Frame(heads_q=2, causal=True, column="random1", mask_mod="uint8"),
    Frame(head_dim=72, head_dim_v=40, heads_q=2, causal=True, sides="r", packed="q", sink=FP32),
)  # fmt: skip


# -- a call --------------------------------------------------------------------------------------


@dataclass
class HostileCall:
    """function(q, k, v, **keywords), keywords with the names of the public functions.

    dense: what the oracle reads of masks and callables, beside causal masking and the window. dout,
    dlse: gradients of a loss by out
    and lse. by_autograd: by a public function, else by the two host calls, the forward writing
    into `out` if there is one. wrapped: arguments that are to be given as `Wrapped`. slip: what
    must be refused; None where the call is to be right or refused. features: what was drawn.
    """

    name: str
    frame: Frame
    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, Any]
    dout: Tensor
    dlse: Tensor
    dense: DenseMasks
    by_autograd: bool = True
    out: Tensor | None = None
    wrapped: tuple[str, ...] = ()
    slip: str | None = None
    features: tuple[str, ...] = ()

    def plain_keywords(self) -> dict[str, Any]:
        """Those of the oracle, whose lengths, softcap and sink are the call's."""
        sides = (f"{name}_{side}" for name in ("cu_seqlens", "seqused") for side in "qk")
        scale = self.keywords["softmax_scale"]
        left, right = (None if x == -1 else x for x in self.keywords["window_size"])
        return {
            **{name: self.keywords.get(name) for name in ("softcap", "learnable_sink", *sides)},
            "softmax_scale": self.frame.head_dim**-0.5 if scale is None else float(scale),
            "causal": self.frame.causal, "window_size_left": left, "window_size_right": right,
        }  # fmt: skip

    def visible(self, batch: int, head: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k); lengths are those in use."""
        rule = rule_of(self.q, **self.plain_keywords())
        band = rule.visible(seqlen_q, seqlen_k, self.q.device)
        return band & self.dense.visible(batch, head, seqlen_q, seqlen_k)

    def describe(self) -> str:
        shapes = [f"{tuple(x.shape)} strides {x.stride()}" for x in (self.q, self.k, self.v)]
        settings = {
            name: x if isinstance(x, int | float | str) or name == "window_size" else type(x)
            for name, x in self.keywords.items()
            if x is not None
        }
        lengths = {
            name: x.tolist()
            for name, x in self.keywords.items()
            if isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point()
        }
        return f"{self.name} {self.frame} {shapes} {settings | lengths} {self.features}"


def draw_call(
    seed: int, number: int, frame: Frame | None = None, device: torch.device | str = "cpu"
) -> HostileCall:
    """Call `number` of a seed; any of them by itself. frame: drawn if it is None."""
    rng = random.Random(f"{seed}-{number}")
    return _Draw(rng, frame or draw_frame(rng), torch.device(device)).call(f"{seed}-{number}")


class _Draw:
    """The tensors of a call, one after the other."""

    def __init__(self, rng: random.Random, frame: Frame, device: torch.device) -> None:
        self.rng, self.frame, self.device = rng, frame, device
        self.generator = torch.Generator().manual_seed(rng.randrange(2**32))
        self.features: list[str] = []
        self.tails = {side: rng.choice((0, 0, 1, 70)) for side in "qk"}
        batch = rng.choice((1, 1, 2, 3, 3, 0) if device.type == "cpu" else (1, 2, 3))
        same = rng.random() < 0.4
        self.slots: dict[str, list[int]] = {}
        self.used: dict[str, list[int]] = {}
        for side in "qk":
            drawn = [rng.choice(LENGTHS) for _ in range(batch)]
            if side not in frame.packed:
                drawn = [rng.choice(LENGTHS)] * batch
            if side == "k" and same and (side in frame.packed) == ("q" in frame.packed):
                drawn = self.slots["q"]
            self.slots[side] = self.used[side] = drawn
            if side in frame.used:
                self.used[side] = [rng.randint(0, n) for n in drawn]

    def call(self, name: str) -> HostileCall:
        frame, rng = self.frame, self.rng
        keywords: dict[str, Any] = {
            "softmax_scale": rng.choice((None, None, 0.3, 1.0, 0.0, -0.2, torch.tensor(0.2))),
            "causal": frame.causal,
            "window_size": tuple(self.side(side) for side in "lr"),
            "softcap": rng.choice((1.5, 20.0)) if frame.softcap else 0.0,
        }
        sink = self.normal(frame.heads_q)
        keywords["learnable_sink"] = None if frame.sink is None else self.on(sink.to(frame.sink))
        for side in "qk":
            self.add_lengths(keywords, side)
        call = HostileCall(
            name,
            frame,
            self.operand("q", frame.heads_q, frame.head_dim),
            self.operand("k", frame.heads_kv, frame.head_dim),
            self.operand("k", frame.heads_kv, frame.head_dim_v),
            keywords,
            *(torch.empty(0),) * 2,
            DenseMasks(frame, None, [], None, self.device, (MASK_MODS, SCORE_MODS)),
        )
        self.add_masks(call)
        self.add_gradients(call)
        if rng.random() < 0.1 and self.slots["q"] and 0 not in self.rows("q"):
            call.slip, change = rng.choice(self.slips(call))
            change()
            self.features.append(f"slip {call.slip}")
        elif rng.random() < 0.3 and (frame.score_mod is None or self.device.type == "cpu"):
            # beside a score_mod autograd may have kernels of its own, so on a GPU it has all
            call.by_autograd = False
            self.add_out(call)
        elif rng.random() < 0.1:
            names = ["q", "k", "v", *(x for x in WRAPPABLE if keywords.get(x) is not None)]
            call.wrapped = tuple(x for x in names if rng.random() < 0.4)
            self.features.append(f"wrapped {call.wrapped}")
        call.features = tuple(self.features)
        return call

    # -- arguments

    def side(self, side: str) -> int | None:
        if side not in self.frame.sides:
            return self.rng.choice((None, -1))
        return self.rng.choice((0, 1, 20, 100, 100, -2, -10, -70))

    def add_lengths(self, keywords: dict[str, Any], side: str) -> None:
        slots = self.slots[side]
        if side in self.frame.packed:
            edges = (0, *accumulate(slots))
            keywords[f"cu_seqlens_{side}"] = self.int32(edges)
            keywords[f"max_seqlen_{side}"] = max(slots, default=0)
        if side in self.frame.used:
            keywords[f"seqused_{side}"] = self.int32(self.used[side])

    def rows(self, side: str) -> tuple[int, ...]:
        """The extents of q or k but heads and head_dim."""
        slots = self.slots[side]
        if side not in self.frame.packed:
            return len(slots), (slots[0] if slots else 5)
        return (sum(slots) + self.tails[side],)

    def unread(self, side: str) -> Tensor:
        """Bool, `rows` of a side: which belong to no sequence, or lie past those in use."""
        unread = torch.ones(self.rows(side), dtype=torch.bool)
        edges = [0, *accumulate(self.slots[side])]
        for i, used in enumerate(self.used[side]):
            if side in self.frame.packed:
                unread[edges[i] : edges[i] + used] = False
            else:
                unread[i, :used] = False
        return unread

    def operand(self, side: str, heads: int, dim: int) -> Tensor:
        x = self.normal(*self.rows(side), heads, dim).to(self.frame.dtype)
        unread = self.unread(side)
        kinds: tuple[str, ...] = ("plain", "plain", "shifted", "padded", "last", "strided", "outer")
        if not unread.any():
            kinds += ("heads", "overlapping")
        kind = self.rng.choice(kinds)
        if unread.any():
            x[unread] = self.rng.choice((NAN, INF, float(torch.finfo(x.dtype).max)))
            self.features.append("garbage")
        self.features.append(kind)
        return view_of(self.on(x), kind)

    def add_masks(self, call: HostileCall) -> None:
        frame, rng, keywords = self.frame, self.rng, call.keywords
        longest = {side: max(self.slots[side], default=0) for side in "qk"}
        for side in "qk":
            if side not in frame.packed:
                longest[side] = self.rows(side)[1]
        batch = len(self.slots["q"])
        extents, aux = Extents(batch, frame.heads_q, longest["q"], longest["k"]), list[Tensor]()
        for table, name, keyword in (
            (MASK_MODS, frame.mask_mod, "mask_mod"),
            (SCORE_MODS, frame.score_mod, "score_mod"),
        ):
            if name is not None:
                mod = table[name]
                keywords[keyword] = mod.cute
                if mod.aux is not None:
                    aux.append(self.on_with_strides(mod.aux(extents, self.generator)))
        if aux:
            keywords["aux_tensors"] = aux if rng.random() < 0.5 else tuple(aux)
        call.dense = replace(call.dense, aux=aux)
        if frame.column is not None and batch:
            heads = rng.choice((1, frame.heads_kv, frame.heads_q))
            recipe, packed = COLUMNS[frame.column], "k" in frame.packed
            lengths_q = self.slots["q"] if "q" in frame.packed else [longest["q"]] * batch
            lengths_k = self.slots["k"] if packed else [longest["k"]] * batch
            seed = rng.randrange(2**32)
            columns = make_columns(recipe, heads, lengths_q, lengths_k, seed)
            if not packed and rng.random() < 0.3:
                columns = columns[:1]
            columns = [self.on(x) for x in columns]
            call.dense = replace(call.dense, columns=columns)
            indices = torch.stack(columns) if not packed else torch.cat(columns, 1)[None]
            if packed and (tail := call.k.shape[0] - indices.shape[2]):
                rest = indices.new_full((1, heads, tail, indices.shape[3]), -(2**30))
                indices = torch.cat([indices, rest], 2)
            keywords["startend_row_indices"] = indices
            if call.q.shape[: call.q.dim() - 2].numel() < call.k.shape[: call.k.dim() - 2].numel():
                # a tensor does not tell its rows
                from flash_mask_cute import ColumnMask

                causal = bool(keywords["causal"])
                keywords["startend_row_indices"] = ColumnMask(indices, causal, seqlen_q="any")
        if frame.blocks is not None:
            self.add_lists(call, longest)

    def add_lists(self, call: HostileCall, longest: dict[str, int]) -> None:
        """Shared by all batch entries and heads."""
        from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch

        blocks = self.frame.blocks
        assert blocks is not None
        shape = longest["q"], longest["k"]
        dense = torch.rand((shape[0] // 40 + 1, shape[1] // 40 + 1), generator=self.generator) < 0.6
        dense = dense.repeat_interleave(40, 0).repeat_interleave(40, 1)[: shape[0], : shape[1]]
        num_blocks = [-(-n // block) for n, block in zip(shape, blocks, strict=True)]
        states = torch.zeros(num_blocks, dtype=torch.int64)
        if states.numel():
            states = states_of(dense, blocks, self.rng)
        states = self.on(states)[None, None]
        call.dense = replace(call.dense, states=states)
        partial, full = lists_of(states, PARTIAL), lists_of(states, FULL)
        call.keywords["block_sparse_tensors"] = BlockSparseTensorsTorch(
            *partial, *full, block_size=blocks
        )

    def add_gradients(self, call: HostileCall) -> None:
        """NaN where a query is in no use or sees nothing; dout expanded at times."""
        frame, rng = self.frame, self.rng
        rows = self.rows("q")
        dout = self.normal(*rows, frame.heads_q, frame.head_dim_v).to(frame.dtype)
        dlse = self.normal(*rows, frame.heads_q)
        garbage = rng.choice((NAN, INF))
        unread = self.unread("q")
        dout[unread] = garbage
        dlse[unread] = garbage
        edges = [0, *accumulate(self.slots["q"])]
        for i, lengths in enumerate(zip(self.used["q"], self.used["k"], strict=True)):
            here = slice(edges[i], edges[i] + lengths[0]) if "q" in frame.packed else i
            for head in range(frame.heads_q):
                blind = ~call.visible(i, head, *lengths).any(1).cpu()
                if blind.any() and rng.random() < 0.7:
                    self.features.append("blind dout")
                    of_head = dout[here][: lengths[0], head]
                    of_head[blind] = garbage
                    if frame.sink is None:
                        dlse[here][: lengths[0], head][blind] = garbage
        dout = self.on(dout)
        call.dout = view_of(dout, rng.choice(("plain", "shifted", "padded", "last", "outer")))
        call.dlse = self.on(dlse).transpose(-1, -2)

    def add_out(self, call: HostileCall) -> None:
        """None, or memory full of NaN, of its own or not."""
        like = call.dout.shape
        buffer = torch.full((2, *like), NAN, dtype=call.q.dtype, device=self.device)
        kind = self.rng.choice(("none", "none", "fresh", "shifted", "itself", "q"))
        if kind == "itself" and buffer.numel() and like[-2] > 1:
            call.out, call.slip = buffer[0, ..., :1, :].expand(like), "out"
        elif kind == "q" and like == call.q.shape and call.q.numel():
            call.out, call.slip = call.q, "out"
        elif kind in ("fresh", "shifted"):
            call.out = view_of(buffer[0], "plain" if kind == "fresh" else "shifted")
        self.features.append(f"out {kind}")

    # -- slips

    def slips(self, call: HostileCall) -> list[tuple[str, Callable[[], None]]]:
        """Mistakes that must be refused, each by the argument that is wrong and what makes it."""
        keywords, frame = call.keywords, self.frame

        def put(name: str, value: Any) -> Callable[[], None]:
            return lambda: keywords.__setitem__(name, value)

        def swap(name: str, value: Any) -> Callable[[], None]:
            return lambda: setattr(call, name, value)

        other = FP16 if frame.dtype != FP16 else BF16
        found: list[tuple[str, Callable[[], None]]] = [
            ("k", swap("k", call.k.to(other))),
            ("v", swap("v", call.v.to(other))),
            ("q", swap("q", call.q.int())),
            ("k", swap("k", call.k[..., :0, :])),
            ("v", swap("v", call.v[..., :4])),
            ("q", swap("q", call.q[0])),
            ("q", swap("q", call.q[..., : frame.head_dim - 4])),
            ("causal", put("causal", 1)),
            ("softcap", put("softcap", -1.0)),
            ("softmax_scale", put("softmax_scale", NAN)),
            ("window_size", put("window_size", (2.5, None))),
            ("window_size", put("window_size", 3)),
            ("aux_tensors", put("aux_tensors", call.q)),
            ("mask_mod", put("mask_mod", "causal")),
            ("dropout_p", put("dropout_p", 0.1)),
            ("attn_mask", put("attn_mask", call.q)),
            ("sofmax_scale", put("sofmax_scale", 1.0)),
            ("learnable_sink", put("learnable_sink", self.on(torch.zeros(frame.heads_q + 1)))),
            ("startend_row_indices", put("startend_row_indices", call.q)),
            ("block_sparse_tensors", put("block_sparse_tensors", call.q)),
        ]
        on_cpu = self.device.type == "cpu"
        if on_cpu and self.reaches_last_column(call):
            found += [("aux_tensors", put("aux_tensors", [keywords["aux_tensors"][0][:, :-1]]))] * 4
        for side in "qk":
            name = f"cu_seqlens_{side}"
            if side in frame.packed:
                found.append((name, put(name, keywords[name].long())))
                found.append((f"max_seqlen_{side}", put(f"max_seqlen_{side}", -1)))
            if side in frame.packed and on_cpu:
                found.append((name, put(name, keywords[name] + 1)))
            name = f"seqused_{side}"
            if side in frame.used:
                found.append((name, put(name, keywords[name].long())))
            if side in frame.used and on_cpu:
                found.append((name, put(name, keywords[name] + 1000)))
        return found

    def reaches_last_column(self, call: HostileCall) -> bool:
        """Whether the only aux tensor has a column for each key, and somebody sees the last."""
        aux = call.keywords.get("aux_tensors", ())
        table = aux[0] if len(aux) == 1 else None
        if table is None or call.frame.mask_mod == "documents" or table.shape[1] < 2:
            return False
        lengths = list(zip(self.used["q"], self.used["k"], strict=True))
        masks = (
            call.visible(i, head, *of_sequence)
            for i, of_sequence in enumerate(lengths)
            for head in range(call.frame.heads_q)
        )
        return any(x.shape[1] == table.shape[1] and bool(x[:, -1].any()) for x in masks)

    # -- numbers

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def on(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def on_with_strides(self, x: Tensor) -> Tensor:
        """`to` keeps no stride of 0."""
        if self.device.type == "cpu" or 0 not in x.stride():
            return x.to(self.device)
        return x[:1].to(self.device).expand_as(x)

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def view_of(x: Tensor, kind: str) -> Tensor:
    """A tensor like contiguous x in other memory; "heads" and "overlapping" have other values.

    "shifted" starts off 16 bytes, "padded" has rows of an odd length, "last" has its last dimension
    not innermost, "strided" every second element, "outer" heads before rows.
    """
    if x.numel() == 0 or kind == "plain":
        return x
    if kind == "shifted":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if kind == "padded":
        return torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]]
    if kind == "last":
        return x.mT.contiguous().mT
    if kind == "strided":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if kind == "outer":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "heads":
        return x[..., :1, :].expand_as(x)
    assert kind == "overlapping"
    # rows that begin 8 elements after each other
    strides = [8] * x.dim()
    strides[-1] = 1
    return x.flatten().as_strided(x.shape, strides)
