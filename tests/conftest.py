from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # There are as many workers as cores. Threads that wait for each other in small operations of
    # torch took half of the processor time; the libraries read this when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import drawn_share
import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes or tens of gigabytes")
    config.addinivalue_line("markers", "shares(n): `make test` runs one case of n")
    config.addinivalue_line("markers", "daily(n): `make test` runs n cases, all in turn")


def pytest_report_header() -> str | None:
    seed = drawn_share.seed()
    if seed is None:
        return None
    return (
        f"{drawn_share.SEED}={seed} draws one share of {drawn_share.ON_SIMULATOR.shares} on the "
        f"software GPU, and of tests with the mark `shares`; {drawn_share.SEED}=all runs all"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn, unless a test is named."""
    seed = drawn_share.seed()
    if seed is None or any("::" in arg for arg in config.args):
        return
    left_out = drawn_share.left_out(items, seed)
    config.hook.pytest_deselected(items=left_out)
    dropped = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in dropped]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cases have their ids."""
    name = getattr(val, "id", None)
    return name if isinstance(name, str) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A drawn call that fails is printed as the command that makes it again."""
    report = yield
    drawn = getattr(getattr(item, "module", None), "DRAWN", None)
    if isinstance(drawn, drawn_share.Draws) and report.failed:
        again = f"{drawn} {drawn_share.SEED}=all python -m pytest '{item.nodeid}'"
        report.sections.append(("drawn: run it again", again))
    return report


@pytest.fixture
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that torch hands out uninitialised hold NaN, or the largest integer."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.dtype.is_floating_point:
                return tensor.fill_(float("nan"))
            return (
                tensor
                if tensor.dtype == torch.bool
                else tensor.fill_(torch.iinfo(tensor.dtype).max)
            )

        return allocate_poisoned

    names = {
        torch: ("empty", "empty_like", "empty_strided"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }
    for owner, functions in names.items():
        for name in functions:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def documents_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that a mask_mod tells of are packed sequences in calls of any size."""
    from flash_mask_cute import interface
    from flash_mask_cute.call import plan
    from flash_mask_cute.call.mask_bits import Limits

    monkeypatch.setattr(plan, "LIMITS", Limits(min_tiles_packed=0))
    # a launch of the same metadata may have been prepared before
    for launches in ("_prepared_fwd", "_prepared_bwd"):
        monkeypatch.setattr(interface, launches, {})
