"""A plugin for SGLang that has never met a running engine: it adds our attention backend.

SGLang finds `register` by the entry point group `sglang.srt.plugins`, and calls it in each of its
processes before it reads its arguments. Then `--attention-backend mask_cute` chooses ours
(contrib/README.md).
"""

from __future__ import annotations

from typing import Any

NAME = "mask_cute"


def register() -> None:
    """Add the backend `mask_cute`. It may be called any number of times.

    The backend itself is imported when SGLang makes it.

    Raises:
        ImportError: SGLang is not installed, or has no registry of attention backends.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    register_attention_backend(NAME)(create_backend)


def create_backend(runner: Any) -> Any:
    """The backend of a model runner of SGLang.

    Raises:
        NotImplementedError: what the runner needs is not there; the message names it.
    """
    from flash_mask_cute_engines.sglang.backend import MaskCuteBackend

    return MaskCuteBackend(runner)
