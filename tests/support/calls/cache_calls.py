"""Random calls of `flash_attn_with_kvcache`, and their results; unused rows of caches are NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from eager import assert_output_as_good, attend_sequence
from oracle import OneSequence, Rule
from torch import Tensor

INT = torch.int32


@dataclass
class SequencesCall:
    """q and the keywords of a call, and q, k and v of each of its sequences."""

    name: str
    q: Tensor
    keywords: dict[str, Any]
    sequences: list[tuple[Tensor, Tensor, Tensor]]

    def is_causal(self, b: int) -> bool:
        return self.keywords["causal"]

    def attend(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) of tensors of a dtype, laid out as those of the call."""
        given, results = self.keywords, []
        left, right = (None if side == -1 else side for side in given["window_size"])
        dense = None if given.get("mask_mod") is None else NeverFifth()
        for b, qkv in enumerate(self.sequences):
            rule = Rule(
                self.q.shape[-1] ** -0.5, self.is_causal(b), left, right,
                sink=given.get("learnable_sink"),
            )  # fmt: skip
            x = OneSequence(*(x.to(dtype) for x in qkv), 0, dense)
            results.append(attend_sequence(x, rule))
        outs, lses = zip(*results, strict=True)
        if self.q.dim() == 3:
            return torch.cat(outs), torch.cat(lses, dim=1)
        return torch.stack(outs), torch.stack(lses)

    def assert_close(self, out: Tensor, lse: Tensor) -> None:
        exact, eager = self.attend(torch.float64), self.attend(self.q.dtype)[0]
        assert_output_as_good(out.cpu(), lse.cpu(), *exact, eager, self.name)


@dataclass
class CacheCall(SequencesCall):
    """cache_after: the caches after the call."""

    cache_after: tuple[Tensor, Tensor]

    def assert_written(self, k_cache: Tensor, v_cache: Tensor, atol: float = 0.0) -> None:
        """The new rows are in the cache, and nothing else has changed."""
        for found, wanted in zip((k_cache, v_cache), self.cache_after, strict=True):
            close = torch.allclose(found.cpu(), wanted, rtol=0.0, atol=atol, equal_nan=True)
            assert close, self.name


class NeverFifth:
    """`never_fifth`, dense; positions are those of a sequence that ends with the keys."""

    def visible(self, b: int, h: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        p = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        return (p.clamp(min=0) + torch.arange(seqlen_k)) % 5 != 0

    def modify(self, scores: Tensor, b: int, h: int) -> Tensor:
        return scores


def never_fifth(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return (q + k) % 5 != 0


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], pairs: str) -> Tensor:
    """x (rows, heads, d), by the pairs of complex numbers."""
    n = cos.shape[1]
    out = x.clone()
    for row, p in enumerate(positions):
        turn = torch.complex(cos[p].double(), sin[p].double())
        a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if pairs == "neighbours" else (
            slice(0, n), slice(n, 2 * n)
        )  # fmt: skip
        z = torch.complex(x[row, :, a].double(), x[row, :, b].double()) * turn
        out[row, :, a], out[row, :, b] = z.real.to(x.dtype), z.imag.to(x.dtype)
    return out


def draw_call(
    rng: random.Random, dtype: torch.dtype, head_dim: int, longest: int, pages: tuple[int, ...]
) -> CacheCall:
    """pages: sizes to choose from; contiguous caches come beside them."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch, heads_kv, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2, 4))
    heads_q, capacity = heads_kv * group, rng.randint(4, longest)
    new = [rng.choice((1, 1, rng.randint(1, min(9, capacity)))) for _ in range(batch)]
    appends, packs_q, packs_new = rng.random() < 0.6, rng.random() < 0.3, rng.random() < 0.4
    if not packs_new:
        new = [new[0]] * batch
    lengths_q = new if appends else [rng.choice((1, rng.randint(1, 9)))] * batch
    if packs_q:
        lengths_q = [rng.randint(0, 9) for _ in range(batch)] if not appends else lengths_q
    elif len(set(lengths_q)) > 1:
        packs_q = True
    kind = rng.choice(("plain", "entries", "padding", "pages", "pages")) if pages else "plain"
    is_paged = kind == "pages"
    # of a table with more rows than sequences; and sequences that begin inside a page
    picks, pads = (is_paged and rng.random() < 0.4 for _ in range(2))
    page = rng.choice(pages) if is_paged else capacity
    per_sequence = -(-capacity // page)
    capacity = per_sequence * page
    entries = batch * per_sequence + rng.randint(0, 3) if kind != "plain" else batch
    table = torch.arange(batch)[:, None]
    keywords: dict[str, Any] = {}
    if kind in ("entries", "pages"):
        table = torch.randperm(entries, generator=generator)[: batch * per_sequence]
        table = table.view(batch, per_sequence)
        name, where = ("page_table", table) if is_paged else ("cache_batch_idx", table[:, 0])
        keywords[name] = where.to(INT)
        if picks:
            rows = torch.randperm(batch + 2, generator=generator)[:batch].to(INT)
            of_all = torch.full((batch + 2, per_sequence), -7, dtype=INT)
            of_all[rows.long()] = table.to(INT)
            keywords |= {"page_table": of_all, "cache_batch_idx": rows}
    elif kind == "padding":
        entries = batch
    used = [rng.randint(0, capacity - (n if appends else 0)) for n in new]
    padding = [0] * batch
    if kind == "padding" or pads:
        padding = [rng.randint(0, n) for n in used]
        keywords["cache_leftpad"] = torch.tensor(padding, dtype=INT)
    keywords["cache_seqlens"] = torch.tensor(used, dtype=INT)

    caches = [torch.full((entries, page, heads_kv, head_dim), torch.nan).to(dtype) for _ in "kv"]
    for b in range(batch):
        for row in range(padding[b], used[b]):
            for cache in caches:
                cache[table[b, row // page], row % page] = normal(heads_kv, head_dim)
    keywords |= {"k_cache": caches[0].clone(), "v_cache": caches[1].clone()}
    of_q = [normal(n, heads_q, head_dim) for n in lengths_q]
    q = torch.cat(of_q) if packs_q else torch.stack(of_q)
    if packs_q:
        keywords["cu_seqlens_q"] = torch.tensor([0, *accumulate(lengths_q)], dtype=INT)
    keywords["causal"] = rng.random() < 0.6
    keywords["window_size"] = (rng.randint(0, 40), -1) if rng.random() < 0.3 else (-1, -1)
    if rng.random() < 0.3:
        keywords["mask_mod"] = never_fifth
    if rng.random() < 0.3:
        keywords["learnable_sink"] = torch.randn(heads_q, generator=generator)
    if appends:
        news = [[normal(n, heads_kv, head_dim) for n in new] for _ in "kv"]
        join = torch.cat if packs_new else torch.stack
        keywords["k"], keywords["v"] = (join(x) for x in news)
        if packs_new:
            keywords["cu_seqlens_k_new"] = torch.tensor([0, *accumulate(new)], dtype=INT)
        if rng.random() < 0.6:
            pairs = rng.choice((head_dim // 2, head_dim // 4))
            angles = torch.rand(capacity + 9, pairs, generator=generator) * 6
            tables = angles.cos().to(dtype), angles.sin().to(dtype)
            keywords["rotary_cos"], keywords["rotary_sin"] = tables
            how = rng.choice(("neighbours", "halves"))
            keywords["rotary_interleaved"] = how == "neighbours"
            starts = used
            if rng.random() < 0.3:
                starts = [rng.randint(0, 9) for _ in used]
                keywords["rotary_seqlens"] = torch.tensor(starts, dtype=INT)
            advances = keywords["causal"] or keywords["window_size"][0] >= 0
            for b, start in enumerate(starts):
                at = [start + i for i in range(new[b])]
                news[0][b] = rotated(news[0][b], *tables, at, how)
                at = [start + i * advances for i in range(lengths_q[b])]
                of_q[b] = rotated(of_q[b], *tables, at, how)
        for b, n in enumerate(new):
            for i in range(n):
                row = used[b] + i
                for cache, rows in zip(caches, news, strict=True):
                    cache[table[b, row // page], row % page] = rows[b][i]
    ends = [n + (m if appends else 0) for n, m in zip(used, new, strict=True)]
    keys, values = (
        [
            cache[table[b]].flatten(0, 1)[padding[b] : ends[b]]
            for b in range(batch)
        ]
        for cache in caches
    )  # fmt: skip
    told = [x for x in keywords if x not in ("k_cache", "v_cache", "cache_seqlens")]
    name = (
        f"{kind} {page}, {lengths_q} queries, {used} used, new {new if appends else None}, {told}"
    )
    sequences = list(zip(of_q, keys, values, strict=True))
    return CacheCall(name, q, keywords, sequences, (caches[0], caches[1]))
