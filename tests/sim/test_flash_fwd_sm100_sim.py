"""The compiled Blackwell forward, executed instruction by instruction on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import mask_cases
import pytest
import simulated_forward
import torch
from cases import BF16, FP16, FP32, FP64, MASK_CASES, Case
from inputs import make_growing_inputs, make_inputs
from tolerances import assert_close_to_oracle
from unseen_memory import EMPTY_CASES, INF, NAN, UNUSED_CASES, with_empty, with_unused

from flash_mask_cute import builders

ARCH = "sm_100a"

pytestmark = pytest.mark.sim
run_sim = partial(simulated_forward.run_sim)

# in order, and at random later points
SEEDS = (None, 1)

# A work tile has 256 query rows and the software GPU two SMs, so more than 512 rows over all heads
# and sequences give a persistent CTA several.
CASES = (
    Case("dense-127x129", 1, 127, 129),
    Case("dense-1x1", 1, 1, 1, 1, 1),
    Case("dense-300x300-fused_qkv", 1, 300, 300, strided="fused_qkv"),
    Case("dense-1000x100-short-walks", 1, 1000, 100, 2, 1),
    Case("causal-255x255", 2, 255, 255, causal=True),
    Case("causal-63x257", 1, 63, 257, 3, 3, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, causal=True),
    Case("causal-520x400", 1, 520, 400, 2, 1, causal=True),
    Case("window-20-5-129x300", 1, 129, 300, window_left=20, window_right=5),
    Case("window-20-10-257x65-empty-rows", 1, 257, 65, window_left=20, window_right=10),
    Case("window-70-before-9-300x129-empty-rows", 1, 300, 129, window_left=70, window_right=-9),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("window-before-140-causal-300x300", 1, 300, 300, causal=True, window_right=-140),
    Case("window-behind-128-129x256", 1, 129, 256, window_left=-128),
    Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=False),
    Case("gqa4-packed-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 0, 129, 1), causal=True),
    Case("varlen-cross", lengths_q=(300, 1, 65), lengths_k=(0, 255, 17)),
    Case("varlen-window-behind-128", lengths_q=(129, 64), lengths_k=(256, 128), window_left=-128),
    Case("seqused", 2, 129, 129, seqused_q=(100, 0), seqused_k=(129, 65), causal=True),
    Case("softcap-129x129", 1, 129, 129, softcap=15.0),
    Case("unreadable-negative-127x129", 1, 127, 129, strided="unreadable", softmax_scale=-2.0),
    Case("scale-0-257x100-empty-rows", 1, 257, 100, causal=True, softmax_scale=0.0),
    Case("sink-fp64-65x129", 1, 65, 129, sink=FP64),
    Case("sink-257x65-empty-rows", 1, 257, 65, causal=True, sink=FP32),
    Case("sink-bf16-gqa4-packed", 1, 65, 129, 4, 1, sink=BF16, pack_gqa=True),
    Case("fp16-d64-causal", 1, 255, 255, head_dim=64, dtype=FP16, causal=True),
    Case("d96-causal", 1, 300, 200, head_dim=96, causal=True),
    Case("d192-128-causal", 1, 300, 400, head_dim=192, head_dim_v=128, causal=True),
    # columns of tiles that heads do not fill
    Case("d8-window", 1, 129, 200, head_dim=8, window_left=40, window_right=20),
    Case("d40-causal-gqa2-packed", 1, 100, 200, 2, 1, head_dim=40, causal=True, pack_gqa=True),
    Case("fp16-d72-dv40-varlen", lengths_q=(130, 3), lengths_k=(140, 20), head_dim=72,
         head_dim_v=40, dtype=FP16),
    Case("d64-dv128-softcap", 1, 150, 129, head_dim=64, head_dim_v=128, softcap=15.0),
    Case("d136-dv104-causal", 1, 257, 300, 1, 1, head_dim=136, head_dim_v=104, causal=True),
)  # fmt: skip

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


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_wide_heads_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS)
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert (launch["cluster"] == (2, 1, 1)) == (case.seqlen_q > 128)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("cta_pair", [False, True])
def test_wide_heads_whose_maxima_are_outgrown(simulator: ModuleType, cta_pair: bool) -> None:
    """O is rescaled once P V of the block before is complete."""
    inputs = make_growing_inputs(256, 256, 40)
    run_sim(simulator, inputs, seeds=(None, 1), config={"cta_pair": cta_pair})


@pytest.mark.usefixtures("poisoned_allocations")
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


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.id)
def test_pairs_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=SEEDS, config={"cta_pair": True})
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert launch["cluster"] == (2, 1, 1)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(("num_sms", "seeds"), [(2, (None, 1, 2, 3, 4)), (7, (None, 1))])
def test_pairs_take_turns(
    simulator: ModuleType, num_sms: int, seeds: tuple[int | None, ...]
) -> None:
    """Four work tiles, two of which have one row, in the tiles that the table chooses; for one pair
    and for three, of which one has two tiles and an SM is left over."""
    inputs = make_inputs(Case("pair", 1, 513, 257, 2, 1))
    run_sim(simulator, inputs, seeds=seeds, sms=num_sms)
    (launch,) = simulator.RESULTS[-1]["launches"]
    assert (launch["cluster"], launch["grid"]) == ((2, 1, 1), (num_sms // 2 * 2, 1, 1))


# whose features other cases have, too: a kernel takes seconds to compile
LEFT_OUT = (
    "columns-random2-causal",
    "columns-random4-causal-sink",
    "columns-stepped2-gqa4-packed-causal",
    "columns-blinding4-window",
    "columns-varlen-stepped1",
    "mask-causal-offset",
    "mask-checks",
    "mask-prefix-causal-window",
    "score-scale-columns-mask-blocks",
)
MASKS = tuple(case for case in MASK_CASES if case.id not in LEFT_OUT)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("position", range(len(MASKS)), ids=lambda i: MASKS[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(MASKS[position].packed_if_supported())
    run_sim(simulator, inputs, seeds=SEEDS if position % 3 == 0 else (1,))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("heads", [1, 4])
def test_a_score_mod_that_has_rows_at_once(
    simulator: ModuleType, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whose factors, the first and the last, join those of the softmax."""
    monkeypatch.setitem(mask_cases.SCORE_MODS, "cap", mask_cases.CAP)
    case = Case("cap", 1, 255, 300, heads, 1, causal=True, sink=FP32, score_mod="cap")
    run_sim(simulator, make_inputs(case.packed_if_supported()), seeds=SEEDS)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("column", [3, 4, 40, 127])
def test_maxima_that_outgrow_the_one_in_use(simulator: ModuleType, column: int) -> None:
    """P is taken anew and O rescaled, in some warps and rows and not in others."""
    run_sim(simulator, make_growing_inputs(128, 128, column), seeds=SEEDS)


@pytest.mark.usefixtures("poisoned_allocations")
def test_skipping_changes_no_bit(simulator: ModuleType) -> None:
    inputs = make_inputs(Case("columns", 1, 300, 300, 1, 1, column="stepped2"))
    simulator.OPTIONS.pop("delay", None)
    run = partial(simulated_forward.launch_on_simulator, inputs)
    skipping, visiting = run(), run(config={"skip_blocks": False})
    assert torch.equal(skipping[0].view(torch.int16), visiting[0].view(torch.int16))
    assert torch.equal(skipping[1].view(torch.int32), visiting[1].view(torch.int32))
    assert_close_to_oracle(*visiting, inputs)


@pytest.mark.parametrize("position", range(len(UNUSED_CASES)), ids=lambda i: UNUSED_CASES[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    value = (NAN, INF)[position % 2]
    run_sim(simulator, with_unused(make_inputs(UNUSED_CASES[position]), value), seeds=(1,))


def test_rows_that_are_not_in_use_by_pairs(simulator: ModuleType) -> None:
    case = Case("pair", 2, 300, 200, 1, 1, seqused_q=(300, 0), seqused_k=(190, 0))
    inputs = with_unused(make_inputs(case), NAN)
    run_sim(simulator, inputs, seeds=(1,), config={"cta_pair": True})


@pytest.mark.parametrize("case", EMPTY_CASES[:2], ids=lambda case: case.id)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, with_empty(make_inputs(case), NAN).inputs, seeds=(1,))
