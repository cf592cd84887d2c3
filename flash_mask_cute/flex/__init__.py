"""FlexAttention code as it is: mods written in torch, compiled into kernels of this package."""

from flash_mask_cute.flex.lower import LoweredMod, lower_mod, mod_source

__all__ = ["LoweredMod", "lower_mod", "mod_source"]
