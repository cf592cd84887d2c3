"""Small kernels that run before or after the attention kernels."""
