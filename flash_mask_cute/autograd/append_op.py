"""Cache writes as an operator that declares its mutations, for tracing."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_mask_cute.call.check.kvcache import batch_of, check_cache, check_contents
from flash_mask_cute.call.run.append import Append, append, check_append
from flash_mask_cute.runtime.plain_tensors import own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
_library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, "
    "Tensor cache_seqlens, Tensor? leftpad, Tensor? batch_idx, Tensor? page_table, "
    "Tensor? cu_seqlens_k_new, Tensor? cu_seqlens_q, Tensor? cos, Tensor? sin, "
    "Tensor? rotary_seqlens, bool interleaved, bool advances) -> (Tensor q, Tensor total)"
)


@torch.library.impl(_library, "append_kv", "CompositeExplicitAutograd")
def _append_kv(*arguments: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    """The result q has no elements if nothing is rotated: an operator must not return its
    arguments."""
    given = Append(*(own_memory(x) if isinstance(x, Tensor) else x for x in arguments))  # type: ignore[arg-type]
    # here alone in a compiled graph, and for tensor subclasses
    cache = given.cache(batch_of(given.q, given.cu_seqlens_q))
    check_cache(cache, None)
    check_contents(cache)
    check_append(given)
    q, total = append(given)
    return given.q.new_empty(0) if given.cos is None else q, total


@torch.library.register_fake("flash_mask_cute::append_kv", lib=_library)
def _(*arguments: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    given = Append(*arguments)  # type: ignore[arg-type]
    shape = (0,) if given.cos is None else given.q.shape
    return given.q.new_empty(shape), torch.empty_like(given.cache_seqlens)


# of which the errors are those of the write
IMPLEMENTATIONS = frozenset((_append_kv.__code__,))


def append_by_operator(given: Append) -> tuple[Tensor, Tensor]:
    """`append`, as an operator."""
    q, total = torch.ops.flash_mask_cute.append_kv(*given)
    return given.q if given.cos is None else q, total
