"""The compiled backward, its kernels one after the other, on the software GPU."""

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
    FP64,
    MASK_BITS_CASES,
    MASK_BITS_VARLEN_CASES,
    MASK_CASES,
    Case,
)
from gradient_oracle import assert_gradients_close, make_output_gradients, reference_gradients
from inputs import make_inputs
from recording import calls_of
from simulated_backward import (
    DELAY_SEEDS,
    assert_same_bits,
    launch,
    launch_on_simulator,
    run_hostile,
    run_on_simulator,
    run_sim,
)
from unseen_memory import (
    EMPTY_CASES,
    INF,
    NAN,
    UNUSED_CASES,
    WIDE_UNUSED_CASES,
    padded_documents,
    with_empty,
    with_unused_gradients,
)

from flash_mask_cute import functional, interface
from flash_mask_cute.call.run.packed import PackedBackward
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("poisoned_allocations")]

# The software GPU has two SMs, so a case of more than two work tiles (key blocks x KV heads x
# batch) gives a persistent CTA several.
CASES = (
    Case("dense-127x129", 1, 127, 129),
    Case("dense-1x1", 1, 1, 1, 1, 1),
    Case("dense-129x129-fused_qkv", 1, 129, 129, strided="fused_qkv"),
    Case("causal-129x300", 2, 129, 300, causal=True),
    Case("causal-257x100-empty-rows", 1, 257, 100, causal=True),
    Case("window-20-5-129x300-unseen-keys", 1, 129, 300, window_left=20, window_right=5),
    Case("window-open-9-129x129", 1, 129, 129, window_right=9),
    Case("window-70-before-9-200x129-empty-rows", 1, 200, 129, window_left=70, window_right=-9),
    Case("window-behind-3-to-150-129x300", 1, 129, 300, window_left=-3, window_right=150),
    Case("window-before-140-causal-255x255", 1, 255, 255, causal=True, window_right=-140),
    Case("window-of-nothing-129x129", 1, 129, 129, window_left=-5, window_right=3),
    Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True),
    Case("varlen-causal", lengths_q=(63, 0, 129, 1), lengths_k=(63, 9, 129, 0), causal=True),
    Case("varlen-q-dense-k-seqused", seqlen_k=129, lengths_q=(130, 1), seqused_q=(90, 0)),
    Case("dense-q-varlen-k", seqlen_q=129, lengths_k=(0, 200)),
    Case("seqused", 2, 129, 129, seqused_q=(100, 0), seqused_k=(129, 65), causal=True),
    Case("softcap-129x129", 1, 129, 129, softcap=15.0),
    Case("unreadable-negative-127x129", 1, 127, 129, strided="unreadable", softmax_scale=-0.3),
    Case("scale-0-sink-fp64-257x100", 1, 257, 100, causal=True, softmax_scale=0.0, sink=FP64),
    Case("softcap-scale-negative-129x129", 1, 129, 129, softcap=15.0, softmax_scale=-0.5),
    Case("sink-257x65-empty-rows", 1, 257, 65, causal=True, sink=FP32),
    Case("sink-bf16-gqa2-varlen", 0, 0, 0, 4, 2, lengths_q=(65, 99), lengths_k=(0, 70), sink=BF16),
    Case("fp16-d64-causal", 1, 255, 255, head_dim=64, dtype=FP16, causal=True),
    Case("d72-dv40", 1, 127, 129, head_dim=72, head_dim_v=40),
    Case("d256-causal-softcap", 1, 70, 130, head_dim=256, causal=True, softcap=15.0),
    Case("d192-dv128-gqa2-softcap", 1, 70, 130, 2, 1, head_dim=192, head_dim_v=128, softcap=15.0),
    Case("d40-dv200-varlen", head_dim=40, head_dim_v=200, lengths_q=(65, 0), lengths_k=(70, 9)),
    Case("d136-fp16-window", 1, 129, 129, head_dim=136, dtype=FP16, window_left=20),
    Case("d96-70x200", 1, 70, 200, 1, 1, head_dim=96),
    Case("d192-dv128-pair-causal", 1, 70, 200, 1, 1, head_dim=192, head_dim_v=128, causal=True),
    Case("d160-softcap", 1, 70, 130, 1, 1, head_dim=160, softcap=15.0),
)


@pytest.mark.parametrize("position", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_against_oracle(simulator: ModuleType, position: int) -> None:
    """With a gradient by lse, and for each second case without one as well."""
    seeds = DELAY_SEEDS if position % 2 else DELAY_SEEDS[1:]
    run_sim(simulator, make_inputs(CASES[position]), seeds)


@pytest.mark.parametrize(
    ("case", "splits", "more"),
    [
        (Case("gqa4-65x255", 1, 65, 255, 4, 1, causal=True), 4, {}),
        (Case("gqa4-d64-dv72", 2, 65, 140, 8, 2, head_dim=64, head_dim_v=72), 2, {}),
        (Case("gqa6-d64", 1, 130, 140, 6, 1, head_dim=64), 3, {"deterministic": True}),
        (
            Case("gqa2-varlen", 0, 0, 0, 4, 2, lengths_q=(65, 0, 99), lengths_k=(0, 9, 270)),
            2,
            {"deterministic": True},
        ),
        (Case("gqa2-seqused", 2, 65, 140, 2, 1, seqused_q=(65, 0), seqused_k=(9, 140)), 2, {}),
        (Case("gqa2-mask-bits", 1, 65, 140, 4, 2, mask_mod="checks"), 2, {"launches": 5}),
        (
            Case(
                "gqa4-bias", 1, 65, 140, 4, 1, head_dim=96, score_mod="head_bias", column="stepped2"
            ),
            2,
            {},
        ),
    ],
    ids=lambda x: x.id if isinstance(x, Case) else None,
)
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


# Each has a neighbour in the table with the same kind of mask; a GPU runs them all.
LEFT_OUT = (
    "columns-documents1",
    "columns-stepped1-q",
    "columns-random2-causal",
    "columns-random2",
    "columns-varlen-documents2",
    "mask-checks",
    "mask-causal-offset",
    "score-head-bias-gqa2-packed",
)
# of four heads, with a mask_mod that does not look at them
MAKES_MASK_BITS = ("everything-varlen",)
SIM_MASK_CASES = tuple(case for case in MASK_CASES if case.id not in LEFT_OUT)


@pytest.mark.parametrize("position", range(len(SIM_MASK_CASES)), ids=lambda i: SIM_MASK_CASES[i].id)
def test_masks_against_oracle(simulator: ModuleType, position: int) -> None:
    case = replace(SIM_MASK_CASES[position], pack_gqa=None)
    launches = 4 if case.id in MAKES_MASK_BITS else 3
    run_sim(simulator, make_inputs(case), ((1,), (None,))[position % 2], launches)


@pytest.mark.parametrize("case", COLUMN_DOCUMENT_CASES, ids=lambda case: case.id)
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
    hostile = with_empty(padded_documents(), NAN)
    given = hostile.inputs
    monkeypatch.setattr(interface, "backward", run_on_simulator)
    leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    out = functional.flash_attn_func(*leaves, **given.mask_keywords, causal=True)
    simulator.OPTIONS["delay"] = 1
    gradients = torch.autograd.grad(out, leaves, hostile.dout)
    assert len(packed) == 1
    dlse = torch.zeros_like(hostile.dlse)
    hostile._replace(dlse=dlse, clean_dlse=dlse).assert_close(
        dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    )


@pytest.mark.parametrize("case", MASK_BITS_CASES, ids=lambda case: case.id)
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
    """One still sends dK and dV from where others write dS of the next work tile's first block,
    whose rows are queries: with these seeds its rows of dQ were wrong."""
    case = next(case for case in MASK_BITS_CASES if case.id == "mask-bits-odd-lists-d64")
    config = {"tile_m": 128, "value_cols": 48}
    run_sim(simulator, make_inputs(case), seeds=(seed,), launches=4, config=config)


@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda case: case.id)
def test_work_tiles_that_come_to_a_row_block_together(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Both CTAs run at a time, not one until it waits: the second one adds to what the first one
    stores."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    run_sim(simulator, make_inputs(replace(case, seqlen_k=300)), seeds=(1, 2, 3))


def test_walks_that_begin_inside_a_chunk(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second work tile visits blocks 5 and 6 of its two heads before 0 to 4."""
    monkeypatch.setitem(simulator.OPTIONS, "resident", 2)
    case = Case("staggered", 1, 430, 300, 2, 1, head_dim=72, column="stepped4")
    run_sim(simulator, make_inputs(case), seeds=(None, 1), config={"group_splits": 1})


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_warpgroup_computes_what_its_keys_see(simulator: ModuleType, seed: int | None) -> None:
    """Of 40 squares of 64 queries and 64 keys in blocks that are visited, 30 are seen; of others
    those are passed over whose bits came in time, all without delays."""
    inputs = make_inputs(Case("squares", 1, 700, 700, 1, 1, causal=True, window_left=100))
    run_sim(simulator, inputs, seeds=(seed,))
    computed = simulator.RESULTS[-2]["ops"]["ex2.approx.ftz.f32"]
    square = 64 * 64 // 32  # a warp's instruction is 32 exponentials
    assert 30 * square <= computed <= (30 if seed is None else 39) * square


UNUSED = (*UNUSED_CASES, *WIDE_UNUSED_CASES)


@pytest.mark.parametrize("position", range(len(UNUSED)), ids=lambda i: UNUSED[i].id)
def test_rows_that_are_not_in_use(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(replace(UNUSED[position], pack_gqa=None)), (NAN, INF)[position % 2]
    run_hostile(simulator, with_unused_gradients(inputs, value), deterministic=position % 3 == 1)


@pytest.mark.parametrize("position", range(len(EMPTY_CASES)), ids=lambda i: EMPTY_CASES[i].id)
def test_rows_of_queries_that_see_nothing(simulator: ModuleType, position: int) -> None:
    inputs, value = make_inputs(EMPTY_CASES[position]), (NAN, INF)[position % 2]
    run_hostile(simulator, with_empty(inputs, value), deterministic=position % 3 == 1)


def test_keys_that_are_not_in_use_where_every_block_is_visited(simulator: ModuleType) -> None:
    case = Case("all", 2, 130, 129, 1, 1, seqused_k=(0, 100))
    hostile = with_unused_gradients(make_inputs(case), NAN)
    run_hostile(simulator, hostile, deterministic=True, config={"skip_blocks": False})


def test_skipping_changes_no_bit(simulator: ModuleType) -> None:
    inputs = make_inputs(
        Case("skip", 1, 200, 300, 1, 1, causal=True, column="stepped2", blocks=(64, 64))
    )
    dout, dlse = make_output_gradients(inputs)
    simulator.OPTIONS.pop("delay", None)
    skipping = launch_on_simulator(inputs, dout, dlse, deterministic=True)
    visiting = launch_on_simulator(
        inputs, dout, dlse, deterministic=True, config={"skip_blocks": False}
    )
    assert_same_bits(skipping, visiting)
    assert_gradients_close(visiting, inputs, dout, dlse)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 1, 200, 500, 4, 2, causal=True),
        Case("window-before-30", 1, 200, 500, 1, 1, window_left=150, window_right=-30),
        Case("lists", 1, 150, 400, 1, 1, blocks=(48, 80)),
        replace(next(c for c in MASK_CASES if c.id == "columns-random2"), pack_gqa=None),
    ],
    ids=lambda case: case.id,
)
def test_deterministic(simulator: ModuleType, case: Case) -> None:
    """The order of sums does not depend on which CTA is ahead."""
    inputs = make_inputs(case)
    dout, _ = make_output_gradients(inputs)
    runs = []
    for seed in (1, 2):
        simulator.OPTIONS["delay"] = seed
        simulator.RESULTS.clear()
        runs.append(launch_on_simulator(inputs, dout, deterministic=True))
        assert not any(result["warnings"] for result in simulator.RESULTS)
    assert_same_bits(*runs)
    assert_gradients_close(runs[0], inputs, dout)


def test_given_outputs_and_expanded_output_gradients(simulator: ModuleType) -> None:
    """Slices of one tensor, of which nothing else is written; dout is one number for all."""
    inputs = make_inputs(Case("given", 1, 129, 129, 2, 2, causal=True))
    dout, dlse = make_output_gradients(inputs)
    dout, dlse = dout[:, :1, :1, :1].expand_as(dout), dlse[:, :1, :1].expand_as(dlse)
    guarded = inputs.q.new_full((1, 131, 8, 128), float("nan"))
    fused = guarded[:, 1:-1, 1:-1]
    given = dict(zip(("dq", "dk", "dv"), fused.split((2, 2, 2), dim=2), strict=True))
    simulator.OPTIONS.pop("delay", None)
    gradients = launch_on_simulator(inputs, dout, dlse, **given)
    assert all(gradients[name] is x for name, x in given.items())
    assert_gradients_close(gradients, inputs, dout, dlse)
    assert guarded.isnan().sum() == guarded.numel() - fused.numel()


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
    keywords = {name: x for name, x in inputs.keywords.items() if name != "pack_gqa"}
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
    keywords = {name: x for name, x in inputs.keywords.items() if name != "pack_gqa"}
    simulator.OPTIONS.pop("delay", None)
    operands = q, k, v, out, dout_, lse.mT
    dq, dk, dv = launch(operands, keywords | {"dlse": dlse_.mT})
    expected = reference_gradients(inputs, dout, dlse)
    dq[of_poisoned_q] = expected["dq"][of_poisoned_q].to(BF16)
    dk[of_poisoned_k] = expected["dk"][of_poisoned_k].to(BF16)
    dv[of_poisoned_k] = expected["dv"][of_poisoned_k].to(BF16)
    assert_gradients_close({"dq": dq, "dk": dk, "dv": dv}, inputs, dout, dlse)


@pytest.mark.parametrize(
    "config",
    [
        {"stages_q": 1, "stages_kv": 2},
        {"stages_do": 1, "tile_m": 64},
        {"stages_kv": 2},
        {"clears_dq": True},
    ],
    ids=str,
)
def test_configurations_that_no_row_has(simulator: ModuleType, config: dict[str, Any]) -> None:
    case = Case("config", 1, 200, 600, 2, 1, head_dim=64, causal=True, column="stepped1")
    run_sim(simulator, make_inputs(case), seeds=(1,), config=config)


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


@pytest.mark.parametrize("case", PAIR_CASES, ids=lambda case: case.id)
def test_pairs_of_ctas(simulator: ModuleType, case: Case) -> None:
    run_sim(simulator, make_inputs(case), seeds=(1,))
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


@pytest.mark.parametrize(
    "case",
    [
        *MASK_BITS_CASES[2:4],
        Case("mask-bits-one-tile", 1, 100, 64, 4, 4, mask_mod="documents"),
        Case("mask-bits-odd-tiles", 1, 100, 300, 4, 4, mask_mod="documents"),
    ],
    ids=lambda case: case.id,
)
def test_mask_bits_for_pairs_of_ctas(simulator: ModuleType, case: Case) -> None:
    """Of logical blocks that have both tiles of a pair, and of some that have one; and of a pair of
    which one CTA has no keys."""
    inputs = make_inputs(replace(case, batch=1, head_dim=256, head_dim_v=0))
    run_sim(simulator, inputs, seeds=(1,), launches=4)
    assert cluster_of_main(simulator) == (2, 1, 1)


def test_wide_heads_without_pairs_of_ctas(simulator: ModuleType) -> None:
    case = Case("alone", 1, 129, 190, 1, 1, head_dim=256, causal=True)
    run_sim(simulator, make_inputs(case), config={"cta_pair": False})
    assert cluster_of_main(simulator) == (1, 1, 1)


def test_one_column_mask_for_many_calls(simulator: ModuleType) -> None:
    """Its bounds are kept, and follow the tensor when it changes."""
    case = Case("kept", 1, 129, 200, 1, 1, causal=True, column="stepped1")
    first, second = make_inputs(case), make_inputs(case, seed=5)
    indices = first.column_mask.startend_row_indices.clone()
    mask = ColumnMask(indices, causal=True, seqlen_q="any")
    for inputs in (first, second):
        indices.copy_(inputs.column_mask.startend_row_indices)
        run_sim(simulator, inputs, seeds=(None,), causal=False, startend_row_indices=mask)


def _scale_bwd(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return grad * 1.1


def test_a_derivative_of_the_users(simulator: ModuleType) -> None:
    """Of a score_mod that multiplies by as much."""
    inputs = make_inputs(Case("told", 1, 129, 200, 2, 1, causal=True, score_mod="scale"))
    run_sim(simulator, inputs, seeds=(1,), score_mod_bwd=_scale_bwd)
