"""python -m bench.torch_sdpa: a training step of torch's scaled_dot_product_attention, by kernels.

    python -m bench.torch_sdpa                       # all shapes
    python -m bench.torch_sdpa b2-n8192-h64/8-d128   # some of them

The same line of code, F.scaled_dot_product_attention(..., is_causal=True, enable_gqa=True), and its
gradients, run on what torch chooses, on its flash attention, on cuDNN, and on this package, by
`register()` and by `sdpa()`. Results of all are compared first. They take turns burst by burst.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import Json, commit_here, say, timing, versions, why_no_gpu
from flash_mask_cute.integrations.torch import kernels_run, register, sdpa

COMMAND = "bench.torch_sdpa"
ROUNDS, BURST_S = 7, 0.2
# Of the largest number of a result: bf16 rounds to 2^-9, and gradients are sums of rounded numbers.
ALLOWED = 2e-2
OURS = ("register", "sdpa")
REFERENCE = "flash"


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.heads_kv}"
        return f"b{self.batch}-n{self.seqlen}-h{heads}-d{self.head_dim}"

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the output, as projections lay them out."""
        torch.manual_seed(0)
        heads = self.heads, self.heads_kv, self.heads_kv, self.heads
        made = (
            torch.randn(self.batch, self.seqlen, n, self.head_dim, device=device, dtype=dtype)
            for n in heads
        )
        return tuple(x.transpose(1, 2) for x in made)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(2, 8192, 64, 8, 128), Shape(8, 2048, 32, 8, 128), Shape(1, 32768, 32, 8, 128),
        Shape(4, 4096, 16, 16, 64), Shape(16, 1024, 16, 16, 64),
    )
}  # fmt: skip
Step = Callable[[], tuple[Tensor, ...]]


def step_of(tensors: Sequence[Tensor]) -> Step:
    """A forward and its backward: out, dq, dk and dv."""
    *inputs, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in inputs)

    def step() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    return step


class Switch:
    """Which kernels torch's function runs on. Activation is for the process, so it is changed where
    another contender has its turn, and costs the others nothing."""

    def __init__(self) -> None:
        register()
        self._is_active = False

    def to(self, is_active: bool) -> None:
        if is_active and not self._is_active:
            nn.attention.activate_flash_attention_impl("mask_cute")
        elif self._is_active and not is_active:
            nn.attention.restore_flash_attention_impl()
        self._is_active = is_active


def contenders(step: Step, switch: Switch) -> dict[str, Step]:
    @contextmanager
    def on(backend: SDPBackend | None, is_active: bool) -> Iterator[None]:
        switch.to(is_active)
        if backend is None:
            yield
        else:
            with sdpa_kernel(backend):
                yield

    def run(backend: SDPBackend | None, is_active: bool = False) -> Step:
        def call() -> tuple[Tensor, ...]:
            with on(backend, is_active):
                return step()

        return call

    def in_context() -> tuple[Tensor, ...]:
        switch.to(False)
        with sdpa():
            return step()

    return {
        "default": run(None),
        REFERENCE: run(SDPBackend.FLASH_ATTENTION),
        "cudnn": run(SDPBackend.CUDNN_ATTENTION),
        "register": run(SDPBackend.FLASH_ATTENTION, is_active=True),
        "sdpa": in_context,
    }


def why_wrong(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        exact = y.detach().float()
        error = float((x.detach().float() - exact).abs().max() / exact.abs().max())
        if not error <= ALLOWED:
            return f"{name} differs from that of {REFERENCE} by {error:.1e} of its largest number"
    return None


def usable(calls: dict[str, Step]) -> Iterator[tuple[str, Step]]:
    """The contenders that run, and give the results of the reference."""
    expected = calls[REFERENCE]()
    for name, call in calls.items():
        try:
            with kernels_run() as ran:
                results = call()
        except RuntimeError as error:
            say(f"  {name} left out: {error}")
            continue
        why = why_wrong(results, expected)
        if name in OURS and {x.kernel for x in ran} != {"flash_mask_cute"}:
            why = f"it ran on {ran}"
        if why is None:
            yield name, call
        else:
            say(f"  {name} left out: {why}")


def measure(shape: Shape) -> list[Json]:
    switch = Switch()
    calls = dict(usable(contenders(step_of(shape.tensors("cuda", torch.bfloat16)), switch)))
    samples = timing.time_loop(calls, ROUNDS, BURST_S)
    switch.to(False)
    common = {"kind": "torch_sdpa", "shape": shape.name, "device": torch.cuda.get_device_name()}
    common |= {"commit": commit_here(), **versions()}
    return [common | {"impl": x, "ms": statistics.median(ms)} for x, ms in samples.items()]


def line_of(rows: Sequence[Json]) -> str:
    """Milliseconds of each, and how many times as fast `register` is."""
    by_impl = {row["impl"]: row["ms"] for row in rows}
    ours = by_impl.get("register")
    parts = [f"{rows[0]['shape']:24}"]
    for name, ms in by_impl.items():
        told = f" ({ms / ours:.2f})" if ours and name not in OURS else ""
        parts.append(f"{name} {ms:.3f} ms{told}")
    return "  ".join(parts)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__)
    parser.add_argument("shapes", nargs="*", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    given = parser.parse_args(arguments)
    if unknown := [x for x in given.shapes if x not in SHAPES]:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(SHAPES)}")
    if (why := why_no_gpu(COMMAND)) is not None:
        say(why)
        return 2
    for name in given.shapes or SHAPES:
        rows = measure(SHAPES[name])
        say(line_of(rows))
        if given.out is not None:
            with given.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
