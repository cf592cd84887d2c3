"""examples/09_training.py: its data, its masks, and loss curves that depend on the mask only."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_examples import ROOT, load
from torch import Tensor

from flash_mask_cute.call.arguments import Tensors
from flash_mask_cute.call.check import validate
from flash_mask_cute.call.forward import NewOutputs

TASKS = ("sft", "dpo")
SMALL = ("--device", "cpu", "--layers", "2", "--hidden", "64", "--steps", "10")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(ROOT / "examples" / "09_training.py", monkeypatch)


def curves(training: ModuleType, *arguments: str) -> dict[str, list[float]]:
    settings = training.parse([*SMALL, *arguments])
    found: dict[str, list[float]] = training.train(settings, settings.attention)
    assert sorted(found) == sorted(settings.tasks)
    assert all(len(losses) == settings.steps for losses in found.values())
    return found


def distance(training: ModuleType, x: dict[str, list[float]], y: dict[str, list[float]]) -> float:
    return max(training.largest_difference(x[task], y[task]) for task in x)


# -- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seqlen", [64, 256, 4096, 10000])
def test_documents_are_those_of_the_paper(training: ModuleType, task: str, seqlen: int) -> None:
    num_answers, shortest = 1 + (task == "dpo"), min(128, seqlen // 4)
    rng = torch.Generator().manual_seed(1)
    counts = set()
    for _ in range(50):
        *documents, padding = training.draw_documents(seqlen, num_answers, rng)
        counts.add(len(documents) + 1)
        assert sum(map(sum, documents)) + sum(padding) == seqlen
        assert len(padding) == 1 and 0 <= padding[0] < shortest
        for question, *answers in documents:
            length = question + sum(answers)
            assert length >= shortest and len(answers) == num_answers
            longest = max(0.2 * length / (1 + 0.2 * num_answers), 1)
            assert all(1 <= answer <= longest for answer in answers)
    assert min(counts) >= 2 and max(counts) <= 10
    if seqlen >= 4096:
        assert max(counts) == 10


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_is_a_function_of_seed_task_and_step(training: ModuleType, task: str) -> None:
    device = torch.device("cpu")
    batch = training.make_batch(task, 256, 0, 3, device)
    assert torch.equal(batch.tokens, training.make_batch(task, 256, 0, 3, device).tokens)
    for other in (("sft" if task == "dpo" else "dpo", 256, 0, 3), (task, 256, 1, 3)):
        assert not torch.equal(batch.tokens, training.make_batch(*other, device).tokens)
    assert not torch.equal(batch.tokens, training.make_batch(task, 256, 0, 4, device).tokens)


@pytest.mark.parametrize("task", TASKS)
def test_answers_continue_their_question(training: ModuleType, task: str) -> None:
    batch = training.make_batch(task, 2048, 0, 0, torch.device("cpu"))
    lengths, num_answers = batch.documents[:-1], 1 + (task == "dpo")
    assert len(batch.targets) == sum(sum(answers) for _, *answers in lengths)
    # a target is one position behind what predicts it, and sees it
    step = batch.position[batch.targets] - batch.position[batch.predictors]
    assert (step == 1).all()
    assert training.sees(batch.document, batch.part, batch.targets, batch.predictors).all()
    first = batch.targets[batch.part[batch.predictors] != batch.part[batch.targets]]
    assert len(first) == sum(len(answers) for _, *answers in lengths)

    # the rule, and that it does not hold in rejected answers
    bounds = ((0.8, 1.0), (0.8, 1.0), (0.0, 0.1))
    for part, (low, high) in enumerate(bounds[: 1 + num_answers]):
        held = []
        for number in range(len(lengths)):
            is_own = batch.document == number
            text = batch.tokens[is_own & ((batch.part == 0) | (batch.part == part))]
            same = text[training.LOOK_BACK :] == text[: -training.LOOK_BACK]
            held += same[-lengths[number][part] :].tolist()
        assert low < sum(held) / len(held) < high


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("task", TASKS)
def test_all_attentions_see_the_same(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    attentions = [training.Attention(name) for name in training.ATTENTIONS]
    # FlexAttention says that it is not compiled
    uncompiled = (training.create_block_mask, training.flex_attention)
    monkeypatch.setattr(training, "compiled_flex", lambda: uncompiled)
    attentions.append(training.Attention("ours", skip_blocks=False))
    q, k, v = (torch.randn(1, 256, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    for step in range(5):
        batch = training.make_batch(task, 256, 0, step, torch.device("cpu"))
        results = [attention.for_batch(task, batch)(q, k, v) for attention in attentions]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], atol=1e-12, rtol=0.0)


# -- loss curves --------------------------------------------------------------------------------


@pytest.mark.shares(2)
def test_curves_differ_by_the_rounding_of_lse_only(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls return LSE in float32; in float64 the curves are equal."""
    dense = curves(training, "--dtype", "float64", "--attention", "sdpa")
    assert distance(training, curves(training, "--dtype", "float64"), dense) < 3e-6

    def outputs(of_plan: NewOutputs, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        shape = of_plan.lse_shape
        lse = None if shape is None else tensors.q.new_empty(shape)
        return tensors.q.new_empty(of_plan.out_shape), lse

    monkeypatch.setattr(NewOutputs, "__call__", outputs)
    monkeypatch.setattr(validate, "check_fp32", lambda *_, **__: None)
    assert distance(training, curves(training, "--dtype", "float64"), dense) < 1e-9


@pytest.mark.shares(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_skipping_blocks_changes_no_bit(training: ModuleType, dtype: str) -> None:
    arguments = ("--dtype", dtype, "--seqlen", "512", "--steps", "2")
    skipping = curves(training, *arguments)
    assert curves(training, *arguments) == skipping
    assert curves(training, *arguments, "--skip-blocks", "off") == skipping
    assert curves(training, *arguments, "--deterministic") == skipping


@pytest.mark.shares(2)
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_falls(training: ModuleType, task: str) -> None:
    losses = torch.tensor(curves(training, "--task", task, "--steps", "30")[task])
    assert losses[-10:].mean() < losses[:10].mean() - 0.1
    if task == "dpo":
        torch.testing.assert_close(losses[0], torch.tensor(2.0).log())


def plain_causal(training: ModuleType) -> Any:
    return lambda lengths, seqlen, device: training.builders.causal(seqlen, device=device)


def answers_in_a_row(training: ModuleType) -> Any:
    causal_document = training.builders.causal_document
    return lambda parts, seqlen, device: causal_document(
        [sum(x) for x in parts], seqlen, device=device
    )


@pytest.mark.shares(3)
@pytest.mark.parametrize(
    ("task", "builder", "wrong"),
    [
        ("sft", "causal_document", plain_causal),
        ("dpo", "share_question", plain_causal),
        ("dpo", "share_question", answers_in_a_row),
    ],
)
def test_a_wrong_mask_gives_another_curve(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, task: str, builder: str, wrong: Any
) -> None:
    # long enough for several documents
    arguments = ("--task", task, "--seqlen", "512")
    right = curves(training, *arguments)
    monkeypatch.setattr(training.builders, builder, wrong(training))
    assert distance(training, curves(training, *arguments), right) > 1e-3
    # the gradients tell it before the training does
    with pytest.raises(SystemExit, match="wrong result .*gradients"):
        training.main([*SMALL, *arguments])
    monkeypatch.setattr(training, "check_gradients", lambda *_: None)
    with pytest.raises(SystemExit, match=f"loss curves differ .*{task}"):
        training.main([*SMALL, *arguments, "--compare"])


# -- command line -------------------------------------------------------------------------------


@pytest.mark.shares(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_compare(
    training: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dtype: str,
) -> None:
    monkeypatch.setattr(training, "plot_losses", lambda *_: None)
    training.main([*SMALL, "--dtype", dtype, "--steps", "4", "--compare"])
    said = capsys.readouterr().out
    assert said.count("largest error") == said.count("largest difference") == 2
    assert f"ours in {dtype}, dpo: steps 4 to 4 of 4, mean loss" in said
    assert "bit for bit" not in said


@pytest.mark.shares(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_peer_without_rounding_changes_no_verdict(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """sdpa, which runs once, may happen to be as near as in the finer type."""
    monkeypatch.setattr(training, "plot_losses", lambda *_: None)
    train, gradients = training.train, training.gradients

    def lucky_train(settings: Any, attention: Any, *dtype: Any) -> Any:
        is_ours = attention.name == "ours"
        return train(settings, attention, *(dtype if is_ours else (torch.float64,)))

    def lucky_gradients(settings: Any, task: str, attention: Any, dtype: torch.dtype) -> Any:
        is_ours = attention.name == "ours"
        return gradients(settings, task, attention, dtype if is_ours else torch.float64)

    monkeypatch.setattr(training, "train", lucky_train)
    monkeypatch.setattr(training, "gradients", lucky_gradients)
    training.main([*SMALL, "--dtype", dtype, "--steps", "2", "--compare"])


def test_compare_in_a_fixed_order(
    training: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(training, "plot_losses", lambda *_: None)
    arguments = [*SMALL, "--steps", "2", "--deterministic", "--compare"]
    path = tmp_path / "curves"
    training.main([*arguments, "--curves", str(path)])
    assert "skipping on and off: equal bit for bit" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert sorted(written) == ["ours", "sdpa"] and len(written["ours"]["dpo"]) == 2
    # a curve that depends on what is skipped
    train = training.train

    def depends(settings: Any, attention: Any, *dtype: Any) -> Any:
        found = train(settings, attention, *dtype)
        found["sft"][-1] += 1e-6 * attention.skip_blocks
        return found

    monkeypatch.setattr(training, "train", depends)
    with pytest.raises(SystemExit, match="skipping changes the loss curves"):
        training.main(arguments)


def test_report(training: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    training.main([*SMALL, "--steps", "1", "--report"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for task in TASKS:
        ours, sdpa, flex = (row for row in rows if row[0] == task)
        assert [row[1] for row in (ours, sdpa, flex)] == list(training.ATTENTIONS)
        assert float(ours[2]) > 0 and float(sdpa[2]) > 0 and flex[2] == "FlexAttention"


@pytest.mark.parametrize("present", [True, False])
def test_plot(
    training: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    present: bool,
) -> None:
    if present:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(training.sys.modules, "matplotlib.figure", None)
        monkeypatch.setitem(training.sys.modules, "matplotlib.backends.backend_agg", None)
    path = tmp_path / "losses.png"
    losses = {"sft": [2.0, 1.0], "dpo": [0.7, 0.5]}
    training.plot_losses(path, {"ours": losses, "sdpa": losses}, TASKS)
    assert path.exists() == present
    assert ("matplotlib is not installed" in capsys.readouterr().out) != present


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hidden 60", "--hidden"),
        ("--steps 0", "--steps"),
        ("--seqlen 63", "--seqlen"),
        ("--attention flex", "no backward"),
        ("--attention sdpa --compare", "--compare"),
    ],
)
def test_unusable_arguments(
    training: ModuleType, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        training.main([*SMALL, *arguments.split()])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_deterministic_algorithms_are_left_as_they_were(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(
        training, "run", lambda _: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    training.main([*SMALL, "--deterministic"])
    training.main([*SMALL])
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
