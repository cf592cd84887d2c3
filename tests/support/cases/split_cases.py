"""Forwards in splits: few queries and many keys, and what masks and lengths make of that."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from cases import BF16, FP32, Case


class SplitCase(NamedTuple):
    """num_splits: 0 for equal stream-K chunks. sms: shares; few of the work tiles are in one."""

    case: Case
    num_splits: int = 0
    sms: int = 7

    @property
    def id(self) -> str:
        kind = f"splits{self.num_splits}" if self.num_splits else f"shares{self.sms}"
        return f"{self.case.id}-{kind}"


_LONG = Case("q1-gqa4", 1, 1, 1100, 8, 2, causal=True)
RAGGED = Case(
    "ragged", 5, 2, 700, 4, 1, head_dim=64, causal=True, seqused_k=(700, 0, 130, 1, 513), sink=FP32
)
_MANY = Case(
    "many", 35, 1, 512, 2, 1, head_dim=64, seqused_k=tuple(1 + i * 97 % 512 for i in range(35))
)
# each of two heads has a line of its own, with shares for two CTAs
_LINES = Case(
    "lines", 6, 1, 1100, 4, 2, head_dim=64, causal=True, sink=FP32,
    seqused_k=(1100, 1100, 900, 0, 1100, 1000),
)  # fmt: skip
_LINES_GROUP3 = Case(
    "lines-group3", 5, 5, 1200, 6, 2, head_dim=64, seqused_k=(1200, 1100, 700, 1200, 1199)
)
_CHUNK = Case("chunk", 1, 150, 1100, 2, 1, causal=True, pack_gqa=False)
PACKED = Case(
    "packed", heads_q=4, heads_kv=1, lengths_q=(1, 70, 0, 3), lengths_k=(600, 513, 9, 0),
    causal=True, head_dim=64, sink=BF16, seqused_q=(1, 65, 0, 2),
)  # fmt: skip
SPLIT_CASES = (
    SplitCase(_LONG),
    SplitCase(_LONG, 3),
    SplitCase(_LONG, sms=3),
    # more shares than blocks, and more splits than blocks
    SplitCase(_LONG, sms=40),
    SplitCase(_LONG, 12),
    SplitCase(RAGGED),
    SplitCase(RAGGED, 4),
    SplitCase(_MANY, sms=11),
    SplitCase(_LINES, sms=4),
    SplitCase(_LINES_GROUP3, sms=4),
    SplitCase(_CHUNK),
    SplitCase(_CHUNK, 2),
    SplitCase(PACKED, sms=13),
    SplitCase(PACKED, 3),
    SplitCase(Case("window", 2, 3, 900, 2, 2, window_left=600, window_right=2)),
    SplitCase(Case("window", 2, 3, 900, 2, 2, window_left=200, causal=True), 3),
    SplitCase(Case("softcap", 1, 2, 700, 2, 2, softcap=9.0, head_dim=72, head_dim_v=40)),
    SplitCase(Case("mask_mod", 1, 4, 700, 4, 2, mask_mod="causal_offset")),
    SplitCase(Case("score_mod", 1, 4, 700, 4, 2, score_mod="alibi", causal=True)),
    SplitCase(Case("score_mod", 1, 4, 700, 4, 2, score_mod="alibi", causal=True), 3),
    SplitCase(Case("lists", 1, 200, 1024, 2, 2, blocks=(128, 128), causal=True)),
    SplitCase(Case("lists", 1, 200, 1024, 2, 2, blocks=(128, 128), causal=True), 3),
    SplitCase(Case("columns", 1, 700, 700, 1, 1, column="documents1", causal=True), sms=9),
    SplitCase(Case("group7", 1, 1, 600, 14, 2, causal=True, sink=BF16)),
    SplitCase(Case("group3", 2, 5, 600, 6, 2, head_dim=64, causal=True, mask_mod="checks"), 2),
    SplitCase(Case("group5-whole", 3, 2, 513, 10, 2, head_dim=64, score_mod="head_bias"), sms=4),
    SplitCase(Case("d192", 1, 2, 700, 2, 2, head_dim=192, head_dim_v=128)),
    SplitCase(Case("mqa64", 1, 1, 600, 64, 1), sms=3),
)
# for scores of any size (`score_tables.py`); of few rows, four warps combine one
TABLED_CASES = (
    SplitCase(Case("tables", 1, 30, 600, 2, 1, head_dim=64)),
    SplitCase(Case("tables-few", 1, 8, 600, 2, 1, head_dim=64)),
    SplitCase(Case("tables-sink", 1, 30, 600, 2, 1, head_dim=64, sink=FP32), 3),
)


def take_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls whose cost is known take stream-K chunks like all others."""
    monkeypatch.setattr("flash_mask_cute.call.splits._has_known_cost", lambda facts, problem: False)
