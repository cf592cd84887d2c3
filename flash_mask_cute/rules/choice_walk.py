"""The blocks that queries of a tile chose, as a walk over keys finds them.

A warp holds the words of 1024 neighbouring blocks, one in each lane. So a walk loads once for many
chunks, and chunks of which nobody chose anything are left out.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core.walk_ring import CHUNK, highest_bit
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules.bit_tile import WORD, low_bits

# where no word begins
_NOWHERE = 1 << 30


class ChoiceWords(NamedTuple):
    """Each lane's word of `BitArgs.of_any` and of_every for a tile. The first lane has word
    `first`, which may be before word 0."""

    first: Int32
    of_any: Int32
    of_every: Int32

    @staticmethod
    def none() -> "ChoiceWords":
        """Before a walk begins."""
        return ChoiceWords(Int32(_NOWHERE), Int32(0), Int32(0))


@cute.jit
def words_for(rules: Any, work: Work, base: Int32, held: ChoiceWords) -> ChoiceWords:
    """The words of the chunk of key tiles from `base` on, and of as many as possible before it.

    rules: `ForwardMask`. held: the words of a later chunk.
    """
    args, tile_n = rules.args.bits, rules.block_info.tile_n
    first_needed = base * tile_n // args.block_k // WORD
    if first_needed < held.first:
        last_word = cute.size(args.of_any, mode=[3]) - 1
        last = ((base + CHUNK) * tile_n - 1) // args.block_k // WORD
        first = cutlass.min(last, last_word) - (WORD - 1)
        word = first + cute.arch.lane_idx()
        of_any, of_every = Int32(0), Int32(0)
        if word >= 0:
            tile = rules.choice_tile(work, work.block)
            place = rules.choice_place(args.of_any, work, work.head_idx, tile, word * WORD)
            of_any, of_every = args.of_any[place], args.of_every[place]
        held = ChoiceWords(first, of_any, of_every)
    return held


@cute.jit
def judge(rules: Any, held: ChoiceWords, work: Work, n_block: Int32) -> tuple[Boolean, Boolean]:
    """As `MaskRules._judge_choice`, from words that are held; each lane may judge another tile."""
    block_k, tile_n = rules.args.bits.block_k, rules.block_info.tile_n
    first_k_idx = n_block * tile_n
    end_k_idx = cutlass.min(first_k_idx + tile_n, work.seqlen_k)
    block = first_k_idx // block_k
    last = cutlass.max(end_k_idx - 1, first_k_idx) // block_k
    of_any, of_every = Int32(0), Int32(1)
    # as many steps in every lane, since lanes read each other's words
    for _ in cutlass.range((tile_n + block_k - 2) // block_k + 1, unroll=1):
        lane = block // WORD - held.first
        of_any = of_any | (cute.arch.shuffle_sync(held.of_any, lane) >> (block % WORD))
        of_every = of_every & (cute.arch.shuffle_sync(held.of_every, lane) >> (block % WORD))
        block = cutlass.min(block + 1, last)
    needs_bits = Boolean(True)
    if const_expr(rules.mask_mod is None):
        needs_bits = (of_every & 1) == 0
    return (of_any & 1) != 0, needs_bits


@cute.jit
def chunk_before(rules: Any, held: ChoiceWords, chunk_idx: Int32) -> Int32:
    """The last chunk before this one of which a query chose something, as far as words are held;
    else one of which the words are not held. Negative if there is none."""
    block_k, tile_n = rules.args.bits.block_k, rules.block_info.tile_n
    end = cute.ceil_div(chunk_idx * CHUNK * tile_n, block_k)
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
