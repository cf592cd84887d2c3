"""Support for unchanged FlexAttention code: torch mods, compiled into kernels of this package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_mask_cute.flex.attention import flex_attention
    from flash_mask_cute.flex.block_mask import keep_block_mask
    from flash_mask_cute.flex.lower import LoweredMod, lower_mod, mod_source
    from flash_mask_cute.flex.patch import patch_flex_attention

__all__ = [
    "LoweredMod",
    "flex_attention",
    "keep_block_mask",
    "lower_mod",
    "mod_source",
    "patch_flex_attention",
]

# The first and the last stand above other functions that take mods, which import what lowers them.
_HOME = {
    "flex_attention": "attention",
    "keep_block_mask": "block_mask",
    "LoweredMod": "lower",
    "lower_mod": "lower",
    "mod_source": "lower",
    "patch_flex_attention": "patch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
