"""The mask half of the door to transformers, against the dense masks that transformers makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
import transformers
from seen_by_masks import Waits, dense, seen
from tiny_models import IDS, LEFT, PACKED
from torch import Tensor
from transformers import DynamicCache, StaticCache, masking_utils

from flash_mask_cute.integrations.transformers import AttentionMask, masks_for, register
from flash_mask_cute.integrations.transformers.masks import make_mask
from flash_mask_cute.lowering import lower

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def functions(batch: int, length: int, old: bool = False) -> dict[str, Any]:
    """Mask functions as transformers composes them, over places in a sequence of some length."""
    m = masking_utils
    ends = torch.randint(1, length, (batch, 2), generator=generator(length)).sort(1).values
    documents = (torch.arange(length) >= ends[..., None]).sum(1)
    starts = torch.nn.functional.pad(ends, (1, 0)).gather(1, documents)
    places = torch.arange(length) - starts
    groups = torch.full((batch, length), -1)
    groups[:, 2:5], groups[:, 7:9] = 0, 1
    left = torch.arange(batch) * 2

    def packed(function: Any) -> Any:
        same = m.packed_sequence_mask_function(documents)
        return m.and_masks(
            function if old else lambda b, h, q, k: function(b, h, places[b, q], places[b, k]), same
        )

    sliding = m.sliding_window_causal_mask_function(4)
    images = m.blockwise_overlay(groups)
    return {
        "causal": m.causal_mask_function,
        "all": m.bidirectional_mask_function,
        "sliding": sliding,
        "both sides": m.sliding_window_bidirectional_mask_function(3),
        "chunks": m.chunked_causal_mask_function(5, torch.zeros(batch, dtype=torch.int64)),
        "chunks after padding": m.chunked_causal_mask_function(5, left),
        "images": m.or_masks(m.causal_mask_function, images),
        "sliding images": m.or_masks(sliding, images),
        "packed": packed(m.causal_mask_function),
        "packed sliding": packed(sliding),
        "packed images": m.and_masks(
            m.or_masks(packed(m.causal_mask_function), images),
            m.packed_sequence_mask_function(documents),
        ),
        "packed as in 5.17": m.and_masks(
            m.causal_mask_function, m.packed_sequence_mask_function(documents)
        ),
    }


KINDS = list(functions(1, 12))
# Where the queries and the keys of a call are in the sequence.
PLACES: dict[str, dict[str, Any]] = {
    "all": {"q_length": 13, "kv_length": 13},
    "a part": {"q_length": 4, "kv_length": 13, "q_offset": 9},
    "a sliding cache": {"q_length": 4, "kv_length": 8, "q_offset": 9, "kv_offset": 5},
    "an empty static cache": {"q_length": 6, "kv_length": 13, "q_offset": torch.tensor(0)},
    "a static cache": {"q_length": 3, "kv_length": 13, "q_offset": torch.tensor(7)},
    "one query": {"q_length": 1, "kv_length": 10, "q_offset": 9},
    "one query, static": {"q_length": 1, "kv_length": 13, "q_offset": torch.tensor(9)},
    "one query, sliding": {"q_length": 1, "kv_length": 4, "q_offset": 11, "kv_offset": 8},
}
PADDINGS: dict[str, Tensor | None] = {
    "": None,
    "left": torch.arange(13) >= torch.tensor([[0], [3]]),
    "right": torch.arange(10) < torch.tensor([[10], [8]]),  # shorter than a static cache
    "holes": torch.randint(0, 3, (2, 13), generator=generator(1)) > 0,
}


@pytest.mark.shares(8)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen(kind: str, place: str, padding: str) -> None:
    mask = PADDINGS[padding]
    needs = PLACES[place]["kv_length"] + PLACES[place].get("kv_offset", 0)
    if padding == "right" and isinstance(PLACES[place].get("q_offset"), int):
        # without a static cache it is as long as the keys
        assert mask is not None
        mask = torch.nn.functional.pad(mask, (0, max(0, needs - mask.shape[1])))
    call = PLACES[place] | {
        "batch_size": 2, "mask_function": functions(2, 13)[kind], "attention_mask": mask,
    }  # fmt: skip
    found = make_mask(**call)
    assert isinstance(found, AttentionMask)
    assert torch.equal(seen(found), dense(call))
    if "one query" not in place:
        assert found.form != "a mask_mod"


def test_what_masks_become() -> None:
    forms = {
        kind: make_mask(2, 13, 13, mask_function=functions(2, 13)[kind]).form for kind in KINDS
    }
    assert forms == {
        "causal": "a window, keys 0 to q + 0",
        "all": "a window, keys 0 to the last",
        "sliding": "a window, keys q - 3 to q + 0",
        "both sides": "a window, keys q - 3 to q + 3",
        "chunks": "documents, by column intervals",
        "chunks after padding": "documents, by column intervals",
        "images": "column intervals",
        "sliding images": "column intervals",
        "packed": "documents, by column intervals",
        "packed sliding": "documents, by column intervals",
        "packed images": "documents, by column intervals",
        "packed as in 5.17": "documents, by column intervals",
    }


def test_padding_that_hides_nothing_leaves_a_window() -> None:
    """Tokenizers give a mask of ones. After padding on the left, a sliding cache has none."""
    ones = torch.ones(2, 13, dtype=torch.bool)
    assert make_mask(2, 13, 13, attention_mask=ones).form == "a window, keys 0 to q + 0"
    sliding = {"mask_function": functions(2, 13)["sliding"], "attention_mask": PADDINGS["left"]}
    assert make_mask(2, 4, 8, 9, 5, **sliding).form.startswith("a window")
    assert make_mask(2, 13, 13, **sliding).form == "column intervals"


def test_other_overlays_stay_functions() -> None:
    def every_third(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % 3 == 0

    function = masking_utils.and_masks(masking_utils.causal_mask_function, every_third)
    call = {"batch_size": 2, "q_length": 13, "kv_length": 13, "mask_function": function}
    found = make_mask(**call, use_vmap=True)
    assert found.form == "a mask_mod"
    assert torch.equal(seen(found), dense(call))
    # one query, too: such a function may take indices that are no tensors of several
    call |= {"q_length": 1, "q_offset": 12}
    found = make_mask(**call, use_vmap=True)
    assert found.form == "a mask_mod"
    assert torch.equal(seen(found), dense(call))


@pytest.mark.shares(8)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_waits_for_the_device(kind: str, place: str, padding: str) -> None:
    """None for a window and in decoding, and one for what contents of tensors tell."""
    mask = PADDINGS[padding]
    call = PLACES[place] | {
        "batch_size": 2, "mask_function": functions(2, 13)[kind], "attention_mask": mask,
    }  # fmt: skip
    if padding == "right":
        call["attention_mask"] = torch.nn.functional.pad(mask, (0, 3))
    make_mask(**call)
    with Waits() as mode:
        found = make_mask(**call)
    is_window = found.form.startswith("a window") and mask is None
    assert len(mode.waits) == (0 if is_window or "one query" in place else 1)


@pytest.mark.parametrize("offset", [20, torch.tensor(20)], ids=["dynamic", "static"])
def test_a_step_of_decoding_is_few_operators(offset: Any) -> None:
    padding = torch.ones(2, 21, dtype=torch.bool)
    call = {"q_length": 1, "kv_length": 21, "q_offset": offset, "attention_mask": padding}
    with Waits() as mode:
        make_mask(2, **call)
    assert not mode.waits and mode.count <= 30


@pytest.fixture
def traces() -> Iterator[Callable[[], int]]:
    before = lower.traces
    yield lambda: lower.traces - before


@pytest.mark.parametrize("kind", KINDS)
def test_other_lengths_are_not_traced(kind: str, traces: Callable[[], int]) -> None:
    """One mask at the beginning and two further on tell which numbers change."""
    count = 0
    for step, length in enumerate((12, 13, 17, 20, 31)):
        function = functions(2, length)[kind]
        padding = torch.ones(2, length, dtype=torch.bool)
        make_mask(2, length, length, mask_function=function, attention_mask=padding)
        part = {"q_length": length - 4 - step, "q_offset": 4 + step, "kv_length": length}
        make_mask(2, **part, mask_function=function, attention_mask=padding)
        static = {"q_length": length - 4, "q_offset": torch.tensor(step), "kv_length": length}
        make_mask(2, **static, mask_function=function, attention_mask=padding)
        make_mask(2, length, length, mask_function=function)
        if step == 1:
            count = traces()
    assert traces() == count


def test_layers_share_a_mask_and_make_its_bounds_once() -> None:
    """Also when it is made in inference mode, whose tensors torch counts no changes of."""
    with torch.inference_mode():
        mask = make_mask(2, 13, 13, attention_mask=PADDINGS["left"])
        columns = mask.found.columns
        assert columns is not None and not columns.startend_row_indices.is_inference()
        first = seen(mask)
        assert torch.equal(seen(mask), first)


# -- a mask as an object --------------------------------------------------------------------------


def test_rows_of_a_mask() -> None:
    """Gemma-4 computes its last layers for the last rows only."""
    for kind in KINDS:
        for padding in PADDINGS.values():
            if padding is not None and padding.shape[1] < 13:
                continue
            call = {"mask_function": functions(2, 13)[kind], "attention_mask": padding}
            mask = make_mask(2, 13, 13, **call)
            whole = seen(mask)
            for rows in (slice(-1, None), slice(-3, None), slice(2, 7), slice(None)):
                part = mask[:, :, rows, :]
                assert part.shape == (2, 1, len(range(13)[rows]), 13)
                assert torch.equal(seen(part), whole[:, rows])


def test_a_row_is_sliced_to_itself() -> None:
    mask = make_mask(2, 1, 10, 9, attention_mask=PADDINGS["left"][:, :10])
    assert torch.equal(seen(mask[:, :, slice(-1, None), :]), seen(mask))


ALL = slice(None)


@pytest.mark.parametrize(
    "index",
    [0, (0,), (ALL, 0), (..., slice(0, 3)), (ALL, ALL, slice(0, 9, 2), ALL),
     (ALL, ALL, ALL, slice(0, 3))],
)  # fmt: skip
def test_other_parts_are_refused(index: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"attention_mask\[.*\]: masks .* are no tensors"):
        make_mask(1, 13, 13)[index]


def test_a_model_that_computes_with_its_mask_is_told() -> None:
    mask = make_mask(1, 13, 13)
    with pytest.raises(
        AttributeError, match=r"attention_mask\.dtype: .* attn_implementation='sdpa'"
    ):
        mask.dtype  # noqa: B018
    assert not hasattr(mask, "dtype")
    assert repr(mask) == "AttentionMask(shape=(1, 1, 13, 13), a window, keys 0 to q + 0)"


def test_what_models_ask_of_a_mask_before_they_pass_it_on() -> None:
    mask = make_mask(2, 13, 13)
    assert mask.ndim == mask.dim() == len(mask.shape) == 4
    assert mask.size() == (2, 1, 13, 13) and mask.size(-1) == mask.size(2) == 13
    assert mask.to(torch.device("cpu")) is mask.to(device="cpu") is mask.to("cpu") is mask
    assert mask == mask and mask != make_mask(2, 13, 13) and mask is not None and mask in {mask}


ASKED: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda x: x.dtype,
    "bool": lambda x: x.bool(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "to(torch.bool)": lambda x: x.to(torch.bool),
    "to(torch.float32)": lambda x: x.to(device="cpu", dtype=torch.float32),
    "add": lambda x: x + 1,
    "radd": lambda x: 1.0 + x,
    "in add": lambda x: torch.ones(2, 1, 13, 13) + x,
    "rsub": lambda x: 1.0 - x,
    "invert": lambda x: ~x,
    "eq": lambda x: x == 0,
    "lt": lambda x: x < -1,
    "masked_fill": lambda x: torch.ones(2, 1, 13, 13).masked_fill(x, 0),
    "len": len,
    "where": lambda x: torch.where(x, 1.0, 0.0),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_model_computes_with_a_mask_is_refused_by_name(asked: str) -> None:
    said = asked.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(NotImplementedError, match=f"attention_mask.*{said}.* are no tensors"):
        ASKED[asked](make_mask(2, 13, 13))


@pytest.mark.parametrize("shape", [(2,), (2, 1, 13), (2, 1, 1, 1, 13)])
def test_a_padding_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(batch, keys\)"):
        make_mask(2, 13, 13, attention_mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_moves_as_accelerate_moves_it() -> None:
    for kind in ("causal", "images"):
        mask = make_mask(2, 13, 13, mask_function=functions(2, 13)[kind])
        assert mask.to("cpu", non_blocking=True) is mask
        moved = mask.to("meta")
        assert moved.device.type == "meta" and moved.form == mask.form
        if mask.found.columns is not None:
            assert moved.found.columns.device.type == "meta"
    row = make_mask(2, 1, 13, torch.tensor(12)).to("meta")
    assert row.found.row.device.type == row.found.used.device.type == "meta"


# -- register, masks_for --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_mask_cute", "my_flash", "flash_attention_2"])
def test_a_name_with_flash_in_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"name='{name}' has 'flash' in it, .*hub.*'mask_cute'"):
        register(name)


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "flex_attention", "paged|mask_cute"])
def test_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(ValueError, match="means something else in transformers"):
        register(name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(TypeError, match="name must be a string, got int"):
        register(3)  # type: ignore[arg-type]


def test_registering_again_and_by_another_name() -> None:
    assert register() == register() == "mask_cute"
    assert register("other") == "other"
    pair = tiny.pair_of(tiny.config_of("mistral", num_hidden_layers=1))
    pair.ours.set_attn_implementation("other")
    call = {"input_ids": IDS, "attention_mask": LEFT}
    assert tiny.error_of(pair, call, LEFT) <= 7e-6


@pytest.mark.parametrize("name", tiny.WITH_MASKS_BEFORE)
def test_masks_made_before_are_those_of_the_model(name: str) -> None:
    model = tiny.decoder(name).ours
    for call in ({}, {"attention_mask": LEFT}):
        masks = masks_for(model, IDS, **call)
        each = masks.values() if isinstance(masks, dict) else [masks]
        assert all(x.shape == (2, 1, 17, 17) for x in each)
        found = tiny.output_of(model, {"input_ids": IDS, "attention_mask": masks})
        wanted = tiny.output_of(model, {"input_ids": IDS} | call)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    masks = masks_for(model, IDS[:1], position_ids=PACKED)
    each = masks.values() if isinstance(masks, dict) else [masks]
    assert all(x.form.startswith("documents") for x in each)


def test_masks_for_other_models_are_refused() -> None:
    pair = tiny.decoder("llama")
    with pytest.raises(ValueError, match="attn_implementation='eager', which register"):
        masks_for(pair.eager, IDS)
    for name in ("bert", "t5"):
        with pytest.raises(ValueError, match="is for decoders"):
            masks_for(tiny.other(name).ours, IDS)


# -- whole models, where other situations have no place -------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert", "t5"])
def test_attentions_are_refused_by_name(name: str) -> None:
    model = (tiny.decoder(name) if name in tiny.DECODERS else tiny.other(name)).ours
    call = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model(**call, output_attentions=True)
    with pytest.raises(ValueError, match="not supported .* mask_cute.*'eager'"):
        model.config.output_attentions = True


GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("GPT2Config", tiny.SIZES | GPT2),
        ("OPTConfig", tiny.SIZES | OPT),
        ("Dinov2Config", tiny.IMAGE),
        ("SiglipVisionConfig", tiny.IMAGE),
        ("SiglipConfig", {"vision_config": tiny.IMAGE, "text_config": tiny.TEXT}),
    ],
)
def test_attentions_are_refused_where_models_do_not_pass_the_argument_on(
    config: str, sizes: dict[str, Any]
) -> None:
    """transformers collects them from what layers return, and would answer an empty tuple."""
    model = tiny.pair_of(getattr(transformers, config)(**sizes), transformers.AutoModel).ours
    given = {"pixel_values": torch.randn(2, 3, 32, 32), "input_ids": IDS}
    names = inspect.signature(model.forward).parameters
    call = {name: value for name, value in given.items() if name in names}
    with torch.no_grad():
        model(**call, output_hidden_states=True)
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model(**call, output_attentions=True)
    with torch.no_grad():
        model(**call)


def test_dropout_is_refused_by_name() -> None:
    model = tiny.pair_of(tiny.config_of("llama", attention_dropout=0.1)).ours
    model(IDS)
    with pytest.raises(NotImplementedError, match=r"dropout=0\.1 in training"):
        model.train()(IDS)


def test_a_model_that_would_leave_our_masks_out() -> None:
    """Doge joins its mask with one of its own, and passes over a `BlockMask`."""
    pair = tiny.pair_of(transformers.DogeConfig(**tiny.SIZES))
    for padding in (None, LEFT):
        call = {"input_ids": IDS, "attention_mask": padding}
        assert tiny.error_of(pair, call, padding) <= 7e-6
    found, wanted = (x.generate(IDS, max_new_tokens=5, do_sample=False) for x in pair)
    assert torch.equal(found, wanted)


INDEXED = {
    "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
}  # fmt: skip


LIKE_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4,
}  # fmt: skip
MPT = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}


@pytest.mark.parametrize(
    ("config", "sizes", "said"),
    [
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "attention_mask in add"),
        ("DeepseekV32Config", INDEXED, r"attention_mask\[.*\]"),
        ("LEDConfig", LIKE_BART | {"attention_window": [8, 8]}, "attention_mask in add"),
        ("MptConfig", MPT, r"attention_mask\.to\(torch\.bool\)"),
        ("MvpConfig", LIKE_BART, "attention_mask in add"),
        ("TrOCRConfig", LIKE_BART, "attention_mask in add"),
        ("XGLMConfig", LIKE_BART, "attention_mask in add"),
    ],
)
def test_models_that_compute_with_masks_are_refused_by_name(
    config: str, sizes: dict[str, Any], said: str
) -> None:
    """In a call, and with masks of a static cache, which come to the model as they are."""
    made = getattr(transformers, config)(**(tiny.SIZES | sizes))
    kind = transformers.AutoModelForCausalLM
    if made.is_encoder_decoder and config != "TrOCRConfig":
        kind = transformers.AutoModelForSeq2SeqLM
    model = tiny.pair_of(made, kind).ours
    refused = pytest.raises(
        NotImplementedError, match=f"{said}: .*attn_implementation='sdpa' or 'eag"
    )
    with refused:
        model(IDS)
    with refused:
        model.generate(IDS, max_new_tokens=2, cache_implementation="static", disable_compile=True)


def test_gpt2_with_masks_made_before() -> None:
    """It asks a mask for its number of dimensions."""
    pair = tiny.pair_of(transformers.GPT2Config(**(tiny.SIZES | GPT2)))
    for call in ({}, {"attention_mask": LEFT}):
        found = tiny.output_of(
            pair.ours, {"input_ids": IDS, "attention_mask": masks_for(pair.ours, IDS, **call)}
        )
        wanted = tiny.output_of(pair.eager, {"input_ids": IDS} | call)
        rows = LEFT.bool() if call else torch.ones_like(LEFT).bool()
        # with padding, positions are those of the caller
        assert tiny.relative(found[rows], wanted[rows]) <= 7e-6
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "cache_implementation": "static"}
    options |= {"disable_compile": True, "do_sample": False, "attention_mask": LEFT}
    found, wanted = (x.generate(IDS, **options) for x in pair)
    assert torch.equal(found, wanted)


def test_minimax_generates() -> None:
    """Layer 0 is linear and keeps no keys, and eager would see keys of padding in its cache."""
    sizes = {"layer_types": ["linear_attention", "full_attention"], "block_size": 8}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    pair = tiny.pair_of(transformers.MiniMaxConfig(**(tiny.SIZES | sizes)))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for padding in (torch.ones_like(LEFT), LEFT):
        found = pair.ours.generate(IDS, attention_mask=padding, **options)
        wanted = pair.eager.generate(IDS, attention_mask=padding, use_cache=False, **options)
        assert torch.equal(found, wanted)
    with torch.no_grad():
        outs = []
        for model in pair:
            cache = model(IDS[:, :9], use_cache=True).past_key_values
            outs.append(model(IDS[:, 9:10], past_key_values=cache).logits)
    assert tiny.relative(outs[1], outs[0]) <= 7e-6


def test_continuous_batching_is_refused_by_transformers() -> None:
    """It takes attention whose name has "flash" in it, and its own."""
    model = tiny.decoder("llama").ours
    with pytest.raises(ValueError, match="mask_cute.* is not supported"):
        model.generate_batch(inputs=[[5, 6, 7]])


@pytest.mark.parametrize("name", ["BartConfig", "MarianConfig"])
def test_a_decoder_that_looks_at_an_encoder(name: str) -> None:
    """Masks of unequal lengths, with padding on the side of the keys."""
    config = getattr(transformers, name)(
        vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, pad_token_id=0, decoder_start_token_id=1, eos_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    pair = tiny.pair_of(config, transformers.AutoModelForSeq2SeqLM)
    call = {"input_ids": IDS, "attention_mask": LEFT, "decoder_input_ids": IDS[:, :9]}
    assert tiny.error_of(pair, call) <= 7e-6
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    found, wanted = (x.generate(IDS, attention_mask=LEFT, **options) for x in pair)
    assert torch.equal(found, wanted)


def test_a_decoder_that_looks_both_ways() -> None:
    pair = tiny.pair_of(tiny.config_of("llama", is_causal=False))
    call = {"input_ids": IDS, "attention_mask": LEFT}
    assert tiny.error_of(pair, call, LEFT) <= 7e-6
    causal = tiny.output_of(tiny.decoder("llama").eager, call)
    assert tiny.relative(tiny.output_of(pair.ours, call), causal) > 0.01


def test_last_layers_of_gemma4_for_the_last_row() -> None:
    """They share keys and values of others, and in generation are computed for one row."""
    more = {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    pair = tiny.pair_of(tiny.config_of("gemma4", **more))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found, wanted = (x.generate(IDS, attention_mask=LEFT, **options) for x in pair)
    assert torch.equal(found, wanted)


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_compiled_decoding_in_a_static_cache(name: str) -> None:
    """One graph serves all steps, as `generate` compiles it: masks are made before."""
    pair = tiny.decoder(name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(pair.ours, backend="aot_eager", fullgraph=True)
    outs = []
    for model, step in ((pair.eager, pair.eager), (pair.ours, compiled)):
        cache = StaticCache(config=model.config, max_cache_len=20)
        tokens, logits = IDS[:, :4], []
        with torch.no_grad():
            for i in range(5):
                ids = tokens if i == 0 else IDS[:, 3 + i : 4 + i]
                padding = torch.ones(2, 4 + i, dtype=torch.int64)
                padding[1, :2] = 0
                inputs = model.prepare_inputs_for_generation(
                    ids, attention_mask=padding, past_key_values=cache, use_cache=True,
                    is_first_iteration=i == 0,
                )  # fmt: skip
                run = model if i == 0 else step
                logits.append(run(**inputs).logits[:, -1])
        outs.append(torch.stack(logits))
    assert tiny.relative(outs[1], outs[0]) <= 7e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.shares(4)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "inside"])
def test_a_compiled_training_step(name: str, before: bool) -> None:
    """Forward and backward as one graph each, with masks of padding made before or inside."""
    pair, call = tiny.decoder(name), {"input_ids": IDS, "attention_mask": LEFT}
    torch._dynamo.reset()
    found = {}
    for model in pair:
        run, given = model, call | {"use_cache": False}
        if model is pair.ours:
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
            if before:
                given = given | {"attention_mask": masks_for(model, **call)}
        model.zero_grad()
        (run(**given).logits.square() * LEFT[..., None]).sum().backward()
        found[model] = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
    assert found[pair.ours].keys() == found[pair.eager].keys()
    for each, wanted in found[pair.eager].items():
        assert tiny.relative(found[pair.ours][each], wanted) <= 2e-5, each


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_in_float32_as_peft_keeps_them(name: str) -> None:
    """In bfloat16: no further from float32 than the same model whose norms are bfloat16, twice."""
    exact = tiny.output_of(tiny.decoder(name).eager, {"input_ids": IDS})
    errors = []
    for keeps in (True, False):
        model = tiny.pair_of(tiny.config_of(name)).ours.bfloat16()
        if keeps:
            for part, weight in model.named_parameters():
                if "q_norm" in part or "k_norm" in part:
                    weight.data = weight.data.float()
        found = tiny.output_of(
            model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
        ).float()
        errors.append(tiny.relative(found, exact))
    assert errors[0] <= 2 * errors[1]


def test_autocast_of_a_model() -> None:
    pair = tiny.decoder("gemma2")
    exact = tiny.output_of(pair.eager, {"input_ids": IDS})
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (tiny.output_of(x, {"input_ids": IDS}).float() for x in pair[::-1])
    assert tiny.relative(found, exact) <= 2 * tiny.relative(wanted, exact)


def test_a_cache_of_one_batch_serves_beams_and_crops() -> None:
    pair = tiny.decoder("llama")
    outs = []
    for model in pair:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS[:, :9], past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.crop(-2)
            outs.append(model(IDS.repeat_interleave(2, 0)[:, 7:12], past_key_values=cache).logits)
    assert tiny.relative(outs[1], outs[0]) <= 7e-6
