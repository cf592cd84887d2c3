"""Launches that may start before the end of the one before, with and without their wait for it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ACTIVE_ARCH, HOPPER
from planned import forward_call
from simulated_forward import run_on_simulator

from flash_mask_cute.call.append import Append, append
from flash_mask_cute.runtime.target import Target

WAIT = "griddepcontrol.wait;"


def step() -> None:
    """A key is appended, and a query attends to all, in stream-K."""
    q, k = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(1, 700, 2, 64).bfloat16()
    given = Append(k, k.clone(), k[:, :1].clone(), k[:, :1].clone(), q, torch.tensor([699]).int())
    q, total = append(given, Target(ACTIVE_ARCH, num_sms=2))
    # a call with a mask takes chunks
    mask = {
        "causal": True,
        "q_start": "end",
        "startend_row_indices": torch.full((1, 1, 700, 1), 700).int(),
    }
    run_on_simulator(forward_call(q, k, given.v_cache, seqused_k=total, num_splits=0, **mask))


def edited(simulator: ModuleType, edit: Callable[[str], str]) -> Callable[..., Any]:
    real = simulator.run
    return lambda kernel, _, *args, **options: real(kernel, edit(kernel.__ptx__), *args, **options)


def test_who_does_not_wait_is_noticed(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel without its wait uses memory too early, and the software GPU says so."""
    launches: list[str] = []

    def seen(ptx: str) -> str:
        launches.append(ptx)
        return ptx

    monkeypatch.setattr(simulator, "run", edited(simulator, seen))
    step()
    early = [ptx for ptx in launches if WAIT in ptx]
    assert len(launches) == 3 and len(early) == (3 if ACTIVE_ARCH == HOPPER else 2)
    monkeypatch.undo()
    for broken in early:
        with monkeypatch.context() as patch, pytest.raises(simulator.SimError, match=WAIT[:-1]):
            cut = edited(simulator, lambda ptx: ptx.replace(WAIT, "") if ptx == broken else ptx)  # noqa: B023
            patch.setattr(simulator, "run", cut)
            step()
