"""FlexAttention mods in PyTorch, as users of `torch.nn.attention.flex_attention` write them.

`CATALOGUE` has 36 that must be lowered, `REFUSED` four that must not be. A mod is made for the
extents of one problem, together with the tensors that it captures; the same seed gives the same
numbers in float32 and in float64, so that a float64 oracle runs the very mod that is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench import flex_mods as mods
from bench.flex_mods import Mod


class Extents(NamedTuple):
    """Of one attention problem; heads are those of queries."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def longest(self) -> int:
        return max(self.seqlen_q, self.seqlen_k)


@dataclass
class Draw:
    """given: in place of Parameters, in order, if any. trained: the Parameters, in order."""

    extents: Extents
    dtype: torch.dtype = torch.float32
    seed: int = 0
    given: Sequence[Tensor] = ()
    trained: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def ints(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From low to high - 1."""
        return torch.randint(low, high, size, generator=self.generator).to(dtype)

    def floats(self, *size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=self.generator) * std).to(self.dtype)

    def parameter(self, *size: int, std: float = 0.5) -> Tensor:
        drawn = nn.Parameter(self.floats(*size, std=std))
        self.trained.append(self.given[len(self.trained)] if self.given else drawn)
        return self.trained[-1]

    def stretches(self, *size: int, mean: int = 20) -> Tensor:
        """Numbers that grow by 1 from time to time along the last dimension, from 0 on."""
        grows = torch.rand(size, generator=self.generator) < 1 / mean
        return (grows.cumsum(-1, dtype=torch.int32) - grows[..., :1].int()).to(torch.int32)


class Made(NamedTuple):
    """A mod and the Parameters that it reads."""

    mod: Mod
    trained: tuple[Tensor, ...]


@dataclass(frozen=True)
class CatalogueMod:
    """One row. kind: "mask_mod" or "score_mod"; write: makes the mod of numbers that it draws."""

    name: str
    kind: str
    write: Callable[[Draw], Mod]
    is_trained: bool = False

    def make(
        self,
        extents: Sequence[int],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        given: Sequence[Tensor] = (),
    ) -> Made:
        draw = Draw(Extents(*extents), dtype, seed, given)
        mod = self.write(draw)
        assert bool(draw.trained) == self.is_trained
        return Made(mod, tuple(draw.trained))


def _batchified(draw: Draw) -> Mod:
    """A mask of one sequence, for padded sequences of several lengths."""
    x = draw.extents
    lengths = draw.ints(x.longest // 2, x.longest + 1, x.batch, dtype=torch.int64)

    def of_one(q: Tensor, k: Tensor) -> Tensor:
        return (q - k) // 8 >= 0

    return lambda b, h, q, k: of_one(q, k) & (q < lengths[b]) & (k < lengths[b])


def _shared_prefix(draw: Draw) -> Mod:
    """Answers see the question and themselves; rows of padding (-1) see nothing."""
    x = draw.extents
    segments = draw.stretches(x.batch, x.longest, mean=12)
    segments[:, x.longest - x.longest // 10 :] = -1
    places = torch.arange(x.longest, dtype=torch.int32).expand(x.batch, -1)

    def shared_prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_query, of_key = segments[b, q], segments[b, k]
        is_ours = (of_query == of_key) | (of_key == 0)
        return is_ours & (places[b, q] >= places[b, k]) & (of_query != -1) & (of_key != -1)

    return shared_prefix


def _flamingo(draw: Draw) -> Mod:
    """Text sees the tokens of the last image before it; text before all images sees nothing."""
    x = draw.extents
    tokens_of_image = 6
    images = -(-x.seqlen_k // tokens_of_image)
    seen = draw.stretches(x.batch, x.seqlen_q, mean=9).clamp(max=images)
    exists = torch.rand((x.batch, images), generator=draw.generator) < 0.9

    def last_image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        image = k // tokens_of_image
        return (seen[b, q] == image + 1) & (seen[b, q] != 0) & exists[b, image]

    return last_image


def _global_window(draw: Draw) -> Mod:
    is_global = torch.rand((draw.extents.longest,), generator=draw.generator) < 0.1
    return lambda b, h, q, k: is_global[q] | is_global[k] | ((q - k).abs() <= 7)


def _morton_natten(draw: Draw) -> Mod:
    side = 1 << max(math.ceil(math.log2(max(draw.extents.longest, 16)) / 2), 2)
    return mods.morton_natten(side, 2)


def _sliding_tiles(draw: Draw, size: int, across: tuple[int, ...]) -> Mod:
    text = 6
    tokens = draw.extents.longest - text
    tiles = max(-(-tokens // (size * math.prod(across))), 3), *across
    return mods.sliding_tiles(size, tiles, tokens, text)


def _ancestors(draw: Draw, nodes: int) -> Tensor:
    """bool (nodes, nodes): whether a node of a random tree is the other or below it."""
    above = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(draw.ints(0, node, 1))
        above[node] |= above[parent]
    return above


def _draft_tree(draw: Draw) -> Mod:
    longest = draw.extents.longest
    return mods.draft_tree(_ancestors(draw, longest), longest // 3, clamps=False)


def _draft_training(draw: Draw) -> Mod:
    """Training of the drafts: each block of queries hangs on its own place of the context."""
    x = draw.extents
    size = 8
    context = x.seqlen_k // 2
    blocks = -(-x.longest // size)
    anchors = draw.ints(1, context + 1, x.batch, blocks, dtype=torch.int64)
    ancestors = _ancestors(draw, size)

    def draft_training(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        drafted = (k - context).clamp(min=0)
        in_context = (k < context) & (k < anchors[b, q // size])
        in_block = (k >= context) & (drafted // size == q // size)
        return in_context | (in_block & ancestors[q % size][drafted % size])

    return draft_training


def _block_map(draw: Draw) -> Mod:
    x = draw.extents
    blocks = (x.batch, x.heads, -(-x.seqlen_q // 16), -(-x.seqlen_k // 16))
    return mods.block_map(torch.rand(blocks, generator=draw.generator) < 0.5, 16)


def _top_blocks(draw: Draw) -> Mod:
    x = draw.extents
    blocks = x.batch, x.heads, -(-x.seqlen_q // 16), 3
    return mods.top_blocks(draw.ints(0, -(-x.seqlen_k // 16), *blocks), 16)


def _sandwich(draw: Draw) -> Mod:
    heads = draw.extents.heads
    return mods.sandwich(torch.arange(1, heads + 1).to(draw.dtype) / heads)


def _relative_bias(draw: Draw) -> Mod:
    x = draw.extents
    return mods.relative_bias(draw.parameter(x.heads, x.seqlen_q + x.seqlen_k), x.seqlen_k)


def _additive_mask(draw: Draw) -> Mod:
    x = draw.extents
    added = draw.floats(x.batch, 1, x.seqlen_q, x.seqlen_k)
    added[torch.rand(added.shape, generator=draw.generator) < 0.3] = -64
    return mods.additive_mask(added, is_shared=False)


def _graph_spatial(draw: Draw) -> Mod:
    x = draw.extents
    distances = draw.ints(0, 12, x.batch, x.seqlen_q, x.seqlen_k, dtype=torch.int64)
    return mods.graph_spatial(distances, draw.parameter(12, x.heads))


def _graph_edges(draw: Draw) -> Mod:
    x = draw.extents
    hops = [draw.ints(0, 7, x.seqlen_q, x.seqlen_k) for _ in range(5)]
    return mods.graph_edges(hops, [draw.parameter(7, x.heads) for _ in hops])


def _mla_rope(draw: Draw) -> Mod:
    x = draw.extents
    rotated_q = draw.parameter(x.batch, x.heads, x.seqlen_q, 8)
    return mods.mla_rope(rotated_q, draw.parameter(x.batch, x.seqlen_k, 8))


def _documents(draw: Draw) -> Tensor:
    """The number of each position's document, (batch, longest)."""
    return draw.stretches(draw.extents.batch, draw.extents.longest)


def _mask(name: str, write: Callable[[Draw], Mod]) -> CatalogueMod:
    return CatalogueMod(name, "mask_mod", write)


def _score(name: str, write: Callable[[Draw], Mod], is_trained: bool = False) -> CatalogueMod:
    return CatalogueMod(name, "score_mod", write, is_trained)


CATALOGUE = (
    _mask("causal", lambda draw: mods.causal),
    _mask("sliding", lambda draw: mods.sliding_window(13)),
    _mask("dilated", lambda draw: mods.dilated(20, 3)),
    _mask(
        "prefix_lm",
        lambda draw: mods.prefix_lm(
            draw.ints(0, draw.extents.seqlen_k // 2 + 1, draw.extents.batch)
        ),
    ),
    _mask("joined", lambda draw: mods.strided_by_head(9, 4)),
    _mask("batchified", _batchified),
    _mask("document_causal", lambda draw: mods.document_causal(_documents(draw))),
    _mask(
        "packed_causal",
        lambda draw: mods.packed_causal(draw.stretches(draw.extents.longest).long()),
    ),
    _mask("shared_prefix", _shared_prefix),
    _mask("flamingo", _flamingo),
    _mask("global_window", _global_window),
    _mask(
        "block_diffusion", lambda draw: mods.block_diffusion(8, -(-draw.extents.longest // 16) * 8)
    ),
    _mask("natten", lambda draw: mods.natten(max(-(-draw.extents.longest // 7), 5), 7, 2)),
    _mask(
        "tiled_natten",
        lambda draw: mods.tiled_natten((4, 2), 3, max(-(-draw.extents.longest // 6) + 4, 8), 1),
    ),
    _mask("morton_natten", _morton_natten),
    _mask("sliding_tiles_2d", lambda draw: _sliding_tiles(draw, 4, (4,))),
    _mask("sliding_tiles_3d", lambda draw: _sliding_tiles(draw, 2, (4, 4))),
    _mask("svg_spatial", lambda draw: mods.svg_spatial(11)),
    _mask("svg_temporal", lambda draw: mods.svg_temporal(11, 2, sees_next=True)),
    _mask("draft_tree", _draft_tree),
    _mask("draft_training", _draft_training),
    _mask("block_map", _block_map),
    _mask("top_blocks", _top_blocks),
    _score("alibi", lambda draw: mods.alibi(draw.extents.heads)),
    _score("soft_cap", lambda draw: mods.soft_cap(2.5)),
    _score("soft_cap_by_sigmoid", lambda draw: mods.soft_cap_by_sigmoid(2.5)),
    _score("sandwich", _sandwich),
    _score("relative_bias", _relative_bias, is_trained=True),
    _score("hidden_scores", lambda draw: mods.hidden_scores),
    _score("additive_mask", _additive_mask),
    _score("graph_spatial", _graph_spatial, is_trained=True),
    _score("graph_edges", _graph_edges, is_trained=True),
    _score("relu_weights", lambda draw: mods.relu_weights),
    _score("sigmoid_weights", lambda draw: mods.sigmoid_weights),
    _score("gelu_weights", lambda draw: mods.gelu_weights),
    _score("mla_rope", _mla_rope, is_trained=True),
)
BY_NAME = {row.name: row for row in CATALOGUE}

T5_REACH = 16


# Beside the catalogue: what hand-written mods of other tests do as well.
T5_BIAS = _score(
    "t5_bias",
    lambda draw: mods.t5_bias(draw.parameter(2 * T5_REACH + 1, draw.extents.heads), T5_REACH),
    is_trained=True,
)
DOCUMENTS = _mask("documents", lambda draw: mods.document(_documents(draw)))


class RefusedMod(NamedTuple):
    """A mod that cannot be lowered. advice: of these, the message names one to write instead."""

    mod: Callable[..., Any]
    kind: str
    advice: str


def branches_on_a_value(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    if q >= k:
        return k >= 0
    return k < 3


def takes_a_builtin_minimum(b: Tensor, h: Tensor, q: Any, k: Tensor) -> Any:
    return min(q, 5) >= k


def reads_a_number(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return k <= q.item()


def draws_a_number(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return score + torch.rand(())


REFUSED = (
    RefusedMod(branches_on_a_value, "mask_mod", r"torch\.where"),
    RefusedMod(takes_a_builtin_minimum, "mask_mod", r"torch\.(where|minimum|clamp)"),
    RefusedMod(reads_a_number, "mask_mod", r"captured|tensor"),
    RefusedMod(draws_a_number, "score_mod", r"captured|tensor"),
)
