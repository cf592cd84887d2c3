"""Tensor subclasses beside a kernel: taken apart by an operator, each part a launch, or refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from inputs import Inputs, make_inputs
from simulated_forward import launch_on_simulator, run_on_simulator
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from flash_mask_cute import functional, interface

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

ARCH = "sm_90a"


@pytest.fixture
def on_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions launch kernels for tensors on the CPU."""

    monkeypatch.setattr(interface, "forward", lambda call: run_on_simulator(call))


@pytest.mark.usefixtures("on_simulator")
@pytest.mark.parametrize("name", ["k", "aux_tensors"])
def test_each_part_of_a_wrapper_is_a_launch(simulator: ModuleType, name: str) -> None:
    case = Case("parts", 1, 100, 129, 2, 2, score_mod="t5")
    inputs = make_inputs(case)
    given: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    given |= {x: inputs.keywords[x] for x in ("score_mod", "aux_tensors")}
    first = given["k"] if name == "k" else given["aux_tensors"][0]
    parts = first, first.flip(1).contiguous()

    def call(x: Tensor) -> Any:
        changed = given | {name: x if name == "k" else [x]}
        return functional.flash_attn_func(**changed, return_lse=True)[0]

    simulator.OPTIONS.pop("delay", None)
    simulator.RESULTS.clear()
    out = call(TwoTensor(*parts))
    assert len(simulator.RESULTS) == 2 and type(out) is TwoTensor
    assert torch.equal(out.a, call(parts[0])) and torch.equal(out.b, call(parts[1]))
    assert (out.a != out.b).any()


@pytest.mark.parametrize("name", ["k", "learnable_sink", "aux_tensors", "startend_row_indices"])
def test_the_host_call_launches_nothing(simulator: ModuleType, name: str) -> None:
    case = Case("refused", 1, 129, 129, 2, 2, score_mod="t5", sink=torch.float32, column="random2")
    inputs = make_inputs(case)
    keywords = dict(inputs.keywords)
    if name == "k":
        inputs = Inputs(case, inputs.q, TwoTensor(inputs.k, inputs.k.clone()), inputs.v, keywords)
    elif name == "aux_tensors":
        keywords[name] = [TwoTensor(x, x.clone()) for x in keywords[name]]
    else:
        keywords[name] = TwoTensor(keywords[name], keywords[name].clone())
    simulator.RESULTS.clear()
    with pytest.raises(
        TypeError, match=rf"^{name}.* must be a plain torch.Tensor, got a TwoTensor"
    ):
        launch_on_simulator(inputs, **keywords)
    assert not simulator.RESULTS
