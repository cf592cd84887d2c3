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


class TensorReads(NamedTuple):
    """The reads of one aux tensor.

    why: the reason for OTHER. needs_score: a derivative by an element depends on the score.
    difference: of DIFFERENCE, as an expression in q_idx and kv_idx.
    """

    read_class: ReadClass
    why: str = ""
    needs_score: bool = False
    difference: str = ""


class ModReads(NamedTuple):
    """The reads of a score_mod, of the tensors whose gradients are wanted, by their numbers.

    is_shift: the modified score is the score plus something that does not depend on it.
    """

    tensors: Mapping[int, TensorReads]
    is_shift: bool = False
