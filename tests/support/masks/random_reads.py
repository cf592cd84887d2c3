"""Random score modifiers that add an element of a learned table, with the class of its index.

An index is an expression of places. It is drawn once, and evaluated in three languages: on scalars
of the DSL, in a mod written in torch, and on whole numbers of torch for all scores at once. Nothing
here uses the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# of the learned table, and of the table of numbers that indices look up
SIZE, NUMBERS = 48, 64
# extents of the scores on which indices are compared: batch, heads, queries, keys
EXTENTS = 2, 3, 13, 14


class Language(NamedTuple):
    """look_up: the number at an index. log: the whole part of the binary logarithm."""

    least: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]
    look_up: Callable[[Any], Any]
    log: Callable[[Any], Any]


# Evaluates an index at places: index(language, b, h, q, k).
Index = Callable[..., Any]


class RandomRead(NamedTuple):
    """name: of the class that is expected. index: see above."""

    name: str
    index: Index

    def cute(self, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        """The CuTe mod; aux: the learned table, and numbers."""
        return score + aux[0][self.inside(dsl_language(aux[1]), b[0], h[0], q[0], k[0])]

    def torch(self, table: Tensor, numbers: Tensor) -> Callable[..., Tensor]:
        """The same mod in torch."""

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + table[self.inside(torch_language(numbers), b, h, q, k)]

        return score_mod

    def inside(self, language: Language, *place: Any) -> Any:
        """An index that exists."""
        return language.most(language.least(self.index(language, *place), SIZE - 1), 0)

    def dense(self, numbers: Tensor, extents: tuple[int, int, int, int] = EXTENTS) -> Tensor:
        """The index of each score, (batch, heads, queries, keys)."""
        place = torch.meshgrid(*map(torch.arange, extents), indexing="ij")
        found = self.inside(torch_language(numbers.long()), *place)
        return torch.as_tensor(found).expand(extents)


def dsl_language(numbers: Any) -> Language:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    def as_scalar(x: Any) -> Any:
        return x if isinstance(x, cutlass.Numeric) else Int32(x)

    return Language(
        lambda x, y: cutlass.min(as_scalar(x), as_scalar(y)),
        lambda x, y: cutlass.max(as_scalar(x), as_scalar(y)),
        lambda c, x, y: cutlass.select_(c, as_scalar(x), as_scalar(y)),
        lambda i: numbers[i],
        lambda x: Int32(cute.math.log2(Float32(Int32(x)))),
    )


def torch_language(numbers: Tensor) -> Language:
    def pair(x: Any, y: Any) -> tuple[Any, Any]:
        some = x if isinstance(x, Tensor) else y
        return tuple(
            z if isinstance(z, Tensor) else torch.full((), z, dtype=some.dtype) for z in (x, y)
        )  # type: ignore[return-value]

    return Language(
        lambda x, y: torch.minimum(*pair(x, y)),
        lambda x, y: torch.maximum(*pair(x, y)),
        lambda c, x, y: torch.where(c, *pair(x, y)),
        lambda i: numbers[i],
        lambda x: torch.log2(x.to(torch.float32)).to(x.dtype),
    )


class Draw:
    """Draws from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def read(self) -> RandomRead:
        """A read of one of the classes, or one that is nearly of it."""
        kinds = [self._head, self._key, self._query, self._difference]
        kinds += [self._unknown_range, self._near_miss]
        return self.random.choice(kinds)()

    def _head(self) -> RandomRead:
        return RandomRead("head", self._single("h", self._fixed("h")))

    def _key(self) -> RandomRead:
        return RandomRead("key", self._single("k", self._looked_up("k")))

    def _query(self) -> RandomRead:
        return RandomRead("query", self._single("q", self._looked_up("q")))

    def _difference(self) -> RandomRead:
        return RandomRead("difference", self._function(self._minus("k", "q")))

    def _unknown_range(self) -> RandomRead:
        """Positions by a table."""
        a, b = self._looked_up("k"), self._looked_up("q")
        return RandomRead("other", self._function(lambda x, *p: a(x, *p) - b(x, *p)))

    def _near_miss(self) -> RandomRead:
        difference, curved = self._minus("k", "q"), self._function(self._minus("k", "q"))
        a, b = self._monotonous("k"), self._monotonous("q")
        n = self.random.randint(1, 3)
        missed: list[Index] = [
            lambda x, *p: difference(x, *p) + a(x, *p) * b(x, *p),
            lambda x, *p: abs(difference(x, *p)) + n * a(x, *p),
            lambda x, *p: difference(x, *p) // 3 - b(x, *p),
            lambda x, *p: x.least(a(x, *p), b(x, *p)) + n,
            lambda x, *p: x.where(a(x, *p) * 2 > b(x, *p), a(x, *p) + 1, 0),
            lambda x, *p: a(x, *p) * (b(x, *p) + 1),
            lambda x, *p: x.look_up(x.most(a(x, *p) - b(x, *p), 0)) + a(x, *p),
            lambda x, *p: curved(x, *p) * a(x, *p) + p[2],
        ]
        return RandomRead("other", self.random.choice(missed))

    # -- parts ----------------------------------------------------------------------------------

    def _place(self, name: str) -> Index:
        i = "bhqk".index(name)
        return lambda x, *p: p[i]

    def _fixed(self, name: str) -> Index:
        place, other = self._place(name), self._place(self.random.choice("bh"))
        n = self.random.randint(1, 3)
        choices: list[Index] = [
            lambda x, *p: place(x, *p) + n,
            lambda x, *p: x.look_up(place(x, *p) * n),
            lambda x, *p: place(x, *p) * other(x, *p),
        ]
        return self.random.choice(choices)

    def _monotonous(self, name: str) -> Index:
        """A term whose range follows from lengths."""
        place, n = self._place(name), self.random.randint(1, 5)
        choices: list[Index] = [
            place,
            lambda x, *p: place(x, *p) // n,
            lambda x, *p: place(x, *p) // (n + 15),
            lambda x, *p: place(x, *p) * n,
            lambda x, *p: x.least(place(x, *p), 3 + n),
            lambda x, *p: x.most(place(x, *p) - n, 0),
        ]
        return self.random.choice(choices)

    def _bounded(self, name: str) -> Index:
        """Any term whose range follows from lengths."""
        term, n = self._monotonous(name), self.random.randint(2, 5)
        choices: list[Index] = [
            term,
            lambda x, *p: term(x, *p) % n,
            lambda x, *p: abs(term(x, *p) - n),
            lambda x, *p: n * (term(x, *p) // n) + term(x, *p) % n,
            lambda x, *p: x.where(term(x, *p) > n, term(x, *p), n),
            lambda x, *p: x.least(term(x, *p), 5) * x.least(term(x, *p), 5),
        ]
        return self.random.choice(choices)

    def _looked_up(self, name: str) -> Index:
        term = self._monotonous(name)
        return lambda x, *p: x.look_up(x.least(term(x, *p), NUMBERS - 1))

    def _single(self, name: str, special: Index) -> Index:
        """A function of one place, and of batch entry and head."""
        bounded = self._bounded(name)
        fixed, n = self._fixed("h"), self.random.randint(1, 3)
        choices: list[Index] = [
            special,
            bounded,
            lambda x, *p: bounded(x, *p) + fixed(x, *p),
            lambda x, *p: special(x, *p) * n + bounded(x, *p),
            lambda x, *p: x.log(bounded(x, *p) + 1 + bounded(x, *p)),
            lambda x, *p: x.where(special(x, *p) > 4, bounded(x, *p), n),
        ]
        return self.random.choice(choices)

    def _minus(self, name: str, other: str) -> Index:
        a, b = self._bounded(name), self._bounded(other)
        more, n = self._bounded(name), self.random.randint(1, 5)
        choices: list[Index] = [
            lambda x, *p: a(x, *p) - b(x, *p),
            lambda x, *p: b(x, *p) - a(x, *p),
            lambda x, *p: n * a(x, *p) - b(x, *p) + 7,
            lambda x, *p: a(x, *p) + b(x, *p),
            lambda x, *p: (a(x, *p) + more(x, *p) * n) - b(x, *p),
        ]
        place, of_other = self._place(name), self._place(other)
        choices += [lambda x, *p: place(x, *p) - of_other(x, *p)] * 3
        return self.random.choice(choices)

    def _function(self, difference: Index) -> Index:
        fixed, n = self._fixed("h"), self.random.randint(1, 4)
        choices: list[Index] = [
            lambda x, *p: difference(x, *p) + n,
            lambda x, *p: abs(difference(x, *p)),
            lambda x, *p: x.least(x.most(difference(x, *p), -n), n) + n,
            lambda x, *p: difference(x, *p) // n + abs(difference(x, *p) - 1),
            lambda x, *p: difference(x, *p) * n + fixed(x, *p),
            lambda x, *p: x.log(abs(difference(x, *p)) + n) + fixed(x, *p),
            lambda x, *p: x.where(difference(x, *p) > 0, difference(x, *p), n),
            lambda x, *p: abs(difference(x, *p)) % (n + 1),
            lambda x, *p: x.look_up(x.least(abs(difference(x, *p)), NUMBERS - 1)),
            lambda x, *p: x.where(fixed(x, *p) > n, difference(x, *p) + 3, n),
        ]
        return self.random.choice(choices)
