"""`context_parallel_attention` of two and four processes (gloo, CPU) equals one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_share import Draws
from parallel_calls import (
    METHODS,
    OTHERWISE,
    TABLE,
    Errors,
    Row,
    Told,
    draw,
    interleaved,
    run_share,
)
from process_group import run_in_processes
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func
from flash_mask_cute.parallel import Plan, context_parallel_attention
from flash_mask_cute.parallel.agreement import _COMPARED

DRAWN = Draws.of("PARALLEL", 6, what="CALLS")

DRAWS = 200
# LSE of the parts of a ring has float32, of which the merge has the rounding errors
TOLERANCE = 1e-12


def calls() -> tuple[list[Row], list[int]]:
    """Rows of the table, and seeds of draws."""
    if DRAWN.most < 0:
        return TABLE, list(range(DRAWS))
    rng, count = random.Random(DRAWN.seed), DRAWN.most
    seeds = [DRAWN.seed * DRAWS + i for i in range(count)]
    return rng.sample(TABLE, min(count, len(TABLE))), seeds


@pytest.fixture(scope="module")
def told() -> list[Told]:
    """By four processes, which begin once."""
    return run_in_processes(4, run_share, *calls())


def test_processes_equal_one(told: list[Told]) -> None:
    rows, seeds = calls()
    found: dict[Any, Errors | str] = {}
    for of_process in told:
        found |= of_process.errors
    assert len(found) == len(rows) + len(seeds)
    for row, errors in found.items():
        call = row.call() if isinstance(row, Row) else draw(row, (2, 4)[row % 2])
        if isinstance(errors, str):
            assert row in seeds and "use method='ulysses'" in errors and call.method != "ulysses"
        else:
            assert max(errors) <= TOLERANCE, (row, errors, call)


@pytest.mark.parametrize("method", METHODS)
def test_the_others_are_told_which_rank_failed(told: list[Told], method: str) -> None:
    waiting, failed = told[0].failures[method], told[1].failures[method]
    assert failed.startswith("ValueError: q must be (batch, rows, heads, head_dim) with the 32 ro")
    assert waiting.startswith("RuntimeError: context_parallel_attention: rank 0 of 2 got no answer")
    assert "from rank 1 (" in waiting and f"method {method}" in waiting


def test_ranks_that_differ_are_told(told: list[Told]) -> None:
    """All of them, before anything of a call is sent; the groups go on."""
    other = f"has other {_COMPARED[0]} than rank 0"
    texts = dict.fromkeys(OTHERWISE, other) | {"mask": "has other contents of mask than rank 0"}
    for of_process in told:
        assert len(of_process.differences) == len(METHODS) * len(texts)
        for (_, what), text in of_process.differences.items():
            assert f"context_parallel_attention: rank 1 {texts[what]}" in text


def test_ranks_that_differ_in_what_they_know_are_told_later(told: list[Told]) -> None:
    """Nothing is compared in such a call; it is in the next one that is compared, and all go on."""
    for of_process in told:
        swapped = dict(of_process.swapped)
        assert set(swapped.pop("known") + swapped.pop("swapped")) == {"nothing"}
        others = {"with other heads": _COMPARED[0]}
        assert swapped.keys() == {"fourth", "with a new mask", *others}
        for name, (text,) in swapped.items():
            what = others.get(name, "calls before this one")
            assert f": rank 1 has other {what} than rank 0" in text


def test_a_rank_may_pass_an_equal_copy_of_a_mask(told: list[Told]) -> None:
    assert all(of_process.copies_are_equal for of_process in told)


def test_parts_of_a_ring_are_rounded_once(told: list[Told]) -> None:
    for of_process in told:
        of_part, of_whole = of_process.half_precision
        assert of_part <= of_whole * 1.01


# -- without other processes --------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PLAN = Plan([[(0, 32)]])
X = torch.zeros(1, 32, 2, 8)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_process(method: Any) -> None:
    mask = builders.causal_document([20, 12])
    q, k, v = (torch.randn(1, 32, 2, 8, dtype=torch.float64) for _ in range(3))
    out = context_parallel_attention(q, k, v, mask, PLAN, method=method)
    assert torch.allclose(out, flash_attn_func(q, k, v, startend_row_indices=mask), atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_a_mask_that_changes_is_read_again() -> None:
    mask = builders.causal_document([20, 12])
    q, k, v = (torch.randn(1, 32, 2, 8, dtype=torch.float64) for _ in range(3))
    for lengths in ([20, 12], [5, 27]):
        mask.startend_row_indices.copy_(builders.causal_document(lengths).startend_row_indices)
        out = context_parallel_attention(q, k, v, mask, PLAN)
        assert torch.allclose(out, flash_attn_func(q, k, v, startend_row_indices=mask), atol=1e-12)


def _call(**changed: Any) -> Tensor:
    given: dict[str, Any] = {"q": X, "k": X, "v": X, "mask": None, "plan": PLAN}
    return context_parallel_attention(**(given | changed))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"plan": interleaved(64, 2)}, ValueError, "plan is for 2 ranks, and the group has 1"),
        ({"plan": [[(0, 32)]]}, TypeError, "plan is a list, not a Plan"),
        ({"group": "world"}, TypeError, "group must be a ProcessGroup or None, got 'world'"),
        ({"group": -100}, ValueError, "group does not have this process"),
        ({"method": "rings"}, ValueError, "method='rings' is none of 'all_gather', 'ring', 'ul"),
        ({"q": X[:, :31]}, ValueError, r"q must be .* with the 32 rows of rank 0, \(\(0, 32\),\)"),
        ({"k": X[:, :31]}, ValueError, r"k must be \(batch, rows, heads, head_dim\)"),
        ({"v": X.double()}, TypeError, r"v must have the dtype of q \(torch.float32\)"),
        ({"k": X[..., :4]}, ValueError, r"k must have the head_dim of q \(8\)"),
        ({"q": 3}, TypeError, "q is a int, not a tensor"),
        ({"mask": builders.causal(33)}, ValueError, "mask was made for 33 queries x 33 keys, and"),
        ({"mask": lambda b, h, q, k: q >= k}, NotImplementedError, "mask is a mask_mod, .*lambda"),
        ({"mask": X}, TypeError, "mask is a Tensor, not a ColumnMask or None"),
        (
            {"mask": builders.causal_document([[16, 16], [30, 2]])},
            ValueError,
            "mask has 2 batch entries and 1 heads, not 1 or 1",
        ),
        ({"mask": builders.causal(32, device="meta")}, ValueError, "mask is on meta, q on cpu"),
        ({"learnable_sink": torch.zeros(3)}, ValueError, r"learnable_sink must have .*\(2,\)"),
        ({"learnable_sink": [0.0, 0.0]}, TypeError, "learnable_sink must be a torch.Tensor"),
        ({"softcap": -1.0}, ValueError, "softcap must be 0 .off. or positive, got -1.0"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite"),
        ({"causal": 1}, TypeError, "causal"),
        ({"window_size": 3}, ValueError, "window_size must be"),
        (
            {"mask": builders.global_sliding_window(32, 3, 5), "window_size": (9, 9)},
            NotImplementedError,
            "mask hides some key from more than two separate ranges .*use method='ulysses'",
        ),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _call(**changed)


def test_a_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        _call()


@pytest.mark.parametrize(("heads", "world"), [((3, 3), 2), ((4, 4), 3), ((12, 6), 4)])
def test_heads_that_do_not_divide(heads: tuple[int, int], world: int) -> None:
    from flash_mask_cute.parallel.ulysses import check_heads

    with pytest.raises(ValueError, match=f"gives each of {world} ranks as many heads"):
        check_heads(*heads, world)


def test_a_band_alone_needs_no_mask(alone: None) -> None:
    q, k, v = (torch.randn(1, 32, 2, 8, dtype=torch.float64) for _ in range(3))
    for keywords in ({}, {"causal": True}, {"window_size": (4, 3)}):
        expected = flash_attn_func(q, k, v, **keywords)
        out = context_parallel_attention(q, k, v, None, PLAN, **keywords)
        assert torch.allclose(out, expected, atol=1e-12)
    # the same call again finds what it found
    mask = ColumnMask(torch.full((1, 1, 32, 1), 32, dtype=torch.int32), True)
    first = context_parallel_attention(q, k, v, mask, PLAN)
    assert torch.equal(first, context_parallel_attention(q, k, v, mask, PLAN))
