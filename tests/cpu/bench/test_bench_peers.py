"""Peers: what they are told, that they compute the case, what they say they cannot do."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from small_cases import ODD, SMALL, masked, small
from test_bench_cases import of_endpoints, static

from bench import DETERMINISTIC, cases, flops, gate, measure, mods, peers, prep
from bench.cases import CASES, BenchCase, make_tensors
from flash_mask_cute import flash_attn_func

NATIVE, BY_MOD = (peers.CutePeer("x", "bench", form, "lists") for form in ("native", "mask_mod"))


@pytest.mark.parametrize(
    ("peer", "case", "text"),
    [
        ("cudnn", "d128-window-8k", "no sliding_window mask"),
        ("cudnn", "mod-d128-8k-alibi", "no score_mod"),
        ("sdpa_dense", "bwd-mask-d128-32k-document", "up to 8192 tokens"),
        ("sdpa_dense", "mask-d128-8k-document", None),
        ("flex", "d128-varlen-kv8", "varlen"),
        ("cudnn", "d128-varlen-kv8", "no cu_seqlens"),
        ("cudnn", "host-128", "kind attention and backward only"),
        ("flex", "memory-bwd-8k-causal_document", "the memory of a backward"),
        ("ours", "bwd-det-d128-8k-document", None),
        (DETERMINISTIC, "bwd-det-d128-8k-document", None),
        (DETERMINISTIC, "bwd-d128-full-8k", "no order of sums"),
        (NATIVE, "mask-d64-8k-sliding_window", None),
        (NATIVE, "mask-d64-8k-document", "no flag means document"),
        (NATIVE, "bwd-det-d128-8k-causal", "ours is compared with itself"),
        (BY_MOD, "mask-d64-8k-document", None),
        (BY_MOD, "mask-d64-8k-causal", "causal needs no mask_mod"),
        (BY_MOD, "bwd-mod-d128-8k-document", None),
        (BY_MOD, "bwd-mask-d64-8k-document", "where ours is told so"),
        (replace(NATIVE, package="no_such_package.cute"), "host-128", "is not installed"),
    ],
)
def test_peers_say_what_they_cannot_do(
    peer: str | peers.CutePeer, case: str, text: str | None
) -> None:
    found = (peers.PEERS[peer] if isinstance(peer, str) else peer).supports(CASES[case])
    assert found is None if text is None else text in (found or "")


def test_cute_peer_passes_the_whole_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(*tensors: torch.Tensor, block_size: tuple[int, int]) -> object:
        return [tuple(t.shape) for t in tensors], block_size, tensors[1]

    module = SimpleNamespace(
        _flash_attn_fwd=lambda q, k, v, **options: options,
        _flash_attn_bwd=lambda q, k, v, out, dout, lse, **options: options,
        ColumnMask=lambda indices, causal, documents: (indices, causal, documents),
        BlockSparseTensorsTorch=lists,
    )
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    ours = peers.CutePeer("ours", "fake", None, "lists")
    native = peers.CutePeer("theirs", "fake", "native", "lists")
    theirs = peers.CutePeer("theirs", "fake", "mask_mod", "their_lists", 192)

    def told(peer: peers.CutePeer, case: BenchCase) -> dict[str, Any]:
        tensors = make_tensors(case, "cpu", 0)
        if case.kind == "backward":
            with pytest.raises(ValueError, match="saved"):
                peer.prepare(case, tensors)
            tensors = tensors._replace(saved=cases.Saved(*tensors[:3]))
        options: dict[str, Any] = peer.prepare(case, tensors)()
        return options

    window = small("sliding_window", 256, window=16, softcap=20.0)
    expected = {"causal": True, "return_lse": True, "window_size_left": 16, "softcap": 20.0}
    assert told(ours, window) == expected
    packed = told(ours, SMALL[-1])
    assert packed["cu_seqlens_q"].tolist() == [0, 1, 130, 645, 773]
    assert packed["max_seqlen_q"] == packed["max_seqlen_k"] == 515
    peers.column_mask.cache_clear()
    columns = told(ours, masked("global_sliding_window"))
    peers.column_mask.cache_clear()
    indices, causal, documents = columns.pop("startend_row_indices")
    assert columns == {"return_lse": True, "causal": False} and causal is documents is False
    assert indices.shape == (1, 1, ODD, 4) and indices.dtype == torch.int32
    document = masked("document", form="mask_mod")
    assert told(theirs, document)["their_lists"][:2] == ([(1, 1, 4), (1, 1, 4, 6)] * 2, (192, 128))
    by_mod = told(ours, document)
    assert by_mod["lists"][:2] == ([(1, 1, 6), (1, 1, 6, 6)] * 2, (128, 128))
    assert by_mod.keys() == {"return_lse", "mask_mod", "lists", "aux_tensors"}
    biased = told(ours, small("causal", score_mod="t5_bias"))
    assert biased["causal"] and callable(biased["score_mod"]) and len(biased["aux_tensors"]) == 1
    # backwards: by the keys of flash-attn-4, and with a window by its two sides
    backward = replace(document, kind="backward")
    for peer, name, by_key in ((ours, "lists", False), (theirs, "their_lists", True)):
        shapes, block_size, index = told(peer, backward)[name]
        assert (shapes, block_size) == ([(1, 1, 6), (1, 1, 6, 6)] * 2, (128, 128))
        lists_of = flops.block_lists(backward.mask_of(ODD), by_key=by_key)
        assert np.array_equal(index[0, 0].numpy(), lists_of.partial_index)
    back = small("sliding_window", 256, window=16, kind="backward")
    sides = {"window_size_left": 16}
    assert told(ours, back) == {"causal": True, **sides}
    fixed = replace(ours, deterministic=True)
    assert told(fixed, back) == {"causal": True, **sides, "deterministic": True}
    assert told(native, back) == {"causal": False, **sides, "window_size_right": 0}


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


@pytest.mark.parametrize("name", ["causal_document", "qk_sparse"])
def test_masks_of_documents_are_told_to_the_public_function(name: str) -> None:
    case = masked(name, 600)
    call = peers.PEERS["ours"].prepare(case, make_tensors(case, "cpu", 0))
    is_public = name == "causal_document"
    assert isinstance(call, partial) and (call.func is flash_attn_func) == is_public
    assert call.keywords["startend_row_indices"].documents == is_public


def test_a_call_of_training_makes_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small("causal", 70, kind="host_train")
    told = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        told.append(options)
        return q * k.sum() + v.sum(), None  # and lse, as flash-attn-4 does

    module = SimpleNamespace(flash_attn_func=attention)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    tensors = make_tensors(case, "cpu", 0)
    with pytest.raises(ValueError, match="saved"):
        NATIVE.prepare(case, tensors)
    saved = cases.Saved(tensors.q, tensors.q, torch.ones_like(tensors.q))
    call = NATIVE.prepare(case, tensors._replace(saved=saved))
    assert not told
    assert [x.shape for x in call()] == [x.shape for x in tensors[:3]]
    call()
    assert told == [{"causal": True}] * 2
    assert not any(x.requires_grad for x in tensors[:3])


def flex_by_hand(q, k, v, block_mask=None, return_aux=None, **options):  # type: ignore[no-untyped-def]
    """What `flex_attention` computes, in torch."""
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    at = torch.arange(n)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(0, 0, at[:, None], at[None]), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)


@pytest.mark.parametrize("mask", ["full", "causal", "document"])
def test_backwards_of_torch(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call reads the same forward again; FlexAttention is asked for its backend."""
    from torch.nn.attention import flex_attention

    asked: list[object] = []

    def noted(*operands, kernel_options=None, **options):  # type: ignore[no-untyped-def]
        asked.append(kernel_options)
        return flex_by_hand(*operands, **options)

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex_attention, "flex_attention", noted)
    case = masked(mask, 200, kind="backward", form="columns" if mask == "document" else "native")
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    judge = measure.gradient_judge(case, tensors, 4)
    for name in ("flex", "flex_flash", *(() if mask == "full" else ("sdpa_dense",))):
        call = peers.PEERS[name].prepare(case, tensors)
        for _ in range(2):
            assert judge(peers.PEERS[name], call, gate.RULE).ok
    assert asked == [None, {"BACKEND": "FLASH"}]
    changes = {"mask": "causal" if mask == "full" else "full", "form": "native", "draw": None}
    wrong = peers.PEERS["flex"].prepare(replace(case, **changes), tensors)  # type: ignore[arg-type]
    assert not judge(peers.PEERS["flex"], wrong, gate.PEER_RULE).ok


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


def test_preparation_counts_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = masked("share_question", 256, kind="prep")
    ours, flex = prep.prepare_ours(case, "cpu"), prep.prepare_flex(case, "cpu")
    # intervals as given and by documents, where these begin, in slots and in the batch, and bounds
    # of 2 and 2 + 1 blocks
    assert ours.size(ours.call()) == 4 * (2 * 256 + 1 + 2 + 2 * 2 + 2 * (2 + 1))
    # Two tables of 256, and lists of 2 x 2 blocks: counts and indices, partial and full, both ways.
    assert flex.size(flex.call()) == 4 * (2 * 256 + 4 * (2 + 4))


# -- cudnn.flex_attention -------------------------------------------------------------------------


class Plan:
    """Stands for cuDNN's: computes by torch what the plan was made of."""

    def __init__(self, told: torch.Tensor, q: torch.Tensor, *rest: Any, **options: Any) -> None:
        self.told, self.options = told, options
        n = q.shape[1]
        self.hidden = torch.from_numpy(~of_endpoints(told[0, :, :n].numpy(), n))

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
def test_cudnn_computes_the_case(cudnn: peers.CudnnFlexPeer, mask: str) -> None:
    case = static(mask)
    tensors = make_tensors(case, "cpu", 2)
    assert cudnn.supports(case) is None
    out, lse = cudnn.unpack(cudnn.prepare(case, tensors)())
    truth = gate.reference(case, tensors, seed=4, count=16)
    assert gate.check(truth, out, lse, rule=gate.RULE).ok
    wrong = gate.reference(static("sink_window"), tensors, seed=4, count=16)
    assert not gate.check(wrong, out, lse, rule=gate.PEER_RULE).ok
    backward = replace(case, kind="backward")
    # what the forward saved is not what autograd reads
    tensors = tensors._replace(saved=cases.Saved(out, lse, torch.randn_like(out)))
    found = cudnn.prepare(backward, tensors)()
    truth_of_gradients = gate.gradient_reference(backward, tensors, 4)
    assert gate.check_gradients(truth_of_gradients, found, rule=gate.PEER_RULE).ok


def test_the_plan_is_told_lengths_and_both_directions(cudnn: peers.CudnnFlexPeer) -> None:
    case = small("varlen_causal", 200, tokens=400, doc_lengths=(200, 200))
    tensors = make_tensors(case, "cpu", 0)
    told = peers.cudnn_plan_call(case, tensors, build_backward=True).keywords  # type: ignore
    assert told["build_backward"] and told["max_seqlen_q"] == 200
    assert told["cu_seqlens_k"].tolist() == [0, 200, 400]
    made = prep.prepare_cudnn_flex(static("hstu", kind="prep", tokens=244), "cpu")
    plan = made.call()
    assert made.size(plan) == 4 * plan.told.numel() + 4 * 244


def test_cudnn_says_what_it_cannot_do(cudnn: peers.CudnnFlexPeer) -> None:
    for case, text in (
        (masked("random_eviction"), "hundreds of ranges of keys"),
        (small("causal", kind="host"), "kind attention, backward and prep only"),
        (small("causal", sink=True), "no sink"),
        (small("causal", 300, n_k=400), "other keys than queries"),
        (small("causal", d=256, d_v=128), "no head dimensions 256/128"),
    ):
        assert text in (cudnn.supports(case) or "")
    assert cudnn.supports(small("causal", d=192, d_v=128)) is None
    # a package of that name without the module, and none at all
    for package in ("small_cases", "no_such_package"):
        absent = peers.CudnnFlexPeer("cudnn_flex", package)
        assert absent.supports(small()) == f"{package}.flex_attention is not installed"


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_copied_paths_compute_a_tree(heads_kv: int) -> None:
    gather = peers.PEERS["gather"]
    case = static("tree_dfs", heads_kv=heads_kv)
    tensors = make_tensors(case, "cpu", 2)
    assert gather.supports(case) is None
    out, lse = gather.unpack(gather.prepare(case, tensors)())
    truth = gate.reference(case, tensors, seed=4, count=16)
    assert lse is None and gate.check(truth, out, lse, rule=gate.RULE).ok
    wrong = gate.reference(static("sink_window", heads_kv=heads_kv), tensors, seed=4, count=16)
    assert not gate.check(wrong, out, lse, rule=gate.PEER_RULE).ok
    backward = replace(case, kind="backward")
    tensors = tensors._replace(saved=cases.Saved(out, out, torch.randn_like(out)))
    found = gather.prepare(backward, tensors)()
    truth_of_gradients = gate.gradient_reference(backward, tensors, 4)
    assert gate.check_gradients(truth_of_gradients, found, rule=gate.PEER_RULE).ok


def test_what_is_not_gathered() -> None:
    gather = peers.GatherPeer("gather", "flash_mask_cute")
    assert "depth-first order" in (gather.supports(masked("document")) or "")
    assert "attention and backward only" in (gather.supports(static("tree_dfs", kind="prep")) or "")
    absent = peers.GatherPeer("gather", "no_such_package.cute")
    assert absent.supports(static("tree_dfs")) == "no_such_package is not installed"
