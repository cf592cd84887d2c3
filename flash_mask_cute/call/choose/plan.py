"""`plan`: all decisions about a call that follow from metadata, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TypeAlias

import torch

from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall, Direction, Tensors
from flash_mask_cute.call.check.pages import page_box_of
from flash_mask_cute.call.check.validate import check_head_dims, check_inputs
from flash_mask_cute.call.choose.arch import arch_spec
from flash_mask_cute.call.choose.aux_order import sums_in_order
from flash_mask_cute.call.choose.config import (
    ROWS_OF_LISTS,
    BwdChoice,
    BwdWalkFacts,
    FwdChoice,
    WalkFacts,
    select_bwd_config,
    select_fwd_config,
)
from flash_mask_cute.call.choose.copies import (
    Conversion,
    byte_conversion,
    common_conversion,
    has_common_kv,
    input_conversion,
    output_conversion,
    sink_conversion,
    split_scale,
    tma_strides,
)
from flash_mask_cute.call.choose.difference_tables import DifferenceTables, choose_tables
from flash_mask_cute.call.choose.entry_order import with_entry_order
from flash_mask_cute.call.choose.gradient_facts import GradientFacts
from flash_mask_cute.call.choose.group_splits import split_group
from flash_mask_cute.call.choose.kept_rows import with_row_bits
from flash_mask_cute.call.choose.mask_bits import (
    LIMITS,
    Limits,
    choose_mask_bits,
    packed_sequences,
    reading_mask_bits,
    shares_mask_bits,
)
from flash_mask_cute.call.choose.masks import ResolvedMasks
from flash_mask_cute.call.choose.packed import (
    as_rows,
    as_rows_bwd,
    call_by_documents,
    can_pack,
    packs_documents,
)
from flash_mask_cute.call.choose.refusals import (
    check_common_kv,
    check_order,
    refuse_causal_sequences,
    refuse_fp8,
    refuse_large_choice,
    refuse_segments,
    refuse_wide_heads,
)
from flash_mask_cute.call.choose.segments import Segments, choose_segments
from flash_mask_cute.call.choose.selected import has_equal_walks, with_choice_facts
from flash_mask_cute.call.choose.shared_sums import SharedSums, choose_shared_sums
from flash_mask_cute.call.choose.splits import (
    DECODE_ROWS,
    Splits,
    choose_split,
    decode_rows,
    refuse_splits,
)
from flash_mask_cute.call.choose.token_lists import with_token_lists
from flash_mask_cute.call.choose.widen import call_in_16_bits
from flash_mask_cute.call.problem import (
    AttentionProblem,
    FwdShapes,
    GivenTensor,
    fold_window,
    may_empty_rows,
    sink_dtype,
)
from flash_mask_cute.call.settings import given_fields
from flash_mask_cute.core.segments import BY_SEGMENTS, ONE_SEGMENT
from flash_mask_cute.core.shares import BY_ROWS, BY_SLOTS
from flash_mask_cute.core.value_halves import ctas_of_tile
from flash_mask_cute.limits import MAX_HEAD_DIM, OPEN_WINDOW
from flash_mask_cute.mask_prep.mask_bits import BitTiles, DocumentBitsPlan, MaskBitsPlan
from flash_mask_cute.masks.q_start import END, NO_START, QStart
from flash_mask_cute.mods.traits import computes_functions
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import FP8, dtype_name
from flash_mask_cute.runtime.named_tuples import replaced
from flash_mask_cute.runtime.target import Target

# what kernels take; the CPU path takes more
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Backend(Enum):
    """What runs a call. EMPTY: there are no queries or no keys, so nothing is launched."""

    CPU = "cpu"
    EMPTY = "empty"
    KERNEL = "kernel"


Choose: TypeAlias = Callable[[AttentionProblem], FwdChoice | BwdChoice]


@dataclass(frozen=True)
class ExecutionPlan:
    """The plan of a call of either direction.

    target: the target of the kernels or, on the CPU, of the tiles. problem: as the kernel sees it.
    softmax_scale may have any sign. Window sides are None if open. q_start is NONE if it has no
    effect.
    conversions: by name, of the caller's tensors that a kernel cannot read as they are.
    is_out_like_q: a forward's new out may be made like q. out_dtype: of a forward's out.

    mask_bits: the plan for evaluating a mask_mod once for all heads before attention. problem and
    shapes are then those of the kernel that reads the bits, and without_bits is the plan of a
    kernel that evaluates the callable itself. packed: the plan of the packed sequences that are
    computed instead, for a mask that may hold documents. splits: the splits in which a forward
    computes its work tiles; None: one pass. segments: of the keys, if sums have an order. wide: the
    plan of the call over keys and values in 16 bits, to which those in fp8 are converted before.
    tables: of differences that score_mod reads. shared: what a kernel makes that walks over batch
    entries, as gradients of aux tensors, which the problem then does not want.
    """

    direction: Direction
    backend: Backend
    target: Target
    device: torch.device
    shapes: FwdShapes
    problem: AttentionProblem
    choice: FwdChoice | BwdChoice
    masks: ResolvedMasks
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    q_start: QStart = NO_START
    gradients: GradientFacts | None = None
    conversions: dict[str, Conversion | None] = field(default_factory=dict)
    is_out_like_q: bool = False
    out_dtype: str = ""
    mask_bits: MaskBitsPlan | None = None
    without_bits: ExecutionPlan | None = None
    packed: ExecutionPlan | None = None
    wide: ExecutionPlan | None = None
    splits: Splits | None = None
    segments: Segments | None = None
    tables: DifferenceTables | None = None
    shared: SharedSums | None = None

    @property
    def fwd_choice(self) -> FwdChoice:
        assert isinstance(self.choice, FwdChoice)
        return self.choice

    @property
    def bwd_choice(self) -> BwdChoice:
        assert isinstance(self.choice, BwdChoice)
        return self.choice

    @property
    def is_short(self) -> bool:
        return self.shared is not None and self.shared.short is not None

    @property
    def bit_tiles(self) -> BitTiles:
        """The mask bit tiles that the kernel reads, if it reads any."""
        if isinstance(self.choice, BwdChoice):
            return BitTiles.for_backward(self.choice.tiles.tile_m, self.choice.tile_n)
        return BitTiles.for_forward(self.choice.tiles.tile_m, self.choice.tiles.tile_n)

    @property
    def walk_tile(self) -> tuple[int, int]:
        """Query rows and keys of a tile of the walk, or those with block lists of their own."""
        if isinstance(self.choice, BwdChoice):
            return self.choice.tiles.tile_m, self.choice.cluster_tile_n
        rows = ROWS_OF_LISTS if self.problem.own_lists else self.choice.tiles.cluster_tile_m
        return rows, self.choice.tiles.tile_n

    @property
    def out_shape(self) -> tuple[int, ...]:
        shapes = self.shapes
        rows = (shapes.total_q,) if self.problem.varlen_q else (shapes.batch, shapes.seqlen_q)
        return (*rows, shapes.heads_q, shapes.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, rows, heads, _ = self.out_shape
        return (*batch, heads, rows)

    @property
    def reads_lists(self) -> bool:
        """Whether the kernel reads block lists. Otherwise it takes them as bits, as does the kernel
        that evaluates a mask_mod before attention."""
        problem = self.problem
        is_read = not problem.reads_mask_bits and problem.q_start is None
        return self.direction is Direction.FORWARD and is_read

    def with_choice(self, choice: FwdChoice | BwdChoice) -> ExecutionPlan:
        """The plan with these tiles; they determine packing, and the form in which it takes block
        lists."""
        problem = self.problem
        if isinstance(choice, FwdChoice):
            problem = replace(problem, packed_heads=choice.packed_heads)
            problem = problem.with_few_rows(self.shapes)
        problem = self.masks.with_form_of_lists(problem, choice, arch_spec(self.target))
        return replace(self, problem=problem, choice=choice)


def target_of(q: torch.Tensor) -> Target:
    """The target of a call's kernels or, on the CPU, of its tiles."""
    return Target.from_device(q.device) if q.is_cuda else Target.default()


def plan(
    call: AttentionCall, target: Target | None = None, limits: Limits | None = None
) -> ExecutionPlan:
    """Check a call, and plan its execution.

    target: the target of the kernels. None: that of q's device, and the CPU path for a CPU tensor.
    limits: sizes of calls whose mask bits are shared, instead of `LIMITS`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming argument and value.
    """
    is_forward = call.direction is Direction.FORWARD
    shapes = check_inputs(call)
    device, start = call.tensors.q.device, call.options.q_start
    masks = ResolvedMasks.create(
        call.masks or NO_MASKS, call.options.causal, shapes, device, start.is_given
    )
    window = fold_window(
        call.options.causal or masks.is_causal,
        call.options.window_size_left,
        call.options.window_size_right,
    )
    causal_each, window = _with_causal_sequences(call.tensors.optional.causals, window)
    make = _fwd_problem if is_forward else _bwd_problem
    start = _first_position(call, shapes, masks, window)
    plain = replace(make(call, masks, window), **start.problem_fields())
    if not causal_each:
        plain = replace(plain, optional=tuple(x for x in plain.optional if x.name != "causals"))
    check_order(plain, masks, target or target_of(call.tensors.q))
    check_common_kv(plain)
    chosen, choose = _choose_tiles(call, shapes, masks, window, plain, target)
    chosen = replace(chosen, q_start=start)
    if packs_documents(call):
        packed = call_by_documents(call, chosen.problem.needs_lse)
        return replace(chosen, packed=plan(packed, target, limits))
    if chosen.backend is Backend.CPU:
        return chosen
    refuse_causal_sequences(chosen.problem, chosen.target, call.tensors.optional.causals)
    refuse_fp8(chosen.problem, chosen.target)
    refuse_segments(chosen.target, call.options.seqlen_k_per_split)
    chosen = _with_conversions(chosen, call.tensors)
    if chosen.backend is Backend.EMPTY:
        return chosen
    if is_forward and (wide := call_in_16_bits(call, shapes)) is not None:
        return replace(chosen, wide=plan(wide, target, limits))
    refuse_large_choice(chosen.masks, shapes.seqlen_k, call.direction)
    if _may_share_bits_instead(chosen, call):
        options = replaced(call.options, num_splits=1)
        one_pass = plan(replaced(call, options=options), target, limits)
        if one_pass.mask_bits is not None:
            return one_pass
    chosen = _with_mask_bits(chosen, choose, call, limits or LIMITS)
    facts = chosen.shapes, chosen.masks, chosen.choice, chosen.target
    if isinstance(choice := chosen.choice, BwdChoice):
        of = chosen.problem, *facts[:2], choice, chosen.target
        if (
            shared := choose_shared_sums(*of, may_be_short=not given_fields(call.config))
        ) is not None:
            problem = replace(chosen.problem, **shared.problem_fields(chosen.problem))
            chosen = replace(chosen, shared=shared, problem=problem)
            if chosen.is_short:
                return chosen
        chosen = replace(chosen, problem=with_entry_order(chosen.problem, *facts[:2], facts[3]))
    if (tables := choose_tables(chosen.problem, *facts)) is None:
        return chosen
    problem = replace(chosen.problem, **tables.problem_fields())
    return replace(chosen, tables=tables, problem=problem)


def _may_share_bits_instead(chosen: ExecutionPlan, call: AttentionCall) -> bool:
    """Whether the library chose splits of a call in which mask bits for all heads may be worth
    more: decoding waits for keys, more queries wait for the mask_mod."""
    by_library = chosen.splits is not None and call.options.num_splits == 0
    by_library = by_library and chosen.segments is None
    rows = chosen.shapes.seqlen_q * chosen.problem.packed_heads
    return by_library and chosen.masks.mask_mod is not None and rows > DECODE_ROWS


_FoldedWindow: TypeAlias = tuple[bool, int | None, int | None]


def _with_causal_sequences(
    causals: torch.Tensor | None, window: _FoldedWindow
) -> tuple[bool, _FoldedWindow]:
    """Whether a kernel asks which sequences are causal, and the window, of which they shorten the
    right side. The window of all others may be as wide as any sequence."""
    is_causal, left, right = window
    if causals is None or is_causal or (right is not None and right <= 0):
        return False, window
    return True, (False, left, OPEN_WINDOW if right is None else right)


def _problem(call: AttentionCall, masks: ResolvedMasks, window: _FoldedWindow) -> AttentionProblem:
    """The part of a call's problem that both directions share, without packing."""
    x, of, (is_causal, window_left, window_right) = call.tensors, call.tensors.lengths, window
    problem = AttentionProblem(
        dtype=dtype_name(x.q.dtype),
        head_dim=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        is_causal=is_causal,
        has_window_left=window_left is not None,
        has_window_right=window_right is not None,
        varlen_q=of.cu_seqlens_q is not None,
        varlen_k=of.cu_seqlens_k is not None,
        has_seqused_q=of.seqused_q is not None,
        has_seqused_k=of.seqused_k is not None,
        has_softcap=call.options.softcap != 0,
        needs_lse=False,
        common_kv=has_common_kv(call),
    )
    return replace(problem, **masks.problem_fields())


def _fwd_problem(
    call: AttentionCall, masks: ResolvedMasks, window: _FoldedWindow
) -> AttentionProblem:
    x, problem = call.tensors, _problem(call, masks, window)
    sink = x.learnable_sink
    problem = replace(
        problem,
        sink_dtype=None if sink is None else dtype_name(sink_dtype(sink)),
        needs_lse=call.options.return_lse or not (x.lse is x.lse_low is None),
        needs_max_scores=x.max_scores is not None,
        optional=tuple(
            GivenTensor(name, dtype_name(y.dtype), y.dim())
            for name, y in x.optional._asdict().items()
            if y is not None
        ),
        in_fp8=x.k.dtype == FP8,
    )
    if masks.score_mod is None:
        return problem
    return replace(
        problem,
        score_functions=computes_functions(masks.score_mod, problem),
        needs_lse_low=x.lse_low is not None,
    )


def _bwd_problem(
    call: AttentionCall, masks: ResolvedMasks, window: _FoldedWindow
) -> AttentionProblem:
    """As `_fwd_problem`; `may_empty_rows` depends on shapes and is added later."""
    problem = _problem(call, masks, window)
    score_mod_bwd, daux = call.backward.score_mod_bwd, call.tensors.gradients.daux
    exact_aux: tuple[int, ...] = ()
    entry_aux: tuple[int, ...] = ()
    wants_aux: tuple[int, ...] = ()
    if daux is not None and masks.score_mod is not None:
        wants_aux = tuple(i for i, x in enumerate(daux) if x is not None)
        if wants_aux and call.backward.deterministic:
            exact_aux, entry_aux = sums_in_order(call, masks.score_mod, problem, wants_aux)
    return replace(
        problem,
        score_mod_bwd=None if score_mod_bwd is None else callable_key(score_mod_bwd),
        has_lists=False,
        has_full_lists=False,
        has_bits=problem.has_lists,
        wants_aux=wants_aux,
        exact_aux=exact_aux,
        entry_aux=entry_aux,
        deterministic=call.backward.deterministic,
    )


def _first_position(
    call: AttentionCall, shapes: FwdShapes, masks: ResolvedMasks, window: _FoldedWindow
) -> QStart:
    """The argument q_start, NONE if it has no effect."""
    start = call.options.q_start
    if not masks.rows_fit(shapes.seqlen_q):
        return start
    is_causal, left, right = window
    plain = (masks.score_mod, masks.mask_mod, masks.column_mask, masks.block_lists)
    return start.fold(
        is_banded=is_causal or not (left is right is None),
        counts_rows=any(y is not None for y in plain),
        is_square=shapes.seqlen_q == shapes.seqlen_k and not call.has_lengths,
    )


def _choose_tiles(
    call: AttentionCall,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    window: _FoldedWindow,
    problem: AttentionProblem,
    target: Target | None,
) -> tuple[ExecutionPlan, Choose]:
    """The plan of a kernel that evaluates all masks itself, and a function that chooses tiles for
    other problems with the same arguments."""
    q, out, scale = call.tensors.q, call.tensors.out, call.options.softmax_scale
    backend = Backend.EMPTY if shapes.is_empty else Backend.KERNEL
    if not q.is_cuda and (target is None or q.dtype not in KERNEL_DTYPES):
        backend = Backend.CPU
    elif backend is Backend.KERNEL:
        check_head_dims(problem.head_dim, problem.head_dim_v, runs_kernels=True)
        has_backward = call.direction is Direction.BACKWARD or call.options.is_recorded
        refuse_wide_heads(problem, has_backward, target or target_of(q))
    target = target or target_of(q)
    _, window_left, window_right = window
    gradients = sink = None
    if call.direction is Direction.FORWARD:
        problem = _with_split(call, problem, shapes, masks, window, target)
        problem = with_row_bits(problem, shapes, masks, target, call.config)
        choose = _fwd_chooser(call, problem, shapes, masks, window, target)
        sink = call.tensors.learnable_sink
    else:
        seqlens = shapes.seqlen_q, shapes.seqlen_k
        empties = may_empty_rows(problem, seqlens, (window_left, window_right))
        problem = replace(problem, may_empty_rows=empties)
        if masks.selected is not None:
            problem = with_token_lists(call, problem, shapes, masks, arch_spec(target))
            empties = problem.may_empty_rows
        choose = _bwd_chooser(call, shapes, masks, (window_left, window_right), target)
        if empties or call.tensors.gradients.dsink is not None:
            sink = call.tensors.learnable_sink
        gradients = GradientFacts.of(call, problem, sink)
    most = MAX_HEAD_DIM
    if call.direction is Direction.FORWARD:
        most = arch_spec(target).forward.most_head_dim
    choice = choose(_within_tables(problem, most))
    chosen = ExecutionPlan(
        direction=call.direction,
        backend=backend,
        target=target,
        device=q.device,
        shapes=shapes,
        problem=problem,
        choice=choice,
        masks=masks,
        softmax_scale=shapes.head_dim**-0.5 if scale is None else float(scale),
        window_left=window_left,
        window_right=window_right,
        softcap=float(call.options.softcap),
        gradients=gradients,
        conversions={"learnable_sink": sink_conversion(sink)},
        out_dtype=problem.dtype if out is None else dtype_name(out.dtype),
    )
    chosen = chosen.with_choice(choice)
    if call.direction is Direction.FORWARD:
        tile_n = chosen.fwd_choice.tiles.tile_n
        problem = with_choice_facts(chosen.problem, shapes, masks, tile_n)
        chosen = replace(chosen, problem=problem)
    if call.tensors.lengths.page_table is not None:
        tile_n, has_leftpad = chosen.fwd_choice.tiles.tile_n, problem.has("leftpad_k")
        # of keys that two CTAs share, each loads boxes
        of_box = tile_n // ctas_of_tile(problem.head_dim_v)
        box = page_box_of(call.tensors.k.shape[1], of_box, has_leftpad)
        chosen = replace(chosen, problem=replace(chosen.problem, page_box=box))
    if problem.is_ordered:
        chosen = _with_segments(chosen, call, window)
    elif problem.split == BY_SLOTS:
        tile_m = chosen.fwd_choice.tiles.tile_m
        num_shares = max(target.num_sms // ctas_of_tile(problem.head_dim_v), 1)
        by_slots = Splits.by_slots(chosen.problem, shapes, num_shares, tile_m)
        chosen = replace(chosen, splits=by_slots)
    elif problem.split is not None:
        by_rows = Splits.by_rows(chosen.problem, shapes, max(call.options.num_splits, 1))
        chosen = replace(chosen, splits=by_rows)
    return chosen, choose


def _with_split(
    call: AttentionCall,
    problem: AttentionProblem,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    window: _FoldedWindow,
    target: Target,
) -> AttentionProblem:
    """The problem with its way of computing work tiles in splits, if any.

    A kernel writes `out` in the dtype of q, and splits of it in float32. So an `out` in float32 is
    combined from splits, from a single one if no more are requested. Splits by slots do not serve
    for that: a kernel writes `out` itself where a work tile has one share.

    A single query sees the same keys without causal masking, and a kernel without masks does less.
    """
    may_pack, options = _may_pack(call, shapes, masks, target), call.options
    has_config = bool(given_fields(call.config))
    if options.seqlen_k_per_split is not None:
        # tiles say later how they are computed (`_with_segments`)
        split: str | None = ONE_SEGMENT
    else:
        split = choose_split(
            options.num_splits, problem, shapes, may_pack, _visible(window),
            target.num_sms // ctas_of_tile(problem.head_dim_v), has_config,
            has_equal_walks(shapes, masks),
        )  # fmt: skip
    out = call.tensors.out
    if split in (None, BY_SLOTS) and out is not None and out.dtype != call.tensors.q.dtype:
        refuse_splits(problem, f"out in {out.dtype} of q in {call.tensors.q.dtype}")
        split = BY_ROWS
    if split is None and not _decodes_whole(call, shapes, masks, target):
        return problem
    is_at_end = problem.q_start is None or options.q_start.kind == END
    sees_all = shapes.seqlen_q == 1 and not problem.varlen_q and is_at_end
    is_causal = problem.is_causal and not sees_all
    return replace(problem, split=split, is_causal=is_causal)


def _with_segments(
    chosen: ExecutionPlan, call: AttentionCall, window: _FoldedWindow
) -> ExecutionPlan:
    """The plan with the segments of its keys, for tiles that are chosen."""
    keys = call.options.seqlen_k_per_split
    assert keys is not None
    problem, shapes = chosen.problem, chosen.shapes
    is_wide = chosen.out_dtype != problem.dtype
    if is_wide:
        refuse_splits(problem, f"out in {chosen.out_dtype} of q in {problem.dtype}")
    segments = choose_segments(
        *(keys, chosen.fwd_choice.tiles, problem, shapes, _visible(window)),
        *(chosen.target.num_sms, is_wide),
    )
    problem, splits = replace(problem, split=segments.kind), None
    if segments.kind == BY_SEGMENTS:
        splits = Splits.by_rows(problem, shapes, segments.number)._replace(kind=BY_SEGMENTS)
    return replace(chosen, problem=problem, segments=segments, splits=splits)


def _within_tables(problem: AttentionProblem, most: int) -> AttentionProblem:
    """The problem with head dimensions that kernels have, whose tiles the CPU path takes. most: the
    widest."""
    head_dims = (problem.head_dim, problem.head_dim_v)
    if max(head_dims) <= most:
        return problem
    head_dim, head_dim_v = (min(x, most) for x in head_dims)
    return replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)


def _may_pack(call: AttentionCall, shapes: FwdShapes, masks: ResolvedMasks, target: Target) -> bool:
    """Whether query heads of a group can share a tile."""
    can_pack = shapes.heads_q // shapes.heads_kv <= arch_spec(target).forward.packed_rows
    return can_pack and masks.unpackable(shapes) is None and call.options.pack_gqa is not False


def _visible(window: _FoldedWindow) -> int | None:
    """The most keys that a query sees, if both sides are closed."""
    is_causal, left, right = window
    if left is None or not (is_causal or right is not None):
        return None
    return left + (right or 0) + 1


def _decodes_whole(
    call: AttentionCall, shapes: FwdShapes, masks: ResolvedMasks, target: Target
) -> bool:
    """Whether one pass over keys in rows takes a tile of decoding: few rows share keys, and the
    caller set no tiles. A forward that autograd records keeps the tiles of training."""
    chosen = given_fields(call.config).keys() - {"skip_blocks"}
    if call.options.is_recorded or chosen or not arch_spec(target).forward.decodes_whole:
        return False
    return decode_rows(shapes, _may_pack(call, shapes, masks, target)) <= DECODE_ROWS


def _fwd_chooser(
    call: AttentionCall,
    problem: AttentionProblem,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    window: _FoldedWindow,
    target: Target,
) -> Choose:
    is_paged = call.tensors.lengths.page_table is not None
    decodes = problem.split is not None or is_paged or _decodes_whole(call, shapes, masks, target)
    rows = decode_rows(shapes, _may_pack(call, shapes, masks, target)) if decodes else None
    return partial(
        select_fwd_config,
        shapes=shapes,
        pack_gqa=call.options.pack_gqa,
        override=call.config,
        walk=WalkFacts(
            _visible(window),
            masks.block_size,
            rows,
            0 if masks.selected is None else masks.selected.block_size,
        ),
        unpackable=masks.unpackable(shapes),
        spec=arch_spec(target),
        num_sms=target.num_sms,
    )


def _bwd_chooser(
    call: AttentionCall,
    shapes: FwdShapes,
    masks: ResolvedMasks,
    window: tuple[int | None, int | None],
    target: Target,
) -> Choose:
    kernel, override = arch_spec(target).backward, call.config
    splits = getattr(override, "group_splits", None)
    if not (kernel.splits_groups or splits in (None, 1)):
        raise ValueError(f"config group_splits={splits} is not for {kernel.class_name}")

    def choose(problem: AttentionProblem) -> BwdChoice:
        choice = select_bwd_config(
            *(problem.head_dim, problem.head_dim_v, problem.tuning_class),
            override=override,
            seqlen_k=shapes.seqlen_k,
            deterministic=call.backward.deterministic,
            modifier=problem.score_modifier,
            num_sms=target.num_sms,
            kernel=kernel,
            walk=BwdWalkFacts(
                _visible((problem.is_causal, *window)),
                problem.has_lists or problem.has_bits or problem.has_selected,
                masks.own_keys_of(problem, kernel),
            ),
            listed_rows=problem.listed_rows,
            token_lists=problem.token_lists,
        )
        if not kernel.splits_groups or problem.token_lists:
            return choice
        return split_group(choice, problem, shapes, window, target.num_sms, splits)

    return choose


def _with_mask_bits(
    chosen: ExecutionPlan, choose: Choose, call: AttentionCall, limits: Limits
) -> ExecutionPlan:
    """The plan with the evaluation of its mask_mod before attention, if there is one.

    A kernel that reads bits may have other tiles than one that evaluates the callable.
    """
    problem = chosen.problem
    if problem.in_fp8 or not (chosen.splits is problem.page_box is None):
        # the mask_mod of few queries is evaluated while keys come from memory
        return chosen
    if not shares_mask_bits(chosen.problem, chosen.shapes, chosen.masks, chosen.target):
        return chosen
    reading = chosen.with_choice(choose(reading_mask_bits(chosen.problem)))
    mask_bits = _mask_bits(reading, can_pack(call), limits)
    if mask_bits is None:
        return chosen
    problem = reading_mask_bits(reading.problem)
    reading = replace(reading, problem=problem, mask_bits=mask_bits, without_bits=chosen)
    if not isinstance(mask_bits, DocumentBitsPlan):
        return reading
    shapes, problem = packed_sequences(reading.shapes, problem)
    is_forward = call.direction is Direction.FORWARD
    rows = as_rows(call.tensors) if is_forward else as_rows_bwd(call.tensors)
    return _with_conversions(replace(reading, shapes=shapes, problem=problem), rows)


def _mask_bits(chosen: ExecutionPlan, can_pack: bool, limits: Limits) -> MaskBitsPlan | None:
    if isinstance(chosen.choice, BwdChoice) and chosen.choice.tiles.cta_pair:
        # a part of a walk may lie behind its sequence, which places do not tell
        can_pack = False
        if chosen.problem.varlen_k:
            return None
    window = chosen.window_left, chosen.window_right
    given = chosen.problem, chosen.shapes, chosen.bit_tiles, chosen.masks
    return choose_mask_bits(*given, window, chosen.target, can_pack, limits)


def _with_conversions(chosen: ExecutionPlan, tensors: Tensors) -> ExecutionPlan:
    """The plan with the conversions of the caller's tensors before the kernel sees them."""
    x, (factor, _) = tensors, split_scale(chosen.softmax_scale)
    of_keys: Callable[[torch.Tensor], Conversion | None] = input_conversion
    if chosen.problem.in_fp8:
        of_keys = byte_conversion
    elif chosen.problem.common_kv:
        of_keys = common_conversion
    conversions = {
        "q": input_conversion(x.q, factor),
        "k": of_keys(x.k),
        "v": of_keys(x.v),
        **chosen.conversions,
    }
    if chosen.direction is Direction.FORWARD:
        conversions["out"] = output_conversion(x.out)
    else:
        of = x.gradients
        assert x.out is not None and of.dout is not None
        conversions |= {"out": input_conversion(x.out), "dout": input_conversion(of.dout)}
        outputs = ("dq", of.dq), ("dk", of.dk), ("dv", of.dv)
        conversions |= {name: output_conversion(y) for name, y in outputs}
    is_out_like_q = (
        x.q.is_contiguous() and x.q.shape == chosen.out_shape and tma_strides(x.q) is None
    )
    return replace(chosen, conversions=conversions, is_out_like_q=is_out_like_q)
