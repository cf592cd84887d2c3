from __future__ import annotations

import pytest


@pytest.fixture
def same_points_for_each_test() -> None:
    from derived import GENERATOR

    GENERATOR.manual_seed(0)
