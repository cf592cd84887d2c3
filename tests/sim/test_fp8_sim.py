"""Keys and values in fp8 on the software GPU: the bits of a call over the same numbers in 16."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ACTIVE_ARCH
from cutlass import Int32
from drawn_selections import draw_selection
from fp8_caches import Fp8Case, assert_same_bits, make_call
from planned import forward_call
from quiet_runs import quiet_run
from simulated_forward import run_on_simulator
from slow_roles import SEED, with_each_role_slow
from split_cases import take_chunks
from torch import Tensor

from flash_mask_cute import SelectedBlocks, builders
from flash_mask_cute.call.append import Append, append, check_append
from flash_mask_cute.runtime.target import Target
from flash_mask_cute.utils import scalar_to_ssa

ARCH = "sm_90a"
assert ACTIVE_ARCH


SINK = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, -1.0, 2.0, 1.5])
BAND = {"causal": True, "window_size_left": 150, "learnable_sink": SINK, "softcap": 20.0}
INT32 = {"dtype": torch.int32}
# of 64 rows, as those of keys in fp8
SMALL = {"config": {"tile_m": 64}}
CASES = (
    Fp8Case("one query"),
    Fp8Case("without scales", 64, scales=("none", "none")),
    Fp8Case("fp16 without scales", 64, scales=("none", "none"), dtype=torch.float16),
    Fp8Case("fp16", 64, seqlen_q=2, scales=("expanded", "head"), dtype=torch.float16,
            keywords=BAND),
    Fp8Case("hard", 64, seqlen_q=3, scales=("token", "head"), page_size=16, is_hard=True),
    Fp8Case("hard in fp16", page_size=1, scales=("head", "token"), dtype=torch.float16,
            is_hard=True),
    Fp8Case("shares", 64, lengths=(700, 90, 0), capacity=720, scales=("token", "token")),
    Fp8Case("shares of pages", lengths=(650, 520), capacity=704, page_size=64, seqlen_q=4,
            scales=("token", "token"), keywords={"causal": True}),
    Fp8Case("splits", lengths=(650, 20), capacity=704, page_size=16, scales=("token", "head"),
            keywords={"num_splits": 3}),
    Fp8Case("pages of one", 96, page_size=1, scales=("head", "token")),
    # whose rows three warps copy
    Fp8Case("narrow pages of one", 64, page_size=1, seqlen_q=3, scales=("head", "none"),
            keywords={"causal": True, "window_size_left": 150}),
    Fp8Case("pages of seven", 80, page_size=7, seqlen_q=3, scales=("token", "token"),
            keywords=BAND),
    Fp8Case(
        "padding",
        64,
        page_size=16,
        lengths=(40, 60, 200),
        used=(150, 0, 31),
        scales=("token", "token"),
        keywords={
            "kv_batch_idx": torch.tensor([2, 0, 1], **INT32),
            "leftpad_k": torch.tensor([3, 0, 17], **INT32),
        },
    ),
    Fp8Case("wide pages", 192, 128, seqlen_q=2, page_size=256, capacity=512,
            scales=("token", "head"), keywords=SMALL | {"causal": True}),
    Fp8Case("192", 192, 192, scales=("head", "token"), keywords=SMALL),
    Fp8Case("256", 256, seqlen_q=2, page_size=128, capacity=256, lengths=(256, 17),
            scales=("token", "token"), keywords=SMALL | {"num_splits": 2}),
    # at most 32 query rows with heads of a group, and more with those that make it a power of two
    Fp8Case("a padded group", 64, seqlen_q=10, heads=(3, 1), scales=("head", "token")),
    Fp8Case("prefill", 64, seqlen_q=200, heads=(2, 1), lengths=(310, 205), scales=("token", "head"),
            keywords=SMALL | {"causal": True}),
    Fp8Case("prefill of pages", seqlen_q=150, heads=(2, 2), page_size=16, scales=("token", "token"),
            keywords=SMALL | {"causal": True, "window_size_left": 100}),
    Fp8Case("segments", 64, lengths=(1100, 600), capacity=1104, scales=("token", "head"),
            keywords={"seqlen_k_per_split": 512}),
    Fp8Case("segments of pages", lengths=(1030, 40), capacity=1104, page_size=16, seqlen_q=3,
            scales=("head", "token"), keywords={"seqlen_k_per_split": 512, "causal": True}),
    Fp8Case("one segment", lengths=(80, 33), capacity=80, scales=("token", "head"),
            keywords={"seqlen_k_per_split": 512}),
    Fp8Case("one segment of pages", 64, lengths=(512, 70), capacity=512, page_size=16, seqlen_q=4,
            scales=("head", "token"), keywords={"seqlen_k_per_split": 512, "causal": True}),
    Fp8Case("fixed splits in sequence", 64, lengths=(2060, 600), capacity=2064,
            scales=("token", "head"),
            keywords={"seqlen_k_per_split": 512, "causal": True, "window_size_left": 200}),
    Fp8Case("masks of users", 64, seqlen_q=2, page_size=16, scales=("token", "token"),
            keywords={
                "mask_mod": lambda b, h, q, k, aux: (
                    k % scalar_to_ssa(3, Int32) != scalar_to_ssa(1, Int32)
                ),
                "score_mod": lambda score, b, h, q, k, aux: score + score,
            }),
    Fp8Case(
        "intervals",
        64,
        seqlen_q=2,
        lengths=(320, 320),
        scales=("head", "token"),
        keywords={
            "startend_row_indices": builders.sink_window(320, 4, 100),
            "q_start": "end",
            "causal": True,
        },
    ),
)  # fmt: skip


def _chosen(block: int, shape: tuple[int, ...], num_blocks: int, **keywords: Any) -> dict[str, Any]:
    """Keywords with a selection (batch, heads, queries, k); some of its blocks do not exist."""
    selection = draw_selection(torch.Generator().manual_seed(block), shape, num_blocks, torch.int32)
    return {"block_sparse_tensors_torch": SelectedBlocks(selection, block), **keywords}


# Each query chose its key blocks. Of one query the kernel reads the entries.
SELECTED = (
    Fp8Case("one query", heads=(16, 2), lengths=(700, 130), capacity=768, page_size=128,
            scales=("token", "token"), keywords=_chosen(128, (2, 2, 1, 4), 6, causal=True)),
    Fp8Case("one query without pages", 64, lengths=(700, 130), capacity=720,
            scales=("token", "head"), keywords=_chosen(64, (2, 2, 1, 5), 11)),
    Fp8Case("queries of a group", 64, seqlen_q=4, heads=(12, 1), lengths=(700, 330), capacity=704,
            page_size=16, scales=("head", "token"),
            keywords=_chosen(64, (1, 1, 4, 5), 11, causal=True)),
    Fp8Case("splits", lengths=(700, 330), capacity=704, page_size=64, seqlen_q=2,
            scales=("token", "head"), keywords=_chosen(128, (2, 2, 2, 3), 6, num_splits=3)),
    Fp8Case("small blocks in pages of seven", 64, seqlen_q=3, page_size=7,
            scales=("token", "token"), keywords=_chosen(16, (2, 2, 3, 6), 20)),
    Fp8Case("prefill", 64, seqlen_q=70, heads=(8, 2), lengths=(310, 205), page_size=64,
            scales=("token", "head"), keywords=SMALL | _chosen(64, (2, 1, 70, 3), 5, causal=True)),
    Fp8Case("2,000 pages", 64, lengths=(31990, 20000), capacity=32000, page_size=16,
            scales=("token", "token"), keywords=_chosen(128, (2, 2, 1, 6), 250, causal=True)),
)  # fmt: skip


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.name)
def test_a_selection_has_the_bits_of_16(simulator: ModuleType, case: Fp8Case) -> None:
    check_bits(simulator, case, 1)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def check_bits(simulator: ModuleType, case: Fp8Case, seed: int, **config: Any) -> None:
    call = make_call(case, seed)
    results = []
    for (k, v), more in ((call.numbers, {}), (call.codes, call.descales)):
        with quiet_run(simulator, seed):
            made = forward_call(call.q, k, v, **call.keywords, **more, **config)
            out, lse = run_on_simulator(made)
        assert lse is not None
        results.append((out, lse))
    (out, lse), (out_fp8, lse_fp8) = results
    assert_same_bits(out, out_fp8, case.is_hard)
    # a NaN among values is not in LSE
    assert_same_bits(lse, lse_fp8, bool(lse.isnan().any()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_of_16(
    simulator: ModuleType, case: Fp8Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_chunks(monkeypatch)
    check_bits(simulator, case, 1)


# more work tiles for a CTA than a ring has stages, whole and cut blocks
SLOWED = (
    Fp8Case("loads by TMA", 64, seqlen_q=150, heads=(3, 3), lengths=(700, 20, 300), capacity=704,
            scales=("token", "head"), keywords=SMALL | {"causal": True, "window_size_left": 400}),
    Fp8Case("loads by rows of three warps", 64, seqlen_q=70, heads=(3, 3), lengths=(400, 20, 300),
            capacity=400, page_size=5, keywords=SMALL | {"causal": True}),
    Fp8Case("few rows", 64, seqlen_q=3, lengths=(400, 20, 300, 128, 260), capacity=400,
            page_size=16, scales=("token", "token"), keywords={"causal": True}),
    Fp8Case("one stage of values", 192, 128, seqlen_q=10, heads=(3, 3), lengths=(250, 20, 130),
            capacity=256, keywords=SMALL | {"causal": True}),
)  # fmt: skip


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("case", SLOWED, ids=lambda case: case.name)
def test_with_each_role_slow(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Fp8Case
) -> None:
    call = make_call(case, 1)
    wide, _ = run_on_simulator(forward_call(call.q, *call.numbers, **call.keywords))

    def run() -> None:
        with quiet_run(simulator, SEED):
            made = forward_call(call.q, *call.codes, **call.keywords, **call.descales)
            out, _ = run_on_simulator(made)
        assert torch.equal(bits(wide), bits(out))

    with_each_role_slow(simulator, monkeypatch, ["sm90.flash_fwd.kernel"], run)


@pytest.mark.parametrize("scales", [("none", "head"), ("token", "token"), ("head", "token")])
@pytest.mark.parametrize("rotates", [None, True, False])
def test_an_append_is_its_three_steps(
    simulator: ModuleType, scales: tuple[str, str], rotates: bool | None
) -> None:
    """Rotated and rounded to 16 bits as the kernel does for a cache in 16 bits, then quantised as
    on the CPU. rotates: pairs that are neighbours, or that span the halves; None: none."""
    dim, page_size = (80, 16) if rotates is None else (48, None)
    case = Fp8Case(
        "append", dim, 96, lengths=(9, 30, 0), capacity=48, scales=scales, page_size=page_size,
        dtype=torch.float16 if rotates else torch.bfloat16,
    )  # fmt: skip
    call = make_call(case)
    generator = torch.Generator().manual_seed(7)
    k, v = (torch.randn(3, 2, 2, d, generator=generator).to(case.dtype) for d in (dim, 96))
    k[0, 1, 0], v[1, 0] = 0.0, v[1, 0] * 500
    more: dict[str, Any] = {"page_table": call.keywords.get("page_table")}
    if rotates is not None:
        cos, sin = (torch.randn(48, 16, generator=generator) for _ in "cs")
        more |= {"cos": cos, "sin": sin, "interleaved": rotates}
    used, target = call.keywords["seqused_k"], Target(ARCH, num_sms=2)
    wide = [torch.zeros_like(x, dtype=case.dtype) for x in call.codes]
    with quiet_run(simulator, 1, launches=1):
        append(Append(*wide, k, v, call.q, used, **more), target)
    results = []
    # the rows of 16 bits have been rotated
    turned = [_rows_of(x, used, more["page_table"]) for x in wide]
    plain = {"page_table": more["page_table"]}
    for rows, how, by in ((turned, plain, None), ((k, v), more, target)):
        codes = [x.clone() for x in call.codes]
        descales = {x: None if y is None else y.clone() for x, y in call.descales.items()}
        given = Append(*codes, *rows, call.q, used, **how, **descales)
        check_append(given)
        append(given, by)
        numbers = [y.nan_to_num() for y in descales.values() if y is not None]
        results.append([x.view(torch.uint8) for x in codes] + numbers)
    assert all(map(torch.equal, *results))


def _rows_of(cache: Tensor, first: Tensor, page_table: Tensor | None) -> Tensor:
    """The two rows of each sequence from the first one on."""
    rows = first[:, None].long() + torch.arange(2)
    entry = torch.arange(len(first))[:, None].expand_as(rows)
    if page_table is not None:
        size = cache.shape[1]
        entry, rows = page_table.long().gather(1, rows // size), rows % size
    return cache[entry, rows]
