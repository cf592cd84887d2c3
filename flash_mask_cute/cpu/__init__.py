"""Attention on CPU tensors: the tiles that a kernel walks, one by one, in float64."""
