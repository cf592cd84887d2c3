"""When keys and values in fp8 are converted to 16 bits before attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_caches import Fp8Case, make_call
from planned import forward_call, planned

from flash_mask_cute import SelectedBlocks
from flash_mask_cute.call import fp8 as widen
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.explain import explain_fwd
from flash_mask_cute.runtime.target import Target

HOPPER = Target("sm_90a", num_sms=132)
# 1024 query rows share keys
PREFILL = Fp8Case(
    "prefill", 64, seqlen_q=256, lengths=(300, 280), capacity=320, page_size=16,
    scales=("token", "head"), keywords={"causal": True},
)  # fmt: skip


def plan_of(case: Fp8Case, **more: Any) -> ExecutionPlan:
    call = make_call(case)
    return planned(
        forward_call(call.q, *call.codes, **call.keywords, **call.descales, **more), HOPPER
    )


def test_many_rows_that_share_keys_are_worth_a_conversion() -> None:
    found = plan_of(PREFILL)
    assert found.instead and not found.problem.in_fp8
    assert found.problem.page_box is None and not found.problem.optional
    call = make_call(PREFILL)
    of_16 = planned(forward_call(call.q, *call.numbers, **call.keywords), HOPPER)
    assert found.choice.tiles == of_16.choice.tiles and found.splits == of_16.splits


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (replace(PREFILL, seqlen_q=255), {}),
        (PREFILL, {"window_size_left": 100}),
        (PREFILL, {"kv_batch_idx": torch.tensor([1, 0], dtype=torch.int32)}),
        (PREFILL, {"leftpad_k": torch.tensor([1, 0], dtype=torch.int32)}),
    ],
    ids=["few rows", "a window", "entries", "padding"],
)
def test_others_are_converted_by_attention(case: Fp8Case, more: dict[str, Any]) -> None:
    found = plan_of(case, **more)
    assert not found.instead and found.problem.in_fp8


@pytest.mark.parametrize(("k", "converts"), [(8, True), (1, False)])
def test_a_selection_is_worth_it_where_rows_share_what_they_chose(k: int, converts: bool) -> None:
    """With blocks of 64 keys, 8 of 5 are all keys of the cache, 1 a fifth."""
    indices = torch.zeros(2, 2, 256, k, dtype=torch.int32)
    found = plan_of(PREFILL, block_sparse_tensors_torch=SelectedBlocks(indices, 64))
    assert bool(found.instead) == converts
    assert found.problem.has_selected and found.problem.in_fp8 != converts


def test_their_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 320 * 2 * (64 + 64) * 2
    monkeypatch.setattr(widen, "MOST_BYTES", needed)
    assert plan_of(PREFILL).instead
    monkeypatch.setattr(widen, "MOST_BYTES", needed - 1)
    assert not plan_of(PREFILL).instead


@pytest.mark.usefixtures("explained_without_compiling")
def test_explain_tells_it() -> None:
    call = make_call(PREFILL)
    made = forward_call(call.q, *call.codes, **call.keywords, **call.descales)
    found = explain_fwd(made, HOPPER)
    assert "converted from fp8 before attention, to 327680 bytes" in found.note
    assert found.backward is None and "keys in pages have no gradients" in found.note
