"""Tracing of a torch mod on 0-d tensors without contents, to a graph of ATen operators.

No tensor of scores or positions is made. Control flow on a value, `.item()` and the like have no
value to read, and raise. What the graph contains happened for every score alike.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
_AS_FLOAT = (
    "makes a Python float of a tensor, as functions of math do: write the function of torch, "
    "torch.exp(x) for math.exp(x)"
)
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
    is_score: bool,
    device: torch.device,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Trace:
    """Trace a mod. Raises NotImplementedError, naming the mod and its line."""
    given = _arguments(is_score, device)

    def call(*arguments: Tensor) -> Any:
        return mod(*arguments)

    with _explains(mod):
        return _trace(mod, call, given, "fake", decompositions)


def trace_with_numbers(
    mod: Callable[..., Any],
    bind: Callable[[Sequence[Any]], Callable[..., Any]],
    numbers: Sequence[int | float],
    is_score: bool,
    device: torch.device,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Trace:
    """`trace` of bind(numbers), for any numbers of these types.

    Also raises NotImplementedError if the mod needs the value of such a number.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        given = _arguments(is_score, device)
    with env.ignore_fresh_unbacked_symbols():
        symbols = [
            env.create_unbacked_symint() if isinstance(x, int) else env.create_unbacked_symfloat()
            for x in numbers
        ]

    def call(*arguments: Any) -> Any:
        return bind(arguments[len(given) :])(*arguments[: len(given)])

    with _explains(mod):
        return _trace(mod, call, [*given, *symbols], "symbolic", decompositions)


def _arguments(is_score: bool, device: torch.device) -> list[Tensor]:
    given = [torch.zeros((), dtype=torch.int32, device=device) for _ in INDEX_NAMES]
    return [torch.zeros((), dtype=torch.float32, device=device), *given] if is_score else given


def _trace(
    mod: Callable[..., Any],
    call: Callable[..., Any],
    given: Sequence[Any],
    mode: Any,
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Trace:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    notes = _Notes(mod)

    def noting(*arguments: Any) -> Any:
        with notes, _RefusedWrites(mod):
            return call(*arguments)

    make = make_fx(noting, decompositions, mode, _allow_non_fake_inputs=True)
    hook = register_module_forward_pre_hook(notes.on_module)
    try:
        with torch.no_grad(), TransformGetItemToIndex(), fx_traceback.preserve_node_meta():
            module = make(*given)
    finally:
        hook.remove()
    module.graph.eliminate_dead_code()
    return Trace(module, notes.asked_shape, notes.called_module)


@contextmanager
def _explains(mod: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except NotLowerable:
        raise
    except Exception as error:
        raise _explained(mod, error) from error


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
            if func is not Tensor.__float__:
                raise
            raise NotLowerable(f"{name_of(self._mod)} at {line} {_AS_FLOAT}") from error


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
