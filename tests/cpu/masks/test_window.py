"""`ColumnMask.window`: parts of a mask against the whole, in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from drawn_builders import DRAW
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_combine, flash_attn_func


def draw_range(rng: random.Random, length: int) -> tuple[int, int]:
    begin, end = sorted(rng.randint(0, length) for _ in range(2))
    return begin, end


def tensors(rng: random.Random, *lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return [
        torch.randn(1, n, 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for n in lengths
    ]


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """A row that sees nothing is 0."""
    return attend_rows(q, k, v, visible).out


@pytest.mark.parametrize("name", DRAW)
def test_any_part_of_any_mask(name: str) -> None:
    """Outputs and gradients, also beside a window and causal= of the call."""
    rng = random.Random(f"window {name}")
    for _ in range(8):
        mask = DRAW[name](rng, rng.choice((9, 20, 33))).mask
        seqlen = mask.startend_row_indices.shape[2]
        visible = mask.dense(seqlen)[0, 0]
        rows, keys = draw_range(rng, seqlen), draw_range(rng, seqlen)
        kept: dict[str, Any] = {}
        row, key = torch.arange(seqlen)[:, None], torch.arange(seqlen)
        if rng.random() < 0.5:
            kept["window_size"] = (5, 3)
            visible = visible & (key >= row - 5) & (key <= row + 3)
        if rng.random() < 0.3:
            # a mask of two vectors means something else if it is causal itself
            kept["causal"] = True
            visible = visible & (key <= row)
        part, q_start = mask.window(rows, keys)
        q, k, v = tensors(rng, rows[1] - rows[0], *[keys[1] - keys[0]] * 2)
        out = flash_attn_func(q, k, v, startend_row_indices=part, q_start=q_start, **kept)
        right = expected(q, k, v, visible[slice(*rows), slice(*keys)])
        assert torch.allclose(out, right, atol=1e-12), (rows, keys, kept)
        if out.numel() and k.numel():
            dout = torch.randn_like(out)
            found, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, right))
            for one, other in zip(found, wanted, strict=True):
                # LSE is kept in fp32
                assert torch.allclose(one, other, atol=2e-6)


def test_a_part_of_fewer_queries_than_keys() -> None:
    """The last row is at the last key."""
    rng = random.Random(5)
    for is_causal in (True, False):
        dense = torch.ones(7, 16, dtype=torch.bool)
        if is_causal:
            dense = dense.tril(9)
        dense[2:4, 3:9] = False
        mask = builders.from_dense(dense, seqlen_q=7)
        assert mask.causal == is_causal
        for _ in range(20):
            rows, keys = draw_range(rng, 7), draw_range(rng, 16)
            part, q_start = mask.window(rows, keys)
            assert q_start == rows[0] + 9 - keys[0]
            q, k, v = tensors(rng, rows[1] - rows[0], *[keys[1] - keys[0]] * 2)
            out = flash_attn_func(q, k, v, startend_row_indices=part, q_start=q_start)
            right = expected(q, k, v, dense[slice(*rows), slice(*keys)])
            assert torch.allclose(out, right, atol=1e-12)


def test_numbers_of_any_size() -> None:
    """Of padding, whose numbers are the largest there are, and of a tensor of the caller."""
    padding = builders.key_padding(torch.tensor([[1, 0, 1, 1]]))
    part, q_start = padding.window((2, 4), (1, 4))
    assert part.startend_row_indices[0, 0].tolist() == [[1, 1], [3, 1], [3, 1]] and q_start == 1
    least, most = -(2**31), 2**31 - 1
    wide = ColumnMask(torch.tensor([[[[least, most]], [[most, least]]]], dtype=torch.int32), True)
    part, _ = wide.window((3, 9), (0, 1))
    assert part.startend_row_indices.flatten().tolist() == [3, 9, 9, 3]


def test_a_part_must_be_called_at_its_place() -> None:
    """A mask of a part knows its queries, so a forgotten q_start is refused."""
    mask = builders.causal_document([6, 10])
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    for rows in ((8, 12), (0, 4), (2, 6)):
        part, q_start = mask.window(rows, (4, 12))
        flash_attn_func(q, k, k, startend_row_indices=part, q_start=q_start)
        if q_start != 0:
            with pytest.raises(ValueError, match="startend_row_indices was made for"):
                flash_attn_func(q, k, k, startend_row_indices=part)


def test_parts_of_the_keys_are_merged_in_three_lines() -> None:
    mask = builders.share_question([[20, 10, 8], [12, 14]])
    q, k, v = (torch.randn(1, 64, 2, 8, dtype=torch.float64) for _ in range(3))
    windows = [(mask.window((0, 64), keys), slice(*keys)) for keys in ((0, 30), (30, 64))]
    parts = [
        flash_attn_func(
            q, k[:, at], v[:, at], startend_row_indices=part, q_start=start, return_lse=True
        )
        for (part, start), at in windows
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, _ = flash_attn_combine(outs, lses.mT)
    assert torch.allclose(out, flash_attn_func(q, k, v, startend_row_indices=mask), atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "keys", "error", "text"),
    [
        ((0, 17), (0, 4), ValueError, r"rows=\(0, 17\) is not a range inside the 16 queries"),
        ((5, 4), (0, 4), ValueError, r"rows=\(5, 4\) is not a range"),
        ((-1, 4), (0, 4), ValueError, r"rows=\(-1, 4\) is not a range"),
        ((0, 4), (3, 17), ValueError, r"keys=\(3, 17\) is not a range inside the 16 keys"),
        ((0, 4.0), (0, 4), TypeError, r"rows=\(0, 4\.0\) is not \(begin, end\)"),
        ((0, 4), 4, TypeError, r"keys=4 is not \(begin, end\)"),
        ((0, True), (0, 4), TypeError, "rows="),
        ((0, 4), (0, 1, 2), TypeError, "keys="),
    ],
)
def test_refusals(rows: Any, keys: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        builders.causal_document([6, 10]).window(rows, keys)
