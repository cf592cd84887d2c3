"""What the backward refuses is refused in its forward, if a gradient is recorded."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cutlass
import pytest
import torch
from cases import int32
from launch_recorder import Recorder
from torch import Tensor
from ways import AnyMode

from flash_mask_cute import flash_attn_func, flash_attn_varlen_func, interface

SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
FP8 = torch.float8_e4m3fn


def qkv(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    return dict(zip("qkv", tensors, strict=True))


def learned() -> Callable[..., Tensor]:
    table = torch.randn(16, 16, requires_grad=True)
    return lambda s, b, h, q, k: s + table[q, k]


def of_bits(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return s + s[0].bitcast(cutlass.Int32).to(cutlass.Float32)


PACKED = (8, 2, 16), (1, 8, 1, 16), (1, 8, 1, 16)
DENSE = ((2, 8, 2, 16),) * 3
POOL = (2, 2, 2, 16), (6, 4, 2, 16), (6, 4, 2, 16)
CU = {"cu_seqlens_q": int32(0, 3, 8)}
PAGES = {"page_table": int32(0, 1, 2, 3).view(2, 2), "seqused_k": int32(5, 3)}


def training_pages(dtype: torch.dtype) -> dict[str, Any]:
    """q with a gradient, over a pool."""
    found = qkv(*POOL, dtype=torch.bfloat16) | PAGES
    for name in "kv":
        found[name] = found[name].to(dtype)
    found["q"].requires_grad_()
    return found


def training(shapes: tuple[tuple[int, ...], ...], **more: Any) -> dict[str, Any]:
    found = qkv(*shapes)
    for x in found.values():
        x.requires_grad_()
    return found | more


# function, arguments, and what the refusal says
LIMITS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], str]] = {
    "deterministic, common keys, a learned table": (
        flash_attn_varlen_func,
        lambda: qkv(*PACKED) | CU | {"score_mod": learned(), "deterministic": True},
        r"aux_tensors\[0\] requires grad.*one batch entry .*deterministic=True",
    ),
    "seqused_k beside common keys": (
        flash_attn_varlen_func,
        lambda: training(PACKED, **CU, seqused_k=int32(4, 5)),
        "seqused_k .*one batch entry",
    ),
    "causal of sequences": (
        flash_attn_varlen_func,
        lambda: training(DENSE, causal=int32(1, 0)),
        "no gradients .*causal as a tensor|causal as a tensor.* no gradients",
    ),
    "pages": (
        flash_attn_varlen_func, lambda: training_pages(torch.bfloat16), "page_table",
    ),
    "fp8": (flash_attn_varlen_func, lambda: training_pages(FP8), "no gradients .*float8_e4m3fn"),
    "out": (
        flash_attn_func,
        lambda: training(DENSE, out=torch.empty(DENSE[0])),
        "out must be None where gradients are recorded",
    ),
    "score_mod without a derivative": (
        flash_attn_func,
        lambda: training(DENSE, score_mod=of_bits),
        "score_mod cannot be differentiated",
    ),
    "score_mod_bwd beside a learned table": (
        flash_attn_func,
        lambda: training(
            DENSE,
            score_mod=lambda s, b, h, q, k, aux: s + aux[0][q[0], k[0]],
            score_mod_bwd=lambda grad, s, b, h, q, k, aux: grad,
            aux_tensors=[torch.randn(8, 8, requires_grad=True)],
        ),
        r"aux_tensors\[0\] requires grad, but score_mod_bwd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("by_operator", [False, True])
def test_limits_of_the_backward_are_told_by_the_forward(name: str, by_operator: bool) -> None:
    function, make, said = LIMITS[name]
    with AnyMode() if by_operator else nullcontext():
        # a second call finds nothing prepared
        for _ in range(2):
            with pytest.raises((NotImplementedError, ValueError), match=f"(?s){said}") as refused:
                function(**make())
            assert "daux" not in str(refused.value)
        with torch.no_grad():
            function(**make())


def test_learned_tables_have_no_order_with_torchs_setting() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match=r"aux_tensors\[0\] requires grad"):
            flash_attn_varlen_func(**qkv(*PACKED), **CU, score_mod=learned())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_config_that_changes_is_checked_by_a_prepared_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are stand-ins here, so that the forward is kept as on a GPU."""
    launches = Recorder()
    monkeypatch.setattr(interface, "prepare_fwd", launches.prepare)
    given = {n: x.requires_grad_() for n, x in qkv(*DENSE, dtype=torch.bfloat16).items()}
    for config in (None, (None, {"tile_m": 64}), (None, {"tile_m": 64})):
        flash_attn_func(**given, config=config)
    assert (len(launches.calls), len(launches.prepared)) == (3, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="group_splits must be one of .* got 3"):
            flash_attn_func(**given, config=(None, {"group_splits": 3}))
    assert len(launches.calls) == 3


@pytest.mark.parametrize("number", range(12))
def test_drawn_calls_with_common_keys(number: int) -> None:
    """The forward refuses what the backward does; what it takes has gradients."""
    rng = random.Random(f"{SEED}-{number}-common")
    lengths = [rng.randint(0, 9) for _ in range(rng.choice((1, 2, 3)))]
    total, keys = sum(lengths), rng.randint(1, 16)
    given = qkv((total, 2, 16), (1, keys, 1, 16), (1, keys, 1, 16))
    given["q"].requires_grad_(rng.random() < 0.7)
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    is_learned, in_order = rng.random() < 0.7, rng.random() < 0.7
    call = given | {"cu_seqlens_q": int32(*edges), "deterministic": in_order}
    if is_learned:
        call["score_mod"] = learned()
    if is_learned and in_order and len(lengths) > 1:
        with pytest.raises(NotImplementedError, match=r"aux_tensors\[0\] requires grad"):
            flash_attn_varlen_func(**call)
        return
    out = flash_attn_varlen_func(**call)
    if out.requires_grad:
        out.sum().backward()
