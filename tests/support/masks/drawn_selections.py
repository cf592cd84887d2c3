"""Drawn selections of key blocks, and the rule that they state, written for reading."""

from __future__ import annotations

from typing import Any, NamedTuple

import oracle
import torch
from mask_cases import pick
from torch import Tensor

from flash_mask_cute import SelectedBlocks


class Drawn(NamedTuple):
    """A call with a selection: float64 operands, keywords, visible (heads_q, queries, keys)."""

    q: Tensor
    k: Tensor
    v: Tensor
    selected: SelectedBlocks
    keywords: dict[str, Any]
    is_packed: bool
    lens_q: list[int]
    lens_k: list[int]
    visible: list[Tensor]

    def sequences(self, x: Tensor, of_keys: bool = False) -> list[Tensor]:
        """The rows in use of each sequence of a tensor like q, or like k."""
        lengths = self.lens_k if of_keys else self.lens_q
        if not self.is_packed:
            return [x[b, :n] for b, n in enumerate(lengths)]
        return list(x.split(lengths))


def dense_selection(selection: Tensor, block_size: int, seqlen_k: int) -> Tensor:
    """bool (..., queries, seqlen_k): whether a query chose the block of a key."""
    block_of_key = torch.arange(seqlen_k) // block_size
    return (selection[..., None] == block_of_key).any(-2)


def draw_selection(
    gen: torch.Generator, shape: tuple[int, ...], num_blocks: int, dtype: torch.dtype
) -> Tensor:
    """(..., queries, k): also negative, too large and repeated numbers, and queries without any."""
    selection = torch.randint(-1, num_blocks + 2, shape, generator=gen).to(dtype)
    if shape[-1] > 1 and pick(gen, True, False):
        selection[..., 1] = selection[..., 0]
    if pick(gen, True, False):
        selection[..., torch.rand(shape[-2], generator=gen) < 0.2, :] = -1
    return selection


def draw(
    seed: int,
    head_dim: int = 8,
    sizes: tuple[int, ...] = (16, 32),
    most: int = 90,
    kind: int | None = None,
) -> Drawn:
    """Up to three sequences of `most` keys, packed or not; draws of one kind share kernels."""
    gen = torch.Generator().manual_seed(seed)
    kinds = gen if kind is None else torch.Generator().manual_seed(kind)
    is_packed = pick(kinds, True, False)
    batch = pick(gen, 1, 1, 2, 3)
    lens_q = [int(torch.randint(0, most // 2, (), generator=gen)) for _ in range(batch)]
    lens_q[0] += 1
    lens_k = [int(torch.randint(1, most, (), generator=gen)) for _ in range(batch)]
    if pick(gen, True, False):
        lens_k = [max(n, 1) for n in lens_q]
    if not is_packed:
        lens_q = [lens_q[0]] * batch
    longest = max(lens_k)
    block, k = pick(kinds, *sizes), pick(gen, 1, 2, 3, 5)
    heads_kv, group = pick(kinds, 1, 2), pick(kinds, 1, 2, 3, 4)
    heads_q = heads_kv * group
    heads = pick(kinds, 1, heads_kv, heads_q)
    num_blocks = -(-longest // block)
    dtype = pick(kinds, torch.int32, torch.int64)
    rows = (sum(lens_q),) if is_packed else (lens_q[0],)
    entries = () if is_packed else (pick(gen, 1, batch),)
    selection = draw_selection(gen, (*entries, heads, *rows, k), num_blocks, dtype)
    if pick(gen, True, False):
        # other strides
        selection = selection.transpose(-1, -2).contiguous().transpose(-1, -2)
    keywords: dict[str, Any] = {"causal": pick(kinds, True, False)}
    if pick(kinds, True, False, False):
        keywords["window_size"] = (13, None)
    if pick(kinds, True, False, False):
        keywords["softcap"] = 3.0
    if pick(kinds, True, False, False):
        keywords["learnable_sink"] = torch.randn(heads_q, dtype=torch.float64, generator=gen)
    if is_packed:
        starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (lens_q, lens_k)]
        keywords |= {
            "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
            "max_seqlen_q": max(lens_q),
            "max_seqlen_k": longest,
        }
        shape_q, shape_k = (sum(lens_q),), (sum(lens_k),)
    else:
        shape_q, shape_k = (batch, lens_q[0]), (batch, longest)
        lens_k = [longest] * batch

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=gen)

    drawn = Drawn(
        randn(*shape_q, heads_q, head_dim),
        randn(*shape_k, heads_kv, head_dim),
        randn(*shape_k, heads_kv, head_dim),
        SelectedBlocks(selection, block),
        keywords,
        is_packed,
        lens_q,
        lens_k,
        [],
    )
    return drawn._replace(visible=_visible(drawn))


def regroup(drawn: Drawn, group: int, head_dim: int, block: int = 128, k: int = 3) -> Drawn:
    """With groups of so many heads, without a sink, and with a selection of other blocks."""
    gen = torch.Generator().manual_seed(group + drawn.q.shape[-3])
    heads_kv = drawn.k.shape[-2]
    shape = drawn.selected.indices.shape
    heads = heads_kv if drawn.selected.heads > 1 else 1
    num_blocks = -(-max(drawn.lens_k) // block)
    selection = draw_selection(gen, (*shape[:-3], heads, shape[-2], k), num_blocks, torch.int32)

    def randn(rows: Tensor, heads: int) -> Tensor:
        of_rows = torch.randn(*rows.shape[:-2], heads, head_dim, generator=gen)
        return of_rows.to(torch.float64)

    found = drawn._replace(
        q=randn(drawn.q, heads_kv * group),
        k=randn(drawn.k, heads_kv),
        v=randn(drawn.k, heads_kv),
        selected=SelectedBlocks(selection, block),
        keywords={name: x for name, x in drawn.keywords.items() if name != "learnable_sink"},
    )
    return found._replace(visible=_visible(found))


def _visible(drawn: Drawn) -> list[Tensor]:
    """bool (heads_q, queries, keys) of each sequence."""
    selection, heads_q = drawn.selected.indices, drawn.q.shape[-2]
    visible = []
    for b, (n_q, n_k) in enumerate(zip(drawn.lens_q, drawn.lens_k, strict=True)):
        if drawn.is_packed:
            own = selection[:, sum(drawn.lens_q[:b]) :][:, :n_q]
        else:
            own = selection[min(b, len(selection) - 1)]
        seen = dense_selection(own, drawn.selected.block_size, n_k)
        visible.append(_in_band(seen.repeat_interleave(heads_q // len(own), 0), drawn.keywords))
    return visible


def _in_band(seen: Tensor, keywords: dict[str, Any]) -> Tensor:
    """What causal masking and the window leave of bool (..., queries, keys)."""
    left, right = 13 if "window_size" in keywords else None, 0 if keywords["causal"] else None
    return seen & oracle.band(*seen.shape[-2:], left, right)


def dense_attention(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """out and lse (heads before rows, as calls return it) by the visible keys; differentiable."""
    outs, lses = [], []
    sink, softcap = drawn.keywords.get("learnable_sink"), drawn.keywords.get("softcap", 0.0)
    sink = None if sink is None else sink[:, None, None]
    cap = (lambda x: softcap * torch.tanh(x / softcap)) if softcap else None
    of_keys = [drawn.sequences(x, of_keys=True) for x in (drawn.k, drawn.v)]
    more = {"modify": cap, "sink": sink, "dtype": drawn.q.dtype}
    for *qkv, seen in zip(drawn.sequences(drawn.q), *of_keys, drawn.visible, strict=True):
        given = (x.transpose(0, 1) for x in qkv)
        out, lse, _ = oracle.dense_attention(*given, seen, **more)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    if drawn.is_packed:
        return torch.cat(outs), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def assert_close(got: Tensor, wanted: Tensor, eager: Tensor, name: str) -> None:
    """At most twice the error of torch in the same dtype, in units of the largest value."""
    unit = wanted.abs().amax().item() * 2.0**-8
    worst, of_eager = ((x.double() - wanted).abs().amax().item() for x in (got, eager))
    assert worst <= 2 * of_eager + unit, f"{name}: {worst}, of eager {of_eager}"
