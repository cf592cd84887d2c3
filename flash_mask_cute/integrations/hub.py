"""A folder in the form of a kernel of the Hugging Face Hub, which re-exports our functions.

Continuous batching of transformers takes attention in that form only (docs/integrations_more.md).
"""

from __future__ import annotations

import json
from pathlib import Path

_NAME = "flash-mask-cute"
# a folder each: of any version of torch, Python and C++
_BACKENDS = ("cpu", "cuda")
_MODULE = '''\
"""Attention of flash_mask_cute, in the form of a hub kernel; the package must be installed."""

from flash_mask_cute import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
'''


def write_hub_kernel(directory: str | Path) -> Path:
    """Write the folder, and create it if it is missing. Returns its absolute path.

    Raises:
        FileExistsError: it is there and not empty.
        NotADirectoryError: it is a file, or in one.
    """
    folder = Path(directory).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"DIR must be a new or an empty folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(
            f"DIR must be a new or an empty folder, got {folder}, which has files"
        )
    for backend in _BACKENDS:
        build = folder / "build" / f"torch-{backend}"
        build.mkdir(parents=True)
        described = {
            "name": _NAME,
            "id": f"_{_NAME.replace('-', '_')}_{backend}",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (build / "metadata.json").write_text(json.dumps(described, indent=2) + "\n")
        (build / "__init__.py").write_text(_MODULE)
    text = f"# {_NAME}\n\nRe-exports functions of flash_mask_cute, which must be installed.\n"
    (folder / "README.md").write_text(text)
    return folder
