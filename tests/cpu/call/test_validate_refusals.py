"""What the public forward refuses: every refusal names its argument and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import int32
from forward_arguments import LAYOUTS, block_mask, check, column_zeros, reaches_a_tensor, zeros

from flash_mask_cute.masks.column_mask import ColumnMask


class Refusal(NamedTuple):
    error: type[Exception]
    said: tuple[str, ...]  # every one of these must be in the message
    layout: str
    change: dict[str, Any]


def refused(error: type[Exception], *said: str, layout: str = "dense", **change: Any) -> Refusal:
    return Refusal(error, said, layout, change)


# three rows of two pages, of the pool of 2 pages of 40 keys that k is
PAGED = {"page_table": torch.zeros((3, 2), dtype=torch.int32)}

REFUSALS = {
    # types and dtypes
    "q_type": refused(TypeError, "q must be a torch.Tensor", "list", q=[1.0]),
    "k_none": refused(TypeError, "k must be a torch.Tensor", "None", k=None),
    "v_sparse": refused(TypeError, "v must be", "sparse_coo", v=zeros(2, 3).to_sparse()),
    "q_dtype": refused(TypeError, "q must", "int32", q=zeros(2, 24, 6, 64, dtype=torch.int32)),
    "k_dtype": refused(TypeError, "k must have the dtype of q", "bfloat16", "float16",
                       k=zeros(2, 40, 2, 64, dtype=torch.float16)),
    "v_dtype": refused(TypeError, "v must", "float32", v=zeros(2, 40, 2, 32, dtype=torch.float32)),
    "device_kind": refused(ValueError, "q must be on", "meta", q=torch.zeros(1, device="meta")),
    "k_device": refused(ValueError, "k must be on the device of q", "cpu", "meta",
                        k=torch.zeros(2, 40, 2, 64, dtype=torch.bfloat16, device="meta")),
    # ranks and extents
    "q_rank": refused(ValueError, "q must have shape (batch, seqlen, heads_q, head_dim)",
                      "cu_seqlens_q", "(48, 6, 64)", q=zeros(48, 6, 64)),
    "k_rank": refused(ValueError, "k must", "(2, 64)", k=zeros(2, 64)),
    "v_rank": refused(ValueError, "v must have shape (batch", "head_dim_v", "(8,)", v=zeros(8)),
    "q_rank_packed": refused(ValueError, "q must have shape (total, heads_q, head_dim)",
                             "(2, 24, 6, 64)", layout="packed", q=zeros(2, 24, 6, 64)),
    "k_rank_packed": refused(ValueError, "k must", "(1, 60, 2, 64)", layout="packed_k",
                             k=zeros(1, 60, 2, 64)),
    "heads": refused(ValueError, "heads_q=5", "heads_kv=2", q=zeros(2, 24, 5, 64)),
    "no_heads": refused(ValueError, "heads_kv=0", k=zeros(2, 40, 0, 64), v=zeros(2, 40, 0, 64)),
    "head_dim_mismatch": refused(ValueError, "k must have the head_dim", "128",
                                 k=zeros(2, 40, 2, 128)),
    "head_dim_step": refused(ValueError, "head_dim (", "60", q=zeros(2, 24, 6, 60),
                             k=zeros(2, 40, 2, 60)),
    "head_dim_zero": refused(ValueError, "head_dim (", "got 0", q=zeros(2, 24, 6, 0),
                             k=zeros(2, 40, 2, 0)),
    "head_dim_v_step": refused(ValueError, "head_dim_v (", "12", v=zeros(2, 40, 2, 12)),
    "batch": refused(ValueError, "batch", "3 from the shape of q", "2 from the shape of k",
                     q=zeros(3, 24, 6, 64)),
    "batch_packed": refused(ValueError, "batch", "3 from cu_seqlens_q", "2 from cu_seqlens_k",
                            layout="packed", cu_seqlens_q=int32(0, 3, 9, 24)),
    "batch_mixed": refused(ValueError, "1 from cu_seqlens_q", "2 from the shape of k",
                           layout="packed_q", cu_seqlens_q=int32(0, 24)),
    "v_seqlen": refused(ValueError, "v must agree", "(2, 41, 2, 32)", v=zeros(2, 41, 2, 32)),
    "v_heads": refused(ValueError, "v must agree", "(2, 40, 3, 32)", v=zeros(2, 40, 3, 32)),
    "v_batch": refused(ValueError, "v must agree", "(1, 40, 2, 32)", v=zeros(1, 40, 2, 32)),
    # cu_seqlens
    "cu_q_type": refused(TypeError, "cu_seqlens_q", "list", layout="packed", cu_seqlens_q=[0, 24]),
    "cu_q_dtype": refused(TypeError, "cu_seqlens_q", "int64", layout="packed",
                          cu_seqlens_q=torch.tensor([0, 9, 24])),
    "cu_k_rank": refused(ValueError, "cu_seqlens_k", "(1, 2)", layout="packed",
                         cu_seqlens_k=int32(0, 60)[None]),
    "cu_k_empty": refused(ValueError, "cu_seqlens_k", "0", layout="packed", cu_seqlens_k=int32()),
    "cu_k_strided": refused(ValueError, "cu_seqlens_k must be contiguous", "2", layout="packed",
                            cu_seqlens_k=int32(0, 0, 45, 0, 60, 0)[::2]),
    "cu_q_device": refused(ValueError, "cu_seqlens_q", "meta", layout="packed",
                           cu_seqlens_q=int32(0, 9, 24).to("meta")),
    "cu_q_start": refused(ValueError, "cu_seqlens_q must start", "1", layout="packed",
                          cu_seqlens_q=int32(1, 9, 24)),
    "cu_k_decreasing": refused(ValueError, "cu_seqlens_k must not decrease", "61 followed by 60",
                               "position 2", layout="packed", cu_seqlens_k=int32(0, 61, 60)),
    "cu_k_end": refused(ValueError, "cu_seqlens_k", "60", "61", layout="packed",
                        cu_seqlens_k=int32(0, 45, 61)),
    # seqused
    "used_q_type": refused(TypeError, "seqused_q", "tuple", seqused_q=(1, 2)),
    "used_q_dtype": refused(TypeError, "seqused_q", "int64", seqused_q=torch.tensor([1, 2])),
    "used_k_shape": refused(ValueError, "seqused_k", "(2,)", "(3,)", seqused_k=int32(1, 2, 3)),
    "used_k_device": refused(ValueError, "seqused_k", "meta", seqused_k=int32(1, 2).to("meta")),
    "used_k_strided": refused(ValueError, "seqused_k", "2", seqused_k=int32(1, 2, 3, 4)[::2]),
    "used_q_negative": refused(ValueError, "seqused_q", "-1", "sequence 1", seqused_q=int32(3, -1)),
    "used_k_long": refused(ValueError, "seqused_k", "41", "length 40", seqused_k=int32(41, 1)),
    "used_k_long_packed": refused(ValueError, "seqused_k", "16", "length 15", layout="packed",
                                  seqused_k=int32(45, 16)),
    # max_seqlen
    "max_q_tensor": refused(TypeError, "max_seqlen_q must be a Python int", "tensor", "on the host",
                            layout="packed", max_seqlen_q=torch.tensor(24)),
    "max_k_float": refused(TypeError, "max_seqlen_k", "60.0", layout="packed", max_seqlen_k=60.0),
    "max_k_bool": refused(TypeError, "max_seqlen_k", "True", layout="packed", max_seqlen_k=True),
    "max_q_negative": refused(ValueError, "max_seqlen_q", "-1", layout="packed", max_seqlen_q=-1),
    "max_q_small": refused(ValueError, "max_seqlen_q", "(15)", "14", layout="packed",
                           max_seqlen_q=14),
    "max_k_small": refused(ValueError, "max_seqlen_k", "(41)", "40", layout="packed",
                           max_seqlen_k=40, seqused_k=int32(41, 0)),
    # mask and scale scalars
    "causal": refused(TypeError, "causal", "1 (int)", causal=1),
    "causal_none": refused(TypeError, "causal", "None", causal=None),
    "return_lse": refused(TypeError, "return_lse", "'yes'", return_lse="yes"),
    "left_minus_one": refused(ValueError,
                              "window_size_left must not be -1: None leaves that side open",
                              "got -1", window_size_left=-1),
    "right_minus_one": refused(ValueError,
                               "window_size_right must not be -1: None leaves that side open",
                               "got -1", window_size_right=np.int64(-1)),
    "left_bool": refused(TypeError, "window_size_left", window_size_left=True),
    "right_float": refused(TypeError, "window_size_right", "2.0", window_size_right=2.0),
    "left_tensor": refused(TypeError, "window_size_left", "tensor", window_size_left=int32(3)),
    "softcap_negative": refused(ValueError, "softcap", "-1.5", softcap=-1.5),
    "softcap_nan": refused(ValueError, "softcap", "nan", softcap=float("nan")),
    "softcap_none": refused(TypeError, "softcap", "None", softcap=None),
    "softcap_bool": refused(TypeError, "softcap", "True", softcap=True),
    "scale_inf": refused(ValueError, "softmax_scale", "inf", softmax_scale=float("inf")),
    "scale_nan": refused(ValueError, "softmax_scale must be finite", "nan",
                         softmax_scale=float("nan")),
    "scale_large": refused(ValueError, "softmax_scale", "1e+38", "-2e+38", softmax_scale=-2e38),
    "scale_larger_than_a_float": refused(ValueError, "softmax_scale", "1000000",
                                         softmax_scale=10**400),
    "scale_text": refused(TypeError, "softmax_scale", "'1'", softmax_scale="1"),
    "pack_gqa": refused(TypeError, "pack_gqa", "1 (int)", pack_gqa=1),
    # learnable_sink
    "sink_type": refused(TypeError, "learnable_sink", "0.0", learnable_sink=0.0),
    "sink_dtype": refused(TypeError, "learnable_sink", "int64",
                          learnable_sink=zeros(6, dtype=torch.int64)),
    "sink_shape": refused(ValueError, "learnable_sink", "(6,)", "(2,)", learnable_sink=zeros(2)),
    "sink_device": refused(ValueError, "learnable_sink", "meta",
                           learnable_sink=zeros(6).to("meta")),
    # outputs
    "out_type": refused(TypeError, "out must be a torch.Tensor", "1", out=1),
    "out_dtype": refused(TypeError, "out", "float64", out=zeros(2, 24, 6, 32, dtype=torch.float64)),
    "out_shape": refused(ValueError, "out must have", "(2, 24, 6, 32)", "(2, 24, 6, 64)",
                         out=zeros(2, 24, 6, 64)),
    "out_device": refused(ValueError, "out must be on", "meta", out=zeros(2, 24, 6, 32).to("meta")),
    "out_last_stride": refused(ValueError, "out must be contiguous", "(9216, 384, 64, 2)",
                               out=zeros(2, 24, 6, 64)[..., ::2]),
    "out_expanded": refused(ValueError, "out must not overlap", "(0, 192, 32, 1)",
                            out=zeros(1, 24, 6, 32).expand(2, -1, -1, -1)),
    "lse_type": refused(TypeError, "lse must be a torch.Tensor", "list", lse=[]),
    "lse_dtype": refused(TypeError, "lse", "bfloat16", lse=zeros(2, 6, 24)),
    "lse_shape": refused(ValueError, "lse", "(2, 6, 24)", "(2, 24, 6)",
                         lse=zeros(2, 24, 6, dtype=torch.float32)),
    "lse_shape_packed": refused(ValueError, "lse", "(6, 24)", "(24, 6)", layout="packed",
                                lse=zeros(24, 6, dtype=torch.float32)),
    "lse_device": refused(ValueError, "lse", "meta",
                          lse=zeros(2, 6, 24, dtype=torch.float32).to("meta")),
    "lse_strided": refused(ValueError, "lse must be contiguous", "(144, 1, 6)",
                           lse=zeros(2, 24, 6, dtype=torch.float32).transpose(1, 2)),
    # callables and what they read
    "score_mod_arguments": refused(
        TypeError,
        "score_mod must take the arguments (score, b_idx, h_idx, q_idx, kv_idx, aux_tensors)",
        "got <lambda>(score, b, h, q, k)",
        score_mod=lambda score, b, h, q, k: score,
    ),
    "mask_mod_of_torch": refused(
        TypeError,
        "mask_mod must take the arguments (b_idx, h_idx, q_idx, kv_idx, aux_tensors)",
        "got <lambda>(b, h, q, k)",
        mask_mod=lambda b, h, q, k: q >= k,
    ),
    "mask_mod_like_score_mod": refused(TypeError, "mask_mod must take",
                                       "got <lambda>(score, b, h, q, k, aux)",
                                       mask_mod=lambda score, b, h, q, k, aux: q >= k),
    "score_mod": refused(TypeError, "score_mod", "callable", "3 (int)", score_mod=3),
    "mask_mod": refused(TypeError, "mask_mod", "'full'", mask_mod="full"),
    "mod_reach": refused(TypeError, "mask_mod", "'limit'", "Tensor", mask_mod=reaches_a_tensor()),
    "aux_type": refused(TypeError, "aux_tensors", "dict", mask_mod=min, aux_tensors={}),
    "aux_element": refused(TypeError, "aux_tensors[0]", "3 (int)", mask_mod=min, aux_tensors=[3]),
    "aux_unread": refused(ValueError, "aux_tensors", "None", "1", aux_tensors=[int32(3)]),
    "aux_dtype": refused(TypeError, "aux_tensors[1]", "int32, int64", "complex64", score_mod=min,
                         aux_tensors=(int32(3), torch.zeros(3, dtype=torch.complex64))),
    "aux_scalar": refused(ValueError, "aux_tensors[0]", "1 to 4", "()", mask_mod=min,
                          aux_tensors=[torch.tensor(3.0)]),
    "aux_rank": refused(ValueError, "aux_tensors[0]", "(1, 1, 1, 1, 1)", mask_mod=min,
                        aux_tensors=[torch.zeros(1, 1, 1, 1, 1)]),
    "aux_device": refused(ValueError, "aux_tensors[0]", "cpu", "meta", mask_mod=min,
                          aux_tensors=[int32(3).to("meta")]),
    # block lists
    "lists_type": refused(TypeError, "block_sparse_tensors_torch", "tuple",
                          block_sparse_tensors_torch=()),
    "block_mask_alone": refused(ValueError, "block_sparse_tensors_torch", "mask_mod", "None",
                                block_sparse_tensors_torch=block_mask()),
    # column intervals
    "columns_type": refused(TypeError, "startend_row_indices", "list", startend_row_indices=[3]),
    "columns_dtype": refused(TypeError, "startend_row_indices", "int32", "float32",
                             startend_row_indices=torch.zeros(2, 1, 40, 2)),
    "columns_rank": refused(
        ValueError, "startend_row_indices", "(1,)", startend_row_indices=int32(3)
    ),
    "columns_vectors": refused(ValueError, "n in", "40, 3)",
                               startend_row_indices=column_zeros(2, 1, 40, 3)),
    "columns_one_vector": refused(ValueError, "startend_row_indices", "causal=True", "causal=False",
                                  "(2, 1, 40, 1)", startend_row_indices=column_zeros(2, 1, 40, 1)),
    "columns_batch": refused(ValueError, "1 or 2", "(3, 1,",
                             startend_row_indices=column_zeros(3, 1, 40, 2)),
    "columns_keys": refused(ValueError, "40 keys", "24, 2)",
                            startend_row_indices=column_zeros(2, 1, 24, 2)),
    "columns_heads": refused(ValueError, "heads_kv (2)", "heads_q (6)", "(2, 3, 40, 2)",
                             startend_row_indices=column_zeros(2, 3, 40, 2)),
    "columns_device": refused(ValueError, "startend_row_indices", "cpu", "meta",
                              startend_row_indices=column_zeros(2, 1, 40, 2).to("meta")),
    "columns_packed_batch": refused(ValueError, "must have 1 batch entries", "60 keys",
                                    "(2, 1, 60, 2)", layout="packed",
                                    startend_row_indices=column_zeros(2, 1, 60, 2)),
    "column_mask_keys": refused(
        ValueError,
        "startend_row_indices",
        "40 keys",
        "(1, 1, 41, 1)",
        startend_row_indices=ColumnMask(column_zeros(1, 1, 41, 1), causal=True),
    ),
    "page_table": refused(
        ValueError, "page_table", "(batch, max_pages)", "(1,)", page_table=int32(0)
    ),
    "kv_batch_idx_alone": refused(ValueError, "kv_batch_idx needs page_table",
                                  kv_batch_idx=int32(0, 1)),
    "leftpad_k_alone": refused(ValueError, "leftpad_k needs page_table", leftpad_k=int32(0, 1)),
    "kv_batch_idx_dtype": refused(TypeError, "kv_batch_idx", "float32", **PAGED,
                                  kv_batch_idx=torch.zeros(2)),
    "kv_batch_idx_value": refused(ValueError, "kv_batch_idx must lie in [0, 3)", "got 3", **PAGED,
                                  kv_batch_idx=int32(0, 3)),
    "kv_batch_idx_batch": refused(ValueError, "batch of q and k must be equal", **PAGED,
                                  kv_batch_idx=int32(0)),
    "leftpad_k_shape": refused(
        ValueError,
        "leftpad_k must have shape (batch,) = (2,)",
        "(3,)",
        **PAGED,
        kv_batch_idx=int32(0, 1),
        leftpad_k=int32(0, 1, 2),
    ),
    "leftpad_k_without_lengths": refused(ValueError, "leftpad_k needs seqused_k", **PAGED,
                                         kv_batch_idx=int32(0, 1), leftpad_k=int32(0, 1)),
    "leftpad_k_value": refused(ValueError, "leftpad_k must lie between 0 and the 80 rows",
                               "10 keys", "got 71", **PAGED, kv_batch_idx=int32(0, 1),
                               leftpad_k=int32(1, 71), seqused_k=int32(79, 10)),
    "num_splits": refused(ValueError, "num_splits", "-1", num_splits=-1),
    "num_splits_many": refused(ValueError, "num_splits", "257", num_splits=257),
    "num_splits_type": refused(TypeError, "num_splits", "True", num_splits=True),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_refusal_names_argument_and_value(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as caught:
        check(LAYOUTS[refusal.layout]() | refusal.change)
    for words in refusal.said:
        assert words in str(caught.value)
