from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from launch_recorder import Recorder

from flash_mask_cute import interface


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of every kernel that the public call would launch."""
    recorder = Recorder()
    monkeypatch.setattr(interface, "_prepared_fwd", {})
    monkeypatch.setattr(interface, "prepare_fwd", recorder.prepare)
    return recorder


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What torch.compile remembers of other tests decides nothing in this one."""
    torch._dynamo.reset()
    yield
