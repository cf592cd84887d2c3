"""The oracle of FlexAttention tests and its random programs against torch's own eager functions."""

from __future__ import annotations

import random

import pytest
import torch
from flex_catalogue import CATALOGUE, DOCUMENTS, T5_BIAS, CatalogueMod, Extents
from flex_oracle import attention, dense_mask, dense_scores
from flex_trees import EXTENTS, draw_programs, mod_of, scores_of
from torch.nn.attention import flex_attention as torch_flex

EXTENTS_OF_MODS = Extents(2, 4, 70, 150)


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("row", (*CATALOGUE, T5_BIAS, DOCUMENTS), ids=lambda row: row.name)
def test_outputs_are_those_of_torch(row: CatalogueMod) -> None:
    generator = torch.Generator().manual_seed(1)
    batch, heads, seqlen_q, seqlen_k = EXTENTS_OF_MODS
    q = torch.randn(batch, heads, seqlen_q, 16, generator=generator)
    k, v = torch.randn(2, batch, heads // 2, seqlen_k, 16, generator=generator)
    made, exact = (row.make(EXTENTS_OF_MODS, dtype) for dtype in (torch.float32, torch.float64))
    is_mask = row.kind == "mask_mod"
    expected = attention((q, k, v), q, *((None, exact) if is_mask else (exact, None)))
    block_mask = None
    if is_mask:
        block_mask = torch_flex.create_block_mask(made.mod, *EXTENTS_OF_MODS, device="cpu")
    out, aux = torch_flex.flex_attention(
        q,
        k,
        v,
        score_mod=None if is_mask else made.mod,
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=torch_flex.AuxRequest(lse=True),
    )
    assert (out - expected.out).abs().max() < 1e-5
    assert aux.lse is not None
    seen = expected.lse.isfinite()
    assert torch.equal(aux.lse == float("-inf"), ~seen)
    assert (aux.lse - expected.lse)[seen].abs().max() < 1e-5
    assert all(gradient.isfinite().all() for gradient in expected.gradients)
    if is_mask:
        mask = torch_flex.create_mask(made.mod, *EXTENTS_OF_MODS, device="cpu")
        assert torch.equal(dense_mask(made.mod, EXTENTS_OF_MODS), mask)


def test_programs_mean_the_same_for_all_scores_as_for_one() -> None:
    rng = random.Random(0)
    scores = scores_of(0)
    for number, program in enumerate(draw_programs(0)):
        mod = mod_of(program, 0)
        found = dense_scores(mod, scores)
        assert found.dtype == torch.float32, program.text
        for _ in range(4):
            b, q, k = (rng.randrange(EXTENTS[i]) for i in (0, 2, 3))
            place = [torch.tensor(at, dtype=torch.int32) for at in (b, number, q, k)]
            one = mod(scores[b, number, q, k], *place)
            by = 1e-6 if program.is_rounded else 0.0
            assert torch.isclose(found[b, number, q, k], one, rtol=by, atol=by), program.text
