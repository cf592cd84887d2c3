"""Classes of reads of aux tensors, by what the element that is read depends on.

The class says which scores read an element, and so where the sum that is its gradient can be made
(docs/mods.md#classes-of-reads). `read_analysis` finds it in the trace of a score_mod.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from flash_mask_cute.mods.spans import Span

# Ranges of differences hold for positions and extents below this.
MOST_POSITION = 2**26


class Reliance(NamedTuple):
    """Whether the result of a mask_mod may depend on the batch entry, the head and the query."""

    batch: bool
    head: bool
    query: bool


class ReadClass(Enum):
    """What an element depends on, besides the batch entry, the query head and numbers.

    DIFFERENCE: a function of a(key) - b(query), whose range follows from lengths. PLACES: query and
    key themselves, one dimension each. OTHER: anything else. UNREAD: the modified score does not
    depend on the tensor.
    """

    HEAD = "head"
    KEY = "key"
    QUERY = "query"
    DIFFERENCE = "difference"
    PLACES = "places"
    OTHER = "other"
    UNREAD = "unread"


class Factor(NamedTuple):
    """A derivative by an element. constant: its value, if it is always the same. is_finite: it is
    finite for all scores, visible or not."""

    constant: float | None = None
    is_finite: bool = False


class Cut(NamedTuple):
    """A cut at each multiple of size, of queries or of keys."""

    of_keys: bool
    size: int


# Cuts that are nearer to each other are too many.
LEAST_CUT = 16


class TensorReads(NamedTuple):
    """The reads of one aux tensor.

    why: the reason for OTHER. needs_score: a derivative by an element depends on the score.
    difference: of DIFFERENCE, as an expression in q_idx and kv_idx. factors: of each read.
    read_once: no two scores read the same element; read_once_an_entry: no two of a batch entry.
    is_diagonal: elements are the same along a diagonal of scores, within grid rectangles.
    """

    read_class: ReadClass
    why: str = ""
    needs_score: bool = False
    difference: str = ""
    factors: tuple[Factor, ...] = ()
    read_once: bool = False
    read_once_an_entry: bool = False
    is_diagonal: bool = False
    cuts: tuple[Cut, ...] = ()

    @property
    def is_of_walks(self) -> bool:
        """Whether elements stay the same along a walk over the queries of a head."""
        return self.read_class in (ReadClass.HEAD, ReadClass.KEY)

    @property
    def is_of_lines(self) -> bool:
        """Whether gradients are summed along columns or diagonals of a tile."""
        if self.read_class is not ReadClass.QUERY and not self.is_diagonal:
            return False
        return not self.cuts or self.has_constant_factors

    @property
    def is_within_rectangles(self) -> bool:
        """Whether gradients are summed along diagonals within grid rectangles."""
        return bool(self.cuts) and self.is_of_lines

    @property
    def has_constant_factors(self) -> bool:
        return all(x.constant is not None for x in self.factors)

    @property
    def is_easy(self) -> bool:
        """Whether terms take few registers: they do not depend on the score, and elements that are
        found score by score take no arithmetic."""
        if self.needs_score or self.read_class is ReadClass.OTHER:
            return False
        if self.is_of_lines:
            return self.has_constant_factors
        return self.read_class is not ReadClass.DIFFERENCE


class ModReads(NamedTuple):
    """The reads of a score_mod, of the tensors whose gradients are wanted, by their numbers.

    is_shift: the derivative by the score is 1. is_batch_invariant_bias: the modified score is the
    score plus, or minus, one number that neither score nor batch entry determine. no_derivative:
    why there is none, as an error says it; empty: there is one, or the callable cannot be traced.
    """

    tensors: Mapping[int, TensorReads]
    is_shift: bool = False
    is_batch_invariant_bias: bool = False
    no_derivative: str = ""

    @property
    def shared(self) -> tuple[int, ...]:
        """Tensors that batch entries share, and whose gradients sum dS times constants."""
        if not self.is_batch_invariant_bias:
            return ()
        of_sums = (i for i in self.multi_reader if self.tensors[i].has_constant_factors)
        return tuple(of_sums)

    @property
    def shared_once(self) -> tuple[int, ...]:
        """Those of them where each score of a batch entry reads another element."""
        return tuple(i for i in self.shared if self.tensors[i].read_once_an_entry)

    @property
    def of_any(self) -> tuple[int, ...]:
        """The tensors that some score reads."""
        tensors = self.tensors.items()
        return tuple(i for i, x in tensors if x.read_class is not ReadClass.UNREAD)

    @property
    def multi_reader(self) -> tuple[int, ...]:
        """The tensors of whose elements some may be read by several scores at different places."""
        return tuple(i for i in self.of_any if not self.tensors[i].read_once)


class Step(NamedTuple):
    """From the result of an operation to one of its operands. operation: its name; empty: from a
    read to one of its indices."""

    operation: str
    operand: int


class DifferenceTerm(NamedTuple):
    """A term of a difference: factor times a function of the key, or of the query.

    divisor: the function is the whole part of the place over this; None: another one, whose values
    are in span. path: the way to its value from the indices of the read with number `behind`, which
    is the read itself or one whose element an index is made of.
    """

    is_key: bool
    factor: int
    divisor: int | None
    span: Span | None
    behind: int
    path: tuple[Step, ...]


class DifferenceRead(NamedTuple):
    """A read by a difference, the sum of terms; one has the factor 1 or -1.

    number: among the reads of the score_mod. tensor: the number of the aux tensor. by_batch,
    by_head: the element depends on the batch entry, the query head. is_computed: its indices take
    more than sums.
    """

    number: int
    tensor: int
    terms: tuple[DifferenceTerm, ...]
    by_batch: bool
    by_head: bool
    is_computed: bool

    @property
    def are_places(self) -> bool:
        """Whether the terms are the places themselves."""
        return all(x.divisor == 1 and abs(x.factor) == 1 for x in self.terms)


# In a mask warp: how many neighbouring rows of scores have sums along diagonals of their own; and
# how far behind the last difference, or before the first one, it may add 0.
ROWS_APART, MARGIN = 4, 40


class SummedBy(Enum):
    """Who sums gradients by difference in shared memory, each warp its own.

    SCORES: MMA warps, score by score. LINES: MMA warps, along diagonals within grid rectangles.
    MASKS: mask warps, which do that from dS in shared memory. TURNS: MMA warps in one query block,
    and mask warps in the next one.
    """

    SCORES = "scores"
    LINES = "lines"
    MASKS = "masks"
    TURNS = "turns"

    @property
    def has_mma_warps(self) -> bool:
        return self is not SummedBy.MASKS

    @property
    def has_mask_warps(self) -> bool:
        return self in (SummedBy.MASKS, SummedBy.TURNS)


class SummedDifference(NamedTuple):
    """size: of the sums of a read's gradient, that of the difference 0 in the middle."""

    read: DifferenceRead
    size: int
    by: SummedBy

    @property
    def step(self) -> int:
        """The growth of the difference from a key to the next one, within grid rectangles."""
        return sum(x.factor for x in self.read.terms if x.is_key and x.divisor == 1)

    @property
    def stride(self) -> int:
        """In a mask warp, from one row's sums to the next one's, in other banks."""
        return self.size + 2 * MARGIN + 2

    @property
    def mma_words(self) -> int:
        """Of shared memory, in each MMA warp."""
        return self.size if self.by.has_mma_warps else 0

    @property
    def mask_words(self) -> int:
        """Of shared memory, in each mask warp."""
        words = self.size if self.step == 0 else ROWS_APART * self.stride
        return words if self.by.has_mask_warps else 0
