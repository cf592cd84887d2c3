"""Ranges of integers: the least and greatest result of an operation, by those of its operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

Span = tuple[int, int]

# integers of more bits are not followed beyond these
_MOST_BITS = 32


def span_of(name: str, bits: int, operands: Sequence[Span | None]) -> Span | None:
    """The range of a result with this many bits, for an operation of MLIR by its name.

    None: nothing is known, or results leave the bits, or 32 bits. An `arith.select` has its
    condition as first operand.
    """
    of_numbers = operands[1:] if name == "arith.select" else operands
    rule, known = _SPANS.get(name), [x for x in of_numbers if x is not None]
    if rule is None or len(known) < len(of_numbers):
        return None
    found = rule(*known)
    most = 2 ** (min(bits, _MOST_BITS) - 1)
    return found if found is not None and -most <= found[0] and found[1] < most else None


def _hull(function: Callable[[int, int], int]) -> Callable[[Span, Span], Span]:
    """Of a function that is monotonous in each operand."""

    def span(x: Span, y: Span) -> Span:
        ends = [function(a, b) for a in x for b in y]
        return min(ends), max(ends)

    return span


def _divided(x: Span, y: Span) -> Span | None:
    if y[0] < 1:
        return None
    # rounded down, and towards zero
    ends = [end for a in x for b in y for end in (a // b, abs(a) // b * (1 if a > 0 else -1))]
    return min(ends), max(ends)


def _remainder(x: Span, y: Span) -> Span | None:
    if y[0] < 1:
        return None
    return (0 if x[0] >= 0 else 1 - y[1]), y[1] - 1


def _unsigned(rule: Callable[[Span, Span], Span | None]) -> Callable[[Span, Span], Span | None]:
    return lambda x, y: rule(x, y) if x[0] >= 0 else None


def _shifted(function: Callable[[int, int], int]) -> Callable[[Span, Span], Span | None]:
    hull = _hull(function)
    return lambda x, y: hull(x, y) if y[0] >= 0 and y[1] < 32 else None


def _masked(x: Span, y: Span) -> Span | None:
    ends = [end for low, end in (x, y) if low >= 0]
    return (0, min(ends)) if ends else None


def _either(x: Span, y: Span) -> Span:
    return min(x[0], y[0]), max(x[1], y[1])


def _absolute(x: Span) -> Span:
    low = 0 if x[0] <= 0 <= x[1] else min(map(abs, x))
    return low, max(map(abs, x))


def _as_it_is(x: Span) -> Span:
    return x


_SPANS: dict[str, Callable[..., Span | None]] = {
    "arith.addi": _hull(operator.add),
    "arith.subi": _hull(operator.sub),
    "arith.muli": _hull(operator.mul),
    "arith.minsi": _hull(min),
    "arith.maxsi": _hull(max),
    "arith.floordivsi": _divided,
    "arith.divsi": _divided,
    "arith.divui": _unsigned(_divided),
    "arith.remsi": _remainder,
    "arith.remui": _unsigned(_remainder),
    "arith.shrsi": _shifted(operator.rshift),
    "arith.shli": _shifted(operator.lshift),
    "arith.andi": _masked,
    "arith.select": _either,
    "arith.extsi": _as_it_is,
    "arith.trunci": _as_it_is,
    "arith.index_cast": _as_it_is,
    "math.absi": _absolute,
}
