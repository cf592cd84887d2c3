"""flex_attention on a GPU: values and gradients, CUDA graphs, compiled regions, maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import waves
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask

from flash_mask_cute import flash_attn_func, flex_attention

# Allocations are not poisoned: Dynamo looks up torch's functions once in a process, and would find
# those that poison.
pytestmark = pytest.mark.gpu

N = 700
Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(length: int) -> Mod:
    ids = torch.arange(N, device="cuda") // length
    return and_masks(causal, lambda b, h, q, k: ids[q] == ids[k])


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((q - k) % 3 != 1)


MODS = {"band": lambda: causal, "ids": lambda: documents(150), "mod": lambda: strided}


def mask_of(mod: Mod) -> BlockMask:
    return create_block_mask(mod, None, None, N, N, device="cuda")


def tensors() -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    shape, kind = (2, 4, N, 64), {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(shape, generator=g, **kind).requires_grad_() for _ in range(3)]  # type: ignore[call-overload]


def expected(q: Tensor, k: Tensor, v: Tensor, mod: Mod, bias: Any = 0) -> Tensor:
    """In float64."""
    at = torch.arange(N, device="cuda")
    visible = mod(*(torch.zeros((), device="cuda"),) * 2, at[:, None], at)
    scores = q.double() @ k.double().mT * 64**-0.5 + bias
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_both_directions(name: str, compiled: bool) -> None:
    mod = MODS[name]()
    torch._dynamo.reset()
    table = nn.Parameter(torch.randn(4, N, device="cuda"))
    q, k, v = tensors()

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[h, k]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, score_mod=biased, block_mask=mask)

    function = torch.compile(attend, fullgraph=True) if compiled else attend
    out = function(q, k, v, mask_of(mod))
    wanted = expected(q, k, v, mod, table.double()[:, None])
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    leaves = [q, k, v, table]
    for got, exact in zip(
        torch.autograd.grad(out.float().sum(), leaves),
        torch.autograd.grad(wanted.sum(), leaves),
        strict=True,
    ):
        error = (got.double() - exact.double()).norm() / exact.double().norm()
        assert error < 0.02


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_captured_graph(name: str, is_known: bool) -> None:
    """Captured before and after it is known what the mask becomes; replayed on other values."""
    mod = MODS[name]()
    q, k, v = (x.detach() for x in tensors())
    # compiles; of another object where the mask is not to be known
    known = mask_of(mod)
    flex_attention(q, k, v, block_mask=known)
    mask = known if is_known else mask_of(mod)
    with torch.no_grad():
        # the mask_mod's own kernel, which a capture may not compile
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        flash_attn_func(rows[0], rows[1], rows[2], mask_mod=mod, block_sparse_tensors=mask)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, block_mask=mask)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    wanted = expected(q, k, v, mod)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


def test_compiled_with_graphs() -> None:
    torch._dynamo.reset()
    function = torch.compile(flex_attention, fullgraph=True, mode="reduce-overhead")
    mask = mask_of(documents(150))
    with torch.no_grad():
        for _ in range(4):
            q, k, v = (torch.randn_like(x) for x in tensors())
            out = function(q, k, v, block_mask=mask)
            wanted = expected(q, k, v, documents(150))
            torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", MODS)
def test_maxima(name: str) -> None:
    """Also where bits of a mask are stored before, and where documents are packed."""
    mod = MODS[name]()
    q, k, v = (x.detach() for x in tensors())
    request = AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(q, k, v, block_mask=mask_of(mod), return_aux=request)
    at = torch.arange(N, device="cuda")
    visible = mod(*(torch.zeros((), device="cuda"),) * 2, at[:, None], at)
    scores = (q.double() @ k.double().mT * 64**-0.5).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    _, largest = flash_attn_func(rows[0], rows[1], rows[2], mask_mod=mod, return_max_logit=True)
    torch.testing.assert_close(largest.double(), scores.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", waves.BOUNDS)
def test_functions_in_kernels(name: str) -> None:
    """By the instructions themselves, whose errors the software GPU does not have."""
    x = waves.points().cuda()
    q, k, v = (torch.zeros(1, 1, x.numel(), 64, device="cuda").bfloat16() for _ in range(3))
    score_mod, mask_mod = waves.mods_of(waves.BOUNDS[name][0], x)
    mask = create_block_mask(mask_mod, None, None, x.numel(), x.numel(), device="cuda")
    aux = AuxRequest(lse=True)
    out, made = flex_attention(q, k, v, score_mod, mask, return_aux=aux)  # type: ignore[call-overload]
    assert made.lse is not None
    waves.assert_values(name, x, out[0, 0], made.lse.flatten())
