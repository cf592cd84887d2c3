"""Derivatives of score modifiers, for the backward pass.

`differentiate` traces a `score_mod` as the forward kernel does, and reads the operations that the
trace leaves in the kernel's IR. It goes backwards from the returned score (reverse mode): each
operation turns the derivative of its result into derivatives of its operands. So the form of the
modifier's source does not matter.

An operation without an entry in the tables here is an error that names it, if it touches the score
or an aux tensor whose gradient is wanted. It is an error even if its result is unused: otherwise a
store to memory would silently lose a derivative. The user can then pass a `score_mod_bwd`.

Derivatives at corners: `abs` has 0 at 0; for equal operands `min` and `max` follow the first;
functions with jumps (comparisons, rounding to whole numbers) count as constant. All products are
Float32, even if the modifier itself rounds to fewer bits. A conversion between floating-point types
has the derivative 1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, vector

from flash_mask_cute.mods.aux_reads import METADATA, merged_reads, tensors_of, with_tensors
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.ir_analysis import COORDINATES, constant, key_of

# (index of the aux tensor, coordinates of the element, d value / d element)
AuxTerm = tuple[int, tuple[Int32, ...], Float32]


def differentiate(
    score_mod: Callable[..., Any],
    score: Float32,
    place: ScorePlace,
    aux_tensors: Any,
    wants_aux: Sequence[int] = (),
) -> tuple[Float32, Float32, list[AuxTerm]]:
    """The modified score and its derivatives with respect to the score and to aux tensor elements.

    Called while a kernel is traced, for one score. aux_tensors: the list that the modifier expects,
    or None. wants_aux: indices of the aux tensors whose gradients are wanted.

    Returns: the result of `call_score_mod`, its derivative by the score, and a term for each read
    of a wanted aux tensor on which it depends; those of an element that is read twice add up.
    Raises NotImplementedError: an operation has no derivative here; the message names it;
    ValueError: wants_aux names a tensor that does not exist, or has integers."""
    # A copy of the score, and views of the tensors, that only this call of the modifier can use.
    block = ir.InsertionPoint.current.block
    given_score = cute.full((1,), score, type(score))[0]
    views = {i: _view(aux_tensors, i) for i in sorted(set(wants_aux))}
    given_tensors = aux_tensors
    if views:
        tensors = enumerate(tensors_of(aux_tensors))
        given_tensors = with_tensors(aux_tensors, (views.get(i, x) for i, x in tensors))
    with merged_reads():
        value = call_score_mod(score_mod, given_score, place, given_tensors)

    try:
        reads = [(i, load) for i, view in views.items() for load in _loads_of(view)]
        origins = [given_score.ir_value(), *(load.results[0] for _, load in reads)]
        gradient = _gradient(value.ir_value(), _values_that_depend_on(origins, block))
        terms = [
            (i, _coordinates(load, views[i]), gradient[key_of(element)])
            for (i, load), element in zip(reads, origins[1:], strict=True)
            if key_of(element) in gradient
        ]
    except NotImplementedError as error:
        if not views:
            raise
        raise NotImplementedError(
            f"{error}, which gives no gradients of aux tensors: detach those that require grad"
        ) from error
    d_score = gradient.get(key_of(origins[0]), Float32(0.0))
    return value, d_score, terms


def detached(x: cutlass.Numeric) -> cutlass.Numeric:
    """The floating-point scalar x, which `differentiate` treats as constant. It is a product with
    1, marked by an attribute; compilers remove the product."""
    dtype = type(x)
    product = arith.mulf(x.ir_value(), dtype(1.0).ir_value())
    product.owner.operation.attributes[_DETACHED] = ir.UnitAttr.get()
    return dtype(product)


def call_score_mod_bwd(
    score_mod_bwd: Callable[..., Any],
    grad: Float32,
    score: Float32,
    place: ScorePlace,
    aux_tensors: Any,
) -> Float32:
    """The gradient of the score, from `grad`, the gradient of the modified score, by
    score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, aux_tensors). score: unmodified."""
    bound = functools.partial(score_mod_bwd, cute.full((1,), grad, Float32))
    with merged_reads():
        return call_score_mod(bound, score, place, aux_tensors, kind="score_mod_bwd")


# -- partial derivatives ------------------------------------------------------------------------


class _Step(NamedTuple):
    """One operation of the modifier, as the rules for partial derivatives see it."""

    operation: ir.Operation
    grads: list[Float32 | None]
    """d value / d result, for each result; None where the value does not depend on it."""

    @property
    def grad(self) -> Float32:
        return self.grads[0]

    def operand(self, i: int) -> cutlass.Numeric:
        """An operand of the operation as a scalar; floating-point types become Float32."""
        return _scalar(self.operation.operands[i])

    def result(self, i: int) -> Float32:
        return _scalar(self.operation.results[i])

    @property
    def a(self) -> Float32:
        return self.operand(0)

    @property
    def b(self) -> Float32:
        return self.operand(1)

    @property
    def out(self) -> Float32:
        return self.result(0)

    @property
    def is_approximate(self) -> bool:
        """Whether the modifier requested an approximate GPU instruction."""
        return self.operation.name.startswith("llvm.")

    @property
    def fastmath(self) -> bool:
        attributes = self.operation.attributes
        is_fast = "fastmath" in attributes and "<fast>" in str(attributes["fastmath"])
        return is_fast or self.is_approximate

    def divide(self, x: Float32, y: Float32) -> Float32:
        return cute.math.div(x, y, approx=True) if self.is_approximate else x / y


def _scalar(value: ir.Value) -> cutlass.Numeric:
    dtype = value.type
    if isinstance(dtype, ir.VectorType):
        value = vector.extract(value, [], [0] * dtype.rank)
        dtype = dtype.element_type
    number = cutlass.Numeric.from_mlir_type(dtype)(value)
    return number.to(Float32) if number.dtype.is_float else number


def _where(condition: Any, x: Any, y: Any) -> Float32:
    return Float32(cutlass.select_(condition, Float32(x), Float32(y)))


def _same(o: _Step) -> Float32:
    return o.grad


def _by_reciprocal(o: _Step) -> Float32:
    return -o.grad * o.out * o.out


def _by_copysign(o: _Step) -> Float32:
    sign = cute.math.copysign(Float32(1.0), o.a) * cute.math.copysign(Float32(1.0), o.b)
    return o.grad * sign


def _by_base(o: _Step) -> Float32:
    if constant(o.operation.operands[1]) == 2.0:
        return o.grad * (2.0 * o.a)
    slope = o.b * cute.math.pow(o.a, o.b - 1.0, fastmath=o.fastmath)
    return o.grad * _where(o.b == 0.0, 0.0, slope)


def _by_exponent(o: _Step) -> Float32:
    # where the power is 0, so is its logarithm's factor
    slope = o.out * cute.math.log(o.a, fastmath=o.fastmath)
    return o.grad * _where(o.out == 0.0, 0.0, slope)


def _by_base_of_whole_power(o: _Step) -> Float32:
    slope = Float32(o.b) * cute.math.fpowi(o.a, o.b - 1)
    return o.grad * _where(o.b == 0, 0.0, slope)


def _by_sincos(o: _Step) -> Float32:
    sine, cosine = o.result(0), o.result(1)
    terms = [g * d for g, d in zip(o.grads, (cosine, -sine), strict=True) if g is not None]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _function(slope: Callable[[_Step], Float32]) -> tuple[Callable[[_Step], Float32]]:
    return (lambda o: o.grad * slope(o),)


def _quotient(
    numerator: Callable[[_Step], Any], denominator: Callable[[_Step], Any]
) -> Callable[[_Step], Float32]:
    return lambda o: o.divide(o.grad * numerator(o), denominator(o))


def _rsqrt(o: _Step, x: Float32) -> Float32:
    return cute.math.rsqrt(x, fastmath=o.fastmath)


def _sum_of_squares(o: _Step) -> Float32:
    return o.a * o.a + o.b * o.b


_PASS = (_same,)
_PRODUCT = (lambda o: o.grad * o.b, lambda o: o.grad * o.a)
# of the first operand, if it is the result, else of the second
_CHOICE = (lambda o: _where(o.out == o.a, o.grad, 0.0), lambda o: _where(o.out == o.a, 0.0, o.grad))
_ABS = (lambda o: _where(o.a > 0.0, o.grad, _where(o.a < 0.0, -o.grad, 0.0)),)
_FMA = (*_PRODUCT, _same)
_ERF_SCALE = 2.0 / math.sqrt(math.pi)

# From an operation's name to what each operand contributes to; None: no derivative by it.
_PARTIALS: dict[str, tuple[Callable[[_Step], Float32] | None, ...]] = {
    "arith.addf": (_same, _same),
    "arith.subf": (_same, lambda o: -o.grad),
    "arith.mulf": _PRODUCT,
    "arith.divf": (lambda o: o.divide(o.grad, o.b), lambda o: -o.divide(o.grad, o.b) * o.out),
    # a - b * n, n the whole number of times that b fits
    "arith.remf": (_same, lambda o: -o.grad * cute.math.round((o.a - o.out) / o.b)),
    "arith.negf": (lambda o: -o.grad,),
    "arith.maximumf": _CHOICE,
    "arith.maxnumf": _CHOICE,
    "arith.minimumf": _CHOICE,
    "arith.minnumf": _CHOICE,
    "arith.select": (
        None,
        lambda o: _where(o.operand(0), o.grad, 0.0),
        lambda o: _where(o.operand(0), 0.0, o.grad),
    ),
    "arith.extf": _PASS,
    "arith.truncf": _PASS,
    "vector.broadcast": _PASS,
    "vector.extract": _PASS,
    "vector.shape_cast": _PASS,
    "math.absf": _ABS,
    "math.copysign": (_by_copysign, lambda o: Float32(0.0)),
    "math.fma": _FMA,
    "math.powf": (_by_base, _by_exponent),
    "math.fpowi": (_by_base_of_whole_power, None),
    "math.exp": _function(lambda o: o.out),
    "math.exp2": _function(lambda o: o.out * math.log(2.0)),
    "math.expm1": _function(lambda o: o.out + 1.0),
    "math.log": (lambda o: o.divide(o.grad, o.a),),
    "math.log2": (_quotient(lambda o: 1.0 / math.log(2.0), lambda o: o.a),),
    "math.log10": (_quotient(lambda o: 1.0 / math.log(10.0), lambda o: o.a),),
    "math.log1p": (lambda o: o.divide(o.grad, 1.0 + o.a),),
    "math.sqrt": (_quotient(lambda o: 0.5, lambda o: o.out),),
    "math.rsqrt": _function(lambda o: -0.5 * o.out * o.out * o.out),
    "math.cbrt": (lambda o: o.divide(o.grad, 3.0 * o.out * o.out),),
    "math.sin": _function(lambda o: cute.math.cos(o.a, fastmath=o.fastmath)),
    "math.cos": _function(lambda o: -cute.math.sin(o.a, fastmath=o.fastmath)),
    "math.sincos": (_by_sincos,),
    "math.tan": _function(lambda o: 1.0 + o.out * o.out),
    "math.asin": _function(lambda o: _rsqrt(o, 1.0 - o.a * o.a)),
    "math.acos": _function(lambda o: -_rsqrt(o, 1.0 - o.a * o.a)),
    "math.atan": (lambda o: o.divide(o.grad, 1.0 + o.a * o.a),),
    "math.atan2": (
        _quotient(lambda o: o.b, _sum_of_squares),
        _quotient(lambda o: -o.a, _sum_of_squares),
    ),
    "math.sinh": _function(lambda o: cute.math.cosh(o.a)),
    "math.cosh": _function(lambda o: cute.math.sinh(o.a)),
    "math.tanh": _function(lambda o: 1.0 - o.out * o.out),
    "math.asinh": _function(lambda o: _rsqrt(o, o.a * o.a + 1.0)),
    "math.acosh": _function(lambda o: _rsqrt(o, o.a * o.a - 1.0)),
    "math.atanh": (lambda o: o.divide(o.grad, 1.0 - o.a * o.a),),
    "math.erf": _function(lambda o: _ERF_SCALE * cute.math.exp(-(o.a * o.a))),
    "math.erfc": _function(lambda o: -_ERF_SCALE * cute.math.exp(-(o.a * o.a))),
    "nvvm.fabs": _ABS,
    "nvvm.fmax": _CHOICE,
    "nvvm.fmin": _CHOICE,
    "nvvm.addf": (_same, _same),
    "nvvm.fma": _FMA,
    "nvvm.rcp.approx.ftz.f": (_by_reciprocal,),
    "nvgpu.rcp": (_by_reciprocal,),
}
# Attributes of these operations that change no partial derivative; others do if they are set.
_HARMLESS_NVVM_ATTRIBUTES = {"ftz", "nan", "rnd"}
_UNSET = {"false", "#nvvm.sat_mode<none>"}

# llvm.nvvm.<name>.<modifiers> computes what this operation does
_INTRINSICS = {
    "sin": "math.sin",
    "cos": "math.cos",
    "ex2": "math.exp2",
    "lg2": "math.log2",
    "tanh": "math.tanh",
    "sqrt": "math.sqrt",
    "rsqrt": "math.rsqrt",
    "rcp": "nvgpu.rcp",
    "div": "arith.divf",
    "mul": "arith.mulf",
    "fma": "math.fma",
}
_INTRINSIC_MODIFIERS = {"approx", "full", "ftz", "rn", "rz", "rm", "rp", "f", "d"}
# the instruction that `cute.arch.exp2` writes out
_ASSEMBLY = {"ex2.approx.ftz.f32 $0, $1;": "math.exp2"}

# Of an operation whose result counts as constant, see `detached`.
_DETACHED = "flash_mask.detached"
# Constant between jumps.
_PIECEWISE_CONSTANT = {
    "arith.cmpf",
    "math.ceil",
    "math.floor",
    "math.isfinite",
    "math.isinf",
    "math.isnan",
    "math.isnormal",
    "math.round",
    "math.roundeven",
    "math.trunc",
}

_EXPLANATIONS = {
    "arith.bitcast": "reinterprets the bits of it",
    "arith.fptosi": "converts it to an integer",
    "arith.fptoui": "converts it to an integer",
    "cute.get_iter": "reads it by its pointer",
    "cute.slice": "takes a slice of it: give a coordinate for each dimension",
    "scf.for": "uses it in a loop at run time",
    "scf.while": "uses it in a loop at run time",
    "scf.yield": "chooses it by a branch on a run-time condition: choose between elements",
    "vector.bitcast": "reinterprets the bits of it",
}


def _refuse(operation: ir.Operation, what: str = "the score or a value made of it") -> NoReturn:
    explanation = _EXPLANATIONS.get(operation.name, "does something without a known derivative")
    raise NotImplementedError(
        f"score_mod cannot be differentiated: with {what}, it {explanation} ({operation.name}); "
        "pass score_mod_bwd"
    )


def _partials(operation: ir.Operation) -> tuple[Callable[[_Step], Float32] | None, ...]:
    name, attributes = operation.name, operation.attributes
    if name == "llvm.call_intrinsic":
        parts = ir.StringAttr(attributes["intrin"]).value.split(".")
        if parts[:2] == ["llvm", "nvvm"] and _INTRINSIC_MODIFIERS.issuperset(parts[3:]):
            name = _INTRINSICS.get(parts[2], name)
    elif name == "llvm.inline_asm":
        name = _ASSEMBLY.get(ir.StringAttr(attributes["asm_string"]).value, name)
    elif name.startswith("nvvm.") and not all(
        key in _HARMLESS_NVVM_ATTRIBUTES or str(attributes[key]) in _UNSET for key in attributes
    ):
        _refuse(operation)
    if name not in _PARTIALS:
        _refuse(operation)
    return _PARTIALS[name]


def is_known_function(operation: ir.Operation) -> bool:
    """Whether an operation is a function of floating-point numbers that has a derivative here."""
    try:
        _partials(operation)
    except NotImplementedError:
        return False
    return True


# -- the text of the modifier -------------------------------------------------------------------


def _is_one_number(value: ir.Value) -> bool:
    dtype = value.type
    if isinstance(dtype, ir.VectorType):
        return math.prod(dtype.shape) == 1 and isinstance(dtype.element_type, ir.FloatType)
    return isinstance(dtype, ir.FloatType)


def _values_that_depend_on(origins: Sequence[ir.Value], block: ir.Block) -> set[int]:
    """Keys of all values in the block that depend on an origin, branches flattened (`_flatten`)."""
    found: set[int] = set()
    pending = list(origins)
    while pending:
        value = pending.pop()
        if key_of(value) in found:
            continue
        found.add(key_of(value))
        for use in list(value.uses):
            user = use.owner.operation
            _flatten(_in_block(user, block), user)
            if user.name == "scf.yield":
                pending.append(_parent(user).results[use.operand_number])
            elif user.name not in _PIECEWISE_CONSTANT and _DETACHED not in user.attributes:
                partials = _partials(user)
                if use.operand_number >= len(partials) or partials[use.operand_number] is None:
                    _refuse(user)
                if not all(_is_one_number(result) for result in user.results):
                    _refuse(user)
                pending.extend(user.results)
    return found


def _parent(operation: ir.Operation) -> ir.Operation:
    return operation.parent.operation


def _in_block(operation: ir.Operation, block: ir.Block) -> ir.Operation:
    """The operation of the block that is, or contains, another operation."""
    while operation.block != block:
        operation = _parent(operation)
    return operation


# Besides those with partial derivatives: whatever computes on scalars and coordinates without a
# condition under which it is undefined. Reads of memory and integer division are not here.
_SPECULATED = {
    "arith.addi",
    "arith.andi",
    "arith.cmpi",
    "arith.constant",
    "arith.extsi",
    "arith.extui",
    "arith.index_cast",
    "arith.maxsi",
    "arith.minsi",
    "arith.muli",
    "arith.ori",
    "arith.sitofp",
    "arith.subi",
    "arith.trunci",
    "arith.uitofp",
    "arith.xori",
    "math.absi",
    *COORDINATES,
}


def _flatten(branch: ir.Operation, user: ir.Operation) -> None:
    """If `user` is in a branch, compute both sides before it; the branch becomes a select."""
    if branch == user:
        return
    if branch.name != "scf.if":
        _refuse(branch)
    for inner in _contents(branch):
        is_known = inner.name in ("scf.if", *_SPECULATED, *_PIECEWISE_CONSTANT)
        if not is_known and not is_known_function(inner):
            raise NotImplementedError(
                "score_mod cannot be differentiated: one side of a branch on a run-time condition, "
                f"which the score depends on, contains {inner.name}; move that before the branch, "
                "or pass score_mod_bwd"
            )
    for nested in _contents(branch):
        if nested.name == "scf.if":
            _flatten(nested, user)
    for inner in _contents(branch):
        inner.move_before(branch)


def _contents(branch: ir.Operation) -> list[ir.Operation]:
    sides = [side for region in branch.regions for side in region.blocks]
    operations = [view.operation for side in sides for view in side.operations]
    return [operation for operation in operations if operation.name != "scf.yield"]


def _inputs(operation: ir.Operation) -> list[tuple[ir.Value, Callable[[_Step], Float32 | None]]]:
    """The operands of an operation, and the contributions of its gradient to theirs."""
    if operation.name != "scf.if":
        partials = _partials(operation)
        return [(x, f) for x, f in zip(operation.operands, partials, strict=False) if f is not None]
    return [
        (x, functools.partial(_by_side, i, is_taken))
        for region, is_taken in zip(operation.regions, (True, False), strict=True)
        for i, x in enumerate(list(region.blocks[0].operations)[-1].operation.operands)
    ]


def _by_side(i: int, is_taken: bool, o: _Step) -> Float32 | None:
    grad = o.grads[i]
    if grad is None:
        return None
    condition = o.operand(0)
    return _where(condition, grad, 0.0) if is_taken else _where(condition, 0.0, grad)


def _gradient(value: ir.Value, active: set[int]) -> dict[int, Float32]:
    """Keys of the active values that determine `value`, and its derivatives by them."""
    gradient = {key_of(value): Float32(1.0)} if key_of(value) in active else {}
    for operation in _reverse_order(value, active):
        step = _Step(operation, [gradient.get(key_of(x)) for x in operation.results])
        for x, partial in _inputs(operation):
            term = partial(step) if key_of(x) in active else None
            if term is not None:
                known = gradient.get(key_of(x))
                gradient[key_of(x)] = term if known is None else known + term
    return gradient


def _reverse_order(value: ir.Value, active: set[int]) -> list[ir.Operation]:
    """Operations between the origins and an active value, users before their operands."""
    order: list[ir.Operation] = []
    seen: set[ir.Operation] = set()
    pending = [(value, False)] if key_of(value) in active else []
    while pending:
        value, is_done = pending.pop()
        operation = value.owner.operation
        if is_done:
            order.append(operation)
        elif operation not in seen and operation.name != "cute.memref.load":
            seen.add(operation)
            pending.append((value, True))
            pending.extend((x, False) for x, _ in _inputs(operation) if key_of(x) in active)
    return order[::-1]


# -- aux tensors --------------------------------------------------------------------------------


def _view(aux_tensors: Any, i: int) -> cute.Tensor:
    tensors = tensors_of(aux_tensors)
    if not 0 <= i < len(tensors):
        raise ValueError(
            f"the gradient of aux_tensors[{i}] is wanted, but there are {len(tensors)}"
        )
    tensor = tensors[i]
    if not tensor.element_type.is_float:
        raise ValueError(
            f"the gradient of aux_tensors[{i}] is wanted, which holds {tensor.element_type}"
        )
    view: Any = cute.make_tensor(tensor.iterator, tensor.layout)
    view.is_learned = True
    return view


def _loads_of(view: cute.Tensor) -> list[ir.Operation]:
    """Reads of single elements, in IR order."""
    loads = []
    for use in view.value.uses:
        user = use.owner.operation
        if user.name == "cute.memref.load":
            loads.append(user)
        elif user.name == "cute.get_iter":
            # made with every tensor, whether it is used or not
            if any(True for _ in user.results[0].value.uses):
                _refuse(user, "an aux tensor whose gradient is wanted")
        elif user.name not in METADATA:
            _refuse(user, "an aux tensor whose gradient is wanted")
    return loads[::-1]


def _coordinates(load: ir.Operation, view: cute.Tensor) -> tuple[Int32, ...]:
    # the DSL's own reading of a packed coordinate
    coordinates = cute.core._unpack_x_tuple(load.operands[1])
    if not isinstance(coordinates, tuple):
        coordinates = (coordinates,)
    if len(coordinates) != cute.rank(view):
        _refuse(load, "an aux tensor whose gradient is wanted, by other than its coordinates")
    return tuple(Int32(c) for c in coordinates)
