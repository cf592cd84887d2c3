"""The grammar of drawn programs: straight-line code on the place of a score, for indices of learned
tables. A program is drawn once, and evaluated on scalars of the DSL and on tensors of torch.

Of what `ReadDraw` draws, the class of the read is known. Of what `Draw` draws, nothing is known, so
a program may hold any mixture: 8, 32 and 64 bits, sums that wrap, floats, conditions, branches,
tables of tables. Leaves are drawn with a bias, or hardly any index would be a function of one
difference. Nothing here uses the package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# of each dimension of a learned table; of the tables of numbers that indices look up
SIZE, NUMBERS = 32, (50, 7)

LEAVES = {
    "head": ("b", "h"),
    "key": ("b", "h", "k", "k", "k"),
    "query": ("b", "h", "q", "q", "q"),
    "difference": ("b", "h", "D", "D", "D", "D", "D", "D"),
    "any": ("b", "h", "q", "k", "D"),
}
_PLACES = "bhqk"


class Node(NamedTuple):
    """An operation. kind: int, wide, float or condition. operands: numbers of nodes."""

    operation: str
    kind: str
    operands: tuple[int, ...] = ()
    number: int = 0


@dataclass
class Program:
    """nodes: each uses those before. results: of which nodes the indices are."""

    seed: int
    nodes: list[Node] = field(default_factory=list)

    def add(self, operation: str, kind: str, *operands: int, number: int = 0) -> int:
        self.nodes.append(Node(operation, kind, operands, number))
        return len(self.nodes) - 1

    def value(self, operation: str, *operands: Value | int) -> Value:
        nodes = [
            self.add("constant", "int", number=x) if isinstance(x, int) else x.node
            for x in operands
        ]
        return Value(self, self.add(operation, "int", *nodes))

    def of_kind(self, kind: str, among: Sequence[int]) -> list[int]:
        return [i for i in among if self.nodes[i].kind == kind]

    def evaluate(self, rules: Rules) -> Callable[[int], Any]:
        """The value of a node; each is computed once."""
        known: dict[int, Any] = {}

        def value(i: int) -> Any:
            if i not in known:
                node = self.nodes[i]
                operands = [value(x) for x in node.operands]
                known[i] = rules[node.operation](*operands, node.number)
            return known[i]

        return value


class Draw:
    """Draws a program from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.program = Program(seed)

    def index(self, bias: str, steps: int, alien: float) -> int:
        """The node of an index. bias: one of LEAVES. alien: how likely each leaf is any other."""
        draw, program = self.random, self.program
        pool: list[int] = []
        for _ in range(draw.randint(2, 4)):
            names = LEAVES["any" if draw.random() < alien else bias]
            pool.append(self._leaf(draw.choice(names)))
        for _ in range(steps):
            pool.append(self._step(pool))
        ints = program.of_kind("int", pool)
        return draw.choice(ints[-3:])

    def index_of(self, bias: str, rank: int) -> Index:
        draw = self.random
        if rank > 1 and draw.random() < 0.25:
            return Index(self.program.add(draw.choice(_PLACES), "int"), "plain")
        bias = bias if draw.random() < 0.9 else "any"
        node = self.index(bias, draw.randint(0, 7), draw.choice([0, 0, 0, 0.1]))
        return Index(node, draw.choice(["clamp", "clamp", "negative", "rest", "bits"]))

    # -- leaves ---------------------------------------------------------------------------------

    def _leaf(self, name: str) -> int:
        if name in _PLACES:
            return self.program.add(name, "int")
        return self._difference()

    def _difference(self) -> int:
        draw, program = self.random, self.program
        total = self._term("k")
        parts = [("q", "sub")]
        if draw.random() < 0.3:
            parts += [(draw.choice("qk"), draw.choice(["add", "sub"]))]
        same = draw.random() < 0.5
        for name, operation in parts:
            operand = self._same_term(total, name) if same and name == "q" else self._term(name)
            total = program.add(operation, "int", total, operand)
        return total

    def _term(self, name: str) -> int:
        draw, program = self.random, self.program
        place = program.add(name, "int")
        how = draw.randint(0, 11)
        n = draw.choice([2, 3, 5, 7, 16, 17, 20, 32])
        if how <= 3:
            return place
        if how == 4:
            return program.add("times", "int", place, number=draw.choice([-2, -1, 2, 3]))
        if how == 5:
            return program.add("over", "int", place, number=n)
        if how == 6:
            return program.add("shr", "int", place, number=draw.randint(1, 5))
        if how == 7:
            return program.add("rest", "int", place, number=n)
        if how == 8:
            return program.add("at_most", "int", place, number=n)
        if how == 9:
            block = program.add("over", "int", place, number=n)
            more = program.add("times", "int", block, number=draw.choice([-n, n - 1, 1, 13]))
            return program.add("add", "int", place, more)
        if how == 10:
            block = program.add("over", "int", place, number=n)
            return program.add("over", "int", block, number=draw.choice([2, 3, 4]))
        low = program.add("narrow", "int", place)
        return low

    def _same_term(self, term: int, name: str) -> int:
        """The same function of another place."""
        program = self.program
        copies: dict[int, int] = {}
        for i in self._behind(term):
            node = program.nodes[i]
            operation = name if node.operation in "qk" else node.operation
            operands = (copies[x] for x in node.operands)
            copies[i] = program.add(operation, node.kind, *operands, number=node.number)
        return copies[term]

    def _behind(self, last: int) -> list[int]:
        found, pending = {last}, [last]
        while pending:
            operands = self.program.nodes[pending.pop()].operands
            pending += [x for x in operands if x not in found]
            found.update(operands)
        return sorted(found)

    # -- operations -----------------------------------------------------------------------------

    def _step(self, pool: list[int]) -> int:
        draw, program = self.random, self.program
        ints, floats, conditions, wides = (
            program.of_kind(kind, pool) for kind in ("int", "float", "condition", "wide")
        )
        small = draw.choice([-3, -1, 1, 2, 3, 5, 8])
        size = draw.choice([1, 2, 3, 5, 16, 20, -3])

        def one() -> int:
            return draw.choice(ints[-4:] if draw.random() < 0.7 else ints)

        choices: list[tuple[float, Callable[[], int]]] = [
            (2, lambda: program.add("add", "int", one(), one())),
            (2, lambda: program.add("sub", "int", one(), one())),
            (0.5, lambda: program.add("mul", "int", one(), one())),
            (1.5, lambda: program.add("times", "int", one(), number=small)),
            (1.5, lambda: program.add("plus", "int", one(), number=small)),
            (1, lambda: program.add("over", "int", one(), number=size)),
            (1, lambda: program.add("rest", "int", one(), number=size)),
            (0.4, lambda: program.add("over_one", "int", one(), one())),
            (0.4, lambda: program.add("rest_one", "int", one(), one())),
            (1.5, lambda: program.add("abs", "int", one())),
            (0.7, lambda: program.add("neg", "int", one())),
            (1, lambda: program.add("min", "int", one(), one())),
            (1, lambda: program.add("max", "int", one(), one())),
            (1.5, lambda: program.add("at_most", "int", one(), number=draw.randint(0, 40))),
            (1.5, lambda: program.add("at_least", "int", one(), number=draw.randint(-9, 9))),
            (0.5, lambda: program.add("shl", "int", one(), number=draw.randint(0, 5))),
            (0.5, lambda: program.add("shr", "int", one(), number=draw.randint(0, 5))),
            (0.5, lambda: program.add("and", "int", one(), number=draw.choice([7, 15, -2, 31]))),
            (0.3, lambda: program.add("or", "int", one(), one())),
            (0.3, lambda: program.add("xor", "int", one(), one())),
            (0.3, lambda: program.add("not", "int", one())),
            (0.3, lambda: program.add("huge", "int", one(), number=draw.choice([2**29, 10**8]))),
            (0.5, lambda: program.add("narrow", "int", one())),
            (0.3, lambda: program.add("unsigned_over", "int", one(), number=abs(size))),
            (0.3, lambda: program.add("unsigned_rest", "int", one(), number=abs(size))),
            (1.2, lambda: program.add("look_up", "int", one())),
            (0.5, lambda: program.add("look_up_2", "int", one(), one())),
            (0.4, lambda: program.add("extent", "int", number=draw.randint(0, 1))),
            (0.4, lambda: program.add("widen", "wide", one())),
            (0.8, lambda: program.add("float", "float", one())),
            (0.15, lambda: program.add("score", "float")),
            (2, lambda: program.add(draw.choice(_COMPARISONS), "condition", one(), one())),
            (1, lambda: program.add("more_than", "condition", one(), number=small)),
            (0.5, lambda: program.add("below", "condition", one(), one())),
        ]  # fmt: skip
        if conditions:
            choices += [
                (3, lambda: program.add("where", "int", draw.choice(conditions), one(), one())),
                (2, lambda: program.add("branch", "int", draw.choice(conditions), one(), one())),
                (0.7, lambda: program.add("bit", "int", draw.choice(conditions))),
                (0.7, lambda: program.add(draw.choice(["both", "either"]), "condition",
                                          draw.choice(conditions), draw.choice(conditions))),
                (0.4, lambda: program.add("no", "condition", draw.choice(conditions))),
            ]  # fmt: skip
        if floats:
            choices += [
                (1, lambda: program.add("log", "float", draw.choice(floats))),
                (0.5, lambda: program.add("root", "float", draw.choice(floats))),
                (0.5, lambda: program.add("half", "float", draw.choice(floats), number=small)),
                (0.5, lambda: program.add("float_sum", "float", draw.choice(floats),
                                          draw.choice(floats))),
                (2, lambda: program.add("whole", "int", draw.choice(floats))),
                (0.5, lambda: program.add("float_less", "condition", draw.choice(floats),
                                          draw.choice(floats))),
            ]  # fmt: skip
        if wides:
            choices += [
                (1, lambda: program.add("wide_plus", "wide", draw.choice(wides), number=small)),
                (0.5, lambda: program.add("wide_sub", "wide", draw.choice(wides),
                                          draw.choice(wides))),
                (0.5, lambda: program.add("wide_huge", "wide", draw.choice(wides),
                                          number=10**7 + 3)),
                (2, lambda: program.add("low_bits", "int", draw.choice(wides))),
                (0.5, lambda: program.add("wide_less", "condition", draw.choice(wides),
                                          draw.choice(wides))),
            ]  # fmt: skip
        weights = [weight for weight, _ in choices]
        return draw.choices([make for _, make in choices], weights)[0]()


_COMPARISONS = ("less", "at_most_as", "equal", "unequal")


# -- mods ---------------------------------------------------------------------------------------


class Index(NamedTuple):
    """The node, and how it is brought inside: plain, clamp, rest, bits; negative: from the end."""

    node: int
    inside: str


class TableRead(NamedTuple):
    table: int
    indices: tuple[Index, ...]


class RandomMod(NamedTuple):
    """A score_mod that reads learned tables. ranks: of these. form: how elements and score become
    the modified score; condition: the node of a number that may matter for it."""

    program: Program
    ranks: tuple[int, ...]
    reads: tuple[TableRead, ...]
    form: int
    condition: int

    @staticmethod
    def draw(seed: int) -> RandomMod:
        draw = Draw(seed)
        chance, program = draw.random, draw.program
        ranks = tuple(chance.choice([1, 1, 2, 2, 3]) for _ in range(chance.randint(1, 3)))
        reads = []
        for table, rank in enumerate(ranks):
            bias = chance.choice(["head", "key", "query", *["difference"] * 3, "any"])
            for _ in range(chance.choice([1, 1, 1, 2])):
                indices = tuple(draw.index_of(bias, rank) for _ in range(rank))
                reads.append(TableRead(table, indices))
        return RandomMod(
            program, ranks, tuple(reads), chance.randint(0, 10), draw.index("any", 2, 0)
        )

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Learned tables, and numbers."""
        generator = torch.Generator().manual_seed(self.program.seed)
        tables = [torch.randn((2 * SIZE,) * rank, generator=generator) for rank in self.ranks]
        numbers = [torch.randint(*span, shape, generator=generator, dtype=torch.int32)
                   for span, shape in (((0, 60), NUMBERS[:1]), ((-5, 30), NUMBERS))]  # fmt: skip
        return tables, numbers

    def cute(self, branch: Callable[..., Any]) -> Callable[..., Any]:
        """The CuTe mod of tables and numbers. branch(condition, x, y): by control flow."""

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
            place, numbers = (b[0], h[0], q[0], k[0]), aux[len(self.ranks) :]
            rules = dsl_rules(score[0], place, numbers, branch)
            return self._modified(rules, aux, score[0], *place[2:])

        return score_mod

    def torch(self, tables: Sequence[Tensor], numbers: Sequence[Tensor]) -> Callable[..., Tensor]:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            rules = torch_rules(score, (b, h, q, k), numbers)
            found: Tensor = self._modified(rules, tables, score, q, k)
            return found

        return score_mod

    @property
    def has_floats(self) -> bool:
        """Whether indices may be rounded functions, which languages round differently."""
        return any(node.kind == "float" for node in self.program.nodes)

    def _modified(self, rules: Rules, tables: Any, score: Any, q: Any, k: Any) -> Any:
        value = self.program.evaluate(rules)
        first, *rest = (
            rules["element"](
                tables[x.table], tuple(rules[i.inside](value(i.node)) for i in x.indices)
            )
            for x in self.reads
        )
        number = rules["float"](value(self.condition), 0)
        where, distance = rules["choose"], rules["float"](abs(q - k), 0)
        forms: list[Callable[[], Any]] = [
            lambda: score + first,
            lambda: first + score,
            lambda: score - first * 0.5,
            lambda: score + first * distance,
            lambda: score * (first + 1.0),
            lambda: rules["tanh"](score + first),
            lambda: where(number > 3.0, score + first, score),
            lambda: where(number > 3.0, score + first, score * 2.0),
            lambda: where(score > first, score, first),
            lambda: score + first * rules["exp2"](where(number > 5.0, number * 0.0, number)),
            lambda: score - (first * -2.0) * -0.25,
        ]  # fmt: skip
        found = forms[self.form]()
        if self.form % 3 == 2:
            more = first
            for element in rest:
                more = more * element
            return found + more
        if self.form % 3 == 1:
            more = first
            for element in rest:
                more = more + element
            return score + more
        for element in rest:
            found = found + element
        return found


# Evaluates an operation: rules[operation](*operands, number).
Rules = dict[str, Callable[..., Any]]
_OF_BOTH: Rules = {
    "add": lambda x, y, n: x + y,
    "sub": lambda x, y, n: x - y,
    "mul": lambda x, y, n: x * y,
    "times": lambda x, n: x * n,
    "plus": lambda x, n: x + n,
    "huge": lambda x, n: x * n,
    "over": lambda x, n: x // n,
    "rest": lambda x, n=SIZE: x % n,
    "abs": lambda x, n: abs(x),
    "neg": lambda x, n: -x,
    "shl": lambda x, n: x << n,
    "shr": lambda x, n: x >> n,
    "and": lambda x, n: x & n,
    "or": lambda x, y, n: x | y,
    "xor": lambda x, y, n: x ^ y,
    "not": lambda x, n: ~x,
    "wide_plus": lambda x, n: x + n,
    "wide_sub": lambda x, y, n: x - y,
    "wide_huge": lambda x, n: x * n,
    "less": lambda x, y, n: x < y,
    "at_most_as": lambda x, y, n: x <= y,
    "equal": lambda x, y, n: x == y,
    "unequal": lambda x, y, n: x != y,
    "more_than": lambda x, n: x > n,
    "both": lambda x, y, n: x & y,
    "either": lambda x, y, n: x | y,
    "float_less": lambda x, y, n: x < y,
    "wide_less": lambda x, y, n: x < y,
    "half": lambda x, n: x * 0.5 + float(n),
    "float_sum": lambda x, y, n: x + y,
    "constant": lambda n: n,
    "quotient": lambda x, y, n: x // y,
    "remainder": lambda x, y, n: x % y,
    "greater": lambda x, y, n: x > y,
    "plain": lambda x: x,
    "bits": lambda x: x & (SIZE - 1),
}


def dsl_rules(score: Any, place: Sequence[Any], numbers: Any, branch: Callable[..., Any]) -> Rules:
    """On scalars of the DSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Boolean, Float32, Int8, Int32, Int64, Uint32

    def clamp(x: Any, size: int) -> Any:
        return cutlass.max(cutlass.min(x, size - 1), 0)

    def scalar(x: Any) -> Any:
        return x if isinstance(x, cutlass.Numeric) else Int32(x)

    def divisor(x: Any) -> Any:
        return cutlass.max(x & 15, 1)

    return _OF_BOTH | {
        **{name: (lambda n, x=x: x) for name, x in zip(_PLACES, place, strict=True)},
        "below": lambda x, y, n: Uint32(x) < Uint32(y),
        "no": lambda x, n: x == Boolean(False),
        "score": lambda n: cute.math.floor(score * 4.0),
        "float": lambda x, n: Float32(x),
        "log": lambda x, n: cute.math.log2(cutlass.max(abs(x), Float32(0.5))),
        "root": lambda x, n: cute.math.sqrt(abs(x)),
        "whole": lambda x, n: Int32(cutlass.max(cutlass.min(x, Float32(1e6)), Float32(-1e6))),
        "over_one": lambda x, y, n: x // divisor(y),
        "rest_one": lambda x, y, n: x % divisor(y),
        "min": lambda x, y, n: cutlass.min(scalar(x), scalar(y)),
        "max": lambda x, y, n: cutlass.max(scalar(x), scalar(y)),
        "at_most": lambda x, n: cutlass.min(x, n),
        "at_least": lambda x, n: cutlass.max(x, n),
        "narrow": lambda x, n: Int32(Int8(x)),
        "unsigned_over": lambda x, n: Int32(Uint32(x) // n),
        "unsigned_rest": lambda x, n: Int32(Uint32(x) % n),
        "number": lambda x, n: numbers[0][x],
        "exponent": lambda x, n: Int32(cute.math.log2(Float32(Int32(x)))),
        "look_up": lambda x, n: numbers[0][clamp(x, NUMBERS[0])],
        "look_up_2": lambda x, y, n: numbers[1][clamp(x, NUMBERS[0]), clamp(y, NUMBERS[1])],
        "extent": lambda n: Int32(cute.size(numbers[1], mode=[n])),
        "widen": lambda x, n: Int64(x),
        "low_bits": lambda x, n: Int32(x),
        # of equal numbers it is one without a dtype
        "where": lambda c, x, y, n: Int32(cutlass.select_(c, scalar(x), scalar(y))),
        "branch": lambda c, x, y, n: branch(c, x, y),
        "bit": lambda c, n: Int32(c),
        "clamp": lambda x: clamp(x, 2 * SIZE),
        "negative": lambda x: clamp(x, 2 * SIZE),
        "rest": lambda x, n=None: x % n if n is not None else (x % SIZE + SIZE) % SIZE,
        "element": lambda table, i: Float32(table[i]),
        "choose": lambda c, x, y: Float32(cutlass.select_(c, x, y)),
        "tanh": cute.math.tanh,
        "exp2": cute.math.exp2,
    }


def torch_rules(score: Tensor, place: Sequence[Tensor], numbers: Sequence[Tensor]) -> Rules:
    """On int32 tensors of torch, whose quotients are rounded down."""

    def unsigned(x: Tensor) -> Tensor:
        return x.long() & 0xFFFFFFFF

    def divisor(x: Tensor) -> Tensor:
        return (x & 15).clamp(min=1)

    def pair(x: Any, y: Any) -> list[Tensor]:
        dtype = (x if isinstance(x, Tensor) else y).dtype
        return [z if isinstance(z, Tensor) else torch.full((), z, dtype=dtype) for z in (x, y)]

    rows, cols = (n - 1 for n in NUMBERS)
    return _OF_BOTH | {
        **{name: (lambda n, x=x: x) for name, x in zip(_PLACES, place, strict=True)},
        "below": lambda x, y, n: unsigned(x) < unsigned(y),
        "no": lambda x, n: ~x,
        "score": lambda n: (score * 4.0).floor(),
        "float": lambda x, n: x.float(),
        "log": lambda x, n: x.abs().clamp(min=0.5).log2(),
        "root": lambda x, n: x.abs().sqrt(),
        "whole": lambda x, n: x.clamp(-1e6, 1e6).int(),
        "over_one": lambda x, y, n: x // divisor(y),
        "rest_one": lambda x, y, n: x % divisor(y),
        "min": lambda x, y, n: torch.minimum(*pair(x, y)),
        "max": lambda x, y, n: torch.maximum(*pair(x, y)),
        "at_most": lambda x, n: x.clamp(max=n),
        "at_least": lambda x, n: x.clamp(min=n),
        "narrow": lambda x, n: x.to(torch.int8).int(),
        "unsigned_over": lambda x, n: (unsigned(x) // n).int(),
        "unsigned_rest": lambda x, n: (unsigned(x) % n).int(),
        "number": lambda x, n: numbers[0][x],
        "exponent": lambda x, n: torch.log2(x.to(torch.float32)).to(x.dtype),
        "look_up": lambda x, n: numbers[0][x.clamp(0, rows)],
        "look_up_2": lambda x, y, n: numbers[1][x.clamp(0, rows), y.clamp(0, cols)],
        "extent": lambda n: torch.full_like(place[3], NUMBERS[n]),
        "widen": lambda x, n: x.long(),
        "low_bits": lambda x, n: x.int(),
        "where": lambda c, x, y, n: torch.where(c, *pair(x, y)),
        "branch": lambda c, x, y, n: torch.where(c, x, y),
        "bit": lambda c, n: c.int(),
        "clamp": lambda x: x.clamp(0, 2 * SIZE - 1),
        "negative": lambda x: x.clamp(-2 * SIZE, 2 * SIZE - 1),
        "element": lambda table, i: table[i],
        "choose": torch.where,
        "tanh": torch.tanh,
        "exp2": torch.exp2,
    }


# -- reads of one table whose class is known ----------------------------------------------------

# of the learned table, of the table of numbers, and of the scores on which indices are compared
# (batch, heads, queries, keys)
READ_SIZE, READ_NUMBERS, READ_EXTENTS = 48, 64, (2, 3, 13, 14)


def _operator(operation: str) -> Any:
    return lambda self, *others: self.program.value(operation, self, *others)


class Value(NamedTuple):
    """A node of a program, in the notation of arithmetic."""

    program: Program
    node: int
    __add__, __sub__, __mul__ = map(_operator, ("add", "sub", "mul"))  # type: ignore[assignment]
    __floordiv__, __mod__, __abs__ = map(_operator, ("quotient", "remainder", "abs"))
    above, least, most = map(_operator, ("greater", "min", "max"))
    # of a condition; of indices
    where, number, exponent = map(_operator, ("where", "number", "exponent"))


class RandomRead(NamedTuple):
    """name: of the class that is expected. index: of the element that is added to the score."""

    name: str
    index: Value

    def inside(self, rules: Rules) -> Any:
        """The index, which exists."""
        return self.index.program.evaluate(rules)(self.index.node)

    def cute(self, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        """The CuTe mod; aux: the learned table, and numbers."""
        return score + aux[0][self.inside(dsl_rules(None, (b[0], h[0], q[0], k[0]), aux[1:], None))]

    def torch(self, table: Tensor, numbers: Tensor) -> Callable[..., Tensor]:
        """The same mod in torch."""
        return lambda score, b, h, q, k: (
            score + table[self.inside(torch_rules(score, (b, h, q, k), [numbers]))]
        )

    def dense(self, numbers: Tensor, extents: tuple[int, int, int, int] = READ_EXTENTS) -> Tensor:
        """The index of each score, (batch, heads, queries, keys)."""
        place = torch.meshgrid(*map(torch.arange, extents), indexing="ij")
        found = self.inside(torch_rules(numbers, place, [numbers.long()]))
        return torch.as_tensor(found).expand(extents)


class ReadDraw:
    """Draws a read of one of the classes, or one that is nearly of it, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.program = random.Random(seed), Program(seed)

    def read(self) -> RandomRead:
        name, draw = self.random.choice(
            (
                ("head", lambda: self._single("h", self._fixed("h"))),
                ("key", lambda: self._single("k", self._looked_up("k"))),
                ("query", lambda: self._single("q", self._looked_up("q"))),
                ("difference", lambda: self._function(self._minus("k", "q"))),
                ("other", self._unknown_range),
                ("other", self._near_miss),
            )
        )
        index = draw()
        return RandomRead(name, index.least(READ_SIZE - 1).most(0))

    def _unknown_range(self) -> Value:
        """Positions by a table."""
        a, b = self._looked_up("k"), self._looked_up("q")
        return self._function(a - b)

    def _near_miss(self) -> Value:
        difference, curved = self._minus("k", "q"), self._function(self._minus("k", "q"))
        a, b = self._monotonous("k"), self._monotonous("q")
        n = self.random.randint(1, 3)
        return self._one_of(
            difference + a * b, abs(difference) + a * n, difference // 3 - b, a.least(b) + n,
            (a * 2).above(b).where(a + 1, 0), a * (b + 1), (a - b).most(0).number() + a,
            curved * a + self._place("q"),
        )  # fmt: skip

    # -- parts

    def _one_of(self, *values: Value) -> Value:
        return self.random.choice(values)

    def _place(self, name: str) -> Value:
        return self.program.value(name)

    def _fixed(self, name: str) -> Value:
        place, other = self._place(name), self._place(self.random.choice("bh"))
        n = self.random.randint(1, 3)
        return self._one_of(place + n, (place * n).number(), place * other)

    def _monotonous(self, name: str) -> Value:
        """A term whose range follows from lengths."""
        place, n = self._place(name), self.random.randint(1, 5)
        return self._one_of(
            place, place // n, place // (n + 15), place * n, place.least(3 + n), (place - n).most(0)
        )

    def _bounded(self, name: str) -> Value:
        """Any term whose range follows from lengths."""
        term, n = self._monotonous(name), self.random.randint(2, 5)
        return self._one_of(
            term, term % n, abs(term - n), term // n * n + term % n,
            term.above(n).where(term, n), term.least(5) * term.least(5),
        )  # fmt: skip

    def _looked_up(self, name: str) -> Value:
        return self._monotonous(name).least(READ_NUMBERS - 1).number()

    def _single(self, name: str, special: Value) -> Value:
        """A function of one place, and of batch entry and head."""
        bounded = self._bounded(name)
        fixed, n = self._fixed("h"), self.random.randint(1, 3)
        return self._one_of(
            special, bounded, bounded + fixed, special * n + bounded,
            (bounded + 1 + bounded).exponent(), special.above(4).where(bounded, n),
        )  # fmt: skip

    def _minus(self, name: str, other: str) -> Value:
        a, b = self._bounded(name), self._bounded(other)
        more, n = self._bounded(name), self.random.randint(1, 5)
        places = self._place(name) - self._place(other)
        return self._one_of(a - b, b - a, a * n - b + 7, a + b, a + more * n - b, *(places,) * 3)

    def _function(self, x: Value) -> Value:
        """Of a difference."""
        fixed, n = self._fixed("h"), self.random.randint(1, 4)
        return self._one_of(
            x + n, abs(x), x.most(-n).least(n) + n, x // n + abs(x - 1), x * n + fixed,
            (abs(x) + n).exponent() + fixed, x.above(0).where(x, n), abs(x) % (n + 1),
            abs(x).least(READ_NUMBERS - 1).number(), fixed.above(n).where(x + 3, n),
        )  # fmt: skip
