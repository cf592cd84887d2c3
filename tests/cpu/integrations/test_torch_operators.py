"""Torch's operators of flash attention on this package: values, layouts, and what calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import band, dense_attention, packed_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_mask_cute.integrations import aten_flash
from flash_mask_cute.integrations.torch import kernels_run

varlen = pytest.importorskip("torch.nn.attention.varlen")
pytestmark = pytest.mark.usefixtures("activated_on_cpu")
aten = torch.ops.aten
HAS_PAGES = hasattr(aten, "_flash_attention_forward_no_dropout_inplace")
needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="varlen_attn of this torch has no pages")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=4e-6, rtol=4e-6)


def gradients_close(
    actual: Tensor, expected: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(actual.sin().sum(), tensors)
    wanted = torch.autograd.grad(expected.sin().sum(), tensors)
    for x, y in zip(found, wanted, strict=True):
        close(x, y)
    return found


# -- F.scaled_dot_product_attention -------------------------------------------------------------


def contiguous(*shape: int) -> Tensor:
    return torch.randn(shape)


def transposed(batch: int, heads: int, seqlen: int, head_dim: int) -> Tensor:
    """Contiguous as (batch, seqlen, heads, head_dim), as projections give it."""
    return torch.randn(batch, seqlen, heads, head_dim).transpose(1, 2)


def sliced(batch: int, heads: int, seqlen: int, head_dim: int) -> Tensor:
    """A third of a projection to q, k and v."""
    return torch.randn(batch, seqlen, 3, heads, head_dim)[:, :, 1].transpose(1, 2)


def expanded(batch: int, heads: int, seqlen: int, head_dim: int) -> Tensor:
    """One head for all."""
    return torch.randn(batch, 1, seqlen, head_dim).expand(-1, heads, -1, -1)


LAYOUTS = contiguous, transposed, sliced, expanded


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (20, 33), (33, 20)], ids=str)
def test_the_operators_of_sdpa(
    layout: Callable[..., Tensor], causal: bool, lengths: tuple[int, int]
) -> None:
    """is_causal is bottom-right as in torch's kernel; strides are the meta functions'."""
    q, k, v = (layout(2, n, s, 16) for n, s in ((4, lengths[0]), (2, lengths[1]), (2, lengths[1])))
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    assert leaves[0].stride() == q.stride()
    with kernels_run() as ran:
        results = aten._scaled_dot_product_flash_attention(*leaves, is_causal=causal, scale=0.3)
        visible = band(*lengths, right=0) if causal else None
        expected = dense_attention(*leaves, visible, scale=0.3)
        close(results[0], expected.out)
        close(results[1], expected.lse)
        gradients = gradients_close(results[0], expected.out, leaves)
    operators = [x.operator for x in ran if x.kernel == "flash_mask_cute"]
    forward = "_scaled_dot_product_flash_attention"
    assert operators == [forward, f"{forward}_backward"]
    on_meta = tuple(x.detach().to("meta") for x in leaves)
    promised = aten._scaled_dot_product_flash_attention(*on_meta, is_causal=causal)
    for result, promise in zip(results, promised, strict=True):
        if isinstance(promise, Tensor):
            assert result.dtype == promise.dtype and result.shape == promise.shape
            assert result.stride() == promise.stride()
        else:
            assert result == promise
    for gradient, leaf in zip(gradients, on_meta, strict=True):
        assert gradient.stride() == torch.empty_like(leaf).stride()


@pytest.fixture
def cpu_twin() -> Iterator[None]:
    """`F.scaled_dot_product_attention` of CPU tensors, as it is for CUDA tensors."""

    def forward(
        query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert attn_mask is None
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[:2]

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, logsumexp, None, None, query.shape[2], key.shape[2],
            dropout_p, is_causal, None, None, scale=scale,
        )  # fmt: skip

    library = torch.library.Library("aten", "IMPL", "CPU")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    library.impl(name, forward)
    library.impl(f"{name}_backward", backward)
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.usefixtures("cpu_twin")
@pytest.mark.parametrize(
    ("heads_kv", "options"),
    [
        (4, {}),
        (4, {"is_causal": True}),
        (2, {"is_causal": True, "enable_gqa": True}),
        (1, {"scale": 0.7, "enable_gqa": True}),
    ],
)
def test_sdpa_from_end_to_end(heads_kv: int, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, n, 40, 16, requires_grad=True) for n in (4, heads_kv, heads_kv))
    with kernels_run() as ran:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        visible = band(40, 40, right=0) if "is_causal" in options else None
        expected = dense_attention(q, k, v, visible, scale=options.get("scale")).out
        close(out, expected)
        gradients_close(out, expected, (q, k, v))
    assert [x.kernel for x in ran] == ["flash_mask_cute"] * 2


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.usefixtures("cpu_twin", "fresh_dynamo")
def test_sdpa_compiled() -> None:
    q, k, v = (transposed(2, 2, 24, 8).requires_grad_() for _ in range(3))

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(2, 24, 16)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with kernels_run() as ran:
        out = compiled(q, k, v)
        expected = dense_attention(q * 2, k, v, band(24, 24, right=0)).out
        expected = expected.transpose(1, 2).reshape(2, 24, 16)
        close(out, expected)
        gradients_close(out, expected, (q, k, v))
    assert [x.kernel for x in ran] == ["flash_mask_cute"] * 2


def test_lower_right_bias_means_what_the_operator_means() -> None:
    """torch gives this bias to the operator as is_causal, where the operator takes the call."""
    q, k, v = torch.randn(1, 2, 9, 8), *torch.randn(2, 1, 2, 14, 8)
    out = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    bias = causal_lower_right(9, 14)._materialize()
    close(out, dense_attention(q, k, v, bias).out)


def test_rows_that_see_nothing() -> None:
    q, k, v = torch.randn(1, 2, 9, 8), *torch.randn(2, 1, 2, 4, 8)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    assert not out[:, :, :5].any() and (lse[:, :, :5] == -torch.inf).all()


@pytest.mark.parametrize("is_asked", [False, True])
def test_deterministic_gradients_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    asked = []
    backward = aten_flash._flash_attn_bwd

    def record(*args: Any, **keywords: Any) -> Any:
        asked.append(keywords["deterministic"])
        return backward(*args, **keywords)

    monkeypatch.setattr(aten_flash, "_flash_attn_bwd", record)
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = aten._scaled_dot_product_flash_attention(q, q, q)[0]
    torch.use_deterministic_algorithms(is_asked)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [is_asked]


# -- varlen_attn --------------------------------------------------------------------------------

ENDS_Q, ENDS_K = [0, 30, 31, 75], [0, 30, 50, 100]
WINDOWS = (-1, -1), (-1, 0), (7, 0), (5, 3), (0, -1)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(total: int, heads: int, layout: str = "contiguous") -> Tensor:
    if layout == "heads first":
        return torch.randn(heads, total, 16).transpose(0, 1).requires_grad_()
    return torch.randn(total, heads, 16, requires_grad=True)


def gqa() -> dict[str, bool]:
    return {"enable_gqa": True} if HAS_PAGES else {}


@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_varlen_attn(window: tuple[int, int], layout: str) -> None:
    heads_kv = 2 if HAS_PAGES else 4
    q = packed(ENDS_Q[-1], 4, layout)
    k, v = packed(ENDS_K[-1], heads_kv, layout), packed(ENDS_K[-1], heads_kv, layout)
    out, lse = varlen.varlen_attn(
        q, k, v, int32(ENDS_Q), int32(ENDS_K), 44, 50, window_size=window, scale=0.2,
        return_aux=varlen.AuxRequest(lse=True), **gqa(),
    )  # fmt: skip
    expected = packed_attention(q, k, v, ENDS_Q, ENDS_K, window, 0.2)
    close(out, expected.out)
    close(lse, expected.lse)
    assert out.stride() == torch.empty_like(q).stride()
    gradients = gradients_close(out, expected.out, (q, k, v))
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.stride() == torch.empty_like(x).stride()


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
def test_rows_behind_the_last_sequence_have_no_gradient(layout: str) -> None:
    q, k, v = (packed(40, 2, layout) for _ in range(3))
    ends = int32([0, 10, 33])
    out = varlen.varlen_attn(q, k, v, ends, ends, 23, 23, window_size=(-1, 0))
    out[:33].sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad[:33].any() and not x.grad[33:].any()


@needs_pages
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_varlen_attn_over_pages(window: tuple[int, int]) -> None:
    """cu_seq_k beside pages means nothing: seqused_k has the lengths."""
    pool_k, pool_v = torch.randn(2, 16, 16, 2, 16)
    table, used = torch.randperm(16).view(2, 8).int(), [37, 90]
    q, ends_q, ends_k = packed(5, 4).detach(), [0, 1, 5], [0, 37, 127]
    keys, values = (
        torch.cat([x[table[i].long()].flatten(0, 1)[:n] for i, n in enumerate(used)])
        for x in (pool_k, pool_v)
    )
    expected = packed_attention(q, keys, values, ends_q, ends_k, window)
    for cu_seq_k in (None, int32([0, 128, 256])):
        out = varlen.varlen_attn(
            q, pool_k, pool_v, int32(ends_q), cu_seq_k, 4, 128, window_size=window,
            seqused_k=int32(used), block_table=table, **gqa(),
        )  # fmt: skip
        close(out, expected.out)


@needs_pages
def test_varlen_attn_with_used_keys_and_splits() -> None:
    q, k, v = packed(3, 4).detach(), *torch.randn(2, 100, 4, 16)
    ends_q, used = [0, 1, 3], [20, 45]
    rows = torch.cat([torch.arange(20), torch.arange(50, 95)])
    expected = packed_attention(q, k[rows], v[rows], ends_q, [0, 20, 65], (-1, 0))
    for num_splits in (None, 1, 3):
        out = varlen.varlen_attn(
            q, k, v, int32(ends_q), int32([0, 50, 100]), 2, 50, window_size=(-1, 0),
            seqused_k=int32(used), num_splits=num_splits,
        )  # fmt: skip
        close(out, expected.out)


@needs_pages
@pytest.mark.parametrize("strides", [(64, 16, 1), (200, 32, 2), (16, 1200, 1)], ids=str)
def test_varlen_attn_out(strides: tuple[int, ...]) -> None:
    q, k, v = (packed(75, 4).detach() for _ in range(3))
    memory = torch.full((75 * 300,), 7.0)
    out = memory.as_strided((75, 4, 16), strides)
    result, lse = varlen.varlen_attn_out(
        out, q, k, v, int32(ENDS_Q), int32(ENDS_Q), 44, 44, window_size=(9, 0),
        return_aux=varlen.AuxRequest(lse=True),
    )  # fmt: skip
    expected = packed_attention(q, k, v, ENDS_Q, ENDS_Q, (9, 0))
    assert result is out
    close(out, expected.out)
    close(lse, expected.lse)
    assert int((memory != 7.0).sum()) == q.numel()


@pytest.mark.usefixtures("fresh_dynamo")
def test_varlen_attn_compiled() -> None:
    q, k, v = (packed(75, 4, "heads first") for _ in range(3))

    def block(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return varlen.varlen_attn(q * 2, k, v, ends, ends, 44, 44, window_size=(-1, 0)) + 1

    out = torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v, int32(ENDS_Q))
    expected = packed_attention(q * 2, k, v, ENDS_Q, ENDS_Q, (-1, 0)).out + 1
    close(out, expected)
    gradients_close(out, expected, (q, k, v))
