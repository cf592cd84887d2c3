"""Layers wider than kernels (here 16 columns), refused or computed by sdpa as a caller asks."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
from tiny_models import IDS, LEFT, LENGTHS, PACKED, SEQ
from torch import Tensor
from transformers import masking_utils

from flash_mask_cute import builders
from flash_mask_cute.integrations.transformers import attention, masks_for, register
from flash_mask_cute.integrations.transformers import masks as masks_module
from flash_mask_cute.integrations.transformers.masks import AttentionMask, make_mask
from flash_mask_cute.parallel import Plan, sharded

LIMIT = 7e-6
NAME = register("mask_cute_wide", wide_layers="sdpa")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*as register.wide_layers"),
]


@pytest.fixture(autouse=True)
def narrow_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """The kernels' widest head is 16. Returns head_dim and mask of the calls of sdpa."""
    calls: list[tuple[int, Any]] = []
    true_sdpa = attention.sdpa_attention_forward

    def wide_layer(module: Any, query: Tensor, value: Tensor) -> str | None:
        width = query.shape[-1]
        return f"{type(module).__name__} has head dimension {width}" if width > 16 else None

    def counted(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        calls.append((q.shape[-1], mask))
        return true_sdpa(module, q, k, v, mask, **options)

    monkeypatch.setattr(attention, "wide_layer", wide_layer)
    monkeypatch.setattr(attention, "sdpa_attention_forward", counted)
    return calls


class Models(NamedTuple):
    """With equal weights. sdpa: transformers' own, in each layer."""

    eager: Any
    sdpa: Any
    ours: Any


@pytest.fixture(scope="module")
def gemma4() -> Models:
    """A sliding layer of 16 columns, and a global one of 32."""
    eager, sdpa = tiny.pair_of(tiny.config_of("gemma4"))
    sdpa.set_attn_implementation("sdpa")
    ours = tiny.pair_of(tiny.config_of("gemma4")).ours
    ours.load_state_dict(eager.state_dict())
    ours.set_attn_implementation(NAME)
    return Models(eager, sdpa, ours)


def gradients_of(model: Any, call: dict[str, Any], rows: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (model(**call, use_cache=False).logits.square() * rows[..., None]).sum().backward()
    return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": IDS},
    "packed": {"input_ids": IDS[:1], "position_ids": PACKED},
    "left": {"input_ids": IDS, "attention_mask": LEFT},
}


@pytest.mark.parametrize("situation", CALLS)
def test_logits_and_gradients(
    situation: str, gemma4: Models, narrow_kernels: list[tuple[int, Any]]
) -> None:
    """Against sdpa: rows of padding are NaN in eager attention by release and dtype."""
    call = CALLS[situation]
    rows = call.get("attention_mask", torch.ones_like(call["input_ids"]))
    right = gemma4.sdpa if situation == "left" else gemma4.eager
    found, wanted = (tiny.output_of(x, call | {"use_cache": False}) for x in (gemma4.ours, right))
    assert [head_dim for head_dim, _ in narrow_kernels] == [32]
    assert (narrow_kernels[0][1] is None) == (situation == "plain")
    assert found.isfinite().all()
    assert tiny.relative(found[rows.bool()], wanted[rows.bool()]) <= LIMIT
    of_ours, of_right = (gradients_of(x, call, rows) for x in (gemma4.ours, right))
    assert of_ours.keys() == of_right.keys()
    for name, grad in of_right.items():
        if grad.abs().max() > 1e-6:
            assert tiny.relative(of_ours[name], grad) <= 2e-5, name


def test_documents_by_lengths(gemma4: Models) -> None:
    call = {"input_ids": IDS[:1], "position_ids": PACKED, "use_cache": False}
    found = tiny.output_of(gemma4.ours, call | LENGTHS)
    wanted = tiny.output_of(gemma4.eager, call)
    assert tiny.relative(found, wanted) <= LIMIT


@pytest.mark.parametrize("padding", [None, LEFT], ids=["plain", "left"])
def test_image_blocks(padding: Tensor | None, gemma4: Models) -> None:
    """Tokens of an image see each other; wide layers see these blocks, too."""
    groups = torch.full((2, SEQ), -1)
    groups[0, 3:8], groups[1, 9:12] = 0, 0
    logits = []
    for model in (gemma4.ours, gemma4.eager):
        embeds = torch.empty(2, SEQ, 0)
        overlay = masking_utils.blockwise_overlay(groups)
        whole = masking_utils.create_causal_mask(
            model.config, embeds, padding, None, or_mask_function=overlay
        )
        masks = {"full_attention": whole, "sliding_attention": whole}
        call = {"input_ids": IDS, "attention_mask": masks, "use_cache": False}
        logits.append(tiny.output_of(model, call))
    rows = torch.ones_like(IDS) if padding is None else padding
    assert tiny.relative(logits[0][rows.bool()], logits[1][rows.bool()]) <= LIMIT
    causal = tiny.output_of(gemma4.eager, {"input_ids": IDS, "use_cache": False})
    assert tiny.relative(logits[0], causal) > 1e-2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str, gemma4: Models) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    found, wanted = (
        x.generate(IDS, attention_mask=LEFT, **options) for x in (gemma4.ours, gemma4.sdpa)
    )
    assert torch.equal(found, wanted)


@pytest.mark.shares(3)
@pytest.mark.parametrize("situation", CALLS)
def test_a_compiled_model(situation: str, gemma4: Models) -> None:
    call = CALLS[situation] | {"use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(gemma4.ours, backend="aot_eager", fullgraph=True)
    rows = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
    found, wanted = (tiny.output_of(x, call) for x in (compiled, gemma4.sdpa))
    assert tiny.relative(found[rows], wanted[rows]) <= LIMIT


@pytest.mark.shares(2)
@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_warns_once(compiled: bool, gemma4: Models) -> None:
    torch._dynamo.reset()
    model = torch.compile(gemma4.ours, backend="aot_eager") if compiled else gemma4.ours
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tiny.output_of(model, {"input_ids": IDS, "use_cache": False})
    found = [str(x.message) for x in caught if "wide_layers" in str(x.message)]
    assert len(found) == 1
    assert "Gemma4TextAttention has head dimension 32" in found[0]
    assert "sdpa_attention.sdpa_attention_forward" in found[0]


def test_the_default_refuses_and_names_the_option(gemma4: Models) -> None:
    model = tiny.pair_of(tiny.config_of("gemma4")).ours
    message = r"has head dimension 32.*register\(wide_layers='sdpa'\)"
    with pytest.raises(NotImplementedError, match=message):
        model(input_ids=IDS)


def test_another_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="wide_layers must be 'refuse' or 'sdpa', got 'eager'"):
        register("mask_cute_other", wide_layers="eager")


# -- a layer --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


def inputs(rows: int = SEQ, keys: int = SEQ) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, rows, 32), (1, 2, keys, 32), (1, 2, keys, 32)
    return [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]


def attend(mask: Any, rows: int = SEQ, keys: int = SEQ, **more: Any) -> Tensor:
    q, k, v = inputs(rows, keys)
    options: dict[str, Any] = {"scaling": 0.4, "wide_layers": "sdpa", **more}
    return attention.layer_attention(Layer().eval(), q, k, v, mask, **options)[0]


def dense(visible: Tensor, rows: int = SEQ, keys: int = SEQ, added: Any = 0.0) -> Tensor:
    q, k, v = inputs(rows, keys)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT * 0.4 + added).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


PLACE = torch.arange(SEQ)
CAUSAL = PLACE[:, None] >= PLACE


def test_a_mask_is_made_dense_once() -> None:
    mask = make_mask(
        1, SEQ, SEQ, mask_function=masking_utils.sliding_window_causal_mask_function(4)
    )
    assert isinstance(mask, AttentionMask)
    first = mask.dense()
    torch.testing.assert_close(attend(mask), dense(CAUSAL & (PLACE[:, None] - PLACE < 4)))
    assert mask.dense() is first


@pytest.mark.parametrize("rows", [1, 5], ids=["one query", "a part of a prompt"])
def test_queries_at_the_end_of_a_cache(rows: int) -> None:
    mask = make_mask(1, rows, SEQ, q_offset=SEQ - rows)
    torch.testing.assert_close(attend(mask, rows), dense(CAUSAL[-rows:], rows))


@pytest.mark.parametrize("kind", ["none", "not causal", "bools", "numbers"])
def test_masks_of_a_caller(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shown = (torch.rand(1, 1, SEQ, SEQ, generator=generator) < 0.5) | (PLACE[:, None] == PLACE)
    added = torch.randn(1, 4, SEQ, SEQ + 3, generator=generator)
    everything = torch.ones_like(CAUSAL)
    found, wanted = {
        "none": lambda: (attend(None), dense(CAUSAL)),
        "not causal": lambda: (attend(None, is_causal=False), dense(everything)),
        "bools": lambda: (attend(shown), dense(shown)),
        "numbers": lambda: (attend(added), dense(everything, added=added[..., :SEQ].double())),
    }[kind]()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("s_aux", {"s_aux": torch.zeros(4)}),
        ("softcap", {"softcap": 30.0}),
        ("position_bias", {"position_bias": torch.zeros(1, 4, SEQ, SEQ)}),
        ("block_indices", {"block_indices": torch.zeros(1, 4, SEQ, 1, dtype=torch.int32)}),
        ("cu_seq_lens_q without a mask", LENGTHS),
        ("sliding_window without a mask", {"sliding_window": 4}),
    ],
)
def test_what_sdpa_leaves_out_is_refused(name: str, more: dict[str, Any]) -> None:
    message = f"Layer has head dimension 32 and {name}, which sdpa does not compute"
    with pytest.raises(NotImplementedError, match=message):
        attend(None, **more)


def test_shards_are_refused() -> None:
    refused = pytest.raises(NotImplementedError, match=r"and parallel\.sharded, which sdpa")
    with sharded(Plan((((0, SEQ),),)), mask=builders.causal(SEQ)), refused:
        attend(None)


def test_a_dense_mask_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "MOST_DENSE", SEQ * SEQ - 1)
    mask = make_mask(
        1, SEQ, SEQ, mask_function=masking_utils.sliding_window_causal_mask_function(4)
    )
    with pytest.raises(NotImplementedError, match=rf"\(1, 1, {SEQ}, {SEQ}\) for sdpa has more"):
        attend(mask)


def test_masks_made_before(gemma4: Models) -> None:
    masks = masks_for(gemma4.ours, IDS)
    found = tiny.output_of(gemma4.ours, {"input_ids": IDS, "attention_mask": masks})
    wanted = tiny.output_of(gemma4.eager, {"input_ids": IDS})
    assert tiny.relative(found, wanted) <= LIMIT
