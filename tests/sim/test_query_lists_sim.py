"""The kernels that make query lists, on the software GPU, against the dense mask of a selection."""

from __future__ import annotations

import os
import random
from types import ModuleType

import pytest
import torch
from conftest import ACTIVE_ARCH
from drawn_lists import DrawnLists, check_lists, draw_lists
from quiet_runs import quiet_run

from flash_mask_cute.core.query_lists import SEGMENT
from flash_mask_cute.mask_prep.query_lists import (
    ListExtents,
    ListFacts,
    ListLengths,
    MadeLists,
    compile_query_lists,
    empty_lists,
    fill_lists,
)
from flash_mask_cute.runtime.dtypes import dtype_name

SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
DRAWN = 10


def drawn_seeds() -> list[int]:
    if SEED == "0":
        return list(range(DRAWN))
    rng = random.Random(f"lists {SEED}")
    return [rng.randrange(1 << 30) for _ in range(DRAWN)]


def make(simulator: ModuleType, drawn: DrawnLists, delay: int) -> MadeLists:
    by_entry, facts, extents, lengths = drawn
    made = empty_lists(by_entry, facts, extents)
    for x in made:
        x.fill_(77)
    function = compile_query_lists(facts, dtype_name(by_entry.dtype), ACTIVE_ARCH).function
    with quiet_run(simulator, delay, launches=1):
        fill_lists(function, by_entry, made, facts, extents, lengths)
    return made


@pytest.mark.parametrize("number", range(DRAWN))
def test_draws(simulator: ModuleType, number: int) -> None:
    drawn = draw_lists(drawn_seeds()[number])
    check_lists(drawn, make(simulator, drawn, number), SEGMENT)


def test_long_lists_and_many_blocks(simulator: ModuleType) -> None:
    """Lists in several segments, more blocks than a CTA scans at once, and the same in each run."""
    n, keys = 2500, 17000
    gen = torch.Generator().manual_seed(1)
    selection = torch.randint(0, 1100, (1, 1, n, 3), generator=gen)
    selection[..., 0] = 0
    extents = ListExtents(1, n, keys, keys, 1, 3, 16, 16, n, 2048)
    drawn = DrawnLists(selection, ListFacts(), extents, ListLengths())
    made = [make(simulator, drawn, delay) for delay in (1, 2)]
    check_lists(drawn, made[0], SEGMENT)
    count = int(made[0].num_items)
    used = int(made[0].items[0, :count, 3].max())
    assert torch.equal(made[0].tokens[:, :used], made[1].tokens[:, :used])
    assert torch.equal(made[0].items[:, :count], made[1].items[:, :count])


def test_many_entries_of_a_query(simulator: ModuleType) -> None:
    """More entries of a chunk than are sorted at a time, and of a query than a warp has lanes."""
    n, keys, k = 300, 1000, 40
    selection = torch.randint(-3, 66, (1, 2, n, k), generator=torch.Generator().manual_seed(2))
    extents = ListExtents(1, n, keys, keys, 2, k, 16, 16, n, 256)
    drawn = DrawnLists(selection, ListFacts(is_causal=True), extents, ListLengths())
    check_lists(drawn, make(simulator, drawn, 1), SEGMENT)
