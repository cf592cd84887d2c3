"""The position of the first query: the argument `q_start`, from the public functions to a kernel.

Of a kernel (`core/lengths.py`) and of a torch operator it is a number; `AT_END` means "end".
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from flash_mask_cute.limits import AT_END, MAX_POSITION
from flash_mask_cute.runtime.checks import INTS
from flash_mask_cute.seqlen_info import SeqlenInfoQK

NONE: Final = "none"
NUMBER: Final = "number"
# also the value of the argument q_start by which the last query is at the last key
END: Final = "end"
EACH: Final = "each"
StartKind: TypeAlias = Literal["none", "number", "end", "each"]

QStartArgument: TypeAlias = int | str | Tensor | None
_ALLOWED = 'an int, "end", an int32 tensor (batch,) or None'


class QStart(NamedTuple):
    """Where the first query of each sequence is.

    kind: NONE: not given, or without effect. NUMBER: at `number`, in all sequences. END: where the
    last query is at the last key. EACH: at its element of `Tensors.q_starts`. The tensor is apart,
    because the options are part of a key, and torch's autograd and operators take tensors by
    themselves.

    What a trace needs is a method, as Dynamo of torch 2.9 evaluates no properties here.
    """

    kind: StartKind = NONE
    number: int | None = None

    @property
    def is_given(self) -> bool:
        return self.kind != NONE

    def shifts_square(self) -> bool:
        """Whether query 0 of a sequence with as many queries as keys is not at position 0."""
        if self.kind == NUMBER:
            return self.number != 0
        return self.kind == EACH

    def fold(self, is_banded: bool, counts_rows: bool, is_square: bool) -> QStart:
        """The same if it differs in effect from NONE, which otherwise takes its place.

        is_banded: there is causal masking or a window, which NONE aligns with the last key.
        counts_rows: masks or callables count rows, which start at 0 with NONE. is_square: all
        sequences are known to have equal numbers of queries and keys.
        """
        if is_square and not self.shifts_square():
            return NO_START
        if not counts_rows and (self.kind == END or not is_banded):
            return NO_START
        return NO_START if self.number == 0 and not is_banded else self

    def problem_fields(self) -> dict[str, Any]:
        """The fields of `AttentionProblem` that it determines. With a position, block lists are
        read as bits, because query tiles need not begin where blocks do."""
        if self.kind == NONE:
            return {}
        kind = EACH if self.kind == EACH else NUMBER
        return {"q_start": kind, "has_lists": False, "has_full_lists": False}

    def operand(self) -> int | None:
        """The operand of a kernel or an operator, which for EACH is the tensor instead."""
        return AT_END if self.kind == END else self.number

    @staticmethod
    def from_operator(number: int | None, q_starts: Tensor | None) -> QStart:
        """Made from the arguments of an operator."""
        if q_starts is not None:
            return QStart(EACH)
        if number is None:
            return NO_START
        return QStart(END) if number == AT_END else QStart(NUMBER, number)

    def argument(self, q_starts: Tensor | None) -> QStartArgument:
        """As the argument q_start of a public function."""
        if self.kind == EACH:
            return q_starts
        return END if self.kind == END else self.number

    def of_sequence(
        self, q_starts: Tensor | None, batch_idx: int, used: SeqlenInfoQK
    ) -> int | None:
        """The position in one sequence, an int. q_starts: `Tensors.q_starts`. used: lengths."""
        if self.kind == EACH and q_starts is not None:
            return int(q_starts[batch_idx])
        return int(used.seqlen_k - used.seqlen_q) if self.kind == END else self.number


NO_START = QStart()
_NOT_GIVEN = None, NO_START


def split_q_start(q_start: QStartArgument) -> tuple[Tensor | None, QStart]:
    """The argument q_start as `Tensors.q_starts` and `Options.q_start`.

    Raises:
        TypeError: no int, None, "end" or tensor.
        ValueError: a string other than "end", or an int that is too large or too small.
    """
    if q_start is None:
        return _NOT_GIVEN
    if isinstance(q_start, Tensor):
        return q_start, QStart(EACH)
    if isinstance(q_start, str):
        if q_start != END:
            raise ValueError(f"q_start must be {_ALLOWED}, got {q_start!r}")
        return None, QStart(END)
    if isinstance(q_start, bool) or not isinstance(q_start, INTS):
        raise TypeError(f"q_start must be {_ALLOWED}, got {q_start!r} ({type(q_start).__name__})")
    check_position(q_start, "as an int")
    return None, QStart(NUMBER, q_start)


def check_position(position: Any, where: str) -> None:
    """Raise ValueError for a position too far from 0. where: in what it was given."""
    if not -MAX_POSITION < position < MAX_POSITION:
        raise ValueError(
            f"q_start must be above {-MAX_POSITION} and below {MAX_POSITION} {where}, got "
            f"{position}"
        )
