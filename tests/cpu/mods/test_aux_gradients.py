"""Gradients of aux tensors: against autograd in float64, through torch, refused, and their code."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import BF16, FP32, FP64, Case
from compiled_code import SWEEP, check_code
from eager import assert_gradients_close
from functional_calls import OPERATORS, RTOL, Arguments
from inputs import make_output_gradients
from planned import backward_call, planned
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trained_mods import (
    LINE_CASES,
    ORDERED_CASES,
    REACH,
    TRAINED_CASES,
    TRAINED_MODS,
    TrainedInputs,
    assert_aux_gradients_close,
    make_trained,
)

from bench.codegen import count_sass
from flash_mask_cute import flash_attn_func, interface
from flash_mask_cute.autograd import torch_ops
from flash_mask_cute.call import batch_sums as aux_order
from flash_mask_cute.call.arguments import AttentionCall, Masks, Options, Tensors
from flash_mask_cute.call.build_backward import build_bwd
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.call.tiles.arch import SM100
from flash_mask_cute.call.tiles.config import select_bwd_config
from flash_mask_cute.interface import _flash_attn_bwd
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import compiler_keeps
from flash_mask_cute.runtime.machine_code import disassembly
from flash_mask_cute.runtime.target import Target

ROOT = Path(__file__).resolve().parents[3]
TorchCall = Callable[..., Any]

SMALL: dict[str, Any] = {"head_dim": 16, "dtype": FP64}
SLOPES = (Case("slopes", 2, 12, 15, 2, 1, **SMALL), "slopes")
T5 = (Case("t5", 1, 30, 40, causal=True, **SMALL), "t5")
PAIR = (Case("pair", 1, 12, 15, causal=True, softcap=4.0, sink=FP32, **SMALL), "gain_and_bias")
PACKED = (
    Case("packed", lengths_q=(0, 9, 5), lengths_k=(4, 12, 0), mask_mod="documents", **SMALL),
    "key_bias",
)
WAYS = (SLOPES, T5, PAIR, PACKED)
ways = pytest.mark.parametrize(("case", "name"), WAYS)


def small(case: Case) -> Case:
    """In float64, with heads of 16."""
    return replace(case, dtype=FP64, head_dim=16, head_dim_v=16)


def check(given: TrainedInputs, call: TorchCall | None = None) -> list[Tensor]:
    """All gradients of a public call, against the oracle; those of the trained tensors.

    call: what to call instead of the function, with its arguments.
    """
    inputs = given.inputs
    arguments = Arguments.create(inputs).leaves()
    aux_tensors = [
        x.clone().requires_grad_() if i in given.wants_aux else x
        for i, x in enumerate(given.aux_tensors)
    ]
    keywords = arguments.keywords | {"aux_tensors": aux_tensors}
    dout, dlse = make_output_gradients(inputs)
    out, lse = (call or arguments.function)(**arguments.operands, **keywords)
    torch.autograd.backward((out, lse), (dout, dlse))
    gradients = {f"d{name}": x.grad for name, x in arguments.operands.items()}
    gradients["dsink"] = gradients.pop("dlearnable_sink", None)
    assert_gradients_close(gradients, inputs, dout, dlse, rtol=RTOL)
    assert [x.grad is not None for x in aux_tensors] == [x.requires_grad for x in aux_tensors]
    trained = [x.grad for x in aux_tensors if x.grad is not None]
    assert_aux_gradients_close(trained, given, dout, dlse, rtol=RTOL)
    return trained


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, 16, generator=generator) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


# -- values -------------------------------------------------------------------------------------


@pytest.mark.shares(6)
@pytest.mark.parametrize(("case", "name"), TRAINED_CASES + ORDERED_CASES + LINE_CASES)
def test_against_oracle(case: Case, name: str) -> None:
    check(make_trained(small(case), name))


@ways
def test_small_ones_against_oracle(case: Case, name: str) -> None:
    check(make_trained(case, name))


def test_views_of_any_strides() -> None:
    """Transposed, every second one, one number for all heads: as of a contiguous tensor."""
    given = make_trained(Case("t5", 1, 30, 40, causal=True, **SMALL), "t5")
    dout, dlse = make_output_gradients(given.inputs)
    (expected,) = check(given)
    q, k, v = given.inputs.q, given.inputs.k, given.inputs.v
    mod = TRAINED_MODS["t5"].cute

    def gradient(leaf: Tensor, table: Tensor) -> Tensor:
        out, lse = flash_attn_func(
            q, k, v, causal=True, score_mod=mod, aux_tensors=[table], return_lse=True
        )
        (found,) = torch.autograd.grad((out, lse), leaf, (dout, dlse))
        return found

    (table,) = given.trained
    leaf = table.T.clone().requires_grad_()
    assert torch.equal(gradient(leaf, leaf.T).T, expected)
    wide = table.repeat_interleave(2, 0).requires_grad_()
    assert torch.equal(gradient(wide, wide[::2])[::2], expected)
    column = table[:, :1].float().requires_grad_()
    shared = gradient(column, column.expand(-1, 2))
    each = table[:, :1].float().repeat(1, 2).requires_grad_()
    torch.testing.assert_close(shared, gradient(each, each).sum(1, keepdim=True))


def _sees_below(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32

    return k[0].to(Float32) <= aux[0][0]


@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q, k, aux: score])
def test_what_only_a_mask_reads_has_a_gradient_of_0(score_mod: TorchCall | None) -> None:
    q, k, v = qkv()
    limit, unread = (torch.full((1,), 5.0, requires_grad=True) for _ in range(2))
    aux_tensors = [limit, unread]
    out = flash_attn_func(
        q, k, v, mask_mod=_sees_below, score_mod=score_mod, aux_tensors=aux_tensors
    )
    out.sum().backward()
    assert all(x.grad is not None and x.grad.tolist() == [0.0] for x in aux_tensors)
    assert v.grad is not None and (v.grad[:, 6:] == 0).all() and (v.grad[:, :6] != 0).any()


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)])
def test_without_queries_or_keys(lengths: tuple[int, int]) -> None:
    q, k = (torch.randn(1, n, 2, 16, requires_grad=True) for n in lengths)
    slopes = torch.ones(2, requires_grad=True)
    mod = TRAINED_MODS["slopes"].cute
    flash_attn_func(q, k, k, score_mod=mod, aux_tensors=[slopes]).sum().backward()
    assert slopes.grad is not None and slopes.grad.tolist() == [0.0, 0.0]


def test_a_hidden_score_adds_nothing_though_its_derivative_is_infinite() -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        from cutlass import Float32

        distance = (q - k).to(Float32)
        return score + aux[0][h[0]] / distance  # type: ignore[no-any-return]

    q, k, v = qkv()
    bias = torch.ones(2, requires_grad=True)
    out = flash_attn_func(q, k, v, window_size=(-1, -1), causal=True, score_mod=mod,
                          mask_mod=lambda b, h, q, k, aux: k < q, aux_tensors=[bias])  # fmt: skip
    out.sum().backward()
    assert bias.grad is not None and bias.grad.isfinite().all() and (bias.grad != 0).all()


def test_what_the_page_on_mods_shows(tmp_path: Path) -> None:
    """Its text runs as it stands, and the gradient of its table is right."""
    page = (ROOT / "docs" / "mods.md").read_text()
    (text,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "table.grad" in x)
    (path := tmp_path / "snippet.py").write_text(text)
    shown = runpy.run_path(str(path))
    table = torch.zeros(32, 4, dtype=FP64, requires_grad=True)
    q, k, v = (shown[name].detach().double() for name in "qkv")
    distance = (torch.arange(200)[:, None] - torch.arange(200)).double()
    far = (16 + 4 * torch.log2(distance.clamp(min=16).float() / 16)).int().clamp(max=31)
    bucket = torch.where(distance >= 16, far, distance.clamp(min=0).int())
    scores = torch.einsum("bqhd,bkhd->bqkh", q, k) / 8 + table[bucket]
    scores = scores.masked_fill((distance < 0)[..., None], float("-inf"))
    out = torch.einsum("bqkh,bkhd->bqhd", scores.softmax(2), v)
    (expected,) = torch.autograd.grad(out.square().mean(), table)
    found = shown["table"].grad
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max()
    )


# -- through torch ------------------------------------------------------------------------------


@pytest.mark.shares(4)
@ways
def test_compiled(case: Case, name: str) -> None:
    given = make_trained(case, name)
    function = Arguments.create(given.inputs).function
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for x, y in zip(check(given, compiled), check(given), strict=True):
        assert torch.equal(x, y)


@pytest.mark.shares(3)
def test_inductor() -> None:
    given = make_trained(*PAIR)
    check(given, torch.compile(flash_attn_func, fullgraph=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("case", "name"), (PAIR, PACKED))
def test_checkpoint(case: Case, name: str, use_reentrant: bool) -> None:
    given = make_trained(case, name)
    function = Arguments.create(given.inputs).function

    def call(**everything: Any) -> Any:
        if not use_reentrant:
            return checkpoint(function, **everything, use_reentrant=False)
        # it looks for tensors among its positional arguments
        aux_tensors = everything.pop("aux_tensors")
        operands = [x for x in (*everything.values(), *aux_tensors) if isinstance(x, Tensor)]
        return checkpoint(
            lambda *_: function(**everything, aux_tensors=aux_tensors),
            *operands,
            use_reentrant=True,
        )

    check(given, call)


def test_opcheck() -> None:
    """The operator of the backward, with and without gradients of aux tensors."""
    q, k, v = (x.detach() for x in qkv())
    bias, gain = torch.rand(12, 12).to(BF16), torch.rand(2).half()
    mod = TRAINED_MODS["gain_and_bias"].cute
    masks = Masks(score_mod=mod, aux_tensors=[bias, gain])
    call = AttentionCall(Tensors(q, k, v), masks, Options(causal=True))
    arguments = torch_ops.to_operator(call)
    out, lse, lse_low, _ = OPERATORS.attention_fwd(q, k, v, None, *arguments)
    for wants_aux in ([], [1], [0, 1]):
        torch.library.opcheck(
            OPERATORS.attention_bwd.default,
            (q, k, v, None, out, lse, lse_low, torch.ones_like(out), None, wants_aux, *arguments),
        )
    aux_tensors = [bias.requires_grad_(), gain.requires_grad_()]
    arguments = torch_ops.to_operator(call._replace(masks=masks._replace(aux_tensors=aux_tensors)))
    torch.library.opcheck(OPERATORS.attention_fwd.default, (q, k, v, None, *arguments))


@pytest.mark.parametrize("compiled", [False, True])
def test_only_what_requires_grad(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of two tensors, of both, and of none."""
    asked: list[Any] = []

    run = interface.backward

    def backward(call: AttentionCall) -> Any:
        daux = call.tensors.gradients.daux
        asked.append(None if daux is None else [x is not None for x in daux])
        return run(call)

    monkeypatch.setattr(interface, "backward", backward)
    q, k, v = (x.detach() for x in qkv())
    mod = TRAINED_MODS["gain_and_bias"].cute

    def attend(q: Tensor, *aux_tensors: Tensor) -> Any:
        return flash_attn_func(q, k, v, score_mod=mod, aux_tensors=list(aux_tensors))

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    bias, gain = torch.rand(12, 12), torch.rand(2)
    leaf = gain.clone().requires_grad_()
    (alone,) = torch.autograd.grad(call(q, bias, leaf).square().sum(), leaf)
    both = [bias.clone().requires_grad_(), leaf]
    torch.testing.assert_close(torch.autograd.grad(call(q, *both).square().sum(), both)[1], alone)
    of_q = q.clone().requires_grad_()
    torch.autograd.grad(call(of_q, bias, gain).sum(), of_q)
    assert asked == [[False, True], [True, True], None]
    with torch.no_grad():
        assert call(q, *both).grad_fn is None


def test_two_calls_with_one_table_add_up() -> None:
    given = make_trained(*T5)
    (once,) = check(given)
    (table,) = (x.float().requires_grad_() for x in given.trained)
    arguments = Arguments.create(given.inputs)
    keywords = arguments.keywords | {"aux_tensors": [table]}
    dout, dlse = make_output_gradients(given.inputs)
    for _ in range(2):
        outputs = arguments.function(**arguments.operands, **keywords)
        torch.autograd.backward(outputs, (dout, dlse))
    assert table.grad is not None
    torch.testing.assert_close(table.grad / 2, once.float(), rtol=2**-8, atol=1e-3)


def test_changed_between_forward_and_backward() -> None:
    q, k, v = qkv()
    slopes = torch.ones(2, requires_grad=True)
    scaled = slopes * 2
    mod = TRAINED_MODS["slopes"].cute
    out = flash_attn_func(q, k, v, score_mod=mod, aux_tensors=[scaled])
    scaled.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    slopes = torch.ones(2, requires_grad=True)
    out = flash_attn_func(q, k, v, score_mod=TRAINED_MODS["slopes"].cute, aux_tensors=[slopes])
    (gradient,) = torch.autograd.grad(out.square().sum(), slopes, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        gradient.sum().backward()


# -- refusals -----------------------------------------------------------------------------------


def _passes_on(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad


@pytest.mark.shares(4)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"deterministic": True}, r"aux_tensors\[1\] requires grad.*deterministic=True"),
        ({"score_mod_bwd": _passes_on}, r"aux_tensors\[1\] requires grad.*score_mod_bwd"),
    ],
    ids=["deterministic", "score_mod_bwd"],
)
def test_refused_in_the_forward(
    keywords: dict[str, Any], message: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deterministic: as on Blackwell."""
    monkeypatch.setattr(aux_order, "arch_spec", lambda target: SM100)
    q, k, v = qkv()
    slopes = torch.ones(2 * REACH + 1, 2, requires_grad=True)

    def call() -> Any:
        aux_tensors = [torch.zeros(1), slopes]
        mod = TRAINED_MODS["t5"].cute
        return flash_attn_func(q, k, v, score_mod=mod, aux_tensors=aux_tensors, **keywords)

    if compiled:
        call = torch.compile(call, backend="aot_eager")
    with pytest.raises(NotImplementedError, match=message):
        call()
    with torch.no_grad():
        assert call().shape == q.shape
    slopes.requires_grad_(False)
    call().sum().backward()


def _rounds(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    from cutlass import Float32, Int32

    return score + aux[0][h[0], k[0]].to(Int32).to(Float32)


@cute.jit
def _reads_in_a_branch(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score[0] + (aux[0][h[0], k[0]] if score[0] > 0.0 else 0.0)


@pytest.mark.parametrize(
    ("mod", "what"),
    [
        (lambda score, b, h, q, k, aux: score + aux[0][h[0], None][k[0]], "slice of it"),
        (_rounds, "to an integer"),
        (_reads_in_a_branch, "move that before the branch, or pass score_mod_bwd"),
        (lambda score, b, h, q, k, aux: score + aux[0][k[0] % 2], "by other than its coordinates"),
    ],
)
def test_reads_without_a_derivative(mod: Callable[..., Any], what: str) -> None:
    q, k, v = qkv()
    table = torch.ones(2, 12, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"{what}.*detach those that"):
        flash_attn_func(q, k, v, score_mod=mod, aux_tensors=[table])
    flash_attn_func(q, k, v, score_mod=mod, aux_tensors=[table.detach()]).sum().backward()


TABLE = torch.zeros(2, 12)


@pytest.mark.parametrize(
    ("daux", "more", "error", "message"),
    [
        (3, {}, TypeError, "daux must be a list or a tuple"),
        ([None], {}, ValueError, r"each of the 2 aux_tensors, got 1"),
        ([None, 3], {}, TypeError, r"daux\[1\] must be a torch.Tensor"),
        ([None, TABLE.half()], {}, TypeError, r"daux\[1\].*float32.*float16"),
        ([None, TABLE[:1]], {}, ValueError, r"daux\[1\].*\(2, 12\).*\(1, 12\)"),
        ([torch.zeros(1), None], {}, TypeError, r"daux\[0\] must be None.*int32"),
        (
            [None, TABLE], {"score_mod_bwd": _passes_on}, NotImplementedError,
            "daux is given.*score_mod_bwd",
        ),
    ],
)  # fmt: skip
def test_wrong_daux(daux: Any, more: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    keywords = {"score_mod": TRAINED_MODS["t5"].cute, "daux": daux} | more
    aux_tensors = [torch.zeros(1, dtype=torch.int32), TABLE]
    with pytest.raises(error, match=message):
        _flash_attn_bwd(q, k, v, q, q, torch.zeros(1, 2, 12), aux_tensors=aux_tensors, **keywords)


def _pairs(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][h[0], q[0], k[0]] + aux[1][b[0], h[0], q[0], k[0]]


@pytest.mark.parametrize("q_start", [-20, torch.tensor([-20, 4], dtype=torch.int32)])
def test_sums_in_a_fixed_order_of_queries_before_the_first_position(q_start: Any) -> None:
    """All of them read what the query at position 0 reads: sums of many scores are exact."""
    q = torch.zeros(2, 30, 2, 64, dtype=BF16)
    tables = [torch.zeros(2, 64, 64), torch.zeros(2, 2, 64, 64)]
    keywords: dict[str, Any] = {"score_mod": _pairs, "aux_tensors": tables, "daux": tables}
    keywords["deterministic"] = True

    def sums(**more: Any) -> tuple[Any, Any]:
        call = backward_call(*[q] * 5, torch.zeros(2, 2, 30), **keywords, **more)
        found = planned(call, Target("sm_90a", num_sms=132))
        return found.problem.exact_aux, found.problem.entry_aux

    # a sum of one batch entry, and an element that one score reads, have an order anyway
    assert sums() == ((), (0,))
    assert sums(q_start=q_start) == ((0, 1), ())


# -- the kernel ---------------------------------------------------------------------------------


@SWEEP
@pytest.mark.parametrize(
    ("name", "head_dim", "in_order"),
    [("slopes", 64, False), ("slopes", 96, False), ("slopes", 128, False), ("slopes", 128, True),
     ("key_bias", 128, False), ("key_bias", 128, True), ("t5", 128, False), ("t5", 128, True),
     ("query_gain", 128, False), ("far_query_gain", 128, True), ("far_gain", 128, False),
     ("far_gain", 128, True), ("pair", 128, False), ("axial", 128, False),
     ("gain_and_bias", 128, False), ("gain_and_bias", 256, False)],
)  # fmt: skip
def test_compiles_well(name: str, head_dim: int, in_order: bool, tmp_path: Path) -> None:
    mod = TRAINED_MODS[name].cute
    aux = {
        "slopes": (("float32", 1),),
        "t5": (("bfloat16", 2),),
        "key_bias": (("float32", 3),),
        "query_gain": (("float16", 2), ("float32", 2)),
        "far_query_gain": (("float32", 2),),
        "far_gain": (("float32", 1),),
        "pair": (("bfloat16", 3),),
        "axial": (("float32", 2), ("float32", 2)),
        "gain_and_bias": (("bfloat16", 2), ("float16", 1)),
    }[name]
    problem = AttentionProblem(
        "bfloat16", head_dim, head_dim, is_causal=True, needs_lse=False,
        score_mod=callable_key(mod), aux=aux, wants_aux=tuple(range(len(aux))),
        deterministic=in_order, exact_aux=tuple(range(len(aux))) if in_order else (),
    )  # fmt: skip
    choice = select_bwd_config(
        *(head_dim, head_dim, problem.tuning_class), deterministic=in_order,
        modifier=problem.score_modifier,
    )  # fmt: skip
    options = f"--keep-cubin --dump-dir={tmp_path}"
    with compile_lock(), compiler_keeps(options):
        compiled = build_bwd(problem, choice, Target.default(), Mods(score_mod=mod))
    function: Any = compiled.function
    meta, counts = dict(compiled.meta), count_sass(disassembly(function.__cubin__, tmp_path))
    # Calls of some size get these sums by tables of differences. Without them, the sums along lines
    # of two reads at a time have no registers beside P and dS.
    check_code(f"{meta}, {counts}", meta, counts, 512 if name == "axial" else 0)
    if counts and name == "slopes" and not in_order:
        # where a walk turns to another head, in its cut blocks and whole ones, and at its end
        assert counts["REDG"] == 3, counts
