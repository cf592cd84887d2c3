# ruff: noqa: UP045
"""Callables quoted from the post that introduced FlexAttention in flash-attn-4.

Work of Tri Dao, Driss Guessous and others, with only the package's name changed. ALiBi and the
sliding window, which the post has in pseudo code and as an expression only, are written out.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import math as mlir_math

import flash_mask_cute.utils as utils


@cute.jit
def rel_bias_score_mod_cute(
    tSrS_ssa: cute.TensorSSA,
    batch_idx: cute.TensorSSA,
    head_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: Optional[list],
) -> cute.TensorSSA:
    bias_tensor = aux_tensors[0]
    rel_pos = cute.TensorSSA(mlir_math.absi(q_idx - kv_idx), q_idx.shape, q_idx.dtype)
    bias = bias_tensor[batch_idx[0], head_idx[0], rel_pos[0]].to(cutlass.Float32)
    return tSrS_ssa + bias


@cute.jit
def alibi_score_mod(score, batch_idx, head_idx, q_idx, kv_idx, aux_tensors):
    slope = cute.math.exp2((-(head_idx + 1)).to(cutlass.Float32))
    dist = cute.math.abs(q_idx - kv_idx)
    return score - slope * dist


def create_causal_mask_with_offset(offset: int):
    @cute.jit
    def _causal_mask_mod(batch_idx, head_idx, q_idx, kv_idx, aux_tensors):
        offset_ssa = utils.scalar_to_ssa(val=offset, dtype=cutlass.Int32)
        return kv_idx <= q_idx + offset_ssa

    return _causal_mask_mod


@cute.jit
def document_mask_mod_of_heads(batch_idx, head_idx, q_idx, kv_idx, aux_tensors):
    doc_ids = aux_tensors[0]
    doc_id_q = doc_ids[batch_idx[0], head_idx[0], q_idx[0]]
    doc_id_kv = doc_ids[batch_idx[0], head_idx[0], kv_idx[0]]
    q_doc = utils.scalar_to_ssa(doc_id_q, cutlass.Int32)
    kv_doc = utils.scalar_to_ssa(doc_id_kv, cutlass.Int32)
    return q_doc == kv_doc


@cute.jit
def sliding_window_mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return abs(q_idx - kv_idx) <= 30


@cute.jit
def doc_rel_bias_score_mod(tSrS_ssa, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    rel_bias = aux_tensors[0]
    distance = cute.TensorSSA(mlir_math.absi(q_idx - kv_idx), q_idx.shape, q_idx.dtype)
    bias = rel_bias[b_idx[0], h_idx[0], distance[0]].to(cutlass.Float32)
    return tSrS_ssa + bias


@cute.jit
def document_mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    doc_ids = aux_tensors[1]  # Second aux tensor
    q_doc = doc_ids[b_idx[0], h_idx[0], q_idx[0]]
    kv_doc = doc_ids[b_idx[0], h_idx[0], kv_idx[0]]
    q_doc_ssa = utils.scalar_to_ssa(q_doc, cutlass.Int32)
    kv_doc_ssa = utils.scalar_to_ssa(kv_doc, cutlass.Int32)
    return q_doc_ssa == kv_doc_ssa


def create_prefix_lm_mask(prefix: int, offset: int):
    @cute.jit
    def _prefix_lm_mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
        prefix_ssa = utils.scalar_to_ssa(prefix, cutlass.Int32)
        offset_ssa = utils.scalar_to_ssa(offset, cutlass.Int32)
        # Allow bidirectional attention in prefix OR causal after
        in_prefix = kv_idx < prefix_ssa
        causal = kv_idx <= q_idx + offset_ssa
        return in_prefix | causal

    return _prefix_lm_mask_mod


@cute.jit
def head_bias_score_mod(tSrS_ssa, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    head_bias = aux_tensors[0]
    bias_val = head_bias[h_idx[0]].to(cutlass.Float32)
    return tSrS_ssa + bias_val


@cute.jit
def my_score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    scale = utils.scalar_to_ssa(1.1, cutlass.Float32)
    return score * scale  # Example: scale scores


@cute.jit
def my_mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors):
    return kv_idx <= q_idx  # Example: causal w/o offset
