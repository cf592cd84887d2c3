"""FlashAttention backward for Blackwell: dQ, dK, dV from dO, LSE and delta = rowsum(dO * O) - dLSE.

A persistent CTA computes work tiles of 128 keys of a KV head, one after another. For each it walks
over the queries of the group's heads in blocks of 128, or 64 for wide heads. With P = exp(S - LSE)
and dP = dO V^T,

    dV = P^T dO        dS = P * (dP - delta)        dK = scale dS^T Q        dQ = scale dS K

| warps                 | role     | work                                                       |
|-----------------------|----------|------------------------------------------------------------|
| warpgroups 0, 1       | compute  | 128 keys, half of the queries: P, dS; dV and dK to memory  |
| warpgroup 2           | reduce   | dQ out of TMEM to where it leaves                          |
| 0 of warpgroup 3      | load     | TMA of K, V, and of Q, dO, LSE and delta                   |
| 1 of warpgroup 3      | mma      | issue all products                                         |
| 2 of warpgroup 3      | schedule | choose work tiles and the query blocks they visit          |
| 3 of warpgroup 3      | send     | add dQ to the others' sums in memory                       |
| warpgroup 4           | mask     | bits of the scores that count, for blocks that a mask cuts |

Channels (full/empty mbarrier pairs):

    schedule -ring-> all              coordinates and lengths of the next work tile
    schedule -walk-> all              the query blocks it visits, up to 32 an entry
    load ----q-----> mma, compute     a query block, its LSE and delta, and with a work tile's first
                                      block its keys
    load ----do----> mma              dO of a query block, and with the first one the values
    compute --kv---> mma              keys and values of a work tile in TMEM, where that has room
    mma  ----s-----> compute          scores; released when probabilities replace them
    mma  ----dp----> compute          dP; released when dS is there, in TMEM and shared memory
    mma  ----dq----> reduce           dQ of a block; released when it is in registers
    mma  ----sums--> compute          dV and dK of a work tile
    reduce --out---> send             a part of a block's dQ, in shared memory
    mask ----bits--> compute          the bits of a query block that is cut

S^T and dP^T have keys in lanes, so a compute thread has one key. P^T and dS^T replace S and dP in
TMEM, where they are operands of dV and dK. dS also goes to shared memory for dQ. Products complete
in the order of their issue: of block j, S(j) dK(j-1) dQ(j-1) dV(j) dP(j). So when dP(j) is
complete, dS(j-1) is no longer read in either place. docs/backward_sm100.md gives the reasons.

If dV, dK and dQ do not fit into TMEM together, there are two launches (`BwdTraits.launches`). That
of dV has no dP, dq, out, reduce and send. The other one does not keep P.

With cta_pair two CTAs of a cluster walk over the queries together (`flash_bwd_pairs`). Pairs of
wide heads have another order of products, and more channels (`flash_bwd_storage`).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_mask_cute.core import tma
from flash_mask_cute.core.cta import WALK_STAGES, check_can_run, thread_in_warpgroup, traits_of
from flash_mask_cute.core.dq_sums import DqSums, Scratch
from flash_mask_cute.core.key_schedule import KeySchedule
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.query_loads import BwdOperands, QueryLoads
from flash_mask_cute.core.score_gradients import BwdScoreArgs
from flash_mask_cute.core.softmax import ScoreScales
from flash_mask_cute.core.tile_scheduler import ScheduleParams, TileScheduler
from flash_mask_cute.core.walk_ring import CHUNK
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods.line_gradients import AuxElements, LineGradients
from flash_mask_cute.mods.score_chain import ScoreChain
from flash_mask_cute.mods.score_elements import Places
from flash_mask_cute.rules import bit_tile
from flash_mask_cute.rules.backward_mask import BackwardMask
from flash_mask_cute.rules.intervals import Intervals
from flash_mask_cute.rules.mask_rules import MaskArgs, MaskWarpRows, WindowArgs, check_given
from flash_mask_cute.rules.mask_warps import make_mask_bits, send_claimed_walks, send_walks
from flash_mask_cute.sm100 import umma
from flash_mask_cute.sm100.flash_bwd_fragments import pair_products, products
from flash_mask_cute.sm100.flash_bwd_loads import KeyLoads, SumsOut
from flash_mask_cute.sm100.flash_bwd_math import ELEMENTS, keep_rounded
from flash_mask_cute.sm100.flash_bwd_pairs import (
    Arrivals,
    FoldedScores,
    PairLoads,
    PairOperands,
    PeerGrads,
)
from flash_mask_cute.sm100.flash_bwd_products import BlockProducts
from flash_mask_cute.sm100.flash_bwd_reduce import DqParts
from flash_mask_cute.sm100.flash_bwd_registers import HALVES, MASK_REGISTERS
from flash_mask_cute.sm100.flash_bwd_scores import VECTOR_16_BITS, Blocks, BlockScores
from flash_mask_cute.sm100.flash_bwd_storage import (
    BwdSmem,
    Channels,
    channels_of,
    storage_of,
    tiles_of,
)
from flash_mask_cute.sm100.flash_bwd_traits import (
    COMPUTE_WARPS,
    NUM_MASK_WARPS,
    STORED_COLS,
    STORED_ROWS,
    BwdTraits,
    GradientPart,
    Role,
)


class KeyGradients(NamedTuple):
    """TMA atoms with their coordinate tensors, ((1 head, row), d, ...): see `tma.sequence_rows`."""

    dk_atom: cute.CopyAtom
    dk: cute.Tensor
    dv_atom: cute.CopyAtom
    dv: cute.Tensor


@dataclass(eq=False, repr=False)
class FlashAttentionBackwardSm100:
    """Backward kernel for Blackwell, to be passed to `cute.compile`.

    The parameters are those of `FlashAttentionBackwardSm90`, except for these.

    :param tile_m: query rows of a block, 128, or 64 if head_dim or head_dim_v is above 128 and CTAs
        are alone
    :param stages_kv, value_cols: 1 and 0
    :param cta_pair: two CTAs compute products together (`flash_bwd_pairs`); for tiles of 128, of
        256, or of 192 and 128 columns; requires no score_mod, no soft cap, and at least two SMs
    :raises ValueError: for a shape or configuration that cannot run
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int | None = None
    is_causal: bool = False
    is_local: bool = False
    tile_m: int = 128
    stages_q: int = 2
    stages_do: int = 1
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
    num_sms: int = 148
    may_empty_rows: bool = False
    shared_kv: bool = False

    def __post_init__(self) -> None:
        self.traits = traits_of(
            self,
            BwdTraits,
            head_dim_v=self.head_dim if self.head_dim_v is None else self.head_dim_v,
            has_marks=self.may_empty_rows,
            has_reference=self.score_mod is not None,
        )
        check_can_run(self.traits)
        can_sum = self.score_mod is not None and self.score_mod_bwd is None
        if self.wants_aux and (self.deterministic or not can_sum):
            raise ValueError(
                f"wants_aux {self.wants_aux} needs a score_mod, no score_mod_bwd and no fixed order"
            )
        if self.clears_dq and self.deterministic:
            raise ValueError("clears_dq is for sums without an order, got deterministic=True")
        if self.cta_pair and (self.score_mod is not None or self.num_sms < 2):
            raise ValueError(
                "cta_pair=True needs num_sms of 2 and more, and no score_mod, got "
                f"num_sms={self.num_sms}, score_mod={self.score_mod}"
            )

    def launches(self) -> list["FlashAttentionBackwardSm100"]:
        """The kernels to launch one after the other: see `BwdTraits.launches`."""
        kernels = []
        for traits in self.traits.launches():
            kernel = copy.copy(self)
            kernel.traits = traits
            if not traits.makes_dk:
                # only dQ has an order, and gradients of aux tensors come with dS
                kernel.deterministic, kernel.wants_aux = False, ()
            kernels.append(kernel)
        return kernels

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
        """Launch on `stream`: the arguments are those of `FlashAttentionBackwardSm90`.

        The sums in mdQaccum are in the order of lanes (`BwdPostprocess`). With cta_pair
        mSemaphores is (heads_q, 2 * row_blocks): a row block has one for each CTA's rows.
        """
        if const_expr(mask_bit_tensors is not None):
            raise NotImplementedError(
                "FlashAttentionBackwardSm100 does not support mask_bit_tensors"
            )
        check_given("mSemaphores", mSemaphores, not self.clears_dq)
        check_given("aux_grads", aux_grads, bool(self.wants_aux))
        if const_expr(self.traits.cta_pair):
            check_given("softcap", softcap, False)
        of_sequences = mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK
        lengths = Lengths.create(mQ, mK, *of_sequences, mQStart, self.shared_kv)
        window = WindowArgs(window_size_left, window_size_right)
        masks = MaskArgs.create(
            self, window, column_tensors, mQ.shape[-2], None, block_bits, aux_tensors
        )
        is_short = self.is_local or masks.may_shorten(self)
        for kernel in self.launches():
            traits = kernel.traits
            group = traits.group
            # a pair takes work tiles in fixed turns, unless others wait for them
            takes_turns = group.is_pair and not kernel.deterministic
            schedule = KeySchedule.create(
                lengths, mQ, mK, (traits.tile_m, traits.cluster_tile_n),
                kernel.num_sms // group.size, is_short if kernel.deterministic else None,
            )  # fmt: skip
            operands = BwdOperands.create(traits, (mQ, mdO, mK, mV), lengths)
            if const_expr(group.is_pair):
                operands = PairOperands.create(traits, operands, (mQ, mdO, mK, mV), lengths)
            kernel.kernel(
                operands,
                kernel._gradients(mdK, mdV, mCuSeqlensK is not None),
                Scratch(mStats, mdQaccum, mSemaphores),
                lengths,
                softmax_scale,
                ScoreScales.create(softmax_scale, softcap, kernel.score_mod is not None),
                masks,
                schedule.params,
                schedule.group,
                None if const_expr(takes_turns) else tile_counter,
                aux_grads if kernel.wants_aux else None,
            ).launch(
                grid=(schedule.grid * group.size, 1, 1),
                block=(traits.num_threads, 1, 1),
                cluster=group.cluster,
                stream=stream,
                min_blocks_per_mp=1,
            )

    def _gradients(self, mdK: cute.Tensor, mdV: cute.Tensor, is_packed: bool) -> KeyGradients:
        store = cpasync.CopyBulkTensorTileS2GOp()
        layout = tma.one_stage(self.traits.layout_stored())
        box = ((1, STORED_ROWS), STORED_COLS)
        atoms: list = []
        for gradient in (mdK, mdV):
            view = tma.sequence_rows(gradient, is_packed)
            atoms += cpasync.make_tiled_tma_atom(store, view, layout, box)
        return KeyGradients(*atoms)

    @cute.kernel
    def kernel(
        self,
        operands: BwdOperands | PairOperands,
        gradients: KeyGradients,
        scratch: Scratch,
        lengths: Lengths,
        softmax_scale: Float32,
        scales: ScoreScales,
        masks: MaskArgs,
        schedule: ScheduleParams,
        group: Int32,
        tile_counter: cute.Tensor | None,
        aux_grads: tuple[cute.Tensor, ...] | None,
    ):
        traits = self.traits
        # -- shared memory, TMEM and channels
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == Role.LOAD:
            loaded = operands.atoms if const_expr(traits.cta_pair) else operands[:8:2]
            for atom in (*loaded, *gradients[::2]):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(storage_of(traits, self.deterministic))
        predecessors = None
        if const_expr(self.deterministic):
            predecessors = storage.predecessors.get_tensor(cute.make_layout((CHUNK, WALK_STAGES)))
        channels = channels_of(traits, storage, predecessors, lengths)
        cute.arch.mbarrier_init_fence()
        traits.group.meet()
        if warp_idx == Role.MMA:
            traits.group.allocate(storage.tmem.ptr)
        cute.arch.sync_threads()
        tiles = tiles_of(traits, storage)

        # -- roles
        has_lists_and_more = masks.bits is not None and (
            masks.columns is not None or self.deterministic
        )
        registers = traits.registers(scales.cap is not None or has_lists_and_more)
        if warp_idx < Role.REDUCE:
            cute.arch.setmaxregister_increase(registers.compute)
            score_args = BwdScoreArgs(scales, masks.aux_tensors, aux_grads)
            self.compute(gradients, tiles, channels, lengths, softmax_scale, score_args)
        elif warp_idx < Role.LOAD:
            cute.arch.setmaxregister_decrease(registers.reduce)
            if const_expr(traits.makes_dk):
                DqParts(traits, registers, tiles, channels).run()
        elif warp_idx < Role.MASK:
            cute.arch.setmaxregister_decrease(registers.of_helpers)
            if warp_idx == Role.LOAD:
                if const_expr(traits.cta_pair):
                    PairLoads(traits, operands, tiles, channels, scratch.stats, lengths).run()
                else:
                    queries = QueryLoads(traits, operands, tiles, channels, scratch.stats, lengths)
                    KeyLoads(traits, operands, tiles, channels, queries, lengths).run()
            elif warp_idx == Role.MMA:
                together = bool(self.wants_aux) or traits.is_serial
                if const_expr(not traits.cta_pair):
                    fragments = products(traits, tiles)
                    BlockProducts(traits, together, fragments, tiles, channels).run()
                elif traits.group.is_leader():
                    fragments = pair_products(traits, storage)
                    BlockProducts(traits, together, fragments, tiles, channels).run()
                else:
                    Arrivals(traits, True, tiles, channels).follow()
            elif warp_idx == Role.SCHEDULE:
                # Those whose turn comes first, first. One CTA claims the next one early, which
                # keeps others waiting, but not forever (`TileScheduler.claims_first`).
                scheduler = TileScheduler(
                    schedule,
                    tile_counter,
                    self.deterministic,
                    lengths.cu_seqlens_k is not None,
                    traits.group.size,
                    channels.claims,
                    claims_first=self.deterministic,
                )
                rules = BackwardMask.create(
                    self, traits.columns, masks, lengths, group, traits.cta_pair
                ).for_tiles(tile_n=traits.cluster_tile_n)
                send = send_walks if channels.claims is None else send_claimed_walks
                send(scheduler, rules, lengths, channels.ring, channels.walk)
            elif const_expr(traits.makes_dk):
                sizes = tuple(traits.size_dq(width) for width in traits.parts_dq)
                scheme = self.deterministic, self.clears_dq
                own = scratch._replace(semaphores=_own_semaphores(traits, scratch.semaphores))
                more = tiles.dq.iterator, channels.out, own, lengths
                if const_expr(traits.cta_pair):
                    # behind those of the other half of the queries
                    more = (*more, partial(_share_of_sums, traits))
                SumsOut(traits, channels, DqSums(sizes, *scheme, *more)).run()
        else:
            cute.arch.setmaxregister_decrease(MASK_REGISTERS)
            mask_warp = warp_idx - Role.MASK
            columns = traits.columns
            # of 64 keys, two warps have the same
            alternating = min(NUM_MASK_WARPS, traits.tile_n // bit_tile.WORD)
            mask_warp = mask_warp % alternating if const_expr(traits.is_folded) else mask_warp
            warp_rows = MaskWarpRows.create(mask_warp, alternating, traits.tile_n, columns)
            is_part = traits.cta_pair
            rules = BackwardMask.create(self, columns, masks, lengths, group, is_part)
            make_mask_bits(
                rules, warp_rows, tiles.bits, channels.bits, channels.ring, channels.walk
            )

        # -- end: TMEM is freed when no thread uses it any more
        traits.group.sync()
        if warp_idx == Role.MMA:
            traits.group.free()

    # -- compute --------------------------------------------------------------------------------

    @cute.jit
    def compute(
        self,
        gradients: KeyGradients,
        tiles: BwdSmem,
        channels: Channels,
        lengths: Lengths,
        softmax_scale: Float32,
        score_args: BwdScoreArgs,
    ):
        """Compute warp: 32 keys and half of the queries, one key for each thread."""
        half = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (COMPUTE_WARPS // HALVES)
        traits = self.traits
        tiles_of_scores = traits.tile_m, traits.tile_n
        places = Places(tiles_of_scores, ELEMENTS, Int32(0), half * traits.queries)
        aux = AuxElements(
            self.score_mod, self.wants_aux, score_args.aux_tensors, score_args.aux_grads
        )
        along = LineGradients((), None, places, aux)
        chain = ScoreChain(score_args.scales, aux, self.score_mod_bwd, traits.dtype, places, along)
        peer = None
        if const_expr(traits.cta_pair):
            kept = FoldedScores if const_expr(traits.is_folded) else PeerGrads
            peer = kept.create(traits, tiles, channels, half)
        scores = BlockScores(traits, tiles, channels, chain, half, lengths, peer)
        tile, chunk = Int32(0), Int32(0)
        state = Blocks(Int32(0), Int32(0))
        while channels.ring.wait(tile):
            # -- query blocks: S^T and dP^T of the half, (128 keys, queries), become P^T and dS^T
            if const_expr(traits.holds_keys):
                self._hold_keys(tiles, channels, tile, state.number, half)
            chunk, state = channels.walk.visit(chunk, state, partial(scores.visit, tile))
            # -- dV (128 keys, tile_dv) leaves by one warpgroup, dK (128 keys, tile_d) by the other;
            # where there is only one of them, by both
            channels.sums.wait(tile)
            umma.fence_after_wait()
            work = channels.ring.read(tile)
            store = partial(self._store_sums, tiles, lengths, work)
            of_dv = gradients.dv_atom, gradients.dv, traits.column_dv, None
            of_dk = gradients.dk_atom, gradients.dk, traits.column_dk, softmax_scale
            if const_expr(traits.part == GradientPart.ALL):
                if half == 0:
                    store(*of_dv, traits.stored_columns(traits.head_dim_v))
                else:
                    store(*of_dk, traits.stored_columns(traits.head_dim))
            else:
                dim = traits.head_dim_v if const_expr(traits.makes_dv) else traits.head_dim
                columns = range(0, dim, STORED_COLS)
                middle = (len(columns) + 1) // HALVES
                if half == 0:
                    store(*(of_dv if traits.makes_dv else of_dk), columns[:middle])
                else:
                    store(*(of_dv if traits.makes_dv else of_dk), columns[middle:])
            # dS of the next work tile goes where they are sent from, behind its first dV
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            umma.fence_before_arrival()
            cute.arch.sync_warp()
            channels.sums.release(tile)
            channels.ring.release(tile)
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _hold_keys(
        self, tiles: BwdSmem, channels: Channels, tile: Int32, first: Int32, half: Int32
    ):
        """Copy K, or V in the second half, of this thread's key into TMEM, which is free."""
        traits = self.traits
        if half == 0:
            channels.q.wait(first)
            umma.fence_after_wait()
            self._hold(tiles.k, traits.column_k, traits.tile_d)
        else:
            channels.do.wait(first)
            umma.fence_after_wait()
            self._hold(tiles.v, traits.column_v, traits.tile_dv)
        umma.wait_stores()
        umma.fence_before_arrival()
        channels.kv.publish(tile)

    def _hold(self, smem: cute.Tensor, column: int, width: int) -> None:
        """Copy this thread's row of shared memory to columns of its lane."""
        thread = thread_in_warpgroup()
        row = cute.flat_divide(smem[thread, None, 0], (VECTOR_16_BITS,))
        values = cute.make_rmem_tensor(width, self.traits.dtype)
        parts = cute.flat_divide(values, (VECTOR_16_BITS,))
        for i in range(width // VECTOR_16_BITS):
            cute.autovec_copy(row[None, i], parts[None, i])
        umma.store_columns(cute.recast_tensor(values, Int32), column, thread)

    @cute.jit
    def _store_sums(
        self,
        tiles: BwdSmem,
        lengths: Lengths,
        work: Work,
        atom: cute.CopyAtom,
        target: cute.Tensor,
        column: cutlass.Constexpr[int],
        scale: Float32 | None,
        columns: cutlass.Constexpr[range],
    ):
        """Store 32 keys of dK or dV from TMEM by this warp's places. columns: firsts of 32."""
        traits, lane = self.traits, cute.arch.lane_idx()
        places = traits.store_places
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        is_packed = lengths.cu_seqlens_k is not None
        gmem = tma.of_sequence(target, is_packed, work.batch_idx, work.offset_k, work.slot)
        # if results are folded, the second half of the columns is in lanes 64 to 127
        warps, first_col = traits.tile_n // STORED_ROWS, 0
        first_key = work.block * traits.tile_n + warp % warps * STORED_ROWS
        if const_expr(traits.is_folded):
            first_col = warp % (COMPUTE_WARPS // HALVES) // warps * (traits.tile_d // 2)
        for i in cutlass.range_constexpr(len(columns)):
            first = columns[i]
            place = warp * places + i % places
            # what was sent from this place before has left
            cute.arch.cp_async_bulk_wait_group(places - 1, read=True)
            cute.arch.sync_warp()
            values = umma.load_columns(column + first, STORED_COLS, thread_in_warpgroup())
            umma.wait_loads()
            for c in cutlass.range_constexpr(STORED_COLS):
                value = values[0, c]
                if const_expr(scale is not None):
                    value = value * scale
                # without scores, what was loaded is another sequence's, perhaps not even finite
                values[0, c] = cutlass.select_(work.has_scores, value, Float32(0.0))
            words = keep_rounded(values, traits.dtype)
            rounded = cute.flat_divide(cute.recast_tensor(words, traits.dtype), (VECTOR_16_BITS,))
            row = cute.flat_divide(tiles.stored[lane, None, place], (VECTOR_16_BITS,))
            for v in cutlass.range_constexpr(STORED_COLS // VECTOR_16_BITS):
                cute.autovec_copy(rounded[None, v], row[None, v])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            box = ((1, STORED_ROWS), STORED_COLS)
            start = (work.head_idx, first_key)
            dst, src = tma.tile_of(atom, gmem, start, box, tiles.stored, first_col + first)
            if const_expr(traits.is_folded):
                # of dV, or of dK, which is scaled
                dim = traits.head_dim_v if const_expr(scale is None) else traits.head_dim
                if first_col + first < dim:
                    cute.copy(atom, src[None, place], dst)
            else:
                cute.copy(atom, src[None, place], dst)
            cute.arch.cp_async_bulk_commit_group()


def _own_semaphores(traits: BwdTraits, semaphores: cute.Tensor | None) -> cute.Tensor | None:
    """(heads_q, row_blocks): those of this CTA's rows. A pair has two of a row block."""
    if semaphores is None or not traits.cta_pair:
        return semaphores
    of_ctas = cute.flat_divide(semaphores, (1, traits.group.size))
    return of_ctas[0, traits.group.rank(), None, None]


def _share_of_sums(traits: BwdTraits) -> tuple[Int32, tuple[int, ...]]:
    """Where the sums of a CTA of a pair begin in those of a row block, and sizes of their parts."""
    sizes = tuple(traits.size_dq(width) for width in traits.parts_dq)
    return traits.group.rank() * traits.rows_of_cta * traits.tile_d, sizes
