"""Derivatives of score modifiers against torch.autograd in fp64, compiled for the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import hypothesis.strategies as st
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.math import tanh as early_bound_tanh
from derived import (
    BATCH,
    GENERATOR,
    HEAD,
    K_IDX,
    Q_IDX,
    SHAPE,
    check,
    derive,
    fake_tensor,
    points,
    trace,
)
from hypothesis import given, settings
from mask_cases import SCORE_MODS, Extents
from torch import Tensor

from flash_mask_cute.mods.calling import ScorePlace
from flash_mask_cute.mods.derivative import call_score_mod_bwd
from flash_mask_cute.mods.on_cpu import compile_for_host
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.utils import scalar_to_ssa

pytestmark = pytest.mark.usefixtures("same_points_for_each_test")

m = cute.math

# -- ways to write a modifier -------------------------------------------------------------------


def _scaled_tanh(scale: float) -> Callable[..., Any]:
    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
        return scale * cute.math.tanh(score * (1.0 / scale), fastmath=True)

    return score_mod


def _partially(scale, score, b, h, q, k, aux):
    return scale * early_bound_tanh(score / scale)


@cute.jit
def _inner(x):
    return cute.math.tanh(x * 0.5) * 2.0


@cute.jit
def _calls_another(score, b, h, q, k, aux):
    return _inner(score)


@pytest.mark.parametrize(
    "mod",
    [
        _scaled_tanh(2.0),
        functools.partial(_partially, 2.0),
        _calls_another,
        lambda s, b, h, q, k, aux: scalar_to_ssa(2.0 * early_bound_tanh(s[0] / 2.0), Float32),
    ],
    ids=["closure", "partial", "nested", "scalar"],
)
def test_ways_to_write_a_cap(mod: Callable[..., Any]) -> None:
    check(mod, lambda x: 2 * torch.tanh(x / 2), points(-5, 5))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    recipe = SCORE_MODS[name]
    extents = Extents(batch=2, heads_q=3, seqlen_q=70, seqlen_k=90)
    aux = None if recipe.aux is None else [recipe.aux(extents, GENERATOR)]
    scores, weights = points(-3, 3), points(-1, 1)
    got = derive(recipe.cute, scores, aux, () if aux is None else (0,), weights)

    x = scores.double().requires_grad_()
    table = None if aux is None else [aux[0].double().requires_grad_()]
    q, k = Q_IDX[:, None].long(), K_IDX[None].long()
    expected = recipe.dense(x, BATCH, HEAD, q, k, table)
    wanted = [x] if table is None else [x, *table]
    slopes, *sums = torch.autograd.grad((expected * weights).sum(), wanted)
    torch.testing.assert_close(got.values.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.slopes.double() * weights, slopes, rtol=1e-6, atol=1e-6)
    for one, other in zip(got.sums, sums, strict=True):
        assert other.any()
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_values_are_those_of_the_modifier_itself() -> None:
    from flash_mask_cute.mods.on_cpu import eval_score_mod

    mod, scores = _scaled_tanh(3.0), points(-9, 9)
    values = eval_score_mod(mod, scores, None, BATCH, HEAD, Q_IDX, K_IDX)
    assert torch.equal(derive(mod, scores).values, values)


@pytest.mark.parametrize(
    ("mod", "slope"),
    [
        (lambda s, b, h, q, k, aux: 3.0, 0.0),
        (lambda s, b, h, q, k, aux: (q - k).to(Float32), 0.0),
        (lambda s, b, h, q, k, aux: (s > 0.5).to(Float32), 0.0),
        (lambda s, b, h, q, k, aux: s, 1.0),
        (lambda s, b, h, q, k, aux: s[0], 1.0),
        (lambda s, b, h, q, k, aux: s - s, 0.0),
    ],
    ids=["number", "indices", "comparison", "same vector", "same scalar", "difference"],
)
def test_constant_slopes(mod: Callable[..., Any], slope: float) -> None:
    assert derive(mod, points(0, 1)).slopes.eq(slope).all()


def test_where_with_the_score_on_either_side() -> None:
    def mod(score, b, h, q, k, aux):
        near = cute.where(q - k < 9, score * score, 1.0)
        far = cute.where(k > q, cute.full_like(score, -math.inf), 3.0 * score)
        chosen = cutlass.select_(q[0] > k[0], score[0], Float32(2.0))
        return near + far + chosen

    x = points(-2, 2)
    q, k = Q_IDX[:, None], K_IDX
    slopes = torch.where(q - k < 9, 2 * x, 0) + torch.where(k > q, 0, 3.0) + (q > k).float()
    got = derive(mod, x)
    assert got.values.isinf().any()
    torch.testing.assert_close(got.slopes, slopes)


def _stretch(score, b, h, q, k, aux):
    return 1.1 * score


# -- branches at run time -----------------------------------------------------------------------


@cute.jit
def _branches(score, b, h, q, k, aux):
    x = score[0]
    y = x if q[0] > k[0] else Float32(3.0)
    z = x * x
    if k[0] > 30:
        z = cute.math.exp(x)
        if q[0] > 10:
            z = z * y
    elif x > 0.0:
        z = -x
    slope = Float32(0.5)
    if q[0] == 3:
        slope = Float32(0.25)
    return y + z * slope


def test_branches_on_scalars() -> None:
    def dense(x: Tensor) -> Tensor:
        q, k = Q_IDX[:, None], K_IDX[None]
        y = torch.where(q > k, x, 3.0)
        far = torch.where(q > 10, x.exp() * y, x.exp())
        z = torch.where(k > 30, far, torch.where(x > 0, -x, x * x))
        return y + z * torch.where(q == 3, 0.25, 0.5)

    check(_branches, dense, points(-2, 2))


@cute.jit
def _loads_in_a_branch(score, b, h, q, k, aux):
    x = score[0]
    if k[0] > 30:
        x = x * aux[0][k[0]]
    return x


@cute.jit
def _loads_beside_the_score(score, b, h, q, k, aux):
    bias = Float32(0.0)
    if k[0] > 30:
        bias = aux[0][k[0] - 30]
    return score * bias


@cute.jit
def _loops(score, b, h, q, k, aux):
    x = score[0]
    for _ in range(k[0]):
        x = x * 1.01
    return x


@cute.jit
def _loops_inside(score, b, h, q, k, aux):
    x = Float32(0.0)
    for i in range(k[0]):
        x = x + score[0] * i
    return x


def test_reads_under_a_condition() -> None:
    table = points(-1, 1).flatten()
    table = torch.cat([table, table])
    with pytest.raises(NotImplementedError, match=r"branch .* contains llvm\.load"):
        derive(_loads_in_a_branch, points(0, 1), [table])
    with pytest.raises(NotImplementedError, match=r"branch .* contains cute\.memref\.load"):
        derive(_loads_beside_the_score, points(0, 1), [table], (0,))
    # what does not depend on the score stays in its branch
    got = derive(_loads_beside_the_score, points(0, 1), [table])
    slopes = torch.where(K_IDX > 30, table[(K_IDX - 30).clamp(min=0)], 0).expand(SHAPE)
    assert torch.equal(got.slopes, slopes)


# -- aux tensors --------------------------------------------------------------------------------


@cute.jit
def _two_reads(score, b, h, q, k, aux):
    scale = scalar_to_ssa(aux[0][h[0], q[0]], Float32)
    bias = aux[1][k[0]].to(Float32)
    again = aux[1][q[0]]
    return score * scale * bias + aux[0][h[0], q[0]] * bias + cute.math.sin(score * again)


@pytest.mark.parametrize("wants_aux", [(0, 1), (1,), (0,), (1, 0)])
def test_products_of_reads(wants_aux: tuple[int, ...]) -> None:
    scale = torch.randn((90, 3), generator=GENERATOR).T
    bias = torch.randn((90,), generator=GENERATOR)
    scores, weights = points(-2, 2), points(-1, 1)
    got = derive(_two_reads, scores, [scale, bias], wants_aux, weights)

    x, s, t = (y.double().requires_grad_() for y in (scores, scale, bias))
    q, k = Q_IDX.long()[:, None], K_IDX.long()[None]
    value = x * s[HEAD, q] * t[k] + s[HEAD, q] * t[k] + torch.sin(x * t[q])
    slopes, *sums = torch.autograd.grad((value * weights).sum(), (x, s, t))
    torch.testing.assert_close(got.slopes.double() * weights, slopes, rtol=1e-5, atol=1e-5)
    for i, one in zip(wants_aux, got.sums, strict=True):
        torch.testing.assert_close(one.double(), sums[i], rtol=1e-5, atol=1e-5)


def test_coordinates_are_those_of_the_read() -> None:
    """Numbers, 64-bit indices and computed ones; a read that does not matter gives no term."""

    def mod(score, b, h, q, k, aux):
        table = aux[0]
        unused = table[0, 0, 0, 0]  # noqa: F841
        far = cutlass.min(k[0] - q[0] + 70, 5)
        return score + table[1, cutlass.Int64(h[0]), far, 0] * score + table[b[0], 0, 4, 1]

    table = torch.randn((2, 3, 6, 2), generator=GENERATOR)
    q_before = Q_IDX.clone()
    scores, weights = points(-2, 2), points(-1, 1)
    got = derive(mod, scores, [table], (0,), weights)
    t = table.double().requires_grad_()
    far = (K_IDX[None] - Q_IDX[:, None] + 70).clamp(max=5).long()
    value = scores + t[1, HEAD, far, 0] * scores + t[BATCH, 0, 4, 1]
    (sums,) = torch.autograd.grad((value * weights).sum(), t)
    torch.testing.assert_close(got.sums[0].double(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(Q_IDX, q_before)


def test_a_read_that_does_not_matter_has_no_term() -> None:
    """The sums are None here, so a term would fail the trace."""

    def mod(score, b, h, q, k, aux):
        aux[0][k[0]]
        return cute.where(scalar_to_ssa(aux[0][q[0]], Float32) > 0.0, score, 2.0 * score)

    assert "cute.memref.load" in trace(mod, torch.zeros(90), wants_aux=(0,))


def test_what_is_not_a_number_of_a_wanted_tensor() -> None:
    scores, table = points(0, 1), torch.zeros((90, 3))
    with pytest.raises(ValueError, match=r"gradient of aux_tensors\[1\] is wanted.*Int32"):
        derive(_stretch, scores, [table, table.int()], (1,))
    with pytest.raises(ValueError, match=r"aux_tensors\[2\] is wanted, but there are 1"):
        trace(_stretch, table, wants_aux=(2,))
    with pytest.raises(ValueError, match=r"aux_tensors\[0\] is wanted, but there are 0"):
        trace(_stretch, wants_aux=(0,))


# -- what is refused ----------------------------------------------------------------------------


def _stores(score, b, h, q, k, aux):
    kept = cute.make_rmem_tensor((1,), Float32)
    kept.store(score)
    return kept.load()


def _stores_element(score, b, h, q, k, aux):
    kept = cute.make_rmem_tensor((1,), Float32)
    kept[0] = score[0]
    return score


@cute.jit
def _chooses_a_table(score, b, h, q, k, aux):
    table = aux[0]
    if h[0] > 1:
        table = aux[0]
    return score + table[k[0]]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "integer": (lambda s, b, h, q, k, aux: s + s.to(Int32), r"converts it to an integer \(arith\."),
    "index": (lambda s, b, h, q, k, aux: aux[0][s[0].to(Int32)], "converts it to an integer"),
    "bits": (lambda s, b, h, q, k, aux: s.bitcast(Int32).bitcast(Float32), "reinterprets the bits"),
    "bits of a scalar": (lambda s, b, h, q, k, aux: s[0].bitcast(Int32), "reinterprets the bits"),
    "store": (_stores, r"cute\.memref\.store"),
    "store of an element": (_stores_element, r"cute\.memref\.store"),
    "reduction": (lambda s, b, h, q, k, aux: s.reduce(cute.ReductionOp.ADD, 0.0, 0),
                  r"vector\.reduction"),
    "vector": (lambda score, b, h, q, k, aux: score.broadcast_to((2,))[1], r"\(vector\."),
    "loop": (_loops, r"loop at run time \(scf\.for\)"),
    "loop inside": (_loops_inside, r"loop at run time \(scf\.for\)"),
    "assembly": (
        lambda s, b, h, q, k, aux: cute.arch.inline_ptx(
            "tanh.approx.f32 {$w0}, {$r0};",
            write_only_types=[Float32],
            read_only_args=[s[0]],
        ),
        "inline_",
    ),
    "flags": (lambda s, b, h, q, k, aux: cute.arch.fmax(s[0], s[0], abs=True), r"nvvm\.fmax"),
    "print": (lambda s, b, h, q, k, aux: (cute.printf("{}", s[0]), s)[1], r"cute\.print"),
    "slice": (lambda s, b, h, q, k, aux: s + aux[1][None, h[0]][k[0]], "takes a slice of it"),
    "pointer": (lambda s, b, h, q, k, aux: s + cute.make_tensor(aux[0].iterator + k[0], 1)[0],
                "by its pointer"),
    "chosen": (_chooses_a_table, "chooses it by a branch on a run-time condition"),
    "one coordinate of two": (lambda s, b, h, q, k, aux: s * aux[1][k[0]], r"its coordinates"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    mod, text = REFUSED[name]
    aux = [torch.zeros(90), torch.zeros((90, 3))]
    with pytest.raises(NotImplementedError, match=f"{text}.*pass score_mod_bwd"):
        derive(mod, points(0, 1), aux, (0, 1))


def test_errors_of_the_modifier_stay() -> None:
    with pytest.raises(TypeError, match="truth value of a vector"):
        derive(lambda s, b, h, q, k, aux: (q > k) and s, points(0, 1))
    with pytest.raises(TypeError, match="returned None"):
        derive(lambda s, b, h, q, k, aux: None, points(0, 1))


# -- the user's own derivative ------------------------------------------------------------------


@cute.jit
def _apply_bwd(score_mod_bwd: cutlass.Constexpr, grads: Any, scores: Any, aux: Any) -> None:
    for i in range(cute.size(scores)):
        grads[i] = call_score_mod_bwd(
            score_mod_bwd,
            grads[i],
            scores[i],
            ScorePlace(Int32(1), Int32(2), Int32(3), Int32(i)),
            aux,
        )


def test_score_mod_bwd() -> None:
    @cute.jit
    def bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
        slope = cute.where(kv_idx > q_idx, 2.0 * score, 1.0)
        return grad * slope * aux_tensors[0][b_idx[0], h_idx[0]]

    grads, scores, table = points(-1, 1).flatten(), points(-1, 1).flatten(), torch.rand(2, 3)
    k = torch.arange(len(scores))
    expected = grads * torch.where(k > 3, 2 * scores, 1.0) * table[1, 2]
    with compile_lock():
        function = compile_for_host(
            ("score_mod_bwd", bwd),
            _apply_bwd,
            bwd,
            fake_tensor(grads),
            fake_tensor(scores),
            (fake_tensor(table),),
        )
    function(grads, scores, (table,))
    torch.testing.assert_close(grads, expected)


# -- random expressions -------------------------------------------------------------------------

Expression = tuple[Any, ...]
SMOOTH = ("tanh", "sin", "cos", "exp", "atan", "log1p", "sqrt", "rcp", "abs")
PAIRS = ("+", "-", "*", "where", "max", "div", "atan2")


def expressions() -> st.SearchStrategy[Expression]:
    leaves = st.sampled_from([("x",), ("x",), ("q",), ("bias",)]) | st.floats(-2, 2).map(
        lambda c: ("c", round(c, 2))
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.tuples(st.sampled_from(SMOOTH), inner)
            | st.tuples(st.sampled_from(PAIRS), inner, inner)
        ),
        max_leaves=12,
    )


def traced(e: Expression, leaves: dict[str, Any]) -> Any:
    name, *rest = e
    if name == "c":
        return cute.full((1,), rest[0], Float32)
    if not rest:
        return leaves[name]
    x = traced(rest[0], leaves)
    if len(rest) == 1:
        positive = {"log1p": x * x, "sqrt": x * x + 0.5, "rcp": x * x + 0.5, "exp": m.tanh(x)}
        return getattr(m, name)(positive.get(name, x))
    y = traced(rest[1], leaves)
    return {
        "+": lambda: x + y,
        "-": lambda: x - y,
        "*": lambda: x * m.sin(y),
        "where": lambda: cute.where(leaves["q"] > 0.5, x, y),
        "max": lambda: m.max(x, y * 1.01 + 0.003),
        "div": lambda: x / (y * y + 1.0),
        "atan2": lambda: m.atan2(x, y * y + 0.5),
    }[name]()


def dense(e: Expression, leaves: dict[str, Tensor]) -> Tensor:
    name, *rest = e
    if name == "c":
        return torch.full(SHAPE, rest[0], dtype=torch.float64)
    if not rest:
        return leaves[name]
    x = dense(rest[0], leaves)
    if len(rest) == 1:
        positive = {"log1p": x * x, "sqrt": x * x + 0.5, "rcp": x * x + 0.5, "exp": x.tanh()}
        function = torch.reciprocal if name == "rcp" else getattr(torch, name)
        return function(positive.get(name, x))
    y = dense(rest[1], leaves)
    return {
        "+": lambda: x + y,
        "-": lambda: x - y,
        "*": lambda: x * y.sin(),
        "where": lambda: torch.where(leaves["q"] > 0.5, x, y),
        "max": lambda: torch.maximum(x, y * 1.01 + 0.003),
        "div": lambda: x / (y * y + 1.0),
        "atan2": lambda: torch.atan2(x, y * y + 0.5),
    }[name]()


@pytest.mark.shares(3)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(expressions())
def test_random_expressions(e: Expression) -> None:
    def mod(score, b, h, q, k, aux):
        leaves = {
            "x": score,
            "q": q.to(Float32) * 0.03,
            "bias": scalar_to_ssa(aux[0][k[0]], Float32),
        }
        return traced(e, leaves)

    GENERATOR.manual_seed(1)
    scores, bias = points(-2, 2), torch.randn(90, generator=GENERATOR)
    got = derive(mod, scores, [bias], (0,))
    x, t = scores.double().requires_grad_(), bias.double().requires_grad_()
    leaves = {"x": x, "q": (Q_IDX[:, None] * 0.03).double().expand(SHAPE), "bias": t[K_IDX.long()]}
    leaves["bias"] = leaves["bias"].expand(SHAPE)
    expected = dense(e, leaves)
    if not expected.requires_grad:
        assert got.slopes.eq(0).all()
        return
    slopes, sums = torch.autograd.grad(expected.sum(), (x, t), materialize_grads=True)
    scale = 1e-4 * (1 + slopes.abs().max() + sums.abs().max()).item()
    torch.testing.assert_close(got.slopes.double(), slopes, rtol=1e-4, atol=scale)
    torch.testing.assert_close(got.sums[0].double(), sums, rtol=1e-4, atol=scale)
