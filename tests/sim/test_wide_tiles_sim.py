from dataclasses import replace
import pytest
from support import (
    Case,
    make_inputs,
    FP16,
    FP32,
    MASK_CASES,
    STORED_CASES,
    STORED_VARLEN_CASES,
    DOCUMENT_CASES,
)
from test_flash_bwd_sim import (
    run_sim,
    STORES_ANSWERS,
    SIM_MASK_CASES,
    launch_on_simulator,
    assert_same_bits,
)
from gradient_oracle import make_output_gradients, assert_gradients_close

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]
CASES = (
    Case("full", 1, 300, 700, head_dim=64),
    Case("causal", 2, 700, 700, head_dim=64, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, head_dim=64, causal=True),
    Case("gqa4", 1, 165, 555, 4, 1, head_dim=64, causal=True),
    Case(
        "varlen-causal",
        lengths_q=(63, 0, 329, 1),
        lengths_k=(63, 9, 329, 0),
        causal=True,
        head_dim=64,
    ),
    Case("seqused", 2, 329, 429, seqused_q=(300, 0), seqused_k=(429, 65), causal=True, head_dim=64),
    Case("d40-dv24", 1, 127, 529, head_dim=40, head_dim_v=24),
    Case("d32-dv64-fp16", 1, 257, 529, head_dim=32, head_dim_v=64, dtype=FP16, causal=True),
    Case("sink", 1, 257, 65, causal=True, sink=FP32, head_dim=64),
    Case("1x1", 1, 1, 1, 1, 1, head_dim=64),
    Case("window", 1, 700, 700, 1, 1, window_left=100, causal=True, head_dim=64),
    Case("window2", 1, 500, 700, 2, 1, window_left=100, window_right=50, head_dim=64),
    Case("window3", 2, 300, 900, 1, 1, window_right=9, head_dim=48),
)


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_a(simulator, i):
    run_sim(simulator, make_inputs(CASES[i]), (None, 1, 2), launches=3)


def test_det(simulator):
    run_sim(
        simulator,
        make_inputs(Case("det", 1, 500, 700, 2, 1, head_dim=64, causal=True)),
        (1, 2),
        launches=3,
        deterministic=True,
    )


M = [
    replace(c, head_dim=64, head_dim_v=0, pack_gqa=None) for c in MASK_CASES if c.score_mod is None
]


@pytest.mark.parametrize("i", range(len(M)), ids=lambda i: M[i].id)
def test_m(simulator, i):
    launches = 4 if M[i].id in STORES_ANSWERS else 3
    run_sim(simulator, make_inputs(M[i]), (1, None), launches)


W = [
    Case(f"wide-{c}-{k}", 1, 600, 900, 2, 1, head_dim=64, column=c, causal=k)
    for c, k in (
        ("documents1", True),
        ("stepped1", True),
        ("stepped2", False),
        ("stepped4", False),
        ("random2", False),
        ("documents2", False),
    )
]


@pytest.mark.parametrize("i", range(len(W)), ids=lambda i: W[i].id)
def test_w(simulator, i):
    run_sim(simulator, make_inputs(W[i]), (1, None), 3)


S = [replace(c, head_dim=64, head_dim_v=0) for c in STORED_CASES]


@pytest.mark.parametrize("i", range(len(S)), ids=lambda i: S[i].id)
def test_s(simulator, i):
    run_sim(simulator, make_inputs(S[i]), (1, None), 4)


D = [replace(c, head_dim=64, head_dim_v=0) for c in DOCUMENT_CASES]


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("i", range(len(D)), ids=lambda i: D[i].id)
def test_d(simulator, i):
    run_sim(simulator, make_inputs(D[i]), (1,), 4, deterministic=i % 2 == 1)


def test_skip(simulator):
    inputs = make_inputs(
        Case(
            "skip", 1, 200, 500, 1, 1, head_dim=64, causal=True, column="stepped2", blocks=(64, 64)
        )
    )
    dout, dlse = make_output_gradients(inputs)
    simulator.OPTIONS.pop("delay", None)
    a = launch_on_simulator(inputs, dout, dlse, deterministic=True)
    b = launch_on_simulator(inputs, dout, dlse, deterministic=True, config={"skip_blocks": False})
    assert_same_bits(a, b)
    assert_gradients_close(b, inputs, dout, dlse)
