"""Support for unchanged FlexAttention code: torch mods, compiled into kernels of this package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_mask_cute.flex.attention import flex_attention
    from flash_mask_cute.flex.block_mask import keep_block_mask
    from flash_mask_cute.flex.patch import patch_flex_attention
    from flash_mask_cute.lowering.lower import LoweredMod, lower_mod, mod_source

__all__ = [
    "LoweredMod",
    "flex_attention",
    "keep_block_mask",
    "lower_mod",
    "mod_source",
    "patch_flex_attention",
]

_HOME = {
    "flex_attention": "flash_mask_cute.flex.attention",
    "keep_block_mask": "flash_mask_cute.flex.block_mask",
    "LoweredMod": "flash_mask_cute.lowering.lower",
    "lower_mod": "flash_mask_cute.lowering.lower",
    "mod_source": "flash_mask_cute.lowering.lower",
    "patch_flex_attention": "flash_mask_cute.flex.patch",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
