"""What the public forward refuses: every refusal names its argument and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from forward_arguments import (
    LAYOUTS,
    block_mask,
    check,
    column_zeros,
    int32,
    reaches_a_tensor,
    zeros,
)

from flash_mask_cute.masks.column_mask import ColumnMask


class Refusal(NamedTuple):
    layout: str
    change: dict[str, Any]
    error: type[Exception]
    said: tuple[str, ...]  # every one of these must be in the message


# three rows of two pages, of the pool of 2 pages of 40 keys that k is
PAGED = {"page_table": torch.zeros((3, 2), dtype=torch.int32)}

REFUSALS = {
    # types and dtypes
    "q_type": Refusal("dense", {"q": [1.0]}, TypeError, ("q must be a torch.Tensor", "list")),
    "k_none": Refusal("dense", {"k": None}, TypeError, ("k must be a torch.Tensor", "None")),
    "v_sparse": Refusal(
        "dense", {"v": zeros(2, 3).to_sparse()}, TypeError, ("v must be", "sparse_coo")
    ),
    "q_dtype": Refusal(
        "dense", {"q": zeros(2, 24, 6, 64, dtype=torch.int32)}, TypeError, ("q must", "int32")
    ),
    "k_dtype": Refusal(
        "dense",
        {"k": zeros(2, 40, 2, 64, dtype=torch.float16)},
        TypeError,
        ("k must have the dtype of q", "bfloat16", "float16"),
    ),
    "v_dtype": Refusal(
        "dense", {"v": zeros(2, 40, 2, 32, dtype=torch.float32)}, TypeError, ("v must", "float32")
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
        {"q": zeros(48, 6, 64)},
        ValueError,
        ("q must have shape (batch, seqlen, heads_q, head_dim)", "cu_seqlens_q", "(48, 6, 64)"),
    ),
    "k_rank": Refusal("dense", {"k": zeros(2, 64)}, ValueError, ("k must", "(2, 64)")),
    "v_rank": Refusal(
        "dense", {"v": zeros(8)}, ValueError, ("v must have shape (batch", "head_dim_v", "(8,)")
    ),
    "q_rank_packed": Refusal(
        "packed",
        {"q": zeros(2, 24, 6, 64)},
        ValueError,
        ("q must have shape (total, heads_q, head_dim)", "(2, 24, 6, 64)"),
    ),
    "k_rank_packed": Refusal(
        "packed_k", {"k": zeros(1, 60, 2, 64)}, ValueError, ("k must", "(1, 60, 2, 64)")
    ),
    "heads": Refusal("dense", {"q": zeros(2, 24, 5, 64)}, ValueError, ("heads_q=5", "heads_kv=2")),
    "no_heads": Refusal(
        "dense",
        {"k": zeros(2, 40, 0, 64), "v": zeros(2, 40, 0, 64)},
        ValueError,
        ("heads_kv=0",),
    ),
    "head_dim_mismatch": Refusal(
        "dense", {"k": zeros(2, 40, 2, 128)}, ValueError, ("k must have the head_dim", "128")
    ),
    "head_dim_step": Refusal(
        "dense",
        {"q": zeros(2, 24, 6, 60), "k": zeros(2, 40, 2, 60)},
        ValueError,
        ("head_dim (", "60"),
    ),
    "head_dim_zero": Refusal(
        "dense",
        {"q": zeros(2, 24, 6, 0), "k": zeros(2, 40, 2, 0)},
        ValueError,
        ("head_dim (", "got 0"),
    ),
    "head_dim_v_step": Refusal(
        "dense", {"v": zeros(2, 40, 2, 12)}, ValueError, ("head_dim_v (", "12")
    ),
    "batch": Refusal(
        "dense",
        {"q": zeros(3, 24, 6, 64)},
        ValueError,
        ("batch", "3 from the shape of q", "2 from the shape of k"),
    ),
    "batch_packed": Refusal(
        "packed",
        {"cu_seqlens_q": int32(0, 3, 9, 24)},
        ValueError,
        ("batch", "3 from cu_seqlens_q", "2 from cu_seqlens_k"),
    ),
    "batch_mixed": Refusal(
        "packed_q",
        {"cu_seqlens_q": int32(0, 24)},
        ValueError,
        ("1 from cu_seqlens_q", "2 from the shape of k"),
    ),
    "v_seqlen": Refusal(
        "dense", {"v": zeros(2, 41, 2, 32)}, ValueError, ("v must agree", "(2, 41, 2, 32)")
    ),
    "v_heads": Refusal(
        "dense", {"v": zeros(2, 40, 3, 32)}, ValueError, ("v must agree", "(2, 40, 3, 32)")
    ),
    "v_batch": Refusal(
        "dense", {"v": zeros(1, 40, 2, 32)}, ValueError, ("v must agree", "(1, 40, 2, 32)")
    ),
    # cu_seqlens
    "cu_q_type": Refusal("packed", {"cu_seqlens_q": [0, 24]}, TypeError, ("cu_seqlens_q", "list")),
    "cu_q_dtype": Refusal(
        "packed", {"cu_seqlens_q": torch.tensor([0, 9, 24])}, TypeError, ("cu_seqlens_q", "int64")
    ),
    "cu_k_rank": Refusal(
        "packed", {"cu_seqlens_k": int32(0, 60)[None]}, ValueError, ("cu_seqlens_k", "(1, 2)")
    ),
    "cu_k_empty": Refusal("packed", {"cu_seqlens_k": int32()}, ValueError, ("cu_seqlens_k", "0")),
    "cu_k_strided": Refusal(
        "packed",
        {"cu_seqlens_k": int32(0, 0, 45, 0, 60, 0)[::2]},
        ValueError,
        ("cu_seqlens_k must be contiguous", "2"),
    ),
    "cu_q_device": Refusal(
        "packed",
        {"cu_seqlens_q": int32(0, 9, 24).to("meta")},
        ValueError,
        ("cu_seqlens_q", "meta"),
    ),
    "cu_q_start": Refusal(
        "packed", {"cu_seqlens_q": int32(1, 9, 24)}, ValueError, ("cu_seqlens_q must start", "1")
    ),
    "cu_k_decreasing": Refusal(
        "packed",
        {"cu_seqlens_k": int32(0, 61, 60)},
        ValueError,
        ("cu_seqlens_k must not decrease", "61 followed by 60", "position 2"),
    ),
    "cu_k_end": Refusal(
        "packed", {"cu_seqlens_k": int32(0, 45, 61)}, ValueError, ("cu_seqlens_k", "60", "61")
    ),
    # seqused
    "used_q_type": Refusal("dense", {"seqused_q": (1, 2)}, TypeError, ("seqused_q", "tuple")),
    "used_q_dtype": Refusal(
        "dense", {"seqused_q": torch.tensor([1, 2])}, TypeError, ("seqused_q", "int64")
    ),
    "used_k_shape": Refusal(
        "dense", {"seqused_k": int32(1, 2, 3)}, ValueError, ("seqused_k", "(2,)", "(3,)")
    ),
    "used_k_device": Refusal(
        "dense", {"seqused_k": int32(1, 2).to("meta")}, ValueError, ("seqused_k", "meta")
    ),
    "used_k_strided": Refusal(
        "dense", {"seqused_k": int32(1, 2, 3, 4)[::2]}, ValueError, ("seqused_k", "2")
    ),
    "used_q_negative": Refusal(
        "dense", {"seqused_q": int32(3, -1)}, ValueError, ("seqused_q", "-1", "sequence 1")
    ),
    "used_k_long": Refusal(
        "dense", {"seqused_k": int32(41, 1)}, ValueError, ("seqused_k", "41", "length 40")
    ),
    "used_k_long_packed": Refusal(
        "packed", {"seqused_k": int32(45, 16)}, ValueError, ("seqused_k", "16", "length 15")
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
        {"max_seqlen_k": 40, "seqused_k": int32(41, 0)},
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
        "dense", {"window_size_left": int32(3)}, TypeError, ("window_size_left", "tensor")
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
    "pack_gqa": Refusal("dense", {"pack_gqa": 1}, TypeError, ("pack_gqa", "1 (int)")),
    # learnable_sink
    "sink_type": Refusal("dense", {"learnable_sink": 0.0}, TypeError, ("learnable_sink", "0.0")),
    "sink_dtype": Refusal(
        "dense",
        {"learnable_sink": zeros(6, dtype=torch.int64)},
        TypeError,
        ("learnable_sink", "int64"),
    ),
    "sink_shape": Refusal(
        "dense", {"learnable_sink": zeros(2)}, ValueError, ("learnable_sink", "(6,)", "(2,)")
    ),
    "sink_device": Refusal(
        "dense", {"learnable_sink": zeros(6).to("meta")}, ValueError, ("learnable_sink", "meta")
    ),
    # outputs
    "out_type": Refusal("dense", {"out": 1}, TypeError, ("out must be a torch.Tensor", "1")),
    "out_dtype": Refusal(
        "dense", {"out": zeros(2, 24, 6, 32, dtype=torch.float64)}, TypeError, ("out", "float64")
    ),
    "out_shape": Refusal(
        "dense",
        {"out": zeros(2, 24, 6, 64)},
        ValueError,
        ("out must have", "(2, 24, 6, 32)", "(2, 24, 6, 64)"),
    ),
    "out_device": Refusal(
        "dense", {"out": zeros(2, 24, 6, 32).to("meta")}, ValueError, ("out must be on", "meta")
    ),
    "out_last_stride": Refusal(
        "dense",
        {"out": zeros(2, 24, 6, 64)[..., ::2]},
        ValueError,
        ("out must be contiguous", "(9216, 384, 64, 2)"),
    ),
    "out_expanded": Refusal(
        "dense",
        {"out": zeros(1, 24, 6, 32).expand(2, -1, -1, -1)},
        ValueError,
        ("out must not overlap", "(0, 192, 32, 1)"),
    ),
    "lse_type": Refusal("dense", {"lse": []}, TypeError, ("lse must be a torch.Tensor", "list")),
    "lse_dtype": Refusal("dense", {"lse": zeros(2, 6, 24)}, TypeError, ("lse", "bfloat16")),
    "lse_shape": Refusal(
        "dense",
        {"lse": zeros(2, 24, 6, dtype=torch.float32)},
        ValueError,
        ("lse", "(2, 6, 24)", "(2, 24, 6)"),
    ),
    "lse_shape_packed": Refusal(
        "packed",
        {"lse": zeros(24, 6, dtype=torch.float32)},
        ValueError,
        ("lse", "(6, 24)", "(24, 6)"),
    ),
    "lse_device": Refusal(
        "dense",
        {"lse": zeros(2, 6, 24, dtype=torch.float32).to("meta")},
        ValueError,
        ("lse", "meta"),
    ),
    "lse_strided": Refusal(
        "dense",
        {"lse": zeros(2, 24, 6, dtype=torch.float32).transpose(1, 2)},
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
        "dense", {"mask_mod": reaches_a_tensor()}, TypeError, ("mask_mod", "'limit'", "Tensor")
    ),
    "aux_type": Refusal(
        "dense", {"mask_mod": min, "aux_tensors": {}}, TypeError, ("aux_tensors", "dict")
    ),
    "aux_element": Refusal(
        "dense", {"mask_mod": min, "aux_tensors": [3]}, TypeError, ("aux_tensors[0]", "3 (int)")
    ),
    "aux_unread": Refusal(
        "dense", {"aux_tensors": [int32(3)]}, ValueError, ("aux_tensors", "None", "1")
    ),
    "aux_dtype": Refusal(
        "dense",
        {"score_mod": min, "aux_tensors": (int32(3), torch.zeros(3, dtype=torch.complex64))},
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
        {"mask_mod": min, "aux_tensors": [int32(3).to("meta")]},
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
        {"block_sparse_tensors_torch": block_mask()},
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
        "dense", {"startend_row_indices": int32(3)}, ValueError, ("startend_row_indices", "(1,)")
    ),
    "columns_vectors": Refusal(
        "dense", {"startend_row_indices": column_zeros(2, 1, 40, 3)}, ValueError, ("n in", "40, 3)")
    ),
    "columns_one_vector": Refusal(
        "dense",
        {"startend_row_indices": column_zeros(2, 1, 40, 1)},
        ValueError,
        ("startend_row_indices", "causal=True", "causal=False", "(2, 1, 40, 1)"),
    ),
    "columns_batch": Refusal(
        "dense",
        {"startend_row_indices": column_zeros(3, 1, 40, 2)},
        ValueError,
        ("1 or 2", "(3, 1,"),
    ),
    "columns_keys": Refusal(
        "dense",
        {"startend_row_indices": column_zeros(2, 1, 24, 2)},
        ValueError,
        ("40 keys", "24, 2)"),
    ),
    "columns_heads": Refusal(
        "dense",
        {"startend_row_indices": column_zeros(2, 3, 40, 2)},
        ValueError,
        ("heads_kv (2)", "heads_q (6)", "(2, 3, 40, 2)"),
    ),
    "columns_device": Refusal(
        "dense",
        {"startend_row_indices": column_zeros(2, 1, 40, 2).to("meta")},
        ValueError,
        ("startend_row_indices", "cpu", "meta"),
    ),
    "columns_packed_batch": Refusal(
        "packed",
        {"startend_row_indices": column_zeros(2, 1, 60, 2)},
        ValueError,
        ("must have 1 batch entries", "60 keys", "(2, 1, 60, 2)"),
    ),
    "column_mask_keys": Refusal(
        "dense",
        {"startend_row_indices": ColumnMask(column_zeros(1, 1, 41, 1), causal=True)},
        ValueError,
        ("startend_row_indices", "40 keys", "(1, 1, 41, 1)"),
    ),
    "page_table": Refusal(
        "dense", {"page_table": int32(0)}, ValueError, ("page_table", "(batch, max_pages)", "(1,)")
    ),
    "kv_batch_idx_alone": Refusal(
        "dense", {"kv_batch_idx": int32(0, 1)}, ValueError, ("kv_batch_idx needs page_table",)
    ),
    "leftpad_k_alone": Refusal(
        "dense", {"leftpad_k": int32(0, 1)}, ValueError, ("leftpad_k needs page_table",)
    ),
    "kv_batch_idx_dtype": Refusal(
        "dense", PAGED | {"kv_batch_idx": torch.zeros(2)}, TypeError, ("kv_batch_idx", "float32")
    ),
    "kv_batch_idx_value": Refusal(
        "dense",
        PAGED | {"kv_batch_idx": int32(0, 3)},
        ValueError,
        ("kv_batch_idx must lie in [0, 3)", "got 3"),
    ),
    "kv_batch_idx_batch": Refusal(
        "dense",
        PAGED | {"kv_batch_idx": int32(0)},
        ValueError,
        ("batch of q and k must be equal",),
    ),
    "leftpad_k_shape": Refusal(
        "dense",
        PAGED | {"kv_batch_idx": int32(0, 1), "leftpad_k": int32(0, 1, 2)},
        ValueError,
        ("leftpad_k must have shape (batch,) = (2,)", "(3,)"),
    ),
    "leftpad_k_without_lengths": Refusal(
        "dense",
        PAGED | {"kv_batch_idx": int32(0, 1), "leftpad_k": int32(0, 1)},
        ValueError,
        ("leftpad_k needs seqused_k",),
    ),
    "leftpad_k_value": Refusal(
        "dense",
        PAGED
        | {"kv_batch_idx": int32(0, 1), "leftpad_k": int32(1, 71), "seqused_k": int32(79, 10)},
        ValueError,
        ("leftpad_k must lie between 0 and the 80 rows", "10 keys", "got 71"),
    ),
    "num_splits": Refusal("dense", {"num_splits": -1}, ValueError, ("num_splits", "-1")),
    "num_splits_many": Refusal("dense", {"num_splits": 257}, ValueError, ("num_splits", "257")),
    "num_splits_type": Refusal("dense", {"num_splits": True}, TypeError, ("num_splits", "True")),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_refusal_names_argument_and_value(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as caught:
        check(LAYOUTS[refusal.layout]() | refusal.change)
    for words in refusal.said:
        assert words in str(caught.value)
