"""Check that tensors are memory whose address a kernel can be given.

A subclass may hold no memory of its own, or memory that stands for something else. torch hands
operators to its `__torch_dispatch__`; a kernel would read whatever lies at its address. Tensors of
a transform (vmap, grad, jvp) are wrappers too, but have the type of plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
PLAIN_TYPES: tuple[type, ...] = (Tensor, torch.nn.Parameter)


class NotTakenApartError(TypeError):
    """A tensor subclass does not take our operators apart."""


class NotPlainError(TypeError):
    """An argument is of a tensor subclass. argument: its name; kind: the name of its type."""

    def __init__(self, argument: str, kind: str) -> None:
        super().__init__(
            f"{argument} must be a plain torch.Tensor, got a {kind}: kernels read memory, and "
            "a subclass may have none"
        )
        self.argument = argument
        self.kind = kind

    @contextmanager
    def named_unless_from(self, implementations: Container[CodeType]) -> Iterator[None]:
        """Context around operators on the same arguments. An error of the subclass becomes a
        TypeError that names the argument; errors of operator implementations stay as they are."""
        try:
            yield
        except Exception as error:
            frames = walk_tb(error.__traceback__)
            if any(frame.f_code in implementations for frame, _ in frames):
                raise
            reason = error.__cause__ if isinstance(error, NotTakenApartError) else error
            raise NotTakenApartError(
                f"{self.argument} is a {self.kind}, which does not take operators of "
                f"flash_mask_cute apart: {reason}"
            ) from reason


def are_plain(*tensors: Any) -> bool:
    """Whether all have the type of plain tensors; wrappers of a transform have it, too."""
    return all(type(x) in PLAIN_TYPES for x in tensors)


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is no readable memory. Raises NotPlainError: a TypeError; the tensor is
    of a subclass; NotImplementedError: it belongs to a transform, such as vmap."""
    if type(tensor) not in PLAIN_TYPES:
        raise NotPlainError(name, type(tensor).__name__)
    of_transforms = torch._C._functorch
    # autograd.grad has a vmap of its own
    if of_transforms.is_legacy_batchedtensor(tensor) or of_transforms.is_batchedtensor(tensor):
        raise NotImplementedError(
            f"{name} is a batch that vmap made, as torch.autograd.grad(is_grads_batched=True) and "
            "jacobian(vectorize=True) do, which is not supported: call it for one after the other; "
            f"got shape {tuple(tensor.shape)}"
        )
    if of_transforms.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(f"{name} belongs to a transform of torch.func: not supported")


_num_modes = torch._C._len_torch_dispatch_stack


def kind_refused(check: Callable[..., None], *arguments: Any) -> NotPlainError | None:
    """The error of a check that met a tensor subclass; other errors are raised. Dispatch modes do
    not see what the check asks."""
    try:
        if _num_modes() > 0:
            with _disable_current_modes():
                check(*arguments)
        else:
            check(*arguments)
    except NotPlainError as error:
        return error
    return None


def outside_inference_mode(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorator: run the function outside inference mode, so that its tensors may be written again
    later, and show their changes."""

    @functools.wraps(function)
    def call(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **keywords)
        with torch.inference_mode(False):
            return function(*args, **keywords)

    return call


def own_memory(tensor: Tensor) -> Tensor:
    """A plain view of a subclass tensor over ordinary memory; everything else unchanged."""
    kind = type(tensor)
    is_memory = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    if kind in PLAIN_TYPES or not is_memory:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
