"""The kernel that orders block lists and makes their bits, on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from quiet_runs import quiet_run
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flash_mask_cute import block_sparsity
from flash_mask_cute.call.mask_arguments import bits_by_kernel
from flash_mask_cute.flex import block_mask
from flash_mask_cute.mask_prep import block_lists
from flash_mask_cute.mask_prep.block_lists import OrderedTensors, compile_ordered_lists
from flash_mask_cute.runtime.target import Target

# None: warps take turns; a seed: shuffled.
DELAY_SEEDS = (None, 1)
POISON = 7777


def draw(states: Tensor, state: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counts and entries of the blocks of a state, in any order; behind them, anything."""
    is_listed = states == state
    rank = torch.rand(states.shape, generator=generator) + 2 * ~is_listed
    index = rank.argsort(-1).int()
    count = is_listed.sum(-1).int()
    behind = torch.arange(states.shape[-1]) >= count[..., None]
    index[behind] = torch.tensor([-5, 1 << 30, 0, 1])[
        torch.randint(4, (int(behind.sum()),), generator=generator)
    ].int()
    return count, index


def expected(states: Tensor, state: int) -> tuple[Tensor, Tensor]:
    count = (states == state).sum(-1).int()
    index = torch.zeros_like(states, dtype=torch.int32)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in states.shape[:3])).tolist():
        found = (states[tuple(place)] == state).nonzero().flatten()
        index[tuple(place)][: len(found)] = found.int()
    return count, index


def words_of(flags: Tensor) -> Tensor:
    """By Python ints, of which the last bit is a sign."""
    rows = flags.flatten(0, 2).tolist()
    words = []
    for row in rows:
        for first in range(0, len(row), 32):
            word = sum(1 << i for i, flag in enumerate(row[first : first + 32]) if flag)
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words).int().view(*flags.shape[:3], -1)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("has_full", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 31), (1, 2, 3, 32), (2, 1, 2, 100)])
def test_lists_and_bits(
    simulator: ModuleType, shape: tuple[int, ...], has_full: bool, strided: bool
) -> None:
    g = torch.Generator().manual_seed(sum(shape))
    states = torch.randint(0, 3 if has_full else 2, shape, generator=g)
    given = [*draw(states, 1, g), *(draw(states, 2, g) if has_full else (None, None))]
    if strided:
        given = [x if x is None else x.repeat_interleave(2, -1)[..., ::2] for x in given]
    compiled = compile_ordered_lists(has_full, "sm_90a")
    for seed in DELAY_SEEDS:
        made = OrderedTensors.empty_like(states, has_full)
        for x in (*made.lists, *made.bits):
            if x is not None:
                x.fill_(POISON)
        with quiet_run(simulator, seed, launches=1):
            compiled.function(tuple(given), made.lists, *made.bits)
        wanted = [*expected(states, 1), *(expected(states, 2) if has_full else (None, None))]
        for got, right in zip(made.lists, wanted, strict=True):
            assert got is right is None or torch.equal(got, right)  # type: ignore[arg-type]
        assert torch.equal(made.bits[0], words_of(states > 0))
        assert torch.equal(made.bits[1], words_of(states == 2))


def test_entries_that_are_no_blocks_are_left_out(simulator: ModuleType) -> None:
    count, index = torch.full((1, 1, 1), 9).int(), torch.tensor([[[[2, -1, 77, 0]]]]).int()
    made = OrderedTensors.empty_like(index, False)
    function = compile_ordered_lists(False, "sm_90a").function
    function((count, index, None, None), made.lists, *made.bits)
    assert made.lists[0].tolist() == [[[2]]]
    assert made.lists[1].tolist() == [[[[0, 2, 0, 0]]]]
    assert made.bits[0].tolist() == [[[[5]]]]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("has_full", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_a_block_mask(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_full: bool,
    inference: bool,
) -> None:  # fmt: skip
    """They come with their bits, which nothing computes again."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(block_lists.Target, "from_device", lambda device: Target.named("sm_90a"))
    g = torch.Generator().manual_seed(3)
    states = torch.randint(0, 3 if has_full else 2, (2, 1, 3, 40), generator=g)
    with torch.inference_mode(inference):
        given = [x.to(dtype) for x in (*draw(states, 1, g), *draw(states, 2, g))]
        if not has_full:
            given[2:] = [None, None]  # type: ignore[list-item]
        mod = lambda b, h, q, k: q >= k  # noqa: E731
        mask = BlockMask.from_kv_blocks(*given, 16, mod, (48, 640), compute_q_blocks=False)
        simulator.RESULTS.clear()
        lists = block_mask.lists_of(mask)
        bits = block_sparsity.block_bits(lists)
        again = block_sparsity.block_bits(lists)
    assert len(simulator.RESULTS) == 1
    wanted = [*expected(states, 1), *(expected(states, 2) if has_full else (None, None))]
    for got, right in zip(lists[:4], wanted, strict=True):
        assert got is right is None or torch.equal(got, right)  # type: ignore[arg-type]
    assert lists.block_size == (16, 16) and lists.seqlens == (48, 640)
    made = block_sparsity._make_bits(lists)
    assert all(torch.equal(x, y) for x, y in zip(bits[:2], made[:2], strict=True))
    assert bits[2:] == (16, 16) and again is bits


@pytest.mark.parametrize("has_full", [False, True])
def test_bits_that_a_call_asks_for(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, has_full: bool
) -> None:
    """On a GPU by one launch, for lists that nobody has seen before."""
    monkeypatch.setattr(block_lists.Target, "from_device", lambda device: Target.named("sm_90a"))
    g = torch.Generator().manual_seed(5)
    states = torch.randint(0, 3 if has_full else 2, (2, 3, 5, 70), generator=g)
    given = [*draw(states, 1, g), *(draw(states, 2, g) if has_full else (None, None))]
    lists = block_sparsity.BlockSparseTensorsTorch(*given, block_size=(64, 64))
    simulator.RESULTS.clear()
    bits = block_sparsity.block_bits(lists, bits_by_kernel)
    assert block_sparsity.block_bits(lists, bits_by_kernel) is bits
    assert len(simulator.RESULTS) == 1
    assert torch.equal(bits[0], words_of(states > 0))
    assert torch.equal(bits[1], words_of(states == 2))
    assert bits[2:] == (64, 64)


def test_a_grid_of_many_sequences(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All dimensions of a grid but the first one end at 65535."""
    launches: list[Any] = []
    function = compile_ordered_lists(False, "sm_90a").function
    monkeypatch.setattr(simulator, "simulate", lambda found, *_, **__: launches.extend(found))
    count, index = torch.zeros(65536, 1, 1).int(), torch.zeros(65536, 1, 1, 1).int()
    made = OrderedTensors.empty_like(index, False)
    function((count, index, None, None), made.lists, *made.bits)
    simulator.RESULTS.clear()
    assert [x.grid for x in launches] == [(65536, 1, 1)]


def test_lists_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    count, index = torch.full((1, 1, 2), 7).int(), torch.zeros((1, 1, 2, 0), dtype=torch.int32)
    made = block_lists.order_lists(count, index, None, None)
    assert made.lists[0].tolist() == [[[0, 0]]]
