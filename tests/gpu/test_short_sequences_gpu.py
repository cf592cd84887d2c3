"""Backwards of many short sequences on a GPU, through the public functions."""

from __future__ import annotations

import pytest
import torch
from cases import FP16, FP32, Case
from inputs import make_inputs
from planned import call_of, planned
from test_aux_gradients_gpu import check
from test_flash_bwd import check as check_plain
from trained_mods import IN_GRID, TrainedRecipe, make_trained

from flash_mask_cute.call.arguments import Direction

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# at least four sequences of a head for each SM
MANY = 72
CASES = (
    Case("64", MANY, 64, 64, 8, 8, head_dim=64),
    Case("49-d32-fp16", MANY, 49, 49, 8, 8, head_dim=32, dtype=FP16),
    Case("128-d128", MANY, 128, 128, 8, 8),
    Case("128-d64-causal", MANY, 128, 128, 8, 8, head_dim=64, causal=True),
    Case("190-30-sink", MANY, 190, 30, 8, 8, head_dim=64, sink=FP32),
    Case("20-190-window", MANY, 20, 190, 8, 8, head_dim=32, window_left=40, window_right=50),
    Case("100-transposed", MANY, 100, 100, 8, 8, head_dim=32, strided="transposed"),
)
# of whole warps and warpgroups, one more, and one less
LENGTHS = (1, 16, 17, 48, 63, 65, 80, 96, 97, 127, 128, 129, 144, 145, 160, 176, 191, 192, 193, 256)
TRAINED_CASES = (
    (Case("swin-49", MANY, 49, 49, 8, 8, head_dim=32), "swin"),
    (Case("swin-144", MANY, 144, 144, 8, 8, head_dim=32), "swin"),
    (Case("pair-100-d64-causal", MANY, 100, 90, 8, 8, head_dim=64, causal=True), "pair"),
    (Case("grid-343", MANY, 343, 343, 8, 8, head_dim=32), IN_GRID),
    (Case("grid-250-300-causal", MANY, 250, 300, 8, 8, head_dim=64, causal=True), IN_GRID),
)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper has the kernels",
)
@pytest.mark.parametrize("case", CASES)
def test_against_oracle(case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    assert planned(call_of(inputs, Direction.BACKWARD)).is_short
    check_plain(inputs)


@pytest.mark.shares(5)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    """Of both kernels, and of the main one."""
    for seqlen_q, seqlen_k in ((length, length), (length, 70), (70, length)):
        for head_dim in (32, 64):
            shape = MANY, seqlen_q, seqlen_k, 8, 8
            case = Case(f"{seqlen_q}-{seqlen_k}-{head_dim}", *shape, head_dim=head_dim)
            check_plain(make_inputs(case, "cuda"))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper has the kernels",
)
@pytest.mark.parametrize(("case", "name"), TRAINED_CASES, ids=lambda x: getattr(x, "id", ""))
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_tables(case: Case, name: str | TrainedRecipe, deterministic: bool) -> None:
    """In a fixed order, longer ones are the main kernel's."""
    given = make_trained(case, name, "cuda")
    daux = [torch.empty_like(x) for x in given.aux_tensors]
    call = call_of(given.inputs, Direction.BACKWARD, daux=daux, deterministic=deterministic)
    is_short = planned(call).is_short
    assert is_short == (name is not IN_GRID or not deterministic)
    # mask warps of the main kernel sum dS in 16 bits; the error grows with the entries
    check(given, deterministic=deterministic, rounds_dscores=not is_short)
