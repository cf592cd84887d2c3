"""One attention call of either direction, from its arguments to its launch."""
