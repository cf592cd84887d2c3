"""Calls with mask bits by documents: which are packed, and how their tensors are seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case
from einops import rearrange
from inputs import Inputs, make_inputs
from planned import call_of, planned
from torch import Tensor

from flash_mask_cute import explain
from flash_mask_cute.call import plan as plan_module
from flash_mask_cute.call.arguments import AttentionCall, Direction, Gradients, Tensors
from flash_mask_cute.call.backward import KernelBackward
from flash_mask_cute.call.documents import PackedBackward, PackedForward, rows_follow
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.forward import KernelForward
from flash_mask_cute.call.kernel_operands import FORWARD, STREAM
from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.prepare import prepare_bwd, prepare_fwd
from flash_mask_cute.limits import LONGEST
from flash_mask_cute.mask_prep.documents import max_documents
from flash_mask_cute.mask_prep.mask_bits import (
    BitTiles,
    DocumentBitsPlan,
    EntryBitsPlan,
    most_tiles,
)
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

TARGET = Target.default()
DOCUMENTS = Case("documents", 2, 700, 700, 4, 2, mask_mod="documents")
# its place in a launch of a forward, after that of the mask bits
QUERY_CHUNK = [x.argument for x in FORWARD if x.argument != STREAM].index("query_chunk")


def apart(case: Case) -> Inputs:
    """With a query whose rows of an entry do not follow those of the one before."""
    inputs = make_inputs(case)
    q = torch.cat([inputs.q, inputs.q], dim=1)[:, : case.seqlen_q]
    return replace(inputs, q=q)


def choose(given: Case | Inputs, limits: Limits | None = None) -> tuple[ExecutionPlan, Any]:
    """The plan of a forward, and how it stores mask bits."""
    found = planned(given, TARGET, limits)
    return found, found.mask_bits


@pytest.mark.usefixtures("documents_packed")
def test_a_call_is_packed_by_slots() -> None:
    """Two sequences for 700 tokens; a table of tiles for each entry, or one for all."""
    call, bits_plan = choose(DOCUMENTS)
    assert isinstance(bits_plan, DocumentBitsPlan)
    assert (bits_plan.entries, bits_plan.batch, bits_plan.seqlen) == (2, 2, 700)
    # 700 * 700 / (128 * 128) is 29.9, 700 / 128 is 5.5
    assert bits_plan.shape == (1, 1, 2 * (30 + 6 + 6 + 2), 128, 4)
    shapes, problem = call.shapes, call.problem
    assert (shapes.batch, shapes.seqlen_q, shapes.total_q, shapes.total_k) == (4, 700, 1400, 1400)
    assert problem.varlen_q and problem.varlen_k and problem.reads_mask_bits
    assert (call.out_shape, call.lse_shape) == ((1400, 4, 128), (4, 1400))
    _, bits_plan = choose(Case("same", 3, 700, 700, 4, 4, mask_mod="checks"))
    assert isinstance(bits_plan, DocumentBitsPlan) and bits_plan.entries == 1


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("tile", [(128, 128), (192, 80), (64, 128)])
def test_there_is_room_for_the_tiles_of_any_documents(tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    generator = torch.Generator().manual_seed(5)
    for seqlen in (513, 1024, 1300, 4096):
        slots = max_documents(seqlen)
        tiles = BitTiles.for_forward(*tile)
        most = most_tiles(tiles, seqlen * seqlen, seqlen, seqlen, slots)
        for _ in range(200):
            cuts = torch.randint(0, seqlen + 1, (slots - 1,), generator=generator)
            starts = torch.tensor([0, *cuts.sort().values.tolist(), seqlen])
            lengths = starts.diff()
            assert int((-(-lengths // tile_m) * -(-lengths // tile_n)).sum()) <= most


def test_small_calls_are_not_packed() -> None:
    """2 x 4 x 5 blocks of 128 queries."""
    for least, packs in ((40 / TARGET.num_sms, True), (41 / TARGET.num_sms, False)):
        limits = Limits(min_tiles_packed=least)
        assert isinstance(choose(DOCUMENTS, limits)[1], DocumentBitsPlan) == packs
        assert isinstance(choose(apart(DOCUMENTS), limits)[1], EntryBitsPlan)


@pytest.mark.usefixtures("documents_packed")
def test_documents_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tiles as there is room for, of any documents, and the rest of a block's."""
    # `explain` takes no limits
    limits = Limits(2 * 400 * 700, min_tiles=0, min_tiles_packed=0)
    monkeypatch.setattr(plan_module, "LIMITS", limits)
    _, bits_plan = choose(DOCUMENTS)
    assert isinstance(bits_plan, DocumentBitsPlan)
    # 560000 / (128 * 128) is 34.2
    assert (bits_plan.tiles, bits_plan.step, bits_plan.shape[2]) == (44, 34, 34 + 6)
    assert bits_plan.num_query_chunks == 3
    launch, calls, call = recorded(DOCUMENTS)
    launch(call.tensors, call.masks)
    stores, mains = calls[::2], calls[1::2]
    chunks = [x[QUERY_CHUNK] for x in mains]
    assert [x[-1] for x in stores] == chunks == [(0, 34), (34, 34), (68, 34)]
    assert all(x[-2] == 44 for x in stores)
    for i in range(3):
        bits = *(x[0] for x in stores), *(x[QUERY_CHUNK - 1] for x in mains)
        assert len({x[i].data_ptr() for x in bits}) == 1
    assert len({x[1].data_ptr() for x in stores} | {x[6].data_ptr() for x in mains}) == 1
    x, masks = call.tensors, call.masks
    told = explain(x.q, x.k, x.v, mask_mod=masks.mask_mod, aux_tensors=masks.aux_tensors)
    assert "for each of 3 parts" in told.masks and "packed sequences" in told.masks


def test_rows_that_follow_each_other() -> None:
    x = torch.zeros(3, 10, 4, 8)
    assert rows_follow(x, None, x[:1, :4], x[..., :2])
    assert not rows_follow(x[:, :4])
    assert not rows_follow(x, x.transpose(0, 1))
    assert rows_follow(torch.zeros(3, 10, 3, 4, 8)[:, :, 1])


def recorded(case: Case, **more: Any) -> tuple[Any, list[tuple[Any, ...]], AttentionCall]:
    """The prepared forward whose kernels note their arguments, these, and a call."""
    call = call_of(case, **more)
    found = planned(call, TARGET)
    assert found.mask_bits is not None
    calls: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        calls.append(args)

    inner = KernelForward(found, note, partial(found.mask_bits.query_chunks, note))
    return PackedForward(inner, True, mask_causal=None), calls, call


@pytest.mark.usefixtures("documents_packed")
def test_what_a_forward_passes_on() -> None:
    launch, calls, call = recorded(DOCUMENTS)
    out, lse = launch(call.tensors, call.masks)
    (mask_bits, cu_seqlens, spans, bounds, begins, logical, aux, _, most, part), main = calls
    assert part == (0, 88) and most == 44
    tiles, states, places = mask_bits
    assert tiles.shape[:3] == states.shape and places.shape == (4 + LONGEST + 1, 2)
    assert (spans.shape, bounds.shape, begins.shape) == ((2, 1, 700, 2), (2, 1, 4, 6), (2, 2))
    assert cu_seqlens.shape == (5,) and logical is None and len(aux) == 1
    q, _, _, rows, lse_rows = main[:5]
    assert (q.shape, rows.shape, lse_rows.shape) == ((1400, 4, 128), (1400, 4, 128), (4, 1400))
    assert q.data_ptr() == call.tensors.q.data_ptr() and out.data_ptr() == rows.data_ptr()
    assert main[6] is main[7] is cu_seqlens
    assert main[QUERY_CHUNK - 1] is mask_bits and main[QUERY_CHUNK] is part
    assert not any(main[QUERY_CHUNK + 1 :])
    assert (out.shape, lse.shape) == ((2, 700, 4, 128), (2, 4, 700))
    by_sequence = rearrange(lse_rows, "h (b q) -> b h q", b=2).contiguous()
    assert torch.equal(lse.view(torch.int32), by_sequence.view(torch.int32))


@pytest.mark.usefixtures("documents_packed")
def test_a_forward_writes_where_it_is_told() -> None:
    given = torch.zeros(2, 700, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 4, 700)
    launch, calls, call = recorded(DOCUMENTS, out=given[0], lse=given[1])
    out, lse = launch(call.tensors, call.masks)
    assert out is given[0] and lse is given[1]
    assert calls[1][3].data_ptr() == out.data_ptr()
    from_kernel = rearrange(calls[1][4], "h (b q) -> b h q", b=2).contiguous()
    assert torch.equal(lse.view(torch.int32), from_kernel.view(torch.int32))


@pytest.mark.usefixtures("documents_packed")
def test_what_a_backward_passes_on() -> None:
    """Views of all but lse, dlse, and a dout whose rows do not follow each other."""
    batch, seqlen, heads = 2, 700, 4
    q, k, v, out, dq = (torch.randn(batch, seqlen, heads, 64).bfloat16() for _ in range(5))
    lse, dlse = torch.randn(batch, heads, seqlen), torch.randn(batch, heads, seqlen)
    dout = torch.ones(batch, 1, heads, 64).bfloat16().expand(-1, seqlen, -1, -1)
    tensors = Tensors(q, k, v, out=out, lse=lse, gradients=Gradients(dout, dlse, dq))
    seen: list[Tensors] = []

    def run(tensors: Tensors, masks: Any) -> Any:
        seen.append(tensors)
        return tensors.gradients.dq, tensors.gradients.dk, tensors.gradients.dv

    gradients = PackedBackward(run, mask_causal=None)(tensors)
    assert gradients[0] is dq and all(x.shape == q.shape for x in gradients)
    given = seen[0].by_name()
    assert given["dout"].is_contiguous()
    views = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    assert all(given[name].shape == (batch * seqlen, heads, 64) for name in views)
    for name in ("q", "k", "v", "out"):
        assert given[name].data_ptr() == getattr(tensors, name).data_ptr()
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert given[name].data_ptr() == gradient.data_ptr()
    for packed_rows, rows in ((given["lse"], lse), (given["dlse"], dlse)):
        assert packed_rows is not None
        assert torch.equal(rearrange(packed_rows, "h (b q) -> b h q", b=batch), rows)


@pytest.mark.shares(3)
@pytest.mark.usefixtures("documents_packed", "attention_is_not_compiled")
def test_launches_of_a_call_and_of_its_backward() -> None:
    """Packed where rows follow each other; explain says so."""
    assert isinstance(prepare_fwd(call_of(DOCUMENTS), TARGET), PackedForward)
    scattered = apart(DOCUMENTS)
    assert isinstance(prepare_fwd(call_of(scattered), TARGET), KernelForward)

    inputs = make_inputs(DOCUMENTS)
    q, k, v = inputs.q, inputs.k, inputs.v
    keywords = inputs.bwd_keywords
    bwd = prepare_bwd(call_of(inputs, Direction.BACKWARD), TARGET)
    assert isinstance(bwd, PackedBackward) and isinstance(bwd.inner, KernelBackward)

    told = explain(q, k, v, **keywords)
    assert "documents that its bits show are packed sequences" in told.masks
    assert "the CPU path packs no documents" in told.note and told.work_tiles == 2 * 4 * 6
    assert "packed" not in explain(scattered.q, k, v, **keywords).masks


def test_what_has_no_rows_is_that_of_the_call() -> None:
    seen: list[Tensors] = []

    def run(tensors: Tensors, masks: Any) -> tuple[Tensor, None]:
        seen.append(tensors)
        return tensors.q, None

    q, sink = torch.zeros(2, 5, 4, 8), torch.zeros(4)
    packed = PackedForward(run, False, mask_causal=None)
    out, lse = packed(Tensors(q, q, q, learnable_sink=sink))
    assert out.shape == q.shape and lse is None
    assert seen[0].learnable_sink is sink
