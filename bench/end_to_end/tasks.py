"""The losses of four tasks, by the hidden states of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.end_to_end.documents import Batch

CHUNK = 1024
"""Rows whose logits exist at the same time: those of 128K tokens and 128K words are 34 GB."""
BETA = 0.1
TASKS = ("sft", "lora", "dpo", "rm")


class Model(NamedTuple):
    """hidden: the decoder, of a batch and the arguments of its attention, (n, hidden). vocabulary:
    its last layer. reward: (hidden,) to a number. unadapted: a context without LoRA."""

    hidden: Callable[[Batch, dict[str, Any]], Tensor]
    vocabulary: nn.Module
    reward: nn.Linear
    unadapted: Callable[[], AbstractContextManager[Any]]


def loss_of(task: str, model: Model, batch: Batch, arguments: dict[str, Any]) -> Tensor:
    """sft, lora: cross entropy of the targets. dpo (Rafailov et al. 2023): minus the log of how
    surely the first answer of a document is told from the second, relative to the model without
    LoRA. rm: the same for the rewards of all pairs of answers."""
    if task == "rm":
        rows = model.hidden(batch, arguments).index_select(0, batch.lasts)
        return pair_loss(model.reward(rows.float()).view(-1, batch.num_answers))
    if task in ("sft", "lora"):
        return -log_probabilities(model, batch, arguments).mean()
    with torch.no_grad(), model.unadapted():
        expected = log_probabilities(model, batch, arguments)
    gains = log_probabilities(model, batch, arguments) - expected
    sums = gains.new_zeros(len(batch.lasts)).index_add(0, batch.answer, gains)
    return pair_loss(BETA * sums.view(-1, batch.num_answers))


def pair_loss(values: Tensor) -> Tensor:
    """Of (documents, answers), best answers first: the mean over pairs of answers."""
    first, second = torch.triu_indices(values.shape[1], values.shape[1], 1, device=values.device)
    return -F.logsigmoid(values[:, first] - values[:, second]).mean()


def log_probabilities(model: Model, batch: Batch, arguments: dict[str, Any]) -> Tensor:
    """Of the targets, fp32 (targets,)."""
    rows = model.hidden(batch, arguments).index_select(0, batch.predictors)
    words = batch.tokens[0].index_select(0, batch.targets)

    def of_chunk(some: Tensor, expected: Tensor) -> Tensor:
        return -F.cross_entropy(model.vocabulary(some).float(), expected, reduction="none")

    pairs = zip(rows.split(CHUNK), words.split(CHUNK), strict=True)
    return torch.cat([checkpoint(of_chunk, *pair, use_reentrant=False) for pair in pairs])
