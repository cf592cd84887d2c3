"""Tensors that are no memory, whose address no kernel may read: refused, in warm calls too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cutlass
import pytest
import torch
import torch.distributed as dist
from cases import BF16, FP64, int32
from functional_calls import qkv, rows_below
from launch_recorder import Recorder
from test_bwd_interface import Recorder as BwdRecorder
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from flash_mask_cute import (
    BlockSparseTensorsTorch,
    ColumnMask,
    create_block_mask,
    flash_attn_func,
    flash_attn_varlen_func,
    interface,
    plot,
)
from flash_mask_cute.call.check.validate import refuse_transforms
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.utils import scalar_to_ssa

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SEQLEN = 24


def add_to_scores(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + scalar_to_ssa(aux[0][k[0]], cutlass.Float32)


def lower(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return q >= k


def blocks_up_to(count: int) -> BlockSparseTensorsTorch:
    cnt, idx = int32(1, count).view(1, 1, 2), int32(0, 1, 0, 1).view(1, 1, 2, 2)
    return BlockSparseTensorsTorch(cnt, idx, block_size=(12, 12))


class Owner(Tensor):
    """A subclass with memory of its own, which torch's operators and their results keep."""


class Unknown(TwoTensor):
    """A subclass that knows no operators but torch's own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func.namespace == "flash_mask_cute":
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Opaque(Tensor):
    """Memory that stands for something else, handed to operators as it is."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


# -- operators for subclasses -------------------------------------------------------------------

# for each argument: two values, and a call with one
q0, k0, v0 = (x.detach() for x in qkv(seqlen=SEQLEN))
PAIRS: dict[str, tuple[Tensor, Tensor, Callable[[Tensor], Any]]] = {
    "q": (q0, q0.flip(1), lambda x: flash_attn_func(x, k0, v0)),
    "k": (k0, k0.flip(1), lambda x: flash_attn_func(q0, x, v0, causal=True)),
    "v": (v0, v0.flip(1), lambda x: flash_attn_func(q0, k0, x)),
    "learnable_sink": (
        torch.zeros(2),
        torch.ones(2),
        lambda x: flash_attn_func(q0, k0, v0, learnable_sink=x),
    ),
    "aux_tensors[0]": (
        torch.linspace(-2, 2, SEQLEN),
        torch.linspace(3, 0, SEQLEN),
        lambda x: flash_attn_func(q0, k0, v0, score_mod=add_to_scores, aux_tensors=[x]),
    ),
    "startend_row_indices": (
        rows_below(13, SEQLEN),
        rows_below(20, SEQLEN),
        lambda x: flash_attn_func(q0, k0, v0, causal=True, startend_row_indices=x),
    ),
    "ColumnMask": (
        rows_below(13, SEQLEN),
        rows_below(20, SEQLEN),
        lambda x: flash_attn_func(q0, k0, v0, startend_row_indices=ColumnMask(x, True)),
    ),
    "mask_block_cnt": (
        blocks_up_to(1)[0],
        blocks_up_to(2)[0],
        lambda x: flash_attn_func(
            q0, k0, v0, block_sparse_tensors=blocks_up_to(1)._replace(mask_block_cnt=x)
        ),
    ),
    "cu_seqlens_q": (
        int32(0, 9, SEQLEN),
        int32(0, 11, SEQLEN),
        lambda x: flash_attn_varlen_func(q0[0], k0[0], v0[0], x, int32(0, 8, SEQLEN), causal=True),
    ),
    "seqused_k": (
        int32(9),
        int32(19),
        lambda x: flash_attn_varlen_func(q0, k0, v0, seqused_k=x),
    ),
}  # fmt: skip
by_argument = pytest.mark.parametrize("name", PAIRS)


@by_argument
def test_a_wrapper_is_taken_apart(name: str) -> None:
    first, second, call = PAIRS[name]
    out = call(TwoTensor(first.clone(), second.clone()))
    assert type(out) is TwoTensor
    assert torch.equal(out.a, call(first)) and torch.equal(out.b, call(second))
    assert (out.a != out.b).any()


@by_argument
def test_a_subclass_with_memory_is_taken_as_it_is(name: str) -> None:
    first, _, call = PAIRS[name]
    out = call(first.clone().as_subclass(Owner))
    assert type(out) is Owner
    assert torch.equal(out.as_subclass(Tensor), call(first))


@pytest.mark.parametrize("name", ["q", "k", "learnable_sink", "aux_tensors[0]"])
def test_gradients_by_a_wrapper(name: str) -> None:
    first, second, call = PAIRS[name]
    wrapper = TwoTensor(first.clone(), second.clone()).requires_grad_()
    (found,) = torch.autograd.grad(call(wrapper).sin().sum(), wrapper)
    for values, part in ((first, found.a), (second, found.b)):
        leaf = values.clone().requires_grad_()
        (expected,) = torch.autograd.grad(call(leaf).sin().sum(), leaf)
        assert torch.equal(part, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_wrapper_comes_back_from_the_loss(create_graph: bool) -> None:
    q, k, v = qkv()
    mask = ColumnMask(rows_below(9, 12), True)
    out = flash_attn_func(q, k, v, startend_row_indices=mask)
    weights = [torch.randn_like(out) for _ in range(2)]
    (dq,) = torch.autograd.grad(
        out, q, TwoTensor(weights[0], weights[1]), retain_graph=True, create_graph=create_graph
    )
    for part, weight in zip((dq.a, dq.b), weights, strict=True):
        (expected,) = torch.autograd.grad(out, q, weight, retain_graph=True)
        assert torch.equal(part.detach(), expected)


@by_argument
def test_what_knows_no_operators_is_named(name: str) -> None:
    first, second, call = PAIRS[name]
    named = name.replace("ColumnMask", "startend_row_indices")
    with pytest.raises(TypeError) as caught:
        call(Unknown(first.clone(), second.clone()))
    assert str(caught.value).startswith(f"{named} is a Unknown, which does not take operators")


@pytest.mark.parametrize("name", ["k", "aux_tensors[0]", "startend_row_indices"])
def test_what_is_handed_on_wrapped_is_named(name: str) -> None:
    first, _, call = PAIRS[name]
    with pytest.raises(TypeError) as caught:
        call(Tensor._make_subclass(Opaque, first))
    assert f"{name} must be a plain torch.Tensor, got a Opaque" in str(caught.value)


def test_distributed_tensors_are_named() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name in ("k", "learnable_sink", "aux_tensors[0]", "ColumnMask", "cu_seqlens_q"):
            first, _, call = PAIRS[name]
            named = name.replace("ColumnMask", "startend_row_indices")
            with pytest.raises(TypeError) as caught:
                call(distribute_tensor(first, mesh, [Replicate()]))
            assert str(caught.value).startswith(f"{named} is a DTensor, which does not take")
    finally:
        dist.destroy_process_group()


def test_errors_of_attention_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="softcap must be 0"):
        flash_attn_func(q0, TwoTensor(k0, k0), v0, softcap=-1.0)


# -- the host calls, which have no operators ----------------------------------------------------


def of_forward() -> dict[str, Any]:
    """Arguments with every tensor that a forward may have at once, but lengths."""
    q, k, v = (x.detach() for x in qkv(seqlen=SEQLEN, dtype=BF16))
    return {
        "q": q, "k": k, "v": v, "learnable_sink": torch.zeros(2), "out": torch.empty_like(q),
        "lse": torch.empty(1, 2, SEQLEN), "score_mod": add_to_scores,
        "aux_tensors": [torch.zeros(SEQLEN)], "seqused_q": int32(SEQLEN),
        "seqused_k": int32(SEQLEN), "block_sparse_tensors_torch": blocks_up_to(2),
        "startend_row_indices": ColumnMask(rows_below(13, SEQLEN), True),
    }  # fmt: skip


def of_backward() -> dict[str, Any]:
    given = of_forward()
    dk, dv = torch.empty_like(given["k"]), torch.empty_like(given["v"])
    new = {"dout": given["out"].clone(), "dq": torch.empty_like(given["q"]), "dk": dk, "dv": dv}
    more = {"dsink": torch.empty(2), "daux": [torch.empty(SEQLEN)], "dlse": given["lse"].clone()}
    return given | new | more


def packed(given: dict[str, Any]) -> dict[str, Any]:
    rows = {x: given[x][0] for x in ("q", "k", "v")}
    return rows | {"cu_seqlens_q": int32(0, SEQLEN), "cu_seqlens_k": int32(0, SEQLEN)}


def changed(given: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """given, with one of its tensors changed."""
    value = given.get(name)
    if isinstance(value, list):
        return given | {name: [change(x) for x in value]}
    if isinstance(value, ColumnMask):
        return given | {name: ColumnMask(change(value.startend_row_indices), value.causal)}
    if name in BlockSparseTensorsTorch._fields:
        lists = given["block_sparse_tensors_torch"]
        lists = lists._replace(**{name: change(getattr(lists, name))})
        return given | {"block_sparse_tensors_torch": lists}
    return given | {name: change(given[name])}


LISTS = ("mask_block_cnt", "mask_block_idx")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k")
FORWARD = [x for x in of_forward() if x not in ("score_mod", "block_sparse_tensors_torch")]
BACKWARD = [x for x in of_backward() if x not in ("score_mod", "block_sparse_tensors_torch")]


def said_of(name: str) -> str:
    return f"{name}[0]" if name in ("aux_tensors", "daux") else name


@pytest.mark.parametrize("kind", ["wrapper", "owner"])
@pytest.mark.parametrize("name", [*FORWARD, *LISTS, *LENGTHS])
def test_the_forward_refuses_subclasses(name: str, kind: str, recorder: Recorder) -> None:
    """Before any launch, and after a call with the same metadata."""
    given = packed(of_forward()) if name in LENGTHS else of_forward()
    _flash_attn_fwd(**given)
    _flash_attn_fwd(**given)
    assert len(recorder.prepared) == 1 and len(recorder.calls) == 2
    wrap: Callable[[Tensor], Tensor] = lambda x: x.as_subclass(Owner)  # noqa: E731
    if kind == "wrapper":
        wrap = lambda x: TwoTensor(x, x.clone())  # noqa: E731
    with pytest.raises(TypeError) as caught:
        _flash_attn_fwd(**changed(given, name, wrap))
    assert f"{said_of(name)} must be a plain torch.Tensor, got a " in str(caught.value)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("name", [*BACKWARD, *LISTS])
def test_the_backward_refuses_subclasses(name: str, bwd_recorder: BwdRecorder) -> None:
    given = of_backward()
    _flash_attn_bwd(**given)
    launched = len(bwd_recorder.calls)
    _flash_attn_bwd(**given)
    assert len(bwd_recorder.prepared) == 1 and len(bwd_recorder.calls) == 2 * launched
    with pytest.raises(TypeError) as caught:
        _flash_attn_bwd(**changed(given, name, lambda x: TwoTensor(x, x.clone())))
    assert f"{said_of(name)} must be a plain torch.Tensor, got a TwoTensor" in str(caught.value)
    assert len(bwd_recorder.calls) == 2 * launched


def test_parameters_are_plain(recorder: Recorder) -> None:
    given = of_forward()
    for name in ("q", "learnable_sink"):
        _flash_attn_fwd(**changed(given, name, lambda x: torch.nn.Parameter(x)))
    assert len(recorder.calls) == 2


def test_what_masks_are_made_of_is_plain() -> None:
    indices, ids = rows_below(13, SEQLEN), torch.zeros(SEQLEN)
    wrapper = ColumnMask(TwoTensor(indices, indices.clone()), True)
    for ask in (lambda: wrapper.bounds(128), lambda: wrapper.split(1)):
        with pytest.raises(TypeError, match="^startend_row_indices must be a plain"):
            ask()
    lengths = int32(0, SEQLEN)
    with pytest.raises(TypeError, match="^cu_seqlens_k must be a plain"):
        ColumnMask(indices, True).bounds(128, TwoTensor(lengths, lengths.clone()))
    aux = [TwoTensor(ids, ids.clone())]
    with pytest.raises(TypeError, match=r"^aux_tensors\[0\] must be a plain"):
        create_block_mask(lower, 1, 1, SEQLEN, SEQLEN, device="cpu", aux_tensors=aux)
    with pytest.raises(TypeError, match=r"^aux_tensors\[0\] must be a plain"):
        plot(lower, SEQLEN, aux_tensors=aux)


def test_nothing_is_kept_of_a_mode_that_computes_nothing() -> None:
    mask = ColumnMask(rows_below(13, SEQLEN), True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match="^bounds must be a plain"):
            mask.bounds(128)
        with pytest.raises(TypeError, match="^mask_block_cnt must be a plain"):
            create_block_mask(lower, 1, 1, SEQLEN, SEQLEN, device="cpu")
    assert type(mask.bounds(128)) is Tensor


# -- vmap and other transforms ------------------------------------------------------------------

NO_BATCH = "is a batch that vmap made, as torch.autograd.grad.is_grads_batched=True"


@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients_are_refused(of_lse: bool, create_graph: bool) -> None:
    q, k, v = qkv()
    result = flash_attn_func(q, k, v, return_lse=True)[of_lse]
    torch.autograd.grad(result.sum(), q, retain_graph=True)
    batch = torch.ones(3, *result.shape, dtype=result.dtype)
    with pytest.raises(NotImplementedError, match=f"^{'dlse' if of_lse else 'dout'} {NO_BATCH}"):
        torch.autograd.grad(result, q, batch, is_grads_batched=True, create_graph=create_graph)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_refuse_batched_gradients(backend: str) -> None:
    q, k, v = qkv()
    out = torch.compile(flash_attn_func, backend=backend, fullgraph=True)(q, k, v)
    with pytest.raises(NotImplementedError, match=f"^dout {NO_BATCH}"):
        torch.autograd.grad(out, q, out.expand(3, *out.shape), is_grads_batched=True)


def test_vectorized_jacobians_are_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(NotImplementedError, match=NO_BATCH):
        jacobian(lambda q: flash_attn_func(q, k, v).sum((0, 1, 2)), q, vectorize=True)


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_a_warm_backward_refuses_batches(name: str, bwd_recorder: BwdRecorder) -> None:
    given = of_backward()
    _flash_attn_bwd(**given)
    launched = len(bwd_recorder.calls)
    with pytest.raises(NotImplementedError, match=f"^{name} {NO_BATCH}"):
        _vmap(lambda x: _flash_attn_bwd(**given | {name: x}))(
            given[name].expand(3, *given[name].shape)
        )
    assert len(bwd_recorder.calls) == launched


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(2, *x.shape)),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}
by_transform = pytest.mark.parametrize("transform", TRANSFORMS)


@pytest.mark.shares(4)
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        (name, transform)
        for name in ("q", "learnable_sink", "aux_tensors[0]")
        for transform in TRANSFORMS
        # which is supported (test_forward_mode.py)
        if (name, transform) != ("q", "jvp")
    ],
)
def test_transforms_are_refused(name: str, transform: str) -> None:
    """Eagerly, traced, and compiled: an operator would drop tangents."""
    message = r"transforms of torch\.func"
    if transform == "jvp":
        message = rf"{re.escape(name)}, which has a tangent: detach it"
    first, _, call = PAIRS[name]
    for function in (
        lambda x: TRANSFORMS[transform](call, x),
        make_fx(lambda x: TRANSFORMS[transform](call, x)),
        torch.compile(lambda x: TRANSFORMS[transform](call, x), backend="eager"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            function(first)


@by_transform
@pytest.mark.parametrize("name", ["v", "learnable_sink", "aux_tensors", "out"])
def test_warm_host_calls_refuse_transforms(
    name: str, transform: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = of_forward()
    _flash_attn_fwd(**given)

    def prepare(*arguments: Any) -> Any:
        refuse_transforms()
        raise AssertionError("no launch was found, outside of a transform")

    monkeypatch.setattr(interface, "prepare_fwd", prepare)
    _flash_attn_fwd(**given)
    tensor = given[name][0] if name == "aux_tensors" else given[name]
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        TRANSFORMS[transform](
            lambda x: _flash_attn_fwd(**changed(given, name, lambda _: x))[0], tensor
        )
    assert len(recorder.calls) == 2


def test_functionalize_is_fine_with_operators() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v)
        return out

    traced = make_fx(torch.func.functionalize(attend))(q0, k0, v0)
    assert torch.equal(traced(q0, k0, v0), attend(q0, k0, v0))


@pytest.mark.parametrize("backend", ["none", "make_fx", "eager", "aot_eager"])
def test_tangents_are_right_or_refused(backend: str) -> None:
    """A graph that was compiled for no dual level must not drop them."""

    def tangent(q: Tensor) -> Any:
        with forward_ad.dual_level():
            out = function(forward_ad.make_dual(q, q))
            return forward_ad.unpack_dual(out).tangent

    def function(q: Tensor) -> Any:
        return flash_attn_func(q, k0, v0)

    right = tangent(q0)
    if backend == "make_fx":
        tangent = make_fx(tangent)(q0)
    elif backend != "none":
        function = torch.compile(function, backend=backend)
        function(q0)
    if backend == "aot_eager":
        with pytest.raises(NotImplementedError, match="forward-mode"):
            tangent(q0)
    else:
        torch.testing.assert_close(tangent(q0), right)


# -- values that are not in memory as they are ---------------------------------------------------


def negated(values: Tensor) -> Tensor:
    """A view of what is not negated."""
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg() and torch.equal(view, values)
    return view


def test_a_negated_aux_tensor_is_refused(recorder: Recorder) -> None:
    given = of_forward()
    aux = torch.arange(2.0 * SEQLEN)
    given["aux_tensors"] = [aux[::2]]
    _flash_attn_fwd(**given)
    with pytest.raises(ValueError, match=r"aux_tensors\[0\] must be in memory as it is.*is_neg"):
        _flash_attn_fwd(**given | {"aux_tensors": [negated(aux[::2])]})
    assert len(recorder.calls) == 1


def test_lists_of_a_negated_aux_tensor() -> None:
    def above(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return scalar_to_ssa(aux[0][q[0]], cutlass.Float32) > scalar_to_ssa(0.5, cutlass.Float32)

    values = torch.tensor([1.0] * 12 + [0.0] * 12)
    lists = create_block_mask(
        above, 1, 1, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=12, aux_tensors=[negated(values)]
    )
    assert lists.full_block_cnt is not None and lists.full_block_cnt.flatten().tolist() == [2, 0]


def test_negated_gradients_arrive_as_they_are(bwd_recorder: BwdRecorder) -> None:
    """As autograd makes them behind a conjugation."""
    given = of_backward() | {"aux_tensors": None, "daux": None, "score_mod": None}
    dlse, dout = torch.randn(1, 2, SEQLEN), torch.randn(given["out"].shape).half()
    given |= {name: given[name].half() for name in ("q", "k", "v", "out", "dq", "dk", "dv")}
    _flash_attn_bwd(**given | {"dlse": negated(dlse), "dout": negated(dout)})
    before, main, _ = bwd_recorder.last()
    for found, expected in ((before[1], dout), (before[3], dlse), (main[3], dout)):
        assert not found.is_neg() and torch.equal(found, expected)


# -- what torch counts ---------------------------------------------------------------------------


def test_writing_into_tensors_of_the_caller_is_counted(
    recorder: Recorder, bwd_recorder: BwdRecorder
) -> None:
    """So that a backward which saved them notices; torch does not see what kernels write."""
    given = of_backward()
    forward = {name: given[name] for name in of_forward()}
    before = {name: x._version for name, x in given.items() if isinstance(x, Tensor)}
    _flash_attn_fwd(**forward)
    _flash_attn_bwd(**given)
    for name, version in before.items():
        written = name in ("out", "lse", "dq", "dk", "dv", "dsink")
        assert (given[name]._version > version) == written, name
    with torch.inference_mode():
        outputs = {"out": torch.empty_like(given["q"]), "lse": torch.empty(1, 2, SEQLEN)}
        _flash_attn_fwd(**forward | outputs)


@pytest.mark.parametrize("changed_result", [0, 1])
def test_a_result_that_was_changed_in_place_is_noticed(changed_result: int) -> None:
    # beside float64, autograd saves another LSE than the result in float32
    q, k, v = (x.detach().float().requires_grad_() for x in qkv())
    results = flash_attn_func(q, k, v, return_lse=True)
    results[changed_result].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


def test_views_share_the_count_of_their_base() -> None:
    base = torch.randn(1, 12, 6, 16, dtype=FP64, requires_grad=True)
    fused = base * 1
    q, k, v = fused[:, :, :2], fused[:, :, 2:4], fused[:, :, 4:]
    out = flash_attn_func(q, k, v)
    (found,) = torch.autograd.grad(out.sum(), base, retain_graph=True)
    assert found.shape == base.shape and (found != 0).any()
    with torch.no_grad():
        fused.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kind", [Tensor, Owner])
def test_tensors_of_mods_that_were_made_in_inference_mode_serve_training(kind: Any) -> None:
    """torch saves none of them for a backward, so a copy is saved: a later change is not seen."""

    def grads(shown: Tensor, added: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = (x.as_subclass(kind).requires_grad_() for x in qkv())
        out = flash_attn_func(
            *(q, k, v),
            mask_mod=lambda b, h, i, j: shown[i, j],
            score_mod=lambda score, b, h, i, j: score + added[j],
        )
        if added.is_inference():
            with torch.inference_mode():
                added.add_(torch.arange(SEQLEN))
        return list(torch.autograd.grad(out.square().sum(), (q, k, v)))

    with torch.inference_mode():
        shown, added = torch.rand(SEQLEN, SEQLEN) > 0.3, torch.randn(SEQLEN)
    wanted = grads(shown.clone(), added.clone())
    for x, y in zip(grads(shown, added), wanted, strict=True):
        torch.testing.assert_close(x, y)
