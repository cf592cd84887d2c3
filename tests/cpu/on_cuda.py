"""CPU tensors that say they are on a GPU, for the checks that only CUDA tensors get."""

from __future__ import annotations

from typing import Any

import torch

from flash_mask_cute.runtime import plain_tensors


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for the checks that only CUDA tensors get."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def tolist(self) -> Any:
        raise AssertionError("a CUDA tensor must not be read")

    def item(self) -> Any:
        raise AssertionError("a CUDA tensor must not be read")


# it stands for a plain one
plain_tensors.PLAIN_TYPES += (OnCuda,)
