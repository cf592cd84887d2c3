"""FlexAttention mods in compiled kernels of either architecture; the backward is Hopper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import simulated_backward
import torch
import waves
from cases import Case
from conftest import ACTIVE_ARCH
from flex_catalogue import BY_NAME, DOCUMENTS, T5_BIAS, CatalogueMod, Extents
from flex_oracle import dense_mask, scores_of_head
from inputs import Inputs, make_inputs, make_output_gradients
from simulated_forward import launch_on_simulator, run_sim
from torch import Tensor
from trained_mods import TrainedInputs, assert_aux_gradients_close

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.compute_block_sparsity import run_scan
from flash_mask_cute.flex import lower_mod
from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.mask_prep.block_scan import ScanProblem

# as the software GPU is, so that these tests run on either
ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
# 2^0 as a polynomial, which Blackwell computes for some columns, is off by so much
OF_LSE = {"sm_90a": 0.0, "sm_100a": 1.2e-5}
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
    run_sim(simulator, make_flex(case, row).inputs, seeds=(1,))


@hopper_only
@of_each
def test_backward(simulator: ModuleType, case: Case, row: CatalogueMod) -> None:
    """With the gradients of what is trained."""
    given = make_flex(case, row)
    more: dict[str, Any] = {"daux": given.new_daux()} if given.wants_aux else {}
    simulated_backward.run_sim(simulator, given.inputs, (1,), **more)
    if given.wants_aux:
        dout, dlse = make_output_gradients(given.inputs)
        found = [more["daux"][i] for i in given.wants_aux]
        assert_aux_gradients_close(found, given, dout, dlse)


@dataclass(frozen=True)
class Constant:
    """In place of `DenseMasks`: every score counts or none does, and has a value or its own."""

    is_seen: bool = True
    score: float | None = None

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        return torch.full((seqlen_q, seqlen_k), self.is_seen)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        # a product, so that the oracle can differentiate it
        return scores if self.score is None else scores * 0 + self.score


def _mask(answer: Any) -> Callable[..., Any]:
    return lambda b, h, i, j: answer


def _score(answer: Any) -> Callable[..., Any]:
    return lambda s, b, h, i, j: answer


CONSTANTS: dict[str, tuple[str, Callable[..., Any], Constant]] = {
    "False": ("mask_mod", _mask(False), Constant(False)),
    "True": ("mask_mod", _mask(True), Constant()),
    "a tensor": ("mask_mod", _mask(torch.tensor(False)), Constant(False)),
    # what only the compiler of the kernel finds constant
    "folded": ("mask_mod", lambda b, h, i, j: (i - i) * j != 0, Constant(False)),
    "0": ("score_mod", _score(0), Constant(score=0.0)),
    "1.5": ("score_mod", _score(1.5), Constant(score=1.5)),
    "a 0-dim tensor": ("score_mod", _score(torch.tensor(-2.5)), Constant(score=-2.5)),
}
of_each_constant = pytest.mark.parametrize("name", CONSTANTS)


def make_constant(name: str, seqlen: int, heads: int) -> Inputs:
    kind, mod, dense = CONSTANTS[name]
    mods = resolve_mods(mod if kind == "score_mod" else None,
                        mod if kind == "mask_mod" else None, None, "cpu")  # fmt: skip
    case = Case(f"constant {name}", 1, seqlen, seqlen, heads, 1, head_dim=64)
    as_dense: Any = dense
    return replace(make_inputs(case), mask_keywords=mods._asdict(), dense=as_dense)


@of_each_constant
def test_constants_in_a_forward(simulator: ModuleType, name: str) -> None:
    run_sim(simulator, make_constant(name, 150, 2), seeds=(1,))


@of_each_constant
def test_constants_in_a_backward(simulator: ModuleType, name: str) -> None:
    simulated_backward.run_sim(simulator, make_constant(name, 150, 2), (1,))


@hopper_only
@pytest.mark.parametrize("name", [x for x in CONSTANTS if CONSTANTS[x][0] == "mask_mod"])
def test_constants_in_stored_bits_and_lists(simulator: ModuleType, name: str) -> None:
    """Of a mask for all heads, by a kernel of its own; and in block lists."""
    inputs = make_constant(name, 512, 4)
    run_sim(simulator, inputs, seeds=(1,))
    assert len(simulator.RESULTS) == 2
    simulated_backward.run_sim(simulator, inputs, (1,), launches=4)
    mod, is_seen = inputs.keywords["mask_mod"], CONSTANTS[name][2].is_seen
    for has_full in (False, True):
        made = [torch.empty(x, dtype=torch.int32) for x in ((1, 1, 4), (1, 1, 4, 4)) * 2]
        lists = BlockSparseTensorsTorch(*made[: 4 if has_full else 2], block_size=(128, 128))
        aux = tuple(inputs.keywords["aux_tensors"] or ())
        problem = ScanProblem(ARCH, ScanProblem.describe_aux(aux), has_full)
        run_scan(mod, problem, lists, (512, 512), aux)
        counts = [made[0], made[2]] if has_full else [made[0]]
        expected = [0, 4 * is_seen] if has_full else [4 * is_seen]
        assert [x.unique().tolist() for x in counts] == [[x] for x in expected]


@pytest.mark.parametrize("name", waves.BOUNDS)
def test_functions_in_kernels(simulator: ModuleType, name: str) -> None:
    """Those that kernels compute otherwise than code for the CPU."""
    x = waves.points()
    n = x.numel()
    mods = resolve_mods(*waves.mods_of(waves.BOUNDS[name][0], x), None, "cpu")
    q, k, v = (torch.zeros(1, n, 1, 64).bfloat16() for _ in range(3))
    inputs = Inputs(Case("functions", 1, n, n, 1, 1, head_dim=64), q, k, v, mods._asdict())
    out, lse = launch_on_simulator(inputs)
    waves.assert_values(name, x, out[0, :, 0], lse.flatten(), of_lse=OF_LSE[ARCH])
