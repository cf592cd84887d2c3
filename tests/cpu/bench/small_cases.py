"""Cases small enough for a CPU, rows of a chosen rate, and what stands for a GPU."""

from __future__ import annotations

import numpy as np

import bench
from bench import flops, masks
from bench.cases import CASES, BenchCase


def small(mask: str = "causal", n: int = 300, **changes: object) -> BenchCase:
    fields: dict[str, object] = {"d": 64, "d_v": 64, "heads": 4, "heads_kv": 2, "tokens": n}
    return BenchCase("small", mask, n=n, **(fields | changes))  # type: ignore[arg-type]


SMALL = [
    small("full", 257),
    small("causal", 1000),
    small("causal", 128, tokens=384),
    small("sliding_window", 900, window=56),
    small("sliding_window", 512, window=128),
    small("varlen_causal", 515, tokens=773, doc_lengths=(1, 129, 515, 128)),
]
ODD = 701


def masked(mask: str, n: int = ODD, **changes: object) -> BenchCase:
    """Two sequences of `n` tokens with a question and answers in each of three documents."""
    lengths = (n // 3, n // 2, n - n // 3 - n // 2)
    documents = tuple((t // 4, t // 2, t - t // 4 - t // 2) for t in lengths)
    draw = masks.Draw(documents, ((n // 12, n // 3), (n // 2, n - 40)), seed=3)
    fields: dict[str, object] = {"form": "columns", "draw": draw, "tokens": 2 * n}
    fields["window"] = n // 16 if mask.endswith("sliding_window") else None
    return small(mask, n, **(fields | changes))


def dense(case: BenchCase) -> np.ndarray:
    rows = np.arange(case.n)
    return case.mask_of(case.n).sees(rows[:, None], rows[None, :])


def row(
    run: str, name: str, peer: str, rate: float, variant: str = "loop", commit: str = "abc"
) -> bench.Json:
    """A whole row whose figure is `rate` TFLOP/s."""
    milliseconds = flops.attention_flops(CASES[name]) / rate / 1e9
    head = {"run": run, "date": "today", "gpu": "a GPU", "commit": commit, "versions": {"torch": 2}}
    return head | bench.row_of(CASES[name], peer, variant, milliseconds, ())
