"""Each optional argument is looked at; junk is refused by its name, whichever way a call goes."""

from __future__ import annotations

import inspect
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ways import BY_OPERATOR, WAYS, caller_of

from flash_mask_cute import flash_attn_with_kvcache

pytestmark = [
    pytest.mark.usefixtures("explained_without_compiling"),
    pytest.mark.filterwarnings("ignore:flash_mask_cute"),
]
SEED = os.environ.get("FLASH_MASK_SIM_SEED", "0")
# the last one by torch, of what an operator does not take
REFUSALS = TypeError, ValueError, NotImplementedError, RuntimeError
JUNK: dict[str, Any] = {
    "text": "junk",
    "object": object(),
    "tensor": torch.zeros(3, 1, 2, 1, 7, dtype=torch.complex64),
    "meta": torch.zeros(2, device="meta"),
    "list": [None],
    "nan": float("nan"),
}
# Arguments, and the one without which they are ignored.
IGNORED = {
    (flash_attn_with_kvcache, "cu_seqlens_k_new"): "k",
    (flash_attn_with_kvcache, "rotary_seqlens"): "rotary_cos",
}
CALLS = [
    pytest.param(function, way, by_operator, id=f"{function.__name__}-{way}{'-op' * by_operator}")
    for function, ways in WAYS.items()
    for by_operator in ((False, True) if function in BY_OPERATOR else (False,))
    for way in ways
]


def optional_arguments(function: Callable[..., Any]) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [x.name for x in found if x.default is not x.empty]


def looked_at(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[str]:
    for name in optional_arguments(function):
        needs = IGNORED.get((function, name))
        if needs is None or needs in given:
            yield name


def fault(call: Callable[..., Any], given: dict[str, Any], names: list[str]) -> str | None:
    """What is wrong about the answer to a call whose arguments `names` are junk."""
    try:
        call(**given)
    except REFUSALS as error:
        said = str(error)
        if any(re.search(rf"\b{name}\b|\b{name}_(left|right|torch)\b", said) for name in names):
            return None
        return f"{names}: {type(error).__name__} names none: {said}"
    except Exception as error:
        return f"{names}: {type(error).__name__}: {error}"
    return f"{names}: accepted"


@pytest.mark.shares(3)
@pytest.mark.parametrize(("function", "way", "by_operator"), CALLS)
def test_junk_is_refused_by_name(function: Callable[..., Any], way: str, by_operator: bool) -> None:
    make, call = WAYS[function][way], caller_of(function, by_operator)
    call(**make())
    wrong = []
    for name in looked_at(function, make()):
        for kind, junk in JUNK.items():
            found = fault(call, make() | {name: junk}, [name])
            if found is not None:
                wrong.append(f"{kind} as {found}")
    assert not wrong, "\n".join(wrong)


def test_drawn_junk_is_refused_by_name() -> None:
    rng = random.Random(f"{SEED}-junk")
    wrong = []
    for _ in range(400):
        function, way, by_operator = rng.choice(CALLS).values
        given = WAYS[function][way]()
        names = rng.sample(list(looked_at(function, given)), rng.choice((2, 2, 3)))
        kinds = rng.choices(list(JUNK), k=len(names))
        given |= {name: JUNK[kind] for name, kind in zip(names, kinds, strict=True)}
        found = fault(caller_of(function, by_operator), given, names)
        if found is not None:
            wrong.append(f"{function.__name__}, {way}, {by_operator}, {kinds} as {found}")
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("function", "name"), IGNORED)
def test_the_docstring_says_what_is_ignored(function: Callable[..., Any], name: str) -> None:
    said = " ".join(str(function.__doc__).split())
    needs = IGNORED[function, name]
    words = "tables" if needs.startswith("rotary") else needs
    assert re.search(rf"{name} \([^)]*ignored without {words}", said)
