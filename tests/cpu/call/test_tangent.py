"""Forward mode of kernels, as planned without a GPU: tiles, operands, refusals, copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import BF16, Case
from inputs import make_inputs
from planned import call_of, forward_call

from flash_mask_cute.call import second_walk, tangent
from flash_mask_cute.call.kernel_operands import FORWARD
from flash_mask_cute.call.tangent import PreparedTangent, plan_tangent
from flash_mask_cute.call.tiles.arch import SM90
from flash_mask_cute.cpu.tangent import Tangents
from flash_mask_cute.runtime.target import Target

HOPPER, BLACKWELL = Target("sm_90a", num_sms=132), Target("sm_100a", num_sms=148)


def _call(head_dim: int, head_dim_v: int | None = None, **keywords: Any) -> Any:
    q, k = (torch.empty(1, 256, heads, head_dim, dtype=BF16) for heads in (4, 2))
    return forward_call(q, k, k.new_empty(1, 256, 2, head_dim_v or head_dim), **keywords)


@pytest.mark.parametrize(
    ("head_dim", "tile_n", "stages"), [(40, 96, 3), (64, 96, 3), (96, 64, 2), (128, 64, 2)]
)
def test_tiles(head_dim: int, tile_n: int, stages: int) -> None:
    """Not made smaller to fit; splits, packed heads and a config of the forward do not matter."""
    assert SM90.tangent is not None
    given = {"num_splits": 3, "pack_gqa": True, "config": {"tile_n": 32}}
    found = plan_tangent(_call(head_dim, causal=True, **given), HOPPER)
    tiles = found.fwd_choice.tiles
    assert (tiles.tile_m, tiles.tile_n, tiles.num_stages) == (128, tile_n, stages)
    assert found.problem.packed_heads == 1 and found.splits is None
    assert found.fwd_choice.smem_bytes <= 232448 and ";" not in found.fwd_choice.reason


@pytest.mark.parametrize(
    ("dims", "target", "message"),
    [
        ((136, None), HOPPER,
         r"on Hopper with .* \(136, 136\): there are kernels for equal ones up to 128"),
        ((64, 128), HOPPER,
         r"on Hopper with head_dim and head_dim_v \(64, 128\): there are kernels for eq"),
        ((64, None), BLACKWELL, r"on Blackwell with .* \(64, 64\): there are no kernels"),
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_by_name(dims: Any, target: Target, message: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^forward mode .* not supported {message}"):
        plan_tangent(_call(*dims), target)


@pytest.mark.parametrize("strided", [None, "unreadable", "transposed"])
def test_the_launch(strided: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands by name; the sign of the scale in q and its tangent; TMA's copies; expanded keys."""
    inputs = make_inputs(Case("launch", 2, 40, 70, 4, 2, 64, strided=strided, softmax_scale=-0.5))
    tensors = inputs.q, inputs.k[:1].expand_as(inputs.k), inputs.v
    call = forward_call(*tensors, softmax_scale=-0.5, causal=True)
    launched: list[tuple[Any, ...]] = []
    found = plan_tangent(call, HOPPER)
    assert not found.problem.shared_kv
    compiled = SimpleNamespace(function=lambda *given: launched.append(given))
    monkeypatch.setattr(second_walk, "compile_fwd", lambda *_: compiled)
    out, lse = inputs.q.new_ones(2, 40, 4, 64), torch.zeros(2, 4, 40)
    tangents = tuple(x + 1 for x in tensors)
    run = PreparedTangent(found)
    tout, tlse = run(call.tensors, call.masks, Tangents(*tangents, out, lse))
    (given,) = launched
    names = [x.argument for x in FORWARD if x.argument != "stream"]
    by_name = dict(zip(names, given, strict=True))
    tq, tk, tv, of_out, of_lse = by_name["partials"]
    assert by_name["out"] is tout and by_name["lse"] is tlse and of_lse is lse
    assert torch.equal(tq, -tangents[0]) and torch.equal(by_name["q"], -tensors[0])
    assert torch.equal(tk, tangents[1]) and torch.equal(by_name["k"], tensors[1])
    assert by_name["scale"] == 0.5 and by_name["window_left"] is None
    for x in (tq, tk, tv, of_out, tout, *(by_name[name] for name in "qkv")):
        assert x.stride(-1) == 1 and all(step > 0 and step % 8 == 0 for step in x.stride()[:-1])


def test_a_prepared_launch_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metadata of the call and of what is given."""
    planned: list[Any] = []

    class Prepared:
        is_kernel = True

        def __init__(self, plan: Any) -> None:
            planned.append(plan)

        def __call__(self, x: Any, masks: Any, given: Any) -> Any:
            return given.out, given.lse

    monkeypatch.setattr(tangent, "PreparedTangent", Prepared)
    monkeypatch.setattr(second_walk, "_kept", {})
    call = call_of(Case("again", 1, 40, 40, 2, 2, 64))
    x = call.tensors
    given = Tangents(x.q, x.k, x.v, x.q.clone(), torch.zeros(1, 2, 40))
    for _ in range(2):
        tangent.tangent(call, given)
    assert len(planned) == 1
    tangent.tangent(call, given._replace(out=torch.zeros(1, 40, 4, 64, dtype=BF16)[:, :, ::2]))
    assert len(planned) == 2
