"""Models of transformers with our attention give what eager attention gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import tiny_models as tiny
import torch
import transformers
from tiny_models import CU, IDS, LEFT, LENGTHS, PACKED, PARTS, RIGHT, SEQ, Pair, error_of
from torch import Tensor
from transformers import DynamicCache, StaticCache

from flash_mask_cute.integrations.transformers import masks_for

LIMIT = 7e-6
# The modules warn of what newer releases rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHOWN = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
SHOWN[:, :3] = True
SHOWN[9:, 4:6] = False
BOOLS = SHOWN[None, None].expand(2, 1, SEQ, SEQ)
ADDED = torch.where(SHOWN, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, SEQ, SEQ)


def plain(pair: Pair) -> float:
    return error_of(pair, {"input_ids": IDS})


def left(pair: Pair) -> float:
    return error_of(pair, {"input_ids": IDS, "attention_mask": LEFT}, LEFT)


def right(pair: Pair) -> float:
    return error_of(pair, {"input_ids": IDS, "attention_mask": RIGHT}, RIGHT)


def packed(pair: Pair) -> float:
    return error_of(pair, {"input_ids": IDS[:1], "position_ids": PACKED, "use_cache": False})


def floats(pair: Pair) -> float:
    return error_of(pair, {"input_ids": IDS, "attention_mask": ADDED})


def bools(pair: Pair) -> float:
    """eager adds 1 to scores where a bool mask is True; what it means is compared."""
    call = {"input_ids": IDS, "attention_mask": BOOLS}
    return error_of(pair, call, eager={"input_ids": IDS, "attention_mask": ADDED})


def gradients_of(model: Any, call: dict[str, Any], rows: Tensor) -> dict[str, Tensor]:
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad()
    logits = model(**call, use_cache=False).logits
    (logits.square() * rows[..., None]).sum().backward()
    model.gradient_checkpointing_disable()
    model.eval()
    return {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


def checkpointed(pair: Pair) -> float:
    call = {"input_ids": IDS, "attention_mask": LEFT}
    found, wanted = (gradients_of(x, call, LEFT) for x in (pair.ours, pair.eager))
    assert found.keys() == wanted.keys()
    return max(tiny.relative(found[x], wanted[x]) for x in wanted if wanted[x].abs().max() > 1e-6)


def tokens_of(model: Any, **options: Any) -> Tensor:
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False} | options
    found = model.generate(IDS, attention_mask=LEFT, **options)
    assert isinstance(found, Tensor)
    return found


def generated(pair: Pair) -> float:
    assert torch.equal(tokens_of(pair.ours), tokens_of(pair.eager))
    return 0.0


def generated_by_beams(pair: Pair) -> float:
    found, wanted = (tokens_of(x, num_beams=3) for x in (pair.ours, pair.eager))
    assert torch.equal(found, wanted)
    return 0.0


def generated_static(pair: Pair) -> float:
    cache = (StaticCache(config=x.config, max_cache_len=SEQ + 12) for x in pair[::-1])
    found, wanted = (tokens_of(x, past_key_values=next(cache)) for x in pair[::-1])
    assert torch.equal(found, wanted)
    return 0.0


def prefilled_in_parts(pair: Pair, parts: tuple[int, ...] = (9, 5, 3)) -> float:
    """Also a part of 5 tokens behind a sliding window of 5, and then 3."""
    outs = []
    with torch.no_grad():
        for model in pair:
            cache = DynamicCache(config=model.config)
            end, logits = 0, []
            for ids in IDS.split(parts, 1):
                end += ids.shape[1]
                call = {"input_ids": ids, "attention_mask": LEFT[:, :end]}
                logits.append(model(**call, past_key_values=cache).logits)
            outs.append(torch.cat(logits, 1)[LEFT.bool()])
    return tiny.relative(outs[1], outs[0])


def alone(pair: Pair, ids: Tensor = IDS[:1]) -> Tensor:
    """Each document by itself in eager, which knows no documents of a packed row then."""
    with torch.no_grad():
        parts = [pair.eager(x, use_cache=False).logits for x in ids.split(PARTS, 1)]
    return torch.cat(parts, 1)


def documents(pair: Pair, **more: Any) -> float:
    call = {"input_ids": IDS[:1], "position_ids": PACKED, "use_cache": False} | more
    return tiny.relative(tiny.output_of(pair.ours, call), alone(pair))


def documents_by_lengths(pair: Pair) -> float:
    return documents(pair, **LENGTHS)


def documents_by_long_lengths(pair: Pair) -> float:
    cu = CU.long()
    return documents(pair, **(LENGTHS | {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}))


def documents_by_lengths_with_padding(pair: Pair) -> float:
    """A mask of ones keeps transformers from looking at position_ids."""
    return documents(pair, attention_mask=torch.ones_like(IDS[:1]), **LENGTHS)


SITUATIONS: dict[str, Callable[[Pair], float]] = {
    x.__name__: x
    for x in (
        plain, left, right, packed, floats, bools, checkpointed, generated, generated_by_beams,
        generated_static, prefilled_in_parts, documents, documents_by_lengths,
        documents_by_long_lengths, documents_by_lengths_with_padding,
    )
}  # fmt: skip


def is_wrong_in_transformers(name: str, situation: str) -> bool:
    """What transformers itself gets wrong, with eager attention as well."""
    if name == "gpt_oss":
        # its masks are made without position_ids
        return situation == "documents"
    if name == "llama4" and tiny.IS_OLD:
        # chunks are counted from the beginning of the row; static caches raise a TypeError
        return situation.startswith("documents") or situation == "generated_static"
    # the masks of its chunks are made of padding and places in the row, without position_ids
    return name == "llama4" and situation == "documents_by_lengths_with_padding"


CASES = [
    (name, situation)
    for name in tiny.DECODERS
    for situation in SITUATIONS
    if not is_wrong_in_transformers(name, situation)
]


@pytest.mark.shares(4)
@pytest.mark.parametrize(("name", "situation"), CASES)
def test_a_decoder(name: str, situation: str) -> None:
    assert SITUATIONS[situation](tiny.decoder(name)) <= LIMIT


@pytest.mark.parametrize("situation", ["left", "packed", "bools", "generated_static"])
def test_wide_heads_of_gemma4(situation: str) -> None:
    """The global layers of published models have a head dimension of 512."""
    pair = tiny.pair_of(tiny.config_of("gemma4", global_head_dim=512))
    assert SITUATIONS[situation](pair) <= LIMIT


COMPILED = {
    "plain": {"input_ids": IDS},
    "left": {"input_ids": IDS, "attention_mask": LEFT},
    "packed": {"input_ids": IDS[:1], "position_ids": PACKED},
}


def compiled_error(pair: Pair, call: dict[str, Any], mask: Any = None, wanted: Any = None) -> float:
    """Of a model compiled as one graph, for two batches. mask: for a batch. wanted: of a pair."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(pair.ours, backend="aot_eager", fullgraph=True)
    errors = []
    for shift in (0, 1):
        ids = (call["input_ids"] + shift) % 90 + 3
        again = call | {"input_ids": ids, "use_cache": False}
        given = again | ({} if mask is None else {"attention_mask": mask()})
        found = tiny.output_of(compiled, given)
        right = wanted(pair, ids) if wanted else tiny.output_of(pair.eager, again)
        rows = call.get("attention_mask", torch.ones_like(ids)).bool()
        errors.append(tiny.relative(found[rows], right[rows]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return max(errors)


@pytest.mark.shares(18)
@pytest.mark.parametrize("situation", COMPILED)
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_a_model_compiled_with_its_masks(name: str, situation: str) -> None:
    assert compiled_error(tiny.decoder(name), COMPILED[situation]) <= LIMIT


@pytest.mark.shares(18)
@pytest.mark.parametrize("situation", COMPILED)
@pytest.mark.parametrize("name", tiny.WITH_MASKS_BEFORE)
def test_a_compiled_model_with_masks_made_before(name: str, situation: str) -> None:
    pair, call = tiny.decoder(name), COMPILED[situation]
    wanted = None
    if (name, situation) == ("gpt_oss", "packed"):
        # masks that it makes itself know of no documents
        wanted = alone
    assert compiled_error(pair, call, lambda: masks_for(pair.ours, **call), wanted) <= LIMIT


PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
T5 = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["plain", "left", "right"])
def test_an_encoder(name: str, padding: Tensor | None) -> None:
    call = {"input_ids": IDS} | ({} if padding is None else {"attention_mask": padding})
    assert error_of(tiny.other(name), call, padding) <= LIMIT


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_a_model_of_images(name: str) -> None:
    assert error_of(tiny.other(name), {"pixel_values": PIXELS}) <= LIMIT


@pytest.mark.parametrize("padding", [None, LEFT, RIGHT], ids=["plain", "left", "right"])
def test_t5(padding: Tensor | None) -> None:
    call = T5 | ({} if padding is None else {"attention_mask": padding})
    assert error_of(tiny.other("t5"), call) <= LIMIT


def test_t5_learns_its_position_bias() -> None:
    pair = tiny.other("t5")
    rows = torch.ones_like(IDS)
    call = T5 | {"attention_mask": LEFT}
    found, wanted = (gradients_of(x, call, rows) for x in (pair.ours, pair.eager))
    biases = [x for x in wanted if "relative_attention_bias" in x]
    assert len(biases) == 2 and found.keys() == wanted.keys()
    for name in wanted:
        assert tiny.relative(found[name], wanted[name]) <= 2e-5, name


def test_t5_generates() -> None:
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    pair = tiny.other("t5")
    found, wanted = (x.generate(IDS, attention_mask=LEFT, **options) for x in pair[::-1])
    assert torch.equal(found, wanted)


def test_the_page_lists_models_that_cannot_be_loaded() -> None:
    """Those that look up a class by the name of the implementation, as in 5.17 and 5.24."""
    looks_up = re.compile(r"\b(?!ALL_)[A-Z0-9_]+\[(?:self\.)?config\._attn_implementation\]")
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.stem.removeprefix("modeling_").replace("_", "")
        for path in models.glob("*/modeling_*.py")
        if looks_up.search(path.read_text(encoding="utf-8"))
    }
    assert "data2vecvision" in found
    page = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text()
    listed = re.search(r"^Data2VecVision.*?at load\.", page, flags=re.S | re.M)
    assert listed is not None
    names = set(re.sub(r"[\s-]", "", listed[0]).lower().replace("and", ",").split(","))
    assert {name for name in found if not any(name in x for x in names)} == set()
