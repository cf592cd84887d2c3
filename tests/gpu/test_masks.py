"""Column intervals, block lists and callables through the public call, on a Hopper GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, DOCUMENT_CASES, MASK_BITS_CASES, MASK_BITS_VARLEN_CASES, MASK_CASES, Case
from eager import assert_close_to_oracle
from inputs import Inputs, make_inputs, of_one_column_mask
from mask_cases import CAUSAL_OFFSET, MASK_MODS
from public_call import check, check_replay, forward, no_waiting
from torch import Tensor

import flash_mask_cute
from flash_mask_cute import ColumnMask, builders, interface
from flash_mask_cute.call import plan as plan_module
from flash_mask_cute.call.documents import PackedForward
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.interface import _flash_attn_fwd


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", MASK_CASES + MASK_BITS_CASES + MASK_BITS_VARLEN_CASES)
def test_against_oracle(case: Case) -> None:
    check(make_inputs(case.packed_if_supported(), "cuda"))


@pytest.mark.shares(3)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", MASK_CASES + MASK_BITS_CASES + MASK_BITS_VARLEN_CASES)
def test_skipping_changes_no_bit(case: Case) -> None:
    inputs = make_inputs(case.packed_if_supported(), "cuda")
    skipping = forward(inputs)
    visiting = forward(inputs, config={"skip_blocks": False})
    assert torch.equal(skipping[0].view(torch.int16), visiting[0].view(torch.int16))
    assert torch.equal(skipping[1].view(torch.int32), visiting[1].view(torch.int32))


@pytest.mark.usefixtures("poisoned_allocations", "documents_packed")
@pytest.mark.parametrize("case", DOCUMENT_CASES)
def test_documents_that_mask_bits_show(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    check(inputs)
    assert any(isinstance(x, PackedForward) for x in interface._prepared_fwd.values())
    visiting = forward(inputs, config={"skip_blocks": False})
    assert torch.equal(visiting[0], forward(inputs)[0])


@pytest.mark.usefixtures("poisoned_allocations", "documents_packed")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_in_parts(head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed at once, bit for bit."""
    case = Case("parts", 2, 3000, 3000, 8, 8, head_dim, causal=causal, mask_mod="documents")
    inputs = make_inputs(case, "cuda")
    whole = forward(inputs)
    for pairs in (2 * 3000 * 400, 2 * 3000 * 1500):
        limits = Limits(pairs, min_tiles=0, min_tiles_packed=0)
        monkeypatch.setattr(plan_module, "LIMITS", limits)
        monkeypatch.setattr(interface, "_prepared_fwd", {})
        parts = forward(inputs)
        (launch,) = interface._prepared_fwd.values()
        assert isinstance(launch, PackedForward)
        assert launch.inner._make_mask_bits.func.__self__.num_query_chunks > 1
        for x, y in zip(whole, parts, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@contextmanager
def compiles(count: int) -> Iterator[None]:
    before = flash_mask_cute.compile_count()
    yield
    assert flash_mask_cute.compile_count() == before + count


@pytest.fixture
def no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel which is new to the process counts as compiled."""
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", "off")


SIZES = (
    Case("columns", 1, 255, 300, causal=True, column="random1"),
    Case("mask-lists", 1, 255, 300, mask_mod="documents", blocks=(128, 128)),
    Case("bits", 1, 255, 300, blocks=(48, 80)),
    Case("lists-of-warpgroups", 1, 255, 300, blocks=(64, 64)),
    Case("score", 1, 255, 300, score_mod="t5"),
)


@pytest.mark.parametrize("case", SIZES)
def test_contents_and_sizes_do_not_recompile(case: Case) -> None:
    forward(make_inputs(case, "cuda"))
    with compiles(0):
        for other in (
            case,
            replace(case, id="batch", batch=3),
            replace(case, id="lengths", seqlen_q=400, seqlen_k=129),
            replace(case, id="heads", heads_q=3, heads_kv=3, column_heads="q"),
        ):
            inputs = make_inputs(other, "cuda", seed=1)
            assert_close_to_oracle(*forward(inputs), inputs)


def offset_mask(offset: int) -> Callable[..., Any]:
    return lambda b, h, q, k, aux: k <= q + offset


GLOBAL_OFFSET = 3


def global_offset_mask(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k <= q + GLOBAL_OFFSET


def visible_by_offset(inputs: Inputs, mod: Callable[..., Any], offset: int) -> None:
    """Of square inputs: what mod lets through is the band j <= i + offset."""
    out, lse = forward(inputs, mask_mod=mod)
    banded, banded_lse = forward(inputs, window_size_right=offset)
    torch.testing.assert_close(out, banded, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, banded_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("no_disk_cache")
def test_equal_mods_share_a_kernel_and_changed_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case("mods", 1, 200, 200), "cuda")
    forward(inputs, window_size_right=1)
    with compiles(1):
        visible_by_offset(inputs, offset_mask(7), 7)
        visible_by_offset(inputs, offset_mask(7), 7)
    with compiles(1):
        visible_by_offset(inputs, offset_mask(50), 50)
    with compiles(2):
        visible_by_offset(inputs, global_offset_mask, 3)
        monkeypatch.setitem(globals(), "GLOBAL_OFFSET", 60)
        visible_by_offset(inputs, global_offset_mask, 60)


def test_a_column_mask_serves_many_calls_and_follows_its_tensor() -> None:
    for inputs, more in of_one_column_mask("cuda", batch=2, seqlen_q=255, seqlen_k=300):
        assert_close_to_oracle(*forward(inputs, **more), inputs)


@pytest.mark.parametrize("keeps", [True, False], ids=["ColumnMask", "tensor"])
def test_cuda_graph_follows_the_columns(keeps: bool) -> None:
    """A tensor's bounds are part of the graph; those of a ColumnMask are if it is refreshed."""
    case = Case("graph", 2, 300, 300, causal=True, column="stepped1")
    captured = make_inputs(case, "cuda")
    indices = captured.keywords["startend_row_indices"]
    columns: Tensor | ColumnMask = ColumnMask(indices, causal=True) if keeps else indices
    forward(captured, startend_row_indices=columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if isinstance(columns, ColumnMask):
            columns.refresh()
        results = forward(captured, startend_row_indices=columns)
    for seed in (1, 2):
        fresh = make_inputs(case, "cuda", seed)
        indices.copy_(fresh.keywords["startend_row_indices"])
        check_replay(graph, captured, results, fresh)


@pytest.mark.parametrize("block", [128, 64], ids=["nested", "retiled"])
def test_a_torch_block_mask_with_its_cute_mask_mod(block: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    inputs = make_inputs(Case("block-mask", 2, 255, 300, mask_mod="causal_offset"), "cuda")
    block_mask = create_block_mask(
        lambda b, h, q, k: k <= q + CAUSAL_OFFSET, None, None, 255, 300, BLOCK_SIZE=block
    )
    out, lse = forward(inputs, block_sparse_tensors_torch=block_mask)
    assert_close_to_oracle(out, lse, inputs)


def test_any_strides_of_what_masks_read() -> None:
    """Also those of extents of 1, which torch leaves to chance."""
    case = Case("strides", 1, 255, 300, causal=True, column="stepped2", mask_mod="documents",
                blocks=(128, 128))  # fmt: skip
    inputs = make_inputs(case, "cuda")
    more = dict(inputs.mask_keywords)
    columns = inputs.column_mask
    indices = columns.startend_row_indices.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    more["startend_row_indices"] = replace(columns, startend_row_indices=indices)
    more["aux_tensors"] = [x.mT.contiguous().mT for x in more["aux_tensors"]]
    lists = more["block_sparse_tensors_torch"]
    more["block_sparse_tensors_torch"] = lists._replace(
        **{
            name: getattr(lists, name).as_strided(
                getattr(lists, name).shape, (7, 5, *getattr(lists, name).stride()[2:])
            )
            for name in lists._fields[:4]
        }
    )
    assert_close_to_oracle(*forward(inputs, **more), inputs)


@pytest.mark.parametrize("case", [MASK_CASES[0], *(c for c in MASK_CASES if c.blocks)][:4])
def test_no_call_waits_for_the_device(case: Case) -> None:
    inputs = make_inputs(case.packed_if_supported(), "cuda")
    forward(inputs)
    with no_waiting():
        out, lse = forward(inputs)
    assert_close_to_oracle(out, lse, inputs)


def test_documents_of_a_callable_and_of_columns_agree() -> None:
    """Two ways to say the same mask."""
    case = Case("two-ways", 2, 700, 700, 4, 2, mask_mod="documents")
    inputs = make_inputs(case, "cuda")
    ids = inputs.keywords["aux_tensors"][0].long()
    key = torch.arange(700, device="cuda").expand_as(ids)
    is_same = ids[:, :, None] == ids[:, None, :]
    starts = torch.where(is_same, key[:, None, :], 700).amin(-1)
    ends = torch.where(is_same, key[:, None, :], -1).amax(-1) + 1
    columns = torch.stack((ends, starts), dim=-1)[:, None].int()
    by_callable = forward(inputs, mask_mod=MASK_MODS["documents"].cute)
    by_columns = forward(inputs, mask_mod=None, aux_tensors=None, startend_row_indices=columns)
    for a, b in zip(by_callable, by_columns, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert_close_to_oracle(*by_columns, inputs)


def test_a_million_tokens() -> None:
    """Causal documents in one sequence of 2^20 tokens: their first, middle and last rows."""
    n, heads, d = 2**20, 2, 128
    rng = random.Random(0)
    ends = [*sorted(rng.sample(range(1, n), 200)), n]
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, d, device="cuda", generator=generator).to(BF16) for _ in range(3)
    )
    mask = builders.causal_document([lengths], device="cuda")
    out, lse = _flash_attn_fwd(q, k, v, startend_row_indices=mask, causal=True, return_lse=True)
    for place in (0, *rng.sample(range(1, 200), 12), 200):
        start, end = starts[place], ends[place]
        for row in {start, (start + end) // 2, end - 1}:
            keys, values = (x[0, start : row + 1].double() for x in (k, v))
            for head in range(heads):
                scores = keys[:, head] @ q[0, row, head].double() * d**-0.5
                exact = scores.softmax(0) @ values[:, head]
                assert abs(lse[0, head, row].item() - scores.logsumexp(0).item()) < 6e-4
                torch.testing.assert_close(out[0, row, head].double(), exact, atol=1e-2, rtol=1e-2)
