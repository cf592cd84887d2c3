"""FlashAttention forward for Hopper: O = softmax(mask(Q K^T * scale)) V.

A persistent CTA computes one work tile of tile_m query rows after another. Its roles:

| warps                   | role     | work                                                       |
|-------------------------|----------|------------------------------------------------------------|
| 0 of warpgroup 0        | load     | TMA of Q, K, V                                             |
| 1 of warpgroup 0        | schedule | choose work tiles and the key blocks they visit            |
| 2, 3 of warpgroup 0 (*) | mask     | bits of the visible scores of partial blocks               |
| warpgroups 1..tile_m/64 | mma      | 64 rows each: S = Q K^T, softmax, P V, output              |
| the rest, if any        | convert  | keys and values in fp8 to tiles in 16 bits                 |

(*) or four warps in a warpgroup of their own, after the others, if there is a mask_mod and enough
registers. A block of scores is hidden, full or partial: masks hide all, none or some of it.

Channels (full/empty mbarrier pairs):

    schedule -----ring--> all          coordinates and lengths of the next work tile
    schedule -----walk--> load, mask   the key blocks it visits, up to 32 an entry
    load ---------q-----> mma          all query rows of a tile
    load ---------k-----> mma          one key block, and a word that says what it is
    load ---------v-----> mma          one value block
    mask ---------bits--> mma          the bits of a partial key block

With keys and values in fp8, load sends their codes to convert, by two channels of their own, and
convert sends k and v to mma (`fp8_conversion`).

A stage of k is released when its S is complete, a stage of v when its P V is complete. There is one
bit tile. It is free again as soon as the mma warps hold its bits in registers, a whole block before
they need the next ones. In tiles with three warpgroups or more, a warpgroup skips a partial block
if its 64 rows see none of its keys, and multiplies one half if they see no key of the other.

S of the next key block is issued together with P V of this one. With two warpgroups S goes first,
so P V overlaps the exponentials of the next block. At the end of a work tile the last P V is issued
together with the first S of the *next* tile. Under that product the output is scaled, staged in
shared memory and stored by TMA. Warpgroups take turns to issue (FlashAttention-3's ping-pong), so
that one computes exponentials while another multiplies.

The mma warps see masks only as bits: a partial block comes with a bit for each score
(`rules/mask_rules.py`). The walk of a work tile is the sequence of key blocks that it visits. A
walk without visible blocks still visits one hidden block. So no role needs a special case, and a
row that saw nothing has O = 0 and LSE = -inf. With more than 256 columns of V, two CTAs compute
each work tile, with half of the columns each (`core/value_halves.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import tma
from flash_mask_cute.core.channel import COPY_ARRIVALS, Channel
from flash_mask_cute.core.cta import (
    WARPS_PER_WARPGROUP,
    check_can_run,
    clear,
    scheduler_rings,
    swizzled,
    traits_of,
)
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, ORDERED
from flash_mask_cute.core.lengths import Lengths, LseTensors
from flash_mask_cute.core.operand_loads import Buffer, OperandLoads
from flash_mask_cute.core.ordered_sums import destination_of
from flash_mask_cute.core.packed_heads import padded_group
from flash_mask_cute.core.pages import Pages
from flash_mask_cute.core.query_schedule import QuerySchedule
from flash_mask_cute.core.row_copies import CopyShare
from flash_mask_cute.core.softmax import ScoreArgs, ScoreScales
from flash_mask_cute.core.stream_k import BY_STREAM_K, DECODE_ROWS
from flash_mask_cute.core.value_halves import of_cta, sync_ctas
from flash_mask_cute.core.walk_ring import Kind
from flash_mask_cute.core.work_ring import SPLIT_FIELDS
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.forward_mask import ForwardMask
from flash_mask_cute.rules.gathered_mask import GatheredEntries, GatheredMask
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.rules.mask_rules import (
    MaskArgs,
    MaskBitsArgs,
    MaskWarpRows,
    WindowArgs,
    check_given,
)
from flash_mask_cute.rules.mask_warps import make_block_bits, make_mask_bits
from flash_mask_cute.rules.stream_k_walks import schedule_forward
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.cached_bias import CachedBiasRows
from flash_mask_cute.sm90.flash_fwd_epilogue import Epilogue
from flash_mask_cute.sm90.flash_fwd_mainloop import (
    BlockFacts,
    Channels,
    FwdSmem,
    KeyBlocks,
    MainloopState,
)
from flash_mask_cute.sm90.flash_fwd_traits import CONVERSION_REGISTERS, MASK_REGISTERS, FwdTraits
from flash_mask_cute.sm90.fp8_conversion import Codes, Conversion, Descales
from flash_mask_cute.sm90.warpgroups import Role, mma_warpgroup_idx

# Keys and values of the heads in flight should stay in the L2 cache of 50 MB. On an H200, 12 and
# 48 MB are slower for causal at 8K (docs/facts/hopper_forward.md#tiles-and-order).
L2_SHARE = 24 * 1024 * 1024
# keys of the largest TMA box of pages in fp8 for which several warps load
MAX_BOX_OF_SEVERAL_WARPS = 32


# the compiler takes names of kernels from repr
@dataclass(eq=False, repr=False)
class FlashAttentionForwardSm90:
    """Forward kernel for Hopper, for `cute.compile` (examples/07_native_api.py).

    :param dtype: cutlass.BFloat16 or cutlass.Float16, of Q, K, V and O
    :param head_dim, head_dim_v: multiples of 8 up to 512; in the host calls both equal above 256
    :param qhead_per_kvhead: query heads per KV head; fixed at compile time only with `pack_gqa`
    :param is_causal: bottom-right aligned causal masking
    :param is_local: the call's window sides apply
    :param pack_gqa: the query heads of a KV head (at most 64) share a tile's rows
    :param tile_m, tile_n: query rows and keys of a tile
    :param num_stages: key and value blocks in flight
    :param num_threads: None, or the number that follows from the tiles; with mask_mod, the number
        without a warpgroup of mask warps requests none
    :param Q_in_regs, intra_wg_overlap, mma_pv_is_rs: options of flash-attn-4, at their defaults
    :param mask_mod, score_mod: user callables (`mods/calling.py`)
    :param has_aux_tensors: the call passes aux_tensors to them
    :param stages_q: query tiles in flight, 1 or 2
    :param share_qo: the output is staged in its query's shared memory
    :param intervals: the form of the column intervals that the call passes, or None
    :param skip_blocks: skip hidden blocks, and the masking of full ones
    :param num_sms: the most CTAs to launch
    :param cta_pair: False; pairs of CTAs are for Blackwell
    :param split: how work tiles are computed in splits: "rows", in a number of splits that the
        launch gives, "stream_k", by equal stream-K chunks of all key blocks
        (`rules/stream_k_walks.py`), or None. Those of `core/fixed_splits.py` fix the bits of a row
    :param page_box: for keys in pages: keys that lie side by side in a page; a divisor of tile_n
        and of the page size of every launch
    :param shared_kv: all sequences have the keys and values of the only batch entry in common
    :param in_fp8: mK and mV hold codes of float8_e4m3fn, as bytes
    :param few_rows: work tiles have at most `shares.FEW_ROWS` rows
    :param lists_per_warpgroup: blocks of block lists have a multiple of 64 queries, not of tile_m,
        and each warpgroup visits what the lists of its rows have; requires tile_m 192, and no mods
    :param shares_mask: mask_mod is the same for heads that share a tile
    :param cached_bias_bits: bits that score_mod reads for a score in rows of keys, if batch entries
        share these and lengths; a CTA then keeps the rows for many entries
    :param gathers: keys of a block of a selection, a multiple of 4, if keys of a tile are gathered
        (`rules/gathered_mask.py`), page_box of them at a time; 0: they lie side by side
    :raises NotImplementedError: for an option that only other kernels have
    :raises ValueError: for a shape or configuration that cannot run
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int | None = None
    qhead_per_kvhead: int = 1
    is_causal: bool = False
    is_local: bool = False
    pack_gqa: bool = False
    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2
    num_threads: int | None = None
    Q_in_regs: bool = False
    intra_wg_overlap: bool = True
    mma_pv_is_rs: bool = True
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    has_aux_tensors: bool = False
    stages_q: int = 2
    share_qo: bool = False
    intervals: Intervals | None = None
    skip_blocks: bool = True
    num_sms: int = 132
    cta_pair: bool = False
    split: str | None = None
    page_box: int | None = None
    shared_kv: bool = False
    in_fp8: bool = False
    few_rows: bool = False
    lists_per_warpgroup: bool = False
    shares_mask: bool = False
    cached_bias_bits: int = 0
    gathers: int = 0

    traits_type, destination_of = FwdTraits, staticmethod(destination_of)
    loads_type = OperandLoads
    # warps that load queries
    query_loaders = 1

    @property
    def starts_early(self) -> bool:
        """Whether CTAs may start before the last launch ends. They read after its end.

        Not with splits by rows, which were slower so (docs/facts/hopper_forward.md#decoding).
        """
        decodes = self.tile_m <= DECODE_ROWS and self.traits.num_ctas == 1
        return decodes and self.split in (None, BY_STREAM_K)

    def __post_init__(self) -> None:
        traits = traits_of(
            self,
            self.traits_type,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            packed_heads=padded_group(self.qhead_per_kvhead) if self.pack_gqa else 1,
            heads_there=self.qhead_per_kvhead if self.pack_gqa else None,
            stages_kv=self.num_stages,
        )
        if self.lists_per_warpgroup and not (self.mask_mod is self.score_mod is None):
            mods = f"{self.mask_mod} and {self.score_mod}"
            raise ValueError(f"lists_per_warpgroup=True needs no mods, got {mods}")
        if self.mask_mod is not None and self.num_threads != traits.num_threads:
            # if there are registers for it
            with_warpgroup = replace(traits, mask_warpgroup=True)
            # another way to find maxima gives other bits, which smaller tiles would not have
            keeps = self.split not in ORDERED or with_warpgroup.keeps_scores == traits.keeps_scores
            if keeps and not with_warpgroup.infeasible():
                traits = with_warpgroup
        self.traits = traits
        refused = {
            "Q_in_regs": self.Q_in_regs,
            "intra_wg_overlap": not self.intra_wg_overlap,
            "mma_pv_is_rs": not self.mma_pv_is_rs,
        }
        for name, given in refused.items():
            if given:
                raise NotImplementedError(f"FlashAttentionForwardSm90 does not support {name}")
        check_can_run(traits)
        if self.num_threads not in (None, traits.num_threads):
            raise ValueError(
                f"num_threads is {traits.num_threads} for tile_m={self.tile_m}, got "
                f"{self.num_threads}"
            )

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor | None, mO: cute.Tensor | None,
        mLSE: cute.Tensor | None, softmax_scale: Float32, stream,
        mCuSeqlensQ: cute.Tensor | None = None, mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None, mSeqUsedK: cute.Tensor | None = None,
        mPageTable: cute.Tensor | None = None, window_size_left: Int32 | None = None,
        window_size_right: Int32 | None = None, learnable_sink: cute.Tensor | None = None,
        blocksparse_tensors=None, aux_tensors=None, softcap: Float32 | None = None,
        tile_counter: cute.Tensor | None = None, column_tensors=None, block_size=None,
        block_bits=None, mask_bit_tensors: tuple | None = None, query_chunk: tuple | None = None,
        mLSELow: cute.Tensor | None = None, mMaxScores: cute.Tensor | None = None,
        mQStart: cute.Tensor | Int32 | None = None, mPartials: tuple | None = None,
        mKvBatchIdx: cute.Tensor | None = None, mLeftpadK: cute.Tensor | None = None,
        mCausalPerSeq: cute.Tensor | None = None, mKDescale: cute.Tensor | None = None,
        mVDescale: cute.Tensor | None = None,
    ):  # fmt: skip
        """Launch on `stream`.

        Shapes: mQ (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with
        mCuSeqlensQ; mK, mV alike; mO like mQ with head_dim_v; mLSE fp32 (batch, heads_q, seqlen_q)
        or (heads_q, total_q), natural log; mCuSeqlens* (batch + 1,) and mSeqUsed* (batch,) int32;
        learnable_sink (heads_q,). A side of the window that is None is open. tile_counter (2,)
        int32, zero before and after the launch: CTAs take the next free work tile instead of fixed
        turns. Launches that may overlap need one each.

        blocksparse_tensors: a `BlockSparseTensors` of blocks of block_size, a pair of multiples of
        tile_m and tile_n (None: of exactly these). column_tensors: the tensors `indices` and
        `bounds` (for tile_n) of column intervals. block_bits: `visible`, `full` and their two block
        sizes, of logical blocks in which tiles do not nest. mask_bit_tensors: `tiles` and `states`
        of a `MaskBitsArgs`, and `places` with mCuSeqlensQ, in place of a mask_mod and block lists
        (`rules/mask_rules.py`). They are for the query blocks that this launch computes, its
        `query_chunk`, a pair. mLSELow, beside mLSE and a score_mod: like mLSE, its rounding error.
        mMaxScores: like mLSE, the largest score of each row. mQStart: `Lengths.q_start`; block
        lists are then given as bits only, because rows of a tile need not begin where blocks do.
        mPageTable int32 (batch, max_pages): mK and mV are pools (num_pages, page_size, heads,
        head_dim), and keys lie in their pages; mKvBatchIdx, mLeftpadK: `Pages` (`core/pages.py`).
        mCausalPerSeq (batch,) int32, beside window_size_right: where it is not 0, a sequence is
        causal. mKDescale, mVDescale, for codes of fp8: `Descales` (`fp8_conversion.py`).
        mPartials: destination of splits: the tensors and the number of `Partials`. In stream-K all
        that `Combine` needs is written; by rows mO and mLSE are left to `Combine`. For fixed splits
        in sequence: memory and number of `RunningSums`, for one none.
        """
        traits, of_sequences = self.traits, (mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK)
        self.loading_warps = self._num_loading_warps()
        lengths = Lengths.create(mQ, mK, *of_sequences, mQStart, self.shared_kv)
        if const_expr(self.gathers and mPageTable is None):
            pages = Pages.of_entries(mK, mV, traits.page_box, mCuSeqlensK)
        else:
            pages = Pages.create(mPageTable, mK, mV, traits.page_box, mKvBatchIdx, mLeftpadK)
        if const_expr(mPageTable is not None):
            lengths = lengths._replace(seqlen_k=pages.capacity)
        operands = tma.Operands.of_forward(traits, mQ, mK, mV, mO, lengths)
        mask_bits = blocks = group_bytes = None
        check_given("query_chunk", query_chunk, mask_bit_tensors is not None)
        if const_expr(mask_bit_tensors is not None):
            mask_bits = MaskBitsArgs(*mask_bit_tensors).with_query_chunk(*query_chunk)
            if const_expr(mCuSeqlensQ is None):
                blocks = query_chunk
        if const_expr(self.is_causal or window_size_right is not None):
            group_bytes = L2_SHARE
        partials = self.destination_of(mPartials, self.split, self.score_mod is not None)
        partials = self.with_operands(partials, lengths, mO)
        num_splits = None if const_expr(partials is None) else partials.num_splits
        num_groups = max(self.num_sms // traits.num_ctas, 1)
        schedule = QuerySchedule.create(
            lengths, mQ, mK, traits, num_groups, group_bytes, blocks, num_splits
        )
        grid = schedule.grid if const_expr(partials is None) else partials.grid(schedule.grid)
        scales = ScoreScales.create(softmax_scale, softcap, self.score_mod is not None)
        score_args = ScoreArgs(scales, learnable_sink)
        masks = MaskArgs.create(
            self, WindowArgs(window_size_left, window_size_right, mCausalPerSeq), column_tensors,
            schedule.num_heads,
            None if const_expr(blocksparse_tensors is None) else (blocksparse_tensors, block_size),
            block_bits, aux_tensors, mask_bits,
        )  # fmt: skip
        if const_expr(self.score_mod is None):
            check_given("mLSELow", mLSELow, False)
        # threads store rows where a TMA store would also write rows of no query
        rows_of_output = mO if const_expr(traits.is_padded or traits.few_rows) else None
        self.kernel(
            operands, LseTensors(mLSE, mLSELow, mMaxScores), lengths, score_args, masks, schedule,
            tile_counter, partials, pages, rows_of_output, Descales(mKDescale, mVDescale),
        ).launch(
            grid=(grid * traits.num_ctas, 1, 1),
            block=(traits.num_threads, 1, 1),
            cluster=(traits.num_ctas, 1, 1) if traits.num_ctas > 1 else None,
            stream=stream, min_blocks_per_mp=1, use_pdl=self.starts_early,
        )  # fmt: skip

    def with_operands(self, partials: Any, lengths: Lengths, mO: cute.Tensor) -> Any:
        """The destination of splits, with what a launch adds to it."""
        return partials

    def _num_loading_warps(self) -> int:
        """Warps that load keys and values: in decoding mask warps, too, unless many blocks are
        partial. Addresses of rows of pages take one warp longer than memory takes for the bytes;
        boxes were faster so, too (docs/facts/hopper_forward.md#decoding)."""
        traits = self.traits
        few_partial = self.mask_mod is self.score_mod is self.intervals is None
        box = traits.page_box or traits.tile_n
        in_boxes = traits.in_fp8 and box <= MAX_BOX_OF_SEVERAL_WARPS
        shared = (traits.copies_rows or in_boxes) and few_partial and traits.tile_m <= DECODE_ROWS
        shared = shared or (self.gathers > 0 and traits.copies_rows)
        return 1 + traits.num_mask_warps if shared else 1

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
        partials: Any,
        pages: Pages | None,
        mO: cute.Tensor | None,
        descales: Descales,
    ):
        traits = self.traits
        # -- shared memory and channels
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in operands.atoms:
                cpasync.prefetch_descriptor(atom)
        allocator = cutlass.memory.SmemAllocator()
        storage = allocator.allocate(traits.storage())
        mma_warps, mask_warps = traits.num_mma_warps, traits.num_mask_warps
        loaders = self.query_loaders
        # Loading warps arrive with the bytes that TMA brings or with their copies, converting warps
        # with their part.
        loads = self.loading_warps * (COPY_ARRIVALS if const_expr(traits.copies_rows) else 1)
        loads_kv = WARPS_PER_WARPGROUP if const_expr(traits.in_fp8) else loads
        # Otherwise only the end of the keys makes a block partial, which must be a walk's first.
        # Where sums have an order, it is that of keys: each tile has other partial blocks.
        uncut_first = self._has_cutters(masks) and self.split not in ORDERED
        split_fields = () if self.split in (None, ONE_FIXED_SPLIT) else SPLIT_FIELDS
        ring, walk = scheduler_rings(
            storage, (loaders + mask_warps, mma_warps + traits.num_conversion_warps),
            ascending=False, uncut_first=uncut_first, chunk_fields=traits.chunk_fields,
            fields=(*lengths.work_fields, *split_fields),
        )  # fmt: skip
        if const_expr(pages is not None and masks.bits is not None and masks.bits.is_selection):
            walk = replace(walk, tells_next=True)
        channels = Channels(
            q=Channel.create(storage.q_barriers.data_ptr(), traits.stages_q, loaders, mma_warps),
            k=traits.channel_k(storage, loads_kv),
            v=Channel.create(storage.v_barriers.data_ptr(), traits.stages_kv, loads_kv, mma_warps),
            bits=Channel.create(storage.bits_barriers.data_ptr(), 1, mask_warps, mma_warps),
            ring=ring,
            walk=walk,
        )
        codes = None
        if const_expr(traits.in_fp8):
            storage_of_codes = allocator.allocate(traits.code_storage())
            codes = Codes.create(traits, storage_of_codes, loads)
        cached_bias = None
        if const_expr(traits.cached_bias_blocks > 0):
            cached_bias = CachedBiasRows.create(traits, allocator.allocate(traits.bias_storage()))
        if const_expr(traits.few_rows):
            clear(swizzled(storage.q, traits.layout_q()), traits.num_threads)
        half, claims = of_cta(traits, storage)
        cute.arch.mbarrier_init_fence()
        self._start()

        tiles = self._tiles(storage, cached_bias)

        # -- roles
        k, v = Buffer(tiles.k, channels.k), Buffer(tiles.v, channels.v)
        loaded = Codes(k, v, tiles.block_flags) if const_expr(codes is None) else codes
        mask_warp = warp_idx - traits.first_mask_warp
        if warp_idx < Role.MMA:
            if const_expr(traits.moves_registers):
                cute.arch.setmaxregister_decrease(traits.helper_registers)
            scales = descales.of_rows() if const_expr(pages is not None) else Descales(None, None)
            loader = self.loads_type(
                operands, Buffer(tiles.q, channels.q), loaded.k, loaded.v, lengths,
                schedule.heads_per_kv, traits, loaded.words, pages=pages,
                share=CopyShare(0, self.loading_warps), scales_k=scales.k, scales_v=scales.v,
                half=half, gathers=self._rules(masks, lengths) if self.gathers else None,
            )  # fmt: skip
            if warp_idx == Role.LOAD:
                loader.stream(channels.ring, channels.walk)
            elif warp_idx == Role.SCHEDULE:
                rules, rings = self._rules(masks, lengths), (channels.ring, channels.walk)
                schedule_forward(
                    self, rules, rings, lengths, schedule, tile_counter, partials,
                    alternating=traits.cached_bias_blocks > 0, claims=claims,
                )  # fmt: skip
            elif const_expr(self.loading_warps > 1):
                self.load_and_mask(loader, mask_warp, tiles, channels, lengths, masks, partials)
            elif const_expr(not traits.mask_warpgroup):
                self.mask(mask_warp, tiles, channels, lengths, masks)
        elif warp_idx < Role.MMA + mma_warps:
            if const_expr(traits.moves_registers):
                cute.arch.setmaxregister_increase(traits.mma_registers)
            epilogue = Epilogue(
                traits, operands, lse, lengths, score_args.sink, partials, mO,
                self.split in ORDERED, half,
            )  # fmt: skip
            self.mma(epilogue, tiles, channels, score_args.scales, masks)
        elif const_expr(traits.mask_warpgroup):
            cute.arch.setmaxregister_decrease(MASK_REGISTERS)
            self.mask(mask_warp, tiles, channels, lengths, masks)
        elif const_expr(traits.in_fp8):
            cute.arch.setmaxregister_decrease(CONVERSION_REGISTERS)
            of_all = pages, schedule.heads_per_kv, traits
            if warp_idx < traits.first_conversion_warp + WARPS_PER_WARPGROUP:
                of_k = True, k, tiles.block_flags, descales.k
                Conversion(loaded, *of_k, *of_all).stream(channels.ring)
            else:
                of_v = False, v, tiles.block_flags, descales.v
                Conversion(loaded, *of_v, *of_all).stream(channels.ring)
        if const_expr(half is not None):
            sync_ctas(traits)  # each CTA arrives on mbarriers of the other

    def _start(self) -> None:
        if self.starts_early:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        sync_ctas(self.traits)

    def _tiles(self, storage: Any, cached_bias: CachedBiasRows | None) -> FwdSmem:
        traits = self.traits
        return FwdSmem(
            q=swizzled(storage.q, traits.layout_q()),
            k=swizzled(storage.k, traits.layout_k()),
            v=swizzled(
                storage.v if const_expr(traits.has_values) else storage.k, traits.layout_v()
            ),
            o=swizzled(storage.q if const_expr(traits.share_qo) else storage.o, traits.layout_o()),
            block_flags=storage.block_flags.get_tensor(cute.make_layout(traits.stages_k)),
            bits=storage.bits.get_tensor(
                cute.make_layout((wgmma.COLUMNS.num_words, traits.tile_m))
            ),
            any_bits=storage.any_bits.get_tensor(cute.make_layout(traits.tile_m // bit_tile.WORD)),
            cached_bias=cached_bias,
        )

    def load_and_mask(
        self, loader: OperandLoads, mask_warp: Int32, tiles: FwdSmem, channels: Channels,
        lengths: Lengths, masks: MaskArgs, partials: Any,
    ):  # fmt: skip
        """A mask warp that also loads its share of the rows or boxes of pages."""
        rules, rows = self._rules(masks, lengths), self._mask_rows(mask_warp)
        cut = partial(make_block_bits, rules, rows, tiles.bits, channels.bits, None)
        loader = replace(loader, share=CopyShare(1 + mask_warp, self.loading_warps), cut=cut)
        if self.gathers and self.traits.tile_m <= DECODE_ROWS and self.traits.stages_kv > 1:
            make_bits = partial(rules.make_bits, warp_rows=rows)
            loader = replace(loader, make_bits=make_bits, no_bits=rows.fill(0))
        loader.stream(channels.ring, channels.walk)

    def _mask_rows(self, mask_warp: Int32) -> MaskWarpRows:
        traits = self.traits
        return MaskWarpRows.create(mask_warp, traits.num_mask_warps, traits.tile_m, wgmma.COLUMNS)

    def mask(
        self,
        mask_warp: Int32,
        tiles: FwdSmem,
        channels: Channels,
        lengths: Lengths,
        masks: MaskArgs,
    ):
        """A mask warp: the bits of its share of every tile's rows."""
        traits = self.traits
        warp_rows = self._mask_rows(mask_warp)
        rules = self._rules(masks, lengths)
        passes_over = traits.passes_over and self._can_be_cut(masks)
        any_bits = tiles.any_bits if const_expr(passes_over) else None
        make_mask_bits(
            rules, warp_rows, tiles.bits, channels.bits, channels.ring, channels.walk, any_bits
        )

    def _rules(self, masks: MaskArgs, lengths: Lengths) -> ForwardMask:
        if self.gathers:
            of_kernel = self, wgmma.COLUMNS, masks, lengths
            rules = GatheredEntries if masks.bits.are_entries else GatheredMask
            return rules.from_kernel(*of_kernel, block_k=self.gathers)
        # in full blocks, a score_mod gets rows without a test whether they exist
        own_rows = wgmma.ROWS_PER_WARPGROUP if self.traits.lists_per_warpgroup else None
        return ForwardMask.from_kernel(
            *(self, wgmma.COLUMNS, masks, lengths),
            cuts_overhang=self.score_mod is not None,
            own_rows=own_rows,
            shares_mask=self.shares_mask,
        )

    @cute.jit
    def mma(
        self,
        epilogue: Epilogue,
        tiles: FwdSmem,
        channels: Channels,
        scales: ScoreScales,
        masks: MaskArgs,
    ):
        """MMA warpgroup: 64 query rows of every work tile."""
        traits, ring = self.traits, channels.ring
        blocks = KeyBlocks.create(
            traits,
            self.score_mod,
            tiles,
            channels,
            scales,
            masks.aux_tensors,
            BlockFacts(
                can_be_cut=self._can_be_cut(masks),
                keeps_largest=epilogue.lse.largest is not None,
                rows_alone=self.split in ORDERED,
            ),
        )
        first_S = wgmma.make_accumulator(traits.tile_n)  # (64, tile_n) of the warpgroup
        # P of a block, (64, tile_n) as pairs; steps over full blocks use both alternately
        probs, other_probs = blocks.make_probs(), blocks.make_probs()
        tile, state = Int32(0), MainloopState.start()
        if const_expr(tiles.cached_bias is not None):
            tiles.cached_bias.clear()
        blocks.start_scheduler_barrier()
        is_valid = ring.wait(tile)
        self._first_scores(blocks, first_S, tile, state.block, is_valid)
        while is_valid:
            # -- first key block, whose S is complete
            state, following = blocks.first(tile, state, first_S, probs)
            if const_expr(traits.share_qo and traits.overlaps_tiles):  # noqa: SIM102 (while tracing)
                # by now the previous tile's output has left its query's place
                if tile > 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    channels.q.release(tile - 1)
            # -- key blocks: P V of the block before, and S of this one
            # Partial and full blocks have a loop each. A test of every block would be a branch more
            # while P V is in flight, and ptxas would serialise all products.
            # docs/facts/compiler.md#three-branches-under-a-product-in-flight-serialise-all-products
            while following != Kind.END:
                for kind in blocks.kinds:
                    while following == kind:
                        if const_expr(not blocks.alternates(kind)):
                            state, following = blocks.step(kind, tile, state, probs, probs)
                        else:
                            state, following = blocks.step(kind, tile, state, probs, other_probs)
                            if following == kind:
                                state, following = blocks.step(
                                    kind, tile, state, other_probs, probs
                                )
                            else:
                                wgmma.copy_words(probs, other_probs, blocks.opaque_one)

            # -- the last P V of this tile, and with it the first S of the next
            next_is_valid = ring.wait(tile + 1)
            if const_expr(not traits.share_qo):
                # before the barrier: the warpgroup before may wait for the query that takes this
                # one's place
                channels.q.release(tile)
            blocks.wait_for_values(state)
            blocks.wait_scheduler_barrier()
            blocks.issue_values(probs, state)
            if const_expr(traits.overlaps_tiles):
                self._issue_next_scores(blocks, first_S, tile, state.block, next_is_valid)
            blocks.arrive_scheduler_barrier()
            warpgroup.wait_group(1 if const_expr(traits.overlaps_tiles) else 0)
            blocks.release_values(state)
            # -- epilogue
            work = ring.read(tile)
            o_stage = mma_warpgroup_idx()
            if const_expr(traits.share_qo):
                o_stage += channels.q.index(tile) * traits.num_mma_warpgroups
            sO = tiles.o[None, None, o_stage]  # (64, tile_dv)
            epilogue.run(blocks, sO, work)
            ring.release(tile)
            state = MainloopState.start()._replace(block=state.block + 1, cut=state.cut)
            if const_expr(traits.overlaps_tiles):
                warpgroup.wait_group(0)
            else:
                # the output has left, and with it the query's last reader
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                channels.q.release(tile)
                self._first_scores(blocks, first_S, tile + 1, state.block, next_is_valid)
            tile += 1
            is_valid = next_is_valid
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _can_be_cut(self, masks: MaskArgs) -> bool:
        """Whether blocks after the first one of a walk may be partial."""
        return not self.skip_blocks or self._has_cutters(masks)

    def _has_cutters(self, masks: MaskArgs) -> bool:
        """Whether anything besides the end of the keys makes blocks partial."""
        cutters = self.score_mod, self.mask_mod, masks.columns, masks.bits, masks.mask_bits
        return self.is_causal or self.is_local or any(x is not None for x in cutters)

    @cute.jit
    def _first_scores(
        self, blocks: KeyBlocks, acc_S: cute.Tensor, tile: Int32, block: Int32, is_valid: Boolean
    ):
        """Issue S of a work tile's first key block, with nothing to overlap it."""
        # without a value on the other path, the registers would stay in use from the tile before
        acc_S.fill(0.0)
        if is_valid:
            blocks.channels.q.wait(tile)
            blocks.take_query(tile)
            blocks.wait_for_keys(block)
            blocks.issue_scores(acc_S, tile, block)
            warpgroup.wait_group(0)

    @cute.jit
    def _issue_next_scores(
        self, blocks: KeyBlocks, acc_S: cute.Tensor, tile: Int32, block: Int32, is_valid: Boolean
    ):
        """Issue S of the next tile's first key block. If there is no next tile, the product is
        issued on this tile's operands: under a branch, the compiler would serialise all products.
        """
        if is_valid:
            tile += 1
            block += 1
            blocks.channels.q.wait(tile)
            blocks.take_query(tile)
            blocks.wait_for_keys(block)
        blocks.issue_scores(acc_S, tile, block)
