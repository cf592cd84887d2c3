"""Forward mode on a GPU, by the public functions, against torch's forward mode in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, Case
from eager import assert_tangents_close, dual_results
from inputs import make_inputs, make_tangents
from planned import attend_of
from unseen_memory import UNUSED_CASES, with_unused

from flash_mask_cute import flash_attn_func

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
CUDA = torch.device("cuda")
CASES = tuple(
    Case(f"{name}-d{d}", head_dim=d, dtype=FP16 if d == 96 else BF16, **fields)
    for d in (64, 96, 128)
    for name, fields in {
        "full": {"batch": 2, "seqlen_q": 700, "seqlen_k": 900, "heads_q": 4, "heads_kv": 2},
        "causal": {"batch": 1, "seqlen_q": 1000, "seqlen_k": 900, "causal": True, "sink": FP32},
        "window": {"batch": 1, "seqlen_q": 900, "seqlen_k": 900, "window_left": 100},
        "packed": {"lengths_q": (700, 0, 130), "lengths_k": (650, 30, 500), "causal": True},
        "columns1": {"batch": 1, "seqlen_q": 900, "seqlen_k": 900, "causal": True,
                     "column": "random1"},
        "columns4": {"batch": 1, "seqlen_q": 500, "seqlen_k": 900, "column": "random4"},
        "mask_mod": {"batch": 2, "seqlen_q": 500, "seqlen_k": 500, "mask_mod": "documents"},
        "lists": {"batch": 1, "seqlen_q": 900, "seqlen_k": 900, "blocks": (128, 128)},
    }.items()
)  # fmt: skip


def found_and_right(inputs: Any, tangents: Any, of: Any = None) -> None:
    attend = attend_of(inputs)
    operands = inputs.q, inputs.k, inputs.v
    primals, found = dual_results(attend, operands, tangents)
    plain = attend(*operands)
    assert torch.equal(primals.out, plain[0]) and torch.equal(primals.lse, plain[1])
    assert_tangents_close(found, of or inputs, make_tangents(of) if of else tangents)
    _, again = dual_results(attend, operands, tangents)
    assert torch.equal(found.out, again.out) and torch.equal(found.lse, again.lse)


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case) -> None:
    inputs = make_inputs(case, CUDA)
    found_and_right(inputs, make_tangents(inputs))


@pytest.mark.parametrize("case", UNUSED_CASES)
def test_unused_memory_reaches_no_tangent(case: Case) -> None:
    clean = make_inputs(replace(case, pack_gqa=None), CUDA)
    tangents = make_tangents(clean)
    for name, t in zip("qkv", tangents, strict=True):
        t[~clean.rows_in_use("q" if name == "q" else "k")] = float("nan")
    found_and_right(with_unused(clean, float("nan")), tangents, clean)


def test_a_training_step_in_a_graph_and_compiled() -> None:
    """MeanFlow's gradients, eagerly and compiled; what has no kernel is refused by name."""
    weight = torch.randn(64, 64, device=CUDA, dtype=BF16) / 8
    z, dz = torch.randn(2, 1, 500, 4, 64, device=CUDA, dtype=BF16)

    def loss(weight: Any) -> Any:
        u, du = torch.func.jvp(
            lambda z: flash_attn_func(z @ weight, z, z, causal=True), (z,), (dz,)
        )
        return (u - (dz - du).detach()).float().square().mean()

    # AOT Autograd of torch 2.11 fails for torch.func.jvp of any matrix product; 2.13 takes it
    backend = "eager" if torch.__version__ < "2.13" else "inductor"
    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        leaf = weight.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf)[0])
    assert (gradients[0] - gradients[1]).abs().max() <= 0.02 * gradients[0].abs().max()
    wide = torch.randn(1, 64, 2, 192, device=CUDA, dtype=BF16)
    with pytest.raises(NotImplementedError, match=r"forward mode .* \(192, 192\)"):
        torch.func.jvp(flash_attn_func, (wide,) * 3, (wide,) * 3)
