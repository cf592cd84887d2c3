"""`flex_attention` with torch's arguments and results, on the kernels of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flash_mask_cute.autograd.attend import PlannedMasks, attend
from flash_mask_cute.autograd.mods_in_graph import mods_in_graph
from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, ComputedLists
from flash_mask_cute.call.arguments import AttentionCall, Options, Tensors, masks_of
from flash_mask_cute.flex.block_mask import (
    CheckedLists,
    as_block_mask,
    intervals_of,
    is_kept,
    lists_of,
    says_no_more,
)
from flash_mask_cute.lowering.convention import check_torch_mod
from flash_mask_cute.lowering.lower import LoweredMod, lower_mod
from flash_mask_cute.lowering.pair import join_mods, memo_entry, named_as_captured
from flash_mask_cute.lowering.paths import Path
from flash_mask_cute.lowering.watch import Memo
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.mods.aux_tensors import OutsideError
from flash_mask_cute.runtime.checks import brief, check_bool, check_scale, number_of

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Of torch's kernels: sizes of tiles and the like, by which no result changes.
_HINTS = frozenset(
    {
        *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2"),
        *("BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
        *("FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu"),
        "BACKEND",
        "force_flash",
    }
)
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")

if TYPE_CHECKING:
    # part of what checkers know of any Python, so nothing has to be installed
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Arguments of `flex_attention` on which its result's type does not depend."""

        scale: float | None
        enable_gqa: bool
        kernel_options: Mapping[str, Any] | None


# Overloads for type checkers. `others` are scale and what follows, by position.


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | BlockSparseTensorsTorch | None = None, *others: Any,
    return_lse: Literal[False] = False, return_aux: None = None, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | BlockSparseTensorsTorch | None = None, *others: Any,
    return_lse: Literal[True], return_aux: None = None, **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | BlockSparseTensorsTorch | None = None, *others: Any,
    return_lse: bool = False, return_aux: None = None, **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | BlockSparseTensorsTorch | None = None, *others: Any,
    return_lse: Literal[False] = False, return_aux: AuxRequest, **options: Unpack[_Options],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip


def flex_attention(  # type: ignore[misc]  # because of `others`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | BlockSparseTensorsTorch | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Drop-in for `torch.nn.attention.flex_attention.flex_attention`.

    query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev): bf16 or fp16 on CUDA, also fp32
    and fp64 on the CPU, forward and backward. They are not copied. score_mod and the mask_mod of
    block_mask are torch functions. They are traced once and compiled into the kernel. Tensors that
    a score_mod captures get gradients. block_mask may also be what `create_block_mask` of this
    package returned. kernel_options are hints for torch's kernels, and are ignored.

    Each call reads the lists of block_mask and the tensors that the mods captured as they are when
    it runs, on their device. `keep_block_mask(block_mask)` says that they do not change, which is
    faster for most masks.

    Returns:
        out (B, Hq, L, Ev), with its strides in the order of the query's strides. With return_lse,
        (out, lse): lse is fp32 (B, Hq, L), natural log, -inf for queries that see nothing. With
        return_aux, (out, AuxOutput): max_scores is fp32 (B, Hq, L), the largest score of each query
        after scale and score_mod, -inf for queries that see nothing, without gradient.

    Raises:
        ValueError, RuntimeError, NotImplementedError: as torch's function, for head counts that
            differ without enable_gqa, for a block_mask for other lengths, batch or heads, and for a
            sliced block_mask.
        TypeError: a mod does not take torch's arguments.
        IndexError: on the CPU, a mod reads past the end of a tensor.
        NotImplementedError: a mod does what no kernel can (`lower_mod`).

    Example:
        >>> import torch
        >>> from flash_mask_cute import flex_attention
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
        >>> flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * (i - j).abs()).shape
        torch.Size([1, 2, 16, 8])
    """
    if enable_gqa is not True and enable_gqa is not False:
        check_bool("enable_gqa", enable_gqa)
    if isinstance(block_mask, (BlockSparseTensorsTorch, ComputedLists)):
        block_mask = as_block_mask(block_mask)
    elif isinstance(block_mask, SelectedBlocks):
        raise TypeError(
            "block_mask must be a BlockMask, got SelectedBlocks: a selection of each query is the "
            "block_sparse_tensors of flash_attn_func, which takes torch mods beside it"
        )
    if torch.compiler.is_compiling():
        _check(query, key, value, block_mask, enable_gqa)
        _check_results(return_lse, return_aux)
        _check_options(kernel_options)
        return _in_graph(query, key, value, score_mod, block_mask, scale, return_lse, return_aux)
    resolved = place = lists = None
    try:
        place = (
            id(score_mod), id(block_mask), None if block_mask is None else id(block_mask.mask_mod),
            query.shape, key.shape, value.dim(), query.device, key.device, value.device, enable_gqa,
        )  # fmt: skip
        entry = _memo.get(place)
        if entry is not None and entry.holds() and entry.value.has(block_mask):
            resolved, aux_tensors = entry.value, entry.aux_tensors()
    except (AttributeError, RuntimeError, TypeError):
        # no tensors of a known size, which the checks name
        place = None
    if return_aux is not None:
        _check_results(return_lse, return_aux)
    if kernel_options is not None:
        _check_options(kernel_options)
    if resolved is None:
        _check(query, key, value, block_mask, enable_gqa)
        resolved, aux_tensors, lists = _resolve_mods(query, key, score_mod, block_mask, place)
    elif block_mask is not None and not resolved.is_kept:
        lists = lists_of(block_mask)
    if scale is not None and not (type(scale) is float and -1e30 < scale < 1e30):
        scale = number_of("scale", scale)
        check_scale("scale", scale)
    wants_lse, wants_max = return_lse, False
    if return_aux is not None:
        wants_lse, wants_max = return_lse or return_aux.lse, return_aux.max_scores
    if resolved.expands:
        key, value = (x.expand(query.shape[0], -1, -1, -1).contiguous() for x in (key, value))
    tensors = Tensors(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    try:
        out, lse, max_scores = resolved.ready.results(
            tensors, aux_tensors, scale, wants_lse, wants_max, lists
        )
    except OutsideError as error:
        mods = {"score_mod": score_mod, "mask_mod": getattr(block_mask, "mask_mod", None)}
        raise named_as_captured(error, resolved.origins, mods) from error
    out = _in_order_of(query, out.transpose(1, 2))
    if return_aux is not None:
        return out, AuxOutput(lse if wants_lse else None, max_scores)
    return (out, lse) if wants_lse else out


class ResolvedMods:
    """What attention gets for two mods, a block mask and lengths.

    expands: keys and values of one batch entry serve all. origins: of the aux tensors. is_kept:
    `ready` includes the lists of the block mask.
    """

    __slots__ = ("_lists", "expands", "is_kept", "origins", "ready")

    def __init__(
        self,
        ready: PlannedMasks,
        expands: bool,
        origins: tuple[Path, ...],
        lists: CheckedLists | None,
    ) -> None:
        self.ready = ready
        self.expands = expands
        self.origins = origins
        self.is_kept = lists is not None and lists.is_kept
        self._lists = lists

    def has(self, block_mask: BlockMask | None) -> bool:
        return block_mask is None or (self._lists is not None and self._lists.are_in(block_mask))


_memo: Memo[ResolvedMods] = Memo()


def _resolve_mods(
    query: Tensor, key: Tensor, score_mod: Any, block_mask: BlockMask | None, place: Any
) -> tuple[ResolvedMods, list[Tensor] | None, BlockSparseTensorsTorch | None]:
    """Mods and block mask resolved, aux tensors, lists. place: where to keep them, or None."""
    score = mask = lists = window = columns = None
    keeps = block_mask is not None and is_kept(block_mask)
    checked = None if block_mask is None else CheckedLists(block_mask)
    lowered: list[tuple[LoweredMod, bool]] = []
    if score_mod is not None:
        check_torch_mod(score_mod, "score_mod")
        score = lower_mod(score_mod, "score_mod", query.device)
        lowered.append((score, False))
        if score.is_identity:
            # as transformers passes one where there is nothing to do
            score = None
    if block_mask is not None:
        check_torch_mod(block_mask.mask_mod, "mask_mod")
        mask = lower_mod(block_mask.mask_mod, "mask_mod", query.device)
        lowered.append((mask, keeps and mask.columns is not None))
        seqlens = query.shape[2], key.shape[2]
        if keeps and mask.band is not None and says_no_more(block_mask, mask.band, seqlens):
            window = mask.band.as_window(*seqlens)
        if keeps and window is None and mask.columns is not None:
            columns = intervals_of(block_mask, mask.columns, seqlens, query.shape[0])
        if window is None and columns is None:
            lists = lists_of(block_mask)
        else:
            # the mask needs no mod
            mask = None
    mods = join_mods(score, mask)
    left, right = window or (None, None)
    # tiles are selected by this name of a side of 0
    causal = right == 0
    right = None if causal else right
    aux_tensors = mods.aux_tensors
    masks = masks_of(mods.score_mod, mods.mask_mod, aux_tensors, lists, columns)
    origins = (*(score.origins if score else ()), *(mask.origins if mask else ()))
    expands = key.shape[0] != query.shape[0]
    ready = PlannedMasks(masks, causal, (left, right), keeps)
    resolved = ResolvedMods(ready, expands, origins, checked)
    if place is not None:
        entry = memo_entry(resolved, lowered, aux_tensors)
        if entry is not None:
            _memo.keep(place, entry, [x for x in (score_mod, block_mask) if x is not None])
    return resolved, aux_tensors, lists


def _in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    return_lse: bool,
    return_aux: AuxRequest | None,
) -> Any:
    """The call as torch.compile and torch.export trace it: lists are always walked."""
    mask_mod = lists = None
    if block_mask is not None:
        mask_mod, lists = block_mask.mask_mod, lists_of(block_mask)
    mods = mods_in_graph(score_mod, mask_mod, None, query.device.type, True)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1).contiguous() for x in (key, value))
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    call = AttentionCall(
        Tensors(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
        masks_of(mods.score_mod, mods.mask_mod, mods.aux_tensors, lists, None),
        # softcap as a constant: with dynamic=True Dynamo makes inputs of defaults that are floats
        Options(scale, softcap=0.0, return_lse=wants_lse),
    )
    found = attend(call, wants_max)
    out = _in_order_of(query, found.out.transpose(1, 2))
    if return_aux is not None:
        return out, AuxOutput(found.lse if wants_lse else None, found.max_scores)
    return (out, found.lse) if wants_lse else out


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """out, copied unless its dimensions lie in memory in the order of the query's."""
    strides_found = query.stride()
    if out.stride() == strides_found and strides_found[-1] == 1:
        # a new tensor has no gaps, so its strides show the order
        return out
    order = [0, 1, 2]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        # in a graph strides are symbols, which Dynamo does not sort
        if strides_found[order[i]] > strides_found[order[j]]:
            order[i], order[j] = order[j], order[i]
    strides, step = [0, 0, 0, 1], out.shape[-1]
    for i in order:
        strides[i] = step
        step *= out.shape[i]
    if all(n == 1 or a == b for n, a, b in zip(out.shape, out.stride(), strides, strict=True)):
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


# -- what torch refuses, with its types of errors -----------------------------------------------


def _check(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise NotImplementedError(f"{name} is a nested tensor: not supported; pad it, or use "
                                      "flash_attn_varlen_func")  # fmt: skip
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on {query.device}, as query is, got {tensor.device}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have 4 dimensions, got {tensor.dim()}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "query and key must have the same embedding dimension, got "
            f"{query.shape[-1]} and {key.shape[-1]}"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise NotImplementedError(
                f"{name} must have 4 dimensions (batch, heads, length, head dim), got shape "
                f"{tuple(tensor.shape)}"
            )
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if not enable_gqa and heads_q != heads_kv:
        raise ValueError(
            f"query and key must have the same number of heads, got {heads_q} and {heads_kv}: "
            "pass enable_gqa=True for grouped-query attention"
        )
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"with enable_gqa, query must have a multiple of the heads of key, got {heads_q} and "
            f"{heads_kv}"
        )
    batch, batch_kv = query.shape[0], key.shape[0]
    if batch != batch_kv and (
        block_mask is None or block_mask.kv_num_blocks.shape[0] != batch or batch_kv != 1
    ):
        raise ValueError(
            f"query and key must have the same batch, got {batch} and {batch_kv}; key may have "
            "batch 1 with a block_mask that has the batch of query"
        )
    if block_mask is not None:
        _check_block_mask(query, key, block_mask)


def _check_block_mask(query: Tensor, key: Tensor, block_mask: BlockMask) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask must be a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type(block_mask).__name__}"
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError(
            "block_mask is a slice of another, and slices have no mask_mod: set "
            "block_mask.mask_mod to that of the other, shifted by what was cut off"
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise RuntimeError(
            f"block_mask must be on {query.device}, as query is, got "
            f"{block_mask.kv_num_blocks.device}"
        )
    lengths = query.shape[2], key.shape[2]
    is_for_all = min(block_mask.BLOCK_SIZE) >= 1 << 30
    if not is_for_all and tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask was made for {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, got {lengths[0]} and {lengths[1]}: make one for "
            "these lengths"
        )
    shape = tuple(block_mask.kv_num_blocks.shape)
    if len(shape) != 3:
        raise ValueError(f"block_mask must have lists of (batch, heads, blocks), got shape {shape}")
    for name, got, wanted in (
        ("batch", shape[0], query.shape[0]),
        ("heads", shape[1], query.shape[1]),
    ):
        if got not in (1, wanted):
            raise ValueError(f"block_mask must have {name} 1 or {wanted}, as query has, got {got}")


def _check_results(return_lse: bool, return_aux: AuxRequest | None) -> None:
    if return_aux is None:
        return
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest, got {brief(return_aux)}")
    if return_lse:
        raise ValueError("return_lse and return_aux may not both be given: use return_aux")


def _check_options(options: Mapping[str, Any] | None) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"kernel_options must be a mapping, got {brief(options)}")
    for name, value in (options or {}).items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain not in _HINTS:
            raise ValueError(
                f"kernel_options has {name!r}, which this flex_attention does not know; the hints "
                "of torch's FlexKernelOptions are taken and ignored"
            )
        if plain == "BACKEND" and value not in _BACKENDS:
            raise ValueError(f"kernel_options['BACKEND'] must be one of {_BACKENDS}, got {value!r}")
    if options and "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise RuntimeError(
            "kernel_options has BACKEND and FORCE_USE_FLEX_ATTENTION: torch takes only one of them"
        )
