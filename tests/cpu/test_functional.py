"""Gradients, torch.compile and checkpointing through the public functions, on CPU tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from cases import BF16, FP32, FP64, Case
from gradient_oracle import assert_gradients_close, make_output_gradients
from inputs import Inputs, make_inputs
from launch_recorder import Recorder
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_mask_cute
from flash_mask_cute import (
    flash_attn_func,
    flash_attn_varlen_func,
    flashmask_attention,
    functional,
)
from flash_mask_cute.autograd import mod_names, passes, torch_ops
from flash_mask_cute.autograd.arguments import LENGTHS
from flash_mask_cute.interface import BwdConfig, FwdConfig, _flash_attn_fwd
from flash_mask_cute.masks import column_mask
from flash_mask_cute.masks.column_mask import ColumnMask

OPERATORS = torch.ops.flash_mask_cute
NEG_INF = float("-inf")
# lse is float32, as is what a score_mod computes: 2^-24 of a score moves its exponential so much
RTOL = 5e-5

SMALL: dict[str, Any] = {"head_dim": 16, "dtype": FP64}
FEATURES = (
    Case("full-gqa2", 2, 9, 13, 4, 2, **SMALL),
    Case("causal-empty-rows", 1, 13, 9, causal=True, **SMALL),
    Case("window-softcap-sink", 1, 12, 15, window_left=4, window_right=2, softcap=3.0, sink=FP32,
         **SMALL),
    Case("scale-dv8", 1, 7, 11, head_dim_v=8, softmax_scale=0.7, **SMALL),
    Case("scale-0-sink-fp64", 1, 9, 13, causal=True, softmax_scale=0.0, sink=FP64, **SMALL),
    Case("scale-negative-shifted", 1, 13, 17, softmax_scale=-0.4, window_left=9, window_right=-3,
         softcap=3.0, strided="unreadable", **SMALL),
    Case("packed", lengths_q=(5, 0, 7), lengths_k=(6, 3, 9), causal=True, sink=FP32, **SMALL),
    Case("packed-used", lengths_q=(5, 8), lengths_k=(6, 9), seqused_q=(3, 8), seqused_k=(6, 5),
         **SMALL),
    Case("columns1-causal", 2, 20, 24, 2, 1, causal=True, column="random1", **SMALL),
    Case("columns2-q", 1, 20, 24, 2, 1, column="random2", column_heads="q", **SMALL),
    Case("columns4", 1, 20, 24, column="random4", **SMALL),
    Case("columns-packed", lengths_q=(9, 5), lengths_k=(12, 4), causal=True, column="random1",
         **SMALL),
    Case("mask_mod-aux", 1, 20, 20, mask_mod="documents", **SMALL),
    Case("blocks-mask_mod", 1, 40, 40, mask_mod="checks", blocks=(16, 16), **SMALL),
    Case("blocks-alone", 1, 40, 24, blocks=(16, 16), **SMALL),
    Case("score_mod", 1, 12, 15, causal=True, softcap=4.0, score_mod="scale", **SMALL),
    Case("score_mod-aux", 1, 12, 15, score_mod="t5", **SMALL),
    Case("everything-packed", heads_q=4, heads_kv=2, lengths_q=(20, 11), lengths_k=(24, 17),
         causal=True, window_left=18, softcap=5.0, sink=FP32, column="random1", column_heads="kv",
         mask_mod="checks", score_mod="t5", blocks=(16, 16), **SMALL),
)  # fmt: skip
by_id = pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.id)


class Arguments(NamedTuple):
    """A call of a public function: `function(*operands, **keywords)`, a sink among the operands."""

    function: Callable[..., Any]
    operands: dict[str, Tensor]
    keywords: dict[str, Any]

    @staticmethod
    def of(inputs: Inputs, **more: Any) -> Arguments:
        keywords = inputs.keywords | {"return_lse": True} | more
        window = keywords.pop("window_size_left"), keywords.pop("window_size_right")
        keywords["window_size"] = tuple(-1 if side is None else side for side in window)
        if "block_sparse_tensors_torch" in keywords:
            keywords["block_sparse_tensors"] = keywords.pop("block_sparse_tensors_torch")
        sink = keywords.pop("learnable_sink")
        operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "learnable_sink": sink}
        is_dense = all(keywords.get(name) is None for name in LENGTHS)
        if is_dense:
            for name in LENGTHS:
                keywords.pop(name, None)
        return Arguments(
            flash_attn_func if is_dense else flash_attn_varlen_func,
            {name: x for name, x in operands.items() if x is not None},
            keywords,
        )

    def leaves(self) -> Arguments:
        """With operands of their own that require gradients."""
        operands = {
            name: torch.empty_like(x).copy_(x).requires_grad_() for name, x in self.operands.items()
        }
        return self._replace(operands=operands)

    def __call__(self) -> Any:
        return self.function(**self.operands, **self.keywords)


class Results(NamedTuple):
    """What a call returns, and its gradients for gradients that `make_output_gradients` made."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor | None]

    def assert_equal(self, other: Results) -> None:
        torch.testing.assert_close(self, other, rtol=0, atol=0, equal_nan=False)


def run(inputs: Inputs, arguments: Arguments, call: Callable[..., Any] | None = None) -> Results:
    """call: what to call instead of the function, with its arguments."""
    leaves = arguments.leaves()
    out, lse = (call or leaves.function)(**leaves.operands, **leaves.keywords)
    torch.autograd.backward((out, lse), make_output_gradients(inputs))
    gradients = {f"d{name}": x.grad for name, x in leaves.operands.items()}
    gradients["dsink"] = gradients.pop("dlearnable_sink", None)
    return Results(out.detach(), lse.detach(), gradients)


@lru_cache
def inputs_of(case: Case) -> Inputs:
    return make_inputs(case)


@lru_cache
def eager_results(case: Case) -> Results:
    inputs = inputs_of(case)
    return run(inputs, Arguments.of(inputs))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def qkv(
    *, batch: int = 1, seqlen: int = 12, heads: int = 2, dim: int = 16, dtype: torch.dtype = FP64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, heads, dim, generator=generator) for _ in range(3))
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_below(limit: int, keys: int) -> Tensor:
    """Causal column intervals: each key hides the queries from `limit` on."""
    return torch.full((1, 1, keys, 1), limit, dtype=torch.int32)


# -- gradients ----------------------------------------------------------------------------------


@by_id
def test_results_against_float64(case: Case) -> None:
    inputs, results = inputs_of(case), eager_results(case)
    out, lse = inputs.reference
    torch.testing.assert_close(results.out, out, rtol=RTOL, atol=RTOL)
    torch.testing.assert_close(results.lse, lse.float(), rtol=RTOL, atol=RTOL)
    dout, dlse = make_output_gradients(inputs)
    assert_gradients_close(results.gradients, inputs, dout, dlse, rtol=RTOL)


@pytest.mark.parametrize("case", FEATURES[-1:] + FEATURES[2:7:2], ids=lambda case: case.id)
def test_bfloat16(case: Case) -> None:
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    inputs = make_inputs(Case(**fields | {"dtype": BF16}))
    dout, dlse = make_output_gradients(inputs)
    results = run(inputs, Arguments.of(inputs))
    assert_close_to_oracle(results.out, results.lse, inputs)
    assert_gradients_close(results.gradients, inputs, dout, dlse)


@by_id
def test_gradcheck(case: Case) -> None:
    """Numerically, and with gradients of out or lse that are absent."""
    inputs = inputs_of(case)
    arguments = Arguments.of(inputs)
    in_use = inputs.rows_in_use("q")
    names = list(arguments.operands)

    def call(*operands: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, operands, strict=True))
        if "learnable_sink" in given:
            given["learnable_sink"] = given["learnable_sink"].float()
        out, lse = arguments.function(**given, **arguments.keywords)
        sees = (lse > NEG_INF).mT & in_use[..., None]
        return out[sees], lse.mT[sees].double()

    leaves = [x.detach().double().requires_grad_() for x in arguments.operands.values()]
    # what lies past seqused_* is large
    for x, side in zip(leaves, ("q", "k", "k"), strict=False):
        with torch.no_grad():
            x[~inputs.rows_in_use(side)] = 0.0
    assert torch.autograd.gradcheck(
        call, leaves, eps=1e-3, atol=2e-3, rtol=1e-3, nondet_tol=0.0, fast_mode=True
    )


def test_score_mod_bwd_is_used() -> None:
    q, k, v = qkv()

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * 0.5

    def mod_bwd(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return grad * 0.25

    exact, twice = (
        torch.autograd.grad(flash_attn_func(q, k, v, score_mod=mod, **more).sum(), (q, v))
        for more in ({}, {"score_mod_bwd": mod_bwd})
    )
    assert exact[0].abs().max() > 1e-3
    torch.testing.assert_close(twice[0], exact[0] / 2, rtol=1e-6, atol=1e-7)
    assert torch.equal(twice[1], exact[1])


def test_block_mask_of_torch() -> None:
    q, k, v = qkv(seqlen=40)
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 40, 40, device="cpu", BLOCK_SIZE=16
    )

    def lower(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return i >= j

    def call() -> Tensor:
        return flash_attn_func(q, k, v, mask_mod=lower, block_sparse_tensors=mask)

    expected = flash_attn_func(q, k, v, causal=True)
    expected_grads = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for out in (call(), torch.compile(call, fullgraph=True, backend="aot_eager")()):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), (q, k, v)), expected_grads)


def test_column_mask_of_either_kind() -> None:
    """A tensor is `ColumnMask(tensor, causal)`; a mask of the causal form needs no causal call."""
    q, k, v = qkv(seqlen=20)
    indices = rows_below(11, 20)
    expected = flash_attn_func(q, k, v, causal=True, startend_row_indices=indices)
    mask = ColumnMask(indices, causal=True)
    for out in (
        flash_attn_func(q, k, v, startend_row_indices=mask),
        flashmask_attention(q, k, v, indices, causal=True),
    ):
        assert torch.equal(out, expected)
        assert out.grad_fn is not None
    assert (expected[:, 11:] != flash_attn_func(q, k, v, causal=True)[:, 11:]).any()


@pytest.mark.parametrize("window_size", [5, (5, None), (5, -1), [5, 5]])
def test_flashmask_attention_takes_windows(window_size: Any) -> None:
    q, k, v = qkv(seqlen=20)
    out, lse = flashmask_attention(q, k, v, window_size=window_size, return_softmax_lse=True)
    right = 5 if window_size in (5, [5, 5]) else None
    expected, expected_lse = _flash_attn_fwd(q, k, v, window_size_left=5, window_size_right=right)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_every_keyword_reaches_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    sink = torch.zeros(2, requires_grad=True)
    own = {"window_size", "block_sparse_tensors", "num_splits", "page_table", "return_lse"}
    given: dict[str, Any] = {
        name: object()
        for name in inspect.signature(flash_attn_varlen_func).parameters
        if name not in own | {"q", "k", "v", "learnable_sink"}
    }
    lengths = {name: int32(0, i) for i, name in enumerate(LENGTHS)}
    given |= lengths | {
        "aux_tensors": [torch.ones(1), torch.ones(2)],
        "startend_row_indices": ColumnMask(rows_below(3, 12), True),
        "config": (FwdConfig(tile_m=192), BwdConfig(tile_m=64)),
    }
    lists = flash_mask_cute.BlockSparseTensorsTorch(int32(1), int32(2), block_size=(16, 16))
    found: list[dict[str, Any]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        found.append(keywords)
        return torch.zeros_like(q), torch.zeros(1, 2, 12)

    def backward(*tensors: Tensor, dsink: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        found.append(keywords)
        dsink.fill_(7.0)
        return tuple(torch.full_like(x, i) for i, x in enumerate(tensors[:3]))

    for check in ("check_gradient_settings", "check_mod"):
        monkeypatch.setattr(functional, check, lambda *told: None)
    monkeypatch.setattr(passes, "_flash_attn_fwd", forward)
    monkeypatch.setattr(passes, "_flash_attn_bwd", backward)
    out = flash_attn_varlen_func(
        q, k, v, learnable_sink=sink, window_size=(3, 4), block_sparse_tensors=lists, **given
    )
    out.sum().backward()
    shared = given | {
        "window_size_left": 3,
        "window_size_right": 4,
        "block_sparse_tensors_torch": lists,
        "learnable_sink": sink,
    }
    config_fwd, config_bwd = shared.pop("config")
    of_forward = {"pack_gqa": shared.pop("pack_gqa"), "config": config_fwd}
    of_forward |= {"return_lse": True}
    of_backward = {name: shared.pop(name) for name in ("score_mod_bwd", "deterministic")}
    of_backward |= {"config": config_bwd, "daux": None}
    lse_low = found[0]["lse_low"]
    assert lse_low.shape == (1, 2, 12) and lse_low.dtype == torch.float32
    for keywords, more in ((found[0], of_forward), (found[1], of_backward | {"dlse": None})):
        expected = shared | more | {"lse_low": lse_low}
        assert keywords.keys() == expected.keys()
        for name, value in expected.items():
            if name == "aux_tensors":
                assert all(a is b for a, b in zip(keywords[name], value, strict=True))
            elif isinstance(value, Tensor):
                assert keywords[name].data_ptr() == value.data_ptr(), name
            else:
                assert keywords[name] is value or keywords[name] == value, name
    assert [x.grad.flatten()[0].item() for x in (q, k, v, sink)] == [0, 1, 2, 7]


# -- what autograd may ask ----------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["q", "k", "v", "learnable_sink", "qv"])
def test_some_inputs_require_gradients(wanted: str) -> None:
    case = FEATURES[2]
    leaves = Arguments.of(inputs_of(case)).leaves()
    names = [name for name in leaves.operands if name in (wanted, *wanted)]
    for name, x in leaves.operands.items():
        x.requires_grad_(name in names)
    out, lse = leaves()
    torch.autograd.backward((out, lse), make_output_gradients(inputs_of(case)))
    expected = eager_results(case).gradients
    for name, x in leaves.operands.items():
        key = "dsink" if name == "learnable_sink" else f"d{name}"
        assert (x.grad is None) == (name not in names)
        assert x.grad is None or torch.equal(x.grad, expected[key])


@pytest.mark.parametrize("of_lse", [False, True])
def test_one_output_is_used(of_lse: bool) -> None:
    q, k, v = qkv()
    result = flash_attn_func(q, k, v, causal=True, return_lse=True)[of_lse]
    first = torch.autograd.grad(result.sum(), (q, k, v))
    both = flash_attn_func(q, k, v, causal=True, return_lse=True)
    weighted = both[0].sum() * (not of_lse) + both[1].sum() * of_lse
    for x, expected in zip(first, torch.autograd.grad(weighted, (q, k, v)), strict=True):
        torch.testing.assert_close(x, expected)
    assert first[0].abs().max() > 0
    assert (first[2] == 0).all() == of_lse


def test_one_tensor_as_all_three() -> None:
    x = qkv()[0]
    (together,) = torch.autograd.grad(flash_attn_func(x, x, x).sin().sum(), x)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(flash_attn_func(*apart).sin().sum(), apart)
    torch.testing.assert_close(together, sum(parts))


def test_backward_twice_through_a_kept_graph() -> None:
    q, k, v = qkv()
    loss = flash_attn_func(q, k, v, startend_row_indices=rows_below(9, 12), causal=True).sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    second = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_gradients_of_any_strides(kind: str) -> None:
    q, k, v = qkv()
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    values = torch.randn(out.shape, dtype=FP64)
    lse_values = torch.randn(lse.shape)
    if kind == "expanded":
        dout, dlse = values[:, :1, :1, :1].expand(out.shape), lse_values[:1, :1, :1].expand_as(lse)
    elif kind == "transposed":
        dout = values.transpose(1, 3).contiguous().transpose(1, 3)
        dlse = lse_values.mT.contiguous().mT
    else:
        dout, dlse = values.repeat_interleave(2, -1)[..., ::2], lse_values.repeat(1, 1, 2)[..., ::2]
    assert not dout.is_contiguous() and not dlse.is_contiguous()
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    plain = torch.autograd.grad((out, lse), (q, k, v), (dout.contiguous(), dlse.contiguous()))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(mode: Callable[[], Any]) -> None:
    q, k, v = qkv()
    expected = flash_attn_func(q, k, v, return_lse=True)
    with mode():
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_masks_made_in_inference_mode() -> None:
    q, k, v = qkv()
    with torch.inference_mode():
        mask = ColumnMask(rows_below(9, 12), True)
    expected = flash_attn_func(q, k, v, causal=True, startend_row_indices=rows_below(9, 12))
    out = flash_attn_func(q, k, v, startend_row_indices=mask)
    for a, b in zip(
        *(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected)), strict=True
    ):
        assert torch.equal(a, b)


def test_lse_is_not_asked_for_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def forward(q: Tensor, *args: Any, return_lse: bool, **keywords: Any) -> Any:
        asked.append(return_lse)
        return torch.zeros_like(q), torch.zeros(1, 2, 12) if return_lse else None

    monkeypatch.setattr(passes, "_flash_attn_fwd", forward)
    q, k, v = qkv()
    flash_attn_func(q.detach(), k.detach(), v.detach())
    flash_attn_func(q, k, v)
    with torch.no_grad():
        flash_attn_func(q, k, v)
        flash_attn_func(q, k, v, return_lse=True)
    assert asked == [False, True, False, True]


@pytest.mark.parametrize("which", ["startend_row_indices", "mask_block_cnt", "aux_tensors", "q"])
def test_a_change_between_forward_and_backward_is_noticed(which: str) -> None:
    case = next(
        case for case in FEATURES
        if case.id == {"mask_block_cnt": "blocks-alone", "aux_tensors": "mask_mod-aux"}.get(
            which, "columns1-causal"
        )
    )  # fmt: skip
    leaves = Arguments.of(make_inputs(case)).leaves()
    out, _ = leaves()
    keywords = leaves.keywords
    changed = {
        "startend_row_indices": lambda: keywords["startend_row_indices"],
        "mask_block_cnt": lambda: keywords["block_sparse_tensors"].mask_block_cnt,
        "aux_tensors": lambda: keywords["aux_tensors"][0],
        "q": lambda: leaves.operands["q"].detach(),
    }[which]()
    changed.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bounds_of_columns_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = column_mask.bounds_by_torch

    def counting(indices: Tensor, tile_n: int, *args: Any, **keywords: Any) -> Tensor:
        computed.append(tile_n)
        return compute(indices, tile_n, *args, **keywords)

    monkeypatch.setattr(column_mask, "bounds_by_torch", counting)
    q, k, v = qkv()
    mask = ColumnMask(rows_below(9, 12), True)
    for _ in range(2):
        flash_attn_func(q, k, v, startend_row_indices=mask).sum().backward()
    assert computed == [torch_ops._TILE_N]
    computed.clear()
    flash_attn_func(q, k, v, causal=True, startend_row_indices=rows_below(9, 12)).sum().backward()
    assert computed == [torch_ops._TILE_N]

    @torch.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    def two_layers(x: Tensor, mask: ColumnMask) -> Tensor:
        for _ in range(2):
            x = flash_attn_func(x, x, x, startend_row_indices=mask)
        return x

    for limit in (9, 7):
        mask = ColumnMask(rows_below(limit, 12), True)
        x = q.detach().clone().requires_grad_()
        two_layers(x, mask).sum().backward()
        eager = q.detach().clone().requires_grad_()
        expected = flash_attn_func(eager, eager, eager, startend_row_indices=mask)
        flash_attn_func(expected, expected, expected, startend_row_indices=mask).sum().backward()
        torch.testing.assert_close(x.grad, eager.grad)
    # for each mask once by the graph and once by eager calls
    assert computed == [torch_ops._TILE_N] * (1 + 2 * 2)


def test_a_warm_call_adds_no_preparation(recorder: Recorder) -> None:
    """A call and its like with gradients are prepared once each (one of them returns no lse)."""
    q, k, v = qkv(dtype=BF16)
    for _ in range(3):
        flash_attn_func(q, k, v)
        flash_attn_func(q.detach(), k.detach(), v.detach())
    assert len(recorder.calls) == 6
    assert len(recorder.prepared) == 2


# -- checkpointing ------------------------------------------------------------------------------

CHECKPOINTED = [
    case for case in FEATURES if case.id in ("columns-packed", "blocks-mask_mod", "score_mod-aux")
]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", CHECKPOINTED, ids=lambda case: case.id)
def test_checkpoint(case: Case, use_reentrant: bool) -> None:
    inputs = inputs_of(case)
    arguments = Arguments.of(inputs)

    def call(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        return checkpoint(
            lambda *operands: arguments.function(*operands, **keywords),
            q, k, v, use_reentrant=use_reentrant,
        )  # fmt: skip

    run(inputs, arguments, call).assert_equal(eager_results(case))


@pytest.mark.parametrize("case", CHECKPOINTED, ids=lambda case: case.id)
def test_selective_checkpoint_sees_operators(case: Case) -> None:
    """Their results can be kept, so that nothing is computed again."""
    inputs = inputs_of(case)
    arguments = Arguments.of(inputs)
    seen = []

    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        if not context.is_recompute:
            seen.append(operator)
        return CheckpointPolicy.MUST_SAVE

    def call(**everything: Any) -> Any:
        return checkpoint(
            arguments.function,
            **everything,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    run(inputs, arguments, call).assert_equal(eager_results(case))
    assert OPERATORS.attention_fwd.default in seen


def test_saved_tensors_elsewhere() -> None:
    inputs, arguments = (x := inputs_of(FEATURES[-1])), Arguments.of(x)
    with torch.autograd.graph.save_on_cpu():
        run(inputs, arguments).assert_equal(eager_results(FEATURES[-1]))


# -- torch.compile ------------------------------------------------------------------------------


@by_id
def test_compiled_equals_eager(case: Case) -> None:
    inputs = inputs_of(case)
    arguments = Arguments.of(inputs)
    compiled = torch.compile(arguments.function, fullgraph=True, backend="aot_eager")
    run(inputs, arguments, compiled).assert_equal(eager_results(case))


def test_a_scale_in_a_tensor() -> None:
    """It is read once: what it holds when the backward runs does not matter."""
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = flash_attn_func(q, k, v, -0.3, window_size=(5, -2))
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for call in (flash_attn_func, torch.compile(flash_attn_func, backend="aot_eager")):
        scale = torch.tensor(-0.3, dtype=FP64)
        out = call(q, k, v, scale, window_size=(5, -2))
        scale.fill_(7.0)
        assert torch.equal(out, expected)
        gradients = torch.autograd.grad(out.sin().sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(gradients, wanted, strict=True))


def test_compiled_masks_follow_their_contents() -> None:
    """Lists and columns are inputs of the graph: nothing of the first call's is remembered."""
    q, k, v = qkv(seqlen=40)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(columns: Tensor, counts: Tensor, blocks: Tensor) -> Tensor:
        lists = flash_mask_cute.BlockSparseTensorsTorch(counts, blocks, block_size=(20, 20))
        return flash_attn_func(
            q, k, v, causal=True, startend_row_indices=columns + 1, block_sparse_tensors=lists
        )

    blocks = int32(0, 1, 0, 1).view(1, 1, 2, 2)
    for limit, counts in ((30, (1, 2)), (20, (1, 2)), (20, (1, 1)), (30, (0, 2))):
        columns, cnt = rows_below(limit, 40), int32(*counts).view(1, 1, 2)
        lists = flash_mask_cute.BlockSparseTensorsTorch(cnt, blocks, block_size=(20, 20))
        expected = flash_attn_func(
            q, k, v, causal=True, startend_row_indices=columns + 1, block_sparse_tensors=lists
        )
        assert torch.equal(call(columns, cnt, blocks), expected), (limit, counts)


def test_operators_hand_lists_over_under_no_known_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled graph may write other lists into the same tensors, which torch does not count."""
    q, k, v = qkv(seqlen=40)
    given = int32(1, 2).view(1, 1, 2), int32(0, 1, 0, 1).view(1, 1, 2, 2)
    lists = flash_mask_cute.BlockSparseTensorsTorch(*given, block_size=(20, 20))
    found: list[Any] = []
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        half = getattr(passes, name)

        def watch(*args: Any, half: Any = half, **keywords: Any) -> Any:
            found.append(keywords["block_sparse_tensors_torch"])
            return half(*args, **keywords)

        monkeypatch.setattr(passes, name, watch)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, block_sparse_tensors=lists)

    torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v).sum().backward()
    call(q, k, v).sum().backward()
    assert len(found) == 4
    for seen, is_eager in zip(found, (False, False, True, True), strict=True):
        assert seen.block_size == (20, 20)
        for tensor, original in zip(seen[:2], given, strict=True):
            assert tensor.data_ptr() == original.data_ptr()
            assert (tensor is original) == is_eager


def test_a_column_mask_made_in_the_graph() -> None:
    q, k, v = qkv()

    def call(limit: Tensor) -> Tensor:
        indices = rows_below(0, 12) + limit
        return flash_attn_func(q, k, v, startend_row_indices=ColumnMask(indices, True))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for limit in (int32(9), int32(5)):
        assert torch.equal(compiled(limit), call(limit))


def test_one_graph_serves_all_lengths() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend, dynamic=True)
    for seqlen in (12, 20, 40):
        q, k, v = (x.detach() for x in qkv(batch=seqlen // 4, seqlen=seqlen))
        mask = ColumnMask(rows_below(seqlen - 3, seqlen), True)
        assert torch.equal(
            compiled(q, k, v, startend_row_indices=mask),
            flash_attn_func(q, k, v, startend_row_indices=mask),
        )
    assert len(graphs) == 1


def test_windows_may_be_symbols() -> None:
    """As in traces with dynamic shapes."""
    q = torch.randn(1, 12, 2, 8)

    def attend(x: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(x, x, x, window_size=(x.shape[1] // 4, None))
        return out

    traced = make_fx(attend, tracing_mode="symbolic")(q)
    torch.testing.assert_close(traced(q), attend(q))
    exported = torch.export.export(_Calls(attend), (q,), strict=False).module()
    torch.testing.assert_close(exported(q), attend(q))


def test_a_wrong_value_is_named_by_a_compiled_call() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 12, 2, 8)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    assert (compiled(q, q, q, window_size=(-2, 0)) == 0).all()
    with pytest.raises(ValueError, match="softcap.*got -2"):
        compiled(q, q, q, softcap=-2.0)


class _Calls(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def test_export() -> None:
    q, k, v = (x.detach() for x in qkv())

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attn_func(q, k, v, causal=True, return_lse=True)

    exported = torch.export.export(Layer(), (q, k, v)).module()
    for found, expected in zip(exported(q, k, v), Layer()(q, k, v), strict=True):
        assert torch.equal(found, expected)


# -- operators ----------------------------------------------------------------------------------

CHECKED = [case for case in FEATURES if case.id in (
    "window-softcap-sink", "columns-packed", "mask_mod-aux", "blocks-mask_mod", "everything-packed",
)]  # fmt: skip


def operator_arguments(case: Case) -> dict[str, tuple[Any, ...]]:
    """The arguments of each operator in a call with gradients."""
    found: dict[str, tuple[Any, ...]] = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "flash_mask_cute":
                found[func._opname] = args
            return func(*args, **(kwargs or {}))

    inputs = inputs_of(case)
    with Watch():
        run(inputs, Arguments.of(inputs)).assert_equal(eager_results(case))
    return found


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.id)
def test_opcheck(case: Case) -> None:
    arguments = operator_arguments(case)
    assert ("column_bounds" in arguments) == (case.column is not None)
    for name, given in arguments.items():
        detached = [x.detach() if isinstance(x, Tensor) else x for x in given]
        if name == "attention_fwd":
            for x in detached[:4]:
                if x is not None:
                    x.requires_grad_()
        torch.library.opcheck(getattr(OPERATORS, name).default, tuple(detached))


def test_operators_know_shapes_of_any_strides() -> None:
    """What a transposed q and a packed one give, without computing."""
    from torch._subclasses import FakeTensorMode

    inputs = make_inputs(Case("fake", 1, 9, 12, head_dim=16, dtype=FP64, strided="transposed"))
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    real_out, real_lse = _flash_attn_fwd(inputs.q, inputs.k, inputs.v)
    for fake, real in ((out, real_out), (lse, real_lse)):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    real_grads = run(inputs, Arguments.of(inputs)).gradients
    for fake, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        real = real_grads[name]
        assert real is not None and (fake.shape, fake.dtype) == (real.shape, real.dtype)


# -- callables as names -------------------------------------------------------------------------


def make_mod(factor: float) -> tuple[Callable[..., Any], Callable[[float], None]]:
    """A score_mod that multiplies, and what changes its factor."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return mod, change


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * self.factor

    def method(self, score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * self.factor


def test_names_of_callables() -> None:
    name_of = mod_names.optional_name
    (first, change), (second, _) = make_mod(2.0), make_mod(2.0)
    name = name_of(first)
    assert name is not None and name_of(None) is None
    assert name_of(first) == name
    assert name_of(second) != name
    change(3.0)
    assert name_of(first) != name
    change(2.0)
    assert name_of(first) == name
    assert mod_names.optional_mod(name) is first
    scaling = Scaling(2.0)
    assert name_of(scaling.method) == name_of(scaling.method) != name_of(Scaling(2.0).method)
    with pytest.raises(RuntimeError, match="no callable is known as 'py3:0#0'"):
        mod_names.optional_mod("py3:0#0")
    with pytest.raises(TypeError, match="tensor"):
        held = torch.ones(2)
        name_of(lambda score, *_: score * held)


@pytest.mark.parametrize("kind", ["function", "object", "method", "made in the graph"])
def test_compiled_callables(kind: str) -> None:
    q, k, v = qkv()
    scaling = Scaling(2.0)
    mods: dict[str, Callable[[], Any]] = {
        "function": lambda: MOD,
        "object": lambda: scaling,
        "method": lambda: scaling.method,
        "made in the graph": lambda: lambda score, *_: score * 2.0,
    }
    MOD = make_mod(2.0)[0]
    get = mods[kind]
    expected = flash_attn_func(q, k, v, score_mod=MOD)

    def call() -> Tensor:
        return flash_attn_func(q, k, v, score_mod=get())

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(), expected)


@pytest.mark.parametrize("kind", ["closure", "object", "method"])
def test_each_callable_has_a_graph(kind: str) -> None:
    """Also where all have the same code."""
    q, k, v = qkv()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    results = []
    for factor in (2.0, 3.0):
        mod: Callable[..., Any] = Scaling(factor)
        if kind == "closure":
            mod = make_mod(factor)[0]
        elif kind == "method":
            mod = Scaling(factor).method
        results.append(compiled(q, k, v, score_mod=mod))
        assert torch.equal(results[-1], flash_attn_func(q, k, v, score_mod=mod))
    assert (results[0] != results[1]).any()


def test_a_compiled_call_follows_its_callable() -> None:
    """As an eager call does, where a closure changes after the graph was made."""
    q, k, v = qkv()
    mod, change = make_mod(2.0)
    compiled = torch.compile(
        lambda: flash_attn_func(q, k, v, score_mod=mod), fullgraph=True, backend="aot_eager"
    )
    results = []
    for factor in (2.0, 3.0):
        change(factor)
        results.append(compiled())
        assert torch.equal(results[-1], flash_attn_func(q, k, v, score_mod=mod))
    assert (results[0] != results[1]).any()


def test_exports() -> None:
    for name in functional.__all__:
        assert getattr(flash_mask_cute, name) is getattr(functional, name)
        assert name in flash_mask_cute.__all__
    assert set(flash_mask_cute.__all__) <= set(dir(flash_mask_cute))
