"""A grid of calls that plans are compared over: options in pairs, by shapes; metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from plan_edges import BACKWARD, FORWARD, edges
from planned import backward_call, forward_call
from torch import Tensor

from flash_mask_cute import BlockSparseTensorsTorch, SelectedBlocks
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.named_tuples import replaced

Options = dict[str, Any]


class Shape(NamedTuple):
    """Extents of a call, by the names of the layouts."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    @staticmethod
    def named(name: str) -> Shape:
        """Of SHAPES and LONG, or as `plan_edges` writes extents."""
        known = SHAPES | LONG
        if name in known:
            return known[name]
        *extents, heads, dims = name.split("x")
        of_q, of_kv = heads.split("/")
        d, _, dv = dims.partition("/")
        return Shape(*map(int, (*extents, of_q, of_kv, d, dv or d)))

    @property
    def q(self) -> tuple[int, ...]:
        return self.batch, self.seqlen_q, self.heads_q, self.head_dim

    @property
    def k(self) -> tuple[int, ...]:
        return self.batch, self.seqlen_k, self.heads_kv, self.head_dim

    @property
    def v(self) -> tuple[int, ...]:
        return *self.k[:3], self.head_dim_v


class PlannedCall(NamedTuple):
    """shape and options: their names, of which `call` is made."""

    shape: str
    options: tuple[str, ...]
    direction: Direction
    call: Callable[[], AttentionCall]


SHAPES = {
    "decode": Shape(16, 1, 4096, 8, 2, 128, 128),
    "decode-long": Shape(1, 1, 65536, 8, 2, 128, 128),
    "verify": Shape(4, 6, 4096, 16, 2, 128, 128),
    "chunk": Shape(2, 300, 4096, 8, 2, 128, 128),
    "train": Shape(2, 2048, 2048, 16, 4, 128, 128),
    "d64": Shape(1, 2048, 2048, 8, 8, 64, 64),
    "d96": Shape(1, 1024, 1024, 4, 4, 96, 96),
    "d192": Shape(1, 2048, 2048, 16, 4, 192, 128),
    "d256": Shape(1, 1024, 1024, 4, 1, 256, 256),
    "d512": Shape(1, 1024, 1024, 16, 2, 512, 512),
    "windows": Shape(256, 49, 49, 4, 4, 32, 32),
    "windows-343": Shape(160, 343, 343, 4, 4, 32, 32),
    "pairs": Shape(192, 384, 384, 4, 4, 32, 32),
    "empty": Shape(2, 0, 64, 4, 4, 64, 64),
}
# So long that a call looks for documents, in column intervals or in the bits of a mask_mod.
LONG = {"long": Shape(1, 32768, 32768, 32, 8, 64, 64)}
OF_LONG = ((), ("columns",), ("four-columns",), ("mask-mod",), ("ids",), ("causal", "ids"))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory that nobody touches."""
    return torch.empty(shape, dtype=dtype)


def _int32(*shape: int) -> Tensor:
    """Zeros: values of tensors on the CPU are checked."""
    return torch.zeros(shape, dtype=torch.int32)


# -- callables of the user -----------------------------------------------------------------------


def _minus_one(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score - 1.0


def _tanh(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass.cute.math import tanh  # type: ignore[attr-defined]

    return 20.0 * tanh(score / 20.0)


def _pair(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][h[0], q[0], k[0]]


def _slopes(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return score - aux[0][h[0]] * abs(q - k).to(Float32)


def _distances(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    import cutlass

    return score + aux[0][cutlass.max(cutlass.min(k[0] - q[0], 16), -16) + 16, h[0]]


def _axes(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Two tables, of the distance in rows of a grid that is 20 wide, and in columns."""
    rows = q[0] // 20 - k[0] // 20
    cols = (q[0] - q[0] // 20 * 20) - (k[0] - k[0] // 20 * 20)
    return score + aux[0][h[0], rows + 120] + aux[1][h[0], cols + 19]


def _window_table(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """A table of the distances in a window that is 7 wide, rows and columns together."""
    i, j = q[0], k[0]
    rows, cols = i // 7 - j // 7, (i - i // 7 * 7) - (j - j // 7 * 7)
    return score + aux[0][h[0], (rows + 60) * 13 + cols + 6]


def _fp32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


# What each score_mod takes, by the name of the option.
SCORE_MODS: Mapping[str, tuple[Callable[..., Any], Callable[[Shape], list[Tensor]]]] = {
    "minus": (_minus_one, lambda x: []),
    "tanh": (_tanh, lambda x: []),
    "pair": (_pair, lambda x: [empty(x.heads_q, x.seqlen_q, x.seqlen_k)]),
    "entry-pair": (
        lambda score, b, h, q, k, aux: score + aux[0][b[0], h[0], q[0], k[0]],
        lambda x: [empty(x.batch, x.heads_q, x.seqlen_q, x.seqlen_k)],
    ),
    "slopes": (_slopes, lambda x: [_fp32(x.heads_q)]),
    "key-bias": (
        lambda score, b, h, q, k, aux: score + aux[0][b[0], h[0], k[0]],
        lambda x: [_fp32(x.batch, x.heads_q, x.seqlen_k)],
    ),
    "distances": (_distances, lambda x: [empty(33, x.heads_q)]),
    "axes": (_axes, lambda x: [_fp32(x.heads_q, 241), _fp32(x.heads_q, 39)]),
    "window-table": (_window_table, lambda x: [_fp32(x.heads_q, 121 * 13)]),
}


# -- options ---------------------------------------------------------------------------------------


def _score_mod(name: str) -> Callable[[Shape], Options]:
    mod, aux = SCORE_MODS[name]
    return lambda x: {"score_mod": mod, "aux_tensors": aux(x) or None}


def _lists(x: Shape, block: tuple[int, int] = (128, 128)) -> Options:
    blocks = 1, 1, -(-x.seqlen_q // block[0])
    index = *blocks, -(-x.seqlen_k // block[1])
    tensors = _int32(*blocks), _int32(*index), _int32(*blocks), _int32(*index)
    return {"block_sparse_tensors_torch": BlockSparseTensorsTorch(*tensors, block)}


def _selected(x: Shape, block: int = 64, heads: int | None = None) -> Options:
    heads = x.heads_kv if heads is None else heads
    chosen = _int32(x.batch, heads, x.seqlen_q, 8)
    return {"block_sparse_tensors_torch": SelectedBlocks(chosen, block)}


def _pair_with(dtype: torch.dtype, x: Shape, **more: Any) -> Options:
    """A bias of all pairs that batch entries share, of this dtype, and a mask_mod of keys."""
    aux = [empty(x.heads_q, x.seqlen_q, x.seqlen_k, dtype=dtype), _int32(x.batch, x.seqlen_k)]
    return {"score_mod": _pair, "aux_tensors": aux, **more}


def _columns(mask: Any, x: Shape) -> Options:
    """The option with a mask that counts rows from 0."""
    rows = {} if x.seqlen_q == x.seqlen_k else {"q_start": 0}
    return {"startend_row_indices": mask, **rows}


def _lengths(side: str, x: Shape) -> Options:
    """All rows of the batch as packed sequences of one length."""
    seqlen = x.seqlen_q if side == "q" else x.seqlen_k
    starts = torch.arange(x.batch + 1, dtype=torch.int32) * seqlen
    return {f"cu_seqlens_{side}": starts, f"max_seqlen_{side}": seqlen}


# Of both directions. A function of the shape returns keywords of the host call.
COMMON: Mapping[str, Callable[[Shape], Options]] = {
    "causal": lambda x: {"causal": True},
    "left": lambda x: {"window_size_left": 127},
    "right": lambda x: {"window_size_right": 64},
    "softcap": lambda x: {"softcap": 30.0},
    "sink": lambda x: {"learnable_sink": _fp32(x.heads_q)},
    "columns": lambda x: _columns(_int32(1, 1, x.seqlen_k, 2), x),
    "four-columns": lambda x: _columns(ColumnMask(_int32(1, x.heads_kv, x.seqlen_k, 4), False), x),
    "documents": lambda x: _columns(
        ColumnMask(_int32(1, 1, x.seqlen_k, 1), True, documents=True), x
    ),
    "lists": _lists,
    "selected": _selected,
    "mask-mod": lambda x: {"mask_mod": lambda b, h, q, k, aux: (q - k) % 2 == 0},
    "mask-mod-by-head": lambda x: {"mask_mod": lambda b, h, q, k, aux: (q - k + h) % 2 == 0},
    "ids": lambda x: {
        "mask_mod": lambda b, h, q, k, aux: aux[0][b[0], q[0]] == aux[0][b[0], k[0]],
        "aux_tensors": [_int32(x.batch, x.seqlen_k)],
    },
    **{name: _score_mod(name) for name in SCORE_MODS},
    "used-q": lambda x: {"seqused_q": _int32(x.batch)},
    "used-k": lambda x: {"seqused_k": _int32(x.batch)},
    "packed-q": lambda x: _lengths("q", x),
    "packed-k": lambda x: _lengths("k", x),
    "start-5": lambda x: {"q_start": 5},
    "start-end": lambda x: {"q_start": "end"},
    "start-each": lambda x: {"q_start": _int32(x.batch)},
    "fp16": lambda x: {"dtype": torch.float16},
}
FORWARD_ONLY: Mapping[str, Callable[[Shape], Options]] = {
    "one-pass": lambda x: {"num_splits": 1},
    "splits-7": lambda x: {"num_splits": 7},
    "cut-512": lambda x: {"seqlen_k_per_split": 512},
    "cut-4096": lambda x: {"seqlen_k_per_split": 4096},
    "unpacked": lambda x: {"pack_gqa": False},
    "no-lse": lambda x: {"return_lse": False},
    "wide-out": lambda x: {"out": _fp32(*x.q[:3], x.head_dim_v)},
    "max-scores": lambda x: {"max_scores": _fp32(x.batch, x.heads_q, x.seqlen_q)},
    "lse-low": lambda x: {
        name: _fp32(x.batch, x.heads_q, x.seqlen_q) for name in ("lse", "lse_low")
    },
    "pages": lambda x: {"page_size": 64},
    "leftpad": lambda x: {"page_size": 16, "leftpad_k": _int32(x.batch)},
    "causal-each": lambda x: {"causal": _int32(x.batch)},
    "fp8": lambda x: {"dtype_kv": torch.float8_e4m3fn, "seqused_k": _int32(x.batch)},
    "fp8-scales": lambda x: {
        "dtype_kv": torch.float8_e4m3fn,
        "seqused_k": _int32(x.batch),
        "k_descale": _fp32(x.batch, x.heads_kv),
        "v_descale": _fp32(x.batch, x.heads_kv),
    },
    "recorded": lambda x: {"is_recorded": True},
    "tiles": lambda x: {"config": {"tile_n": 64}},
}
BACKWARD_ONLY: Mapping[str, Callable[[Shape], Options]] = {
    "in-order": lambda x: {"deterministic": True},
    "dsink": lambda x: {"learnable_sink": _fp32(x.heads_q), "dsink": _fp32(x.heads_q)},
    "dlse": lambda x: {"dlse": _fp32(x.batch, x.heads_q, x.seqlen_q)},
    "given-dq": lambda x: {"dq": empty(*x.q)},
    "strided-dk": lambda x: {"dk": empty(*x.k[:3], x.head_dim + 4)[..., : x.head_dim]},
    "no-daux": lambda x: {"daux": None},
    "common-keys": lambda x: {**_lengths("q", x), "shared_keys": True},
    "group-splits": lambda x: {"config": {"group_splits": 2}},
}


# Of edges alone; `_option` makes others by a number in their names.
OF_EDGES: Mapping[str, Callable[[Shape], Options]] = {
    "packed": lambda x: {"pack_gqa": True},
    "ctas-2": lambda x: {"config": {"cta_pair": True}},
    "ctas-1": lambda x: {"config": {"cta_pair": False}},
    "no-skips": lambda x: {"config": {"skip_blocks": False}},
    "stages": lambda x: {"config": {"num_stages": 2}},
    "selected-by-head": lambda x: _selected(x, 128, x.heads_q),
    "selected-shared": lambda x: _selected(x, 128, 1),
    "pair-fp32": lambda x: _pair_with(torch.float32, x),
    "pair-uint8": lambda x: _pair_with(torch.uint8, x),
    "pair-bool": lambda x: _pair_with(torch.bool, x),
    "pair-int64": lambda x: _pair_with(torch.int64, x),
    "pair-keys": lambda x: _pair_with(
        torch.float32, x, mask_mod=lambda b, h, q, k, aux: aux[1][b[0], k[0]] != 0
    ),
}


def _option(name: str, known: Mapping[str, Callable[[Shape], Options]], x: Shape) -> Options:
    """Of a table, or with numbers in its name: lists-64x48, selected-16, left-511, splits-2."""
    if name in known:
        return known[name](x)
    kind, _, numbers = name.partition("-")
    sizes = [int(n) for n in numbers.split("x")]
    if kind == "lists":
        return _lists(x, (sizes[0], sizes[1]))
    if kind == "selected":
        return _selected(x, sizes[0])
    return {{"left": "window_size_left", "splits": "num_splits"}[kind]: sizes[0]}


def _packed(name: str, given: Any) -> Any:
    """An argument of dense queries, as packed ones have it."""
    if name in ("lse", "lse_low", "dlse", "max_scores"):
        return given.transpose(0, 1).flatten(1)
    if isinstance(given, SelectedBlocks):
        return given._replace(indices=given.indices.transpose(0, 1).flatten(1, 2))
    return given.flatten(0, 1) if name in ("out", "dq") else given


def make_call(shape: Shape, direction: Direction, options: list[Options]) -> AttentionCall:
    """The call with these keywords; of a backward, all aux tensors of a score_mod are trained.
    dtype, dtype_kv, page_size, shared_keys and is_recorded say how the tensors are made."""
    keywords: Options = {}
    for option in options:
        keywords |= option
    kind = keywords.pop("dtype", torch.bfloat16)
    kind_kv = keywords.pop("dtype_kv", kind)
    q, k, v = empty(*shape.q, dtype=kind), *(empty(*x, dtype=kind_kv) for x in (shape.k, shape.v))
    if (size := keywords.pop("page_size", None)) is not None:
        pages = -(-shape.seqlen_k // size)
        k, v = (empty(shape.batch * pages, size, *x.shape[2:], dtype=kind_kv) for x in (k, v))
        keywords["page_table"] = _int32(shape.batch, pages)
        keywords.setdefault("seqused_k", _int32(shape.batch))
    if "lse_low" in keywords:
        keywords.setdefault("score_mod", _minus_one)
    if "cu_seqlens_q" in keywords:
        q = q.flatten(0, 1)
        keywords = {name: _packed(name, given) for name, given in keywords.items()}
    if keywords.pop("shared_keys", False):
        k, v = k[:1], v[:1]
    elif "cu_seqlens_k" in keywords and size is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        if "dk" in keywords:
            keywords["dk"] = keywords["dk"].flatten(0, 1)
    is_recorded = keywords.pop("is_recorded", False)
    operands = [q, k, v]
    if direction is Direction.BACKWARD:
        out = empty(*q.shape[:-1], shape.head_dim_v, dtype=kind)
        operands += [out, torch.empty_like(out), _fp32(*out.shape[:-1]).mT.contiguous()]
        if keywords.get("score_mod") is not None:
            aux = keywords.get("aux_tensors") or ()
            wanted = [torch.empty_like(x) if x.is_floating_point() else None for x in aux]
            keywords.setdefault("daux", wanted or None)
    make = forward_call if direction is Direction.FORWARD else backward_call
    call = make(*operands, **keywords)
    return replaced(call, options=replaced(call.options, is_recorded=is_recorded))


def _planned(direction: Direction, shape: str, *names: str) -> PlannedCall:
    known = {**COMMON, **(FORWARD_ONLY if direction is Direction.FORWARD else BACKWARD_ONLY)}
    known = {**OF_EDGES, **known}
    extents = Shape.named(shape)
    return PlannedCall(
        *(shape, names, direction),
        lambda: make_call(extents, direction, [_option(name, known, extents) for name in names]),
    )


# Options that are combined with each other in threes and more, for decoding.
DECODING = (("causal",), ("left",), ("right",), ("cut-512", "cut-4096", "splits-7"))
# Score modifiers whose gradients several kernels of a backward make, by shapes that decide which.
TRAINED = ("pair", "entry-pair", "slopes", "key-bias", "distances", "axes", "window-table")
TRAINED_SHAPES = ("windows", "windows-343", "pairs", "train", "d96", "d256")
# A backward by query lists, whose LSE may tell which queries see nothing.
SELECTED = ("columns", "mask-mod", "mask-mod-by-head")
# Shapes that take turns with the pairs of options; each pair is planned for two of them.
PAIR_SHAPES = {
    Direction.FORWARD: ("decode", "train", "chunk", "d64", "verify", "d192", "windows"),
    Direction.BACKWARD: ("train", "d64", "d192", "windows", "d96"),
}


def grid() -> Iterator[PlannedCall]:
    """All calls, in a fixed order."""
    for direction in Direction:
        is_forward = direction is Direction.FORWARD
        options = (*COMMON, *(FORWARD_ONLY if is_forward else BACKWARD_ONLY))
        for shape in SHAPES:
            yield _planned(direction, shape)
            yield from (_planned(direction, shape, name) for name in options)
        shapes = PAIR_SHAPES[direction]
        for i, pair in enumerate(combinations(options, 2)):
            turns = (i, i + 3) if is_forward else (i,)
            yield from (_planned(direction, shapes[turn % len(shapes)], *pair) for turn in turns)
    for direction, names in product(Direction, OF_LONG):
        yield _planned(direction, "long", *names)
    # at least three of them
    for chosen in product(*((None, *names) for names in DECODING)):
        names = tuple(name for name in chosen if name is not None)
        if len(names) > 2:
            for shape in ("decode", "decode-long", "verify", "chunk"):
                yield _planned(Direction.FORWARD, shape, *names)
    for shape, name in product(("d64", "train"), SELECTED):
        yield _planned(Direction.BACKWARD, shape, "sink", "selected", name)
    for shape, name in product(TRAINED_SHAPES, TRAINED):
        for more in (("in-order",), ("causal",), ("causal", "in-order"), ("mask-mod", "causal")):
            yield _planned(Direction.BACKWARD, shape, *(x for x in more if x != name), name)
    for direction, text in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        yield from (_planned(direction, *names) for names in edges(text))
