"""Reads of aux tensors by a difference, which kernels take from tables of all differences.

The index of such a read is a function f(d) of a difference d = a(key) - b(query) (`read_analysis`),
and of the batch entry and the head. Buckets of distances take tens of instructions for each score.
So a small kernel computes the elements f(d) once for each head and d
(`difference_tables_kernel.py`), and attention reads them by a subtraction and a load for each
score. What a callable computes for an index stays in the trace, and the compiler removes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, vector

from flash_mask_cute.mods import ir_analysis
from flash_mask_cute.mods.aux_reads import (
    Answer,
    AuxTensors,
    ElementRead,
    ReadAxis,
    answered_first,
    answered_reads,
    noted_limits,
)
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.ir_analysis import key_of, maker_of
from flash_mask_cute.mods.read_analysis import Kind, Values, operands_of, operations_behind
from flash_mask_cute.mods.read_classes import (
    DifferenceRead,
    DifferenceTerm,
    ReadClass,
    Step,
    SummedDifference,
)

_LOADS = ("cute.memref.load", "llvm.load")
# the predicates of a comparison that are equal, unequal, or signed
_SIGNED = range(6)


def find_difference_reads(
    score_mod: Callable[..., Any], aux_tensors: Any
) -> tuple[DifferenceRead, ...]:
    """The reads that tables of differences can answer. Called while a function is traced; traces
    the callable, and removes the operations."""
    with ir_analysis.draft():
        place = ScorePlace(*(Int32(arith.constant(Int32.mlir_type, 0)) for _ in ReadAxis))
        trace = _Trace.create(score_mod, place, aux_tensors, lambda x: x.tensor.load(x.indices))
        reads = (trace.difference_read(i) for i in range(len(trace.reads)))
        return tuple(x for x in reads if x is not None)


def read_of_difference(
    score_mod: Callable[..., Any],
    read: DifferenceRead,
    batch_idx: Int32,
    head_idx: Int32,
    difference: Int32,
    aux_tensors: Any,
) -> "DifferenceElement":
    """What a read finds for a difference. Indices outside a tensor, of differences that no visible
    score has, become the nearest inside."""
    # what takes the place of the difference's terms is made here
    before = Int32(arith.constant(Int32.mlir_type, 0)).ir_value().owner
    zero = [Int32(arith.constant(Int32.mlir_type, 0)) for _ in range(2)]
    place = ScorePlace(batch_idx, head_idx, *zero)
    trace = _Trace.create(score_mod, place, aux_tensors, lambda x: x.tensor.load(_inside(x)))
    trace.replace_terms(read, difference, ir.InsertionPoint(before))
    return trace.reads[read.number]


def _inside(read: ElementRead) -> tuple[cutlass.Integer, ...]:
    indices = []
    for dimension, given in enumerate(read.indices):
        index = given if isinstance(given, cutlass.Numeric) else Int32(given)
        last = type(index)(Int32(cute.size(read.tensor, mode=[dimension])) - 1)
        indices.append(cutlass.max(cutlass.min(index, last), type(index)(0)))
    return tuple(indices)


class DifferenceElement(NamedTuple):
    """A read, and the element that it found. is_always_read: under no condition."""

    read: ElementRead
    element: cutlass.Numeric
    is_always_read: bool

    @property
    def coordinates(self) -> tuple[Int32, ...]:
        """Of the element, inside the tensor."""
        return tuple(Int32(x) for x in _inside(self.read))


@dataclass(frozen=True)
class _Trace:
    """The reads of a score_mod in one trace of it, at a place."""

    reads: list[DifferenceElement]
    values: Values
    place: ScorePlace

    @staticmethod
    def create(
        score_mod: Callable[..., Any],
        place: ScorePlace,
        aux_tensors: Any,
        load: Callable[[ElementRead], cutlass.Numeric],
    ) -> "_Trace":
        reads: list[DifferenceElement] = []
        block = ir.InsertionPoint.current.block

        def answer(read: ElementRead) -> cutlass.Numeric:
            element = load(read)
            is_always_read = ir.InsertionPoint.current.block == block
            reads.append(DifferenceElement(read, element, is_always_read))
            return element

        score = Float32(arith.constant(Float32.mlir_type, 0.0))
        with noted_limits() as limits, answered_reads(answer):
            call_score_mod(score_mod, score, place, aux_tensors)
        origins = {key_of(x.ir_value()): axis for x, axis in zip(place, ReadAxis, strict=True)}
        return _Trace(reads, Values(origins, limits, score), place)

    def difference_read(self, number: int) -> DifferenceRead | None:
        """A read, if its element is found by a difference."""
        read, element, is_always_read = self.reads[number]
        indices = [_value(x) for x in read.indices]
        known = tuple(self.values.of(x) for x in indices)
        read_class, _ = self.values.classify_one(known)
        is_computed = any(x.kind is Kind.FUNCTION for x in known)
        is_plain = isinstance(element, cutlass.Numeric) and not isinstance(element, Boolean)
        if read_class is not ReadClass.DIFFERENCE or not (is_always_read and is_plain):
            return None
        operations = [x for index in indices for x in operations_behind(index)]
        if not all(self._is_same_by_difference(x) for x in operations):
            return None
        difference = self.values.difference_of(known) or ()
        terms = []
        for term, factor in difference:
            way = self._way_to(term, number)
            if way is None:
                return None
            place, span, _, divisor = self.values.term(term)
            terms.append(DifferenceTerm(place is ReadAxis.KEY, factor, divisor, span, *way))
        if all(abs(x.factor) != 1 for x in terms):
            return None
        batch, head = (
            any(x == index.ir_value().owner.operation for x in operations)
            for index in self.place[:2]
        )
        return DifferenceRead(number, read.number, tuple(terms), batch, head, is_computed)

    def _is_same_by_difference(self, operation: ir.Operation) -> bool:
        """Whether an operation depends on the difference alone, and reads `answered_reads`."""
        if operation.name == "arith.cmpi":
            return ir.IntegerAttr(operation.attributes["predicate"]).value in _SIGNED
        if operation.name not in _LOADS:
            return True
        found = key_of(operation.results[0])
        return any(key_of(x.element.ir_value()) == found for x in self.reads)

    def _way_to(self, term: int, number: int) -> tuple[int, tuple[Step, ...]] | None:
        """The way to a term of a read's difference; None: it leads into a branch. No way leads
        through the element of a read, which a kernel may find by another operation."""
        wanted = {key_of(x) for x in self.values.with_number(term)}
        elements = {key_of(x.element.ir_value()): i for i, x in enumerate(self.reads)}
        pending = self._starts(number)
        seen: set[int] = set()
        while pending:
            value, behind, path = pending.pop()
            if key_of(value) in wanted:
                return behind, path
            if key_of(value) in seen:
                continue
            seen.add(key_of(value))
            if (read := elements.get(key_of(value))) is not None:
                pending.extend(self._starts(read))
            elif (operation := maker_of(value)) is not None:
                for i, operand in enumerate(operands_of(operation)):
                    pending.append((operand, behind, (*path, Step(operation.name, i))))
        return None

    def _starts(self, number: int) -> list[tuple[ir.Value, int, tuple[Step, ...]]]:
        """The indices of a read, with the way to them."""
        indices = self.reads[number].read.indices
        return [(_value(x), number, (Step("", i),)) for i, x in enumerate(indices)]

    def replace_terms(
        self, read: DifferenceRead, difference: Int32, place: ir.InsertionPoint
    ) -> None:
        """Replace the terms of a read's difference by other numbers with the same sum. Terms are
        those that the read has: their signs and numbers follow from the trace that found it."""
        for index in self.reads[read.number].read.indices:
            self.values.of(_value(index))
        indices = [x.read.indices for x in self.reads]
        numbers = [self.values.of(_at_end(indices[x.behind], x.path)).number for x in read.terms]
        whole = next(i for i, term in enumerate(read.terms) if abs(term.factor) == 1)
        for i, (term, number) in enumerate(zip(read.terms, numbers, strict=True)):
            with place:
                new = difference * term.factor if i == whole else Int32(0)
            for value in list(self.values.with_number(number)):
                with place:
                    replacement = _of_type(new, value.type)
                value.replace_all_uses_with(replacement)


def _value(index: Any) -> ir.Value:
    return (index if isinstance(index, cutlass.Numeric) else Int32(index)).ir_value()


def _of_type(number: Int32, dtype: ir.Type) -> ir.Value:
    if isinstance(dtype, ir.VectorType):
        return vector.broadcast(dtype, _of_type(number, dtype.element_type))
    if isinstance(dtype, ir.IndexType):
        return arith.index_cast(dtype, number.ir_value())
    return cutlass.Numeric.from_mlir_type(dtype)(number).ir_value()


@dataclass(frozen=True)
class ModWithTables:
    """A callable that gets the first aux tensors, and whose reads by differences are answered from
    the tables after them, one for each of `reads`, (batch | 1, heads | 1, differences).

    Differences count from the middle of a table. A tensor whose gradient is wanted is read itself.
    summed: the reads whose gradients are summed by difference (`difference_sums.py`).
    """

    func: Callable[..., Any]
    num_tensors: int
    reads: tuple[DifferenceRead, ...] = ()
    summed: tuple[SummedDifference, ...] = ()

    @property
    def by_columns(self) -> bool:
        """Whether differences have parts that all rows of a column compute alike."""
        return any(not read.are_places for read in self.reads)

    def __call__(self, *arguments: Any) -> Any:
        *others, given = arguments
        own, tables = AuxTensors(given[: self.num_tensors]), given[self.num_tensors :]
        if not self.reads:
            return self.func(*others, own)
        batch_idx, head_idx, _, _ = others[-4:]
        with answered_first(self._answer(tables, batch_idx, head_idx)):
            return self.func(*others, own)

    def _answer(self, tables: Any, batch_idx: Any, head_idx: Any) -> Answer:
        # the indices of all reads up to this one
        asked: list[tuple[Any, ...]] = []

        def element(read: ElementRead) -> cutlass.Numeric | None:
            asked.append(read.indices)
            for of_table, table in zip(self.reads, tables, strict=True):
                if of_table.number == len(asked) - 1 and not read.is_learned:
                    assert of_table.tensor == read.number, "the callable reads as it did"
                    row = (
                        batch_idx[0] if of_table.by_batch else Int32(0),
                        head_idx[0] if of_table.by_head else Int32(0),
                    )
                    return _element(table, row, sums_of_terms(of_table, asked))
            return None

        return element


class _Sums(NamedTuple):
    """A sum of parts of the query and of the key. are_places: each is the place, or minus it."""

    of_query: Int32
    of_key: Int32
    are_places: bool


def sums_of_terms(read: DifferenceRead, asked: Sequence[Sequence[Any]]) -> _Sums:
    """The sums of a read. asked: the indices of each read up to this one."""
    sums: dict[bool, Int32] = {}
    for term in read.terms:
        value = _follow(asked[term.behind], term.path)
        more = value if term.factor == 1 else value * term.factor
        known = sums.get(term.is_key)
        sums[term.is_key] = more if known is None else known + more
    return _Sums(sums[False], sums[True], read.are_places)


def _element(table: Any, row: tuple[Int32, Int32], sums: _Sums) -> cutlass.Numeric:
    """The element of a difference. A column has an offset, and a row an address: one instruction
    for each score. Places have few differences (`at_plain_distances`), each loaded once."""
    middle = Int32(table.layout.shape[2]) // 2
    first = table.iterator + cute.crd2idx((*row, Int32(0)), table.layout)
    if sums.are_places:
        return table.load_at(first + (middle + (sums.of_query + sums.of_key)))
    return table.load_at((first + (middle + sums.of_query)) + sums.of_key)


def _at_end(indices: Sequence[Any], path: tuple[Step, ...]) -> ir.Value:
    """The value to which a way leads (`DifferenceTerm.path`)."""
    value = _value(indices[path[0].operand])
    for name, operand in path[1:]:
        operation = maker_of(value)
        assert operation is not None and operation.name == name, "as in `_Trace._way_to`"
        value = operands_of(operation)[operand]
    return value


def _follow(indices: Sequence[Any], path: tuple[Step, ...]) -> Int32:
    value = _at_end(indices, path)
    if isinstance(value.type, ir.VectorType):
        value = vector.extract(value, [], [0] * value.type.rank)
    if isinstance(value.type, ir.IndexType):
        value = arith.index_cast(Int32.mlir_type, value)
    return Int32(cutlass.Numeric.from_mlir_type(value.type)(value))
