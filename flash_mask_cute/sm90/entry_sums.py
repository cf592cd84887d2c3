"""Sums of dS over batch entries in registers, and how they reach the gradients of aux tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_mask_cute.core.cta import thread_in_warpgroup
from flash_mask_cute.mods.aux_gradients import AuxSums, offset_in
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.derivative import differentiate
from flash_mask_cute.sm90 import wgmma


class Places(NamedTuple):
    """A thread's queries and keys, the same in every batch entry. of(r, c): those of row r and
    column c. seqlen_q, seqlen_k: places after these do not exist."""

    of: Callable[[int, int], tuple[Int32, Int32]]
    head_idx: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    @staticmethod
    def create(
        first_query: Int32, first_key: Int32, head_idx: Int32, seqlen_q: Int32, seqlen_k: Int32
    ) -> "Places":
        """Of this thread's accumulator, keys as rows and queries as columns, from these on."""
        thread = thread_in_warpgroup()

        def of(r: int, c: int) -> tuple[Int32, Int32]:
            q_idx = first_query + wgmma.first_col_of(thread) + wgmma.col_offset(c)
            return q_idx, first_key + wgmma.row_of(thread, r)

        return Places(of, head_idx, seqlen_q, seqlen_k)

    def exists(self, r: int, c: int) -> Boolean:
        q_idx, k_idx = self.of(r, c)
        return (q_idx < self.seqlen_q) & (k_idx < self.seqlen_k)

    def of_score(self, r: int, c: int) -> ScorePlace:
        """The place of a score for a callable: the nearest that exists."""
        q_idx, k_idx = self.of(r, c)
        q_idx, k_idx = cutlass.min(q_idx, self.seqlen_q - 1), cutlass.min(k_idx, self.seqlen_k - 1)
        return ScorePlace(Int32(0), self.head_idx, q_idx, k_idx)


class SummedTensors(NamedTuple):
    """numbers: of the aux tensors with sums. once: those where no two scores of an entry read the
    same element; their sums have the part of the batch as first mode."""

    score_mod: Callable[..., Any]
    numbers: tuple[int, ...]
    once: tuple[int, ...]

    def added(self, places: Places, r: int, c: int, aux_tensors: tuple) -> Float32:
        place = places.of_score(r, c)
        return call_score_mod(self.score_mod, Float32(0.0), place, aux_tensors)

    def store(
        self,
        tiles: Sequence[tuple[Places, cute.Tensor]],
        part: Int32,
        sums: tuple,
        aux_tensors: tuple,
    ) -> None:
        """Write or add the sums of dS, times the derivatives by the elements. By whole warps."""
        targets = dict(zip(self.numbers, sums, strict=True))
        added = AuxSums({i: x for i, x in targets.items() if i not in self.once})
        for places, values in tiles:
            rows, cols = (cute.size(values, mode=[i]) for i in range(2))
            for c in range(cols):
                for r in range(rows):
                    _, _, terms = differentiate(
                        self.score_mod,
                        Float32(0.0),
                        places.of_score(r, c),
                        aux_tensors,
                        self.numbers,
                    )
                    exists = places.exists(r, c)
                    added.add([x for x in terms if x[0] not in self.once], values[r, c], exists)
                    for number, coordinates, factor in terms:
                        if number in self.once:
                            target = targets[number]
                            at = offset_in(target, (part, *coordinates))
                            _store_if(exists, target.iterator + at, values[r, c] * factor)
        added.flush()


def _store_if(condition: Boolean, place: cute.Pointer, value: Float32) -> None:
    """Written as PTX: in a branch, each address would be computed anew
    (docs/facts/compiler.md#memory-accesses)."""
    cute.arch.inline_ptx(
        "@{$r2} st.global.f32 [{$r0}], {$r1};", read_only_args=[place, value, condition]
    )
