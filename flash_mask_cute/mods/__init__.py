"""Callables of the user: how they are called, read, differentiated and run on the CPU."""
