"""The compiled backward: registers, spills, shared memory, and what compiles it anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bwd_calls import bwd_keywords
from cases import BF16, Case
from compiled_code import SWEEP
from inputs import make_inputs
from mask_cases import MASK_MODS, SCORE_MODS
from planned import planned

from flash_mask_cute import compile_count
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.build_backward import BwdKernels, build_bwd, compile_bwd
from flash_mask_cute.call.forward import NO_MODS
from flash_mask_cute.call.problem import AttentionProblem, Mods, may_empty_rows
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import select_bwd_config
from flash_mask_cute.call.tiles.tables import SM100_BWD
from flash_mask_cute.runtime.cache import CompileCache, compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.target import Target

TARGET = Target.default()
PLAIN = AttentionProblem("bfloat16", 128, 128, needs_lse=False)
PLAIN_FIELDS = {"head_dim": 128, "head_dim_v": 128, "has_softcap": False}
CAUSAL = {"is_causal": True}
WINDOW = {"has_window_left": True}
DOCUMENTS = {"mask_mod": "documents", "aux": (("int32", 2),)}
VARLEN = {"varlen_q": True, "varlen_k": True}
USED = {"has_seqused_q": True, "has_seqused_k": True}
IN_ORDER = {"deterministic": True}
COLUMNS = {n: {"intervals": (n, False)} for n in (2, 4)}
CAUSAL_COLUMNS = {n: {"intervals": (n, True), **CAUSAL} for n in (1, 2)}
ALIBI = {"score_mod": "alibi"}
D72, D80, D96, D192, D256 = ({"head_dim": d, "head_dim_v": d} for d in (72, 80, 96, 192, 256))
D192_128 = {"head_dim": 192}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "causal-32k": CAUSAL,
    "window": {"has_window_left": True, "has_window_right": True},
    "causal-more-queries": {**CAUSAL, "may_empty_rows": True},
    "varlen-causal": VARLEN | CAUSAL,
    "dense-seqused": USED | CAUSAL,
    "seqused": {"varlen_q": True, **USED},
    "softcap": {"has_softcap": True},
    "columns-2": COLUMNS[2],
    "columns-1-causal-bits": {**CAUSAL_COLUMNS[1], "has_bits": True},
    "mask-aux": DOCUMENTS,
    "score": ALIBI | CAUSAL,
    "d64-fp16-causal": {"dtype": "float16", "head_dim": 64, "head_dim_v": 64, **CAUSAL},
    "deterministic-window": IN_ORDER | WINDOW | CAUSAL,
    "d72-dv40": {"head_dim": 72, "head_dim_v": 40},
    "d192-dv128-causal": D192_128 | CAUSAL,
    "d192-dv128-window-deterministic": D192_128 | WINDOW | CAUSAL | IN_ORDER,
    "d192-dv128-columns-1": D192_128 | CAUSAL_COLUMNS[1],
    "d192-dv128-columns-2": D192_128 | CAUSAL_COLUMNS[2],
    "d192-dv128-columns-4": D192_128 | COLUMNS[4],
    "d192-dv128-mask-lists": {**D192_128, **DOCUMENTS, "has_bits": True},
    "d192": D192,
    "d96-score": D96 | ALIBI | CAUSAL,
    "d80-softcap": {**D80, "has_softcap": True},
    "d96-columns-2": D96 | COLUMNS[2],
    "d72-deterministic": D72 | IN_ORDER,
    "d160-window": {"head_dim": 160, "head_dim_v": 160, **WINDOW},
    "d136-dv96-varlen": {"head_dim": 136, "head_dim_v": 96, **VARLEN},
    "d256": D256,
    "d256-causal-columns-1-softcap": {**D256, **CAUSAL_COLUMNS[1], "has_softcap": True},
    "d256-varlen-columns-2": D256 | CAUSAL_COLUMNS[2] | VARLEN,
    "d256-mask-bits": {**D256, **DOCUMENTS, "has_bits": True},
    "full-4k": {},
    "d80-4k": D80,
    "d256-window-deterministic": D256 | WINDOW | CAUSAL | IN_ORDER,
    **{
        f"common-keys{name}": {"varlen_q": True, "shared_kv": True, "q_start": "each"} | fields
        for name, fields in {
            "-causal": CAUSAL,
            "-window-in-order": WINDOW | IN_ORDER,
            "-columns-2": COLUMNS[2],
            "-mods": ALIBI | DOCUMENTS,
            "-d256-causal": D256 | CAUSAL,
        }.items()
    },
}
# Keys of a sequence, for which sums of dQ are cleared; 8192 for the others.
SEQLENS_K = {"causal-32k": 32768, "full-4k": 4096, "d80-4k": 4096}
# Bytes; the others have none.
# Mask warps, where values or sums leave them 24 registers, once a block that is cut; and places of
# dK and dV in memory, once a work tile.
SPILLS = {
    "columns-1-causal-bits": 16,
    "d160-window": 108,
    "d192-dv128-columns-2": 68,
    "d192-dv128-columns-4": 180,
    "d192-dv128-mask-lists": 404,
}
# Wide heads of which each warpgroup has keys of its own.
SPLITS_KEYS = (
    *(f"d192-dv128-{x}" for x in ("causal", "window-deterministic", "mask-lists")),
    *(f"d192-dv128-columns-{n}" for n in (1, 2, 4)),
    *("d160-window", "d136-dv96-varlen"),
)


def problem_of(fields: dict[str, Any]) -> tuple[AttentionProblem, Mods]:
    fields = dict(fields)
    mods = NO_MODS
    for kind, table in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS)):
        if kind in fields:
            mods = mods._replace(**{kind: table[fields[kind]].cute})
            fields[kind] = callable_key(getattr(mods, kind))
    problem = replace(PLAIN, **fields)
    as_called = may_empty_rows(problem, (0, 0), (None, None))
    return replace(problem, may_empty_rows=problem.may_empty_rows or as_called), mods


@SWEEP
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_well(name: str) -> None:
    problem, mods = problem_of(VARIANTS[name])
    choice = select_bwd_config(
        *(problem.head_dim, problem.head_dim_v, problem.tuning_class),
        seqlen_k=SEQLENS_K.get(name, 8192),
        deterministic=problem.deterministic,
        modifier=problem.score_modifier,
    )
    splits_keys, is_alone = name in SPLITS_KEYS, problem.has_softcap or problem.deterministic
    in_pairs = problem.head_dim > 128 and not (is_alone or splits_keys)
    assert (choice.tiles.cta_pair, choice.tiles.splits_keys) == (in_pairs, splits_keys)
    assert choice.tiles.clears_dq == (name in SEQLENS_K or in_pairs)
    with compile_lock():
        meta = build_bwd(problem, choice, TARGET, mods).meta
    facts = f"{name}: {meta}"
    assert meta["registers"], facts
    assert meta["spill_bytes"] <= SPILLS.get(name, 0), facts
    assert not meta["warnings"], facts
    assert meta["smem_bytes"] == choice.smem_bytes <= 232448, facts


# what every Blackwell compiles, and what the second one does
BLACKWELL = {
    **{
        name: fields
        for name, fields in VARIANTS.items()
        if name not in SEQLENS_K
    },
    **{
        f"d{d}-dv{d_v}{name}": {"head_dim": d, "head_dim_v": d_v, **fields}
        for d, d_v in ((192, 128), (192, 192), (256, 128), (128, 256), (256, 256))
        for name, fields in {"": {}, "-softcap": {"has_softcap": True}}.items()
    },
    "d256-lists-in-order": {
        "head_dim": 256, "head_dim_v": 256, "has_bits": True, "deterministic": True,
    },
    "d256-score": {"head_dim": 256, "head_dim_v": 256, "score_mod": "alibi"},
    **{
        f"d{d}{name}": {"head_dim": d, "head_dim_v": d, **fields}
        for d in (64, 96)
        for name, fields in {
            "": {},
            "-columns-4-empty-rows": {"intervals": (4, False), "may_empty_rows": True},
            "-lists-in-order": {"has_bits": True, "deterministic": True},
            "-softcap-causal": {"has_softcap": True, "is_causal": True},
        }.items()
    },
    "learned": {"score_mod": "head_bias", "aux": (("float32", 1),), "wants_aux": (0,)},
    **{
        f"pair-{name}": VARIANTS[name]
        for name in ("window", "causal-more-queries", "seqused", "columns-1-causal-bits",
                     "mask-aux")
    },
    **{
        f"pair-d{d}-{name}": VARIANTS[name] | {"head_dim": d, "head_dim_v": d_v}
        for d, d_v in ((192, 128), (256, 256))
        for name in ("full", "window", "causal-more-queries", "seqused", "columns-1-causal-bits",
                     "mask-aux")
    },
    **{
        f"pair-d{d}-{name}-in-order": VARIANTS[name]
        | {"head_dim": d, "head_dim_v": d_v, "deterministic": True}
        for d, d_v in ((128, 128), (192, 128), (256, 256))
        for name in ("full", "window", "seqused", "dense-seqused", "varlen-causal", "columns-2",
                     "common-keys-causal", "mask-aux", "columns-1-causal-bits")
    },
    **{
        f"pair-d{d}-{name}": VARIANTS[name] | {"head_dim": d, "head_dim_v": d_v}
        for d, d_v in ((128, 128), (192, 128), (256, 256))
        for name in ("common-keys-causal", "dense-seqused")
    },
}  # fmt: skip
# Bytes; the others have none. The number of the warp, stored once and loaded again in nine places:
# what claims work tiles for a pair takes uniform registers, beside lists and intervals in order.
BLACKWELL_SPILLS = {"pair-d256-columns-1-causal-bits-in-order": 44}
SECOND = (
    *("full", "causal", "window", "varlen-causal", "softcap"),
    *("d64", "d96", "d64-softcap-causal", "d96-softcap-causal"),
    *(name for name in BLACKWELL if "-dv" in name or name.startswith("pair")),
)


@SWEEP
@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, "sm_100a") for name in BLACKWELL] + [(name, "sm_103a") for name in SECOND],
)
def test_compiles_well_for_blackwell(name: str, arch: str) -> None:
    problem, mods = problem_of(BLACKWELL[name])
    target = Target.named(arch)
    override = BwdConfig(cta_pair=True) if name.startswith("pair") else None
    choice = select_bwd_config(
        *(problem.head_dim, problem.head_dim_v, problem.tuning_class),
        override,
        deterministic=problem.deterministic,
        modifier=problem.score_modifier,
        kernel=arch_spec(target).backward,
    )
    assert choice.tiles.cta_pair or not override
    with compile_lock():
        meta = build_bwd(problem, choice, target, mods).meta
    facts = f"{name}: {meta}"
    # a fifth of the register file for each of five warpgroups, which they share out
    assert meta["registers"] == 96, facts
    assert meta["spill_bytes"] <= BLACKWELL_SPILLS.get(name, 0), facts
    assert not meta["warnings"], facts
    assert meta["smem_bytes"] <= 232448, facts


def test_every_row_of_blackwell_is_compiled() -> None:
    """For both devices, with a soft cap and without."""
    rows = {(row.max_dim, row.max_dim_v) for row in SM100_BWD}
    for names in (BLACKWELL, SECOND):
        for has_softcap in (False, True):
            found = [PLAIN_FIELDS | BLACKWELL[name] for name in names]
            dims = {
                (x["head_dim"], x["head_dim_v"])
                for x in found
                if x["has_softcap"] == has_softcap and "score_mod" not in x
            }
            assert rows <= dims


@SWEEP
def test_one_set_of_kernels_per_problem(tmp_path: Path) -> None:
    """Sizes are not part of a problem, and equal problems compile once."""
    cache = CompileCache(tmp_path)

    def kernels_of(case: Case, **more: Any) -> BwdKernels:
        inputs = make_inputs(case)
        keywords = bwd_keywords(inputs) | more
        found = planned(inputs, TARGET, direction=Direction.BACKWARD, **keywords)
        facts = found.gradients
        assert facts is not None
        return compile_bwd(found.problem, found.bwd_choice, TARGET, Mods(), facts, cache)

    first = Case("first", 1, 60, 70, 4, 4, causal=True, window_left=20, sink=BF16)
    before = compile_count()
    kernels = kernels_of(first)
    assert compile_count() == before + 3
    for other in (
        replace(first, id="lengths", seqlen_q=130, seqlen_k=300),
        replace(first, id="batch", batch=3),
        replace(first, id="heads", heads_q=3, heads_kv=3),
        replace(first, id="window", window_left=5, softmax_scale=0.2),
        replace(first, id="equal tensors", strided="transposed"),
    ):
        assert kernels_of(other) == kernels, other.id
    assert compile_count() == before + 3
    # what the kernels around the main one do not depend on compiles the main one only
    assert kernels_of(replace(first, causal=False))[::2] == kernels[::2]
    assert compile_count() == before + 4
    # new gradients of packed sequences are cleared by one more
    packed = replace(first, id="packed", lengths_q=(30, 7), lengths_k=(20, 50))
    assert kernels.zero_padding is None and kernels_of(packed).zero_padding is not None
    assert compile_count() == before + 8
    # a group of heads that is split has a main kernel of its own, and one that adds the parts
    split = kernels_of(replace(first, id="split", heads_kv=2), config={"group_splits": 2})
    assert kernels.add_parts is None and split.add_parts is not None
    assert split.preprocess is kernels.preprocess and split.main is not kernels.main
    assert compile_count() == before + 10


def test_public_paths() -> None:
    from flash_mask_cute import flash_bwd
    from flash_mask_cute.sm90.flash_bwd import FlashAttentionBackwardSm90
    from flash_mask_cute.sm100.flash_bwd import FlashAttentionBackwardSm100

    assert flash_bwd.FlashAttentionBackwardSm90 is FlashAttentionBackwardSm90
    assert flash_bwd.FlashAttentionBackwardSm100 is FlashAttentionBackwardSm100
