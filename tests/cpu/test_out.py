"""out=, memory of the caller for the result of the public calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mask_cute import (
    ColumnMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

Call = Callable[..., Any]


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**more: Any) -> Any:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    return flash_attn_func(q, k, v, causal=True, **more)


def packed(**more: Any) -> Any:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 24, 4, 16)
    starts = lengths(0, 5, 24)
    return flash_attn_varlen_func(q, k, v, starts, starts, 19, 19, window_size=(6, 1), **more)


def cached(**more: Any) -> Any:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 16)
    cache = torch.randn(2, 2, 40, 4, 16)
    return flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths(9, 30), **more)


CALLS: list[tuple[Call, tuple[int, ...]]] = [
    (dense, (2, 12, 4, 16)), (packed, (24, 4, 16)), (cached, (2, 3, 4, 16)),
]  # fmt: skip
of_each_call = pytest.mark.parametrize(("call", "shape"), CALLS, ids=["dense", "packed", "cached"])


@of_each_call
def test_the_result_is_in_it(call: Call, shape: tuple[int, ...]) -> None:
    expected, expected_lse = call(return_lse=True)
    room = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan)
    for out in (torch.full(shape, torch.nan), room[..., 8:24]):
        version = out._version
        found = call(out=out)
        assert found is out and torch.equal(out, expected) and out._version > version
    assert room[..., :8].isnan().all() and room[..., 24:].isnan().all()
    out = torch.full(shape, torch.nan)
    found, lse = call(out=out, return_lse=True)
    assert found is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("call", [dense, packed])
def test_beside_the_largest_scores(call: Call) -> None:
    expected, largest = call(return_max_logit=True)
    out = torch.empty_like(expected)
    found, again = call(return_max_logit=True, out=out)
    assert found is out and torch.equal(out, expected) and torch.equal(again, largest)


@of_each_call
def test_refusals(call: Call, shape: tuple[int, ...]) -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.empty(*shape[:-1], 8), ValueError, r"out must have the shape of q.*got .* 8\)"),
        (torch.empty(shape).double(), TypeError, r"out must have the dtype of q.*float64"),
        (torch.empty(shape, device="meta"), ValueError, "out.*meta"),
        (torch.empty(*shape, 2)[..., 0], ValueError, "out must be contiguous in its last"),
        (torch.empty(1, *shape[1:]).expand(shape), ValueError, "out"),
        ([0.0], TypeError, "out must be a torch.Tensor"),
        (torch.empty(shape, requires_grad=True), ValueError, "out must be None where gradients"),
    ]
    for out, error, text in refused:
        with pytest.raises(error, match=text):
            call(out=out)


def test_nothing_is_written_before_a_refusal() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 16)
    cache = torch.randn(2, 2, 40, 4, 16)
    before = cache.clone()
    for out in (torch.empty(2, 3, 4, 8), cache[0, :, :3], k):
        with pytest.raises(ValueError, match="^out"):
            flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths(9, 30), out=out)
        assert torch.equal(cache, before)


def test_overlap_with_any_input_is_refused() -> None:
    """Of a second call with the same metadata, too, which finds what the first one made."""
    q, k, v = torch.randn(3, 2, 16, 2, 16)
    starts = torch.arange(0, 33, 16, dtype=torch.int32)
    sink, vectors = torch.zeros(2), torch.full((1, 1, 32, 1), 16, dtype=torch.int32)
    mask = ColumnMask(vectors, True)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    given: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 16}
    given |= {"max_seqlen_k": 16, "learnable_sink": sink, "startend_row_indices": mask}
    room = torch.zeros(4096)
    flash_attn_varlen_func(*flat, **given, out=torch.empty(32, 2, 16))
    inside = {
        "learnable_sink": room[40:42],
        "cu_seqlens_q": room[64:67].view(torch.int32).copy_(starts),
        "startend_row_indices": ColumnMask(room[100:132].view(torch.int32).view(1, 1, 32, 1), True),
    }
    for name, shared in inside.items():
        more = given | {name: shared}
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^out must not share memory with {name}"):
                flash_attn_varlen_func(*flat, **more, out=room[:1024].view(32, 2, 16))
        flash_attn_varlen_func(*flat, **more, out=room[2048:3072].view(32, 2, 16))
    for name, x in zip("qkv", flat, strict=True):
        with pytest.raises(ValueError, match=f"^out must not share memory with {name}"):
            flash_attn_varlen_func(*flat, **given, out=x)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "learnable_sink"])
def test_gradients_are_refused(wanted: str) -> None:
    given = dict(zip("qkv", torch.randn(3, 2, 8, 2, 16), strict=True))
    given["learnable_sink"] = torch.zeros(2)
    given[wanted].requires_grad_()
    for call in (flash_attn_func, flash_attn_varlen_func):
        with pytest.raises(ValueError, match="^out must be None where gradients are recorded"):
            call(**given, out=torch.empty(2, 8, 2, 16))
        with torch.no_grad():
            call(**given, out=torch.empty(2, 8, 2, 16))


def test_under_autocast_it_has_the_dtype_of_the_result() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = dense()
        out = torch.empty(2, 12, 4, 16, dtype=torch.bfloat16)
        assert torch.equal(dense(out=out), expected)
        # float32 is the result before it is rounded
        wide = torch.empty(2, 12, 4, 16)
        assert torch.equal(dense(out=wide).bfloat16(), expected)
        with pytest.raises(TypeError, match="out must have the dtype of q.*bfloat16.* or float32"):
            dense(out=torch.empty(2, 12, 4, 16, dtype=torch.float16))


# -- by operators ------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    before = out * 2  # of what it held
    result = flash_attn_func(q, k, v, causal=True, out=out)
    return result + before


def append(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, used: Tensor, out: Tensor) -> Tensor:
    before = out * 2
    found = flash_attn_with_kvcache(
        q, cache[0], cache[1], k, v, cache_seqlens=used, causal=True, out=out
    )
    return found + before


@pytest.mark.shares(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_call_writes_it(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    expected = flash_attn_func(q, k, v, causal=True)
    out = torch.ones(2, 12, 4, 16)
    found = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v, out)
    assert torch.allclose(out, expected) and torch.allclose(found, expected + 2)


@pytest.mark.shares(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_append_writes_it(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 16)
    cache, used = torch.randn(2, 2, 40, 4, 16), lengths(9, 30)
    out, again = torch.ones(2, 2, 3, 4, 16)
    eager_cache = cache.clone()
    expected = append(q, k, v, eager_cache, used, again)
    found = torch.compile(append, fullgraph=True, backend=backend)(q, k, v, cache, used, out)
    assert torch.allclose(out, again) and torch.allclose(found, expected)
    assert torch.equal(cache, eager_cache)


def test_a_compiled_call_refuses_gradients() -> None:
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="out must be None where gradients"):
        compiled(q.requires_grad_(), k, v, torch.ones(2, 12, 4, 16))


def test_a_compiled_call_refuses_what_an_eager_one_refuses() -> None:
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with pytest.raises(TypeError, match="out must have the dtype of q"):
        compiled(q, k, v, torch.ones(2, 12, 4, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match="out must not share memory with q"):
        compiled(q, k, v, q)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_mode_sees_what_is_written() -> None:
    expected = dense()
    out = torch.empty(2, 12, 4, 16)
    with Seen() as seen:
        assert dense(out=out) is out
    assert "flash_mask_cute.attention_fwd_into.default" in seen.names
    assert torch.equal(out, expected)
    schema = torch.ops.flash_mask_cute.attention_fwd_into.default._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["out"]
    schema = torch.ops.flash_mask_cute.append_and_attend.default._schema
    written = [x.name for x in schema.arguments if x.is_write]
    assert written == ["k_cache", "v_cache", "k_scales", "v_scales", "out_given"]


def test_an_exported_call_writes_it() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            return attend(q, k, v, out)

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 4, 16)
    program = torch.export.export(Layer(), (q, k, v, torch.ones(2, 12, 4, 16)))
    out = torch.ones(2, 12, 4, 16)
    found = program.module()(q, k, v, out)
    expected = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, expected) and torch.equal(found, expected + 2)
