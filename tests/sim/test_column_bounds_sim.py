"""The kernel that bounds the interval edges of key blocks, on the software GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.mask_prep.column_bounds import compile_column_bounds
from flash_mask_cute.runtime.cache import CompileCache, compile_count

# None: warps take turns; a seed: shuffled.
DELAY_SEEDS = (None, 1)
POISON = 7777


def draw_indices(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def run(
    simulator: ModuleType, indices: Tensor, bounds: Tensor, tile_n: int, cu_seqlens: Tensor | None
) -> None:
    compiled = compile_column_bounds(indices.shape[3], cu_seqlens is not None, "sm_90a")
    for seed in DELAY_SEEDS:
        bounds.fill_(POISON)
        with quiet_run(simulator, seed, launches=1):
            compiled.function(indices, bounds, tile_n, cu_seqlens)


def expected_block(keys: Tensor) -> Tensor:
    """(batch, heads, 2 * n) of keys (batch, heads, num_keys, n)."""
    return torch.stack((keys.amin(2), keys.amax(2)), dim=-1).flatten(2)


@pytest.mark.parametrize("tile_n", [16, 80, 112, 128, 300])
@pytest.mark.parametrize("num_vectors", [1, 2, 4])
def test_dense(simulator: ModuleType, num_vectors: int, tile_n: int) -> None:
    for batch, heads, seqlen_k in ((1, 1, 1), (2, 3, 257)):
        indices = draw_indices(batch, heads, seqlen_k, num_vectors)
        num_blocks = -(-seqlen_k // tile_n)
        bounds = torch.empty((batch, heads, 2 * num_vectors, num_blocks), dtype=torch.int32)
        run(simulator, indices, bounds, tile_n, None)
        for block in range(num_blocks):
            keys = indices[:, :, block * tile_n : (block + 1) * tile_n]
            assert torch.equal(bounds[..., block], expected_block(keys))


def test_strides(simulator: ModuleType) -> None:
    """Vectors one after the other, every second element, a broadcast batch."""
    plain = draw_indices(2, 3, 150, 2)
    by_vector = plain.transpose(2, 3).contiguous().transpose(2, 3)
    every_second = torch.stack((torch.zeros_like(plain), plain), dim=-1)[..., 1]
    broadcast = plain[:1, :1].expand(2, 3, 150, 2)
    for indices in (by_vector, every_second, broadcast):
        bounds = torch.empty((2, 3, 4, 3), dtype=torch.int32)
        run(simulator, indices, bounds, 64, None)
        for block in range(3):
            keys = indices[:, :, block * 64 : (block + 1) * 64]
            assert torch.equal(bounds[..., block], expected_block(keys))


LENGTHS = ((5,), (0, 0, 3), (64, 0, 80, 112, 1), (1, 127, 0, 129, 0), (1,) * 40)


@pytest.mark.parametrize("tile_n", [64, 80, 112])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-sequences")
def test_packed(simulator: ModuleType, lengths: tuple[int, ...], tile_n: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    for unused_keys, num_vectors in ((0, 2), (100, 1), (3, 4)):
        total = sum(lengths) + unused_keys
        indices = draw_indices(1, 2, total, num_vectors)
        num_blocks = total // tile_n + len(lengths)
        bounds = torch.empty((1, 2, 2 * num_vectors, num_blocks), dtype=torch.int32)
        run(simulator, indices, bounds, tile_n, cu_seqlens)
        for b, length in enumerate(lengths):
            start = int(cu_seqlens[b])
            for i in range(-(-length // tile_n)):
                block = start // tile_n + b + i
                keys = indices[:, :, start + i * tile_n : start + min((i + 1) * tile_n, length)]
                assert torch.equal(bounds[..., block], expected_block(keys)), (b, i)


def test_a_kernel_that_another_worker_compiled(simulator: ModuleType, tmp_path: Path) -> None:
    """Comes from the disk with its PTX, and runs."""
    compile_column_bounds(1, False, "sm_90a", cache=CompileCache(tmp_path))
    count = compile_count()
    loaded = compile_column_bounds(1, False, "sm_90a", cache=CompileCache(tmp_path))
    assert compile_count() == count
    indices = draw_indices(1, 1, 100, 1)
    bounds = torch.empty((1, 1, 2, 1), dtype=torch.int32)
    with quiet_run(simulator, None, launches=1):
        loaded.function(indices, bounds, 128, None)
    assert torch.equal(bounds[..., 0], expected_block(indices))
