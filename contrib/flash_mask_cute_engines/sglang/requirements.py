"""Refusals of a backend for SGLang that has never met a running engine."""

from __future__ import annotations

from typing import Any

import torch

from flash_mask_cute.limits import MAX_PAGE_SIZE

_DTYPES = (torch.bfloat16, torch.float16)


def check_runner(runner: Any, topk: int, context_parallel: int, is_sharded: bool) -> None:
    """Refuse a model runner that needs more than there is.

    topk: draft tokens that follow one token, 0 without speculation. context_parallel: ranks that
    share a sequence. is_sharded: pages of a sequence are on several ranks.

    Raises:
        NotImplementedError: naming it, with its value.
    """
    config = runner.model_config
    refused = {
        "MLA": bool(getattr(runner, "use_mla_backend", False)),
        "cross attention (an encoder-decoder model)": config.is_encoder_decoder,
        "chunked local attention": getattr(config, "is_local_attention_model", False),
        "prefill-aware windows": getattr(runner, "prefill_aware_swa", False),
        "--enable-unified-memory": runner.kv_index_translator.is_translating,
        "a cache with pages on several ranks": is_sharded,
        f"context parallelism of {context_parallel} ranks": context_parallel > 1,
        f"a tree of draft tokens (--speculative-eagle-topk {topk})": topk > 1,
        f"a cache of {runner.kv_cache_dtype}": runner.kv_cache_dtype not in _DTYPES,
        f"--page-size {runner.page_size}": not 1 <= runner.page_size <= MAX_PAGE_SIZE,
    }
    found = [name for name, is_needed in refused.items() if is_needed]
    if found:
        raise NotImplementedError(
            f"--attention-backend mask_cute does not support {', '.join(found)}"
        )
