"""What runs say: a table, and whether their losses agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench import Json

# How far losses of two implementations may be apart, as a part of the larger one. In bf16 states by
# two kernels differ by rounding. In the mean over all tokens this is nothing. A DPO loss is of few
# sums over the tokens of an answer, and a reward is of one token.
LIMITS = {"sft": 1e-3, "lora": 1e-3, "dpo": 1e-2, "rm": 1e-2}
LIMIT_OF_FP32 = 1e-4
WORKLOAD = ("task", "model", "tiny", "layers", "tokens", "docs", "steps", "device")
COLUMNS = (
    *("impl", "tokens/s", "step s", "first step s", "peak GB"),
    *("mask MB", "mask ms", "attention", "rows", "loss"),
)


def workloads(rows: Sequence[Json]) -> Iterator[tuple[Json, list[Json]]]:
    """What is compared: runs of the same workload, the last one of each implementation."""
    found: dict[tuple[Any, ...], dict[str, Json]] = {}
    for row in rows:
        key = tuple(row[name] for name in WORKLOAD)
        found.setdefault(key, {})[row["impl"]] = row
    for key, by_impl in found.items():
        yield dict(zip(WORKLOAD, key, strict=True)), list(by_impl.values())


def table(rows: Sequence[Json]) -> str:
    """Markdown: a table for each workload."""
    parts = []
    for workload, runs in workloads(rows):
        size = "tiny " if workload["tiny"] else ""
        title = (
            f"{workload['task']}, {size}{workload['model']}, {workload['layers']} layers, "
            f"{workload['tokens']} tokens, documents of {workload['docs']}, {workload['device']}"
        )
        lines = [title, "", _line(COLUMNS), _line(["---"] + ["---:"] * (len(COLUMNS) - 1))]
        parts.append("\n".join(lines + [_line(cells(row)) for row in runs]))
    return "\n\n".join(parts)


def cells(row: Json) -> list[str]:
    if "left_out" in row:
        return [row["impl"], row["left_out"], *[""] * (len(COLUMNS) - 2)]
    peak = row["peak_bytes"]
    return [
        row["impl"],
        f"{row['tokens_s']:.0f}",
        f"{row['step_s']:.3f}",
        f"{row['first_step_s']:.1f}",
        "-" if peak is None else f"{peak / 1e9:.1f}",
        f"{row['mask_bytes'] / 1e6:.3f}",
        f"{1e3 * row['mask_s']:.1f}",
        f"{100 * row['attention_share']:.0f} %",
        str(row["rows"]),
        ", ".join(f"{loss:.4g}" for loss in row["losses"]),
    ]


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def disagreements(rows: Sequence[Json]) -> list[str]:
    """Losses that differ from those of the first implementation of their workload."""
    found = []
    for _, runs in workloads(rows):
        first, *others = [row for row in runs if "losses" in row] or [{}]
        limit = LIMIT_OF_FP32 if first.get("dtype") == "float32" else LIMITS[runs[0]["task"]]
        for row in others:
            for step, (x, y) in enumerate(zip(first["losses"], row["losses"], strict=True)):
                # of NaN, too
                if not abs(x - y) <= limit * max(abs(x), abs(y)):
                    found.append(
                        f"{row['task']}, {row['model']}: loss of step {step} is {x:.6g} with "
                        f"{first['impl']} and {y:.6g} with {row['impl']}"
                    )
    return found
