"""Processes of a group (gloo, or NCCL with a GPU each) that run a function."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_in_processes(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60,
    backend: str = "gloo",
) -> list[Any]:
    """What a module's `function(rank, *arguments)` returned in each process. timeout: seconds."""
    with tempfile.TemporaryDirectory() as folder:
        told = function, arguments, world, folder, timeout, backend
        # one process imports, and the others are its copies
        mp.get_context("forkserver").set_forkserver_preload(["torch.distributed", "cutlass"])
        mp.start_processes(_work, told, nprocs=world, start_method="forkserver")
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)
        ]


def _work(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world: int,
    folder: str,
    timeout: float,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    result = function(rank, *arguments)
    torch.save(result, Path(folder) / f"{rank}.pt")
    # a process that ends takes its connections with it
    dist.barrier()
    dist.destroy_process_group()
