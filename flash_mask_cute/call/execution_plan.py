"""`ExecutionPlan`: what a call of either direction will run, and the records of its parts.

A file that decides about a part imports this one, which knows no decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.facts import Backend
from flash_mask_cute.call.masks import ResolvedMasks
from flash_mask_cute.call.problem import AttentionProblem, FwdShapes, Padding, sink_dtype
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.call.tiles.config import ROWS_OF_LISTS, BwdChoice, FwdChoice, FwdTiles
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, PARALLEL_SPLITS, SEQUENTIAL_SPLITS
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.mask_prep.mask_bits import BitTiles, MaskBitsPlan
from flash_mask_cute.masks.q_start import NO_START, QStart
from flash_mask_cute.mods.fixed_point_sums import NUM_WORDS
from flash_mask_cute.mods.read_classes import DifferenceRead, SummedDifference
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target


class Conversion(Protocol):
    """Makes of a tensor one that kernels take (`copies.py`). None stands for no conversion."""

    def __call__(self, tensor: Tensor) -> Tensor: ...


class Instead(NamedTuple):
    """A call that is computed in place of the caller's. wrap: makes the caller's prepared call of
    that of `call`. note: in words."""

    call: AttentionCall
    wrap: Callable[[Any], Any]
    note: str = ""

    def __repr__(self) -> str:
        return self.note


class GradientFacts(NamedTuple):
    """Facts that determine the kernels of a backward, besides its problem.

    sink_dtype: of a sink whose gradient is requested, or that identifies queries that see
    nothing, as kernels read it.
    """

    has_dlse: bool
    has_lse_low: bool
    sink_dtype: str | None
    score_mod_bwd: Callable[..., Any] | None
    padding: Padding

    @staticmethod
    def of(
        call: AttentionCall, problem: AttentionProblem, sink: torch.Tensor | None
    ) -> GradientFacts:
        x, of = call.tensors, call.tensors.gradients
        return GradientFacts(
            has_dlse=of.dlse is not None,
            has_lse_low=x.lse_low is not None,
            sink_dtype=None if sink is None else dtype_name(sink_dtype(sink)),
            score_mod_bwd=call.backward.score_mod_bwd,
            padding=Padding(
                problem.varlen_q and of.dq is None,
                problem.varlen_k and of.dk is None,
                problem.varlen_k and of.dv is None,
            ),
        )


class Splits(NamedTuple):
    """Scratch of a forward that computes work tiles in splits.

    kind: BY_ROWS, BY_STREAM_K or PARALLEL_SPLITS. number: splits of each work tile, or CTAs with a
    chunk. out_shape, lse_shape: of the fp32 tensors of all splits. has_low: a third tensor, like
    LSE, holds its rounding error, because scores may have any size.
    """

    kind: str
    number: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    has_low: bool

    @property
    def num_bytes(self) -> int:
        numbers_of_lse = 2 if self.has_low else 1
        return 4 * (math.prod(self.out_shape) + numbers_of_lse * math.prod(self.lse_shape))

    def describe(self) -> str:
        """The splits in words."""
        scratch = f"{self.num_bytes} bytes of scratch, and a launch that combines"
        if self.kind == BY_STREAM_K:
            chunks = f"{self.number} equal stream-K chunks"
            return f"all key blocks in {chunks}, found on the device; {scratch}"
        return f"{self.number} of each work tile; {scratch}"


# rows of a thread, and numbers that it stores together
_ROWS_PER_THREAD, _VECTOR = 2, 4


class FixedSplits(NamedTuple):
    """Fixed splits of the keys of a sequence. num_blocks: key blocks of a fixed split. number: the
    most that a sequence may have."""

    kind: str
    num_blocks: int
    tile_n: int
    number: int

    @property
    def keys(self) -> int:
        """Keys of a fixed split."""
        return self.num_blocks * self.tile_n

    def memory_shape(self, tiles: FwdTiles, head_dim_v: int, num_ctas: int) -> tuple[int, ...]:
        """The fp32 memory of fixed splits in sequence (`RunningSums`), for so many CTAs."""
        # a thread has a quarter of each of two rows
        columns = -(-head_dim_v // 16) * 16 // 4
        vectors = 2 + _ROWS_PER_THREAD * columns // _VECTOR
        return num_ctas, vectors, 2 * tiles.tile_m, _VECTOR

    def describe(self) -> str:
        """The fixed splits in words."""
        cut = f"sums are cut at every {self.keys} keys, {self.number} fixed splits at most"
        how = {
            ONE_FIXED_SPLIT: "one pass",
            SEQUENTIAL_SPLITS: "each CTA reduces those of its work tiles",
            PARALLEL_SPLITS: "any CTA computes any of them, a launch reduces them in order",
        }
        return f"{cut}; {how[self.kind]}"


# warps of a Hopper kernel that may sum gradients by difference
MMA_WARPS, MASK_WARPS = 8, 2


class DifferenceTables(NamedTuple):
    """The tables of a call. shapes: (batch | 1, heads | 1, differences). summed: reads of tensors
    whose gradients are wanted."""

    reads: tuple[DifferenceRead, ...]
    shapes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    summed: tuple[SummedDifference, ...] = ()

    def problem_fields(self) -> dict[str, Any]:
        """The fields of an `AttentionProblem` that describe tables."""
        return {
            "tables": self.dtypes,
            "summed": tuple((x.read.number, x.size, x.by.value) for x in self.summed),
        }

    @property
    def smem_bytes(self) -> int:
        return smem_bytes_of(self.summed)

    @property
    def num_bytes(self) -> int:
        sizes = (getattr(torch, name).itemsize for name in self.dtypes)
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def describe(self) -> str:
        """The tables in words; empty if there are none."""
        if not self.reads:
            return ""
        count = "one table" if len(self.reads) == 1 else f"{len(self.reads)} tables"
        parts = (
            f"aux_tensors[{read.tensor}] {' x '.join(map(str, shape))}"
            for read, shape in zip(self.reads, self.shapes, strict=True)
        )
        return f"{count} of all differences, {self.num_bytes} bytes: {', '.join(parts)}"


def smem_bytes_of(summed: Sequence[SummedDifference]) -> int:
    """Shared memory for sums by difference."""
    return sum(x.mma_words * MMA_WARPS + x.mask_words * MASK_WARPS for x in summed) * 4


class ShortTile(NamedTuple):
    """A tile of all queries of a batch entry, and all keys. several_keys: of some keys; the CTAs of
    other tiles add to the same dQ."""

    tile_m: int
    tile_n: int
    several_keys: bool = False


class SharedSums(NamedTuple):
    """numbers: of the aux tensors. parts: of the batch. once: the tensors where no two scores of an
    entry read the same element; each part has its own sums. CTAs add to the sums of the others;
    exact: those with exact sums (`mods/fixed_point_sums.py`). short: the kernel makes all
    gradients, and no other one runs after the preprocess."""

    numbers: tuple[int, ...]
    parts: int
    once: tuple[int, ...]
    exact: tuple[int, ...] = ()
    short: ShortTile | None = None

    def num_bytes(self, aux_tensors: Sequence[Tensor]) -> int:
        """Of the sums of gradients that are like these tensors."""

        def of_element(i: int) -> int:
            if i in self.exact:
                return 8 * NUM_WORDS
            if i not in self.once:
                return 4
            return 0 if self.is_in_place(aux_tensors[i]) else 4 * self.parts

        return sum(of_element(i) * aux_tensors[i].numel() for i in self.numbers)

    def is_in_place(self, gradient: Tensor) -> bool:
        """Whether the sums of a tensor of `once` are made in its gradient."""
        is_fp32 = gradient.dtype is torch.float32
        return self.parts == 1 and is_fp32 and gradient.is_contiguous()

    def problem_fields(self, problem: AttentionProblem) -> dict[str, Any]:
        """The fields of the problem that is left to the main kernel."""
        fields = "wants_aux", "exact_aux", "entry_aux"
        return {x: tuple(i for i in getattr(problem, x) if i not in self.numbers) for x in fields}


@dataclass(frozen=True)
class ExecutionPlan:
    """The plan of a call of either direction.

    target: of the kernels or, on the CPU, of the tiles. softmax_scale may have any sign. Window
    sides are None if open. q_start is NONE if it has no effect. conversions: by name, of the
    caller's tensors that a kernel cannot read as they are. is_out_like_q: a forward's new out may
    be made like q.

    mask_bits: for evaluating a mask_mod once for all heads before attention. problem and shapes are
    then those of the kernel that reads the bits, and without_bits is the plan of a kernel that
    evaluates the callable itself. instead: this plan is that of the first one's call. splits: None
    for one pass. fixed_splits: of the keys, if sums have an order. shared: results of a kernel that
    walks over batch entries, such as gradients of aux tensors; the problem then does not want
    these.
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
    instead: tuple[Instead, ...] = ()
    splits: Splits | None = None
    fixed_splits: FixedSplits | None = None
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
        rows = (
            ROWS_OF_LISTS if self.problem.lists_per_warpgroup else self.choice.tiles.cluster_tile_m
        )
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
        """The plan with these tiles, which determine packing and the form of block lists."""
        problem = self.problem
        if isinstance(choice, FwdChoice):
            problem = replace(problem, packed_heads=choice.packed_heads)
        problem = self.masks.with_form_of_lists(problem, choice, arch_spec(self.target))
        return replace(self, problem=problem, choice=choice)
