"""Rows of tables that stay in a CTA's shared memory from one batch entry to the next.

A thread keeps what it has loaded of the first key blocks, each in a slot of its own, and reads it
back for the same head and query block of another batch entry. Nobody else reads it, so nobody
waits. A slot is valid while its tag names the head and the query block, so the order of work tiles
matters for the speed alone (`TileScheduler.alternating`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.sm90.flash_fwd_traits import WORDS_OF_SLOT, FwdTraits
from flash_mask_cute.sm90.warpgroups import Role, mma_warp


@dataclass(frozen=True)
class CachedBiasRows:
    """words: int32 (words at once, threads, words of a thread / words at once, slots): what lanes
    load together lies side by side. tags: int32 (MMA warps, slots)."""

    traits: cutlass.Constexpr[FwdTraits]
    words: cute.Tensor
    tags: cute.Tensor

    @staticmethod
    def create(traits: FwdTraits, storage: Any) -> "CachedBiasRows":
        threads = THREADS_PER_WARPGROUP * traits.num_mma_warpgroups
        vectors = traits.cached_bias_words // WORDS_OF_SLOT
        slots, warps = traits.cached_bias_blocks, traits.num_mma_warps
        return CachedBiasRows(
            traits,
            storage.words.get_tensor(cute.make_layout((WORDS_OF_SLOT, threads, vectors, slots))),
            storage.tags.get_tensor(cute.make_layout((warps, slots))),
        )

    @cute.jit
    def clear(self):
        """Mark the slots of this warp as empty."""
        if cute.arch.lane_idx() == 0:
            for slot in cutlass.range_constexpr(self.traits.cached_bias_blocks):
                self.tags[mma_warp(), slot] = Int32(-1)
        cute.arch.sync_warp()

    @cute.jit
    def load(
        self,
        work: Work,
        n_block: Int32,
        load: cutlass.Constexpr[Callable[[], None]],
        words: tuple,
    ):
        """Fill `words` of a key block from its slot, or by `load`; then the slot keeps them."""
        most = self.traits.cached_bias_words
        assert sum(cute.size(x) for x in words) <= most, "a slot has room for what is loaded"
        tag = self._tag(work)
        slot = cutlass.min(n_block, self.traits.cached_bias_blocks - 1)
        has_slot = n_block == slot
        if has_slot & (self.tags[mma_warp(), slot] == tag):
            self._copy(words, slot, is_store=False)
        else:
            load()
            if has_slot:
                self._copy(words, slot, is_store=True)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    self.tags[mma_warp(), slot] = tag
                cute.arch.sync_warp()

    def _copy(self, words: tuple, slot: Int32, is_store: bool) -> None:
        thread = cute.arch.thread_idx()[0] - Role.MMA * cute.arch.WARP_SIZE
        vector = cute.make_rmem_tensor((WORDS_OF_SLOT,), Int32)
        # row by row, so that what is loaded and what is kept may have the same registers
        places = [
            (x, (r, i))
            for x in words
            for r in range(cute.size(x, mode=[0]))
            for i in range(cute.size(x, mode=[1]))
        ]
        for first in range(0, len(places), WORDS_OF_SLOT):
            part = places[first : first + WORDS_OF_SLOT]
            kept = self.words[None, thread, first // WORDS_OF_SLOT, slot]
            if is_store:
                for j, (x, i) in enumerate(part):
                    vector[j] = x[i]
                cute.autovec_copy(vector, kept)
            else:
                cute.autovec_copy(kept, vector)
                for j, (x, i) in enumerate(part):
                    x[i] = vector[j]

    def _tag(self, work: Work) -> Int32:
        """A number of the head and the query block, less than that of all query rows."""
        rows = work.seqlen_q * self.traits.packed_heads
        return work.head_idx * cute.ceil_div(rows, self.traits.tile_m) + work.block
