"""`python -m flash_mask_cute plan`: what a plan for some documents means, as text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.parallel.planning import Load, Plan, plan

_COLUMNS = 64


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 for arguments that make no plan."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.bytes_per_key < 1:
        parser.error(f"--bytes-per-key={given.bytes_per_key} is less than 1")
    try:
        mask = _mask(given)
        found = plan(mask, given.world, seqlen=given.seqlen, max_ranges=given.max_ranges)
    except ValueError as error:
        parser.error(str(error))
    for line in told(found, found.load(mask), given.bytes_per_key):
        sys.stdout.write(line + "\n")
    return 0


def told(found: Plan, load: Load, bytes_per_key: int) -> Iterator[str]:
    """The lines that are printed."""
    received = max(load.keys)
    yield f"{'ranks':<20}{found.world}, {found.rows_per_rank} rows each"
    yield f"{'imbalance':<20}{load.imbalance:.3f} (most tiles of a rank over the mean)"
    yield (
        f"{'keys received':<20}{received} at most, {sum(load.keys) // found.world} on average: "
        f"{100 * load.foreign_share:.1f} % of those of other ranks"
    )
    size = received * bytes_per_key / 2**20
    yield f"{'bytes received':<20}{size:.1f} MiB at most in a forward of a layer"
    for rank, ranges in enumerate(found.rows):
        rows = ", ".join(f"{begin}-{end}" for begin, end in ranges)
        yield f"rank {rank:<4}{load.tiles[rank]:>9.0f} tiles  |{_drawn(found, rank)}|  {rows}"


def _drawn(found: Plan, rank: int) -> str:
    """A mark for each part of the sequence, where the rank has most rows of it."""
    marks = []
    for i in range(_COLUMNS):
        first, end = (found.seqlen * x // _COLUMNS for x in (i, i + 1))
        own = sum(max(0, min(b, end) - max(a, first)) for a, b in found.rows[rank])
        marks.append("#" if 2 * own > end - first else ".")
    return "".join(marks)


def _mask(given: argparse.Namespace) -> ColumnMask:
    """Raises ValueError if documents are longer than the sequence."""
    lengths = given.docs or [given.seqlen]
    if given.full:
        if given.window is not None:
            raise ValueError("--window is for causal masking, so --full rules it out")
        return builders.document(lengths, given.seqlen)
    mask = builders.causal_document(lengths, given.seqlen)
    if given.window is None:
        return mask
    return mask & builders.sliding_window(given.seqlen, given.window)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m flash_mask_cute plan",
        description="Divide the rows of a sequence among ranks (docs/context_parallel.md).",
    )
    add = parser.add_argument
    add("--seqlen", type=int, required=True, help="tokens of the sequence")
    add("--docs", type=_lengths, help="lengths of its documents: 40000,25072; default: one")
    add("--world", type=int, default=4, help="ranks (default: %(default)s)")
    add("--max-ranges", type=int, default=16, help="ranges of a rank (default: %(default)s)")
    add("--window", type=int, help="keys that a query sees before its own")
    add("--full", action="store_true", help="documents without causal masking")
    add(
        "--bytes-per-key",
        type=int,
        default=2 * 8 * 128 * 2,
        help="k and v of a token in a layer (default: %(default)s, 8 heads of 128 in 16 bits)",
    )
    return parser


def _lengths(text: str) -> list[int]:
    try:
        return [int(x) for x in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths: 40000,25072") from None
