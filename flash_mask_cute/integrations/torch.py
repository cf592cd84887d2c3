"""Attention that is called by torch's own functions, on the kernels of this package.

`register` gives torch's operators of flash attention to this package: `varlen_attn`, nested
tensors, torch's context-parallel ring, and `F.scaled_dot_product_attention` where torch chooses
flash. `sdpa` takes the last on any device and with masks. docs/integrations.md compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from flash_mask_cute.integrations.aten_flash import Activated, unknown_operator
from flash_mask_cute.integrations.ran import Ran, kernels_run
from flash_mask_cute.integrations.sdpa_mode import sdpa
from flash_mask_cute.runtime.checks import brief

__all__ = ["Ran", "kernels_run", "register", "sdpa"]

_TRIED = "torch 2.11 to 2.15"
_registered: set[str] = set()


def register(name: str = "mask_cute") -> None:
    """Make this package an implementation of flash attention that torch can activate.

    Nothing changes before `torch.nn.attention.activate_flash_attention_impl(name)`, and
    `restore_flash_attention_impl()` ends it. In between, calls with CUDA tensors that reach torch's
    operators of flash attention are computed here, forward and backward. What this package does
    not take (dropout, ALiBi, other GPUs, head dimensions above 256) goes to the kernel that torch
    had there, and a warning gives the reason once.

    name: any name that torch has no other implementation of.

    Raises:
        TypeError: name is no str.
        ValueError: another library registered this name.
        RuntimeError: this version of torch has no such registry, or other operators. `sdpa` works
            there.

    Example:
        >>> from torch.nn.attention import activate_flash_attention_impl  # torch 2.11
        >>> from flash_mask_cute.integrations.torch import register
        >>> register()
        >>> activate_flash_attention_impl("mask_cute")  # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {brief(name)}")
    registry: Any = import_module("torch.nn.attention")
    why: str | None = "it has no register_flash_attention_impl"
    if hasattr(registry, "register_flash_attention_impl"):
        why = unknown_operator()
    if why is not None:
        raise RuntimeError(
            f"torch {torch.__version__} is not supported by register(): {why}. {_TRIED} are; in "
            "every version, use `with flash_mask_cute.integrations.torch.sdpa():`"
        )
    if name in registry.list_flash_attention_impls() and name not in _registered:
        raise ValueError(f"name={name!r} is registered by another library: choose another name")
    registry.register_flash_attention_impl(name, register_fn=lambda: Activated("CUDA"))
    _registered.add(name)
