"""Static facts of the Hopper forward: tiles, WGMMA shapes, shared memory, warps and registers.

Everything follows from Python ints, so a configuration can be judged without a GPU. Layouts and MMA
atoms are made at each place of use.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    MAX_REGISTERS,
    RING_STAGES,
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    WARPS_PER_WARPGROUP,
    launch_registers,
    registers_left,
)
from flash_mask_cute.core.exp2 import DEGREE_3, DEGREE_5
from flash_mask_cute.core.packed_heads import PackedHeads
from flash_mask_cute.core.pages import why_no_boxes
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.storage import barriers, elements, words
from flash_mask_cute.core.stream_k import FEW_ROWS
from flash_mask_cute.core.walk_ring import CHUNK_FIELDS, OWN_FIELDS
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.limits import LEAST_BOX, ctas_of_tile
from flash_mask_cute.rules.bit_tile import WORD
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING, Role
from flash_mask_cute.sm90.wgmma import (
    COLUMNS,
    MN,
    REGISTERS,
    ROWS_OF_GROUP,
    ROWS_PER_THREAD,
    ROWS_PER_WARPGROUP,
    WORDS_PER_STEP,
    make_mma,
    row_of,
    row_of_few,
    rows_layout,
    tile_columns,
)

# what a thread needs besides the fragments of S, P and O, or ptxas serialises the products
SCALAR_REGISTERS = 28
# What ptxas wants for a product besides its accumulator, of the registers of a launch: it holds
# each instruction to these, whatever the warpgroup took later.
PRODUCT_REGISTERS = 30
# What MMA warpgroups may take, by their number; the more, the less is left for the others. One has
# what it needs from the launch.
MMA_REGISTERS = {1: (MAX_REGISTERS,), 2: (216, 232), 3: (152, 160), 4: (112,)}
# the same beside a warpgroup of mask warps, and what that takes
MMA_REGISTERS_BESIDE_MASK_WARPS = 208
MASK_REGISTERS = 56
# The same beside warpgroups that convert keys and values from fp8, and what each of these takes.
# One MMA warpgroup keeps the same as without them.
MMA_REGISTERS_BESIDE_CONVERSION = 240
CONVERSION_REGISTERS = 96
CONVERSION_WARPGROUPS = 2
# Blocks in fp8 that wait for conversion, at most.
MOST_CODE_STAGES = 8
# Columns of the query are kept in registers at this head_dim_v, where that was timed; with 96 and
# 256 columns registers spill.
KEPT_QUERY_DIM = 128
# keys whose bits are the lower half of a word of a bit tile
HALF_KEYS = 64
# words of a slot for rows of tables that a thread moves at once
WORDS_OF_SLOT = 4


class Barrier(IntEnum):
    """Named barriers (0 is __syncthreads); one per MMA warpgroup, starting at the given number."""

    SCHEDULER = 1
    EPILOGUE = 5


@dataclass(frozen=True)
class FwdTraits(PackedHeads):
    """Shape of one CTA's work; see `FlashAttentionForwardSm90`, too.

    mask_warpgroup: a warpgroup makes mask bits instead of two warps, because evaluating a mask_mod
    for every score of a block is much work. cta_pair: not supported here. packed_heads,
    heads_there: see `PackedHeads`. few_rows: rows lie in groups of 8, each with 8 rows without
    queries behind it, so that a thread has one. lists_per_warpgroup: turns would make an MMA
    warpgroup wait for the others. cached_bias_bits: rows of tables stay (`cached_bias.py`) in as
    many slots of a key block as have room.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    packed_heads: int
    stages_kv: int = 2
    stages_q: int = 2
    share_qo: bool = False
    mask_warpgroup: bool = False
    cta_pair: bool = False
    heads_there: int | None = None
    page_box: int | None = None
    in_fp8: bool = False
    few_rows: bool = False
    lists_per_warpgroup: bool = False
    cached_bias_bits: int = 0

    @property
    def moves_registers(self) -> bool:
        """Whether other warpgroups give registers to those that multiply; a single one that
        multiplies has the most anyway, unless others convert."""
        return self.num_mma_warpgroups > 1 or self.in_fp8

    @property
    def is_ordered(self) -> bool:
        """Whether MMA warpgroups issue their products in turn."""
        return self.num_mma_warpgroups > 1 and not self.lists_per_warpgroup

    @property
    def chunk_fields(self) -> tuple[str, ...]:
        """Of `WalkRing`."""
        return (*CHUNK_FIELDS, *OWN_FIELDS) if self.lists_per_warpgroup else CHUNK_FIELDS

    @property
    def cluster_tile_m(self) -> int:
        """Query rows that walk over keys together."""
        return self.tile_m

    @property
    def tile_d(self) -> int:
        return tile_columns(self.head_dim)

    @property
    def tile_dv(self) -> int:
        """Of this CTA, which may have a half of V (`core/value_halves.py`)."""
        return tile_columns(-(-self.head_dim_v // self.num_ctas))

    @property
    def second_column(self) -> int:
        """The first column of V of the second CTA. A tile past the last column would be clipped."""
        return self.head_dim_v - self.tile_dv

    @property
    def num_ctas(self) -> int:
        return ctas_of_tile(self.head_dim_v)

    @property
    def num_mma_warpgroups(self) -> int:
        return self.tile_m // ROWS_PER_WARPGROUP

    @property
    def rows_of_thread(self) -> int:
        """Rows of a thread's accumulator for which there are queries."""
        return 1 if self.few_rows else ROWS_PER_THREAD

    def row_of(self, thread: Int32, r: int) -> Int32:
        """Which of a warpgroup's query rows is accumulator row r of a thread (0..127)."""
        if self.few_rows:
            return row_of_few(thread)
        return row_of(thread, r)

    @property
    def table_words(self) -> int:
        """Registers of a thread for rows of tables (`mods/table_rows.py`); more would spill."""
        return 64 if self.num_mma_warpgroups < 3 else 32

    @property
    def num_mma_warps(self) -> int:
        return 4 * self.num_mma_warpgroups

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * self._num_warpgroups

    @property
    def _num_warpgroups(self) -> int:
        others = 1 + self.num_mma_warpgroups + self.mask_warpgroup
        return others + self.num_conversion_warpgroups

    @property
    def num_conversion_warpgroups(self) -> int:
        """Keys and values have one each."""
        return CONVERSION_WARPGROUPS if self.in_fp8 else 0

    @property
    def value_parts(self) -> int:
        """Products of P V: with more warpgroups a thread has fewer registers for a product."""
        most = launch_registers(self._num_warpgroups) - PRODUCT_REGISTERS
        return 2 if self.in_fp8 and self.tile_dv // 2 > most else 1

    @property
    def num_conversion_warps(self) -> int:
        return WARPS_PER_WARPGROUP * self.num_conversion_warpgroups

    @property
    def first_conversion_warp(self) -> int:
        return Role.MMA + self.num_mma_warps

    @property
    def num_mask_warps(self) -> int:
        return 4 if self.mask_warpgroup else Role.MMA - Role.MASK

    @property
    def first_mask_warp(self) -> int:
        return Role.MMA + self.num_mma_warps if self.mask_warpgroup else int(Role.MASK)

    @property
    def _register_choices(self) -> tuple[int, ...]:
        if self.mask_warpgroup:
            return (MMA_REGISTERS_BESIDE_MASK_WARPS,)
        if self.in_fp8:
            return (MMA_REGISTERS_BESIDE_CONVERSION,)
        return MMA_REGISTERS[self.num_mma_warpgroups]

    @property
    def mma_registers(self) -> int:
        """Enough for products and `keeps_scores`; other warps need the rest."""
        choices = self._register_choices
        needed = self.registers_needed + self.keeps_scores * self._registers_beside
        return next((n for n in choices if n >= needed), choices[-1])

    @property
    def values_first(self) -> bool:
        """Whether P V of a block is issued before S of the next; the warpgroup then waits for both.
        Three warpgroups overlap with each other's products, and need no second P. With block lists
        of their own they seldom compute at the same time."""
        return self.num_mma_warpgroups > 2 and not self.lists_per_warpgroup

    @property
    def _registers_beside(self) -> int:
        """Registers for new probabilities in addition to those that P V reads."""
        return 0 if self.values_first else self.tile_n // 4

    @property
    def keeps_scores(self) -> bool:
        """Whether registers hold scores and new probabilities in addition to those that P V reads.

        The sum of a block's exponentials then shows whether the maximum in use was too old. Without
        these registers the block's maximum is found first, which is most of the remaining latency.
        """
        return self.registers_needed + self._registers_beside <= self._register_choices[-1]

    @property
    def passes_over(self) -> bool:
        """Whether a warpgroup skips key blocks that masks hide from all of its rows. With two
        warpgroups, a block visible to one is seldom hidden from the other."""
        return self.num_mma_warpgroups > 2

    @property
    def query_steps(self) -> int:
        """Steps of 16 columns of its query that a warpgroup keeps in spare registers. S then reads
        less shared memory, which leaves power to the products."""
        if not self.keeps_scores or self.mask_warpgroup or self.tile_dv != KEPT_QUERY_DIM:
            return 0
        left = self.mma_registers - self.registers_needed - self._registers_beside
        return min(left // WORDS_PER_STEP, self.tile_d // 16)

    @property
    def reduced_at_once(self) -> int:
        """Numbers of the output that a thread reads at once to reduce them: the L2 cache is far
        away. More would spill."""
        has_room = self.num_mma_warpgroups < 3 and self.tile_d <= 128 and not self.mask_warpgroup
        return 64 if has_room else 16

    @property
    def polynomial(self) -> tuple[int, tuple[float, ...]]:
        """How many of 16 exponentials use a polynomial, and which, if functions modify scores: the
        longer products take, the fewer."""
        return (4, DEGREE_3) if self.tile_dv <= 64 else (1, DEGREE_5)

    @property
    def registers_needed(self) -> int:
        """Registers of an MMA thread: fragments of S, P and O, and scalars."""
        return self.tile_n // 2 + self.tile_n // 4 + self.tile_dv // 2 + SCALAR_REGISTERS

    @property
    def _product_registers(self) -> int:
        """What the larger product wants of the registers of a launch."""
        return max(self.tile_n, self.tile_dv // self.value_parts) // 2 + PRODUCT_REGISTERS

    @property
    def helper_registers(self) -> int:
        # docs/facts/compiler.md#setmaxnreginc-hangs-if-the-sum-exceeds-what-the-launch-gave
        mask_warps = MASK_REGISTERS if self.mask_warpgroup else 0
        taken = self.mma_registers * self.num_mma_warpgroups + mask_warps
        taken += CONVERSION_REGISTERS * self.num_conversion_warpgroups
        return registers_left(self._num_warpgroups, taken)

    @property
    def spread_rows(self) -> int | None:
        return ROWS_OF_GROUP if self.few_rows else None

    @property
    def row_tile(self) -> tuple[int, int]:
        """Query rows of a box, as (heads, positions): of a warpgroup or, if few, `spread_rows`."""
        rows = self.spread_rows or ROWS_PER_WARPGROUP
        heads = min(self.packed_heads, rows)
        return heads, rows // heads

    @property
    def multicasts_keys(self) -> bool:
        """Whether each CTA of a cluster loads half of the keys of a block, for both."""
        return self.num_ctas > 1 and not self.copies_rows

    @property
    def box_k(self) -> tuple[int, int]:
        halves = self.multicasts_keys and self.page_box is None
        return self.tile_n // 2 if halves else self.keys_of_box, self.tile_d

    @property
    def box_v(self) -> tuple[tuple[int, int], int]:
        return (1, self.keys_of_box), self.tile_dv

    @property
    def keys_of_box(self) -> int:
        return self.tile_n if self.page_box is None else self.page_box

    @property
    def box_o(self) -> tuple[tuple[int, int], int]:
        return (self.packed_heads, ROWS_PER_WARPGROUP // self.packed_heads), self.tile_dv

    @property
    def copies_rows(self) -> bool:
        """Whether warps copy keys and values row by row from pages."""
        return self.page_box is not None and self.page_box % LEAST_BOX != 0

    # Rows that warps copy arrive by themselves, and who multiplies them puts a fence before.
    copies_arrive = True

    # whether values have memory of their own, and channels, with words, to another CTA
    has_values, peer_channels, peer_words = True, 0, 0

    # fills of the query channel for a work tile, and boxes of rows that TMA brings for a fill
    q_fills = 1

    @property
    def q_boxes(self) -> int:
        if self.few_rows:
            return FEW_ROWS // ROWS_OF_GROUP
        return self.num_mma_warpgroups

    @property
    def bytes_q(self) -> int:
        """As loaded."""
        return self._stage_bytes_q // (2 if self.few_rows else 1)

    @property
    def _stage_bytes_q(self) -> int:
        return self.tile_m * self.tile_d * 2

    @property
    def bytes_k(self) -> int:
        """As loaded."""
        return self._stage_bytes_k // (2 if self.in_fp8 else 1)

    @property
    def bytes_v(self) -> int:
        """As loaded."""
        return self._stage_bytes_v // (2 if self.in_fp8 else 1)

    @property
    def _stage_bytes_k(self) -> int:
        """As multiplied."""
        return self.tile_n * self.tile_d * 2

    @property
    def _stage_bytes_v(self) -> int:
        return self.tile_n * self.tile_dv * 2

    @property
    def bytes_o(self) -> int:
        return self.tile_m * self.tile_dv * 2

    @property
    def bytes_bits(self) -> int:
        return self.tile_m * COLUMNS.num_words * 4

    @property
    def _smem_without_spare_key(self) -> int:
        query = self.stages_q * self._stage_bytes_q
        query_output = max(query, self.bytes_o) if self.share_qo else query + self.bytes_o
        keys_values = self.stages_kv * (self._stage_bytes_k + self._stage_bytes_v)
        return query_output + keys_values + self.bytes_bits + SMEM_BOOKKEEPING

    @property
    def stages_k(self) -> int:
        """Keys are used one block earlier than values, so one stage more if it fits. Beside a
        conversion the memory is for blocks in fp8."""
        if self.in_fp8:
            return self.stages_kv
        return self.stages_kv + (
            self._smem_without_spare_key + self._stage_bytes_k <= SMEM_CAPACITY
        )

    @property
    def code_stages(self) -> tuple[int, int]:
        """Blocks of keys and of values in fp8 that have room, at least one each."""
        if not self.in_fp8:
            return 0, 0
        left = SMEM_CAPACITY - self._smem_without_spare_key
        pairs, rest = divmod(left, self.bytes_k + self.bytes_v)
        pairs = max(min(pairs, MOST_CODE_STAGES), 1)
        return pairs + (pairs < MOST_CODE_STAGES and rest >= self.bytes_k), pairs

    @property
    def _smem_without_slots(self) -> int:
        spare = (self.stages_k - self.stages_kv) * self._stage_bytes_k
        codes_k, codes_v = self.code_stages
        codes = codes_k * self.bytes_k + codes_v * self.bytes_v
        return self._smem_without_spare_key + spare + codes

    @property
    def cached_bias_words(self) -> int:
        """Words of a slot that a thread has, its rows one after the other."""
        of_row = -(-self.tile_n // 4 * self.cached_bias_bits // WORD)
        return -(-of_row * self.rows_of_thread // WORDS_OF_SLOT) * WORDS_OF_SLOT

    @property
    def _slot_bytes(self) -> int:
        """Of the words of all threads, and the tags of their warps."""
        return 4 * self.num_mma_warps * (WARP * self.cached_bias_words + 1)

    @property
    def cached_bias_blocks(self) -> int:
        """The first key blocks, whose rows of tables stay; 0 if a thread would not load them
        together, or not before products."""
        if self.values_first or not 0 < self.cached_bias_words <= self.table_words:
            return 0
        return (SMEM_CAPACITY - self._smem_without_slots) // self._slot_bytes

    @property
    def smem_bytes(self) -> int:
        return self._smem_without_slots + self.cached_bias_blocks * self._slot_bytes

    @property
    def overlaps_tiles(self) -> bool:
        """Whether the next tile's query can arrive before this tile's output is stored."""
        return self.stages_q > 1 or not self.share_qo

    def infeasible(self) -> str | None:
        """The reason why a kernel with these traits cannot run, or None."""
        if self.stages_q not in (1, 2):
            return f"stages_q must be 1 or 2, got {self.stages_q}"
        if self.cta_pair:
            return "cta_pair is not supported on Hopper"
        if self.mask_warpgroup and self.tile_m != 128:
            return f"a warpgroup of mask warps needs tile_m 128, got {self.tile_m}"
        if self.lists_per_warpgroup and self.num_mma_warpgroups != len(OWN_FIELDS):
            return f"block lists of each warpgroup need tile_m 192, got {self.tile_m}"
        if self.in_fp8 and self.tile_m != ROWS_PER_WARPGROUP:
            return f"keys and values in fp8 need tile_m {ROWS_PER_WARPGROUP}, got {self.tile_m}"
        if self.tile_m not in (64, 128, 192, 256):
            return f"tile_m must be 64, 128, 192 or 256, got {self.tile_m}"
        max_n = COLUMNS.num_words * WORD
        if self.tile_n % 16 or not 16 <= self.tile_n <= max_n:
            return f"tile_n must be a multiple of 16 in 16..{max_n}, got {self.tile_n}"
        if ROWS_PER_WARPGROUP % self.packed_heads:
            return f"pack_gqa needs a group of at most 64 heads, got {self.group_size}"
        if self.page_box is not None and (why := why_no_boxes(self.tile_n, self.page_box)):
            return why
        if self.share_qo and (self.tile_dv > self.tile_d):
            return "share_qo needs head_dim_v <= head_dim"
        if self.share_qo and self.stages_q > 1 and self.tile_dv != self.tile_d:
            return "share_qo with two query stages needs head_dim_v = head_dim"
        if self.smem_bytes > SMEM_CAPACITY or (self.in_fp8 and self.code_stages[0] < 2):
            return f"{self.smem_bytes} bytes of shared memory exceed {SMEM_CAPACITY}"
        if self.registers_needed > self.mma_registers:
            return f"{self.registers_needed} registers a thread exceed {self.mma_registers}"
        most = launch_registers(self._num_warpgroups)
        if self._product_registers > most:
            return f"{self._product_registers} registers of a product exceed the {most} of a launch"
        return None

    @property
    def halves_blocks(self) -> bool:
        """Whether a warpgroup computes half of S in a cut block if its rows see no more."""
        return self.passes_over and self.tile_n == 2 * HALF_KEYS

    def mma_qk(
        self,
        source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
        num_keys: int | None = None,
    ) -> cute.TiledMma:
        """S = Q K^T of a key block, or of num_keys of its keys; source: the source of Q."""
        return make_mma(self.dtype, num_keys or self.tile_n, source=source)

    def mma_pv(self, num_columns: int | None = None) -> cute.TiledMma:
        """O += P V of a value block, or of num_columns of its columns."""
        return make_mma(self.dtype, num_columns or self.tile_dv, b_major=MN, source=REGISTERS)

    def layout_q(self) -> cute.ComposedLayout:
        """(64, tile_d, warpgroup * stages_q): a warpgroup's rows lie together."""
        count = self.num_mma_warpgroups * self.stages_q
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.tile_d, count)

    def layout_k(self) -> cute.ComposedLayout:
        return rows_layout(self.dtype, self.tile_n, self.tile_d, self.stages_k)

    def layout_v(self) -> cute.ComposedLayout:
        """(tile_dv, tile_n, stages_kv): V is the MN-major operand B of P V."""
        return hopper.make_smem_layout_b(
            LayoutEnum.COL_MAJOR,
            (ROWS_PER_WARPGROUP, self.tile_dv, self.tile_n),
            self.dtype,
            self.stages_kv,
        )

    def layouts_loaded(self) -> tuple[Any, Any]:
        """Of keys and values."""
        if self.in_fp8:
            return self.layout_codes_k(), self.layout_codes_v()
        return self.layout_k(), self.layout_v()

    def layout_codes_k(self) -> cute.Layout:
        """(tile_n, tile_d, stages), of keys in fp8."""
        rows, columns, stages = self.tile_n, self.tile_d, self.code_stages[0]
        return cute.make_layout((rows, columns, stages), stride=(columns, 1, rows * columns))

    def layout_codes_v(self) -> cute.Layout:
        """(tile_dv, tile_n, stages), of values in fp8."""
        rows, columns, stages = self.tile_n, self.tile_dv, self.code_stages[1]
        return cute.make_layout((columns, rows, stages), stride=(1, columns, rows * columns))

    def layout_o(self) -> cute.ComposedLayout:
        """(64, tile_dv, warpgroup * stages): as many stages as the query if they share memory."""
        count = self.num_mma_warpgroups * (self.stages_q if self.share_qo else 1)
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.tile_dv, count)

    def channel_k(self, storage: Any, producers: int) -> Channel:
        """The channel of keys. producers: arrivals for a block."""
        of_stages = storage.k_barriers.data_ptr(), self.stages_k
        shared = self.multicasts_keys
        return Channel.create(*of_stages, producers, self.num_mma_warps, of_both=shared)

    def code_storage(self) -> cute.struct:
        """The shared memory for keys and values in fp8, behind that of `storage`."""
        stages_k, stages_v = self.code_stages

        def codes(count: int) -> type:
            return cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, count], 128]

        @cute.struct
        class CodeStorage:
            k: codes(stages_k * self.bytes_k)
            v: codes(stages_v * self.bytes_v)
            k_barriers: barriers(stages_k)
            v_barriers: barriers(stages_v)
            words: cute.struct.MemRange[Int32, stages_k]

        return CodeStorage

    def bias_storage(self) -> cute.struct:
        """The shared memory for rows of tables that stay, behind that of `storage`."""
        num_tags = self.cached_bias_blocks * self.num_mma_warps
        num_words = num_tags * WARP * self.cached_bias_words

        @cute.struct
        class CachedBiasStorage:
            words: words(num_words)
            tags: cute.struct.MemRange[Int32, num_tags]

        return CachedBiasStorage

    def storage(self) -> cute.struct:
        @cute.struct
        class Storage:
            q: elements(self.dtype, self.layout_q())
            k: elements(self.dtype, self.layout_k())
            v: elements(self.dtype, self.layout_v(), self.has_values)
            # an output that shares the query's memory has none of its own
            o: elements(self.dtype, self.layout_o(), not self.share_qo)
            q_barriers: barriers(self.stages_q)
            k_barriers: barriers(self.stages_k)
            v_barriers: barriers(self.stages_kv)
            bits_barriers: barriers(1)
            ring_barriers: barriers(RING_STAGES)
            walk_barriers: barriers(WALK_STAGES)
            claims_barriers: barriers(self.num_ctas - 1)
            claim: cute.struct.MemRange[Int32, self.num_ctas - 1]
            ring: words(WORDS * RING_STAGES)
            walk: words(WORDS * WALK_STAGES)
            block_flags: cute.struct.MemRange[Int32, self.stages_k]
            bits: words(self.bytes_bits // 4)
            any_bits: cute.struct.MemRange[Int32, self.tile_m // WORD]
            peer_barriers: barriers(self.peer_channels)
            peer_words: words(self.peer_channels * self.peer_words)

        return Storage
