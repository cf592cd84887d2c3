"""Training a small Llama-shaped model on packed documents: SFT, then DPO on the model that it left.

    python examples/09_training.py
    python examples/09_training.py --task dpo --steps 200 --compare
    python examples/09_training.py --seqlen 2048 --deterministic --compare
    python examples/09_training.py --seqlen 32768 --report

Data is made as for the FlashMask paper's training runs (Wang et al. 2024, appendix A.2.1): up to
ten documents fill a sequence, the last one being padding. SFT documents are a question with an
answer, under a causal document mask; DPO documents a question with a chosen and a rejected answer,
which share it but do not see each other. A rule to learn: each token repeats the one `LOOK_BACK`
before it, but for some noise; rejected answers do not. Data and initial weights depend on --seed
only, so the loss curves of different kinds of attention can be laid upon each other (--compare):
also, with --deterministic, one with block skipping off, which has to be the same bit for bit.

Before the training, the gradients of one step are checked against dense attention in float64. Runs
on a Hopper GPU where there is one, else on the CPU, tiny. Ends with an error if a gradient is
wrong, or with --compare if a loss curve is.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from dense_check import pick_device, within
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flash_mask_cute import builders, flash_attn_func

EXAMPLE = "09_training"
ATTENTIONS = ("ours", "sdpa", "flex")
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.bfloat16, torch.float32, torch.float64)}
# What rounding does to a run is told by the same run in two types. Attention in float64 is
# differentiated by its LSE, which is float32.
ROUNDED_DTYPE = {torch.float64: torch.float32}
EXACT_DTYPE = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
# A result may be as many times further from the exact one than sdpa with rounding: in DPO, and over
# steps, all rounding ends up in few numbers, by chance in smaller ones for sdpa.
ALLOWED = 3


class Rounding(NamedTuple):
    """What rounding to a type does at least, in its eps: sdpa in one run may be lucky.

    gradient: of the norm of a weight's gradient. curve: of the loss, times the root of the number
    of steps; AdamW moves a weight whose gradient is rounding as far as any other.
    """

    gradient: float
    curve: float


# seen with other seeds (0 to 11, two layers, hidden size 64): 13 and 3 of gradients; 260 and 1.4 of
# the loss after two steps, 550 and 2.9 after ten
ROUNDING = {torch.float32: Rounding(8, 40), torch.bfloat16: Rounding(2, 0.3)}

VOCABULARY = 128
LOOK_BACK = 8
NOISE = 0.1
MAX_DOCUMENTS = 10
MIN_DOCUMENT = 128  # tokens; padding is shorter than that
CHECKED_SEQLEN = 512
STEPS_TO_FALL = 16  # fewer steps may not show that a loss falls
MEASURED_STEPS, MEASURED_ROUNDS = 10, 3
HEAD_GROUP = 4  # query heads that share a KV head
DPO_BETA = 0.1
LEARNING_RATE = {"sft": 0.4, "dpo": 0.1}  # divided by the hidden size

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
Curves: TypeAlias = dict[str, list[float]]


# -- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """One sequence. documents: tokens of [question, answer, ...] of each, the last one is padding.

    tokens, position (in its document, as if it had one answer), document, part (0: question), all
    int64 (seqlen,). targets: the tokens that count in the loss; predictors: for each, the token
    whose logits predict it.
    """

    documents: list[list[int]]
    tokens: Tensor
    position: Tensor
    document: Tensor
    part: Tensor
    targets: Tensor
    predictors: Tensor


def draw_documents(seqlen: int, num_answers: int, rng: torch.Generator) -> list[list[int]]:
    """Lengths that add up to seqlen; short sequences get shorter documents than the paper's."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    shortest = min(MIN_DOCUMENT, seqlen // 4)
    padding = draw(0, shortest - 1)
    num_documents = draw(1, min(MAX_DOCUMENTS - 1, (seqlen - padding) // shortest))
    spare = seqlen - padding - num_documents * shortest
    cuts = sorted([0, *(draw(0, spare) for _ in range(num_documents - 1)), spare])
    documents = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        length = shortest + end - start
        low, high = (int(x * length / (1 + x * num_answers)) for x in (0.1, 0.2))
        answers = [draw(max(low, 1), max(high, 1)) for _ in range(num_answers)]
        documents.append([length - sum(answers), *answers])
    return [*documents, [padding]]


def make_batch(task: str, seqlen: int, seed: int, step: int, device: torch.device) -> Packed:
    rng = torch.Generator().manual_seed(1_000_003 * seed + 2 * step + (task == "dpo"))
    documents = draw_documents(seqlen, {"sft": 1, "dpo": 2}[task], rng)
    # small numbers are frequent
    fresh = (VOCABULARY * torch.rand(seqlen, generator=rng) ** 3).long().tolist()
    anything = torch.randint(0, VOCABULARY, (seqlen,), generator=rng).tolist()
    is_noise = (torch.rand(seqlen, generator=rng) < NOISE).tolist()
    tokens: list[int] = []
    rows: dict[str, list[int]] = {
        name: [] for name in ("position", "document", "part", "targets", "predictors")
    }
    for number, parts in enumerate(documents):
        question: list[int] = []
        is_padding = number == len(documents) - 1
        for part, length in enumerate(parts):
            start = len(tokens)
            text = list(question)
            for index in range(start, start + length):
                follows_rule = part < 2 and len(text) >= LOOK_BACK and not is_noise[index]
                token = text[-LOOK_BACK] if follows_rule else fresh[index]
                text.append(0 if is_padding else anything[index] if part == 2 else token)
            tokens += text[len(question) :]
            rows["position"] += range(len(question), len(text))
            rows["document"] += [number] * length
            rows["part"] += [part] * length
            if part == 0:
                question, last_of_question = text, len(tokens) - 1
            else:
                rows["targets"] += range(start, start + length)
                rows["predictors"] += [last_of_question, *range(start, start + length - 1)]
    tensors = {name: torch.tensor(row, device=device) for name, row in rows.items()}
    return Packed(documents, torch.tensor(tokens, device=device), **tensors)


# -- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Which attention a model gets. skip_blocks, deterministic: of ours only."""

    name: str
    skip_blocks: bool = True
    deterministic: bool = False

    def for_batch(self, task: str, batch: Packed) -> Attend:
        """For q (1, seqlen, heads, d) and k, v (1, seqlen, heads_kv, d), in every layer."""
        return {"ours": self._ours, "sdpa": self._sdpa, "flex": self._flex}[self.name](task, batch)

    def _ours(self, task: str, batch: Packed) -> Attend:
        seqlen, device = len(batch.tokens), batch.tokens.device
        if task == "sft":
            lengths = [sum(parts) for parts in batch.documents]
            mask = builders.causal_document(lengths, seqlen, device=device)
        else:
            mask = builders.share_question(batch.documents, seqlen, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flash_attn_func(
                q,
                k,
                v,
                startend_row_indices=mask,
                deterministic=self.deterministic,
                config={"skip_blocks": self.skip_blocks},
            )
            return out

        return attend

    def _sdpa(self, task: str, batch: Packed) -> Attend:
        row = torch.arange(len(batch.tokens), device=batch.tokens.device)
        visible = sees(batch.document, batch.part, row[:, None], row)[None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[2] // k.shape[2]
            # heads are repeated here: torch's kernels with a mask do not share them
            k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)

        return attend

    def _flex(self, task: str, batch: Packed) -> Attend:
        make_mask, flex = compiled_flex()
        seqlen, document, part = len(batch.tokens), batch.document, batch.part

        def mask_mod(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            return sees(document, part, q_idx, k_idx)

        block_mask = make_mask(mask_mod, None, None, seqlen, seqlen, device=document.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out: Tensor = flex(q, k, v, block_mask=block_mask, enable_gqa=True)
            return out.transpose(1, 2)

        return attend


def sees(document: Tensor, part: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """The mask of both tasks by its definition; the index tensors broadcast."""
    shares_part = (part[k_idx] == 0) | (part[q_idx] == part[k_idx])
    return (k_idx <= q_idx) & (document[q_idx] == document[k_idx]) & shares_part


@cache
def compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        torch.compile(create_block_mask, dynamic=False),
        torch.compile(flex_attention, dynamic=False),
    )


# -- model --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm. Weights are kept in the model's `master` type
    and used in that of the activations."""

    def __init__(self, hidden: int, heads: int, draw: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.heads_kv = heads // HEAD_GROUP if heads % HEAD_GROUP == 0 else heads
        inner = 8 * hidden // 3 // 8 * 8
        self.norm_attention, self.norm_mlp = (draw(hidden, scale=0.0, mean=1.0) for _ in range(2))
        self.qkv = draw(hidden + 2 * self.heads_kv * self.head_dim, hidden)
        self.out = draw(hidden, hidden)
        self.gate_up = draw(2 * inner, hidden)
        self.down = draw(hidden, inner)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        qkv = linear(rms_norm(x, self.norm_attention), self.qkv)
        heads = qkv.view(1, len(x), self.heads + 2 * self.heads_kv, self.head_dim)
        q, k, v = heads.split((self.heads, self.heads_kv, self.heads_kv), dim=2)
        attended = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = x + linear(attended.reshape(x.shape), self.out)
        gate, up = linear(rms_norm(x, self.norm_mlp), self.gate_up).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.down)


class Llama(nn.Module):
    """`layers` layers between an embedding and a head that are one tensor. dtype: of activations;
    weights are float32, or float64 where the activations are."""

    frequencies: Tensor

    def __init__(self, layers: int, hidden: int, heads: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.master = torch.promote_types(dtype, torch.float32)
        self.dtype = dtype

        def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> nn.Parameter:
            # in float64, so that all types start from the same weights
            values = torch.randn(shape, generator=rng, dtype=torch.float64)
            return nn.Parameter((mean + scale * shape[-1] ** -0.5 * values).to(self.master))

        self.embedding = draw(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, draw) for _ in range(layers))
        self.norm = draw(hidden, scale=0.0, mean=1.0)
        head_dim = hidden // heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("frequencies", 10000.0**-exponents)

    def forward(self, batch: Packed, attend: Attend) -> Tensor:
        """Log probabilities of the targets, (targets,) in the type of the weights."""
        angles = batch.position[:, None] * self.frequencies
        rotation = (angles.cos()[:, None].to(self.master), angles.sin()[:, None].to(self.master))
        # unlike indexing, these two have the same gradients in every run on a CPU
        x = F.embedding(batch.tokens, self.embedding).to(self.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        x = rms_norm(x.index_select(0, batch.predictors), self.norm)
        logits = linear(x, self.embedding).to(self.master)
        return -F.cross_entropy(logits, batch.tokens[batch.targets], reduction="none")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps=1e-6).to(x.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of (1, seqlen, heads, d) by (seqlen, 1, d / 2) cosines and sines."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


# -- training -----------------------------------------------------------------------------------


def loss_of(
    task: str, model: Llama, reference: Llama | None, batch: Packed, attention: Attention
) -> Tensor:
    """SFT: cross entropy of the answers. DPO (Rafailov et al. 2023): minus the log of how surely
    the chosen answers are told from the rejected ones, relative to the reference."""
    attend = attention.for_batch(task, batch)
    log_probability = model(batch, attend)
    if task == "sft":
        return -log_probability.mean()
    assert reference is not None
    with torch.no_grad():
        expected = reference(batch, attend)
    gains = log_probability - expected
    answer = 2 * batch.document[batch.targets] + batch.part[batch.targets] - 1
    num_documents = len(batch.documents) - 1
    by_answer = gains.new_zeros(2 * num_documents).index_add(0, answer, gains).view(-1, 2)
    return -F.logsigmoid(DPO_BETA * (by_answer[:, 0] - by_answer[:, 1])).mean()


class Trainer:
    """One task: a model, the copy of it that DPO refers to, and the state of the optimiser."""

    def __init__(self, task: str, model: Llama, attention: Attention) -> None:
        self.task, self.model, self.attention = task, model, attention
        self.reference = copy.deepcopy(model).requires_grad_(False) if task == "dpo" else None
        rate = LEARNING_RATE[task] / len(model.norm)
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0)

    def step(self, batch: Packed) -> Tensor:
        """The loss before the step."""
        loss = loss_of(self.task, self.model, self.reference, batch, self.attention)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_model(settings: argparse.Namespace, dtype: torch.dtype | None = None) -> Llama:
    model = Llama(
        settings.layers, settings.hidden, settings.heads, dtype or settings.dtype, settings.seed
    )
    return model.to(settings.device)


def train(
    settings: argparse.Namespace, attention: Attention, dtype: torch.dtype | None = None
) -> Curves:
    """The losses of each task, before each of its steps. dtype: instead of the one in settings."""
    model = make_model(settings, dtype)
    title = f"{attention.name} in {name_of(model.dtype)}"
    on_cpu = "" if settings.device.type == "cuda" else " of walks on the CPU"
    quarter = max(settings.steps // 4, 1)
    curves: Curves = {}
    for task in settings.tasks:
        trainer = Trainer(task, model, attention)
        losses = curves[task] = []
        began = time.perf_counter()
        for number in range(settings.steps):
            batch = make_batch(task, settings.seqlen, settings.seed, number, settings.device)
            losses.append(trainer.step(batch).item())
            if (number + 1) % quarter == 0:
                per_step = 1e3 * (time.perf_counter() - began) / (number + 1)
                print(
                    f"{title}, {task}: steps {number + 2 - quarter} to {number + 1} of "
                    f"{settings.steps}, mean loss {mean(losses[-quarter:]):.4f}, "
                    f"{per_step:.0f} ms a step{on_cpu}",
                    flush=True,
                )
    return curves


def mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def check_fall(curves: Curves) -> None:
    """Print the mean losses of the first and of the last quarter of the steps.

    Raises:
        SystemExit: a loss did not fall in a training that is long enough.
    """
    for task, losses in curves.items():
        quarter = max(len(losses) // 4, 1)
        first, last = mean(losses[:quarter]), mean(losses[-quarter:])
        print(f"{task}: the mean loss falls from {first:.4f} to {last:.4f}")
        if len(losses) >= STEPS_TO_FALL and not last < first:
            raise SystemExit(f"{EXAMPLE}: the loss of {task} does not fall")


# -- checks -------------------------------------------------------------------------------------


def gradients(
    settings: argparse.Namespace, task: str, attention: Attention, dtype: torch.dtype
) -> list[Tensor]:
    """Of each weight, in float64, in one step of a short sequence. DPO refers to other weights: to
    its own, the loss would be ln 2 whatever the attention."""
    model = make_model(settings, dtype)
    reference = Llama(settings.layers, settings.hidden, settings.heads, dtype, settings.seed + 1)
    seqlen = min(settings.seqlen, CHECKED_SEQLEN)
    batch = make_batch(task, seqlen, settings.seed, settings.steps, settings.device)
    loss = loss_of(task, model, reference.to(settings.device), batch, attention)
    return [x.double() for x in torch.autograd.grad(loss, list(model.parameters()))]


def check_gradients(settings: argparse.Namespace, attention: Attention) -> None:
    """Print the largest error of the gradients of a weight, as a part of their norm.

    Raises:
        SystemExit: those of a weight are further from sdpa in float64 than ALLOWED times what sdpa
            is with rounding, or than what rounding does at least.
    """
    dense = Attention("sdpa")
    rounded = ROUNDED_DTYPE.get(settings.dtype, settings.dtype)
    least = ROUNDING[rounded].gradient * torch.finfo(rounded).eps

    def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [((x - y).norm() / y.norm()).item() for x, y in pairs]

    for task in settings.tasks:
        exact = gradients(settings, task, dense, torch.float64)
        found = errors(gradients(settings, task, attention, settings.dtype), exact)
        expected = errors(gradients(settings, task, dense, rounded), exact)
        bounds = [ALLOWED * max(x, least) for x in expected]
        worst = max(range(len(found)), key=lambda i: found[i] / bounds[i])
        what = f"{task}, gradients of {attention.name}, in parts of their norm: largest error"
        remark = f" (sdpa in {name_of(rounded)}: {expected[worst]:.2e})"
        within(EXAMPLE, what, found[worst], bounds[worst], remark)


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(first, second, strict=True))


def compare_curves(settings: argparse.Namespace, found: Curves, dense: Curves) -> None:
    """Print how far apart the curves are, `found` by the attention that was asked for.

    Raises:
        SystemExit: `found` is further from sdpa in a finer type than ALLOWED times what sdpa is
            with rounding, or than what rounding does at least.
    """
    rounded, exact = (types.get(settings.dtype) for types in (ROUNDED_DTYPE, EXACT_DTYPE))
    rounded_curves = dense if rounded is None else train(settings, Attention("sdpa"), rounded)
    exact_curves = dense if exact is None else train(settings, Attention("sdpa"), exact)
    rounded_dtype = rounded or settings.dtype
    eps = torch.finfo(rounded_dtype).eps
    for task in settings.tasks:
        difference = largest_difference(found[task], dense[task])
        error = largest_difference(found[task], exact_curves[task])
        expected = largest_difference(rounded_curves[task], exact_curves[task])
        print(
            f"{task}, loss curves of {settings.attention.name} and sdpa: largest difference "
            f"{difference:.2e}; from {name_of(exact or settings.dtype)} {error:.2e} and, by "
            f"rounding to {name_of(rounded_dtype)}, {expected:.2e}"
        )
        least = ROUNDING[rounded_dtype].curve * eps * settings.steps**0.5 * max(exact_curves[task])
        if not error <= ALLOWED * max(expected, least):
            raise SystemExit(f"{EXAMPLE}: loss curves differ by more than rounding ({task})")


# -- output -------------------------------------------------------------------------------------


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plot_losses(path: Path, curves: dict[str, Curves], tasks: Sequence[str]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot of the losses: matplotlib is not installed")
        return
    figure = Figure(figsize=(6 * len(tasks), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for (name, by_task), style in zip(curves.items(), ("-", "--"), strict=False):
            axes.plot(by_task[task], style, label=name)
        axes.set(title=task.upper(), xlabel="step", ylabel="loss")
        axes.legend()
    figure.savefig(path)
    print(f"plot of the losses: {path}")


def report(settings: argparse.Namespace) -> None:
    """Tokens a second and peak memory of a training step with each kind of attention."""
    on_gpu = settings.device.type == "cuda"
    print(f"{settings.seqlen} tokens a step, {name_of(settings.dtype)}; batches are made before")
    print(f"{'task':6}{'attention':12}{'tokens/s':>12}{'peak memory':>14}")
    for task in settings.tasks:
        for name in ATTENTIONS:
            attention = settings.attention if name == settings.attention.name else Attention(name)
            try:
                rate, memory = measure(settings, task, attention)
                told = f"{rate:12.0f}" + (f"{memory / 2**30:10.2f} GiB" if on_gpu else f"{'-':>14}")
            except torch.OutOfMemoryError:
                told = "  out of memory"
            except NotImplementedError as error:
                told = f"  {error}"
            print(f"{task:6}{name:12}{told}", flush=True)


def measure(settings: argparse.Namespace, task: str, attention: Attention) -> tuple[float, int]:
    on_gpu = settings.device.type == "cuda"
    if attention.name == "flex" and not on_gpu:
        raise NotImplementedError("FlexAttention has no backward on the CPU")
    trainer = Trainer(task, make_model(settings), attention)
    batches = [
        make_batch(task, settings.seqlen, settings.seed, number, settings.device)
        for number in range(min(settings.steps, MEASURED_STEPS))
    ]

    def run() -> None:
        for batch in batches:
            trainer.step(batch)
        if on_gpu:
            torch.cuda.synchronize()

    run()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(MEASURED_ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return (
        len(batches) * settings.seqlen / statistics.median(seconds),
        torch.cuda.max_memory_allocated() if on_gpu else 0,
    )


# -- command line -------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model on packed documents.")
    add = parser.add_argument
    add("--task", choices=("sft", "dpo", "both"), default="both")
    add("--seqlen", type=int, help="tokens of a step (256, on a GPU 8192)")
    add("--steps", type=int, help="of each task (16, on a GPU 100)")
    add("--layers", type=int, help="2, on a GPU 8")
    add("--hidden", type=int, help="128, on a GPU 1024")
    add("--heads", type=int, help=f"8; {HEAD_GROUP} of them share a KV head, if they divide so")
    add("--device", choices=("cuda", "cpu"), help="a Hopper GPU if there is one")
    add("--dtype", choices=DTYPES, help="of activations (float32, on a GPU bfloat16)")
    add("--attention", choices=ATTENTIONS, default="ours")
    add("--deterministic", action="store_true", help="the same bits in every run")
    add("--skip-blocks", choices=("on", "off"), default="on", help="off: ours visits all blocks")
    add("--compare", action="store_true", help="train with sdpa, too, and compare the losses")
    add("--report", action="store_true", help="only measure speed and memory of each attention")
    add("--plot", type=Path, default=Path(tempfile.gettempdir()) / f"{EXAMPLE}.png")
    add("--curves", type=Path, help="a file for the losses as JSON")
    add("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    settings.device = torch.device(settings.device) if settings.device else pick_device()
    on_gpu = settings.device.type == "cuda"
    defaults = {
        "seqlen": (256, 8192),
        "steps": (16, 100),
        "layers": (2, 8),
        "hidden": (128, 1024),
        "heads": (8, 8),
        "dtype": ("float32", "bfloat16"),
    }
    for name, values in defaults.items():
        if getattr(settings, name) is None:
            setattr(settings, name, values[on_gpu])
    settings.dtype = DTYPES[settings.dtype]
    settings.tasks = ("sft", "dpo") if settings.task == "both" else (settings.task,)
    settings.attention = Attention(
        settings.attention, settings.skip_blocks == "on", settings.deterministic
    )
    if min(settings.steps, settings.layers, settings.heads) < 1 or settings.seqlen < 64:
        parser.error("--steps, --layers and --heads are at least 1, --seqlen 64")
    if settings.hidden % (8 * settings.heads):
        parser.error("--hidden is a multiple of 8 times --heads")
    if settings.attention.name == "flex" and not on_gpu and not settings.report:
        parser.error("--attention flex trains on a GPU only: FlexAttention has no backward on CPUs")
    if settings.attention.name == "sdpa" and settings.compare:
        parser.error("--compare compares with sdpa: choose another --attention")
    return settings


def run(settings: argparse.Namespace) -> dict[str, Curves]:
    """The loss curves by the name of the attention."""
    attention = settings.attention
    if attention.name != "sdpa":
        check_gradients(settings, attention)
    curves = {attention.name: train(settings, attention)}
    check_fall(curves[attention.name])
    if settings.compare and attention.name == "ours" and attention.deterministic:
        other = train(settings, replace(attention, skip_blocks=not attention.skip_blocks))
        if other != curves[attention.name]:
            raise SystemExit(f"{EXAMPLE}: block skipping changes the loss curves")
        print("loss curves with block skipping on and off: equal bit for bit")
    if settings.compare:
        curves["sdpa"] = train(settings, Attention("sdpa"))
        compare_curves(settings, curves[attention.name], curves["sdpa"])
    if settings.curves is not None:
        settings.curves.write_text(json.dumps(curves))
    plot_losses(settings.plot, curves, settings.tasks)
    return curves


def main(arguments: Sequence[str] = ()) -> None:
    settings = parse(arguments)
    # what the rest of a model needs on a GPU for the same bits in every run
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        if settings.report:
            report(settings)
        else:
            run(settings)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


if __name__ == "__main__":
    main(sys.argv[1:])
