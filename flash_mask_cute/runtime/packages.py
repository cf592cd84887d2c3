"""Advice on what to install if a lazily imported package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""By the module that they install."""


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
