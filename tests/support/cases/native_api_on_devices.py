"""The kernel class used with `cute.compile` directly, without the host path, on every device."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from devices import Device
from eager import assert_close_to_oracle

CASE = Case(
    "native", batch=2, seqlen_q=255, seqlen_k=300, heads_q=4, heads_kv=2, head_dim=128, causal=True
)


@pytest.mark.daily(1)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic-layouts", "static-layouts"])
def test_compile_and_call_with_cute_tensors(device: Device, dynamic: bool) -> None:
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90

    def to_cute(tensor: torch.Tensor, alignment: int) -> cute.Tensor:
        wrapped = from_dlpack(device.in_kernel_memory(tensor), assumed_align=alignment)
        if dynamic:
            wrapped = wrapped.mark_layout_dynamic(leading_dim=tensor.dim() - 1)
        return wrapped

    inputs = device.inputs(CASE)
    out = torch.full_like(inputs.q, float("nan"))
    lse = torch.full((2, 4, 255), float("nan"), device=device.where)
    tensors = [to_cute(x, 16) for x in (inputs.q, inputs.k, inputs.v, out)] + [to_cute(lse, 4)]
    kernel = FlashAttentionForwardSm90(
        cutlass.BFloat16,
        128,
        128,
        2,
        is_causal=True,
        is_local=False,
        pack_gqa=False,
        tile_m=128,
        tile_n=128,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,
        mma_pv_is_rs=True,
        mask_mod=None,
        score_mod=None,
        has_aux_tensors=False,
    )
    arguments = (*tensors, 128**-0.5, cuda.CUstream(0), *[None] * 10)
    compiled = cute.compile(kernel, *arguments)
    compiled(*arguments)
    assert_close_to_oracle(out, lse, inputs)


@pytest.mark.parametrize(
    "option",
    [{"Q_in_regs": True}, {"intra_wg_overlap": False}, {"mma_pv_is_rs": False}],
    ids=lambda option: next(iter(option)),
)
def test_options_that_this_kernel_lacks_are_refused(option: dict[str, bool]) -> None:
    import cutlass

    from flash_mask_cute.flash_fwd import FlashAttentionForwardSm90

    with pytest.raises(NotImplementedError, match=next(iter(option))):
        FlashAttentionForwardSm90(cutlass.BFloat16, 128, **option)
