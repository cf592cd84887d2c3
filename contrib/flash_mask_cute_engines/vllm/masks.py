"""Masks of vLLM that are neither causal nor a window; they have never met a running engine.

Positions are those of the sequence: calls have q_start="end". Numbers that a closure holds are
compiled in, so each makes a kernel; what changes from step to step is in tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

MaskMod: TypeAlias = Callable[..., Any]


@cache
def mm_prefix_mod(window: int | None, clamps: bool) -> MaskMod:
    """A token sees tokens before it, of the last `window` if there is one, and all of its image.

    clamps: of its image only those after the beginning of the window. aux tensors: the first and
    last position of the image of each token of the batch, int32 (tokens, 2), -1 for none;
    cu_seqlens_q; the number of keys of each sequence.
    """

    def sees(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        images, starts, lengths = aux
        sequence = b[0]
        # of this call, where the sequence has its last tokens
        first = lengths[sequence] - (starts[sequence + 1] - starts[sequence])
        token = starts[sequence] + q[0] - first
        image = (k >= images[token, 0]) & (k <= images[token, 1])
        before = k <= q
        if window is not None:
            is_near = q - k < window
            before = before & is_near
            if clamps:
                image = image & is_near
        return before | image

    return sees


@cache
def reference_window_mod(window: int) -> MaskMod:
    """Beside causal masking, a token sees the last `window` ones and the first ones of its
    sequence, of which aux_tensors[0], int32 (sequences,), tells the number."""

    def sees(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return (k < aux[0][b[0]]) | (q - k < window)

    return sees
