"""Which backwards take each query's selection as query lists, and what explain says of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import backward_call, planned

from flash_mask_cute import SelectedBlocks, explain
from flash_mask_cute.call import query_lists
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")


def selection_of(
    heads: tuple[int, int, int] = (16, 2, 2),
    dims: tuple[int, int] = (64, 64),
    block: int = 128,
    target: str = "sm_90a",
    **more: Any,
) -> str:
    """What explain says. heads: of q, of k, of the selection."""
    n, (heads_q, heads_kv, heads_selection), (d, d_v) = 300, heads, dims
    q, k, v = (
        torch.zeros(1, n, h, x, dtype=torch.bfloat16)
        for h, x in ((heads_q, d), (heads_kv, d), (heads_kv, d_v))
    )
    chosen = SelectedBlocks(torch.zeros(1, heads_selection, n, 2, dtype=torch.int32), block)
    told = explain(q, k, v, target=target, block_sparse_tensors=chosen, **more)
    assert told.backward is not None
    return told.backward.selection


def test_lists() -> None:
    """Beside what other arguments: plan rows with `selected`."""
    more: dict[str, Any] = {"causal": True, "softcap": 3.0, "q_start": 5}
    assert selection_of((24, 2, 2), (128, 128), 64, **more).startswith("query lists")
    for dims in ((80, 80), (64, 96), (192, 128), (256, 256)):
        assert selection_of(dims=dims).startswith("query lists"), dims
    assert selection_of((6, 2, 2), (256, 256)).startswith("query lists")


@pytest.mark.parametrize(
    ("why", "given"),
    [
        ("on Blackwell", {"target": "sm_100a"}),
        ("sums in a fixed order", {"deterministic": True}),
        ("groups of 65 query heads", {"heads": (65, 1, 1)}),
        ("a selection by query head", {"heads": (16, 2, 16)}),
        ("blocks of 32 keys", {"block": 32}),
        ("groups of 2 query heads beside 232 col", {"heads": (4, 2, 2), "dims": (64, 232)}),
    ],
)
def test_bits(why: str, given: dict[str, Any]) -> None:
    assert selection_of(**given).startswith(f"bits: {why}")


def test_bits_where_the_heads_of_a_choice_are_too_many_for_a_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert query_lists.MOST_CTAS == 65535
    monkeypatch.setattr(query_lists, "MOST_CTAS", 1)
    assert selection_of((16, 2, 1)).startswith("query lists")
    assert selection_of((16, 2, 2)) == "bits: a selection by 2 heads, more than 1"


@pytest.mark.parametrize(("queries", "tile_n"), [(262_080, 0), (262_079, 128)])
def test_bits_where_32_bits_do_not_number_sums(queries: int, tile_n: int) -> None:
    """Sums of dQ of 64 heads with 128 columns."""
    of_row = torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16).expand(-1, queries, -1, -1)
    keys = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16)
    lse = torch.zeros(1, 64, 1).expand(-1, -1, queries)
    chosen = SelectedBlocks(torch.zeros(1, 1, queries, 1, dtype=torch.int32), 128)
    given = {"block_sparse_tensors_torch": chosen}
    call = backward_call(of_row, keys, keys, of_row, of_row, lse, **given)
    assert planned(call, Target("sm_90a", 132)).problem.query_lists == tile_n
