"""Structural identity of user callables: equal exactly when tracing sees the same things."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from own_modules import OBJECT_PARTS, OBJECTS, Import, window

from flash_mask_cute.runtime.callable_key import callable_key

# -- closures, lambdas, defaults ----------------------------------------------------------------


def test_same_text_with_equal_cells() -> None:
    assert callable_key(window(128)) == callable_key(window(128))


def test_key_is_a_short_line_with_the_python_version() -> None:
    key = callable_key(window(1))
    assert key.startswith(f"py{sys.version_info.major}.{sys.version_info.minor}:")
    assert len(key) < 80 and key.isprintable()


CELL_VALUES = [
    *(1, 2, True, 1.0, -0.0, 0.0, 1j, None, "1", b"1"),
    *((1,), [1], (1, 2), ((1,), 2), (1, (2,)), {1}, frozenset({1})),
    *({1: 2}, {2: 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, range(3), slice(1, 2)),
    *(int, float, len, max, torch.float16, torch.bfloat16, torch.device("cpu"), torch.Size((1,))),
    *(functools.partial(max, 1), functools.partial(max, 2), "ab".join, "ba".join, sys, functools),
]


def test_different_cells_give_different_keys() -> None:
    keys = [callable_key(window(value)) for value in CELL_VALUES]
    same = [
        (CELL_VALUES[i], CELL_VALUES[j])
        for i, j in itertools.combinations(range(len(keys)), 2)
        if keys[i] == keys[j]
    ]
    assert same == [({1}, frozenset({1}))]  # a callable cannot tell them apart when it reads them


def test_nan_cells_are_equal() -> None:
    assert callable_key(window(float("nan"))) == callable_key(window(float("nan")))


def test_cell_that_changes_later() -> None:
    size = 1

    def mask_mod(q: Any, k: Any) -> Any:
        return q - k < size

    before = callable_key(mask_mod)
    size = 2
    after = callable_key(mask_mod)
    assert before != after
    size = 1
    assert callable_key(mask_mod) == before


def test_mutated_container_in_a_cell() -> None:
    sizes = [1]
    mod = window(sizes)
    before = callable_key(mod)
    sizes.append(2)
    assert callable_key(mod) != before


def test_two_lambdas_on_one_line() -> None:
    first, second = (lambda q, k: q >= k), (lambda q, k: q > k)
    third, fourth = (lambda q, k: q + 1), (lambda q, k: q + 2)
    assert len({callable_key(fn) for fn in (first, second, third, fourth)}) == 4


def test_arguments_and_defaults() -> None:
    variants: list[Callable[..., Any]] = [
        lambda q, k: q,
        lambda q, k=1: q,
        lambda q, k=2: q,
        lambda q, *, k=1: q,
        lambda q, *, k=2: q,
        lambda q, *k: q,
        lambda q, **k: q,
        lambda q, k, /: q,
    ]
    assert len({callable_key(fn) for fn in variants}) == len(variants)


def test_nested_functions_count() -> None:
    def one(q: Any) -> Any:
        return (lambda: q + 1)()

    def two(q: Any) -> Any:
        return (lambda: q + 2)()

    assert callable_key(one) != callable_key(two)


def test_empty_cell() -> None:
    def mod(q: Any) -> Any:
        return later(q)

    before = callable_key(mod)

    def later(q: Any) -> Any:
        return q

    assert callable_key(mod) != before


def test_partial_and_bound_state() -> None:
    keys = {
        callable_key(functools.partial(window(1), 0)),
        callable_key(functools.partial(window(1), 1)),
        callable_key(functools.partial(window(2), 0)),
        callable_key(functools.partial(window(1), b=0)),
        callable_key(functools.partial(window(1), h=0)),
        callable_key(window(1)),
    }
    assert len(keys) == 6
    assert callable_key(functools.partial(window(1), b=0)) in keys


# -- globals and callees ------------------------------------------------------------------------

CALLER = """
{head}
SCALE = {scale}

def callee(x):
    return x * SCALE + {offset}

def mod(score, b, h, q, k, aux):
    return {body}

UNUSED = {unused}
"""


def _caller(import_source: Import, **change: object) -> str:
    parts = {"head": "", "scale": 2, "offset": 1, "body": "callee(score)", "unused": 0} | change
    return callable_key(import_source(CALLER.format(**parts)).mod)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"scale": 3}, True),  # a global of the callee
        ({"offset": 2}, True),  # the callee itself
        ({"body": "callee(score) + 1"}, True),
        ({"body": "callee(k)"}, True),
        ({"unused": 5}, False),
        ({"unused": "object()"}, False),
        ({"head": "\n# a comment\n\n"}, False),  # lines move
    ],
)
def test_what_a_module_change_does(
    import_source: Import, change: dict[str, object], differs: bool
) -> None:
    assert (_caller(import_source) != _caller(import_source, **change)) is differs


def pattern_of(keys: list[str]) -> str:
    """A letter for each key: equal ones have the same."""
    different = list(dict.fromkeys(keys))
    return "".join("abcdef"[different.index(key)] for key in keys)


@pytest.mark.parametrize(
    ("source", "values", "pattern"),
    [
        # a global that nested code alone loads; an attribute whose name is that of a global
        ("N = {}\ndef mod(q):\n    return [(lambda: i < N)() for i in (q,)]\n", (1, 2), "ab"),
        ("size = {}\ndef mod(q):\n    return q.size\n", (1, 2), "aa"),
        # names that are shadowed or undefined
        ("{}(q, 1)\n", [f"def mod(q):\n    return {x}" for x in ("max", "min", "most")]
         + ["def max(*x):\n    return x\ndef mod(q):\n    return max"], "abcd"),
        # recursion and cycles
        (
            "def even(n):\n    return n == 0 or odd(n - 1)\n"
            "def odd(n):\n    return n != {} and even(n - 1)\n"
            "LOOP = []\nLOOP.append(LOOP)\n"
            "HANDLERS = set()\n"
            "def mod(q):\n    return even(q) and LOOP and mod and HANDLERS\n"
            "HANDLERS.add(mod)\n"
            "HANDLERS.add(even)\n",
            (0, 0, 1),
            "aab",
        ),
        # shared is not nested
        ("A = [1]\nB = {}\ndef mod(q):\n    return (A, B)\n", ("[1]", "[A]", "[2]", "(A,)", "A"),
         "abcde"),
    ],
    ids=["nested-code", "unrelated-global", "names", "cycles", "sharing"],
)  # fmt: skip
def test_which_texts_have_the_same_key(
    import_source: Import, source: str, values: Sequence[object], pattern: str
) -> None:
    keys = [callable_key(import_source(source.format(value)).mod) for value in values]
    assert pattern_of(keys) == pattern


OWN = "import types\nm = types.ModuleType('own_settings')\nm.w = 3\n"
IMPORTING = (
    "from own_later import A\n    return q < A",
    "import own_later\n    return q < own_later.A",
    "import own_later as late\n    return q < late.A",
    "import own_later\n    return q < getattr(own_later, 'A')",
    "def inner():\n        import own_later\n        return own_later.A\n    return inner()",
)
NAMING = (
    *("return m.w", "c = m\n    return c.w", "return getattr(m, 'w')"),
    *("return m.w if hasattr(m, 'w') else 0", "return (lambda: m.w)()"),
)


@pytest.mark.parametrize(
    ("source", "steps", "pattern"),
    [
        (CALLER.format(head="", scale=2, offset=1, body="callee(q)", unused=0),
         ("module.SCALE = 7", "module.SCALE = 2", "module.callee = lambda x: x"), "abac"),
        # of another module only what the code names; also where nested code alone names it
        ("import own_later\ndef mod(q, k):\n    return q - k < own_later.A\n",
         ("own.B = 5", "own.A = 4"), "aab"),
        ("import own_later as own\ndef mod(q):\n    return (lambda: own.A)()\n",
         ("own.A = 4",), "ab"),
        *((f"def mod(q):\n    {body}\n", ("own.A = 4",), "ab") for body in IMPORTING),
        *((OWN + f"def mod(q):\n    {body}\n", ("module.m.w = 9", "module.m.w = 3"), "aba")
          for body in NAMING),
        # a module is encoded once, but each function adds the attributes that it mentions
        ("import own_later\ndef other(q):\n    return own_later.B\n"
         "def mod(q):\n    return own_later.A + other(q)\n", ("own.B = 3", "own.A = 0"), "abc"),
        # attributes of functions
        ("def mod(q):\n    return q * mod.scale\nmod.scale = 1\n",
         ("module.mod.scale = 2", "module.mod.remark = object()"), "abb"),
        ("def callee(q):\n    return q\ncallee.scale = 1\n"
         "def mod(q):\n    return callee(q) * callee.scale\n", ("module.callee.scale = 2",), "ab"),
    ],
)  # fmt: skip
def test_what_changes_later(
    import_source: Import, source: str, steps: Sequence[str], pattern: str
) -> None:
    own = import_source("A = 1\nB = 2\nTABLE = object()\n", name="own_later")
    module = import_source(source)
    keys = [callable_key(module.mod)]
    for step in steps:
        exec(step, {"own": own, "module": module})
        keys.append(callable_key(module.mod))
    assert pattern_of(keys) == pattern


# -- classes, objects, enums --------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda mod: mod, lambda mod: mod.method, lambda mod: window(mod)])
def test_objects_count_with_state_and_class(
    import_source: Import, use: Callable[[Any], Callable[..., Any]]
) -> None:
    def key(**change: int) -> str:
        module = import_source(OBJECTS.format(**(OBJECT_PARTS | change)), name="own_objects")
        return callable_key(use(module.mod))

    base = key()
    assert key() == base
    changed = {name: key(**{name: 2}) for name in OBJECT_PARTS}
    assert base not in changed.values()
    assert len(set(changed.values())) == len(changed)


def test_cached_properties_do_not_change_the_key(import_source: Import) -> None:
    mod = import_source(OBJECTS.format(**OBJECT_PARTS)).mod
    before = callable_key(mod)
    assert mod.table == (1, 2)
    assert callable_key(mod) == before


def test_enum_members_differ(import_source: Import) -> None:
    kind = import_source(OBJECTS.format(**OBJECT_PARTS)).Kind
    assert callable_key(window(kind.NEAR)) != callable_key(window(kind.FAR))


# -- refusals and the override ------------------------------------------------------------------


def test_tensor_in_a_closure_is_refused() -> None:
    table = torch.zeros(3)

    def score_mod(score: Any, q: Any) -> Any:
        return score + table[q]

    with pytest.raises(TypeError) as caught:
        callable_key(score_mod)
    message = str(caught.value)
    assert "closure variable 'table' of" in message and "score_mod" in message
    assert "torch.Tensor" in message and "aux_tensors" in message
    assert "__flash_mask_key__" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("T = torch.zeros(1)\ndef mod(q):\n    return T\n",
         "global 'T' of 'mod' is a torch.Tensor"),
        ("T = [0, {'x': torch.zeros(1)}]\ndef mod(q):\n    return T\n", "item 'x' of item 1 of"),
        ("def mod(q, t=torch.zeros(1)):\n    return t\n", "default of argument 't' of 'mod'"),
        ("def mod(q, *, t=torch.zeros(1)):\n    return t\n", "default of argument 't' of 'mod'"),
        ("import io\nT = io.StringIO()\ndef mod(q):\n    return T\n", "is a _io.StringIO"),
        ("T = (i for i in ())\ndef mod(q):\n    return T\n", "generator"),
        ("class T(torch.Tensor): pass\nt = T()\ndef mod(q):\n    return t\n", "global 't'"),
        ("class T(dict): pass\nt = T()\ndef mod(q):\n    return t\n", "global 't' of 'mod'"),
        ("import numpy as np\nT = np.zeros(2)\ndef mod(q):\n    return T\n", "numpy.ndarray"),
        ("class C:\n    pass\nC.w = torch.zeros(1)\nc = C()\ndef mod(q):\n    return c\n",
         "class attribute 'w' of global 'c' of 'mod'"),
        ("class C:\n    pass\nc = C()\nc.w = torch.zeros(1)\ndef mod(q):\n    return c\n",
         "attribute 'w' of global 'c' of 'mod'"),
        ("def callee(q):\n    return W\nW = torch.zeros(1)\ndef mod(q):\n    return callee(q)\n",
         "global 'W' of global 'callee' of 'mod'"),
    ],
)  # fmt: skip
def test_refusals_name_the_variable(import_source: Import, source: str, words: str) -> None:
    mod = import_source("import torch\n" + source).mod
    with pytest.raises(TypeError) as caught:
        callable_key(mod)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            OWN + "def get():\n    return m\ndef mod(q):\n    return q + get().w\n",
            "global 'get' of",
        ),
        (OWN + "def get(x):\n    return x.w\ndef mod(q):\n    return get(m)\n", "module 'm'"),
        (OWN + "def mod(q):\n    return [m][0].w\n", "module 'm'"),
        (OWN + "def make(c):\n    return lambda q: list((c,))\nmod = make(m)\n", "module 'c'"),
        ("W = 1\ndef mod(q):\n    return globals()['W']\n", "'mod' uses globals"),
        ("W = 1\ndef mod(q):\n    return (lambda: eval('W'))()\n", "'mod' uses eval"),
        ("def mod(q):\n    return __import__('os').name\n", "'mod' uses __import__"),
        ("import sys\ndef mod(q):\n    return sys.modules['own'].w\n", "uses sys.modules"),
        ("import os\ndef mod(q):\n    return int(os.environ['W'])\n", "uses os.environ"),
        ("def mod(q):\n    import os\n    return os.getenv('W')\n", "uses os.getenv"),
    ],
)
def test_what_no_key_can_follow_is_refused(import_source: Import, source: str, words: str) -> None:
    mod = import_source(source).mod
    with pytest.raises(TypeError, match="no compile key can follow") as caught:
        callable_key(mod)
    assert words in str(caught.value) and "__flash_mask_key__" in str(caught.value)
    mod.__flash_mask_key__ = "mine"
    assert callable_key(mod) == "key:mine"


def test_modules_of_libraries_may_be_handed_on(import_source: Import) -> None:
    source = "import math\ndef call(f):\n    return f.pi\ndef mod(q):\n    return call(math)\n"
    assert callable_key(import_source(source).mod)


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="expected a callable, got int"):
        callable_key(3)  # type: ignore[arg-type]


def test_override_replaces_the_analysis() -> None:
    table = torch.zeros(3)

    def make() -> Any:
        def score_mod(score: Any, q: Any) -> Any:
            return score + table[q]

        return score_mod

    one, two = make(), make()
    one.__flash_mask_key__ = "alibi-v1"
    two.__flash_mask_key__ = "alibi-v2"
    assert callable_key(one) == "key:alibi-v1"
    assert callable_key(one) != callable_key(two)
    assert callable_key(window(one)) != callable_key(window(two))  # honoured below the root too


def test_override_on_an_object(import_source: Import) -> None:
    source = (
        "import torch\nclass Mod:\n    __flash_mask_key__ = 'm{}'\n"
        "    def __init__(self):\n        self.w = torch.zeros(1)\n"
        "    def __call__(self, q):\n        return self.w\n"
        "    def method(self, q):\n        return self.w\nmod = Mod()\n"
    )
    first, second = (import_source(source.format(n)).mod for n in (1, 2))
    assert callable_key(first) == "key:m1"
    assert callable_key(first.method) != callable_key(second.method)


@pytest.mark.parametrize("value", ["", 3])
def test_override_must_be_text(value: object) -> None:
    mod = window(1)
    mod.__flash_mask_key__ = value  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="__flash_mask_key__ must be a non-empty string"):
        callable_key(mod)
