"""Arithmetic in bf16 on the host, in fp32 and integers.

LLVM rounds to bf16 with an instruction that few CPUs have (AVX512_BF16), and elsewhere calls a
function that no library of the process provides. So each operation on bf16 becomes one in fp32, and
its result is rounded on the bits. Operands are widened on the bits too, because LLVM returns an
operation on converted operands to their type. fp64 goes to 16 bits through fp32, as in torch.
"""

from collections.abc import Iterator
from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import arith

# Operations that keep the bits of their operands.
_EXACT = {"arith.bitcast", "arith.constant", "arith.select"}


def compute_bf16_in_fp32(operation: Any) -> None:
    """Replace the operations inside `operation` that compute with bf16. Call it in the context of
    the module, before the compiler's passes."""
    for old in list(_to_replace(operation)):
        _replace(old)


def _to_replace(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                name = child.operation.name
                if name.startswith(("arith.", "math.")) and name not in _EXACT:
                    values = (*child.operation.operands, *child.operation.results)
                    elements = [str(_element(x.type)) for x in values]
                    if "bf16" in elements or elements == ["f64", "f16"]:
                        yield child.operation
                yield from _to_replace(child.operation)


def _replace(old: Any) -> None:
    (result,) = old.results
    with ir.InsertionPoint(old), old.location:
        operands = [_widened(x) if _is_bf16(x) else x for x in old.operands]
        computed = _like(result.type, ir.F32Type.get()) if _is_bf16(result) else result.type
        if old.name in ("arith.extf", "arith.truncf"):
            new = _converted(operands[0], computed)
        else:
            attributes = {name: old.attributes[name] for name in old.attributes}
            new = ir.Operation.create(old.name, [computed], operands, attributes).result
        if _is_bf16(result):
            new = _rounded(new)
    result.replace_all_uses_with(new)
    old.erase()


def _converted(value: Any, wanted: Any) -> Any:
    """fp32 or fp64 to another type of floating-point numbers, through fp32."""
    if str(_element(value.type)) == "f64":
        value = arith.truncf(_like(wanted, ir.F32Type.get()), value)
    if value.type == wanted:
        return value
    return (arith.extf if str(_element(wanted)) == "f64" else arith.truncf)(wanted, value)


def _widened(value: Any) -> Any:
    half, word = (_like(value.type, ir.IntegerType.get_signless(x)) for x in (16, 32))
    bits = arith.extui(word, arith.bitcast(half, value))
    return arith.bitcast(_like(value.type, ir.F32Type.get()), arith.shli(bits, _constant(word, 16)))


def _rounded(value: Any) -> Any:
    """fp32 to bf16, ties to even; a NaN stays one."""
    half, word = (_like(value.type, ir.IntegerType.get_signless(x)) for x in (16, 32))
    bits = arith.bitcast(word, value)
    high = arith.shrui(bits, _constant(word, 16))
    to_even = arith.addi(_constant(word, 0x7FFF), arith.andi(high, _constant(word, 1)))
    near = arith.shrui(arith.addi(bits, to_even), _constant(word, 16))
    is_nan = arith.cmpf(arith.CmpFPredicate.UNO, value, value)
    kept = arith.select(is_nan, arith.ori(high, _constant(word, 0x40)), near)
    return arith.bitcast(_like(value.type, ir.BF16Type.get()), arith.trunci(half, kept))


def _constant(word: Any, number: int) -> Any:
    attribute = ir.IntegerAttr.get(_element(word), number)
    if word != _element(word):
        attribute = ir.DenseElementsAttr.get_splat(word, attribute)
    return arith.constant(word, attribute)


def _is_bf16(value: Any) -> bool:
    return str(_element(value.type)) == "bf16"


def _element(kind: Any) -> Any:
    """The type of an element of a vector, or of a number."""
    return getattr(kind, "element_type", kind)


def _like(kind: Any, element: Any) -> Any:
    """A type of the shape of `kind`, with other elements."""
    return ir.VectorType.get(kind.shape, element) if hasattr(kind, "shape") else element
