"""Batches: documents of random tokens in one packed row, with what attention and losses need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ANSWERS = {"sft": 1, "lora": 1, "dpo": 2, "rm": 6}
"""Of each document. In sft and lora all tokens but the first are the answer. In the others answers
have a tenth to a fifth of the tokens of their document, as in the FlashMask paper."""


class Batch(NamedTuple):
    """One packed row of n tokens.

    tokens, positions: int64 (1, n). ends: int64 (n,), the row from which on a key is hidden: the
    end of its document, or of its answer. lengths: of the sequences that cu_seqlens describe, [] if
    answers share their questions. targets, predictors: int64, the tokens that losses count, and the
    rows that predict them. answer: of each target, the number of its answer, from 0 on. lasts: the
    last row of each answer. num_answers: of each document.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    lengths: list[int]
    targets: Tensor
    predictors: Tensor
    answer: Tensor
    lasts: Tensor
    num_answers: int


class Documents(NamedTuple):
    """lengths: of the question and of each answer of a document. seed: of the tokens."""

    lengths: list[list[int]]
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def sequences(self) -> list[int]:
        """Lengths of the sequences if each answer has a question of its own."""
        return [question + answer for question, *answers in self.lengths for answer in answers]


def draw_documents(task: str, num_tokens: int, mean: int, seed: int) -> Documents:
    """Of mean / 2 to 3 * mean / 2 tokens, num_tokens in all; ValueError for a mean below 32."""
    if not 32 <= mean <= num_tokens:
        raise ValueError(f"docs must be from 32 to tokens={num_tokens}, got {mean}")
    rng, num_answers = random.Random(seed), ANSWERS[task]
    totals: list[int] = []
    while (left := num_tokens - sum(totals)) > 0:
        length = num_tokens if mean >= num_tokens else rng.randint(mean // 2, 3 * mean // 2)
        # no rest shorter than the shortest document
        totals.append(left if left - length < mean // 2 else length)
    lengths = []
    for total in totals:
        if num_answers == 1:
            lengths.append([1, total - 1])
            continue
        longest = max(total // 5 // num_answers, 1)
        answers = [rng.randint(max(longest // 2, 1), longest) for _ in range(num_answers)]
        lengths.append([total - sum(answers), *answers])
    return Documents(lengths, seed)


def make_batch(
    documents: Documents, vocabulary: int, device: torch.device | str, is_shared: bool
) -> Batch:
    """is_shared: the answers of a document share its question; else each has a copy of it."""
    rng = torch.Generator().manual_seed(documents.seed)
    tokens = torch.randint(0, vocabulary, (documents.num_tokens,), generator=rng)
    row = _Row()
    start = 0
    for question, *answers in documents.lengths:
        parts = tokens[start : start + question + sum(answers)].split([question, *answers])
        start += question + sum(answers)
        if is_shared:
            row.add(parts[0], parts[1:])
        else:
            for answer in parts[1:]:
                row.add(parts[0], [answer])
    num_answers = len(documents.lengths[0]) - 1
    lengths = [] if is_shared and num_answers > 1 else row.lengths
    return row.batch(lengths, num_answers, device)


class _Row:
    """A row that is being packed."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.lengths: list[int] = []
        self.columns: dict[str, list[Tensor]] = {
            name: [] for name in ("tokens", "positions", "ends", "targets", "predictors", "answer")
        }
        self.lasts: list[int] = []

    def add(self, question: Tensor, answers: Sequence[Tensor]) -> None:
        first, length = self.num_rows, len(question)
        end = first + length + sum(map(len, answers))
        self._append(question, torch.arange(length), end)
        last_of_question = self.num_rows - 1
        for answer in answers:
            begin = self.num_rows
            places = torch.arange(begin, begin + len(answer))
            self._append(answer, torch.arange(length, length + len(answer)), begin + len(answer))
            predictors = places - 1
            predictors[0] = last_of_question
            self.columns["targets"].append(places)
            self.columns["predictors"].append(predictors)
            self.columns["answer"].append(torch.full_like(places, len(self.lasts)))
            self.lasts.append(self.num_rows - 1)
        self.lengths.append(end - first)

    def _append(self, tokens: Tensor, positions: Tensor, end: int) -> None:
        self.columns["tokens"].append(tokens)
        self.columns["positions"].append(positions)
        self.columns["ends"].append(torch.full_like(positions, end))
        self.num_rows += len(tokens)

    def batch(self, lengths: list[int], num_answers: int, device: torch.device | str) -> Batch:
        made = {name: torch.cat(parts).to(device) for name, parts in self.columns.items()}
        lasts = torch.tensor(self.lasts, device=device)
        tokens, positions = made.pop("tokens")[None], made.pop("positions")[None]
        return Batch(
            tokens, positions, lengths=lengths, lasts=lasts, num_answers=num_answers, **made
        )
