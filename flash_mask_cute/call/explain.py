"""Description of what a call runs, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flash_mask_cute.block_sparsity import FULL, PARTIAL
from flash_mask_cute.call.arguments import AttentionCall, Tensors
from flash_mask_cute.call.check.pages import describe_pages
from flash_mask_cute.call.copies import describe_copies
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.explain_backward import BackwardExplanation, explain_backward
from flash_mask_cute.call.facts import Backend, CallFacts, target_of
from flash_mask_cute.call.forward import cpu_call
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.plan import kernel_problem, new_plan, plan
from flash_mask_cute.call.prepare import built_fwd, compiled_fwd
from flash_mask_cute.call.selection import explain_selection
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import FwdTiles
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.tiles import sequence_walks
from flash_mask_cute.limits import ctas_of_tile
from flash_mask_cute.mask_prep.mask_bits import DocumentBitsPlan
from flash_mask_cute.runtime.machine_code import kept_code
from flash_mask_cute.runtime.process_state import builds_are_said
from flash_mask_cute.runtime.target import Target


@dataclass(frozen=True)
class Explanation:
    """Description of a forward call. None stands for an unknown value; `note` says why. A text is
    empty if a call does not use what it describes.

    where: the device that computes. kernel: the kernel that runs there or would run on `arch`.
    packed_heads: query heads that share a tile, 1 for none. grid: CTAs. masks: those beyond causal
    and window. work_tiles: query tiles over all heads (groups of packed heads) and sequences.
    full_key_tiles, partial_key_tiles, empty_key_tiles: over all work tiles, the key tiles that are
    visited without a mask, visited and masked, and skipped; `plot` counts the same for a mask. If
    the documents of a mask are packed sequences, these are tiles of the dense call, and tiles
    between documents are empty; `note` counts the tiles of the sequences. registers: per thread at
    launch. copies: the tensors that each launch copies for the kernel, with reasons. splits: of
    work tiles, with their scratch memory. pages: how the kernel copies keys from pages. tables:
    those of all differences that a launch fills before attention, for reads of score_mod. ptx,
    sass: code of the attention kernel, if asked for.
    """

    where: str
    kernel: str
    arch: str
    tiles: FwdTiles
    reason: str
    packed_heads: int
    masks: str
    grid: int | None
    work_tiles: int | None
    full_key_tiles: int | None
    partial_key_tiles: int | None
    empty_key_tiles: int | None
    smem_bytes: int
    registers: int | None
    spill_bytes: int | None
    note: str
    copies: str = ""
    splits: str = ""
    pages: str = ""
    selection: str = ""
    tables: str = ""
    backward: BackwardExplanation | None = None
    ptx: str = field(default="", repr=False)
    sass: str = field(default="", repr=False)

    def __str__(self) -> str:
        tiles = self.tiles
        computed = f"{self.kernel} for {self.arch}"
        if self.where == "cpu":
            computed = f"the CPU path, which walks the tiles of {computed}"
        lines = {
            "runs": f"{computed}, on {self.where}",
            "tiles": f"{tiles.tile_m} query rows x {tiles.tile_n} keys"
            + (", two that walk over the keys together" if tiles.cta_pair else ""),
            "stages": f"{tiles.num_stages} of keys and values, {tiles.stages_q} of queries"
            + (", output in the query's place" if tiles.share_qo else ""),
            "because": self.reason,
            "packed heads": "none" if self.packed_heads == 1 else str(self.packed_heads),
            "splits": self.splits or "none: one pass",
            "masks": self.masks or "causal and window at most",
            "grid": _number(self.grid, "CTAs"),
            "work tiles": _number(self.work_tiles),
            "key tiles": f"{_number(self.full_key_tiles)} full, "
            f"{_number(self.partial_key_tiles)} partial, "
            f"{_number(self.empty_key_tiles)} empty",
            "registers": f"{_number(self.registers)} per thread at launch, "
            f"{_number(self.spill_bytes, 'bytes')} spilled",
            "shared memory": f"{self.smem_bytes} bytes",
            "copies": self.copies or "none",
        }
        optional = {"pages": self.pages, "selection": self.selection, "tables": self.tables}
        lines |= {name: text for name, text in optional.items() if text}
        if self.backward is not None:
            lines |= self.backward.lines()
        if self.note:
            lines["note"] = self.note
        return "\n".join(f"{name:<19}{value}" for name, value in lines.items())


def _number(value: int | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value} {unit}".rstrip()


def explain_fwd(
    call: AttentionCall, named: Target | None = None, keeps_code: bool = False
) -> Explanation:
    """Explain a forward, compiling its kernel if necessary. named: the target; None: of q's device.
    keeps_code: compile it anew, for its PTX and machine code. Raises TypeError, ValueError,
    NotImplementedError as the call would."""
    device = str(call.tensors.q.device)
    run = plan(call, named or target_of(call.tensors.q))
    counted = run.instead[0].call if run.instead else call
    notes = [x.note for x in reversed(run.instead) if x.note]
    meta, code = _compiled_facts(run, device, notes, keeps_code)
    tiles = run.fwd_choice.tiles
    packs = isinstance(run.mask_bits, DocumentBitsPlan)
    work_tiles = full = partial = empty = None
    if packs and device != "cpu":
        notes.append("tile counts are unknown: documents are found on the device")
    elif unknown := _unreadable_for_counts(counted, run.masks):
        notes.append(f"tile counts are unknown: {unknown}")
    else:
        to_count = run
        if packs and run.without_bits is not None:
            notes.append("the CPU path packs no documents, so none are counted")
            to_count = replace(run.without_bits, choice=run.choice)
        work_tiles, full, partial, empty = _count_tiles(to_count, counted.tensors)
        if counted.tensors.q.dim() != call.tensors.q.dim():
            notes.append(f"of their own tiles {full} are full and {partial} partial")
            facts = CallFacts.of(call, run.target)
            of_dense = new_plan(facts, kernel_problem(facts), run.choice)
            _, full, partial, empty = _count_tiles(of_dense, call.tensors)
    if run.shapes.is_empty:
        notes.append("nothing is launched: there are no queries or no keys")
    backward, why_not = explain_backward(call, run)
    if backward is None:
        notes.append(f"there is no backward: {why_not}")
    return Explanation(
        where=device,
        kernel=arch_spec(run.target).forward.of(run.problem.head_dim_v, tiles.tile_n).class_name,
        arch=run.target.arch,
        tiles=tiles,
        reason=run.choice.reason,
        packed_heads=run.fwd_choice.packed_heads,
        masks=_describe_masks(run, counts_partial=partial is not None),
        grid=_grid(run, work_tiles),
        work_tiles=work_tiles,
        full_key_tiles=full,
        partial_key_tiles=partial,
        empty_key_tiles=empty,
        smem_bytes=run.choice.smem_bytes,
        registers=meta.get("registers"),
        spill_bytes=meta.get("spill_bytes"),
        note="; ".join(notes),
        copies=describe_copies(**run.conversions),
        splits="" if (cut := run.fixed_splits or run.splits) is None else cut.describe(),
        pages=_describe_pages(run, call.tensors),
        selection=explain_selection(run, counted.tensors.lengths.cu_seqlens_q),
        tables="" if run.tables is None else run.tables.describe(),
        backward=backward,
        **code,
    )


def _describe_pages(run: ExecutionPlan, tensors: Tensors) -> str:
    box = run.problem.page_box
    if box is None or run.problem.gathers:
        return ""
    return describe_pages(tensors.k.shape[1], box, run.fwd_choice.tiles.tile_n)


def _compiled_facts(
    run: ExecutionPlan, device: str, notes: list[str], keeps_code: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The compiler's facts about the kernel, and its code. It adds remarks to `notes`."""
    if run.backend is Backend.CPU:
        notes.append(f"no kernel takes {run.problem.dtype}: such tensors run on the CPU only")
        return {}, {}
    tiles = (run.without_bits or run).fwd_choice.tiles
    if device == "cpu" and run.fwd_choice.tiles != tiles:
        notes.append(
            f"the CPU path evaluates mask_mod itself, over tiles of {tiles.tile_m} x {tiles.tile_n}"
        )
    with builds_are_said("explain"):
        if not keeps_code:
            return dict(compiled_fwd(run).meta), {}
        with kept_code() as read:
            compiled = built_fwd(run)
            return dict(compiled.meta), read(compiled)


def _unreadable_for_counts(call: AttentionCall, masks: ResolvedMasks) -> str | None:
    """The values on a device that counting tiles would read, with a verb for the message."""
    x, columns, lists = call.tensors, masks.column_mask, masks.block_lists
    lengths = *x.lengths._replace(page_table=None), x.optional.causal_per_seq
    if any(y is not None and y.is_cuda for y in lengths):
        return "cu_seqlens, seqused, q_start or causal are on the device"
    of_masks = (
        None if columns is None else columns.startend_row_indices,
        None if lists is None else lists.mask_block_cnt,
        None if masks.selected is None else masks.selected.indices,
    )
    if any(y is not None and y.is_cuda for y in of_masks):
        return "masks are on the device"
    return None


def _describe_masks(run: ExecutionPlan, counts_partial: bool) -> str:
    mask_bits = run.mask_bits
    are_bits = mask_bits is not None or run.q_start.is_given
    text = run.masks.describe(run.fwd_choice.tiles, are_bits, run.problem.lists_per_warpgroup)
    if mask_bits is None:
        return text
    parts = mask_bits.num_query_chunks
    of_part = "" if parts == 1 else f" for each of {parts} parts"
    text += f"; mask_mod is evaluated once for all heads, into {mask_bits.num_bytes} bytes{of_part}"
    if counts_partial:
        text += " (tiles that it hides are skipped then, and counted as partial here)"
    if isinstance(mask_bits, DocumentBitsPlan):
        text += "; documents that its bits show are packed sequences"
    return text


def _grid(run: ExecutionPlan, work_tiles: int | None) -> int | None:
    if run.shapes.is_empty:
        return 0
    ctas = run.fwd_choice.tiles.ctas_per_tile * ctas_of_tile(run.problem.head_dim_v)
    if run.splits is not None and run.splits.kind == BY_STREAM_K:
        return run.splits.number * ctas
    if run.splits is not None and work_tiles is not None:
        work_tiles *= run.splits.number
    most = run.target.num_sms // ctas
    if run.problem.varlen_q:
        return most * ctas
    return None if work_tiles is None else min(work_tiles, most) * ctas


def _count_tiles(run: ExecutionPlan, tensors: Tensors) -> tuple[int, int, int, int]:
    """(work tiles, full key tiles, partial ones, empty ones), over all heads and sequences."""
    shapes, tiles, packed_heads = run.shapes, run.fwd_choice.tiles, run.problem.packed_heads
    of_kernel = CpuTiles(tiles.cluster_tile_m, tiles.tile_n, padded_group(packed_heads))
    heads, cu_seqlens_q = shapes.heads_q // packed_heads, tensors.lengths.cu_seqlens_q
    work_tiles = full = partial = total = 0
    for walk in sequence_walks(cpu_call(run, tensors, of_kernel)):
        rows = shapes.seqlen_q
        if cu_seqlens_q is not None:
            # of the slot of a sequence, some of whose rows may be unused
            rows = int(cu_seqlens_q[walk.batch_idx + 1] - cu_seqlens_q[walk.batch_idx])
        m_blocks = -(-rows * walk.pack // tiles.cluster_tile_m)
        work_tiles += m_blocks * heads
        total += m_blocks * heads * walk.num_n_blocks
        for m_block in range(m_blocks):
            # heads that share a tile have the same masks
            classes = walk.classes(m_block)[1][::packed_heads]
            full += int((classes == FULL).sum())
            partial += int((classes == PARTIAL).sum())
    if not tiles.skip_blocks:
        full, partial = 0, total
    return work_tiles, full, partial, total - full - partial
