"""bench.end_to_end: its batches, its operations, and losses that depend on the mask only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import Json
from bench.end_to_end import __main__ as command
from bench.end_to_end import attentions, training
from bench.end_to_end.attentions import bytes_of, sdpa_loop
from bench.end_to_end.documents import ANSWERS, Batch, Documents, draw_documents, make_batch
from bench.end_to_end.rows import disagreements
from bench.end_to_end.shapes import SHAPES, attention_share, visible_pairs
from bench.end_to_end.tasks import TASKS, pair_loss
from bench.end_to_end.training import LeftOut, Run, make_model, measure


@pytest.fixture
def libraries() -> None:
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason=f"{name} is not installed: extra `end-to-end`")


def tiny(impl: str, task: str = "lora", model: str = "llama3-8b") -> Run:
    return Run(impl, task, model, 200, 64, 2, is_tiny=True, device="cpu")


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("num_tokens", "mean"), [(256, 64), (8192, 4096), (8192, 8192), (999, 33)])
def test_documents(task: str, num_tokens: int, mean: int) -> None:
    documents = draw_documents(task, num_tokens, mean, seed=3)
    assert documents == draw_documents(task, num_tokens, mean, seed=3)
    assert documents != draw_documents(task, num_tokens, mean, seed=4)
    totals = [sum(parts) for parts in documents.lengths]
    assert sum(totals) == documents.num_tokens == num_tokens
    assert all(len(parts) == 1 + ANSWERS[task] and min(parts) > 0 for parts in documents.lengths)
    if mean == num_tokens:
        assert len(totals) == 1
    else:
        # the last one takes a rest that would be too short
        assert min(totals) >= mean // 2 and max(totals) <= 3 * mean // 2 + mean // 2


def test_mean_of_documents() -> None:
    lengths = draw_documents("lora", 1_000_000, 4096, seed=1).lengths
    assert abs(1_000_000 / len(lengths) - 4096) < 200


@pytest.mark.parametrize(("num_tokens", "mean"), [(256, 31), (100, 101)])
def test_documents_of_other_sizes_are_refused(num_tokens: int, mean: int) -> None:
    with pytest.raises(
        ValueError, match=f"docs must be from 32 to tokens={num_tokens}, got {mean}"
    ):
        draw_documents("sft", num_tokens, mean, seed=0)


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


def test_answers_with_questions_of_their_own() -> None:
    """The same tokens see the same: each answer predicts from the same text."""
    shared = make_batch(DOCUMENTS, 100, "cpu", is_shared=True)
    batch = make_batch(DOCUMENTS, 100, "cpu", is_shared=False)
    assert batch.lengths == DOCUMENTS.sequences == [7, 8, 5, 6]
    assert batch.answer.tolist() == shared.answer.tolist()
    places = [*range(7), *range(8), *range(5), *range(6)]
    assert batch.positions[0].tolist() == places
    for one, other in ((batch, shared), (shared, batch)):
        assert torch.equal(one.tokens[0, one.targets], other.tokens[0, other.targets])
    texts = [
        [x.tokens[0, sees(x)[row]].tolist() for row in x.predictors.tolist()]
        for x in (batch, shared)
    ]
    assert texts[0] == texts[1]


# -- operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 20])
@pytest.mark.parametrize("window", [0, 1, 5, 19, 20, 30])
def test_visible_pairs(length: int, window: int) -> None:
    pairs = [(q, k) for q in range(length) for k in range(q + 1) if not window or q - k < window]
    assert visible_pairs(length, window) == len(pairs)


@pytest.mark.parametrize(
    ("num_tokens", "docs", "percent"),
    [(2**13, 1, 13), (2**15, 1, 38), (2**17, 1, 71), (2**17, 32, 7)],
)
def test_attention_share_of_llama(num_tokens: int, docs: int, percent: int) -> None:
    lengths = [num_tokens // docs] * docs
    assert round(100 * attention_share(SHAPES["llama3-8b"], lengths, num_tokens)) == percent


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("model", "billions"), [("llama3-8b", 8.03), ("gemma3", 3.88), ("gpt-oss", 20.9)]
)
def test_shapes_are_those_of_the_models(model: str, billions: float) -> None:
    """All weights, and those of linear layers that the share of attention counts."""
    from transformers import AutoModelForCausalLM

    shape = SHAPES[model]
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(shape.make_config(8192))
    assert abs(sum(x.numel() for x in whole.parameters()) / 1e9 - billions) < 0.02 * billions
    layers = whole.get_decoder().layers
    assert len(layers) == shape.layers == len(shape.windows())
    weights = {name: x.numel() for name, x in layers[0].named_parameters() if x.dim() > 1}
    experts = sum(
        n for name, n in weights.items() if name.endswith("experts." + name.split(".")[-1])
    )
    experts -= sum(n for name, n in weights.items() if "experts" in name and "bias" in name)
    others = sum(n for name, n in weights.items() if "experts" not in name and "router" not in name)
    linear = 2 * shape.layers * (others + experts * shape.active // shape.experts)
    width, rows = shape.heads * shape.head_dim, 1000
    attention = 4 * width * sum(visible_pairs(rows, window) for window in shape.windows())
    share = attention / (attention + linear * rows)
    assert attention_share(shape, [rows], rows) == pytest.approx(share, rel=1e-6)


# -- attentions ---------------------------------------------------------------------------------


def test_memory_of_masks() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    dense = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    assert bytes_of(dense) == bytes_of({"a": dense, "b": dense[:, :, :5]}) == 4096
    assert bytes_of(None) == 0 and bytes_of({}) == 0
    lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    assert bytes_of(lists) >= 4 * (16 + 4)


@pytest.mark.parametrize("window", [None, 7])
def test_sdpa_in_a_loop(window: int | None) -> None:
    q, k, v = torch.randn(1, 4, 50, 8), *torch.randn(2, 1, 2, 50, 8)
    ends = torch.tensor([0, 20, 21, 50], dtype=torch.int32)
    out, _ = sdpa_loop(
        torch.nn.Identity(), q, k, v, None, 0.3, sliding_window=window, cu_seq_lens_q=ends
    )
    row, key = torch.arange(50)[:, None], torch.arange(50)
    document = torch.bucketize(row, ends, right=True)
    visible = (key <= row) & (document == document.T) & (row - key < (window or 50))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_pairs_of_answers() -> None:
    values = torch.tensor([[3.0, 1.0, 0.5], [0.0, 2.0, -1.0]])
    pairs = [(3.0, 1.0), (3.0, 0.5), (1.0, 0.5), (0.0, 2.0), (0.0, -1.0), (2.0, -1.0)]
    expected = sum(-torch.tensor(x - y).sigmoid().log() for x, y in pairs) / 6
    torch.testing.assert_close(pair_loss(values), expected)


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


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("task", "model"), [("sft", "llama3-8b"), ("dpo", "gpt-oss")])
def test_in_turns_losses_are_those_of_a_process_alone(task: str, model: str) -> None:
    names = ("ours", "sdpa", "ours_lengths", "flex", "eager")
    rows = training.measure_in_turns([tiny(impl, task, model) for impl in names])
    found = {impl: row for impl, row in zip(names, rows, strict=True) if not isinstance(row, str)}
    left_out = {impl: row for impl, row in zip(names, rows, strict=True) if isinstance(row, str)}
    assert "no backward on the CPU" in left_out.pop("flex")
    assert all("gpt-oss has sinks" in why for why in left_out.values())
    assert left_out.keys() == ({"sdpa"} if model == "gpt-oss" else set())
    alone = measure(tiny("eager", task, model))
    for row in found.values():
        assert row["losses"] == pytest.approx(alone["losses"][:1], rel=2e-5)
        assert row["in_turns"] and row["steps"] == 2 and row["step_s"] > 0


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("task", "layers"), [("sft", 4), ("lora", 5)])
def test_what_is_trained(task: str, layers: int) -> None:
    run = Run("eager", task, "llama3-8b", 64, 32, 1, layers, is_tiny=True, device="cpu")
    model, parameters, decoder = make_model(run)
    assert decoder.config.num_hidden_layers == layers
    shapes = {tuple(x.shape) for x in parameters}
    if task == "lora":
        assert all(training.LORA_RANK in shape for shape in shapes)
        assert len(parameters) == 2 * 7 * layers
    else:
        assert (200, 64) in shapes and len(parameters) == 9 * layers + 3
    assert Run("ours", "sft", "llama3-8b", 64, 32, 1).shape.layers == training.FULL_TRAINING_LAYERS
    assert Run("ours", "lora", "llama3-8b", 64, 32, 1).shape.layers == 32


@pytest.mark.parametrize(
    ("impl", "model", "text"),
    [
        ("sdpa", "gpt-oss", "has sinks"),
        ("sdpa_loop", "gpt-oss", "has sinks"),
        ("flex", "llama3-8b", "no backward on the CPU"),
        ("fa4", "llama3-8b", "needs a GPU"),
    ],
)
def test_left_out_by_name(impl: str, model: str, text: str) -> None:
    with pytest.raises(LeftOut, match=text):
        measure(tiny(impl, model=model))


# -- the command --------------------------------------------------------------------------------


@pytest.mark.usefixtures("libraries")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process an implementation, a row of each, a table of all."""
    out = tmp_path / "rows.jsonl"
    arguments = ["--tiny", "--impl", "ours,flex", "--tokens", "64", "--docs", "32"]
    arguments += ["--device", "cpu"]
    assert command.main([*arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["impl"] for row in rows] == ["ours", "flex"]
    assert "lora, tiny llama3-8b, 2 layers, 64 tokens, documents of 32, cpu" in shown
    assert "| flex | FlexAttention has no backward on the CPU |" in shown
    assert f"{rows[0]['losses'][1]:.4g}" in shown
    assert command.main(["--report", str(out)]) == 0
    assert capsys.readouterr().out == shown


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--impl", "ours,theirs"], "theirs is none of ours, ours_lengths, fa4"),
        (["--docs", "9000"], "--docs must be from 32 to --tokens 8192, got 9000"),
        (["--tiny", "--steps", "0"], "--steps and --layers must be 1 or more"),
        (["--layers", "0"], "--steps and --layers must be 1 or more"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert text in capsys.readouterr().err


def test_whole_models_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    for arguments in ([], ["--device", "cpu"]):
        assert command.main(arguments) == 2
    assert "needs a GPU, or --tiny" in capsys.readouterr().out
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main(["--tiny"]) == 2
    assert "needs transformers and peft" in capsys.readouterr().out
