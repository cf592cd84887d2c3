"""Drawn calls of the Blackwell kernels: the rows of bench/results/blackwell_cases.txt.

Family A has tiles of 64, 96 and 128 columns, family B wider heads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
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


def _telling(
    first: int, dims: Dims, most: int, count: int, is_telling: Callable[[Case], bool]
) -> Iterator[Case]:
    """The first so many cases from a seed on that say something about what they are drawn for."""
    drawn = (_small(seed, dims, most) for seed in itertools.count(first))
    yield from itertools.islice(filter(is_telling, drawn), count)


def _has_rows_of_both(case: Case) -> bool:
    """Of a pair's forward, whose CTAs have 256 rows each."""
    return case.seqlen_q > 256 and case.seqlen_k > 64


def _has_keys_of_both(case: Case) -> bool:
    """Of a pair's backward, whose CTAs have 128 keys each, with the head dimensions that were drawn
    from. It modifies no scores."""
    is_square = case.strided == "fused_qkv" and case.head_dim > 128
    return case.seqlen_q > 1 and case.seqlen_k > 128 and not is_square


def _has_several_sums(case: Case) -> bool:
    """More than one key tile adds to dQ of a query block."""
    return case.seqlen_q > 64 and case.seqlen_k > 128


def _draws() -> Iterator[Draw]:
    forwards = {
        "A": (_small(3000 + i, NARROW, 300) for i in range(32)),
        "A-pair": _telling(4000, (*NARROW[:3], NARROW[2]), 383, 12, _has_rows_of_both),
        "B-pair": _telling(5000, WIDE_FORWARD, 300, 20, _has_rows_of_both),
    }
    for kind, cases in forwards.items():
        more = {"config": PAIRS} if kind.endswith("pair") else {}
        for i, case in enumerate(cases):
            yield Draw(f"forward-{kind}", i, case.packed_if_supported(), more)
    for i in range(14):
        page_size = (None, 16, None, 128)[i % 4]
        case = _decoding(6000 + i, page_size is not None)
        yield Draw("forward-B-decoding", i, case, {"num_splits": i % 3}, page_size)
    backwards = {
        "A": (_small(i, NARROW, 200) for i in range(44)),
        "A-pair": _telling(2000, ((128, 128),), 300, 26, _has_keys_of_both),
        "B": (_small(1000 + i, WIDE, 140) for i in range(52)),
        "B-pair": _telling(9000, ((192, 128), (168, 104)), 300, 8, _has_keys_of_both),
        "A-ordered": _telling(7000, NARROW[:3], 300, 6, _has_several_sums),
        "B-ordered": _telling(8000, WIDE, 300, 6, _has_several_sums),
    }
    for kind, cases in backwards.items():
        is_ordered = kind.endswith("ordered")
        for i, drawn in enumerate(cases):
            case, more = replace(drawn, pack_gqa=None), {}
            if kind.endswith("pair"):
                case = replace(case, score_mod=None, softcap=0.0)
                more = {"config": PAIRS | {"clears_dq": True}}
            elif is_ordered or i % 3 == 0:
                more = {"deterministic": True}
            yield Draw(f"backward-{kind}", i, case, more, is_ordered=is_ordered)


DRAWS = tuple(_draws())
