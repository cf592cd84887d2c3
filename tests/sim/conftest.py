"""The software GPU replaces CUDA in the whole process, from before the first `import cutlass`.

So its tests have a process of their own, `pytest tests/sim`; in any other run they are skipped. It
is of one architecture, that of FLASH_MASK_SIM_ARCH (sm_90a if unset); test modules of the other,
as `ARCH` in them says, are not collected, unless the command names them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flash_mask_cute.runtime import cache
from lab.simulated import run_what_caches_load

HERE = Path(__file__).resolve().parent
HOPPER = "sm_90a"
ACTIVE_ARCH = os.environ.get("FLASH_MASK_SIM_ARCH", HOPPER)
SMS = 2  # few, so that small problems give every persistent CTA several work tiles


def _has_process_to_itself(config: pytest.Config) -> bool:
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return all(path.is_relative_to(HERE) for path in paths)


def _simulator_parent() -> Path:
    """Where the package `software_gpu` is: at the top of this checkout, or in FLASH_MASK_SIM."""
    parent = Path(os.environ.get("FLASH_MASK_SIM") or HERE.parents[1])
    if not (parent / "software_gpu" / "__init__.py").is_file():
        raise pytest.UsageError(f"FLASH_MASK_SIM={parent} holds no package `software_gpu`")
    return parent


def arch_of(text: str) -> str:
    """The architecture of a test module, by its text."""
    told = re.search(r'^ARCH = (ACTIVE_ARCH|"(\w+)")', text, re.M)
    if told is None:
        return HOPPER
    return told[2] or ACTIVE_ARCH


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_module = collection_path.match("test_*.py")
    return True if is_module and arch_of(collection_path.read_text()) != ACTIVE_ARCH else None


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _only_distributes(config: pytest.Config) -> bool:
    """Whether all tests run in workers of this process."""
    return config.getoption("dist", "no") != "no" and not _is_worker(config)


def pytest_configure(config: pytest.Config) -> None:
    if not _has_process_to_itself(config):
        return
    if not _is_worker(config):
        # What is compiled here runs nowhere else, and workers share it.
        folder = tempfile.TemporaryDirectory(prefix="flash_mask_cute_sim_")
        os.environ[cache.DIRECTORY_VARIABLE] = folder.name
        config.add_cleanup(folder.cleanup)
    if _only_distributes(config):
        return
    if "cutlass" in sys.modules:
        raise pytest.UsageError("cutlass was imported before the software GPU could be activated")
    sys.path.insert(0, str(_simulator_parent()))
    import software_gpu

    software_gpu.activate(ACTIVE_ARCH, sms=SMS)
    run_what_caches_load(software_gpu)


@pytest.fixture(scope="module")
def simulator(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> ModuleType:
    """The active `software_gpu` package."""
    arch = getattr(request.module, "ARCH", HOPPER)
    if arch != ACTIVE_ARCH:
        pytest.skip(f"needs a process of its own: FLASH_MASK_SIM_ARCH={arch} pytest tests/sim")
    if not _has_process_to_itself(pytestconfig):
        pytest.skip("needs a process of its own: pytest tests/sim")
    return sys.modules["software_gpu"]


@pytest.fixture
def device(simulator: ModuleType) -> Any:
    """Of cases that run on every device."""
    from simulated_device import SimulatedDevice

    return SimulatedDevice("simulated", simulator=simulator)
