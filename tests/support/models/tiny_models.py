"""Small random models of transformers in float32, in pairs with equal weights: eager, and ours."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from flash_mask_cute.integrations.transformers import register

NAME = register()
IS_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", HYBRID | {"attn_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3TextConfig", HYBRID),
    "gpt_oss": ("GptOssConfig", HYBRID | EXPERTS),
    "llama4": ("Llama4TextConfig", EXPERTS | {
        "attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 64, "no_rope_layers": [1, 0],
    }),
    "gemma4": ("Gemma4TextConfig", HYBRID | {
        "global_head_dim": 32, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 0,
    }),
    "deepseek_v3": ("DeepseekV3Config", {
        "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    }),
}  # fmt: skip
# In older releases `create_masks_for_generate` raises a TypeError for chunks.
WITH_MASKS_BEFORE = [name for name in DECODERS if not (IS_OLD and name == "llama4")]
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = SMALL | {"vocab_size": 97, "pad_token_id": 0}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8}
OTHERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "bert": (AutoModel, "BertConfig", TEXT),
    "modernbert": (AutoModel, "ModernBertConfig", TEXT | {
        "local_attention": 6, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }),
    "vit": (AutoModel, "ViTConfig", IMAGE),
    "siglip": (AutoModel, "SiglipVisionConfig", IMAGE),
    "t5": (AutoModelForSeq2SeqLM, "T5Config", {
        "vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }),
}  # fmt: skip


class Pair(NamedTuple):
    eager: Any
    ours: Any


def config_of(name: str, **changes: Any) -> Any:
    kind, more = DECODERS[name]
    return getattr(transformers, kind)(**(SIZES | more | changes))


def pair_of(config: Any, kind: Any = AutoModelForCausalLM) -> Pair:
    """A config is copied for each model, which writes its attn_implementation into it."""
    made = Pair(*(
        kind.from_config(copy.deepcopy(config), attn_implementation=x, dtype=torch.float32).eval()
        for x in ("eager", NAME)
    ))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for name, weight in made.eager.named_parameters():
        if "norm" not in name.lower():
            std = 0.2 if weight.dim() > 1 else 0.5
            torch.nn.init.normal_(weight, std=std, generator=generator)
    made.ours.load_state_dict(made.eager.state_dict())
    return made


@functools.cache
def decoder(name: str) -> Pair:
    return pair_of(config_of(name))


@functools.cache
def other(name: str) -> Pair:
    kind, config, sizes = OTHERS[name]
    return pair_of(getattr(transformers, config)(**sizes), kind)


# Two rows of 17 tokens, with padding on either side of the second; documents of the first.
SEQ = 17
IDS = torch.randint(3, 97, (2, SEQ), generator=torch.Generator().manual_seed(0))
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[1, :6], RIGHT[1, -6:] = 0, 0
PARTS = (7, 4, 6)
PACKED = torch.cat([torch.arange(n) for n in PARTS])[None]
CU = torch.tensor([0, 7, 11, 17], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 7, "max_length_k": 7}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def output_of(model: Any, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        results = model(**call)
    found = results.logits if hasattr(results, "logits") else results.last_hidden_state
    assert isinstance(found, Tensor)
    return found


def error_of(
    pair: Pair, call: dict[str, Any], rows: Tensor | None = None, eager: Any = None
) -> float:
    """rows: which are compared, (batch, queries). eager: another call for the eager model."""
    found, wanted = output_of(pair.ours, call), output_of(pair.eager, eager or call)
    assert found.isfinite().all()
    if rows is not None:
        found, wanted = found[rows.bool()], wanted[rows.bool()]
    return relative(found, wanted)
