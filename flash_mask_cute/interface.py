"""The public calls.

A call is planned and compiled once (`call/plan.py`, `call/prepare.py`). Later calls find the
prepared launch by the metadata of their arguments (`call/lookup.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import (
    NO_BACKWARD_OPTIONS,
    NO_GRADIENTS,
    NO_MASKS,
    NO_OPTIONAL,
    AttentionCall,
    BackwardOptions,
    CausalArgument,
    Direction,
    Gradients,
    Masks,
    OptionalTensors,
    Options,
    PreparedBwd,
    PreparedFwd,
    Tensors,
    keywords_of,
    lengths_of,
    masks_of,
    split_causal,
    window_sides,
)
from flash_mask_cute.call.check.keywords import know_keywords, public_call, refuse_keywords
from flash_mask_cute.call.check.kvcache import (
    Cache,
    batch_of,
    check_cache,
    check_contents,
    seqlens_of,
)
from flash_mask_cute.call.check.validate import check_split_keys
from flash_mask_cute.call.explain import Explanation, explain_fwd
from flash_mask_cute.call.explain_backward import backward_call
from flash_mask_cute.call.given_outputs import WithGivenOutputs, writes_tensors_of_caller
from flash_mask_cute.call.lookup import find_bwd, find_fwd, has_callables
from flash_mask_cute.call.plan import plan
from flash_mask_cute.call.prepare import may_be_kept, prepare_bwd, prepare_fwd
from flash_mask_cute.call.settings import BwdConfig, FwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.lowering.pair import form_of, resolve_mods, stays_mod
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.mask_mods import form_without_contents
from flash_mask_cute.masks.q_start import NO_START, QStartArgument, split_q_start
from flash_mask_cute.runtime.checks import brief, check_bool, number_of
from flash_mask_cute.runtime.compiler import preload
from flash_mask_cute.runtime.named_tuples import made, replaced
from flash_mask_cute.runtime.recent import Recent
from flash_mask_cute.runtime.target import Target

__all__ = ["BwdConfig", "FwdConfig", "_flash_attn_bwd", "_flash_attn_fwd", "explain"]

if torch.cuda.is_available():
    preload()

_MAX_KEPT = 4096
_MAX_KEPT_WITH_CALLABLES = 512


def _weight(key: Any) -> int:
    """Callables have kernels of their own. So prepared calls of many of them hold many kernels."""
    return _MAX_KEPT // _MAX_KEPT_WITH_CALLABLES if has_callables(key) else 1


_FORWARD = Direction.FORWARD
# by key, as `find_fwd` looks them up
_prepared_fwd: dict[Any, PreparedFwd | WithGivenOutputs] = Recent(_MAX_KEPT, _weight)
_prepared_bwd: dict[Any, PreparedBwd | WithGivenOutputs] = Recent(_MAX_KEPT, _weight)


@public_call
def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None,
    causal: CausalArgument = False, window_size_left: int | None = None,
    window_size_right: int | None = None, softcap: float = 0.0,
    learnable_sink: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None, block_sparse_tensors_torch: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None, q_start: QStartArgument = None,
    num_splits: int = 0, seqlen_k_per_split: int | None = None, pack_gqa: bool | None = None,
    out: Tensor | None = None, lse: Tensor | None = None, lse_low: Tensor | None = None,
    max_scores: Tensor | None = None, return_lse: bool = True,
    config: FwdConfig | Mapping[str, Any] | None = None, **unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention forward: (out, lse) with out = softmax(mask(q k^T * softmax_scale)) v.

    q is (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v like k
    with head_dim_v. With cu_seqlens_q (int32, batch + 1, starting at 0) q is (total_q, heads_q,
    head_dim); with cu_seqlens_k k and v are (total_k, ...), and beside cu_seqlens_q alone they may
    be (1, seqlen_k, ...) for all sequences (docs/masks.md). seqused_* (int32, batch) count the used
    rows of each batch entry. CUDA tensors are bf16 or fp16, CPU tensors also fp32 or fp64.

    Key j is visible to query i if every given mask allows it. Let d = i + seqlen_k - seqlen_q, or i
    + q_start. Causal: j <= d; with an int32 tensor (batch,), in sequences where it is not 0.
    Window: d - window_size_left <= j <= d + window_size_right; None leaves a side open.
    A side below -1 shifts the band past the diagonal. softcap > 0 turns a score s into softcap *
    tanh(s / softcap). learnable_sink (heads_q,), of any floating dtype (fp64 is read as fp32), is
    one more logit per head. softmax_scale: a number or 0-dim CPU tensor, by default head_dim**-0.5.

    q, k and v may have any strides and alignment. On a GPU each call copies what kernels cannot
    read by TMA, and copies q if softmax_scale is not positive; `explain` lists the copies.

    startend_row_indices: the query rows that each key hides, int32 (batch or 1, heads, seqlen_k,
    n), heads 1, heads_kv or heads_q, n 1, 2 or 4 (see `ColumnMask`). With cu_seqlens_k it is (1,
    heads, total_k, n), and rows count from the start of their sequence. A tensor means
    `ColumnMask(tensor, causal)`. A ColumnMask keeps its derived data between calls. Its own
    `causal` defines what its vectors mean; the call is causal if the mask or the call says so.
    Documents in a mask may be computed as packed sequences (`ColumnMask.documents`).
    score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> score, applied after softcap, and
    mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> Boolean are CuTe callables on one-element
    `cute.TensorSSA`. They are compiled into the kernel (docs/mods.md). They get positions inside
    the sequence and query heads. aux_tensors: tensors that both may index, of 1 to 4 dimensions and
    any strides, bool, uint8, uint32, int8, int16, int32, int64, float32, bfloat16 or float16.
    block_sparse_tensors_torch: a `BlockSparseTensorsTorch`, the pair of `compute_block_sparsity`,
    or a torch `BlockMask` together with its mask as mask_mod. A block in no list is hidden. A full
    block is visible, and mask_mod is not called. In a partial block mask_mod decides; without one
    all of it is visible. Blocks count from the start of a sequence. With varying lengths lists
    cover max_seqlen_q and max_seqlen_k. Or a `SelectedBlocks`: the blocks that each query selects.
    q_start: the position of query 0 of each sequence: an int, an int32 tensor (batch,), or "end",
    which puts the last query at the last key. A negative position is before the first key. It
    applies to causal and window, to the rows of intervals and lists, and to the q_idx of mods. With
    None, causal and window behave as with "end", and rows and mods count from 0; a mask without a
    row for each query is then refused (docs/masks.md).

    out is like q with head_dim_v; that of the caller may be fp32 for q in 16 bits. lse, natural
    log, is fp32 (batch, heads_q, seqlen_q) or (heads_q, total_q), and the caller's may be fp64 for
    q in fp64. It is None unless return_lse, lse or lse_low asks for it. A row that sees nothing has
    out 0 and lse -inf (with a sink, lse is the sink). A score_mod may return any finite number.
    lse_low is shaped like lse, needs a score_mod, and receives the rounding error of lse for the
    backward. max_scores, shaped like lse, receives the largest visible score of each row, -inf if
    there is none. out, lse, lse_low and max_scores share no memory with inputs or each other. On a
    GPU rows of out start at multiples of 16 bytes.

    page_table: int32 (batch, max_pages). k and v are then pools (pages, page_size, heads_kv, ...)
    with pages of 1 to 256 keys and any strides but the last. Page j of sequence b is number
    page_table[b, j]. seqused_k counts the keys (None: all); keys after them are never seen. With
    kv_batch_idx, int32 (batch,), sequence b has the pages of row kv_batch_idx[b] of the table. With
    leftpad_k, int32 (batch,), and seqused_k, its first key is row leftpad_k[b] of its pages.
    k_descale, v_descale: of k and v in fp8, as of caches of `flash_attn_with_kvcache`.
    num_splits: 0 lets the library choose; for few queries over many keys it divides all key blocks
    evenly over the CTAs. Equal calls give equal bits, but these may depend on the batch. 1 computes
    each output in one pass, N the keys of each work tile in N parts (docs/serving.md).
    seqlen_k_per_split: S >= 512 cuts sums at keys S, 2 S, ...; a row has the same bits in any
    batch, chunk or pages (docs/serving.md#one-row-one-set-of-bits). num_splits: 0, or so many.
    pack_gqa: query heads of a KV head share tiles; None packs if queries are few. Lists or
    intervals that differ by query head rule it out. config: a `FwdConfig`, or some of its fields.

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch; names argument and value.

    Example:
        >>> import torch
        >>> from flash_mask_cute.interface import _flash_attn_fwd
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)
        >>> out, lse = _flash_attn_fwd(q, k, v, causal=True, window_size_left=4)
    """
    if unknown:
        refuse_keywords("_flash_attn_fwd", unknown)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = number_of("softmax_scale", softmax_scale)
    (q_starts, start), optional = split_q_start(q_start), NO_OPTIONAL
    causal_per_seq, causal = (None, causal) if type(causal) is bool else split_causal(causal)
    lengths = lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, q_starts)
    if not (kv_batch_idx is leftpad_k is causal_per_seq is k_descale is v_descale is None):
        optional = OptionalTensors(kv_batch_idx, leftpad_k, causal_per_seq, k_descale, v_descale)
    # in the order of the fields, as names take 1 us more; a test holds the places
    tensors = made(Tensors, (q, k, v, learnable_sink, lengths, optional, out, lse, lse_low,
        max_scores, NO_GRADIENTS))  # fmt: skip
    options = made(Options, (
        softmax_scale, causal, window_size_left, window_size_right, softcap, max_seqlen_q,
        max_seqlen_k, start, num_splits, seqlen_k_per_split, pack_gqa, return_lse,
        None if config is None else FwdConfig.from_value(config), False))  # fmt: skip
    lists, columns, masks = block_sparse_tensors_torch, startend_row_indices, None
    if not (score_mod is mask_mod is aux_tensors is lists is columns is None):
        masks = Masks(score_mod, mask_mod, aux_tensors, lists, columns)
    return forward(made(AttentionCall, (tensors, masks, options, NO_BACKWARD_OPTIONS, _FORWARD)))


def forward(call: AttentionCall, key_of_masks: Any = None) -> tuple[Tensor, Tensor | None]:
    """out and lse of a call; key_of_masks as in `find_fwd`."""
    prepared, key = find_fwd(_prepared_fwd, call, key_of_masks)
    tensors, masks, options, _, _ = call
    if prepared is None:
        prepared = prepare_fwd(call)
        if options.is_recorded:
            plan(backward_call(call))  # what it refuses, before anything runs
        _keep(_prepared_fwd, key, prepared, call)
    elif options.seqlen_k_per_split is not None:
        # 4096.0 finds the prepared call of 4096
        check_split_keys(options.seqlen_k_per_split)
    return prepared(tensors, masks)


def prepare_forward(call: AttentionCall) -> None:
    """Raise what `forward` would raise for this call, and have its kernels compiled. No attention
    is launched."""
    prepared, key = find_fwd(_prepared_fwd, call)
    if prepared is None:
        _keep(_prepared_fwd, key, prepare_fwd(call), call)


@public_call
def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
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
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None,
    block_sparse_tensors_torch: Any = None,
    startend_row_indices: Tensor | ColumnMask | None = None,
    q_start: QStartArgument = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dsink: Tensor | None = None,
    lse_low: Tensor | None = None,
    daux: Sequence[Tensor | None] | None = None,
    config: BwdConfig | Mapping[str, Any] | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention backward: (dq, dk, dv), the gradients of a loss with respect to q, k and v.

    out and lse are the results of `_flash_attn_fwd` for the same arguments. dout and dlse are the
    gradients of the loss with respect to them, of the same shapes and dtypes. Without dlse the loss
    does not depend on lse. out and dout may have any strides, as q, k and v may: tensors that
    kernels cannot read (expanded or transposed ones, as autograd makes them) are copied. lse and
    dlse may have any strides, too. Arguments of both calls mean the same in both. The backward
    packs the heads of a group only where it takes a selection of key blocks as query lists.

    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors) -> grad: takes the gradient
    of the score that score_mod returns, and returns the gradient of the score that it gets. Without
    it score_mod is differentiated.

    lse_low, shaped like lse and allowed only with a score_mod, is what the forward wrote there, as
    autograd requests it. Without it the rounding error of lse, up to abs(lse) * 2^-24, is a
    relative error of a row's probabilities and gradients. Above abs(lse) = 2^13 it is visible in
    bf16. From 2^24 on, as for queries that a table of -1e30 hides from all keys, lse no longer
    holds the number of keys: each key has the probability 1.

    dq, dk, dv are new contiguous tensors, or the caller's: shaped like q, k and v, in memory of
    their own. They are 0 in rows that see nothing, for keys that no query sees, and in rows past
    seqused_*. Packed rows that belong to no sequence are 0 in new tensors; in the caller's tensors
    a GPU leaves them unchanged. If k and v are one batch entry for several sequences, dk and dv are
    sums over all of them; seqused_k is then not supported, nor is daux with deterministic=True.
    dsink (heads_q,), in learnable_sink's dtype, receives the gradient of the sink, which is
    computed only on request. daux has an entry for each aux tensor: None, or a floating-point
    tensor of the same shape and dtype. It receives the gradient through score_mod, 0 where
    score_mod does not read; reads by mask_mod have no gradient. daux is not supported with a
    score_mod_bwd, nor, on Blackwell, with deterministic=True.

    config: a `BwdConfig`, or a mapping of some of its fields, which override the table.
    deterministic: sum dq in a fixed order, so that equal calls give equal bits. Otherwise, on a
    GPU, the last bits of dq differ from call to call.

    Raises:
        TypeError, ValueError, NotImplementedError: before any launch, naming argument and value.

    Example:
        >>> import torch
        >>> from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
        >>> q, k, v, dout = torch.randn(4, 1, 16, 2, 8)
        >>> out, lse = _flash_attn_fwd(q, k, v, causal=True)
        >>> dq, dk, dv = _flash_attn_bwd(q, k, v, out, dout, lse, causal=True)
    """
    if unknown:
        refuse_keywords("_flash_attn_bwd", unknown)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = number_of("softmax_scale", softmax_scale)
    q_starts, start = split_q_start(q_start)
    tensors = Tensors(
        q, k, v, learnable_sink,
        lengths_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, q_starts),
        NO_OPTIONAL, out, lse, lse_low=lse_low,
        gradients=Gradients(dout, dlse, dq, dk, dv, dsink, daux),
    )  # fmt: skip
    options = Options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, max_seqlen_q,
        max_seqlen_k, q_start=start,
    )  # fmt: skip
    lists, columns = block_sparse_tensors_torch, startend_row_indices
    masks = masks_of(score_mod, mask_mod, aux_tensors, lists, columns)
    config = None if config is None else BwdConfig.from_value(config)
    own = BackwardOptions(score_mod_bwd, deterministic, config)
    return backward(AttentionCall(tensors, masks, options, own, Direction.BACKWARD))


def backward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call."""
    prepared, key = find_bwd(_prepared_bwd, call)
    if prepared is None:
        prepared = prepare_bwd(call)
        _keep(_prepared_bwd, key, prepared, call)
    return prepared(call.tensors, call.masks)


def widest_head(device: torch.device) -> int:
    """The largest head_dim on a GPU. Above 256 head_dim_v must be equal, and there are no gradients
    beside a score_mod, a soft cap or a selection of blocks.

    Raises:
        NotImplementedError: there is no kernel for the device.
    """
    return arch_spec(Target.from_device(device)).forward.most_head_dim


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    target: str | None = None,
    deterministic: bool = False,
    code: bool = False,
    **keywords: Any,
) -> Explanation:
    """Report what kernel a forward with these arguments of `_flash_attn_fwd` would run, and why,
    and what its backward would run (`.backward`), which is planned and not compiled.

    For a mask that may hold documents, report the packed sequences that are made of them. No
    attention is launched. If q, k, v or the sink require grad, it is the forward that autograd
    records.

    `window_size` and `block_sparse_tensors`, the names of `flash_attn_func`, mean the same here;
    mods may be written in torch, as there. `cache_seqlens` of `flash_attn_with_kvcache`, an int or
    an int32 tensor (batch,), stands for `seqused_k`.

    deterministic: of the backward, as in `flash_attn_func`.

    code: compile the kernel anew, and keep its PTX and machine code (`.ptx`, `.sass`). Machine code
    is empty if no disassembler is found: `cuobjdump` or `nvdisasm` on PATH, in triton, or in
    NVIDIA's packages for pip.

    The kernel is compiled if it is not yet, and a line on stderr says so. It is compiled for the
    device of q, or for an H200 if q is on the CPU. A target ("sm_90a", "sm_100a" or "sm_103a")
    overrides this; no such GPU needs to be there.

    Raises:
        TypeError, ValueError, NotImplementedError: as the call would. ValueError also if there is
            no kernel for the target, or if an argument is given by both of its names.

    Example:
        >>> import torch
        >>> from flash_mask_cute import explain
        >>> q, k, v = torch.randn(3, 1, 512, 2, 64, dtype=torch.bfloat16)
        >>> print(explain(q, k, v, causal=True, target="sm_90a"))  # doctest: +SKIP
    """
    given, keywords = keywords, _in_host_names(keywords)
    if given.get("cache_seqlens") is not None:
        keywords["seqused_k"] = _keys_in_cache(q, k, v, keywords)
    if unknown := keywords.keys() - set(_FWD_KEYWORDS):
        refuse_keywords("explain", {name: keywords.pop(name) for name in sorted(unknown)})
    call = AttentionCall.from_arguments(Direction.FORWARD, q, k, v, **keywords)
    masks, device = (call.masks or NO_MASKS).with_own_mod(), getattr(q, "device", None)
    mods = resolve_mods(masks.score_mod, masks.mask_mod, masks.aux_tensors, device)
    check_bool("deterministic", deterministic)
    check_bool("code", code)
    call = replaced(call, backward=BackwardOptions(deterministic=deterministic))
    if torch.is_grad_enabled() and any(
        getattr(x, "requires_grad", False) for x in (q, k, v, call.tensors.learnable_sink)
    ):
        call = replaced(call, options=call.options.recorded())
    is_torch = mods.mask_mod is not masks.mask_mod
    formed = with_form_of_mod(call, masks) if is_torch else call
    if formed is not call:
        left = formed.masks or NO_MASKS
        of_score = resolve_mods(left.score_mod, None, None, device)
        formed = replaced(formed, masks=masks_of(*replaced(left, **of_score._asdict())))
    else:
        formed = replaced(call, masks=masks_of(*replaced(masks, **mods._asdict())))
    explained = explain_fwd(formed, None if target is None else Target.named(target), code)
    if not is_torch:
        return explained
    note, form = "mask_mod is torch's, and ", form_of(masks.mask_mod)
    if (formed.masks or NO_MASKS).mask_mod is None:
        note += f"runs as {form}"
    elif form == "a mask_mod":
        note += "flex_attention would run it as a mask_mod"
    else:
        note += (
            f"flex_attention would run it as {form} if its block mask is kept (keep_block_mask); "
            "builders.from_mask_mod makes this mask"
        )
    return replace(explained, note=f"{explained.note}; {note}" if explained.note else note)


def with_form_of_mod(call: AttentionCall, masks: Masks) -> AttentionCall:
    """The call with a window or column intervals in place of a mask_mod written in torch.

    Only for dense calls that count rows from the first one, and for a mod that reads no tensors,
    because their contents may change unseen. Otherwise the call itself. masks: those of the call,
    maybe with the mod of a block mask.

    Raises:
        NotImplementedError, TypeError: as `lower_mod`.
    """
    mask_mod = masks.mask_mod
    if mask_mod is None or stays_mod.get(id(mask_mod)) is not None:
        return call
    x, options = call.tensors, call.options
    if (
        masks.block_sparse_tensors_torch is not None
        or masks.aux_tensors
        or call.has_lengths
        or x.lengths.q_starts is not None
        or x.optional.causal_per_seq is not None
        or options.q_start is not NO_START
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return call
    given = options.window_size_left, options.window_size_right
    are_tensors = isinstance(x.q, Tensor) and isinstance(x.k, Tensor)
    are_sides = all(side is None or (type(side) is int and side != -1) for side in given)
    if not are_tensors or x.q.dim() != 4 or x.k.dim() != 4 or not are_sides:
        # refused by name later
        return call
    seqlens = x.q.shape[1], x.k.shape[1]
    form = form_without_contents(mask_mod, seqlens, x.q.shape[0], x.q.device)
    if form is None or (form.mask is not None and masks.startend_row_indices is not None):
        return call
    columns = masks.startend_row_indices
    if form.window is not None:
        left, right = (
            min((x for x in both if x is not None), default=None)
            for both in zip(given, form.window, strict=True)
        )
        options = replaced(options, window_size_left=left, window_size_right=right)
        if right == 0 and isinstance(options.causal, bool):
            # by another name, by which tiles are selected
            options = replaced(options, causal=True, window_size_right=None)
    else:
        columns = form.mask
    return replaced(
        call, masks=masks_of(masks.score_mod, None, None, None, columns), options=options
    )


_, _, _, *_FWD_KEYWORDS = keywords_of(Direction.FORWARD)
_OF_FUNCTIONAL = {
    "window_size": ("window_size_left", "window_size_right"),
    "block_sparse_tensors": ("block_sparse_tensors_torch",),
    "cache_seqlens": ("seqused_k",),
}
know_keywords(
    "explain", ("q", "k", "v", "target", "deterministic", *_FWD_KEYWORDS, *_OF_FUNCTIONAL)
)


def _keys_in_cache(q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]) -> Tensor | None:
    """seqused_k of keywords that had cache_seqlens in its place, as a tensor (batch,).

    Raises:
        TypeError, ValueError: the cache or its lengths are wrong, or there is padding, which
            cache_seqlens counts and seqused_k does not.
    """
    page_table, leftpad = keywords.get("page_table"), keywords.get("leftpad_k")
    if leftpad is not None:
        raise ValueError(f"leftpad_k goes with seqused_k, not cache_seqlens, got {brief(leftpad)}")
    batch = batch_of(q, keywords.get("cu_seqlens_q"))
    cache = Cache(k, v, None, None, keywords.get("kv_batch_idx"), page_table, batch, q.device)
    check_cache(cache, None)
    cache = replaced(cache, seqlens=seqlens_of(keywords["seqused_k"], cache))
    check_contents(cache)
    return cache.seqlens


def _in_host_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of the public functions, translated to the names of the host calls.

    Raises:
        ValueError: both names of one argument are given.
    """
    found = dict(keywords)
    for name in _OF_FUNCTIONAL.keys() & keywords.keys():
        ours = _OF_FUNCTIONAL[name]
        for other in ours:
            if other in keywords:
                raise ValueError(
                    f"{name} and {other} are both given, and mean the same: got "
                    f"{brief(keywords[name])} and {brief(keywords[other])}"
                )
        value = found.pop(name)
        found |= zip(ours, window_sides(value) if name == "window_size" else [value], strict=True)
    return found


def _keep(
    kept: dict[Any, Any], key: Any, prepared: PreparedFwd | PreparedBwd, call: AttentionCall
) -> None:
    if key is None or not may_be_kept(prepared):
        return
    is_given = writes_tensors_of_caller(call.tensors, call.direction)
    kept[key] = WithGivenOutputs(prepared, call.direction) if is_given else prepared
