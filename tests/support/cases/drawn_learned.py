"""Drawn problems with learned tables: `random_cases.py` with one or two of `trained_mods.py`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

from cases import FP32, Case
from inputs import make_output_gradients
from random_cases import small_case
from torch import Tensor
from trained_mods import TRAINED_MODS, WINDOW, TrainedRecipe, make_trained, reference_aux_gradients

# of queries and keys
MOST = 200
# with a score of an infinite bias, which only some masks hide, all gradients are NaN
NAMES = sorted(set(TRAINED_MODS) - {"two_of_key"})
# which read nothing by batch entry
OF_PLACES = ("axial", "grid", "pair", "pair", "pair_minus_slope", "swin", "swin", "t5", "windows")


class DrawnLearned(NamedTuple):
    case: Case
    recipe: TrainedRecipe


def draw_learned(seed: int, dims: tuple[tuple[int, int], ...]) -> DrawnLearned:
    """A problem in which some score matters for each table. dims: of which one pair is drawn."""
    rng = random.Random(seed)
    while True:
        has_many = rng.random() < 0.4
        # one kernel takes what one sum adds to scores
        names = rng.sample(*((OF_PLACES, 1) if has_many else (NAMES, rng.choice((1, 1, 2)))))
        most = WINDOW * WINDOW if "swin" in names else MOST
        case = replace(small_case(rng, dims, most), score_mod=None)
        case = replace(case, sink=case.sink and FP32).packed_if_supported()
        case = replace(case, id=f"{seed}-{'+'.join(names)}-{case.id}")
        recipe = TRAINED_MODS[names[0]]
        if len(names) == 2:
            recipe = one_after_the_other(recipe, TRAINED_MODS[names[1]])
        if has_many:
            case = _of_many_entries(case, rng)
        if min(case.seqlen_q, case.seqlen_k) > 0 and _matters(case, recipe):
            return DrawnLearned(case, recipe)


def _of_many_entries(case: Case, rng: random.Random) -> Case:
    """Short sequences that share all tables of pairs and of distances."""
    heads = rng.choice((1, 2))
    lengths = {name: rng.choice((1, 7, 49, 60, 96, 129, 144)) for name in ("seqlen_q", "seqlen_k")}
    absent = ["lengths_q", "lengths_k", "seqused_q", "seqused_k", "blocks", "strided"]
    absent += ["column", "mask_mod"] if rng.random() < 0.7 else []
    fields: dict[str, Any] = {**lengths, **dict.fromkeys(absent)}
    fields |= {"batch": rng.choice((4, 5, 17)), "heads_q": heads, "heads_kv": heads}
    return replace(case, softcap=rng.choice((0.0, 0.0, case.softcap)), **fields)


def _matters(case: Case, recipe: TrainedRecipe) -> bool:
    given = make_trained(case, recipe)
    dout, _ = make_output_gradients(given.inputs)
    gradients = reference_aux_gradients(given, dout)
    return all((x != 0).any() and x.isfinite().all() for x in gradients)


def one_after_the_other(first: TrainedRecipe, second: TrainedRecipe) -> TrainedRecipe:
    """The score that the first one returns goes to the second one."""
    count: list[int] = []

    def trained(extents: Any) -> Any:
        of_both = [recipe.trained(extents) for recipe in (first, second)]
        count[:] = [len(of_both[1])]
        return [*of_both[0], *of_both[1]]

    def cute(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        modified = first.cute(score, b, h, q, k, aux[: -count[0]])
        return second.cute(modified, b, h, q, k, aux)

    def dense(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
        modified = first.dense(score, b, h, q, k, *tables[: -count[0]])
        return second.dense(modified, b, h, q, k, *tables[-count[0] :])

    return TrainedRecipe(cute, dense, trained)
