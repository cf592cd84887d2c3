"""Exact attention with masks as first-class citizens, in CuTe DSL, for NVIDIA GPUs.

Importing this package imports neither torch nor the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_mask_cute.host.cache import compile_count

if TYPE_CHECKING:
    from flash_mask_cute.interface import explain

__all__ = ["compile_count", "explain"]


def __getattr__(name: str) -> Any:
    if name != "explain":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flash_mask_cute.interface import explain

    return explain
