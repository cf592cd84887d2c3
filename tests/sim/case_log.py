"""A line about each run that was right, where FLASH_MASK_SIM_LOG names a file."""

from __future__ import annotations

import os
from typing import Any

from cases import Case

LOG = "FLASH_MASK_SIM_LOG"


def note(case: Case, seed: int | None, share: float, **more: Any) -> None:
    """share: the largest error, as a share of what is allowed. more: keywords of the call."""
    path = os.environ.get(LOG)
    if not path:
        return
    dims = f"{case.head_dim}/{case.head_dim_v}"
    dtype = str(case.dtype).removeprefix("torch.")
    order = "in order" if seed is None else f"delays {seed}"
    told = " ".join(f"{name}={x}" for name, x in more.items() if isinstance(x, bool | dict))
    with open(path, "a") as log:
        log.write("\t".join((case.id, dims, dtype, order, f"{share:.2f}", told)).rstrip() + "\n")
