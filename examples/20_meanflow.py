"""Training a small MeanFlow, whose target has a tangent of the network in it, through attention.

    python examples/20_meanflow.py
    python examples/20_meanflow.py --steps 200

A MeanFlow (Geng et al. 2025) learns u(z, r, t), the mean velocity from time t to time r. So one
evaluation turns noise into a sample: data = noise - u(noise, 0, 1). Its target is v - (t - r) du/dt
with v = noise - data. du/dt is the tangent of u along (v, 0, 1). `torch.func.jvp` computes it
together with u, and no gradient goes through it. Samples here are waves, whose tokens see a window
of their neighbours.

Before the training, u, du/dt and the gradients of a step are checked against dense attention in
float64. Runs on the CPU, or on a Hopper GPU with --device cuda. Ends with an error if a result is
wrong, or if the loss does not fall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from dense_check import attend, within
from torch import Tensor, nn

from flash_mask_cute import flash_attn_func

EXAMPLE = "20_meanflow"
BATCH, SEQLEN, CHANNELS = 8, 64, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
NEIGHBOURS = 24
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flash_attn_func(q, k, v, window_size=(NEIGHBOURS, NEIGHBOURS))
    return out


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    token = torch.arange(q.shape[1], device=q.device)
    return attend(q, k, v, (token - token[:, None]).abs() <= NEIGHBOURS)[0]


class MeanVelocity(nn.Module):
    """u(z, r, t): z (batch, seqlen, channels), r and t (batch, 1, 1)."""

    def __init__(self, attention: Attend = ours) -> None:
        super().__init__()
        self.attention = attention
        width = HEADS * HEAD_DIM
        self.embed = nn.Linear(CHANNELS + 4, width)
        self.heads = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.merge = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )
        self.out = nn.Linear(width, CHANNELS)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        place = torch.arange(z.shape[1], device=z.device, dtype=z.dtype)[:, None] / 8
        place = torch.cat([place.sin(), place.cos()], -1).expand(*z.shape[:2], 2)
        times = torch.cat([t, t - r], -1).expand(*z.shape[:2], 2)
        x = self.embed(torch.cat([z, place, times], -1))
        parts = self.heads(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        x = x + self.merge(self.attention(q, k, v).flatten(2))
        found: Tensor = self.out(x + self.mlp(F.layer_norm(x, x.shape[-1:])))
        return found


def draw(seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Waves, noise, and times r <= t of a batch."""
    rng = torch.Generator().manual_seed(seed)
    phase, pace = torch.rand(2, BATCH, 1, CHANNELS, generator=rng).unbind(0)
    data = torch.sin(6.3 * phase + (0.1 + 0.2 * pace) * torch.arange(SEQLEN)[:, None])
    noise = torch.randn(data.shape, generator=rng)
    r, t = torch.rand(2, BATCH, 1, 1, generator=rng).sort(dim=0).values.unbind(0)
    # as many samples learn the velocity itself
    r = torch.where(torch.rand(r.shape, generator=rng) < 0.5, t, r)
    return tuple(x.to(device, dtype) for x in (data, noise, r, t))


def step(model: MeanVelocity, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch, u and du/dt."""
    data, noise, r, t = batch
    z, v = (1 - t) * data + t * noise, noise - data
    along = v, torch.zeros_like(r), torch.ones_like(t)
    both: Any = torch.func.jvp(model, (z, r, t), along)
    u, du = both
    target = (v - (t - r) * du).detach()
    return (u - target).square().mean(), u.detach(), du.detach()


def check(model: MeanVelocity, batch: tuple[Tensor, ...]) -> None:
    """u, du/dt and the gradients against dense attention, all in float64."""
    found = []
    for attention in (ours, dense):
        twin = MeanVelocity(attention).to(batch[0])
        twin.load_state_dict(model.state_dict())
        loss, u, du = step(twin, batch)
        found.append((u, du, torch.autograd.grad(loss, twin.heads.weight)[0]))
    for name, x, y in zip(("u", "du/dt", "gradient"), *found, strict=True):
        error = ((x - y).abs().max() / y.abs().max()).item()
        # the backward takes probabilities from LSE, which is float32
        within(EXAMPLE, f"{name}: largest error", error, 1e-10 if name != "gradient" else 1e-5)


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    torch.manual_seed(0)
    model = MeanVelocity()
    if device.type == "cpu":
        check(model, draw(0, device, torch.float64))
    # kernels take 16 bits
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(given.steps):
        loss, _, _ = step(model, draw(number, device, dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"loss of the first ten steps {first:.3f}, of the last ten {last:.3f}")
    if not last < 0.9 * first:
        raise SystemExit(f"{EXAMPLE}: the loss did not fall")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
