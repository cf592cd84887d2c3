"""Whether strided tensors have elements in the same memory, decided exactly.

The offset of an element is a sum of strides, with stride d in it 0 to n_d - 1 times. So two tensors
share an element if a certain number is such a sum of the strides of both. A search decides that,
from the largest stride on. It gives up after `_MOST_VISITS` steps, which takes a tensor of
`as_strided` with many strides, none of them a multiple of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from torch import Tensor

_MOST_VISITS = 20000


class Layout(NamedTuple):
    """What decides about overlap besides the address. item: bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.shape, tensor.stride(), tensor.element_size())

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.item


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The first address and the end of the memory that holds a tensor's elements."""
    extent = _extent(tensor.shape, tensor.stride(), tensor.element_size())
    start = tensor.data_ptr() if extent else 0
    return start, start + extent


@lru_cache(maxsize=4096)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> int:
    return Layout(shape, strides, item).extent


def share_elements(one: Tensor, other: Tensor) -> bool | None:
    """Whether an element of one tensor lies in an element of the other; None: gave up."""
    start, end = span_of(one)
    first, last = span_of(other)
    if not (start < last and first < end):
        return False
    return layouts_meet(Layout.of(one), Layout.of(other), first - start)


@lru_cache(maxsize=4096)
def layouts_meet(one: Layout, other: Layout, distance: int) -> bool | None:
    """`share_elements` of these layouts. distance: bytes between the first elements."""
    if 0 in one.shape or 0 in other.shape:
        return False
    unit = gcd(one.item, other.item, distance)
    counts: dict[int, int] = {}
    for shape, strides, item in (one, other):
        width = item // unit
        for n, stride in zip(shape, strides, strict=True):
            _add(counts, stride * width, n - 1)
        _add(counts, 1, width - 1)
    # the other's sums are counted from its end, so that one equation holds both
    return _is_sum(counts, (distance + other.extent) // unit - 1)


def overlaps_itself(tensor: Tensor) -> bool | None:
    """Whether two elements of a tensor lie in the same memory; None: the search gave up."""
    return layout_repeats(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def layout_repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool | None:
    """`overlaps_itself` of a tensor with this layout."""
    if 0 in shape:
        return False
    dims = sorted((s, n - 1) for n, s in zip(shape, strides, strict=True) if n > 1)
    found: bool | None = False
    for position, (stride, most) in enumerate(dims):
        # Two elements differ here by `stride` at least, and in smaller strides by what makes up
        # for it. Each of these is taken from -most to most times, counted from -most on.
        counts: dict[int, int] = {}
        reach = 0
        for smaller, times in dims[:position]:
            _add(counts, smaller, 2 * times)
            reach += smaller * times
        _add(counts, stride, most - 1)
        is_met = stride == 0 or _is_sum(counts, reach - stride)
        if is_met:
            return True
        found = None if is_met is None else found
    return found


def _add(counts: dict[int, int], stride: int, times: int) -> None:
    if stride and times:
        counts[stride] = counts.get(stride, 0) + times


class _Tail(NamedTuple):
    """The smallest strides of a sum. reach: the largest sum of them. divisor: their greatest common
    divisor. has_all: every multiple of it up to reach is a sum."""

    reach: int
    divisor: int
    has_all: bool

    def with_stride(self, stride: int, most: int) -> _Tail:
        """stride: at least as large as those of the tail."""
        divisor = gcd(self.divisor, stride)
        has_all = self.reach == 0 or (
            self.has_all and divisor == self.divisor and stride <= self.reach + divisor
        )
        return _Tail(self.reach + most * stride, divisor, has_all)


def _is_sum(counts: Mapping[int, int], target: int) -> bool | None:
    """Whether target is a sum of strides, each 0 to counts[stride] times; None: gave up."""
    strides = sorted(counts, reverse=True)
    tails = [_Tail(0, 0, True)]
    for stride in reversed(strides):
        tails.append(tails[-1].with_stride(stride, counts[stride]))
    tails.reverse()
    visited: set[tuple[int, int]] = set()

    def search(position: int, target: int) -> bool:
        tail = tails[position]
        if not 0 <= target <= tail.reach or (target and target % tail.divisor):
            return False
        if tail.has_all:
            return True
        if (position, target) in visited:
            return False
        visited.add((position, target))
        if len(visited) > _MOST_VISITS:
            raise _GaveUp
        stride, rest = strides[position], tails[position + 1]
        times = _times(stride, counts[stride], rest, target)
        return any(search(position + 1, target - n * stride) for n in times)

    try:
        return search(0, target)
    except _GaveUp:
        return None


class _GaveUp(Exception):
    pass


def _times(stride: int, most: int, rest: _Tail, target: int) -> Sequence[int]:
    """How often `stride` may be in a sum, so that the rest can be a sum of the others."""
    low, high = max(0, -((rest.reach - target) // stride)), min(most, target // stride)
    common = gcd(stride, rest.divisor)
    step = max(1, rest.divisor // common)
    if step > 1:
        first = target // common * pow(stride // common, -1, step) % step
        low += (first - low) % step
    return range(low, high + 1, step)
