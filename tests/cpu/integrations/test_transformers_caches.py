"""Several queries into a cache that has keys: second turns, chunks, checks of drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
from seen_by_masks import dense, seen
from tiny_models import IDS, SEQ, Pair
from torch import Tensor
from transformers import DynamicCache, StaticCache, masking_utils
from transformers.models.llama import modeling_llama

from flash_mask_cute.integrations.transformers import masks
from flash_mask_cute.integrations.transformers.masks import make_mask

# Eager attention of the four layers of the last model is up to 1.8e-5 from float64 itself. Masks
# that move are wrong by 4e-4 and more.
LIMITS = dict.fromkeys(("llama", "gemma3", "gpt_oss", "gemma4"), 7e-6)
LIMITS["gemma4, shared layers"] = 6e-5
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma4": ("gemma4", {}),
    # the last layers take keys and values of others, after these have moved the cache
    "gemma4, shared layers": ("gemma4", {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
}  # fmt: skip


@functools.cache
def pair_of(name: str, window: int) -> Pair:
    kind, more = MODELS[name]
    windows = {"sliding_window": window} if "sliding_window" in tiny.DECODERS[kind][1] else {}
    return tiny.pair_of(tiny.config_of(kind, **more, **windows))


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=SEQ + 8)


CACHES: dict[str, Callable[[Any], Any]] = {"dynamic": dynamic, "static": static}
# How many tokens each call appends, and how many of these are taken back.
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "second turn": ((6, 0), (1, 0), (1, 0), (4, 0), (1, 0), (4, 0)),
    "prefill in chunks": ((5, 0), (5, 0), (5, 0), (2, 0)),
    "drafts": ((5, 0), (4, 2), (4, 3), (4, 0), (1, 0), (4, 1)),
}
PADDINGS = {"": torch.ones_like(IDS), "left": (torch.arange(SEQ) >= torch.tensor([[0], [3]])).int()}


def logits_of(
    model: Any, make: Callable[[Any], Any], steps: Any, padding: str, **call: Any
) -> Tensor:
    """(tokens, vocabulary) without padding; of the last of each step with logits_to_keep=1."""
    cache, first, found, is_real = make(model), 0, [], PADDINGS[padding]
    with torch.no_grad():
        for count, back in steps:
            end = first + count
            given = {"input_ids": IDS[:, first:end], "attention_mask": is_real[:, :end]}
            if not padding:
                del given["attention_mask"]
            logits = model(**given, past_key_values=cache, **call).logits
            found.append(logits[is_real[:, end - logits.shape[1] : end].bool()])
            first = end - back
            if back:
                cache.crop(-back)
    return torch.cat(found)


CASES = [
    (name, cache, steps)
    for name in MODELS
    for cache in CACHES
    for steps in STEPS
    # there, a static cache takes nothing back
    if not (steps == "drafts" and cache == "static" and tiny.IS_OLD)
]


@pytest.mark.shares(8)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("last", [False, True], ids=["all rows", "last row"])
@pytest.mark.parametrize(("name", "cache", "steps"), CASES)
def test_logits_are_those_of_eager(
    name: str, cache: str, steps: str, last: bool, padding: str
) -> None:
    # a window that is full has lost what would be taken back
    pair = pair_of(name, 64 if steps == "drafts" else 5)
    call = CACHES[cache], STEPS[steps], padding
    more = {"logits_to_keep": 1} if last else {}
    found, wanted = (logits_of(x, *call, **more) for x in (pair.ours, pair.eager))
    assert tiny.relative(found, wanted) <= LIMITS[name]


def every_second(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 2 == 0


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("steps", STEPS)
def test_an_overlay_that_stays_a_function(
    steps: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama", 5)
    overlaid = functools.partial(modeling_llama.create_causal_mask, and_mask_function=every_second)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", overlaid)
    call = "static", STEPS["second turn" if tiny.IS_OLD else steps], padding
    found, wanted = (logits_of(x, CACHES[call[0]], *call[1:]) for x in (pair.ours, pair.eager))
    assert tiny.relative(found, wanted) <= LIMITS["llama"]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["llama", "gemma4, shared layers"])
def test_masks_that_are_made_in_the_capture_of_a_graph(
    name: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interval is known there: a function reads the count in the graph."""
    monkeypatch.setattr(masks, "is_capturing", lambda: True)
    pair = pair_of(name, 5)
    call = CACHES["static"], STEPS["prefill in chunks"], padding
    found, wanted = (logits_of(x, *call) for x in (pair.ours, pair.eager))
    assert tiny.relative(found, wanted) <= LIMITS[name]


FORMS = {
    "column intervals": masking_utils.causal_mask_function,
    "a mask_mod": masking_utils.and_masks(masking_utils.causal_mask_function, every_second),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_keeps_the_count_that_it_was_made_with(form: str, rows: int) -> None:
    """Whole, in part, and joined with documents."""
    count = torch.tensor(4)
    call = {"q_length": rows, "kv_length": 12, "q_offset": count}
    call |= {"batch_size": 2, "mask_function": FORMS[form]}
    wanted = dense(call)
    mask = make_mask(**call)
    assert mask.form == ("a row of keys" if rows == 1 else form)
    count += rows
    assert torch.equal(seen(mask), wanted)
    assert torch.equal(seen(mask[:, :, -1:, :]), wanted[:, -1:])
    assert torch.equal(seen(mask[:, :, :, :]), wanted)
