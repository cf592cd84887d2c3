"""Forwards in splits on CPU tensors: the cases of the simulator, and that splits are combined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eager import assert_close_to_oracle
from inputs import Inputs, make_inputs
from planned import call_of, planned
from score_tables import TABLES, make_tabled
from split_cases import SPLIT_CASES, TABLED_CASES, SplitCase, take_chunks

from flash_mask_cute.call import splits
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.cpu import forward
from flash_mask_cute.runtime.target import Target


@pytest.fixture(autouse=True)
def short_walks_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries, too, over few keys, as longer walks are on a GPU."""
    monkeypatch.setattr(splits, "_LEAST_BLOCKS_OF_MANY", 4)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    take_chunks(monkeypatch)


@pytest.mark.parametrize("split", SPLIT_CASES)
def test_against_oracle(split: SplitCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check(split, make_inputs(split.case), monkeypatch)


@pytest.mark.parametrize("split", TABLED_CASES)
@pytest.mark.parametrize("name", TABLES)
def test_scores_of_any_size(split: SplitCase, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(split, make_tabled(split.case, name).inputs, monkeypatch)


def check(split: SplitCase, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs are of split.case."""
    ended = []
    end = forward._Splits.end
    monkeypatch.setattr(
        forward._Splits, "end", lambda self, heads: (ended.append(heads), end(self, heads))
    )
    call = call_of(inputs, num_splits=split.num_splits)
    monkeypatch.setattr(Target, "default", lambda: Target("sm_90a", num_sms=split.sms))
    out, lse = prepared_fwd(planned(call))(call.tensors, call.masks)
    assert lse is not None
    assert_close_to_oracle(out, lse, inputs)
    assert ended, "all was computed in one pass"


def test_pieces_of_float64_are_those_of_one_pass() -> None:
    split = SPLIT_CASES[5]
    inputs = make_inputs(replace(split.case, dtype=torch.float64))
    results = []
    for num_splits in (1, 4, 0):
        call = call_of(inputs, num_splits=num_splits)
        results.append(prepared_fwd(planned(call))(call.tensors)[0])
    for out in results[1:]:
        torch.testing.assert_close(out, results[0], atol=1e-12, rtol=1e-12)
