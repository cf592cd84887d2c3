"""Models of transformers whose rows lie in two processes, and what is refused there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

sys.path.append(str(Path(__file__).parent))

import tiny_models as tiny
from process_group import run_in_processes
from sharded_models import MODELS, ROWS, SEQLEN, compare

from flash_mask_cute import builders
from flash_mask_cute.parallel import Plan, sharded
from flash_mask_cute.parallel.sharding import current_sharding

MASK = builders.causal(SEQLEN)
IDS = torch.randint(3, 97, (1, 12))


def test_logits_and_gradients_are_those_of_one_process() -> None:
    for of_rank in run_in_processes(2, compare):
        assert len(of_rank) == 2 * len(MODELS)
        for name, errors in of_rank.items():
            assert max(errors) < 2e-5, (name, errors)


def test_it_ends_with_its_block() -> None:
    with sharded(ROWS, mask=MASK):
        with sharded(ROWS, mask=None, method="ring"):
            inner = current_sharding()
            assert inner is not None and inner.method == "ring" and inner.mask is None
        outer = current_sharding()
        assert outer is not None and outer.mask is MASK and outer.plan is ROWS
    assert current_sharding() is None


@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        ("llama", {"attention_mask": torch.tensor([[0] + [1] * 11])}, "attention_mask has padding"),
        ("llama", {"attention_mask": torch.zeros(1, 1, 12, 12)}, "attention_mask is given inside"),
        ("llama4", {}, "layer 0 of .* is 'chunked_attention', which is not supported inside"),
    ],
)
def test_what_a_rank_cannot_know(model: str, more: dict[str, Any], text: str) -> None:
    with sharded(ROWS, mask=MASK), pytest.raises(NotImplementedError, match=text):
        tiny.decoder(model).ours(IDS, **more, use_cache=False)


@pytest.mark.parametrize(
    ("plan", "mask", "method", "error", "text"),
    [
        ([[(0, 4)]], MASK, "ring", TypeError, "plan is a list"),
        (Plan([[(0, 4)]]), MASK, "ring", ValueError, "mask was made for 24 queries"),
        (ROWS, MASK, "rings", ValueError, "method='rings'"),
        (ROWS, lambda b, h, q, k: q >= k, "ring", NotImplementedError, "mask is a mask_mod"),
    ],
)
def test_refusals(plan: Any, mask: Any, method: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), sharded(plan, mask=mask, method=method):
        pass
