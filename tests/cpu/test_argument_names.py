"""One name for each argument of the public functions, but for those in the table of the docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from example_modules import ROOT

import flash_mask_cute
from flash_mask_cute import explain, flashmask_attention
from flash_mask_cute.call.arguments import Direction, keywords_of
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attn_fwd": _flash_attn_fwd,
    "_flash_attn_bwd": _flash_attn_bwd,
} | {
    name: getattr(flash_mask_cute, name)
    for name in flash_mask_cute.__all__
    if inspect.isfunction(getattr(flash_mask_cute, name))
}


def arguments_of(name: str) -> set[str]:
    if name == "explain":
        public = {"window_size", "block_sparse_tensors"}
        return {"target", *keywords_of(Direction.FORWARD), *public}
    return set(inspect.signature(FUNCTIONS[name]).parameters)


class Row(NamedTuple):
    """A line of the table. takes_both: of the functions, those that have both names."""

    name: str
    others: tuple[str, ...]
    functions: tuple[str, ...]
    takes_both: tuple[str, ...]


def rows() -> list[Row]:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    table = page.partition("## Names of arguments")[2].partition("## ")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            functions, both = cells[2].partition(";")[0], re.findall(r"\*\*`(\w+)`\*\*", cells[2])
            names = [re.findall(r"`(\w+)`", cell) for cell in (*cells[:2], functions)]
            found.append(Row(names[0][0], tuple(names[1]), tuple(names[2]), tuple(both)))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.others[0])
def test_the_table_says_which_names_a_function_takes(row: Row) -> None:
    for function in FUNCTIONS:
        taken = arguments_of(function)
        assert (taken & set(row.others) == set(row.others)) == (function in row.functions), function
        if function in row.functions:
            assert (row.name in taken) == (function in row.takes_both), function


def test_no_other_spelling_of_an_argument_is_left() -> None:
    """Arguments whose names have a part in common are one argument, or stand here."""
    assert len(rows()) == 9
    spellings = {
        name
        for function in FUNCTIONS
        for name in arguments_of(function)
        if re.search(r"window|lse|scale|sparse|block|seqused|seqlens$|batch_idx|leftpad", name)
    }
    in_table = {name for row in rows() for name in (row.name, *row.others)}
    assert spellings - in_table == {
        # results and gradients of the host calls, and parts that are merged
        *("lse", "lse_low", "dlse", "lse_partial"),
        # of queries, not of keys; keep their places in functions of other libraries
        *("seqused_q", "seqused", "cu_seqlens", "rotary_seqlens"),
        *("q_descale", "k_descale", "v_descale"),
        # queries and keys that statistics are summed over
        "block_size",
    }


def test_configs_are_exported_and_taken() -> None:
    from flash_mask_cute import BwdConfig, FwdConfig
    from flash_mask_cute.call import settings

    assert (FwdConfig, BwdConfig) == (settings.FwdConfig, settings.BwdConfig)
    assert {"FwdConfig", "BwdConfig"} <= set(flash_mask_cute.__all__)
    q = torch.randn(1, 64, 1, 64, requires_grad=True)
    configs = FwdConfig(skip_blocks=False), BwdConfig(skip_blocks=False)
    out = flash_mask_cute.flash_attn_func(q, q, q, causal=True, config=configs)
    out.sum().backward()
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(q.detach().transpose(1, 2),) * 3, is_causal=True
    )
    torch.testing.assert_close(out.transpose(1, 2), plain)


@pytest.mark.parametrize("name", ["return_lse", "return_softmax_lse"])
def test_flashmask_returns_lse_by_either_name(name: str) -> None:
    q = torch.randn(1, 20, 1, 16, dtype=torch.float64)
    out, lse = flashmask_attention(q, q, q, causal=True, **{name: True})  # type: ignore[misc]
    scores = (q[0, :, 0] @ q[0, :, 0].T / 4).masked_fill(
        torch.ones(20, 20, dtype=torch.bool).triu(1), float("-inf")
    )
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(-1), check_dtype=False)
    torch.testing.assert_close(out[0, :, 0], scores.softmax(-1) @ q[0, :, 0])
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got 1"):
        flashmask_attention(q, q, q, **{name: 1})  # type: ignore[misc]


def test_both_names_of_a_window_are_refused() -> None:
    q = torch.randn(1, 20, 1, 16)
    with pytest.raises(ValueError, match="window_size and window_size_left are both given"):
        explain(q, q, q, window_size=(3, 3), window_size_left=3)
