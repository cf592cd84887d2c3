"""Analysis of the indices of reads in the trace of a score_mod: on which places they depend, how.

It follows the operations from an index back to the place of the score. Whatever is not known here
depends on everything, so the class of such a read is OTHER.

An index is described by its form: fixed for a batch entry and head; a sum of multiples of terms
that depend on one place each; or a function of such a sum. Equal terms are found by value
numbering, as the same operations of the same operands.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith

from flash_mask_cute.mods import derivative, ir_analysis
from flash_mask_cute.mods.aux_reads import ReadAxis, noted_limits
from flash_mask_cute.mods.calling import ScorePlace
from flash_mask_cute.mods.ir_analysis import key_of, maker_of
from flash_mask_cute.mods.read_classes import (
    LEAST_CUT,
    MOST_POSITION,
    Cut,
    Factor,
    ModReads,
    ReadClass,
    TensorReads,
)
from flash_mask_cute.mods.spans import Span, span_of

_T = TypeVar("_T")
_PLACES_OF_ENTRY = {ReadAxis.HEAD, ReadAxis.QUERY, ReadAxis.KEY}
_POSITION: Span = 0, MOST_POSITION - 1
# Operations whose results follow from their operands alone, besides all of `arith` and `math`. A
# read is one of these, because no kernel writes to aux tensors.
_PURE = {
    *ir_analysis.COORDINATES,
    "cute.get_iter",
    "cute.get_shape",
    "cute.make_view",
    "cute.memref.load",
    "cute.to_int_tuple",
    "cute.tuple_add",
    "cute.tuple_sub",
    "vector.broadcast",
    "vector.extract",
    "vector.shape_cast",
}
_DIVISIONS = {"arith.divsi", "arith.divui", "arith.floordivsi"}
# Of these the result is the operand, if it is one number.
_SAME = {
    "cute.get_scalars",
    "cute.to_int_tuple",
    "vector.broadcast",
    "vector.extract",
    "vector.shape_cast",
}
# And of these, if no bit is lost.
_WIDER_OR_NOT = {"arith.extsi", "arith.index_cast", "arith.trunci"}


def analyse_reads(
    score_mod: Callable[..., Any], aux_tensors: Any, wants_aux: Sequence[int]
) -> ModReads:
    """The reads of the aux tensors with numbers in wants_aux. Called while a function is traced;
    differentiates the callable, removes the operations, and raises what `differentiate` raises."""
    with ir_analysis.draft(), noted_limits() as limits:
        place = ScorePlace(*(Int32(arith.constant(Int32.mlir_type, 0)) for _ in ReadAxis))
        score = Float32(arith.constant(Float32.mlir_type, 0.0))
        value, slope, terms = derivative.differentiate(
            score_mod, score, place, aux_tensors, wants_aux
        )
        is_batch_invariant_bias = _is_batch_invariant_bias(value, score, place.batch_idx)
        origins = {key_of(x.ir_value()): axis for x, axis in zip(place, ReadAxis, strict=True)}
        values = Values(origins, limits, score)
        found = {}
        for number in wants_aux:
            own = [(coordinates, factor) for i, coordinates, factor in terms if i == number]
            indices = [tuple(values.of(x.ir_value()) for x in crd) for crd, _ in own]
            needs_score = any(_depends_on(factor.ir_value(), score) for _, factor in own)
            read_class, why = values.classify(indices)
            is_difference = read_class is ReadClass.DIFFERENCE
            difference = values.describe(indices[0]) if is_difference else ""
            factors = tuple(_factor(factor) for _, factor in own)
            places = values.once_by(indices) if read_class is ReadClass.PLACES else set()
            cuts = values.cuts_of(indices[0]) if is_difference else None
            found[number] = TensorReads(
                read_class,
                why,
                needs_score,
                difference,
                factors,
                read_once=places >= set(ReadAxis),
                read_once_an_entry=places >= _PLACES_OF_ENTRY,
                is_diagonal=cuts is not None,
                cuts=cuts or (),
            )
        is_shift = ir_analysis.constant(slope.ir_value()) == 1.0
        return ModReads(found, is_shift, is_batch_invariant_bias)


class Kind(Enum):
    FIXED = 0  # for a batch entry and head
    SUM = 1  # of multiples of terms, and something fixed
    FUNCTION = 2  # of such a sum, and of something fixed
    UNKNOWN = 3


class _Value(NamedTuple):
    """What is known of a number.

    terms: (number of a term, its factor) of a sum, or of the sum that it is a function of, there in
    lowest terms. offset: added to the sum, if that is a constant. span: None if it does not follow
    from lengths and extents. number: equal for equal values. text: for readers, if it is short.
    """

    kind: Kind
    number: int
    terms: tuple[tuple[int, int], ...] = ()
    offset: int | None = None
    span: Span | None = None
    text: str = ""

    @property
    def constant(self) -> int | None:
        return self.offset if self.kind is Kind.FIXED else None


class Term(NamedTuple):
    """A function of one place. divisor: it is the whole part of the place over this, 1 for the
    place itself; None: another function."""

    place: ReadAxis
    span: Span | None
    text: str
    divisor: int | None = None


class Values:
    """The values of one trace. origins: places by the keys of their values. limits: values that
    were limited to an extent, and what they were before. score: what depends on it is unknown."""

    def __init__(
        self, origins: dict[int, ReadAxis], limits: dict[int, ir.Value], score: Float32
    ) -> None:
        self._origins, self._limits = origins, limits
        self._score = key_of(score.ir_value())
        self._known: dict[int, _Value] = {}
        self._numbers: dict[Any, int] = {}
        self._values: dict[int, list[ir.Value]] = {}
        # by the number of the value
        self._terms: dict[int, Term] = {}

    # -- classes --------------------------------------------------------------------------------

    def describe(self, indices: tuple[_Value, ...]) -> str:
        """The difference that all indices depend on, in words."""
        terms = self.difference_of(indices) or ()
        parts = [("-" if n < 0 else "+", abs(n), self._terms[i].text) for i, n in terms]
        texts = [f"{sign} {text if n == 1 else f'{n} * {text}'}" for sign, n, text in parts]
        return " ".join(texts).removeprefix("+ ")

    def classify(self, reads: list[tuple[_Value, ...]]) -> tuple[ReadClass, str]:
        """The class of a tensor by its reads, given by their indices, and why it is OTHER."""
        if not reads:
            return ReadClass.UNREAD, ""
        found = [self.classify_one(indices) for indices in reads]
        for read_class, why in found:
            if read_class is ReadClass.OTHER:
                return read_class, why
        if len({read_class for read_class, _ in found}) > 1:
            names = " and ".join(sorted({read_class.value for read_class, _ in found}))
            return ReadClass.OTHER, f"its reads disagree: by {names}"
        read_class = found[0][0]
        if read_class is ReadClass.DIFFERENCE:
            if len({self.difference_of(indices) for indices in reads}) > 1:
                return ReadClass.OTHER, "its reads disagree: by different differences"
        elif read_class is ReadClass.PLACES and len({self._places_of(x) for x in reads}) > 1:
            return ReadClass.OTHER, "its reads disagree: by places in different dimensions"
        return read_class, ""

    def classify_one(self, indices: tuple[_Value, ...]) -> tuple[ReadClass, str]:
        if any(x.kind is Kind.UNKNOWN for x in indices):
            why = "an index is no function of one difference of query and key, or needs the score"
            return ReadClass.OTHER, why
        places = {self._terms[i].place for x in indices for i, _ in x.terms}
        if not places:
            return ReadClass.HEAD, ""
        if len(places) == 1:
            only = places.pop()
            return (ReadClass.KEY if only is ReadAxis.KEY else ReadClass.QUERY), ""
        if self._places_of(indices) is not None:
            return ReadClass.PLACES, ""
        difference = self.difference_of(indices)
        if difference is None:
            return ReadClass.OTHER, "its indices depend on query and key separately"
        if any(self._terms[i].span is None for i, _ in difference):
            return ReadClass.OTHER, "the range of the difference does not follow from lengths"
        return ReadClass.DIFFERENCE, ""

    def difference_of(self, indices: tuple[_Value, ...]) -> tuple[tuple[int, int], ...] | None:
        """The difference that all indices depend on, in lowest terms; None: there is none."""
        found = {_lowest(x.terms) for x in indices if x.terms}
        only = found.pop() if len(found) == 1 else None
        if only is None or len({self._terms[i].place for i, _ in only}) == 1:
            return None
        return only

    def _places_of(self, indices: tuple[_Value, ...]) -> tuple[ReadAxis | int, ...] | None:
        """The indices as places and numbers, with query and key once each; None: they are not."""
        known = [self._place_of(x) for x in indices]
        places = [x for x in known if isinstance(x, ReadAxis)]
        is_one_each = len(set(places)) == len(places)
        if None in known or not is_one_each or not {ReadAxis.QUERY, ReadAxis.KEY}.issubset(places):
            return None
        return tuple(x for x in known if x is not None)

    def _place_of(self, x: _Value) -> ReadAxis | int | None:
        if x.constant is not None:
            return x.constant
        return next((place for place in ReadAxis if x.number == self._number(place)), None)

    def cuts_of(self, indices: tuple[_Value, ...]) -> tuple[Cut, ...] | None:
        """The cuts between which the difference that all indices depend on is the same along a
        diagonal; None: it is not, or they are too many."""
        terms = self.difference_of(indices) or ()
        themselves = {self._number(place) for place in (ReadAxis.QUERY, ReadAxis.KEY)}
        cuts = []
        for i, _ in terms:
            term = self._terms[i]
            if i in themselves:
                continue
            if term.divisor is None or term.divisor < LEAST_CUT:
                return None
            cuts.append(Cut(term.place is ReadAxis.KEY, term.divisor))
        is_same = sum(n for i, n in terms if i in themselves) == 0
        return tuple(sorted(set(cuts))) if is_same else None

    def once_by(self, reads: list[tuple[_Value, ...]]) -> set[ReadAxis | int]:
        """The places that are indices of the only read of a tensor."""
        return set(self._places_of(reads[0]) or ()) if len(reads) == 1 else set()

    # -- values ---------------------------------------------------------------------------------

    def of(self, value: ir.Value) -> _Value:
        """What is known of a value."""
        for each in _operands_first(value, self._inputs, self._known):
            known = self._known[key_of(each)] = self._made(each)
            self._values.setdefault(known.number, []).append(each)
        return self._known[key_of(value)]

    def with_number(self, number: int) -> list[ir.Value]:
        """All values with a number, among those that were looked at."""
        return self._values.get(number, [])

    def term(self, number: int) -> Term:
        return self._terms[number]

    def _inputs(self, value: ir.Value) -> list[ir.Value]:
        if key_of(value) in self._origins:
            return []
        if (limited := self._limits.get(key_of(value))) is not None:
            return [limited]
        operation = maker_of(value)
        if operation is None:
            return []
        if operation.name == "scf.if":
            yields = [list(region.blocks[0].operations)[-1] for region in operation.regions]
            i = _result_number(operation, value)
            return [operation.operands[0], *(operands_of(x.operation)[i] for x in yields)]
        leaf = _leaf(operation, value)
        return operands_of(operation) if leaf is None else [leaf]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _made(self, value: ir.Value) -> _Value:
        place = self._origins.get(key_of(value))
        if place is not None:
            number = self._number(place)
            text = _NAMES[place]
            if place in (ReadAxis.QUERY, ReadAxis.KEY):
                self._terms[number] = Term(place, _POSITION, text, 1)
                return _Value(Kind.SUM, number, ((number, 1),), 0, _POSITION, text)
            return _Value(Kind.FIXED, number, span=_POSITION, text=text)
        if key_of(value) == self._score:
            return _Value(Kind.UNKNOWN, self._number("score"))
        inputs = [self._known[key_of(x)] for x in self._inputs(value)]
        if key_of(value) in self._limits:
            return inputs[0]
        operation = maker_of(value)
        if operation is None:
            # a tensor of the call, unless it is a value that a loop carries
            kind = Kind.UNKNOWN if _is_number(value) else Kind.FIXED
            return _Value(kind, self._number(("argument", key_of(value))))
        name, what = operation.name, _what(operation, value)
        if name == "arith.constant":
            constant = _integer(operation)
            span = None if constant is None else (constant, constant)
            return _Value(Kind.FIXED, self._number(what), (), constant, span, str(constant))
        if name == "scf.if":
            name = "arith.select"
            what = name, str(value.type)
        elif _leaf(operation, value) is not None or _is_same(operation, inputs):
            return inputs[0]
        elif not _is_pure(operation):
            return _Value(Kind.UNKNOWN, self._number(("opaque", key_of(value))))
        span = _span(name, operation, value, inputs)
        number = self._number((what, tuple(x.number for x in inputs)))
        found = self._combined(name, operation, number, inputs, span)
        return found._replace(text=_text(name, operation, inputs))

    def _combined(
        self,
        name: str,
        operation: ir.Operation,
        number: int,
        inputs: list[_Value],
        span: Span | None,
    ) -> _Value:
        summed = _sum(name, inputs)
        if name == "arith.cmpi" and summed is None:
            summed = _compared(operation, inputs)
        if any(x.kind is Kind.UNKNOWN for x in inputs):
            return _Value(Kind.UNKNOWN, number)
        if summed is not None and name != "arith.cmpi":
            terms, offset = summed
            kind = Kind.SUM if terms else Kind.FIXED
            return _Value(kind, number, terms, offset, span)
        if summed is not None and len({self._terms[i].place for i, _ in summed[0]}) == 2:
            return _Value(Kind.FUNCTION, number, _lowest(summed[0]))
        varying = [x for x in inputs if x.terms]
        if not varying:
            return _Value(Kind.FIXED, number, span=span)
        places = {self._terms[i].place for x in varying for i, _ in x.terms}
        if len(places) == 1:
            only = places.pop()
            text = _text(name, operation, inputs) or f"a function of {_NAMES[only]}"
            self._terms[number] = Term(only, span, text, self._divisor(name, inputs))
            return _Value(Kind.SUM, number, ((number, 1),), 0, span)
        sums = {_lowest(x.terms) for x in varying}
        if len(sums) > 1:
            return _Value(Kind.UNKNOWN, number)
        return _Value(Kind.FUNCTION, number, sums.pop(), span=span)

    def _divisor(self, name: str, inputs: list[_Value]) -> int | None:
        """By which a place, which is not negative, is divided in one or several steps."""
        if name not in (*_DIVISIONS, "arith.shrsi", "arith.shrui"):
            return None
        x, y = inputs
        if len(x.terms) != 1 or x.terms[0][1] != 1 or x.offset != 0 or y.constant is None:
            return None
        before, size = self._terms[x.terms[0][0]].divisor, y.constant
        if name not in _DIVISIONS:
            size = 2**size if 0 <= size < 31 else 0
        return None if before is None or size < 1 else before * size


def _operands_first(
    value: ir.Value, inputs: Callable[[ir.Value], list[ir.Value]], known: Mapping[int, Any]
) -> Iterator[ir.Value]:
    """A value after all that it is made of, but what is known; the caller adds each to `known`."""
    pending = [value]
    while pending:
        last = pending[-1]
        missing = [x for x in inputs(last) if key_of(x) not in known]
        if key_of(last) not in known and missing:
            pending.extend(missing)
            continue
        pending.pop()
        if key_of(last) not in known:
            yield last


# -- sums ---------------------------------------------------------------------------------------


def _sum(name: str, inputs: list[_Value]) -> tuple[tuple[tuple[int, int], ...], int | None] | None:
    """The terms and the offset of a result that is a sum like its operands; None: it is not."""
    if not all(x.kind in (Kind.FIXED, Kind.SUM) for x in inputs):
        return None
    if name in ("arith.addi", "arith.subi"):
        x, y = inputs
        sign = 1 if name == "arith.addi" else -1
        return _added(x, 1, y, sign)
    if name in ("arith.muli", "arith.shli"):
        x, y = inputs
        if name == "arith.muli" and x.constant is not None:
            x, y = y, x
        if y.constant is None or (name == "arith.shli" and not 0 <= y.constant < 31):
            return None
        factor = y.constant if name == "arith.muli" else 2**y.constant
        return _added(x, factor, x, 0)
    return None


def _added(
    x: _Value, of_x: int, y: _Value, of_y: int
) -> tuple[tuple[tuple[int, int], ...], int | None]:
    factors: dict[int, int] = {}
    for value, times in ((x, of_x), (y, of_y)):
        for term, factor in value.terms:
            factors[term] = factors.get(term, 0) + factor * times
    offset = None
    if x.offset is not None and y.offset is not None:
        offset = x.offset * of_x + y.offset * of_y
    elif of_y == 0 and x.offset is not None:
        offset = x.offset * of_x
    return tuple(sorted((i, n) for i, n in factors.items() if n)), offset


def _compared(
    operation: ir.Operation, inputs: list[_Value]
) -> tuple[tuple[tuple[int, int], ...], int | None] | None:
    """The difference whose sign a comparison of two sums gives; None: nothing is known of it."""
    if not all(x.kind in (Kind.FIXED, Kind.SUM) and x.span is not None for x in inputs):
        return None
    # equal, unequal, and signed
    is_signed = ir.IntegerAttr(operation.attributes["predicate"]).value <= 5
    if not is_signed and any(x.span is None or x.span[0] < 0 for x in inputs):
        return None
    return _added(inputs[0], 1, inputs[1], -1)


def _lowest(terms: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Terms without common factor and sign: all multiples are functions of each other."""
    if not terms:
        return terms
    divisor = math.gcd(*(n for _, n in terms)) * (1 if terms[0][1] > 0 else -1)
    return tuple((i, n // divisor) for i, n in terms)


# -- texts --------------------------------------------------------------------------------------

_NAMES = dict(zip(ReadAxis, ("b_idx", "h_idx", "q_idx", "kv_idx"), strict=True))
_TEXTS = {
    "arith.addi": "({} + {})",
    "arith.subi": "({} - {})",
    "arith.muli": "({} * {})",
    "arith.minsi": "min({}, {})",
    "arith.maxsi": "max({}, {})",
    "arith.floordivsi": "({} // {})",
    "arith.shrsi": "({} >> {})",
    "arith.shli": "({} << {})",
    "arith.andi": "({} & {})",
    "arith.select": "({1} if {0} else {2})",
    "math.absi": "abs({})",
}
# where Python does the same if nothing is negative
_UNSIGNED_TEXTS = {
    "arith.divsi": "({} // {})",
    "arith.divui": "({} // {})",
    "arith.remsi": "({} % {})",
    "arith.remui": "({} % {})",
}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_MOST_TEXT = 120


def _text(name: str, operation: ir.Operation, inputs: list[_Value]) -> str:
    """A Python expression of the result; empty if there is none, or if it is long."""
    if not all(x.text for x in inputs):
        return ""
    form = _TEXTS.get(name, "")
    if name in _UNSIGNED_TEXTS and all(x.span is not None and x.span[0] >= 0 for x in inputs):
        form = _UNSIGNED_TEXTS[name]
    elif name == "arith.cmpi":
        predicate = ir.IntegerAttr(operation.attributes["predicate"]).value
        form = f"({{}} {_COMPARISONS[predicate]} {{}})" if predicate < len(_COMPARISONS) else ""
    text = form.format(*(x.text for x in inputs))
    return text if len(text) <= _MOST_TEXT else ""


# -- operations ---------------------------------------------------------------------------------


def operands_of(operation: ir.Operation) -> list[ir.Value]:
    # the DSL wraps pointers and tensors
    return [x if isinstance(x, ir.Value) else x.value for x in operation.operands]


def _result_number(operation: ir.Operation, value: ir.Value) -> int:
    results = (x if isinstance(x, ir.Value) else x.value for x in operation.results)
    return next(i for i, x in enumerate(results) if key_of(x) == key_of(value))


def _is_number(value: ir.Value) -> bool:
    return isinstance(value.type, ir.IntegerType | ir.FloatType | ir.IndexType | ir.VectorType)


def _integer(operation: ir.Operation) -> int | None:
    attribute = operation.attributes["value"]
    return attribute.value if isinstance(attribute, ir.IntegerAttr) else None


def _span(name: str, operation: ir.Operation, value: ir.Value, inputs: list[_Value]) -> Span | None:
    """The least and the greatest number that a result of an operation on integers may be."""
    if _is_extent(operation):
        return _POSITION
    if name == "cute.get_leaves":
        return inputs[0].span
    return span_of(name, _width(value.type), [x.span for x in inputs])


def _width(dtype: ir.Type) -> int:
    """Bits of an integer, which a vector may hold."""
    if isinstance(dtype, ir.VectorType):
        return _width(dtype.element_type)
    return dtype.width if isinstance(dtype, ir.IntegerType) else 64


def _is_extent(operation: ir.Operation) -> bool:
    """Whether the result is the extent of a dimension, or of all dimensions."""
    if operation.name == "cute.size":
        return str(operation.attributes["mode"]) != "array<i32>"
    return operation.name == "cute.get_shape"


def _leaf(leaves: ir.Operation, value: ir.Value) -> ir.Value | None:
    """The number behind a value that was taken out of a coordinate."""
    if leaves.name != "cute.get_leaves":
        return None
    made = maker_of(operands_of(leaves)[0])
    if made is None or made.name not in ("cute.make_coord", "cute.make_int_tuple"):
        return None
    # numbers known when the coordinate was made are no operands
    dynamic = [key_of(x) for x in leaves.results if "?" in str(x.type)]
    if key_of(value) not in dynamic or len(dynamic) != len(made.operands):
        return None
    return made.operands[dynamic.index(key_of(value))]


def _what(operation: ir.Operation, value: ir.Value) -> tuple[Any, ...]:
    """What a result is besides its operands. Numbers in a coordinate are part of its type."""
    attributes = tuple((name, str(operation.attributes[name])) for name in operation.attributes)
    return operation.name, attributes, _result_number(operation, value), str(value.type)


def _is_same(operation: ir.Operation, inputs: list[_Value]) -> bool:
    """Whether the result is the first operand."""
    name = operation.name
    if name in _WIDER_OR_NOT:
        return inputs[0].span is not None and _width(operation.results[0].type) >= 32
    if name not in _SAME:
        return False
    source = operation.operands[0].type
    return not isinstance(source, ir.VectorType) or math.prod(source.shape) == 1


def _is_pure(operation: ir.Operation) -> bool:
    name = operation.name
    if name == "llvm.load":
        return "invariant" in operation.attributes
    if name in _PURE or name.split(".")[0] in ("arith", "math"):
        return True
    return derivative.is_known_function(operation)


def operations_behind(value: ir.Value) -> Iterator[ir.Operation]:
    """All operations that a value is made of."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        last = pending.pop()
        if key_of(last) in seen:
            continue
        seen.add(key_of(last))
        operation = maker_of(last)
        if operation is None:
            continue
        yield operation
        pending.extend(operands_of(operation))
        for region in operation.regions:
            for view in (view for block in region.blocks for view in block.operations):
                yield view.operation
                pending.extend(operands_of(view.operation))


# products of magnitudes below this are finite in fp32
_MOST_BITS = 120
_SAME_MAGNITUDE = {"arith.negf", "math.absf", *_SAME}
_GREATER = {"arith.select", "arith.maximumf", "arith.maxnumf", "arith.minimumf", "arith.minnumf"}


def _factor(factor: Float32) -> Factor:
    value = factor.ir_value()
    constant, bits = _found(_constant, value), _found(_magnitude, value)
    if constant is not None and not math.isfinite(constant):
        constant = None
    return Factor(constant, bits is not None and bits < _MOST_BITS)


def _found(rule: Callable[[ir.Value, dict[int, _T]], _T], value: ir.Value) -> _T:
    """What a rule finds for a value, by what it found for the operands."""

    def inputs(made: ir.Value) -> list[ir.Value]:
        operation = maker_of(made)
        return [] if operation is None else operands_of(operation)

    found: dict[int, _T] = {}
    for each in _operands_first(value, inputs, found):
        found[key_of(each)] = rule(each, found)
    return found[key_of(value)]


def _constant(value: ir.Value, found: dict[int, float | None]) -> float | None:
    """The number that a value is, also a product of numbers, which derivatives leave behind."""
    operation = maker_of(value)
    if operation is None or operation.name not in ("arith.mulf", "arith.negf"):
        is_fp32 = isinstance(value.type, ir.F32Type)
        return ir_analysis.constant(value) if is_fp32 else None
    factors = [found[key_of(x)] for x in operands_of(operation)]
    known = [x for x in factors if x is not None]
    if len(known) < len(factors):
        return None
    return -known[0] if operation.name == "arith.negf" else math.prod(known)


def _magnitude(value: ir.Value, found: dict[int, int | None]) -> int | None:
    """A number n so that the value is always below 2^n; None: not known."""
    operation = maker_of(value)
    if operation is None:
        return None
    name, operands = operation.name, operands_of(operation)
    if name == "arith.constant":
        attribute = operation.attributes["value"]
        number = attribute.value if isinstance(attribute, ir.FloatAttr) else math.inf
        return max(math.frexp(number)[1], 0) if math.isfinite(number) else None
    if name in ("arith.sitofp", "arith.uitofp"):
        return _width(operands[0].type)
    if name in _SAME_MAGNITUDE:
        return found[key_of(operands[0])]
    if name not in ("arith.addf", "arith.subf", "arith.mulf", *_GREATER):
        return None
    bits = [found[key_of(x)] for x in operands[1 if name == "arith.select" else 0 :]]
    known = [x for x in bits if x is not None]
    if len(known) < len(bits):
        return None
    return sum(known) if name == "arith.mulf" else max(known) + 1


def _depends_on(value: ir.Value, number: Float32 | Int32) -> bool:
    origin = number.ir_value().owner.operation
    return any(operation == origin for operation in operations_behind(value))


def _is_batch_invariant_bias(value: Float32, score: Float32, batch_idx: Int32) -> bool:
    """`ModReads.is_batch_invariant_bias`: the last operation adds to the score itself."""
    total = maker_of(_itself(value.ir_value()))
    if total is None or total.name not in ("arith.addf", "arith.subf"):
        return False
    operands = operands_of(total)
    if total.name == "arith.addf":
        operands.sort(key=lambda x: _depends_on(x, score), reverse=True)
    given, added = operands
    if maker_of(_itself(given)) != score.ir_value().owner.operation:
        return False
    return not (_depends_on(added, score) or _depends_on(added, batch_idx))


def _itself(value: ir.Value) -> ir.Value:
    """The number that a value was made of without arithmetic."""
    operation = maker_of(value)
    while operation is not None and operation.name in _SAME:
        value = operands_of(operation)[0]
        operation = maker_of(value)
    return value
