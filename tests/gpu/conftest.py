from __future__ import annotations

import pytest
from devices import Device


@pytest.fixture
def device() -> Device:
    """Of cases that run on every device."""
    return Device("gpu", "cuda")
