"""The blocks that queries of a tile chose, as a walk over keys finds them.

A warp holds the words of 1024 neighbouring blocks, one in each lane. So a walk loads once for many
chunks, and chunks without a selected block are left out.
"""

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from flash_mask_cute.core.walk_ring import CHUNK, highest_bit
from flash_mask_cute.core.warp_scan import WARP, running
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules.bit_tile import WORD, bit_range, low_bits

# where no word begins
_NOWHERE = 1 << 30


class SelectionWords(NamedTuple):
    """Each lane's word of `BitArgs.of_any` and of_every for a tile. The first lane has word
    `first`, which may be before word 0."""

    first: Int32
    of_any: Int32
    of_every: Int32

    @staticmethod
    def none() -> "SelectionWords":
        """Before a walk begins."""
        return SelectionWords(Int32(_NOWHERE), Int32(0), Int32(0))


def _log_block(rules: Any) -> Int32:
    """Keys of a block, a power of two, as a shift; a division is a long wait in a short walk."""
    return Int32(31) - Int32(cute.arch.clz(rules.args.bits.block_k))


@cute.jit
def words_for(rules: Any, work: Work, base: Int32, held: SelectionWords) -> SelectionWords:
    """The words of the chunk of key tiles from `base` on, and of as many as possible before it.
    rules: `ForwardMask`. held: the words of a later chunk."""
    args, tile_n, shift = rules.args.bits, rules.block_info.tile_n, _log_block(rules)
    first_needed = (base * tile_n >> shift) // WORD
    if first_needed < held.first:
        last_word = (cutlass.max(work.seqlen_k - 1, 0) >> shift) // WORD
        if const_expr(not args.are_entries):
            last_word = cute.size(args.of_any, mode=[3]) - 1
        last = (((base + CHUNK) * tile_n - 1) >> shift) // WORD
        first = cutlass.min(last, last_word) - (WORD - 1)
        word = first + cute.arch.lane_idx()
        of_any, of_every = Int32(0), Int32(0)
        if const_expr(args.are_entries):
            of_any = _word_of_entries(rules, work, word)
            of_every = of_any
        elif word >= 0:
            tile = rules.selection_tile(work, work.block)
            place = rules.selection_place(args.of_any, work, work.head_idx, tile, word * WORD)
            of_any, of_every = args.of_any[place], args.of_every[place]
        held = SelectionWords(first, of_any, of_every)
    return held


def entry_at(mEntries: cute.Tensor, place: tuple, i: Int32, num_blocks: Int32) -> Int32:
    """Entry i of the only query of a batch entry and head; -1 if it is no block."""
    count = mEntries.shape[3]
    block = mEntries[(*place, 0, cutlass.min(i, count - 1))]
    exists = (i < count) & (block >= 0) & (block < num_blocks)
    return cutlass.select_(exists, Int32(block), Int32(-1))


def _entry(rules: Any, work: Work, i: Int32) -> Int32:
    args, zero = rules.args.bits, Int32(0)
    place = rules.selection_place(args.visible, work, work.head_idx, zero, zero)
    num_blocks = (work.seqlen_k + args.block_k - 1) >> _log_block(rules)
    return entry_at(args.visible, place[:2], i, num_blocks)


@cute.jit
def chosen_from(rules: Any, work: Work, first: Int32) -> Int32:
    """Bits of the 32 blocks from `first` on that the only query chose, in all lanes."""
    found = Int32(0)
    for start in cutlass.range(0, rules.args.bits.visible.shape[3], WARP, unroll=2):
        bit = _entry(rules, work, start + cute.arch.lane_idx()) - first
        is_here = (bit >= 0) & (bit < WORD)
        found = found | cutlass.select_(is_here, Int32(1) << (bit & (WORD - 1)), Int32(0))
    return Int32(cute.arch.warp_redux_sync(found, "or"))


@cute.jit
def _word_of_entries(rules: Any, work: Work, word: Int32) -> Int32:
    """The blocks among 32 that the only query chose; 0 for a word that does not exist."""
    num_entries, found = rules.args.bits.visible.shape[3], Int32(0)
    for start in cutlass.range(0, num_entries, WARP, unroll=1):
        own = _entry(rules, work, start + cute.arch.lane_idx())
        for i in cutlass.range(cutlass.min(num_entries - start, WARP), unroll=8):
            block = cute.arch.shuffle_sync(own, i)
            is_here = (block >= 0) & (block // WORD == word)
            bit = Int32(1) << (block & (WORD - 1))
            found = found | cutlass.select_(is_here, bit, Int32(0))
    return found


@cute.jit
def judge(rules: Any, held: SelectionWords, work: Work, n_block: Int32) -> tuple[Boolean, Boolean]:
    """As `MaskRules._judge_choice`, from words that are held; each lane may judge another tile."""
    block_k, tile_n, shift = rules.args.bits.block_k, rules.block_info.tile_n, _log_block(rules)
    first_k_idx = n_block * tile_n
    end_k_idx = cutlass.min(first_k_idx + tile_n, work.seqlen_k)
    block = first_k_idx >> shift
    last = cutlass.max(end_k_idx - 1, first_k_idx) >> shift
    of_any, of_every = Int32(0), Int32(1)
    # as many steps in every lane, since lanes read each other's words
    for _ in cutlass.range((tile_n + block_k - 2 >> shift) + 1, unroll=1):
        lane = block // WORD - held.first
        of_any = of_any | (cute.arch.shuffle_sync(held.of_any, lane) >> (block % WORD))
        of_every = of_every & (cute.arch.shuffle_sync(held.of_every, lane) >> (block % WORD))
        block = cutlass.min(block + 1, last)
    needs_bits = Boolean(True)
    if const_expr(rules.mask_mod is None):
        needs_bits = (of_every & 1) == 0
    return (of_any & 1) != 0, needs_bits


@cute.jit
def chunk_before(rules: Any, held: SelectionWords, chunk_idx: Int32) -> Int32:
    """The last chunk before this one with a selected block, as far as words are held;
    else one without held words. Negative if there is none."""
    block_k, tile_n = rules.args.bits.block_k, rules.block_info.tile_n
    end = (chunk_idx * CHUNK * tile_n + block_k - 1) >> _log_block(rules)
    word = held.of_any & low_bits(end - (held.first + cute.arch.lane_idx()) * WORD)
    votes = Int32(cute.arch.vote_ballot_sync(word != 0))
    # the key before the words that are held
    key = held.first * WORD * block_k - 1
    if votes != 0:
        lane = highest_bit(votes)
        block = (held.first + lane) * WORD + highest_bit(cute.arch.shuffle_sync(word, lane))
        key = (block + 1) * block_k - 1
    chunk = cutlass.max(key, 0) // tile_n // CHUNK
    chunk = cutlass.select_(key < 0, Int32(-1), Int32(chunk))
    return cutlass.min(chunk, chunk_idx - 1)


# -- parts of a walk ------------------------------------------------------------------------------


@cute.jit
def cut(
    rules: Any, work: Work, first: Int32, stop: Int32, num_places: Int32
) -> tuple[Int32, Int32, SelectionWords]:
    """The key tiles [first, end) of a work tile at its places [first, stop) of num_places, among
    which the tiles that its queries chose are distributed evenly, and words for their walk. Run by
    a whole warp.

    Parts that follow each other in places do so in tiles, whatever queries chose.
    """
    begin, end = rules.key_blocks(work)
    held = SelectionWords.none()
    is_cut = (first > 0) | (stop < num_places)
    if const_expr(hasattr(rules, "num_tiles")):  # of gathered keys
        total = rules.num_tiles(work)
        begin, end = (_share_of(total, place, num_places) for place in (first, stop))
    elif is_cut:
        total, word = _count_blocks(rules, work, begin, end)
        if const_expr(rules.args.bits.are_entries):
            are_all = _blocks_of(rules, begin, end)[1] <= WARP * WORD
            held = SelectionWords(cutlass.select_(are_all, Int32(0), held.first), word, word)
        ranks = _share_of(total, first, num_places), _share_of(total, stop, num_places)
        low, high = _tiles_at(rules, work, (begin, end), ranks, word)
        begin = cutlass.select_(first > 0, low, begin)
        end = cutlass.select_(stop < num_places, high, end)
    return begin, end, held


@cute.jit
def _share_of(total: Int32, place: Int32, num_places: Int32) -> Int32:
    """How many of `total` tiles lie before a place."""
    before = place
    if total != num_places:
        before = Int32((Int64(total) * place + num_places - 1) // num_places)
    return before


def _tiles_of_block(rules: Any) -> Int32:
    return cutlass.max(rules.args.bits.block_k // rules.block_info.tile_n, 1)


def _blocks_of(rules: Any, begin: Int32, end: Int32) -> tuple[Int32, Int32]:
    """The blocks [first, end) that key tiles [begin, end) touch."""
    tile_n, shift = rules.block_info.tile_n, _log_block(rules)
    return begin * tile_n >> shift, (end * tile_n + rules.args.bits.block_k - 1) >> shift


@cute.jit
def _word_of(rules: Any, work: Work, blocks: tuple[Int32, Int32], window: Int32) -> Int32:
    """This lane's word of a window of 1024 blocks that queries chose, of `blocks` alone."""
    args, word = rules.args.bits, window * WARP + cute.arch.lane_idx()
    found = Int32(0)
    if const_expr(args.are_entries):
        found = _word_of_entries(rules, work, word)
    elif word * WORD < blocks[1]:
        tile = rules.selection_tile(work, work.block)
        found = args.of_any[
            rules.selection_place(args.of_any, work, work.head_idx, tile, word * WORD)
        ]
    return found & bit_range(blocks[0] - word * WORD, blocks[1] - word * WORD)


@cute.jit
def _count_blocks(rules: Any, work: Work, begin: Int32, end: Int32) -> tuple[Int32, Int32]:
    """Of key tiles [begin, end), how many belong to chosen blocks, and each lane's last word."""
    blocks, total, word = _blocks_of(rules, begin, end), Int32(0), Int32(0)
    for window in cutlass.range(cute.ceil_div(blocks[1], WARP * WORD), unroll=1):
        word = _word_of(rules, work, blocks, window)
        total += Int32(cute.arch.warp_redux_sync(cute.arch.popc(word), "add"))
    return total * _tiles_of_block(rules), word


@cute.jit
def _tiles_at(
    rules: Any, work: Work, tiles: tuple[Int32, Int32], ranks: tuple[Int32, Int32], last_word: Int32
) -> tuple[Int32, Int32]:
    """Of the key tiles [begin, end) that belong to chosen blocks, those with these numbers, or end.
    last_word: as `_count_blocks` returned it."""
    blocks, ratio = _blocks_of(rules, *tiles), _tiles_of_block(rules)
    windows = cute.ceil_div(blocks[1], WARP * WORD)
    low, high, low_in_block, high_in_block = *ranks, Int32(0), Int32(0)
    if ratio > 1:
        low, high = ranks[0] // ratio, ranks[1] // ratio
        low_in_block, high_in_block = ranks[0] - low * ratio, ranks[1] - high * ratio
    window, word, low_tile, high_tile = Int32(0), last_word, tiles[1], tiles[1]
    while window < windows:
        if windows > 1:
            word = _word_of(rules, work, blocks, window)
        own = cute.arch.popc(word)
        ends = running(own, operator.add)
        in_window = cute.arch.shuffle_sync(ends, WARP - 1)
        if (low >= 0) & (low < in_window):
            low_tile = _first_tile(rules, window, word, ends, low) + low_in_block
        if (high >= 0) & (high < in_window):
            high_tile = _first_tile(rules, window, word, ends, high) + high_in_block
        low, high = low - in_window, high - in_window
        window += 1
    return tuple(cutlass.max(cutlass.min(x, tiles[1]), tiles[0]) for x in (low_tile, high_tile))


@cute.jit
def _first_tile(rules: Any, window: Int32, word: Int32, ends: Int32, rank: Int32) -> Int32:
    """The first key tile of a window's block of this rank. ends: counts up to each lane."""
    lane = cute.arch.popc(cute.arch.vote_ballot_sync(ends <= rank))
    bits = cute.arch.shuffle_sync(word, lane)
    rank -= cute.arch.shuffle_sync(ends, lane) - cute.arch.popc(bits)
    while rank > 0:
        bits = bits & (bits - 1)
        rank -= 1
    block = (window * WARP + lane) * WORD + cute.arch.popc((bits & -bits) - 1)
    return (block << _log_block(rules)) // rules.block_info.tile_n
