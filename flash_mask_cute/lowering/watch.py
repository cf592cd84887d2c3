"""Whether all that a mod reaches is what it was at an earlier call, asked at each call.

The walk of `captures` takes tens of microseconds. A `Watch` compares identities of what the walk
reached, and state of tensors, in about half a microsecond for each. It follows functions, partials,
tuples and modules. Mods that reach lists, dicts, instances or classes of their own are walked at
each call.

What was made for mods is kept under their identities (`Memo`), which keeps neither them nor their
tensors alive, but for those in tuples, which live as long as the mod.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.lowering.captures import Reached
from flash_mask_cute.runtime.callable_key.code_facts import code_facts, encode_atom
from flash_mask_cute.runtime.callable_key.releases import release_of, resolves
from flash_mask_cute.runtime.plain_tensors import are_plain

_ABSENT = object()
_MAX_ENTRIES = 256
# Types of objects that have no state of the caller's; what is in a tuple is reached as well.
_IMMUTABLE = (
    tuple,
    types.MethodDescriptorType, types.WrapperDescriptorType, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
T = TypeVar("T")


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: what it makes is its own, and missing before it runs."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _UnwatchedError(Exception):
    """The mod reaches an object without an identity that shows its state."""


class Watch:
    """by_contents: contents of tensors count as well. What is compared by identity is held, or is
    alive as long as what it was reached from is unchanged and alive. Raises _UnwatchedError."""

    __slots__ = ("_functions", "_held", "_namespaces", "_partials", "_tensors")

    def __init__(self, reached: Reached, by_contents: bool) -> None:
        self._functions: list[tuple[Any, ...]] = []
        self._partials: list[tuple[Any, Any]] = []
        self._namespaces: list[tuple[Mapping[str, Any], tuple[str, ...], list[int]]] = []
        self._held: list[object] = []
        self._tensors: list[tuple[Any, tuple[Any, ...]]] = []
        seen: set[Any] = set()
        for obj, mentioned in reached:
            kind = type(obj)
            visit = id(obj), mentioned if kind is types.ModuleType else None
            if visit in seen:
                continue
            seen.add(visit)
            if are_plain(obj):
                self._tensors.append((weakref.ref(obj), _state(obj, by_contents)))
            elif kind in _IMMUTABLE or encode_atom(obj) is not None or _is_of_library(obj):
                self._held.append(obj)
            elif kind is types.FunctionType:
                self._functions.append(_function_state(obj))
            elif kind is functools.partial:
                self._partials.append((weakref.ref(obj), _parts(obj)))
            elif kind is types.ModuleType:
                scope = vars(obj)
                self._namespaces.append((scope, mentioned, _identities(scope, mentioned)))
                self._held.append(obj)
            else:
                raise _UnwatchedError

    @property
    def tensors(self) -> set[int]:
        """Identities of the captured tensors, if all are alive."""
        return {id(ref()) for ref, _ in self._tensors}

    def holds(self) -> bool:
        """Whether nothing has changed that the walk of captures would report."""
        try:
            for ref, code, cells, defaults, names, values in self._functions:
                function = ref()
                if (
                    function is None
                    or function.__code__ is not code
                    or function.__dict__
                    or function.__kwdefaults__
                ):
                    return False
                if [id(cell.cell_contents) for cell in function.__closure__ or ()] != cells:
                    return False
                if [id(x) for x in function.__defaults__ or ()] != defaults:
                    return False
                if names:
                    scope = function.__globals__
                    if [id(scope.get(name, _ABSENT)) for name in names] != values:
                        return False
        except ValueError:
            # an empty cell
            return False
        for ref, (dtype, shape, stride, device, requires_grad, version) in self._tensors:
            tensor = ref()
            if (
                tensor is None
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.device != device
                or tensor.requires_grad is not requires_grad
                or (version is not None and tensor._version != version)
            ):
                return False
        for ref, parts in self._partials:
            made = ref()
            if made is None or made.__dict__ or _parts(made) != parts:
                return False
        return all(_identities(scope, names) == values for scope, names, values in self._namespaces)


def _state(tensor: Tensor, by_contents: bool) -> tuple[Any, ...]:
    version = tensor._version if by_contents and not tensor.is_inference() else None
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad, version,
    )  # fmt: skip


def _parts(made: functools.partial[Any]) -> Any:
    if made.__dict__:
        raise _UnwatchedError
    return id(made.func), [id(x) for x in made.args], [(k, id(x)) for k, x in made.keywords.items()]


def _identities(scope: Mapping[str, Any], names: Iterable[str]) -> list[int]:
    return [id(scope.get(name, _ABSENT)) for name in names]


def _function_state(function: types.FunctionType) -> tuple[Any, ...]:
    facts = code_facts(function.__code__)
    if function.__dict__ or function.__kwdefaults__ or facts.imports:
        raise _UnwatchedError
    try:
        cells = [id(cell.cell_contents) for cell in function.__closure__ or ()]
    except ValueError as error:
        raise _UnwatchedError from error
    # of a library's, the release determines the globals
    is_own = release_of(function.__globals__.get("__name__")) is None
    names = facts.global_names if is_own else ()
    return (
        weakref.ref(function), function.__code__, cells,
        [id(x) for x in function.__defaults__ or ()], names,
        _identities(function.__globals__, names),
    )  # fmt: skip


def _is_of_library(obj: Any) -> bool:
    if isinstance(obj, types.BuiltinFunctionType):
        return obj.__self__ is None or isinstance(obj.__self__, types.ModuleType)
    if type(obj) is types.FunctionType:
        module = obj.__globals__.get("__name__")
        return release_of(module) is not None and resolves(obj, module, obj.__qualname__)
    if type(obj) is types.ModuleType:
        return release_of(obj.__name__) is not None
    return (
        isinstance(obj, type)
        and release_of(obj.__module__) is not None
        and "<locals>" not in obj.__qualname__
    )


# -- what was made for mods -----------------------------------------------------------------------


class MemoEntry(Generic[T]):
    """What was made for mods (value, without the aux tensors), and how to see that it serves."""

    __slots__ = ("_aux", "_makes_tensors", "_watches", "anchors", "value")

    def __init__(
        self, value: T, watches: Sequence[Watch], aux_tensors: Sequence[Tensor] | None,
        makes_tensors: bool,
    ) -> None:  # fmt: skip
        self.value = value
        self._watches = tuple(watches)
        self._makes_tensors = makes_tensors
        captured = {x for watch in watches for x in watch.tensors}
        self._aux: Any = None
        if aux_tensors is not None:
            self._aux = [
                weakref.ref(x) if id(x) in captured else functools.partial(_itself, x)
                for x in aux_tensors
            ]
        self.anchors: tuple[Any, ...] = ()

    def holds(self) -> bool:
        # what a captured graph reads must outlive it, and what is kept here may be dropped
        if self._makes_tensors and is_capturing():
            return False
        # not by all(): a generator costs as much as a watch
        for watch in self._watches:  # noqa: SIM110
            if not watch.holds():
                return False
        return True

    def aux_tensors(self) -> list[Tensor] | None:
        return None if self._aux is None else [ref() for ref in self._aux]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Memo(Generic[T]):
    """`MemoEntry` by keys that hold identities of mods; an entry goes with any of its objects."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, MemoEntry[T]] = {}
        self.get: Callable[[Hashable], MemoEntry[T] | None] = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, key: Hashable, entry: MemoEntry[T], objects: Iterable[object]) -> None:
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        entries = self._entries
        entry.anchors = tuple(weakref.ref(x, lambda _: entries.pop(key, None)) for x in objects)
        entries[key] = entry


# Mods that cannot be watched.
_unwatched: weakref.WeakSet[Any] = weakref.WeakSet()


def watches_of(mods: Iterable[tuple[Reached, bool]]) -> list[Watch] | None:
    """mods: what they reach, and whether contents of tensors count. None: one cannot be watched, or
    a CUDA graph is captured, whose tensors are its own."""
    if is_capturing():
        return None
    watches = []
    for reached, by_contents in mods:
        mod = reached[0][0]
        if not isinstance(mod, types.FunctionType | functools.partial) or mod in _unwatched:
            return None
        try:
            watches.append(Watch(reached, by_contents))
        except _UnwatchedError:
            _unwatched.add(mod)
            return None
    return watches
