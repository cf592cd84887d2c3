"""Batches with some causal sequences, on the software GPU."""

from __future__ import annotations

from causal_sequences_on_devices import test_random_calls  # noqa: F401

ARCH = "sm_90a"
