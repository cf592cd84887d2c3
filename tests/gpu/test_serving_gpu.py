"""A cache of keys and values on a GPU: right, the same in every replay, without waiting."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cache_calls import CacheCall, draw_call
from placed_attention import Draw
from public_call import capture, no_waiting
from torch import Tensor

from flash_mask_cute import (
    builders,
    compile_count,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

CUDA = torch.device("cuda")
BF16, INT = torch.bfloat16, torch.int32


def on_cuda(keywords: dict[str, Any]) -> dict[str, Any]:
    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(CUDA)
        if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x):
            return type(x)(*map(move, x))
        return x

    return {name: move(x) for name, x in keywords.items()}


def check_cache_call(call: CacheCall) -> None:
    """Also where neighbours are NaN, in rows that are not in use."""
    keywords = on_cuda(call.keywords)
    out, lse = flash_attn_with_kvcache(call.q.to(CUDA), **keywords, return_lse=True)
    call.assert_close(out, lse)
    call.assert_written(keywords["k_cache"], keywords["v_cache"], atol=0.04)


# new rows or none, rotary, entries, padding, both of tables, pages of 1, 5, 64, 128 and 256 keys,
# one query and several
SEEDS = 0, 1, 2, 3, 5, 9, 12, 14, 16, 19, 23, 30


@pytest.mark.shares(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(seed: int) -> None:
    sizes = (1, 5, 16, 64, 128, 256)
    check_cache_call(draw_call(random.Random(seed), BF16, 64, 700, sizes))


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_keys_and_values_take_turns_in_a_buffer(axis: int) -> None:
    """By page, by row, and within a row of all heads: with the bits of separate pools."""
    found = 0
    rng = random.Random(axis)
    while found < 2:
        call = draw_call(rng, BF16, 64, 300, (5, 16, 128))
        if "k" not in call.keywords or "page_table" not in call.keywords:
            continue
        found += 1
        keywords = on_cuda(call.keywords)
        expected = flash_attn_with_kvcache(call.q.to(CUDA), **on_cuda(call.keywords))
        names = ("k_cache", "v_cache")
        buffer = torch.stack([keywords[name] for name in names], dim=axis)
        keywords |= {name: buffer.select(axis, i) for i, name in enumerate(names)}
        assert torch.equal(flash_attn_with_kvcache(call.q.to(CUDA), **keywords), expected)
        call.assert_written(keywords["k_cache"], keywords["v_cache"], atol=0.04)


# Seed of `Draw` and number of a call: "end" with intervals, lists and a score_mod; a tensor;
# queries before position 0; a number; windows and lists of packed queries.
PLACED = (0, 8), (1, 11), (5, 3), (3, 7), (4, 4)


@pytest.mark.parametrize(("seed", "number"), PLACED)
def test_q_start(seed: int, number: int) -> None:
    """All masks from a position on, forward and backward."""
    draw = Draw(seed, BF16, 64, 200)
    *_, call = draw.calls(number + 1)
    q, k, v = (x.to(CUDA) for x in (call.q, call.k, call.v))
    keywords = on_cuda(call.keywords)
    out, lse = _flash_attn_fwd(q, k, v, **keywords)
    assert lse is not None
    call.assert_output(out.cpu(), lse.cpu())
    dout = draw.normal(*out.shape)
    found = _flash_attn_bwd(q, k, v, out, dout.to(CUDA), lse, **keywords)
    call.assert_gradients(tuple(x.cpu() for x in found), dout)


class Decoding:
    """One token a sequence, appended to pages, under a mask that the whole context has.

    is_placed: the table has a row more, sequences have any of its rows, and their first key is
    behind padding.
    """

    def __init__(
        self, batch: int, pages: int, page_size: int, seed: int = 0, is_placed: bool = False
    ) -> None:
        generator = torch.Generator(CUDA).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=CUDA).to(BF16)

        rows = batch + is_placed
        self.table = torch.randperm(rows * pages, generator=generator, device=CUDA)
        self.table = self.table.view(rows, pages).to(INT)
        self.rows = torch.randperm(rows, generator=generator, device=CUDA)[:batch].to(INT)
        self.padding = torch.arange(batch, dtype=INT, device=CUDA) * 5 * is_placed
        self.where = {"page_table": self.table}
        if is_placed:
            self.where |= {"cache_batch_idx": self.rows, "cache_leftpad": self.padding}
        else:
            self.rows.copy_(torch.arange(batch))
        shape = (rows * pages, page_size, 2, 64)
        self.k_cache, self.v_cache = normal(*shape), normal(*shape)
        self.q, self.k, self.v = (
            normal(batch, 1, 8, 64),
            normal(batch, 1, 2, 64),
            normal(batch, 1, 2, 64),
        )
        self.seqlens = self.padding.clone()
        self.capacity = pages * page_size
        self.mask = builders.sink_window(self.capacity, 4, 70, device=CUDA)

    def step(self) -> Tensor:
        out = flash_attn_with_kvcache(
            self.q, self.k_cache, self.v_cache, self.k, self.v, cache_seqlens=self.seqlens,
            **self.where, causal=True, startend_row_indices=self.mask,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def expected(self) -> Tensor:
        """After a step, in float64."""
        outs = []
        for b, n in enumerate((self.seqlens + 1).tolist()):
            pages, padding = self.table[self.rows[b]].long(), int(self.padding[b])
            k, v = (
                cache[pages].flatten(0, 1)[padding:n].double().repeat_interleave(4, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            n -= padding
            scores = torch.einsum("qhd,khd->hqk", self.q[b].double(), k) / 8
            j = torch.arange(n, device=CUDA)
            hidden = (j >= 4) & (j < n - 1 - 70)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.stack(outs)


@pytest.mark.parametrize("is_placed", [False, True])
def test_one_graph_for_every_length(is_placed: bool) -> None:
    x = Decoding(3, 30, 16, is_placed=is_placed)
    graph, out = capture(x.step)
    for step in range(200):
        lengths = torch.tensor([step * 2, 479 - step, (step * 37) % 480], dtype=INT)
        x.seqlens.copy_(torch.maximum(lengths, x.padding.cpu()))
        if step % 50 == 10 and is_placed:
            x.rows.copy_(x.rows.roll(1))
            x.padding.copy_(x.padding.roll(1))
            x.seqlens.copy_(torch.maximum(x.seqlens, x.padding))
        if step % 50 == 25:
            # other pages in other places
            x.table.copy_(x.table.flatten().roll(7).view_as(x.table))
        graph.replay()
        torch.testing.assert_close(out.double(), x.expected(), atol=0.02, rtol=0.02)


def test_nothing_is_compiled_and_nobody_waits() -> None:
    """Other batches, lengths and pages, of tables walked in one pass and of shared ones."""
    for pages in (8, 40):
        Decoding(2, pages, 16).step()
    cases = [
        Decoding(batch, pages, 16, batch) for batch, pages in ((1, 8), (5, 3), (3, 50), (1, 90))
    ]
    for pages in (8, 40):
        Decoding(2, pages, 16, is_placed=True).step()
    cases += [Decoding(batch, pages, 16, batch, True) for batch, pages in ((5, 3), (1, 90))]
    torch.cuda.synchronize()
    count = compile_count()
    with no_waiting():
        outs = [case.step() for case in cases]
    assert compile_count() == count
    for case, out in zip(cases, outs, strict=True):
        torch.testing.assert_close(out.double(), case.expected(), atol=0.02, rtol=0.02)


@pytest.mark.shares(2)
@pytest.mark.parametrize("head_dim", [8, 40, 72, 112, 192, 256])
def test_page_sizes_that_8_does_not_divide(head_dim: int) -> None:
    """Also where tiles have more columns than the heads."""
    for seed, size in ((1, 3), (24, 1), (30, 20)):
        check_cache_call(draw_call(random.Random(seed), BF16, head_dim, 400, (size,)))


def test_a_call_that_fails_has_written_nothing() -> None:
    """The mod is found wrong when the kernel is compiled."""
    x = Decoding(2, 8, 16)
    before = x.k_cache.clone(), x.v_cache.clone()

    def wrong(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return aux[3][k[0]] > 0

    with pytest.raises(Exception, match="aux|index"):
        flash_attn_with_kvcache(
            x.q, x.k_cache, x.v_cache, x.k, x.v, cache_seqlens=x.seqlens, page_table=x.table,
            mask_mod=wrong, aux_tensors=[torch.ones(4, device=CUDA)],
        )  # fmt: skip
    assert torch.equal(before[0], x.k_cache) and torch.equal(before[1], x.v_cache)


def test_prefill_and_decode_in_one_call() -> None:
    generator = torch.Generator(CUDA).manual_seed(3)
    pool_k, pool_v = (
        torch.randn(40, 16, 2, 64, generator=generator, device=CUDA).to(BF16) for _ in "kv"
    )
    table = torch.randperm(40, generator=generator, device=CUDA).view(4, 10).to(INT)
    lengths, new = [150, 160, 3, 90], [1, 130, 2, 1]
    q = torch.randn(sum(new), 8, 64, generator=generator, device=CUDA).to(BF16)
    starts = torch.tensor([0, 1, 131, 133, 134], dtype=INT, device=CUDA)
    used = torch.tensor(lengths, dtype=INT, device=CUDA)
    out = flash_attn_varlen_func(
        q, pool_k, pool_v, starts, max_seqlen_q=130, seqused_k=used, page_table=table, causal=True
    )
    for b, rows in enumerate(out.split(new)):
        k, v = (x[table[b].long()].flatten(0, 1)[None, : lengths[b]] for x in (pool_k, pool_v))
        expected = flash_attn_func(q.split(new)[b][None].double().cpu(), k.double().cpu(),
                                   v.double().cpu(), causal=True)  # fmt: skip
        torch.testing.assert_close(rows[None].double().cpu(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("head_dim", [8, 264, 512])
@pytest.mark.parametrize("is_dense", [False, True])
def test_parts_are_combined_into_the_callers_memory(head_dim: int, is_dense: bool) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    outs = torch.randn(9, 2, 33, 3, head_dim, generator=generator).to(BF16)
    lses = torch.randn(9, 2, 33, 3, generator=generator)
    memory = torch.full((2, 33, 3, head_dim + (not is_dense)), 7.0, device=CUDA)[..., -head_dim:]
    version = memory._version
    out, lse = flash_attn_combine(outs.to(CUDA), lses.to(CUDA), memory)
    expected, expected_lse = flash_attn_combine(outs, lses, out_dtype=torch.float32)
    assert out is memory and memory._version > version
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert lse is not None and expected_lse is not None
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=1e-5)


def test_parts_that_the_kernel_does_not_take() -> None:
    outs, lses = torch.ones(2, 5, 3, 520, device=CUDA), torch.zeros(2, 5, 3, device=CUDA)
    with pytest.raises(NotImplementedError, match="out_partial must have a head_dim .* got 520"):
        flash_attn_combine(outs, lses)
    with pytest.raises(TypeError, match="out_dtype must be float32, .* got torch.float64"):
        flash_attn_combine(outs[..., :8], lses, out_dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_parts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(5, 2, 33, 3, 64, generator=generator).to(dtype)
    lses = torch.randn(5, 2, 33, 3, generator=generator) * 4
    lses[1, 0], lses[:, 1, 4] = float("-inf"), float("-inf")
    outs[1, 0] = float("nan")
    on_cpu = [outs.clone().requires_grad_(), lses.clone().requires_grad_()]
    on_gpu = [x.to(CUDA).requires_grad_() for x in (outs, lses)]
    results = []
    for leaves in (on_cpu, on_gpu):
        out, lse = flash_attn_combine(*leaves, out_dtype=torch.float32)
        assert lse is not None
        loss = (out * out).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
        results.append([x.cpu() for x in (out, lse, *torch.autograd.grad(loss, leaves))])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
