"""The masks of the paper in bench/: definitions, columns, tiles, callables, and their peers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from dsl_masks import visible_by_mask_mod
from small_cases import ODD, dense, masked, small

from bench import flops, gate, masks, mods, peers
from bench.cases import CASES, BenchCase, make_tensors
from flash_mask_cute import flash_attn_func


def by_hand(case: BenchCase) -> np.ndarray:
    """The masks in words, key by key, from the draw alone."""
    n, (documents, dropped, _) = case.n, case.draw or masks.Draw(())
    tokens = [
        (d, p) for d, doc in enumerate(documents) for p, t in enumerate(doc) for _ in range(t)
    ]
    last = len(documents) - 1
    window = case.window or 0

    def drops(q: int, k: int) -> bool:
        return any(begin <= q < end and begin <= k < end for begin, end in dropped)

    rules = {
        "full": lambda q, k: True,
        "causal": lambda q, k: k <= q,
        "sliding_window": lambda q, k: q - window <= k <= q,
        "causal_document": lambda q, k: k <= q and tokens[q][0] == tokens[k][0],
        "document": lambda q, k: tokens[q][0] == tokens[k][0],
        "share_question": lambda q, k: (
            k <= q and tokens[q][0] == tokens[k][0] and tokens[k][1] in (0, tokens[q][1])
        ),
        "global_sliding_window": lambda q, k: abs(q - k) <= window or min(q, k) < 16,
        "causal_blockwise": lambda q, k: (
            k <= q and (tokens[q][0] == tokens[k][0] or tokens[q][0] == last)
        ),
        "prefix_lm_document": lambda q, k: (
            tokens[q][0] == tokens[k][0] and (k <= q or tokens[k][1] == 0)
        ),
        "prefix_lm_causal": lambda q, k: k <= q or k < n // 2,
        "qk_sparse": lambda q, k: k <= q and not drops(q, k),
    }
    rule = rules[case.mask]
    return np.array([[rule(q, k) for k in range(n)] for q in range(n)])


@pytest.mark.parametrize("mask", masks.MASKS)
def test_definitions_and_columns_of_masks(mask: str) -> None:
    case = masked(mask)
    whole, seen = case.mask_of(ODD), dense(case)
    if mask == "random_eviction":
        first_gone = seen.cumsum(axis=0).argmax(axis=0) + 1
        assert np.array_equal(
            seen, np.tri(ODD, dtype=bool) & (np.mgrid[:ODD, :ODD][0] < first_gone)
        )
        assert len(np.unique(first_gone)) > ODD // 3
    else:
        tiny = masked(mask, 101)
        assert np.array_equal(dense(tiny), by_hand(tiny))
    rows = np.arange(ODD)[:, None, None]
    for (begins, ends), visible in ((whole.visible_rows(), True), (whole.hidden_rows(), False)):
        inside = ((begins <= rows) & (rows < ends)).any(axis=2)
        assert np.array_equal(inside, seen if visible else ~seen)
    assert seen.any(axis=1).all()
    assert whole.hidden.shape[1] in ((1, 2) if whole.causal else (2, 4))


@pytest.mark.parametrize("tile", [(128, 128), (192, 128), (64, 80)])
@pytest.mark.parametrize("mask", masks.MASKS)
def test_tiles_and_block_lists(mask: str, tile: tuple[int, int]) -> None:
    case = masked(mask)
    seen, lists = dense(case), flops.block_lists(case.mask_of(ODD), *tile)
    visible = 0
    for i, begin in enumerate(range(0, ODD, tile[0])):
        full, part = [], []
        for j, left in enumerate(range(0, ODD, tile[1])):
            block = seen[begin : begin + tile[0], left : left + tile[1]]
            (full if block.all() else part if block.any() else []).append(j)
        visible += len(full) + len(part)
        for count, index, expected in ((*lists[:2], part), (*lists[2:], full)):
            assert count[i] == len(expected)
            assert index[i].tolist() == expected + [0] * (index.shape[1] - len(expected))
    by_key = flops.block_lists(case.mask_of(ODD), *tile, by_key=True)
    for forward, turned in ((lists[:2], by_key[:2]), (lists[2:], by_key[2:])):
        pairs = [
            {(i, j) for i, t in enumerate(c) for j in x[i, :t].tolist()}
            for c, x in (forward, turned)
        ]
        assert pairs[0] == {(i, j) for j, i in pairs[1]}
    if tile == (128, 128):
        assert flops.tile_counts(case) == (2 * visible, 2 * 36)


PAPER_TFLOP = {
    "full": (17.59, 70.37, 281.48),
    "causal": (8.93, 35.32, 140.88),
    "sliding_window": (1.33, 4.53, 17.31),
    "causal_document": (2.42, 3.68, 12.82),
    "document": (4.56, 5.77, 25.72),
    "share_question": (1.62, 2.30, 7.41),
    "global_sliding_window": (2.89, 9.29, 34.86),
    "causal_blockwise": (5.75, 8.94, 35.32),
    "prefix_lm_document": (2.53, 3.83, 13.39),
    "prefix_lm_causal": (11.06, 44.05, 175.99),
    "qk_sparse": (8.44, 34.09, 136.16),
    "random_eviction": (8.93, 35.32, 140.88),
}
DRAWN = {"causal_document", "document", "share_question", "causal_blockwise", "prefix_lm_document"}


@pytest.mark.parametrize("mask", masks.MASKS)
def test_operations_are_those_of_the_paper(mask: str) -> None:
    for size, published in zip(("8k", "32k", "128k"), PAPER_TFLOP[mask], strict=True):
        case = CASES[f"mask-d128-{size}-{mask}"]
        tolerance = 0.04 if mask in DRAWN else 0.008 if mask == "random_eviction" else 0.003
        assert flops.attention_flops(case) / 1e12 == pytest.approx(published, rel=tolerance)


def test_drawn_documents() -> None:
    for n, (low, high) in masks.DOCUMENT_COUNTS.items():
        for mask in ("document", "share_question"):
            documents = masks.paper_draw(n, mask).documents
            assert low <= len(documents) <= high and sum(map(sum, documents)) == n
            assert all(3 <= len(parts) <= 7 and min(parts) > 0 for parts in documents)
    for seed in range(50):
        documents = masks.draw_documents(300, (2, 20), seed, spread=1.0)
        assert sum(map(sum, documents)) == 300 and min(map(min, documents)) > 0
        assert documents == masks.draw_documents(300, (2, 20), seed, spread=1.0)


def test_mask_mods_in_the_dsl() -> None:
    for mask in masks.MASKS:
        case = masked(mask, 101)
        assert np.array_equal(visible_by_mask_mod(case.mask_of(101)), dense(case)), mask


@pytest.mark.parametrize("mod", ["alibi", "t5_bias", "softcap"])
def test_score_mods_in_the_dsl(mod: str) -> None:
    @cute.jit
    def fill(scores: cute.Tensor, table: cute.Tensor, mod: cutlass.Constexpr) -> None:
        for h in range(scores.shape[0]):
            for q in range(scores.shape[1]):
                for k in range(scores.shape[2]):
                    score = cute.full((1,), scores[h, q, k], cutlass.Float32)
                    at = [cute.full((1,), i, cutlass.Int32) for i in (0, h, q, k)]
                    changed = mod(score, at[0], at[1], at[2], at[3], [table])
                    scores[h, q, k] = cutlass.Float32(changed[0])

    case = small("causal", 20, score_mod=mod)
    scores = 20 * torch.randn(4, 20, 20, generator=torch.Generator().manual_seed(1))
    out = scores.clone()
    tables = mods.score_tables(case, torch.device("cpu"))
    view = from_dlpack(next(iter(tables.values()), out))
    fill(from_dlpack(out), view, mods.cute_score_mod(case, tuple(tables)))
    h, q, k = torch.meshgrid(*(torch.arange(size) for size in out.shape), indexing="ij")
    distance = (q - k).abs()
    expected = {
        "alibi": scores - 2.0 ** (-2.0 * (h + 1)) * distance,
        "t5_bias": scores + tables.get("bias", torch.zeros(4, 20))[h, distance],
        "softcap": 30 * torch.tanh(scores / 30),
    }[mod]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    language = mods.torch_language(tables, torch.float32)
    exact = mods.score_definition(case)(scores, h, q, k, language)
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)


def test_cute_peer_tells_masks_and_mods(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(*tensors: torch.Tensor, block_size: tuple[int, int]) -> object:
        return ([tuple(t.shape) for t in tensors], block_size)

    module = SimpleNamespace(
        _flash_attn_fwd=lambda q, k, v, **options: options,
        ColumnMask=lambda indices, causal, documents: (indices, causal, documents),
        BlockSparseTensorsTorch=lists,
    )
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    ours = peers.CutePeer("ours", "fake", None, "lists")
    theirs = peers.CutePeer("theirs", "fake", "mask_mod", "their_lists", 192)
    case = masked("global_sliding_window")
    tensors = make_tensors(case, "cpu", 0)
    peers.column_mask.cache_clear()
    told = ours.prepare(case, tensors)()
    peers.column_mask.cache_clear()
    (indices, causal, documents) = told.pop("startend_row_indices")
    assert told == {"return_lse": True, "causal": False} and causal is documents is False
    assert indices.shape == (1, 1, ODD, 4) and indices.dtype == torch.int32
    case = masked("document")
    tensors = make_tensors(case, "cpu", 0)
    told = theirs.prepare(case, tensors)()
    assert told["their_lists"] == ([(1, 1, 4), (1, 1, 4, 6)] * 2, (192, 128))
    assert [t.shape for t in told["aux_tensors"]] == [(ODD,)]
    told = ours.prepare(replace(case, form="mask_mod"), tensors)()
    assert told["lists"] == ([(1, 1, 6), (1, 1, 6, 6)] * 2, (128, 128))
    assert told.keys() == {"return_lse", "mask_mod", "lists", "aux_tensors"}
    biased = small("causal", score_mod="t5_bias")
    told = ours.prepare(biased, make_tensors(biased, "cpu", 0))()
    assert told["causal"] and callable(told["score_mod"]) and len(told["aux_tensors"]) == 1


@pytest.mark.parametrize("name", ["causal_document", "qk_sparse"])
def test_masks_of_documents_are_told_to_the_public_function(name: str) -> None:
    case = masked(name, 600)
    call = peers.PEERS["ours"].prepare(case, make_tensors(case, "cpu", 0))
    is_public = name == "causal_document"
    assert isinstance(call, partial) and (call.func is flash_attn_func) == is_public
    assert call.keywords["startend_row_indices"].documents == is_public


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_peers_and_the_gate_agree_on_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    rights = [masked("share_question", 300), masked("global_sliding_window", 300)]
    rights += [small("causal", 300, score_mod=mod) for mod in ("alibi", "t5_bias", "softcap")]
    for case in rights:
        tensors = make_tensors(case, "cpu", 2)
        truth = gate.reference(case, tensors, seed=4)
        for name in ("flex", "sdpa_dense"):
            peer = peers.PEERS[name]
            if not peer.supports(case):
                out, lse = peer.unpack(peer.prepare(case, tensors)())
                assert gate.check(truth, out, lse, rule=gate.RULE).ok
                for other in (masked("causal_document", 300), small("causal", 300)):
                    wrong = gate.reference(replace(other, tokens=case.tokens), tensors, seed=4)
                    assert not gate.check(wrong, out, lse, rule=gate.PEER_RULE).ok
