"""A small MiniMax-M3, whose indexer chooses key blocks for each query, gives what eager gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[dev]'")

import torch
import transformers
from transformers import DynamicCache, StaticCache

from flash_mask_cute.integrations.transformers import register

NAME = register()
LIMIT = 2e-5
# The modules warn of what newer releases rename.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(
        not hasattr(transformers, "MiniMaxM3VLTextConfig"), reason="has no MiniMax-M3"
    ),
]
SEQ = 72


def pair() -> tuple[Any, Any]:
    """Eager, and ours."""
    torch.manual_seed(0)
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=32, dense_intermediate_size=64,
        shared_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rotary_dim=8, num_local_experts=2,
        num_experts_per_tok=1, index_n_heads=2, index_head_dim=16, index_block_size=16,
        index_topk_blocks=2, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"], pad_token_id=0, bos_token_id=1, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    )  # fmt: skip
    eager = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM(config)
    with torch.no_grad():
        for x in eager.parameters():
            if x.dim() > 1:
                # scores of blocks that differ enough for one choice
                x.mul_(6)
    # of five blocks, each query of the second layer sees two
    assert eager.model.layers[1].self_attn.indexer.topk_blocks == 2
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(NAME)
    return eager.eval(), ours.eval()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and where they are no padding: to the right of the second row."""
    ids = torch.randint(1, 97, (2, SEQ), generator=torch.Generator().manual_seed(3))
    shown = torch.ones_like(ids)
    shown[1, 60:] = 0
    return ids * shown, shown


@pytest.mark.parametrize("padded", [False, True])
def test_a_training_step(padded: bool) -> None:
    ids, shown = tokens()
    given = {"input_ids": ids, "use_cache": False}
    if padded:
        given["attention_mask"] = shown
    found = []
    for model in pair():
        logits = model.train()(**given).logits
        used = logits[shown.bool()] if padded else logits
        used.float().square().mean().backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        found.append((used.detach(), gradients))
    (wanted, of_eager), (logits, of_ours) = found
    assert (logits - wanted).abs().amax() < LIMIT * wanted.abs().amax()
    assert of_ours.keys() == of_eager.keys()
    largest = max(x.abs().amax() for x in of_eager.values())
    for name, x in of_eager.items():
        assert (of_ours[name] - x).abs().amax() < LIMIT * largest, name


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_generation(kind: Any) -> None:
    ids, _ = tokens()
    found = []
    for model in pair():
        more = {"max_cache_len": SEQ + 32} if kind is StaticCache else {}
        cache = kind(config=model.config, **more)
        with torch.no_grad():
            logits, step = [], ids
            for _ in range(33):
                length = cache.get_seq_length()
                positions = torch.arange(length, length + step.shape[1])[None]
                out = model(
                    input_ids=step, past_key_values=cache, position_ids=positions, use_cache=True
                ).logits[:, -1:]
                logits.append(out)
                step = out.argmax(-1)
            found.append(torch.cat(logits, 1))
    assert (found[0] - found[1]).abs().amax() < LIMIT * found[0].abs().amax()
