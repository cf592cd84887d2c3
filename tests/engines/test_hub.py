"""`python -m flash_mask_cute hub DIR` in transformers: generation gives the tokens of eager."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from engine_files import needs_engine

needs_engine("kernels")
needs_engine("transformers")

from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

from flash_mask_cute.integrations.hub import write_hub_kernel  # noqa: E402

NAME = "local/flash-mask-cute"


def test_tokens_are_those_of_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={write_hub_kernel(tmp_path / 'kernel')}")
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
        bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    eager, ours = (
        AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=name, dtype=torch.float32
        ).eval()
        for name in ("eager", NAME)
    )
    assert ours.config._attn_implementation == NAME
    for name, x in eager.named_parameters():
        torch.nn.init.normal_(x, std=0.5 if "norm" in name else 0.2)
    ours.load_state_dict(eager.state_dict())
    prompts = [torch.randint(3, 97, (n,)).tolist() for n in (5, 40, 17, 1, 33)]

    def generated(model: torch.nn.Module, prompt: list[int]) -> list[int]:
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        return found[0, len(prompt) :].tolist()

    expected = [generated(eager, prompt) for prompt in prompts]
    assert len({tuple(x) for x in expected}) > 1
    assert [generated(ours, prompt) for prompt in prompts] == expected
    settings = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=48)
    found = ours.generate_batch(
        prompts,
        GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        settings,
        warmup=False,
    )
    assert sorted(x.generated_tokens for x in found.values()) == sorted(expected)
