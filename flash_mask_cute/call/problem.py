"""The facts on which the generated code depends, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from flash_mask_cute.core.fixed_splits import ORDERED
from flash_mask_cute.core.packed_heads import rows_of_listed
from flash_mask_cute.limits import LEAST_BOX, MAX_HEAD_DIM, OPEN_WINDOW


class FwdShapes(NamedTuple):
    """The extents of one problem. seqlen_q and seqlen_k are upper bounds per sequence. total_q and
    total_k count the rows of the whole tensor, all sequences together."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def mean_seqlen_q(self) -> int:
        """Queries of a sequence on average, rounded up."""
        return -(-self.total_q // max(self.batch, 1))

    @property
    def mean_seqlen_k(self) -> int:
        """Keys of a sequence on average, rounded up."""
        return -(-self.total_k // max(self.batch, 1))

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys, so there is nothing to launch."""
        return not (self.batch and self.total_q and self.total_k)


class Mods(NamedTuple):
    """The user's callables that a kernel is compiled with. A problem holds their keys."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None


class GivenTensor(NamedTuple):
    """A tensor of `OptionalTensors` that a call has."""

    name: str
    dtype: str
    rank: int


class TuningClass(str, Enum):
    """Masks and modifiers of scores, as far as tiles depend on them. FULL, CAUSAL: only that, or
    block lists given as bits. EDGES: column intervals of two vectors and more, or beside lists.
    OTHER: any other mask, such as a window, or packed documents."""

    FULL = "full"
    CAUSAL = "causal"
    MASK_MOD = "mask_mod"
    SCORE_MOD = "score_mod"
    EDGES = "edges"
    OTHER = "other"


@dataclass(frozen=True)
class AttentionProblem:
    """A kind of problem: two of one direction that are equal share one compiled kernel. Lengths,
    batch, number of heads, strides and values are run-time arguments.

    dtype, sink_dtype and other dtypes are names of torch dtypes ("bfloat16"). packed_heads: query
    heads of a KV head that share a tile's rows. A backward packs heads only for query lists, uses
    no sink, writes no LSE, and takes block lists only as bits.

    Masks and mods. intervals: (vectors, causal form) of the column intervals. score_mod, mask_mod,
    score_mod_bwd: `callable_key` of the callables, which travel beside the problem. aux: (dtype,
    rank) of each aux tensor. wants_aux: indices of those whose gradients a backward sums;
    exact_aux: those with exact sums (`mods/fixed_point_sums.py`); entry_aux: those with sums for
    each batch entry. score_functions: score_mod computes functions of scores (`traits.py`).
    has_bits: tiles do not nest in the blocks of lists, whose states are given as bits.
    reads_mask_bits: the results of a mask_mod and block lists were stored (`mask_bits.py`), and
    neither is here. may_empty_rows: masks may leave queries of a backward that see nothing.
    q_start: the position of the first query is given as a "number" for all sequences or for "each"
    of them. lists_per_warpgroup: warpgroups of a forward, or keys of one in a backward, have block
    lists of their own (`FwdTraits`, `BackwardMask`).

    Selections. has_selected: each query's selection of key blocks is given, as bits.
    selection_dtype: that of its entries, if a forward of one query reads them itself. gathers: keys
    of a block, if a forward gathers the keys of small blocks (`gathered_mask.py`), else 0.
    shares_mask: a mask_mod is the same for heads that share a tile of a forward. query_lists: keys
    of a work tile of a backward that takes query lists (`query_lists.py`), else 0. masks_by_head:
    a mask_mod or the intervals then hide other scores from one head of a group than from another.

    Ways of computing. split: of work tiles (`splits.py`) or fixed splits (`fixed_splits.py`).
    page_box: keys that lie side by side in pages (`page_box_of`); None: keys in rows. optional: the
    `OptionalTensors` that a forward reads. shared_kv: all sequences have the keys of one batch
    entry (`copies.py`). few_rows: in fp8, at most `FEW_ROWS` query rows share keys, of a batch that
    is not packed. tables: dtypes of the tables of differences after the aux tensors (`tables.py`);
    summed: (number, size of the sums, who sums) of reads whose gradients are summed by difference.
    entries_first: batch entries of a head take turns in a backward; bias_bits: bits of a score, of
    rows of tables that batch entries of a forward share (`bias_rows.py`). statistics: results of a
    kernel of statistics (`statistics.py`), with exact sums of keys if deterministic;
    statistics_block: rows and keys of its sums of blocks, and whether rows of all sequences follow
    each other in them. is_tangent: of the kernel of forward mode (`tangent.py`).
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    packed_heads: int = 1
    is_causal: bool = False
    has_window_left: bool = False
    has_window_right: bool = False
    varlen_q: bool = False
    varlen_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    has_softcap: bool = False
    sink_dtype: str | None = None
    needs_lse: bool = True
    needs_lse_low: bool = False
    needs_max_scores: bool = False
    intervals: tuple[int, bool] | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    score_mod_bwd: str | None = None
    score_functions: bool = False
    aux: tuple[tuple[str, int], ...] = ()
    wants_aux: tuple[int, ...] = ()
    exact_aux: tuple[int, ...] = ()
    entry_aux: tuple[int, ...] = ()
    has_lists: bool = False
    has_full_lists: bool = False
    has_bits: bool = False
    reads_mask_bits: bool = False
    deterministic: bool = False
    may_empty_rows: bool = False
    q_start: str | None = None
    split: str | None = None
    page_box: int | None = None
    optional: tuple[GivenTensor, ...] = ()
    has_selected: bool = False
    selection_dtype: str | None = None
    gathers: int = 0
    shares_mask: bool = False
    shared_kv: bool = False
    in_fp8: bool = False
    few_rows: bool = False
    query_lists: int = 0
    masks_by_head: bool = False
    tables: tuple[str, ...] = ()
    summed: tuple[tuple[int, int, str], ...] = ()
    lists_per_warpgroup: bool = False
    entries_first: bool = False
    bias_bits: int = 0
    statistics: tuple[str, ...] = ()
    statistics_block: tuple[int, int, bool] = (1, 128, True)
    is_tangent: bool = False

    @property
    def cached_bias_bits(self) -> int:
        """Bits of a score, of rows of tables that may stay in shared memory."""
        return self.bias_bits if self.tuning_class is TuningClass.SCORE_MOD else 0

    def has(self, name: str) -> bool:
        """Whether a forward reads this one of `OptionalTensors`."""
        return any(x.name == name for x in self.optional)

    @property
    def rare_options(self) -> dict[str, Any]:
        """Options of a forward's kernel that it may not have, as far as they are set."""
        statistics = self.statistics_block if self.statistics else None
        names = "in_fp8", "few_rows", "lists_per_warpgroup", "shares_mask", "gathers"
        given = {x: getattr(self, x) for x in (*names, "cached_bias_bits")}
        return {x: y for x, y in (given | {"statistics": statistics}).items() if y}

    @property
    def keys_of_box(self) -> int | None:
        """Keys that a forward loads together, of pages or gathered; None: those of a tile. TMA
        numbers the rows of packed sequences otherwise, so threads copy these if gathered."""
        if self.gathers and self.page_box is None:
            return LEAST_BOX // 2 if self.varlen_k else self.gathers
        return self.page_box

    @property
    def may_have_lists_per_warpgroup(self) -> bool:
        """Whether parts of a tile may have block lists of their own."""
        is_plain = self.mask_mod is None and self.score_mod is None and self.q_start is None
        is_plain = is_plain and not self.in_fp8 and not self.shared_kv and self.packed_heads == 1
        return is_plain and (self.has_lists or self.has_bits)

    @property
    def walks_by_head(self) -> bool:
        """Whether work tiles of a backward visit the queries of one head of one sequence after
        another, so that gradients of aux tensors can be summed along them."""
        return not (self.shared_kv or self.query_lists)

    @property
    def listed_rows(self) -> int:
        """Rows of a query in a block of listed queries, with query lists."""
        return rows_of_listed(self.packed_heads, max(self.head_dim, self.head_dim_v))

    @property
    def rows_of_stats(self) -> int:
        """Rows of a query whose statistics lie together; 1: they do not."""
        return self.listed_rows if self.query_lists else 1

    @property
    def causal_each(self) -> bool:
        """Whether a forward reads which sequences are causal, beside a right window side."""
        return self.has("causal_per_seq")

    @property
    def is_ordered(self) -> bool:
        """Whether the sums of a forward have an order, which fixes the bits of a row."""
        return self.split in ORDERED

    @property
    def is_local(self) -> bool:
        return self.has_window_left or self.has_window_right

    @property
    def is_wide(self) -> bool:
        """Whether heads have more columns than a CTA sums. A backward then stores dQ at once."""
        return max(self.head_dim, self.head_dim_v) > MAX_HEAD_DIM

    @property
    def score_modifier(self) -> str | None:
        """The name of the argument that changes scores before masks apply."""
        if self.score_mod is not None:
            return "score_mod"
        return "softcap" if self.has_softcap else None

    @property
    def tuning_class(self) -> TuningClass:
        varying = (
            self.varlen_q, self.varlen_k, self.has_seqused_q, self.has_seqused_k,
            self.q_start is not None,
        )  # fmt: skip
        if self.mask_mod is not None:
            return TuningClass.MASK_MOD
        if self.score_mod is not None:
            return TuningClass.SCORE_MOD
        lists = self.has_lists or self.has_bits or self.reads_mask_bits or self.has_selected
        if self.intervals is not None and (self.intervals[0] > 1 or lists):
            return TuningClass.EDGES
        masks = self.is_local or self.has_lists or self.reads_mask_bits or self.has_selected
        if masks or self.intervals is not None or any(varying):
            return TuningClass.OTHER
        return TuningClass.CAUSAL if self.is_causal else TuningClass.FULL

    @property
    def functions_under_causal(self) -> bool:
        """Whether softcap or a score_mod computes functions, and causal is the only mask."""
        masks = replace(self, score_mod=None).tuning_class
        return (self.has_softcap or self.score_functions) and masks is TuningClass.CAUSAL


class FoldedWindow(NamedTuple):
    """Causal masking and window sides that have an effect (`fold_window`); None: an open side."""

    is_causal: bool
    left: int | None
    right: int | None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    @property
    def visible(self) -> int | None:
        """The most keys that a query sees, if both sides are closed."""
        if self.left is None or not (self.is_causal or self.right is not None):
            return None
        return self.left + (self.right or 0) + 1


def may_empty_rows(
    problem: AttentionProblem,
    seqlens: tuple[int, int],
    window: tuple[int | None, int | None],
) -> bool:
    """Whether masks may leave queries that see nothing, in a sequence that has keys, whatever
    masks and length tensors contain. seqlens: bounds of queries and keys of a sequence. window:
    sides of `FoldedWindow`."""
    may_hide_all = (problem.mask_mod, problem.score_mod, problem.intervals)
    lists = (
        *(problem.has_lists, problem.has_bits, problem.reads_mask_bits),
        problem.has_selected,
    )
    if any(x is not None for x in may_hide_all) or any(lists):
        return True
    if any(side is not None and side < 0 for side in window):
        # the band may lie beside a row's own key
        return True
    if problem.q_start is not None:
        # the window may lie after the last key
        return True
    # the last query stands at the last key, so the first one stands before the first key if there
    # are more queries, and sees some only to its right
    varying = (problem.varlen_q, problem.varlen_k, problem.has_seqused_q, problem.has_seqused_k)
    ends_on_right = problem.is_causal or problem.has_window_right
    return ends_on_right and (any(varying) or seqlens[0] > seqlens[1])


def fold_window(causal: bool, window_left: int | None, window_right: int | None) -> FoldedWindow:
    """Causal and window sides that have an effect. Of two right edges, causal's and window_right,
    the nearer one remains. An empty band, in which no query sees a key, becomes a right side that
    no sequence reaches: kernels rely on left + right >= 0 if both are given."""
    left = None if window_left is None or window_left >= OPEN_WINDOW else int(window_left)
    right = None if window_right is None or window_right >= OPEN_WINDOW else int(window_right)
    causal = causal and (right is None or right >= 0)
    if causal:
        right = None
    edge = 0 if causal else right
    if left is not None and (left <= -OPEN_WINDOW or (edge is not None and left + edge < 0)):
        return FoldedWindow(False, None, -OPEN_WINDOW)
    right = None if right is None else max(right, -OPEN_WINDOW)
    return FoldedWindow(causal, left, right)


def sink_dtype(sink: torch.Tensor) -> torch.dtype:
    """The dtype in which kernels read a learnable_sink."""
    return torch.float32 if sink.dtype == torch.float64 else sink.dtype


class Padding(NamedTuple):
    """Gradients whose rows after the last sequence must be zeroed: new packed ones."""

    dq: bool = False
    dk: bool = False
    dv: bool = False
