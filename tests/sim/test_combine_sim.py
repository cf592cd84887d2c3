"""The combination of partial results of a caller, on the software GPU of either architecture."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from conftest import ACTIVE_ARCH
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.call.splits import MAX_COLUMNS, check_combine, combine_partials
from flash_mask_cute.runtime.target import Target

ARCH = ACTIVE_ARCH
NAN, NEG_INF = float("nan"), float("-inf")


def combined(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """In float64; parts that saw nothing may hold anything."""
    lse = torch.logsumexp(lses.double(), dim=0)
    weights = torch.exp(lses.double() - lse.masked_fill(lse == NEG_INF, 0.0))[..., None]
    return torch.where(weights > 0, outs.double() * weights, 0.0).sum(dim=0), lse


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "is_packed"),
    [
        (512, torch.bfloat16, False),
        (264, torch.float32, True),
        (392, torch.float16, False),
        (8, torch.bfloat16, True),
    ],
)
def test_parts_of_any_width(
    simulator: ModuleType, head_dim: int, dtype: torch.dtype, is_packed: bool
) -> None:
    """A warp loads eight parts at a time; in some rows, the largest LSE comes later."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = (5,) if is_packed else (2, 5)
    outs = torch.randn(11, *rows, 3, head_dim, generator=generator).to(dtype)
    # as attention gives them: (parts, ..., head, row), turned
    lses = 3 * torch.randn(11, *rows[:-1], 3, 5, generator=generator).mT
    lses[4], lses[:, ..., 1, :] = NEG_INF, NEG_INF
    outs[4], outs[:, ..., 1, :, :] = NAN, NAN
    lse = torch.full((*rows[:-1], 3, 5), NAN).mT
    # rows that the kernel can write, and those of a slice that begin anywhere
    for memory in (
        torch.full((*rows, 3, head_dim), NAN),
        torch.full((*rows, 3, head_dim + 1), NAN),
    ):
        out = memory.to(dtype)[..., -head_dim:]
        check_combine(outs, out.dtype)
        with quiet_run(simulator, launches=1):
            combine_partials(outs, lses, out, lse, Target(ARCH, num_sms=2))
        wanted, wanted_lse = combined(outs, lses)
        ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
        torch.testing.assert_close(out.double(), wanted, rtol=ulp, atol=ulp)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_the_widest_parts(simulator: ModuleType) -> None:
    from flash_mask_cute.kernels import combine

    assert combine.MAX_COLUMNS == MAX_COLUMNS
    for head_dim in (520, 12):
        with pytest.raises(NotImplementedError, match=f"multiple of 8 up to 512 .* {head_dim}"):
            check_combine(torch.ones(2, 5, 3, head_dim), torch.float32)
        with pytest.raises(ValueError, match=f"multiple of 8 up to 512, got {head_dim}"):
            combine.Combine(head_dim)
