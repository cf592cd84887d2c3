"""Traced masks that are bands: causal, windows, and everything.

A comparison of q_idx and kv_idx, each plus an integer, lets a query see the keys from q - left to
q + right. So do such comparisons joined by `&`, and by `|` if no key between two bands is left out.
Kernels describe such a mask by two numbers, and call no callable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_LIMIT = 1 << 30
# float32 has all integers below it; beyond it, a comparison may round an index
EXACT = 1 << 24
AND = ("bitwise_and", "logical_and", "__and__")
OR = ("bitwise_or", "logical_or", "__or__")
NOT = ("bitwise_not", "logical_not")
SIGNS = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}
SAME = ("alias", "clone", "detach", "lift_fresh_copy", "_to_copy", "to")


class BandForm(NamedTuple):
    """Query q sees keys q - left to q + right; both count from their start. None: no limit."""

    left: int | None
    right: int | None

    def as_window(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None] | None:
        """As window_size, which counts from the last query and key; None: no pair expresses it."""
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
    """One side: kv_idx - q_idx, or its negative, is at most `distance`. is_right None: an index
    plus `distance` is at least 0, which each is if `distance` is. sums: what the compared sides add
    to indices; an int32 index must not overflow by it."""

    is_right: bool | None
    distance: _Linear
    sums: tuple[_Linear, ...]


class Joined(NamedTuple):
    """A conjunction, or with is_any a disjunction, of `Bound` and `Joined`."""

    parts: tuple[Any, ...]
    is_any: bool


class Whole(NamedTuple):
    """A floating-point bound of an integer, as the integer that bounds it alike.

    value: a number or a node. dtype: of the comparison. is_up: rounded up, else down. is_low: it
    bounds from below. NaN, which compares as false, becomes a bound that no integer meets.
    """

    value: Any
    dtype: torch.dtype
    is_up: bool
    is_low: bool

    def of_number(self, number: float) -> int:
        """The integer. Raises _NotLinearError for NaN, infinity, and numbers that are rounded."""
        compared = torch.tensor(number, dtype=self.dtype, device="cpu").item()
        if not abs(compared) < EXACT:
            raise _NotLinearError
        return math.ceil(compared) if self.is_up else math.floor(compared)

    def of_tensor(self, tensor: Tensor, limit: int) -> Tensor:
        """int64, from -limit to limit; the integers that it bounds are between these."""
        compared = tensor.to(self.dtype).double()
        rounded = compared.ceil() if self.is_up else compared.floor()
        rounded = rounded.nan_to_num(limit if self.is_low else -limit, limit, -limit)
        return rounded.clamp(-limit, limit).long()


class _Linear(NamedTuple):
    """q * q_idx + k * kv_idx + constant + the sum of factors and nodes of Python numbers."""

    q: int = 0
    k: int = 0
    constant: int = 0
    terms: tuple[tuple[int, Node | Whole], ...] = ()

    def plus(self, other: _Linear, factor: int = 1) -> _Linear:
        return _Linear(
            self.q + factor * other.q,
            self.k + factor * other.k,
            self.constant + factor * other.constant,
            (*self.terms, *((factor * x, node) for x, node in other.terms)),
        )


class _NotLinearError(Exception):
    pass


def find_bounds(module: GraphModule) -> Bound | Joined | None:
    """The bounds of a mask_mod's graph if all its conditions are sides of bands; else None."""
    (returned,) = module.graph.find_nodes(op="output")
    places = module.graph.find_nodes(op="placeholder")
    try:
        return _bounds(returned.args[0], places[2], places[3], False)
    except _NotLinearError:
        return None


def band_of(bounds: Bound | Joined, number: Callable[[Node], int | float]) -> BandForm | None:
    """The band at a call; None: numbers are too large, or bands leave a gap. number: the value of a
    node at this call."""
    try:
        least, most = _range_of(bounds, number)
    except _NotLinearError:
        return None
    return BandForm(None if least == -_OPEN else int(-least), None if most == _OPEN else int(most))


# Of the distance from a query to a key that has no limit.
_OPEN = math.inf


def _range_of(bounds: Bound | Joined, number: Callable[[Node], int | float]) -> tuple[float, float]:
    """The least and the most of kv_idx - q_idx; integers, or infinite."""
    if isinstance(bounds, Bound):
        return _range_of_bound(bounds, number)
    ranges = [_range_of(part, number) for part in bounds.parts]
    if not bounds.is_any:
        lows, highs = zip((-_OPEN, _OPEN), *ranges, strict=True)
        return max(lows), min(highs)
    shown = sorted(x for x in ranges if x[0] <= x[1])
    least, most = shown[0] if shown else ranges[0]
    for low, high in shown[1:]:
        if low > most + 1:
            raise _NotLinearError
        most = max(most, high)
    return least, most


def _range_of_bound(bound: Bound, number: Callable[[Node], int | float]) -> tuple[float, float]:
    def value(linear: _Linear) -> int:
        terms = (
            factor * int(x.of_number(number(x.value)) if isinstance(x, Whole) else number(x))
            for factor, x in linear.terms
        )
        return linear.constant + sum(terms)

    if any(abs(value(x)) >= _LIMIT for x in bound.sums):
        raise _NotLinearError
    distance = value(bound.distance)
    if bound.is_right is None:
        if distance < 0:
            raise _NotLinearError
        return -_OPEN, _OPEN
    return (-_OPEN, distance) if bound.is_right else (-distance, _OPEN)


def _bounds(node: Any, q_idx: Node, kv_idx: Node, is_negated: bool) -> Bound | Joined:
    if node is True or (isinstance(node, Node) and is_true(node)):
        if is_negated:
            raise _NotLinearError
        return Joined((), False)
    name = name_of_node(node)
    held = _held(node)
    if isinstance(held, Tensor) and held.dtype == torch.bool:
        if name in NOT:
            return _bounds(node.args[0], q_idx, kv_idx, not is_negated)
        if name in (*AND, *OR):
            is_any = (name in OR) is not is_negated
            given = (x for x in node.args if not (is_any and not is_negated and is_false(x)))
            parts = tuple(_bounds(x, q_idx, kv_idx, is_negated) for x in given)
            if is_any and not parts:
                raise _NotLinearError
            return Joined(parts, is_any)
    if name == ("ne" if is_negated else "eq"):
        both = (_sides(node, sign, 0, q_idx, kv_idx) for sign in (1, -1))
        return Joined(tuple(both), False)
    compared = sign_of(node, is_negated)
    if compared is None:
        raise _NotLinearError
    return _sides(node, *compared, q_idx, kv_idx)


def _sides(node: Node, sign: int, strict: int, q_idx: Node, kv_idx: Node) -> Joined:
    found = []
    for each in inequalities(node.args[0], node.args[1], sign, strict):
        sides = tuple(_linear(v, q_idx, kv_idx) for v in (each.first, each.second))
        # at least 0
        rest = _Linear(constant=each.strict).plus(sides[0].plus(sides[1], -1), each.sign)
        if (rest.q, rest.k) not in ((1, -1), (-1, 1), (1, 0), (0, 1)):
            raise _NotLinearError
        sums = tuple(x for x in sides if (x.q or x.k) and (x.constant or x.terms))
        is_right = None if rest.q + rest.k else rest.q == 1
        found.append(Bound(is_right, rest._replace(q=0, k=0), sums))
    return Joined(tuple(found), False)


def sign_of(node: Node, is_negated: bool) -> tuple[int, int] | None:
    """The sign and the strictness of a comparison, or of its opposite; None: there is none."""
    name = name_of_node(node)
    # of NaN neither a comparison nor its opposite holds
    if name not in SIGNS or (is_negated and any(map(is_float, node.args))):
        return None
    sign, strict = SIGNS[name]
    if is_negated:
        return -sign, -1 - strict
    return sign, strict


class Inequality(NamedTuple):
    """sign * (first - second) + strict >= 0, of integers, numbers, nodes, `Negated`, `Whole`."""

    first: Any
    second: Any
    sign: int
    strict: int


def inequalities(x: Any, y: Any, sign: int, strict: int) -> Iterator[Inequality]:
    """sign * (x - y) + strict >= 0 without absolute values; bounds of integers are integers."""
    for first, second in _without_abs(x, y, sign):
        floats = tuple(map(is_float, (first, second)))
        dtype = _dtype_of_comparison(first, second)
        if floats not in ((True, False), (False, True)) or dtype is None:
            yield Inequality(first, second, sign, strict)
            continue
        is_low = (sign == 1) == floats[1]
        whole = Whole(second if floats[1] else first, dtype, is_low == (strict == 0), is_low)
        if floats[1]:
            yield Inequality(first, whole, sign, strict)
        else:
            yield Inequality(whole, second, sign, strict)


def _held(value: Any) -> Any:
    """What a node holds, or the value itself."""
    if isinstance(value, Negated):
        value = value.value
    return value.meta.get("val") if isinstance(value, Node) else value


def is_float(value: Any) -> bool:
    """Whether a node or a number is a floating-point one."""
    held = _held(value)
    if isinstance(held, Tensor):
        return held.dtype.is_floating_point
    return isinstance(held, float | torch.SymFloat)


def _dtype_of_comparison(x: Any, y: Any) -> torch.dtype | None:
    """None: it has not all indices exactly, or there is none."""
    numbers = {torch.SymInt: 1, torch.SymFloat: 1.0}
    held = [numbers.get(type(v), v) for v in map(_held, (x, y))]
    if not any(isinstance(v, Tensor) for v in held):
        return None
    dtype = torch.result_type(*held)
    return dtype if dtype in (torch.float32, torch.float64) else None


def _without_abs(x: Any, y: Any, sign: int) -> Iterator[tuple[Any, Any]]:
    """Replace abs(d) <= c by d <= c and -d <= c."""
    small, large = (x, y) if sign < 0 else (y, x)
    if name_of_node(small) != "abs" or small.meta["val"].dtype not in (torch.int32, torch.int64):
        yield x, y
        return
    inner = small.args[0]
    for value in (inner, Negated(inner)):
        yield (value, large) if sign < 0 else (large, value)


class Negated(NamedTuple):
    value: Any


def _linear(value: Any, q_idx: Node, kv_idx: Node) -> _Linear:
    if isinstance(value, Whole):
        if isinstance(value.value, float):
            return _Linear(constant=value.of_number(value.value))
        if isinstance(_held(value.value), torch.SymFloat):
            return _Linear(terms=((1, value),))
        raise _NotLinearError
    if isinstance(value, int) and abs(value) < _LIMIT:
        return _Linear(constant=int(value))
    if not isinstance(value, Node | Negated):
        raise _NotLinearError
    if isinstance(value, Negated):
        return _Linear().plus(_linear(value.value, q_idx, kv_idx), -1)
    if value is q_idx:
        return _Linear(q=1)
    if value is kv_idx:
        return _Linear(k=1)
    held = value.meta.get("val")
    if isinstance(held, torch.SymInt):
        return _Linear(terms=((1, value),))
    if not isinstance(held, Tensor) or held.dtype not in (torch.int32, torch.int64):
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
    return _is_constant(node, "new_ones", True)


def is_false(node: Any) -> bool:
    """Whether a node is the constant false, with which `or_masks` begins."""
    return isinstance(node, Node) and _is_constant(node, "new_zeros", False)


def _is_constant(node: Node, maker: str, held: bool) -> bool:
    value, name = node.meta.get("val"), name_of_node(node)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim():
        return False
    if name in SAME and isinstance(node.args[0], Node):
        return _is_constant(node.args[0], maker, held)
    if node.op == "get_attr" and node.meta["captured"] is None:
        # as `torch.tensor(True)` in a mod is
        return bool(getattr(node.graph.owning_module, str(node.target))) is held
    return name == maker or (name == "full" and bool(node.args[1] == held))


def nodes_behind(nodes: Iterable[Node]) -> set[Node]:
    """Nodes, and all that they are made of."""
    found, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def name_of_node(node: Any) -> str:
    if not isinstance(node, Node) or not callable(node.target):
        return ""
    return str(node.target.__name__).partition(".")[0]
