"""Compile and launch the kernels that split the documents of a mask of column intervals."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_mask_cute.host import stand_ins
from flash_mask_cute.masks.documents import BOUNDS_TILE, SLOT, Split
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.compiler import CACHE, compile_object, options_for
from flash_mask_cute.runtime.target import Target

KERNEL_NAME = "document_split"


def launch_split(indices: Tensor, causal: bool, split: Split) -> None:
    """Fill a split of indices on the current stream: four launches.

    Raises:
        NotImplementedError: there is no kernel for the device.
    """
    compiled = compile_split(indices.shape[3], causal, Target.of(indices.device).arch)
    if indices.get_device() == torch.cuda.current_device():
        compiled.function(indices, *split)
    else:
        with torch.cuda.device(indices.device):
            compiled.function(indices, *split)


def compile_split(
    num_vectors: int, causal: bool, arch: str, cache: CompileCache = CACHE
) -> Compiled:
    """The compiled kernels, from the cache or built now; extents and strides are run-time values.

    `function` takes, by position: indices, and the tensors of a `Split`.
    """
    return cache.get(
        KERNEL_NAME,
        lambda: {"num_vectors": num_vectors, "causal": causal},
        lambda: _build(num_vectors, causal, arch),
        arch=arch,
        options=options_for(arch),
        token=(num_vectors, causal),
    )


def _build(num_vectors: int, causal: bool, arch: str) -> Compiled:
    from flash_mask_cute.kernels.document_split import DocumentSplit

    kernels = DocumentSplit(num_vectors, causal, SLOT, BOUNDS_TILE)
    tensors = [stand_ins.strided(rank) for rank in (4, 4, 2, 1, 4, 4)]
    return compile_object(kernels, [*tensors, stand_ins.stream()], options_for(arch))
