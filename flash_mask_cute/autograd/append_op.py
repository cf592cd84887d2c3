"""New rows written into a cache, and attention over it: both or neither, also as one operator.

An operator that only wrote would have written when attention over the result fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.autograd.arguments import Call
from flash_mask_cute.autograd.passes import prepare_forward_call, refuse_dual_level, run_forward
from flash_mask_cute.autograd.torch_ops import (
    CALL_SCHEMA,
    OperatorCall,
    call_of_operator,
    to_operator,
)
from flash_mask_cute.call.append import Append, append, check_append, restored_on_error
from flash_mask_cute.call.kvcache import Cache, CacheView, check_cache, check_contents, view_of
from flash_mask_cute.runtime.plain_tensors import own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
# cu_seqlens_q and page_table are those of the call
_library.define(
    "append_and_attend(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, "
    "Tensor cache_seqlens, Tensor? leftpad, Tensor? batch_idx, Tensor? cu_seqlens_k_new, "
    "Tensor? cos, Tensor? sin, Tensor? rotary_seqlens, bool interleaved, bool advances, "
    f"Tensor? learnable_sink, {CALL_SCHEMA}) -> (Tensor out, Tensor lse)"
)
_OF_APPEND = (
    *("k_cache", "v_cache", "k", "v", "q", "cache_seqlens", "leftpad", "batch_idx"),
    *("cu_seqlens_k_new", "cos", "sin", "rotary_seqlens", "interleaved", "advances"),
)

Result = TypeVar("Result")


def over_view(call: Call, view: CacheView) -> Call:
    """Run one call over a cache."""
    return call._replace(
        cu_seqlens_k=view.cu_seqlens_k,
        seqused_k=view.seqused_k,
        max_seqlen_k=view.max_seqlen_k,
        page_table=view.page_table,
        kv_batch_idx=view.kv_batch_idx,
        leftpad_k=view.leftpad_k,
    )


def append_and_attend(
    given: Append,
    sink: Tensor | None,
    call: Call,
    return_lse: bool,
    attend: Callable[[CacheView, Tensor], Result],
) -> Result:
    """Write new rows, and run `attend` with the cache and with q, rotated.

    If it fails, nothing has been written: checks tell what is wrong, and kernels are compiled,
    before. call: without what the cache says of keys.
    """
    x = given
    check_append(x)
    cache = _cache_of(x)
    # on a GPU no lengths are read
    is_on_gpu = x.k_cache.is_cuda
    view = view_of(cache, x.cache_seqlens if is_on_gpu else None)
    prepare_forward_call(x.q, view.k, view.v, sink, over_view(call, view), return_lse)
    if is_on_gpu:
        q, total = append(x)
        return attend(view._replace(seqused_k=total), q)
    # here masks and mods are only evaluated by attention, and may fail there
    with restored_on_error(x):
        q, total = append(x)
        return attend(view_of(cache, total), q)


def _cache_of(x: Append) -> Cache:
    """The cache before the write."""
    where = x.cache_seqlens, x.leftpad, x.batch_idx, x.page_table
    return Cache(x.k_cache, x.v_cache, *where, x.batch)


@torch.library.impl(_library, "append_and_attend", "CompositeExplicitAutograd")
def _append_and_attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_dual_level()
    number = len(_OF_APPEND)
    given, sink, call = _bundles(
        *(own_memory(x) if isinstance(x, Tensor) else x for x in arguments[: number + 1]),
        *arguments[number + 1 :],
    )
    # of a compiled graph they run here alone
    check_cache(_cache_of(given), call.startend_row_indices)
    check_contents(_cache_of(given))

    def attend(view: CacheView, q: Tensor) -> tuple[Tensor, Any]:
        return run_forward(q, view.k, view.v, sink, over_view(call, view))

    return append_and_attend(given, sink, call, True, attend)


def _bundles(*arguments: Any) -> tuple[Append, Tensor | None, Call]:
    number = len(_OF_APPEND)
    call = call_of_operator(arguments[number + 1 :])
    fields = dict(zip(_OF_APPEND, arguments[:number], strict=True))
    given = Append(**fields, cu_seqlens_q=call.cu_seqlens_q, page_table=call.page_table)
    return given, arguments[number], call


@torch.library.register_fake("flash_mask_cute::append_and_attend", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    fields = dict(zip(_OF_APPEND, arguments[: len(_OF_APPEND)], strict=True))
    q, v_cache = fields["q"], fields["v_cache"]
    *rows, heads_q, _ = q.shape
    out = q.new_empty((*rows, heads_q, v_cache.shape[-1]))
    return out, q.new_empty((*rows[:-1], heads_q, rows[-1]), dtype=torch.float32)


def append_and_attend_by_operator(
    given: Append, sink: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `append_and_attend`, as an operator that declares what it changes."""
    fields = given._asdict()
    operands = [fields[name] for name in _OF_APPEND]
    arguments: OperatorCall = to_operator(call._replace(page_table=given.page_table))
    out, lse = torch.ops.flash_mask_cute.append_and_attend(*operands, sink, *arguments)
    return out, lse
