"""Mods that are methods of modules: what they reach decides whether they are traced again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flash_mask_cute import flex_attention
from flash_mask_cute.lowering import lower


class Layer(nn.Module):
    """forward tells nothing about the mods; `aside` is no state that any of them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.window = 3
        self.aside: Any = object()

    def bias(self, score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return torch.where(self.is_near(q, k), score + self.slopes[h] * (q - k), -1e9)

    def is_near(self, q: Any, k: Any) -> Any:
        return (q - k).abs() < self.window

    def forward(self, x: Tensor, how: str = "bias") -> Tensor:
        return flex_attention(x, x, x, score_mod=getattr(self, how)).clone()


def other_bias(layer: Layer, score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    return torch.where(layer.is_near(q, k), score + layer.slopes[h] * (q - k), -1e9)


def by_hand(x: Tensor, slopes: Tensor, window: int) -> Tensor:
    place = torch.arange(x.shape[2])
    distance = place[:, None] - place
    scores = x @ x.mT / x.shape[-1] ** 0.5 + slopes[:, None, None] * distance
    return scores.masked_fill(distance.abs() >= window, -1e9).softmax(-1) @ x


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def check(layer: Any, call: Any, slopes: Tensor, is_input: bool = True) -> None:
    """State that the mod reads is seen, and nothing is traced while it stays the same.

    is_input: a number that has changed is an argument from then on, and traced no more.
    """
    x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    call(x)
    found = []
    for window in (3, 3, 5, 5, 2, 9, 4):
        layer.window = window
        layer.aside = object()
        before = lower.traces
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = call(x)
        found.append(lower.traces - before)
        assert torch.allclose(out, by_hand(x, slopes, window), atol=1e-5), window
    assert found[0] == found[1] == found[3] == 0
    if is_input:
        assert found[2] <= 1 and found[4:] == [0, 0, 0]


def test_a_method_whose_names_forward_does_not_mention() -> None:
    layer = Layer()
    check(layer, layer, layer.slopes)


def test_a_partial_over_a_module() -> None:
    layer = Layer()
    mod = functools.partial(other_bias, layer)
    check(layer, lambda x: flex_attention(x, x, x, score_mod=mod), layer.slopes)


def test_a_method_of_a_sharded_module(one_rank: Any) -> None:
    """`fully_shard` makes the module's class anew and keeps state of its own in the module."""
    layer = fully_shard(Layer(), mesh=one_rank)
    slopes = torch.tensor([0.5, -0.25])
    check(layer, layer, slopes)
    x = torch.randn(1, 2, 9, 8)
    layer(x).square().sum().backward()
    slopes.requires_grad_()
    by_hand(x, slopes, layer.window).square().sum().backward()
    assert torch.allclose(layer.slopes.grad.full_tensor(), slopes.grad, atol=1e-5)


def test_a_sharded_layer_inside(one_rank: Any) -> None:
    """A mod that calls a method of a sharded module below its own."""

    class Outer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fully_shard(Layer(), mesh=one_rank)

        def bias(self, score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
            return torch.where(self.inner.is_near(q, k), score + self.slopes[h] * (q - k), -1e9)

    outer = Outer()
    check(outer.inner, outer, outer.slopes, is_input=False)
