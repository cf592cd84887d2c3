"""ColumnMask: what it refuses, what it means, and the bounds of its key blocks."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_mask_cute.mask_prep import column_bounds
from flash_mask_cute.masks.column_mask import ColumnMask

FORMS = [(True, 1), (True, 2), (False, 2), (True, 4), (False, 4)]


def draw_indices(seed: int, *shape: int, most: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, most, shape, dtype=torch.int32, generator=generator)


def hides(values: list[int], causal: bool, row: int) -> bool:
    """Whether a key with these values hides a row, case by case from Paddle's documentation."""
    if len(values) == 4:
        return values[0] <= row < values[1] or values[2] <= row < values[3]
    if len(values) == 1:
        return row >= values[0]
    if causal:
        return values[0] <= row < values[1]
    return row >= values[0] or row < values[1]


@pytest.mark.parametrize(("causal", "num_vectors"), FORMS)
@pytest.mark.parametrize("seqlen_q", [1, 9, 14])
def test_dense(causal: bool, num_vectors: int, seqlen_q: int) -> None:
    indices = draw_indices(num_vectors, 2, 3, 9, num_vectors, most=seqlen_q + 3)
    mask = ColumnMask(indices, causal)
    for seqlen_k in (None, 9, 6, 0):
        visible = mask.dense(seqlen_q, seqlen_k)
        end = 9 if seqlen_k is None else seqlen_k
        assert visible.dtype == torch.bool
        assert visible.shape == (2, 3, seqlen_q, end)
        for b, h, q, k in torch.cartesian_prod(
            *(torch.arange(extent) for extent in visible.shape)
        ).tolist():
            expected = not hides(indices[b, h, k].tolist(), causal, q)
            if causal:
                expected &= k <= q + end - seqlen_q
            assert bool(visible[b, h, q, k]) == expected, (b, h, q, k)


def test_facts() -> None:
    indices = draw_indices(0, 1, 2, 5, 4)
    mask = ColumnMask(indices, False)
    assert mask.startend_row_indices is indices
    assert (mask.causal, mask.num_vectors, mask.device) == (False, 4, torch.device("cpu"))
    with pytest.raises(AttributeError):
        mask.causal = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ColumnMask([[0]], True), TypeError, "startend_row_indices must be .* list"),
        (lambda: ColumnMask(draw_indices(0, 1, 1, 4, 1), 1), TypeError, "causal=1 is not a bool"),
        (lambda: ColumnMask(draw_indices(0, 1, 1, 4, 1).long(), True), TypeError, "torch.int64"),
        (lambda: ColumnMask(draw_indices(0, 1, 4, 1), True), ValueError, r"got \(1, 4, 1\)"),
        (lambda: ColumnMask(draw_indices(0, 1, 1, 4, 3), True), ValueError, r"\(1, 1, 4, 3\)"),
        (lambda: ColumnMask(draw_indices(0, 1, 1, 4, 1), False), ValueError, "n = 1 hides"),
        (lambda: of_queries("all"), ValueError, "seqlen_q='all' is not an int, 'any' or None"),
        (lambda: of_queries(7.0), TypeError, r"seqlen_q=7\.0 is not an int, 'any' or None"),
        (lambda: of_queries(True), TypeError, "seqlen_q=True is not"),
        (lambda: of_queries(-1), ValueError, "seqlen_q=-1 is negative"),
        (lambda: of_queries(7).dense(8), ValueError, "seqlen_q=8 of a mask with 7 queries"),
        (lambda: some_mask().dense(4, 8), ValueError, "seqlen_k=8 of a mask with 7 keys"),
        (lambda: some_mask().dense(4.0), TypeError, r"seqlen_q=4\.0 is not an int"),
        (lambda: some_mask().dense(4, 2.0), TypeError, r"seqlen_k=2\.0 is not an int"),
        (lambda: some_mask().bounds(0), ValueError, "tile_n=0 is not positive"),
        (lambda: some_mask().bounds(4.0), TypeError, r"tile_n=4\.0 is not an int"),
        (lambda: some_mask().bounds([4]), TypeError, r"tile_n=\[4\] is not an int"),
        (lambda: some_mask().split("1"), TypeError, "batch='1' is not an int"),
        (lambda: some_mask().split(True), TypeError, "batch=True is not an int"),
        (lambda: some_mask().bounds(4, [0, 7]), TypeError, "cu_seqlens_k is a list"),
        (lambda: some_mask().bounds(4, torch.tensor([0, 7])), ValueError, "torch.int64"),
        (lambda: some_mask().bounds(4, torch.tensor([]).int()), ValueError, r"\(0,\)"),
        (lambda: some_mask().bounds(4, torch.empty(2, device="meta").int()), ValueError, "meta"),
        (lambda: some_mask(2).bounds(4, torch.tensor([0, 7]).int()), ValueError, "has batch 2"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def of_queries(seqlen_q: Any) -> ColumnMask:
    return ColumnMask(draw_indices(0, 1, 1, 7, 2), True, seqlen_q=seqlen_q)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (lambda: ColumnMask(draw_indices(0, 2, 3, 70, 4), False),
         "shape=(2, 3, 70, 4), causal=False, an unknown number of queries x 70 keys"),
        (lambda: of_queries(9), "shape=(1, 1, 7, 2), causal=True, 9 queries x 7 keys"),
        (lambda: of_queries("any"), "shape=(1, 1, 7, 2), causal=True, any number of queries x 7"),
        (lambda: ColumnMask(draw_indices(0, 1, 1, 7, 1), True, documents=True, seqlen_q=7),
         "shape=(1, 1, 7, 1), causal=True, documents=True, 7 queries x 7 keys, device=cpu)"),
    ],
)  # fmt: skip
def test_repr_is_one_line(mask: Callable[[], ColumnMask], text: str) -> None:
    told = repr(mask())
    assert told.startswith(f"ColumnMask({text}") and told.endswith("device=cpu)")
    assert "\n" not in told and str(mask()) == told


def some_mask(batch: int = 1) -> ColumnMask:
    return ColumnMask(draw_indices(0, batch, 1, 7, 2), True)


# -- bounds -------------------------------------------------------------------------------------


def assert_bounds(block: Tensor, keys: Tensor) -> None:
    """block (..., 2 * n) against keys (..., num_keys, n), value by value."""
    for v in range(keys.shape[-1]):
        assert torch.equal(block[..., 2 * v], keys[..., v].min(-1).values)
        assert torch.equal(block[..., 2 * v + 1], keys[..., v].max(-1).values)


@pytest.mark.parametrize("tile_n", [1, 64, 80, 112, 128, 500])
@pytest.mark.parametrize("seqlen_k", [1, 80, 112, 225, 256])
@pytest.mark.parametrize("num_vectors", [1, 2, 4])
def test_bounds(num_vectors: int, seqlen_k: int, tile_n: int) -> None:
    indices = draw_indices(seqlen_k, 2, 3, seqlen_k, num_vectors, most=999)
    bounds = ColumnMask(indices, True).bounds(tile_n)
    num_blocks = -(-seqlen_k // tile_n)
    assert (bounds.shape, bounds.dtype) == ((2, 3, 2 * num_vectors, num_blocks), torch.int32)
    assert bounds.is_contiguous()
    for block in range(num_blocks):
        assert_bounds(bounds[..., block], indices[:, :, block * tile_n : (block + 1) * tile_n])


def test_bounds_of_any_strides() -> None:
    plain = draw_indices(1, 2, 3, 90, 2)
    expected = ColumnMask(plain, True).bounds(32)
    for strided in (
        plain.transpose(2, 3).contiguous().transpose(2, 3),
        torch.stack((plain, plain), -1)[..., 1],
        plain.flip(2).flip(2),
    ):
        assert torch.equal(ColumnMask(strided, True).bounds(32), expected)
    expanded = plain[:1, :1].expand(4, 5, 90, 2)
    assert torch.equal(ColumnMask(expanded, True).bounds(32), expected[:1, :1].expand(4, 5, 4, 3))


def test_bounds_without_keys() -> None:
    assert ColumnMask(draw_indices(0, 2, 3, 0, 4), False).bounds(64).shape == (2, 3, 8, 0)


@pytest.mark.parametrize("tile_n", [1, 64, 80, 112])
def test_bounds_of_packed_sequences(tile_n: int) -> None:
    rng = random.Random(tile_n)
    for trial in range(12):
        lengths = [rng.choice((0, 1, 63, 64, 80, 112, 127, 200)) for _ in range(rng.randint(1, 6))]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        # keys past the last sequence belong to none
        total = sum(lengths) + rng.choice((0, 0, 5))
        indices = draw_indices(trial, 1, 2, total, 2, most=999)
        bounds = ColumnMask(indices, False).bounds(tile_n, cu_seqlens)
        assert bounds.shape == (1, 2, 4, total // tile_n + len(lengths))
        used: set[int] = set()
        for b, length in enumerate(lengths):
            start = int(cu_seqlens[b])
            for i in range(-(-length // tile_n)):
                block = start // tile_n + b + i
                assert block not in used and block < bounds.shape[3]
                used.add(block)
                first, end = start + i * tile_n, min(start + (i + 1) * tile_n, start + length)
                assert_bounds(bounds[..., block], indices[:, :, first:end])


# -- what is kept -------------------------------------------------------------------------------


def test_bounds_are_kept() -> None:
    mask = some_mask()
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    first = mask.bounds(4)
    assert mask.bounds(4) is first
    assert mask.bounds(2) is not first
    packed = mask.bounds(4, cu_seqlens)
    assert mask.bounds(4, cu_seqlens) is packed
    assert packed is not first
    assert mask.bounds(4, cu_seqlens.clone()) is not packed
    assert mask.bounds(4) is first


def test_a_change_in_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = some_mask()
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    kept = [mask.bounds(4), mask.bounds(2), mask.bounds(4, cu_seqlens)]
    computed = count_computations(monkeypatch)
    for again in (mask.bounds(4), mask.bounds(2), mask.bounds(4, cu_seqlens)):
        assert any(again is tensor for tensor in kept)
    assert computed == []

    mask.startend_row_indices[:, :, 1] = 4321
    assert mask.bounds(4) is kept[0]
    assert computed == [(4, False)]
    assert kept[0][0, 0, 1].tolist()[0] == 4321
    assert kept[1].max() < 4321, "not asked for yet"
    mask.bounds(4)
    assert mask.bounds(2).max() == 4321
    assert mask.bounds(4, cu_seqlens).max() == 4321
    assert computed == [(4, False), (2, False), (4, True)]

    cu_seqlens.copy_(torch.tensor([0, 5, 7]))
    again = mask.bounds(4, cu_seqlens)
    assert again is kept[2]
    assert_bounds(again[..., 0], mask.startend_row_indices[:, :, :4])
    assert_bounds(again[..., 1], mask.startend_row_indices[:, :, 4:5])
    assert_bounds(again[..., 2], mask.startend_row_indices[:, :, 5:])


def count_computations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Grows by (tile_n, is_packed) at each computation."""
    from flash_mask_cute.masks import column_mask

    computed: list[tuple[int, bool]] = []
    original = column_mask.fill_bounds

    def counted(indices: Tensor, bounds: Tensor, tile_n: int, cu_seqlens_k: Any) -> None:
        computed.append((tile_n, cu_seqlens_k is not None))
        original(indices, bounds, tile_n, cu_seqlens_k)

    monkeypatch.setattr(column_mask, "fill_bounds", counted)
    return computed


def test_refresh_sees_what_torch_does_not_count() -> None:
    mask = some_mask()
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    kept = [mask.bounds(4), mask.bounds(2), mask.bounds(4, cu_seqlens)]
    mask.startend_row_indices.data[:] = 99
    assert mask.bounds(4).max() < 99
    mask.refresh()
    for bounds in kept:
        assert (bounds[..., :2] == 99).all()
    assert mask.bounds(2) is kept[1]


def test_refresh_of_a_new_mask_does_nothing() -> None:
    some_mask().refresh()


def test_old_lengths_are_forgotten() -> None:
    """New tensors get the addresses, and the `id`s, of old ones."""
    mask = some_mask()
    for step in range(20):
        cu_seqlens = torch.tensor([0, 1 + step % 4, 7], dtype=torch.int32)
        bounds = mask.bounds(4, cu_seqlens)
        assert_bounds(bounds[..., 0], mask.startend_row_indices[:, :, : 1 + step % 4])
        mask.refresh()
    assert len(mask._bounds) <= 2


def test_a_mask_is_freed_without_the_garbage_collector() -> None:
    mask = some_mask()
    cu_seqlens = torch.tensor([0, 7], dtype=torch.int32)
    mask.bounds(4, cu_seqlens)
    mask.bounds(4)
    gone = weakref.ref(mask)
    gc.disable()
    try:
        del mask
        assert gone() is None
    finally:
        gc.enable()


def test_inference_mode() -> None:
    """Tensors made in it have no version; what is kept must be writable outside of it."""
    mask = some_mask()
    with torch.inference_mode():
        kept = mask.bounds(4)
        unversioned = ColumnMask(draw_indices(0, 1, 1, 7, 2), True)
        unversioned.bounds(4)
    mask.startend_row_indices.fill_(77)
    assert mask.bounds(4) is kept
    assert (kept == 77).all()
    with torch.inference_mode():
        unversioned.startend_row_indices.fill_(5)
    assert (unversioned.bounds(4) == 5).all()
    unversioned.startend_row_indices.numpy()[...] = 6
    assert (unversioned.bounds(4) == 6).all()


@pytest.mark.parametrize("what", ["mask", "lengths"])
def test_bounds_of_packed_sequences_in_inference_mode(what: str) -> None:
    """Whichever of the two was made there."""
    with torch.inference_mode(what == "lengths"):
        cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    with torch.inference_mode(what == "mask"):
        mask = ColumnMask(draw_indices(0, 1, 1, 7, 2), True)
    mask.bounds(4, cu_seqlens)
    with torch.inference_mode():
        cu_seqlens.copy_(torch.tensor([0, 5, 7]))
        mask.startend_row_indices.fill_(8)
        mask.startend_row_indices[:, :, 4:] = 9
        bounds = mask.bounds(4, cu_seqlens)
    for block, keys in enumerate((slice(0, 4), slice(4, 5), slice(5, 7))):
        assert_bounds(bounds[..., block], mask.startend_row_indices[:, :, keys])


def test_documents_in_inference_mode() -> None:
    with torch.inference_mode():
        ends = torch.full((1, 1, 1100, 1), 1100, dtype=torch.int32)
        mask = ColumnMask(ends, True, documents=True)
        assert mask.split(1).cu_seqlens.unique().tolist() == [0, 1100]
        ends[:, :, :600] = 600
        assert mask.split(1).cu_seqlens.unique().tolist() == [0, 600, 1100]
    ends.numpy()[:, :, :600] = 1100
    assert mask.split(1).cu_seqlens.unique().tolist() == [0, 1100]


@pytest.mark.parametrize("total", [0, 9])
def test_no_sequences(total: int) -> None:
    mask = ColumnMask(torch.zeros((1, 1, total, 1), dtype=torch.int32), True)
    bounds = mask.bounds(4, torch.zeros(1, dtype=torch.int32))
    assert bounds.shape == (1, 1, 2, total // 4)


# -- the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_vectors", [1, 2, 4])
def test_the_kernel_compiles(num_vectors: int, is_packed: bool) -> None:
    compiled = column_bounds.compile_column_bounds(num_vectors, is_packed, "sm_90a")
    assert column_bounds.compile_column_bounds(num_vectors, is_packed, "sm_90a") is compiled


def test_it_can_be_pickled_after_use() -> None:
    """Data loaders send masks from process to process."""
    mask = ColumnMask(torch.zeros((1, 1, 200, 2), dtype=torch.int32), True, seqlen_q=200)
    lengths = torch.tensor([0, 50, 200], dtype=torch.int32)
    bounds = mask.bounds(64, lengths)
    copy = pickle.loads(pickle.dumps(mask))
    assert torch.equal(copy.startend_row_indices, mask.startend_row_indices)
    assert copy.seqlen_q == 200
    assert copy.causal and torch.equal(copy.bounds(64, lengths), bounds)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="seqlen_q=-1"):
        ColumnMask(torch.zeros((1, 1, 8, 2), dtype=torch.int32), True).dense(-1)


def test_a_dense_mask_is_sent_to_its_builder() -> None:
    with pytest.raises(TypeError, match=r"got torch.bool; builders.from_dense\(mask\)"):
        ColumnMask(torch.ones((8, 8), dtype=torch.bool), True)
