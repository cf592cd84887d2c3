"""A mod with other numbers: the objects on the paths to them are copied, the rest is shared."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from flash_mask_cute.lowering.captures import Path


class NoCopyError(Exception):
    """The holder of a number cannot be copied."""


def with_numbers(
    mod: Callable[..., Any], numbers: Iterable[tuple[Path, Any]]
) -> Callable[..., Any]:
    """A copy of a mod that reaches other values through the paths of `find_captures`.

    Raises:
        NoCopyError: an object on a path cannot be copied.
    """
    tree: dict[Any, Any] = {}
    for path, number in numbers:
        branch = tree
        # the first step names the mod itself
        for step in path[1:-1]:
            branch = branch.setdefault(step, {})
        branch[path[-1]] = number
    return _copy(mod, tree) if tree else mod


def _copy(value: Any, tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if isinstance(value, types.FunctionType):
        return _copy_function(value, tree)
    if isinstance(value, types.MethodType):
        steps, rest = _split(tree, "object")
        owner = _copy(value.__self__, steps["self"]) if steps else value.__self__
        return types.MethodType(_copy(value.__func__, rest) if rest else value.__func__, owner)
    if isinstance(value, functools.partial):
        return _copy_partial(value, tree)
    if type(value) in (tuple, list):
        items = _split(tree, "item", whole=True)[0]
        return type(value)(_copy(x, items[i]) if i in items else x for i, x in enumerate(value))
    if type(value) is dict:
        items = _split(tree, "item", whole=True)[0]
        return {k: _copy(x, items[k]) if k in items else x for k, x in value.items()}
    if isinstance(value, types.ModuleType):
        made: Any = types.ModuleType(value.__name__)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        try:
            # copy.copy would leave a note in the class
            made = object.__new__(type(value))
        except TypeError as error:
            raise NoCopyError from error
    else:
        raise NoCopyError
    attributes = _split(tree, "attribute", whole=True)[0]
    state = dict(vars(value))
    for name, branch in attributes.items():
        if name not in state:
            raise NoCopyError
        state[name] = _copy(state[name], branch)
    vars(made).update(state)
    return made


def _split(
    tree: dict[Any, Any], label: str, whole: bool = False
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The branches of a label by their names, and the remaining ones; no names if `whole`."""
    chosen = {name: branch for (kind, name), branch in tree.items() if kind == label}
    rest = {step: branch for step, branch in tree.items() if step[0] != label}
    if whole and rest:
        raise NoCopyError
    return chosen, rest


def _copy_function(function: types.FunctionType, tree: dict[Any, Any]) -> types.FunctionType:
    cells, rest = _split(tree, "closure variable")
    namespace, rest = _split(rest, "global")
    defaults, _ = _split(rest, "default of argument", whole=True)
    code = function.__code__
    closure = tuple(
        types.CellType(_copy(cell.cell_contents, cells[name])) if name in cells else cell
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    )
    scope = function.__globals__
    if namespace:
        scope = {**scope, **{name: _copy(scope[name], x) for name, x in namespace.items()}}
    made = types.FunctionType(code, scope, function.__name__, None, closure)
    given = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(given) :]
    made.__defaults__ = tuple(
        _copy(x, defaults[name]) if name in defaults else x
        for name, x in zip(names, given, strict=True)
    )
    made.__kwdefaults__ = {
        name: _copy(x, defaults[name]) if name in defaults else x
        for name, x in (function.__kwdefaults__ or {}).items()
    }
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _copy_partial(value: functools.partial[Any], tree: dict[Any, Any]) -> functools.partial[Any]:
    items, rest = _split(tree, "item")
    keywords, rest = _split(rest, "argument")
    args = [_copy(x, items[i]) if i in items else x for i, x in enumerate(value.args)]
    named = {k: _copy(x, keywords[k]) if k in keywords else x for k, x in value.keywords.items()}
    return functools.partial(_copy(value.func, rest) if rest else value.func, *args, **named)
