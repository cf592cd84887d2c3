"""Where kernels run that are called without the host path: a Hopper GPU, or the software GPU.

Not an example itself. The software GPU executes the PTX of the kernels on the CPU, with tensors
that are in its memory. It takes the place of CUDA in its process, so this module is imported before
cutlass. It is a folder of a checkout (software_gpu/README.md), which a wheel does not have.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from dense_check import has_hopper
from torch import Tensor

ARCH = "sm_90a"
ROOT = Path(__file__).resolve().parents[1]


def _activate() -> None:
    """Put the software GPU in the place of CUDA.

    Raises:
        SystemExit: it is not there, or cannot be built; the message says what to do.
    """
    needs = "this example needs a Hopper GPU, or the software GPU in its place, "
    if not (ROOT / "software_gpu" / "__init__.py").is_file():
        raise SystemExit(
            f"{needs}which is the folder software_gpu of a checkout, beside examples: there is no "
            f"{ROOT / 'software_gpu'}"
        )
    if shutil.which("gcc") is None:
        raise SystemExit(f"{needs}which is built by gcc: there is no gcc on the PATH")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    import software_gpu

    # few SMs, so that a CTA has several tiles of a small problem
    software_gpu.activate(ARCH, sms=2)


IS_SOFTWARE = not has_hopper()
if IS_SOFTWARE:
    _activate()
DEVICE = torch.device("cpu" if IS_SOFTWARE else "cuda")


def print_device() -> None:
    """Say which machine runs the kernels."""
    if IS_SOFTWARE:
        print(f"device: software GPU (no Hopper GPU here), which executes the PTX for {ARCH}")
    else:
        print(f"device: {torch.cuda.get_device_name()}")


def in_kernel_memory(tensor: Tensor) -> Any:
    """A tensor on DEVICE as kernels take it: on the software GPU, as one of its memory."""
    if not IS_SOFTWARE:
        return tensor
    from software_gpu.device_memory import as_cuda

    return as_cuda(tensor)


def current_stream() -> Any:
    """The stream of torch; the software GPU has one only."""
    import cuda.bindings.driver as cuda

    return cuda.CUstream(0 if IS_SOFTWARE else torch.cuda.current_stream().cuda_stream)
