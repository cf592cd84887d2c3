"""The converting warps of the Hopper forward: keys and values in fp8 become tiles in 16 bits.

The load warp brings codes of float8_e4m3fn into stages of their own, rows side by side without a
swizzle. A warpgroup reads them, multiplies each number by the scale of its row in fp32, rounds once
to the dtype of q, and writes the tile that products would have found if the cache were in 16 bits.
So whatever reads the tiles does not know of fp8, and results have the bits of a call over
`(cache.float() * descale).to(q.dtype)`.

Key and value blocks come in the order of a walk, each key block with the word that the load warp
wrote for it (`operand_loads`), which says where it lies and whether the walk ends with it.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import THREADS_PER_WARPGROUP, thread_in_warpgroup
from flash_mask_cute.core.operand_loads import N_BLOCK_SHIFT, Buffer, Place
from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.walk_ring import KIND_MASK, Kind
from flash_mask_cute.core.warp_scan import WARP
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.sm90.flash_fwd_traits import FwdTraits

# Codes in a word, and those that a thread converts at once: 8 bytes, which become 16.
CODES, UNIT = 4, 8
# Threads side by side in a row, at most: their units of 16 bytes fill the banks once.
LANES_OF_ROW = 8
# Units of a thread that are read before the first one is written.
UNITS_IN_FLIGHT = 4


class Codes(NamedTuple):
    """What the load warp fills: keys (keys, d, stages) and values (d_v, keys, stages) with their
    channels, and a word for each stage of keys."""

    k: Buffer
    v: Buffer
    words: cute.Tensor

    @staticmethod
    def create(traits: FwdTraits, storage: Any) -> "Codes":
        """storage: that of the traits' codes."""
        stages_k, stages_v = traits.code_stages
        readers = traits.num_conversion_warps
        return Codes(
            Buffer(
                storage.k.get_tensor(traits.layout_codes_k()),
                Channel.create(storage.k_barriers.data_ptr(), stages_k, 1, readers),
            ),
            Buffer(
                storage.v.get_tensor(traits.layout_codes_v()),
                Channel.create(storage.v_barriers.data_ptr(), stages_v, 1, readers),
            ),
            storage.words.get_tensor(cute.make_layout(stages_k)),
        )


class Descales(NamedTuple):
    """The scales of keys and values, fp32: (batch, heads), or one a row, (batch, rows, heads) or
    (pages, page_size, heads). None: 1."""

    k: cute.Tensor | None
    v: cute.Tensor | None

    @property
    def are_by_row(self) -> bool:
        """Whether some of them differ from row to row."""
        return any(x is not None and cute.rank(x) == 3 for x in self)


class Scales(NamedTuple):
    """The scales of a lane's row of a block of keys, and of the same block of values. block: which
    one. Where there is none, nobody reads them."""

    k: Float32
    v: Float32
    block: Int32

    @staticmethod
    def none() -> "Scales":
        return Scales(Float32(1.0), Float32(1.0), Int32(-1))


@dataclass(frozen=True)
class KeyConversion:
    """What the converting warps read and write. k, v, block_flags: as `codes`, in 16 bits."""

    codes: Codes
    k: Buffer
    v: Buffer
    block_flags: cute.Tensor
    descales: Descales
    pages: Pages | None
    heads_per_kv: Int32
    traits: cutlass.Constexpr[FwdTraits]

    @cute.jit
    def stream(self, ring: WorkRing) -> None:
        """Convert the blocks of every walk."""
        tile, number = Int32(0), Int32(0)
        while ring.wait(tile):
            work = ring.read(tile)
            place = Place(
                work.head_idx // self.heads_per_kv, work.batch_idx, work.offset_k, work.seqlen_k
            )
            scales, is_last = Scales.none(), Boolean(False)
            if const_expr(not self.descales.are_by_row):
                scales = self._look_up(place, Int32(0))
            while not is_last:
                scales, is_last = self._convert_block(place, scales, number)
                number += 1
            ring.release(tile)
            tile += 1

    @cute.jit
    def _convert_block(self, place: Place, scales: Scales, number: Int32) -> tuple[Scales, Boolean]:
        """Convert a block of keys and of values. scales: of the block that a walk usually visits
        after the one before. Returns those of the next one, and whether the walk is at its end."""
        codes = self.codes
        codes.k.channel.wait(number)
        word = codes.words[codes.k.channel.index(number)]
        following = scales
        if const_expr(self.descales.are_by_row):
            block = word >> N_BLOCK_SHIFT
            if scales.block != block:
                scales = self._look_up(place, block)
            # they are on their way while this block is converted
            following = self._look_up(place, cutlass.max(block - 1, 0))
        self.k.channel.acquire(number)
        if cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP == 0:
            self.block_flags[self.k.channel.index(number)] = word
        self._convert(codes.k, self.k, number, self.descales.k, scales.k)
        codes.v.channel.wait(number)
        self.v.channel.acquire(number)
        # (d_v, keys) to products, (keys, d_v) here
        codes_v, v = (x._replace(smem=_transposed(x.smem)) for x in (codes.v, self.v))
        self._convert(codes_v, v, number, self.descales.v, scales.v)
        return following, (word & KIND_MASK) == Kind.END

    # -- scales ---------------------------------------------------------------------------------

    @cute.jit
    def _look_up(self, place: Place, block: Int32) -> Scales:
        """The scales of this lane's row. A row behind the sequence's end has those of its last one,
        as it may have its numbers."""
        key = block * self.traits.tile_n + cutlass.min(self._own_row(), self.traits.tile_n - 1)
        key = cutlass.max(cutlass.min(key, place.length - 1), 0)
        entry, row = place.batch_idx, key
        if const_expr(self.descales.are_by_row and self.pages is not None):
            row = self.pages.row(place.batch_idx, key)
            entry = self.pages.number(self.pages.entry(place.batch_idx, row))
            row = self.pages.place(entry, row, place.length).row
        k, v = (self._scale(x, place, entry, row) for x in self.descales)
        return Scales(k, v, block)

    def _scale(
        self, descale: cute.Tensor | None, place: Place, entry: Int32, row: Int32
    ) -> Float32:
        if descale is None:
            return Float32(1.0)
        if cute.rank(descale) == 2:
            return descale[place.batch_idx, place.head]
        return descale[entry, row, place.head]

    # -- tiles ----------------------------------------------------------------------------------
    #
    # `lanes` neighbouring threads convert a row, and the warpgroup as many rows as it has threads
    # for in a step. A warp converts at most WARP rows of a block, and each lane knows the scale of
    # one of them.

    @property
    def lanes(self) -> int:
        columns = [cute.size(x.smem, mode=[mode]) for x, mode in ((self.k, 1), (self.v, 0))]
        return math.gcd(*(x // UNIT for x in columns), LANES_OF_ROW)

    def _row(self, step: int | Int32, row_of_warp: Int32) -> Int32:
        """A row of a block, of those that this warp converts. Steps may end behind the block: its
        last row is then converted several times, to the same numbers."""
        warp = thread_in_warpgroup() // WARP
        row = step * (THREADS_PER_WARPGROUP // self.lanes) + warp * (WARP // self.lanes)
        return cutlass.min(row + row_of_warp, self.traits.tile_n - 1)

    def _own_row(self) -> Int32:
        rows, lane = WARP // self.lanes, cute.arch.lane_idx()
        return self._row(lane // rows, lane % rows)

    def _scale_of_row(self, descale: cute.Tensor | None, own: Float32, step: int) -> Float32 | None:
        """The scale of the row that this lane converts in a step. own: of the lane's own row."""
        if descale is None:
            return None
        if cute.rank(descale) == 2:
            return own
        owner = step * (WARP // self.lanes) + cute.arch.lane_idx() // self.lanes
        return cute.arch.shuffle_sync(own, owner)

    def _convert(
        self,
        codes: Buffer,
        to: Buffer,
        number: Int32,
        descale: cute.Tensor | None,
        own: Float32,
    ) -> None:
        """Convert a stage, (keys, columns), and hand it over. own: the scale of the lane's own
        row."""
        source = codes.smem[None, None, codes.channel.index(number)]
        source = cute.recast_tensor(source, Int32)
        target = to.smem[None, None, to.channel.index(number)]
        lanes, lane = self.lanes, cute.arch.lane_idx()
        of_thread = cute.size(target, mode=[1]) // UNIT // lanes
        steps = -(-self.traits.tile_n * lanes // THREADS_PER_WARPGROUP)
        scales: dict[int, Float32 | None] = {}
        units = [(step, i) for step in range(steps) for i in range(of_thread)]
        read = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=UNIT * 8)
        write = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(),
            self.traits.dtype,
            num_bits_per_copy=UNIT * self.traits.dtype.width,
        )
        for first in range(0, len(units), UNITS_IN_FLIGHT):
            at_once = units[first : first + UNITS_IN_FLIGHT]
            places, found = [], []
            for step, i in at_once:
                row = self._row(step, lane // lanes)
                # neighbouring rows begin in different halves, so that both are in other banks
                unit = (i ^ (row & 1) if of_thread % 2 == 0 else i) * lanes + lane % lanes
                words = cute.make_rmem_tensor((UNIT // CODES,), Int32)
                cute.copy(
                    read, cute.local_tile(source[row, None], (UNIT // CODES,), (unit,)), words
                )
                places.append((row, unit))
                found.append(words)
            for (step, _), (row, unit), words in zip(at_once, places, found, strict=True):
                if step not in scales:
                    scales[step] = self._scale_of_row(descale, own, step)
                numbers = cute.make_rmem_tensor((UNIT,), self.traits.dtype)
                pairs = cute.recast_tensor(numbers, Int32)
                for j in range(UNIT // CODES):
                    two = numbers_of(words[j], scales[step], self.traits.dtype)
                    pairs[2 * j], pairs[2 * j + 1] = two
                cute.copy(write, numbers, cute.local_tile(target[row, None], (UNIT,), (unit,)))
        # products read through another proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        to.channel.publish(number)
        codes.channel.release(number)


def _transposed(smem: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(smem.iterator, cute.select(smem.layout, [1, 0, 2]))


def numbers_of(
    word: Int32, scale: Float32 | None, dtype: type[cutlass.Numeric]
) -> tuple[Int32, Int32]:
    """Four codes as numbers in 16 bits, in two words: times the scale in fp32, rounded once.

    Written as PTX, for which the language has no name. Codes are exact in fp16, NaN stays NaN.
    """
    text = (
        "{ .reg .b16 c0, c1; .reg .b32 a, b; mov.b32 {c0, c1}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, c0; cvt.rn.f16x2.e4m3x2 b, c1; "
    )
    if scale is None and dtype is cutlass.Float16:
        text += "mov.b32 {$w0}, a; mov.b32 {$w1}, b; }"
    else:
        name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
        text += ".reg .b16 h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3; "
        text += "mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b; "
        text += "".join(f"cvt.f32.f16 f{i}, h{i}; " for i in range(CODES))
        if scale is not None:
            text += "".join(f"mul.rn.f32 f{i}, f{i}, {{$r1}}; " for i in range(CODES))
        text += f"cvt.rn.{name}.f32 {{$w0}}, f1, f0; cvt.rn.{name}.f32 {{$w1}}, f3, f2; }}"
    arguments = [word] if scale is None else [word, scale]
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=arguments)
