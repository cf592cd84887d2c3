"""The processes of the examples of several devices."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from dense_check import has_hopper, pick_device

ON_CPU = 2  # processes, where there is no GPU and no torchrun
STORE = "EXAMPLE_STORE"


def launch(script: str, main: Callable[[], None]) -> None:
    """Run main here for torchrun and on a GPU, else the script in two processes on the CPU.

    Raises:
        SystemExit: a process failed.
    """
    if "RANK" in os.environ or has_hopper():
        main()
        return
    with tempfile.TemporaryDirectory() as folder:
        group = {"WORLD_SIZE": str(ON_CPU), STORE: f"file://{folder}/store"}
        children = [
            subprocess.Popen([sys.executable, script], env=os.environ | group | {"RANK": str(rank)})
            for rank in range(ON_CPU)
        ]
        codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit(f"{script}: the exit codes of its processes are {codes}")


def start() -> torch.device:
    """The group of torchrun or of `launch`, or of this process alone."""
    device = pick_device()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        method = os.environ.get(STORE, "env://")
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    else:
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    return device
