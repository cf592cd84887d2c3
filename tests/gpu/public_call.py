"""The public call on a GPU for `inputs.Inputs`, and what every such call must keep to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from devices import check_given_outputs
from eager import assert_close_to_oracle
from inputs import Inputs
from torch import Tensor

from flash_mask_cute.interface import _flash_attn_fwd

T = TypeVar("T")


def forward(inputs: Inputs, **more: Any) -> tuple[Tensor, Tensor]:
    return _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **(inputs.keywords | more))


def check(inputs: Inputs) -> None:
    """Outputs of the library and of the caller, NaN before: close, equal in every bit, guarded."""
    out, lse = forward(inputs)
    assert_close_to_oracle(out, lse, inputs)
    check_given_outputs(partial(forward, inputs), inputs, out, lse)


@contextmanager
def no_waiting() -> Iterator[None]:
    """What waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(
    step: Callable[[], T], beside: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a step, and what it gives; after a first one, which compiles, on the current
    stream or beside it."""
    stream = beside or torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def check_replay(
    graph: torch.cuda.CUDAGraph, captured: Inputs, results: tuple[Tensor, Tensor], fresh: Inputs
) -> None:
    """The graph that wrote `results` from q, k, v of `captured`, replayed on those of `fresh`."""
    pairs = ((captured.q, fresh.q), (captured.k, fresh.k), (captured.v, fresh.v))
    for x, new in pairs:
        x.copy_(new)
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    assert_close_to_oracle(*results, fresh)
