"""How a mod reaches what it captured: told in words, followed, and copied with another value."""

from __future__ import annotations

import functools
import types
from typing import Any

from flash_mask_cute.runtime.callable_key.traversal import Steps


class UnreachableError(Exception):
    """No steps lead to a value, or an object on the way to it cannot be copied."""


class Path(tuple[tuple[str, Any, Steps], ...]):
    """The way from a mod to a value, part by part, as the walk of `captures` goes it.

    Each part has a label, a name, and the steps from the object before, none if nothing leads
    there. The first part names the mod itself. As text, it is `closure variable 'ids' of causal`.
    """

    __slots__ = ()

    @staticmethod
    def named(words: str) -> Path:
        """In place of the path of what no mod holds."""
        return Path((("", words, ()),))

    def __str__(self) -> str:
        return " of ".join(f"{label} {name!r}".strip() if label else str(name)
                           for label, name, _ in reversed(self) if label or name)  # fmt: skip

    @property
    def has_steps(self) -> bool:
        return all(steps for _, _, steps in self[1:])

    def steps(self) -> Steps:
        """All steps from the mod. Raises UnreachableError where there are none."""
        if not self.has_steps:
            raise UnreachableError
        return tuple(step for _, _, steps in self[1:] for step in steps)

    def read(self, mod: Any) -> Any:
        """The value that a mod reaches now. Raises UnreachableError."""
        return followed(mod, self.steps())

    def copy(self, mod: Any, value: Any) -> Any:
        """A copy of a mod that reaches another value. Raises UnreachableError."""
        return _copy(mod, self.steps(), value)


def followed(value: Any, steps: Steps) -> Any:
    """What steps from an object lead to. Dynamo traces this."""
    for kind, name in steps:
        if kind == "cell":
            value = value.__closure__[name].cell_contents
        elif kind == "global":
            value = value.__globals__[name]
        elif kind == "default":
            value = value.__defaults__[name]
        elif kind == "keyword default":
            value = value.__kwdefaults__[name]
        elif kind == "item":
            value = value[name]
        else:
            value = getattr(value, name)
    return value


def _copy(obj: Any, steps: Steps, value: Any) -> Any:
    if not steps:
        return value
    (kind, name), held = steps[0], followed(obj, steps[:1])
    made = _copy(held, steps[1:], value)
    if isinstance(obj, types.FunctionType):
        return _copy_function(obj, kind, name, made)
    if isinstance(obj, types.MethodType):
        parts = {"__func__": obj.__func__, "__self__": obj.__self__, name: made}
        return types.MethodType(parts["__func__"], parts["__self__"])
    if isinstance(obj, functools.partial):
        parts = {"func": obj.func, "args": obj.args, "keywords": obj.keywords, name: made}
        return functools.partial(parts["func"], *parts["args"], **parts["keywords"])
    if kind == "item" and type(obj) in (tuple, list):
        return type(obj)(made if i == name else x for i, x in enumerate(obj))
    if kind == "item" and type(obj) is dict:
        return {**obj, name: made}
    if kind != "attribute" or isinstance(obj, type) or name not in getattr(obj, "__dict__", ()):
        raise UnreachableError
    if isinstance(obj, types.ModuleType):
        other: Any = types.ModuleType(obj.__name__)
    else:
        try:
            # copy.copy would leave a note in the class
            other = object.__new__(type(obj))
        except TypeError as error:
            raise UnreachableError from error
    vars(other).update({**vars(obj), name: made})
    return other


def _copy_function(
    function: types.FunctionType, kind: str, name: Any, value: Any
) -> types.FunctionType:
    scope, closure = function.__globals__, function.__closure__ or ()
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    if kind == "cell":
        closure = (*closure[:name], types.CellType(value), *closure[name + 1 :])
    elif kind == "global":
        scope = {**scope, name: value}
    elif kind == "default":
        defaults = (*defaults[:name], value, *defaults[name + 1 :])
    elif kind == "keyword default":
        keywords = {**keywords, name: value}
    else:
        raise UnreachableError
    made = types.FunctionType(function.__code__, scope, function.__name__, defaults, closure)
    made.__kwdefaults__ = keywords
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made
