"""Which reads by differences tables answer, and how large the tables are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Uint32
from planned import backward_call, forward_call, planned
from random_programs import READ_EXTENTS, READ_NUMBERS, READ_SIZE, ReadDraw
from test_read_classes import DRAWN, adds, reads_of
from torch import Tensor

from flash_mask_cute.call.problem import AttentionProblem
from flash_mask_cute.call.tables import MARGIN, DifferenceTables, values_of
from flash_mask_cute.mods.read_classes import DifferenceRead, ReadClass
from flash_mask_cute.mods.traits import difference_reads
from flash_mask_cute.runtime.callable_key import callable_key
from flash_mask_cute.runtime.dtypes import dtype_name
from flash_mask_cute.runtime.target import Target

HOPPER = Target("sm_90a", num_sms=132)
Index = Callable[..., Any]


def found_in(score_mod: Any, *tensors: Tensor) -> tuple[DifferenceRead, ...]:
    aux = tuple((dtype_name(x.dtype), x.dim()) for x in tensors)
    problem = AttentionProblem("bfloat16", 64, 64, score_mod=callable_key(score_mod), aux=aux)
    return difference_reads(score_mod, problem)


def terms_of(read: DifferenceRead) -> set[tuple[bool, int, int | None]]:
    return {(x.is_key, x.factor, x.divisor) for x in read.terms}


def distance(q: Any, k: Any) -> Any:
    return cutlass.max(cutlass.min(q - k, 31), 0)


@cute.jit
def in_a_branch(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    found = Float32(0.0)
    if q[0] >= k[0]:
        found = aux[0][distance(q[0], k[0])]
    return score + found


IDS = torch.zeros(8, dtype=torch.int32)
PLAIN = {(True, 1, 1), (False, -1, 1)}
# Dimensions of the table, index, terms up to their common sign, whether by batch entry, by head.
TABLES: dict[str, tuple[int, Index, set[Any], tuple[bool, bool]]] = {
    "clipped": (1, lambda b, h, q, k, ids: distance(q, k), PLAIN, (False, False)),
    "of-head": (2, lambda b, h, q, k, ids: (h, distance(q, k)), PLAIN, (False, True)),
    "of-entry": (2, lambda b, h, q, k, ids: (ids[b], distance(q, k)), PLAIN, (True, False)),
    "table-of-table": (1, lambda b, h, q, k, ids: ids[distance(q, k)], PLAIN, (False, False)),
    "chosen": (1, lambda b, h, q, k, ids: cutlass.select_(q >= k, q - k, 0), PLAIN,
               (False, False)),
    "blocks": (1, lambda b, h, q, k, ids: abs(q // 8 - k // 8), {(True, 1, 8), (False, -1, 8)},
               (False, False)),
    "blocks-of-blocks": (1, lambda b, h, q, k, ids: abs(q // 8 // 2 - k // 8 // 2),
                         {(True, 1, 16), (False, -1, 16)}, (False, False)),
    "columns": (1, lambda b, h, q, k, ids: abs(q % 8 - k % 8), {(True, 1, None), (False, -1, None)},
                (False, False)),
    "doubled": (1, lambda b, h, q, k, ids: abs(2 * q - 2 * k), PLAIN, (False, False)),
}  # fmt: skip
# near misses, with the class of the read
NO_TABLES: dict[str, tuple[int, Index, ReadClass]] = {
    "key": (1, lambda b, h, q, k, ids: cutlass.min(k, 5), ReadClass.KEY),
    "separately": (2, lambda b, h, q, k, ids: (distance(q, k), k), ReadClass.OTHER),
    "positions-by-table": (1, lambda b, h, q, k, ids: abs(ids[q] - ids[k]), ReadClass.OTHER),
    "product": (1, lambda b, h, q, k, ids: abs(q - k + q * k), ReadClass.OTHER),
    # no term could take the place of the difference
    "no-unit": (1, lambda b, h, q, k, ids: abs(2 * q - 3 * k), ReadClass.DIFFERENCE),
    # with other terms of the same difference the comparison is another
    "unsigned": (1, lambda b, h, q, k, ids: cutlass.select_(Uint32(q) < Uint32(k), q - k, 0),
                 ReadClass.DIFFERENCE),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    dims, index, terms, by_entry_and_head = TABLES[name]
    (read,) = (x for x in found_in(adds(index), torch.zeros((8,) * dims), IDS) if x.tensor == 0)
    opposite = {(is_key, -factor, divisor) for is_key, factor, divisor in terms}
    assert terms_of(read) in (terms, opposite)
    assert (read.by_batch, read.by_head) == by_entry_and_head
    assert read.is_computed


@pytest.mark.parametrize("name", NO_TABLES)
def test_near_misses(name: str) -> None:
    dims, index, read_class = NO_TABLES[name]
    tensors = torch.zeros((8,) * dims), IDS
    assert reads_of(adds(index), tensors, (0,)).tensors[0].read_class is read_class
    assert not [x for x in found_in(adds(index), *tensors) if x.tensor == 0]


def test_no_table_under_a_condition() -> None:
    """The element may not exist where it is not read."""
    assert found_in(in_a_branch, torch.zeros(32)) == ()


def test_no_table_for_a_slice() -> None:
    def sliced(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        return score + aux[0][h[0], None][distance(q[0], k[0])]

    assert found_in(sliced, torch.zeros(4, 32)) == ()


def test_sums_alone_are_not_computed() -> None:
    reads = found_in(adds(lambda b, h, q, k, ids: q - k + 100), torch.zeros(200), IDS)
    assert [x.is_computed for x in reads] == [False]


def test_reads_are_counted_in_the_order_of_the_mod() -> None:
    def two(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        near, other = aux[1][distance(q[0], k[0])], aux[0][k[0]]
        return score + near + other + aux[1][abs(q[0] - k[0])]

    reads = found_in(two, torch.zeros(300), torch.zeros(300))
    assert [(x.number, x.tensor) for x in reads] == [(0, 1), (2, 1)]


@pytest.mark.parametrize("number", range(DRAWN.most))
def test_drawn_reads_with_one_difference_have_one_index(number: int) -> None:
    """For each batch entry and head, where the read says that it depends on these."""
    seed = DRAWN.seed * 1000 + number
    drawn = ReadDraw(seed).read()
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 30, (READ_NUMBERS,), generator=generator, dtype=torch.int32)
    table = torch.zeros(READ_SIZE)
    reads = [x for x in found_in(drawn.cute, table, numbers) if x.tensor == 0]
    if drawn.name != "difference":
        assert reads == []
        return
    batch, heads, seqlen_q, seqlen_k = READ_EXTENTS
    index = drawn.dense(numbers)
    for read in reads:
        if any(term.divisor is None for term in read.terms):
            continue
        # outer sum of what follows from queries and from keys
        of_q, of_k = (
            values_of([x for x in read.terms if x.is_key == is_key], length)
            for is_key, length in ((False, seqlen_q), (True, seqlen_k))
        )
        difference = of_q[:, None] + of_k
        for b in range(batch):
            for h in range(heads):
                own = index[b if read.by_batch else 0, h if read.by_head else 0]
                assert torch.equal(index[b, h], own)
                for value in difference.unique():
                    assert own[difference == value].unique().numel() == 1


# -- sizes --------------------------------------------------------------------------------------


def tables_of(score_mod: Any, table: Tensor, *dims: int, **more: Any) -> DifferenceTables | None:
    """dims: batch, queries, keys, heads."""
    batch, seqlen_q, seqlen_k, heads = dims
    element = torch.empty(1, dtype=torch.bfloat16)
    q = element.expand(batch, seqlen_q, heads, 64)
    k = element.expand(batch, seqlen_k, heads, 64)
    call = forward_call(q, k, k, score_mod=score_mod, aux_tensors=[table], **more)
    return planned(call, HOPPER).tables


def of_blocks(size: int) -> Any:
    return adds(lambda b, h, q, k, ids: (h, abs(q // size - k // size)))


TABLE = torch.zeros(4, 4096)


def test_the_range_follows_from_lengths() -> None:
    plain = adds(lambda b, h, q, k, ids: (h, distance(q, k)))
    found = tables_of(plain, TABLE, 4, 700, 900, 4)
    assert found is not None
    assert found.shapes == ((1, 4, 2 * (899 + MARGIN) + 1),)
    found = tables_of(of_blocks(30), TABLE, 4, 700, 900, 4)
    assert found is not None
    assert found.shapes == ((1, 4, 2 * (29 + MARGIN) + 1),)
    assert found.num_bytes == 4 * 4 * (2 * (29 + MARGIN) + 1)


def test_the_range_of_a_remainder_is_that_of_its_values() -> None:
    """Not the sum of the ranges of x and of 30 * (x // 30)."""

    def cols(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
        return h, abs((q - q // 30 * 30) - (k - k // 30 * 30))

    found = tables_of(adds(cols), TABLE, 4, 700, 900, 4)
    assert found is not None
    assert found.shapes == ((1, 4, 2 * (29 + MARGIN) + 1),)


def test_packed_sequences_may_be_as_long_as_all_together() -> None:
    lengths = torch.tensor([0, 700, 2800], dtype=torch.int32)
    element = torch.empty(1, dtype=torch.bfloat16)
    q = element.expand(2800, 4, 64)
    call = forward_call(
        q, q, q, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=2100, max_seqlen_k=2100,
        score_mod=of_blocks(1), aux_tensors=[TABLE],
    )  # fmt: skip
    found = planned(call, HOPPER).tables
    assert found is not None
    assert found.shapes == ((1, 4, 2 * (2799 + MARGIN) + 1),)


@pytest.mark.parametrize(
    ("dims", "more"),
    [((1, 1, 4096, 4), {}), ((1, 300, 300, 4), {}), ((4, 700, 900, 4), {"q_start": 3})],
    ids=["decoding", "small", "q_start"],
)
def test_no_tables(dims: tuple[int, ...], more: dict[str, Any]) -> None:
    assert tables_of(of_blocks(4), TABLE, *dims, **more) is None


def test_no_tables_without_elements() -> None:
    assert tables_of(of_blocks(4), torch.zeros(4, 0), 4, 700, 900, 4) is None


def test_other_kernels_are_as_they_were() -> None:
    """The problem of a call without tables has no trace of them."""
    q = torch.empty(1, dtype=torch.bfloat16).expand(4, 700, 4, 64)
    call = forward_call(
        q, q, q, score_mod=adds(lambda b, h, q, k, ids: (h, k)), aux_tensors=[TABLE]
    )
    plan = planned(call, HOPPER)
    assert plan.tables is None
    assert plan.problem.tables == plan.problem.summed == ()


# -- sums by difference -------------------------------------------------------------------------


def summed_in(
    index: Index,
    *,
    factor: Any = 1.0,
    n: int = 700,
    d: int = 64,
    arch: Target = HOPPER,
    **more: Any,
) -> list[tuple[int, str]]:
    """Sizes of the sums of a learned table, and who makes them. more: keywords of the backward."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        scale = factor(score) if callable(factor) else factor
        return score + scale * aux[0][index(b[0], h[0], q[0], k[0], None)]

    x = torch.empty(1, dtype=torch.bfloat16).expand(4, n, 4, d)
    lse = torch.empty(1).expand(4, 4, n)
    more |= {"score_mod": score_mod, "aux_tensors": [TABLE], "daux": [TABLE]}
    plan = planned(backward_call(x, x, x, x, x, lse, **more), arch)
    told = [(x.read.number, x.size, x.by.value) for x in summed_of(plan)]
    assert plan.problem.summed == tuple(told)
    return [x[1:] for x in told]


def summed_of(plan: Any) -> tuple[Any, ...]:
    return () if plan.tables is None else plan.tables.summed


def rows_of_grid(size: int) -> Index:
    return lambda b, h, q, k, ids: (h, q // size - k // size + 100)


def in_window(size: int, of_rows: int) -> Index:
    """The distance in columns, and `of_rows` times that in rows."""

    def index(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
        rows = q // size - k // size
        cols = (q - q // size * size) - (k - k // size * size)
        return h, rows * of_rows + cols + 200

    return index


def test_sums_within_rectangles() -> None:
    """By MMA warps and mask warps in turn."""
    for index in (rows_of_grid(30), in_window(30, 0)):
        for factor in (1.0, -0.5):
            assert summed_in(index, factor=factor) == [(256, "turns")]
    # as many rows as take more
    assert summed_in(rows_of_grid(16), n=2500) == [(512, "turns")]


def test_who_sums_within_rectangles() -> None:
    """Mask warps have dS, without gradients behind a soft cap; some have room there alone."""
    assert summed_in(rows_of_grid(30), softcap=20.0) == [(256, "lines")]
    assert summed_in(in_window(180, 0), n=32760, d=128) == [(512, "masks")]
    assert summed_in(rows_of_grid(30), n=13000, d=128) == [(1024, "masks")]
    assert summed_in(rows_of_grid(30), n=13000, d=128, softcap=20.0) == []
    # where warpgroups sum dQ in turn, MMA warps do not
    assert summed_in(rows_of_grid(30), d=80) == [(256, "masks")]
    assert summed_in(rows_of_grid(30), d=80, softcap=20.0) == []
    assert summed_in(in_window(7, 13), n=600, d=80) == []


def test_sums_score_by_score() -> None:
    assert summed_in(in_window(7, 13), n=600) == [(2304, "scores")]
    assert summed_in(in_window(7, 13), n=600, factor=-0.5) == [(2304, "scores")]


@pytest.mark.parametrize(
    ("index", "more"),
    [
        (in_window(7, 0), {}),
        (rows_of_grid(8), {}),
        (lambda b, h, q, k, ids: (h, q - k + 900), {}),
        (in_window(7, 13), {"factor": lambda score: score}),
        (rows_of_grid(30), {"factor": lambda score: score}),
        (in_window(7, 13), {"n": 3000, "d": 128}),
        (rows_of_grid(30), {"arch": Target("sm_100a", num_sms=132)}),
    ],
    ids=[
        *("columns-of-keys-in-common", "rows-of-keys-in-common", "plain-distance"),
        *("times-the-score", "times-the-score-between-cuts", "no-room", "blackwell"),
    ],
)
def test_no_sums_by_difference(index: Index, more: dict[str, Any]) -> None:
    assert summed_in(index, **more) == []
