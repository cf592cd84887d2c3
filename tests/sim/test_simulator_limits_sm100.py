"""What the software GPU reports, and what it does not, of tensor memory used against the rules.

The rules: PTX ISA, "tcgen05 memory consistency model". A test that asserts silence about a wrong
kernel states a guarantee that is missing; when it fails, the simulator has got better, and
docs/testing.md is to say so.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32, const_expr
from verdicts import SILENCE, WRONG_RESULT, verdicts

from flash_mask_cute.sm100 import umma

ARCH = "sm_100a"

pytestmark = pytest.mark.sim

NOTHING = "nothing"
FENCES = "tcgen05.fence"
WAIT_LOADS = "tcgen05.wait::ld"
WAIT_STORES = "tcgen05.wait::st"


class ThroughTensorMemory:
    """Warp 0 puts a value a lane into tensor memory, and warp 4, of the same lanes, takes it out.

    dropped: the step that is left out.
    """

    def __init__(self, dropped: str):
        self.dropped = dropped

    @cute.jit
    def __call__(self, values: cute.Tensor, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        self.kernel(values, out).launch(grid=(1, 1, 1), block=(160, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):  # type: ignore[no-untyped-def]
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        address = cute.arch.alloc_smem(Int32, 1)
        if warp == 0:
            umma.Group(1).allocate(address)
            value = cute.make_rmem_tensor(1, Float32)
            value[0] = values[lane]
            umma.store_columns(value, 0, lane)
            if const_expr(self.dropped != WAIT_STORES):
                umma.wait_stores()
            if const_expr(self.dropped != FENCES):
                umma.fence_before_arrival()
        cute.arch.sync_threads()
        if warp == 4:
            if const_expr(self.dropped != FENCES):
                umma.fence_after_wait()
            loaded = umma.load_columns(0, 1, lane)
            if const_expr(self.dropped != WAIT_LOADS):
                umma.wait_loads()
            out[lane] = loaded[0, 0]
        cute.arch.sync_threads()
        if warp == 0:
            umma.Group(1).free()


def reported_without(simulator: ModuleType, dropped: str) -> Any:
    values = torch.arange(1.0, 33.0)
    return verdicts(simulator, ThroughTensorMemory(dropped), (values,), values)


def test_nothing_dropped(simulator: ModuleType) -> None:
    assert reported_without(simulator, NOTHING) == {SILENCE}


def test_wait_for_stores(simulator: ModuleType) -> None:
    reported = reported_without(simulator, WAIT_STORES)
    assert WRONG_RESULT in reported
    assert any("tcgen05.st not followed by tcgen05.wait::st" in text for text in reported)


def test_fences_are_not_missed(simulator: ModuleType) -> None:
    """No guarantee: without `tcgen05.fence` on both sides of the barrier, the load of another warp
    is not ordered behind the store."""
    assert reported_without(simulator, FENCES) == {SILENCE}


def test_wait_for_loads_is_not_missed(simulator: ModuleType) -> None:
    """No guarantee: without `tcgen05.wait::ld`, the registers of a load may not be there yet."""
    assert reported_without(simulator, WAIT_LOADS) == {SILENCE}
