"""A write into a cache is proved before it happens, and nothing is written when it is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cache_calls import draw_call
from cases import int32
from on_cuda import OnCuda
from torch import Tensor

from flash_mask_cute import flash_attn_with_kvcache
from flash_mask_cute.call.append import Append, check_append

INT = torch.int32
ROWS, DIM = 32, 16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def tables(rows: int) -> dict[str, Tensor]:
    angles = torch.rand(rows, DIM // 2, generator=torch.Generator().manual_seed(1)).double() * 6
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


def arguments(batch: int = 2, new: int = 1, **change: Any) -> dict[str, Any]:
    """A call that writes `new` rows of each sequence."""
    given = {name: normal(batch, ROWS, 1, DIM) for name in ("k_cache", "v_cache")}
    given |= {name: normal(batch, new, 1, DIM) for name in ("k", "v")}
    given["q"] = normal(batch, new, 2, DIM)
    return given | {"cache_seqlens": int32(*range(5, 5 + batch)), "causal": True} | change


def refused(given: dict[str, Any], text: str) -> None:
    """A ValueError, and not a bit of the caches has changed."""
    caches = given["k_cache"], given["v_cache"]
    before = [x.clone() for x in caches]
    with pytest.raises(ValueError, match=text):
        flash_attn_with_kvcache(**given)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))


def on_cuda(given: dict[str, Any]) -> Append:
    """The write of a call whose tensors say that they are on a GPU, where nothing may be read."""
    names = {"cache_leftpad": "leftpad", "cache_batch_idx": "batch_idx"}
    names |= {"rotary_cos": "cos", "rotary_sin": "sin"}
    given = {names.get(name, name): x for name, x in given.items() if name != "causal"}
    return Append(
        **{n: x.as_subclass(OnCuda) if isinstance(x, Tensor) else x for n, x in given.items()}
    )


# -- caches that lie in their own memory twice ---------------------------------------------------

OVERLAPPING = {
    "one entry for all": normal(1, ROWS, 1, DIM).expand(2, ROWS, 1, DIM),
    "one row for all": normal(2, 1, 1, DIM).expand(2, ROWS, 1, DIM),
    "one element for all": normal(2, ROWS, 1, 1).expand(2, ROWS, 1, DIM),
    "entries begin in the last one": normal(90, DIM).as_strided(
        (2, ROWS, 1, DIM), (ROWS * DIM // 2, DIM, DIM, 1)
    ),
    "rows begin in the last one": normal(90, DIM).as_strided(
        (2, ROWS, 1, DIM), (ROWS * DIM, DIM - 4, DIM, 1)
    ),
}


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("how", OVERLAPPING)
def test_a_cache_that_overlaps_itself(how: str, name: str) -> None:
    """By strides on any device; what is only read may overlap."""
    given = arguments(**{name: OVERLAPPING[how]})
    refused(given, f"^{name} must not overlap itself")
    with pytest.raises(ValueError, match=f"^{name} must not overlap itself"):
        check_append(on_cuda(given))
    given = {x: given[x] for x in ("q", "k_cache", "v_cache", "cache_seqlens", "causal")}
    plain = {x: given[x].clone(memory_format=torch.contiguous_format) for x in given if "_c" in x}
    plain.pop("cache_seqlens", None)
    found, expected = (flash_attn_with_kvcache(**x) for x in (given, given | plain))
    assert torch.equal(found, expected)


# -- rows and entries of two sequences -----------------------------------------------------------


def test_an_entry_that_two_sequences_write() -> None:
    entries = int32(3, 1, 3)
    caches = {"k_cache": normal(5, ROWS, 1, DIM), "v_cache": normal(5, ROWS, 1, DIM)}
    given = arguments(3, **caches, cache_batch_idx=entries)
    refused(given, "cache_batch_idx must not repeat an entry .* got 3 for sequences 0 and 2")
    check_append(on_cuda(given))
    # of which one has no new rows
    packed = {x: given[x][:2, 0] for x in ("k", "v")} | {"cu_seqlens_k_new": int32(0, 1, 2, 2)}
    flash_attn_with_kvcache(**given | packed)
    only_read = {x: y for x, y in given.items() if x not in ("k", "v")}
    flash_attn_with_kvcache(**only_read)


def test_a_prefix_is_shared_and_a_row_is_not() -> None:
    """Two sequences with a page in common, which both write, and one with a page twice."""
    pools = {"k_cache": normal(6, 4, 1, DIM), "v_cache": normal(6, 4, 1, DIM)}
    table = int32(0, 1, 2, 0, 1, 3).view(2, 3)
    given = arguments(**pools, page_table=table, cache_seqlens=int32(8, 10))
    out = flash_attn_with_kvcache(**given)
    assert out.isfinite().all()
    # other rows of one page
    given["page_table"], given["cache_seqlens"] = int32(0, 1, 2, 0, 1, 2).view(2, 3), int32(8, 9)
    flash_attn_with_kvcache(**given)
    given["cache_seqlens"] = int32(9, 9)
    refused(given, "page_table must give .* got row 1 of page 2 for sequences 0 and 1")
    check_append(on_cuda(given))
    given = arguments(1, 5, **pools, page_table=int32(4, 2, 2).view(1, 3), cache_seqlens=4)
    refused(given, "page_table must give .* got row 0 of page 2 for sequences 0 and 0")


def test_random_tables_against_the_rows_that_are_written() -> None:
    rng, found = random.Random(3), {True: 0, False: 0}
    for _ in range(150):
        batch, size, pages = rng.randint(1, 3), rng.choice((1, 2, 4)), rng.randint(2, 7)
        columns = rng.randint(1, 4)
        table = [[rng.randrange(pages) for _ in range(columns)] for _ in range(batch)]
        new = [rng.randint(0, min(3, columns * size)) for _ in range(batch)]
        used = [rng.randint(0, columns * size - n) for n in new]
        written = [
            (table[b][row // size], row % size)
            for b in range(batch)
            for row in range(used[b], used[b] + new[b])
        ]
        starts = [sum(new[:b]) for b in range(batch + 1)]
        caches = [normal(pages, size, 1, DIM) for _ in "kv"]
        rows = normal(starts[-1], 1, DIM)
        given = {
            "q": normal(batch, 1, 1, DIM), "k_cache": caches[0], "v_cache": caches[1], "k": rows,
            "v": rows, "cu_seqlens_k_new": int32(*starts), "cache_seqlens": int32(*used),
            "page_table": torch.tensor(table, dtype=INT),
        }  # fmt: skip
        is_refused = len(set(written)) < len(written)
        found[is_refused] += 1
        if is_refused:
            refused(given, "^page_table must give each new row a place of its own")
            continue
        flash_attn_with_kvcache(**given)
        for (page, row), values in zip(written, rows, strict=True):
            assert torch.equal(caches[0][page, row], values)
    assert min(found.values()) > 20


# -- positions of rotary tables ------------------------------------------------------------------


def test_tables_cover_the_cache_on_any_device() -> None:
    given = arguments(**tables(ROWS))
    flash_attn_with_kvcache(**given)
    short = given | tables(ROWS - 1)
    text = "^rotary_cos and rotary_sin must cover all positions, the 32 rows .* got 31 rows"
    refused(short, text)
    with pytest.raises(ValueError, match=text):
        check_append(on_cuda(short))
    # what the tables cover
    flash_attn_with_kvcache(**short | {x: short[x][:, : ROWS - 1] for x in ("k_cache", "v_cache")})
    pools = {"k_cache": normal(20, 4, 1, DIM), "v_cache": normal(20, 4, 1, DIM)}
    paged = given | pools | {"page_table": torch.arange(18, dtype=INT).view(2, 9)}
    with pytest.raises(ValueError, match="the 36 rows .* got 32 rows"):
        check_append(on_cuda(paged))
    refused(paged, "the 36 rows that the cache has for a sequence: .* got 32 rows")
    flash_attn_with_kvcache(**paged | {"page_table": paged["page_table"][:, :8].contiguous()})


def test_rotary_seqlens_need_no_more_than_their_positions() -> None:
    given = arguments(new=3, **tables(8), rotary_seqlens=int32(5, 0))
    flash_attn_with_kvcache(**given)
    check_append(on_cuda(given))
    text = "^rotary_seqlens must give positions .*, 0 to 7, got 6 to 8 for sequence 0"
    refused(given | {"rotary_seqlens": int32(6, 0)}, text)
    text = "^rotary_seqlens must give .* got -1 to 1 for sequence 1"
    refused(given | {"rotary_seqlens": int32(0, -1)}, text)
    text = "must cover all positions, the 3 rows of a sequence in k or q: .* got 2 rows"
    for wrong in (given | tables(2), given | tables(2) | {"rotary_seqlens": int32(0, 0)}):
        refused(wrong, text)
        with pytest.raises(ValueError, match=text):
            check_append(on_cuda(wrong))


@pytest.mark.parametrize("causal", [False, True])
def test_positions_of_queries(causal: bool) -> None:
    """More queries than new keys; without causal masking all have one position."""
    given = arguments(**tables(ROWS), causal=causal, q=normal(2, 4, 2, DIM))
    given["cache_seqlens"] = int32(28, 3)
    flash_attn_with_kvcache(**given)
    given["cache_seqlens"] = int32(2, 29)
    if causal:
        refused(given, "^cache_seqlens must give positions .* got 29 to 32 for sequence 1")
    else:
        flash_attn_with_kvcache(**given)
    packed = {x: given[x][:1, 0] for x in ("k", "v")} | {"cu_seqlens_k_new": int32(0, 1, 1)}
    given |= packed | {"cache_seqlens": int32(4, 32)}
    refused(given, "^cache_seqlens must give positions .* got 32 to 3[25] for sequence 1")
    # a sequence without queries has no position
    q = {"q": normal(4, 2, DIM), "cu_seqlens_q": int32(0, 4, 4), "cache_seqlens": int32(4, 32)}
    flash_attn_with_kvcache(**given | q)


# -- packed new rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ((1, 2, 4), "must start at 0, got 1"),
        ((0, 3, 2), "must not decrease, got 3 followed by 2"),
        ((0, -1, 4), "must not decrease, got 0 followed by -1"),
        ((0, 2, 5), "must not end beyond the packed tensor of 4 rows, got 5"),
    ],
)
def test_starts_of_new_rows(starts: tuple[int, ...], text: str) -> None:
    given = arguments(new=2)
    given |= {x: given[x].flatten(0, 1) for x in ("k", "v")}
    given["cu_seqlens_k_new"] = int32(*starts)
    refused(given, f"^cu_seqlens_k_new {text}")
    check_append(on_cuda(given))


def test_rows_behind_the_last_sequence_are_not_written() -> None:
    """As engines pad a batch for a CUDA graph."""
    given = arguments(new=2)
    rows = {x: given[x].flatten(0, 1) for x in ("k", "v")}
    outs = []
    for more in (0, 3):
        caches = {x: given[x].clone() for x in ("k_cache", "v_cache")}
        padded = {x: torch.cat([y, y.new_full((more, 1, DIM), torch.nan)]) for x, y in rows.items()}
        starts = {"cu_seqlens_k_new": int32(0, 2, 4)}
        outs.append((flash_attn_with_kvcache(**given | padded | caches | starts), *caches.values()))
    assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))


# -- memory that the cache shares -----------------------------------------------------------------


def layouts(batch: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """k_cache, v_cache and one tensor more beside them in a buffer, as engines lay pools out."""
    heads, size = 2, 8
    by_page = normal(batch, 3, size, heads, DIM)
    by_dim = normal(batch, size, heads, 3 * DIM)
    by_row = normal(batch, size, 3, heads, DIM)
    by_head = normal(batch, size, 3 * heads, DIM)
    heads_first = normal(batch, 3, heads, size, DIM).transpose(2, 3)
    layers = normal(batch, 5, 2, size, heads, DIM)
    return {
        "pages": (by_page[:, 0], by_page[:, 1], by_page[:, 2]),
        "halves": (by_dim[..., :DIM], by_dim[..., DIM : 2 * DIM], by_dim[..., 2 * DIM :]),
        "rows": (by_row[:, :, 0], by_row[:, :, 1], by_row[:, :, 2]),
        "heads": (by_head[:, :, 0::3], by_head[:, :, 1::3], by_head[:, :, 2::3]),
        "heads first": (heads_first[:, 0], heads_first[:, 1], heads_first[:, 2]),
        "layers": (layers[:, 2, 0], layers[:, 2, 1], layers[:, 3, 0]),
    }


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("how", list(layouts(1)))
def test_keys_and_values_take_turns_in_a_buffer(how: str, paged: bool) -> None:
    """With new rows and queries from the same buffer; the result is that of separate tensors."""
    results = []
    for separate in (False, True):
        k_cache, v_cache, third = layouts(4)[how]
        given = {"k_cache": k_cache, "v_cache": v_cache, "k": third[:, 1:3], "v": third[:, 3:5]}
        given["q"] = third[:, 5:7]
        if separate:
            given = {x: y.clone(memory_format=torch.contiguous_format) for x, y in given.items()}
        if paged:
            given |= {x: given[x][:2] for x in ("k", "v", "q")}
            given["page_table"] = int32(3, 0, 1, 2).view(2, 2)
            given["cache_seqlens"] = int32(7, 12)
        else:
            given["cache_seqlens"] = int32(0, 6, 2, 5)
        out = flash_attn_with_kvcache(**given, causal=True)
        results.append((out, given["k_cache"], given["v_cache"], third.clone()))
    assert all(torch.equal(x, y) for x, y in zip(*(r[:3] for r in results), strict=True))
    assert torch.equal(results[0][3], layouts(4)[how][2]), "the neighbour changed"


def test_shared_elements_are_refused() -> None:
    memory = normal(2, ROWS, 1, 3 * DIM)
    k_cache, v_cache, third = memory.split(DIM, dim=-1)
    given = arguments(k_cache=k_cache, v_cache=v_cache)
    flash_attn_with_kvcache(**given | {"k": third[:, :1], "v": third[:, 1:2]})
    shifted = memory[..., DIM - 1 : 2 * DIM - 1]
    refused(given | {"v_cache": shifted}, "^v_cache must not share memory with k_cache")
    refused(given | {"v": memory[:, 30:31, :, DIM + 1 : 2 * DIM + 1]},
            "^v_cache must not share memory with v,")  # fmt: skip
    refused(given | {"q": k_cache[:, 7:8]}, "^k_cache must not share memory with q")
    cos = memory.view(2 * ROWS, 3 * DIM)[:, DIM + 3 : DIM + 11]
    refused(given | {"rotary_cos": cos, "rotary_sin": cos}, "^v_cache must not share .* rotary_cos")


# -- what is ignored -----------------------------------------------------------------------------


def test_arguments_without_effect() -> None:
    """rotary_seqlens without tables, with new keys and without, and cu_seqlens_k_new without k."""
    given = arguments()
    caches = [{x: given[x].clone() for x in ("k_cache", "v_cache")} for _ in range(2)]
    expected = flash_attn_with_kvcache(**given | caches[0])
    found = flash_attn_with_kvcache(**given | caches[1], rotary_seqlens=int32(-7, 900))
    assert torch.equal(found, expected)
    assert torch.equal(caches[0]["k_cache"], caches[1]["k_cache"])
    given = {x: y for x, y in given.items() if x not in ("k", "v")}
    expected = flash_attn_with_kvcache(**given)
    ignored = {"cu_seqlens_k_new": int32(0, 9, 3), "rotary_seqlens": int32(1, 2)}
    assert torch.equal(flash_attn_with_kvcache(**given, **ignored), expected)
    with pytest.raises(ValueError, match="^rotary_cos and rotary_sin need new keys"):
        flash_attn_with_kvcache(**given, **tables(ROWS))


# -- compiled calls, and calls that go well ------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cache_batch_idx": int32(1, 1)}, "cache_batch_idx must not repeat"),
        ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx must lie in"),
        ({"cache_seqlens": int32(5, 33)}, "cache_seqlens .* got 33"),
        (tables(9), "must cover all positions"),
    ],
)
def test_compiled_calls_are_refused_before_the_write(change: dict[str, Any], text: str) -> None:
    given = arguments(**change)
    caches = [given["k_cache"].clone(), given["v_cache"].clone()]
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=text), torch.no_grad():
        compiled(**given)
    assert torch.equal(caches[0], given["k_cache"]) and torch.equal(caches[1], given["v_cache"])


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_go_well_are_not_refused(seed: int) -> None:
    """In buffers that keys and values share, too."""
    rng, found = random.Random(70 + seed), 0
    while found < 8:
        call = draw_call(rng, torch.float64, 16, 60, (1, 4, 16))
        if "k" not in call.keywords:
            continue
        found += 1
        k_cache, v_cache = call.keywords["k_cache"], call.keywords["v_cache"]
        axis = rng.randint(1, 4)
        buffer = torch.stack((k_cache, v_cache), dim=axis)
        pools = {"k_cache": buffer.select(axis, 0), "v_cache": buffer.select(axis, 1)}
        out, lse = flash_attn_with_kvcache(call.q, **call.keywords | pools, return_lse=True)
        call.assert_close(out, lse)
        call.assert_written(pools["k_cache"], pools["v_cache"], atol=1e-6)
