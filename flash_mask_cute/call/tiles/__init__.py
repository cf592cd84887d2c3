"""Tiles of the attention kernels, and what each architecture has."""
