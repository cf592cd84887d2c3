"""The backward through the public calls, on a Hopper GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import (
    BF16,
    CASES,
    DOCUMENT_CASES,
    FP16,
    FP32,
    MASK_BITS_CASES,
    MASK_BITS_VARLEN_CASES,
    MASK_CASES,
    Case,
)
from eager import assert_gradients_close
from guarded_outputs import Guarded
from inputs import Inputs, make_inputs, make_output_gradients, of_one_column_mask
from public_call import capture, forward, no_waiting
from public_call import check as check_forward
from random_cases import random_case, random_mask_case
from torch import Tensor

import flash_mask_cute
from flash_mask_cute import interface
from flash_mask_cute.call.documents import PackedBackward
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd

NAN = float("nan")
NAMES = ("dq", "dk", "dv")

Gradients = dict[str, Tensor | None]


def backward(
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    **more: Any,
) -> Gradients:
    """results: out and lse."""
    out, lse = results
    keywords = inputs.bwd_keywords | {"dlse": dlse} | more
    dsink = None
    if inputs.case.sink is not None:
        dsink = keywords["dsink"] = torch.full_like(keywords["learnable_sink"], NAN)
    gradients = _flash_attn_bwd(inputs.q, inputs.k, inputs.v, out, dout, lse, **keywords)
    return dict(zip(NAMES, gradients, strict=True)) | {"dsink": dsink}


def check(inputs: Inputs, seed: int = 1, has_dlse: bool = True) -> None:
    """Gradients of the library, and of the caller with dlse, NaN before: close, and guarded."""
    results = forward(inputs)
    dout, dlse = make_output_gradients(inputs, seed)
    first = dlse if has_dlse else None
    assert_gradients_close(backward(inputs, results, dout, first), inputs, dout, first)
    given = Guarded()
    for name, like in zip(NAMES, (inputs.q, inputs.k, inputs.v), strict=True):
        given.allocate(name, like.shape, like.dtype, like.device)
    found = backward(inputs, results, dout, dlse, **given.tensors)
    assert all(found[name] is x for name, x in given.tensors.items())
    given.assert_guards_intact()
    assert_gradients_close(found, inputs, dout, dlse)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case) -> None:
    """Only these without dlse, too: the kernel that reads it knows no masks."""
    check(make_inputs(case, "cuda"), has_dlse=False)


@pytest.mark.shares(2)
@pytest.mark.usefixtures("poisoned_allocations", "documents_packed")
@pytest.mark.parametrize("case", DOCUMENT_CASES)
def test_documents_that_mask_bits_show(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    check(inputs)
    # with the caller's dsink a prepared call is in a `WithGivenOutputs`
    prepared = [getattr(x, "prepared", x) for x in interface._prepared_bwd.values()]
    assert any(isinstance(x, PackedBackward) for x in prepared)
    results = forward(inputs)
    dout, dlse = make_output_gradients(inputs)
    first, *others = (backward(inputs, results, dout, dlse, deterministic=True) for _ in range(5))
    for name in NAMES:
        assert all(torch.equal(first[name], other[name]) for other in others), name


@pytest.mark.shares(6)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(
    ("draw", "seed"), [*product([random_case], range(60)), *product([random_mask_case], range(120))]
)
def test_fuzzed(draw: Callable[[random.Random], Case], seed: int) -> None:
    """In both directions, which share a kernel: pairs of features, and masks."""
    inputs = make_inputs(draw(random.Random(seed)).packed_if_supported(), "cuda", seed)
    check_forward(inputs)
    check(inputs, seed)


# Many work tiles for each CTA, and walks of more than one chunk of 32 query blocks.
LARGE_CASES = (
    Case("large-d128-causal", 2, 4097, 4097, 8, 8, causal=True),
    Case("large-d128-gqa8", 1, 2049, 4000, 16, 2),
    Case("large-d64-causal", 2, 8191, 8191, 4, 4, 64, causal=True),
    Case("large-d64-gqa4-window", 1, 8191, 8191, 8, 2, 64, window_left=700, window_right=0),
    Case("large-long-q", 1, 9001, 300, 4, 1),
    Case("large-long-k", 1, 65, 20001, 4, 2),
    Case("large-columns", 2, 4000, 4000, 8, 2, causal=True, column="documents1"),
    Case("large-columns-by-head", 1, 3001, 3001, 8, 2, 64, column="stepped2", column_heads="q"),
    Case("large-blocks", 1, 4000, 4000, 4, 4, blocks=(128, 128)),
    Case("large-small-blocks", 2, 3001, 4000, 4, 2, blocks=(64, 64)),
    Case(
        "large-documents", heads_q=8, heads_kv=2, lengths_q=(17, 4000, 3, 511, 2049, 128, 1),
        lengths_k=(17, 4000, 3, 511, 2049, 128, 1), causal=True,
    ),
    Case("large-cross", lengths_q=(3000, 0, 65), lengths_k=(129, 4000, 0), window_left=99),
)  # fmt: skip
LARGE_IN_ORDER = ("large-d128-causal", "large-d64-gqa4-window", "large-columns", "large-documents")


ALL_MASKS = MASK_CASES + MASK_BITS_CASES + MASK_BITS_VARLEN_CASES


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", ALL_MASKS + LARGE_CASES)
def test_masks_and_large_problems(case: Case) -> None:
    check(make_inputs(case.packed_if_supported(), "cuda"))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("sink", [None, FP32], ids=["no-sink", "sink"])
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 2, 300, 100, causal=True),
        Case("window", 1, 700, 100, window_left=20, window_right=10),
        Case("no keys", lengths_q=(129, 64, 255), lengths_k=(0, 200, 0)),
        Case("no keys used", 2, 129, 129, seqused_k=(0, 1), window_left=40),
        Case("no queries", lengths_q=(0, 64, 0), lengths_k=(129, 200, 300)),
        Case("nothing", lengths_q=(129, 64), lengths_k=(0, 0)),
    ],
)
def test_rows_that_see_nothing(case: Case, sink: torch.dtype | None) -> None:
    check(make_inputs(replace(case, sink=sink), "cuda"))


def test_packed_rows_of_no_sequence() -> None:
    """0 in new tensors; the caller's stay as they are. What inputs hold there does not matter."""
    inputs = make_inputs(Case("tail", lengths_q=(65, 30), lengths_k=(30, 165)), "cuda")
    tail = torch.full((9, 2, 128), NAN, dtype=BF16, device="cuda")
    q, k, v = (torch.cat([x, tail]) for x in (inputs.q, inputs.k, inputs.v))
    dout, _ = make_output_gradients(inputs)
    keywords = inputs.bwd_keywords
    out, lse = _flash_attn_fwd(q, k, v, **keywords)
    assert lse is not None
    operands = (q, k, v, out, torch.cat([dout, tail]), lse)
    given = {name: torch.full_like(x, 7.0) for name, x in zip(NAMES, (q, k, v), strict=True)}
    for outputs, rest in (({}, 0.0), (given, 7.0)):
        gradients = _flash_attn_bwd(*operands, **keywords, **outputs)
        assert all((x[-9:] == rest).all() for x in gradients)
        named = {name: x[:-9] for name, x in zip(NAMES, gradients, strict=True)}
        assert_gradients_close(named, inputs, dout)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("form", ["expanded", "transposed", "odd stride", "odd address", "by head"])
def test_output_gradients_of_any_strides(form: str, varlen: bool) -> None:
    lengths = {"lengths_q": (100, 255), "lengths_k": (100, 255)} if varlen else {}
    inputs = make_inputs(Case(form, 2, 255, 300, causal=True, **lengths), "cuda")
    dout, dlse = make_output_gradients(inputs)
    shape = dout.shape
    if form == "expanded":
        dout, dlse = dout[:1, :1, :1].expand(shape), dlse[:1, :1].expand_as(dlse)
    elif form == "transposed":
        dout, dlse = dout.transpose(0, -1).clone().transpose(0, -1), dlse.mT.clone().mT
    elif form == "odd stride":
        dout = torch.nn.functional.pad(dout, (0, 4))[..., : shape[-1]]
    elif form == "odd address":
        dout = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view(shape)
    else:
        dout = dout.transpose(-2, -3).clone().transpose(-2, -3)
    assert_gradients_close(backward(inputs, forward(inputs), dout, dlse), inputs, dout, dlse)


def test_gradients_into_slices_of_one_tensor() -> None:
    inputs = make_inputs(Case("fused", 2, 300, 300, 4, 2, strided="fused_qkv"), "cuda")
    dout, _ = make_output_gradients(inputs)
    fused = torch.full((2, 300, 8, 128), NAN, dtype=BF16, device="cuda")
    given = dict(zip(NAMES, fused.split((4, 2, 2), dim=2), strict=True))
    gradients = backward(inputs, forward(inputs), dout, **given)
    assert all(gradients[name] is x for name, x in given.items())
    assert_gradients_close(gradients, inputs, dout)


@pytest.mark.parametrize(
    "case",
    [
        Case("dense", 2, 255, 1000, 8, 2, causal=True, sink=FP32),
        Case("varlen", lengths_q=(129, 1, 255), lengths_k=(300, 127, 255), causal=True),
    ],
)
def test_cuda_graph_replays_on_new_inputs(case: Case) -> None:
    captured = make_inputs(case, "cuda")
    dout, dlse = make_output_gradients(captured)
    results = tuple(x.clone() for x in forward(captured))
    graph, gradients = capture(lambda: backward(captured, results, dout, dlse))
    for seed in (2, 3):
        fresh = make_inputs(case, "cuda", seed)
        new_dout, new_dlse = make_output_gradients(fresh, seed)
        if case.sink is not None:
            captured.keywords["learnable_sink"].copy_(fresh.keywords["learnable_sink"])
        olds = (captured.q, captured.k, captured.v, *results, dout, dlse)
        news = (fresh.q, fresh.k, fresh.v, *forward(fresh), new_dout, new_dlse)
        for old, new in zip(olds, news, strict=True):
            old.copy_(new)
        for gradient in gradients.values():
            if gradient is not None:
                gradient.fill_(NAN)
        graph.replay()
        assert_gradients_close(gradients, fresh, new_dout, new_dlse)


def test_runs_on_the_current_stream() -> None:
    """It is busy before it writes dout: a kernel on another stream would read zeros."""
    inputs = make_inputs(Case("stream", 2, 255, 1000, causal=True), "cuda")
    results = forward(inputs)
    dout, _ = make_output_gradients(inputs)
    late = torch.zeros_like(dout)
    backward(inputs, results, late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(dout)
        gradients = backward(inputs, results, late)
    stream.synchronize()
    assert_gradients_close(gradients, inputs, dout)


def test_sizes_and_values_do_not_recompile() -> None:
    """Batch, lengths, number of heads, scale, window sizes and the contents of masks."""
    first = Case("first", 2, 255, 1000, 8, 2, window_left=100, window_right=7, pack_gqa=False)
    masked = Case("masked", 1, 255, 300, causal=True, column="random1", blocks=(48, 80))
    groups = (
        (
            first,
            replace(first, id="batch", batch=3),
            # more queries than keys would have a kernel that clears rows that see nothing
            replace(first, id="lengths", seqlen_q=500, seqlen_k=513),
            # a kernel of its own is for groups that are not split, as those of one head
            replace(first, id="heads", heads_q=12, heads_kv=3),
            replace(first, id="window", window_left=33, window_right=200),
            replace(first, id="scale", softmax_scale=0.2),
        ),
        (
            replace(first, id="varlen", lengths_q=(129, 255), lengths_k=(300, 500)),
            replace(first, id="more", lengths_q=(200, 1, 64), lengths_k=(0, 700, 65)),
        ),
        (masked, replace(masked, id="masked-longer", batch=2, seqlen_q=400, seqlen_k=513)),
    )
    for warm, *others in groups:
        check(make_inputs(warm, "cuda"))
        for case in others:
            inputs = make_inputs(case, "cuda", seed=1)
            results = forward(inputs)
            dout, dlse = make_output_gradients(inputs)
            compiled = flash_mask_cute.compile_count()
            gradients = backward(inputs, results, dout, dlse)
            assert flash_mask_cute.compile_count() == compiled, case.id
            assert_gradients_close(gradients, inputs, dout, dlse)


@pytest.mark.parametrize(
    "case",
    [
        Case("sink", 1, 255, 300, causal=True, sink=BF16),
        Case("varlen", lengths_q=(129, 64), lengths_k=(129, 64), causal=True),
        MASK_CASES[0],
        *[case for case in MASK_CASES if case.blocks][:3],
    ],
)
def test_no_call_waits_for_the_device(case: Case) -> None:
    inputs = make_inputs(case.packed_if_supported(), "cuda")
    results = forward(inputs)
    dout, dlse = make_output_gradients(inputs)
    backward(inputs, results, dout, dlse)
    with no_waiting():
        gradients = backward(inputs, results, dout, dlse)
    assert_gradients_close(gradients, inputs, dout, dlse)


def test_a_column_mask_serves_many_calls_and_follows_its_tensor() -> None:
    shape = {"batch": 2, "seqlen_q": 255, "seqlen_k": 300}
    for inputs, more in of_one_column_mask("cuda", **shape):
        dout, dlse = make_output_gradients(inputs)
        gradients = backward(inputs, forward(inputs), dout, dlse, **more)
        assert_gradients_close(gradients, inputs, dout, dlse)


# Of heads as wide as these, each warpgroup has keys of its own, or pairs of CTAs sum dQ.
WIDE_CASES = (
    Case("d200-dv40", 1, 700, 900, head_dim=200, head_dim_v=40, causal=True),
    Case("d136", 1, 700, 900, head_dim=136, causal=True),
    Case("d136-dv192-varlen", head_dim=136, head_dim_v=192, causal=True,
         lengths_q=(63, 0, 1029, 1), lengths_k=(63, 9, 1029, 0)),
    Case("d160", 2, 500, 1000, 2, 1, head_dim=160),
    Case("d160-dv32-window-fp16", 1, 900, 900, 2, 1, head_dim=160, head_dim_v=32, dtype=FP16,
         window_left=200, window_right=9),
    Case("d176-dv96-columns-2", 2, 500, 700, head_dim=176, head_dim_v=96, column="stepped2"),
    Case("d192", 2, 700, 900, 3, 3, head_dim=192, sink=FP32),
    Case("d192-dv128-causal", 1, 4000, 4000, 8, 4, head_dim=192, head_dim_v=128, causal=True),
    Case("d192-dv128-seqused", 2, 300, 400, head_dim=192, head_dim_v=128, seqused_q=(100, 0),
         seqused_k=(400, 65), causal=True),
    *(replace(case, head_dim=256, head_dim_v=0) for case in (
        Case("full", 2, 700, 900, 3, 3),
        Case("full-fp16-sink", 1, 500, 1000, 2, 2, dtype=FP16, sink=FP32),
        Case("causal-gqa4", 2, 1000, 1300, 8, 2, causal=True),
        Case("causal-long", 1, 4000, 4000, 8, 4, causal=True),
        Case("window", 1, 900, 900, 2, 1, window_left=200, window_right=9),
        Case("varlen-causal", lengths_q=(63, 0, 1029, 1), lengths_k=(63, 9, 1029, 0), causal=True),
        Case("seqused", 2, 300, 400, seqused_q=(100, 0), seqused_k=(400, 65), causal=True),
        Case("columns-1", 2, 500, 700, causal=True, column="stepped1"),
        Case("columns-2", 2, 500, 700, column="stepped2"),
        Case("asked-lists", 1, 500, 700, 2, 2, mask_mod="eviction", blocks=(48, 80)),
        *MASK_BITS_CASES[:4],
    )),
)  # fmt: skip


# The warpgroups sum dQ of heads as wide as these in turn.
TURN_CASES = (
    Case("full", 2, 700, 900, 3, 3, head_dim=80),
    Case("causal-gqa4-sink", 2, 1000, 1300, 8, 2, head_dim=96, causal=True, sink=FP32),
    Case("causal-long", 1, 4000, 4000, 8, 4, head_dim=72, causal=True),
    Case("window-fp16", 1, 900, 900, 2, 1, head_dim=88, dtype=FP16, window_left=200,
         window_right=9),
    Case("varlen-causal", head_dim=72, causal=True, lengths_q=(63, 0, 1029, 1),
         lengths_k=(63, 9, 1029, 0)),
    Case("seqused", 2, 300, 400, head_dim=80, seqused_q=(100, 0), seqused_k=(400, 65)),
    Case("columns-2", 2, 500, 700, head_dim=96, column="stepped2"),
    Case("softcap", 1, 500, 700, head_dim=80, softcap=15.0),
    Case("head-bias", 1, 500, 700, head_dim=96, score_mod="head_bias"),
    Case("dv160", 1, 500, 700, head_dim=96, head_dim_v=160),
)  # fmt: skip


@pytest.mark.shares(3)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", TURN_CASES + WIDE_CASES)
def test_wide_heads(case: Case) -> None:
    check(make_inputs(case, "cuda"))


@pytest.mark.parametrize("case", [WIDE_CASES[i] for i in (1, 3, 7)])
@pytest.mark.parametrize(
    "more",
    [
        {"config": {"cta_pair": True}},
        {"config": {"cta_pair": False, "splits_keys": False}},
        {"config": {"splits_keys": True, "clears_dq": True}},
        {"deterministic": True},
    ],
    ids=str,
)
def test_ways_of_wide_heads(case: Case, more: dict[str, Any]) -> None:
    inputs = make_inputs(case, "cuda")
    dout, dlse = make_output_gradients(inputs)
    gradients = backward(inputs, forward(inputs), dout, dlse, **more)
    assert_gradients_close(gradients, inputs, dout, dlse)


CUT_CASES = (
    Case("columns-2", 1, 900, 900, 4, 2, column="stepped2"),
    Case("columns-4", 1, 900, 900, 4, 2, column="random4"),
    Case("mask_mod-lists", 1, 900, 900, 4, 2, mask_mod="eviction", blocks=(48, 80)),
    Case("lists-of-64", 1, 900, 900, 4, 2, blocks=(64, 64)),
)


@pytest.mark.shares(3)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("dims", [(192, 128), (160, 160), (136, 96)])
@pytest.mark.parametrize("case", CUT_CASES)
def test_cut_blocks_with_keys_of_each_warpgroup(case: Case, dims: tuple[int, int]) -> None:
    """What mask warps have few registers for beside wide heads."""
    inputs = make_inputs(replace(case, head_dim=dims[0], head_dim_v=dims[1]), "cuda")
    dout, dlse = make_output_gradients(inputs)
    gradients = backward(inputs, forward(inputs), dout, dlse)
    assert_gradients_close(gradients, inputs, dout, dlse)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128)])
def test_full_walks_that_begin_apart(dims: tuple[int, int]) -> None:
    """Of one KV head, where the first CTA stores dQ, several chunks long."""
    case = Case("full-8-1", 1, 2500, 2500, 8, 1, head_dim=dims[0], head_dim_v=dims[1])
    inputs = make_inputs(case, "cuda")
    dout, dlse = make_output_gradients(inputs)
    config = {"clears_dq": False}
    gradients = backward(inputs, forward(inputs), dout, dlse, config=config)
    assert_gradients_close(gradients, inputs, dout, dlse)


SPLIT_CASES = (
    Case("causal-8-1", 1, 1500, 1500, 8, 1, causal=True),
    Case("full-14-2-d64", 2, 700, 900, 14, 2, head_dim=64),
    Case("window-6-2-d72", 1, 900, 900, 6, 2, head_dim=72, window_left=200, window_right=9),
    Case("varlen-12-3", 0, 0, 0, 12, 3, lengths_q=(63, 0, 1029, 1), lengths_k=(63, 9, 1029, 0)),
    Case("seqused-4-1", 2, 300, 400, 4, 1, seqused_q=(100, 0), seqused_k=(400, 65), causal=True),
    Case("columns-8-2", 2, 500, 700, 8, 2, column="stepped2"),
    Case("d256-causal-8-1", 1, 700, 900, 8, 1, head_dim=256, head_dim_v=256, causal=True),
    Case("d160-4-1", 2, 500, 700, 4, 1, head_dim=160, head_dim_v=160),
    Case("d192-dv128-causal-6-2", 1, 900, 900, 6, 2, head_dim=192, head_dim_v=128, causal=True),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("is_ordered", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("case", SPLIT_CASES)
def test_split_groups(case: Case, is_ordered: bool) -> None:
    """By every divisor of the group; in a fixed order each has the same bits again."""
    inputs = make_inputs(case, "cuda")
    results = forward(inputs)
    dout, dlse = make_output_gradients(inputs)
    group = case.heads_q // case.heads_kv
    for splits in (n for n in range(2, group + 1) if group % n == 0):
        more = {"config": {"group_splits": splits}, "deterministic": is_ordered}
        gradients = backward(inputs, results, dout, dlse, **more)
        assert_gradients_close(gradients, inputs, dout, dlse)
        if is_ordered:
            again = backward(inputs, results, dout, dlse, **more)
            for name in NAMES:
                one, other = gradients[name], again[name]
                assert one is not None and other is not None
                assert torch.equal(one.view(torch.int16), other.view(torch.int16)), name


DETERMINISTIC = [
    Case("causal", 2, 1000, 1300, 4, 2, causal=True),
    Case("full", 1, 700, 900, 3, 3),
    Case("window", 1, 900, 900, 2, 1, head_dim=64, head_dim_v=64, window_left=200),
    Case("lists", 2, 500, 700, 2, 2, blocks=(48, 80)),
    Case("lists-of-warpgroups", 2, 500, 700, 4, 2, blocks=(64, 64)),
    Case("d256-causal", 1, 900, 900, 2, 1, head_dim=256, head_dim_v=256, causal=True),
    Case("d192-dv128", 2, 300, 500, 2, 2, head_dim=192, head_dim_v=128),
    *(case.packed_if_supported() for case in MASK_CASES),
    *MASK_BITS_CASES,
    Case("fp16-window", 2, 500, 700, 2, 1, dtype=torch.float16, window_left=99, window_right=40),
    # more work tiles than CTAs, so that some wait for those that a CTA takes later
    *(case for case in LARGE_CASES if case.id in LARGE_IN_ORDER),
]


@pytest.mark.shares(2)
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_deterministic(case: Case) -> None:
    """Ten runs have the same bits."""
    check_bits(case, *[{}] * 9)


@pytest.mark.shares(4)
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_skipping_changes_no_ordered_bit(case: Case) -> None:
    check_bits(case, {"config": {"skip_blocks": False}})


SKIPPED = [Case("causal", 2, 1000, 700, causal=True), DETERMINISTIC[1], *MASK_CASES[::8]]


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", SKIPPED)
def test_skipping_changes_no_bit(case: Case) -> None:
    """Of dK and dV; dQ is summed in an order of chance."""
    more = {"config": {"skip_blocks": False}}
    check_bits(case.packed_if_supported(), more, is_ordered=False)


def check_bits(case: Case, *others: dict[str, Any], is_ordered: bool = True) -> None:
    """Gradients are close, and equal to those of other calls."""
    inputs = make_inputs(case, "cuda")
    results = forward(inputs)
    dout, dlse = make_output_gradients(inputs)
    first, *again = (
        backward(inputs, results, dout, dlse, deterministic=is_ordered, **more)
        for more in ({}, *others)
    )
    for found in (first, again[-1]):
        assert_gradients_close(found, inputs, dout, dlse)
    # in any order, a block that is not skipped may turn -0 into 0
    kind = torch.int16 if is_ordered else inputs.q.dtype
    for found in again:
        for name in first if is_ordered else ("dk", "dv"):
            a, b = first[name], found[name]
            if a is not None and b is not None:
                assert torch.equal(a.view(kind), b.view(kind)), name
