"""Exact attention with masks as first-class citizens, in CuTe DSL, for NVIDIA GPUs.

Importing this package imports neither torch nor the compiler; each name of `__all__` is imported
when it is first used. If torch was imported before, `ColumnMask` is imported at once, so that
`torch.load` knows it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flash_mask_cute.runtime.cache import compile_count

if TYPE_CHECKING:
    from flash_mask_cute import parallel
    from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
    from flash_mask_cute.call.settings import BwdConfig, FwdConfig
    from flash_mask_cute.compute_block_sparsity import create_block_mask
    from flash_mask_cute.flex import (
        flex_attention,
        keep_block_mask,
        mod_source,
        patch_flex_attention,
    )
    from flash_mask_cute.functional import (
        flash_attn_func,
        flash_attn_varlen_func,
        flashmask_attention,
    )
    from flash_mask_cute.interface import explain
    from flash_mask_cute.masks import builders
    from flash_mask_cute.masks.column_mask import ColumnMask
    from flash_mask_cute.masks.selected_blocks import SelectedBlocks
    from flash_mask_cute.plotting import plot
    from flash_mask_cute.serving import flash_attn_combine, flash_attn_with_kvcache
    from flash_mask_cute.statistics import attention_statistics, attention_statistics_varlen

__version__ = "0.1.0"

__all__ = [
    "BlockSparseTensorsTorch",
    "BwdConfig",
    "ColumnMask",
    "FwdConfig",
    "SelectedBlocks",
    "__version__",
    "attention_statistics",
    "attention_statistics_varlen",
    "builders",
    "compile_count",
    "create_block_mask",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flashmask_attention",
    "flex_attention",
    "keep_block_mask",
    "mod_source",
    "parallel",
    "patch_flex_attention",
    "plot",
]

_MODULES = {
    "builders": "flash_mask_cute.masks.builders",
    "parallel": "flash_mask_cute.parallel",
}
_NAMES = {
    "block_sparsity": ("BlockSparseTensorsTorch",),
    "call.settings": ("BwdConfig", "FwdConfig"),
    "compute_block_sparsity": ("create_block_mask",),
    "flex": ("flex_attention", "keep_block_mask", "mod_source", "patch_flex_attention"),
    "functional": ("flash_attn_func", "flash_attn_varlen_func", "flashmask_attention"),
    "interface": ("explain",),
    "masks.column_mask": ("ColumnMask",),
    "masks.selected_blocks": ("SelectedBlocks",),
    "plotting": ("plot",),
    "serving": ("flash_attn_combine", "flash_attn_with_kvcache"),
    "statistics": ("attention_statistics", "attention_statistics_varlen"),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


if sys.modules.get("torch") is not None:
    # `torch.load` takes files with masks from here on
    import_module(_HOME["ColumnMask"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
