"""`torch.bucketize` and `torch.searchsorted` as text of CuTe, by which binned biases find a bin."""

from __future__ import annotations

from dataclasses import replace

import torch

from flash_mask_cute.lowering.ops import OpCall, Rule, as_array, cast, converted, promoted, typed
from flash_mask_cute.lowering.values import (
    Array,
    Element,
    NotLowerable,
    Table,
    computed_in,
    constant_element,
)

MAX_EDGES = 64


def _searchsorted(call: OpCall) -> Array:
    if call.kwargs.get("sorter") is not None:
        raise NotLowerable("searches in the order of a sorter: pass edges[sorter], sorted before")
    return _searched(call, *call.args[:2])


SEARCHES: dict[str, Rule] = {
    "bucketize": lambda call: _searched(call, call.args[1], call.args[0]),
    "searchsorted": _searchsorted,
}


def _searched(call: OpCall, edges: object, value: object) -> Array:
    """The number of edges less than a value, or not more than it; of NaN, all of them."""
    if not isinstance(edges, Table):
        raise NotLowerable("searches edges that it computes for each score: capture them")
    extents = [edges.shape[i] for i in edges.left]
    if len(extents) != 1:
        raise NotLowerable(f"searches edges of {len(extents)} dimensions: index all but the last")
    if extents[0] > MAX_EDGES:
        raise NotLowerable(
            f"searches {extents[0]} edges, and at most {MAX_EDGES} are searched for each score: "
            "before the call, make a table of the bins of all indices or distances, as "
            "torch.bucketize(torch.arange(n), edges), and read that"
        )
    is_right = call.kwargs.get("right", False) or call.kwargs.get("side") == "right"
    common = promoted(value, edges)
    values = cast(cast(as_array(value, common, call), common), computed_in(common))
    search = _Search(call, edges, extents[0], common, ">" if is_right else ">=")
    found = tuple(search.of(x) for x in values.elements)
    return Array(call.dtype, values.shape, found)


class _Search:
    """A binary search without branches. common: the dtype compared in; symbol: > or >=."""

    def __init__(
        self, call: OpCall, edges: Table, count: int, common: torch.dtype, symbol: str
    ) -> None:
        self._call, self._edges, self._count = call, edges, count
        self._common, self._symbol = common, symbol

    def of(self, value: Element) -> Element:
        found, most = constant_element(0), 0
        for step in (1 << i for i in reversed(range(self._count.bit_length()))):
            found = self._advanced(found, most, step, value)
            most = min(most + step, self._count)
        return self._named(converted(found, torch.int32, self._call.dtype))

    def _advanced(self, found: Element, most: int, step: int, value: Element) -> Element:
        """found, of at most `most`, or `step` more if so many edges count."""
        last = self._count - 1
        index = _plus(found, step - 1)._replace(low=0, high=most + step - 1)
        may_pass = most + step > self._count
        if may_pass:
            index = Element(f"ops.at_most({index.text}, {last})", None, False, 0, last)
        edge = self._edge(self._named(index))
        counts = f"(({edge} {self._symbol} {value.text}) == False)"
        if may_pass:
            counts = f"({counts} & ({found.text} <= {self._count - step}))"
        more, same = (typed(x, torch.int32) for x in (_plus(found, step), found))
        text = f"ops.where({counts}, {more}, {same})"
        return self._named(Element(text, None, False, 0, min(most + step, self._count)))

    def _edge(self, index: Element) -> str:
        compared = converted(self._edges.at({0: index}).read(), self._edges.dtype, self._common)
        return self._named(converted(compared, self._common, computed_in(self._common))).text

    def _named(self, element: Element) -> Element:
        return replace(self._call, name=f"{self._call.name}_edge").name_element(element)


def _plus(element: Element, number: int) -> Element:
    if element.constant is not None:
        return constant_element(int(element.constant) + number)
    return Element(f"{element.text} + {number}", is_simple=False) if number else element
