"""FlashAttention forward for Blackwell: O = softmax(mask(Q K^T * scale)) V.

A persistent CTA computes work tiles of 256 query rows, one after another, as two halves of 128 rows
that take turns on the tensor cores. Its roles:

| warps             | role     | work                                                         |
|-------------------|----------|--------------------------------------------------------------|
| warpgroups 0, 1   | softmax  | a half each: scores out of TMEM, probabilities into it       |
| warpgroup 2       | output   | both halves: O out of TMEM, final scale, LSE, store          |
| 0 of warpgroup 3  | load     | TMA of Q, K, V                                               |
| 1 of warpgroup 3  | mma      | issue S = Q K^T and O += P V                                 |
| 2 of warpgroup 3  | schedule | choose work tiles and the key blocks they visit              |
| warpgroup 4       | mask     | bits of the scores that count, for blocks that a mask cuts   |

Channels (full/empty mbarrier pairs). Halves are separate fills: half h of tile t is number 2 t + h,
half h of key block j is number 2 j + h.

    schedule -ring-> all                            coordinates and lengths of the next work tile
    schedule -walk-> load, mma, softmax, mask       the key blocks it visits, up to 32 an entry
    load ----q-----> mma                            128 query rows
    load ----k-----> mma                            one key block
    load ----v-----> mma                            one value block
    mma  ----s-----> softmax                        scores; released when probabilities replace them
    softmax --p----> mma                            96 of 128 columns of probabilities
    mma  ----o-----> output                         the sums of P V of a tile
    softmax --sums-> output                         maximum and sum of each row of a tile
    mask ----bits--> softmax                        the bits of a key block that is cut

Products complete in the order of their issue. For each half in turn this is P V of a block, then S
of the next: S replaces the P that was just read, and when S is complete, so is P V. The accumulator
is waited for only at the ends of a tile. The output is stored during the first S of the next tile.

A softmax thread has one row. It computes the exponentials with the maximum in use, 32 columns at a
time. Only if their sum shows that the maximum was too old does the warp process the scores again
with a newer one, and rescale its rows of O (`core/softmax.py`).

With `cta_pair` two CTAs of a cluster, with adjacent work tiles, walk over the keys together. Each
loads half of a block, and the mma warp of the first CTA issues the products of both. It waits on
behalf of both CTAs, and completed products signal both (`umma.Group`, `Channel.home`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core import softmax as softmax_math
from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.cta import check_can_run, thread_in_warpgroup, traits_of
from flash_mask_cute.core.lengths import Lengths, LseTensors
from flash_mask_cute.core.operand_loads import Buffer, OperandLoads
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.partials import Partials
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.softmax import OnlineSoftmax, ScoreArgs, ScoreScales
from flash_mask_cute.core.walk_ring import Kind
from flash_mask_cute.core.work_ring import SPLIT_FIELDS, Work
from flash_mask_cute.mods.calling import (
    RowPlace,
    ScoreModifier,
    ScoreModTraits,
    head_of_row,
    inside,
)
from flash_mask_cute.mods.table_rows import LoadedRows, OwnRowColumns
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskWarpRows, WindowArgs, check_given
from flash_mask_cute.rules.mask_warps import make_mask_bits
from flash_mask_cute.rules.stream_k_walks import schedule_forward
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.exponentials import WholeRows, spread
from flash_mask_cute.sm100.flash_fwd_output import OutputWarps
from flash_mask_cute.sm100.flash_fwd_products import WalkProducts
from flash_mask_cute.sm100.flash_fwd_traits import (
    FIRST_PART,
    MASK_REGISTERS,
    NUM_MASK_WARPS,
    OUTPUT_REGISTERS,
    SOFTMAX_REGISTERS,
    TABLE_WORDS,
    WARPS_OF_HALF,
    Channels,
    FwdSmem,
    FwdTraits,
    Role,
    SoftmaxState,
)

# keys and values of the heads in flight should stay in an L2 cache of 126 MB; as a share, what was
# measured on Hopper
L2_SHARE = 64 * 1024 * 1024


class HalfTile(NamedTuple):
    """A softmax warp's half of a work tile. tile: its number."""

    scales: ScoreScales
    aux_tensors: Any
    half: Int32
    tile: Int32


@dataclass(eq=False, repr=False)
class FlashAttentionForwardSm100:
    """Forward kernel for Blackwell, to be passed to `cute.compile`.

    The parameters are those of `FlashAttentionForwardSm90`, except for these.

    :param head_dim, head_dim_v: multiples of 8 up to 256
    :param pack_gqa: the query heads of a KV head (at most 32) share a tile's rows
    :param tile_m, tile_n: query rows and keys of a tile, 256 or 128, and 128; 128 both if
        head_dim_v > 128 or head_dim > 192
    :param share_qo: False
    :param polynomial: of 128 exponentials, those computed by a polynomial: a multiple of 4 up to 64
    :param cta_pair: two CTAs share keys and values, and take work tiles in fixed turns: the launch
        does not use tile_counter. Not with split or page_box
    :raises ValueError: for a shape or configuration that cannot run
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int | None = None
    qhead_per_kvhead: int = 1
    is_causal: bool = False
    is_local: bool = False
    pack_gqa: bool = False
    tile_m: int = 256
    tile_n: int = 128
    num_stages: int = 2
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    has_aux_tensors: bool = False
    stages_q: int = 1
    share_qo: bool = False
    intervals: Intervals | None = None
    skip_blocks: bool = True
    polynomial: int = 0
    num_sms: int = 148
    cta_pair: bool = False
    split: str | None = None
    page_box: int | None = None
    shared_kv: bool = False
    shares_mask: bool = False

    def __post_init__(self) -> None:
        self.traits = traits_of(
            self,
            FwdTraits,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            packed_heads=padded_group(self.qhead_per_kvhead) if self.pack_gqa else 1,
            heads_there=self.qhead_per_kvhead if self.pack_gqa else None,
            stages_kv=self.num_stages,
        )
        if self.cta_pair and (self.split is not None or self.page_box is not None):
            raise NotImplementedError("pairs of CTAs have no split and no page_box")
        check_can_run(self.traits)
        if self.num_sms < self.traits.group.size:
            raise ValueError(f"a pair of CTAs needs two SMs, got num_sms={self.num_sms}")
        # of the score_mod, known while the kernel is traced
        self.score_traits = ScoreModTraits()
        # While the exponentials of one half are computed, products of the other one would wait.
        # One half alone has two buffers of scores instead. With a score_mod, other things than a
        # sum show that a maximum is too old.
        self.in_parts = self.score_mod is None and self.traits.halves > 1
        # beside what a score_mod computes, or the bounds of a split, it would spill 16 to 48 bytes
        self.hides_in_order = self.score_mod is None and self.split is None
        # What the first part of P needs comes sooner, where there is one. Beside the bounds of a
        # split, what saves instructions would spill 16 to 320 bytes.
        columns = FIRST_PART if self.in_parts and self.split is None else self.tile_n
        places = spread(self.polynomial, columns, self.tile_n // umma.CHUNK)
        self.arithmetic = [WholeRows(x, saturates=self.split is None) for x in places]

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor,
        mLSE: cute.Tensor | None, softmax_scale: Float32, stream,
        mCuSeqlensQ: cute.Tensor | None = None, mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None, mSeqUsedK: cute.Tensor | None = None,
        mPageTable: cute.Tensor | None = None, window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None, learnable_sink: cute.Tensor | None = None,
        blocksparse_tensors=None, aux_tensors=None, softcap: Float32 | None = None,
        tile_counter: cute.Tensor | None = None, column_tensors=None, block_size=None,
        block_bits=None, mask_bit_tensors=None, query_chunk=None,
        mLSELow: cute.Tensor | None = None, mMaxScores: cute.Tensor | None = None,
        mQStart: cute.Tensor | Int32 | None = None, mPartials: tuple | None = None,
        mKvBatchIdx: cute.Tensor | None = None, mLeftpadK: cute.Tensor | None = None,
        mCausalPerSeq: cute.Tensor | None = None, mKDescale: cute.Tensor | None = None,
        mVDescale: cute.Tensor | None = None,
    ):  # fmt: skip
        """Launch on `stream`: the arguments are those of `FlashAttentionForwardSm90`."""
        refused = {
            "mask_bit_tensors": mask_bit_tensors, "query_chunk": query_chunk,
            "mCausalPerSeq": mCausalPerSeq, "mKDescale": mKDescale, "mVDescale": mVDescale,
        }  # fmt: skip
        for name, given in refused.items():
            if const_expr(given is not None):
                raise NotImplementedError(f"FlashAttentionForwardSm100 does not support {name}")
        if const_expr(self.score_mod is None):
            check_given("mLSELow", mLSELow, False)
        traits, group = self.traits, self.traits.group
        of_sequences = mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK
        lengths = Lengths.create(mQ, mK, *of_sequences, mQStart, self.shared_kv)
        pages = Pages.create(mPageTable, mK, mV, traits.page_box, mKvBatchIdx, mLeftpadK)
        if const_expr(pages is not None):
            lengths = lengths._replace(seqlen_k=pages.capacity)
        operands = tma.Operands.of_forward(traits, mQ, mK, mV, mO, lengths, group.load_op())
        partials = Partials.create(mPartials, self.split, self.score_mod is not None)
        group_bytes = None
        if const_expr(self.is_causal or window_size_right is not None):
            group_bytes = L2_SHARE
        schedule = QuerySchedule.create(
            lengths, mQ, mK, traits, self.num_sms // group.size, group_bytes,
            num_splits=None if const_expr(partials is None) else partials.num_splits,
        )  # fmt: skip
        grid = schedule.grid if const_expr(partials is None) else partials.grid(schedule.grid)
        masks = MaskArgs.create(
            self,
            WindowArgs(window_size_left, window_size_right),
            column_tensors,
            schedule.num_heads,
            None if const_expr(blocksparse_tensors is None) else (blocksparse_tensors, block_size),
            block_bits,
            aux_tensors,
        )
        scales = ScoreScales.create(softmax_scale, softcap, self.score_mod is not None)
        self.kernel(
            operands,
            LseTensors(mLSE, mLSELow, mMaxScores),
            lengths,
            ScoreArgs(scales, learnable_sink),
            masks,
            schedule,
            None if const_expr(group.is_pair) else tile_counter,
            partials,
            pages,
            mO if const_expr(traits.is_padded) else None,
        ).launch(
            grid=(grid * group.size, 1, 1),
            block=(traits.num_threads, 1, 1),
            cluster=group.cluster,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        operands: tma.Operands,
        lse: LseTensors,
        lengths: Lengths,
        score_args: ScoreArgs,
        masks: MaskArgs,
        schedule: QuerySchedule,
        tile_counter: cute.Tensor | None,
        partials: Partials | None,
        pages: Pages | None,
        mO: cute.Tensor | None,
    ):
        traits, group = self.traits, self.traits.group
        # -- shared memory, TMEM and channels
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == Role.LOAD:
            for atom in operands.atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(traits.storage())
        fields = lengths.work_fields
        if const_expr(self.split is not None):
            fields = (*fields, *SPLIT_FIELDS)
        channels = traits.channels(storage, fields)
        cute.arch.mbarrier_init_fence()
        group.meet()
        if warp_idx == Role.MMA:
            group.allocate(storage.tmem.ptr)
        cute.arch.sync_threads()
        tiles = traits.tiles(storage)
        if const_expr(self.score_mod is not None):
            self.score_traits = ScoreModTraits.create(self.score_mod, masks.aux_tensors)
        score_args = score_args.multiplied(self.score_traits.factor)

        # -- roles
        if warp_idx < Role.OUTPUT:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            if const_expr(traits.softmax_warps == Role.OUTPUT) or warp_idx < traits.softmax_warps:
                self.softmax(tiles, channels, score_args.scales, masks, lse, lengths)
        elif warp_idx < Role.LOAD:
            cute.arch.setmaxregister_decrease(OUTPUT_REGISTERS)
            OutputWarps(
                traits, operands, tiles, channels, lse, lengths, sink=score_args.sink,
                rows=self._rows(score_args.scales), partials=partials, mO=mO,
            ).run()  # fmt: skip
        elif warp_idx < Role.MASK:
            cute.arch.setmaxregister_decrease(traits.helper_registers)
            if warp_idx == Role.LOAD:
                loads = OperandLoads(
                    operands,
                    Buffer(tiles.q, channels.q),
                    Buffer(tiles.k, channels.k),
                    Buffer(tiles.v, channels.v),
                    lengths,
                    schedule.heads_per_kv,
                    traits,
                    part=group.rank(),
                    pages=pages,
                )
                loads.stream(channels.ring, channels.walk)
            elif warp_idx == Role.MMA:
                if group.is_leader():
                    WalkProducts(traits, self.in_parts, traits.products(storage), channels).run()
            elif warp_idx == Role.SCHEDULE:
                rules = self._rules(masks, lengths).for_tiles(tile_m=traits.cluster_tile_m)
                rings = channels.ring, channels.walk
                schedule_forward(
                    self, rules, rings, lengths, schedule, tile_counter, partials, traits.group.size
                )
        else:
            cute.arch.setmaxregister_decrease(MASK_REGISTERS)
            mask_warp = warp_idx - Role.MASK
            warp_rows = MaskWarpRows.create(mask_warp, NUM_MASK_WARPS, traits.tile_m, umma.COLUMNS)
            rules = self._rules(masks, lengths)
            make_mask_bits(
                rules, warp_rows, tiles.bits, channels.bits, channels.ring, channels.walk
            )

        # -- end: TMEM is freed when no thread of the group uses it any more
        group.sync()
        if warp_idx == Role.MMA:
            group.free()

    def _rules(self, masks: MaskArgs, lengths: Lengths) -> ForwardMask:
        shares = self.shares_mask
        return ForwardMask.from_kernel(self, umma.COLUMNS, masks, lengths, shares_mask=shares)

    # -- softmax --------------------------------------------------------------------------------

    def _rows(self, scales: ScoreScales, keeps_largest: bool = False) -> OnlineSoftmax:
        factor = None if self.score_mod is None else self.score_traits.factor
        more = self.traits.dtype, self.arithmetic[0], factor, keeps_largest
        return OnlineSoftmax.create(scales.scale_log2, 1, *more)

    @cute.jit
    def softmax(
        self,
        tiles: FwdSmem,
        channels: Channels,
        scales: ScoreScales,
        masks: MaskArgs,
        lse: LseTensors,
        lengths: Lengths,
    ):
        """Softmax warp: 32 rows of its half of every work tile, one per thread."""
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_OF_HALF
        row = half * umma.ROWS + thread_in_warpgroup()
        rows = self._rows(scales, keeps_largest=lse.largest is not None)
        tile, chunk = Int32(0), Int32(0)
        state = SoftmaxState(Int32(0), Int32(0), Boolean(True))
        while channels.ring.wait(tile):
            # -- key blocks: S of the half, (128, tile_n), becomes P
            rows.clear()
            place = HalfTile(scales, masks.aux_tensors, half, tile)
            step = partial(self._visit_block, tiles, channels, rows, place)
            state = state._replace(is_first=Boolean(True))
            chunk, state = channels.walk.visit(chunk, state, step)
            half_tile = self.traits.halves * tile + half
            # -- maximum and sum of each row go to the output warps
            channels.sums.acquire(half_tile)
            tiles.sums[0, row] = rows.row_max[0]
            tiles.sums[1, row] = rows.row_sum[0]
            channels.sums.publish(half_tile)
            if const_expr(lse.largest is not None):
                self._store_largest(lse, lengths, channels.ring.read(tile), row, rows.largest()[0])
            channels.ring.release(tile)
            tile += 1

    @cute.jit
    def _store_largest(
        self, lse: LseTensors, lengths: Lengths, work: Work, tile_row: Int32, largest: Float32
    ):
        """Write the largest score of a row of a work tile, if the row belongs to a query head."""
        packed_heads, group_size = self.traits.packed_heads, self.traits.group_size
        row = work.block * self.traits.tile_m + tile_row
        if row % packed_heads < group_size:
            head_idx = head_of_row(work, row, packed_heads, group_size)
            lse.store_largest(lengths, work, head_idx, row // packed_heads, largest)

    @cute.jit
    def _visit_block(self, tiles: FwdSmem, channels: Channels, rows, place: HalfTile, state, block):
        """Turn the scores of a key block into probabilities, masked if the block is cut."""
        half = place.half
        number = self.traits.halves * state.blocks + half
        replace_scores = partial(self._replace_scores, channels, rows, half, number, state.is_first)
        modify = partial(self._modify, place, channels.ring, block)
        cuts = state.cuts
        if block.kind == Kind.PARTIAL:
            words = self._take_bits(tiles.bits, channels.bits, half, cuts)
            replace_scores(partial(self._prepare, modify, words))
            cuts += 1
        else:
            replace_scores(partial(self._prepare, modify, None))
        return SoftmaxState(state.blocks + 1, cuts, Boolean(False))

    def _take_bits(self, bits: cute.Tensor, channel: Channel, half, number: Int32) -> tuple:
        """This thread's words of the bit tile, which is free after that."""
        channel.wait(number)
        row = half * umma.ROWS + thread_in_warpgroup()
        words = tuple(bits[w, row] for w in range(umma.COLUMNS.num_words))
        cute.arch.sync_warp()
        channel.release(number)
        return words

    def _prepare(self, modify, words: tuple | None, chunk: int, scores: cute.Tensor) -> None:
        modify(chunk, words is not None, scores)
        if words is not None:
            if self.hides_in_order:
                bit_tile.hide_unset_in_order(scores, words[chunk])
            else:
                bit_tile.hide_unset(scores, (words[chunk],))

    def _chunks(self, first, prepare) -> Iterator[tuple[int, cute.Tensor]]:
        """Number and scores, (1, 32), of the chunks of this thread's row from column `first` on.

        Without the fence ptxas would load all at once, and registers would not suffice.
        """
        num_chunks = self.traits.tile_n // umma.CHUNK
        thread = thread_in_warpgroup()
        following = umma.load_columns(first, umma.CHUNK, thread)
        for chunk in range(num_chunks):
            umma.wait_loads()
            scores = following
            umma.fence_after_wait()
            if chunk + 1 < num_chunks:
                following = umma.load_columns(first + (chunk + 1) * umma.CHUNK, umma.CHUNK, thread)
            prepare(chunk, scores)
            yield chunk, scores

    @cute.jit
    def _replace_scores(
        self,
        channels: Channels,
        rows,
        half,
        number,
        is_first: Boolean,
        prepare: cutlass.Constexpr,
    ):
        """Wait for scores `number`, and replace them by their probabilities."""
        traits = self.traits
        first = traits.column_s(traits.buffer_s(half, number))
        probs = cute.make_rmem_tensor(traits.tile_n // 2, Int32)
        # -- S is complete: rows may need a maximum first
        channels.s.wait(number)
        umma.fence_after_wait()
        total = Float32(0.0)
        renews, is_old, is_done = is_first, is_first, Boolean(False)
        # whether rows whose maximum was too old are renewed by now; whether a part of P is there
        is_last, is_early = is_first, Boolean(False)
        if const_expr(rows.takes_any_size):
            # sums cannot distinguish what is far below 0 from nothing, nor show a far maximum
            is_old = is_first | rows.is_empty()[0] | rows.far()[0]
            renews = softmax_math.any_in_warp((is_old,))
        # -- P in registers, and again with newer maxima where they were too old
        while is_done == Boolean(False):
            if renews:
                self._renew(channels, prepare, rows, half, number, is_old, is_first)
            if const_expr(self.in_parts):
                total, is_early = self._exponentials_in_parts(
                    channels.p, prepare, rows, first, probs, number, is_last
                )
            else:
                total, is_early = self._exponentials(prepare, rows, first, probs), is_last
            is_old = rows.overflowed((total,))[0]
            if const_expr(rows.takes_any_size):
                is_old = is_old & (rows.far()[0] == Boolean(False))
            # what has been handed over stays, whatever not-a-number the rest has
            is_done = is_early | (softmax_math.any_in_warp((is_old,)) == Boolean(False))
            renews, is_last = Boolean(True), Boolean(True)
        if const_expr(rows.takes_any_size):  # noqa: SIM102 (while tracing)
            if softmax_math.any_in_warp(rows.far()):
                total = self._exponentials(prepare, rows, first, probs, exactly=True)
        # -- P to TMEM over S, two columns in a word
        rows.add((total,))
        if const_expr(self.in_parts):
            is_late = is_early == Boolean(False)
            self._hand_over_if(is_late, channels.p, first, probs, number)
            self._store(probs, first, range(FIRST_PART // 2, traits.tile_n // 2))
        else:
            self._store(probs, first, range(traits.tile_n // 2))
        cute.arch.sync_warp()
        channels.s.release(number)

    def _store(self, probs: cute.Tensor, first, words: range) -> None:
        """Write words of P to TMEM, behind which a warp may arrive."""
        at = words.start
        while at < words.stop:
            count = min(umma.CHUNK, words.stop - at)
            part = cute.make_tensor(probs.iterator + at, cute.make_layout(count))
            umma.store_columns(part, first + at, thread_in_warpgroup())
            at += count
        umma.wait_stores()
        umma.fence_before_arrival()

    @cute.jit
    def _hand_over_if(self, is_there: Boolean, channel: Channel, first, probs: cute.Tensor, number):
        """Write the first part of P to TMEM, if it is complete; then its products may begin."""
        if is_there:
            self._store(probs, first, range(FIRST_PART // 2))
            channel.publish(number, orders_memory=False)

    def _exponentials_in_parts(
        self, channel: Channel, prepare, rows, first, probs: cute.Tensor, number, is_last: Boolean
    ) -> tuple[Float32, Boolean]:
        """`_exponentials`, and whether the first part of P has been handed over.

        It is when no maximum is too old for it, and half of the limit is left for the rest.
        """
        total, is_early = None, Boolean(False)
        for chunk, scores in self._chunks(first, prepare):
            if chunk == FIRST_PART // umma.CHUNK:
                is_old = (total < rows.sum_limit / 2) == Boolean(False)
                is_old = is_old | rows.outgrown(rows.tile_max(scores))[0]
                is_early = is_last | (softmax_math.any_in_warp((is_old,)) == Boolean(False))
                self._hand_over_if(is_early, channel, first, probs, number)
            rows.see(scores)
            of_chunk = replace(rows, arithmetic=self.arithmetic[chunk])
            (part,) = of_chunk.exponentials(scores, partial(self._keep, probs, chunk))
            total = part if total is None else total + part
        return total, is_early

    def _exponentials(
        self, prepare, rows, first, probs: cute.Tensor, exactly: bool = False
    ) -> Float32:
        """Write this thread's rounded probabilities to `probs`; returns their sum."""
        total = Float32(0.0)
        for chunk, scores in self._chunks(first, prepare):
            rows.see(scores)
            of_chunk = replace(rows, arithmetic=self.arithmetic[chunk])
            total += of_chunk.exponentials(scores, partial(self._keep, probs, chunk), exactly)[0]
        return total

    def _keep(self, probs: cute.Tensor, chunk: int, r: int, c: int, p: Float32, q: Float32):
        probs[(chunk * umma.CHUNK + c) // 2] = softmax_math.round_pair(p, q, self.traits.dtype)

    @cute.jit
    def _renew(
        self,
        channels: Channels,
        prepare: cutlass.Constexpr,
        rows,
        half,
        number,
        is_old,
        is_first: Boolean,
    ):
        """Take newer maxima, and rescale the rows of O accumulated with the old ones.

        P V of the previous block must be complete. With two halves it is: it was issued before S.
        """
        traits = self.traits
        first = traits.column_s(traits.buffer_s(half, number))
        factors = rows.renew((self._largest(prepare, rows, first),), (is_old,))
        if softmax_math.differ_from_one(factors) & (is_first == Boolean(False)):
            thread = thread_in_warpgroup()
            if const_expr(traits.halves == 1):
                channels.v.wait_until_released(number - 1)
                umma.fence_after_wait()
            for i in cutlass.range(traits.tile_dv // umma.CHUNK, unroll=1):
                at = traits.column_o(half) + i * umma.CHUNK
                values = umma.load_columns(at, umma.CHUNK, thread)
                umma.wait_loads()
                softmax_math.rescale(values, factors)
                umma.store_columns(values, at, thread)
            if const_expr(rows.takes_any_size):
                # rows may be renewed once more in this block
                umma.wait_stores()

    def _largest(self, prepare, rows, first) -> Float32:
        largest = -Float32.inf
        for _, scores in self._chunks(first, prepare):
            largest = cute.arch.fmax(largest, rows.tile_max(scores)[0])
        return largest

    def _modify(self, place: HalfTile, ring, block, chunk: int, is_cut: bool, scores: cute.Tensor):
        """Soft-cap the scores of a chunk of a key block, and apply score_mod."""
        scales, aux_tensors, half, tile = place
        if scales.cap is not None:
            scores.store(scales.bounded(scores.load()))
        if self.score_mod is not None:
            work = ring.read(tile)
            first_k_idx = block.index * self.traits.tile_n + chunk * umma.CHUNK
            row = work.block * self.traits.tile_m + half * umma.ROWS + thread_in_warpgroup()
            of_row = RowPlace.create(work, row, self.traits.packed_heads, self.traits.group_size)
            loaded = LoadedRows.load(
                self.score_traits.row_reads,
                aux_tensors,
                [of_row],
                first_k_idx,
                umma.CHUNK,
                OwnRowColumns(),
                TABLE_WORDS,
            )
            traits = self.score_traits
            given = aux_tensors, traits.factor, traits.takes_rows
            ScoreModifier(self.score_mod, *given).modify_row(
                scores,
                0,
                scales.scale_mod,
                of_row,
                lambda c: inside(first_k_idx + c, work) if is_cut else first_k_idx + c,
                loaded,
            )
