"""Forward kernels, for use with `cute.compile` directly."""

from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90
from flash_mask_cute.sm100.flash_fwd import FlashAttentionForwardSm100

__all__ = ["FlashAttentionForwardSm90", "FlashAttentionForwardSm100"]
