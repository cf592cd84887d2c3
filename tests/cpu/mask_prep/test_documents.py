"""Documents of a mask as packed sequences: what is found, and what calls make of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_mask_cute import explain, interface
from flash_mask_cute.call import prepare
from flash_mask_cute.call.arguments import Masks
from flash_mask_cute.call.documents import PackedBackward, PackedForward, holds_documents
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import KernelForward
from flash_mask_cute.call.lookup import mask_key
from flash_mask_cute.functional import flash_attn_func, flashmask_attention
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.limits import MAX_PACKED_SEQLEN
from flash_mask_cute.mask_prep.documents import DOCUMENT_STRIDE
from flash_mask_cute.masks import builders
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

LENGTHS = [700, 600, 300, 448]
MASKS: dict[str, Callable[[], ColumnMask]] = {
    "causal_document": lambda: builders.causal_document(LENGTHS),
    "document": lambda: builders.document([LENGTHS, [100, 1000, 500]], 2048),
    "share_question": lambda: builders.share_question([[300, 200, 400], [600, 100, 50]]),
    "prefix_lm_document": lambda: builders.prefix_lm_document([900, 700], [300, 10]),
    "from_cu_seqlens": lambda: builders.from_cu_seqlens([0, 600, 1300], causal=False),
    "from_document_ids": lambda: builders.from_document_ids(
        torch.tensor([[1] * 600 + [2] * 700]), causal=True
    ),
}
WITHOUT = {
    "full": lambda: builders.full(1300),
    "sliding_window": lambda: builders.sliding_window(1300, 100),
    "causal_blockwise": lambda: builders.causal_blockwise([500, 500, 300]),
    "random_eviction": lambda: builders.random_eviction(1300, 600),
}


def begins(mask: ColumnMask, batch: int) -> list[int]:
    return sorted(set(mask.split(batch).cu_seqlens.tolist()))


def by_documents(mask: ColumnMask, batch: int) -> Tensor:
    """What the packed batch lets see, bool (batch * seqlen, batch * seqlen)."""
    documents = mask.split(batch)
    rows = documents.mask.startend_row_indices
    starts = documents.cu_seqlens.tolist()
    assert starts[0] == 0 and starts[-1] == rows.shape[2] and starts == sorted(starts)
    visible = torch.zeros(rows.shape[2], rows.shape[2], dtype=torch.bool)
    for start, end in zip(starts, starts[1:], strict=False):
        of_document = ColumnMask(rows[:, :, start:end], mask.causal)
        visible[start:end, start:end] = of_document.dense(end - start)[0, 0]
    return visible


def whole(mask: ColumnMask, batch: int) -> Tensor:
    dense = mask.dense(mask.startend_row_indices.shape[2])[:, 0].expand(batch, -1, -1)
    return torch.block_diag(*dense.int().unbind()).bool()


# -- what is found ------------------------------------------------------------------------------


def test_each_document_begins_a_sequence() -> None:
    assert begins(MASKS["causal_document"](), 1) == [0, 700, 1300, 1600, 2048]
    assert begins(MASKS["document"](), 2) == [0, 700, 1300, 1600, 2048, 3148, 3648, 4096]
    assert begins(MASKS["share_question"](), 2) == [0, 900, 1650, 2550, 3300]
    assert begins(MASKS["prefix_lm_document"](), 1) == [0, 900, 1600]


@pytest.mark.parametrize("name", WITHOUT)
def test_masks_without_documents_stay_whole(name: str) -> None:
    mask = WITHOUT[name]()
    assert not mask.documents and begins(mask, 2) == [0, 1300, 2600]


def test_of_documents_in_one_slot_the_first_begins() -> None:
    mask = builders.causal_document([520, 30, 100, 650])
    assert begins(mask, 1) == [0, 520, 1300] and mask.split(1).cu_seqlens.shape == (4,)
    assert torch.equal(by_documents(mask, 1), whole(mask, 1))


@pytest.mark.parametrize("name", [*MASKS, *WITHOUT])
def test_packed_documents_see_what_the_mask_shows(name: str) -> None:
    mask = (MASKS | WITHOUT)[name]()
    batch = max(2, mask.startend_row_indices.shape[0])
    assert torch.equal(by_documents(mask, batch), whole(mask, batch))


@settings(max_examples=30, deadline=None)
@given(
    form=st.sampled_from([(1, True), (2, True), (2, False), (4, True), (4, False)]),
    seqlen=st.integers(1, 1400),
    cuts=st.lists(st.integers(1, 1400), max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_intervals(form: tuple[int, bool], seqlen: int, cuts: list[int], seed: int) -> None:
    """Random intervals, cut into documents where hidden rows can be said besides."""
    num_vectors, causal = form
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, seqlen, num_vectors)
    indices = torch.randint(-5, seqlen + 5, shape, generator=generator).int()
    keys = torch.arange(seqlen)
    edges = torch.tensor([0, *sorted(x for x in cuts if x < seqlen), seqlen])
    number = torch.searchsorted(edges, keys, right=True)
    start, end = edges[number - 1], edges[number]
    if num_vectors == 1:
        indices[0, 0, :, 0] = torch.minimum(indices[0, 0, :, 0], end)
    elif not causal and num_vectors == 2:
        indices[0, 0, :, 0] = torch.minimum(indices[0, 0, :, 0], end)
        indices[0, 0, :, 1] = torch.maximum(indices[0, 0, :, 1], start)
    elif num_vectors == 4:
        indices[0, 0, :, 2], indices[0, 0, :, 3] = end.int(), seqlen
    mask = ColumnMask(indices, causal)
    assert torch.equal(by_documents(mask, 2), whole(mask, 2))
    if num_vectors == 1:
        first_of_slot = {int(edge) // DOCUMENT_STRIDE: int(edge) for edge in reversed(edges[:-1])}
        assert set(first_of_slot.values()) <= set(begins(mask, 1))


def test_kept_and_found_again_after_a_change() -> None:
    mask = builders.causal_document([600, 700])
    documents = mask.split(2)
    bounds = documents.mask.bounds(128, documents.cu_seqlens)
    assert mask.split(2) is documents and mask.split(1) is not documents
    assert begins(mask, 2) == [0, 600, 1300, 1900, 2600]
    mask.startend_row_indices.copy_(builders.causal_document([900, 400]).startend_row_indices)
    again = mask.split(2)
    assert again is documents and begins(mask, 2) == [0, 900, 1300, 2200, 2600]
    assert documents.mask.bounds(128, documents.cu_seqlens) is bounds
    fresh = ColumnMask(documents.mask.startend_row_indices, True).bounds(128, documents.cu_seqlens)
    used = documents.mask.startend_row_indices.shape[2] // 128
    assert torch.equal(bounds[..., :used], fresh[..., :used])


def test_refresh_finds_them_without_a_counted_change() -> None:
    mask = builders.causal_document([600, 700])
    documents = mask.split(1)
    mask.startend_row_indices.data.copy_(builders.causal_document([900, 400]).startend_row_indices)
    assert begins(mask, 1) == [0, 600, 1300]
    mask.refresh()
    assert documents.cu_seqlens.unique().tolist() == [0, 900, 1300]


@pytest.mark.parametrize(
    ("shape", "batch"), [((1, 2, 600, 1), 1), ((2, 1, 600, 1), 3), ((1, 1, 0, 1), 1)]
)
def test_refused(shape: tuple[int, ...], batch: int) -> None:
    mask = ColumnMask(torch.zeros(shape, dtype=torch.int32), causal=True, documents=True)
    with pytest.raises(ValueError, match="documents are found where it is"):
        mask.split(batch)


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="batch=0 is not positive"):
        builders.causal_document([600, 700]).split(0)


def test_the_flag_is_a_bool_and_survives_pickling() -> None:
    mask = builders.causal_document([600, 700])
    with pytest.raises(TypeError, match="documents=1 is not a bool"):
        ColumnMask(mask.startend_row_indices, True, documents=1)  # type: ignore[arg-type]
    mask.split(1)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy.documents and begins(copy, 1) == [0, 600, 1300]


# -- what calls make of it ----------------------------------------------------------------------


def operands(seqlen: int, batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    shapes = [(batch, seqlen, heads, 8) for heads in (2, 1, 1)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the calls of the host path from now on, forward and backward, are packed."""
    seen: list[bool] = []

    def watch(name: str, launch: type) -> None:
        call, run = getattr(interface, name), launch.__call__

        def watched(*operands: Any, **keywords: Any) -> Any:
            seen.append(False)
            return call(*operands, **keywords)

        def packed(self: Any, *arguments: Any) -> Any:
            seen[-1] = True
            return run(self, *arguments)

        monkeypatch.setattr(interface, name, watched)
        monkeypatch.setattr(launch, "__call__", packed)

    watch("forward", PackedForward)
    watch("backward", PackedBackward)
    return seen


def results(attention: Callable[..., Any], mask: ColumnMask, **more: Any) -> list[Tensor]:
    batch, _, seqlen, _ = mask.startend_row_indices.shape
    q, k, v = operands(seqlen, batch)
    sink = torch.linspace(-1, 1, 2).requires_grad_()
    out, lse = attention(
        q, k, v, startend_row_indices=mask, learnable_sink=sink, return_lse=True, **more
    )
    loss = (out * out).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, (q, k, v, sink))]


SMALL = {
    "causal_document": lambda: builders.causal_document([520, 110]),
    "document": lambda: builders.document([[520, 80], [30, 500, 60]], 600),
    "share_question": lambda: builders.share_question([[200, 100, 240], [60]]),
    "prefix_lm_document": lambda: builders.prefix_lm_document([540, 60], [300, 10]),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SMALL),
        ("prefix_lm_document", {"window_size": (200, 30), "softcap": 20.0}),
    ],
)
def test_results_are_those_of_the_whole_mask(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    mask = SMALL[name]()
    batch = mask.startend_row_indices.shape[0]
    assert mask.documents and len(begins(mask, batch)) > batch + 1
    plain = ColumnMask(mask.startend_row_indices, mask.causal)
    seen = calls(monkeypatch)
    found, expected = (results(flash_attn_func, x, **options) for x in (mask, plain))
    assert seen == [True, True, False, False]
    for result, other in zip(found, expected, strict=True):
        assert result.shape == other.shape
        torch.testing.assert_close(result, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 2])
def test_results_in_tensors_of_the_caller(batch: int) -> None:
    mask = SMALL["document"]() if batch == 2 else SMALL["causal_document"]()
    plain = ColumnMask(mask.startend_row_indices, mask.causal)
    with torch.no_grad():
        q, k, v = operands(mask.startend_row_indices.shape[2], batch)
        out, lse = (torch.full_like(q, 9), torch.full((batch, 2, q.shape[1]), 9.0))
        found = _flash_attn_fwd(q, k, v, startend_row_indices=mask, out=out, lse=lse)
        assert found[0] is out and found[1] is lse
        expected = _flash_attn_fwd(q, k, v, startend_row_indices=plain)
        gradients = [torch.full_like(x, 9) for x in (q, k, v)]
        given = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        results = [
            _flash_attn_bwd(q, k, v, out, out, lse, startend_row_indices=x, dlse=lse, **more)
            for x, more in ((mask, given), (plain, {}))
        ]
    assert all(x is y for x, y in zip(results[0], gradients, strict=True))
    pairs = zip((out, lse, *gradients), (*expected, *results[1]), strict=True)
    for result, other in pairs:
        torch.testing.assert_close(result, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "seqlen", "packs"),
    [
        (1, DOCUMENT_STRIDE, False),
        (1, DOCUMENT_STRIDE + 1, True),
        (1, MAX_PACKED_SEQLEN, True),
        (1, MAX_PACKED_SEQLEN + 1, False),
        (31, MAX_PACKED_SEQLEN, True),
        (32, MAX_PACKED_SEQLEN, False),
    ],
)
def test_how_long_sequences_may_be(batch: int, seqlen: int, packs: bool) -> None:
    """What packed kernels take, and int32 counts."""
    with torch.device("meta"):
        q = torch.empty(batch, seqlen, 1, 8, dtype=torch.bfloat16)
        mask = ColumnMask(torch.empty(1, 1, seqlen, 1, dtype=torch.int32), True, documents=True)
    assert holds_documents(q, q, q, mask, True, []) == packs


def test_a_launch_is_for_masks_with_documents_or_without() -> None:
    indices = SMALL["causal_document"]().startend_row_indices
    masks = [ColumnMask(indices, True, documents) for documents in (True, False)]
    keys = [mask_key(Masks(startend_row_indices=x)) for x in masks]
    assert keys[0] != keys[1]


@pytest.mark.shares(2)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_kept_launch_follows_the_mask_of_its_call(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """With kernels that only note their arguments."""
    noted: list[tuple[Any, ...]] = []
    prepared: list[KernelForward] = []

    def note(*args: Any) -> None:
        noted.append(args)

    class Noting(KernelForward):
        __slots__ = ()

        def __init__(self, plan: ExecutionPlan, _: Any, *prepared_before: Any) -> None:
            super().__init__(plan, note, *prepared_before)
            prepared.append(self)

    for_hopper = partial(prepare.prepare_fwd, target=Target.default())
    monkeypatch.setattr(interface, "prepare_fwd", for_hopper)
    monkeypatch.setattr(prepare, "KernelForward", Noting)
    monkeypatch.setattr(interface, "_prepared_fwd", {})
    q, k, v = (torch.zeros(batch, 1300, heads, 64).bfloat16() for heads in (2, 1, 1))
    for lengths in ([700, 600], [900, 400], [600, 700]):
        mask = builders.causal_document(lengths)
        out, lse = _flash_attn_fwd(q, k, v, startend_row_indices=mask)
        starts, of_rows = mask.split(batch)
        args = noted[-1]
        assert args[0].data_ptr() == q.data_ptr() and args[3].data_ptr() == out.data_ptr()
        assert args[6] is args[7] is starts and lengths[0] in starts
        indices, bounds = args[18]
        assert indices is of_rows.startend_row_indices and bounds.shape[:3] == (1, 1, 2)
        assert (args[4].data_ptr() == lse.data_ptr()) == (batch == 1)
        assert lse.shape == (batch, 2, 1300) and lse.is_contiguous()
    assert len(prepared) == 1 and len(noted) == 3
    plain = ColumnMask(mask.startend_row_indices, True)
    _flash_attn_fwd(q, k, v, startend_row_indices=plain)
    assert len(prepared) == 2 and noted[-1][6] is None


def test_lse_may_be_of_inference_mode() -> None:
    mask = SMALL["document"]()
    q, k, v = (x.detach() for x in operands(600, 2))
    with torch.inference_mode():
        lse = torch.zeros(2, 2, 600)
    _flash_attn_fwd(q, k, v, startend_row_indices=mask, lse=lse)
    assert torch.equal(lse, _flash_attn_fwd(q, k, v, startend_row_indices=mask)[1])


def _like_transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("of_mask", [1, 2])
@pytest.mark.parametrize("form", ["expanded", "heads before rows"])
def test_gradients_of_any_strides(form: str, of_mask: int) -> None:
    """By out alone, with values of another dimension, and a mask for all sequences or for each."""
    lengths = [[520, 80], [30, 500, 70]] if of_mask == 2 else [520, 80]
    mask = builders.document(lengths, 600)
    plain = ColumnMask(mask.startend_row_indices, mask.causal)
    q, k, v = operands(600, 2)
    v = torch.cat([v, -v], dim=-1).detach().requires_grad_()
    dout = torch.linspace(-1, 1, 2 * 600 * 2 * 16, dtype=torch.float64).view(2, 600, 2, 16)
    dout = dout[:, :1, :1].expand(dout.shape) if form == "expanded" else _like_transposed(dout)
    found, expected = (
        torch.autograd.grad(flash_attn_func(q, k, v, startend_row_indices=x), (q, k, v), dout)
        for x in (mask, plain)
    )
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 2])
def test_results_may_be_changed_in_place(batch: int) -> None:
    mask = builders.document([520, 80])
    out, lse = flash_attn_func(*operands(600, batch), startend_row_indices=mask, return_lse=True)
    assert out.requires_grad and out.mul_(2).is_contiguous()
    assert lse.requires_grad and lse.add_(1).is_contiguous()


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # other tests may have compiled the function as often as torch does
    torch._dynamo.reset()
    mask = SMALL["causal_document"]()
    seen = calls(monkeypatch)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    found = results(compiled, mask)
    assert seen == [True, True]
    expected = results(flash_attn_func, mask)
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-9, atol=1e-9)


def test_the_operator_passes_opcheck() -> None:
    indices = MASKS["document"]().startend_row_indices
    operator = torch.ops.flash_mask_cute.split_documents.default
    torch.library.opcheck(operator, (indices, False, 2))


def test_out_alone() -> None:
    mask = SMALL["causal_document"]()
    q, k, v = operands(630, 2)
    out = flashmask_attention(q, k, v, mask)
    assert torch.equal(out, flash_attn_func(q, k, v, startend_row_indices=mask))


ELSEWHERE: dict[str, Callable[[ColumnMask, list[Tensor]], tuple[list[Tensor], dict[str, Any]]]] = {
    "a score_mod": lambda mask, qkv: (qkv, {"score_mod": lambda s, b, h, q, k, aux: s}),
    "causal of the call alone": lambda mask, qkv: (qkv, {"causal": True}),
    "fewer queries": lambda mask, qkv: ([qkv[0][:, :520], *qkv[1:]], {"q_start": 0}),
    "heads before rows": lambda mask, qkv: (
        [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv],
        {},
    ),
}


@pytest.mark.parametrize("why", ELSEWHERE)
def test_where_calls_keep_the_mask_whole(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    mask = builders.from_cu_seqlens([0, 330, 600], causal=False)
    plain = ColumnMask(mask.startend_row_indices, mask.causal)
    qkv, options = ELSEWHERE[why](mask, operands(600, 2))
    seen = calls(monkeypatch)

    def run(mask: ColumnMask) -> list[Tensor]:
        out = flash_attn_func(*qkv, startend_row_indices=mask, **options)
        return [out, *torch.autograd.grad((out * out).sum(), qkv)]

    assert all(torch.equal(x, y) for x, y in zip(run(mask), run(plain), strict=True))
    assert seen == [False] * 4


def test_explain_tells_what_is_computed() -> None:
    mask = builders.causal_document([700, 600])
    plain = ColumnMask(mask.startend_row_indices, mask.causal)
    q = torch.zeros(1, 1300, 2, 64)
    packed, whole = (explain(q, q, q, startend_row_indices=x, causal=True) for x in (mask, plain))
    tile_m = packed.tiles.tile_m
    assert packed.work_tiles == 2 * sum(-(-length // tile_m) for length in (700, 600))
    assert whole.work_tiles == 2 * -(-1300 // tile_m)
    assert "packed sequences" in packed.note and "packed sequences" not in whole.note
    config = {"tile_m": tile_m}
    alone = [explain(*[q[:, :length]] * 3, causal=True, config=config) for length in (700, 600)]
    full, partial = (
        sum(getattr(x, f"{state}_key_tiles") for x in alone) for state in ("full", "partial")
    )
    assert f"of their own tiles {full} are full and {partial} partial" in packed.note
    # key tiles are those of the dense call, so that what is between documents counts as empty
    for count in ("full_key_tiles", "partial_key_tiles", "empty_key_tiles"):
        assert getattr(packed, count) == getattr(whole, count)
    apart = torch.empty(2, 2600, 2, 64)[:, :1300]
    two = torch.zeros(2, 1300, 2, 64)
    told = [explain(two, two, two, startend_row_indices=mask, out=x) for x in (two.clone(), apart)]
    assert "packed" in told[0].note and "packed" not in told[1].note


def test_wrong_operands_get_their_error() -> None:
    mask = MASKS["causal_document"]()
    q, k, v = operands(2048, 1)
    with pytest.raises(ValueError, match="startend_row_indices"):
        flash_attn_func(q[:, :900], k[:, :900], v[:, :900], startend_row_indices=mask)
    with pytest.raises(TypeError, match="causal must be True or False"):
        flash_attn_func(q, k, v, startend_row_indices=mask, causal=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_seqlen_k"):
        explain(q, k, v, startend_row_indices=mask, max_seqlen_k=-4)
    with pytest.raises(TypeError, match="q"):
        flash_attn_func(None, k, v, startend_row_indices=mask)  # type: ignore[arg-type]
