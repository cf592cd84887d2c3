"""Replacement of torch's `flex_attention` by this package's."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as torch_module

from flash_mask_cute.flex.attention import flex_attention

_NAME = "flex_attention"
_of_torch = torch_module.flex_attention
# Packages that import torch's function by name, in which it is replaced without being asked.
_LIBRARIES = "transformers", "diffusers"
_OWN = __name__.partition(".")[0]


class _PatchedName(NamedTuple):
    """Where an object holds a function under a name."""

    owner: Any
    name: str
    value: Any


class patch_flex_attention:
    """Replace `torch.nn.attention.flex_attention.flex_attention` by this package's function.

    Called as a function, the replacement is permanent; `with patch_flex_attention():` restores
    torch's function at the end.

    Code that imported torch's function by name keeps its own reference. The patch rebinds these
    in transformers, in diffusers, and in the given modules. It also replaces functions that
    torch.compile made of it, if modules, their classes or single objects of these classes hold
    them. All are restored at the end.

    modules: modules, or packages, which then stand for their submodules, too.

    Raises:
        TypeError: one of modules is no module.

    Warns:
        UserWarning: other modules hold torch's function by name. They keep it, and are named.

    Example:
        >>> from flash_mask_cute import patch_flex_attention
        >>> with patch_flex_attention():
        ...     pass  # what calls torch's function here runs on kernels of this package
    """

    def __init__(self, *modules: types.ModuleType) -> None:
        for module in modules:
            if not isinstance(module, types.ModuleType):
                raise TypeError(f"modules must be modules, got {module!r}")
        packages = *_LIBRARIES, *(module.__name__ for module in modules)
        loaded = _loaded()
        self._rebound_in = [x for name, x in loaded.items() if _is_in(name, packages)]
        # what is given may have been loaded under no name
        self._rebound_in += [x for x in modules if all(x is not y for y in self._rebound_in)]
        self._before: Any = torch_module.flex_attention
        self._places = [
            place for module in self._rebound_in for place in _places_of(module, _of_torch)
        ]
        setattr(torch_module, _NAME, flex_attention)
        for place in self._places:
            _put(place, flex_attention)
        _warn_of_others(loaded, self._rebound_in)

    def __enter__(self) -> patch_flex_attention:
        return self

    def __exit__(self, *_: object) -> None:
        setattr(torch_module, _NAME, self._before)
        for place in reversed(self._places):
            setattr(place.owner, place.name, place.value)
        if not self._places:
            return
        # what was compiled in between, from a name that was rebound
        for module in self._rebound_in:
            for place in _places_of(module, flex_attention):
                if _function_of(place.value) is not flex_attention:
                    _put(place, torch.compile(_of_torch))


def _loaded() -> dict[str, types.ModuleType]:
    """The modules that may hold torch's function by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and not _is_in(name, ("torch", _OWN))
    }


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _places_of(module: types.ModuleType, function: Any) -> Iterator[_PatchedName]:
    """Where a module holds a function, or what torch.compile made of it."""
    owners: list[Any] = [module]
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            owners.append(value)
            # a class may keep the only object of it
            owners += [x for x in vars(value).values() if type(x) is value]
    for owner in owners:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if _is_made_of(value, function):
                yield _PatchedName(owner, name, value)


def _is_made_of(value: Any, function: Any) -> bool:
    found = _function_of(value)
    if found is function:
        return True
    return (
        isinstance(found, types.FunctionType)
        and found.__dict__.get("_torchdynamo_orig_callable") is function
    )


def _function_of(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def _put(place: _PatchedName, function: Any) -> None:
    is_static = isinstance(place.value, staticmethod)
    setattr(place.owner, place.name, staticmethod(function) if is_static else function)


def _warn_of_others(loaded: dict[str, types.ModuleType], but: list[types.ModuleType]) -> None:
    others = sorted(
        name
        for name, module in loaded.items()
        if all(module is not x for x in but)
        and any(_is_made_of(value, _of_torch) for value in list(vars(module).values()))
    )
    if others:
        warnings.warn(
            f"torch's flex_attention was imported by name before in {', '.join(others)}, which "
            f"will call torch's: pass such modules, patch_flex_attention({others[0]}), or import "
            "them after the patch",
            UserWarning,
            stacklevel=3,
        )
