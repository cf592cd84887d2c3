"""Hopper (compute capability 9.0): kernels built on TMA and WGMMA."""
