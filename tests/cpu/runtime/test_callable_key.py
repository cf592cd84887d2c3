"""Structural identity of user callables: equal exactly when tracing sees the same things."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
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
    1,
    2,
    True,
    1.0,
    -0.0,
    0.0,
    1j,
    None,
    "1",
    b"1",
    (1,),
    [1],
    (1, 2),
    ((1,), 2),
    (1, (2,)),
    {1},
    frozenset({1}),
    {1: 2},
    {2: 1},
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    range(3),
    slice(1, 2),
    int,
    float,
    len,
    max,
    torch.float16,
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size((1,)),
    functools.partial(max, 1),
    functools.partial(max, 2),
    "ab".join,
    "ba".join,
    sys,
    functools,
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


def test_global_that_changes_later(import_source: Import) -> None:
    module = import_source(CALLER.format(head="", scale=2, offset=1, body="callee(q)", unused=0))
    before = callable_key(module.mod)
    module.SCALE = 7
    assert callable_key(module.mod) != before
    module.SCALE = 2
    assert callable_key(module.mod) == before
    module.callee = lambda x: x
    assert callable_key(module.mod) != before


def test_global_loaded_by_nested_code_only(import_source: Import) -> None:
    source = "LIMIT = {}\ndef mod(q):\n    return [(lambda: i < LIMIT)() for i in (q,)]\n"
    one, two = (callable_key(import_source(source.format(n)).mod) for n in (1, 2))
    assert one != two


def test_attribute_name_that_equals_an_unrelated_global(import_source: Import) -> None:
    source = "size = {}\ndef mod(q):\n    return q.size\n"
    one, two = (callable_key(import_source(source.format(n)).mod) for n in (1, 2))
    assert one == two


def test_shadowed_and_undefined_names(import_source: Import) -> None:
    keys = {
        callable_key(import_source(source).mod)
        for source in (
            "def mod(q):\n    return max(q, 1)\n",
            "def mod(q):\n    return min(q, 1)\n",
            "def mod(q):\n    return most(q, 1)\n",
            "def max(*x):\n    return x\ndef mod(q):\n    return max(q, 1)\n",
        )
    }
    assert len(keys) == 4


def test_attributes_of_own_modules(import_source: Import) -> None:
    used = import_source("WIDTH = 3\nOTHER = 4\nTABLE = object()\n", name="own_settings")
    source = "import own_settings\ndef mod(q, k):\n    return q - k < own_settings.WIDTH\n"
    mod = import_source(source).mod
    before = callable_key(mod)
    used.OTHER = 5
    assert callable_key(mod) == before
    used.WIDTH = 4
    assert callable_key(mod) != before


@pytest.mark.parametrize(
    "body",
    [
        "from own_late import WIDTH\n    return q < WIDTH",
        "import own_late\n    return q < own_late.WIDTH",
        "import own_late as late\n    return q < late.WIDTH",
        "import own_late\n    return q < getattr(own_late, 'WIDTH')",
        "def inner():\n        import own_late\n        return own_late.WIDTH\n    return inner()",
    ],
)
def test_imports_inside_the_function(import_source: Import, body: str) -> None:
    used = import_source("WIDTH = 3\n", name="own_late")
    mod = import_source(f"def mod(q):\n    {body}\n").mod
    before = callable_key(mod)
    used.WIDTH = 4
    assert callable_key(mod) != before


def test_attributes_mentioned_by_nested_code_only(import_source: Import) -> None:
    used = import_source("WIDTH = 3\n", name="own_nested")
    source = "import own_nested\ndef mod(q):\n    return (lambda: own_nested.WIDTH)()\n"
    mod = import_source(source).mod
    before = callable_key(mod)
    used.WIDTH = 4
    assert callable_key(mod) != before


def test_own_function_seen_through_two_modules(import_source: Import) -> None:
    """A module is encoded once, but each function adds the attributes that it mentions."""
    used = import_source("A = 1\nB = 2\n", name="own_pair")
    source = (
        "import own_pair\ndef other(q):\n    return own_pair.B\n"
        "def mod(q):\n    return own_pair.A + other(q)\n"
    )
    mod = import_source(source).mod
    before = callable_key(mod)
    used.B = 3
    middle = callable_key(mod)
    used.A = 0
    assert len({before, middle, callable_key(mod)}) == 3


def test_function_attributes(import_source: Import) -> None:
    mod = import_source("def mod(q):\n    return q * mod.scale\nmod.scale = 1\n").mod
    before = callable_key(mod)
    mod.scale = 2
    changed = callable_key(mod)
    assert changed != before
    mod.remark = object()
    assert callable_key(mod) == changed


def test_attributes_of_a_callee(import_source: Import) -> None:
    source = (
        "def callee(q):\n    return q\ncallee.scale = 1\n"
        "def mod(q):\n    return callee(q) * callee.scale\n"
    )
    module = import_source(source)
    before = callable_key(module.mod)
    module.callee.scale = 2
    assert callable_key(module.mod) != before


def test_recursion_and_cycles(import_source: Import) -> None:
    source = (
        "def even(n):\n    return n == 0 or odd(n - 1)\n"
        "def odd(n):\n    return n != {} and even(n - 1)\n"
        "LOOP = []\nLOOP.append(LOOP)\n"
        "HANDLERS = set()\n"
        "def mod(q):\n    return even(q) and LOOP and mod and HANDLERS\n"
        "HANDLERS.add(mod)\n"
        "HANDLERS.add(even)\n"
    )
    one, same, two = (callable_key(import_source(source.format(n)).mod) for n in (0, 0, 1))
    assert one == same != two


def test_sharing_is_not_confused_with_nesting(import_source: Import) -> None:
    source = "A = [1]\nB = {}\ndef mod(q):\n    return (A, B)\n"
    values = ("[1]", "[A]", "[2]", "(A,)", "A")
    keys = {callable_key(import_source(source.format(value)).mod) for value in values}
    assert len(keys) == len(values)


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


OWN = "import types\nm = types.ModuleType('own_settings')\nm.w = 3\n"


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


@pytest.mark.parametrize(
    "body",
    [
        "return m.w",
        "c = m\n    return c.w",
        "return getattr(m, 'w')",
        "return m.w if hasattr(m, 'w') else 0",
        "return (lambda: m.w)()",
    ],
)
def test_attributes_that_the_code_names_are_followed(import_source: Import, body: str) -> None:
    module = import_source(OWN + f"def mod(q):\n    {body}\n")
    before = callable_key(module.mod)
    module.m.w = 9
    assert callable_key(module.mod) != before
    module.m.w = 3
    assert callable_key(module.mod) == before


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
