"""Whether what the analysis of reads claims of a score_mod holds at all places of a small grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
import torch
from evaluated_reads import (
    EXTENTS,
    SCORES,
    EvaluatedDifference,
    EvaluatedReads,
    EvaluatedTerm,
    evaluate_reads,
)
from random_programs import RandomMod
from torch import Tensor

from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.mods.read_classes import Cut, ReadClass, TensorReads

BATCH, HEADS = EXTENTS[:2]


def check_claims(found: EvaluatedReads, told: str) -> None:
    told = f"{told}: {found.told}"
    if found.told.is_shift:
        assert (found.slopes == 1.0).all(), told
    if found.told.is_batch_invariant_bias:
        assert (found.values == found.values[:, :1]).all(), told
    for number, tensor in found.told.tensors.items():
        own = [x for x in found.terms if x.number == number]
        assert tensor.read_class is not ReadClass.UNREAD or not own, told
        for term in own:
            _check_term(tensor, term, told)
        if tensor.read_once or tensor.read_once_an_entry:
            _check_once(tensor, own, told)
    for difference in found.differences:
        _check_difference(difference, f"{told}: {difference.read}")


def _check_term(tensor: TensorReads, term: EvaluatedTerm, told: str) -> None:
    read_class, at, by_element = tensor.read_class, term.coordinates, term.by_element
    if read_class is not ReadClass.OTHER:
        assert (at == at[:1]).all(), f"by the score: {told}"
    if read_class in (ReadClass.HEAD, ReadClass.KEY):
        assert (at == at[:, :, :, :1]).all(), f"by the query: {told}"
    if read_class in (ReadClass.HEAD, ReadClass.QUERY):
        assert (at == at[:, :, :, :, :1]).all(), f"by the key: {told}"
    if tensor.is_diagonal:
        for of_dimension in at[0].unbind(-1):
            check_diagonals(tensor.cuts, of_dimension, told)
    if not tensor.needs_score:
        assert torch.equal(by_element[0].nan_to_num(7.0), by_element[1].nan_to_num(7.0)), told
    if term.told.constant is not None:
        assert (by_element == term.told.constant).all(), told
    if term.told.is_finite:
        assert by_element.isfinite().all(), told


def _check_once(tensor: TensorReads, terms: list[EvaluatedTerm], told: str) -> None:
    (term,) = terms
    rank = term.coordinates.shape[-1]
    for of_entry in term.coordinates[0]:
        elements = of_entry.reshape(-1, rank)
        assert len(elements.unique(dim=0)) == len(elements), told
    elements = term.coordinates[0].reshape(-1, rank)
    assert not tensor.read_once or len(elements.unique(dim=0)) == len(elements), told


def _check_difference(found: EvaluatedDifference, told: str) -> None:
    read, most = found.read, found.most
    assert (found.differences.abs() <= most).all(), told
    for b in range(BATCH):
        for h in range(HEADS):
            table = found.of_table[b if read.by_batch else 0, h if read.by_head else 0]
            at = (found.differences[:, b, h] + most).long()
            assert torch.equal(table[at], found.coordinates[:, b, h]), told


def check_diagonals(cuts: Sequence[Cut], index: Tensor, told: str) -> None:
    """Neighbours along a diagonal have the same index, unless a cut is between them."""
    rows, cols = (n - 1 for n in index.shape[-2:])
    q, k = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    is_cut = torch.zeros(rows, cols, dtype=torch.bool)
    for cut in cuts:
        is_cut |= ((k if cut.of_keys else q) + 1) % cut.size == 0
    is_same = index[:, :, :-1, :-1] == index[:, :, 1:, 1:]
    assert (is_same | is_cut).all(), told


# -- random ones --------------------------------------------------------------------------------


@cute.jit
def _branch(condition: Any, x: Any, y: Any) -> Any:
    found = y
    if condition:
        found = x
    return found


def check_drawn_claims(seed: int) -> None:
    """Of a random mod in both languages, in torch also its values."""
    drawn = RandomMod.draw(seed)
    tables, numbers = drawn.tensors()
    wants = range(len(tables))
    check_claims(evaluate_reads(drawn.cute(_branch), [*tables, *numbers], wants), f"seed {seed}")
    learned = [x.requires_grad_() for x in tables]
    written = drawn.torch(learned, numbers)
    mods = resolve_mods(written, None, None, None)
    aux_tensors = mods.aux_tensors or []
    wants = [i for i, x in enumerate(aux_tensors) if x.requires_grad]
    found = evaluate_reads(mods.score_mod, [x.detach() for x in aux_tensors], wants)
    check_claims(found, f"seed {seed}, in torch")
    _check_values(drawn, written, found.values, f"seed {seed}")


@torch.no_grad()
def _check_values(
    drawn: RandomMod, written: Callable[..., Tensor], values: Tensor, told: str
) -> None:
    place = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in EXTENTS), indexing="ij")
    for score, found in zip(SCORES, values, strict=True):
        expected = written(score.expand(EXTENTS), *place)
        is_close = found.isclose(expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        # logarithms at whole numbers may be rounded to other indices
        least = 0.9 if drawn.has_floats else 1.0
        assert is_close.double().mean() >= least, told
