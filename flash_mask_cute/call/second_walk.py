"""Second walks over the tiles of a forward, with P from its LSE: statistics and tangents.

Their kernels are subclasses of the forward, with its operands. What they alone read and write is in
the place of the destination of splits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Masks, Tensors
from flash_mask_cute.call.copies import split_scale
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend
from flash_mask_cute.call.forward import compile_fwd, cpu_call, tile_counter
from flash_mask_cute.call.kernel_operands import FORWARD, STREAM
from flash_mask_cute.call.lookup import find_fwd, metadata_of
from flash_mask_cute.call.mask_arguments import KernelArguments, MaskArguments
from flash_mask_cute.cpu.call import CpuCall, CpuTiles
from flash_mask_cute.masks.q_start import EACH
from flash_mask_cute.runtime.recent import Recent


class SecondWalk:
    """What runs calls of one plan, by a compiled kernel on the current stream or on CPU tensors."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan, self.is_kernel = plan, plan.backend is Backend.KERNEL
        if self.is_kernel:
            problem, tiles = plan.problem, plan.fwd_choice.tiles
            self._function = compile_fwd(problem, tiles, plan.target, plan.masks.mods).function
            self._mask_arguments = MaskArguments(plan)

    def cpu_call(self, x: Tensors) -> CpuCall:
        plan = self.plan
        of_rows = plan.problem.packed_heads, plan.fwd_choice.tiles.skip_blocks
        return cpu_call(plan, x, CpuTiles(*plan.walk_tile, *of_rows))

    def launch(self, x: Tensors, masks: Masks | None, **operands: Any) -> None:
        """Run the kernel. operands: those that differ from x, by their arguments in `FORWARD`."""
        plan, of, of_masks = self.plan, x.lengths, KernelArguments()
        if masks is not None:
            of_masks = self._mask_arguments(masks, of.cu_seqlens_k, of.cu_seqlens_q)
        arguments: dict[str, Any] = {
            **of._asdict(),
            "scale": split_scale(plan.softmax_scale)[1],
            "window_left": plan.window_left,
            "window_right": plan.window_right,
            "softcap": plan.softcap if plan.problem.has_softcap else None,
            "counter": tile_counter(x.q, x.q.get_device()),
            "q_start": of.q_starts if plan.q_start.kind == EACH else plan.q_start.operand(),
            **of_masks._asdict(),
            **operands,
        }
        with torch.cuda.device_of(x.q):
            self._function(*(arguments.get(y.argument) for y in FORWARD if y.argument != STREAM))


Walk = TypeVar("Walk", bound=SecondWalk)
_kept: dict[Any, Any] = Recent(512)


def prepared(
    call: AttentionCall, results: tuple[Any, ...], others: Any, make: Callable[[], Walk]
) -> Walk:
    """What runs a call beside these results of its forward, from an earlier call or made now.
    others: what else determines it."""
    _, key = find_fwd({}, call)
    is_known = key is not None and all(isinstance(x, Tensor) for x in results)
    key = (key, metadata_of(results), others) if is_known else None
    found: Walk | None = _kept.get(key)
    if found is None:
        found = make()
        if found.is_kernel and is_known:
            _kept[key] = found
    return found
