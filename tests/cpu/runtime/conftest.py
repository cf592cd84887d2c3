from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cached_adders import KERNEL, Builder

_numbers = itertools.count()


@pytest.fixture
def import_source(tmp_path: Path) -> Any:
    """Import source text as a module of the user's own, by default under a new name each time."""
    made: list[str] = []

    def load(source: str, name: str | None = None) -> ModuleType:
        name = name or f"own_module_{next(_numbers)}"
        path = tmp_path / f"{next(_numbers)}" / f"{name}.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("kernels") / "cached_kernels.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def adders(kernels: Any) -> Callable[[int], Any]:
    """`adders(addend)` compiles a host function, once per addend, which only the cache can load."""
    return functools.cache(kernels.compile_adder)


@pytest.fixture
def builder(adders: Callable[[int], Any]) -> Builder:
    return Builder(adders)


@pytest.fixture
def no_surprising_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
