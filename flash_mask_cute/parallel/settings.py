"""What a call of `context_parallel_attention` says beside its tensors, its mask and its plan."""

from __future__ import annotations

from typing import NamedTuple

from flash_mask_cute.parallel.visibility import Window


class Settings(NamedTuple):
    """softmax_scale: None for the default. window: sides, None if open."""

    softmax_scale: float | None
    softcap: float
    deterministic: bool
    causal: bool
    window: Window
