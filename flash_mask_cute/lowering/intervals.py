"""Traced masks as column intervals: for each key, one range of queries that see it.

Documents, key validity, prefixes, windows, chunks and groups of image tokens, joined by `&`, `|`
and `~`, are such masks. Kernels skip what they hide, and call no callable. Here a graph becomes a
tree of conditions (`find_form`); `interval_rows.rows_of` computes its numbers at a call, and says
whether they are one range for each key. Any other mask stays a mask_mod.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_mask_cute.lowering.simplify import (
    AND,
    NOT,
    OR,
    SAME,
    Inequality,
    Negated,
    Whole,
    inequalities,
    is_false,
    is_true,
    name_of_node,
    sign_of,
)

# without torch's tag
_ELEMENTWISE = ("index", "floor_divide", "__rshift__", "__lshift__", *SAME)
BATCH, HEAD, QUERY, KEY = range(4)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WIDE = (torch.int32, torch.int64)
Terms: TypeAlias = tuple[tuple[int, Any], ...]
"""Factors, each of a node, a number or a `Whole`."""


class Sum(NamedTuple):
    """A sum in int32, which must not overflow. of_query: its terms that depend on the query."""

    of_query: Terms
    others: Terms


class BoundSide(NamedTuple):
    """q_idx is at least (is_low) or at most a sum of terms. sums: those that are compared."""

    is_low: bool
    terms: Terms
    sums: tuple[Sum, ...]


class Order(NamedTuple):
    """As `BoundSide`, of terms that depend on the query, such as its place in a document."""

    is_low: bool
    of_query: Terms
    terms: Terms
    sums: tuple[Sum, ...]


class Keys(NamedTuple):
    """A bool that depends on the batch entry and the key only."""

    node: Node
    is_negated: bool


class Queries(NamedTuple):
    """A bool that depends on the batch entry and the query only."""

    node: Node
    is_negated: bool


class Equal(NamedTuple):
    """A number of the query is one of the key. is_same: it is the same one, as with documents."""

    of_query: Node
    of_key: Node
    is_same: bool


class All(NamedTuple):
    parts: tuple[Any, ...]


class AnyOf(NamedTuple):
    parts: tuple[Any, ...]


class NotIntervalsError(Exception):
    pass


class Form(NamedTuple):
    """root: a tree of the classes above. module: the graph whose nodes it names."""

    root: Any
    module: GraphModule

    @property
    def has_documents(self) -> bool:
        """Whether a query sees only keys of its own number."""
        return any(isinstance(part, Equal) and part.is_same for part in parts_of(self.root))


def parts_of(part: Any) -> tuple[Any, ...]:
    """The conditions that all hold."""
    return part.parts if isinstance(part, All) else (part,)


def find_form(module: GraphModule) -> Form | None:
    """The form of a mask_mod's graph; None if it is not plainly made of intervals."""
    (returned,) = module.graph.find_nodes(op="output")
    finder = _Finder(module)
    try:
        root = finder.part(returned.args[0])
        finder.check_orders(root, False)
    except NotIntervalsError:
        return None
    return Form(root, module)


class _Finder:
    def __init__(self, module: GraphModule) -> None:
        self._places = module.graph.find_nodes(op="placeholder")[:4]
        self._known: dict[Node, frozenset[int]] = {x: frozenset({i}) for i, x in
                                                   enumerate(self._places)}  # fmt: skip

    def _depends(self, node: Any) -> frozenset[int]:
        """The indices that a node depends on."""
        if isinstance(node, Whole | Negated):
            node = node.value
        if not isinstance(node, Node):
            return frozenset()
        if node not in self._known:
            parts = (self._depends(x) for x in node.all_input_nodes)
            self._known[node] = frozenset().union(*parts)
        return self._known[node]

    # -- conditions ------------------------------------------------------------------------------

    def part(self, node: Any, is_negated: bool = False) -> Any:
        if not isinstance(node, Node) or is_true(node):
            if (node is False) is not is_negated:
                raise NotIntervalsError
            return All(())
        depends, name = self._depends(node), name_of_node(node)
        if HEAD in depends:
            raise NotIntervalsError
        if QUERY not in depends:
            self._check_elementwise(node)
            return Keys(node, is_negated)
        if _is_bool(node):
            if name in SAME and _is_bool(node.args[0]):
                return self.part(node.args[0], is_negated)
            if name in NOT:
                return self.part(node.args[0], not is_negated)
            if name in (OR if is_negated else AND):
                return self._all(tuple(self.part(x, is_negated) for x in node.args))
            if name in (AND if is_negated else OR):
                given = (x for x in node.args if is_negated or not is_false(x))
                return self._either(tuple(self.part(x, is_negated) for x in given))
        try:
            found = self._comparison(node, name, is_negated)
        except NotIntervalsError:
            found = None
        if KEY not in depends and not _is_of_places(found):
            if not _is_bool(node):
                raise NotIntervalsError
            self._check_elementwise(node)
            return Queries(node, is_negated)
        if found is None:
            raise NotIntervalsError
        return found

    def _all(self, parts: tuple[Any, ...]) -> All:
        return All(tuple(y for x in parts for y in parts_of(x)))

    def _either(self, parts: tuple[Any, ...]) -> AnyOf | All:
        if not parts:
            raise NotIntervalsError
        if All(()) in parts:
            return All(())
        flat = [y for x in parts for y in (x.parts if isinstance(x, AnyOf) else (x,))]
        others = [x for x in flat if not isinstance(x, Keys)]
        same = all(isinstance(x, BoundSide) and x.is_low == others[0].is_low for x in others)
        # what holds for some queries whatever the key leaves a gap beside what is near the key
        if len(others) > 1 and not same and not all(map(self._relates, others)):
            raise NotIntervalsError
        return AnyOf(tuple(flat))

    def _relates(self, part: Any) -> bool:
        """Whether a condition depends on the query and on the key."""
        if isinstance(part, BoundSide):
            # from a query on, which may be the first one, leaves none
            offset = sum(factor * x for factor, x in part.terms if isinstance(x, int))
            is_of_all = part.is_low and offset <= 0
            return is_of_all or any(KEY in self._depends(value) for _, value in part.terms)
        if isinstance(part, All):
            return any(map(self._relates, part.parts))
        if isinstance(part, AnyOf):
            return all(isinstance(x, Keys) or self._relates(x) for x in part.parts)
        return isinstance(part, Order | Equal)

    def _comparison(self, node: Node, name: str, is_negated: bool) -> Any:
        if name == ("ne" if is_negated else "eq"):
            return self._equal(*node.args)
        compared = sign_of(node, is_negated)
        if compared is None:
            raise NotIntervalsError
        return self._sides(node.args[0], node.args[1], *compared)

    def _equal(self, x: Any, y: Any) -> Any:
        for of_query, of_key in ((x, y), (y, x)):
            both = {QUERY, KEY}
            if self._depends(of_query) & both != {QUERY} or self._depends(of_key) & both != {KEY}:
                continue
            is_same = self._is_same(of_query, of_key)
            if not is_same:
                with suppress(NotIntervalsError):
                    found = self._both_sides(x, y)
                    if _is_of_places(found):
                        return found
            self._check_elementwise(of_query)
            self._check_elementwise(of_key)
            return Equal(of_query, of_key, is_same)
        return self._both_sides(x, y)

    def _both_sides(self, x: Any, y: Any) -> All:
        """Sides that say that two integers are equal."""
        return self._all((self._sides(x, y, 1, 0), self._sides(x, y, -1, 0)))

    def _is_same(self, of_query: Any, of_key: Any) -> bool:
        """Whether one node is the other with the key in place of the query."""
        if of_query is self._places[QUERY]:
            return of_key is self._places[KEY]
        if not isinstance(of_query, Node) or not isinstance(of_key, Node):
            return type(of_query) is type(of_key) and of_query == of_key
        if of_query is of_key:
            return True
        if of_query.op == of_key.op == "get_attr":
            place = of_query.meta["captured"]
            return place is not None and place == of_key.meta["captured"]
        if of_query.op != "call_function" or of_query.target is not of_key.target:
            return False
        pairs = [(of_query.args, of_key.args), (of_query.kwargs.items(), of_key.kwargs.items())]
        return all(self._are_same(tuple(a), tuple(b)) for a, b in pairs)

    def _are_same(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        if len(first) != len(second):
            return False
        return all(
            self._are_same(a, b)
            if isinstance(a, list | tuple) and isinstance(b, list | tuple)
            else self._is_same(a, b)
            for a, b in zip(first, second, strict=True)
        )

    # -- comparisons of sums ---------------------------------------------------------------------

    def _sides(self, x: Any, y: Any, sign: int, strict: int) -> Any:
        sides = tuple(map(self._side, inequalities(x, y, sign, strict)))
        return sides[0] if len(sides) == 1 else All(sides)

    def _side(self, inequality: Inequality) -> BoundSide | Order:
        sign = inequality.sign
        of_query: list[tuple[int, Any]] = []
        terms: list[tuple[int, Any]] = [(1, inequality.strict)]
        sums = []
        for factor, operand in ((sign, inequality.first), (-sign, inequality.second)):
            own, rest = self._linear(operand, factor)
            of_query, terms = of_query + own, terms + rest
            if own and len(own) + len(rest) > 1 and _dtype_of(operand) == torch.int32:
                sums.append(Sum(tuple(own), tuple(rest)))
        if not of_query:
            raise NotIntervalsError
        places = sum(factor for factor, value in of_query if value is self._places[QUERY])
        is_side = abs(places) == 1 and all(x is self._places[QUERY] for _, x in of_query)
        is_low = (places if is_side else of_query[0][0]) > 0
        turn = 1 if is_low else -1
        others = tuple((-turn * factor, value) for factor, value in terms)
        if is_side:
            return BoundSide(is_low, others, tuple(sums))
        if any(isinstance(value, Whole) for _, value in terms):
            # tables may have integers that its floating-point dtype has not
            raise NotIntervalsError
        own_terms = tuple((turn * factor, value) for factor, value in of_query)
        return Order(is_low, own_terms, others, tuple(sums))

    def _linear(self, value: Any, factor: int) -> tuple[list[Any], list[Any]]:
        """Split a sum into the terms that depend on the query and the others."""
        if isinstance(value, Whole):
            self._check_without_query(value.value)
            return [], [(factor, value)]
        if isinstance(value, float):
            raise NotIntervalsError
        if isinstance(value, Negated):
            return self._linear(value.value, -factor)
        if not isinstance(value, Node):
            return [], [(factor, value)]
        held, depends = value.meta.get("val"), self._depends(value)
        if value is self._places[QUERY]:
            return [(factor, value)], []
        if QUERY not in depends:
            if isinstance(held, torch.SymFloat) or (
                isinstance(held, Tensor) and not _bounds_indices(held)
            ):
                raise NotIntervalsError
            self._check_without_query(value)
            return [], [(factor, value)]
        if isinstance(held, Tensor) and held.dtype in _WIDE:
            name, args = name_of_node(value), value.args
            if name in SAME and _dtype_of(args[0]) in _WIDE:
                return self._linear(args[0], factor)
            if name == "neg":
                return self._linear(args[0], -factor)
            if name in ("add", "sub", "rsub") and not value.kwargs and len(args) == 2:
                signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[name]
                (first, rest), (second, more) = (
                    self._linear(x, factor * sign) for x, sign in zip(args, signs, strict=True)
                )
                return first + second, rest + more
        if KEY in depends or not isinstance(held, Tensor) or not _bounds_indices(held):
            raise NotIntervalsError
        self._check_elementwise(value)
        return [(factor, value)], []

    # -- what may rise with the query ------------------------------------------------------------

    def check_orders(self, part: Any, is_anchored: bool) -> None:
        """Refuse comparisons whose numbers can hardly rise from query to query.

        The numbers decide at a call. Tables are taken to rise among queries that are equal to the
        key in something (is_anchored), and if they are compared with themselves.
        """
        if isinstance(part, All):
            is_anchored |= any(
                isinstance(x, Equal)
                or (isinstance(x, Order) and self._is_plain(x) and self._rises(x, True))
                for x in part.parts
            )
        if isinstance(part, All | AnyOf):
            for each in part.parts:
                self.check_orders(each, is_anchored)
        if (
            isinstance(part, Order)
            and not is_anchored
            and not self._rises(part, self._is_plain(part))
        ):
            raise NotIntervalsError

    def _rises(self, order: Order, reads: bool) -> bool:
        return all(factor > 0 and self._may_rise(x, reads) for factor, x in order.of_query)

    def _is_plain(self, order: Order) -> bool:
        """Whether a number of the query is compared with the same one of the key."""
        nodes = [value for _, value in order.terms if isinstance(value, Node)]
        offset = sum(factor * x for factor, x in order.terms if isinstance(x, int))
        return (
            len(nodes) == len(order.of_query) == 1
            and abs(offset) <= 1
            and self._is_same(order.of_query[0][1], nodes[0])
        )

    def _may_rise(self, value: Any, reads: bool) -> bool:
        """Whether a value may never fall with the query. reads: a table may rise."""
        if QUERY not in self._depends(value) or value is self._places[QUERY]:
            return True
        name, args = name_of_node(value), value.args
        if name == "index":
            return reads and all(self._may_rise(x, reads) for x in args[1] if x is not None)
        if name in ("sub", "floor_divide", "__rshift__") or (name == "div" and value.kwargs):
            return self._may_rise(args[0], reads) and QUERY not in self._depends(args[1])
        if name in (*SAME, "add", "mul", "clamp", "clamp_min", "clamp_max", "minimum", "maximum"):
            return all(self._may_rise(x, reads) for x in args)
        return False

    # -- nodes that torch computes for all queries or keys at once -------------------------------

    def _check_without_query(self, value: Any) -> None:
        if self._depends(value) & {QUERY, HEAD}:
            raise NotIntervalsError
        self._check_elementwise(value)

    def _check_elementwise(self, node: Any) -> None:
        """Check that no operator of a node mixes elements."""
        if not isinstance(node, Node) or not self._depends(node) or node in self._places:
            return
        value, target = node.meta.get("val"), node.target
        is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
        is_plain = isinstance(value, Tensor) and (value.dim() == 0 or _is_of_one(node))
        if not is_plain or not (is_pointwise or name_of_node(node) in _ELEMENTWISE):
            raise NotIntervalsError
        for x in node.all_input_nodes:
            self._check_elementwise(x)


def _is_of_places(part: Any) -> bool:
    """Whether a condition is made of sides of q_idx alone."""
    return part is not None and all(isinstance(x, BoundSide) for x in parts_of(part))


def _is_bool(node: Any) -> bool:
    held = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(held, Tensor) and held.dtype == torch.bool


def _dtype_of(operand: Any) -> torch.dtype | None:
    node = operand.value if isinstance(operand, Negated) else operand
    held = node.meta.get("val") if isinstance(node, Node) else None
    return held.dtype if isinstance(held, Tensor) else None


def _bounds_indices(held: Tensor) -> bool:
    """Whether indices are compared with a tensor in a dtype that has them all."""
    if held.shape == (1,):
        # of a lone index it decides the dtype
        return held.dtype in _WIDE
    return held.dim() == 0 and held.dtype in _INTEGERS


def _is_of_one(node: Node) -> bool:
    """Whether a node has shape (1,), and the dtype that it has for whole vectors of indices."""
    inputs = [x.meta["val"] for x in node.all_input_nodes]
    if node.meta["val"].shape != (1,) or not all(isinstance(x, Tensor) for x in inputs):
        return False
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in inputs))
    return len(inputs) < 3 and torch.result_type(inputs[0], inputs[-1]) == dtype
