"""Mods written in torch, in a region that torch.compile or torch.export traces.

Dynamo cannot follow how a mod is lowered. It calls `_resolved_mods` while it traces, and keeps the
result. It traces the steps to what the mod holds: so tensors become inputs of the graph, with
gradients, and numbers and the code of functions are guarded. Another function object with the same
code compiles nothing new.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from flash_mask_cute.autograd.made_inside import (
    MadeInside,
    made_inside,
    parts_made_inside,
)
from flash_mask_cute.autograd.mod_names import optional_name, with_captures
from flash_mask_cute.lowering.captures import CapturedTensor, Captures
from flash_mask_cute.lowering.convention import check_torch_mod, is_torch_mod
from flash_mask_cute.lowering.lower import Program, found_program, lower_mod
from flash_mask_cute.lowering.pair import CuteMods, join_mods
from flash_mask_cute.lowering.paths import Path, UnreachableError, followed
from flash_mask_cute.lowering.text import Source
from flash_mask_cute.lowering.trace import name_of
from flash_mask_cute.runtime.callable_key.traversal import Steps
from flash_mask_cute.runtime.constant_result import (
    as_constants,
    assume_constant_result,
    of_constants,
)
from flash_mask_cute.runtime.dtypes import dtype_name

# in place of the name of a CuTe mod
OF_CUTE = "cute"
# of what is computed of captured numbers alone
_MODULES: dict[str, Any] = {"operator": operator, "math": math, "torch": torch}


def mods_in_graph(
    score_mod: Any, mask_mod: Any, aux_tensors: Sequence[Tensor] | None, device: str, must: bool
) -> CuteMods:
    """As `resolve_mods` in a trace: mods of torch become names of `mod_names`, and CuTe mods stay.

    must: mods are torch's whatever they take, as in `flex_attention`. Raises NotImplementedError
    for what a mod computes of captured tensors alone, and what cannot be followed, too."""
    given = 0 if aux_tensors is None else len(aux_tensors)
    score_parts, mask_parts = parts_made_inside(score_mod), parts_made_inside(mask_mod)
    parts: tuple[Any, Any, Any, Any] = (
        *(as_constants(score_mod) if not score_parts else (score_parts[0], None)),
        *(as_constants(mask_mod) if not mask_parts else (mask_parts[0], None)),
    )
    resolved = _resolved_mods(*parts, given, device, must)
    score_name, mask_name, sources, functions, numbers, shapes = resolved
    # named where operators take them, so that Dynamo guards which objects they are
    if score_name == OF_CUTE:
        score_name = score_mod
    if mask_name == OF_CUTE:
        mask_name = mask_mod
    mods = score_parts or score_mod, mask_parts or mask_mod
    for which, steps in functions:
        # Dynamo guards the code of a function where an attribute of it is read
        followed(mods[which], (*steps, ("attribute", "__code__")))
    for which, steps, value in numbers:
        if followed(mods[which], steps) != value:
            raise RuntimeError("what a mod captured has changed while it was traced")
    for which, steps, shape in shapes:
        # numbers are compared, as Dynamo of torch 2.11 does not know `!=` of tuples with a symbol
        extents = followed(mods[which], steps).shape
        is_same = len(extents) == len(shape)
        for extent, before in zip(extents, shape, strict=False):
            is_same = is_same and extent == before
        if not is_same:
            raise RuntimeError("the shape of what a mod captured has changed while it was traced")
    aux = [] if aux_tensors is None else list(aux_tensors)
    for which, kind, place, dtype in sources:
        if kind == "constant":
            aux.append(torch.tensor(place, dtype=getattr(torch, dtype), device=device))
        elif kind == "number":
            number, form = _evaluated(mods[which], place), getattr(torch, dtype)
            if form.is_floating_point:
                # torch takes symbols of floats into a product, and makes constants of others
                aux.append(torch.ones((1,), dtype=form, device=device) * number)
            else:
                aux.append(torch.full((1,), number, dtype=form, device=device))
        else:
            tensor = followed(mods[which], place)
            tensor = tensor.detach() if kind == "detached" else tensor
            aux.append(tensor if tensor.dim() else tensor.to(device).view(1))
    return CuteMods(score_name, mask_name, aux or None)


def _evaluated(mod: Any, expression: tuple[Any, ...]) -> Any:
    """An expression of `_expression`, computed of what the mod captures now."""
    kind, given, *arguments = expression
    if kind == "value":
        return given
    if kind == "captured":
        return followed(mod, given)
    # Dynamo takes names of functions as constants, but not functions
    return getattr(_MODULES[kind], given)(*[_evaluated(mod, x) for x in arguments])


@assume_constant_result
def _resolved_mods(
    score_function: Any,
    score_owner: Any,
    mask_function: Any,
    mask_owner: Any,
    given: int,
    device: str,
    must: bool,
) -> tuple[Any, ...]:
    """Constants: names of both mods (None: there is none, or it changes nothing); where each aux
    tensor comes from; where functions are whose code is guarded; numbers that are constants."""
    given_mods = of_constants(score_function, score_owner), of_constants(mask_function, mask_owner)
    inside = tuple(made_inside(x) if isinstance(x, str) else None for x in given_mods)
    mods = tuple(x if y is None else y.mod for x, y in zip(given_mods, inside, strict=True))
    # a mod is traced by itself, not as a part of what is traced around it
    with torch._guards.tracing(None):
        return _resolve_both(mods, inside, given, device, must)


def _resolve_both(
    mods: Sequence[Any], inside: Sequence[MadeInside | None], given: int, device: str, must: bool
) -> tuple[Any, ...]:
    lowered: list[Any] = []
    called = ["", ""]
    names: list[str | None] = [None, None]
    sources: list[tuple[Any, ...]] = []
    functions: list[tuple[int, Steps]] = []
    numbers: list[tuple[int, Steps, Any]] = []
    shapes: list[tuple[int, Steps, tuple[int, ...]]] = []
    kinds = "score_mod", "mask_mod"
    for which, (mod, made, kind) in enumerate(zip(mods, inside, kinds, strict=True)):
        lowered.append(None)
        if mod is None:
            continue
        if must:
            check_torch_mod(mod, kind)
        elif not is_torch_mod(mod, kind):
            names[which] = OF_CUTE if made is None else _name_of_cute(made, kind)
            continue
        # extents are no constants of a graph
        lowered[-1] = lower_mod(mod, kind, device).written(checks=True)
        called[which] = name_of(mod)
        program, captures = found_program(mod, kind, torch.device(device))
        if captures.key is None or program.found is not None:
            raise NotImplementedError(
                f"{name_of(mod)} cannot be compiled: what it reaches cannot be followed "
                f"({captures.reason or 'tensors in places that are not walked'}); capture tensors "
                "by closure variables, attributes or globals"
            )
        steps_of = functools.partial(_steps_from_root, mod, made)
        for source in program.text.sources:
            sources.append(_resolved_source(source, program, captures, mod, which, steps_of))
        defined = frozenset() if made is None else made.functions
        functions += [
            (which, steps_of(path))
            for path in captures.functions
            if _steps(mod, path) not in defined
        ]
        numbers += [
            (which, steps_of(x.path), x.number)
            for i, x in enumerate(captures.numbers)
            if i not in program.varying
        ]
        numbers += [
            (which, steps_of(path), value) for path, value in captures.constants if path.has_steps
        ]
        if program.knows_shapes:
            shapes += [(which, steps_of(x.path), tuple(x.tensor.shape)) for x in captures.tensors]
    if lowered[0] is not None and lowered[0].is_identity:
        lowered[0] = None
        sources = [x for x in sources if x[0] != 0]
    joined = join_mods(lowered[0], lowered[1], [torch.empty(0, device="cpu")] * given)
    for which, mod in enumerate((joined.score_mod, joined.mask_mod)):
        if mod is not None:
            name = str(optional_name(mod))
            names[which] = with_captures(name, lowered[which], called[which])
    return (
        names[0], names[1],
        tuple(sources), tuple(functions), tuple(numbers), tuple(shapes),
    )  # fmt: skip


def _name_of_cute(inside: MadeInside, kind: str) -> str | None:
    if not inside.is_constant:
        raise NotImplementedError(
            f"{kind} {name_of(inside.mod)} is a CuTe mod that the compiled region defines, and "
            "holds tensors or numbers of this region: pass tensors as aux_tensors, and define the "
            "mod outside if it holds numbers"
        )
    return optional_name(inside.mod)


def _resolved_source(
    source: Source,
    program: Program,
    captures: Captures,
    mod: Callable[..., Any],
    which: int,
    steps_of: Callable[[Path], Steps],
) -> tuple[Any, ...]:
    """(number of the mod, kind, place, name of the dtype). The place is the steps to a "captured"
    or "detached" tensor, the values of a "constant", or the expression of a "number"."""
    if source.captured is not None:
        found: CapturedTensor = captures.tensors[source.captured]
        kind = "detached" if source.detached or which == 1 else "captured"
        return which, kind, steps_of(found.path), ""
    if source.constant is not None:
        tensor = source.constant
        value = tensor.tolist() if tensor.dim() else [tensor.item()]
        return which, "constant", _as_tuple(value), dtype_name(tensor.dtype)
    if source.number is not None:
        assert source.computed is not None
        given = program.module.graph.find_nodes(op="placeholder")[-len(program.varying) :]
        paths = (captures.numbers[i].path for i in program.varying)
        steps = dict(zip(given, map(steps_of, paths), strict=True))
        return which, "number", _expression(source.computed, steps), dtype_name(source.number)
    raise NotImplementedError(
        f"{name_of(mod)} computes {source.computed} of what it captured alone, which is not "
        "compiled: compute it before, outside of torch.compile, and capture the result"
    )


def _expression(node: Any, steps: Mapping[Node, Steps]) -> tuple[Any, ...]:
    """What a node computes of captured numbers: ("captured", steps), ("value", number), or (name of
    a module, name of its function, expressions ...)."""
    if not isinstance(node, Node):
        return "value", node
    if node in steps:
        return "captured", steps[node]
    function: Any = node.target
    for name, module in _MODULES.items():
        called = getattr(function, "__name__", "")
        if getattr(module, called, None) is function:
            return name, called, *(_expression(x, steps) for x in node.args)
    raise NotImplementedError(
        f"a mod computes {function} of captured numbers, which is not compiled: capture the result"
    )


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _steps_from_root(mod: Any, inside: MadeInside | None, path: Path) -> Steps:
    """Steps from a mod, or from the parts of one that the traced region defines."""
    steps = _steps(mod, path)
    return steps if inside is None else inside.steps_from_parts(steps)


def _steps(mod: Any, path: Path) -> Steps:
    """The steps of a path. Raises NotImplementedError where Dynamo can follow none."""
    try:
        return path.steps()
    except UnreachableError as error:
        raise NotImplementedError(
            f"{path} of {name_of(mod)} cannot be reached in a compiled region: capture it by a "
            "closure variable, an attribute or a global"
        ) from error
