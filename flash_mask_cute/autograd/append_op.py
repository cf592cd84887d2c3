"""New rows written into a cache, and attention over it: both or neither, also as one operator.

An operator that only wrote would have written when attention over the result fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_mask_cute import interface
from flash_mask_cute.autograd.passes import refuse_dual_level
from flash_mask_cute.autograd.torch_ops import (
    CALL_SCHEMA,
    call_of_operator,
    forward_of_graph,
    to_operator,
    with_out,
)
from flash_mask_cute.call.append import Append, append, check_append, restored_on_error
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall
from flash_mask_cute.call.check.kvcache import (
    CacheView,
    batch_of,
    check_cache,
    check_contents,
    view_of,
)
from flash_mask_cute.runtime.checks import check_outputs_apart
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.plain_tensors import own_memory

_library = torch.library.Library("flash_mask_cute", "FRAGMENT")
# With out_given, which receives it, the result out has no elements: operators return nothing that
# they were given. k_scales and v_scales are those k_descale and v_descale that are written.
_library.define(
    "append_and_attend(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, "
    "Tensor cache_seqlens, Tensor? leftpad, Tensor? batch_idx, Tensor? cu_seqlens_k_new, "
    "Tensor? cos, Tensor? sin, Tensor? rotary_seqlens, bool interleaved, bool advances, "
    "Tensor(d!)? k_scales, Tensor(e!)? v_scales, "
    f"Tensor? learnable_sink, Tensor(c!)? out_given, {CALL_SCHEMA}) -> (Tensor out, Tensor lse)"
)
_OF_APPEND = (
    *("k_cache", "v_cache", "k", "v", "q", "cache_seqlens", "leftpad", "batch_idx"),
    *("cu_seqlens_k_new", "cos", "sin", "rotary_seqlens", "interleaved", "advances"),
)
Result = TypeVar("Result")


def over_view(call: AttentionCall, view: CacheView) -> AttentionCall:
    """The call with the keys and values of a cache."""
    lengths = replaced(
        call.tensors.lengths,
        cu_seqlens_k=view.cu_seqlens_k,
        seqused_k=view.seqused_k,
        page_table=view.page_table,
    )
    tensors = replaced(call.tensors, k=view.k, v=view.v, lengths=lengths)
    # not a chain of `is`: Dynamo of torch 2.9 does not know two functions from inside
    in_pages = view.kv_batch_idx is not None or view.leftpad_k is not None
    if in_pages or view.k_descale is not None or view.v_descale is not None:
        optional = replaced(
            tensors.optional,
            kv_batch_idx=view.kv_batch_idx,
            leftpad_k=view.leftpad_k,
            k_descale=view.k_descale,
            v_descale=view.v_descale,
        )
        tensors = replaced(tensors, optional=optional)
    options = replaced(call.options, max_seqlen_k=view.max_seqlen_k)
    return replaced(call, tensors=tensors, options=options)


def prepare_append(write: Append, call: AttentionCall) -> None:
    """Compile the kernels, and raise what the write and attention would raise, as far as it is
    known before. call: without keys and values."""
    check_append(write)
    interface.prepare_forward(over_view(call, _view_before(write)))
    new = {"k": write.k, "v": write.v, "rotary_cos": write.cos, "rotary_sin": write.sin}
    check_outputs_apart({"out": call.tensors.out}, new)


def _view_before(write: Append) -> CacheView:
    # on a GPU no lengths are read
    lengths = write.cache_seqlens if write.k_cache.is_cuda else None
    return view_of(write.cache(write.batch), lengths)


def append_and_attend(
    write: Append, call: AttentionCall, attend: Callable[[AttentionCall], Result]
) -> Result:
    """Write new rows, and run `attend` on the call over the cache, q rotated. If it fails on a CPU,
    the cache is as it was."""
    if write.k_cache.is_cuda:
        view = _view_before(write)
        q, total = append(write)
        call = replaced(call, tensors=replaced(call.tensors, q=q))
        return attend(over_view(call, replaced(view, seqused_k=total)))
    # here masks and mods are only evaluated by attention, and may fail there
    with restored_on_error(write):
        q, total = append(write)
        call = replaced(call, tensors=replaced(call.tensors, q=q))
        return attend(over_view(call, view_of(write.cache(write.batch), total)))


@torch.library.impl(_library, "append_and_attend", "CompositeExplicitAutograd")
def _append_and_attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_dual_level()
    number = len(_OF_APPEND)
    fields: dict[str, Any] = {
        name: own_memory(x) if isinstance(x, Tensor) else x
        for name, x in zip(_OF_APPEND, arguments[:number], strict=True)
    }
    k_scales, v_scales, given = (
        None if x is None else own_memory(x)
        for x in (*arguments[number : number + 2], arguments[number + 3])
    )
    operands = fields["q"], fields["k_cache"], fields["v_cache"], arguments[number + 2]
    call = with_out(call_of_operator(*operands, arguments[number + 4 :]), given)
    x, of, optional = call.tensors, call.tensors.lengths, call.tensors.optional
    write = Append(
        **fields,
        cu_seqlens_q=of.cu_seqlens_q,
        page_table=of.page_table,
        k_descale=optional.k_descale if k_scales is None else k_scales,
        v_descale=optional.v_descale if v_scales is None else v_scales,
    )
    # of a compiled graph they run here alone
    cache = write.cache(batch_of(x.q, of.cu_seqlens_q))
    check_cache(cache, (call.masks or NO_MASKS).startend_row_indices)
    check_contents(cache)
    prepare_append(write, call)
    of_call = arguments[number + 4 :]
    out, lse = append_and_attend(write, call, lambda over: forward_of_graph(over, of_call))
    return out if given is None else out.new_empty(0), lse


@torch.library.register_fake("flash_mask_cute::append_and_attend", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    fields = dict(zip(_OF_APPEND, arguments[: len(_OF_APPEND)], strict=True))
    q, v_cache = fields["q"], fields["v_cache"]
    *rows, heads_q, _ = q.shape
    shape = (*rows, heads_q, v_cache.shape[-1]) if arguments[len(_OF_APPEND) + 3] is None else (0,)
    out = q.new_empty(shape)
    return out, q.new_empty((*rows[:-1], heads_q, rows[-1]), dtype=torch.float32)


# its errors are those of the call
IMPLEMENTATIONS = frozenset((_append_and_attend.__code__,))


def append_and_attend_by_operator(write: Append, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of `append_and_attend`, as an operator that declares what it changes."""
    operands = [getattr(write, name) for name in _OF_APPEND]
    scales = write.written_scales
    lengths = replaced(call.tensors.lengths, page_table=write.page_table)
    optional = replaced(
        call.tensors.optional,
        k_descale=None if scales[0] is not None else write.k_descale,
        v_descale=None if scales[1] is not None else write.v_descale,
    )
    tensors = replaced(call.tensors, lengths=lengths, optional=optional)
    arguments = to_operator(replaced(call, tensors=tensors))
    x = call.tensors
    out, lse = torch.ops.flash_mask_cute.append_and_attend(
        *operands, *scales, x.learnable_sink, x.out, *arguments
    )
    return out if x.out is None else x.out, lse
