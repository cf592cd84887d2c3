"""Visibility rules: arithmetic on ints and tensors, and the masks of a call on the device."""
