"""The public backward on the CPU: gradients against the oracle, and in whose memory they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bwd_calls import NAN, bwd_keywords, square_scores, square_scores_bwd
from cases import FP32, MASK_CASES, QUICK_CASES, Case
from eager import assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from torch import Tensor

from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd


def check_on_cpu(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward by the public calls, against the oracle."""
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = _flash_attn_fwd(q, k, v, **inputs.keywords)
    assert lse is not None
    keywords = bwd_keywords(inputs) | more
    gradients = _flash_attn_bwd(q, k, v, out, dout, lse, dlse=dlse, **keywords)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_gradients_close(named | {"dsink": keywords.get("dsink")}, inputs, dout, dlse)
    return gradients


# -- results on the CPU -------------------------------------------------------------------------


@pytest.mark.shares(2)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", QUICK_CASES[1::5] + MASK_CASES[::4])
def test_against_oracle(case: Case) -> None:
    inputs = make_inputs(case.packed_if_supported())
    dout, dlse = make_output_gradients(inputs)
    check_on_cpu(inputs, dout, dlse)


SMALL = Case("small", 2, 70, 130, 4, 2, causal=True, sink=FP32, head_dim=16)


def test_gradients_into_the_callers_tensors() -> None:
    """Also slices of one tensor."""
    inputs = make_inputs(replace(SMALL, seqlen_q=130))
    dout, _ = make_output_gradients(inputs)
    expected = check_on_cpu(inputs, dout)
    fused = inputs.q.new_full((2, 130, 8, 16), NAN)
    given = fused.split((4, 2, 2), dim=2)
    names = ("dq", "dk", "dv")
    found = check_on_cpu(inputs, dout, **dict(zip(names, given, strict=True)))
    assert all(x is y and torch.equal(x, z) for x, y, z in zip(found, given, expected, strict=True))


def test_output_gradients_of_any_strides() -> None:
    inputs = make_inputs(SMALL)
    dout, dlse = make_output_gradients(inputs)
    check_on_cpu(inputs, dout.transpose(1, 3).contiguous().transpose(1, 3), dlse.mT.clone().mT)
    check_on_cpu(inputs, dout[:1, :1].expand_as(dout), dlse[:, :, :1].expand_as(dlse))


def test_without_dsink_the_sink_has_no_gradient_but_counts() -> None:
    inputs = make_inputs(SMALL)
    dout, _ = make_output_gradients(inputs)
    out, lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    keywords = bwd_keywords(inputs)
    assert lse is not None
    arguments = (inputs.q, inputs.k, inputs.v, out, dout, lse)
    with_dsink = _flash_attn_bwd(*arguments, **keywords)
    del keywords["dsink"]
    without = _flash_attn_bwd(*arguments, **keywords)
    assert all(torch.equal(x, y) for x, y in zip(with_dsink, without, strict=True))


def test_a_score_mod_with_and_without_its_derivative() -> None:
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    out, lse = _flash_attn_fwd(q, k, v, score_mod=square_scores)
    assert lse is not None
    arguments = (q, k, v, out, torch.randn_like(out), lse)
    found = _flash_attn_bwd(*arguments, score_mod=square_scores)
    told = _flash_attn_bwd(*arguments, score_mod=square_scores, score_mod_bwd=square_scores_bwd)
    for x, y in zip(found, told, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    # nothing but the given derivative is believed
    wrong = _flash_attn_bwd(
        *arguments, score_mod=square_scores, score_mod_bwd=lambda grad, *rest: grad * 0.0
    )
    assert (wrong[0] == 0).all() and torch.equal(wrong[2], found[2])


@pytest.mark.parametrize("name", ["skip_blocks", "tile_m"])
def test_any_config_gives_the_same_result(name: str) -> None:
    inputs = make_inputs(Case("config", 1, 300, 200, 2, 1, head_dim=16, column="stepped2"))
    dout, _ = make_output_gradients(inputs)
    config = {"skip_blocks": {"skip_blocks": False}, "tile_m": BwdConfig(tile_m=64)}[name]
    expected = check_on_cpu(inputs, dout)
    for x, y in zip(check_on_cpu(inputs, dout, config=config), expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def test_no_graph_is_recorded() -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    out, lse = _flash_attn_fwd(q, q, q)
    assert lse is not None
    assert not any(x.requires_grad for x in _flash_attn_bwd(q, q, q, out, out, lse))


# -- whose memory a gradient may be in ----------------------------------------------------------


@pytest.mark.parametrize("output", ["dq", "dk", "dv"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_a_gradient_in_an_inputs_memory_is_refused(output: str, name: str) -> None:
    """Also after a call of the same metadata went well."""
    given = {x: torch.zeros(1, 8, 2, 16) for x in ("q", "k", "v", "out", "dout")}
    given["lse"] = torch.zeros(1, 2, 8)
    _flash_attn_bwd(**given, **{output: torch.empty_like(given["q"])})
    with pytest.raises(ValueError, match=f"{output} must not share memory with {name}"):
        _flash_attn_bwd(**given, **{output: given[name]})


def test_gradients_of_aux_tensors_and_sinks_have_memory_of_their_own() -> None:
    """Also after a call of the same metadata went well."""

    def scaled(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score * aux[0][q[0]] * aux[1][k[0]]

    given = {x: torch.zeros(1, 8, 2, 16) for x in ("q", "k", "v", "out", "dout")}
    given["lse"] = torch.zeros(1, 2, 8)
    with_aux = {"score_mod": scaled, "aux_tensors": [torch.ones(8), torch.ones(8)]}
    one, other = torch.empty(8), torch.empty(8)
    _flash_attn_bwd(**given, **with_aux, daux=[one, other])
    with pytest.raises(ValueError, match=r"daux\[1\] must not share memory with daux\[0\]"):
        _flash_attn_bwd(**given, **with_aux, daux=[one, one])
    with pytest.raises(ValueError, match=r"daux\[0\] must not share memory with dout"):
        _flash_attn_bwd(**given, **with_aux, daux=[given["dout"].flatten()[:8], other])
    with pytest.raises(ValueError, match=r"daux\[1\] must not overlap itself"):
        _flash_attn_bwd(**given, **with_aux, daux=[one, torch.empty(1).expand(8)])
    with pytest.raises(ValueError, match="dsink must not overlap itself"):
        sinks = {"learnable_sink": torch.zeros(2), "dsink": torch.empty(1).expand(2)}
        _flash_attn_bwd(**given, **sinks)


@pytest.mark.parametrize(("output", "other"), [("dk", "dq"), ("dv", "dq"), ("dv", "dk")])
def test_gradients_in_the_same_memory_are_refused(output: str, other: str) -> None:
    given = {x: torch.zeros(1, 8, 2, 16) for x in ("q", "k", "v", "out", "dout")}
    given["lse"] = torch.zeros(1, 2, 8)
    memory = torch.zeros(3, 8, 2, 16)
    for shared in (memory[:1], memory.view(1, 8, 2, 48)[..., :16]):
        with pytest.raises(ValueError, match=f"{output} must not share memory with {other}"):
            _flash_attn_bwd(**given, **{output: shared, other: shared})
    later = memory.flatten()[16:272].view(1, 8, 2, 16)
    with pytest.raises(ValueError, match=f"{output} must not share memory with {other}"):
        _flash_attn_bwd(**given, **{output: memory[:1], other: later})
    fused = memory.view(1, 8, 2, 48)
    _flash_attn_bwd(**given, **{output: fused[..., :16], other: fused[..., 16:32]})
