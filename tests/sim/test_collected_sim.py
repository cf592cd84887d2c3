"""Which modules of this folder a process of one architecture collects."""

from __future__ import annotations

import pytest
from conftest import ACTIVE_ARCH, HOPPER, arch_of

ARCH = ACTIVE_ARCH


def test_modules_are_of_this_architecture(request: pytest.FixtureRequest) -> None:
    """None is imported to be skipped. Who names a module of the other one gets it, skipped."""
    modules = {item.module for item in request.session.items}
    wrong = {x.__name__ for x in modules if getattr(x, "ARCH", HOPPER) != ACTIVE_ARCH}
    assert not wrong or any(name in arg for name in wrong for arg in request.config.args)


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ('ARCH = "sm_100a"\n', "sm_100a"),
        ("import x\n\nARCH = ACTIVE_ARCH\n", ACTIVE_ARCH),
        ("import x\n", HOPPER),
        ('NO_ARCH = "sm_100a"\n', HOPPER),
    ],
)
def test_architecture_of_a_text(text: str, arch: str) -> None:
    assert arch_of(text) == arch
