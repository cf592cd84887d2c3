"""The context `sdpa`: torch's signature against float64, and what is left to torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import band, dense_attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from flash_mask_cute.integrations.torch import Ran, kernels_run, sdpa

NAME = "scaled_dot_product_attention"
OURS = [Ran(NAME, "flash_mask_cute", None)]
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
CROSS: Shapes = (2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 8)


def tensors_of(shapes: Shapes) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def compare(
    tensors: tuple[Tensor, ...],
    options: Mapping[str, Any],
    visible: Tensor | None = None,
    call: Callable[..., Tensor] = F.scaled_dot_product_attention,
    ran_ours: list[Ran] = OURS,
) -> None:
    """Values and gradients, also of an attn_mask that requires them."""
    q, k, v = tensors
    mask = options.get("attn_mask")
    added = mask if visible is None else None
    with sdpa(), kernels_run() as ran:
        out = call(q, k, v, **options)
    assert ran == ran_ours
    expected = dense_attention(q, k, v, visible, added, options.get("scale")).out
    assert out.shape == expected.shape and out.dtype == q.dtype
    leaves = [*tensors, *([added] if added is not None and added.requires_grad else [])]
    found = torch.autograd.grad(out.sin().sum(), leaves)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for x, y in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=6e-6, rtol=6e-6)


# -- torch's signature --------------------------------------------------------------------------

SHAPES: dict[str, Shapes] = {
    "lengths": CROSS,
    "no heads": ((9, 16), (13, 16), (13, 8)),
    "no batch": ((4, 9, 16), (4, 13, 16), (4, 13, 8)),
    "two batches": ((2, 3, 4, 9, 16), (2, 3, 4, 13, 16), (2, 3, 4, 13, 8)),
    "batches broadcast": ((2, 1, 4, 9, 16), (3, 4, 13, 16), (2, 3, 4, 13, 8)),
    "one batch of keys": ((3, 4, 9, 16), (1, 4, 13, 16), (4, 13, 8)),
    "one head of keys": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 1, 13, 8)),
    "one head of queries": ((2, 1, 9, 16), (2, 4, 13, 16), (2, 4, 13, 8)),
    "padded head_dim": ((1, 2, 9, 13), (1, 2, 13, 13), (1, 2, 13, 5)),
    "wide heads": ((1, 2, 9, 300), (1, 2, 13, 300), (1, 2, 13, 260)),
    "no keys": ((1, 2, 9, 16), (1, 2, 0, 16), (1, 2, 0, 8)),
    "no queries": ((1, 2, 0, 16), (1, 2, 9, 16), (1, 2, 9, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: Shapes) -> None:
    compare(tensors_of(shapes), {})


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_groups_of_heads(heads_kv: int) -> None:
    shapes = (2, 4, 9, 16), (2, heads_kv, 13, 16), (2, heads_kv, 13, 8)
    compare(tensors_of(shapes), {"enable_gqa": True, "scale": 0.3})


@pytest.mark.filterwarnings("ignore:softmax_scale is 0")
@pytest.mark.parametrize("scale", [0.7, -0.2, 0.0, 2])
def test_scales(scale: float) -> None:
    compare(tensors_of(CROSS), {"scale": scale})


@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (13, 9), (1, 13)], ids=str)
def test_causal_starts_at_the_first_key(lengths: tuple[int, int]) -> None:
    """Torch aligns is_causal top-left; causal of our functions is aligned bottom-right."""
    queries, keys = lengths
    shapes = (2, 4, queries, 16), (2, 4, keys, 16), (2, 4, keys, 16)
    visible = band(queries, keys, right=0, at_end=False)
    compare(tensors_of(shapes), {"is_causal": True}, visible)


@pytest.mark.parametrize("side", ["upper_left", "lower_right"])
def test_biases_of_torch(side: str) -> None:
    mask = getattr(bias, f"causal_{side}")(9, 13)
    visible = band(9, 13, right=0, at_end=side == "lower_right")
    compare(tensors_of(CROSS), {"attn_mask": mask}, visible)


MASKS = [
    *((9, 13), (1, 13), (9, 1), (1, 1), (13,), (4, 1, 13), (1, 9, 13)),
    *((2, 1, 1, 13), (2, 4, 9, 13), (1, 4, 9, 13), (2, 1, 9, 1), (2, 1, 9, 13)),
]
by_mask = pytest.mark.parametrize("shape", MASKS, ids=str)


@pytest.mark.shares(3)
@by_mask
def test_masks_of_bools(shape: tuple[int, ...]) -> None:
    """Queries that see nothing are 0, as in torch."""
    mask = torch.rand(shape) > 0.4
    compare(tensors_of(CROSS), {"attn_mask": mask}, mask)


@pytest.mark.shares(3)
@by_mask
def test_masks_that_are_added(shape: tuple[int, ...]) -> None:
    compare(tensors_of(CROSS), {"attn_mask": torch.randn(shape, requires_grad=True)})


def test_masks_that_hide_by_infinity() -> None:
    hidden = torch.rand(2, 1, 9, 13) > 0.6
    hidden[0, 0, 3] = True
    mask = torch.randn(2, 1, 9, 13).masked_fill(hidden, -torch.inf)
    compare(tensors_of(CROSS), {"attn_mask": mask})


@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_of_more_batches(is_bool: bool) -> None:
    shapes = (2, 3, 4, 9, 16), (2, 3, 4, 13, 16), (2, 3, 4, 13, 8)
    for batch in ((2, 3), (1, 3), (2, 1), (1, 1)):
        mask = torch.randn(*batch, 1, 9, 13)
        chosen = mask > -0.3 if is_bool else mask
        compare(tensors_of(shapes), {"attn_mask": chosen}, chosen if is_bool else None)


EMPTY: dict[str, Shapes] = {
    "no keys": ((2, 4, 9, 16), (2, 4, 0, 16), (2, 4, 0, 8)),
    "no queries": ((2, 4, 0, 16), (2, 4, 13, 16), (2, 4, 13, 8)),
    "no batch entries": ((0, 4, 9, 16), (0, 4, 13, 16), (0, 4, 13, 8)),
    "no keys, two batches": ((2, 3, 4, 9, 16), (2, 3, 4, 0, 16), (2, 3, 4, 0, 8)),
    "no keys, no heads": ((9, 16), (0, 16), (0, 8)),
}


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
def test_masks_with_nothing_to_attend(shapes: Shapes, is_bool: bool) -> None:
    """Of all shapes that broadcast to the scores. Older torch refuses some of these masks."""
    (*batch, rows, _), keys = shapes[0], shapes[1][-2]
    ends = [(rows, keys), (rows, 1), (1, keys), (1, 1), (keys,), (1,), ()]
    starts = {tuple(batch), (*batch[:1], *(1 for _ in batch[1:])), ()}
    for shape in {(*x, *y) for x in starts for y in ends if len(y) == 2 or not x}:
        mask = torch.randn(shape)
        chosen = mask > 0 if is_bool else mask.requires_grad_()
        tensors = tensors_of(shapes)
        with sdpa(), kernels_run() as ran:
            out = F.scaled_dot_product_attention(*tensors, attn_mask=chosen)
            assert torch.equal(out, F.scaled_dot_product_attention(*tensors))
        assert ran == OURS * 2
        assert torch.equal(out, F.scaled_dot_product_attention(*tensors))
        grads = torch.autograd.grad(out.sum(), (*tensors, mask)[: 4 - is_bool], allow_unused=True)
        assert all(not y.any() for y in grads[:3]) and grads[3:] in ((), (None,)), shape


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_mask_made_in_inference_mode_serves_training(is_bool: bool) -> None:
    with torch.inference_mode():
        mask = torch.randn(2, 1, 9, 13)
        chosen = mask > 0 if is_bool else mask
    visible = chosen.clone() if is_bool else None
    compare(tensors_of(CROSS), {"attn_mask": chosen}, visible)


def test_a_mask_that_changes_between_calls() -> None:
    tensors, mask = tensors_of(CROSS), torch.rand(2, 1, 1, 13) > 0.4
    for _ in range(2):
        compare(tensors, {"attn_mask": mask}, mask.clone())
        mask.logical_not_()


def test_arguments_by_position() -> None:
    mask = torch.rand(9, 13) > 0.4
    with sdpa(), kernels_run() as ran:
        q, k, v = tensors_of(CROSS)
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    assert ran == OURS
    torch.testing.assert_close(out, dense_attention(q, k, v, mask).out.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_masks_of_fp32(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in CROSS)
    mask = torch.randn(9, 13)
    with sdpa(), kernels_run() as ran:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert ran == OURS and out.dtype == dtype
    expected = dense_attention(q, k, v, None, mask).out
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_autocast() -> None:
    q, k, v = tensors_of(CROSS)
    mask = torch.randn(9, 13).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa(), kernels_run() as ran:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert ran == OURS and out.dtype == torch.bfloat16
    expected = dense_attention(q, k, v, None, mask).out
    torch.testing.assert_close(out.double(), expected, atol=5e-2, rtol=5e-2)


def test_the_context_ends() -> None:
    q, k, v = tensors_of(CROSS)
    with kernels_run() as ran:
        with sdpa():
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        with sdpa():
            F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert ran == OURS * 2


# -- torch.compile ------------------------------------------------------------------------------

COMPILED: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bools": {"attn_mask": torch.rand(2, 1, 9, 13) > 0.3},
    "added": {"attn_mask": torch.randn(4, 9, 13)},
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compiled(options: Mapping[str, Any]) -> None:
    """In one graph, which has our operator and not torch's."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(
        lambda q, k, v, **given: F.scaled_dot_product_attention(q, k, v, **given),
        fullgraph=True,
        backend=backend,
    )
    mask = options.get("attn_mask")
    visible = mask if mask is not None and mask.dtype == torch.bool else None
    if "is_causal" in options:
        visible = band(9, 13, right=0, at_end=False)
    compare(tensors_of(CROSS), options, visible, compiled, [])
    (code,) = graphs
    assert "flash_mask_cute.attention_fwd" in code and NAME not in code


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_inside_and_outside() -> None:
    """Each has a graph of its own, which later calls of the same kind find again."""
    graphs: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append("flash_mask_cute.attention_fwd" in graph.code)
        return graph

    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True, backend=backend
    )
    tensors = tensors_of(CROSS)
    for _ in range(2):
        with sdpa():
            inside = compiled(*tensors)
        torch.testing.assert_close(inside, compiled(*tensors))
    assert graphs == [True, False]


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_and_left_to_torch() -> None:
    q, k, v = tensors_of(CROSS)
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.0),
        fullgraph=True,
        backend="eager",
    )
    with sdpa():
        assert not compiled(q, k, v).any()


# -- what is left to torch ----------------------------------------------------------------------


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    jagged = torch.nested.nested_tensor(
        [torch.ones(5, 4, 16), torch.ones(7, 4, 16)], layout=torch.jagged
    ).transpose(1, 2)
    return F.scaled_dot_product_attention(jagged, jagged, jagged).transpose(1, 2).values()


def other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v[:, :2].contiguous(), enable_gqa=True)


def masked_and_causal(q: Tensor, k: Tensor, v: Tensor) -> Any:
    mask = torch.ones(9, 13, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)


LEFT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.0),
                "dropout_p=1.0 is not supported: only 0"),
    "sdpa_kernel": (by_math, "torch's flash attention is disabled, as by sdpa_kernel"),
    "nested": (nested, "nested tensors are not supported"),
    "vmap": (torch.vmap(F.scaled_dot_product_attention), "transforms of torch.func"),
    "other heads": (other_heads, "key has 4 heads, and value 2"),
    "masked and causal": (masked_and_causal, "attn_mask is given together with is_causal=True"),
    "dtype": (
        lambda *_: F.scaled_dot_product_attention(
            *torch.ones(3, 1, 2, 4, 8, dtype=torch.int64).to(torch.float8_e4m3fn)
        ),
        "float8_e4m3fn",
    ),
    "lengths of a bias": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias.causal_lower_right(3, 5)),
        "CausalBias of lengths 3 and 5, got 9 queries and 13 keys",
    ),
    "mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 13)),
             r"attn_mask and scores do not broadcast, got \(5, 13\), \(2, 4, 9, 13\)"),
    "a mask of more dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(3, 2, 4, 9, 13)),
        r"attn_mask must broadcast to \(2, 4, 9, 13\), got \(3, 2, 4, 9, 13\)",
    ),
    "integers": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(9, 13).int()),
                 "attn_mask must be bool or of query's dtype, got torch.int32"),
    "batches": (lambda q, k, v: F.scaled_dot_product_attention(q, torch.ones(3, 4, 13, 16), v),
                r"batches do not broadcast, got \(2,\), \(3,\), \(2,\)"),
}  # fmt: skip


def result_of(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
    """What a call returns or raises."""
    try:
        return call(*tensors)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.parametrize("case", LEFT)
def test_left_to_torch(case: str) -> None:
    """Results and errors are torch's, and the reason is told."""
    call, reason = LEFT[case]
    tensors = tensors_of(CROSS)
    expected = result_of(call, tensors)
    with (
        sdpa(),
        kernels_run() as ran,
        pytest.warns(UserWarning, match=f"{NAME} runs on torch's own kernel: .*({reason})") as told,
    ):
        result = result_of(call, tensors)
    assert [(x.operator, x.kernel) for x in ran] == [(NAME, "torch")]
    assert sum("torch's own kernel" in str(x.message) for x in told) == 1
    if isinstance(expected, Tensor):
        torch.testing.assert_close(result, expected, atol=0, rtol=0, equal_nan=True)
    else:
        assert result == expected


@pytest.mark.parametrize("wrong", [{"droppout": 0.5}, {"scale": "a"}, {"is_causal": None}])
def test_what_torch_does_not_read(wrong: Mapping[str, Any]) -> None:
    """Torch raises its own error before a mode is asked."""
    tensors = tensors_of(CROSS)
    with sdpa(), kernels_run() as ran, pytest.raises(TypeError, match="scaled_dot_product_att"):
        F.scaled_dot_product_attention(*tensors, **wrong)
    assert not ran


@pytest.mark.usefixtures("nothing_warned")
def test_multi_head_attention_is_out_of_reach() -> None:
    """torch gives a mode its call whole, so nothing inside is seen."""
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    with (
        sdpa(),
        kernels_run() as ran,
        pytest.warns(UserWarning, match="multi_head_attention_forward runs on torch's own kernel"),
    ):
        out = layer(x, x, x, need_weights=False)[0]
    assert [(x.operator, x.kernel) for x in ran] == [("multi_head_attention_forward", "torch")]
    assert torch.equal(out, expected)


def test_second_derivatives_are_refused() -> None:
    q, k, v = tensors_of(CROSS)
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()
