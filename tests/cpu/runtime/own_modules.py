"""Callables and modules as a user would write them, for keys of callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Import = Callable[..., Any]  # text -> module


def window(size: Any) -> Callable[..., Any]:
    def mask_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q - k < size

    return mask_mod


OBJECTS = """
import abc, dataclasses, enum, functools, typing
from types import SimpleNamespace

class Kind(enum.Enum):
    NEAR = {near}
    FAR = 9
    def twice(self):
        return self.value * {twice}

class Pair(typing.NamedTuple):
    left: int
    right: int = 1
    def total(self):
        return self.left + self.right

class Slotted:
    __slots__ = ("hidden",)
    def __init__(self, hidden):
        self.hidden = hidden

class Base(abc.ABC):
    LIMIT = {limit}
    def rule(self, q):
        return q < self.LIMIT + {rule}
    @abc.abstractmethod
    def __call__(self, q): ...

@dataclasses.dataclass(frozen=True)
class Mod(Base):
    slope: float
    kind: Kind = Kind.NEAR
    pair: Pair = Pair({left})
    slotted: Slotted = Slotted({hidden})
    space: SimpleNamespace = dataclasses.field(default_factory=lambda: SimpleNamespace(x={space}))
    extra: list = dataclasses.field(default_factory=list)
    def __call__(self, q):
        return self.rule(q) * self.slope
    def method(self, q):
        return self.callee(q)
    @staticmethod
    def callee(q):
        return q + {callee}
    @functools.cached_property
    def table(self):
        return (1, 2)

mod = Mod({slope})
"""
OBJECT_PARTS = dict.fromkeys(
    ("near", "twice", "limit", "rule", "left", "hidden", "space", "callee", "slope"), 1
)
