"""flex_attention and torch mods in regions that torch.compile and torch.export trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask
from torch.utils.checkpoint import checkpoint

from flash_mask_cute import flash_attn_func, flex_attention

N = 64
SLOPES = nn.Parameter(torch.tensor([0.1, 0.2]))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - SLOPES[h] * (q - k)


def documents(length: int) -> Callable[..., Tensor]:
    ids = torch.arange(N) // length
    return lambda b, h, q, k: ids[q] == ids[k]


def mask_of(length: int) -> BlockMask:
    mod = and_masks(causal, documents(length))
    return create_block_mask(mod, None, None, N, N, device="cpu", BLOCK_SIZE=32)


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, N, 8, generator=g, requires_grad=True) for _ in range(3)]


class Counting:
    """A backend that counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(module, inputs)


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def check(
    compiled: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    leaves: Sequence[Tensor] = (SLOPES,),
) -> None:
    leaves = [*args[:3], *leaves]
    found, wanted = compiled(*args), plain(*args)
    torch.testing.assert_close(found, wanted)
    for got, expected in zip(
        torch.autograd.grad(found.square().sum(), leaves, allow_unused=True),
        torch.autograd.grad(wanted.square().sum(), leaves, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, score_mod=alibi, block_mask=mask)


def test_masks_made_outside(backend: Counting) -> None:
    """New masks of the same code compile nothing new, and captured Parameters have gradients."""
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for length in (20, 7, 33, 50):
        check(compiled, attend, *tensors(), mask_of(length))
    assert backend.graphs == 1
    # ids that change in place
    mask = mask_of(9)
    check(compiled, attend, *tensors(), mask)
    assert backend.graphs == 1


def test_a_captured_parameter_beside_a_block_mask(backend: Counting) -> None:
    """New functions of the same code that capture another Parameter compile nothing new."""

    def closures(length: int) -> tuple[Callable[..., Tensor], nn.Parameter, BlockMask]:
        table = nn.Parameter(torch.randn(2, N))
        return lambda s, b, h, q, k: s + table[h, k], table, mask_of(length)

    def plain(q: Tensor, k: Tensor, v: Tensor, mod: Any, mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod, block_mask=mask)

    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for length in (20, 7):
        mod, table, mask = closures(length)
        check(compiled, plain, *tensors(), mod, mask, leaves=[table])
    assert backend.graphs == 1


@pytest.mark.shares(3)
@pytest.mark.parametrize("place", ["closure", "tuple", "default"])
def test_code_of_captured_functions_is_guarded(place: str, backend: Counting) -> None:
    def halves() -> Callable[[Tensor], Tensor]:
        return lambda x: x * 0.5

    def squares() -> Callable[[Tensor], Tensor]:
        return lambda x: x * x

    def calling(captured: Any) -> Callable[..., Tensor]:
        several = (captured, captured)
        if place == "closure":
            return lambda s, b, h, q, k: captured(s)
        if place == "tuple":
            return lambda s, b, h, q, k: several[1](s)
        return lambda s, b, h, q, k, f=captured: f(s)

    def plain(q: Tensor, k: Tensor, v: Tensor, mod: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    graphs = []
    for made in (halves, halves, squares, squares, halves):
        check(compiled, plain, *tensors(), calling(made()))
        graphs.append(backend.graphs)
    assert graphs == [1, 1, 2, 2, 2]


def test_keyword_defaults_outside(backend: Counting) -> None:
    table = torch.randn(N)

    def mod(
        s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, factor: float = 2.0
    ) -> Tensor:
        return s + table[k] * factor

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    check(torch.compile(plain, fullgraph=True, backend=backend), plain, *tensors())


def in_a_dict(table: Tensor) -> Callable[..., Tensor]:
    held = {"table": table, "factor": 2.0}
    return lambda s, b, h, q, k: s * held["factor"] + held["table"][k]


def in_a_partial(table: Tensor) -> Callable[..., Tensor]:
    return functools.partial(scaled_by, 0.5, factor=2)


def scaled_by(
    scale: float, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, factor: int
) -> Tensor:
    return s * scale + factor * SLOPES[h]


@pytest.mark.parametrize("make", [in_a_dict, in_a_partial])
def test_what_holds_the_captures(make: Any, backend: Counting) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, mod: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for _ in range(2):
        check(compiled, plain, *tensors(), make(torch.randn(N)))


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.on = 2.0, True

    def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.factor if self.on else s


def switched_by(place: str) -> tuple[Callable[..., Tensor], Callable[[str, Any], None]]:
    """A mod that scales where it is switched on, and what sets its factor and its switch."""
    module, held = Switched(), {"factor": 2.0, "on": True}
    if place == "module":
        return module.mod, functools.partial(setattr, module)
    return lambda s, b, h, q, k: s * held["factor"] if held["on"] else s, held.__setitem__


@pytest.mark.shares(2)
@pytest.mark.parametrize("place", ["dict", "module"])
def test_numbers_and_switches_are_guarded(place: str, backend: Counting) -> None:
    mod, change = switched_by(place)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for factor, is_on in ((2.0, True), (3.0, True), (3.0, False)):
        change("factor", factor)
        change("on", is_on)
        check(compiled, plain, *tensors())


def test_another_mod_and_another_number_are_noticed(backend: Counting) -> None:
    def scaled(factor: float) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s * factor

    def plain(q: Tensor, k: Tensor, v: Tensor, mod: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for mod in (scaled(0.5), scaled(2.0), scaled(0.5), alibi, scaled(3.0)):
        check(compiled, plain, *tensors(), mod)


def test_all_results(backend: Counting) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
        request = AuxRequest(lse=True, max_scores=True)
        out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=request)
        return out, aux.lse, aux.max_scores

    q, k, v = tensors()
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    mask = mask_of(20)
    torch.testing.assert_close(compiled(q, k, v, mask), plain(q, k, v, mask))


def test_torch_mods_of_flash_attn_func(backend: Counting) -> None:
    table = torch.randn(N)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[k] * 2 - SLOPES[h]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, score_mod=biased, mask_mod=causal)  # type: ignore[return-value]

    check(torch.compile(plain, fullgraph=True, backend=backend), plain, *tensors())


def test_checkpointing(backend: Counting) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return checkpoint(attend, q, k, v, mask, use_reentrant=False)  # type: ignore[no-any-return]

    mask = mask_of(20)
    check(plain, attend, *tensors(), mask)
    check(torch.compile(plain, fullgraph=True, backend=backend), attend, *tensors(), mask)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, N))

    def add_bias(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.bias[h, k]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=self.add_bias)


def test_a_method_of_a_compiled_module(backend: Counting) -> None:
    layer, (q, k, v) = Layer(), tensors()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    out, wanted = compiled(q, k, v), layer(q, k, v)
    torch.testing.assert_close(out, wanted)
    got, expected = (torch.autograd.grad(x.sum(), layer.bias)[0] for x in (out, wanted))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    layer, (q, k, v) = Layer(), tensors()
    exported = torch.export.export(layer, (q, k, v), strict=strict)
    said = [node.format_node() or "" for node in exported.graph.nodes]
    # inductor writes these into comments of Triton kernels
    assert any("attention_fwd" in x for x in said) and not any("\n" in x for x in said)
    torch.testing.assert_close(exported.module()(q, k, v), layer(q, k, v))


def test_defined_inside(backend: Counting) -> None:
    def of_a_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        level = q.mean()
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + level * (i - j))

    def of_a_partial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        level = k.mean()

        def mod(
            factor: Tensor, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, add: int = 2
        ) -> Tensor:
            return s * factor + add * SLOPES[h]

        return flex_attention(q, k, v, score_mod=functools.partial(mod, level, add=3))

    for function in (of_a_result, of_a_partial):
        check(torch.compile(function, fullgraph=True, backend=backend), function, *tensors())


def test_computed_of_captures_alone_is_refused_by_name(backend: Counting) -> None:
    table = torch.randn(N)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table.exp()[k]

    def attend_by(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    with pytest.raises(Exception, match="captured alone, which is not compiled"):
        torch.compile(attend_by, fullgraph=True, backend=backend)(*tensors())
