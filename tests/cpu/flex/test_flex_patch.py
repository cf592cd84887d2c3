"""`patch_flex_attention` after code has imported torch's function by name."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_mask_cute import flex_attention, patch_flex_attention

# a name of this module would be one of those that the patch warns of
_OF_TORCH = [torch_flex.flex_attention]

BY_NAME = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.flex_attention import flex_attention as other

compiled = torch.compile(flex_attention)


class Wrapped:  # made once, and compiled when it is first called
    only = None
    kept = staticmethod(flex_attention)

    def __new__(cls):
        if cls.only is None:
            cls.only = super().__new__(cls)
            cls.only.compiled = torch.compile(flex_attention, dynamic=False)
        return cls.only


def attend(*args, **keywords):
    return flex_attention(*args, **keywords)


def attend_compiled(*args, **keywords):
    return Wrapped().compiled(*args, **keywords)
"""


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(BY_NAME, name, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def origin(function: object) -> object:
    return getattr(function, "_torchdynamo_orig_callable", function)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> types.ModuleType:
    return load(monkeypatch, request.param)


@pytest.mark.parametrize(
    "loaded", ["transformers.integrations.of_test", "diffusers.of_test"], indirect=True
)
def test_names_in_libraries(loaded: types.ModuleType) -> None:
    before = {name: getattr(loaded, name) for name in ("flex_attention", "other", "compiled")}
    kept = loaded.Wrapped().compiled
    with patch_flex_attention():
        for name in before:
            assert getattr(loaded, name) is flex_attention, name
        assert loaded.Wrapped.kept is loaded.Wrapped().compiled is flex_attention
    for name, value in before.items():
        assert getattr(loaded, name) is value, name
    assert loaded.Wrapped.kept is _OF_TORCH[0] and loaded.Wrapped().compiled is kept


@pytest.mark.shares(3)
def test_it_computes_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on the CPU are ours alone; torch's function refuses them."""
    loaded = load(monkeypatch, "transformers.of_test")
    q = torch.randn(1, 2, 9, 16, dtype=torch.float64, requires_grad=True)
    with patch_flex_attention():
        for attend in (loaded.attend, loaded.attend_compiled):
            out = attend(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))
            position = torch.arange(9)
            scores = q @ q.mT / 4 + (position[:, None] - position)
            # a score_mod computes in float32, of scores up to some 10 here
            assert torch.allclose(out, scores.softmax(-1) @ q, rtol=1e-5, atol=2e-6)
            torch.autograd.grad(out.sum(), q)
    # what was compiled in between goes with the patch
    assert origin(loaded.Wrapped().compiled) is _OF_TORCH[0]
    assert loaded.flex_attention is _OF_TORCH[0]


@pytest.mark.filterwarnings("error::UserWarning")
def test_modules_given(monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner = load(monkeypatch, "users_code"), load(monkeypatch, "users_code.inner")
    alone = types.ModuleType("not_in_sys_modules")
    exec("from torch.nn.attention.flex_attention import flex_attention", vars(alone))
    with patch_flex_attention(package, alone):
        for module in (package, inner, alone):
            assert module.flex_attention is flex_attention
    for module in (package, inner, alone):
        assert module.flex_attention is _OF_TORCH[0]
    patch = patch_flex_attention(package)
    assert inner.other is flex_attention
    patch.__exit__(None, None, None)
    for wrong in ("users_code", flex_attention):
        with pytest.raises(TypeError, match="modules must be modules, got "):
            patch_flex_attention(wrong)  # type: ignore[arg-type]
        assert torch_flex.flex_attention is _OF_TORCH[0]


def test_other_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(monkeypatch, "users_layers")
    said = r"imported by name before in .*users_layers.* pass such modules, patch_flex_attention\("
    with pytest.warns(UserWarning, match=said) as told, patch_flex_attention():
        assert loaded.flex_attention is _OF_TORCH[0]
    assert [x.filename for x in told] == [__file__]


@pytest.mark.filterwarnings("error::UserWarning")
def test_patches_within_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(monkeypatch, "transformers.of_test")
    with patch_flex_attention():
        with patch_flex_attention():
            assert loaded.flex_attention is torch_flex.flex_attention is flex_attention
        assert loaded.flex_attention is torch_flex.flex_attention is flex_attention
        imported = load(monkeypatch, "transformers.of_test_later")
    assert loaded.flex_attention is torch_flex.flex_attention is _OF_TORCH[0]
    # which never held torch's
    assert imported.flex_attention is flex_attention
