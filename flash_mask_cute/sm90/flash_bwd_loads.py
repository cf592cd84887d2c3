"""The load warp of the Hopper backward: what it fetches, and the sums of dQ that it sends off.

By the time the MMA warpgroups begin a query block, its Q and dO have been asked for a block ago;
then comes, in this order, the next block's Q and dO, the wait until the dQ of the block before last
has left its staging memory, and the dQ of the last block. With a work tile's first block come its
keys and values. docs/backward_sm90.md tells why.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from flash_mask_cute.core import tma
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.row_blocks import RowBlocks
from flash_mask_cute.core.semaphore import THERE, is_first, pass_turn, wait_for_turn
from flash_mask_cute.core.walk_ring import OWN_KIND_SHIFT, Block
from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.rules.backward_mask import NO_TURN
from flash_mask_cute.sm90 import cta_pairs, wgmma
from flash_mask_cute.sm90.flash_bwd_plan import QUERY_WORDS, BwdPlan, Channels, Tiles

# in place of a row block
NOTHING, UNSENT = -1, -2


class Operands(NamedTuple):
    """TMA atoms with their coordinate tensors.

    q, do: ((1 head, row), d, ...); k, v: ((head, row), d, ...); the last mode is the batch, and
    where lengths vary there is that of `tma.ragged_rows`. peer_k: k by half of its columns.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    peer_k_atom: cute.CopyAtom | None = None
    peer_k: cute.Tensor | None = None


class Scratch(NamedTuple):
    """By row block: stats (heads_q, row_blocks, stats_words) and dq (heads_q, row_blocks, -1),
    fp32; turns (heads_q, row_blocks), who has added to a row block's dQ (`core/semaphore.py`): in a
    fixed order, 1 + the key block that added last.
    """

    stats: cute.Tensor
    dq: cute.Tensor
    turns: cute.Tensor | None


class Summed(NamedTuple):
    """A row block that this CTA has sums of dQ for; turn 0: nobody came before. row_block NOTHING:
    none; UNSENT: sums of no key, which stay.

    In a fixed order, turn is 1 + the key block that has to have added before.
    """

    head_idx: Int32
    row_block: Int32
    turn: Int32

    @staticmethod
    def nothing() -> "Summed":
        return Summed(Int32(0), Int32(NOTHING), Int32(0))


class Loaded(NamedTuple):
    """The number of the next query block, and of the two before it their row blocks: the dQ of the
    earlier one has been sent, or it is nothing."""

    number: Int32
    sent: Summed
    last: Summed


class Visited(NamedTuple):
    """A query block of a work tile: its number, whether it is the first one, and its row block."""

    work: Work
    block: Block
    number: Int32
    is_first: Boolean
    row_block: Int32


@dataclass(frozen=True)
class BwdLoads:
    """What the load warp knows. deterministic, clears_dq: see `FlashAttentionBackwardSm90`."""

    plan: cutlass.Constexpr[BwdPlan]
    deterministic: cutlass.Constexpr[bool]
    clears_dq: cutlass.Constexpr[bool]
    operands: Operands
    tiles: Tiles
    channels: Channels
    scratch: Scratch
    lengths: Lengths

    @cute.jit
    def run(self):
        """Keys and values of every work tile, and the query blocks of its walk."""
        channels = self.channels
        tile, chunk = Int32(0), Int32(0)
        state = Loaded(Int32(0), Summed.nothing(), Summed.nothing())
        while channels.ring.wait(tile):
            work = channels.ring.read(tile)
            step = partial(self._load_block, work, tile, state.number)
            chunk, state = channels.walk.visit(chunk, state, step)
            # at once, since the MMA warpgroups need it before the next work tile is known
            self._free_staging(state.number - 2, state.sent)
            if const_expr(self.deterministic):
                # now, for others wait for it
                last = self._with_turn(state.last)
                self._send_dq(work.block + 1, state.number - 1, state.sent, last)
                cute.arch.cp_async_bulk_wait_group(0)
                self._pass_turn(work.block + 1, state.last)
                self._free_staging(state.number - 1, state.last)
                state = Loaded(state.number, Summed.nothing(), Summed.nothing())
            else:
                state = Loaded(state.number, Summed.nothing(), state.last)
            channels.ring.release(tile)
            tile += 1
        if const_expr(not self.deterministic):
            last = self._with_turn(state.last)
            self._send_dq(Int32(0), state.number - 1, Summed.nothing(), last)
            self._free_staging(state.number - 1, last)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _load_block(
        self, work: Work, tile: Int32, first: Int32, state: Loaded, block: Block
    ) -> Loaded:
        """Fetch a query block, and send the dQ of the one before.

        first: the number of the work tile's first one, which its keys and values come with.
        """
        plan, number = self.plan, state.number
        row_blocks = RowBlocks(self.lengths, plan.tile_m)
        row_block = block.index + row_blocks.first_of(work.batch_idx, work.offset_q)
        at = Visited(work, block, number, number == first, row_block)
        loads = (partial(self._load_query, at), partial(self._load_do, at))
        # What has one stage is released by a block whose dQ waits for the staging memory. The
        # others are asked for first: what comes late delays the products.
        stages = (plan.stages_q, plan.stages_do)
        num_ahead = stages.index(1) if 1 in stages else len(stages)
        for load in loads[:num_ahead]:
            load()
        self._free_staging(number - 2, state.sent)
        # known by the time the sums are there
        last = self._with_turn(state.last)
        for load in loads[num_ahead:]:
            load()
        # Keys have to wait until the work tile before has been computed, of which parts of dQ may
        # wait for those before them to leave.
        if const_expr(plan.do_says_dq):  # noqa: SIM102 (decided while tracing)
            if at.is_first:
                self._load_keys(work, tile, first)
        self._send_dq(work.block + 1, number - 1, state.sent, last)
        if const_expr(not plan.do_says_dq):  # noqa: SIM102 (decided while tracing)
            if at.is_first:
                self._load_keys(work, tile, first)
        if const_expr(self.lengths.seqused_k is not None):
            # what was loaded for the keys of none is not in use, perhaps not even finite
            row_block = cutlass.select_(work.seqlen_k > 0, row_block, Int32(UNSENT))
        return Loaded(number + 1, last, Summed(block.head_idx, row_block, block.turn))

    # -- operands -------------------------------------------------------------------------------

    @cute.jit
    def _load_query(self, at: Visited):
        """Fetch Q of a block with its statistics, and say which block it is."""
        plan, operands, tiles, channel = self.plan, self.operands, self.tiles, self.channels.q
        block = at.block
        flags = block.follower | (block.kind << OWN_KIND_SHIFT)
        words = (flags, block.index, block.head_idx, at.row_block)
        tile = ((1, plan.tile_m), plan.tile_d)
        gmem, row = self._query_rows(operands.q, at)
        src, dst = tma.tile_of(operands.q_atom, gmem, (block.head_idx, row), tile, tiles.q)
        stage = channel.index(at.number)
        channel.acquire(at.number)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(QUERY_WORDS):
                tiles.words[i, stage] = Int32(words[i])
        bytes_k = cutlass.select_(at.is_first, Int32(plan.bytes_k + plan.bytes_peer_k), Int32(0))
        channel.expect(at.number, bytes_k + plan.bytes_q + plan.bytes_stats)
        barrier = channel.barrier(at.number)
        cute.copy(operands.q_atom, src, dst[None, stage], tma_bar_ptr=barrier)
        stats = self.scratch.stats[block.head_idx, at.row_block, None]
        tma.copy_bulk(stats, tiles.stats[None, stage], barrier)

    @cute.jit
    def _load_do(self, at: Visited):
        """Fetch dO of a block."""
        plan, operands, channel = self.plan, self.operands, self.channels.do
        tile = ((1, plan.tile_m), plan.tile_dv)
        gmem, row = self._query_rows(operands.do, at)
        first = (at.block.head_idx, row)
        src, dst = tma.tile_of(operands.do_atom, gmem, first, tile, self.tiles.do)
        channel.acquire(at.number)
        bytes_v = cutlass.select_(at.is_first, Int32(plan.bytes_v), Int32(0))
        channel.expect(at.number, bytes_v + plan.bytes_do)
        stage, barrier = channel.index(at.number), channel.barrier(at.number)
        cute.copy(operands.do_atom, src, dst[None, stage], tma_bar_ptr=barrier)

    def _query_rows(self, tensor: cute.Tensor, at: Visited) -> tuple[cute.Tensor, Int32]:
        """The ((head, row), d) tensor of a sequence of Q or dO, and the row to read from."""
        work, side = at.work, tma.Side.of_queries(self.lengths)
        place = work.batch_idx, work.offset_q, work.seqlen_q
        return tma.readable_rows(tensor, side, *place, at.block.index * self.plan.tile_m)

    def _load_keys(self, work: Work, tile: Int32, first: Int32):
        """Fetch the keys and values of a work tile, which complete query block `first` and its dO.

        Where they have one stage, the block before has to read those of the work tile before until
        its dQ is complete; then it releases dO, or Q if dQ has several parts. Where they have two,
        whoever read the stage released a Q that `first` has taken the place of.
        """
        plan, operands, tiles, channels = self.plan, self.operands, self.tiles, self.channels
        side, copies = tma.Side.of_keys(self.lengths), []
        place = work.batch_idx, work.offset_k, work.seqlen_k
        with_k, with_v = channels.q.barrier(first), channels.do.barrier(first)
        kinds = [
            (operands.k_atom, operands.k, tiles.k, work.block, (0, plan.tile_d), with_k),
            (operands.v_atom, operands.v, tiles.v, work.block, (0, plan.tile_dv), with_v),
        ]
        if plan.cta_pair:
            cols = (cta_pairs.rank() * plan.cols_dq, plan.cols_dq)
            peer_k = (operands.peer_k_atom, operands.peer_k, tiles.peer_k)
            # blocks of a pair are numbered as its CTAs are
            kinds.append((*peer_k, work.block ^ 1, cols, with_k))
        for atom, source, smem, block, (first_col, d), barrier in kinds:
            for group in range(plan.key_groups):
                row = block * plan.tile_n + group * wgmma.ROWS_PER_WARPGROUP
                gmem, row = tma.readable_rows(source, side, *place, row)
                box = ((1, wgmma.ROWS_PER_WARPGROUP), d)
                src, dst = tma.tile_of(atom, gmem, (work.head_idx, row), box, smem, first_col)
                copies.append((atom, src, dst[None, plan.keys_unit(tile, group)], barrier))
        if plan.stages_kv == 1:
            with cute.arch.elect_one():
                for atom, src, _, _ in copies:
                    # brought into L2 meanwhile
                    cute.prefetch(atom, src)
            last_read = channels.do if plan.do_says_dq else channels.q
            last_read.wait_until_released(first - 1)
        for atom, src, dst, barrier in copies:
            cute.copy(atom, src, dst, tma_bar_ptr=barrier)

    # -- dQ -------------------------------------------------------------------------------------

    @cute.jit
    def _with_turn(self, summed: Summed) -> Summed:
        """With the turn, where there is no order or nothing to be sent."""
        turn = summed.turn
        if const_expr(self.clears_dq):
            turn = Int32(1)
        elif const_expr(not self.deterministic):  # noqa: SIM102 (decided while tracing)
            if summed.row_block >= 0:
                turn = cutlass.select_(is_first(self._turn_of(summed)), Int32(0), Int32(1))
        if const_expr(self.lengths.seqused_k is not None):
            turn = cutlass.select_(summed.row_block >= 0, turn, Int32(NO_TURN))
        return Summed(summed.head_idx, summed.row_block, turn)

    def _is_block(self, summed: Summed) -> Boolean:
        if self.lengths.seqused_k is None:
            return summed.row_block >= 0
        return summed.row_block != NOTHING

    @cute.jit
    def _send_dq(self, own_turn: Int32, number: Int32, sent: Summed, summed: Summed):
        """Start adding the dQ of query block `number`, if it is one, to the scratch memory.

        Its last part is on its way then, and still in the staging memory (`_free_staging`).
        Where dQ is summed in a fixed order, after the key block that `turn` names; whoever comes
        after the one that was sent before is told now, when that addition is complete and nobody
        has to wait for it.
        """
        channel, parts = self.channels.dq, self.plan.parts_dq
        if self._is_block(summed):
            if const_expr(self.deterministic):  # noqa: SIM102 (decided while tracing)
                # what has no turn is zeros, and not sent
                if summed.turn != NO_TURN:
                    wait_for_turn(self._turn_of(summed), summed.turn)
            staged = self.tiles.dq.iterator
            target = self.scratch.dq[summed.head_idx, summed.row_block, None].iterator
            if const_expr(self.plan.cta_pair):
                target += cta_pairs.rank() * (self.plan.cols_dq * self.plan.tile_m)
            for i in cutlass.range_constexpr(len(parts)):
                if const_expr(i > 0):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    channel.release(number * len(parts) + i - 1)
                channel.wait(number * len(parts) + i)
                size = math.prod(self.plan.shape_dq(parts[i]))
                if summed.turn > 0:
                    tma.add_bulk(staged, target, size)
                elif summed.turn != NO_TURN:
                    tma.store_bulk(staged, target, size)
                target += size
            if const_expr(self.deterministic):
                cute.arch.cp_async_bulk_wait_group(len(parts))
                self._pass_turn(own_turn, sent)

    @cute.jit
    def _free_staging(self, number: Int32, sent: Summed):
        """Wait until the last part of the dQ of block `number`, if it is one, has left; without an
        order, let others add if it was the first."""
        if self._is_block(sent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.channels.dq.release((number + 1) * len(self.plan.parts_dq) - 1)
            if const_expr(not (self.deterministic or self.clears_dq)):  # noqa: SIM102 (as above)
                if sent.turn == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                    pass_turn(self._turn_of(sent), Int32(THERE))

    @cute.jit
    def _pass_turn(self, own_turn: Int32, sent: Summed):
        """Let the next one add to a row block, if it is one to which this work tile has added."""
        if (sent.row_block >= 0) & (sent.turn != NO_TURN):
            pass_turn(self._turn_of(sent), own_turn)

    def _turn_of(self, summed: Summed) -> cute.Pointer:
        place = (summed.head_idx, summed.row_block)
        return cute.domain_offset(place, self.scratch.turns).iterator
