"""What a mod reaches beyond its arguments: tensors, numbers, and a key for everything else.

The walk is the one that caches kernels (`runtime/callable_key`), with two differences. A tensor
counts by its place, dtype and rank: the document ids of the next batch give the same structure. A
number counts by its place and type: what was lowered for one value may serve others.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.lowering.paths import Path
from flash_mask_cute.runtime.callable_key.code_facts import code_facts
from flash_mask_cute.runtime.callable_key.releases import release_of, resolves
from flash_mask_cute.runtime.callable_key.traversal import Steps, Traversal

Reached = Sequence[tuple[Any, tuple[str, ...]]]
"""All objects that a walk met, the mod first; names: mentioned by the function that reached it."""


class CapturedTensor(NamedTuple):
    tensor: Tensor
    path: Path


class CapturedNumber(NamedTuple):
    """is_shared: other paths reach the same object."""

    number: int | float
    path: Path
    is_shared: bool = False


class Captures(NamedTuple):
    """key: None if the walk cannot follow the mod; `reason` says why. functions: the mod among
    them. constants: None, bools and strings."""

    key: str | None
    tensors: tuple[CapturedTensor, ...]
    numbers: tuple[CapturedNumber, ...]
    reason: str = ""
    follows_forward: bool = False
    functions: tuple[Path, ...] = ()
    constants: tuple[tuple[Path, Any], ...] = ()
    reached: Reached = ()


def find_captures(mod: Callable[..., Any], follows_forward: bool = False) -> Captures:
    """follows_forward: the mod calls modules, so the walk also follows their `forward`."""
    walk = _Walk(follows_forward)
    try:
        walk.root(mod)
    except TypeError as error:
        return Captures(None, tuple(walk.tensors), (), str(error), follows_forward)
    numbers = walk.found_numbers()
    return Captures(
        walk.digest(), tuple(walk.tensors), numbers, "", follows_forward, tuple(walk.functions),
        tuple(walk.constants), walk.reached,
    )  # fmt: skip


class _Walk(Traversal):
    def __init__(self, follows_forward: bool) -> None:
        super().__init__()
        self.tensors: list[CapturedTensor] = []
        self.numbers: list[CapturedNumber] = []
        self.functions: list[Path] = []
        self.constants: list[tuple[Path, Any]] = []
        self.reached: list[tuple[Any, tuple[str, ...]]] = []
        self._follows_forward = follows_forward
        self._numbered: dict[int, int] = {}
        self._modules: dict[tuple[int, tuple[str, ...] | None], int] = {}
        # numbers found below an object, from and to, and the objects that are met again
        self._ranges: dict[int, tuple[int, int]] = {}
        self._shared: set[int] = set()

    def found_numbers(self) -> tuple[CapturedNumber, ...]:
        shared = {i for obj in self._shared for i in range(*self._ranges.get(obj, (0, 0)))}
        return tuple(x._replace(is_shared=i in shared) for i, x in enumerate(self.numbers))

    def _first_visit(self, obj: object) -> bool:
        is_first = super()._first_visit(obj)
        if not is_first:
            self._shared.add(id(obj))
        return is_first

    def _value(self, obj: object) -> None:
        self.reached.append((obj, self._mentioned))
        if isinstance(obj, Tensor):
            self._tensor(obj)
        elif type(obj) is int or type(obj) is float:
            self._emit(b"number", type(obj).__name__)
            self.numbers.append(CapturedNumber(obj, Path(self._trail)))
        else:
            if type(obj) is types.FunctionType:
                self.functions.append(Path(self._trail))
            elif obj is None or isinstance(obj, bool | str):
                self.constants.append((Path(self._trail), obj))
            before = len(self.numbers)
            if type(obj) is types.MethodType or type(obj) is functools.partial:
                self._bound(obj)
            else:
                super()._value(obj)
            if len(self.numbers) > before:
                self._ranges.setdefault(id(obj), (before, len(self.numbers)))

    def _tensor(self, tensor: Tensor) -> None:
        number = self._numbered.get(id(tensor))
        if number is None:
            number = self._numbered[id(tensor)] = len(self.tensors)
            self.tensors.append(CapturedTensor(tensor, Path(self._trail)))
        self._emit(b"tensor", str(number), str(tensor.dtype), str(tensor.dim()), tensor.device.type)

    def _bound(self, obj: types.MethodType | functools.partial[Any]) -> None:
        """What is bound to a Python function is reached by the names that its code mentions."""
        function = obj.__func__ if isinstance(obj, types.MethodType) else obj.func
        outer, code = self._mentioned, _code_of(function)
        if code is not None:
            self._mentioned = code_facts(code).mentioned
        super()._value(obj)
        self._mentioned = outer

    def _other(self, obj: object) -> None:
        if isinstance(obj, torch.nn.Module):
            self._nn_module(obj)
        elif isinstance(obj, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self._emit(b"operator", str(obj), str(torch.__version__))
        else:
            super()._other(obj)

    def _nn_module(self, module: torch.nn.Module) -> None:
        """State that the function mentions of a user's module, or all state of a library module."""
        cls = type(module)
        # a library may make a class of a user's, as fully_shard does; its state is the user's
        is_found = resolves(cls, cls.__module__, cls.__qualname__)
        release = release_of(cls.__module__) if is_found else None
        names = None if release else self._names_of(module)
        # another function may mention other names of the same module
        visit = id(module), names
        if visit in self._modules:
            self._emit(b"ref", str(self._modules[visit]))
            self._shared.add(id(module))
            return
        self._modules[visit] = len(self._modules)
        self._open(b"nn.Module")
        self._emit(b"class", cls.__module__, cls.__qualname__, release or "", str(module.training))
        for name, value in _state_of(module, names):
            self._named("attribute", name, value, *_steps_to(module, name, value))
        self._close()

    def _names_of(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Names that the function mentions, and those that methods among them mention."""
        wanted = list(self._mentioned)
        if self._follows_forward or not self._mentioned:
            wanted.append("forward")
        names: dict[str, None] = {}
        while wanted:
            name = wanted.pop()
            if name not in names:
                names[name] = None
                code = _code_of(getattr(type(module), name, None))
                wanted.extend(code_facts(code).mentioned if code is not None else ())
        return tuple(sorted(names))


def _steps_to(module: torch.nn.Module, name: str, value: Any) -> Steps:
    """The steps from a module to its state, or to the code of a method or a property."""
    attribute = getattr(type(module), name, None)
    if value is getattr(attribute, "fget", attribute) and value is not None:
        of_property = (("attribute", "fget"),) if isinstance(attribute, property) else ()
        return ("attribute", "__class__"), ("attribute", name), *of_property
    return (("attribute", name),)


def _code_of(attribute: object) -> types.CodeType | None:
    if isinstance(attribute, property):
        attribute = attribute.fget
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    return attribute.__code__ if isinstance(attribute, types.FunctionType) else None


# What a module keeps beside its own state.
_BOOKKEEPING = frozenset(vars(torch.nn.Module()))


def _state_of(module: torch.nn.Module, names: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    found: dict[str, Any] = {
        name: value for name, value in vars(module).items() if name not in _BOOKKEEPING
    }
    for group in (module._parameters, module._buffers, module._modules):
        found.update(group)
    if names is not None:
        found = {name: found[name] for name in names if name in found}
        for name in names:
            attribute = getattr(type(module), name, None)
            if name not in found and _code_of(attribute) is not None:
                own = getattr(attribute, "fget", attribute)
                if release_of(getattr(own, "__module__", None)) is None:
                    found[name] = own
    yield from sorted(found.items())
