"""The compiled Blackwell forward, executed instruction by instruction on the software GPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import simulated_forward
from simulated_forward import DELAY_SEEDS
from support import BF16, FP16, FP32, MASK_CASES, Case, make_inputs

ARCH = "sm_100a"

pytestmark = pytest.mark.sim
run_sim = partial(simulated_forward.run_sim, arch=ARCH)

# A work tile has 256 query rows and the software GPU two SMs, so more than 512 rows over all heads
# and sequences give a persistent CTA several.
CASES = (
    Case("dense-127x129", 1, 127, 129),
    Case("dense-1x1", 1, 1, 1, 1, 1),
    Case("dense-300x300-fused_qkv", 1, 300, 300, strided="fused_qkv"),
    Case("causal-255x255", 2, 255, 255, causal=True),
    Case("causal-63x257", 1, 63, 257, 3, 3, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, causal=True),
    Case("causal-600x700", 1, 600, 700, 2, 1, causal=True),
    Case("window-20-5-129x300", 1, 129, 300, window_left=20, window_right=5),
    Case("window-20-10-257x65-empty-rows", 1, 257, 65, window_left=20, window_right=10),
    Case("window-70-open-65x255", 1, 65, 255, window_left=70),
    Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=False),
    Case("gqa4-packed-65x255", 1, 65, 255, 4, 1, causal=True, pack_gqa=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 0, 129, 1), causal=True),
    Case("varlen-cross", lengths_q=(300, 1, 65), lengths_k=(0, 255, 17)),
    Case("seqused", 2, 129, 129, seqused_q=(100, 0), seqused_k=(129, 65), causal=True),
    Case("softcap-129x129", 1, 129, 129, softcap=15.0),
    Case("sink-257x65-empty-rows", 1, 257, 65, causal=True, sink=FP32),
    Case("sink-bf16-gqa4-packed", 1, 65, 129, 4, 1, sink=BF16, pack_gqa=True),
    Case("fp16-d64-causal", 1, 255, 255, head_dim=64, dtype=FP16, causal=True),
    Case("d96-causal", 1, 300, 200, head_dim=96, causal=True),
    Case("d192-128-causal", 1, 300, 400, head_dim=192, head_dim_v=128, causal=True),
)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_oracle(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case))


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("position", range(len(MASK_CASES)), ids=lambda i: MASK_CASES[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(MASK_CASES[position].packed_if_supported())
    run_sim(simulator, inputs, seeds=DELAY_SEEDS if position % 3 == 0 else (None,))
