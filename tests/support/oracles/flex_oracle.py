"""What a FlexAttention mod means, by torch alone: dense masks, scores, attention in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from flex_catalogue import Extents, Made, Mod
from oracle import dense_attention
from torch import Tensor
from torch.overrides import TorchFunctionMode

FP64 = torch.float64


class _IndexesTensors(TorchFunctionMode):
    """`x[b, q]` by tensors of indices: `vmap` would ask these for numbers."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, Tensor) for place in places):
                assert all(isinstance(place, int | Tensor) for place in places)
                return torch.ops.aten.index(args[0], [torch.as_tensor(x) for x in places])
        return function(*args, **(kwargs or {}))


def _over_all_places(mod: Mod, prefix: tuple[int, ...], first: int = 0) -> Mod:
    """mod for all of (batch, heads, queries, keys) from the first of these on, each a vector."""
    for place in range(3, first - 1, -1):
        dims = tuple(0 if i == place else None for i in range(4))
        mod = torch.vmap(mod, in_dims=(*prefix, *dims))
    return mod


def _places(extents: Sequence[int]) -> list[Tensor]:
    """Indices as torch documents them for mods: of dtype torch.int."""
    return [torch.arange(extent, dtype=torch.int32) for extent in extents]


def dense_mask(mask_mod: Mod, extents: Sequence[int]) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k)."""
    with _IndexesTensors():
        return _over_all_places(mask_mod, ())(*_places(extents))


def dense_scores(score_mod: Mod, scores: Tensor) -> Tensor:
    """The modified scores, of scores (batch, heads, seqlen_q, seqlen_k), in their dtype."""
    with _IndexesTensors(), _default_dtype(scores.dtype):
        return _over_all_places(score_mod, (0,))(scores, *_places(scores.shape))


def scores_of_head(score_mod: Mod, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
    """`dense_scores` of one head's scores (seqlen_q, seqlen_k)."""
    entry, head = (torch.tensor(at, dtype=torch.int32) for at in (batch_idx, head_idx))
    with _IndexesTensors(), _default_dtype(scores.dtype):
        return _over_all_places(score_mod, (0,), 2)(scores, entry, head, *_places(scores.shape))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What integers become where a mod divides them, or takes them times a number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Expected(NamedTuple):
    """In float64; gradients of q, k, v and of the Parameters of a score_mod."""

    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]


def attention(
    qkv: Sequence[Tensor],
    dout: Tensor,
    score: Made | None = None,
    mask: Made | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> Expected:
    """Attention and its gradients in float64.

    qkv: (batch, heads, seqlen, head_dim), of fewer heads in k and v. score: made in float64. The
    LSE of a row that sees nothing is -inf, and its output 0.
    """
    q, k, v = (x.detach().to(FP64).requires_grad_() for x in qkv)
    trained = () if score is None else score.trained
    modify = None if score is None else partial(dense_scores, score.mod)
    extents = Extents(*q.shape[:3], k.shape[2])
    seen = None if mask is None else dense_mask(mask.mod, extents)
    out, lse, _ = dense_attention(q, k, v, seen, scale=scale, modify=modify)
    ends, grads = [out], [dout.to(FP64)]
    if dlse is not None:
        ends, grads = [out, lse.masked_fill(lse.isneginf(), 0.0)], [*grads, dlse.to(FP64)]
    leaves = q, k, v, *trained
    gradients = torch.autograd.grad(ends, leaves, grads, materialize_grads=True)
    return Expected(out.detach(), lse.detach(), gradients)
