"""Heads above 256 columns, of whose values two CTAs have half each, on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
from cases import Case
from inputs import make_inputs
from simulated_forward import run_sim
from slow_roles import ISLANDS, SEED, add_islands, with_each_role_slow
from wide_cases import WIDE_CASES
from wide_heads_on_devices import (  # noqa: F401
    test_against_oracle,
    test_decoding,
    test_splits_of_many_queries,
)

from flash_mask_cute.limits import ctas_of_tile

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

SMS = 4  # two pairs of CTAs, and each has several work tiles


def test_two_ctas_have_half_of_the_values_each() -> None:
    assert all(ctas_of_tile(case.head_dim_v) == 2 for case in WIDE_CASES)


@pytest.mark.parametrize("head_dim", [512, 320])
def test_each_role_slow(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    add_islands(monkeypatch)
    lengths = {"lengths_q": (300, 40, 129), "lengths_k": (600, 20, 200)}
    inputs = make_inputs(Case("slow", **ISLANDS, **lengths, head_dim=head_dim))
    run = partial(run_sim, simulator, inputs, (SEED,), sms=SMS)
    with_each_role_slow(simulator, monkeypatch, ["sm90.flash_fwd.kernel"], run)
