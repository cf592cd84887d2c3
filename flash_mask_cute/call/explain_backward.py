"""Description of the backward of a call, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Direction, Gradients
from flash_mask_cute.call.batch_sums import AuxGradient, explain_reads, traits_of
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.facts import Backend, CallFacts
from flash_mask_cute.call.plan import plan
from flash_mask_cute.call.query_lists import why_bits
from flash_mask_cute.call.scratch import BwdScratch, aux_sums_bytes
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import BwdChoice, BwdTiles
from flash_mask_cute.runtime.named_tuples import replaced

OF_SHORT = "a CTA has all queries and keys of a batch entry, and walks over the entries of a head"
OF_ENTRIES = "a CTA keeps keys of a head and what is added to their scores, and walks over entries"


@dataclass(frozen=True)
class BackwardExplanation:
    """Description of the backward of a forward call; nothing is compiled for it.

    kernel: the one that computes dK, dV and the sums of dQ. tile_n: keys of a CTA's work tile.
    cols, cols_v: columns of a tile of queries and keys, and of values; those beyond the head
    dimensions are zeros that are multiplied all the same. group_splits: CTAs that share the query
    heads of a group. smem_bytes: of a CTA. scratch_bytes: memory of the device that a call takes
    until its end, besides the gradients; None where no kernel runs. partial_sums_bytes: the part of
    it for sums of dK and dV that CTAs of a group leave. aux_gradients: of aux tensors, through
    score_mod. selection: the form in which it takes a selection of blocks.
    """

    kernel: str
    tiles: BwdTiles
    tile_n: int
    cols: int
    cols_v: int
    group_splits: int
    reason: str
    smem_bytes: int
    scratch_bytes: int | None
    partial_sums_bytes: int
    aux_gradients: tuple[AuxGradient, ...] = ()
    selection: str = ""

    def lines(self) -> dict[str, str]:
        """The lines of `str(explanation)`, by their headings."""
        tiles = self.tiles
        scratch = "none" if self.scratch_bytes is None else f"{self.scratch_bytes} bytes"
        if self.partial_sums_bytes:
            scratch += f", {self.partial_sums_bytes} of them for partial sums of dK and dV"
        splits = f", each for a group's heads over {self.group_splits} CTAs"
        lines = {
            "backward": self.kernel,
            "backward tiles": f"{self.tile_n} keys x blocks of {tiles.tile_m} queries"
            + (", two that sum dQ together" if tiles.cta_pair else "")
            + (", half of them for each warpgroup" if tiles.splits_keys else "")
            + (splits if self.group_splits > 1 else ""),
            "backward columns": f"{self.cols} of queries and keys, {self.cols_v} of values",
            "backward because": self.reason,
            "backward smem": f"{self.smem_bytes} bytes",
            "backward scratch": scratch,
        }
        if self.selection:
            lines["backward selection"] = self.selection
        if self.aux_gradients:
            lines["aux gradients"] = "; ".join(map(str, self.aux_gradients))
        return lines


def explain_backward(
    call: AttentionCall, run: ExecutionPlan
) -> tuple[BackwardExplanation | None, str]:
    """Explain the backward of a forward whose plan is `run`; or None, and why there is none."""
    if call.tensors.lengths.page_table is not None:
        return None, "keys in pages have no gradients"
    try:
        backward = plan(backward_call(call), run.target)
    except NotImplementedError as error:
        return None, str(error)
    choice, scratch_bytes, parts_bytes = _choice_of(backward), None, 0
    smem_bytes = choice.smem_bytes
    if backward.backend is Backend.KERNEL:
        scratch = BwdScratch.of(backward)
        scratch_bytes, parts_bytes = scratch.num_bytes, scratch.partial_sums_bytes
        if backward.mask_bits is not None:
            scratch_bytes += backward.mask_bits.num_bytes
        if backward.tables is not None:
            scratch_bytes += backward.tables.num_bytes
            smem_bytes += backward.tables.smem_bytes
    aux_tensors = (call.masks or NO_MASKS).aux_tensors
    if scratch_bytes is not None and aux_tensors is not None:
        sizes = [x.numel() for x in aux_tensors]
        scratch_bytes += aux_sums_bytes(backward.problem, sizes, backward.shapes.batch)
        if backward.shared is not None:
            scratch_bytes += backward.shared.num_bytes(aux_tensors)
    explained = BackwardExplanation(
        kernel=_kernel_of(backward),
        tiles=choice.tiles,
        tile_n=choice.tile_n,
        cols=choice.tile_d,
        cols_v=choice.tile_dv,
        group_splits=choice.group_splits,
        reason=choice.reason,
        smem_bytes=smem_bytes,
        scratch_bytes=scratch_bytes,
        partial_sums_bytes=parts_bytes,
        aux_gradients=explain_reads(backward, aux_tensors),
        selection=_explain_selection(call, backward),
    )
    return explained, ""


def _kernel_of(backward: ExecutionPlan) -> str:
    if backward.shared is None or (short := backward.shared.short) is None:
        kernel = arch_spec(backward.target).backward
        load = kernel.load_wide if backward.problem.is_wide else None
        return kernel.class_name if load is None else load().__name__
    kernels = arch_spec(backward.target).backward.entry_kernels()
    return (kernels.entries if short.several_keys else kernels.short).__name__


def _choice_of(backward: ExecutionPlan) -> BwdChoice:
    """The tiles of the kernel that makes the gradients."""
    choice, shared = backward.bwd_choice, backward.shared
    if shared is None or shared.short is None:
        return choice
    tile, traits = shared.short, traits_of(backward.problem, choice, shared, backward.target)
    if tile.several_keys:
        stages, tile_m, reason = (traits.stages,) * 2, traits.block_m, OF_ENTRIES
    else:
        stages, tile_m, reason = traits.stages, traits.tile_m, OF_SHORT
    tiles = replace(
        choice.tiles, tile_m=tile_m, stages_q=stages[0], stages_do=stages[1],
        stages_kv=min(*stages, 2), value_cols=0, clears_dq=tile.several_keys, cta_pair=False,
        splits_keys=False, splits_group=False,
    )  # fmt: skip
    cols: tuple[int, int] = traits.cols
    return BwdChoice(tiles, tile.tile_n, tile.tile_n, *cols, traits.smem_bytes, reason)


def _explain_selection(call: AttentionCall, backward: ExecutionPlan) -> str:
    if backward.masks.selected is None:
        return ""
    problem = backward.problem
    if problem.query_lists:
        tokens = backward.bwd_choice.tiles.tile_m // problem.listed_rows
        return (
            f"query lists: a key tile visits the queries that chose it, {tokens} with "
            f"{problem.packed_heads} heads at a time"
        )
    facts = CallFacts.of(backward_call(call), backward.target)
    return f"bits: {why_bits(facts, problem)}"


def backward_call(call: AttentionCall) -> AttentionCall:
    """The backward of a call, with stand-ins without memory for its results and gradients."""
    x, masks = call.tensors, call.masks or NO_MASKS
    # the shapes of the plan may be those of packed sequences
    *batch, rows, heads, _ = x.q.shape
    out = x.q.new_empty(()).expand(*batch, rows, heads, x.v.shape[-1])
    lse = torch.empty((), dtype=torch.float32, device=x.q.device).expand(*batch, heads, rows)
    sink, aux_tensors = x.learnable_sink, masks.aux_tensors
    daux: list[Tensor | None] | None = None
    if aux_tensors is not None and any(y.requires_grad for y in aux_tensors):
        daux = [torch.empty_like(y) if y.requires_grad else None for y in aux_tensors]
    nothing: dict[str, Any] = {"max_scores": None, "lse_low": None}
    dsink = None if sink is None else torch.empty_like(sink)
    gradients = Gradients(dout=out, dsink=dsink, daux=daux)
    tensors = replaced(x, **nothing, out=out, lse=lse, gradients=gradients)
    return AttentionCall(
        tensors, call.masks, call.options.of_backward(), call.backward, Direction.BACKWARD
    )
