"""Static facts of the Hopper backward of heads above 256 columns (`flash_bwd_wide`)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.clusters import Claims
from flash_mask_cute.core.cta import (
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    scheduler_rings,
    swizzled,
)
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.walk_ring import WalkRing
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.limits import MAX_HEAD_DIM, MAX_WIDE_HEAD_DIM
from flash_mask_cute.sm90.cta_pairs import PeerWords
from flash_mask_cute.sm90.flash_bwd_traits import BwdTraits
from flash_mask_cute.sm90.gradient_columns import NUM_MMA_WARPGROUPS
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING
from flash_mask_cute.sm90.wgmma import COLUMNS, ROWS_PER_WARPGROUP, WORDS_PER_STEP

# rows that stay, and of a block that passes by
ROWS = ROWS_PER_WARPGROUP
# blocks whose P or dS is on its way
SLOTS = 2
# registers of a thread for P or dS of a block
WORDS_OF_BLOCK = ROWS // 16 * WORDS_PER_STEP
# of a block that passes by: its flags, head and row block of statistics, in a vector
BLOCK_WORDS = 4
MMA_REGISTERS = 216


class WideChannels(NamedTuple):
    """The channels between the roles of a CTA, and to its peer: see `flash_bwd_wide`."""

    passing: Channel
    bits: Channel
    ring: WorkRing
    walk: WalkRing
    words: PeerWords
    claims: Claims


class WideSmem(NamedTuple):
    """The contents of shared memory. words: of a block, `BLOCK_WORDS`. out: gradients on their way,
    of each warpgroup. bits: of a partial block."""

    staying: cute.Tensor  # (64, tile_d, 1)
    passing: cute.Tensor  # (64, tile_d, passing_stages)
    out: cute.Tensor  # (64, 64, warpgroups)
    words: cute.Tensor  # (BLOCK_WORDS, passing_stages)
    bits: cute.Tensor  # (4 words, 64)


@dataclass(frozen=True)
class WideBwdTraits(BwdTraits):
    """Shape of the work of a CTA: 64 rows that stay, and a walk over blocks of 64 rows. The options
    of other tiles are not for these."""

    @property
    def tile_d(self) -> int:
        """Half of the columns, which a warpgroup sums, are whole swizzled blocks of 32 or 64."""
        return -(-self.head_dim // 64) * 64

    @property
    def tile_dv(self) -> int:
        return self.tile_d

    @property
    def cluster_tile_m(self) -> int:
        """Query rows of a work tile of the launch for dQ."""
        return self.tile_m

    @property
    def own_cols(self) -> int:
        """Columns of a gradient that a warpgroup sums."""
        return self.tile_d // NUM_MMA_WARPGROUPS

    @property
    def mma_registers(self) -> int:
        return MMA_REGISTERS

    @property
    def bytes_rows(self) -> int:
        """Of 64 rows of an operand."""
        return ROWS * self.tile_d * 2

    @property
    def passing_stages(self) -> int:
        """Blocks in shared memory: three where they fit."""
        return 3 if self._smem_bytes(3) <= SMEM_CAPACITY else 2

    def _smem_bytes(self, passing_stages: int) -> int:
        received = SLOTS * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK * 4
        out = NUM_MMA_WARPGROUPS * ROWS * ROWS * 2
        rows = (1 + passing_stages) * self.bytes_rows
        return rows + received + out + self.bytes_bits + SMEM_BOOKKEEPING

    @property
    def smem_bytes(self) -> int:
        return self._smem_bytes(self.passing_stages)

    def infeasible(self) -> str | None:
        """The reason why a kernel with these traits cannot run, or None."""
        wanted = {"tile_m": 64, "stages_q": 2, "stages_do": 2, "stages_kv": 1, "value_cols": 0}
        wanted["cta_pair"] = False
        dims = f"{self.head_dim} and {self.head_dim_v}"
        if self.head_dim != self.head_dim_v:
            return f"head_dim and head_dim_v above {MAX_HEAD_DIM} must be equal, got {dims}"
        if not MAX_HEAD_DIM < self.head_dim <= MAX_WIDE_HEAD_DIM:
            return f"head_dim must be from {MAX_HEAD_DIM + 8} to {MAX_WIDE_HEAD_DIM}, got {dims}"
        for name, value in wanted.items():
            if getattr(self, name) != value:
                given = getattr(self, name)
                return f"{name} must be {value} where head_dim is above {MAX_HEAD_DIM}, got {given}"
        if self.smem_bytes > SMEM_CAPACITY:
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        return None

    def mma_words(self, n: int) -> cute.TiledMma:
        """A sum over a block, whose P or dS is in registers, of n columns."""
        return self.mma_keys(n)

    def layout_rows(self, stages: int) -> cute.ComposedLayout:
        """(64, tile_d, stages)."""
        return self._rows(ROWS, self.tile_d, stages, self.own_cols)

    def layout_out(self) -> cute.ComposedLayout:
        return self._rows(ROWS, ROWS, NUM_MMA_WARPGROUPS)

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`: Q, dO, K and V are alike."""
        return ((self.layout_rows(self.passing_stages), ROWS, self.tile_d),) * 4

    def storage(self) -> cute.struct:
        """The shared memory of a CTA."""

        def elements(layout: cute.ComposedLayout) -> type:
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        def vectors(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[Int32, count], 16]

        def barriers(stages: int) -> type:
            return cute.struct.MemRange[cutlass.Int64, 2 * stages]

        @cute.struct
        class Storage:
            staying: elements(self.layout_rows(1))
            passing: elements(self.layout_rows(self.passing_stages))
            out: elements(self.layout_out())
            received: vectors(SLOTS * THREADS_PER_WARPGROUP * WORDS_OF_BLOCK)
            bits: vectors(COLUMNS.num_words * ROWS)
            words: vectors(BLOCK_WORDS * self.passing_stages)
            ring: vectors(WORDS * RING_STAGES)
            walk: vectors(WORDS * WALK_STAGES)
            passing_barriers: barriers(self.passing_stages)
            received_barriers: barriers(SLOTS)
            bits_barriers: barriers(1)
            ring_barriers: barriers(RING_STAGES)
            walk_barriers: barriers(WALK_STAGES)
            claims_barriers: barriers(1)
            claim: cute.struct.MemRange[Int32, 1]

        return Storage

    def tiles(self, storage: Any) -> WideSmem:
        """The tensors in a CTA's `storage`."""
        return WideSmem(
            staying=swizzled(storage.staying, self.layout_rows(1)),
            passing=swizzled(storage.passing, self.layout_rows(self.passing_stages)),
            out=swizzled(storage.out, self.layout_out()),
            words=storage.words.get_tensor(cute.make_layout((BLOCK_WORDS, self.passing_stages))),
            bits=storage.bits.get_tensor(cute.make_layout((COLUMNS.num_words, ROWS))),
        )

    def wide_channels(
        self, storage: Any, lengths: Lengths, num_mask_warps: Int32, ascending: bool
    ) -> WideChannels:
        """The channels in a CTA's `storage`, made by all threads; a barrier of both CTAs must
        follow. num_mask_warps: of this CTA, those that read walks."""
        warps = self.num_mma_warps
        ring, walk = scheduler_rings(
            storage, (1 + num_mask_warps, warps), ascending, uncut_first=False,
            fields=lengths.work_fields, chunk_fields=lengths.chunk_fields,
        )  # fmt: skip
        received, slots = storage.received_barriers.data_ptr(), storage.received.data_ptr()
        bit_readers, passing = warps // NUM_MMA_WARPGROUPS, storage.passing_barriers.data_ptr()
        return WideChannels(
            passing=Channel.create(passing, self.passing_stages, 1, warps),
            bits=Channel.create(
                storage.bits_barriers.data_ptr(), 1, self.num_mask_warps, bit_readers
            ),
            ring=ring,
            walk=walk,
            words=PeerWords.create(received, slots, SLOTS, WORDS_OF_BLOCK, warps),
            claims=Claims.create(storage.claims_barriers.data_ptr(), storage.claim.data_ptr()),
        )
