"""Attention for autograd, `torch.compile` and checkpointing: the public functions.

Every call becomes an `AttentionCall`, which `attend` of autograd/attend.py computes: of plain
tensors eagerly, by an `autograd.Function` (autograd/eager.py) if a gradient is recorded. Under
torch.compile, torch.export, a dispatch mode or with tensor subclasses it becomes operators
(autograd/torch_ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, overload

from torch import Tensor

from flash_mask_cute.autograd.attend import attend, scale_number
from flash_mask_cute.autograd.mod_names import Mod
from flash_mask_cute.block_sparsity import lists_of_kept
from flash_mask_cute.call.arguments import (
    NO_LENGTHS,
    NO_OPTIONAL,
    AttentionCall,
    CallLengths,
    CausalArgument,
    OptionalTensors,
    Options,
    Tensors,
    backward_options_of,
    configs_of,
    masks_of,
    split_causal,
    window_sides,
)
from flash_mask_cute.call.check.keywords import public_call, refuse_keywords
from flash_mask_cute.call.check.validate import check_num_splits
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.q_start import QStartArgument, split_q_start
from flash_mask_cute.runtime.checks import brief, check_bool, check_real

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flashmask_attention"]

WindowSize: TypeAlias = tuple[int | None, int | None]

if TYPE_CHECKING:
    # part of what checkers know of any Python, so nothing has to be installed
    from typing_extensions import Required, TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Arguments of `flash_attn_func` on which its result's type does not depend."""

        window_size: WindowSize
        learnable_sink: Tensor | None
        softcap: float
        num_splits: int
        seqlen_k_per_split: int | None
        pack_gqa: bool | None
        deterministic: bool
        mask_mod: Mod | None
        score_mod: Mod | None
        score_mod_bwd: Mod | None
        aux_tensors: Sequence[Tensor] | None
        block_sparse_tensors: Any
        startend_row_indices: Tensor | ColumnMask | None
        q_start: QStartArgument
        config: Any
        out: Tensor | None

    class _VarlenOptions(_Options, total=False):
        """The same of `flash_attn_varlen_func`."""

        softmax_scale: float | None
        causal: CausalArgument
        max_seqlen_q: int | None
        max_seqlen_k: int | None
        seqused_q: Tensor | None
        seqused_k: Tensor | None
        page_table: Tensor | None
        k_descale: Tensor | None
        v_descale: Tensor | None

    class _FlashmaskOptions(TypedDict, total=False):
        """The same of `flashmask_attention`."""

        dropout: float
        causal: bool
        window_size: int | WindowSize | None
        training: bool
        softmax_scale: float | None
        deterministic: bool
        q_start: QStartArgument
        block_mask: Tensor | None

    class _FlashmaskTensors(_FlashmaskOptions, total=False):
        """All arguments, under the names of PaddlePaddle."""

        query: Required[Tensor]
        key: Required[Tensor]
        value: Required[Tensor]
        startend_row_indices: Tensor | ColumnMask | None


# Each function is declared several times before its definition, so that a type checker knows what
# it returns: a tensor, a pair with return_lse, either where return_lse is a variable, and a tuple
# with return_max_logit. Arguments that may also be passed by position, but rarely are, are `others`
# there, and a checker knows neither their types nor their number.


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    *others: Any, return_lse: Literal[False] = False, return_max_logit: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    *others: Any, return_lse: Literal[True], return_max_logit: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    *others: Any, return_lse: bool = False, return_max_logit: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    *others: Any, return_lse: bool = False, return_max_logit: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, ...]: ...  # fmt: skip


@public_call  # type: ignore[misc]  # because of `others`
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
    q_start: QStartArgument = None,
    seqlen_k_per_split: int | None = None,
    return_lse: bool = False,
    config: Any = None,
    return_max_logit: bool = False,
    out: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...]:
    """Compute softmax(mask(q k^T * softmax_scale)) v.

    Gradients are supported for q, k, v, learnable_sink, and floating-point aux_tensors that
    score_mod reads.

    q is (batch, seqlen_q, heads_q, head_dim), k is (batch, seqlen_k, heads_kv, head_dim), v is like
    k with head_dim_v. They are bf16 or fp16 on CUDA, also fp32 and fp64 on the CPU. The arguments
    and their combinations are described in `interface._flash_attn_fwd`. These differ:

    window_size: (left, right); None or -1 leaves a side open. A side below -1 shifts the band: with
    right = -3 a token sees only keys at least three positions before it.
    softmax_scale: a number, or a 0-dim CPU tensor, which is read and gets no gradient.
    score_mod, mask_mod: CuTe callables, or torch functions with FlexAttention's arguments, (score,
    b, h, q_idx, kv_idx) and (b, h, q_idx, kv_idx). Torch functions are lowered (docs/flex.md).
    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> grad: takes the gradient
    of the score that score_mod returns, and returns the gradient of the score that score_mod gets.
    Without it score_mod is differentiated from its trace.
    block_sparse_tensors: a `BlockSparseTensorsTorch`, the pair that `compute_block_sparsity`
    returned, a torch `BlockMask` (its own mask_mod is used if mask_mod is None), or a
    `SelectedBlocks`, the key blocks that each query selects.
    num_splits: 0 lets the library choose. It splits the keys if few queries see many keys, and uses
    one pass if the queries fill the GPU or autograd records. Equal calls give equal bits, but these
    may depend on the batch. 1 forces one pass, N > 1 forces N splits (docs/serving.md).
    seqlen_k_per_split: cut sums at every multiple of so many keys, 512 or more. A row then has the
    same bits in any batch and chunk, decoded or trained (docs/serving.md#one-row-one-set-of-bits).
    deterministic: gradients have the same bits in every run. `torch.use_deterministic_algorithms`
    has the same effect. On Blackwell gradients of aux tensors have no fixed order: deterministic
    is refused beside them, and torch's setting with warn_only only warns.
    out: memory for the result, without gradients: the shape below, the device of q, its dtype or,
    for 16 bits, also fp32, and memory of its own. The last stride is 1, others are any. On a GPU
    rows start at multiples of 16 bytes.
    config: a mapping of fields of `FwdConfig` and `BwdConfig`, such as {"skip_blocks": False},
    which holds for both directions; or a pair (forward, backward) of configs for the two host
    calls.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q. With return_lse, (out, lse):
        lse is fp32 (batch, heads_q, seqlen_q), natural log, and differentiable too. With
        return_max_logit, one more result, max_logit fp32 (heads_q,): the largest visible score of
        each head, after scale, soft cap and score_mod, without the sink. It is -inf for a head that
        sees nothing, and gets no gradient. Muon's QK-clip (Kimi Team 2025) scales weights by it.

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch; the message names argument
            and value. ValueError also for out where a gradient is recorded. Second derivatives are
            not supported. If an aux tensor requires grad and there is a score_mod, a score_mod_bwd
            is not supported, nor, on Blackwell, deterministic=True.

    Example:
        >>> import torch
        >>> from flash_mask_cute import flash_attn_func
        >>> q = torch.randn(2, 16, 4, 8, requires_grad=True)  # (batch, seqlen, heads, head_dim)
        >>> k, v = torch.randn(2, 2, 16, 2, 8)  # two query heads for each KV head
        >>> out, lse = flash_attn_func(q, k, v, causal=True, window_size=(5, 0), return_lse=True)
        >>> out.sum().backward()
        >>> out.shape, lse.shape, q.grad.shape
        (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 16]), torch.Size([2, 16, 4, 8]))
    """
    if unknown:
        refuse_keywords("flash_attn_func", unknown)
    check_num_splits(num_splits)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = scale_number(softmax_scale)
    left, right = window_sides(window_size)
    q_starts, start = split_q_start(q_start)
    config_fwd, config_bwd = configs_of(config)
    call = AttentionCall(
        Tensors(
            q, k, v, learnable_sink,
            NO_LENGTHS if q_starts is None else CallLengths(q_starts=q_starts), NO_OPTIONAL, out,
        ),
        masks_of(score_mod, mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices),
        Options(
            softmax_scale, causal, left, right, softcap, q_start=start, num_splits=num_splits,
            seqlen_k_per_split=seqlen_k_per_split, pack_gqa=pack_gqa, return_lse=return_lse,
            config=config_fwd,
        ),
        backward_options_of(score_mod_bwd, deterministic, config_bwd),
    )  # fmt: skip
    results = attend(call, return_max_logit)
    return results.chosen(q, return_lse, return_max_logit)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, *others: Any, return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False, **options: Unpack[_VarlenOptions],
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, *others: Any, return_lse: Literal[True],
    return_max_logit: Literal[False] = False, **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, *others: Any, return_lse: bool = False,
    return_max_logit: Literal[False] = False, **options: Unpack[_VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, *others: Any, return_lse: bool = False,
    return_max_logit: Literal[True], **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, ...]: ...  # fmt: skip


@public_call  # type: ignore[misc]  # because of `others`
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
    causal: CausalArgument = False,
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
    q_start: QStartArgument = None,
    seqlen_k_per_split: int | None = None,
    return_lse: bool = False,
    config: Any = None,
    return_max_logit: bool = False,
    out: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for sequences of different lengths.

    With cu_seqlens_q (int32, batch + 1) q is packed, (total_q, heads_q, head_dim). With
    cu_seqlens_k k and v are packed. A side without cu_seqlens is dense. seqused_* (int32, batch)
    count the used rows of each batch entry. Beside cu_seqlens_q, k and v of one batch entry, (1,
    seqlen_k, heads_kv, d), serve all sequences, and their gradients are sums over the sequences;
    the b of masks and mods is the sequence of the query (docs/masks.md). With page_table (int32,
    (batch, max_pages)) k and v are pools of pages (pages, page_size, heads_kv, d): the seqused_k
    keys of sequence b lie in pages page_table[b, 0], page_table[b, 1] and so on. For packed queries
    lse is (heads_q, total_q). max_logit is always (heads_q,). Gradients of unused rows are 0.

    causal: a bool, or int32 (batch,): a sequence is causal if its number is not 0; others see all
    keys in the window. Contents may change between calls. Column intervals given as a tensor then
    use the form without causal. Such a call supports no gradients, and Blackwell does not support
    it.

    Over seqused_k or pages, k and v may be in float8_e4m3fn beside q in 16 bits, with k_descale and
    v_descale as in `flash_attn_with_kvcache`. Such a call supports no gradients.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; paged calls, those with
            causal as a tensor, and those with seqused_k beside k and v of one batch entry for
            several sequences have no gradients.

    Example:
        >>> import torch
        >>> from flash_mask_cute import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 12, 2, 8)  # (total, heads, head_dim), of 5 and 7 tokens
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
        torch.Size([12, 2, 8])
    """
    if unknown:
        refuse_keywords("flash_attn_varlen_func", unknown)
    check_num_splits(num_splits)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = scale_number(softmax_scale)
    left, right = window_sides(window_size)
    q_starts, start = split_q_start(q_start)
    causal_per_seq, causal = (None, causal) if type(causal) is bool else split_causal(causal)
    config_fwd, config_bwd = configs_of(config)
    call = AttentionCall(
        Tensors(
            q, k, v, learnable_sink,
            CallLengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, q_starts),
            NO_OPTIONAL
            if causal_per_seq is k_descale is v_descale is None
            else OptionalTensors(None, None, causal_per_seq, k_descale, v_descale),
            out,
        ),
        masks_of(score_mod, mask_mod, aux_tensors, block_sparse_tensors, startend_row_indices),
        Options(
            softmax_scale, causal, left, right, softcap, max_seqlen_q, max_seqlen_k, start,
            num_splits=num_splits, seqlen_k_per_split=seqlen_k_per_split, pack_gqa=pack_gqa,
            return_lse=return_lse, config=config_fwd,
        ),
        backward_options_of(score_mod_bwd, deterministic, config_bwd),
    )  # fmt: skip
    results = attend(call, return_max_logit)
    return results.chosen(q, return_lse, return_max_logit)


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    return_lse: Literal[False] = False, return_softmax_lse: Literal[False] = False,
    **options: Unpack[_FlashmaskOptions],
) -> Tensor: ...  # fmt: skip


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    return_lse: Literal[True], return_softmax_lse: bool = False,
    **options: Unpack[_FlashmaskOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    return_lse: bool = False, return_softmax_lse: Literal[True],
    **options: Unpack[_FlashmaskOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    q: Tensor, k: Tensor, v: Tensor, startend_row_indices: Tensor | ColumnMask | None = None, *,
    return_lse: bool = False, return_softmax_lse: bool = False,
    **options: Unpack[_FlashmaskOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    *, return_lse: Literal[False] = False, return_softmax_lse: Literal[False] = False,
    **arguments: Unpack[_FlashmaskTensors],
) -> Tensor: ...  # fmt: skip


@overload
def flashmask_attention(
    *, return_lse: Literal[True], return_softmax_lse: bool = False,
    **arguments: Unpack[_FlashmaskTensors],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    *, return_lse: bool = False, return_softmax_lse: Literal[True],
    **arguments: Unpack[_FlashmaskTensors],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flashmask_attention(
    *, return_lse: bool = False, return_softmax_lse: bool = False,
    **arguments: Unpack[_FlashmaskTensors],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@public_call
def flashmask_attention(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | WindowSize | None = None,
    return_softmax_lse: bool = False,
    training: bool = True,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    q_start: QStartArgument = None,
    return_lse: bool = False,
    block_mask: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with column intervals, with the signature of PaddlePaddle's function of this name.

    q, k, v, or under PaddlePaddle's names query, key, value: as in `flash_attn_func`.
    startend_row_indices: int32 (batch or 1, heads, seqlen_k, n), where heads is 1, heads_kv or
    heads_q; see `ColumnMask`. window_size: as in `flash_attn_func`, or an int >= 0 for both sides;
    None or -1 leaves a side open. A window and intervals may be given together. block_mask: int32
    (batch or 1, heads as above, seqlen_q / 128, seqlen_k / 128, rounded up), 1 for each block of
    128 x 128 that is kept and 0 for one that is hidden; it joins the other masks, and each call
    makes a block list of it. deterministic, q_start: as in `flash_attn_func`. With fewer queries
    than keys, q_start=0 puts the first query at row 0 of the intervals, and q_start="end" puts the
    last query at the last key. return_seed_offset=False, fixed_seed_offset=None, rng_name="" and
    name=None are accepted for PaddlePaddle's sake; other values are refused.

    Returns:
        out, or (out, lse) with return_lse or return_softmax_lse, which mean the same, as
        `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; dropout in training is not
            supported.

    Example:
        >>> import torch
        >>> from flash_mask_cute import flashmask_attention
        >>> q, k, v = torch.randn(3, 1, 12, 2, 8)
        >>> ends = torch.tensor([5] * 5 + [12] * 7, dtype=torch.int32)  # of each key's document
        >>> flashmask_attention(q, k, v, ends.view(1, 1, 12, 1), causal=True).shape
        torch.Size([1, 12, 2, 8])
    """
    if unknown:
        refuse_keywords("flashmask_attention", unknown)
    if type(dropout) is not float:
        check_real("dropout", dropout)
    check_bool("training", training)
    if dropout and training:
        raise NotImplementedError(f"dropout is not supported, got {dropout}; it must be 0")
    q = _one_of("q", q, "query", query)
    k = _one_of("k", k, "key", key)
    v = _one_of("v", v, "value", value)
    check_bool("return_lse", return_lse)
    check_bool("return_softmax_lse", return_softmax_lse)
    # a tuple here and below: Dynamo of torch 2.9 does not know unions
    if not isinstance(window_size, (tuple, list)):
        if window_size is not None and not isinstance(window_size, Integral):
            raise TypeError(
                "window_size must be an int for both sides, (left, right) or None, got "
                f"{brief(window_size)}"
            )
        if window_size is not None and window_size < -1:
            raise ValueError(
                "window_size must be an int >= 0 for both sides, None or -1 for none, or (left, "
                f"right), got {window_size}: both sides shifted apart would leave nothing"
            )
        window_size = (window_size, window_size)
    lists = None
    # other tensors are refused below, by name
    if block_mask is not None and all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)):
        rows = q.shape[1] if q_start is None else None
        lists = lists_of_kept(block_mask, q.shape[0], (q.shape[2], k.shape[2]), (rows, k.shape[1]))
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        deterministic=deterministic,
        block_sparse_tensors=lists,
        startend_row_indices=startend_row_indices,
        q_start=q_start,
        return_lse=return_lse or return_softmax_lse,
    )


def _one_of(name: str, tensor: Tensor | None, other: str, same: Tensor | None) -> Tensor:
    """An argument with two names, one of them given."""
    if same is None and tensor is not None:
        return tensor
    if tensor is None and same is not None:
        return same
    given = "neither" if tensor is None else "both"
    raise TypeError(
        f"flashmask_attention() takes {name} or {other}, which is the same; got {given}"
    )
