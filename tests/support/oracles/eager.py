"""Attention as a torch user writes it, in the dtype of the inputs, and the error bounds that its
errors are the unit of. Nothing here uses the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from cases import FP32, FP64
from mask_cases import LARGEST_STRETCH
from oracle import (
    NEG_INF,
    Dense,
    OneSequence,
    Rule,
    attend_each,
    reference_attention,
    reference_gradients,
    reference_sequence,
)
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from inputs import Inputs

# Absolute bound on the float32 LSE of a kernel. The sum of n <= 8192 terms of one sign is off by at
# most n * 2^-24 = 4.9e-4 of itself and in practice by far less; a score, by d * 2^-24 * sum|q k| *
# scale < 1e-4; an exponential, by 2^-22 of itself (hardware) or 1.2e-4 (polynomial of degree 3).
# It stays below 1e-3 so that losing one of a thousand equal keys shows.
LSE_ATOL = 6e-4
# relative error that float32 leaves in calls of float64
FLOAT32 = 2.0**-18
# tanh.approx.f32 is off by at most this much of its value (PTX ISA).
TANH_APPROX = 2.0**-10.987
# What a gradient's unit is at least, up to MANY queries, and in proportion to more of them: an
# exponential below 2**-126 is 0 on a GPU, and each query may have one.
FLUSHED, MANY = 2.0**-116, 512


def eager_same_dtype(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """As a torch user writes it: matmuls in the inputs' dtype, the rest in float32 or float64."""
    return attend_each(eager_sequence, q.dtype, q, k, v, dense, **keywords)


def attend_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out and lse (heads_q, seqlen_q) of tensors of float64, or as a torch user would write it."""
    return (reference_sequence if x.q.dtype == FP64 else eager_sequence)(x, rule)


def eager_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, d_v) in the dtype of the inputs and lse (heads_q, seqlen_q)."""
    softmax_dtype = torch.promote_types(x.q.dtype, FP32)
    k = x.k.repeat_interleave(x.group, dim=1)
    v = x.v.repeat_interleave(x.group, dim=1)
    scores = x.q.transpose(0, 1) @ k.permute(1, 2, 0) * rule.softmax_scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    modified = [x.modified(of_head, head) for head, of_head in enumerate(scores.to(softmax_dtype))]
    # also where a score_mod gives -inf, so that a row of nothing else has no NaN for a gradient
    logits = torch.stack(
        [
            of_head.masked_fill(x.hidden(rule, head) | of_head.isneginf(), NEG_INF)
            for head, of_head in enumerate(modified)
        ]
    )
    if rule.sink is not None:
        sink_column = rule.sink.to(softmax_dtype)[:, None, None].expand(-1, x.q.shape[0], 1)
        logits = torch.cat([logits, sink_column], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., : x.k.shape[0]]
    probabilities = probabilities.nan_to_num(0.0).to(x.q.dtype)
    return (probabilities @ v.transpose(0, 1)).transpose(0, 1), torch.logsumexp(logits, dim=-1)


def eager_gradients(inputs: Inputs, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
    """Like `reference_gradients`, by autograd through `eager_same_dtype`, in the dtype of the
    inputs; "dsink", rounded to that of the sink, in float64."""
    sink = inputs.plain_keywords["learnable_sink"]
    operands = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    operands |= {} if sink is None else {"dsink": sink.double()}
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    keywords = inputs.plain_keywords | {"learnable_sink": leaves.get("dsink")}
    tensors = leaves["dq"], leaves["dk"], leaves["dv"]
    out, lse = eager_same_dtype(*tensors, inputs.dense, **keywords)
    given = dout, torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    found = torch.autograd.grad((out, lse), tuple(leaves.values()), given, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    if sink is not None:
        gradients["dsink"] = gradients["dsink"].to(sink.dtype).double()
    return gradients


# -- bounds of results ---------------------------------------------------------------------------


def lse_tolerance(inputs: Inputs) -> float:
    """LSE_ATOL; with softcap also the error of tanh.approx on the largest possible score."""
    if not inputs.case.softcap:
        return LSE_ATOL
    q_norm = inputs.q[inputs.rows_in_use("q")].double().norm(dim=-1).amax().item()
    k_norm = inputs.k[inputs.rows_in_use("k")].double().norm(dim=-1).amax().item()
    largest_score = min(inputs.case.softcap, abs(inputs.case.scale) * q_norm * k_norm)
    stretch = LARGEST_STRETCH if inputs.case.score_mod else 1.0
    return LSE_ATOL + TANH_APPROX * largest_score * stretch


def assert_close_to_oracle(
    out: Tensor,
    lse: Tensor,
    inputs: Inputs,
    *,
    lse_atol: float | None = None,
    unused_rows: bool = True,
) -> float:
    """The error bound of the project, on O and on LSE; returns the largest error as a share of what
    is allowed.

    Errors of O are measured in units of the largest value of their row (batch, query, head), so
    that a row over a thousand keys is held to as much as a row over one. In these units the
    largest error is at most twice that of `eager_same_dtype` plus one ulp, and the RMS error at
    most twice the eager one plus 0.3 ulp (rounding to nearest alone makes 0.29). LSE is within
    `lse_atol`, by default `lse_tolerance`, or one of its own ulps. A row that sees nothing is
    exactly 0 and, without a sink, has an LSE of exactly -inf. `unused_rows=False` leaves out the
    rows past seqused_q, which need not be defined in outputs that the caller passed.
    """
    name = inputs.case.id
    ref_out, ref_lse = inputs.reference
    assert (out.dtype, lse.dtype) == (inputs.q.dtype, FP32), f"{name}: {out.dtype}, {lse.dtype}"
    assert out.shape == ref_out.shape, f"{name}: out {tuple(out.shape)}"
    assert lse.shape == ref_lse.shape, f"{name}: lse {tuple(lse.shape)}"

    rows = torch.ones(out.shape[:-2], dtype=torch.bool, device=out.device)
    if not unused_rows:
        rows = inputs.rows_in_use("q")
    out, ref_out, eager_out = (x[rows].double() for x in (out, ref_out, inputs.eager[0]))
    lse, ref_lse = (x.transpose(-1, -2)[rows].double() for x in (lse, ref_lse))
    assert not out.isnan().any(), f"{name}: NaN in out"
    assert not lse.isnan().any(), f"{name}: NaN in lse"

    empty = (ref_out == 0).all(dim=-1)
    assert (out[empty] == 0).all(), f"{name}: out is not 0 in a row that sees nothing"
    no_terms = ref_lse.isinf()
    assert (lse[no_terms] == NEG_INF).all(), f"{name}: lse is not -inf in a row that sees nothing"
    lse_atol = lse_tolerance(inputs) if lse_atol is None else lse_atol
    lse_error, size = (lse - ref_lse)[~no_terms].abs(), ref_lse[~no_terms].abs()
    own_ulp = torch.exp2(size.clamp(min=1.0).log2().floor()) * torch.finfo(FP32).eps
    # how often the allowed error
    share = (lse_error / own_ulp.clamp(min=lse_atol)).amax().item() if lse_error.numel() else 0.0
    assert share <= 1.0, f"{name}: lse is off by {share:.3g} times what is allowed"
    if empty.all():
        return share

    row_scale = ref_out[~empty].abs().amax(dim=-1, keepdim=True)
    error = ((out - ref_out)[~empty] / row_scale).abs()
    eager_error = ((eager_out - ref_out)[~empty] / row_scale).abs()
    ulp = torch.finfo(inputs.q.dtype).eps
    worst, rms = error.max().item(), error.square().mean().sqrt().item()
    worst_allowed = 2 * eager_error.max().item() + ulp
    rms_allowed = 2 * eager_error.square().mean().sqrt().item() + 0.3 * ulp
    assert worst <= worst_allowed, f"{name}: out off by {worst:.3g}, allowed {worst_allowed:.3g}"
    assert rms <= rms_allowed, f"{name}: RMS error of out {rms:.3g}, allowed {rms_allowed:.3g}"
    return max(share, worst / worst_allowed, rms / rms_allowed)


def assert_output_as_good(
    out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor, eager: Tensor, name: str
) -> None:
    """The bound of a drawn call, over all rows together: `assert_as_good`, and LSE_ATOL."""
    assert torch.equal(lse == NEG_INF, exact_lse == NEG_INF), name
    seen = exact_lse > NEG_INF
    assert ((lse.double() - exact_lse)[seen].abs() < LSE_ATOL).all(), name
    assert_as_good("out", out, exact_out, eager, name)


def assert_as_good(
    what: str, found: Tensor, exact: Tensor, eager: Tensor, name: str, atol: float = 0.0
) -> None:
    """At most twice the largest error of the same computation in its dtype, and an ulp."""
    assert found.isfinite().all(), f"{name}: {what} is not finite"
    largest = exact.abs().amax().item() if exact.numel() else 0.0
    error, of_eager = (
        (x.double() - exact).abs().amax().item() if exact.numel() else 0.0 for x in (found, eager)
    )
    allowed = 2 * of_eager + torch.finfo(found.dtype).eps * largest
    allowed = max(allowed, FLOAT32 * max(largest, 1e-6), atol)
    assert error <= allowed, f"{name}: {what} off by {error:.3g}, allowed {allowed:.3g}"


# -- bounds of gradients and tangents ------------------------------------------------------------


def unit_of(name: str, value: Tensor, squares: Tensor) -> Tensor:
    """What errors of a gradient are measured in: see `assert_gradients_close`."""
    unit = torch.maximum(squares.sqrt(), value.abs())
    return unit if name == "dsink" else unit.amax(dim=-1, keepdim=True).expand_as(value)


def assert_gradients_close(
    gradients: Mapping[str, Tensor | None],
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    rtol: float | None = None,
) -> float:
    """The error bound of the project, on "dq", "dk", "dv" and, with a sink, "dsink"; returns the
    largest error as a share of what is allowed.

    Errors are measured in units of their row (of a token and a head; for the sink, a head): the
    largest value, or the root of the sum of squares of the terms of a value, whichever is larger.
    A row whose terms cancel, as that of a query with a single key, is thus held to the size of the
    terms. In these units the largest error is at most twice that of `eager_gradients` plus one ulp,
    and the RMS error at most twice the eager one plus 0.3 ulp; or, with `rtol`, the largest error
    is at most that. A unit is at least FLUSHED: an exponential below 2**-126 is 0 on a GPU, so what
    a row of smaller terms (a key that only far queries see, with ALiBi) comes to is a matter of
    chance; and at least the smallest normal number of its dtype, below which fp16 has fewer bits
    for a value than an ulp counts. Where there is no term (rows that see nothing, keys that nobody
    sees, what lies past seqused_*), a gradient is exactly 0.
    """
    reference = reference_gradients(inputs, dout, dlse)
    eager = None if rtol is not None else eager_gradients(inputs, dout, dlse)
    least = FLUSHED * max(1.0, inputs.q.shape[-3] / MANY)
    operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if "dsink" in reference:
        operands["sink"] = inputs.plain_keywords["learnable_sink"]
    share = 0.0
    for operand, x in operands.items():
        name, label = f"d{operand}", f"{inputs.case.id}: d{operand}"
        gradient, (expected, squares) = gradients[name], reference[name]
        assert gradient is not None, f"{label} is None"
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape), f"{label}: {gradient.dtype}"
        assert not gradient.isnan().any(), f"{label}: NaN"
        unit = unit_of(name, expected, squares)
        has_terms = unit > 0
        smallest = max(least, torch.finfo(gradient.dtype).smallest_normal)
        unit = torch.where(has_terms, unit.clamp(min=smallest), unit)
        assert (gradient[~has_terms] == 0).all(), f"{label} is not 0 where nothing is seen"
        if not has_terms.any():
            continue

        def errors(
            x: Tensor, expected: Tensor = expected, unit: Tensor = unit
        ) -> tuple[float, float]:
            error = ((x.double() - expected) / unit)[unit > 0].abs()
            return error.max().item(), error.square().mean().sqrt().item()

        worst, rms = errors(gradient)
        if eager is None:
            assert rtol is not None and worst <= rtol, f"{label} off by {worst:.3g}"
            share = max(share, worst / rtol)
            continue
        ulp = max(torch.finfo(inputs.q.dtype).eps, torch.finfo(gradient.dtype).eps)
        worst_eager, rms_eager = errors(eager[name])
        worst_allowed, rms_allowed = 2 * worst_eager + ulp, 2 * rms_eager + 0.3 * ulp
        assert worst <= worst_allowed, f"{label} off by {worst:.3g}, allowed {worst_allowed:.3g}"
        assert rms <= rms_allowed, f"{label}: RMS error {rms:.3g}, allowed {rms_allowed:.3g}"
        share = max(share, worst / worst_allowed, rms / rms_allowed)
    if "dsink" not in reference:
        assert gradients.get("dsink") is None, f"{inputs.case.id}: a dsink without a sink"
    return share


class Pair(NamedTuple):
    """Of out and lse, or their tangents."""

    out: Tensor
    lse: Tensor


def dual_results(
    attend: Callable[..., tuple[Tensor, Tensor]], operands: tuple[Tensor, ...], tangents: tuple
) -> tuple[Pair, Pair]:
    """The results of `attend` and their tangents, 0 where there are none."""
    with forward_ad.dual_level():
        pairs = zip(operands, tangents, strict=True)
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        found = [forward_ad.unpack_dual(x) for x in attend(*duals)]
        primals = Pair(*(x.primal.clone() for x in found))
        given = (torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in found)
        return primals, Pair(*(x.clone() for x in given))


def _tangents(attend: Callable[..., Any], inputs: Inputs, tangents: tuple) -> Pair:
    def of_operands(*operands: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*operands, inputs.dense, **inputs.plain_keywords)

    return dual_results(of_operands, (inputs.q, inputs.k, inputs.v), tangents)[1]


def reference_tangents(inputs: Inputs, tangents: tuple) -> Pair:
    """In float64, of out and lse; 0 in rows that see nothing and in rows that are not in use."""
    return _tangents(reference_attention, inputs, tangents)


def eager_tangents(inputs: Inputs, tangents: tuple) -> Pair:
    """In the dtype of the inputs, as a torch user would have them."""
    # a softmax of nothing is NaN there
    return Pair(*(x.nan_to_num(0.0) for x in _tangents(eager_same_dtype, inputs, tangents)))


def assert_tangents_close(found: Pair, inputs: Inputs, tangents: tuple) -> None:
    """On both tangents: twice the error of eager attention in the same dtype, and an ulp."""
    exact, eager = reference_tangents(inputs, tangents), eager_tangents(inputs, tangents)
    assert_as_good_as_eager(found, exact, eager, inputs.case.id)


def assert_as_good_as_eager(found: Pair, exact: Pair, eager: Pair, name: str) -> None:
    """As `assert_tangents_close`, of tangents that are known."""
    for what, tensor in found._asdict().items():
        assert_as_good(f"t{what}", tensor, getattr(exact, what), getattr(eager, what), name)
