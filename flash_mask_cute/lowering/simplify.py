"""Traced masks that are bands: causal, windows, and everything.

Take a conjunction of comparisons whose sides are integers plus q_idx and kv_idx, with equal and
opposite factors. It lets a query see the keys from q - left to q + right. Kernels describe such a
mask by two numbers, and call no callable. Any other mask stays a mask_mod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

_LIMIT = 1 << 30
AND = ("bitwise_and", "logical_and", "__and__")
SIGNS = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}
SAME = ("alias", "clone", "detach", "_to_copy", "to")


class Band(NamedTuple):
    """Query q sees keys q - left to q + right; both count from their start. None: no limit."""

    left: int | None
    right: int | None

    def as_window(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None] | None:
        """The window_size of `flash_attn_func`, which counts from the last query and key; None if
        no such pair expresses the band."""
        shift = seqlen_k - seqlen_q
        left = None if self.left is None else self.left + shift
        right = None if self.right is None else self.right - shift
        # -1 means open there, and an empty band is no window
        if -1 in (left, right) or (left is not None and right is not None and left + right < 0):
            return None
        if any(x is not None and abs(x) >= _LIMIT for x in (left, right)):
            return None
        return left, right


class Bound(NamedTuple):
    """One side: kv_idx - q_idx, or its negative, is at most `distance`. It may depend on numbers
    that are known only at a call."""

    is_right: bool
    distance: _Linear


class _Linear(NamedTuple):
    """q * q_idx + k * kv_idx + constant + the sum of factors and nodes of Python integers."""

    q: int = 0
    k: int = 0
    constant: int = 0
    terms: tuple[tuple[int, Node], ...] = ()

    def plus(self, other: _Linear, factor: int = 1) -> _Linear:
        return _Linear(
            self.q + factor * other.q,
            self.k + factor * other.k,
            self.constant + factor * other.constant,
            (*self.terms, *((factor * x, node) for x, node in other.terms)),
        )


class _NotLinearError(Exception):
    pass


def find_bounds(module: GraphModule) -> tuple[Bound, ...] | None:
    """The bounds of a mask_mod's graph if all its conditions are sides of bands; else None."""
    (returned,) = module.graph.find_nodes(op="output")
    places = module.graph.find_nodes(op="placeholder")
    try:
        return tuple(_bounds(returned.args[0], places[2], places[3]))
    except _NotLinearError:
        return None


def band_of(bounds: tuple[Bound, ...], number: Callable[[Node], int]) -> Band:
    """The band at a call. number: the value of a node at this call."""
    sides: dict[bool, list[int]] = {False: [], True: []}
    for is_right, distance in bounds:
        terms = sum(factor * number(node) for factor, node in distance.terms)
        sides[is_right].append(distance.constant + terms)
    return Band(min(sides[False], default=None), min(sides[True], default=None))


def _bounds(node: Any, q_idx: Node, kv_idx: Node) -> Iterator[Bound]:
    if node is True or (isinstance(node, Node) and is_true(node)):
        return
    name = name_of_node(node)
    if name in AND and node.meta["val"].dtype == torch.bool:
        for part in node.args:
            yield from _bounds(part, q_idx, kv_idx)
        return
    if name not in SIGNS:
        raise _NotLinearError
    sign, strict = SIGNS[name]
    for x, y in without_abs(node.args[0], node.args[1], sign):
        left, right = (_linear(v, q_idx, kv_idx) for v in (x, y))
        # at least 0
        rest = _Linear(constant=strict).plus(left.plus(right, -1), sign)
        if (rest.q, rest.k) not in ((1, -1), (-1, 1)):
            raise _NotLinearError
        yield Bound(rest.q == 1, rest._replace(q=0, k=0))


def without_abs(x: Any, y: Any, sign: int) -> Iterator[tuple[Any, Any]]:
    """Replace abs(d) <= c by d <= c and -d <= c."""
    small, large = (x, y) if sign < 0 else (y, x)
    if name_of_node(small) != "abs":
        yield x, y
        return
    inner = small.args[0]
    for value in (inner, Negated(inner)):
        yield (value, large) if sign < 0 else (large, value)


class Negated(NamedTuple):
    value: Any


def _linear(value: Any, q_idx: Node, kv_idx: Node) -> _Linear:
    if isinstance(value, bool | float):
        raise _NotLinearError
    if isinstance(value, int):
        return _Linear(constant=value)
    if isinstance(value, Negated):
        return _Linear().plus(_linear(value.value, q_idx, kv_idx), -1)
    if value is q_idx:
        return _Linear(q=1)
    if value is kv_idx:
        return _Linear(k=1)
    held = value.meta.get("val")
    if isinstance(held, torch.SymInt):
        return _Linear(terms=((1, value),))
    if not isinstance(held, torch.Tensor) or held.dtype not in (torch.int32, torch.int64):
        raise _NotLinearError
    name, args = name_of_node(value), value.args
    if name in SAME:
        return _linear(args[0], q_idx, kv_idx)
    if name == "neg":
        return _Linear().plus(_linear(args[0], q_idx, kv_idx), -1)
    if name in ("add", "sub", "rsub") and not value.kwargs and len(args) == 2:
        x, y = (_linear(v, q_idx, kv_idx) for v in args)
        return x.plus(y) if name == "add" else x.plus(y, -1) if name == "sub" else y.plus(x, -1)
    raise _NotLinearError


def is_true(node: Node) -> bool:
    """Whether a node is the constant true, with which `and_masks` begins."""
    value = node.meta.get("val")
    name = name_of_node(node)
    is_one = name == "new_ones" or (name == "full" and node.args[1] in (1, True))
    return is_one and value is not None and value.dtype == torch.bool and value.dim() == 0


def name_of_node(node: Any) -> str:
    if not isinstance(node, Node) or not callable(node.target):
        return ""
    return str(node.target.__name__).partition(".")[0]
