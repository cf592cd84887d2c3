"""`register`, what goes to torch's kernels, and what is refused."""

from __future__ import annotations

import doctest
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from flash_mask_cute.integrations import aten_flash
from flash_mask_cute.integrations import torch as door
from flash_mask_cute.integrations.torch import Ran, kernels_run, register

needs_registry = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="torch has no registry"
)
aten = torch.ops.aten
FORWARD = "_flash_attention_forward"
BACKWARD = "_flash_attention_backward"


# -- register -----------------------------------------------------------------------------------


def is_overridden(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


@needs_registry
def test_torch_activates_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a kernel that is there before."""
    operators = [name for name in aten_flash.OPERATORS if aten_flash._operator(name) is not None]
    assert len(operators) >= 4

    def kernels() -> list[str]:
        return [
            str(torch.library.get_kernel(f"aten::{x}", "CUDA")) if is_overridden(x) else "none"
            for x in operators
        ]

    before = kernels()
    register()
    register()
    assert "mask_cute" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None and kernels() == before
    attention.activate_flash_attention_impl("mask_cute")
    assert attention.current_flash_attention_impl() == "mask_cute"
    during = kernels()
    attention.restore_flash_attention_impl()
    assert all(x != y for x, y in zip(before, during, strict=True))
    assert kernels() == before


@needs_registry
def test_names() -> None:
    register("mask_cute_of_a_test")
    assert "mask_cute_of_a_test" in attention.list_flash_attention_impls()
    with pytest.raises(ValueError, match="name='FA4' is registered by another library"):
        register("FA4")
    with pytest.raises(TypeError, match=r"name must be a str, got 3 \(int\)"):
        register(3)  # type: ignore[arg-type]


def test_a_torch_without_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl", raising=False)
    version = torch.__version__.replace("+", r"\+")
    text = rf"torch {version} is not supported .*no register_flash_attention_impl.*2\.11 to 2\.15"
    with pytest.raises(RuntimeError, match=text):
        register()


class Argument(NamedTuple):
    name: str
    kwarg_only: bool


class Schema(NamedTuple):
    arguments: list[Argument]


class FakeOperator:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema


def changed(name: str, change: Callable[[list[Argument]], list[Argument]]) -> Any:
    """`_operator` of a torch whose operator of this name has other arguments."""
    real = aten_flash._operator

    def operator(asked: str) -> Any:
        found = real(asked)
        if asked != name or found is None:
            return found
        given = [Argument(x.name, x.kwarg_only) for x in found._schema.arguments]
        return FakeOperator(Schema(change(given)))

    return operator


@needs_registry
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            FORWARD,
            lambda x: [*x, Argument("softcap", True)],
            "argument softcap, which is not known",
        ),
        (FORWARD, lambda x: x[1:], "has no argument query"),
        (BACKWARD, lambda x: x[1:], "has no argument grad_out"),
    ],
)
def test_a_torch_with_other_operators(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Any, text: str
) -> None:
    monkeypatch.setattr(aten_flash, "_operator", changed(name, change))
    with pytest.raises(RuntimeError, match=rf"not supported by register.*aten::{name} .*{text}"):
        register()


@needs_registry
def test_a_torch_without_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    real = aten_flash._operator
    monkeypatch.setattr(aten_flash, "_operator", lambda x: None if x == BACKWARD else real(x))
    with pytest.raises(RuntimeError, match=f"it has no operator aten::{BACKWARD}"):
        register()


@needs_registry
def test_arguments_are_bound_by_the_names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 1, 5, 2, 8)
    more = None, None, 5, 5, 0.0, True, False
    expected = aten_flash._ours_or_kept(FORWARD, None)(query, key, key, *more)[0]
    monkeypatch.setattr(aten_flash, "_operator", changed(FORWARD, lambda x: [x[1], x[0], *x[2:]]))
    found = aten_flash._ours_or_kept(FORWARD, None)(key, query, key, *more)[0]
    assert torch.equal(found, expected)


# -- what is not taken --------------------------------------------------------------------------

q = torch.randn(1, 5, 2, 8)


def forward(*, dropout_p: float = 0.0, debug: bool = False, **keywords: Any) -> Any:
    return aten._flash_attention_forward(
        q, q, q, None, None, 5, 5, dropout_p, False, debug, **keywords
    )


def backward(dropout_p: float) -> Any:
    lse, seed = torch.zeros(1, 2, 5), torch.zeros(2, dtype=torch.uint64)
    none: Any = None
    return aten._flash_attention_backward(
        q, q, q, q, q, lse, none, none, 5, 5, dropout_p, False, seed, seed
    )


NOT_TAKEN = {
    "dropout": (lambda: forward(dropout_p=0.25), FORWARD, "dropout_p=0.25 is not supported"),
    "debug": (lambda: forward(debug=True), FORWARD, "return_debug_mask=True is not supported"),
    "alibi": (lambda: forward(alibi_slopes=torch.ones(2)), FORWARD,
              "alibi_slopes are not supported: write them as score_mod"),
    "used": (lambda: forward(seqused_k=torch.ones(1, dtype=torch.int64)), FORWARD,
             "seqused_k must have dtype int32"),
    "dropout backward": (lambda: backward(0.5), BACKWARD, "dropout_p=0.5 is not supported"),
}  # fmt: skip
by_case = pytest.mark.parametrize("case", NOT_TAKEN)


@by_case
@pytest.mark.usefixtures("activated_on_cpu")
def test_refused_by_name_where_torch_has_no_kernel(case: str) -> None:
    call, operator, text = NOT_TAKEN[case]
    with pytest.raises(NotImplementedError, match=f"aten::{operator}: .*{text}.*torch has no"):
        call()


@pytest.mark.usefixtures("activated_on_cpu")
def test_more_refusals() -> None:
    packed, ends = q[0], torch.tensor([0, 5], dtype=torch.int32)
    if "block_table" in str(aten._flash_attention_forward.default._schema):
        table = torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="block_table needs seqused_k"):
            aten._flash_attention_forward(
                packed, q, q, ends, None, 5, 5, 0.0, False, False, block_table=table
            )
        with pytest.raises(NotImplementedError, match="out must be like query.*float64"):
            aten._flash_attention_forward_no_dropout_inplace(
                torch.zeros(5, 2, 8, 2, dtype=torch.float64)[..., 0],
                packed, packed, packed, ends, ends, 5, 5, 0.0, False, False,
            )  # fmt: skip
    with pytest.raises(NotImplementedError, match="same head_dim in torch's operators.*8 and 16"):
        aten._flash_attention_forward(
            q, q, torch.cat([q, q], -1), None, None, 5, 5, 0.0, False, False
        )


class TorchsKernels(NamedTuple):
    """What stands for torch's kernels; each returns its name and the arguments that it got."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def torchs_kernels() -> Iterator[TorchsKernels]:
    kernels = TorchsKernels([])

    def forward(*args: Any, **keywords: Any) -> Any:
        kernels.calls.append((FORWARD, args, keywords))
        seed = torch.zeros(2, dtype=torch.uint64)
        return args[0] + 1, torch.zeros(1), seed, seed[0], torch.zeros(0)

    def backward(*args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        kernels.calls.append((BACKWARD, args, keywords))
        return args[0] + 1, args[0] + 2, args[0] + 3

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(FORWARD, forward)
    library.impl(BACKWARD, backward)
    yield kernels
    library._destroy()


@by_case
@needs_registry
@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_left_to_the_kernel_that_torch_had(case: str, torchs_kernels: TorchsKernels) -> None:
    call, operator, text = NOT_TAKEN[case]
    handle = aten_flash.Activated("CPU")
    try:
        with (
            kernels_run() as ran,
            pytest.warns(UserWarning, match=f"{operator} runs on torch's own .*{text}") as warned,
        ):
            results = call()
        assert warned[0].filename == __file__
        assert [x[0] for x in torchs_kernels.calls] == [operator]
        assert torch.equal(results[0], q + 1)
        with warnings.catch_warnings(), kernels_run() as again:
            warnings.simplefilter("error")
            call()
        assert [(x.operator, x.kernel) for x in ran + again] == [(operator, "torch")] * 2
        assert text.split(":")[0] in str(ran[0].reason)
        with kernels_run() as ran:
            forward()
        assert ran == [Ran(FORWARD, "flash_mask_cute", None)] and len(torchs_kernels.calls) == 2
    finally:
        handle.remove()
    forward()
    assert len(torchs_kernels.calls) == 3


@needs_registry
@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_torchs_kernel_gets_the_call_as_it_was(torchs_kernels: TorchsKernels) -> None:
    handle = aten_flash.Activated("CPU")
    slopes = torch.ones(2)
    try:
        with pytest.warns(UserWarning, match="alibi_slopes"):
            forward(alibi_slopes=slopes, scale=0.3, window_size_left=4)
    finally:
        handle.remove()
    ((_, args, keywords),) = torchs_kernels.calls
    assert args[:5] == (*(args[0],) * 3, None, None) and torch.equal(args[0], q)
    assert args[5:10] == (5, 5, 0.0, False, False)
    assert keywords["scale"] == 0.3 and keywords["window_size_left"] == 4
    assert torch.equal(keywords["alibi_slopes"], slopes)


@needs_registry
@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_other_numbers_are_no_other_reason(torchs_kernels: TorchsKernels) -> None:
    handle = aten_flash.Activated("CPU")
    try:
        with pytest.warns(UserWarning) as warned:
            for p in (0.1, 0.25, 0.5):
                forward(dropout_p=p)
            forward(debug=True)
    finally:
        handle.remove()
    assert [str(x.message).split(":")[1].split("=")[0].strip() for x in warned] == [
        "dropout_p",
        "return_debug_mask",
    ]


@pytest.mark.usefixtures("activated_on_cpu")
def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only refusals leave a call to torch: what fails in a kernel, fails."""

    def fail(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(aten_flash, "_flash_attn_fwd", fail)
    with pytest.raises(RuntimeError, match="^out of memory$"):
        forward()


def test_public_names() -> None:
    assert sorted(door.__all__) == ["Ran", "kernels_run", "register", "sdpa"]


@pytest.mark.parametrize(
    "name", ["kernels_run", "sdpa", pytest.param("register", marks=needs_registry)]
)
def test_a_docstring_has_an_example_that_runs(name: str) -> None:
    text = inspect.getdoc(getattr(door, name)) or ""
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert found.examples
    assert doctest.DocTestRunner(verbose=False).run(found).failed == 0
