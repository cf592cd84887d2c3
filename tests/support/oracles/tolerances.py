"""The error bound of the project on O and LSE, and what its terms come from."""

from __future__ import annotations

import torch
from cases import FP32
from inputs import Inputs
from mask_cases import LARGEST_STRETCH
from oracle import NEG_INF
from torch import Tensor

# Absolute bound on the float32 LSE of a kernel. The sum of n <= 8192 terms of one sign is off by at
# most n * 2^-24 = 4.9e-4 of itself and in practice by far less; a score, by d * 2^-24 * sum|q k| *
# scale < 1e-4; an exponential, by 2^-22 of itself (hardware) or 1.2e-4 (polynomial of degree 3).
# It stays below 1e-3 so that losing one of a thousand equal keys shows.
LSE_ATOL = 6e-4
# relative error that float32 leaves in calls of float64
FLOAT32 = 2.0**-18
# tanh.approx.f32 is off by at most this much of its value (PTX ISA).
TANH_APPROX = 2.0**-10.987


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


def assert_as_good(what: str, found: Tensor, exact: Tensor, eager: Tensor, name: str) -> None:
    """At most twice the largest error of the same computation in its dtype, and an ulp."""
    assert found.isfinite().all(), f"{name}: {what} is not finite"
    largest = exact.abs().amax().item() if exact.numel() else 0.0
    error, of_eager = (
        (x.double() - exact).abs().amax().item() if exact.numel() else 0.0 for x in (found, eager)
    )
    allowed = 2 * of_eager + torch.finfo(found.dtype).eps * largest
    allowed = max(allowed, FLOAT32 * max(largest, 1e-6))
    assert error <= allowed, f"{name}: {what} off by {error:.3g}, allowed {allowed:.3g}"
