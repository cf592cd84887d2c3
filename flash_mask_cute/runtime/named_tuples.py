"""Named tuples with other fields, as Dynamo can follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Bundle = TypeVar("Bundle", bound=NamedTuple)


# A bundle of a kind, of the values of all its fields: made(kind, values) takes half the time of
# kind(*values), and does not count them.
made: Callable[[type[Bundle], tuple[Any, ...]], Bundle] = tuple.__new__


def replaced(bundle: Bundle, **changes: Any) -> Bundle:
    """As `bundle._replace(**changes)`. Where a graph breaks, Dynamo of torch 2.9 to 2.12 makes an
    empty tuple of what that returned. Raises TypeError: there is no such field."""
    values = list(map(changes.pop, bundle._fields, bundle))
    if changes:
        raise TypeError(f"{type(bundle).__name__} has no fields {sorted(changes)}")
    return bundle._make(values)
