"""Runs a hostile call, forward and gradients, and says what came of it, and how close it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from eager import FLUSHED, TANH_APPROX, unit_of
from oracle import NEG_INF, each_sequence, gradients_and_squares, reference_attention
from random_hostile import HostileCall, Wrapped
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

REFUSALS = (TypeError, ValueError, NotImplementedError, IndexError)
# How messages call arguments that every call has, their parts, and what the host calls name else.
_NAMES = {
    *("q", "k", "v", "out", "dout", "lse", "dlse"),
    *("heads_q", "heads_kv", "head_dim", "head_dim_v", "mask_block_idx", "full_block_idx"),
    *("window_size_left", "window_size_right", "block_sparse_tensors_torch"),
}


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


class Outcome(NamedTuple):
    kind: Literal["right", "refused", "wrong"]
    text: str


def run_call(call: HostileCall, by: Bound) -> Outcome:
    """Through autograd, or through the two host calls."""
    try:
        try:
            results = _by_autograd(call) if call.by_autograd else _by_host_calls(call)
        except REFUSALS as error:
            return _refusal(call, error)
        if call.slip is not None:
            return Outcome("wrong", f"{call.describe()}: {call.slip} was not refused")
        out, lse, gradients = results
        expected, by = right(call), by.under(call)
        check_forward(call, expected, out, lse, by)
        # the host call of the backward knows lse alone, which tells too little of a larger one
        if call.by_autograd or expected.largest_lse < LARGE_LSE:
            check_gradients(call, expected, gradients, by)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Outcome("wrong", f"{call.describe()}: {said}")
    return Outcome("right", "")


def assert_none_is_wrong(calls: Iterable[HostileCall], by: Bound) -> None:
    """Of many, at least half are right, and not refused."""
    outcomes = [run_call(call, by) for call in calls]
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(wrong[:8])
    others = [outcome.text for outcome in outcomes if outcome.kind != "right"]
    assert len(outcomes) < 20 or len(others) <= (len(outcomes) + 1) // 2, others


def _refusal(call: HostileCall, error: Exception) -> Outcome:
    text = str(error)
    given = {name for name, value in call.keywords.items() if value is not None}
    names = _NAMES | given | ({call.slip} if call.slip else set())
    said = f"{type(error).__name__}: {text}".partition("\n")[0]
    if any(re.search(rf"\b{re.escape(name)}\b", text) for name in names):
        return Outcome("refused", said)
    return Outcome("wrong", f"{call.describe()}: refused, and no argument of it named: {said}")


Results = tuple[Tensor, Tensor, dict[str, Tensor | None]]


def _by_autograd(call: HostileCall) -> Results:
    keywords = call.keywords | {"q": call.q, "k": call.k, "v": call.v}
    for name in ("q", "k", "v", "learnable_sink"):
        if keywords[name] is not None:
            keywords[name] = keywords[name].detach()
    for name in call.wrapped:
        keywords[name] = tree_map_only(Tensor, Wrapped, keywords[name])
    sink = keywords["learnable_sink"]
    leaves = [keywords["q"], keywords["k"], keywords["v"], *([] if sink is None else [sink])]
    for x in leaves:
        if x.is_floating_point():
            x.requires_grad_()
    has_lengths = call.frame.packed or call.frame.used
    function: Any = flash_attn_varlen_func if has_lengths else flash_attn_func
    out, lse = function(return_lse=True, **keywords)
    found = torch.autograd.grad((out, lse), leaves, (call.dout, call.dlse))
    results = out.detach(), lse.detach(), *found
    out, lse, *gradients = (x.plain if isinstance(x, Wrapped) else x for x in results)
    return out, lse, dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))


def _by_host_calls(call: HostileCall) -> Results:
    keywords = dict(call.keywords)
    left, right_side = (None if side == -1 else side for side in keywords.pop("window_size"))
    keywords |= {"window_size_left": left, "window_size_right": right_side}
    if "block_sparse_tensors" in keywords:
        keywords["block_sparse_tensors_torch"] = keywords.pop("block_sparse_tensors")
    tensors = call.q, call.k, call.v
    out, lse = _flash_attn_fwd(*tensors, out=call.out, **keywords)
    assert lse is not None
    sink = keywords["learnable_sink"]
    dsink = None if sink is None else torch.full_like(sink, float("nan"))
    dq, dk, dv = _flash_attn_bwd(
        *tensors, out, call.dout, lse, dlse=call.dlse, dsink=dsink, **keywords
    )
    return out, lse, {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


class Right(NamedTuple):
    """Results in float64; rows in no use are not in `rows`.

    gradients: "dq", "dk", "dv" and, with a sink, "dsink", each with the unit of its errors.
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
    """What the call should give of the pairs that it says are visible."""
    keywords, tensors = call.plain_keywords(), (call.q, call.k, call.v, call.dense)
    out, lse = reference_attention(*tensors, **keywords)
    rows = torch.zeros(out.shape[:-1], dtype=torch.bool, device=out.device)
    for _, (used,), _ in each_sequence(*tensors, (rows,), **keywords):
        used.fill_(True)
    # The slope of a cap is 1 - tanh^2, and off by 2 * TANH_APPROX on a GPU whatever its size.
    least_slope = LEAST_SLOPE if call.keywords["softcap"] and out.is_cuda else 0.0
    loss = call.dout, call.dlse
    pairs = gradients_and_squares(*tensors, *loss, **keywords, least_slope=least_slope)
    units = {name: (x, unit_of(name, x, squares)) for name, (x, squares) in pairs.items()}
    return Right(out, lse.mT, rows, units)


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
