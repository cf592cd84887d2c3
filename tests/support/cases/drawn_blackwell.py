"""Drawn calls of Blackwell: family A of 64, 96 and 128 columns, family B of wider heads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from cases import BF16, FP32, Case
from random_cases import small_case

Dims = tuple[tuple[int, int], ...]

NARROW = ((64, 64), (96, 96), (128, 128), (40, 72), (104, 24), (128, 64))
# places of dQ: of its own, over dP, over S, and beside two launches
WIDE = (
    *((64, 256), (192, 64), (96, 256), (192, 128), (136, 72)),
    *((192, 192), (256, 128), (128, 256), (256, 256), (200, 136), (256, 192)),
)
WIDE_FORWARD = ((192, 128), (256, 256), (192, 192), (256, 256), (136, 104), (96, 192))
PAIRS = {"cta_pair": True}


class Draw(NamedTuple):
    """more: keywords of the call. page_size: of the forward, with keys in pages. is_ordered: sums
    of the backward are in a fixed order, and all orders of events must give the same bits."""

    kind: str
    number: int
    case: Case
    more: dict[str, Any] = {}
    page_size: int | None = None
    is_ordered: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def is_backward(self) -> bool:
        return self.kind.startswith("backward")

    @property
    def is_pair(self) -> bool:
        return self.kind.endswith("pair")

    @property
    def kernel(self) -> str:
        return f"sm100.flash_{'bwd' if self.is_backward else 'fwd'}.kernel"

    @property
    def told(self) -> str:
        """Its shape, and what it has beside that."""
        case = self.case
        lengths = [case.lengths_q or case.seqlen_q, case.lengths_k or case.seqlen_k]
        shape = " x ".join(str(x).replace(" ", "") for x in (case.batch, *lengths))
        dtype = str(case.dtype).removeprefix("torch.")
        told = [f"d{case.head_dim}/{case.head_dim_v}", dtype, f"{shape},"]
        told.append(f"heads {case.heads_q}/{case.heads_kv}")
        for field in fields(case):
            value = getattr(case, field.name)
            if field.name not in SHAPE and value not in (None, field.default):
                value = str(value).removeprefix("torch.").replace(" ", "")
                told.append(field.name if value == "True" else f"{field.name}={value}")
        more = self.more | ({"page_size": self.page_size} if self.page_size else {})
        told += [f"{name}={x}" for name, x in more.items() if not isinstance(x, dict)]
        return " ".join(told)


SHAPE = (
    *("id", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    *("dtype", "lengths_q", "lengths_k", "tier"),
)


def _small(seed: int, dims: Dims, most: int) -> Case:
    """A run of it takes a second or two: it has one batch entry where entries do not differ, and no
    more heads than it needs. With a sink, of which a head has one number, it keeps its heads."""
    case = small_case(random.Random(seed), dims, most)
    differ = case.lengths_q or case.lengths_k or case.seqused_q or case.seqused_k
    fewer = {} if differ else {"batch": 1}
    if case.sink is None and (differ or case.group == 1):
        fewer |= {"heads_q": case.group, "heads_kv": 1}
    return replace(case, **fewer)


def _decoding(seed: int, is_paged: bool) -> Case:
    """Few queries of heads that share keys, as in serving."""
    rng = random.Random(seed)
    head_dim, head_dim_v = rng.choice(((192, 128), (256, 256)))
    seqlen_k = rng.choice((300, 513, 700))
    used = rng.choice((None, (seqlen_k, rng.randint(0, seqlen_k))))
    masks: tuple[dict[str, Any], ...] = {"causal": True}, {}, {"causal": True, "window_left": 200}
    # `lse_tolerance` asks for keys in rows
    mask = rng.choice(masks if is_paged else (*masks, {"softcap": 15.0}))
    heads = dict(zip(("heads_q", "heads_kv"), rng.choice(((8, 1), (8, 2), (2, 2))), strict=True))
    return Case(
        "decoding", 2, rng.choice((1, 1, 3, 9)), seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v,
        seqused_k=used, sink=rng.choice((None, None, FP32, BF16)), **heads, **mask,
    )  # fmt: skip


class Kind(NamedTuple):
    """Draws of one kind. first: seed of the first. most: tokens of a sequence. rows, keys: those of
    a block; most draws have several blocks in both directions. count: how many draws there are, of
    which the project wants `needed` executed."""

    first: int
    dims: Dims
    most: int
    rows: int
    keys: int
    count: int
    needed: int


# A pair's forward has 256 rows in a CTA, and wide heads 128. Its backward has 128 keys in a CTA,
# and 64 at 256 columns.
KINDS = {
    "forward-A": Kind(3000, NARROW, 300, 128, 128, 32, 30),
    "forward-A-pair": Kind(4000, (*NARROW[:3], NARROW[2]), 383, 256, 128, 12, 10),
    "forward-B-pair": Kind(5000, WIDE_FORWARD, 300, 256, 128, 20, 18),
    "backward-A": Kind(0, NARROW, 200, 128, 128, 40, 36),
    "backward-A-pair": Kind(2000, ((128, 128), (104, 128)), 300, 128, 256, 28, 25),
    "backward-B": Kind(1000, WIDE, 140, 64, 128, 32, 30),
    "backward-B-pair": Kind(9000, ((192, 128), (168, 104)), 300, 128, 256, 12, 10),
    "backward-B-folded-pair": Kind(9500, ((256, 256), (200, 208)), 300, 128, 128, 12, 10),
    "backward-A-ordered": Kind(7000, NARROW[:3], 300, 128, 128, 6, 6),
    "backward-A-ordered-pair": Kind(7500, ((128, 128), (104, 128)), 300, 64, 256, 4, 4),
    "backward-B-ordered": Kind(8000, WIDE, 300, 64, 128, 6, 6),
    "backward-B-ordered-pair": Kind(8500, ((192, 128), (256, 256)), 300, 64, 256, 4, 4),
}
DECODING = "forward-B-decoding"
NEEDED = {name: kind.needed for name, kind in KINDS.items()} | {DECODING: 12}


def _longest(case: Case, side: str) -> int:
    """Tokens in use of the longest sequence."""
    slots = getattr(case, f"lengths_{side}") or (getattr(case, f"seqlen_{side}"),)
    return max(getattr(case, f"seqused_{side}") or slots)


def _cases(name: str, kind: Kind) -> Iterator[Case]:
    """Every fourth has any lengths, if not all draws of a kind need several blocks."""
    drawn = (_small(seed, kind.dims, kind.most) for seed in itertools.count(kind.first))
    is_special = "pair" in name or "ordered" in name
    if (192, 128) in kind.dims and name.startswith("backward") and "pair" in name:
        # 192/192 is no pair's
        drawn = (case for case in drawn if case.strided != "fused_qkv")
    for i in range(kind.count):
        while True:
            case = next(drawn)
            has_blocks = _longest(case, "q") > kind.rows and _longest(case, "k") > kind.keys
            if has_blocks or (i % 4 == 3 and not is_special):
                yield case
                break


def _draws() -> Iterator[Draw]:
    for name, kind in KINDS.items():
        is_pair, is_ordered = name.endswith("pair"), "ordered" in name
        for i, drawn in enumerate(_cases(name, kind)):
            more: dict[str, Any] = {"config": PAIRS} if is_pair else {}
            if name.startswith("forward"):
                yield Draw(name, i, drawn.packed_if_supported(), more)
                continue
            case = replace(drawn, pack_gqa=None)
            if is_pair:
                case = replace(case, score_mod=None, softcap=0.0)
                more = {"config": PAIRS | {"clears_dq": not is_ordered}}
            elif is_ordered:
                more = {"config": {"cta_pair": False}}
            if is_ordered or (not is_pair and i % 3 == 0):
                more = more | {"deterministic": True}
            yield Draw(name, i, case, more, is_ordered=is_ordered)
    for i in range(14):
        page_size = (None, 16, None, 128)[i % 4]
        case = _decoding(6000 + i, page_size is not None)
        yield Draw(DECODING, i, case, {"num_splits": i % 3}, page_size)


DRAWS = tuple(_draws())
# So that the kinds come near what is needed together, however many draws there is time for.
SEQUENTIAL_SPLITS = tuple(sorted(DRAWS, key=lambda draw: draw.number / NEEDED[draw.kind]))
