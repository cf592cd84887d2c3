"""torch.set_default_device is for tensors of the user: no call of ours makes its own there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flash_mask_cute
from flash_mask_cute import flash_attn_func, flex_attention, mod_source
from flash_mask_cute.lowering import lower

PACKAGE = Path(flash_mask_cute.__file__).parent
FACTORIES = {
    *("tensor", "scalar_tensor", "as_tensor", "zeros", "ones", "full", "empty", "empty_strided"),
    *("arange", "linspace", "eye", "rand", "randn", "randint", "randperm"),
}
LENGTH = 24
TABLE = torch.linspace(0.0, 1.0, LENGTH)
IDS = torch.arange(LENGTH)[None] // 10
SCORE_MODS: dict[str, Callable[..., Any]] = {
    "a number": lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
    "a table": lambda s, b, h, q, k: s + TABLE[q] * 0.3,
    "a tensor made inside": lambda s, b, h, q, k: s + torch.full((), 0.7, device="cpu") * q,
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
}
MASK_MODS: dict[str, Callable[..., Any]] = {
    "window": lambda b, h, q, k: (q >= k) & (q - k < 7),
    "documents": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "remainders": lambda b, h, q, k: (q - k) % 3 == 0,
}


@pytest.fixture
def on_meta() -> Iterator[Callable[[], None]]:
    """A function that makes "meta" the default device and forgets what was lowered before."""

    def begin() -> None:
        for kept in (lower._structures, lower._programs, lower._mods):
            kept.clear()
        torch.set_default_device("meta")

    yield begin
    torch.set_default_device(None)


def _inputs() -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(3)
    shape = (1, 2, LENGTH, 16)
    return tuple(torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str, on_meta: Callable[[], None]) -> None:
    mod, (q, k, v) = SCORE_MODS[name], _inputs()
    place = torch.arange(LENGTH)
    scores = q @ k.mT * 0.25
    expected = mod(scores.float(), 0, 0, place[:, None], place).double().softmax(-1) @ v
    on_meta()
    q.requires_grad_()
    out = flex_attention(q, k, v, score_mod=mod)
    out.sum().backward()
    assert (out - expected).abs().max() < 1e-5 and q.grad is not None
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(flash_attn_func(*transposed, score_mod=mod).transpose(1, 2), out)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str, on_meta: Callable[[], None]) -> None:
    mod, (q, k, v) = MASK_MODS[name], _inputs()
    place = torch.arange(LENGTH)
    seen = mod(0, 0, place[:, None], place)
    expected = (q @ k.mT * 0.25).masked_fill(~seen, -float("inf")).softmax(-1) @ v
    block_mask = create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu")
    on_meta()
    assert (flex_attention(q, k, v, block_mask=block_mask) - expected).abs().max() < 1e-5


def test_every_tensor_that_we_make_names_its_device() -> None:
    without = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in FACTORIES
                and ast.unparse(node.func.value) == "torch"
                and not any(x.arg in ("device", None) for x in node.keywords)
            ):
                without.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert without == []


# -- tracing ahead ------------------------------------------------------------------------------


def test_what_was_traced_ahead_is_not_traced_by_a_call() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + TABLE[k] * 0.811

    q, k, v = _inputs()
    before = lower.traces
    assert "0.811" in mod_source(score_mod, device=q.device)
    assert lower.traces == before + 1
    flex_attention(q, k, v, score_mod=score_mod)
    flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod)
    assert lower.traces == before + 1


def test_a_mod_is_traced_for_a_device_that_is_not_here() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q * 3 >= k + 5

    assert mod_source(mask_mod, device="meta") == mod_source(mask_mod)


# -- dtypes that no kernel has ------------------------------------------------------------------

COMPLEX = 2j
COMPLEX_TABLE = torch.zeros(LENGTH, dtype=torch.complex64)
WITHOUT_TEXT: dict[str, tuple[Callable[..., Any], str]] = {
    "an imaginary number": (lambda s, b, h, q, k: (s + 1j * q).real, "aten.mul .* imaginary part"),
    "a captured one": (lambda s, b, h, q, k: (s * COMPLEX).real, "aten.mul .* imaginary part"),
    "where": (lambda s, b, h, q, k: torch.where(q > k, s, 1j).real, "gives torch.complex64"),
    "float8": (lambda s, b, h, q, k: s.to(torch.float8_e5m2).float(),
               "gives torch.float8_e5m2, which no kernel has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_dtypes_that_no_kernel_has_are_refused(name: str) -> None:
    mod, text = WITHOUT_TEXT[name]
    with pytest.raises(NotImplementedError, match=f"<lambda>.*{Path(__file__).name}:.*{text}"):
        mod_source(mod)


def test_a_complex_table_is_named_and_what_follows_from_it_is_read() -> None:
    with pytest.raises(TypeError, match="global 'COMPLEX_TABLE' .* has dtype torch.complex64"):
        mod_source(lambda s, b, h, q, k: s + COMPLEX_TABLE[q].real)
    assert "aux[0]" in mod_source(lambda s, b, h, q, k: s + COMPLEX_TABLE.abs()[q])
