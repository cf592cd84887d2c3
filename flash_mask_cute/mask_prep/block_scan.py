"""Compile the scan that makes block lists from a `mask_mod`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flash_mask_cute.mods.on_cpu import HOST_OPTIONS, compile_reading
from flash_mask_cute.runtime import fake_tensors
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.compiler import CACHE, compile_object
from flash_mask_cute.runtime.dtypes import CUTLASS_NAMES, dtype_name

HOST = "host"  # in place of an architecture: code for the CPU


@dataclass(frozen=True)
class ScanProblem:
    """Facts that determine the code of a scan, besides the mod.

    arch: such as "sm_90a", or HOST. aux: (name of the torch dtype, rank) of each aux tensor; their
    extents and strides are run-time values. has_full: full blocks get lists of their own.
    samples: corners and centre of a block represent all of it. checked: on the CPU, every read of
    an aux tensor is checked.
    """

    arch: str
    aux: tuple[tuple[str, int], ...] = ()
    has_full: bool = True
    samples: bool = False
    checked: bool = False

    @staticmethod
    def describe_aux(aux_tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[str, int], ...]:
        """The field `aux` for these tensors. Raises ValueError: a tensor has a dtype that mods
        cannot read, or no dimension."""
        for i, tensor in enumerate(aux_tensors):
            if dtype_name(tensor.dtype) not in CUTLASS_NAMES:
                known = ", ".join(CUTLASS_NAMES)
                raise ValueError(f"aux_tensors[{i}] is {tensor.dtype}; mods read {known}")
            if tensor.dim() == 0:
                raise ValueError(f"aux_tensors[{i}] has no dimension; a number takes shape (1,)")
        return tuple((dtype_name(tensor.dtype), tensor.dim()) for tensor in aux_tensors)


def compile_scan(
    mask_mod: Callable[..., Any], problem: ScanProblem, cache: CompileCache = CACHE
) -> Compiled:
    """The compiled scan, from the cache or built now.

    `function` takes, by position: (mask_cnt, mask_idx, full_cnt, full_idx), (block_q, block_k,
    seqlen_q, seqlen_k), the tuple of aux tensors or None; on the CPU also a record or None, as
    `HostFunction`, whose `reads` are in `meta`. Raises TypeError: as `callable_key`;
    NotImplementedError: on the CPU, if `mask_mod` uses a GPU-only instruction."""
    identity = callable_key(mask_mod)
    return cache.get(
        "block_scan",
        lambda: {"problem": asdict(problem), "mask_mod": identity},
        lambda: _build(mask_mod, problem),
        arch=problem.arch,
        options=_options(problem),
        token=(problem, identity),
    )


def _options(problem: ScanProblem) -> str:
    return HOST_OPTIONS if problem.arch == HOST else f"{HOST_OPTIONS} --gpu-arch {problem.arch}"


def _build(mask_mod: Callable[..., Any], problem: ScanProblem) -> Compiled:
    from flash_mask_cute.mask_prep.block_lists_kernel import BlockLists
    from flash_mask_cute.mask_prep.block_scan_kernel import BlockGrid, BlockScan

    tensor = partial(fake_tensors.strided, on_host=problem.arch == HOST)
    lists = BlockLists(tensor(3), tensor(4), None, None)
    if problem.has_full:
        lists = lists._replace(full_cnt=tensor(3), full_idx=tensor(4))
    grid = BlockGrid(*(fake_tensors.int32() for _ in BlockGrid._fields))
    aux = tuple(tensor(rank, name) for name, rank in problem.aux) or None
    scan = BlockScan(mask_mod, problem.has_full, problem.samples)
    if problem.arch == HOST:
        named_mod, record = ("mask_mod", mask_mod), tensor(1, "int64")
        arguments = lists, grid, aux
        made = compile_reading(named_mod, scan.on_host, arguments, record, checked=problem.checked)
        return Compiled(made.function, {"reads": made.reads})
    return compile_object(scan, [lists, grid, aux, fake_tensors.stream()], _options(problem))
