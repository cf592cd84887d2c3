"""Traced masks as column intervals: for each key, one range of queries that see it.

Documents, key validity, prefixes and windows, joined by `&` and in some places by `|`, are such
masks. Kernels describe them by a few numbers for each key, skip what they hide, and call no
callable. torch computes the conditions that depend only on the key, for all keys at once. A
condition on q_idx becomes a bound. A mask that is not plainly an interval stays a mask_mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flash_mask_cute.lowering.simplify import (
    AND,
    EXACT,
    SAME,
    SIGNS,
    Inequality,
    Negated,
    Whole,
    inequalities,
    is_false,
    is_true,
    name_of_node,
)

_OR = ("bitwise_or", "logical_or", "__or__")
# without torch's tag
_ELEMENTWISE = ("index", "floor_divide", "__rshift__", "__lshift__", *SAME)
_B, _H, _Q, _K = range(4)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INT32 = 1 << 31
# Beyond any index; sums of such numbers do not overflow int64.
_FAR = 1 << 40
_Terms = tuple[tuple[int, Any], ...]


class Side(NamedTuple):
    """q_idx is at least (is_low) or at most a sum of terms, each a factor times a node, a number
    or a `Whole`. sums: what the compared sides add to an int32 q_idx, which must not overflow by
    it."""

    is_low: bool
    terms: _Terms
    sums: tuple[_Terms, ...]


class Keys(NamedTuple):
    """A bool that depends on the batch entry and the key only."""

    node: Node


class SameDocument(NamedTuple):
    """Query and key have the same number; node: the key's number."""

    node: Node


class All(NamedTuple):
    parts: tuple[Any, ...]


class Any_(NamedTuple):
    """A disjunction of `Keys` and at most one other condition, or of sides of one direction."""

    parts: tuple[Any, ...]


class _NotIntervalsError(Exception):
    pass


class Form(NamedTuple):
    """root: a tree of the classes above. module: the graph whose nodes it names."""

    root: Any
    module: GraphModule

    @property
    def has_documents(self) -> bool:
        """Whether a query sees only keys of its own document."""
        parts = self.root.parts if isinstance(self.root, All) else (self.root,)
        return any(isinstance(part, SameDocument) for part in parts)


class Rows(NamedTuple):
    """The queries that see each key, from `low` to `high` - 1: int64 (batch | 1, seqlen_k).

    Also whether all ids are contiguous; if not, the rows mean nothing.
    """

    low: Tensor
    high: Tensor
    is_right: Tensor


def find_form(module: GraphModule) -> Form | None:
    """The form of a mask_mod's graph; None if it is not plainly made of intervals."""
    (returned,) = module.graph.find_nodes(op="output")
    finder = _Finder(module)
    try:
        return Form(finder.part(returned.args[0]), module)
    except _NotIntervalsError:
        return None


class _Finder:
    def __init__(self, module: GraphModule) -> None:
        self._places = module.graph.find_nodes(op="placeholder")[:4]
        self._known: dict[Node, frozenset[int]] = {x: frozenset({i}) for i, x in
                                                   enumerate(self._places)}  # fmt: skip

    def _depends(self, node: Any) -> frozenset[int]:
        """The indices that a node depends on."""
        if not isinstance(node, Node):
            return frozenset()
        if node not in self._known:
            parts = (self._depends(x) for x in node.all_input_nodes)
            self._known[node] = frozenset().union(*parts)
        return self._known[node]

    def part(self, node: Any) -> Any:
        if not isinstance(node, Node) or is_true(node):
            if node is False:
                raise _NotIntervalsError
            return All(())
        depends, name = self._depends(node), name_of_node(node)
        if _H in depends:
            raise _NotIntervalsError
        if _Q not in depends:
            self._check_elementwise(node)
            return Keys(node)
        if node.meta["val"].dtype == torch.bool and name in AND:
            parts = tuple(map(self.part, node.args))
            return All(tuple(y for x in parts for y in (x.parts if isinstance(x, All) else (x,))))
        if node.meta["val"].dtype == torch.bool and name in _OR:
            given = (x for x in node.args if not is_false(x))
            return self._either(tuple(map(self.part, given)))
        if name == "eq":
            return self._equal(*node.args)
        if name not in SIGNS:
            raise _NotIntervalsError
        sign, strict = SIGNS[name]
        return self._sides(node.args[0], node.args[1], sign, strict)

    def _sides(self, x: Any, y: Any, sign: int, strict: int) -> Any:
        sides = tuple(map(self._side, inequalities(x, y, sign, strict)))
        return sides[0] if len(sides) == 1 else All(sides)

    def _either(self, parts: tuple[Any, ...]) -> Any_:
        if not parts:
            raise _NotIntervalsError
        flat = [y for x in parts for y in (x.parts if isinstance(x, Any_) else (x,))]
        others = [x for x in flat if not isinstance(x, Keys)]
        same = all(isinstance(x, Side) and x.is_low == others[0].is_low for x in others)
        if len(others) > 1 and not same:
            raise _NotIntervalsError
        return Any_(tuple(flat))

    def _equal(self, x: Any, y: Any) -> Any:
        for of_query, of_key in ((x, y), (y, x)):
            depends = self._depends(of_query), self._depends(of_key)
            if _K not in depends[0] and _Q not in depends[1] and self._is_same(of_query, of_key):
                self._check_elementwise(of_key)
                return SameDocument(of_key)
        return All((self._sides(x, y, 1, 0), self._sides(x, y, -1, 0)))

    def _is_same(self, of_query: Any, of_key: Any) -> bool:
        """Whether one node is the other with the key in place of the query."""
        if of_query is self._places[_Q]:
            return of_key is self._places[_K]
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

    def _side(self, inequality: Inequality) -> Side:
        sign = inequality.sign
        of_q, terms, sums = 0, [(1, inequality.strict)], []
        pairs = (sign, inequality.first), (-sign, inequality.second)
        for factor, operand in pairs:
            own, rest = self._linear(operand, factor)
            of_q, terms = of_q + own, terms + rest
            if own and rest and _dtype_of(operand) == torch.int32:
                sums.append(tuple(rest))
        if of_q not in (1, -1):
            raise _NotIntervalsError
        terms = [(-of_q * factor, value) for factor, value in terms]
        return Side(of_q == 1, tuple(terms), tuple(sums))

    def _linear(self, value: Any, factor: int) -> tuple[int, list[tuple[int, Any]]]:
        """Split a sum into the factor of q_idx and the other terms."""
        if isinstance(value, Whole):
            self._check_without_query(value.value)
            return 0, [(factor, value)]
        if isinstance(value, float):
            raise _NotIntervalsError
        if not isinstance(value, Node):
            negated = getattr(value, "value", None)
            if negated is not None:
                return self._linear(negated, -factor)
            return 0, [(factor, value)]
        held = value.meta.get("val")
        if value is self._places[_Q]:
            return factor, []
        if _Q not in self._depends(value):
            if isinstance(held, torch.SymFloat) or (
                isinstance(held, Tensor) and not _bounds_indices(held)
            ):
                raise _NotIntervalsError
            self._check_without_query(value)
            return 0, [(factor, value)]
        if isinstance(held, Tensor) and held.dtype not in (torch.int32, torch.int64):
            raise _NotIntervalsError
        name, args = name_of_node(value), value.args
        if name in SAME:
            return self._linear(args[0], factor)
        if name == "neg":
            return self._linear(args[0], -factor)
        if name in ("add", "sub", "rsub") and not value.kwargs and len(args) == 2:
            signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[name]
            (first, rest), (second, more) = (
                self._linear(x, factor * sign) for x, sign in zip(args, signs, strict=True)
            )
            return first + second, rest + more
        raise _NotIntervalsError

    def _check_without_query(self, value: Any) -> None:
        if self._depends(value) & {_Q, _H}:
            raise _NotIntervalsError
        self._check_elementwise(value)

    def _check_elementwise(self, node: Any) -> None:
        """Check that a node can be computed for all keys at once: no operator mixes elements."""
        if not isinstance(node, Node) or not self._depends(node) or node in self._places:
            return
        value, target = node.meta.get("val"), node.target
        is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
        is_plain = isinstance(value, Tensor) and (value.dim() == 0 or _is_of_one(node))
        if not is_plain or not (is_pointwise or name_of_node(node) in _ELEMENTWISE):
            raise _NotIntervalsError
        for x in node.all_input_nodes:
            self._check_elementwise(x)


def _dtype_of(operand: Any) -> torch.dtype:
    node = operand.value if isinstance(operand, Negated) else operand
    return cast(torch.dtype, node.meta["val"].dtype)


def _bounds_indices(held: Tensor) -> bool:
    """Whether indices are compared with a tensor in a dtype that has them all."""
    if held.shape == (1,):
        # of a lone index it decides the dtype
        return held.dtype in (torch.int32, torch.int64)
    return held.dim() == 0 and held.dtype in _INTEGERS


def _is_of_one(node: Node) -> bool:
    """Whether a node has shape (1,), and the dtype that it has for whole vectors of indices."""
    inputs = [x.meta["val"] for x in node.all_input_nodes]
    if node.meta["val"].shape != (1,) or not all(isinstance(x, Tensor) for x in inputs):
        return False
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in inputs))
    return len(inputs) < 3 and torch.result_type(inputs[0], inputs[-1]) == dtype


# -- numbers --------------------------------------------------------------------------------------


def rows_of(
    form: Form, known: Callable[[Node], Any], seqlens: tuple[int, int], batch: int, device: Any
) -> Rows | None:
    """The intervals of a form at a call. known: values of nodes that depend on no index.
    seqlens: queries and keys.

    It waits for no device. It returns None if documents are compared with unequal numbers of
    queries and keys, if a comparison rounds indices, or, on the CPU, if an index is out of range.
    """
    try:
        low, high, is_right = _Numbers(form, known, seqlens, batch, device).of(form.root)
    except _NotIntervalsError:
        return None
    return Rows(low.clamp(0, seqlens[0]), high.clamp(0, seqlens[0]), is_right)


class _Numbers:
    def __init__(
        self,
        form: Form,
        known: Callable[[Node], Any],
        seqlens: tuple[int, int],
        batch: int,
        device: Any,
    ) -> None:
        self._known, (self._rows, self._keys) = known, seqlens
        places = form.module.graph.find_nodes(op="placeholder")[:4]
        ints = {"dtype": torch.int32, "device": device}
        self._k = torch.arange(self._keys, **ints)[None]
        self._values: dict[Node, Any] = {
            places[_B]: torch.arange(batch, **ints)[:, None],
            places[_K]: self._k,
        }
        self._reaches = dict.fromkeys(self._values, True)
        self._true = torch.ones((), dtype=torch.bool, device=device)

    def of(self, part: Any) -> tuple[Tensor, Tensor, Tensor]:
        low, high = torch.zeros_like(self._k).long(), torch.full_like(self._k, self._rows).long()
        if isinstance(part, Keys):
            seen = self._value(part.node)
            return torch.where(seen, low, high), torch.where(seen, high, low), self._true
        if isinstance(part, SameDocument):
            return self._runs(self._value(part.node).expand(-1, self._keys))
        if isinstance(part, Side):
            # a tensor, even if all terms are numbers
            edge = torch.zeros_like(low) + self._sum(part.terms)
            is_right = self._true
            for terms in part.sums:
                reach = torch.zeros_like(low) + self._sum(terms)
                is_right = is_right & (reach.abs() < _INT32 - self._rows).all()
            return (edge, high, is_right) if part.is_low else (low, edge + 1, is_right)
        is_right = self._true
        if isinstance(part, All):
            for each in part.parts:
                its_low, its_high, its_right = self.of(each)
                low, high = torch.maximum(low, its_low), torch.minimum(high, its_high)
                is_right = is_right & its_right
            return low, high, is_right
        low, high = high, low
        for each in sorted(part.parts, key=lambda x: isinstance(x, Keys)):
            its_low, its_high, its_right = self.of(each)
            # sides of one direction agree on the other end; keys have all rows or none
            is_empty = its_high <= its_low
            low = torch.where(is_empty, low, torch.minimum(low, its_low))
            high = torch.where(is_empty, high, torch.maximum(high, its_high))
            is_right = is_right & its_right
        return low, high, is_right

    def _runs(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._rows != self._keys:
            raise _NotIntervalsError
        place = torch.arange(self._keys, device=ids.device)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        low = torch.where(begins, place, 0).cummax(1).values
        ends = torch.where(begins, place, self._keys)[:, 1:]
        ends = torch.nn.functional.pad(ends, (0, 1), value=self._keys)
        high = ends.flip(1).cummin(1).values.flip(1)
        ordered = ids.sort(1).values
        different = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + 1
        is_right = (begins.sum(1) == different).all()
        # NaN is not equal to itself, so no query sees such a key
        return low, torch.where(ids == ids, high, low), is_right

    def _sum(self, terms: _Terms) -> Any:
        return sum(factor * self._long(value) for factor, value in terms)

    def _long(self, value: Any) -> Any:
        """An integer as int64 or a number. It is clamped: what is beyond all indices may be what is
        largest in its dtype, to which nothing could be added."""
        if isinstance(value, Whole):
            if max(self._rows, self._keys) >= EXACT:
                raise _NotIntervalsError
            found = self._value(value.value)
            if not isinstance(found, Tensor):
                found = torch.full((), found, dtype=torch.float64, device=self._k.device)
            return value.of_tensor(found, _FAR)
        found = self._value(value)
        if isinstance(found, Tensor):
            return found.long().clamp(-_FAR, _FAR)
        if abs(found) >= _INT32:
            # torch makes an int32 of it, which wraps
            raise _NotIntervalsError
        return found

    def _value(self, node: Any) -> Any:
        """The value of a node without q_idx: (batch | 1, seqlen_k | 1), or a number."""
        if not isinstance(node, Node):
            return node
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        if not self._reaches_an_index(node):
            value = self._known(node)
            is_number = isinstance(value, Tensor) and value.dim() == 0
            # of one rank, so that torch promotes as it does for two numbers
            return value.to(self._k.device).view(1, 1) if is_number else value
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._value)
        if name_of_node(node) == "index":
            table, indices = cast("tuple[Tensor, Sequence[Tensor | None]]", args)
            args = (table, [self._inside(table, i, x) for i, x in enumerate(indices)])
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result.to(node.meta["val"].dtype)

    def _reaches_an_index(self, node: Node) -> bool:
        if node not in self._reaches:
            self._reaches[node] = any(map(self._reaches_an_index, node.all_input_nodes))
        return self._reaches[node]

    def _inside(self, table: Tensor, dimension: int, index: Tensor | None) -> Tensor:
        """An index as a kernel uses it: wrapped and clamped to the table."""
        if index is None:
            raise _NotIntervalsError
        extent = table.shape[dimension]
        index = index.long()
        wrapped = torch.where(index < 0, index + extent, index)
        inside = wrapped.clamp(0, extent - 1)
        if not inside.is_cuda and not torch.equal(inside, wrapped):
            raise _NotIntervalsError
        return inside
