"""Scores of any size on the CPU path, forward and backward, by host calls and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case
from eager import assert_close_to_oracle, assert_gradients_close
from inputs import make_output_gradients
from score_tables import TABLES, make_tabled
from trained_mods import TrainedInputs, assert_aux_gradients_close

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

CASES = (
    Case("tables", 1, 300, 300, 1, 1, head_dim=64, dtype=FP32),
    Case("tables-sink-softcap", 1, 300, 300, 1, 1, head_dim=64, dtype=FP32, softcap=5.0, sink=FP32),
    Case("tables-gqa2-packed", 1, 90, 300, 2, 1, head_dim=64, dtype=FP32, pack_gqa=True),
)


def run(given: TrainedInputs, wrap: Callable[..., Any] = lambda x: x) -> dict[str, Any]:
    """out, lse, gradients of all leaves by the functions for autograd; wrap: of a function."""
    inputs = given.inputs
    keywords = {x: y for x, y in inputs.keywords.items() if not x.startswith("window_size_")}
    function: Any = flash_attn_func
    if inputs.case.lengths_q is None:
        for name in ("seqused_q", "seqused_k"):
            keywords.pop(name)
    else:
        function = flash_attn_varlen_func
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    leaves = [q, k, v]
    sink = keywords["learnable_sink"]
    if sink is not None:
        keywords["learnable_sink"] = sink = sink.clone().requires_grad_()
        leaves.append(sink)
    aux_tensors = list(given.aux_tensors)
    for i in given.wants_aux:
        aux_tensors[i] = aux_tensors[i].clone().requires_grad_()
        leaves.append(aux_tensors[i])
    keywords["aux_tensors"] = aux_tensors
    out, lse = wrap(function)(q, k, v, return_lse=True, **keywords)
    dout, dlse = make_output_gradients(inputs)
    found = list(torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    named = dict(zip(("dq", "dk", "dv"), found, strict=False))
    named["dsink"] = None if sink is None else found[3]
    return {"out": out.detach(), "lse": lse.detach(), "daux": found[-1:], **named}


def check(given: TrainedInputs) -> dict[str, Any]:
    inputs = given.inputs
    results = run(given)
    assert_close_to_oracle(results["out"], results["lse"], inputs, lse_atol=1e-6)
    gradients = {name: results[name] for name in ("dq", "dk", "dv", "dsink")}
    dout, dlse = make_output_gradients(inputs)
    assert_gradients_close(gradients, inputs, dout, dlse, rtol=1e-6)
    assert_aux_gradients_close(results["daux"], given, dout, dlse, rtol=1e-6)
    return results


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case, name: str) -> None:
    """Also the gradients of the table: lse_low makes them as exact as float64 scores would."""
    check(make_tabled(case, name))


@pytest.mark.parametrize("name", ["causal-fp32", "steps", "hidden"])
def test_packed_sequences(name: str) -> None:
    lengths = {"lengths_q": (63, 0, 140), "lengths_k": (63, 40, 200)}
    case = Case("varlen", 1, 140, 200, 1, 1, head_dim=64, dtype=FP32, sink=FP32, **lengths)
    check(make_tabled(case, name))
    check(make_tabled(case, name, has_factor=True))


def test_rows_of_nothing_but_the_lowest_number() -> None:
    """Their output is the mean of v, not its sum, and their probabilities sum to 1."""
    given = make_tabled(CASES[0], "causal-fp32")
    results = run(given)
    rows = torch.arange(300) % 50 == 7
    mean = given.inputs.v[0, :, 0].mean(dim=0)
    torch.testing.assert_close(results["out"][0, rows, 0], mean.expand(rows.sum(), -1))
    assert (results["lse"][0, 0, rows] == torch.finfo(FP32).min).all()
    dout, _ = make_output_gradients(given.inputs)
    torch.testing.assert_close(results["dv"].sum(dim=1), dout.sum(dim=1))


@pytest.mark.parametrize("name", ["causal-1e30", "steps"])
def test_operators(name: str) -> None:
    """A graph keeps what rounding takes from LSE, too."""
    torch._dynamo.reset()
    given = make_tabled(CASES[1], name)
    found = run(given, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    expected = run(given)
    for key in ("out", "lse", "dq", "dk", "dv", "dsink"):
        torch.testing.assert_close(found[key], expected[key])
    torch.testing.assert_close(found["daux"], expected["daux"])


def test_what_autograd_keeps() -> None:
    """A number more for each row beside a score_mod, and only there."""
    inputs = make_tabled(CASES[0], "steps").inputs
    q = inputs.q.clone().requires_grad_()
    kept: list[Any] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape)
        return x

    of_mod = {name: inputs.keywords[name] for name in ("score_mod", "aux_tensors")}
    for more, count in (({}, 1), (of_mod, 2)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            flash_attn_func(q, inputs.k, inputs.v, **more)
        assert kept.count(torch.Size([1, 1, 300])) == count


def test_lse_alone() -> None:
    """What the backward documents: without lse_low each key of such a row has the probability 1."""
    given = make_tabled(CASES[0], "causal-fp32")
    inputs = given.inputs
    q, k, v = inputs.q, inputs.k, inputs.v
    keywords = inputs.bwd_keywords
    lse, lse_low = (torch.full((1, 1, 300), float("nan")) for _ in range(2))
    out, _ = _flash_attn_fwd(q, k, v, lse=lse, lse_low=lse_low, return_lse=False, **keywords)
    rows = (torch.arange(300) % 50 == 7)[None, :, None, None]
    dout = torch.ones_like(out) * rows
    with_low = _flash_attn_bwd(q, k, v, out, dout, lse, lse_low=lse_low, **keywords)
    alone = _flash_attn_bwd(q, k, v, out, dout, lse, **keywords)
    count = rows.sum().item()
    torch.testing.assert_close(with_low[2], torch.full_like(v, count / 300))
    torch.testing.assert_close(alone[2], torch.full_like(v, float(count)))
    assert all(x.isfinite().all() for x in (*with_low, *alone))


def test_lse_low_is_what_rounding_takes() -> None:
    given = make_tabled(CASES[0], "offsets")
    inputs = given.inputs
    lse_low = torch.empty(1, 1, 300)
    _, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, lse_low=lse_low, **inputs.keywords)
    assert lse is not None
    error = (lse.double() + lse_low.double() - inputs.reference[1]).abs()
    assert error.max() < 1e-6 < (lse.double() - inputs.reference[1]).abs().max()


def test_rows_that_see_nothing() -> None:
    given = make_tabled(CASES[0], "hidden")
    inputs = given.inputs
    lse_low = torch.full((1, 1, 300), float("nan"))
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, lse_low=lse_low, **inputs.keywords)
    rows = torch.arange(300) % 40 == 3
    assert lse is not None and (lse[..., rows] == -torch.inf).all()
    assert (out[:, rows] == 0).all() and (lse_low[..., rows] == 0).all()


def test_without_keys() -> None:
    """A call that launches nothing writes it, too."""
    q = torch.randn(2, 5, 1, 64)
    none = q[:, :0]
    lse_low = torch.full((2, 1, 5), float("nan"))
    mod = make_tabled(CASES[0], "steps").inputs.keywords["score_mod"]
    table = torch.zeros(5, 1)
    _, lse = _flash_attn_fwd(
        q, none, none, score_mod=mod, aux_tensors=[table], lse_low=lse_low, return_lse=False
    )
    assert lse is not None and (lse == -torch.inf).all() and (lse_low == 0).all()


def _refused(message: str, is_output: bool = False, **more: Any) -> None:
    """is_output: by the forward, which writes it, and not by the backward."""
    given = make_tabled(CASES[0], "steps").inputs
    keywords = given.keywords | more
    with pytest.raises((TypeError, ValueError), match=message):
        _flash_attn_fwd(given.q, given.k, given.v, **keywords)
    if is_output:
        return
    keywords.pop("pack_gqa")
    out, lse = torch.empty_like(given.q), torch.zeros(1, 1, 300)
    with pytest.raises((TypeError, ValueError), match=message):
        _flash_attn_bwd(given.q, given.k, given.v, out, out, lse, **keywords)


def test_lse_low_that_is_wrong() -> None:
    low = torch.zeros(1, 1, 300)
    no_mod: dict[str, Any] = {"score_mod": None, "aux_tensors": None}
    _refused("lse_low is for scores that a score_mod makes, which is None", lse_low=low, **no_mod)
    _refused("lse_low must have dtype float32, got torch.bfloat16", lse_low=low.to(BF16))
    _refused(r"lse_low must have shape \(1, 1, 300\), got \(1, 300\)", lse_low=low[0])
    _refused("lse_low must be contiguous", True, lse_low=torch.zeros(1, 1, 600)[..., ::2])
    _refused("lse_low must not share memory with lse", True, lse_low=low, lse=low)
    _refused("lse_low must be a torch.Tensor, got 0.0", lse_low=0.0)
