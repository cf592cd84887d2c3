"""User callables as strings, which operators take in their place."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

import torch

from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.constant_result import (
    VERSION,
    as_constants,
    assume_constant_result,
    of_constants,
)

Mod: TypeAlias = Callable[..., Any]

# whether Dynamo guards which function it is of which it traces id()
_IDS_ARE_GUARDED = VERSION >= "2.13"
_mods: dict[str, Mod] = {}


def optional_name(mod: Mod | str | None) -> str | None:
    if mod is None or isinstance(mod, str):
        # a mod of torch has got its name where it was lowered
        return mod
    function, owner = as_constants(mod)
    # Of a function Dynamo guards the code and not what it closes over. Another function has to make
    # another graph.
    if _IDS_ARE_GUARDED:
        id(function)
    elif torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime(_guard_function)
    return _name_of(function, owner)


def _guard_function(context: Any) -> None:
    """Called by Dynamo in `optional_name`: guard which object `function` is."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    local = context.get_local("function")
    source = local._i_will_not_complain_if_bc_breaks_VariableTracker().realize().source
    # none of what the traced region defines
    if source is not None:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


@assume_constant_result
def _name_of(function: Any, owner: Any) -> str:
    """A name that stands for this object, in its present state, for as long as the process lives.

    Equal callables of two objects have two names, because one of the objects may change later.
    function, owner: of `as_constants`.
    """
    mod = of_constants(function, owner)
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
