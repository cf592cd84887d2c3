from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mask_cases
import pytest
import torch
from cases import BF16, FP16, FP32, FP64, MASK_CASES, QUICK_CASES, Case
from cpu_calls import WRONG_VERDICTS, WRONG_WALKS, cpu_call_of, patch_results
from eager import assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from mask_cases import ScoreRecipe
from oracle import hidden_of, reference_attention, reference_gradients
from random_cases import random_case, random_mask_case
from torch import Tensor

from flash_mask_cute.block_info import BlockInfo
from flash_mask_cute.cpu import backward
from flash_mask_cute.cpu.backward import flash_attn_bwd_cpu
from flash_mask_cute.cpu.call import CpuTiles
from flash_mask_cute.cpu.forward import flash_attn_fwd_cpu
from flash_mask_cute.cpu.tiles import SequenceWalk, Tile, _ListsAndMod
from flash_mask_cute.rules.intervals import Intervals

EXACT = 1e-10
# A score_mod is evaluated in float32: 2^-24 of a modified score, about 400 under ALiBi, moves its
# exponential by that much of itself.
SCORE_MOD_RTOL = 5e-5

Gradients = dict[str, Tensor | None]


def run_backward(
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    tile: tuple[int, int] = (64, 48),
    pack_gqa: int = 1,
    **more: Any,
) -> Gradients:
    """Gradients of the CPU path, from the oracle's out and lse unless others are given."""
    out, lse = inputs.reference
    tiles = CpuTiles(*tile, pack_gqa, more.pop("skip_blocks", True))
    results = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    gradients = flash_attn_bwd_cpu(cpu_call_of(inputs, tiles, **results | more))
    return dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=True))


def exactly(case: Case) -> Case:
    return replace(case, dtype=FP64, sink=None if case.sink is None else FP64)


@lru_cache(maxsize=4)
def exact_problem(case: Case) -> tuple[Inputs, Tensor, Tensor]:
    inputs = make_inputs(exactly(case))
    dout, dlse = make_output_gradients(inputs)
    return inputs, dout, dlse.double()


def check_exactly(
    case: Case, tile: tuple[int, int] = (64, 48), pack_gqa: int = 1, **more: Any
) -> None:
    inputs, dout, dlse = exact_problem(case)
    gradients = run_backward(inputs, dout, dlse, tile=tile, pack_gqa=pack_gqa, **more)
    rtol = SCORE_MOD_RTOL if case.score_mod else EXACT
    assert_gradients_close(gradients, inputs, dout, dlse, rtol=rtol)


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", QUICK_CASES + MASK_CASES)
def test_tile_walk_against_autograd(case: Case) -> None:
    check_exactly(case, (64, 48), case.group)


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", QUICK_CASES[::2] + MASK_CASES[::2])
def test_tiles_of_a_kernel_against_autograd(case: Case) -> None:
    check_exactly(case, (128, 128))


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(40))
def test_fuzzed_feature_pairs(seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(rng)
    check_exactly(case, rng.choice(((64, 128), (128, 64))), case.group if case.pack_gqa else 1)


@pytest.mark.shares(3)
@pytest.mark.parametrize("seed", range(30))
def test_fuzzed_masks(seed: int) -> None:
    rng = random.Random(seed)
    case = random_mask_case(rng)
    tile = rng.choice(((128, 128), (64, 128), (192, 80)))
    check_exactly(case, tile, rng.choice((1, case.group)))


@pytest.mark.shares(3)
@pytest.mark.parametrize("has_dlse", [False, True], ids=["dout", "dout+dlse"])
@pytest.mark.parametrize("case", QUICK_CASES[::6] + MASK_CASES[::4])
def test_from_the_forward_by_the_rule(case: Case, has_dlse: bool) -> None:
    """out and lse as the forward rounds and leaves them, NaN in the rows past seqused_q."""
    inputs = make_inputs(case)
    dout, dlse = make_output_gradients(inputs)
    out = inputs.q.new_full(dout.shape, float("nan"))
    lse = torch.full_like(dlse, float("nan"))
    flash_attn_fwd_cpu(cpu_call_of(inputs, CpuTiles(128, 128), out=out, lse=lse))
    given_dlse = dlse if has_dlse else None
    gradients = run_backward(inputs, dout, given_dlse, tile=(64, 128), out=out, lse=lse)
    assert_gradients_close(gradients, inputs, dout, given_dlse)


# -- the walk -----------------------------------------------------------------------------------

WALK_CASES = (
    Case("causal", 1, 300, 300, causal=True),
    Case("window", 1, 300, 500, window_left=127, window_right=128),
    Case("packed", 1, 100, 200, 4, 1, causal=True, pack_gqa=True),
    Case("varlen", lengths_q=(255, 63), lengths_k=(300, 200), causal=True),
)
VERDICT_CASES = (
    Case("stepped1", 1, 400, 400, causal=True, column="stepped1"),
    Case("stepped2-causal", 1, 400, 400, causal=True, column="stepped2"),
    Case("documents2", 1, 300, 300, column="documents2"),
    Case("stepped4-packed", 1, 200, 400, 4, 2, column="stepped4", pack_gqa=True),
    Case("varlen", lengths_q=(255, 200), lengths_k=(300, 200), causal=True, column="stepped1"),
    Case("blocks", 1, 300, 300, blocks=(50, 70)),
    Case("blocks-mask", 1, 300, 300, mask_mod="documents", blocks=(64, 48)),
)


def packed(case: Case) -> int:
    return case.group if case.pack_gqa else 1


@pytest.mark.parametrize("case", WALK_CASES + VERDICT_CASES)
def test_skipping_changes_no_bit(case: Case) -> None:
    inputs, dout, dlse = exact_problem(case)
    skipping = run_backward(inputs, dout, dlse, pack_gqa=packed(case))
    visiting = run_backward(inputs, dout, dlse, pack_gqa=packed(case), skip_blocks=False)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(skipping[name], visiting[name]), name


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in WALK_CASES + VERDICT_CASES
        if "stepped" not in case.id and not case.lengths_q
    ],
)
def test_only_tiles_that_show_something_are_scored(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these cases the classification is exact, but for wrong block lists of a mask_mod."""
    inputs, dout, _ = exact_problem(case)
    visited: list[tuple[int, int]] = []
    look_at = SequenceWalk.visible

    def counted(self: SequenceWalk, tile: Tile) -> tuple[Tensor, Tensor]:
        heads, visible = look_at(self, tile)
        if heads.any():
            visited.append((tile.n_block, tile.m_block))
        return heads, visible

    monkeypatch.setattr(SequenceWalk, "visible", counted)
    run_backward(inputs, dout, pack_gqa=packed(case))
    hidden = hidden_of(inputs).all(dim=0)
    tiles = [row.split(48, dim=1) for row in hidden.repeat_interleave(packed(case), 0).split(64)]
    shown = {(n, m) for m, row in enumerate(tiles) for n, tile in enumerate(row) if not tile.all()}
    assert visited == sorted(set(visited))
    assert shown <= set(visited)
    assert case.mask_mod is not None or shown == set(visited)
    assert len(visited) < len(tiles) * len(tiles[0])


@pytest.mark.parametrize("wrong", WRONG_WALKS)
@pytest.mark.parametrize("case", WALK_CASES)
def test_a_wrong_walk_is_caught(case: Case, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_results(monkeypatch, BlockInfo, "get_m_block_min_max", WRONG_WALKS[wrong])
    with pytest.raises(AssertionError, match="off by"):
        check_exactly(case, pack_gqa=packed(case))


@pytest.mark.parametrize("wrong", WRONG_VERDICTS)
@pytest.mark.parametrize("case", VERDICT_CASES)
def test_a_wrong_verdict_on_a_tile_is_caught(
    case: Case, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Intervals if case.column else _ListsAndMod
    patch_results(monkeypatch, judge, "classify", WRONG_VERDICTS[wrong])
    with pytest.raises(AssertionError, match="off by|is not 0"):
        check_exactly(case, pack_gqa=packed(case))


# -- what is read and written -------------------------------------------------------------------


@pytest.mark.parametrize("sink", [None, BF16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_dtypes_by_the_rule(dtype: torch.dtype, sink: torch.dtype | None) -> None:
    case = Case("dtypes", 2, 127, 200, 4, 2, 40, 24, dtype=dtype, sink=sink, window_left=90)
    inputs = make_inputs(case)
    dout, dlse = make_output_gradients(inputs)
    gradients = run_backward(inputs, dout, dlse)
    assert (gradients["dsink"] is None) == (sink is None)
    assert_gradients_close(gradients, inputs, dout, dlse)


def test_rows_of_no_sequence_are_0_and_not_read() -> None:
    """Packed tensors that go on behind the last sequence, where everything is NaN."""
    case = Case("tail", lengths_q=(65, 0, 30), lengths_k=(100, 7, 30), causal=True, sink=FP64)
    inputs, dout, dlse = exact_problem(case)
    out, lse = inputs.reference

    def with_tail(x: Tensor, dim: int = 0) -> Tensor:
        tail = x.new_full([70 if i == dim else n for i, n in enumerate(x.shape)], float("nan"))
        return torch.cat([x, tail], dim=dim)

    longer = replace(inputs, q=with_tail(inputs.q), k=with_tail(inputs.k), v=with_tail(inputs.v))
    longer.__dict__["reference"] = with_tail(out), with_tail(lse, 1)
    expected = run_backward(inputs, dout, dlse)
    gradients = run_backward(longer, with_tail(dout), with_tail(dlse, 1))
    assert torch.equal(gradients.pop("dsink"), expected.pop("dsink"))
    for name, gradient in gradients.items():
        assert torch.equal(gradient[:-70], expected[name]), name
        assert (gradient[-70:] == 0).all(), name


def test_rows_that_see_nothing_and_unused_rows_are_0() -> None:
    """Also where nothing finite stands in dlse, and in everything past seqused_*."""
    case = Case(
        "empty", 2, 129, 63, causal=True, window_left=3, seqused_q=(129, 70), seqused_k=(63, 20)
    )
    inputs, dout, dlse = exact_problem(case)
    out, lse = inputs.reference
    nan = float("nan")
    unused_q, unused_k = ~inputs.rows_in_use("q"), ~inputs.rows_in_use("k")
    q, k, v, dout = (x.clone() for x in (inputs.q, inputs.k, inputs.v, dout))
    for x, unused in ((q, unused_q), (dout, unused_q), (k, unused_k), (v, unused_k)):
        x[unused] = nan
    gradients = run_backward(
        replace(inputs, q=q, k=k, v=v),
        dout,
        dlse.masked_fill(lse.isinf(), nan),
        out=out.masked_fill(unused_q[..., None, None], nan),
        lse=lse.masked_fill(unused_q[:, None], nan),
    )
    assert lse[:, :, :60].isinf().any() and unused_q.any() and unused_k.any()
    assert (gradients["dq"].transpose(1, 2)[lse.isinf()] == 0).all()
    assert (gradients["dk"][unused_k] == 0).all() and (gradients["dv"][unused_k] == 0).all()
    assert_gradients_close(gradients, inputs, dout.nan_to_num(), dlse, rtol=EXACT)


def test_sink_without_keys() -> None:
    """Where lse is the sink itself, its gradient is that of lse."""
    case = Case("no-keys", 2, 33, 17, sink=FP64, seqused_k=(0, 0))
    inputs, dout, dlse = exact_problem(case)
    gradients = run_backward(inputs, dout, dlse)
    torch.testing.assert_close(gradients["dsink"], dlse.sum(dim=(0, 2)))
    assert all((gradients[name] == 0).all() for name in ("dq", "dk", "dv"))


def test_a_sink_of_minus_infinity_takes_nothing() -> None:
    """Also from rows that see nothing, whose dlse is not read."""
    inputs, dout, dlse = exact_problem(Case("no-sink", 1, 65, 33, causal=True))
    _, lse = inputs.reference
    assert lse.isinf().any()
    dlse = dlse.masked_fill(lse.isinf(), float("nan"))
    expected = run_backward(inputs, dout, dlse)
    sink = torch.full((inputs.case.heads_q,), float("-inf"), dtype=FP64)
    gradients = run_backward(inputs, dout, dlse, learnable_sink=sink)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(gradients[name], expected[name]), name
    assert (gradients["dsink"] == 0).all()


# -- score_mod ----------------------------------------------------------------------------------

BEND = 0.05


def bend(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + score * score * BEND


def bend_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad * (score * (2 * BEND) + 1.0)


@pytest.fixture
def bent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe whose derivative depends on the score."""
    recipe = ScoreRecipe(bend, lambda score, b, h, q, k, aux: score + score * score * BEND)
    monkeypatch.setitem(mask_cases.SCORE_MODS, "bend", recipe)


BENT_CASES = (
    Case("bend", 2, 129, 200, 4, 2, score_mod="bend", causal=True, pack_gqa=True),
    Case("bend-softcap", 1, 129, 200, 2, 1, score_mod="bend", softcap=3.0, sink=FP64),
    Case("bend-blocks", 1, 200, 200, score_mod="bend", softcap=3.0, blocks=(64, 48)),
)


@pytest.mark.usefixtures("bent")
@pytest.mark.parametrize("case", BENT_CASES)
def test_score_mod_by_its_derivative(case: Case) -> None:
    check_exactly(case, pack_gqa=packed(case))


@pytest.mark.usefixtures("bent")
@pytest.mark.parametrize("case", BENT_CASES)
def test_score_mod_by_its_backward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is asked instead of the derivative."""
    monkeypatch.setattr(backward, "eval_score_mod_derivative", None)
    check_exactly(case, pack_gqa=packed(case), score_mod_bwd=bend_bwd)


@pytest.mark.usefixtures("bent")
def test_the_derivative_of_a_hidden_score_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("hidden", 1, 70, 70, score_mod="bend", causal=True)
    evaluate = backward.eval_score_mod_derivative

    def evaluate_visible(*args: Any) -> tuple[Tensor, Tensor]:
        modified, derivative = evaluate(*args)
        q_idx, k_idx = args[-2:]
        return modified, derivative.masked_fill(k_idx > q_idx[:, None], float("nan"))

    monkeypatch.setattr(backward, "eval_score_mod_derivative", evaluate_visible)
    check_exactly(case)


# -- the oracle and its bound -------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_oracle_agrees_with_torch(causal: bool) -> None:
    inputs = make_inputs(Case("square", 2, 65, 65, 4, 2, 16, dtype=FP64, causal=causal))
    dout, _ = make_output_gradients(inputs)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    expected = torch.autograd.grad(out.transpose(1, 2), (q, k, v), dout)
    found = reference_gradients(inputs, dout)
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(found[name][0], gradient)


@pytest.mark.parametrize(
    "case", [case for case in MASK_CASES if case.lengths_q or case.score_mod or case.sink]
)
def test_oracle_agrees_with_differences(case: Case) -> None:
    """Along one direction of all operands together, by the fourth-order central difference."""
    inputs, dout, dlse = exact_problem(case)
    generator = torch.Generator().manual_seed(7)
    operands = [inputs.q, inputs.k, inputs.v]
    sink = inputs.plain_keywords["learnable_sink"]
    if sink is not None:
        operands.append(sink)
    steps = [torch.randn(x.shape, generator=generator, dtype=FP64) for x in operands]
    used = inputs.rows_in_use("q")

    def loss(step: float) -> Tensor:
        q, k, v, *sinks = (x + step * y for x, y in zip(operands, steps, strict=True))
        keywords = inputs.plain_keywords | {"learnable_sink": sinks[0] if sinks else None}
        out, lse = reference_attention(q, k, v, inputs.dense, **keywords)
        terms = (lse * dlse).masked_fill(lse.isinf(), 0.0).transpose(-1, -2)
        return (out * dout)[used].sum() + terms[used].sum()

    h = 1e-4
    difference = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    gradients = reference_gradients(inputs, dout, dlse).values()
    along = sum((g * y).sum() for (g, _), y in zip(gradients, steps, strict=True))
    torch.testing.assert_close(along, difference, rtol=1e-6, atol=1e-6)


def spoil(gradients: Gradients, how: str, without_a_query: Gradients) -> None:
    dq, dk, dv, dsink = gradients.values()
    if how == "NaN left in dk":
        dk[0, 5, 0, 3] = float("nan")
    elif how == "empty row not 0":
        dq[0, 0, 0, 0] = 1e-30
    elif how == "one row of dq not scaled":
        dq[0, -1, 0] *= 1.05
    elif how == "a query left out of dv":
        dv.copy_(without_a_query["dv"])
    elif how == "heads exchanged":
        dk.copy_(dk.flip(-2))
    elif how == "sign of dsink":
        dsink.neg_()
    elif how == "no dsink":
        gradients["dsink"] = None
    elif how == "dtype of dv":
        gradients["dv"] = dv.float()


@pytest.mark.parametrize(
    "how",
    [
        *("NaN left in dk", "empty row not 0", "one row of dq not scaled"),
        *("a query left out of dv", "heads exchanged", "sign of dsink", "no dsink", "dtype of dv"),
    ],
)
def test_the_bound_can_fail(how: str) -> None:
    inputs = make_inputs(Case("spoiled", 1, 200, 150, dtype=BF16, causal=True, sink=BF16))
    dout, dlse = make_output_gradients(inputs)
    gradients = run_backward(inputs, dout, dlse)
    assert_gradients_close(gradients, inputs, dout, dlse)
    dout_of_others = dout.clone()
    dout_of_others[0, 150] = 0
    spoil(gradients, how, run_backward(inputs, dout_of_others, dlse))
    with pytest.raises(AssertionError, match="spoiled"):
        assert_gradients_close(gradients, inputs, dout, dlse)
