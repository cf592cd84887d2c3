"""Drawn calls for query lists: a selection, lengths and masks of each sequence."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import mask_cases
import torch
from drawn_selections import draw_selection
from torch import Tensor

from flash_mask_cute.mask_prep.query_lists import ListExtents, ListFacts, ListLengths, MadeLists


class DrawnLists(NamedTuple):
    """by_entry (batch | 1, heads, rows, k), and what lists of it are made with."""

    by_entry: Tensor
    facts: ListFacts
    extents: ListExtents
    lengths: ListLengths


def draw_lists(seed: int, most: int = 700) -> DrawnLists:
    gen = torch.Generator().manual_seed(seed)

    pick = partial(mask_cases.pick, gen)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=gen))

    batch, is_packed = pick(1, 2, 4), pick(True, False)
    lens_q = [number(0, most) for _ in range(batch)]
    lens_q[0] += 1
    lens_k = [number(1, most) for _ in range(batch)]
    if not is_packed:
        lens_q, lens_k = [lens_q[0]] * batch, [max(lens_k)] * batch
    tile_n, block = pick((16, 16), (16, 64), (128, 128), (32, 32))
    heads, k = pick(1, 2), pick(1, 3, 8)
    rows = sum(lens_q) if is_packed else lens_q[0]
    keys = sum(lens_k) if is_packed else lens_k[0]
    entries = 1 if is_packed else pick(1, batch)
    num_blocks = -(-max(lens_k) // block)
    selection = draw_selection(
        gen, (entries, heads, rows, k), num_blocks, pick(torch.int32, torch.int64)
    )
    if pick(True, False):
        # a list that is cut
        selection[..., 0] = 0
    band = pick("full", "causal", "left", "both")
    left = number(0, 90) if band in ("left", "both") else None
    right = number(0, 90) if band == "both" else None
    lengths = ListLengths(window_left=left, window_right=right)
    if is_packed:
        starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (lens_q, lens_k)]
        lengths = lengths._replace(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    if pick(True, False):
        used = [torch.tensor([number(0, n + 1) for n in x]).int() for x in (lens_q, lens_k)]
        lengths = lengths._replace(seqused_q=used[0], seqused_k=used[1])
    q_start = pick(None, None, "number", "each")
    if q_start == "number":
        lengths = lengths._replace(q_start=number(-50, 200))
    elif q_start == "each":
        firsts = torch.tensor([number(-50, 200) for _ in lens_q]).int()
        lengths = lengths._replace(q_start=firsts)
    if pick(True, False):
        batches = () if is_packed else (batch,)
        of_rows = torch.randn(*batches, heads, rows, generator=gen)
        hides = of_rows < -0.8
        lse = of_rows.masked_fill(hides, -torch.inf).repeat_interleave(2, -2)
        lengths = lengths._replace(lse=lse)
    facts = ListFacts(
        band == "causal", left is not None, right is not None, is_packed, is_packed,
        lengths.seqused_q is not None, lengths.seqused_k is not None, q_start,
        lengths.lse is not None,
    )  # fmt: skip
    most = max(lens_k), max(lens_q)
    extents = ListExtents(
        batch, rows, keys, most[0], heads, k, block, tile_n, most[1], pick(256, 512)
    )
    return DrawnLists(selection, facts, extents, lengths)


def check_lists(drawn: DrawnLists, made: MadeLists, segment: int) -> None:
    """Hold lists to the dense mask that the selection and the other masks state."""
    selection, facts, extents, x = drawn
    size, tile_n = extents.block_size, extents.tile_n
    for head in range(extents.heads):
        count = int(made.num_items[head])
        assert 0 <= count <= extents.items(facts)
        of_tiles: dict[tuple[int, int], list[list[int]]] = {}
        before = (0, 0, -1, 0)
        for b, tile, begin, end in made.items[head, :count].tolist():
            assert 0 < end - begin <= segment
            queries = made.tokens[head, begin:end].tolist()
            ranges = [query // extents.range_rows for query in queries]
            assert len(set(ranges)) == 1, "a list is cut at the same queries for all blocks"
            place = (ranges[0], b, tile, begin)
            assert before < place, "items of the same queries follow each other"
            before = place
            of_tiles.setdefault((b, tile), []).append(queries)
        for b in range(extents.batch):
            offset_q, n_q, n_k = extents_of(drawn, b)
            own = selection[min(b, len(selection) - 1), head, offset_q : offset_q + n_q]
            query, key = torch.arange(n_q)[:, None], torch.arange(n_k)
            visible = (own[..., None] == key // size).any(-2) if n_k else own.new_zeros(n_q, 0)
            visible = visible.bool()
            start = x.q_start
            first = n_k - n_q if start is None else start if isinstance(start, int) else start[b]
            if facts.is_causal or x.window_right is not None:
                visible = visible & (key <= query + first + (x.window_right or 0))
            if x.window_left is not None:
                visible = visible & (key >= query + first - x.window_left)
            if x.lse is not None:
                line = x.lse[2 * head] if facts.varlen_q else x.lse[b, 2 * head]
                visible = visible & (line[offset_q : offset_q + n_q, None] > -torch.inf)
            for tile in range(-(-n_k // tile_n)):
                block, segments = tile * tile_n // size, of_tiles.pop((b, tile), [])
                wanted = visible[:, block * size : (block + 1) * size].any(-1).nonzero()[:, 0]
                found = [query for queries in segments for query in queries]
                assert found == wanted.tolist(), (head, b, tile)
        assert not of_tiles


def extents_of(drawn: DrawnLists, b: int) -> tuple[int, int, int]:
    """Of a sequence: its first query in a line of the selection, queries and keys in use."""
    x, extents = drawn.lengths, drawn.extents
    offset_q, n_q, n_k = 0, extents.rows, extents.keys
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is not None:
        offset_q, end_q = x.cu_seqlens_q[b : b + 2].tolist()
        offset_k, end_k = x.cu_seqlens_k[b : b + 2].tolist()
        n_q, n_k = end_q - offset_q, end_k - offset_k
    if x.seqused_q is not None and x.seqused_k is not None:
        n_q, n_k = int(x.seqused_q[b]), int(x.seqused_k[b])
    return offset_q, n_q, n_k
