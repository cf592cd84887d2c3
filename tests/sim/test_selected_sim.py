"""A choice of key blocks for each query, on the software GPU, in both directions."""

from __future__ import annotations

import os
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ACTIVE_ARCH
from drawn_choices import Drawn, dense_attention, dense_choice, draw
from planned import backward_call, forward_call
from quiet_runs import quiet_run
from simulated_backward import run_on_simulator as run_backward
from simulated_forward import run_on_simulator as run_forward
from torch import Tensor

from flash_mask_cute.mask_prep.selected_bits import bits_shape, compile_selected_bits

# both architectures
ARCH = ACTIVE_ARCH
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
DRAWN = tuple(range(8))
BF16 = torch.bfloat16

pytestmark = pytest.mark.sim


def in_bf16(drawn: Drawn) -> Drawn:
    return drawn._replace(q=drawn.q.to(BF16), k=drawn.k.to(BF16), v=drawn.v.to(BF16))


def in_fp64(drawn: Drawn) -> Drawn:
    return drawn._replace(q=drawn.q.double(), k=drawn.k.double(), v=drawn.v.double())


def host_keywords(drawn: Drawn) -> dict[str, Any]:
    found = dict(drawn.keywords)
    left, _ = found.pop("window_size", (None, None))
    return found | {"window_size_left": left, "block_sparse_tensors_torch": drawn.selected}


def assert_close(got: Tensor, wanted: Tensor, eager: Tensor, name: str) -> None:
    """At most twice the error of torch in the same dtype, in units of the largest value."""
    unit = wanted.abs().amax().item() * 2.0**-8
    worst, of_eager = ((x.double() - wanted).abs().amax().item() for x in (got, eager))
    assert worst <= 2 * of_eager + unit, f"{name}: {worst}, of eager {of_eager}"


def check_forward(drawn: Drawn, delay: int | None, **more: Any) -> tuple[Tensor, Tensor]:
    drawn = in_bf16(drawn)
    call = forward_call(drawn.q, drawn.k, drawn.v, **host_keywords(drawn), **more)
    with quiet_run(sys_simulator(), delay):
        out, lse = run_forward(call)
    assert lse is not None
    wanted, wanted_lse = dense_attention(in_fp64(drawn))
    assert_close(out, wanted, dense_attention(drawn)[0], "out")
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=2e-3)
    return out, lse


def sys_simulator() -> ModuleType:
    import software_gpu

    return software_gpu


def check_backward(drawn: Drawn, delay: int | None, **more: Any) -> list[Tensor]:
    drawn = in_bf16(drawn)
    reference = in_fp64(drawn)
    leaves = [x.requires_grad_() for x in reference[:3]]
    out, lse = dense_attention(reference)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(BF16)
    wanted = torch.autograd.grad(out, leaves, dout.double())
    in_dtype = [x.detach().requires_grad_() for x in drawn[:3]]
    eager = torch.autograd.grad(
        dense_attention(drawn._replace(q=in_dtype[0], k=in_dtype[1], v=in_dtype[2]))[0],
        in_dtype,
        dout,
    )
    operands = drawn.q, drawn.k, drawn.v, out.detach().to(BF16), dout, lse.detach().float()
    call = backward_call(*operands, **host_keywords(drawn), **more)
    with quiet_run(sys_simulator(), delay):
        got = run_backward(call)
    for name, *of_name in zip(("dq", "dk", "dv"), got, wanted, eager, strict=True):
        assert_close(*of_name, name)
    return list(got)


def drawn_seeds() -> tuple[int, ...]:
    if SEED == "0":
        return DRAWN
    rng = random.Random(f"selected {SEED}")
    return tuple(rng.randrange(1 << 30) for _ in DRAWN)


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_draws(simulator: ModuleType, number: int) -> None:
    drawn = draw(drawn_seeds()[number], 64, (16, 64, 128), 330)
    check_forward(drawn, number)
    check_backward(drawn, number)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_blocks", [1, 32, 100])
def test_bits(simulator: ModuleType, num_blocks: int, dtype: str) -> None:
    g = torch.Generator().manual_seed(num_blocks)
    choice = torch.randint(-2, num_blocks + 40, (2, 3, 5, 7), generator=g)
    choice[0, 0, 0] = -1
    choice[0, 0, 1] = torch.iinfo(getattr(torch, dtype)).max
    choice = choice.to(getattr(torch, dtype)).transpose(0, 1)
    bits = torch.full(bits_shape(choice.shape, num_blocks), 7777, dtype=torch.int32)
    with quiet_run(simulator, 1, launches=1):
        compile_selected_bits(dtype, ACTIVE_ARCH).function(choice, bits)
    found = ((bits[..., None] >> torch.arange(32)) & 1).flatten(-2).bool()
    assert torch.equal(found, dense_choice(choice, 1, found.shape[-1]))
