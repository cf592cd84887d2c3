"""Whether strided tensors share elements: against sets of addresses, and of pools of engines."""

from __future__ import annotations

import random
import time
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from flash_mask_cute.runtime import overlap
from flash_mask_cute.runtime.checks import check_outputs_apart, check_own_memory
from flash_mask_cute.runtime.overlap import (
    Layout,
    layout_repeats,
    layouts_meet,
    overlaps_itself,
    share_elements,
)


def offsets(layout: Layout) -> list[int]:
    """Of all elements, in elements."""
    indices = product(*map(range, layout.shape))
    return [sum(i * s for i, s in zip(index, layout.strides, strict=True)) for index in indices]


def bytes_of(layout: Layout, start: int = 0) -> set[int]:
    return {start + x * layout.item + i for x in offsets(layout) for i in range(layout.item)}


def draw_layout(rng: random.Random, item: int) -> Layout:
    """Any strides, or strides of a slice of a buffer, in any order."""
    rank = rng.randint(1, 4)
    shape = [rng.choice((0, 1, 2, 3, 4, 5)) if rng.random() < 0.9 else 7 for _ in range(rank)]
    if rng.random() < 0.4:
        return Layout(tuple(shape), tuple(rng.randint(0, 12) for _ in shape), item)
    strides, step = [], 1
    for n in shape:
        step *= rng.choice((1, 1, 2, 3))
        strides.append(step)
        step *= max(n + rng.choice((-1, 0, 0, 0, 1)), 1)
    places = rng.sample(range(rank), rank)
    return Layout(tuple(shape[i] for i in places), tuple(strides[i] for i in places), item)


@pytest.mark.parametrize("seed", range(4))
def test_two_tensors_against_their_addresses(seed: int) -> None:
    rng, found = random.Random(seed), {True: 0, False: 0}
    for _ in range(1500):
        one = draw_layout(rng, rng.choice((2, 2, 4)))
        other = one if rng.random() < 0.3 else draw_layout(rng, rng.choice((2, 2, 4)))
        distance = rng.randint(-other.extent, one.extent)
        expected = bool(bytes_of(one) & bytes_of(other, distance))
        assert layouts_meet(one, other, distance) is expected, (one, other, distance)
        assert layouts_meet(other, one, -distance) is expected, (one, other, distance)
        found[expected] += 1
    assert min(found.values()) > 300


@pytest.mark.parametrize("seed", range(4))
def test_one_tensor_against_its_addresses(seed: int) -> None:
    rng, found = random.Random(100 + seed), {True: 0, False: 0}
    for _ in range(1500):
        layout = draw_layout(rng, 2)
        seen = offsets(layout)
        expected = len(set(seen)) < len(seen)
        assert layout_repeats(layout.shape, layout.strides) is expected, layout
        found[expected] += 1
    assert min(found.values()) > 150


def pools(pages: int, size: int, heads: int, dim: int) -> dict[str, list[Tensor]]:
    """The tensors of a buffer that engines keep, by how they lie in it."""
    buffer = torch.empty(pages * size * heads * dim * 8, dtype=torch.bfloat16)

    def shaped(*shape: int) -> Tensor:
        return buffer[: torch.Size(shape).numel()].view(shape)

    by_page = shaped(pages, 2, size, heads, dim)
    by_dim = shaped(pages, size, heads, 2 * dim)
    by_row = shaped(pages, size, 2, heads, dim)
    by_head = shaped(pages, size, 2 * heads, dim)
    heads_first = shaped(pages, 2, heads, size, dim).transpose(2, 3)
    layers = shaped(pages, 4, 2, size, heads, dim)
    return {
        "pages": [by_page[:, 0], by_page[:, 1]],
        "halves": [by_dim[..., :dim], by_dim[..., dim:]],
        "rows": [by_row[:, :, 0], by_row[:, :, 1]],
        "heads": [by_head[:, :, 0::2], by_head[:, :, 1::2]],
        "heads first": [heads_first[:, 0], heads_first[:, 1]],
        "layers": [layers[:, i, j] for i in range(4) for j in range(2)],
    }


@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (4000, 16, 8, 128), (9000, 1, 1, 256)])
@pytest.mark.parametrize("how", list(pools(1, 1, 1, 1)))
def test_pools_of_engines_lie_apart(how: str, shape: tuple[int, int, int, int]) -> None:
    """Of any size, with their neighbours, too."""
    tensors = pools(*shape)[how]
    begin = time.perf_counter()
    for x in tensors:
        check_own_memory("k_cache", x)
    check_outputs_apart({f"pool {i}": x for i, x in enumerate(tensors)}, {})
    assert time.perf_counter() - begin < 2.0
    for x, y in combinations(tensors, 2):
        assert share_elements(x, y) is False


@pytest.mark.parametrize("how", list(pools(1, 1, 1, 1)))
def test_a_pool_that_begins_late_meets_its_neighbour(how: str) -> None:
    """Or does not: by addresses."""
    x, y = pools(3, 4, 2, 8)[how][:2]
    answers = set()
    for late in range(1, 200):
        moved = x.as_strided((1, *x.shape[1:]), x.stride(), x.storage_offset() + late)
        met = bool(_addresses(moved) & _addresses(y))
        assert share_elements(moved, y) is share_elements(y, moved) is met
        answers.add(met)
    assert True in answers


def _addresses(x: Tensor) -> set[int]:
    return {x.storage_offset() + offset for offset in offsets(Layout.of(x))}


def test_elements_of_other_sizes() -> None:
    """A float32 between two of bfloat16, and across one."""
    buffer = torch.zeros(64, dtype=torch.int16)
    ends = buffer[:32].view(8, 4)[:, ::3]
    middle = buffer[1:33].view(8, 4)[:, :2]
    assert share_elements(ends, middle) is False
    words = buffer.view(torch.int32)
    assert share_elements(words[::2], ends) is True
    assert share_elements(words[1::2], buffer[:32].view(8, 4)[:, :2]) is False


def test_what_is_said_of_an_overlap() -> None:
    buffer = torch.zeros(10, 6)
    taken = buffer[:, 2:5]
    check_outputs_apart({"out": taken}, {"q": buffer[:, :2], "k": buffer[:, 5:], "v": None})
    with pytest.raises(ValueError, match=r"^out must not share memory with k, got bytes \d+ to"):
        check_outputs_apart({"out": taken}, {"q": buffer[:, :2], "k": buffer[:, 4:]})
    with pytest.raises(ValueError, match="^out must not overlap itself .* got strides .2, 1."):
        check_own_memory("out", buffer.as_strided((5, 3), (2, 1)))
    check_own_memory("out", buffer.as_strided((5, 2), (2, 1)))


def test_what_is_too_hard_is_refused_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time: strides without a common divisor, of many elements."""
    shape, strides = (97, 89, 83, 79), (100003, 99991, 99989, 99971)
    one = Layout(shape, strides, 2)
    begin = time.perf_counter()
    layouts_meet(one, one._replace(strides=(100019, 100043, 100049, 100057)), 2 * 4373)
    layout_repeats(shape, strides)
    assert time.perf_counter() - begin < 2.0
    monkeypatch.setattr(overlap, "_MOST_VISITS", 0)
    hard = torch.zeros(400).as_strided((4, 4, 4), (31, 23, 17))
    other = torch.zeros(400)
    for cached in (overlap.layouts_meet, overlap.layout_repeats):
        cached.cache_clear()
    try:
        assert overlaps_itself(hard) is None
        with pytest.raises(ValueError, match="^dq must not overlap itself .* too hard to decide"):
            check_own_memory("dq", hard)
        third = hard.as_strided((4, 4, 4), (31, 23, 17), 1)
        with pytest.raises(ValueError, match="^dq must not share memory with q, .* too hard to"):
            check_outputs_apart({"dq": hard}, {"k": other, "q": third})
    finally:
        for cached in (overlap.layouts_meet, overlap.layout_repeats):
            cached.cache_clear()
