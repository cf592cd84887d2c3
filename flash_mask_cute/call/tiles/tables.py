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
        "one tile has all queries and keys, and no columns that are not there",
        masks=(TuningClass.FULL, TuningClass.CAUSAL, TuningClass.SCORE_MOD),
        max_seqlen_q=64,
        max_seqlen_k=64,
    ),
    FwdRow(
        *(64, 64, 64, 64, 8, 2, False),
        "decoding waits for memory: one warpgroup, and no keys but those that were chosen",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 64, 64, 5, 2, True),
        "decoding waits for memory: one warpgroup, and no keys but those that were chosen",
        for_decode=True,
        max_selected=64,
    ),
    FwdRow(
        *(64, 64, 64, 128, 6, 2, False),
        "decoding waits for memory: one warpgroup, and as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 64, 128, 3, 2, True),
        "decoding waits for memory: one warpgroup, as many keys in flight as fit, and keys of the "
        "next tile before this one's last product",
        for_decode=True,
    ),
    FwdRow(
        *(192, 128, 64, 112, 2, 1, False),
        "decoding waits for memory: as many keys in flight as fit beside a separate output",
        for_decode=True,
    ),
    FwdRow(
        *(192, 192, 64, 96, 2, 1, True),
        "decoding waits for memory: as many keys in flight as fit, with a third stage of K",
        for_decode=True,
    ),
    FwdRow(
        *(256, 256, 64, 64, 3, 1, True),
        "decoding waits for memory: as many keys in flight as fit",
        for_decode=True,
    ),
    FwdRow(
        *(128, 128, 128, 64, 3, 2, False),
        "a tile of keys has one selected block, and few queries a tile have few blocks together",
        max_selected=64,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "few queries a tile have few blocks of their selections together",
        max_selected=4096,
    ),
    FwdRow(
        *(192, 192, 128, 64, 2, 1, True),
        "a block of a selection consists of whole tiles; the output takes the query's place",
        max_selected=4096,
    ),
    FwdRow(
        *(64, 64, 192, 64, 6, 2, False),
        "each warpgroup passes over what its own lists do not have, and three share keys",
        min_seqlen_q=129,
        lists_per_warpgroup=True,
    ),
    FwdRow(
        *(128, 128, 192, 64, 5, 1, True),
        "each warpgroup passes over what its own lists do not have, and three share keys",
        min_seqlen_q=129,
        lists_per_warpgroup=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "tiles of which the usual blocks of block lists are made",
        native_block_lists=True,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "two warpgroups leave room for a warpgroup that evaluates mask_mod",
        masks=(TuningClass.MASK_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "a narrow window wastes less of a small tile, and short walks want keys early",
        max_window=1024,
    ),
    FwdRow(
        *(32, 32, 128, 128, 3, 2, False),
        "rows of tables stay in shared memory, and two warpgroups can load a block of them",
        masks=(TuningClass.SCORE_MOD,),
        caches_bias=True,
    ),
    FwdRow(
        *(64, 64, 128, 96, 2, 2, False),
        "as above, with room for two blocks of rows in fp32",
        masks=(TuningClass.SCORE_MOD,),
        caches_bias=True,
    ),
    FwdRow(
        *(64, 64, 192, 80, 4, 2, False),
        "two blocks with fewer columns that are not there; registers for what a score_mod computes",
        masks=(TuningClass.SCORE_MOD,),
        min_seqlen_k=129,
        max_seqlen_k=160,
    ),
    FwdRow(
        *(64, 64, 192, 96, 4, 2, False),
        "three warpgroups, with registers for what a score_mod computes",
        masks=(TuningClass.SCORE_MOD,),
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "short sequences fill small tiles better, and waste less along the diagonal",
        masks=(TuningClass.CAUSAL,),
        max_seqlen_q=1024,
    ),
    FwdRow(
        *(64, 64, 192, 128, 3, 2, False),
        "three warpgroups hide the latency of the exponentials",
        gain=1.2,
    ),
    FwdRow(
        *(64, 64, 128, 128, 3, 2, False),
        "smaller tiles fill the last wave of CTAs",
    ),
    FwdRow(
        *(80, 80, 192, 96, 2, 2, False),
        "three warpgroups hide the latency of the exponentials; the next query waits ready",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        above_dim=72,
        gain=1.15,
    ),
    FwdRow(
        *(96, 96, 192, 80, 3, 2, False),
        "reading such rows takes long, and here each key serves more queries",
        masks=(TuningClass.FULL, TuningClass.CAUSAL),
        splits_sectors=True,
    ),
    FwdRow(
        *(96, 96, 192, 112, 3, 1, False),
        "three warpgroups hide the latency of the exponentials",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(96, 96, 128, 128, 3, 2, False, "two warpgroups take turns; the next query waits ready"),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups hide the latency of the exponentials, and each key serves more queries",
        masks=(TuningClass.FULL,),
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "reading such rows takes long, and here each key serves more queries",
        masks=(TuningClass.CAUSAL,),
        splits_sectors=True,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "each key serves more queries; in long walks waste along the diagonal weighs little",
        masks=(TuningClass.CAUSAL, TuningClass.SCORE_MOD),
        min_seqlen_k=32768,
        gain=1.05,
    ),
    FwdRow(
        *(128, 128, 192, 80, 3, 1, False),
        "three warpgroups hide the latency of a soft cap's functions",
        min_seqlen_k=8192,
        needs_sfu=True,
    ),
    FwdRow(
        *(128, 128, 128, 128, 2, 2, False),
        "square tiles waste least along a mask's edge; the next query waits ready",
    ),
    FwdRow(192, 128, 128, 112, 2, 1, False, "the largest key block beside a separate output"),
    FwdRow(192, 192, 128, 96, 2, 1, True, "the output takes the query's place in shared memory"),
    FwdRow(
        *(256, 256, 128, 64, 2, 1, True),
        "registers for scores and probabilities at once, and a third stage of K",
    ),
    *(
        row
        for d, decode_stages, stages in ((320, 3, 2), (384, 2, 1), (512, 1, 1))
        for row in (
            FwdRow(
                *(d, d, 64, 64, decode_stages, 1, True),
                "decoding waits for memory: as many keys in flight as fit; two CTAs share values",
                for_decode=True,
            ),
            FwdRow(
                *(d, d, 128, 64, stages, 1, True),
                "two CTAs share values, and each scores all keys; what fits beside a query",
            ),
        )
    ),
)

# On Blackwell a tile is 256 x 128, and of wide heads 128 x 128 (docs/forward_sm100.md says why). A
# pair of CTAs has two work tiles with one walk, which wastes nothing where every query sees the
# same keys and there is more than one tile.
_SM100_FWD = (
    *(
        FwdRow(
            *(d, d_v, 128, 128, stages, 1, False),
            "few rows share keys: one half of a tile, and its memory for keys in flight",
            for_decode=True,
        )
        for d, d_v, stages in ((64, 64, 5), (96, 96, 3), (128, 128, 2), (192, 128, 2))
    ),
    FwdRow(*(64, 64, 256, 128, 4, 2, False), "the next query waits ready, keys come early"),
    FwdRow(*(96, 96, 256, 128, 3, 1, False), "three blocks in flight rather than a second query"),
    FwdRow(
        *(128, 128, 256, 128, 2, 2, False),
        "a pair of CTAs reads half of each block, and the next query waits ready in its place",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(*(128, 128, 256, 128, 2, 1, False), "what fits beside a query and a staged output"),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "a pair of CTAs reads half of each block, and twice as many are in flight",
        masks=(TuningClass.FULL,),
        min_seqlen_q=257,
        cta_pair=True,
    ),
    FwdRow(
        *(192, 128, 256, 128, 2, 1, False),
        "a single CTA waits for its only place for keys; a pair visits a few blocks more",
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
                "a pair of CTAs has the rows of one tile of narrower heads, and half of each block",
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

SM90_BWD = (
    BwdRow(
        *(64, 64, 64, 2, 2, 1, 64),
        "a few listed queries, all values in registers",
        clears_dq=True,
        query_lists=128,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "a few listed queries, with registers left for those who look them up",
        clears_dq=True,
        query_lists=128,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 0),
        "a few listed queries; both warpgroups have the same keys, and half of the columns each",
        clears_dq=True,
        query_lists=64,
    ),
    *(
        BwdRow(
            *(d, d, 64, 2, 2, 1, value_cols),
            "blocks that one warpgroup's lists have are short; no CTA waits for who stores first",
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
        "user callables take the registers of 64 queries, but not those of the values",
        (TuningClass.SCORE_MOD, TuningClass.MASK_MOD),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 48),
        "registers for 128 queries and most values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL),
    ),
    BwdRow(
        *(64, 64, 128, 2, 2, 1, 16),
        "registers for 128 queries and a few values, with enough left for the mask warps",
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "all values in registers; walks that begin at the same queries do not wait for each other",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "as for wider heads: in long walks sums that the first one stores cost more than clearing",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        above_dim=64,
        clears_dq=True,
    ),
    BwdRow(
        *(96, 96, 64, 2, 2, 1, 96),
        "registers for 64 queries and all values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
        above_dim=64,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "all walks begin at the same queries; each would wait for the first one to store a block",
        (TuningClass.FULL,),
        max_seqlen_k=6144,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "in walks of this length, sums that the first one stores came with 1.16 times the time",
        (TuningClass.CAUSAL,),
        min_seqlen_k=32768,
        clears_dq=True,
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 64),
        "registers for 64 queries and half of the values beside the sums of dK and dV",
        (TuningClass.FULL, TuningClass.CAUSAL, TuningClass.OTHER),
    ),
    BwdRow(
        *(128, 128, 64, 2, 2, 1, 32),
        "registers for 64 queries and some values, with enough left for bits of many edges",
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
                "as for narrower heads: all walks begin at the same queries",
                *((TuningClass.FULL,), 0, 6144, True),
            ),
            (
                "as for narrower heads: in long walks first stores cost more than clearing",
                *((TuningClass.CAUSAL,), 32768, None, True),
            ),
            (
                "a CTA with 128 keys adds dQ half as often, and reads Q and dO half as often",
                *(None, 0, None, False),
            ),
        )
    ),
    BwdRow(
        *(192, 192, 64, 2, 2, 1, 0),
        "two CTAs that sum dQ together add half as much of it to memory",
        above_dim=128,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(*(192, 192, 64, 2, 2, 1, 0), "half of the sums' columns in each warpgroup"),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "two CTAs that sum dQ together add half as much of it to memory",
        above_dim=192,
        clears_dq=True,
        cta_pair=True,
    ),
    BwdRow(
        *(256, 256, 64, 2, 1, 1, 0),
        "as up to 192; a second query is worth more than a second dO",
    ),
)

# By the model of docs/backward_sm100.md, a pair at 128 columns takes 0.8 of the time of two CTAs
# for as many blocks. It visits a block that either CTA needs: with four key tiles under causal
# masking, or in a window of 512 keys, that is 1.2 times as many.
_SM100_PAIR = BwdRow(
    *(128, 128, 128, 2, 1, 1, 0),
    "two CTAs read half of the queries each, and add half as much of dQ to memory",
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
    "CTAs of 64 keys have room for all sums in one launch",
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
        (96, 96, 128, 2, 2, "two query blocks in flight, and dQ in the columns of dP"),
        (128, 128, 128, 2, 1, "what fits beside two blocks of Q"),
        (192, 128, 64, 2, 2, "blocks of 64 queries leave room for both sums, and dQ over dP"),
        (192, 192, 64, 2, 1, "the same, with dQ over S"),
        (256, 128, 64, 2, 1, "the same, with dQ over S"),
        (128, 256, 64, 2, 1, "blocks of 64 queries leave room for both sums, and dQ over dP"),
        (256, 256, 64, 1, 1, "a launch for dV, and one for dK and dQ, which fills the memory"),
    )
    for row in (
        BwdRow(
            *(d, d_v, tile_m, stages_q, stages_do, 1, 0),
            f"{reason}; clearing costs once what asking for sums costs in every block",
            clears_dq=True,
        ),
        BwdRow(*(d, d_v, tile_m, stages_q, stages_do, 1, 0), reason),
    )
)
