"""User callables as strings, which operators take in their place."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.constant_result import assume_constant_result

Mod: TypeAlias = Callable[..., Any]

_mods: dict[str, Mod] = {}


def optional_name(mod: Mod | str | None) -> str | None:
    if mod is None or isinstance(mod, str):
        # a mod of torch has got its name where it was lowered
        return mod
    # Dynamo hands over the parts of a method, but not the method
    owner = None
    if isinstance(mod, types.MethodType):
        owner, mod = mod.__self__, mod.__func__
    # Of a function Dynamo guards the code and not what it closes over. Asked for its id, it guards
    # that, too, so that another function makes another graph.
    id(mod)
    return _name_of(mod, owner)


@assume_constant_result
def _name_of(mod: Mod, owner: object) -> str:
    """A name that stands for this object, in its present state, for as long as the process lives.

    Equal callables of two objects have two names, because one of the objects may change later.
    owner: the object of a method, or None.
    """
    if owner is not None:
        mod = types.MethodType(mod, owner)
    key = callable_key(mod)
    names = (f"{key}#{number}" for number in count())
    return next(name for name in names if _is_same(_mods.setdefault(name, mod), mod))


def _is_same(known: Mod, mod: Mod) -> bool:
    # a method is bound anew whenever it is looked up
    return known is mod or (isinstance(mod, types.MethodType) and known == mod)


def optional_mod(name: str | None) -> Mod | None:
    """The callable of that name.

    Raises:
        RuntimeError: no callable has that name in this process.
    """
    if name is None:
        return None
    mod = _mods.get(name)
    if mod is None:
        raise RuntimeError(
            f"no callable is known as {name!r}: names of score_mod, mask_mod and score_mod_bwd in "
            "operators of flash_mask_cute hold in the process that made them only; trace the call "
            "again in this one"
        )
    return mod
