"""Mods written in torch, in a region traced by torch.compile or torch.export.

Dynamo cannot follow the lowering of a mod. While it traces, it calls `_told_of_mods` and keeps the
result. Then it traces the paths to what the mod holds. So tensors become inputs of the graph, with
gradients, and numbers and the code of functions are guarded. Another function object with the same
code, such as a training loop makes in each step, compiles nothing new.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.autograd.mod_names import optional_name
from flash_mask_cute.flex.captures import CapturedTensor, Captures, Path, described
from flash_mask_cute.flex.convention import check_torch_mod, is_torch_mod
from flash_mask_cute.flex.lower import Program, found_program, lower_mod, with_checks
from flash_mask_cute.flex.text import Source
from flash_mask_cute.flex.together import CuteMods, put_together
from flash_mask_cute.flex.trace import name_of
from flash_mask_cute.runtime.constant_result import assume_constant_result

# A step from an object to what it holds: what to take of it, and a name or a number.
_Steps = tuple[tuple[str, Any], ...]
# in place of the name of a CuTe mod
OF_CUTE = "cute"


def mods_in_graph(
    score_mod: Any, mask_mod: Any, aux_tensors: Sequence[Tensor] | None, device: str, must: bool
) -> CuteMods:
    """As `as_cute_mods`, for a traced call: mods then become names of `mod_names`.

    must: treat mods as torch's for any number of arguments, as `flex_attention` does.

    Raises:
        TypeError, NotImplementedError: as `as_cute_mods`. Values computed only from captured
            tensors, paths that Dynamo cannot follow, and torch functions defined in the traced
            region are refused.
    """
    given = 0 if aux_tensors is None else len(aux_tensors)
    # CuTe mods may be made inside
    told_score = None if _is_made_inside(score_mod, must) else score_mod
    told_mask = None if _is_made_inside(mask_mod, must) else mask_mod
    told = _told_of_mods(*_parts(told_score), *_parts(told_mask), given, device, must)
    score_name, mask_name, sources, functions, numbers = told
    # named here, so that Dynamo guards which object it is
    if told_score is None or score_name == OF_CUTE:
        score_name = optional_name(score_mod)
    if told_mask is None or mask_name == OF_CUTE:
        mask_name = optional_name(mask_mod)
    mods = score_mod, mask_mod
    for which, steps in functions:
        id(_reached(mods[which], steps).__code__)
    for which, steps, value in numbers:
        if _reached(mods[which], steps) != value:
            raise RuntimeError("what a mod captured has changed while it was traced")
    aux = [] if aux_tensors is None else list(aux_tensors)
    for which, steps, value, dtype, is_detached in sources:
        if which is None:
            aux.append(torch.tensor(value, dtype=getattr(torch, dtype), device=device))
        else:
            tensor = _reached(mods[which], steps)
            tensor = tensor.detach() if is_detached else tensor
            aux.append(tensor if tensor.dim() else tensor.to(device).view(1))
    return CuteMods(
        score_name,
        mask_name,
        aux or None,
    )


def _parts(mod: Any) -> tuple[Any, Any]:
    """A function and the object that it is bound to; Dynamo hands over these parts for methods
    only."""
    return (mod.__func__, mod.__self__) if isinstance(mod, types.MethodType) else (mod, None)


def _is_made_inside(mod: Any, must: bool) -> bool:
    """Whether the traced region defines a function; a torch mod defined there is refused.

    Dynamo has no function object for such a function, and does not know its globals.
    """
    if not isinstance(mod, types.FunctionType):
        return False
    try:
        mod.__globals__["__name__"]
    except AttributeError:
        if not must:
            return True
        raise NotImplementedError(
            "a score_mod or mask_mod is defined inside of the region that torch.compile traces: "
            "define it, and make its block mask, outside, and pass them in"
        ) from None
    return False


def _reached(value: Any, steps: _Steps) -> Any:
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


@assume_constant_result
def _told_of_mods(
    score_mod: Any,
    score_owner: Any,
    mask_mod: Any,
    mask_owner: Any,
    given: int,
    device: str,
    must: bool,
) -> tuple[Any, ...]:
    """Facts about both mods, as constants for the trace.

    They are the names of both mods (None: there is no mod, or it changes nothing), the source of
    each aux tensor, the paths of functions whose code is guarded, and numbers that are
    constants.
    """
    # a mod is traced by itself, not as a part of what is traced around it
    if score_owner is not None:
        score_mod = types.MethodType(score_mod, score_owner)
    if mask_owner is not None:
        mask_mod = types.MethodType(mask_mod, mask_owner)
    with torch._guards.tracing(None):
        return _told(score_mod, mask_mod, given, device, must)


def _told(score_mod: Any, mask_mod: Any, given: int, device: str, must: bool) -> tuple[Any, ...]:
    lowered: list[Any] = []
    names: list[str | None] = [None, None]
    sources: list[tuple[Any, ...]] = []
    functions: list[tuple[int, _Steps]] = []
    numbers: list[tuple[int, _Steps, Any]] = []
    for which, (mod, kind) in enumerate(((score_mod, "score_mod"), (mask_mod, "mask_mod"))):
        lowered.append(None)
        if mod is None:
            continue
        if must:
            check_torch_mod(mod, kind)
        elif not is_torch_mod(mod, kind):
            names[which] = OF_CUTE
            continue
        # extents are no constants of a graph
        lowered[-1] = with_checks(lower_mod(mod, kind, device))
        program, captures = found_program(mod, kind, torch.device(device))
        if captures.key is None or program.found is not None:
            raise NotImplementedError(
                f"{name_of(mod)} cannot be compiled: what it reaches cannot be followed "
                f"({captures.reason or 'tensors in places that are not walked'}); capture tensors "
                "by closure variables, attributes or globals"
            )
        for source in program.sources:
            sources.append(_told_of_source(source, program, captures, mod, which))
        functions += [(which, _steps(mod, path)) for path in captures.functions]
        numbers += [(which, _steps(mod, x.path), x.number) for x in captures.numbers]
        numbers += [
            (which, _steps(mod, path), value)
            for path, value in captures.constants
            if path[-1][0] in ("closure variable", "global", "default of argument")
        ]
    if lowered[0] is not None and lowered[0].is_identity:
        lowered[0] = None
        sources = [x for x in sources if x[0] != 0]
    mods = put_together(lowered[0], lowered[1], [torch.empty(0)] * given)
    return (
        names[0] or optional_name(mods.score_mod), names[1] or optional_name(mods.mask_mod),
        tuple(sources), tuple(functions), tuple(numbers),
    )  # fmt: skip


def _told_of_source(
    source: Source,
    program: Program,
    captures: Captures,
    mod: Callable[..., Any],
    which: int,
) -> tuple[Any, ...]:
    """(number of the mod, steps, None, None, is detached), or (None, (), value, dtype, False)."""
    if source.captured is not None:
        found: CapturedTensor = captures.tensors[source.captured]
        is_detached = source.detached or which == 1
        return which, _steps(mod, found.path), None, None, is_detached
    if source.constant is not None:
        tensor = source.constant
        value = tensor.tolist() if tensor.dim() else [tensor.item()]
        return None, (), _as_tuple(value), _dtype_name(tensor.dtype), False
    if source.number is not None:
        return None, (), (program.number_of(source, captures),), _dtype_name(source.number), False
    raise NotImplementedError(
        f"{name_of(mod)} computes {source.computed} of what it captured alone, which is not "
        "compiled: compute it before, outside of torch.compile, and capture the result"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _steps(mod: Any, path: Path) -> _Steps:
    """A path of `find_captures` in steps that Dynamo can follow. Raises NotImplementedError if
    there are none."""
    steps: list[tuple[str, Any]] = []
    value: Any = mod
    # the first step names the mod itself
    for label, name in path[1:]:
        step: tuple[str, Any] | None = None
        while isinstance(value, types.MethodType | functools.partial):
            if isinstance(value, types.MethodType):
                is_owner = label == "object"
                attribute = "__self__" if is_owner else "__func__"
                steps.append(("attribute", attribute))
                value = getattr(value, attribute)
                if is_owner:
                    break
            else:
                attribute = {"item": "args", "argument": "keywords"}.get(label, "func")
                steps.append(("attribute", attribute))
                value = getattr(value, attribute)
        if label == "object":
            continue
        if isinstance(value, types.FunctionType):
            step = _step_of_function(value, label, name)
        elif type(value) in (tuple, list, dict) and label in ("item", "argument"):
            step = "item", name
        elif label == "attribute" and isinstance(name, str):
            step = "attribute", name
        if step is None:
            raise NotImplementedError(
                f"{described(path)} of {name_of(mod)} cannot be reached in a compiled region: "
                "capture it by a closure variable, an attribute or a global"
            )
        steps.append(step)
        value = _reached(value, (step,))
    return tuple(steps)


def _step_of_function(
    function: types.FunctionType, label: str, name: Any
) -> tuple[str, Any] | None:
    code = function.__code__
    if label == "closure variable":
        return "cell", code.co_freevars.index(name)
    if label == "global":
        return "global", name
    if label == "default of argument":
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        return ("default", names.index(name)) if name in names else ("keyword default", name)
    return None
