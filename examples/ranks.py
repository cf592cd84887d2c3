"""The processes of the examples of several devices."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from dense_check import pick_device


def start() -> torch.device:
    """The group of torchrun, or of this process alone."""
    device = pick_device()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    return device
