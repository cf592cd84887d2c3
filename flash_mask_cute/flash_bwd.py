"""Backward kernels and those around them, for use with `cute.compile` directly."""

from flash_mask_cute.kernels.bwd_postprocess import BwdPostprocess
from flash_mask_cute.kernels.bwd_preprocess import BwdPreprocess
from flash_mask_cute.sm90.flash_bwd import FlashAttentionBackwardSm90
from flash_mask_cute.sm100.flash_bwd import FlashAttentionBackwardSm100

__all__ = [
    "BwdPostprocess",
    "BwdPreprocess",
    "FlashAttentionBackwardSm90",
    "FlashAttentionBackwardSm100",
]
