"""Masks among the arguments of the public call, with a recorder for the compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case
from eager import assert_close_to_oracle
from inputs import make_inputs
from launch_recorder import Recorder
from mask_cases import MASK_MODS, SCORE_MODS
from oracle import attend_rows
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.masks.column_mask import ColumnMask

SEQLEN = 300
CHECKS, DOCUMENTS = MASK_MODS["checks"].cute, MASK_MODS["documents"].cute


def qkv(heads_q: int = 4, heads_kv: int = 2, dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, SEQLEN, heads, dim) for heads in (heads_q, heads_kv, heads_kv))
    q, k, v = (torch.randn(shape, generator=generator).to(BF16) for shape in shapes)
    return q, k, v


def columns(num_vectors: int = 2, heads: int = 1, batch: int = 1) -> Tensor:
    return torch.full((batch, heads, SEQLEN, num_vectors), SEQLEN, dtype=torch.int32)


def lists(
    block: tuple[int, int] | None = (128, 128), has_full: bool = True, heads: int = 1
) -> BlockSparseTensorsTorch:
    """Partial and full blocks on and below the diagonal."""
    block_q, block_k = block or (128, 128)
    num_q, num_k = -(-SEQLEN // block_q), -(-SEQLEN // block_k)
    idx = torch.arange(num_k, dtype=torch.int32).repeat(1, heads, num_q, 1)
    cnt = torch.full((1, heads, num_q), num_k, dtype=torch.int32)
    return BlockSparseTensorsTorch(
        cnt, idx, torch.zeros_like(cnt) if has_full else None, idx if has_full else None, block
    )


# -- what reaches the kernel --------------------------------------------------------------------


def test_nothing_given_passes_nothing(recorder: Recorder) -> None:
    _flash_attn_fwd(*qkv())
    assert set(recorder.given().values()) == {None}


@pytest.mark.parametrize("causal", [False, True])
def test_columns_and_their_bounds(causal: bool, recorder: Recorder) -> None:
    indices = columns()
    indices[0, 0, 200, 1] = 3
    _flash_attn_fwd(*qkv(), causal=causal, startend_row_indices=indices)
    (problem,) = (resolved.problem for resolved in recorder.prepared)
    assert (problem.intervals, problem.is_causal) == ((2, causal), causal)
    passed, bounds = recorder.given()["columns"]
    tile_n = recorder.prepared[0].choice.tiles.tile_n
    assert passed is indices
    assert torch.equal(bounds, ColumnMask(indices, causal).bounds(tile_n))
    assert bounds.shape[-1] == -(-SEQLEN // tile_n) and (bounds == 3).sum() == 1


def test_a_column_mask_keeps_its_bounds(recorder: Recorder) -> None:
    mask = ColumnMask(columns(1), causal=True)
    for _ in range(2):
        _flash_attn_fwd(*qkv(), startend_row_indices=mask)
    first, second = (recorder.given(i)["columns"][1] for i in range(2))
    assert first is second
    assert len(recorder.prepared) == 1
    mask.startend_row_indices[...] = 7
    _flash_attn_fwd(*qkv(), startend_row_indices=mask)
    assert (recorder.given()["columns"][1] == 7).all()


@pytest.mark.parametrize(
    ("form", "causal", "is_causal"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_causal_of_the_call_and_of_the_mask(
    form: bool, causal: bool, is_causal: bool, recorder: Recorder
) -> None:
    mask = ColumnMask(columns(), causal=form)
    _flash_attn_fwd(*qkv(), causal=causal, startend_row_indices=mask, window_size_right=3)
    problem = recorder.prepared[0].problem
    assert (problem.intervals, problem.is_causal) == ((2, form), is_causal)
    assert problem.has_window_right == (not is_causal)


def test_lists_that_tiles_nest_in_come_as_they_are(recorder: Recorder) -> None:
    given = lists((256, 128))
    _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=given)
    passed = recorder.given()
    assert all(a is b for a, b in zip(passed["lists"], given[:4], strict=True))
    assert (passed["block_size"], passed["bits"]) == ((256, 128), None)
    problem = recorder.prepared[0].problem
    assert (problem.has_lists, problem.has_full_lists, problem.has_bits) == (True, True, False)


def test_other_lists_are_retiled(recorder: Recorder) -> None:
    given = lists((96, 48), has_full=False)
    for _ in range(2):
        _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=given)
    passed, tiles = recorder.given(), recorder.prepared[0].choice.tiles
    assert passed["block_size"] == (tiles.tile_m, tiles.tile_n)
    assert passed["lists"][2:] == (None, None)
    visible, full, *block_size = passed["bits"]
    assert block_size == [96, 48]
    assert visible.shape == full.shape == (1, 1, -(-SEQLEN // 96), 1)
    problem = recorder.prepared[0].problem
    assert (problem.has_lists, problem.has_full_lists, problem.has_bits) == (True, False, True)
    assert recorder.given(0)["bits"][0] is visible, "made once"


def test_a_block_size_that_is_not_given_is_found(recorder: Recorder) -> None:
    _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=lists(None))
    assert recorder.given()["block_size"] == (128, 128)


def torch_causal() -> BlockMask:
    return create_block_mask(
        lambda b, h, q, k: q >= k, None, None, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=128
    )


def test_a_block_mask_with_a_cute_mask_mod(recorder: Recorder) -> None:
    _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=torch_causal(), mask_mod=CHECKS)
    passed = recorder.given()["lists"]
    # torch counts keys past the end as hidden, so the last row of blocks has no full one
    assert passed[0].tolist() == [[[1, 1, 3]]] and passed[2].tolist() == [[[0, 1, 0]]]
    # the same lists as our own class need no mask_mod, which is no reason to take the BlockMask's
    own = BlockSparseTensorsTorch(*passed, block_size=(128, 128))
    _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=own)
    with pytest.raises(ValueError, match="pass the same mask as a CuTe callable"):
        _flash_attn_fwd(*qkv(), block_sparse_tensors_torch=torch_causal())


def test_aux_tensors_and_mods(recorder: Recorder) -> None:
    aux = [torch.zeros(2, SEQLEN, dtype=torch.int32), torch.zeros(1, dtype=BF16).expand(5)]
    _flash_attn_fwd(
        *qkv(), mask_mod=DOCUMENTS, score_mod=SCORE_MODS["head_bias"].cute, aux_tensors=aux
    )
    passed = recorder.given()["aux"]
    assert isinstance(passed, tuple)
    assert all(a is b for a, b in zip(passed, aux, strict=True))
    problem = recorder.prepared[0].problem
    assert problem.aux == (("int32", 2), ("bfloat16", 1))
    assert problem.mask_mod != problem.score_mod
    _flash_attn_fwd(*qkv(), mask_mod=CHECKS, aux_tensors=[])
    assert recorder.given()["aux"] is None and recorder.prepared[1].problem.aux == ()


# -- the key of a launch ------------------------------------------------------------------------


def limited(limit: int) -> Callable[..., Any]:
    return lambda b, h, q, k, aux: k <= limit


GLOBAL_LIMIT = 5


def globally_limited(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k <= GLOBAL_LIMIT


def aux_of(*shape: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    return {"mask_mod": CHECKS, "aux_tensors": [torch.zeros(shape, dtype=dtype)]}


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "columns": lambda: {"startend_row_indices": columns()},
    "column_mask": lambda: {"startend_row_indices": ColumnMask(columns(), False)},
    "lists": lambda: {"block_sparse_tensors_torch": lists()},
    "block_mask": lambda: {
        "block_sparse_tensors_torch": torch_causal(), "mask_mod": CHECKS,
    },
    "equal mods": lambda: {"mask_mod": limited(3), "score_mod": SCORE_MODS["scale"].cute},
    "aux": lambda: aux_of(4, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_equal_arguments_find_the_same_launch(name: str, recorder: Recorder) -> None:
    for _ in range(3):
        _flash_attn_fwd(*qkv(), **SAME[name]())
    assert len(recorder.prepared) == 1
    assert len(recorder.calls) == 3


def test_extents_of_aux_tensors_do_not_count(recorder: Recorder) -> None:
    _flash_attn_fwd(*qkv(), **aux_of(4, 5))
    _flash_attn_fwd(*qkv(), **aux_of(7, 1))
    assert len(recorder.prepared) == 1


def key_position(*arguments: Any) -> Any:
    """What both a score_mod and a mask_mod may be."""
    return arguments[-2]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vectors": ({"startend_row_indices": columns(2)}, {"startend_row_indices": columns(4)}),
    "mask heads": ({"startend_row_indices": columns(2)}, {"startend_row_indices": columns(2, 2)}),
    "form": ({"startend_row_indices": ColumnMask(columns(), False)},
             {"startend_row_indices": ColumnMask(columns(), True)}),
    "tensor or object": ({"startend_row_indices": columns(), "causal": True},
                         {"startend_row_indices": ColumnMask(columns(), False), "causal": True}),
    "block size": ({"block_sparse_tensors_torch": lists((128, 128))},
                   {"block_sparse_tensors_torch": lists((64, 64))}),
    "full lists": ({"block_sparse_tensors_torch": lists()},
                   {"block_sparse_tensors_torch": lists(has_full=False)}),
    "closure": ({"mask_mod": limited(3)}, {"mask_mod": limited(4)}),
    "which mod": ({"mask_mod": key_position}, {"score_mod": key_position}),
    "aux dtype": (aux_of(4), aux_of(4, dtype=FP32)),
    "aux rank": (aux_of(4), aux_of(4, 1)),
    "no aux": (aux_of(4), {"mask_mod": CHECKS}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_prepared_anew(name: str, recorder: Recorder) -> None:
    for masks in (*OTHERS[name], *OTHERS[name], {}):
        _flash_attn_fwd(*qkv(), **masks)
    assert len(recorder.prepared) == 3
    problems = [resolved.problem for resolved in recorder.prepared]
    assert problems[0] != problems[1] or name in ("mask heads", "block size")


def test_a_changed_global_and_a_changed_cell_are_noticed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3

    def mask(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return k <= limit

    for mod, change in (
        (globally_limited, lambda: monkeypatch.setitem(globals(), "GLOBAL_LIMIT", 6)),
        (mask, lambda: None),
    ):
        _flash_attn_fwd(*qkv(), mask_mod=mod)
        change()
        if mod is mask:
            limit = 4
        _flash_attn_fwd(*qkv(), mask_mod=mod)
        _flash_attn_fwd(*qkv(), mask_mod=mod)
    keys = [resolved.problem.mask_mod for resolved in recorder.prepared]
    assert len(keys) == len(set(keys)) == 4


# -- packing ------------------------------------------------------------------------------------

BY_HEAD: dict[str, dict[str, Any]] = {
    "startend_row_indices": {"startend_row_indices": columns(2, heads=4)},
    "block_sparse_tensors": {"block_sparse_tensors_torch": lists(heads=4)},
}


@pytest.mark.parametrize("name", BY_HEAD)
def test_packing_is_refused_where_heads_of_a_group_may_differ(
    name: str, recorder: Recorder
) -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=f"pack_gqa=True .*{name}"):
        _flash_attn_fwd(q, k, v, **BY_HEAD[name], pack_gqa=True)
    _flash_attn_fwd(q, k, v, **BY_HEAD[name])
    assert recorder.prepared[-1].problem.packed_heads == 1
    _flash_attn_fwd(*qkv(4, 4), **BY_HEAD[name], pack_gqa=True)  # nothing to pack
    assert recorder.prepared[-1].problem.packed_heads == 1


def test_few_queries_are_packed_only_where_heads_agree(recorder: Recorder) -> None:
    q, k, v = qkv()
    for masks, expected in (
        ({"startend_row_indices": columns(2, heads=2)}, 2),
        ({"startend_row_indices": columns(2, heads=4)}, 1),
        ({"mask_mod": CHECKS, "score_mod": SCORE_MODS["alibi"].cute}, 2),
        ({"block_sparse_tensors_torch": lists()}, 2),
        ({"block_sparse_tensors_torch": lists(heads=4)}, 1),
    ):
        _flash_attn_fwd(q[:, :9].contiguous(), k, v, q_start=0, **masks)  # type: ignore[arg-type]
        assert recorder.prepared[-1].problem.packed_heads == expected


# -- the answer on the CPU ----------------------------------------------------------------------


@pytest.mark.parametrize("call_is_causal", [False, True])
@pytest.mark.parametrize("num_vectors", [2, 4])
def test_a_form_that_is_not_causal_under_causal(num_vectors: int, call_is_causal: bool) -> None:
    """The vectors keep the meaning that the mask gives them, and causal comes on top."""
    q, k, v = (x.double() for x in qkv(2, 2, 16))
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(0, SEQLEN, (1, 1, SEQLEN, num_vectors), generator=generator)
    mask = ColumnMask(indices.int(), causal=False)
    out, lse = _flash_attn_fwd(q, k, v, causal=call_is_causal, startend_row_indices=mask)
    visible = mask.dense(SEQLEN)
    if call_is_causal:
        visible = visible & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    expected = attend_rows(q, k, v, visible)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse.float())


@pytest.mark.parametrize("skip_blocks", [True, False])
def test_skipping_reaches_the_cpu_path(skip_blocks: bool) -> None:
    inputs = make_inputs(
        Case("skip", 1, 255, 300, causal=True, column="stepped2", mask_mod="checks")
    )
    results = [
        _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords, config=config)
        for config in (None, {"skip_blocks": skip_blocks})
    ]
    assert_close_to_oracle(*results[1], inputs)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("masks", [SAME["columns"], SAME["lists"], SAME["aux"]])
def test_masks_of_a_problem_without_keys(masks: Callable[[], dict[str, Any]]) -> None:
    q, k, v = qkv()
    keywords = masks()
    if "startend_row_indices" in keywords:
        keywords["startend_row_indices"] = keywords["startend_row_indices"][:, :, :0]
    if "block_sparse_tensors_torch" in keywords:
        cnt = torch.zeros(1, 1, 3, dtype=torch.int32)
        keywords["block_sparse_tensors_torch"] = BlockSparseTensorsTorch(
            cnt, cnt[..., None][..., :0], block_size=(128, 128)
        )
    out, lse = _flash_attn_fwd(q, k[:, :0], v[:, :0], **keywords)
    assert (out == 0).all() and lse is not None and (lse == float("-inf")).all()
