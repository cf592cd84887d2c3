"""Tensor subclasses, fake tensors and dispatch modes in calls over a cache, and in combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import int32
from test_tensor_kinds import Opaque, Owner, Unknown
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_mask_cute import flash_attn_combine, flash_attn_with_kvcache


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


CACHE = {"k_cache": normal(3, 24, 1, 16), "v_cache": normal(3, 24, 1, 16).flip(0)}
READS: dict[str, Any] = {"q": normal(2, 1, 2, 16), "cache_seqlens": int32(9, 12), "causal": True}
NEW: dict[str, Any] = {"k": normal(2, 1, 1, 16), "v": normal(2, 1, 1, 16).flip(0)}
ENTRIES: dict[str, Any] = {"cache_batch_idx": int32(2, 0), "cache_leftpad": int32(1, 0)}
PAGES: dict[str, Any] = {"page_table": int32(1, 2).view(2, 1)}
PACKED = {"q": normal(3, 2, 16), "cu_seqlens_q": int32(0, 1, 3)}
COS = {"rotary_cos": normal(30, 4), "rotary_sin": normal(30, 4).flip(0)}

# for each argument: a second value, and a call that has it
CALLS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "q": (READS["q"].flip(0), CACHE | READS | PAGES),
    "k_cache": (CACHE["k_cache"].flip(0), CACHE | READS | ENTRIES),
    "v_cache": (CACHE["v_cache"].flip(0), CACHE | READS | PAGES),
    "cache_seqlens": (int32(3, 20), CACHE | READS | PAGES),
    "page_table": (int32(0, 1).view(2, 1), CACHE | READS | PAGES),
    "cache_batch_idx": (int32(1, 2), CACHE | READS | ENTRIES),
    "cache_leftpad": (int32(5, 3), CACHE | READS | ENTRIES),
    "cu_seqlens_q": (int32(0, 2, 3), CACHE | READS | PAGES | PACKED),
}
by_argument = pytest.mark.parametrize("name", CALLS)


def copied(given: dict[str, Any], change: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    return {n: change(x) if isinstance(x, Tensor) else x for n, x in given.items()}


@by_argument
def test_a_wrapper_is_taken_apart(name: str) -> None:
    second, given = CALLS[name]
    out = flash_attn_with_kvcache(**given | {name: TwoTensor(given[name].clone(), second)})
    assert type(out) is TwoTensor
    for part, value in ((out.a, given[name]), (out.b, second)):
        assert torch.equal(part, flash_attn_with_kvcache(**given | {name: value}))
    assert (out.a != out.b).any()


@by_argument
def test_a_subclass_with_memory_is_taken_as_it_is(name: str) -> None:
    _, given = CALLS[name]
    out = flash_attn_with_kvcache(**given | {name: given[name].clone().as_subclass(Owner)})
    assert type(out) is Owner
    assert torch.equal(out.as_subclass(Tensor), flash_attn_with_kvcache(**given))


@by_argument
def test_what_knows_no_operators_is_named(name: str) -> None:
    second, given = CALLS[name]
    with pytest.raises(TypeError) as caught:
        flash_attn_with_kvcache(**given | {name: Unknown(given[name].clone(), second)})
    text = f"{name} is a Unknown, which does not take operators of flash_mask_cute apart: "
    assert str(caught.value).startswith(text) and str(caught.value).count("Unknown, which") == 1


WRITES = {"entries": ENTRIES, "pages": PAGES, "rotated": PAGES | COS}


@pytest.mark.parametrize("how", WRITES)
def test_wrappers_of_all_that_is_written(how: str) -> None:
    """Each part has a cache of its own, with its rows in it."""
    parts = [copied(CACHE | READS | NEW | WRITES[how]) for _ in range(2)]
    for name in ("k_cache", "v_cache", "k", "v", "q"):
        parts[1][name] = parts[1][name].flip(-1).contiguous()
    wrapped = {n: TwoTensor(parts[0][n].clone(), parts[1][n].clone())
               for n in ("k_cache", "v_cache", "k", "v", "q")}  # fmt: skip
    out = flash_attn_with_kvcache(**parts[0] | wrapped)
    outs = [flash_attn_with_kvcache(**x) for x in parts]
    assert type(out) is TwoTensor and torch.equal(out.a, outs[0]) and torch.equal(out.b, outs[1])
    for name in ("k_cache", "v_cache"):
        assert torch.equal(wrapped[name].a, parts[0][name])
        assert torch.equal(wrapped[name].b, parts[1][name])


@pytest.mark.parametrize("name", ["k_cache", "k", "q", "rotary_cos", "cache_seqlens", "page_table"])
def test_subclasses_with_memory_where_rows_are_written(name: str) -> None:
    results = []
    for change in (Tensor.clone, lambda x: x.clone().as_subclass(Owner)):
        given = copied(CACHE | READS | NEW | PAGES | COS)
        given[name] = change(given[name])
        out = flash_attn_with_kvcache(**given)
        results.append([x.as_subclass(Tensor) for x in (out, given["k_cache"], given["v_cache"])])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["k_cache", "v", "q", "rotary_sin", "page_table"])
@pytest.mark.parametrize("kind", [Unknown, Opaque])
def test_subclasses_that_cannot_be_written(name: str, kind: Any) -> None:
    """Named, and nothing is written."""
    given = copied(CACHE | READS | NEW | PAGES | COS)
    x = given[name]
    given[name] = Unknown(x, x.clone()) if kind is Unknown else Tensor._make_subclass(Opaque, x)
    caches = [y.clone() for n, y in given.items() if n in ("k_cache", "v_cache") and n != name]
    with pytest.raises(TypeError) as caught:
        flash_attn_with_kvcache(**given)
    text = f"{name} is a Unknown, which does not"
    if kind is Opaque:
        text = f"{name} must be a plain torch.Tensor, got a Opaque"
    assert str(caught.value).startswith(text)
    left = [given[n] for n in ("k_cache", "v_cache") if n != name]
    assert all(torch.equal(y, z) for y, z in zip(caches, left, strict=True))


def test_errors_stay_what_they_are() -> None:
    given = copied(CACHE | READS | NEW | PAGES)
    given["v"] = given["v"].as_subclass(Owner)
    with pytest.raises(ValueError, match="^cache_seqlens must lie between 0 and the 24 rows"):
        flash_attn_with_kvcache(**given | {"cache_seqlens": int32(25, 3)})
    with pytest.raises(ValueError, match="^cache_seqlens must leave room"):
        flash_attn_with_kvcache(**given | {"cache_seqlens": int32(24, 3)})


# -- modes -----------------------------------------------------------------------------------------

FAKED = {
    "pages": PAGES,
    "rotated pages": PAGES | COS | NEW,
    "entries": ENTRIES,
    "entries and new rows": ENTRIES | NEW,
    "packed": PAGES | PACKED,
    "an int": PAGES | NEW | {"cache_seqlens": 7},
}


@pytest.mark.parametrize("how", FAKED)
def test_fake_tensors_tell_shapes(how: str) -> None:
    given = copied(CACHE | READS | FAKED[how])
    with FakeTensorMode() as mode:
        faked = copied(given, mode.from_tensor)
        found = flash_attn_with_kvcache(**faked, return_lse=True)
    real = flash_attn_with_kvcache(**given, return_lse=True)
    for fake, x in zip(found, real, strict=True):
        assert type(fake).__name__ == "FakeTensor"
        assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype)


class Watching(TorchDispatchMode):
    """Sees all operators and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators_and_the_checks_see_tensors() -> None:
    """What is wrong is told before the write, in a mode, too."""
    given = copied(CACHE | READS | NEW | PAGES)
    expected = flash_attn_with_kvcache(**copied(given))
    with Watching() as mode:
        found = flash_attn_with_kvcache(**copied(given))
    assert torch.equal(found, expected)
    assert "flash_mask_cute.append_and_attend.default" in mode.seen
    before = given["k_cache"].clone()
    with Watching() as mode, pytest.raises(ValueError, match="softcap must be 0"):
        flash_attn_with_kvcache(**given, softcap=-1.0)
    assert torch.equal(before, given["k_cache"]) and not any("append" in x for x in mode.seen)


# -- combinations ------------------------------------------------------------------------------

OUTS, LSES = normal(3, 2, 5, 2, 16), normal(3, 2, 5, 2).float()


@pytest.mark.parametrize("name", ["out_partial", "lse_partial"])
def test_combinations_of_subclasses(name: str) -> None:
    given = {"out_partial": OUTS, "lse_partial": LSES}
    expected = flash_attn_combine(**given)
    second = given[name].flip(0)
    first = given[name].clone()
    out, lse = flash_attn_combine(**given | {name: TwoTensor(first, second)})
    others = flash_attn_combine(**given | {name: second})
    for found, *wanted in zip((out, lse), expected, others, strict=True):
        assert type(found) is TwoTensor
        assert torch.equal(found.a, wanted[0]) and torch.equal(found.b, wanted[1])
    found = flash_attn_combine(**given | {name: first.as_subclass(Owner)})
    assert all(type(x) is Owner for x in found)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    with pytest.raises(TypeError, match=f"^{name} is a Unknown, which does not take"):
        flash_attn_combine(**given | {name: Unknown(first, second)})
    with pytest.raises(TypeError, match=f"^{name} must be a plain torch.Tensor, got a Opaque"):
        flash_attn_combine(**given | {name: Tensor._make_subclass(Opaque, first)})


def test_gradients_of_combined_wrappers() -> None:
    parts = [OUTS, OUTS.flip(0)]
    wrapper = TwoTensor(parts[0].clone(), parts[1].clone()).requires_grad_()
    out, lse = flash_attn_combine(wrapper, LSES)
    (found,) = torch.autograd.grad(out.sin().sum(), wrapper)
    for values, part in zip(parts, (found.a, found.b), strict=True):
        leaf = values.clone().requires_grad_()
        (expected,) = torch.autograd.grad(flash_attn_combine(leaf, LSES)[0].sin().sum(), leaf)
        assert torch.equal(part, expected)


def test_combinations_of_fake_tensors() -> None:
    expected = flash_attn_combine(OUTS, LSES)
    with FakeTensorMode() as mode:
        found = flash_attn_combine(mode.from_tensor(OUTS), mode.from_tensor(LSES))
    for fake, x in zip(found, expected, strict=True):
        assert fake is not None and x is not None
        assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype)
