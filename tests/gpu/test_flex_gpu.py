"""flex_attention on a GPU: values and gradients, CUDA graphs, compiled regions, maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import waves
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask

from flash_mask_cute import ColumnMask, flash_attn_func, flex_attention, keep_block_mask

# Allocations are not poisoned: Dynamo looks up torch's functions once in a process, and would find
# those that poison.

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
    """Of a kept mask, captured before and after what it becomes is known; replayed."""
    mod = MODS[name]()
    q, k, v = (x.detach() for x in tensors())
    # compiles; of another object where the mask is not to be known
    known = keep_block_mask(mask_of(mod))
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


def in_one_block(size: int, mod: Mod) -> BlockMask:
    """All blocks are partial, so that the mod decides alone."""
    blocks = -(-N // size)
    count = torch.full((1, 1, blocks), blocks, device="cuda", dtype=torch.int32)
    index = torch.arange(blocks, device="cuda", dtype=torch.int32).repeat(1, 1, blocks, 1)
    return BlockMask.from_kv_blocks(count, index, None, None, size, mod, (N, N))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize("heads", [4, 2])
def test_a_replay_sees_other_contents(heads: int, size: int, inference: bool) -> None:
    """Ids, a number and lists are written to after the capture; two heads; blocks of 64."""
    with torch.inference_mode(inference):
        ids = torch.arange(N, device="cuda") // 150
        most = torch.tensor(N, device="cuda")

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (ids[q] == ids[k]) & (k < most)

        q, k, v = (x.detach()[:, :heads].clone() for x in tensors())
        mask = in_one_block(size, mod)
        for _ in range(2):
            out = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out.double(), expected(q, k, v, mod), rtol=2e-2, atol=2e-2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flex_attention(q, k, v, block_mask=mask)
        for length, keys in ((90, N), (90, 600), (1 << 20, 333)):
            ids.copy_(torch.arange(N, device="cuda") // length)
            most.fill_(keys)
            # a permutation of the blocks, of which the last one is cut off where nothing is seen
            order = torch.randperm(mask.kv_indices.shape[-1], device="cuda").int()
            mask.kv_indices.copy_(order.expand_as(mask.kv_indices))
            for _ in range(2):
                graph.replay()
                wanted = expected(q, k, v, lambda *at: mod(*at)).nan_to_num()
                torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
                eager = flex_attention(q, k, v, block_mask=mask)
                torch.testing.assert_close(eager.double(), wanted, rtol=2e-2, atol=2e-2)
        # no block of any row
        mask.kv_num_blocks.zero_()
        graph.replay()
        assert (out == 0).all()
        assert (flex_attention(q, k, v, block_mask=mask) == 0).all()


def rewritten(way: str, tensor: Tensor, new: Tensor) -> None:
    """By ways that torch does not count."""
    if way == "data":
        tensor.data = new.clone()
    elif way == "through data":
        tensor.data.copy_(new)
    else:
        with torch.inference_mode():
            tensor.copy_(new)


@pytest.mark.parametrize("way", ["data", "through data", "inference"])
def test_contents_that_change_unseen(way: str) -> None:
    with torch.inference_mode(way == "inference"):
        ids = torch.arange(N, device="cuda") // 150
        mod: Mod = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
        mask = in_one_block(128, mod)
        q, k, v = (x.detach() for x in tensors())
        for length in (150, 90, 333):
            rewritten(way, ids, torch.arange(N, device="cuda") // length)
            out = flex_attention(q, k, v, block_mask=mask)
            wanted = expected(q, k, v, mod)
            torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("captures", [False, True])
def test_a_column_mask_of_inference_mode(captures: bool) -> None:
    with torch.inference_mode():
        rows = torch.full((1, 1, N, 1), N, dtype=torch.int32, device="cuda")
        mask = ColumnMask(rows, True)
        q, k, v = (x.detach() for x in tensors())
        flat = [x.transpose(1, 2) for x in (q, k, v)]
        call: Callable[[], Tensor] = lambda: flash_attn_func(*flat, startend_row_indices=mask)  # noqa: E731
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captures:
            with torch.cuda.graph(graph):
                out = call()
        for length in (150, 90):
            at = torch.arange(N, device="cuda")
            rows.copy_(((at // length + 1) * length).view_as(rows))
            if captures:
                graph.replay()
            else:
                out = call()
            ids = at // length
            wanted = expected(q, k, v, lambda b, h, q, k, ids=ids: (q >= k) & (ids[q] == ids[k]))
            found = out.transpose(1, 2).double()
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("has_full", [False, True])
def test_lists_are_ordered_on_the_device(has_full: bool) -> None:
    from flash_mask_cute.block_sparsity import _make_bits, block_bits
    from flash_mask_cute.flex.block_mask import _sorted_lists, lists_of

    g = torch.Generator().manual_seed(0)
    states = torch.randint(0, 3 if has_full else 2, (2, 3, 7, 77), generator=g)
    lists: list[Any] = []
    for state in (1, 2):
        is_listed = states == state
        index = (torch.rand(states.shape, generator=g) + 2 * ~is_listed).argsort(-1)
        lists += [is_listed.sum(-1).cuda(), index.cuda()] if state == 1 or has_full else [None] * 2
    mask = BlockMask.from_kv_blocks(*lists, 16, causal, (112, 77 * 16), compute_q_blocks=False)
    made = lists_of(mask)
    wanted = _sorted_lists(made._replace(**dict(zip(made._fields[:4], lists, strict=True))))
    for got, right in zip(made[:4], wanted[:4], strict=True):
        assert got is right is None or torch.equal(got, right)
    for got, right in zip(block_bits(made)[:2], _make_bits(wanted)[:2], strict=True):
        assert torch.equal(got, right)


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
