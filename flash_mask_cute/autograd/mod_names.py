"""User callables as strings, which operators take in their place."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from flash_mask_cute.lowering.pair import OutsideError, as_captured
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.constant_result import (
    VERSION,
    as_constants,
    assume_constant_result,
    of_constants,
)
from flash_mask_cute.runtime.recent import Recent

if TYPE_CHECKING:
    from flash_mask_cute.lowering.lower import LoweredMod

Mod: TypeAlias = Callable[..., Any]

# whether Dynamo guards the identity of a function where it traces id()
_IDS_ARE_GUARDED = VERSION >= "2.13"
# A graph has only names, so callables live here. One that runs keeps its own among those used last.
_MOST = 1 << 14
_mods: dict[str, Mod] = Recent(_MOST)
_names: dict[tuple[str, Any], str] = Recent(_MOST)
# the numbers in the names of a key: no name is ever made again for another object
_numbers: dict[str, Iterator[int]] = {}


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


def with_captures(name: str, mod: LoweredMod | None, called: str) -> str:
    """The name of a lowered mod, with words for messages: what its author called it, and what it
    captured, in the order of its aux tensors. Inductor writes it into a comment: a single line."""
    return name if mod is None else "\t".join((name, called, *map(str, mod.origins)))


def named_in_graph(
    error: OutsideError, score_name: str | None, mask_name: str | None, num_aux: int
) -> IndexError:
    """An index outside an aux tensor as an index outside what a mod of a graph captured, by the
    names of its mods."""
    words = {"score_mod": (score_name or "").split("\t"), "mask_mod": (mask_name or "").split("\t")}
    # the first aux tensors are the caller's
    captured = [None, *words["score_mod"][2:], *words["mask_mod"][2:]]
    place = max(error.tensor - num_aux + len(captured), 0)
    return as_captured(error, "".join(words[error.kind][1:2]), captured[place])


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
    """A name for this object in its present state. function, owner: of `as_constants`."""
    mod = of_constants(function, owner)
    key = callable_key(mod)
    # a method is bound anew whenever it is looked up
    is_method = isinstance(mod, types.MethodType)
    place = key, (id(mod.__self__), id(mod.__func__)) if is_method else id(mod)
    name = _names.get(place)
    known = None if name is None else _mods.get(name)
    # an id alone may belong to a newer object
    if name is None or not (known is mod or (is_method and known == mod)):
        name = f"{key!r}#{next(_numbers.setdefault(key, count()))}"
        _mods[name], _names[place] = mod, name
    return name


def optional_mod(name: str | None) -> Mod | None:
    """The callable of that name. Raises RuntimeError: no callable has that name in this process."""
    if name is None:
        return None
    mod = _mods.get(name.partition("\t")[0])
    if mod is None:
        raise RuntimeError(
            f"no callable is known as {name!r}: names of score_mod, mask_mod and score_mod_bwd in "
            "operators of flash_mask_cute hold in the process that made them only, for the "
            f"{_MOST // 2} that were used last; trace the call again"
        )
    return mod
