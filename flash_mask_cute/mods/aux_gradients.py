"""Gradients of aux tensor elements: sums over scores, which threads add to global memory.

Consecutive scores of a thread often read the same element: the slope of a head, a bias by key along
a row, a bias by bucket of distance. So a thread keeps the sum for its latest element, and adds it
to memory when another element comes. At the end of a tile, a warp whose threads all hold the same
element sums over its threads first.

Sums are fp32, added by atomics in the order in which threads arrive, so their last bits differ
from run to run; or exact (`fixed_point_sums`), whose bits do not depend on the order. What a thread
or a warp adds is a sum in an order that only the places of scores determine.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import arith

from flash_mask_cute.mods.derivative import AuxTerm
from flash_mask_cute.mods.fixed_point_sums import (
    FLAGS,
    IS_NAN,
    IS_NEGATIVE_INF,
    IS_POSITIVE_INF,
    WORD_BITS,
)

FULL_WARP = -1


class _Open(NamedTuple):
    """A sum that is not in memory yet, for the element of `target` at an offset."""

    target: cute.Tensor
    offset: Int64
    value: Float32


class AuxSums:
    """The sums of a thread over the scores of one tile, traced as straight-line code.

    targets: by number of the aux tensor, fp32 tensors of the same shape, or words of exact sums,
    whose first mode is the word. A target of one mode more has sums for each batch entry. once: the
    tensors where no two scores of a tile read the same element.
    """

    def __init__(
        self,
        targets: Mapping[int, cute.Tensor],
        batch_idx: Int32 | None = None,
        once: tuple[int, ...] = (),
    ):
        self.targets = targets
        self._batch_idx = batch_idx
        self._once = once
        # one for each read of the modifier, which reads as often for every score
        self._open: list[_Open] = []

    def add(self, terms: Sequence[AuxTerm], grad: Float32, counts: Boolean) -> None:
        """Add `grad`, the gradient of a modified score, times the terms that `differentiate`
        returned. For a score that does not count, both may be anything."""
        for term in terms:
            if term[0] in self._once:
                add_without_a_branch(*self._contribution(term, grad, counts))
        others = [term for term in terms if term[0] not in self._once]
        if not self._open:
            self._open = [self._contribution(term, grad, counts) for term in others]
            return
        for i, (known, term) in enumerate(zip(self._open, others, strict=True)):
            new = self._contribution(term, grad, counts)
            is_other = (new.offset != known.offset) & (new.value != 0.0)
            add_to_memory(is_other & (known.value != 0.0), *known)
            self._open[i] = _Open(
                known.target,
                cutlass.select_(is_other, new.offset, known.offset),
                cutlass.select_(is_other, new.value, known.value + new.value),
            )

    def flush(self) -> None:
        """Add the remaining sums to memory. All threads of the warp must call it."""
        for known in self._open:
            _add_over_warp(*known)
        self._open = []

    def _contribution(self, term: AuxTerm, grad: Float32, counts: Boolean) -> _Open:
        number, coordinates, by_element = term
        target = self.targets[number]
        if cute.rank(target) > len(coordinates) and not _is_exact(target):
            coordinates = (self._batch_idx, *coordinates)
        offset = offset_in(target, coordinates)
        return _Open(target, offset, cutlass.select_(counts, grad * by_element, Float32(0.0)))


def _is_exact(target: cute.Tensor) -> bool:
    return target.element_type is Int64


def offset_in(target: cute.Tensor, coordinates: tuple[Int32, ...]) -> Int64:
    """Where the sum of an element is, or the first word of it."""
    place = (Int32(0), *coordinates) if _is_exact(target) else coordinates
    return Int64(cute.crd2idx(place, target.layout))


@cute.jit
def add_to_memory(condition: Boolean, target: cute.Tensor, offset: Int64, value: Float32) -> None:
    if condition:
        if cutlass.const_expr(_is_exact(target)):
            _add_exactly(target, offset, value)
        else:
            _reduce(target.iterator + offset, value)


def add_without_a_branch(target: cute.Tensor, offset: Int64, value: Float32) -> None:
    """`add_to_memory` of a value that is not 0. Written as PTX: in a branch, each address would be
    computed anew (docs/facts/compiler.md#memory-accesses)."""
    if _is_exact(target):
        add_to_memory(value != 0.0, target, offset, value)
        return
    cute.arch.inline_ptx(
        "@{$r2} red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};",
        read_only_args=[target.iterator + offset, value, value != 0.0],
    )


def _reduce(place: cute.Pointer, value: Float32 | Int64) -> None:
    # a sum in two's complement is the same without a sign
    dtype = "u64" if isinstance(value, Int64) else Float32
    cute.arch.red(place, value, op="add", dtype=dtype, sem="relaxed", scope="gpu")


@cute.jit
def _add_exactly(words: cute.Tensor, offset: Int64, value: Float32) -> None:
    bits = Int32(arith.bitcast(Int32.mlir_type, value.ir_value()))
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # numbers without a leading 1 have the exponent of the least others
    significand = fraction + cutlass.select_(exponent > 0, Int32(1 << 23), Int32(0))
    lowest = cutlass.max(exponent, 1) - 1
    number = Int64(significand) << Int64(lowest % WORD_BITS)
    number = cutlass.select_(bits < 0, -number, number)
    stride = Int64(words.layout.stride[0])
    first = words.iterator + offset
    place = first + Int64(lowest // WORD_BITS) * stride
    _reduce(place, number & Int64((1 << WORD_BITS) - 1))
    _reduce(place + stride, number >> Int64(WORD_BITS))
    if exponent == 0xFF:
        flag = cutlass.select_(bits < 0, Int64(IS_NEGATIVE_INF), Int64(IS_POSITIVE_INF))
        flag = cutlass.select_(fraction != 0, Int64(IS_NAN), flag)
        cute.arch.red(
            first + FLAGS * stride, flag, op="or", dtype="b64", sem="relaxed", scope="gpu"
        )


@cute.jit
def _add_over_warp(target: cute.Tensor, offset: Int64, value: Float32) -> None:
    if cute.arch.match_sync(FULL_WARP, offset, "all") != 0:
        total = cute.arch.warp_reduction_sum(value)
        add_to_memory(cute.arch.lane_idx() == 0, target, offset, total)
    else:
        add_to_memory(value != 0.0, target, offset, value)
