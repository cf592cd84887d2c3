"""Gradient checkpointing under `sdpa`: what is computed again runs where it ran first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import dense_attention
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError, checkpoint

from flash_mask_cute.integrations.torch import kernels_run, sdpa

OURS = ["flash_mask_cute"]


def attend(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, 16, 8), (8, 8)
    x, weight = (torch.randn(*y, generator=generator, requires_grad=True) for y in shapes)
    return x, weight


def expected() -> list[Tensor]:
    """Gradients of the sum of squares, without attention of torch or ours."""
    x, weight = leaves()
    visible = torch.ones(16, 16, dtype=torch.bool).tril()
    out = dense_attention(x @ weight, x, x, visible).out
    return list(torch.autograd.grad(out.square().sum(), (x, weight)))


Leaves = tuple[Tensor, Tensor]


def by_method(out: Tensor, given: Leaves) -> Any:
    out.square().sum().backward()


def by_method_of_some(out: Tensor, given: Leaves) -> Any:
    doubled = out * 1
    doubled.square().sum().backward(inputs=[doubled, *given])
    torch.testing.assert_close(doubled.grad, 2 * out)


def by_gradient(out: Tensor, given: Leaves) -> Any:
    out.backward(2 * out.detach())


def by_function(out: Tensor, given: Leaves) -> Any:
    torch.autograd.backward([out.square().sum()])


def by_function_of_some(out: Tensor, given: Leaves) -> Any:
    torch.autograd.backward(out.square().sum(), inputs=given)


def by_grad(out: Tensor, given: Leaves) -> Any:
    return torch.autograd.grad(out.square().sum(), given)


def by_grad_of_edges(out: Tensor, given: Leaves) -> Any:
    edges = [get_gradient_edge(x) for x in given]
    return torch.autograd.grad([get_gradient_edge(out)], edges, [2 * out.detach()])


def by_grad_with_zeros(out: Tensor, given: Leaves) -> Any:
    other = torch.ones(3, requires_grad=True)
    *found, zeros = torch.autograd.grad(out.square().sum(), (*given, other), materialize_grads=True)
    assert torch.equal(zeros, torch.zeros(3))
    return found


WAYS: dict[str, Callable[[Tensor, Leaves], Any]] = {
    x.__name__: x
    for x in (
        by_method, by_method_of_some, by_gradient, by_function, by_function_of_some, by_grad,
        by_grad_of_edges, by_grad_with_zeros,
    )
}  # fmt: skip
REENTRANT = ["by_method", "by_gradient", "by_function"]
CASES = [(way, False) for way in WAYS] + [(way, True) for way in REENTRANT]


@pytest.mark.parametrize("is_on_a_device", [False, True], ids=["", "with another mode"])
@pytest.mark.parametrize(("way", "use_reentrant"), CASES)
def test_a_backward_inside(way: str, use_reentrant: bool, is_on_a_device: bool) -> None:
    given = leaves()
    with torch.device("cpu") if is_on_a_device else nullcontext(), sdpa(), kernels_run() as ran:
        out = checkpoint(attend, *given, use_reentrant=use_reentrant)
        assert [x.kernel for x in ran] == OURS
        found = WAYS[way](out, given) or [x.grad for x in given]
        assert [x.kernel for x in ran] == OURS * 2
        # the mode is still on, and once
        F.scaled_dot_product_attention(*given[0][None].expand(3, -1, -1, -1, -1))
        assert [x.kernel for x in ran] == OURS * 3
    assert not torch.overrides._get_current_function_mode_stack()
    for x, y in zip(found, expected(), strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_checkpoints_in_checkpoints() -> None:
    def inner(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(attend, x, weight, use_reentrant=False)

    given = leaves()
    with sdpa(), kernels_run() as ran:
        checkpoint(inner, *given, use_reentrant=False).square().sum().backward()
    assert {x.kernel for x in ran} == set(OURS) and len(ran) >= 2
    for x, y in zip(given, expected(), strict=True):
        torch.testing.assert_close(x.grad, y, atol=2e-5, rtol=2e-5)


def test_an_error_of_torch_stays_the_same() -> None:
    x = torch.ones(3)
    for call in (x.sum().backward, lambda: torch.autograd.grad(x.sum(), x)):
        with pytest.raises(RuntimeError, match="does not require grad") as outside:
            call()
        with sdpa(), pytest.raises(RuntimeError) as inside:
            call()
        assert str(inside.value) == str(outside.value)


# -- a backward outside, and threads --------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_decorated_function_and_a_backward_outside(use_reentrant: bool) -> None:
    given = leaves()
    with kernels_run() as ran:
        out = checkpoint(sdpa()(attend), *given, use_reentrant=use_reentrant)
        out.square().sum().backward()
    assert [x.kernel for x in ran] == OURS * 2
    for x, y in zip(given, expected(), strict=True):
        torch.testing.assert_close(x.grad, y, atol=2e-5, rtol=2e-5)


def test_a_backward_outside_of_the_context_is_refused_by_torch() -> None:
    with sdpa():
        out = checkpoint(attend, *leaves(), use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()


def test_a_thread() -> None:
    with sdpa(), kernels_run() as ran:
        for target, count in ((attend, 0), (sdpa()(attend), 1)):
            thread = Thread(target=target, args=leaves())
            thread.start()
            thread.join()
            assert len(ran) == count


def test_a_decorator_keeps_the_name_and_works_when_compiled() -> None:
    @sdpa()
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        """Of a layer."""
        return attend(x, weight)

    assert (layer.__name__, layer.__doc__) == ("layer", "Of a layer.")
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    given = leaves()
    out = torch.compile(layer, backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(out, attend(*given))
    assert "flash_mask_cute.attention_fwd" in graphs[0]


def test_functions_that_run_after_their_call_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"runs after its call returns: write `with sdpa\(\):`"):
            sdpa()(function)
