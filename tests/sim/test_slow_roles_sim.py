"""Each role of each kernel for Hopper, the slowest of its CTA once, on the software GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import drawn_share
import pytest
import simulated_backward
import test_append_sim
import test_aux_gradients_sim as aux_gradients
import test_aux_order_sim as aux_order
import test_block_lists_sim
import test_block_scan_sim
import test_bwd_prepost_sim as prepost
import test_cached_bias_sim as cached_bias
import test_column_bounds_sim
import test_dequantise_sim as widened
import test_difference_tables_sim as tables
import test_document_bits_sim
import test_document_split_sim
import test_fixed_splits_sim as fixed_splits
import test_gathered_sim as gathered
import test_lists_per_warpgroup_sim as lists_per_warpgroup
import test_mask_bits_sim as mask_bits
import test_page_sizes_sim as page_sizes
import test_query_lists_sim
import test_selected_sim
import test_shared_sums_sim as shared_sums
import test_short_sequences_sim as short
import test_slow_roles_sm100_sim
import test_token_backward_sim as by_query_lists
import test_token_mods_sim as token_mods
import test_wide_backward_sim as wide_backward
import torch
from cases import Case
from inputs import make_inputs
from simulated_forward import run_sim
from slow_roles import (
    ISLANDS,
    SEED,
    Slowed,
    check_backward,
    check_forward,
    kernels_of_package,
    launched,
    with_each_role_slow,
)

from flash_mask_cute.mask_prep.selected_bits import QueryTiles

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

FORWARD = "sm90.flash_fwd.kernel"
BACKWARD = "sm90.flash_bwd.kernel"
# of a backward with packed sequences, whose warps are in the sets of that; none waits for another
ZERO_PADDING = "kernels.zero_padding.kernel"


# More work tiles for a CTA than a ring has stages, in walks of whole and cut blocks; one for each
# way that roles have to hand over to each other.
FORWARDS = {
    "two-warpgroups": Slowed(
        ISLANDS | {"lengths_q": (300, 40, 129), "lengths_k": (900, 20, 200), "softmax_scale": 0.5}
    ),
    "three-warpgroups-pass-over": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 800, "seqlen_k": 700, "head_dim": 64}
    ),
    "chunks-and-outputs-in-place-of-queries": Slowed(
        ISLANDS
        | {
            "lengths_q": (200, 150, 130),
            "lengths_k": (6000, 40, 70),
            "head_dim": 64,
            "column": "far_islands",
        },
        {"tile_m": 128, "tile_n": 32, "stages_q": 2, "share_qo": True},
    ),
    "mask-warpgroup": Slowed(
        {"batch": 1, "seqlen_q": 300, "seqlen_k": 200, "mask_mod": "eviction", "blocks": (32, 128)}
    ),
    "output-in-place-of-query": Slowed(
        ISLANDS | {"batch": 2, "seqlen_q": 300, "seqlen_k": 200, "head_dim": 192}
    ),
}
BACKWARDS = {
    "pass-over-chunks": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 130, "seqlen_k": 260, "heads_q": 5, "head_dim": 64}
    ),
    "sums-in-order-and-stages-of-keys": Slowed(
        ISLANDS
        | {
            "lengths_q": (130, 0, 40), "lengths_k": (200, 70, 130), "head_dim": 64,
            "mask_mod": "eviction", "score_mod": "alibi",
        },
        {"stages_kv": 2, "stages_q": 1},
        {"deterministic": True},
    ),
    "shared-keys": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 192},
        {"cta_pair": False, "clears_dq": False},
    ),
    "keys-of-each-warpgroup": Slowed(
        ISLANDS
        | {"batch": 1, "seqlen_q": 130, "seqlen_k": 300, "head_dim": 192, "head_dim_v": 128},
        {"splits_keys": True, "cta_pair": False},
    ),
    "sums-in-turn": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 200, "seqlen_k": 260, "heads_q": 5, "head_dim": 80}
    ),
    "pairs-with-uneven-columns": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 70, "seqlen_k": 300, "head_dim": 160}
    ),
    "pairs-of-ctas": Slowed(
        ISLANDS | {"batch": 1, "seqlen_q": 70, "seqlen_k": 300, "head_dim": 256}
    ),
}  # fmt: skip


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_forward(simulator, monkeypatch, FORWARD, name, FORWARDS[name])


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_backward(simulator, monkeypatch, BACKWARD, name, BACKWARDS[name])
    assert (ZERO_PADDING in launched(simulator)) == ("lengths_q" in BACKWARDS[name].fields)


def patched(test: Callable[..., None], simulator: ModuleType, *arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test(simulator, patch, *arguments)


# What else runs beside attention, by the tests of its own.
OTHERS: dict[str, tuple[Callable[[ModuleType], None], tuple[str, ...]]] = {
    "preprocess": (
        lambda sim: prepost.check_preprocess(sim, prepost.PACKED, 64, 64),
        ("kernels.bwd_preprocess.kernel",),
    ),
    "postprocess": (
        lambda sim: prepost.check_postprocess(sim, prepost.PACKED, 72, 64),
        ("kernels.bwd_postprocess.kernel",),
    ),
    "wide-backward": (
        lambda sim: simulated_backward.run_sim(
            sim, make_inputs(wide_backward.SLOW), (SEED,), wide_backward.LAUNCHES
        ),
        ("sm90.flash_bwd_wide.kernel",),
    ),
    "zero-padding": (
        lambda sim: simulated_backward.run_sim(
            sim, make_inputs(Case("packed", lengths_q=(65, 0, 40), lengths_k=(70, 30, 65))), (SEED,)
        ),
        (ZERO_PADDING,),
    ),
    "add-parts": (
        lambda sim: simulated_backward.run_sim(
            sim,
            make_inputs(Case("gqa2", 1, 65, 140, 2, 1, head_dim=64)),
            (SEED,),
            launches=4,
            config={"group_splits": 2},
        ),
        ("kernels.bwd_add_parts.kernel",),
    ),
    "lists-of-warpgroups": (
        lambda sim: run_sim(
            sim, lists_per_warpgroup.make_gaps(), (SEED,), config={"num_stages": 2}
        ),
        (FORWARD,),
    ),
    "lists-of-keys-of-warpgroups": (
        lambda sim: simulated_backward.run_sim(sim, lists_per_warpgroup.make_gaps(), (SEED,)),
        (BACKWARD,),
    ),
    "kept-rows": (cached_bias.test_two_tables, (FORWARD,)),
    "combine": (
        lambda sim: run_sim(sim, make_inputs(Case("q3", 1, 3, 400, 2, 1)), (SEED,), num_splits=3),
        ("kernels.combine.kernel",),
    ),
    "fold-of-segments": (
        lambda sim: fixed_splits.test_against_oracle(sim, fixed_splits.ORACLE_CASES[0]),
        ("kernels.reduce_splits.kernel",),
    ),
    "rows-of-pages": (
        lambda sim: page_sizes.test_against_oracle(sim, page_sizes.ROWS_OF_PAGES),
        (FORWARD,),
    ),
    "bits-of-a-choice": (
        lambda sim: test_selected_sim.test_bits(sim, QueryTiles(8, 4), 32, "int32"),
        ("mask_prep.selected_bits_kernel.kernel",),
    ),
    "append": (
        lambda sim: test_append_sim.test_random_calls(sim, 0),
        ("kernels.append_kv.kernel",),
    ),
    "token-lists": (
        lambda sim: test_query_lists_sim.test_draws(sim, 3),
        tuple(
            f"mask_prep.query_lists_kernel.{name}"
            for name in ("count", "add_up", "weigh", "cut", "fill")
        ),
    ),
    "queries-of-token-lists": (
        lambda sim: patched(by_query_lists.test_several_segments, sim, 40),
        (BACKWARD,),
    ),
    "queries-of-token-lists-of-wide-heads": (
        lambda sim: token_mods.test_wide_heads(sim, "mask_mod", (6, 2, 2)),
        (BACKWARD,),
    ),
    "gathered-entries": (
        lambda sim: gathered.test_entries_of_the_only_query(sim, 4, torch.int32, 64, 16),
        (FORWARD,),
    ),
    "queries-of-token-lists-with-mods": (
        lambda sim: token_mods.test_modified_scores(sim, "t5", (12, 1, 1), 128, True),
        (BACKWARD,),
    ),
    "keys-in-16-bits": (
        lambda sim: patched(widened.test_the_bits_of_16, sim, widened.CASES[0]),
        ("kernels.dequantise.kernel",),
    ),
    "difference-tables": (
        lambda sim: patched(tables.test_forward, sim, *tables.CASES[1]),
        ("mods.difference_tables_kernel.kernel",),
    ),
    "sums-of-differences": (
        lambda sim: patched(tables.test_backward, sim, *tables.GRID, True),
        (BACKWARD,),
    ),
    "short-sequences": (
        lambda sim: short.test_against_oracle(sim, short.PLAIN_CASES[1], (SEED,)),
        ("sm90.flash_bwd_short.kernel",),
    ),
    "key-tiles-of-short-sequences": (
        lambda sim: short.test_several_key_tiles(sim, short.ENTRY_CASES[2], (SEED,)),
        ("sm90.flash_bwd_entries.kernel",),
    ),
    "gains-of-heads": (
        lambda sim: aux_gradients.check(sim, Case("gain", 1, 70, 150, 2, 1), "far_gain", (SEED,)),
        (BACKWARD,),
    ),
    "sums-of-diagonals": (
        lambda sim: aux_order.test_against_oracle(sim, *aux_order.LINE_CASES[2]),
        (BACKWARD,),
    ),
    "entries-in-turn": (
        lambda sim: patched(shared_sums.test_entries_of_a_head_take_turns, sim, True),
        (BACKWARD, "sm90.flash_bwd_shared.kernel"),
    ),
    "shared-sums": (
        lambda sim: shared_sums.test_against_oracle(sim, *shared_sums.SHARED_CASES[3]),
        ("sm90.flash_bwd_shared.kernel",),
    ),
    "block-scan": (
        lambda sim: test_block_scan_sim.test_lists(sim, "causal", True),
        ("mask_prep.block_scan_kernel.examine_blocks", "mask_prep.block_scan_kernel.make_lists"),
    ),
    "ordered-lists": (
        lambda sim: test_block_lists_sim.test_lists_and_bits(sim, (1, 2, 3, 32), True, False),
        ("mask_prep.block_lists_kernel.kernel",),
    ),
    "key-block-bounds": (
        lambda sim: test_column_bounds_sim.test_packed(sim, (64, 0, 80, 112, 1), 64),
        ("mask_prep.column_bounds_kernel.kernel",),
    ),
    "document-split": (
        lambda sim: test_document_split_sim.test_as_torch_finds_them(sim, "causal_document", 2),
        ("mask_prep.documents_kernel.find", "mask_prep.documents_kernel.split"),
    ),
    "store-for-queries": (
        lambda sim: mask_bits.test_states_of_tiles(
            sim, mask_bits.fwd_bits_plan, 64, (192, 128), True
        ),
        ("mask_prep.mask_bits_kernel.kernel",),
    ),
    "store-for-keys": (
        lambda sim: mask_bits.test_states_of_tiles(
            sim, mask_bits.bwd_bits_plan, 64, (128, 128), True
        ),
        ("mask_prep.mask_bits_kernel.kernel",),
    ),
    "store-by-documents": (
        lambda sim: test_document_bits_sim.test_states_of_the_tiles_of_documents(
            sim, "forward", 64, (192, 128), 2
        ),
        (
            *(
                "mask_prep.mask_bits_documents_kernel.clear",
                "mask_prep.mask_bits_documents_kernel.widen",
            ),
            *("mask_prep.documents_kernel.find", "mask_prep.documents_kernel.split"),
            *("mask_prep.mask_bits_varlen_kernel.number", "mask_prep.mask_bits_varlen_kernel.fill"),
            "mask_prep.mask_bits_varlen_kernel.pick",
        ),
    ),
}


@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("name", OTHERS)
def test_others(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run, kernels = OTHERS[name]
    with_each_role_slow(simulator, monkeypatch, kernels, partial(run, simulator))


# In place of those of OTHERS every day: the same with half of the work.
SHORTER: dict[str, Callable[[ModuleType], None]] = {
    "wide-backward": lambda sim: simulated_backward.run_sim(
        sim, make_inputs(wide_backward.SLOW_HEAD), (SEED,), wide_backward.LAUNCHES
    )
}


def class_of(kernel: str) -> str:
    """The module of a kernel, which has one class of kernels."""
    return kernel.rpartition(".")[0]


def classes() -> dict[str, list[str]]:
    """Classes of kernels but for attention, which the cases above have: names in OTHERS."""
    found: dict[str, list[str]] = {}
    for name, (_, kernels) in OTHERS.items():
        for told in dict.fromkeys(map(class_of, kernels)):
            if told not in (class_of(FORWARD), class_of(BACKWARD)):
                found.setdefault(told, []).append(name)
    return found


@pytest.mark.daily(len(classes()))
@pytest.mark.usefixtures("documents_packed")
@pytest.mark.parametrize("of_class", classes())
def test_each_class_of_kernels(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, of_class: str
) -> None:
    """Each day, by one of its cases, run with a warp and with a set of its warps slow."""
    turn, names = drawn_share.seed() or 0, classes()[of_class]
    name = names[turn % len(names)]
    run, kernels = OTHERS[name]
    run = SHORTER.get(name, run)
    own = [kernel for kernel in kernels if class_of(kernel) == of_class]
    each = turn // len(names)
    with_each_role_slow(simulator, monkeypatch, own, partial(run, simulator), each, is_short=True)
    assert {class_of(kernel) for kernel in launched(simulator)} >= {of_class}


def test_no_kernel_is_left_out() -> None:
    others = (kernel for _, kernels in OTHERS.values() for kernel in kernels)
    of_blackwell = {test_slow_roles_sm100_sim.FORWARD, test_slow_roles_sm100_sim.BACKWARD}
    known = {FORWARD, BACKWARD, ZERO_PADDING, *others} | of_blackwell
    assert known == kernels_of_package()
    attention = {class_of(x) for x in (FORWARD, BACKWARD, *of_blackwell)}
    assert {*classes()} | attention == {class_of(x) for x in known}
