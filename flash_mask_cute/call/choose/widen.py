"""Prefill over a cache in fp8: when its keys and values are first converted to 16 bits.

The attention kernel converts a block of keys for each tile of 64 query rows that visits it. Where
many rows share keys, it takes less time to convert all of them once, to memory of the call, and to
run the call over 16 bits. Results are those of that call, which is what a cache in fp8 means.
"""

from __future__ import annotations

from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.choose.facts import CallFacts
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced

# Query rows that share keys, from which on it pays. A block of 128 keys at head dimension 128 takes
# an SM as long as 43 clocks of all SMs to convert so, by its bytes, and each 64 rows less save
# about 5.
LEAST_ROWS = 1024
# of keys and values in 16 bits
MOST_BYTES = 512 << 20


def call_in_16_bits(facts: CallFacts) -> AttentionCall | None:
    """The call over converted keys and values, if they are converted before attention.

    Its k and v are (batch, keys, heads, d) of the capacity, for plans alone: on a GPU they hold no
    memory.
    """
    call, shapes = facts.call, facts.shapes
    x = call.tensors
    if not facts.is_forward or x.k.dtype != FP8 or shapes.is_empty:
        return None
    if not (x.optional.kv_batch_idx is x.optional.leftpad_k is None):
        return None
    # a window shows few keys of a cache
    if call.options.window_size_left is not None:
        return None
    rows = shapes.mean_seqlen_q * (shapes.heads_q // shapes.heads_kv)
    width = shapes.head_dim + shapes.head_dim_v
    keys = shapes.batch * shapes.seqlen_k * shapes.heads_kv
    if rows < LEAST_ROWS or keys * width * x.q.itemsize > MOST_BYTES:
        return None
    of_cache = shapes.batch, shapes.seqlen_k, shapes.heads_kv
    k, v = (_without_memory(x.q, (*of_cache, dim)) for dim in (shapes.head_dim, shapes.head_dim_v))
    lengths = replaced(x.lengths, page_table=None)
    optional = replaced(x.optional, k_descale=None, v_descale=None)
    return replaced(call, tensors=replaced(x, k=k, v=v, lengths=lengths, optional=optional))


def _without_memory(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor as one of q, whose memory is given back before another one is made."""
    tensor = q.new_empty(shape)
    if tensor.is_cuda:
        tensor.untyped_storage().resize_(0)
    return tensor
