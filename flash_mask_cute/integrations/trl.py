"""Tree attention of TRL's asynchronous GRPO by this package: `register_tree_attention`.

TRL folds roll-outs into a tree, in which shared tokens stand once, in depth-first order. Its own
attention copies the keys of every path from the root. Here one causal vector says who sees whom
(`builders.prefix_tree`), and no key is copied. docs/integrations_more.md has more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_mask_cute.functional import flash_attn_func
from flash_mask_cute.masks.column_mask import ColumnMask

__all__ = ["register_tree_attention", "tree_attention"]

_PACKING = "trl.experimental.async_grpo.packing"
# what layers of some models ask for besides
_REFUSED = (
    *("position_bias", "block_indices", "indices", "sinks", "head_mask", "output_attentions"),
)


class _Tree(NamedTuple):
    """depths: int32 (tokens,), of each token in its path. made_of: the cumulative lengths, by which
    a kept tree is recognized."""

    mask: ColumnMask
    depths: Tensor
    made_of: tuple[Tensor, Tensor]


# by tree_kv_index, which all layers of a step share
_TREES = WeakTensorKeyDictionary()


def register_tree_attention() -> str:
    """Put `tree_attention` in the place of TRL's function of this name, and register it.

    Returns:
        TRL's name of it, for `attn_implementation`. TRL's trainer registers that name again, and
        then finds this function.

    Raises:
        ImportError: trl is not installed, or is a release without tree attention.

    Example:
        >>> name = register_tree_attention()  # doctest: +SKIP
        >>> model.set_attn_implementation(name)  # doctest: +SKIP
    """
    try:
        packing: Any = importlib.import_module(_PACKING)
    except ImportError as error:
        raise ImportError(
            "flash_mask_cute.integrations.trl needs trl with experimental.async_grpo, tested with "
            f"1.16: pip install -U trl ({error})",
            name="trl",
        ) from error
    missing = {"tree_attention", "register_tree_attention", "TREE_ATTENTION"} - set(vars(packing))
    if missing:
        raise ImportError(f"{_PACKING} has no {', '.join(sorted(missing))}: another release of trl")
    packing.tree_attention = tree_attention
    packing.register_tree_attention()
    return str(packing.TREE_ATTENTION)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    tree_max_seqlen_q: int | None = None,
    tree_max_seqlen_k: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a row of trees, with TRL's arguments, and s_aux, a sink of each head.

    query: (1, heads_q, tokens, head_dim); key, value: (1, heads_kv, tokens, ...). Segments of
    tokens are in depth-first order. tree_kv_index: the tokens of the path of each segment, from the
    root through the segment; tree_cu_seqlens_q, tree_cu_seqlens_k (segments + 1,): where segments
    and their paths begin. A token sees the tokens of its path up to its own; with a sliding_window,
    the last so many of them. The largest lengths are not needed.

    Returns:
        (1, tokens, heads_q, head_dim_v), and None for the weights.

    Raises:
        NotImplementedError: dropout in training; an argument of `_REFUSED`.
        ValueError: there is more than one row, or an attention_mask.

    Example:
        >>> out, _ = tree_attention(layer, q, k, v, None, **tree_of_trl)  # doctest: +SKIP
    """
    if dropout and module.training:
        raise NotImplementedError(f"dropout={dropout} in training is not supported: it must be 0")
    for name in _REFUSED:
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(
                f"{type(module).__name__} gives {name}, which tree attention does not compute"
            )
    if query.shape[0] != 1:
        raise ValueError(f"query has {query.shape[0]} rows, and trees are packed into one")
    if attention_mask is not None:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}: trees need none")
    tree = _tree_of(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, query.shape[2])
    q, k, v = (x.transpose(1, 2).to(_dtype_of(query, module)) for x in (query, key, value))
    out = flash_attn_func(
        q,
        k,
        v,
        scaling,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        mask_mod=_within(tree.depths, sliding_window) if sliding_window else None,
        startend_row_indices=tree.mask,
    )
    return out, None


def _within(depths: Tensor, window: int) -> Callable[..., Any]:
    """The mask_mod of a window that counts the tokens of a path alone."""
    return lambda b, h, q_idx, kv_idx: depths[q_idx] - depths[kv_idx] < window


def _dtype_of(query: Tensor, module: torch.nn.Module) -> torch.dtype:
    """float32 activations beside weights in 16 bits are computed in these, as TRL does it."""
    from transformers.integrations.flash_attention import get_target_dtype

    return get_target_dtype(query, module) or query.dtype


def _tree_of(index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int) -> _Tree:
    """Found once for the layers of a step; nothing waits for the device."""
    kept = _TREES.get(index)
    if kept is not None and kept.made_of[0] is cu_seqlens_q and kept.made_of[1] is cu_seqlens_k:
        return kept
    place = torch.arange(len(index), device=index.device)
    segment = torch.searchsorted(cu_seqlens_k[1:].contiguous(), place.int(), right=True)
    # a token is hidden from the rows after the last segment that has it in its path
    ends = cu_seqlens_q[1:][segment]
    tout = ends.new_zeros(tokens).scatter_reduce(0, index, ends, "amax")
    depths = ends.new_zeros(tokens).scatter(0, index, place.int() - cu_seqlens_k[segment])
    mask = ColumnMask(tout.int()[None, None, :, None], True, seqlen_q=tokens, one_sequence=True)
    tree = _TREES[index] = _Tree(mask, depths, (cu_seqlens_q, cu_seqlens_k))
    return tree
