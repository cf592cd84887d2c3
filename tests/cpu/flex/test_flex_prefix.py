"""Keys that all queries see by a mask_mod, which kernels do not ask about: found, or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_mask_cute import builders
from flash_mask_cute.flex import lower_mod
from flash_mask_cute.mods.on_cpu import eval_mask_mod

FIRST = torch.tensor([5, 0, 12], dtype=torch.int32)
LATER = torch.tensor([3, 9, 1])
WORDS = torch.tensor([3, 1, 7, 2, 9])
NARROW = torch.tensor([100], dtype=torch.int8)
NUMBERS = torch.tensor([2.5, 4.0, float("nan")])
KEYS = 20


def odd(q: Any, k: Any) -> Any:
    return (k + WORDS[q % 5]) % 3 == 0


# by name, a mask and how many keys each sequence has in front
FORMS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "drafts": (builders.draft_tree([[-1, 0, 0]] * 3).mask_mod(FIRST), FIRST.tolist()),
    "behind": (lambda b, h, q, k: odd(q, k) | (k <= LATER[b]), (LATER + 1).tolist()),
    "turned": (lambda b, h, q, k: (FIRST[b] > k) | odd(q, k), FIRST.tolist()),
    "several": (
        lambda b, h, q, k: odd(q, k) | (k < FIRST[b]) | (LATER[b] >= k),
        torch.maximum(FIRST, LATER + 1).tolist(),
    ),
    "number": (lambda b, h, q, k: (k < 7) | odd(q, k), [7, 7, 7]),
    "float": (lambda b, h, q, k: (k < NUMBERS[b]) | odd(q, k), [3, 4, 0]),
    "of a head": (lambda b, h, q, k: (k < FIRST[h]) | odd(q, k), [0, 0, 0]),
    "of a query": (lambda b, h, q, k: (k < WORDS[q % 5]) | odd(q, k), [0, 0, 0]),
    "of a key": (lambda b, h, q, k: (k < WORDS[k % 5]) | odd(q, k), [0, 0, 0]),
    "and": (lambda b, h, q, k: (k < FIRST[b]) & odd(q, k), [0, 0, 0]),
    "last keys": (lambda b, h, q, k: (k >= FIRST[b]) | odd(q, k), [0, 0, 0]),
    # keys are compared as int8 there, and 156 is as -100
    "narrow": (lambda b, h, q, k: (k < NARROW) | odd(q, k), [0, 0, 0]),
    "all": (lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool) | (k < FIRST[b]), [0, 0, 0]),
}


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", FORMS)
def test_what_is_found(name: str) -> None:
    mask_mod, expected = FORMS[name]
    lowered = lower_mod(mask_mod, "mask_mod")
    prefix = lowered.mod.__flash_mask_prefix__  # type: ignore[attr-defined]
    if prefix is None:
        assert expected == [0, 0, 0]
        return
    places = torch.arange(3, dtype=torch.int32), torch.arange(KEYS, dtype=torch.int32)
    for b, first in enumerate(expected):
        in_prefix, visible = (
            eval_mask_mod(mod, lowered.aux_tensors, b, 0, *places) for mod in (prefix, lowered.mod)
        )
        assert in_prefix.tolist() == [[k < first for k in range(KEYS)]] * 3
        assert visible[:, :first].all()
