"""Peers: what they are told, that they compute the case, what they say they cannot do."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from small_cases import masked, small
from test_bench_cases import static

from bench import cases, gate, measure, mods, peers
from bench.cases import make_tensors


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


# -- cudnn.flex_attention -------------------------------------------------------------------------


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
