"""Functions that Dynamo calls while it traces, and callables as their arguments."""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

_Function = TypeVar("_Function", bound=Callable[..., Any])

VERSION = TorchVersion(torch.__version__)
# what Dynamo of each version hands over; a tuple, as Dynamo of some does not know unions
_CONSTANTS = (types.FunctionType, types.BuiltinFunctionType, functools.partial, type, type(None))
# Dynamo hands over other objects, and guards which they are
_HANDS_OBJECTS = VERSION >= "2.12"


def assume_constant_result(function: _Function) -> _Function:
    """Decorator: torch.compile calls the function while tracing, and keeps the result.

    torch's decorator of this name sets the same attribute, but imports torch._dynamo for seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def as_constants(mod: Any) -> tuple[Any, Any]:
    """A callable as the arguments that Dynamo can hand over to a marked function: a function and
    the object whose method it is, or None and a callable object.

    Before torch 2.12 Dynamo does not hand over objects. But it traces id() of them, which stands
    for them, and then guards which objects they are.
    """
    if isinstance(mod, types.MethodType):
        return mod.__func__, mod.__self__ if _HANDS_OBJECTS else id(mod.__self__)
    if isinstance(mod, _CONSTANTS):
        return mod, None
    return None, mod if _HANDS_OBJECTS else id(mod)


def of_constants(function: Any, owner: Any) -> Any:
    """The callable of `as_constants`. The traced region keeps it alive."""
    if owner is None:
        return function
    if not _HANDS_OBJECTS:
        owner = ctypes.cast(owner, ctypes.py_object).value
    return owner if function is None else types.MethodType(function, owner)


def is_symbol(value: Any) -> bool:
    """Whether a float is an input of the graph that is traced. In code that Dynamo traces, its type
    is that of any float."""
    if isinstance(value, torch.SymFloat):
        return True
    found: list[bool] = []
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime(_note_symbol)
    return bool(found)


def _note_symbol(context: Any) -> None:
    """Called by Dynamo in `is_symbol`."""
    from torch._dynamo.variables import ConstantVariable, SymNodeVariable

    value, found = (
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        for name in ("value", "found")
    )
    if isinstance(value, SymNodeVariable):
        found.items.append(ConstantVariable.create(True))
