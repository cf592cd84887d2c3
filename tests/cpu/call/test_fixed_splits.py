"""Sums cut at fixed keys: what is refused, and what depends on head dimensions alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutlass import BFloat16
from planned import forward_call, planned
from torch import Tensor

import flash_mask_cute
from flash_mask_cute import builders, explain, interface
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.execution_plan import ExecutionPlan
from flash_mask_cute.call.fixed_splits import MOST_BYTES
from flash_mask_cute.call.prepare import prepare_fwd
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, PARALLEL_SPLITS, SEQUENTIAL_SPLITS
from flash_mask_cute.interface import _flash_attn_fwd
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.runtime.target import Target
from flash_mask_cute.sm90.flash_fwd_traits import FwdTraits

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

HOPPER = Target("sm_90a", num_sms=132)
FUNCTIONS = (
    flash_mask_cute.flash_attn_func,
    flash_mask_cute.flash_attn_varlen_func,
    flash_mask_cute.flash_attn_with_kvcache,
    _flash_attn_fwd,
)
HEAD_DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def below(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return k <= q


def nearer(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score - 1.0


def plan_of(
    queries: int,
    keys: int,
    heads: tuple[int, int] = (8, 2),
    batch: int = 1,
    dims: tuple[int, int] = (128, 128),
    split: int | None = 4096,
    target: Target = HOPPER,
    **keywords: Any,
) -> ExecutionPlan:
    # of extents only, and no memory
    q, k, v = (
        torch.empty(1, dtype=torch.bfloat16).expand(batch, rows, of, d)
        for rows, of, d in ((queries, heads[0], dims[0]), *((keys, heads[1], d) for d in dims))
    )
    return planned(forward_call(q, k, v, seqlen_k_per_split=split, **keywords), target)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"seqlen_k_per_split": 4096.0}, TypeError, "seqlen_k_per_split must be an int.*4096.0"),
        ({"seqlen_k_per_split": True}, TypeError, "seqlen_k_per_split must be an int.*True"),
        ({"seqlen_k_per_split": "4096"}, TypeError, "seqlen_k_per_split must be an int.*'4096'"),
        ({"seqlen_k_per_split": 511}, ValueError, "seqlen_k_per_split.*at least 512, got 511"),
        ({"seqlen_k_per_split": 0}, ValueError, "seqlen_k_per_split.*at least 512, got 0"),
        ({"seqlen_k_per_split": -4096}, ValueError, "seqlen_k_per_split.*got -4096"),
        ({"seqlen_k_per_split": 512, "num_splits": 2}, ValueError,
         "num_splits must be 0 or at least 3 .*seqlen_k_per_split=512.* 1100 keys.*got 2"),
        ({"seqlen_k_per_split": 512, "config": {"tile_n": 64}}, ValueError,
         "config must not set tile_n.*got tile_n=64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("records", [False, True])
def test_refusals(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    error: type[Exception],
    said: str,
    records: bool,
) -> None:
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 1100, 1100))
    if records and function is not _flash_attn_fwd:
        q.requires_grad_()
    if function is not _flash_attn_fwd and "config" in keywords:
        keywords = keywords | {"config": (keywords["config"], None)}
    with pytest.raises(error, match=said):
        function(q, k, v, **keywords)


def test_a_prepared_call_is_not_found_by_a_number_of_another_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (torch.randn(1, n, 2, 16) for n in (1, 1100, 1100))
    # as on a GPU, where prepared calls are kept
    monkeypatch.setattr(interface, "may_be_kept", lambda prepared: True)
    _flash_attn_fwd(q, k, v, seqlen_k_per_split=512)
    _flash_attn_fwd(q, k, v, seqlen_k_per_split=512)
    wrong: Any = 512.0
    with pytest.raises(TypeError, match="seqlen_k_per_split must be an int"):
        _flash_attn_fwd(q, k, v, seqlen_k_per_split=wrong)


def test_nothing_is_written_before_a_refusal() -> None:
    cache, new = torch.zeros(2, 1, 1100, 2, 16), torch.ones(3, 1, 1, 2, 16)
    with pytest.raises(ValueError, match="at least 512, got 100"):
        flash_mask_cute.flash_attn_with_kvcache(
            new[0], *cache, *new[1:], cache_seqlens=7, seqlen_k_per_split=100
        )
    assert not cache.any()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_is_refused_by_name(arch: str) -> None:
    with pytest.raises(NotImplementedError, match="seqlen_k_per_split.*Blackwell, got 4096"):
        plan_of(1, 8192, target=Target(arch, num_sms=148))


def test_flex_attention_does_not_take_it() -> None:
    q: Tensor = torch.randn(1, 2, 16, 16)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="seqlen_k_per_split"):
        flash_mask_cute.flex_attention(q, q, q, seqlen_k_per_split=512)  # type: ignore[call-overload]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="seqlen_k_per_split"):
        flash_mask_cute.flex_attention(q, q, q, kernel_options={"seqlen_k_per_split": 512})


@pytest.mark.parametrize("config", [{"tile_m": 192}, {"num_stages": 4}])
def test_a_config_for_which_keys_of_a_tile_do_not_fit(config: dict[str, int]) -> None:
    """By default a tile would get fewer keys, and other bits."""
    assert plan_of(1000, 8192, split=None, config=config).fwd_choice.tiles.tile_n < 128
    with pytest.raises(ValueError, match="cannot run for head_dim=128"):
        plan_of(1000, 8192, config=config)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_no_cuts_by_default(function: Callable[..., Any]) -> None:
    parameter = inspect.signature(function).parameters["seqlen_k_per_split"]
    assert parameter.default is None and parameter.kind is parameter.KEYWORD_ONLY


# -- what bits depend on -------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "decode": {"queries": 1, "keys": 20000},
    "decode_of_many": {"queries": 1, "keys": 20000, "batch": 256, "heads": (64, 8)},
    "verify": {"queries": 7, "keys": 20000, "causal": True},
    "chunk": {"queries": 500, "keys": 20000, "causal": True},
    "whole": {"queries": 20000, "keys": 20000, "causal": True, "heads": (32, 8)},
    "longer": {"queries": 65536, "keys": 65536, "causal": True, "heads": (32, 8)},
    "full": {"queries": 16896, "keys": 16896, "heads": (32, 8)},
    "short": {"queries": 600, "keys": 600, "causal": True},
    "window": {"queries": 8192, "keys": 8192, "window_size_left": 127, "causal": True},
    "softcap": {"queries": 16384, "keys": 16384, "softcap": 30.0, "causal": True},
    "packed": {"queries": 20000, "keys": 20000, "causal": True, "heads": (8, 1), "pack_gqa": True},
}
MODS = {"plain": {}, "mask_mod": {"mask_mod": below}, "score_mod": {"score_mod": nearer}}


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("mod", MODS)
def test_tiles_whose_sums_are_the_same(dims: tuple[int, int], mod: str) -> None:
    """Keys of a tile, and the way to find maxima, follow from head dimensions and mods alone."""
    found = set()
    for call in CALLS.values():
        run = plan_of(**call | MODS[mod], dims=dims)
        tiles = run.fwd_choice.tiles
        traits = FwdTraits(BFloat16, *dims, tiles.tile_m, tiles.tile_n, packed_heads=1)
        found.add((tiles.tile_n, traits.keeps_scores, traits.polynomial))
        assert run.problem.is_ordered and run.fixed_splits is not None
        assert run.fixed_splits.keys == 4096 // tiles.tile_n * tiles.tile_n
    assert len(found) == 1


@pytest.mark.parametrize(("dims", "warpgroup"), [((64, 64), True), ((128, 128), False)])
def test_mask_warps_that_would_change_how_maxima_are_found(
    dims: tuple[int, int], warpgroup: bool
) -> None:
    from flash_mask_cute.sm90.flash_fwd import FlashAttentionForwardSm90

    for split in (None, ONE_FIXED_SPLIT, SEQUENTIAL_SPLITS):
        kernel = FlashAttentionForwardSm90(BFloat16, *dims, mask_mod=below, split=split)
        assert kernel.traits.mask_warpgroup == (warpgroup or split is None)


def test_documents_are_not_sequences() -> None:
    """Their keys are counted from the start of the whole sequence."""
    rows = builders.causal_document([600, 1448]).startend_row_indices
    mask = ColumnMask(rows, causal=True, documents=True)
    whole = plan_of(2048, 2048, (2, 2), causal=True, startend_row_indices=mask, split=None)
    assert whole.instead
    cut = plan_of(2048, 2048, (2, 2), causal=True, startend_row_indices=mask)
    assert not cut.instead and cut.problem.is_ordered


# -- who computes fixed splits ---------------------------------------------------------------------


@pytest.mark.shares(18)
@pytest.mark.parametrize("queries", [1, 4, 64], ids="{}q".format)
@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("kind", "keys", "window"),
    [(ONE_FIXED_SPLIT, 80, None), (SEQUENTIAL_SPLITS, 4096, 100), (PARALLEL_SPLITS, 2048, None)],
    ids=["one", "in turn", "by fixed splits"],
)
def test_each_way_compiles(
    kind: str, keys: int, window: int | None, dtype: torch.dtype, in_pages: bool, queries: int
) -> None:
    q = torch.empty(1, dtype=torch.bfloat16).expand(2, queries, 4, 64)
    cache = torch.empty(2, keys, 2, 64, dtype=dtype)
    options: dict[str, Any] = {"seqused_k": torch.tensor([keys, 33], dtype=torch.int32)}
    if in_pages:
        cache = cache.view(-1, 16, 2, 64)
        options["page_table"] = torch.arange(len(cache), dtype=torch.int32).view(2, -1)
    if window is not None:
        options |= {"causal": True, "window_size_left": window}
    call = forward_call(q, cache, cache, seqlen_k_per_split=512, **options)
    assert planned(call, HOPPER).fixed_splits.kind == kind
    prepare_fwd(call, HOPPER)


def test_results_that_a_fold_of_others_does_not_have() -> None:
    """Who computes the splits of a call: plan rows with `cut-4096` and `cut-512`."""
    wide, low = torch.empty(1, 1, 8, 128), torch.empty(1, 8, 1)
    assert plan_of(1, 20000, max_scores=low).problem.split == SEQUENTIAL_SPLITS
    assert plan_of(1, 300, out=wide).problem.split == PARALLEL_SPLITS
    assert plan_of(1, 300).problem.split == ONE_FIXED_SPLIT
    with pytest.raises(NotImplementedError, match="out in .*max_scores"):
        plan_of(1, 300, out=wide, max_scores=low)
    # the launch counts key blocks in 32 bits
    longest = plan_of(1, 300, out=wide, split=1 << 60).fixed_splits
    assert longest is not None and longest.num_blocks < 1 << 31 and longest.number == 1


def test_scratch_is_bounded() -> None:
    for batch, keys in ((1, 131072), (8, 131072), (64, 131072), (8, 1 << 22)):
        run = plan_of(1, keys, (32, 8), batch, split=512)
        if run.problem.split == PARALLEL_SPLITS:
            assert run.splits is not None and run.splits.num_bytes <= MOST_BYTES
        else:
            assert run.fixed_splits is not None and run.splits is None
            shape = run.fixed_splits.memory_shape(run.fwd_choice.tiles, 128, 132)
            assert 4 * torch.Size(shape).numel() < 10 << 20
    assert plan_of(1, 1 << 22, (32, 8), 8, split=512).problem.split == SEQUENTIAL_SPLITS


def test_explain_says_where_sums_are_cut() -> None:
    q, k, v = (torch.zeros(1, n, 2, 192, dtype=torch.bfloat16) for n in (1, 9000, 9000))
    told = explain(q, k, v[..., :128], seqlen_k_per_split=4096, target="sm_90a").splits
    assert told.startswith("sums are cut at every 4032 keys, 3 fixed splits at most; ")


# -- with a graph, and on the CPU ----------------------------------------------------------------


def test_a_graph_keeps_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    found: list[tuple[int, int | None]] = []
    forward = interface.forward

    def recording(call: AttentionCall) -> Any:
        found.append((call.options.num_splits, call.options.seqlen_k_per_split))
        return forward(call)

    monkeypatch.setattr(interface, "forward", recording)
    q, k, v = (torch.randn(1, n, 2, 16) for n in (3, 1100, 1100))
    call = {"seqlen_k_per_split": 512, "causal": True}
    whole = flash_mask_cute.flash_attn_func(q, k, v, causal=True)
    for x in (q, q.clone().requires_grad_()):
        out = flash_mask_cute.flash_attn_func(x, k, v, **call)
        assert torch.equal(out, whole)
        if x.requires_grad:
            out.sum().backward()
    compiled = torch.compile(flash_mask_cute.flash_attn_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, **call), whole)
    out = compiled(q.clone().requires_grad_(), k, v, **call)
    assert torch.equal(out, whole)
    assert found[1:] == [(0, 512)] * 4


def test_the_cpu_needs_no_cuts() -> None:
    cache = torch.randn(2, 2, 1200, 1, 16, dtype=torch.float64)
    q, lengths = torch.randn(2, 1, 4, 16, dtype=torch.float64), torch.tensor([1100, 600]).int()
    one, cut = (
        flash_mask_cute.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=lengths, seqlen_k_per_split=keys, num_splits=1 - bool(keys)
        )
        for keys in (None, 512)
    )
    assert torch.equal(one, cut)
