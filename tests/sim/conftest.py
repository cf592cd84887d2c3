"""The software GPU replaces CUDA in the whole process, from before the first `import cutlass`.

So its tests have a process of their own, `pytest tests/sim`; in any other run they are skipped. It
is of one architecture, that of FLASH_MASK_SIM_ARCH (sm_90a if unset); test modules of the other,
which say so by `ARCH`, are skipped too.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Which tests of a large module run: so many, drawn by the seed in SAMPLE_SEED ("all": every one).
SAMPLED = {"test_flash_bwd_sm100_sim": 28}
SAMPLE_SEED = "FLASH_MASK_SIM_SEED"
HERE = Path(__file__).resolve().parent
HOPPER = "sm_90a"
ACTIVE_ARCH = os.environ.get("FLASH_MASK_SIM_ARCH", HOPPER)
SMS = 2  # few, so that small problems give every persistent CTA several work tiles


def _has_process_to_itself(config: pytest.Config) -> bool:
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return all(path.is_relative_to(HERE) for path in paths)


def _simulator_parent() -> Path | None:
    """Where the package `sim` is: in FLASH_MASK_SIM, else in `shared` beside the project."""
    if named := os.environ.get("FLASH_MASK_SIM"):
        if not (Path(named) / "sim" / "__init__.py").is_file():
            raise pytest.UsageError(f"FLASH_MASK_SIM={named} holds no package `sim`")
        return Path(named)
    beside = HERE.parents[2] / "shared"
    return beside if (beside / "sim" / "README.md").is_file() else None


def pytest_configure(config: pytest.Config) -> None:
    if not _has_process_to_itself(config) or (parent := _simulator_parent()) is None:
        return
    if "cutlass" in sys.modules:
        raise pytest.UsageError("cutlass was imported before the software GPU could be activated")
    sys.path.insert(0, str(parent))
    # what is compiled here runs nowhere else
    os.environ["FLASH_MASK_CUTE_CACHE_DIR"] = "off"
    import sim

    sim.activate(ACTIVE_ARCH, sms=SMS)
    _run_what_caches_load(sim)


def pytest_report_header() -> str:
    drawn = ", ".join(f"{count} tests of {name}" for name, count in SAMPLED.items())
    return f"{SAMPLE_SEED}={_sample_seed()} draws {drawn}; {SAMPLE_SEED}=all runs every one"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn of modules that run as a whole."""
    seed = _sample_seed()
    if seed == "all" or any("::" in arg for arg in config.args):
        return
    left_out: set[str] = set()
    for name, count in SAMPLED.items():
        ids = sorted(item.nodeid for item in items if item.path.stem == name)
        drawn = random.Random(f"{seed} {name}").sample(ids, min(count, len(ids)))
        left_out |= set(ids) - set(drawn)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _sample_seed() -> str:
    return os.environ.get(SAMPLE_SEED, "0")


class _Loaded:
    """A function from an object file, and the PTX of its kernels."""

    def __init__(self, function: Callable[..., Any], ptx: str | None) -> None:
        self._function, self.__ptx__ = function, ptx

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def _run_what_caches_load(sim: ModuleType) -> None:
    """The software GPU knows what `cute.compile` returns; a cache exports that and loads it."""
    from flash_mask_cute.runtime import cache

    load = cache._load_unstored

    def load_unstored(built: cache.Compiled) -> cache.Compiled:
        compiled: Any = built.function
        loaded = _Loaded(load(built).function, compiled.__ptx__)
        return built._replace(function=sim.Compiled(loaded))

    cache._load_unstored = load_unstored


@pytest.fixture(scope="module")
def simulator(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> ModuleType:
    """The active `sim` package."""
    arch = getattr(request.module, "ARCH", HOPPER)
    if arch != ACTIVE_ARCH:
        pytest.skip(f"needs a process of its own: FLASH_MASK_SIM_ARCH={arch} pytest tests/sim")
    if not _has_process_to_itself(pytestconfig):
        pytest.skip("needs a process of its own: pytest tests/sim")
    if _simulator_parent() is None:
        pytest.skip(
            "no software GPU: set FLASH_MASK_SIM to the directory that contains the package `sim`"
        )
    return sys.modules["sim"]
