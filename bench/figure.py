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
        # indentation is a sixth of the file
        written = Path(path)
        written.write_text(re.sub(r"\n +", "\n", written.read_text()))
