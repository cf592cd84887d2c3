"""Proofs that new rows can be written into a cache.

Contents are read on CPUs only: a GPU would have to be waited for. There, contents that a proof
would refuse give undefined results, but no fault (`kernels/append_kv.py`). Each raises ValueError,
naming argument, value and sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from flash_mask_cute.cpu.append import Slots


def check_entries_once(entries: Sequence[int], seqlens_new: Sequence[int]) -> None:
    """Refuse two sequences that write into one entry of the cache. entries: cache_batch_idx."""
    writers: dict[int, int] = {}
    for sequence, (entry, count) in enumerate(zip(entries, seqlens_new, strict=True)):
        if count and writers.setdefault(entry, sequence) != sequence:
            raise ValueError(
                f"cache_batch_idx must not repeat an entry that new rows are written into, got "
                f"{entry} for sequences {writers[entry]} and {sequence}"
            )


def check_written_once(slots: Sequence[Slots]) -> None:
    """Refuse a row of a page that two new rows are written into. slots: of each sequence."""
    writers: dict[tuple[int, int], int] = {}
    for sequence, (pages, rows) in enumerate(slots):
        for place in zip(pages.tolist(), rows.tolist(), strict=True):
            if place in writers:
                raise ValueError(
                    "page_table must give each new row a place of its own, got row "
                    f"{place[1]} of page {place[0]} for sequences {writers[place]} and {sequence}"
                )
            writers[place] = sequence


def check_rotary_rows(rows: int, capacity: int | None, longest: int) -> None:
    """Refuse tables without a row for each position that shapes allow.

    rows: of the tables. capacity: rows of a sequence, if new keys are rotated by where they go;
    None: rotary_seqlens gives positions. longest: rows of k, or of q, where each has a position of
    its own."""
    least, why = longest, "rows of a sequence in k or q"
    if capacity is not None and capacity >= longest:
        least, why = capacity, "rows that the cache has for a sequence"
    if rows < least:
        raise ValueError(
            f"rotary_cos and rotary_sin must cover all positions, the {least} {why}: make them "
            f"longer, or pass the part of the cache that they cover; got {rows} rows"
        )


def check_rotary_positions(rows: int, by: str, positions: Sequence[range]) -> None:
    """Refuse positions outside of the tables. rows: of the tables. by: the argument that gives the
    first position of a sequence."""
    for sequence, x in enumerate(positions):
        if len(x) and (x.start < 0 or x.stop > rows):
            raise ValueError(
                f"{by} must give positions that rotary_cos and rotary_sin have, 0 to {rows - 1}, "
                f"got {x.start} to {x.stop - 1} for sequence {sequence}"
            )
