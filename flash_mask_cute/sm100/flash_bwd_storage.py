"""Shared memory of a CTA of the Blackwell backward, and the channels between its roles."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_mask_cute.core.channel import Channel
from flash_mask_cute.core.clusters import Claims
from flash_mask_cute.core.cta import RING_STAGES, WALK_STAGES, scheduler_rings, swizzled
from flash_mask_cute.core.lengths import Lengths
from flash_mask_cute.core.ring import WORDS
from flash_mask_cute.core.storage import barriers, elements, floats, words
from flash_mask_cute.core.walk_ring import CHUNK, WalkRing
from flash_mask_cute.core.work_ring import WorkRing
from flash_mask_cute.sm100.flash_bwd_registers import HALVES
from flash_mask_cute.sm100.flash_bwd_traits import (
    COMPUTE_WARPS,
    NUM_MASK_WARPS,
    REDUCE_WARPS,
    BwdTraits,
)


class Channels(NamedTuple):
    """The channels between the roles of a CTA (see `flash_bwd`).

    stats: q, but for pairs. *_there: of what is there in the CTA that does not issue products.
    do_columns, scores: of a folded pair, the latter P and dS of its own keys in shared memory. Of a
    wide pair: taken, released when S is in registers; first_p, when P of the first chunks is there;
    dq_left, when all of dQ is in registers; dv, full when dV of a block is complete.
    """

    q: Channel
    stats: Channel
    do: Channel
    kv: Channel | None
    s: Channel
    dp: Channel | None
    dq: Channel | None
    sums: Channel
    out: Channel | None
    bits: Channel
    ring: WorkRing
    walk: WalkRing
    q_columns: Channel | None = None
    ds: Channel | None = None
    q_there: Channel | None = None
    do_there: Channel | None = None
    q_columns_there: Channel | None = None
    ds_there: Channel | None = None
    do_columns: Channel | None = None
    scores: Channel | None = None
    do_columns_there: Channel | None = None
    scores_there: Channel | None = None
    taken: Channel | None = None
    first_p: Channel | None = None
    dq_left: Channel | None = None
    dv: Channel | None = None
    claims: Claims | None = None


@cute.jit
def visit_walks(channels: Channels, step: cutlass.Constexpr[Callable[..., Int32]]) -> Int32:
    """Fold `number = step(work, first, number, block)` over the query blocks of every work tile;
    returns how many there were. first: the number of the tile's first block."""
    tile, chunk, number = Int32(0), Int32(0), Int32(0)
    while channels.ring.wait(tile):
        of_tile = partial(step, channels.ring.read(tile), number)
        chunk, number = channels.walk.visit(chunk, number, of_tile)
        channels.ring.release(tile)
        tile += 1
    return number


class BwdSmem(NamedTuple):
    """stored: dK and dV before their store, in the place of ds. dq: fp32 sums of a part. bits: of a
    partial block."""

    q: cute.Tensor  # (tile_m, tile_d, stages_q)
    do: cute.Tensor  # (tile_m, tile_dv, stages_do)
    k: cute.Tensor  # (128, tile_d, 1)
    v: cute.Tensor | None  # (128, tile_dv, 1)
    ds: cute.Tensor  # (tile_m queries, 128 keys, 1); of a pair: see `BwdTraits.layout_ds`
    stored: cute.Tensor  # (32 keys, 32 columns, places of warps)
    dq: cute.Tensor | None  # (values of a part,)
    stats: cute.Tensor  # (stats_words, stages_q)
    bits: cute.Tensor  # (words, tile_n)
    words: None = None
    # of a pair: half of the columns of all queries of a block, and of the keys of both CTAs
    q_columns: cute.Tensor | None = None  # (128, 64 or 96, 1)
    do_columns: cute.Tensor | None = None  # (128, 64, 1)
    k_columns: cute.Tensor | None = None  # see `BwdTraits.layout_key_columns`
    p: cute.Pointer | None = None  # of a folded pair


def storage_of(traits: BwdTraits, is_ordered: bool) -> cute.struct:
    """is_ordered: dQ is summed in a fixed order."""
    dtype = traits.dtype
    # of a folded pair by rows and by columns in turn
    has_columns = traits.cta_pair and not traits.is_folded
    has_claims = traits.cta_pair and is_ordered

    @cute.struct
    class Storage:
        if traits.is_wide_pair:
            # dS lies over these, in this order
            do: elements(dtype, traits.layout_do())
            do_columns: elements(dtype, traits.layout_value_columns())
        q: elements(dtype, traits.layout_q())
        do: elements(dtype, traits.layout_do())
        k: elements(dtype, traits.layout_k())
        v: elements(dtype, traits.layout_v(), traits.makes_dk)
        q_columns: elements(dtype, traits.layout_columns(), has_columns)
        do_columns: elements(dtype, traits.layout_value_columns(), has_columns)
        k_columns: elements(dtype, traits.layout_key_columns(), traits.cta_pair)
        ds: elements(dtype, traits.layout_ds(), not traits.is_wide_pair)
        p: elements(dtype, cute.make_layout(traits.tile_n * traits.tile_m), traits.is_folded)
        dq: floats(traits.bytes_dq // 4)
        stats: floats(traits.stats_words * traits.stages_q)
        bits: words(traits.columns.num_words * traits.tile_n)
        ring: words(WORDS * RING_STAGES)
        walk: words(WORDS * WALK_STAGES)
        predecessors: words(CHUNK * WALK_STAGES)
        q_barriers: barriers(traits.stages_q)
        do_barriers: barriers(traits.stages_do)
        s_barriers: barriers(1)
        dp_barriers: barriers(1)
        dq_barriers: barriers(1)
        sums_barriers: barriers(1)
        out_barriers: barriers(1)
        bits_barriers: barriers(1)
        ring_barriers: barriers(RING_STAGES)
        walk_barriers: barriers(WALK_STAGES)
        kv_barriers: barriers(1)
        stats_barriers: barriers(traits.stages_q)
        q_columns_barriers: barriers(1)
        ds_barriers: barriers(1)
        there_barriers: barriers(4)
        alternating_barriers: barriers(4 * traits.is_wide_pair)
        folded_barriers: barriers(4 * traits.is_folded)
        claims_barriers: barriers(int(has_claims))
        claimed: cute.struct.MemRange[cutlass.Int32, int(has_claims)]
        tmem: cutlass.Int32

    return Storage


def channels_of(
    traits: BwdTraits, storage: Any, predecessors: cute.Tensor | None, lengths: Lengths
) -> Channels:
    """The channels of a CTA, initialised by its first warp; predecessors: see `WalkRing`."""
    group = traits.group
    # load and mma, and those of many warps; with dQ also send and reduce
    num_walkers = 2 + COMPUTE_WARPS + NUM_MASK_WARPS + traits.makes_dk * (1 + REDUCE_WARPS)
    ring, walk = scheduler_rings(
        storage,
        (num_walkers, 0),
        ascending=True,
        uncut_first=False,
        predecessors=predecessors,
        fields=lengths.work_fields,
        chunk_fields=lengths.chunk_fields,
    )

    def channel(barriers: Any, producers: int, consumers: int, stages: int = 1) -> Channel:
        return Channel.create(barriers.data_ptr(), stages, producers, consumers)

    def multiplied(barriers: Any, consumers: int) -> Channel:
        count = consumers * group.size
        return Channel.create(barriers.data_ptr(), 1, 1, count, group.home)

    dp = dq = out = None
    if traits.makes_dk:
        dp = multiplied(storage.dp_barriers, COMPUTE_WARPS)
        dq = multiplied(storage.dq_barriers, REDUCE_WARPS)
        out = channel(storage.out_barriers, REDUCE_WARPS, 1)
    of_pair: dict[str, Channel] = {}
    more: dict[str, Claims] = {}
    if traits.cta_pair:
        q = channel(storage.q_barriers, 1, 1)
        # who clears marked rows reads them, too
        readers = COMPUTE_WARPS + traits.has_marks
        stats = channel(storage.stats_barriers, 1, readers, traits.stages_q)
        of_pair["q_columns"] = channel(storage.q_columns_barriers, 1, 1)
        # the warps of one half, and the bytes of the other CTA's
        of_pair["ds"] = channel(storage.ds_barriers, COMPUTE_WARPS // HALVES, 1)
        if predecessors is not None:
            places = storage.claims_barriers, storage.claimed
            more["claims"] = Claims.create(*(x.data_ptr() for x in places))
        first = storage.there_barriers.data_ptr()
        for i, name in enumerate(("q_there", "do_there", "q_columns_there", "ds_there")):
            of_pair[name] = Channel.create(first + 2 * i, 1, 1, 1, group.home)
        if traits.is_folded:
            first = storage.folded_barriers.data_ptr()
            of_pair["do_columns"] = Channel.create(first, 1, 1, 1)
            of_pair["scores"] = Channel.create(first + 2, 1, COMPUTE_WARPS, 1)
            for i, name in enumerate(("do_columns_there", "scores_there")):
                of_pair[name] = Channel.create(first + 4 + 2 * i, 1, 1, 1, group.home)
        if traits.is_wide_pair:
            first = storage.alternating_barriers.data_ptr()
            for i, name in enumerate(("taken", "first_p", "dq_left", "dv")):
                warps = REDUCE_WARPS if name == "dq_left" else COMPUTE_WARPS
                readers = warps * group.size
                of_pair[name] = Channel.create(first + 2 * i, 1, 1, readers, group.home)
    else:
        # products, and who reads the statistics
        q = stats = channel(storage.q_barriers, 1, 1 + COMPUTE_WARPS, traits.stages_q)
    return Channels(
        q=q,
        stats=stats,
        do=channel(storage.do_barriers, 1, 1, traits.stages_do),
        kv=channel(storage.kv_barriers, COMPUTE_WARPS, 1) if traits.holds_keys else None,
        s=multiplied(storage.s_barriers, COMPUTE_WARPS),
        dp=dp,
        dq=dq,
        sums=multiplied(storage.sums_barriers, COMPUTE_WARPS),
        out=out,
        bits=channel(storage.bits_barriers, NUM_MASK_WARPS, COMPUTE_WARPS),
        ring=ring,
        walk=walk,
        **of_pair,
        **more,
    )


def memory_ds(traits: BwdTraits, storage: Any) -> Any:
    """Of a wide pair, dS begins in the place of dO."""
    return storage.do if traits.is_wide_pair else storage.ds


def tiles_of(traits: BwdTraits, storage: Any) -> BwdSmem:
    tensor = partial(swizzled, dtype=traits.dtype)
    dq = None
    if traits.makes_dk:
        dq = storage.dq.get_tensor(cute.make_layout(traits.bytes_dq // 4))
    of_pair = {}
    by_columns = storage.q_columns, storage.do_columns
    if traits.is_folded:
        by_columns = storage.q, storage.do
        of_pair["p"] = storage.p.data_ptr()
    if traits.cta_pair:
        of_pair |= {
            "q_columns": tensor(by_columns[0], traits.layout_columns()),
            "do_columns": tensor(by_columns[1], traits.layout_value_columns()),
            "k_columns": tensor(storage.k_columns, traits.layout_key_columns()),
        }
    return BwdSmem(
        q=tensor(storage.q, traits.layout_q()),
        do=tensor(storage.do, traits.layout_do()),
        k=tensor(storage.k, traits.layout_k()),
        v=tensor(storage.v, traits.layout_v()) if traits.makes_dk else None,
        ds=tensor(memory_ds(traits, storage), traits.layout_ds()),
        stored=tensor(memory_ds(traits, storage), traits.layout_stored()),
        dq=dq,
        stats=storage.stats.get_tensor(cute.make_layout((traits.stats_words, traits.stages_q))),
        bits=storage.bits.get_tensor(cute.make_layout((traits.columns.num_words, traits.tile_n))),
        **of_pair,
    )
