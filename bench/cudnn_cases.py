"""Masks that `cudnn.flex_attention` holds: what the cases of `--table cudnn` are made of.

The eight masks of its own benchmark (nvidia-cudnn-frontend 1.32), drawn anew by its rules:
documents of about 10K tokens; a window of 512 keys, alone and with 4 sinks; a binary tree of 127
nodes whose lengths vary by a fifth, its nodes depth first and level by level; a window of 256 to
both sides with 8 tokens that see all and are seen by all; documents of about 12K tokens, half of
them context, half targets. Beside them those of the FlashMask paper, less random eviction, which
has no row intervals that are few. One size for all: 65536 tokens, hidden size 2048.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench import masks
from bench.everyday import Width
from bench.masks import Draw, paper_draw, split

TOKENS, HIDDEN = 65536, 2048
SIZES = {"8k": 8192, "32k": 32768}
# Of its benchmark: the name there, and the mask here.
BENCHMARK = {
    "causal": "causal",
    "document_causal": "causal_document",
    "local": "sliding_window",
    "sink_local": "sink_window",
    "tree_dfs": "tree_dfs",
    "tree_bfs": "tree_bfs",
    "longformer": "longformer_window",
    "hstu": "hstu",
}
NO_ROW_INTERVALS = ("random_eviction",)
PAPER = tuple(m for m in masks.MASKS if m != "causal" and m not in NO_ROW_INTERVALS)
MASKS = (*BENCHMARK, *PAPER)
WINDOWS = {"local": 512, "sink_local": 512, "longformer": 256}
TREE_NODES, TREE_SPREAD = 127, 0.2
DOCUMENT_SPREAD = 0.4
GROUPED_KV_HEADS = 4
GROUPED = ("causal", "share_question")
PACKED_KV_HEADS = (HIDDEN // 128, GROUPED_KV_HEADS)
FEWER_DOCUMENTS = 2
SEED = 42
WIDTHS = (Width(128, 128), Width(192, 128), Width(64, 64))


def window(name: str, n: int) -> int | None:
    """Of a mask that has one; the paper's is n / 16."""
    return WINDOWS.get(name, n // 16 if name.endswith("window") else None)


def draw(name: str, n: int) -> Draw | None:
    """The documents, or nodes of a tree, of a sequence of n tokens, at every head dimension."""
    rng = random.Random(SEED)
    if name == "document_causal":
        count = max(FEWER_DOCUMENTS, round(n / 10240))
        return Draw(tuple((length,) for length in split(n, count, rng, DOCUMENT_SPREAD)))
    if name == "hstu":
        lengths = split(n, max(1, round(n / 12288)), rng, TREE_SPREAD)
        return Draw(tuple((length // 2, length - length // 2) for length in lengths))
    if name.startswith("tree_"):
        return Draw(tuple((length,) for length in split(n, TREE_NODES, rng, TREE_SPREAD)))
    if name in PAPER and name not in ("full", "sliding_window"):
        return paper_draw(n, name)
    return None


def case_name(name: str, width: Width, size: str, *, is_backward: bool = False) -> str:
    return f"{'bwd-' if is_backward else ''}cudnn-{name}-{width.label}-{size}"


def grouped_name(name: str, *, is_backward: bool = False) -> str:
    """With GROUPED_KV_HEADS heads of K and V, at d=128 and 8K."""
    return f"{case_name(name, WIDTHS[0], '8k', is_backward=is_backward)}-kv{GROUPED_KV_HEADS}"


def packed_name(heads_kv: int, *, is_backward: bool = False) -> str:
    """Causal documents through cu_seqlens, at d=128."""
    return f"{'bwd-' if is_backward else ''}cudnn-varlen-d128-kv{heads_kv}"


def plan_name(name: str, size: str) -> str:
    """Preparing the mask, at d=128."""
    return f"cudnn-plan-{name}-{size}"


def is_planned(name: str) -> bool:
    """Whether ours prepares anything that can be timed: column intervals."""
    mask = BENCHMARK.get(name, name)
    flags = ("full", "causal", "sliding_window")
    return mask not in flags and mask not in masks.BEYOND_COLUMNS


def compared_names(width: Width, size: str, *, is_backward: bool) -> tuple[str, ...]:
    """All masks of one width, size and direction."""
    return tuple(case_name(name, width, size, is_backward=is_backward) for name in MASKS)


def other_names(*, is_backward: bool) -> tuple[str, ...]:
    """Grouped heads and packed sequences."""
    grouped = (grouped_name(name, is_backward=is_backward) for name in GROUPED)
    packed = (packed_name(heads, is_backward=is_backward) for heads in PACKED_KV_HEADS)
    return (*grouped, *packed)


def table_names() -> tuple[str, ...]:
    """All cases, in the order in which they are measured: d=128 at both lengths, the rest."""

    def names() -> Iterator[str]:
        for width in WIDTHS:
            for size in SIZES:
                for name in MASKS:
                    for way in (False, True):
                        yield case_name(name, width, size, is_backward=way)
            if width == WIDTHS[0]:
                for way in (False, True):
                    yield from other_names(is_backward=way)
                yield from (plan_name(m, size) for size in SIZES for m in MASKS if is_planned(m))

    return tuple(names())
