"""FlexAttention mods as users write them in torch: the catalogue of the benchmark and of the tests.

First the mods, each made of sizes and of the tensors that it captures; the tests draw these small,
with lengths that no tile divides. Then the problems that `bench.flex` measures: twelve that have
names everywhere, at all sizes (NAMED), the others at one (OTHERS). Where our own functions have a
way of their own to say the same (flags, column intervals, a CuTe mod by hand), `own` tells it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, or_masks

from bench.mods import Language, cute_language

Mod = Callable[..., Any]


# -- masks by distance and by length --------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sliding_window(width: int) -> Mod:
    def sliding_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= width)

    return sliding_window


def dilated(reach: int, step: int) -> Mod:
    def dilated_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        return (distance.abs() <= reach) & (distance % step == 0)

    return dilated_window


def prefix_lm(lengths: Tensor) -> Mod:
    def prefix_lm(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < lengths[b]) | (q >= k)

    return prefix_lm


def strided_by_head(width: int, stride: int) -> Mod:
    """By the two functions of torch that join masks."""

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < width

    def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k % stride == h % stride

    return and_masks(causal, or_masks(near, strided))


# -- masks by what captured tensors say of positions ----------------------------------------------


def _at(table: Tensor, b: Tensor, *places: Tensor) -> Tensor:
    """An entry of a tensor by position, with a dimension for the batch in front or none."""
    return table[(b,) * (table.dim() - len(places)) + places]


def document(ids: Tensor) -> Mod:
    def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _at(ids, b, q) == _at(ids, b, k)

    return document


def document_causal(ids: Tensor) -> Mod:
    def document_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (_at(ids, b, q) == _at(ids, b, k))

    return document_causal


def packed_causal(ids: Tensor) -> Mod:
    """A position inside its document is what is compared, as packed sequences have it."""
    places = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)

    def packed_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (places[q] >= places[k])

    return packed_causal


def block_map(is_kept: Tensor, size: int) -> Mod:
    def block_map(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return is_kept[b, h, q // size, k // size]

    return block_map


def top_blocks(numbers: Tensor, size: int) -> Mod:
    """The numbers of the key blocks that a query block sees: a vector is compared, and reduced."""

    def top_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (numbers[b, h, q // size] == (k // size).unsqueeze(-1)).any(-1)

    return top_blocks


def draft_tree(ancestors: Tensor, context: int, clamps: bool) -> Mod:
    """Speculative decoding: drafted tokens, a tree, see their ancestors and all of the context.

    The index of a key of the context is negative, and not used. clamps: it is made 0, as torch's
    kernel reads before the table otherwise.
    """

    def place(token: Tensor) -> Tensor:
        return (token - context).clamp(min=0) if clamps else token - context

    def draft_tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k < context, k <= q, ancestors[place(q), place(k)] & (q >= k))

    return draft_tree


# -- masks by arithmetic on positions -------------------------------------------------------------


def block_diffusion(size: int, half: int) -> Mod:
    """Noised blocks see themselves and clean ones before them, clean ones all up to themselves."""

    def block_diffusion(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_is_clean, k_is_clean = q >= half, k >= half
        q_block = torch.where(q_is_clean, q - half, q) // size
        k_block = torch.where(k_is_clean, k - half, k) // size
        itself = (q_block == k_block) & (q_is_clean == k_is_clean)
        earlier = ~q_is_clean & k_is_clean & (q_block > k_block)
        return itself | earlier | (q_is_clean & k_is_clean & (q_block >= k_block))

    return block_diffusion


def _is_near(q: Sequence[Any], k: Sequence[Any], extents: Sequence[int], reach: int) -> Tensor:
    """Whether k is at most `reach` from q; near an edge the neighbourhood moves inwards."""
    near: list[Tensor] = [
        (q_at.clamp(reach, extent - 1 - reach) - k_at).abs() <= reach
        for q_at, k_at, extent in zip(q, k, extents, strict=True)
    ]
    return functools.reduce(operator.and_, near)


def natten(height: int, width: int, reach: int) -> Mod:
    """Of an image, row by row."""

    def natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        places = (q // width, q % width), (k // width, k % width)
        return _is_near(*places, (height, width), reach)

    return natten


def tiled_natten(tile: tuple[int, int], across: int, height: int, reach: int) -> Mod:
    """Tokens are in memory tile by tile, `across` of them beside each other."""
    tile_h, tile_w = tile

    def place(token: Tensor) -> tuple[Tensor, Tensor]:
        number, inside = token // (tile_h * tile_w), token % (tile_h * tile_w)
        row = number // across * tile_h + inside // tile_w
        return row, number % across * tile_w + inside % tile_w

    def tiled_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _is_near(place(q), place(k), (height, across * tile_w), reach)

    return tiled_natten


def morton_natten(side: int, reach: int) -> Mod:
    """Tokens are in memory along a Z curve, whose bits alternate between row and column."""

    def every_second_bit(code: Tensor) -> Tensor:
        code = code & 0x55555555
        for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            code = (code | (code >> shift)) & keep
        return code

    def place(token: Tensor) -> tuple[Tensor, Tensor]:
        return every_second_bit(token >> 1), every_second_bit(token)

    def morton_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _is_near(place(q), place(k), (side, side), reach)

    return morton_natten


def sliding_tiles(size: int, tiles: Sequence[int], tokens: int = 0, text: int = 0) -> Mod:
    """Tiles of an image or a video, of `size` tokens each, see the tiles around theirs. text: as
    many tokens behind the first `tokens` see all and are seen by all."""

    def place(token: Tensor) -> list[Tensor]:
        number, found = token // size, []
        for extent in reversed(tiles):
            found.append(number % extent)
            number = number // extent
        return found[::-1]

    def sliding_tiles(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if not text:
            return _is_near(place(q), place(k), tiles, 1)
        in_picture = (q < tokens) & (k < tokens)
        near = _is_near(place(q), place(k), tiles, 1)
        to_text = (q < tokens) & (k >= tokens) & (k < tokens + text)
        from_text = (q >= tokens) & ~(k >= tokens + text)
        return (in_picture & near) | to_text | from_text

    return sliding_tiles


def svg_spatial(frame: int) -> Mod:
    """Heads of a video model that look inside a frame and at its neighbours."""

    def svg_spatial(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q // frame - k // frame).abs() < 2) | (k < frame)

    return svg_spatial


def svg_temporal(frame: int, half: int, sees_next: bool = False) -> Mod:
    """Heads that look at the same place of all frames; the difference is negative for half the
    scores. sees_next: and at the frame behind."""

    def svg_temporal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        offset = (q - k) % frame
        seen = (offset <= half) | (offset >= frame - half)
        return seen | ((k - q) // frame == -1) if sees_next else seen

    return svg_temporal


# -- scores ---------------------------------------------------------------------------------------


def alibi(heads: int) -> Mod:
    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.exp2(-((h + 1) * 8.0 / heads)) * (k - q)

    return alibi


def soft_cap(cap: float) -> Mod:
    def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return soft_cap


def soft_cap_by_sigmoid(cap: float) -> Mod:
    def soft_cap_by_sigmoid(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (2 * cap) * torch.sigmoid(score * (2 / cap)) - cap

    return soft_cap_by_sigmoid


def sandwich(ratios: Tensor) -> Mod:
    """Inner products of sinusoidal embeddings: cosines of the distance at several wave lengths."""
    frequencies = [10000 ** (-i / 4) for i in range(4)]

    def sandwich(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        waves: Any = sum(torch.cos((q - k) * frequency) for frequency in frequencies)
        return score + ratios[h] * waves

    return sandwich


def t5_bias(table: Tensor, reach: int) -> Mod:
    """A learned bias by the distance, near ones only, as T5's encoder has it."""

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[(k - q).clamp(-reach, reach) + reach, h]

    return t5_bias


def relative_bias(table: Tensor, behind: int) -> Mod:
    def relative_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k + behind]

    return relative_bias


def hidden_scores(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q >= k) & (k != 5), score, float("-inf"))


def additive_mask(added: Tensor, is_shared: bool) -> Mod:
    """A 4-D mask that is added, with one head for all, indexed step by step. is_shared: all
    batches have the first one's."""

    def additive_mask(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + added[0 if is_shared else b][0][q][k]

    return additive_mask


def graph_spatial(distances: Tensor, bias: Tensor) -> Mod:
    """Graphormer: a bias for each distance in a graph, one index from another."""

    def graph_spatial(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[_at(distances, b, q, k), h]

    return graph_spatial


def graph_edges(hops: Sequence[Tensor], says: Sequence[Tensor]) -> Mod:
    """Graphormer: the mean of what the edges on the way say."""

    def hop(edges: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # bytes would be a mask
        return edges[q, k].int() if edges.dtype == torch.uint8 else edges[q, k]

    def graph_edges(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total = says[0][hop(hops[0], q, k), h]
        for edges, told in zip(hops[1:], says[1:], strict=True):
            total = total + told[hop(edges, q, k), h]
        return score + total / len(hops)

    return graph_edges


# Other weights than exponentials of scores: exp(log(w(score))) is w(score). What is added keeps the
# logarithm finite, so that its derivative is a number.


def relu_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.log(torch.relu(score) + 0.125)


def sigmoid_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(score))


def gelu_weights(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.log(F.gelu(score) + 0.25)


def mla_rope(rotated_q: Tensor, rotated_k: Tensor) -> Mod:
    """Multi-head latent attention: the part of a score that comes of rotated dimensions, whose keys
    all heads share."""

    def mla_rope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.dot(rotated_q[b, h, q], rotated_k[b, k])

    return mla_rope


# -- what bench.flex measures ---------------------------------------------------------------------

SOFTCAP, T5_REACH = 30.0, 128
WINDOW, GLOBAL_TOKENS = 1024, 64


class Sizes(NamedTuple):
    """Of one problem; n: queries and keys."""

    batch: int
    heads: int
    n: int
    device: str

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.n)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        drawn = torch.randint(low, high, shape, generator=self.generator(), dtype=torch.int32)
        return drawn.to(self.device)

    def parameter(self, *shape: int, scale: float = 1.0) -> nn.Parameter:
        drawn = torch.randn(shape, generator=self.generator()).to(self.device)
        return nn.Parameter(drawn * scale)

    def lengths(self, parts: int) -> list[int]:
        """`parts` numbers that sum up to n, none the same."""
        ends = [round(self.n * (i / parts) ** 1.2) for i in range(parts + 1)]
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    def ids(self, parts: int) -> Tensor:
        numbers = torch.arange(parts, dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.lengths(parts))).to(self.device)


class Made(NamedTuple):
    """What a case attends with. trained: tensors of score_mod that get gradients. own: keywords of
    `flash_attn_func` that say the same without torch mods and block masks; None: there are none."""

    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    trained: tuple[Tensor, ...] = ()
    own: dict[str, Any] | None = None


@dataclass(frozen=True)
class FlexMod:
    """by: what the mask depends on beside positions, of "b" and "h". has_table: of queries by keys,
    which is too large beyond 8K."""

    name: str
    make: Callable[[Sizes], Made]
    by: str = ""
    has_table: bool = False


def _columns(x: Sizes, mask_mod: Mod, builder: str, *sizes: Any) -> Made:
    """own: the column intervals of one of our builders."""
    from flash_mask_cute import builders

    mask = getattr(builders, builder)(*sizes, device=x.device)
    return Made(mask_mod, own={"startend_row_indices": mask, "causal": mask.causal})


def _by_hand(mod: Callable[[Language, Any, Any, Any, Any], Any], names: tuple[str, ...]) -> Mod:
    """A CuTe score_mod; mod(language, score, h, q, k)."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return mod(cute_language(names, aux), score, h, q, k)

    return score_mod


def _prefix_lm(x: Sizes) -> Made:
    length = x.n // 4
    prefix = torch.full((x.batch,), length, dtype=torch.int32, device=x.device)
    return _columns(x, prefix_lm(prefix), "prefix_lm_causal", x.n, length)


def _shared_question(x: Sizes) -> Made:
    parts = x.ids(5)

    def shared_question(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((parts[q] == parts[k]) | (parts[k] == 0))

    return _columns(x, shared_question, "share_question", [x.lengths(5)])


def _global_window(x: Sizes) -> Made:
    half = WINDOW // 2

    def global_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < GLOBAL_TOKENS) | (k < GLOBAL_TOKENS) | ((q - k).abs() < half)

    sizes = x.n, GLOBAL_TOKENS, half - 1
    return _columns(x, global_window, "global_sliding_window", *sizes)


def _natten(x: Sizes) -> Made:
    width = 1 << (x.n.bit_length() // 2)
    reach = min(6, width // 4)
    return Made(natten(max(x.n // width, 2 * reach + 1), width, reach))


def _alibi(x: Sizes) -> Made:
    heads = x.heads

    def by_hand(has: Language, score: Any, h: Any, q: Any, k: Any) -> Any:
        return score + has.exp2(has.real(h + 1) * (-8.0 / heads)) * has.real(k - q)

    return Made(causal, alibi(heads), own={"causal": True, "score_mod": _by_hand(by_hand, ())})


def _soft_cap(x: Sizes) -> Made:
    def by_hand(has: Language, score: Any, h: Any, q: Any, k: Any) -> Any:
        return has.tanh(score * (1.0 / SOFTCAP)) * SOFTCAP

    own = {"causal": True, "score_mod": _by_hand(by_hand, ())}
    return Made(causal, soft_cap(SOFTCAP), own=own)


def _t5_bias(x: Sizes) -> Made:
    table = x.parameter(2 * T5_REACH + 1, x.heads)
    return Made(None, t5_bias(table, T5_REACH), (table,))


def _padded(x: Sizes) -> Made:
    lengths = x.ints(x.n // 2, x.n + 1, x.batch)

    def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k < lengths[b])

    return Made(padded)


def _last_image(x: Sizes) -> Made:
    """Flamingo: text sees the tokens of the last image before it."""
    tokens = 64
    seen = x.ids(x.n // (2 * tokens))

    def last_image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[q] == k // tokens

    return Made(last_image)


def _tiled_natten(x: Sizes) -> Made:
    across = max(4, 1 << ((x.n // 64).bit_length() // 2))
    return Made(tiled_natten((8, 8), across, max(x.n // (across * 8), 16), 6))


def _morton_natten(x: Sizes) -> Made:
    side = 1 << math.ceil(math.log2(x.n) / 2)
    return Made(morton_natten(side, min(6, side // 4)))


def _svg_temporal(x: Sizes) -> Made:
    frame = max(x.n // 16, 4)
    return Made(svg_temporal(frame, frame // 8))


def _draft_tree(x: Sizes) -> Made:
    context = x.n // 2
    place = torch.arange(x.n - context, device=x.device)
    ends = place + 1 + x.ints(0, 256, x.n - context)
    ancestors = (place[:, None] >= place) & (place[:, None] < ends)
    return Made(draft_tree(ancestors, context, clamps=True))


def _block_map(x: Sizes) -> Made:
    blocks = -(-x.n // 128)
    is_kept = x.ints(0, 4, x.batch, x.heads, blocks, blocks) == 0
    return Made(block_map(is_kept | torch.eye(blocks, dtype=torch.bool, device=x.device), 128))


def _top_blocks(x: Sizes) -> Made:
    blocks = -(-x.n // 128)
    return Made(top_blocks(x.ints(0, blocks, x.batch, x.heads, blocks, 8), 128))


def _sandwich(x: Sizes) -> Made:
    return Made(causal, sandwich(torch.arange(1, x.heads + 1, device=x.device) / x.heads))


def _relative_bias(x: Sizes) -> Made:
    table = x.parameter(x.heads, 2 * x.n)
    return Made(None, relative_bias(table, x.n), (table,))


def _additive_mask(x: Sizes) -> Made:
    added = torch.where(x.ints(0, 4, 1, 1, x.n, x.n) == 0, -64.0, 0.0).to(torch.bfloat16)
    return Made(None, additive_mask(added, is_shared=True))


def _graph_spatial(x: Sizes) -> Made:
    bias = x.parameter(12, x.heads)
    return Made(None, graph_spatial(x.ints(0, 12, x.n, x.n), bias), (bias,))


def _graph_edges(x: Sizes) -> Made:
    hops = [x.ints(0, 7, x.n, x.n).to(torch.uint8) for _ in range(3)]
    says = tuple(x.parameter(7, x.heads) for _ in hops)
    return Made(None, graph_edges(hops, says), says)


def _mla_rope(x: Sizes) -> Made:
    rotated_q = x.parameter(x.batch, x.heads, x.n, 8, scale=0.25)
    rotated_k = x.parameter(x.batch, x.n, 8, scale=0.25)
    return Made(causal, mla_rope(rotated_q, rotated_k), (rotated_q, rotated_k))


NAMED = (
    FlexMod("causal", lambda x: Made(causal, own={"causal": True})),
    FlexMod(
        "sliding_window",
        lambda x: Made(
            sliding_window(WINDOW - 1), own={"causal": True, "window_size": (WINDOW - 1, 0)}
        ),
    ),
    FlexMod("prefix_lm", _prefix_lm, "b"),
    FlexMod(
        "document_causal",
        lambda x: _columns(x, document_causal(x.ids(8)), "causal_document", x.lengths(8)),
    ),
    FlexMod("document", lambda x: _columns(x, document(x.ids(8)), "document", x.lengths(8))),
    FlexMod("shared_question", _shared_question),
    FlexMod("global_window", _global_window),
    FlexMod("block_diffusion", lambda x: Made(block_diffusion(32, x.n // 2))),
    FlexMod("natten", _natten),
    FlexMod("alibi", _alibi),
    FlexMod("soft_cap", _soft_cap),
    FlexMod("t5_bias", _t5_bias),
)
OTHERS = (
    FlexMod("dilated", lambda x: Made(dilated(2 * WINDOW, 4))),
    FlexMod("strided_by_head", lambda x: Made(strided_by_head(WINDOW, 8)), "h"),
    FlexMod("padded", _padded, "b"),
    FlexMod("packed_causal", lambda x: Made(packed_causal(x.ids(8)))),
    FlexMod("last_image", _last_image),
    FlexMod("tiled_natten", _tiled_natten),
    FlexMod("morton_natten", _morton_natten),
    FlexMod("sliding_tiles", lambda x: Made(sliding_tiles(128, (max(x.n // (128 * 16), 3), 4, 4)))),
    FlexMod("svg_spatial", lambda x: Made(svg_spatial(max(x.n // 16, 4)))),
    FlexMod("svg_temporal", _svg_temporal),
    FlexMod("draft_tree", _draft_tree, has_table=True),
    FlexMod("block_map", _block_map, "bh"),
    FlexMod("top_blocks", _top_blocks, "bh"),
    FlexMod("soft_cap_by_sigmoid", lambda x: Made(causal, soft_cap_by_sigmoid(SOFTCAP))),
    FlexMod("sandwich", _sandwich),
    FlexMod("relative_bias", _relative_bias),
    FlexMod("hidden_scores", lambda x: Made(None, hidden_scores)),
    FlexMod("additive_mask", _additive_mask, has_table=True),
    FlexMod("graph_spatial", _graph_spatial, has_table=True),
    FlexMod("graph_edges", _graph_edges, has_table=True),
    FlexMod("relu_weights", lambda x: Made(causal, relu_weights)),
    FlexMod("sigmoid_weights", lambda x: Made(causal, sigmoid_weights)),
    FlexMod("gelu_weights", lambda x: Made(causal, gelu_weights)),
    FlexMod("mla_rope", _mla_rope),
)
BY_NAME = {x.name: x for x in (*NAMED, *OTHERS)}
