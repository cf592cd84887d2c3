"""A prepared call over keys and values in fp8 that are first converted (`call/choose/widen.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import Masks, PreparedFwd, Tensors
from flash_mask_cute.call.choose.copies import convert
from flash_mask_cute.call.choose.execution_plan import ExecutionPlan
from flash_mask_cute.call.run.forward import current_device
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_of
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "widen_codes"


class WidenFacts(NamedTuple):
    """Facts that determine the code of the conversion.

    dtype: of the results, the name of a torch dtype. scales: dimensions of k_descale and v_descale,
    None: there is none.
    """

    dtype: str
    dims: tuple[int, int]
    has_used: bool
    has_pages: bool
    scales: tuple[int | None, int | None]


def compile_widen(facts: WidenFacts, target: Target, cache: CompileCache = CACHE) -> Compiled:
    """The compiled kernel. `function` takes the arguments of `WidenCodes`, by position."""
    return cache.get(
        KERNEL_NAME,
        facts._asdict,
        lambda: build_widen(facts, target),
        arch=target.arch,
        options=options_of(target),
        token=facts,
    )


def build_widen(facts: WidenFacts, target: Target) -> Compiled:
    """Compile now."""
    from flash_mask_cute.kernels.widen_codes import WidenCodes

    arguments = [
        *(fake_tensors.byte_rows(4) for _ in facts.dims),
        *(fake_tensors.operand(facts.dtype, 4, dim) for dim in facts.dims),
        fake_tensors.int32_vector(facts.has_used),
        fake_tensors.strided(2) if facts.has_pages else None,
        *(None if rank is None else fake_tensors.strided(rank, "float32") for rank in facts.scales),
        fake_tensors.stream(),
    ]
    kernel = WidenCodes(fake_tensors.cutlass_dtype(facts.dtype))
    return compile_object(kernel, arguments, options_of(target))


class WidenedForward:
    """Converts keys and values, and runs the prepared call over them."""

    __slots__ = ("_conversions", "_function", "_index", "_shapes", "inner")

    def __init__(self, plan: ExecutionPlan, inner: PreparedFwd) -> None:
        assert plan.wide is not None
        self.inner = inner
        problem, shapes = plan.problem, plan.wide.shapes
        dims = shapes.head_dim, shapes.head_dim_v
        rows = shapes.batch, shapes.seqlen_k, shapes.heads_kv
        self._shapes = tuple((*rows, dim) for dim in dims)
        self._conversions = plan.conversions["k"], plan.conversions["v"]
        self._index = -1 if plan.device.index is None else plan.device.index
        ranks = {x.name: x.rank for x in problem.optional}
        facts = WidenFacts(
            problem.dtype,
            dims,
            problem.has_seqused_k,
            problem.page_box is not None,
            (ranks.get("k_descale"), ranks.get("v_descale")),
        )
        self._function = compile_widen(facts, plan.target).function

    def __call__(
        self, tensors: Tensors, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._index >= 0 and self._index != current_device():
            with torch.cuda.device(self._index):
                return self(tensors, masks)
        x, of = tensors, tensors.optional
        wide_k, wide_v = (x.q.new_empty(shape) for shape in self._shapes)
        self._function(
            *convert((x.k, x.v), self._conversions), wide_k, wide_v, x.lengths.seqused_k,
            x.lengths.page_table, of.k_descale, of.v_descale,
        )  # fmt: skip
        lengths = replaced(x.lengths, page_table=None)
        optional = replaced(of, k_descale=None, v_descale=None)
        wide = replaced(x, k=wide_k, v=wide_v, lengths=lengths, optional=optional)
        return self.inner(wide, masks)
