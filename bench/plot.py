"""python -m bench.plot [ROWS] [--readme]: the figures and tables that the pages show.

Draws docs/figures/ from rows (the masks in it from their builders), and with
--readme writes what stands between the markers

    <!-- rows: NAME -->
    <!-- end of NAME -->

of README.md and docs/results.md. The same rows give the same bytes; what no row says is left out.
Figures need matplotlib (extra `plot`), the tables do not. They come out the same, to the byte, of
the same rows and the same matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import ROOT, Json, name_of, peer_of
from bench.masks import MASKS
from bench.paper import table_name
from bench.rows import RESULTS, read_rows
from bench.tables import DIRECTIONS, PEER_LABELS, Figures, headline, headline_means

if TYPE_CHECKING:
    from flash_mask_cute import ColumnMask

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
Rows = Sequence[Json]
# Ids inside an svg are hashes; text stays text, so that no font is copied into the file.
SETTINGS = {
    "svg.hashsalt": "flash_mask_cute",
    "svg.fonttype": "none",
    # one font, not a list of a dozen at each text
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 100,
}
# No date, and for png no program either.
METADATA: dict[str, dict[str, None]] = {"svg": {"Date": None}, "png": {"Software": None}}


def subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """(figure, array of axes (rows, columns)); options as of `matplotlib.pyplot.subplots`."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(SETTINGS)
    return plt.subplots(rows, columns, squeeze=False, **options)


def save(figure: Any, path: str) -> None:
    """Write an svg or a png, by the end of the path, and let go of the figure."""
    plt: Any = importlib.import_module("matplotlib.pyplot")
    kind = path.rpartition(".")[2]
    figure.savefig(path, metadata=METADATA[kind])
    plt.close(figure)
    if kind == "svg":
        written = Path(path)
        written.write_text(smaller_svg(written.read_text()))


def smaller_svg(text: str) -> str:
    """The same picture in half of the text: no metadata, unused ids, or digits past a hundredth."""
    program = r"<metadata>.*?(Matplotlib v[\d.]+).*?</metadata>"
    text = re.sub(program, r"<!-- \1 -->", text, flags=re.DOTALL)
    long = r"scale\([^)]*\)|(?<![\w.#])(-?\d+\.\d{3,})(?![\w.])"
    text = re.sub(long, lambda found: f"{float(found[1]):.2f}" if found[1] else found[0], text)
    text = re.sub(r"\n +", "\n", text)
    used = set(re.findall(r"#([\w.]+)", text))
    text = re.sub(r' id="([\w.]+)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r' d="[^"]*"', lambda found: re.sub(r" ?\n", "", found[0]), text)


# -- figures of rows -----------------------------------------------------------------------------


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


# -- the picture of masks ------------------------------------------------------------------------

TOKENS, TILE = 512, 32
COLUMNS = 5
# Not multiples of a tile, as lengths of documents seldom are.
DOCUMENTS = (210, 120, 182)


def named_masks() -> dict[str, ColumnMask]:
    """What is drawn, by name of its builder."""
    import torch

    from flash_mask_cute import builders

    n, window = TOKENS, 100
    return {
        "full": builders.full(n),
        "causal": builders.causal(n),
        "sliding_window": builders.sliding_window(n, window),
        "sink_window": builders.sink_window(n, sinks=40, window=window),
        "causal_document": builders.causal_document(DOCUMENTS),
        "document": builders.document(DOCUMENTS),
        "share_question": builders.share_question([[110, 60, 130], [80, 70, 62]]),
        "global_sliding_window": builders.global_sliding_window(n, 40, window=70),
        "causal_blockwise": builders.causal_blockwise([120, 90, 150, 152]),
        "prefix_lm_causal": builders.prefix_lm_causal(n, prefix=200),
        "prefix_lm_document": builders.prefix_lm_document(DOCUMENTS, prefixes=[90, 50, 80]),
        "qk_sparse": builders.qk_sparse(n, dropped=[(70, 110), (260, 150)]),
        "prefix_tree": builders.prefix_tree([-1, 0, 1, 1, 0, 4], [120, 60, 90, 70, 80, 92]),
        "image_blocks": builders.image_blocks(
            torch.tensor([-1, 0, -1, 1]).repeat_interleave(torch.tensor([100, 120, 130, 162]))
        ),
        "block_diffusion": builders.block_diffusion(n // 2, 64),
        "random_eviction": builders.random_eviction(
            n, cache_size=256, generator=torch.Generator("cpu").manual_seed(0)
        ),
    }


def draw_masks(path: str) -> None:
    """The picture of masks by name, small enough that single tiles can be told apart."""
    from flash_mask_cute import plot

    masks = named_masks()
    rows = -(-len(masks) // COLUMNS)
    figure, grid = subplots(rows, COLUMNS, figsize=(10, 2.25 * rows), layout="constrained")
    panels = list(grid.flat)
    legend: Any = None
    for panel, (name, mask) in zip(panels, masks.items(), strict=False):
        plot(mask, tile_m=TILE, tile_n=TILE, ax=panel)
        # what each panel would repeat is said once
        legend = panel.get_legend()
        legend.remove()
        panel.set(title="", xlabel="", ylabel="", xticks=[], yticks=[], aspect="equal")
        panel.set_title(name, fontsize=8.5)
    for panel in panels[len(masks) :]:
        panel.set_axis_off()
    handles = legend.legend_handles
    labels = [text.get_text() for text in legend.get_texts()]
    panels[-1].legend(handles, labels, loc="center", frameon=False, title=f"{TILE} x {TILE} tiles")
    save(figure, path)


# -- pages ---------------------------------------------------------------------------------------


def draw_all(rows: Rows, folder: Path) -> None:
    """ImportError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_speed(rows, 128, str(folder / "speed_d128.svg"))
    draw_masks(str(folder / "masks.svg"))


def _speed(rows: Rows) -> str:
    alt = "TFLOP/s of twelve masks: ours, flash-attn-4 and FlexAttention, forward and backward"
    return f"![{alt}](docs/figures/speed_d128.svg)\n\n{headline_means(rows, 128)}"


# What stands between the markers of a page, by name.
PAGES: dict[str, dict[str, Callable[[Rows], str]]] = {
    "README.md": {"headline": _speed},
    "docs/results.md": {
        "d128": lambda rows: headline(rows, 128),
        "d64": lambda rows: headline_means(rows, 64),
    },
}


def fill(page: str, text: str, rows: Rows) -> str:
    """A page's `text` with what rows say between its markers. ValueError where one is missing."""
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
