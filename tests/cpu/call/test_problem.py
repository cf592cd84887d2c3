from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cases import BF16, FP16
from einops import reduce
from planned import forward_call, planned

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.call.problem import AttentionProblem, fold_window
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.seqlen_info import SeqlenInfoQK


def problem_of(q: torch.Tensor, v: torch.Tensor, **keywords: Any) -> AttentionProblem:
    """Of a forward with these arguments, whose heads are not packed."""
    k = v.new_zeros((*v.shape[:-1], q.shape[-1]))
    return planned(forward_call(q, k, v, pack_gqa=False, **keywords)).problem


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_plain_problem() -> None:
    found = problem_of(tensor(2, 5, 4, 64), tensor(2, 9, 2, 48))
    assert found == AttentionProblem("bfloat16", 64, 48)


LENGTHS = torch.tensor([3, 2], dtype=torch.int32)


def test_intervals_that_take_much_painting() -> None:
    for intervals, more, kind in (
        ((1, True), {}, "other"),
        ((2, False), {}, "edges"),
        ((1, True), {"has_lists": True}, "edges"),
        ((1, True), {"has_bits": True}, "edges"),
        ((2, True), {"score_mod": "py3.11:abc"}, "score_mod"),
    ):
        problem = AttentionProblem("bfloat16", 64, 64, is_causal=True, intervals=intervals, **more)
        assert problem.tuning_class == kind


def test_sizes_and_values_do_not_change_it() -> None:
    first = problem_of(
        tensor(2, 5, 4, 64), tensor(2, 9, 2, 64), window_size_left=3, softcap=2.0, seqused_k=LENGTHS
    )
    second = problem_of(
        tensor(2, 8, 6, 64),
        tensor(2, 4, 1, 64),
        window_size_left=9,
        softcap=30.0,
        seqused_k=LENGTHS + 1,
    )
    assert first == second
    assert hash(first) == hash(second)


def test_dtype_and_head_dims_change_it() -> None:
    kinds = {
        problem_of(tensor(1, 1, 1, d, dtype=dtype), tensor(1, 1, 1, dv, dtype=dtype))
        for d, dv, dtype in ((64, 64, BF16), (64, 64, FP16), (72, 64, BF16), (64, 72, BF16))
    }
    assert len(kinds) == 4


# a band that no sequence reaches
NOTHING = False, None, -OPEN_WINDOW


@pytest.mark.parametrize(
    ("causal", "left", "right", "expected"),
    [
        (False, None, None, (False, None, None)),
        (False, 3, 4, (False, 3, 4)),
        (False, 0, 0, (False, 0, 0)),
        (True, None, None, (True, None, None)),
        (True, 3, None, (True, 3, None)),
        (True, 3, 0, (True, 3, None)),  # the nearer right edge is causal's
        (True, None, 9, (True, None, None)),
        (True, 30, -9, (False, 30, -9)),  # and here the window's
        (True, None, -2, (False, None, -2)),
        (False, OPEN_WINDOW, OPEN_WINDOW, (False, None, None)),
        (False, OPEN_WINDOW - 1, 2**40, (False, OPEN_WINDOW - 1, None)),
        (True, OPEN_WINDOW, -(2**40), (False, None, -OPEN_WINDOW)),
        (False, -5, 5, (False, -5, 5)),
        # nothing is left
        (False, -5, 4, NOTHING),
        (True, -5, 40, NOTHING),
        (True, -5, None, NOTHING),
        (False, 3, -4, NOTHING),
        (False, -(2**40), None, NOTHING),
        (False, -(2**40), 2**40, NOTHING),
    ],
)
def test_window_folding(
    causal: bool, left: int | None, right: int | None, expected: tuple[bool, int | None, int | None]
) -> None:
    assert fold_window(causal, left, right) == expected


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (4, 11), (11, 4), (1, 7), (7, 1)])
def test_folded_windows_hide_the_same(seqlen_q: int, seqlen_k: int) -> None:
    """Against the rule, score by score, and which tiles are visited in both directions."""
    sides = (None, *range(-13, 14), OPEN_WINDOW, -OPEN_WINDOW, 2**40, -(2**40))
    row, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    ahead = key - (row + seqlen_k - seqlen_q)
    seqlen = SeqlenInfoQK.create(0, seqlen_q, seqlen_k)
    for causal, left, right in product((False, True), sides, sides):
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if causal:
            seen &= ahead <= 0
        if left is not None:
            seen &= ahead >= -left
        if right is not None:
            seen &= ahead <= right
        is_causal, *window = fold_window(causal, left, right)
        is_local = window != [None, None]
        info = BlockInfo(3, 2, is_causal, is_local, False, *window)
        lo, hi = info.band(seqlen).k_range(row)
        told = (lo <= key) & (key < hi) & torch.ones_like(seen)
        assert torch.equal(told, seen), (causal, left, right)
        tiles = torch.nn.functional.pad(seen, (0, -seqlen_k % 2, 0, -seqlen_q % 3))
        tiles = reduce(tiles, "(m rows) (n cols) -> m n", "any", rows=3, cols=2)
        for visited, of_block in ((tiles, "n"), (tiles.T, "m")):
            for block, wanted in enumerate(visited):
                found = getattr(info, f"get_{of_block}_block_min_max")(seqlen, block)
                assert list(range(*found)) == wanted.nonzero().flatten().tolist()
