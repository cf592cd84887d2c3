"""Figures that come out the same, to the byte, of the same data and the same matplotlib.

matplotlib is the extra `plot`; it is imported when a figure is made. ImportError without it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

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
    """The same picture in half of the text: without indentation, metadata, ids that nothing refers
    to and line breaks inside paths, and with coordinates to a hundredth of a point."""
    program = r"<metadata>.*?(Matplotlib v[\d.]+).*?</metadata>"
    text = re.sub(program, r"<!-- \1 -->", text, flags=re.DOTALL)
    long = r"scale\([^)]*\)|(?<![\w.#])(-?\d+\.\d{3,})(?![\w.])"
    text = re.sub(long, lambda found: f"{float(found[1]):.2f}" if found[1] else found[0], text)
    text = re.sub(r"\n +", "\n", text)
    used = set(re.findall(r"#([\w.]+)", text))
    text = re.sub(r' id="([\w.]+)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r' d="[^"]*"', lambda found: re.sub(r" ?\n", "", found[0]), text)
