"""Torch's own attention functions on this package's kernels, on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import band, dense_attention, packed_attention
from public_call import capture
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flash_mask_cute.integrations.torch import kernels_run, register, sdpa

varlen = pytest.importorskip("torch.nn.attention.varlen")
pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="torch has no registry"
)
# of torch from 2.12 on; before, `varlen_attn` has no keyword for heads that share keys
HAS_PAGES = hasattr(varlen, "varlen_attn_out")
FORWARD = "_scaled_dot_product_flash_attention"
ENDS = [0, 130, 131, 500]


@pytest.fixture
def activated() -> Iterator[None]:
    register()
    attention.activate_flash_attention_impl("mask_cute")
    yield
    attention.restore_flash_attention_impl()


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), atol=2e-2, rtol=2e-2)


def gradients_close(out: Tensor, expected: Tensor, tensors: tuple[Tensor, ...]) -> None:
    found = torch.autograd.grad(out.float().sin().sum(), tensors)
    wanted = torch.autograd.grad(expected.sin().sum(), tensors)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=4e-2, rtol=4e-2)


def visible(*lengths: int, **options: Any) -> Tensor:
    return band(*lengths, **options).cuda()


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_sdpa(is_compiled: bool, heads_kv: int, head_dim: int) -> None:
    """The layout of queries is that of torch's promise to compiled code, forward and backward."""
    q, k, v = (
        on_gpu(2, 300, n, head_dim).transpose(1, 2).detach().requires_grad_()
        for n in (4, heads_kv, heads_kv)
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    function = torch.compile(call, fullgraph=True) if is_compiled else call
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), kernels_run() as ran:
        out = function(q, k, v)
        expected = dense_attention(q, k, v, visible(300, 300, right=0)).out
        close(out, expected)
        gradients_close(out, expected, (q, k, v))
    assert [x.kernel for x in ran] == ["flash_mask_cute"] * 2
    # of a head_dim that torch pads, the output is a part of a larger one
    assert head_dim % 8 or out.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("activated")
def test_dropout_goes_to_torchs_kernel_in_both_directions() -> None:
    q, k, v = (on_gpu(1, 2, 256, 64) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), kernels_run() as ran, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        out.sum().backward()
    # torch's kernels call operators of their own, which are handed on, too
    operators = [x.operator for x in ran if x.operator.startswith(FORWARD)]
    assert operators == [FORWARD, f"{FORWARD}_backward"]
    assert {x.kernel for x in ran} == {"torch"}
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (60, 0)], ids=str)
def test_varlen_attn(window: tuple[int, int]) -> None:
    """With another number of heads, which a kernel of cuDNN does not take from the call."""
    keywords = {"window_size": window} | ({"enable_gqa": True} if HAS_PAGES else {})
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    q, k, v = (on_gpu(500, n, 64) for n in (4, 2, 2))
    with kernels_run() as ran:
        out = varlen.varlen_attn(q, k, v, ends, ends, 369, 369, **keywords)
        expected = packed_attention(q.cpu(), k.cpu(), v.cpu(), ENDS, ENDS, window).out
        close(out, expected)
        gradients_close(out, expected, (q, k, v))
    assert [x.kernel for x in ran] == ["flash_mask_cute"] * 2


@pytest.mark.skipif(not HAS_PAGES, reason="torch has no varlen_attn_out")
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("offset", [0, 1])
def test_varlen_attn_out_over_pages(offset: int) -> None:
    """offset: of out from an address that kernels write to."""
    used, table = [37, 90], torch.randperm(16).view(2, 8).int().cuda()
    pool_k, pool_v = torch.randn(2, 16, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = on_gpu(2, 4, 64).detach()
    out = torch.zeros(2 * 4 * 64 + 8, device="cuda", dtype=torch.bfloat16)
    out = out[offset : offset + q.numel()].view_as(q)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    seqused = torch.tensor(used, dtype=torch.int32, device="cuda")
    varlen.varlen_attn_out(
        out, q, pool_k, pool_v, cu, None, 1, 128, window_size=(-1, 0), enable_gqa=True,
        seqused_k=seqused, block_table=table,
    )  # fmt: skip
    keys, values = (
        torch.cat([x[table[i].long()].flatten(0, 1)[:n] for i, n in enumerate(used)]).cpu()
        for x in (pool_k, pool_v)
    )
    close(out, packed_attention(q.cpu(), keys, values, [0, 1, 2], [0, 37, 127]).out)


@pytest.mark.usefixtures("activated")
def test_a_training_step_in_a_graph() -> None:
    q, k, v = (on_gpu(1, 2, 256, 64) for _ in range(3))

    def step() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v))

    graph, results = capture(step, torch.cuda.Stream())
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    expected = step()
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("activated")
def test_deterministic_gradients() -> None:
    q, k, v = (on_gpu(1, 2, 1000, 64) for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v)
        runs = [torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0], x) for x in runs)


def test_the_context_with_masks() -> None:
    q, k, v = (on_gpu(2, n, 300, 64) for n in (4, 4, 4))
    shown = torch.rand(2, 1, 1, 300, device="cuda") > 0.3
    added = torch.randn(4, 300, 300, device="cuda", requires_grad=True)
    for options in ({"attn_mask": shown}, {"attn_mask": added}, {"is_causal": True}):
        with sdpa(), kernels_run() as ran:
            out = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        assert [x.kernel for x in ran] == ["flash_mask_cute"]
        mask = options.get("attn_mask")
        hides = shown if mask is shown else None
        if mask is None:
            hides = visible(300, 300, right=0)
        expected = dense_attention(q, k, v, hides, added if mask is added else None).out
        close(out, expected)
        gradients_close(out, expected, (q, k, v, *([added] if mask is added else [])))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_sdpa_computes_checkpoints_again_in_the_thread_of_the_backward(use_reentrant: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gradients(call: Any, *tensors: Tensor) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in tensors]
        call(*given).float().square().sum().backward()
        return [x.grad.double() for x in given if x.grad is not None]

    tensors = torch.randn(3, 2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    wanted = gradients(attend, *tensors.double())
    with sdpa(), kernels_run() as ran:
        found = gradients(
            lambda *given: checkpoint(attend, *given, use_reentrant=use_reentrant), *tensors
        )
    assert [x.kernel for x in ran] == ["flash_mask_cute"] * 2
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2**-6 * float(y.abs().max()), rtol=0)
