"""FlexAttention mods in the compiled kernels, on the software GPU.

FLASH_MASK_SIM_ARCH says of which architecture; the backward is Hopper's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import waves
from cases import Case
from flex_catalogue import BY_NAME, DOCUMENTS, T5_BIAS, CatalogueMod, Extents
from flex_oracle import dense_mask, scores_of_head
from gradient_oracle import make_output_gradients
from inputs import Inputs, make_inputs
from simulated_forward import launch_on_simulator, run_sim
from torch import Tensor
from trained_mods import TrainedInputs, assert_aux_gradients_close

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.lowering.pair import as_cute_mods

# as the software GPU is, so that these tests run on either
ARCH = os.environ.get("FLASH_MASK_SIM_ARCH", "sm_90a")

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]
# 2^0 as a polynomial, which Blackwell computes for some columns, is off by so much
OF_LSE = {"sm_90a": 0.0, "sm_100a": 8.7e-5}
hopper_only = pytest.mark.skipif(ARCH != "sm_90a", reason="there is a kernel for Hopper only")


@dataclass(frozen=True)
class FlexMasks:
    """In place of `DenseMasks`: what a mod of torch means. trained: of the modifier's Parameters,
    as it reads them."""

    row: CatalogueMod
    extents: Extents
    trained: tuple[Tensor, ...]

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        if self.row.kind == "score_mod":
            return torch.ones((seqlen_q, seqlen_k), dtype=torch.bool)
        return dense_mask(self.row.make(self.extents).mod, self.extents)[batch_idx, head_idx]

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        if self.row.kind == "mask_mod":
            return scores
        trained = tuple(x.to(scores.dtype) for x in self.trained)
        made = self.row.make(self.extents, scores.dtype, given=trained)
        return scores_of_head(made.mod, scores, batch_idx, head_idx)


def make_flex(case: Case, row: CatalogueMod) -> TrainedInputs:
    """Inputs whose keywords hold a lowered mod."""
    extents = Extents(case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
    made = row.make(extents)
    lowered = lower_mod(made.mod, row.kind)
    wants_aux = tuple(
        i for i, x in enumerate(lowered.aux_tensors) if any(x is y for y in made.trained)
    )
    assert len(wants_aux) == len(made.trained)
    aux_tensors = [x.detach() for x in lowered.aux_tensors]
    keywords = {row.kind: lowered.mod, "aux_tensors": aux_tensors or None}
    dense: Any = FlexMasks(row, extents, tuple(x.detach() for x in made.trained))
    return TrainedInputs(replace(make_inputs(case), mask_keywords=keywords, dense=dense), wants_aux)


CASES = (
    (Case("documents", 1, 130, 130, 2, 1, head_dim=64), DOCUMENTS),
    (Case("alibi", 1, 129, 150, 2, 2, head_dim=64), BY_NAME["alibi"]),
    (Case("soft-cap", 1, 129, 150, 1, 1, head_dim=64), BY_NAME["soft_cap"]),
    (Case("t5", 1, 130, 150, 2, 1, head_dim=64), T5_BIAS),
)
of_each = pytest.mark.parametrize(("case", "row"), CASES, ids=lambda x: getattr(x, "id", ""))


@of_each
def test_forward(simulator: ModuleType, case: Case, row: CatalogueMod) -> None:
    run_sim(simulator, make_flex(case, row).inputs, ARCH, seeds=(1,))


@hopper_only
@of_each
def test_backward(simulator: ModuleType, case: Case, row: CatalogueMod) -> None:
    """With the gradients of what is trained."""
    import test_flash_bwd_sim

    given = make_flex(case, row)
    more: dict[str, Any] = {}
    if given.wants_aux:
        more["daux"] = [
            torch.full_like(x, float("nan")) if i in given.wants_aux else None
            for i, x in enumerate(given.aux_tensors)
        ]
    test_flash_bwd_sim.run_sim(simulator, given.inputs, (1,), **more)
    if given.wants_aux:
        dout, dlse = make_output_gradients(given.inputs)
        found = [more["daux"][i] for i in given.wants_aux]
        assert_aux_gradients_close(found, given, dout, dlse)


@pytest.mark.parametrize("name", waves.BOUNDS)
def test_functions_in_kernels(simulator: ModuleType, name: str) -> None:
    """Those that kernels compute otherwise than code for the CPU."""
    x = waves.points()
    n = x.numel()
    mods = as_cute_mods(*waves.mods_of(waves.BOUNDS[name][0], x), None, "cpu")
    q, k, v = (torch.zeros(1, n, 1, 64).bfloat16() for _ in range(3))
    inputs = Inputs(Case("functions", 1, n, n, 1, 1, head_dim=64), q, k, v, mods._asdict())
    out, lse = launch_on_simulator(inputs, ARCH)
    waves.assert_values(name, x, out[0, :, 0], lse.flatten(), of_lse=OF_LSE[ARCH])
