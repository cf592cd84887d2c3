"""The rows of the paper's cases as tables: the layout of its Tables 4 to 9, and the README's; and
those of everyday shapes.

A figure of ours comes from the latest run that has it, with flash-attn-4's causal attention of that
size beside it if any run does, or from one of the same commit that has the other direction as well;
one of a peer from that same run where the run has it, else from the latest that does. Each line
names its runs, by a letter. Only figures of one run may be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench import Json, name_of, peer_of, tells_code
from bench.everyday import SHAPES, Shape
from bench.masks import MASKS
from bench.paper import DIMS, LENGTHS, table_name, table_names

PEER_LABELS = {
    "ours": "flash_mask_cute",
    "fa4": "flash-attn-4",
    "fa4_mask_mod": "flash-attn-4, mask_mod",
    "flex": "FlexAttention",
    "flex_flash": "FlexAttention, FLASH",
    "cudnn": "cuDNN",
    "cudnn_flex": "cudnn.flex_attention",
    "sdpa_dense": "SDPA, dense mask",
}
DIRECTIONS = ("fwd", "bwd")
COLUMNS = (
    *("mask", "method", "fw ms", "bw ms", "total ms", "fw TFLOP", "bw TFLOP", "total TFLOP"),
    *("fw TFLOP/s", "bw TFLOP/s", "total TFLOP/s", "sparsity", "runs"),
)
NOTHING = "-"
# A call that takes less may cost the host more than the device, and flatter whom it costs less.
HOST_MS = 0.5
SHAPE_NAMES = tuple(s.case_name(is_backward=way) for s in SHAPES for way in (False, True))
SHAPE_COLUMNS = (
    *("shape", "heads", "d", "forward", "flash-attn-4", "cuDNN", "ratio"),
    *("backward", "flash-attn-4", "cuDNN", "ratio", "runs"),
)


class Figures:
    """What the rows say of the table's cases. by_run: rows by case, run and peer."""

    def __init__(self, rows: Sequence[Json]) -> None:
        self.by_run: dict[str, dict[str, dict[str, Json]]] = {}
        wanted = set(table_names())
        for row in rows:
            if row["variant"] == "loop" and name_of(row) in wanted:
                runs = self.by_run.setdefault(name_of(row), {})
                runs.setdefault(row["run"], {})[peer_of(row)] = row

    def of(self, name: str) -> dict[str, Json]:
        """The row of each peer, in the order of PEER_LABELS; none without a figure of ours."""
        runs = self.by_run.get(name, {})
        run = self._run_of_ours(name)
        if run is None:
            return {}
        found = dict(runs[run])
        for other in reversed(runs.values()):
            found = other | found
        return {peer: found[peer] for peer in PEER_LABELS if peer in found}

    def _run_of_ours(self, name: str) -> str | None:
        runs = {
            run: found["ours"]
            for run, found in self.by_run.get(name, {}).items()
            if "ours" in found
        }
        if not runs:
            return None
        compared = self.by_run.get(f"{name.rpartition('-')[0]}-causal", {})
        runs = {run: row for run, row in runs.items() if "fa4" in compared.get(run, {})} or runs
        latest = list(runs)[-1]
        other_way = name.removeprefix("bwd-") if name.startswith("bwd-") else f"bwd-{name}"
        others = self.by_run.get(other_way, {})
        both = [
            run
            for run, row in runs.items()
            if row["commit"] == runs[latest]["commit"] and "ours" in others.get(run, {})
        ]
        return both[-1] if both else latest

    def together(self, name: str) -> dict[str, Json]:
        """As `of`, of the run of ours alone: what may stand in one picture."""
        found = self.of(name)
        return {peer: row for peer, row in found.items() if row["run"] == found["ours"]["run"]}

    def reference(self, row: Json, d: int, size: str, direction: str) -> Json | None:
        """flash-attn-4's native causal attention of the same size, in the run of `row`."""
        name = table_name(d, size, "causal", is_backward=direction == "bwd")
        return self.by_run.get(name, {}).get(row["run"], {}).get("fa4")


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """An aligned table; all columns after the first `left` ones hold numbers."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join((line(header), line(rule), *map(line, lines)))


class Letters:
    """A letter for each run, in the order of their first use, and what they stand for."""

    def __init__(self) -> None:
        self._runs: dict[str, Json] = {}

    def of(self, row: Json) -> str:
        self._runs.setdefault(row["run"], row)
        return _letter(list(self._runs).index(row["run"]))

    def legend(self) -> list[str]:
        return [
            f"{_letter(number)}: run {run}, commit {row['commit']}, {row['gpu']}, "
            + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            for number, (run, row) in enumerate(self._runs.items())
        ]


def _letter(number: int) -> str:
    first, second = divmod(number, 26)
    return (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + second)


class Sums(NamedTuple):
    """Milliseconds and operations (in TFLOP) of a direction or of both; None: not measured."""

    ms: float | None
    tflop: float | None

    @classmethod
    def create(cls, row: Json | None, direction: str) -> Sums:
        if row is None:
            return cls(None, None)
        ms = row[f"{direction}_ms"]
        return cls(ms, ms * row[direction] / 1e3)

    def plus(self, other: Sums) -> Sums:
        if None in (*self, *other):
            return Sums(None, None)
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[operator]

    def cells(self) -> tuple[str, str, str]:
        """ms, TFLOP, TFLOP/s."""
        if self.ms is None or self.tflop is None:
            return NOTHING, NOTHING, NOTHING
        return f"{self.ms:.2f}", f"{self.tflop:.2f}", f"{self.tflop / self.ms * 1e3:.1f}"


def _lines(figures: Figures, d: int, size: str, letters: Letters) -> Iterator[list[str]]:
    for mask in MASKS:
        ways = [
            figures.of(table_name(d, size, mask, is_backward=way == "bwd")) for way in DIRECTIONS
        ]
        for peer in (peer for peer in PEER_LABELS if any(peer in found for found in ways)):
            rows = [found.get(peer) for found in ways]
            forward, backward = (
                Sums.create(row, way) for row, way in zip(rows, DIRECTIONS, strict=True)
            )
            known = [row for row in rows if row is not None]
            is_one_run = len({row["run"] for row in known}) == 1
            total = forward.plus(backward) if is_one_run else Sums(None, None)
            by_column = zip(*(sums.cells() for sums in (forward, backward, total)), strict=True)
            yield [
                mask.replace("_", " "),
                PEER_LABELS[peer],
                *(cell for column in by_column for cell in column),
                f"{known[0]['sparsity']:.2f}",
                " ".join(NOTHING if row is None else letters.of(row) for row in rows),
            ]


def paper_tables(rows: Sequence[Json]) -> str:
    """Markdown: for each head dimension and length a table, then what its runs were.

    Totals stand where forward and backward are of one run.
    """
    figures, parts = Figures(rows), []
    for d in DIMS:
        for size in LENGTHS:
            letters = Letters()
            if lines := list(_lines(figures, d, size, letters)):
                legend = "\n".join(f"- {line}" for line in letters.legend())
                parts.append(
                    f"### d={d}, {size[:-1]}K tokens\n\n{markdown(COLUMNS, lines, 2)}\n\n{legend}"
                )
    return "\n\n".join(parts)


def headline(rows: Sequence[Json], d: int = 128) -> str:
    """Markdown: TFLOP/s of ours by mask, length and direction, and in brackets their ratio to
    flash-attn-4's native causal attention of the same direction and size in the same run."""
    figures = Figures(rows)
    header = ["mask"]
    header += [f"{way} {size[:-1]}K" for way in ("forward", "backward") for size in LENGTHS]
    lines = []
    for mask in MASKS:
        cells = [mask.replace("_", " ")]
        for way in DIRECTIONS:
            for size in LENGTHS:
                found = figures.of(table_name(d, size, mask, is_backward=way == "bwd"))
                cells.append(_headline_cell(figures, found.get("ours"), d, size, way))
        lines.append(cells)
    return markdown(header, lines, 1)


def _headline_cell(figures: Figures, row: Json | None, d: int, size: str, way: str) -> str:
    if row is None:
        return NOTHING
    causal = figures.reference(row, d, size, way)
    return f"{row[way]:.0f}" + (f" ({row[way] / causal[way]:.2f})" if causal else "")


class Comparison(NamedTuple):
    """Figures of one run in one mode: of ours, and of the peer that it is held against."""

    ours: Json
    rival: Json
    rows: Mapping[str, Json]

    def ratio(self, direction: str) -> float:
        """How many times as fast ours is."""
        key = f"{direction}_ms"
        ratio: float = self.rival[key] / self.ours[key]
        return ratio


class ShapeFigures:
    """What the rows say of everyday shapes, or of the cases of these names.

    Figures are those of `loop`, or where the call of any peer takes less than HOST_MS, those of
    `short`, which the host's cost is not in. Ours is held against the first of `rivals`, or where
    that has no row in a run in which it took part, against the next.
    """

    def __init__(
        self,
        rows: Sequence[Json],
        names: Sequence[str] = SHAPE_NAMES,
        rivals: Sequence[str] = ("fa4", "cudnn"),
    ) -> None:
        self._by_run: dict[str, dict[str, dict[str, dict[str, Json]]]] = {}
        wanted, self._rivals = set(names), rivals
        self._runs_of_first: set[str] = set()
        for row in rows:
            if row["variant"] in ("loop", "short") and name_of(row) in wanted:
                by_case = self._by_run.setdefault(row["run"], {})
                by_mode = by_case.setdefault(name_of(row), {})
                by_mode.setdefault(row["variant"], {})[peer_of(row)] = row
                if row["peer"] == rivals[0]:
                    self._runs_of_first.add(row["run"])

    def comparisons(self, name: str, direction: str) -> list[Comparison]:
        """Of all runs that have one, of the last commit with such a run; the latest run first."""
        found: list[Comparison] = []
        for run in reversed(self._by_run):
            comparison = self._comparison(run, name, f"{direction}_ms")
            if comparison is None:
                continue
            commit = comparison.ours["commit"]
            if found and commit != found[0].ours["commit"]:
                continue
            found.append(comparison)
            if not tells_code(commit):
                break
        return found

    def _comparison(self, run: str, name: str, key: str) -> Comparison | None:
        by_mode = self._by_run[run].get(name, {})
        rows = by_mode.get("loop", {})
        if rows and min(row[key] for row in rows.values()) < HOST_MS:
            rows = by_mode.get("short", {})
        rivals = self._rivals if run in self._runs_of_first else self._rivals[:1]
        rival = next((rows[peer] for peer in rivals if peer in rows), None)
        if "ours" not in rows or rival is None:
            return None
        return Comparison(rows["ours"], rival, rows)


def _shape_cells(found: Sequence[Comparison], direction: str) -> list[str]:
    """TFLOP/s of ours, flash-attn-4 and cuDNN in the latest run, and ours over its rival."""
    if not found:
        return [NOTHING] * 4
    rows = found[0].rows
    rates = (
        f"{rows[p][direction]:.0f}" if p in rows else NOTHING for p in ("ours", "fa4", "cudnn")
    )
    return [*rates, f"{found[0].ratio(direction):.2f}"]


def _shape_line(figures: ShapeFigures, shape: Shape, letters: Letters) -> list[str] | None:
    ways = [
        figures.comparisons(shape.case_name(is_backward=way == "bwd"), way) for way in DIRECTIONS
    ]
    if not any(ways):
        return None
    of_v = "" if shape.head_dim_v == shape.head_dim else f"/{shape.head_dim_v}"
    cells = (_shape_cells(found, way) for found, way in zip(ways, DIRECTIONS, strict=True))
    runs = (_run_mark(found, letters) for found in ways)
    return [
        f"{shape.name}, {shape.mask}",
        f"{shape.heads}/{shape.heads_kv}",
        f"{shape.head_dim}{of_v}",
        *(cell for of_way in cells for cell in of_way),
        " ".join(runs),
    ]


def _run_mark(found: Sequence[Comparison], letters: Letters) -> str:
    """The run's letter, with a star where its figures are of short bursts."""
    if not found:
        return NOTHING
    ours = found[0].ours
    return letters.of(ours) + ("*" if ours["variant"] == "short" else "")


def shape_table(rows: Sequence[Json]) -> str:
    """Markdown: TFLOP/s of everyday shapes in both directions, each direction of one run, and what
    the runs were. Shapes without a comparison are left out."""
    figures, letters = ShapeFigures(rows), Letters()
    lines = [line for shape in SHAPES if (line := _shape_line(figures, shape, letters))]
    if not lines:
        return "No everyday shape is among the rows."
    legend = [f"- {line}" for line in letters.legend()]
    if any("*" in line[-1] for line in lines):
        legend.append(f"- \\*: single bursts of ten calls, where a call takes under {HOST_MS} ms")
    return "\n\n".join((markdown(SHAPE_COLUMNS, lines, 1), "\n".join(legend)))
