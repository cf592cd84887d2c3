"""The kernel that makes block lists, executed instruction by instruction on the software GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from quiet_runs import quiet_run
from torch import Tensor

DELAY_SEEDS = (None, 1, 2)


def causal_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k <= q + 5


def document_mod(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    ids = aux[0]
    return ids[b[0], h[0], q[0]] == ids[b[0], h[0], k[0]]


def visible_of(name: str, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return ids[b, h, q] == ids[b, h, k] if name == "documents" else k <= q + 5


def expected_rows(visible: Tensor, block_q: int, block_k: int, has_full: bool) -> list[Any]:
    """(partial, full) blocks of each list, in the order of a flattened count tensor."""
    rows = []
    for one_head in visible.flatten(0, 1):
        for band in one_head.split(block_q):
            blocks = list(enumerate(band.split(block_k, dim=1)))
            full = [n for n, block in blocks if has_full and block.all()]
            rows.append(([n for n, block in blocks if block.any() and n not in full], full))
    return rows


CASES = {
    # batch, heads, seqlen_q, seqlen_k, block_q, block_k
    # 13 blocks: two CTAs that examine them; 50 blocks: two rounds of the warp that lists them
    "causal": (1, 2, 70, 200, 32, 16),
    "causal, many": (1, 2, 70, 200, 32, 4),
    "documents": (2, 1, 100, 100, 48, 40),
}


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("has_full", [True, False], ids=["full", "no-full"])
@pytest.mark.parametrize("name", CASES)
def test_lists(simulator: ModuleType, name: str, has_full: bool) -> None:
    from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
    from flash_mask_cute.compute_block_sparsity import run_scan
    from flash_mask_cute.mask_prep.block_scan import ScanProblem

    *shape, block_q, block_k = CASES[name]
    starts = torch.zeros((2, 1, 100), dtype=torch.int32)
    starts[:, :, [7, 48, 70]] = 1
    starts[1, :, 90] = 1
    ids = starts.cumsum(-1).int()
    aux = (ids,) if name == "documents" else ()
    rows = expected_rows(visible_of(name, ids, tuple(shape)), block_q, block_k, has_full)
    assert any(partial for partial, _ in rows) and (any(full for _, full in rows) or not has_full)

    mod = document_mod if name == "documents" else causal_mod
    problem = ScanProblem("sm_90a", ScanProblem.describe_aux(aux), has_full)
    counts = (*shape[:2], -(-shape[2] // block_q))
    entries = (*counts, -(-shape[3] // block_k))
    for seed in DELAY_SEEDS:
        made = [torch.empty(x, dtype=torch.int32) for x in (counts, entries) * (1 + has_full)]
        lists = BlockSparseTensorsTorch(*made, block_size=(block_q, block_k))
        with quiet_run(simulator, seed):
            run_scan(mod, problem, lists, (shape[2], shape[3]), aux)
        for cnt, idx, which in zip(made[::2], made[1::2], (0, 1), strict=False):
            expected = [row[which] for row in rows]
            assert cnt.flatten().tolist() == [len(row) for row in expected]
            padded = [row + [0] * (entries[3] - len(row)) for row in expected]
            assert idx.flatten(0, 2).tolist() == padded


def test_a_grid_of_many_sequences(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All dimensions of a grid but the first one end at 65535."""
    from flash_mask_cute.block_sparsity import BlockSparseTensorsTorch
    from flash_mask_cute.compute_block_sparsity import run_scan
    from flash_mask_cute.mask_prep.block_scan import ScanProblem

    launches: list[Any] = []
    monkeypatch.setattr(simulator, "simulate", lambda found, *_, **__: launches.extend(found))
    made = [torch.empty(65536, 1, 1, *more, dtype=torch.int32) for more in ((), (9,))]
    lists = BlockSparseTensorsTorch(*made, block_size=(16, 16))
    problem = ScanProblem("sm_90a", ScanProblem.describe_aux(()), False)
    run_scan(causal_mod, problem, lists, (16, 144), ())
    simulator.RESULTS.clear()
    assert [x.grid for x in launches] == [(2 * 65536, 1, 1), (65536, 1, 1)]
