"""Compiled calls at second and third lengths (`tests/support/calls/compiled_calls.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_calls import MAX_GRAPHS, NEEDS_TORCH, TABLE, Draw, all_draws, draw, run
from drawn_share import Draws
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from flash_mask_cute import builders, flash_attn_func, flex_attention
from flash_mask_cute.runtime.constant_result import VERSION

DRAWN = Draws.of("COMPILED", 4, what="CALLS")


def _draws() -> list[Draw]:
    if DRAWN.most < 0:
        return all_draws(DRAWN.seed)
    rng = random.Random(DRAWN.seed)
    return [draw(rng) for _ in range(DRAWN.most)]


def check(drawn: Draw) -> None:
    needed = NEEDS_TORCH.get(drawn.row, "0")
    if needed > VERSION:
        pytest.skip(f"torch {VERSION} itself does not compile {drawn.row}")
    graphs = run(drawn)
    assert graphs <= MAX_GRAPHS, f"{drawn} compiled {graphs} graphs"


@pytest.mark.parametrize("number", range(len(_draws())))
def test_drawn(number: int) -> None:
    drawn = _draws()[number]
    print(drawn)
    check(drawn)


@pytest.mark.shares(4)
@pytest.mark.parametrize(
    "drawn",
    [
        Draw("flash_attn_func causal", "default", True, (96, 50, 70)),
        Draw("flash_attn_func document", "dynamic", True, (96, 50, 70)),
        Draw("flash_attn_func sliding_window", "fullgraph", True, (96, 50, 300)),
        Draw("flex plain", "fullgraph", True, (256, 200, 300)),
        Draw("q_start int", "fullgraph", True, (64, 48, 80)),
        Draw("softmax_scale", "fullgraph", True, (64, 48, 80)),
        Draw("flex mask number", "fullgraph", True, (64, 48, 80)),
        Draw("flex score numbers", "fullgraph", True, (64, 48, 80)),
        Draw("score inside", "fullgraph", True, (64, 48, 80)),
        Draw("layer with mods inside", "fullgraph", False, (64, 48, 80)),
    ],
    ids=lambda drawn: f"{drawn.row}, {drawn.mode}",
)
def test_a_second_length(drawn: Draw) -> None:
    check(drawn)


def test_every_builder_is_in_the_table() -> None:
    names = {
        name for name, x in vars(builders).items()
        if callable(x) and getattr(x, "__module__", "") == builders.__name__ and name[0].islower()
    }  # fmt: skip
    assert not {x for x in names if f"flash_attn_func {x}" not in TABLE}


def test_inductor() -> None:
    drawn = Draw("flash_attn_func causal_document", "fullgraph", True, (96, 50, 70), "inductor")
    check(drawn)


def test_export_of_any_length() -> None:
    """The range of lengths that is asked for, with a builder and a position inside."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            n = x.shape[1]
            mask = builders.sink_window(n, 1, n // 2)
            tail = flash_attn_func(x[:, :2], x, x, causal=True, q_start=n // 2)
            return flash_attn_func(x, x, x, startend_row_indices=mask), tail

    layer, x = Layer(), torch.randn(1, 12, 2, 8)
    lengths = {1: torch.export.Dim("n", min=4, max=500)}
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), dynamic_shapes=(lengths,), strict=strict)
        longer = torch.randn(1, 140, 2, 8)
        torch.testing.assert_close(exported.module()(longer), layer(longer))
    traced = make_fx(layer, tracing_mode="symbolic")(x)
    torch.testing.assert_close(traced(longer), layer(longer))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def heads_first() -> list[Tensor]:
    return [torch.randn(1, 2, 64, 8) for _ in range(3)]


def test_a_shape_that_a_mod_reads_is_guarded() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, score: Any) -> Any:
        return flex_attention(q, k, v, score)

    def wrapped(n: int) -> Callable[..., Tensor]:
        table = torch.randn(n)
        return lambda s, b, h, i, j: s + table[(i + j) % table.shape[0]]

    call, (q, k, v) = compiled(attend), heads_first()
    for n in (7, 9, 11, 13):
        mod = wrapped(n)
        torch.testing.assert_close(call(q, k, v, mod), attend(q, k, v, mod))


def test_gradients_by_what_a_mod_from_inside_holds() -> None:
    slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2]))

    def attend(q: Tensor, k: Tensor, v: Tensor, level: Tensor) -> Any:
        inner = level.sin()
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + inner * j - slopes[h] * (i - j))

    level = torch.tensor(0.3, requires_grad=True)
    q, k, v = heads_first()
    results = []
    for function in (attend, compiled(attend)):
        out = function(q, k, v, level)
        results.append([out, *torch.autograd.grad(out.square().sum(), (level, slopes))])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_mod_from_inside_that_holds_functions() -> None:
    class Biases(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(2, 64))

        def of(self, h: Tensor, j: Tensor) -> Tensor:
            return self.table[h, j]

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            method, factors = self.of, (2.0, q.mean())

            def scaled(x: Tensor) -> Tensor:
                return x * factors[0] + factors[1]

            return flex_attention(q, k, v, lambda s, b, h, i, j: scaled(s) + method(h, j))

    biases, inputs = Biases(), heads_first()
    results = []
    for function in (biases, compiled(biases)):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), [biases.table])])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_mod_from_inside_that_holds_what_cannot_be_followed() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        table = {"level": q.mean()}
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + table["level"])

    with pytest.raises(Exception, match=r"holds a dict \(cell 0\).*capture the tensors"):
        compiled(attend)(*heads_first())


def test_a_cute_mod_from_inside_that_holds_a_tensor() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        level = q.mean()
        return flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j, aux: s + level)

    with pytest.raises(Exception, match="pass tensors as aux_tensors"):
        compiled(attend)(*heads_first())


def test_a_scale_on_another_device_is_refused_in_a_graph() -> None:
    with pytest.raises(Exception, match="softmax_scale must be a number or a 0-dim CPU tensor"):
        compiled(lambda q, k, v: flash_attn_func(q, k, v, torch.ones(2)))(*heads_first())


@pytest.mark.skipif(VERSION < "2.11", reason="torch itself does not compile such a block mask")
def test_a_block_mask_made_inside() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    inputs = heads_first()
    torch.testing.assert_close(compiled(attend)(*inputs), attend(*inputs))
