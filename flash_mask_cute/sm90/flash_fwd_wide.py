"""FlashAttention forward for Hopper of heads above 256 columns: pairs of CTAs that exchange P.

Two CTAs of a cluster have the same 128 query rows and the same walk over blocks of 128 keys. Each
scores half of a block's keys over all columns of Q and K, and sums half of the columns of O over
all keys. So no product is computed twice. A warpgroup sends P of its 64 rows to the same warpgroup
of the other CTA, as an operand in registers (`cta_pairs.PeerWords`), with the maxima in use.

Keys and values come in fills of 64 keys by 64 columns, through one ring. Of a block these are K of
the CTA's own keys, V of the other's keys of the block before, and V of the own keys, in the order
of a warpgroup's work:

    S = Q K^T of a block, O += P' V' of the block before, P = exp(S - maximum), send P, O += P V

The exponentials are computed under P' V', which leaves the peer the time of S to send P'. With each
block both CTAs take the larger of their maxima, so these seldom differ. Of the four warpgroups the
one that is furthest behind waits for nobody: what its peer sends, the peer sent before it. Roles,
walks, masks and the epilogue are those of `flash_fwd`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core import softmax as softmax_math
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import (
    SMEM_CAPACITY,
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    thread_in_warpgroup,
    transposed,
)
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.operand_loads import HeadKeys, LoadState, OperandLoads
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.walk_ring import KIND_MASK, OWN_KIND_SHIFT, Block, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.bit_tile import HALF_WORD, LOW_HALF
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskWarpRows
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cta_pairs import PeerWords
from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90
from flash_mask_cute.sm90.flash_fwd_epilogue import Epilogue
from flash_mask_cute.sm90.flash_fwd_mainloop import BlockFacts, Channels, FwdSmem, KeyBlocks
from flash_mask_cute.sm90.flash_fwd_traits import HALF_KEYS, SCALAR_REGISTERS, FwdTraits
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING, mma_warpgroup_idx, take_bits

# query rows; columns of a fill of HALF_KEYS keys, and its bytes; the most fills in flight
TILE_M, FILL_COLUMNS = 128, 64
_FILL_BYTES = HALF_KEYS * FILL_COLUMNS * 2
_MOST_FILLS = 16
# of a thread and of a warpgroup: P of half of a block; that and numbers of rows
_PROB_WORDS = HALF_KEYS // 16 * wgmma.WORDS_PER_STEP
_WORDS_OF_PROBS = THREADS_PER_WARPGROUP * _PROB_WORDS
_MESSAGE = _WORDS_OF_PROBS + wgmma.ROWS_PER_WARPGROUP
# of a row of a bit tile: 16 columns in half of a word
_BIT_WORDS = wgmma.COLUMNS.num_words // 2


@dataclass(frozen=True)
class WideFwdTraits(FwdTraits):
    """tile_n: keys of a block, which two CTAs score. Stages of k are fills of keys or values."""

    multicasts_keys = has_values = False
    _registers_beside = 0
    bytes_k = bytes_v = _FILL_BYTES
    box_k, box_v = (HALF_KEYS, FILL_COLUMNS), ((1, HALF_KEYS), FILL_COLUMNS)
    peer_channels, peer_words, bytes_bits = 2, _MESSAGE, TILE_M * _BIT_WORDS * 4

    @property
    def tile_d(self) -> int:
        return -(-self.head_dim // FILL_COLUMNS) * FILL_COLUMNS

    @property
    def tile_dv(self) -> int:
        """Of this CTA: whole fills, and the second one may have fewer."""
        return -(-self.head_dim_v // (2 * FILL_COLUMNS)) * FILL_COLUMNS

    second_column = tile_dv

    @property
    def k_fills(self) -> int:
        return self.tile_d // FILL_COLUMNS

    @property
    def v_fills(self) -> int:
        """Of the values of half of a block."""
        return self.tile_dv // FILL_COLUMNS

    @property
    def block_fills(self) -> int:
        return self.k_fills + 2 * self.v_fills

    @property
    def registers_needed(self) -> int:
        """Of S, P, the peer's P, O, and scalars."""
        return HALF_KEYS // 2 + 2 * (HALF_KEYS // 4) + self.tile_dv // 2 + SCALAR_REGISTERS

    @property
    def _bytes_without_fills(self) -> int:
        of_peer = 4 * self.peer_channels * self.peer_words
        return self.bytes_q + of_peer + self.bytes_bits + SMEM_BOOKKEEPING

    @property
    def stages_k(self) -> int:
        return min((SMEM_CAPACITY - self._bytes_without_fills) // _FILL_BYTES, _MOST_FILLS)

    @property
    def smem_bytes(self) -> int:
        return self._bytes_without_fills + self.stages_k * _FILL_BYTES

    def infeasible(self) -> str | None:
        fixed = {"tile_m": TILE_M, "tile_n": 2 * HALF_KEYS, "stages_q": 1, "stages_kv": 1}
        fixed |= {"share_qo": True, "page_box": None, "in_fp8": False, "few_rows": False}
        for name, value in (fixed | {"mask_warpgroup": False, "num_ctas": 2}).items():
            if (given := getattr(self, name)) != value:
                return f"{name} must be {value} where CTAs exchange P, got {given}"
        return super().infeasible()

    def layout_k(self) -> cute.ComposedLayout:
        """(keys, columns, fills), of K and of V."""
        return wgmma.rows_layout(self.dtype, HALF_KEYS, FILL_COLUMNS, self.stages_k)

    def layout_v(self) -> cute.ComposedLayout:
        return cute.select(self.layout_k(), mode=[1, 0, 2])

    def channel_k(self, storage: Any, producers: int) -> Channel:
        # those of `PeerRows`, of all warpgroups, are initialised here
        of_peer = storage.peer_barriers.data_ptr(), self.peer_channels
        Channel.create(*of_peer, 1, WARPS_PER_WARPGROUP)
        return super().channel_k(storage, producers)


@dataclass(frozen=True)
class PeerRows(PeerWords):
    """Messages of a warpgroup to the same one of the other CTA: two numbers of each quad's rows, at
    `rows`, and in those of blocks also P."""

    rows: cute.Pointer

    @staticmethod
    def of_warpgroup(storage: Any, count: int) -> "PeerRows":
        own, full = mma_warpgroup_idx(), storage.peer_barriers.data_ptr()
        received = storage.peer_words.data_ptr() + own * _MESSAGE
        channel = Channel(full + own, full + count + own, 1)
        return PeerRows(channel, received, _PROB_WORDS, received + _WORDS_OF_PROBS)

    @cute.jit
    def _send_rows(self, number: Int32, of_rows: cute.Tensor, count: cutlass.Constexpr[int]):
        """Send a float of each row, last of a message of so many words, and expect the peer's."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
            self.channel.expect(number, 4 * count)
        if thread_in_warpgroup() % 4 == 0:
            bits, barrier = cute.recast_tensor(of_rows, Int32), self.channel.barrier(number)
            place = self._of_quad.align(8)
            cute.arch.store_async_dsmem(place, (bits[0], bits[1]), barrier, clusters.peer())

    def _received_rows(self) -> list[Float32]:
        place = cute.recast_ptr(self._of_quad, dtype=Float32)
        received = cute.make_tensor(place, cute.make_layout(wgmma.ROWS_PER_THREAD))
        return [received[r] for r in range(wgmma.ROWS_PER_THREAD)]

    @property
    def _of_quad(self) -> cute.Pointer:
        return self.rows + thread_in_warpgroup() // 4 * wgmma.ROWS_PER_THREAD

    def send_probs(self, number: Int32, probs: cute.Tensor, row_max: cute.Tensor) -> None:
        self.send(number, probs)
        self._send_rows(number, row_max, _MESSAGE)

    def take_probs(self, number: Int32, probs: cute.Tensor) -> list[Float32]:
        """Read the peer's probabilities into `probs`. Returns the maxima of its rows. Release them
        after a product of them has begun."""
        self.take(number, probs)
        return self._received_rows()

    def exchange(self, number: Int32, of_rows: cute.Tensor) -> list[Float32]:
        """The peer's floats of rows for these, which are equal in a quad."""
        self.channel.acquire(number)
        self._send_rows(number, of_rows, _MESSAGE - _WORDS_OF_PROBS)
        self.channel.wait(number)
        found = self._received_rows()
        cute.arch.fence_acq_rel_cluster()
        self.release(number)
        return found


@dataclass(frozen=True)
class FillLoads(OperandLoads):
    """The fills of a block. shape: `WideFwdTraits`."""

    queries_late = True

    @cute.jit
    def _load_block(
        self, place: HeadKeys, load_query: cutlass.Constexpr[Callable[[], None]], state: LoadState,
        block: Block,
    ) -> LoadState:  # fmt: skip
        shape, rank, operands = self.shape, self.half.rank, self.operands
        if const_expr(self.lengths.cu_seqlens_k is None):
            gK = operands.k[None, None, place.head, place.batch_idx]
        else:
            gK = cute.domain_offset((place.offset, 0), operands.k[None, None, place.head])
        blocks = cute.local_tile(gK, shape.box_k, (None, None))
        src, dst = tma.blocks_of(operands.k_atom, blocks, self.k.smem)
        number = state.blocks * shape.block_fills
        if state.v_block >= 0:
            number -= shape.v_fills
        channel = self._begin_block(number, block)
        for i in cutlass.range(shape.k_fills, unroll=1):
            barrier = self._begin_fill(number)
            of_fill = src[None, 2 * block.index + rank, i], dst[None, channel.index(number)]
            cute.copy(operands.k_atom, *of_fill, tma_bar_ptr=barrier)
            number += 1
        if state.v_block >= 0:
            number = self._load_half(number, place, 2 * state.v_block + (rank ^ 1))
        else:
            load_query()
        self._load_half(number, place, 2 * block.index + rank)
        return state._replace(blocks=state.blocks + 1, v_block=block.index, v_place=place)

    @cute.jit
    def _load_values(self, state: LoadState) -> None:
        """The last values of a walk, which come before the next query."""
        if state.v_block >= 0:
            number = state.blocks * self.shape.block_fills - self.shape.v_fills
            self._load_half(number, state.v_place, 2 * state.v_block + (self.half.rank ^ 1))

    @cute.jit
    def _load_half(self, number: Int32, place: HeadKeys, half: Int32) -> Int32:
        """Load values of HALF_KEYS keys, half a block. Returns the number of the next fill."""
        shape, smem = self.shape, transposed(self.v.smem)
        side, keys = tma.RowSide.of_keys(self.lengths), (place.offset, place.length)
        # other rows may hold NaN, which probabilities of 0 keep
        of_keys = self.operands.v, side, place.batch_idx, *keys, half * HALF_KEYS
        gV, row = tma.readable_rows(*of_keys)
        for i in cutlass.range(shape.v_fills, unroll=1):
            barrier = self._begin_fill(number)
            # a fill past the end has any columns, which are not stored
            column = self._first_value_column + i * FILL_COLUMNS
            column = cutlass.min(column, (shape.head_dim_v - 1) // FILL_COLUMNS * FILL_COLUMNS)
            first = place.head, row
            src, dst = tma.tile_of(self.operands.v_atom, gV, first, shape.box_v, smem, column)
            to = dst[None, self.k.channel.index(number)]
            cute.copy(self.operands.v_atom, src, to, tma_bar_ptr=barrier)
            number += 1
        return number

    def _begin_fill(self, number: Int32) -> cute.Pointer:
        self.k.channel.acquire(number)
        self.k.channel.expect(number, _FILL_BYTES)
        return self.k.channel.barrier(number)


class HalfBits(ForwardMask):
    """`ForwardMask` whose bit tiles have the columns that this CTA scores, two words of a line."""

    def make_bits(self, work: Work, block: Block, warp_rows: MaskWarpRows) -> tuple:
        found = ForwardMask.make_bits(self, work, block, warp_rows)
        shift = clusters.rank() * HALF_WORD
        halves = [(word >> shift) & LOW_HALF for word in found]
        return tuple(
            low | (high << HALF_WORD) for low, high in zip(halves[::2], halves[1::2], strict=True)
        )


@dataclass(frozen=True)
class PairedBlocks(KeyBlocks):
    """`KeyBlocks`; this CTA scores half of each. peer: of this warpgroup."""

    peer: PeerRows

    def make_probs(self) -> cute.Tensor:
        return cute.make_rmem_tensor(_PROB_WORDS, Int32)

    def _bits(self, cut: Int32, is_ready: Boolean) -> tuple:
        halves = cute.make_tensor(
            cute.recast_ptr(self.tiles.bits.iterator, dtype=Uint16),
            cute.make_layout((2 * _BIT_WORDS, TILE_M)),
        )
        first = mma_warpgroup_idx() * wgmma.ROWS_PER_WARPGROUP
        return tuple(Int32(x) for x in take_bits(halves, self.channels.bits, first, cut, is_ready))

    @cute.jit
    def begin(self, tile: Int32, block: Int32, cut: Int32, fill: Int32) -> tuple:
        """The first block of a walk, until the peer's part. Returns the next kind, and the numbers
        of the next partial block and the next fill. No products are in flight before or after."""
        acc_S, probs = wgmma.make_accumulator(HALF_KEYS), self.make_probs()
        flags, cut = self._score(acc_S, tile, cut, fill)
        scores = self._rows_of(acc_S)
        self.softmax.start(scores)
        self.softmax.accumulate(scores)
        wgmma.round_pairs(probs, acc_S, self.traits.dtype)
        self.peer.send_probs(self._message(tile, block), probs, self.softmax.row_max)
        fill = self._multiply_values(probs, fill + self.traits.k_fills)
        return flags & KIND_MASK, cut, fill

    def _message(self, tile: Int32, block: Int32) -> Int32:
        """The number of a block's message: after each walk there are one or two more."""
        return block + tile * (2 if self.facts.keeps_largest else 1)

    @cute.jit
    def visit(self, tile: Int32, block: Int32, cut: Int32, fill: Int32) -> tuple:
        """The peer's part of the block before, with the exponentials of this one under its product,
        and this one until the peer's part. The same results as of `begin`."""
        traits = self.traits
        acc_S = wgmma.make_accumulator(HALF_KEYS)
        of_peer, fresh = self.make_probs(), self.make_probs()
        flags, cut = self._score(acc_S, tile, cut, fill)
        fill += traits.k_fills
        message = self._message(tile, block)
        self._take(message - 1, of_peer)
        self._multiply_values(of_peer, fill, waits=False)
        self.peer.release(message - 1)
        factors = self._exponentials(False, self._rows_of(acc_S), fresh)
        self.peer.send_probs(message, fresh, self.softmax.row_max)
        if softmax_math.differ_from_one(factors):
            warpgroup.wait_group(0)
            softmax_math.rescale(self._rows_of(self.acc_O), factors)
        # docs/facts/compiler.md#a-wait-for-products-moves-up-to-the-start-of-its-basic-block
        warpgroup.wait_group(0)
        for i in range(traits.v_fills):
            self.channels.k.release(fill + i)
        probs = self.make_probs()
        wgmma.copy_words(probs, fresh, self.opaque_one)
        fill = self._multiply_values(probs, fill + traits.v_fills)
        return flags & KIND_MASK, cut, fill

    @cute.jit
    def end(self, tile: Int32, block: Int32, fill: Int32) -> Int32:
        """The peer's part of a walk's last block. Returns the number of the next fill."""
        message, of_peer = self._message(tile, block), self.make_probs()
        self._take(message, of_peer)
        fill = self._multiply_values(of_peer, fill)
        self.peer.release(message)
        self.join_rows(message + 1)
        return fill

    @cute.jit
    def _score(self, acc_S: cute.Tensor, tile: Int32, cut: Int32, fill: Int32) -> tuple:
        """Masked scores of half of a block's keys. Returns the block's flags, and the number of the
        next partial block."""
        scores = self._rows_of(acc_S)
        self.channels.k.wait(fill)
        flags = self.tiles.block_flags[self.channels.k.index(fill)]
        self._multiply_keys(acc_S, tile, fill)
        if const_expr(self.score_mod is None):
            self._modify(None, None, scores)
        elif self.channels.ring.read(tile).has_scores:
            # a sequence without queries or keys has no position to evaluate
            half = clusters.rank()
            loaded = self._load_table_rows(tile, flags, half)
            self._modify(self._places(tile, flags, True, half), loaded, scores)
        if (flags >> OWN_KIND_SHIFT) & KIND_MASK == Kind.PARTIAL:
            bit_tile.hide_unset(scores, self._bits(cut, Boolean(False)))
            cut += 1
        return flags, cut

    @cute.jit
    def _take(self, message: Int32, of_peer: cute.Tensor) -> None:
        """Probabilities of the peer, in units of the larger of both maxima, as O and the sums."""
        softmax = self.softmax
        maxima = self.peer.take_probs(message, of_peer)
        if softmax_math.any_in_warp(softmax.differs_from(maxima)):
            own, others = softmax.join(maxima)
            softmax_math.rescale(self._rows_of(self.acc_O), own)
            acc = wgmma.make_accumulator(HALF_KEYS)
            acc.store(wgmma.rounded_values(of_peer, self.traits.dtype).load().to(Float32))
            softmax_math.rescale(self._rows_of(acc), others)
            wgmma.round_pairs(of_peer, acc, self.traits.dtype)

    def _multiply_keys(self, acc_S: cute.Tensor, tile: Int32, fill: Int32) -> None:
        """S = Q K^T of half of a block's keys, complete."""
        mma, parts = self.traits.mma_qk(num_keys=HALF_KEYS), []
        for i in range(self.traits.k_fills):
            columns = wgmma.ROWS_PER_WARPGROUP, FILL_COLUMNS
            q = wgmma.operand_a(mma, cute.local_tile(self.tiles.q, columns, (0, i, None)))
            parts.append((acc_S, q[None, None, None, self._query_stage(tile)], i > 0))
        self._issue(mma, self.tiles.k, parts, fill)

    def _multiply_values(self, probs: cute.Tensor, fill: Int32, waits: bool = True) -> Int32:
        """O += P V of half of a block's keys. Returns the number of the fill after V's."""
        mma, parts = self.traits.mma_pv(FILL_COLUMNS), []
        operand = wgmma.words_as_operand_a(probs, self.traits.dtype)
        for i in range(self.traits.v_fills):
            acc = wgmma.columns(self.acc_O, i * FILL_COLUMNS, (i + 1) * FILL_COLUMNS)
            parts.append((acc, operand, True))
        self._issue(mma, self.tiles.v, parts, fill, waits)
        return fill + self.traits.v_fills

    def _issue(
        self, mma: cute.TiledMma, smem: cute.Tensor, parts: list[tuple], fill: Int32,
        waits: bool = True,
    ) -> None:  # fmt: skip
        """Start acc (+)= a b for each (acc, a, accumulate) of `parts`, with b a fill each. waits:
        until all is complete; fills are released."""
        channel, b = self.channels.k, wgmma.operand_b(mma, smem)
        for i, (acc, a, accumulate) in enumerate(parts):
            channel.wait(fill + i)
            stage = channel.index(fill + i)
            wgmma.issue(mma, acc, a, b[None, None, None, stage], accumulate)
            if waits and i > 0:
                warpgroup.wait_group(1)
                channel.release(fill + i - 1)
        if waits:
            warpgroup.wait_group(0)
            channel.release(fill + len(parts) - 1)

    def join_rows(self, message: Int32) -> None:
        """Add the peer's sums of rows, and take the larger scores. Both have the same maxima."""
        softmax, is_first = self.softmax, thread_in_warpgroup() % 4 == 0
        for values, op in ((softmax.row_sum, add), (softmax.row_largest, cute.arch.fmax)):
            if values is not None:
                for r in range(wgmma.ROWS_PER_THREAD):
                    values[r] = softmax_math.quad_reduce(values[r], op)
                for r, other in enumerate(self.peer.exchange(message, values)):
                    values[r] = op(values[r], other)
                message += 1
        for r in range(wgmma.ROWS_PER_THREAD):
            # threads of a quad are summed once more
            softmax.row_sum[r] = cutlass.select_(is_first, softmax.row_sum[r], Float32(0.0))


class WideForwardSm90(FlashAttentionForwardSm90):
    """Forward kernel for Hopper of heads with 264 to 512 columns and many queries, for
    `cute.compile`. Parameters are those of `FlashAttentionForwardSm90`, with tiles of 128 x 128, a
    stage of each operand, and share_qo. There are no splits, pages and fp8."""

    traits_type, loads_type = WideFwdTraits, FillLoads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None or self.gathers:
            raise NotImplementedError("config tile_n=128: CTAs exchange P, and have no splits")

    def _rules(self, masks: MaskArgs, lengths: Lengths) -> ForwardMask:
        return HalfBits(**vars(super()._rules(masks, lengths)))

    def _tiles(self, storage: Any, cached_bias: None) -> FwdSmem:
        traits, tiles = self.traits, super()._tiles(storage, cached_bias)
        # in the rows of the same warpgroup
        of_output = wgmma.ROWS_PER_WARPGROUP, traits.tile_dv
        return tiles._replace(
            o=cute.local_tile(tiles.q, of_output, (0, 0, None)),
            bits=storage.bits.get_tensor(cute.make_layout((_BIT_WORDS, TILE_M))),
            peer=PeerRows.of_warpgroup(storage, traits.peer_channels),
        )

    @cute.jit
    def mma(
        self, epilogue: Epilogue, tiles: FwdSmem, channels: Channels, scales: ScoreScales,
        masks: MaskArgs,
    ):  # fmt: skip
        """MMA warpgroup: 64 query rows of every work tile."""
        facts = BlockFacts(self._can_be_cut(masks), epilogue.lse.largest is not None, False)
        of_call = self.traits, self.score_mod, tiles, channels, scales, masks.aux_tensors
        blocks, ring = KeyBlocks.create(*of_call, facts), channels.ring
        blocks = PairedBlocks(*vars(blocks).values(), tiles.peer)
        tile, block, cut, fill = Int32(0), Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            channels.q.wait(tile)
            blocks.acc_O.fill(0.0)
            following, cut, fill = blocks.begin(tile, block, cut, fill)
            while following != Kind.END:
                block += 1
                following, cut, fill = blocks.visit(tile, block, cut, fill)
            fill = blocks.end(tile, block, fill)
            block += 1
            work = ring.read(tile)
            epilogue.run(blocks, tiles.o[None, None, mma_warpgroup_idx()], work)
            ring.release(tile)
            # the output has left its query's place
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            channels.q.release(tile)
            tile += 1
