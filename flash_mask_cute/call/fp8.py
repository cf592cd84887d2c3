"""Prefill over a cache in fp8: when its keys and values are first converted to 16 bits.

The attention kernel converts a block of keys for each tile of 64 query rows that visits it. Where
many rows share keys, it takes less time to convert all of them once, to memory of the call, and to
run the call over 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Masks, PreparedFwd, Tensors
from flash_mask_cute.call.copies import convert
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import CallFacts
from flash_mask_cute.call.forward import current_device
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.dtypes import FP8
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# Query rows that visit a key, from which on it pays. To convert a block of 128 keys at head
# dimension 128 takes, by its bytes, 43 clocks of all SMs; each 64 rows save about 5.
LEAST_ROWS = 1024
# of keys and values in 16 bits
MOST_BYTES = 512 << 20


def call_in_16_bits(facts: CallFacts) -> AttentionCall | None:
    """The call over converted keys and values, if they are converted before attention. Its k and v
    are (batch, capacity, heads, d), for plans alone: on a GPU they hold no memory."""
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
    if (selected := facts.masks.selected) is not None:
        # rows that visit a key, if neighbouring queries chose the same
        chosen = min(selected.indices.shape[-1] * selected.block_size, shapes.seqlen_k)
        rows = rows * chosen // shapes.seqlen_k
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


# -- the conversion ----------------------------------------------------------------------------

KERNEL_NAME = "dequantise"


class DequantiseFacts(NamedTuple):
    """Facts that determine the code of the conversion. dtype: of the results. scales: their
    ranks."""

    dtype: str
    dims: tuple[int, int]
    has_used: bool
    has_pages: bool
    scales: tuple[int | None, int | None]


def build_dequantise(facts: DequantiseFacts, target: Target) -> Compiled:
    """Compile now. `function` takes the arguments of `Dequantise`, by position."""
    from flash_mask_cute.kernels.dequantise import Dequantise

    arguments = [
        *(fake_tensors.byte_rows(4) for _ in facts.dims),
        *(fake_tensors.operand(facts.dtype, 4, dim) for dim in facts.dims),
        fake_tensors.int32_vector(facts.has_used),
        fake_tensors.strided(2) if facts.has_pages else None,
        *(None if rank is None else fake_tensors.strided(rank, "float32") for rank in facts.scales),
        fake_tensors.stream(),
    ]
    kernel = Dequantise(fake_tensors.cutlass_dtype(facts.dtype))
    return compile_object(kernel, arguments, options_of(target))


class DequantisedForward:
    """Converts keys and values, and runs the prepared call over them."""

    def __init__(self, plan: ExecutionPlan, inner: PreparedFwd) -> None:
        assert plan.in_16_bits is not None
        self.inner = inner
        problem, shapes = plan.problem, plan.in_16_bits.shapes
        dims = shapes.head_dim, shapes.head_dim_v
        rows = shapes.batch, shapes.seqlen_k, shapes.heads_kv
        self._shapes = tuple((*rows, dim) for dim in dims)
        self._conversions = plan.conversions["k"], plan.conversions["v"]
        self._index = -1 if plan.device.index is None else plan.device.index
        ranks = {x.name: x.rank for x in problem.optional}
        facts = DequantiseFacts(
            problem.dtype,
            dims,
            problem.has_seqused_k,
            problem.page_box is not None,
            (ranks.get("k_descale"), ranks.get("v_descale")),
        )
        self._function = by_facts(KERNEL_NAME, facts, build_dequantise, plan.target).function

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._index >= 0 and self._index != current_device():
            with torch.cuda.device(self._index):
                return self(tensors, masks)
        x, of = tensors, tensors.optional
        k_in_16_bits, v_in_16_bits = (x.q.new_empty(shape) for shape in self._shapes)
        self._function(
            *convert((x.k, x.v), self._conversions), k_in_16_bits, v_in_16_bits,
            x.lengths.seqused_k,
            x.lengths.page_table, of.k_descale, of.v_descale,
        )  # fmt: skip
        lengths = replaced(x.lengths, page_table=None)
        optional = replaced(of, k_descale=None, v_descale=None)
        converted = replaced(x, k=k_in_16_bits, v=v_in_16_bits, lengths=lengths, optional=optional)
        return self.inner(converted, masks)
