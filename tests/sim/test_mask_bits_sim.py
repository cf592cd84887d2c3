"""Mask bits on the software GPU: what they are, and that walks go by it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from planned import backward_call, forward_call, planned
from quiet_runs import quiet_run
from torch import Tensor

from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch, block_bits
from flash_mask_cute.call import mask_bits as choose_module
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.prepare import prepare_bwd, prepare_fwd
from flash_mask_cute.call.tiles.arch import arch_spec
from flash_mask_cute.core.tile_state import EMPTY, FULL, PARTIAL
from flash_mask_cute.mask_prep.mask_bits import EntryBitsPlan, MaskInputs, compile_mask_bits
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

TARGET = Target("sm_90a", num_sms=2)
HEADS = 4
# documents of which some begin with a tile of 64, 128 or 192 rows, and some within one
DOCUMENTS = (192, 64, 50, 78, 192, 24)
SEQLEN = sum(DOCUMENTS)
IDS = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS)).int()
SEES = IDS[:, None] == IDS
# of 128 x 128 scores: everything, nothing, or what the callable says
BLOCK = 128


def same_document(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return aux[0][q[0]] == aux[0][k[0]]


def make_lists() -> tuple[BlockSparseTensorsTorch, Tensor]:
    """Lists that say something else than the callable in half of the blocks, and their states."""
    num = -(-SEQLEN // BLOCK)
    at = torch.arange(num)
    states = torch.tensor([PARTIAL, FULL, PARTIAL, EMPTY])[(at[:, None] * 3 + at) % 4]
    counts, indices = [], []
    for state in (PARTIAL, FULL):
        listed = states == state
        counts.append(listed.sum(1).int()[None, None])
        first = torch.argsort((~listed).int(), dim=1, stable=True)
        indices.append(first.int()[None, None].contiguous())
    lists = BlockSparseTensorsTorch(
        counts[0], indices[0], counts[1], indices[1], block_size=(BLOCK, BLOCK)
    )
    return lists, states


def dense(states: Tensor | None) -> Tensor:
    """What callable and lists leave."""
    if states is None:
        return SEES
    of_pair = states.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:SEQLEN, :SEQLEN]
    return (of_pair == FULL) | ((of_pair == PARTIAL) & SEES)


def masked(**more: Any) -> dict[str, Any]:
    return {"mask_mod": same_document, "aux_tensors": [IDS], **more}


def fwd_bits_plan(head_dim: int, **more: Any) -> EntryBitsPlan | None:
    q = torch.zeros(1, SEQLEN, HEADS, head_dim, dtype=torch.bfloat16)
    return bits_plan_of(forward_call(q, q, q, **masked(**more)))


def bwd_bits_plan(head_dim: int, **more: Any) -> EntryBitsPlan | None:
    q = torch.zeros(1, SEQLEN, HEADS, head_dim, dtype=torch.bfloat16)
    operands = q, q, q, q, q, torch.zeros(1, HEADS, SEQLEN)
    return bits_plan_of(backward_call(*operands, **masked(**more)))


def bits_plan_of(call: AttentionCall) -> EntryBitsPlan | None:
    """Of a call whose documents are not packed, whatever its size."""
    with mock.patch.object(choose_module, "can_pack", lambda call: False):
        mask_bits = planned(call, TARGET).mask_bits
    assert mask_bits is None or isinstance(mask_bits, EntryBitsPlan)
    return mask_bits


def store(bits_plan: EntryBitsPlan, mask_inputs: MaskInputs) -> Any:
    """Tiles and states, by the kernel that is compiled for them."""
    columns = arch_spec(TARGET).load_columns()
    function = compile_mask_bits(same_document, bits_plan.problem, TARGET, columns).function
    return next(bits_plan.query_chunks(function, IDS, mask_inputs)).arguments


def state_of(pairs: Tensor) -> int:
    """The state of a tile by its pairs."""
    return FULL * bool(pairs.any()) + EMPTY * (not bool(pairs.all()))


# of a call, and which keys a query sees by it
BANDS: tuple[tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]], ...] = (
    ({"causal": True}, lambda q, k: k <= q),
    ({"window_size_left": 150}, lambda q, k: k >= q - 150),
    (
        {"window_size_left": 60, "window_size_right": 200},
        lambda q, k: (k >= q - 60) & (k <= q + 200),
    ),
)


@pytest.mark.parametrize("band", range(len(BANDS)))
@pytest.mark.parametrize(
    ("choose", "head_dim", "tile"),
    [
        (fwd_bits_plan, 128, (128, 128)),
        (bwd_bits_plan, 64, (128, 128)),
        (bwd_bits_plan, 128, (64, 128)),
    ],
    ids=["fwd-d128", "bwd-d64", "bwd-d128"],
)
def test_tiles_outside_of_the_band_are_not_asked_about(
    simulator: ModuleType,
    choose: Callable[..., EntryBitsPlan | None],
    head_dim: int,
    tile: tuple[int, int],
    band: int,
) -> None:
    """They count as hidden; what is said of the others does not depend on the band."""
    given, sees_by_band = BANDS[band]
    bits_plan = choose(head_dim, **given)
    assert bits_plan is not None
    mask_inputs = MaskInputs((IDS,), None)
    with quiet_run(simulator, launches=1):
        _, found = store(bits_plan, mask_inputs)
    at, (tile_m, tile_n) = torch.arange(SEQLEN), tile
    in_band = sees_by_band(at[:, None], at)
    num_outside = 0
    for m_block in range(found.shape[1]):
        for n_block in range(found.shape[2]):
            rows, cols = (
                slice(i * n, (i + 1) * n) for i, n in ((m_block, tile_m), (n_block, tile_n))
            )
            expected = state_of(SEES[rows, cols])
            if not in_band[rows, cols].any():
                expected, num_outside = EMPTY, num_outside + 1
            assert found[0, m_block, n_block] == expected, (m_block, n_block)
    assert num_outside


@pytest.mark.parametrize("has_lists", [False, True], ids=["alone", "lists"])
@pytest.mark.parametrize(
    ("choose", "head_dim", "tile"),
    [
        (fwd_bits_plan, 128, (128, 128)),
        (fwd_bits_plan, 64, (192, 128)),
        (fwd_bits_plan, 192, (128, 96)),
        (bwd_bits_plan, 128, (64, 128)),
        (bwd_bits_plan, 64, (128, 128)),
    ],
    ids=["fwd-d128", "fwd-d64", "fwd-d192", "bwd-d128", "bwd-d64"],
)
def test_states_of_tiles(
    simulator: ModuleType,
    choose: Callable[..., EntryBitsPlan | None],
    head_dim: int,
    tile: tuple[int, int],
    has_lists: bool,
) -> None:
    """By the pairs of which each tile consists."""
    lists, states = make_lists() if has_lists else (None, None)
    more = {} if lists is None else {"block_sparse_tensors_torch": lists}
    bits_plan = choose(head_dim, **more)
    assert bits_plan is not None
    bits = None if lists is None else tuple(block_bits(lists))
    with quiet_run(simulator, launches=1):
        tiles, found = store(bits_plan, MaskInputs((IDS,), bits))
    sees, (tile_m, tile_n) = dense(states), tile
    assert found.shape == tiles.shape[:3] == (1, -(-SEQLEN // tile_m), -(-SEQLEN // tile_n))
    kinds = set()
    for m_block in range(found.shape[1]):
        for n_block in range(found.shape[2]):
            part = sees[m_block * tile_m :, n_block * tile_n :][:tile_m, :tile_n]
            expected = state_of(part)
            assert found[0, m_block, n_block] == expected, (m_block, n_block)
            kinds.add(expected)
    assert kinds == {FULL, EMPTY, PARTIAL}


@pytest.mark.daily(1)
@pytest.mark.parametrize(("choose", "head_dim"), [(fwd_bits_plan, 128), (bwd_bits_plan, 64)])
def test_one_warp_alone_sees_a_tile(
    simulator: ModuleType, choose: Callable[..., EntryBitsPlan | None], head_dim: int
) -> None:
    """32 queries, or keys, of the first block are of the document of the second."""
    bits_plan = choose(head_dim)
    assert bits_plan is not None
    for first in range(0, BLOCK, 32):
        ids = torch.arange(SEQLEN).int() // BLOCK
        ids[first : first + 32] = 1
        with quiet_run(simulator, launches=1):
            _, found = store(bits_plan, MaskInputs((ids,), None))
        sees = ids[:, None] == ids
        expected = [[state_of(x) for x in rows.split(BLOCK, 1)] for rows in sees.split(BLOCK)]
        assert expected[0][1] == expected[1][0] == PARTIAL
        assert found[0].tolist() == expected, first


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_forward_does_not_visit_what_is_hidden(simulator: ModuleType, head_dim: int) -> None:
    """Without lists. A visited block whose values are NaN makes every row of the tile NaN."""
    tile_m = {64: 192, 128: 128}[head_dim]
    end = tile_m // 64 * 64
    q, k, v = (torch.randn(1, 512, HEADS, head_dim).bfloat16() for _ in range(3))
    ids = (torch.arange(512) >= end).int()
    v[:, 256:] = float("nan")
    keywords = {"mask_mod": same_document, "aux_tensors": [ids]}
    call = forward_call(q, k, v, **keywords)
    prepared = prepare_fwd(call, TARGET)
    with quiet_run(simulator, launches=2):
        out, _ = prepared(call.tensors, call.masks)
    assert out[:, :end].isfinite().all() and out[:, end:].isnan().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_backward_does_not_visit_what_is_hidden(
    simulator: ModuleType, head_dim: int, deterministic: bool
) -> None:
    """Without lists. A visited block whose dO is NaN makes dK and dV of the tile NaN."""
    q, k, v, dout = (torch.randn(1, 256, HEADS, head_dim).bfloat16() for _ in range(4))
    ids = (torch.arange(256) >= 128).int()
    dout[:, 128:] = float("nan")
    lse = torch.full((1, HEADS, 256), 6.0)
    operands = q, k, v, torch.zeros_like(q), dout, lse
    keywords = {"mask_mod": same_document, "aux_tensors": [ids], "deterministic": deterministic}
    call = backward_call(*operands, **keywords)
    prepared = prepare_bwd(call, TARGET)
    with quiet_run(simulator, launches=4):
        dq, dk, dv = prepared(call.tensors, call.masks)
    for gradient in (dq, dk, dv):
        assert gradient[:, :128].isfinite().all()
    assert dv[:, 128:].isnan().all()
