"""The attention half: a layer's attention by the functions of this package."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from flash_mask_cute.functional import flash_attn_func, flash_attn_varlen_func
from flash_mask_cute.integrations.transformers.masks import AttentionMask, document_ids
from flash_mask_cute.integrations.transformers.positions import watch_positions
from flash_mask_cute.interface import widest_head
from flash_mask_cute.limits import MAX_HEAD_DIM, MAX_WIDE_HEAD_DIM
from flash_mask_cute.masks.selected_blocks import SelectedBlocks
from flash_mask_cute.parallel.attention import context_parallel_attention
from flash_mask_cute.parallel.sharding import current_sharding
from flash_mask_cute.runtime.warn_once import warn_once

# Arguments that some models give to attention, and that say more about it than is computed here.
REFUSED = {
    "indices": "the keys that an indexer selected for each query",
    "sinks": "a sink for each query",
    "head_mask": "a factor for each head",
}
_linears: WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Linear] | None]
_linears = WeakKeyDictionary()
_collector: Any = getattr(output_capturing, "_active_collector", None)
_SHARDED_LAYERS = "full_attention", "sliding_attention"
Shape = tuple[int, int, int, int]


class Packed(NamedTuple):
    """Documents of a packed row. cu_seqlens_*: (documents + 1,)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def same_document(self, num_rows: int, num_keys: int) -> Tensor:
        """Bool (1, 1, queries, keys)."""
        of_rows = document_ids(self.cu_seqlens_q, num_rows)
        of_keys = document_ids(self.cu_seqlens_k, num_keys)
        return (of_rows[:, None] == of_keys)[None, None]


def layer_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    wide_layers: str = "refuse",
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention half, with the arguments of `AttentionInterface`.

    query: (batch, heads_q, queries, head_dim). key, value: (batch, heads_kv, keys, head_dim) and
    (..., head_dim_v). attention_mask: of the mask half; or a tensor (batch or 1, heads or 1,
    queries or 1, keys or more), in which False hides a score and a number is added to it, with
    gradients; or None. A mask says all: only without one do is_causal and sliding_window count.
    cu_seq_lens_*: documents of one packed row, which do not see each other, besides the mask.
    softcap, s_aux (a sink of each head), position_bias (added to scores after the soft cap, with
    gradients): as in transformers. block_indices (batch, heads, queries, k): the blocks of
    `module.indexer.block_size` keys that an indexer selected for each query, -1: none; the mask
    only hides more. wide_layers: as in `register`.

    Returns:
        (batch, queries, heads_q, head_dim_v), and None for the weights.

    Raises:
        NotImplementedError: what would be computed wrongly: output_attentions, dropout in training,
            the arguments of `REFUSED`; a `wide_layer`, or, with wide_layers="sdpa", what sdpa does
            not compute in one.
        TypeError, ValueError: shapes or dtypes do not fit; the message names the argument.
    """
    _refuse(module, dropout, others)
    wide = wide_layer(module, query, value)
    if wide is not None and wide_layers != "sdpa":
        raise NotImplementedError(
            f"{wide}, and kernels support up to {MAX_HEAD_DIM}, on Hopper {MAX_WIDE_HEAD_DIM}: "
            "register(wide_layers='sdpa') computes such layers by sdpa, and "
            "attn_implementation='sdpa' computes all layers by it"
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    dtype = _dtype_of(module, query, key, value)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    shape = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    bias = None if position_bias is None else _fitted(position_bias, "position_bias", shape)
    packed = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        documents = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        packed = _documents_of(*documents, shape)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    shared = {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}
    sharding = current_sharding()
    if wide is not None:
        given: dict[str, Any] = {"s_aux": s_aux, "softcap": softcap, "position_bias": bias}
        given |= {"block_indices": block_indices, "parallel.sharded": sharding}
        if attention_mask is None and shape[3] > (sliding_window or shape[3]):
            given["sliding_window without a mask"] = sliding_window
        if packed is not None and isinstance(attention_mask, AttentionMask):
            attention_mask, packed = attention_mask.packed(packed.cu_seqlens_k), None
        given["cu_seq_lens_q without a mask"] = packed
        _warn_or_refuse(wide, [name for name, value in given.items() if value is not None])
        mask, causal = _for_sdpa(attention_mask, causal, q.dtype, shape)
        # it takes (batch, heads, rows, head_dim)
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa_attention_forward(module, *qkv, mask, scaling=scaling, is_causal=causal)
    if sharding is not None:
        unknown = {"cu_seq_lens_q": cu_seq_lens_q, "position_bias": position_bias}
        unknown["block_indices"] = block_indices
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        _refuse_in_shards(module, unknown | {"attention_mask": mask})
        left = None if sliding_window is None else sliding_window - 1
        return context_parallel_attention(
            q, k, v, **sharding._asdict(), window_size=(left, None), **shared
        ), None
    if attention_mask is None:
        options = _without_mask(causal, sliding_window, shape)
    elif isinstance(attention_mask, AttentionMask):
        attention_mask = _of_extents(attention_mask, shape)
        is_window = attention_mask.found.window is not None
        if is_window and packed is None:
            watch_positions(attention_mask, others.get("position_ids"))
        if packed is not None and (bias is not None or not is_window):
            # a call of packed sequences takes a window, and none of what counts in the whole row
            attention_mask, packed = attention_mask.packed(packed.cu_seqlens_k), None
        options = _of_mask(attention_mask)
    else:
        options = _of_table(_fitted(attention_mask, "attention_mask", shape), shape, packed, bias)
        packed = bias = None
    options |= shared
    if block_indices is not None:
        options["block_sparse_tensors"] = _chosen(module, block_indices, packed is not None)
    if bias is not None:
        if packed is not None:
            options["mask_mod"] = _mods().visible_to_all
            options["aux_tensors"] = [packed.same_document(*shape[2:])]
            packed = None
        options["score_mod"], bias = _adding(bias, shape)
        options["aux_tensors"] = [bias, *options.get("aux_tensors", ())]
    return _attend((q, k, v), packed, options), None


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor], packed: Packed | None, options: dict[str, Any]
) -> Tensor:
    if packed is not None:
        rows = (x[0] for x in qkv)
        cu_seqlens = packed.cu_seqlens_q.int(), packed.cu_seqlens_k.int()
        return flash_attn_varlen_func(*rows, *cu_seqlens, *packed[2:], **options)[None]
    if "seqused_k" in options:
        return flash_attn_varlen_func(*qkv, **options)
    return flash_attn_func(*qkv, **options)


widest = torch.compiler.assume_constant_result(widest_head)


def wide_layer(module: torch.nn.Module, query: Tensor, value: Tensor) -> str | None:
    """A layer that is too wide for the kernels, in words. The CPU path computes every width."""
    width, width_v = query.shape[-1], value.shape[-1]
    if not query.is_cuda or max(width, width_v) <= MAX_HEAD_DIM:
        return None
    if width == width_v <= widest(query.device):
        return None
    return f"{type(module).__name__} has head dimension {max(width, width_v)}"


@torch.compiler.assume_constant_result
def _warn_or_refuse(wide: str, given: list[str]) -> None:
    """Refuse what sdpa would leave out of a wide layer, else warn that it computes one."""
    if given:
        raise NotImplementedError(
            f"{wide} and {', '.join(given)}, which sdpa does not compute: load the model with "
            "attn_implementation='eager'"
        )
    warn_once(
        "wide_layers",
        f"{wide}: transformers.integrations.sdpa_attention.sdpa_attention_forward computes it, as "
        "register(wide_layers='sdpa') says",
    )


def _for_sdpa(
    mask: AttentionMask | Tensor | None, causal: bool, dtype: torch.dtype, shape: Shape
) -> tuple[Tensor | None, bool]:
    """A mask as sdpa takes it: a tensor, or whether it is causal over as many keys as queries."""
    if mask is None:
        return None, bool(_without_mask(causal, None, shape)["causal"])
    if isinstance(mask, Tensor):
        mask = _fitted(mask, "attention_mask", shape)
        return (mask if mask.dtype == torch.bool else mask.to(dtype)), False
    mask = _of_extents(mask, shape)
    window = mask.found.window
    if window == (None, 0) and shape[2] == shape[3]:
        return None, True
    return (None if window == (None, None) else mask.dense()), False


def _are_collected() -> bool:
    """Whether output_attentions=True was given to a model that does not pass the argument on."""
    if _collector is None:
        return False
    # in compiled code it is a global variable
    is_compiling = torch.compiler.is_compiling()
    collected = _collector.global_var if is_compiling else _collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def _refuse(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> None:
    if dropout and module.training:
        raise NotImplementedError(
            f"dropout={dropout} in training: probabilities are never stored here; set the "
            "config's attention dropout to 0 (attention_dropout, attention_probs_dropout_prob, "
            "attn_pdrop or dropout_rate)"
        )
    if others.get("output_attentions") or _are_collected():
        raise NotImplementedError(
            "output_attentions=True: probabilities are never stored here; call "
            "model.set_attn_implementation('eager') first"
        )
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} gives {name}, {meaning}, which is not computed here: "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )


def _chosen(module: torch.nn.Module, block_indices: Tensor, is_packed: bool) -> SelectedBlocks:
    block_size = getattr(getattr(module, "indexer", None), "block_size", None)
    if block_size is None:
        raise NotImplementedError(
            f"{type(module).__name__} gives block_indices and has no indexer.block_size, the keys "
            "of a block: load the model with attn_implementation='sdpa' or 'eager'"
        )
    if is_packed:
        raise NotImplementedError(
            "block_indices beside cu_seq_lens_q is not supported: blocks would count from the "
            "start of each document; give a batch of documents, or a mask"
        )
    return SelectedBlocks(block_indices, block_size)


def _refuse_in_shards(module: torch.nn.Module, given: dict[str, Tensor | None]) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is given inside parallel.sharded, where rows and keys of a rank have "
                "other numbers: say it in the mask of sharded"
            )
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds is not None and index is not None and kinds[index] not in _SHARDED_LAYERS:
        raise NotImplementedError(
            f"layer {index} of {type(module).__name__} is {kinds[index]!r}, which is not supported "
            f"inside parallel.sharded, only {' and '.join(_SHARDED_LAYERS)}"
        )


def _dtype_of(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> torch.dtype | None:
    """The dtype of the model's weights or of autocast, if the tensors may be of another one. Norms
    and rotary embeddings in float32, as PEFT keeps them, make them so."""
    is_mixed = not query.dtype == key.dtype == value.dtype
    if query.dtype != torch.float32 and not is_mixed:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):
        dtype: torch.dtype = config.dtype
        return dtype
    layer = _first_linear(module)
    if layer is not None:
        return layer.weight.dtype
    return value.dtype if is_mixed else None


def _first_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """The first linear layer inside. It is kept, and not its dtype, which `module.to` changes."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and module in _linears:
        kept = _linears[module]
        layer = None if kept is None else kept()
        if kept is None or layer is not None:
            return layer
    layer = next((x for x in module.modules() if isinstance(x, torch.nn.Linear)), None)
    if not is_compiling:
        _linears[module] = None if layer is None else weakref.ref(layer)
    return layer


def _fitted(table: Tensor, name: str, shape: Shape) -> Tensor:
    """A table that broadcasts to (batch, heads, queries, keys), without more keys than that."""
    if table.dim() != 4:
        raise ValueError(
            f"{name} must have shape (batch, heads, queries, keys), got {tuple(table.shape)}"
        )
    if table.shape[3] > shape[3]:
        table = table[..., : shape[3]]
    for size, wanted in zip(table.shape, shape, strict=True):
        if size != wanted and size != 1:
            raise ValueError(
                f"{name} must broadcast to (batch, heads, queries, keys) = {shape}, got shape "
                f"{tuple(table.shape)}"
            )
    if not table.is_floating_point() and (name == "position_bias" or table.dtype != torch.bool):
        kinds = "a floating-point dtype" + ("" if name == "position_bias" else " or bool")
        raise TypeError(f"{name} must have {kinds}, got {table.dtype}")
    return table


def _documents_of(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    most_q: int | Tensor | None,
    most_k: int | Tensor | None,
    shape: Shape,
) -> Packed:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is None, and the other is given: pass both")
    if shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q says where documents of one packed row begin, got a batch of "
            f"{shape[0]}: pass all tokens as one row, (1, tokens), or a mask or position_ids "
            "instead of cu_seq_lens_q and cu_seq_lens_k"
        )
    most = (None if x is None else int(x) for x in (most_q, most_k))
    return Packed(cu_seqlens_q, cu_seqlens_k, *most)


def _without_mask(causal: bool, sliding_window: int | None, shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": causal}
    if sliding_window is not None:
        options["window_size"] = sliding_window - 1, None if causal else sliding_window - 1
    num_rows, num_keys = shape[2:]
    if 1 < num_rows != num_keys and (causal or sliding_window is not None):
        raise ValueError(
            f"attention_mask is None, {num_rows} queries and {num_keys} keys are given, and "
            f"is_causal={causal}, sliding_window={sliding_window} do not say which keys the "
            "first query sees: pass a mask"
        )
    return options


def _of_extents(mask: AttentionMask, shape: Shape) -> AttentionMask:
    batch, _, *lengths = mask.shape
    if lengths[1] < shape[3] and mask.behind is not None:
        mask = mask.behind(shape[3])
        batch, _, *lengths = mask.shape
    if (batch, *lengths) != (shape[0], *shape[2:]):
        raise ValueError(
            f"attention_mask was made for batch {batch}, {lengths[0]} queries and {lengths[1]} "
            f"keys, and {type(mask).__name__} has no other extents; the layer has batch "
            f"{shape[0]}, {shape[2]} queries and {shape[3]} keys"
        )
    return mask


def _of_mask(mask: AttentionMask) -> dict[str, Any]:
    found = mask.found
    if found.window is not None:
        left, right = found.window
        # tiles are selected by this name of a side of 0
        causal = right == 0
        return {"causal": causal, "window_size": (left, None if causal else right)}
    if found.columns is not None:
        return {"startend_row_indices": found.columns, "window_size": (found.left, None)}
    if found.row is not None:
        options: dict[str, Any] = {"mask_mod": _mods().visible_to_all, "aux_tensors": [found.row]}
        if found.used is not None:
            options["seqused_k"] = found.used
        return options
    return {"mask_mod": found.mask_mod}


def _mods() -> Any:
    # loads the compiler
    from flash_mask_cute.integrations.transformers import table_mods

    return table_mods


def _adding(bias: Tensor, shape: Shape) -> tuple[Any, Tensor]:
    """A mod, and the table that it adds."""
    mods = _mods()
    mod = mods.added_alike if bias.shape[0] == 1 else mods.added
    return mod, bias.expand(-1, *shape[1:])


def _of_table(
    table: Tensor, shape: Shape, packed: Packed | None, bias: Tensor | None
) -> dict[str, Any]:
    """A dense mask joined with documents and a bias."""
    shown = None if packed is None else packed.same_document(*shape[2:])
    if table.dtype == torch.bool:
        shown = table if shown is None else table & shown
    else:
        bias = table if bias is None else table + bias
    options: dict[str, Any] = {}
    aux_tensors = []
    if bias is not None:
        options["score_mod"], bias = _adding(bias, shape)
        aux_tensors.append(bias)
    if shown is not None:
        by_head = shown.shape[1] > 1
        options["mask_mod"] = _mods().visible if by_head else _mods().visible_to_all
        aux_tensors.append(shown.expand(shape[0], -1, *shape[2:]))
    return options | {"aux_tensors": aux_tensors}
