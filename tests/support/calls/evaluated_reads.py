"""The reads of a score_mod at all places of a small grid, as code for the CPU computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tables import most_difference
from flash_mask_cute.mods.aux_reads import ElementRead, answered_reads
from flash_mask_cute.mods.calling import ScorePlace, call_score_mod
from flash_mask_cute.mods.derivative import differentiate
from flash_mask_cute.mods.difference_reads import read_of_difference, sums_of_terms
from flash_mask_cute.mods.on_cpu import compile_for_host
from flash_mask_cute.mods.read_classes import DifferenceRead, Factor, ModReads
from flash_mask_cute.mods.traits import difference_reads, find_reads
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES, dtype_name

# batch, heads, queries, keys: of several cuts
EXTENTS = 2, 3, 44, 46
SCORES = torch.tensor([0.25, -1.5])
# Differences of a table that is looked at.
MOST = 2000


class EvaluatedTerm(NamedTuple):
    """Of a read. coordinates: (scores, *EXTENTS, rank). by_element: (scores, *EXTENTS)."""

    number: int
    told: Factor
    coordinates: Tensor
    by_element: Tensor


class EvaluatedDifference(NamedTuple):
    """A read by a difference. differences: (scores, *EXTENTS). most: what they may be. coordinates:
    of the element that is read. of_table: those that kernels find by the difference, (batch, heads,
    2 * most + 1, rank), the difference 0 in the middle."""

    read: DifferenceRead
    most: int
    differences: Tensor
    coordinates: Tensor
    of_table: Tensor


class EvaluatedReads(NamedTuple):
    """told: by the analysis. values, slopes: modified scores, derivatives; (scores, *EXTENTS)."""

    told: ModReads
    values: Tensor
    slopes: Tensor
    terms: list[EvaluatedTerm]
    differences: list[EvaluatedDifference]


def fake_tensor(tensor: Tensor) -> Any:
    dtype = getattr(cutlass, CUTLASS_NAMES[dtype_name(tensor.dtype)])
    return make_fake_tensor(
        dtype,
        tuple(cute.sym_int() for _ in tensor.shape),
        tuple(cute.sym_int64() for _ in tensor.shape),
        memspace=cutlass.AddressSpace.generic,
        assumed_align=dtype.width // 8,
    )


def evaluate_reads(
    score_mod: Any, aux_tensors: Sequence[Tensor], wants: Sequence[int]
) -> EvaluatedReads:
    aux = tuple((dtype_name(x.dtype), x.dim()) for x in aux_tensors)
    problem = AttentionProblem("bfloat16", 64, 64, score_mod=callable_key(score_mod), aux=aux)
    told = find_reads(score_mod, problem, wants)
    found = [
        (x, most_difference(x.terms, *EXTENTS[2:])) for x in difference_reads(score_mod, problem)
    ]
    reads = {x: most for x, most in found if most is not None and most <= MOST}
    ranks = [aux_tensors[n].dim() for n, x in sorted(told.tensors.items()) for _ in x.factors]
    of_reads = [1 + aux_tensors[x.tensor].dim() for x in reads]
    count = len(SCORES) * torch.Size(EXTENTS).numel()
    ints = torch.zeros((count, max(sum(ranks) + sum(of_reads), 1)), dtype=torch.int32)
    floats = torch.zeros((count, 2 + len(ranks)))
    batch, heads = EXTENTS[:2]
    tables = [
        torch.zeros((batch, heads, 2 * most + 1, width - 1), dtype=torch.int32)
        for most, width in zip(reads.values(), of_reads, strict=True)
    ]
    places = torch.arange(max(2 * MOST + 1, *EXTENTS), dtype=torch.int32)
    tensors = SCORES, places, ints, floats
    lists = [tuple(x) or None for x in (aux_tensors, tables)]
    with compile_lock():
        function = compile_for_host(
            ("score_mod", score_mod),
            _evaluate_all,
            score_mod,
            tuple(wants),
            len(ranks),
            tuple(reads),
            *map(fake_tensor, tensors),
            *(None if x is None else tuple(map(fake_tensor, x)) for x in lists),
        )
    function(*tensors, *lists)
    shape = len(SCORES), *EXTENTS
    columns = (
        list(ints.reshape(*shape, -1).split([*ranks, *of_reads], -1)) if ranks or reads else []
    )
    values, slopes, *factors = floats.reshape(*shape, -1).unbind(-1)
    numbers = [(n, told_of) for n, x in sorted(told.tensors.items()) for told_of in x.factors]
    terms = [
        EvaluatedTerm(number, factor, columns.pop(0), by_element)
        for (number, factor), by_element in zip(numbers, factors, strict=True)
    ]
    differences = [
        EvaluatedDifference(read, most, column[..., 0], column[..., 1:], table)
        for (read, most), column, table in zip(reads.items(), columns, tables, strict=True)
    ]
    return EvaluatedReads(told, values, slopes, terms, differences)


@cute.jit
def _evaluate_all(
    score_mod: cutlass.Constexpr,
    wants: cutlass.Constexpr,
    num_terms: cutlass.Constexpr,
    reads: cutlass.Constexpr,
    scores: Any,
    places: Any,
    ints: Any,
    floats: Any,
    aux_tensors: Any,
    tables: Any,
) -> None:
    """places: 0, 1, 2 and so on, because what a loop counts may be divided wrongly
    (docs/facts/compiler.md#the-dsl)."""
    batch, heads, rows, cols = EXTENTS
    at = Int32(0)
    for s in range(cute.size(scores)):
        for b in range(batch):
            for h in range(heads):
                for q in range(rows):
                    for k in range(cols):
                        place = ScorePlace(places[b], places[h], places[q], places[k])
                        arguments = score_mod, scores[s], place, aux_tensors
                        _keep(arguments, wants, num_terms, reads, (ints, floats), at)
                        at += 1
    for i in cutlass.range_constexpr(len(reads)):
        for b in range(batch):
            for h in range(heads):
                for d in range(tables[i].shape[2]):
                    number = places[b], places[h], places[d] - tables[i].shape[2] // 2
                    arguments = score_mod, reads[i], *number, aux_tensors
                    found = read_of_difference(*arguments).coordinates
                    for c in cutlass.range_constexpr(len(found)):
                        tables[i][b, h, d, c] = found[c]


def _keep(arguments: tuple, wants: Any, num_terms: int, reads: Any, kept: tuple, at: Int32) -> None:
    ints, floats = kept
    value, slope, terms = differentiate(*arguments, wants)
    assert len(terms) == num_terms, "as many as the analysis has found"
    for i, number in enumerate((value, slope, *(by_element for _, _, by_element in terms))):
        floats[at, i] = Float32(number)
    found = [x for _, coordinates, _ in terms for x in coordinates]
    asked: list[tuple[Any, ...]] = []

    def answer(read: ElementRead) -> Any:
        asked.append(read.indices)
        return read.tensor.load(read.indices)

    if reads:
        with answered_reads(answer):
            call_score_mod(*arguments)
    for read in reads:
        of_query, of_key, _ = sums_of_terms(read, asked)
        found += [of_query + of_key, *asked[read.number]]
    for i, number in enumerate(found):
        ints[at, i] = Int32(number)
