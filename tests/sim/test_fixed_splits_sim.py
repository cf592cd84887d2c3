"""One row has one set of bits: sums cut at fixed keys. Three planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cutlass
import pytest
import torch
from cases import FP16, Case
from inputs import make_inputs
from oracle import reference_attention
from planned import forward_call, planned
from quiet_runs import quiet_run
from row_results import Results, distance_by, sees_some
from simulated_forward import run_sim
from split_cases import PACKED, RAGGED, SPLIT_CASES, SplitCase
from torch import Tensor

from flash_mask_cute.call import prepare
from flash_mask_cute.call.forward import compile_fwd
from flash_mask_cute.call.prepare import prepared_fwd
from flash_mask_cute.call.splits import CombinedForward
from flash_mask_cute.call.tiles.rows import FwdRow
from flash_mask_cute.core.fixed_splits import ONE_FIXED_SPLIT, PARALLEL_SPLITS, SEQUENTIAL_SPLITS
from flash_mask_cute.runtime.cache import CompileCache
from flash_mask_cute.runtime.target import Target
from flash_mask_cute.sm90 import flash_fwd

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SEQLEN, KEYS = 1100, 512
NAN = float("nan")
# of decoded rows: the keys of each, of which the last is the row's own
LENGTHS = (1100, 700, 513, 1, 512)
# a chunk that begins and ends anywhere, and rows that end with the first of a fixed split
CHUNKS = ((100, 333), (600, 1100), (1000, 1025))


def some_far(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    """Rows whose largest score is near 0, beside rows whose largest one is far from it."""
    return score + (q % 3).to(cutlass.Float32) * (-1e7)


ORACLE_CASES = (
    SplitCase(RAGGED),
    SplitCase(PACKED),
    SplitCase(Case("chunk-group7", 1, 150, 1100, 7, 1, causal=True, dtype=FP16), sms=3),
    *(x for x in SPLIT_CASES if x.id in ("window-shares7", "lists-shares7", "mask_mod-shares7")),
    SplitCase(Case("columns", 1, 700, 700, 1, 1, column="documents1", causal=True), sms=2),
    SplitCase(Case("score_mod", 1, 200, 700, 4, 2, score_mod="alibi", causal=True), sms=2),
)


class Rows(NamedTuple):
    """q (1, SEQLEN, heads, d), k and v of one sequence, and the options of every call."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @staticmethod
    def create(dims: tuple[int, int], group: int, seqlen: int = SEQLEN, **options: Any) -> Rows:
        generator = torch.Generator().manual_seed(dims[0] + group)
        q, k, v = (
            torch.randn(1, seqlen, heads, d, generator=generator).bfloat16()
            for heads, d in ((group, dims[0]), (1, dims[0]), (1, dims[1]))
        )
        if options.pop("has_sink", False):
            options["learnable_sink"] = torch.randn(group, generator=generator)
        return Rows(q, k, v, {"causal": True, "seqlen_k_per_split": KEYS} | options)

    def run(self, q: Tensor, k: Tensor, v: Tensor, sms: int = 2, **more: Any) -> Results:
        call = forward_call(q, k, v, **(self.options | more))
        plan = planned(call, Target("sm_90a", num_sms=sms))
        out, lse = prepared_fwd(plan)(call.tensors, call.masks)
        assert lse is not None
        return Results(out, lse, str(plan.problem.split))

    def whole(self, **more: Any) -> Results:
        return self.run(self.q, self.k, self.v, **more)

    def part(self, first: int, end: int, **more: Any) -> Results:
        """Some rows, over the keys up to the last one's."""
        q, k, v = self.q[:, first:end], self.k[:, :end], self.v[:, :end]
        return self.run(q, k, v, q_start="end", **more)

    def decoded(self, page_size: int | None = None, **more: Any) -> Results:
        """A row of each of several sequences, whose caches hold NaN behind their ends."""
        q = torch.stack([self.q[0, n - 1 : n] for n in LENGTHS])
        pools = []
        size = page_size or SEQLEN
        max_pages = -(-SEQLEN // size)
        order = torch.randperm(len(LENGTHS) * max_pages, generator=torch.Generator().manual_seed(1))
        table = order.view(len(LENGTHS), max_pages).int()
        for x in (self.k, self.v):
            pool = torch.full((table.numel(), size, *x.shape[2:]), NAN, dtype=x.dtype)
            for pages, n in zip(table.tolist(), LENGTHS, strict=True):
                for i, page in enumerate(pages):
                    rows = x[0, i * size : min((i + 1) * size, n)]
                    pool[page, : len(rows)] = rows
            pools.append(pool if page_size else pool[table[:, 0].long()])
        if page_size:
            more["page_table"] = table
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        return self.run(q, *pools, seqused_k=lengths, q_start="end", **more)


def unlike(whole: Results, rows: Rows, **of_decoding: Any) -> list[str]:
    """The ways to compute rows whose bits differ from those of the whole forward."""
    parts = {f"rows {a}:{b}": (whole.rows(a, b), rows.part(a, b)) for a, b in CHUNKS}
    for name, more in (("alone", {"sms": 1}), ("on 7 SMs", {"sms": 7}), *of_decoding.items()):
        found = rows.decoded(**more)
        for i, n in enumerate(LENGTHS):
            parts[f"{n} keys {name}"] = whole.rows(n - 1, n), found.entry(i)
    return [name for name, (a, b) in parts.items() if not a.has_bits_of(b)]


CASES: dict[str, Callable[[], Rows]] = {
    "d64": lambda: Rows.create((64, 64), 1),
    "d64-window-group3": lambda: Rows.create((64, 64), 3, window_size_left=200),
    "d64-far": lambda: Rows.create((64, 64), 2, score_mod=some_far),
    "d128-window-sink-group8": lambda: Rows.create(
        (128, 128), 8, window_size_left=700, has_sink=True
    ),
    "d128-mask_mod": lambda: Rows.create((128, 128), 1, mask_mod=sees_some, causal=False),
    "d128-score_mod": lambda: Rows.create((128, 128), 2, score_mod=distance_by(0.01)),
    "d192": lambda: Rows.create((192, 128), 1, softcap=9.0),
    "d256-group3": lambda: Rows.create((256, 256), 3, has_sink=True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_one_set_of_bits(simulator: ModuleType, case: str) -> None:
    rows = CASES[case]()
    with quiet_run(simulator):
        # without positions a mod counts from row 0, as with 0
        whole = rows.whole()
        assert whole.kind == SEQUENTIAL_SPLITS
        assert not unlike(whole, rows, pages_of_16={"page_size": 16})
    mods = {"mask_mod", "score_mod"} & rows.options.keys()
    if not mods:
        options = {k: v for k, v in rows.options.items() if k != "seqlen_k_per_split"}
        want, want_lse = reference_attention(rows.q, rows.k, rows.v, None, **options)
        torch.testing.assert_close(whole.out.double(), want.double(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(whole.lse.double(), want_lse.double(), atol=1e-4, rtol=1e-5)


def test_pages_of_one_key_and_one_segment(simulator: ModuleType) -> None:
    rows = Rows.create((64, 64), 1)
    with quiet_run(simulator):
        whole = rows.whole(seqlen_k_per_split=2048)
        assert whole.kind == ONE_FIXED_SPLIT
        one = rows._replace(options=rows.options | {"seqlen_k_per_split": 2048})
        assert not unlike(whole, one, pages_of_1={"page_size": 1})
        # the largest score of a row, and LSE in training, come from fixed splits in sequence
        largest = torch.empty(1, 1, SEQLEN)
        turned = rows.whole(max_scores=largest)
        again = torch.empty(1, 1, SEQLEN)
        rows.whole(max_scores=again, seqlen_k_per_split=2048)
    assert torch.equal(largest, again)
    assert not turned.has_bits_of(whole), "cuts are in the bits"


def test_an_output_in_float32_is_that_before_rounding(simulator: ModuleType) -> None:
    rows = Rows.create((64, 64), 1)
    wide = torch.empty(1, 25, 1, 64)
    with quiet_run(simulator):
        whole, part = rows.whole(), rows.part(1000, 1025)
        found = rows.run(rows.q[:, 1000:1025], rows.k[:, :1025], rows.v[:, :1025], out=wide)
    assert found.kind == PARALLEL_SPLITS and part.has_bits_of(whole.rows(1000, 1025))
    assert torch.equal(wide.bfloat16(), part.out) and torch.equal(found.lse, part.lse)


@pytest.mark.parametrize("split", ORACLE_CASES, ids=lambda split: split.case.id)
def test_against_oracle(simulator: ModuleType, split: SplitCase) -> None:
    """Every form of lengths and masks, in fixed splits by each way that their shapes choose."""
    inputs = make_inputs(split.case)
    run_sim(simulator, inputs, (1,), sms=split.sms, seqlen_k_per_split=KEYS)


# -- planted faults ------------------------------------------------------------------------------


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_anew = partial(compile_fwd, cache=CompileCache(tmp_path))
    monkeypatch.setattr(prepare, "compile_fwd", compile_anew)


def _uncut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rings = flash_fwd.scheduler_rings

    def first(*arguments: Any, **keywords: Any) -> Any:
        return rings(*arguments, **(keywords | {"uncut_first": True}))

    monkeypatch.setattr(flash_fwd, "scheduler_rings", first)


def _last_split_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = CombinedForward.__call__

    def backwards(self: CombinedForward, partials: tuple[Any, ...], *others: Any) -> None:
        out, lse, *rest = partials
        reduce(self, (out.flip(0), lse.flip(0), *rest), *others)

    monkeypatch.setattr(CombinedForward, "__call__", backwards)


def test_a_planted_order_of_blocks_is_found(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, compiled_anew: None
) -> None:
    rows = Rows.create((64, 64), 1)
    with quiet_run(simulator):
        with monkeypatch.context() as planted:
            # of one kernel; others of which only the end of the keys cuts blocks would hang
            _uncut_first(planted)
            whole = rows.whole()
        assert unlike(whole, rows)


def test_planted_tiles_are_found(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, compiled_anew: None
) -> None:
    """Of a score_mod, rows of prefill then have tiles of 96 keys, and those of decoding of 128."""
    rows = Rows.create((64, 64), 1, score_mod=distance_by(0.01))
    monkeypatch.setattr(FwdRow, "is_general", True)
    with quiet_run(simulator):
        assert unlike(rows.whole(), rows)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_planted_order_of_segments_is_found(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """Seven fixed splits of 64 rows, reduced by a CTA in turn, and by another launch."""
    rows = Rows.create((64, 64), 2, seqlen=3300)
    if is_planted:
        _last_split_first(monkeypatch)
    with quiet_run(simulator):
        turned = rows.part(3269, 3300, max_scores=torch.empty(1, 2, 31))
        reduced = rows.part(3269, 3300)
    assert (turned.kind, reduced.kind) == (SEQUENTIAL_SPLITS, PARALLEL_SPLITS)
    assert turned.has_bits_of(reduced) != is_planted
