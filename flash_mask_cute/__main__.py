"""`python -m flash_mask_cute`: what is installed, which GPUs it can use, and a self-test.

The last line says what works here. The exit code is 0 if calls work on a GPU, or on the CPU of a
machine without one. It is 1 if a package is missing, a result is wrong, or no GPU has kernels.

`python -m flash_mask_cute hub DIR` writes the folder of a hub kernel (`integrations/hub.py`)
instead. The exit code is then 0, or 1 with a line on stderr.
`python -m flash_mask_cute bench FILE` times the mods of a file beside torch's flex_attention
(`time_my_mask.py`).
`python -m flash_mask_cute plan` is of `parallel/command.py`. `--help` prints this text. For other
arguments the exit code is 2.
"""

from __future__ import annotations

import platform
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flash_mask_cute import __version__
from flash_mask_cute.runtime.cache import DIRECTORY_VARIABLE, CompileCache
from flash_mask_cute.runtime.packages import DISTRIBUTIONS, EXTRAS, release_of_extra

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DRIVER = Path("/proc/driver/nvidia/version")
# What pip calls each module that a call needs.
NEEDED = {"torch": "torch", **DISTRIBUTIONS}
# The README says what ran where.
_WITH_KERNELS = "9.0 (H100, H200, GH200), and 10.0 and 10.3 (B200, B300: never run on one)"
_NO_KERNELS = "calls on CUDA tensors raise NotImplementedError; CPU tensors work"


class Check(NamedTuple):
    """error, limit: relative to the largest number of the reference."""

    name: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit  # False for NaN


USAGE = "usage: python -m flash_mask_cute [bench FILE OPTIONS | hub DIR | plan OPTIONS]"


def main(arguments: Sequence[str] = ()) -> int:
    """The exit code of one of the commands."""
    match arguments:
        case []:
            return tell()
        case ["--help" | "-h"]:
            sys.stdout.write(__doc__ or USAGE)
            return 0
        case ["hub", directory]:
            return write_hub(directory)
        case ["bench", *options]:
            from flash_mask_cute import time_my_mask

            return time_my_mask.main(options)
        case ["plan", *options]:
            from flash_mask_cute.parallel import command

            return command.main(options)
    sys.stderr.write(f"{USAGE}; got {' '.join(arguments)}\n")
    return 2


def write_hub(directory: str) -> int:
    """Write the folder of a hub kernel, and say how it is used."""
    from flash_mask_cute.integrations.hub import write_hub_kernel

    try:
        folder = write_hub_kernel(directory)
    except OSError as error:
        sys.stderr.write(f"python -m flash_mask_cute hub: {error}\n")
        return 1
    sys.stdout.write(
        f"LOCAL_KERNELS=local/flash-mask-cute={folder}\n"
        'attn_implementation="local/flash-mask-cute"\n'
    )
    return 0


def tell() -> int:
    """The doctor."""
    _say("flash_mask_cute", __version__)
    _say("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    for package in NEEDED.values():
        # of a module on the path that no installer put there, nothing knows the version
        found = release_of_extra(package) or "of unknown version"
        _say(package, f"missing: pip install {package}" if package in missing else found)
    if "torch" in missing:
        return _conclude("nothing before torch is installed", 1)
    device, works = _usable_device()
    for package, releases in EXTRAS.items():
        found = release_of_extra(package) or "not installed"
        _say(package, f"{found} (integrations.{package} takes {releases})")
    _tell_cache()
    if missing:
        _say("self-test", f"not run: {', '.join(missing)} is missing")
        return _conclude(f"nothing before {', '.join(missing)} is installed", 1)
    if _tell_self_test(device) != 0:
        return _conclude("results are wrong here, or calls fail: see the self-test above", 1)
    return _conclude(works, 1 if works == _NO_KERNELS else 0)


def _conclude(text: str, code: int) -> int:
    _say("what works here", text)
    return code


def _say(name: str, text: str) -> None:
    sys.stdout.write(f"{name + ':':<20}{text}\n")
    sys.stdout.flush()


def _usable_device() -> tuple[torch.device, str]:
    """Print what torch was built for and what it sees. Returns the first GPU with kernels, or the
    CPU, and what works here."""
    with warnings.catch_warnings():
        # nothing here needs numpy
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch

    from flash_mask_cute.runtime.target import ARCHS, Target

    cuda = torch.version.cuda
    _say("torch's CUDA", cuda or "none, this is a build for the CPU")
    _say("driver", _driver())
    usable = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        if (major, minor) in ARCHS:
            _say(str(device), f"{name}: kernels for {Target.from_device(device).arch}")
            usable.append(device)
        else:
            _say(str(device), f"{name}: no kernels, which exist for {_WITH_KERNELS}")
    if usable:
        return usable[0], f"calls on tensors of {', '.join(map(str, usable))}, and on CPU tensors"
    if torch.cuda.device_count() == 0:
        _say("GPU", f"torch sees none; kernels exist for {_WITH_KERNELS}")
        return torch.device("cpu"), "calls on CPU tensors"
    return torch.device("cpu"), _NO_KERNELS


def _driver() -> str:
    """The release of NVIDIA's driver, read from the file of its Linux kernel module."""
    try:
        first = DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "no NVIDIA driver is loaded"
    release = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return release[0] if release else first


def _tell_cache() -> None:
    usage = CompileCache().usage()
    if usage.folder is None:
        _say("compile cache", f"not on disk ({DIRECTORY_VARIABLE})")
        return
    size = f"{usage.kernels} kernels, {usage.num_bytes / 2**20:.1f} MiB"
    _say("compile cache", f"{usage.folder}: {size}")


def _tell_self_test(device: torch.device) -> int:
    where = "the CPU path" if device.type == "cpu" else f"the kernels of {device}"
    _say("self-test", f"causal attention with {where}, against torch's SDPA")
    try:
        checks = list(self_test(device))
    except Exception as error:  # whatever is broken here, the lines above belong to the answer
        _say("self-test", f"FAILED: {type(error).__name__}: {error}")
        return 1
    for check in checks:
        verdict = "ok" if check.is_right else "WRONG"
        _say(f"  {check.name}", f"{verdict}, error {check.error:.1e} (at most {check.limit:.0e})")
    is_right = all(check.is_right for check in checks)
    _say("self-test", "passed" if is_right else "FAILED")
    return 0 if is_right else 1


def self_test(device: torch.device) -> Iterator[Check]:
    """A small forward and backward against `torch.nn.functional.scaled_dot_product_attention` in
    float64: bf16 by the kernels of a GPU, float64 by the CPU path."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from flash_mask_cute.functional import flash_attn_func

    # the CPU path computes in float64, but its backward starts from an LSE in float32
    dtype, limit = (torch.float64, 1e-5) if device.type == "cpu" else (torch.bfloat16, 2e-2)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 200, 4, 64)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device="cpu").to(dtype) for _ in range(4)
    )

    def gradients_of(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, inputs, dout)]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in exact)
    out = scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=True).transpose(1, 2)
    references = gradients_of(out, exact, dout.double())
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    q, k, v = inputs
    found = gradients_of(flash_attn_func(q, k, v, causal=True), inputs, dout.to(device))
    for name, result, reference in zip(("out", "dq", "dk", "dv"), found, references, strict=True):
        error = (result.cpu().double() - reference).abs().max() / reference.abs().max()
        yield Check(name, error.item(), limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
