"""User callables: calling, reading, differentiating and running them on the CPU."""
