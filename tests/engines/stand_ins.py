"""Stand-ins for what an engine imports and a test does not need: compiled modules, servers."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Meta(type):
    """Of classes that stand for anything: a base class, a decorator, a constant, a function."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        # a decorator without arguments
        if len(args) == 1 and not keywords and callable(args[0]):
            return args[0]
        return super().__call__()

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __getitem__(cls, index: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def stand_in(name: str) -> Any:
    return _Meta(name, (object,), {"__init__": lambda *_, **__: None, "__call__": _decorated})


def _decorated(_: Any, *args: Any, **__: Any) -> Any:
    """What a decorator with arguments makes of a function."""
    return args[0] if args and callable(args[0]) else None


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in(name)
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that nothing else finds, of packages that are named."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == x or name.startswith(f"{x}.") for x in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
