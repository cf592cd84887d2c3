"""Compile the kernels of a backward from its problem, without real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flash_mask_cute.call.execution_plan import ExecutionPlan, GradientFacts, ShortTile
from flash_mask_cute.call.forward import NO_MODS, cached_attention
from flash_mask_cute.call.kernel_operands import (
    BACKWARD,
    fakes,
    leaves_sums,
    num_stats,
    stats_words,
)
from flash_mask_cute.call.problem import AttentionProblem, Mods, Padding
from flash_mask_cute.call.tiles.arch import DqOrder, arch_spec
from flash_mask_cute.call.tiles.config import BwdChoice
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, by_facts, compile_object, options_of
from flash_mask_cute.runtime.fake_tensors import int32_vector, operand, scratch, strided
from flash_mask_cute.runtime.target import Target

if TYPE_CHECKING:
    from flash_mask_cute.kernels.bwd_add_parts import SumsOrder

# keys of a tile that both warpgroups have
SHARED_TILE_N = 64
PREPROCESS_NAME = "bwd_preprocess"
POSTPROCESS_NAME = "bwd_postprocess"
ADD_PARTS_NAME = "bwd_add_parts"
ZERO_PADDING_NAME = "bwd_zero_padding"


class BwdKernels(NamedTuple):
    """The compiled functions. They take their arguments by position (`KernelBackward`), and None
    for those that the problem does not use.

    main: None where the kernel of short sequences (`call/batch_sums.py`) makes all gradients.
    postprocess: None there and in wide heads. add_parts: where CTAs leave sums of dk and dv, which
    main then takes in place of dk and dv. zero_padding: where there may be padding rows.
    """

    preprocess: Callable[..., Any]
    main: Callable[..., Any] | None
    postprocess: Callable[..., Any] | None
    zero_padding: Callable[..., Any] | None = None
    add_parts: Callable[..., Any] | None = None


class PaddingFacts(NamedTuple):
    """Facts that determine the code of the kernel that zeroes padding (`Padding`)."""

    dtype: str
    head_dim: int
    head_dim_v: int
    padding: Padding


class RowFacts(NamedTuple):
    """Facts that determine the code of the kernels before and after the main one.

    dim: head_dim_v before, head_dim after. num_ctas: CTAs that sum a row block of dQ, 0 if there
    are no sums. packing: see `Packing`. Only before: the fields from has_dlse to has_lse_low;
    marked_dim is head_dim, if rows of queries that see nothing are marked. Only after: order, of
    the sums of dQ, and in_halves (`BwdPostprocess`).
    """

    dtype: str
    dim: int
    tile_m: int
    tile_d: int
    varlen_q: bool
    has_seqused_q: bool
    clears_dq: bool
    has_dlse: bool = False
    sink_dtype: str | None = None
    marked_dim: int | None = None
    num_stats: int = 2
    has_lse_low: bool = False
    order: DqOrder = "accumulators"
    num_ctas: int = 1
    packing: tuple[int, int] = (1, 1)
    in_halves: bool = False


class PartFacts(NamedTuple):
    """Facts that determine the code of the kernel that adds partial sums of dK and dV."""

    dtype: str
    head_dim: int
    head_dim_v: int
    tile_d: int
    tile_dv: int
    varlen_k: bool
    has_seqused_k: bool
    tile_n: int
    order: SumsOrder


def num_row_blocks(rows: int, batch: int, is_packed: bool, tile_m: int) -> int:
    """Row blocks of a head in scratch tensors; rows: seqlen_q, or total_q if packed."""
    from flash_mask_cute.core import row_blocks

    return row_blocks.num_row_blocks(rows, batch, is_packed, tile_m)


def compile_bwd(
    problem: AttentionProblem,
    choice: BwdChoice,
    target: Target,
    mods: Mods,
    facts: GradientFacts,
    cache: CompileCache = CACHE,
) -> BwdKernels:
    """The compiled kernels, from the cache or built now. mods: the callables of problem's keys."""
    num_ctas = 1 if choice.tiles.clears_dq else choice.ctas_of_tile
    num_ctas = 0 if problem.is_wide else num_ctas
    preprocess = compile_preprocess(problem, choice, target, facts, num_ctas, cache)
    main = cached_attention(
        arch_spec(target).backward.cache_name,
        problem,
        choice.tiles,
        target,
        lambda: build_bwd(problem, choice, target, mods),
        cache,
    )
    postprocess = add_parts = None
    if not problem.is_wide:
        postprocess = compile_postprocess(problem, choice, target, cache).function
    dims = problem.head_dim, problem.head_dim_v
    if leaves_sums(problem, choice):
        sizes, lengths = (choice.tile_d, choice.tile_dv), (problem.varlen_k, problem.has_seqused_k)
        tile_n, order = problem.query_lists or choice.tile_n, _sums_order(problem, choice, target)
        parts = PartFacts(problem.dtype, *dims, *sizes, *lengths, tile_n, order)
        add_parts = by_facts(ADD_PARTS_NAME, parts, build_add_parts, target, cache).function
    zero_padding = None
    if any(facts.padding):
        padding = PaddingFacts(problem.dtype, *dims, facts.padding)
        made = by_facts(ZERO_PADDING_NAME, padding, build_zero_padding, target, cache)
        zero_padding = made.function
    return BwdKernels(preprocess.function, main.function, postprocess, zero_padding, add_parts)


def compile_short(plan: ExecutionPlan, tile: ShortTile) -> BwdKernels:
    """The kernels before and after that of short sequences."""
    problem, choice, target, facts = plan.problem, plan.bwd_choice, plan.target, plan.gradients
    assert facts is not None
    if not tile.several_keys:
        preprocess = compile_preprocess(problem, choice, target, facts, 0)
        return BwdKernels(preprocess.function, None, None)
    choice = replace(choice, tiles=replace(choice.tiles, clears_dq=True))
    preprocess = compile_preprocess(problem, choice, target, facts, 1)
    postprocess = compile_postprocess(problem, choice, target)
    return BwdKernels(preprocess.function, None, postprocess.function)


def compile_postprocess(
    problem: AttentionProblem, choice: BwdChoice, target: Target, cache: CompileCache = CACHE
) -> Compiled:
    """The kernel that writes dQ."""
    facts = _row_facts(problem, choice, problem.head_dim)._replace(
        order=arch_spec(target).backward.dq_order,
        num_ctas=choice.ctas_of_tile,
        in_halves=choice.tiles.splits_keys,
    )
    return by_facts(POSTPROCESS_NAME, facts, build_postprocess, target, cache)


def compile_preprocess(
    problem: AttentionProblem,
    choice: BwdChoice,
    target: Target,
    facts: GradientFacts,
    num_ctas: int,
    cache: CompileCache = CACHE,
) -> Compiled:
    """The kernel before the main one. num_ctas: as in `RowFacts`."""
    before = _row_facts(problem, choice, problem.head_dim_v)._replace(
        clears_dq=choice.tiles.clears_dq and num_ctas > 0,
        has_dlse=facts.has_dlse,
        sink_dtype=facts.sink_dtype,
        marked_dim=problem.head_dim if problem.may_empty_rows else None,
        num_stats=num_stats(problem),
        has_lse_low=facts.has_lse_low,
        num_ctas=num_ctas,
    )
    return by_facts(PREPROCESS_NAME, before, build_preprocess, target, cache)


def _row_facts(problem: AttentionProblem, choice: BwdChoice, dim: int) -> RowFacts:
    """Those of both kernels."""
    tiles, lengths = choice.tiles, (problem.varlen_q, problem.has_seqused_q)
    facts = RowFacts(problem.dtype, dim, tiles.tile_m, choice.tile_d, *lengths, tiles.clears_dq)
    if problem.query_lists:
        return facts._replace(packing=(problem.listed_rows, problem.packed_heads))
    return facts


def build_bwd(
    problem: AttentionProblem,
    choice: BwdChoice,
    target: Target,
    mods: Mods = NO_MODS,
) -> Compiled:
    """Compile the main kernel now. `meta`: smem_bytes, and what `compile_object` reports."""
    from flash_mask_cute.rules.intervals import Intervals

    backward = arch_spec(target).backward
    more: dict[str, Any] = {"lists_per_warpgroup": True} if problem.lists_per_warpgroup else {}
    if problem.query_lists:
        more = {
            "packed_heads": problem.listed_rows,
            "group_size": problem.packed_heads,
            "masks_by_head": problem.masks_by_head,
            "shares_tile": problem.query_lists == SHARED_TILE_N,
        }
    if problem.entries_first:
        more["entries_first"] = True
    kernel = backward.of(problem.head_dim).load_class()(
        fake_tensors.cutlass_dtype(problem.dtype),
        problem.head_dim,
        problem.head_dim_v,
        is_causal=problem.is_causal,
        is_local=problem.is_local,
        **mods._asdict(),
        wants_aux=problem.wants_aux,
        has_aux_tensors=bool(problem.aux),
        deterministic=problem.deterministic,
        intervals=None if problem.intervals is None else Intervals(*problem.intervals),
        num_sms=target.num_sms,
        may_empty_rows=problem.may_empty_rows,
        shared_kv=problem.shared_kv,
        **more,
        **backward.options(choice.tiles),
    )
    arguments = fakes(BACKWARD, problem, choice)
    smem_bytes = kernel.traits.smem_bytes
    return compile_object(kernel, arguments, options_of(target), smem_bytes=smem_bytes)


def build_preprocess(facts: RowFacts, target: Target) -> Compiled:
    """Compile the kernel of the row statistics now."""
    from flash_mask_cute.kernels.bwd_preprocess import BwdPreprocess, Packing

    rank = 3 if facts.varlen_q else 4
    kernel = BwdPreprocess(
        fake_tensors.cutlass_dtype(facts.dtype),
        facts.dim,
        facts.tile_m,
        has_reference=facts.num_stats == 3,
        packing=Packing(*facts.packing),
        has_marks=facts.marked_dim is not None,
        num_semaphores=facts.num_ctas,
    )
    has_marks, packed_heads = facts.marked_dim is not None, facts.packing[0]
    arguments = [
        operand(facts.dtype, rank, facts.dim),
        operand(facts.dtype, rank, facts.dim),
        strided(rank - 1, "float32"),
        strided(rank - 1, "float32") if facts.has_dlse else None,
        scratch(stats_words(facts.tile_m, facts.num_stats, has_marks, packed_heads)),
        scratch(facts.tile_m * facts.tile_d) if facts.clears_dq else None,
        None if facts.clears_dq or facts.num_ctas == 0 else strided(2),
        fake_tensors.vector(facts.sink_dtype),
        scratch() if facts.sink_dtype else None,
        fake_tensors.stream(),
        int32_vector(facts.varlen_q),
        int32_vector(facts.has_seqused_q),
        None if facts.marked_dim is None else operand(facts.dtype, rank, facts.marked_dim),
        strided(rank - 1, "float32") if facts.has_lse_low else None,
    ]
    return compile_object(kernel, arguments, options_of(target))


def build_postprocess(facts: RowFacts, target: Target) -> Compiled:
    """Compile the kernel that writes dQ now."""
    import cutlass

    from flash_mask_cute.kernels.bwd_postprocess import BwdPostprocess
    from flash_mask_cute.kernels.bwd_preprocess import Packing

    rank = 3 if facts.varlen_q else 4
    kernel = BwdPostprocess(
        fake_tensors.cutlass_dtype(facts.dtype),
        facts.dim,
        facts.tile_m,
        facts.tile_d,
        facts.order,
        facts.num_ctas,
        Packing(*facts.packing),
        facts.in_halves,
    )
    arguments = [
        scratch(facts.tile_m * facts.tile_d),
        None if facts.clears_dq else strided(2),
        operand(facts.dtype, rank, facts.dim),
        cutlass.Float32(1.0),
        fake_tensors.stream(),
        int32_vector(facts.varlen_q),
        int32_vector(facts.has_seqused_q),
    ]
    return compile_object(kernel, arguments, options_of(target))


def build_zero_padding(facts: PaddingFacts, target: Target) -> Compiled:
    """Compile the kernel that zeroes padding now."""
    from flash_mask_cute.kernels.zero_padding import ZeroPadding

    of_q, of_k, of_v = facts.padding
    arguments = [
        operand(facts.dtype, 3, facts.head_dim) if of_q else None,
        operand(facts.dtype, 3, facts.head_dim) if of_k else None,
        operand(facts.dtype, 3, facts.head_dim_v) if of_v else None,
        int32_vector(of_q),
        int32_vector(of_k or of_v),
        fake_tensors.stream(),
    ]
    return compile_object(ZeroPadding(), arguments, options_of(target))


def _sums_order(problem: AttentionProblem, choice: BwdChoice, target: Target) -> SumsOrder:
    """The order in which the main kernel leaves sums of dK and dV."""
    most = arch_spec(target).backward.limits().MAX_OWN_DIM
    is_wide = max(problem.head_dim, problem.head_dim_v) > most
    if problem.query_lists and not is_wide:
        return "lanes"
    return "rows" if is_wide and not choice.tiles.splits_keys else "accumulators"


def build_add_parts(facts: PartFacts, target: Target) -> Compiled:
    """Compile the kernel that adds partial sums of dK and dV now."""
    from flash_mask_cute.kernels.bwd_add_parts import BwdAddParts

    rank = 3 if facts.varlen_k else 4
    cols = facts.tile_d, facts.tile_dv
    arguments = [
        *(scratch(facts.tile_n * width) for width in cols),
        operand(facts.dtype, rank, facts.head_dim),
        operand(facts.dtype, rank, facts.head_dim_v),
        fake_tensors.stream(),
        int32_vector(facts.varlen_k),
        int32_vector(facts.has_seqused_k),
    ]
    dtype = fake_tensors.cutlass_dtype(facts.dtype)
    kernel = BwdAddParts(dtype, cols, facts.tile_n, facts.order)
    return compile_object(kernel, arguments, options_of(target))
