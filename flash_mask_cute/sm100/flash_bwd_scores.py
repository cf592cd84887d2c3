"""The compute warps of the Blackwell backward: P and dS from a query block's S and dP."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.score_gradients import Statistics, has_reference
from flash_mask_cute.core.walk_ring import Block, Kind
from flash_mask_cute.mods.score_chain import ScoreChain
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_math import keep_rounded, probabilities, score_gradients
from flash_mask_cute.sm100.flash_bwd_pairs import FoldedScores, PeerGrads
from flash_mask_cute.sm100.flash_bwd_storage import BwdSmem, Channels
from flash_mask_cute.sm100.flash_bwd_traits import BwdTraits

# 16-bit values that a thread writes at once
VECTOR_16_BITS = 8
# columns that are modified at a time: what is computed of more would not fit beside a whole chunk
MODIFIED_COLS = 16
# words of a chunk of 32 columns in 16 bits
CHUNK_WORDS = umma.CHUNK // 2


class Blocks(NamedTuple):
    """Number of query blocks, and of cut blocks, so far."""

    number: Int32
    cuts: Int32


@dataclass(frozen=True)
class BlockScores:
    """State of a compute warp; half: its half of a block's queries; peer: of a pair."""

    traits: cutlass.Constexpr[BwdTraits]
    tiles: BwdSmem
    channels: Channels
    chain: ScoreChain
    half: Int32
    lengths: Lengths
    peer: PeerGrads | FoldedScores | None

    @property
    def first_query(self) -> Int32:
        """Of this thread's queries of a block."""
        if self.traits.is_folded:
            return self.peer.chunk * umma.CHUNK
        return self.half * self.traits.queries

    @cute.jit
    def visit(self, tile: Int32, state: Blocks, block: Block):
        """Compute P and dS of a query block, masked if it is cut."""
        cuts = state.cuts
        compute = partial(self._compute, tile, state.number, block)
        self.channels.stats.wait(state.number)
        if block.kind == Kind.PARTIAL:
            self.channels.bits.wait(cuts)
            key, count = thread_in_warpgroup(), self.traits.queries // bit_tile.WORD
            first_word = self.half * count
            if const_expr(self.traits.is_folded):
                key, first_word = key % self.traits.tile_n, self.peer.chunk
            words = tuple(self.tiles.bits[first_word + w, key] for w in range(count))
            cute.arch.sync_warp()
            self.channels.bits.release(cuts)
            compute(words)
            cuts += 1
        else:
            compute(None)
        return Blocks(state.number + 1, cuts)

    def _compute(self, tile: Int32, number: Int32, block: Block, bits: tuple | None) -> None:
        traits, thread = self.traits, thread_in_warpgroup()
        statistics = self._statistics(self.channels.stats.index(number))
        first_s, first_dp = (
            x + self.half * traits.half_step for x in (traits.column_s, traits.column_dp)
        )
        work = self.lengths.of_block(self.channels.ring.read(tile), block)
        place = work, block.head_idx, block.index
        keep_grads = partial(self._keep_grads, first_dp, thread)
        self.channels.s.wait(number)
        umma.fence_after_wait()
        if traits.is_folded:
            self._compute_folded(number, first_s, first_dp, bits, statistics, thread)
            return
        if self.chain.aux.wants_aux:
            self.channels.dp.wait(number)
            umma.fence_after_wait()
            self._compute_by_chunks(place, first_s, first_dp, bits, statistics, thread, keep_grads)
            self._complete(self.channels.s, number)
        else:
            if self.chain.is_empty:
                factors = self._replace_scores(number, first_s, statistics, bits, thread)
            else:
                factors = self._replace_modified(place, first_s, statistics, bits, thread)
            self._complete(self.channels.s, number)
            if traits.makes_dk:
                self.channels.dp.wait(number)
                umma.fence_after_wait()
                words = []
                for chunk, grads in self._chunks(first_dp, thread):
                    score_gradients(grads, factors[chunk], _part(statistics.delta, chunk))
                    words.append(keep_rounded(grads, traits.dtype))
                    keep_grads(chunk, words[chunk])
        if traits.is_wide_pair:
            # dK needs no more
            self._complete(self.channels.dp, number)
            self.peer.keep_and_send(number, words)
        elif traits.makes_dk:
            cute.arch.fence_proxy("async.shared", space="cta")
            self._complete(self.channels.dp, number)
            if traits.cta_pair:
                self.peer.send(number)
        self.channels.stats.release(number)

    def _compute_folded(self, number, first_s, first_dp, bits, statistics, thread) -> None:
        traits = self.traits
        scores = umma.load_columns(first_s, umma.CHUNK, thread)
        umma.wait_loads()
        if bits is not None:
            bit_tile.hide_unset(scores, bits)
        probabilities(scores, statistics.lse, self.chain.scales.scale_log2)
        self.peer.keep_p(keep_rounded(scores, traits.dtype))
        self.channels.dp.wait(number)
        umma.fence_after_wait()
        grads = umma.load_columns(first_dp, umma.CHUNK, thread)
        umma.wait_loads()
        score_gradients(grads, scores, statistics.delta)
        self.peer.keep_ds(keep_rounded(grads, traits.dtype))
        cute.arch.fence_proxy("async.shared", space="cta")
        umma.fence_before_arrival()
        self.channels.scores.publish(number)
        self.peer.send(number)
        self.channels.stats.release(number)

    def _complete(self, channel: Channel, number) -> None:
        """Release the values that this warp has replaced in TMEM, and written to shared memory."""
        umma.wait_stores()
        umma.fence_before_arrival()
        cute.arch.sync_warp()
        channel.release(number)

    def _keep_grads(self, first, thread, chunk: int, words) -> None:
        """Write the words of dS of a chunk to TMEM, and, but in a wide pair, to shared memory."""
        umma.store_columns(words, first + chunk * CHUNK_WORDS, thread)
        if self.traits.is_wide_pair:
            return
        if self.traits.cta_pair:
            self.peer.keep(words, chunk * umma.CHUNK)
            return
        values = cute.flat_divide(cute.recast_tensor(words, self.traits.dtype), (VECTOR_16_BITS,))
        target = cute.flat_divide(self.tiles.ds[None, thread, 0], (VECTOR_16_BITS,))
        for i in range(umma.CHUNK // VECTOR_16_BITS):
            at = (self.half * self.traits.queries + chunk * umma.CHUNK) // VECTOR_16_BITS + i
            cute.autovec_copy(values[None, i], target[None, at])

    def _replace_scores(self, number, first, statistics, bits, thread) -> list:
        """Replace S by P; returns the factors of dS, by chunks of columns."""
        factors, is_wide_pair = [], self.traits.is_wide_pair
        chunks = self._taken if is_wide_pair else self._chunks
        for chunk, scores in chunks(first, thread):
            if is_wide_pair and chunk == 0:
                umma.fence_before_arrival()
                cute.arch.sync_warp()
                self.channels.taken.release(number)
            if bits is not None:
                bit_tile.hide_unset(scores, (bits[chunk],))
            probabilities(scores, _part(statistics.lse, chunk), self.chain.scales.scale_log2)
            if self.traits.makes_dv:
                words = keep_rounded(scores, self.traits.dtype)
                umma.store_columns(words, first + chunk * CHUNK_WORDS, thread)
                if is_wide_pair and chunk == 0:
                    self._complete(self.channels.first_p, number)
            factors.append(scores)
        return factors

    def _replace_modified(self, place, first, statistics, bits, thread) -> list:
        """The same for modified scores."""
        factors = []
        for chunk in range(self.traits.queries // umma.CHUNK):
            kept = cute.make_rmem_tensor((1, umma.CHUNK), Float32)
            for part in range(0, umma.CHUNK, MODIFIED_COLS):
                first_col = chunk * umma.CHUNK + part
                # without the fence ptxas would fetch all at once
                umma.fence_after_wait()
                scores = umma.load_columns(first + first_col, MODIFIED_COLS, thread)
                umma.wait_loads()
                words = cute.make_rmem_tensor(MODIFIED_COLS // 2, Int32)
                self.chain.apply(*place, scores, bits, statistics, words, first_col)
                if self.traits.makes_dv:
                    umma.store_columns(words, first + first_col // 2, thread)
                for i in range(MODIFIED_COLS):
                    kept[0, part + i] = scores[0, i]
            factors.append(kept)
        return factors

    def _compute_by_chunks(
        self, place, first_s, first_dp, bits, statistics, thread, keep_grads
    ) -> None:
        """Replace S by P and dP by dS, and add to gradients of aux tensors."""
        queries = self.traits.queries
        words = tuple(cute.make_rmem_tensor(queries // 2, Int32) for _ in range(2))
        for chunk in range(queries // umma.CHUNK):
            scores, grads = (
                umma.load_columns(first + chunk * umma.CHUNK, umma.CHUNK, thread)
                for first in (first_s, first_dp)
            )
            umma.wait_loads()
            _apply_to_both(self.chain, place, scores, grads, chunk, bits, statistics, words)
            probs, dscores = (_words_of(x, chunk) for x in words)
            if self.traits.makes_dv:
                umma.store_columns(probs, first_s + chunk * CHUNK_WORDS, thread)
            keep_grads(chunk, dscores)

    def _chunks(self, first, thread) -> Iterator:
        """Number and values, (1, 32), of this thread's columns from `first` on, loaded ahead."""
        following = umma.load_columns(first, umma.CHUNK, thread)
        num_chunks = self.traits.queries // umma.CHUNK
        for chunk in range(num_chunks):
            umma.wait_loads()
            values = following
            umma.fence_after_wait()
            if chunk + 1 < num_chunks:
                at = first + (chunk + 1) * self.traits.chunk_step
                following = umma.load_columns(at, umma.CHUNK, thread)
            yield chunk, values

    def _taken(self, first, thread) -> Iterator:
        """As `_chunks`, of chunks that are loaded together."""
        traits = self.traits
        chunks = [
            umma.load_columns(first + i * traits.chunk_step, umma.CHUNK, thread)
            for i in range(traits.queries // umma.CHUNK)
        ]
        umma.wait_loads()
        yield from enumerate(chunks)

    def _statistics(self, stage: Int32) -> Statistics:
        """Statistics of the queries of a half, in shared memory."""
        tile_m = self.traits.tile_m
        row = self.tiles.stats[None, stage].iterator + self.first_query
        if self.traits.cta_pair:
            # Behind a shuffle the address stays in a register of each thread. Else it is uniform,
            # and each of 32 loads has an instruction that copies it.
            address = cute.arch.shuffle_sync(Int32(row.toint()), 0)
            row = cute.make_ptr(Float32, address, cutlass.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout(self.traits.queries)
        numbers = [
            cute.make_tensor((row + i * tile_m).align(16), layout)
            for i in range(self.traits.num_stats)
        ]
        if not self.traits.has_reference or self.chain.aux.wants_aux:
            return Statistics(*numbers)
        return Statistics(*numbers, has_reference(numbers[-1]))


@cute.jit
def _apply_to_both(
    chain: ScoreChain,
    place: tuple,
    scores: cute.Tensor,
    grads: cute.Tensor,
    chunk: cutlass.Constexpr[int],
    bits: tuple | None,
    statistics: Statistics,
    words: tuple[cute.Tensor, cute.Tensor],
) -> None:
    """`ScoreChain.apply_to_both` of a chunk of columns, and zeros where there are no scores."""
    first = chunk * umma.CHUNK
    if place[0].has_scores:
        chain.apply_to_both(place, scores, grads, first, bits, statistics, words)
    else:
        probs, dscores = words
        for i in cutlass.range_constexpr(CHUNK_WORDS):
            probs[first // 2 + i] = Int32(0)
            dscores[first // 2 + i] = Int32(0)


def _part(numbers: cute.Tensor, chunk: int) -> cute.Tensor:
    """The part of statistics for a chunk."""
    at = (numbers.iterator + chunk * umma.CHUNK).align(16)
    return cute.make_tensor(at, cute.make_layout(umma.CHUNK))


def _words_of(words: cute.Tensor, chunk: int) -> cute.Tensor:
    """The part of a half's words for a chunk."""
    return cute.make_tensor(words.iterator + chunk * CHUNK_WORDS, cute.make_layout(CHUNK_WORDS))
