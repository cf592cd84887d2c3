"""Masks beside cudnn.flex_attention: definitions, row intervals, the peer and the bars. All rows
here are made up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from dsl_masks import visible_by_mask_mod
from small_cases import ODD, dense, masked, small
from test_bench_everyday import bar_of, made_up

from bench import cudnn_cases, flops, masks, peers, prep, report, row_intervals, run
from bench.cases import CASES, BenchCase, make_tensors
from bench.masks import Draw

WIDTH = cudnn_cases.WIDTHS[0]
# Seven nodes, and documents of a context and targets.
NODES = (40, 31, 27, 50, 18, 45, 33)
PARENTS = {"tree_bfs": (None, 0, 0, 1, 1, 2, 2), "tree_dfs": (None, 0, 1, 1, 0, 4, 4)}
PARTS = ((60, 41), (70, 73))


def static(mask: str, **fields: Any) -> BenchCase:
    """Two sequences of 244 tokens."""
    documents = {"hstu": PARTS}.get(mask, tuple((t,) for t in NODES))
    form = "mask_mod" if mask in masks.BEYOND_COLUMNS else "columns"
    window = 25 if mask.endswith("window") else None
    options = {"form": form, "draw": Draw(documents), "window": window, "tokens": 488}
    return small(mask, 244, **(options | fields))


def by_hand(mask: str) -> np.ndarray:
    """In words, pair by pair."""
    n = sum(NODES)
    node = [i for i, length in enumerate(NODES) for _ in range(length)]
    part = [(d, p) for d, doc in enumerate(PARTS) for p, t in enumerate(doc) for _ in range(t)]
    spread = [int((i + 0.5) * n / 8) for i in range(8)]

    def is_above(upper: int, lower: int | None) -> bool:
        while lower is not None and lower != upper:
            lower = PARENTS[mask][lower]
        return lower == upper

    rules = {
        "sink_window": lambda q, k: k <= q and (q - k <= 25 or k in (0, 1, 2, 3)),
        "tree_dfs": lambda q, k: k <= q and is_above(node[k], node[q]),
        "tree_bfs": lambda q, k: k <= q and is_above(node[k], node[q]),
        "longformer_window": lambda q, k: abs(q - k) <= 25 or q in spread or k in spread,
        "hstu": lambda q, k: k <= q and part[q][0] == part[k][0] and (part[k][1] == 0 or k == q),
    }
    return np.array([[rules[mask](q, k) for k in range(n)] for q in range(n)])


def of_endpoints(table: np.ndarray, n: int) -> np.ndarray:
    """What cuDNN documents: [0, F0), [F1, F2) and so on."""
    assert len(table) % 2 == 1 and (np.diff(table, axis=0) >= 0).all()
    keys, seen = np.arange(n), np.arange(n) < table[0][:, None]
    for begin, end in zip(table[1::2], table[2::2], strict=True):
        seen |= (begin[:, None] <= keys) & (keys < end[:, None])
    return seen


@pytest.mark.parametrize("mask", masks.STATIC_MASKS)
def test_static_masks_are_what_they_are_in_words(mask: str) -> None:
    case = static(mask)
    whole, seen = case.mask_of(case.n), dense(case)
    assert np.array_equal(seen, by_hand(mask))
    rows = np.arange(case.n)[:, None, None]
    for (begins, ends), visible in ((whole.visible_rows(), True), (whole.hidden_rows(), False)):
        inside = ((begins <= rows) & (rows < ends)).any(axis=2)
        assert np.array_equal(inside, seen if visible else ~seen)
    assert (whole.hidden.shape[1] > 4) == (mask in masks.BEYOND_COLUMNS)
    tiles = [seen[i : i + 128, j : j + 128].any() for i in (0, 128) for j in (0, 128)]
    assert flops.tile_counts(case)[0] == 2 * sum(tiles)
    assert np.array_equal(of_endpoints(row_intervals.endpoints(whole), case.n), seen)


def test_a_tree_is_complete_and_columns_hold_what_they_can() -> None:
    with pytest.raises(ValueError, match="no complete binary tree has 6 nodes"):
        masks.make_mask("tree_dfs", 60, None, Draw(((10,),) * 6))
    with pytest.raises(ValueError, match="column intervals do not hold mask='tree_bfs'"):
        static("tree_bfs", form="columns")


@pytest.mark.parametrize("mask", masks.MASKS)
def test_row_intervals_of_the_papers_masks(mask: str) -> None:
    whole = masked(mask).mask_of(ODD)
    if mask in cudnn_cases.NO_ROW_INTERVALS:
        with pytest.raises(ValueError, match="ranges of keys a query"):
            row_intervals.endpoints(whole)
        return
    table = row_intervals.endpoints(whole)
    assert np.array_equal(of_endpoints(table, ODD), dense(masked(mask)))
    ranges = {"full": 1, "causal": 1, "prefix_lm_causal": 1, "qk_sparse": 1, "share_question": 5}
    assert len(table) == ranges.get(mask, 3)


def test_row_intervals_of_packed_sequences_count_from_their_own_first_key() -> None:
    lengths = (5, 130, 1)
    case = small("varlen_causal", 130, tokens=136, doc_lengths=lengths)
    table = row_intervals.case_endpoints(case)
    assert table.dtype == np.int32
    assert table.tolist() == [[q + 1 for length in lengths for q in range(length)]]


def test_mask_mods_of_static_masks_in_the_dsl() -> None:
    for mask in masks.BEYOND_COLUMNS:
        found = visible_by_mask_mod(static(mask).mask_of(244))
        assert np.array_equal(found, by_hand(mask)), mask


def test_cases_of_the_table() -> None:
    names = cudnn_cases.table_names()
    assert len(names) == len(set(names)) and set(names) <= set(CASES)
    assert {name for name in CASES if "cudnn-" in name} == set(names)
    for name in names:
        case = CASES[name]
        whole = case.kind == "prep"
        assert case.tokens == (case.n if whole else cudnn_cases.TOKENS)
        assert case.heads * case.d_v == cudnn_cases.HIDDEN
        assert (case.kind == "backward") == name.startswith("bwd-")
    assert len(CASES["cudnn-tree_dfs-d192v128-32k"].draw.documents) == 127  # type: ignore[union-attr]
    documents = CASES["cudnn-document_causal-d64-32k"].draw
    assert documents and all(4096 <= length <= 16384 for (length,) in documents.documents)
    assert CASES["cudnn-local-d128-8k"].window == 512
    assert CASES["cudnn-sliding_window-d128-32k"].window == 2048
    assert CASES["bwd-cudnn-share_question-d128-8k-kv4"].heads_kv == 4
    args = run.parse(["--table", "cudnn"])
    assert args.names == names and args.peers == ("ours", "cudnn_flex") and args.resume


class Plan:
    """Stands for cuDNN's: computes by torch what the plan was made of."""

    def __init__(self, told: torch.Tensor, q: torch.Tensor, *rest: Any, **options: Any) -> None:
        self.told, self.options = told, options
        n = q.shape[1]
        seen = of_endpoints(told[0, :, :n].numpy(), n)
        self.hidden = torch.from_numpy(~seen)

    def debug_snapshot(self) -> dict[str, Any]:
        return {"forward": {"blocks": self.told[0, 0]}, "cu_seqlens_q": None, "metadata": self}


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask_plan: Plan, return_lse: bool = False
) -> Any:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(mask_plan.hidden, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> peers.CudnnFlexPeer:
    """The peer over a package that stands for cuDNN's."""
    (tmp_path / "cudnn_stub" / "flex_attention").mkdir(parents=True)
    (tmp_path / "cudnn_stub" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("cudnn.flex_attention")
    module.create_mask_plan, module.flex_attn_func = Plan, attend  # type: ignore[attr-defined]
    for name in ("cudnn", "cudnn_stub"):
        monkeypatch.setitem(sys.modules, f"{name}.flex_attention", module)
    return peers.CudnnFlexPeer("cudnn_flex", "cudnn_stub")


@pytest.mark.parametrize("mask", ["longformer_window", "tree_bfs", "hstu"])
def test_the_peer_computes_the_case(cudnn: peers.CudnnFlexPeer, mask: str) -> None:
    from bench import gate

    case = static(mask)
    tensors = make_tensors(case, "cpu", 2)
    assert cudnn.supports(case) is None
    out, lse = cudnn.unpack(cudnn.prepare(case, tensors)())
    truth = gate.reference(case, tensors, seed=4, count=16)
    assert gate.check(truth, out, lse, rule=gate.RULE).ok
    wrong = gate.reference(replace(static("sink_window"), tokens=488), tensors, seed=4, count=16)
    assert not gate.check(wrong, out, lse, rule=gate.PEER_RULE).ok
    backward = replace(case, kind="backward")
    # what the forward saved is not what autograd reads
    saved = peers.Saved(out, lse, torch.randn_like(out))
    tensors = tensors._replace(saved=saved)
    found = cudnn.prepare(backward, tensors)()
    assert gate.check_gradients(
        gate.gradient_reference(backward, tensors, 4), found, rule=gate.PEER_RULE
    ).ok


def test_the_plan_is_told_lengths_and_both_directions(cudnn: peers.CudnnFlexPeer) -> None:
    case = small("varlen_causal", 200, tokens=400, doc_lengths=(200, 200))
    tensors = make_tensors(case, "cpu", 0)
    told = peers.cudnn_plan_call(case, tensors, build_backward=True).keywords  # type: ignore
    assert told["build_backward"] and told["max_seqlen_q"] == 200
    assert told["cu_seqlens_k"].tolist() == [0, 200, 400]
    made = prep.prepare_cudnn_flex(static("hstu", kind="prep", tokens=244), "cpu")
    plan = made.call()
    assert made.size(plan) == 4 * plan.told.numel() + 4 * 244


def test_the_peer_says_what_it_cannot_do(cudnn: peers.CudnnFlexPeer) -> None:
    for case, text in (
        (masked("random_eviction"), "hundreds of ranges of keys"),
        (small("causal", kind="host"), "kind attention, backward and prep only"),
        (small("causal", score_mod="alibi"), "no score_mod"),
        (small("causal", sink=True), "no sink"),
        (small("causal", 300, n_k=400), "other keys than queries"),
        (small("causal", d=256, d_v=128), "no head dimensions 256/128"),
        (small("causal", kind="backward", deterministic=True), "no order of sums"),
    ):
        assert text in (cudnn.supports(case) or "")
    assert cudnn.supports(small("causal", d=192, d_v=128)) is None
    # a package of that name without the module, and none at all
    for package in ("small_cases", "no_such_package"):
        absent = peers.CudnnFlexPeer("cudnn_flex", package)
        assert absent.supports(small()) == f"{package}.flex_attention is not installed"


def test_bars_of_masks_beside_cudnn() -> None:
    names = cudnn_cases.compared_names(WIDTH, "8k", is_backward=False)
    rows = [row for name in names[:2] for row in made_up("a", name, ours=1.0, cudnn_flex=1.2)]
    bar = bar_of(names[0], *rows)
    assert (bar.figure, bar.bar, bar.verdict()) == (pytest.approx(1.2), 1.10, "met")
    mean = bar_of("cudnn mean d128 8k", *rows)
    assert mean.figure == pytest.approx(1.2) and "2 of 18 masks" in mean.remark
    backward = made_up("a", f"bwd-{names[0]}", ours=1.0, cudnn_flex=1.04)
    assert bar_of(f"bwd-{names[0]}", *backward).verdict() == "short"
    quick = made_up("a", names[2], ours=0.1, cudnn_flex=0.4)
    assert bar_of(names[2], *quick).verdict() == "not measured"
    short = made_up("a", names[2], "short", ours=0.2, cudnn_flex=0.3)
    assert "bursts of ten calls" in bar_of(names[2], *quick, *short).remark
    plan = cudnn_cases.plan_name("hstu", "8k")
    plans = made_up("a", plan, "wall", ours=100.0, cudnn_flex=2000.0)
    bar = bar_of(plan, *plans)
    assert bar.figure == pytest.approx(0.05) and bar.remark.startswith("us: 100 / 2000, run a")


def test_the_table_of_masks_beside_cudnn() -> None:
    names = cudnn_cases.compared_names(WIDTH, "8k", is_backward=False)
    ratios = zip(names, (1.2, 1.05), strict=False)
    rows = [row for name, x in ratios for row in made_up("a", name, ours=1.0, cudnn_flex=x)]
    *_, line = report.cudnn_table(rows).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["forward, d128, 8k", "1.12", "1.05", "1.2", "1.10", "1 of 2"]
    assert report.cudnn_table([]) == "No row."
