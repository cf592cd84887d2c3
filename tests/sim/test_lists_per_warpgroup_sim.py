"""Block lists of which the rows of each warpgroup have their own, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case
from dense_masks import DenseMasks
from inputs import Inputs, make_inputs, make_output_gradients
from mask_cases import EMPTY, FULL, PARTIAL
from planned import call_of, planned
from simulated_backward import assert_same_bits
from simulated_backward import launch_on_simulator as backward_of
from simulated_backward import run_sim as run_backward
from simulated_forward import launch_on_simulator, run_sim
from torch import Tensor

from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


def with_states(case: Case, states: Tensor) -> Inputs:
    inputs = make_inputs(case)
    assert isinstance(inputs.dense, DenseMasks)
    dense = replace(inputs.dense, states=states)
    return replace(inputs, dense=dense, mask_keywords=dense.keywords())


def drawn_states(case: Case, density: float = 0.35, seed: int = 1) -> Tensor:
    """A row of blocks in seven sees nothing."""
    assert case.blocks is not None
    sizes = zip((case.seqlen_q, case.seqlen_k), case.blocks, strict=True)
    rows, keys = (-(-n // b) for n, b in sizes)
    generator = torch.Generator().manual_seed(seed)
    shape = case.batch, case.heads_q, rows, keys
    states = torch.where(torch.rand(shape, generator=generator) < 0.5, FULL, PARTIAL)
    states[torch.rand(shape, generator=generator) >= density] = EMPTY
    states[torch.rand(shape[:3], generator=generator) < 1 / 7] = EMPTY
    return states


NARROW: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "head_dim": 64}
CASES = (
    Case("d128", 1, 400, 600, 1, 1, blocks=(64, 64)),
    Case("d64", 2, 400, 600, blocks=(64, 64), **NARROW),
    Case("causal", 1, 700, 900, causal=True, blocks=(64, 64), **NARROW),
    Case("window", 1, 300, 500, window_left=150, window_right=9, blocks=(64, 128), **NARROW),
    Case("softcap-sink", 1, 300, 500, softcap=2.0, sink=torch.float32, blocks=(64, 64), **NARROW),
    Case("columns", 1, 300, 500, causal=True, column="stepped1", blocks=(64, 64), **NARROW),
    Case("seqused", 2, 300, 500, seqused_q=(130, 300), seqused_k=(500, 70), blocks=(64, 64),
         **NARROW),
    Case("varlen", lengths_q=(200, 0, 300, 10), lengths_k=(300, 70, 0, 500), blocks=(64, 64),
         **NARROW),
)  # fmt: skip


@pytest.mark.daily(1)
def test_blocks_of_two_tiles(simulator: ModuleType) -> None:
    case = Case("larger-blocks", 1, 700, 700, blocks=(320, 128), **NARROW)
    test_against_oracle(simulator, case)


@pytest.mark.parametrize("case", CASES)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    inputs = with_states(case, drawn_states(case))
    assert planned(inputs, Target.named("sm_90a")).problem.lists_per_warpgroup
    run_sim(simulator, inputs)


def test_partial_lists_alone_and_blocks_that_are_not_skipped(simulator: ModuleType) -> None:
    case = replace(CASES[1], batch=1)
    inputs = with_states(case, drawn_states(case).clamp(max=PARTIAL))
    lists = inputs.mask_keywords["block_sparse_tensors_torch"]
    only = lists._replace(full_block_cnt=None, full_block_idx=None)
    run_sim(simulator, inputs, block_sparse_tensors_torch=only, config={"skip_blocks": False})
    every, few = (
        launch_on_simulator(inputs, config={"skip_blocks": skip}) for skip in (False, True)
    )
    assert torch.equal(every[0].view(torch.int16), few[0].view(torch.int16))


def make_gaps() -> Inputs:
    """Warpgroups whose lists do not have many blocks of others in a row."""
    case = Case("gaps", 1, 384, 14 * 64 - 3, 1, 1, blocks=(64, 64))
    states = torch.zeros(1, 1, 6, 14, dtype=torch.int64)
    states[0, 0, 0, [0, 13]] = FULL
    states[0, 0, 1] = FULL
    states[0, 0, 3, 6] = FULL
    states[0, 0, 4, ::3] = FULL
    states[0, 0, 5, 4:] = FULL
    return with_states(case, states)


@pytest.mark.parametrize("stages", [2, 5])
def test_longer_gaps_than_there_are_stages(simulator: ModuleType, stages: int) -> None:
    """P V of a block is due before the stage of its values is needed."""
    run_sim(simulator, make_gaps(), config={"num_stages": stages})


NARROW_BWD: dict[str, Any] = {"heads_q": 2, "heads_kv": 1, "head_dim": 80}
BWD_CASES = (
    Case("d128", 1, 400, 600, 1, 1, blocks=(64, 64)),
    Case("gqa", 2, 400, 450, blocks=(64, 64), **NARROW_BWD),
    Case("larger-blocks", 1, 450, 700, blocks=(128, 192), **NARROW_BWD),
    Case("causal", 1, 400, 500, causal=True, blocks=(64, 64), **NARROW_BWD),
    Case("window", 1, 300, 500, window_left=150, window_right=9, blocks=(64, 64), **NARROW_BWD),
    Case("columns", 1, 300, 500, causal=True, column="stepped1", blocks=(64, 64), **NARROW_BWD),
    Case("seqused", 2, 300, 500, seqused_q=(130, 300), seqused_k=(500, 70), blocks=(64, 64),
         sink=torch.float32, **NARROW_BWD),
    Case("varlen", lengths_q=(200, 0, 300, 10), lengths_k=(300, 70, 0, 500), blocks=(64, 64),
         **NARROW_BWD),
)  # fmt: skip


@pytest.mark.parametrize("case", BWD_CASES)
def test_gradients(simulator: ModuleType, case: Case) -> None:
    inputs = with_states(case, drawn_states(case))
    call = call_of(inputs, Direction.BACKWARD)
    assert planned(call, Target.named("sm_90a")).problem.lists_per_warpgroup
    run_backward(simulator, inputs)


def test_gradients_in_order_and_of_all_blocks(simulator: ModuleType) -> None:
    inputs = with_states(BWD_CASES[0], drawn_states(BWD_CASES[0]))
    run_backward(simulator, inputs, (1,), config={"skip_blocks": False})
    run_backward(simulator, inputs, deterministic=True)
    few, every = (
        backward_of(
            inputs, make_output_gradients(inputs)[0], deterministic=True,
            config={"skip_blocks": skips},
        )
        for skips in (True, False)
    )  # fmt: skip
    assert_same_bits(few, every)
