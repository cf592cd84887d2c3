"""Selections over fp8 caches, in rows or pages, against float64 over what the codes stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from drawn_selections import dense_selection, draw_selection
from fp8_caches import Fp8Call, Fp8Case, make_call
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import SelectedBlocks, flash_attn_varlen_func, flash_attn_with_kvcache

DRAWS, PARTS = 200, 4
SIZES = (4, 8, 16, 32, 64)
SCALES = ("none", "head", "expanded", "token")


def draw_call(seed: int) -> tuple[Fp8Call, SelectedBlocks, list[int]]:
    """A call with up to three sequences, decoding or prefill; the lengths of its sequences."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    heads_kv, queries = rng.choice((1, 2)), rng.choice((1, 1, 3, 40))
    lengths = tuple(rng.randint(queries, 90) for _ in range(rng.choice((1, 2, 3))))
    case = Fp8Case(
        "drawn", 32, rng.choice((16, 32)), queries, (heads_kv * rng.choice((1, 3, 4)), heads_kv),
        lengths, 96, (rng.choice(SCALES), rng.choice(SCALES)), rng.choice((None, 1, 7, 16, 64)),
        rng.choice((torch.bfloat16, torch.float16)), {"causal": rng.random() < 0.7},
    )  # fmt: skip
    block = rng.choice(SIZES)
    heads = rng.choice((1, heads_kv, case.heads[0]))
    shape = (rng.choice((1, len(lengths))), heads, queries, rng.choice((1, 2, 5)))
    selection = draw_selection(gen, shape, -(-90 // block), rng.choice((torch.int32, torch.int64)))
    return make_call(case, seed), SelectedBlocks(selection, block), list(lengths)


def exact(call: Fp8Call, selected: SelectedBlocks, lengths: list[int]) -> Tensor:
    """Dense attention in float64; queries are at the end of their sequences."""
    table, outs = call.keywords.get("page_table"), []
    for b, n in enumerate(lengths):
        rows = [x[b] if table is None else x[table[b].long()].flatten(0, 1) for x in call.numbers]
        q, k, v = call.q[b], rows[0][:n], rows[1][:n]
        indices = selected.indices[min(b, len(selected.indices) - 1)]
        seen = dense_selection(indices, selected.block_size, n)
        seen = seen.repeat_interleave(q.shape[1] // len(seen), 0)
        if call.keywords["causal"]:
            seen = seen & (torch.arange(n) <= torch.arange(len(q))[:, None] + n - len(q))
        outs.append(attend_rows(q, k, v, seen).out)
    return torch.stack(outs)


def check(seed: int) -> None:
    call, selected, lengths = draw_call(seed)
    wanted = exact(call, selected, lengths)
    keywords: dict[str, Any] = {**call.keywords, **call.descales, "block_sparse_tensors": selected}
    out = flash_attn_varlen_func(call.q, *call.codes, **keywords)
    step = 2.0 ** (-8 if out.dtype == torch.bfloat16 else -10)
    assert ((out.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all(), seed
    used = keywords.pop("seqused_k")
    of_cache: Any = flash_attn_with_kvcache(call.q, *call.codes, cache_seqlens=used, **keywords)
    assert torch.equal(of_cache, out), seed


@pytest.mark.parametrize("part", range(PARTS))
def test_draws_against_float64(part: int) -> None:
    for seed in range(part, DRAWS, PARTS):
        check(seed)


def test_new_rows_of_a_cache_are_selected() -> None:
    """Four rows that the call writes, which the last queries choose."""
    call = make_call(Fp8Case("append", 32, 16, 4, (4, 2), (57, 30), 96, ("token", "head"), 16))
    gen = torch.Generator().manual_seed(3)
    new = [torch.randn(2, 4, 2, d, generator=gen).bfloat16() for d in (32, 16)]
    selected = SelectedBlocks(torch.randint(4, (2, 2, 4, 2), generator=gen), 16)
    used = call.keywords.pop("seqused_k")
    more: dict[str, Any] = {**call.keywords, "causal": True, "block_sparse_tensors": selected}

    def attend(appended: bool) -> Any:
        codes = [x.view(torch.uint8).clone().view(x.dtype) for x in call.codes]
        scales = {name: None if x is None else x.clone() for name, x in call.descales.items()}
        given: dict[str, Any] = more | scales
        k, v = codes
        out = flash_attn_with_kvcache(call.q, k, v, k=new[0], v=new[1], cache_seqlens=used, **given)
        if appended:
            return out
        return flash_attn_with_kvcache(call.q, k, v, cache_seqlens=used + 4, **given)

    assert torch.equal(attend(True), attend(False))
