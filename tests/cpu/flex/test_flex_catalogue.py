"""FlexAttention mods as users write them: lowered values, attention by them, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from flex_catalogue import (
    BY_NAME,
    CATALOGUE,
    DOCUMENTS,
    REFUSED,
    T5_BIAS,
    CatalogueMod,
    Extents,
    Made,
    RefusedMod,
)
from flex_oracle import Expected, attention, dense_mask, dense_scores
from flex_trees import draw_mask
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from flash_mask_cute.flex import flex_attention, lower_mod, mod_source
from flash_mask_cute.mods.on_cpu import eval_mask_mod, eval_score_mod

ALL = (*CATALOGUE, T5_BIAS, DOCUMENTS)
GRID = Extents(2, 4, 48, 48)
# More than one block of 128; the last ones have more keys than queries and fewer.
PROBLEMS = ((Extents(2, 4, 130, 130), 2), (Extents(1, 2, 70, 150), 2), (Extents(2, 4, 150, 100), 1))
HEAD_DIM = 16
# Of the largest value: operands, scores and modified scores are float32.
ROUNDING = 1e-5
named = pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)


def test_there_are_as_many_as_the_page_says() -> None:
    assert len(CATALOGUE) == len(BY_NAME) == 36
    assert len(REFUSED) == 4


@pytest.mark.shares(8)
@named
def test_lowered_values_are_those_of_torch(row: CatalogueMod) -> None:
    made = row.make(GRID)
    lowered = lower_mod(made.mod, row.kind)
    assert isinstance(lowered.aux_tensors, tuple)
    assert "def " in lowered.source
    scores = torch.randn(tuple(GRID), generator=torch.Generator().manual_seed(3)) * 3
    if row.kind == "mask_mod":
        expected = dense_mask(made.mod, GRID)
        assert 0 < expected.double().mean() < 1, "a mask that hides nothing says little"
    else:
        expected = dense_scores(row.make(GRID, torch.float64).mod, scores.double()).detach()
    places = (
        torch.arange(GRID.seqlen_q, dtype=torch.int32),
        torch.arange(GRID.seqlen_k, dtype=torch.int32),
    )
    aux = tuple(x.detach() for x in lowered.aux_tensors)
    for b in (0, 1):
        for h in (0, 3):
            if row.kind == "mask_mod":
                found = eval_mask_mod(lowered.mod, aux, b, h, *places)
                assert torch.equal(found, expected[b, h]), f"entry {b}, head {h}"
            else:
                found = eval_score_mod(lowered.mod, scores[b, h], aux, b, h, *places)
                assert_close(f"entry {b}, head {h}", found, expected[b, h], 1e-6)


def assert_close(name: str, found: Tensor, expected: Tensor, by: float = ROUNDING) -> None:
    """Infinities are at the same places, and elsewhere errors below `by` of the largest value."""
    assert found.shape == expected.shape, name
    found, is_finite = found.detach().double(), expected.isfinite()
    assert torch.equal(found[~is_finite], expected[~is_finite]), f"{name}: infinities"
    if is_finite.any():
        size = expected[is_finite].abs().max().clamp(min=1.0)
        error = (found - expected)[is_finite].abs().max()
        assert error <= by * size, f"{name} is off by {error:.3g}, of values up to {size:.3g}"


def make_operands(extents: Extents, heads_kv: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and dout, float32 (batch, heads, seqlen, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = extents
    sizes = (heads, seqlen_q), (heads_kv, seqlen_k), (heads_kv, seqlen_k), (heads, seqlen_q)
    return [torch.randn(batch, *size, HEAD_DIM, generator=generator) for size in sizes]


def check_attention(
    extents: Extents,
    heads_kv: int,
    score: CatalogueMod | None = None,
    mask: CatalogueMod | None = None,
    scale: float | None = None,
    by_lse: bool = False,
) -> None:
    """out, LSE and gradients of `flex_attention` against float64."""
    q, k, v, dout = make_operands(extents, heads_kv)
    ours, exact = ((
        None if score is None else score.make(extents, dtype),
        None if mask is None else mask.make(extents, dtype),
    ) for dtype in (torch.float32, torch.float64))  # fmt: skip
    expected_dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(9))
    dlse = expected_dlse if by_lse else None
    expected = attention((q, k, v), dout, *exact, scale=scale, dlse=dlse)
    check_against(expected, (q, k, v), dout, *ours, extents, scale, dlse)


def check_against(
    expected: Expected,
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    score: Made | None,
    mask: Made | None,
    extents: Extents,
    scale: float | None = None,
    dlse: Tensor | None = None,
) -> None:
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask.mod, *extents, device="cpu")
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out, lse = flex_attention(
        q, k, v,
        score_mod=None if score is None else score.mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )  # fmt: skip
    assert_close("out", out, expected.out)
    assert_close("lse", lse, expected.lse)
    trained = () if score is None else score.trained
    ends, grads = [out], [dout]
    if dlse is not None:
        seen = expected.lse.isfinite()
        ends, grads = [out, lse[seen]], [dout, dlse[seen]]
    found = torch.autograd.grad(ends, (q, k, v, *trained), grads, allow_unused=True)
    names = ["dq", "dk", "dv", *(f"gradient of Parameter {i}" for i in range(len(trained)))]
    for name, gradient, right in zip(names, found, expected.gradients, strict=True):
        # what a mod does not read has none
        assert_close(name, torch.zeros_like(right) if gradient is None else gradient, right)


@pytest.mark.shares(8)
@named
def test_attention_and_gradients(row: CatalogueMod) -> None:
    given = {row.kind.removesuffix("_mod"): row}
    for extents, heads_kv in PROBLEMS:
        check_attention(extents, heads_kv, **given)


@pytest.mark.shares(8)
@pytest.mark.parametrize(
    ("score", "mask"),
    [
        ("alibi", "document_causal"),
        ("relative_bias", "sliding"),
        ("graph_edges", "flamingo"),
        ("soft_cap", "block_map"),
        ("hidden_scores", "draft_tree"),
        ("mla_rope", "top_blocks"),
        ("additive_mask", "prefix_lm"),
    ],
)
def test_a_score_mod_beside_a_mask(score: str, mask: str) -> None:
    for extents, heads_kv in PROBLEMS:
        check_attention(extents, heads_kv, BY_NAME[score], BY_NAME[mask])


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
def test_scale(scale: float) -> None:
    check_attention(*PROBLEMS[0], BY_NAME["soft_cap"], BY_NAME["sliding"], scale=scale)


def test_gradients_by_lse() -> None:
    check_attention(*PROBLEMS[0], T5_BIAS, BY_NAME["document_causal"], by_lse=True)


def test_aux_request() -> None:
    extents, heads_kv = PROBLEMS[0]
    q, k, v, dout = make_operands(extents, heads_kv)
    made = BY_NAME["alibi"].make(extents)
    exact = BY_NAME["alibi"].make(extents, torch.float64)
    expected = attention((q, k, v), dout, exact)
    out, aux = flex_attention(
        q, k, v, score_mod=made.mod, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )  # fmt: skip
    assert_close("out", out, expected.out)
    assert_close("lse", aux.lse, expected.lse)
    assert aux.max_scores is None


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.mod.__name__)
def test_refusals_name_the_mod_and_what_to_write(row: RefusedMod) -> None:
    first = row.mod.__code__.co_firstlineno
    with pytest.raises(NotImplementedError) as caught:
        lower_mod(row.mod, row.kind)
    message = str(caught.value)
    assert row.mod.__name__ in message
    assert re.search(row.advice, message), message
    lines = [int(x) for x in re.findall(r"flex_catalogue\.py\D{1,8}(\d+)", message)]
    assert any(first <= line <= first + 3 for line in lines), message
    assert "flash_mask_cute/" not in message, "the line is the user's, not ours"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.mod.__name__)
def test_attention_refuses_them_too(row: RefusedMod) -> None:
    q, k, v, _ = make_operands(Extents(1, 1, 20, 20), 1)
    if row.kind == "mask_mod":
        # what torch evaluates as well, with our function in its place
        block_mask: Any = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 20, 20, device="cpu")
        block_mask.mask_mod = row.mod
        given = {"block_mask": block_mask}
    else:
        given = {"score_mod": row.mod}
    with pytest.raises(NotImplementedError, match=row.mod.__name__):
        flex_attention(q, k, v, **given)


def test_mod_source_is_a_text_to_read() -> None:
    made = BY_NAME["document_causal"].make(GRID)
    assert mod_source(made.mod) == lower_mod(made.mod, "mask_mod").source
    score = BY_NAME["alibi"].make(GRID)
    assert mod_source(score.mod) == lower_mod(score.mod, "score_mod").source


# Masks of recognisable parts: whatever form they take, attention is by the same scores.
MASK_EXTENTS = (
    Extents(2, 2, 140, 140),
    Extents(2, 2, 140, 141),
    Extents(2, 2, 141, 140),
    Extents(2, 2, 60, 150),
    Extents(2, 2, 150, 60),
)


@pytest.mark.shares(4)
@pytest.mark.parametrize("seed", range(24))
def test_masks_of_random_parts(seed: int) -> None:
    check_mask(seed)


def check_mask(seed: int) -> None:
    """One mask, at lengths that are equal or not, by one or by several."""
    extents = MASK_EXTENTS[seed % len(MASK_EXTENTS)]
    mod, text = draw_mask(seed, extents)
    made = Made(mod, ())
    q, k, v, dout = make_operands(extents, 1, seed)
    expected = attention((q, k, v), dout, mask=made)
    try:
        check_against(expected, (q, k, v), dout, None, made, extents)
    except Exception as error:
        error.add_note(f"seed {seed}, {extents}: {text}") if hasattr(error, "add_note") else None
        raise
