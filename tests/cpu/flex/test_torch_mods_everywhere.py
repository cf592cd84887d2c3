"""Mods written in torch as arguments of our own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import attend_rows
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from flash_mask_cute import (
    builders,
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    interface,
    plot,
)
from flash_mask_cute.call.arguments import NO_MASKS, AttentionCall

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

B, H, S, D = 2, 4, 90, 16
IDS = torch.stack([torch.arange(S) // 40, torch.arange(S) // 23])


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(B, S, H, D, generator=g, dtype=dtype) for _ in range(3)]


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


def test_both_mods_and_a_gradient_of_what_one_captured() -> None:
    table = torch.nn.Parameter(torch.randn(H, 2 * S, dtype=torch.float32))

    def bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[h, q - k + S]

    q, k, v = tensors()
    out = flash_attn_func(q, k, v, causal=True, score_mod=bias, mask_mod=documents)
    (found,) = torch.autograd.grad(out.square().sum(), table)

    at = torch.arange(S)
    sees = (IDS[:, None, :, None] == IDS[:, None, None, :]) & (at[:, None] >= at)
    dense = table.detach().double().requires_grad_()
    expected = attend_rows(q, k, v, sees, bias=dense[:, at[:, None] - at + S]).out
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    (wanted,) = torch.autograd.grad(expected.square().sum(), dense)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


def test_packed_sequences_count_inside_themselves() -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors())
    edges = torch.tensor([0, 50, 180], dtype=torch.int32)
    lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    out = flash_attn_varlen_func(q, k, v, **lengths, mask_mod=lambda b, h, q, k: (q - k) % 3 == 0)
    for start, end in ((0, 50), (50, 180)):
        at = torch.arange(end - start)
        part = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        sees = (at[:, None] - at) % 3 == 0
        expected = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=sees)
        torch.testing.assert_close(out[start:end], expected[0].transpose(0, 1))


def test_a_cute_mod_beside_one_of_torch() -> None:
    """Aux tensors of the CuTe mod keep their numbers."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return s + aux[0][h[0]] * (k - q)

    q, k, v = tensors(torch.float32)
    found = flash_attn_func(
        q, k, v, score_mod=alibi, mask_mod=documents, aux_tensors=[slopes], causal=True
    )
    at = torch.arange(S)
    biases = slopes.double()[:, None, None] * (at - at[:, None])
    sees = (IDS[:, None, :, None] == IDS[:, None, None, :]) & (at[:, None] >= at)
    expected = attend_rows(q, k, v, sees, bias=biases).out
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def test_explain_takes_them() -> None:
    q = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16)
    told = explain(q, q, q, mask_mod=lambda b, h, q, k: (q - k) % 3 == 0)
    assert "mask_mod is evaluated once for all heads" in told.masks
    assert told.note.endswith("flex_attention would run it as a mask_mod")
    told = explain(q, q, q, mask_mod=lambda b, h, q, k: q >= k)
    by_keyword = explain(q, q, q, causal=True)
    assert told.masks == "" and told.full_key_tiles == by_keyword.full_key_tiles
    assert told.note.endswith("mask_mod is torch's, and runs as a window, keys 0 to q + 0")


def test_the_wrong_number_of_arguments_is_named() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="mask_mod"):
        flash_attn_func(q, k, v, mask_mod=lambda q, k: q >= k)
    with pytest.raises(TypeError, match="score_mod"):
        flash_attn_func(q, k, v, score_mod=lambda s, q, k: s)


def test_an_index_outside_is_told_by_the_name_of_what_is_captured() -> None:
    """Also beside aux tensors of a CuTe mod, which keep their names."""
    short, line = torch.arange(10), __file__

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return short[q] == short[k]

    def bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + short[q - 20]

    def cute_bias(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return s + aux[0][k[0]]

    q, k, v = tensors()
    long, of_10 = torch.zeros(S), torch.zeros(10)
    named = f"mask_mod .*mask .{line}.* reads closure variable 'short' of .*mask at index 10 of"
    with pytest.raises(IndexError, match=named):
        flash_attn_func(q, k, v, mask_mod=mask)
    with pytest.raises(IndexError, match=named):
        create_block_mask(mask, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(IndexError, match=named):
        plot(mask, seqlen_q=16, seqlen_k=16)
    with pytest.raises(IndexError, match=named):
        flash_attn_func(q, k, v, mask_mod=mask, score_mod=cute_bias, aux_tensors=[long])
    with pytest.raises(IndexError, match="bias .*reads closure variable 'short' .* index -20 of"):
        flash_attn_func(q, k, v, score_mod=bias)
    with pytest.raises(IndexError, match=r"cute_bias .*reads aux_tensors\[0\] at index 10 of"):
        flash_attn_func(q, k, v, mask_mod=documents, score_mod=cute_bias, aux_tensors=[of_10])


# -- a mask_mod that reads no tensors ------------------------------------------------------------


WITHOUT_TENSORS: dict[str, tuple[Any, str]] = {
    "causal": (lambda b, h, q, k: k <= q, "window"),
    "sliding": (lambda b, h, q, k: (k <= q) & (k > q - 9), "window"),
    "two-sided": (lambda b, h, q, k: (abs(q - k) <= 5) & (q >= 0), "window"),
    "no side of a window": (lambda b, h, q, k: k < q, "intervals"),
    "chunks": (lambda b, h, q, k: (k // 16 == q // 16) & (k <= q), "intervals"),
    "prefix": (lambda b, h, q, k: (k < 20) | (k <= q), "intervals"),
    "of batch entries": (lambda b, h, q, k: (k <= q) & (k >= 11 * b), "intervals"),
    "remainders": (lambda b, h, q, k: (q - k) % 3 == 0, "mod"),
    "of heads": (lambda b, h, q, k: k <= q + h, "mod"),
    "documents": (documents, "mod"),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """What the host call is asked."""
    seen: list[AttentionCall] = []
    forward = interface.forward

    def record(call: AttentionCall, *key: Any) -> Any:
        seen.append(call)
        return forward(call, *key)

    monkeypatch.setattr(interface, "forward", record)
    return seen


def kind_of(call: AttentionCall) -> str:
    masks = call.masks or NO_MASKS
    if masks.mask_mod is not None:
        return "mod"
    return "window" if masks.startend_row_indices is None else "intervals"


def expected(
    qkv: list[Tensor], mod: Any, sees: Tensor | None = None, scores_of: Any = None
) -> Tensor:
    q, k, v = qkv
    visible = create_mask(mod, B, H, q.shape[1], k.shape[1], "cpu")
    if sees is not None:
        visible = visible & sees
    return attend_rows(q, k, v, visible, modify=scores_of).out


@pytest.mark.parametrize("name", WITHOUT_TENSORS)
@pytest.mark.parametrize("lengths", [(S, S), (40, S), (S, 40)])
def test_its_window_or_its_intervals(
    name: str, lengths: tuple[int, int], calls: list[AttentionCall]
) -> None:
    mod, kind = WITHOUT_TENSORS[name]
    q, k, v = (x[:, :n] for x, n in zip(tensors(), (*lengths, lengths[1]), strict=True))
    for _ in range(2):
        out = flash_attn_func(q, k, v, mask_mod=mod)
        torch.testing.assert_close(out, expected([q, k, v], mod), rtol=1e-9, atol=1e-9)
        # a side of -1 is one of a window for some lengths
        assert (kind_of(calls[-1]) == "mod") is (kind == "mod")
        assert lengths[0] != lengths[1] or kind_of(calls[-1]) == kind
    if name == "causal" and lengths == (S, S):
        assert calls[-1].options.causal and calls[-1].masks is None


def test_gradients_of_intervals_of_a_mod() -> None:
    mod, _ = WITHOUT_TENSORS["chunks"]
    leaves = [x.requires_grad_() for x in tensors()]
    grads = torch.autograd.grad(flash_attn_func(*leaves, mask_mod=mod).square().sum(), leaves)
    wanted = torch.autograd.grad(expected(leaves, mod).square().sum(), leaves)
    for found, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6)


def test_beside_other_masks(calls: list[AttentionCall]) -> None:
    """A window joins a window; what intervals cannot join keeps the mod."""
    q, k, v = tensors()
    sliding, chunks = WITHOUT_TENSORS["two-sided"][0], WITHOUT_TENSORS["chunks"][0]
    at = torch.arange(S)
    distance = at[:, None] - at
    columns = builders.causal_document([30, 60])
    sees_document = columns.dense(S)
    lists = create_block_mask(chunks, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    cases = (
        (sliding, {"causal": True}, distance >= 0, "window"),
        (sliding, {"window_size": (3, 9)}, (distance <= 3) & (distance >= -9), "window"),
        (sliding, {"startend_row_indices": columns}, sees_document, "intervals"),
        (sliding, {"score_mod": lambda s, b, h, q, k: s * 2}, None, "window"),
        (chunks, {"window_size": (9, None)}, distance <= 9, "intervals"),
        (chunks, {"startend_row_indices": columns}, sees_document, "mod"),
        (chunks, {"block_sparse_tensors": lists}, None, "mod"),
        (chunks, {"q_start": 0}, None, "mod"),
    )
    for mod, keywords, sees, kind in cases:
        out = flash_attn_func(q, k, v, mask_mod=mod, **keywords)
        doubled = (lambda s: s * 2) if "score_mod" in keywords else None
        wanted = expected([q, k, v], mod, sees, doubled)
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)
        assert kind_of(calls[-1]) == kind, keywords
    found = flash_attn_func(q[:, 50:60], k, v, mask_mod=chunks, q_start=50)
    assert kind_of(calls[-1]) == "mod" and found.shape[1] == 10


def test_a_number_that_changes(calls: list[AttentionCall]) -> None:
    size = 3

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= size

    qkv = tensors()
    for new in (3, 8, 3, 20):
        size = new
        out = flash_attn_func(*qkv, mask_mod=near)
        torch.testing.assert_close(out, expected(qkv, near), rtol=1e-9, atol=1e-9)
        assert calls[-1].options.window_size_left == new and kind_of(calls[-1]) == "window"


def test_what_nothing_watches_stays_a_mod(calls: list[AttentionCall]) -> None:
    class Near:
        size = 4

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k).abs() <= self.size

    near, qkv = Near(), tensors()
    for near.size in (4, 9):
        out = flash_attn_func(*qkv, mask_mod=near)
        torch.testing.assert_close(out, expected(qkv, near), rtol=1e-9, atol=1e-9)
        assert kind_of(calls[-1]) == "mod"


def test_contents_are_followed(calls: list[AttentionCall]) -> None:
    """However they were written: a mod that reads tensors stays one."""
    ids, qkv = torch.arange(S) // 30, tensors()

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    for step in (30, 45):
        ids.data.copy_(torch.arange(S) // step)
        out = flash_attn_func(*qkv, mask_mod=same)
        torch.testing.assert_close(out, expected(qkv, same), rtol=1e-9, atol=1e-9)
        assert kind_of(calls[-1]) == "mod"
