"""A `core_attention` of Megatron-LM (docs/integrations_more.md)."""

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)  # fmt: skip
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class MaskCuteAttention(MegatronModule):
    """Queries, keys and values (rows, batch, heads, d), or packed (rows, heads, d)."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, cp_comm_type=None, pg_collection=None,
    ):  # fmt: skip
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(f"attention_dropout must be 0, got {dropout}")
        if config.context_parallel_size > 1:
            raise NotImplementedError(
                f"context_parallel_size must be 1, got {config.context_parallel_size}"
            )
        if config.softmax_type not in ("vanilla", "learnable"):
            raise NotImplementedError(f"softmax_type {config.softmax_type} is not supported")
        self.attn_mask_type = attn_mask_type
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)
        skips = config.window_attn_skip_freq
        has_window = is_layer_window_attention(config.window_size, skips, layer_number)
        self.window_size = config.window_size if has_window else (None, None)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            # each rank has the sinks of its heads, and counts them in norms
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.tp_group = None if pg_collection is None else pg_collection.tp

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The sinks of all ranks make one tensor of a checkpoint, of all heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group_if_none(self.tp_group),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
        packed_seq_params=None,
    ):  # fmt: skip
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_bias is not None or kind not in (*CAUSAL, AttnMaskType.no_mask):
            raise NotImplementedError(f"a bias, or attn_mask_type {kind}, is not supported")
        options = {
            "softmax_scale": self.scale,
            "causal": kind in CAUSAL,
            "window_size": self.window_size,
            "learnable_sink": self.softmax_offset,
        }
        x = packed_seq_params
        if x is None:
            operands = (y.transpose(0, 1) for y in (query, key, value))
            return flash_attn_func(*operands, **options).transpose(0, 1).flatten(2)
        lengths = x.cu_seqlens_q, x.cu_seqlens_kv, x.max_seqlen_q, x.max_seqlen_kv
        return flash_attn_varlen_func(query, key, value, *lengths, **options).flatten(1)
