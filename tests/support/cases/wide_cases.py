"""Heads above 256 columns, which kernels of Hopper compute."""

from __future__ import annotations

from cases import BF16, FP16, FP32, Case

# one of each kind of mask and of lengths
WIDE_CASES = (
    Case("full", 1, 129, 255, head_dim=512),
    Case("causal-264", 1, 200, 300, 2, 1, head_dim=264, causal=True),
    Case("causal-320-fp16", 1, 129, 300, head_dim=320, causal=True, dtype=FP16),
    Case("empty-rows-384", 1, 255, 63, head_dim=384, causal=True),
    Case("window-sink", 1, 129, 300, 4, 1, 512, window_left=70, window_right=9, sink=FP32),
    Case("softcap-504", 1, 129, 129, head_dim=504, softcap=20.0),
    Case(
        "varlen", lengths_q=(129, 1, 0, 70), lengths_k=(200, 63, 50, 0), head_dim=512, causal=True
    ),
    Case("seqused", 3, 65, 200, head_dim=272, causal=True, seqused_k=(200, 65, 0)),
    Case("seqused-q", 2, 129, 129, head_dim=512, seqused_q=(129, 3), seqused_k=(129, 7)),
    Case("documents", 2, 200, 200, head_dim=512, causal=True, column="documents1"),
    Case("columns-4", 1, 129, 200, head_dim=512, column="stepped4"),
    Case("mask-mod", 1, 129, 200, 4, 2, 512, mask_mod="eviction", blocks=(128, 128)),
    Case("mask-bits", 1, 200, 300, 4, 2, head_dim=512, mask_mod="checks"),
    Case("score-mod", 1, 129, 200, head_dim=512, causal=True, score_mod="alibi"),
    Case("packed-heads", 2, 9, 200, 16, 2, 512, causal=True, sink=BF16, pack_gqa=True),
    Case("padded-group-296", 1, 20, 130, 6, 2, head_dim=296, causal=True, pack_gqa=True),
)

# those with gradients
TRAINED_WIDE_CASES = (
    *(case for case in WIDE_CASES if case.score_mod is None and not case.softcap),
    Case("lists-d384", 1, 200, 300, 2, 1, 384, mask_mod="eviction", blocks=(192, 96)),
    Case("scale-negative", 1, 65, 70, head_dim=264, softmax_scale=-0.1),
    # more blocks than are in shared memory
    Case("long-384", 1, 256, 64, 4, 1, head_dim=384),
    Case("fused", 2, 70, 70, 2, 2, 512, strided="fused_qkv", dtype=FP16, causal=True),
    Case("columns-by-head", 1, 130, 130, 4, 2, 512, column="stepped2", column_heads="q"),
)

DECODE = Case("decode", 3, 1, 600, 16, 2, 512, causal=True, seqused_k=(600, 0, 131), sink=FP32)
FEW = Case("few", 2, 3, 300, 8, 2, 320, causal=True, seqused_k=(300, 65))
MANY = Case("many", 1, 150, 600, head_dim=264, causal=True)
