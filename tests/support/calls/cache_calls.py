"""Random calls of `flash_attn_with_kvcache`, and what they should give, sequence by sequence.

Rows of the cache that are not in use are NaN. Nothing here uses the package.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

INT = torch.int32
NEG_INF = float("-inf")


@dataclass
class CacheCall:
    """q, and the keywords of the call. slots (batch, capacity): entry and row of the cache where a
    row of a sequence lies, with padding; padding: of each sequence; expected caches after it."""

    name: str
    q: Tensor
    keywords: dict[str, Any]
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    cache_after: tuple[Tensor, Tensor]

    def attend(self, dtype: torch.dtype, device: Any = "cpu") -> tuple[Tensor, Tensor]:
        """(out, lse) in a dtype, laid out as those of the call."""
        outs, lses = [], []
        left, right = self.keywords["window_size"]
        for q, k, v in zip(self.queries, self.keys, self.values, strict=True):
            q, k, v = (x.to(dtype) for x in (q, k, v))
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            p = torch.arange(len(q))[:, None] + len(k) - len(q)
            j = torch.arange(len(k))[None]
            hidden = torch.zeros((len(q), len(k)), dtype=torch.bool)
            if self.keywords["causal"]:
                hidden |= j > p
            if left >= 0:
                hidden |= j < p - left
            if right >= 0:
                hidden |= j > p + right
            if self.keywords.get("mask_mod") is not None:
                hidden |= (p.clamp(min=0) + j) % 5 == 0
            scores = scores.masked_fill(hidden, NEG_INF)
            sink = self.keywords.get("learnable_sink")
            if sink is not None:
                of_sink = sink.to(dtype)[:, None, None].expand(-1, len(q), 1)
                scores = torch.cat([scores, of_sink], dim=2)
                v = (
                    torch.cat([v, torch.zeros_like(v[:1])])
                    if len(v)
                    else v.new_zeros(1, *v.shape[1:])
                )
            lse = torch.logsumexp(scores, dim=2) if scores.shape[2] else scores.sum(2) - torch.inf
            weights = torch.exp(scores - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            lses.append(lse)
        if self.q.dim() == 3:
            return torch.cat(outs), torch.cat(lses, dim=1)
        return torch.stack(outs), torch.stack(lses)

    def assert_close(self, out: Tensor, lse: Tensor) -> None:
        exact, exact_lse = self.attend(torch.float64)
        eager, _ = self.attend(self.q.dtype)
        out, lse = out.cpu(), lse.cpu()
        assert torch.equal(lse == NEG_INF, exact_lse == NEG_INF), self.name
        seen = exact_lse > NEG_INF
        assert ((lse.double() - exact_lse)[seen].abs() < 6e-4).all(), self.name
        assert out.isfinite().all(), f"{self.name}: out is not finite"
        if out.numel() == 0:
            return
        error, of_eager = ((x.double() - exact).abs().max().item() for x in (out, eager))
        allowed = 2 * of_eager + torch.finfo(out.dtype).eps * exact.abs().max().item()
        allowed = max(allowed, 2.0**-18 * exact.abs().max().item())
        assert error <= allowed, f"{self.name}: off by {error:.3g}, allowed {allowed:.3g}"

    def assert_written(self, k_cache: Tensor, v_cache: Tensor, atol: float = 0.0) -> None:
        """The new rows are in the cache, and nothing else has changed."""
        for found, wanted in zip((k_cache, v_cache), self.cache_after, strict=True):
            close = torch.allclose(found.cpu(), wanted, rtol=0.0, atol=atol, equal_nan=True)
            assert close, self.name


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
    return CacheCall(name, q, keywords, of_q, keys, values, (caches[0], caches[1]))
