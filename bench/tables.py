"""The rows as tables: the layout of the paper's Tables 4 to 9, the README's, everyday shapes.

A figure of ours comes from the latest run that has it, with flash-attn-4's causal attention of that
size beside it if any run does, or from one of the same commit that has the other direction as well;
one of a peer from that same run where the run has it, else from the latest that does. Each line
names its runs, by a letter. Only figures of one run may be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple, TypeVar

from bench import Json, name_of, peer_of, tells_code
from bench.everyday import SHAPES, Shape
from bench.masks import MASKS
from bench.paper import DIMS, LENGTHS, table_name, table_names

T = TypeVar("T")
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
SHAPE_COLUMNS = (
    *("shape", "heads", "d", "forward", "flash-attn-4", "cuDNN", "ratio"),
    *("backward", "flash-attn-4", "cuDNN", "ratio", "runs"),
)


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
        return self._letter(list(self._runs).index(row["run"]))

    @staticmethod
    def _letter(number: int) -> str:
        first, second = divmod(number, 26)
        return (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + second)

    def legend(self) -> list[str]:
        return [
            f"- {self._letter(number)}: run {run}, commit {row['commit']}, {row['gpu']}, "
            + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            for number, (run, row) in enumerate(self._runs.items())
        ]


# -- the paper's masks ----------------------------------------------------------------------------


class Figures:
    """What the rows say of the paper's cases. by_run: rows by case, run and peer."""

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
            x: found["ours"] for x, found in self.by_run.get(name, {}).items() if "ours" in found
        }
        if not runs:
            return None
        compared = self.by_run.get(f"{name.rpartition('-')[0]}-causal", {})
        runs = {run: row for run, row in runs.items() if "fa4" in compared.get(run, {})} or runs
        latest = list(runs)[-1]
        other_way = name.removeprefix("bwd-") if name.startswith("bwd-") else f"bwd-{name}"
        others = self.by_run.get(other_way, {})
        commit = runs[latest]["commit"]
        both = [x for x in runs if runs[x]["commit"] == commit and "ours" in others.get(x, {})]
        return both[-1] if both else latest

    def reference(self, row: Json, d: int, size: str, direction: str) -> Json | None:
        """flash-attn-4's native causal attention of the same size, in the run of `row`."""
        name = table_name(d, size, "causal", is_backward=direction == "bwd")
        return self.by_run.get(name, {}).get(row["run"], {}).get("fa4")


def _cells(sums: Sequence[float] | None) -> tuple[str, str, str]:
    """ms, TFLOP and TFLOP/s, of the first two."""
    if sums is None:
        return NOTHING, NOTHING, NOTHING
    ms, tflop = sums
    return f"{ms:.2f}", f"{tflop:.2f}", f"{tflop / ms * 1e3:.1f}"


def _lines(figures: Figures, d: int, size: str, letters: Letters) -> Iterator[list[str]]:
    for mask in MASKS:
        ways = [figures.of(table_name(d, size, mask, is_backward=w == "bwd")) for w in DIRECTIONS]
        for peer in (peer for peer in PEER_LABELS if any(peer in found for found in ways)):
            rows = {way: found.get(peer) for way, found in zip(DIRECTIONS, ways, strict=True)}
            sums = [
                None if row is None else (row[f"{way}_ms"], row[f"{way}_ms"] * row[way] / 1e3)
                for way, row in rows.items()
            ]
            known = [row for row in rows.values() if row is not None]
            is_one_run = len(known) == 2 and known[0]["run"] == known[1]["run"]
            total = [sum(both) for both in zip(*filter(None, sums), strict=True)]
            by_column = zip(*map(_cells, (*sums, total if is_one_run else None)), strict=True)
            yield [
                mask.replace("_", " "),
                PEER_LABELS[peer],
                *(cell for column in by_column for cell in column),
                f"{known[0]['sparsity']:.2f}",
                " ".join(NOTHING if row is None else letters.of(row) for row in rows.values()),
            ]


def paper_tables(rows: Sequence[Json]) -> str:
    """Markdown, by head dimension and length, with the runs. Totals are of one run."""
    figures, parts = Figures(rows), []
    for d in DIMS:
        for size in LENGTHS:
            letters = Letters()
            if lines := list(_lines(figures, d, size, letters)):
                title = f"### d={d}, {size[:-1]}K tokens"
                parts += [title, markdown(COLUMNS, lines, 2), "\n".join(letters.legend())]
    return "\n\n".join(parts)


Rate = tuple[float, float | None]  # TFLOP/s, and the ratio


def _rates(figures: Figures, d: int) -> Iterator[tuple[str, list[Rate | None]]]:
    """TFLOP/s of ours by mask, direction and length; over flash-attn-4's causal ones of its run."""

    def rate(mask: str, size: str, way: str) -> Rate | None:
        row = figures.of(table_name(d, size, mask, is_backward=way == "bwd")).get("ours")
        if row is None:
            return None
        causal = figures.reference(row, d, size, way)
        return row[way], row[way] / causal[way] if causal else None

    for mask in MASKS:
        yield mask, [rate(mask, size, way) for way in DIRECTIONS for size in LENGTHS]


HEADLINE = [f"{way} {size[:-1]}K" for way in ("forward", "backward") for size in LENGTHS]


def headline(rows: Sequence[Json], d: int = 128) -> str:
    """Markdown: TFLOP/s of ours, and in brackets over flash-attn-4's causal ones of its run."""

    def cell(found: Rate | None) -> str:
        if found is None:
            return NOTHING
        return f"{found[0]:.0f}" + ("" if found[1] is None else f" ({found[1]:.2f})")

    lines = [
        [mask.replace("_", " "), *map(cell, found)] for mask, found in _rates(Figures(rows), d)
    ]
    return markdown(["mask", *HEADLINE], lines, 1)


def headline_means(rows: Sequence[Json], d: int = 128) -> str:
    """Markdown: the geometric means over the masks of `headline`, in one line."""
    columns = zip(*(found for _, found in _rates(Figures(rows), d)), strict=True)
    cells = []
    for column in columns:
        rates = [x[0] for x in column if x is not None]
        ratios = [x[1] for x in column if x is not None and x[1] is not None]
        means = [f"{geometric_mean(rates):.0f}"] if rates else [NOTHING]
        means += [f"({geometric_mean(ratios):.2f})"] if ratios else []
        cells.append(" ".join(means))
    return markdown(["mean", *HEADLINE], [["twelve masks", *cells]], 1)


# -- ours beside a peer ---------------------------------------------------------------------------


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


class Runs:
    """Rows by run, case and peer, of `loop` and the like and of `short`; the last one counts."""

    def __init__(self, rows: Sequence[Json]) -> None:
        self.by_run: dict[str, dict[str, dict[str, Json]]] = {}
        self._short: dict[str, dict[str, dict[str, Json]]] = {}
        self._runs_of_shapes: set[tuple[str, str]] = set()
        for row in rows:
            run, name, peer = row["run"], name_of(row), peer_of(row)
            is_short = row["variant"] == "short"
            if is_short or row["variant"] in ("loop", "warm", "step", "wall", "peak"):
                by_case = (self._short if is_short else self.by_run).setdefault(run, {})
                by_case.setdefault(name, {})[peer] = row
                self.by_run.setdefault(run, {})
                if "shape-" in name:
                    self._runs_of_shapes.add((run, peer))

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.by_run.values() for name in run))

    def latest(self, *wanted: tuple[str, str]) -> list[Json] | None:
        """Rows of the latest run that has all of them; each wanted is (case name, peer)."""
        for known in reversed(self.by_run.values()):
            rows = [known.get(name, {}).get(peer) for name, peer in wanted]
            if all(rows):
                return [row for row in rows if row]
        return None

    def _of_last_commit(self, find: Callable[[str], tuple[str, T] | None]) -> dict[str, T]:
        """By run, the latest first; a commit that does not tell the code counts once."""
        found: dict[str, T] = {}
        last = None
        for run in reversed(self.by_run):
            each = find(run)
            if each is None or (found and each[0] != last):
                continue
            last, found[run] = each
            if not tells_code(last):
                break
        return found

    def measured(self, key: str, *wanted: tuple[tuple[str, ...], str]) -> dict[str, list[float]]:
        """Figures by run, of the runs that have all. wanted: (names of one shape, peer)."""

        def find(run: str) -> tuple[str, list[float]] | None:
            known = self.by_run[run]
            rows = [
                [known[name][peer] for name in names if peer in known.get(name, {})]
                for names, peer in wanted
            ]
            if not all(rows):
                return None
            return rows[0][0]["commit"], [fmean(x[key] for x in of_shape) for of_shape in rows]

        return self._of_last_commit(find)

    def comparisons(
        self, name: str, direction: str, rivals: Sequence[str] = ("fa4", "cudnn")
    ) -> list[Comparison]:
        """Of `loop`, or where the call of any peer takes less than HOST_MS, of `short`, which the
        host's cost is not in. Ours is held against the first of `rivals`, or where that has no row
        in a run in which it took part in shapes, against the next."""
        key = f"{direction}_ms"

        def find(run: str) -> tuple[str, Comparison] | None:
            rows = self.by_run[run].get(name, {})
            if rows and min(row[key] for row in rows.values()) < HOST_MS:
                rows = self._short.get(run, {}).get(name, {})
            among = rivals if (run, rivals[0]) in self._runs_of_shapes else rivals[:1]
            rival = next((rows[peer] for peer in among if peer in rows), None)
            if "ours" not in rows or rival is None:
                return None
            return rows["ours"]["commit"], Comparison(rows["ours"], rival, rows)

        return list(self._of_last_commit(find).values())


def _shape_cells(found: Sequence[Comparison], direction: str) -> list[str]:
    """TFLOP/s of ours, flash-attn-4 and cuDNN in the latest run, and ours over its rival."""
    if not found:
        return [NOTHING] * 4
    rows = found[0].rows
    rates = (
        f"{rows[p][direction]:.0f}" if p in rows else NOTHING for p in ("ours", "fa4", "cudnn")
    )
    return [*rates, f"{found[0].ratio(direction):.2f}"]


def _shape_line(runs: Runs, shape: Shape, letters: Letters) -> list[str] | None:
    """A run's letter has a star where its figures are of short bursts."""
    ways = {way: runs.comparisons(shape.case_name(is_backward=way == "bwd"), way)
            for way in DIRECTIONS}  # fmt: skip
    if not any(ways.values()):
        return None
    of_v = "" if shape.head_dim_v == shape.head_dim else f"/{shape.head_dim_v}"
    marks = (
        letters.of(found[0].ours) + "*" * (found[0].ours["variant"] == "short")
        if found
        else NOTHING
        for found in ways.values()
    )
    return [
        f"{shape.name}, {shape.mask}",
        f"{shape.heads}/{shape.heads_kv}",
        f"{shape.head_dim}{of_v}",
        *(cell for way, found in ways.items() for cell in _shape_cells(found, way)),
        " ".join(marks),
    ]


def shape_table(rows: Sequence[Json]) -> str:
    """Markdown: TFLOP/s of everyday shapes with a comparison, and what the runs were."""
    runs, letters = Runs(rows), Letters()
    lines = [line for shape in SHAPES if (line := _shape_line(runs, shape, letters))]
    if not lines:
        return "No everyday shape is among the rows."
    legend = letters.legend()
    if any("*" in line[-1] for line in lines):
        legend.append(f"- \\*: single bursts of ten calls, where a call takes under {HOST_MS} ms")
    return "\n\n".join((markdown(SHAPE_COLUMNS, lines, 1), "\n".join(legend)))
