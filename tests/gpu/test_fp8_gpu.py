"""Keys and values in fp8 on a Hopper GPU: the bits of a call over the same numbers in 16."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fp8_caches import Fp8Call, Fp8Case, assert_same_bits, make_call
from public_call import capture, no_waiting
from split_cases import take_chunks
from torch import Tensor

from flash_mask_cute import compile_count, explain, flash_attn_with_kvcache
from flash_mask_cute.interface import _flash_attn_fwd

CUDA = torch.device("cuda")
# of 64 rows, as those of keys in fp8
SMALL = {"config": {"tile_m": 64}}
CASES = (
    Fp8Case("heads", heads=(32, 8)),
    Fp8Case("tokens", heads=(32, 8), scales=("token", "token"), page_size=16),
    Fp8Case("pages of one", 64, heads=(16, 2), scales=("token", "head"), page_size=1),
    Fp8Case("queries", seqlen_q=4, heads=(32, 8), scales=("expanded", "token"), page_size=64,
            dtype=torch.float16, keywords={"causal": True}),
    Fp8Case("256", 256, heads=(24, 2), scales=("none", "token"), page_size=16,
            keywords=SMALL | {"num_splits": 5}),
    Fp8Case("192", 192, 128, seqlen_q=2, heads=(16, 2), page_size=128,
            keywords=SMALL | {"num_splits": 3, "causal": True}),
    Fp8Case("80", 80, heads=(4, 4), scales=("token", "token"), page_size=7),
    Fp8Case("prefill", 64, seqlen_q=300, heads=(4, 2), scales=("token", "token"), page_size=16,
            keywords=SMALL | {"causal": True}),
    Fp8Case("converted first", seqlen_q=300, heads=(32, 8), scales=("token", "head"), page_size=16,
            keywords={"causal": True}),
    Fp8Case("segments", heads=(32, 8), scales=("head", "token"), page_size=16,
            keywords={"seqlen_k_per_split": 512, "causal": True}),
)  # fmt: skip


def drawn(case: Fp8Case, rng: random.Random, is_hard: bool) -> Fp8Call:
    batch, size = rng.choice((1, 2, 5)), case.page_size or 1
    capacity = -(-rng.choice((600, 2000, 4000)) // size) * size
    least = max(case.seqlen_q, 1)
    lengths = tuple(rng.choice((rng.randint(least, capacity), capacity)) for _ in range(batch))
    fields = {**case.__dict__, "lengths": lengths, "capacity": capacity, "is_hard": is_hard}
    return make_call(Fp8Case(**fields), rng.randint(0, 1 << 20))


def on_cuda(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if 0 in x.stride() or x.is_contiguous():
        return x[:1, :1].to(CUDA).expand(x.shape) if 0 in x.stride() else x.to(CUDA)
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
    return new.copy_(x)


@pytest.mark.shares(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_of_16(case: Fp8Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random calls in all, half of them hard, in the same splits."""
    take_chunks(monkeypatch)
    rng = random.Random(case.name)
    for i in range(200 // len(CASES)):
        call = drawn(case, rng, is_hard=i % 2 == 1)
        keywords = {name: on_cuda(x) for name, x in call.keywords.items()}
        descales = {name: on_cuda(x) for name, x in call.descales.items()}
        q, *pairs = (on_cuda(x) for x in (call.q, *call.numbers, *call.codes))
        out, lse = _flash_attn_fwd(q, *pairs[:2], **keywords)
        out_fp8, lse_fp8 = _flash_attn_fwd(q, *pairs[2:], **keywords, **descales)
        assert lse is not None and lse_fp8 is not None
        assert_same_bits(out, out_fp8, has_nan=i % 2 == 1)
        assert_same_bits(lse, lse_fp8, bool(lse.isnan().any()))


@pytest.mark.parametrize("more", [{}, {"seqlen_k_per_split": 512}], ids=["shares", "segments"])
def test_nothing_is_compiled_and_nobody_waits(more: dict[str, int]) -> None:
    """Other batches, lengths, pages and scales."""
    calls = []
    for batch, capacity in ((2, 2000), (3, 2000), (2, 4000)):
        case = Fp8Case("again", heads=(32, 8), lengths=(capacity - 9,) * batch, capacity=capacity,
                       scales=("token", "head"), page_size=16, keywords=more)  # fmt: skip
        call = make_call(case, batch)
        keywords = {name: on_cuda(x) for name, x in (call.keywords | call.descales).items()}
        calls.append((tuple(map(on_cuda, (call.q, *call.codes))), keywords))
    given, keywords = calls[0]
    _flash_attn_fwd(*given, **keywords)
    torch.cuda.synchronize()
    count = compile_count()
    with no_waiting():
        for given, keywords in calls:
            _flash_attn_fwd(*given, **keywords)
    assert compile_count() == count


def test_one_graph_for_every_length_and_scale() -> None:
    call = make_call(Fp8Case("graph", heads=(32, 8), lengths=(4000, 4000), capacity=4000,
                             scales=("token", "head")))  # fmt: skip
    q, *codes = (on_cuda(x) for x in (call.q, *call.codes))
    descales = {name: on_cuda(x) for name, x in call.descales.items()}
    used = torch.tensor([9, 9], dtype=torch.int32, device=CUDA)

    def attend() -> Tensor:
        out = flash_attn_with_kvcache(q, *codes, cache_seqlens=used, causal=True, **descales)
        assert isinstance(out, Tensor)
        return out

    graph, out = capture(attend)
    for step in range(200):
        used.copy_(torch.tensor([1 + 19 * step, 4000 - step]))
        for x in descales.values():
            x.mul_(0.99)
        graph.replay()
        assert torch.equal(out, attend())


def test_a_plan_of_converted_keys_holds_no_memory() -> None:
    call = make_call(Fp8Case("converted first", seqlen_q=300, heads=(32, 8), capacity=2048))
    given = [on_cuda(x) for x in (call.q, *call.codes)]
    keywords = {name: on_cuda(x) for name, x in (call.keywords | call.descales).items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    said = explain(*given, **keywords)
    assert "converted from fp8 before attention" in said.note
    wide = 2 * call.codes[0].numel()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * wide
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("scales", [("token", "token"), ("head", "none")])
def test_an_append_is_that_of_the_cpu(scales: tuple[str, str]) -> None:
    case = Fp8Case("append", heads=(32, 8), lengths=(9, 30, 0), capacity=48, scales=scales,
                   page_size=16)  # fmt: skip
    call = make_call(case)
    new = [torch.randn(3, 2, 8, 128).bfloat16() for _ in "kv"]
    used, table = call.keywords["seqused_k"], call.keywords["page_table"]
    results = []
    for device in ("cpu", "cuda"):
        codes = [x.to(device, copy=True) for x in call.codes]
        descales = {
            name: x if x is None else x.to(device, copy=True) for name, x in call.descales.items()
        }
        out = flash_attn_with_kvcache(
            call.q.to(device), *codes, *(x.to(device) for x in new),
            cache_seqlens=used.to(device), page_table=table.to(device), causal=True, **descales,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        written = [x.view(torch.uint8).cpu() for x in codes]
        written += [x.cpu().nan_to_num() for x in descales.values() if x is not None]
        results.append((out.float().cpu(), written))
    (expected, by_cpu), (out, by_gpu) = results
    assert all(map(torch.equal, by_cpu, by_gpu))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
