"""Small kernels that prepare masks, beside the attention kernels."""
