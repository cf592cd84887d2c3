"""Argument checks of the public forward call: every refusal names its argument and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.call.validate import check_fwd_inputs
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime import plain_tensors
from flash_mask_cute.runtime.checks import check_memory_layout

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV, DIM, DIM_V = 2, 24, 40, 6, 2, 64, 32
LENGTHS_Q, LENGTHS_K = (0, 9, 24), (5, 45, 60)


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _dense() -> dict[str, Any]:
    return {
        "q": _tensor(BATCH, SEQLEN_Q, HEADS_Q, DIM),
        "k": _tensor(BATCH, SEQLEN_K, HEADS_KV, DIM),
        "v": _tensor(BATCH, SEQLEN_K, HEADS_KV, DIM_V),
    }


def _packed_q() -> dict[str, Any]:
    return _dense() | {"q": _tensor(24, HEADS_Q, DIM), "cu_seqlens_q": _int32(0, 9, 24)}


def _packed_k() -> dict[str, Any]:
    return _dense() | {
        "k": _tensor(60, HEADS_KV, DIM),
        "v": _tensor(60, HEADS_KV, DIM_V),
        "cu_seqlens_k": _int32(0, 45, 60),
    }


def _packed() -> dict[str, Any]:
    return _packed_q() | {name: _packed_k()[name] for name in ("k", "v", "cu_seqlens_k")}


def _columns(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _reaches_a_tensor() -> Any:
    limit = torch.tensor(3)
    return lambda b, h, q, k, aux: k <= limit


def _block_mask() -> BlockMask:
    counts, indices = _columns(1, 1, 1), _columns(1, 1, 1, 1)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, seq_lengths=(24, 60))


LAYOUTS = {"dense": _dense, "packed_q": _packed_q, "packed_k": _packed_k, "packed": _packed}


def _check(arguments: dict[str, Any]) -> FwdShapes:
    arguments = dict(arguments)
    q, k, v = (arguments.pop(name) for name in "qkv")
    return check_fwd_inputs(q, k, v, **arguments)


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
    shapes = _check(LAYOUTS[layout]() | extra)
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
        {"seqused_q": _int32(0, 9), "seqused_k": _int32(40, 15)},
        {"learnable_sink": _tensor(HEADS_Q)},
        {"learnable_sink": _tensor(HEADS_Q, dtype=torch.float32)},
        {"learnable_sink": _tensor(2 * HEADS_Q, dtype=torch.float64)[::2]},
    ],
)
def test_options_are_accepted_in_every_layout(layout: str, extra: dict[str, Any]) -> None:
    if layout != "dense" and "seqused_q" in extra:  # at most the slot lengths of all layouts
        extra = {"seqused_q": _int32(9, 9), "seqused_k": _int32(40, 15)}
    _check(LAYOUTS[layout]() | extra)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_buffers_are_accepted(layout: str) -> None:
    arguments = LAYOUTS[layout]()
    rows = arguments["q"].shape[:-1]
    lse = (HEADS_Q, 24) if "q" in layout or layout == "packed" else (BATCH, HEADS_Q, SEQLEN_Q)
    arguments["out"] = _tensor(*rows, DIM_V)
    arguments["lse"] = _tensor(*lse, dtype=torch.float32)
    _check(arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_cpu_dtypes(dtype: torch.dtype) -> None:
    _check({name: tensor.to(dtype) for name, tensor in _dense().items()})


@pytest.mark.parametrize("dim", [8, 16, 72, 256])
def test_head_dims(dim: int) -> None:
    shapes = _check({name: _tensor(1, 3, 1, dim) for name in "qkv"})
    assert (shapes.head_dim, shapes.head_dim_v) == (dim, dim)


MASKS: tuple[dict[str, Any], ...] = (
    {"score_mod": min, "aux_tensors": [_tensor(3, 4).T, torch.zeros(1).expand(7)]},
    {"mask_mod": min, "aux_tensors": (_columns(1, 2, 3, 4),)},
    {"mask_mod": min, "aux_tensors": []},
    {"block_sparse_tensors_torch": BlockSparseTensorsTorch(_columns(1), _columns(1))},
    {"block_sparse_tensors_torch": _block_mask(), "mask_mod": min},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: "-".join(masks))
def test_masks_are_accepted_in_every_layout(layout: str, masks: dict[str, Any]) -> None:
    _check(LAYOUTS[layout]() | masks)


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
            columns = _columns(*shape, num_vectors)
            for value in (columns, ColumnMask(columns, causal)):
                masks = {"startend_row_indices": value, "causal": causal, "q_start": 0}
                _check(LAYOUTS[layout]() | masks)


def test_a_column_masks_own_causal_is_enough() -> None:
    mask = ColumnMask(_columns(1, 1, SEQLEN_K, 1), causal=True, seqlen_q=SEQLEN_Q)
    _check(_dense() | {"startend_row_indices": mask, "causal": False})


def test_empty_problems() -> None:
    empty = {name: _tensor(0, 5, 2, 8) for name in "qkv"}
    assert _check(empty).batch == 0
    no_rows = {"q": _tensor(2, 0, 2, 8), "k": _tensor(2, 0, 2, 8), "v": _tensor(2, 0, 2, 8)}
    assert _check(no_rows).total_q == 0
    assert _check(_packed() | {"cu_seqlens_q": _int32(0, 0, 0)}).batch == 2


def test_trailing_rows_of_a_packed_tensor_may_be_unused() -> None:
    assert _check(_packed() | {"cu_seqlens_q": _int32(0, 3, 20)}).total_q == 24


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_may_have_any_strides_and_start_anywhere(name: str) -> None:
    arguments = _dense()
    *rows, dim = arguments[name].shape
    for view in (
        _tensor(*rows, 3, dim).select(-2, 1),
        _tensor(*rows, dim, 2)[..., 0],
        _tensor(*rows, dim + 4)[..., :dim],
        _tensor(1, 1, 1, dim).expand(*rows, dim),
        _tensor(dim, *rows).movedim(0, -1),
        _offset(1, *rows, dim),
    ):
        for call in (arguments | {name: view}, _on_cuda(arguments | {name: view})):
            _check(call)


# -- what is refused ----------------------------------------------------------------------------


class Refusal(NamedTuple):
    layout: str
    change: dict[str, Any]
    error: type[Exception]
    said: tuple[str, ...]  # every one of these must be in the message


REFUSALS = {
    # types and dtypes
    "q_type": Refusal("dense", {"q": [1.0]}, TypeError, ("q must be a torch.Tensor", "list")),
    "k_none": Refusal("dense", {"k": None}, TypeError, ("k must be a torch.Tensor", "None")),
    "v_sparse": Refusal(
        "dense", {"v": _tensor(2, 3).to_sparse()}, TypeError, ("v must be", "sparse_coo")
    ),
    "q_dtype": Refusal(
        "dense", {"q": _tensor(2, 24, 6, 64, dtype=torch.int32)}, TypeError, ("q must", "int32")
    ),
    "k_dtype": Refusal(
        "dense",
        {"k": _tensor(2, 40, 2, 64, dtype=torch.float16)},
        TypeError,
        ("k must have the dtype of q", "bfloat16", "float16"),
    ),
    "v_dtype": Refusal(
        "dense", {"v": _tensor(2, 40, 2, 32, dtype=torch.float32)}, TypeError, ("v must", "float32")
    ),
    "device_kind": Refusal(
        "dense", {"q": torch.zeros(1, device="meta")}, ValueError, ("q must be on", "meta")
    ),
    "k_device": Refusal(
        "dense",
        {"k": torch.zeros(2, 40, 2, 64, dtype=torch.bfloat16, device="meta")},
        ValueError,
        ("k must be on the device of q", "cpu", "meta"),
    ),
    # ranks and extents
    "q_rank": Refusal(
        "dense",
        {"q": _tensor(48, 6, 64)},
        ValueError,
        ("q must have shape (batch, seqlen, heads_q, head_dim)", "cu_seqlens_q", "(48, 6, 64)"),
    ),
    "k_rank": Refusal("dense", {"k": _tensor(2, 64)}, ValueError, ("k must", "(2, 64)")),
    "v_rank": Refusal(
        "dense", {"v": _tensor(8)}, ValueError, ("v must have shape (batch", "head_dim_v", "(8,)")
    ),
    "q_rank_packed": Refusal(
        "packed",
        {"q": _tensor(2, 24, 6, 64)},
        ValueError,
        ("q must have shape (total, heads_q, head_dim)", "(2, 24, 6, 64)"),
    ),
    "k_rank_packed": Refusal(
        "packed_k", {"k": _tensor(1, 60, 2, 64)}, ValueError, ("k must", "(1, 60, 2, 64)")
    ),
    "heads": Refusal(
        "dense", {"q": _tensor(2, 24, 5, 64)}, ValueError, ("heads_q=5", "heads_kv=2")
    ),
    "no_heads": Refusal(
        "dense",
        {"k": _tensor(2, 40, 0, 64), "v": _tensor(2, 40, 0, 64)},
        ValueError,
        ("heads_kv=0",),
    ),
    "head_dim_mismatch": Refusal(
        "dense", {"k": _tensor(2, 40, 2, 128)}, ValueError, ("k must have the head_dim", "128")
    ),
    "head_dim_step": Refusal(
        "dense",
        {"q": _tensor(2, 24, 6, 60), "k": _tensor(2, 40, 2, 60)},
        ValueError,
        ("head_dim (", "60"),
    ),
    "head_dim_large": Refusal(
        "dense",
        {"q": _tensor(2, 24, 6, 264), "k": _tensor(2, 40, 2, 264)},
        ValueError,
        ("head_dim (", "264"),
    ),
    "head_dim_zero": Refusal(
        "dense",
        {"q": _tensor(2, 24, 6, 0), "k": _tensor(2, 40, 2, 0)},
        ValueError,
        ("head_dim (", "got 0"),
    ),
    "head_dim_v_step": Refusal(
        "dense", {"v": _tensor(2, 40, 2, 12)}, ValueError, ("head_dim_v (", "12")
    ),
    "batch": Refusal(
        "dense",
        {"q": _tensor(3, 24, 6, 64)},
        ValueError,
        ("batch", "3 from the shape of q", "2 from the shape of k"),
    ),
    "batch_packed": Refusal(
        "packed",
        {"cu_seqlens_q": _int32(0, 3, 9, 24)},
        ValueError,
        ("batch", "3 from cu_seqlens_q", "2 from cu_seqlens_k"),
    ),
    "batch_mixed": Refusal(
        "packed_q",
        {"cu_seqlens_q": _int32(0, 24)},
        ValueError,
        ("1 from cu_seqlens_q", "2 from the shape of k"),
    ),
    "v_seqlen": Refusal(
        "dense", {"v": _tensor(2, 41, 2, 32)}, ValueError, ("v must agree", "(2, 41, 2, 32)")
    ),
    "v_heads": Refusal(
        "dense", {"v": _tensor(2, 40, 3, 32)}, ValueError, ("v must agree", "(2, 40, 3, 32)")
    ),
    "v_batch": Refusal(
        "dense", {"v": _tensor(1, 40, 2, 32)}, ValueError, ("v must agree", "(1, 40, 2, 32)")
    ),
    # cu_seqlens
    "cu_q_type": Refusal("packed", {"cu_seqlens_q": [0, 24]}, TypeError, ("cu_seqlens_q", "list")),
    "cu_q_dtype": Refusal(
        "packed", {"cu_seqlens_q": torch.tensor([0, 9, 24])}, TypeError, ("cu_seqlens_q", "int64")
    ),
    "cu_k_rank": Refusal(
        "packed", {"cu_seqlens_k": _int32(0, 60)[None]}, ValueError, ("cu_seqlens_k", "(1, 2)")
    ),
    "cu_k_empty": Refusal("packed", {"cu_seqlens_k": _int32()}, ValueError, ("cu_seqlens_k", "0")),
    "cu_k_strided": Refusal(
        "packed",
        {"cu_seqlens_k": _int32(0, 0, 45, 0, 60, 0)[::2]},
        ValueError,
        ("cu_seqlens_k must be contiguous", "2"),
    ),
    "cu_q_device": Refusal(
        "packed",
        {"cu_seqlens_q": _int32(0, 9, 24).to("meta")},
        ValueError,
        ("cu_seqlens_q", "meta"),
    ),
    "cu_q_start": Refusal(
        "packed", {"cu_seqlens_q": _int32(1, 9, 24)}, ValueError, ("cu_seqlens_q must start", "1")
    ),
    "cu_k_decreasing": Refusal(
        "packed",
        {"cu_seqlens_k": _int32(0, 61, 60)},
        ValueError,
        ("cu_seqlens_k must not decrease", "61 followed by 60", "position 2"),
    ),
    "cu_k_end": Refusal(
        "packed", {"cu_seqlens_k": _int32(0, 45, 61)}, ValueError, ("cu_seqlens_k", "60", "61")
    ),
    # seqused
    "used_q_type": Refusal("dense", {"seqused_q": (1, 2)}, TypeError, ("seqused_q", "tuple")),
    "used_q_dtype": Refusal(
        "dense", {"seqused_q": torch.tensor([1, 2])}, TypeError, ("seqused_q", "int64")
    ),
    "used_k_shape": Refusal(
        "dense", {"seqused_k": _int32(1, 2, 3)}, ValueError, ("seqused_k", "(2,)", "(3,)")
    ),
    "used_k_device": Refusal(
        "dense", {"seqused_k": _int32(1, 2).to("meta")}, ValueError, ("seqused_k", "meta")
    ),
    "used_k_strided": Refusal(
        "dense", {"seqused_k": _int32(1, 2, 3, 4)[::2]}, ValueError, ("seqused_k", "2")
    ),
    "used_q_negative": Refusal(
        "dense", {"seqused_q": _int32(3, -1)}, ValueError, ("seqused_q", "-1", "sequence 1")
    ),
    "used_k_long": Refusal(
        "dense", {"seqused_k": _int32(41, 1)}, ValueError, ("seqused_k", "41", "length 40")
    ),
    "used_k_long_packed": Refusal(
        "packed", {"seqused_k": _int32(45, 16)}, ValueError, ("seqused_k", "16", "length 15")
    ),
    # max_seqlen
    "max_q_tensor": Refusal(
        "packed",
        {"max_seqlen_q": torch.tensor(24)},
        TypeError,
        ("max_seqlen_q must be a Python int", "tensor", "on the host"),
    ),
    "max_k_float": Refusal("packed", {"max_seqlen_k": 60.0}, TypeError, ("max_seqlen_k", "60.0")),
    "max_k_bool": Refusal("packed", {"max_seqlen_k": True}, TypeError, ("max_seqlen_k", "True")),
    "max_q_negative": Refusal("packed", {"max_seqlen_q": -1}, ValueError, ("max_seqlen_q", "-1")),
    "max_q_small": Refusal(
        "packed", {"max_seqlen_q": 14}, ValueError, ("max_seqlen_q", "(15)", "14")
    ),
    "max_k_small": Refusal(
        "packed",
        {"max_seqlen_k": 40, "seqused_k": _int32(41, 0)},
        ValueError,
        ("max_seqlen_k", "(41)", "40"),
    ),
    # mask and scale scalars
    "causal": Refusal("dense", {"causal": 1}, TypeError, ("causal", "1 (int)")),
    "causal_none": Refusal("dense", {"causal": None}, TypeError, ("causal", "None")),
    "return_lse": Refusal("dense", {"return_lse": "yes"}, TypeError, ("return_lse", "'yes'")),
    "left_minus_one": Refusal(
        "dense",
        {"window_size_left": -1},
        ValueError,
        ("window_size_left must not be -1: None leaves that side open", "got -1"),
    ),
    "right_minus_one": Refusal(
        "dense",
        {"window_size_right": np.int64(-1)},
        ValueError,
        ("window_size_right must not be -1: None leaves that side open", "got -1"),
    ),
    "left_bool": Refusal("dense", {"window_size_left": True}, TypeError, ("window_size_left",)),
    "right_float": Refusal(
        "dense", {"window_size_right": 2.0}, TypeError, ("window_size_right", "2.0")
    ),
    "left_tensor": Refusal(
        "dense", {"window_size_left": _int32(3)}, TypeError, ("window_size_left", "tensor")
    ),
    "softcap_negative": Refusal("dense", {"softcap": -1.5}, ValueError, ("softcap", "-1.5")),
    "softcap_nan": Refusal("dense", {"softcap": float("nan")}, ValueError, ("softcap", "nan")),
    "softcap_none": Refusal("dense", {"softcap": None}, TypeError, ("softcap", "None")),
    "softcap_bool": Refusal("dense", {"softcap": True}, TypeError, ("softcap", "True")),
    "scale_inf": Refusal(
        "dense", {"softmax_scale": float("inf")}, ValueError, ("softmax_scale", "inf")
    ),
    "scale_nan": Refusal(
        "dense",
        {"softmax_scale": float("nan")},
        ValueError,
        ("softmax_scale must be finite", "nan"),
    ),
    "scale_large": Refusal(
        "dense", {"softmax_scale": -2e38}, ValueError, ("softmax_scale", "1e+38", "-2e+38")
    ),
    "scale_larger_than_a_float": Refusal(
        "dense", {"softmax_scale": 10**400}, ValueError, ("softmax_scale", "1000000")
    ),
    "scale_text": Refusal("dense", {"softmax_scale": "1"}, TypeError, ("softmax_scale", "'1'")),
    "scale_tensor": Refusal(
        "dense", {"softmax_scale": torch.tensor(1.0)}, TypeError, ("softmax_scale", "tensor")
    ),
    "pack_gqa": Refusal("dense", {"pack_gqa": 1}, TypeError, ("pack_gqa", "1 (int)")),
    # learnable_sink
    "sink_type": Refusal("dense", {"learnable_sink": 0.0}, TypeError, ("learnable_sink", "0.0")),
    "sink_dtype": Refusal(
        "dense",
        {"learnable_sink": _tensor(6, dtype=torch.int64)},
        TypeError,
        ("learnable_sink", "int64"),
    ),
    "sink_shape": Refusal(
        "dense", {"learnable_sink": _tensor(2)}, ValueError, ("learnable_sink", "(6,)", "(2,)")
    ),
    "sink_device": Refusal(
        "dense", {"learnable_sink": _tensor(6).to("meta")}, ValueError, ("learnable_sink", "meta")
    ),
    # outputs
    "out_type": Refusal("dense", {"out": 1}, TypeError, ("out must be a torch.Tensor", "1")),
    "out_dtype": Refusal(
        "dense", {"out": _tensor(2, 24, 6, 32, dtype=torch.float32)}, TypeError, ("out", "float32")
    ),
    "out_shape": Refusal(
        "dense",
        {"out": _tensor(2, 24, 6, 64)},
        ValueError,
        ("out must have", "(2, 24, 6, 32)", "(2, 24, 6, 64)"),
    ),
    "out_device": Refusal(
        "dense", {"out": _tensor(2, 24, 6, 32).to("meta")}, ValueError, ("out must be on", "meta")
    ),
    "out_last_stride": Refusal(
        "dense",
        {"out": _tensor(2, 24, 6, 64)[..., ::2]},
        ValueError,
        ("out must be contiguous", "(9216, 384, 64, 2)"),
    ),
    "out_expanded": Refusal(
        "dense",
        {"out": _tensor(1, 24, 6, 32).expand(2, -1, -1, -1)},
        ValueError,
        ("out must not overlap", "(0, 192, 32, 1)"),
    ),
    "lse_type": Refusal("dense", {"lse": []}, TypeError, ("lse must be a torch.Tensor", "list")),
    "lse_dtype": Refusal("dense", {"lse": _tensor(2, 6, 24)}, TypeError, ("lse", "bfloat16")),
    "lse_shape": Refusal(
        "dense",
        {"lse": _tensor(2, 24, 6, dtype=torch.float32)},
        ValueError,
        ("lse", "(2, 6, 24)", "(2, 24, 6)"),
    ),
    "lse_shape_packed": Refusal(
        "packed",
        {"lse": _tensor(24, 6, dtype=torch.float32)},
        ValueError,
        ("lse", "(6, 24)", "(24, 6)"),
    ),
    "lse_device": Refusal(
        "dense",
        {"lse": _tensor(2, 6, 24, dtype=torch.float32).to("meta")},
        ValueError,
        ("lse", "meta"),
    ),
    "lse_strided": Refusal(
        "dense",
        {"lse": _tensor(2, 24, 6, dtype=torch.float32).transpose(1, 2)},
        ValueError,
        ("lse must be contiguous", "(144, 1, 6)"),
    ),
    # callables and what they read
    "score_mod_arguments": Refusal(
        "dense",
        {"score_mod": lambda score, b, h, q, k: score},
        TypeError,
        (
            "score_mod must take the arguments (score, b_idx, h_idx, q_idx, kv_idx, aux_tensors)",
            "got <lambda>(score, b, h, q, k)",
        ),
    ),
    "mask_mod_of_torch": Refusal(
        "dense",
        {"mask_mod": lambda b, h, q, k: q >= k},
        TypeError,
        (
            "mask_mod must take the arguments (b_idx, h_idx, q_idx, kv_idx, aux_tensors)",
            "got <lambda>(b, h, q, k)",
        ),
    ),
    "mask_mod_like_score_mod": Refusal(
        "dense",
        {"mask_mod": lambda score, b, h, q, k, aux: q >= k},
        TypeError,
        ("mask_mod must take", "got <lambda>(score, b, h, q, k, aux)"),
    ),
    "score_mod": Refusal(
        "dense", {"score_mod": 3}, TypeError, ("score_mod", "callable", "3 (int)")
    ),
    "mask_mod": Refusal("dense", {"mask_mod": "full"}, TypeError, ("mask_mod", "'full'")),
    "mod_reach": Refusal(
        "dense", {"mask_mod": _reaches_a_tensor()}, TypeError, ("mask_mod", "'limit'", "Tensor")
    ),
    "aux_type": Refusal(
        "dense", {"mask_mod": min, "aux_tensors": {}}, TypeError, ("aux_tensors", "dict")
    ),
    "aux_element": Refusal(
        "dense", {"mask_mod": min, "aux_tensors": [3]}, TypeError, ("aux_tensors[0]", "3 (int)")
    ),
    "aux_unread": Refusal(
        "dense", {"aux_tensors": [_int32(3)]}, ValueError, ("aux_tensors", "None", "1")
    ),
    "aux_dtype": Refusal(
        "dense",
        {"score_mod": min, "aux_tensors": (_int32(3), torch.zeros(3, dtype=torch.complex64))},
        TypeError,
        ("aux_tensors[1]", "int32, int64", "complex64"),
    ),
    "aux_scalar": Refusal(
        "dense",
        {"mask_mod": min, "aux_tensors": [torch.tensor(3.0)]},
        ValueError,
        ("aux_tensors[0]", "1 to 4", "()"),
    ),
    "aux_rank": Refusal(
        "dense",
        {"mask_mod": min, "aux_tensors": [torch.zeros(1, 1, 1, 1, 1)]},
        ValueError,
        ("aux_tensors[0]", "(1, 1, 1, 1, 1)"),
    ),
    "aux_device": Refusal(
        "dense",
        {"mask_mod": min, "aux_tensors": [_int32(3).to("meta")]},
        ValueError,
        ("aux_tensors[0]", "cpu", "meta"),
    ),
    # block lists
    "lists_type": Refusal(
        "dense",
        {"block_sparse_tensors_torch": ()},
        TypeError,
        ("block_sparse_tensors_torch", "tuple"),
    ),
    "block_mask_alone": Refusal(
        "dense",
        {"block_sparse_tensors_torch": _block_mask()},
        ValueError,
        ("block_sparse_tensors_torch", "mask_mod", "None"),
    ),
    # column intervals
    "columns_type": Refusal(
        "dense", {"startend_row_indices": [3]}, TypeError, ("startend_row_indices", "list")
    ),
    "columns_dtype": Refusal(
        "dense",
        {"startend_row_indices": torch.zeros(2, 1, 40, 2)},
        TypeError,
        ("startend_row_indices", "int32", "float32"),
    ),
    "columns_rank": Refusal(
        "dense", {"startend_row_indices": _int32(3)}, ValueError, ("startend_row_indices", "(1,)")
    ),
    "columns_vectors": Refusal(
        "dense", {"startend_row_indices": _columns(2, 1, 40, 3)}, ValueError, ("n in", "40, 3)")
    ),
    "columns_one_vector": Refusal(
        "dense",
        {"startend_row_indices": _columns(2, 1, 40, 1)},
        ValueError,
        ("startend_row_indices", "causal=True", "causal=False", "(2, 1, 40, 1)"),
    ),
    "columns_batch": Refusal(
        "dense", {"startend_row_indices": _columns(3, 1, 40, 2)}, ValueError, ("1 or 2", "(3, 1,")
    ),
    "columns_keys": Refusal(
        "dense", {"startend_row_indices": _columns(2, 1, 24, 2)}, ValueError, ("40 keys", "24, 2)")
    ),
    "columns_heads": Refusal(
        "dense",
        {"startend_row_indices": _columns(2, 3, 40, 2)},
        ValueError,
        ("heads_kv (2)", "heads_q (6)", "(2, 3, 40, 2)"),
    ),
    "columns_device": Refusal(
        "dense",
        {"startend_row_indices": _columns(2, 1, 40, 2).to("meta")},
        ValueError,
        ("startend_row_indices", "cpu", "meta"),
    ),
    "columns_packed_batch": Refusal(
        "packed",
        {"startend_row_indices": _columns(2, 1, 60, 2)},
        ValueError,
        ("must have 1 batch entries", "60 keys", "(2, 1, 60, 2)"),
    ),
    "column_mask_keys": Refusal(
        "dense",
        {"startend_row_indices": ColumnMask(_columns(1, 1, 41, 1), causal=True)},
        ValueError,
        ("startend_row_indices", "40 keys", "(1, 1, 41, 1)"),
    ),
    # known, but not supported
    "page_table": Refusal(
        "dense", {"page_table": _int32(0)}, NotImplementedError, ("page_table", "int32")
    ),
    "num_splits": Refusal("dense", {"num_splits": 4}, NotImplementedError, ("num_splits", "4")),
    "num_splits_zero": Refusal(
        "dense", {"num_splits": 0}, NotImplementedError, ("num_splits", "0")
    ),
    "num_splits_type": Refusal("dense", {"num_splits": True}, TypeError, ("num_splits", "True")),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_refusal_names_argument_and_value(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as caught:
        _check(LAYOUTS[refusal.layout]() | refusal.change)
    for words in refusal.said:
        assert words in str(caught.value)


# -- memory layout on a GPU ---------------------------------------------------------------------


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for the checks that only CUDA tensors get."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def tolist(self) -> Any:
        raise AssertionError("a CUDA tensor must not be read")

    def item(self) -> Any:
        raise AssertionError("a CUDA tensor must not be read")


# it stands for a plain one
plain_tensors.PLAIN_TYPES += (OnCuda,)


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
            arguments[name] = _int32(7, 3, 999)  # nonsense that only a read would notice
    arguments["seqused_k"] = _int32(-5, 999)
    assert _check(_on_cuda(arguments)).batch == BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_dtypes_are_16_bit(dtype: torch.dtype) -> None:
    arguments = {name: tensor.to(dtype) for name, tensor in _dense().items()}
    with pytest.raises(TypeError, match=f"q must .* on cuda, got {dtype}"):
        _check(_on_cuda(arguments))


@pytest.mark.parametrize("name", ["out"])
def test_cuda_base_address(name: str) -> None:
    arguments = _dense() | {"out": _tensor(BATCH, SEQLEN_Q, HEADS_Q, DIM_V)}
    shape = arguments[name].shape
    _check(_on_cuda(arguments | {name: _offset(8, *shape)}))
    misplaced = arguments | {name: _offset(4, *shape)}
    _check(misplaced)  # the CPU path does not need the alignment
    with pytest.raises(ValueError, match=f"{name} must start at a multiple of 16 bytes.* 8 bytes"):
        _check(_on_cuda(misplaced))


@pytest.mark.parametrize("name", ["out"])
def test_cuda_strides(name: str) -> None:
    arguments = _dense() | {"out": _tensor(BATCH, SEQLEN_Q, HEADS_Q, DIM_V)}
    *rows, dim = arguments[name].shape
    _check(_on_cuda(arguments | {name: _tensor(*rows, dim + 8)[..., :dim]}))
    padded = arguments | {name: _tensor(*rows, dim + 4)[..., :dim]}
    _check(padded)
    with pytest.raises(
        ValueError, match=rf"{name} must have strides .*multiples of 8.*{dim + 4}, 1"
    ):
        _check(_on_cuda(padded))


def test_packed_sequences_that_are_too_long_for_a_view() -> None:
    from flash_mask_cute.core.tma import RAGGED_BOUND
    from flash_mask_cute.limits import MAX_PACKED_SEQLEN

    assert MAX_PACKED_SEQLEN == RAGGED_BOUND
    rows = MAX_PACKED_SEQLEN + 1
    long = {name: _tensor(1, 1, 8).expand(rows, 1, 8) for name in ("q", "k", "v")}
    lengths = {"cu_seqlens_q": _int32(0, rows), "cu_seqlens_k": _int32(0, rows)}
    _check(_on_cuda(long | lengths) | {"max_seqlen_q": 9, "max_seqlen_k": MAX_PACKED_SEQLEN})
    for side, given in (("q", {}), ("k", {"max_seqlen_q": 9}), ("q", {"max_seqlen_q": rows})):
        message = rf"more than {MAX_PACKED_SEQLEN} rows .* got {rows} rows in {side}; "
        with pytest.raises(NotImplementedError, match=message):
            _check(_on_cuda(long | lengths) | given)


def test_cuda_and_cpu_tensors_do_not_mix() -> None:
    arguments = _on_cuda(_packed()) | {"cu_seqlens_q": _int32(0, 9, 24)}
    with pytest.raises(
        ValueError, match="cu_seqlens_q must be on the device of q .cuda:0., got cpu"
    ):
        _check(arguments)


def test_strides_of_size_one_extents_do_not_matter() -> None:
    storage = torch.zeros(4096, dtype=torch.bfloat16)
    check_memory_layout("q", storage.as_strided((1, 4, 1, 8), (3, 8, 5, 1)), aligned=True)
    check_memory_layout("q", storage.as_strided((0, 4, 2, 8), (3, 8, 5, 1)), aligned=True)
    with pytest.raises(ValueError, match=r"q must have strides .*\(3, 8, 5, 1\)"):
        check_memory_layout("q", storage.as_strided((2, 4, 1, 8), (3, 8, 5, 1)), aligned=True)
