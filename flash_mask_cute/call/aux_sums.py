"""The sums that become gradients of aux tensors: their memory, and their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_mask_cute.mods import fixed_point_sums


def new_sums(
    daux: Sequence[Tensor | None],
    wants_aux: tuple[int, ...],
    dtype: torch.dtype,
    exact_aux: tuple[int, ...] = (),
    entries: Mapping[int, int] | None = None,
) -> dict[int, Tensor]:
    """Zeros for the sums of aux tensor gradients, by index. exact_aux: those with exact sums, whose
    first dimension is that of words (`mods/fixed_point_sums.py`); the others have `dtype`. entries:
    batch entries of those with sums for each, the first dimension."""
    sums: dict[int, Tensor] = {}
    for i in wants_aux:
        if (x := daux[i]) is None:
            continue
        if i in exact_aux:
            sums[i] = x.new_zeros((fixed_point_sums.NUM_WORDS, *x.shape), dtype=torch.int64)
        else:
            of_entries = () if entries is None or i not in entries else (entries[i],)
            sums[i] = x.new_zeros((*of_entries, *x.shape), dtype=dtype)
    return sums


def write_gradients(
    daux: Sequence[Tensor | None],
    sums: Mapping[int, Tensor],
    exact_aux: tuple[int, ...] = (),
    entry_aux: tuple[int, ...] = (),
) -> None:
    """Round the sums into their tensors, unless they were made there; a tensor without sums, which
    no score_mod reads, becomes 0."""
    for i, gradient in enumerate(daux):
        if gradient is None:
            continue
        if i in exact_aux:
            gradient.copy_(values_of(sums[i]))
        elif i in entry_aux:
            if sums[i].data_ptr() != gradient.data_ptr():
                gradient.copy_(sums[i].sum(0))
        elif i in sums:
            gradient.copy_(sums[i])
        else:
            gradient.zero_()


def values_of(words: Tensor) -> Tensor:
    """The values of exact sums in float64, from their words, the first dimension."""
    total = words[fixed_point_sums.NUM_DIGITS - 1].double()
    for digit in reversed(words[: fixed_point_sums.NUM_DIGITS - 1]):
        # integers up to 2^53, nearly always, so that only the sum is rounded
        total = torch.add(digit, total, alpha=2.0**fixed_point_sums.WORD_BITS)
    total *= 2.0**fixed_point_sums.LOWEST_EXPONENT
    flags = words[fixed_point_sums.FLAGS]
    for flag, value in _NOT_FINITE:
        # inf - inf is NaN, as in a sum of fp32 numbers
        total += torch.zeros_like(total).masked_fill_((flags & flag) != 0, value)
    return total


_NOT_FINITE = (
    (fixed_point_sums.IS_POSITIVE_INF, torch.inf),
    (fixed_point_sums.IS_NEGATIVE_INF, -torch.inf),
    (fixed_point_sums.IS_NAN, torch.nan),
)
