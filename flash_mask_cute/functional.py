"""Attention for autograd, `torch.compile` and checkpointing: the public functions.

Every call has the same two halves, `run_forward` and `run_backward` of autograd/passes.py. An eager
call on plain tensors reaches them through an `autograd.Function` (autograd/eager.py). Under
torch.compile, torch.export, a dispatch mode or with tensor subclasses, a call becomes operators
instead (autograd/torch_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_mask_cute.autograd.arguments import Call, splits_recorded
from flash_mask_cute.autograd.eager import Attention
from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.autograd.passes import (
    new_max_scores,
    refuse_dual_level,
    run_forward,
)
from flash_mask_cute.autograd.torch_ops import IMPLEMENTATIONS, to_operator
from flash_mask_cute.call.arguments import Masks, QStart, Tensors, window_sides
from flash_mask_cute.call.keywords import public_call, refuse_keywords
from flash_mask_cute.call.lookup import in_transform, mask_key
from flash_mask_cute.call.packed import holds_documents, start_that_counts
from flash_mask_cute.call.validate import (
    check_gradient_settings,
    check_num_splits,
    refuse_transforms,
    settle_order,
)
from flash_mask_cute.flex.together import as_cute_mods
from flash_mask_cute.interface import run_bundles
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.mods.signature import check_mod
from flash_mask_cute.runtime.checks import check_bool, check_number, number_of
from flash_mask_cute.runtime.plain_tensors import NotPlainError

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flashmask_attention"]

WindowSize: TypeAlias = tuple[int | None, int | None]

# Each function is declared several times before its definition, so that a type checker knows what
# it returns: a tensor, a pair with return_lse, either where return_lse is a variable, and a tuple
# with return_max_logit.


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, mask_mod: Mod | None = None, *, score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: Literal[False] = False, config: Any = None,
    return_max_logit: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, mask_mod: Mod | None = None, *, score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: Literal[True], config: Any = None,
    return_max_logit: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, mask_mod: Mod | None = None, *, score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: bool = False, config: Any = None,
    return_max_logit: Literal[False] = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, mask_mod: Mod | None = None, *, score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: bool = False, config: Any = None,
    return_max_logit: Literal[True],
) -> tuple[Tensor, ...]: ...  # fmt: skip


@public_call
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Mod | None = None,
    *,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None,
    return_lse: bool = False,
    config: Any = None,
    return_max_logit: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...]:
    """Compute softmax(mask(q k^T * softmax_scale)) v.

    It has gradients for q, k, v, learnable_sink, and the floating-point aux_tensors that score_mod
    reads.

    q is (batch, seqlen_q, heads_q, head_dim), k is (batch, seqlen_k, heads_kv, head_dim), v is like
    k with head_dim_v. They are bf16 or fp16 on CUDA, also fp32 and fp64 on the CPU. The arguments
    and their combinations are described in `interface._flash_attn_fwd`. These differ:

    window_size: (left, right); None or -1 leaves a side open. A side below -1 shifts the band: with
    right = -3 a token sees only keys at least three positions before it.
    softmax_scale: a number, or a 0-dim CPU tensor, which is read and has no gradient.
    score_mod, mask_mod: CuTe callables, or torch functions with FlexAttention's arguments, (score,
    b, h, q_idx, kv_idx) and (b, h, q_idx, kv_idx). Torch functions are lowered (docs/flex.md).
    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> grad: takes the gradient
    of the score that score_mod returns, and returns the gradient of the score that score_mod gets.
    Without it score_mod is differentiated from its trace.
    block_sparse_tensors: a `BlockSparseTensorsTorch`, the pair that `compute_block_sparsity`
    returned, or a torch `BlockMask` with its mask as mask_mod.
    num_splits: 0 takes 1 where the grid fills the GPU or a gradient is recorded. Otherwise few
    queries over many keys are computed in parts. Equal calls give equal bits, but these may depend
    on the batch. 1 promises one pass, N > 1 computes N parts (docs/serving.md).
    deterministic: gradients have the same bits in every run. `torch.use_deterministic_algorithms`
    has the same effect. With its warn_only, calls with aux tensors that require grad only warn.
    config: a mapping of fields of `FwdConfig` and `BwdConfig`, such as {"skip_blocks": False},
    which holds for both directions; or a pair (forward, backward) of configs for the two host
    calls.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q. With return_lse, (out, lse):
        lse is fp32 (batch, heads_q, seqlen_q), natural log, and differentiable too. With
        return_max_logit, one more result, max_logit fp32 (heads_q,): the largest visible score of
        each head, after scale, soft cap and score_mod, without the sink. It is -inf for a head that
        sees nothing, and has no gradient. Muon's QK-clip (Kimi Team 2025) scales weights by it.

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch; the message names argument
            and value. Second derivatives are not supported. If an aux tensor requires grad and
            there is a score_mod, neither deterministic=True nor a score_mod_bwd is supported.
    """
    if unknown:
        refuse_keywords("flash_attn_func", unknown)
    check_num_splits(num_splits)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = scale_number(softmax_scale)
    left, right = window_sides(window_size)
    call = Call(
        None, None, None, None, None, None, softmax_scale, causal, left, right, softcap, score_mod,
        mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices, score_mod_bwd,
        deterministic, pack_gqa, config, q_start, None, num_splits,
    )  # fmt: skip
    results = attend(q, k, v, learnable_sink, call, return_lse, return_max_logit)
    return results.chosen(q, return_lse, return_max_logit)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, *, score_mod: Mod | None = None, score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: Literal[False] = False, config: Any = None,
    return_max_logit: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, *, score_mod: Mod | None = None, score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: Literal[True], config: Any = None,
    return_max_logit: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, *, score_mod: Mod | None = None, score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: bool = False, config: Any = None,
    return_max_logit: Literal[False] = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 0, pack_gqa: bool | None = None,
    deterministic: bool = False, *, score_mod: Mod | None = None, score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None, aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None, startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None, return_lse: bool = False, config: Any = None,
    return_max_logit: Literal[True],
) -> tuple[Tensor, ...]: ...  # fmt: skip


@public_call
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    *,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    block_sparse_tensors: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStart = None,
    return_lse: bool = False,
    config: Any = None,
    return_max_logit: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for sequences of different lengths.

    With cu_seqlens_q (int32, batch + 1) q is packed, (total_q, heads_q, head_dim). With
    cu_seqlens_k k and v are packed. A side without cu_seqlens is dense. seqused_* (int32, batch)
    count the used rows of each batch entry. With page_table (int32, (batch, max_pages)) k and v are
    pools of pages (pages, page_size, heads_kv, d): the seqused_k keys of sequence b lie in pages
    page_table[b, 0], page_table[b, 1] and so on. For packed queries lse is (heads_q, total_q).
    max_logit is always (heads_q,). Gradients of unused rows are 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; paged calls have no
            gradients.
    """
    if unknown:
        refuse_keywords("flash_attn_varlen_func", unknown)
    check_num_splits(num_splits)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = scale_number(softmax_scale)
    left, right = window_sides(window_size)
    call = Call(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, left, right, softcap, score_mod, mask_mod, aux_tensors,
        block_sparse_tensors, startend_row_indices, score_mod_bwd, deterministic, pack_gqa, config,
        q_start, page_table, num_splits,
    )  # fmt: skip
    results = attend(q, k, v, learnable_sink, call, return_lse, return_max_logit)
    return results.chosen(q, return_lse, return_max_logit)


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    dropout: float = 0.0, causal: bool = False, window_size: int | WindowSize | None = None,
    return_softmax_lse: Literal[False] = False, training: bool = True,
    softmax_scale: float | None = None, deterministic: bool = False, q_start: QStart = None,
) -> Tensor: ...  # fmt: skip


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    dropout: float = 0.0, causal: bool = False, window_size: int | WindowSize | None = None,
    return_softmax_lse: Literal[True], training: bool = True, softmax_scale: float | None = None,
    deterministic: bool = False, q_start: QStart = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    dropout: float = 0.0, causal: bool = False, window_size: int | WindowSize | None = None,
    return_softmax_lse: bool = False, training: bool = True, softmax_scale: float | None = None,
    deterministic: bool = False, q_start: QStart = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@public_call
def flashmask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    startend_row_indices: Tensor | ColumnMask | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | WindowSize | None = None,
    return_softmax_lse: bool = False,
    training: bool = True,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    q_start: QStart = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with column intervals, with the signature of PaddlePaddle's function of this name.

    q, k, v: as in `flash_attn_func`. startend_row_indices: int32 (batch or 1, heads, seqlen_k, n),
    where heads is 1, heads_kv or heads_q; see `ColumnMask`. window_size: as in `flash_attn_func`,
    or an int >= 0 for both sides; None or -1 leaves a side open. A window and intervals may be
    given together. deterministic, q_start: as in `flash_attn_func`. With fewer queries than keys,
    q_start=0 puts the first query at row 0 of the intervals, and q_start="end" puts the last query
    at the last key.

    Returns:
        out, or (out, lse) with return_softmax_lse, as `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; dropout in training is not
            supported.
    """
    if unknown:
        refuse_keywords("flashmask_attention", unknown)
    if dropout and training:
        raise NotImplementedError(f"dropout is not supported, got {dropout}; it must be 0")
    check_bool("return_softmax_lse", return_softmax_lse)
    # a tuple here and below: Dynamo of torch 2.9 does not know unions
    if not isinstance(window_size, (tuple, list)):
        if isinstance(window_size, Integral) and window_size < -1:
            raise ValueError(
                "window_size must be an int >= 0 for both sides, None or -1 for none, or (left, "
                f"right), got {window_size}: both sides shifted apart would leave nothing"
            )
        window_size = (window_size, window_size)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        deterministic=deterministic,
        startend_row_indices=startend_row_indices,
        q_start=q_start,
        return_lse=return_softmax_lse,
    )


# -- a call, eager or by operators ---------------------------------------------------------------


class KnownCall:
    """A call without lengths whose masks are known, all but the scale and the aux tensors.

    aux_tensors: those of the first call; later ones have the same metadata.
    """

    __slots__ = ("_key", "_options", "call")

    def __init__(self, call: Call, aux_tensors: list[Tensor] | None) -> None:
        self.call = call
        self._options = (
            call.causal, call.window_size_left, call.window_size_right, call.softcap, None, None,
            None, call.num_splits, call.pack_gqa,
        )  # fmt: skip
        masks = self._masks(aux_tensors)
        self._key = None
        # what no valid call has is refused, by its name, when it is called
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):
            self._key = None if masks is None else mask_key(masks)

    def _masks(self, aux_tensors: list[Tensor] | None) -> Masks | None:
        call = self.call
        lists, columns = call.block_sparse_tensors_torch, call.startend_row_indices
        if call.score_mod is call.mask_mod is aux_tensors is lists is columns is None:
            return None
        fields = call.score_mod, call.mask_mod, aux_tensors, lists, columns
        return tuple.__new__(Masks, fields)

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, aux_tensors: list[Tensor] | None,
        scale: float | None, return_lse: bool, return_max: bool,
    ) -> Results:  # fmt: skip
        """As `attend`, of which a forward of plain tensors without a graph needs little."""
        if return_max or not _is_forward_alone(q, k, v, aux_tensors):
            call = self.call._replace(softmax_scale=scale, aux_tensors=aux_tensors)
            return attend(q, k, v, None, call, return_lse, return_max)
        check_bool("return_lse", return_lse)
        options = (scale, *self._options, return_lse, None, False, None)
        tensors = tuple.__new__(Tensors, (q, k, v, *_NO_OTHERS))
        out, lse = run_bundles(tensors, self._masks(aux_tensors), options, self._key)
        return tuple.__new__(Results, (out, lse, None))


_NO_OTHERS = (None,) * (len(Tensors._fields) - 3)


def _is_forward_alone(q: Any, k: Any, v: Any, aux_tensors: Sequence[Tensor] | None) -> bool:
    """Whether there is nothing to record, to cast or to hand to anyone else."""
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    if torch.is_grad_enabled():
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return False
        for x in aux_tensors or ():
            if x.requires_grad:
                return False
    return not (
        forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.are_deterministic_algorithms_enabled()
        or in_transform()
    )


def _aux_that_require_grad(call: Call) -> tuple[int, ...]:
    """Indices of the aux tensors that require grad; empty where autograd records nothing."""
    aux_tensors = call.aux_tensors
    if not isinstance(aux_tensors, (list, tuple)) or not torch.is_grad_enabled():
        return ()
    return tuple(i for i, x in enumerate(aux_tensors) if isinstance(x, Tensor) and x.requires_grad)


def scale_number(softmax_scale: Any) -> Any:
    """The scale as a Python number. It is read once and serves the backward too.

    In a traced region it stays a tensor, which an operator reads when it runs.
    """
    if (
        isinstance(softmax_scale, Tensor)
        and softmax_scale.requires_grad
        and torch.is_grad_enabled()
    ):
        raise NotImplementedError(
            "softmax_scale requires grad, and attention has no gradient by it: multiply q by the "
            f"tensor instead, or detach it; got {softmax_scale}"
        )
    if torch.compiler.is_compiling():
        check_number("softmax_scale", softmax_scale)
        return softmax_scale
    return number_of("softmax_scale", softmax_scale)


class Results(NamedTuple):
    """The results of a call. lse and max_scores have a value for each row; None unless
    requested."""

    out: Tensor
    lse: Any
    max_scores: Tensor | None

    def chosen(self, q: Tensor, return_lse: bool, return_max_logit: bool) -> Any:
        """The results that the caller of a public function asked for."""
        if not return_max_logit:
            return (self.out, self.lse) if return_lse else self.out
        scores: Any = self.max_scores
        # without rows there is nothing to look for
        largest = scores.new_full((q.shape[-2],), -torch.inf)
        if scores.numel():
            largest = scores.amax((0, 2) if scores.dim() == 3 else 1)
        return (self.out, self.lse, largest) if return_lse else (self.out, largest)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    return_lse: bool,
    return_max: bool,
) -> Results:
    """Differentiable attention. return_max: also return the largest score of each row."""
    check_bool("return_lse", return_lse)
    check_bool("return_max_logit", return_max)
    # not a chain of `is`, of which Dynamo of torch 2.9 does not know two functions from inside
    if call.score_mod is not None or call.mask_mod is not None:
        call = _with_cute_mods(call, q)
    check_gradient_settings(call.deterministic, call.score_mod_bwd, call.score_mod)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _as_autocast_casts(q, k, v)
    wants_aux = _aux_that_require_grad(call)
    reason = None
    if wants_aux and call.score_mod is not None:
        reason = f"aux_tensors[{wants_aux[0]}] requires grad"
    if reason is not None or torch.are_deterministic_algorithms_enabled():
        in_order = settle_order(reason, call.score_mod_bwd, call.deterministic)
        call = call._replace(deterministic=in_order)
    refused = None
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        refuse_transforms()
        try:
            return _attend_eagerly(q, k, v, sink, call, wants_aux, return_lse, return_max)
        except NotPlainError as error:
            refused = error
    if refused is None:
        return _attend_by_operators(q, k, v, sink, call, wants_aux, return_max)
    with refused.named_unless_from(IMPLEMENTATIONS):
        return _attend_by_operators(q, k, v, sink, call, wants_aux, return_max)


def _with_cute_mods(call: Call, q: Any) -> Call:
    """The same call with torch mods lowered to CuTe and their captured tensors as aux tensors."""
    given = call.score_mod, call.mask_mod, call.aux_tensors
    if torch.compiler.is_compiling():
        if isinstance(call.score_mod, str) or isinstance(call.mask_mod, str):
            return call
        from flash_mask_cute.flex.in_graph import mods_in_graph

        score_mod, mask_mod, aux_tensors = mods_in_graph(*given, q.device.type, False)
    else:
        score_mod, mask_mod, aux_tensors = as_cute_mods(*given, getattr(q, "device", None))
    if score_mod is call.score_mod and mask_mod is call.mask_mod:
        return call
    return call._replace(score_mod=score_mod, mask_mod=mask_mod, aux_tensors=aux_tensors)


def _as_autocast_casts(q: Any, k: Any, v: Any) -> list[Any]:
    """q, k and v, cast as autocast casts them for torch's scaled_dot_product_attention."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return [q, k, v]
    dtype = torch.get_autocast_dtype(q.device.type)
    return [
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in (q, k, v)
    ]


def _attend_eagerly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    wants_aux: tuple[int, ...],
    return_lse: bool,
    return_max: bool,
) -> Results:
    """Attention on plain tensors. Raises NotPlainError for others, before anything is computed."""
    # now, and not when the backward runs
    check_mod("score_mod_bwd", call.score_mod_bwd)
    if call.config is not None:
        call = call._replace(config=call.configs)
    if isinstance(call.startend_row_indices, Tensor):
        # forward and backward then share the bounds
        mask = ColumnMask(call.startend_row_indices, call.causal)
        call = call._replace(startend_row_indices=mask)
    if wants_aux or _needs_graph(q, k, v, sink):
        _refuse_pages(call)
        aux_tensors: Any = call.aux_tensors
        wanted = [aux_tensors[i] for i in wants_aux]
        out, lse, *more = Attention.apply(q, k, v, sink, call, wants_aux, return_max, *wanted)
        return Results(out, lse, more[0] if more else None)
    max_scores = new_max_scores(q) if return_max else None
    out, lse = run_forward(q, k, v, sink, call, return_lse, max_scores=max_scores)
    return Results(out, lse, max_scores)


def _attend_by_operators(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    call: Call,
    wants_aux: tuple[int, ...],
    return_max: bool,
) -> Results:
    """Attention by operators, for a trace, a dispatch mode or a tensor subclass."""
    refuse_transforms(but_functionalize=True)
    refuse_dual_level()
    others = (
        call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k, call.max_seqlen_q,
        call.max_seqlen_k, call.score_mod, call.mask_mod, call.block_sparse_tensors_torch,
        start_that_counts(call.q_start),
    )  # fmt: skip
    if wants_aux or _needs_graph(q, k, v, sink):
        _refuse_pages(call)
        call = call._replace(num_splits=splits_recorded(call.num_splits))
    # a limit on lengths would be a guard of the trace, so none decides about undeclared documents
    mask = call.startend_row_indices
    is_declared = isinstance(mask, ColumnMask) and mask.documents is True
    packs = is_declared and holds_documents(q, k, v, mask, call.causal, others)
    arguments = to_operator(call, q.shape[0] if packs else None, return_max)
    out, lse, _, largest = torch.ops.flash_mask_cute.attention_fwd(q, k, v, sink, *arguments)
    return Results(out, lse, largest.detach() if return_max else None)


def _refuse_pages(call: Call) -> None:
    """Refuse pages where autograd records a graph: they have no gradients."""
    if call.page_table is not None:
        raise NotImplementedError(
            "there are no gradients by keys and values in pages, or of queries beside page_table: "
            "use torch.no_grad(), or detach what requires grad"
        )


def _needs_graph(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> bool:
    # forward-mode differentiation does not ask for requires_grad
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    try:
        return (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
        )
    except AttributeError:
        return False  # what is no tensor is refused by the host path, by name
