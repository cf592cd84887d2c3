"""Classes of reads of aux tensors, by what the element that is read depends on.

The gradient of an element is a sum over the scores that read it. The class tells which scores these
are, and so where the sum can be made (docs/mods.md#classes-of-reads). `read_analysis` finds the
class in the trace of a score_mod.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

# Ranges of differences hold for positions and extents below this.
MOST_POSITION = 2**26


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


# Elements of these classes stay the same along a walk over the queries of a head.
OF_WALKS = (ReadClass.HEAD, ReadClass.KEY)
# keys of a warp, which has one sum for an element of a head
KEYS_OF_WARP = 16


class Factor(NamedTuple):
    """A derivative by an element. constant: its value, if it is always the same. is_finite: it is
    finite for all scores, visible or not."""

    constant: float | None = None
    is_finite: bool = False


class TensorReads(NamedTuple):
    """The reads of one aux tensor.

    why: the reason for OTHER. needs_score: a derivative by an element depends on the score.
    difference: of DIFFERENCE, as an expression in q_idx and kv_idx. factors: of each read.
    """

    read_class: ReadClass
    why: str = ""
    needs_score: bool = False
    difference: str = ""
    factors: tuple[Factor, ...] = ()

    @property
    def is_of_walks(self) -> bool:
        return self.read_class in OF_WALKS

    def stored_sums(self, tile_n: int) -> int:
        """Sums that a work tile of tile_n keys stores for a head, if they have an order. At least
        some, as tensors of kernels have elements."""
        per_read = tile_n if self.read_class is ReadClass.KEY else tile_n // KEYS_OF_WARP
        return max(len(self.factors), 1) * per_read


class ModReads(NamedTuple):
    """The reads of a score_mod, of the tensors whose gradients are wanted, by their numbers.

    is_shift: the derivative by the score is 1.
    """

    tensors: Mapping[int, TensorReads]
    is_shift: bool = False

    @property
    def are_of_grads(self) -> bool:
        """Whether all gradients are sums over walks, of gradients of scores times something that
        does not depend on the score."""
        tensors = self.tensors.values()
        return (
            self.is_shift and self.unordered() is None and not any(x.needs_score for x in tensors)
        )

    def unordered(self) -> tuple[int, str] | None:
        """The first tensor whose gradient is not summed over walks, and so has no fixed order of
        sums, and how it is read."""
        for number, reads in self.tensors.items():
            if not reads.is_of_walks and reads.read_class is not ReadClass.UNREAD:
                why = f" ({reads.why})" if reads.why else ""
                return number, f"by {reads.read_class.value}{why}"
        return None
