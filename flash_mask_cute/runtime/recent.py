"""A dictionary that forgets what was not used for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """Keeps the entries used last: at least the last `most / 2` of them, and at most `most`.

    The dictionary itself has the newer entries. When they reach half of `most` they become the
    older ones, and what was older is forgotten. An older entry that is looked up is a newer one
    again. Iteration, `in` and len() know the newer entries only. Threads that store at once may
    lose an entry, and nothing else: so no lock is needed, which a forked child could find taken.

    weigh: how many entries an entry counts for, by its key.
    """

    def __init__(self, most: int, weigh: Callable[[K], int] = lambda key: 1) -> None:
        super().__init__()
        self._half = most // 2
        self._weigh = weigh
        self._weight = 0
        self._older: dict[K, V] = {}

    def __missing__(self, key: K) -> V:
        value = self._older[key]
        self[key] = value
        return value

    def get(self, key: K, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            weight = self._weigh(key)
            if self._weight + weight > self._half and self._weight:
                self._older = dict(self)
                super().clear()
                self._weight = 0
            self._weight += weight
        super().__setitem__(key, value)

    def clear(self) -> None:
        super().clear()
        self._older, self._weight = {}, 0
