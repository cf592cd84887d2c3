"""Random calls whose sequences have the keys of an entry in common (`placed_attention.py`)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from placed_attention import INT, Draw, PlacedCall, Sequence


class CommonKeys(Draw):
    """Draws one call after the other from a seed.

    has_used_keys: sequences may use some of the keys only, for which there are no gradients.
    has_rows_behind: q may have rows behind the last sequence, of whose results kernels write none.
    groups: numbers of query heads of a KV head.
    """

    has_used_keys = has_rows_behind = False
    groups: tuple[int, ...] = (1, 2, 4)

    def call(self, number: int) -> PlacedCall:
        rng, dim = self.rng, self.head_dim
        batch, heads_kv, group = rng.choice((2, 3, 5)), rng.choice((1, 2)), rng.choice(self.groups)
        capacity = rng.randint(1, self.longest)
        longest = rng.choice((1, 3, 70, self.longest))
        slots_q = [rng.choice((0, rng.randint(1, longest), longest)) for _ in range(batch)]
        slots_q[0] = max(slots_q[0], 1 - sum(slots_q))
        keywords: dict[str, Any] = {
            "cu_seqlens_q": torch.tensor([0, *accumulate(slots_q)], dtype=INT)
        }
        lengths_q = slots_q
        if rng.random() < 0.3:
            lengths_q = [rng.randint(0, n) for n in slots_q]
            keywords["seqused_q"] = torch.tensor(lengths_q, dtype=INT)
        rows_behind = rng.choice((0, 5)) if self.has_rows_behind else 0
        q = self.normal(sum(slots_q) + rows_behind, heads_kv * group, dim)
        used_k = [capacity] * batch
        if self.has_used_keys:
            used_k = [rng.randint(0, capacity) for _ in range(batch)]
            keywords["seqused_k"] = torch.tensor(used_k, dtype=INT)
        k, v = (self.normal(1, capacity, heads_kv, dim) for _ in range(2))
        starts = self.starts(keywords, lengths_q, used_k)
        firsts = keywords["cu_seqlens_q"].tolist()
        sequences = [
            Sequence(slice(first, first + m), (0, slice(n)), m, n, start)
            for first, m, n, start in zip(firsts, lengths_q, used_k, starts, strict=False)
        ]
        return self.masked(f"call {number}", (q, k, v), keywords, sequences, [capacity] * batch)

    def add_columns(self, call: PlacedCall, slots_k: list[int], rows: int) -> None:
        """Of each sequence, or of all."""
        super().add_columns(call, slots_k, rows)
        if self.rng.random() < 0.5:
            assert call.columns is not None
            call.columns = call.columns[:1] * len(slots_k)
            call.keywords["startend_row_indices"] = call.columns[0][None]
