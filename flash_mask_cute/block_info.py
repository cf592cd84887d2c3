"""The public path of `BlockInfo`."""

from flash_mask_cute.rules.block_info import BlockInfo

__all__ = ["BlockInfo"]
