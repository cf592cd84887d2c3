"""Mask bits by documents, on the software GPU, in both directions."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import DOCUMENT_CASES, Case
from inputs import Inputs, make_inputs
from mask_cases import MASK_MODS, SEES_ALL
from planned import backward_call, forward_call, planned
from quiet_runs import quiet_run
from simulated_forward import launch_on_simulator, run_sim
from torch import Tensor

from flash_mask_cute.call.mask_bits import Limits
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.core.tile_state import EMPTY, FULL
from flash_mask_cute.limits import LONGEST
from flash_mask_cute.mask_prep import mask_bits_documents_kernel
from flash_mask_cute.mask_prep.documents import max_documents
from flash_mask_cute.mask_prep.mask_bits import (
    BitTiles,
    DocumentBitsPlan,
    MaskBits,
    MaskInputs,
    compile_mask_bits,
    most_tiles,
)
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("poisoned_allocations", "documents_packed")

TARGET = Target("sm_90a", num_sms=2)
HEADS, BATCH = 4, 2
# of each entry; several begin in the same 512 tokens, one has a single token
LENGTHS = ((200, 100, 550, 1, 299), (700, 450))
SEQLEN = sum(LENGTHS[0])


def ids_of(entries: int) -> Tensor:
    return torch.stack(
        [
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
            for lengths in LENGTHS[:entries]
        ]
    )


def same_document(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][b[0], q[0]] == aux[0][b[0], k[0]]


def same_for_all(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][0, q[0]] == aux[0][0, k[0]]


def until_the_end(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return q[0] < aux[0][k[0]]


def tiles_of(tile: tuple[int, int]) -> int:
    """The most that the documents of an entry may have."""
    slots = max_documents(SEQLEN)
    return most_tiles(BitTiles.for_forward(*tile), SEQLEN * SEQLEN, SEQLEN, SEQLEN, slots)


def bits_plan_of(direction: str, head_dim: int, mod: Any, aux: Tensor, **more: Any) -> Any:
    keywords = {"mask_mod": mod, "aux_tensors": [aux], **more}
    q = torch.zeros(BATCH, SEQLEN, HEADS, head_dim, dtype=torch.bfloat16)
    call = forward_call(q, q, q, **keywords)
    if direction == "backward":
        call = backward_call(q, q, q, q, q, torch.zeros(BATCH, HEADS, SEQLEN), **keywords)
    return planned(call, TARGET).mask_bits


def store(bits_plan: DocumentBitsPlan, mod: Any, aux: Tensor) -> MaskBits:
    """The first part of the bits, by the kernels that are compiled for them."""
    columns = arch_spec(TARGET).load_columns()
    function = compile_mask_bits(mod, bits_plan.problem, TARGET, columns).function
    return next(bits_plan.query_chunks(function, aux, MaskInputs((aux,), None)))


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize(
    ("direction", "head_dim", "tile"),
    [("forward", 64, (192, 128)), ("forward", 128, (128, 128)), ("backward", 128, (64, 128))],
)
def test_states_of_the_tiles_of_documents(
    simulator: ModuleType, direction: str, head_dim: int, tile: tuple[int, int], entries: int
) -> None:
    """By the pairs of which each tile consists."""
    ids = ids_of(entries)
    mod = (same_for_all, same_document)[entries - 1]
    bits_plan = bits_plan_of(direction, head_dim, mod, ids)
    assert isinstance(bits_plan, DocumentBitsPlan) and bits_plan.entries == entries
    with quiet_run(simulator, launches=1):
        (_, states, places), _, cu_seqlens = store(bits_plan, mod, ids)
    assert cu_seqlens is not None
    starts = cu_seqlens.tolist()
    assert starts[0] == 0 and starts[-1] == BATCH * SEQLEN
    # of each slot of 512 tokens the first document that begins there
    begins = [[0, 850], [0, 700]][:entries]
    found = [begins[min(entry, entries - 1)] for entry in range(BATCH)]
    assert set(starts[:-1]) == {x + i * SEQLEN for i, rows in enumerate(found) for x in rows}
    tile_m, tile_n = tile
    used = set()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        entry = start // SEQLEN if start < end else 0
        of_mask = min(entry, entries - 1)
        own = ids[of_mask, start - entry * SEQLEN : end - entry * SEQLEN]
        sees = own[:, None] == own
        first, in_row = places[sequence].tolist()
        assert in_row == -(-(end - start) // tile_n)
        for m_block in range(-(-(end - start) // tile_m)):
            for n_block in range(in_row):
                part = sees[m_block * tile_m :, n_block * tile_n :][:tile_m, :tile_n]
                expected = FULL * bool(part.any()) + EMPTY * (not bool(part.all()))
                number = first + m_block * in_row + n_block
                assert states[0, 0, number] == expected, (sequence, m_block, n_block)
                used.add((of_mask, number))
    # as many as there are, so no two have the same place
    assert len(used) == len({number for _, number in used}) <= bits_plan.shape[2]


@pytest.mark.parametrize("causal", [False, True])
def test_causal_masking_hides_later_keys(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """What a callable says of them does not join documents that it separates otherwise. A row of
    tiles is that of several CTAs."""
    monkeypatch.setattr(mask_bits_documents_kernel, "TILES_JUDGED", 4)
    lengths = torch.tensor(LENGTHS[1])
    ends = torch.repeat_interleave(lengths.cumsum(0), lengths).int()
    bits_plan = bits_plan_of("forward", 64, until_the_end, ends, causal=causal)
    cu_seqlens = store(bits_plan, until_the_end, ends).cu_seqlens
    assert cu_seqlens is not None
    begins = {0, LENGTHS[1][0]} if causal else {0}
    assert {x % SEQLEN for x in cu_seqlens.tolist()} == begins


def test_long_walks_are_listed(simulator: ModuleType) -> None:
    """Blocks of queries with more than twice the visible tiles of the mean, once for each chunk."""
    mod, ids = MASK_MODS["seeing_all"].cute, ids_of(1)
    (_, states, places), _, cu_seqlens = store(bits_plan_of("forward", 128, mod, ids), mod, ids)
    assert cu_seqlens is not None
    listed, (count, _) = places[len(cu_seqlens) - 1 : -1], places[-1].tolist()
    in_row = -(-SEQLEN // 128)
    visible = (states[0, 0, : in_row * in_row].view(in_row, in_row) & FULL).sum(1)
    long = (visible * in_row > 2 * visible.sum()).nonzero().flatten().tolist()
    assert long == [SEES_ALL // 128] and count == BATCH < len(listed) == LONGEST
    first = {int(i) for i in (cu_seqlens[:-1] < cu_seqlens[1:]).nonzero()}
    assert {tuple(x) for x in listed[:count].tolist()} == {(i, long[0]) for i in first}


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize(("head_dim", "tile"), [(64, (192, 128)), (128, (128, 128))])
def test_parts_of_documents(
    simulator: ModuleType, head_dim: int, tile: tuple[int, int], entries: int
) -> None:
    """Parts compute what one call computes, bit for bit; those behind the last tile do nothing."""
    ids, (tile_m, tile_n) = ids_of(entries), tile
    mod = (same_for_all, same_document)[entries - 1]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(BATCH, SEQLEN, HEADS, head_dim, generator=generator).bfloat16()
        for _ in range(3)
    )
    inputs = Inputs(Case("parts"), q, k, v, {"mask_mod": mod, "aux_tensors": [ids]})
    whole = launch_on_simulator(inputs)
    for most in (20, 40):
        limits = Limits(most * tile_m * tile_n, min_tiles=0, min_tiles_packed=0)
        num_parts = -(-entries * tiles_of(tile) // most)
        assert num_parts > 1
        for seed in (None, 1):
            # a call that stores and one that attends, for each part
            with quiet_run(simulator, seed, launches=2 * num_parts):
                parts = launch_on_simulator(inputs, limits=limits)
            assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))


@pytest.mark.parametrize("position", range(len(DOCUMENT_CASES)))
def test_forward(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(DOCUMENT_CASES[position])
    run_sim(simulator, inputs, seeds=(1,))
    assert len(simulator.RESULTS) == 2, "one call stores, one reads"
    if position % 2:
        run_sim(simulator, inputs, seeds=(None,), config={"skip_blocks": False})
