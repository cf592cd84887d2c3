"""The converting warps of the Hopper forward: keys and values in fp8 become tiles in 16 bits.

The load warp brings codes of float8_e4m3fn into stages of their own, rows side by side without a
swizzle. A warpgroup multiplies each number by the scale of its row in fp32, rounds once to the
dtype of q, and writes the tile that products would find if the cache were in 16 bits. So results
have the bits of a call over `(cache.float() * descale).to(q.dtype)`. Each key block comes with the
word that the load warp wrote for it (`operand_loads`): where it lies, and whether the walk ends
with it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    thread_in_warpgroup,
    transposed,
)
from flash_mask_cute.core.fp8_codes import CODES, numbers_of
from flash_mask_cute.core.operand_loads import N_BLOCK_SHIFT, Buffer, HeadKeys
from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.walk_ring import KIND_MASK, Kind
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.sm90.flash_fwd_traits import FwdTraits

# Codes that a thread converts at once: 8 bytes, which become 16.
UNIT = 8
# Threads side by side in a row, at most: their units of 16 bytes fill the banks once.
LANES_OF_ROW = 8
# blocks before which scales of rows are asked for
SCALE_BLOCKS_AHEAD = 3


class Codes(NamedTuple):
    """What the load warp fills: keys (keys, d, stages), values (d_v, keys, stages), and a word for
    each stage of keys."""

    k: Buffer
    v: Buffer
    words: cute.Tensor

    @staticmethod
    def create(traits: FwdTraits, storage: Any, loads: int) -> "Codes":
        """storage: `FwdTraits.code_storage`. loads: arrivals that fill a stage."""
        stages_k, stages_v = traits.code_stages
        # whoever converts values reads the words of the keys
        readers_k, readers_v = traits.num_conversion_warps, WARPS_PER_WARPGROUP
        return Codes(
            Buffer(
                storage.k.get_tensor(traits.layout_codes_k()),
                Channel.create(storage.k_barriers.data_ptr(), stages_k, loads, readers_k),
            ),
            Buffer(
                storage.v.get_tensor(traits.layout_codes_v()),
                Channel.create(storage.v_barriers.data_ptr(), stages_v, loads, readers_v),
            ),
            storage.words.get_tensor(cute.make_layout(stages_k)),
        )


class Descales(NamedTuple):
    """The scales of keys and values, fp32: (batch, heads), or one a row, (batch, rows, heads) or
    (pages, page_size, heads). None: 1."""

    k: cute.Tensor | None
    v: cute.Tensor | None

    def of_rows(self) -> "Descales":
        """Those that have one for each row."""
        return Descales(*(x if _is_of_rows(x) else None for x in self))


class Scales(NamedTuple):
    """The scale of a lane's row of a block; block -1: none. next_entry: what the table of pages has
    for the same row of the block before it, which a walk usually visits next."""

    value: Float32
    block: Int32
    next_entry: Int32


@dataclass(frozen=True)
class Conversion:
    """A warpgroup that converts keys or values. to: the tile in 16 bits. descale: see `Descales`.
    block_flags: as the words of codes, for readers of the tiles of keys."""

    codes: Codes
    of_keys: cutlass.Constexpr[bool]
    to: Buffer
    block_flags: cute.Tensor
    descale: cute.Tensor | None
    pages: Pages | None
    heads_per_kv: Int32
    traits: cutlass.Constexpr[FwdTraits]

    @cute.jit
    def stream(self, ring: WorkRing) -> None:
        tile, number = Int32(0), Int32(0)
        while ring.wait(tile):
            work = ring.read(tile)
            place = HeadKeys(
                work.head_idx // self.heads_per_kv, work.batch_idx, work.offset_k, work.seqlen_k
            )
            scales, is_last = Scales(Float32(1.0), Int32(-1), Int32(0)), Boolean(False)
            if const_expr(self.descale is not None and not self._has_scales_of_rows):
                scales = scales._replace(value=self.descale[place.batch_idx, place.head])
            while not is_last:
                scales, is_last = self._convert_block(place, scales, number)
                number += 1
            ring.release(tile)
            tile += 1

    @cute.jit
    def _convert_block(
        self, place: HeadKeys, scales: Scales, number: Int32
    ) -> tuple[Scales, Boolean]:
        """Convert a block. scales: expected ones. Returns the next, and whether the walk ends."""
        codes = self.codes
        codes.k.channel.wait(number)
        word = codes.words[codes.k.channel.index(number)]
        following = scales
        if const_expr(self._has_scales_of_rows):
            block = word >> N_BLOCK_SHIFT
            if scales.block != block:
                scales = self._look_up(place, block, self._entry(place, block))
            # they are on their way while this block is converted
            following = self._look_up(place, block - 1, scales.next_entry)
            if const_expr(self.pages is None):
                self._prefetch_scale(place, block - SCALE_BLOCKS_AHEAD)
        if const_expr(not self.of_keys):
            # of the keys, whoever converts values wants their word alone, which all lanes have
            cute.arch.sync_warp()
            codes.k.channel.release(number)
            codes.v.channel.wait(number)
        units = self._read(number)
        of_rows = self._scales_of_rows(scales.value)
        self.to.channel.acquire(number)
        if const_expr(self.of_keys):  # noqa: SIM102 (decided while tracing)
            if cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP == 0:
                self.block_flags[self.to.channel.index(number)] = word
        self._write(number, units, of_rows)
        return following, (word & KIND_MASK) == Kind.END

    # -- scales ---------------------------------------------------------------------------------

    @property
    def _has_scales_of_rows(self) -> bool:
        return _is_of_rows(self.descale)

    def _look_up(self, place: HeadKeys, block: Int32, entry: Int32) -> Scales:
        """Those of a block. entry: of the table of pages."""
        value = self._scale(place, block, entry)
        return Scales(value, block, self._entry(place, block - 1))

    def _key(self, place: HeadKeys, block: Int32) -> Int32:
        """This lane's key of a block. A row after the sequence's end takes the last one's scale."""
        key = block * self.traits.tile_n + cutlass.min(self._own_row(), self.traits.tile_n - 1)
        return cutlass.max(cutlass.min(key, place.length - 1), 0)

    def _entry(self, place: HeadKeys, block: Int32) -> Int32:
        """What the table of pages has for this lane's key of a block: nobody waits for it yet."""
        if self.pages is None:
            return Int32(0)
        row = self.pages.row(place.batch_idx, self._key(place, block))
        return self.pages.entry(place.batch_idx, row)

    def _scale(self, place: HeadKeys, block: Int32, entry: Int32) -> Float32:
        """The scale of this lane's row of a block. entry: of the table of pages."""
        key = self._key(place, block)
        if self.pages is None:
            return self.descale[place.batch_idx, key, place.head]
        page, row = self.pages.number(entry), self.pages.row(place.batch_idx, key)
        row = self.pages.place(page, row, place.length).row
        return self.descale[page, row, place.head]

    def _prefetch_scale(self, place: HeadKeys, block: Int32) -> None:
        """Prefetch the scale of this lane's row into the L2 cache, before a fence waits for it."""
        key = self._key(place, cutlass.max(block, 0))
        at = cute.crd2idx((place.batch_idx, key, place.head), self.descale.layout)
        cute.arch.prefetch((self.descale.iterator + at).to_llvm_ptr(), cache_level="L2")

    # -- tiles ----------------------------------------------------------------------------------
    #
    # `lanes` neighbouring threads convert a row, and the warpgroup as many rows as it has threads
    # for in a step. A warp converts at most WARP rows of a block, and each lane knows the scale of
    # one of them.

    @property
    def _tiles(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Codes and numbers, (rows, columns, stages)."""
        if self.of_keys:
            return self.codes.k.smem, self.to.smem
        # (d_v, keys) to products
        return transposed(self.codes.v.smem), transposed(self.to.smem)

    @property
    def _units_of_row(self) -> int:
        return cute.size(self._tiles[1], mode=[1]) // UNIT

    @property
    def lanes(self) -> int:
        return math.gcd(self._units_of_row, LANES_OF_ROW)

    @property
    def _rows_of_step(self) -> int:
        return THREADS_PER_WARPGROUP // self.lanes

    @property
    def _steps(self) -> int:
        return -(-self.traits.tile_n // self._rows_of_step)

    @property
    def _has_whole_steps(self) -> bool:
        return self.traits.tile_n % self._rows_of_step == 0

    def _row(self, step: int | Int32, row_of_warp: Int32) -> Int32:
        """A row of a block that this warp converts; after the block's end, its last row again."""
        warp = thread_in_warpgroup() // WARP
        row = step * self._rows_of_step + warp * (WARP // self.lanes) + row_of_warp
        return row if self._has_whole_steps else cutlass.min(row, self.traits.tile_n - 1)

    def _own_row(self) -> Int32:
        rows, lane = WARP // self.lanes, cute.arch.lane_idx()
        return self._row(lane // rows, lane % rows)

    def _scales_of_rows(self, own: Float32) -> list[Float32 | None]:
        """The scales of the rows that this lane converts, a row a step. own: of its own row."""
        if self.descale is None:
            return [None] * self._steps
        if not self._has_scales_of_rows:
            return [own] * self._steps
        first, rows = cute.arch.lane_idx() // self.lanes, WARP // self.lanes
        return [cute.arch.shuffle_sync(own, step * rows + first) for step in range(self._steps)]

    @property
    def _units_of_step(self) -> int:
        """Units of a thread in a row."""
        return self._units_of_row // self.lanes

    def _places(self, step: int) -> list[tuple[Int32, Int32]]:
        """The row and the first column of each unit of this lane in a step."""
        lane = cute.arch.lane_idx()
        row = self._row(step, lane // self.lanes)
        # neighbouring rows begin in different halves, so that both are in other banks
        turn = row & 1 if self._units_of_step % 2 == 0 else 0
        units = ((i ^ turn) * self.lanes + lane % self.lanes for i in range(self._units_of_step))
        return [(row, unit * UNIT) for unit in units]

    def _addresses(self, smem: cute.Tensor) -> Iterator[cute.Pointer]:
        """Where each unit of this lane lies in a stage (rows, columns), step by step. A step is a
        multiple of the rows after which a swizzle repeats, so places of other steps are at fixed
        distances from those of the first."""
        first = [_pointer(smem, *place) for place in self._places(0)]
        for step in range(self._steps):
            if self._has_whole_steps:
                distance = cute.crd2idx((step * self._rows_of_step, 0), smem.layout)
                yield from (pointer + distance for pointer in first)
            else:
                yield from (_pointer(smem, *place) for place in self._places(step))

    def _read(self, number: Int32) -> list[cute.Tensor]:
        """Take all codes of this lane from a stage, which is free again afterwards."""
        channel = self.codes.k.channel if self.of_keys else self.codes.v.channel
        source = self._tiles[0][None, None, channel.index(number)]
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=UNIT * 8)
        units = []
        for pointer in self._addresses(source):
            words = cute.make_rmem_tensor((UNIT // CODES,), Int32)
            at = cute.recast_ptr(pointer, dtype=Int32)
            cute.copy(atom, cute.make_tensor(at, words.layout), words)
            units.append(words)
        cute.arch.sync_warp()
        channel.release(number)
        return units

    def _write(self, number: Int32, units: list[cute.Tensor], scales: list[Float32 | None]) -> None:
        """Convert what was read into a free stage, and hand it over."""
        dtype, channel = self.traits.dtype, self.to.channel
        target = self._tiles[1][None, None, channel.index(number)]
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=UNIT * dtype.width
        )
        for i, pointer in enumerate(self._addresses(target)):
            numbers = cute.make_rmem_tensor((UNIT,), dtype)
            pairs = cute.recast_tensor(numbers, Int32)
            for j in range(UNIT // CODES):
                two = numbers_of(units[i][j], scales[i // self._units_of_step], dtype)
                pairs[2 * j], pairs[2 * j + 1] = two
            cute.copy(atom, numbers, cute.make_tensor(pointer, numbers.layout))
        # products read through another proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        channel.publish(number)


def _is_of_rows(descale: cute.Tensor | None) -> bool:
    return descale is not None and cute.rank(descale) == 3


def _pointer(smem: cute.Tensor, row: Int32, column: Int32) -> cute.Pointer:
    """The address of a unit, with the swizzle of the tile applied to it."""
    dtype, space, swizzle = smem.element_type, smem.memspace, smem.iterator.type.swizzle_type
    address = (smem.iterator + cute.crd2idx((row, column), smem.layout)).toint()
    turned = ((1 << swizzle.num_bits) - 1) << swizzle.num_base
    address = address ^ ((address >> swizzle.num_shift) & turned)
    return cute.make_ptr(dtype, address, space, assumed_align=UNIT * dtype.width // 8)
