"""What a call runs, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.call.arguments import Extras
from flash_mask_cute.call.config import FwdTiles
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.plan import compile_call
from flash_mask_cute.call.resolve import ResolvedFwd
from flash_mask_cute.call.tile_classes import ColumnVerdicts, ListVerdicts, Verdicts, judge_row
from flash_mask_cute.mask_prep.mask_bits import DocumentStoring
from flash_mask_cute.runtime.target import HOPPER, Target
from flash_mask_cute.seqlen_info import SeqlenInfoQK

_COMPILED_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Explanation:
    """What a forward call runs. None stands for what is not known, `note` says why.

    where: device that computes. kernel: what runs there or would run on `arch`. packed_heads: query
    heads that share a tile, 1 for none. grid: CTAs. masks: those beyond causal and window, in
    words. work_tiles: query tiles over all heads (groups of packed heads) and sequences.
    full_key_tiles, cut_key_tiles, skipped_key_tiles: over all work tiles, the key tiles that are
    visited as they are, visited and masked, and left out; `plot` counts the same of a mask. Where
    its documents are packed sequences they are tiles of the dense call, of which those between
    documents are skipped; `note` counts the tiles of the sequences. registers: per thread at
    launch. copies: the tensors that each launch copies for the kernel, and why, empty if it copies
    none; the CPU path takes them as they are.
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
    cut_key_tiles: int | None
    skipped_key_tiles: int | None
    smem_bytes: int
    registers: int | None
    spill_bytes: int | None
    note: str
    copies: str = ""

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
            "masks": self.masks or "causal and window at most",
            "grid": _known(self.grid, "CTAs"),
            "work tiles": _known(self.work_tiles),
            "key tiles": f"{_known(self.full_key_tiles)} full, {_known(self.cut_key_tiles)} cut, "
            f"{_known(self.skipped_key_tiles)} skipped",
            "registers": f"{_known(self.registers)} per thread at launch, "
            f"{_known(self.spill_bytes, 'bytes')} spilled",
            "shared memory": f"{self.smem_bytes} bytes",
            "copies": self.copies or "none",
        }
        if self.note:
            lines["note"] = self.note
        return "\n".join(f"{name:<19}{value}" for name, value in lines.items())


def _known(value: int | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value} {unit}".rstrip()


class DenseCall(NamedTuple):
    """A call as it is given."""

    resolved: ResolvedFwd
    extras: Extras
    masks: ResolvedMasks


def explain_fwd(
    resolved: ResolvedFwd,
    extras: Extras,
    masks: ResolvedMasks,
    target: Target,
    device: str,
    can_pack: bool = False,
    copies: str = "",
    dense: DenseCall | None = None,
) -> Explanation:
    """Explain a resolved call, compiling its kernel if need be.

    can_pack: see `compile_call`. copies: see `Explanation`. dense: the call that this one computes
    as packed sequences, by whose grid tiles are counted.
    """
    notes = [] if dense is None else ["the documents of the mask are packed sequences"]
    meta: dict[str, Any] = {}
    storing, asked = None, resolved
    if resolved.problem.dtype in _COMPILED_DTYPES:
        asking = asked.choice.tiles
        resolved, compiled, storing = compile_call(resolved, masks, target, can_pack)
        meta = dict(compiled.meta)
        if device == "cpu" and resolved.choice.tiles != asking:
            notes.append(
                f"the CPU path asks mask_mod itself, over tiles of {asking.tile_m} x "
                f"{asking.tile_n}"
            )
    else:
        notes.append(f"no kernel takes {resolved.problem.dtype}: such tensors run on the CPU only")
    work_tiles = full = cut = skipped = None
    lengths = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_q, extras.seqused_k)
    columns, lists = masks.column_mask, masks.block_lists
    packs = isinstance(storing, DocumentStoring)
    if packs and device != "cpu":
        notes.append("tile counts are unknown: documents are found on the device")
    elif any(x is not None and x.is_cuda for x in lengths):
        notes.append("tile counts are unknown: cu_seqlens or seqused are on the device")
    elif (columns is not None and columns.device.type == "cuda") or (
        lists is not None and lists.mask_block_cnt.is_cuda
    ):
        notes.append("tile counts are unknown: masks are on the device")
    else:
        counted = resolved
        if packs:
            notes.append("the CPU path packs no documents, so none are counted")
            problem = replace(resolved.problem, varlen_q=False, varlen_k=False)
            counted = replace(resolved, shapes=asked.shapes, problem=problem)
        work_tiles, full, cut, skipped = _count_tiles(counted, extras, masks)
        if dense is not None:
            notes.append(f"of their own tiles {full} are visited as they are and {cut} masked")
            of_dense = dense.resolved.with_choice(resolved.choice)
            _, full, cut, skipped = _count_tiles(of_dense, dense.extras, dense.masks)
    told = masks.describe(resolved.choice.tiles, are_bits=storing is not None)
    if storing is not None:
        parts = storing.num_parts
        of_part = "" if parts == 1 else f" for each of {parts} parts"
        told += f"; mask_mod is asked once for all heads, into {storing.num_bytes} bytes{of_part}"
        if cut is not None:
            told += " (tiles that it hides are skipped then, and counted as cut here)"
    if packs:
        told += "; documents that its answers tell of are packed sequences"
    if resolved.shapes.is_empty:
        notes.append("nothing is launched: there are no queries or no keys")
    return Explanation(
        where=device,
        kernel=f"FlashAttentionForwardSm{90 if target.family == HOPPER else 100}",
        arch=target.arch,
        tiles=resolved.choice.tiles,
        reason=resolved.choice.reason,
        packed_heads=resolved.choice.packed_heads,
        masks=told,
        grid=_grid(resolved, work_tiles, target),
        work_tiles=work_tiles,
        full_key_tiles=full,
        cut_key_tiles=cut,
        skipped_key_tiles=skipped,
        smem_bytes=resolved.choice.smem_bytes,
        registers=meta.get("registers"),
        spill_bytes=meta.get("spill_bytes"),
        note="; ".join(notes),
        copies=copies if resolved.problem.dtype in _COMPILED_DTYPES else "",
    )


def _grid(resolved: ResolvedFwd, work_tiles: int | None, target: Target) -> int | None:
    if resolved.shapes.is_empty:
        return 0
    ctas = resolved.choice.tiles.ctas_per_tile
    most = target.num_sms // ctas
    if resolved.problem.varlen_q:
        return most * ctas
    return None if work_tiles is None else min(work_tiles, most) * ctas


def _count_tiles(
    resolved: ResolvedFwd, extras: Extras, masks: ResolvedMasks
) -> tuple[int, int, int, int]:
    """(work tiles, full key tiles, cut ones, skipped ones), over all heads and sequences."""
    shapes, problem, tiles = resolved.shapes, resolved.problem, resolved.choice.tiles
    block_info = BlockInfo(
        tiles.walk_m,
        tiles.tile_n,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        window_size_left=resolved.window_left,
        window_size_right=resolved.window_right,
        qhead_per_kvhead_packgqa=problem.packed_heads,
    )
    verdicts: list[Verdicts] = []
    if masks.column_mask is not None:
        bounds = masks.column_mask.bounds(tiles.tile_n, extras.cu_seqlens_k)
        verdicts.append(ColumnVerdicts(masks.column_mask, bounds, block_info))
    if masks.block_lists is not None:
        tile, seqlens = (tiles.walk_m, tiles.tile_n), (shapes.seqlen_q, shapes.seqlen_k)
        has_mod = masks.mask_mod is not None
        verdicts.append(ListVerdicts.create(masks.block_lists, has_mod, tile, seqlens))
    asks = masks.mask_mod is not None and masks.block_lists is None
    heads = shapes.heads_q // problem.packed_heads
    cu_seqlens = [None if x is None else x.tolist() for x in extras[1:3]]
    seqused = [None if x is None else x.tolist() for x in extras[3:5]]
    work_tiles = full = cut = total = 0
    for batch_idx in range(shapes.batch):
        slot = SeqlenInfoQK.create(batch_idx, shapes.seqlen_q, shapes.seqlen_k, *cu_seqlens)
        used = SeqlenInfoQK.create(
            batch_idx, shapes.seqlen_q, shapes.seqlen_k, *cu_seqlens, *seqused
        )
        m_blocks = -(-slot.seqlen_q * problem.packed_heads // tiles.walk_m)
        work_tiles += m_blocks * heads
        total += m_blocks * heads * -(-used.seqlen_k // tiles.tile_n)
        for m_block in range(m_blocks):
            _, is_visible, is_cut = judge_row(
                block_info, verdicts, asks, heads, batch_idx, used, m_block
            )
            cut += int((is_visible & is_cut).sum())
            full += int((is_visible & ~is_cut).sum())
    if not tiles.skip_blocks:
        full, cut = 0, total
    return work_tiles, full, cut, total - full - cut
