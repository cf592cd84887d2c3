"""NaN and infinities where nobody may see them: unused rows, and rows that see nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from cases import COLUMN_DOCUMENT_CASES, FP16, FP32, Case
from eager import assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from oracle import each_sequence, rule_of
from torch import Tensor

from flash_mask_cute.masks.column_mask import ColumnMask

NAN, INF = float("nan"), float("inf")
VALUES = {"nan": NAN, "inf": INF}

# rows past seqused_*, in each layout; a sequence without a key or query in use among them
UNUSED_CASES = (
    Case("dense", 3, 70, 300, 4, 2, seqused_q=(70, 33, 5), seqused_k=(257, 65, 0)),
    Case("dense-d64-causal", 2, 130, 129, head_dim=64, seqused_k=(129, 70), causal=True),
    Case("dense-one-row", 2, 1, 200, 8, 1, seqused_k=(1, 190), pack_gqa=True),
    Case(
        "dense-transposed-fp16",
        2, 65, 129, dtype=FP16, strided="transposed", seqused_q=(0, 64), seqused_k=(128, 1),
        window_left=40,
    ),
    Case("packed-q", seqlen_k=129, lengths_q=(130, 1), seqused_q=(90, 0), seqused_k=(0, 100)),
    Case("packed-k", seqlen_q=70, lengths_k=(129, 65), seqused_q=(1, 66), seqused_k=(65, 0)),
    Case(
        "packed",
        lengths_q=(70, 0, 65), lengths_k=(129, 65, 70), seqused_q=(64, 0, 9),
        seqused_k=(3, 65, 0), causal=True,
    ),
)  # fmt: skip
# of the backward only, or of Hopper
WIDE_UNUSED_CASES = (
    Case("d256", 2, 70, 150, 2, 1, head_dim=256, seqused_q=(66, 9), seqused_k=(130, 0)),
    Case("d192-softcap", 2, 70, 70, head_dim=192, softcap=9.0, seqused_q=(66, 0), seqused_k=(0, 9)),
)


def with_unused(inputs: Inputs, value: float) -> Inputs:
    """The same, results included, with `value` in all unused rows of q, k and v."""
    tensors = {name: getattr(inputs, name).clone() for name in "qkv"}
    for name, tensor in tensors.items():
        tensor[~inputs.rows_in_use("q" if name == "q" else "k")] = value
    hostile = replace(inputs, **tensors)
    # a property that is computed once
    vars(hostile)["reference"] = inputs.reference
    return hostile


# masks that leave queries without a key: all that a mask is made of, and the rows in tiles with
# others that see something
EMPTY_CASES = (
    Case("causal-gqa2", 2, 200, 129, 4, 2, causal=True),
    Case("window-d64", 1, 300, 129, head_dim=64, window_left=20, window_right=10),
    Case("mask-d64", 2, 129, 200, head_dim=64, mask_mod="blinding"),
    # which has mask bits for all heads
    Case("mask-gqa2", 1, 129, 200, 4, 2, mask_mod="blinding"),
    Case("lists-fp16", 2, 150, 200, dtype=FP16, blocks=(48, 80)),
    Case("columns1-causal", 2, 129, 200, causal=True, column="blinding1"),
    Case("columns2-sink", 2, 200, 129, causal=True, sink=FP32, column="blinding2"),
    Case("score", 1, 129, 150, score_mod="blinding"),
    Case(
        "packed-causal-seqused",
        lengths_q=(129, 100), lengths_k=(70, 129), seqused_q=(129, 90), seqused_k=(65, 30),
        causal=True,
    ),
    Case("dense-seqused", 2, 129, 129, seqused_q=(129, 70), seqused_k=(50, 0), causal=True),
    Case("d256", 1, 150, 70, 2, 1, head_dim=256, causal=True),
    Case("d192-softcap", 1, 150, 70, 1, 1, head_dim=192, softcap=9.0, causal=True),
)  # fmt: skip


def empty_rows(inputs: Inputs) -> Tensor:
    """Boolean, the shape of q without d: rows in use that see no key."""
    rule = rule_of(inputs.q, **inputs.plain_keywords)
    empty = torch.zeros(inputs.q.shape[:-1], dtype=torch.bool, device=inputs.q.device)
    tensors = inputs.q, inputs.k, inputs.v, inputs.dense
    for x, (empty_i,), _ in each_sequence(*tensors, (empty,), **inputs.plain_keywords):
        zeros = torch.zeros(x.q.shape[0], x.k.shape[0], device=x.q.device)
        for head_idx in range(x.q.shape[1]):
            scores = x.modified(zeros, head_idx)
            hides = x.hidden(rule, head_idx) | scores.isneginf()
            empty_i[:, head_idx] = hides.all(dim=1)
    return empty


class Hostile(NamedTuple):
    """inputs, dout and dlse with a value in rows that nobody may see, and without, for oracles."""

    inputs: Inputs
    dout: Tensor
    dlse: Tensor
    clean_inputs: Inputs
    clean_dout: Tensor
    clean_dlse: Tensor

    def assert_close(self, gradients: Mapping[str, Tensor | None]) -> float:
        """The error bound of the project; the largest error as a share of it."""
        # autograd has NaN for a row of which a score_mod leaves nothing
        rtol = None if self.inputs.case.score_mod is None else 0.02
        clean = self.clean_inputs, self.clean_dout, self.clean_dlse
        return assert_gradients_close(gradients, *clean, rtol=rtol)


def with_unused_gradients(inputs: Inputs, value: float) -> Hostile:
    """`with_unused`, and dout and dlse likewise."""
    clean = make_output_gradients(inputs)
    dout, dlse = (x.clone() for x in clean)
    for x in (dout, dlse.mT):
        x[~inputs.rows_in_use("q")] = value
    return Hostile(with_unused(inputs, value), dout, dlse, inputs, *clean)


def with_empty(inputs: Inputs, value: float) -> Hostile:
    """Also `value` in dout, dlse and some q of rows that see nothing; a score_mod has no NaN."""
    hostile = with_unused_gradients(inputs, value)
    empty = empty_rows(inputs)
    in_use = inputs.rows_in_use("q")
    assert empty.any() and not empty[in_use].all(), inputs.case.id
    hostile.dout[empty] = value
    if inputs.case.sink is None:
        hostile.dlse.mT[empty] = value
    if inputs.case.score_mod is None:
        every_third = torch.arange(empty.shape[-2], device=empty.device) % 3 == 0
        hostile.inputs.q[empty & every_third[:, None]] = value
    return hostile


def check_padded_documents(
    attend: Callable[..., Tensor], device: str = "cpu", value: float = NAN
) -> None:
    """By autograd, whose forward meets what its backward does. attend: a public function."""
    hostile = with_empty(padded_documents(device), value)
    given = hostile.inputs
    leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    out = attend(*leaves, **given.mask_keywords, causal=True)
    gradients = torch.autograd.grad(out, leaves, hostile.dout)
    dlse = torch.zeros_like(hostile.dlse)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    hostile._replace(dlse=dlse, clean_dlse=dlse).assert_close(named)


def padded_documents(device: str = "cpu") -> Inputs:
    """Documents, told by intervals, before 100 rows of padding, which see nothing."""
    inputs = make_inputs(COLUMN_DOCUMENT_CASES[0], device)
    assert inputs.dense is not None and inputs.dense.columns is not None
    (columns,) = inputs.dense.columns
    padding = columns.shape[1] - 100
    columns.clamp_(max=padding)
    columns[:, padding:] = 0
    mask = ColumnMask(columns[None], causal=True, documents=True)
    return replace(inputs, mask_keywords={"startend_row_indices": mask})
