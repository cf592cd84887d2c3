"""The kernel that writes new rows into a cache, on the software GPU of either architecture."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from cache_calls import CacheCall, draw_call
from conftest import ACTIVE_ARCH
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.call.append import Append, append, check_append
from flash_mask_cute.runtime.target import Target

ARCH = ACTIVE_ARCH


def append_of(call: CacheCall) -> Append:
    x = call.keywords
    is_banded = x["causal"] or x["window_size"][0] >= 0
    return Append(
        x["k_cache"], x["v_cache"], x["k"], x["v"], call.q, x["cache_seqlens"],
        x.get("cache_leftpad"), x.get("cache_batch_idx"), x.get("page_table"),
        x.get("cu_seqlens_k_new"), x.get("cu_seqlens_q"), x.get("rotary_cos"),
        x.get("rotary_sin"), x.get("rotary_seqlens"), x.get("rotary_interleaved", True), is_banded,
    )  # fmt: skip


def queries(q: Tensor, call: CacheCall) -> Tensor:
    rotated = [x for x, _, _ in call.sequences]
    return torch.cat(rotated) if q.dim() == 3 else torch.stack(rotated)


@pytest.mark.parametrize("seed", (0, 1, 2, 5))
def test_random_calls(simulator: ModuleType, seed: int) -> None:
    """Contiguous and paged, packed or not, rotated or not; nothing else of the cache changes."""
    rng, found = random.Random(seed), 0
    while found < 3:
        call = draw_call(rng, torch.float16, 16, 60, (1, 7, 16))
        if "k" not in call.keywords:
            continue
        found += 1
        given = append_of(call)
        check_append(given)
        with quiet_run(simulator, found, launches=1):
            q, total = append(given, Target(ARCH, num_sms=2))
        call.assert_written(given.k_cache, given.v_cache, atol=2e-3)
        assert torch.allclose(q, queries(q, call), atol=4e-3), call.name
        assert total.tolist() == [len(keys) for _, keys, _ in call.sequences], call.name


@pytest.mark.daily(1)
@pytest.mark.parametrize("page_size", [4, 16])
def test_rows_that_fill_the_last_page_of_a_table(simulator: ModuleType, page_size: int) -> None:
    """Some begin in the page before, some at its first row, one is its last row."""
    pages, first = 3, (2 * page_size - 1, 2 * page_size, 3 * page_size - 1)
    k_cache, v_cache = (torch.zeros(3 * pages, page_size, 1, 8).half() for _ in "kv")
    table = torch.arange(3 * pages).flip(0).int().view(3, pages)
    counts = [pages * page_size - x for x in first]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    k = torch.arange(1, int(starts[-1]) + 1).half()[:, None, None].expand(-1, 1, 8).contiguous()
    given = Append(
        *(k_cache, v_cache, k, -k, torch.zeros(3, 1, 1, 8).half()),
        *(torch.tensor(first, dtype=torch.int32), None, None, table, starts),
    )
    check_append(given)
    with quiet_run(simulator, launches=1):
        _, total = append(given, Target(ARCH, num_sms=2))
    assert total.tolist() == [pages * page_size] * 3
    for cache, new in ((k_cache, k), (v_cache, -k)):
        for i, rows in enumerate(cache[table.long()].flatten(1, 2)):
            assert not rows[: first[i]].any()
            assert torch.equal(rows[first[i] :], new[starts[i] : starts[i + 1]])


def test_rows_without_a_place_are_left_out(simulator: ModuleType) -> None:
    """On a device nobody checks lengths and numbers of pages."""
    k_cache, v_cache = (torch.zeros(3, 4, 1, 8).half() for _ in "kv")
    k, v = (torch.ones(3, 2, 1, 8).half() for _ in "kv")
    table = torch.tensor([[0], [7], [-1]], dtype=torch.int32)
    lengths = torch.tensor([3, 0, 0], dtype=torch.int32)
    q = torch.zeros(3, 1, 1, 8).half()
    given = Append(k_cache, v_cache, k, v, q, lengths, page_table=table)
    _, total = append(given, Target(ARCH, num_sms=2))
    assert k_cache.sum() == v_cache.sum() == 8 and (k_cache[0, 3] == 1).all()
    assert total.tolist() == [5, 2, 2]
    with pytest.raises(ValueError, match="room"):
        check_append(given)
