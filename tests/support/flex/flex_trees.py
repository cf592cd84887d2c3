"""Random programs in PyTorch, each a FlexAttention mod, drawn from a seed.

A program is text, so that what failed can be read and run. Its numbers are exact: whole numbers of
any dtype, which wrap, and floats that are multiples of a small step, so that comparisons and
rounding downwards come out alike wherever they are computed. Functions that round (`_ROUNDED`) come
last, and nothing is compared with what they give. Nothing here uses the package.
"""

from __future__ import annotations

import linecache
import random
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flex_catalogue import Extents, Mod
from torch import Tensor

# heads tell trees from each other where several are one mod
TREES_IN_MOD = 20
EXTENTS = Extents(2, TREES_IN_MOD, 11, 13)
LONGEST = 16
VECTOR = 4

_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_WIDE = (torch.int32, torch.int64)
_MOST_STEPS = 1 << 22  # of a float's magnitude: float32 has 24 bits


class Captured(NamedTuple):
    """A tensor that programs read. extents: of its dimensions; reads: texts of indices to fill."""

    tensor: Tensor
    reads: tuple[str, ...]
    kind: str = "integer"


def captured_tensors(seed: int) -> dict[str, Captured]:
    """By the names that they have in programs; contents differ by seed, shapes do not."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, size, generator=generator).to(dtype)

    def quarters(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return ints(-16, 17, *size, dtype=dtype) / 4

    batch, heads, seqlen_q, seqlen_k = EXTENTS
    of_place = "[b, {}]", "[b][{}]"
    int32, int64 = torch.int32, torch.int64
    return {
        "ids": Captured(ints(0, 5, batch, LONGEST, dtype=int32), of_place),
        "long": Captured(ints(-(2**40), 2**40, LONGEST, dtype=int64), ("[{}]",)),
        "byte": Captured(ints(0, 256, batch, LONGEST, dtype=torch.uint8), of_place),
        "small": Captured(ints(-128, 128, LONGEST, dtype=torch.int8), ("[{}]",)),
        "short": Captured(ints(-30000, 30000, heads, LONGEST, dtype=torch.int16), ("[h, {}]",)),
        "flags": Captured(ints(0, 2, batch, LONGEST, dtype=torch.bool), of_place, "boolean"),
        "turned": Captured(
            ints(-99, 99, LONGEST, heads, batch, dtype=int32).permute(2, 1, 0),
            ("[b, h, {}]", "[b][h][{}]", "[b, h][{}]", "[b][h, {}]"),
        ),
        "every_third": Captured(ints(-9, 9, 3 * LONGEST + 1, dtype=int64)[1::3], ("[{}]",)),
        "widened": Captured(ints(-9, 9, 1, LONGEST, dtype=int32).expand(batch, -1), of_place),
        # not alone: `vmap` gives a `where` of a lone number the dtype of the other choice
        "number": Captured(torch.tensor(-7, dtype=int32), (" - k", " * q", " // (q + 2)")),
        "square": Captured(ints(-50, 50, LONGEST, LONGEST, dtype=int32), ("[{}, {}]", "[{}][{}]")),
        "full": Captured(
            quarters(batch, heads, seqlen_q, seqlen_k),
            ("[b, h, q, k]", "[b][h][q][k]", "[b, h][q, k]"),
            "float",
        ),
        "bias": Captured(quarters(heads, LONGEST), ("[h, {}]", "[h][{}]"), "float"),
        "brief": Captured(quarters(LONGEST, dtype=torch.bfloat16), ("[{}]",), "float"),
        "half": Captured(quarters(batch, LONGEST, dtype=torch.float16), of_place, "float"),
        "vector": Captured(
            ints(-6, 7, batch, LONGEST, VECTOR, dtype=int32), of_place, "integer vector"
        ),
        "row": Captured(quarters(heads, LONGEST, VECTOR), ("[h, {}]", "[h][{}]"), "vector"),
        "column": Captured(quarters(LONGEST, VECTOR), ("[{}]",), "vector"),
        "factor": Captured(torch.tensor(0.5), ("",), "float"),
    }


class Exact(NamedTuple):
    """A float32 of a program: a multiple of step, of at most magnitude."""

    name: str
    magnitude: float
    step: float


class Program(NamedTuple):
    """Statements, and the expression of a float32 that says all of the last value."""

    lines: tuple[str, ...]
    result: str
    is_rounded: bool

    @property
    def text(self) -> str:
        return "\n".join((*self.lines, f"return {self.result}"))


# {} is an Exact; what they give is compared by a tolerance.
_ROUNDED = (
    *("torch.exp({} / -16)", "torch.exp2({} / 16)", "torch.log({}.abs() + 1)"),
    *("torch.log2({}.abs() + 1)", "torch.log1p({}.abs())", "torch.sqrt({}.abs() + 0.5)"),
    *("torch.rsqrt({}.abs() + 1.5)", "torch.tanh({} / 8)", "torch.sigmoid({} / 4)"),
    *("torch.sin({} / 8)", "torch.cos({} / 8)", "torch.erf({} / 8)"),
    *("torch.nn.functional.gelu({} / 8)", "torch.nn.functional.silu({} / 4)"),
    *("torch.nn.functional.softplus({} / 4)", "torch.relu({}) / 3", "1 / ({}.abs() + 3)"),
    *("torch.reciprocal({}.abs() + 0.75)", "({}.abs() + 1) ** 0.5", "({}.abs() + 1) ** -2"),
    *("torch.pow(2.0, {} / 32)", "{} * 0.3 - 0.7", "torch.where({0} > 1, {0} / 7, {0} * 0.1)"),
    *("torch.expm1({} / -32)", "torch.atan({} / 4)"),
    *("torch.nn.functional.gelu({} / 8, approximate='tanh')", "torch.nn.functional.elu({} / 8)"),
    *("torch.nn.functional.leaky_relu({}, 0.1)", "torch.nn.functional.hardswish({} / 4)"),
    *("torch.nn.functional.logsigmoid({} / 8)", "torch.nn.functional.mish({} / 4)"),
    *("torch.lerp({0}, score, 0.3)", "torch.logaddexp({} / 8, score)"),
    *("torch.addcmul({0}, score, score, value=0.7)", "torch.sinh({} / 64)"),
    "torch.log10({}.abs() + 2)",
)


class _Writer:
    """Draws one program, and runs each line on numbers to learn the dtype that torch gives it."""

    def __init__(self, rng: random.Random, captured: dict[str, Captured], number: int) -> None:
        self.rng = rng
        self.captured = captured
        self.lines: list[str] = []
        self.env: dict[str, Any] = {"torch": torch, "score": torch.tensor(0.25)}
        self.env |= {name: x.tensor for name, x in captured.items()}
        self.env |= {name: torch.tensor(at, dtype=torch.int32) for name, at in zip(
            "bhqk", (1, number, 5, 7), strict=True
        )}  # fmt: skip
        self.kept: dict[str, list[Any]] = {"integer": [], "boolean": [], "exact": []}

    def keep(self, kind: str, expression: str, **facts: float) -> Any:
        """A name for an expression, and what is known of its value."""
        name = f"v{len(self.lines)}"
        line = f"{name} = {expression}"
        exec(line, self.env)
        self.lines.append(line)
        value = Exact(name, **facts) if facts else name
        self.kept[kind].append(value)
        return value

    def dtype(self, name: str) -> torch.dtype:
        return self.env[name].dtype

    def again(self, kind: str) -> Any:
        """A value that the program has already, now and then."""
        found = self.kept[kind]
        return self.rng.choice(found) if found and self.rng.random() < 0.2 else None

    def integer(self, depth: int) -> str:
        """A whole number of any dtype but bool."""
        if (kept := self.again("integer")) is not None:
            return kept
        if depth == 0:
            return self.rng.choice((self.place, self.place, self.loaded_integer))()
        kinds = (self.arithmetic, self.with_constant, self.divided, self.shifted, self.bits,
                 self.chosen, self.converted, self.loaded_integer, self.counted)  # fmt: skip
        return self.rng.choice(kinds)(depth - 1)

    def place(self) -> str:
        text = self.rng.choice(("b", "h", "q", "k", "q", "k", "q - k"))
        return text if len(text) == 1 else self.keep("integer", text)

    def arithmetic(self, depth: int) -> str:
        x, y = self.integer(depth), self.integer(depth)
        text = self.rng.choice(
            ("{} + {}", "{} - {}", "{} * {}", "torch.minimum({}, {})", "torch.maximum({}, {})")
        )
        return self.keep("integer", text.format(x, y))

    def constant(self, name: str, least: int = 1) -> int:
        """A number that the dtype of a value can hold, not 0."""
        dtype = self.dtype(name)
        large = {torch.uint8: 200, torch.int8: 100, torch.int16: 9999}.get(dtype, 70000)
        number = self.rng.choice((self.rng.randint(least, 9), self.rng.randint(least, 9), large))
        return number if dtype == torch.uint8 or self.rng.random() < 0.6 else -number

    def with_constant(self, depth: int) -> str:
        x = self.integer(depth)
        texts = (
            *("{x} + {c}", "{x} * {c}", "{c} - {x}", "{x}.clamp(max={c})", "{x}.clamp(min={c})"),
            *("-{x}", "{x}.abs()", "{x} ** 2", "{x} ** 3", "{x} + torch.full_like({x}, 2)"),
            *("torch.sign({x})", "torch.square({x})"),
        )
        return self.keep("integer", self.rng.choice(texts).format(x=x, c=self.constant(x)))

    def divided(self, depth: int) -> str:
        """Rounded downwards or to 0, with remainders of either sign."""
        x = self.integer(depth)
        by = str(self.constant(x, 2))
        if self.rng.random() < 0.3:
            by = self.keep("integer", f"({self.integer(depth)} & 7) + 1")
            if self.rng.random() < 0.5 and self.dtype(by) != torch.uint8:
                by = self.keep("integer", f"-{by}")
        texts = ("{} // {}", "{} % {}", "torch.div({}, {}, rounding_mode='floor')",
                 "torch.div({}, {}, rounding_mode='trunc')", "torch.remainder({}, {})",
                 "torch.fmod({}, {})", "torch.floor_divide({}, {})")  # fmt: skip
        return self.keep("integer", self.rng.choice(texts).format(x, by))

    def narrow(self, depth: int) -> str:
        """For a comparison with a vector of int32, whose other side becomes int32."""
        x = self.integer(depth)
        return self.keep("integer", f"{x}.int()") if self.dtype(x) == torch.int64 else x

    def shifted(self, depth: int) -> str:
        """Of 32 or 64 bits: others are refused."""
        x = self.integer(depth)
        if self.dtype(x) not in _WIDE:
            x = self.keep("integer", f"{x}.int()")
        by = str(self.rng.randint(0, 6))
        if self.rng.random() < 0.4:
            by = self.keep("integer", f"({self.integer(depth)} & 3)")
        return self.keep("integer", f"{x} {self.rng.choice(('<<', '>>'))} {by}")

    def bits(self, depth: int) -> str:
        x, y = self.integer(depth), self.integer(depth)
        texts = ("{} & {}", "{} | {}", "{} ^ {}", "{} & 31", "~{}", "torch.bitwise_and({}, {})")
        return self.keep("integer", self.rng.choice(texts).format(x, y))

    def chosen(self, depth: int) -> str:
        condition, x, y = self.boolean(depth), self.integer(depth), self.integer(depth)
        texts = "torch.where({c}, {x}, {y})", "torch.where({c}, {x}, 3)"
        return self.keep("integer", self.rng.choice(texts).format(c=condition, x=x, y=y))

    def converted(self, depth: int) -> str:
        """To another dtype, which may wrap; from a bool, or from a float, which is cut off."""
        if self.rng.random() < 0.3:
            x: Any = self.exact(depth)
            return self.keep("integer", f"{x.name}.to(torch.{self.rng.choice(('int32', 'int64'))})")
        if self.rng.random() < 0.3:
            return self.keep("integer", f"{self.boolean(depth)}.int()")
        dtypes = "int8", "uint8", "int16", "int32", "int64"
        return self.keep("integer", f"{self.integer(depth)}.to(torch.{self.rng.choice(dtypes)})")

    def counted(self, depth: int) -> str:
        """A bool taken for a number."""
        text = self.rng.choice(("{} + {}", "{} * {}", "{} - {}.int()"))
        return self.keep("integer", text.format(self.integer(depth), self.boolean(depth)))

    def index(self, depth: int) -> str:
        """Inside LONGEST elements, from the front or, negative, from the end."""
        if depth == 0 or self.rng.random() < 0.4:
            return self.rng.choice(("q", "k", "q", "k", "k - q", "q - k", "-k - 1"))
        x = self.integer(depth - 1)
        if self.dtype(x) not in _WIDE:
            x = self.keep("integer", f"{x}.to(torch.{self.rng.choice(('int32', 'int64'))})")
        return self.rng.choice(
            (f"{x} % {LONGEST}", f"{x} % {2 * LONGEST} - {LONGEST}", f"{x}.clamp(-4, 9)")
        )

    def read(self, name: str, depth: int) -> str:
        text = self.rng.choice(self.captured[name].reads)
        return name + text.format(*(self.index(depth) for _ in range(text.count("{}"))))

    def named(self, kind: str) -> list[str]:
        return [name for name, x in self.captured.items() if x.kind == kind]

    def loaded_integer(self, depth: int = 0) -> str:
        if depth and self.rng.random() < 0.2:
            text = self.rng.choice(("sum()", "amax()", "amin(-1)", "prod()", "max()", "sum(-1)"))
            return self.keep("integer", f"{self.read('vector', depth)}.{text}")
        return self.keep("integer", self.read(self.rng.choice(self.named("integer")), depth))

    def boolean(self, depth: int) -> str:
        if (kept := self.again("boolean")) is not None:
            return kept
        choice = self.rng.random()
        if depth == 0 or choice < 0.35:
            x = self.integer(max(depth - 1, 0))
            text = "{} " + self.rng.choice(("<", "<=", ">", ">=", "==", "!=")) + " {}"
            y = self.integer(max(depth - 1, 0)) if self.rng.random() < 0.6 else self.constant(x)
            return self.keep("boolean", text.format(x, y))
        if choice < 0.45:
            if self.rng.random() < 0.5:
                return self.keep("boolean", self.read("flags", depth - 1))
            text = self.rng.choice(
                ("({} == {}).any()", "({} < {}).all()", "({} > {}.unsqueeze(-1)).any(-1)")
            )
            return self.keep(
                "boolean", text.format(self.read("vector", depth), self.narrow(depth - 1))
            )
        if choice < 0.65:
            x, y = self.exact(depth - 1).name, self.exact(depth - 1).name
            text = self.rng.choice(("{} < {}", "{} >= {}", "{} == {}", "{} > 0.75", "0.5 != {}"))
            return self.keep("boolean", text.format(x, y))
        if choice < 0.72:
            return self.keep("boolean", f"{self.integer(depth - 1)}.to(torch.bool)")
        x, y = self.boolean(depth - 1), self.boolean(depth - 1)
        text = self.rng.choice(
            ("{} & {}", "{} | {}", "{} ^ {}", "~{}", "torch.logical_and({}, {})",
             "torch.logical_xor({}, {})", "{} & True", "{} | torch.ones_like({})",
             "torch.logical_or({}, {})", "torch.logical_not({})", "{} == {}", "{} + {}", "{} * {}",
             "torch.where({0}, {1}, ~{0})")
        )  # fmt: skip
        return self.keep("boolean", text.format(x, y))

    def exact(self, depth: int) -> Exact:
        if (kept := self.again("exact")) is not None:
            return kept
        if depth == 0:
            return self.rng.choice((self.score, self.loaded_float, self.from_integer))(0)
        kinds = (self.float_arithmetic, self.float_arithmetic, self.stepped, self.float_divided,
                 self.float_chosen, self.from_integer, self.loaded_float)  # fmt: skip
        return self.rng.choice(kinds)(depth - 1)

    def score(self, depth: int) -> Exact:
        return Exact("score", 8, 0.25)

    def loaded_float(self, depth: int) -> Exact:
        if depth and self.rng.random() < 0.25:
            return self.of_vectors(depth)
        name = self.rng.choice(self.named("float"))
        text = self.read(name, depth)
        if self.rng.random() < 0.5:
            return self.keep("exact", f"{text}.float()", magnitude=4, step=0.25)
        return self.keep("exact", f"score - {text}", magnitude=12, step=0.25)

    def of_vectors(self, depth: int) -> Exact:
        text = self.rng.choice(
            ("{}.sum()", "{}.amax()", "{}.min()", "{}.mean()", "torch.dot({}, {})",
             "({} * {}).sum(-1)", "{}.abs().sum()", "torch.maximum({}, {}).sum()",
             "torch.stack((score, {}.sum(), score)).amax()", "({} * score).sum()")
        )  # fmt: skip
        rows = (self.read(name, depth) for name in ("row", "column"))
        return self.keep("exact", text.format(*rows), magnitude=128, step=1 / 16)

    def from_integer(self, depth: int) -> Exact:
        x = self.integer(depth)
        text = self.rng.choice(("({} % 61).float()", "({} % 61) / 2", "({} % 61) * 0.5"))
        return self.keep("exact", text.format(x), magnitude=61, step=0.5)

    def float_arithmetic(self, depth: int) -> Exact:
        x, y = self.exact(depth), self.exact(depth)
        magnitude, step = x.magnitude + y.magnitude, min(x.step, y.step)
        texts = ("{} + {}", "{} - {}", "torch.minimum({}, {})", "torch.maximum({}, {})", "{} * {}",
                 "torch.square({})")  # fmt: skip
        text = self.rng.choice(texts)
        if "square" in text:
            magnitude, step = x.magnitude**2, x.step**2
        elif "*" in text:
            magnitude, step = x.magnitude * y.magnitude, x.step * y.step
        if magnitude / step > _MOST_STEPS:
            text, magnitude = "torch.maximum({}, {})", max(x.magnitude, y.magnitude)
            step = min(x.step, y.step)
        return self.keep("exact", text.format(x.name, y.name), magnitude=magnitude, step=step)

    def stepped(self, depth: int) -> Exact:
        """Rounded, cut off, or of another sign."""
        x = self.exact(depth)
        text = self.rng.choice(
            ("torch.floor({})", "torch.ceil({})", "torch.round({})", "torch.trunc({})", "{}.abs()",
             "-{}", "torch.relu({})", "{}.clamp(-2.5, 3.25)", "{}.clamp(min=-1)",
             "torch.clamp({}, max=1.5)", "torch.sign({})", "torch.nn.functional.hardtanh({})",
             "{} * torch.ones_like(score)", "{} + torch.tensor(0.5)", "torch.frac({})",
             "{}.nan_to_num()", "{} ** 1")
        )  # fmt: skip
        step = min(x.step, 0.25)
        return self.keep("exact", text.format(x.name), magnitude=x.magnitude + 4, step=step)

    def float_divided(self, depth: int) -> Exact:
        x = self.exact(depth)
        by = self.rng.choice((2.5, -1.5, 3, -0.75))
        texts = "{} % {}", "{} // {}", "torch.remainder({}, {})", "torch.fmod({}, {})"
        step = min(x.step, 0.25)
        text = self.rng.choice(texts).format(x.name, by)
        return self.keep("exact", text, magnitude=2 * x.magnitude + 4, step=step)

    def float_chosen(self, depth: int) -> Exact:
        x, y = self.exact(depth), self.exact(depth)
        text = self.rng.choice(
            ("torch.where({}, {}, {})", "torch.where({}, {}, 0.0)", "torch.where({}, -1.5, {})")
        )
        return self.keep(
            "exact",
            text.format(self.boolean(depth), x.name, y.name),
            magnitude=max(x.magnitude, y.magnitude),
            step=min(x.step, y.step),
        )

    def program(self, depth: int) -> Program:
        kind = self.rng.choice(("integer", "integer", "boolean", "exact", "rounded"))
        if kind == "boolean":
            result = f"{self.boolean(depth)}.float()"
        elif kind == "integer":
            # a prime below 2**24: float32 has the remainder as it is, and high bits count
            result = f"({self.integer(depth)}.to(torch.int64) % 1000003).float()"
        else:
            result = self.exact(depth).name
        if kind == "rounded":
            result = self.rng.choice(_ROUNDED).format(result)
        return Program(tuple(self.lines), result, kind == "rounded")


def draw_programs(seed: int, count: int = TREES_IN_MOD) -> list[Program]:
    """The programs of one mod: number i is for head i."""
    rng = random.Random(seed)
    captured = captured_tensors(seed)
    return [_Writer(rng, captured, i).program(rng.randint(2, 5)) for i in range(count)]


def _compile_mod(
    text: str, captured: Mapping[str, Tensor], arguments: str = "score, b, h, q, k"
) -> Mod:
    """The function `drawn` of a text, which captures tensors by a closure."""
    lines = "\n        ".join(text.splitlines())
    source = (
        "import torch\n\n"
        f"def make({', '.join(captured)}):\n"
        f"    def drawn({arguments}):\n"
        f"        {lines}\n"
        "    return drawn\n"
    )
    name = f"<program {zlib.crc32(text.encode())}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    return space["make"](*captured.values())


def _compile_score_mod(text: str, seed: int) -> Mod:
    return _compile_mod(text, {name: x.tensor for name, x in captured_tensors(seed).items()})


def mod_of(program: Program, seed: int) -> Mod:
    """A score_mod of torch, of one program."""
    return _compile_score_mod(program.text, seed)


def joined_mod(programs: list[Program], seed: int) -> Mod:
    """A score_mod of torch that is program i for head i."""
    lines = ["out = score * 0"]
    for number, program in enumerate(programs):
        lines.extend(program.lines)
        lines.append(f"out = torch.where(h == {number}, {program.result}, out)")
    return _compile_score_mod("\n".join((*lines, "return out")), seed)


def scores_of(seed: int, extents: Extents = EXTENTS) -> Tensor:
    """Multiples of a quarter up to 8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32, 33, tuple(extents), generator=generator) / 4


def disagreement(programs: list[Program], found: Tensor, seed: int, oracle: Any) -> str | None:
    """The first program whose values are not torch's: its text, and the first place.

    found (batch, TREES_IN_MOD, seqlen_q, seqlen_k): of `joined_mod`; oracle: `dense_scores`.
    """
    scores = scores_of(seed)
    for number, program in enumerate(programs):
        expected = oracle(mod_of(program, seed), scores)[:, number]
        ours = found[:, number]
        by = 1e-5 if program.is_rounded else 0.0
        wrong = ~torch.isclose(ours, expected.float(), rtol=by, atol=by, equal_nan=True)
        if wrong.any():
            b, q, k = (int(i) for i in wrong.nonzero()[0])
            return (
                f"seed {seed}, program {number}, b {b}, h {number}, q {q}, k {k}: expected "
                f"{expected[b, q, k]}, got {ours[b, q, k]} ({int(wrong.sum())} of {wrong.numel()} "
                f"differ)\n{program.text}"
            )
    return None


# Masks whose parts have forms that a compiler of masks may recognise.


_PARTS = (
    *("q >= k", "k <= q + {c}", "q - k < {w}", "(q - k).abs() <= {w}", "k - q >= {c}"),
    *("2 * (q - k) <= {w}", "{c} < k - q", "~(q < k)", "k < lengths[b]", "k >= starts[b]"),
    *("q < lengths[b]", "ids[b, q] == ids[b, k]", "ids[b, k] == ids[b, q]"),
    *("ids[b, q] >= ids[b, k]", "flags[b, k]", "k % 3 != 1", "h % 2 == 0", "k < ends[b, q]"),
    *("(q >= k) | (k < lengths[b] // 2)", "((q - k) >= 0) & ((q - k) < {w})", "q + {w} > k"),
    *("k // 8 <= q // 8", "torch.where(q >= k, q - k < {w}, k < 3)", "q * 1 >= k * 1"),
    *("~((k > q) | (k < q - {w}))", "k - q != {c}"),
)


def draw_mask(seed: int, extents: Extents) -> tuple[Mod, str]:
    """A mask_mod of torch, one to three parts joined by `and`, and its text."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    longest, batch = extents.longest, extents.batch

    def ints(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator).int()

    captured = {
        "lengths": ints(1, longest + 1, batch),
        "starts": ints(0, longest // 3, batch),
        "ids": (torch.rand((batch, longest), generator=generator) < 0.1).cumsum(1).int(),
        "flags": torch.rand((batch, longest), generator=generator) < 0.7,
        "ends": ints(0, longest + 1, batch, longest),
    }
    parts = [
        part.format(c=rng.choice((-40, -3, -1, 0, 1, 2, 30)), w=rng.choice((1, 2, 17, 64)))
        for part in rng.sample(_PARTS, rng.randint(1, 3))
    ]
    text = "return " + " & ".join(f"({part})" for part in parts)
    return _compile_mod(text, captured, "b, h, q, k"), text
