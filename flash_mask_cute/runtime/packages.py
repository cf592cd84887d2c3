"""Advice on what to install if a package is missing or too old."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""By the module that they install."""


class Releases(NamedTuple):
    """first, last: the oldest and the newest release that the tests ran with."""

    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.first} or later, tested up to {self.last}"


EXTRAS = {"transformers": Releases("5.17", "5.24")}
"""Libraries that have a module in `integrations`. pyproject.toml has an extra for each."""


def require_extra(package: str) -> None:
    """Check that a library of `EXTRAS` is installed, in a release that is not too old. Raises
    ImportError: with the `pip install` command."""
    found = release_of_extra(package)
    if found is None or _numbers(found) < _numbers(EXTRAS[package].first):
        raise ImportError(
            f"flash_mask_cute.integrations.{package} needs {package} {EXTRAS[package]}, found "
            f"{found or 'none'}: pip install -U '{package}>={EXTRAS[package].first}'",
            name=package,
        )


def release_of_extra(package: str) -> str | None:
    """The installed release of a package, None if there is none. It is not imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(release: str) -> tuple[int, ...]:
    """The numbers that a release begins with: 5, 25 and 0 of 5.25.0.dev0."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, found[0].split("."))) if found else ()


@contextmanager
def tells_what_to_install() -> Iterator[None]:
    """Context, or decorator of a function, that turns the ModuleNotFoundError of a missing compiler
    into an ImportError with the `pip install` command. Other errors pass."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = DISTRIBUTIONS.get(error.name or "")
        if missing is None:
            raise
        raise ImportError(
            f"flash_mask_cute needs the package {missing}, on the CPU, too: pip install {missing}",
            name=error.name,
        ) from error
