"""Speed of flash_mask_cute against its peers, on one GPU.

cases    what is measured: shapes, masks, inputs
flops    how many operations a case is charged for (numpy only)
peers    who is measured, and the check that each of them computes the case's function
timing   how time is taken
run      `python -m bench.run`: gates, times, appends rows to bench/results/<gpu>.jsonl

Here: the rows themselves, where they come from, and the table of a run. A row is one figure, one
JSON object on a line; it is appended, never edited. Its `note` starts with the name of its case.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import BenchCase
from bench.flops import sparsity, tflops

ROOT = Path(__file__).resolve().parents[1]
Json = dict[str, Any]
VERSIONS = {
    "torch": "torch",
    "triton": "triton",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "flash_attn_4": "flash-attn-4",
}


def versions() -> dict[str, str]:
    found = {}
    for key, package in VERSIONS.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_here() -> str:
    """Short hash, with a `+` where the package differs from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--", "flash_mask_cute") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def row_of(case: BenchCase, peer: str, variant: str, value: float, remarks: Sequence[str]) -> Json:
    """The row of one figure (ms for attention, else us), less what a run has in common."""
    extra = [f"d_v={case.d_v}"] if case.d_v != case.d else []
    extra += [f"window={case.window}"] if case.window is not None else []
    extra += [f"softcap={case.softcap}"] if case.softcap else []
    row = {key: getattr(case, key) for key in ("kind", "mask", "d", "n", "tokens")}
    row |= {key: getattr(case, key) for key in ("heads", "heads_kv", "dtype")}
    row |= {"peer": peer, "variant": variant, "deterministic": False}
    row["sparsity"] = round(sparsity(case), 4)
    if case.kind == "attention":
        row |= {"fwd_ms": round(value, 5), "fwd": round(tflops(case, value), 2)}
    else:
        row["us"] = round(value, 2)
    row["note"] = "; ".join([case.name, *extra, *(remark for remark in remarks if remark)])
    return row


def format_table(rows: Sequence[Json]) -> str:
    """A line for each case and peer: `variant ours / peer = ratio`, TFLOP/s or us.

    Rows of different runs never meet in one line.
    """
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        variants = cells.setdefault((row["run"], row["note"].partition(";")[0]), {})
        value = row["fwd"] if "fwd" in row else row["us"]
        variants.setdefault(row["variant"], {})[row["peer"]] = value
    lines = []
    for (_, name), variants in cells.items():
        seen = dict.fromkeys(peer for by_peer in variants.values() for peer in by_peer)
        for peer in [peer for peer in seen if peer != "ours"] or ["ours"]:
            parts = [f"{name:28} {peer:6}"]
            for variant, by_peer in variants.items():
                pair = ("ours", peer) if peer != "ours" else ("ours",)
                shown = " / ".join(f"{by_peer[p]:.1f}" if p in by_peer else "-" for p in pair)
                if peer != "ours" and {*pair} <= by_peer.keys():
                    shown += f" = {by_peer['ours'] / by_peer[peer]:.3f}"
                parts.append(f"{variant} {shown}")
            lines.append("  ".join(parts))
    return "\n".join(lines)
