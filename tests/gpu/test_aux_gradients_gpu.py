"""Gradients of aux tensors on a Hopper GPU, through the public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FP16, Case
from inputs import make_output_gradients
from public_call import capture
from test_functional_gpu import arguments_of, run_and_check_gradients
from torch import Tensor
from trained_mods import (
    FAR_CASES,
    LINE_CASES,
    ORDERED_CASES,
    SHARED_CASES,
    TRAINED_CASES,
    TRAINED_MODS,
    TrainedInputs,
    assert_aux_gradients_close,
    make_trained,
)

from flash_mask_cute import flash_attn_func

# What takes a simulator long: many key blocks, heads of a group and work tiles.
LONG_CASES = (
    (Case("slopes-long", 2, 2000, 2000, 4, 4, causal=True), "slopes"),
    (Case("t5-long-gqa4", 1, 1025, 1500, 8, 2, head_dim=64, dtype=FP16), "t5"),
    (Case("key-bias-long-window", 1, 1500, 1500, 2, 2, window_left=300), "key_bias"),
    (Case("gain-and-bias-long", 1, 700, 900, 4, 4, head_dim=96, causal=True), "gain_and_bias"),
    (Case("gain-and-bias-d256", 1, 500, 500, 2, 1, head_dim=256, causal=True), "gain_and_bias"),
    (Case("squared-long", 2, 900, 1100, 2, 2, causal=True, column="stepped2"), "squared"),
)
# Many diagonals that read one element, edges of sequences in tiles, elements that few scores read.
LONG_LINES = (
    (Case("t5-long", 2, 2000, 2000, 4, 4, causal=True), "t5"),
    (Case("t5-long-not-square-fp16", 1, 700, 1900, 2, 2, head_dim=64, dtype=FP16), "t5"),
    (Case("buckets-long-gqa2", 2, 1100, 1000, 4, 2, window_left=300), "buckets"),
    (Case("query-gain-long", 2, 1500, 1500, 4, 4, causal=True), "query_gain"),
    (Case("pair-long-one-entry", 1, 500, 510, 2, 2, causal=True), "pair"),
)
# Several parts of the batch, and more entries than stages.
LONG_SHARED = (
    (Case("pair-long", 30, 300, 310, 4, 4, head_dim=32, mask_mod="documents"), "pair"),
    (Case("pair-long-d128", 4, 500, 510, 2, 2, causal=True), "pair"),
)


ORDERED_LONG = (
    (Case("slopes-long-gqa4", 2, 2000, 2000, 8, 2, causal=True), "slopes"),
    (Case("key-bias-long-window", 3, 1500, 1500, 2, 2, window_left=300), "key_bias"),
    (Case("gain-long-fp16", 1, 1025, 1500, 8, 8, head_dim=96, dtype=FP16), "gain"),
    (Case("gain-long-d256", 1, 700, 900, 4, 2, head_dim=256, causal=True), "gain"),
)


def cases(*found: tuple[Case, str], shared: tuple[tuple[Case, str], ...] = ()) -> Any:
    """shared: small cases. tests/sim runs them, too; here `make test` runs a share."""
    rest = [pytest.param(*x, marks=pytest.mark.shares(4)) for x in shared]
    names = "case", "name"
    return pytest.mark.parametrize(names, [*found, *rest])


LINES = LINE_CASES + FAR_CASES
ALL_LONG = LONG_LINES + LONG_SHARED
ordered_cases = cases(
    *ORDERED_CASES, *ORDERED_LONG, *TRAINED_CASES[1:5], LONG_CASES[-1], *LINES, *SHARED_CASES,
    *ALL_LONG,
)  # fmt: skip


def check(
    given: TrainedInputs,
    call: Callable[..., Any] | None = None,
    *,
    rounds_dscores: bool = False,
    **more: Any,
) -> None:
    """call: instead of the function. rounds_dscores: as of `assert_aux_gradients_close`."""
    inputs = given.inputs
    function, keywords = arguments_of(inputs)
    keywords |= more
    keywords["aux_tensors"] = [
        x.clone().requires_grad_() if i in given.wants_aux else x
        for i, x in enumerate(given.aux_tensors)
    ]
    run_and_check_gradients(inputs, call or function, keywords)
    trained = [x.grad for x in keywords["aux_tensors"] if x.grad is not None]
    gradients = make_output_gradients(inputs)
    assert_aux_gradients_close(trained, given, *gradients, rounds_dscores=rounds_dscores)


@pytest.mark.usefixtures("poisoned_allocations")
@cases(*LONG_CASES, *ALL_LONG, shared=TRAINED_CASES + LINES + SHARED_CASES)
def test_against_oracle(case: Case, name: str) -> None:
    check(make_trained(case, name, "cuda"))


@cases(*TRAINED_CASES[2:5])
def test_inductor(case: Case, name: str) -> None:
    torch._dynamo.reset()
    given = make_trained(case, name, "cuda")
    check(given, torch.compile(arguments_of(given.inputs)[0], fullgraph=True))


def test_captured_by_hand() -> None:
    """Sums begin at 0 in every replay."""
    given = make_trained(*TRAINED_CASES[0], "cuda")
    q, k, v = given.inputs.q, given.inputs.k, given.inputs.v
    (slopes,) = (x.clone().requires_grad_() for x in given.trained)
    dout, _ = make_output_gradients(given.inputs)

    def gradient() -> Tensor:
        out = flash_attn_func(
            q, k, v, causal=True, score_mod=TRAINED_MODS["slopes"].cute, aux_tensors=[slopes]
        )
        (found,) = torch.autograd.grad(out, slopes, dout)
        return found

    graph, found = capture(gradient, torch.cuda.Stream())
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_aux_gradients_close([found], given, dout)


# -- in a fixed order ---------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_allocations")
@ordered_cases
def test_in_order_against_oracle(case: Case, name: str) -> None:
    check(make_trained(case, name, "cuda"), deterministic=True)


@cases(*ORDERED_LONG, shared=ORDERED_CASES)
def test_without_order_against_oracle(case: Case, name: str) -> None:
    check(make_trained(case, name, "cuda"))


def trained_gradients(given: TrainedInputs, **more: Any) -> list[Tensor]:
    function, keywords = arguments_of(given.inputs)
    trained = [x.clone().requires_grad_() for x in given.trained]
    others = given.aux_tensors[: len(given.aux_tensors) - len(trained)]
    keywords["aux_tensors"] = [*others, *trained]
    dout, _ = make_output_gradients(given.inputs)
    out, _ = function(**keywords | more)
    return list(torch.autograd.grad(out, trained, dout))


@ordered_cases
def test_equal_bits_in_ten_runs(case: Case, name: str) -> None:
    """The first asked by the keyword, the others by torch's setting."""
    given = make_trained(case, name, "cuda")
    first = trained_gradients(given, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        others = [trained_gradients(given) for _ in range(9)]
    finally:
        torch.use_deterministic_algorithms(False)
    for found in others:
        for x, y in zip(first, found, strict=True):
            assert torch.equal(x, y)


def _of_entry(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """By distance, and by no class."""
    import cutlass

    distance = cutlass.min(abs(q[0] - k[0]), 40)
    return score + aux[0][b[0], h[0], distance] + aux[1][b[0], (q[0] * k[0]) % 7]


@pytest.mark.parametrize("mod", [TRAINED_MODS["key_bias"].cute, _of_entry])
def test_equal_bits_whoever_is_beside_in_the_batch(mod: Any) -> None:
    """Of elements that a batch entry has for itself."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(5, 900, 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    shapes = [(5, 4, 900)] if mod is TRAINED_MODS["key_bias"].cute else [(5, 4, 41), (5, 7)]
    tables = [torch.randn(x, device="cuda", generator=generator) for x in shapes]

    def gradients(batch: slice) -> Any:
        leaves = [x[batch].clone().requires_grad_() for x in tables]
        keywords: dict[str, Any] = {"score_mod": mod, "aux_tensors": leaves, "causal": True}
        out = flash_attn_func(q[batch], k[batch], v[batch], **keywords, deterministic=True)
        return torch.autograd.grad(out, leaves, dout[batch])

    together = gradients(slice(0, 5))
    for i in range(5):
        for alone, beside in zip(gradients(slice(i, i + 1)), together, strict=True):
            assert torch.equal(alone[0], beside[i])
