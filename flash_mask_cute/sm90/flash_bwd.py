"""FlashAttention backward for Hopper: dQ, dK, dV from dO, LSE and delta = rowsum(dO * O) - dLSE.

A persistent CTA computes work tiles of tile_n keys of a KV head. For each it walks over the queries
of the group's heads in blocks of tile_m. With P = exp(S - LSE) and dP = dO V^T,

    dV = P^T dO        dS = P * (dP - delta)        dK = scale dS^T Q        dQ = scale dS K

| warps               | role     | work                                                       |
|---------------------|----------|------------------------------------------------------------|
| 0 of warpgroup 0    | load     | TMA of K, V, and of Q, dO, LSE and delta                   |
| 1 of warpgroup 0    | schedule | choose work tiles and the query blocks they visit          |
| 2, 3 of warpgroup 0 | mask     | bits of the visible scores of partial blocks               |
| warpgroups 1, 2     | mma      | 64 keys each, or the same 64 keys and half of the columns  |

Channels (full/empty mbarrier pairs):

    schedule -----ring--> all          coordinates and lengths of the next work tile
    schedule -----walk--> load, mask   the query blocks it visits, up to 32 an entry
    load ---------q-----> mma          a query block, its LSE and delta, and words that say which,
                                       and with a work tile's first block its keys
    load ---------do----> mma          dO of a query block, and with the first one the values
    mma ----------dq----> load         a part of a block's dQ, to be added to the others'
    mask ---------bits--> mma          the bits of a partial query block

and between two CTAs that sum dQ together (`cta_pairs`):

    mma ---------grads--> mma          dS of a query block, both ways
    schedule ----claims-> schedule     the number of the next work tile, from the leader

A warpgroup computes S^T and dP^T of its own keys, 64 rows by tile_m columns, so P^T and dS^T are in
registers in the layout that dV and dK need (FlashAttention-3's choice). dS also goes to shared
memory, where each warpgroup sums a part of the rows or columns of dQ over the keys of both. For
wide heads dK and dV would take too many registers. There both warpgroups have the same keys and
half of the columns each, and share the work on S and dP (`flash_bwd_scores`). Two CTAs with
neighbouring keys may also sum dQ together there (`cta_pairs`).

The products of a block are issued in the order S, dP, dV, dQ, dK. The sums of dQ go to shared
memory, in fp32 and in accumulator order. From there the load warp adds them to scratch memory. As
in the forward, the mma warps see masks only as bits, and a walk without visible blocks visits one
hidden block. The mma warps add gradients of aux tensors to memory. docs/backward_sm90.md gives the
reasons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from flash_mask_cute.core import clusters, tma
from flash_mask_cute.core.cta import WALK_STAGES, check_can_run, traits_of
from flash_mask_cute.core.dq_sums import Scratch
from flash_mask_cute.core.key_schedule import KeySchedule
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.query_lists import QueryLists
from flash_mask_cute.core.query_loads import BwdOperands
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.score_gradients import BwdScoreArgs
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.tile_scheduler import ScheduleParams, TileScheduler
from flash_mask_cute.core.walk_ring import CHUNK, KIND_MASK, OWN_KIND_SHIFT, Kind
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.rules.mask_rules import (
    MaskArgs,
    MaskBitsArgs,
    MaskWarpRows,
    WindowArgs,
    check_given,
)
from flash_mask_cute.rules.mask_warps import make_block_bits, make_mask_bits, send_walks
from flash_mask_cute.rules.token_mask import TokenMask, send_token_walks
from flash_mask_cute.sm90 import wgmma
from flash_mask_cute.sm90.flash_bwd_chain import make_chain
from flash_mask_cute.sm90.flash_bwd_diagonals import diagonal_sums, make_bits_and_sums
from flash_mask_cute.sm90.flash_bwd_limits import MAX_OWN_DIM
from flash_mask_cute.sm90.flash_bwd_loads import BwdLoads
from flash_mask_cute.sm90.flash_bwd_operands import Fragments
from flash_mask_cute.sm90.flash_bwd_products import BlockProducts, pass_over
from flash_mask_cute.sm90.flash_bwd_scores import (
    BlockScores,
    MainloopState,
    Peeked,
    by_turn,
    sync_both,
)
from flash_mask_cute.sm90.flash_bwd_tokens import by_query_lists
from flash_mask_cute.sm90.flash_bwd_traits import Barrier, BwdSmem, BwdTraits, Channels
from flash_mask_cute.sm90.gradient_stores import (
    KeyGradients,
    scale,
    send_gradients,
    stage_dq,
    store_sum_rows,
    store_sums,
)
from flash_mask_cute.sm90.warpgroups import Role, mma_warpgroup_idx, sync_warpgroup


@dataclass(eq=False, repr=False)
class FlashAttentionBackwardSm90:
    """Backward kernel for Hopper, for `cute.compile` (examples/10_native_backward.py).

    :param dtype: cutlass.BFloat16 or cutlass.Float16, of Q, K, V and dO, dK, dV
    :param head_dim, head_dim_v: multiples of 8 up to 256
    :param is_causal: bottom-right aligned causal masking
    :param is_local: the call's window sides apply
    :param tile_m: query rows of a block, 64, or 128 where head_dim and head_dim_v are at most 128
    :param stages_q, stages_do, stages_kv, value_cols: see `BwdTraits`
    :param mask_mod, score_mod: user callables (`mods/calling.py`)
    :param score_mod_bwd: the user's derivative; without it, score_mod is differentiated
        (`mods/derivative.py`)
    :param wants_aux: numbers of the aux tensors whose gradients score_mod's derivative makes
    :param has_aux_tensors: the call passes aux_tensors to them
    :param intervals: the form of the column intervals that the call passes, or None
    :param skip_blocks: skip hidden blocks, and the masking of full ones
    :param deterministic: dQ is summed in an order that does not depend on the run
    :param clears_dq: the sums of dQ are cleared first, and all CTAs add to them; otherwise the
        first CTA at a row block stores
    :param may_empty_rows: see `BwdTraits.has_marks`
    :param cta_pair: two CTAs sum dQ together (`BwdTraits`); requires clears_dq, no score_mod, no
        soft cap, and at least two SMs
    :param packed_heads: if more than 1, work tiles visit the queries of a list, each with this
        number of rows for the heads of its group (`flash_bwd_tokens`), and add to sums of dK and
        dV. Requires clears_dq
    :param group_size, shares_tile: see `BwdTraits`
    :param masks_by_head: see `TokenMask.by_head`
    :param splits_keys: the warpgroups have keys of their own in heads wider than 128 (`BwdTraits`);
        requires no score_mod and no soft cap
    :param splits_group: several CTAs process the same keys, each for some of the group's heads, and
        leave sums of dK and dV for `BwdAddParts`
    :param shared_kv: all sequences of packed queries have the keys and values of the only batch
        entry in common, whose gradients are sums over all of them
    :param lists_per_warpgroup: block lists have blocks of a multiple of tile_m queries and of 64
        keys, and each warpgroup skips what they hide from its keys; requires no mask_mod and
        unmodified scores (`BackwardMask.own_keys`)
    :param entries_first: the batch entries of a head take turns (`TileScheduler.entries_first`)
    :param num_sms: the most CTAs to launch
    :raises ValueError: for a shape or configuration that cannot run
    """

    traits_class = BwdTraits

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int | None = None
    is_causal: bool = False
    is_local: bool = False
    tile_m: int = 64
    stages_q: int = 2
    stages_do: int = 2
    stages_kv: int = 1
    value_cols: int = 0
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    wants_aux: tuple[int, ...] = ()
    has_aux_tensors: bool = False
    intervals: Intervals | None = None
    skip_blocks: bool = True
    deterministic: bool = False
    clears_dq: bool = False
    cta_pair: bool = False
    num_sms: int = 132
    may_empty_rows: bool = False
    shared_kv: bool = False
    splits_group: bool = False
    packed_heads: int = 1
    group_size: int = 0
    masks_by_head: bool = False
    shares_tile: bool = False
    splits_keys: bool = False
    lists_per_warpgroup: bool = False
    entries_first: bool = False

    def __post_init__(self) -> None:
        score_mod, clears_dq = self.score_mod, self.clears_dq
        summed = getattr(score_mod, "summed", ())
        self.traits = traits_of(
            self,
            self.traits_class,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            has_marks=self.may_empty_rows,
            has_reference=score_mod is not None,
            sums_of_warp=sum(x.mma_words for x in summed),
            sums_of_mask_warp=sum(x.mask_words for x in summed),
        )
        if self.lists_per_warpgroup and not (self.mask_mod is score_mod is None):
            mods = f"{self.mask_mod} and {score_mod}"
            raise ValueError(f"lists_per_warpgroup=True needs no mods, got {mods}")
        check_can_run(self.traits)
        if self.wants_aux and (score_mod is None or self.score_mod_bwd is not None):
            raise ValueError(f"wants_aux {self.wants_aux} needs a score_mod and no score_mod_bwd")
        if clears_dq and self.deterministic:
            raise ValueError("clears_dq is for sums without an order, got deterministic=True")
        has_ctas = self.num_sms >= clusters.CTAS
        if self.cta_pair and (score_mod is not None or not clears_dq or not has_ctas):
            raise ValueError(
                "cta_pair=True needs clears_dq=True, num_sms of 2 and more, and no score_mod, got "
                f"clears_dq={clears_dq}, num_sms={self.num_sms}, score_mod={score_mod}"
            )
        if self.splits_keys and score_mod is not None:
            raise ValueError(f"splits_keys=True needs no score_mod, got {score_mod}")
        if self.traits.by_query_lists and (not clears_dq or self.splits_group):
            raise ValueError(
                f"packed_heads={self.packed_heads} needs clears_dq=True and splits_group=False"
            )

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mdO: cute.Tensor,
        mStats: cute.Tensor, mdQaccum: cute.Tensor, mSemaphores: cute.Tensor | None,
        mdK: cute.Tensor, mdV: cute.Tensor, softmax_scale: Float32, stream,
        mCuSeqlensQ: cute.Tensor | None = None, mCuSeqlensK: cute.Tensor | None = None,
        mSeqUsedQ: cute.Tensor | None = None, mSeqUsedK: cute.Tensor | None = None,
        window_size_left: Int32 | None = None, window_size_right: Int32 | None = None,
        aux_tensors=None, softcap: Float32 | None = None, tile_counter: cute.Tensor | None = None,
        column_tensors=None, block_bits=None, aux_grads=None,
        mask_bit_tensors: tuple | None = None, mQStart: cute.Tensor | Int32 | None = None,
    ):  # fmt: skip
        """Launch on `stream`.

        Shapes: mQ, mdO (batch, seqlen_q, heads_q, d), or (total_q, heads_q, d) with mCuSeqlensQ;
        mK, mV and mdK, mdV alike with heads_kv. mStats, fp32 (heads_q, row_blocks, words), has
        LSE to base 2, delta, and marks of rows if may_empty_rows, from `BwdPreprocess`. mdQaccum,
        fp32 (heads_q, row_blocks, tile_m * tile_d), gets the sums of dQ. Row blocks are those of
        `RowBlocks`. mSemaphores (heads_q, row_blocks) int32, which `BwdPreprocess` zeroes, is not
        0 afterwards where mdQaccum has sums. With clears_dq it is None, and mdQaccum is zeroed.

        With splits_group mdK and mdV are fp32 sums (parts of groups, key blocks, tile_n * tile_d or
        tile_dv), the parts of a group one after the other. With packed_heads block_bits are the
        tensors of a `QueryLists`, heads of mStats and mdQaccum are KV heads, and mdK and mdV are
        fp32 sums of one part, zero before the launch, to which CTAs add.

        tile_counter, column_tensors and block_bits are those of `FlashAttentionForwardSm90`; block
        lists are always given as bits. mask_bit_tensors: `tiles` and `states` of a `MaskBitsArgs`,
        and `places` with mCuSeqlensQ, in place of a mask_mod and block_bits
        (`rules/mask_rules.py`). mQStart: `Lengths.q_start`. aux_grads: tensors to which the
        gradients of the aux tensors of wants_aux are added: fp32 of the same shapes, or with the
        batch before them, or int64 with words before them (`mods.fixed_point_sums`).
        """
        check_given("mSemaphores", mSemaphores, not self.clears_dq)
        check_given("aux_grads", aux_grads, bool(self.wants_aux))
        if const_expr(
            self.traits.cta_pair or self.traits.splits_keys or self.traits.lists_per_warpgroup
        ):
            check_given("softcap", softcap, False)
        traits = self.traits
        varlen_k = const_expr(mCuSeqlensK is not None)
        of_sequences = mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK
        lengths = Lengths.create(mQ, mK, *of_sequences, mQStart, self.shared_kv)
        listed = traits.packed_heads, traits.group_size
        operands = BwdOperands.create(traits, (mQ, mdO, mK, mV), lengths, listed)
        group_splits = query_lists = None
        if const_expr(traits.by_query_lists):
            query_lists, block_bits = QueryLists(*block_bits), None
        if const_expr(self.splits_group or traits.by_query_lists):
            if const_expr(self.splits_group):
                group_splits = mdK.shape[0] // (mK.shape[1] if varlen_k else mK.shape[2])
            of_keys = Lengths(mCuSeqlensK, None, None, None, lengths.seqlen_k, Int32(0))
            gradients = KeyGradients(mdK, mdV, RowBlocks(of_keys, traits.tile_n))
        else:
            gradients = KeyGradients(tma.key_rows(mdK, varlen_k), tma.key_rows(mdV, varlen_k))

        window = WindowArgs(window_size_left, window_size_right)
        mask_bits = (
            None if const_expr(mask_bit_tensors is None) else MaskBitsArgs(*mask_bit_tensors)
        )
        masks = MaskArgs.create(
            self, window, column_tensors, mQ.shape[-2], None, block_bits, aux_tensors, mask_bits
        )
        is_short = self.is_local or masks.may_shorten(self)
        schedule = KeySchedule.create(
            lengths, mQ, mK, (traits.tile_m, traits.cluster_tile_n),
            self.num_sms // traits.num_ctas, is_short if self.deterministic else None,
            1 if const_expr(group_splits is None) else group_splits,
            self.is_causal and not is_short,
        )  # fmt: skip
        if const_expr(self.entries_first):
            schedule = schedule.by_entries()
        if const_expr(query_lists is not None):
            schedule = schedule.of_items(query_lists.items.shape[1], self.num_sms)

        scales = ScoreScales.create(softmax_scale, softcap, self.score_mod is not None)
        scratch = Scratch(mStats, mdQaccum, mSemaphores)
        if const_expr(traits.by_query_lists):
            scratch = by_query_lists(traits, scratch)
        of_queries = lengths, mQ, mK, mdQaccum
        for kernel, tiles, results in self._launches(schedule, gradients, *of_queries):
            kernel.kernel(
                operands, results, scratch, lengths, softmax_scale, scales, masks, tiles.params,
                tiles.group, group_splits, tile_counter, aux_grads, query_lists,
            ).launch(
                grid=(tiles.grid * traits.num_ctas, 1, 1),
                block=(traits.num_threads, 1, 1),
                cluster=(traits.num_ctas, 1, 1) if traits.num_ctas > 1 else None,
                stream=stream,
                min_blocks_per_mp=1,
            )  # fmt: skip

    def _launches(
        self, schedule: KeySchedule, gradients: KeyGradients, *_: Any
    ) -> tuple[tuple["FlashAttentionBackwardSm90", KeySchedule, KeyGradients], ...]:
        """The kernels to launch one after the other."""
        return ((self, schedule, gradients),)

    def _passes_over(self, masks: MaskArgs, scales: ScoreScales) -> bool:
        """Whether a warpgroup skips blocks in which a mask hides all of its keys. Not if scores are
        modified: with such a branch the compiler copies S while its product is in flight, and ptxas
        then waits after each product. Nor if only the first block of a walk can be hidden, because
        its bits come too late."""
        is_plain = self.score_mod is None and scales.cap is None and not self.traits.by_query_lists
        may_hide = self.is_local or masks.may_shorten(self)
        if self.traits.lists_per_warpgroup:
            # the lists themselves have no bits
            may_hide = self.is_local or masks.columns is not None
        return not self.traits.shares_keys and is_plain and may_hide

    @cute.kernel
    def kernel(
        self,
        operands: BwdOperands,
        gradients: KeyGradients,
        scratch: Scratch,
        lengths: Lengths,
        softmax_scale: Float32,
        scales: ScoreScales,
        masks: MaskArgs,
        schedule: ScheduleParams,
        group: Int32,
        group_splits: Int32 | None,
        tile_counter: cute.Tensor | None,
        aux_grads: tuple | None,
        query_lists: QueryLists | None,
    ):
        traits = self.traits
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in operands[::2]:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(traits.storage())
        predecessors = None
        if const_expr(self.deterministic):
            predecessors = storage.predecessors.get_tensor(cute.make_layout((CHUNK, WALK_STAGES)))
        channels = traits.channels(storage, predecessors, lengths)
        cute.arch.mbarrier_init_fence()
        if const_expr(traits.cta_pair):
            # this CTA also arrives on the mbarriers of the other one
            clusters.sync()
        else:
            cute.arch.sync_threads()
        tiles = traits.tiles(storage)
        passes_over = self._passes_over(masks, scales)
        score_args = BwdScoreArgs(scales, masks.aux_tensors, aux_grads)

        # -- roles
        if warp_idx < Role.MMA:
            cute.arch.setmaxregister_decrease(traits.helper_registers)
            if warp_idx == Role.LOAD:
                of_smem = operands, tiles, channels
                BwdLoads.create(self, *of_smem, scratch, lengths, group_splits).run()
            elif warp_idx == Role.SCHEDULE:
                # in a fixed order, work tiles are claimed in the order in which they add to dQ
                scheduler = TileScheduler(
                    schedule,
                    tile_counter,
                    self.deterministic,
                    lengths.cu_seqlens_k is not None or traits.by_query_lists,
                    traits.num_ctas,
                    channels.claims,
                    claims_first=self.deterministic,
                    entries_first=self.entries_first,
                )
                rules = self._rules(masks, lengths, group, query_lists)
                rules = rules.for_tiles(tile_n=traits.cluster_tile_n)
                rings = (channels.ring, channels.walk)
                if const_expr(traits.by_query_lists):
                    send_token_walks(scheduler, rules, lengths, *rings)
                else:
                    send_walks(scheduler, rules, lengths, *rings, claims_late=Boolean(True))
            else:
                mask_warp = warp_idx - Role.MASK
                warp_rows = MaskWarpRows.create(
                    mask_warp, traits.num_mask_warps, traits.tile_n, wgmma.COLUMNS
                )
                rules = self._rules(masks, lengths, group, query_lists)
                any_bits = tiles.any_bits if passes_over else None
                bits = rules, warp_rows, tiles.bits, channels.bits
                if const_expr(traits.sums_of_mask_warp > 0):
                    make_bits = partial(make_block_bits, *bits, any_bits)
                    diagonals = diagonal_sums(self, tiles, channels, score_args)
                    make_bits_and_sums(make_bits, diagonals, channels)
                else:
                    make_mask_bits(*bits, channels.ring, channels.walk, any_bits)
        else:
            cute.arch.setmaxregister_increase(traits.mma_registers)
            of_smem = gradients, tiles, channels
            given = *of_smem, lengths, softmax_scale, score_args, passes_over
            if const_expr(not traits.columns.is_uneven):
                self.mma(traits, *given)
            elif mma_warpgroup_idx() == 0:
                self.mma(traits.for_warpgroup(0), *given)
            else:
                self.mma(traits.for_warpgroup(1), *given)
        if const_expr(traits.cta_pair):
            # the other CTA may still arrive on mbarriers of this one
            clusters.sync()

    def _rules(
        self, masks: MaskArgs, lengths: Lengths, group: Int32, query_lists: QueryLists | None
    ) -> BackwardMask:
        if query_lists is not None:
            return TokenMask.from_kernel(
                self,
                wgmma.COLUMNS,
                masks,
                lengths,
                group=Int32(1),
                is_ordered=False,
                lists=query_lists,
                by_head=self.masks_by_head,
            )
        own_keys = wgmma.ROWS_PER_WARPGROUP if self.traits.lists_per_warpgroup else None
        of_tiles = self.traits.cta_pair, own_keys
        return BackwardMask.create(self, wgmma.COLUMNS, masks, lengths, group, *of_tiles)

    # -- mma ------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        traits: cutlass.Constexpr[BwdTraits],
        gradients: KeyGradients,
        tiles: BwdSmem,
        channels: Channels,
        lengths: Lengths,
        softmax_scale: Float32,
        score_args: BwdScoreArgs,
        passes_over: cutlass.Constexpr[bool],
    ):
        """MMA warpgroup: 64 keys of every work tile, or a part of the columns of dK and dV."""
        ring = channels.ring
        products = BlockProducts(traits, channels, Fragments.create(traits, tiles))
        acc_dV, acc_dK = (
            [wgmma.make_accumulator(part.width) for part in columns]  # (64, width) each
            for columns in (traits.columns.dv, traits.columns.dk)
        )
        chain = make_chain(self, score_args, lengths, tiles.sums)
        scores = BlockScores.create(traits, tiles, channels, chain, lengths, passes_over)
        # numbers of the work tile, the query block and the partial block, counted from 0
        tile, block, cut = Int32(0), Int32(0), Int32(0)
        while ring.wait(tile):
            channels.q.wait(block)
            accumulate = Boolean(False)
            peeked = Peeked.nothing()
            scores.begin(tile, block)
            current = (tiles.words[0, channels.q.index(block)] >> OWN_KIND_SHIFT) & KIND_MASK
            first_visible = self._first_visible_block(ring.read(tile))
            if const_expr(scores.needs_scores):
                # not in the loops below, where a branch would serialise all products
                while (current != Kind.END) & (not ring.read(tile).has_scores):
                    channels.q.wait(block)
                    current = tiles.words[0, channels.q.index(block)] & KIND_MASK
                    pass_over(tiles, channels, scores, block, cut)
                    block += 1
                    cut += 1
            # -- query blocks
            # Partial and full blocks have a loop each. A test of every block would be a branch
            # while products are in flight, and ptxas would serialise them all.
            while current != Kind.END:
                for kind in (Kind.PARTIAL, Kind.FULL):
                    while current == kind:
                        channels.q.wait_unless(peeked.q, block)
                        if const_expr(self._may_be_empty(kind)):  # noqa: SIM102 (as above)
                            if not peeked.unmarked:
                                scores.clear_marked_rows(block)
                        following = tiles.words[0, channels.q.index(block)] & KIND_MASK
                        state = MainloopState(tile, block, cut, peeked)
                        process = partial(self._process, kind, tiles, products, scores, state)
                        sums = acc_dV, acc_dK, accumulate
                        by_bits = kind == Kind.PARTIAL and passes_over
                        if const_expr(by_bits or traits.lists_per_warpgroup):
                            if scores.is_hidden(state, by_bits, first_visible):
                                peeked = process(None)
                            else:
                                peeked = process(sums)
                                accumulate = Boolean(True)
                        else:
                            peeked = process(sums)
                            accumulate = Boolean(True)
                        cut += int(kind == Kind.PARTIAL)
                        block += 1
                        current = following

            # -- store dK and dV
            work = ring.read(tile)
            if const_expr(chain.has_walk):
                scores.end_walk(work)
            for acc in acc_dK:
                scale(acc, softmax_scale)
            # they are staged in the place of dS, whose readers must be done
            scores.acquire_grads(block)
            scores.acquire_summed(block)
            has_sums = work.has_scores & accumulate
            leaves_sums = self.splits_group or traits.by_query_lists
            has_parts = traits.shares_keys and max(traits.tile_d, traits.tile_dv) > MAX_OWN_DIM
            if const_expr(leaves_sums and has_parts):
                given = gradients.blocks, work, has_sums, traits.by_query_lists
                store_sum_rows(traits, acc_dV, traits.columns.dv, gradients.dv, *given)
                store_sum_rows(traits, acc_dK, traits.columns.dk, gradients.dk, *given)
            elif const_expr(leaves_sums):
                given = gradients.blocks, work, has_sums, traits.by_query_lists
                store_sums(acc_dV[0], gradients.dv, *given)
                store_sums(acc_dK[0], gradients.dk, *given)
            else:
                end = tiles, block, work, has_sums
                send_gradients(traits, acc_dV, traits.columns.dv, gradients.dv, *end)
                send_gradients(traits, acc_dK, traits.columns.dk, gradients.dk, *end)
            # wait until all warps are done: dS of the next block is written to the same place
            if const_expr(leaves_sums):
                pass
            elif const_expr(not traits.shares_keys):
                sync_warpgroup(Barrier.SENT)
            elif const_expr(traits.cta_pair or not chain.is_empty):
                sync_both()
            ring.release(tile)
            tile += 1

    def _may_be_empty(self, kind: Kind) -> bool:
        """Whether a block may have rows that see nothing: partial ones, or any with a score_mod."""
        return self.traits.has_marks and (kind == Kind.PARTIAL or self.score_mod is not None)

    def _first_visible_block(self, work: Work) -> Int32 | None:
        """The first query block that causal masking lets see this warpgroup's keys, if known."""
        if not self.is_causal or self.shared_kv:
            return None
        first_key = work.block * self.traits.tile_n + self.traits.first_key()
        return (first_key - work.seqlen.shift) // self.traits.tile_m

    def _process(
        self,
        kind: Kind,
        tiles: BwdSmem,
        products: BlockProducts,
        scores: BlockScores,
        state: MainloopState,
        sums: tuple[list, list, Boolean] | None,
    ) -> Peeked:
        """Add a query block, whose dO may be in flight. Returns what is known of the next block.

        sums: dV and dK so far, (64, width) for each part of their columns, and whether anything was
        added to them. None: this warpgroup's keys are hidden from the block, so its dS is 0.
        """
        compute = partial(scores.clear, kind, state)
        if sums is not None:
            compute = partial(scores.compute, kind, state, products.half_sums(*sums, state.block))
        following = state._replace(cut=state.cut + int(kind == Kind.PARTIAL))
        add = partial(self._add, kind, tiles, products, scores, following, sums)

        def compute_and_add(sums_dq: bool) -> Peeked:
            compute()
            return add(sums_dq)

        if not products.traits.columns.alternating:
            return compute_and_add(True)
        is_turn = products.traits.sums_dq(state.block)
        if scores.chain.is_empty:
            # a branch after P and dS would take more registers
            return by_turn(is_turn, compute_and_add)
        # with a branch before S, the compiler would copy it while its product is in flight
        compute()
        return by_turn(is_turn, add)

    def _add(
        self,
        kind: Kind,
        tiles: BwdSmem,
        products: BlockProducts,
        scores: BlockScores,
        state: MainloopState,
        sums: tuple[list, list, Boolean] | None,
        sums_dq: bool,
    ) -> Peeked:
        """The sums of a block from its P and dS. state.cut: that of the next block."""
        traits, channels, block = products.traits, products.channels, state.block
        if sums is not None:
            acc_dV, acc_dK, accumulate = sums
            if not traits.splits_keys:
                products.add_dv(acc_dV, scores.probs, block, accumulate)
        if scores.passes_over:
            scores.tell_ready(block, state.cut)
        # -- both warpgroups have dS: dQ and dK begin
        sync_both()
        scores.publish_grads(block)
        products.send_grads(block)
        stage_dQ = partial(stage_dq, traits, tiles, channels.dq, block)
        groups = tuple(Int32(group) for group in range(traits.key_groups))
        if sums is None:
            groups = (1 - traits.warpgroup_idx(),)
        issue_dQ = partial(products.issue_dq, block, state.tile, groups if sums_dq else ())
        if sums is None or traits.splits_keys:
            if traits.splits_keys:
                products.complete_sums(block)
            acc_dQ, num_behind = issue_dQ(0), 0
        else:
            scores.complete(block)
            acc_dQ, num_behind = products.add_dq_and_dk(
                acc_dK, scores.grads, block, accumulate, issue_dQ
            )
        # -- peek at the next fills, under the products, which hide how long an answer takes
        has_come = channels.q.is_full(block + 1)
        unmarked = Boolean(False)
        if self._may_be_empty(kind):
            unmarked = scores.is_unmarked(block + 1, has_come)
        peeked = Peeked(
            has_come,
            channels.do.is_full(block + 1),
            channels.bits.is_full(state.cut) if kind == Kind.PARTIAL else state.peeked.bits,
            scores.was_ready(block) if scores.passes_over else state.peeked.bits_for_all,
            unmarked,
        )
        # -- dQ is complete, part by part: stage its sums for the load warp
        warpgroup.wait_group(num_behind)
        products.release_summed(block)
        if sums_dq:
            stage_dQ(0, acc_dQ)
        for i in range(1, len(traits.columns.parts_dq)):
            if not scores.chain.is_empty:
                # too few registers to have it beside dK
                warpgroup.wait_group(0)
            acc_dQ = issue_dQ(i)
            warpgroup.wait_group(0)
            stage_dQ(i, acc_dQ)
        warpgroup.wait_group(0)
        channels.q.release(block)
        return peeked
