"""Several sequences of queries over the keys of one batch entry, on every device."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from devices import Device
from placed_attention import PlacedCall
from shared_keys import CommonKeys
from torch import Tensor

SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
EARLIEST = -130


def draw_of(device: Device, seed: int, head_dim: int = 64) -> CommonKeys:
    if SEED != "0" and device.kind == "simulated":
        seed = random.Random(f"common keys {SEED} {seed}").randrange(1 << 30)
    longest = device.pick(200, 700, 200)
    return CommonKeys(seed, torch.bfloat16, head_dim, longest, EARLIEST)


def run_backward(
    device: Device, call: PlacedCall, delay: int | None, **more: Any
) -> tuple[Tensor, ...]:
    """The gradients, which are those of the definition. more: keywords of the backward."""
    out, lse = call.attend(call.q.double(), call.k.double(), call.v.double())
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    operands = call.q, call.k, call.v, out.bfloat16(), dout, lse.float()
    found = device.backward(*operands, **call.keywords, **more, delay=delay)
    found = tuple(x.cpu() for x in found)
    call.assert_gradients(found, dout)
    return found


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("has_used_keys", [False, True])
def test_forward(device: Device, has_used_keys: bool, num_splits: int) -> None:
    for seed in range(1, device.pick(2, 4, 2)):
        draw = draw_of(device, seed)
        draw.has_used_keys = has_used_keys
        for delay, call in enumerate(draw.calls(3)):
            qkv, keywords = (call.q, call.k, call.v), call.keywords | {"num_splits": num_splits}
            out, lse = device.forward(*qkv, **keywords, delay=delay)
            call.assert_output(out.cpu(), lse.cpu())


# 256: warpgroups, or pairs of CTAs, have the same keys
@pytest.mark.parametrize(
    ("head_dim", "more"),
    [
        (64, {}),
        (128, {}),
        *((256, x) for x in ({}, {"config": {"cta_pair": False}}, {"deterministic": True})),
    ],
)
def test_backward(device: Device, head_dim: int, more: dict[str, Any]) -> None:
    if head_dim > 128:
        device.needs_hopper()
    for delay, call in enumerate(draw_of(device, head_dim, head_dim).calls(device.pick(2, 6, 2))):
        run_backward(device, call, delay, **more)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backward_in_order(device: Device, head_dim: int) -> None:
    """Of other delays all bits are the same."""
    if head_dim > 128:
        device.needs_hopper()
    for call in draw_of(device, 3, head_dim).calls(3):
        some, others = (
            run_backward(device, call, delay, deterministic=True) for delay in (None, 2)
        )
        for name, a, b in zip("qkv", some, others, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"d{name}, {call.name}"


def test_split_groups(device: Device) -> None:
    device.needs_hopper()
    draw = draw_of(device, 5)
    draw.groups = (2, 4)
    for delay, call in enumerate(draw.calls(3)):
        run_backward(device, call, delay, config={"group_splits": 2})
