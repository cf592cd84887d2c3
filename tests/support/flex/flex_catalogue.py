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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, or_masks

Mod = Callable[..., Tensor]


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
    """Numbers for one mod. given: what takes the place of Parameters, in order, if there is any.
    trained: the Parameters of the mod, in order."""

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


# Masks by distance and by length.


def _causal(draw: Draw) -> Mod:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    return causal


def _sliding(draw: Draw) -> Mod:
    width = 13

    def sliding_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= width)

    return sliding_window


def _dilated(draw: Draw) -> Mod:
    def dilated_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        return (distance.abs() <= 20) & (distance % 3 == 0)

    return dilated_window


def _prefix_lm(draw: Draw) -> Mod:
    lengths = draw.ints(0, draw.extents.seqlen_k // 2 + 1, draw.extents.batch)

    def prefix_lm(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < lengths[b]) | (q >= k)

    return prefix_lm


def _joined(draw: Draw) -> Mod:
    """By the two functions of torch that join masks."""

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < 9

    def strided_by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k % 4 == h % 4

    return and_masks(causal, or_masks(near, strided_by_head))


def _batchified(draw: Draw) -> Mod:
    """A mask of one sequence, for padded sequences of several lengths."""
    x = draw.extents
    lengths = draw.ints(x.longest // 2, x.longest + 1, x.batch, dtype=torch.int64)

    def of_one(q: Tensor, k: Tensor) -> Tensor:
        return (q - k) // 8 >= 0

    def of_each_length(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return of_one(q, k) & (q < lengths[b]) & (k < lengths[b])

    return of_each_length


# Masks by what captured tensors say of positions.


def _document_causal(draw: Draw) -> Mod:
    documents = draw.stretches(draw.extents.batch, draw.extents.longest)

    def document_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return document_causal


def _packed_causal(draw: Draw) -> Mod:
    """A position inside its document is what is compared, as packed sequences have it."""
    documents = draw.stretches(draw.extents.longest).long()
    starts = torch.searchsorted(documents, documents, side="left")
    places = torch.arange(draw.extents.longest) - starts

    def packed_document_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[q] == documents[k]) & (places[q] >= places[k])

    return packed_document_causal


def _shared_prefix(draw: Draw) -> Mod:
    """Several answers to one question: each sees the question and itself. Rows of padding (-1) see
    nothing."""
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

    def global_and_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return is_global[q] | is_global[k] | ((q - k).abs() <= 7)

    return global_and_window


# Masks by arithmetic on positions.


def _block_diffusion(draw: Draw) -> Mod:
    """The noised sequence, then the clean one: a noised block sees itself and clean blocks before
    it, a clean block the clean ones up to itself."""
    size = 8
    half = -(-draw.extents.longest // (2 * size)) * size

    def block_diffusion(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_is_clean, k_is_clean = q >= half, k >= half
        q_block = torch.where(q_is_clean, q - half, q) // size
        k_block = torch.where(k_is_clean, k - half, k) // size
        itself = (q_block == k_block) & (q_is_clean == k_is_clean)
        earlier = ~q_is_clean & k_is_clean & (q_block > k_block)
        return itself | earlier | (q_is_clean & k_is_clean & (q_block >= k_block))

    return block_diffusion


def _is_in_neighbourhood(
    q: Sequence[Tensor], k: Sequence[Tensor], extents: Sequence[int], reach: int
) -> Tensor:
    """Whether k is at most `reach` from q in each dimension; near an edge the neighbourhood of q
    moves inwards and keeps its size."""
    near = [
        (q_at.clamp(reach, extent - 1 - reach) - k_at).abs() <= reach
        for q_at, k_at, extent in zip(q, k, extents, strict=True)
    ]
    seen = near[0]
    for another in near[1:]:
        seen = seen & another
    return seen


def _natten(draw: Draw) -> Mod:
    width = 7
    height = max(-(-draw.extents.longest // width), 5)

    def natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        places = (q // width, q % width), (k // width, k % width)
        return _is_in_neighbourhood(*places, (height, width), 2)

    return natten


def _tiled_natten(draw: Draw) -> Mod:
    """Tokens are in memory tile by tile, of 4 x 2."""
    tile_h, tile_w, tiles_across = 4, 2, 3
    height = max(-(-draw.extents.longest // (tile_w * tiles_across)) + tile_h, 8)

    def place(token: Tensor) -> tuple[Tensor, Tensor]:
        tile, inside = token // (tile_h * tile_w), token % (tile_h * tile_w)
        row = tile // tiles_across * tile_h + inside // tile_w
        return row, tile % tiles_across * tile_w + inside % tile_w

    def tiled_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _is_in_neighbourhood(place(q), place(k), (height, tile_w * tiles_across), 1)

    return tiled_natten


def _morton_natten(draw: Draw) -> Mod:
    """Tokens are in memory along a Z curve, whose bits alternate between row and column."""
    side = 1 << max(math.ceil(math.log2(max(draw.extents.longest, 16)) / 2), 2)

    def every_second_bit(code: Tensor) -> Tensor:
        code = code & 0x55555555
        for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            code = (code | (code >> shift)) & keep
        return code

    def place(token: Tensor) -> tuple[Tensor, Tensor]:
        return every_second_bit(token >> 1), every_second_bit(token)

    def morton_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _is_in_neighbourhood(place(q), place(k), (side, side), 2)

    return morton_natten


def _sliding_tiles(draw: Draw, tile: tuple[int, ...], tiles_across: tuple[int, ...]) -> Mod:
    """Tiles of an image or a video see the tiles around theirs; text, behind it, sees all and is
    seen by all. Tokens of a tile are neighbours in memory."""
    text = 6
    tokens = draw.extents.longest - text
    tokens_of_tile = math.prod(tile)
    tiles = max(-(-tokens // (tokens_of_tile * math.prod(tiles_across))), 3), *tiles_across

    def tile_place(token: Tensor) -> list[Tensor]:
        number = token // tokens_of_tile
        found = []
        for extent in reversed(tiles):
            found.append(number % extent)
            number = number // extent
        return found[::-1]

    def sliding_tiles(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_picture = (q < tokens) & (k < tokens)
        near = _is_in_neighbourhood(tile_place(q), tile_place(k), tiles, 1)
        to_text = (q < tokens) & (k >= tokens) & (k < tokens + text)
        from_text = (q >= tokens) & ~(k >= tokens + text)
        return (in_picture & near) | to_text | from_text

    return sliding_tiles


def _sliding_tiles_2d(draw: Draw) -> Mod:
    return _sliding_tiles(draw, (2, 2), (4,))


def _sliding_tiles_3d(draw: Draw) -> Mod:
    return _sliding_tiles(draw, (1, 1, 2), (4, 4))


def _svg_spatial(draw: Draw) -> Mod:
    """Heads of a video model that look inside a frame and at its neighbours."""
    frame = 11

    def svg_spatial(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q // frame - k // frame).abs() < 2) | (k < frame)

    return svg_spatial


def _svg_temporal(draw: Draw) -> Mod:
    """Heads that look at the same place of all frames; the difference is negative for half the
    scores."""
    frame, half = 11, 2

    def svg_temporal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        offset = (q - k) % frame
        return (offset <= half) | (offset >= frame - half) | ((k - q) // frame == -1)

    return svg_temporal


def _ancestors(draw: Draw, nodes: int) -> Tensor:
    """bool (nodes, nodes): whether a node of a random tree is the other or below it."""
    above = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(draw.ints(0, node, 1))
        above[node] |= above[parent]
    return above


def _draft_tree(draw: Draw) -> Mod:
    """Speculative decoding: drafted tokens, a tree, see their ancestors and all of the context.

    The index of a key of the context is negative, and not used.
    """
    x = draw.extents
    context = x.longest // 3
    ancestors = _ancestors(draw, x.longest)

    def draft_tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k < context, k <= q, ancestors[q - context, k - context] & (q >= k))

    return draft_tree


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
    size = 16
    kept = torch.rand(
        (x.batch, x.heads, -(-x.seqlen_q // size), -(-x.seqlen_k // size)),
        generator=draw.generator,
    )
    is_kept = kept < 0.5

    def block_map(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return is_kept[b, h, q // size, k // size]

    return block_map


def _top_blocks(draw: Draw) -> Mod:
    """The numbers of the key blocks that a query block sees: a vector is compared, and reduced."""
    x = draw.extents
    size = 16
    numbers = draw.ints(0, -(-x.seqlen_k // size), x.batch, x.heads, -(-x.seqlen_q // size), 3)

    def top_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        chosen = numbers[b, h, q // size]
        return (chosen == (k // size).unsqueeze(-1)).any(-1)

    return top_blocks


# Scores.


def _alibi(draw: Draw) -> Mod:
    heads = draw.extents.heads

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + slope * (k - q)

    return alibi


def _soft_cap(draw: Draw) -> Mod:
    cap = 2.5

    def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return soft_cap


def _soft_cap_by_sigmoid(draw: Draw) -> Mod:
    cap = 2.5

    def soft_cap_by_sigmoid(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (2 * cap) * torch.sigmoid(score * (2 / cap)) - cap

    return soft_cap_by_sigmoid


def _sandwich(draw: Draw) -> Mod:
    """Inner products of sinusoidal embeddings: cosines of the distance at several wave lengths."""
    ratios = torch.arange(1, draw.extents.heads + 1).to(draw.dtype) / draw.extents.heads
    frequencies = [10000 ** (-i / 4) for i in range(4)]

    def sandwich(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        waves = sum(torch.cos((q - k) * frequency) for frequency in frequencies)
        return score + ratios[h] * waves

    return sandwich


def _relative_bias(draw: Draw) -> Mod:
    x = draw.extents
    table = draw.parameter(x.heads, x.seqlen_q + x.seqlen_k)
    behind = x.seqlen_k

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k + behind]

    return relative_bias


def _hidden_scores(draw: Draw) -> Mod:
    def hidden_scores(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where((q >= k) & (k != 5), score, float("-inf"))

    return hidden_scores


def _additive_mask(draw: Draw) -> Mod:
    """A 4-D mask that is added, with one head for all, indexed step by step."""
    x = draw.extents
    added = draw.floats(x.batch, 1, x.seqlen_q, x.seqlen_k)
    added[torch.rand(added.shape, generator=draw.generator) < 0.3] = -64

    def additive_mask(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + added[b][0][q][k]

    return additive_mask


def _graph_spatial(draw: Draw) -> Mod:
    """Graphormer: a bias for each distance in a graph, one index from another."""
    x = draw.extents
    distances = draw.ints(0, 12, x.batch, x.seqlen_q, x.seqlen_k, dtype=torch.int64)
    bias = draw.parameter(12, x.heads)

    def graph_spatial(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[distances[b, q, k], h]

    return graph_spatial


def _graph_edges(draw: Draw) -> Mod:
    """Graphormer: the mean of what the edges on the way say, five at most."""
    x = draw.extents
    hops = [draw.ints(0, 7, x.seqlen_q, x.seqlen_k) for _ in range(5)]
    says = [draw.parameter(7, x.heads) for _ in range(5)]

    def graph_edges(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total = says[0][hops[0][q, k], h]
        for edges, told in zip(hops[1:], says[1:], strict=True):
            total = total + told[edges[q, k], h]
        return score + total / len(hops)

    return graph_edges


# Other weights than exponentials of scores: exp(log(w(score))) is w(score). What is added keeps the
# logarithm finite, so that its derivative is a number.


def _relu_weights(draw: Draw) -> Mod:
    def relu_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.log(torch.relu(score) + 0.125)

    return relu_weights


def _sigmoid_weights(draw: Draw) -> Mod:
    def sigmoid_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.log(torch.sigmoid(score))

    return sigmoid_weights


def _gelu_weights(draw: Draw) -> Mod:
    def gelu_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.log(F.gelu(score) + 0.25)

    return gelu_weights


def _mla_rope(draw: Draw) -> Mod:
    """Multi-head latent attention: the part of a score that comes of rotated dimensions, whose keys
    all heads share."""
    x = draw.extents
    dim = 8
    rotated_q = draw.parameter(x.batch, x.heads, x.seqlen_q, dim)
    rotated_k = draw.parameter(x.batch, x.seqlen_k, dim)

    def mla_rope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.dot(rotated_q[b, h, q], rotated_k[b, k])

    return mla_rope


CATALOGUE = (
    CatalogueMod("causal", "mask_mod", _causal),
    CatalogueMod("sliding", "mask_mod", _sliding),
    CatalogueMod("dilated", "mask_mod", _dilated),
    CatalogueMod("prefix_lm", "mask_mod", _prefix_lm),
    CatalogueMod("joined", "mask_mod", _joined),
    CatalogueMod("batchified", "mask_mod", _batchified),
    CatalogueMod("document_causal", "mask_mod", _document_causal),
    CatalogueMod("packed_causal", "mask_mod", _packed_causal),
    CatalogueMod("shared_prefix", "mask_mod", _shared_prefix),
    CatalogueMod("flamingo", "mask_mod", _flamingo),
    CatalogueMod("global_window", "mask_mod", _global_window),
    CatalogueMod("block_diffusion", "mask_mod", _block_diffusion),
    CatalogueMod("natten", "mask_mod", _natten),
    CatalogueMod("tiled_natten", "mask_mod", _tiled_natten),
    CatalogueMod("morton_natten", "mask_mod", _morton_natten),
    CatalogueMod("sliding_tiles_2d", "mask_mod", _sliding_tiles_2d),
    CatalogueMod("sliding_tiles_3d", "mask_mod", _sliding_tiles_3d),
    CatalogueMod("svg_spatial", "mask_mod", _svg_spatial),
    CatalogueMod("svg_temporal", "mask_mod", _svg_temporal),
    CatalogueMod("draft_tree", "mask_mod", _draft_tree),
    CatalogueMod("draft_training", "mask_mod", _draft_training),
    CatalogueMod("block_map", "mask_mod", _block_map),
    CatalogueMod("top_blocks", "mask_mod", _top_blocks),
    CatalogueMod("alibi", "score_mod", _alibi),
    CatalogueMod("soft_cap", "score_mod", _soft_cap),
    CatalogueMod("soft_cap_by_sigmoid", "score_mod", _soft_cap_by_sigmoid),
    CatalogueMod("sandwich", "score_mod", _sandwich),
    CatalogueMod("relative_bias", "score_mod", _relative_bias, is_trained=True),
    CatalogueMod("hidden_scores", "score_mod", _hidden_scores),
    CatalogueMod("additive_mask", "score_mod", _additive_mask),
    CatalogueMod("graph_spatial", "score_mod", _graph_spatial, is_trained=True),
    CatalogueMod("graph_edges", "score_mod", _graph_edges, is_trained=True),
    CatalogueMod("relu_weights", "score_mod", _relu_weights),
    CatalogueMod("sigmoid_weights", "score_mod", _sigmoid_weights),
    CatalogueMod("gelu_weights", "score_mod", _gelu_weights),
    CatalogueMod("mla_rope", "score_mod", _mla_rope, is_trained=True),
)
BY_NAME = {row.name: row for row in CATALOGUE}

T5_REACH = 16


def _t5_bias(draw: Draw) -> Mod:
    table = draw.parameter(2 * T5_REACH + 1, draw.extents.heads)

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[(k - q).clamp(-T5_REACH, T5_REACH) + T5_REACH, h]

    return t5_bias


def _documents(draw: Draw) -> Mod:
    ids = draw.stretches(draw.extents.batch, draw.extents.longest)

    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[b, q] == ids[b, k]

    return documents


# Beside the catalogue: what hand-written mods of other tests do as well.
T5_BIAS = CatalogueMod("t5_bias", "score_mod", _t5_bias, is_trained=True)
DOCUMENTS = CatalogueMod("documents", "mask_mod", _documents)


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
