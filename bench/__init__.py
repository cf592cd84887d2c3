"""Speed of flash_mask_cute against its peers, on one GPU: see docs/benchmarking.md.

Commands are the tables of cases (run, flex, decode, parallel, selected, block_sparse, statistics,
trees), whose runner is in runner, and compare, report, plot, codegen, and end_to_end, a folder of
its own. What bench.run measures is in cases (masks, mods, everyday, cudnn_cases, paper, sweep), who
takes part in peers, whether results are right in gate (by oracle), how time is taken in timing,
what was found in rows.

Here: the rows themselves, where they come from, and the table of a run. A row is one figure; its
`note` starts with the name of its case.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import BenchCase
from bench.flops import sparsity, tflops

ROOT = Path(__file__).resolve().parents[1]
Json = dict[str, Any]
# A peer whose rows are those of ours with `deterministic` set.
DETERMINISTIC = "ours_deterministic"
VERSIONS = {
    "torch": "torch",
    "triton": "triton",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "flash_attn_4": "flash-attn-4",
    "cudnn_frontend": "nvidia-cudnn-frontend",
    "flash_attn_3": "tokenspeed-fa3",
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


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def why_no_gpu(command: str) -> str | None:
    """One line where torch sees no GPU, which `command` needs; None where there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return f"python -m {command} needs a GPU, and torch {torch.__version__}, {build}, sees none"


def tells_code(commit: str) -> bool:
    """Whether what `commit_here` found, of two runs, means that they measured the same code."""
    return commit != "unknown" and not commit.endswith("+")


def row_of(
    case: BenchCase, peer: str, variant: str, value: float | None, remarks: Sequence[str]
) -> Json:
    """The row of one figure (ms for attention, else us), less what a run has in common.

    Without a value there is no figure: the remarks say why. A backward is a row of kind "attention"
    with figures of the other direction.
    """
    is_ours = peer in ("ours", DETERMINISTIC)
    direction = "bwd" if case.kind == "backward" else "fwd"
    extra = [f"d_v={case.d_v}"] if case.d_v != case.d else []
    extra += [f"window={case.window}"] if case.window is not None else []
    extra += [f"n_k={case.n_k}"] if case.n_k else []
    extra += ["sink"] if case.sink else []
    extra += [f"softcap={case.softcap}"] if case.softcap else []
    extra += [f"score_mod={case.score_mod}"] if case.score_mod else []
    extra += [case.form] if case.form != "native" and is_ours else []
    row = {key: getattr(case, key) for key in ("kind", "mask", "d", "n", "tokens")}
    if direction == "bwd":
        row["kind"] = "attention"
    row |= {key: getattr(case, key) for key in ("heads", "heads_kv", "dtype")}
    row |= {"peer": "ours" if is_ours else peer, "variant": variant}
    row["deterministic"] = peer == DETERMINISTIC
    row["sparsity"] = round(sparsity(case), 4)
    if value is None:
        pass
    elif case.kind in ("attention", "backward"):
        rate = round(tflops(case, value), 2)
        row |= {f"{direction}_ms": round(value, 5), direction: rate}
    else:
        row["us"] = round(value, 2)
    row["note"] = "; ".join([case.name, *extra, *(remark for remark in remarks if remark)])
    return row


def name_of(row: Json) -> str:
    """The case of a row."""
    name: str = row["note"].partition(";")[0]
    return name


def peer_of(row: Json) -> str:
    """The peer that `row_of` was told."""
    peer: str = row["peer"]
    return DETERMINISTIC if peer == "ours" and row["deterministic"] else peer


def format_table(rows: Sequence[Json]) -> str:
    """A line for each case and peer of a run: `variant ours / peer = ratio`, TFLOP/s or us."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        value = next((row[key] for key in ("fwd", "bwd", "us") if key in row), None)
        if value is not None and row["variant"] != "sweep":
            variants = cells.setdefault((row["run"], name_of(row)), {})
            variants.setdefault(row["variant"], {})[peer_of(row)] = value
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
