"""ATen operators as text of CuTe, with torch's dtypes.

A rule of `RULES` makes an expression for each element of the result, in torch's compute dtype, then
in the result's. torch itself computes values that are known while tracing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_mask_cute.lowering.values import (
    DSL_NAMES,
    Array,
    Element,
    NotLowerable,
    Number,
    Table,
    check_size,
    computed_in,
    constant_element,
    high_of_least,
    high_of_sum,
    in_dtype,
    low_of_greatest,
    low_of_least,
    low_of_product,
    low_of_sum,
    unknown,
    zero_if_both,
    zero_if_either,
)

Rule = Callable[["OpCall"], Any]
RULES: dict[str, Rule] = {}


@dataclass(frozen=True)
class OpCall:
    """An operator and its operands. name_element: writes a line `name = expression`, and returns
    the name."""

    target: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]
    name_element: Callable[[Element], Element]

    @property
    def name_of_operator(self) -> str:
        """Without namespace and overload."""
        return str(self.target.__name__).partition(".")[0]

    def operand(self, place: int, keyword: str, default: Any = None) -> Any:
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(keyword, default)

    def elementwise(
        self,
        operands: Sequence[Any],
        computed: torch.dtype,
        write: Callable[..., str],
        low: Callable[..., float | None] = unknown,
        result: torch.dtype | None = None,
        high: Callable[..., float | None] = unknown,
    ) -> Array:
        """write: makes the text of an element from those of the operands in dtype `computed`; its
        result has dtype `result`, or `computed`. low, high: least and greatest result, from the
        operands."""
        arrays = [self._operand_in(x, computed).broadcast(self.shape) for x in operands]
        made = []
        for elements in zip(*(x.elements for x in arrays), strict=True):
            texts = [x.text for x in elements]
            if all(x.constant is not None for x in elements):
                # a dtype for what looks for one among the operands
                texts[0] = typed(elements[0], computed)
            text = write(*texts)
            element = Element(text, None, False, low(*elements), high(*elements))
            element = converted(element, result or computed, self.dtype)
            made.append(self.name_element(element))
        return Array(self.dtype, self.shape, tuple(made))

    def _operand_in(self, value: Any, computed: torch.dtype) -> Array:
        """A tensor is first converted to the dtype of the operation, which may round it."""
        array = as_array(value, computed, self)
        if isinstance(value, Array | Table) and computed_in(self.dtype) == computed:
            array = cast(array, self.dtype)
        return cast(array, computed)


def as_array(value: Any, dtype: torch.dtype, call: OpCall) -> Array:
    """An operand as an array; a Python number takes the given dtype, as in torch."""
    if isinstance(value, Array):
        return value
    if isinstance(value, Table):
        array = value.elements()
        return replace(array, elements=tuple(map(call.name_element, array.elements)))
    if isinstance(value, Number):
        held = value.in_dtype(dtype)
        return Array(held.dtype, (), (call.name_element(held.elements[0]),))
    if isinstance(value, bool | int | float):
        try:
            tensor = torch.tensor(value, dtype=dtype, device="cpu")
        except (RuntimeError, OverflowError) as error:
            raise NotLowerable(f"uses {value!r} as {dtype}: {error}") from error
        return Array.of_tensor(tensor)
    raise NotLowerable(f"calls {call.target} with {value!r}")


def cast(array: Array, dtype: torch.dtype) -> Array:
    if array.dtype == dtype:
        return array
    elements = tuple(converted(x, array.dtype, dtype) for x in array.elements)
    return Array(dtype, array.shape, elements)


def converted(element: Element, given: torch.dtype, wanted: torch.dtype) -> Element:
    if given == wanted:
        return element
    if element.constant is not None:
        number = torch.tensor(element.constant, dtype=given, device="cpu").to(wanted).item()
        return constant_element(number)
    element = in_dtype(element, given, wanted)
    if wanted == torch.bool:
        return element._replace(text=f"({element.text} != 0)", is_simple=False)
    text = element.text
    if given != torch.float32 and wanted in (torch.float16, torch.bfloat16):
        # torch converts by this step, too, and the CPU has no code for another
        text = f"Float32({text})"
    return element._replace(text=f"{DSL_NAMES[wanted]}({text})", is_simple=False)


def typed(element: Element, dtype: torch.dtype) -> str:
    """An expression as an argument with an explicit dtype."""
    if element.constant is None:
        return element.text
    return f"{DSL_NAMES[dtype]}({element.text})"


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def promoted(*operands: Any) -> torch.dtype:
    """The dtype in which torch computes with the operands, arrays or Python numbers."""
    fake_tensors: list[Any] = [
        torch.empty(x.shape if isinstance(x, Array) else [len(x.left)] * len(x.left),
                    dtype=x.dtype, device="meta")
        if isinstance(x, Array | Table)
        else (1.0 if x.is_float else 1)
        if isinstance(x, Number)
        else x
        for x in operands
    ]  # fmt: skip
    if len(fake_tensors) == 1:
        return fake_tensors[0].dtype
    return torch.result_type(*fake_tensors)


# -- arithmetic ---------------------------------------------------------------------------------


def _arithmetic(
    symbol: str, low: Callable[..., float | None], high: Callable[..., float | None] = unknown
) -> Rule:
    def apply(call: OpCall) -> Array:
        alpha = call.operand(2, "alpha", 1)
        x, y = call.args[:2]
        computed = computed_in(call.dtype)
        if computed == torch.bool:
            # of bools, + is `or` and * is `and`
            logic = {"+": "|", "*": "&"}[symbol]
            return call.elementwise((x, y), torch.bool, lambda a, b: f"{a} {logic} {b}")
        if alpha != 1:
            shape = y.shape if isinstance(y, Array) else ()
            scaled = replace(call, args=(y, alpha), kwargs={}, name=f"{call.name}_scaled",
                             shape=shape)  # fmt: skip
            y = RULES["mul"](scaled)
        return call.elementwise((x, y), computed, f"{{}} {symbol} {{}}".format, low, None, high)

    return apply


RULES["add"] = _arithmetic("+", low_of_sum, high_of_sum)
RULES["sub"] = _arithmetic("-", unknown)
RULES["mul"] = _arithmetic("*", low_of_product)


@rule("rsub")
def _rsub(call: OpCall) -> Any:
    x, y = call.args[:2]
    return RULES["sub"](replace(call, args=(y, x, *call.args[2:])))


def _divided(call: OpCall, whole: str, floating: str) -> Array:
    x, y = call.args[:2]
    computed = computed_in(call.dtype)
    name = floating if computed.is_floating_point else whole
    if name == whole and isinstance(y, int) and y == 0:
        raise ZeroDivisionError("integer division by 0")
    nonneg = zero_if_both if whole != "remainder" else (lambda a, b: zero_if_both(b, b))
    is_index = isinstance(x, Array) and all(a.never_negative for a in x.elements)
    if name == whole and is_index and type(y) is int and y > 0:
        name = "nonneg_remainder" if "remainder" in whole else "nonneg_quotient"
    found = call.elementwise((x, y), computed, lambda a, b: f"ops.{name}({a}, {b})", nonneg)
    return found.never_negative() if name.startswith("nonneg") else found


RULES["floor_divide"] = lambda call: _divided(call, "floor_divide", "float_floor_divide")
RULES["remainder"] = lambda call: _divided(call, "remainder", "float_remainder")


@rule("div", "true_divide", "divide")
def _div(call: OpCall) -> Array:
    rounding = call.operand(2, "rounding_mode")
    if rounding == "floor":
        return _divided(call, "floor_divide", "float_floor_divide")
    computed = computed_in(call.dtype)
    if rounding == "trunc" and not computed.is_floating_point:
        return _divided(call, "trunc_divide", "")
    x, y = call.args[:2]
    if rounding == "trunc":
        return call.elementwise((x, y), computed, lambda a, b: f"cute.math.trunc({a} / {b})")
    if isinstance(y, int | float) and _divides_as_product(x, y):
        return call.elementwise((x, 1.0 / y), computed, lambda a, b: f"{a} * {b}")
    return call.elementwise((x, y), computed, lambda a, b: f"{a} / {b}")


def _divides_as_product(x: Any, y: float) -> bool:
    """Whether x / y becomes x * (1 / y): exact for powers of two, and what torch on CUDA does with
    floats. A quotient of integers may be rounded to a whole number next."""
    is_usual = math.isfinite(y) and 1e-30 < abs(y) < 1e30
    return is_usual and (abs(math.frexp(y)[0]) == 0.5 or promoted(x).is_floating_point)


@rule("fmod")
def _fmod(call: OpCall) -> Array:
    if (computed := computed_in(call.dtype)).is_floating_point:
        return call.elementwise(call.args[:2], computed, lambda a, b: f"{a} % {b}")
    return _divided(call, "trunc_remainder", "")


@rule("pow")
def _pow(call: OpCall) -> Array:
    x, y = call.args[:2]
    computed = computed_in(call.dtype)
    if isinstance(y, Array) and y.shape == () and y.is_constant:
        y = y.as_tensor().item()
    if isinstance(y, int | float) and float(y).is_integer() and 1 <= y <= 8:
        return call.elementwise((x,), computed, lambda a: f"ops.whole_power({a}, {int(y)})")
    if isinstance(y, int | float) and y == 0:
        # also of NaN
        return Array.of_tensor(torch.ones(call.shape, dtype=call.dtype, device="cpu"))
    if not computed.is_floating_point:
        power = f"the power {y}" if isinstance(y, int | float) else "a power that is not known"
        hint = "write a known power of 1 to 8, 1 << x for 2 ** x, or make a float of the base"
        raise NotLowerable(f"raises an integer to {power}: {hint}")
    if isinstance(y, int | float) and y in (0.5, -0.5):
        name = "sqrt" if y > 0 else "rsqrt"
        return call.elementwise((x,), computed, lambda a: f"cute.math.{name}({a})")
    if isinstance(x, int | float) and x == 2:
        return call.elementwise((y,), computed, lambda a: f"cute.math.exp2({a}, fastmath=True)")
    return call.elementwise((x, y), computed, lambda a, b: f"ops.power({a}, {b})")


@rule("maximum", "minimum", "fmax", "fmin")
def _extreme(call: OpCall) -> Array:
    name = "maximum" if "max" in call.name_of_operator else "minimum"
    low = low_of_greatest if name == "maximum" else low_of_least
    dtype = computed_in(call.dtype)
    return call.elementwise(call.args[:2], dtype, lambda a, b: f"ops.{name}({a}, {b})", low)


@rule("clamp", "clamp_min", "clamp_max", "clip", "hardtanh")
def _clamp(call: OpCall) -> Array:
    operator = call.name_of_operator
    low, high = call.operand(1, "min"), call.operand(2, "max")
    if operator == "hardtanh":
        low, high = call.operand(1, "min_val", -1.0), call.operand(2, "max_val", 1.0)
    elif operator == "clamp_max":
        low, high = None, call.operand(1, "max")
    computed = computed_in(call.dtype)
    value = call.args[0]
    if low is not None:
        value = call.elementwise(
            (value, low), computed, lambda a, b: f"ops.at_least({a}, {b})", low_of_greatest
        )
    if high is not None:
        value = call.elementwise(
            *((value, high), computed, lambda a, b: f"ops.at_most({a}, {b})"),
            *(low_of_least, None, high_of_least),
        )
    return cast(as_array(value, call.dtype, call), call.dtype)


# -- functions of one number --------------------------------------------------------------------

# of floating point; an integer operand becomes float32 first
_FUNCTIONS = {
    **{
        name: f"cute.math.{name}({{}})"
        for name in (
            *("expm1", "log10", "log1p", "sqrt", "rsqrt"),
            *("tan", "asin", "acos", "atan", "sinh", "cosh"),
        )
    },
    **{name: f"ops.{name}({{}})" for name in ("sin", "cos", "sigmoid", "erf", "asinh")},
    # one instruction each on a GPU, with the errors that docs/flex.md lists
    **{x: f"cute.math.{x}({{}}, fastmath=True)" for x in ("exp", "exp2", "log", "log2", "tanh")},
    "special_erf": "ops.erf({})",
    "arcsinh": "ops.asinh({})",
    "reciprocal": "1.0 / {}",
    "silu": "{0} * ops.sigmoid({0})",
}
# of integers, too
_FUNCTIONS |= {"neg": "-{}", "square": "{0} * {0}", "sign": "ops.sign({})", "sgn": "ops.sign({})"}


def _function(template: str, low: Callable[..., float | None] = unknown) -> Rule:
    def apply(call: OpCall) -> Array:
        return call.elementwise(call.args[:1], computed_in(call.dtype), template.format, low)

    return apply


RULES.update({name: _function(template) for name, template in _FUNCTIONS.items()})
RULES["abs"] = _function("abs({})", lambda _: 0)
RULES["relu"] = _function("ops.maximum({}, 0)", lambda _: 0)


@rule("atan2", "arctan2", "copysign", "hypot")
def _function_of_two(call: OpCall) -> Array:
    """Integers become float32 first."""
    name = call.name_of_operator.replace("arctan2", "atan2")
    dtype = computed_in(call.dtype)
    return call.elementwise(call.args[:2], dtype, lambda a, b: f"ops.{name}({a}, {b})")


@rule("gelu")
def _gelu(call: OpCall) -> Any:
    by_tanh = "_by_tanh" if call.kwargs.get("approximate") == "tanh" else ""
    return _function(f"ops.gelu{by_tanh}({{}})")(call)


@rule("floor", "ceil", "trunc", "round")
def _rounded(call: OpCall) -> Any:
    """Integers are returned unchanged."""
    computed = computed_in(call.dtype)
    if not computed.is_floating_point:
        return as_array(call.args[0], call.dtype, call)
    if call.kwargs.get("decimals", 0) != 0:
        raise NotLowerable("rounds to decimals: write torch.round(x * 10**n) / 10**n")
    name = {"round": "roundeven"}.get(call.name_of_operator, call.name_of_operator)
    return call.elementwise(call.args[:1], computed, lambda a: f"cute.math.{name}({a})")


@rule("isnan", "isinf")
def _is_special(call: OpCall) -> Array:
    given = promoted(call.args[0])
    if not given.is_floating_point:
        return Array(torch.bool, call.shape, (constant_element(False),))
    name = "is_nan" if call.name_of_operator == "isnan" else "is_infinite"
    write = f"ops.{name}({{}})".format
    return call.elementwise(call.args[:1], computed_in(given), write, lambda _: 0, torch.bool)


# -- comparisons, logic and bits ----------------------------------------------------------------

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _comparison(symbol: str) -> Rule:
    def apply(call: OpCall) -> Array:
        x, y = call.args[:2]
        dtype = computed_in(promoted(x, y))
        if dtype == torch.bool:
            dtype = torch.int32
        write = f"{{}} {symbol} {{}}".format
        return call.elementwise((x, y), dtype, write, lambda *_: 0, torch.bool)

    return apply


RULES.update({name: _comparison(symbol) for name, symbol in _COMPARISONS.items()})
_BITS = {"and": "&", "or": "|", "xor": "^"}


def _bitwise(symbol: str, is_logical: bool) -> Rule:
    def apply(call: OpCall) -> Array:
        x, y = call.args[:2]
        if is_logical or call.dtype == torch.bool:
            return _join(call, x, y, symbol)
        nonneg = zero_if_either if symbol == "&" else zero_if_both
        dtype = computed_in(call.dtype)
        return call.elementwise((x, y), dtype, lambda a, b: f"{a} {symbol} {b}", nonneg)

    return apply


def _join(call: OpCall, x: Any, y: Any, symbol: str) -> Array:
    """Join conditions; known ones are left out."""
    arrays = [cast(as_array(v, torch.bool, call), torch.bool).broadcast(call.shape) for v in (x, y)]
    made = []
    for a, b in zip(arrays[0].elements, arrays[1].elements, strict=True):
        known, other = (a, b) if a.constant is not None else (b, a)
        if known.constant is None or symbol == "^":
            text = f"{typed(a, torch.bool)} {symbol} {typed(b, torch.bool)}"
            made.append(call.name_element(Element(text, is_simple=False, low=0)))
        elif bool(known.constant) == (symbol == "|"):
            made.append(known)
        else:
            made.append(other)
    return Array(torch.bool, call.shape, tuple(made))


for _name, _symbol in _BITS.items():
    RULES[f"bitwise_{_name}"] = RULES[f"__{_name}__"] = _bitwise(_symbol, False)
    RULES[f"logical_{_name}"] = _bitwise(_symbol, True)


@rule("bitwise_not", "logical_not")
def _not(call: OpCall) -> Array:
    if call.dtype != torch.bool:
        return call.elementwise(call.args[:1], computed_in(call.dtype), lambda a: f"~{a}")
    return call.elementwise(
        call.args[:1], torch.bool, lambda a: f"{a} == False", lambda _: 0, torch.bool
    )


def _shift(name: str, symbol: str) -> Rule:
    def apply(call: OpCall) -> Array:
        x, y = call.args[:2]
        if call.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint32):
            raise NotLowerable(f"shifts {call.dtype}: make it int32 by .int()")
        bits = torch.iinfo(call.dtype).bits
        nonneg = zero_if_both if symbol == ">>" else unknown
        if isinstance(y, int) and 0 <= y < bits:
            return call.elementwise((x, y), call.dtype, lambda a, b: f"{a} {symbol} {b}", nonneg)
        return call.elementwise((x, y), call.dtype, lambda a, b: f"ops.{name}({a}, {b})", nonneg)

    return apply


for _name in ("__lshift__", "bitwise_left_shift"):
    RULES[_name] = _shift("shift_left", "<<")
for _name in ("__rshift__", "bitwise_right_shift"):
    RULES[_name] = _shift("shift_right", ">>")


@rule("where")
def _where(call: OpCall) -> Array:
    condition, *sides = call.args[:3]
    arrays = [cast(as_array(condition, torch.bool, call), torch.bool).broadcast(call.shape)]
    arrays += [cast(as_array(x, call.dtype, call), call.dtype).broadcast(call.shape) for x in sides]
    made = []
    for c, x, y in zip(*(a.elements for a in arrays), strict=True):
        if c.constant is not None:
            made.append(x if c.constant else y)
            continue
        chosen = [typed(x, call.dtype), typed(y, call.dtype)]
        text = f"ops.where({c.text}, {chosen[0]}, {chosen[1]})"
        made.append(call.name_element(Element(text, is_simple=False, low=low_of_least(x, y))))
    return Array(call.dtype, call.shape, tuple(made))


@rule("_to_copy", "to", "convert_element_type")
def _to(call: OpCall) -> Array:
    array = as_array(call.args[0], call.dtype, call)
    return cast(array, call.dtype)


# -- what leaves the elements as they are -------------------------------------------------------


@rule("detach")
def _detach(call: OpCall) -> Any:
    """For a whole tensor in memory, the reader has already removed the gradient."""
    array = call.args[0]
    if not isinstance(array, Array) or not array.dtype.is_floating_point or array.is_constant:
        return array
    return call.elementwise((array,), array.dtype, lambda a: f"ops.detached({a})")


@rule("clone", "alias", "lift_fresh_copy", "lift_fresh", "contiguous", "view_of")
def _same(call: OpCall) -> Any:
    return call.args[0]


def _moves_elements(call: OpCall) -> Array:
    """torch itself computes where each element goes."""
    arrays = call.args[0] if isinstance(call.args[0], list | tuple) else [call.args[0]]
    arrays = [cast(as_array(x, call.dtype, call), call.dtype) for x in arrays]
    places, count = [], 0
    for array in arrays:
        places.append(array.places() + count)
        count += len(array.elements)
    everything = Array(call.dtype, (count,), tuple(e for a in arrays for e in a.elements))
    is_list = isinstance(call.args[0], list | tuple)
    first: Any = places if is_list else places[0]
    return everything.rearranged(call.target(first, *call.args[1:], **call.kwargs))


for _name in (
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "t"),
    *("transpose", "slice", "flatten", "cat", "stack", "flip", "repeat", "diagonal", "roll"),
):
    RULES[_name] = _moves_elements


@rule("select")
def _select(call: OpCall) -> Any:
    source, dimension, index = call.args[:3]
    if not isinstance(source, Table):
        return _moves_elements(call)
    place = dimension % len(source.left)
    return source.at({place: constant_element(index)})


@rule("index")
def _index(call: OpCall) -> Any:
    source, indices = call.args[:2]
    arrays = {i: x for i, x in enumerate(indices) if x is not None}
    arrays = {i: as_array(x, torch.int64, call) for i, x in arrays.items()}
    if any(x.dtype not in (torch.int32, torch.int64) for x in arrays.values()):
        raise NotLowerable("indexes by a mask: write torch.where(mask, x, y)")
    if not isinstance(source, Table):
        if all(x.is_constant for x in arrays.values()):
            given = [arrays[i].as_tensor() if i in arrays else None for i in range(len(indices))]
            return source.rearranged(call.target(source.places(), given))
        return _chosen_element(call, source, indices, arrays)
    if all(x.shape == () for x in arrays.values()):
        return source.at({i: x.elements[0] for i, x in arrays.items()})
    return _gathered(call, source, arrays)


def _gathered(call: OpCall, source: Table, arrays: dict[int, Array]) -> Array:
    """Elements of a table at several indices at once, replacing its first dimensions."""
    if sorted(arrays) != list(range(len(arrays))):
        raise NotLowerable("indexes by vectors after a slice: move these dimensions to the front")
    shape = torch.broadcast_shapes(*(x.shape for x in arrays.values()))
    spread = {i: x.broadcast(shape) for i, x in arrays.items()}
    made: list[Element] = []
    count = len(next(iter(spread.values())).elements)
    for n in range(count):
        part = source.at({i: x.elements[n] for i, x in spread.items()})
        made.extend(part.elements().elements)
    check_size(len(made))
    return Array(call.dtype, call.shape, tuple(map(call.name_element, made)))


def _chosen_element(
    call: OpCall, source: Array, indices: Sequence[Any], arrays: dict[int, Array]
) -> Array:
    """One of a vector's few elements, by an index known only in the kernel."""
    if len(indices) != 1 or len(source.shape) != 1 or arrays[0].shape != ():
        raise NotLowerable("indexes what it computed by a value: index a captured tensor instead")
    index, elements = arrays[0].elements[0], source.elements
    chosen = elements[-1]
    for i, element in reversed(list(enumerate(elements[:-1]))):
        is_here = f"({index.text} == {i})"
        if not index.is_nonneg:
            is_here = f"({is_here} | ({index.text} == {i - len(elements)}))"
        sides = typed(element, call.dtype), typed(chosen, call.dtype)
        text = f"ops.where({is_here}, {sides[0]}, {sides[1]})"
        chosen = call.name_element(Element(text, is_simple=False))
    return Array(call.dtype, (), (chosen,))


# -- reductions ---------------------------------------------------------------------------------


def _reduction(write: Callable[[str, str], str], dtype_of: Callable[[OpCall], torch.dtype]) -> Rule:
    def apply(call: OpCall) -> Array:
        source = as_array(call.args[0], call.dtype, call)
        dims = call.operand(1, "dim")
        return _reduced(call, source, dims, write, dtype_of(call))

    return apply


def _reduced(
    call: OpCall, source: Array, dims: Any, write: Callable[[str, str], str], dtype: torch.dtype
) -> Array:
    rank = len(source.shape)
    if dims is None or dims == []:
        dims = list(range(rank))
    chosen = sorted({d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)})
    kept = [d for d in range(rank) if d not in chosen]
    places = source.places().permute(kept + chosen) if rank else source.places()
    rows = places.reshape(-1, max(places[(0,) * len(kept)].numel() if kept else places.numel(), 1))
    elements = cast(source, dtype).elements
    made = []
    for row in rows.tolist():
        parts = [elements[i] for i in row]
        total = functools.reduce(
            lambda a, b: call.name_element(
                Element(write(typed(a, dtype), b.text), is_simple=False, low=zero_if_both(a, b))
            ),
            parts,
        )
        made.append(call.name_element(converted(total, dtype, call.dtype)))
    return Array(call.dtype, call.shape, tuple(made))


RULES["sum"] = _reduction(lambda a, b: f"{a} + {b}", lambda c: computed_in(c.dtype))
RULES["prod"] = _reduction(lambda a, b: f"{a} * {b}", lambda c: computed_in(c.dtype))
RULES["any"] = _reduction(lambda a, b: f"{a} | Boolean({b})", lambda c: torch.bool)
RULES["all"] = _reduction(lambda a, b: f"{a} & Boolean({b})", lambda c: torch.bool)
RULES["amax"] = _reduction(lambda a, b: f"ops.maximum({a}, {b})", lambda c: computed_in(c.dtype))
RULES["amin"] = _reduction(lambda a, b: f"ops.minimum({a}, {b})", lambda c: computed_in(c.dtype))


@rule("max", "min")
def _max(call: OpCall) -> Any:
    """Without a dimension it means the maximum of two tensors."""
    if len(call.args) == 1:
        return RULES["amax" if call.name_of_operator == "max" else "amin"](call)
    return _extreme(call)


@rule("mean")
def _mean(call: OpCall) -> Array:
    source = as_array(call.args[0], call.dtype, call)
    summed = RULES["sum"](replace(call, args=(source, *call.args[1:])))
    count = len(source.elements) // max(len(summed.elements), 1)
    dtype = computed_in(call.dtype)
    return replace(call, name=f"{call.name}_mean").elementwise(
        (summed, count), dtype, lambda a, b: f"{a} / {b}"
    )


@rule("dot", "vdot")
def _dot(call: OpCall) -> Array:
    dtype = computed_in(call.dtype)
    x, y = (cast(as_array(v, dtype, call), dtype) for v in call.args[:2])
    products = replace(call, dtype=dtype, shape=x.shape).elementwise(
        (x, y), dtype, lambda a, b: f"{a} * {b}"
    )
    return _reduced(call, products, None, lambda a, b: f"{a} + {b}", dtype)
