"""Statistics of P from the whole matrix in float64, and drawn calls of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from cases import FP64, Case
from inputs import Inputs
from oracle import NEG_INF, Head, OneSequence, rule_of, sequences
from random_cases import random_case, random_mask_case
from torch import Tensor

NAMES = ("key_sums", "entropy", "block_sums", "block_maxima")
BLOCK_SIZES = (1, 128), (1, 64), (64, 64), (64, 128), (128, 64), (192, 128)


class Wanted(NamedTuple):
    """What a call asks for."""

    reduce: tuple[str, ...] = NAMES
    block_size: tuple[int, int] = (1, 128)
    deterministic: bool = False


def draw_wanted(rng: random.Random) -> Wanted:
    names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
    return Wanted(tuple(names), rng.choice(BLOCK_SIZES), rng.random() < 0.3)


def draw_case(rng: random.Random) -> Case:
    """A drawn problem with any group of heads; packing is left to the library."""
    case = rng.choice((random_case, random_mask_case))(rng)
    if case.heads_q == case.heads_kv and case.strided != "fused_qkv":
        heads_kv = rng.choice((1, 2))
        case = replace(case, heads_q=heads_kv * rng.choice((1, 2, 3, 8)), heads_kv=heads_kv)
    return replace(case, pack_gqa=None)


def arguments(inputs: Inputs, wanted: Wanted) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The public function, by name, and its arguments. LSE is that of the oracle."""
    keywords = dict(inputs.keywords)
    for name in ("learnable_sink", "pack_gqa"):
        keywords.pop(name)
    sides = keywords.pop("window_size_left"), keywords.pop("window_size_right")
    keywords |= {"window_size": sides, **wanted._asdict()}
    if "block_sparse_tensors_torch" in keywords:
        keywords["block_sparse_tensors"] = keywords.pop("block_sparse_tensors_torch")
    lse = inputs.reference[1].float().contiguous()
    lengths = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    if all(keywords.get(name) is None for name in lengths):
        for name in ("seqused_q", "seqused_k"):
            keywords.pop(name)
        return "attention_statistics", (inputs.q, inputs.k, lse), keywords
    return "attention_statistics_varlen", (inputs.q, inputs.k, lse), keywords


def reference_statistics(inputs: Inputs, wanted: Wanted) -> dict[str, Tensor]:
    """In float64, in the public layouts."""
    q, k, (m, n) = inputs.q, inputs.k, wanted.block_size
    case, rule = inputs.case, rule_of(q, **inputs.plain_keywords)
    key_blocks = math.ceil(case.seqlen_k / n)
    of_rows = torch.zeros((*q.shape[:-2], case.heads_kv, key_blocks), dtype=FP64, device=q.device)
    of_blocks = (case.batch, math.ceil(case.seqlen_q / m), case.heads_kv, key_blocks)
    found = {
        "key_sums": torch.zeros(k.shape[:-1], dtype=FP64, device=q.device),
        "entropy": torch.zeros(q.shape[:-1], dtype=FP64, device=q.device),
        "block_sums": of_rows if m == 1 else torch.zeros(of_blocks, dtype=FP64, device=q.device),
    }
    found["block_maxima"] = torch.zeros_like(found["block_sums"])
    like_q: tuple[Tensor, ...] = (q, found["entropy"])
    if m == 1:
        like_q = (*like_q, found["block_sums"], found["block_maxima"])
    like_k = k, found["key_sums"]
    for i, (of_q, of_k) in enumerate(sequences(like_q, like_k, **inputs.plain_keywords)):
        (q_i, entropy, *blocks), (k_i, key_sums) = of_q, of_k
        sums, maxima = blocks or (found["block_sums"][i], found["block_maxima"][i])
        x = OneSequence(q_i, k_i, k_i, i, inputs.dense)
        for head_idx in range(case.heads_q):
            head, kv = Head.create(x, rule, head_idx), head_idx // case.group
            _, scores = head.scores(x, rule, head_idx)
            scores = scores.masked_fill(x.hidden(rule, head_idx), NEG_INF)
            p = head.attend(scores).probabilities
            key_sums[:, kv] += p.sum(0)
            entropy[:, head_idx] = torch.special.entr(p).sum(1)
            for row, of_row in enumerate(_blocks(p, 0, m)):
                for column, block in enumerate(_blocks(of_row, 1, n)):
                    sums[row, kv, column] += block.sum()
                    maxima[row, kv, column] = torch.maximum(maxima[row, kv, column], block.max())
    found["key_sums"], found["entropy"] = found["key_sums"].mT, found["entropy"].mT
    for name in NAMES[2:]:
        found[name] = found[name].transpose(-2, -3)
    return {name: found[name] for name in wanted.reduce}


def _blocks(p: Tensor, dim: int, size: int) -> Iterable[Tensor]:
    return p.split(size, dim) if p.numel() else ()


def assert_right(
    run: Callable[..., Any], inputs: Inputs, wanted: Wanted, rtol: float, atol: float
) -> None:
    """run: called as the public function of `arguments`, after its name.

    An LSE and scores of its size, rounded to fp32, make each p relatively wrong by a share of that
    size, and so a sum of them, and an entropy E by (1 + E) times as much. Tensor cores truncate the
    scores: an error of up to a whole unit of the last place, where rounding has half of one.
    """
    name, operands, keywords = arguments(inputs, wanted)
    finite = operands[2][operands[2].isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    rtol, atol = (x + largest * 2.0**-22 for x in (rtol, atol))
    found = run(name, *operands, **keywords)._asdict()
    expected = reference_statistics(inputs, wanted)
    assert {name for name, x in found.items() if x is not None} == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape and got.dtype == torch.float32, name
        assert not got.requires_grad
        error, allowed = (got.double() - want).abs(), atol + rtol * want.abs()
        assert (error <= allowed).all(), f"{name}: {(error / allowed).max():.3g} of what is allowed"
