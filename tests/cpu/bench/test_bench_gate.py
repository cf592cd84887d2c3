"""The gates: right results pass, wrong ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_cases import SMALL, masked, small
from test_bench_cases import visible_pairs

from bench import DETERMINISTIC, cases, gate, masks, measure, peers
from bench.cases import BenchCase, make_tensors


def attend(case: BenchCase, tensors: cases.CaseTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole (out, lse) by dense float64 attention, out rounded to the case's dtype."""
    q, k, v = (t.reshape(-1, *t.shape[-2:]).double() for t in tensors[:3])
    k, v = (t.repeat_interleave(case.heads // case.heads_kv, 1) for t in (k, v))
    outs, lses, start, start_k = [], [], 0, 0
    for length, keys in zip(case.lengths, case.key_lengths, strict=True):
        rows, columns = slice(start, start + length), slice(start_k, start_k + keys)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[columns]) * case.d**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        hidden = torch.from_numpy(~visible_pairs(case, length))
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        if tensors.sink is not None:
            lse = torch.logaddexp(lse, tensors.sink.double()[:, None])
        outs.append(torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v[columns]))
        lses.append(lse.float())
        start, start_k = start + length, start_k + keys
    out = torch.cat(outs).to(tensors.q.dtype).reshape(*tensors.q.shape[:-1], case.d_v)
    return out, torch.cat(lses, 1) if case.varlen else torch.stack(lses)


CROSS = [
    small("full", 300, tokens=600, n_k=77),
    small("causal", 130, tokens=260, n_k=401),
    small("sliding_window", 300, window=40, sink=True),
    small("causal", 200, tokens=400, sink=True),
]
GATED = [
    *SMALL,
    small("causal", 200, softcap=5.0, d_v=32),
    small("causal", 200, dtype="float16"),
    *CROSS,
]


@pytest.mark.parametrize("case", GATED, ids=lambda c: f"{c.mask}-{c.n}-{c.dtype}-{c.sink}")
def test_gate_is_green_on_right_and_red_on_wrong_results(case: BenchCase) -> None:
    tensors = make_tensors(case, "cpu", 5)
    truth = gate.reference(case, tensors, seed=1)

    def ok(out: torch.Tensor, lse: torch.Tensor | None, rule: float = gate.RULE) -> bool:
        return gate.check(truth, out, lse, rule=rule).ok

    out, lse = attend(case, tensors)
    assert ok(out, lse) and ok(out, None)
    assert not ok(out, lse + 0.01)
    assert not ok(out + 0.05, lse)
    for wrong in (out, lse):
        damaged = wrong.clone()
        damaged.view(-1)[-1] = torch.nan
        assert not ok(damaged if wrong is out else out, damaged if wrong is lse else lse)
    assert not ok(out.roll(1, -2), lse, gate.PEER_RULE)
    if case.sink:
        without, _ = attend(replace(case, sink=False), tensors._replace(sink=None))
        assert not ok(without, None, gate.PEER_RULE)


@pytest.mark.parametrize("window", [55, 57, 900])
def test_gates_see_a_mask_that_is_off_by_one_key(window: int) -> None:
    case = small("sliding_window", 900, window=56)
    tensors = make_tensors(case, "cpu", 5)
    other = replace(case, window=window)
    out, lse = attend(other, tensors)
    right = attend(case, tensors)
    truth = gate.reference(case, tensors, seed=1)
    assert gate.check(truth, *right, rule=gate.RULE).ok
    assert not gate.check(truth, out, None, rule=gate.RULE).ok
    assert not gate.check(truth, right[0], lse, rule=gate.RULE).ok
    backward, wrong = (replace(x, kind="backward") for x in (case, other))
    saved = peers.save_forward(backward, tensors, 5)
    expected = gate.gradient_reference(backward, saved, 1)
    found = peers.PEERS["ours"].prepare(wrong, peers.save_forward(wrong, tensors, 5))()
    assert not gate.check_gradients(expected, found, rule=gate.RULE).ok


BACKWARDS = [
    *(masked(mask, 300, kind="backward") for mask in masks.MASKS),
    masked("document", 300, kind="backward", form="mask_mod"),
    replace(SMALL[-1], kind="backward"),
    small("sliding_window", 300, kind="backward", window=40, softcap=5.0),
    small("causal", 200, kind="backward", dtype="float16", score_mod="t5_bias"),
    *(replace(case, kind="backward") for case in CROSS),
]


@pytest.mark.shares(3)
@pytest.mark.parametrize("case", BACKWARDS, ids=lambda c: f"{c.mask}-{c.form}-{c.dtype}-{c.n_k}")
def test_gate_of_gradients(case: BenchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = peers.save_forward(case, make_tensors(case, "cpu", 2), 2)
    truth = gate.gradient_reference(case, tensors, 4)
    found = peers.PEERS["ours"].prepare(case, tensors)()
    assert len(found) == 3 + case.sink
    assert gate.check_gradients(truth, found, rule=gate.RULE).ok
    # in pieces it is the same reference
    monkeypatch.setattr(gate, "SCORES", 96 * case.n)
    in_pieces = gate.gradient_reference(case, tensors, 4).exact
    for whole, pieces in zip(truth.exact, in_pieces, strict=True):
        for x, y in zip(whole, pieces, strict=True):
            assert torch.allclose(x, y, rtol=1e-9, atol=1e-9)
    for place in range(len(found)):
        off, damaged = list(found), list(found)
        off[place] = found[place] * 1.05
        damaged[place] = found[place].clone()
        damaged[place].view(-1)[0] = torch.nan
        for wrong in (off, damaged):
            assert not gate.check_gradients(truth, wrong, rule=gate.RULE).ok
    swapped_heads = [x.roll(1, -2) for x in found[:3]]
    assert not gate.check_gradients(truth, [*swapped_heads, *found[3:]], rule=gate.PEER_RULE).ok


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


@pytest.mark.parametrize("wrong", ["ours", DETERMINISTIC])
def test_a_wrong_backward_makes_no_row(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    case = masked("document", 200, kind="backward", deterministic=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_cpu = measure.make_tensors
    monkeypatch.setattr(measure, "make_tensors", lambda case, _, seed: on_cpu(case, "cpu", seed))
    names = "ours", DETERMINISTIC, "cudnn"
    options = measure.Options(names, seed=3)
    calls, _ = measure.admit(case, options, measure.Inputs())
    assert list(calls) == ["ours", DETERMINISTIC]
    prepare = peers.CutePeer.prepare

    def damaged(peer: peers.CutePeer, case: BenchCase, tensors: cases.CaseTensors) -> peers.Call:
        call = prepare(peer, case, tensors)
        if peer.name != wrong or case.kind != "backward":
            return call
        return lambda: [x * (1 + 0.1 * torch.rand(())) for x in call()]

    monkeypatch.setattr(peers.CutePeer, "prepare", damaged)
    with pytest.raises(measure.Refused, match=f"{wrong}: ") as refused:
        measure.admit(case, options, measure.Inputs())
    assert ("two calls differ" in str(refused.value)) == (wrong == DETERMINISTIC)
