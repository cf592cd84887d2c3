"""What is Hopper's own of the compiled backward, on the software GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import (
    BF16,
    COLUMN_DOCUMENT_CASES,
    DOCUMENT_CASES,
    FP16,
    FP32,
    MASK_BITS_CASES,
    MASK_BITS_VARLEN_CASES,
    Case,
)
from eager import assert_gradients_close
from inputs import make_inputs, make_output_gradients, of_one_column_mask
from oracle import reference_gradients
from recording import calls_of
from simulated_backward import launch, run_hostile, run_on_simulator, run_sim
from unseen_memory import NAN, check_padded_documents, with_unused_gradients

from flash_mask_cute import functional, interface
from flash_mask_cute.call.documents import PackedBackward
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = pytest.mark.usefixtures("poisoned_allocations")


@pytest.mark.parametrize(
    ("case", "splits", "more"),
    [
        (Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True), 4, {}),
        (Case("gqa4-d64-dv72", 2, 65, 140, 8, 2, head_dim=64, head_dim_v=72), 2, {}),
        (Case("gqa6-d64", 1, 130, 140, 6, 1, head_dim=64), 3, {"deterministic": True}),
        (Case("gqa2-varlen", 0, 0, 0, 4, 2, lengths_q=(65, 0, 99), lengths_k=(0, 9, 270)), 2,
         {"deterministic": True}),
        (Case("gqa2-seqused", 2, 65, 140, 2, 1, seqused_q=(65, 0), seqused_k=(9, 140)), 2, {}),
        (Case("gqa2-mask-bits", 1, 65, 140, 4, 2, mask_mod="checks"), 2, {"launches": 5}),
        (Case("gqa4-bias", 1, 65, 140, 4, 1, head_dim=96, score_mod="head_bias", column="stepped2"),
         2, {}),
        # columns shared by warpgroups, and pairs of CTAs
        (Case("gqa2-d160", 1, 65, 140, 2, 1, head_dim=160, causal=True), 2, {}),
        (Case("gqa4-d256", 1, 65, 300, 4, 1, head_dim=256, causal=True), 4, {}),
        (Case("gqa2-d256", 1, 65, 140, 2, 1, head_dim=256), 2, {"deterministic": True}),
        (
            Case("gqa4-d192-dv128-varlen", *(0, 0, 0, 4, 2), head_dim=192, head_dim_v=128,
                 causal=True, lengths_q=(65, 0, 99), lengths_k=(0, 9, 270)),
            2,
            {},
        ),
        (Case("gqa2-d136-bias", 1, 65, 140, 2, 1, head_dim=136, score_mod="head_bias"), 2, {}),
        # with fewer columns than the tile of keys, of values, and of neither
        (Case("d136-dv152", 1, 65, 140, 2, 1, head_dim=136, head_dim_v=152, causal=True), 2, {}),
        (Case("d176-dv72", 1, 65, 140, 2, 1, head_dim=176, head_dim_v=72), 2, {}),
        (Case("d192-dv128", 1, 65, 140, 4, 1, head_dim=192, head_dim_v=128, window_left=30), 4, {}),
    ]
)  # fmt: skip
def test_split_groups(simulator: ModuleType, case: Case, splits: int, more: dict[str, Any]) -> None:
    """Several CTAs with the same keys; a kernel more, which adds dK and dV."""
    config = {"group_splits": splits}
    run_sim(simulator, make_inputs(case), config=config, **({"launches": 4} | more))


def test_operands_that_share_elements(simulator: ModuleType) -> None:
    """With themselves: rows that overlap, and heads and rows that are all one."""
    inputs = make_inputs(Case("shared", 1, 127, 129))
    q = inputs.q.as_strided(inputs.q.shape, (0, 64, 32, 1))
    k, v = inputs.k[:, :, :1].expand_as(inputs.k), inputs.v[:, :1].expand_as(inputs.v)
    run_sim(simulator, replace(inputs, q=q, k=k, v=v))


@pytest.mark.parametrize("case", COLUMN_DOCUMENT_CASES)
def test_documents_of_a_mask(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """As packed sequences, many of them empty, by the public function."""
    packed = calls_of(PackedBackward, monkeypatch)
    inputs = make_inputs(case)
    dout, _ = make_output_gradients(inputs)
    mask = ColumnMask(inputs.keywords["startend_row_indices"], case.causal, documents=True)
    assert len(mask.split(case.batch).cu_seqlens.unique()) > case.batch + 1
    monkeypatch.setattr(interface, "backward", run_on_simulator)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    options = {"causal": case.causal, "deterministic": not case.causal}
    out = functional.flash_attn_func(*leaves, startend_row_indices=mask, **options)
    simulator.OPTIONS["delay"] = 1
    simulator.RESULTS.clear()
    gradients = torch.autograd.grad(out, leaves, dout)
    assert len(packed) == 1 and len(simulator.RESULTS) == 3
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert_gradients_close(named, inputs, dout)


def test_padding_behind_documents(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As packed sequences, by autograd; the forward is the CPU's."""
    packed = calls_of(PackedBackward, monkeypatch)
    monkeypatch.setattr(interface, "backward", run_on_simulator)
    simulator.OPTIONS["delay"] = 1
    check_padded_documents(functional.flash_attn_func)
    assert len(packed) == 1


@pytest.mark.parametrize("case", MASK_BITS_CASES)
def test_mask_bits_for_all_heads(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), launches=4)


@pytest.mark.parametrize("position", range(len(MASK_BITS_VARLEN_CASES)))
def test_mask_bits_for_packed_sequences(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(MASK_BITS_VARLEN_CASES[position])
    run_sim(simulator, inputs, seeds=(1,), launches=4, deterministic=position == 1)


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("position", range(len(DOCUMENT_CASES)))
def test_mask_bits_by_documents(simulator: ModuleType, position: int) -> None:
    inputs = make_inputs(DOCUMENT_CASES[position])
    run_sim(simulator, inputs, seeds=(1,), launches=4, deterministic=position % 2 == 1)


@pytest.mark.parametrize("seed", [11, 12])
def test_warps_of_a_warpgroup_that_are_far_apart(simulator: ModuleType, seed: int) -> None:
    """One sends dK and dV from where others write dS of the next work tile: dQ was wrong."""
    case = next(case for case in MASK_BITS_CASES if case.id == "mask-bits-odd-lists-d64")
    config = {"tile_m": 128, "value_cols": 48}
    run_sim(simulator, make_inputs(case), seeds=(seed,), launches=4, config=config)


@pytest.mark.parametrize(
    "fields",
    [{"column": "stepped4"}, {}, {"head_dim": 160}, {"seqused_q": (400,), "seqused_k": (290,)}],
    ids=str,
)
def test_walks_that_begin_inside_a_chunk(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The second work tile visits blocks 5 and 6 of its two heads before 0 to 4."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    case = Case("staggered", 1, 430, 300, 2, 1, **{"head_dim": 72} | fields)
    config = {"group_splits": 1, "clears_dq": False}
    run_sim(simulator, make_inputs(case), seeds=(None, 1), config=config)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_warpgroup_computes_what_its_keys_see(simulator: ModuleType, seed: int | None) -> None:
    """30 of 40 squares of 64 x 64 in visited blocks are seen; the others are passed over."""
    inputs = make_inputs(Case("squares", 1, 700, 700, 1, 1, causal=True, window_left=100))
    run_sim(simulator, inputs, seeds=(seed,))
    computed = simulator.RESULTS[-2]["ops"]["ex2.approx.ftz.f32"]
    square = 64 * 64 // 32  # a warp's instruction is 32 exponentials
    assert 30 * square <= computed <= (30 if seed is None else 39) * square


def test_keys_that_are_not_in_use_where_every_block_is_visited(simulator: ModuleType) -> None:
    case = Case("all", 2, 130, 129, 1, 1, seqused_k=(0, 100))
    hostile = with_unused_gradients(make_inputs(case), NAN)
    run_hostile(simulator, hostile, deterministic=True, config={"skip_blocks": False})


def test_packed_rows_of_no_sequence(simulator: ModuleType) -> None:
    """0 in new tensors; the caller's stay as they are."""
    inputs = make_inputs(
        Case("tail", lengths_q=(65, 30), lengths_k=(30, 65), heads_q=1, heads_kv=1)
    )
    tail = torch.full((9, 1, 128), float("nan"), dtype=BF16)
    q, k, v = (torch.cat([x, tail]) for x in (inputs.q, inputs.k, inputs.v))
    dout, _ = make_output_gradients(inputs)
    out, lse = inputs.reference
    operands = (
        q, k, v, torch.cat([out.to(BF16), tail]), torch.cat([dout, tail]),
        torch.cat([lse.float(), torch.full((1, 9), float("nan"))], dim=1),
    )  # fmt: skip
    keywords = inputs.bwd_keywords
    given = {
        name: torch.full_like(x, 7.0) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
    }
    for outputs, rest in (({}, 0.0), (given, 7.0)):
        gradients = launch(operands, keywords | outputs)
        assert all((x[-9:] == rest).all() for x in gradients)
        named = {name: x[:-9] for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}
        assert_gradients_close(named, inputs, dout)


@pytest.mark.parametrize(("poisoned", "head_dim"), [(0, 128), (2, 128), (2, 256)])
def test_what_other_sequences_hold_does_not_matter(
    simulator: ModuleType, poisoned: int, head_dim: int
) -> None:
    """NaN in all of a neighbour, also beside a sequence without queries and one without keys."""
    lengths_q, lengths_k = (65, 0, 30, 20), (30, 20, 65, 0)
    case = Case("neighbours", lengths_q=lengths_q, lengths_k=lengths_k, heads_q=1, heads_kv=1)
    inputs = make_inputs(replace(case, head_dim=head_dim, head_dim_v=0))
    dout, dlse = make_output_gradients(inputs)
    of_poisoned_q, of_poisoned_k = (
        torch.cat([torch.full((n,), i == poisoned) for i, n in enumerate(lengths)])
        for lengths in (lengths_q, lengths_k)
    )
    by_query = (
        inputs.q,
        inputs.reference[0].to(BF16),
        dout,
        inputs.reference[1].float().mT,
        dlse.mT,
    )
    q, out, dout_, lse, dlse_ = (x.clone() for x in by_query)
    k, v = inputs.k.clone(), inputs.v.clone()
    for x in (q, out, dout_, lse, dlse_):
        x[of_poisoned_q] = float("nan")
    for x in (k, v):
        x[of_poisoned_k] = float("nan")
    keywords = inputs.bwd_keywords
    simulator.OPTIONS.pop("delay", None)
    operands = q, k, v, out, dout_, lse.mT
    dq, dk, dv = launch(operands, keywords | {"dlse": dlse_.mT})
    expected = reference_gradients(inputs, dout, dlse)
    dq[of_poisoned_q] = expected["dq"][0][of_poisoned_q].to(BF16)
    dk[of_poisoned_k] = expected["dk"][0][of_poisoned_k].to(BF16)
    dv[of_poisoned_k] = expected["dv"][0][of_poisoned_k].to(BF16)
    assert_gradients_close({"dq": dq, "dk": dk, "dv": dv}, inputs, dout, dlse)


# Two CTAs with neighbouring keys: the last pair has keys for one of them, or for both.
PAIR_CASES = (
    Case("full-fp16-sink", 1, 130, 200, head_dim=256, dtype=FP16, sink=FP32),
    Case("causal-gqa2", 1, 129, 300, 2, 1, head_dim=256, causal=True),
    Case("window", 1, 129, 300, 1, 1, head_dim=256, window_left=20, window_right=5),
    Case("window-before-9", 1, 129, 300, 1, 1, head_dim=256, window_left=90, window_right=-9),
    Case(
        "varlen-causal", heads_q=1, heads_kv=1, head_dim=256,
        lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True,
    ),
    Case("d200-dv40-varlen", head_dim=200, head_dim_v=40, lengths_q=(65, 0), lengths_k=(70, 9)),
    Case("columns-1", 1, 129, 300, 1, 1, head_dim=256, causal=True, column="stepped1"),
    Case("columns-2", 1, 129, 200, 1, 1, head_dim=256, column="stepped2"),
    Case("asked-lists", 1, 129, 300, 1, 1, head_dim=256, mask_mod="eviction", blocks=(48, 80)),
    # columns that the warpgroups share unevenly, and of which both CTAs have some up to 160
    Case("d160-sink", 1, 130, 200, 1, 1, head_dim=160, sink=FP32),
    Case("d160-dv96-causal-gqa2", 1, 129, 300, 2, 1, head_dim=160, head_dim_v=96, causal=True),
    Case("d144-dv32-fp16-window", 1, 129, 200, 1, 1, head_dim=144, head_dim_v=32, dtype=FP16,
         window_left=20, window_right=5),
    Case("d136-dv192-varlen", head_dim=136, head_dim_v=192, heads_q=1, heads_kv=1,
         lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True),
    Case("d192-columns-1", 1, 129, 300, 1, 1, head_dim=192, causal=True, column="stepped1"),
    Case("d192-dv128-unused", 2, 129, 200, 1, 1, head_dim=192, head_dim_v=128,
         seqused_q=(100, 0), seqused_k=(129, 65)),
    Case("d168-dv64-lists", 1, 129, 300, 1, 1, head_dim=168, head_dim_v=64, mask_mod="eviction",
         blocks=(48, 80)),
)  # fmt: skip


def main_of(simulator: ModuleType) -> dict[str, Any]:
    """What the main kernel of the last call did."""
    (result,) = (
        x for x in simulator.RESULTS if "FlashAttentionBackward" in x["launches"][0]["kernel"]
    )
    return result


def cluster_of_main(simulator: ModuleType) -> tuple[int, int, int]:
    (launch,) = main_of(simulator)["launches"]
    return launch["cluster"]


@pytest.mark.parametrize("case", PAIR_CASES)
def test_pairs_of_ctas(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=(1,), config={"cta_pair": True})
    assert cluster_of_main(simulator) == (2, 1, 1)


def test_two_pairs_of_ctas_at_a_time(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five SMs; the sums of each pair go to the other's row blocks, too."""
    monkeypatch.setattr("simulated_backward.SMS", 5)
    monkeypatch.setitem(simulator.OPTIONS, "resident", 4)
    case = replace(PAIR_CASES[1], seqlen_k=500)
    run_sim(simulator, make_inputs(case), seeds=(None, 2))
    (launch,) = main_of(simulator)["launches"]
    assert (launch["cluster"], launch["grid"]) == ((2, 1, 1), (4, 1, 1))


# Wide heads of which each warpgroup has keys of its own: the last work tile has keys for one of
# them, or for both.
SPLIT_KEYS_CASES = (
    Case("d192-dv128-sink", 1, 130, 200, 1, 1, head_dim=192, head_dim_v=128, sink=FP32),
    Case("d192-dv128-causal-gqa2", 1, 129, 300, 2, 1, head_dim=192, head_dim_v=128, causal=True),
    Case("d192-dv128-window", 1, 129, 300, 1, 1, head_dim=192, head_dim_v=128, window_left=20,
         window_right=5),
    Case("d192-dv128-window-before-9", 1, 129, 300, 1, 1, head_dim=192, head_dim_v=128,
         window_left=90, window_right=-9),
    Case("d192-dv128-varlen", heads_q=1, heads_kv=1, head_dim=192, head_dim_v=128,
         lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True),
    Case("d192-dv128-unused", 2, 129, 200, 1, 1, head_dim=192, head_dim_v=128,
         seqused_q=(100, 0), seqused_k=(129, 65)),
    Case("d192-dv128-columns-1", 1, 129, 300, 1, 1, head_dim=192, head_dim_v=128, causal=True,
         column="stepped1"),
    Case("d160-fp16", 1, 130, 200, 1, 1, head_dim=160, dtype=FP16),
    Case("d160-dv96-causal-gqa2", 1, 129, 300, 2, 1, head_dim=160, head_dim_v=96, causal=True),
    Case("d136-window", 1, 129, 200, 1, 1, head_dim=136, window_left=20, window_right=5),
    Case("d152-dv136-varlen", head_dim=152, head_dim_v=136, heads_q=1, heads_kv=1,
         lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True),
    Case("d176-dv40-columns-1", 1, 129, 200, 1, 1, head_dim=176, head_dim_v=40, causal=True,
         column="stepped1"),
)  # fmt: skip


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("case", SPLIT_KEYS_CASES)
def test_keys_of_each_warpgroup(simulator: ModuleType, case: Case, seed: int | None) -> None:
    run_sim(simulator, make_inputs(case), seeds=(seed,), config={"splits_keys": True})
    assert cluster_of_main(simulator) == (1, 1, 1)


@pytest.mark.parametrize(
    "more", [{"deterministic": True}, {"config": {"clears_dq": True}}], ids=str
)
@pytest.mark.parametrize("case", SPLIT_KEYS_CASES[1:6:2])
def test_orders_of_sums_with_keys_of_each_warpgroup(
    simulator: ModuleType, case: Case, more: dict[str, Any]
) -> None:
    """One that is fixed, and additions to sums that are cleared first."""
    run_sim(simulator, make_inputs(case), seeds=(None, 3), **more)
    assert cluster_of_main(simulator) == (1, 1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"mask_mod": "eviction", "blocks": (48, 80)},
        {"column": "stepped2"},
        {"column": "random4", "head_dim": 160, "head_dim_v": 160},
        {"blocks": (64, 64), "head_dim": 136},
    ],
    ids=str,
)
def test_cut_blocks_with_keys_of_each_warpgroup(
    simulator: ModuleType, fields: dict[str, Any]
) -> None:
    """Without being asked for: what the mask warps have few registers for."""
    case = Case("cut", 1, 129, 300, 1, 1, **{"head_dim": 192, "head_dim_v": 128} | fields)
    run_sim(simulator, make_inputs(case), seeds=(1,))
    assert cluster_of_main(simulator) == (1, 1, 1)


@pytest.mark.parametrize(
    "case",
    [
        *MASK_BITS_CASES[2:4],
        Case("mask-bits-one-tile", 1, 100, 64, 4, 4, mask_mod="documents"),
        Case("mask-bits-odd-tiles", 1, 100, 300, 4, 4, mask_mod="documents"),
    ],
)
def test_mask_bits_for_pairs_of_ctas(simulator: ModuleType, case: Case) -> None:
    """Blocks with one or both tiles of a pair; a pair of which one CTA has no keys."""
    inputs = make_inputs(replace(case, batch=1, head_dim=256, head_dim_v=0))
    run_sim(simulator, inputs, seeds=(1,), launches=4)
    assert cluster_of_main(simulator) == (2, 1, 1)


def test_wide_heads_without_pairs_of_ctas(simulator: ModuleType) -> None:
    case = Case("alone", 1, 129, 190, 1, 1, head_dim=256, causal=True)
    run_sim(simulator, make_inputs(case), config={"cta_pair": False})
    assert cluster_of_main(simulator) == (1, 1, 1)


def test_one_column_mask_for_many_calls(simulator: ModuleType) -> None:
    """Its bounds are kept, and follow the tensor when it changes."""
    shape = {"batch": 1, "seqlen_q": 129, "seqlen_k": 200, "heads_q": 1, "heads_kv": 1}
    for inputs, more in of_one_column_mask(**shape):
        run_sim(simulator, inputs, seeds=(None,), **more)
