"""Prefill over a cache in fp8: when its keys and values are first converted to 16 bits.

The attention kernel converts a block of keys for each tile of 64 query rows that visits it. Where
many rows share keys, it takes less time to convert all of them once, to memory of the call, and to
run the call over 16 bits.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Masks, PreparedFwd, Tensors
from flash_mask_cute.call.check.fp8 import ranks
from flash_mask_cute.call.copies import byte_conversion, convert
from flash_mask_cute.call.execution_plan import ExecutionPlan, Instead
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.forward import current_device
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.stream_k import FEW_ROWS
from flash_mask_cute.limits import MAX_HEAD_DIM
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import by_facts, compile_object, options_of
from flash_mask_cute.runtime.dtypes import FP8, dtype_name
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# Query rows that visit a key, from which on it pays. To convert a block of 128 keys at head
# dimension 128 takes, by its bytes, 43 clocks of all SMs; each 64 rows save about 5.
LEAST_ROWS = 1024
# of keys and values in 16 bits
MOST_BYTES = 512 << 20


def call_in_16_bits(facts: CallFacts) -> Instead | None:
    """The call over converted keys and values, if they are converted before attention. Its k and v
    are (batch, capacity, heads, d), for plans alone: on a GPU they hold no memory. Raises
    NotImplementedError: no kernel converts them."""
    call, shapes = facts.call, facts.shapes
    x = call.tensors
    if x.k.dtype != FP8 or facts.backend is Backend.CPU:
        return None
    spec, dims = facts.spec, (shapes.head_dim, shapes.head_dim_v)
    if not any(y.name == "in_fp8" for y in fields(spec.forward.load_traits())):
        raise NotImplementedError(
            f"k and v in float8_e4m3fn are not supported on {spec.name}: convert them to the dtype "
            f"of q ({dtype_name(x.q.dtype)})"
        )
    if shapes.is_empty:
        return None
    if max(dims) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head_dim and head_dim_v above {MAX_HEAD_DIM} are not supported with k and v in "
            f"float8_e4m3fn; got {dims[0]} and {dims[1]}"
        )
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
    keys = shapes.batch * shapes.seqlen_k * shapes.heads_kv
    if rows < LEAST_ROWS or keys * sum(dims) * x.q.itemsize > MOST_BYTES:
        return None
    of_cache = shapes.batch, shapes.seqlen_k, shapes.heads_kv
    k, v = (_without_memory(x.q, (*of_cache, dim)) for dim in dims)
    lengths = replaced(x.lengths, page_table=None)
    optional = replaced(x.optional, k_descale=None, v_descale=None)
    call = replaced(call, tensors=replaced(x, k=k, v=v, lengths=lengths, optional=optional))
    note = f"k and v are converted from fp8 before attention, to {k.nbytes + v.nbytes} bytes"
    return Instead(call, partial(DequantisedForward, facts), note)


def with_few_rows(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with `few_rows` of its problem filled in."""
    problem = plan.problem
    if not problem.in_fp8 or problem.varlen_q:
        return plan
    few_rows = plan.shapes.seqlen_q * padded_group(problem.packed_heads) <= FEW_ROWS
    return replace(plan, problem=replace(problem, few_rows=few_rows))


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

    def __init__(self, facts: CallFacts, inner: PreparedFwd) -> None:
        self.inner = inner
        x, shapes = facts.call.tensors, facts.shapes
        dims = shapes.head_dim, shapes.head_dim_v
        rows = shapes.batch, shapes.seqlen_k, shapes.heads_kv
        self._shapes = tuple((*rows, dim) for dim in dims)
        self._conversions = byte_conversion(x.k), byte_conversion(x.v)
        self._index = -1 if x.q.device.index is None else x.q.device.index
        scales = x.optional.k_descale, x.optional.v_descale
        of_code = DequantiseFacts(
            dtype_name(x.q.dtype),
            dims,
            x.lengths.seqused_k is not None,
            x.lengths.page_table is not None,
            ranks(*scales),
        )
        self._function = by_facts(KERNEL_NAME, of_code, build_dequantise, facts.target).function

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
