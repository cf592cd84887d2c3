"""What a hostile call should give, in float64, dense and by autograd, and how close it has to be.

As in `oracle`, nothing here uses the package: visible pairs come from `HostileCall.visible`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cases import FP64
from gradient_oracle import FLUSHED
from oracle import NEG_INF, sequences
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
    for batch, (of_q, of_k) in enumerate(slots):
        of_q[5].fill_(True)
        for head in range(q.shape[-2]):
            kv_head = head * k.shape[-2] // q.shape[-2]
            given = [x[:, head] for x in of_q[:3]] + [x[:, kv_head] for x in of_k[:2]]
            found = _head(call, batch, head, *given)
            of_q[3][:, head], of_q[4][:, head] = found[:2]
            places = [of_q[6][:, head], of_k[2][:, kv_head], of_k[3][:, kv_head]]
            if sink is not None:
                places.append(pairs["dsink"][head])
            for place, pair in zip(places, found[2], strict=True):
                place += pair
    return Right(out, lse_by_row, rows, {name: _unit(name, x) for name, x in pairs.items()})


def _unit(name: str, pair: Tensor) -> tuple[Tensor, Tensor]:
    value, squares = pair.unbind(-1)
    unit = torch.maximum(squares.sqrt(), value.abs())
    return value, unit if name == "dsink" else unit.amax(-1, keepdim=True).expand_as(value)


def _head(
    call: HostileCall,
    batch: int,
    head: int,
    q: Tensor,
    dout: Tensor,
    dlse: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and pairs of gradients and squares of their terms, of one head of a sequence."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sink = call.keywords["learnable_sink"]
    if sink is not None:
        leaves.append(sink[head].detach().double().requires_grad_())
    q, k, v = leaves[:3]
    shown = call.visible(batch, head, q.shape[0], k.shape[0])
    raw = q @ k.T * call.softmax_scale()
    cap = call.keywords["softcap"]
    scores = cap * torch.tanh(raw / cap) if cap else raw
    if call.frame.score_mod is not None:
        # what a score_mod gets and returns is float32
        scores = call.modified(scores.float(), batch, head).double()
    (stretch,) = torch.autograd.grad(scores.sum(), raw, retain_graph=True)
    if cap and q.is_cuda:
        # The slope of a cap is 1 - tanh^2, and off by 2 * TANH_APPROX on a GPU whatever its size:
        # less than `GPU` allows of a slope of this size.
        stretch = stretch.abs().clamp(min=LEAST_SLOPE)
    of_sink = scores.new_full((len(q), 1), NEG_INF) if sink is None else leaves[3].expand(len(q), 1)
    terms = torch.cat([of_sink, scores.masked_fill(~shown, NEG_INF)], 1)
    has_terms = ~terms.isneginf().all(1)
    terms = torch.where(has_terms[:, None], terms, 0.0)
    probabilities = torch.where(has_terms[:, None], torch.softmax(terms, 1), 0.0)
    lse = torch.logsumexp(terms, 1)
    out = probabilities[:, 1:] @ v
    # what sees nothing has no gradient, whatever is given
    dout = torch.where(shown.any(1)[:, None], dout.double(), 0.0)
    dlse = torch.where(has_terms, dlse.double(), 0.0)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse), allow_unused=True)
    with torch.no_grad():
        p = probabilities[:, 1:].square()
        dp = _sum_and_terms(dout, v.T)
        delta = _sum_and_terms(dout[:, None], out[..., None])[:, 0] + dlse[:, None].square()
        ds = p * (dp + delta) * (stretch * call.softmax_scale()).square()
        squares = [ds @ k.square(), ds.T @ q.square(), p.T @ dout.square()]
        if sink is not None:
            squares.append((probabilities[:, :1].square() * delta).sum())
        pairs = [
            torch.stack([torch.zeros_like(x) if gradient is None else gradient, square], -1)
            for x, gradient, square in zip(leaves, found, squares, strict=True)
        ]
    return out.detach(), torch.where(has_terms, lse, NEG_INF).detach(), pairs


def _sum_and_terms(a: Tensor, b: Tensor) -> Tensor:
    """The square of a @ b plus the squares of the terms of its sums."""
    return (a @ b).square() + a.square() @ b.square()


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
    """Every element, those of rows in no use being 0. From |LSE| of 2^13 on: all are finite, and
    those of v sum up to dout."""
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
