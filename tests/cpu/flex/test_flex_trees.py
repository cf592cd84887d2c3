"""Random programs of torch operators, lowered: their values are torch's."""

from __future__ import annotations

import pytest
import torch
from drawn_share import Draws
from flex_oracle import dense_scores
from flex_trees import (
    EXTENTS,
    TREES_IN_MOD,
    Program,
    disagreement,
    draw_programs,
    joined_mod,
    mod_of,
    scores_of,
)
from torch import Tensor

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.mods.on_cpu import eval_score_mod

DRAWN = Draws.of("FLEX", 3, 0, "MODS")


def lowered_scores(programs: list[Program], seed: int) -> Tensor:
    """What the mod that joins programs makes of scores, one head each."""
    lowered = lower_mod(joined_mod(programs, seed), "score_mod")
    scores = scores_of(seed)
    found = torch.full(scores.shape, float("nan"))
    places = [torch.arange(x, dtype=torch.int32) for x in EXTENTS[2:]]
    for b in range(EXTENTS.batch):
        for h in range(len(programs)):
            given = scores[b, h], lowered.aux_tensors, b, h, *places
            found[b, h] = eval_score_mod(lowered.mod, *given)
    return found


def not_lowered(programs: list[Program], seed: int) -> str:
    """Where a mod of several programs is refused: which of them are by themselves."""
    texts = []
    for number, program in enumerate(programs):
        try:
            lower_mod(mod_of(program, seed), "score_mod")
        except Exception as error:
            texts.append(f"program {number}: {type(error).__name__}: {error}\n{program.text}")
    return "\n".join(texts)


def check_programs(seed: int, count: int = TREES_IN_MOD) -> None:
    programs = draw_programs(seed, count)
    try:
        found = lowered_scores(programs, seed)
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n{not_lowered(programs, seed)}"
        ) from error
    assert (wrong := disagreement(programs, found, seed, dense_scores)) is None, wrong


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(DRAWN.seed, DRAWN.seed + DRAWN.most))
def test_values_are_those_of_torch(seed: int) -> None:
    check_programs(seed)
