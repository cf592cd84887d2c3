"""Every kernel that the tables name, compiled for its architectures without a GPU."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cutlass
import cutlass.cute as cute
import post_mods
import pytest
import torch
from compiled_code import (
    B200,
    B300,
    NEEDS_DISASSEMBLER,
    PLAIN,
    SWEEP,
    TARGET,
    build,
    build_text,
    check_code,
    shapes_of,
)
from cutlass._mlir_helpers import op
from cutlass.cute.runtime import from_dlpack
from mask_cases import MASK_MODS, SCORE_MODS

from flash_mask_cute.call.forward import build_fwd, compile_fwd
from flash_mask_cute.call.problem import AttentionProblem, Mods
from flash_mask_cute.call.settings import FwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import FwdTiles, WalkFacts, select_fwd_config
from flash_mask_cute.call.tiles.rows import FwdRow
from flash_mask_cute.call.tiles.tables import SM90_FWD, SM100_FWD
from flash_mask_cute.mask_prep.column_bounds import compile_column_bounds
from flash_mask_cute.runtime.cache import CompileCache, compile_count, compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import compile_object, compiler_keeps
from flash_mask_cute.sm100.flash_fwd_traits import SMEM_BOOKKEEPING
from flash_mask_cute.sm100.flash_fwd_traits import FwdTraits as BlackwellTraits
from flash_mask_cute.utils import scalar_to_ssa
from lab.model import count_softmax

ROWS = tuple(
    AttentionProblem("bfloat16", row.max_dim, row.max_dim_v, is_causal=causal)
    for row in SM90_FWD
    for causal in (False, True)
)
FEATURES = {
    "window": {"has_window_left": True, "has_window_right": True},
    "window-left-causal": {"has_window_left": True, "is_causal": True},
    "varlen-causal": {"varlen_q": True, "varlen_k": True, "is_causal": True},
    "varlen-q-seqused": {"varlen_q": True, "has_seqused_q": True, "has_seqused_k": True},
    "packed-sink": {"packed_heads": 8, "sink_dtype": "bfloat16", "is_causal": True},
    "softcap-no-lse": {"has_softcap": True, "needs_lse": False},
    "fp16-d64-varlen": {"dtype": "float16", "head_dim": 64, "head_dim_v": 64, "varlen_k": True},
}
MASKS: dict[str, dict[str, Any]] = {
    "columns-1-causal": {"intervals": (1, True), "is_causal": True},
    "columns-2": {"intervals": (2, False)},
    "columns-1-causal-d64": {
        "intervals": (1, True), "is_causal": True, "head_dim": 64, "head_dim_v": 64,
    },
    "columns-4-d64": {"intervals": (4, False), "head_dim": 64, "head_dim_v": 64},
    "columns-varlen": {
        "intervals": (2, True), "is_causal": True, "varlen_q": True, "varlen_k": True,
    },
    "lists": {"has_lists": True, "has_full_lists": True},
    "bits": {"has_lists": True, "has_bits": True},
    "mask": {"mask_mod": "checks"},
    "mask-aux-lists": {
        "mask_mod": "documents", "aux": (("int32", 2),), "has_lists": True, "has_full_lists": True,
    },
    "score": {"score_mod": "alibi", "is_causal": True},
    "score-lse-low": {"score_mod": "alibi", "needs_lse_low": True, "sink_dtype": "float32"},
    "score-aux-d64": {
        "score_mod": "head_bias", "aux": (("bfloat16", 1),), "head_dim": 64, "head_dim_v": 64,
    },
}  # fmt: skip
ODD_DIMS = ((8, 8), (72, 40), (64, 256), (256, 64), (240, 256), (16, 128))
VARIANTS = {
    **{f"d{p.head_dim}-dv{p.head_dim_v}-{'causal' if p.is_causal else 'full'}": p for p in ROWS},
    **{name: replace(PLAIN, **fields) for name, fields in FEATURES.items()},
    **{f"d{d}-dv{dv}": replace(PLAIN, head_dim=d, head_dim_v=dv) for d, dv in ODD_DIMS},
}


# What a score_mod computes with competes for registers with the second set of P: a flag that a step
# reads once is spilled, and ALiBi is faster all the same (docs/facts/compiler.md).
SPILLED_BESIDE_A_SCORE_MOD = 32
# On Blackwell the pass over a row's scores that subtracts a maximum far from 0 first spills, beside
# all of the row's probabilities. No other pass does, and scores of usual size do not come there.
SPILLED_FAR_FROM_0 = 256
# Three warpgroups with all of 64 x 128 scores leave the mask warps 32 registers. These then spill
# their block counters. Nothing is spilled where a row's sum is checked before the next row's
# exponentials, and most masks take 1 % longer (docs/facts/compiler.md).
SPILLED_BY_MASK_WARPS = 256


def most_spilled_at(problem: AttentionProblem) -> int:
    if problem.score_mod is not None:
        return SPILLED_BESIDE_A_SCORE_MOD
    is_masked = problem.tuning_class in ("causal", "other")
    return (
        SPILLED_BY_MASK_WARPS if is_masked and problem.head_dim == problem.head_dim_v == 64 else 0
    )


@SWEEP
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_well(name: str, tmp_path: Path) -> None:
    meta, counts = build(VARIANTS[name], tmp_path)
    facts = f"{name}: {meta}, {counts}"
    assert meta["registers"], facts
    check_code(facts, meta, counts, most_spilled_at(VARIANTS[name]))
    if counts:
        assert counts["USETMAXREG"] == 2, facts
        assert counts["HGMMA"] and counts["UTMALDG"] and counts["UTMASTG"], facts


def mods_of(name: str) -> tuple[dict[str, Any], Mods]:
    """Fields of a problem with masks, and its callables."""
    fields = dict(MASKS[name])
    mods = Mods(
        SCORE_MODS[fields["score_mod"]].cute if "score_mod" in fields else None,
        MASK_MODS[fields["mask_mod"]].cute if "mask_mod" in fields else None,
    )
    for kind, mod in mods._asdict().items():
        if mod is not None:
            fields[kind] = callable_key(mod)
    return fields, mods


@SWEEP
@pytest.mark.parametrize("name", MASKS)
def test_masks_compile_well(name: str, tmp_path: Path) -> None:
    fields, mods = mods_of(name)
    meta, counts = build(replace(PLAIN, **fields), tmp_path, mods)
    most_spilled = most_spilled_at(replace(PLAIN, **fields))
    check_code(f"{name}: {meta}, {counts}", meta, counts, most_spilled)


LISTS = {"has_lists": True, "has_full_lists": True}
# Callables of the post as they are printed: the fields of their problems, score_mod and mask_mod.
POST: dict[str, tuple[dict[str, Any], Mods]] = {
    "t5-bias": ({"aux": (("float32", 3),)}, Mods(post_mods.rel_bias_score_mod_cute)),
    "alibi": ({}, Mods(post_mods.alibi_score_mod)),
    "causal-with-offset": ({}, Mods(None, post_mods.create_causal_mask_with_offset(128))),
    "documents": ({"aux": (("int32", 3),)}, Mods(None, post_mods.document_mask_mod_of_heads)),
    "window": ({}, Mods(None, post_mods.sliding_window_mask_mod)),
    "documents-with-bias": (
        {"aux": (("float32", 3), ("int32", 3)), **LISTS},
        Mods(post_mods.doc_rel_bias_score_mod, post_mods.document_mask_mod),
    ),
    "prefix-lm-with-head-bias": (
        {"aux": (("float32", 1),), **LISTS},
        Mods(post_mods.head_bias_score_mod, post_mods.create_prefix_lm_mask(prefix=204, offset=0)),
    ),
    "getting-started": (LISTS, Mods(post_mods.my_score_mod, post_mods.my_mask_mod)),
}


@SWEEP
@pytest.mark.parametrize("name", POST)
def test_callables_of_the_post_compile_as_printed(name: str, tmp_path: Path) -> None:
    fields, mods = POST[name]
    keys = {kind: callable_key(mod) for kind, mod in mods._asdict().items() if mod is not None}
    meta, _ = build_text(replace(PLAIN, **fields, **keys), tmp_path, mods)
    assert meta["registers"]


@SWEEP
@pytest.mark.parametrize("dim", [192, 256])
def test_a_mask_mod_compiles_for_wide_heads(dim: int, tmp_path: Path) -> None:
    """Above 192 without a warpgroup of mask warps, beside which a product would be too wide."""
    fields, mods = mods_of("mask")
    meta, counts = build(replace(PLAIN, **fields, head_dim=dim, head_dim_v=dim), tmp_path, mods)
    check_code(f"{dim}: {meta}, {counts}", meta, counts)
    assert meta["registers"] == (128 if dim == 192 else 168)


@NEEDS_DISASSEMBLER
def test_scores_that_are_equally_far_apart_share_their_bias(tmp_path: Path) -> None:
    """A thread's 64 scores of a block have 34 distances; the code has two whole blocks."""
    fields, mods = mods_of("score")
    _, counts = build(replace(PLAIN, **fields), tmp_path, mods)
    if not counts:
        pytest.skip("nothing here can read machine code")
    first_block = cut_block = 64
    assert counts["I2FP"] < first_block + cut_block + 2 * 40, counts


BLACKWELL = {
    **{
        f"d{row.max_dim}-dv{row.max_dim_v}-{'causal' if causal else 'full'}": AttentionProblem(
            "bfloat16", row.max_dim, row.max_dim_v, is_causal=causal
        )
        for row in SM100_FWD
        for causal in (False, True)
    },
    **{name: replace(PLAIN, **fields) for name, fields in FEATURES.items()},
}


@SWEEP
@pytest.mark.parametrize("name", BLACKWELL)
def test_compiles_well_for_blackwell(name: str, tmp_path: Path) -> None:
    problem = BLACKWELL[name]
    is_pair = problem.head_dim_v > 128 or (
        problem.tuning_class == "full" and problem.head_dim >= 128
    )
    check_blackwell(name, *build(problem, tmp_path, target=B200), is_pair)


# what rows leave to single CTAs
PAIRS = {
    "d64": {"head_dim": 64, "head_dim_v": 64},
    "d96-packed-sink": {
        "head_dim": 96, "head_dim_v": 96, "packed_heads": 8, "sink_dtype": "bfloat16",
    },
    "causal-varlen": {"is_causal": True, "varlen_q": True, "varlen_k": True},
    "columns": {"intervals": (2, False)},
}  # fmt: skip


@SWEEP
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_compile_well_for_blackwell(name: str, tmp_path: Path) -> None:
    problem = replace(PLAIN, **PAIRS[name])
    override = FwdConfig(cta_pair=True)
    check_blackwell(name, *build(problem, tmp_path, target=B200, override=override), True)


@SWEEP
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_one_half_compiles_well_for_blackwell(dims: tuple[int, int]) -> None:
    """As splits have it whose rows are few."""
    problem = AttentionProblem("bfloat16", *dims, is_causal=True, split="rows", packed_heads=8)
    walk = WalkFacts(decode_rows=8)
    choice = select_fwd_config(problem, shapes_of(problem), walk=walk, spec=arch_spec(B200))
    assert choice.tiles.tile_m == 128
    with compile_lock():
        meta = build_fwd(problem, choice.tiles, B200).meta
    check_blackwell(f"{dims}", meta, {})


@SWEEP
@pytest.mark.parametrize("row", SM100_FWD, ids=lambda row: f"{row.max_dim}-{row.max_dim_v}")
def test_compiles_well_for_the_second_blackwell(row: FwdRow) -> None:
    """Of sm_103a disassemblers may know nothing."""
    fields = {} if row.cta_pair else {"is_causal": True, "varlen_k": True}
    problem = AttentionProblem("float16", row.max_dim, row.max_dim_v, **fields)
    override = None if row.cta_pair else FwdConfig(cta_pair=False)
    shapes = shapes_of(problem)
    tiles = select_fwd_config(problem, shapes, override=override, spec=arch_spec(B300)).tiles
    assert tiles.cta_pair == row.cta_pair
    with compile_lock():
        meta = build_fwd(problem, tiles, B300).meta
    check_blackwell(f"{row}", meta, {}, row.cta_pair)


@SWEEP
@pytest.mark.parametrize("name", MASKS)
def test_masks_compile_well_for_blackwell(name: str, tmp_path: Path) -> None:
    fields, mods = mods_of(name)
    most_spilled = 0 if mods.score_mod is None else SPILLED_FAR_FROM_0
    built = build(replace(PLAIN, **fields), tmp_path, mods, B200)
    check_blackwell(name, *built, most_spilled=most_spilled)


def check_blackwell(
    name: str,
    meta: dict[str, Any],
    counts: dict[str, int],
    is_pair: bool = False,
    most_spilled: int = 0,
) -> None:
    facts = f"{name}: {meta}, {counts}"
    assert meta["registers"] == 96, facts
    check_code(facts, meta, counts, most_spilled)
    if counts:
        # softmax, output, helpers, mask warps
        assert counts["USETMAXREG"] == 4, facts
        assert counts["UTCHMMA"] and counts["UTMALDG"] and counts["UTMASTG"], facts
        # the CTAs of a pair wait for each other at both ends
        assert counts.get("UCGABAR_ARV", 0) == 2 * is_pair, facts


# A key tile of flash-attn-4 4.0.0b36, full attention, d=128: a softmax thread's instructions in the
# loop where nothing is rescaled, and the products that are issued for a pair of CTAs.
FLASH_ATTN_4 = {"MUFU": 105, "fp32": 205, "LDTM": 4, "STTM": 4, "UTCHMMA": 32}
INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(\S*)", re.MULTILINE
)


@NEEDS_DISASSEMBLER
def test_a_key_tile_on_blackwell_costs_no_more_than_a_peers(tmp_path: Path) -> None:
    _, text = build_text(PLAIN, tmp_path, target=B200)
    if not text:
        pytest.skip("no disassembler for sm_100a")
    code = INSTRUCTION.findall(text)
    opcodes = [opcode for opcode, _ in code]
    products = [i for i, opcode in enumerate(opcodes) if opcode == "UTCHMMA"]
    assert all(code[i][1].startswith(".2CTA") for i in products)
    # A step, and once more the 16 products of a walk's first S and last P V.
    assert len(products) == FLASH_ATTN_4["UTCHMMA"] + 16
    tiles = select_fwd_config(PLAIN, shapes_of(PLAIN), spec=arch_spec(B200)).tiles
    for role, most in (("softmax, full block", 530), ("softmax, partial block", 700)):
        counts = count_softmax(text, tiles.polynomial)[role]
        assert counts["instructions"] <= most, counts
        found = {op: counts[op] for op in ("MUFU", "LDTM", "STTM")}
        found["fp32"] = counts["FFMA2"] + counts["FADD2"]
        assert all(0 < found[name] <= FLASH_ATTN_4[name] for name in found), found
    # the bits of a cut block become predicates together
    assert counts["R2P"] >= 16 and counts["LOP3"] <= 24


@SWEEP
def test_exponentials_by_polynomial_where_they_are_scarce(tmp_path: Path) -> None:
    """A B300 computes exponentials at twice the rate of a B200. A caller may say another share."""
    exponentials = []
    for target, override in ((B200, None), (B300, None), (B200, FwdConfig(polynomial=16))):
        tiles = select_fwd_config(
            PLAIN, shapes_of(PLAIN), override=override, spec=arch_spec(target)
        ).tiles
        with compile_lock(), compiler_keeps(f"--keep-ptx --dump-dir={tmp_path}"):
            compiled = build_fwd(PLAIN, tiles, target)
        assert compiled.meta["spill_bytes"] == 0
        exponentials.append(cast(Any, compiled.function).__ptx__.count("ex2.approx"))
    # the text has a key tile's 128 exponentials twice, and a fifth of them goes by the polynomial
    assert exponentials[1] - exponentials[0] == 2 * 24
    assert exponentials[1] - exponentials[2] == 2 * 16


def bounded(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score * 0.1, fastmath=True) * 10.0


def powered(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    near = cute.where(q - k < 4, score, cute.math.exp2(score, fastmath=True))
    return near + aux[0][h[0]]


def squashed(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score, fastmath=True) * 10.0


def unscaled(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score, fastmath=True)


def grown(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score * 2.0**70, fastmath=True) * 10.0


@NEEDS_DISASSEMBLER
def test_a_number_that_multiplies_the_score_joins_its_scale(tmp_path: Path) -> None:
    """For nothing, unless the scale might not hold it; the result's factor, too."""
    products = {}
    for mod in (bounded, squashed, unscaled, grown):
        problem = replace(PLAIN, score_mod=callable_key(mod))
        _, counts = build(problem, tmp_path, Mods(score_mod=mod))
        if not counts:
            pytest.skip("nothing here can read machine code")
        products[mod] = counts["FMUL"]
    assert abs(products[bounded] - products[squashed]) < 4
    # but where maxima are far from 0 and are subtracted first, which these never are: in a first
    # block, in a cut one, and in whole ones, of which the text has two
    assert 0 <= products[squashed] - products[unscaled] - 4 * 64 < 32
    # of each of a thread's 64 scores in a first block, a cut and a whole one
    assert products[grown] > products[squashed] + 3 * 64 - 4


def grown_one_by_one(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return cute.math.tanh(score[0] * 2.0**70, fastmath=True) * 10.0


@NEEDS_DISASSEMBLER
def test_blackwell_multiplies_two_scores_at_once(tmp_path: Path) -> None:
    """Where a callable takes no element out of a vector."""
    products = []
    for mod in (grown, grown_one_by_one):
        problem = replace(PLAIN, score_mod=callable_key(mod))
        meta, counts = build(problem, tmp_path, Mods(score_mod=mod), target=B200)
        if not counts:
            pytest.skip("nothing here can read machine code")
        check_code("", meta, {}, SPILLED_FAR_FROM_0)
        products.append((counts.get("FMUL", 0), counts.get("FMUL2", 0)))
    (scalars, pairs), (scalars_one_by_one, pairs_one_by_one) = products
    # scale and 2**70 of 128 scores, in a cut block and a whole one, twice each (a new maximum)
    assert scalars_one_by_one - scalars > 3 * 2 * 128
    assert pairs - pairs_one_by_one > 3 * 128


@SWEEP
@pytest.mark.parametrize(
    "fields, mod, share",
    [
        ({}, None, 0),
        ({"has_softcap": True}, None, 4),
        ({"is_causal": True}, bounded, 4),
        ({"aux": (("float32", 1),)}, powered, 4),
        ({}, lambda score, b, h, q, k, aux: cute.math.tanh(score), 0),
        # its exponential is of the head, not of the score
        ({}, SCORE_MODS["alibi"].cute, 0),
    ],
    ids=["plain", "softcap", "tanh", "exp2-and-aux", "slow-tanh", "alibi"],
)
def test_exponentials_by_polynomial_beside_functions_of_scores(
    fields: dict[str, Any], mod: Any, share: int, tmp_path: Path
) -> None:
    """A sixteenth of a thread's 64 on Hopper, at this head dimension."""
    key = callable_key(mod) if mod is not None else None
    problem = replace(PLAIN, score_mod=key, **fields)
    tiles = select_fwd_config(problem, shapes_of(problem), override=FwdConfig(128, 128)).tiles
    with compile_lock(), compiler_keeps(f"--keep-ptx --dump-dir={tmp_path}"):
        compiled = build_fwd(problem, tiles, TARGET, Mods(score_mod=mod))
    rounded_down = cast(Any, compiled.function).__ptx__.count("add.rm.f32")
    # The text has a block's exponentials up to eight times: for a tile's first block, for one that
    # is cut and for two whole ones, where they may be taken again; with a score_mod, in a first
    # block, too.
    times = (3, 5, 7) if mod is None else (4, 6, 8)
    assert rounded_down in ([n * share for n in times] if share else (0,))
    is_alibi = mod is SCORE_MODS["alibi"].cute
    check_code("", compiled.meta, {}, SPILLED_BESIDE_A_SCORE_MOD if is_alibi else 0)


@pytest.mark.parametrize("row", SM100_FWD, ids=lambda row: f"{row.max_dim}-{row.max_dim_v}")
def test_what_the_blackwell_plan_says_about_memory(row: FwdRow) -> None:
    traits = BlackwellTraits(
        cutlass.BFloat16, row.max_dim, row.max_dim_v, row.tile_m, row.tile_n, 1, row.num_stages,
        row.stages_q, row.share_qo, row.cta_pair,
    )  # fmt: skip
    sizes = []

    @cute.jit
    def measure() -> None:
        sizes.append(traits.storage().size_in_bytes())
        for shown, multiplied in (
            (traits.layout_q(), traits.operand_q()),
            (traits.layout_k(), traits.operand_k()),
            (traits.layout_v(), traits.operand_v()),
        ):
            sizes.append((cute.cosize(shown), cute.cosize(multiplied)))

    with compile_lock():
        measure()
    storage, *operands = sizes
    assert 0 <= traits.smem_bytes - storage < SMEM_BOOKKEEPING
    assert all(shown == multiplied for shown, multiplied in operands)
    halves = range(traits.halves)
    ends = [traits.column_s(0), traits.column_s(1), *map(traits.column_o, halves)]
    widths = [traits.tile_n, traits.tile_n, *(traits.tile_dv for _ in halves)]
    assert [end + width for end, width in zip(ends, widths, strict=True)] == [
        *ends[1:],
        traits.num_columns,
    ]
    assert traits.num_columns <= 512
    assert traits.helper_registers >= 24
    tiles = FwdTiles(*row[2:7], cta_pair=row.cta_pair)
    assert (traits.cluster_tile_m, traits.group.size) == (tiles.cluster_tile_m, tiles.ctas_per_tile)


def test_one_kernel_per_problem(tmp_path: Path) -> None:
    """Sizes are not part of a problem, and equal problems compile once."""
    cache = CompileCache(tmp_path)
    config = FwdConfig(tile_n=32)
    tiles = select_fwd_config(PLAIN, shapes_of(PLAIN), override=config).tiles
    first = compile_fwd(PLAIN, tiles, TARGET, cache=cache)
    count = compile_count()
    assert compile_fwd(replace(PLAIN), replace(tiles), TARGET, cache=cache) is first
    assert compile_count() == count
    other_process = CompileCache(tmp_path)
    loaded = compile_fwd(PLAIN, tiles, TARGET, cache=other_process)
    assert compile_count() == count
    assert dict(loaded.meta) == dict(first.meta)


def test_scalar_to_ssa() -> None:
    @cute.jit
    def write(values: cute.Tensor, offset: cutlass.Int32):  # type: ignore[no-untyped-def]
        three = scalar_to_ssa(3, cutlass.Int32)
        sum_ = three + scalar_to_ssa(offset, cutlass.Int32)
        values[0] = sum_[0]
        values[1] = (scalar_to_ssa(values[1], cutlass.Int32) * three)[0]
        values[2] = cutlass.Int32((three <= sum_)[0])

    values = torch.tensor([0, 5, 0], dtype=torch.int32)
    with compile_lock():
        write(from_dlpack(values), 4)
    assert values.tolist() == [7, 15, 1]


def test_public_paths() -> None:
    from flash_mask_cute import flash_fwd
    from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90
    from flash_mask_cute.sm100.flash_fwd import FlashAttentionForwardSm100

    assert flash_fwd.FlashAttentionForwardSm90 is FlashAttentionForwardSm90
    assert flash_fwd.FlashAttentionForwardSm100 is FlashAttentionForwardSm100


def test_remarks_do_not_need_source_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking a line up for each operation takes as long as tracing it."""
    asked: list[None] = []
    monkeypatch.setattr(op, "_get_caller_frame_info", lambda: asked.append(None))
    meta = compile_column_bounds(1, False, TARGET.arch, cache=CompileCache(tmp_path)).meta
    assert meta["registers"] and meta["spill_bytes"] == 0 and not asked


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collector_is_as_it_was(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile: list[bool] = []

    def fail(*_arguments: object, **_options: object) -> None:
        meanwhile.append(gc.isenabled())
        raise ValueError("no kernel")

    monkeypatch.setattr(cute, "compile", fail)
    try:
        if not is_enabled:
            gc.disable()
        with pytest.raises(ValueError, match="no kernel"):
            compile_object(None, [], "")
        assert gc.isenabled() is is_enabled and meanwhile == [False]
    finally:
        gc.enable()
