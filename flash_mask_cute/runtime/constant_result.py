"""`torch.compiler.assume_constant_result` without the import of torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def assume_constant_result(function: _Function) -> _Function:
    """Decorator: torch.compile calls the function while tracing, and keeps the result.

    torch's decorator of this name sets one attribute of the function, which Dynamo reads when it
    traces a call. But it first imports torch._dynamo, which takes seconds that a program without
    torch.compile need not wait. A test compares the attribute with torch's.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
