"""Block masks with their own mask_mod: ours in `flex_attention`, torch's in our functions."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import dense_attention
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from flash_mask_cute import (
    BlockSparseTensorsTorch,
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
)
from flash_mask_cute.compute_block_sparsity import compute_block_sparsity
from flash_mask_cute.interface import _flash_attn_fwd

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

SEQLEN, BLOCK = 150, 64
IDS = (torch.arange(SEQLEN) * 7) // 300


def band(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < 21


def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k) % 3 == 0) & (q >= k) & (h < 7)


MODS = band, lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), dilated


def qkv(requires_grad: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(3, 2, 4, SEQLEN, 16, generator=generator).double()
    return tuple(x.requires_grad_(requires_grad) for x in made)


def by_hand(mod: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, heads, seqlen, head_dim), from the mask itself."""
    place = torch.arange(SEQLEN)
    seen = mod(torch.tensor(0), torch.tensor(0), place[:, None], place)
    return dense_attention(q, k, v, seen).out


def ours(mod: Callable[..., Any]) -> BlockSparseTensorsTorch:
    return create_block_mask(mod, None, None, SEQLEN, SEQLEN, "cpu", BLOCK)


def of_torch(mod: Callable[..., Any]) -> BlockMask:
    return torch_block_mask(mod, None, None, SEQLEN, SEQLEN, "cpu", BLOCK)


def assert_like(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    assert torch.allclose(found, wanted, atol=1e-6)
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4)).double()
    pairs = (torch.autograd.grad(x, inputs, dout, retain_graph=True) for x in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.shares(3)
@pytest.mark.parametrize("mod", MODS)
def test_our_lists_in_flex_attention(mod: Callable[..., Any]) -> None:
    lists = ours(mod)
    assert lists.mask_mod is mod
    q, k, v = qkv()
    wanted = by_hand(mod, q, k, v)
    for _ in range(2):
        assert_like(flex_attention(q, k, v, block_mask=lists), wanted, (q, k, v))
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    assert_like(compiled(q, k, v, block_mask=lists), wanted, (q, k, v))


@pytest.mark.shares(3)
@pytest.mark.parametrize("make", [of_torch, ours])
@pytest.mark.parametrize("mod", MODS)
def test_lists_with_their_mod_in_our_functions(
    mod: Callable[..., Any], make: Callable[..., Any]
) -> None:
    """Their own mask_mod decides in partial blocks, which whole blocks would be wrong."""
    lists = make(mod)
    q, k, v = qkv()
    wanted = by_hand(mod, q, k, v)
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    for call in (flash_attn_func, flash_attn_varlen_func, compiled):
        found = call(*operands, block_sparse_tensors=lists)
        assert_like(found.transpose(1, 2), wanted, (q, k, v))
    with torch.no_grad():
        found = flash_attn_with_kvcache(*operands, block_sparse_tensors=lists)
        assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-6)
    # one that is given takes its place, as before
    found = flash_attn_func(*operands, block_sparse_tensors=of_torch(band), mask_mod=dilated)
    place = torch.arange(SEQLEN)
    is_banded = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool)
    for i in range(0, SEQLEN, BLOCK):
        for j in range(0, SEQLEN, BLOCK):
            part = slice(i, i + BLOCK), slice(j, j + BLOCK)
            seen = band(0, 0, place[:, None], place)[part]
            told = dilated(0, 0, place[:, None], place)[part]
            # torch counts rows and keys past the end as hidden, so the last blocks are partial
            is_full = seen.all() and seen.shape == (BLOCK, BLOCK)
            is_banded[part] = seen if is_full else told & seen.any()
    wanted = by_hand(lambda b, h, q_idx, kv_idx: is_banded, q, k, v)
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-6)


def test_explain_takes_the_mod_of_a_torch_block_mask() -> None:
    q = torch.zeros(1, SEQLEN, 2, 64, dtype=torch.bfloat16)
    told = str(explain(q, q, q, block_sparse_tensors=of_torch(dilated), target="sm_90a"))
    assert "mask_mod is torch's" in told


def test_changes_of_our_lists_are_seen() -> None:
    """Written to in place, with a part replaced, and other lists at the same address."""
    q, k, v = qkv(False)
    lists = ours(dilated)
    wanted = by_hand(dilated, q, k, v)
    assert torch.allclose(flex_attention(q, k, v, block_mask=lists), wanted, atol=1e-6)
    other = lists._replace(mask_mod=lambda b, h, i, j: (i - j) % 2 == 0)
    assert not torch.allclose(flex_attention(q, k, v, block_mask=other), wanted, atol=1e-3)
    assert torch.allclose(flex_attention(q, k, v, block_mask=lists), wanted, atol=1e-6)
    lists.mask_block_cnt.zero_()
    assert lists.full_block_cnt is not None
    lists.full_block_cnt.zero_()
    assert flex_attention(q, k, v, block_mask=lists).abs().max() == 0


def test_lists_are_not_kept_alive() -> None:
    q, k, v = qkv(False)
    lists = ours(dilated)
    flex_attention(q, k, v, block_mask=lists)
    refs = [weakref.ref(x) for x in lists[:4] if isinstance(x, Tensor)]
    del lists
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_lists_without_a_mod_are_refused() -> None:
    q, k, v = qkv(False)
    lists = ours(dilated)
    line = r"block_mask is a BlockSparseTensorsTorch without a mask_mod.*=lists._replace\(mask_mod="
    for given in (lists._replace(mask_mod=None), pickle.loads(pickle.dumps(lists))):
        assert given.mask_mod is None
        with pytest.raises(ValueError, match=line):
            flex_attention(q, k, v, block_mask=given)
    wanted = by_hand(dilated, q, k, v)
    found = flex_attention(q, k, v, block_mask=copy.copy(lists)._replace(mask_mod=dilated))
    assert torch.allclose(found, wanted, atol=1e-6)

    def in_cute(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return q >= k

    pair = compute_block_sparsity(64, 64, 1, 1, SEQLEN, SEQLEN, in_cute, None, "cpu")
    with pytest.raises(ValueError, match="block_mask is a ComputedLists without a mask_mod"):
        flex_attention(q, k, v, block_mask=pair)
    with pytest.raises(TypeError, match="it is a CuTe mask_mod, which flash_attn_func takes, not"):
        flex_attention(q, k, v, block_mask=ours(in_cute))
    with pytest.raises(ValueError, match="block_mask was made for 150 queries and 150 keys"):
        flex_attention(q[:, :, :9], k, v, block_mask=lists)


def test_a_slice_of_a_torch_block_mask_is_refused() -> None:
    operands = [x.transpose(1, 2) for x in qkv(False)]
    part = of_torch(dilated)[:, :, :2]
    with pytest.raises(ValueError, match="a slice of another BlockMask, and slices have no mask"):
        flash_attn_func(*operands, block_sparse_tensors=part)
    with pytest.raises(ValueError, match="whose own mask_mod no kernel can call"):
        _flash_attn_fwd(*operands, block_sparse_tensors_torch=of_torch(dilated))
