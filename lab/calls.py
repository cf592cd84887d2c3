"""The calls of `lab.first_run`, each held to attention in fp64. A child process runs one step.

On a GPU they run there; with a simulated target on the software GPU, with tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import Json
from bench.oracle import attend
from flash_mask_cute.call.arguments import AttentionCall, Direction
from flash_mask_cute.call.prepare import prepare_bwd, prepare_fwd
from flash_mask_cute.runtime.target import Target

# units in the last place of bf16, of the largest value, beside twice what eager attention is off
ULP = 2.0**-8
ORDERS = 5


class WrongResult(AssertionError):
    """A result is further from fp64 than it may be."""


@dataclass(frozen=True)
class Machine:
    """Where calls run. target: of the software GPU; None: the GPU that tensors are on."""

    device: str
    target: Target | None = None

    @property
    def is_simulated(self) -> bool:
        return self.target is not None


@dataclass(frozen=True)
class Call:
    """One call. lengths: queries, keys; those on the software GPU in `short`. keywords: of the host
    calls. page: keys of a page; 0: no pages."""

    dims: tuple[int, int]
    lengths: tuple[int, int] = (1000, 1500)
    short: tuple[int, int] = (150, 200)
    heads: tuple[int, int] = (2, 1)
    causal: bool = False
    page: int = 0
    config: dict[str, Any] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        d, d_v = self.dims
        more = [x for x, given in (("causal", self.causal), ("pages", self.page)) if given]
        more += [f"{name}={x}" for name, x in (self.config or {}).items()]
        more += [f"{name}={x}" for name, x in self.keywords.items()]
        return " ".join([f"{d}" if d == d_v else f"{d}/{d_v}", *more])

    def tensors(self, machine: Machine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, and the gradient of the output: (1, length, heads, d) bf16."""
        n, m = self.short if machine.is_simulated else self.lengths
        (d, d_v), (heads_q, heads_kv) = self.dims, self.heads
        torch.manual_seed(0)
        shapes = (n, heads_q, d), (m, heads_kv, d), (m, heads_kv, d_v), (n, heads_q, d_v)
        q, k, v, dout = (torch.randn(1, *x).to(machine.device, torch.bfloat16) for x in shapes)
        return q, k, v, dout

    def reference(self, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        """Attention in a dtype, with softmax in fp32 or more: out, and lse (1, heads, queries)."""
        n, m, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        rows, columns = torch.arange(n)[:, None], torch.arange(m)
        hidden = (columns > rows + m - n).to(q.device) & self.causal
        outs, lses = [], []
        for head in range(q.shape[2]):
            of_head = [x[0, :, i].to(dtype) for x, i in ((q, head), (k, head // group))]
            scores = (of_head[0] @ of_head[1].T).to(torch.promote_types(dtype, torch.float32))
            scores = (scores * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
            found = attend(scores, v[0, :, head // group].to(dtype))
            outs.append(found.out)
            lses.append(found.lse)
        return torch.stack(outs, 1)[None], torch.stack(lses)[None]


def _hold(label: str, names: str, found: Any, exact: Any, eager: Any) -> float:
    """The largest error as a share of what is allowed. Raises WrongResult."""
    worst = 0.0
    for name, x, truth, other in zip(names.split(), found, exact, eager, strict=True):
        error, unit = (float((y.double() - truth).abs().max()) for y in (x, other))
        share = error / (2 * unit + ULP * float(truth.abs().max()))
        if not share <= 1:
            raise WrongResult(f"{label}: {name} is off by {error:.3g}, {share:.1f} of what may be")
        worst = max(worst, share)
    return round(worst, 3)


def check_forward(call: Call, machine: Machine) -> Json:
    q, k, v, _ = call.tensors(machine)
    exact, _ = call.reference(torch.float64, q, k, v)
    eager, _ = call.reference(torch.bfloat16, q, k, v)
    more = dict(call.keywords)
    keys, values = k, v
    if call.page:
        count = -(-k.shape[1] // call.page)
        table = torch.randperm(count, dtype=torch.int32)
        pages = []
        for x in (k, v):
            padded = x.new_zeros(count * call.page, *x.shape[2:])
            padded[: x.shape[1]] = x[0]
            of_pages = padded.unflatten(0, (count, call.page))
            pages.append(
                torch.empty_like(of_pages).index_copy_(0, table.long().to(x.device), of_pages)
            )
        keys, values = pages
        more["page_table"] = table[None].to(q.device)
        more["seqused_k"] = torch.tensor([k.shape[1]], dtype=torch.int32, device=q.device)
    given = AttentionCall.from_arguments(
        Direction.FORWARD, q, keys, values, causal=call.causal, config=call.config, **more
    )
    out, _ = prepare_fwd(given, machine.target)(given.tensors, given.masks)
    return {"call": call.label, "share": _hold(call.label, "out", (out,), (exact,), (eager,))}


def _gradients(call: Call, dtype: torch.dtype, q: Any, k: Any, v: Any, dout: Any) -> Any:
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out, lse = call.reference(dtype, *leaves)
    return (out, lse, *torch.autograd.grad(out, leaves, dout.to(dtype)))


def check_backward(call: Call, machine: Machine) -> Json:
    """Deterministic calls run several times, and must be equal bit for bit."""
    q, k, v, dout = call.tensors(machine)
    out, lse, *exact = _gradients(call, torch.float64, q, k, v, dout)
    _, _, *eager = _gradients(call, torch.bfloat16, q, k, v, dout)
    given = AttentionCall.from_arguments(
        Direction.BACKWARD, q, k, v, out.detach().to(q.dtype), dout, lse.detach().float(),
        causal=call.causal, config=call.config, **call.keywords,
    )  # fmt: skip
    first, share = None, 0.0
    repeats = ORDERS if call.keywords.get("deterministic") and not machine.is_simulated else 1
    for _ in range(repeats):
        found = prepare_bwd(given, machine.target)(given.tensors, given.masks)
        share = _hold(call.label, "dq dk dv", found, exact, eager)
        if first is not None and not all(map(torch.equal, found, first)):
            raise WrongResult(f"{call.label}: two runs differ")
        first = found
    return {"call": call.label, "share": share}


def backward_of(call: Call, machine: Machine) -> Callable[[], Any]:
    """The backward alone, of a forward by the library, to be timed."""
    q, k, v, dout = call.tensors(machine)
    forward = AttentionCall.from_arguments(
        Direction.FORWARD, q, k, v, causal=call.causal, return_lse=True
    )
    out, lse = prepare_fwd(forward, machine.target)(forward.tensors, forward.masks)
    assert lse is not None
    given = AttentionCall.from_arguments(
        Direction.BACKWARD, q, k, v, out, dout, lse, causal=call.causal, config=call.config
    )
    prepared = prepare_bwd(given, machine.target)
    return lambda: prepared(given.tensors, given.masks)


def run_calls(
    forward: tuple[Call, ...], backward: tuple[Call, ...], machine: Machine
) -> Iterator[Json]:
    for call in forward:
        yield {"direction": "forward", **check_forward(call, machine)}
    for call in backward:
        yield {"direction": "backward", **check_backward(call, machine)}
