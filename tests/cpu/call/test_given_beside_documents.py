"""Tensors given to a call with documents of more than 512 rows; FLASH_MASK_SIM_SEED draws."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from ways import AnyMode

from flash_mask_cute import ColumnMask, builders, explain, flash_attn_func
from flash_mask_cute.call import documents as packed
from flash_mask_cute.call.arguments import CallLengths, OptionalTensors, Tensors
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
HEADS, HEADS_KV, DIM = 4, 2, 16
FORMS = "declared", "undeclared", "plain"
OUTPUTS = "lse", "max_scores", "out"
OF_BACKWARD = "dlse", "dq", "dk", "dv", "dsink"


def test_each_tensor_of_a_call_has_its_form_beside_documents() -> None:
    bundles = {"lengths", "optional", "gradients"}
    named = set(Tensors(*(torch.empty(0),) * 3).by_name()) - bundles
    refused = {*CallLengths._fields, *OptionalTensors._fields}
    forms = [*packed.AS_ROWS, *packed.BY_HEADS, *packed.UNCHANGED, *refused]
    assert sorted(forms) == sorted(named)


class Operands:
    """Of a call; all numbers from rng."""

    def __init__(self, rng: random.Random, batch: int, seqlen: int) -> None:
        self.generator = torch.Generator().manual_seed(rng.randrange(2**32))
        self.batch, self.seqlen = batch, seqlen
        self.q = self.normal(batch, seqlen, HEADS, DIM)
        self.k, self.v = (self.normal(batch, seqlen, HEADS_KV, DIM) for _ in range(2))
        self.sink = self.normal(HEADS)
        first, second = sorted(rng.sample(range(1, seqlen), 2))
        mask = builders.causal_document([first, second - first, seqlen - second])
        self.mask = {
            "declared": mask,
            "undeclared": ColumnMask(mask.startend_row_indices, mask.causal),
            "plain": mask.startend_row_indices,
            "dense": ColumnMask(mask.startend_row_indices, mask.causal, documents=False),
        }

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def masked(self, form: str) -> dict[str, Any]:
        return {"startend_row_indices": self.mask[form], "causal": form == "plain"}

    def outputs(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        by_head = self.batch, HEADS, self.seqlen
        made = {
            "lse": torch.empty(by_head),
            "max_scores": torch.full(by_head, -torch.inf),
            "out": torch.empty_like(self.q),
        }
        return {name: made[name] for name in names}


def operands(*name: object, seqlen: int = 600, batch: int | None = None) -> Operands:
    rng = random.Random(f"{SEED}-{name}")
    return Operands(rng, rng.choice((1, 2)) if batch is None else batch, seqlen)


@pytest.fixture(autouse=True)
def packed_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undeclared documents are looked for in calls of any size."""
    monkeypatch.setattr(packed, "MIN_UNDECLARED_OPERATIONS", 0)
    monkeypatch.setattr(packed, "MIN_UNDECLARED_SEQLEN", 1)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.shares(4)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_operator", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_largest_scores(form: str, batch: int, by_operator: bool, grad: bool) -> None:
    x = operands("largest", seqlen=513, batch=batch)

    def run(form: str) -> list[Tensor]:
        leaves = [y.clone().requires_grad_(grad) for y in (x.q, x.k, x.v)]
        results = flash_attn_func(*leaves, **x.masked(form), return_lse=True, return_max_logit=True)
        gradients = torch.autograd.grad(results[0].sum(), leaves) if grad else ()
        return [y.detach() for y in (*results, *gradients)]

    expected = run("dense")
    if by_operator:
        with AnyMode():
            found = run(form)
    else:
        found = run(form)
    close(found, expected)


@pytest.mark.shares(4)
@pytest.mark.parametrize("number", range(24))
def test_drawn_forwards(number: int) -> None:
    rng = random.Random(f"{SEED}-{number}")
    x = operands(number)
    names = tuple(rng.sample(OUTPUTS, rng.randint(1, 3)))
    sink = rng.choice((None, x.sink))
    start = rng.choice((None, 0, "end", torch.zeros(x.batch, dtype=torch.int32)))

    def run(form: str) -> list[Tensor]:
        given = x.outputs(names)
        options = {"learnable_sink": sink, "q_start": start} | x.masked(form)
        out, lse = _flash_attn_fwd(x.q, x.k, x.v, **options, **given)
        return [out, *given.values(), *([] if lse is None else [lse])]

    close(run(rng.choice(FORMS)), run("dense"))


@pytest.mark.parametrize("number", range(24))
def test_drawn_backwards(number: int) -> None:
    rng = random.Random(f"{SEED}-{number}-backward")
    x = operands(number)
    names = rng.sample(OF_BACKWARD, rng.randint(0, 5))
    sink = x.sink if "dsink" in names else None
    out, lse = _flash_attn_fwd(
        x.q, x.k, x.v, **x.masked("dense"), learnable_sink=sink, return_lse=True
    )
    dout, dlse = x.normal(*x.q.shape), x.normal(x.batch, HEADS, x.seqlen)
    # one of these has batch entries that do not follow each other
    apart = [x for x in rng.sample(("dq", "dk", "dv"), 3) if x in names][:1]

    def run(form: str) -> list[Tensor]:
        like = {"dq": x.q, "dk": x.k, "dv": x.v, "dsink": x.sink}
        given = {name: torch.empty_like(like[name]) for name in names if name != "dlse"}
        for name in apart:
            given[name] = torch.cat((given[name], given[name][:, :1]), 1)[:, :-1]
        of_lse = {"dlse": dlse} if "dlse" in names else {}
        given_sink = {"learnable_sink": sink}
        found = _flash_attn_bwd(
            *(x.q, x.k, x.v, out, dout, lse), **x.masked(form), **given, **of_lse, **given_sink
        )
        return [*found, *given.values()]

    close(run(rng.choice(FORMS)), run("dense"))


@pytest.mark.parametrize("target", [None, "sm_90a"])
@pytest.mark.parametrize("batch", [1, 2])
def test_explain(batch: int, target: str | None) -> None:
    x = operands("explain", batch=batch)
    q, k, v = (y.bfloat16() for y in (x.q, x.k, x.v))
    said = str(
        explain(q, k, v, **x.masked("declared"), **x.outputs(("max_scores",)), target=target)
    )
    assert "packed sequences" in said
