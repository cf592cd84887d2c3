"""Analysis and changes of the IR that a user callable leaves in a kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf, vector

# What the pipe of the exponentials computes in an instruction, by `_fast_function`.
_FUNCTIONS = {"cos", "ex2", "exp", "exp2", "lg2", "log", "log2", "rcp", "rsqrt", "sin", "tanh"}
# Operations on layouts and coordinates. Their results follow from their operands alone, under no
# condition.
COORDINATES = {
    "builtin.unrealized_conversion_cast",
    "cute.add_offset",
    "cute.crd2idx",
    "cute.get_layout",
    "cute.get_leaves",
    "cute.get_scalars",
    "cute.make_coord",
    "cute.make_int_tuple",
    "cute.make_layout",
    "cute.make_shape",
    "cute.size",
    "cute.tuple.product",
}
# Dialects whose operations take vectors element by element.
_BY_ELEMENT = {"arith", "math"}


@contextmanager
def draft() -> Iterator[None]:
    """A context whose IR is removed at its end, but not after an error, which may show it."""
    place = scf.IfOp(Boolean(False).ir_value())
    with ir.InsertionPoint(place.then_block):
        yield
        scf.YieldOp([])
    place.operation.erase()


def made_of(value: ir.Value) -> list[ir.Value]:
    """A value and everything computed from it, in the IR so far."""
    results = [result for use in value.uses for result in use.owner.operation.results]
    return [value, *(found for result in results for found in made_of(result))]


def key_of(value: ir.Value) -> int:
    """Identity of a value: `==` of the DSL's values would trace a comparison."""
    return ir.Value.__hash__(value)


def maker_of(value: ir.Value) -> ir.Operation | None:
    """The operation that produced a value; None for an argument."""
    owner = value.owner
    return owner.operation if isinstance(owner, ir.OpView | ir.Operation) else None


def count_uses(values: list[ir.Value]) -> int:
    return sum(1 for value in values for _ in value.uses)


def reaches_function(origin: ir.Value) -> bool:
    """Whether one of _FUNCTIONS is applied to a value or to anything computed from it."""
    return any(_fast_function(user) in _FUNCTIONS for user in _users_of(origin))


def is_by_element(*origins: cute.TensorSSA) -> bool:
    """Whether all that is computed from vectors, and used, is computed by element."""
    users = (user for origin in origins for user in _users_of(origin.ir_value()))
    return all(_is_by_element(user) or _is_unused_element(user) for user in users)


def join_factors(score: cute.TensorSSA, scale: Float32) -> None:
    """Merge the factor of a mod into `scale` if the mod only multiplies the score by a number. The
    score has been multiplied by `scale`, so one product and one rounding replace two. Numbers that
    could take the factor out of fp32 range stay."""
    product = score.ir_value().owner.operation
    users = [use.owner.operation for use in product.results[0].uses]
    users = [user for user in users if not _is_unused_element(user)]
    if len(users) != 1 or users[0].name != "arith.mulf":
        return
    numbers = [x for x in map(constant, users[0].operands) if x is not None]
    if len(numbers) == 1 and _is_moderate(abs(numbers[0])):
        with ir.InsertionPoint(product):
            product.operands[1] = cute.full(score.shape, scale * numbers[0], Float32).ir_value()
        users[0].results[0].replace_all_uses_with(product.results[0])


def constant(value: ir.Value) -> float | None:
    """The floating-point number that a value is, or that a vector repeats, if that is known."""
    operation = maker_of(value)
    if operation is None or operation.name not in ("vector.broadcast", "arith.constant"):
        return None
    if operation.name == "vector.broadcast":
        return constant(operation.operands[0])
    number = operation.attributes["value"]
    return number.value if isinstance(number, ir.FloatAttr) else None


def divided(value: Float32, factor: float) -> Float32:
    """value / factor; if the last product is by this factor, its other operand."""
    found, other = last_product(value)
    if found != factor:
        return value * (1.0 / factor)
    if isinstance(other.type, ir.VectorType):
        # of the same element
        taken = value.ir_value().owner.operation
        places = list(taken.operands)[1:], list(taken.attributes["static_position"])
        other = vector.extract(other, *places)
    return Float32(other)


def _users_of(origin: ir.Value) -> Iterator[ir.Operation]:
    """The operations that use a value, or anything computed from it, with possible repetitions."""
    seen: set[int] = set()
    pending = [origin]
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            yield user
            results = user.results if user.name != "scf.yield" else user.parent.operation.results
            fresh = [x for x in results if key_of(x) not in seen]
            seen.update(map(key_of, fresh))
            pending.extend(fresh)


def _fast_function(operation: ir.Operation) -> str:
    """The function that an operation computes by one fast instruction, if it can be seen."""
    attributes = operation.attributes
    for name in ("intrin", "asm_string"):
        if name in attributes:
            return ir.StringAttr(attributes[name]).value.removeprefix("llvm.nvvm.").split(".")[0]
    dialect, name = operation.name.split(".")[:2]
    is_fast = "fastmath" in attributes and "<fast>" in str(attributes["fastmath"])
    return name if is_fast or dialect != "math" else ""


def _is_by_element(operation: ir.Operation) -> bool:
    return operation.name.split(".")[0] in _BY_ELEMENT and all(
        isinstance(x.type, ir.VectorType) for x in operation.results
    )


def _is_moderate(factor: float) -> bool:
    return 2.0**-60 < factor < 2.0**60


def last_product(value: Float32) -> tuple[float, ir.Value]:
    """The positive number that a mod multiplied by last, or 1, and the multiplied value."""
    result = value.ir_value()
    product = maker_of(result)
    if product is not None and product.name == "vector.extract":
        product = maker_of(product.operands[0])
    if product is not None and product.name == "arith.mulf":
        for number, other in zip(product.operands, list(product.operands)[::-1], strict=True):
            factor = constant(number)
            if factor is not None and _is_moderate(factor):
                return factor, other
    return 1.0, result


def _is_unused_element(operation: ir.Operation) -> bool:
    return operation.name == "vector.extract" and not any(True for _ in operation.results[0].uses)
