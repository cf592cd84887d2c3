"""The operands of the attention kernels, by name: one table for each direction.

The order of a table is that of the kernels' `__call__`, of the compiler's stand-ins, and of the
launches in `forward.py` and `backward.py`, which pass everything but the stream. Launches are
written out for speed. `tests/cpu/call/test_operands.py` holds them to the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from flash_mask_cute.call.arguments import OptionalTensors
from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tiles.config import BwdChoice
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, PARALLEL_SPLITS, SEQUENTIAL_SPLITS
from flash_mask_cute.core.stream_k import BY_STREAM_K
from flash_mask_cute.mask_prep.mask_bits import BitTiles, fake_mask_bits
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.fake_tensors import (
    int32,
    int32_pair,
    int32_vector,
    operand,
    scratch,
    strided,
    vector,
)

Fake: TypeAlias = Callable[[AttentionProblem, Any], Any]
STREAM = "stream"


class KernelOperand(NamedTuple):
    """An operand of an attention kernel, by its names in the kernel's `__call__` and in the launch.
    fake: makes its stand-in for the compiler of the problem and the tiles (`FwdTiles`) or the
    choice (`BwdChoice`); None where the problem does not use it."""

    parameter: str
    argument: str
    fake: Fake


def fakes(table: tuple[KernelOperand, ...], problem: AttentionProblem, tiles: Any) -> list[Any]:
    """Stand-ins for the arguments of a kernel object's `__call__`."""
    return [row.fake(problem, tiles) for row in table]


# -- of both directions --------------------------------------------------------------------------


def _rank_q(problem: AttentionProblem) -> int:
    """Dimensions of a query tensor: one less if packed."""
    return 3 if problem.varlen_q else 4


def _rank_k(problem: AttentionProblem) -> int:
    return 3 if problem.varlen_k else 4


def _q(x: AttentionProblem, _: Any) -> Any:
    return operand(x.dtype, _rank_q(x), x.head_dim)


def _k(x: AttentionProblem, _: Any) -> Any:
    return operand(_kv_dtype(x), _rank_k(x), x.head_dim)


def _v(x: AttentionProblem, _: Any) -> Any:
    return None if x.statistics else operand(_kv_dtype(x), _rank_k(x), x.head_dim_v)


def _kv_dtype(problem: AttentionProblem) -> str:
    """Kernels take codes of fp8 as bytes."""
    return "uint8" if problem.in_fp8 else problem.dtype


def _out(x: AttentionProblem, _: Any) -> Any:
    return None if x.statistics else operand(x.dtype, _rank_q(x), x.head_dim_v)


def _float(_: AttentionProblem, __: Any) -> Any:
    import cutlass

    return cutlass.Float32(1.0)


def _block_bits(x: AttentionProblem, _: Any) -> Any:
    if x.query_lists:
        return fake_tensors.query_lists()
    if x.has_selected:
        return fake_tensors.selection_bits(x.selection_dtype, x.gathers > 0)
    return fake_tensors.block_bits(x.has_bits)


def _aux_tensors(x: AttentionProblem, _: Any) -> Any:
    given = fake_tensors.aux_tensors(x.aux)
    return (*(given or ()), *(fake_tensors.rows(name, 3) for name in x.tables)) or None


def _mask_bits(x: AttentionProblem, tiles: BitTiles) -> Any:
    return fake_mask_bits(tiles, has_places=x.varlen_q) if x.reads_mask_bits else None


_LENGTHS = (
    KernelOperand("mCuSeqlensQ", "cu_seqlens_q", lambda x, _: int32_vector(x.varlen_q)),
    KernelOperand("mCuSeqlensK", "cu_seqlens_k", lambda x, _: int32_vector(x.varlen_k)),
    KernelOperand("mSeqUsedQ", "seqused_q", lambda x, _: int32_vector(x.has_seqused_q)),
    KernelOperand("mSeqUsedK", "seqused_k", lambda x, _: int32_vector(x.has_seqused_k)),
)
_WINDOW = (
    KernelOperand("window_size_left", "window_left", lambda x, _: int32(x.has_window_left)),
    KernelOperand("window_size_right", "window_right", lambda x, _: int32(x.has_window_right)),
)
_AUX_TENSORS = KernelOperand("aux_tensors", "aux_tensors", _aux_tensors)
_SOFTCAP = KernelOperand(
    "softcap", "softcap", lambda x, tiles: _float(x, tiles) if x.has_softcap else None
)
_COLUMNS = KernelOperand(
    *("column_tensors", "columns"),
    lambda x, _: None if x.intervals is None else (strided(4), strided(4)),
)
_BLOCK_BITS = KernelOperand("block_bits", "bits", _block_bits)
_Q_START = KernelOperand("mQStart", "q_start", lambda x, _: fake_tensors.q_start(x.q_start))
_SCALE = KernelOperand("softmax_scale", "scale", _float)
_STREAM = KernelOperand(STREAM, STREAM, lambda _, __: fake_tensors.stream())

# -- the forward ---------------------------------------------------------------------------------


def _rows(is_there: bool, problem: AttentionProblem) -> Any:
    """fp32 numbers, one for each query row of a head."""
    return fake_tensors.rows("float32", _rank_q(problem) - 1) if is_there else None


def _lists(x: AttentionProblem, _: Any) -> Any:
    if not x.has_lists:
        return None
    full = (strided(3), strided(4)) if x.has_full_lists else (None, None)
    return strided(3), strided(4), *full


def _partials(x: AttentionProblem, _: Any) -> Any:
    """Destination of the splits of work tiles, or of statistics."""
    import cutlass

    if x.statistics:
        return _statistics(x)
    if x.is_tangent:
        return _q(x, _), _k(x, _), _v(x, _), _out(x, _), _rows(True, x)
    if x.split in (None, ONE_FIXED_SPLIT):
        return None
    if x.split == SEQUENTIAL_SPLITS:
        return fake_tensors.vectors_of_threads(), cutlass.Int32(1)
    by_stream_k = x.split == BY_STREAM_K
    partials = (
        operand("float32", 3 if by_stream_k else 5, x.head_dim_v),
        strided(2 if by_stream_k else 4, "float32"),
        None if x.score_mod is None else strided(2 if by_stream_k else 4, "float32"),
        strided(2) if by_stream_k else None,
        None if by_stream_k else cutlass.Int32(1),
    )
    return (*partials, cutlass.Int32(1)) if x.split == PARALLEL_SPLITS else partials


def _statistics(x: AttentionProblem) -> Any:
    """Destination of statistics (`StatisticsTensors`)."""
    import cutlass

    exact, of_blocks = x.deterministic, strided(4, "float32")
    of_keys = strided(_rank_k(x) - 1 + exact, "int64" if exact else "float32")
    names = "key_sums", "entropy", "block_sums", "block_maxima"
    made = of_keys, strided(_rank_q(x), "float32"), of_blocks, of_blocks
    given = (y if name in x.statistics else None for name, y in zip(names, made, strict=True))
    return *given, cutlass.Int32(1), cutlass.Int32(1)


def parameter_of(name: str) -> str:
    """The parameter of the kernels for an optional tensor: mLeftpadK for leftpad_k."""
    return "m" + "".join(part.capitalize() for part in name.split("_"))


def _optional(name: str, problem: AttentionProblem, _: Any) -> Any:
    for x in problem.optional:
        if x.name == name:
            return vector(x.dtype) if x.rank == 1 else strided(x.rank, x.dtype)
    return None


# the last ones, in the order of `OptionalTensors`
OPTIONAL = tuple(
    KernelOperand(parameter_of(name), name, partial(_optional, name))
    for name in OptionalTensors._fields
)
FORWARD = (
    KernelOperand("mQ", "q", _q),
    KernelOperand("mK", "k", _k),
    KernelOperand("mV", "v", _v),
    KernelOperand("mO", "out", _out),
    KernelOperand("mLSE", "lse", lambda x, _: _rows(x.needs_lse, x)),
    _SCALE,
    _STREAM,
    *_LENGTHS,
    KernelOperand(
        "mPageTable", "page_table", lambda x, _: None if x.page_box is None else strided(2)
    ),
    *_WINDOW,
    KernelOperand("learnable_sink", "sink", lambda x, _: fake_tensors.vector(x.sink_dtype)),
    KernelOperand("blocksparse_tensors", "lists", _lists),
    _AUX_TENSORS,
    _SOFTCAP,
    KernelOperand(
        *("tile_counter", "counter"),
        lambda x, _: None if x.split == BY_STREAM_K else fake_tensors.counter(),
    ),
    _COLUMNS,
    KernelOperand("block_size", "block_size", lambda x, _: int32_pair() if x.has_lists else None),
    _BLOCK_BITS,
    KernelOperand(
        *("mask_bit_tensors", "mask_bits"),
        lambda x, tiles: _mask_bits(x, BitTiles.for_forward(tiles.tile_m, tiles.tile_n)),
    ),
    KernelOperand(
        "query_chunk", "query_chunk", lambda x, _: int32_pair() if x.reads_mask_bits else None
    ),
    KernelOperand("mLSELow", "lse_low", lambda x, _: _rows(x.needs_lse_low, x)),
    KernelOperand("mMaxScores", "max_scores", lambda x, _: _rows(x.needs_max_scores, x)),
    _Q_START,
    KernelOperand("mPartials", "partials", _partials),
    *OPTIONAL,
)

# -- the backward --------------------------------------------------------------------------------


def num_stats(problem: AttentionProblem) -> int:
    """Statistics of a query row, as in `BwdTraits`."""
    return 2 if problem.score_mod is None else 3


def stats_words(tile_m: int, num_stats: int, has_marks: bool, packed_heads: int = 1) -> int:
    """fp32 words of a row block's statistics in scratch tensors."""
    from flash_mask_cute.core import row_blocks

    return row_blocks.stats_words(tile_m, num_stats, has_marks, packed_heads)


def _stats(x: AttentionProblem, choice: BwdChoice) -> Any:
    of_rows = num_stats(x), x.may_empty_rows, x.rows_of_stats
    return scratch(stats_words(choice.tiles.tile_m, *of_rows))


def _dq_accum(x: AttentionProblem, choice: BwdChoice) -> Any:
    """Sums of dQ, or dQ."""
    return _q(x, choice) if x.is_wide else scratch(choice.tiles.tile_m * choice.tile_d)


def leaves_sums(x: AttentionProblem, choice: BwdChoice) -> bool:
    """Whether several CTAs have the same keys, and leave partial sums of dK and dV."""
    return choice.tiles.splits_group or x.query_lists > 0


def _dk(x: AttentionProblem, choice: BwdChoice) -> Any:
    """dK, or its partial sums."""
    return scratch(choice.tile_n * choice.tile_d) if leaves_sums(x, choice) else _k(x, choice)


def _dv(x: AttentionProblem, choice: BwdChoice) -> Any:
    return scratch(choice.tile_n * choice.tile_dv) if leaves_sums(x, choice) else _v(x, choice)


def sums_of_aux(
    x: AttentionProblem, numbers: Sequence[int], exact: Sequence[int], parted: Sequence[int]
) -> tuple[Any, ...] | None:
    """Sums of the gradients of aux tensors. exact, parted: those with a first dimension of words,
    or of parts of the batch."""

    def sums(i: int) -> Any:
        _, rank = x.aux[i]
        if i in exact:
            return strided(rank + 1, "int64")
        return strided(rank + int(i in parted), "float32")

    return tuple(map(sums, numbers)) or None


def _aux_grads(x: AttentionProblem, _: Any) -> Any:
    return sums_of_aux(x, x.wants_aux, x.exact_aux, x.entry_aux)


BACKWARD = (
    KernelOperand("mQ", "q", _q),
    KernelOperand("mK", "k", _k),
    KernelOperand("mV", "v", _v),
    KernelOperand("mdO", "dout", _out),
    KernelOperand("mStats", "stats", _stats),
    KernelOperand("mdQaccum", "dq_accum", _dq_accum),
    KernelOperand(
        *("mSemaphores", "semaphores"),
        lambda x, choice: None if choice.tiles.clears_dq or x.is_wide else strided(2),
    ),
    KernelOperand("mdK", "dk_sums", _dk),
    KernelOperand("mdV", "dv_sums", _dv),
    _SCALE,
    _STREAM,
    *_LENGTHS,
    *_WINDOW,
    _AUX_TENSORS,
    _SOFTCAP,
    KernelOperand("tile_counter", "counter", lambda _, __: fake_tensors.counter()),
    _COLUMNS,
    _BLOCK_BITS,
    KernelOperand("aux_grads", "aux_grads", _aux_grads),
    KernelOperand(
        *("mask_bit_tensors", "mask_bits"),
        lambda x, y: _mask_bits(x, BitTiles.for_backward(y.tiles.tile_m, y.tile_n)),
    ),
    _Q_START,
)
