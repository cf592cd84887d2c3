"""Masks of `builders` in transformers; the warning for documents that no mask separates."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
from tiny_models import IDS, LEFT, LENGTHS, PACKED, SEQ
from torch import Tensor

from flash_mask_cute import ColumnMask, builders
from flash_mask_cute.integrations.transformers import masks_for, positions
from flash_mask_cute.integrations.transformers.masks import CallersMask, make_mask

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MASKS = {
    "a prefix": builders.prefix_lm_causal(SEQ, 6),
    "answers": builders.share_question([[7, 4, 6]]),
    "documents of each row": ColumnMask.cat(
        [builders.causal_document([5, 12]), builders.causal_document([9, 8])]
    ),
}
# those of llama4 attend in chunks
MODELS = [name for name in tiny.DECODERS if name != "llama4"]


def dense_for(model: Any, mask: ColumnMask) -> Tensor | dict[str, Tensor]:
    """The same mask as eager attention takes it, for each kind of layers."""
    config = model.config.get_text_config(decoder=True)
    shown = mask.dense(SEQ).expand(len(IDS), 1, SEQ, SEQ)
    row = torch.arange(SEQ)[:, None]
    near = torch.arange(SEQ) > row - (getattr(config, "sliding_window", None) or SEQ)

    def added(visible: Tensor) -> Tensor:
        return torch.where(visible, 0.0, torch.finfo(torch.float32).min)

    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return added(shown & near)
    return {x: added(shown & near if x == "sliding_attention" else shown) for x in kinds}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_dense_mask(name: str, kind: str) -> None:
    pair, mask = tiny.decoder(name), MASKS[kind]
    masks = masks_for(pair.ours, IDS, mask=mask)
    of_kinds = masks.values() if isinstance(masks, dict) else [masks]
    assert all(x.found.columns is mask for x in of_kinds)
    call = {"input_ids": IDS}
    error = tiny.error_of(
        pair,
        call | {"attention_mask": masks},
        eager=call | {"attention_mask": dense_for(pair.eager, mask)},
    )
    assert error < 2e-5
    plain = tiny.relative(
        tiny.output_of(pair.ours, call), tiny.output_of(pair.ours, call | {"attention_mask": masks})
    )
    assert plain > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_are_those_of_a_dense_mask(name: str) -> None:
    pair, mask = tiny.decoder(name), MASKS["answers"]
    found: list[dict[str, Tensor]] = []
    for model, masks in (
        (pair.ours, masks_for(pair.ours, IDS, mask=mask)),
        (pair.eager, dense_for(pair.eager, mask)),
    ):
        model.zero_grad()
        model(IDS, attention_mask=masks, labels=IDS).loss.backward()
        found.append({k: x.grad.clone() for k, x in model.named_parameters() if x.grad is not None})
        model.zero_grad()
    ours, eager = found
    assert ours.keys() == eager.keys() and len(ours) > 10
    for weight, wanted in eager.items():
        assert tiny.relative(ours[weight], wanted) < 1e-4, weight


def test_refusals() -> None:
    model, mask = tiny.decoder("llama").ours, MASKS["a prefix"]
    with pytest.raises(TypeError, match="mask must be a ColumnMask.*got 3"):
        masks_for(model, IDS, mask=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_mask, position_ids beside it"):
        masks_for(model, IDS, LEFT, PACKED, mask=mask)
    with pytest.raises(ValueError, match="made for 16 queries x 16 keys, and input_ids have 17"):
        masks_for(model, IDS, mask=builders.causal(16))
    with pytest.raises(ValueError, match="mask has 2 batch entries, and input_ids have 1"):
        masks_for(model, IDS[:1], mask=MASKS["documents of each row"])
    masks = masks_for(model, IDS[:1], mask=mask)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q beside masks_for"):
        model(IDS[:1], attention_mask=masks, **LENGTHS)
    with pytest.raises(NotImplementedError, match="generate.. does not take it"):
        masks[:, :, 1:, :]
    if not tiny.IS_OLD:
        with pytest.raises(NotImplementedError, match="'chunked_attention' see documents"):
            masks_for(tiny.decoder("llama4").ours, IDS, mask=mask)


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama", "attention_mask.*generate"), ("gemma2", "attention_mask.*generate")],
)
@pytest.mark.parametrize("more", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generate_refuses_it_by_name(name: str, text: str, more: dict[str, Any]) -> None:
    model = tiny.decoder(name).ours
    masks = masks_for(model, IDS, mask=MASKS["a prefix"])
    with pytest.raises((ValueError, NotImplementedError, AttributeError), match=text):
        model.generate(IDS, attention_mask=masks, max_new_tokens=2, **more)


def test_wide_layers_by_sdpa_see_the_same() -> None:
    """Layers that are wider than the kernels take a dense mask (`register(wide_layers="sdpa")`)."""
    pair, mask = tiny.decoder("gemma2"), MASKS["documents of each row"]
    masks = masks_for(pair.ours, IDS, mask=mask)
    for kind, wanted in dense_for(pair.eager, mask).items():
        assert torch.equal(masks[kind].dense(), wanted == 0), kind


def test_it_is_moved_as_what_it_is() -> None:
    masks = masks_for(tiny.decoder("mistral").ours, IDS, mask=MASKS["a prefix"])
    moved = masks.to("meta")
    assert isinstance(moved, CallersMask) and moved.found.left == masks.found.left == 4


# -- documents that no mask separates ----------------------------------------------------------


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch, nothing_warned: None) -> None:
    monkeypatch.setattr(positions, "_said", [])
    monkeypatch.setattr(positions, "_pending", deque())


def warnings_of(model: Any, *calls: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for call in calls:
            model(**call)
    return [str(x.message) for x in caught if "begin anew" in str(x.message)]


ROW = {"input_ids": IDS[:1]}


# Attention of Llama-4 does not get the positions.
@pytest.mark.parametrize("name", MODELS)
def test_packed_positions_beside_an_empty_cache_warn_once(name: str, nothing_said: None) -> None:
    call = ROW | {"position_ids": PACKED, "use_cache": True}
    (text,) = warnings_of(tiny.decoder(name).ours, call, call)
    assert "use_cache=False" in text and "return_flash_attn_kwargs=True" in text


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": PACKED, "use_cache": False},
        {"position_ids": PACKED, **LENGTHS},
        {"position_ids": torch.arange(SEQ)[None]},
        {"position_ids": torch.arange(SEQ)[None] + 5},
        # left padding, as generate numbers it
        {"position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)[1:], "attention_mask": LEFT[1:]},
        {},
    ],
)
def test_separated_documents_do_not_warn(more: dict[str, Any], nothing_said: None) -> None:
    assert not warnings_of(tiny.decoder("llama").ours, ROW | more)


def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, nothing_said: None) -> None:
    mask = make_mask(1, SEQ, SEQ)
    asked: list[Tensor] = []
    monkeypatch.setattr(positions, "_warn_if", asked.append)
    for _ in range(3):
        positions.watch_positions(mask, PACKED)
    assert len(asked) == 1 and bool(asked[0])


def test_an_answer_from_a_gpu_is_read_when_it_is_there(nothing_said: None) -> None:
    """No call waits: an event says whether the copy is done."""

    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

    event = Event()
    positions._pending.append((torch.ones(1, dtype=torch.bool), event))
    plain = ROW | {"position_ids": torch.arange(SEQ)[None]}
    model = tiny.decoder("llama").ours
    assert not warnings_of(model, plain)
    assert len(positions._pending) == 1
    event.is_done = True
    assert len(warnings_of(model, plain, plain)) == 1
    assert not positions._pending
