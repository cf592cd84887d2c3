"""The forward as an example calls it: cute tensors, block lists, both callables, no host path."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from cases import Case
from dense_masks import DenseMasks
from eager import assert_close_to_oracle
from example_modules import ROOT, load_example
from inputs import Inputs, make_inputs
from native_api_on_devices import (  # noqa: F401
    test_compile_and_call_with_cute_tensors,
    test_options_that_this_kernel_lacks_are_refused,
)
from quiet_runs import quiet_run
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


@dataclass(frozen=True, kw_only=True)
class WindowsByDocument(DenseMasks):
    """What the two callables of the example mean."""

    documents: Tensor
    window: int

    def visible(self, batch_idx: int, head_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        names = self.documents[batch_idx]
        return (names[:, None] == names) & (distances(seqlen_q) <= self.window)

    def modify(self, scores: Tensor, batch_idx: int, head_idx: int) -> Tensor:
        return scores - distances(scores.shape[0]) / 64


def distances(seqlen: int) -> Tensor:
    place = torch.arange(seqlen)
    return (place[:, None] - place).abs()


def count_cut_blocks(seen: Tensor, rows: int, cols: int) -> int:
    """Of bool (batch, seqlen, seqlen): blocks of which something is seen, and not all."""
    blocks = [block for band in seen.split(rows, 1) for block in band.split(cols, 2)]
    return sum(int((block.any((1, 2)) & ~block.all(2).all(1)).sum()) for block in blocks)


def test_example(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example(ROOT / "examples" / "07_native_api.py", monkeypatch)
    attention = example.DocumentAttention(128)
    generator = torch.Generator().manual_seed(0)
    compiled = []
    for case in (Case("one", 1, 450, 450, 2, 2), Case("more", 2, 255, 255, 1, 1)):
        plain = make_inputs(case)
        starts = torch.rand((case.batch, case.seqlen_q), generator=generator) < 1 / 150
        documents = starts.cumsum(dim=1, dtype=torch.int32)
        dense = WindowsByDocument(
            case, None, None, None, documents=documents, window=example.WINDOW
        )
        inputs = Inputs(case, plain.q, plain.k, plain.v, plain.keywords, dense=dense)
        with quiet_run(simulator):
            out, lse, num_blocks = attention(inputs.q, inputs.k, inputs.v, documents)
        assert_close_to_oracle(out, lse, inputs)
        seen = torch.stack(
            [dense.visible(b, 0, case.seqlen_q, case.seqlen_k) for b in range(case.batch)]
        )
        assert num_blocks == case.heads_q * count_cut_blocks(seen, example.TILE_M, example.TILE_N)
        compiled.append(attention.compiled)
    assert compiled[0] is compiled[1]
