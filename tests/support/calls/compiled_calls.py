"""Calls in compiled regions whose lengths and numbers change: a table, and one run of a row.

Each row makes arguments for a length. A compiled function gets three of them, and may compile at
most two graphs: one for the first numbers, and one for all others. A call is compared with the same
call without torch.compile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from flash_mask_cute import (
    builders,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flashmask_attention,
    flex_attention,
)
from flash_mask_cute.masks.column_mask import ColumnMask

MAX_GRAPHS = 2
MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "fullgraph": {"fullgraph": True},
    "dynamic": {"dynamic": True},
    "fullgraph dynamic": {"fullgraph": True, "dynamic": True},
}
HEADS, HEAD_DIM, BLOCK = 2, 8, 16


class Row(NamedTuple):
    """function: compiled. arguments: of a length, after q, k and v. layout: of q, k and v, "bshd",
    "bhsd" or "packed". has_gradients: there are gradients by q, k and v."""

    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]] = lambda n: ()
    layout: str = "bshd"
    has_gradients: bool = True
    queries: int | None = None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: ColumnMask) -> Any:
    return flash_attn_func(q, k, v, startend_row_indices=mask)


def _attend_copies(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """As in training of block diffusion: a noisy copy before the clean one."""
    mask = builders.block_diffusion(q.shape[1], 5)
    return _attend(*(torch.cat((x * 0.5, x), 1) for x in (q, k, v)), mask)


def _parts(n: int) -> list[int]:
    return [n // 3, n // 4, n - n // 3 - n // 4]


def _ids(n: int) -> Tensor:
    return torch.arange(n) // 11


# The arguments of every builder for a length; the second ones come from tensors.
BUILDERS: dict[str, Callable[[int], ColumnMask]] = {
    "full": builders.full,
    "causal": builders.causal,
    "sliding_window": lambda n: builders.sliding_window(n, n // 3),
    "sink_window": lambda n: builders.sink_window(n, 2, n // 3),
    "global_sliding_window": lambda n: builders.global_sliding_window(n, 3, n // 3),
    "prefix_lm_causal": lambda n: builders.prefix_lm_causal(n, n // 2),
    "causal_document": lambda n: builders.causal_document(_parts(n)),
    "document": lambda n: builders.document(_parts(n)),
    "prefix_lm_document": lambda n: builders.prefix_lm_document(_parts(n), [3, 4, 5]),
    "share_question": lambda n: builders.share_question([_parts(n)]),
    "causal_blockwise": lambda n: builders.causal_blockwise(_parts(n)),
    "qk_sparse": lambda n: builders.qk_sparse(n, [(n // 4, n // 5)]),
    "random_eviction": lambda n: builders.random_eviction(n, n // 3),
    "prefix_tree": lambda n: builders.prefix_tree([-1, 0, 0], _parts(n)),
    "from_tin_tout": lambda n: builders.from_tin_tout(torch.full((n,), n)),
    "image_blocks": lambda n: builders.image_blocks(_ids(n) % 3 - 1),
    "from_cu_seqlens": lambda n: builders.from_cu_seqlens([0, n // 3, n]),
    "from_document_ids": lambda n: builders.from_document_ids(_ids(n)),
    "from_position_ids": lambda n: builders.from_position_ids(torch.arange(n) % 13),
    "key_padding": lambda n: builders.key_padding(torch.arange(n)[None] < n - 3),
    "from_dense": lambda n: builders.from_dense(torch.ones(n, n).tril().bool()),
}
# those that a compiled region calls itself, by its lengths and tensors
INSIDE: dict[str, Callable[[int, Tensor], ColumnMask]] = {
    "full": lambda n, x: builders.full(n),
    "causal": lambda n, x: builders.causal(n),
    "sliding_window": lambda n, x: builders.sliding_window(n, n // 3),
    "sink_window": lambda n, x: builders.sink_window(n, 2, n // 3),
    "global_sliding_window": lambda n, x: builders.global_sliding_window(n, 3, n // 3),
    "prefix_lm_causal": lambda n, x: builders.prefix_lm_causal(n, n // 2),
    "causal_document": lambda n, x: builders.causal_document(x.new_full((4,), n // 5), n),
    "image_blocks": lambda n, x: builders.image_blocks(x, n // 3),
    "from_document_ids": lambda n, x: builders.from_document_ids(x),
    "from_position_ids": lambda n, x: builders.from_position_ids(x % 13),
    "key_padding": lambda n, x: builders.key_padding(x[None] < 3),
    "ColumnMask": lambda n, x: ColumnMask(
        torch.full((1, 1, n, 1), n // 2, dtype=torch.int32), True, seqlen_q=n
    ),
}


def _builds_inside(build: Callable[[int, Tensor], ColumnMask]) -> Callable[..., Any]:
    return lambda q, k, v, ids: _attend(q, k, v, build(q.shape[1], ids))


def _start(q: Tensor, k: Tensor, v: Tensor, start: Any) -> Any:
    return flash_attn_func(q, k, v, causal=True, q_start=start)


def _window(q: Tensor, k: Tensor, v: Tensor, left: int) -> Any:
    return flash_attn_func(q, k, v, window_size=(left, left // 2), return_lse=True)


def _window_of_shape(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flash_attn_func(q, k, v, window_size=(q.shape[1] // 4, 0))


def _scaled(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> Any:
    return flash_attn_func(q, k, v, scale, causal=True)


def _scaled_masked(q: Tensor, k: Tensor, v: Tensor, scale: Any, mask: ColumnMask) -> Any:
    return flash_attn_func(q, k, v, scale, startend_row_indices=mask)


def _paddle(q: Tensor, k: Tensor, v: Tensor, indices: Any) -> Any:
    return flashmask_attention(q, k, v, indices, causal=True)


def _packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Any:
    return flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)


def _packed_masked(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: ColumnMask) -> Any:
    return flash_attn_varlen_func(q, k, v, starts, starts, startend_row_indices=mask)


def _cu_seqlens(n: int) -> Tensor:
    return torch.tensor([0, n // 3, n], dtype=torch.int32)


def _packed_columns(n: int) -> ColumnMask:
    rows = torch.full((1, 1, n, 1), n // 4, dtype=torch.int32)
    return ColumnMask(rows, True)


def _cached(q: Tensor, k: Tensor, v: Tensor, used: Any) -> Any:
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)


def _appended(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Any:
    new = q.new_ones(q.shape)
    return flash_attn_with_kvcache(
        q, k.clone(), v.clone(), new, new, cache_seqlens=used, causal=True
    )


# -- flex_attention ------------------------------------------------------------------------------


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _block_mask(mod: Callable[..., Tensor], n: int) -> BlockMask:
    return create_block_mask(mod, None, None, n, n, device="cpu", BLOCK_SIZE=BLOCK)


def _windowed(n: int) -> Callable[..., Tensor]:
    width = n // 3
    return lambda b, h, i, j: (i >= j) & (i - j < 2 * width + 1)


def _same_document(n: int) -> Callable[..., Tensor]:
    ids = _ids(n)
    return lambda b, h, i, j: ids[i] == ids[j]


def _scores(n: int) -> Callable[..., Tensor]:
    factor, offset = 0.01 * n, n // 2
    return lambda s, b, h, i, j: s * factor + torch.where(i - j < offset, 1, 0)


def _flex(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Any:
    return flex_attention(q, k, v, score_mod=score, block_mask=mask)


def _mods(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Any:
    return flash_attn_func(q, k, v, score_mod=score, mask_mod=mask)


def _score_inside(q: Tensor, k: Tensor, v: Tensor) -> Any:
    level, length = q.mean(), q.shape[2]
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + level * (i - j) / length)


def _mask_inside(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
    n, width = q.shape[2], q.shape[2] // 3
    mod = and_masks(_causal, lambda b, h, i, j: (i - j < width) & (ids[i] == ids[j]))
    return flex_attention(q, k, v, block_mask=_block_mask(mod, n))


class _Layer(torch.nn.Module):
    """As many layers are written: the mod closes over the module."""

    def __init__(self) -> None:
        super().__init__()
        bias = torch.linspace(-1, 1, 2 * 1024).view(HEADS, -1)
        self.bias = torch.nn.Parameter(bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        return flash_attn_func(
            q, k, v,
            score_mod=lambda s, b, h, i, j: s + self.bias[h, j],
            mask_mod=lambda b, h, i, j: ids[i] == ids[j],
        )  # fmt: skip


def _table() -> dict[str, Row]:
    rows = {}
    rows["flash_attn_func block_diffusion"] = Row(_attend_copies)
    for name, build in BUILDERS.items():
        rows[f"flash_attn_func {name}"] = Row(_attend, lambda n, build=build: (build(n),))
    for name, inside in INSIDE.items():
        rows[f"{name} inside"] = Row(_builds_inside(inside), lambda n: (_ids(n),))
    few = {"queries": 8}
    rows |= {
        "q_start int": Row(_start, lambda n: (n // 2,), **few),
        "q_start tensor": Row(_start, lambda n: (torch.tensor([n // 2], dtype=torch.int32),)),
        "window": Row(_window, lambda n: (n // 3,)),
        "window of shape": Row(_window_of_shape),
        "softmax_scale": Row(_scaled, lambda n: (0.01 * n,)),
        "softmax_scale tensor": Row(_scaled, lambda n: (torch.tensor(0.01 * n),)),
        "softmax_scale mask": Row(_scaled_masked, lambda n: (0.01 * n, builders.causal(n))),
        "flashmask_attention mask": Row(_paddle, lambda n: (builders.causal(n),)),
        "flashmask_attention tensor": Row(
            _paddle, lambda n: (builders.sliding_window(n, n // 3).startend_row_indices,)
        ),
        "varlen": Row(_packed, lambda n: (_cu_seqlens(n), n), "packed"),
        "varlen mask": Row(_packed_masked, lambda n: (_cu_seqlens(n), _packed_columns(n)),
                           "packed"),
        "kvcache int": Row(_cached, lambda n: (n - 3,), "bshd", False, 2),
        "kvcache tensor": Row(
            _cached, lambda n: (torch.tensor([n - 3], dtype=torch.int32),), "bshd", False, 2
        ),
        "kvcache append": Row(
            _appended, lambda n: (torch.tensor([n - 3], dtype=torch.int32),), "bshd", False, 2
        ),
        "flex plain": Row(_flex, lambda n: (None, None), "bhsd"),
        "flex mask": Row(_flex, lambda n: (None, _block_mask(_causal, n)), "bhsd"),
        "flex mask number": Row(_flex, lambda n: (None, _block_mask(_windowed(n), n)), "bhsd"),
        "flex mask tensor": Row(_flex, lambda n: (None, _block_mask(_same_document(n), n)), "bhsd"),
        "flex score numbers": Row(_flex, lambda n: (_scores(n), None), "bhsd"),
        "flash_attn_func mods": Row(_mods, lambda n: (_scores(n), _windowed(n))),
        "score inside": Row(_score_inside, layout="bhsd"),
        "mask inside": Row(_mask_inside, lambda n: (_ids(n),), "bhsd"),
        "layer with mods inside": Row(_Layer(), lambda n: (_ids(n),)),
    }  # fmt: skip
    return rows


TABLE = _table()
# With dynamic=True, torch makes constants of the floats that a mod captured.
STATIC_FLOATS = ("flash_attn_func mods", "flex score numbers")
# create_block_mask of older torch takes no function that the compiled region defines
NEEDS_TORCH = {"mask inside": "2.11"}


class Draw(NamedTuple):
    """One run: a row of TABLE, a mode of MODES, whether there are gradients, three lengths."""

    row: str
    mode: str
    has_gradients: bool
    lengths: tuple[int, ...]
    backend: str = "aot_eager"


def _modes_of(row: str) -> list[str]:
    return [x for x in MODES if not (row in STATIC_FLOATS and MODES[x].get("dynamic"))]


def draw(rng: random.Random) -> Draw:
    """Lengths of one draw differ by blocks, on one side of 512, from which documents are packed."""
    start = rng.choice((33, 33, 90, 530)) + rng.randrange(BLOCK)
    lengths = rng.sample(range(start, start + 5 * BLOCK, BLOCK), 3)
    row = rng.choice(sorted(TABLE))
    modes = sorted(_modes_of(row))
    has_gradients = TABLE[row].has_gradients and rng.random() < 0.7
    return Draw(row, rng.choice(modes), has_gradients, tuple(lengths))


def all_draws(seed: int) -> list[Draw]:
    """The whole table, each with lengths of its own."""
    rng = random.Random(seed)
    found: list[Draw] = []
    for row in TABLE:
        for mode in _modes_of(row):
            for has_gradients in {False, TABLE[row].has_gradients}:
                found.append(draw(rng)._replace(row=row, mode=mode, has_gradients=has_gradients))
    return found


class _Counting:
    """A backend that counts graphs."""

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._backend(module, inputs)


def run(drawn: Draw) -> int:
    """Compare all results and gradients. Gives the number of graphs."""
    torch._dynamo.reset()
    row, backend = TABLE[drawn.row], _Counting(drawn.backend)
    compiled = torch.compile(row.function, backend=backend, **MODES[drawn.mode])
    for number, n in enumerate(drawn.lengths):
        torch.manual_seed(number)
        others = row.arguments(n)
        results = []
        for function in (row.function, compiled):
            torch.manual_seed(number)
            q, k, v = (_tensor(row, m, drawn.has_gradients) for m in (row.queries or n, n, n))
            found = function(q, k, v, *others)
            results.append(list(found) if isinstance(found, tuple) else [found])
            if drawn.has_gradients:
                loss = sum(x.double().square().sum() for x in results[-1])
                results[-1] += torch.autograd.grad(loss, (q, k, v))
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, msg=lambda text: f"{drawn}, {n}: {text}")  # noqa: B023
    return backend.graphs


def _tensor(row: Row, n: int, has_gradients: bool) -> Tensor:
    shape = {
        "bshd": (1, n, HEADS, HEAD_DIM),
        "bhsd": (1, HEADS, n, HEAD_DIM),
        "packed": (n, HEADS, HEAD_DIM),
    }[row.layout]
    return torch.randn(shape, requires_grad=has_gradients)
