"""Errors of user callables: which callable, in which line, and what to write instead."""

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import cutlass
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass.base_dsl.common import DSLRuntimeError, DSLUserCodeError

_BETWEEN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (cutlass.__file__, os.path.dirname(__file__))
)
_SCALARS = "; or compute with numbers, q_idx[0], under @cute.jit"
_TRUTH_VALUE = (
    "asks for the truth value of a vector: write & for and, | for or, ~ for not, two comparisons "
    "joined by & for a < b < c, and cute.where(condition, x, y) for a conditional expression or an "
    "if" + _SCALARS
)
# What @cute.jit makes of Python's operators and statements, by the functions that do them.
_JOINED = "joins vectors by `{}`: write {}" + _SCALARS
_CHOSEN = "chooses by a vector, in {}: write cute.where(condition, x, y)" + _SCALARS
_REWRITTEN = {
    "and_": _JOINED.format("and", "(a) & (b), also for a < b < c"),
    "or_": _JOINED.format("or", "(a) | (b)"),
    "not_": "negates a vector by `not`: write ~a, or the opposite comparison" + _SCALARS,
    "ifExp_executor": _CHOSEN.format("`x if condition else y`"),
    "if_executor": _CHOSEN.format("an `if`"),
    "while_executor": "loops while a vector is true: loop on a number, q_idx[0]",
}
_SCALAR_CONDITION = (
    "has a number for the condition of cute.where: write cutlass.select_(condition, x, y) to "
    "choose between numbers, or scalar_to_ssa(condition, cutlass.Boolean) of flash_mask_cute.utils"
)
NO_CODE = (
    "does something with a vector that the compiler has no code for; if it shifts one by << or >>: "
    "write a product or //, or shift the number, q_idx[0] >> 2; if it calls isnan: write x != x"
)


# What functions of other libraries say of a vector.
_FOREIGN = re.compile("must be real number|must be Tensor, not|loop of ufunc")
_FUNCTION = "as in cute.math.exp(x) for math.exp(x), torch.exp(x) or np.exp(x)"


class ModMistake(Exception):
    """Raised while a callable runs; `tracing` raises an error of class `kind` in its place, which
    has the callable's name before `text`."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind


def mod_name(mod: Callable[..., Any]) -> str:
    """The callable's own name; a score_mod_bwd comes bound to its first argument."""
    mod = getattr(mod, "func", mod)
    return getattr(mod, "__name__", type(mod).__name__)


def describe(
    kind: str, mod: Callable[..., Any], error: BaseException | None = None, line: str = ""
) -> str:
    """`kind name (file:line)`: the given line; else the one of the user's code that raised the
    error; else the first line of the callable."""
    file, at, _ = _split(error)
    place = line or (f"{file}:{at}" if file else _first_line(mod))
    return f"{kind} {mod_name(mod)}" + (f" ({place})" if place else "")


def _split(error: BaseException | None) -> tuple[str | None, int, list[str]]:
    """The place in the user's code that raised an error, and the compiler functions under it."""
    file, at, inside = None, 0, []
    for frame, line in traceback.walk_tb(None if error is None else error.__traceback__):
        path = frame.f_code.co_filename
        if os.path.abspath(path).startswith(_BETWEEN):
            inside.append(frame.f_code.co_name)
        else:
            file, at, inside = path, line, []
    return file, at, inside


def _first_line(mod: Callable[..., Any]) -> str | None:
    mod = getattr(mod, "func", mod)
    mod = getattr(mod, "__wrapped__", mod)
    if not hasattr(mod, "__code__"):
        mod = type(mod).__call__
        mod = getattr(mod, "__wrapped__", mod)
    code = getattr(mod, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def tracing(kind: str, mod: Callable[..., Any], has_aux: bool) -> Iterator[None]:
    """Context of a call of a user callable: errors say what it does wrong. Vectors are refused in
    `and`, `or`, `not`, `a < b < c` and conditions, where Python would treat each one as true."""
    try:
        with _vectors_in_mods():
            yield
    except ModMistake as error:
        raise error.kind(f"{describe(kind, mod, error)} {error}") from error
    except DSLUserCodeError as error:
        # what the compiler says of __index__, __float__ and __int__
        if "PHASE_DYNAMIC_INDEX" not in str(error):
            raise
        raise TypeError(
            f"{describe(kind, mod, error)} makes a Python number of a value of the kernel: "
            f"call a function of cute.math, {_FUNCTION}; convert by cutlass.Float32(x) or "
            "cutlass.Int32(x); read a table by aux_tensors[0][i], not a list"
        ) from error
    except TypeError as error:
        if _FOREIGN.search(str(error)):
            raise TypeError(
                f"{describe(kind, mod, error)} gives a value of the kernel to another library's "
                f"function ({error}): call one of cute.math, {_FUNCTION}"
            ) from error
        if "indices must be integers" in str(error):
            raise TypeError(
                f"{describe(kind, mod, error)} indexes a Python list or tuple by a vector: pass a "
                "tensor in aux_tensors instead, and read aux_tensors[0][h_idx[0]]"
            ) from error
        if not has_aux and "'NoneType'" in str(error):
            raise ValueError(
                f"{describe(kind, mod, error)} reads aux_tensors, and the call passes none"
            ) from error
        raise
    except (AttributeError, DSLRuntimeError) as error:
        text = _explain(error)
        if text is None:
            raise
        raise TypeError(f"{describe(kind, mod, error)} {text}") from error
    except (IndexError, ValueError, ir.MLIRError) as error:
        raise ValueError(f"{describe(kind, mod, error)}: {error}") from error


def _explain(error: BaseException) -> str | None:
    """Explain the use of a vector that a compiler function fails on."""
    _, _, inside = _split(error)
    if isinstance(error, AttributeError):
        return _SCALAR_CONDITION if inside[-1:] == ["where"] else None
    if inside[-1:] != ["from_mlir_type"]:
        return None
    # a vector was taken for a number
    return next((_REWRITTEN[name] for name in inside if name in _REWRITTEN), NO_CODE)


@contextmanager
def _vectors_in_mods() -> Iterator[None]:
    methods = {
        "__bool__": _refuse_truth_value,
        "__dsl_not__": _refuse_not,
        "__invert__": _inverted,
    }
    given = {name: cute.TensorSSA.__dict__.get(name) for name in methods}
    for name, method in methods.items():
        setattr(cute.TensorSSA, name, method)
    try:
        yield
    finally:
        for name, method in given.items():
            if method is None:
                delattr(cute.TensorSSA, name)
            else:
                setattr(cute.TensorSSA, name, method)


def _refuse_truth_value(vector: cute.TensorSSA) -> NoReturn:
    raise ModMistake(TypeError, _TRUTH_VALUE)


def _refuse_not(vector: cute.TensorSSA, **_: Any) -> NoReturn:
    raise ModMistake(TypeError, _REWRITTEN["not_"])


def _inverted(vector: cute.TensorSSA) -> cute.TensorSSA:
    """`~`, which the compiler's version returns as a vector that is no TensorSSA."""
    return vector ^ (True if vector.dtype is cutlass.Boolean else -1)
