"""From a problem to compiled kernels."""
