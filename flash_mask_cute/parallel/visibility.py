"""Which rows of a sequence see which keys, for some rows and some keys of it.

A rank's rows are in ascending order. So a range of rows of the whole is a range of these, and any
set of rows and keys has column intervals again, if no key is hidden from more than two ranges.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.runs import vectors_of
from flash_mask_cute.rules.intervals import Intervals

Window: TypeAlias = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


def rows_before(index: Tensor, seqlen: int) -> Tensor:
    """How many rows of index (int64) are before each row of a sequence, int64 (seqlen + 1,)."""
    is_chosen = torch.zeros(seqlen + 1, dtype=torch.int64, device=index.device)
    is_chosen[1:].index_fill_(0, index, 1)
    return is_chosen.cumsum(0)


class Visibility(NamedTuple):
    """The ranges of rows that each key is hidden from, which may be empty and may overlap: int64
    (batch, heads_mask, seqlen, ranges)."""

    starts: Tensor
    ends: Tensor

    @staticmethod
    def of(
        mask: ColumnMask | None,
        causal: bool,
        window: Window,
        seqlen: int,
        device: torch.device | str,
    ) -> Visibility:
        """Of self-attention over seqlen tokens."""
        key = torch.arange(seqlen, device=device)[None, None]
        zero, end = torch.zeros_like(key), torch.full_like(key, seqlen)
        ranges: list[tuple[Tensor, Tensor]] = []
        if causal or (mask is not None and mask.causal):
            ranges.append((zero, key))
        left, right = window
        if left is not None:
            ranges.append((key + left + 1, end))
        if right is not None:
            ranges.append((zero, key - right))
        shape = key.shape
        if mask is not None:
            indices = mask.startend_row_indices.to(device, torch.int64)
            values, shape = indices.unbind(3), indices.shape[:3]
            for sides in Intervals(mask.num_vectors, mask.causal).hidden_rows(values, seqlen):
                first, last = (x if isinstance(x, Tensor) else key.new_tensor(x) for x in sides)
                ranges.append((first, last))
        if not ranges:
            ranges.append((zero, zero))
        starts, ends = (
            torch.stack([x.expand(shape) for x in side], -1).clamp(0, seqlen)
            for side in zip(*ranges, strict=True)
        )
        return Visibility(starts, ends)

    def among(self, before: Tensor, keys: Tensor | slice = slice(None)) -> Visibility:
        """The same for some keys, in the places of some rows. before: `rows_before` of these."""
        starts, ends = self.starts[:, :, keys], self.ends[:, :, keys]
        return Visibility(before[starts], before[ends])

    def is_seen(self, num_rows: int) -> Tensor:
        """Whether any of the rows sees a key in any batch entry and head, bool (keys,)."""
        starts, order = self.starts.sort(dim=-1)
        ends = self.ends.gather(-1, order).cummax(-1).values
        reached = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
        num_hidden = (ends - torch.maximum(starts, reached)).clamp(min=0).sum(-1)
        return (num_hidden < num_rows).flatten(0, 1).any(0)

    def fits(self, num_rows: int) -> bool:
        """Whether no key is hidden from more than two separate ranges."""
        return self._vectors(num_rows) is not None

    def mask(self, num_rows: int) -> ColumnMask:
        """As column intervals, if it fits."""
        vectors = self._vectors(num_rows)
        assert vectors is not None
        return ColumnMask(vectors, False, documents=False, seqlen_q=num_rows)

    def _vectors(self, num_rows: int) -> Tensor | None:
        # each two ranges are a form of four vectors, the last one maybe beside an empty range
        sides = torch.stack(self, -1).flatten(-2).int()
        sides = torch.nn.functional.pad(sides, (0, -sides.shape[-1] % 4))
        return vectors_of([(form, False) for form in sides.split(4, -1)], num_rows)
