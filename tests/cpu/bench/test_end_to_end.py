"""bench.end_to_end: its batches, its operations, and losses that depend on the mask only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench import Json
from bench.end_to_end import attentions
from bench.end_to_end.documents import Batch, Documents, make_batch
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


# -- batches ------------------------------------------------------------------------------------


DOCUMENTS = Documents([[5, 2, 3], [4, 1, 2]], seed=1)


def sees(batch: Batch) -> Tensor:
    n = batch.tokens.numel()
    row, key = torch.arange(n)[:, None], torch.arange(n)
    return (key <= row) & (row < batch.ends)


def test_answers_that_share_a_question() -> None:
    """By the definition: the same document, and a question or the same answer."""
    batch = make_batch(DOCUMENTS, 100, "cpu", is_shared=True)
    document = torch.tensor([0] * 10 + [1] * 7)
    part = torch.tensor([0] * 5 + [1] * 2 + [2] * 3 + [0] * 4 + [1] + [2] * 2)
    row, key = torch.arange(17)[:, None], torch.arange(17)
    shares = (part == 0) | (part[:, None] == part)
    assert torch.equal(sees(batch), (key <= row) & (document[:, None] == document) & shares)
    assert batch.positions[0].tolist() == [*range(7), 5, 6, 7, *range(5), 4, 5]
    assert batch.targets.tolist() == [5, 6, 7, 8, 9, 14, 15, 16]
    assert batch.predictors.tolist() == [4, 5, 4, 7, 8, 13, 13, 15]
    assert batch.answer.tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert batch.lasts.tolist() == [6, 9, 14, 16] and batch.num_answers == 2
    assert batch.lengths == []


# -- operations ---------------------------------------------------------------------------------


# -- attentions ---------------------------------------------------------------------------------


# -- runs ---------------------------------------------------------------------------------------

PEERS = {
    "llama3-8b": ("ours_lengths", "sdpa", "sdpa_loop", "eager"),
    "gemma3": ("ours_lengths", "sdpa", "sdpa_loop", "eager"),
    "gpt-oss": (
        "ours_lengths",
        "eager",
    ),
}


def largest_difference(rows: list[Json]) -> float:
    first, *others = [torch.tensor(row["losses"], dtype=torch.float64) for row in rows]
    return max(float(((x - first) / first).abs().max()) for x in others)


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
    """Documents and answers that see what is before them change the losses by more than the limit
    that they are held to."""
    right = measure(tiny("sdpa", task))
    make_masks = attentions.make_masks

    def causal(config: Any, batch: Batch, dtype: torch.dtype) -> Any:
        whole = torch.full_like(batch.ends, batch.ends.numel())
        return make_masks(config, batch._replace(ends=whole), dtype)

    monkeypatch.setattr(attentions, "make_masks", causal)
    wrong = measure(tiny("eager", task))
    assert disagreements([right, wrong])
    assert disagreements([x | {"dtype": "bfloat16"} for x in (right, wrong)])


# -- the command --------------------------------------------------------------------------------


def row(impl: str, loss: float, **others: Any) -> Json:
    found = {
        "impl": impl, "task": "rm", "model": "gemma3", "tiny": False, "layers": 34, "tokens": 32768,
        "docs": 4096, "rows": 40000, "steps": 1, "step_s": 0.5, "first_step_s": 20.0,
        "tokens_s": 65536.0, "mask_s": 0.002, "mask_bytes": 262144, "peak_bytes": 32 * 10**9,
        "attention_share": 0.071, "losses": [loss], "device": "a GPU", "dtype": "bfloat16",
    }  # fmt: skip
    return found | others


@pytest.mark.parametrize(
    ("task", "dtype", "difference"),
    [("rm", "bfloat16", 1e-2), ("lora", "bfloat16", 1e-3), ("rm", "float32", 1e-4)],
)
def test_losses_that_agree(task: str, dtype: str, difference: float) -> None:
    def told(loss: float) -> list[str]:
        workload = {"task": task, "dtype": dtype}
        rows = [row("ours", 0.69, **workload), row("fa4", loss, **workload)]
        return disagreements([*rows, row("x", 9.0, docs=99), row("y", 0.1, docs=98)])

    assert not told(0.69) and not told(0.69 * (1 + 0.9 * difference))
    for loss in (0.69 * (1 + 1.1 * difference), 0.69 * (1 - 1.1 * difference), float("nan")):
        assert f"{task}, gemma3: loss of step 0 is 0.69 with ours" in told(loss)[0]
