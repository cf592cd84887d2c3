"""The kernel class without the host path: compile it once, call it with tensors of your own.

    python examples/07_native_api.py

Block lists come from the kernel of `compute_blocksparse_tensors`, attention from
`FlashAttentionForwardSm90`, compiled by `cute.compile`: what the appendix of the post that
introduced FlexAttention in flash-attn-4 does. This is for those who bring their own cache and their
own checks: nothing is validated here, and the tiles of the lists are those of the kernel.
Where there is no Hopper GPU, the kernel runs on the software GPU, and the lists are made on the
CPU. Ends with an error if the result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_device import DEVICE, IS_SOFTWARE, current_stream, in_kernel_memory, print_device

# isort: split
import cutlass
import cutlass.cute as cute
import torch
from dense_check import check
from torch import Tensor

from flash_mask_cute.block_sparsity import BlockSparseTensors
from flash_mask_cute.compute_block_sparsity import compute_blocksparse_tensors
from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90

TILE_M, TILE_N = 128, 128
WINDOW = 200


@cute.jit
def window_by_document(
    b_idx: cute.TensorSSA,
    h_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: list[cute.Tensor],
) -> cute.TensorSSA:
    """aux_tensors[0]: int32 (batch, seqlen), the document of each token."""
    documents = aux_tensors[0]
    is_same = documents[b_idx[0], q_idx[0]] == documents[b_idx[0], kv_idx[0]]
    return (abs(q_idx - kv_idx) <= WINDOW) & is_same


@cute.jit
def distance_penalty(
    score: cute.TensorSSA,
    b_idx: cute.TensorSSA,
    h_idx: cute.TensorSSA,
    q_idx: cute.TensorSSA,
    kv_idx: cute.TensorSSA,
    aux_tensors: list[cute.Tensor],
) -> cute.TensorSSA:
    return score - abs(q_idx - kv_idx).to(cutlass.Float32) * (1.0 / 64)


def to_cute(tensor: Tensor, alignment: int = 4) -> cute.Tensor:
    """A view whose extents and strides are run-time values, but for the last stride, which is 1."""
    from cutlass.cute.runtime import from_dlpack

    wrapped = from_dlpack(in_kernel_memory(tensor), assumed_align=alignment)
    return wrapped.mark_layout_dynamic(leading_dim=tensor.dim() - 1)


def arguments(
    qkvo: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    lists: BlockSparseTensors,
    aux_tensors: list[cute.Tensor],
) -> tuple[Any, ...]:
    """What the kernel is compiled for and called with, in its order."""
    return (
        *(to_cute(x, alignment=16) for x in qkvo),
        to_cute(lse),
        qkvo[0].shape[-1] ** -0.5,
        current_stream(),
        None,  # cu_seqlens_q
        None,  # cu_seqlens_k
        None,  # seqused_q
        None,  # seqused_k
        None,  # page_table
        None,  # window_size_left
        None,  # window_size_right
        None,  # learnable_sink
        lists,
        aux_tensors,
    )


class DocumentAttention:
    """Attention of bf16 heads of d columns, compiled in its first call for the later ones, too."""

    def __init__(self, d: int) -> None:
        self.kernel = FlashAttentionForwardSm90(
            cutlass.BFloat16,
            d,
            d,
            1,  # query heads per KV head
            is_causal=False,
            is_local=False,
            pack_gqa=False,
            tile_m=TILE_M,
            tile_n=TILE_N,
            num_stages=2,
            num_threads=384,
            # elsewhere these are for tuning; this kernel has one way each, and refuses the other
            Q_in_regs=False,
            intra_wg_overlap=True,
            mma_pv_is_rs=True,
            mask_mod=window_by_document,
            score_mod=distance_penalty,
            has_aux_tensors=True,
        )
        self.compiled: Callable[..., Any] | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """out, lse, and how many blocks are visited through the mask."""
        batch, seqlen, heads, _ = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(batch, heads, seqlen, dtype=torch.float32, device=q.device)
        # the same lists twice: for the kernel, and as the torch tensors that own their memory
        lists, torch_lists = compute_blocksparse_tensors(
            TILE_M, TILE_N, batch, heads, seqlen, seqlen, window_by_document, [documents], q.device
        )
        if IS_SOFTWARE:
            lists = BlockSparseTensors(*(to_cute(x) for x in torch_lists if x is not None))
        given = arguments((q, k, v, out), lse, lists, [to_cute(documents)])
        self.compiled = self.compiled or cute.compile(self.kernel, *given)
        self.compiled(*given)
        return out, lse, int(torch_lists[0].sum())


def main() -> None:
    print_device()
    torch.manual_seed(0)
    d = 128
    attention = DocumentAttention(d)
    # other sizes and other contents: the same compiled kernel
    on_gpu, on_software = ((2, 1024, 8), (1, 2500, 8)), ((2, 255, 1), (1, 450, 2))
    for batch, seqlen, heads in on_software if IS_SOFTWARE else on_gpu:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        q, k, v = (torch.randn(batch, seqlen, heads, d, **options) for _ in range(3))
        # documents of 300 tokens on average
        starts = torch.rand(batch, seqlen, device=DEVICE) < 1 / 300
        documents = starts.cumsum(dim=1, dtype=torch.int32)
        out, _, num_blocks = attention(q, k, v, documents)
        row = torch.arange(seqlen, device=DEVICE)
        distance = (row - row[:, None]).abs()
        is_same = documents[:, None, :, None] == documents[:, None, None, :]
        visible = is_same & (distance <= WINDOW)
        print(f"q, k, v {tuple(q.shape)}, bfloat16, documents within a window of {WINDOW}")
        print(f"{num_blocks} blocks visited through the mask")
        check("07_native_api", None, out, q, k, v, visible, bias=distance / -64)


if __name__ == "__main__":
    main()
