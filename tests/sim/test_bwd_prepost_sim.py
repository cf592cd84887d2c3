"""The kernels around the backward's main one, on the software GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from einops import rearrange
from quiet_runs import quiet_run
from torch import Tensor

HEADS = 2
# The first run lets warps take turns, the others shuffle them.
DELAY_SEEDS = (None, 1, 2)
NAN = float("nan")
INF = float("inf")


def tile_cols(head_dim: int, tile_m: int) -> int:
    if tile_m == 64:
        return next(cols for cols in (32, 64, 128, 192, 256) if cols >= head_dim)
    return -(-head_dim // 16) * 16


class Sequences(NamedTuple):
    """What lies in the tensors of a launch."""

    slots: tuple[int, ...]
    """Rows of each sequence; all the same unless packed."""
    used: tuple[int, ...] | None = None
    """How many of them are in use; None: all."""
    is_packed: bool = False
    tail: int = 0
    """Rows of packed tensors that no sequence has."""

    @property
    def rows(self) -> int:
        return sum(self.slots) + self.tail if self.is_packed else self.slots[0]

    def num_blocks(self, tile_m: int) -> int:
        from flash_mask_cute.core.row_blocks import num_row_blocks

        return num_row_blocks(self.rows, len(self.slots), self.is_packed, tile_m)

    def extents(self) -> tuple[int, ...]:
        """Of a tensor, before its heads."""
        return (self.rows,) if self.is_packed else (len(self.slots), self.rows)

    def of(self, tensor: Tensor, b: int) -> Tensor:
        """The rows of sequence b; a view."""
        if not self.is_packed:
            return tensor[b]
        start = sum(self.slots[:b])
        return tensor[start : start + self.slots[b]]

    def used_of(self, b: int) -> int:
        return self.slots[b] if self.used is None else self.used[b]

    def blocks(self, tile_m: int) -> Iterator[tuple[int, int, slice]]:
        """(row block, sequence, rows in the sequence), by the numbering that is agreed upon."""
        for b, slot in enumerate(self.slots):
            if self.is_packed:
                first = sum(self.slots[:b]) // tile_m + b
            else:
                first = b * -(-self.rows // tile_m)
            for i in range(-(-slot // tile_m)):
                yield first + i, b, slice(i * tile_m, min((i + 1) * tile_m, slot))

    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, *self.slots]).cumsum(0).int() if self.is_packed else None

    def seqused(self) -> Tensor | None:
        return None if self.used is None else torch.tensor(self.used).int()


DENSE = Sequences((150, 150), used=(150, 70))
PACKED = Sequences((64, 0, 129, 0, 1, 100), (64, 0, 65, 0, 0, 99), is_packed=True, tail=9)
# a block longer than its sequences, the first of which has no row in use; blocks that are all full
LONE = Sequences((5,) * 3, used=(0, 5, 3))
EXACT = Sequences((128,))
# more than a warp looks at together, the first and last ones empty
MANY = Sequences((0, 0, *((1, 0, 3, 66) * 16), 0), is_packed=True)


def by_heads(x: Tensor) -> Tensor:
    """The same values, heads before rows in memory."""
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def with_gaps(x: Tensor) -> Tensor:
    """The same values, with something between rows."""
    gapped = torch.full((*x.shape[:-1], x.shape[-1] + 8), NAN, dtype=x.dtype)
    gapped[..., : x.shape[-1]] = x
    return gapped[..., : x.shape[-1]]


def run(simulator: ModuleType, function: Any, outputs: list[Tensor], *args: Any) -> Iterator[None]:
    """Runs once for each seed; look at the outputs after each."""
    for seed in DELAY_SEEDS:
        for output in outputs:
            output.fill_(NAN if output.is_floating_point() else -1)
        with quiet_run(simulator, seed, launches=1):
            function(*args)
        yield


class Fakes:
    """Stand-ins for tensors, by what kernels may know about them."""

    @staticmethod
    def rows(dtype: str, rank: int, dim: int) -> Any:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_tensor

        shape: Any = (*(cute.sym_int() for _ in range(rank - 1)), dim)
        strides: Any = (*(cute.sym_int64(divisibility=8) for _ in range(rank - 1)), 1)
        return make_fake_tensor(getattr(cutlass, dtype), shape, strides, assumed_align=16)

    @staticmethod
    def strided(dtype: str, rank: int) -> Any:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_tensor

        shape: Any = tuple(cute.sym_int() for _ in range(rank))
        strides: Any = tuple(cute.sym_int64() for _ in range(rank))
        numeric = getattr(cutlass, dtype)
        return make_fake_tensor(numeric, shape, strides, assumed_align=numeric.width // 8)

    @staticmethod
    def scratch(*inner: int) -> Any:
        """fp32 (heads, row blocks, *inner)"""
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor

        shape: Any = (cute.sym_int(), cute.sym_int(), *inner)
        order = tuple(reversed(range(len(shape))))
        align = 16 if inner else 4
        return make_fake_compact_tensor(
            cutlass.Float32, shape, stride_order=order, assumed_align=align
        )


def compile_for_sim(kernel: Any, *args: Any) -> Any:
    import cutlass.cute as cute

    return cute.compile(kernel, *args, options="--enable-tvm-ffi --gpu-arch sm_90a")


def fake_stream() -> Any:
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


CUTLASS_NAMES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class Extras(NamedTuple):
    is_packed: bool
    has_used: bool
    has_dlse: bool
    sink_dtype: torch.dtype | None
    clears: bool
    marked_dim: int | None
    any_size: bool


@lru_cache
def preprocess_of(dtype: torch.dtype, head_dim_v: int, tile_m: int, extras: Extras) -> Any:
    import cutlass

    from flash_mask_cute.kernels.bwd_preprocess import BwdPreprocess

    name = CUTLASS_NAMES[dtype]
    rank = 3 if extras.is_packed else 4
    sink = None
    if extras.sink_dtype is not None:
        sink = Fakes.strided(CUTLASS_NAMES.get(extras.sink_dtype, "Float32"), 1)
    return compile_for_sim(
        BwdPreprocess(getattr(cutlass, name), head_dim_v, tile_m, extras.any_size),
        Fakes.rows(name, rank, head_dim_v),
        Fakes.rows(name, rank, head_dim_v),
        Fakes.strided("Float32", rank - 1),
        Fakes.strided("Float32", rank - 1) if extras.has_dlse else None,
        Fakes.scratch(stats_words(tile_m, 2 + extras.any_size, extras.marked_dim is not None)),
        Fakes.scratch(tile_m * tile_cols(head_dim_v, tile_m)) if extras.clears else None,
        None if extras.clears else Fakes.strided("Int32", 2),
        sink,
        None if sink is None else Fakes.scratch(),
        fake_stream(),
        Fakes.strided("Int32", 1) if extras.is_packed else None,
        Fakes.strided("Int32", 1) if extras.has_used else None,
        None if extras.marked_dim is None else Fakes.rows(name, rank, extras.marked_dim),
        Fakes.strided("Float32", rank - 1) if extras.any_size else None,
    )


def stats_words(tile_m: int, num_stats: int, has_marks: bool) -> int:
    """By the layout that is agreed upon: marks in pieces of 16 bytes."""
    return num_stats * tile_m + (has_marks * -(-tile_m // 128) * 4)


class GivenRows(NamedTuple):
    """What the preprocess reads of each row: (..., heads, head_dim_v) or (..., heads)."""

    o: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor
    low: Tensor


def expected_statistics(
    seqs: Sequences, tile_m: int, given: GivenRows, sink: Tensor, any_size: bool
) -> tuple[Tensor, Tensor]:
    """Statistics (heads, blocks, 2 or 3, tile_m) and parts of dsink (heads, blocks) in float64."""
    blocks = seqs.num_blocks(tile_m)
    expected = torch.zeros(HEADS, blocks, 2 + any_size, tile_m, dtype=torch.float64)
    expected[:, :, 0] = INF
    parts = torch.zeros(HEADS, blocks, dtype=torch.float64)
    for block, b, rows in seqs.blocks(tile_m):
        rows = slice(rows.start, min(rows.stop, seqs.used_of(b)))
        if rows.start >= rows.stop:
            continue
        o, do, lse, dlse, low = (seqs.of(x, b)[rows].double() for x in given)
        reference = torch.where((lse.abs() >= 1024) & lse.isfinite(), lse, 0.0)
        delta = torch.where(lse == -INF, 0.0, (o * do).sum(-1) - dlse)
        kept = torch.where(lse == -INF, INF, lse)
        if any_size:
            kept = (kept - reference) + low
            expected[:, block, 2, : delta.shape[0]] = reference.mT
        expected[:, block, 0, : delta.shape[0]] = kept.mT / math.log(2)
        expected[:, block, 1, : delta.shape[0]] = delta.mT
        parts[:, block] = -((sink.double() - kept).exp() * delta).sum(0)
    return expected, parts


def spoil_rows_that_see_nothing(
    seqs: Sequences, tile_m: int, q: Tensor, do: Tensor, lse: Tensor
) -> Tensor:
    """Writes into q and do; which (heads, blocks, tile_m) are to be marked."""
    hostile = torch.zeros(HEADS, seqs.num_blocks(tile_m), tile_m, dtype=torch.bool)
    for block, b, rows in seqs.blocks(tile_m):
        for row in range(rows.start, min(rows.stop, seqs.used_of(b))):
            if row % 14 == 3:
                seqs.of(do, b)[row] = 1.0
            if row % 5 == 3:
                seqs.of(q, b)[row, :, 0] = NAN
            q_, do_, lse_ = (seqs.of(x, b)[row] for x in (q, do, lse))
            is_finite = q_.isfinite().all(-1) & do_.isfinite().all(-1)
            hostile[:, block, row - rows.start] = (lse_ == -INF) & ~is_finite
    return hostile


def check_preprocess(
    simulator: ModuleType,
    seqs: Sequences,
    head_dim_v: int,
    tile_m: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_dlse: bool = True,
    sink_dtype: torch.dtype | None = torch.float32,
    arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    clears: bool = False,
    marked_dim: int | None = None,
    any_size: bool = False,
) -> None:
    """clears: the sums of dQ, not the words that say who has added to them. marked_dim: columns of
    Q, where rows are marked. any_size: LSE of all sizes, of which half of a unit was lost."""
    generator = torch.Generator().manual_seed(head_dim_v + tile_m)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    o, do = (draw(*seqs.extents(), HEADS, head_dim_v).to(dtype) for _ in range(2))
    lse, dlse = (draw(*seqs.extents(), HEADS) for _ in range(2))
    if not has_dlse:
        dlse.zero_()
    sink = torch.full((HEADS,), -INF) if sink_dtype is None else draw(HEADS).to(sink_dtype)
    low = torch.zeros_like(lse)
    if any_size:
        sizes = torch.tensor([1.0, -2000.0, 1e30, 900.0, -1e30])
        lse *= sizes[torch.arange(lse.numel()) % 5].view(lse.shape)
        low.fill_(0.5)
        # so that each sink is no more than LSE
        sink.fill_(-INF)
    for b in range(len(seqs.slots)):
        # hidden rows, whose gradients must not matter
        for x, value in ((lse, -INF), (do, INF), (dlse, NAN if has_dlse else 0.0)):
            seqs.of(x, b)[3::7] = value
        for x in (o, do, lse, low):
            seqs.of(x, b)[seqs.used_of(b) :] = NAN
    blocks = seqs.num_blocks(tile_m)
    num_stats = 2 + any_size
    stats = torch.empty(HEADS, blocks, stats_words(tile_m, num_stats, marked_dim is not None))
    zeroed = torch.empty(HEADS, blocks, dtype=torch.int32)
    if clears:
        zeroed = torch.empty(HEADS, blocks, tile_m * tile_cols(head_dim_v, tile_m))
    parts = torch.empty(HEADS, blocks)

    expected, expected_parts = expected_statistics(
        seqs, tile_m, GivenRows(o, do, lse, dlse, low), sink, any_size
    )
    of_sequences = [block for block, _, _ in seqs.blocks(tile_m)]
    q, hostile = None, torch.zeros(0)
    if marked_dim is not None:
        q = draw(*seqs.extents(), HEADS, marked_dim).to(dtype)
        hostile = spoil_rows_that_see_nothing(seqs, tile_m, q, do, lse)

    flags = has_dlse, sink_dtype, clears, marked_dim, any_size
    extras = Extras(seqs.is_packed, seqs.used is not None, *flags)
    for _ in run(
        simulator,
        preprocess_of(dtype, head_dim_v, tile_m, extras),
        [stats, zeroed, parts],
        arrange(o),
        arrange(do),
        # (..., heads, rows)
        lse.transpose(-1, -2).contiguous(),
        # any strides: here heads are next to each other
        dlse.transpose(-1, -2) if has_dlse else None,
        stats,
        zeroed if clears else None,
        None if clears else zeroed,
        None if sink_dtype is None else sink,
        None if sink_dtype is None else parts,
        seqs.cu_seqlens(),
        seqs.seqused(),
        q,
        low.transpose(-1, -2) if any_size else None,
    ):
        close: dict[str, Any] = {"check_dtype": False, "rtol": 1e-5, "atol": 1e-4}
        found = stats[..., : num_stats * tile_m].unflatten(2, (num_stats, tile_m))
        torch.testing.assert_close(found[:, of_sequences], expected[:, of_sequences], **close)
        if marked_dim is not None:
            words = stats[..., num_stats * tile_m :].contiguous().view(torch.int32)
            bits = (words[..., None] >> torch.arange(32)) & 1
            marks = bits.flatten(2)[..., :tile_m].bool()
            assert torch.equal(marks[:, of_sequences], hostile[:, of_sequences])
            assert hostile.any() and not hostile.all()
        assert (zeroed == 0).all()
        if sink_dtype is not None:
            torch.testing.assert_close(
                parts, expected_parts, check_dtype=False, rtol=1e-5, atol=1e-3
            )


@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("head_dim_v", [64, 72, 128, 256])
def test_preprocess(simulator: ModuleType, head_dim_v: int, tile_m: int, seqs: Sequences) -> None:
    # sums of one form or the other in half of the cases
    check_preprocess(simulator, seqs, head_dim_v, tile_m, clears=(tile_m == 128) == (seqs is DENSE))


@pytest.mark.parametrize("arrange", [by_heads, with_gaps])
@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
def test_preprocess_strides(
    simulator: ModuleType, seqs: Sequences, arrange: Callable[[Tensor], Tensor]
) -> None:
    check_preprocess(simulator, seqs, 64, 64, dtype=torch.float16, arrange=arrange)


@pytest.mark.parametrize("seqs", [LONE, EXACT, PACKED._replace(used=None)])
def test_preprocess_without_extras(simulator: ModuleType, seqs: Sequences) -> None:
    check_preprocess(simulator, seqs, 40, 64, has_dlse=False, sink_dtype=None)


@pytest.mark.parametrize(
    ("seqs", "marked_dim", "tile_m", "sink_dtype"),
    [(DENSE, 64, 64, None), (PACKED, 200, 128, None), (PACKED, 40, 80, torch.float32)],
)
def test_preprocess_marks_rows_that_see_nothing(
    simulator: ModuleType,
    seqs: Sequences,
    marked_dim: int,
    tile_m: int,
    sink_dtype: torch.dtype | None,
) -> None:
    """Those of which Q or dO are not finite, in blocks without any and beyond sequences, too."""
    more: dict[str, Any] = {"sink_dtype": sink_dtype, "marked_dim": marked_dim}
    check_preprocess(simulator, seqs, 72, tile_m, **more)


def test_preprocess_marks_rows_that_see_a_sink(simulator: ModuleType) -> None:
    """LSE is that of the sink, nearly, and O is 0: what is not finite in such a row, dlse included,
    marks it, and dO reaches no sum. Of rows that see something, nothing does."""
    rows, dim, tile_m = 64, 72, 64
    generator = torch.Generator().manual_seed(0)
    o, do, q = (torch.randn(1, rows, HEADS, dim, generator=generator).bfloat16() for _ in range(3))
    lse, dlse = (torch.randn(1, HEADS, rows, generator=generator) for _ in range(2))
    sink = torch.tensor([9.0, -5.0])
    alone, small = torch.arange(rows) % 4 == 1, torch.arange(rows) % 4 == 2
    lse[..., alone | small] = sink[:, None] * (1 + 2.0**-21)
    o[:, alone] = 0.0
    hostile = alone & (torch.arange(rows) % 3 > 0)
    do[:, hostile], q[:, 5], dlse[..., 9] = INF, NAN, NAN
    hostile[[5, 9]] = True
    do[:, small] = INF
    stats = torch.empty(HEADS, 1, stats_words(tile_m, 2, True))
    semaphores, parts = torch.empty(HEADS, 1, dtype=torch.int32), torch.empty(HEADS, 1)
    function = preprocess_of(
        torch.bfloat16, dim, tile_m, Extras(False, False, True, torch.float32, False, dim, False)
    )
    given = (o, do, lse, dlse, stats, None, semaphores, sink, parts, None, None, q)
    for _ in run(simulator, function, [stats, semaphores, parts], *given):
        words = stats[..., 2 * tile_m :].contiguous().view(torch.int32)[:, 0, :2]
        marks = ((words[..., None] >> torch.arange(32)) & 1).flatten(1).bool()
        assert torch.equal(marks, hostile.expand_as(marks))
        delta = stats[:, 0, tile_m : 2 * tile_m]
        assert (delta[:, hostile] == 0).all() and not delta[:, small].isfinite().any()
        finite = alone & ~hostile
        torch.testing.assert_close(delta[:, finite], -dlse[0][:, finite])


@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_m", [64, 128])
def test_preprocess_of_any_size(simulator: ModuleType, tile_m: int, seqs: Sequences) -> None:
    """An LSE far from 0 is a reference, and only what rounding has taken from it is LSE."""
    check_preprocess(simulator, seqs, 64, tile_m, any_size=True)


def test_preprocess_many_sequences(simulator: ModuleType) -> None:
    check_preprocess(simulator, MANY, 8, 64, sink_dtype=torch.bfloat16)


@lru_cache
def postprocess_of(
    dtype: torch.dtype, head_dim: int, tile_m: int, is_packed: bool, has_used: bool, order: str
) -> Any:
    import cutlass

    from flash_mask_cute.kernels.bwd_postprocess import BwdPostprocess

    name = CUTLASS_NAMES[dtype]
    accum_cols = cols_of(head_dim, tile_m, order)
    return compile_for_sim(
        BwdPostprocess(getattr(cutlass, name), head_dim, tile_m, accum_cols, order),
        Fakes.scratch(tile_m * accum_cols),
        Fakes.strided("Int32", 2),
        Fakes.rows(name, 3 if is_packed else 4, head_dim),
        cutlass.Float32(1.0),
        fake_stream(),
        Fakes.strided("Int32", 1) if is_packed else None,
        Fakes.strided("Int32", 1) if has_used else None,
    )


def cols_of(head_dim: int, tile_m: int, order: str) -> int:
    """Columns of the tile, of Hopper or, by lanes, of Blackwell."""
    if order == "lanes":
        return next(cols for cols in (64, 96, 128, 192, 256) if cols >= head_dim)
    return tile_cols(head_dim, tile_m)


def in_lane_order(sums: Tensor) -> Tensor:
    """As `in_accumulator_order`."""
    return rearrange(sums, "h block row (quad col) -> h block (quad row col)", col=4)


def in_accumulator_order(sums: Tensor) -> Tensor:
    """(heads, row blocks, tile_m * cols) of sums (heads, row blocks, tile_m, cols)."""
    tile_m, cols = sums.shape[2:]
    widths = {32: (16,), 64: (32,), 128: (64,), 192: (64, 32), 256: (64, 64)}
    parts, first = [], 0
    for n in widths[cols] if tile_m == 64 else (cols,):
        w, warp, g, lane, e = torch.meshgrid(
            *(torch.arange(size) for size in (2, 4, n // 8, 32, 4)), indexing="ij"
        )
        t = warp * 32 + lane
        row = t // 32 * 16 + t % 32 // 4 + 8 * (e // 2)
        col = 8 * g + 2 * (t % 4) + e % 2
        if tile_m == 64:
            col = col + first + w * n
        else:
            row = row + 64 * w
        parts.append(sums[:, :, row, col].flatten(2))
        first += 2 * n
    return torch.cat(parts, 2)


def check_postprocess(
    simulator: ModuleType,
    seqs: Sequences,
    head_dim: int,
    tile_m: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    order: str = "accumulators",
) -> None:
    generator = torch.Generator().manual_seed(head_dim + tile_m)
    blocks = seqs.num_blocks(tile_m)
    cols = cols_of(head_dim, tile_m, order)
    # NaN wherever nothing may be taken from
    sums = torch.full((HEADS, blocks, tile_m, cols), NAN)
    # whoever came last; row blocks that nobody has written sums of are 0
    semaphores = torch.arange(HEADS * blocks, dtype=torch.int32).view(HEADS, blocks) % 3
    scale = 0.3
    dq = arrange(torch.empty(*seqs.extents(), HEADS, head_dim, dtype=dtype))
    expected = torch.full(dq.shape, NAN, dtype=torch.float64)
    for block, b, rows in seqs.blocks(tile_m):
        used = max(0, min(rows.stop, seqs.used_of(b)) - rows.start)
        drawn = torch.randn(HEADS, used, head_dim, generator=generator)
        drawn[semaphores[:, block] == 0] = 0.0
        sums[semaphores[:, block] > 0, block, :used, :head_dim] = drawn[semaphores[:, block] > 0]
        slot = seqs.of(expected, b)[rows]
        slot[:] = 0.0
        slot[:used] = drawn.double().transpose(0, 1) * scale
    accum = (in_lane_order if order == "lanes" else in_accumulator_order)(sums)

    has_used = seqs.used is not None
    function = postprocess_of(dtype, head_dim, tile_m, seqs.is_packed, has_used, order)
    lengths = (seqs.cu_seqlens(), seqs.seqused())
    for _ in run(simulator, function, [dq], accum, semaphores, dq, scale, *lengths):
        torch.testing.assert_close(
            dq,
            expected,
            check_dtype=False,
            equal_nan=True,
            # half a unit in the last place, and the product's own rounding
            rtol=torch.finfo(dtype).eps / 2 * 1.01,
            atol=1e-7,
        )


@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_postprocess(simulator: ModuleType, head_dim: int, tile_m: int, seqs: Sequences) -> None:
    check_postprocess(simulator, seqs, head_dim, tile_m)


@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("head_dim", "tile_m"),
    [(8, 128), (64, 128), (72, 128), (128, 128), (40, 64), (136, 64), (192, 64), (256, 64)],
)
def test_postprocess_by_lanes(
    simulator: ModuleType, head_dim: int, tile_m: int, seqs: Sequences
) -> None:
    check_postprocess(simulator, seqs, head_dim, tile_m, order="lanes")


@pytest.mark.parametrize("arrange", [by_heads, with_gaps])
@pytest.mark.parametrize("seqs", [DENSE, PACKED], ids=["dense", "packed"])
def test_postprocess_strides(
    simulator: ModuleType, seqs: Sequences, arrange: Callable[[Tensor], Tensor]
) -> None:
    check_postprocess(simulator, seqs, 64, 64, dtype=torch.float16, arrange=arrange)


@pytest.mark.parametrize("seqs", [LONE, EXACT, PACKED._replace(used=None), MANY])
def test_postprocess_lengths(simulator: ModuleType, seqs: Sequences) -> None:
    check_postprocess(simulator, seqs, 8, 64)


@pytest.mark.parametrize(("tail", "heads", "head_dim"), [(0, 3, 64), (9, 3, 72), (150, 2, 2048)])
def test_zero_padding(simulator: ModuleType, tail: int, heads: int, head_dim: int) -> None:
    """More rows than CTAs, and rows of more vectors than threads."""
    from flash_mask_cute.kernels.zero_padding import ZeroPadding

    rows = (Fakes.rows("BFloat16", 3, head_dim) for _ in range(2))
    starts = (Fakes.strided("Int32", 1) for _ in range(2))
    function = compile_for_sim(ZeroPadding(), next(rows), None, next(rows), *starts, fake_stream())
    dq, dv = (torch.empty(n + tail, heads, head_dim, dtype=torch.bfloat16) for n in (6, 4))
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 6, 6], [0, 1, 4]))
    for _ in run(simulator, function, [dq, dv], dq, None, dv, of_q, of_k):
        for gradient, end in ((dq, 6), (dv, 4)):
            assert gradient[:end].isnan().all() and (gradient[end:] == 0).all()


def test_a_grid_of_many_blocks_of_sums(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All dimensions of a grid but the first one end at 65535."""
    from flash_mask_cute.call.build_backward import ADD_PARTS_NAME, PartFacts, build_add_parts
    from flash_mask_cute.runtime.compiler import CACHE, by_facts
    from flash_mask_cute.runtime.target import Target

    blocks, dims, launches = 65536, (8, 8), []
    facts = PartFacts("bfloat16", *dims, 16, 16, True, False, 64, "rows")
    target = Target.named("sm_90a")
    function = by_facts(ADD_PARTS_NAME, facts, build_add_parts, target, CACHE).function
    monkeypatch.setattr(simulator, "simulate", lambda found, *_, **__: launches.extend(found))
    # memory that nobody touches
    sums = [torch.empty(2, blocks, 64 * 16) for _ in dims]
    gradients = [torch.empty(64, 1, dim, dtype=torch.bfloat16) for dim in dims]
    function(*sums, *gradients, torch.zeros(blocks, dtype=torch.int32), None)
    simulator.RESULTS.clear()
    assert [x.grid for x in launches] == [(2 * blocks, 1, 1)]
