"""Static facts of the Hopper backward of short sequences: tiles, shared memory, registers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    REGISTER_FILE,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    swizzled,
)
from flash_mask_cute.core.storage import barriers, elements, floats
from flash_mask_cute.sm90.entry_loads import HeadColumns, stages_in
from flash_mask_cute.sm90.warpgroups import ROWS_PER_WARP, SMEM_BOOKKEEPING
from flash_mask_cute.sm90.wgmma import MN, ROWS_PER_WARPGROUP, make_mma, rows_layout

# queries of a tile, and of a block, for which S and dP are computed at a time
QUERY_TILES = (
    (16, 16), (32, 32), (48, 48), (64, 64), (96, 48), (128, 64), (144, 48), (192, 48),
)  # fmt: skip
MOST_WARPGROUPS = 3
# the largest sequence
MOST_ROWS = MOST_WARPGROUPS * ROWS_PER_WARPGROUP
# of the threads of the load warp's warpgroup, and of an MMA thread for all but the fragments
HELPER_REGISTERS, OTHER_REGISTERS = 32, 24
MOST_STAGES = 3
# of a head: a product of more would need more registers
MOST_COLUMNS = 128
# CTAs of one MMA warpgroup that share an SM, `needed_registers` with which they may, and shared
# memory that each of them may have
SHARERS = 2
REGISTERS_OF_SHARER = 200
SMEM_OF_SHARER = 115712
# words of the marks of 64 queries, which are copied with those of their row block
WORDS_OF_MARKS = 4


class ShortTiles(NamedTuple):
    q: cute.Tensor  # (tile_m, columns, stages)
    k: cute.Tensor  # (64, columns, warpgroups * stages)
    do: cute.Tensor  # (tile_m, columns, stages)
    v: cute.Tensor  # (64, columns, warpgroups * stages)
    ds: cute.Tensor  # (queries, 64 keys, warpgroups)
    added: cute.Tensor | None  # (4, lane, warp, group of 8 queries)
    stats: cute.Tensor  # (words, stages)


@dataclass(frozen=True)
class ShortTraits(HeadColumns):
    """Shape of the work of a CTA, which has all queries and keys of a batch entry of a head.

    tile_m: queries, of `QUERY_TILES`. tile_n: keys, a multiple of 16. stats_m: queries of a row
    block of the statistics, 64 or 128. has_score_mod: scores are modified, and have references.
    adds: something is added to scores, -inf where a mask hides them. sums: dS is summed over batch
    entries. has_marks: rows of queries that see nothing may be marked. is_banded: causal masking or
    a window hides scores.
    """

    tile_m: int
    tile_n: int
    stats_m: int
    has_score_mod: bool
    adds: bool
    sums: bool
    has_marks: bool
    is_banded: bool

    @staticmethod
    def tile_of(seqlen_q: int, seqlen_k: int) -> tuple[int, int] | None:
        """Queries and keys of a tile that has all of a batch entry; None: there are too many."""
        if max(seqlen_q, seqlen_k) > MOST_ROWS:
            return None
        return next(rows for rows, _ in QUERY_TILES if rows >= seqlen_q), -(-seqlen_k // 16) * 16

    @property
    def block_m(self) -> int:
        return dict(QUERY_TILES)[self.tile_m]

    @property
    def num_blocks(self) -> int:
        return self.tile_m // self.block_m

    @property
    def row_groups(self) -> int:
        """Groups of 64 queries, a product of dQ each."""
        return -(-self.tile_m // ROWS_PER_WARPGROUP)

    @property
    def num_warpgroups(self) -> int:
        """MMA warpgroups, with 64 keys each."""
        return -(-self.tile_n // ROWS_PER_WARPGROUP)

    @property
    def key_warps(self) -> int:
        """MMA warps that have keys, 16 each."""
        return self.tile_n // ROWS_PER_WARP

    @property
    def num_mma_warps(self) -> int:
        return self.num_warpgroups * WARPS_PER_WARPGROUP

    @property
    def num_mma_threads(self) -> int:
        return self.num_warpgroups * THREADS_PER_WARPGROUP

    @property
    def has_gaps(self) -> bool:
        """Whether products read parts of dS that nobody writes, for rows that are not stored."""
        return self.tile_m < self.stats_rows or self.key_warps < self.num_mma_warps

    @property
    def num_threads(self) -> int:
        return self.num_mma_threads + THREADS_PER_WARPGROUP

    @property
    def ctas_of_sm(self) -> int:
        may_share = self.num_warpgroups == 1 and self.needed_registers <= REGISTERS_OF_SHARER
        return SHARERS if may_share else 1

    @property
    def mma_registers(self) -> int:
        of_cta = REGISTER_FILE // self.ctas_of_sm - HELPER_REGISTERS * THREADS_PER_WARPGROUP
        return min(of_cta // self.num_mma_threads // 8 * 8, 240)

    @property
    def needed_registers(self) -> int:
        """Of an MMA thread: sums of dS, dV, and S and dP of a block, or dK and dQ then."""
        cols, cols_v = self.cols
        sums = self.tile_m // 2 if self.sums else 0
        products = 1 + -(-self.row_groups // self.num_warpgroups)
        return sums + cols_v // 2 + max(self.block_m, products * cols // 2) + OTHER_REGISTERS

    @property
    def key_steps(self) -> tuple[int, ...]:
        """Steps of 16 keys of each warpgroup."""
        warps = WARPS_PER_WARPGROUP
        return tuple(min(warps, self.key_warps - i * warps) for i in range(self.num_warpgroups))

    @property
    def bytes_of_operands(self) -> tuple[int, int]:
        """Of an entry: Q and K, dO and V."""
        rows = self.tile_m + self.num_warpgroups * ROWS_PER_WARPGROUP
        cols, cols_v = self.cols
        return rows * cols * 2, rows * cols_v * 2

    @property
    def num_stats(self) -> int:
        """LSE, delta and, with a score_mod, reference."""
        return 2 + self.has_score_mod

    @property
    def stats_rows(self) -> int:
        return self.row_groups * ROWS_PER_WARPGROUP

    @property
    def stats_words(self) -> int:
        marks = WORDS_OF_MARKS * self.row_groups if self.has_marks else 0
        return self.num_stats * self.stats_rows + marks

    @property
    def bytes_stats(self) -> int:
        return self.stats_words * 4

    @property
    def cached_bias_words(self) -> int:
        return self.tile_m * self.tile_n if self.adds else 0

    @property
    def stages(self) -> tuple[int, int]:
        """Of Q and K, and of dO and V."""
        capacity = SMEM_CAPACITY if self.ctas_of_sm == 1 else SMEM_OF_SHARER
        room = capacity - self._bytes_without_operands
        return stages_in(room, *self.bytes_of_operands, MOST_STAGES)

    @property
    def _bytes_without_operands(self) -> int:
        ds = self.rows_ds * self.num_warpgroups * ROWS_PER_WARPGROUP * 2
        stats = MOST_STAGES * self.bytes_stats
        return ds + self.cached_bias_words * 4 + stats + SMEM_BOOKKEEPING

    @property
    def smem_bytes(self) -> int:
        operands = zip(self.stages, self.bytes_of_operands, strict=True)
        return self._bytes_without_operands + sum(count * size for count, size in operands)

    @property
    def fits(self) -> bool:
        is_narrow = max(self.cols) <= MOST_COLUMNS
        return is_narrow and min(self.stages) > 0 and self.needed_registers <= self.mma_registers

    def mma_dk(self) -> cute.TiledMma:
        """dK = dS^T Q: 64 keys by columns; keys of a query are contiguous."""
        return make_mma(self.dtype, self.cols[0], MN, MN)

    def layout_queries(self, i: int) -> cute.ComposedLayout:
        """Of Q (0) or dO (1)."""
        return rows_layout(self.dtype, self.tile_m, self.cols[i], self.stages[i])

    def layout_keys(self, i: int) -> cute.ComposedLayout:
        """Of K (0) or V (1)."""
        count = self.num_warpgroups * self.stages[i]
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.cols[i], count)

    @property
    def rows_ds(self) -> int:
        """Queries of dS. A product reads 64 of them at a time, for rows of dQ that are not stored.
        Behind the last ones it may find what is added to scores, which is longer than they."""
        return max(self.tile_m, ROWS_PER_WARPGROUP) if self.adds else self.stats_rows

    def layout_ds(self) -> cute.ComposedLayout:
        return rows_layout(self.dtype, self.rows_ds, ROWS_PER_WARPGROUP, self.num_warpgroups)

    def rows_of_ds(self, ds: cute.Tensor, group: Int32) -> cute.Tensor:
        """64 queries of dS, (64, 64 keys, warpgroups)."""
        size = ROWS_PER_WARPGROUP
        block = rows_layout(self.dtype, size, size, 1).outer
        shape = *block.shape[:2], self.num_warpgroups
        stride = *block.stride[:2], self.rows_ds * size
        start = ds.iterator + group * size * size
        return cute.make_tensor(start, cute.make_layout(shape, stride=stride))

    def storage(self) -> cute.struct:
        for_s, for_dp = self.stages

        @cute.struct
        class Storage:
            q: elements(self.dtype, self.layout_queries(0))
            k: elements(self.dtype, self.layout_keys(0))
            do: elements(self.dtype, self.layout_queries(1))
            v: elements(self.dtype, self.layout_keys(1))
            ds: elements(self.dtype, self.layout_ds())
            added: floats(self.cached_bias_words)
            stats: floats(self.stats_words * for_s)
            s_barriers: barriers(for_s)
            dp_barriers: barriers(for_dp)

        return Storage

    def tiles(self, storage: Any) -> ShortTiles:
        added = None
        if self.adds:
            shape = 4, 32, self.key_warps, self.tile_m // 8
            added = storage.added.get_tensor(cute.make_layout(shape))
        return ShortTiles(
            swizzled(storage.q, self.layout_queries(0)),
            swizzled(storage.k, self.layout_keys(0)),
            swizzled(storage.do, self.layout_queries(1)),
            swizzled(storage.v, self.layout_keys(1)),
            swizzled(storage.ds, self.layout_ds()),
            added,
            storage.stats.get_tensor(cute.make_layout((self.stats_words, self.stages[0]))),
        )

    def channels(self, storage: Any) -> tuple[Channel, Channel]:
        """Of Q, K and statistics, and of dO and V."""
        create: Callable[..., Channel] = Channel.create
        readers = 1, self.num_mma_warps
        return (
            create(storage.s_barriers.data_ptr(), self.stages[0], *readers),
            create(storage.dp_barriers.data_ptr(), self.stages[1], *readers),
        )
