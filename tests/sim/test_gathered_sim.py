"""Small selected blocks, whose keys a forward gathers, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ACTIVE_ARCH
from drawn_selections import draw, regroup
from planned import forward_call, planned
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator as run_forward
from test_selected_sim import (
    Composed,
    assert_close,
    check_forward,
    host_keywords,
    in_bf16,
    positions,
)
from torch import Tensor

from flash_mask_cute.mask_prep.selected_bits import UnionLists, compile_union_lists, union_lists
from flash_mask_cute.runtime.target import Target

ARCH = "sm_90a"
assert ACTIVE_ARCH


@pytest.mark.parametrize("number", range(8))
def test_draws(simulator: ModuleType, number: int) -> None:
    drawn = draw(number, 64, (4, 8), 330)
    given = in_bf16(drawn)
    call = forward_call(given.q, given.k, given.v, **host_keywords(drawn))
    assert planned(call, Target(ARCH, num_sms=2)).problem.gathers == drawn.selected.block_size
    check_forward(drawn, number)


def test_what_nobody_chose_is_not_read(simulator: ModuleType) -> None:
    """Keys of other blocks, and those behind the ends, hold NaN."""
    drawn = Composed.draw((2, 40, 300), (8, 2, 2), 4, 9, seed=5)
    used = torch.tensor([299, 130], dtype=torch.int32)
    keys = torch.arange(300)
    chosen = (drawn.selection[..., None] == keys // 4).any(2).any(2)  # (batch, heads, keys)
    is_used = (chosen & (keys < used[:, None, None])).transpose(1, 2)[..., None]
    clean = [torch.where(is_used, x, 0.0) for x in (drawn.k, drawn.v)]
    given = [torch.where(is_used, x, torch.nan) for x in (drawn.k, drawn.v)]
    seen = drawn.seen(keys < used.view(2, 1, 1, 1))
    wanted, eager = (seen.attend(*(f(x) for x in (drawn.q, *clean))) for f in (Tensor.double, same))
    for config in (None, {"tile_m": 64}, {"tile_n": 128}, {"tile_m": 64, "num_stages": 2}):
        call = forward_call(drawn.q, *given, seqused_k=used, config=config, **drawn.arguments)
        with quiet_run(simulator, 1):
            out, _ = run_forward(call)
        assert_close(out, wanted, eager, f"{config}")


def test_a_list_that_fills_its_room(simulator: ModuleType) -> None:
    """32 blocks; a tile of 112 keys holds 28."""
    drawn = Composed.draw((1, 1, 300), (2, 1, 1), 4, 32)
    drawn = drawn._replace(
        selection=torch.arange(32, dtype=torch.int32).view(1, 1, 1, 32),
        visible=(torch.arange(300) < 128).expand(1, 2, 1, 300),
    )
    drawn.check(only_forward=True, config={"tile_n": 112})


def same(x: Tensor) -> Tensor:
    return x


def test_causal_with_a_window_and_a_first_position(simulator: ModuleType) -> None:
    i, j = positions(150, 300, 40)
    drawn = Composed.draw((2, 150, 300), (4, 2, 2), 8, 7)
    more: dict[str, Any] = {"causal": True, "window_size_left": 90, "q_start": 40}
    drawn.seen((j <= i) & (j >= i - 90), **more).check(only_forward=True)


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize(("page_size", "queries"), [(5, 4), (16, 1), (64, 4), (None, 1)])
def test_decoding(simulator: ModuleType, page_size: int | None, queries: int, block: int) -> None:
    """In as many splits as the library likes, over pages and rows; unused rows hold NaN."""
    drawn = Composed.draw((2, queries, 520), (8, 2, 2), block, 40, seed=block + queries)
    used = torch.tensor([515, 130], dtype=torch.int32)
    caches, more = [x.clone() for x in (drawn.k, drawn.v)], {}
    for x in caches:
        for b, n in enumerate(used.tolist()):
            x[b, n:] = torch.nan
    if page_size is not None:
        pages = -(-520 // page_size)
        table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1))
        table = table.view(2, pages)
        room = pages * page_size - 520
        for i, x in enumerate(caches):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, room), value=torch.nan)
            caches[i] = torch.empty(2 * pages, page_size, 2, 64, dtype=x.dtype)
            caches[i][table] = padded.unflatten(1, (pages, page_size))
        more["page_table"] = table.int()
    i, j = positions(queries, 520, 0)
    seen = drawn.seen(j <= i + used.view(2, 1, 1, 1) - queries)
    operands = drawn.q, drawn.k, drawn.v
    wanted, eager = (seen.attend(*map(f, operands)) for f in (Tensor.double, same))
    for num_splits in (0, 1, 3):
        call = forward_call(
            drawn.q, *caches, seqused_k=used, causal=True, num_splits=num_splits, **more,
            **drawn.arguments,
        )  # fmt: skip
        with quiet_run(simulator, 1):
            out, _ = run_forward(call, sms=5 if page_size == 5 else 40)
        assert_close(out, wanted, eager, f"{num_splits} splits")


@pytest.mark.parametrize(
    ("block", "dtype", "dim", "page_size"),
    [
        (4, torch.int32, 64, 16),
        (4, torch.int64, 256, 64),
        (8, torch.int64, 64, 64),
        (8, torch.int32, 256, None),
        (4, torch.int64, 64, None),
        (16, torch.int32, 64, 16),
        (32, torch.int64, 256, None),
        (32, torch.int32, 64, 64),
        (8, torch.int32, 128, 16),
        (32, torch.int64, 128, None),
        (64, torch.int64, 64, 16),
        (64, torch.int32, 192, None),
        (128, torch.int32, 128, 64),
    ],
)
def test_entries_of_the_only_query(
    simulator: ModuleType, block: int, dtype: torch.dtype, dim: int, page_size: int | None
) -> None:
    """Repeated ones, tiles of blocks that do not exist, and none at all; other keys hold NaN.

    Blocks up to 32 are gathered. Others, and those of codes, are walked over in whole tiles.
    """
    in_fp8 = (block, dim) in ((8, 128), (32, 128))
    drawn = Composed.draw((3, 1, 600), (8, 2, 2), block, 140, seed=block)
    used = torch.tensor([600, 131, 77])
    chosen = drawn.selection.to(dtype)
    chosen[:, 0, 0, 30:110] = torch.tensor([-1, 2**31 - 1, 600 // block + 1, -(2**31)]).repeat(20)
    if dtype == torch.int64:
        chosen[:, :, :, 3] = 2**32 + 1
    chosen[0, 1, 0, 64:] = chosen[0, 1, 0, :76].flip(-1)
    chosen[1, 1] = -1
    keys = torch.arange(600)
    is_seen = (chosen[..., None] == keys // block).any(3) & (keys < used.view(3, 1, 1, 1))
    visible = is_seen.repeat_interleave(4, 1)
    drawn = drawn._replace(selection=chosen, visible=visible)
    q, k, v = (x.repeat_interleave(dim // 64, -1).roll(1, -1) for x in drawn[:3])
    if in_fp8:
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
    drawn = drawn._replace(q=q, k=k, v=v)
    wanted, eager = (drawn.attend(*map(f, drawn[:3])) for f in (Tensor.double, same))
    # a row that sees nothing reads the first block
    is_read = is_seen[:, :, 0] | (~is_seen[:, :, 0].any(-1, keepdim=True) & (keys < block))
    if in_fp8 or (block, dim) == (64, 192):
        # tiles have keys of other blocks, too
        is_read = keys < used.view(3, 1, 1)
    caches = [x.where(is_read.transpose(1, 2)[..., None], torch.nan) for x in drawn[1:3]]
    if in_fp8:
        caches = [x.to(torch.float8_e4m3fn) for x in caches]
    more: dict[str, Any] = {}
    if page_size is not None:
        pages = -(-600 // page_size)
        room = (0, 0, 0, 0, 0, pages * page_size - 600)
        padded = (torch.nn.functional.pad(x, room, value=torch.nan) for x in caches)
        caches = [x.unflatten(1, (pages, page_size)).flatten(0, 1).flip(0) for x in padded]
        more["page_table"] = torch.arange(3 * pages).flip(0).view(3, pages).int()
    for num_splits in (0, 1, 3):
        call = forward_call(
            drawn.q, *caches, seqused_k=used.int(), causal=True, num_splits=num_splits, **more,
            **drawn.arguments,
        )  # fmt: skip
        assert planned(call, Target(ARCH, num_sms=5)).problem.selection_dtype is not None
        with quiet_run(simulator, num_splits):
            out, lse = run_forward(call, sms=5)
        assert_close(out, wanted, eager, f"{num_splits} splits")
        assert lse is not None and lse[1, 4:].isneginf().all()


def test_padding_and_entries_of_a_table(simulator: ModuleType) -> None:
    """Blocks count from the first key of a sequence."""
    drawn = Composed.draw((2, 3, 200), (4, 2, 2), 4, 30, seed=9)
    left, size = torch.tensor([3, 17], dtype=torch.int32), 16
    pools, pages = [], -(-220 // size)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).view(2, pages)
    for x in (drawn.k, drawn.v):
        rows = torch.full((2, pages * size, 2, 64), torch.nan, dtype=x.dtype)
        for b, n in enumerate(left.tolist()):
            rows[b, n : n + 200] = x[b]
        pool = torch.empty(2 * pages, size, 2, 64, dtype=x.dtype)
        pool[table] = rows.unflatten(1, (pages, size))
        pools.append(pool)
    used = torch.full((2,), 200, dtype=torch.int32)
    call = forward_call(
        drawn.q, *pools, seqused_k=used, leftpad_k=left, page_table=table.flip(0).int(),
        kv_batch_idx=torch.tensor([1, 0], dtype=torch.int32), **drawn.arguments,
    )  # fmt: skip
    with quiet_run(simulator, 1):
        out, _ = run_forward(call)
    operands = drawn.q, drawn.k, drawn.v
    assert_close(out, *(drawn.attend(*map(f, operands)) for f in (Tensor.double, same)), "out")


def test_wide_heads_of_a_group(simulator: ModuleType) -> None:
    """As QSA has them: heads of 256, 16 for a KV head."""
    drawn = draw(3, 256, (4,), 150)
    check_forward(regroup(drawn, 16, 256, 4, 12), 1)


def test_lists(simulator: ModuleType) -> None:
    gen = torch.Generator().manual_seed(2)
    is_chosen = torch.rand(2, 3, 5, 70 * 32, generator=gen) < torch.rand(2, 3, 5, 1, generator=gen)
    is_chosen[0, 0, 0] = False
    weights = 1 << torch.arange(32)
    words = (is_chosen.unflatten(-1, (70, 32)) * weights).sum(-1).to(torch.int32)
    made = UnionLists(*(torch.full(x, 7777, dtype=torch.int32) for x in ((30, 2272), (2, 3, 5))))
    with quiet_run(simulator, 1, launches=1):
        compile_union_lists(ARCH).function(words, *made)
    for lists in (made, union_lists(words, 2272)):
        for blocks, found, count in zip(
            is_chosen.flatten(0, 2), lists.numbers, lists.counts.flatten(), strict=True
        ):
            numbers = blocks.nonzero().flatten().tolist()
            assert count == len(numbers)
            numbers += [~numbers[-1] if numbers else -1] * 32
            assert found[: len(numbers)].tolist() == numbers
