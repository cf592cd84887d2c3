"""Gradients of drawn mods that add an element of a learned table, by the compiled backward."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP32, Case
from conftest import ACTIVE_ARCH, SMS
from drawn_share import Draws
from inputs import make_output_gradients
from planned import call_of, planned
from random_programs import READ_SIZE, RandomRead, ReadDraw, dsl_rules, torch_rules
from simulated_backward import run_sim
from torch import Tensor
from trained_mods import TrainedRecipe, assert_aux_gradients_close, make_trained

from flash_mask_cute.call import tables as difference_tables
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.runtime.target import Target

DRAWN = Draws.of("READ", 2)

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# heads of a group in one walk, several key blocks, cut and whole blocks
CASE = Case("drawn", 2, 140, 150, 4, 2, head_dim=64, causal=True)


# Numbers are computed and not looked up: a call has one tensor.
COMPUTED = {"number": lambda i, n: (i * 5 + 3) % 9}


def recipe(drawn: RandomRead) -> TrainedRecipe:
    def cute(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        rules = dsl_rules(None, (b[0], h[0], q[0], k[0]), None, None) | COMPUTED
        return score + aux[-1][drawn.inside(rules)]

    def dense(score: Tensor, b: int, h: int, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        rules = torch_rules(score, (torch.tensor(b), torch.tensor(h), q, k), ()) | COMPUTED
        return score + table[drawn.inside(rules).expand(score.shape)]

    return TrainedRecipe(cute, dense, lambda x: [((READ_SIZE,), FP32)])


@pytest.mark.parametrize("number", range(DRAWN.most))
@pytest.mark.parametrize("name", ["head", "key", "query", "difference", "other"])
def test_drawn(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Differences also with tables of all differences, and with sums by difference."""
    seeds = (seed for seed in range(DRAWN.seed * 1000, DRAWN.seed * 1000 + 10**6))
    of_class = (seed for seed in seeds if ReadDraw(seed).read().name == name)
    seed = next(seed for i, seed in enumerate(of_class) if i == number)
    given = make_trained(CASE, recipe(ReadDraw(seed).read()))
    dout, _ = make_output_gradients(given.inputs)
    orders = [False]
    if ACTIVE_ARCH == "sm_90a":
        orders.append(True)
    sizes = [2**60]
    if name == "difference":
        monkeypatch.setattr(difference_tables, "SCORES_OF_ELEMENT", 0)
        sizes.append(0)
    for deterministic, least in product(orders, sizes):
        monkeypatch.setattr(difference_tables, "LEAST_SCORES", least)
        keywords = {"deterministic": deterministic}
        daux = [torch.full_like(x, float("nan")) for x in given.trained]
        call = call_of(given.inputs, Direction.BACKWARD, daux=daux, **keywords)
        plan = planned(call, Target(ACTIVE_ARCH, num_sms=SMS))
        launches = 3 + bool(plan.problem.tables)
        run_sim(simulator, given.inputs, (None,), launches, daux=daux, **keywords)
        assert_aux_gradients_close(daux, given, dout)
