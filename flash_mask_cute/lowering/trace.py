"""Tracing of a torch mod on 0-d tensors without contents, to a graph of ATen operators.

Control flow on a value, `.item()` and the like have no value to read, and raise.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mask_cute.lowering.values import NotLowerable
from flash_mask_cute.runtime.checks import refuse_jit_trace

_TORCH = str(Path(torch.__file__).parent)
INDEX_NAMES = ("b_idx", "h_idx", "q_idx", "kv_idx")
# By which a mod asks how large a tensor is: what it does may then depend on that.
_CLASS: Any = Tensor
_ASKS_SHAPE = {
    _CLASS.shape.__get__,
    _CLASS.ndim.__get__,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.__len__,
    Tensor.is_contiguous,
    torch.numel,
}
_INSTEAD = "write torch.where(condition, x, y), torch.minimum, and & for `and`"
# Methods that make a Python number of a tensor, and what to write in their place.
_AS_NUMBER = {
    Tensor.__float__: (
        "makes a Python float of a tensor, as functions of math do: write the function of torch, "
        "torch.exp(x) for math.exp(x)"
    ),
    Tensor.__index__: (
        "indexes a Python list or tuple by a tensor, such as b, h, q_idx or kv_idx: capture a "
        "tensor instead, table = torch.tensor(values) before the call, and read table[h]"
    ),
}
# Signs of an error's text, and what was done.
_HINTS = (
    ("data-dependent", f"decides by a value, which a kernel has for each score: {_INSTEAD}"),
    ("item()", f"takes a number out of a tensor, which has none while it is traced: {_INSTEAD}"),
    ("_local_scalar_dense", f"takes a number out of a tensor, which has none: {_INSTEAD}"),
    (".numpy()", "leaves torch for numpy: write it with functions of torch"),
)


class Trace(NamedTuple):
    """module: its placeholders are the score, if there is one, the four indices, and then the
    numbers that are not constants.

    knows_shapes: the mod asked for the shape of a tensor. calls_modules: it called an nn.Module.
    """

    module: GraphModule
    knows_shapes: bool
    calls_modules: bool


def name_of(mod: Callable[..., Any]) -> str:
    """The name of a callable and the place of its definition, for messages."""
    function = getattr(mod, "func", mod)
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(mod).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def trace(
    mod: Callable[..., Any],
    bind: Callable[[Sequence[Any]], Callable[..., Any]],
    numbers: Sequence[int | float],
    is_score: bool,
    device: torch.device,
    decompositions: dict[Any, Callable[..., Any]],
) -> Trace:
    """Trace bind(numbers), which is the mod, for any numbers of these types.

    Raises NotImplementedError, naming the mod and its line; also if it needs the value of such a
    number.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    refuse_jit_trace()
    fakes, symbols = _symbols_of(numbers) if numbers else (nullcontext(), [])
    with fakes:
        given = [torch.zeros((), dtype=torch.int32, device=device) for _ in INDEX_NAMES]
        if is_score:
            given.insert(0, torch.zeros((), dtype=torch.float32, device=device))
    notes = _Notes(mod)

    def call(*arguments: Any) -> Any:
        with notes, _RefusedWrites(mod):
            return bind(arguments[len(given) :])(*arguments[: len(given)])

    mode: Any = "symbolic" if numbers else "fake"
    make = make_fx(call, decompositions, mode, _allow_non_fake_inputs=True)
    hook = register_module_forward_pre_hook(notes.on_module)
    try:
        with torch.no_grad(), TransformGetItemToIndex(), fx_traceback.preserve_node_meta():
            module = make(*given, *symbols)
    except NotLowerable:
        raise
    except Exception as error:
        raise _explained(mod, error) from error
    finally:
        hook.remove()
    module.graph.eliminate_dead_code()
    return Trace(module, notes.asked_shape, notes.called_module)


def _symbols_of(numbers: Sequence[int | float]) -> tuple[AbstractContextManager[Any], list[Any]]:
    """Unknown numbers of the same types, and the context in which to make tensors beside them."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with env.ignore_fresh_unbacked_symbols():
        symbols = [
            env.create_unbacked_symint() if isinstance(x, int) else env.create_unbacked_symfloat()
            for x in numbers
        ]
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), symbols


class _Notes(TorchFunctionMode):
    """Records every torch function that a mod calls, and the line of the call."""

    def __init__(self, mod: Callable[..., Any]) -> None:
        super().__init__()
        self._mod = mod
        self.asked_shape = False
        self.called_module = False

    def on_module(self, *_: Any) -> None:
        self.called_module = True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKS_SHAPE:
            self.asked_shape = True
        if func is Tensor.__getitem__:
            args = (args[0], _as_tensors(args[1]))
        line = _line_of_caller(sys._getframe(1))
        fx_traceback.set_stack_trace([line])
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if func not in _AS_NUMBER:
                raise
            raise NotLowerable(f"{name_of(self._mod)} at {line} {_AS_NUMBER[func]}") from error


class _RefusedWrites(TorchDispatchMode):
    """Refuses operators that write, before they do: a captured tensor is the caller's own."""

    def __init__(self, mod: Callable[..., Any]) -> None:
        super().__init__()
        self._mod = mod

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            line = _line_of_caller(sys._getframe(1))
            name = str(func.__name__).partition(".")[0]
            raise NotLowerable(
                f"{name_of(self._mod)}: aten.{name}{f' at {line}' if line else ''} writes into a "
                "tensor: compute a new value instead"
            )
        return func(*args, **(kwargs or {}))


def _as_tensors(indices: Any) -> Any:
    """Unknown numbers can replace an index only as tensors."""
    if isinstance(indices, torch.SymInt):
        number: Any = indices
        return torch.scalar_tensor(number, dtype=torch.int64, device="cpu")
    if isinstance(indices, tuple):
        return tuple(map(_as_tensors, indices))
    return indices


def _explained(mod: Callable[..., Any], error: Exception) -> NotImplementedError:
    text = str(error)
    line = _line_of(error)
    kind = type(error).__name__
    for sign, hint in _HINTS:
        if sign in text or sign in kind:
            return NotLowerable(f"{name_of(mod)}{line} {hint}")
    first = text.splitlines()[0] if text else kind
    return NotLowerable(f"{name_of(mod)} cannot be traced{line}: {kind}: {first}")


def _line_of(error: Exception) -> str:
    """The last line of the caller's own code that was reached."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, __file__))
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _line_of_caller(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(node: Node) -> str:
    """The line where the mod calls the operator of a node, or nothing."""
    line = node.meta.get("stack_trace")
    return f" at {line}" if line else ""
