"""python -m bench.torch_sdpa: a training step of torch's scaled_dot_product_attention, by kernels.

    python -m bench.torch_sdpa                       # all shapes
    python -m bench.torch_sdpa b2-n8192-h64/8-d128   # some of them

The same line of code, F.scaled_dot_product_attention(..., is_causal=True, enable_gqa=True), and its
gradients, run on what torch chooses, on its flash attention, on cuDNN, and on this package, by
`register()` and by `sdpa()`. Results of all are compared first. They take turns burst by burst.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import Json, commit_here, runner, say, timing, versions
from bench.runner import Run, Table
from flash_mask_cute.integrations.torch import kernels_run, register, sdpa

# Of the largest number of a result: bf16 rounds to 2^-9, and gradients are sums of rounded numbers.
ALLOWED = 2e-2
OURS, REFERENCE = ("register", "sdpa"), "flash"
Step = Callable[[], tuple[Tensor, ...]]


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

    def step(self, device: str, dtype: torch.dtype) -> Step:
        """A forward and its backward: out, dq, dk and dv. Tensors are laid out by projections."""
        heads = self.heads, self.heads_kv, self.heads_kv, self.heads
        shapes = [(self.batch, self.seqlen, n, self.head_dim) for n in heads]
        *inputs, dout = (x.transpose(1, 2) for x in runner.normal(device, dtype, *shapes))
        leaves = [x.detach().requires_grad_() for x in inputs]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return runner.calls_of(attend, leaves, leaves, dout)[2]


SHAPES = (
    Shape(2, 8192, 64, 8, 128), Shape(8, 2048, 32, 8, 128), Shape(1, 32768, 32, 8, 128),
    Shape(4, 4096, 16, 16, 64), Shape(16, 1024, 16, 16, 64),
)  # fmt: skip


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
    def run(around: Callable[[], AbstractContextManager[object]], is_active: bool = False) -> Step:
        def call() -> tuple[Tensor, ...]:
            switch.to(is_active)
            with around():
                return step()

        return call

    return {
        "default": run(nullcontext),
        REFERENCE: run(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        "cudnn": run(lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "register": run(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), is_active=True),
        "sdpa": run(sdpa),
    }


def usable(calls: dict[str, Step]) -> dict[str, Step]:
    """The contenders that run, and give the results of the reference."""
    expected = [x.detach().float() for x in calls[REFERENCE]()]

    def check(name: str) -> float:
        with kernels_run() as ran:
            found = [x.detach().float() for x in calls[name]()]
        if name in OURS and {x.kernel for x in ran} != {"flash_mask_cute"}:
            raise RuntimeError(f"it ran on {ran}")
        return runner.compare(name, ("out", "dq", "dk", "dv"), found, expected, ALLOWED)

    peers, told = runner.taking_part((), tuple(calls), check)
    say(f"  {told}")
    return {name: calls[name] for name in peers}


def measure(shape: Shape, run: Run) -> Iterator[Json]:
    switch = Switch()
    calls = usable(contenders(shape.step(run.device, run.dtype), switch))
    samples = run.time(calls, 3)
    switch.to(False)
    for name, ms in samples.items():
        row: Json = {"kind": "torch_sdpa", "shape": shape.name, "impl": name}
        yield row | {"ms": timing.median(ms)} if ms else row


def summary(rows: Sequence[Json]) -> Iterator[str]:
    """By shape, milliseconds of each, and how many times as fast `register` is."""
    timed = [row for row in rows if "ms" in row]
    for shape in dict.fromkeys(row["shape"] for row in timed):
        by_impl = {row["impl"]: row["ms"] for row in timed if row["shape"] == shape}
        ours = by_impl.get("register")
        parts = [f"{shape:24}"]
        for name, ms in by_impl.items():
            told = f" ({ms / ours:.2f})" if ours and name not in OURS else ""
            parts.append(f"{name} {ms:.3f} ms{told}")
        yield "  ".join(parts)


def head(run: Run) -> Json:
    return {"device": torch.cuda.get_device_name(), "commit": commit_here(), **versions()}


TABLE = Table(
    command="bench.torch_sdpa", about=__doc__, cases=lambda: SHAPES, measure=measure,
    small=lambda shapes: [Shape(1, 40, 4, 2, 16)], burst_s=0.2, head=head, summary=summary,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
