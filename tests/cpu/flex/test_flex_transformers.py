"""transformers' `attn_implementation="flex_attention"`, by `patch_flex_attention`."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_mask_cute import flex_attention, patch_flex_attention

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "head_dim": 8,
}  # fmt: skip
WINDOWED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    if "transformers.integrations.flex_attention" in sys.modules:
        pytest.skip("transformers has torch's flex_attention already: run this file by itself")
    with patch_flex_attention():
        found = pytest.importorskip(
            "transformers", reason="transformers is not installed: extra `transformers`"
        )
        from transformers.integrations import flex_attention as integration
    assert integration.flex_attention is flex_attention
    assert torch_flex.flex_attention is not flex_attention
    yield found


def models(transformers: Any, name: str, **sizes: Any) -> tuple[Any, Any]:
    """The same weights, eager and by flex_attention."""
    config_name = {"Gemma3ForCausalLM": "Gemma3TextConfig"}.get(
        name, name.replace("ForCausalLM", "Config")
    )
    config = getattr(transformers, config_name)(**SIZES, **sizes)
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    # a model writes into the config that it is given
    eager, flex = (
        cls._from_config(copy.deepcopy(config), attn_implementation=how)
        for how in ("eager", "flex_attention")
    )
    flex.load_state_dict(eager.state_dict())
    return eager, flex


@pytest.mark.shares(4)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("LlamaForCausalLM", {}), ("Gemma3ForCausalLM", {**WINDOWED, "attn_logit_softcapping": 5.0})],
)
def test_against_eager(transformers: Any, name: str, sizes: dict[str, Any]) -> None:
    eager, flex = models(transformers, name, **sizes)
    tokens = torch.randint(0, 128, (2, 37))
    padding = torch.ones(2, 37, dtype=torch.long)
    padding[0, :5] = 0
    for mask in (None, padding):
        with torch.no_grad():
            wanted, found = (x.eval()(tokens, attention_mask=mask).logits for x in (eager, flex))
        seen = padding.bool() if mask is not None else slice(None)
        torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-5, atol=2e-6)
    for model in (eager, flex):
        model.train()(tokens, labels=tokens).loss.backward()
    for (_, wanted), (at, found) in zip(
        eager.named_parameters(), flex.named_parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6, msg=at)


@pytest.mark.shares(2)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_compiles_few_graphs(
    transformers: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers compiles flex_attention, with a number that changes with the tokens."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, flex = models(transformers, "LlamaForCausalLM")
    tokens, padding = torch.randint(1, 128, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    padding[0, :3] = 0
    found = []
    for model in (eager, flex):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found.append(
            model.eval().generate(
                tokens, attention_mask=padding, max_new_tokens=14, min_new_tokens=14,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
                cache_implementation=cache, disable_compile=True,
            )
        )  # fmt: skip
    wanted, got = found
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits))
    # prefill and decode, and as many of torch's create_block_mask
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


def test_sinks(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers itself runs gpt-oss with flex_attention on CUDA only."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    _, flex = models(
        transformers, "GptOssForCausalLM", **WINDOWED, num_local_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ValueError, match="sinks cannot be run on CPU"):
        flex.eval()(torch.randint(0, 128, (1, 16)))


AFTER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention as integration
from flash_mask_cute import flex_attention, patch_flex_attention

of_torch = [integration.flex_attention]
assert of_torch[0] is not flex_attention
model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="flex_attention")
tokens = torch.randint(0, 128, (2, 37))
with patch_flex_attention():
    assert integration.flex_attention is flex_attention
    # torch's function has no gradients on a CPU
    model.train()(tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
assert integration.flex_attention is of_torch[0]
wrapped = getattr(integration, "WrappedFlexAttention", None)
if wrapped is not None:
    assert wrapped(True)()._torchdynamo_orig_callable is of_torch[0]
"""


@pytest.mark.shares(3)
def test_after_the_import() -> None:
    """In a process of its own, where transformers has torch's function already."""
    pytest.importorskip("transformers", reason="extra `transformers`")
    code = f"SIZES = {SIZES!r}\n{AFTER}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
