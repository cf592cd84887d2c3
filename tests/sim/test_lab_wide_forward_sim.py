"""The kernels of `lab.wide_forward` end, and what they pass on arrives."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from quiet_runs import quiet_run

from lab import wide_forward

SMS = 4


@pytest.mark.parametrize("slots", [1, 2])
def test_exchange(simulator: ModuleType, slots: int) -> None:
    steps, threads = 7, wide_forward.NUM_WARPGROUPS * wide_forward.WARPGROUP
    clocks = torch.zeros(SMS, dtype=torch.int64)
    sums = torch.zeros(SMS, threads, dtype=torch.int32)
    call = wide_forward.compiled(wide_forward.Exchange(slots, SMS), clocks, sums, steps)
    with quiet_run(simulator):
        call(clocks, sums, steps)
    assert torch.equal(sums, wide_forward.exchanged(threads, steps).expand_as(sums))


@pytest.mark.parametrize("name", wide_forward.TILINGS)
def test_loads(simulator: ModuleType, name: str) -> None:
    """Boxes that were loaded and not read, or awaited and not loaded, would keep it from ending."""
    tiling, tiles, seqlen = wide_forward.TILINGS[name], 3, 256
    shape = 2, seqlen, wide_forward.HEAD_DIM
    k, v = (torch.zeros(shape, dtype=torch.bfloat16).permute(1, 2, 0) for _ in "kv")
    clocks = torch.zeros(SMS, dtype=torch.int64)
    call = wide_forward.compiled(wide_forward.Loads(tiling, SMS), k, v, clocks, tiles)
    with quiet_run(simulator):
        call(k, v, clocks, tiles)
    of_block = tiling.num_boxes * tiling.ctas * wide_forward.BOX_BYTES
    read_by_all = 2 if tiling.ctas == 2 and tiling.keys == wide_forward.BOX else 1
    keys_and_values = (read_by_all + 1) * tiling.keys * wide_forward.HEAD_DIM * 2
    assert of_block == keys_and_values
