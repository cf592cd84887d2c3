"""One row has one set of bits on a GPU: decoded, in chunks, in pages, in training, anywhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from public_call import capture
from row_results import Results, distance_by, sees_some
from torch import Tensor

from flash_mask_cute import (
    builders,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

SEQLEN, KEYS = 20000, 2048
ROWS = (1, 2047, 2048, 2049, 4097, 12345, 20000)
# chunks of 1, 64 and 500 rows that begin anywhere
CHUNKS = ((4999, 1), (7001, 64), (12307, 500))
NEIGHBOURS = 255


def documents() -> Tensor:
    return builders.causal_document([3000, 9100, 7900], device="cuda").startend_row_indices


class Rows(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @staticmethod
    def create(dims: tuple[int, int], heads: tuple[int, int], **options: Any) -> Rows:
        torch.manual_seed(dims[0] + heads[0])
        q, k, v = (
            torch.randn(1, SEQLEN, of, d, dtype=torch.bfloat16, device="cuda")
            for of, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
        )
        if options.pop("has_sink", False):
            options["learnable_sink"] = torch.randn(heads[0], device="cuda")
        if options.pop("has_documents", False):
            options["startend_row_indices"] = documents()
        options = {"causal": True, "seqlen_k_per_split": KEYS, "return_lse": True} | options
        return Rows(q, k, v, options)

    def whole(self, records: bool) -> Results:
        q = self.q.clone().requires_grad_() if records else self.q
        return Results.of(flash_attn_func(q, self.k, self.v, **self.options))

    def chunk(self, first: int, count: int) -> Results:
        end = first + count
        q, k, v = self.q[:, first:end], self.k[:, :end], self.v[:, :end]
        options = dict(self.options)
        if "startend_row_indices" in options:
            options["startend_row_indices"] = options["startend_row_indices"][:, :, :end]
        return Results.of(flash_attn_func(q, k, v, q_start="end", **options))

    def decoded(self, end: int, neighbours: int, page_size: int | None) -> Results:
        """The row before `end`, as one of a batch at a place that `end` gives."""
        place, size = end % (neighbours + 1), page_size or SEQLEN
        pools, max_pages = [], -(-SEQLEN // size)
        q = torch.randn(neighbours + 1, 1, *self.q.shape[2:], device="cuda").bfloat16()
        q[place] = self.q[0, end - 1 : end]
        lengths = torch.randint(1, SEQLEN, (neighbours + 1,), device="cuda").int()
        lengths[place] = end
        table = torch.randperm((neighbours + 1) * max_pages, device="cuda").int()
        table = table.view(neighbours + 1, max_pages)
        for x in (self.k, self.v):
            pool = torch.randn(table.numel(), size, *x.shape[2:], device="cuda").bfloat16()
            own = x.new_full((max_pages * size, *x.shape[2:]), float("nan"))
            own[:end] = x[0, :end]
            pool[table[place].long()] = own.view(max_pages, size, *x.shape[2:])
            pools.append(pool if page_size else pool[table[:, 0].long()])
        more = {"page_table": table} if page_size else {}
        result = flash_attn_with_kvcache(q, *pools, cache_seqlens=lengths, **self.options, **more)
        out, lse = result
        return Results(out, lse).entry(place)


CASES: dict[str, Callable[[], Rows]] = {
    "d128-group8": lambda: Rows.create((128, 128), (8, 1)),
    "d64-window-sink-group3": lambda: Rows.create(
        (64, 64), (6, 2), window_size=(5000, 0), has_sink=True
    ),
    "d64-score_mod": lambda: Rows.create((64, 64), (2, 2), score_mod=distance_by(0.001)),
    "d128-mask_mod": lambda: Rows.create((128, 128), (2, 2), mask_mod=sees_some, causal=False),
    "d128-documents": lambda: Rows.create((128, 128), (4, 1), has_documents=True),
    "d192-softcap": lambda: Rows.create((192, 128), (2, 1), softcap=20.0),
    "d256-group3": lambda: Rows.create((256, 256), (3, 1)),
}


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", CASES)
def test_a_row_has_one_set_of_bits(case: str) -> None:
    rows = CASES[case]()
    whole = rows.whole(records=False)
    assert whole.has_bits_of(rows.whole(records=True))
    unlike = [
        (first, count)
        for first, count in CHUNKS
        if not whole.rows(first, first + count).has_bits_of(rows.chunk(first, count))
    ]
    # intervals have a row for each query of the whole sequence, and a cache one for each of its own
    ways = [(0, None), (NEIGHBOURS, None), (3, 1), (3, 16), (3, 128)]
    for end in () if "startend_row_indices" in rows.options else ROWS:
        for way in ways if end == ROWS[-2] else ways[::3]:
            if not whole.rows(end - 1, end).has_bits_of(rows.decoded(end, *way)):
                unlike.append((end, way))
    assert not unlike


def test_cuts_are_in_the_bits_and_a_graph_has_them() -> None:
    rows = Rows.create((128, 128), (8, 1))
    whole = rows.whole(records=False)
    other = rows._replace(options=rows.options | {"seqlen_k_per_split": 4096})
    assert not whole.has_bits_of(other.whole(records=False))
    cache = [x.clone() for x in (rows.k, rows.v)]
    q, lengths = torch.empty_like(rows.q[:, :1]), torch.ones(1, dtype=torch.int32, device="cuda")
    graph, result = capture(
        lambda: flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, **rows.options)
    )
    for end in (*ROWS, *range(77, SEQLEN, 103)):
        q.copy_(rows.q[:, end - 1 : end])
        lengths.fill_(end)
        graph.replay()
        assert whole.rows(end - 1, end).has_bits_of(Results.of(result))


@pytest.mark.parametrize("seqlen", [512, 1024])
def test_packed_prefill_and_decoding_from_pages(seqlen: int) -> None:
    """Head dimensions 192 and 128, as flash-attention-4's test of the same has them."""
    torch.manual_seed(seqlen)
    q, k, v = (torch.randn(seqlen, 16, d, device="cuda").bfloat16() for d in (192, 192, 128))
    whole = torch.tensor([0, seqlen], dtype=torch.int32, device="cuda")
    alone = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"causal": True, "seqlen_k_per_split": 512}
    prefilled = flash_attn_varlen_func(q, k, v, whole, whole, seqlen, seqlen, **options)
    decoded = flash_attn_varlen_func(
        q[-1:], k.view(-1, 128, 16, 192), v.view(-1, 128, 16, 128), alone, None, 1, None,
        seqused_k=whole[1:], page_table=torch.arange(seqlen // 128, device="cuda").int()[None],
        **options,
    )  # fmt: skip
    assert isinstance(prefilled, Tensor) and isinstance(decoded, Tensor)
    assert torch.equal(prefilled[-1:].view(torch.int16), decoded.view(torch.int16))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_change_the_bits_of_another(causal: bool) -> None:
    lengths = [4224, 1024, 2048]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 4, 128, device="cuda").bfloat16()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")

    def first(sequences: int, keys: int) -> Tensor:
        total, cuts = sum(lengths[:sequences]), ends[: sequences + 1]
        out = flash_attn_varlen_func(
            q[:total], k[:total], v[:total], cuts, cuts, lengths[0], lengths[0], causal=causal,
            seqlen_k_per_split=keys,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[: lengths[0]].view(torch.int16)

    alone = first(1, 1024)
    assert torch.equal(alone, first(3, 1024)) and not torch.equal(alone, first(1, 896))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_written_and_padded_keys_have_the_bits(dims: tuple[int, int]) -> None:
    """Keys that the call appends, behind padding, in pages, and causal as a tensor."""
    rows = Rows.create(dims, (8, 2))
    whole = rows.whole(records=False)
    options = {name: x for name, x in rows.options.items() if name != "causal"}
    unlike = []
    for end, new, padding, page_size in (
        (4097, 1, 0, None),
        (12345, 3, 131, None),
        (9000, 1, 0, 16),
        (2500, 1, 77, 128),
    ):
        first, size = end - new, page_size or 16384
        in_cache: dict[str, Any] = {}
        caches = []
        for x in (rows.k, rows.v):
            cache = torch.full((1, 16384, *x.shape[2:]), float("nan"), device="cuda").bfloat16()
            cache[:, padding : padding + first] = x[:, :first]
            caches.append(cache.view(16384 // size, size, *x.shape[2:]))
        if page_size:
            in_cache["page_table"] = torch.arange(16384 // size, device="cuda").int()[None]
        if padding:
            in_cache["cache_leftpad"] = torch.tensor([padding], device="cuda").int()
        q, keys, values = (x[:, first:end] for x in (rows.q, rows.k, rows.v))
        lengths = torch.tensor([padding + first], device="cuda").int()
        appended = flash_attn_with_kvcache(
            q, *caches, keys, values, cache_seqlens=lengths, causal=True, **in_cache, **options
        )
        lengths += new
        causal_per_seq = torch.ones(1, device="cuda").int()
        again = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, causal=causal_per_seq, **in_cache, **options
        )
        for way, result in (("appended", appended), ("causal", again)):
            if not whole.rows(first, end).has_bits_of(Results.of(result)):
                unlike.append((way, end, new, padding, page_size))
    assert not unlike
