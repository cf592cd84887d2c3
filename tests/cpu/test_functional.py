"""Gradients and checkpointing through the public functions, on CPU tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP64, Case, int32
from eager import assert_close_to_oracle, assert_gradients_close
from functional_calls import (
    FEATURES,
    NEG_INF,
    OPERATORS,
    RTOL,
    Arguments,
    by_id,
    eager_results,
    inputs_of,
    qkv,
    rows_below,
    run,
)
from inputs import make_inputs, make_output_gradients
from launch_recorder import Recorder
from planned import LENGTHS, arguments_of
from torch import Tensor
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
    interface,
)
from flash_mask_cute.autograd import attend, torch_ops
from flash_mask_cute.call.arguments import AttentionCall
from flash_mask_cute.interface import BwdConfig, FwdConfig, _flash_attn_fwd
from flash_mask_cute.masks import column_mask
from flash_mask_cute.masks.column_mask import ColumnMask

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# -- gradients ----------------------------------------------------------------------------------


@by_id
def test_results_against_float64(case: Case) -> None:
    inputs, results = inputs_of(case), eager_results(case)
    out, lse = inputs.reference
    torch.testing.assert_close(results.out, out, rtol=RTOL, atol=RTOL)
    torch.testing.assert_close(results.lse, lse.float(), rtol=RTOL, atol=RTOL)
    dout, dlse = make_output_gradients(inputs)
    assert_gradients_close(results.gradients, inputs, dout, dlse, rtol=RTOL)


@pytest.mark.parametrize("case", FEATURES[-1:] + FEATURES[2:7:2])
def test_bfloat16(case: Case) -> None:
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    inputs = make_inputs(Case(**fields | {"dtype": BF16}))
    dout, dlse = make_output_gradients(inputs)
    results = run(inputs, Arguments.create(inputs))
    assert_close_to_oracle(results.out, results.lse, inputs)
    assert_gradients_close(results.gradients, inputs, dout, dlse)


@by_id
def test_gradcheck(case: Case) -> None:
    """Numerically, and with gradients of out or lse that are absent."""
    inputs = inputs_of(case)
    arguments = Arguments.create(inputs)
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
    own = {
        "window_size",
        "block_sparse_tensors",
        "num_splits",
        "page_table",
        "return_lse",
        "return_max_logit",
        "out",
        # of a cache in fp8, which has no backward
        "k_descale",
        "v_descale",
    }
    given: dict[str, Any] = {
        name: object()
        for name in inspect.signature(flash_attn_varlen_func).parameters
        if name not in own | {"q", "k", "v", "learnable_sink"}
    }
    lengths = {name: int32(0, i) for i, name in enumerate(LENGTHS)}
    given |= lengths | {
        "q_start": int32(5),
        "aux_tensors": [torch.ones(1), torch.ones(2)],
        "startend_row_indices": ColumnMask(rows_below(3, 12), True),
        "config": (FwdConfig(tile_m=192), BwdConfig(tile_m=64)),
    }
    lists = flash_mask_cute.BlockSparseTensorsTorch(int32(1), int32(2), block_size=(16, 16))
    found: list[dict[str, Any]] = []

    def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
        found.append(arguments_of(call))
        return torch.zeros_like(q), torch.zeros(1, 2, 12)

    def backward(call: AttentionCall) -> tuple[Tensor, ...]:
        found.append(arguments_of(call))
        assert call.tensors.gradients.dsink is not None
        call.tensors.gradients.dsink.fill_(7.0)
        return tuple(torch.full_like(x, i) for i, x in enumerate(call.tensors[:3]))

    for check in ("check_gradient_settings", "check_mod"):
        monkeypatch.setattr(attend, check, lambda *told: None)
    monkeypatch.setattr(interface, "forward", forward)
    monkeypatch.setattr(interface, "backward", backward)
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
    # where a graph is recorded there is one pass, or sums are cut at the same keys
    of_forward |= {"return_lse": True, "max_scores": None, "num_splits": 0}
    of_forward["seqlen_k_per_split"] = shared.pop("seqlen_k_per_split")
    of_forward |= dict.fromkeys(("page_table", "kv_batch_idx", "leftpad_k"))
    of_forward |= dict.fromkeys(("k_descale", "v_descale"))
    of_backward = {name: shared.pop(name) for name in ("score_mod_bwd", "deterministic")}
    of_backward |= {"config": config_bwd, "daux": None}
    lse, lse_low = found[0]["lse"], found[0]["lse_low"]
    assert all(x.shape == (1, 2, 12) and x.dtype == q.dtype for x in (lse, lse_low))
    of_forward |= {"out": None, "lse": lse}
    of_backward |= dict.fromkeys(("dlse", "dq", "dk", "dv"))
    results = {"out", "lse", "dout", "dsink"}
    for keywords, more in ((found[0], of_forward), (found[1], of_backward)):
        expected = shared | more | {"lse_low": lse_low}
        assert keywords.keys() - expected.keys() <= {"q", "k", "v", *results}
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
    leaves = Arguments.create(inputs_of(case)).leaves()
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

    def forward(call: AttentionCall) -> Any:
        return_lse = call.options.return_lse
        asked.append(return_lse)
        return torch.zeros_like(call.tensors.q), torch.zeros(1, 2, 12) if return_lse else None

    monkeypatch.setattr(interface, "forward", forward)
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
    inputs = make_inputs(case)
    leaves = Arguments.create(inputs).leaves()
    out, _ = leaves()
    keywords = leaves.keywords
    changed = {
        "startend_row_indices": lambda: inputs.column_mask.startend_row_indices,
        "mask_block_cnt": lambda: keywords["block_sparse_tensors"].mask_block_cnt,
        "aux_tensors": lambda: keywords["aux_tensors"][0],
        "q": lambda: leaves.operands["q"].detach(),
    }[which]()
    changed.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bounds_of_columns_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = column_mask.fill_bounds

    def counting(indices: Tensor, bounds: Tensor, tile_n: int, *args: Any) -> None:
        computed.append(tile_n)
        compute(indices, bounds, tile_n, *args)

    monkeypatch.setattr(column_mask, "fill_bounds", counting)
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
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_checkpoint(case: Case, use_reentrant: bool) -> None:
    inputs = inputs_of(case)
    arguments = Arguments.create(inputs)

    def call(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        return checkpoint(
            lambda *operands: arguments.function(*operands, **keywords),
            q, k, v, use_reentrant=use_reentrant,
        )  # fmt: skip

    run(inputs, arguments, call).assert_equal(eager_results(case))


@pytest.mark.parametrize("case", CHECKPOINTED)
def test_selective_checkpoint_sees_operators(case: Case) -> None:
    """Their results can be kept, so that nothing is computed again."""
    inputs = inputs_of(case)
    arguments = Arguments.create(inputs)
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
    inputs, arguments = (x := inputs_of(FEATURES[-1])), Arguments.create(x)
    with torch.autograd.graph.save_on_cpu():
        run(inputs, arguments).assert_equal(eager_results(FEATURES[-1]))


def test_exports() -> None:
    for name in functional.__all__:
        assert getattr(flash_mask_cute, name) is getattr(functional, name)
        assert name in flash_mask_cute.__all__
    assert set(flash_mask_cute.__all__) <= set(dir(flash_mask_cute))
