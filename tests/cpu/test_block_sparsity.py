"""Block lists: checks, conversions and other block sizes, against dense definitions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from flash_mask_cute import block_sparsity
from flash_mask_cute.block_sparsity import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockSparseTensorsTorch,
    RetiledLists,
    block_bits,
    check_block_lists,
    dense_states,
    from_block_mask,
    retile_lists,
    to_cute_block_sparse_tensors,
)

CPU = torch.device("cpu")


def lists_of(
    states: Tensor, block_size: tuple[int, int] | None = None, has_full: bool = True
) -> Any:
    """Block lists of dense states, one Python list at a time."""
    tensors = []
    for state in (PARTIAL, FULL)[: 1 + has_full]:
        cnt = torch.zeros(states.shape[:3], dtype=torch.int32)
        idx = torch.zeros(states.shape, dtype=torch.int32)
        for b, h, m in torch.cartesian_prod(*map(torch.arange, states.shape[:3])).tolist():
            row = [n for n, found in enumerate(states[b, h, m].tolist()) if found == state]
            cnt[b, h, m] = len(row)
            idx[b, h, m, : len(row)] = torch.tensor(row, dtype=torch.int32)
        tensors += [cnt, idx]
    return BlockSparseTensorsTorch(*tensors, block_size=block_size)


def random_states(*shape: int, seed: int = 0) -> Tensor:
    """Runs of equal states, so that tiles over several blocks are not all partial."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(
        0, 3, (*shape[:2], -(-shape[2] // 3), -(-shape[3] // 3)), generator=generator
    )
    states = coarse.repeat_interleave(3, 2).repeat_interleave(3, 3)[..., : shape[2], : shape[3]]
    noise = torch.rand(shape, generator=generator) < 0.1
    return torch.where(noise, torch.randint(0, 3, shape, generator=generator), states).to(
        torch.uint8
    )


def check(lists: BlockSparseTensorsTorch, seqlen_q: int, seqlen_k: int, **more: Any) -> Any:
    problem = {"batch": 2, "heads_q": 3, "device": CPU} | more
    return check_block_lists(lists, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **problem)


# -- lists and states ---------------------------------------------------------------------------


def test_dense_states_of_lists() -> None:
    states = random_states(2, 3, 5, 41)
    assert torch.equal(dense_states(lists_of(states)), states)
    without_full = states.clamp(max=PARTIAL)
    assert torch.equal(dense_states(lists_of(without_full, has_full=False)), without_full)


def test_entries_behind_the_count_are_not_read() -> None:
    states = random_states(1, 1, 6, 9)
    lists = lists_of(states)
    for cnt, idx in ((lists[0], lists[1]), (lists[2], lists[3])):
        idx[torch.arange(9) >= cnt[..., None]] = 2**31 - 1
    assert torch.equal(dense_states(lists), states)


@pytest.mark.parametrize("has_full", [True, False])
def test_lists_of_states(has_full: bool) -> None:
    states = random_states(2, 1, 7, 33, seed=3)
    made = block_sparsity._to_lists(states, has_full, (128, 64))
    expected = lists_of(states, (128, 64), has_full)
    assert made.block_size == (128, 64)
    assert all(torch.equal(x, y) for x, y in zip(made[: 2 + 2 * has_full], expected, strict=False))
    assert has_full or made[2:4] == (None, None)


# -- torch's BlockMask --------------------------------------------------------------------------

TORCH_MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (q - k).abs() < 100,
    "by-head": lambda b, h, q, k: k < (h + 1) * 120,
    "by-batch": lambda b, h, q, k: (q // 90 == k // 90) & (k >= b * 50),
}


@pytest.mark.parametrize("name", TORCH_MASKS)
@pytest.mark.parametrize("block", [(64, 64), (128, 32)], ids=str)
def test_torch_block_mask(name: str, block: tuple[int, int]) -> None:
    mask, seqlen_q, seqlen_k = TORCH_MASKS[name], 256, 384
    block_mask = torch_block_mask(mask, 2, 3, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block)
    lists = check(from_block_mask(block_mask), seqlen_q, seqlen_k)
    assert lists.block_size == block
    dense = dense_mask(mask, 2, 3, seqlen_q, seqlen_k)
    assert torch.equal(dense_states(lists), states_of(dense, *block))
    # the way of the FlexAttention post: nothing is said of the block size
    plain = BlockSparseTensorsTorch(*block_mask.as_tuple()[2:6])
    assert plain.block_size is None
    assert torch.equal(dense_states(plain), dense_states(lists))


def dense_mask(
    mask: Callable[..., Tensor], batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    axes = (torch.arange(n) for n in (batch, heads, seqlen_q, seqlen_k))
    return mask(*torch.meshgrid(*axes, indexing="ij"))


def states_of(dense: Tensor, block_q: int, block_k: int) -> Tensor:
    """The definition, block by block; blocks end where the sequence ends."""
    rows = dense.split(block_q, dim=2)
    blocks = [[block.flatten(2) for block in row.split(block_k, dim=3)] for row in rows]
    return torch.stack(
        [
            torch.stack(
                [
                    torch.where(block.all(-1), FULL, torch.where(block.any(-1), PARTIAL, EMPTY))
                    for block in row
                ],
                dim=-1,
            )
            for row in blocks
        ],
        dim=2,
    ).to(torch.uint8)


def test_own_lists_pass_through() -> None:
    lists = lists_of(random_states(1, 1, 2, 2))
    assert from_block_mask(lists) is lists


@pytest.mark.parametrize("wrong", [None, (1, 2), "mask", SimpleNamespace(BLOCK_SIZE=(1, 1))])
def test_what_is_no_block_mask(wrong: object) -> None:
    with pytest.raises(TypeError, match="block_sparse_tensors_torch must be .* got"):
        from_block_mask(wrong)


def test_to_cute_shares_memory() -> None:
    lists = lists_of(random_states(2, 1, 3, 5))
    cute_lists = to_cute_block_sparse_tensors(lists)
    assert cute_lists is not None
    for made, tensor in zip(cute_lists, lists, strict=False):
        assert (made.shape, made.stride) == (tuple(tensor.shape), tensor.stride())
        assert made.data_ptr == tensor.data_ptr()
    assert cute_lists._fields == lists._fields[:4]
    assert to_cute_block_sparse_tensors(lists._replace(full_block_cnt=None, full_block_idx=None))[
        2:
    ] == (None, None)
    assert to_cute_block_sparse_tensors(None) is None


def test_to_cute_of_awkward_strides() -> None:
    lists = lists_of(random_states(1, 1, 3, 5))
    odd = lists._replace(mask_block_idx=lists.mask_block_idx.mT.contiguous().mT)
    made = to_cute_block_sparse_tensors(odd)
    assert made is not None and made.mask_block_idx.stride == (15, 15, 5, 1)
    one = to_cute_block_sparse_tensors(BlockSparseTensorsTorch(*(x[..., :1] for x in lists[:4])))
    assert one is not None and one.mask_block_cnt.shape == (1, 1, 1)
    expanded = to_cute_block_sparse_tensors(
        BlockSparseTensorsTorch(*(x.expand(4, *x.shape[1:]) for x in lists[:4]))
    )
    assert expanded is not None and expanded.mask_block_idx.stride == (0, 15, 5, 1)


# -- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "seqlens", "expected"),
    [
        ((6, 7), (768, 896), (128, 128)),
        ((1, 1), (5, 100), (128, 128)),
        ((3, 2), (300, 255), (128, 128)),  # 112 fits too; the usual size goes first
        ((12, 14), (768, 896), (64, 64)),
        ((0, 0), (0, 0), (128, 128)),
    ],
    ids=str,
)
def test_inferred_block_size(
    blocks: tuple[int, int], seqlens: tuple[int, int], expected: tuple[int, int]
) -> None:
    lists = lists_of(random_states(1, 1, *blocks))
    assert check(lists, *seqlens).block_size == expected


def test_inferred_block_size_is_the_only_one() -> None:
    """Against trying every multiple of 16."""
    seen = {"none": 0, "one": 0, "many": 0}
    for seqlen in (1, 15, 16, 17, 200, 256, 500, 1000):
        for count in range(2, 40):
            fitting = [b for b in range(16, 2048, 16) if -(-seqlen // b) == count]
            assert list(block_sparsity._fitting_blocks(count, seqlen)) == fitting
            seen[("none", "one", "many")[min(len(fitting), 2)]] += 1
    assert min(seen.values()) > 5


def test_one_block_has_any_size() -> None:
    lists = check(lists_of(random_states(1, 1, 1, 14)), 300, 896)
    assert lists.block_size == (384, 64)


def test_a_given_block_size_stays() -> None:
    lists = lists_of(random_states(2, 3, 3, 2), (90, 130))
    assert check(lists, 257, 255) == lists
    assert check(lists._replace(block_size=[90, 130]), 257, 255).block_size == (90, 130)


GOOD = lists_of(random_states(2, 1, 3, 5))
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no-tensor": ({"mask_block_cnt": [1]}, TypeError,
                  "mask_block_cnt must be a torch tensor, got list"),
    "none": ({"mask_block_idx": None}, TypeError,
             "mask_block_idx must be a torch tensor, got NoneType"),
    "dtype": ({"full_block_idx": GOOD.full_block_idx.long()}, ValueError,
              "full_block_idx must be int32, got torch.int64"),
    "rank": ({"mask_block_cnt": GOOD.mask_block_cnt[0]}, ValueError,
             r"mask_block_cnt must have 3 dimensions, got shape \(1, 3\)"),
    "rank-idx": ({"mask_block_idx": GOOD.mask_block_idx[0]}, ValueError,
                 r"mask_block_idx must have 4 dimensions, got shape \(1, 3, 5\)"),
    "shapes": ({"mask_block_cnt": GOOD.mask_block_cnt[:, :, :2]}, ValueError,
               r"mask_block_cnt must have shape \(2, 1, 3\) beside .*, got \(2, 1, 2\)"),
    "half-of-full": ({"full_block_idx": None}, ValueError,
                     "full_block_cnt is given and full_block_idx is not"),
    "device": ({"full_block_cnt": GOOD.full_block_cnt.to("meta")}, ValueError,
               "full_block_cnt must be on cpu, as q is, got meta"),
    "blocks": (
        {"block_size": (100, 128)},
        ValueError,
        r"must have 4 x 5 blocks for block_size \(100, 128\), seqlen_q 384 and seqlen_k 640",
    ),
    "block-size": ({"block_size": (0, 128)}, ValueError,
                   r"block_size must be positive, got \(0, 128\)"),
    "block-size-float": ({"block_size": (128, 128.5)}, ValueError,
                         r"block_size must be \(queries, keys\), got \(128, 128\.5\)"),
    "block-size-rank": ({"block_size": (1, 2, 3)}, ValueError, "block_size must be .*1, 2, 3"),
    "count": ({"mask_block_cnt": torch.full_like(GOOD.mask_block_cnt, 6)}, ValueError,
              r"mask_block_cnt must lie in \[0, 5\], got 6"),
    "negative-count": ({"full_block_cnt": torch.full_like(GOOD.full_block_cnt, -1)}, ValueError,
                       r"full_block_cnt must lie in \[0, 5\], got -1"),
    "order": (
        {
            "mask_block_cnt": torch.full_like(GOOD.mask_block_cnt, 2),
            "mask_block_idx": torch.full_like(GOOD.mask_block_idx, 3),
        },
        ValueError,
        r"mask_block_idx must be strictly increasing .* got \[3, 3\] at .* = \(0, 0, 0\)",
    ),
    "index": (
        {
            "full_block_cnt": torch.ones_like(GOOD.full_block_cnt),
            "full_block_idx": torch.full_like(GOOD.full_block_idx, 5),
        },
        ValueError,
        r"full_block_idx must lie in \[0, 4\], got 5",
    ),
    "disjoint": ({"full_block_cnt": GOOD.mask_block_cnt, "full_block_idx": GOOD.mask_block_idx},
                 ValueError, "mask_block_idx and full_block_idx must be disjoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, error, message = REFUSALS[name]
    assert check(GOOD, 384, 640).block_size == (128, 128)
    with pytest.raises(error, match=message):
        check(GOOD._replace(**changes), 384, 640)


@pytest.mark.parametrize(("batch", "heads"), [(2, 1), (2, 7), (1, 1), (1, 4)])
def test_broadcast_of_batch_and_heads(batch: int, heads: int) -> None:
    lists = lists_of(random_states(batch, heads, 3, 5))
    check(lists, 384, 640, batch=2, heads_q=heads)
    with pytest.raises(ValueError, match=r"mask_block_idx must have 1 or 9 as dimension"):
        check(lists_of(random_states(3, 2, 3, 5)), 384, 640, batch=9, heads_q=9)
    if heads > 1:
        with pytest.raises(ValueError, match=r"1 or 3 as dimension 1 \(query heads\), got shape"):
            check(lists, 384, 640, batch=2, heads_q=3)


@pytest.mark.parametrize(
    ("blocks", "seqlens", "reason"),
    [
        ((6, 4), (384, 896), "4 blocks for seqlen_k 896, and any of 224 to 288 fits"),
        ((2, 14), (800, 896), "2 blocks for seqlen_q 800, and any of 400 to 784 fits"),
        ((300, 7), (768, 896), "300 blocks for seqlen_q 768, and no multiple of 16 fits"),
    ],
    ids=str,
)
def test_a_block_size_that_cannot_be_told(
    blocks: tuple[int, int], seqlens: tuple[int, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"block_size must be given: .*{reason}"):
        check(lists_of(random_states(1, 1, *blocks)), *seqlens)


# -- other block sizes --------------------------------------------------------------------------

RETILED = [
    # block_q, block_k, tile_m, tile_n
    (64, 64, 128, 128),
    (96, 160, 128, 128),
    (256, 64, 128, 128),
    (192, 80, 128, 112),
    (128, 128, 192, 80),
    (128, 128, 128, 112),
    (128, 128, 64, 80),
    (16, 48, 192, 128),
    (1, 1, 64, 96),
    (100, 37, 192, 64),
]


@pytest.mark.parametrize("sizes", RETILED, ids=str)
@pytest.mark.parametrize("has_full", [True, False], ids=["full", "no-full"])
def test_retiled_against_the_definition(sizes: tuple[int, int, int, int], has_full: bool) -> None:
    block_q, block_k, tile_m, tile_n = sizes
    for seqlen_q, seqlen_k in ((1000, 777), (63, 129)):
        blocks = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
        states = random_states(2, 1, *blocks, seed=seqlen_q)
        if not has_full:
            states = states.clamp(max=PARTIAL)
        lists = check(lists_of(states, (block_q, block_k), has_full), seqlen_q, seqlen_k)
        retiled, bits = retile_lists(lists, tile_m, tile_n, seqlen_q, seqlen_k)

        # every token of the score matrix with the state of its block, and the tiles over it
        tokens = states.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
        tokens = tokens[..., :seqlen_q, :seqlen_k]
        expected = states_of(tokens == FULL, tile_m, tile_n)
        visible = states_of(tokens != EMPTY, tile_m, tile_n)
        expected = torch.where(expected == FULL, FULL, (visible != EMPTY) * PARTIAL)
        assert torch.equal(dense_states(retiled), expected.to(torch.uint8))
        assert all(
            torch.equal(x, y)
            for x, y in zip(retiled[:4], lists_of(expected, None, has_full)[:4], strict=True)
            if x is not None
        )
        assert retiled.block_size == (tile_m, tile_n)
        assert (retiled.full_block_cnt is not None) == has_full

        assert bits is not None and (bits.block_q, bits.block_k) == (block_q, block_k)
        for words, of in ((bits.visible, states != EMPTY), (bits.full, states == FULL)):
            assert words.dtype == torch.int32
            assert words.shape == (2, 1, blocks[0], -(-blocks[1] // 32))
            n_block = torch.arange(words.shape[-1] * 32)
            unpacked = (words[..., n_block // 32] >> (n_block % 32)) & 1
            padding = (0, len(n_block) - blocks[1])
            assert torch.equal(unpacked.bool(), torch.nn.functional.pad(of, padding))


@pytest.mark.parametrize("tile", [(128, 128), (64, 128), (128, 32), (256, 64)], ids=str)
def test_nested_tiles_leave_lists_alone(tile: tuple[int, int]) -> None:
    lists = check(lists_of(random_states(1, 1, 3, 5), (256, 128)), 700, 640)
    assert retile_lists(lists, *tile, 700, 640) == RetiledLists(lists, None)


def test_retile_without_blocks() -> None:
    lists = check(lists_of(random_states(2, 1, 0, 5)), 0, 640)
    assert retile_lists(lists, 192, 80, 0, 640).lists.mask_block_idx.shape == (2, 1, 0, 8)
    lists = check(lists_of(random_states(2, 1, 3, 0)), 384, 0)
    assert retile_lists(lists, 192, 80, 384, 0).lists.mask_block_cnt.tolist() == [[[0, 0]]] * 2


def test_retile_needs_the_block_size() -> None:
    with pytest.raises(ValueError, match="block_size, got None"):
        retile_lists(GOOD, 192, 80, 384, 640)


# -- what is kept -------------------------------------------------------------------------------


def fresh(seed: int = 0) -> Any:
    return check(lists_of(random_states(1, 1, 3, 5, seed=seed)), 384, 640)


def test_retiled_once_per_lists_and_tile() -> None:
    lists = fresh()
    first = retile_lists(lists, 192, 80, 384, 640)
    again = check(BlockSparseTensorsTorch(*lists[:4]), 384, 640)
    assert retile_lists(again, 192, 80, 384, 640) is first
    assert retile_lists(lists, 192, 112, 384, 640) is not first
    assert retile_lists(lists, 192, 80, 384, 600) is not first
    assert retile_lists(lists, 192, 80, 384, 640) is first
    assert retile_lists(fresh(), 192, 80, 384, 640) is not first


@pytest.mark.parametrize("name", BlockSparseTensorsTorch._fields[:4])
def test_an_in_place_change_is_noticed(name: str) -> None:
    lists = fresh()
    first = retile_lists(lists, 192, 80, 384, 640)
    getattr(lists, name).zero_()
    second = retile_lists(lists, 192, 80, 384, 640)
    assert second is not first
    assert torch.equal(
        dense_states(second.lists),
        dense_states(block_sparsity._retile(lists, 192, 80, 384, 640).lists),
    )
    assert retile_lists(lists, 192, 80, 384, 640) is second


def test_nothing_is_kept_of_lists_that_are_gone() -> None:
    before = len(block_sparsity._retiled._entries)
    for seed in range(5):
        lists = fresh(seed)
        made = retile_lists(lists, 192, 80, 384, 640).lists
        expected = block_sparsity._retile(lists, 192, 80, 384, 640).lists
        assert torch.equal(dense_states(made), dense_states(expected))
        del lists, made, expected
        gc.collect()
    assert len(block_sparsity._retiled._entries) == before


def test_a_capture_uses_nothing_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each replay would read lists as they were before the capture."""
    lists = fresh()
    sizes = 192, 80, 384, 640
    first, first_bits = retile_lists(lists, *sizes), block_bits(lists)
    monkeypatch.setattr(block_sparsity, "_is_capturing", lambda tensor: True)
    captured = [retile_lists(lists, *sizes) for _ in range(2)]
    assert all(made is not first for made in captured) and captured[0] is not captured[1]
    assert block_bits(lists) is not first_bits
    # what a capture itself made of tensors of its own
    block_sparsity.know_block_bits(lists, first_bits)
    assert block_bits(lists) is first_bits
    monkeypatch.undo()
    again = block_bits(lists)
    assert again is not first_bits and block_bits(lists) is again
    assert retile_lists(lists, *sizes) is first


def test_inference_mode() -> None:
    lists = fresh()
    with torch.inference_mode():
        first = retile_lists(lists, 192, 80, 384, 640)
        unversioned = fresh()
        a, b = (retile_lists(unversioned, 192, 80, 384, 640) for _ in range(2))
    assert retile_lists(lists, 192, 80, 384, 640) is first
    assert not first.lists.mask_block_idx.is_inference()
    assert a is not b
    assert torch.equal(dense_states(a.lists), dense_states(first.lists))
