"""Every mask that has a name, in the compiled forward, against its rule for each pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import pytest
import simulated_forward
import torch
from cases import Case
from dense_masks import DenseMasks
from inputs import Inputs, make_inputs
from torch import Tensor

from flash_mask_cute import ColumnMask, builders

pytestmark = pytest.mark.sim

run_sim = partial(simulated_forward.run_sim, seeds=(1,))

SEQLEN = 230
# Three key blocks and two query blocks; documents end inside of these, one of them is empty.
TILES = {"tile_m": 128, "tile_n": 80}
HEADS = 2
LENGTHS = [90, 0, 77, 63]
PREFIXES = [20, 5, 0, 70]
PARTS = [[60, 40, 30], [70, 30]]
DROPPED = [(10, 60), (130, 90)]
# a block of padding, one of a mixture, and padding at the end
REAL = [100 <= k < 210 and k % 7 != 0 for k in range(SEQLEN)]
CACHE_SIZE = 50
# of the documents, as nodes of a forest: what each sees
PARENTS = [-1, 0, 0, -1]
SEEN = [{0}, {0, 1}, {0, 2}, {3}]
# the number of each document, as an image or as text
IMAGES = [0, -1, -1, 5]
DIFFUSED = 40
Rule = Callable[[int, int], bool]


def owners(lengths: list[int]) -> list[int]:
    return [i for i, length in enumerate(lengths) for _ in range(length)]


DOCUMENT = owners(LENGTHS)
START = [0, *accumulate(LENGTHS)]
QUESTION = owners([sum(parts) for parts in PARTS])
PART = [i for parts in PARTS for i in owners(parts)]


def in_same_document(q: int, k: int) -> bool:
    return DOCUMENT[q] == DOCUMENT[k]


def in_prefix(k: int) -> bool:
    return k - START[DOCUMENT[k]] < PREFIXES[DOCUMENT[k]]


def in_same_image(q: int, k: int) -> bool:
    return in_same_document(q, k) and IMAGES[DOCUMENT[k]] >= 0


def in_diffusion(q: int, k: int) -> bool:
    n = SEQLEN // 2
    of_q, of_k = q % n // DIFFUSED, k % n // DIFFUSED
    if q < n:
        return of_q == of_k if k < n else of_k < of_q
    return k >= n and of_k <= of_q


def in_same_dropped_range(q: int, k: int) -> bool:
    return any(a <= q < a + length and a <= k < a + length for a, length in DROPPED)


class Named(NamedTuple):
    build: Callable[[], ColumnMask]
    rule: Rule
    """Whether query q sees key k."""


MASKS = {
    "full": Named(lambda: builders.full(SEQLEN), lambda q, k: True),
    "causal": Named(lambda: builders.causal(SEQLEN), lambda q, k: k <= q),
    "sliding_window": Named(lambda: builders.sliding_window(SEQLEN, 70),
                            lambda q, k: q - 70 <= k <= q),
    "sink_window": Named(lambda: builders.sink_window(SEQLEN, 4, 50),
                         lambda q, k: k <= q and (k < 4 or q - k <= 50)),
    "global_sliding_window": Named(lambda: builders.global_sliding_window(SEQLEN, 9, 40),
                                   lambda q, k: abs(q - k) <= 40 or q < 9 or k < 9),
    "causal_document": Named(lambda: builders.causal_document(LENGTHS),
                             lambda q, k: k <= q and in_same_document(q, k)),
    "document": Named(lambda: builders.document(LENGTHS), in_same_document),
    "share_question": Named(
        lambda: builders.share_question(PARTS),
        lambda q, k: k <= q and QUESTION[q] == QUESTION[k] and PART[k] in (0, PART[q]),
    ),
    "causal_blockwise": Named(lambda: builders.causal_blockwise(LENGTHS),
                              lambda q, k: k <= q and (in_same_document(q, k) or q >= START[-2])),
    "prefix_lm_causal": Named(lambda: builders.prefix_lm_causal(SEQLEN, 100),
                              lambda q, k: k <= q or k < 100),
    "prefix_lm_document": Named(lambda: builders.prefix_lm_document(LENGTHS, PREFIXES),
                                lambda q, k: in_same_document(q, k) and (k <= q or in_prefix(k))),
    "qk_sparse": Named(lambda: builders.qk_sparse(SEQLEN, DROPPED),
                       lambda q, k: k <= q and not in_same_dropped_range(q, k)),
    "prefix_tree": Named(lambda: builders.prefix_tree(PARENTS, LENGTHS),
                         lambda q, k: k <= q and DOCUMENT[k] in SEEN[DOCUMENT[q]]),
    "from_tin_tout": Named(
        lambda: builders.from_tin_tout(
            torch.tensor([k + 50 - k % 50 for k in range(200)] + [SEQLEN] * 30)
        ),
        lambda q, k: k <= q and (k // 50 == q // 50 or min(k, q) >= 200),
    ),
    "image_blocks": Named(
        lambda: builders.image_blocks(torch.tensor([IMAGES[i] for i in DOCUMENT])),
        lambda q, k: k <= q or in_same_image(q, k),
    ),
    "image_blocks, window": Named(
        lambda: builders.image_blocks(torch.tensor([IMAGES[i] for i in DOCUMENT]), 40),
        lambda q, k: q - 40 <= k <= q or in_same_image(q, k),
    ),
    "block_diffusion": Named(lambda: builders.block_diffusion(SEQLEN // 2, DIFFUSED), in_diffusion),
    "key_padding": Named(lambda: builders.key_padding(padding()), lambda q, k: REAL[k]),
    "key_padding, causal": Named(lambda: builders.key_padding(padding(), causal=True),
                                 lambda q, k: k <= q and REAL[k]),
}  # fmt: skip


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
    run_sim(simulator, inputs, config=TILES)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("name", MASKS)
def test_named_masks(simulator: ModuleType, name: str) -> None:
    build, rule = MASKS[name]
    places = range(SEQLEN)
    seen = torch.tensor([[rule(q, k) for k in places] for q in places])
    check(simulator, name, build(), seen.expand(HEADS, -1, -1))


def padding() -> Tensor:
    return torch.tensor([REAL])


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(("seqlen_q", "is_causal"), [(1, True), (60, False), (400, False)])
def test_padded_keys(simulator: ModuleType, seqlen_q: int, is_causal: bool) -> None:
    """One mask for a decode step, a chunk, and more queries than keys."""
    mask = builders.key_padding(padding(), causal=is_causal)
    seen = padding().expand(seqlen_q, -1)
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


@pytest.mark.usefixtures("poisoned_allocations")
def test_evicted_keys(simulator: ModuleType) -> None:
    """Each head evicts others; the draws are the builder's, what follows from them is not."""
    draws, again = (torch.Generator().manual_seed(3) for _ in range(2))
    mask = builders.random_eviction(SEQLEN, CACHE_SIZE, heads=HEADS, generator=draws)
    shape = 1, HEADS, SEQLEN
    places = torch.randint(CACHE_SIZE, shape, generator=again, dtype=torch.int32)[0].tolist()
    check(simulator, "random_eviction", mask, torch.stack([cached(of_head) for of_head in places]))
