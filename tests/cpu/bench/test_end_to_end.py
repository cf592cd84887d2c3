"""bench.end_to_end: its batches, its operations, and losses that depend on the mask only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import Json
from bench.end_to_end import attentions
from bench.end_to_end.documents import Batch
from bench.end_to_end.rows import disagreements
from bench.end_to_end.shapes import SHAPES
from bench.end_to_end.tasks import TASKS
from bench.end_to_end.training import Run, measure


@pytest.fixture
def libraries() -> None:
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason=f"{name} is not installed: extra `end-to-end`")


def tiny(impl: str, task: str = "lora", model: str = "llama3-8b") -> Run:
    return Run(impl, task, model, 200, 64, 2, is_tiny=True, device="cpu")


PEERS = {
    "llama3-8b": ("ours_lengths", "sdpa", "sdpa_loop", "eager"),
    "gemma3": ("ours_lengths", "sdpa", "sdpa_loop", "eager"),
    "gpt-oss": ("ours_lengths", "eager"),
}


def largest_difference(rows: list[Json]) -> float:
    first, *others = [torch.tensor(row["losses"], dtype=torch.float64) for row in rows]
    return max(float(((x - first) / first).abs().max()) for x in others)


@pytest.mark.shares(4)
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("task", "model"),
    [
        *((task, "llama3-8b") for task in TASKS),
        *(("lora", "gemma3"), ("dpo", "gemma3"), ("lora", "gpt-oss")),
    ],
)
def test_losses_are_those_of_every_attention(task: str, model: str) -> None:
    """With other weights from step to step, so gradients count in the second loss."""
    rows = [measure(tiny(impl, task, model)) for impl in ("ours", *PEERS[model])]
    assert largest_difference(rows) < 2e-5
    assert not disagreements(rows)
    ours, dense = rows[0], rows[-1]
    assert ours["losses"][0] != ours["losses"][1]
    # one or two int32 for each key and what is found of them, and not a mask of queries and keys
    masks = len(set(SHAPES[model].windows()))
    assert 4 * masks <= ours["mask_bytes"] / ours["rows"] < 8.8 * masks
    assert ours["rows"] ** 2 * masks <= dense["mask_bytes"]
    is_shared = task in ("dpo", "rm") and model == "llama3-8b"
    assert (ours["rows"] == 200) == (is_shared or task in ("sft", "lora"))


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("task", TASKS)
def test_a_wrong_mask_is_noticed(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that see what is before their document change the losses by more than the limit."""
    right = measure(tiny("sdpa", task))
    make_masks = attentions.make_masks

    def causal(config: Any, batch: Batch, dtype: torch.dtype) -> Any:
        whole = torch.full_like(batch.ends, batch.ends.numel())
        return make_masks(config, batch._replace(ends=whole), dtype)

    monkeypatch.setattr(attentions, "make_masks", causal)
    wrong = measure(tiny("eager", task))
    assert disagreements([right, wrong])
    assert disagreements([x | {"dtype": "bfloat16"} for x in (right, wrong)])
