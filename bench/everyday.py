"""Shapes that people run, and head dimensions at one shape: what their cases are made of.

The shapes are those of `everyday_shapes.json`: models by name, with their heads, batches and
lengths as they are trained and served on one GPU. Each is a case `shape-NAME` and its backward
`bwd-shape-NAME`. Beside them `width-MASK-dD` times ours at one shape and many head dimensions: none
may take longer than a larger one that is common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("everyday_shapes.json")
WIDTH_MASKS = ("full", "causal")
# Four sequences of 4096 tokens and 16 heads.
WIDTH_BATCH, WIDTH_TOKENS, WIDTH_HEADS = 4, 4096, 16


@dataclass(frozen=True)
class Shape:
    """One entry of the file. seqlen_k: 0 where it is seqlen; window: keys visible before a query's
    own, None without a window; documents: lengths of packed sequences.

    Raises ValueError for a window that looks ahead, which no case of the bench has.
    """

    name: str
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: str
    seqlen_k: int
    window: int | None
    sink: bool
    documents: tuple[int, ...]

    @classmethod
    def create(cls, entry: dict[str, Any]) -> Shape:
        left, right = entry.get("window", (None, 0))
        if right:
            raise ValueError(f"{entry['name']}: window={entry['window']} looks ahead")
        optional = {
            "seqlen_k": entry.get("seqlen_k", 0),
            "window": left,
            "sink": entry.get("sink", False),
            "documents": tuple(entry.get("documents", ())),
        }
        return cls(**(entry | optional))

    def case_name(self, *, is_backward: bool = False) -> str:
        words = re.sub(r"[^a-z0-9.]+", "-", self.name.lower())
        return f"{'bwd-' if is_backward else ''}shape-{words}"


class Width(NamedTuple):
    """Head dimensions of Q and K, and of V."""

    d: int
    d_v: int

    @property
    def label(self) -> str:
        return f"d{self.d}" if self.d_v == self.d else f"d{self.d}v{self.d_v}"

    def case_name(self, mask: str, *, is_backward: bool = False) -> str:
        return f"{'bwd-' if is_backward else ''}width-{mask}-{self.label}"


SHAPES = tuple(Shape.create(entry) for entry in json.loads(DATA.read_text())["shapes"])
COMMON = tuple(Width(d, d) for d in (64, 96, 128, 192, 256))
UNCOMMON = (*(Width(d, d) for d in (72, 80, 104, 112, 160)), Width(192, 128))
WIDTHS = tuple(sorted((*COMMON, *UNCOMMON)))


def bound(width: Width) -> Width | None:
    """The next larger common width; None for the largest."""
    return next((common for common in COMMON if common > width), None)


def table_names() -> tuple[str, ...]:
    """A backward after its forward, and widths that are compared beside each other."""
    ways = (False, True)
    shapes = (shape.case_name(is_backward=way) for shape in SHAPES for way in ways)
    widths = (
        width.case_name(mask, is_backward=way)
        for mask in WIDTH_MASKS
        for way in ways
        for width in WIDTHS
    )
    return (*shapes, *widths)


def is_width(name: str) -> bool:
    return name.removeprefix("bwd-").startswith("width-")


def compared(left: Iterable[str]) -> set[str]:
    """The widths, of one mask and direction, that a width in `left` is held against."""
    groups = {name.rpartition("-")[0] for name in left if is_width(name)}
    return {f"{group}-{width.label}" for group in groups for width in WIDTHS}


def takes_part(peer: str, case_name: str) -> bool:
    """Whether the table wants a peer in a case that it supports: widths are of ours alone."""
    return peer == "ours" or not is_width(case_name)
