"""Dense attention in float64, by definition: results, gradients, tangents, statistics of P.

The oracle compares indices by itself: nothing here uses the package, so a wrong rule in the
package cannot agree with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from cases import FP64
from torch import Tensor

from bench.oracle import Attention, attend

if TYPE_CHECKING:
    from inputs import Inputs

NEG_INF = float("-inf")
STATISTICS = ("key_sums", "entropy", "block_sums", "block_maxima")


class Dense(Protocol):
    """Masks and a score_mod as tensors say them: `DenseMasks`, or a call of a test's own."""

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int, /) -> Tensor: ...

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int, /) -> Tensor: ...


def band(
    seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None,
    at_end: bool = True, device: Any = None,
) -> Tensor:  # fmt: skip
    """Bool (seqlen_q, seqlen_k): keys from left before a query's own to right after it. at_end: the
    last row's own key is the last one."""
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q if at_end else 0)
    ahead = torch.arange(seqlen_k, device=device) - row
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        visible &= ahead >= -left
    return visible if right is None else visible & (ahead <= right)


class Rule(NamedTuple):
    """least_slope: of what softcap and a score_mod make of scores, for the units of errors."""

    softmax_scale: float
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    least_slope: float = 0.0

    def visible(self, seqlen_q: int, seqlen_k: int, device: Any = None) -> Tensor:
        """Bool (seqlen_q, seqlen_k), of causal masking and the window."""
        right = min(0, self.window_right or 0) if self.causal else self.window_right
        return band(seqlen_q, seqlen_k, self.window_left, right, device=device)


def rule_of(
    q: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int | None = None, window_size_right: int | None = None,
    softcap: float = 0.0, learnable_sink: Tensor | None = None, least_slope: float = 0.0,
    **lengths: Any,
) -> Rule:  # fmt: skip
    """Of the keywords of the public call; lengths, max_seqlen_* and pack_gqa change nothing."""
    sides = {f"{name}_{side}" for name in ("cu_seqlens", "max_seqlen", "seqused") for side in "qk"}
    assert lengths.keys() <= sides | {"pack_gqa"}, lengths.keys()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = window_size_left, window_size_right
    return Rule(scale, causal, *window, softcap, learnable_sink, least_slope)


class OneSequence(NamedTuple):
    """One batch entry: q (seqlen_q, heads_q, d), k and v (seqlen_k, heads_kv, .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch_idx: int
    dense: Dense | None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def modified(self, scores: Tensor, head_idx: int) -> Tensor:
        """Scores (seqlen_q, seqlen_k) of a query head after score_mod."""
        return scores if self.dense is None else self.dense.modify(scores, self.batch_idx, head_idx)

    def hidden(self, rule: Rule, head_idx: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k) of a query head."""
        lengths = self.q.shape[0], self.k.shape[0]
        visible = rule.visible(*lengths, self.q.device)
        if self.dense is not None:
            visible &= self.dense.visible(self.batch_idx, head_idx, *lengths)
        return ~visible


def each_sequence(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, like_q: tuple[Tensor, ...] = (),
    like_k: tuple[Tensor, ...] = (), **keywords: Any,
) -> Iterator[tuple[OneSequence, list[Tensor], list[Tensor]]]:  # fmt: skip
    """Every batch entry, with views of its used rows of tensors laid out like q and like k."""
    slots_q = _slots((q, *like_q), keywords.get("cu_seqlens_q"), keywords.get("seqused_q"))
    slots_k = _slots((k, v, *like_k), keywords.get("cu_seqlens_k"), keywords.get("seqused_k"))
    for i, (of_q, of_k) in enumerate(zip(slots_q, slots_k, strict=True)):
        (q_i, *of_q), (k_i, v_i, *of_k) = of_q, of_k
        yield OneSequence(q_i, k_i, v_i, i, dense), of_q, of_k


def _slots(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Iterator[list[Tensor]]:
    if cu_seqlens is None:
        slots = [[t[i] for t in tensors] for i in range(tensors[0].shape[0])]
    else:
        edges = cu_seqlens.tolist()
        slots = [[t[a:b] for t in tensors] for a, b in zip(edges, edges[1:], strict=False)]
    used = [slot[0].shape[0] for slot in slots] if seqused is None else seqused.tolist()
    return ([t[:n] for t in slot] for slot, n in zip(slots, used, strict=True))


class Head(NamedTuple):
    """One query head in float64: q (seqlen_q, d), k and v (seqlen_k, .), sink () or None. raw:
    scaled scores; scores: what softcap and score_mod make of them, all before any is hidden."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    raw: Tensor
    scores: Tensor
    hidden: Tensor

    @classmethod
    def create(cls, x: OneSequence, rule: Rule, head_idx: int, as_leaves: bool = False) -> Head:
        sink = None if rule.sink is None else rule.sink[head_idx].double()
        operands = x.q[:, head_idx], *(y[:, head_idx // x.group] for y in (x.k, x.v))
        q, k, v = (y.double() for y in operands)
        if as_leaves:
            q, k, v = (y.detach().requires_grad_() for y in (q, k, v))
            sink = None if sink is None else sink.detach().requires_grad_()
        raw = q @ k.T * rule.softmax_scale
        capped = rule.softcap * torch.tanh(raw / rule.softcap) if rule.softcap else raw
        return cls(q, k, v, sink, raw, x.modified(capped, head_idx), x.hidden(rule, head_idx))

    @property
    def seen(self) -> Tensor:
        return self.scores.masked_fill(self.hidden, NEG_INF)

    def attend(self) -> Attention:
        """out, lse and probabilities; rows without a term have gradients of 0."""
        return attend(self.seen, self.v, self.sink)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Dense attention in float64 with the public call's keywords, those of masks as `dense`.

    Returns out and lse, both float64, in the public layouts. Rows past seqused_q and rows that see
    nothing hold 0 and -inf; with a sink the latter hold the sink as lse.
    """
    return attend_each(reference_sequence, FP64, q, k, v, dense, **keywords)


def hidden_of(inputs: Inputs) -> Tensor:
    """Bool (heads_q, seqlen_q, seqlen_k), of a case with one sequence."""
    x = OneSequence(inputs.q[0], inputs.k[0], inputs.v[0], 0, inputs.dense)
    rule = rule_of(inputs.q, **inputs.plain_keywords)
    return torch.stack([x.hidden(rule, head_idx) for head_idx in range(x.q.shape[1])])


def attend_each(
    attend: Callable[[OneSequence, Rule], tuple[Tensor, Tensor]], out_dtype: torch.dtype,
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None, **keywords: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rule = rule_of(q, **keywords)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype, device=q.device)
    lse_by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    for x, (out_i, lse_i), _ in each_sequence(q, k, v, dense, (out, lse_by_row), **keywords):
        out_of_sequence, lse = attend(x, rule)
        out_i.copy_(out_of_sequence)
        lse_i.copy_(lse.T)
    return out, lse_by_row.transpose(-1, -2)


def reference_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, d_v) and lse (heads_q, seqlen_q)."""
    out = x.q.new_empty((*x.q.shape[:2], x.v.shape[-1]), dtype=FP64)
    lse = x.q.new_empty(x.q.shape[1::-1], dtype=FP64)
    for head_idx in range(x.q.shape[1]):  # one at a time: a long case would not fit otherwise
        out[:, head_idx], lse[head_idx], _ = Head.create(x, rule, head_idx).attend()
    return out, lse


def largest_scores(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> Tensor:
    """The largest visible score of each row in float64, laid out like lse; -inf without any."""
    rule = rule_of(q, **keywords)
    by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    for x, (largest,), _ in each_sequence(q, k, v, dense, (by_row,), **keywords):
        for head_idx in range(x.q.shape[1] if x.k.shape[0] else 0):
            largest[:, head_idx] = Head.create(x, rule, head_idx).seen.amax(dim=1)
    return by_row.transpose(-1, -2)


# -- gradients -----------------------------------------------------------------------------------


def gradients_and_squares(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None, dout: Tensor, dlse: Tensor | None = None,
    **keywords: Any,
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """Gradients of sum(out * dout) + sum(lse * dlse): "dq", "dk", "dv" in the layouts of q, k and v
    and, with a sink, "dsink" (heads_q,); each with the sum of squares of the terms of an element.

    All are float64. Rows and keys past seqused_* and rows that see nothing hold 0. The terms are
    those of the last product, dS K, dS^T Q or P^T dO. Where dS = P (dP - delta) is the small
    difference of large sums, the squares of what was summed are taken instead, because that is what
    rounding is proportional to.
    """
    rule = rule_of(q, **keywords)
    operands = {"dq": q, "dk": k, "dv": v} | ({} if rule.sink is None else {"dsink": rule.sink})
    pairs = {
        name: torch.zeros((*x.shape, 2), dtype=FP64, device=x.device)
        for name, x in operands.items()
    }
    dlse_by_row = dout.new_zeros(dout.shape[:-1]) if dlse is None else dlse.transpose(-1, -2)
    like_q, like_k = (dout, dlse_by_row, pairs["dq"]), (pairs["dk"], pairs["dv"])
    for x, of_q, (dk, dv) in each_sequence(q, k, v, dense, like_q, like_k, **keywords):
        for head_idx in range(x.q.shape[1]):
            dout_i, dlse_i, dq = (y[:, head_idx] for y in of_q)
            found = _head_gradients(x, rule, head_idx, dout_i, dlse_i)
            places = [dq, dk[:, head_idx // x.group], dv[:, head_idx // x.group]]
            if rule.sink is not None:
                places.append(pairs["dsink"][head_idx])
            for place, *pair in zip(places, *found, strict=True):
                place += torch.stack(pair, dim=-1)
    return {name: (x[..., 0], x[..., 1]) for name, x in pairs.items()}


def reference_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """`gradients_and_squares` of a case."""
    tensors = inputs.q, inputs.k, inputs.v
    return gradients_and_squares(*tensors, inputs.dense, dout, dlse, **inputs.plain_keywords)


def _head_gradients(
    x: OneSequence, rule: Rule, head_idx: int, dout: Tensor, dlse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients by q, k, v and the sink of one head, and the sums of squares of their terms."""
    head = Head.create(x, rule, head_idx, as_leaves=True)
    (stretch,) = torch.autograd.grad(head.scores.sum(), head.raw, retain_graph=True)
    stretch = stretch.abs().clamp(min=rule.least_slope)
    out, lse, probabilities = head.attend()
    leaves = [y for y in head[:4] if y is not None]
    # what sees nothing has no gradient, whatever is given
    dout = torch.where(head.hidden.all(1)[:, None], 0.0, dout.double())
    dlse = torch.where(lse.isneginf(), 0.0, dlse.double())
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))

    with torch.no_grad():
        # the square of a sum plus the squares of its terms: how large it may have been
        dprobabilities = (dout @ head.v.T).square() + dout.square() @ head.v.T.square()
        delta = (dout * out).sum(1).square() + (dout * out).square().sum(1) + dlse.square()
        factor = (stretch * rule.softmax_scale).square()
        dscores = probabilities.square() * (dprobabilities + delta[:, None]) * factor
        squares = [
            dscores @ head.k.square(),
            dscores.T @ head.q.square(),
            probabilities.square().T @ dout.square(),
        ]
        if head.sink is not None:
            squares.append((torch.exp(head.sink - lse).square() * delta).sum())
    return list(gradients), squares


# -- statistics of P -----------------------------------------------------------------------------


def reference_statistics(
    inputs: Inputs, reduce: Sequence[str], block_size: tuple[int, int]
) -> dict[str, Tensor]:
    """In float64, in the public layouts."""
    q, k, (m, n) = inputs.q, inputs.k, block_size
    case, rule = inputs.case, rule_of(q, **inputs.plain_keywords)
    key_blocks = math.ceil(case.seqlen_k / n)
    blocks = (*q.shape[:-2], case.heads_kv, key_blocks)
    if m > 1:
        blocks = (case.batch, math.ceil(case.seqlen_q / m), case.heads_kv, key_blocks)
    shapes = k.shape[:-1], q.shape[:-1], blocks, blocks
    found = {
        name: torch.zeros(shape, dtype=FP64, device=q.device)
        for name, shape in zip(STATISTICS, shapes, strict=True)
    }
    of_blocks = found["block_sums"], found["block_maxima"]
    like_q = (found["entropy"], *(of_blocks if m == 1 else ()))
    tensors, like_k = (q, k, k, inputs.dense), (found["key_sums"],)
    slots = each_sequence(*tensors, like_q, like_k, **inputs.plain_keywords)
    for x, (entropy, *rows), (key_sums,) in slots:
        sums, maxima = rows or (y[x.batch_idx] for y in of_blocks)
        for head_idx in range(case.heads_q):
            p, kv = Head.create(x, rule, head_idx).attend().probabilities, head_idx // case.group
            key_sums[:, kv] += p.sum(0)
            entropy[:, head_idx] = torch.special.entr(p).sum(1)
            for row, of_row in enumerate(_blocks(p, 0, m)):
                for column, block in enumerate(_blocks(of_row, 1, n)):
                    sums[row, kv, column] += block.sum()
                    maxima[row, kv, column] = torch.maximum(maxima[row, kv, column], block.max())
    found["key_sums"], found["entropy"] = found["key_sums"].mT, found["entropy"].mT
    for name in STATISTICS[2:]:
        found[name] = found[name].transpose(-2, -3)
    return {name: found[name] for name in reduce}


def _blocks(p: Tensor, dim: int, size: int) -> Iterable[Tensor]:
    return p.split(size, dim) if p.numel() else ()


# -- torch's layouts -----------------------------------------------------------------------------


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, modify: Callable[[Tensor], Tensor] | None = None,
    sink: Tensor | None = None, dtype: torch.dtype = torch.float64,
) -> Attention:  # fmt: skip
    """q (..., heads, L, E), k (..., heads_kv, S, E), v (..., heads_kv, S, Ev); visible, bias and
    sink broadcast to (..., heads, L, S), and modify is a function of all scores. Rows that see
    nothing are 0, their LSE is -inf. dtype: of all steps; that of q shows what rounding costs."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]) and q.shape[-3] > 1:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if modify is not None:
        scores = modify(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, NEG_INF)
    return attend(scores, v, sink)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, **more: Any
) -> Attention:
    """`dense_attention` in the layout of calls, q (..., L, heads, E); lse (..., heads, L)."""
    of_heads = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    found = dense_attention(*of_heads, visible, **more)
    return found._replace(out=found.out.transpose(-3, -2))


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Sequence[int], ends_k: Sequence[int],
    window: tuple[int, int] = (-1, -1), scale: float | None = None,
) -> Attention:  # fmt: skip
    """q, k, v (total, heads, d), sequences between ends; lse (heads, total_q)."""
    found = []
    left, right = (None if side < 0 else side for side in window)
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        visible = band(b - a, d - c, left, right)
        found.append(attend_rows(q[a:b], k[c:d], v[c:d], visible, scale=scale))
    outs, lses, probabilities = zip(*found, strict=True)
    return Attention(torch.cat(outs), torch.cat(lses, 1), probabilities[-1])
