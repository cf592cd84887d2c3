"""Mods that compute in bf16, compiled for a CPU without AVX512_BF16, on any CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float16, Float32, Float64, Int32
from torch import Tensor

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.mods import on_cpu
from flash_mask_cute.mods.on_cpu import eval_mask_mod, eval_score_mod, eval_score_mod_derivative

# A CPU that runs torch and has no instruction that rounds to bf16, by LLVM's names.
PLAIN = {"x86_64": ("x86-64-v3", "+avx2,+f16c,+fma"), "aarch64": ("generic", "+neon")}
N = 8
ROWS = torch.arange(N, dtype=torch.int32)
RNG = torch.Generator().manual_seed(0)
SCORES = torch.randn(N, N, generator=RNG) * 3
HALF = torch.randn(N, generator=RNG).bfloat16()
DOUBLE = torch.randn(N, generator=RNG, dtype=torch.float64)
LONG = torch.randint(-(2**20), 2**20, (N,), generator=RNG)
AUX = [HALF, DOUBLE, LONG]


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The host compiler takes this CPU for a plain one. Returns the names of compiled functions."""
    from cutlass._mlir import ir
    from cutlass.base_dsl.compiler import Compiler

    cpu, features = PLAIN[platform.machine()]
    jit, compiled = Compiler.jit, []

    def jit_for_plain_cpu(self: Any, module: Any, *args: Any, **options: Any) -> Any:
        with module.context:
            pairs = [("target-cpu", cpu), ("target-features", features)]
            attributes = [ir.ArrayAttr.get([ir.StringAttr.get(x) for x in pair]) for pair in pairs]
            for function in module.body.operations:
                if function.operation.name == "llvm.func" and function.regions[0].blocks:
                    function.attributes["passthrough"] = ir.ArrayAttr.get(attributes)
                    compiled.append(str(function.attributes["sym_name"]))
        return jit(self, module, *args, **options)

    monkeypatch.setattr(Compiler, "jit", jit_for_plain_cpu)
    monkeypatch.setattr(on_cpu, "_compiled", {})
    return compiled


def bf16(x: Any) -> Any:
    return x.to(BFloat16)


def f32(x: Any) -> Any:
    return x.to(Float32)


Pair = tuple[Callable[..., Any], Callable[[Tensor, Tensor, Tensor], Tensor]]
# A CuTe score_mod, and its value by torch from scores and the positions of queries and keys.
MODS: dict[str, Pair] = {
    "bf16 times bf16": (
        lambda s, b, h, q, k, aux: s + f32(aux[0][q[0]] * aux[0][k[0]]),
        lambda s, q, k: s + (HALF[q] * HALF[k]).float(),
    ),
    "int to bf16": (
        lambda s, b, h, q, k, aux: s + f32(bf16(q[0] * 12345)) + f32(bf16(aux[2][k[0]])),
        lambda s, q, k: s + (q * 12345).bfloat16().float() + LONG[k].bfloat16().float(),
    ),
    "fp32 to bf16": (
        lambda s, b, h, q, k, aux: f32(bf16(s) * bf16(s) - bf16(s) / bf16(s + 9.0)),
        lambda s, q, k: (
            s.bfloat16() * s.bfloat16() - s.bfloat16() / (s + 9).bfloat16()
        ).float(),
    ),
    "fp64 to bf16 and fp16": (
        lambda s, b, h, q, k, aux: s + f32(bf16(aux[1][q[0]])) + f32(aux[1][k[0]].to(Float16)),
        lambda s, q, k: s + DOUBLE[q].bfloat16().float() + DOUBLE[k].half().float(),
    ),
    "bf16 to others": (
        lambda s, b, h, q, k, aux: (
            s
            + f32(aux[0][q[0]].to(Float64))
            + f32(aux[0][k[0]].to(Float16))
            + f32((aux[0][k[0]] * 9).to(Int32))
        ),
        lambda s, q, k: (
            s + HALF[q].float() + HALF[k].half().float() + (HALF[k].float() * 9).int()
        ),
    ),
    "functions": (
        lambda s, b, h, q, k, aux: f32(cute.math.exp(bf16(s)) + cute.math.absf(-bf16(s))),
        lambda s, q, k: (s.bfloat16().exp() + s.bfloat16().abs()).float(),
    ),
    "extrema, which LLVM narrows": (
        lambda s, b, h, q, k, aux: (
            s
            + f32(cutlass.max(aux[0][q[0]], aux[0][k[0]]))
            + cutlass.min(f32(aux[0][q[0]]), f32(aux[0][k[0]]))
        ),
        lambda s, q, k: s + HALF[q].float() + HALF[k].float(),
    ),
    "choices": (
        lambda s, b, h, q, k, aux: f32(cute.where(bf16(s) > bf16(s) * 2, bf16(s), bf16(s * 3.0))),
        lambda s, q, k: torch.where(s < 0, s.bfloat16(), (s * 3).bfloat16()).float(),
    ),
    "fma, remainder": (
        lambda s, b, h, q, k, aux: (
            f32(cute.math.fma(bf16(s), bf16(s), bf16(s))) + f32(aux[0][q[0]] % aux[0][k[0]])
        ),
        lambda s, q, k: (
            (s.bfloat16().float() ** 2 + s.bfloat16().float()).bfloat16().float()
            + torch.fmod(HALF[q], HALF[k]).float()
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_a_cute_mod_has_torchs_value(name: str, plain_cpu: list[str]) -> None:
    mod, by_torch = MODS[name]
    got = eval_score_mod(mod, SCORES, AUX, 0, 0, ROWS, ROWS)
    assert plain_cpu
    q, k = ROWS.long()[:, None], ROWS.long()[None]
    torch.testing.assert_close(got, by_torch(SCORES, q, k), rtol=1e-6, atol=1e-6)


TORCH_MODS: dict[str, Callable[..., Tensor]] = {
    "bf16 times bf16": lambda s, b, h, q, k: s + HALF[q] * HALF[k],
    "bf16 plus an integer": lambda s, b, h, q, k: s + (HALF[q] + k),
    "int to bf16": lambda s, b, h, q, k: s + (q * 12345).bfloat16(),
    "fp32 to bf16": lambda s, b, h, q, k: s.bfloat16() * 3 + s,
    "fp64 to bf16": lambda s, b, h, q, k: s + DOUBLE[q].bfloat16() + DOUBLE[k].half(),
}


@pytest.mark.parametrize("name", TORCH_MODS)
def test_a_torch_mod_has_torchs_value(name: str, plain_cpu: list[str]) -> None:
    lowered = lower_mod(TORCH_MODS[name], "score_mod")
    got = eval_score_mod(lowered.mod, SCORES, lowered.aux_tensors, 0, 0, ROWS, ROWS)
    assert plain_cpu
    q, k, zero = ROWS[:, None], ROWS[None], torch.tensor(0)
    wanted = TORCH_MODS[name](SCORES, zero, zero, q, k).float()
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_masks_and_derivatives(plain_cpu: list[str]) -> None:
    got = eval_mask_mod(
        lambda b, h, q, k, aux: bf16(q) * aux[0][k[0]] > bf16(k), AUX, 0, 0, ROWS, ROWS
    )
    q, k = ROWS[:, None].bfloat16(), ROWS[None].bfloat16()
    assert torch.equal(got, q * HALF[None] > k)
    _, slopes = eval_score_mod_derivative(
        lambda s, b, h, q, k, aux: f32(bf16(s) * bf16(s)), SCORES, AUX, 0, 0, ROWS, ROWS
    )
    torch.testing.assert_close(slopes, 2 * SCORES.bfloat16().float())
    assert len(plain_cpu) >= 2


def test_every_kind_of_number_is_rounded_to_the_nearest() -> None:
    """Ties and neighbors of all signs and exponents, subnormal numbers, infinities and NaN."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (high | low).to(torch.uint32).view(torch.float32)
    rows, cols = (torch.arange(n, dtype=torch.int32) for n in numbers.shape)
    got = eval_score_mod(lambda s, *_: f32(bf16(s)), numbers, None, 0, 0, rows, cols)
    wanted = numbers.bfloat16().float()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.5, 7, -7), wanted.nan_to_num(0.5, 7, -7))
