"""What a user callable gets as `aux_tensors`, and how it reads them.

In kernels an aux tensor is a `cute.Tensor` that takes any integer as an index. On the CPU every read
is checked besides: an index outside the tensor is written down for the caller, and the element at 0
is read in its place, so that no memory outside the tensor is. A use that cannot be checked, such as
a read by pointer, is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, range_constexpr
from cutlass._mlir import ir
from cutlass.cute.tensor import _Tensor

from flash_mask_cute.core.mod_errors import ModMistake

# Of the record that checked reads fill: 1 once an index was outside, number of the tensor,
# dimension, index, extent, batch entry, head, query, key. Int64.
RECORD_SIZE = 9
# What may be asked about a tensor beside its elements.
METADATA = {"cute.get_layout", "cute.size"}
# What hands a tensor on to another that is checked, too.
_CARRIED = {"scf.condition", "scf.for", "scf.while", "scf.yield"}


class CheckedAux(NamedTuple):
    """Aux tensors whose reads are checked, and the record, Int64 (RECORD_SIZE,), of the first index
    that is outside. Code for the CPU passes it in place of the list of tensors."""

    tensors: tuple[cute.Tensor, ...]
    record: cute.Tensor

    @staticmethod
    def of(aux_tensors: Any, record: Any) -> "CheckedAux | None":
        """Called at the head of a function for the CPU; aux_tensors may be None."""
        if aux_tensors is None:
            return None
        return CheckedAux(tuple(_readable(x, record) for x in aux_tensors), record)


def _readable(tensor: cute.Tensor, record: cute.Tensor) -> cute.Tensor:
    """A tensor without elements is laid over the record: there is something to read at 0."""
    is_empty = Boolean(False)
    for extent in tensor.shape:
        is_empty = is_empty | (extent == 0)
    address = cutlass.select_(is_empty, record.iterator.toint(), tensor.iterator.toint())
    # bytes in memory, where the elements are Booleans
    dtype = tensor.iterator.value_type
    pointer = cute.make_ptr(dtype, address, tensor.memspace, assumed_align=dtype.width // 8)
    return _Tensor(cute.make_tensor(pointer, tensor.layout), tensor.element_type)


def tensors_of(aux_tensors: Any) -> Sequence[cute.Tensor]:
    """The tensors of what a kernel, or code for the CPU, passes to callables."""
    if aux_tensors is None:
        return ()
    return aux_tensors.tensors if isinstance(aux_tensors, CheckedAux) else aux_tensors


def with_tensors(aux_tensors: Any, tensors: Iterator[cute.Tensor]) -> Any:
    """The same with other tensors."""
    if isinstance(aux_tensors, CheckedAux):
        return aux_tensors._replace(tensors=tuple(tensors))
    return type(aux_tensors)(tensors)


class AuxTensors(tuple):
    """The tensors, as a callable sees them."""

    @staticmethod
    def of(aux_tensors: Any, place: Sequence[cutlass.Integer]) -> "AuxTensors | None":
        """For one call of a callable, which is for `place`: batch entry, head, query, key."""
        if aux_tensors is None:
            return None
        check = _Check(aux_tensors.record, place) if isinstance(aux_tensors, CheckedAux) else None
        tensors = enumerate(tensors_of(aux_tensors))
        return AuxTensors(_AuxTensor.of(x, i, check) for i, x in tensors)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, int | slice):
            text = f"picks from aux_tensors by {i}, which is known in the kernel only: write numbers"
            raise ModMistake(TypeError, text)
        try:
            return super().__getitem__(i)
        except IndexError as error:
            count = len(self)
            there = f"{count} tensors" if count != 1 else "one tensor"
            text = f"reads aux_tensors[{i}], and the call passes {there}"
            raise ModMistake(ValueError, text) from error

    def finish(self) -> None:
        """Called when the callable has returned.

        Raises:
            NotImplementedError: reads are checked, and the callable does with a tensor what cannot
                be.
        """
        for check in {tensor.check for tensor in self}:
            if check is not None:
                check.finish()


class _Check:
    """Checks the indices of one call of a callable."""

    def __init__(self, record: cute.Tensor, place: Sequence[cutlass.Integer]) -> None:
        self.record = record
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

    def inside(self, number: int, dimension: int, index: Any, extent: Any) -> Any:
        """The index, or 0, after it was written down, where it is outside."""
        if not isinstance(index, cutlass.Integer):
            index = Int32(index)
        if not index.signed:
            index = Int64(index)
        is_inside = (index >= 0) & (index < extent)
        facts = (1, number, dimension, index, extent, *self.place)
        _write_down(self.record, is_inside, tuple(Int64(x) for x in facts))
        return cutlass.select_(is_inside, index, type(index)(0))

    def finish(self) -> None:
        for view in self.views:
            for user in _users(view):
                if user not in self.allowed and not _is_harmless(user):
                    how = "a pointer" if user.name == "cute.get_iter" else user.name
                    raise ModMistake(
                        NotImplementedError,
                        f"uses {view.name} by {how}, which cannot be checked on the CPU: read "
                        f"elements by their indices, {view.name}[kv_idx[0]], or use CUDA tensors",
                    )


@cute.jit
def _write_down(record: cute.Tensor, is_inside: Boolean, facts: tuple[Int64, ...]):
    if not is_inside:
        if record[0] == 0:
            for i in range_constexpr(RECORD_SIZE):
                record[i] = facts[i]


class _AuxTensor(_Tensor):
    """A view of a tensor: what its `[...]` takes, and does, is this module's."""

    name: str
    number: int
    dimensions: tuple[int, ...]
    """Of the whole tensor, those that are left in a slice."""
    check: _Check | None
    extents: tuple[Any, ...]

    @staticmethod
    def of(tensor: cute.Tensor, number: int, check: _Check | None) -> "_AuxTensor":
        dimensions = tuple(range(cute.rank(tensor)))
        return _AuxTensor._view(check, tensor, f"aux_tensors[{number}]", number, dimensions)

    @staticmethod
    def _view(check: _Check | None, tensor: cute.Tensor, *facts: Any) -> "_AuxTensor":
        if check is not None:
            return check.view(tensor, *facts)
        # not constructed: that would add to the text of a kernel
        view = _AuxTensor.__new__(_AuxTensor)
        view.__dict__.update(tensor.__dict__)
        view.name, view.number, view.dimensions = facts
        view.check, view.extents = None, ()
        return view

    def __new_from_mlir_values__(self, values: list[Any]) -> "_AuxTensor":
        """The same kind of tensor that a branch or a loop has chosen."""
        tensor = super().__new_from_mlir_values__(values)
        return _AuxTensor._view(self.check, tensor, "aux_tensors[i]", -1, self.dimensions)

    def __getitem__(self, coordinates: Any) -> Any:
        given = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        if any(isinstance(x, cute.TensorSSA) for x in given):
            text = f"indexes {self.name} by a vector: write numbers, {self.name}[kv_idx[0]]"
            raise ModMistake(ValueError, text)
        if len(given) != len(self.dimensions):
            rank, example = len(self.dimensions), ("q_idx[0], " * 3 + "kv_idx[0]").split(", ")
            raise ModMistake(
                ValueError,
                f"indexes {self.name} by {len(given)}: it takes as many numbers as the tensor has "
                f"dimensions, {rank}, as in {self.name}[{', '.join(example[-rank:])}]",
            )
        indices = tuple(_wide(x) for x in given)
        if self.check is None:
            found = super().__getitem__(indices)
        else:
            found = self._checked(self.check, indices)
        left = tuple(d for d, x in zip(self.dimensions, indices, strict=True) if x is None)
        if not left:
            return found
        # the compiler takes a slice of Booleans for one of bytes
        found = _Tensor(found, self.element_type)
        return _AuxTensor._view(self.check, found, self.name, self.number, left)

    def _checked(self, check: _Check, indices: tuple[Any, ...]) -> Any:
        inside = tuple(
            x if x is None else check.inside(self.number, dimension, x, extent)
            for x, dimension, extent in zip(indices, self.dimensions, self.extents, strict=True)
        )
        before = set(_users(self))
        found = super().__getitem__(inside)
        check.allowed.update(set(_users(self)) - before)
        return found


def _wide(index: Any) -> Any:
    """The compiler takes indices of 32 and 64 bits only."""
    is_narrow = isinstance(index, cutlass.Integer) and index.width < 32
    return Int32(index) if is_narrow else index


def _users(tensor: Any) -> list[ir.Operation]:
    return [use.owner.operation for use in tensor.value.uses]


def _is_harmless(user: ir.Operation) -> bool:
    if user.name == "cute.get_iter":
        # made with every tensor, whether it is used or not
        return not any(True for _ in user.results[0].value.uses)
    return user.name in METADATA or user.name in _CARRIED
