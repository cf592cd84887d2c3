"""Dense attention in float64, and as a torch user would write it in the dtype of the inputs.

The oracle compares indices by itself: nothing here uses the package, so a wrong rule in the
package cannot agree with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from cases import FP32, FP64
from torch import Tensor

from bench.oracle import Attention, attend

NEG_INF = float("-inf")


class Dense(Protocol):
    """Masks and a score_mod as tensors say them: `DenseMasks`, or a call of a test's own."""

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int, /) -> Tensor: ...

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int, /) -> Tensor: ...


class Rule(NamedTuple):
    """least_slope: of what softcap and a score_mod make of scores, for the units of errors."""

    softmax_scale: float
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    least_slope: float = 0.0


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
        visible = visible_mask(*lengths, rule, self.q.device)
        if self.dense is not None:
            visible &= self.dense.visible(self.batch_idx, head_idx, *lengths)
        return ~visible


def visible_mask(seqlen_q: int, seqlen_k: int, rule: Rule, device: torch.device) -> Tensor:
    """Boolean (seqlen_q, seqlen_k); the last row's own key is the last one."""
    row = torch.arange(seqlen_q, device=device)[:, None]
    ahead = torch.arange(seqlen_k, device=device)[None, :] - (row + seqlen_k - seqlen_q)
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if rule.causal:
        visible &= ahead <= 0
    if rule.window_left is not None:
        visible &= ahead >= -rule.window_left
    if rule.window_right is not None:
        visible &= ahead <= rule.window_right
    return visible


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """Dense attention in float64 with the public call's keywords, those of masks as `dense`.

    Returns out and lse, both float64, in the public layouts. Rows past seqused_q and rows that see
    nothing hold 0 and -inf; with a sink the latter hold the sink as lse.
    """
    return _attend_each_sequence(reference_sequence, FP64, q, k, v, dense, **keywords)


def eager_same_dtype(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """As a torch user writes it: matmuls in the inputs' dtype, the rest in float32 or float64."""
    return _attend_each_sequence(eager_sequence, q.dtype, q, k, v, dense, **keywords)


def attend_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out and lse (heads_q, seqlen_q) of tensors of float64, or as a torch user would write it."""
    return (reference_sequence if x.q.dtype == FP64 else eager_sequence)(x, rule)


def _attend_each_sequence(
    attend: Callable[[OneSequence, Rule], tuple[Tensor, Tensor]],
    out_dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Dense | None,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    rule = rule_of(q, **keywords)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype, device=q.device)
    lse_by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    slots = sequences((q, out, lse_by_row), (k, v), **keywords)
    for i, ((q_i, out_i, lse_i), (k_i, v_i)) in enumerate(slots):
        out_of_sequence, lse = attend(OneSequence(q_i, k_i, v_i, i, dense), rule)
        out_i.copy_(out_of_sequence)
        lse_i.copy_(lse.T)
    return out, lse_by_row.transpose(-1, -2)


def largest_scores(
    q: Tensor, k: Tensor, v: Tensor, dense: Dense | None = None, **keywords: Any
) -> Tensor:
    """The largest visible score of each row in float64, laid out like lse; -inf without any."""
    rule = rule_of(q, **keywords)
    by_row = torch.full(q.shape[:-1], NEG_INF, dtype=FP64, device=q.device)
    slots = sequences((q, by_row), (k, v), **keywords)
    for i, ((q_i, largest), (k_i, v_i)) in enumerate(slots):
        x = OneSequence(q_i, k_i, v_i, i, dense)
        for head_idx in range(q_i.shape[1] if k_i.shape[0] else 0):
            _, scores = Head.create(x, rule, head_idx).scores(x, rule, head_idx)
            hidden = scores.masked_fill(x.hidden(rule, head_idx), NEG_INF)
            largest[:, head_idx] = hidden.amax(dim=1)
    return by_row.transpose(-1, -2)


def rule_of(
    q: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    pack_gqa: bool | None = None,
) -> Rule:
    """Of the keywords of the public call; max_seqlen_* and pack_gqa change nothing."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Rule(scale, causal, window_size_left, window_size_right, softcap, learnable_sink)


def sequences(
    like_q: tuple[Tensor, ...], like_k: tuple[Tensor, ...], **keywords: Any
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """For every batch entry, the views of the used rows of tensors laid out like q and like k."""
    slots_q = _slots(like_q, keywords.get("cu_seqlens_q"), keywords.get("seqused_q"))
    slots_k = _slots(like_k, keywords.get("cu_seqlens_k"), keywords.get("seqused_k"))
    return zip(slots_q, slots_k, strict=True)


def _slots(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Iterator[tuple[Tensor, ...]]:
    """For every batch entry, the views of its used rows."""
    if cu_seqlens is None:
        slots = [tuple(t[i] for t in tensors) for i in range(tensors[0].shape[0])]
    else:
        edges = cu_seqlens.tolist()
        slots = [tuple(t[a:b] for t in tensors) for a, b in zip(edges, edges[1:], strict=False)]
    used = [slot[0].shape[0] for slot in slots] if seqused is None else seqused.tolist()
    return (tuple(t[:n] for t in slot) for slot, n in zip(slots, used, strict=True))


class Head(NamedTuple):
    """One query head in float64: q (seqlen_q, d), k and v (seqlen_k, .), sink () or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None

    @staticmethod
    def create(x: OneSequence, rule: Rule, head_idx: int) -> Head:
        k, v = (y[:, head_idx // x.group].double() for y in (x.k, x.v))
        sink = None if rule.sink is None else rule.sink[head_idx].double()
        return Head(x.q[:, head_idx].double(), k, v, sink)

    def as_leaves(self) -> Head:
        sink = None if self.sink is None else self.sink.detach().requires_grad_()
        q, k, v = (y.detach().requires_grad_() for y in (self.q, self.k, self.v))
        return Head(q, k, v, sink)

    def scores(self, x: OneSequence, rule: Rule, head_idx: int) -> tuple[Tensor, Tensor]:
        """Scaled scores, and what softcap and score_mod make of them."""
        raw = self.q @ self.k.T * rule.softmax_scale
        capped = rule.softcap * torch.tanh(raw / rule.softcap) if rule.softcap else raw
        return raw, x.modified(capped, head_idx)

    def attend(self, scores: Tensor) -> Attention:
        """out, lse and probabilities of masked scores; rows without a term have gradients of 0."""
        return attend(scores, self.v, self.sink)


def reference_sequence(x: OneSequence, rule: Rule) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads_q, d_v) and lse (heads_q, seqlen_q)."""
    out = x.q.new_empty((*x.q.shape[:2], x.v.shape[-1]), dtype=FP64)
    lse = x.q.new_empty(x.q.shape[1::-1], dtype=FP64)
    for head_idx in range(x.q.shape[1]):  # one at a time: a long case would not fit otherwise
        head = Head.create(x, rule, head_idx)
        _, scores = head.scores(x, rule, head_idx)
        scores = scores.masked_fill(x.hidden(rule, head_idx), NEG_INF)
        out[:, head_idx], lse[head_idx], _ = head.attend(scores)
    return out, lse


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
