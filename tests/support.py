"""Cases, inputs, the float64 oracle and the error bound that every test of attention uses.

The oracle compares indices by itself: nothing here uses the package, so a wrong rule in the
package cannot agree with itself. Layouts and keywords are those of
`flash_mask_cute.interface._flash_attn_fwd`.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from mask_cases import (
    COLUMNS,
    FULL,
    LARGEST_STRETCH,
    MASK_MODS,
    PARTIAL,
    SCORE_MODS,
    Extents,
    hidden_by_columns,
    lists_of,
    make_columns,
    states_of,
)
from torch import Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NEG_INF = float("-inf")

# What sits in the rows past seqused: large, so that reading a key there shows, yet finite,
# because 0 * v is then 0.
GARBAGE = 3000.0


@dataclass(frozen=True)
class Case:
    """One forward problem.

    With `lengths_*` that side is varlen, and `batch` and `seqlen_*` (the longest) follow from it.
    `seqused_*` limits each slot of either layout. `head_dim_v` 0 means `head_dim`. `sink` is the
    dtype of learnable_sink, None for no sink. `strided`: "fused_qkv" (q, k, v are slices of one
    tensor), "transposed" (heads before sequence in memory), "unreadable" (none of them as TMA can
    read it: every second element, rows of 4 elements more, one element late) or None (contiguous).

    `column`, `mask_mod` and `score_mod` name recipes of `mask_cases`; the column intervals are for
    all heads together (`column_heads` "1"), for each of k ("kv") or of q ("q"). `blocks`, the
    (queries, keys) of a block, asks for block lists, one per query head if anything depends on it.
    """

    id: str
    batch: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 128
    head_dim_v: int = 0
    dtype: torch.dtype = BF16
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: torch.dtype | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    strided: str | None = None
    pack_gqa: bool | None = None
    column: str | None = None
    column_heads: str = "1"
    mask_mod: str | None = None
    score_mod: str | None = None
    blocks: tuple[int, int] | None = None
    tier: str = "quick"

    def __post_init__(self) -> None:
        derived: dict[str, int] = {"head_dim_v": self.head_dim_v or self.head_dim}
        for lengths, seqlen in ((self.lengths_q, "seqlen_q"), (self.lengths_k, "seqlen_k")):
            if lengths is not None:
                derived.update({"batch": len(lengths), seqlen: max(lengths)})
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        per_batch = (self.lengths_q, self.lengths_k, self.seqused_q, self.seqused_k)
        assert all(x is None or len(x) == self.batch for x in per_batch), self.id
        assert self.heads_q % self.heads_kv == 0, self.id
        assert self.strided in (None, "fused_qkv", "transposed", "unreadable"), self.id
        assert self.tier in ("quick", "full"), self.id
        assert self.column_heads in ("1", "kv", "q"), self.id
        needs_causal = self.column is not None and COLUMNS[self.column].num_vectors == 1
        assert self.causal or not needs_causal, self.id

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def has_masks(self) -> bool:
        """Whether it has anything of `mask_cases`."""
        return (self.column, self.mask_mod, self.score_mod, self.blocks) != (None,) * 4

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def packed_if_supported(self) -> Case:
        """Packing is refused where the heads of a group may see different things by list or by
        column: there it is left to the library."""
        differs = self.blocks is not None or (self.column is not None and self.column_heads == "q")
        return replace(self, pack_gqa=None) if differs else self


SELF = (1, 63, 0, 129, 255)
DOCS = (17, 1000, 3, 511, 2049, 128, 1, 391)

# Neighbours share what decides the generated code (dtype, head dims, group, layout, mask kind),
# so that a run over the table compiles each kernel once.
CASES = (
    # bf16, d = 128, no mask; a peaked softmax (the running maximum moves) and a flat one
    Case("dense-1x1", 1, 1, 1),
    Case("dense-127x129", 2, 127, 129, 3, 3),
    Case("dense-255x1000", 1, 255, 1000),
    Case("dense-1x1000", 3, 1, 1000),
    Case("dense-1000x63", 1, 1000, 63),
    Case("dense-peaked-127x1000", 1, 127, 1000, softmax_scale=0.5),
    Case("dense-flat-127x1000", 1, 127, 1000, softmax_scale=1e-6),
    Case("dense-scale-0-127x1000", 1, 127, 1000, softmax_scale=0.0),
    Case("dense-scale-negative-255x300", 1, 255, 300, softmax_scale=-0.3),
    Case("dense-unreadable-255x129", 2, 255, 129, strided="unreadable"),
    Case("dense-129x129-fused_qkv", 2, 129, 129, strided="fused_qkv"),
    Case("dense-255x129-transposed", 2, 255, 129, strided="transposed"),
    Case("dense-2049x4097", 2, 2049, 4097, 4, 4, tier="full"),
    # causal, both relations of the lengths; with more queries than keys some rows see nothing
    Case("causal-1x1", 1, 1, 1, causal=True),
    Case("causal-127x127", 2, 127, 127, causal=True),
    Case("causal-129x129", 1, 129, 129, causal=True),
    Case("causal-1x255", 2, 1, 255, causal=True),
    Case("causal-255x1000", 1, 255, 1000, causal=True),
    Case("causal-1000x255-empty-rows", 1, 1000, 255, causal=True),
    Case("causal-129x63-empty-rows", 1, 129, 63, causal=True),
    Case("causal-1000x1000-fused_qkv", 1, 1000, 1000, causal=True, strided="fused_qkv"),
    Case("causal-4097x4097", 2, 4097, 4097, 4, 4, causal=True, tier="full"),
    Case("causal-1023x8193", 1, 1023, 8193, causal=True, tier="full"),
    # windows: both sides; one side open; the diagonal alone; together with causal
    Case("window-37-5-255x255", 2, 255, 255, window_left=37, window_right=5),
    Case("window-0-0-129x129", 1, 129, 129, window_left=0, window_right=0),
    Case("window-127-128-300x1000", 1, 300, 1000, window_left=127, window_right=128),
    Case("window-20-10-1000x255-empty-rows", 1, 1000, 255, window_left=20, window_right=10),
    Case("window-1024-2049x4097", 1, 2049, 4097, window_left=1024, window_right=9, tier="full"),
    Case("window-100-open-129x1000", 1, 129, 1000, window_left=100),
    Case("window-0-open-1000x129", 1, 1000, 129, window_left=0),
    Case("window-open-17-255x129", 1, 255, 129, window_right=17),
    Case("window-open-129-127x1000", 1, 127, 1000, window_right=129),
    Case("window-64-causal-1000x1000", 1, 1000, 1000, causal=True, window_left=64),
    Case("window-90-9-causal-129x255", 1, 129, 255, causal=True, window_left=90, window_right=9),
    # bands that are shifted past the diagonal: to keys before the query, and to keys behind it
    Case("window-70-before-9-255x300", 1, 255, 300, window_left=70, window_right=-9),
    Case("window-70-before-9-400x129-empty-rows", 1, 400, 129, window_left=70, window_right=-9),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("window-before-40-300x255", 1, 300, 255, window_right=-40),
    Case("window-before-2-causal-255x255", 1, 255, 255, causal=True, window_right=-2),
    Case("window-behind-5-129x400", 1, 129, 400, window_left=-5),
    Case("window-512-causal-8191x8191", 1, 8191, 8191, causal=True, window_left=512, tier="full"),
    # softcap and sink
    Case("softcap-30-129x1000", 1, 129, 1000, softcap=30.0),
    Case("softcap-2-causal-255x255", 1, 255, 255, causal=True, softcap=2.0),
    Case("sink-bf16-127x255", 2, 127, 255, 3, 3, sink=BF16),
    Case("sink-fp32-causal-1000x255-empty-rows", 1, 1000, 255, causal=True, sink=FP32),
    Case("softcap-scale-negative", 1, 129, 129, softcap=30.0, softmax_scale=-0.5),
    Case("sink-fp64-127x255", 2, 127, 255, 3, 3, sink=FP64),
    Case("sink-softcap-window", 1, 129, 129, window_left=31, softcap=20.0, sink=FP32),
    # grouped heads, packed and not; groups that are no power of two
    Case("gqa4-129x255", 2, 129, 255, 8, 2, pack_gqa=False),
    Case("gqa4-causal-255x1000", 1, 255, 1000, 8, 2, causal=True, pack_gqa=False),
    Case("gqa4-packed-129x255", 2, 129, 255, 8, 2, pack_gqa=True),
    Case("gqa4-packed-transposed", 1, 129, 255, 8, 2, pack_gqa=True, strided="transposed"),
    Case("gqa4-packed-causal-255x1000", 1, 255, 1000, 8, 2, causal=True, pack_gqa=True),
    Case("gqa4-packed-causal-empty-rows", 1, 255, 63, 4, 1, causal=True, pack_gqa=True),
    Case("gqa3-window-127x213", 1, 127, 213, 6, 2, causal=True, window_left=40),
    Case("gqa7-sink-1x1000", 2, 1, 1000, 7, 1, sink=BF16),
    Case("gqa8-causal-1001x1001", 2, 1001, 1001, 16, 2, causal=True, tier="full"),
    # varlen on both sides, with lengths of zero on either; on one side; slots in part used
    Case("varlen-self", lengths_q=SELF, lengths_k=SELF),
    Case("varlen-cross", lengths_q=(127, 5, 0, 64), lengths_k=(300, 0, 17, 1)),
    Case("varlen-self-causal", lengths_q=SELF, lengths_k=SELF, causal=True),
    Case("varlen-self-fused_qkv", lengths_q=SELF, lengths_k=SELF, causal=True, strided="fused_qkv"),
    Case("varlen-cross-causal", lengths_q=(255, 63, 1), lengths_k=(129, 63, 500), causal=True),
    Case(
        "varlen-unreadable-scale-negative",
        lengths_q=SELF,
        lengths_k=SELF,
        strided="unreadable",
        softmax_scale=-0.1,
    ),
    Case(
        "varlen-window-before-20", lengths_q=SELF, lengths_k=SELF, window_left=90, window_right=-20
    ),
    Case("varlen-q-dense-k", seqlen_k=255, lengths_q=(127, 1, 0, 200), causal=True),
    Case("dense-q-varlen-k", seqlen_q=129, lengths_k=(255, 1, 0, 200), causal=True),
    Case("varlen-sink-window", lengths_q=SELF, lengths_k=SELF, window_left=40, sink=BF16),
    Case(
        "varlen-gqa4-packed-window",
        heads_q=4,
        heads_kv=1,
        lengths_q=(129, 1, 255),
        lengths_k=(255, 127, 100),
        window_left=33,
        window_right=7,
        pack_gqa=True,
    ),
    Case(
        "varlen-documents", 0, 0, 0, 8, 2, lengths_q=DOCS, lengths_k=DOCS, causal=True, tier="full"
    ),
    Case("seqused-k-causal", 3, 129, 300, seqused_k=(300, 65, 0), causal=True),
    Case(
        "seqused-both-window", 2, 255, 255, seqused_q=(130, 0), seqused_k=(255, 77), window_left=9
    ),
    Case(
        "varlen-seqused-causal",
        lengths_q=(129, 255),
        lengths_k=(255, 300),
        seqused_q=(100, 255),
        seqused_k=(255, 131),
        causal=True,
    ),
    # d = 64
    Case("fp16-d64-255x1000", 1, 255, 1000, head_dim=64, dtype=FP16),
    Case("fp16-d64-causal-1000x1000", 1, 1000, 1000, 4, 4, 64, dtype=FP16, causal=True),
    Case("fp16-d64-gqa2-window", 1, 513, 513, 4, 2, 64, dtype=FP16, causal=True, window_left=127),
    Case("fp16-d64-sink-fp16", 1, 127, 129, head_dim=64, dtype=FP16, sink=FP16, tier="full"),
    Case("bf16-d64-causal-2049x2049", 1, 2049, 2049, 8, 8, 64, causal=True, tier="full"),
    # other head dims, d != d_v, multiples of 8 that are none of 16
    Case("d96-causal-129x255", 1, 129, 255, head_dim=96, causal=True),
    Case("d72-dv40-127x129", 1, 127, 129, head_dim=72, head_dim_v=40),
    Case("d192-dv128-causal-255x255", 1, 255, 255, 2, 2, 192, 128, causal=True),
    Case("d256-gqa2-causal-129x300", 1, 129, 300, 2, 1, 256, causal=True),
    Case("d8-255x129", 1, 255, 129, head_dim=8, tier="full"),
    Case("d16-dv8-causal", 1, 129, 129, 2, 2, 16, 8, causal=True, tier="full"),
    Case("d32-causal", 1, 129, 1000, head_dim=32, causal=True, tier="full"),
    Case("d40-fp16-window", 1, 129, 129, 2, 2, 40, dtype=FP16, window_left=20, tier="full"),
    Case("d64-dv128-causal", 1, 127, 255, 2, 2, 64, 128, causal=True, tier="full"),
    Case("d128-dv64-causal", 1, 127, 255, 2, 2, 128, 64, causal=True, tier="full"),
    Case("d64-dv256-causal", 1, 127, 255, 2, 2, 64, 256, causal=True, tier="full"),
    Case("d160-causal", 1, 255, 255, head_dim=160, causal=True, tier="full"),
    Case("d248-dv184-gqa2-packed", 1, 129, 255, 4, 2, 248, 184, pack_gqa=True, tier="full"),
)
QUICK_CASES = tuple(case for case in CASES if case.tier == "quick")

# Column intervals, block lists and callables, which compose with each other and with the rest.
MASK_CASES = (
    Case("columns-random1", 2, 255, 255, causal=True, column="random1"),
    Case("columns-stepped1-q", 1, 300, 400, causal=True, column="stepped1", column_heads="q"),
    Case("columns-documents1", 2, 300, 300, causal=True, column="documents1"),
    Case("columns-blinding1-empty-rows", 2, 129, 200, causal=True, column="blinding1"),
    Case("columns-random2-causal", 1, 200, 300, causal=True, column="random2"),
    Case("columns-stepped2-causal-d64", 1, 300, 400, head_dim=64, causal=True, column="stepped2"),
    Case("columns-random2", 1, 129, 255, column="random2"),
    Case("columns-documents2", 2, 300, 300, column="documents2"),
    Case("columns-blinding2-empty-rows", 2, 200, 129, causal=True, column="blinding2"),
    Case("columns-stepped4", 1, 300, 400, column="stepped4"),
    Case("columns-random4-causal-sink", 1, 255, 129, causal=True, sink=FP32, column="random4"),
    Case("columns-blinding4-window", 1, 200, 300, window_left=90, column="blinding4"),
    Case(
        "columns-stepped2-gqa2-packed-q",
        1, 200, 300, 4, 2, column="stepped2", column_heads="q", pack_gqa=True,
    ),
    Case(
        "columns-stepped2-gqa4-packed-causal",
        1, 129, 300, 4, 1, causal=True, column="stepped2", column_heads="kv", pack_gqa=True,
    ),
    Case(
        "columns-varlen-stepped1",
        lengths_q=(129, 0, 200), lengths_k=(200, 63, 170), causal=True, column="stepped1",
    ),
    Case(
        "columns-varlen-documents2",
        lengths_q=(1, 255, 63), lengths_k=(1, 255, 63), column="documents2", column_heads="q",
    ),
    Case("mask-checks", 1, 129, 255, mask_mod="checks"),
    Case("mask-causal-offset", 1, 200, 300, mask_mod="causal_offset", blocks=(128, 128)),
    Case("mask-documents", 2, 255, 255, mask_mod="documents", blocks=(64, 64)),
    Case("mask-prefix-causal-window", 2, 200, 200, window_left=70, mask_mod="prefix_lm"),
    Case("mask-eviction-gqa2-packed", 2, 129, 200, 4, 2, mask_mod="eviction", pack_gqa=True),
    Case("mask-eviction-blocks", 2, 200, 300, 2, 2, mask_mod="eviction", blocks=(32, 128)),
    Case(
        "mask-varlen-documents",
        lengths_q=(129, 200), lengths_k=(200, 63), mask_mod="documents", blocks=(128, 128),
    ),
    Case("blocks-alone", 2, 300, 400, blocks=(128, 128)),
    Case("blocks-odd-causal", 1, 255, 255, causal=True, blocks=(48, 80)),
    Case("score-alibi-causal", 1, 129, 255, causal=True, score_mod="alibi"),
    Case("score-alibi-scale-negative", 1, 129, 255, score_mod="alibi", softmax_scale=-0.1),
    Case("score-t5-softcap", 1, 129, 129, softcap=20.0, score_mod="t5"),
    Case("score-head-bias-gqa2-packed", 1, 127, 129, 4, 2, score_mod="head_bias", pack_gqa=True),
    Case(
        "score-scale-columns-mask-blocks",
        1, 255, 300, causal=True, column="stepped2", mask_mod="documents", score_mod="scale",
        blocks=(128, 128),
    ),
    Case(
        "everything-varlen",
        heads_q=4, heads_kv=2, lengths_q=(129, 63), lengths_k=(200, 129), causal=True,
        window_left=150, softcap=15.0, sink=BF16, column="random1", column_heads="kv",
        mask_mod="checks", score_mod="t5", blocks=(64, 64), pack_gqa=True,
    ),
)  # fmt: skip


# Four heads that share what a mask_mod answers.
STORED_CASES = (
    Case("stored-alone", 1, 200, 300, 4, 2, mask_mod="checks"),
    Case(
        "stored-lists-causal",
        2, 300, 400, 4, 4, causal=True, mask_mod="documents", blocks=(128, 128),
    ),
    Case("stored-lists-of-256", 1, 300, 600, 4, 4, mask_mod="causal_offset", blocks=(256, 256)),
    Case(
        "stored-odd-lists-d64",
        2, 129, 200, 4, 4, head_dim=64, mask_mod="documents", blocks=(64, 48),
    ),
    Case(
        "stored-lists-d64", 1, 400, 400, 4, 4, head_dim=64, mask_mod="documents", blocks=(128, 128)
    ),
    Case(
        "stored-columns-bias",
        1, 255, 300, 4, 4, causal=True, column="stepped2", mask_mod="documents",
        score_mod="head_bias", blocks=(128, 128),
    ),
    # one entry of answers for all of the batch
    Case("stored-for-a-batch", 2, 300, 200, 4, 4, mask_mod="causal_offset"),
)  # fmt: skip

# The same with packed sequences, some of them without queries or keys.
STORED_VARLEN_CASES = (
    Case(
        "stored-varlen",
        heads_q=4, heads_kv=2, lengths_q=(200, 0, 129, 70), lengths_k=(300, 64, 129, 0),
        mask_mod="documents",
    ),
    Case(
        "stored-varlen-causal-odd-lists-d64",
        heads_q=4, heads_kv=4, head_dim=64, lengths_q=(1, 300, 250), lengths_k=(1, 300, 400),
        causal=True, mask_mod="documents", blocks=(48, 80),
    ),
    Case(
        "stored-varlen-columns-bias",
        heads_q=4, heads_kv=4, lengths_q=(255, 130), lengths_k=(300, 130), column="stepped2",
        mask_mod="checks", score_mod="head_bias",
    ),
)  # fmt: skip


# Documents of 50 tokens on average, or none, which `documents_packed` makes packed sequences of.
DOCUMENT_CASES = (
    Case("packed-two-entries", 2, 800, 800, 4, 4, mask_mod="documents"),
    Case("packed-gqa-d64", 1, 1100, 1100, 4, 2, head_dim=64, sink=FP32, mask_mod="documents"),
    Case(
        "packed-causal-odd-lists",
        1, 700, 700, 4, 4, causal=True, sink=BF16, mask_mod="documents", blocks=(48, 80),
    ),
    Case("packed-one", 2, 600, 600, 4, 4, head_dim=64, softcap=9.0, mask_mod="causal_offset"),
    Case(
        "packed-window-lists",
        1, 900, 900, 4, 4, window_left=90, mask_mod="documents", blocks=(128, 128),
    ),
    Case(
        "packed-window-before-20",
        1, 700, 700, 4, 4, window_left=150, window_right=-20, mask_mod="documents",
    ),
)  # fmt: skip


# Documents told by intervals, for masks that say so.
COLUMN_DOCUMENT_CASES = (
    Case("causal-gqa2", 1, 1100, 1100, 2, 1, head_dim=64, causal=True, column="documents1"),
    Case("both-ways", 2, 600, 600, 1, 1, column="documents2"),
    Case("unreadable", 2, 600, 600, 1, 1, causal=True, column="documents1", strided="unreadable"),
)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, `_flash_attn_fwd(x.q, x.k, x.v, **x.keywords)`, and the oracle's
    results for it, computed when first asked for."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    plain_keywords: dict[str, Any]
    mask_keywords: dict[str, Any] = field(default_factory=dict)
    dense: DenseMasks | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        return self.plain_keywords | self.mask_keywords

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        return reference_attention(self.q, self.k, self.v, self.dense, **self.plain_keywords)

    @cached_property
    def eager(self) -> tuple[Tensor, Tensor]:
        return eager_same_dtype(self.q, self.k, self.v, self.dense, **self.plain_keywords)

    def rows_in_use(self, side: str) -> Tensor:
        """Boolean, the shape of q ("q") or k ("k") without heads and d: false past seqused."""
        x = self.q if side == "q" else self.k
        lengths = getattr(self.case, f"lengths_{side}")
        used = getattr(self.case, f"seqused_{side}")
        in_use = torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
        if used is not None:
            slots = in_use if lengths is None else in_use.split(lengths)
            for slot, length in zip(slots, used, strict=True):
                slot[length:] = False
        return in_use


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Normal q, k, v, the same on every device, and the keywords of the public call.

    Rows past seqused hold GARBAGE.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    def int32(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    slots_q = (case.batch, case.seqlen_q) if case.lengths_q is None else (sum(case.lengths_q),)
    slots_k = (case.batch, case.seqlen_k) if case.lengths_k is None else (sum(case.lengths_k),)
    if case.strided == "fused_qkv":
        assert slots_q == slots_k and case.head_dim == case.head_dim_v, case.id
        fused = normal(*slots_q, case.heads_q + 2 * case.heads_kv, case.head_dim)
        q, k, v = fused.split((case.heads_q, case.heads_kv, case.heads_kv), dim=-2)
    else:
        shapes = (
            (*slots_q, case.heads_q, case.head_dim),
            (*slots_k, case.heads_kv, case.head_dim),
            (*slots_k, case.heads_kv, case.head_dim_v),
        )
        if case.strided == "transposed":
            q, k, v = (normal(*s[:-3], s[-2], s[-3], s[-1]).transpose(-3, -2) for s in shapes)
        elif case.strided == "unreadable":
            shape_q, (*rows_k, dim), shape_v = shapes
            q = normal(*shape_q, 2)[..., 0]
            k = normal(*rows_k, dim + 4)[..., :dim]
            v = normal(math.prod(shape_v) + 1)[1:].view(shape_v)
        else:
            q, k, v = (normal(*s) for s in shapes)

    keywords: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size_left": case.window_left,
        "window_size_right": case.window_right,
        "softcap": case.softcap,
        "learnable_sink": None if case.sink is None else normal(case.heads_q).to(case.sink),
        "seqused_q": int32(case.seqused_q),
        "seqused_k": int32(case.seqused_k),
        "pack_gqa": case.pack_gqa,
    }
    for side, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
        if lengths is not None:
            keywords[f"cu_seqlens_{side}"] = int32((0, *accumulate(lengths)))
            keywords[f"max_seqlen_{side}"] = max(lengths)
    dense = DenseMasks.create(case, seed).to(device) if case.has_masks else None
    mask_keywords = {} if dense is None else dense.keywords()
    inputs = Inputs(case, q, k, v, keywords, mask_keywords, dense)
    for side, tensors in (("q", (q,)), ("k", (k, v))):
        for tensor in tensors:
            tensor[~inputs.rows_in_use(side)] = GARBAGE
    return inputs


def make_growing_inputs(
    head_dim: int,
    tile_n: int,
    column: int,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Three tiles of keys, visited from the last to the first; each has a key, in `column`, that a
    third of the rows see far above all before: so far that the maximum in use counts as too old,
    and then that an exponential by it is infinite."""
    seqlen = 3 * tile_n
    case = Case("growing", 1, seqlen, seqlen, 1, 1, head_dim=head_dim, causal=causal)
    inputs = make_inputs(case, device)
    q, k = inputs.q, inputs.k
    q[:, ::3] = q[:, :1]
    for growth, tile in ((5, 1), (90, 0)):
        k[0, tile * tile_n + column] = q[0, 0] * growth
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) * head_dim**-0.5
    largest = scores.unflatten(1, (3, tile_n)).amax(2) / math.log(2)
    # more than sums of bf16 may reach, and more than a float can hold
    assert 30 < largest[0, 1] - largest[0, 2] < 100 and largest[0, 0] - largest[0, 1] > 128
    return inputs


@dataclass(frozen=True)
class DenseMasks:
    """The masks and callables of a case, dense and in torch.

    columns: of each sequence (one for all if it is shared), int32 (heads, seqlen_k, n). states: of
    the blocks, (batch | 1, heads_q | 1, num_q_blocks, num_k_blocks).
    """

    case: Case
    columns: list[Tensor] | None
    aux: list[Tensor] | None
    states: Tensor | None
    device: torch.device = torch.device("cpu")

    @staticmethod
    def create(case: Case, seed: int) -> DenseMasks:
        # a seed of its own, so that q, k and v of a case do not depend on its masks
        seed += zlib.crc32(case.id.encode())
        generator = torch.Generator().manual_seed(seed)
        extents = Extents(case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        recipes = [MASK_MODS.get(case.mask_mod or ""), SCORE_MODS.get(case.score_mod or "")]
        aux = [r.aux(extents, generator) for r in recipes if r is not None and r.aux is not None]
        columns = None
        if case.column is not None:
            heads = {"1": 1, "kv": case.heads_kv, "q": case.heads_q}[case.column_heads]
            lengths_q = case.seqused_q or case.lengths_q or (case.seqlen_q,) * case.batch
            lengths_k = case.lengths_k or (case.seqlen_k,) * case.batch
            recipe = COLUMNS[case.column]
            if recipe.is_shared and case.lengths_k is None:
                lengths_q, lengths_k = (max(lengths_q),), (case.seqlen_k,)
            columns = make_columns(recipe, heads, lengths_q, lengths_k, seed)
        masks = DenseMasks(case, columns, aux or None, None)
        if case.blocks is None:
            return masks
        return replace(masks, states=masks._make_states(case.blocks, random.Random(seed)))

    def to(self, device: torch.device | str) -> DenseMasks:
        return DenseMasks(
            self.case,
            None if self.columns is None else [x.to(device) for x in self.columns],
            None if self.aux is None else [x.to(device) for x in self.aux],
            None if self.states is None else self.states.to(device),
            torch.device(device),
        )

    def _make_states(self, block_size: tuple[int, int], rng: random.Random) -> Tensor:
        """From what mask_mod shows or, without one, a coarse random pattern per batch and head."""
        recipe = MASK_MODS.get(self.case.mask_mod or "")
        heads = range(self.case.heads_q if recipe is None or recipe.per_head else 1)
        batch = range(self.case.batch if recipe is None or recipe.per_batch else 1)
        shape = self.case.seqlen_q, self.case.seqlen_k
        generator = torch.Generator().manual_seed(rng.randrange(2**32))

        def dense(b: int, h: int) -> Tensor:
            if recipe is not None:
                return self._asked(b, h, *shape)
            coarse = torch.rand((shape[0] // 90 + 1, shape[1] // 90 + 1), generator=generator) < 0.6
            return coarse.repeat_interleave(90, 0).repeat_interleave(90, 1)[: shape[0], : shape[1]]

        states = [[states_of(dense(b, h), block_size, rng) for h in heads] for b in batch]
        return torch.stack([torch.stack(of_batch) for of_batch in states])

    def keywords(self) -> dict[str, Any]:
        """What a caller passes."""
        keywords: dict[str, Any] = {}
        if self.columns is not None:
            packed = self.case.lengths_k is not None
            join = (lambda c: torch.cat(c, dim=1)[None]) if packed else torch.stack
            keywords["startend_row_indices"] = join(self.columns)
            if self._has_fewer_queries:
                keywords["q_start"] = 0
        if self.case.mask_mod is not None:
            keywords["mask_mod"] = MASK_MODS[self.case.mask_mod].cute
        if self.case.score_mod is not None:
            keywords["score_mod"] = SCORE_MODS[self.case.score_mod].cute
        if self.aux is not None:
            keywords["aux_tensors"] = self.aux
        if self.states is not None:
            from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch

            partial, full = lists_of(self.states, PARTIAL), lists_of(self.states, FULL)
            keywords["block_sparse_tensors_torch"] = BlockSparseTensorsTorch(
                *partial, *full, block_size=self.case.blocks
            )
        return keywords

    @property
    def _has_fewer_queries(self) -> bool:
        """Whether the call has fewer queries than keys, all sequences together."""
        case = self.case
        rows_q = case.batch * case.seqlen_q if case.lengths_q is None else sum(case.lengths_q)
        rows_k = case.batch * case.seqlen_k if case.lengths_k is None else sum(case.lengths_k)
        return rows_q < rows_k

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k), what these masks leave of a head; lengths are those in use."""
        asked = self._asked(batch_idx, head_idx, seqlen_q, seqlen_k)
        if self.states is not None and self.case.blocks is not None:
            block_q, block_k = self.case.blocks
            states = self.states[
                min(batch_idx, self.states.shape[0] - 1), min(head_idx, self.states.shape[1] - 1)
            ]
            states = states.repeat_interleave(block_q, 0).repeat_interleave(block_k, 1)
            states = states[:seqlen_q, :seqlen_k]
            asked = (states == FULL) | ((states == PARTIAL) & asked)
        if self.columns is None:
            return asked
        columns = self.columns[min(batch_idx, len(self.columns) - 1)]
        mask_head = head_idx * columns.shape[0] // self.case.heads_q
        return asked & ~hidden_by_columns(columns[mask_head, :seqlen_k], seqlen_q, self.case.causal)

    def _asked(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        q = torch.arange(seqlen_q, device=self.device)[:, None]
        k = torch.arange(seqlen_k, device=self.device)
        visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=self.device)
        if self.case.mask_mod is None:
            return visible
        return visible & MASK_MODS[self.case.mask_mod].dense(batch_idx, head_idx, q, k, self.aux)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        """score_mod of one head's scores (seqlen_q, seqlen_k)."""
        if self.case.score_mod is None:
            return scores
        q = torch.arange(scores.shape[0], device=scores.device)[:, None]
        k = torch.arange(scores.shape[1], device=scores.device)
        recipe = SCORE_MODS[self.case.score_mod]
        return recipe.dense(scores, batch_idx, head_idx, q, k, self.aux)


class Rule(NamedTuple):
    softmax_scale: float
    causal: bool
    window_left: int | None
    window_right: int | None
    softcap: float
    sink: Tensor | None


class OneSequence(NamedTuple):
    """One batch entry: q (seqlen_q, heads_q, d), k and v (seqlen_k, heads_kv, .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch_idx: int
    dense: DenseMasks | None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def modified(self, scores: Tensor, head_idx: int) -> Tensor:
        """Scores (seqlen_q, seqlen_k) of a query head after score_mod."""
        return scores if self.dense is None else self.dense.modify(scores, self.batch_idx, head_idx)

    def hidden(self, rule: Rule, head_idx: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k) of a query head."""
        lengths = self.q.shape[0], self.k.shape[0]
        visible = visible_mask(*lengths, rule, self.q.device)
        if self.dense is not None:
            visible &= self.dense.visible(self.batch_idx, head_idx, *lengths)
        return ~visible


def visible_mask(seqlen_q: int, seqlen_k: int, rule: Rule, device: torch.device) -> Tensor:
    """Boolean (seqlen_q, seqlen_k). `ahead` counts how far a key lies beyond the row's own key;
    the last row's own key is the last one."""
    row = torch.arange(seqlen_q, device=device)[:, None]
    ahead = torch.arange(seqlen_k, device=device)[None, :] - (row + seqlen_k - seqlen_q)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if rule.causal:
        visible &= ahead <= 0
    if rule.window_left is not None:
        visible &= ahead >= -rule.window_left
    if rule.window_right is not None:
        visible &= ahead <= rule.window_right
    return visible


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, dense: DenseMasks | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Dense attention in float64 with the public call's keywords, those of masks as `dense`.

    Returns out and lse, both float64, in the public layouts. Rows past seqused_q and rows that see
    nothing hold 0 and -inf; with a sink the latter hold the sink as lse.
    """
    return _attend_each_sequence(_float64_sequence, FP64, q, k, v, dense, **keywords)


def eager_same_dtype(
    q: Tensor, k: Tensor, v: Tensor, dense: DenseMasks | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """What a torch user would write, whose error is the unit of the bound: both matmuls in the
    dtype of the inputs, score_mod and softmax in float32 (float64 for float64 inputs).

    Returns like `reference_attention`, but out in the dtype of the inputs.
    """
    return _attend_each_sequence(eager_sequence, q.dtype, q, k, v, dense, **keywords)


def _attend_each_sequence(
    attend: Callable[[OneSequence, Rule], tuple[Tensor, Tensor]],
    out_dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: DenseMasks | None,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    rule = rule_of(q, **keywords)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype, device=q.device)
    lse_by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    slots = sequences((q, out, lse_by_row), (k, v), **keywords)
    for i, ((q_i, out_i, lse_i), (k_i, v_i)) in enumerate(slots):
        out_of_sequence, lse = attend(OneSequence(q_i, k_i, v_i, i, dense), rule)
        out_i.copy_(out_of_sequence)
        lse_i.copy_(lse.T)
    return out, lse_by_row.transpose(-1, -2)


def rule_of(
    q: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    pack_gqa: bool | None = None,
) -> Rule:
    """Of the keywords of the public call. Lengths are `sequences`' matter; max_seqlen_* and
    pack_gqa change nothing, as they should nowhere."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Rule(scale, causal, window_size_left, window_size_right, softcap, learnable_sink)


def sequences(
    like_q: tuple[Tensor, ...], like_k: tuple[Tensor, ...], **keywords: Any
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """For every batch entry, the views of the used rows of tensors laid out like q and like k."""
    slots_q = _slots(like_q, keywords.get("cu_seqlens_q"), keywords.get("seqused_q"))
    slots_k = _slots(like_k, keywords.get("cu_seqlens_k"), keywords.get("seqused_k"))
    return zip(slots_q, slots_k, strict=True)


def _slots(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Iterator[tuple[Tensor, ...]]:
    """For every batch entry, the views of its used rows."""
    if cu_seqlens is None:
        slots = [tuple(t[i] for t in tensors) for i in range(tensors[0].shape[0])]
    else:
        edges = cu_seqlens.tolist()
        slots = [tuple(t[a:b] for t in tensors) for a, b in zip(edges, edges[1:], strict=False)]
    used = [slot[0].shape[0] for slot in slots] if seqused is None else seqused.tolist()
    return (tuple(t[:n] for t in slot) for slot, n in zip(slots, used, strict=True))


class Head(NamedTuple):
    """One query head in float64: q (seqlen_q, d), k and v (seqlen_k, .), sink () or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None

    @staticmethod
    def of(x: OneSequence, rule: Rule, head_idx: int) -> Head:
        k, v = (y[:, head_idx // x.group].double() for y in (x.k, x.v))
        sink = None if rule.sink is None else rule.sink[head_idx].double()
        return Head(x.q[:, head_idx].double(), k, v, sink)

    def as_leaves(self) -> Head:
        sink = None if self.sink is None else self.sink.detach().requires_grad_()
        q, k, v = (y.detach().requires_grad_() for y in (self.q, self.k, self.v))
        return Head(q, k, v, sink)

    def scores(self, x: OneSequence, rule: Rule, head_idx: int) -> tuple[Tensor, Tensor]:
        """Scaled scores, and what softcap and score_mod make of them."""
        raw = self.q @ self.k.T * rule.softmax_scale
        capped = rule.softcap * torch.tanh(raw / rule.softcap) if rule.softcap else raw
        return raw, x.modified(capped, head_idx)

    def attend(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and probabilities of masked scores, of any size. Rows without a term have
        gradients of 0."""
        sink = scores.new_tensor(NEG_INF) if self.sink is None else self.sink
        terms = torch.cat([sink.expand(scores.shape[0], 1), scores], dim=1)
        empty = terms.isneginf().all(dim=1)
        largest = terms.detach().amax(dim=1).masked_fill(empty, 0.0)
        # torch.logsumexp takes its derivative from its result, which may be too large for that
        shifted = terms - largest[:, None]
        log_total = torch.exp(shifted).sum(dim=1).masked_fill(empty, 1.0).log()
        probabilities = torch.exp(shifted[:, 1:] - log_total[:, None])
        lse = (largest + log_total).masked_fill(empty, NEG_INF)
        return probabilities @ self.v, lse, probabilities


def _float64_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, d_v) and lse (heads_q, seqlen_q)."""
    out = x.q.new_empty((*x.q.shape[:2], x.v.shape[-1]), dtype=FP64)
    lse = x.q.new_empty(x.q.shape[1::-1], dtype=FP64)
    for head_idx in range(x.q.shape[1]):  # one at a time: a long case would not fit otherwise
        head = Head.of(x, rule, head_idx)
        _, scores = head.scores(x, rule, head_idx)
        scores = scores.masked_fill(x.hidden(rule, head_idx), NEG_INF)
        out[:, head_idx], lse[head_idx], _ = head.attend(scores)
    return out, lse


def eager_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, d_v) in the dtype of the inputs and lse (heads_q, seqlen_q)."""
    softmax_dtype = torch.promote_types(x.q.dtype, FP32)
    k = x.k.repeat_interleave(x.group, dim=1)
    v = x.v.repeat_interleave(x.group, dim=1)
    scores = x.q.transpose(0, 1) @ k.permute(1, 2, 0) * rule.softmax_scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    modified = [x.modified(of_head, head) for head, of_head in enumerate(scores.to(softmax_dtype))]
    # also where a score_mod gives -inf, so that a row of nothing else has no NaN for a gradient
    logits = torch.stack(
        [
            of_head.masked_fill(x.hidden(rule, head) | of_head.isneginf(), NEG_INF)
            for head, of_head in enumerate(modified)
        ]
    )
    if rule.sink is not None:
        sink_column = rule.sink.to(softmax_dtype)[:, None, None].expand(-1, x.q.shape[0], 1)
        logits = torch.cat([logits, sink_column], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., : x.k.shape[0]]
    probabilities = probabilities.nan_to_num(0.0).to(x.q.dtype)
    return (probabilities @ v.transpose(0, 1)).transpose(0, 1), torch.logsumexp(logits, dim=-1)


# Absolute bound on the float32 LSE of a kernel. The sum of n <= 8192 terms of one sign is off by at
# most n * 2^-24 = 4.9e-4 of itself and in practice by far less; a score, by d * 2^-24 * sum|q k| *
# scale < 1e-4; an exponential, by 2^-22 of itself (hardware) or 1e-4 (polynomial of degree 3).
# It stays below 1e-3 so that losing one of a thousand equal keys shows.
LSE_ATOL = 6e-4
# tanh.approx.f32 is off by at most this much of its value (PTX ISA).
TANH_APPROX = 2.0**-10.987


def lse_tolerance(inputs: Inputs) -> float:
    """LSE_ATOL; with softcap also the error of tanh.approx on the largest score there can be, which
    a score_mod may stretch."""
    if not inputs.case.softcap:
        return LSE_ATOL
    q_norm = inputs.q[inputs.rows_in_use("q")].double().norm(dim=-1).amax().item()
    k_norm = inputs.k[inputs.rows_in_use("k")].double().norm(dim=-1).amax().item()
    largest_score = min(inputs.case.softcap, abs(inputs.case.scale) * q_norm * k_norm)
    stretch = LARGEST_STRETCH if inputs.case.score_mod else 1.0
    return LSE_ATOL + TANH_APPROX * largest_score * stretch


def calls_of(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The objects of a class that are called from now on, one for each call."""
    called, run = [], kind.__call__

    def call(self: Any, *arguments: Any) -> Any:
        called.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(kind, "__call__", call)
    return called


def assert_close_to_oracle(
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
    *,
    lse_atol: float | None = None,
    unused_rows: bool = True,
) -> None:
    """The error bound of the project, on O and on LSE.

    Errors of O are measured in units of the largest value of their row (batch, query, head), so
    that a row over a thousand keys is held to as much as a row over one. In these units the
    largest error is at most twice that of `eager_same_dtype` plus one ulp, and the RMS error at
    most twice the eager one plus 0.3 ulp (rounding to nearest alone makes 0.29). LSE is within
    `lse_atol`, by default `lse_tolerance`, or one of its own ulps. A row that sees nothing is
    exactly 0 and, without a sink, has an LSE of exactly -inf. `unused_rows=False` leaves out the
    rows past seqused_q, which need not be defined in outputs that the caller passed.
    """
    name = inputs.case.id
    ref_out, ref_lse = inputs.reference
    assert (out.dtype, lse.dtype) == (inputs.q.dtype, FP32), f"{name}: {out.dtype}, {lse.dtype}"
    assert out.shape == ref_out.shape, f"{name}: out {tuple(out.shape)}"
    assert lse.shape == ref_lse.shape, f"{name}: lse {tuple(lse.shape)}"

    rows = torch.ones(out.shape[:-2], dtype=torch.bool, device=out.device)
    if not unused_rows:
        rows = inputs.rows_in_use("q")
    out, ref_out, eager_out = (x[rows].double() for x in (out, ref_out, inputs.eager[0]))
    lse, ref_lse = (x.transpose(-1, -2)[rows].double() for x in (lse, ref_lse))
    assert not out.isnan().any(), f"{name}: NaN in out"
    assert not lse.isnan().any(), f"{name}: NaN in lse"

    empty = (ref_out == 0).all(dim=-1)
    assert (out[empty] == 0).all(), f"{name}: out is not 0 in a row that sees nothing"
    no_terms = ref_lse.isinf()
    assert (lse[no_terms] == NEG_INF).all(), f"{name}: lse is not -inf in a row that sees nothing"
    lse_atol = lse_tolerance(inputs) if lse_atol is None else lse_atol
    lse_error, size = (lse - ref_lse)[~no_terms].abs(), ref_lse[~no_terms].abs()
    own_ulp = torch.exp2(size.clamp(min=1.0).log2().floor()) * torch.finfo(FP32).eps
    # how often the allowed error
    worst = (lse_error / own_ulp.clamp(min=lse_atol)).amax().item() if lse_error.numel() else 0.0
    assert worst <= 1.0, f"{name}: lse is off by {worst:.3g} times what is allowed"
    if empty.all():
        return

    row_scale = ref_out[~empty].abs().amax(dim=-1, keepdim=True)
    error = ((out - ref_out)[~empty] / row_scale).abs()
    eager_error = ((eager_out - ref_out)[~empty] / row_scale).abs()
    ulp = torch.finfo(inputs.q.dtype).eps
    worst, rms = error.max().item(), error.square().mean().sqrt().item()
    worst_allowed = 2 * eager_error.max().item() + ulp
    rms_allowed = 2 * eager_error.square().mean().sqrt().item() + 0.3 * ulp
    assert worst <= worst_allowed, f"{name}: out off by {worst:.3g}, allowed {worst_allowed:.3g}"
    assert rms <= rms_allowed, f"{name}: RMS error of out {rms:.3g}, allowed {rms_allowed:.3g}"


class GuardedOutputs:
    """NaN-filled `out` and `lse` for a caller to pass, each inside a larger NaN-filled buffer."""

    GUARD = 1024  # elements before and after

    def __init__(self, inputs: Inputs) -> None:
        out_shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        lse_shape = (*out_shape[:-3], out_shape[-2], out_shape[-3])
        self._buffers: dict[str, Tensor] = {}
        self.out = self._allocate("out", out_shape, inputs.q.dtype, inputs.q.device)
        self.lse = self._allocate("lse", lse_shape, FP32, inputs.q.device)

    def _allocate(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        numel = torch.Size(shape).numel() + 2 * self.GUARD
        self._buffers[name] = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        return self._buffers[name][self.GUARD : -self.GUARD].view(shape)

    def assert_guards_intact(self) -> None:
        for name, buffer in self._buffers.items():
            assert buffer[: self.GUARD].isnan().all(), f"the memory before {name} was written"
            assert buffer[-self.GUARD :].isnan().all(), f"the memory after {name} was written"
