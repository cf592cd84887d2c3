"""What is Blackwell's own of the compiled forward, on the software GPU: pairs, one half."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import FP16, FP32, Case
from inputs import make_growing_inputs, make_inputs
from quiet_runs import quiet_run
from simulated_forward import launch_on_simulator, run_sim
from unseen_memory import NAN, with_unused

from flash_mask_cute import builders
from flash_mask_cute.call import prepare
from flash_mask_cute.call.forward import compile_fwd
from flash_mask_cute.runtime.cache import CompileCache
from flash_mask_cute.sm100 import umma

ARCH = "sm_100a"

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# in order, and at random later points
SEEDS = (None, 1)

# one half of 128 rows, by pairs of CTAs where there are more rows, with all kinds of masks
WIDE = (
    Case("d256-300x300", 1, 300, 300, 1, 1, head_dim=256),
    Case("d256-100x300-one-cta", 1, 100, 300, 3, 3, head_dim=256),
    Case("d256-1x1-one-cta", 1, 1, 1, 1, 1, head_dim=256),
    Case("d256-causal-257x520-gqa2", 1, 257, 520, 2, 1, head_dim=256, causal=True),
    Case("d256-causal-400x150-empty-rows", 1, 400, 150, 1, 1, head_dim=256, causal=True),
    Case("d256-fp16-window", 2, 200, 300, 1, 1, head_dim=256, dtype=FP16, window_left=40,
         window_right=20),
    Case("d256-varlen-columns", lengths_q=(300, 1, 65), lengths_k=(0, 255, 300), heads_q=1,
         heads_kv=1, head_dim=256, column="stepped2"),
    Case("d256-gqa4-packed-sink", 1, 60, 200, 4, 1, head_dim=256, pack_gqa=True, sink=FP32),
    Case("d256-score-mod-lists", 1, 200, 300, 1, 1, head_dim=256, score_mod="scale",
         blocks=(48, 80)),
    Case("d256-seqused-softcap", 2, 129, 129, 1, 1, head_dim=256, seqused_q=(100, 0),
         seqused_k=(129, 65), softcap=15.0),
    Case("d192-causal", 1, 300, 300, 1, 1, head_dim=192, causal=True),
    Case("d64-dv256-mask-mod", 1, 150, 260, 1, 1, head_dim=64, head_dim_v=256, mask_mod="checks"),
    Case("d200-dv136-causal", 1, 130, 200, 1, 1, head_dim=200, head_dim_v=136, causal=True),
)  # fmt: skip


@pytest.mark.parametrize("case", WIDE)
def test_wide_heads_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS)
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert (launch["cluster"] == (2, 1, 1)) == (case.seqlen_q > 128)


@pytest.mark.parametrize("cta_pair", [False, True])
def test_wide_heads_whose_maxima_are_outgrown(simulator: ModuleType, cta_pair: bool) -> None:
    """O is rescaled once P V of the block before is complete."""
    inputs = make_growing_inputs(256, 256, 40)
    run_sim(simulator, inputs, seeds=(None, 1), config={"cta_pair": cta_pair})


# what splits and pages have where few rows share keys, asked for
HALVES = (
    Case("d64-causal-200x300-gqa2", 1, 200, 300, 2, 1, head_dim=64, causal=True),
    Case("d96-window-130x260", 1, 130, 260, 1, 1, head_dim=96, window_left=50, window_right=9),
    Case("d128-varlen", lengths_q=(150, 0, 9), lengths_k=(200, 70, 0), heads_q=1, heads_kv=1),
    Case("d192-128-checks-lists", 1, 140, 300, 1, 1, head_dim=192, head_dim_v=128,
         mask_mod="checks", blocks=(128, 128)),
    Case("d128-gqa8-packed-softcap", 1, 40, 300, 8, 1, pack_gqa=True, softcap=15.0),
)  # fmt: skip


@pytest.mark.parametrize("case", HALVES)
def test_one_half_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS, config={"tile_m": 128, "cta_pair": False})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_half_whose_maxima_are_outgrown(simulator: ModuleType, head_dim: int) -> None:
    inputs = make_growing_inputs(head_dim, head_dim, 40)
    run_sim(simulator, inputs, seeds=SEEDS, config={"tile_m": 128, "cta_pair": False})


def test_padded_keys(simulator: ModuleType) -> None:
    """What is hidden by padding on the right is what lies past a used length."""
    inputs = make_inputs(Case("padding", 2, 300, 200, 1, 1, head_dim=64, seqused_k=(70, 150)))
    mask = builders.key_padding(torch.arange(200) < torch.tensor([[70], [150]]))
    run_sim(simulator, inputs, seeds=(1,), seqused_k=None, startend_row_indices=mask)


# For a pair of CTAs, all that the software GPU has. A work tile has 512 rows, of which the second
# CTA may have none.
PAIRS = (
    Case("300x129-batch-softcap-sink", 2, 300, 129, 2, 2, softcap=15.0, sink=FP32),
    Case("causal-520x400", 1, 520, 400, 1, 1, causal=True),
    Case("gqa4-packed-150x65", 1, 150, 65, 4, 1, pack_gqa=True),
    Case("varlen-cross", lengths_q=(300, 1), lengths_k=(0, 129), heads_q=1, heads_kv=1),
    Case("blocks-600x300", 1, 600, 300, 1, 1, mask_mod="checks", blocks=(128, 128)),
    Case("fp16-d64-300x300", 1, 300, 300, 1, 1, head_dim=64, dtype=FP16),
    Case("d96-300x200", 1, 300, 200, 1, 1, head_dim=96),
    Case("d192-128-300x400", 1, 300, 400, 1, 1, head_dim=192, head_dim_v=128),
)


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS, config={"cta_pair": True})
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert launch["cluster"] == (2, 1, 1)


@pytest.mark.parametrize(("num_sms", "seeds"), [(2, (None, 1, 2, 3, 4)), (7, (None, 1))])
def test_pairs_take_turns(
    simulator: ModuleType, num_sms: int, seeds: tuple[int | None, ...]
) -> None:
    """Four work tiles, two of one row; for one pair, and for three with an SM left over."""
    inputs = make_inputs(Case("pair", 1, 513, 257, 2, 1))
    run_sim(simulator, inputs, seeds=seeds, sms=num_sms)
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert (launch["cluster"], launch["grid"]) == ((2, 1, 1), (num_sms // 2 * 2, 1, 1))


@pytest.mark.parametrize("column", [3, 4, 40, 127])
def test_maxima_that_outgrow_the_one_in_use(simulator: ModuleType, column: int) -> None:
    """P is taken anew and O rescaled, in some warps and rows and not in others."""
    run_sim(simulator, make_growing_inputs(128, 128, column), seeds=SEEDS)


def test_rest_of_probabilities_is_awaited(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Products of all of P behind its first part would take scores for the rest."""

    def early(*operands: Any, steps: range | None = None, **more: Any) -> None:
        if steps is None:
            umma_issue(*operands, **more)
        elif steps.start == 0:
            umma_issue(*operands, **more, steps=range(umma.ROWS // umma.STEP))

    umma_issue = umma.issue
    inputs = make_inputs(Case("whole-300x300", 1, 300, 300, 1, 1))
    compile_anew = partial(compile_fwd, cache=CompileCache(tmp_path))
    monkeypatch.setattr(prepare, "compile_fwd", compile_anew)
    monkeypatch.setitem(simulator.OPTIONS, "slow", frozenset(range(8)))
    run_sim(simulator, inputs, seeds=(1,), config={"cta_pair": False})
    monkeypatch.setattr(umma, "issue", early)
    compile_again = partial(compile_fwd, cache=CompileCache(tmp_path / "early"))
    monkeypatch.setattr(prepare, "compile_fwd", compile_again)
    with pytest.raises(AssertionError):
        run_sim(simulator, inputs, seeds=(1,), config={"cta_pair": False})


@pytest.mark.parametrize("key", [130, 250])
def test_a_key_that_is_not_finite(simulator: ModuleType, key: int) -> None:
    """In what is handed over first, and in the rest: rows that do not see it are right."""
    case = Case("causal-300x300", 1, 300, 300, 1, 1, causal=True)
    inputs = make_inputs(case)
    inputs.k[0, key] = NAN
    with quiet_run(simulator):
        out, _ = launch_on_simulator(inputs)
    assert out[0, key:].isnan().all() and not out[0, :key].isnan().any()


def test_rows_that_are_not_in_use_by_pairs(simulator: ModuleType) -> None:
    case = Case("pair", 2, 300, 200, 1, 1, seqused_q=(300, 0), seqused_k=(190, 0))
    inputs = with_unused(make_inputs(case), NAN)
    run_sim(simulator, inputs, seeds=(1,), config={"cta_pair": True})
