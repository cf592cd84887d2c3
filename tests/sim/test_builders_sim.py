"""Every mask that has a name, drawn, in the compiled forward, against its rule for each pair."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from cases import Case
from dense_masks import DenseMasks
from drawn_builders import DRAW, brute_force
from inputs import Inputs, make_inputs
from simulated_forward import run_sim
from torch import Tensor

from flash_mask_cute import ColumnMask, builders

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SEQLEN = 230
# Three key blocks and two query blocks; documents end inside of these.
TILES = {"tile_m": 128, "tile_n": 80}
HEADS = 2
# a block of padding, one of a mixture, and padding at the end
REAL = torch.tensor([[100 <= k < 210 and k % 7 != 0 for k in range(SEQLEN)]])
CACHE_SIZE = 50
# Draws that hide tiles, cut some and show others whole, of each form: causal or not, with a window.
NUMBERS = {
    "global_sliding_window": (37,), "prefix_lm_causal": (7,), "causal_document": (1, 10),
    "document": (10,), "prefix_lm_document": (3, 4), "share_question": (5,), "qk_sparse": (1,),
    "from_cu_seqlens": (1, 10), "from_document_ids": (9, 18), "from_position_ids": (0, 2),
    "key_padding": (3, 21), "prefix_tree": (1, 2), "image_blocks": (1, 6),
}  # fmt: skip
DRAWS = [(name, number) for name in DRAW for number in NUMBERS.get(name, (0,))]


@dataclass(frozen=True, kw_only=True)
class Written(DenseMasks):
    """A mask that is written out: bool (heads, seqlen_q, SEQLEN)."""

    seen: Tensor

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        return self.seen[head_idx]


def check(simulator: ModuleType, name: str, mask: ColumnMask, seen: Tensor) -> None:
    case = Case(name, 1, seen.shape[1], SEQLEN, HEADS, 1, head_dim=64)
    plain = make_inputs(case)
    keywords = {"startend_row_indices": mask}
    dense = Written(case, columns=None, aux=None, states=None, seen=seen)
    inputs = Inputs(case, plain.q, plain.k, plain.v, plain.keywords, keywords, dense)
    run_sim(simulator, inputs, (1,), config=TILES)


@pytest.mark.parametrize(("name", "number"), DRAWS)
def test_named_masks(simulator: ModuleType, name: str, number: int) -> None:
    drawn = DRAW[name](random.Random(f"{name} {number}"), SEQLEN)
    seen = brute_force(drawn.rule, SEQLEN, SEQLEN)
    check(simulator, name, drawn.mask, seen.expand(HEADS, -1, -1))


@pytest.mark.parametrize(("seqlen_q", "is_causal"), [(1, True), (60, False), (400, False)])
def test_padded_keys(simulator: ModuleType, seqlen_q: int, is_causal: bool) -> None:
    """One mask for a decode step, a chunk, and more queries than keys."""
    mask = builders.key_padding(REAL, causal=is_causal)
    seen = REAL.expand(seqlen_q, -1)
    check(simulator, "key_padding", mask, seen.expand(HEADS, -1, -1))


def cached(places: list[int]) -> Tensor:
    """Bool (queries, keys), of a full cache into whose place places[q] the key of query q goes."""
    cache: list[int] = []
    seen = torch.zeros(len(places), len(places), dtype=torch.bool)
    for q, place in enumerate(places):
        if q < CACHE_SIZE:
            cache.append(q)
        else:
            cache[place] = q
        seen[q, cache] = True
    return seen


def test_evicted_keys(simulator: ModuleType) -> None:
    """Each head evicts others; the draws are the builder's, what follows from them is not."""
    draws, again = (torch.Generator().manual_seed(3) for _ in range(2))
    mask = builders.random_eviction(SEQLEN, CACHE_SIZE, heads=HEADS, generator=draws)
    shape = 1, HEADS, SEQLEN
    places = torch.randint(CACHE_SIZE, shape, generator=again, dtype=torch.int32)[0].tolist()
    check(simulator, "random_eviction", mask, torch.stack([cached(of_head) for of_head in places]))
