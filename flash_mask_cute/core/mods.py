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

from flash_mask_cute.core.work_ring import Work


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


def modify_row(
    score_mod: Callable[..., Any],
    scores: cute.Tensor,
    r: int,
    scale: Float32,
    row: Int32,
    k_idx_of: Callable[[int], Int32],
    work: Work,
    packed_heads: int,
    is_cut: bool,
    aux_tensors: Any,
) -> None:
    """Let a score_mod have row r of scores (rows, cols), which `scale` makes of what is there.

    row: of the sequence, or of its packed rows. k_idx_of: the key of a column. is_cut: keys may lie
    past the end; such positions are hidden, but the callable may index tensors with them.
    """
    q_idx = cutlass.min(row // packed_heads, work.seqlen_q - 1)
    head_idx = work.head_idx
    if packed_heads > 1:
        head_idx = work.head_idx * packed_heads + row % packed_heads
    for c in range(cute.size(scores, mode=[1])):
        k_idx = k_idx_of(c)
        if is_cut:
            k_idx = cutlass.min(k_idx, work.seqlen_k - 1)
        scores[r, c] = call_score_mod(
            score_mod, scores[r, c] * scale, work.batch_idx, head_idx, q_idx, k_idx, aux_tensors
        )


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


class Reliance(NamedTuple):
    """Whether the answer of a mask_mod may depend on the batch entry, and on the head."""

    batch: bool
    head: bool


def find_reliance(
    mask_mod: Callable[..., Any],
    batch_idx: Int32,
    head_idx: Int32,
    q_idx: Int32,
    kv_idx: Int32,
    aux_tensors: Any,
) -> Reliance:
    """What a callable uses of its arguments, seen in the operations that a call of it leaves.

    Called while a kernel is traced, with numbers that are not constants. An argument counts as used
    if any operation of the callable takes it, whether the answer depends on that or not; what is
    called independent is so. The operations are traced for nothing and left to the compiler.
    """
    indices = [_vector(i, Int32) for i in (batch_idx, head_idx, q_idx, kv_idx)]
    # what there is of an argument before the call is all that the callable can get hold of
    watched = [_made_of(vector.ir_value()) for vector in indices[:2]]
    before = [_count_uses(values) for values in watched]
    with _no_truth_values():
        mask_mod(*indices, aux_tensors)
    after = (_count_uses(values) for values in watched)
    return Reliance(*(x != y for x, y in zip(before, after, strict=True)))


def _made_of(value: Any) -> list[Any]:
    """A value and all that is made of it, in the text so far."""
    results = [result for use in value.uses for result in use.owner.operation.results]
    return [value, *(found for result in results for found in _made_of(result))]


def _count_uses(values: list[Any]) -> int:
    return sum(1 for value in values for _ in value.uses)


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
