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
from cutlass._mlir.dialects import scf, vector
from cutlass.base_dsl.common import DSLRuntimeError

from flash_mask_cute.core.work_ring import Work

_NEGATES = "negates a vector by `not` or `~`: write the opposite, or (...) == False"
_SHIFTS = "shifts one by `<<` or `>>`: write a product or `//`, or shift the number, q_idx[0] >> 2"
_INDEXED = (
    "if it indexes an aux tensor: by as many numbers as that has dimensions, "
    "aux_tensors[0][kv_idx[0]]"
)
# What callables return, by their names among the arguments of a call.
_RESULTS = {
    "score_mod": "the modified score",
    "mask_mod": "whether the score counts",
    "score_mod_bwd": "the gradient by the score",
}
# What the pipe of the exponentials computes in an instruction, by `_fast_function`.
_FUNCTIONS = {"cos", "ex2", "exp", "exp2", "lg2", "log", "log2", "rcp", "rsqrt", "sin", "tanh"}


def _vector(value: Any, dtype: type[cutlass.Numeric]) -> cute.TensorSSA:
    ssa = cute.full((1,), dtype(value), dtype)
    # A vector keeps what its first `[0]` computed, which must not lie inside a branch of the mod.
    _ = ssa[0]
    return ssa


def call_score_mod(
    score_mod: Callable[..., Any],
    score: Float32,
    batch_idx: Int32,
    head_idx: Int32,
    q_idx: Int32,
    kv_idx: Int32,
    aux_tensors: Any,
    kind: str = "score_mod",
) -> Float32:
    """The modified score; aux_tensors is the list the callable expects, or None.

    kind: what the callable is, one of _RESULTS.
    """
    indices = [_vector(i, Int32) for i in (batch_idx, head_idx, q_idx, kv_idx)]
    with _tracing(score_mod, aux_tensors):
        result = score_mod(_vector(score, Float32), *indices, aux_tensors)
    number = _scalar(kind, result)
    if _is_condition(number):
        # as a number it would be 0 or 1
        hides = "to hide scores, pass the condition as mask_mod; " if kind == "score_mod" else ""
        raise TypeError(
            f"{kind} returned a Boolean: it must return {_RESULTS[kind]}; {hides}to choose between "
            "numbers, write cute.where(condition, x, y)"
        )
    return Float32(number)


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
    factor: float = 1.0,
) -> None:
    """Let a score_mod have row r of scores (rows, cols), which `scale` makes of what is there.

    k_idx_of: the key of a column, in the sequence. factor: what the caller multiplies by later
    (`ScoreModTraits`).
    """
    for c in range(cute.size(scores, mode=[1])):
        score = scores[r, c] * scale
        modified = call_score_mod(
            score_mod, score, place.batch_idx, place.head_idx, place.q_idx, k_idx_of(c), aux_tensors
        )
        scores[r, c] = modified if factor == 1.0 else _divided(modified, factor)
        _join_factors(score, scale)


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
    with _tracing(mask_mod, aux_tensors):
        result = mask_mod(*indices, aux_tensors)
    return Boolean(_scalar("mask_mod", result))


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
    with _tracing(mask_mod, aux_tensors):
        mask_mod(*indices, aux_tensors)
    after = (_count_uses(values) for values in watched)
    return Reliance(*(x != y for x, y in zip(before, after, strict=True)))


def _made_of(value: Any) -> list[Any]:
    """A value and all that is made of it, in the text so far."""
    results = [result for use in value.uses for result in use.owner.operation.results]
    return [value, *(found for result in results for found in _made_of(result))]


def _count_uses(values: list[Any]) -> int:
    return sum(1 for value in values for _ in value.uses)


def _scalar(kind: str, result: Any) -> Any:
    if result is None:
        raise TypeError(f"{kind} returned None: it must return {_RESULTS[kind]}")
    if isinstance(result, cutlass.Vector) and not isinstance(result, cute.TensorSSA):
        # what the compiler makes of `~` and shifts, and of `not` in a @cute.jit function
        raise TypeError(f"{kind} {_NEGATES}; or {_SHIFTS}")
    if not isinstance(result, cute.TensorSSA):
        if not isinstance(result, bool | int | float | cutlass.Numeric | ir.Value):
            found = type(result)
            raise TypeError(
                f"{kind} must return one value that the compiler knows, got "
                f"{result!r}, a {found.__module__}.{found.__qualname__}"
            )
        return result
    if cute.size(result.shape) != 1:
        raise TypeError(f"{kind} must return one value, got a vector of shape {result.shape}")
    return result[0]


def _is_condition(number: Any) -> bool:
    if isinstance(number, ir.Value):
        return ir.IntegerType.isinstance(number.type) and ir.IntegerType(number.type).width == 1
    return isinstance(number, bool | Boolean)


@contextmanager
def _tracing(mod: Callable[..., Any], aux_tensors: Any) -> Iterator[None]:
    """`_no_truth_values`, and errors that say what a mod does wrong."""
    # a score_mod_bwd comes bound to its first argument
    name = getattr(getattr(mod, "func", mod), "__name__", repr(mod))
    try:
        with _no_truth_values():
            yield
    except TypeError as error:
        if aux_tensors is None and "'NoneType'" in str(error):
            raise ValueError(f"{name} reads aux_tensors, and the call passes none") from error
        raise
    except (IndexError, ValueError, ir.MLIRError) as error:
        if aux_tensors is None:
            raise
        if "congruent" in str(error):
            ranks = [cute.rank(x) for x in aux_tensors]
            raise ValueError(
                f"{name}: an aux tensor is indexed by as many numbers as that has dimensions, "
                f"aux_tensors[0][kv_idx[0]]; these have {ranks}"
            ) from error
        raise ValueError(f"{name}: {error} ({_INDEXED})") from error
    except DSLRuntimeError as error:
        text = f"the compiler has no code for {name}, which perhaps {_NEGATES}; or {_SHIFTS}"
        raise TypeError(text) from error


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


# -- the text that a score_mod leaves ------------------------------------------------------------


class ScoreModTraits(NamedTuple):
    """What a kernel wants to know of a score_mod beforehand.

    computes_functions: it applies fast tanh, exp2 or the like to a score. factor: the number by
    which it multiplies last, which the softmax may do as well; 1 if there is none.
    """

    computes_functions: bool
    factor: float

    @staticmethod
    def of(score_mod: Callable[..., Any], aux_tensors: Any) -> "ScoreModTraits":
        """Called while a kernel is traced: traces the callable once more, and takes that out."""
        probe = scf.IfOp(Boolean(False).ir_value())
        with ir.InsertionPoint(probe.then_block):
            score = cute.full((1,), Float32(0.0), Float32)[0]
            places = (Int32(0) for _ in range(4))
            modified = call_score_mod(score_mod, score, *places, aux_tensors)
            factor, _ = _last_factor(modified)
            traits = ScoreModTraits(_reaches_function(score.ir_value()), factor)
            scf.YieldOp([])
        probe.operation.erase()
        return traits


def _reaches_function(origin: ir.Value) -> bool:
    """Whether one of _FUNCTIONS is computed of a value, by way of any others."""
    seen: set[int] = set()
    pending = [origin]
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if _fast_function(user) in _FUNCTIONS:
                return True
            results = user.results if user.name != "scf.yield" else user.parent.operation.results
            # `==` of the DSL's values would trace a comparison
            fresh = [x for x in results if ir.Value.__hash__(x) not in seen]
            seen.update(ir.Value.__hash__(x) for x in fresh)
            pending.extend(fresh)
    return False


def _fast_function(operation: ir.Operation) -> str:
    """The function that an operation computes by a fast instruction, as far as one can tell.

    By a slow one, it is so much arithmetic besides that the pipe of the exponentials has time.
    """
    attributes = operation.attributes
    for name in ("intrin", "asm_string"):
        if name in attributes:
            return ir.StringAttr(attributes[name]).value.removeprefix("llvm.nvvm.").split(".")[0]
    dialect, name = operation.name.split(".")[:2]
    is_fast = "fastmath" in attributes and "<fast>" in str(attributes["fastmath"])
    return name if is_fast or dialect != "math" else ""


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
    if len(numbers) == 1 and _is_moderate(abs(numbers[0])):
        with ir.InsertionPoint(product):
            product.operands[1] = (scale * numbers[0]).ir_value()
        users[0].results[0].replace_all_uses_with(vectors[0].results[0])


def _is_moderate(factor: float) -> bool:
    return 2.0**-60 < factor < 2.0**60


def _last_factor(value: Float32) -> tuple[float, ir.Value]:
    """The positive number by which a mod has multiplied last, and what it has multiplied; 1 and the
    value itself if there is none."""
    result = value.ir_value()
    product = _maker(result)
    if product is not None and product.name == "vector.extract":
        product = _maker(product.operands[0])
    if product is not None and product.name == "arith.mulf":
        for number, other in zip(product.operands, list(product.operands)[::-1], strict=True):
            factor = _number(number)
            if factor is not None and _is_moderate(factor):
                return factor, other
    return 1.0, result


def _divided(value: Float32, factor: float) -> Float32:
    """value / factor, which is there already if the last product is by this factor."""
    found, other = _last_factor(value)
    if found != factor:
        return value * (1.0 / factor)
    if isinstance(other.type, ir.VectorType):
        other = vector.extract(other, [], [0] * other.type.rank)
    return Float32(other)


def _is_used(operation: ir.Operation) -> bool:
    return any(True for _ in operation.results[0].uses)


def _number(value: ir.Value) -> float | None:
    """The number that a value is, or that a vector repeats, if it is one at compile time."""
    operation = _maker(value)
    if operation is None or operation.name not in ("vector.broadcast", "arith.constant"):
        return None
    if operation.name == "vector.broadcast":
        return _number(operation.operands[0])
    number = operation.attributes["value"]
    return number.value if isinstance(number, ir.FloatAttr) else None


def _maker(value: ir.Value) -> ir.Operation | None:
    """The operation that a value is a result of; None of an argument."""
    owner = value.owner
    return owner.operation if isinstance(owner, ir.OpView | ir.Operation) else None
