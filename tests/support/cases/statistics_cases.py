"""Calls of statistics of P that a kernel computes, each mask, form of lengths and reduction; drawn
calls of them; and their bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from cases import FP16, FP32, Case
from inputs import Inputs
from oracle import STATISTICS, reference_statistics
from planned import public_keywords
from random_cases import random_case, random_mask_case

BLOCK_SIZES = (1, 128), (1, 64), (64, 64), (64, 128), (128, 64), (192, 128)


class Wanted(NamedTuple):
    """What a call asks for."""

    reduce: tuple[str, ...] = STATISTICS
    block_size: tuple[int, int] = (1, 128)
    deterministic: bool = False


def draw_wanted(rng: random.Random) -> Wanted:
    names = rng.sample(STATISTICS, rng.randint(1, len(STATISTICS)))
    return Wanted(tuple(names), rng.choice(BLOCK_SIZES), rng.random() < 0.3)


def draw_case(rng: random.Random) -> Case:
    """A drawn problem with any group of heads; packing is left to the library."""
    case = rng.choice((random_case, random_mask_case))(rng)
    if case.heads_q == case.heads_kv and case.strided != "fused_qkv":
        heads_kv = rng.choice((1, 2))
        case = replace(case, heads_q=heads_kv * rng.choice((1, 2, 3, 8)), heads_kv=heads_kv)
    return replace(case, pack_gqa=None)


def arguments(inputs: Inputs, wanted: Wanted) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The public function, by name, and its arguments. LSE is that of the oracle."""
    keywords, has_lengths = public_keywords(inputs)
    for name in ("learnable_sink", "pack_gqa"):
        keywords.pop(name)
    lse = inputs.reference[1].float().contiguous()
    name = "attention_statistics_varlen" if has_lengths else "attention_statistics"
    return name, (inputs.q, inputs.k, lse), keywords | wanted._asdict()


def assert_right(
    run: Callable[..., Any], inputs: Inputs, wanted: Wanted, rtol: float, atol: float
) -> None:
    """run: called as the public function of `arguments`, after its name.

    An LSE and scores of its size, rounded to fp32, make each p relatively wrong by a share of that
    size, and so a sum of them, and an entropy E by (1 + E) times as much. Tensor cores truncate the
    scores: an error of up to a whole unit of the last place, where rounding has half of one.
    """
    name, operands, keywords = arguments(inputs, wanted)
    finite = operands[2][operands[2].isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    rtol, atol = (x + largest * 2.0**-22 for x in (rtol, atol))
    found = run(name, *operands, **keywords)._asdict()
    expected = reference_statistics(inputs, wanted.reduce, wanted.block_size)
    assert {name for name, x in found.items() if x is not None} == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape and got.dtype == torch.float32, name
        assert not got.requires_grad
        error, allowed = (got.double() - want).abs(), atol + rtol * want.abs()
        assert (error <= allowed).all(), f"{name}: {(error / allowed).max():.3g} of what is allowed"


GROUP: dict[str, Any] = {"heads_q": 4, "heads_kv": 1}
PACKED: dict[str, Any] = {"lengths_q": (130, 0, 33), "lengths_k": (200, 50, 0)}
CASES: dict[str, tuple[Case, Wanted]] = {
    "full": (Case("full", 1, 200, 300, 2, 2, 64), Wanted()),
    "one": (Case("one", 2, 1, 300, 4, 1, 128), Wanted()),
    "causal": (Case("causal", 1, 250, 250, 2, 1, 128, causal=True), Wanted(block_size=(64, 64))),
    "window-fp16": (
        Case("window", 1, 140, 260, 1, 1, 64, dtype=FP16, window_left=60, window_right=9),
        Wanted(block_size=(128, 128)),
    ),
    "columns": (Case("columns", 1, 200, 260, **GROUP, column="stepped4"), Wanted()),
    "columns-by-head": (Case("by-head", 1, 130, 140, 4, 2, 64, column="random2", column_heads="q"),
                        Wanted(block_size=(1, 64))),
    "documents": (Case("documents", 1, 300, 300, 2, 2, 64, column="documents2"), Wanted()),
    "lists": (Case("lists", 1, 400, 400, 1, 1, 64, blocks=(192, 128)), Wanted()),
    "bits": (Case("bits", 1, 200, 200, 2, 1, 64, blocks=(64, 80)), Wanted()),
    "mask_mod": (Case("mask", 1, 150, 200, 2, 1, 64, mask_mod="eviction"), Wanted()),
    "blind-rows": (Case("blind", 1, 150, 150, 2, 2, 64, mask_mod="blinding"), Wanted()),
    "score_mod": (Case("score", 1, 150, 200, 2, 1, 64, score_mod="t5", causal=True), Wanted()),
    "blind-scores": (Case("scores", 1, 130, 150, 1, 1, 64, score_mod="blinding"), Wanted()),
    "softcap": (Case("cap", 1, 130, 200, 1, 1, 128, softcap=15.0, softmax_scale=-0.3), Wanted()),
    "large-scale": (Case("large", 1, 100, 150, 1, 1, 64, causal=True, softmax_scale=3e3), Wanted()),
    "small-scale": (Case("small", 1, 100, 150, 1, 1, 64, causal=True, softmax_scale=1e-29),
                    Wanted()),
    "group-3-sink": (Case("3", 1, 100, 150, 6, 2, 64, sink=FP32), Wanted(block_size=(64, 128))),
    "group-32": (Case("32", 1, 9, 300, 32, 1, 64, causal=True), Wanted()),
    "packed": (Case("packed", **PACKED, **GROUP, head_dim=64, causal=True), Wanted()),
    "packed-blocks": (Case("packed-blocks", **PACKED, head_dim=64), Wanted(block_size=(64, 64))),
    "used": (Case("used", 2, 100, 150, 2, 1, 64, seqused_q=(100, 33), seqused_k=(0, 140)),
             Wanted()),
    "96": (Case("96", 1, 130, 150, 2, 1, 96, causal=True), Wanted()),
    "192": (Case("192", 1, 130, 150, 2, 1, 192, causal=True), Wanted()),
    "256": (Case("256", 1, 150, 200, 2, 1, 256, causal=True), Wanted(block_size=(64, 128))),
    "unreadable": (Case("unreadable", 1, 100, 150, 2, 2, 64, strided="unreadable"), Wanted()),
    "splits": (Case("splits", 1, 3, 2000, **GROUP, head_dim=64), Wanted(deterministic=True)),
    "keys-as-rows": (Case("keys", 1, 32, 300, **GROUP, causal=True), Wanted(("key_sums",))),
    "keys-as-rows-of-some": (
        Case("some", 2, 100, 300, **GROUP, head_dim=64, window_left=90, window_right=50,
            softcap=9.0, softmax_scale=-0.3, seqused_q=(70, 0), seqused_k=(300, 131)),
        Wanted(("key_sums",)),
    ),
    "exact": (Case("exact", 1, 200, 300, **GROUP, head_dim=64), Wanted(deterministic=True)),
}  # fmt: skip
