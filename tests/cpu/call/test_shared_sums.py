"""Which gradients of aux tensors a kernel of its own sums over the batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case
from compiled_code import SWEEP
from planned import planned
from torch import Tensor
from trained_mods import TRAINED_MODS, make_trained

from flash_mask_cute import explain
from flash_mask_cute.call import bias_rows as entry_order
from flash_mask_cute.call.arguments import Direction
from flash_mask_cute.call.batch_sums import MOST_PARTS, TILE, build_shared_sums, num_parts
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.problem import FwdShapes
from flash_mask_cute.runtime.cache import compile_lock
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

HOPPER, BLACKWELL = Target("sm_90a", 132), Target("sm_100a", 148)


def plan_of(case: Case, name: str = "pair", target: Target = HOPPER, **more: Any) -> ExecutionPlan:
    given = make_trained(case, name)
    of_call: dict[str, Any] = {"direction": Direction.BACKWARD, "daux": given.new_daux()} | more
    return planned(given.inputs, target, **of_call)


def pair_case(name: str, **more: Any) -> Case:
    fields: dict[str, Any] = {"batch": 3, "seqlen_q": 70, "seqlen_k": 140, "head_dim": 32}
    return Case(name, **fields | {"heads_q": 4, "heads_kv": 4} | more)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_kernel_of_its_own_sums_a_table(in_order: bool) -> None:
    """Which calls and tables have one: plan rows of the shapes `windows` and `pairs`."""
    found = plan_of(pair_case("plain"), deterministic=in_order)
    table = len(found.problem.aux) - 1
    assert found.shared is not None and found.shared.numbers == (table,)
    assert not found.problem.wants_aux and not found.problem.exact_aux
    other = plan_of(pair_case("capped", softcap=10.0), deterministic=in_order)
    assert other.shared is None and other.problem.wants_aux == (table,)


@pytest.mark.parametrize("n", [64, 256, 384, 768, 8192])
def test_parts_of_the_batch(n: int) -> None:
    """They fill the SMs, and each has entries."""
    for batch in (2, 3, 384):
        shapes = FwdShapes(batch, n, n, batch * n, batch * n, 4, 4, 32, 32)
        parts, tiles = num_parts(shapes, 132), 4 * (-(-n // TILE)) ** 2
        assert 1 <= parts <= min(batch, MOST_PARTS)
        if batch == 384 and tiles < 132:
            last = tiles * parts % 132 or 132
            assert tiles * parts > 66 and (last > 90 or tiles * parts > 264)


def test_it_is_told() -> None:
    # too long for the kernels of short sequences
    q = torch.zeros(384, 400, 4, 32, dtype=BF16)
    table, mod = torch.zeros(4, 400, 400, dtype=BF16, requires_grad=True), TRAINED_MODS["pair"].cute
    found = explain(q, q, q, score_mod=mod, aux_tensors=[table], target="sm_90a").backward
    assert found is not None
    (told,) = found.aux_gradients
    assert told.is_wanted and "one owner for each element" in told.cost
    (parts,) = re.findall(r"each of (\d+) parts of the batch", told.cost)
    alone = explain(q, q, q, score_mod=mod, aux_tensors=[table.detach()], target="sm_90a").backward
    assert alone is not None and found.scratch_bytes is not None
    assert alone.aux_gradients[0].cost == told.cost and not alone.aux_gradients[0].is_wanted
    assert found.scratch_bytes - (alone.scratch_bytes or 0) == int(parts) * 4 * table.numel()


@SWEEP
@pytest.mark.parametrize(
    ("head_dim", "more"),
    [(32, {"mask_mod": "documents", "seqlen_q": 140}), (64, {"causal": True}), (128, {})],
    ids=["d32-bits", "d64-causal", "d128"],
)
def test_compiles_well(head_dim: int, more: dict[str, Any], tmp_path: Path) -> None:
    """What is spilled are numbers that stay the same along a walk."""
    found = plan_of(pair_case("compiled", head_dim=head_dim, **more))
    score_mod, shared = found.masks.score_mod, found.shared
    assert score_mod is not None and shared is not None
    with compile_lock():
        compiled = build_shared_sums(score_mod, found.problem, found.bwd_choice, shared, HOPPER)
    assert not compiled.meta["warnings"] and compiled.meta["spill_bytes"] <= 200, compiled.meta


def test_entries_take_turns_over_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs, in a dense call on Hopper; also without its gradient."""
    small = plan_of(pair_case("small"))
    assert not small.problem.entries_first
    monkeypatch.setattr(entry_order, "LEAST_BYTES", 4 * 70 * 140 * BF16.itemsize)
    large = plan_of(pair_case("large"))
    assert large.problem.entries_first and large.shared is not None
    assert plan_of(pair_case("detached"), daux=None).problem.entries_first
    assert plan_of(pair_case("capped", softcap=10.0)).problem.entries_first
    others = {
        "one": plan_of(pair_case("one", batch=1)),
        "smaller": plan_of(pair_case("smaller", seqlen_k=139)),
        "by key": plan_of(pair_case("by-key"), "key_bias"),
        "packed": plan_of(
            Case("packed", heads_q=4, heads_kv=4, lengths_q=(70, 60), lengths_k=(140, 90))
        ),
        "Blackwell": plan_of(pair_case("blackwell"), target=BLACKWELL),
    }
    for name, plan in others.items():
        assert not plan.problem.entries_first, name


def test_sums_are_new_where_all_elements_are_read() -> None:
    """Otherwise those that nothing reads are 0."""
    from flash_mask_cute.call.batch_sums import MakeSharedSums

    found = plan_of(pair_case("new"))
    assert found.shared is not None
    seen: list[Tensor] = []

    def fill(*arguments: Any) -> None:
        (sums,) = arguments[5]
        seen.append(sums.clone())
        sums.fill_(1.0)

    make = MakeSharedSums(found.shared, found.shapes, fill)
    for shape in ((4, 70, 140), (5, 80, 150)):
        made = make([torch.zeros(shape)], (None,) * 5, (), None, (1.0, 1.0))
        assert made[0].shape == (found.shared.parts, *shape) and made[0].dtype == FP32
    assert (seen[1] == 0).all()


def test_sums_of_one_part_are_the_gradient() -> None:
    """If it is fp32 and contiguous; a table of all pairs is larger than all other tensors."""
    from flash_mask_cute.call.aux_sums import write_gradients
    from flash_mask_cute.call.batch_sums import MakeSharedSums

    found = plan_of(pair_case("one"))
    assert found.shared is not None

    def fill(*arguments: Any) -> None:
        (sums,) = arguments[5]
        # as a kernel does, whose writes torch does not see
        sums.numpy()[:, :4, :70, :140] = 2.0

    make = MakeSharedSums(found.shared._replace(parts=1), found.shapes, fill)
    expected = torch.zeros(5, 80, 150)
    expected[:4, :70, :140] = 2.0
    for shape in ((4, 70, 140), (5, 80, 150)):
        transposed = torch.full(shape[::-1], torch.nan).permute(2, 1, 0)
        for gradient, is_there in (
            (torch.full(shape, torch.nan), True),
            (torch.full(shape, torch.nan, dtype=BF16), False),
            (transposed, False),
        ):
            before = gradient._version
            made = make([gradient], (None,) * 5, (), None, (1.0, 1.0))
            assert (made[0].data_ptr() == gradient.data_ptr()) == is_there
            write_gradients([gradient], made, entry_aux=(0,))
            assert gradient._version > before
            assert torch.equal(gradient.float(), expected[: shape[0], : shape[1], : shape[2]])
