"""What the software GPU reports, and what it does not, of tensor memory used against the rules.

The rules: PTX ISA, "tcgen05 memory consistency model". A test that asserts silence about a wrong
kernel states a guarantee that is missing; when it fails, the simulator has got better, and
docs/testing.md is to say so.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32, const_expr
from hand_overs import READER, of_overwriting
from verdicts import SILENCE, WRONG_RESULT, verdicts

from flash_mask_cute.sm100 import umma

ARCH = "sm_100a"

NOTHING = "nothing"
FENCE_BEFORE = "tcgen05.fence before the arrival"
FENCE_AFTER = "tcgen05.fence after the wait"
WAIT_LOADS = "tcgen05.wait::ld"
WAIT_STORES = "tcgen05.wait::st"
WAIT_IN_TIME = "tcgen05.wait::ld in time"
MEETING = "the barrier of a pair before its allocation"
PARTING = "the barrier of a pair before tensor memory is freed"
# who puts values into tensor memory, and who takes them out: warps of the same lanes
SOURCE, SINK = 0, 4
NUM_THREADS = 160


class ThroughTensorMemory:
    """One warp puts a value a lane into tensor memory, another takes it out and says so, and the
    first one puts another value there.

    dropped: the step that is left out. WAIT_IN_TIME: the wait comes after what says so.
    """

    def __init__(self, dropped: str):
        self.dropped = dropped

    @cute.jit
    def __call__(self, values: cute.Tensor, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        self.kernel(values, out).launch(grid=(1, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, values: cute.Tensor, out: cute.Tensor):  # type: ignore[no-untyped-def]
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        address = cute.arch.alloc_smem(Int32, 1)
        if warp == SOURCE:
            umma.Group(1).allocate(address)
            self.put(values[lane], lane)
            self.meet()
            self.meet()
            umma.fence_after_wait()
            self.put(Float32(-1.0), lane)
            self.meet()
        elif warp == SINK:
            self.meet()
            if const_expr(self.dropped != FENCE_AFTER):
                umma.fence_after_wait()
            loaded = umma.load_columns(0, 1, lane)
            if const_expr(self.dropped not in (WAIT_LOADS, WAIT_IN_TIME)):
                umma.wait_loads()
            umma.fence_before_arrival()
            self.meet()
            self.meet()
            if const_expr(self.dropped == WAIT_IN_TIME):
                umma.wait_loads()
            # arithmetic: a load whose value is only stored is no more than noted
            out[lane] = loaded[0, 0] * Float32(2.0)
        cute.arch.sync_threads()
        if warp == SOURCE:
            umma.Group(1).free()

    def put(self, value: Float32, lane: Int32) -> None:
        column = cute.make_rmem_tensor(1, Float32)
        column[0] = value * Float32(0.5)
        umma.store_columns(column, 0, lane)
        if const_expr(self.dropped != WAIT_STORES):
            umma.wait_stores()
        if const_expr(self.dropped != FENCE_BEFORE):
            umma.fence_before_arrival()

    def meet(self) -> None:
        """Of the two warps."""
        cute.arch.barrier(barrier_id=1, number_of_threads=64)


class OfPair:
    """Two CTAs allocate tensor memory and free it. dropped: the cluster barrier left out."""

    def __init__(self, dropped: str):
        self.dropped = dropped

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):  # type: ignore[no-untyped-def]
        self.kernel(out).launch(grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):  # type: ignore[no-untyped-def]
        group = umma.Group(2)
        if const_expr(self.dropped != MEETING):
            group.meet()
        group.allocate(cute.arch.alloc_smem(Int32, 1))
        cute.arch.sync_threads()
        if const_expr(self.dropped != PARTING):
            group.sync()
        group.free()
        out[group.rank() * 32 + cute.arch.lane_idx()] = Float32(1.0)


def reported_without(simulator: ModuleType, dropped: str) -> Any:
    values = torch.arange(1.0, 33.0)
    return verdicts(simulator, ThroughTensorMemory(dropped), (values,), values)


def test_nothing_dropped(simulator: ModuleType) -> None:
    assert reported_without(simulator, NOTHING) == {SILENCE}
    assert of_overwriting(simulator, 4, waits_for_reader=True) == {SILENCE}


def test_wait_for_stores(simulator: ModuleType) -> None:
    reported = reported_without(simulator, WAIT_STORES)
    assert WRONG_RESULT in reported
    assert any("tcgen05.st not followed by tcgen05.wait::st" in text for text in reported)


@pytest.mark.parametrize(
    ("dropped", "said"),
    [
        (FENCE_BEFORE, {"bar.sync follows the tcgen05.st of line L without a "
                        "tcgen05.fence::before_thread_sync between"}),
        (FENCE_AFTER, {"tcgen05.ld follows the wait of line L without a "
                       "tcgen05.fence::after_thread_sync between"}),
    ],
    ids=["before", "after"],
)  # fmt: skip
def test_fences(simulator: ModuleType, dropped: str, said: set[str]) -> None:
    """Found in the text of the kernel, so in every run; the result is right."""
    reported = reported_without(simulator, dropped)
    assert {re.sub(r"line \d+", "line L", text) for text in reported} == said


def test_wait_for_loads(simulator: ModuleType) -> None:
    """Found in the text of the kernel, so in every run; by delayed runs also at the warp's end."""
    unwaited = "reads what the tcgen05.ld of line L brings without a tcgen05.wait::ld between"
    left = f"a warp ended with tcgen05.ld not followed by tcgen05.wait::ld (warp {SINK})"
    reported = reported_without(simulator, WAIT_LOADS)
    assert {re.sub(r"line \d+", "line L", text) for text in reported} == {unwaited, left}


def test_what_is_loaded_changes_before_the_wait(simulator: ModuleType) -> None:
    """Reported with delays; the value is the one of the load, as if it had come in time."""
    changed = "TMEM that the tcgen05.ld of line L reads changed before its tcgen05.wait::ld"
    reported = reported_without(simulator, WAIT_IN_TIME)
    assert {re.sub(r"line \d+", "line L", text) for text in reported} == {SILENCE, changed}


def test_pairs_allocate_when_both_have_started(simulator: ModuleType) -> None:
    """An error in every run: nothing says that the peer has started."""
    ones = torch.ones(64)
    assert verdicts(simulator, OfPair(NOTHING), (), ones) == {SILENCE}
    said = "tcgen05.alloc of cta_group::2 before the CTAs of the cluster have met"
    reported = verdicts(simulator, OfPair(MEETING), (), ones)
    assert all(said in error for error in reported), reported


def test_pairs_free_what_both_have_allocated(simulator: ModuleType) -> None:
    """An error where one CTA is slower than its peer."""
    reported = verdicts(simulator, OfPair(PARTING), (), torch.ones(64)) - {SILENCE}
    assert reported
    assert all("before the tcgen05.alloc of CTA rank" in error for error in reported), reported


def test_overwriting_after_hand_overs(simulator: ModuleType) -> None:
    """Shown only where the reader is slow, as on Hopper."""
    assert of_overwriting(simulator, 4, waits_for_reader=False) == {SILENCE}
    assert of_overwriting(simulator, 4, waits_for_reader=False, slow=READER) == {WRONG_RESULT}
    assert of_overwriting(simulator, 4, waits_for_reader=True, slow=READER) == {SILENCE}
