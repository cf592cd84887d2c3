"""Autograd, torch.compile, CUDA graphs and checkpointing on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, FP32, FP64, Case
from eager import assert_close_to_oracle, assert_gradients_close
from inputs import Inputs, make_inputs, make_output_gradients
from planned import function_of
from public_call import no_waiting
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from flash_mask_cute import BlockSparseTensorsTorch, flash_attn_func

CASES = (
    Case("causal-gqa4-sink", 2, 300, 300, 8, 2, causal=True, sink=FP32),
    Case("window-d64", 1, 255, 400, head_dim=64, window_left=90, window_right=3),
    Case("columns1", 1, 300, 300, 4, 2, causal=True, column="random1"),
    Case("columns-packed", lengths_q=(129, 0, 200), lengths_k=(200, 63, 170), causal=True,
         column="stepped1"),
    Case("mask_mod-blocks", 2, 255, 255, mask_mod="documents", blocks=(64, 64)),
    Case("everything-packed", heads_q=4, heads_kv=2, lengths_q=(129, 63), lengths_k=(200, 129),
         causal=True, window_left=150, softcap=15.0, sink=BF16, column="random1",
         column_heads="kv", mask_mod="checks", score_mod="t5", blocks=(64, 64)),
    Case("documents1-gqa2", 2, 1300, 1300, 4, 2, causal=True, column="documents1", sink=FP32),
    Case("documents2-d64", 2, 1111, 1111, head_dim=64, column="documents2"),
    Case("documents4-window", 1, 1500, 1500, 4, 1, window_left=90, column="documents4"),
)  # fmt: skip
by_id = pytest.mark.parametrize("case", CASES)


def arguments_of(inputs: Inputs) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A public function and its keywords, operands included, which require gradients."""
    function, keywords = function_of(inputs)
    keywords |= {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if (inputs.case.column or "").startswith("documents"):
        mask = inputs.column_mask
        keywords["startend_row_indices"] = replace(mask, documents=True)
    for name in ("q", "k", "v", "learnable_sink"):
        if keywords[name] is not None:
            keywords[name] = keywords[name].detach().clone().requires_grad_()
    return function, keywords


def run_and_check_gradients(
    inputs: Inputs, call: Callable[..., Any], keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What call(**keywords) returns; the tensors among the keywords have their gradients then."""
    dout, dlse = make_output_gradients(inputs)
    out, lse = call(**keywords)
    torch.autograd.backward((out, lse), (dout, dlse))
    sink = keywords["learnable_sink"]
    gradients = {f"d{name}": keywords[name].grad for name in "qkv"}
    gradients["dsink"] = None if sink is None else sink.grad
    assert_gradients_close(gradients, inputs, dout, dlse)
    return out.detach(), lse.detach()


def check(inputs: Inputs, call: Callable[..., Any] | None = None) -> None:
    """call: instead of the function, with its keywords."""
    function, keywords = arguments_of(inputs)
    assert_close_to_oracle(*run_and_check_gradients(inputs, call or function, keywords), inputs)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: torch.stack((x, x), -1)[..., 0],
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 4))[..., : x.shape[-1]],
    "one late": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
    "overlapping": lambda x: x.as_strided(x.shape, (x.stride(0), x.stride(1), 8, 1)),
}


@pytest.mark.parametrize("scale", [None, -0.1, 0.0])
@pytest.mark.parametrize("form", VIEWS)
def test_operands_of_any_strides_and_scales_of_any_sign(form: str, scale: float | None) -> None:
    """All of one kernel. What is copied for it is not kept for the backward."""
    case = Case(form, 2, 255, 300, 4, 2, softmax_scale=scale, sink=FP64)
    inputs = make_inputs(case, "cuda")
    q, k, v = (VIEWS[form](x) for x in (inputs.q, inputs.k, inputs.v))
    inputs = replace(inputs, q=q, k=k, v=v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sink = inputs.keywords["learnable_sink"].clone().requires_grad_()
    for is_warm in (False, True):
        before = torch.cuda.memory_allocated()
        out, lse = flash_attn_func(*leaves, scale, learnable_sink=sink, return_lse=True)
        kept = torch.cuda.memory_allocated() - before
        # in blocks of 512 bytes
        assert not is_warm or kept <= out.nbytes + lse.nbytes + 2 * 512
        assert_close_to_oracle(out, lse, inputs)
        dout, dlse = make_output_gradients(inputs)
        found = torch.autograd.grad((out, lse), [*leaves, sink], (dout, dlse))
        named = dict(zip(("dq", "dk", "dv", "dsink"), found, strict=True))
        assert_gradients_close(named, inputs, dout, dlse)
        del out, lse, found, named


@by_id
def test_eager(case: Case) -> None:
    check(make_inputs(case, "cuda"))


@by_id
def test_inductor(case: Case) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(case, "cuda")
    compiled = torch.compile(arguments_of(inputs)[0], fullgraph=True)
    for seed in range(2):
        check(make_inputs(case, "cuda", seed), compiled)


@pytest.mark.parametrize("case", CASES[::2])
def test_graphs_of_the_compiler(case: Case) -> None:
    """Recorded in the second call, replayed in the others, on new tensors."""
    torch._dynamo.reset()
    compiled = torch.compile(
        arguments_of(make_inputs(case, "cuda"))[0], fullgraph=True, mode="reduce-overhead"
    )
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        check(make_inputs(case, "cuda", seed), compiled)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", CASES[1::2])
def test_checkpoint(case: Case, use_reentrant: bool) -> None:
    inputs = make_inputs(case, "cuda")
    function, _ = arguments_of(inputs)

    def call(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        # a reentrant one finds tensors among positional arguments only
        sink = keywords.pop("learnable_sink")
        return checkpoint(
            lambda q, k, v, sink: function(q, k, v, learnable_sink=sink, **keywords),
            q, k, v, sink, use_reentrant=use_reentrant,
        )  # fmt: skip

    check(inputs, call)


@pytest.mark.parametrize("case", [*CASES[:3], CASES[6]])
def test_a_captured_step_follows_its_inputs(case: Case) -> None:
    """Forward and backward in one CUDA graph, replayed on other values and another mask."""
    captured, fresh = (make_inputs(case, "cuda", seed) for seed in (0, 1))
    function, keywords = arguments_of(captured)
    mask = captured.column_mask
    indices = None if mask is None else mask.startend_row_indices
    if isinstance(keywords.get("startend_row_indices"), Tensor):
        keywords["startend_row_indices"] = mask
    dout, dlse = make_output_gradients(captured)
    operands = [x for n in ("q", "k", "v", "learnable_sink") if (x := keywords[n]) is not None]

    def step() -> tuple[Tensor, ...]:
        if indices is not None:
            keywords["startend_row_indices"].refresh()
        out, lse = function(**keywords)
        return (out, lse, *torch.autograd.grad((out, lse), operands, (dout, dlse)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    new_dout, new_dlse = make_output_gradients(fresh, seed=2)
    sources = [fresh.q, fresh.k, fresh.v, fresh.keywords["learnable_sink"]]
    with torch.no_grad():
        for x, new in zip(operands, sources, strict=False):
            x.copy_(new)
        dout.copy_(new_dout)
        dlse.copy_(new_dlse)
        if indices is not None:
            indices.copy_(fresh.column_mask.startend_row_indices)
        for x in results:
            x.fill_(float("nan"))
    graph.replay()
    assert_close_to_oracle(results[0].detach(), results[1].detach(), fresh)
    names = ("dq", "dk", "dv", "dsink")
    gradients: dict[str, Tensor | None] = dict.fromkeys(names)
    gradients |= dict(zip(names, results[2:], strict=False))
    assert_gradients_close(gradients, fresh, dout, dlse)


@pytest.mark.parametrize("case", CASES[6:])
def test_documents_in_a_fixed_order(case: Case) -> None:
    """Bits of their gradients are the same in every run, and without skipping."""
    inputs = make_inputs(case, "cuda")
    dout, dlse = make_output_gradients(inputs)
    function, keywords = arguments_of(inputs)
    operands = [x for n in ("q", "k", "v", "learnable_sink") if (x := keywords[n]) is not None]

    def run(**more: Any) -> tuple[Tensor, ...]:
        out, lse = function(**keywords, **more, deterministic=True)
        return torch.autograd.grad((out, lse), operands, (dout, dlse))

    first = run()
    for more in (*({},) * 9, {"config": {"skip_blocks": False}}):
        assert all(torch.equal(x, y) for x, y in zip(run(**more), first, strict=True))


@by_id
def test_a_warm_step_waits_for_nothing(case: Case) -> None:
    function, keywords = arguments_of(make_inputs(case, "cuda"))

    def step() -> None:
        out, lse = function(**keywords)
        (out.float().sum() + lse.clamp(min=-100.0).sum()).backward()

    step()
    with no_waiting():
        step()


def test_operators_read_lists_that_were_rewritten_unseen() -> None:
    """As a compiled graph does with a buffer that it uses again; blocks that tiles do not fit."""
    q, k, v = (torch.randn(1, 192, 2, 128, dtype=BF16, device="cuda") for _ in range(3))
    cnt = torch.tensor([[[1, 2]]], dtype=torch.int32, device="cuda")
    idx = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32, device="cuda")
    lists = BlockSparseTensorsTorch(cnt, idx, block_size=(96, 96))
    compiled = torch.compile(
        lambda: flash_attn_func(q, k, v, block_sparse_tensors=lists), fullgraph=True
    )
    first = compiled()
    cnt.data.fill_(1)
    second = compiled()
    assert torch.equal(first[:, :96], second[:, :96])
    assert (first[:, 96:] != second[:, 96:]).any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
def test_autocast(compiled: bool) -> None:
    """q, k and v are cast; the sink stays; gradients have the dtypes of their tensors."""
    torch._dynamo.reset()
    inputs = make_inputs(CASES[0], "cuda")
    leaves = [x.float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    sink = inputs.keywords["learnable_sink"].clone().requires_grad_()
    cast = [x.detach().bfloat16().requires_grad_() for x in leaves]
    dout, _ = make_output_gradients(inputs)
    attend: Any = torch.compile(flash_attn_func, fullgraph=True) if compiled else flash_attn_func
    options: Any = {"causal": True, "learnable_sink": sink, "deterministic": True}
    with torch.autocast("cuda", dtype=BF16):
        out = attend(*leaves, **options)
        rows = (x.transpose(1, 2) for x in leaves)
        of_torch = torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=True)
    assert out.dtype == of_torch.dtype == BF16
    expected = flash_attn_func(*cast, **options)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out, [*leaves, sink], dout)
    for x, of_cast in zip(found, torch.autograd.grad(expected, [*cast, sink], dout), strict=True):
        assert x.dtype == FP32 and torch.equal(x, of_cast.float())


def test_wrappers_and_batches() -> None:
    """Beside a warm call with the metadata of what they wrap."""
    inputs = make_inputs(CASES[2], "cuda")
    _, keywords = arguments_of(inputs)
    (out, lse), wrapped = flash_attn_func(**keywords), TwoTensor(inputs.k, inputs.k.flip(1).clone())
    parts = flash_attn_func(**keywords | {"k": wrapped})[0]
    assert type(parts) is TwoTensor and torch.equal(parts.a, out)
    assert torch.equal(parts.b, flash_attn_func(**keywords | {"k": wrapped.b})[0])
    for result in (out, lse):
        torch.autograd.grad(
            result.float().clamp(min=-100.0).sum(), keywords["q"], retain_graph=True
        )
        batch = result.detach().expand(2, *result.shape)
        with pytest.raises(NotImplementedError, match="is a batch that vmap made"):
            torch.autograd.grad(
                result, keywords["q"], batch, is_grads_batched=True, retain_graph=True
            )


def test_gradients_that_autograd_negates_lazily() -> None:
    q, k, v = (torch.randn(1, 200, 2, 128, dtype=BF16, device="cuda") for _ in range(3))
    q.requires_grad_()
    results = flash_attn_func(q, k, v, return_lse=True, deterministic=True)
    for result in results:
        leaf = result.detach().float().requires_grad_()
        weights = torch.randn(*result.shape, dtype=torch.complex64, device="cuda")

        def loss(x: Tensor, weights: Tensor = weights) -> Tensor:
            return (torch.complex(torch.zeros_like(x), x).conj() * weights).abs().sum()

        (gradient,) = torch.autograd.grad(loss(leaf), leaf)
        (found,) = torch.autograd.grad(loss(result.float()), q, retain_graph=True)
        plain = gradient.resolve_neg().to(result.dtype)
        (expected,) = torch.autograd.grad(result, q, plain, retain_graph=True)
        assert torch.equal(found, expected)
