"""causal as a tensor: sequences of a batch of which some are causal."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import int32
from causal_sequences import MixedCall, draw_mixed
from planned import forward_call, planned
from torch import Tensor

from flash_mask_cute import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.limits import OPEN_WINDOW
from flash_mask_cute.masks.builders import causal_document, document
from flash_mask_cute.rules.band import Band, right_side
from flash_mask_cute.runtime.target import Target

pytestmark = pytest.mark.usefixtures("explained_without_compiling")

INT = torch.int32


def run(call: MixedCall, **more: Any) -> None:
    out, lse = flash_attn_varlen_func(
        call.q, call.k, call.v, **call.keywords | more, return_lse=True
    )
    call.assert_close(out, lse)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    call = draw_mixed(random.Random(seed), torch.float64, 16, 90)
    run(call)
    run(call.turned())
    run(call, num_splits=3)


def test_over_a_cache_with_new_rows() -> None:
    """Rows are rotated by their positions, as under causal masking of all sequences."""
    torch.manual_seed(0)
    cache = torch.zeros(2, 2, 40, 1, 16, dtype=torch.float64)
    cache[:, :, :20] = torch.randn(2, 2, 20, 1, 16)
    q, k, v = torch.randn(3, 2, 4, 1, 16, dtype=torch.float64)
    angles = torch.rand(60, 8, dtype=torch.float64)
    rest = {"cache_seqlens": int32(20, 7), "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def with_causal(causal: Any, rows: slice = slice(None)) -> Tensor:
        given = {name: x[rows] if name == "cache_seqlens" else x for name, x in rest.items()}
        of_cache = cache[:, rows].clone()
        return flash_attn_with_kvcache(q[rows], *of_cache, k[rows], v[rows], causal=causal, **given)

    out = with_causal(int32(1, 0))
    assert torch.equal(out[:1], with_causal(True, slice(0, 1)))
    # a right side as wide as all keys hides nothing, and rotates alike
    whole = flash_attn_with_kvcache(
        q, *cache.clone(), k, v, window_size=(-1, 60), **rest
    )  # fmt: skip
    assert torch.equal(out[1:], whole[1:])
    assert not torch.equal(out[1:], with_causal(True)[1:])


@pytest.mark.parametrize("right", [-4, -1, 0, 1, 7])
def test_the_right_side_of_a_sequence(right: int) -> None:
    for is_causal in (0, 1):
        expected = min(right, 0) if is_causal else right
        assert right_side(right, is_causal) == expected
        band = Band(9, 12, None, right_side(right, is_causal))
        assert band.k_range(4) == Band(9, 12, None, expected).k_range(4)


def test_what_a_kernel_is_told() -> None:
    """A tensor without effect is no part of the kernel, so it is that of a call without one."""
    call = draw_mixed(random.Random(3), torch.bfloat16, 64, 90)
    target, given = Target("sm_90a", num_sms=132), call.host_keywords() | {"q_start": None}

    def problem(**more: Any) -> Any:
        keywords = {k: x for k, x in given.items() if k not in ("mask_mod", "window_size_left")}
        return planned(forward_call(call.q, call.k, call.v, **keywords | more), target)

    plan = problem(window_size_right=None)
    assert plan.problem.causal_each and not plan.problem.is_causal
    assert plan.window_right == OPEN_WINDOW
    for right in (0, -3):
        without = problem(window_size_right=right, causal=False)
        assert problem(window_size_right=right).problem == without.problem
    assert problem(window_size_right=4).window_right == 4


def test_explain_counts_the_tiles_of_each_sequence() -> None:
    q, k, v = torch.zeros(3, 2, 512, 1, 64, dtype=torch.bfloat16)

    def counted(causal: Any) -> tuple[int, int, int]:
        found = explain(q, k, v, causal=causal, config={"tile_m": 128}, target="sm_90a")
        assert found.full_key_tiles is not None and found.partial_key_tiles is not None
        assert found.empty_key_tiles is not None
        return found.full_key_tiles, found.partial_key_tiles, found.empty_key_tiles

    full, causal = counted(False), counted(True)
    for flags in ((0, 1), (1, 0)):
        assert counted(int32(*flags)) == tuple(
            (a + b) // 2 for a, b in zip(full, causal, strict=True)
        )


def test_a_compiled_graph_is_one_for_all_contents() -> None:
    call = draw_mixed(random.Random(1), torch.float32, 16, 60)
    rest = {name: x for name, x in call.keywords.items() if name not in ("causal", "mask_mod")}
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(causal: Tensor) -> Tensor:
        return flash_attn_varlen_func(call.q, call.k, call.v, **rest, causal=causal)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for given in (call, call.turned()):
        causal = given.keywords["causal"]
        assert torch.equal(compiled(causal), attend(causal))
    assert len(graphs) == 1


def test_documents_are_not_packed() -> None:
    """Packing would make sequences of documents, which the tensor does not know."""
    q, k, v = torch.randn(3, 2, 24, 2, 16, dtype=torch.float64)
    mask = document([10, 14])
    whole = flash_attn_varlen_func(q, k, v, startend_row_indices=mask)
    causal = flash_attn_varlen_func(q, k, v, startend_row_indices=causal_document([10, 14]))
    out = flash_attn_varlen_func(q, k, v, startend_row_indices=mask, causal=int32(0, 1))
    assert torch.allclose(out[0], whole[0]) and torch.allclose(out[1], causal[1])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"causal": torch.ones(2, dtype=torch.int64)}, TypeError,
     "causal must have dtype int32.*int64"),
    ({"causal": torch.ones(2, dtype=torch.bool)}, TypeError, "causal must have dtype int32.*bool"),
    ({"causal": int32(1, 1, 1)}, ValueError, r"causal must have shape .*\(2,\), got \(3,\)"),
    ({"causal": int32(1, 1)[None]}, ValueError, "causal"),
    ({"causal": torch.ones(2, dtype=INT, device="meta")}, ValueError, "causal.*meta"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"causal": int32(1, 0), "window_size": (-3, 5)}, NotImplementedError,
     "window_size_left.*causal as a tensor, got -3"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "text"), REFUSED)
def test_refusals(given: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = torch.zeros(3, 2, 8, 2, 16)
    with pytest.raises(error, match=text):
        flash_attn_varlen_func(q, k, v, **given)
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(q, k, v, **given)


def test_gradients_are_refused() -> None:
    q, k, v = torch.randn(3, 2, 8, 2, 16)
    leaf = q.clone().requires_grad_()
    for call in (flash_attn_varlen_func, torch.compile(flash_attn_varlen_func, backend="eager")):
        with pytest.raises(Exception, match="no gradients beside causal as a tensor"):
            call(leaf, k, v, causal=int32(1, 0))
    with torch.no_grad():
        flash_attn_varlen_func(leaf, k, v, causal=int32(1, 0))
    out, lse = _flash_attn_fwd(q, k, v, causal=int32(1, 0))
    with pytest.raises((TypeError, NotImplementedError), match="causal"):
        _flash_attn_bwd(q, k, v, out, out, lse, causal=int32(1, 0))  # type: ignore[arg-type]


def test_a_dense_call_takes_a_bool() -> None:
    q, k, v = torch.zeros(3, 2, 8, 2, 16)
    with pytest.raises(TypeError, match="causal must be True or False, got a torch.int32 tensor"):
        flash_attn_func(q, k, v, causal=int32(1, 0))  # type: ignore[call-overload]


def test_blackwell_refuses_it() -> None:
    q, k, v = torch.zeros(3, 2, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="causal as a tensor.*Blackwell"):
        explain(q, k, v, causal=int32(1, 0), target="sm_100a")
    assert explain(q, k, v, causal=True, target="sm_100a").kernel
