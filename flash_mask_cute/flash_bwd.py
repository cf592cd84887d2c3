"""Backward kernels, for use with `cute.compile` directly."""

from flash_mask_cute.sm90.flash_bwd import FlashAttentionBackwardSm90

__all__ = ["FlashAttentionBackwardSm90"]
