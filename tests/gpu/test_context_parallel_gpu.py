"""Context parallel attention over NCCL, and what it needs of kernels: positions before the first
key and outputs in float32. Draft trees in a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import wide_outputs
from cases import Case
from inputs import make_inputs
from parallel_calls import METHODS, run_on_gpu
from placed_attention import Draw
from process_group import run_in_processes
from public_call import capture

from flash_mask_cute import builders, flash_attn_with_kvcache
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

CUDA = torch.device("cuda")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_gpu(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs")
    for of_rank in run_in_processes(world, run_on_gpu, backend="nccl", timeout=120):
        assert len(of_rank) == 2 * len(METHODS)
        for name, (error, of_one) in of_rank.items():
            assert error <= 2 * of_one + 1e-3, name


@pytest.mark.shares(4)
@pytest.mark.parametrize("seed", range(4))
def test_queries_before_the_first_key(seed: int) -> None:
    for call in Draw(seed, torch.bfloat16, 64, 400, -300).calls(6):
        keywords = {
            name: x.to(CUDA) if isinstance(x, torch.Tensor) else x
            for name, x in call.keywords.items()
        }
        lists = keywords.get("block_sparse_tensors_torch")
        if lists is not None:
            keywords["block_sparse_tensors_torch"] = type(lists)(
                *(x.to(CUDA) if isinstance(x, torch.Tensor) else x for x in lists)
            )
        q, k, v = (x.to(CUDA) for x in (call.q, call.k, call.v))
        out, lse = _flash_attn_fwd(q, k, v, **keywords)
        assert lse is not None
        call.assert_output(out.cpu(), lse.cpu())
        dout = torch.randn_like(out)
        found = _flash_attn_bwd(q, k, v, out, dout, lse, **keywords)
        call.assert_gradients(tuple(x.cpu() for x in found), dout.cpu())


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("case", wide_outputs.CASES)
def test_an_output_in_float32(case: Case, num_splits: int) -> None:
    inputs = make_inputs(case)
    keywords: dict[str, Any] = {
        name: x.to(CUDA) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.keywords.items()
    }
    q, k, v = (x.to(CUDA) for x in (inputs.q, inputs.k, inputs.v))
    out = wide_outputs.new_out(inputs).to(CUDA)
    _, lse = _flash_attn_fwd(q, k, v, **keywords, num_splits=num_splits, out=out)
    assert lse is not None
    wide_outputs.assert_wide(out.cpu(), lse.cpu(), inputs)


def test_one_graph_serves_later_lengths_and_trees() -> None:
    pools = torch.randn(2, 32, 64, 2, 64, device=CUDA, dtype=torch.bfloat16)
    pages = torch.randperm(32, device=CUDA).view(2, 16).int()
    lengths = torch.tensor([700, 90], dtype=torch.int32, device=CUDA)
    tree = builders.draft_tree([[-1, 0, 0, 1], [-1, -1, 1, 2]], device=CUDA)
    mask_mod = tree.mask_mod(lengths)
    q = torch.randn(2, 4, 8, 64, device=CUDA, dtype=torch.bfloat16)

    def step() -> Any:
        used = lengths + 4
        return flash_attn_with_kvcache(
            q, *pools, cache_seqlens=used, page_table=pages, mask_mod=mask_mod
        )

    graph, captured = capture(step)
    for first, parents in (
        ([700, 90], [[-1, 0, 1, 2], [-1, 0, 0, 0]]),
        ([31, 900], [[-1] * 4] * 2),
    ):
        lengths.copy_(torch.tensor(first))
        tree.bits.copy_(builders.draft_tree(parents, device=CUDA).bits)
        graph.replay()
        assert torch.equal(captured, step())
