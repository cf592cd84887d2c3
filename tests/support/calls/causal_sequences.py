"""Random calls of which some sequences are causal and others not, and what they should give,
sequence by sequence. Nothing here uses the package.

Rows of the cache that are not in use are NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from cache_calls import INT, SequencesCall, never_fifth
from torch import Tensor


@dataclass
class MixedCall(SequencesCall):
    """`flash_attn_varlen_func(x.q, x.k, x.v, **x.keywords)`."""

    k: Tensor
    v: Tensor

    def is_causal(self, b: int) -> bool:
        return bool(self.keywords["causal"][b])

    def turned(self) -> MixedCall:
        """The same, where causal sequences are not and the others are."""
        return replace(
            self, keywords=self.keywords | {"causal": (self.keywords["causal"] == 0).int()}
        )

    def host_keywords(self) -> dict[str, Any]:
        """As `_flash_attn_fwd` takes them."""
        left, right = self.keywords["window_size"]
        others = {name: x for name, x in self.keywords.items() if name != "window_size"}
        return others | {"window_size_left": left, "window_size_right": right}


def draw_mixed(rng: random.Random, dtype: torch.dtype, head_dim: int, longest: int) -> MixedCall:
    """longest: keys of a sequence at most."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch, heads_kv, group = rng.randint(2, 4), rng.choice((1, 2)), rng.choice((1, 2, 4))
    heads_q, is_paged, packs_q = heads_kv * group, rng.random() < 0.5, rng.random() < 0.7
    lengths_q = [rng.choice((1, 3, rng.randint(0, longest))) for _ in range(batch)]
    if not packs_q:
        lengths_q = [lengths_q[0]] * batch
    lengths_k = [rng.randint(0, longest) for _ in range(batch)]
    causal_per_seq = [rng.choice((0, 1, -3)) for _ in range(batch)]
    causal_per_seq[:2] = rng.sample((0, 1), 2)
    sequences = [
        (normal(n, heads_q, head_dim), *(normal(m, heads_kv, head_dim) for _ in "kv"))
        for n, m in zip(lengths_q, lengths_k, strict=True)
    ]
    of_q = [x for x, _, _ in sequences]
    q = torch.cat(of_q) if packs_q else torch.stack(of_q)
    keywords: dict[str, Any] = {"causal": torch.tensor(causal_per_seq, dtype=INT)}
    if packs_q:
        keywords["cu_seqlens_q"] = torch.tensor([0, *accumulate(lengths_q)], dtype=INT)
        keywords["max_seqlen_q"] = max(1, *lengths_q)
    page = rng.choice((3, 16, 64)) if is_paged else max(1, *lengths_k)
    per_sequence = -(-max(1, *lengths_k) // page)
    table = torch.randperm(batch * per_sequence, generator=generator).view(batch, per_sequence)
    if not is_paged:
        table = torch.arange(batch)[:, None]
    pools = [
        torch.full((table.numel(), page, heads_kv, head_dim), torch.nan).to(dtype) for _ in "kv"
    ]
    for b, (_, *keys_values) in enumerate(sequences):
        for row in range(lengths_k[b]):
            for pool, x in zip(pools, keys_values, strict=True):
                pool[table[b, row // page], row % page] = x[row]
    keywords["seqused_k"] = torch.tensor(lengths_k, dtype=INT)
    if is_paged:
        keywords["page_table"] = table.to(INT)
    sides = (None, rng.randint(0, 60)), (None, rng.randint(0, 60), -rng.randint(2, 5))
    keywords["window_size"] = tuple(rng.choice(of_side) for of_side in sides)
    left, right = keywords["window_size"]
    if left is not None and right is not None and left + right < 0:
        keywords["window_size"] = left, None
    if rng.random() < 0.3:
        keywords |= {"mask_mod": never_fifth, "q_start": "end"}
    if rng.random() < 0.3:
        keywords["learnable_sink"] = torch.randn(heads_q, generator=generator)
    name = (
        f"{lengths_q} queries, {lengths_k} keys, page {page}, {causal_per_seq}, {sorted(keywords)}"
    )
    return MixedCall(name, q, keywords, sequences, *pools)
