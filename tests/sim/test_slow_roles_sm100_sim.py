"""Each role of each kernel for Blackwell, the slowest of its CTA once, on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import simulated_backward
import torch
from cases import Case
from inputs import make_inputs
from simulated_forward import run_sim
from slow_roles import (
    ISLANDS,
    SEED,
    Slowed,
    add_islands,
    cache_oracles,
    with_each_role_slow,
)
from trained_mods import make_trained

ARCH = "sm_100a"

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

FORWARD = "sm100.flash_fwd.kernel"
BACKWARD = "sm100.flash_bwd.kernel"
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
    "one-half": Slowed(
        ISLANDS | {"lengths_q": (130, 9, 140), "lengths_k": (300, 20, 200), "head_dim": 256,
                   "softmax_scale": 0.5},
        {"cta_pair": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    add_islands(monkeypatch)
    fields, config, _ = FORWARDS[name]
    inputs = make_inputs(Case(name, **fields))
    run = partial(run_sim, simulator, inputs, (SEED,), config=config)
    with_each_role_slow(simulator, monkeypatch, [FORWARD], run)


# More work tiles for a CTA than a ring has stages; dQ in columns of its own and in those of dP; S
# and dP one after the other, and together.
BACKWARDS = {
    "dq-of-its-own": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "heads_q": 6, "heads_kv": 6,
                   "head_dim": 64}
    ),
    "dq-in-place-of-dp-in-order": Slowed(
        ISLANDS | {"lengths_q": (130, 0, 200), "lengths_k": (150, 70, 130), "head_dim": 96},
        more={"deterministic": True},
    ),
    "scores-and-gradients-together": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 150, "head_dim": 64, "column": None,
                   "score_mod": "slopes"},
        more={"daux": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    add_islands(monkeypatch)
    cache_oracles(monkeypatch)
    fields, config, more = BACKWARDS[name]
    if "daux" in more:
        given = make_trained(Case(name, **fields | {"score_mod": None}), fields["score_mod"])
        inputs = given.inputs
        wanted = (i in given.wants_aux for i in range(len(given.aux_tensors)))
        daux = zip(given.aux_tensors, wanted, strict=True)
        more = {"daux": [torch.empty_like(x) if is_wanted else None for x, is_wanted in daux]}
    else:
        inputs = make_inputs(Case(name, **fields))
    if more.get("deterministic"):
        # CTAs wait for each other
        monkeypatch.setitem(simulator.OPTIONS, "resident", simulated_backward.SMS)
    run = partial(simulated_backward.run_sim, simulator, inputs, (SEED,), config=config, **more)
    with_each_role_slow(simulator, monkeypatch, [BACKWARD], run)
