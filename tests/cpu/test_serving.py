"""`flash_attn_with_kvcache` and `flash_attn_combine` on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cache_calls import draw_call
from cases import int32
from torch import Tensor

from flash_mask_cute import (
    ColumnMask,
    builders,
    explain,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    interface,
)
from flash_mask_cute.call import append as append_module
from flash_mask_cute.call import explain as explain_module

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

INT = torch.int32


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int) -> None:
    """Against dense attention, and against what the cache should hold afterwards."""
    rng = random.Random(seed)
    for _ in range(14):
        call = draw_call(rng, torch.float64, 16, 90, (1, 3, 8, 16, 64))
        out, lse = flash_attn_with_kvcache(call.q, **call.keywords, return_lse=True)
        call.assert_close(out, lse)
        call.assert_written(call.keywords["k_cache"], call.keywords["v_cache"], atol=1e-6)


def cache(batch: int = 2, rows: int = 32, heads: int = 1, dim: int = 16) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, rows, heads, dim, generator=torch.Generator().manual_seed(1))
    return k.double(), v.double()


def step(batch: int = 2, seqlen: int = 1, heads: int = 2, dim: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, seqlen, heads, dim, generator=generator).double()


def test_positions_are_flash_attention_3s() -> None:
    k_cache, v_cache = cache()
    q, k, v = step(), *(step(heads=1) for _ in "kv")
    by_name = flash_attn_with_kvcache(
        q, k_cache.clone(), v_cache.clone(), k=k, v=v, cache_seqlens=7, causal=True,
        softmax_scale=0.3, window_size=(5, -1), softcap=4.0, return_softmax_lse=True,
    )  # fmt: skip
    nothing = [None] * 6
    by_position = flash_attn_with_kvcache(
        q, k_cache.clone(), v_cache.clone(), k, v, None, None, None, 7, None, None, None, None,
        None, None, None, None, None, None, 0.3, True, (5, -1), 0, 4.0, True, None, 0, None, 0,
        True,
    )  # fmt: skip
    assert nothing and all(torch.equal(a, b) for a, b in zip(by_name, by_position, strict=True))


def test_a_training_mask_in_decode() -> None:
    """A step over a cache is the row of the mask at the end of the keys, padded and paged too."""
    seqlen, mask = 24, builders.causal_document([10, 22])
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 32, 2, 16, generator=generator).double() for _ in "qkv")
    expected = flash_attn_func(q, k, v, startend_row_indices=mask)[:, seqlen - 1 : seqlen]
    q = q[:, seqlen - 1 : seqlen]
    arguments: dict[str, Any] = {"cache_seqlens": seqlen, "startend_row_indices": mask}
    assert torch.allclose(flash_attn_with_kvcache(q, k, v, **arguments), expected)
    pool_k, pool_v = (x.view(4, 8, 2, 16)[[2, 0, 3, 1]] for x in (k, v))
    pages = int32(1, 3, 0, 2)[None]
    out = flash_attn_with_kvcache(q, pool_k, pool_v, page_table=pages, **arguments)
    assert torch.allclose(out, expected)


@pytest.mark.parametrize("padding", [(3, 9), None])
def test_a_training_mask_beside_rows_and_padding_of_a_table(
    padding: tuple[int, ...] | None,
) -> None:
    """Keys count from the first one behind the padding, for intervals, causal masking and mods."""
    mask = builders.causal_document([10, 14])
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 24, 2, 16, generator=generator).double() for _ in "qkv")
    expected = flash_attn_func(q, k, v, startend_row_indices=mask)[:, -1:]
    # 35 or 33 rows of 5 pages each; of rows 2 and 0 of a table
    pools = [torch.full((12, 7, 2, 16), float("nan")).double() for _ in "kv"]
    table = int32(*([99] * 15)).view(3, 5)
    table[2], table[0] = int32(4, 11, 0, 7, 2), int32(1, 3, 10, 5, 9)
    for b, row in enumerate((2, 0)):
        for j in range(24):
            page, at = divmod(j + (0 if padding is None else padding[b]), 7)
            for pool, x in zip(pools, (k, v), strict=True):
                pool[table[row, page], at] = x[b, j]
    where: dict[str, Any] = {"page_table": table, "cache_batch_idx": int32(2, 0)}
    lengths = int32(24, 24)
    if padding is not None:
        where["cache_leftpad"] = int32(*padding)
        lengths += where["cache_leftpad"]
    columns = torch.full((1, 1, 35, 1), 1 << 20, dtype=INT)
    columns[:, :, :24] = mask.startend_row_indices
    found = flash_attn_with_kvcache(
        q[:, -1:], *pools, **where, cache_seqlens=lengths,
        startend_row_indices=ColumnMask(columns, causal=True),
    )  # fmt: skip
    assert torch.allclose(found, expected)


def test_prefill_and_decode_in_one_call() -> None:
    """A sequence of 9 new tokens beside two of one, over pages that they share in part."""
    pool_k, pool_v = (torch.randn(7, 8, 1, 16).double() for _ in "kv")
    pages = int32(4, 1, 6, 4, 2, 0, 3, 5, 1).view(3, 3)
    lengths, new = [20, 17, 8], [1, 9, 1]
    q = torch.randn(11, 2, 16).double()
    starts = int32(0, 1, 10, 11)
    found = flash_attn_with_kvcache(
        q, pool_k, pool_v, cache_seqlens=int32(*lengths), page_table=pages, cu_seqlens_q=starts,
        max_seqlen_q=9, causal=True,
    )  # fmt: skip
    for b, rows in enumerate(found.split(new)):
        k, v = (x[pages[b].long()].flatten(0, 1)[None, : lengths[b]] for x in (pool_k, pool_v))
        expected = flash_attn_func(q.split(new)[b][None], k, v, causal=True)
        assert torch.allclose(rows, expected[0])
    same = flash_attn_varlen_func(
        q, pool_k, pool_v, starts, seqused_k=int32(*lengths), page_table=pages, causal=True
    )
    assert torch.equal(same, found)


def test_sinks_and_a_window_visit_two_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1024 blocks of keys one with the sinks, and those of the window."""
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 131072, 1, 64, dtype=torch.bfloat16)
    mask = builders.sink_window(131072, 4, 128)
    found = explain(q, k, k, startend_row_indices=mask, q_start="end")
    assert found.packed_heads == 8
    assert "equal stream-K chunks" in found.splits
    assert found.full_key_tiles is not None and found.partial_key_tiles is not None
    assert 2 <= found.full_key_tiles + found.partial_key_tiles <= 3
    assert found.empty_key_tiles is not None and found.empty_key_tiles > 1000


@pytest.mark.parametrize(("prefills", "packed_heads"), [(4, 4), (40, 1)])
def test_heads_share_tiles_if_most_sequences_decode(
    prefills: int, packed_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest one has 512 queries in either batch of 64."""
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    queries = torch.tensor([0] + [1] * (64 - prefills) + [512] * prefills)
    edges = queries.cumsum(0).int()
    q = torch.zeros(int(edges[-1]), 8, 64, dtype=torch.bfloat16)
    k = torch.zeros(64, 600, 2, 64, dtype=torch.bfloat16)
    used = torch.full((64,), 600, dtype=torch.int32)
    found = explain(q, k, k, cu_seqlens_q=edges, max_seqlen_q=512, seqused_k=used, causal=True)
    assert found.packed_heads == packed_heads


@pytest.mark.parametrize(
    ("page_size", "how"),
    [
        (1, "of 1 keys, copied row by row, for 8 does not divide the page size"),
        (20, "of 20 keys, copied row by row, for 8 does not divide the page size"),
        (24, "of 24 keys, copied by TMA, in boxes of 8 keys"),
        (64, "of 64 keys, copied by TMA, in boxes of 64 keys"),
        (256, "of 256 keys, copied by TMA, a whole tile in a box"),
    ],
)
def test_explain_says_how_pages_are_copied(
    page_size: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    pool = torch.zeros(3, page_size, 2, 64, dtype=torch.bfloat16)
    found = explain(q, pool, pool, page_table=int32(2, 0, 1)[None])
    # sequences of no more keys have tiles of 64
    assert found.tiles.tile_n == (64 if 3 * page_size <= 64 else 128)
    assert found.pages == how
    assert how in str(found)
    where = {"page_table": int32(2, 0, 1)[None], "leftpad_k": int32(1), "seqused_k": int32(1)}
    by_rows = explain(q, pool, pool, **where, kv_batch_idx=int32(0)).pages
    assert by_rows.startswith(f"of {page_size} keys, copied row by row")
    assert ("anywhere in a page" in by_rows) == (page_size % 8 == 0)
    rows = explain(q, pool[:1], pool[:1])
    assert rows.pages == "" and "pages" not in str(rows)


def test_explain_takes_cache_seqlens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of `flash_attn_with_kvcache` for seqused_k, an int or a tensor."""
    monkeypatch.setattr(explain_module, "_compiled_facts", lambda *_: ({}, {}))
    q = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
    pool = torch.zeros(6, 64, 2, 64, dtype=torch.bfloat16)
    pages = {"page_table": int32(2, 0, 1, 3, 5, 4).view(2, 3)}
    for k, where, rows in ((pool, pages, 192), (pool[:2], {}, 64)):
        expected = explain(q, k, k, **where, seqused_k=int32(50, 50))
        assert explain(q, k, k, **where, cache_seqlens=50) == expected
        assert explain(q, k, k, **where, cache_seqlens=int32(50, 50)) == expected
        assert explain(q, k, k, **where) != expected
        for wrong in (rows + 1, int32(50, rows + 1)):
            with pytest.raises(ValueError, match=f"cache_seqlens .* {rows} rows .* got {rows + 1}"):
                explain(q, k, k, **where, cache_seqlens=wrong)
    with pytest.raises(TypeError, match="cache_seqlens must be an int, .* got 5.0"):
        explain(q, k, k, cache_seqlens=5.0)
    with pytest.raises(ValueError, match="seqused_k and cache_seqlens|cache_seqlens and seqused_k"):
        explain(q, k, k, cache_seqlens=5, seqused_k=int32(5, 5))
    with pytest.raises(ValueError, match="leftpad_k goes with seqused_k"):
        explain(q, pool, pool, **pages, cache_seqlens=50, leftpad_k=int32(1, 1))


@pytest.mark.parametrize("size", [-1e30, 0.0, 3e7])
def test_weights_of_combined_parts_sum_to_1(size: float) -> None:
    """Also where LSE in fp32 does not hold how many parts there are."""
    parts = torch.randn(4, 1, 3, 2, 16)
    out, _ = flash_attn_combine(parts, torch.full(parts.shape[:-1], size))
    torch.testing.assert_close(out, parts.mean(dim=0))


def test_gradients_of_a_contiguous_cache() -> None:
    leaves = [x.requires_grad_() for x in (step(), *cache())]
    out = flash_attn_with_kvcache(*leaves, cache_seqlens=int32(5, 9), causal=True)
    found = torch.autograd.grad(out.sum(), leaves)
    lengths = {"seqused_k": int32(5, 9)}
    expected = torch.autograd.grad(
        flash_attn_varlen_func(*leaves, **lengths, causal=True).sum(), leaves
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


PLACED: dict[str, Any] = {
    "page_table": int32(4, 0, 9, 9, 3, 1).view(3, 2), "cache_batch_idx": int32(2, 0),
    "cache_leftpad": int32(3, 7), "cache_seqlens": int32(5, 29),
}  # fmt: skip


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("rows", "where", "appends"),
    [((5, 16), PLACED, False), ((5, 16), PLACED, True), ((), {"cache_seqlens": int32(5, 9)}, True)],
    ids=["table", "table appends", "appends"],
)
def test_compiled(rows: tuple[int, ...], where: dict[str, Any], appends: bool) -> None:
    """The write is a mutation of the graph's inputs."""
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    results = []
    for call in (flash_attn_with_kvcache, compiled):
        k_cache, v_cache = cache(*rows)
        new = {"k": step(heads=1), "v": step(heads=1)} if appends else {}
        with torch.no_grad():
            out = call(step(), k_cache, v_cache, **new, **where, causal=True)
        results.append((out, k_cache, v_cache))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


NEW = {"k": step(heads=1), "v": step(heads=1), "cache_seqlens": int32(5, 9)}
PAGES = {"page_table": int32(0, 1).view(2, 1)}
COS = torch.ones(40, 8)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "qv": ({"qv": step()}, NotImplementedError, "qv is not supported, it must be None"),
    "attention_chunk": ({"attention_chunk": 4}, NotImplementedError, "attention_chunk .* got 4"),
    "q_descale": ({"q_descale": torch.ones(2, 1)}, NotImplementedError, "q_descale is not"),
    "k_descale": ({"k_descale": torch.ones(2, 1)}, ValueError, "k_descale .* None beside k_cache"),
    "sm_margin": ({"sm_margin": 8}, NotImplementedError, "sm_margin .* must be 0, got 8"),
    "num_splits": ({"num_splits": -1}, ValueError, "num_splits must be .* got -1"),
    "seqused_k": ({"seqused_k": int32(1, 1)}, TypeError, "seqused_k .* say cache_seqlens"),
    "seqlens dtype": ({"cache_seqlens": torch.ones(2)}, TypeError, "cache_seqlens must have dtype"),
    "seqlens length": ({"cache_seqlens": int32(1)}, ValueError, "cache_seqlens must have shape"),
    "seqlens value": ({"cache_seqlens": 33}, ValueError, "cache_seqlens .* 32 rows .* got 33"),
    "new without lengths": (
        {"k": step(heads=1), "v": step(heads=1)}, ValueError, "k, v and cache_seqlens go together",
    ),
    "k alone": (
        {"k": step(heads=1), "cache_seqlens": 3}, ValueError,
        "go together, .* got a .*None",
    ),
    "rotary alone": ({"rotary_cos": COS, "rotary_sin": COS}, ValueError, "need new keys"),
    "cos alone": (NEW | {"rotary_cos": COS}, ValueError, "rotary_cos and rotary_sin go together"),
    "cos too wide": (
        NEW | {"rotary_cos": torch.ones(4, 9), "rotary_sin": torch.ones(4, 9)}, ValueError,
        r"rotary_cos must have shape .* at most 16, got \(4, 9\)",
    ),
    "new heads": (
        NEW | {"k": step(heads=2)}, ValueError,
        r"k must have shape .* got \(2, 1, 2, 16",
    ),
    "new dtype": (
        NEW | {"v": step(heads=1).float()}, TypeError,
        "v must have the dtype of v_cache",
    ),
    "no room": (
        NEW | {"cache_seqlens": int32(5, 32)}, ValueError,
        "room .* sequence 1 has 32 of 32 .* 1",
    ),
    "new cu_seqlens": (
        NEW | {"k": step(1)[0], "v": step(1)[0], "cu_seqlens_k_new": int32(0, 1)},
        ValueError, "k must have shape .total_new, 1, 16.",
    ),
    "table dtype": (
        {"page_table": torch.zeros(2, 1)}, TypeError,
        "page_table must have dtype int32",
    ),
    "table rank": (
        {"page_table": int32(0, 1)}, ValueError,
        r"page_table must have shape .* \(2,\)",
    ),
    "table batch": ({"page_table": int32(0)[None]}, ValueError, "batch of q and k must be equal"),
    "table ids": (
        {"page_table": int32(0, 2).view(2, 1)}, ValueError,
        "page_table must lie in .* got 2",
    ),
    "too long for the table": (
        PAGES | {"cache_seqlens": 33}, ValueError,
        "cache_seqlens .* got 33",
    ),
    "table rows": (
        PAGES | {"cache_batch_idx": int32(0, 2)}, ValueError,
        r"cache_batch_idx must lie in \[0, 2\), got 2",
    ),
    "table padding": (
        PAGES | {"cache_leftpad": int32(0, 6), "cache_seqlens": int32(5, 5)}, ValueError,
        r"cache_leftpad must lie between 0 and cache_seqlens \(5\), got 6",
    ),
    "new rows behind padding": (
        NEW | PAGES | {"cache_leftpad": int32(0, 6), "cache_seqlens": int32(5, 32)}, ValueError,
        "cache_seqlens must leave room .* sequence 1 has 32 of 32",
    ),
    "padding and intervals": (
        {"cache_leftpad": int32(0, 1), "startend_row_indices": torch.zeros(1, 1, 32, 2, dtype=INT)},
        NotImplementedError, "cache_leftpad is not supported beside startend_row_indices",
    ),
    "entries": (
        {"cache_batch_idx": int32(0, 2)}, ValueError,
        r"cache_batch_idx must lie in \[0, 2",
    ),
    "padding": ({"cache_leftpad": int32(0, 33)}, ValueError, "cache_leftpad must lie between"),
    "mask": (NEW | {"window_size": (-3, -1), "causal": 3}, TypeError, "causal must be"),
    "number": (NEW | {"k": 1.0}, TypeError, "^k must be a torch.Tensor, got 1.0"),
    "config": (NEW | {"config": {"tile_k": 64}}, ValueError, "^config has unknown keys"),
    "config type": (NEW | {"config": 5}, TypeError, "^config must be .* got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Before anything is written."""
    keywords, error, text = REFUSED[name]
    k_cache, v_cache = cache()
    before = k_cache.clone()
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(step(), k_cache, v_cache, **keywords)
    assert torch.equal(before, k_cache)


def reads_beyond(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Right for the keys that are cached, but not for the new one."""
    return aux[0][k[0]] > 0.0


@pytest.mark.parametrize(
    "where",
    [{}, {"cache_batch_idx": int32(1, 0)}, {"page_table": int32(4, 0, 3, 1).view(2, 2)}],
    ids=["rows", "entries", "pages"],
)
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_call_that_fails_has_written_nothing(
    where: dict[str, Any], rotates: bool, compiles: bool
) -> None:
    """A mod's IndexError is found by attention, which comes after the write."""
    k_cache, v_cache = cache() if "page_table" not in where else cache(5, 16)
    k_cache[..., 0], v_cache[..., 0] = float("nan"), float("inf")
    before = k_cache.clone(), v_cache.clone()
    keywords = NEW | where
    if rotates:
        keywords |= {"rotary_cos": COS, "rotary_sin": COS}
    call: Any = flash_attn_with_kvcache
    if compiles:
        call = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(IndexError), torch.no_grad():
        call(
            step(), k_cache, v_cache, **keywords, mask_mod=reads_beyond, aux_tensors=[torch.ones(9)]
        )
    for found, wanted in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(found.view(torch.int64), wanted.view(torch.int64))


def test_attention_is_prepared_before_rows_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be made is found before the write."""

    def no_kernel(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    def write(*_: Any) -> Any:
        pytest.fail("rows were written")

    monkeypatch.setattr(interface, "prepare_fwd", no_kernel)
    monkeypatch.setattr(append_module, "_append_on_cpu", write)
    with pytest.raises(RuntimeError, match="no kernel"):
        flash_attn_with_kvcache(step(), *cache(), **NEW)


def test_refusals_of_pools_and_pages() -> None:
    k_cache, v_cache = cache(rows=300)
    with pytest.raises(ValueError, match="pages of 1 to 256 keys .* got page_size 300"):
        flash_attn_with_kvcache(step(), k_cache, v_cache, **PAGES)
    with pytest.raises(ValueError, match="k_cache and v_cache must agree"):
        flash_attn_with_kvcache(step(), k_cache, v_cache[:, :200])
    with pytest.raises(ValueError, match="k_cache must have batch 2, as q has"):
        flash_attn_with_kvcache(step(), k_cache[:1], v_cache[:1])
    with pytest.raises(ValueError, match=r"^q must have shape \(batch, .* got \(1, 2, 16\)"):
        flash_attn_with_kvcache(step()[0], k_cache, v_cache)
    with pytest.raises(ValueError, match=r"^k must be on the device of q \(cpu\), got meta"):
        on_meta = k_cache.to("meta"), v_cache.to("meta")
        flash_attn_with_kvcache(step(), *on_meta, cache_seqlens=int32(9, 9))


def test_a_config_by_names_beside_new_rows() -> None:
    caches = cache(), cache()
    outs = [
        flash_attn_with_kvcache(step(), *x, **NEW, config=config)
        for x, config in zip(caches, (None, {"tile_m": 64}), strict=True)
    ]
    torch.testing.assert_close(*outs)
    assert torch.equal(caches[0][0], caches[1][0])


@pytest.mark.parametrize("name", ["page_table", "k", "cache_batch_idx"])
def test_refusals_of_gradients(name: str) -> None:
    more = {"page_table": PAGES, "k": NEW, "cache_batch_idx": {"cache_batch_idx": int32(1, 0)}}[
        name
    ]
    q = step().requires_grad_()
    with pytest.raises(NotImplementedError, match="there are no gradients"):
        flash_attn_with_kvcache(q, *cache(), **more)
    with torch.no_grad():
        flash_attn_with_kvcache(q, *cache(), **more)


# -- parts --------------------------------------------------------------------------------------


def test_parts_of_attention_make_all_of_it() -> None:
    q, k, v = (torch.randn(2, n, 2, 16).double().requires_grad_() for n in (5, 40, 40))
    cuts = (0, 7, 8, 40, 40)
    parts = [
        flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = flash_attn_combine(outs, lses.mT)
    expected, expected_lse = flash_attn_func(q, k, v, return_lse=True)
    assert lse is not None and torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse.mT, expected_lse, atol=1e-6)
    dout = torch.randn_like(out)
    found = torch.autograd.grad((out * dout).sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * dout).sum() + expected_lse.sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(3, 7, 2, 8, generator=generator).double()
    lses = torch.randn(3, 7, 2, generator=generator).double()
    lses[1, 3], lses[:, 4] = float("-inf"), float("-inf")
    outs[1, 3], outs[:, 4] = float("nan"), float("nan")
    out, lse = flash_attn_combine(outs, lses)
    assert lse is not None and out.isfinite().all() and (out[4] == 0).all()
    assert (lse[4] == float("-inf")).all() and lse[3].isfinite().all()
    outs, lses = outs.nan_to_num(0.0).requires_grad_(), lses[:, :3].requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: flash_attn_combine(a[:, :3], b), (outs, lses))


def test_dtypes_of_parts() -> None:
    outs, lses = torch.randn(2, 1, 4, 3, 16).bfloat16(), torch.randn(2, 1, 4, 3)
    out, lse = flash_attn_combine(outs, lses, return_lse=False)
    assert (out.dtype, lse) == (torch.bfloat16, None)
    out, lse = flash_attn_combine(outs, lses, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and lse is not None and lse.shape == (1, 4, 3)
    for arguments, error, text in (
        ((outs, lses.double()), TypeError, "lse_partial must have dtype float32"),
        ((outs, lses[:, :, :3]), ValueError, "lse_partial must have the shape of out_partial"),
        ((outs[0, 0], lses[0, 0]), ValueError, "out_partial must have shape"),
        ((outs.int(), lses), TypeError, "out_partial must have one of the dtypes"),
    ):
        with pytest.raises(error, match=text):
            flash_attn_combine(*arguments)


@pytest.mark.parametrize("layout", ["dense", "strided", "misaligned"])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_parts_are_combined_into_the_callers_memory(layout: str, compiles: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(3, 2, 5, 3, 520, generator=generator)
    lses = torch.randn(3, 2, 5, 3, generator=generator)
    memory = {
        "dense": torch.ones((2, 5, 3, 520), dtype=torch.bfloat16),
        "strided": torch.ones((2, 3, 5, 1040), dtype=torch.bfloat16)[..., ::2].transpose(1, 2),
        "misaligned": torch.ones((2, 5, 3, 521), dtype=torch.bfloat16)[..., 1:],
    }[layout]
    combine: Any = flash_attn_combine
    if compiles:
        combine = torch.compile(flash_attn_combine, backend="aot_eager", fullgraph=True)
    version = memory._version
    out, lse = combine(outs, lses, memory)
    wanted, wanted_lse = flash_attn_combine(outs.double(), lses.double(), out_dtype=torch.float64)
    assert wanted_lse is not None and out is memory and memory._version > version
    torch.testing.assert_close(memory.double(), wanted, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse)
    with torch.no_grad():
        assert combine(outs.requires_grad_(), lses, memory, torch.bfloat16)[0] is memory


OUTS, LSES, OUT = torch.ones(2, 1, 4, 3, 16), torch.zeros(2, 1, 4, 3), torch.ones(1, 4, 3, 16)
REFUSED_OUT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"out": [1.0]}, TypeError, "out must be a torch.Tensor, got a list"),
    "dtype": (
        {"out_dtype": torch.bfloat16}, TypeError,
        r"out must have dtype out_dtype \(torch.bfloat16\), got torch.float32",
    ),
    "integers": ({"out": OUT.int()}, TypeError, "or None for the dtype of out .* got torch.int32"),
    "shape": (
        {"out": OUT[:, :3]}, ValueError,
        r"out must have the shape of out_partial .* got \(1, 3, 3, 16\)",
    ),
    "device": ({"out": OUT.to("meta")}, ValueError, "out must be on the device .* got meta"),
    "expanded": (
        {"out": OUT[:, :1].expand(1, 4, 3, 16)}, ValueError,
        "out must not overlap itself",
    ),
    "shared": ({"out": OUTS[1]}, ValueError, "out must not share memory with out_partial"),
    "gradients": (
        {"lse_partial": LSES.clone().requires_grad_()}, ValueError,
        "out must be None where gradients are recorded, .* lse_partial requires grad",
    ),
    "gradient of out": (
        {"out": OUT.clone().requires_grad_()}, ValueError,
        "out requires grad",
    ),
    "lengths": ({"seqused": int32(1)}, NotImplementedError, "seqused is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OUT)
def test_refusals_of_memory_for_combined_parts(name: str) -> None:
    """Before anything is written."""
    keywords, error, text = REFUSED_OUT[name]
    outs, out = OUTS.clone(), OUT.clone()
    arguments: dict[str, Any] = {"out_partial": OUTS, "lse_partial": LSES, "out": OUT} | keywords
    with pytest.raises(error, match=text):
        flash_attn_combine(**arguments)
    assert torch.equal(OUTS, outs) and torch.equal(OUT, out)
