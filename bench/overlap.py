"""How much of the time that messages between GPUs take is under attention, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Span = tuple[float, float]
# In names of kernels: those of NCCL, and attention of this package and of torch.
MESSAGES, ATTENTION = "nccl", "flash"


class Overlap(NamedTuple):
    """Milliseconds on one GPU. messages: while a kernel of NCCL is there, which waits for its
    partner, too. hidden: while one of attention is there as well."""

    messages: float
    hidden: float
    attention: float

    @property
    def share(self) -> float:
        return self.hidden / self.messages if self.messages else 1.0


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that are apart, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def overlap_of(kernels: Iterable[tuple[str, Span]]) -> Overlap:
    """Of kernels by name, with their begin and end in microseconds."""
    given = list(kernels)
    messages = union(span for name, span in given if MESSAGES in name)
    attention = union(span for name, span in given if ATTENTION in name and MESSAGES not in name)
    hidden = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in messages
        for first, last in attention
    )
    long, work = (sum(end - begin for begin, end in spans) for spans in (messages, attention))
    return Overlap(long / 1e3, hidden / 1e3, work / 1e3)


def profiled(call: Callable[[], Any]) -> Overlap:
    """Of one warm call on this process's GPU."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return overlap_of(
        (event.name, (event.time_range.start, event.time_range.end))
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA
    )
