"""Mods that a compiled region defines itself.

Dynamo has no function object of what the region defines. `parts_made_inside` builds a function with
the same code, and with placeholders for the tensors and symbols in its closure, so that it can be
lowered. The traced region gets the values themselves, and hands them to the graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch

from flash_mask_cute.lowering.captures import find_captures
from flash_mask_cute.lowering.trace import name_of
from flash_mask_cute.runtime.callable_key.traversal import Steps

_REFUSED = "refused"
_known: dict[str, MadeInside] = {}
_numbers = count()


class MadeInside(NamedTuple):
    """mod: of the same code. places: by the steps to a value, its place among the parts. functions:
    steps to the functions that the region defines, whose code never differs. is_constant: it holds
    no tensors and no symbols."""

    mod: Callable[..., Any]
    places: dict[Steps, int]
    functions: frozenset[Steps]
    is_constant: bool

    def steps_from_parts(self, steps: Steps) -> Steps:
        """Steps from the mod as steps from its parts. Raises NotImplementedError if impossible."""
        for length in range(len(steps), -1, -1):
            place = self.places.get(steps[:length])
            if place is not None:
                return (("item", place), *steps[length:])
        raise NotImplementedError(
            f"what {name_of(self.mod)} reaches by {steps} cannot be followed in a compiled "
            "region that defines the mod: capture it by a closure variable"
        )


def parts_made_inside(value: Any) -> list[Any]:
    """A key for `made_inside` and the values that the function holds; nothing if the traced region
    does not define it. Raises NotImplementedError if it holds what cannot be followed."""
    found: list[Any] = []
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime(_look)
    if found and found[0] == _REFUSED:
        raise NotImplementedError(found[1])
    return found


def made_inside(key: str) -> MadeInside:
    """What a key of `parts_made_inside` stands for, once."""
    return _known.pop(key)


def _look(context: Any) -> None:
    """Called by Dynamo in `parts_made_inside`."""
    from torch._dynamo.variables import ConstantVariable

    value, found = (
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        for name in ("value", "found")
    )
    reader = _Reader(context._i_will_not_complain_if_bc_breaks_InstructionTranslator())
    if not reader.is_made_inside(value):
        return
    try:
        mod = reader.read(value, ())
        reader.add_globals(mod)
    except _UnknownPartError as error:
        found.items += [ConstantVariable.create(x) for x in (_REFUSED, str(error))]
        return
    key = f"made inside {next(_numbers)}"
    _known[key] = MadeInside(mod, reader.places, frozenset(reader.functions), reader.is_constant)
    found.items += [ConstantVariable.create(key), *reader.parts]


class _UnknownPartError(Exception):
    """What the region holds cannot be followed."""


class _Reader:
    """Reads what Dynamo knows of a value. parts: values found, in the form of Dynamo."""

    def __init__(self, translator: Any) -> None:
        self.parts: list[Any] = []
        self.places: dict[Steps, int] = {}
        self.functions: dict[Steps, types.FunctionType] = {}
        self.is_constant = True
        self._translator = translator

    def is_made_inside(self, value: Any) -> bool:
        from torch._dynamo.variables import functions

        if isinstance(value, functions.FunctoolsPartialVariable) and value.source is None:
            return True
        return isinstance(value, functions.NestedUserFunctionVariable)

    def read(self, value: Any, steps: Steps) -> Any:
        """A Python object that stands for the value."""
        from torch._dynamo import variables

        value = value.realize()
        if self.is_made_inside(value):
            if isinstance(value, variables.FunctoolsPartialVariable):
                return self._partial(value, steps)
            return self._function(value, steps)
        is_sequence = isinstance(value, variables.TupleVariable | variables.ListVariable)
        if is_sequence and value.source is None:
            items = [self.read(x, (*steps, ("item", i))) for i, x in enumerate(value.items)]
            return items if isinstance(value, variables.ListVariable) else tuple(items)
        # 0 is the key
        self.places[steps] = len(self.parts) + 1
        self.parts.append(value)
        if isinstance(value, variables.TensorVariable | variables.SymNodeVariable):
            self.is_constant = False
        if isinstance(value, variables.TensorVariable):
            return _placeholder(value.proxy.node.meta["example_value"])
        if isinstance(value, variables.SymNodeVariable):
            return value.sym_num.node.hint
        if isinstance(value, variables.UserMethodVariable):
            # torch 2.15 renamed it
            owner = value.im_self if hasattr(value, "im_self") else value.obj
            if hasattr(owner, "value"):
                return types.MethodType(value.fn, owner.value)
        for known in ("value", "fn"):
            # objects and functions from outside
            if value.source is not None and hasattr(value, known):
                return getattr(value, known)
        try:
            return value.as_python_constant()
        except NotImplementedError:
            where = " of ".join(f"{label} {name}" for label, name in reversed(steps))
            raise _UnknownPartError(
                f"a score_mod or mask_mod is defined inside of the region that torch.compile "
                f"traces, and holds a {value.python_type().__name__} ({where}): it may hold "
                "tensors, numbers, functions, tuples and lists of these, and objects from outside; "
                "capture the tensors or numbers themselves, or define the mod, and make its block "
                "mask, outside, and pass them in"
            ) from None

    def add_globals(self, mod: Any) -> None:
        """Find the values that functions from inside reach by globals of their modules."""
        captures = find_captures(mod)
        paths = [x.path for x in captures.tensors] + [x.path for x in captures.numbers]
        paths += [*captures.functions, *(path for path, _ in captures.constants)]
        names = {
            name for path in paths for *_, steps in path for kind, name in steps if kind == "global"
        }
        for steps, function in self.functions.items():
            for name in sorted(names & function.__globals__.keys()):
                self._add_global(function, name, (*steps, ("global", name)))

    def _add_global(self, function: types.FunctionType, name: str, steps: Steps) -> None:
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables.base import VariableTracker

        module = function.__globals__["__name__"]
        source = AttrSource(self._translator.import_source(module), name)
        value = VariableTracker.build(self._translator, function.__globals__[name], source)
        self.places[steps] = len(self.parts) + 1
        self.parts.append(value.realize())

    def _partial(self, value: Any, steps: Steps) -> Any:
        args = [
            self.read(x, (*steps, ("attribute", "args"), ("item", i)))
            for i, x in enumerate(value.args)
        ]
        keywords = {
            name: self.read(x, (*steps, ("attribute", "keywords"), ("item", name)))
            for name, x in value.keywords.items()
        }
        function = self.read(value.func, (*steps, ("attribute", "func")))
        return functools.partial(function, *args, **keywords)

    def _function(self, value: Any, steps: Steps) -> types.FunctionType:
        cells = []
        closure = value.closure.realize().items if value.closure else ()
        for i, cell in enumerate(closure):
            contents = self._translator.output.side_effects.load_cell(cell)
            if contents is value:
                raise _UnknownPartError(f"{value.get_name()} calls itself, which no kernel can")
            cells.append(types.CellType(self.read(contents, (*steps, ("cell", i)))))
        function = types.FunctionType(
            value.get_code(), value.f_globals, value.get_name(), closure=tuple(cells)
        )
        if value.defaults:
            function.__defaults__ = tuple(
                self.read(x, (*steps, ("default", i)))
                for i, x in enumerate(value.defaults.realize().items)
            )
        if value.kwdefaults:
            given = value.kwdefaults.realize().keys_as_python_constant()
            function.__kwdefaults__ = {
                name: self.read(x, (*steps, ("keyword default", name))) for name, x in given.items()
            }
        self.functions[steps] = function
        return function


def _placeholder(example: torch.Tensor) -> torch.Tensor:
    """A tensor of this form whose elements share one place."""
    shape = [x if isinstance(x, int) else x.node.hint for x in example.shape]
    single = torch.zeros((), dtype=example.dtype, device=example.device)
    return single.expand(shape).detach()
