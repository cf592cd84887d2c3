"""The arguments of one call of `_flash_attn_fwd` for a case, and what the oracle says of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from cases import Case
from dense_masks import DenseMasks
from eager import eager_same_dtype
from oracle import reference_attention
from torch import Tensor

# What sits in the rows past seqused: large, so that reading a key there shows, yet finite,
# because 0 * v is then 0.
GARBAGE = 3000.0


@dataclass(frozen=True)
class Inputs:
    """Of `_flash_attn_fwd(x.q, x.k, x.v, **x.keywords)`, and the oracle's results for it."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    plain_keywords: dict[str, Any]
    mask_keywords: dict[str, Any] = field(default_factory=dict)
    dense: DenseMasks | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        return self.plain_keywords | self.mask_keywords

    @property
    def bwd_keywords(self) -> dict[str, Any]:
        """Those of the backward, which packs no heads."""
        return {name: x for name, x in self.keywords.items() if name != "pack_gqa"}

    @property
    def column_mask(self) -> Any:
        """The intervals of the keywords as a ColumnMask, or None."""
        from flash_mask_cute import ColumnMask

        columns = self.keywords.get("startend_row_indices")
        if columns is None or isinstance(columns, ColumnMask):
            return columns
        return ColumnMask(columns, self.case.causal)

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        return reference_attention(self.q, self.k, self.v, self.dense, **self.plain_keywords)

    @cached_property
    def eager(self) -> tuple[Tensor, Tensor]:
        return eager_same_dtype(self.q, self.k, self.v, self.dense, **self.plain_keywords)

    def rows_in_use(self, side: str) -> Tensor:
        """Boolean, the shape of q ("q") or k ("k") without heads and d: false past seqused."""
        x = self.q if side == "q" else self.k
        lengths = getattr(self.case, f"lengths_{side}")
        used = getattr(self.case, f"seqused_{side}")
        in_use = torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
        if used is not None:
            slots = in_use if lengths is None else in_use.split(lengths)
            for slot, length in zip(slots, used, strict=True):
                slot[length:] = False
        return in_use


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Normal q, k, v, the same on every device, and keywords; rows past seqused hold GARBAGE."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    def int32(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    slots_q = (case.batch, case.seqlen_q) if case.lengths_q is None else (sum(case.lengths_q),)
    slots_k = (case.batch, case.seqlen_k) if case.lengths_k is None else (sum(case.lengths_k),)
    if case.strided == "fused_qkv":
        assert slots_q == slots_k and case.head_dim == case.head_dim_v, case.id
        fused = normal(*slots_q, case.heads_q + 2 * case.heads_kv, case.head_dim)
        q, k, v = fused.split((case.heads_q, case.heads_kv, case.heads_kv), dim=-2)
    else:
        shapes = (
            (*slots_q, case.heads_q, case.head_dim),
            (*slots_k, case.heads_kv, case.head_dim),
            (*slots_k, case.heads_kv, case.head_dim_v),
        )
        if case.strided == "transposed":
            q, k, v = (normal(*s[:-3], s[-2], s[-3], s[-1]).transpose(-3, -2) for s in shapes)
        elif case.strided == "unreadable":
            shape_q, (*rows_k, dim), shape_v = shapes
            q = normal(*shape_q, 2)[..., 0]
            k = normal(*rows_k, dim + 4)[..., :dim]
            v = normal(math.prod(shape_v) + 1)[1:].view(shape_v)
        else:
            q, k, v = (normal(*s) for s in shapes)

    keywords: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size_left": case.window_left,
        "window_size_right": case.window_right,
        "softcap": case.softcap,
        "learnable_sink": None if case.sink is None else normal(case.heads_q).to(case.sink),
        "seqused_q": int32(case.seqused_q),
        "seqused_k": int32(case.seqused_k),
        "pack_gqa": case.pack_gqa,
    }
    for side, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
        if lengths is not None:
            keywords[f"cu_seqlens_{side}"] = int32((0, *accumulate(lengths)))
            keywords[f"max_seqlen_{side}"] = max(lengths)
    dense = DenseMasks.create(case, seed).to(device) if case.has_masks else None
    mask_keywords = {} if dense is None else dense.keywords()
    inputs = Inputs(case, q, k, v, keywords, mask_keywords, dense)
    for side, tensors in (("q", (q,)), ("k", (k, v))):
        for tensor in tensors:
            tensor[~inputs.rows_in_use(side)] = GARBAGE
    return inputs


def of_one_column_mask(
    device: torch.device | str = "cpu", **fields: Any
) -> Iterator[tuple[Inputs, dict[str, Any]]]:
    """Calls, with keywords instead, whose column mask is one, and follows its tensor."""
    from flash_mask_cute import ColumnMask

    case = Case("kept", causal=True, column="stepped1", **fields)
    first, second = make_inputs(case, device), make_inputs(case, device, seed=5)
    indices = first.column_mask.startend_row_indices.clone()
    mask = ColumnMask(indices, causal=True, seqlen_q="any")
    for inputs in (first, first, second, first):
        indices.copy_(inputs.column_mask.startend_row_indices)
        yield inputs, {"startend_row_indices": mask, "causal": False}


def make_output_gradients(inputs: Inputs, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Normal dout, in the dtype of q, and dlse, float32, laid out like out and lse.

    Rows past seqused_q hold GARBAGE.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    dout = torch.randn(shape, generator=generator).to(inputs.q)
    dlse_by_row = torch.randn(shape[:-1], generator=generator).to(dout.device)
    unused = ~inputs.rows_in_use("q")
    dout[unused] = GARBAGE
    dlse_by_row[unused] = GARBAGE
    return dout, dlse_by_row.transpose(-1, -2).contiguous()


def make_tangents(inputs: Inputs, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Normal tangents of q, k and v, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = inputs.q, inputs.k, inputs.v
    made = [torch.randn(x.shape, generator=generator).to(x) for x in tensors]
    return made[0], made[1], made[2]


def make_growing_inputs(
    head_dim: int,
    tile_n: int,
    column: int,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Three tiles of keys, visited from the last to the first; each has a key, in `column`, that a
    third of the rows see far above all before: so far that the maximum in use counts as too old,
    and then that an exponential by it is infinite."""
    seqlen = 3 * tile_n
    case = Case("growing", 1, seqlen, seqlen, 1, 1, head_dim=head_dim, causal=causal)
    inputs = make_inputs(case, device)
    q, k = inputs.q, inputs.k
    q[:, ::3] = q[:, :1]
    for growth, tile in ((5, 1), (90, 0)):
        k[0, tile * tile_n + column] = q[0, 0] * growth
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) * head_dim**-0.5
    largest = scores.unflatten(1, (3, tile_n)).amax(2) / math.log(2)
    # more than sums of bf16 may reach, and more than a float can hold
    assert 30 < largest[0, 1] - largest[0, 2] < 100 and largest[0, 0] - largest[0, 1] > 128
    return inputs
