"""The queries that chose each key block, as lists, and the work that follows from them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_mask_cute.limits import AT_END
from flash_mask_cute.rules.band import Band
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import Compiled
from flash_mask_cute.runtime.compiler import cached_kernel, compile_object, options_for
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.seqlen_info import SeqlenInfoQK

# as in the device code, which a host that has no compiler cannot import
CHUNK_ROWS, SEGMENT, ITEM_WORDS = 256, 1024, 4


class ListFacts(NamedTuple):
    """Facts that determine the code of the kernels: which masks and lengths there are, by the names
    of `AttentionProblem`. has_lse: queries with an LSE of -inf are in no list."""

    is_causal: bool = False
    has_window_left: bool = False
    has_window_right: bool = False
    varlen_q: bool = False
    varlen_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    q_start: str | None = None
    has_lse: bool = False


class ListExtents(NamedTuple):
    """What the sizes of lists follow from, known without a look at values.

    rows: queries of a sequence, or of all if they are packed; keys alike. most_keys: of the longest
    sequence, most_rows alike. k: entries of a query. block_size: a multiple of tile_n, the keys of
    a work tile. range_rows: queries at which all lists are cut, a multiple of `CHUNK_ROWS`.
    """

    batch: int
    rows: int
    keys: int
    most_keys: int
    heads: int
    k: int
    block_size: int
    tile_n: int
    most_rows: int
    range_rows: int

    def num_blocks(self, keys: int, size: int, is_packed: bool) -> int:
        """Blocks of `size` rows of all sequences, as `core/row_blocks.py` numbers them."""
        return keys // size + self.batch if is_packed else self.batch * -(-keys // size)

    def entries(self, is_packed: bool) -> int:
        """Entries of the lists of a head, at most."""
        return (self.rows if is_packed else self.rows * self.batch) * self.k

    def scratch(self, facts: ListFacts) -> tuple[tuple[int, int, int], tuple[int, int], int]:
        """What lists are made with: the shape of counts (heads, chunks, blocks of the longest
        sequence), that of totals (heads, blocks), and the ranges of the longest sequence."""
        blocks = self.num_blocks(self.keys, self.block_size, facts.varlen_k)
        chunks = self.num_blocks(self.rows, CHUNK_ROWS, facts.varlen_q)
        longest = max(-(-self.most_keys // self.block_size), 1)
        ranges = max(-(-self.most_rows // self.range_rows), 1)
        return (self.heads, max(chunks, 1), longest), (self.heads, max(blocks, 1)), ranges

    def num_words(self, facts: ListFacts) -> int:
        """int32 words that lists of all heads take, with what they are made with."""
        counts, totals, ranges = self.scratch(facts)
        of_lists = self.entries(facts.varlen_q) + self.items(facts) * ITEM_WORDS + ranges
        return math.prod(counts) + 2 * math.prod(totals) + self.heads * of_lists

    def items(self, facts: ListFacts) -> int:
        """Segments of the lists of all key tiles, at most."""
        ranges = -(-self.most_rows // self.range_rows)
        entries = self.entries(facts.varlen_q) * (self.block_size // self.tile_n)
        return self.num_tiles(facts) * ranges + entries // SEGMENT

    def num_tiles(self, facts: ListFacts) -> int:
        """Key tiles of all sequences."""
        return self.num_blocks(self.keys, self.tile_n, facts.varlen_k)


class MadeLists(NamedTuple):
    """tokens (heads, entries), items (heads, items, ITEM_WORDS), and num_items (heads,): int32, as
    `core/query_lists.py` says."""

    tokens: Tensor
    items: Tensor
    num_items: Tensor


class ListLengths(NamedTuple):
    """Lengths of a call, as the kernels of lists take them, in their order. q_start: a tensor, a
    number, or None. lse: where facts say so, of the call."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    window_left: int | None = None
    window_right: int | None = None
    q_start: Tensor | int | None = None
    lse: Tensor | None = None


class QueryListMaker(NamedTuple):
    """Makes the lists of a selection, for calls with the same facts and extents. arch: of the GPU
    whose tensors it gets; None: they are on the CPU."""

    facts: ListFacts
    extents: ListExtents
    arch: str | None

    def __call__(self, by_entry: Tensor, lengths: ListLengths) -> MadeLists:
        """The lists of by_entry (batch | 1, heads, rows, k), int32 or int64. On a GPU five launches
        on the current stream read everything when they run."""
        facts, extents, arch = self
        if arch is None:
            return lists_by_torch(by_entry, facts, extents, lengths)
        function = compile_query_lists(facts, dtype_name(by_entry.dtype), arch).function
        made = empty_lists(by_entry, facts, extents)
        fill_lists(function, by_entry, made, facts, extents, lengths)
        return made


def empty_lists(like: Tensor, facts: ListFacts, extents: ListExtents) -> MadeLists:
    """Memory for lists."""
    heads = extents.heads
    shapes = (
        (heads, max(extents.entries(facts.varlen_q), 1)),
        (heads, max(extents.items(facts), 1), ITEM_WORDS),
        (heads,),
    )
    return MadeLists(*(like.new_empty(shape, dtype=torch.int32) for shape in shapes))


def fill_lists(
    function: Any, by_entry: Tensor, made: MadeLists, facts: ListFacts, extents: ListExtents,
    lengths: ListLengths,
) -> None:  # fmt: skip
    """Run the compiled kernels."""
    x = extents
    counts, totals, ranges = x.scratch(facts)
    shapes = counts, totals, (x.heads, ranges), totals
    scratch = (by_entry.new_empty(shape, dtype=torch.int32) for shape in shapes)
    numbers = x.block_size, x.tile_n, x.num_tiles(facts), x.range_rows, x.rows, x.keys
    function(by_entry, *scratch, *made, *numbers, *lengths)


@cached_kernel("query_lists")
def compile_query_lists(facts: ListFacts, dtype: str, arch: str) -> Compiled:
    """The kernels, which `fill_lists` runs. dtype: of entries."""
    from flash_mask_cute.mask_prep.query_lists_kernel import MakeQueryLists

    arguments = [
        fake_tensors.strided(4, dtype),
        *(fake_tensors.strided(rank) for rank in (3, 2, 2, 2, 2, 3, 1)),
        *(fake_tensors.int32() for _ in range(6)),
        fake_tensors.stream(),
        *map(
            fake_tensors.int32_vector,
            (facts.varlen_q, facts.varlen_k, facts.has_seqused_q, facts.has_seqused_k),
        ),
        *map(fake_tensors.int32, (facts.has_window_left, facts.has_window_right)),
        fake_tensors.q_start(facts.q_start),
        fake_tensors.strided(2 if facts.varlen_q else 3, "float32") if facts.has_lse else None,
    ]
    return compile_object(MakeQueryLists(facts.is_causal), arguments, options_for(arch))


def lists_by_torch(
    by_entry: Tensor, facts: ListFacts, extents: ListExtents, lengths: ListLengths
) -> MadeLists:
    """The same lists, of tensors on the CPU. Behind the lists and items that exist there is -1."""
    made = MadeLists(*(x.fill_(-1) for x in empty_lists(by_entry, facts, extents)))
    size, tile_n = extents.block_size, extents.tile_n
    for head in range(extents.heads):
        lists: list[int] = []
        # (first query, sequence, key tile, first entry, end), in any order
        segments: list[tuple[int, int, int, int, int]] = []
        for b in range(extents.batch):
            band, offset_q = _band_of(b, facts, extents, lengths)
            of_sequence = by_entry[min(b, by_entry.shape[0] - 1), head][offset_q:][: band.seqlen_q]
            for block in range(-(-band.seqlen_k // size)):
                keys = block * size, min((block + 1) * size, band.seqlen_k)
                lo, hi = band.q_range(keys[0])[0], band.q_range(keys[1] - 1)[1]
                sees = (of_sequence == block).any(-1)
                if lengths.lse is not None:
                    of_head = head * (lengths.lse.shape[-2] // extents.heads)
                    line = lengths.lse[of_head] if facts.varlen_q else lengths.lse[b, of_head]
                    sees = sees & (line[offset_q : offset_q + len(sees)] > -torch.inf)
                chose = sees.nonzero()[:, 0].tolist()
                queries = [x for x in chose if lo <= x < hi]
                for row in range(0, band.seqlen_q, extents.range_rows):
                    begin = len(lists)
                    lists += [x for x in queries if row <= x < row + extents.range_rows]
                    for first in range(begin, len(lists), SEGMENT):
                        end = min(first + SEGMENT, len(lists))
                        tiles = range(keys[0] // tile_n, -(-keys[1] // tile_n))
                        segments += [(row, b, tile, first, end) for tile in tiles]
        items = [words[1:] for words in sorted(segments)]
        made.num_items[head] = len(items)
        int32 = partial(torch.tensor, dtype=torch.int32, device=made.items.device)
        made.tokens[head, : len(lists)] = int32(lists)
        if items:
            made.items[head, : len(items)] = int32(items)
    return made


def _band_of(b: int, facts: ListFacts, extents: ListExtents, x: ListLengths) -> tuple[Band, int]:
    """The band of a sequence, and where its queries start in a line of the selection."""
    of_slot = extents.rows, extents.keys, x.cu_seqlens_q, x.cu_seqlens_k
    used = SeqlenInfoQK.create(b, *of_slot, x.seqused_q, x.seqused_k)
    seqlen_q = min(used.seqlen_q, SeqlenInfoQK.create(b, *of_slot).seqlen_q)
    start = x.q_start
    if isinstance(start, Tensor):
        start = int(start[b])
    elif start == AT_END:
        start = None
    right = 0 if facts.is_causal else x.window_right
    return Band(seqlen_q, used.seqlen_k, x.window_left, right, start), used.offset_q
