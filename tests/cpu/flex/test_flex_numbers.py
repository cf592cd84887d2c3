"""Numbers in masks: bounds of queries and keys of every kind, against each score by torch."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drawn_share import Draws
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
from torch_values import dense_attention

from flash_mask_cute import flash_attn_func
from flash_mask_cute.flex import flex_attention, lower_mod
from flash_mask_cute.lowering.simplify import BandForm

DRAWN = Draws.of("NUMBERS", 160, 0)

Mod = Callable[..., Any]
IN_TEST = 20
N, BLOCK = 23, 8
NAN, INF = float("nan"), float("inf")
MOST, LEAST = (getattr(torch.iinfo(torch.int64), x) for x in ("max", "min"))

_GENERATOR = torch.Generator().manual_seed(0)
CAPTURED = {
    "torch": torch,
    "ids": torch.arange(N) // 6,
    "float_ids": torch.tensor([0.5] * 7 + [NAN] * 3 + [1.5] * 6 + [INF] * 4 + [NAN, -0.0, 0.0]),
    "ends": torch.randint(0, N + 3, (N,), generator=_GENERATOR),
    "floats": torch.randn(N, generator=_GENERATOR) * 9,
    "valid": torch.rand(N, generator=_GENERATOR) < 0.8,
}
CAPTURED["ends"][::5], CAPTURED["ends"][3::5] = MOST, LEAST
CAPTURED["floats"][::6], CAPTURED["floats"][1::6], CAPTURED["floats"][2::6] = NAN, INF, 7.0
# Values of one kind, which take the place of {n} one after the other.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "int": (5, 17, -3, 0, 100, 1),
    "float": (4.5, 17.0, NAN, INF, -INF, -2.5, 0.1, 1e30),
    "bool": (True, False),
    "np.int64": (np.int64(5), np.int64(17)),
    "np.int32": (np.int32(9), np.int32(-1)),
    "np.float32": (np.float32(4.5), np.float32(NAN)),
    "np.float64": (np.float64(4.1), np.float64(11)),
    "0-dim": (torch.tensor(5), torch.tensor(17)),
    "0-dim int8": (torch.tensor(5, dtype=torch.int8), torch.tensor(-1, dtype=torch.int8)),
    "0-dim float": (torch.tensor(4.5), torch.tensor(NAN), torch.tensor(INF)),
    "0-dim float64": (torch.tensor(4.1, dtype=torch.float64),),
    "0-dim float16": (torch.tensor(4.1, dtype=torch.float16),),
    "1 element": (torch.tensor([5]), torch.tensor([17])),
    "1 element, float": (torch.tensor([4.5]), torch.tensor([NAN])),
}
PARTS = (
    *("{x} < {n}", "{x} <= {n}", "{x} > {n}", "{x} >= {n}", "{x} == {n}", "{x} != {n}"),
    *("{n} > {x}", "{n} >= {x}", "{n} < {x}", "{n} == {x}", "{x} + 1 < {n}", "3 - {x} <= {n}"),
    *("-{x} > -{n}", "{x} < {n} + 1", "{x} < {n} // 2", "2 * {x} < {n}", "{x}.float() <= {n}"),
    *("{x}.long() >= {n}", "~({x} >= {n})", "torch.minimum(q, k) < {n}", "{x}.clamp(min=3) < {n}"),
)
OPERANDS = ("q", "q", "k", "k", "(q - k)", "(k - q)", "(q - k).abs()", "(q + k)")
OTHERS = (
    *("q >= k", "k <= q + 3", "valid[k]", "ids[q] == ids[k]", "float_ids[q] == float_ids[k]"),
    *("q < ends[k]", "q <= ends[k]", "q - 2 > ends[k]", "q < floats[k]", "floats[k] <= q + 1"),
    *("(q - k).abs() < floats[k]", "q == floats[k]", "floats[q] < k", "float_ids[k] == 1.5"),
)


def make(text: str) -> Callable[[Any], Mod]:
    """The maker of a mask_mod by its number; after ` and_masks `, a function of its own."""
    for join in (" and_masks ", " or_masks "):
        if join in text:
            makers = [make(x) for x in text.split(join)]
            joined = and_masks if join == " and_masks " else or_masks
            return lambda n: joined(*(maker(n) for maker in makers))
    source = f"def make(n):\n    def drawn(b, h, q, k):\n        return {text}\n    return drawn\n"
    name = f"<mask {text}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    space: dict[str, Any] = dict(CAPTURED)
    exec(compile(source, name, "exec"), space)
    maker: Callable[[Any], Mod] = space["make"]
    return maker


def visible_of(mod: Mod, lq: int, lk: int) -> Tensor:
    """What torch says of each score by itself."""
    zero = torch.zeros((), dtype=torch.int32)
    q, k = (torch.arange(n, dtype=torch.int32) for n in (lq, lk))
    rows = [[bool(mod(zero, zero, q[i], k[j])) for j in range(lk)] for i in range(lq)]
    return torch.tensor(rows)


def check(mod: Mod, lq: int, lk: int, *, directly: bool = False) -> None:
    """Against attention in float64 with the dense mask. directly: also the mod by itself."""
    visible = visible_of(mod, lq, lk)
    mask = create_block_mask(lambda b, h, i, j: visible[i, j], 1, 1, lq, lk, "cpu", BLOCK)
    mask.mask_mod = mod
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, n, 8, dtype=torch.float64, generator=g) for n in (lq, lk, lk))
    wanted, _ = dense_attention(q, k, v, None, lambda *_: visible)
    outs = [flex_attention(q, k, v, block_mask=mask)]
    if directly:
        of_heads = (x.transpose(1, 2) for x in (q, k, v))
        outs.append(flash_attn_func(*of_heads, mask_mod=mod).transpose(1, 2))
    for out in outs:
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)


class Drawn(NamedTuple):
    text: str
    kind: str
    seqlens: tuple[int, int]


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    while True:
        kind = rng.choice(list(NUMBERS))
        parts = [
            rng.choice(PARTS).format(x=rng.choice(OPERANDS), n="n")
            if i == 0 or rng.random() < 0.6
            else rng.choice(OTHERS)
            for i in range(rng.choice((1, 1, 2, 2, 3)))
        ]
        join = rng.choice((" & ", " & ", " | ", " and_masks ", " or_masks "))
        text = join.join(f"({part})" for part in parts)
        if "and_masks" not in text and "or_masks" not in text and rng.random() < 0.1:
            text = f"~({text})"
        drawn = Drawn(text, kind, rng.choice(((N, N), (N, N), (15, N), (N, 15))))
        try:
            for n in NUMBERS[kind]:
                visible_of(make(text)(n), 1, 1)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            # torch itself has no answer: a bool is not subtracted, NaN is no integer
            continue
        return drawn


@pytest.mark.shares(12)
@pytest.mark.parametrize("first", range(DRAWN.seed, DRAWN.seed + DRAWN.most, IN_TEST))
def test_drawn_masks(first: int) -> None:
    for seed in range(first, first + IN_TEST):
        drawn = draw(seed)
        print(f"seed {seed}: {drawn}", flush=True)
        maker = make(drawn.text)
        for i, n in enumerate(NUMBERS[drawn.kind]):
            try:
                check(maker(n), *drawn.seqlens, directly=i == seed % 5)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {drawn}, n = {n!r}: {error}") from error


# -- forms ----------------------------------------------------------------------------------------

BOTH = "(q < n) & (k < n)"
INTERVALS = (
    *(BOTH, "q <= n", "q == n", "k == n", "q + 1 < n", "-q > -n", "n > q", "q + k < n"),
    *("(ids[q] == ids[k]) & (q < n)", "(q < n) and_masks (k < n)", "(q < n) or_masks (k < n)"),
    "(q < n) & (q >= k)",
)
WINDOWS: dict[str, Callable[[int], BandForm]] = {
    "q - k < n": lambda n: BandForm(n - 1, None),
    "k - q >= -n": lambda n: BandForm(n, None),
    "(q - k).abs() <= n": lambda n: BandForm(n, n),
    "(k - q < n) & (q >= k)": lambda n: BandForm(None, 0),
}
NEAR_5 = {
    "int": 5, "numpy": np.int64(5), "float": 5.0, "np.float32": np.float32(5),
    "0-dim": torch.tensor(5), "0-dim float": torch.tensor(5.0), "1 element": torch.tensor([5]),
}  # fmt: skip


@pytest.mark.shares(4)
@pytest.mark.parametrize("kind", NEAR_5)
@pytest.mark.parametrize("text", INTERVALS)
def test_bounds_become_intervals(text: str, kind: str) -> None:
    mod = make(text)(NEAR_5[kind])
    assert lower_mod(mod, "mask_mod").form.endswith("column intervals")
    check(mod, N, N)


@pytest.mark.shares(4)
@pytest.mark.parametrize("kind", ["int", "numpy", "float", "np.float32"])
@pytest.mark.parametrize("text", WINDOWS)
def test_bounds_of_distances_become_windows(text: str, kind: str) -> None:
    mod = make(text)(NEAR_5[kind])
    assert lower_mod(mod, "mask_mod").band == WINDOWS[text](5)
    check(mod, N, N)


@pytest.mark.parametrize(("number", "band"), [(4.5, 4), (5.0, 4), (-0.5, -1), (0.1, 0)])
def test_a_window_of_a_fraction(number: float, band: int) -> None:
    mod = make("q - k < n")(number)
    assert lower_mod(mod, "mask_mod").band == BandForm(band, None)
    check(mod, N, N)


@pytest.mark.shares(4)
@pytest.mark.parametrize("number", [NAN, INF, -INF, 2.0**24, 1e300])
@pytest.mark.parametrize("text", ["q - k < n", "q < n", "q >= n", "(q - k).abs() > n", BOTH])
def test_bounds_beyond_all_indices(text: str, number: float) -> None:
    check(make(text)(number), N, N, directly=True)


@pytest.mark.parametrize(
    "text",
    [
        # the sum overflows int32 and wraps
        *("q + 2147483640 >= k", "q + 2147483640 >= 0", "k < q - 2147483640 + (k - k)"),
        *("q <= ends[k]", "q - 1 < ends[k]", "ends[k] <= q + 7"),
        "q + (2147483640 + 0 * k) > k",
    ],
)
def test_what_overflows(text: str) -> None:
    check(make(text)(0), N, N, directly=True)


def test_a_number_that_becomes_infinite() -> None:
    """It is an unknown of the program by then, in whose arithmetic there is no NaN."""
    maker = make("q < n // 2")
    for number in (9.0, 17.0, 11.5, NAN, INF, -INF, 5.0):
        mod = maker(number)
        if number - number == 0:
            check(mod, N, N)
        else:
            assert lower_mod(mod, "mask_mod").form


# -- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_is_the_document_of_no_token(dtype: torch.dtype, causal: bool) -> None:
    """Not even the token itself sees it."""
    ids = CAPTURED["float_ids"].to(dtype)
    mod: Mod = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    if causal:
        mod = and_masks(mod, lambda b, h, q, k: q >= k)
    lowered = lower_mod(mod, "mask_mod")
    assert lowered.form == "documents, by column intervals"
    check(mod, N, N, directly=True)
    seen = visible_of(mod, N, N)
    assert not seen[7:10].any() and not seen[:, 7:10].any() and seen.diagonal().sum() == N - 4
