"""Warm calls with mods of torch: what changes is seen, and what does not is not looked up again."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch_values import dense_attention

from flash_mask_cute import flash_attn_func, keep_block_mask
from flash_mask_cute.flex import attention, flex_attention
from flash_mask_cute.lowering import lower, pair, watch
from flash_mask_cute.lowering.captures import find_captures
from flash_mask_cute.lowering.convention import is_torch_mod
from flash_mask_cute.lowering.watch import Watch, watches_of

N, HEADS, D = 40, 2, 16
SHIFT = 1.5
TABLE = torch.rand(N)
own_module: Any = types.ModuleType("module_of_the_caller")
own_module.scale, own_module.unused = 2.0, 1


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def shifted(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + SHIFT * TABLE[k]


def by_module(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * own_module.scale


def scaled(scale: Any, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * scale


def read_absent(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return abs(s)


def with_cells(scale: float, table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s * scale + table[k]


def nested(scale: float) -> Callable[..., Tensor]:
    def inner(x: Tensor) -> Tensor:
        return x * scale

    return lambda s, b, h, q, k: inner(s)


def with_default(table: Tensor) -> Callable[..., Tensor]:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, t: Tensor = table) -> Tensor:
        return s + t[k]

    return mod


def other_code(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - 1


def set_cell(mod: Any, name: str, value: Any) -> None:
    mod.__closure__[mod.__code__.co_freevars.index(name)].cell_contents = value


def inner_of(mod: Any) -> Any:
    return mod.__closure__[mod.__code__.co_freevars.index("inner")].cell_contents


def cut(tensor: Tensor) -> None:
    tensor.data = tensor.data[:-1]


def set_code(mod: Any) -> None:
    mod.__code__ = other_code.__code__


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda mod: globals().update({name: value})


def watching(mod: Callable[..., Any], by_contents: bool) -> Watch:
    return Watch(find_captures(mod).reached, by_contents)


# By name: a mod, and what changes it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "cell, a number": (lambda: with_cells(1.5, TABLE), lambda x: set_cell(x, "scale", 2.5)),
    "cell, its type": (lambda: with_cells(2, TABLE), lambda x: set_cell(x, "scale", 2.0)),
    "cell, a tensor": (
        lambda: with_cells(1.5, torch.rand(N)),
        lambda x: set_cell(x, "table", torch.rand(N)),
    ),
    "cell, emptied": (
        lambda: with_cells(1.5, TABLE),
        lambda x: x.__closure__[1].__delattr__("cell_contents"),
    ),
    "cell of a function in a cell": (
        lambda: nested(1.5), lambda x: set_cell(inner_of(x), "scale", 2.5)
    ),
    "code of a function in a cell": (
        lambda: nested(1.5),
        lambda x: setattr(inner_of(x), "__code__", inner_of(nested(1.0)).__code__.replace()),
    ),
    "default": (
        lambda: with_default(TABLE), lambda x: setattr(x, "__defaults__", (torch.rand(N),))
    ),
    "default, gone": (lambda: with_default(TABLE), lambda x: setattr(x, "__defaults__", None)),
    "default by keyword": (
        lambda: with_default(TABLE), lambda x: setattr(x, "__kwdefaults__", {"t": 1})
    ),
    "code": (lambda: with_default(TABLE), set_code),
    "attribute of the mod": (
        lambda: with_default(TABLE), lambda x: setattr(x, "__flash_mask_key__", "another")
    ),
    "global, a number": (lambda: shifted, set_global("SHIFT", 2.5)),
    "global, a tensor": (lambda: shifted, set_global("TABLE", torch.rand(N))),
    "global that was not there": (lambda: read_absent, set_global("abs", torch.neg)),
    "attribute of a module": (lambda: by_module, lambda x: setattr(own_module, "scale", 3.0)),
    "argument of a partial": (
        lambda: functools.partial(scaled, 1.5),
        lambda x: x.__setstate__((scaled, (2.5,), {}, {})),
    ),
    "keyword of a partial": (
        lambda: functools.partial(with_default(TABLE), t=TABLE),
        lambda x: x.keywords.update(t=torch.rand(N)),
    ),
    "cell of a function in a tuple": (
        lambda: and_masks(with_cells(1.5, TABLE), causal),
        lambda x: set_cell(x.__closure__[0].cell_contents[0], "scale", 2.5),
    ),
    "dtype of a tensor": (
        lambda: with_cells(1.5, torch.rand(N)),
        lambda x: setattr(x.__closure__[1].cell_contents, "data", torch.ones(N).half()),
    ),
    "extent of a tensor": (
        lambda: with_cells(1.5, torch.rand(N)), lambda x: cut(x.__closure__[1].cell_contents)
    ),
    "strides of a tensor": (
        lambda: with_cells(1.5, torch.rand(6, 6)),
        lambda x: x.__closure__[1].cell_contents.t_(),
    ),
    "a tensor is trained": (
        lambda: with_cells(1.5, torch.rand(N)),
        lambda x: x.__closure__[1].cell_contents.requires_grad_(),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals_as_before() -> Iterator[None]:
    before, scale = dict(globals()), own_module.scale
    yield
    own_module.scale = scale
    globals().pop("abs", None)
    globals().update({name: before[name] for name in ("SHIFT", "TABLE")})


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    make, change = CHANGES[name]
    mod = make()
    seen = watching(mod, False)
    assert seen.holds()
    assert seen.holds(), "looking changed it"
    change(mod)
    assert not seen.holds()


def test_what_the_mod_does_not_mention_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watching(by_module, False)
    monkeypatch.setattr(own_module, "unused", 5)
    monkeypatch.setitem(globals(), "UNUSED", 5)
    assert seen.holds()


def test_contents_count_if_they_are_said_to() -> None:
    table = torch.rand(N)
    mod = with_cells(1.0, table)
    by_contents, by_place = watching(mod, True), watching(mod, False)
    table.add_(1)
    assert not by_contents.holds() and by_place.holds()


def test_a_tensor_at_the_place_of_a_dead_one_is_another() -> None:
    """Identities of dead objects are given to new ones."""
    mod = with_cells(1.5, torch.rand(N))
    seen = watching(mod, False)
    set_cell(mod, "table", None)
    gc.collect()
    for _ in range(20):
        set_cell(mod, "table", torch.rand(N))
        assert not seen.holds()
        set_cell(mod, "table", None)


class Holder:
    def __init__(self) -> None:
        self.table = TABLE

    def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.table[k]


def of(holder: Any) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + holder["t"][k] if holder else s


def wrapped() -> Callable[..., Tensor]:
    return functools.wraps(shifted)(lambda *given: shifted(*given))


@pytest.mark.parametrize(
    "mod",
    [of({"t": TABLE}), of([TABLE]), of(Holder()), of(Holder), of({1}), Holder().mod, wrapped()],
    ids=["dict", "list", "instance", "class", "set", "method", "attributes"],
)
def test_what_identities_do_not_tell_is_not_watched(mod: Callable[..., Tensor]) -> None:
    assert watches_of([(find_captures(mod).reached, False)]) is None


def test_a_mod_that_holds_itself_is_let_go() -> None:
    def make() -> tuple[Watch, weakref.ref[Any]]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s if mod else -s

        return watching(mod, False), weakref.ref(mod)

    seen, ref = make()
    gc.collect()
    assert ref() is None and not seen.holds()


# -- calls ----------------------------------------------------------------------------------------


def qkv(n: int = N) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    return [torch.randn(1, HEADS, n, D, generator=g) for _ in range(3)]


def mask_of(mod: Callable[..., Tensor], n: int = N) -> BlockMask:
    return create_block_mask(mod, None, None, n, n, device="cpu", BLOCK_SIZE=16)


def check(score_mod: Any, mask: BlockMask | None, n: int = N) -> None:
    q, k, v = qkv(n)
    mask_mod = None if mask is None else mask.mask_mod
    wanted, _ = dense_attention(*(x.double() for x in (q, k, v)), score_mod, mask_mod)
    for _ in range(2):
        out = flex_attention(q, k, v, score_mod, mask)
        torch.testing.assert_close(out.double(), wanted, rtol=3e-6, atol=3e-6)
        if score_mod is not None and not is_torch_mod(score_mod, "score_mod"):
            # by its default it takes as many arguments as a CuTe mod
            continue
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod,
                              mask_mod=mask_mod).transpose(1, 2)  # fmt: skip
        torch.testing.assert_close(out.double(), wanted, rtol=3e-6, atol=3e-6)


@pytest.fixture
def nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes whatever a warm call has no need of fail. keeps: its block mask is kept."""

    def forbid(keeps: bool = True) -> None:
        def called(*given: Any, **more: Any) -> Any:
            raise AssertionError("a warm call looked again")

        names = ["intervals_of", "says_no_more", "join_mods"] + ["lists_of"] * keeps
        for module, name in (
            (attention, "lower_mod"), (lower, "lower_mod"), (lower, "find_captures"),
            (pair, "join_mods"), *((attention, name) for name in names),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, called)

    return forbid


def documents(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def odd(step: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q - k) % step == 0


IDS = torch.arange(N) // 13
WARM: dict[str, tuple[Any, Any]] = {
    "causal": (None, causal),
    "columns": (None, documents(IDS)),
    "mask_mod": (None, odd(3)),
    "score_mod": (shifted, None),
    "both": (with_cells(1.5, TABLE), odd(3)),
    "identity": (lambda s, b, h, q, k: s, causal),
    "joined": (None, and_masks(causal, odd(3))),
    "partial": (functools.partial(scaled, 1.5), None),
}


@pytest.mark.shares(4)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("name", WARM)
def test_a_warm_call_looks_nothing_up(
    name: str, has_graph: bool, keeps: bool, nothing_is_lowered: Callable[..., None]
) -> None:
    score_mod, mask_mod = WARM[name]
    mask = None if mask_mod is None else mask_of(mask_mod)
    if mask is not None and keeps:
        keep_block_mask(mask)
    q, k, v = (x.requires_grad_(has_graph) for x in qkv())
    flat = [x.transpose(1, 2) for x in (q, k, v)]
    first = flex_attention(q, k, v, score_mod, mask)
    direct = flash_attn_func(*flat, score_mod=score_mod, mask_mod=mask_mod)
    nothing_is_lowered(keeps)
    again = flex_attention(q, k, v, score_mod, mask)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    again = flash_attn_func(*flat, score_mod=score_mod, mask_mod=mask_mod)
    torch.testing.assert_close(again, direct, rtol=0, atol=0)
    assert again.requires_grad is has_graph


@pytest.mark.parametrize("name", [x for x in CHANGES if "tuple" not in x and "strides" not in x])
def test_results_follow_a_change(name: str) -> None:
    """Or the refusal of what the mod has become."""
    make, change = CHANGES[name]
    mod = make()
    check(mod, None)
    change(mod)
    if find_captures(mod).key is None or "emptied" in name or "attribute of the mod" in name:
        return
    if "gone" in name or "extent" in name:
        with pytest.raises((TypeError, IndexError, NotImplementedError)):
            check(mod, None)
        return
    check(mod, None)


@pytest.mark.parametrize("keeps", [False, True])
def test_other_contents_of_a_mask_are_followed(keeps: bool) -> None:
    """Whether they are intervals or not."""
    ids = torch.arange(N) // 13
    mod = documents(ids)
    check(None, mask_of(mod))
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32)
    indices = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    mask = BlockMask.from_kv_blocks(counts, indices, None, None, 16, mod, (N, N))
    if keeps:
        keep_block_mask(mask)
    for contents in (torch.arange(N) // 7, torch.arange(N) % 3, torch.zeros(N, dtype=ids.dtype)):
        check(None, mask)
        ids.copy_(contents)
    check(None, mask)


EDITS: dict[str, Callable[[BlockMask], Any]] = {
    "counts are written to": lambda x: x.kv_num_blocks.fill_(0),
    "indices are written to": lambda x: x.kv_indices.zero_(),
    "full counts are written to": lambda x: x.full_kv_num_blocks.fill_(0),
    "full indices are written to": lambda x: x.full_kv_indices.zero_(),
    "counts are others": lambda x: setattr(x, "kv_num_blocks", x.kv_num_blocks.clamp(max=1)),
    "no full blocks": lambda x: (
        setattr(x, "full_kv_num_blocks", None), setattr(x, "full_kv_indices", None),
    ),
    "another mod": lambda x: setattr(x, "mask_mod", odd(2)),
}  # fmt: skip


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("mod", [causal, odd(3), documents(IDS)], ids=["band", "mod", "columns"])
def test_an_edited_block_mask_is_seen(name: str, mod: Callable[..., Tensor], keeps: bool) -> None:
    q, k, v = qkv()
    mask = mask_of(mod)
    if keeps:
        keep_block_mask(mask)
    for _ in range(2):
        flex_attention(q, k, v, None, mask)
    EDITS[name](mask)

    def result(mask: BlockMask) -> Any:
        try:
            return flex_attention(q, k, v, None, mask)
        except ValueError as error:
            return str(error)

    out = result(mask)
    lists = [x if x is None else x.clone() for x in (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
    )]  # fmt: skip
    fresh = BlockMask.from_kv_blocks(*lists, 16, mask.mask_mod, (N, N))
    wanted = result(fresh)
    assert out == wanted if isinstance(wanted, str) else torch.equal(out, wanted)


def test_checks_are_made_for_another_call() -> None:
    q, k, v = qkv()
    mask = mask_of(causal)
    flex_attention(q, k, v, None, mask)
    with pytest.raises(ValueError, match="block_mask was made for 40 queries"):
        flex_attention(*qkv(32), None, mask)
    with pytest.raises(ValueError, match="same number of heads"):
        flex_attention(q, k[:, :1], v[:, :1], None, mask)
    with pytest.raises(ValueError, match="hints|kernel_options has 'x'"):
        flex_attention(q, k, v, None, mask, kernel_options={"x": 1})
    with pytest.raises(TypeError, match="return_lse"):
        flex_attention(q, k, v, None, mask, return_lse=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="scale"):
        flex_attention(q, k, v, None, mask, scale="x")  # type: ignore[call-overload]


def test_numbers_of_inference_are_numbers_of_training() -> None:
    """The tensor of a number that varies was made in another mode."""
    table = torch.rand(N, requires_grad=True)
    q, k, v = qkv()
    mods = [with_cells(scale, table) for scale in (1.5, 2.5, 3.5)]
    for mod in mods:
        with torch.inference_mode():
            flex_attention(q, k, v, mod)
    for mod in mods:
        out = flex_attention(q, k, v, mod)
        wanted, _ = dense_attention(*(x.double() for x in (q, k, v)), mod, None)
        (found,) = torch.autograd.grad(out.sum(), table)
        (right,) = torch.autograd.grad(wanted.sum(), table)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_numbers_are_made_anew_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, nothing_is_lowered: Callable[[], None]
) -> None:
    """A CUDA graph reads them after they are dropped here."""
    q, k, v = qkv()
    mods = [functools.partial(scaled, scale) for scale in (1.5, 2.5)]
    for mod in mods:
        flex_attention(q, k, v, mod)
    nothing_is_lowered()
    flex_attention(q, k, v, mods[1])
    monkeypatch.setattr(watch, "is_capturing", lambda: True)
    with pytest.raises(AssertionError, match="looked again"):
        flex_attention(q, k, v, mods[1])


def test_nothing_is_kept_alive() -> None:
    def run() -> list[weakref.ref[Any]]:
        table, ids = torch.rand(N), torch.arange(N) // 9
        score_mod, mask = with_cells(1.5, table), mask_of(documents(ids))
        check(score_mod, mask)
        check(score_mod, None)
        return [weakref.ref(x) for x in (table, ids, score_mod, mask, mask.mask_mod)]

    gc.collect()
    before = len(attention._memo), len(pair._memo)
    held = run()
    gc.collect()
    assert [x() for x in held] == [None] * len(held)
    assert (len(attention._memo), len(pair._memo)) == before


def test_a_captured_tensor_that_is_replaced_is_let_go() -> None:
    mod = with_cells(1.5, torch.rand(N))
    check(mod, None)
    ref = weakref.ref(mod.__closure__[1].cell_contents)  # type: ignore[index]
    set_cell(mod, "table", torch.rand(N))
    gc.collect()
    assert ref() is None


def test_no_more_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MAX_ENTRIES", 3)
    q, k, v = qkv()
    mods = [with_cells(x, TABLE) for x in range(7)]
    for mod in mods:
        flex_attention(q, k, v, mod)
        assert 0 < len(attention._memo) <= max(3, 1)


def test_cute_and_torch_mods_at_one_place() -> None:
    """A torch mod may have the identity that a CuTe mod had."""
    q, k, v = (x.transpose(1, 2) for x in qkv())
    table = [TABLE]

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - TABLE[k]

    cute = pair.resolve_mods(mod, None, None, q.device).score_mod

    def given(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return cute(score, b, h, q, k, aux)  # type: ignore[misc]

    with pytest.raises(ValueError, match="aux_tensors are read by CuTe mods"):
        flash_attn_func(q, k, v, mask_mod=odd(3), aux_tensors=table)
    mask_mod = odd(3)
    first = flash_attn_func(q, k, v, score_mod=given, mask_mod=mask_mod, aux_tensors=table)
    again = flash_attn_func(q, k, v, score_mod=mod, mask_mod=mask_mod)
    torch.testing.assert_close(again, first)
