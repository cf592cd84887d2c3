"""ATen operators in CuTe text: torch's values on the CPU, and refusals by name and line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch_values import by_cute, by_torch

from flash_mask_cute.flex import lower_mod, mod_source
from flash_mask_cute.mods.on_cpu import eval_score_mod

N = 24
SHAPE = (2, 2, N, N)
GENERATOR = torch.Generator().manual_seed(0)
SCORE = torch.randn(SHAPE, generator=GENERATOR) * 3
SCORE[..., 0, :4] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
BIAS = torch.randn(4, N, generator=GENERATOR)
IDS = torch.randint(0, 4, (2, N), generator=GENERATOR)
PAIRS = IDS.view(2, 12, 2)
TABLE = torch.randn(2, 1, N, N, generator=GENERATOR)
HALF = torch.randn(N, generator=GENERATOR).bfloat16()
DOUBLE = torch.randn(N, dtype=torch.float64, generator=GENERATOR)
BYTES = torch.randint(0, 200, (N,), dtype=torch.uint8, generator=GENERATOR)
LARGE = torch.randint(0, 2**32, (N,), dtype=torch.int64, generator=GENERATOR).to(torch.uint32)
SMALL = torch.randint(-100, 100, (N,), dtype=torch.int8, generator=GENERATOR)
FLAGS = torch.rand(N, generator=GENERATOR) > 0.5
ROWS = torch.randn(N, 8, generator=GENERATOR)
SEVEN = torch.tensor(7)
ORDER = ROWS[0].argsort()
NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)

# exact on the CPU: integers, comparisons and single operations of IEEE arithmetic
EXACT: dict[str, Callable[..., Tensor]] = {
    "not negative": lambda s, b, h, q, k: (
        s + q // 7 + k % 5 + torch.div(k, 3, rounding_mode="trunc") + torch.fmod(q, 6) + k % 8
    ),
    "not negative, of 64 bits": lambda s, b, h, q, k: s + (q.long() * 10**10 + k) // 3 % 1000,
    "division of an int8": lambda s, b, h, q, k: (
        s + (q * 9).to(torch.int8) // 3 + q.to(torch.int8) % 7
    ),
    "division of bytes as int8": lambda s, b, h, q, k: s + BYTES[k].to(torch.int8) // 3,
    "division of uint32 as int32": lambda s, b, h, q, k: s + LARGE[k].to(torch.int32) // 3,
    "division of int64 as int32": lambda s, b, h, q, k: s + (q.long() * 3000000000).int() // 7,
    "division below a size": lambda s, b, h, q, k: s + ((q - k).abs() + (-1)) // 2,
    "division below a comparison": lambda s, b, h, q, k: s + ((q > k).int() + (-1)) // 2,
    "division of a sum that overflows": lambda s, b, h, q, k: s + (q + 2147483645) // 5,
    "remainder of a hash": lambda s, b, h, q, k: s + (q * 73856093 + k * 19349663) % 100,
    "remainder of a hash of bits": lambda s, b, h, q, k: (
        s + ((q * 73856093) ^ (k * 19349663)) % 100
    ),
    "an index below a size": lambda s, b, h, q, k: s + ROWS[(q - k).abs() + (-1), 0],
    "remainder of the divisor's sign": lambda s, b, h, q, k: s + (q - k) % 3 + (q - k) % -5,
    "floor division": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) // -4,
    "division by what may be -1": lambda s, b, h, q, k: s + k // torch.where(q > 5, -1, q + 1),
    "truncated division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc"),
    "fmod": lambda s, b, h, q, k: s + torch.fmod(q - k, 3) + torch.fmod(s, 0.75),
    "float remainder": lambda s, b, h, q, k: s % 0.75 + s % -1.5,
    "float floor division": lambda s, b, h, q, k: s // 0.75,
    "true division of integers": lambda s, b, h, q, k: s + (q - k) / 3,
    "overflow wraps": lambda s, b, h, q, k: s + ((q - k) * 1000003 * 65537) % 1000,
    "shifts": lambda s, b, h, q, k: s + ((q - k) >> 2) + ((q - k) << 3) + ((q - k) >> (k % 7)),
    "shifts by too much": lambda s, b, h, q, k: s + ((q - k) << (q + 20)) + ((k - q) >> (q + 20)),
    "bits": lambda s, b, h, q, k: s + ((q & 5) | (k ^ 3)) + ~q,
    "bool as a number": lambda s, b, h, q, k: s * (q > k) + (q >= k).int() + (~(q > k)),
    "sum of bools is or": lambda s, b, h, q, k: torch.where((q > k) + (q < 3), s, 0.0),
    "choices": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "clamp, and NaN": lambda s, b, h, q, k: s.clamp(-1, 2) + torch.clamp_min(q - k, 0),
    "maximum, and NaN": lambda s, b, h, q, k: torch.maximum(s, k * 0.1) + torch.minimum(q, k),
    "relu, sign, abs": lambda s, b, h, q, k: torch.relu(s) + torch.sign(s) + (q - k).abs(),
    "rounding": lambda s, b, h, q, k: torch.round(s) + torch.floor(s) + torch.ceil(s) + s.trunc(),
    "nan and inf": lambda s, b, h, q, k: torch.where(s.isnan() | s.isinf(), 0.0, s),
    "logic": lambda s, b, h, q, k: torch.where(torch.logical_and(q, k - 3).logical_not(), s, 1.0),
    "square": lambda s, b, h, q, k: s**2 + (q - k) ** 3 + s**-1,
    "casts": lambda s, b, h, q, k: (q * 300).to(torch.int8) + s.nan_to_num(0, 0, 0).int() + s,
    "a read": lambda s, b, h, q, k: s + BIAS[h, k],
    "a negative index": lambda s, b, h, q, k: s + BIAS[h, q - k],
    "chained reads": lambda s, b, h, q, k: s + TABLE[b][0][q][k],
    "an index that wraps": lambda s, b, h, q, k: (
        s + ROWS[(q * 73856093 + k * 19349663) >> 28, 0] + ROWS[(q + 2147483640) >> 28, 1]
    ),
    "an index by a power": lambda s, b, h, q, k: s + ROWS[(q * q * q * q * q * q * q) >> 28, 0],
    "a read of a read": lambda s, b, h, q, k: s + BIAS[IDS[b, q], k],
    "views": lambda s, b, h, q, k: s + BIAS.T[k, h] + BIAS.view(-1)[q] + BIAS[:, 2:][h, q // 2],
    "bfloat16": lambda s, b, h, q, k: s + HALF[q] * HALF[k] + (HALF[q] + k),
    "float64": lambda s, b, h, q, k: torch.where(DOUBLE[k] > 0.1, s, s * DOUBLE[q]),
    "small integers": lambda s, b, h, q, k: s + SMALL[q] * SMALL[k] + BYTES[q] * 3 + BYTES[k],
    "bools": lambda s, b, h, q, k: torch.where(FLAGS[q] & ~FLAGS[k], s, s + FLAGS[q]),
    "a captured number": lambda s, b, h, q, k: s + (q - SEVEN) * (SEVEN + 1),
    "a tensor made inside": lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0, 4.0])[q % 3],
    "a tensor computed inside": lambda s, b, h, q, k: s + (BIAS * 2 + 1)[h, q],
    "any": lambda s, b, h, q, k: torch.where((PAIRS[b, q // 2] == k % 4).any(), s, 0.0),
    "a slice": lambda s, b, h, q, k: s + ROWS[q][2:5].amax() + ROWS[k].view(2, 4)[1].amin(),
    "of known places": lambda s, b, h, q, k: s + (h == torch.tensor([0, 3])).any(),
    "arange": lambda s, b, h, q, k: s + torch.arange(5)[q % 5],
    "a constant": lambda s, b, h, q, k: s + torch.full((), 3.0) + q.new_ones(()) + 2**4,
}  # fmt: skip
# within rounding: functions, and sums in another order
CLOSE: dict[str, Callable[..., Tensor]] = {
    "exponentials": lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.exp2(-(h + 1)) + s.expm1(),
    "logarithms": lambda s, b, h, q, k: torch.log1p(s.abs()) + torch.log2(k + 1) + (q + 1).log(),
    "tanh, sigmoid, silu": lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + s.sigmoid() + nnf.silu(s),
    "erf": lambda s, b, h, q, k: torch.erf(s) + torch.erf(s * 0.2),
    "gelu": lambda s, b, h, q, k: nnf.gelu(s.nan_to_num(0, 0, 0)),
    "gelu by tanh": lambda s, b, h, q, k: nnf.gelu(s.nan_to_num(0, 0, 0), approximate="tanh"),
    "sines": lambda s, b, h, q, k: torch.sin(q * 0.1) + torch.cos(k * 0.1) * s,
    "powers": lambda s, b, h, q, k: 2.0 ** (-h) + s.abs() ** 0.5 + s.abs() ** 1.7 + s**5,
    "dot": lambda s, b, h, q, k: s + torch.dot(ROWS[q], ROWS[k]) + ROWS[q] @ ROWS[k],
    "sum, mean": lambda s, b, h, q, k: s + ROWS[q].sum() + ROWS[k].mean() + ROWS[q][:2].prod(),
    "by decomposition": lambda s, b, h, q, k: nnf.softplus(s) + torch.logaddexp(s, k) + nnf.elu(s),
    "of two numbers": lambda s, b, h, q, k: (
        torch.atan2(s, k - 9) + torch.hypot(s, q * 0.5) + torch.copysign(s, k - 5.5)
    ),
    "of a number and a score": lambda s, b, h, q, k: (
        torch.copysign(torch.tensor(2.0), s)
        * (torch.atan2(torch.tensor(1.0), s) + torch.hypot(s, torch.tensor(3.0)))
    ),
    "asinh": lambda s, b, h, q, k: torch.asinh(s) + torch.asinh(s * 1e-4) + torch.asinh(s * 1e30),
    "softmax of a row": lambda s, b, h, q, k: s + ROWS[q].softmax(0)[3],
}


@pytest.mark.shares(8)
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_an_operator_has_torchs_value(name: str) -> None:
    mod = {**EXACT, **CLOSE}[name]
    wanted = by_torch(mod, SHAPE, SCORE).float()
    got = by_cute(lower_mod(mod, "score_mod"), SHAPE, SCORE)
    # EXACT ones may only differ where an fma joins a product and a sum
    limit = 1e-6 if name in EXACT else 4e-6
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit, equal_nan=True)


EDGES = {
    "one": torch.tensor([0.5]),
    "seven": torch.tensor([-5, -2, 0, 1, 3, 8, 13]),
    "equal ones": torch.tensor([-1.0, 0.0, 0.0, 0.0, 2.0, 2.0]),
    "63": torch.linspace(-9, 9, 63),
    "64": torch.linspace(-9, 9, 64),
    "float64": torch.linspace(-9, 9, 10, dtype=torch.float64),
}
LIBRARY: dict[str, Callable[..., Tensor]] = {
    "left": torch.bucketize,
    "right": lambda x, edges: torch.bucketize(x, edges, right=True, out_int32=True),
    "sorted": lambda x, edges: torch.searchsorted(edges, x),
    "sorted, right": lambda x, edges: torch.searchsorted(edges, x, side="right", out_int32=True),
}


@pytest.mark.shares(4)
@pytest.mark.parametrize("how", LIBRARY)
@pytest.mark.parametrize("edges", EDGES)
def test_bins_are_those_of_torch(edges: str, how: str) -> None:
    """Of scores, NaN among them, and of distances; of a captured tensor."""
    find, bounds = LIBRARY[how], EDGES[edges]

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 0.0 * h + find(s, bounds) + 100 * find(q - k, bounds)

    wanted = by_torch(mod, SHAPE, SCORE).float()
    assert torch.equal(by_cute(lower_mod(mod, "score_mod"), SHAPE, SCORE), wanted)


def test_bins_of_constant_edges_and_of_rows() -> None:
    rows = torch.stack((EDGES["64"][:9], EDGES["64"][9:18]))

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        constant = torch.bucketize(s, torch.tensor([0.0, 1.0, 2.0, 3.5]))
        return BIAS[h, constant] + torch.searchsorted(rows[b], s)

    wanted = by_torch(mod, SHAPE, SCORE).float()
    torch.testing.assert_close(by_cute(lower_mod(mod, "score_mod"), SHAPE, SCORE), wanted)


def test_a_mask_by_bins() -> None:
    bounds = EDGES["seven"]
    mod = lambda b, h, q, k: torch.bucketize(q - k, bounds) % 2 == b  # noqa: E731
    assert torch.equal(by_cute(lower_mod(mod, "mask_mod"), SHAPE, None), by_torch(mod, SHAPE, None))


def test_powers_of_0_and_of_tensors() -> None:
    """1 of every number, and of NaN."""
    mods: list[Callable[..., Tensor]] = [
        lambda s, b, h, q, k: s**0 + q**0 + k**0.0 + (q > k) ** 0 + (s * 2) ** -0.0,
        lambda s, b, h, q, k: torch.maximum(q**0, torch.tensor(1)) + (q**0).clamp(2, 5) + s,
        lambda s, b, h, q, k: s ** torch.tensor(0) + q ** torch.tensor(2) + torch.exp(s**0),
        lambda s, b, h, q, k: s + (torch.stack((q**0, q)) // 2).sum() + abs(-(k**0)),
        lambda s, b, h, q, k: s + torch.stack((q**0, q)).maximum(torch.tensor(2)).sum(),
    ]
    for mod in mods:
        wanted = by_torch(mod, SHAPE, SCORE).float()
        got = by_cute(lower_mod(mod, "score_mod"), SHAPE, SCORE)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    mod = lambda b, h, q, k: q**0 == 1  # noqa: E731
    assert by_cute(lower_mod(mod, "mask_mod"), SHAPE, None).all()


def test_erf_is_within_its_bound() -> None:
    """By float64, over all of its range and both sides of 1, where its halves meet."""
    x = torch.cat([torch.linspace(-5, 5, 4001), torch.tensor([1.0, -1.0, 0.0, 1e-20, 1e20])])
    lowered = lower_mod(lambda s, b, h, q, k: torch.erf(s), "score_mod")
    row, cols = torch.zeros(1, dtype=torch.int32), torch.arange(x.numel(), dtype=torch.int32)
    got = eval_score_mod(lowered.mod, x[None], None, 0, 0, row, cols)[0]
    assert (got.double() - torch.erf(x.double())).abs().max() < 2e-7


def test_what_is_not_used_is_not_read() -> None:
    """An index that a mask_mod takes makes its answer one for each head, or batch entry."""
    source = mod_source(lambda b, h, q, k: (q >= k) & (h >= -1) | True)
    assert source.splitlines()[1:] == ["    return True"]
    source = mod_source(lambda b, h, q, k: (q - k) * 0 + k <= q)
    assert "h_idx[0]" not in source and "b_idx[0]" not in source


def test_an_index_that_cannot_be_negative_is_not_wrapped() -> None:
    source = mod_source(lambda s, b, h, q, k: s + BIAS[h, (q - k).abs() % N] + BIAS[h, q // 2])
    assert "wrapped" not in source
    assert "wrapped" in mod_source(lambda s, b, h, q, k: s + BIAS[h, q - k])


def test_an_index_past_the_end_is_an_error() -> None:
    lowered = lower_mod(lambda s, b, h, q, k: s + BIAS[h, q + 1], "score_mod")
    with pytest.raises(IndexError, match=f"index {N} of dimension 1, whose extent is {N}"):
        by_cute(lowered, SHAPE, SCORE)
    with pytest.raises(IndexError, match="is empty"):
        lower_mod(lambda s, b, h, q, k: s + torch.zeros(4)[:0][q], "score_mod")


# -- refusals -------------------------------------------------------------------------------------


def _branch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if q >= k:
        return q == k
    return q > k


def _item(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return k < q.item()


def _and(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k and q - k < 5


def _write(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    s += 1
    return s


PYTHON_LIST = [0.0, 0.1, 0.2, 0.3]


def _nested(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + NESTED[0][q]


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (_branch, "decides by a value.*torch.where"),
        (lambda b, h, q, k: min(q, torch.tensor(5)) > k, "decides by a value.*torch.minimum"),
        (_item, "_local_scalar_dense.*takes a number out of a tensor"),
        (_and, "decides by a value.*& for `and`"),
        (lambda s, b, h, q, k: s + torch.rand(()), "aten.rand.*random numbers"),
        (_write, "aten.add_.*writes into a tensor"),
        (
            lambda s, b, h, q, k: s + torch.sort(ROWS[q])[0][0],
            "aten.sort.*gives several results: compute it before the call",
        ),
        (
            lambda s, b, h, q, k: torch.round(s, decimals=2),
            r"aten.round.*rounds to decimals: write torch.round.x",
        ),
        (
            lambda s, b, h, q, k: torch.nextafter(s, s + 1),
            "aten.nextafter.*no CuTe text: nothing replaces it: a score is rounded",
        ),
        (
            lambda s, b, h, q, k: torch.lgamma(s),
            "aten.lgamma.*no CuTe text: nothing replaces it for a score; for what takes few",
        ),
        (
            lambda s, b, h, q, k: torch.erfinv(s),
            "aten.erf_?inv.*no CuTe text: read a table: table = torch.linspace",
        ),
        (
            lambda s, b, h, q, k: torch.special.bessel_j0(s),
            "aten.*no CuTe text: nothing replaces it for a score; if it is not of scores",
        ),
        (
            lambda s, b, h, q, k: s + torch.zeros(4, 1000)[0].mul(q).sum(),
            "1000 elements.*at most 256",
        ),
        (lambda s, b, h, q, k: s + torch.from_numpy(q.numpy()), "leaves torch for numpy"),
        (
            lambda s, b, h, q, k: s + torch.bucketize(q, torch.arange(65)),
            "aten.bucketize.*searches 65 edges, and at most 64.*a table of the bins",
        ),
        (
            lambda s, b, h, q, k: s + torch.searchsorted(ROWS[:2], s.expand(2, 1)).sum(),
            "aten.searchsorted.*edges of 2 dimensions: index all but the last",
        ),
        (
            lambda s, b, h, q, k: s + torch.bucketize(s, ROWS[0] * s),
            "aten.bucketize.*edges that it computes for each score: capture them",
        ),
        (
            lambda s, b, h, q, k: s + torch.searchsorted(ROWS[0], s, sorter=ORDER),
            r"aten.searchsorted.*a sorter: pass edges\[sorter\]",
        ),
        (lambda s, b, h, q, k: s * math.exp(s), "makes a Python float of a tensor.*torch.exp"),
        (lambda s, b, h, q, k: s + PYTHON_LIST[h], "indexes a Python list.*capture a tensor"),
        (
            lambda b, h, q, k: q >= tuple(PYTHON_LIST)[b],
            "indexes a Python list or tuple.*capture a tensor",
        ),
        (
            lambda s, b, h, q, k: s + PYTHON_LIST[(q - k).clamp(0, 3)],
            "indexes a Python list.*capture a tensor",
        ),
    ],
)
def test_what_has_no_text_is_refused_by_name_and_line(mod: Callable[..., Any], says: str) -> None:
    kind = "mask_mod" if mod.__code__.co_argcount == 4 else "score_mod"
    line = mod.__code__.co_firstlineno + (mod.__name__ != "<lambda>")
    with pytest.raises(NotImplementedError, match=says) as caught:
        lower_mod(mod, kind)
    assert mod.__name__ in str(caught.value)
    assert f"test_flex_ops.py:{line}" in str(caught.value)


INVERSE = torch.linspace(-1, 1, 4097)[1:-1].erfinv()
# what refusals say, beside the operator itself, of x in (-1, 1)
INSTEAD: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "acosh": (torch.acosh, lambda x: torch.log(x + torch.sqrt(x * x - 1))),
    "atanh": (torch.atanh, lambda x: 0.5 * torch.log((1 + x) / (1 - x))),
    "erfc": (torch.erfc, lambda x: 1 - torch.erf(x)),
    "erfinv": (torch.erfinv, lambda x: INVERSE[((x + 1) * 2048).round().int().clamp(1, 4095) - 1]),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_a_refusal_says_to_write_runs(name: str) -> None:
    function, instead = INSTEAD[name]
    with pytest.raises(
        NotImplementedError, match=f"aten.{name.replace('inv', '_?inv')}.*no CuTe text"
    ):
        lower_mod(lambda s, b, h, q, k: function(s), "score_mod")
    scores = (SCORE.nan_to_num(0, 0, 0) / 12).clamp(-0.98, 0.98) + (2.0 if name == "acosh" else 0)
    lowered = lower_mod(lambda s, b, h, q, k: instead(s), "score_mod")
    found = by_cute(lowered, SHAPE, scores)
    # the table of erfinv has steps
    limit = 1e-2 if name == "erfinv" else 1e-5
    torch.testing.assert_close(found, function(scores), rtol=limit, atol=limit / 4)


def test_hypot_and_asinh_neither_overflow_nor_lose_small_numbers() -> None:
    x = torch.tensor([0.0, 1e-30, 3e-5, 0.7, 9999.0, 10001.0, 3e38, math.inf, math.nan])
    row, cols = torch.zeros(1, dtype=torch.int32), torch.arange(x.numel(), dtype=torch.int32)
    for function in (torch.asinh, lambda x: torch.hypot(x, x * 0.75), lambda x: torch.hypot(x, x)):
        lowered = lower_mod(lambda s, b, h, q, k, f=function: f(s), "score_mod")
        for sign in (1, -1):
            got = eval_score_mod(lowered.mod, sign * x[None], None, 0, 0, row, cols)[0]
            wanted = function(sign * x.double()).float()
            torch.testing.assert_close(got, wanted, rtol=4e-7, atol=0, equal_nan=True)


def test_a_nested_tensor_is_refused_by_name() -> None:
    line = inspect.getsourcelines(_nested)[1]
    says = f"global 'NESTED' of _nested.*test_flex_ops.py:{line}.*NestedTensor.*to_padded_tensor"
    with pytest.raises(NotImplementedError, match=says):
        lower_mod(_nested, "score_mod")


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "an item": lambda t: t.__setitem__(0, 5),
    "out": lambda t: torch.add(t, 1, out=t),
    "data": lambda t: t.data.fill_(2),
    "a view": lambda t: t.view(-1)[1:].mul_(3),
    "detached": lambda t: t.detach().zero_(),
    "copy_": lambda t: t.copy_(torch.ones(3)),
    "init": torch.nn.init.ones_,
    "in place": lambda t: torch.nn.functional.hardtanh(t, inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_refused_mod_has_written_nothing(name: str) -> None:
    captured, write = torch.full((3,), 7.0), WRITES[name]

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        write(captured)
        return s + captured[0]

    with pytest.raises(NotImplementedError, match="aten.*writes into a tensor"):
        lower_mod(mod, "score_mod")
    assert captured.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("mod", "kind", "says"),
    [
        (lambda b, h, q, k: q - k, "mask_mod", "returned torch.int32.*must return a bool"),
        (lambda s, b, h, q, k: q > k, "score_mod", "returned a bool.*torch.where"),
        (lambda b, h, q, k: None, "mask_mod", "returned None"),
        (lambda s, b, h, q, k: ROWS[q], "score_mod", r"shape \(8,\).*one value"),
    ],
)
def test_what_no_mod_returns_is_refused(mod: Callable[..., Any], kind: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        lower_mod(mod, kind)


def test_a_divisor_of_zero_is_refused() -> None:
    with pytest.raises(ZeroDivisionError):
        lower_mod(lambda s, b, h, q, k: s + q // 0, "score_mod")


def test_divisions_of_indices_need_no_signs() -> None:
    text = mod_source(lambda b, h, q, k: ((q // 16) // 4 == k // 64) & (k % 3 == 0))
    assert text.count("ops.nonneg_quotient") == 3 and text.count("ops.nonneg_remainder") == 1
    # of what may overflow, or is signed
    text = mod_source(lambda b, h, q, k: ((q * 9) // 4 == (k - q) // 64) & ((q + k) % 3 == 0))
    assert "nonneg" not in text
