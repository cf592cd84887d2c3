"""Unknown keywords of a public call: those of other libraries, and misspelt ones.

Code that was written for another library often passes its defaults by keyword, such as
`dropout_p=0.0`. Values that ask for nothing are accepted.

A public call ends in `**unknown` and asks `if unknown:`, which costs some 20 ns. A wrapper that
catches the TypeError of binding costs ten times that, and also catches those raised inside.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flash_mask_cute.runtime.checks import brief

_Call = TypeVar("_Call", bound=Callable[..., Any])

_parameters: dict[str, tuple[str, ...]] = {}
"""What each public call takes, by its name."""

_SIDES = "window_size", "window_size_left", "window_size_right"
_LISTS = "block_sparse_tensors", "block_sparse_tensors_torch"
# Our names, and those that say the same elsewhere, or in another call of ours.
_SAME: dict[tuple[str, ...], tuple[str, ...]] = {
    ("softmax_scale",): ("scale", "sm_scale", "attn_scale", "qk_scale", "scaling"),
    ("softcap",): ("soft_cap", "logit_cap", "logits_soft_cap", "attn_logit_softcapping"),
    ("learnable_sink",): ("sink", "sinks", "s_aux", "attention_sink", "softmax_offset"),
    _SIDES: (*_SIDES, "window_left", "window_right", "local_window_size"),
    _LISTS: _LISTS,
    ("return_lse",): ("return_softmax_lse", "return_aux"),
    ("startend_row_indices",): ("attn_mask_startend_row_indices",),
    ("config",): ("kernel_options",),
    ("page_table",): ("block_table", "block_tables"),
    ("cu_seqlens_q",): ("cu_seq_lens_q", "cu_seqlens", "qo_indptr"),
    ("cu_seqlens_k",): ("cu_seq_lens_k", "cu_seqlens_kv", "kv_indptr"),
    ("max_seqlen_q",): ("max_length_q", "max_seqlen"),
    ("max_seqlen_k",): ("max_length_k", "max_seqlen_kv"),
    ("seqused_q",): ("seqlens_q", "seq_len_q"),
    ("seqused_k", "cache_seqlens"): (
        "seqused_k", "cache_seqlens", "seqused_kv", "seqlens_k", "seq_len_kv",
    ),
    ("cache_leftpad",): ("leftpad_k",),
    ("seqlen_q",): ("Q_LEN", "q_len"),
    ("seqlen_k",): ("KV_LEN", "kv_len", "seqlen_kv"),
    ("BLOCK_SIZE",): ("block_size",),
}  # fmt: skip

ALIBI = """\
@cute.jit
def alibi(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return score - aux_tensors[0][h_idx[0]] * abs(q_idx - kv_idx)
"""
# What to do where no name of ours says the same.
_ADVICE: dict[tuple[str, ...], str] = {
    (
        "dropout_p", "dropout", "p", "dropout_rate", "attention_dropout", "fixed_seed_offset",
        "return_seed_offset", "rng_name", "rng_state",
    ): "dropout is not supported, leave it out",
    ("is_causal", "causal_mask", "use_causal_mask"): (
        "say causal, which aligns the last query with the last key; is_causal of "
        "scaled_dot_product_attention aligns the first with the first"
    ),
    ("attn_mask", "mask", "attention_mask", "attn_bias", "bias", "key_padding_mask"): (
        "a bool mask becomes startend_row_indices=builders.from_dense(mask), a rule of positions a "
        "mask_mod, a tensor to add a score_mod that returns "
        "score + aux_tensors[0][b_idx[0], h_idx[0], q_idx[0], kv_idx[0]]; padding is told by "
        "seqused_k, or by cu_seqlens_q and cu_seqlens_k"
    ),
    ("alibi_slopes", "alibi"): (
        f"say score_mod=alibi, aux_tensors=[slopes], with float32 slopes (heads_q,) and\n{ALIBI}"
    ),
    ("full_block_cnt", "full_block_idx", "mask_block_cnt", "mask_block_idx"): (
        f"say {_LISTS[0]}=BlockSparseTensorsTorch(mask_block_cnt, mask_block_idx, full_block_cnt, "
        f"full_block_idx, block_size) (in _flash_attn_fwd and _flash_attn_bwd {_LISTS[1]})"
    ),
    ("qv", "head_mask", "min_seqlen_k", "gather_kv_indices"): "it is not supported, leave it out",
    ("block_mask",): (
        f"say {_LISTS[0]}=block_mask (in _flash_attn_fwd and _flash_attn_bwd {_LISTS[1]}, and "
        "beside it the same mask as a CuTe callable, mask_mod)"
    ),
    ("enable_gqa",): "leave it out, k and v may have fewer heads than q",
    ("return_attn_probs", "return_softmax", "need_weights", "output_attentions"): (
        "probabilities are never in memory; (out, lse) is returned with return_lse=True"
    ),
    ("sliding_window",): (
        "a token that sees itself and n - 1 before it is causal=True with n - 1 as the left side "
        "of the window (window_size, or window_size_left)"
    ),
    ("position_ids",): (
        "for packed documents say startend_row_indices=builders.from_position_ids(position_ids)"
    ),
    ("attention_chunk",): "say startend_row_indices=builders.causal_document(lengths)",
    ("layout", "tensor_layout", "qkv_format"): (
        "leave it out, tensors are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) "
        "with cu_seqlens_q and cu_seqlens_k"
    ),
    (
        "training", "is_training", "name", "backend", "op", "_compile", "separate_full_blocks",
        "sm_margin", "scheduler_metadata", "zero_tensors",
    ): "leave it out, there is nothing that it would change",
    ("q_descale",): "q in fp8 is not supported, leave it out and pass q in bfloat16 or float16",
    ("k_descale", "v_descale"): (
        "it is for keys and values in fp8, of flash_attn_with_kvcache and flash_attn_varlen_func"
    ),
    ("k_cache", "v_cache", "cache_batch_idx", "leftpad_k", "cache_leftpad"): (
        "call flash_attn_with_kvcache, which takes a cache, and new keys to be written into it"
    ),
    ("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"): (
        "rotate q and k before the call, or call flash_attn_with_kvcache with new keys"
    ),
}  # fmt: skip

# Values that ask for nothing, beside None, which every name in this module may have.
_NEUTRAL: dict[tuple[str, ...], tuple[object, ...]] = {
    ("dropout_p", "dropout", "p", "dropout_rate", "attention_dropout"): (0, 0.0),
    (
        "is_causal", "use_causal_mask", "enable_gqa", "return_attn_probs", "return_softmax",
        "need_weights", "output_attentions", "return_seed_offset", "return_lse",
        "return_softmax_lse", "return_aux", "zero_tensors", "_compile",
    ): (False,),
    ("training", "is_training"): (False, True),
    ("separate_full_blocks",): (True,),
    ("attention_chunk", "sm_margin"): (0,),
    ("rng_name",): ("",),
}  # fmt: skip
# None of these leaves it to a module of Transformers whether attention is causal.
_NONE_DECIDES = "is_causal", "use_causal_mask"

_OURS = {name: ours for ours, names in _SAME.items() for name in names}
_WHAT_TO_DO = {name: advice for names, advice in _ADVICE.items() for name in names}
_ASKS_NOTHING = {name: values for names, values in _NEUTRAL.items() for name in names}


def public_call(call: _Call) -> _Call:
    """Decorator of a function that ends in `**unknown`; it returns the function. `refuse_keywords`
    then knows its keywords, and its visible signature lacks `**unknown`."""
    signature = inspect.signature(call)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    know_keywords(call.__name__, [x.name for x in named])
    call.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return call


def know_keywords(call: str, names: Iterable[str]) -> None:
    """Register the keywords of a public call, if its signature does not show them."""
    _parameters[call] = tuple(names)


def refuse_keywords(call: str, unknown: Mapping[str, object]) -> None:
    """Refuse all keywords but those of other libraries, or of other calls, that ask for nothing.
    Raises TypeError naming each keyword, its value, and what to write instead."""
    refused = [name for name, value in unknown.items() if not _is_neutral(name, value)]
    if refused:
        found = (f"{name} (got {brief(unknown[name])}): {_instead(call, name)}" for name in refused)
        raise TypeError(f"{call}() has no argument " + "; nor ".join(found))


def _is_neutral(name: str, value: object) -> bool:
    if value is None:
        if name in _NONE_DECIDES:
            return False
        if name in _OURS or name in _WHAT_TO_DO:
            return True
        return any(name in theirs for theirs in _parameters.values())
    return any(
        type(value) is type(neutral) and value == neutral for neutral in _ASKS_NOTHING.get(name, ())
    )


def _instead(call: str, name: str) -> str:
    taken = _parameters[call]
    ours = [same for same in _OURS.get(name, ()) if same in taken]
    if ours == ["window_size"]:
        return "say window_size=(left, right)"
    if ours:
        return f"say {' and '.join(ours)}"
    if name in _WHAT_TO_DO:
        return _WHAT_TO_DO[name]
    for same in (name, *_OURS.get(name, ())):
        others = [other for other, theirs in _parameters.items() if same in theirs]
        if others:
            public_first = sorted(others, key=lambda other: other.startswith("_"))
            return f"{same} is an argument of {', '.join(public_first)}"
    near = difflib.get_close_matches(name, taken, n=1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(taken)}"
