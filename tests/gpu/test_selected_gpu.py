"""A selection of key blocks for each query on a GPU, against the dense mask that it states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from drawn_selections import Drawn, assert_close, dense_attention, draw, regroup
from drawn_share import Draws
from oracle import attend_rows
from public_call import capture, no_waiting
from torch import Tensor

from flash_mask_cute import (
    BwdConfig,
    SelectedBlocks,
    compile_count,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

DRAWN = Draws.of("SELECTED", 48, 0)

# FLASH_MASK_SELECTED_DRAWS=2000: once, for a change of the kernels
# with kernels of their own, which take longer to compile than many draws to run
KINDS = 24
HEAD_DIMS = 64, 128


def on_gpu(drawn: Drawn, dtype: torch.dtype) -> Drawn:
    q, k, v = (x.to("cuda", dtype) for x in drawn[:3])
    chosen = SelectedBlocks(drawn.selected.indices.cuda(), drawn.selected.block_size)
    keywords = {
        name: x.cuda() if isinstance(x, Tensor) else x for name, x in drawn.keywords.items()
    }
    visible = [x.cuda() for x in drawn.visible]
    return drawn._replace(q=q, k=k, v=v, selected=chosen, keywords=keywords, visible=visible)


def attend(drawn: Drawn, **more: Any) -> Any:
    call = flash_attn_varlen_func if drawn.is_packed else flash_attn_func
    given = drawn.keywords | {"block_sparse_tensors": drawn.selected} | more
    return call(drawn.q, drawn.k, drawn.v, **given)


def results_of(function: Any, drawn: Drawn) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in drawn[:3]]
    out = function(drawn._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    gen = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=gen).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.shares(4)
@pytest.mark.parametrize("seed", range(DRAWN.most))
def test_draws(seed: int) -> None:
    kind = seed % KINDS
    drawn = draw(seed, HEAD_DIMS[kind % len(HEAD_DIMS)], (4, 8, 16, 32, 64, 128), 600, kind)
    in_bf16 = on_gpu(drawn, torch.bfloat16)
    check(in_bf16, ({}, {"deterministic": True}), f"seed {seed}")


def check(drawn: Drawn, calls: Sequence[dict[str, Any]], name: str) -> None:
    """At most twice the error of torch in the same dtype, in units of the largest value."""
    exact = [x.double() for x in drawn[:3]]
    wanted, eager = (
        results_of(lambda x: dense_attention(x)[0], x)
        for x in (drawn._replace(q=exact[0], k=exact[1], v=exact[2]), drawn)
    )
    for more in calls:
        got = results_of(partial(attend, **more), drawn)
        for what, *of in zip(("out", "dq", "dk", "dv"), got, wanted, eager, strict=True):
            assert_close(*of, f"{name}: {what}")


@pytest.mark.shares(2)
@pytest.mark.parametrize(
    ("group", "head_dim", "block", "seed"),
    [
        (4, 128, 128, 1),
        (4, 64, 64, 2),
        (8, 128, 64, 3),
        (16, 128, 128, 4),
        (16, 64, 64, 5),
        (64, 128, 256, 6),
        (1, 128, 512, 7),
        (2, 128, 64, 8),
        (12, 128, 128, 9),
        (6, 64, 128, 10),
        (8, 96, 64, 11),
        (4, 192, 128, 12),
        (8, 256, 64, 13),
    ],
)
def test_draws_by_query_lists(group: int, head_dim: int, block: int, seed: int) -> None:
    """Groups and blocks that a backward takes as query lists."""
    regrouped = regroup(draw(1000 + seed, 8, (128,), 900), group, head_dim, block)
    check(on_gpu(regrouped, torch.bfloat16), ({},), f"seed {seed}")


@pytest.mark.parametrize("has_mod", [False, True])
def test_query_lists_of_a_long_sequence(has_mod: bool) -> None:
    """Lists in many segments give the gradients that bits give."""
    q, k, v, selection = family(8192)
    selection[..., 0] = 0
    more: dict[str, Any] = {"causal": True, "block_sparse_tensors": SelectedBlocks(selection, 128)}
    if has_mod:
        more["mask_mod"] = lambda b, h, i, j: (i - j) % 64 != 1
    assert_as_by_bits(partial(flash_attn_func, **more), (q, k, v), runs=3)


def assert_as_by_bits(
    attend: Callable[..., Any], qkv: tuple[Tensor, ...], learned: tuple[Tensor, ...] = (),
    runs: int = 1,
) -> None:  # fmt: skip
    """Gradients by query lists, also of what is learned, are those by bits."""
    seed = torch.Generator().manual_seed(1)
    dout = torch.randn(qkv[0].shape, generator=seed).bfloat16().cuda()

    def gradients(**config: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        return torch.autograd.grad(attend(*leaves, **config), [*leaves, *learned], dout)

    by_bits = gradients(config=(None, BwdConfig(skip_blocks=True)))
    for _ in range(runs):
        for x, y in zip(gradients(), by_bits, strict=True):
            assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm()


@pytest.mark.parametrize("heads", [(16, 1), (12, 1), (4, 4)])
def test_mods_by_head_with_gradients(heads: tuple[int, int]) -> None:
    """By query lists as by bits: a mask_mod and a score_mod that use heads, a learned tensor."""
    q, k, v, selection = family(2048, heads)
    slopes = torch.rand(heads[0], device="cuda", requires_grad=True)
    attend = partial(
        flash_attn_func, causal=True, block_sparse_tensors=SelectedBlocks(selection, 128),
        mask_mod=lambda b, h, i, j: (i + j) % 7 != h,
        score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j) * 0.01,
    )  # fmt: skip
    assert_as_by_bits(attend, (q, k, v), (slopes,))


@pytest.mark.parametrize(("heads", "block"), [((16, 1), 128), ((16, 1), 64), ((8, 8), 512)])
def test_a_fixed_order_has_equal_bits(heads: tuple[int, int], block: int) -> None:
    """In 20 runs, of which every second has fewer SMs than the GPU has."""
    q, k, v, selection = family(8192, heads, block)
    selection[..., 0] = 0
    chosen = SelectedBlocks(selection, block)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True, block_sparse_tensors=chosen, deterministic=True)
    first = torch.autograd.grad(out, leaves, q, retain_graph=True)
    beside = torch.cuda.Stream()
    for run in range(20):
        if run % 2:
            with torch.cuda.stream(beside):
                x = torch.randn(4096, 4096, device="cuda")
                for _ in range(4):
                    x = x @ x
        for x, y in zip(first, torch.autograd.grad(out, leaves, q, retain_graph=True), strict=True):
            assert torch.equal(x, y), run


def test_a_graph_of_a_backward_reads_the_choice_anew() -> None:
    q, k, v, selection = family(1024)
    chosen = SelectedBlocks(selection, 128)
    leaf = k.detach().requires_grad_()

    def run() -> Tensor:
        out = flash_attn_func(q, leaf, v, causal=True, block_sparse_tensors=chosen)
        (dk,) = torch.autograd.grad(out, leaf, q)
        return dk

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        dk = run()
    for seed in range(3):
        torch.manual_seed(seed)
        selection.copy_(torch.randint(-1, 9, selection.shape, device="cuda"))
        graph.replay()
        again = run()
        # sums of dK have no order
        assert (dk.float() - again.float()).norm() <= 1e-2 * again.float().norm()


def family(n: int, heads: tuple[int, int] = (16, 1), block: int = 128, k: int = 16) -> Any:
    gen = torch.Generator().manual_seed(n)
    q, key, v = (
        torch.randn(1, n, h, 128, generator=gen).bfloat16().cuda()
        for h in (heads[0], heads[1], heads[1])
    )
    own = (torch.arange(n) // block)[:, None]
    selection = torch.randint(0, n // block + 1, (n, k), generator=gen).minimum(own)
    return q, key, v, selection.expand(1, heads[1], n, k).clone().cuda()


def test_no_synchronization_and_no_compilation_for_other_contents() -> None:
    """Nor for other lengths and other numbers of chosen blocks."""
    q, k, v, selection = family(1024)

    def step(selection: Tensor, n: int) -> None:
        leaf = q[:, :n].detach().requires_grad_()
        chosen = SelectedBlocks(selection[:, :, :n], 128)
        out = flash_attn_func(leaf, k[:, :n], v[:, :n], causal=True, block_sparse_tensors=chosen)
        out.sum().backward()

    step(selection, 1024)
    before = compile_count()
    with no_waiting():
        step(selection.flip(2), 1024)
        step(selection[..., :3], 1024)
        step(selection, 640)
    assert compile_count() == before


def test_a_graph_reads_the_choice_anew() -> None:
    q, k, v, selection = family(1024)
    chosen = SelectedBlocks(selection, 128)

    def run() -> Tensor:
        return flash_attn_func(q, k, v, causal=True, block_sparse_tensors=chosen)

    graph, out = capture(run)
    for seed in range(3):
        torch.manual_seed(seed)
        selection.copy_(torch.randint(-1, 9, selection.shape, device="cuda"))
        graph.replay()
        assert torch.equal(out, run())


def test_numbers_that_do_not_exist() -> None:
    """They stand for nothing, and never become an address."""
    q, k, v, selection = family(512, k=4)
    wild = torch.tensor([2**62, -(2**62), 4, 1 << 31], device="cuda")
    far = torch.cat((selection, wild.expand(*selection.shape[:3], 4)), -1)
    outs = [
        flash_attn_func(q, k, v, causal=True, block_sparse_tensors=SelectedBlocks(x, 128))
        for x in (selection, far)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(("page_size", "block"), [(16, 128), (128, 128), (16, 4), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_decoding_over_pages(page_size: int, block: int, queries: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(page_size)
    batch, n = 3, 2048
    pages = n // page_size
    table = torch.randperm(batch * pages, generator=gen).view(batch, pages)
    k, v = (torch.randn(batch, n, 4, 128, generator=gen).to(dtype) for _ in range(2))
    used = torch.tensor([2048, 700, 5], dtype=torch.int32)
    pools = []
    for x in (k, v):
        pool = torch.empty(batch * pages, page_size, 4, 128, dtype=torch.bfloat16)
        pool[table] = x.bfloat16().unflatten(1, (pages, page_size))
        pools.append(pool.cuda().to(dtype))
    q = torch.randn(batch, queries, 64, 128, generator=gen).bfloat16()
    shape = batch, 4, queries, 768 // block
    selection = torch.randint(-1, n // block + 1, shape, generator=gen).int()
    given: dict[str, Any] = {"causal": True}
    in_pages = {
        "cache_seqlens": used.cuda(),
        "page_table": table.int().cuda(),
        "block_sparse_tensors": SelectedBlocks(selection.cuda(), block),
    }
    out = flash_attn_with_kvcache(q.cuda(), *pools, **given, **in_pages)
    in_rows = {"cache_seqlens": used, "block_sparse_tensors": SelectedBlocks(selection, block)}
    wanted = flash_attn_with_kvcache(*(x.double() for x in (q, k, v)), **given, **in_rows)
    assert (out.cpu().double() - wanted).abs().amax() < 2e-2


@pytest.mark.parametrize("queries", [1, 3])
def test_a_decoding_graph_reads_lengths_and_choices_anew(queries: int) -> None:
    """It appends to K and V that lie beside each other in one pool, heads before keys."""
    gen = torch.Generator().manual_seed(queries)
    pool = torch.randn(12, 2, 64, 2 * 128, generator=gen).bfloat16().cuda()
    q = torch.randn(2, queries, 16, 128, generator=gen).bfloat16().cuda()
    new = torch.randn(2, 2, queries, 2, 128, generator=gen).bfloat16().cuda()
    table = torch.randperm(12, generator=gen).int().view(2, 6).cuda()
    lengths = torch.tensor([100, 7], dtype=torch.int32, device="cuda")
    selection = torch.zeros(2, 2, queries, 3, dtype=torch.int32, device="cuda")

    def step(pool: Tensor, of: Any = lambda x: x) -> Tensor:
        out = flash_attn_with_kvcache(
            of(q),
            *pool.transpose(1, 2).split(128, -1),
            k=of(new[0]),
            v=of(new[1]),
            cache_seqlens=of(lengths),
            page_table=of(table),
            causal=True,
            block_sparse_tensors=SelectedBlocks(of(selection), 64),
        )
        assert isinstance(out, Tensor)
        return out

    def exact(x: Tensor) -> Tensor:
        return x.cpu().double() if x.is_floating_point() else x.cpu()

    graph, out = capture(lambda: step(pool))
    for seed in range(4):
        torch.manual_seed(seed)
        lengths.copy_(torch.randint(0, 380, (2,)))
        selection.copy_(torch.randint(-1, 8, selection.shape))
        new.copy_(torch.randn(new.shape))
        left = exact(pool)
        graph.replay()
        wanted = step(left, exact)
        assert (out.cpu().double() - wanted).abs().amax() < 2e-2
        assert torch.equal(exact(pool), left)


@pytest.mark.parametrize("block", [64, 128])
def test_heads_that_share_a_tile_share_a_mask_mod(block: int) -> None:
    q, k, v, selection = family(1024, block=block)
    i, j = torch.arange(1024, device="cuda")[:, None], torch.arange(1024, device="cuda")
    out = flash_attn_func(
        *(q, k, v),
        causal=True,
        mask_mod=lambda b, h, i, j: (i - j) % 64 != 1,
        block_sparse_tensors=SelectedBlocks(selection, block),
    )
    chosen = (selection[0, 0, :, :, None] == j // block).any(1)
    visible = chosen & (j <= i) & ((i - j) % 64 != 1)
    wanted = attend_rows(q[0], k[0], v[0], visible).out
    assert (out[0].double() - wanted).abs().amax() < 2e-2
