"""Callables that read aux tensors of every dtype, in compiled kernels of either architecture."""

from __future__ import annotations

from types import ModuleType

import aux_dtypes
import pytest
import torch
from aux_dtypes import CASES, make_all_dtypes, plain_inputs
from cases import Case
from conftest import ACTIVE_ARCH
from inputs import make_output_gradients
from quiet_runs import quiet_run
from simulated_forward import run_sim
from trained_mods import assert_aux_gradients_close

# as the software GPU is, so that these tests run on either
ARCH = ACTIVE_ARCH

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
hopper_only = pytest.mark.skipif(ARCH != "sm_90a", reason="there is a kernel for Hopper only")


@pytest.mark.parametrize("case", CASES)
def test_forward(simulator: ModuleType, case: Case) -> None:
    """Several heads: on Hopper one kernel makes mask bits, another reads them."""
    run_sim(simulator, make_all_dtypes(case).inputs, seeds=(1,))
    kernels = len(simulator.RESULTS)
    assert kernels == (2 if ARCH == "sm_90a" and case.heads_q > 1 else 1)


@hopper_only
@pytest.mark.parametrize("case", CASES)
def test_backward(simulator: ModuleType, case: Case) -> None:
    """With the gradient of a table that a uint8 indexes."""
    import simulated_backward

    given = make_all_dtypes(case)
    daux = [None] * aux_dtypes.TABLE + [torch.full_like(given.trained[0], float("nan"))]
    launches = 3 if case.heads_q == 1 else 4
    simulated_backward.run_sim(simulator, given.inputs, (1,), launches, daux=daux)
    dout, dlse = make_output_gradients(given.inputs)
    assert_aux_gradients_close(daux[aux_dtypes.TABLE:], given, dout, dlse)  # fmt: skip


@hopper_only
def test_block_lists(simulator: ModuleType) -> None:
    from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
    from flash_mask_cute.compute_block_sparsity import run_scan
    from flash_mask_cute.mask_prep.block_scan import ScanProblem

    aux = tuple(plain_inputs(CASES[0]).keywords["aux_tensors"])
    made = [torch.empty(x, dtype=torch.int32) for x in ((1, 1, 4), (1, 1, 4, 5)) * 2]
    problem = ScanProblem("sm_90a", ScanProblem.describe_aux(aux))
    lists = BlockSparseTensorsTorch(*made, block_size=aux_dtypes.BLOCK_SIZE)
    with quiet_run(simulator, launches=1):
        run_scan(aux_dtypes.mask_mod, problem, lists, (200, 300), aux)
    aux_dtypes.assert_block_lists(lists, list(aux))
