"""`flex_attention` against torch's own, and against attention written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
)
from torch_values import dense_attention

import flash_mask_cute
from flash_mask_cute.autograd.attend import PlannedMasks, Results
from flash_mask_cute.flex import flex_attention, patch_flex_attention

B, HQ, HKV, L, S, D = 2, 4, 2, 150, 150, 16


def tensors(
    lq: int = L, lk: int = S, heads: int = HQ, dim_v: int = D, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(lq + lk)
    shapes = (B, heads, lq, D), (B, HKV, lk, D), (B, HKV, lk, dim_v)
    q, k, v = (torch.randn(x, generator=g).to(dtype) for x in shapes)
    return q, k, v


@pytest.fixture(autouse=True)
def _torch_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


IDS = torch.stack([torch.arange(S) // 60, torch.arange(S) // 33])
ALIBI = [2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4]
SLOPES = torch.tensor(ALIBI)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - SLOPES[h] * (q - k).abs()


def mask_of(
    mod: Callable[..., Tensor], lq: int = L, lk: int = S, batch: int | None = B
) -> BlockMask:
    return create_block_mask(mod, batch, None, lq, lk, device="cpu")


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.2},
    "alibi": {"score_mod": alibi},
    "causal": {"block_mask": mask_of(causal)},
    "documents with alibi": {"block_mask": mask_of(documents), "score_mod": alibi},
    "empty rows": {"block_mask": mask_of(lambda b, h, q, k: (q > k) & (q != 70))},
    "by head": {"block_mask": create_block_mask(
        lambda b, h, q, k: (q - k).abs() <= 10 * (h + 1), B, HQ, L, S, device="cpu")},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_are_torchs(name: str) -> None:
    q, k, v = tensors()
    given = CALLS[name]
    asked = AuxRequest(lse=True)
    out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=asked, **given)
    wanted, wanted_aux = torch_flex.flex_attention(
        q, k, v, enable_gqa=True, return_aux=asked, **given
    )
    torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(aux.lse, wanted_aux.lse, rtol=3e-6, atol=3e-6)
    assert isinstance(aux, AuxOutput) and aux.max_scores is None
    assert out.stride() == wanted.stride()


def test_lse_is_returned_as_asked() -> None:
    q, k, v = tensors(heads=HKV)
    out, lse = flex_attention(q, k, v, return_lse=True)
    assert lse.shape == (B, HKV, L) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), dense_attention(*(x.double() for x in (q, k, v)))[1])
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == AuxOutput(None, None)
    assert torch.equal(flex_attention(q, k, v), out)


@pytest.mark.parametrize("dim_v", [D, 8])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_out_lies_in_memory_as_torchs(order: tuple[int, int, int], dim_v: int) -> None:
    q, k, v = tensors(dim_v=dim_v)
    back = [order.index(i) for i in range(3)]
    q = q.permute(*order, 3).contiguous().permute(*back, 3)
    wanted = torch_flex.flex_attention(q, k, v, enable_gqa=True)
    out = flex_attention(q, k, v, enable_gqa=True)
    assert out.stride() == wanted.stride()
    torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-6)


def test_tensors_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    seen: list[Tensor] = []

    def record(known: PlannedMasks, *given: Any) -> Results:
        seen.extend(given[0][:3])
        return Results(torch.zeros(B, L, HQ, D), None, None)

    monkeypatch.setattr(PlannedMasks, "results", record)
    flex_attention(q, k, v, enable_gqa=True)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)]


def test_a_key_of_one_batch_entry_serves_all() -> None:
    q, k, v = tensors()
    k, v = k[:1], v[:1]
    mask = mask_of(documents)
    wanted = torch_flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=3e-6, atol=3e-6)


# -- gradients ------------------------------------------------------------------------------------

TABLE = torch.nn.Parameter(torch.randn(32, HQ, generator=torch.Generator().manual_seed(1)))
GAINS = torch.nn.Parameter(torch.rand(HQ, generator=torch.Generator().manual_seed(2)))


def t5_bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + TABLE[(q - k).abs().clamp(max=31), h]


def gained(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(s * GAINS.exp()[h]) + TABLE.detach()[q % 32, h] * GAINS[h]


@pytest.mark.parametrize(
    "score_mod", [t5_bias, gained, lambda s, b, h, q, k: 5 * torch.tanh(s / 5)]
)
def test_gradients_reach_captured_parameters(score_mod: Callable[..., Tensor]) -> None:
    leaves = [x.requires_grad_() for x in tensors()]
    mask_mod = and_masks(documents, causal)
    out = flex_attention(
        *leaves, score_mod=score_mod, block_mask=mask_of(mask_mod), enable_gqa=True
    )
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    inputs = [*leaves, TABLE, GAINS]
    got = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    wanted_out, _ = dense_attention(
        *doubles, score_mod, lambda *at: mask_mod(*(x.expand(B, HQ, L, S) for x in at))
    )
    wanted = torch.autograd.grad(
        wanted_out, [*doubles, TABLE, GAINS], grad.double(), allow_unused=True
    )
    torch.testing.assert_close(out.double(), wanted_out, rtol=2e-6, atol=2e-6)
    for mine, other in zip(got, wanted, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine.double(), other.double(), rtol=2e-5, atol=2e-5)


def test_gradients_of_lse() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    _, lse = flex_attention(q, k, v, score_mod=alibi, enable_gqa=True, return_lse=True)
    got = torch.autograd.grad(lse.sum(), [q, k])
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(dense_attention(*doubles, alibi)[1].sum(), doubles[:2])
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-5, atol=2e-5)


# -- block masks ----------------------------------------------------------------------------------


def by_lists(mask: BlockMask, mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Visible: blocks that are listed, and in partial ones what the mod lets."""
    dense = torch.zeros(mask.kv_num_blocks.shape + mask.kv_indices.shape[-1:], dtype=torch.int8)
    pairs = ((mask.kv_num_blocks, mask.kv_indices, 1),
             (mask.full_kv_num_blocks, mask.full_kv_indices, 2))  # fmt: skip
    for count, index, state in pairs:
        if count is not None and index is not None:
            for at in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
                row = index[tuple(at)][: int(count[tuple(at)])]
                dense[tuple(at)][row.long()] = state
    block_q, block_k = mask.BLOCK_SIZE

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = (x.clamp(max=n - 1) for x, n in zip((b, h), dense.shape, strict=False))
        state = dense[b, h, q // block_q, k // block_k]
        return (state == 2) | ((state == 1) & mod(b, h, q, k))

    return visible


def check_mask(mask: BlockMask, mod: Callable[..., Tensor], lq: int = L, lk: int = S) -> None:
    q, k, v = tensors(lq, lk)
    out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    doubles = (x.double() for x in (q, k, v))
    wanted, wanted_lse = dense_attention(*doubles, None, by_lists(mask, mod))
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-6, atol=2e-6)


def small(mod: Callable[..., Tensor], lq: int = L, lk: int = S) -> BlockMask:
    return create_block_mask(mod, B, None, lq, lk, device="cpu", BLOCK_SIZE=32)


@pytest.mark.parametrize("mod", [causal, documents])
def test_lists_are_applied_before_and_after_an_edit(mod: Callable[..., Tensor]) -> None:
    mask = small(mod)
    check_mask(mask, mod)
    mask.kv_num_blocks[:, :, 1] = 0
    assert mask.full_kv_num_blocks is not None
    mask.full_kv_num_blocks[0, :, 3] = 0
    check_mask(mask, mod)
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    check_mask(mask, mod)


def test_a_block_that_is_called_full_is_not_asked() -> None:
    mask = small(causal)
    mask.full_kv_num_blocks, mask.kv_num_blocks = mask.kv_num_blocks, mask.full_kv_num_blocks
    mask.full_kv_indices, mask.kv_indices = mask.kv_indices, mask.full_kv_indices
    check_mask(mask, causal)


def test_lists_without_a_mod() -> None:
    lists = small(documents)
    mask = BlockMask.from_kv_blocks(
        lists.kv_num_blocks, lists.kv_indices, BLOCK_SIZE=32, seq_lengths=(L, S)
    )
    check_mask(mask, lambda b, h, q, k: (q >= 0) & (k >= 0))


def test_lists_in_any_order_and_integer_dtype() -> None:
    lists = small(causal)
    rows = torch.arange(lists.kv_indices.shape[-1])
    assert lists.full_kv_num_blocks is not None and lists.full_kv_indices is not None
    turned = (lists.full_kv_num_blocks[..., None] - 1 - rows).clamp(min=0)
    mask = BlockMask.from_kv_blocks(
        lists.kv_num_blocks, lists.kv_indices.long(), lists.full_kv_num_blocks,
        lists.full_kv_indices.gather(-1, turned.long()), BLOCK_SIZE=32, mask_mod=causal,
        seq_lengths=(L, S),
    )  # fmt: skip
    check_mask(mask, causal)


@pytest.mark.parametrize(("lq", "lk"), [(150, 151), (151, 150), (100, 150), (150, 100), (1, 150)])
def test_causal_is_from_the_top_left(lq: int, lk: int) -> None:
    check_mask(small(lambda b, h, q, k: q >= k, lq, lk), causal, lq, lk)
    shift = lk - lq
    check_mask(small(lambda b, h, q, k: q + shift >= k, lq, lk),
               lambda b, h, q, k: q + shift >= k, lq, lk)  # fmt: skip


def test_a_slice_with_its_own_mod() -> None:
    mask = small(documents)[:, :, 1:3]
    q, k, v = tensors(64, S)
    with pytest.raises(RuntimeError, match="slice"):
        flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    mask.seq_lengths = (64, S)
    mask.mask_mod = lambda b, h, q, k: documents(b, h, q + 32, k)
    check_mask(mask, mask.mask_mod, 64, S)


def test_captured_contents_change_without_a_new_trace() -> None:
    from flash_mask_cute.lowering import lower

    q, k, v = tensors()
    counts = []
    for length in (20, 50, 70):
        ids = (torch.arange(S) // length).expand(B, S)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, ids: Tensor = ids) -> Tensor:
            return ids[b, q] == ids[b, k]

        out = flex_attention(q, k, v, block_mask=mask_of(mod), enable_gqa=True)
        wanted, _ = dense_attention(*(x.double() for x in (q, k, v)), None, mod)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
        counts.append(lower.traces)
    assert counts[1:] == [counts[0]] * 2


# -- what else takes torch mods -------------------------------------------------------------------


def test_create_block_mask_takes_a_torch_mod() -> None:
    lists = flash_mask_cute.create_block_mask(documents, B, None, 128, 128, "cpu", 32)
    wanted = small(documents, 128, 128)
    assert torch.equal(lists.mask_block_cnt, wanted.kv_num_blocks)
    assert lists.full_block_cnt is not None and wanted.full_kv_num_blocks is not None
    assert torch.equal(lists.full_block_cnt, wanted.full_kv_num_blocks)


def test_patch_and_its_end() -> None:
    before = torch_flex.flex_attention
    with patch_flex_attention():
        assert torch_flex.flex_attention is flex_attention
    assert torch_flex.flex_attention is before
    patch = patch_flex_attention()
    assert torch_flex.flex_attention is flex_attention
    patch.__exit__(None, None, None)
    assert torch_flex.flex_attention is before
    assert flash_mask_cute.flex_attention is flex_attention


# -- refusals -------------------------------------------------------------------------------------

Q, K, V = tensors()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"enable_gqa": False}, ValueError, "number of heads.*4 and 2.*enable_gqa=True"),
        ({"query": Q[:, :3]}, ValueError, "multiple of the heads.*3 and 2"),
        ({"query": Q[:1]}, ValueError, "same batch, got 1 and 2"),
        ({"query": Q[0]}, NotImplementedError, "query must have 4 dimensions"),
        ({"query": Q[..., :8]}, ValueError, "embedding dimension.*8 and 16"),
        ({"key": K.to("meta")}, ValueError, "key must be on cpu"),
        ({"query": None}, TypeError, "query must be a tensor"),
        ({"block_mask": mask_of(causal, 100)}, ValueError, "100 queries and 150 keys.*150 and 150"),
        ({"block_mask": mask_of(causal, lk=200)}, ValueError, "150 queries and 200 keys"),
        ({"block_mask": mask_of(causal, batch=3)}, ValueError, "batch 1 or 2.*got 3"),
        ({"block_mask": create_block_mask(causal, None, 3, L, S, device="cpu")}, ValueError,
         "heads 1 or 4.*got 3"),
        ({"block_mask": torch.ones(3)}, TypeError, "block_mask must be a BlockMask.*got Tensor"),
        ({"return_lse": True, "return_aux": AuxRequest()}, ValueError, "both"),
        ({"kernel_options": {"TILE": 3}}, ValueError, "'TILE'"),
        ({"kernel_options": {"BACKEND": "CUDNN"}}, ValueError, "BACKEND.*'CUDNN'"),
        ({"score_mod": lambda s, b, h, q: s}, TypeError, "score_mod must take.*score, b, h"),
        ({"score_mod": lambda s, b, h, q, k, aux: s}, TypeError, "CuTe score_mod.*flash_attn_func"),
        ({"score_mod": 3}, TypeError, "score_mod must be callable"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], error: type, says: str) -> None:
    given: dict[str, Any] = {"query": Q, "key": K, "value": V, "enable_gqa": True}
    with pytest.raises(error, match=says):
        flex_attention(**{**given, **change})


def test_an_index_past_the_end_names_what_was_captured() -> None:
    table = torch.zeros(2, 100)
    with pytest.raises(IndexError, match="closure variable 'table' of .* index 100 of dimension 1"):
        flex_attention(Q, K, V, lambda s, b, h, q, k: s + table[b, k], enable_gqa=True)


def test_hints_for_torchs_kernels_are_ignored() -> None:
    options = {"BLOCK_M": 64, "fwd_num_warps": 4, "bwd_BLOCK_N2": 32, "BACKEND": "TRITON"}
    out = flex_attention(Q, K, V, enable_gqa=True, kernel_options=options)
    assert torch.equal(out, flex_attention(Q, K, V, enable_gqa=True))


def test_a_mask_mod_of_cute_in_a_block_mask_is_refused() -> None:
    mask = mask_of(causal)
    mask.mask_mod = lambda b, h, q, k, aux: q >= k
    with pytest.raises(TypeError, match="CuTe mask_mod"):
        flex_attention(Q, K, V, block_mask=mask, enable_gqa=True)
