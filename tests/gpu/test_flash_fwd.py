from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, CASES, FP32, Case
from eager import assert_close_to_oracle
from guarded_outputs import GuardedOutputs
from inputs import Inputs, make_growing_inputs, make_inputs
from public_call import capture, check, check_replay, forward

import flash_mask_cute
from flash_mask_cute.interface import _flash_attn_fwd


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case) -> None:
    check(make_inputs(case, "cuda"))


EMPTY_ROW_CASES = (
    Case("causal", 2, 300, 100, causal=True),
    Case("window", 1, 700, 100, window_left=20, window_right=10),
    Case("no keys", lengths_q=(129, 64, 255), lengths_k=(0, 200, 0)),
    Case("no keys used", 2, 129, 129, seqused_k=(0, 1), window_left=40),
    Case("packed", 1, 300, 100, 4, 1, causal=True, pack_gqa=True),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("sink", [None, FP32], ids=["no-sink", "sink"])
@pytest.mark.parametrize("case", EMPTY_ROW_CASES)
def test_rows_that_see_nothing(case: Case, sink: torch.dtype | None) -> None:
    inputs = make_inputs(replace(case, sink=sink), "cuda")
    empty = (inputs.reference[0] == 0).all(dim=-1)
    assert empty.sum() >= 100 * case.heads_q
    out, lse = forward(inputs)
    assert (out[empty] == 0).all()
    if sink is None:
        assert (lse.mT[empty] == float("-inf")).all()
    else:
        sinks = inputs.keywords["learnable_sink"].expand_as(lse.mT)
        torch.testing.assert_close(lse.mT[empty], sinks[empty], atol=1e-5, rtol=0)
    assert_close_to_oracle(out, lse, inputs)


@pytest.mark.usefixtures("poisoned_allocations")
def test_without_lse() -> None:
    inputs = make_inputs(Case("without-lse", 2, 255, 255, causal=True), "cuda")
    out, _ = forward(inputs)
    without_lse, _ = forward(inputs, return_lse=False)
    assert torch.equal(without_lse, out)


@pytest.mark.parametrize("strided", ["fused_qkv", "transposed"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_strided_inputs_are_not_copied(strided: str, varlen: bool) -> None:
    lengths = {"lengths_q": (1000, 2049), "lengths_k": (1000, 2049)} if varlen else {}
    case = Case(strided, 2, 2049, 2049, 8, 8, strided=strided, **lengths)
    inputs = make_inputs(case, "cuda")
    assert not inputs.q.is_contiguous()
    given = GuardedOutputs(inputs)
    forward(inputs, out=given.out, lse=given.lse)
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    out, lse = forward(inputs, out=given.out, lse=given.lse)
    allocated = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    assert out.data_ptr() == given.out.data_ptr()
    assert lse.data_ptr() == given.lse.data_ptr()
    assert allocated < inputs.q.nbytes // 4
    assert_close_to_oracle(out, lse, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_more_than_2_to_the_31_elements(varlen: bool) -> None:
    """Every tensor has 2^31 elements before its last two batch entries."""
    case = Case("2-to-the-31", 1, 1024, 1024, 16, 16, causal=True)
    batch = 2**31 // (case.seqlen_q * case.heads_q * case.head_dim) + 2
    shape = (batch, case.seqlen_q, case.heads_q, case.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.empty(shape, dtype=BF16, device="cuda") for _ in range(3))
    for x in (q, k, v):
        x.normal_(generator=generator)
    if varlen:
        edges = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * case.seqlen_q
        cu_seqlens = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
        longest = {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = _flash_attn_fwd(*packed, causal=True, **cu_seqlens, **longest)
        out = out.view(shape)
        lse = lse.unflatten(1, (batch, case.seqlen_q)).transpose(0, 1)
    else:
        out, lse = _flash_attn_fwd(q, k, v, causal=True)
    for entry in (0, 1, batch // 2, batch - 3, batch - 2, batch - 1):
        one = slice(entry, entry + 1)
        inputs = Inputs(case, q[one], k[one], v[one], {"causal": True})
        assert_close_to_oracle(out[one], lse[one], inputs)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "head_dim, tile_m, tile_n, column",
    [(64, 192, 128, 3), (64, 192, 128, 100), (128, 192, 80, 70), (128, 128, 128, 4)],
)
def test_maxima_that_outgrow_the_one_in_use(
    head_dim: int, tile_m: int, tile_n: int, column: int, causal: bool
) -> None:
    inputs = make_growing_inputs(head_dim, tile_n, column, causal, "cuda")
    out, lse = forward(inputs, config={"tile_m": tile_m, "tile_n": tile_n})
    assert_close_to_oracle(out, lse, inputs)


GRAPH_CASES = (
    Case("dense", 2, 255, 1000, 8, 2, causal=True),
    Case("varlen", lengths_q=(129, 1, 255), lengths_k=(300, 127, 255), causal=True),
)


@pytest.mark.parametrize("case", GRAPH_CASES)
def test_cuda_graph_replays_on_new_inputs(case: Case) -> None:
    inputs = make_inputs(case, "cuda", seed=0)
    graph, results = capture(lambda: forward(inputs))
    for seed in (1, 2):
        check_replay(graph, inputs, results, make_inputs(case, "cuda", seed))


def test_runs_on_the_current_stream() -> None:
    """It is busy before it writes q, k and v: a kernel on another stream would read zeros."""
    inputs = make_inputs(Case("stream", 2, 255, 1000, causal=True), "cuda")
    late = Inputs(
        inputs.case, *(torch.zeros_like(x) for x in (inputs.q, inputs.k, inputs.v)), inputs.keywords
    )
    forward(late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for x, source in ((late.q, inputs.q), (late.k, inputs.k), (late.v, inputs.v)):
            x.copy_(source)
        out, lse = forward(late)
    stream.synchronize()
    assert_close_to_oracle(out, lse, inputs)


def test_sizes_and_values_do_not_recompile() -> None:
    """Batch, lengths, number of heads at the same ratio, scale and window sizes are run-time."""
    first = Case("first", 2, 255, 1000, 8, 2, window_left=100, window_right=7, pack_gqa=False)
    others = (
        replace(first, id="batch", batch=3),
        replace(first, id="lengths", seqlen_q=1000, seqlen_k=513),
        replace(first, id="heads", heads_q=4, heads_kv=1),
        replace(first, id="window", window_left=33, window_right=200),
        replace(first, id="scale", softmax_scale=0.2),
    )
    varlen = replace(first, id="varlen", lengths_q=(129, 255), lengths_k=(300, 500))
    other_varlen = replace(varlen, id="more", lengths_q=(200, 1, 64), lengths_k=(0, 700, 65))
    for warm, cases in ((first, others), (varlen, (other_varlen,))):
        forward(make_inputs(warm, "cuda"))
        compiled = flash_mask_cute.compile_count()
        for case in cases:
            inputs = make_inputs(case, "cuda")
            assert_close_to_oracle(*forward(inputs), inputs)
            assert flash_mask_cute.compile_count() == compiled, case.id
