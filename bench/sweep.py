"""The draws of a sweep: one mask at many sparsities, spread as in appendix A.4.1 of the paper.

arXiv 2410.01359 draws documents again and again and fills buckets of sparsity, 0.05 wide, from 0.5
(causal masks) or 0 to 1. Here a bucket is full with fewer draws, and `ENOUGH` of them end the
drawing, or `TRIES`, whether or not each bucket was met.
"""

from __future__ import annotations

from dataclasses import replace

from bench.cases import BenchCase
from bench.flops import sparsity
from bench.masks import Draw, draw_documents

BUCKET = 0.05
TRIES, ENOUGH = 400, 44
# Draws a bucket, and how many documents.
PER_BUCKET = {"causal_document": 6, "share_question": 5, "document": 3}
COUNTS = {"causal_document": (2, 20), "share_question": (1, 5), "document": (2, 10)}


def dense_case(case: BenchCase) -> BenchCase:
    """Full attention on the tensors of a sweep."""
    changes = {"mask": "full", "draw": None, "form": "native", "kind": "attention"}
    return replace(case, name=f"{case.name}#dense", **changes)  # type: ignore[arg-type]


def draw_cases(case: BenchCase) -> list[BenchCase]:
    """The cases of a sweep, named `sweep-...#0` and on, each with documents of its own."""
    filled: dict[int, int] = {}
    drawn: list[BenchCase] = []
    for seed in range(TRIES):
        if len(drawn) == ENOUGH:
            break
        documents = draw_documents(case.n, COUNTS[case.mask], seed, spread=1.0)
        name = f"{case.name}#{len(drawn)}"
        candidate = replace(case, name=name, kind="attention", draw=Draw(documents))
        bucket = int(sparsity(candidate) / BUCKET)
        if filled.get(bucket, 0) < PER_BUCKET[case.mask]:
            filled[bucket] = filled.get(bucket, 0) + 1
            drawn.append(candidate)
    return drawn
