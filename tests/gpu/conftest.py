from __future__ import annotations

import pytest
import torch
from devices import Device


def pytest_runtest_setup() -> None:
    """Before each test of this folder."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found != (9, 0):
        sees = "torch sees none" if found is None else f"this one has {found}"
        pytest.skip(f"needs a CUDA device of capability 9.0, {sees}")


@pytest.fixture
def device() -> Device:
    """Of cases that run on every device."""
    return Device("gpu", "cuda")
