"""Problems of attention, one explicit row per case; neighbours share a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from mask_cases import COLUMNS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
        """Packing is left to the library where heads of a group may see different things."""
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
    Case("varlen-unreadable-scale-negative", lengths_q=SELF, lengths_k=SELF, strided="unreadable",
         softmax_scale=-0.1),
    Case("varlen-window-before-20", lengths_q=SELF, lengths_k=SELF, window_left=90,
         window_right=-20),
    Case("varlen-q-dense-k", seqlen_k=255, lengths_q=(127, 1, 0, 200), causal=True),
    Case("dense-q-varlen-k", seqlen_q=129, lengths_k=(255, 1, 0, 200), causal=True),
    Case("varlen-sink-window", lengths_q=SELF, lengths_k=SELF, window_left=40, sink=BF16),
    Case("varlen-gqa4-packed-window", heads_q=4, heads_kv=1, lengths_q=(129, 1, 255),
         lengths_k=(255, 127, 100), window_left=33, window_right=7, pack_gqa=True),
    Case("varlen-documents", 0, 0, 0, 8, 2, lengths_q=DOCS, lengths_k=DOCS, causal=True,
         tier="full"),
    Case("seqused-k-causal", 3, 129, 300, seqused_k=(300, 65, 0), causal=True),
    Case("seqused-both-window", 2, 255, 255, seqused_q=(130, 0), seqused_k=(255, 77),
         window_left=9),
    Case("varlen-seqused-causal", lengths_q=(129, 255), lengths_k=(255, 300), seqused_q=(100, 255),
         seqused_k=(255, 131), causal=True),
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
)  # fmt: skip
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
    Case("blocks-of-warpgroups", 1, 300, 400, 2, 1, causal=True, blocks=(64, 64)),
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

# Four heads that share mask bits.
MASK_BITS_CASES = (
    Case("mask-bits-alone", 1, 200, 300, 4, 2, mask_mod="checks"),
    Case(
        "mask-bits-lists-causal",
        2, 300, 400, 4, 4, causal=True, mask_mod="documents", blocks=(128, 128),
    ),
    Case("mask-bits-lists-of-256", 1, 300, 600, 4, 4, mask_mod="causal_offset", blocks=(256, 256)),
    Case(
        "mask-bits-odd-lists-d64",
        2, 129, 200, 4, 4, head_dim=64, mask_mod="documents", blocks=(64, 48),
    ),
    Case(
        "mask-bits-lists-d64",
        *(1, 400, 400, 4, 4),
        head_dim=64,
        mask_mod="documents",
        blocks=(128, 128),
    ),
    Case(
        "mask-bits-columns-bias",
        1, 255, 300, 4, 4, causal=True, column="stepped2", mask_mod="documents",
        score_mod="head_bias", blocks=(128, 128),
    ),
    # one entry of mask bits for all of the batch
    Case("mask-bits-for-a-batch", 2, 300, 200, 4, 4, mask_mod="causal_offset"),
)  # fmt: skip

# The same with packed sequences, some of them without queries or keys.
MASK_BITS_VARLEN_CASES = (
    Case(
        "mask-bits-varlen",
        heads_q=4, heads_kv=2, lengths_q=(200, 0, 129, 70), lengths_k=(300, 64, 129, 0),
        mask_mod="documents",
    ),
    Case(
        "mask-bits-varlen-causal-odd-lists-d64",
        heads_q=4, heads_kv=4, head_dim=64, lengths_q=(1, 300, 250), lengths_k=(1, 300, 400),
        causal=True, mask_mod="documents", blocks=(48, 80),
    ),
    Case(
        "mask-bits-varlen-columns-bias",
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
    Case("packed-long-walks", 2, 1500, 1500, 4, 4, mask_mod="seeing_all", blocks=(128, 128)),
)  # fmt: skip

# Documents told by intervals, for masks that say so.
COLUMN_DOCUMENT_CASES = (
    Case("causal-gqa2", 1, 1100, 1100, 2, 1, head_dim=64, causal=True, column="documents1"),
    Case("both-ways", 2, 600, 600, 1, 1, column="documents2"),
    Case("unreadable", 2, 600, 600, 1, 1, causal=True, column="documents1", strided="unreadable"),
)
