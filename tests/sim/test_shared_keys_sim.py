"""Several sequences of queries with the keys of one batch entry in common, on the software GPU of
either architecture.

A few calls by default; FLASH_MASK_SIM_SEED=N draws others.
"""

from __future__ import annotations

import os
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import simulated_backward
import torch
from conftest import ACTIVE_ARCH, HOPPER, SMS
from mask_cases import MASK_MODS
from placed_attention import PlacedCall
from planned import forward_call, planned
from quiet_runs import quiet_run
from shared_keys import CommonKeys
from simulated_forward import run_on_simulator
from tolerances import assert_as_good
from torch import Tensor
from trained_mods import TRAINED_MODS

from flash_mask_cute.runtime.target import Target

ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
EARLIEST = -130

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]
on_hopper = pytest.mark.skipif(ARCH != HOPPER, reason="of the Hopper backward")


def draw_of(seed: int, head_dim: int = 64) -> CommonKeys:
    if SEED != "0":
        seed = random.Random(f"common keys {SEED} {seed}").randrange(1 << 30)
    return CommonKeys(seed, torch.bfloat16, head_dim, 200, EARLIEST)


def run_backward(
    simulator: ModuleType, call: PlacedCall, delay: int | None, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, which are those of the definition. more: keywords of the backward."""
    out, lse = call.attend(call.q.double(), call.k.double(), call.v.double())
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    operands = call.q, call.k, call.v, out.bfloat16(), dout, lse.float()
    with quiet_run(simulator, delay):
        found = simulated_backward.launch(operands, call.keywords | more)
    call.assert_gradients(found, dout)
    return found


@pytest.mark.parametrize("has_used_keys", [False, True])
def test_forward(simulator: ModuleType, has_used_keys: bool) -> None:
    draw = draw_of(1)
    draw.has_used_keys = has_used_keys
    for delay, call in enumerate(draw.calls(3)):
        with quiet_run(simulator, delay):
            out, lse = run_on_simulator(forward_call(call.q, call.k, call.v, **call.keywords))
        assert lse is not None
        call.assert_output(out, lse)


def test_backward(simulator: ModuleType) -> None:
    for delay, call in enumerate(draw_of(2).calls(4)):
        run_backward(simulator, call, delay)


def test_backward_in_order(simulator: ModuleType) -> None:
    """Of other delays all bits are the same."""
    for call in draw_of(3).calls(3):
        some, others = (
            run_backward(simulator, call, delay, deterministic=True) for delay in (None, 2)
        )
        for name, a, b in zip("qkv", some, others, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"d{name}, {call.name}"


@on_hopper
@pytest.mark.parametrize("more", [{}, {"config": {"cta_pair": False}}, {"deterministic": True}])
def test_wide_heads(simulator: ModuleType, more: dict[str, Any]) -> None:
    """Of which warpgroups, or pairs of CTAs, have the same keys."""
    for delay, call in enumerate(draw_of(4, 256).calls(2)):
        run_backward(simulator, call, delay, **more)


@on_hopper
def test_split_groups(simulator: ModuleType) -> None:
    draw = draw_of(5)
    draw.groups = (2, 4)
    for delay, call in enumerate(draw.calls(3)):
        run_backward(simulator, call, delay, config={"group_splits": 2})


def test_the_gradient_of_a_table_by_sequence(simulator: ModuleType) -> None:
    """The first index of a score_mod is the sequence of its query."""
    recipe = TRAINED_MODS["key_bias"]
    draw = draw_of(6)
    call = draw.call(0)
    table = draw.normal(len(call.sequences), call.q.shape[-2], call.k.shape[1]).float()
    call.keywords |= {"mask_mod": None, "score_mod": recipe.cute, "aux_tensors": [table]}
    call.mods = {
        "score_mod": SimpleNamespace(dense=lambda *place: recipe.dense(*place[:-1], *place[-1]))
    }
    daux = [torch.full_like(table, float("nan"))]
    run_backward(simulator, call, 1, daux=daux)
    dout = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        leaf = table.to(dtype).requires_grad_()
        call.keywords["aux_tensors"] = [leaf]
        out, _ = call.attend(*(x.to(dtype) for x in (call.q, call.k, call.v)))
        gradients += torch.autograd.grad(out, leaf, dout.to(dtype))
    assert_as_good("daux", daux[0], *gradients, call.name)


@pytest.mark.parametrize("way", ["dense", "packed", "stored_bits"])
def test_views_of_one_entry_are_read_where_they_are(simulator: ModuleType, way: str) -> None:
    """Of a stride of 0 over the batch; also beside bits of a mask_mod by batch entry, which were
    stored before attention."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(3, 70, 4, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, 1, 150, 2, 64, generator=generator).bfloat16()
    views = k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1)
    rows, keywords = q, {"causal": True}
    visible = torch.ones(70, 150, dtype=torch.bool).tril(80).expand(3, 1, -1, -1)
    if way == "packed":
        starts = torch.arange(0, 211, 70, dtype=torch.int32)
        rows, keywords = q.flatten(0, 1), {"causal": True, "cu_seqlens_q": starts}
    elif way == "stored_bits":
        prefixes, mod = torch.tensor([3, 90, 150], dtype=torch.int32), MASK_MODS["prefix_lm"]
        keywords = {"mask_mod": mod.cute, "aux_tensors": [prefixes], "pack_gqa": False}
        at = torch.arange(70)[:, None], torch.arange(150)
        visible = torch.stack([mod.dense(b, 0, *at, [prefixes]) for b in range(3)])[:, None]
    call = forward_call(rows, *views, **keywords)
    plan = planned(call, Target(ARCH, num_sms=SMS))
    assert plan.problem.shared_kv
    assert (plan.mask_bits is not None) == (way == "stored_bits" and ARCH == HOPPER)
    with quiet_run(simulator, 1):
        out, lse = run_on_simulator(call)
    exact, eager = (
        _attend(q.to(x), k.to(x), v.to(x), visible) for x in (torch.float64, torch.bfloat16)
    )
    assert lse is not None and lse.isfinite().all()
    assert_as_good("out", out.view(q.shape), exact, eager, way)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    scores = (q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)
