"""What `explain` tells about the backward of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16
from cutlass import Float32
from planned import backward_call, planned
from torch import Tensor

from flash_mask_cute import SelectedBlocks, explain
from flash_mask_cute.call.backward import KernelBackward
from flash_mask_cute.call.build_backward import BwdKernels
from flash_mask_cute.call.tables import MARGIN
from flash_mask_cute.mods.read_classes import ReadClass
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

GROUP = {"heads_q": 8, "heads_kv": 1, "seqlen": 4096, "head_dim": 64}


def qkv(
    seqlen: int = 200, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.zeros(1, seqlen, heads_q, head_dim, dtype=BF16)
    k = torch.zeros(1, seqlen, heads_kv, head_dim, dtype=BF16)
    return q, k, k.clone()


def on_cpu() -> tuple[Tensor, Tensor, Tensor]:
    """What no kernel takes, so that none is compiled."""
    q, k, v = (x.float() for x in qkv())
    return q, k, v


class Allocations:
    """Stands for the kernels of a backward; notes the tensors that they get."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}

    def __call__(self, *arguments: Any) -> None:
        for x in arguments:
            if isinstance(x, Tensor):
                self.tensors[x.data_ptr()] = x

    def num_bytes(self, given: list[Tensor]) -> int:
        """All but the tensors of the caller, and the two counters of the scheduler."""
        pointers = {x.data_ptr() for x in given}
        others = [x for pointer, x in self.tensors.items() if pointer not in pointers]
        return sum(x.numel() * x.element_size() for x in others if x.numel() > 2)


@pytest.mark.parametrize(
    ("shape", "keywords", "arch"),
    [
        ({}, {"causal": True}, "sm_90a"),
        ({"head_dim": 160}, {}, "sm_90a"),
        (GROUP, {"causal": True}, "sm_90a"),
        ({"heads_kv": 4}, {"learnable_sink": torch.zeros(4, dtype=BF16)}, "sm_90a"),
        ({}, {"deterministic": True}, "sm_100a"),
        ({"head_dim": 256}, {"deterministic": True}, "sm_100a"),
    ],
    ids=["causal", "pairs", "group", "sink", "in-order", "pairs-in-order"],
)
def test_scratch_is_what_a_call_allocates(shape: Any, keywords: dict[str, Any], arch: str) -> None:
    """In pairs that sum in order, a row block has two semaphores."""
    q, k, v = qkv(**shape)
    told = explain(q, k, v, **keywords, target=arch).backward
    assert told is not None
    out, lse = torch.zeros_like(q), torch.zeros(1, q.shape[2], q.shape[1])
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    if "learnable_sink" in keywords:
        gradients["dsink"] = torch.empty_like(keywords["learnable_sink"])
    call = backward_call(q, k, v, out, out, lse, **keywords, **gradients)
    found = planned(call, Target(arch, num_sms=132))
    kernels = Allocations()
    KernelBackward(found, BwdKernels(*[kernels] * 3, add_parts=kernels))(call.tensors, call.masks)
    given = [x for x in (*call.tensors, *gradients.values()) if isinstance(x, Tensor)]
    assert told.scratch_bytes == kernels.num_bytes(given)
    choice = found.bwd_choice
    assert (told.tiles, told.tile_n, told.reason) == (choice.tiles, choice.tile_n, choice.reason)
    assert (told.cols, told.cols_v) == (choice.tile_d, choice.tile_dv)
    if arch == "sm_100a":
        row_blocks, in_pairs = -(-200 // choice.tiles.tile_m), shape == {"head_dim": 256}
        shapes = [x.shape for x in kernels.tensors.values() if x.dtype == torch.int32]
        assert choice.tiles.cta_pair == in_pairs and (4, row_blocks * (1 + in_pairs)) in shapes


def test_a_split_group_is_told() -> None:
    found = explain(*qkv(**GROUP), causal=True, target="sm_90a")
    told = found.backward
    assert told is not None and told.group_splits == 8
    assert told.partial_sums_bytes == 8 * 4096 * (64 + 64) * 4
    assert f"{told.partial_sums_bytes} of them for partial sums" in str(found)
    alone = explain(*qkv(heads_kv=4), target="sm_90a")
    assert alone.backward is not None and alone.backward.partial_sums_bytes == 0
    assert "partial sums" not in str(alone)


def test_columns_and_kernel_of_each_target() -> None:
    for target, kernel in (("sm_90a", "Sm90"), ("sm_100a", "Sm100")):
        found = explain(*qkv(head_dim=72), target=target)
        told = found.backward
        assert told is not None and told.kernel == f"FlashAttentionBackward{kernel}"
        assert f"{told.cols} of queries and keys, {told.cols_v} of values" in str(found)
        assert f"{told.tile_n} keys x blocks of {told.tiles.tile_m} queries" in str(found)


def test_pairs_of_blackwell_are_told() -> None:
    """Which calls take them: plan rows of 511 and 512 keys, and of windows of 511 and 512."""
    for keywords, in_pairs in (({}, True), ({"causal": True, "window_size": (255, 0)}, False)):
        found = explain(*qkv(seqlen=1024, head_dim=128), **keywords, target="sm_100a")
        told = found.backward
        assert told is not None and told.tiles.cta_pair == in_pairs, keywords
        assert ("two that sum dQ together" in str(found)) == in_pairs
        assert ("no window below 512" in told.reason) == in_pairs


def test_the_packed_sequences_of_documents_are_told() -> None:
    rows = torch.full((1, 1, 200, 1), 200, dtype=torch.int32)
    found = explain(*qkv(), causal=True, startend_row_indices=rows, target="sm_90a").backward
    assert found is not None and found.scratch_bytes is not None


def test_float32_runs_on_the_cpu_without_scratch() -> None:
    q, k, v = (x.float() for x in qkv())
    found = explain(q, k, v).backward
    assert found is not None and found.scratch_bytes is None


def test_pages_have_no_backward() -> None:
    q, k, _ = qkv()
    pages = k.reshape(5, 40, 2, 64)
    found = explain(
        q,
        pages,
        pages.clone(),
        page_table=torch.arange(5, dtype=torch.int32)[None],
        target="sm_90a",
    )
    assert found.backward is None
    assert "there is no backward: keys in pages have no gradients" in found.note


# -- gradients of aux tensors -------------------------------------------------------------------


def _gained(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score * aux[0][h[0]] + aux[1][h[0], q[0] - k[0] + 200]


def test_the_class_of_each_tensor_is_told() -> None:
    gains, distances = torch.ones(4), torch.zeros(4, 400, requires_grad=True)
    keywords = {"score_mod": _gained, "aux_tensors": [gains, distances], "target": "sm_90a"}
    found = explain(*qkv(), **keywords)
    assert found.backward is not None
    (told,) = found.backward.aux_gradients
    assert (told.number, told.is_wanted) == (1, True)
    assert told.reads.read_class is ReadClass.DIFFERENCE
    assert "aux_tensors[1] is read by difference (" in str(found)
    plain = explain(*qkv(), **keywords | {"aux_tensors": [gains, distances.detach()]}).backward
    assert plain is not None and found.backward.scratch_bytes is not None
    assert found.backward.scratch_bytes == (plain.scratch_bytes or 0) + 4 * distances.numel()
    kinds = [x.reads.read_class for x in plain.aux_gradients]
    assert kinds == [ReadClass.HEAD, ReadClass.DIFFERENCE]
    assert not any(x.is_wanted for x in plain.aux_gradients)
    for others in (
        {"score_mod": lambda s, b, h, q, k: s * 2.0},
        {"aux_tensors": [gains], "mask_mod": lambda b, h, q, k, aux: aux[0][h[0]] > q},
    ):
        without = explain(*qkv(), **others, target="sm_90a").backward
        assert without is not None and without.aux_gradients == ()


def test_a_mod_written_in_torch_is_told() -> None:
    bias = torch.zeros(4, 200, requires_grad=True)
    ids = torch.zeros(200, dtype=torch.int32)
    found = explain(*on_cpu(), score_mod=lambda s, b, h, q, k: s + bias[h, k])
    assert "is read by key; its gradient costs" in str(found)
    found = explain(*on_cpu(), score_mod=lambda s, b, h, q, k: s + bias[ids[q], ids[k]])
    assert "is read by other (its indices depend on query and key separately)" in str(found)


def _sloped(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score - aux[0][h[0]] * abs(q - k).to(Float32) + aux[1][b[0], k[0]]


def _pairs(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][h[0], q[0], k[0]]


def _paired(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][b[0], k[0], q[0], h[0]]


def test_what_a_class_costs_on_each_target() -> None:
    trained = [torch.ones(4, requires_grad=True), torch.zeros(1, 200, requires_grad=True)]
    keywords = {"score_mod": _sloped, "aux_tensors": trained}
    hopper = explain(*on_cpu(), **keywords, target="sm_90a").backward
    blackwell = explain(*on_cpu(), **keywords, target="sm_100a").backward
    assert hopper is not None and blackwell is not None
    costs = [x.cost for x in hopper.aux_gradients]
    assert costs == [
        "an addition to memory for each 16 keys and head",
        "an addition to memory for each key and head",
    ]
    assert all(x.cost not in costs for x in blackwell.aux_gradients)


def _grid(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][h[0], abs(q[0] // 20 - k[0] // 20)]


def test_without_walks_by_head_nothing_is_summed_along_them() -> None:
    """With listed queries, and with keys that sequences have in common."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        rows = q[0] // 30 - k[0] // 30
        return score + (aux[0][h[0], k[0]] + aux[1][h[0], rows + 40])

    q, k, v = qkv(1024)
    tables = [torch.zeros(4, 1024, requires_grad=True), torch.zeros(4, 80, requires_grad=True)]
    choice = SelectedBlocks(torch.zeros(1, 2, 1024, 8, dtype=torch.int32), 64)
    ends = torch.tensor([0, 500, 1024], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "max_seqlen_q": 524}
    for operands, more, sums in (
        ((q, k, v), {}, True),
        ((q, k, v), {"block_sparse_tensors": choice}, False),
        ((q[0], k, v), packed, False),
    ):
        keywords: dict[str, Any] = {"score_mod": score_mod, "aux_tensors": tables, **more}
        told = explain(*operands, **keywords, target="sm_90a").backward
        assert told is not None
        of_key, of_rows = (x.cost for x in told.aux_gradients)
        assert ("8 queries" not in of_key, "shared memory" in of_rows) == (sums, sums)


def test_tables_of_differences_are_told() -> None:
    """Their memory, and sums by difference in shared memory."""
    table = torch.zeros(4, 60, requires_grad=True)
    q = torch.zeros(4, 1000, 4, 64, dtype=torch.bfloat16)
    found = explain(q, q, q, score_mod=_grid, aux_tensors=[table], target="sm_90a")
    plain = explain(
        q, q, q, score_mod=_grid, aux_tensors=[table.detach()], target="sm_90a"
    ).backward
    size = 2 * (49 + MARGIN) + 1
    expected = f"one table of all differences, {4 * 4 * size} bytes: aux_tensors[0] 1 x 4 x {size}"
    assert f"tables             {expected}" in str(found)
    assert found.backward is not None and plain is not None
    # of eight MMA warps and two mask warps
    assert found.backward.smem_bytes == plain.smem_bytes + 10 * 256 * 4
    (told,) = found.backward.aux_gradients
    assert told.cost.startswith("sums in shared memory, and an addition to memory for each")
    scratch = found.backward.scratch_bytes, plain.scratch_bytes
    assert None not in scratch and scratch[0] == (scratch[1] or 0) + 4 * table.numel()
    small = explain(*on_cpu(), score_mod=_grid, aux_tensors=[table], target="sm_90a")
    assert small.tables == "" and "tables" not in str(small)


def test_a_fixed_order_takes_scratch() -> None:
    """The words of exact sums; sums in fp32 where no two scores read an element."""
    trained = [torch.ones(4, requires_grad=True), torch.zeros(1, 200, requires_grad=True)]
    keywords = {"score_mod": _sloped, "aux_tensors": trained, "target": "sm_90a"}
    told = explain(*qkv(), **keywords, deterministic=True).backward
    detached = [x.detach() for x in trained]
    plain = explain(*qkv(), **keywords | {"aux_tensors": detached}, deterministic=True).backward
    assert told is not None and told.scratch_bytes is not None
    assert plain is not None and plain.scratch_bytes is not None
    more = told.scratch_bytes - plain.scratch_bytes
    assert more == 13 * 8 * (4 + 200)
    assert "each as two of integers" in told.aux_gradients[0].cost
    pairs = [torch.zeros(1, 200, 200, 4, requires_grad=True)]
    keywords = {"score_mod": _paired, "aux_tensors": pairs, "target": "sm_90a"}
    told = explain(*qkv(), **keywords, deterministic=True).backward
    assert told is not None and told.scratch_bytes == plain.scratch_bytes + 4 * pairs[0].numel()
    assert "integers" not in told.aux_gradients[0].cost


@pytest.mark.parametrize(("batch", "of_element"), [(2, 4 * 2), (25, 4 * 25), (26, 13 * 8)])
def test_a_fixed_order_of_pairs_takes_what_is_less(batch: int, of_element: int) -> None:
    """Sums for each batch entry, or exact ones, where they have no owner."""
    bias = torch.zeros(4, 200, 200, requires_grad=True)
    given = [x.expand(batch, -1, -1, -1) for x in qkv()]
    told, plain = (
        explain(
            *given,
            score_mod=_pairs,
            aux_tensors=[x],
            deterministic=True,
            softcap=30.0,
            target="sm_90a",
        ).backward
        for x in (bias, bias.detach())
    )
    assert told is not None and told.scratch_bytes is not None
    assert plain is not None and plain.scratch_bytes is not None
    assert told.scratch_bytes - plain.scratch_bytes == of_element * bias.numel()


def test_a_backward_that_has_no_order_is_told() -> None:
    slopes = [torch.ones(4, requires_grad=True), torch.zeros(1, 200)]
    found = explain(
        *on_cpu(), score_mod=_sloped, aux_tensors=slopes, deterministic=True, target="sm_100a"
    )
    assert found.backward is None and "in no fixed order on Blackwell" in found.note
    with pytest.raises(TypeError, match="deterministic must be True or False, got 1"):
        explain(*on_cpu(), deterministic=1)  # type: ignore[arg-type]
