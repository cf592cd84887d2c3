"""Gradients in float64, and the error bound of every test of a backward, without the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from cases import FP64
from inputs import GARBAGE, Inputs
from oracle import NEG_INF, Head, OneSequence, Rule, eager_sequence, rule_of, sequences
from torch import Tensor

# What a gradient's unit is at least, up to MANY queries, and in proportion to more of them: an
# exponential below 2**-126 is 0 on a GPU, and each query may have one.
FLUSHED, MANY = 2.0**-116, 512


def make_output_gradients(inputs: Inputs, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Normal dout, in the dtype of q, and dlse, float32, laid out like out and lse.

    Rows past seqused_q hold GARBAGE.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    dout = torch.randn(shape, generator=generator).to(inputs.q)
    dlse_by_row = torch.randn(shape[:-1], generator=generator).to(dout.device)
    unused = ~inputs.rows_in_use("q")
    dout[unused] = GARBAGE
    dlse_by_row[unused] = GARBAGE
    return dout, dlse_by_row.transpose(-1, -2).contiguous()


def reference_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None
) -> dict[str, Tensor]:
    """Gradients of sum(out * dout) + sum(lse * dlse) by autograd through `reference_attention`'s
    arithmetic: "dq", "dk", "dv" in the layouts of q, k and v and, with a sink, "dsink" (heads_q,).

    All are float64. Rows and keys past seqused_* and rows that see nothing hold 0.
    """
    return _float64_gradients(inputs, dout, dlse)[0]


def eager_gradients(inputs: Inputs, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
    """Like `reference_gradients`, by autograd through `eager_same_dtype`'s arithmetic, in the dtype
    of the inputs; "dsink" is summed over sequences in float64."""
    names, rule = _gradient_names(inputs), rule_of(inputs.q, **inputs.plain_keywords)
    gradients = _zeros(inputs, None)
    for x, of_sequence, dout_i, dlse_i in _backward_sequences(inputs, gradients, dout, dlse):
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
        sink = None if rule.sink is None else rule.sink.detach().requires_grad_()
        q, k, v = leaves
        out, lse = eager_sequence(x._replace(q=q, k=k, v=v), rule._replace(sink=sink))
        found = torch.autograd.grad(
            (out, lse),
            leaves if sink is None else [*leaves, sink],
            (dout_i, dlse_i.to(lse.dtype)),
        )
        for name, gradient in zip(names, found, strict=True):
            of_sequence[name] += gradient
    return gradients


def _float64_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`reference_gradients` and, for each element, the sum of squares of the terms that make it up.

    The terms are those of the last product, dS K, dS^T Q or P^T dO. Where dS = P (dP - delta) is
    the small difference of large sums, the squares of what was summed are taken instead, because
    that is what rounding is proportional to.
    """
    names, rule = _gradient_names(inputs), rule_of(inputs.q, **inputs.plain_keywords)
    # the last mode: the gradient, and the squares
    pairs = _zeros(inputs, FP64, (2,))
    for x, of_sequence, dout_i, dlse_i in _backward_sequences(inputs, pairs, dout, dlse):
        add_gradients(x, rule, of_sequence, dout_i, dlse_i)
    gradients, squares = ({name: pairs[name][..., i] for name in names} for i in (0, 1))
    return gradients, squares


def add_gradients(
    x: OneSequence, rule: Rule, pairs: Mapping[str, Tensor], dout: Tensor, dlse: Tensor
) -> None:
    """Add those of a sequence to pairs: "dq" and the others in float64, the last mode the gradient
    and the sum of squares. dout (seqlen_q, heads_q, d_v), dlse (heads_q, seqlen_q)."""
    for head_idx in range(x.q.shape[1]):
        found = _head_gradients(x, rule, head_idx, dout[:, head_idx], dlse[head_idx])
        of_kv = head_idx // x.group
        places = [pairs["dq"][:, head_idx], pairs["dk"][:, of_kv], pairs["dv"][:, of_kv]]
        if "dsink" in pairs:
            places.append(pairs["dsink"][head_idx])
        for place, *pair in zip(places, *found, strict=True):
            place += torch.stack(pair, dim=-1)


def unit_of(name: str, value: Tensor, squares: Tensor) -> Tensor:
    """What errors of a gradient are measured in: see `assert_gradients_close`."""
    unit = torch.maximum(squares.sqrt(), value.abs())
    return unit if name == "dsink" else unit.amax(dim=-1, keepdim=True).expand_as(value)


def _head_gradients(
    x: OneSequence, rule: Rule, head_idx: int, dout: Tensor, dlse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients by q, k, v and the sink of one head, and the sums of squares of their terms."""
    head = Head.create(x, rule, head_idx).as_leaves()
    raw, scores = head.scores(x, rule, head_idx)
    (stretch,) = torch.autograd.grad(scores.sum(), raw, retain_graph=True)
    stretch = stretch.abs().clamp(min=rule.least_slope)
    hidden = x.hidden(rule, head_idx)
    out, lse, probabilities = head.attend(scores.masked_fill(hidden, NEG_INF))
    leaves = [y for y in head if y is not None]
    # what sees nothing has no gradient, whatever is given
    dout = torch.where(hidden.all(1)[:, None], 0.0, dout.double())
    dlse = torch.where(lse.isneginf(), 0.0, dlse.double())
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))

    with torch.no_grad():
        dprobabilities = _sum_and_terms(dout, head.v.T)
        delta = _sum_and_terms(dout[:, None], out[..., None])[:, 0] + dlse[:, None].square()
        factor = (stretch * rule.softmax_scale).square()
        dscores = probabilities.square() * (dprobabilities + delta) * factor
        squares = [
            dscores @ head.k.square(),
            dscores.T @ head.q.square(),
            probabilities.square().T @ dout.square(),
        ]
        if head.sink is not None:
            of_sink = torch.exp(head.sink - lse)[:, None].square()
            squares.append((of_sink * delta).sum())
    return list(gradients), squares


def _sum_and_terms(a: Tensor, b: Tensor) -> Tensor:
    """The square of a @ b plus the squares of the terms of its sums: how large it may have been."""
    return (a @ b).square() + a.square() @ b.square()


def _gradient_names(inputs: Inputs) -> tuple[str, ...]:
    has_sink = inputs.plain_keywords["learnable_sink"] is not None
    return ("dq", "dk", "dv", "dsink") if has_sink else ("dq", "dk", "dv")


def _zeros(
    inputs: Inputs, dtype: torch.dtype | None, last: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """A tensor for each gradient, with `last` added to its shape; dtype None: the operand's."""
    operands = [inputs.q, inputs.k, inputs.v, inputs.plain_keywords["learnable_sink"]]
    return {
        name: torch.zeros(
            (*x.shape, *last),
            dtype=dtype or (FP64 if name == "dsink" else x.dtype),
            device=x.device,
        )
        for name, x in zip(_gradient_names(inputs), operands, strict=False)
    }


def _backward_sequences(
    inputs: Inputs, gradients: dict[str, Tensor], dout: Tensor, dlse: Tensor | None
) -> Iterator[tuple[OneSequence, dict[str, Tensor], Tensor, Tensor]]:
    """Every batch entry with the views of its gradients (the sink's is the same for all), of dout
    (seqlen_q, heads_q, d_v) and of dlse (heads_q, seqlen_q)."""
    dlse_by_row = dout.new_zeros(dout.shape[:-1]) if dlse is None else dlse.transpose(-1, -2)
    slots = sequences(
        (inputs.q, gradients["dq"], dout, dlse_by_row),
        (inputs.k, inputs.v, gradients["dk"], gradients["dv"]),
        **inputs.plain_keywords,
    )
    for i, ((q, dq, dout_i, dlse_i), (k, v, dk, dv)) in enumerate(slots):
        of_sequence = gradients | {"dq": dq, "dk": dk, "dv": dv}
        yield OneSequence(q, k, v, i, inputs.dense), of_sequence, dout_i, dlse_i.T


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
    reference, squares = _float64_gradients(inputs, dout, dlse)
    eager = None if rtol is not None else eager_gradients(inputs, dout, dlse)
    least = FLUSHED * max(1.0, inputs.q.shape[-3] / MANY)
    operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if "dsink" in reference:
        operands["sink"] = inputs.plain_keywords["learnable_sink"]
    share = 0.0
    for operand, x in operands.items():
        name, label = f"d{operand}", f"{inputs.case.id}: d{operand}"
        gradient, expected = gradients[name], reference[name]
        assert gradient is not None, f"{label} is None"
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape), f"{label}: {gradient.dtype}"
        assert not gradient.isnan().any(), f"{label}: NaN"
        unit = unit_of(name, expected, squares[name])
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
