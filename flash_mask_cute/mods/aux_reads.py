"""The `aux_tensors` argument of a user callable, and reads from it.

Code for the CPU never reads outside a tensor. Plain reads have only places as indices (`b_idx[0]`,
`h_idx[0]`, `q_idx[0]`, `kv_idx[0]`): `notes_reads` records them, and the caller compares the limits
of the places with the extents beforehand. Other reads are checked one by one (`CheckedAux`): an
index outside is recorded for the caller, and element 0 is read instead. A use that cannot be
checked, such as a read by pointer, is refused.

A kernel may load elements for many keys at once (`table_rows.py`). Reads whose indices are places
or numbers, `PlacedRead`, are then answered from what was loaded.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, range_constexpr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.tensor import _Tensor

from flash_mask_cute.mods.errors import ModMistake
from flash_mask_cute.mods.ir_analysis import key_of, maker_of

# Of the record that checked reads fill: 1 once an index was outside, number of the tensor,
# dimension, index, extent, batch entry, head, query, key. Int64.
RECORD_SIZE = 9
# in place of a dimension, where a number counts the elements of all
FLAT = -1
# in place of a tensor's number, where a branch or a loop has chosen it
CHOSEN = -1
# What may be asked about a tensor beside its elements.
METADATA = {"cute.get_layout", "cute.size"}
# What hands a tensor on to another that is checked, too.
_CARRIED = {"scf.condition", "scf.for", "scf.while", "scf.yield"}


class PlainRead(NamedTuple):
    """An aux tensor dimension indexed by a place: 0 batch entry, 1 head, 2 query, 3 key."""

    number: int
    dimension: int
    place: int


class NotPlainError(Exception):
    """Raised while the reads of a callable are noted: not all of them are plain."""


# reads are noted here, if not None
_noted: set[PlainRead] | None = None


@contextmanager
def notes_reads() -> Iterator[set[PlainRead]]:
    """Context around a compilation for the CPU, of one thread at a time: records the reads of
    callables called inside. Raises NotPlainError, in the body."""
    global _noted
    _noted = set()
    try:
        yield _noted
    finally:
        _noted = None


class ReadAxis(Enum):
    """What an index of a read stands for, by its number among the arguments of a call."""

    BATCH = 0
    HEAD = 1
    QUERY = 2
    KEY = 3


class PlacedRead(NamedTuple):
    """A read by places and numbers, one for each dimension; places may be limited to extents."""

    number: int
    indices: tuple[ReadAxis | int, ...]


class ElementRead(NamedTuple):
    """A read of one element of an aux tensor, in a kernel. indices: as the callable gives them.
    placed: the same by places and numbers, if all are."""

    tensor: "_AuxTensor"
    indices: tuple[Any, ...]
    placed: PlacedRead | None

    @property
    def number(self) -> int:
        return self.tensor.number

    @property
    def is_learned(self) -> bool:
        """Whether differentiation finds the read."""
        return self.tensor.is_learned


# Gives the element that a read finds; None: it is read where the callable reads it.
Answer: TypeAlias = Callable[[ElementRead], cutlass.Numeric | None]

# is asked before a read, if not None
_answer: Answer | None = None


@contextmanager
def answered_reads(answer: Answer | None) -> Iterator[None]:
    """Context around a call of a callable in a kernel, whose reads are answered."""
    global _answer
    before, _answer = _answer, answer
    try:
        yield
    finally:
        _answer = before


@contextmanager
def answered_first(answer: Answer) -> Iterator[None]:
    """The same, inside another such context, which is asked where `answer` gives None."""
    outer = _answer

    def either(read: ElementRead) -> cutlass.Numeric | None:
        found = answer(read)
        return outer(read) if found is None and outer is not None else found

    with answered_reads(either):
        yield


# what `last_at_most` has limited, if not None
_limits: dict[int, ir.Value] | None = None


@contextmanager
def noted_limits() -> Iterator[dict[int, ir.Value]]:
    """Context around a call of a callable in a kernel: indices that `last_at_most` has limited, by
    the keys of the results."""
    global _limits
    before, _limits = _limits, {}
    try:
        yield _limits
    finally:
        _limits = before


# whether reads are marked as those of memory that nothing writes to
_merges = False


@contextmanager
def merged_reads() -> Iterator[None]:
    """Context around a call of a callable in a backward: its reads are marked as of memory that
    nothing writes to. So the compiler reads an element once for many scores. In a forward it does
    so without the mark, which can make registers spill there."""
    global _merges
    before, _merges = _merges, True
    try:
        yield
    finally:
        _merges = before


class CheckedAux(NamedTuple):
    """Aux tensors whose reads are checked, in place of the list of tensors. record: of the first
    index that is outside, Int64 (RECORD_SIZE,)."""

    tensors: tuple[cute.Tensor, ...]
    record: cute.Tensor

    @staticmethod
    def create(aux_tensors: Any, record: cute.Tensor | None) -> Any:
        """For a function of the CPU. Without a record, the tensors as they are, or None."""
        if aux_tensors is None or record is None:
            return aux_tensors
        return CheckedAux(tuple(_readable(x, record) for x in aux_tensors), record)


def _readable(tensor: cute.Tensor, record: cute.Tensor) -> cute.Tensor:
    """Replace a tensor without elements by a view of the record, so element 0 can be read."""
    is_empty = Boolean(False)
    for extent in tensor.shape:
        is_empty = is_empty | (extent == 0)
    address = cutlass.select_(is_empty, record.iterator.toint(), tensor.iterator.toint())
    # bytes in memory, where the elements are Booleans
    dtype = tensor.iterator.value_type
    pointer = cute.make_ptr(dtype, address, tensor.memspace, assumed_align=dtype.width // 8)
    return _Tensor(cute.make_tensor(pointer, tensor.layout), tensor.element_type)


def tensors_of(aux_tensors: Any) -> Sequence[cute.Tensor]:
    """The tensors in the aux argument that a kernel, or code for the CPU, passes to callables."""
    if aux_tensors is None:
        return ()
    return aux_tensors.tensors if isinstance(aux_tensors, CheckedAux) else aux_tensors


def with_tensors(aux_tensors: Any, tensors: Iterator[cute.Tensor]) -> Any:
    """The same aux argument with other tensors."""
    if isinstance(aux_tensors, CheckedAux):
        return aux_tensors._replace(tensors=tuple(tensors))
    return type(aux_tensors)(tensors)


class AuxTensors(tuple):
    """The tensors, as a callable sees them."""

    @staticmethod
    def create(aux_tensors: Any, place: Sequence[cute.TensorSSA]) -> "AuxTensors | None":
        """For one call of a callable at `place`: batch entry, head, query, key."""
        if aux_tensors is None:
            return None
        check: _Check | None = None
        if isinstance(aux_tensors, CheckedAux):
            check = _Recorder(place, aux_tensors.record)
        elif _noted is not None:
            check = _Noter(place, _noted)
        tensors = enumerate(tensors_of(aux_tensors))
        return AuxTensors(_AuxTensor.create(x, i, check, place) for i, x in tensors)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, int | slice):
            text = f"picks from aux_tensors by {i}, known in the kernel only: write a number"
            raise ModMistake(TypeError, text)
        try:
            return super().__getitem__(i)
        except IndexError as error:
            count = len(self)
            there = f"{count} tensors" if count != 1 else "one tensor"
            text = f"reads aux_tensors[{i}], and the call passes {there}"
            raise ModMistake(ValueError, text) from error

    def finish(self) -> None:
        """Called when the callable has returned. Raises NotImplementedError: it uses a tensor in a
        way that cannot be checked."""
        for check in {tensor.check for tensor in self}:
            if check is not None:
                check.finish()


class _Mode(NamedTuple):
    """A dimension of a read: its number, the index (None for a slice), and the extent."""

    dimension: int
    index: Any
    extent: Any


class _Check:
    """Inspects the indices of one call of a callable, for the CPU."""

    def __init__(self, place: Sequence[cute.TensorSSA]) -> None:
        self.place = place
        self.views: list[_AuxTensor] = []
        self.allowed: set[ir.Operation] = set()

    def view(self, tensor: cute.Tensor, *facts: Any) -> "_AuxTensor":
        # what was done with it before is not this callable's
        self.allowed.update(_users(tensor))
        view = _AuxTensor(tensor, tensor.element_type)
        view.name, view.number, view.dimensions = facts
        view.check, view.extents = self, tensor.shape
        self.views.append(view)
        return view

    def inside(self, number: int, modes: list[_Mode]) -> list[Any]:
        """The indices with which to read a tensor."""
        raise NotImplementedError

    def refuse(self, view: "_AuxTensor", user: ir.Operation) -> None:
        """Refuse a use that is no read by indices."""
        raise NotImplementedError

    def finish(self) -> None:
        for view in self.views:
            for user in _users(view):
                if user not in self.allowed and not _is_harmless(user):
                    self.refuse(view, user)


class _Noter(_Check):
    """See `notes_reads`."""

    def __init__(self, place: Sequence[cute.TensorSSA], reads: set[PlainRead]) -> None:
        super().__init__(place)
        self.reads = reads

    def inside(self, number: int, modes: list[_Mode]) -> list[Any]:
        for mode in modes:
            places = [i for i, vector in enumerate(self.place) if _is_of(mode.index, vector)]
            if not places or number == CHOSEN or mode.dimension == FLAT:
                raise NotPlainError
            self.reads.add(PlainRead(number, mode.dimension, places[0]))
        return [mode.index for mode in modes]

    def refuse(self, view: "_AuxTensor", user: ir.Operation) -> None:
        raise NotPlainError


class _Recorder(_Check):
    """See `CheckedAux`."""

    def __init__(self, place: Sequence[cute.TensorSSA], record: cute.Tensor) -> None:
        super().__init__(place)
        self.record = record

    def inside(self, number: int, modes: list[_Mode]) -> list[Any]:
        """The given indices; or 0 for all of them, after recording the first one outside."""
        indices = [_signed(mode.index) for mode in modes]
        inside = [(x >= 0) & (x < mode.extent) for x, mode in zip(indices, modes, strict=True)]
        all_inside = functools.reduce(operator.and_, inside)
        place = tuple(Int64(x[0]) for x in self.place)
        facts = [
            tuple(Int64(y) for y in (1, number, mode.dimension, x, mode.extent)) + place
            for x, mode in zip(indices, modes, strict=True)
        ]
        _write_down(self.record, all_inside, tuple(inside), tuple(facts))
        return [cutlass.select_(all_inside, x, type(x)(0)) for x in indices]

    def refuse(self, view: "_AuxTensor", user: ir.Operation) -> None:
        how = "a pointer" if user.name == "cute.get_iter" else user.name
        raise ModMistake(
            NotImplementedError,
            f"uses {view.name} by {how}, which cannot be checked on the CPU: read elements by "
            f"their indices, {view.name}[kv_idx[0]], or use CUDA tensors",
        )


@cute.jit
def _write_down(
    record: cute.Tensor,
    all_inside: Boolean,
    inside: tuple[Boolean, ...],
    facts: tuple[tuple[Int64, ...], ...],
):
    """Record the facts of the first index outside among the dimensions of one read."""
    if not all_inside:
        for dim in range_constexpr(len(inside)):
            if not inside[dim] and record[0] == 0:
                for i in range_constexpr(RECORD_SIZE):
                    record[i] = facts[dim][i]


class _AuxTensor(_Tensor):
    """A view of a tensor whose `[...]` is defined by this module."""

    name: str
    number: int
    dimensions: tuple[int, ...]
    """Of the whole tensor, those that are left in a slice."""
    check: _Check | None
    extents: tuple[Any, ...]
    is_learned: bool
    """Differentiation finds its reads."""
    place: Sequence[cute.TensorSSA]
    """Of the call, if this is a whole tensor in a kernel."""
    limited: dict[int, ReadAxis | int | None]
    """What indices were before `last_at_most`, by the hashes of their values."""

    @staticmethod
    def create(
        tensor: cute.Tensor, number: int, check: _Check | None, place: Sequence[cute.TensorSSA]
    ) -> "_AuxTensor":
        dimensions = tuple(range(cute.rank(tensor)))
        view = _AuxTensor._view(check, tensor, f"aux_tensors[{number}]", number, dimensions)
        if check is None:
            view.place = place
        return view

    @staticmethod
    def _view(check: _Check | None, tensor: cute.Tensor, *facts: Any) -> "_AuxTensor":
        if check is not None:
            return check.view(tensor, *facts)
        # not constructed: that would add to the text of a kernel
        view = _AuxTensor.__new__(_AuxTensor)
        view.__dict__.update(tensor.__dict__)
        view.name, view.number, view.dimensions = facts
        view.check, view.extents = None, ()
        view.place, view.limited = (), {}
        view.is_learned = getattr(tensor, "is_learned", False)
        return view

    def __new_from_mlir_values__(self, values: list[Any]) -> "_AuxTensor":
        """Rebuild this kind of tensor after a branch or a loop."""
        tensor = super().__new_from_mlir_values__(values)
        return _AuxTensor._view(self.check, tensor, "aux_tensors[i]", CHOSEN, self.dimensions)

    def __getitem__(self, coordinates: Any) -> Any:
        given = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        if any(isinstance(x, cute.TensorSSA) for x in given):
            text = f"indexes {self.name} by a vector: write numbers, {self.name}[kv_idx[0]]"
            raise ModMistake(ValueError, text)
        rank = len(self.dimensions)
        # one number may count the elements of all dimensions, in CuTe's order, the first one first
        is_flat = not isinstance(coordinates, tuple) and coordinates is not None and rank > 1
        if len(given) != rank and not is_flat:
            example = ("q_idx[0], " * 3 + "kv_idx[0]").split(", ")
            raise ModMistake(
                ValueError,
                f"indexes {self.name} by {len(given)}: it takes as many numbers as the tensor has "
                f"dimensions, {rank}, as in {self.name}[{', '.join(example[-rank:])}]",
            )
        indices = tuple(_wide(x) for x in given)
        if self.check is None:
            answer = None if is_flat else self._answer(indices)
            found = self._read(indices, coordinates) if answer is None else answer
        else:
            before = set(_users(self))
            found = self._read(self._inside(self.check, indices, is_flat), coordinates)
            self.check.allowed.update(set(_users(self)) - before)
        left = tuple(d for d, x in zip(self.dimensions, indices, strict=False) if x is None)
        if not left:
            return found
        # the compiler takes a slice of Booleans for one of bytes
        found = _Tensor(found, self.element_type)
        return _AuxTensor._view(self.check, found, self.name, self.number, left)

    def last_at_most(self, dimension: int, index: Any) -> Any:
        """A non-negative index, or the last one of a dimension if the index is past the end."""
        last = Int32(cute.size(self, mode=[dimension])) - 1
        number = index if isinstance(index, cutlass.Numeric) else Int32(index)
        limited = cutlass.min(number, type(number)(last))
        self.limited[key_of(limited.ir_value())] = self._place_of(index)
        if _limits is not None:
            _limits[key_of(limited.ir_value())] = number.ir_value()
        return limited

    def _answer(self, indices: tuple[Any, ...]) -> cutlass.Numeric | None:
        """The element that `answered_reads` gives for a read, if it gives one."""
        if _answer is None or not self.place or any(x is None for x in indices):
            return None
        known = [self._place_of(x) for x in indices]
        places = tuple(x for x in known if x is not None)
        placed = PlacedRead(self.number, places) if len(places) == len(known) else None
        return _answer(ElementRead(self, indices, placed))

    def load(self, indices: tuple[Any, ...]) -> cutlass.Numeric:
        """The element with these indices, which no one answers."""
        return self._read(indices, indices)

    def load_at(self, address: cute.Pointer) -> cutlass.Numeric:
        """The element at an address in the tensor."""
        dtype = self.element_type
        return dtype(llvm.load(dtype.mlir_type, address.to_llvm_ptr(), invariant=True))

    def _place_of(self, index: Any) -> ReadAxis | int | None:
        if isinstance(index, int):
            return index
        if not isinstance(index, cutlass.Numeric):
            return None
        hashed = key_of(index.ir_value())
        if hashed in self.limited:
            return self.limited[hashed]
        places = zip(ReadAxis, self.place, strict=False)
        return next((x for x, vector in places if _is_of(index, vector)), None)

    def _read(self, indices: tuple[Any, ...], given: Any) -> Any:
        place = indices if isinstance(given, tuple) else indices[0]
        is_slice = any(x is None for x in indices)
        # Booleans are bytes in memory
        is_plain = self.check is None and not is_slice and self.element_type is not Boolean
        if not _merges or not is_plain or self.is_learned:
            return super().__getitem__(place)
        return self.load_at(self.iterator + cute.crd2idx(place, self.layout))

    def _inside(self, check: _Check, indices: tuple[Any, ...], is_flat: bool) -> tuple[Any, ...]:
        if is_flat:
            size = functools.reduce(operator.mul, (Int64(extent) for extent in self.extents))
            modes = [_Mode(FLAT, indices[0], size)]
        else:
            modes = list(map(_Mode, self.dimensions, indices, self.extents))
        asked = [mode for mode in modes if mode.index is not None]
        found = iter(check.inside(self.number, asked) if asked else ())
        return tuple(x if x is None else next(found) for x in indices)


def _is_of(number: Any, vector: cute.TensorSSA) -> bool:
    """Whether a number was extracted from a vector."""
    if not isinstance(number, cutlass.Numeric):
        return False
    maker = maker_of(number.ir_value())
    if maker is None or maker.name != "vector.extract":
        return False
    return key_of(maker.operands[0]) == key_of(vector.ir_value())


def _signed(index: Any) -> cutlass.Integer:
    number = index if isinstance(index, cutlass.Integer) else Int32(index)
    return number if number.signed else Int64(number)


def _wide(index: Any) -> Any:
    """Widen an index: the compiler takes only indices of 32 and 64 bits."""
    is_narrow = isinstance(index, cutlass.Integer) and index.width < 32
    return Int32(index) if is_narrow else index


def _users(tensor: Any) -> list[ir.Operation]:
    return [use.owner.operation for use in tensor.value.uses]


def _is_harmless(user: ir.Operation) -> bool:
    if user.name == "cute.get_iter":
        # made with every tensor, whether it is used or not
        return not any(True for _ in user.results[0].value.uses)
    return user.name in METADATA or user.name in _CARRIED
