"""python -m bench.plot [ROWS] [--readme]: the figures and tables that the pages show.

Draws docs/figures/ from rows (the masks in it from their builders, by `bench.gallery`), and with
--readme writes what stands between the markers

    <!-- rows: NAME -->
    <!-- end of NAME -->

of README.md and docs/results.md. The same rows give the same bytes; what no row says is left out.
Figures need matplotlib (extra `plot`), the tables do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import ROOT, Json, gallery, name_of, peer_of
from bench.figure import save, subplots
from bench.linearity import draw as draw_sweeps
from bench.linearity import sweeps
from bench.masks import MASKS
from bench.paper import table_name
from bench.prep import block_mask_bytes, dense_mask_bytes, interval_bytes
from bench.report import cudnn_table
from bench.rows import RESULTS, read_rows
from bench.tables import DIRECTIONS, PEER_LABELS, Figures, headline

FOLDER = ROOT / "docs" / "figures"
COLOURS = {
    "ours": "#1b6ca8",
    "fa4": "#e07b39",
    "fa4_mask_mod": "#f2b880",
    "flex": "#7a9e4b",
    "flex_flash": "#b5cc94",
    "cudnn": "#8f6bb3",
    "sdpa_dense": "#8c8c8c",
}
SHOWN_PEERS, SHOWN_LENGTHS = ("ours", "fa4", "fa4_mask_mod", "flex"), ("8k", "32k")
WAYS = dict(zip(DIRECTIONS, ("forward", "backward"), strict=True))
MEMORY_TOKENS = tuple(2**power for power in range(12, 21))
Rows = Sequence[Json]


def draw_speed(rows: Rows, d: int, path: str) -> None:
    """TFLOP/s by mask, ours beside FlexAttention and flash-attn-4: a panel for each direction and
    length. flash-attn-4 computes a mask by its own flags where it has them, else by a mask_mod with
    block lists. Each bar is of the latest run of its peer."""
    figure, panels = subplots(len(WAYS), len(SHOWN_LENGTHS), figsize=(10, 5.2), sharex=True,
                              layout="constrained")  # fmt: skip
    shown: dict[str, Any] = {}
    for line, (way, words) in zip(panels, WAYS.items(), strict=True):
        for panel, size in zip(line, SHOWN_LENGTHS, strict=True):
            found = [_beside(rows, d, size, mask, way) for mask in MASKS]
            shown |= _bars(panel, found, way)
            panel.set_title(f"{words}, {size[:-1]}K tokens, d={d}", fontsize=9, loc="left")
        line[0].set_ylabel("TFLOP/s")
    names = [mask.replace("_", " ") for mask in MASKS]
    for panel in panels[-1]:
        panel.set_xticks(range(len(MASKS)), names, rotation=40, ha="right", fontsize=8)
    if shown:
        ordered = [peer for peer in SHOWN_PEERS if peer in shown]
        handles, labels = [shown[peer] for peer in ordered], [PEER_LABELS[p] for p in ordered]
        figure.legend(handles, labels, loc="outside upper right", ncols=len(ordered))
    save(figure, path)


def _beside(rows: Rows, d: int, size: str, mask: str, way: str) -> dict[str, Json]:
    """The row of each shown peer, none without one of ours."""
    names = [table_name(d, size, mask, is_backward=way == "bwd")]
    found = {peer: row for peer, row in Figures(rows).of(names[0]).items() if peer in SHOWN_PEERS}
    if found and "fa4_mask_mod" not in found and "fa4" not in found:
        # measured as a case of callables
        callable_name = f"mod-d{d}-{size}-{mask}"
        name = f"bwd-{callable_name}" if way == "bwd" else callable_name
        for row in rows:
            if name_of(row) == name and row["variant"] == "loop" and peer_of(row) == "fa4_mask_mod":
                found["fa4_mask_mod"] = row
    return found


def _bars(panel: Any, found: Sequence[Mapping[str, Json]], way: str) -> dict[str, Any]:
    """Bars side by side for each of `found`; a handle for each peer."""
    peers = [peer for peer in SHOWN_PEERS if any(peer in by_peer for by_peer in found)]
    if not peers:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color="0.5")
        return {}
    width = 0.8 / max(map(len, found))
    handles = {}
    for place, by_peer in enumerate(found):
        ordered = [peer for peer in SHOWN_PEERS if peer in by_peer]
        for i, peer in enumerate(ordered):
            left = place + (i - len(ordered) / 2) * width
            options = {"align": "edge", "color": COLOURS[peer], "clip_on": False}
            handles[peer] = panel.bar(left, by_peer[peer][way], width, **options)
    return handles


def remembered(rows: Rows) -> dict[str, dict[int, int]]:
    """Bytes measured of a forward by peer and length, of rows of kind memory; the latest count."""
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        if row["kind"] == "memory" and "bytes" in row:
            found.setdefault(peer_of(row), {})[row["n"]] = row["bytes"]
    return found


def draw_memory(rows: Rows, path: str) -> None:
    """Bytes of a mask by length: lines by formula, marks measured."""
    figure, panels = subplots(1, 1, figsize=(6.5, 4.2), layout="constrained")
    panel = panels[0][0]
    tokens = np.array(MEMORY_TOKENS)
    lines: dict[str, tuple[str, Callable[[int], int]]] = {
        "sdpa_dense": ("dense mask, a byte a pair", dense_mask_bytes),
        "flex": ("FlexAttention's block mask", block_mask_bytes),
        "ours": ("column intervals and their bounds", interval_bytes),
    }
    measured = remembered(rows)
    for peer, (label, size) in lines.items():
        panel.plot(tokens, [size(n) for n in MEMORY_TOKENS], color=COLOURS[peer], label=label)
    for peer in (peer for peer in PEER_LABELS if peer in measured):
        points = sorted(measured[peer].items())
        options = {"color": COLOURS[peer], "marker": "o", "linestyle": "none"}
        panel.plot(*zip(*points, strict=True), label=f"{PEER_LABELS[peer]}, measured", **options)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(tokens, [_tokens(n) for n in MEMORY_TOKENS])
    panel.set_xlabel("tokens of a sequence")
    panel.set_ylabel("bytes")
    panel.legend(frameon=False)
    save(figure, path)


def _tokens(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"


def draw_all(rows: Rows, folder: Path) -> None:
    """ImportError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_speed(rows, 128, str(folder / "speed_d128.svg"))
    draw_memory(rows, str(folder / "memory.svg"))
    if found := sweeps(rows):
        draw_sweeps(found, str(folder / "sparsity.svg"))
    gallery.draw(str(folder / "masks.svg"))


def _speed(rows: Rows) -> str:
    alt = "TFLOP/s of twelve masks: ours, flash-attn-4 and FlexAttention, forward and backward"
    return f"![{alt}](docs/figures/speed_d128.svg)\n\n{headline(rows, 128)}"


# What stands between the markers of a page, by name.
PAGES: dict[str, dict[str, Callable[[Rows], str]]] = {
    "README.md": {"headline": _speed},
    "docs/results.md": {"d64": lambda rows: headline(rows, 64), "cudnn": cudnn_table},
}


def fill(page: str, text: str, rows: Rows) -> str:
    """`text`, the page of that name in PAGES, with what the rows say between its markers.

    Raises ValueError where a marker is missing.
    """
    for name, make in PAGES[page].items():
        begin, end = f"<!-- rows: {name} -->\n", f"<!-- end of {name} -->"
        before, was_begun, rest = text.partition(begin)
        _, was_ended, after = rest.partition(end)
        if not was_begun or not was_ended:
            raise ValueError(f"{page} has no markers for {name}")
        text = f"{before}{begin}\n{make(rows)}\n\n{end}{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.plot", description="Figures out of rows.")
    parser.add_argument("rows", nargs="?", default=str(RESULTS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the figures")
    parser.add_argument("--readme", action="store_true", help="also fill README and results page")
    args = parser.parse_args(argv)
    rows = read_rows(args.rows)
    if args.readme:
        for page in PAGES:
            path = ROOT / page
            path.write_text(fill(page, path.read_text(), rows))
    if importlib.util.find_spec("matplotlib") is None:
        sys.stdout.write("no figure is drawn: matplotlib (extra `plot`) is not installed\n")
        return 1
    draw_all(rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
