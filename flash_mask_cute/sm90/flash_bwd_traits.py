"""Static facts of the Hopper backward: tiles, WGMMA shapes, shared memory, warps and registers."""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.clusters import CTAS, Claims
from flash_mask_cute.core.cta import (
    RING_STAGES,
    THREADS_PER_WARPGROUP,
    WALK_STAGES,
    WARPS_PER_WARPGROUP,
    registers_left,
    scheduler_rings,
    swizzled,
)
from flash_mask_cute.core.cursor import Cursor
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.row_blocks import alternating_sums
from flash_mask_cute.core.storage import barriers, elements, floats, words
from flash_mask_cute.core.walk_ring import CHUNK, OWN_FIELDS, WalkRing
from flash_mask_cute.core.work_ring import SPLIT_FIELDS, WorkRing
from flash_mask_cute.rules.bit_tile import WORD
from flash_mask_cute.sm90.cta_pairs import PeerGrads
from flash_mask_cute.sm90.flash_bwd_limits import (
    MAX_OWN_DIM,
    MMA_REGISTERS,
    SCALAR_REGISTERS,
    SPARE_REGISTERS,
    why_infeasible,
)
from flash_mask_cute.sm90.gradient_columns import NUM_MMA_WARPGROUPS, GradientColumns, shared_width
from flash_mask_cute.sm90.query_block_traits import QueryBlockTraits
from flash_mask_cute.sm90.warpgroups import SMEM_BOOKKEEPING, Role, mma_warpgroup_idx
from flash_mask_cute.sm90.wgmma import (
    COLUMNS,
    MN,
    REGISTERS,
    ROWS_PER_WARPGROUP,
    make_mma,
    rows_layout,
    tile_columns,
)

# columns of an operand A that a WGMMA takes
STEP_COLS = 16
# columns of an operand A, of 64 rows, that a register of each thread holds
COLS_PER_REGISTER = 4
# parts of a block where S and dP of all would take too many registers
NUM_HALVES = 2
# fragments of heads up to 32, whose S and dP may both wait for a score_mod
FEW_REGISTERS = 96
# columns of tiles of two CTAs that sum dQ together
PAIR_WIDTHS = (160, 192, 256)


class Barrier(IntEnum):
    """Named barriers (0 is __syncthreads). PROBS: P of a block has been written for the other MMA
    warpgroup. SENT and the next: the warps of an MMA warpgroup have sent dK and dV."""

    BOTH = 1
    PROBS = 2
    SENT = 3


class Channels(NamedTuple):
    """The channels between the roles of a CTA (see the top of `flash_bwd`)."""

    q: Channel
    do: Channel
    dq: Channel
    bits: Channel
    ds: Channel | None
    summed: Channel | None
    ring: WorkRing
    walk: WalkRing
    grads: PeerGrads | None = None
    claims: Claims | None = None


class BwdSmem(NamedTuple):
    """peer_k, peer_ds: from the other CTA. dq: fp32 sums of a part. any_bits: for each 32 keys, the
    OR of their bits. ready: two places, used alternately: whether the bits of the next block had
    arrived when both warpgroups met in a block. sums: of reads by difference, of each warp that
    sums."""

    q: cute.Tensor  # (tile_m, tile_d, stages_q)
    do: cute.Tensor  # (tile_m, tile_dv, stages_do)
    k: cute.Tensor  # (64, tile_d, key groups * stages_kv)
    v: cute.Tensor  # (64, tile_dv, key groups * stages_kv)
    ds: cute.Tensor  # (64 queries, 64 keys, row groups * key groups * stages)
    p: cute.Tensor | None  # (64 keys, 64 queries, 1)
    peer_k: cute.Tensor | None  # (64, cols_dq, 1)
    peer_ds: cute.Tensor | None  # (64 queries, 64 keys, 1)
    dq: cute.Tensor  # (values of a part,)
    stats: cute.Tensor  # (stats_words, stages_q)
    words: cute.Tensor  # (query_words, stages_q)
    bits: cute.Tensor  # (4 words, tile_n)
    any_bits: cute.Tensor  # (tile_n / 32,)
    ready: cute.Tensor  # (2,)
    sums: cute.Tensor | None  # (sums_words,)


@dataclass(frozen=True)
class BwdTraits(QueryBlockTraits):
    """Shape of one CTA's work (see the top of `flash_bwd`): tile_n keys, and a walk over blocks of
    tile_m queries.

    stages_kv 2: the next work tile's keys and values arrive while this one computes. value_cols:
    columns of its values that a warpgroup keeps in registers, if nothing modifies the scores; the
    products of dO with these read half as much shared memory. cta_pair: two CTAs with neighbouring
    keys sum dQ together, half of the columns each. P then takes the way of dS, which has only one
    place, so nothing may modify scores. splits_keys: each warpgroup has keys of its own in heads
    wider than 128. Then registers are left for S and dP of half of a block, and nothing may modify
    scores. shares_tile: narrower heads share keys, too.

    has_marks: rows of queries that see nothing may be marked to be cleared. has_reference: the
    statistics of a query have a third number, for scores of any magnitude. sums_of_warp,
    sums_of_mask_warp: words of an MMA warp, and of a mask warp, for sums of gradients of aux
    tensors by difference. own_warpgroup: the MMA warpgroup that these traits are for, where the two
    have code of their own (`GradientColumns`). packed_heads: above 1, a block has all heads of a
    few listed queries (`flash_bwd_tokens`). group_size: how many of a query's rows are heads, the
    first ones; 0: all. lists_per_warpgroup: block lists say of each warpgroup's keys what they see
    (`BackwardMask.own_keys`).
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    stages_q: int = 2
    stages_do: int = 2
    stages_kv: int = 1
    value_cols: int = 0
    cta_pair: bool = False
    splits_keys: bool = False
    has_marks: bool = False
    has_reference: bool = False
    sums_of_warp: int = 0
    sums_of_mask_warp: int = 0
    own_warpgroup: int | None = None
    packed_heads: int = 1
    group_size: int = 0
    shares_tile: bool = False
    lists_per_warpgroup: bool = False

    def __post_init__(self) -> None:
        if self.group_size == 0:
            object.__setattr__(self, "group_size", self.packed_heads)

    @property
    def shares_keys(self) -> bool:
        """Whether both warpgroups have the same keys, and share the columns of dK and dV."""
        is_wide = max(self.head_dim, self.head_dim_v) > MAX_OWN_DIM and not self.splits_keys
        return self.shares_tile or is_wide

    @property
    def key_groups(self) -> int:
        """Groups of 64 keys in a work tile."""
        return 1 if self.shares_keys else NUM_MMA_WARPGROUPS

    @property
    def column_groups(self) -> int:
        """Number of groups into which the MMA warpgroups divide the columns of dK and dV."""
        return NUM_MMA_WARPGROUPS // self.key_groups

    @property
    def tile_n(self) -> int:
        return self.key_groups * ROWS_PER_WARPGROUP

    @property
    def num_ctas(self) -> int:
        """CTAs that process a work tile together."""
        return CTAS if self.cta_pair else 1

    @property
    def cluster_tile_n(self) -> int:
        """Keys that share one walk over the queries."""
        return self.tile_n * self.num_ctas

    @property
    def ds_stages(self) -> int:
        """With two, a warpgroup writes dS of a block while the other may still sum the last."""
        return 1 if self.cta_pair or self.splits_keys else 2

    @property
    def tile_d(self) -> int:
        if self.cta_pair:
            return next(cols for cols in PAIR_WIDTHS if cols >= self.head_dim)
        if self.by_query_lists and alternating_sums(shared_width(self.head_dim), 1):
            return MAX_OWN_DIM
        if self.num_row_groups > 1:
            return tile_columns(self.head_dim)
        if not self.shares_keys and alternating_sums(STEP_COLS * self.steps_d, self.num_ctas):
            return STEP_COLS * self.steps_d
        return shared_width(self.head_dim)

    @property
    def tile_dv(self) -> int:
        if self.shares_tile and alternating_sums(shared_width(self.head_dim_v), 1):
            return MAX_OWN_DIM
        if self.head_dim_v > MAX_OWN_DIM or self.shares_keys:
            return shared_width(self.head_dim_v)
        return tile_columns(self.head_dim_v)

    @property
    def steps_d(self) -> int:
        """Steps of 16 columns of S; the columns behind are zeros."""
        return -(-self.head_dim // STEP_COLS)

    @property
    def steps_dv(self) -> int:
        """Steps of 16 columns of dP."""
        return -(-self.head_dim_v // STEP_COLS)

    @property
    def num_row_groups(self) -> int:
        """Groups of 64 query rows in a block."""
        return self.tile_m // ROWS_PER_WARPGROUP

    def num_score_parts(self, num_aux_grads: int) -> int:
        """Parts of the columns of S and dP, processed in turn: registers would not hold all columns
        for gradients of aux tensors, which need S and dP of a score at once
        (docs/facts/compiler.md#gradients-of-aux-tensors-need-s-and-dp-of-each-score-at-once)."""
        if self.splits_keys:
            return NUM_HALVES
        return 1 if num_aux_grads == 0 else 2 if num_aux_grads == 1 else 4

    @property
    def columns(self) -> GradientColumns:
        tile = self.tile_m, self.tile_d, self.tile_dv
        more: tuple[Any, ...] = (self.own_warpgroup,)
        if self.splits_keys:
            more = (None, True, STEP_COLS * self.steps_d, STEP_COLS * self.steps_dv)
        return GradientColumns(*tile, self.num_ctas, self.shares_keys, *more)

    def for_warpgroup(self, warpgroup: int) -> "BwdTraits":
        return replace(self, own_warpgroup=warpgroup)

    def warpgroup_idx(self) -> Int32 | int:
        """`mma_warpgroup_idx`, a constant where the warpgroups have code of their own."""
        return mma_warpgroup_idx() if self.own_warpgroup is None else self.own_warpgroup

    @property
    def releases_do_after_dq(self) -> bool:
        """Whether dO of a block is released only when its dQ is complete, and Q after that."""
        return len(self.columns.parts_dq) == 1 and not (self.cta_pair or self.splits_keys)

    @property
    def num_mma_warps(self) -> int:
        return WARPS_PER_WARPGROUP * NUM_MMA_WARPGROUPS

    @property
    def num_mask_warps(self) -> int:
        return Role.MMA - Role.MASK

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + NUM_MMA_WARPGROUPS)

    @property
    def mma_registers(self) -> int:
        takes_most = self.value_cols > 0 or self.splits_keys
        in_reach = MMA_REGISTERS if takes_most else MMA_REGISTERS[:-1]
        return next((n for n in in_reach if n >= self.needed_registers), in_reach[-1])

    @property
    def needed_registers(self) -> int:
        more = max(self.value_cols // COLS_PER_REGISTER, SPARE_REGISTERS)
        return self.fragment_registers + SCALAR_REGISTERS + more

    @property
    def helper_registers(self) -> int:
        """Registers of warpgroup 0."""
        taken = self.mma_registers * NUM_MMA_WARPGROUPS
        return registers_left(1 + NUM_MMA_WARPGROUPS, taken)

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread for dK and dV, and for S and dP or what follows them."""
        if self.columns.is_uneven and self.own_warpgroup is None:
            of_each = (self.for_warpgroup(i) for i in range(NUM_MMA_WARPGROUPS))
            return max(traits.fragment_registers for traits in of_each)
        cols = sum(part.width for part in (*self.columns.dk, *self.columns.dv))
        in_flight = self.tile_m
        if self.splits_keys:
            # S of a half beside P and dS of the other one in 16 bits, and its dP
            in_flight = self.tile_m * 3 // 4
        if self.columns.alternating:
            # all of dQ beside P and dS in 16 bits takes more than S and dP
            in_flight = max(in_flight, (self.tile_m + self.tile_d) // 2)
        return cols // 2 + in_flight

    @property
    def value_steps(self) -> int:
        """Steps of 16 columns of the values that lie in registers."""
        return min(self.value_cols // STEP_COLS, self.steps_dv)

    @property
    def bytes_q(self) -> int:
        return self.tile_m * self.tile_d * 2

    @property
    def bytes_do(self) -> int:
        return self.tile_m * self.tile_dv * 2

    @property
    def bytes_k(self) -> int:
        return self.tile_n * self.tile_d * 2

    @property
    def bytes_v(self) -> int:
        return self.tile_n * self.tile_dv * 2

    @property
    def bytes_ds(self) -> int:
        return self.tile_m * self.tile_n * 2

    @property
    def has_p(self) -> bool:
        """Whether P of warpgroups that share keys has a place of its own."""
        return self.shares_keys and not self.cta_pair

    @property
    def bytes_peer_k(self) -> int:
        """Bytes of the peer's keys, in the columns that this CTA sums."""
        return ROWS_PER_WARPGROUP * self.columns.cols_dq * 2 if self.cta_pair else 0

    @property
    def bytes_with_q(self) -> int:
        """Bytes that come with the Q of a work tile's first block, and with its dO."""
        return self.bytes_k + self.bytes_peer_k

    bytes_with_do = bytes_v

    @property
    def bytes_dq(self) -> int:
        """fp32 sums of a part of dQ on their way out."""
        return max(self.columns.sizes_dq) * 4

    @property
    def bytes_bits(self) -> int:
        return self.tile_n * COLUMNS.num_words * 4

    @property
    def sums_words(self) -> int:
        """fp32 sums by difference, of all MMA warps and then of all mask warps."""
        of_masks = self.sums_of_mask_warp * self.num_mask_warps
        return self.sums_of_warp * self.num_mma_warps + of_masks

    @property
    def smem_bytes(self) -> int:
        return (
            # marks are among the small things
            self.stages_q * (self.bytes_q + max(2 * self.tile_m * 4, self.bytes_of_listed))
            + self.stages_do * self.bytes_do
            # with P, or the peer's dS
            + (self.ds_stages + self.has_p + self.cta_pair) * self.bytes_ds
            + self.bytes_peer_k
            + self.stages_kv * (self.bytes_k + self.bytes_v)
            + self.bytes_dq
            + self.bytes_bits
            + self.bytes_tokens
            + self.sums_words * 4
            + SMEM_BOOKKEEPING
        )

    infeasible = why_infeasible

    def mma_scores(self, num_parts: int = 1) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T: 64 keys by tile_m queries, or by a part of these."""
        return make_mma(self.dtype, self.tile_m // num_parts)

    def mma_values(self) -> cute.TiledMma:
        """dP^T = V dO^T of the values that lie in registers."""
        return make_mma(self.dtype, self.tile_m, source=REGISTERS)

    def mma_words(self, n: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: 64 keys by n columns, the scores in registers."""
        return make_mma(self.dtype, n, b_major=MN, source=REGISTERS)

    def mma_dq(self, n: int) -> cute.TiledMma:
        """dQ = dS K: 64 queries by n columns."""
        return make_mma(self.dtype, n, b_major=MN)

    def layout_q(self) -> cute.ComposedLayout:
        return rows_layout(self.dtype, self.tile_m, self.tile_d, self.stages_q)

    def layout_do(self) -> cute.ComposedLayout:
        return rows_layout(self.dtype, self.tile_m, self.tile_dv, self.stages_do)

    def layout_k(self) -> cute.ComposedLayout:
        """(64, tile_d, key group * stages)."""
        count = self.key_groups * self.stages_kv
        # each half of the columns begins with a swizzled block
        half = self.tile_d // 2 if self.columns.in_halves else None
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.tile_d, count, half)

    def layout_v(self) -> cute.ComposedLayout:
        return rows_layout(
            self.dtype, ROWS_PER_WARPGROUP, self.tile_dv, self.key_groups * self.stages_kv
        )

    def boxes(self) -> tuple[tuple[cute.ComposedLayout, int, int], ...]:
        """See `QueryShape`."""
        rows = ROWS_PER_WARPGROUP
        peer_layouts = (
            ((self.layout_peer_k(), rows, self.columns.cols_dq),) if self.cta_pair else ()
        )
        return (
            (self.layout_q(), self.tile_m, self.tile_d),
            (self.layout_do(), self.tile_m, self.tile_dv),
            (self.layout_k(), rows, self.tile_d),
            (self.layout_v(), rows, self.tile_dv),
            *peer_layouts,
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """(64 queries, 64 keys, row group * key group * stages), keys contiguous."""
        count = self.num_row_groups * self.key_groups * self.ds_stages
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP, count)

    def ds_stage(self, block: Int32) -> Int32:
        return block % self.ds_stages

    def ds_unit(self, stage: Int32, key_group: Int32, row_group: Int32 | int) -> Int32:
        """Last coordinate in `layout_ds`."""
        return (stage * self.key_groups + key_group) * self.num_row_groups + row_group

    def layout_peer_k(self) -> cute.ComposedLayout:
        """(64, cols_dq, 1)."""
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, self.columns.cols_dq, 1)

    def layout_block(self) -> cute.ComposedLayout:
        """(64, 64, 1): queries by keys of the peer's dS, or keys by queries of P."""
        return rows_layout(self.dtype, ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP, 1)

    @property
    def staging_warps(self) -> int:
        """Warps that stage sums of dQ: one warpgroup's if the other has its own columns."""
        is_shared = self.own_warpgroup is None and not self.columns.alternating
        return self.num_mma_warps if is_shared else WARPS_PER_WARPGROUP

    def sums_dq(self, block: Int32) -> Boolean:
        """Whether it is this MMA warpgroup's turn to sum dQ of a query block."""
        return (block + mma_warpgroup_idx()) % NUM_MMA_WARPGROUPS == 0

    def keys_unit(self, tile: Int32, key_group: Int32 | int) -> Int32:
        """Last coordinate in `layout_k` and `layout_v`, of keys of a work tile."""
        return Cursor(tile, self.stages_kv).index * self.key_groups + key_group

    def own_keys(self, tile: Int32) -> Int32:
        """`keys_unit` of this MMA warpgroup's keys."""
        return self.keys_unit(tile, self.key_group())

    def first_key(self) -> Int32:
        """The first key of this MMA warpgroup, in the work tile."""
        return self.key_group() * ROWS_PER_WARPGROUP

    def key_group(self) -> Int32:
        return Int32(0) if self.shares_keys else mma_warpgroup_idx()

    def column_group(self) -> Int32 | int:
        """The index of this MMA warpgroup's columns of dK and dV."""
        return self.warpgroup_idx() if self.shares_keys else Int32(0)

    def storage(self) -> cute.struct:
        dtype = self.dtype

        @cute.struct
        class Storage:
            q: elements(dtype, self.layout_q())
            do: elements(dtype, self.layout_do())
            k: elements(dtype, self.layout_k())
            v: elements(dtype, self.layout_v())
            ds: elements(dtype, self.layout_ds())
            p: elements(dtype, self.layout_block(), self.has_p)
            peer_k: elements(dtype, self.layout_peer_k(), self.cta_pair)
            peer_ds: elements(dtype, self.layout_block(), self.cta_pair)
            dq: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, self.bytes_dq // 4], 1024]
            stats: floats(self.stats_words * self.stages_q)
            bits: words(COLUMNS.num_words * self.tile_n)
            any_bits: words(self.tile_n // WORD)
            ready: cute.struct.MemRange[Int32, 2]
            words: words(self.query_words * self.stages_q)
            ring: words(WORDS * RING_STAGES)
            walk: words(WORDS * WALK_STAGES)
            # in a fixed order, which pairs do not have
            predecessors: cute.struct.MemRange[Int32, 0 if self.cta_pair else CHUNK * WALK_STAGES]
            q_barriers: barriers(self.stages_q)
            do_barriers: barriers(self.stages_do)
            dq_barriers: barriers(1)
            ds_barriers: barriers(int(self.splits_keys))
            summed_barriers: barriers(self.ds_stages if self.sums_of_mask_warp > 0 else 0)
            bits_barriers: barriers(1)
            ring_barriers: barriers(RING_STAGES)
            walk_barriers: barriers(WALK_STAGES)
            grads_barriers: barriers(int(self.cta_pair))
            claims_barriers: barriers(int(self.cta_pair))
            claim: cute.struct.MemRange[Int32, int(self.cta_pair)]
            tokens: cute.struct.MemRange[Int32, self.bytes_tokens // 4]
            sums: cute.struct.MemRange[cutlass.Float32, self.sums_words]

        return Storage

    def tiles(self, storage: Any) -> BwdSmem:
        tensor, summed = partial(swizzled, dtype=self.dtype), self.sums_words > 0
        return BwdSmem(
            q=tensor(storage.q, self.layout_q()),
            do=tensor(storage.do, self.layout_do()),
            k=tensor(storage.k, self.layout_k()),
            v=tensor(storage.v, self.layout_v()),
            ds=tensor(storage.ds, self.layout_ds()),
            p=tensor(storage.p, self.layout_block()) if self.has_p else None,
            peer_k=tensor(storage.peer_k, self.layout_peer_k()) if self.cta_pair else None,
            peer_ds=tensor(storage.peer_ds, self.layout_block()) if self.cta_pair else None,
            dq=storage.dq.get_tensor(cute.make_layout(self.bytes_dq // 4)),
            stats=storage.stats.get_tensor(cute.make_layout((self.stats_words, self.stages_q))),
            words=storage.words.get_tensor(cute.make_layout((self.query_words, self.stages_q))),
            bits=storage.bits.get_tensor(cute.make_layout((COLUMNS.num_words, self.tile_n))),
            any_bits=storage.any_bits.get_tensor(cute.make_layout(self.tile_n // WORD)),
            ready=storage.ready.get_tensor(cute.make_layout(2)),
            sums=storage.sums.get_tensor(cute.make_layout(self.sums_words)) if summed else None,
        )

    def channels(
        self, storage: Any, predecessors: cute.Tensor | None, lengths: Lengths
    ) -> Channels:
        """Made by all threads; a barrier must follow. predecessors: see `WalkRing`."""
        mma_warps = self.num_mma_warps
        loads = 1  # the load warp, with the bytes that TMA brings
        # of two warpgroups with the same keys one computes S
        bit_readers = mma_warps * self.key_groups // NUM_MMA_WARPGROUPS
        work_fields, tokens = lengths.work_fields, None
        if self.by_query_lists:
            work_fields = (*work_fields, *SPLIT_FIELDS)
            shape = (self.tokens_per_block, CHUNK, WALK_STAGES)
            tokens = storage.tokens.get_tensor(cute.make_layout(shape))
        own_fields = OWN_FIELDS[: self.key_groups] if self.lists_per_warpgroup else ()
        num_walkers = 1 + self.num_mask_warps
        num_summing = mma_warps // NUM_MMA_WARPGROUPS if self.columns.alternating else mma_warps
        ring, walk = scheduler_rings(
            storage, (num_walkers, mma_warps), ascending=True, uncut_first=False,
            predecessors=predecessors, fields=work_fields,
            chunk_fields=(*lengths.chunk_fields, *own_fields), tokens=tokens,
        )  # fmt: skip

        of_sums = storage.summed_barriers, self.ds_stages, mma_warps, self.num_mask_warps

        def channel(barriers: Any, stages: int, producers: int, consumers: int) -> Channel:
            return Channel.create(barriers.data_ptr(), stages, producers, consumers)

        channels = Channels(
            q=channel(storage.q_barriers, self.stages_q, loads, mma_warps),
            do=channel(storage.do_barriers, self.stages_do, loads, mma_warps),
            dq=channel(storage.dq_barriers, 1, num_summing, loads),
            bits=channel(storage.bits_barriers, 1, self.num_mask_warps, bit_readers),
            # only its place is waited for: `Barrier.BOTH` shows that dS has arrived
            ds=channel(storage.ds_barriers, 1, 1, mma_warps) if self.splits_keys else None,
            summed=channel(*of_sums) if self.sums_of_mask_warp > 0 else None,
            ring=ring,
            walk=walk,
        )
        if not self.cta_pair:
            return channels
        exchange = channel(storage.grads_barriers, 1, 1, CTAS * mma_warps)
        of_both = storage.ds.data_ptr(), storage.peer_ds.data_ptr()
        grads = PeerGrads(exchange, *of_both, self.bytes_ds)
        claims = Claims.create(storage.claims_barriers.data_ptr(), storage.claim.data_ptr())
        return channels._replace(grads=grads, claims=claims)
