"""Each role of the forward for Blackwell, the slowest of its CTA once, on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
from cases import Case
from inputs import make_inputs
from simulated_forward import run_sim
from slow_roles import ISLANDS, SEED, Slowed, add_islands, with_each_role_slow

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

FORWARD = "sm100.flash_fwd.kernel"
FORWARDS = {
    "two-queries-in-flight": Slowed(
        ISLANDS | {"lengths_q": (300, 9, 260), "lengths_k": (400, 20, 300), "head_dim": 64}
    ),
    "pairs-of-ctas": Slowed(
        {
            "heads_q": 1, "heads_kv": 1, "lengths_q": (300, 520, 9), "lengths_k": (140, 200, 20),
            "mask_mod": "checks", "softmax_scale": 0.5,
        },
        {"cta_pair": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    add_islands(monkeypatch)
    fields, config, _ = FORWARDS[name]
    inputs = make_inputs(Case(name, **fields))
    run = partial(run_sim, simulator, inputs, ARCH, (SEED,), config=config)
    with_each_role_slow(simulator, monkeypatch, [FORWARD], run)
