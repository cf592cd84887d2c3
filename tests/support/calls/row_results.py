"""Results of rows that are computed in several ways, and callables by absolute positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Results(NamedTuple):
    """kind: how fixed splits were computed, where it is known."""

    out: Tensor
    lse: Tensor
    kind: str = ""

    @staticmethod
    def of(result: Any) -> Results:
        out, lse = result
        return Results(out.detach(), lse.detach())

    def rows(self, first: int, end: int) -> Results:
        return Results(self.out[:, first:end], self.lse[..., first:end], self.kind)

    def entry(self, batch_idx: int) -> Results:
        return Results(self.out[batch_idx : batch_idx + 1], self.lse[batch_idx : batch_idx + 1])

    def has_bits_of(self, other: Results) -> bool:
        return all(
            torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
            for kind, a, b in (
                (torch.int16, self.out, other.out),
                (torch.int32, self.lse, other.lse),
            )
        )


def sees_some(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (k <= q) & ((k % 5 != 2) | (q % 3 == 0))


def distance_by(slope: float) -> Callable[..., Any]:
    def distance(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        from cutlass import Float32

        return score - (q - k).to(Float32) * slope

    return distance
