"""python -m bench.tangent_step: training steps whose targets have tangents, beside eager attention.

A DiT of 4 layers, 16 heads of 64 columns, over 4096 tokens, in bf16. MeanFlow, sCM and rCM differ
here by their targets alone. Gradients are compared with those of dense attention in fp32, relative
to their norm: ours, and those of dense attention in bf16. Then the time of a step, and of its
attention alone. `--dry`: 64 tokens on a CPU, gradients only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench import Json, commit_here, timing
from bench.tangent import dense
from flash_mask_cute import flash_attn_func

LAYERS, HEADS, D, SEQLEN = 4, 16, 64, 4096
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    """Without weights. With nn.LayerNorm in bf16 on a GPU, the product after it refuses fp32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return (centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * D
        self.norm, self.qkv = Norm(), nn.Linear(width, 3 * width)
        self.merge, self.times = nn.Linear(width, width), nn.Linear(2, width)
        self.mlp = nn.Sequential(
            Norm(), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, times: Tensor, attend: Attend) -> Tensor:
        x = x + self.times(times)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, D)).unbind(2)
        x = x + self.merge(attend(q, k, v).flatten(2))
        found: Tensor = x + self.mlp(x)
        return found


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.blocks = attend, nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = torch.stack((r, t), -1).expand(*z.shape[:2], 2)
        for block in self.blocks:
            z = block(z, times, self.attend)
        return z


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    every = torch.ones((), dtype=torch.bool, device=q.device)
    return torch.stack([dense(*x, every) for x in zip(q, k, v, strict=True)])


def meanflow(u: Tensor, du: Tensor, v: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return v - (t - r) * du


def scm(u: Tensor, du: Tensor, v: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """The tangent of cos(t) z - sin(t) F, normalised (Lu and Song 2024)."""
    g = -(t.cos() ** 2) * (u - v) - t.cos() * t.sin() * (v + du)
    return u + g / (g.square().mean().sqrt() + 0.1)


def rcm(u: Tensor, du: Tensor, v: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """Of a consistency model along a teacher's velocity v, with a clipped tangent."""
    return u + (v - u - t * du).clamp(-1, 1)


TARGETS = {x.__name__: x for x in (meanflow, scm, rcm)}


def loss_of(net: Net, target: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    z, v, r, t = batch
    both: Any = torch.func.jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    u, du = both
    goal = target(u.detach(), du.detach(), v, r, t)
    return (u - goal).float().square().mean()


def gradients(net: Net, target: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    found = torch.autograd.grad(loss_of(net, target, batch), list(net.parameters()))
    return torch.cat([x.float().flatten() for x in found])


def milliseconds(run: Callable[[], object]) -> float:
    run()
    return timing.median([timing.burst(run, 1, untimed=0) for _ in range(5)])


def of_attention(attend: Attend, device: str, seqlen: int) -> float:
    """Milliseconds of what a step asks of attention: out, its tangent, and the gradients of out."""
    made = torch.randn(6, 1, seqlen, HEADS, D, device=device, dtype=torch.bfloat16)
    q, k, v, *tangents = made.unbind(0)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> Any:
        both: Any = torch.func.jvp(attend, tuple(leaves), tuple(tangents))
        return torch.autograd.grad(both[0], leaves, both[1].detach())

    return milliseconds(run)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tangent_step", description=__doc__)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    device, seqlen = ("cpu", 64) if options.dry else ("cuda", SEQLEN)
    torch.manual_seed(0)
    nets = {"exact": Net(eager), "ours": Net(flash_attn_func), "eager": Net(eager)}
    for name, net in nets.items():
        net.load_state_dict(nets["exact"].state_dict())
        net.to(device, torch.float32 if name == "exact" else torch.bfloat16)
    z, v = torch.randn(2, 1, seqlen, HEADS * D, device=device).unbind(0)
    batch = z, v, torch.tensor(0.3, device=device), torch.tensor(0.8, device=device)
    rounded = tuple(x.bfloat16() for x in batch)
    for name, target in TARGETS.items():
        exact = gradients(nets["exact"], target, batch)
        row: Json = {"name": name, "commit": commit_here()}
        for kind in ("ours", "eager"):
            found = gradients(nets[kind], target, rounded)
            row[f"{kind}_error"] = ((found - exact).norm() / exact.norm()).item()
            if device == "cuda":
                row[f"{kind}_ms"] = milliseconds(lambda: gradients(nets[kind], target, rounded))  # noqa: B023
        print(json.dumps(row), flush=True)
    if device == "cuda":
        for name, attend in (("ours", flash_attn_func), ("eager", eager)):
            print(json.dumps({"attention": name, "ms": of_attention(attend, device, seqlen)}))


if __name__ == "__main__":
    main()
