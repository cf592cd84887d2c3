"""One run: a model, some steps, what they cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from bench import Json, commit_here, versions
from bench.end_to_end.attentions import IMPLEMENTATIONS, bytes_of
from bench.end_to_end.documents import Batch, Documents, draw_documents, make_batch
from bench.end_to_end.shapes import SHAPES, Shape, attention_share
from bench.end_to_end.tasks import Model, loss_of

FULL_TRAINING_LAYERS = 4
"""Of sft: weights, gradients and AdamW of whole models are more than a GPU holds."""
LORA_RANK = 16
RATE = 1e-4


class LeftOut(Exception):
    """The implementation cannot run this; the message says why."""


@dataclass(frozen=True)
class Run:
    """docs: mean length of documents, in tokens. layers: None for those of the task."""

    impl: str
    task: str
    model: str
    tokens: int
    docs: int
    steps: int
    layers: int | None = None
    is_tiny: bool = False
    device: str = "cuda"
    seed: int = 0

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.model]
        if self.is_tiny:
            shape = shape.tiny()
        layers = self.layers
        if layers is None and self.task == "sft":
            layers = min(FULL_TRAINING_LAYERS, shape.layers)
        return shape if layers is None else replace(shape, layers=layers)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def documents(self, step: int) -> Documents:
        return draw_documents(self.task, self.tokens, self.docs, 1000 * self.seed + step)


def measure(run: Run) -> Json:
    """The row of a run. LeftOut where the implementation cannot run it, or memory ends."""
    implementation, shape = IMPLEMENTATIONS[run.impl], run.shape
    if (why := implementation.why_not(shape, run.device)) is not None:
        raise LeftOut(why)
    implementation.register()
    is_shared = implementation.shares_questions(shape)
    try:
        return _measure(run, is_shared)
    except torch.OutOfMemoryError as error:
        raise LeftOut("out of memory") from error


def _measure(run: Run, is_shared: bool) -> Json:
    model, parameters, decoder = make_model(run)
    steps = Steps(run, model, decoder.config, make_optimizer(run, parameters), is_shared)
    for step in range(run.steps):
        steps.take(step)
    return steps.row()


def make_optimizer(run: Run, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, fused=run.device == "cuda")


def measure_in_turns(runs: Sequence[Run]) -> list[Json | str]:
    """The rows of runs that differ in their implementations alone; or why one is left out.

    They share one model. With the weights that it begins with, each implementation computes the
    loss and the gradients of the first batch, which compiles, is its first step, and gives the loss
    that is told. Then they train the model in turns, a step each.
    """
    found: dict[str, Json | str] = {}
    model, parameters, decoder = make_model(replace(runs[0], impl="eager"))
    optimizer = make_optimizer(runs[0], parameters)
    ready: dict[str, Steps] = {}
    for run in runs:
        implementation = IMPLEMENTATIONS[run.impl]
        if (why := implementation.why_not(run.shape, run.device)) is not None:
            found[run.impl] = why
            continue
        is_shared = implementation.shares_questions(run.shape)
        steps = Steps(run, model, decoder.config, optimizer, is_shared)
        try:
            implementation.register()
            decoder.set_attn_implementation(implementation.attention)
            steps.take(0, trains=False)
            ready[run.impl] = steps
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            found[run.impl] = "out of memory"
    for step in range(1, runs[0].steps):
        for name, steps in ready.items():
            decoder.set_attn_implementation(IMPLEMENTATIONS[name].attention)
            steps.take(step)
    for name, steps in ready.items():
        row = steps.row()
        found[name] = row | {"in_turns": True, "losses": row["losses"][:1]}
    return [found[run.impl] for run in runs]


class Steps:
    """Steps of a run, and what they cost."""

    def __init__(
        self,
        run: Run,
        model: Model,
        config: Any,
        optimizer: torch.optim.Optimizer,
        is_shared: bool,
    ) -> None:
        self._run, self._model, self._config, self._optimizer = run, model, config, optimizer
        self._is_shared = is_shared
        self._implementation = IMPLEMENTATIONS[run.impl]
        self._on_gpu = run.device == "cuda"
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._mask_seconds: list[float] = []
        self._num_rows = self._mask_bytes = self._peak = 0

    def take(self, step: int, trains: bool = True) -> None:
        """trains: whether weights change."""
        run, on_gpu = self._run, self._on_gpu
        batch = make_batch(run.documents(step), run.shape.vocabulary, run.device, self._is_shared)
        _wait(on_gpu)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        arguments = self._implementation.arguments(self._config, batch, run.dtype)
        _wait(on_gpu)
        self._mask_seconds.append(time.perf_counter() - began)
        loss = loss_of(run.task, self._model, batch, arguments)
        loss.backward()
        if trains:
            self._optimizer.step()
        self._optimizer.zero_grad()
        _wait(on_gpu)
        self._seconds.append(time.perf_counter() - began)
        self._losses.append(loss.item())
        self._mask_bytes = bytes_of(arguments.get("attention_mask"))
        self._num_rows = batch.tokens.numel()
        if on_gpu and (step > 0 or run.steps == 1):
            # without what compilers took in the first step
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        # the next mask is made without this one, which may be gigabytes
        del arguments, loss

    def row(self) -> Json:
        run, seconds = self._run, self._seconds
        # the first step compiles, and is told apart
        step_s, mask_s = (statistics.median(x[1:] or x) for x in (seconds, self._mask_seconds))
        return {
            "kind": "end_to_end", "impl": run.impl, "task": run.task, "model": run.model,
            "dtype": str(run.dtype).removeprefix("torch."), "tiny": run.is_tiny,
            "layers": run.shape.layers, "tokens": run.tokens, "docs": run.docs,
            "rows": self._num_rows, "steps": run.steps, "step_s": step_s,
            "first_step_s": seconds[0], "tokens_s": run.tokens / step_s, "mask_s": mask_s,
            "mask_bytes": self._mask_bytes, "peak_bytes": self._peak if self._on_gpu else None,
            "attention_share": share_of(run), "losses": self._losses,
            "device": torch.cuda.get_device_name() if self._on_gpu else "cpu",
            "commit": commit_here(), "transformers": version("transformers"), **versions(),
        }  # fmt: skip


def share_of(run: Run) -> float:
    """Attention's share of the last step's forward operations, with questions of their own."""
    documents = run.documents(run.steps - 1)
    return attention_share(run.shape, documents.sequences, sum(documents.sequences))


def make_model(run: Run) -> tuple[Model, list[nn.Parameter], Any]:
    """The model, what is trained of it, and its decoder. Random weights, of the seed alone."""
    from transformers import AutoModelForCausalLM

    config = run.shape.make_config(run.tokens)
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        whole = AutoModelForCausalLM.from_config(
            config, dtype=run.dtype, attn_implementation=IMPLEMENTATIONS[run.impl].attention
        )
        reward = nn.Linear(run.shape.hidden, 1, bias=False, dtype=torch.float32)
    unadapted: Any = nullcontext
    if run.task != "sft":
        from peft import LoraConfig, get_peft_model

        # the second factor is random, too: with zeros LoRA does nothing, and the first loss of dpo
        # is ln 2 whatever the attention
        lora = LoraConfig(
            r=LORA_RANK, target_modules=list(run.shape.targets), init_lora_weights=False
        )
        adapted = get_peft_model(whole, lora)
        unadapted = adapted.disable_adapter
    # its name from transformers 5.24 on, and before
    enable = getattr(whole, "activation_checkpointing_enable", None)
    (enable or whole.gradient_checkpointing_enable)({"use_reentrant": False})
    whole.train()
    decoder = whole.get_decoder()

    def hidden(batch: Batch, arguments: dict[str, Any]) -> Tensor:
        states: Tensor = decoder(batch.tokens, **arguments).last_hidden_state
        return states[0]

    parameters = [x for x in whole.parameters() if x.requires_grad]
    if run.task == "rm":
        parameters += list(reward.parameters())
    model = Model(hidden, whole.get_output_embeddings(), reward, unadapted)
    return model, parameters, decoder


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
