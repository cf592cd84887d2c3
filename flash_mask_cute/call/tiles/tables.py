"""Tile shapes by head dimension and mask, as data. The first row whose conditions hold is used.

The rows of Hopper for head dimensions 64, 128 and 256 were measured on an H200
(docs/facts/hopper_forward.md), the others follow from what fits. Nothing on Blackwell was measured.
"""

from __future__ import annotations

from flash_mask_cute.call.problem import TuningClass
from flash_mask_cute.call.tiles.rows import BwdRow, FwdRow

SM90_FWD = (
    FwdRow(
        *(64, 64, 64, 64, 6, 2, False),
        "one tile covers all queries and keys, with little padding",
        masks=(TuningClass.FULL, TuningClass.CAUSAL, TuningClass.SCORE_MOD),
        max_seqlen_q=64,
        max_seqlen_k=64,
    ),
    FwdRow(
        *(64, 64, 64, 64, 8, 2, False),
        "decoding is limited by memory: one warpgroup, which loads only the selected keys",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 64, 64, 5, 2, True),
        "decoding is limited by memory: one warpgroup, which loads only the selected keys",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(64, 64, 64, 128, 6, 2, False),
        "decoding is limited by memory: one warpgroup, with as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 64, 128, 3, 2, True),
        "decoding is limited by memory: many keys in flight, and early loads of the next tile",
        for_decode=True,
    ),
    FwdRow(
        *(192, 128, 64, 112, 2, 1, False),
        "decoding is limited by memory: as many keys in flight as fit beside an output buffer",
        for_decode=True,
    ),
    FwdRow(
        *(192, 192, 64, 96, 2, 1, True),
        "decoding is limited by memory: as many keys in flight as fit, and a third buffer for K",
        for_decode=True,
    ),
    FwdRow(
        *(256, 256, 64, 64, 3, 1, True),
        "decoding is limited by memory: as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 128, 64, 3, 2, False),
        "a key tile lies in one selected block, and tiles of few queries select few blocks",
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "a tile of few queries selects few different blocks",
        max_selected=4096,
    ),
    FwdRow(
        *(192, 192, 128, 64, 2, 1, True),
        "a selected block has whole key tiles; the output reuses the query's memory",
        max_selected=4096,
    ),
    FwdRow(
        *(64, 64, 192, 64, 6, 2, False),
        "three warpgroups share loaded keys, and each skips blocks that its lists omit",
        min_seqlen_q=129,
        lists_per_warpgroup=True,
    ),
    FwdRow(
        *(128, 128, 192, 64, 5, 1, True),
        "three warpgroups share loaded keys, and each skips blocks that its lists omit",
        min_seqlen_q=129,
        lists_per_warpgroup=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "the usual sizes of blocks in block lists are multiples of these tiles",
        native_block_lists=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "two warpgroups leave registers for a third one that evaluates mask_mod",
        masks=(TuningClass.MASK_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "a narrow window wastes less of a small tile, and its few keys must be loaded early",
        max_window=1024,
    ),
    FwdRow(
        *(32, 32, 128, 128, 3, 2, False),
        "cached bias rows stay in shared memory, and two warpgroups load a block of them",
        masks=(TuningClass.SCORE_MOD,),
        caches_bias=True,
    ),
    FwdRow(
        *(64, 64, 128, 96, 2, 2, False),
        "cached bias rows stay in shared memory, with room for two blocks of fp32 rows",
        masks=(TuningClass.SCORE_MOD,),
        caches_bias=True,
    ),
    FwdRow(
        *(64, 64, 192, 80, 4, 2, False),
        "two key blocks with less padding; leaves registers for the score_mod",
        masks=(TuningClass.SCORE_MOD,),
        min_seqlen_k=129,
        max_seqlen_k=160,
    ),
    FwdRow(
        *(64, 64, 192, 96, 4, 2, False),
        "three warpgroups overlap their work; leaves registers for the score_mod",
        masks=(TuningClass.SCORE_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "short sequences fill small tiles better, and compute less above the diagonal",
        masks=(TuningClass.CAUSAL,),
        max_seqlen_q=1024,
    ),
    FwdRow(
        *(64, 64, 192, 128, 3, 2, False),
        "three warpgroups overlap products and exponentials",
        gain=1.2,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "smaller tiles leave fewer SMs idle in the last wave",
    ),
    FwdRow(
        *(80, 80, 192, 96, 2, 2, False),
        "three warpgroups overlap products and exponentials; the next queries load early",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        above_dim=72,
        gain=1.15,
    ),
    FwdRow(
        *(96, 96, 192, 80, 3, 2, False),
        "rows of this size load slowly; in a larger tile each key serves more queries",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        splits_sectors=True,
    ),
    FwdRow(
        *(96, 96, 192, 112, 3, 1, False),
        "three warpgroups overlap products and exponentials",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(96, 96, 128, 128, 3, 2, False, "two warpgroups take turns; the next queries load early"),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups overlap products and exponentials; each key serves more queries",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "rows of this size load slowly; in a larger tile each key serves more queries",
        masks=(TuningClass.CAUSAL,),
        splits_sectors=True,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "each key serves more queries; with many keys, little is wasted along the diagonal",
        masks=(TuningClass.CAUSAL, TuningClass.SCORE_MOD),
        min_seqlen_k=32768,
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups overlap products and the functions of a soft cap",
        min_seqlen_k=8192,
        needs_sfu=True,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "square tiles waste least along the edge of a mask; the next queries load early",
    ),
    FwdRow(192, 128, 128, 112, 2, 1, False, "the largest key block beside an output buffer"),
    FwdRow(192, 192, 128, 96, 2, 1, True, "the output reuses the query's shared memory"),
    FwdRow(
        *(256, 256, 128, 64, 2, 1, True),
        "registers hold scores and probabilities at once; a third buffer for K",
    ),
    *(
        row
        for d, decode_stages, stages in ((320, 3, 2), (384, 2, 1), (512, 1, 1))
        for row in (
            FwdRow(
                *(d, d, 64, 64, decode_stages, 1, True),
                "decoding is limited by memory: as many keys as fit; two CTAs share values",
                for_decode=True,
            ),
            FwdRow(
                *(d, d, 128, 128, 1, 1, True),
                "two CTAs score half of the keys each, and exchange probabilities",
                needs_rows=True,
            ),
            FwdRow(
                *(d, d, 128, 64, stages, 1, True),
                "two CTAs share values, and each computes all scores; as many keys as fit",
            ),
        )
    ),
)

# Of statistics, which load no values. None was measured.
SM90_STATISTICS = (
    FwdRow(
        *(128, 128, 64, 128, 4, 1, True),
        "few rows wait for memory: one warpgroup, with several key blocks in flight",
        for_decode=True,
    ),
    *(
        row
        for d, stages in ((64, 8), (96, 6), (128, 5))
        for small in (FwdRow(*(d, d, 128, 128, 5, 1, True), "leaves registers for callables"),)
        for row in (
            small._replace(masks=(TuningClass.SCORE_MOD, TuningClass.MASK_MOD)),
            small._replace(reason="few queries, of several heads", max_seqlen_q=128),
            FwdRow(*(d, d, 192, 128, stages, 1, True), "each key serves more queries"),
        )
    ),
    FwdRow(*(192, 192, 128, 128, 3, 1, True), "as many keys as fit"),
    FwdRow(*(256, 256, 128, 64, 4, 1, True), "key blocks of half the size, with four in flight"),
)

# On Blackwell a tile is 256 x 128, and of wide heads 128 x 128 (docs/forward_sm100.md says why). A
# pair of CTAs has two work tiles with one walk, which wastes nothing where every query sees the
# same keys and there is more than one tile.
_SM100_FWD = (
    *(
        FwdRow(
            *(d, d_v, 128, 128, stages, 1, False),
            "few query rows share keys: half a tile, and more memory for keys in flight",
            for_decode=True,
        )
        for d, d_v, stages in ((64, 64, 5), (96, 96, 3), (128, 128, 2), (192, 128, 2))
    ),
    FwdRow(*(64, 64, 256, 128, 4, 2, False), "the next queries and keys are loaded early"),
    FwdRow(*(96, 96, 256, 128, 3, 1, False), "three key blocks in flight, not a second query"),
    FwdRow(
        *(128, 128, 256, 128, 2, 2, False),
        "each CTA of a pair loads half of each block, which leaves room for the next queries",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(*(128, 128, 256, 128, 2, 1, False), "as many keys as fit beside an output buffer"),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "each CTA of a pair loads half of each block, so twice as many are in flight",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "a single CTA waits for its one key buffer; a pair has two, and visits more blocks",
        min_seqlen_q=1024,
        cta_pair=True,
    ),
    FwdRow(*(192, 128, 256, 128, 1, 1, False), "one key block and two value blocks fit"),
    *(
        row
        for d, pair_stages in ((192, 3), (256, 2))
        for row in (
            FwdRow(
                *(d, d, 128, 128, pair_stages, 1, False),
                "two CTAs share a tile of 256 query rows, and each loads half of each block",
                min_seqlen_q=129,
                cta_pair=True,
            ),
            FwdRow(*(d, d, 128, 128, 1, 1, False), "one key block fits beside a query"),
        )
    ),
)

# exponentials of 128 by a polynomial on 10.0: as many as FlashAttention-4 has, and more where
# products would wait for the others; on 10.3, where they are computed at twice the rate, none
_POLYNOMIAL = {64: 28, 96: 32}
SM100_FWD = tuple(
    row._replace(polynomial=24 if row.for_decode else _POLYNOMIAL.get(row.max_dim, 24))
    for row in _SM100_FWD
)
SM103_FWD = _SM100_FWD

SM90_TANGENT = (
    FwdRow(*(64, 64, 128, 96, 3, 1, False), "as many keys as registers hold, not measured"),
    FwdRow(*(128, 128, 128, 64, 2, 1, False), "as many keys as fit, not measured"),
)

SM90_BWD = (
    BwdRow(
        *(512, 512, 64, 2, 2, 1, 0),
        "one CTA has S and another dP; each gradient has an owner, which stores it",
        above_dim=256,
    ),
    BwdRow(
        *(64, 64, 64, 2, 2, 1, 64),
        "blocks of a few gathered queries, with all values in registers",
        clears_dq=True,
        query_lists=128,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "blocks of a few gathered queries; leaves registers for the warps that gather them",
        clears_dq=True,
        query_lists=128,
    ),
    *(
        BwdRow(
            *(d, d, 64, 2, stages_do, 1, 0),
            "blocks of a few gathered queries; each warpgroup takes all keys and half the columns",
            clears_dq=True,
            query_lists=64,
        )
        for d, stages_do in ((192, 2), (256, 1))
    ),
    *(
        BwdRow(
            *(d, d, 64, 2, 2, 1, value_cols),
            "blocks for one warpgroup alone are short; dQ starts as zeros, so no CTA waits",
            masks,
            above_dim=64,
            clears_dq=True,
            lists_per_warpgroup=True,
        )
        for d, value_cols, masks in (
            (96, 96, (TuningClass.OTHER,)),
            (128, 64, (TuningClass.OTHER,)),
            (128, 32, None),
        )
    ),
    BwdRow(
        *(64, 64, 64, 2, 2, 1, 64),
        "blocks of 64 queries leave registers for the user's functions, and for the values",
        (TuningClass.SCORE_MOD, TuningClass.MASK_MOD),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 48),
        "registers hold 128 queries and most values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 16),
        "registers hold 128 queries and a few values, and leave enough for the mask warps",
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "all values in registers; dQ starts as zeros, so CTAs with the same queries do not wait",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "with many keys, clearing dQ costs less than waiting for a CTA that stores first",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "registers hold 64 queries and all values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
        above_dim=64,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "dQ starts as zeros: all CTAs begin with the same queries, and would wait to add",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "dQ starts as zeros: waiting for a CTA that stores first took 1.16 times as long",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "registers hold 64 queries and half of the values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "registers hold 64 queries and some values, and leave enough for mask bits",
    ),
    *(
        BwdRow(
            *(d, d_v, 64, 2, stages_do, 1, 0),
            *(reason, masks, min_seqlen_k, max_seqlen_k),
            above_dim=128,
            clears_dq=clears_dq,
            splits_keys=True,
        )
        for d, d_v, stages_do in ((160, 160, 2), (192, 128, 1))
        for reason, masks, min_seqlen_k, max_seqlen_k, clears_dq in (
            (
                "dQ starts as zeros: all CTAs begin with the same queries",
                *((TuningClass.FULL,), 0, 6144, True),
            ),
            (
                "with many keys, clearing dQ costs less than waiting for a CTA that stores first",
                *((TuningClass.CAUSAL,), 32768, None, True),
            ),
            (
                "a CTA with 128 keys adds to dQ and loads Q and dO half as often",
                *(None, 0, None, False),
            ),
        )
    ),
    BwdRow(
        *(192, 192, 64, 2, 2, 1, 0),
        "two CTAs sum dQ together, and add half as much to memory",
        above_dim=128,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(*(192, 192, 64, 2, 2, 1, 0), "each warpgroup sums half of the columns"),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "two CTAs sum dQ together, and add half as much to memory",
        above_dim=192,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "each warpgroup sums half of the columns; a second buffer for Q, not for dO",
    ),
)

# By the model of docs/backward_sm100.md, a pair at 128 columns takes 0.8 of the time of two CTAs
# for as many blocks. It visits a block that either CTA needs: with four key tiles under causal
# masking, or in a window of 512 keys, that is 1.2 times as many.
_SM100_PAIR = BwdRow(
    *(128, 128, 128, 2, 1, 1, 0),
    "two CTAs load half of the queries each, and add half as much of dQ to memory",
    min_seqlen_k=512,
    above_dim=96,
    clears_dq=True,
    cta_pair=True,
    min_window=512,
    without_lists=True,
)
# By the same model, a pair at 192/128 columns keeps them busy for 76 %, and single CTAs for 51 %.
_SM100_WIDE_PAIR = _SM100_PAIR._replace(
    max_dim=192,
    reason="two CTAs have room for blocks of 128 queries, and add half as much of dQ to memory",
    above_dim=128,
)
# The rows of single CTAs have blocks of 64 queries, which no pair has.
_SM100_ASKED_PAIR = _SM100_WIDE_PAIR._replace(
    if_asked=True, min_seqlen_k=0, min_window=0, without_lists=False
)
# Such a pair has the keys of one CTA, so it visits no more blocks.
_SM100_FOLDED_PAIR = BwdRow(
    *(256, 256, 128, 2, 1, 1, 0),
    "with 64 keys in a CTA, all sums fit into one launch",
    above_dim=192,
    clears_dq=True,
    cta_pair=True,
)
# Each row with clears_dq is there again for sums that have an order.
# On Blackwell a block is 128 queries by 128 keys, or 64 by 128 (docs/backward_sm100.md says why).
SM100_BWD = tuple(
    row._replace(clears_dq=clears_dq)
    for row in (_SM100_PAIR, _SM100_WIDE_PAIR, _SM100_ASKED_PAIR, _SM100_FOLDED_PAIR)
    for clears_dq in (True, False)
) + tuple(
    row
    for d, d_v, tile_m, stages_q, stages_do, reason in (
        (64, 64, 128, 2, 2, "two query blocks in flight"),
        (96, 96, 128, 2, 2, "two query blocks in flight; dQ reuses dP's tensor memory"),
        (128, 128, 128, 2, 1, "two blocks of Q in flight, and one of dO"),
        (192, 128, 64, 2, 2, "64 queries leave room for dK and dV; dQ reuses dP's memory"),
        (192, 192, 64, 2, 1, "64 queries leave room for dK and dV; dQ reuses S's memory"),
        (256, 128, 64, 2, 1, "64 queries leave room for dK and dV; dQ reuses S's memory"),
        (128, 256, 64, 2, 1, "64 queries leave room for dK and dV; dQ reuses dP's memory"),
        (256, 256, 64, 1, 1, "one launch for dV, and one for dK and dQ, as all do not fit"),
    )
    for row in (
        BwdRow(
            *(d, d_v, tile_m, stages_q, stages_do, 1, 0),
            f"{reason}; dQ starts as zeros",
            clears_dq=True,
        ),
        BwdRow(*(d, d_v, tile_m, stages_q, stages_do, 1, 0), reason),
    )
)
