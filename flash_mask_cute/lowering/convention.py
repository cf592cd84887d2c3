"""Find the convention of a mod, torch's or CuTe's, from its number of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from flash_mask_cute.mods.signature import IN_CUTE, IN_TORCH

_TORCH, _CUTE = (
    {kind: f"({', '.join(names)})" for kind, names in of.items()} for of in (IN_TORCH, IN_CUTE)
)


def is_torch_mod(mod: Callable[..., Any], kind: str) -> bool:
    """Whether a mod must be lowered. False: it is a CuTe mod, or no mod, which later checks refuse.

    kind: "mask_mod" or "score_mod". A mod that accepts both numbers of arguments, by *args or a
    default, is CuTe's. Raises TypeError: a `@cute.jit` function takes torch's arguments."""
    in_torch, in_cute = len(IN_TORCH[kind]), len(IN_CUTE[kind])
    accepted = _accepts(mod)
    if accepted is None or accepted(in_cute) or not accepted(in_torch):
        return False
    if "_decorator_kind" in getattr(mod, "__dict__", {}):
        raise TypeError(
            f"{kind} {_name(mod)} is a @cute.jit function with the arguments of torch's "
            f"FlexAttention, {_TORCH[kind]}: a CuTe {kind} takes {_CUTE[kind]}; leave the "
            "decorator out if it is written in torch"
        )
    return True


def check_torch_mod(mod: Callable[..., Any], kind: str) -> None:
    """Raise TypeError for a mod that is not callable, or whose arguments are not torch's."""
    if not callable(mod):
        raise TypeError(f"{kind} must be callable, got {mod!r}")
    if is_torch_mod(mod, kind):
        return
    accepted = _accepts(mod)
    in_torch, in_cute = len(IN_TORCH[kind]), len(IN_CUTE[kind])
    if accepted is None or accepted(in_torch):
        return
    hint = ""
    if accepted(in_cute):
        hint = (
            f"; with the arguments {_CUTE[kind]} it is a CuTe {kind}, which flash_attn_func takes, "
            "not flex_attention"
        )
    raise TypeError(
        f"{kind} must take the arguments {_TORCH[kind]}, got "
        f"{_name(mod)}{inspect.signature(mod)}{hint}"
    )


def kind_of_torch_mod(mod: Callable[..., Any]) -> str:
    """The kind of a mod written in torch. Raises TypeError: it takes neither 4 nor 5 arguments."""
    accepted = _accepts(mod)
    if accepted is None:
        raise TypeError(f"{_name(mod)} has no signature that shows its arguments: pass kind")
    for kind, names in IN_TORCH.items():
        if accepted(len(names)):
            return kind
    raise TypeError(
        f"{_name(mod)} must take {_TORCH['mask_mod']} or {_TORCH['score_mod']}, got "
        f"{inspect.signature(mod)}"
    )


def _accepts(mod: Callable[..., Any]) -> Callable[[int], bool] | None:
    """A test for a number of positional arguments; None: the callable has no signature."""
    if type(mod) is FunctionType and not hasattr(mod, "__wrapped__"):
        # the usual case, at a tenth of the time
        code, defaults = mod.__code__, len(mod.__defaults__ or ())
        if not code.co_flags & inspect.CO_VARARGS and not code.co_kwonlyargcount:
            return lambda n: code.co_argcount - defaults <= n <= code.co_argcount
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return None

    def accepts(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    return accepts


def _name(mod: Any) -> str:
    return str(getattr(mod, "__qualname__", type(mod).__qualname__))
