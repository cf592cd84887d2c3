"""What the public functions refuse, and by which name."""

from __future__ import annotations

import functools
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cases import int32
from functional_calls import qkv, rows_below
from torch.autograd import forward_ad

from flash_mask_cute import (
    create_block_mask,
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
)


@pytest.mark.usefixtures("fresh_dynamo")
def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv()
    out = flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)[0])
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="double backward"):
        out = torch.compile(flash_attn_func, backend="aot_eager")(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        dq.sum().backward()


def test_a_scale_that_requires_grad() -> None:
    """Would have no gradient, and nobody would notice."""
    q, k, v = qkv()
    scale = torch.tensor(0.3, requires_grad=True)
    for function in (flash_attn_func, flash_attn_varlen_func, flashmask_attention):
        with pytest.raises(NotImplementedError, match=r"^softmax_scale requires grad.*multiply q"):
            function(q, k, v, softmax_scale=scale)
    with torch.no_grad():
        assert torch.equal(
            flash_attn_func(q, k, v, softmax_scale=scale), flash_attn_func(q, k, v, scale.item())
        )


def test_windows_of_one_number() -> None:
    q, k, v = qkv()
    for none in (-1, None):
        assert torch.equal(flashmask_attention(q, k, v, window_size=none), flash_attn_func(q, k, v))
    with pytest.raises(ValueError, match=r"^window_size must be an int >= 0 .*, got -5: both"):
        flashmask_attention(q, k, v, window_size=-5)


def test_other_derivatives_are_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        flash_attn_func(forward_ad.make_dual(q, q), k, v, softcap=3.0)
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            transform(lambda q: flash_attn_func(q, k, v).sum())(q)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"num_splits": -2}, ValueError, "num_splits.*got -2"),
        ({"num_splits": True}, TypeError, "num_splits must be an int, got True"),
        ({"return_lse": "no"}, TypeError, "return_lse must be True or False, got 'no'"),
        ({"score_mod_bwd": lambda g, s, b, h, i, j, a: g}, ValueError, "score_mod, which is None"),
        ({"score_mod": lambda s, b, h, i, j, a: s, "score_mod_bwd": lambda g, s: g}, TypeError,
         "score_mod_bwd must take the arguments"),
        ({"window_size": 3}, ValueError, "window_size must be .left, right., got 3"),
        ({"softmax_scale": torch.ones(1)}, ValueError,
         "^softmax_scale must be a number or a 0-dim CPU tensor, got a .* shape .1,. on cpu"),
        ({"softmax_scale": torch.ones((), device="meta")}, ValueError,
         "^softmax_scale must be a number or a 0-dim CPU tensor, .* on meta; .*multiply q by"),
        ({"softmax_scale": torch.tensor(True)}, TypeError, "^softmax_scale must be a real number"),
        ({"softmax_scale": torch.tensor(1j)}, TypeError, "^softmax_scale must be a real number"),
        ({"softmax_scale": float("nan")}, ValueError, "^softmax_scale must be finite, .* got nan"),
        ({"softmax_scale": torch.tensor(torch.inf)}, ValueError,
         "^softmax_scale must be .*got inf"),
        ({"causal": 1}, TypeError, "causal"),
        ({"startend_row_indices": torch.zeros(1, 1, 12, 1)}, TypeError, "startend_row_indices"),
        ({"startend_row_indices": rows_below(3, 12)}, ValueError, "causal=True"),
        ({"startend_row_indices": [1]}, TypeError, "startend_row_indices"),
        ({"window_size": (None, 0.5)}, TypeError, "^window_size_right must be an int.*got 0.5"),
        ({"block_sparse_tensors": [1]}, TypeError, "^block_sparse_tensors or .*_torch must be"),
        ({"aux_tensors": [torch.zeros(1)]}, ValueError, "aux_tensors"),
        ({"aux_tensors": 3}, TypeError, "aux_tensors"),
        ({"score_mod": 3}, TypeError, "score_mod"),
        ({"k": [1]}, TypeError, "k must be a torch.Tensor"),
        ({"learnable_sink": 3}, TypeError, "learnable_sink must be a torch.Tensor"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)  # fmt: skip
@pytest.mark.parametrize("needs_graph", [False, True])
def test_wrong_arguments(
    keywords: dict[str, Any], error: type[Exception], message: str, needs_graph: bool
) -> None:
    q, k, v = (x.requires_grad_(needs_graph) for x in (y.detach() for y in qkv()))
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": q, "k": k, "v": v} | keywords)


def test_wrong_pages_and_dropout_are_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=r"page_table must have shape \(batch, max_pages\)"):
        flash_attn_varlen_func(q, k, v, page_table=int32(1))
    with pytest.raises(NotImplementedError, match=r"dropout.*0\.1"):
        flashmask_attention(q, k, v, dropout=0.1)
    flashmask_attention(q, k, v, dropout=0.1, training=False)


def test_what_comes_from_other_libraries() -> None:
    """By position; as nested tensors; by Paddle's names."""
    q, k, v = (x.detach() for x in qkv())
    said = r"^window_size must be \(left, right\), got True; .* no dropout_p before softmax_scale"
    with pytest.raises(ValueError, match=said):
        flash_attn_func(q, k, v, 0.125, False, True)
    nested = torch.nested.nested_tensor([q[0], q[0, :3]])
    with pytest.raises(TypeError, match="^q must be one tensor, got a nested one; pack it"):
        flash_attn_func(nested, k, v)
    with pytest.raises(TypeError, match="^return_softmax_lse must be True or False, got 1"):
        flashmask_attention(q, k, v, return_softmax_lse=1)  # type: ignore[arg-type]


# -- the arguments of newer flash-attn-4 --------------------------------------------------------


def _mask_of_lengths(batch, head, q, kv, seqlen_info, aux_tensors):
    return q >= kv


def _mask_without_aux(batch, head, q, kv, seqlen_info):
    return q >= kv


def _mask_with_defaults(batch, head, q, kv, seqlen_info=None, aux_tensors=None):
    return q >= kv


def _mask_by_keyword(batch, head, q, kv, aux_tensors, *, seqlen_info=None):
    return q >= kv


@cute.jit
def _jitted_mask(batch, head, q, kv, seqlen_info=None, aux_tensors=None):
    return q >= kv


def _score_with_defaults(score, batch, head, q, kv, seqlen_info=None, aux_tensors=None):
    return score


@cute.jit
def _jitted_score(score, batch, head, q, kv, seqlen_info, aux_tensors=None):
    return score


def _plain_score(score, batch, head, q, kv, aux_tensors):
    return score


def _score_bwd(grad, score, batch, head, q, kv, seqlen_info, aux_tensors=None):
    return grad


@pytest.mark.parametrize(
    "mods",
    [
        {"mask_mod": _mask_of_lengths},
        {"mask_mod": _mask_without_aux},
        {"mask_mod": _mask_with_defaults},
        {"mask_mod": _mask_by_keyword},
        {"mask_mod": functools.partial(_mask_with_defaults, aux_tensors=None)},
        {"mask_mod": _jitted_mask},
        {"score_mod": _score_with_defaults},
        {"score_mod": _jitted_score},
        {"score_mod": _plain_score, "score_mod_bwd": _score_bwd},
    ],
    ids=lambda mods: str(list(mods.values())[-1]).split()[1],
)
def test_seqlen_info_is_refused_by_name(mods: dict[str, Any]) -> None:
    """Where it has a default, aux_tensors would be passed as it."""
    name, mod = list(mods.items())[-1]
    q, k, v = qkv()
    said = rf"^{name} must take the arguments .* there is no seqlen_info here"
    with pytest.raises(TypeError, match=said):
        flash_attn_func(q, k, v, **mods)
    if name == "mask_mod":
        with pytest.raises(TypeError, match=said):
            create_block_mask(mod, 1, 1, 12, 12, device="cpu")


def test_a_local_variable_may_be_called_seqlen_info() -> None:
    def mask_mod(batch, head, q, kv, aux_tensors):
        seqlen_info = q >= kv
        return seqlen_info

    flash_attn_func(*qkv(), mask_mod=mask_mod)
