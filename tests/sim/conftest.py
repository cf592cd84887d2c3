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

# Of the tests that take long, by module or function: so many run, drawn by the seed in SAMPLE_SEED
# ("all": every one).
SAMPLED = {
    "test_flash_bwd_sm100_sim": 28,
    "test_flash_fwd_sm100_sim::test_wide_heads_against_oracle": 4,
    "test_slow_roles_sm100_sim::test_forward": 2,
    "test_slow_roles_sm100_sim::test_backward": 1,
    "test_split_sim": 4,
    "test_pages_sim": 3,
    "test_split_sm100_sim": 1,
}
SAMPLE_SEED = "FLASH_MASK_SIM_SEED"
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


def pytest_configure(config: pytest.Config) -> None:
    if not _has_process_to_itself(config):
        return
    if "cutlass" in sys.modules:
        raise pytest.UsageError("cutlass was imported before the software GPU could be activated")
    sys.path.insert(0, str(_simulator_parent()))
    # what is compiled here runs nowhere else
    os.environ["FLASH_MASK_CUTE_CACHE_DIR"] = "off"
    import software_gpu

    software_gpu.activate(ACTIVE_ARCH, sms=SMS)
    _run_what_caches_load(software_gpu)


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
        ids = sorted(item.nodeid for item in items if _is_of(item, name))
        drawn = random.Random(f"{seed} {name}").sample(ids, min(count, len(ids)))
        left_out |= set(ids) - set(drawn)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _is_of(item: pytest.Item, name: str) -> bool:
    module, _, function = name.partition("::")
    return item.path.stem == module and item.name.startswith(function)


def _sample_seed() -> str:
    return os.environ.get(SAMPLE_SEED, "0")


class _Loaded:
    """A function from an object file, and the PTX of its kernels."""

    def __init__(self, function: Callable[..., Any], ptx: str | None) -> None:
        self._function, self.__ptx__ = function, ptx

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def _run_what_caches_load(software_gpu: ModuleType) -> None:
    """The software GPU knows what `cute.compile` returns; a cache exports that and loads it."""
    from flash_mask_cute.runtime import cache

    load = cache._load_unstored

    def load_unstored(built: cache.Compiled) -> cache.Compiled:
        compiled: Any = built.function
        loaded = _Loaded(load(built).function, compiled.__ptx__)
        return built._replace(function=software_gpu.Compiled(loaded))

    cache._load_unstored = load_unstored


@pytest.fixture(scope="module")
def simulator(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> ModuleType:
    """The active `software_gpu` package."""
    arch = getattr(request.module, "ARCH", HOPPER)
    if arch != ACTIVE_ARCH:
        pytest.skip(f"needs a process of its own: FLASH_MASK_SIM_ARCH={arch} pytest tests/sim")
    if not _has_process_to_itself(pytestconfig):
        pytest.skip("needs a process of its own: pytest tests/sim")
    return sys.modules["software_gpu"]
