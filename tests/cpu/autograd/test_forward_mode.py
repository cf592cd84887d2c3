"""Forward mode of the public functions on CPU tensors, against torch's of dense attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FP32, FP64, Case
from eager import Pair, assert_tangents_close, dual_results, reference_tangents
from inputs import Inputs, make_inputs, make_tangents
from oracle import attend_rows
from planned import attend_of
from random_cases import small_case
from torch import Tensor
from torch.autograd import forward_ad
from unseen_memory import EMPTY_CASES, UNUSED_CASES, with_unused

from flash_mask_cute import (
    ColumnMask,
    SelectedBlocks,
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
)

SMALL: dict[str, Any] = {"head_dim": 16, "dtype": FP64}
CASES = (
    Case("full-gqa2", 2, 70, 130, 4, 2, **SMALL),
    Case("causal-empty-rows", 1, 130, 90, causal=True, **SMALL),
    Case("window-sink", 1, 120, 150, window_left=40, window_right=2, sink=FP32, **SMALL),
    Case("scale-dv8", 1, 70, 110, head_dim_v=8, softmax_scale=0.7, **SMALL),
    Case("scale-negative-shifted", 1, 130, 170, softmax_scale=-0.4, window_left=90,
         window_right=-3, strided="unreadable", **SMALL),
    Case("packed", lengths_q=(50, 0, 70), lengths_k=(60, 30, 90), causal=True, sink=FP32, **SMALL),
    Case("packed-used", lengths_q=(50, 80), lengths_k=(60, 90), seqused_q=(30, 80),
         seqused_k=(60, 50), **SMALL),
    Case("columns1-causal", 2, 200, 240, 2, 1, causal=True, column="random1", **SMALL),
    Case("columns2-q", 1, 200, 240, 2, 1, column="random2", column_heads="q", **SMALL),
    Case("columns4", 1, 200, 240, column="random4", **SMALL),
    Case("mask_mod-aux", 1, 200, 200, mask_mod="documents", **SMALL),
    Case("mask_mod-blind", 1, 150, 200, 4, 2, mask_mod="blinding", **SMALL),
    Case("blocks-mask_mod", 1, 400, 400, mask_mod="checks", blocks=(128, 128), **SMALL),
    Case("blocks-alone", 1, 400, 240, blocks=(16, 16), **SMALL),
    Case("fp32", 2, 70, 130, 4, 2, causal=True, head_dim=64, dtype=FP32),
    Case("bf16", 2, 70, 130, 4, 2, causal=True, head_dim=64),
)  # fmt: skip
by_id = pytest.mark.parametrize("case", CASES)


def operands_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v


@by_id
def test_tangents_are_those_of_dense_attention(case: Case) -> None:
    inputs = make_inputs(case)
    tangents, attend = make_tangents(inputs), attend_of(inputs)
    primals, found = dual_results(attend, operands_of(inputs), tangents)
    assert_tangents_close(found, inputs, tangents)
    if case.dtype == FP64:
        # nothing of float32 but the LSE that is returned
        exact = reference_tangents(inputs, tangents)
        torch.testing.assert_close(found.out, exact.out, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found.lse, exact.lse.to(FP32), rtol=1e-6, atol=1e-6)
    plain = Pair(*attend(*operands_of(inputs)))
    assert torch.equal(primals.out, plain.out) and torch.equal(primals.lse, plain.lse)
    of_func = torch.func.jvp(attend, operands_of(inputs), tangents)
    for one, other in zip(of_func, (plain, found), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_missing_tangent_is_zero(name: str) -> None:
    inputs = make_inputs(CASES[0])
    only = tuple(
        t if n == name else None for n, t in zip("qkv", make_tangents(inputs), strict=True)
    )
    _, found = dual_results(attend_of(inputs), operands_of(inputs), only)
    exact = reference_tangents(inputs, only)
    torch.testing.assert_close(found.out, exact.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.lse, exact.lse.to(FP32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [*UNUSED_CASES[:2], *UNUSED_CASES[4:]])
def test_unused_memory_reaches_no_tangent(case: Case) -> None:
    """NaN in rows past the lengths, of tensors and of tangents."""
    inputs = make_inputs(replace(case, dtype=FP64, head_dim=16, head_dim_v=16))
    clean = make_tangents(inputs)
    hostile = with_unused(inputs, float("nan"))
    tangents = tuple(t.clone() for t in clean)
    for name, t in zip("qkv", tangents, strict=True):
        t[~inputs.rows_in_use("q" if name == "q" else "k")] = float("nan")
    _, found = dual_results(attend_of(hostile), operands_of(hostile), tangents)
    _, expected = dual_results(attend_of(inputs), operands_of(inputs), clean)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    assert (found.out[~inputs.rows_in_use("q")] == 0).all()


@pytest.mark.parametrize("case", [x for x in EMPTY_CASES if not (x.score_mod or x.softcap)])
def test_rows_that_see_nothing_have_tangents_of_zero(case: Case) -> None:
    inputs = make_inputs(replace(case, dtype=FP64, head_dim=16, head_dim_v=16))
    primals, found = dual_results(attend_of(inputs), operands_of(inputs), make_tangents(inputs))
    blind = primals.lse.isneginf() if case.sink is None else (primals.out == 0).all(-1).mT
    assert blind.any() and (found.lse[blind] == 0).all()
    assert (found.out[blind.mT] == 0).all() and found.out.isfinite().all()


def _drawn(seed: int) -> Case | None:
    """A drawn call without what has no tangents."""
    case = small_case(random.Random(seed), ((16, 16), (24, 24), (16, 8)), 129)
    if case.score_mod or case.softcap:
        return None
    return replace(case, dtype=FP64, pack_gqa=None)


@pytest.mark.shares(5)
@pytest.mark.parametrize("part", range(10))
def test_drawn_calls(part: int) -> None:
    """50 of 500 drawn calls, in float64, within what float32 leaves of LSE alone."""
    cases, seed = [], part * 1000
    while len(cases) < 50:
        if (case := _drawn(seed)) is not None:
            cases.append(case)
        seed += 1
    for case in cases:
        inputs = make_inputs(case)
        tangents = make_tangents(inputs)
        _, found = dual_results(attend_of(inputs), operands_of(inputs), tangents)
        exact = reference_tangents(inputs, tangents)
        message = f"{case}"
        for one, other in zip(found, exact, strict=True):
            rtol, atol = (1e-9, 1e-10) if one.dtype == FP64 else (1e-6, 2e-6)
            largest = max(1.0, float(other.abs().amax()) if other.numel() else 0.0)
            torch.testing.assert_close(
                one, other.to(one.dtype), rtol=rtol, atol=atol * largest,
                msg=lambda text, message=message: f"{message}\n{text}",
            )  # fmt: skip


# -- other doors ---------------------------------------------------------------------------------


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """visible: bool (queries, keys), or with the batch and the heads before them."""
    return attend_rows(q, k, v, visible).out


def _jvp(attend: Callable[..., Tensor], seqlens: tuple[int, int] = (60, 60)) -> Tensor:
    """The tangent of a function of q, k and v, of two heads over one."""
    shapes = (2, seqlens[0], 2, 16), (2, seqlens[1], 1, 16), (2, seqlens[1], 1, 16)
    operands = tuple(_draw(*shape, seed=i) for i, shape in enumerate(shapes))
    tangents = tuple(_draw(*shape, seed=i + 3) for i, shape in enumerate(shapes))
    found: Tensor = torch.func.jvp(attend, operands, tangents)[1]
    return found


@pytest.mark.parametrize("q_start", [7, "end", torch.tensor([3, 40], dtype=torch.int32)])
def test_q_start(q_start: Any) -> None:
    starts = torch.tensor([q_start] * 2) if isinstance(q_start, int) else q_start
    starts = torch.tensor([40, 40]) if isinstance(q_start, str) else starts
    ahead = torch.arange(60) - (torch.arange(20)[:, None] + starts[:, None, None])
    visible = ((ahead <= 0) & (ahead >= -30))[:, None]
    keywords: dict[str, Any] = {"causal": True, "window_size": (30, None), "q_start": q_start}
    found = _jvp(lambda q, k, v: flash_attn_func(q, k, v, **keywords), (20, 60))
    exact = _jvp(lambda q, k, v: _dense(q, k, v, visible), (20, 60))
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_flashmask_attention(documents: bool) -> None:
    ends = torch.tensor([25] * 25 + [60] * 35, dtype=torch.int32).view(1, 1, 60, 1)
    mask: Any = ColumnMask(ends, causal=True, documents=True) if documents else ends
    i, j = torch.arange(60)[:, None], torch.arange(60)
    visible = (j <= i) & (i < ends.view(60))
    found = _jvp(lambda q, k, v: flashmask_attention(q, k, v, mask, causal=True))
    exact = _jvp(lambda q, k, v: _dense(q, k, v, visible))
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_autocast_and_torch_mods() -> None:
    """A mask_mod written in torch; a call under autocast has tangents in its dtype."""

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < 9

    distance = torch.arange(60)[:, None] - torch.arange(60)
    found = _jvp(lambda q, k, v: flash_attn_func(q, k, v, mask_mod=near))
    exact = _jvp(lambda q, k, v: _dense(q, k, v, distance.abs() < 9))
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        operands = (
            _draw(1, 9, 2, 16).float(),
            _draw(1, 9, 2, 16).float(),
            _draw(1, 9, 2, 16).float(),
        )
        _, tangent = torch.func.jvp(flash_attn_func, operands, operands)
    assert tangent.dtype == torch.bfloat16 and tangent.isfinite().all()


# -- training ------------------------------------------------------------------------------------

DOCUMENTS = (torch.arange(48) // 20)[:, None] == torch.arange(48) // 20
VISIBLE = DOCUMENTS & (torch.arange(48) <= torch.arange(48)[:, None])
Z, DZ = _draw(2, 48, 4, 16, seed=1), _draw(2, 48, 4, 16, seed=2)
WEIGHTS = _draw(3, 16, 16, seed=3) / 4
COLUMNS = torch.tensor([20] * 20 + [40] * 20 + [48] * 8, dtype=torch.int32).view(1, 1, 48, 1)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashmask_attention(q, k, v, COLUMNS, causal=True)


def meanflow_loss(weights: Tensor, attend: Callable[..., Tensor], stops: bool = True) -> Tensor:
    """A step of MeanFlow over one layer: u, and a target of du/dt."""

    def net(z: Tensor) -> Tensor:
        k, v = (z[:, :, :2] @ weights[1], z[:, :, 2:] @ weights[2])
        return z + attend(z @ weights[0], k, v)

    u, du = torch.func.jvp(net, (Z,), (DZ,))
    target = DZ - 0.5 * du
    return (u - (target.detach() if stops else target)).square().mean()


def _gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = WEIGHTS.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def _dense_gradient() -> Tensor:
    return _gradient(lambda w: meanflow_loss(w, lambda q, k, v: _dense(q, k, v, VISIBLE)))


def assert_same_gradient(found: Tensor) -> None:
    # the backward takes P from LSE, which is float32
    torch.testing.assert_close(found, _dense_gradient(), rtol=1e-5, atol=1e-6)


def test_a_training_step_has_the_gradients_of_dense_attention() -> None:
    assert_same_gradient(_gradient(lambda w: meanflow_loss(w, masked)))
    # torch.func.grad over jvp
    assert_same_gradient(torch.func.grad(meanflow_loss)(WEIGHTS, masked))


@pytest.mark.shares(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_training_step(backend: str) -> None:
    torch._dynamo.reset()
    loss = torch.compile(lambda w: meanflow_loss(w, masked), fullgraph=True, backend=backend)
    assert_same_gradient(_gradient(loss))


@pytest.mark.shares(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_tangents(backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def tangents(q: Tensor, tq: Tensor) -> Any:
        with forward_ad.dual_level():
            out, lse = flash_attn_func(forward_ad.make_dual(q, tq), q, q, causal=True,
                                       return_lse=True)  # fmt: skip
            return forward_ad.unpack_dual(out).tangent, forward_ad.unpack_dual(lse).tangent

    q, tq = _draw(1, 30, 2, 16), _draw(1, 30, 2, 16, seed=1)
    found = tangents(q, tq)
    _, expected = dual_results(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_lse=True),
        (q, q, q),
        (tq, None, None),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_primal_at_a_dual_level() -> None:
    """backward() of what has no tangent, within a level; of a sink, after it."""
    q, k, v = (_draw(1, 30, 2, 16, seed=i).requires_grad_() for i in range(3))
    sink = _draw(2).requires_grad_()
    want = torch.autograd.grad(flash_attn_func(q, k, v, learnable_sink=sink).sum(), (q, v, sink))
    with forward_ad.dual_level():
        out = flash_attn_func(q, k, v, learnable_sink=sink)
        found = torch.autograd.grad(out.sum(), (q, v, sink))
        dual = flash_attn_func(forward_ad.make_dual(q, v.detach()), k, v, learnable_sink=sink)
        primal = forward_ad.unpack_dual(dual).primal
    for gradients in (found, torch.autograd.grad(primal.sum(), (q, v, sink))):
        for one, other in zip(gradients, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_largest_score_has_no_tangent() -> None:
    q, tq = _draw(1, 30, 2, 16), _draw(1, 30, 2, 16, seed=1)
    want = flash_attn_func(q, q, q, return_max_logit=True)[1]
    with forward_ad.dual_level():
        out, largest = flash_attn_func(forward_ad.make_dual(q, tq), q, q, return_max_logit=True)
        assert torch.equal(largest, want)
        assert forward_ad.unpack_dual(largest).tangent is None
        assert forward_ad.unpack_dual(out).tangent is not None


# -- refusals ------------------------------------------------------------------------------------


def _double(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 2


PAGES = torch.zeros(1, 1, dtype=torch.int32)
SELECTED = SelectedBlocks(torch.zeros(1, 2, 32, 1, dtype=torch.int32), 64)
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "score_mod": (flash_attn_func, {"score_mod": _double}, "with score_mod, got a function"),
    "softcap": (flash_attn_func, {"softcap": 2.0}, r"with softcap, got 2\.0"),
    "selected": (flash_attn_func, {"block_sparse_tensors": SELECTED}, "with SelectedBlocks, got"),
    "pages": (flash_attn_varlen_func,
              {"page_table": PAGES, "seqused_k": torch.tensor([9], dtype=torch.int32)},
              "with page_table, got"),
    "causal": (flash_attn_varlen_func, {"causal": torch.ones(1, dtype=torch.int32)},
               "with causal as a tensor, got"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_tangents_is_refused_by_name(name: str) -> None:
    function, keywords, message = REFUSED[name]
    q = _draw(1, 32, 2, 64)
    with pytest.raises(NotImplementedError, match=rf"^forward mode .* not supported {message}"):
        torch.func.jvp(lambda q: function(q, q, q, **keywords), (q,), (q,))


def _at_dual_level(function: Callable[..., Any], **tensors: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(**{name: forward_ad.make_dual(x, x) for name, x in tensors.items()})


def test_tangents_of_other_arguments_are_refused() -> None:
    q, sink, table = _draw(1, 32, 2, 16), _draw(2), _draw(32).float()
    with pytest.raises(NotImplementedError, match="by learnable_sink, which has a tangent: detach"):
        _at_dual_level(lambda s: flash_attn_func(q, q, q, learnable_sink=s), s=sink)
    with pytest.raises(NotImplementedError, match="by learnable_sink, which has a tangent: detach"):
        torch.func.jvp(lambda s: flash_attn_func(q, q, q, learnable_sink=s), (sink,), (sink,))

    def mask_mod(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return aux[0][i[0]] > aux[0][j[0]]

    with pytest.raises(NotImplementedError, match=r"by aux_tensors\[0\], which has a tangent"):
        _at_dual_level(
            lambda t: flash_attn_func(q, q, q, mask_mod=mask_mod, aux_tensors=[t]), t=table
        )
    with pytest.raises(NotImplementedError, match="with out, got"):
        _at_dual_level(lambda q: flash_attn_func(q, q, q, out=torch.empty_like(q)), q=q)


def test_other_transforms_are_refused() -> None:
    q = _draw(1, 12, 2, 16)

    def attend(x: Tensor) -> Tensor:
        return flash_attn_func(x, q, q)

    def tangent(x: Tensor) -> Tensor:
        found: Tensor = torch.func.jvp(attend, (x,), (q,))[1]
        return found

    with pytest.raises(NotImplementedError, match=r"within torch\.func\.vmap \(jacfwd\)"):
        torch.func.jacfwd(attend)(q)
    with pytest.raises(NotImplementedError, match="at a second dual level"):
        torch.func.jvp(tangent, (q,), (q,))
    with pytest.raises(NotImplementedError, match="around Grad"):
        torch.func.jvp(torch.func.grad(lambda x: attend(x).sum()), (q,), (q,))
    with pytest.raises(
        NotImplementedError, match="tangent of attention has no gradient: detach it"
    ):
        _gradient(lambda w: meanflow_loss(w, masked, stops=False))
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        torch.func.grad(lambda x: torch.func.grad(lambda w: meanflow_loss(w, masked))(x).sum())(
            WEIGHTS
        )
    with forward_ad.dual_level():
        x = q.clone().requires_grad_()
        out = flash_attn_func(forward_ad.make_dual(x, q), q, q)
        with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
            torch.autograd.grad(out.sum(), x)
