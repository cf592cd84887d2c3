"""What the public functions hand on to each direction only where it is wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
import numpy as np
import pytest
import torch
from planned import arguments_of
from torch import Tensor

from flash_mask_cute import (
    builders,
    create_block_mask,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
    interface,
)
from flash_mask_cute.call import batch_sums as aux_order
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.call.tiles.arch import SM100
from flash_mask_cute.interface import BwdConfig, FwdConfig

Found = list[dict[str, Any]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """The arguments of the calls that reach the host path, in their order."""
    arguments: Found = []

    def watch(run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: AttentionCall) -> Any:
            arguments.append(arguments_of(call))
            return run(call)

        return watched

    for name in ("forward", "backward"):
        monkeypatch.setattr(interface, name, watch(getattr(interface, name)))
    return arguments


def leaves() -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (1, 40, 2, 16)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()
        for _ in range(3)
    ]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    traced: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="aot_eager")
    return traced


WAYS = pytest.mark.parametrize("way", [lambda f: f, compiled], ids=["eager", "compiled"])


@WAYS
@pytest.mark.parametrize(
    ("config", "forward", "backward"),
    [
        (None, None, None),
        ({"skip_blocks": False}, FwdConfig(skip_blocks=False), BwdConfig(skip_blocks=False)),
        ((FwdConfig(tile_n=64), {"tile_m": 64}), FwdConfig(tile_n=64), BwdConfig(tile_m=64)),
        ((None, BwdConfig(stages_q=1)), None, BwdConfig(stages_q=1)),
    ],
    ids=["none", "both", "pair", "backward"],
)
def test_each_direction_gets_its_config(
    found: Found, way: Callable[..., Any], config: Any, forward: Any, backward: Any
) -> None:
    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(*qkv, config=config)
        return out

    way(attend)(*leaves()).sum().backward()
    # an operator says None as a config without a field
    nothing = (None, FwdConfig(), BwdConfig())
    for keywords, expected in zip(found, (forward, backward), strict=True):
        given = keywords["config"]
        assert given == expected or (expected is None and given in nothing)


def test_a_traced_config_may_change(found: Found) -> None:
    config = {"skip_blocks": False}
    attend = compiled(lambda *qkv: flash_attn_func(*qkv, config=config))
    with torch.no_grad():
        for skips in (False, True):
            config["skip_blocks"] = skips
            attend(*leaves())
    assert [keywords["config"].skip_blocks for keywords in found] == [False, True]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"stages_do": 1}, ValueError, "stages_do"),
        ({"num_stages": 2}, ValueError, "num_stages"),
        (FwdConfig(), TypeError, "BwdConfig.*got FwdConfig"),
        ((None,), ValueError, "pair .forward, backward., got .None,"),
        ((None, {"tile_m": "64"}), TypeError, "config.tile_m.*'64'"),
        (3, TypeError, "config must be.*got int"),
    ],
    ids=["of-backward", "of-forward", "one-object", "no-pair", "text", "int"],
)
@pytest.mark.parametrize("call", [flash_attn_func, flash_attn_varlen_func])
def test_a_wrong_config_is_refused_before_the_forward(
    found: Found, call: Any, config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(*leaves(), config=config)
    assert not found


@WAYS
@pytest.mark.parametrize("wanted", [False, True])
def test_a_sink_without_gradient_costs_none(
    found: Found, way: Callable[..., Any], wanted: bool
) -> None:
    sink = torch.ones(2, requires_grad=wanted)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, learnable_sink=sink)
        return out

    qkv = leaves()
    way(attend)(*qkv, sink).sum().backward()
    assert (found[1]["dsink"] is not None) == wanted
    assert (sink.grad is not None) == wanted
    other = sink.detach().requires_grad_(not wanted)
    expected = torch.autograd.grad(attend(*qkv, other).sum(), qkv)
    for x, gradient in zip(qkv, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, gradient)


@pytest.fixture
def fixed_order() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@WAYS
@pytest.mark.parametrize("function", [flash_attn_func, flashmask_attention])
def test_the_setting_of_torch_asks_for_a_fixed_order(
    found: Found, fixed_order: None, way: Any, function: Callable[..., Any]
) -> None:
    way(lambda q, k, v: function(q, k, v))(*leaves()).sum().backward()
    assert found[-1]["deterministic"] is True


@pytest.fixture
def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an architecture that sums gradients of aux tensors in no fixed order."""
    monkeypatch.setattr(aux_order, "arch_spec", lambda target: SM100)


def test_what_has_no_fixed_order_is_refused_by_the_setting_too(
    fixed_order: None, unordered: None
) -> None:
    bias = torch.zeros(80, requires_grad=True)
    with pytest.raises(NotImplementedError, match="requires grad.*use_deterministic_algorithms"):
        flash_attn_func(*leaves(), score_mod=_biased, aux_tensors=[bias])


@pytest.mark.shares(2)
@WAYS
@pytest.mark.parametrize("by_setting", [False, True])
def test_gradients_of_aux_tensors_have_a_fixed_order(
    found: Found, request: pytest.FixtureRequest, way: Callable[..., Any], by_setting: bool
) -> None:
    """Equal bits, and what the call without an order computes in float64."""
    if by_setting:
        request.getfixturevalue("fixed_order")
    slopes, bias = torch.full((2,), 0.1), torch.zeros(40, 40, dtype=torch.float64)

    def gradients(deterministic: bool) -> list[Tensor]:
        trained = [x.clone().requires_grad_() for x in (slopes, bias)]

        def attend(*qkv: Tensor) -> Tensor:
            more = {} if by_setting else {"deterministic": deterministic}
            out: Tensor = flash_attn_func(
                *qkv, score_mod=_sloped, aux_tensors=trained, causal=True, **more
            )
            return out

        way(attend)(*leaves()).square().sum().backward()
        assert found[-1]["deterministic"] is (deterministic or by_setting)
        return [x.grad for x in trained if x.grad is not None]

    first, second, plain = gradients(True), gradients(True), gradients(False)
    for x, y, z in zip(first, second, plain, strict=True):
        assert torch.equal(x, y) and (x != 0).any()
        torch.testing.assert_close(x, z)


@pytest.fixture
def warn_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _biased(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score + aux[0][q[0] + k[0]]


def _sloped(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score - aux[0][h[0]] * abs(q - k).to(cutlass.Float32) + aux[1][q[0] * k[0] % 40, k[0]]


@WAYS
def test_the_setting_that_only_warns(
    found: Found, warn_only: None, unordered: None, way: Callable[..., Any]
) -> None:
    bias = torch.zeros(80, requires_grad=True)

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(*qkv, score_mod=_biased, aux_tensors=[bias])
        return out

    if way is compiled:
        out = way(attend)(*leaves())  # tracing decides where its warnings go
    else:
        text = r"^aux_tensors\[0\] requires grad.*no fixed order.*warn_only=True"
        with pytest.warns(UserWarning, match=text) as told:
            out = attend(*leaves())
        assert told[0].filename == __file__
    out.sum().backward()
    assert found[-1]["deterministic"] is False and bias.grad is not None
    # what has a fixed order has it, without a word
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*leaves()).sum().backward()
        assert found[-1]["deterministic"] is True
        bias.requires_grad_(False)
        attend(*leaves()).sum().backward()
        assert found[-1]["deterministic"] is True


@pytest.mark.parametrize(
    "keywords",
    [{"deterministic": True}, {"score_mod_bwd": lambda g, s, b, h, q, k, aux: g}],
    ids=["deterministic", "score_mod_bwd"],
)
def test_arguments_are_refused_where_the_setting_only_warns(
    warn_only: None, unordered: None, keywords: dict[str, Any]
) -> None:
    given = {"score_mod": _biased, "aux_tensors": [torch.zeros(80, requires_grad=True)], **keywords}
    with pytest.raises(NotImplementedError, match=f"requires grad.*{next(iter(keywords))}"):
        flash_attn_func(*leaves(), **given)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("function", [flash_attn_func, flashmask_attention])
def test_without_it_the_argument_decides(
    found: Found, function: Callable[..., Any], deterministic: bool
) -> None:
    function(*leaves(), deterministic=deterministic).sum().backward()
    assert found[-1]["deterministic"] is deterministic


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
        ({"deterministic": np.bool_(True)}, TypeError, r"got numpy\.bool_\(True\)"),
        ({"score_mod_bwd": lambda *told: told[0]}, ValueError, "score_mod, which is None"),
        ({"score_mod_bwd": 3}, TypeError, "score_mod_bwd must be callable or None, got 3"),
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_settings_of_the_backward_are_refused_in_the_forward(
    settings: dict[str, Any], error: type[Exception], text: str, trains: bool
) -> None:
    q, k, v = (x if trains else x.detach() for x in leaves())
    with pytest.raises(error, match=text):
        flash_attn_func(q, k, v, **settings)


@pytest.mark.shares(2)
def test_another_default_device() -> None:
    """What torch makes without a word is then not where the tensors are."""

    def sees(b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return k <= q + 3

    def run() -> tuple[Tensor, ...]:
        q, k, v = leaves()
        lists = create_block_mask(sees, 1, None, 40, 40, device="cpu", BLOCK_SIZE=8)
        out = flash_attn_func(q, k, v, mask_mod=sees, block_sparse_tensors=lists)
        columns = builders.causal_document([10, 30], device="cpu")
        out = out + flash_attn_func(q, k, v, window_size=(9, 9), startend_row_indices=columns)
        explain(q.half(), k.half(), v.half(), startend_row_indices=columns, causal=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    expected = run()
    with torch.device("meta"):
        found = run()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
