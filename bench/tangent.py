"""python -m bench.tangent: forward mode of attention, beside a compiled dense one and Triton's.

    python -m bench.tangent                       every case
    python -m bench.tangent 'd128-full-*' --out FILE
    python -m bench.tangent --dry                 on a CPU: each case, small, against float64

Time is that of out and its tangent together, at a dual level. Work is counted as six products of
the visible scores, 12 d a score: seven are computed, two of them in the forward. Peers:
jvp-flash-attention (Triton), where it is installed and has the mask, and eager torch up to 4K.
Errors are the largest and the mean of the tangent against float64, of 64 query rows of each case,
with and without a shift that all scores of a row have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bench import Json, runner, timing
from bench.runner import Run, Table
from flash_mask_cute import builders, flash_attn_func

HEADS, DOCUMENT, WINDOW = 32, 2048, 1024
CHECKED_ROWS, EAGER_SEQLEN = 64, 4096
TRITON = "jvp-flash-attention"


class Case(NamedTuple):
    d: int
    mask: str
    n: int

    @property
    def name(self) -> str:
        return f"d{self.d}-{self.mask}-{self.n // 1024}k"

    def keywords(self, device: Any) -> dict[str, Any]:
        if self.mask == "window":
            return {"causal": True, "window_size": (WINDOW - 1, 0)}
        if self.mask == "documents":
            lengths = [DOCUMENT] * (self.n // DOCUMENT)
            return {"startend_row_indices": builders.causal_document(lengths, device=device)}
        return {"causal": self.mask == "causal"}

    def visible(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Bool (rows, keys)."""
        rows = rows[:, None]
        near = torch.ones_like(rows * keys, dtype=torch.bool)
        if self.mask != "full":
            near = keys <= rows
        if self.mask == "window":
            near = near & (keys > rows - WINDOW)
        if self.mask == "documents":
            near = near & (keys // DOCUMENT == rows // DOCUMENT)
        return near

    @property
    def scores(self) -> int:
        """Visible scores of a head."""
        n = self.n
        if self.mask == "full":
            return n * n
        most = {"causal": n, "window": WINDOW, "documents": DOCUMENT}[self.mask]
        of_one = most * (most + 1) // 2
        return of_one * (n // most) if self.mask == "documents" else of_one + (n - most) * most


CASES = tuple(
    Case(d, mask, n)
    for d in (128, 64)
    for mask, n in (
        *(("full", 8192), ("full", 32768), ("causal", 8192), ("causal", 32768)),
        *(("window", 32768), ("documents", 32768)),
    )
)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q (rows, heads, d), k and v (keys, heads, d)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1, dtype=wide).to(q.dtype), v)


def tangent_of(attend: Callable[..., Tensor], x: tuple, t: tuple) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(attend(*map(forward_ad.make_dual, x, t))).tangent
    assert found is not None
    return found


def drawn(case: Case, device: Any, shift: float) -> tuple[tuple, tuple]:
    """q, k and v, and their tangents; shift: of all dS of a row."""
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, case.n, HEADS, case.d
    made = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(6)
    ]
    if shift:
        made[1][..., 0] = 1.0
        made[3][..., 0] += shift * case.d**0.5
    return tuple(made[:3]), tuple(made[3:])


def errors(case: Case, device: Any, shift: float) -> Json:
    """Largest and mean error of the tangent of some rows, ours and eager's in bf16."""
    x, t = drawn(case, device, shift)
    keywords = case.keywords(device)
    ours = tangent_of(lambda *y: flash_attn_func(*y, **keywords), x, t)
    rows = torch.linspace(0, case.n - 1, CHECKED_ROWS, device=device).long()
    visible = case.visible(rows, torch.arange(case.n, device=device))
    found: dict[str, Any] = {}
    for first in range(0, HEADS, 4):
        some = slice(first, first + 4)

        def of(y: tuple, dtype: torch.dtype, some: slice = some) -> tuple:
            q, k, v = (z[0, :, some].to(dtype) for z in y)
            return q[rows], k, v

        exact, eager = (
            tangent_of(partial(dense, visible=visible), of(x, dtype), of(t, dtype)).double()
            for dtype in (torch.float64, torch.bfloat16)
        )
        for name, values in (("ours", ours[0, rows, some].double()), ("eager", eager)):
            found.setdefault(name, []).append((values - exact).abs())
    together = {name: torch.cat(parts) for name, parts in found.items()}
    return {
        f"{name}_{kind}": getattr(x, kind)().item()
        for name, x in together.items()
        for kind in ("amax", "mean")
    }


def peers(case: Case, device: Any) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    keywords = case.keywords(device)
    yield "ours", lambda *y: flash_attn_func(*y, **keywords)
    if case.mask in ("full", "causal"):
        try:
            # type checkers do not know it
            attention = import_module("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual
        except ImportError:
            pass
        else:
            # (batch, heads, seqlen, d), which is how measure has stored its tensors
            causal = case.mask == "causal"

            def triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                return attention(q, k, v, causal=causal).transpose(1, 2)

            yield TRITON, triton
    if case.n <= EAGER_SEQLEN:
        every = torch.arange(case.n, device=device)
        yield "eager", lambda q, k, v: dense(q[0], k[0], v[0], case.visible(every, every))[None]


def measure(case: Case, run: Run) -> Iterator[Json]:
    row: Json = {"name": case.name}
    for shift in (0.0, 30.0):
        row[f"shift{shift:.0f}"] = errors(case, run.device, shift)
    x, t = drawn(case, run.device, 0.0)
    for name, attend in () if run.is_dry else peers(case, run.device):
        if name == TRITON:
            x, t = (
                tuple(y.transpose(1, 2).contiguous().transpose(1, 2) for y in z) for z in (x, t)
            )
        try:
            ms = timing.median(run.time({name: partial(tangent_of, attend, x, t)})[name])
        except Exception as error:  # a peer without this case
            row[name] = f"{type(error).__name__}: {str(error)[:80]}"
        else:
            work = 12 * case.d * case.scores * HEADS
            row[name] = {"ms": ms, "tflops": work / ms / 1e9}
    yield row


def small(cases: list[Case]) -> list[Case]:
    return [case._replace(n=4096 if case.mask == "documents" else 256) for case in cases]


TABLE = Table(
    command="bench.tangent", about=__doc__, cases=lambda: CASES, measure=measure, small=small,
    rounds=5, burst_s=0.06,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
