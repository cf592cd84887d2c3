"""What a call runs, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.host.compile import compile_fwd
from flash_mask_cute.host.config import FwdTiles
from flash_mask_cute.host.launch import Extras, ResolvedFwd
from flash_mask_cute.host.target import Target
from flash_mask_cute.seqlen_info import SeqlenInfoQK

_COMPILED_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Explanation:
    """What a forward call runs. None stands for what is not known, `note` says why.

    where: device that computes. kernel: what runs there or would run on `arch`. packed_heads: query
    heads that share a tile, 1 for none. grid: CTAs. work_tiles: query tiles over all heads and
    sequences. visible_key_tiles, skipped_key_tiles: key tiles that are visited and left out, over
    all sequences, for one head (one group of packed heads). registers: per thread at launch.
    """

    where: str
    kernel: str
    arch: str
    tiles: FwdTiles
    reason: str
    packed_heads: int
    grid: int | None
    work_tiles: int | None
    visible_key_tiles: int | None
    skipped_key_tiles: int | None
    smem_bytes: int
    registers: int | None
    spill_bytes: int | None
    note: str

    def __str__(self) -> str:
        tiles = self.tiles
        computed = f"{self.kernel} for {self.arch}"
        if self.where == "cpu":
            computed = f"the CPU path, which walks the tiles of {computed}"
        lines = {
            "runs": f"{computed}, on {self.where}",
            "tiles": f"{tiles.tile_m} query rows x {tiles.tile_n} keys",
            "stages": f"{tiles.num_stages} of keys and values, {tiles.stages_q} of queries"
            + (", output in the query's place" if tiles.share_qo else ""),
            "because": self.reason,
            "packed heads": "none" if self.packed_heads == 1 else str(self.packed_heads),
            "grid": _known(self.grid, "CTAs"),
            "work tiles": _known(self.work_tiles),
            "key tiles per head": f"{_known(self.visible_key_tiles)} visible, "
            f"{_known(self.skipped_key_tiles)} skipped",
            "registers": f"{_known(self.registers)} per thread at launch, "
            f"{_known(self.spill_bytes, 'bytes')} spilled",
            "shared memory": f"{self.smem_bytes} bytes",
        }
        if self.note:
            lines["note"] = self.note
        return "\n".join(f"{name:<19}{value}" for name, value in lines.items())


def _known(value: int | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value} {unit}".rstrip()


def explain_fwd(resolved: ResolvedFwd, extras: Extras, target: Target, device: str) -> Explanation:
    """Explain a resolved call, compiling its kernel if need be."""
    notes = []
    work_tiles = visible = skipped = None
    lengths = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_q, extras.seqused_k)
    if any(x is not None and x.is_cuda for x in lengths):
        notes.append("tile counts are unknown: cu_seqlens or seqused are on the device")
    else:
        work_tiles, visible, skipped = _count_tiles(resolved, extras)
    meta: dict[str, Any] = {}
    if resolved.problem.dtype in _COMPILED_DTYPES:
        meta = dict(compile_fwd(resolved.problem, resolved.choice.tiles, target).meta)
    else:
        notes.append(f"no kernel takes {resolved.problem.dtype}: such tensors run on the CPU only")
    if resolved.is_empty:
        notes.append("nothing is launched: there are no queries or no keys")
    return Explanation(
        where=device,
        kernel="FlashAttentionForwardSm90",
        arch=target.arch,
        tiles=resolved.choice.tiles,
        reason=resolved.choice.reason,
        packed_heads=resolved.choice.packed_heads,
        grid=_grid(resolved, work_tiles, target),
        work_tiles=work_tiles,
        visible_key_tiles=visible,
        skipped_key_tiles=skipped,
        smem_bytes=resolved.choice.smem_bytes,
        registers=meta.get("registers"),
        spill_bytes=meta.get("spill_bytes"),
        note="; ".join(notes),
    )


def _grid(resolved: ResolvedFwd, work_tiles: int | None, target: Target) -> int | None:
    if resolved.is_empty:
        return 0
    if resolved.problem.varlen_q:
        return target.num_sms
    return None if work_tiles is None else min(work_tiles, target.num_sms)


def _count_tiles(resolved: ResolvedFwd, extras: Extras) -> tuple[int, int, int]:
    """(work tiles over all heads, visible key tiles of one head, skipped key tiles of one head)."""
    shapes, problem, tiles = resolved.shapes, resolved.problem, resolved.choice.tiles
    block_info = BlockInfo(
        tiles.tile_m,
        tiles.tile_n,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        window_size_left=resolved.window_left,
        window_size_right=resolved.window_right,
        qhead_per_kvhead_packgqa=problem.packed_heads,
    )
    cu_seqlens = [None if x is None else x.tolist() for x in extras[1:3]]
    seqused = [None if x is None else x.tolist() for x in extras[3:5]]
    query_tiles = visible = total = 0
    for batch_idx in range(shapes.batch):
        slot = SeqlenInfoQK.create(batch_idx, shapes.seqlen_q, shapes.seqlen_k, *cu_seqlens)
        used = SeqlenInfoQK.create(
            batch_idx, shapes.seqlen_q, shapes.seqlen_k, *cu_seqlens, *seqused
        )
        m_blocks = -(-slot.seqlen_q * problem.packed_heads // tiles.tile_m)
        query_tiles += m_blocks
        total += m_blocks * -(-used.seqlen_k // tiles.tile_n)
        for m_block in range(m_blocks):
            first, end = block_info.get_n_block_min_max(used, m_block)
            visible += end - first
    return query_tiles * (shapes.heads_q // problem.packed_heads), visible, total - visible
