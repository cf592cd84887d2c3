"""What a hostile call should give, of the pairs that it says are visible, and how close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cases import FP64
from gradient_oracle import FLUSHED, add_gradients, unit_of
from oracle import NEG_INF, OneSequence, Rule, reference_sequence, sequences
from random_hostile import HostileCall
from tolerances import TANH_APPROX
from torch import Tensor

# slopes of a soft cap on a GPU are held to the bound of one of this size, if they are smaller
LEAST_SLOPE = 0.05
# |LSE| up to which gradients are held to the reference; beyond, P is only known to sum to 1.
LARGE_LSE = 2.0**13


class Bound(NamedTuple):
    """out and gradients: an error of `ulps` of their dtype and `rtol`, in units of their row. lse:
    `atol` and an ulp of itself. tanh: relative error of that of a soft cap."""

    ulps: float
    rtol: float
    atol: float
    tanh: float = 0.0

    def under(self, call: HostileCall) -> Bound:
        """With what the soft cap of a call adds to the error of a score."""
        more = self.tanh * call.keywords["softcap"]
        return self._replace(rtol=self.rtol + 2 * more, atol=self.atol + more)


CPU = Bound(1.0, 2e-6, 2e-5)
# P and dS are rounded to 16 bits before they are multiplied
GPU = Bound(3.0, 1e-4, 1e-3, TANH_APPROX)


@dataclass
class Right:
    """Results in float64, and the unit of each element's error; rows in no use are not in `rows`.

    gradients: "dq", "dk", "dv" and, with a sink, "dsink", each with its units.
    """

    out: Tensor
    lse_by_row: Tensor
    rows: Tensor
    gradients: dict[str, tuple[Tensor, Tensor]]

    @property
    def largest_lse(self) -> float:
        finite = self.lse_by_row[self.rows]
        finite = finite[finite.isfinite()].abs()
        return finite.max().item() if finite.numel() else 0.0


def right(call: HostileCall) -> Right:
    """What the call should give."""
    q, k, v, sink = call.q, call.k, call.v, call.keywords["learnable_sink"]
    cap = call.keywords["softcap"]
    # The slope of a cap is 1 - tanh^2, and off by 2 * TANH_APPROX on a GPU whatever its size.
    least_slope = LEAST_SLOPE if cap and q.is_cuda else 0.0
    rule = Rule(call.softmax_scale(), softcap=cap, sink=sink, least_slope=least_slope)
    dlse_by_row = call.dlse.transpose(-1, -2)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=FP64, device=q.device)
    lse_by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    rows = torch.zeros(q.shape[:-1], dtype=torch.bool, device=q.device)
    names = {"dq": q, "dk": k, "dv": v} | ({} if sink is None else {"dsink": sink})
    # the last mode: the gradient, and the sum of squares of its terms
    pairs = {
        name: torch.zeros((*x.shape, 2), dtype=FP64, device=x.device) for name, x in names.items()
    }
    like_q = (q, call.dout, dlse_by_row, out, lse_by_row, rows, pairs["dq"])
    slots = sequences(like_q, (k, v, pairs["dk"], pairs["dv"]), **call.keywords)
    for batch, ((q, dout, dlse, of_out, of_lse, used, dq), (k, v, dk, dv)) in enumerate(slots):
        used.fill_(True)
        x = OneSequence(q, k, v, batch, call)
        found, lse = reference_sequence(x, rule)
        of_out.copy_(found)
        of_lse.copy_(lse.T)
        add_gradients(x, rule, pairs | {"dq": dq, "dk": dk, "dv": dv}, dout, dlse.T)
    gradients = {name: x.unbind(-1) for name, x in pairs.items()}
    units = {name: (value, unit_of(name, value, y)) for name, (value, y) in gradients.items()}
    return Right(out, lse_by_row, rows, units)


# -- how close -----------------------------------------------------------------------------------


def check_forward(call: HostileCall, expected: Right, out: Tensor, lse: Tensor, by: Bound) -> None:
    """Rows that a sequence has in use."""
    assert out.dtype == call.q.dtype and out.shape == expected.out.shape, f"out {out.shape}"
    assert lse.dtype == torch.float32, lse.dtype
    lse_by_row = lse.transpose(-1, -2)[expected.rows].double()
    out = out[expected.rows].double()
    truth, lse_truth = expected.out[expected.rows], expected.lse_by_row[expected.rows]
    assert not out.isnan().any(), "NaN in out"
    assert not lse_by_row.isnan().any(), "NaN in lse"
    is_empty = lse_truth.isneginf()
    assert (lse_by_row[is_empty] == NEG_INF).all(), "lse of a row that sees nothing"
    assert (out[(truth == 0).all(-1)] == 0).all(), "out of a row that sees nothing"
    ulp = 2.0**-23 * lse_truth[~is_empty].abs()
    off = (lse_by_row - lse_truth)[~is_empty].abs() - (by.atol + ulp)
    assert (off <= 0).all(), f"lse is off by {off.max().item():.3g} more than allowed"
    allowed = by.ulps * torch.finfo(call.q.dtype).eps + by.rtol
    unit = truth.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(call.q.dtype).tiny)
    worst = ((out - truth).abs() / unit).max().item() if out.numel() else 0.0
    assert worst <= allowed, f"out is off by {worst:.3g}, allowed {allowed:.3g}"


def check_gradients(
    call: HostileCall, expected: Right, gradients: dict[str, Tensor | None], by: Bound
) -> None:
    """Every element. From |LSE| of 2^13 on: all are finite, and those of v sum up to dout."""
    largest = expected.largest_lse
    for name, (truth, unit) in expected.gradients.items():
        found = gradients[name]
        assert found is not None, f"no {name}"
        assert found.shape == truth.shape, f"{name} {found.shape}"
        assert found.isfinite().all(), f"{name} is not finite"
        has_terms = unit > 0
        assert (found[~has_terms] == 0).all() or largest >= LARGE_LSE, f"{name} is not 0"
        if largest < LARGE_LSE and has_terms.any():
            # a sink of more bits than out, which its gradient is computed from
            eps = max(torch.finfo(x.dtype).eps for x in (found, call.q))
            # P is computed from an LSE in float32
            allowed = by.ulps * eps + by.rtol + 2.0**-23 * largest
            smallest = max(torch.finfo(found.dtype).smallest_normal, FLUSHED)
            worst = ((found.double() - truth).abs() / unit.clamp(min=smallest))[has_terms].max()
            assert worst <= allowed, f"{name} is off by {worst.item():.3g}, allowed {allowed:.3g}"
    if largest >= LARGE_LSE and call.keywords["learnable_sink"] is None:
        _check_sum_of_dv(call, expected, gradients["dv"], by)


def _check_sum_of_dv(call: HostileCall, expected: Right, dv: Any, by: Bound) -> None:
    has_terms = expected.lse_by_row.isfinite() & expected.rows
    dout = torch.where(has_terms[..., None], call.dout.double(), 0.0)
    heads = dout.shape[-2] // dv.shape[-2]
    expected_sum = dout.flatten(0, -3).sum(0).unflatten(0, (dv.shape[-2], heads)).sum(1)
    size = dout.abs().flatten(0, -3).sum(0).unflatten(0, (dv.shape[-2], heads)).sum(1)
    off = (dv.double().flatten(0, -3).sum(0) - expected_sum).abs()
    allowed = (4 * by.ulps * torch.finfo(dv.dtype).eps + 1e-3) * size
    assert (off <= allowed).all(), f"P does not sum to 1: dv is off by {(off / size).max():.3g}"
