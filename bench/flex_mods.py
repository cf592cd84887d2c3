"""FlexAttention mods at the sizes at which people run them, for `bench.flex`.

Each is written in torch, as users write it. Twelve that have names everywhere are measured at all
sizes (NAMED), and where our own functions have a way of their own to say the same (flags, column
intervals, a CuTe mod by hand), `own` tells it. The others are measured at one size (OTHERS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.mods import Language, cute_language

Mod = Callable[..., Any]
SOFTCAP = 30.0
WINDOW, GLOBAL_TOKENS, T5_REACH = 1024, 64, 128


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

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator()).to(self.device)

    def lengths(self, parts: int) -> list[int]:
        """`parts` numbers that sum up to n, none the same."""
        ends = [round(self.n * (i / parts) ** 1.2) for i in range(parts + 1)]
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    def ids(self, lengths: Sequence[int]) -> Tensor:
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(lengths)).to(self.device)


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


def _causal_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _builders() -> Any:
    from flash_mask_cute import builders

    return builders


def _columns(mask: Any) -> dict[str, Any]:
    return {"startend_row_indices": mask, "causal": mask.causal}


# -- named ----------------------------------------------------------------------------------------


def _causal(x: Sizes) -> Made:
    return Made(_causal_mask, own={"causal": True})


def _sliding_window(x: Sizes) -> Made:
    def sliding_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < WINDOW)

    return Made(sliding_window, own={"causal": True, "window_size": (WINDOW - 1, 0)})


def _prefix_lm(x: Sizes) -> Made:
    length = x.n // 4
    prefix = torch.full((x.batch,), length, dtype=torch.int32, device=x.device)

    def prefix_lm(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < prefix[b]) | (q >= k)

    return Made(prefix_lm, own=_columns(_builders().prefix_lm_causal(x.n, length, device=x.device)))


def _document_causal(x: Sizes) -> Made:
    lengths = x.lengths(8)
    ids = x.ids(lengths)

    def document_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[q] == ids[k])

    return Made(
        document_causal, own=_columns(_builders().causal_document(lengths, device=x.device))
    )


def _document(x: Sizes) -> Made:
    lengths = x.lengths(8)
    ids = x.ids(lengths)

    def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    return Made(document, own=_columns(_builders().document(lengths, device=x.device)))


def _shared_question(x: Sizes) -> Made:
    lengths = x.lengths(5)
    parts = x.ids(lengths)

    def shared_question(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((parts[q] == parts[k]) | (parts[k] == 0))

    own = _columns(_builders().share_question([lengths], device=x.device))
    return Made(shared_question, own=own)


def _global_window(x: Sizes) -> Made:
    half = WINDOW // 2

    def global_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < GLOBAL_TOKENS) | (k < GLOBAL_TOKENS) | ((q - k).abs() < half)

    own = _builders().global_sliding_window(x.n, GLOBAL_TOKENS, half - 1, device=x.device)
    return Made(global_window, own=_columns(own))


def _block_diffusion(x: Sizes) -> Made:
    """The noised sequence, then the clean one, in blocks of 32."""
    size, half = 32, x.n // 2

    def block_diffusion(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_is_clean, k_is_clean = q >= half, k >= half
        q_block = torch.where(q_is_clean, q - half, q) // size
        k_block = torch.where(k_is_clean, k - half, k) // size
        itself = (q_block == k_block) & (q_is_clean == k_is_clean)
        earlier = ~q_is_clean & k_is_clean & (q_block > k_block)
        return itself | earlier | (q_is_clean & k_is_clean & (q_block >= k_block))

    return Made(block_diffusion)


def _near(q: Sequence[Any], k: Sequence[Any], extents: Sequence[int], reach: int) -> Any:
    """Neighbourhoods that move inwards near an edge."""
    seen = None
    for q_at, k_at, extent in zip(q, k, extents, strict=True):
        near = (q_at.clamp(reach, extent - 1 - reach) - k_at).abs() <= reach
        seen = near if seen is None else seen & near
    return seen


def _natten(x: Sizes) -> Made:
    """Of an image, row by row."""
    width = 1 << (x.n.bit_length() // 2)
    reach = min(6, width // 4)
    height = max(x.n // width, 2 * reach + 1)

    def natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        places = (q // width, q % width), (k // width, k % width)
        return _near(*places, (height, width), reach)

    return Made(natten)


def _by_hand(mod: Callable[[Language, Any, Any, Any, Any], Any], names: tuple[str, ...]) -> Mod:
    """A CuTe score_mod; mod(language, score, h, q, k)."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return mod(cute_language(names, aux), score, h, q, k)

    return score_mod


def _alibi(x: Sizes) -> Made:
    heads = x.heads

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.exp2(-((h + 1) * 8.0 / heads)) * (k - q)

    def by_hand(has: Language, score: Any, h: Any, q: Any, k: Any) -> Any:
        return score + has.exp2(has.real(h + 1) * (-8.0 / heads)) * has.real(k - q)

    return Made(_causal_mask, alibi, own={"causal": True, "score_mod": _by_hand(by_hand, ())})


def _soft_cap(x: Sizes) -> Made:
    def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def by_hand(has: Language, score: Any, h: Any, q: Any, k: Any) -> Any:
        return has.tanh(score * (1.0 / SOFTCAP)) * SOFTCAP

    return Made(_causal_mask, soft_cap, own={"causal": True, "score_mod": _by_hand(by_hand, ())})


def _t5_bias(x: Sizes) -> Made:
    """A learned bias by the distance, near ones only, as T5's encoder has it."""
    table = nn.Parameter(x.floats(2 * T5_REACH + 1, x.heads))

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[(k - q).clamp(-T5_REACH, T5_REACH) + T5_REACH, h]

    return Made(None, t5_bias, (table,))


# -- others ---------------------------------------------------------------------------------------


def _dilated(x: Sizes) -> Made:
    def dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        return (distance.abs() <= 2 * WINDOW) & (distance % 4 == 0)

    return Made(dilated)


def _strided_by_head(x: Sizes) -> Made:
    def strided_by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q - k < WINDOW) | (k % 8 == h % 8))

    return Made(strided_by_head)


def _padded(x: Sizes) -> Made:
    lengths = x.ints(x.n // 2, x.n + 1, x.batch)

    def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k < lengths[b])

    return Made(padded)


def _packed_causal(x: Sizes) -> Made:
    ids = x.ids(x.lengths(8))
    places = torch.arange(x.n, device=x.device) - torch.searchsorted(ids, ids)

    def packed_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (places[q] >= places[k])

    return Made(packed_causal)


def _last_image(x: Sizes) -> Made:
    """Flamingo: text sees the tokens of the last image before it."""
    tokens = 64
    seen = x.ids(x.lengths(x.n // (2 * tokens)))

    def last_image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[q] == k // tokens

    return Made(last_image)


def _tiled_natten(x: Sizes) -> Made:
    """Tokens lie in memory tile by tile, of 8 x 8."""
    tile, across = 8, max(4, 1 << ((x.n // 64).bit_length() // 2))
    height = max(x.n // (across * tile), 16)

    def place(token: Any) -> tuple[Any, Any]:
        number, inside = token // (tile * tile), token % (tile * tile)
        row = number // across * tile + inside // tile
        return row, number % across * tile + inside % tile

    def tiled_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _near(place(q), place(k), (height, across * tile), 6)

    return Made(tiled_natten)


def _morton_natten(x: Sizes) -> Made:
    """Tokens lie in memory along a Z curve."""
    side = 1 << math.ceil(math.log2(x.n) / 2)

    def every_second_bit(code: Any) -> Any:
        code = code & 0x55555555
        for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            code = (code | (code >> shift)) & keep
        return code

    def morton_natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_place, k_place = (
            (every_second_bit(token >> 1), every_second_bit(token)) for token in (q, k)
        )
        return _near(q_place, k_place, (side, side), min(6, side // 4))

    return Made(morton_natten)


def _sliding_tiles(x: Sizes) -> Made:
    """Tiles of a video, of 128 tokens, see the tiles around theirs."""
    size, tiles = 128, (max(x.n // (128 * 16), 3), 4, 4)

    def place(token: Any) -> list[Any]:
        number, found = token // size, []
        for extent in reversed(tiles):
            found.append(number % extent)
            number = number // extent
        return found[::-1]

    def sliding_tiles(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _near(place(q), place(k), tiles, 1)

    return Made(sliding_tiles)


def _svg_spatial(x: Sizes) -> Made:
    frame = max(x.n // 16, 4)

    def svg_spatial(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q // frame - k // frame).abs() < 2) | (k < frame)

    return Made(svg_spatial)


def _svg_temporal(x: Sizes) -> Made:
    frame = max(x.n // 16, 4)
    half = frame // 8

    def svg_temporal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        offset = (q - k) % frame
        return (offset <= half) | (offset >= frame - half)

    return Made(svg_temporal)


def _draft_tree(x: Sizes) -> Made:
    """Drafted tokens, a tree, see their ancestors and the context."""
    context = x.n // 2
    place = torch.arange(x.n - context, device=x.device)
    ends = place + 1 + x.ints(0, 256, x.n - context)
    ancestors = (place[:, None] >= place) & (place[:, None] < ends)

    def draft_tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # torch's kernel reads before the table where an index is negative
        is_seen = ancestors[(q - context).clamp(min=0), (k - context).clamp(min=0)]
        return torch.where(k < context, k <= q, is_seen & (q >= k))

    return Made(draft_tree)


def _block_map(x: Sizes) -> Made:
    blocks = -(-x.n // 128)
    is_kept = x.ints(0, 4, x.batch, x.heads, blocks, blocks) == 0
    is_kept |= torch.eye(blocks, dtype=torch.bool, device=x.device)

    def block_map(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return is_kept[b, h, q // 128, k // 128]

    return Made(block_map)


def _top_blocks(x: Sizes) -> Made:
    """The numbers of the key blocks that a query block sees: a vector is compared, and reduced."""
    blocks = -(-x.n // 128)
    numbers = x.ints(0, blocks, x.batch, x.heads, blocks, 8)

    def top_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (numbers[b, h, q // 128] == (k // 128).unsqueeze(-1)).any(-1)

    return Made(top_blocks)


def _score(mod: Mod, *trained: Tensor, mask: Mod | None = _causal_mask) -> Made:
    return Made(mask, mod, trained)


def _soft_cap_by_sigmoid(x: Sizes) -> Made:
    return _score(lambda s, b, h, q, k: (2 * SOFTCAP) * torch.sigmoid(s * (2 / SOFTCAP)) - SOFTCAP)


def _sandwich(x: Sizes) -> Made:
    ratios = torch.arange(1, x.heads + 1, device=x.device) / x.heads
    frequencies = [10000 ** (-i / 4) for i in range(4)]

    def sandwich(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        waves: Any = sum(torch.cos((q - k) * frequency) for frequency in frequencies)
        return score + ratios[h] * waves

    return _score(sandwich)


def _relative_bias(x: Sizes) -> Made:
    table, behind = nn.Parameter(x.floats(x.heads, 2 * x.n)), x.n
    return _score(lambda s, b, h, q, k: s + table[h, q - k + behind], table, mask=None)


def _hidden_scores(x: Sizes) -> Made:
    return _score(
        lambda s, b, h, q, k: torch.where((q >= k) & (k != 5), s, float("-inf")), mask=None
    )


def _additive_mask(x: Sizes) -> Made:
    added = torch.where(x.ints(0, 4, 1, 1, x.n, x.n) == 0, -64.0, 0.0).to(torch.bfloat16)
    return _score(lambda s, b, h, q, k: s + added[0][0][q][k], mask=None)


def _graph_spatial(x: Sizes) -> Made:
    distances, bias = x.ints(0, 12, x.n, x.n), nn.Parameter(x.floats(12, x.heads))
    return _score(lambda s, b, h, q, k: s + bias[distances[q, k], h], bias, mask=None)


def _graph_edges(x: Sizes) -> Made:
    hops = [x.ints(0, 7, x.n, x.n).to(torch.uint8) for _ in range(3)]
    says = [nn.Parameter(x.floats(7, x.heads)) for _ in hops]

    def graph_edges(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total: Any = sum(told[edges[q, k].int(), h] for edges, told in zip(hops, says, strict=True))
        return score + total / len(hops)

    return _score(graph_edges, *says, mask=None)


def _relu_weights(x: Sizes) -> Made:
    return _score(lambda s, b, h, q, k: torch.log(torch.relu(s) + 0.125))


def _sigmoid_weights(x: Sizes) -> Made:
    return _score(lambda s, b, h, q, k: torch.log(torch.sigmoid(s)))


def _gelu_weights(x: Sizes) -> Made:
    return _score(lambda s, b, h, q, k: torch.log(F.gelu(s) + 0.25))


def _mla_rope(x: Sizes) -> Made:
    dim = 8
    rotated_q = nn.Parameter(x.floats(x.batch, x.heads, x.n, dim) / 4)
    rotated_k = nn.Parameter(x.floats(x.batch, x.n, dim) / 4)

    def mla_rope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + torch.dot(rotated_q[b, h, q], rotated_k[b, k])

    return _score(mla_rope, rotated_q, rotated_k)


NAMED = (
    FlexMod("causal", _causal),
    FlexMod("sliding_window", _sliding_window),
    FlexMod("prefix_lm", _prefix_lm, "b"),
    FlexMod("document_causal", _document_causal),
    FlexMod("document", _document),
    FlexMod("shared_question", _shared_question),
    FlexMod("global_window", _global_window),
    FlexMod("block_diffusion", _block_diffusion),
    FlexMod("natten", _natten),
    FlexMod("alibi", _alibi),
    FlexMod("soft_cap", _soft_cap),
    FlexMod("t5_bias", _t5_bias),
)
OTHERS = (
    FlexMod("dilated", _dilated),
    FlexMod("strided_by_head", _strided_by_head, "h"),
    FlexMod("padded", _padded, "b"),
    FlexMod("packed_causal", _packed_causal),
    FlexMod("last_image", _last_image),
    FlexMod("tiled_natten", _tiled_natten),
    FlexMod("morton_natten", _morton_natten),
    FlexMod("sliding_tiles", _sliding_tiles),
    FlexMod("svg_spatial", _svg_spatial),
    FlexMod("svg_temporal", _svg_temporal),
    FlexMod("draft_tree", _draft_tree, has_table=True),
    FlexMod("block_map", _block_map, "bh"),
    FlexMod("top_blocks", _top_blocks, "bh"),
    FlexMod("soft_cap_by_sigmoid", _soft_cap_by_sigmoid),
    FlexMod("sandwich", _sandwich),
    FlexMod("relative_bias", _relative_bias),
    FlexMod("hidden_scores", _hidden_scores),
    FlexMod("additive_mask", _additive_mask, has_table=True),
    FlexMod("graph_spatial", _graph_spatial, has_table=True),
    FlexMod("graph_edges", _graph_edges, has_table=True),
    FlexMod("relu_weights", _relu_weights),
    FlexMod("sigmoid_weights", _sigmoid_weights),
    FlexMod("gelu_weights", _gelu_weights),
    FlexMod("mla_rope", _mla_rope),
)
