"""A plugin for vLLM that has never met a running engine: it registers our attention backend.

vLLM finds `register` by the entry point group `vllm.general_plugins`, and calls it in each of its
processes. Then `--attention-backend CUSTOM` chooses ours (contrib/README.md).
"""

from __future__ import annotations

_BACKEND = "flash_mask_cute_engines.vllm.backend.MaskCuteBackend"


def register() -> None:
    """Make ours the backend CUSTOM. It may be called any number of times.

    The backend itself is imported when vLLM asks for it.

    Raises:
        ImportError: vLLM is not installed, or has no registry of attention backends.
        RuntimeError: another backend was registered as CUSTOM.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        raise RuntimeError(
            f"the attention backend CUSTOM of vLLM is taken by {custom.get_path()}: name the "
            "plugins that vLLM shall load in VLLM_PLUGINS"
        )
    register_backend(custom, _BACKEND)
