"""Check that a user callable can be compiled into a kernel: its identity and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.checks import brief

# What newer versions of flash-attn-4 pass before aux_tensors. A callable that expects it could be
# called if it has defaults, and would then take aux_tensors for it.
_FOREIGN_ARGUMENT = "seqlen_info"
_INDICES = ("b_idx", "h_idx", "q_idx", "kv_idx", "aux_tensors")
IN_CUTE = {
    "score_mod": ("score", *_INDICES),
    "mask_mod": _INDICES,
    "score_mod_bwd": ("grad", "score", *_INDICES),
}
IN_TORCH = {
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
}
"""The arguments of each kind of mod, in both conventions."""


def check_mod(name: str, value: object) -> None:
    """Raise TypeError unless it is None or a callable that can be compiled into a kernel."""
    if value is None:
        return
    mod = as_callable(name, value)
    try:
        callable_key(mod)
    except TypeError as error:
        raise TypeError(f"{name} cannot be compiled into a kernel: {error}") from error
    _check_arguments_of_mod(name, mod)


def as_callable(name: str, value: object) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError(f"{name} must be callable or None, got {brief(value)}")
    return value


def _check_arguments_of_mod(name: str, mod: Callable[..., Any]) -> None:
    expected = IN_CUTE[name]
    if isinstance(mod, FunctionType):
        # a signature takes 16 us, and some calls ask each time
        code = mod.__code__
        names = code.co_varnames[: code.co_argcount]
        is_plain = len(names) == len(expected) and code.co_kwonlyargcount == 0
        if is_plain and _FOREIGN_ARGUMENT not in names:
            return
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return  # some callables in C have no signature
    is_foreign = _FOREIGN_ARGUMENT in signature.parameters
    try:
        signature.bind(*expected)
    except TypeError:
        pass
    else:
        if not is_foreign:
            return
    called = getattr(mod, "__name__", type(mod).__name__)
    wrong = f"{name} must take the arguments ({', '.join(expected)}), got {called}{signature}"
    if name in IN_TORCH and not is_foreign:
        wrong += f"; written in torch, ({', '.join(IN_TORCH[name])})"
    if is_foreign:
        wrong += (
            f": there is no {_FOREIGN_ARGUMENT} here, the argument of newer versions of "
            "flash-attn-4; leave it out, and pass lengths that the callable reads in aux_tensors"
        )
    raise TypeError(wrong)


def in_float64(score_mod: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a CuTe score_mod that takes a score in Float64 as well as in Float32, and has a
    derivative of 1 by it. CPU calls then give it scores in Float64. Kernels have no Float64."""
    score_mod.score_dtype = "float64"  # type: ignore[attr-defined]
    return score_mod


def score_dtype(score_mod: Callable[..., Any]) -> torch.dtype:
    """The dtype in which a score_mod takes scores of CPU tensors."""
    return getattr(torch, getattr(score_mod, "score_dtype", "float32"))
