"""Functions of flex mods in kernels, by LSE: where a query sees one key, LSE is the score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

# Of each function: the largest error in float32 at moderate arguments, and at those of POINTS.
BOUNDS: dict[str, tuple[Function, float]] = {
    "sin": (torch.sin, 2e-6),
    "cos": (torch.cos, 2e-6),
    "sigmoid": (torch.sigmoid, 5e-7),
}


def points() -> Tensor:
    """200 moderate arguments, large ones, and some of which sin and cos are NaN in kernels."""
    large = torch.tensor([1e3, -12345.678, 1e6, 2.0**22 + 0.5, -3.3e7, 2.0**26])
    no_waves = torch.tensor([2.0**26 + 8, -1e9, torch.inf, -torch.inf, torch.nan])
    return torch.cat([torch.linspace(-30, 30, 200), large, no_waves])


def mods_of(function: Function, x: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A score_mod and a mask_mod."""
    return lambda s, b, h, q, k: function(x[q]) + 0 * s, lambda b, h, q, k: q == k


def assert_values(name: str, x: Tensor, out: Tensor, lse: Tensor, of_lse: float = 0.0) -> None:
    """Of queries that see their own key alone. of_lse: error of LSE by polynomial exponentials."""
    function, bound = BOUNDS[name]
    wanted = function(x.double())
    if name != "sigmoid":
        wanted[x.abs() > 2.0**26] = torch.nan
    assert torch.equal(out.isnan().any(-1), wanted.isnan()), name
    error = (lse.double() - wanted).abs()[~wanted.isnan()]
    worst = x[~wanted.isnan()][error.argmax()].item()
    assert error.max() < bound + of_lse, (name, worst, error.max().item())
