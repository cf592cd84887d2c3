"""Calls of statistics of P that a kernel computes: each mask, form of lengths and reduction."""

from __future__ import annotations

from cases import FP16, FP32, Case
from statistics_oracle import Wanted

GROUP = {"heads_q": 4, "heads_kv": 1}
PACKED = {"lengths_q": (130, 0, 33), "lengths_k": (200, 50, 0)}
CASES: dict[str, tuple[Case, Wanted]] = {
    "full": (Case("full", 1, 200, 300, 2, 2, 64), Wanted()),
    "one": (Case("one", 2, 1, 300, 4, 1, 128), Wanted()),
    "causal": (Case("causal", 1, 250, 250, 2, 1, 128, causal=True), Wanted(block_size=(64, 64))),
    "window-fp16": (
        Case("window", 1, 140, 260, 1, 1, 64, dtype=FP16, window_left=60, window_right=9),
        Wanted(block_size=(128, 128)),
    ),
    "columns": (Case("columns", 1, 200, 260, **GROUP, column="stepped4"), Wanted()),
    "columns-by-head": (
        Case("by-head", 1, 130, 140, 4, 2, 64, column="random2", column_heads="q"),
        Wanted(block_size=(1, 64)),
    ),
    "documents": (Case("documents", 1, 300, 300, 2, 2, 64, column="documents2"), Wanted()),
    "lists": (Case("lists", 1, 400, 400, 1, 1, 64, blocks=(192, 128)), Wanted()),
    "bits": (Case("bits", 1, 200, 200, 2, 1, 64, blocks=(64, 80)), Wanted()),
    "mask_mod": (Case("mask", 1, 150, 200, 2, 1, 64, mask_mod="eviction"), Wanted()),
    "blind-rows": (Case("blind", 1, 150, 150, 2, 2, 64, mask_mod="blinding"), Wanted()),
    "score_mod": (Case("score", 1, 150, 200, 2, 1, 64, score_mod="t5", causal=True), Wanted()),
    "blind-scores": (Case("scores", 1, 130, 150, 1, 1, 64, score_mod="blinding"), Wanted()),
    "softcap": (Case("cap", 1, 130, 200, 1, 1, 128, softcap=15.0, softmax_scale=-0.3), Wanted()),
    "large-scale": (Case("large", 1, 100, 150, 1, 1, 64, causal=True, softmax_scale=3e3), Wanted()),
    "small-scale": (
        Case("small", 1, 100, 150, 1, 1, 64, causal=True, softmax_scale=1e-29),
        Wanted(),
    ),
    "group-3-sink": (Case("3", 1, 100, 150, 6, 2, 64, sink=FP32), Wanted(block_size=(64, 128))),
    "group-32": (Case("32", 1, 9, 300, 32, 1, 64, causal=True), Wanted()),
    "packed": (Case("packed", **PACKED, **GROUP, head_dim=64, causal=True), Wanted()),
    "packed-blocks": (Case("packed-blocks", **PACKED, head_dim=64), Wanted(block_size=(64, 64))),
    "used": (
        Case("used", 2, 100, 150, 2, 1, 64, seqused_q=(100, 33), seqused_k=(0, 140)),
        Wanted(),
    ),
    "96": (Case("96", 1, 130, 150, 2, 1, 96, causal=True), Wanted()),
    "192": (Case("192", 1, 130, 150, 2, 1, 192, causal=True), Wanted()),
    "256": (Case("256", 1, 150, 200, 2, 1, 256, causal=True), Wanted(block_size=(64, 128))),
    "unreadable": (Case("unreadable", 1, 100, 150, 2, 2, 64, strided="unreadable"), Wanted()),
    "splits": (Case("splits", 1, 3, 2000, **GROUP, head_dim=64), Wanted(deterministic=True)),
    "exact": (Case("exact", 1, 200, 300, **GROUP, head_dim=64), Wanted(deterministic=True)),
}
