"""Whether all that a mod reaches is what it was at an earlier call, asked at each call.

The walk of `captures` takes tens of microseconds. A `Watch` remembers what the walk read, and
where: cells, defaults and globals of functions, attributes of own modules, and state of tensors. It
then compares identities, which takes about half a microsecond for a function or a tensor. It
follows functions, partials, tuples and modules, and what cannot change. Mods that reach lists,
dicts, instances or classes of their own are not watched, and are walked at each call.

What was made for mods is kept under the identities of the mods (`Kept`). Neither mods nor their
tensors are kept alive by it, but for those in tuples, which live as long as the mod.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.runtime.callable_key.code_facts import code_facts, encode_atom
from flash_mask_cute.runtime.callable_key.releases import release_of, resolves
from flash_mask_cute.runtime.plain_tensors import are_plain

_ABSENT = object()
_MAX_KEPT = 256
# Objects that have no state of the caller's.
_LEAVES = (
    types.MethodDescriptorType, types.WrapperDescriptorType, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
T = TypeVar("T")


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: what it makes is its own, and not there before it runs."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _UnwatchedError(Exception):
    """The mod reaches an object that no identity tells the state of."""


class Watch:
    """Raises _UnwatchedError if it cannot follow the mod.

    by_contents: contents of tensors count as well.
    """

    __slots__ = ("_functions", "_held", "_namespaces", "_partials", "_tensors")

    def __init__(self, mod: Callable[..., Any], by_contents: bool) -> None:
        walk = _Walk()
        if not isinstance(mod, types.FunctionType | functools.partial):
            raise _UnwatchedError
        walk.value(mod, ())
        self._functions = walk.functions
        self._partials = walk.partials
        self._namespaces = walk.namespaces
        self._held = walk.held
        self._tensors = [(weakref.ref(x), _state(x, by_contents)) for x in walk.tensors.values()]

    @property
    def tensors(self) -> set[int]:
        """Identities of the captured tensors, if all are alive."""
        return {id(ref()) for ref, _ in self._tensors}

    def holds(self) -> bool:
        """Whether nothing has changed that the walk of captures would tell."""
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
        for made, parts in self._partials:
            if _parts(made()) != parts:
                return False
        return all(
            [id(scope.get(name, _ABSENT)) for name in names] == values
            for scope, names, values in self._namespaces
        )


def _state(tensor: Tensor, by_contents: bool) -> tuple[Any, ...]:
    version = tensor._version if by_contents and not tensor.is_inference() else None
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad, version,
    )  # fmt: skip


def _parts(made: functools.partial[Any] | None) -> Any:
    if made is None or made.__dict__:
        return None
    return id(made.func), [id(x) for x in made.args], [(k, id(x)) for k, x in made.keywords.items()]


class _Walk:
    """Finds what `captures._Walk` reads. What is compared by identity is held, or is alive as long
    as what it was reached from is unchanged and alive."""

    def __init__(self) -> None:
        self.functions: list[tuple[Any, ...]] = []
        self.partials: list[tuple[Any, Any]] = []
        self.namespaces: list[tuple[dict[str, Any], tuple[str, ...], list[int]]] = []
        self.tensors: dict[int, Tensor] = {}
        self.held: list[object] = []
        self._seen: set[object] = set()

    def value(self, obj: Any, mentioned: tuple[str, ...]) -> None:
        if are_plain(obj):
            self.tensors[id(obj)] = obj
        elif type(obj) is types.FunctionType:
            self._function(obj)
        elif type(obj) is functools.partial:
            self._partial(obj, mentioned)
        elif type(obj) is types.ModuleType:
            self._module(obj, mentioned)
        elif type(obj) is tuple:
            self.held.append(obj)
            for item in obj:
                self.value(item, mentioned)
        elif encode_atom(obj) is not None or isinstance(obj, _LEAVES) or _is_of_library(obj):
            self.held.append(obj)
        else:
            raise _UnwatchedError

    def _function(self, function: types.FunctionType) -> None:
        module = function.__globals__.get("__name__")
        release = release_of(module)
        if release is not None and resolves(function, module, function.__qualname__):
            self.held.append(function)
            return
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        code = function.__code__
        facts = code_facts(code)
        if function.__dict__ or function.__kwdefaults__ or facts.imports:
            raise _UnwatchedError
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:
            raise _UnwatchedError from error
        defaults = function.__defaults__ or ()
        # the release tells the globals
        names = () if release is not None else facts.global_names
        values = [function.__globals__.get(name, _ABSENT) for name in names]
        ids = ([id(x) for x in found] for found in (cells, defaults, values))
        of_cells, of_defaults, of_values = ids
        self.functions.append(
            (weakref.ref(function), code, of_cells, of_defaults, names, of_values)
        )
        for found in (*cells, *defaults, *values):
            if found is not _ABSENT:
                self.value(found, facts.mentioned)

    def _partial(self, made: functools.partial[Any], mentioned: tuple[str, ...]) -> None:
        parts = _parts(made)
        if parts is None:
            raise _UnwatchedError
        self.partials.append((weakref.ref(made), parts))
        for found in (made.func, *made.args, *made.keywords.values()):
            self.value(found, mentioned)

    def _module(self, module: types.ModuleType, mentioned: tuple[str, ...]) -> None:
        self.held.append(module)
        if release_of(module.__name__) is not None:
            return
        visit = id(module), mentioned
        if visit in self._seen:
            return
        self._seen.add(visit)
        scope = vars(module)
        values = [scope.get(name, _ABSENT) for name in mentioned]
        self.namespaces.append((scope, mentioned, [id(x) for x in values]))
        for found in values:
            if found is not _ABSENT:
                self.value(found, mentioned)


def _is_of_library(obj: Any) -> bool:
    if isinstance(obj, types.BuiltinFunctionType):
        return obj.__self__ is None or isinstance(obj.__self__, types.ModuleType)
    return (
        isinstance(obj, type)
        and release_of(obj.__module__) is not None
        and "<locals>" not in obj.__qualname__
    )


# -- what was made for mods -----------------------------------------------------------------------


class Known(Generic[T]):
    """What was made for mods, and how to see that it still serves.

    value: without the aux tensors.
    """

    __slots__ = ("_anchors", "_aux", "_makes_tensors", "_watches", "value")

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
        self._anchors: tuple[Any, ...] = ()

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

    def drop_with(self, objects: Iterable[object], drop: Callable[[Any], None]) -> None:
        self._anchors = tuple(weakref.ref(x, drop) for x in objects)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Kept(Generic[T]):
    """`Known` by keys that hold identities of mods; an entry goes with any of its objects."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Known[T]] = {}
        self.get: Callable[[Hashable], Known[T] | None] = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def keep(self, key: Hashable, known: Known[T], objects: Iterable[object]) -> None:
        if len(self._known) >= _MAX_KEPT:
            self._known.clear()
        known.drop_with(objects, functools.partial(_drop, self._known, key))
        self._known[key] = known


def _drop(known: dict[Hashable, Any], key: Hashable, _: Any) -> None:
    known.pop(key, None)


# Mods of which no watch could be made.
_unwatched: weakref.WeakSet[Any] = weakref.WeakSet()


def watches_of(mods: Iterable[tuple[Callable[..., Any], bool]]) -> list[Watch] | None:
    """Watches of mods, each with whether the contents of its tensors count; None if one of them
    cannot be watched, or during the capture of a CUDA graph, whose tensors are its own."""
    if is_capturing():
        return None
    watches = []
    for mod, by_contents in mods:
        if not isinstance(mod, types.FunctionType | functools.partial) or mod in _unwatched:
            return None
        try:
            watches.append(Watch(mod, by_contents))
        except _UnwatchedError:
            _unwatched.add(mod)
            return None
    return watches
