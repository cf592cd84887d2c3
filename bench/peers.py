"""The implementations that are compared, and the check that each computes the case's function.

A peer is called the way its own users would call it; what it cannot do, it says in `supports`.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from bench.cases import BenchCase, CaseTensors
from bench.flops import TILE, key_bounds

if TYPE_CHECKING:
    import torch

Call = Callable[[], Any]
# fp32 exponentials and logarithms by hardware approximation stay well under this.
LSE_FLOOR = 2e-4
# tanh.approx is good to 2^-11 of a score; 4 is about the largest score of normal inputs.
LSE_FLOOR_SOFTCAP = LSE_FLOOR + 4 * 2.0**-11
RULE = 2.0
# A peer's rounding is its own affair; this only catches a call that means another function.
PEER_RULE = 8.0


class Peer(Protocol):
    """One implementation. `unpack` turns what the call returned into (out, lse or None)."""

    @property
    def name(self) -> str: ...

    def load(self) -> None:
        """Import whatever the call needs."""

    def supports(self, case: BenchCase) -> str | None:
        """Why the case cannot be measured, or None where it can."""

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        """A callable without arguments that enqueues one forward pass."""

    def unpack(self, raw: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out (.., heads, d_v) as q is laid out; lse (batch, heads, n) or (heads, tokens)."""


@dataclass(frozen=True)
class CutePeer:
    """A module with `_flash_attn_fwd(q, k, v, ...)`: flash_mask_cute and flash-attn-4 alike."""

    name: str
    module: str

    def load(self) -> None:
        importlib.import_module(self.module)

    def supports(self, case: BenchCase) -> str | None:
        package = self.module.partition(".")[0]
        return None if importlib.util.find_spec(package) else f"{package} is not installed"

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        forward = importlib.import_module(self.module)._flash_attn_fwd
        q, k, v, cu_seqlens = tensors
        options: dict[str, Any] = {"causal": case.causal, "return_lse": True}
        if case.window is not None:
            options["window_size_left"] = case.window
        if case.softcap:
            options["softcap"] = case.softcap
        if cu_seqlens is not None:
            options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            options |= {"max_seqlen_q": case.n, "max_seqlen_k": case.n}
        return partial(forward, q, k, v, **options)

    def unpack(self, raw: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return raw[0], raw[1]


@dataclass(frozen=True)
class SdpaPeer:
    """torch scaled_dot_product_attention; `backend` names an SDPBackend, None lets torch choose."""

    name: str
    backend: str | None
    kind: str

    def load(self) -> None:
        importlib.import_module("torch.nn.attention")

    def supports(self, case: BenchCase) -> str | None:
        if case.kind != self.kind:
            return f"{self.name} is measured for kind {self.kind!r} only"
        if case.varlen:
            return "scaled_dot_product_attention takes no cu_seqlens"
        if case.window is not None:
            return "scaled_dot_product_attention takes no window"
        if case.softcap:
            return "scaled_dot_product_attention takes no softcap"
        return None

    def prepare(self, case: BenchCase, tensors: CaseTensors) -> Call:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (t.transpose(1, 2) for t in tensors[:3])
        attention = partial(
            torch.nn.functional.scaled_dot_product_attention,
            q,
            k,
            v,
            is_causal=case.causal,
            enable_gqa=case.heads != case.heads_kv,
        )
        if self.backend is None:
            return attention
        backend = getattr(SDPBackend, self.backend)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return attention()

        return call

    def unpack(self, raw: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return raw.transpose(1, 2), None


_ALL: tuple[Peer, ...] = (
    CutePeer("ours", "flash_mask_cute.interface"),
    CutePeer("fa4", "flash_attn.cute.interface"),
    SdpaPeer("cudnn", "CUDNN_ATTENTION", "attention"),
    SdpaPeer("sdpa", None, "host"),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


class Verdict(NamedTuple):
    ok: bool
    text: str


class Row(NamedTuple):
    """One query: its sequence, its head, and its index inside the sequence."""

    sequence: int
    head: int
    query: int


def sample_rows(case: BenchCase, seed: int, count: int = 64) -> list[Row]:
    """First, last and tile-edge rows of the outer sequences (varlen: of all), and random ones."""
    rng = random.Random(seed)
    lengths = case.lengths
    outer = range(case.batch) if case.varlen else sorted({0, case.batch - 1})
    rows = []
    for sequence in outer:
        last = lengths[sequence] - 1
        for query in sorted({0, min(TILE - 1, last), min(TILE, last), last}):
            rows.append(Row(sequence, rng.randrange(case.heads), query))
    for _ in range(count):
        sequence = rng.randrange(case.batch)
        query = rng.randrange(lengths[sequence])
        rows.append(Row(sequence, rng.randrange(case.heads), query))
    return rows


def _attend(
    case: BenchCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (d_v,) and LSE () of one query over its visible keys, in the dtype of the arguments."""
    scores = (k @ q) * case.d**-0.5
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    return scores.softmax(0) @ v, scores.double().logsumexp(0)


def check(
    case: BenchCase,
    tensors: CaseTensors,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    rule: float,
    seed: int,
) -> Verdict:
    """Compare `out` and `lse` with float64 attention on sampled rows of the very input.

    A row passes when its largest error is at most `rule` times that of eager attention in the
    case's dtype on the same row, plus one unit in the last place; all rows together likewise by
    RMS. Every element of `out` and `lse` must be finite.
    """
    import torch

    if not bool(out.isfinite().all()) or (lse is not None and not bool(lse.isfinite().all())):
        return Verdict(False, "out or lse is not finite, or was not written")
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in tensors[:3])
    flat = out.reshape(-1, *out.shape[-2:])
    starts = np.concatenate(([0], np.cumsum(case.lengths)))
    rows = sample_rows(case, seed)
    got, exact, eager = [], [], []
    for sequence, head, query in rows:
        start = int(starts[sequence])
        at = np.array([query], dtype=np.int64)
        first, last = key_bounds(at, case.lengths[sequence], case.causal, case.window)
        keys = slice(start + int(first[0]), start + int(last[0]) + 1)
        head_kv = head // (case.heads // case.heads_kv)
        row = q[start + query, head], k[keys, head_kv], v[keys, head_kv]
        exact.append(_attend(case, *(t.double() for t in row)))
        eager.append(_attend(case, *row))
        value = exact[-1][1]
        if lse is not None:
            value = lse[head, start + query] if case.varlen else lse[sequence, head, query]
        got.append((flat[start + query, head], value))

    def stack(pairs: list[tuple[torch.Tensor, torch.Tensor]], part: int) -> torch.Tensor:
        return torch.stack([pair[part].double() for pair in pairs])

    truth, ulp = stack(exact, 0), torch.finfo(out.dtype).eps
    error, eager_error = (stack(pairs, 0) - truth for pairs in (got, eager))
    allowed = rule * eager_error.abs().amax(1) + ulp * truth.abs().amax(1)
    share = (error.abs().amax(1) / allowed.clamp_min(1e-30)).amax()
    rms, eager_rms, truth_rms = (t.square().mean().sqrt() for t in (error, eager_error, truth))
    share_rms = rms / (rule * eager_rms + ulp * truth_rms)
    lse_error, lse_eager = ((stack(p, 1) - stack(exact, 1)).abs() for p in (got, eager))
    floor = LSE_FLOOR_SOFTCAP if case.softcap else LSE_FLOOR
    share_lse = (lse_error / (rule * lse_eager + floor)).amax()
    shares = {"O": float(share), "O rms": float(share_rms), "LSE": float(share_lse)}
    text = ", ".join(f"{name} {value:.2f}" for name, value in shares.items())
    return Verdict(all(value <= 1.0 for value in shares.values()), f"of the allowed error: {text}")


def poison(case: BenchCase, tensors: CaseTensors) -> None:
    """Leave NaN in the cached blocks that the next outputs of this size are cut from."""
    import torch

    q, _, v, _ = tensors
    shape = (*q.shape[:-1], v.shape[-1])
    held = (
        torch.full(shape, torch.nan, dtype=q.dtype, device=q.device),
        torch.full(shape[:-1], torch.nan, dtype=torch.float32, device=q.device),
    )
    del held
