"""The public functions in graphs of torch.compile and export: operators, callables as names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FP64, Case, int32
from functional_calls import (
    FEATURES,
    OPERATORS,
    Arguments,
    by_id,
    eager_results,
    inputs_of,
    qkv,
    rows_below,
    run,
)
from inputs import make_inputs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flash_mask_cute
from flash_mask_cute import flash_attn_func, interface
from flash_mask_cute.autograd import mod_names
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# -- torch.compile ------------------------------------------------------------------------------


@pytest.mark.shares(4)
@by_id
def test_compiled_equals_eager(case: Case) -> None:
    inputs = inputs_of(case)
    arguments = Arguments.create(inputs)
    compiled = torch.compile(arguments.function, fullgraph=True, backend="aot_eager")
    run(inputs, arguments, compiled).assert_equal(eager_results(case))


def test_a_scale_in_a_tensor() -> None:
    """It is read once: what it holds when the backward runs does not matter."""
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = flash_attn_func(q, k, v, -0.3, window_size=(5, -2))
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for call in (flash_attn_func, torch.compile(flash_attn_func, backend="aot_eager")):
        scale = torch.tensor(-0.3, dtype=FP64)
        out = call(q, k, v, scale, window_size=(5, -2))
        scale.fill_(7.0)
        assert torch.equal(out, expected)
        gradients = torch.autograd.grad(out.sin().sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(gradients, wanted, strict=True))


def test_compiled_masks_follow_their_contents() -> None:
    """Lists and columns are inputs of the graph: nothing of the first call's is remembered."""
    q, k, v = qkv(seqlen=40)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(columns: Tensor, counts: Tensor, blocks: Tensor) -> Tensor:
        lists = flash_mask_cute.BlockSparseTensorsTorch(counts, blocks, block_size=(20, 20))
        return flash_attn_func(
            q, k, v, causal=True, startend_row_indices=columns + 1, block_sparse_tensors=lists
        )

    blocks = int32(0, 1, 0, 1).view(1, 1, 2, 2)
    for limit, counts in ((30, (1, 2)), (20, (1, 2)), (20, (1, 1)), (30, (0, 2))):
        columns, cnt = rows_below(limit, 40), int32(*counts).view(1, 1, 2)
        lists = flash_mask_cute.BlockSparseTensorsTorch(cnt, blocks, block_size=(20, 20))
        expected = flash_attn_func(
            q, k, v, causal=True, startend_row_indices=columns + 1, block_sparse_tensors=lists
        )
        assert torch.equal(call(columns, cnt, blocks), expected), (limit, counts)


def test_operators_hand_lists_over_under_no_known_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled graph may write other lists into the same tensors, which torch does not count."""
    q, k, v = qkv(seqlen=40)
    given = int32(1, 2).view(1, 1, 2), int32(0, 1, 0, 1).view(1, 1, 2, 2)
    lists = flash_mask_cute.BlockSparseTensorsTorch(*given, block_size=(20, 20))
    found: list[Any] = []
    for name in ("forward", "backward"):
        half = getattr(interface, name)

        def watch(call: AttentionCall, half: Any = half) -> Any:
            assert call.masks is not None
            found.append(call.masks.block_sparse_tensors_torch)
            return half(call)

        monkeypatch.setattr(interface, name, watch)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, block_sparse_tensors=lists)

    torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v).sum().backward()
    call(q, k, v).sum().backward()
    assert len(found) == 4
    for seen, is_eager in zip(found, (False, False, True, True), strict=True):
        assert seen.block_size == (20, 20)
        for tensor, original in zip(seen[:2], given, strict=True):
            assert tensor.data_ptr() == original.data_ptr()
            assert (tensor is original) == is_eager


def test_a_column_mask_made_in_the_graph() -> None:
    q, k, v = qkv()

    def call(limit: Tensor) -> Tensor:
        indices = rows_below(0, 12) + limit
        return flash_attn_func(q, k, v, startend_row_indices=ColumnMask(indices, True))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for limit in (int32(9), int32(5)):
        assert torch.equal(compiled(limit), call(limit))


def test_one_graph_serves_all_lengths() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend, dynamic=True)
    for seqlen in (12, 20, 40):
        q, k, v = (x.detach() for x in qkv(batch=seqlen // 4, seqlen=seqlen))
        mask = ColumnMask(rows_below(seqlen - 3, seqlen), True)
        assert torch.equal(
            compiled(q, k, v, startend_row_indices=mask),
            flash_attn_func(q, k, v, startend_row_indices=mask),
        )
    assert len(graphs) == 1


def test_windows_may_be_symbols() -> None:
    """As in traces with dynamic shapes."""
    q = torch.randn(1, 12, 2, 8)

    def attend(x: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(x, x, x, window_size=(x.shape[1] // 4, None))
        return out

    traced = make_fx(attend, tracing_mode="symbolic")(q)
    torch.testing.assert_close(traced(q), attend(q))
    exported = torch.export.export(_Calls(attend), (q,), strict=False).module()
    torch.testing.assert_close(exported(q), attend(q))


def test_a_wrong_value_is_named_by_a_compiled_call() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 12, 2, 8)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    assert (compiled(q, q, q, window_size=(-2, 0)) == 0).all()
    with pytest.raises(ValueError, match="softcap.*got -2"):
        compiled(q, q, q, softcap=-2.0)


class _Calls(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def test_export() -> None:
    q, k, v = (x.detach() for x in qkv())

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attn_func(q, k, v, causal=True, return_lse=True)

    exported = torch.export.export(Layer(), (q, k, v)).module()
    for found, expected in zip(exported(q, k, v), Layer()(q, k, v), strict=True):
        assert torch.equal(found, expected)


# -- operators ----------------------------------------------------------------------------------

CHECKED = [case for case in FEATURES if case.id in (
    "window-softcap-sink", "columns-packed", "mask_mod-aux", "blocks-mask_mod", "everything-packed",
)]  # fmt: skip


def operator_arguments(case: Case) -> dict[str, tuple[Any, ...]]:
    """The arguments of each operator in a call with gradients."""
    found: dict[str, tuple[Any, ...]] = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "flash_mask_cute":
                found[func._opname] = args
            return func(*args, **(kwargs or {}))

    inputs = inputs_of(case)
    with Watch():
        run(inputs, Arguments.create(inputs)).assert_equal(eager_results(case))
    return found


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", CHECKED)
def test_opcheck(case: Case) -> None:
    arguments = operator_arguments(case)
    assert ("block_bounds" in arguments) == (case.column is not None)
    for name, given in arguments.items():
        detached = [x.detach() if isinstance(x, Tensor) else x for x in given]
        if name == "attention_fwd":
            for x in detached[:4]:
                if x is not None:
                    x.requires_grad_()
        torch.library.opcheck(getattr(OPERATORS, name).default, tuple(detached))


def test_operators_know_shapes_of_any_strides() -> None:
    """What a transposed q and a packed one give, without computing."""
    from torch._subclasses import FakeTensorMode

    inputs = make_inputs(Case("fake", 1, 9, 12, head_dim=16, dtype=FP64, strided="transposed"))
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    real_out, real_lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v)
    for fake, real in ((out, real_out), (lse, real_lse)):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    real_grads = run(inputs, Arguments.create(inputs)).gradients
    for fake, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        real = real_grads[name]
        assert real is not None and (fake.shape, fake.dtype) == (real.shape, real.dtype)


# -- callables as names -------------------------------------------------------------------------


def make_mod(factor: float) -> tuple[Callable[..., Any], Callable[[float], None]]:
    """A score_mod that multiplies, and what changes its factor."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return mod, change


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * self.factor

    def method(self, score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * self.factor


def test_names_of_callables() -> None:
    name_of = mod_names.optional_name
    (first, change), (second, _) = make_mod(2.0), make_mod(2.0)
    name = name_of(first)
    assert name is not None and name_of(None) is None
    assert name_of(first) == name
    assert name_of(second) != name
    change(3.0)
    assert name_of(first) != name
    change(2.0)
    assert name_of(first) == name
    assert mod_names.optional_mod(name) is first
    scaling = Scaling(2.0)
    assert name_of(scaling.method) == name_of(scaling.method) != name_of(Scaling(2.0).method)
    with pytest.raises(RuntimeError, match="no callable is known as 'py3:0#0'"):
        mod_names.optional_mod("py3:0#0")
    with pytest.raises(TypeError, match="tensor"):
        held = torch.ones(2)
        name_of(lambda score, *_: score * held)


@pytest.mark.shares(4)
@pytest.mark.parametrize("kind", ["function", "object", "method", "made in the graph"])
def test_compiled_callables(kind: str) -> None:
    q, k, v = qkv()
    scaling = Scaling(2.0)
    mods: dict[str, Callable[[], Any]] = {
        "function": lambda: MOD,
        "object": lambda: scaling,
        "method": lambda: scaling.method,
        "made in the graph": lambda: lambda score, *_: score * 2.0,
    }
    MOD = make_mod(2.0)[0]
    get = mods[kind]
    expected = flash_attn_func(q, k, v, score_mod=MOD)

    def call() -> Tensor:
        return flash_attn_func(q, k, v, score_mod=get())

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(), expected)


@pytest.mark.parametrize("kind", ["closure", "object", "method"])
def test_each_callable_has_a_graph(kind: str) -> None:
    """Also where all have the same code."""
    q, k, v = qkv()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    results = []
    for factor in (2.0, 3.0):
        mod: Callable[..., Any] = Scaling(factor)
        if kind == "closure":
            mod = make_mod(factor)[0]
        elif kind == "method":
            mod = Scaling(factor).method
        results.append(compiled(q, k, v, score_mod=mod))
        assert torch.equal(results[-1], flash_attn_func(q, k, v, score_mod=mod))
    assert (results[0] != results[1]).any()


def test_a_compiled_call_follows_its_callable() -> None:
    """As an eager call does, where a closure changes after the graph was made."""
    q, k, v = qkv()
    mod, change = make_mod(2.0)
    compiled = torch.compile(
        lambda: flash_attn_func(q, k, v, score_mod=mod), fullgraph=True, backend="aot_eager"
    )
    results = []
    for factor in (2.0, 3.0):
        change(factor)
        results.append(compiled())
        assert torch.equal(results[-1], flash_attn_func(q, k, v, score_mod=mod))
    assert (results[0] != results[1]).any()
