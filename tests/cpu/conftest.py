from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import Device
from launch_recorder import Recorder

from flash_mask_cute import interface
from flash_mask_cute.call import explain, prepare
from flash_mask_cute.call.build_backward import BwdKernels
from flash_mask_cute.runtime.cache import Compiled


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of every kernel that the public call would launch."""
    recorder = Recorder()
    monkeypatch.setattr(interface, "_prepared_fwd", {})
    monkeypatch.setattr(interface, "prepare_fwd", recorder.prepare)
    return recorder


@pytest.fixture
def bwd_recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes the place of every kernel that the public backward would launch."""
    from test_bwd_interface import Recorder

    recorder = Recorder()
    monkeypatch.setattr(interface, "_prepared_bwd", {})
    monkeypatch.setattr(interface, "prepare_bwd", recorder.prepare)
    return recorder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations are ten times slower when threads share them, and wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def explained_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` does not ask the compiler, for tests that need no registers, spills or refusals."""
    monkeypatch.setattr(explain, "compiled_fwd", lambda run: Compiled(None, {}))


@pytest.fixture
def attention_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are prepared without attention kernels: for tests of what is prepared beside them."""
    monkeypatch.setattr(prepare, "compiled_fwd", lambda run: Compiled(None, {}))
    monkeypatch.setattr(prepare, "compiled_bwd", lambda run: BwdKernels(None, None, None))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What torch.compile remembers of other tests decides nothing in this one."""
    torch._dynamo.reset()
    yield


@pytest.fixture
def device() -> Device:
    """Of cases that run on every device: the CPU path."""
    return Device("cpu")
