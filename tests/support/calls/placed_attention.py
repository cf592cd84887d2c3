"""Random calls whose queries begin at a position (`q_start`), and what they should give.

The definition compares positions by itself: nothing here uses the package. Query i of a sequence
that begins at s has the position s + i, which causal masking, a window, the rows of column
intervals and of block lists, and callables count. What lies before position 0 is at 0 for lists and
callables; an interval without a start begins before all rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from eager import assert_as_good, assert_output_as_good, attend_sequence
from mask_cases import MASK_MODS, SCORE_MODS
from oracle import NEG_INF, OneSequence, Rule
from torch import Tensor

from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

INT = torch.int32
EMPTY, PARTIAL, FULL = 0, 1, 2


class Sequence(NamedTuple):
    """Where one lies in q and in k, and the position of its first query."""

    queries: Any
    keys: Any
    seqlen_q: int
    seqlen_k: int
    start: int


@dataclass
class PlacedCall:
    """`_flash_attn_fwd(x.q, x.k, x.v, **x.keywords)`. columns (heads, rows of k, n) of each batch
    entry; states (q_blocks, k_blocks)."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, Any]
    sequences: list[Sequence]
    columns: list[Tensor] | None = None
    states: Tensor | None = None
    block_size: tuple[int, int] = (1, 1)
    mods: dict[str, Any] = field(default_factory=dict)

    def visible(self, b: int, h: int, *lengths: int) -> Tensor:
        """Bool (seqlen_q, seqlen_k) of a sequence and query head."""
        x, given = self.sequences[b], self.keywords
        p = x.start + torch.arange(x.seqlen_q)[:, None]
        j = torch.arange(x.seqlen_k)[None]
        visible = torch.ones((x.seqlen_q, x.seqlen_k), dtype=torch.bool)
        left, right = given.get("window_size_left"), given.get("window_size_right")
        if given.get("causal"):
            visible &= j <= p
        if left is not None:
            visible &= j >= p - left
        if right is not None:
            visible &= j <= p + right
        if self.columns is not None:
            visible &= ~self._hidden(b, h, p)
        shown, counted = torch.ones_like(visible), p.clamp(min=0)
        if self.states is not None:
            rows = (counted // self.block_size[0]).clamp(max=self.states.shape[0] - 1)
            states = self.states[rows, j // self.block_size[1]]
            visible &= states != EMPTY
            shown = states != FULL
        if "mask_mod" in self.mods:
            asked = self.mods["mask_mod"].dense(b, h, counted, j, given.get("aux_tensors"))
            visible &= asked | ~shown
        return visible

    def _hidden(self, b: int, h: int, p: Tensor) -> Tensor:
        assert self.columns is not None
        columns = self.columns[b]
        c = columns[h * len(columns) // self.q.shape[-2], : self.sequences[b].seqlen_k].T
        if len(c) == 1:
            return p >= c[0]
        if len(c) == 2 and not self.keywords.get("causal"):
            return (p >= c[0]) | (p < c[1])
        hidden = (p >= c[0]) & (p < c[1])
        return hidden | ((p >= c[2]) & (p < c[3])) if len(c) == 4 else hidden

    def modify(self, scores: Tensor, b: int, h: int) -> Tensor:
        if "score_mod" not in self.mods:
            return scores
        p = (self.sequences[b].start + torch.arange(scores.shape[0])[:, None]).clamp(min=0)
        j, aux = torch.arange(scores.shape[1])[None], self.keywords.get("aux_tensors")
        return self.mods["score_mod"].dense(scores, b, h, p, j, aux).to(scores.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64 or as a torch user writes it; 0 and -inf of nothing."""
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = torch.full(q.shape[:-1], NEG_INF, dtype=torch.float64)
        for b, x in enumerate(self.sequences):
            given = OneSequence(q[x.queries], k[x.keys], v[x.keys], b, self)
            out[x.queries], of_rows = attend_sequence(given, Rule(q.shape[-1] ** -0.5))
            lse[x.queries] = of_rows.mT.double()
        return out, lse.mT

    def gradients(self, dtype: torch.dtype, dout: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        out, _ = self.attend(*leaves)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    def assert_output(self, out: Tensor, lse: Tensor) -> None:
        exact = self.attend(self.q.double(), self.k.double(), self.v.double())
        eager, _ = self.attend(self.q, self.k, self.v)
        assert_output_as_good(out, lse, *exact, eager, self.name)

    def assert_gradients(self, found: tuple[Tensor, ...], dout: Tensor) -> None:
        exact, eager = self.gradients(torch.float64, dout), self.gradients(self.q.dtype, dout)
        # of a row with one key dS is 0, and eager's exactly: terms that cancel here leave an ulp
        terms = torch.finfo(torch.float32).eps * self._largest_terms(dout)
        for name, *tensors in zip("qkv", found, exact, eager, strict=True):
            assert_as_good(f"d{name}", *tensors, self.name, terms if name != "v" else 0.0)

    def _largest_terms(self, dout: Tensor) -> float:
        """At most this is a term of dQ and dK: |dO| |V| |K| or |Q| in norms of rows."""
        q, k, v, do = (
            x.double().norm(dim=-1).amax().item() if x.numel() else 0.0
            for x in (self.q, self.k, self.v, dout)
        )
        return do * v * max(q, k) * self.q.shape[-1] ** -0.5


class Draw:
    """Draws one call after the other from a seed.

    earliest: the least position of a first query that is given.
    """

    def __init__(
        self, seed: int, dtype: torch.dtype, head_dim: int, longest: int, earliest: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.head_dim, self.longest = dtype, head_dim, longest
        self.earliest = earliest

    def calls(self, count: int) -> Iterator[PlacedCall]:
        for number in range(count):
            yield self.call(number)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def call(self, number: int) -> PlacedCall:
        rng, dim = self.rng, self.head_dim
        batch, heads_kv, group = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 4))
        heads_q = heads_kv * group
        capacity = rng.randint(1, self.longest)
        seqlen_q = rng.choice((1, 3, rng.randint(1, 70), rng.randint(1, self.longest)))
        keywords: dict[str, Any] = {}
        lengths_q = [seqlen_q] * batch
        if rng.random() < 0.3:
            lengths_q = [rng.randint(0, seqlen_q) for _ in range(batch)]
            keywords["cu_seqlens_q"] = torch.tensor([0, *accumulate(lengths_q)], dtype=INT)
            q = self.normal(sum(lengths_q), heads_q, dim)
        else:
            q = self.normal(batch, seqlen_q, heads_q, dim)
        slots_k, used_k = [capacity] * batch, [capacity] * batch
        if rng.random() < 0.25:
            slots_k = [rng.randint(0, capacity) for _ in range(batch)]
            keywords["cu_seqlens_k"] = torch.tensor([0, *accumulate(slots_k)], dtype=INT)
            rows_k = (sum(slots_k),)
            used_k = slots_k
        else:
            rows_k = (batch, capacity)
            if rng.random() < 0.6:
                used_k = [rng.randint(0, capacity) for _ in range(batch)]
                keywords["seqused_k"] = torch.tensor(used_k, dtype=INT)
        k, v = (self.normal(*rows_k, heads_kv, dim) for _ in range(2))
        starts = self.starts(keywords, lengths_q, used_k)
        sequences = list(self.places(keywords, lengths_q, slots_k, used_k, starts))
        return self.masked(f"call {number}", (q, k, v), keywords, sequences, slots_k)

    def masked(
        self, name: str, qkv: tuple[Tensor, ...], keywords: dict[str, Any],
        sequences: list[Sequence], slots_k: list[int],
    ) -> PlacedCall:  # fmt: skip
        call = PlacedCall(name, *qkv, keywords, sequences)
        self.add_masks(call, slots_k)
        told = {name: x if isinstance(x, int | str) else "..." for name, x in keywords.items()}
        lengths = [(x.seqlen_q, x.seqlen_k, x.start) for x in sequences]
        call.name += f" of queries, keys, starts {lengths}, {told}"
        return call

    def starts(self, keywords: dict[str, Any], lengths_q: list[int], used_k: list[int]) -> Any:
        rng = self.rng
        kind = rng.choice(("end", "end", "number", "each"))
        if kind == "end":
            keywords["q_start"] = "end"
            return [n - m for n, m in zip(used_k, lengths_q, strict=True)]
        if kind == "number":
            keywords["q_start"] = rng.choice((0, rng.randint(self.earliest, self.longest)))
            return [keywords["q_start"]] * len(lengths_q)
        starts = [rng.randint(self.earliest, self.longest) for _ in lengths_q]
        keywords["q_start"] = torch.tensor(starts, dtype=INT)
        return starts

    def places(
        self,
        keywords: dict[str, Any],
        lengths_q: list[int],
        slots_k: list[int],
        used_k: list[int],
        starts: list[int],
    ) -> Iterator[Sequence]:
        at_q = at_k = 0
        for b, start in enumerate(starts):
            queries: Any = (b, slice(lengths_q[b]))
            keys: Any = (b, slice(used_k[b]))
            if "cu_seqlens_q" in keywords:
                queries = slice(at_q, at_q + lengths_q[b])
            if "cu_seqlens_k" in keywords:
                keys = slice(at_k, at_k + used_k[b])
            yield Sequence(queries, keys, lengths_q[b], used_k[b], start)
            at_q, at_k = at_q + lengths_q[b], at_k + slots_k[b]

    def add_masks(self, call: PlacedCall, slots_k: list[int]) -> None:
        rng, keywords = self.rng, call.keywords
        keywords["causal"] = rng.random() < 0.6
        if rng.random() < 0.3:
            keywords["window_size_left"] = rng.randint(0, 60)
        if rng.random() < 0.2:
            keywords["window_size_right"] = rng.randint(0, 60)
        rows = 2 * self.longest
        if rng.random() < 0.4:
            self.add_columns(call, slots_k, rows)
        if rng.random() < 0.35:
            self.add_lists(call, rows, max(*slots_k, 1))
        if rng.random() < 0.3:
            keywords["mask_mod"] = MASK_MODS["checks"].cute
            call.mods["mask_mod"] = MASK_MODS["checks"]
        if rng.random() < 0.3:
            keywords["score_mod"] = SCORE_MODS["alibi"].cute
            call.mods["score_mod"] = SCORE_MODS["alibi"]

    def add_columns(self, call: PlacedCall, slots_k: list[int], rows: int) -> None:
        rng, causal = self.rng, call.keywords["causal"]
        n = rng.choice((1, 2, 4) if causal else (2, 4))
        heads = rng.choice((1, call.k.shape[-2], call.q.shape[-2]))
        # runs of equal keys, so that whole tiles are hidden
        call.columns = []
        for slot in slots_k:
            runs = torch.randint(0, rows, (heads, slot // 40 + 1, n), generator=self.generator)
            call.columns.append(runs.repeat_interleave(40, dim=1)[:, :slot].int())
        packed = "cu_seqlens_k" in call.keywords
        joined = torch.cat(call.columns, dim=1)[None] if packed else torch.stack(call.columns)
        call.keywords["startend_row_indices"] = joined

    def add_lists(self, call: PlacedCall, rows: int, seqlen_k: int) -> None:
        from flash_mask_cute import BlockSparseTensorsTorch

        block_q, block_k = call.block_size = self.rng.choice(((128, 128), (48, 80), (16, 32)))
        shape = -(-rows // block_q), -(-seqlen_k // block_k)
        states = torch.randint(0, 3, shape, generator=self.generator)
        call.states = states
        if "cu_seqlens_k" in call.keywords:
            call.keywords["max_seqlen_k"] = seqlen_k
        lists = []
        for state in (PARTIAL, FULL):
            is_listed = states == state
            order = torch.argsort((~is_listed).int(), dim=1, stable=True).int()
            lists += [is_listed.sum(1).int()[None, None], order[None, None]]
        call.keywords["block_sparse_tensors_torch"] = BlockSparseTensorsTorch(
            *lists, block_size=call.block_size
        )


def assert_calls_and_gradients(draw: Draw, count: int) -> None:
    """The first calls of a draw, on the CPU."""
    for call in draw.calls(count):
        out, lse = _flash_attn_fwd(call.q, call.k, call.v, **call.keywords)
        assert lse is not None
        call.assert_output(out, lse)
        dout = draw.normal(*out.shape)
        operands = call.q, call.k, call.v, out, dout, lse
        call.assert_gradients(_flash_attn_bwd(*operands, **call.keywords), dout)
