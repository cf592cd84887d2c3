"""Several sequences of queries over the keys of one batch entry, on either architecture."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ACTIVE_ARCH, HOPPER, SMS
from devices import Device
from eager import assert_as_good
from mask_cases import MASK_MODS
from planned import forward_call, planned
from quiet_runs import quiet_run
from shared_keys_on_devices import (  # noqa: F401
    draw_of,
    run_backward,
    test_backward,
    test_backward_in_order,
    test_forward,
    test_split_groups,
)
from simulated_forward import run_on_simulator
from torch import Tensor
from trained_mods import TRAINED_MODS

from flash_mask_cute.runtime.target import Target

ARCH = ACTIVE_ARCH
pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def test_the_gradient_of_a_table_by_sequence(device: Device) -> None:
    """The first index of a score_mod is the sequence of its query."""
    recipe = TRAINED_MODS["key_bias"]
    draw = draw_of(device, 6)
    call = draw.call(0)
    table = draw.normal(len(call.sequences), call.q.shape[-2], call.k.shape[1]).float()
    call.keywords |= {"mask_mod": None, "score_mod": recipe.cute, "aux_tensors": [table]}
    call.mods = {
        "score_mod": SimpleNamespace(dense=lambda *place: recipe.dense(*place[:-1], *place[-1]))
    }
    daux = [torch.full_like(table, float("nan"))]
    run_backward(device, call, 1, daux=daux)
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
    """Of a batch stride of 0; also beside stored bits by batch entry."""
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
