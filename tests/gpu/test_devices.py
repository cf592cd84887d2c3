"""Tensors of a GPU that is not the current one: what runs for them, runs there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import FP32, Case
from eager import assert_close_to_oracle, assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from test_block_lists import documents
from test_functional_gpu import arguments_of, check

from flash_mask_cute import ColumnMask, create_block_mask, flash_attn_func

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, torch sees {torch.cuda.device_count()}"
)

OTHER = "cuda:1"
CASES = (
    Case("causal-gqa4-sink", 2, 300, 300, 8, 2, causal=True, sink=FP32),
    Case("columns-packed", lengths_q=(129, 0, 200), lengths_k=(200, 63, 170), causal=True,
         column="stepped1"),
    Case("mask_mod-blocks", 2, 255, 255, mask_mod="documents", blocks=(64, 64)),
    Case("mask_mod-stored-blocks", 1, 300, 300, 4, 4, mask_mod="documents", blocks=(64, 64)),
    Case("documents1-gqa2", 2, 1300, 1300, 4, 2, causal=True, column="documents1", sink=FP32),
    Case("score_mod-aux", 1, 129, 255, score_mod="t5"),
)  # fmt: skip
by_id = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def the_current_one_stays() -> Iterator[None]:
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def allocations_on_the_current_one() -> int:
    count: int = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
    return count


@by_id
def test_forward_and_backward(case: Case) -> None:
    """The first call, which compiles, and a warm one."""
    before = allocations_on_the_current_one()
    for seed in range(2):
        check(make_inputs(case, OTHER, seed))
    assert allocations_on_the_current_one() == before


@by_id
def test_a_fixed_order(case: Case) -> None:
    inputs = make_inputs(case, OTHER)
    function, keywords = arguments_of(inputs)
    dout, dlse = make_output_gradients(inputs)
    out, lse = function(**keywords, deterministic=True)
    names = [x for x in ("q", "k", "v", "learnable_sink") if keywords[x] is not None]
    found = torch.autograd.grad((out, lse), [keywords[x] for x in names], (dout, dlse))
    gradients: dict[str, torch.Tensor | None] = {"dq": None, "dk": None, "dv": None, "dsink": None}
    for name, x in zip(names, found, strict=True):
        assert x.device == torch.device(OTHER)
        gradients["dsink" if name == "learnable_sink" else f"d{name}"] = x
    assert_gradients_close(gradients, inputs, dout, dlse)


def test_compiled() -> None:
    torch._dynamo.reset()
    inputs = make_inputs(CASES[0], OTHER)
    check(inputs, torch.compile(arguments_of(inputs)[0], fullgraph=True))


def test_what_masks_are_made_of() -> None:
    """Block lists, and bounds and documents of column intervals, as on the CPU."""
    ids = torch.arange(700, dtype=torch.int32).div(150, rounding_mode="floor").int()[None]
    lists = [
        create_block_mask(documents, 1, 1, 700, 700, device=device, aux_tensors=[ids.to(device)])
        for device in ("cpu", OTHER)
    ]
    for here, there in zip(lists[0][:4], lists[1][:4], strict=True):
        assert there.device == torch.device(OTHER) and torch.equal(here, there.cpu())
    indices = ((torch.arange(1300) // 600 + 1) * 600).clamp(max=1300).int().view(1, 1, 1300, 1)
    masks = [ColumnMask(x, causal=True, documents=True) for x in (indices, indices.to(OTHER))]
    for _ in range(2):
        bounds = [mask.bounds(128) for mask in masks]
        assert torch.equal(bounds[0], bounds[1].cpu())
        starts = [mask.split(1).cu_seqlens for mask in masks]
        assert torch.equal(starts[0], starts[1].cpu())
        for mask in masks:
            mask.startend_row_indices.clamp_(max=1100)
            mask.refresh()


def test_runs_on_the_current_stream_of_that_gpu() -> None:
    """It is busy before it writes q, k and v: a kernel on another stream would read zeros."""
    inputs = make_inputs(CASES[0], OTHER)
    sources = inputs.q, inputs.k, inputs.v
    q, k, v = (torch.zeros_like(x) for x in sources)
    keywords = {"causal": True, "learnable_sink": inputs.keywords["learnable_sink"]}
    flash_attn_func(q, k, v, **keywords)
    stream = torch.cuda.Stream(OTHER)
    stream.wait_stream(torch.cuda.current_stream(OTHER))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        with torch.cuda.device(OTHER):
            torch.cuda._sleep(200_000_000)
        for x, source in zip((q, k, v), sources, strict=True):
            x.copy_(source)
        assert torch.cuda.current_device() == 0
        out, lse = flash_attn_func(q, k, v, return_lse=True, **keywords)
    stream.synchronize()
    assert_close_to_oracle(out, lse, Inputs(inputs.case, *sources, inputs.keywords))
