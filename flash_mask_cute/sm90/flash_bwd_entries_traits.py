"""Static facts of the Hopper backward of short sequences in several key tiles."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    swizzled,
)
from flash_mask_cute.core.row_blocks import stats_words
from flash_mask_cute.core.storage import barriers, elements, floats
from flash_mask_cute.sm90.entry_loads import HeadColumns
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING
from flash_mask_cute.sm90.wgmma import ROWS_PER_WARPGROUP, rows_layout

NUM_MMA_WARPGROUPS = 2
# queries of a tile are a multiple of this, up to that
QUERIES_OF_BOTH, MOST_QUERIES = 128, 384
MMA_REGISTERS, HELPER_REGISTERS, OTHER_REGISTERS = 240, 24, 24
KEY_STAGES, MOST_STAGES, LEAST_STAGES = 2, 6, 2


class EntryTiles(NamedTuple):
    q: cute.Tensor  # (64, columns, stages)
    do: cute.Tensor  # (64, columns, stages)
    k: cute.Tensor  # (64, columns, stages of keys)
    v: cute.Tensor  # (64, columns, stages of keys)
    ds: cute.Tensor  # (64 queries, 64 keys, warpgroups)
    sums: cute.Tensor  # (64 * columns, warpgroups), fp32, on their way out
    added: cute.Tensor  # (4, lane, warp, group of 8 queries)
    stats: cute.Tensor  # (words, stages)


@dataclass(frozen=True)
class EntryTraits(HeadColumns):
    """Shape of the work of a CTA: 64 keys of a head, and all queries of batch entries.

    tile_m: queries, in blocks of 64, which two MMA warpgroups take in turn. has_score_mod, sums,
    has_marks, is_banded: as in `ShortTraits`.
    """

    tile_m: int
    has_score_mod: bool
    sums: bool
    has_marks: bool
    is_banded: bool

    adds = True

    @staticmethod
    def queries_of(seqlen_q: int, seqlen_k: int) -> int | None:
        """Queries of a tile that has all of a batch entry; None: it, or its keys, are too many."""
        queries = -(-seqlen_q // QUERIES_OF_BOTH) * QUERIES_OF_BOTH
        return queries if max(queries, seqlen_k) <= MOST_QUERIES else None

    @property
    def num_blocks(self) -> int:
        return self.tile_m // self.block_m

    @property
    def turns(self) -> int:
        """Blocks of a warpgroup."""
        return self.num_blocks // NUM_MMA_WARPGROUPS

    @property
    def bytes_of_rows(self) -> int:
        """Of Q and dO, or of K and V, of 64 rows."""
        return ROWS_PER_WARPGROUP * sum(self.cols) * 2

    @property
    def num_stats(self) -> int:
        return 2 + self.has_score_mod

    @property
    def stats_words(self) -> int:
        return stats_words(self.block_m, self.num_stats, self.has_marks)

    @property
    def sums_words(self) -> int:
        """fp32 sums of dQ of a block, or of dK or dV."""
        return ROWS_PER_WARPGROUP * max(self.cols)

    @property
    def cached_bias_words(self) -> int:
        return ROWS_PER_WARPGROUP * self.tile_m

    @property
    def _bytes_without_blocks(self) -> int:
        ds = ROWS_PER_WARPGROUP**2 * 2
        of_warpgroups = NUM_MMA_WARPGROUPS * (ds + self.sums_words * 4)
        keys = KEY_STAGES * self.bytes_of_rows
        return keys + of_warpgroups + self.cached_bias_words * 4 + SMEM_BOOKKEEPING

    @property
    def _bytes_of_block(self) -> int:
        # each stage of statistics is aligned
        return self.bytes_of_rows + -(-self.stats_words // 32) * 128

    @property
    def stages(self) -> int:
        """Blocks of queries in flight, as many as there is room for."""
        room = SMEM_CAPACITY - self._bytes_without_blocks
        return min(room // self._bytes_of_block, MOST_STAGES)

    @property
    def smem_bytes(self) -> int:
        return self._bytes_without_blocks + self.stages * self._bytes_of_block

    @property
    def needed_registers(self) -> int:
        """Of an MMA thread: sums of dS, dK and dV, and S and dP of a block."""
        sums = self.tile_m // 4 if self.sums else 0
        return sums + sum(self.cols) // 2 + self.block_m + OTHER_REGISTERS

    @property
    def fits(self) -> bool:
        return self.stages >= LEAST_STAGES and self.needed_registers <= MMA_REGISTERS

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + NUM_MMA_WARPGROUPS)

    def layout(self, cols: int, stages: int) -> cute.ComposedLayout:
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, cols, stages)

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Of Q, dO, K, V and dS."""
        cols, cols_v = self.cols
        return (
            *(self.layout(x, self.stages) for x in (cols, cols_v)),
            *(self.layout(x, KEY_STAGES) for x in (cols, cols_v)),
            self.layout(ROWS_PER_WARPGROUP, NUM_MMA_WARPGROUPS),
        )

    def storage(self) -> cute.struct:
        of_q, of_do, of_k, of_v, of_ds = self.layouts()

        @cute.struct
        class Storage:
            q: elements(self.dtype, of_q)
            do: elements(self.dtype, of_do)
            k: elements(self.dtype, of_k)
            v: elements(self.dtype, of_v)
            ds: elements(self.dtype, of_ds)
            sums: floats(self.sums_words * NUM_MMA_WARPGROUPS)
            added: floats(self.cached_bias_words)
            stats: floats(self.stats_words * self.stages)
            key_barriers: barriers(KEY_STAGES)
            block_barriers: barriers(self.stages)

        return Storage

    def tiles(self, storage: Any) -> EntryTiles:
        members = storage.q, storage.do, storage.k, storage.v, storage.ds
        pairs = zip(members, self.layouts(), strict=True)
        added = 4, 32, WARPS_PER_WARPGROUP, self.tile_m // 8
        return EntryTiles(
            *(swizzled(memory, layout) for memory, layout in pairs),
            storage.sums.get_tensor(cute.make_layout((self.sums_words, NUM_MMA_WARPGROUPS))),
            storage.added.get_tensor(cute.make_layout(added)),
            storage.stats.get_tensor(cute.make_layout((self.stats_words, self.stages))),
        )

    def channels(self, storage: Any) -> tuple[Channel, Channel]:
        """Of keys and values of an entry, which both warpgroups read, and of blocks of queries."""
        warps, keys = WARPS_PER_WARPGROUP, storage.key_barriers.data_ptr()
        return (
            Channel.create(keys, KEY_STAGES, 1, NUM_MMA_WARPGROUPS * warps),
            Channel.create(storage.block_barriers.data_ptr(), self.stages, 1, warps),
        )
