"""What is kept for callables has a bound, and what was forgotten works again."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cached_adders import Builder, apply, get_adder

from flash_mask_cute import flash_attn_func, interface
from flash_mask_cute.autograd import mod_names
from flash_mask_cute.flex import flex_attention, lower_mod
from flash_mask_cute.lowering import lower
from flash_mask_cute.mods import on_cpu, traits
from flash_mask_cute.runtime.cache import CompileCache, Compiled
from flash_mask_cute.runtime.recent import Recent

MANY = 2000


def held(recent: Recent[Any, Any]) -> int:
    """The number of entries, newer and older."""
    return len(recent.keys() | recent._older.keys())


# -- the dictionary -----------------------------------------------------------------------------


def test_what_is_used_stays_and_the_rest_goes() -> None:
    recent: Recent[int, str] = Recent(10)
    recent[-1] = "used"
    for n in range(100):
        recent[n] = str(n)
        assert held(recent) <= 10
        assert n % 2 or recent[-1] == "used"
        # what was used last is there
        assert all(recent.get(m) == str(m) for m in range(max(0, n - 1), n + 1))
    assert recent.get(3) is None and recent.get(3, "absent") == "absent"
    with pytest.raises(KeyError):
        recent[3]
    recent[99] = "new"
    assert recent[99] == "new"
    recent.clear()
    assert held(recent) == 0 and recent.get(99) is None and recent.get(-1) is None


def test_entries_weigh() -> None:
    recent: Recent[int, None] = Recent(100, lambda key: 10 if key < 0 else 1)
    for n in range(MANY):
        recent[-1 - n] = None
        assert held(recent) <= 10
    for n in range(MANY):
        recent[n] = None
        assert held(recent) <= 100
    heavy: Recent[int, None] = Recent(4, lambda key: 9)
    heavy[0] = None
    assert held(heavy) == 1


# -- what is kept for callables -----------------------------------------------------------------


def test_functions_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def compile_nothing(*arguments: object) -> Any:
        made.append(arguments)
        return on_cpu.HostFunction(print, None)

    monkeypatch.setattr(on_cpu, "_compile", compile_nothing)
    try:
        for n in range(MANY):
            on_cpu._find(("mask_mod", (), f"key {n}", None, ()), print, checked=False)
        assert 64 <= _held(on_cpu._compiled) <= 128
        on_cpu._find(("mask_mod", (), "key 0", None, ()), print, checked=False)
        assert len(made) == MANY + 1
    finally:
        on_cpu._compiled.clear()


def test_kernels_in_memory(tmp_path: Path, builder: Builder) -> None:
    cache = CompileCache(tmp_path, max_in_memory=4)
    for n in range(5):
        assert apply(get_adder(cache, builder(n + 1), key={"addend": n})) == n + 1
        assert _held(cache._memory) <= 4
    assert apply(get_adder(cache, builder(1), key={"addend": 0})) == 1
    assert builder.calls == 5  # it came back from the disk


def test_kernels_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_MASK_CUTE_CACHE_DIR", "off")
    cache = CompileCache()
    monkeypatch.setattr(cache, "_attempt", lambda entry, build, late: build())
    for n in range(MANY):
        get_adder(cache, lambda: Compiled(print, {}), key={"addend": n})
    assert 256 <= _held(cache._memory) <= 512


def test_prepared_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of callables, whose kernels are their own, fewer are kept than of lengths."""
    monkeypatch.setattr(interface, "prepare_fwd", lambda call: lambda tensors, masks: None)
    monkeypatch.setattr(interface, "prepare_bwd", lambda call: lambda tensors, masks: None)
    q = torch.zeros(1, 8, 1, 16)
    keep = {"fwd": interface._prepared_fwd, "bwd": interface._prepared_bwd}
    try:
        for n in range(MANY):
            mod = _named(n)
            interface._flash_attn_fwd(q, q, q, score_mod=mod)
            interface._flash_attn_bwd(q, q, q, q, torch.zeros(1, 1, 8), q, score_mod=mod)
        for kept in keep.values():
            assert 256 <= _held(kept) <= 512
        for n in range(3 * MANY):
            interface._flash_attn_fwd(q, q, q, softmax_scale=1.0 + n)
        assert 2048 <= _held(keep["fwd"]) <= 4096
    finally:
        for kept in keep.values():
            kept.clear()


def test_traits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(traits._found, Recent)


def _named(n: int) -> Callable[..., Any]:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return s

    score_mod.__flash_mask_key__ = f"mod {n}"  # type: ignore[attr-defined]
    return score_mod


def _held(kept: Any) -> int:
    return held(kept) if isinstance(kept, Recent) else len(kept)


# -- mods written in torch ----------------------------------------------------------------------


@pytest.fixture
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, most in (("_structures", 8), ("_programs", 4), ("_mods", 4)):
        assert isinstance(getattr(lower, name), Recent)
        monkeypatch.setattr(lower, name, Recent(most))
    yield


def _reading_a_shape(length: int) -> Callable[..., Any]:
    table = torch.arange(float(length))

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q % table.shape[0]] * 1.5

    return score_mod


@pytest.mark.usefixtures("few_are_kept")
def test_lengths_of_a_mod_that_reads_a_shape() -> None:
    texts = {}
    files = _files()
    for length in (*range(3, 12), 3):
        lowered = lower_mod(_reading_a_shape(length), "score_mod")
        assert texts.setdefault(length, lowered.source) == lowered.source
        for kept in (lower._structures, lower._programs, lower._mods):
            assert _held(kept) <= 8
    assert len(lower._structures) == 1
    before = lower.traces
    lower_mod(_reading_a_shape(3), "score_mod")
    assert lower.traces == before
    # nor does the text of a function outlive it
    del lowered
    gc.collect()
    assert len(_files() - files) <= 4


def _files() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<flash_mask_cute")}


@pytest.mark.usefixtures("few_are_kept")
def test_structures_of_torch_mods() -> None:
    """One mod after the other, and the first once more, gives right results all along."""
    q, k, v = (torch.randn(1, 1, 9, 16, dtype=torch.float64) for _ in range(3))
    place = torch.arange(9)
    for count in (*range(1, 8), 1):
        source = f"lambda s, b, h, q, k: s + {' + '.join(['(q - k) * 0.125'] * count)}"
        out = flex_attention(q, k, v, score_mod=eval(source))
        scores = q @ k.mT * 0.25 + (place[:, None] - place) * 0.125 * count
        torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
        for kept in (lower._structures, lower._programs, lower._mods):
            assert _held(kept) <= 8


def test_names_of_mods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callables that operators know by a name: few are kept, and no name is that of another one."""
    for kept in ("_mods", "_names"):
        monkeypatch.setattr(mod_names, kept, Recent(4))

    def new_mod() -> Callable[..., Any]:
        return lambda s, b, h, q, k, aux: s

    mods = [new_mod() for _ in range(8)]
    names = [mod_names.optional_name(mod) for mod in mods]
    assert len(set(names)) == 8
    assert mod_names.optional_name(mods[-1]) == names[-1]
    assert mod_names.optional_mod(names[-1]) is mods[-1]
    assert len(mod_names._mods) <= 4 and len(mod_names._names) <= 4
    with pytest.raises(RuntimeError, match="no callable is known"):
        mod_names.optional_mod(names[0])
    again = mod_names.optional_name(mods[0])
    assert again not in names and mod_names.optional_mod(again) is mods[0]


def test_an_annealed_slope_and_the_first_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_compiled", Recent(4))
    q, k, v = (torch.randn(1, 9, 1, 16, dtype=torch.float64) for _ in range(3))
    distances = torch.arange(9)[:, None] - torch.arange(9)

    def slope_of(slope: float) -> Callable[..., Any]:
        @cute.jit
        def score_mod(s: Any, b: Any, h: Any, q_idx: Any, k_idx: Any, aux: Any) -> Any:
            return s - slope * (q_idx - k_idx).to(cutlass.Float32)

        return score_mod

    for slope in (0.1, 0.2, 0.3, 0.4, 0.5, 0.1):
        out = flash_attn_func(q, k, v, score_mod=slope_of(slope))
        scores = (q[:, :, 0] @ k[:, :, 0].mT) * 0.25 - slope * distances
        torch.testing.assert_close(
            out[:, :, 0], scores.softmax(-1) @ v[:, :, 0], atol=1e-5, rtol=1e-5
        )
        assert _held(on_cpu._compiled) <= 4
