"""An output in float32 of inputs in 16 bits, which parts that are merged later have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from inputs import make_inputs
from planned import planned
from wide_outputs import CASES, assert_wide, new_out

from flash_mask_cute import builders, explain
from flash_mask_cute.core.stream_k import BY_ROWS
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case, num_splits: int) -> None:
    inputs = make_inputs(case)
    out = new_out(inputs)
    found, lse = _flash_attn_fwd(
        inputs.q, inputs.k, inputs.v, **inputs.keywords, num_splits=num_splits, out=out
    )
    assert found is out and lse is not None
    assert_wide(out, lse, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [None, [300, 276]])
def test_every_way_to_compute_it(lengths: list[int] | None, dtype: torch.dtype) -> None:
    """Of packed sequences, and of documents that are made into them; the CPU rounds nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 576, 2, 64, generator=generator).to(dtype) for _ in range(3))
    keywords: dict[str, Any] = {"causal": True}
    if lengths is not None:
        keywords = {"startend_row_indices": builders.causal_document(lengths)}
    out = torch.full((1, 576, 2, 64), torch.nan)
    _flash_attn_fwd(q, k, v, out=out, **keywords)
    exact, _ = _flash_attn_fwd(q.double(), k.double(), v.double(), **keywords)
    assert torch.allclose(out.double(), exact, atol=1e-6)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths or [576]).cumsum(0)], dtype=torch.int32)
    packed = torch.full((576, 2, 64), torch.nan)
    of_sequences = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    _flash_attn_fwd(q[0], k[0], v[0], out=packed, **of_sequences)
    assert torch.allclose(packed.double(), exact[0], atol=1e-6)


def test_one_split_is_combined() -> None:
    """A kernel writes out in the dtype of q; the sum of splits has any."""
    inputs = make_inputs(CASES[0])
    chosen = planned(inputs, num_splits=1, out=new_out(inputs))
    assert chosen.problem.split == BY_ROWS and chosen.splits is not None
    assert (chosen.splits.number, chosen.out_dtype) == (1, "float32")
    narrow = planned(inputs, num_splits=1)
    assert narrow.splits is None and narrow.out_dtype == "bfloat16"


@pytest.mark.usefixtures("explained_without_compiling")
def test_explain_says_it() -> None:
    q = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    told = str(explain(q, q, q, causal=True, out=torch.zeros(1, 256, 2, 64), num_splits=1))
    assert "1 of each work tile" in told


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "more", "error", "text"),
    [
        (torch.bfloat16, torch.float16, {}, TypeError, r"q \(torch.bfloat16\) or float32, got"),
        (torch.float32, torch.float64, {}, TypeError, r"q \(torch.float32\), got torch.float64"),
        (torch.float64, torch.float32, {}, TypeError, r"q \(torch.float64\), got torch.float32"),
        (torch.bfloat16, torch.float32, {"max_scores": torch.zeros(1, 2, 9)}, NotImplementedError,
         r"out in torch.float32 of q in torch.bfloat16 .* with return_max_logit \(max_scores\)"),
    ],
)  # fmt: skip
def test_refusals(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    more: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    q = torch.zeros(1, 9, 2, 64, dtype=dtype)
    with pytest.raises(error, match=text):
        _flash_attn_fwd(q, q, q, out=torch.zeros(1, 9, 2, 64, dtype=out_dtype), **more)


def test_a_backward_takes_what_was_rounded() -> None:
    q = torch.zeros(1, 9, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="out must have the dtype of q"):
        _flash_attn_bwd(q, q, q, q.float(), q, torch.zeros(1, 2, 9))
