"""Calls whose mask_mod answers by documents: which are packed, and how their tensors are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from cases import Case
from inputs import make_inputs
from torch import Tensor

from flash_mask_cute import explain
from flash_mask_cute.call import arguments as call_arguments
from flash_mask_cute.call import plan, prepare, resolve
from flash_mask_cute.call.arguments import BwdExtras, BwdOperands, Extras, FwdOperands, bundle
from flash_mask_cute.call.packed import rows_follow
from flash_mask_cute.call.plan import choose_storing
from flash_mask_cute.call.prepared import KernelLaunch
from flash_mask_cute.call.prepared_bwd import BwdKernelLaunch
from flash_mask_cute.call.prepared_packed import PackedBwdLaunch, PackedLaunch
from flash_mask_cute.call.resolve import resolve_fwd
from flash_mask_cute.mask_prep.documents import num_slots
from flash_mask_cute.mask_prep.mask_bits import BitStoring, BitTiles, DocumentStoring, most_tiles
from flash_mask_cute.runtime.target import Target

TARGET = Target.default()
DOCUMENTS = Case("documents", 2, 700, 700, 4, 2, mask_mod="documents")


def choose(case: Case, can_pack: bool = True) -> tuple[Any, Any]:
    inputs = make_inputs(case)
    extras, masks, settings = bundle(inputs.keywords)
    call = resolve_fwd(FwdOperands(inputs.q, inputs.k, inputs.v), extras, masks, settings)
    return choose_storing(*call, TARGET, can_pack)


@pytest.mark.usefixtures("documents_packed")
def test_a_call_is_packed_by_slots() -> None:
    """Two sequences for 700 tokens; a table of tiles for each entry, or one for all."""
    call, storing = choose(DOCUMENTS)
    assert isinstance(storing, DocumentStoring)
    assert (storing.entries, storing.batch, storing.seqlen) == (2, 2, 700)
    # 700 * 700 / (128 * 128) is 29.9, 700 / 128 is 5.5
    assert storing.shape == (1, 1, 2 * (30 + 6 + 6 + 2), 128, 4)
    shapes, problem = call.shapes, call.problem
    assert (shapes.batch, shapes.seqlen_q, shapes.total_q, shapes.total_k) == (4, 700, 1400, 1400)
    assert problem.varlen_q and problem.varlen_k and problem.reads_bits
    assert (call.out_shape, call.lse_shape) == ((1400, 4, 128), (4, 1400))
    _, storing = choose(Case("same", 3, 700, 700, 4, 4, mask_mod="checks"))
    assert isinstance(storing, DocumentStoring) and storing.entries == 1


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("tile", [(128, 128), (192, 80), (64, 128)])
def test_there_is_room_for_the_tiles_of_any_documents(tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    generator = torch.Generator().manual_seed(5)
    for seqlen in (513, 1024, 1300, 4096):
        slots = num_slots(seqlen)
        tiles = BitTiles.of_queries(*tile)
        most = most_tiles(tiles, seqlen * seqlen, seqlen, seqlen, slots)
        for _ in range(200):
            cuts = torch.randint(0, seqlen + 1, (slots - 1,), generator=generator)
            starts = torch.tensor([0, *cuts.sort().values.tolist(), seqlen])
            lengths = starts.diff()
            assert int((-(-lengths // tile_m) * -(-lengths // tile_n)).sum()) <= most


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize(
    "case",
    [
        Case("short", 1, 512, 512, 4, 4, mask_mod="documents"),
        Case("cross", 1, 700, 800, 4, 4, mask_mod="documents"),
        Case("score_mod", 1, 700, 700, 4, 4, mask_mod="documents", score_mod="alibi"),
        Case("columns", 1, 700, 700, 4, 4, mask_mod="documents", column="documents2"),
    ],
    ids=lambda case: case.id,
)
def test_what_is_not_packed(case: Case) -> None:
    assert isinstance(choose(case)[1], BitStoring)


def test_small_calls_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 4 x 5 blocks of 128 queries."""
    for least, packs in ((40 / TARGET.num_sms, True), (41 / TARGET.num_sms, False)):
        monkeypatch.setattr(plan, "MIN_TILES_PACKED", least)
        assert isinstance(choose(DOCUMENTS)[1], DocumentStoring) == packs
        assert isinstance(choose(DOCUMENTS, can_pack=False)[1], BitStoring)


@pytest.mark.usefixtures("documents_packed")
def test_documents_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tiles as there is room for, of any documents, and the rest of a block's."""
    monkeypatch.setattr(plan, "MIN_TILES", 0)
    monkeypatch.setattr(plan, "MAX_PAIRS", 2 * 400 * 700)
    _, storing = choose(DOCUMENTS)
    assert isinstance(storing, DocumentStoring)
    # 560000 / (128 * 128) is 34.2
    assert (storing.tiles, storing.step, storing.shape[2]) == (44, 34, 34 + 6)
    assert storing.num_parts == 3
    launch, calls, call = recorded(DOCUMENTS)
    launch(*call)
    stores, mains = calls[::2], calls[1::2]
    # a kernel's last one is lse_low
    assert [x[-1] for x in stores] == [x[-2] for x in mains] == [(0, 34), (34, 34), (68, 34)]
    assert all(x[-2] == 44 for x in stores)
    for i in range(3):
        assert len({x[0][i].data_ptr() for x in (*stores, *((x[-3],) for x in mains))}) == 1
    assert len({x[1].data_ptr() for x in stores} | {x[6].data_ptr() for x in mains}) == 1
    told = explain(*call[:3], mask_mod=call[4].mask_mod, aux_tensors=call[4].aux_tensors)
    assert "for each of 3 parts" in told.masks and "packed sequences" in told.masks


def test_rows_that_follow_each_other() -> None:
    x = torch.zeros(3, 10, 4, 8)
    assert rows_follow(x, None, x[:1, :4], x[..., :2])
    assert not rows_follow(x[:, :4])
    assert not rows_follow(x, x.transpose(0, 1))
    assert rows_follow(torch.zeros(3, 10, 3, 4, 8)[:, :, 1])


def recorded(case: Case, **more: Any) -> tuple[Any, list[tuple[Any, ...]], Any]:
    """The launch of a forward whose kernels note their arguments, these, and a call."""
    inputs = make_inputs(case)
    extras, masks, settings = bundle(inputs.keywords | more)
    resolved, resolved_masks = resolve_fwd(
        FwdOperands(inputs.q, inputs.k, inputs.v), extras, masks, settings
    )
    call, storing = choose_storing(resolved, resolved_masks, TARGET, True)
    calls: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        calls.append(args)

    told = replace(storing, function=note)
    rows = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    launch = PackedLaunch(KernelLaunch(call, note, *rows, None, told), True, by_mask=False)
    return launch, calls, (inputs.q, inputs.k, inputs.v, extras, masks)


@pytest.mark.usefixtures("documents_packed")
def test_what_a_forward_passes_on() -> None:
    launch, calls, call = recorded(DOCUMENTS)
    out, lse = launch(*call)
    (stored, cu_seqlens, spans, bounds, begins, logical, aux, _, _, most, part), main = calls
    assert part == (0, 88) and most == 44
    tiles, states, places = stored
    assert tiles.shape[:3] == states.shape and places.shape == (4, 2)
    assert (spans.shape, bounds.shape, begins.shape) == ((2, 1, 700, 2), (2, 1, 4, 6), (2, 2))
    assert cu_seqlens.shape == (5,) and logical is None and len(aux) == 1
    q, _, _, rows, lse_rows = main[:5]
    assert (q.shape, rows.shape, lse_rows.shape) == ((1400, 4, 128), (1400, 4, 128), (4, 1400))
    assert q.data_ptr() == call[0].data_ptr() and out.data_ptr() == rows.data_ptr()
    assert main[6] is main[7] is cu_seqlens
    assert main[-3] is stored and main[-2] is part and main[-1] is None
    assert (out.shape, lse.shape) == ((2, 700, 4, 128), (2, 4, 700))
    by_sequence = lse_rows.view(4, 2, 700).transpose(0, 1)
    assert torch.equal(lse.view(torch.int32), by_sequence.contiguous().view(torch.int32))


@pytest.mark.usefixtures("documents_packed")
def test_a_forward_writes_where_it_is_told() -> None:
    given = torch.zeros(2, 700, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 4, 700)
    launch, calls, call = recorded(DOCUMENTS, out=given[0], lse=given[1])
    out, lse = launch(*call)
    assert out is given[0] and lse is given[1]
    assert calls[1][3].data_ptr() == out.data_ptr()
    of_kernel = calls[1][4].view(4, 2, 700).transpose(0, 1).contiguous()
    assert torch.equal(lse.view(torch.int32), of_kernel.view(torch.int32))


@pytest.mark.usefixtures("documents_packed")
def test_what_a_backward_passes_on() -> None:
    """Views of all but lse, dlse, and a dout whose rows do not follow each other."""
    batch, seqlen, heads = 2, 700, 4
    q, k, v, out, dq = (torch.randn(batch, seqlen, heads, 64).bfloat16() for _ in range(5))
    lse, dlse = torch.randn(batch, heads, seqlen), torch.randn(batch, heads, seqlen)
    dout = torch.ones(batch, 1, heads, 64).bfloat16().expand(-1, seqlen, -1, -1)
    operands = BwdOperands(q, k, v, out, dout, lse)
    seen: list[Any] = []

    def launch(operands: BwdOperands, extras: BwdExtras, masks: Any) -> tuple[Tensor, ...]:
        seen.extend((operands, extras))
        return extras[6:9]

    packed: Any = PackedBwdLaunch(cast(Any, launch), by_mask=False)
    gradients = packed(operands, BwdExtras(dlse=dlse, dq=dq))
    assert gradients[0] is dq and all(x.shape == q.shape for x in gradients)
    given, extras = seen
    assert all(x.shape == (batch * seqlen, heads, 64) for x in given[:5])
    assert [x.data_ptr() for x in given[:4]] == [x.data_ptr() for x in operands[:4]]
    assert given.dout.is_contiguous()
    assert [x.data_ptr() for x in extras[6:9]] == [x.data_ptr() for x in gradients]
    for packed_rows, rows in ((given.lse, lse), (extras.dlse, dlse)):
        assert torch.equal(packed_rows.view(heads, batch, seqlen).transpose(0, 1), rows)


@pytest.mark.usefixtures("documents_packed")
def test_launches_of_a_call_and_of_its_backward() -> None:
    """Packed where rows follow each other; explain says so."""
    inputs = make_inputs(DOCUMENTS)
    extras, masks, settings = bundle(inputs.keywords)
    call = resolve_fwd(FwdOperands(inputs.q, inputs.k, inputs.v), extras, masks, settings)
    launch = prepare.kernel_launch(*call, TARGET, FwdOperands(inputs.q, inputs.k, inputs.v), None)
    assert isinstance(launch, PackedLaunch)
    apart = torch.cat([inputs.q, inputs.q], dim=1)[:, :700]
    launch = prepare.kernel_launch(*call, TARGET, FwdOperands(apart, inputs.k, inputs.v), None)
    assert isinstance(launch, KernelLaunch)

    q, k, v = inputs.q, inputs.k, inputs.v
    operands = BwdOperands(q, k, v, q.clone(), q.clone(), torch.zeros(2, 4, 700))
    keywords = {name: x for name, x in inputs.keywords.items() if name != "pack_gqa"}
    bwd_extras, masks, bwd_settings = call_arguments.bundle_bwd(keywords)
    bwd_call = resolve.resolve_bwd(operands, bwd_extras, masks, bwd_settings)
    bwd = prepare.bwd_kernel_launch(*bwd_call, TARGET, operands, bwd_extras)
    assert isinstance(bwd, PackedBwdLaunch) and isinstance(bwd.launch, BwdKernelLaunch)

    keywords = {name: x for name, x in inputs.keywords.items() if name != "pack_gqa"}
    told = explain(q, k, v, **keywords)
    assert "documents that its answers tell of are packed sequences" in told.masks
    assert "the CPU path packs no documents" in told.note and told.work_tiles == 2 * 4 * 6
    assert "packed" not in explain(apart, k, v, **keywords).masks


def test_extras_are_those_of_the_call() -> None:
    """What a packed launch does not see as rows is passed on."""
    seen: list[Extras] = []

    def launch(q: Tensor, k: Tensor, v: Tensor, extras: Extras, masks: Any) -> tuple[Tensor, None]:
        seen.append(extras)
        return q, None

    packed: Any = PackedLaunch(cast(Any, launch), False, by_mask=False)
    q, sink = torch.zeros(2, 5, 4, 8), torch.zeros(4)
    out, lse = packed(q, q, q, Extras(learnable_sink=sink))
    assert out.shape == q.shape and lse is None
    assert seen[0].learnable_sink is sink
