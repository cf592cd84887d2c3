"""Callables that read aux tensors of integers and bool, and what they mean in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case
from inputs import Inputs, make_inputs
from torch import Tensor
from trained_mods import TrainedInputs

# Aux tensors by number. All but the last have an element for each position.
CHOSEN, NAMES, SIDES, STEPS, WEIGHTS, TABLE = range(6)
DTYPES = torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint32, torch.float32
NUM_NAMES = 256


def mask_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Bool by `|` and `~`; uint8 by equality; int8 beside indices; uint32 above 2^31."""
    same = aux[NAMES][q[0]] == aux[NAMES][k[0]]
    near = (k - q > aux[SIDES][q[0]]) | ~aux[CHOSEN][q[0]]
    return (aux[CHOSEN][k[0]] | same) & near & (aux[WEIGHTS][k[0]] > 5)


def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Bool as a condition; int16 and uint32 as numbers; uint8 as an index."""
    from cutlass import Float32, select_

    numbers = aux[STEPS][k[0]].to(Float32) * 2.0**-14 + aux[WEIGHTS][q[0]].to(Float32) * 2.0**-31
    chosen = select_(aux[CHOSEN][q[0]], score[0] * 0.5, score[0])
    return chosen + numbers + aux[TABLE][aux[NAMES][k[0]], h[0]]


def make_aux_tensors(length: int, heads: int, generator: torch.Generator) -> list[Tensor]:
    """For positions below length; of every dtype also its smallest and largest number."""

    def numbers(low: int, high: int) -> Tensor:
        x = torch.randint(low, high + 1, (length,), generator=generator)
        x[:: max(length // 7, 1)] = high
        x[1 :: max(length // 7, 1)] = low
        return x

    runs = torch.rand((length,), generator=generator) < 1 / 40
    # one with a stride
    chosen = (torch.rand((length, 2), generator=generator) < 0.4)[:, 1]
    weights = numbers(0, 2**32 - 1)
    weights[3::9] = torch.randint(0, 9, weights[3::9].shape, generator=generator)
    return [
        chosen,
        ((runs.cumsum(0) * 37 + 255) % NUM_NAMES).to(torch.uint8),
        numbers(-128, 127).clamp(max=20).to(torch.int8),
        numbers(-(2**15), 2**15 - 1).to(torch.int16),
        weights.to(torch.uint32),
        torch.randn((NUM_NAMES, heads), generator=generator) / 4,
    ]


def visible_of(aux: list[Tensor], seqlen_q: int, seqlen_k: int) -> Tensor:
    """What the mask_mod shows, bool (seqlen_q, seqlen_k)."""
    chosen, names, sides, _, weights = (x.to(torch.int64) for x in aux[:TABLE])
    q = torch.arange(seqlen_q, device=chosen.device)[:, None]
    k = torch.arange(seqlen_k, device=chosen.device)
    near = (k - q > sides[q]) | (chosen[q] == 0)
    return ((chosen[k] == 1) | (names[q] == names[k])) & near & (weights[k] > 5)


# of lists for 200 queries and 300 keys
BLOCK_SIZE = 50, 60


def assert_block_lists(lists: Any, aux: list[Tensor]) -> None:
    """That lists of the mask_mod have what it shows."""
    seen = visible_of(aux, 200, 300).view(4, 50, 5, 60).sum(dim=(1, 3)).cpu()
    for kind, is_listed in (("mask", (seen > 0) & (seen < 3000)), ("full", seen == 3000)):
        count, index = (getattr(lists, f"{kind}_block_{x}")[0, 0].cpu() for x in ("cnt", "idx"))
        assert torch.equal(count, is_listed.sum(1).int()), kind
        for of_row, listed in zip(index, is_listed, strict=True):
            expected = listed.nonzero().flatten().int()
            assert torch.equal(of_row[: len(expected)], expected), kind


@dataclass(frozen=True)
class AllDtypes:
    """In place of `DenseMasks`. trained: the last aux tensor, as the modifier reads it."""

    aux: list[Tensor]
    trained: tuple[Tensor, ...]

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        return visible_of(self.aux, seqlen_q, seqlen_k)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        seqlen_q, seqlen_k = scores.shape
        chosen = self.aux[CHOSEN][:seqlen_q, None]
        steps = self.aux[STEPS][:seqlen_k].to(scores.dtype) * 2.0**-14
        weights = self.aux[WEIGHTS][:seqlen_q, None].to(torch.int64).to(scores.dtype) * 2.0**-31
        bias = self.trained[0].to(scores.dtype)[
            self.aux[NAMES][:seqlen_k].to(torch.int64), head_idx
        ]
        return torch.where(chosen, scores * 0.5, scores) + (steps + weights) + bias


def make_all_dtypes(case: Case, device: torch.device | str = "cpu") -> TrainedInputs:
    """`make_inputs` with both callables; the table is trained."""
    inputs = make_inputs(case, device)
    generator = torch.Generator().manual_seed(len(case.id))
    length = max(case.seqlen_q, case.seqlen_k)
    aux = [x.to(device) for x in make_aux_tensors(length, case.heads_q, generator)]
    assert tuple(x.dtype for x in aux) == DTYPES
    keywords = {"mask_mod": mask_mod, "score_mod": score_mod, "aux_tensors": aux}
    dense: Any = AllDtypes(aux, (aux[TABLE],))
    return TrainedInputs(replace(inputs, mask_keywords=keywords, dense=dense), (TABLE,))


def plain_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """With the mask_mod alone, which one kernel asks for all heads where there are several."""
    inputs = make_all_dtypes(case, device).inputs
    keywords = dict(inputs.mask_keywords)
    del keywords["score_mod"]
    dense: Any = MaskOnly(inputs.dense)
    return replace(inputs, mask_keywords=keywords, dense=dense)


@dataclass(frozen=True)
class MaskOnly:
    masks: Any

    def visible(self, *arguments: int) -> Tensor:
        return self.masks.visible(*arguments)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        return scores


CASES = (
    Case("all-dtypes", 1, 200, 300, 4, 2, head_dim=64),
    Case("all-dtypes-causal", 1, 129, 129, 1, 1, causal=True),
)
