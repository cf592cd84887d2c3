"""Values of a traced mod in lowered text: expressions, element by element.

A 0-d tensor, or a few elements of a captured one, is an `Array`: an expression for each element. A
captured tensor is a `Table` until its elements are wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES

LARGEST_CLAIM = 1 << 20
# Larger numbers in products and sums of indices are no strides and no extents: they let results
# wrap, as in a hash.
MOST_STRIDE, MOST_OFFSET = 1 << 16, 1 << 30
MAX_ELEMENTS = 256
"""Of a captured tensor that a mod reads at once, and of what it computes of them."""

DSL_NAMES = {getattr(torch, name): of_dsl for name, of_dsl in CUTLASS_NAMES.items()}
# The dtype in which an operator computes what it then rounds, as torch's kernels do.
_COMPUTED_IN = {
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
_UNSIGNED = (torch.bool, torch.uint8, torch.uint32)


class NotLowerable(NotImplementedError):
    """A mod's operation has no CuTe text; the message names it and what to write instead."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return _COMPUTED_IN.get(dtype, dtype)


class Read(NamedTuple):
    """A read of an aux tensor. claims: (dimension, extent) that it must have at least, for indices
    that are not clamped."""

    aux: int
    claims: tuple[tuple[int, int], ...] = ()


class Element(NamedTuple):
    """An expression of one number.

    constant: its value, if known. is_simple: a name or a number, which may be written twice. low,
    high: bounds, if nothing before overflows; None: unknown. never_negative: an index of the call,
    or a quotient or remainder of one, which cannot overflow. read: the read in the text, dropped
    once the element has a name.
    """

    text: str
    constant: bool | int | float | None = None
    is_simple: bool = True
    low: float | None = None
    high: float | None = None
    never_negative: bool = False
    read: Read | None = None

    @property
    def is_nonneg(self) -> bool:
        return self.low is not None and self.low >= 0


def constant_element(value: bool | int | float) -> Element:
    known = None if math.isnan(value) else value
    return Element(literal(value), value, low=known, high=known)


def in_dtype(element: Element, given: torch.dtype, wanted: torch.dtype) -> Element:
    """Integers keep their bounds if the wanted dtype has all numbers of the given one."""
    if given.is_floating_point or wanted.is_floating_point or torch.bool in (given, wanted):
        return element._replace(never_negative=False)
    had, has = torch.iinfo(given), torch.iinfo(wanted)
    if has.min <= had.min and had.max <= has.max:
        return element
    return element._replace(low=None, high=None, never_negative=False)


def literal(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return repr(value)


def _shortest(element: Element) -> str:
    """The shortest decimal of a float32: 0.1 and not 0.10000000149011612."""
    value = element.constant
    if value is None or not math.isfinite(value):
        return element.text
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    exact = _as_float32(value)
    short = next(x for x in texts if _as_float32(float(x)) == exact)
    return repr(float(short))


def _as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


@dataclass(frozen=True)
class Array:
    """elements: in the order of a contiguous tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: tuple[Element, ...]

    @staticmethod
    def of_tensor(tensor: Tensor) -> Array:
        """The array of a tensor with known contents."""
        flat = tensor.detach().reshape(-1).tolist()
        elements: Iterable[Element] = map(constant_element, flat)
        if tensor.dtype == torch.float32:
            elements = (x._replace(text=_shortest(x)) for x in elements)
        return Array(tensor.dtype, tuple(tensor.shape), tuple(elements))

    @property
    def is_constant(self) -> bool:
        return all(x.constant is not None for x in self.elements)

    def never_negative(self) -> Array:
        elements = tuple(x._replace(never_negative=True) for x in self.elements)
        return replace(self, elements=elements)

    def as_tensor(self) -> Tensor:
        """The tensor of an array of constants."""
        flat = [x.constant for x in self.elements]
        return torch.tensor(flat, dtype=self.dtype, device="cpu").reshape(self.shape)

    def rearranged(self, places: Tensor) -> Array:
        """The elements with the flat indices `places`, in the shape of that tensor."""
        check_size(places.numel())
        chosen = tuple(self.elements[i] for i in places.reshape(-1).tolist())
        return replace(self, shape=tuple(places.shape), elements=chosen)

    def places(self) -> Tensor:
        return torch.arange(len(self.elements), device="cpu").reshape(self.shape)

    def broadcast(self, shape: Sequence[int]) -> Array:
        if tuple(shape) == self.shape:
            return self
        return self.rearranged(self.places().expand(tuple(shape)))


def check_size(count: int) -> None:
    if count > MAX_ELEMENTS:
        raise NotLowerable(
            f"computes with {count} elements at once, and at most {MAX_ELEMENTS} are written out: "
            "index the tensor by b, h, q_idx and kv_idx, or compute it before the call"
        )


@dataclass(frozen=True)
class Table:
    """A tensor in memory that the mod reads: aux tensor `aux`.

    indices: None for dimensions without one. shape: of the whole tensor when it was traced. known:
    its contents, if the mod made it. checks: all indices are clamped, also those with a bound.
    """

    aux: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    indices: tuple[Element | None, ...]
    known: Tensor | None
    checks: bool

    @staticmethod
    def create(aux: int, tensor: Tensor, known: Tensor | None, checks: bool) -> Table:
        shape = tuple(tensor.shape)
        return Table(aux, tensor.dtype, shape, (None,) * len(shape), known, checks)

    @property
    def left(self) -> tuple[int, ...]:
        """The dimensions without an index."""
        return tuple(i for i, x in enumerate(self.indices) if x is None)

    def at(self, indices: dict[int, Element]) -> Table:
        """Index further. indices: by number among the remaining dimensions."""
        left, known = self.left, list(self.indices)
        for place, index in indices.items():
            known[left[place]] = index
        return replace(self, indices=tuple(known))

    def read(self) -> Element:
        """The element at `indices`; none of them is None."""
        name = f"aux[{self.aux}]"
        places, claims = [], []
        for i, index in enumerate(self.indices):
            assert index is not None
            high = None if self.checks else index.high
            if index.is_nonneg and high is not None and 0 <= high < LARGEST_CLAIM:
                # whether the table has so many is seen at the call
                claims.append((i, int(high) + 1))
                places.append(f"ops.below({name}, {i}, {int(high) + 1}, {index.text})")
            else:
                check = "inside" if index.is_nonneg else "wrapped"
                places.append(f"ops.{check}({name}, {i}, {index.text})")
        text = f"{name}[{', '.join(places) or 0}]"
        low = 0 if self.dtype in _UNSIGNED else None
        return Element(text, is_simple=False, low=low, read=Read(self.aux, tuple(claims)))

    def elements(self) -> Array:
        """All elements of the remaining dimensions, read."""
        extents = tuple(self.shape[i] for i in self.left)
        check_size(math.prod(extents))
        if self.known is not None and all(
            x is None or x.constant is not None for x in self.indices
        ):
            place = tuple(slice(None) if x is None else int(x.constant or 0) for x in self.indices)
            return Array.of_tensor(self.known[place])
        coordinates = itertools.product(*map(range, extents))
        points = (map(constant_element, point) for point in coordinates)
        elements = (self.at(dict(enumerate(point))).read() for point in points)
        return Array(self.dtype, extents, tuple(elements))


@dataclass(frozen=True)
class Number:
    """A Python number that may change at each call. aux: gives the number of the aux tensor that
    holds it in a dtype, of one element."""

    is_float: bool
    aux: Callable[[torch.dtype], int]

    def in_dtype(self, dtype: torch.dtype) -> Array:
        """The number as torch uses it beside a tensor of this dtype."""
        held = torch.int64
        if self.is_float:
            held = torch.float64 if dtype == torch.float64 else torch.float32
        aux = self.aux(held)
        element = Element(f"aux[{aux}][0]", is_simple=False, read=Read(aux))
        return Array(held, (), (element,))


# -- what results are known not to be less or more than, from the operands ----------------------


def low_of_sum(x: Element, y: Element) -> float | None:
    if x.low is None or y.low is None or x.low + y.low > MOST_OFFSET:
        return None
    return x.low + y.low


def high_of_sum(x: Element, y: Element) -> float | None:
    return None if x.high is None or y.high is None else x.high + y.high


def high_of_least(x: Element, y: Element) -> float | None:
    return min((z.high for z in (x, y) if z.high is not None), default=None)


def unknown(*_: Element) -> None:
    return None


def low_of_least(x: Element, y: Element) -> float | None:
    return None if x.low is None or y.low is None else min(x.low, y.low)


def low_of_greatest(x: Element, y: Element) -> float | None:
    return max((z.low for z in (x, y) if z.low is not None), default=None)


def zero_if_both(x: Element, y: Element) -> float | None:
    return 0 if x.is_nonneg and y.is_nonneg else None


def low_of_product(x: Element, y: Element) -> float | None:
    """Of two factors that are not known, nothing: the product may wrap."""
    factor = next((z.constant for z in (x, y) if z.constant is not None), None)
    return zero_if_both(x, y) if factor is not None and factor <= MOST_STRIDE else None


def zero_if_either(x: Element, y: Element) -> float | None:
    return 0 if x.is_nonneg or y.is_nonneg else None
