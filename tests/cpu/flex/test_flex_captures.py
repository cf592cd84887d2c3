"""What mods capture: tensors by identity, numbers as constants that may change once."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks
from torch_values import by_cute, by_torch

from flash_mask_cute.flex import lower_mod
from flash_mask_cute.lowering import lower
from flash_mask_cute.lowering.captures import find_captures
from flash_mask_cute.lowering.paths import UnreachableError

SHAPE = (2, 2, 10, 12)
SCORE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
GLOBAL_IDS = torch.arange(12) // 5
WINDOW = 3


def traced(call: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many mods were traced meanwhile."""
    before = lower.traces
    return call(), lower.traces - before


def document(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def in_global_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return GLOBAL_IDS[q] == GLOBAL_IDS[k]


def in_global_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k <= WINDOW


def check(mod: Callable[..., Tensor], kind: str = "mask_mod") -> lower.LoweredMod:
    lowered = lower_mod(mod, kind)
    score = SCORE if kind == "score_mod" else None
    wanted = by_torch(mod, SHAPE, score)
    torch.testing.assert_close(by_cute(lowered, SHAPE, score), wanted, equal_nan=True)
    return lowered


# -- tensors --------------------------------------------------------------------------------------


def test_other_contents_and_objects_trace_nothing() -> None:
    first = check(and_masks(document(torch.arange(24).view(2, 12) // 3), causal))
    for length in (2, 4, 5):
        ids = torch.arange(24).view(2, 12) // length
        lowered, count = traced(lambda ids=ids: check(and_masks(document(ids), causal)))
        assert count == 0
        assert lowered.mod is first.mod
        assert lowered.aux_tensors[0] is ids


def test_another_length_traces_nothing() -> None:
    def lowered(length: int) -> lower.LoweredMod:
        return lower_mod(document(torch.zeros(2, length, dtype=torch.int64)), "mask_mod")

    first = lowered(100)
    again, count = traced(lambda: lowered(101))
    assert count == 0 and again.mod is first.mod


def test_a_mod_that_asks_for_a_shape_is_traced_for_each() -> None:
    def early(table: Tensor) -> Callable[..., Tensor]:
        return lambda b, h, q, k: q < table.shape[0]

    for length in (3, 5):
        lowered = check(early(torch.zeros(length)))
        assert f"q < {length}" in lowered.source
    lowered, count = traced(lambda: check(early(torch.zeros(3))))
    assert count == 0 and "q < 3" in lowered.source


def test_a_row_that_is_written_out_is_traced_for_each_length() -> None:
    def total(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table[q].sum()

    for columns in (2, 3, 2):
        check(total(torch.rand(10, columns)), "score_mod")


def test_dtype_and_rank_are_structure() -> None:
    def bias(table: Any) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table[q]

    texts = [check(bias(torch.ones(10, dtype=x)), "score_mod").source
             for x in (torch.int32, torch.float32, torch.bool)]  # fmt: skip
    assert texts[0] != texts[1]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.rand(12))
        self.other = torch.nn.Linear(3, 3)
        self.scale = 3

    def bias(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.table[k] * self.scale

    def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.bias(s, b, h, q, k)


LAYER = Layer()


def by_keyword(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, t: Tensor) -> Tensor:
    return s + t[k]


class Callable_:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.table[k]


def nested(table: Tensor) -> Callable[..., Tensor]:
    def read(i: Tensor) -> Tensor:
        return table[i]

    return lambda s, b, h, q, k: s + read(k)


TABLE = torch.rand(12)
HOLDERS: dict[str, Callable[..., Tensor]] = {
    "method of a module": LAYER.bias,
    "module": LAYER,
    "call of a module": lambda s, b, h, q, k: LAYER(s, b, h, q, k),
    "partial": functools.partial(by_keyword, t=TABLE),
    "nested function": nested(TABLE),
    "callable object": Callable_(TABLE),
    "list": (lambda tables: lambda s, b, h, q, k: s + tables[1][k])([None, TABLE]),
    "dict": (lambda tables: lambda s, b, h, q, k: s + tables["t"][k])({"t": TABLE}),
    "default": lambda s, b, h, q, k, t=TABLE: s + t[k],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_are_found_wherever_they_are_held(name: str) -> None:
    mod = HOLDERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it is traced at each call
        lowered = lower_mod(mod, "score_mod")
        again, count = traced(lambda: lower_mod(mod, "score_mod"))
    assert count == 0 and again.mod is lowered.mod
    assert lowered.aux_tensors[0] is (LAYER.table if "module" in name else TABLE)
    score = SCORE.detach()
    wanted = by_torch(mod, SHAPE, score).detach()
    torch.testing.assert_close(by_cute(lowered, SHAPE, score), wanted)


def test_a_global_that_is_another_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = check(in_global_document)
    other = torch.arange(12) // 2
    monkeypatch.setitem(globals(), "GLOBAL_IDS", other)
    lowered, count = traced(lambda: check(in_global_document))
    assert count == 0 and lowered.mod is first.mod and lowered.aux_tensors == (other,)


def test_a_parameter_keeps_its_gradient_unless_it_is_detached() -> None:
    table = torch.nn.Parameter(torch.rand(12))
    kept = lower_mod(lambda s, b, h, q, k: s + table[k], "score_mod")
    assert kept.aux_tensors[0] is table
    cut = lower_mod(lambda s, b, h, q, k: s + table.detach()[k] * table[q], "score_mod")
    assert [x.requires_grad for x in cut.aux_tensors] == [False, True]


def _lowered_and_dropped() -> list[weakref.ref[Tensor]]:
    table, computed = torch.rand(12), torch.rand(12)
    lower_mod(lambda s, b, h, q, k: s + table[k] + computed.exp()[q], "score_mod")
    return [weakref.ref(table), weakref.ref(computed)]


def test_what_is_kept_keeps_no_tensor() -> None:
    held = _lowered_and_dropped()
    gc.collect()
    assert [x() for x in held] == [None, None]


def test_no_copies_of_tensors() -> None:
    number = torch.tensor(3)
    lowered = lower_mod(lambda b, h, q, k: GLOBAL_IDS[q] > number, "mask_mod")
    pointers = {x.data_ptr() for x in lowered.aux_tensors}
    assert pointers == {GLOBAL_IDS.data_ptr(), number.data_ptr()}


@pytest.mark.parametrize(
    ("table", "error", "says"),
    [
        (torch.zeros(12, dtype=torch.complex64), TypeError, "closure variable 'table'.*complex64"),
        (torch.zeros(1, 1, 1, 1, 12), NotImplementedError, "variable 'table'.*5 dimensions"),
        (torch.zeros(0), IndexError, "closure variable 'table'.*empty"),
    ],
)  # fmt: skip
def test_tensors_that_kernels_do_not_read(table: Tensor, error: type, says: str) -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + (table[0, 0, 0, 0, k] if table.dim() > 1 else table[k]).real

    with pytest.raises(error, match=says):
        lower_mod(mod, "score_mod")


def test_float64_is_refused_on_a_gpu_by_name() -> None:
    captured = find_captures(document(torch.zeros(2, 12, dtype=torch.float64))).tensors[0]
    with pytest.raises(TypeError, match=r"'ids'.*float64.*x\.float\(\)"):
        lower._as_aux(captured.tensor, torch.device("cuda"), causal, captured.path)


# -- numbers --------------------------------------------------------------------------------------


def window(size: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: q - k <= size


def soft_cap(cap: float) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


@dataclass
class Settings:
    size: int


def of_settings(settings: Settings) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q - k) % settings.size == 0


def global_window(size: int) -> Callable[..., Tensor]:
    globals()["WINDOW"] = size
    return in_global_window


def scaled_layer(scale: int) -> Callable[..., Tensor]:
    LAYER.scale = scale
    return LAYER.bias


def scaled(scale: float, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * scale


CHANGING: dict[str, tuple[str, Callable[[Any], Callable[..., Tensor]], tuple[Any, ...]]] = {
    "closure": ("mask_mod", window, (2, 3, 5, 7)),
    "in and_masks": ("mask_mod", lambda n: and_masks(window(n), causal), (2, 3, 5, 7)),
    "in or_masks": ("mask_mod", lambda n: or_masks(window(n), window(-n)), (2, 3, 5, 7)),
    "float": ("score_mod", soft_cap, (2.0, 3.5, 5.25, 0.1)),
    "attribute": ("mask_mod", lambda n: of_settings(Settings(n)), (2, 3, 5, 7)),
    "global": ("mask_mod", global_window, (2, 3, 5, 7)),
    "of a module": ("score_mod", scaled_layer, (2, 3, 5, 7)),
    "partial": ("score_mod", lambda x: functools.partial(scaled, x), (0.5, 0.3, 2.0)),
    "computed with": (
        "score_mod",
        lambda n: lambda s, b, h, q, k: s * (n // 2 + 1) / n**2 + GLOBAL_IDS[k % n],
        (2, 3, 5, 7),
    ),
}


@pytest.mark.shares(3)
@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_changes_compiles_once_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "_structures", {})
    monkeypatch.setattr(lower, "_programs", {})
    kind, make, values = CHANGING[name]
    texts, counts = [], []
    for value in values:
        mod = make(value)
        lowered, count = traced(lambda mod=mod: lower_mod(mod, kind))
        score = SCORE if kind == "score_mod" else None
        wanted = by_torch(mod, SHAPE, score).detach()
        torch.testing.assert_close(by_cute(lowered, SHAPE, score), wanted)
        texts.append(lowered.source)
        counts.append(count)
    assert counts == [1, 1, *[0] * (len(values) - 2)]
    assert texts[0] != texts[1] and len(set(texts[1:])) == 1


def test_the_side_of_a_grid_stays_a_constant_for_some_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the class of reads is known; not for any number of values."""
    monkeypatch.setattr(lower, "_structures", {})
    monkeypatch.setattr(lower, "_programs", {})
    table = torch.randn(2, 200)

    def of_grid(side: int) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + table[h, q // side - k // side + (q - k) % (2 * side - 1)]

    numbers = []
    for side in range(4, 16):
        numbers.append(len(lower_mod(of_grid(side), "score_mod").aux_tensors) - 1)
        check(of_grid(side), "score_mod")
    # the first one, before it has changed, and eight
    assert numbers == [0] * 9 + [2] * 3
    assert len(lower_mod(of_grid(5), "score_mod").aux_tensors) == 1


def test_a_number_that_the_mod_needs_to_know_stays_a_constant() -> None:
    def repeated(count: int) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            for _ in range(count):
                s = s * 2
            return s

        return mod

    for count in (1, 2, 3, 2):
        check(repeated(count), "score_mod")
    _, more = traced(lambda: lower_mod(repeated(3), "score_mod"))
    assert more == 0


def test_a_number_behind_an_object_that_is_met_twice_stays_a_constant() -> None:
    """A copy of the mod would have it in one of the places only."""

    def both(settings: Settings) -> Callable[..., Tensor]:
        one, two = of_settings(settings), of_settings(settings)
        return lambda b, h, q, k: one(b, h, q, k) & two(b, h, q + 1, k)

    for size in (2, 3, 4):
        check(both(Settings(size)))


def test_a_mod_that_nothing_can_follow_is_traced_each_time_and_says_so() -> None:
    class Opaque(dict):  # type: ignore[type-arg]
        __slots__ = ()

    holder = Opaque(size=3)
    tables = iter([])  # an iterator has no structure

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert tables is not None
        return q - k <= holder["size"]

    with pytest.warns(UserWarning, match="mod.*traced anew at each call"):
        check(mod)
    holder["size"] = 5
    _, count = traced(lambda: check(mod))
    assert count == 1


def test_paths_are_told_in_words() -> None:
    captured = find_captures(and_masks(document(torch.zeros(2, 2)), causal)).tensors[0]
    assert str(captured.path).startswith("closure variable 'ids' of item 0 of closure")


@pytest.mark.parametrize("key", ["scale", 1, (0.5, 1), None], ids=["str", "int", "tuple", "None"])
def test_numbers_of_a_dict_vary_by_keys_of_any_type(key: Any) -> None:
    held = {"other": 1.0, key: 0.5}

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * held[key]

    for number in (0.5, 1.5, 2.5, 3.5):
        held[key] = number
        check(scaled, "score_mod")
    held[key] = 4.5
    assert traced(lambda: check(scaled, "score_mod"))[1] == 0


class Holder:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def bias(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.table[k]


class Slotted(Holder):
    __slots__ = ("other",)

    def __init__(self, table: Tensor) -> None:
        self.other = table


def in_a_list(table: Tensor) -> Callable[..., Tensor]:
    held = {7: [1, table]}
    return lambda s, b, h, q, k: s + held[7][1][k]


def in_a_slot(table: Tensor) -> Callable[..., Tensor]:
    held = Slotted(table)
    return lambda s, b, h, q, k: s + held.other[k]


def reads_default(
    s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, t: Any = None, *, u: Any = None
) -> Tensor:
    return s + (u if t is None else t)[k]


def with_default(table: Tensor) -> Callable[..., Tensor]:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, t: Tensor = table) -> Tensor:
        return s + t[k]

    return mod


# Mods of a tensor, by how they reach it; and whether a copy may reach another one.
WAYS: dict[str, tuple[Callable[[Tensor], Callable[..., Tensor]], bool]] = {
    "cell": (lambda x: lambda s, b, h, q, k: s + x[k], True),
    "default": (with_default, True),
    "keyword": (lambda x: functools.partial(reads_default, u=x), True),
    "position": (
        lambda x: functools.partial(lambda f, t, s, b, h, q, k: s * f + t[k], 2, x), True
    ),
    "list in a dict": (in_a_list, True),
    "attribute": (lambda x: Holder(x).bias, True),
    "slot": (in_a_slot, False),
    "partial of a method": (lambda x: functools.partial(Holder(x).bias), True),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_path_is_read_and_copied(way: str) -> None:
    make, is_copied = WAYS[way]
    table, other = torch.rand(12), torch.rand(12)
    mod = make(table)
    path = find_captures(mod).tensors[0].path
    assert path.read(mod) is table
    if not is_copied:
        with pytest.raises(UnreachableError):
            path.copy(mod, other)
        return
    copied = path.copy(mod, other)
    assert path.read(copied) is other and path.read(mod) is table
    place = [torch.tensor(x) for x in (0, 0, 1, 2)]
    given = torch.tensor(0.25), *place
    assert torch.equal(copied(*given), make(other)(*given))
    assert torch.equal(mod(*given), make(table)(*given))


def test_what_no_steps_lead_to() -> None:
    part = slice(1, 3)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + GLOBAL_IDS[part].sum()

    first, _ = find_captures(scaled).numbers
    assert str(first.path).startswith("item 0 of closure variable 'part' of ")
    for call in (first.path.read, lambda mod: first.path.copy(mod, 1)):
        with pytest.raises(UnreachableError):
            call(scaled)
