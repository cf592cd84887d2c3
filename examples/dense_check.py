"""What the examples are checked against: attention with every score written out.

Not an example itself: look at 01_causal.py first, which is one call; each of the others adds one
thing to it. They import this module as their neighbour, so they run as `python examples/NN_name.py`
from anywhere.

A result passes if its largest distance to float64 is within twice that of the same formula in plain
torch in bfloat16, the dtype of the inputs, plus one rounding step of bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor


def timed_call(device: torch.device) -> str:
    """What was timed on a device: on the CPU it says nothing of a kernel."""
    return "time of a warm call" if device.type == "cuda" else "time of a walk on the CPU"


def has_hopper() -> bool:
    """Whether torch sees a Hopper GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pick_device() -> torch.device:
    """A Hopper GPU if torch sees one, else the CPU; says which."""
    if has_hopper():
        print(f"device: {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    print("device: CPU (no Hopper GPU here), in float64 over the tiles that the kernel would visit")
    return torch.device("cpu")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, d) and LSE (batch, heads_q, seqlen_q), computed in q's dtype.

    q: (batch, seqlen_q, heads_q, d); k, v: (batch, seqlen_k, heads_kv, d), heads_kv a divisor of
    heads_q. visible (bool) and bias (added after the soft cap) broadcast to (batch, heads_q,
    seqlen_q, seqlen_k). softcap 0: none.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(q.dtype)
    scores = scores.masked_fill(~visible, float("-inf"))
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return (probabilities.to(q.dtype) @ v).transpose(1, 2), scores.logsumexp(-1)


def within(example: str, what: str, error: float, bound: float, remark: str = "") -> None:
    """Print an error and its bound, as `make demo` reads them.

    Raises:
        SystemExit: the error is larger, or NaN. The message starts with `example`.
    """
    print(f"{what} {error:.2e}, bound {bound:.2e}{remark}")
    if not error <= bound:
        raise SystemExit(f"{example}: wrong result ({what} {error:.2e}, bound {bound:.2e})")


def compare(example: str, name: str | None, out: Tensor, exact: Tensor, eager: Tensor) -> None:
    """Print how far `out` and `eager` are from `exact`, three tensors of one shape.

    name: which result this is, None in an example that checks one thing only.

    Raises:
        SystemExit: `out` is wrong, or has a NaN. The message starts with `example`.
    """
    error = (out.double() - exact).abs().max().item()
    eager_error = (eager.double() - exact).abs().max().item()
    what = "largest error of out" if name is None else f"{name}: largest error"
    bound = 2 * eager_error + torch.finfo(eager.dtype).eps
    within(example, what, error, bound, f" (plain bfloat16 torch: {eager_error:.2e})")


def check(
    example: str,
    name: str | None,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """`compare` the O of the kernel to `attend`, in float64 and in the dtype of the inputs."""
    exact, _ = attend(q.double(), k.double(), v.double(), visible, bias, softcap)
    eager, _ = attend(q, k, v, visible, bias, softcap)
    compare(example, name, out, exact, eager)
