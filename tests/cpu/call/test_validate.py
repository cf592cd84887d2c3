"""Arguments that the public forward accepts, and memory layouts on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import int32
from forward_arguments import (
    BATCH,
    DIM,
    DIM_V,
    HEADS_KV,
    HEADS_Q,
    LAYOUTS,
    SEQLEN_K,
    SEQLEN_Q,
    block_mask,
    check,
    column_zeros,
    dense,
    packed,
    zeros,
)
from on_cuda import OnCuda

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.checks import check_memory_layout

# -- what is accepted ---------------------------------------------------------------------------

HEADS_AND_DIMS = (HEADS_Q, HEADS_KV, DIM, DIM_V)


@pytest.mark.parametrize(
    ("layout", "extra", "expected"),
    [
        ("dense", {}, (2, 24, 40, 48, 80)),
        ("dense", {"max_seqlen_q": 999, "max_seqlen_k": 999}, (2, 24, 40, 48, 80)),
        ("packed_q", {}, (2, 24, 40, 24, 80)),
        ("packed_q", {"max_seqlen_q": 15}, (2, 15, 40, 24, 80)),
        ("packed_k", {}, (2, 24, 60, 48, 60)),
        ("packed_k", {"max_seqlen_k": 45}, (2, 24, 45, 48, 60)),
        ("packed", {"max_seqlen_q": 20, "max_seqlen_k": 50}, (2, 20, 50, 24, 60)),
        ("packed", {"max_seqlen_q": np.int64(20)}, (2, 20, 60, 24, 60)),
    ],
)
def test_extents(layout: str, extra: dict[str, Any], expected: tuple[int, ...]) -> None:
    shapes = check(LAYOUTS[layout]() | extra)
    assert shapes == FwdShapes._make((*expected, *HEADS_AND_DIMS))
    assert all(type(extent) is int for extent in shapes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "extra",
    [
        {"softmax_scale": 0.1, "causal": True, "softcap": 30.0},
        {"softmax_scale": 1, "softcap": 0, "window_size_left": 0, "window_size_right": 7},
        {"softmax_scale": 0, "window_size_left": -2, "window_size_right": 7},
        {"softmax_scale": -0.3, "window_size_right": -7, "causal": True},
        {"window_size_left": np.int32(3), "softmax_scale": np.float32(0.5), "causal": True},
        {"pack_gqa": True, "return_lse": False},
        {"pack_gqa": False, "num_splits": 1},
        {"seqused_q": int32(0, 9), "seqused_k": int32(40, 15)},
        {"learnable_sink": zeros(HEADS_Q)},
        {"learnable_sink": zeros(HEADS_Q, dtype=torch.float32)},
        {"learnable_sink": zeros(2 * HEADS_Q, dtype=torch.float64)[::2]},
    ],
)
def test_options_are_accepted_in_every_layout(layout: str, extra: dict[str, Any]) -> None:
    if layout != "dense" and "seqused_q" in extra:  # at most the slot lengths of all layouts
        extra = {"seqused_q": int32(9, 9), "seqused_k": int32(40, 15)}
    check(LAYOUTS[layout]() | extra)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_buffers_are_accepted(layout: str) -> None:
    arguments = LAYOUTS[layout]()
    rows = arguments["q"].shape[:-1]
    lse = (HEADS_Q, 24) if "q" in layout or layout == "packed" else (BATCH, HEADS_Q, SEQLEN_Q)
    arguments["out"] = zeros(*rows, DIM_V)
    arguments["lse"] = zeros(*lse, dtype=torch.float32)
    check(arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cpu_dtypes(dtype: torch.dtype) -> None:
    check({name: tensor.to(dtype) for name, tensor in dense().items()})


@pytest.mark.parametrize("dim", [8, 16, 72, 256])
def test_head_dims(dim: int) -> None:
    shapes = check({name: zeros(1, 3, 1, dim) for name in "qkv"})
    assert (shapes.head_dim, shapes.head_dim_v) == (dim, dim)


MASKS: tuple[dict[str, Any], ...] = (
    {"score_mod": min, "aux_tensors": [zeros(3, 4).T, torch.zeros(1).expand(7)]},
    {"mask_mod": min, "aux_tensors": (column_zeros(1, 2, 3, 4),)},
    {"mask_mod": min, "aux_tensors": []},
    {"block_sparse_tensors_torch": BlockSparseTensorsTorch(column_zeros(1), column_zeros(1))},
    {"block_sparse_tensors_torch": block_mask(), "mask_mod": min},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: "-".join(masks))
def test_masks_are_accepted_in_every_layout(layout: str, masks: dict[str, Any]) -> None:
    check(LAYOUTS[layout]() | masks)


@pytest.mark.parametrize("heads", [1, HEADS_KV, HEADS_Q])
@pytest.mark.parametrize(
    ("num_vectors", "causal"), [(1, True), (2, True), (2, False), (4, True), (4, False)]
)
def test_columns_are_accepted(num_vectors: int, causal: bool, heads: int) -> None:
    for layout, shapes in {
        "dense": [(1, heads, SEQLEN_K), (BATCH, heads, SEQLEN_K)],
        "packed": [(1, heads, 60)],
        "packed_q": [(BATCH, heads, SEQLEN_K)],
    }.items():
        for shape in shapes:
            columns = column_zeros(*shape, num_vectors)
            for value in (columns, ColumnMask(columns, causal)):
                masks = {"startend_row_indices": value, "causal": causal, "q_start": 0}
                check(LAYOUTS[layout]() | masks)


def test_a_column_masks_own_causal_is_enough() -> None:
    mask = ColumnMask(column_zeros(1, 1, SEQLEN_K, 1), causal=True, seqlen_q=SEQLEN_Q)
    check(dense() | {"startend_row_indices": mask, "causal": False})


def test_empty_problems() -> None:
    empty = {name: zeros(0, 5, 2, 8) for name in "qkv"}
    assert check(empty).batch == 0
    no_rows = {"q": zeros(2, 0, 2, 8), "k": zeros(2, 0, 2, 8), "v": zeros(2, 0, 2, 8)}
    assert check(no_rows).total_q == 0
    assert check(packed() | {"cu_seqlens_q": int32(0, 0, 0)}).batch == 2


def test_trailing_rows_of_a_packed_tensor_may_be_unused() -> None:
    assert check(packed() | {"cu_seqlens_q": int32(0, 3, 20)}).total_q == 24


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_may_have_any_strides_and_start_anywhere(name: str) -> None:
    arguments = dense()
    *rows, dim = arguments[name].shape
    for view in (
        zeros(*rows, 3, dim).select(-2, 1),
        zeros(*rows, dim, 2)[..., 0],
        zeros(*rows, dim + 4)[..., :dim],
        zeros(1, 1, 1, dim).expand(*rows, dim),
        zeros(dim, *rows).movedim(0, -1),
        _offset(1, *rows, dim),
    ):
        for call in (arguments | {name: view}, _on_cuda(arguments | {name: view})):
            check(call)


# -- memory layout on a GPU ---------------------------------------------------------------------


def _on_cuda(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.as_subclass(OnCuda) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def _offset(elements: int, *shape: int) -> torch.Tensor:
    """A contiguous tensor whose first element lies `elements` past an aligned address."""
    size = int(np.prod(shape))
    base = torch.zeros(size + elements + 64, dtype=torch.bfloat16)
    assert base.data_ptr() % 16 == 0
    return base[elements : elements + size].view(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_lengths_are_not_read(layout: str) -> None:
    arguments = LAYOUTS[layout]()
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in arguments:
            arguments[name] = int32(7, 3, 999)  # nonsense that only a read would notice
    arguments["seqused_k"] = int32(-5, 999)
    assert check(_on_cuda(arguments)).batch == BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_dtypes_are_16_bit(dtype: torch.dtype) -> None:
    arguments = {name: tensor.to(dtype) for name, tensor in dense().items()}
    with pytest.raises(TypeError, match=f"q must .* on cuda, got {dtype}"):
        check(_on_cuda(arguments))


@pytest.mark.parametrize("name", ["out"])
def test_cuda_base_address(name: str) -> None:
    arguments = dense() | {"out": zeros(BATCH, SEQLEN_Q, HEADS_Q, DIM_V)}
    shape = arguments[name].shape
    check(_on_cuda(arguments | {name: _offset(8, *shape)}))
    misplaced = arguments | {name: _offset(4, *shape)}
    check(misplaced)  # the CPU path does not need the alignment
    with pytest.raises(ValueError, match=f"{name} must start at a multiple of 16 bytes.* 8 bytes"):
        check(_on_cuda(misplaced))


@pytest.mark.parametrize("name", ["out"])
def test_cuda_strides(name: str) -> None:
    arguments = dense() | {"out": zeros(BATCH, SEQLEN_Q, HEADS_Q, DIM_V)}
    *rows, dim = arguments[name].shape
    check(_on_cuda(arguments | {name: zeros(*rows, dim + 8)[..., :dim]}))
    padded = arguments | {name: zeros(*rows, dim + 4)[..., :dim]}
    check(padded)
    with pytest.raises(
        ValueError, match=rf"{name} must have strides .*multiples of 8.*{dim + 4}, 1"
    ):
        check(_on_cuda(padded))


def test_packed_sequences_that_are_too_long_for_a_view() -> None:
    from flash_mask_cute.core.tma import RAGGED_BOUND
    from flash_mask_cute.limits import MAX_PACKED_SEQLEN

    assert MAX_PACKED_SEQLEN == RAGGED_BOUND
    rows = MAX_PACKED_SEQLEN + 1
    long = {name: zeros(1, 1, 8).expand(rows, 1, 8) for name in ("q", "k", "v")}
    lengths = {"cu_seqlens_q": int32(0, rows), "cu_seqlens_k": int32(0, rows)}
    check(_on_cuda(long | lengths) | {"max_seqlen_q": 9, "max_seqlen_k": MAX_PACKED_SEQLEN})
    for side, given in (("q", {}), ("k", {"max_seqlen_q": 9}), ("q", {"max_seqlen_q": rows})):
        message = rf"more than {MAX_PACKED_SEQLEN} rows .* got {rows} rows in {side}; "
        with pytest.raises(NotImplementedError, match=message):
            check(_on_cuda(long | lengths) | given)


def test_cuda_and_cpu_tensors_do_not_mix() -> None:
    arguments = _on_cuda(packed()) | {"cu_seqlens_q": int32(0, 9, 24)}
    with pytest.raises(
        ValueError, match="cu_seqlens_q must be on the device of q .cuda:0., got cpu"
    ):
        check(arguments)


def test_strides_of_size_one_extents_do_not_matter() -> None:
    storage = torch.zeros(4096, dtype=torch.bfloat16)
    check_memory_layout("q", storage.as_strided((1, 4, 1, 8), (3, 8, 5, 1)), aligned=True)
    check_memory_layout("q", storage.as_strided((0, 4, 2, 8), (3, 8, 5, 1)), aligned=True)
    with pytest.raises(ValueError, match=r"q must have strides .*\(3, 8, 5, 1\)"):
        check_memory_layout("q", storage.as_strided((2, 4, 1, 8), (3, 8, 5, 1)), aligned=True)
