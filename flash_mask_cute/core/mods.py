"""How user callables are called: one score at a time, every argument a one-element vector.

`score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors)` returns a score,
`mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors)` whether it counts. Both see `cute.TensorSSA`
values: Float32 the score, Int32 the indices, which are positions inside the sequence and the query
head. The convention is that of FlexAttention in flash-attn-4; a callable that reads `q_idx[0]` to
index an aux tensor and one that only computes both work. One-element vectors lose nothing on
Hopper, which has no packed fp32 or integer arithmetic.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf

from flash_mask_cute.core.work_ring import Work

# Operations that the pipe of the exponentials computes, by `_function_name`.
_FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "divf"),
    *("erf", "erfc", "ex2", "exp", "exp2", "expm1", "lg2", "log", "log10", "log1p", "log2", "powf"),
    *("rcp", "rsqrt", "sin", "sincos", "sinh", "sqrt", "tan", "tanh"),
}


def _vector(value: Any, dtype: type[cutlass.Numeric]) -> cute.TensorSSA:
    vector = cute.full((1,), dtype(value), dtype)
    # A vector keeps what its first `[0]` computed, which must not lie inside a branch of the mod.
    _ = vector[0]
    return vector


def call_score_mod(
    score_mod: Callable[..., Any],
    score: Float32,
    batch_idx: Int32,
    head_idx: Int32,
    q_idx: Int32,
    kv_idx: Int32,
    aux_tensors: Any,
) -> Float32:
    """The modified score; aux_tensors is the list the callable expects, or None."""
    indices = [_vector(i, Int32) for i in (batch_idx, head_idx, q_idx, kv_idx)]
    with _no_truth_values():
        result = score_mod(_vector(score, Float32), *indices, aux_tensors)
    return Float32(_scalar(result))


class RowPlace(NamedTuple):
    """Where a row of scores lies: batch entry, query head, position in the sequence."""

    batch_idx: Int32
    head_idx: Int32
    q_idx: Int32

    @staticmethod
    def of(work: Work, row: Int32, packed_heads: int) -> "RowPlace":
        """row: of the sequence, or of its packed rows; past the end it is as the last position,
        since a callable may index tensors with it."""
        head_idx = work.head_idx
        if packed_heads > 1:
            head_idx = work.head_idx * packed_heads + row % packed_heads
        q_idx = cutlass.min(row // packed_heads, work.seqlen_q - 1)
        return RowPlace(work.batch_idx, head_idx, q_idx)


def inside(k_idx: Int32, work: Work) -> Int32:
    """A key, or the last one instead of those past the end, which are hidden by others."""
    return cutlass.min(k_idx, work.seqlen_k - 1)


def at_plain_distances(
    q_idx: Int32, k_idx: Int32, opaque_zero: Int32
) -> tuple[Callable[[int], Int32], Callable[[int], Int32]]:
    """The query `rows` after q_idx and the key `cols` after k_idx, as functions of these numbers.

    What callables make of a score often depends on q_idx - kv_idx only, and a thread's columns and
    its rows, 8 apart both, have few different ones: 34 of 64 where there are 32 columns. The
    compiler computes and loads for each once, if the differences are plain to it, as in
    (k + (d + 8)) - (k + 16). For that it must know neither k nor d, the distance of the first ones:
    it would write k | 8 for a multiple of 16, and q + 8 for k + (d + 8).

    opaque_zero: 0, which the compiler does not know.
    """
    first = k_idx ^ opaque_zero
    distance = (q_idx - k_idx) ^ opaque_zero
    return lambda rows: first + (distance + rows), lambda cols: first + cols


def modify_row(
    score_mod: Callable[..., Any],
    scores: cute.Tensor,
    r: int,
    scale: Float32,
    place: RowPlace,
    k_idx_of: Callable[[int], Int32],
    aux_tensors: Any,
) -> None:
    """Let a score_mod have row r of scores (rows, cols), which `scale` makes of what is there.

    k_idx_of: the key of a column, in the sequence.
    """
    for c in range(cute.size(scores, mode=[1])):
        score = scores[r, c] * scale
        scores[r, c] = call_score_mod(
            score_mod, score, place.batch_idx, place.head_idx, place.q_idx, k_idx_of(c), aux_tensors
        )
        _join_factors(score, scale)


def _join_factors(score: Float32, scale: Float32) -> None:
    """Where a mod has multiplied the score by a number, and done nothing else with it, let the
    number join `scale`, of which the score is a multiple: one product instead of two.

    That rounds once instead of twice. Numbers with which the factor might leave fp32 stay.
    """
    product = score.ir_value().owner.operation
    vectors = [use.owner.operation for use in product.results[0].uses]
    users = [use.owner.operation for vector in vectors for use in vector.results[0].uses]
    users = [user for user in users if user.name != "vector.extract" or _is_used(user)]
    if len(users) != 1 or users[0].name != "arith.mulf":
        return
    numbers = [x for x in map(_number, users[0].operands) if x is not None]
    if len(numbers) == 1 and 2.0**-60 < abs(numbers[0]) < 2.0**60:
        with ir.InsertionPoint(product):
            product.operands[1] = (scale * numbers[0]).ir_value()
        users[0].results[0].replace_all_uses_with(vectors[0].results[0])


def _is_used(operation: ir.Operation) -> bool:
    return any(True for _ in operation.results[0].uses)


def _number(vector: ir.Value) -> float | None:
    """The number that a vector repeats, if it is one at compile time."""
    for name in ("vector.broadcast", "arith.constant"):
        owner = vector.owner
        if not isinstance(owner, ir.OpView | ir.Operation) or owner.operation.name != name:
            return None
        if name == "vector.broadcast":
            vector = owner.operation.operands[0]
    value = owner.operation.attributes["value"]
    return value.value if isinstance(value, ir.FloatAttr) else None


def call_mask_mod(
    mask_mod: Callable[..., Any],
    batch_idx: Int32,
    head_idx: Int32,
    q_idx: Int32,
    kv_idx: Int32,
    aux_tensors: Any,
) -> Boolean:
    """Whether the callable lets the score count."""
    indices = [_vector(i, Int32) for i in (batch_idx, head_idx, q_idx, kv_idx)]
    with _no_truth_values():
        result = mask_mod(*indices, aux_tensors)
    return Boolean(_scalar(result))


def computes_functions(score_mod: Callable[..., Any], aux_tensors: Any) -> bool:
    """Whether a score_mod applies tanh, exp2 or the like, which share a pipe, to a score.

    Called while a kernel is traced: traces the callable once more, and takes that out again.
    """
    probe = scf.IfOp(Boolean(False).ir_value())
    with ir.InsertionPoint(probe.then_block):
        score = cute.full((1,), Float32(0.0), Float32)[0]
        call_score_mod(score_mod, score, *(Int32(0) for _ in range(4)), aux_tensors)
        found = _reaches_function(score.ir_value())
        scf.YieldOp([])
    probe.operation.erase()
    return found


def _reaches_function(origin: ir.Value) -> bool:
    """Whether an operation of _FUNCTIONS is made of a value, by way of any others."""
    seen: set[int] = set()
    pending = [origin]
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if _function_name(user) in _FUNCTIONS:
                return True
            results = user.results if user.name != "scf.yield" else user.parent.operation.results
            # `==` of the DSL's values would trace a comparison
            fresh = [x for x in results if ir.Value.__hash__(x) not in seen]
            seen.update(ir.Value.__hash__(x) for x in fresh)
            pending.extend(fresh)
    return False


def _function_name(operation: ir.Operation) -> str:
    """The `cute.math` function that an operation is, as far as one can tell."""
    text = operation.name
    for attribute in ("intrin", "asm_string"):
        if attribute in operation.attributes:
            text = ir.StringAttr(operation.attributes[attribute]).value.removeprefix("llvm.nvvm.")
    return text.removeprefix("math.").split(".")[0]


def _scalar(result: Any) -> Any:
    if result is None:
        raise TypeError("a mod returned None: it must return a score, or whether the score counts")
    if isinstance(result, str | list | tuple | dict):
        raise TypeError(f"a mod must return one value, got {result!r}")
    if not isinstance(result, cute.TensorSSA):
        return result
    if cute.size(result.shape) != 1:
        raise TypeError(f"a mod must return one value, got a vector of shape {result.shape}")
    return result[0]


@contextmanager
def _no_truth_values() -> Iterator[None]:
    """Refuse `and`, `or`, `not`, `a < b < c` and `x if a else y` on vectors.

    They ask a vector for its truth value, which Python would take to be True: a condition would be
    lost without a word.
    """
    given = cute.TensorSSA.__dict__.get("__bool__")
    cute.TensorSSA.__bool__ = _refuse_truth_value
    try:
        yield
    finally:
        if given is None:
            del cute.TensorSSA.__bool__
        else:
            cute.TensorSSA.__bool__ = given


def _refuse_truth_value(vector: cute.TensorSSA) -> NoReturn:
    raise TypeError(
        "a mod asks for the truth value of a vector: write & for and, | for or, two comparisons "
        "for a < b < c, and cute.where for a conditional expression"
    )
