"""Mask callables quoted from the post that introduced FlexAttention in flash-attn-4.

Work of Tri Dao, Driss Guessous and others, with only the package's name changed.
"""

import cutlass
import cutlass.cute as cute

import flash_mask_cute.utils as utils


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
