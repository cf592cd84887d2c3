"""A ColumnMask is moved, saved, joined with others of a batch, and intersected with another."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import attend_rows
from torch import Tensor

from flash_mask_cute import ColumnMask, builders, flash_attn_func

FORMS = [(True, 1), (True, 2), (False, 2), (True, 4), (False, 4)]
FACTS = "causal", "documents", "seqlen_q", "one_sequence"


def facts(mask: ColumnMask) -> tuple[Any, ...]:
    return tuple(getattr(mask, name) for name in FACTS)


def draw(
    rng: random.Random, form: tuple[bool, int], shape: tuple[int, int, int], rows: Any, most: int
) -> ColumnMask:
    """Few different columns, with rows from before the first query to behind the last."""
    causal, n = form
    columns = torch.tensor([[rng.randint(-2, most + 2) for _ in range(n)] for _ in range(3)])
    chosen = torch.tensor([rng.randrange(3) for _ in range(shape[0] * shape[1] * shape[2])])
    indices = columns[chosen].view(*shape, n).int()
    return ColumnMask(indices, causal, rng.choice((None, True, False)), rows)


def most_runs(hidden: Tensor) -> int:
    """The largest number of separate ranges of rows in a column of (..., rows, keys)."""
    columns = hidden.transpose(-1, -2).reshape(-1, hidden.shape[-2]).tolist()
    return max(sum(is_hidden for is_hidden, _ in itertools.groupby(x)) for x in columns)


def without_causal(mask: ColumnMask, rows: int) -> Tensor:
    """What the vectors alone hide."""
    n = mask.num_vectors
    vectors = mask.startend_row_indices[:, :, None].unbind(-1)
    row = torch.arange(rows)[:, None]
    if n == 1:
        return row >= vectors[0]
    hidden = (row >= vectors[0]) & (row < vectors[1])
    if n == 2 and not mask.causal:
        hidden = (row >= vectors[0]) | (row < vectors[1])
    if n == 4:
        hidden = hidden | (row >= vectors[2]) & (row < vectors[3])
    return hidden


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_both_against_dense_masks(first: tuple[bool, int], second: tuple[bool, int]) -> None:
    """Exact for every number of queries and keys, or refused where no form can hold it."""
    rng = random.Random(f"{first} {second}")
    refused = kept = 0
    for _ in range(60):
        rows = rng.choice((None, "any", 30, 30))
        # for an unknown number of queries, all rows that the vectors name count
        extent = rows if isinstance(rows, int) else 34
        shapes = [(rng.choice((1, 2)), rng.choice((1, 2, 4)), 7) for _ in range(2)]
        one, other = (
            draw(rng, form, shape, told, 30)
            for form, shape, told in zip(
                (first, second), shapes, (rows, rng.choice((rows, None))), strict=True
            )
        )
        heads = max(x.startend_row_indices.shape[1] for x in (one, other))

        def by_head(seen: Tensor, heads: int = heads) -> Tensor:
            return seen.repeat_interleave(heads // seen.shape[1], 1)

        runs = most_runs(
            by_head(without_causal(one, extent)) | by_head(without_causal(other, extent))
        )
        if runs > 2:
            refused += 1
            with pytest.raises(ValueError, match=r"is hidden from \d separate ranges of queries"):
                one & other
            continue
        kept += 1
        both = one & other
        assert both.causal == (one.causal or other.causal)
        for seqlen_q, seqlen_k in ((extent, None), (extent - 3, 7), (1, 5), (extent, 2)):
            wanted = by_head(one.dense(seqlen_q, seqlen_k)) & by_head(
                other.dense(seqlen_q, seqlen_k)
            )
            found = both.dense(seqlen_q, seqlen_k)
            assert torch.equal(found, wanted.expand_as(found)) and found.shape[0] == wanted.shape[0]
    assert kept > 5
    if first[1] == second[1] == 4:
        assert refused


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (lambda: builders.causal_document([3, 5]) & builders.sliding_window(8, 2), (True, 1)),
        (lambda: builders.document([3, 5]) & builders.document([5, 3]), (False, 2)),
        (lambda: builders.document([3, 5]) & builders.causal(8), (True, 2)),
        (lambda: builders.document([3, 2, 3]) & builders.causal(8), (True, 4)),
        (lambda: builders.sink_window(8, 2, 2) & builders.causal_document([4, 4]), (True, 1)),
        (lambda: builders.full(8) & builders.full(8), (False, 2)),
        (lambda: builders.key_padding(torch.ones(3, 8).int()) & builders.causal(8), (True, 1)),
        (
            lambda: (
                builders.key_padding(torch.tensor([[0, 1, 1], [1, 1, 0]]))
                & builders.key_padding(torch.tensor([[1, 0, 1]]))
            ),
            (False, 2),
        ),
    ],
)
def test_fewest_vectors(make: Callable[[], ColumnMask], form: tuple[bool, int]) -> None:
    mask = make()
    assert (mask.causal, mask.num_vectors) == form


def test_facts_of_both() -> None:
    padding = builders.key_padding(torch.ones(2, 8).int())
    assert (padding & padding).seqlen_q == "any"
    documents, window = builders.causal_document([3, 5]), builders.sliding_window(8, 2)
    assert facts(documents & padding) == (True, True, 8, True)
    assert facts(window & window) == (True, False, 8, True)
    alone = ColumnMask(window.startend_row_indices, True)
    assert facts(alone & window) == (True, None, 8, True)
    assert facts(alone & alone) == (True, None, None, False)


def test_attention_by_both() -> None:
    """Forward and backward, also with the rows of a mask that tells no number of them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 4, 16, generator=generator).double().requires_grad_()
    padding = torch.arange(40) >= torch.tensor([[9], [0]])
    for one in (builders.document([17, 23]), builders.key_padding(padding)):
        for other in (builders.sink_window(40, 3, 8), builders.key_padding(padding)):
            both = one & other
            seen = one.dense(40) & other.dense(40)
            wanted = attend_rows(q, k, v, seen).out
            found = flash_attn_func(q, k, v, startend_row_indices=both)
            assert torch.allclose(found, wanted, atol=1e-6)
            # a row that sees nothing has no gradient here, and NaN in torch
            weight = seen.any(-1)[:, 0, :, None, None].double()
            gradients = (torch.autograd.grad((x * weight).sum(), v)[0] for x in (found, wanted))
            assert torch.allclose(*gradients, atol=1e-6)


SMALL = builders.causal(8)


def part(start: int, end: int) -> ColumnMask:
    """Keys that one range of queries does not see."""
    return ColumnMask(torch.tensor([start, end]).int().expand(1, 1, 40, 2), True)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: SMALL & builders.causal(9), ValueError, "masks have 8 and 9 keys"),
        (lambda: SMALL & torch.ones(8, 8), TypeError, "unsupported operand"),
        (lambda: SMALL & SMALL.to("meta"), ValueError, "masks are on cpu and meta"),
        (
            lambda: SMALL & ColumnMask(SMALL.startend_row_indices, True, seqlen_q=7), ValueError,
            "masks were made for 8 and 7 queries",
        ),
        (
            lambda: ColumnMask(torch.zeros(2, 1, 8, 2).int(), True)
            & ColumnMask(torch.zeros(3, 1, 8, 2).int(), True),
            ValueError, "masks have 2 and 3 batch entries",
        ),
        (
            lambda: ColumnMask(torch.zeros(1, 2, 8, 2).int(), True)
            & ColumnMask(torch.zeros(1, 3, 8, 2).int(), True),
            ValueError, "masks have 2 and 3 heads; those of one call have 1, heads_kv or heads_q",
        ),
        (
            lambda: part(5, 10) & part(15, 20) & part(25, 27), ValueError,
            r"column 0 \(batch 0, head 0\) is hidden from 3 separate ranges of queries by two",
        ),
        (lambda: ColumnMask.cat([]), ValueError, "masks is empty"),
        (lambda: ColumnMask.cat(SMALL), TypeError, "is no sequence of ColumnMasks"),
        (lambda: ColumnMask.cat([SMALL, 3]), TypeError, "masks has a int, which is no ColumnMask"),
        (
            lambda: ColumnMask.cat([SMALL, builders.full(8)]), ValueError,
            "masks have causal=True and False: causal masking holds for all entries of a batch",
        ),
        (lambda: ColumnMask.cat([SMALL, builders.causal(9)]), ValueError, "8 and 9 keys"),
        (lambda: SMALL.to(torch.int64), TypeError, "device=torch.int64 is not a device"),
        (lambda: SMALL.to(None), TypeError, "device=None is not a device"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, 9])
def test_cat_against_dense_masks(causal: bool, rows: int | None) -> None:
    rng = random.Random(f"{causal} {rows}")
    forms = [form for form in FORMS if form[0] is causal]
    for _ in range(30):
        heads = rng.choice(((1, 1), (1, 4), (2, 4)))
        masks = [
            draw(rng, rng.choice(forms), (rng.choice((1, 3)), rng.choice(heads), 7), told, 9)
            for told in (rows, rng.choice((rows, None)), None)
        ]
        joined = ColumnMask.cat(masks)
        most = max(mask.startend_row_indices.shape[1] for mask in masks)
        for seqlen_q in (9, 4):
            wanted = [x.dense(seqlen_q) for x in masks]
            wanted = [x.repeat_interleave(most // x.shape[1], 1) for x in wanted]
            assert torch.equal(joined.dense(seqlen_q), torch.cat(wanted))
        told = [mask.documents for mask in masks]
        assert joined.documents is (True if True in told else None if None in told else False)
        assert joined.seqlen_q == rows and joined.causal is causal


def test_cat_keeps_documents_and_lengths() -> None:
    documents = [builders.causal_document(lengths) for lengths in ([300, 700], [512, 400, 88])]
    joined = ColumnMask.cat(documents)
    assert facts(joined) == (True, True, 1000, True)
    wanted = builders.causal_document([[300, 700], [512, 400, 88]])
    assert torch.equal(joined.startend_row_indices, wanted.startend_row_indices)
    assert torch.equal(joined.split(2).cu_seqlens, wanted.split(2).cu_seqlens)
    assert len(joined.split(2).cu_seqlens.unique()) > 3
    paddings = [builders.key_padding(torch.ones(1, 8).int()) for _ in range(2)]
    assert ColumnMask.cat(paddings).seqlen_q == "any"


def test_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = builders.causal_document([300, 700])
    mask.bounds(128)
    assert mask.to("cpu") is mask.to(torch.device("cpu"), non_blocking=True) is mask
    moved = mask.to("meta")
    assert facts(moved) == facts(mask) and moved.device.type == "meta"
    assert mask.device.type == "cpu" and not moved._bounds
    # there is no pinned memory without a GPU
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    from torch.utils.data._utils.pin_memory import pin_memory

    for pinned in (mask.pin_memory(), pin_memory({"mask": mask})["mask"]):
        assert isinstance(pinned, ColumnMask) and facts(pinned) == facts(mask)
        assert pinned.startend_row_indices is not mask.startend_row_indices
        assert torch.equal(pinned.startend_row_indices, mask.startend_row_indices)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    assert mask.pin_memory() is mask


@pytest.mark.shares(3)
def test_saved_and_loaded(tmp_path: Path) -> None:
    """`torch.load` loads weights only, in this process and in one that only imports the package."""
    masks = [
        ColumnMask(torch.randint(0, 9, (2, 1, 7, 2)).int(), False, True, rows, rows == 9)
        for rows in (None, "any", 9)
    ]
    path = tmp_path / "masks.pt"
    torch.save({"masks": masks, "step": 3}, path)
    for number, mask in enumerate(masks):
        mask.bounds(4)
        torch.save({"mask": mask}, tmp_path / "mask.pt")
        again = torch.load(path)["masks"][number], torch.load(tmp_path / "mask.pt")["mask"]
        for found in (*again, pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
            assert type(found) is ColumnMask and facts(found) == facts(mask) and not found._bounds
            assert torch.equal(found.startend_row_indices, mask.startend_row_indices)
            assert torch.equal(found.bounds(4), mask.bounds(4))
    for name in ("torch, flash_mask_cute", "flash_mask_cute.masks.builders, torch"):
        code = f"import {name}; print(*torch.load({str(path)!r})['masks'], sep='\\n')"
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert told.stdout.strip() == "\n".join(map(repr, masks)), told.stderr


def test_a_file_is_checked() -> None:
    mask = builders.causal(8)
    for wrong in ({"seqlen_q": "some"}, {"startend_row_indices": torch.zeros(3)}, {"causal": 1}):
        changed = copy.copy(mask)
        with pytest.raises((TypeError, ValueError)):
            changed.__setstate__(mask.__getstate__() | wrong)
