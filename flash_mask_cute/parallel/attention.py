"""Attention of sharded q, k and v: the public function, its checks, and its three methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_mask_cute.call.check.validate import check_dense
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.agreement import check_agreement
from flash_mask_cute.parallel.all_gather import attend_gathered
from flash_mask_cute.parallel.messages import Messages, Peers
from flash_mask_cute.parallel.planning import Plan, check_plan_mask
from flash_mask_cute.parallel.ring import Ring
from flash_mask_cute.parallel.routes import Band, Settings, routes_of
from flash_mask_cute.parallel.ulysses import attend_by_heads, check_heads
from flash_mask_cute.runtime.checks import check_bool

Method: TypeAlias = Literal["all_gather", "ring", "ulysses"]
METHODS: Final = get_args(Method)


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: ColumnMask | None,
    plan: Plan,
    group: torch.distributed.ProcessGroup | None = None,
    method: Method = "all_gather",
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    learnable_sink: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Self-attention over a sequence, where each rank of a group holds some rows.

    Every rank calls it with its rows of q (batch, rows, heads_q, head_dim), k (batch, rows,
    heads_kv, head_dim) and v, as `plan.shard` gives them, and with the same other arguments. It
    supports gradients of q, k, v and learnable_sink. That of learnable_sink is summed over the
    group, so it is the same in all ranks.

    mask: a ColumnMask of the whole sequence, or None. causal, window_size, softcap, softmax_scale,
    learnable_sink (heads_q,) and deterministic: as in `flash_attn_func`. group: None for all
    processes. Dynamo runs it outside of graphs.

    method: "all_gather": a rank fetches the keys that its rows see, and attends to them in one
    call. "ring": keys of one rank at a time; the next ones travel during attention. "ulysses": rows
    are exchanged for heads; heads_q is a multiple of the ranks, heads_kv a multiple or a divisor.
    docs/context_parallel.md compares them. When a mask is new or changed, ranks compare their
    arguments, and the first two methods find what each rank sees. That waits for the device.
    If ranks pass different masks that the group has used before, a later call raises.

    Returns:
        out (batch, rows, heads_q, head_dim_v) of the own rows.

    Raises:
        TypeError, ValueError: before anything is sent: the plan is for another group, q, k or v do
            not hold this rank's rows, a mask is of another length, heads do not divide; or as
            `flash_attn_func`.
            Also, in all ranks, if they do not agree about mask, plan and the other arguments,
            whether learnable_sink is given, or for which of the tensors a gradient is recorded.
        NotImplementedError: mask is a mask_mod; or "all_gather" and "ring" cannot hold the mask
            together with causal masking and the window.
        RuntimeError: torch.distributed is not initialized; or another rank failed, or did not
            answer within the timeout of the group. The message names it.

    Example:
        >>> import torch
        >>> from flash_mask_cute import builders, parallel
        >>> mask = builders.causal_document([300, 212])
        >>> plan = parallel.plan(mask, 2, seqlen=512)
        >>> # in each process of a group of two
        >>> own = [plan.shard(x, rank) for x in (q, k, v)]  # doctest: +SKIP
        >>> out = parallel.context_parallel_attention(*own, mask, plan)  # doctest: +SKIP
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is none of {', '.join(map(repr, METHODS))}")
    for name, value in (("causal", causal), ("deterministic", deterministic)):
        check_bool(name, value)
    peers = Peers.of(group)
    _check(q, k, v, mask, plan, peers)
    # what attention would refuse after the first message
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    window = check_dense(q, k, v, learnable_sink=learnable_sink, window_size=window_size, **options)
    settings = Settings(softmax_scale, softcap, deterministic, Band(causal, window))
    if method == "ulysses":
        check_heads(q.shape[2], k.shape[2], peers.world)
    else:
        routes = routes_of(mask, settings.band, plan, peers.rank, q.device)
    operands = q, k, v, learnable_sink
    check_agreement(peers, method, plan, settings, mask, operands, q.device)
    if learnable_sink is not None:
        learnable_sink = _SummedGradient.apply(learnable_sink, peers)
    operands = q, k, v, learnable_sink
    if method == "ulysses":
        return attend_by_heads(*operands, peers, plan, settings, mask)
    attend_parts = Ring.apply if method == "ring" else attend_gathered
    return attend_parts(*operands, peers, routes, settings)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    plan: object,
    peers: Peers,
) -> None:
    """Refuse what cannot be this rank's part of a call."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}, not a Plan")
    if plan.world != peers.world:
        raise ValueError(f"plan is for {plan.world} ranks, and the group has {peers.world}")
    check_plan_mask("mask", mask, plan.seqlen)
    tensors: Mapping[str, Any] = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
        if x.dim() != 4 or x.shape[1] != plan.rows_per_rank:
            raise ValueError(
                f"{name} must be (batch, rows, heads, head_dim) with the {plan.rows_per_rank} rows "
                f"of rank {peers.rank}, {plan.rows[peers.rank]}, got shape {tuple(x.shape)}"
            )
    if isinstance(mask, ColumnMask):
        batch, heads = mask.startend_row_indices.shape[:2]
        if batch not in (1, q.shape[0]) or heads not in (1, k.shape[2], q.shape[2]):
            raise ValueError(
                f"mask has {batch} batch entries and {heads} heads, not 1 or {q.shape[0]} and 1, "
                f"{k.shape[2]} or {q.shape[2]}"
            )
        if mask.device != q.device:
            raise ValueError(f"mask is on {mask.device}, q on {q.device}")


class _SummedGradient(torch.autograd.Function):
    """The sink as it is; its gradients of all ranks are summed in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return sink.view_as(sink)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsink: Tensor) -> tuple[Tensor | None, ...]:
        peers = ctx.peers
        others = [r for r in range(peers.world) if r != peers.rank]
        own = dsink.contiguous()
        what = "the gradient of learnable_sink"
        lengths = dict.fromkeys(others, own.numel())
        parts = Messages(peers, dict.fromkeys(others, own), lengths, own, what).wait()
        parts[peers.rank] = own
        wide = torch.promote_types(own.dtype, torch.float32)
        total = torch.stack([parts[r].to(wide) for r in range(peers.world)]).sum(0)
        return total.to(own.dtype), None
