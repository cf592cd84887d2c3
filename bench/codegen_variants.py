"""The kernels that bench.codegen compiles: attention in both directions, and those around it.

A variant names a kernel that the configuration can choose. `compile_variant` compiles one without a
GPU, with the tiles that a call of this kind would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, get_args

from flash_mask_cute.call.batch_sums import build_shared_sums
from flash_mask_cute.call.build_backward import (
    Padding,
    PaddingFacts,
    PartFacts,
    RowFacts,
    build_add_parts,
    build_bwd,
    build_postprocess,
    build_preprocess,
    build_zero_padding,
)
from flash_mask_cute.call.execution_plan import DifferenceTables, SharedSums, ShortTile
from flash_mask_cute.call.forward import NO_MODS, build_fwd
from flash_mask_cute.call.problem import (
    AttentionProblem,
    FwdShapes,
    GivenTensor,
    Mods,
    may_empty_rows,
)
from flash_mask_cute.call.settings import BwdConfig
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import (
    WalkFacts,
    select_bwd_config,
    select_fwd_config,
)
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.mask_prep.block_scan import ScanProblem, compile_scan
from flash_mask_cute.mask_prep.column_bounds import compile_column_bounds
from flash_mask_cute.mask_prep.documents import compile_split
from flash_mask_cute.mask_prep.mask_bits import BitTiles, Form, MaskBitsProblem, compile_mask_bits
from flash_mask_cute.mods.read_classes import SummedBy, SummedDifference
from flash_mask_cute.mods.traits import difference_reads
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.target import Target

SEQLEN, HEADS, GROUP = 8192, 32, 4
WINDOW = SEQLEN // 16
SM90, SM100, SM103 = "sm_90a", "sm_100a", "sm_103a"


def sees_prefix(b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    return (k <= q) | (k < 64)


def nears(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    import cutlass

    return score - 0.125 * (q - k).to(cutlass.Float32)


def adds_bias(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    return score + aux_tensors[0][h[0], k[0]]


def multiplies(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    return score * aux_tensors[0][h[0], 0]


def multiplies_queries(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    return score * aux_tensors[0][h[0], q[0]]


def adds_pairs(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    return score + aux_tensors[0][h[0], q[0], k[0]]


def adds_rows(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    """Of the distance in the columns of a grid."""
    distance = (q[0] - q[0] // 90 * 90) - (k[0] - k[0] // 90 * 90)
    return score + aux_tensors[0][h[0], abs(distance)]


def adds_near(score: Any, b: Any, h: Any, q: Any, k: Any, aux_tensors: Any) -> Any:
    """Of a distance, one element for all that are farther."""
    import cutlass

    return score + aux_tensors[0][h[0], cutlass.min(abs(q[0] - k[0]), 128)]


@dataclass(frozen=True)
class AttentionVariant:
    """An attention kernel.

    problem: without the keys of its callables, which mods has. window: how many keys a query sees
    at most, where a window is closed on both sides. block_size: that of block lists. splits_group:
    a backward whose groups of heads are split over CTAs. cta_pair: of a backward, if not as the
    table has it. decode_rows: as in `RowFacts`. summed_by: who sums the gradient of what a
    score_mod reads by a difference, which has a table.
    """

    problem: AttentionProblem
    mods: Mods = Mods()
    window: int | None = None
    is_backward: bool = False
    arch: str = SM90
    block_size: tuple[int, int] | None = None
    splits_group: bool = False
    cta_pair: bool | None = None
    decode_rows: int | None = None
    selected_block: int = 0
    summed_by: SummedBy | None = None


@dataclass(frozen=True)
class PreparingVariant:
    """A kernel that runs before or after attention. build: compiles it for a target."""

    build: Callable[[Target], Compiled]
    arch: str = SM90
    is_backward = False


Variant: TypeAlias = AttentionVariant | PreparingVariant


class Built(NamedTuple):
    """tiles: those of an attention kernel, by name."""

    compiled: Compiled
    tiles: dict[str, Any]


class Uncached(CompileCache):
    """Builds at every look-up, so that the function has what the compiler was told to keep."""

    def get(self, name: str, key: Any, build: Callable[[], Compiled], **identity: Any) -> Compiled:
        return build()


def compile_variant(name: str) -> Built:
    """Compile it now. Whoever calls holds `compile_lock`."""
    variant = VARIANTS[name]
    target = Target.named(variant.arch)
    if isinstance(variant, PreparingVariant):
        return Built(variant.build(target), {})
    given = variant.mods._asdict()
    keys: dict[str, Any] = {kind: callable_key(mod) for kind, mod in given.items() if mod}
    problem = replace(variant.problem, **keys)
    dims = problem.head_dim, problem.head_dim_v
    if variant.is_backward:
        choice = select_bwd_config(
            *dims,
            problem.tuning_class,
            None if variant.cta_pair is None else BwdConfig(cta_pair=variant.cta_pair),
            seqlen_k=SEQLEN,
            deterministic=problem.deterministic,
            modifier=problem.score_modifier,
            kernel=arch_spec(target).backward,
            walk=WalkFacts(
                variant.window,
                has_lists=problem.has_bits,
                lists_per_warpgroup=variant.block_size,
            ),
            listed_rows=problem.listed_rows,
            query_lists=problem.query_lists,
        )
        if variant.splits_group:
            choice = replace(choice, tiles=replace(choice.tiles, splits_group=True))
        mods = variant.mods
        if variant.summed_by is not None:
            problem, mods = _with_sums(problem, mods, variant.summed_by)
        compiled = build_bwd(problem, choice, target, mods)
        return Built(compiled, {"tile_n": choice.tile_n, **asdict(choice.tiles)})
    shapes = FwdShapes(1, SEQLEN, SEQLEN, SEQLEN, SEQLEN, HEADS, HEADS, *dims)
    spec = arch_spec(target).of(problem)
    walk = WalkFacts(
        variant.window, variant.block_size, variant.decode_rows, variant.selected_block
    )
    tiles = select_fwd_config(problem, shapes, walk=walk, spec=spec).tiles
    fields = spec.forward.options(tiles)
    return Built(build_fwd(problem, tiles, target, variant.mods), fields)


def _with_sums(
    problem: AttentionProblem, mods: Mods, by: SummedBy
) -> tuple[AttentionProblem, Mods]:
    """With a table of the only read of a score_mod, and sums of its gradient by difference."""
    from flash_mask_cute.mods.difference_reads import ModWithTables

    assert mods.score_mod is not None
    reads = difference_reads(mods.score_mod, problem)
    summed = tuple(SummedDifference(read, 256, by) for read in reads)
    tables = DifferenceTables(reads, ((1, HEADS, 256),) * len(reads), ("float32",), summed)
    reading = ModWithTables(mods.score_mod, len(problem.aux), reads, summed)
    return replace(problem, **tables.problem_fields()), mods._replace(score_mod=reading)


# -- attention ----------------------------------------------------------------------------------


def _variant(d: int, *more: Any, dim_v: int | None = None, **fields: Any) -> AttentionVariant:
    return AttentionVariant(AttentionProblem("bfloat16", d, dim_v or d, **fields), *more)


def _both_directions() -> Iterator[tuple[str, AttentionVariant]]:
    """What a forward and a backward of Hopper have in common."""
    for d in (64, 128, 256):
        yield f"d{d}-full", _variant(d)
        yield f"d{d}-causal", _variant(d, is_causal=True)
        yield f"d{d}-window", _variant(d, Mods(), WINDOW + 1, is_causal=True, has_window_left=True)
        yield f"d{d}-varlen", _variant(d, is_causal=True, varlen_q=True, varlen_k=True)
    for d in (64, 128):
        for n, causal in ((1, True), (2, True), (4, False)):
            yield f"d{d}-columns{n}", _variant(d, is_causal=causal, intervals=(n, causal))
    yield "d128-mask_mod", _variant(128, Mods(mask_mod=sees_prefix))
    yield "d128-score_mod", _variant(128, Mods(score_mod=nears), is_causal=True)
    for d in (72, 80):
        yield f"d{d}-full", _variant(d)
        yield f"d{d}-causal", _variant(d, is_causal=True)
    yield "d192v128-columns2", _variant(192, dim_v=128, is_causal=True, intervals=(2, True))
    for d, dim_v in ((96, 96), (136, 136), (160, 160), (192, 192), (192, 128)):
        name = f"d{d}" if d == dim_v else f"d{d}v{dim_v}"
        yield f"{name}-full", _variant(d, dim_v=dim_v)
        yield f"{name}-causal", _variant(d, dim_v=dim_v, is_causal=True)
        yield f"{name}-columns1", _variant(d, dim_v=dim_v, is_causal=True, intervals=(1, True))
    yield "d64-mask_mod", _variant(64, Mods(mask_mod=sees_prefix))
    yield "d64-score_mod", _variant(64, Mods(score_mod=nears), is_causal=True)
    yield "d128-bias", _variant(128, Mods(score_mod=adds_bias), aux=(("float32", 2),))
    yield "d128-softcap", _variant(128, is_causal=True, has_softcap=True)
    used = {"has_seqused_q": True, "has_seqused_k": True}
    yield "d128-seqused", _variant(128, is_causal=True, **used)
    for d in (64, 128):
        yield f"d{d}-stored_mask", _variant(d, reads_mask_bits=True)
        documents = _variant(d, reads_mask_bits=True, varlen_q=True, varlen_k=True)
        yield f"d{d}-documents", documents
    yield "d128-float16", AttentionVariant(AttentionProblem("float16", 128, 128, is_causal=True))


def _forwards() -> Iterator[tuple[str, AttentionVariant]]:
    yield from _both_directions()
    lists = {"has_lists": True, "has_full_lists": True}
    yield "d128-lists", replace(_variant(128, **lists), block_size=(128, 128))
    with_mod = _variant(128, Mods(mask_mod=sees_prefix), **lists)
    yield "d128-lists-mask_mod", replace(with_mod, block_size=(128, 128))
    yield "d128-list_bits", _variant(128, has_bits=True, **lists)
    for d in (64, 128):
        own = _variant(d, lists_per_warpgroup=True, **lists)
        yield f"d{d}-own_lists", replace(own, block_size=(64, 64))
    for d, dtype in ((32, "float32"), (64, "bfloat16")):
        # a table for all batch entries, and a mask of keys
        fields = {"bias_bits": 32 if dtype == "float32" else 16, "reads_mask_bits": True}
        mods = Mods(score_mod=adds_pairs)
        yield f"d{d}-kept_rows", _variant(d, mods, aux=((dtype, 3),), **fields)
    yield "d128-sink", _variant(128, is_causal=True, sink_dtype="bfloat16")
    yield "d128-packed_heads", _variant(128, is_causal=True, packed_heads=GROUP)
    yield "d128-no_lse", _variant(128, is_causal=True, needs_lse=False)
    for d in (320, 384, 512):
        yield f"d{d}-full", _variant(d)
        yield f"d{d}-causal", _variant(d, is_causal=True)
        yield f"d{d}-columns1", _variant(d, is_causal=True, intervals=(1, True))
    yield "d512-mask_mod", _variant(512, Mods(mask_mod=sees_prefix))
    yield "d512-score_mod", _variant(512, Mods(score_mod=nears), is_causal=True)


def _statistics() -> Iterator[tuple[str, AttentionVariant]]:
    """All statistics of a walk, of one query or many; of keys with exact sums; of few rows."""
    names = "key_sums", "entropy", "block_sums", "block_maxima"
    for d in (64, 96, 128, 192, 256):
        keys = 64 if d == 256 else 128
        all_of: dict[str, Any] = {"statistics": names, "statistics_block": (4, keys, True)}
        yield f"statistics-d{d}-full", _variant(d, packed_heads=GROUP, **all_of)
        all_of["statistics_block"] = 16, keys, False
        yield f"statistics-d{d}-causal", _variant(d, is_causal=True, **all_of)
        exact = _variant(d, is_causal=True, deterministic=True, statistics=names[:1])
        yield f"statistics-d{d}-exact", exact
    for mods in (Mods(mask_mod=sees_prefix), Mods(score_mod=nears)):
        kind = "mask_mod" if mods.mask_mod else "score_mod"
        yield f"statistics-d128-{kind}", _variant(128, mods, statistics=names)
    few = _variant(128, packed_heads=GROUP, statistics=names[:1])
    yield "statistics-decode-d128", replace(few, decode_rows=GROUP)


def _tangents() -> Iterator[tuple[str, AttentionVariant]]:
    names = "full", "causal", "window", "varlen", "columns1", "columns2", "columns4", "mask_mod"
    of_both = dict(_both_directions())
    for name in (*(f"d{d}-{mask}" for d in (64, 128) for mask in names), "d96-causal"):
        variant = of_both[name]
        problem = replace(variant.problem, is_tangent=True)
        yield f"tangent-{name}", replace(variant, problem=problem)


def _selections() -> Iterator[tuple[str, AttentionVariant]]:
    """Of 16 heads and blocks of 128 keys: bits of a selection, beside a mask_mod that the heads
    share, and the entries of one query, in shares. Smaller blocks are gathered."""
    of_selection: dict[str, Any] = {"has_selected": True, "packed_heads": 16}
    yield "d128-choice", _selection(is_causal=True, **of_selection)
    mods = Mods(mask_mod=sees_prefix)
    yield "d128-choice-mask_mod", _selection(mods, shares_mask=True, **of_selection)
    entries: dict[str, Any] = {
        "selection_dtype": "int32",
        "split": BY_STREAM_K,
        "has_seqused_k": True,
    }
    yield "decode-d128-choice", replace(_selection(**of_selection, **entries), decode_rows=16)
    entries |= {"in_fp8": True, "few_rows": True, "page_box": 128}
    entries["optional"] = tuple(GivenTensor(f"{x}_descale", "float32", 3) for x in "kv")
    yield "decode-d128-choice-fp8", replace(_selection(**of_selection, **entries), decode_rows=16)
    for d, block in ((256, 4), (128, 8)):
        gathered = _variant(d, is_causal=True, gathers=block, **of_selection)
        yield f"d{d}-choice{block}", replace(gathered, selected_block=block)
        gathered = _variant(d, gathers=block, split=BY_STREAM_K, has_seqused_k=True, **of_selection)
        yield f"decode-d{d}-choice{block}", replace(gathered, selected_block=block, decode_rows=16)


def _selection(mods: Mods = NO_MODS, **fields: Any) -> AttentionVariant:
    return replace(_variant(128, mods, **fields), selected_block=128)


def _decoding() -> Iterator[tuple[str, AttentionVariant]]:
    """One query of a group of 8 heads, in shares; pages of one key are copied row by row."""
    for d in (64, 128):
        for kind, in_fp8 in (("", False), ("-fp8", True)):
            for pages, box in (("", None), ("-pages1", 1)):
                variant = _variant(
                    d, packed_heads=8, split=BY_STREAM_K, has_seqused_k=True, page_box=box,
                    in_fp8=in_fp8, few_rows=in_fp8,
                )  # fmt: skip
                yield f"decode-d{d}{kind}{pages}", replace(variant, decode_rows=8)
    shares: dict[str, Any] = {"packed_heads": 8, "split": BY_STREAM_K, "has_seqused_k": True}
    yield "decode-d512", replace(_variant(512, **shares), decode_rows=8)
    yield "decode-d512-pages16", replace(_variant(512, page_box=16, **shares), decode_rows=8)


def _backward(variant: AttentionVariant, **fields: Any) -> AttentionVariant:
    problem = replace(variant.problem, needs_lse=False, **fields)
    mods = variant.mods
    with_keys = replace(problem, mask_mod=mods.mask_mod and "", score_mod=mods.score_mod and "")
    empties = may_empty_rows(with_keys, (SEQLEN, SEQLEN), (None, None))
    problem = replace(problem, may_empty_rows=empties)
    return replace(variant, problem=problem, is_backward=True)


def _backwards() -> Iterator[tuple[str, AttentionVariant]]:
    """Those of both directions, lists, sums of dQ in a fixed order, and learned aux tensors."""

    for name, variant in _both_directions():
        yield f"bwd-{name}", _backward(variant)
    yield "bwd-d128-deterministic", _backward(_variant(128, is_causal=True, deterministic=True))
    yield "bwd-d256-deterministic", _backward(_variant(256, is_causal=True, deterministic=True))
    for d in (64, 128, 256):
        split = _backward(_variant(d, is_causal=True))
        yield f"bwd-d{d}-split_group", replace(split, splits_group=True)
    # both launches of heads by roles
    for d in (320, 384, 512):
        yield f"bwd-d{d}-causal", _backward(_variant(d, is_causal=True))
    yield "bwd-d512-full", _backward(_variant(512))
    yield "bwd-d512-varlen", _backward(_variant(512, is_causal=True, varlen_q=True, varlen_k=True))
    yield "bwd-d512-columns2", _backward(_variant(512, is_causal=True, intervals=(2, True)))
    yield "bwd-d512-list_bits", _backward(_variant(512, has_bits=True))
    yield "bwd-d512-mask_mod", _backward(_variant(512, Mods(mask_mod=sees_prefix)))
    for d in (64, 128):
        # of a group of 16 heads
        by_query_lists = _variant(d, is_causal=True, has_selected=True, query_lists=128)
        problem = replace(by_query_lists.problem, packed_heads=16)
        yield f"bwd-d{d}-token_lists", replace(by_query_lists, problem=problem, is_backward=True)
        # of 12 heads that see different keys, with gradients of what modifies scores
        facts: dict[str, Any] = {
            "may_empty_rows": True,
            "masks_by_head": True,
            "aux": (("float32", 2),),
        }
        problem = replace(by_query_lists.problem, packed_heads=12, wants_aux=(0,), **facts)
        mods = Mods(mask_mod=sees_prefix, score_mod=adds_bias)
        of_mods = replace(by_query_lists, problem=problem, mods=mods, is_backward=True)
        yield f"bwd-d{d}-token_lists-mods", of_mods
    yield "bwd-d128-list_bits", _backward(_variant(128, has_bits=True))
    own = _backward(_variant(128, has_bits=True, lists_per_warpgroup=True))
    yield "bwd-d128-own_lists", replace(own, block_size=(64, 64))
    learned = {"aux": (("float32", 2),), "wants_aux": (0,)}
    for d in (64, 128):
        yield f"bwd-d{d}-learned_bias", _backward(_variant(d, Mods(score_mod=adds_bias)), **learned)
        yield f"bwd-d{d}-learned_near", _backward(_variant(d, Mods(score_mod=adds_near)), **learned)
    for kind, mod in (("heads", multiplies), ("queries", multiplies_queries)):
        yield f"bwd-d128-gains_of_{kind}", _backward(_variant(128, Mods(score_mod=mod)), **learned)
    pairs = _variant(128, Mods(score_mod=adds_pairs), aux=(("float32", 3),), entries_first=True)
    yield "bwd-d128-entries_first", _backward(pairs)
    for by in (SummedBy.TURNS, SummedBy.MASKS):
        differs = _backward(_variant(128, Mods(score_mod=adds_rows)), **learned)
        yield f"bwd-d128-learned_rows-{by.value}", replace(differs, summed_by=by)


def _for(arch: str, variants: Iterator[tuple[str, AttentionVariant]]) -> dict[str, Variant]:
    """For an architecture of Blackwell."""
    prefix = arch.removesuffix("a").replace("_", "")
    return {f"{prefix}-{name}": replace(variant, arch=arch) for name, variant in variants}


# of the backwards of Hopper, those for Blackwell
BLACKWELL_BACKWARDS = (
    *(f"bwd-d{d}-{mask}" for d in (64, 96, 128) for mask in ("full", "causal")),
    *(f"bwd-d128-{mask}" for mask in ("window", "varlen", "columns2", "mask_mod", "score_mod")),
    *(f"bwd-d128-{x}" for x in ("softcap", "deterministic", "list_bits", "learned_bias")),
)


def _backwards_of_blackwell() -> Iterator[tuple[str, AttentionVariant]]:
    of_hopper = dict(_backwards())
    yield from ((name, of_hopper[name]) for name in BLACKWELL_BACKWARDS)
    for kind in ("full", "causal", "deterministic"):
        yield f"bwd-d128-alone-{kind}", replace(of_hopper[f"bwd-d128-{kind}"], cta_pair=False)
    for d, dim_v in ((192, 128), (192, 192), (256, 128), (128, 256), (256, 256)):
        wide = _backward(_variant(d, dim_v=dim_v, is_causal=True))
        yield f"bwd-d{d}v{dim_v}-causal", replace(wide, cta_pair=False)
    kinds: dict[str, dict[str, bool]] = {"full": {}, "causal": {"is_causal": True}}
    kinds["deterministic"] = kinds["causal"] | {"deterministic": True}
    for d, dim_v in ((192, 128), (256, 256)):
        for kind, fields in kinds.items():
            wide = _backward(_variant(d, dim_v=dim_v, **fields))
            yield f"bwd-d{d}v{dim_v}-pair-{kind}", replace(wide, cta_pair=True)


def _forwards_of_blackwell() -> Iterator[tuple[str, AttentionVariant]]:
    of_hopper = dict(_both_directions())
    for d, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        name = f"d{d}" if d == dim_v else f"d{d}v{dim_v}"
        for mask in ("full", "causal"):
            yield f"{name}-{mask}", of_hopper[f"{name}-{mask}"]
        yield f"{name}-columns2", _variant(d, dim_v=dim_v, is_causal=True, intervals=(2, True))
    for kind in ("varlen", "mask_mod", "score_mod", "softcap", "seqused"):
        yield f"d128-{kind}", of_hopper[f"d128-{kind}"]
    yield "d128-list_bits", _variant(128, has_lists=True, has_bits=True)


# -- around attention ---------------------------------------------------------------------------


def _preparing() -> Iterator[tuple[str, PreparingVariant]]:
    plain = RowFacts("bfloat16", 128, 64, 128, False, False, False)
    rows = {
        "plain": plain,
        "varlen": plain._replace(varlen_q=True),
        "seqused": plain._replace(has_seqused_q=True),
        "clears_dq": plain._replace(clears_dq=True),
        "d64": plain._replace(dim=64, tile_m=128, tile_d=64),
        "d256": plain._replace(dim=256, tile_d=256, clears_dq=True),
    }
    after = rows | {
        "lanes": plain._replace(tile_m=128, order="lanes"),
        "lanes-pair": plain._replace(tile_m=128, order="lanes", num_ctas=2),
        "d160-pair": plain._replace(dim=160, tile_d=160, clears_dq=True, num_ctas=2),
        "d192-pair": plain._replace(dim=192, tile_d=192, clears_dq=True, num_ctas=2),
    }
    before = rows | {
        "dlse": plain._replace(has_dlse=True),
        "marks": plain._replace(marked_dim=128),
        "any_size": plain._replace(num_stats=3, has_lse_low=True),
        "sink": plain._replace(has_dlse=True, sink_dtype="bfloat16"),
        "pair": plain._replace(tile_m=128, num_ctas=2),
    }
    for name, facts in before.items():
        yield f"preprocess-{name}", PreparingVariant(partial(build_preprocess, facts))
    for name, facts in after.items():
        yield f"postprocess-{name}", PreparingVariant(partial(build_postprocess, facts))
    parts = PartFacts("bfloat16", 128, 128, 128, 128, False, False, 128, "accumulators")
    yield "add_parts", PreparingVariant(partial(build_add_parts, parts))
    wide = parts._replace(head_dim=256, head_dim_v=256, tile_d=256, tile_dv=256, tile_n=64)
    by_rows = wide._replace(order="rows")
    yield "add_parts-rows", PreparingVariant(partial(build_add_parts, by_rows))
    padding = PaddingFacts("bfloat16", 128, 128, Padding(True, True, True))
    yield "zero_padding", PreparingVariant(partial(build_zero_padding, padding))
    of_pairs = SEQLEN, SharedSums((0,), 1, (0,))
    for d, reads_mask_bits in ((32, True), (128, False)):
        told: dict[str, Any] = {"aux": (("bfloat16", 3),), "reads_mask_bits": reads_mask_bits}
        build = partial(_sums, d, Mods(score_mod=adds_pairs), *of_pairs, **told)
        yield f"bwd_shared-d{d}", PreparingVariant(build)
    for name, d, tile in (
        ("64", 64, ShortTile(64, 64)),
        ("128", 128, ShortTile(128, 128)),
        ("windows", 32, ShortTile(144, 144)),
        ("keys", 32, ShortTile(384, 64, True)),
    ):
        is_learned = d == 32
        mods = Mods(score_mod=adds_rows) if is_learned else NO_MODS
        sums = SharedSums((0,) if is_learned else (), 1, (), (), tile)
        build = partial(_sums, d, mods, 64, sums, aux=(("float32", 2),) if is_learned else ())
        yield f"bwd_short-{name}", PreparingVariant(build)
    for form in get_args(Form):
        for side, tiles in (
            ("query", BitTiles.for_forward(128, 128)),
            ("key", BitTiles.for_backward(64, 128)),
        ):
            problem = MaskBitsProblem(tiles, (), has_bits=False, form=form)
            yield f"mask_bits-{form}-{side}", PreparingVariant(partial(_store, problem))
    for arch in (SM90, SM100):
        prefix = "" if arch == SM90 else "sm100-"
        for n, causal in ((1, True), (4, False)):
            yield f"{prefix}column_bounds{n}", PreparingVariant(partial(_bounds, n, False), arch)
            yield f"{prefix}document_split{n}", PreparingVariant(partial(_split, n, causal), arch)
        yield f"{prefix}column_bounds1-packed", PreparingVariant(partial(_bounds, 1, True), arch)
        yield f"{prefix}block_scan", PreparingVariant(_scan, arch)


def _sums(
    d: int, mods: Mods, seqlen_k: int, sums: SharedSums, target: Target, **fields: Any
) -> Compiled:
    """With the gradients of what a score_mod reads, if there is one."""
    problem = _backward(_variant(d, mods, **fields)).problem
    keyed = replace(problem, score_mod=mods.score_mod and "")
    choice = select_bwd_config(
        *(d, d, keyed.tuning_class),
        seqlen_k=seqlen_k,
        modifier=keyed.score_modifier,
        kernel=arch_spec(target).backward,
    )
    problem = problem if sums.short is None else keyed
    return build_shared_sums(mods.score_mod, problem, choice, sums, target)


def _store(problem: MaskBitsProblem, target: Target) -> Compiled:
    columns = arch_spec(target).load_columns()
    return compile_mask_bits(sees_prefix, problem, target, columns, Uncached())


def _bounds(num_vectors: int, is_packed: bool, target: Target) -> Compiled:
    return compile_column_bounds(num_vectors, is_packed, target.arch, cache=Uncached())


def _split(num_vectors: int, causal: bool, target: Target) -> Compiled:
    return compile_split(num_vectors, causal, target.arch, cache=Uncached())


def _scan(target: Target) -> Compiled:
    return compile_scan(sees_prefix, ScanProblem(target.arch), Uncached())


VARIANTS: dict[str, Variant] = {
    **dict(_forwards()),
    **dict(_backwards()),
    **_for(SM100, _forwards_of_blackwell()),
    **_for(SM103, _forwards_of_blackwell()),
    **_for(SM100, _backwards_of_blackwell()),
    **_for(SM103, _backwards_of_blackwell()),
    **dict(_preparing()),
    **dict(_decoding()),
    **dict(_selections()),
    **dict(_statistics()),
    **dict(_tangents()),
}
