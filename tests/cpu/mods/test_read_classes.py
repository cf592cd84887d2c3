"""Classes of reads of aux tensors: by hand, near misses, and drawn ones against brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32, Int64
from drawn_share import Draws
from random_programs import READ_EXTENTS, READ_NUMBERS, READ_SIZE, RandomRead, ReadDraw
from read_claims import check_diagonals
from torch import Tensor

from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.lowering.pair import resolve_mods
from flash_mask_cute.mods.read_classes import Cut, ModReads, ReadClass
from flash_mask_cute.mods.traits import find_reads
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import dtype_name

DRAWN = Draws.of("READ", 25)


IDS = torch.zeros(100, dtype=torch.int32)


def reads_of(score_mod: Any, aux_tensors: Sequence[Tensor], wants: Sequence[int]) -> ModReads:
    aux = tuple((dtype_name(x.dtype), x.dim()) for x in aux_tensors)
    problem = AttentionProblem("bfloat16", 64, 64, score_mod=callable_key(score_mod), aux=aux)
    return find_reads(score_mod, problem, wants)


def class_of(score_mod: Any, *dims: int, wants: int = 0, ids: int = 1) -> str:
    """Of a CuTe mod with learned aux tensors of these dimensions, and a last one of numbers."""
    tables = [torch.zeros((8,) * n) for n in dims]
    numbers = torch.zeros((8,) * ids, dtype=torch.int32)
    return reads_of(score_mod, [*tables, numbers], range(len(dims))).tensors[wants].read_class.value


def adds(index: Callable[..., Any]) -> Any:
    """The mod that adds an element. index: of b, h, q, k and numbers."""
    return lambda score, b, h, q, k, aux: score + aux[0][index(b[0], h[0], q[0], k[0], aux[-1])]


@cute.jit
def _t5(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    distance = cutlass.max(q[0] - k[0], 0)
    far = 16.0 + 4.0 * cute.math.log2(Float32(cutlass.max(distance, 16)) / 16.0)
    bucket = cutlass.min(Int32(far), 31) if distance >= 16 else distance
    return score + aux[0][bucket, h[0]]


# What is expected, dimensions of the table, index.
INDICES: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "slope": ("head", 1, lambda b, h, q, k, ids: h),
    "group": ("head", 1, lambda b, h, q, k, ids: h // 4),
    "number": ("head", 2, lambda b, h, q, k, ids: (0, 3)),
    "role-of-entry": ("head", 2, lambda b, h, q, k, ids: (ids[b], h)),
    "key": ("key", 3, lambda b, h, q, k, ids: (b, h, k)),
    "packed-key": ("key", 2, lambda b, h, q, k, ids: (h, ids[b] + k)),
    "role-of-key": ("key", 2, lambda b, h, q, k, ids: (h, ids[k])),
    "key-twice": ("key", 2, lambda b, h, q, k, ids: (k, k)),
    "query": ("query", 2, lambda b, h, q, k, ids: (h, q)),
    "query-block": ("query", 2, lambda b, h, q, k, ids: (h, q // 64)),
    "distance": ("difference", 2, lambda b, h, q, k, ids: (h, q - k + 100)),
    "wide": ("difference", 1, lambda b, h, q, k, ids: Int64(q - k) + 100),
    "limited": ("difference", 1, lambda b, h, q, k, ids: cutlass.min(abs(q - k), 31)),
    "past": ("difference", 1, lambda b, h, q, k, ids: cutlass.select_(q >= k, q - k, 0)),
    "axial": ("difference", 1, lambda b, h, q, k, ids: q % 16 - k % 16 + 15),
    "swin": ("difference", 2,
             lambda b, h, q, k, ids: (h, (13 * (k // 7) + k % 7) - (13 * (q // 7) + q % 7) + 84)),
    "bucket-of-head": ("difference", 1, lambda b, h, q, k, ids: h * abs(q - k)),
    "blocks": ("difference", 1, lambda b, h, q, k, ids: q // 8 - k // 8 + 20),
    "pair": ("places", 3, lambda b, h, q, k, ids: (h, q, k)),
    "pair-transposed": ("places", 4, lambda b, h, q, k, ids: (b, k, q, h)),
    "one-pair": ("places", 3, lambda b, h, q, k, ids: (2, q, k)),
    # near misses
    "times": ("other", 1, lambda b, h, q, k, ids: q - k + q * k),
    "two-functions": ("other", 1, lambda b, h, q, k, ids: abs(q - k) + k),
    "two-differences": ("other", 1, lambda b, h, q, k, ids: abs(q - k) + abs(q - 2 * k)),
    "least": ("other", 1, lambda b, h, q, k, ids: cutlass.min(q, k)),
    "two-axes": ("other", 2, lambda b, h, q, k, ids: (q // 8 - k // 8 + 9, q % 8 - k % 8 + 9)),
    "positions-by-table": ("other", 1, lambda b, h, q, k, ids: ids[q] - ids[k] + 50),
    "divided-by-table": ("other", 1, lambda b, h, q, k, ids: q // ids[b] - k),
    "roles": ("other", 2, lambda b, h, q, k, ids: (ids[q], ids[k])),
    "graph": ("other", 1, lambda b, h, q, k, ids: ids[q * k]),
    "limited-pair": ("other", 3, lambda b, h, q, k, ids: (h, q, cutlass.min(k, 5))),
    "pair-of-blocks": ("other", 3, lambda b, h, q, k, ids: (h, q // 2, k)),
    "diagonals": ("other", 2, lambda b, h, q, k, ids: (q - k + 9, k)),
    "thread": ("other", 1, lambda b, h, q, k, ids: cute.arch.thread_idx()[0]),
    "narrow": ("other", 1, lambda b, h, q, k, ids: cutlass.Int8(q) - cutlass.Int8(k)),
    "huge": ("other", 1, lambda b, h, q, k, ids: q * q * q - k),
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_by_hand(name: str) -> None:
    expected, dims, index = INDICES[name]
    assert class_of(adds(index), dims) == expected


def test_which_differences_are_distances() -> None:
    """Those that are the same along a diagonal of scores."""

    def is_distance(name: str) -> bool:
        _, dims, index = INDICES[name]
        tables = [torch.zeros((8,) * dims), torch.zeros(8, dtype=torch.int32)]
        reads = reads_of(adds(index), tables, (0,)).tensors[0]
        return reads.is_diagonal and not reads.cuts

    differences = [name for name, (kind, *_) in INDICES.items() if kind == "difference"]
    found = {name for name in differences if is_distance(name)}
    assert found == {"distance", "wide", "limited", "past", "bucket-of-head"}
    assert not any(is_distance(name) for name in INDICES if name not in differences)


def test_between_which_cuts_elements_are_the_same_along_a_diagonal() -> None:
    def cuts_of(index: Callable[..., Any]) -> Any:
        reads = reads_of(adds(index), [torch.zeros(8), torch.zeros(8, dtype=torch.int32)], (0,))
        found = reads.tensors[0]
        assert found.read_class is ReadClass.DIFFERENCE
        return found.cuts if found.is_diagonal else None

    by_20 = (Cut(False, 20), Cut(True, 20))
    assert cuts_of(lambda b, h, q, k, ids: q // 20 - k // 20 + 5) == by_20
    assert cuts_of(lambda b, h, q, k, ids: (q - q // 20 * 20) - (k - k // 20 * 20) + 30) == by_20
    assert cuts_of(lambda b, h, q, k, ids: q // 20 - k + k // 20 + 20 - q) is None
    assert cuts_of(lambda b, h, q, k, ids: q - k // 32 + 20) is None
    assert cuts_of(lambda b, h, q, k, ids: q - k + 3 * (k // 32)) == (Cut(True, 32),)
    assert cuts_of(lambda b, h, q, k, ids: q - k + 3 * (k >> 5)) == (Cut(True, 32),)
    # too many, of other numbers, and by numbers that are not known
    assert cuts_of(lambda b, h, q, k, ids: q // 8 - k // 8 + 5) is None
    assert cuts_of(lambda b, h, q, k, ids: (q + 1) // 32 - k // 32 + 5) is None
    assert cuts_of(lambda b, h, q, k, ids: q - k + cutlass.min(k // 64, 9)) is None


def test_which_elements_one_score_reads() -> None:
    def read_once(*indices: Callable[..., Any], dims: int) -> bool:
        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
            for index in indices:
                score = score + aux[0][index(b[0], h[0], q[0], k[0])]
            return score

        reads = reads_of(score_mod, [torch.zeros((8,) * dims)], (0,))
        assert reads.multi_reader == (() if reads.tensors[0].read_once else (0,))
        return reads.tensors[0].read_once

    everything: Callable[..., Any] = lambda b, h, q, k: (b, k, q, h)  # noqa: E731

    def of_entry(index: Callable[..., Any]) -> bool:
        mod = adds(lambda b, h, q, k, ids: index(b, h, q, k))
        tables = [torch.zeros(8, 8, 8), torch.zeros(8, dtype=torch.int32)]
        return reads_of(mod, tables, (0,)).tensors[0].read_once_an_entry

    assert of_entry(lambda b, h, q, k: (k, q, h))
    assert not of_entry(lambda b, h, q, k: (b, q, k))
    assert not of_entry(lambda b, h, q, k: (0, q, k))
    assert read_once(everything, dims=4)
    assert not read_once(everything, everything, dims=4)
    assert not read_once(lambda b, h, q, k: (h, q, k), dims=3)
    assert not read_once(lambda b, h, q, k: (b, 0, q, k), dims=4)
    assert not read_once(lambda b, h, q, k: (b, h, q, k // 2), dims=4)


def test_values_that_look_alike_are_told_apart() -> None:
    """Numbers of a coordinate are no operands: rows 0 and 1 of a table are not the same."""
    assert (
        class_of(adds(lambda b, h, q, k, ids: (ids[0, k] - ids[1, k]) * q + k), 1, ids=2) == "other"
    )
    same = adds(lambda b, h, q, k, ids: (ids[1, k] - ids[1, k]) * q + k)
    assert class_of(same, 1, ids=2) == "key"


def test_under_control_flow() -> None:
    assert class_of(_t5, 2) == "difference"

    @cute.jit
    def near(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        bucket = q[0] - k[0] if q[0] >= k[0] else k[0]
        return score + aux[0][bucket]

    @cute.jit
    def loop(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        bucket = h[0]
        for i in cutlass.range(q[0]):
            bucket += aux[1][i]
        return score + aux[0][bucket]

    assert class_of(near, 1) == "other"
    assert class_of(loop, 1) == "other"


def test_reads_of_one_tensor() -> None:
    """They agree, or the class is other."""

    def two(first: Callable[..., Any], second: Callable[..., Any]) -> Any:
        def score_mod(score: Any, *rest: Any) -> Any:
            *place, aux = rest
            i, j = (f(*(x[0] for x in place)) for f in (first, second))
            return score + aux[0][i] * aux[0][j]

        return score_mod

    heads = two(lambda b, h, q, k: (h, 0), lambda b, h, q, k: (h, 1))
    assert class_of(heads, 2) == "head"
    opposite = two(lambda b, h, q, k: q - k + 9, lambda b, h, q, k: 2 * (k - q) + 9)
    assert class_of(opposite, 1) == "difference"
    for first, second, dims in (
        (lambda b, h, q, k: (h, 0), lambda b, h, q, k: (h, k), 2),
        (lambda b, h, q, k: q - k + 9, lambda b, h, q, k: q - 2 * k + 9, 1),
        (lambda b, h, q, k: (q, k), lambda b, h, q, k: (k, q), 2),
        (lambda b, h, q, k: (h, q - k), lambda b, h, q, k: (q, k), 2),
    ):
        assert class_of(two(first, second), dims) == "other"


def test_each_tensor_has_its_class() -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score * aux[0][h[0]] + aux[2][h[0], q[0] - k[0] + 8]

    tables = [torch.zeros(8), torch.zeros(8), torch.zeros(8, 16)]
    found = reads_of(score_mod, tables, [0, 1, 2])
    assert [x.read_class.value for x in found.tensors.values()] == ["head", "unread", "difference"]
    assert [x.needs_score for x in found.tensors.values()] == [True, False, False]
    assert not found.is_shift
    assert found.tensors[2].difference in ("kv_idx - q_idx", "q_idx - kv_idx")


def test_whether_a_derivative_needs_the_score() -> None:
    def shift(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score - aux[0][h[0]] * abs(q - k).to(Float32)

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return cute.math.tanh(score + aux[0][h[0]])

    table = [torch.zeros(8)]
    assert reads_of(shift, table, [0]).is_shift
    assert not reads_of(shift, table, [0]).tensors[0].needs_score
    assert not reads_of(capped, table, [0]).is_shift
    assert reads_of(capped, table, [0]).tensors[0].needs_score


def _pair_of(aux: Any, h: Any, q: Any, k: Any) -> Any:
    return Float32(aux[0][h[0], q[0], k[0]])


# Of a table by head, query and key; the other tensors are by head, and by batch entry.
SHARED: dict[str, Callable[..., Any]] = {
    "sum": lambda s, b, h, q, k, x: s + _pair_of(x, h, q, k),
    "sum, the score last": lambda s, b, h, q, k, x: _pair_of(x, h, q, k) + s,
    "difference": lambda s, b, h, q, k, x: s - _pair_of(x, h, q, k) * 0.5,
    "beside a slope": lambda s, b, h, q, k, x: (
        s + (_pair_of(x, h, q, k) - x[1][h[0]] * (q - k).to(Float32))
    ),
}
# of which several scores of a batch entry read an element
SHARED_BY_MANY: dict[str, Callable[..., Any]] = {
    "all heads": lambda s, b, h, q, k, x: s + x[0][0, q[0], k[0]],
    "two reads": lambda s, b, h, q, k, x: s + (_pair_of(x, h, q, k) + _pair_of(x, h, q, k)),
    "transposed, too": lambda s, b, h, q, k, x: s + (_pair_of(x, h, q, k) + _pair_of(x, h, k, q)),
}
NOT_SHARED: dict[str, Callable[..., Any]] = {
    # rounded twice, not once
    "two sums": lambda s, b, h, q, k, x: s + _pair_of(x, h, q, k) + x[1][h[0]],
    "by batch entry": lambda s, b, h, q, k, x: s + (_pair_of(x, h, q, k) + x[2][b[0]]),
    "an index by batch entry": lambda s, b, h, q, k, x: s + x[0][b[0], q[0], k[0]],
    "the negative score": lambda s, b, h, q, k, x: _pair_of(x, h, q, k) - s,
    "half of the score": lambda s, b, h, q, k, x: s * 0.5 + _pair_of(x, h, q, k),
    "the score twice": lambda s, b, h, q, k, x: s + (s + _pair_of(x, h, q, k)),
    "a gain": lambda s, b, h, q, k, x: s * _pair_of(x, h, q, k),
    "a cap": lambda s, b, h, q, k, x: cute.math.tanh(s + _pair_of(x, h, q, k)),
    "a factor": lambda s, b, h, q, k, x: s + _pair_of(x, h, q, k) * x[1][h[0]],
    "a function": lambda s, b, h, q, k, x: s + cute.math.exp2(_pair_of(x, h, q, k)),
}


@pytest.mark.parametrize("name", [*SHARED, *SHARED_BY_MANY, *NOT_SHARED])
def test_which_tables_all_batch_entries_share(name: str) -> None:
    mod = (SHARED | SHARED_BY_MANY | NOT_SHARED)[name]
    tables = [torch.zeros(8, 8, 8), torch.zeros(8), torch.zeros(8)]
    reads = reads_of(mod, tables, [0])
    assert reads.shared == (() if name in NOT_SHARED else (0,))
    assert reads.shared_once == ((0,) if name in SHARED else ())


def _many_steps(x: Any) -> Any:
    """Each of which uses the one before twice."""
    for _ in range(40):
        x = x * 0.5 + x * 0.25
    return x


def test_which_derivatives_are_finite_and_which_constant() -> None:
    """Where a score is hidden, anything else times a gradient of 0 might be NaN."""

    def factor_of(factor: Callable[..., Any] | None) -> tuple[float | None, bool]:
        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
            distance = abs(q - k).to(Float32)
            element = aux[0][h[0]]
            return score + (factor(distance, aux[1][k[0]]) * element if factor else element)

        (found,) = reads_of(score_mod, [torch.zeros(8), torch.zeros(8)], [0]).tensors.values()
        (told,) = found.factors
        return told.constant, told.is_finite

    assert factor_of(None) == (1.0, True)
    assert factor_of(lambda x, y: -0.5) == (-0.5, True)
    assert factor_of(lambda x, y: -x * x * 0.125) == (None, True)
    assert factor_of(lambda x, y: cute.where(x > 3.0, x - 1.0, 2.0)) == (None, True)
    assert factor_of(lambda x, y: _many_steps(x)) == (None, True)
    assert factor_of(lambda x, y: 1.0 / x) == (None, False)
    assert factor_of(lambda x, y: x * y) == (None, False)
    assert factor_of(lambda x, y: x * x * x * x * x) == (None, False)
    assert factor_of(lambda x, y: cute.math.exp(x)) == (None, False)
    assert factor_of(lambda x, y: float("inf")) == (None, False)


def test_a_mod_without_a_derivative_is_other_and_tells_why() -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score + Int32(aux[0][h[0]]).to(Float32)

    (found,) = reads_of(score_mod, [torch.zeros(8)], [0]).tensors.values()
    assert found.read_class.value == "other"
    assert "converts it to an integer" in found.why


# -- mods written in torch ----------------------------------------------------------------------

ONE, TWO, THREE = (torch.zeros((50,) * dims, requires_grad=True) for dims in (1, 2, 3))
TORCH_MODS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "slopes": ("head", lambda s, b, h, q, k: s - ONE[h] * (q - k).abs()),
    "key": ("key", lambda s, b, h, q, k: s + THREE[b, h, k]),
    "role": ("key", lambda s, b, h, q, k: s + TWO[h, IDS[k]]),
    "query": ("query", lambda s, b, h, q, k: s * (1 + TWO[h, q])),
    "distance": ("difference", lambda s, b, h, q, k: s + TWO[h, (q - k).clamp(-16, 16) + 16]),
    "blocks": ("difference", lambda s, b, h, q, k: s + TWO[h, (q // 3 - k // 3).clamp(-9, 9) + 9]),
    "buckets": (
        "difference",
        lambda s, b, h, q, k: s + ONE[((q - k).abs() + 1.0).log2().int() + 16 * (k > q).int()],
    ),
    "pair": ("places", lambda s, b, h, q, k: s + THREE[h, q, k]),
    "roles": ("other", lambda s, b, h, q, k: s + TWO[IDS[q], IDS[k]]),
    "positions": ("other", lambda s, b, h, q, k: s + ONE[(IDS[q] - IDS[k]).abs()]),
    "near": ("other", lambda s, b, h, q, k: s + ONE[(q - k + q * k).abs()]),
}  # fmt: skip


def class_of_torch(score_mod: Callable[..., Tensor]) -> str:
    mods = resolve_mods(score_mod, None, None, None)
    aux_tensors = mods.aux_tensors or []
    wants = [i for i, x in enumerate(aux_tensors) if x.requires_grad]
    (found,) = reads_of(mods.score_mod, aux_tensors, wants).tensors.values()
    return found.read_class.value


@pytest.mark.parametrize("name", TORCH_MODS)
def test_of_torch(name: str) -> None:
    expected, score_mod = TORCH_MODS[name]
    assert class_of_torch(score_mod) == expected


# -- drawn ones ---------------------------------------------------------------------------------


def check_drawn(seed: int) -> None:
    """The class that is expected, in both languages; and what it says holds for all scores."""
    drawn = ReadDraw(seed).read()
    numbers = torch.randint(
        0, 9, (READ_NUMBERS,), generator=torch.Generator().manual_seed(seed)
    ).int()
    table = torch.zeros(READ_SIZE, requires_grad=True)
    found = reads_of(drawn.cute, [table, numbers], [0]).tensors[0]
    told = f"seed {seed}: {found}, expected {drawn.name}"
    assert found.read_class.value == drawn.name, told
    assert class_of_torch(drawn.torch(table, numbers)) == drawn.name, told
    index = drawn.dense(numbers)
    if drawn.name in ("head", "key"):
        assert (index == index[:, :, :1]).all(), told
    if drawn.name in ("head", "query"):
        assert (index == index[..., :1]).all(), told
    if drawn.name == "difference":
        check_difference(found.difference, index, told)
    if found.is_diagonal:
        check_diagonals(found.cuts, drawn.dense(numbers, (2, 3, 50, 60)), told)


def check_difference(text: str, index: Tensor, told: str) -> None:
    """Scores of one head with the same difference have the same index."""
    rows, cols = READ_EXTENTS[2:]
    for of_head in index.flatten(0, 1):
        known: dict[int, int] = {}
        for q in range(rows):
            for k in range(cols):
                difference = eval(text, {"q_idx": q, "kv_idx": k})
                assert known.setdefault(difference, int(of_head[q, k])) == of_head[q, k], told


def test_drawn() -> None:
    for i in range(DRAWN.most):
        check_drawn(DRAWN.seed * 1000 + i)


def test_drawn_differences_with_cuts() -> None:
    """Of a grid with rows of 17."""
    side = 17
    for mod, expected in (
        (
            lambda q, k: (
                (q // side - k // side) * 3 + (q - q // side * side) + k // side * side - k
            ),
            2,
        ),
        (lambda q, k: abs(q - k + (k // side) * 2) + 1, 1),
    ):
        found = reads_of(
            adds(lambda b, h, q, k, ids, mod=mod: mod(q, k) + 60),
            [torch.zeros(8), torch.zeros(8, dtype=torch.int32)],
            (0,),
        ).tensors[0]
        place = torch.meshgrid(torch.arange(50), torch.arange(60), indexing="ij")
        assert found.is_diagonal and len(found.cuts) == expected
        check_diagonals(found.cuts, mod(*place)[None, None], str(found))


def test_draws_have_all_classes() -> None:
    names = {ReadDraw(seed).read().name for seed in range(200)}
    assert names == {"head", "key", "query", "difference", "other"}
    assert isinstance(ReadDraw(0).read(), RandomRead)
