"""How user callables are called.

`score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors)` returns a score. `mask_mod(b_idx,
h_idx, q_idx, kv_idx, aux_tensors)` returns whether the score counts. Both get `cute.TensorSSA`
vectors of one element: a Float32 score, and Int32 indices. The convention is that of FlexAttention
in flash-attn-4.

If packed fp32 arithmetic is worthwhile, a score_mod that works element by element gets all scores
of a row at once (`ScoreModTraits`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, vector

from flash_mask_cute.core.work_ring import Work
from flash_mask_cute.mods import ir_analysis
from flash_mask_cute.mods.aux_reads import AuxTensors, PlacedRead, answered_reads
from flash_mask_cute.mods.errors import NO_CODE, describe, tracing
from flash_mask_cute.mods.read_classes import Reliance
from flash_mask_cute.mods.table_rows import LoadedRows, noted_row_reads

# What callables return, by their names among the arguments of a call.
_RESULTS = {
    "score_mod": "the modified score",
    "mask_mod": "whether the score counts",
    "score_mod_bwd": "the gradient by the score",
}


def _vector(value: Any, dtype: type[cutlass.Numeric], width: int = 1) -> cute.TensorSSA:
    """A vector that repeats a number."""
    ssa = cute.full((width,), dtype(value), dtype)
    _keep_first(ssa)
    return ssa


def _keep_first(ssa: cute.TensorSSA) -> None:
    """Read `[0]` of a vector first, outside any branch of a mod, because the vector caches it
    (docs/facts/compiler.md#the-dsl)."""
    _ = ssa[0]


def _vector_of(numbers: Sequence[cutlass.Numeric]) -> cute.TensorSSA:
    dtype, width = type(numbers[0]), len(numbers)
    ir_type = ir.VectorType.get([width], dtype.mlir_type)
    elements = vector.from_elements(ir_type, [x.ir_value() for x in numbers])
    return cute.TensorSSA(elements, (width,), dtype)


class ScorePlace(NamedTuple):
    """The place of a score, as callables see it: batch entry, query head, and positions in the
    sequence."""

    batch_idx: Int32
    head_idx: Int32
    q_idx: Int32
    kv_idx: Int32


def call_score_mod(
    score_mod: Callable[..., Any],
    score: Float32,
    place: ScorePlace,
    aux_tensors: Any,
    kind: str = "score_mod",
) -> Float32:
    """The modified score, in the dtype of the score; aux_tensors is the list that the callable
    expects, or None. kind: the kind of callable, one of _RESULTS."""
    indices = [_vector(i, Int32) for i in place]
    return _modified(score_mod, _vector(score, type(score)), indices, aux_tensors, kind)[0]


def _modified(
    score_mod: Callable[..., Any],
    score: cute.TensorSSA,
    indices: list[cute.TensorSSA],
    aux_tensors: Any,
    kind: str = "score_mod",
) -> list[Float32]:
    """The result of `call_score_mod` for each element of vectors."""
    result = _evaluate(kind, score_mod, (score,), indices, aux_tensors)
    numbers = _elements(kind, score_mod, result, cute.size(score.shape))
    return [_checked_score(kind, score_mod, x, score.dtype) for x in numbers]


def _evaluate(
    kind: str,
    mod: Callable[..., Any],
    values: Sequence[cute.TensorSSA],
    indices: Sequence[cute.TensorSSA],
    aux_tensors: Any,
) -> Any:
    """Call a user callable; every call goes through here."""
    with tracing(kind, mod, aux_tensors is not None):
        given = AuxTensors.create(aux_tensors, indices)
        result = mod(*values, *indices, given)
        if given is not None:
            given.finish()
    return result


def _checked_score(kind: str, mod: Callable[..., Any], number: Any, dtype: Any) -> Any:
    if _is_condition(number):
        # as a number it would be 0 or 1
        hides = "to hide scores, pass the condition as mask_mod; " if kind == "score_mod" else ""
        raise TypeError(
            f"{describe(kind, mod)} returned a Boolean: it must return {_RESULTS[kind]}; {hides}to "
            "choose between numbers, write cute.where(condition, x, y)"
        )
    return dtype(number)


def _checked_result(mod: Callable[..., Any], answer: Any) -> Boolean:
    if not _is_condition(answer):
        # every number but 0 would let the score count, such as both of -inf and 0.0
        is_constant = isinstance(answer, int | float)
        found = repr(answer) if is_constant else f"a number, {cutlass.as_numeric(answer).dtype}"
        raise TypeError(
            f"{describe('mask_mod', mod)} returned {found}: it must return "
            f"{_RESULTS['mask_mod']}, a condition; of a number write (number != 0), and True or "
            "False for a constant result"
        )
    return Boolean(answer)


def head_of_row(work: Work, row: Int32, packed_heads: int, group_size: int) -> Int32:
    """The query head of a row; for a padding row, the last head of its group."""
    if packed_heads == 1:
        return work.head_idx
    of_group = row % packed_heads
    if group_size != packed_heads:
        of_group = cutlass.min(of_group, group_size - 1)
    return work.head_idx * group_size + of_group


class RowPlace(NamedTuple):
    """The place of a row of scores: batch entry, query head, position in the sequence."""

    batch_idx: Int32
    head_idx: Int32
    q_idx: Int32

    @staticmethod
    def create(work: Work, row: Int32, packed_heads: int, group_size: int) -> "RowPlace":
        """row: index among the call's queries, or among packed rows; one past the end gets the last
        position, which tensors have. packed_heads: rows of a position; group_size are heads."""
        head_idx = head_of_row(work, row, packed_heads, group_size)
        q_idx = cutlass.min(row // packed_heads, work.seqlen_q - 1)
        return RowPlace(work.batch_idx, head_idx, work.position(q_idx))


def inside(k_idx: Int32, work: Work) -> Int32:
    """A key; a key past the end, which other masks hide, becomes the last key."""
    return cutlass.min(k_idx, work.seqlen_k - 1)


def at_plain_distances(
    q_idx: Int32, k_idx: Int32, opaque_zero: Int32
) -> tuple[Callable[[int], Int32], Callable[[int], Int32]]:
    """Functions that give the query `rows` after q_idx and the key `cols` after k_idx.

    Callables often depend on q_idx - kv_idx only, and a thread has few different distances: 34 of
    64 for 32 columns. The compiler computes and loads once for each distance if it can see that
    distances are equal, as in (k + (d + 8)) - (k + 16). For that it must know neither k nor d, the
    distance of the first pair. Otherwise it would write k | 8 for a multiple of 16.

    opaque_zero: a 0 whose value the compiler does not know.
    """
    first = k_idx ^ opaque_zero
    distance = (q_idx - k_idx) ^ opaque_zero
    return lambda rows: first + (distance + rows), lambda cols: first + cols


def columns_of(scores: cute.Tensor, one_by_one: bool) -> tuple[range, ...]:
    """The columns of scores (rows, cols), together or one by one."""
    num_cols = cute.size(scores, mode=[1])
    if not one_by_one:
        return (range(num_cols),)
    return tuple(range(c, c + 1) for c in range(num_cols))


class ScoreModifier(NamedTuple):
    """factor: the number that the kernel multiplies by later. by_rows: pass all columns of a row at
    once. For both see `ScoreModTraits`."""

    score_mod: Callable[..., Any]
    aux_tensors: Any
    factor: float = 1.0
    by_rows: bool = False

    def modify_row(
        self,
        scores: cute.Tensor,
        r: int,
        scale: Float32,
        place: RowPlace,
        k_idx_of: Callable[[int], Int32],
        loaded: LoadedRows | None = None,
        of_cols: range | None = None,
    ) -> None:
        """Modify row r of scores (rows, cols), which become scores by `scale`.

        k_idx_of: gives the key of a column, in the sequence. loaded: what the score_mod reads along
        the keys, of all rows; not with by_rows. of_cols: these columns only.
        """
        num_cols = cute.size(scores, mode=[1])
        width = num_cols if self.by_rows else 1
        for first in range(0, num_cols, width) if of_cols is None else of_cols:
            cols = range(first, first + width)
            score = _vector_of([scores[r, c] for c in cols]) * scale
            indices = [_vector(i, Int32, width) for i in place]
            keys = _vector_of([Int32(k_idx_of(c)) for c in cols])
            _keep_first(score), _keep_first(keys)
            with answered_reads(None if loaded is None else loaded.answer(r, first)):
                modified = _modified(self.score_mod, score, [*indices, keys], self.aux_tensors)
            for c, number in zip(cols, modified, strict=True):
                divided = self.factor != 1.0
                scores[r, c] = ir_analysis.divided(number, self.factor) if divided else number
            ir_analysis.join_factors(score, scale)


def call_mask_mod(mask_mod: Callable[..., Any], place: ScorePlace, aux_tensors: Any) -> Boolean:
    """Whether the callable lets the score count."""
    indices = [_vector(i, Int32) for i in place]
    result = _evaluate("mask_mod", mask_mod, (), indices, aux_tensors)
    return _checked_result(mask_mod, _elements("mask_mod", mask_mod, result, 1)[0])


def reliance_of(mask_mod: Callable[..., Any], aux_tensors: Any) -> Reliance:
    """Find the arguments that a callable uses, from the operations that a call leaves.

    Called while a function is traced; the operations are removed again. An argument counts as used
    if any operation of the callable takes it, even if the result does not depend on it.
    """
    with ir_analysis.draft():
        indices = [_vector(arith.constant(Int32.mlir_type, 0), Int32) for _ in range(4)]
        # what there is of an argument before the call is all that the callable can get hold of
        watched = [ir_analysis.made_of(vector.ir_value()) for vector in indices[:3]]
        before = [ir_analysis.count_uses(values) for values in watched]
        _evaluate("mask_mod", mask_mod, (), indices, aux_tensors)
        after = [ir_analysis.count_uses(values) for values in watched]
    return Reliance(*(x != y for x, y in zip(before, after, strict=True)))


def _elements(kind: str, mod: Callable[..., Any], result: Any, width: int) -> list[Any]:
    """The result of a callable for `width` pairs of a query and a key, as `width` numbers."""
    if result is None:
        raise TypeError(f"{describe(kind, mod)} returned None: it must return {_RESULTS[kind]}")
    if isinstance(result, cutlass.Vector) and not isinstance(result, cute.TensorSSA):
        raise TypeError(f"{describe(kind, mod)} {NO_CODE}")
    if not isinstance(result, cute.TensorSSA):
        if not isinstance(result, bool | int | float | cutlass.Numeric | ir.Value):
            found = type(result)
            raise TypeError(
                f"{describe(kind, mod)} must return one value that the compiler knows, got "
                f"{result!r}, a {found.__module__}.{found.__qualname__}"
            )
        return [result] * width
    if cute.size(result.shape) == 1:
        return [result[0]] * width
    if result.shape != (width,):
        raise TypeError(
            f"{describe(kind, mod)} must return one value, got a vector of shape {result.shape}"
        )
    return [result[i] for i in range(width)]


def _is_condition(number: Any) -> bool:
    if isinstance(number, ir.Value):
        return ir.IntegerType.isinstance(number.type) and ir.IntegerType(number.type).width == 1
    return isinstance(number, bool | Boolean)


class ScoreModTraits(NamedTuple):
    """Properties of a score_mod that a kernel needs in advance.

    computes_functions: it applies fast tanh, exp2 or the like to a score. factor: the number that
    it multiplies by last, which the softmax can do instead, or 1. takes_rows: it takes vectors of
    scores and keys. row_reads: its reads of rows of keys (`LoadedRows`). by_columns: what rows have
    in common in a column takes more registers, kept for all columns, than a thread has.
    """

    computes_functions: bool = False
    factor: float = 1.0
    takes_rows: bool = False
    row_reads: tuple[PlacedRead, ...] = ()
    by_columns: bool = False

    @staticmethod
    def create(score_mod: Callable[..., Any], aux_tensors: Any) -> "ScoreModTraits":
        """For tracing a kernel: traces the callable twice more, and removes these operations."""
        with ir_analysis.draft():
            score = cute.full((1,), Float32(0.0), Float32)[0]
            place = ScorePlace(*(Int32(0) for _ in range(4)))
            with noted_row_reads() as row_reads:
                modified = call_score_mod(score_mod, score, place, aux_tensors)
            computes_functions = ir_analysis.reaches_function(score.ir_value())
            factor, _ = ir_analysis.last_product(modified)
        with ir_analysis.draft():
            takes_rows = _takes_rows(score_mod, aux_tensors)
            by_columns = getattr(score_mod, "by_columns", False)
            more = tuple(row_reads), by_columns
            return ScoreModTraits(computes_functions, factor, takes_rows, *more)


def _takes_rows(score_mod: Callable[..., Any], aux_tensors: Any) -> bool:
    """Whether a callable takes rows: it reads no element of scores or keys, as a load from an aux
    tensor for each key would. One that fails with rows gets single elements."""
    scores = _vector_of([Float32(0.0), Float32(1.0)])
    places = [_vector(Int32(0), Int32, 2) for _ in range(3)]
    keys = _vector_of([Int32(0), Int32(1)])
    # a branch may be traced twice
    _keep_first(scores), _keep_first(keys)
    try:
        result = _evaluate("score_mod", score_mod, (scores,), [*places, keys], aux_tensors)
        is_by_element = ir_analysis.is_by_element(scores, keys)
        _elements("score_mod", score_mod, result, 2)
    except Exception:
        return False
    return is_by_element
