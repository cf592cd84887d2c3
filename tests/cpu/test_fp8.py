"""Keys and values in float8_e4m3fn on the CPU: as the same numbers in 16 bits, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fp8_caches import (
    FP8,
    NAN_CODE,
    Fp8Case,
    as_numbers,
    assert_same_bits,
    draw_codes,
    draw_descale,
    make_call,
)
from oracle import attend_rows
from planned import forward_call, planned
from torch import Tensor

from flash_mask_cute import explain, flash_attn_func, flash_attn_varlen_func
from flash_mask_cute import flash_attn_with_kvcache as over_cache
from flash_mask_cute.interface import _flash_attn_bwd, _flash_attn_fwd
from flash_mask_cute.runtime.target import Target

FORMS = ("none", "head", "expanded", "token")
SMALL = {"config": {"tile_m": 64}}
Q, CODES = torch.zeros(2, 1, 4, 32).bfloat16(), torch.zeros(2, 24, 2, 32).to(FP8)
ONE = torch.ones(2, 2)
USED = torch.tensor([20, 3], dtype=torch.int32)
UNALIGNED = torch.zeros(2 * 24 * 2 * 32 + 8).to(FP8)[8:].view(2, 24, 2, 32)


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Dense attention in float64 over keys in rows."""
    found = [attend_rows(q[i], k[i, :n], v[i, :n]).out for i, n in enumerate(lengths)]
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form_k", FORMS)
@pytest.mark.parametrize("form_v", FORMS)
def test_every_form_of_scales(form_k: str, form_v: str, dtype: torch.dtype) -> None:
    """Against attention in float64 over the definition."""
    case = Fp8Case("rows", 32, 16, 3, (4, 2), (40, 23), 48, (form_k, form_v), dtype=dtype)
    call = make_call(case)
    out = over_cache(call.q, *call.codes, cache_seqlens=call.keywords["seqused_k"], **call.descales)
    expected = exact(call.q, *call.numbers, case.lengths)
    step = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    assert ((out.double() - expected).abs() <= step * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 256])
@pytest.mark.parametrize("scales", [("token", "head"), ("none", "token")])
def test_bits_of_the_same_numbers(page_size: int | None, scales: tuple[str, str]) -> None:
    """By every function that takes a cache, in rows and in pages."""
    keywords = {"causal": True, "return_lse": True}
    case = Fp8Case("same", 32, 16, 5, (4, 2), (70, 33), 80, scales, page_size)
    call = make_call(case)
    used = call.keywords.pop("seqused_k")
    wide, fp8 = (
        (
            over_cache(
                call.q, *kv, cache_seqlens=used, **call.keywords, **more, **keywords, **SMALL
            ),
            flash_attn_varlen_func(
                call.q, *kv, seqused_k=used, **call.keywords, **more, **keywords, **SMALL
            ),
            _flash_attn_fwd(
                call.q, *kv, seqused_k=used, **call.keywords, **more, **keywords, **SMALL
            ),
        )
        for kv, more in ((call.numbers, {}), (call.codes, call.descales))
    )
    for of_wide, of_fp8 in zip(wide, fp8, strict=True):
        assert all(map(torch.equal, of_wide, of_fp8))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_have_the_bits_of_the_definition(seed: int) -> None:
    """Scales from 1e-4 to 1e4, zeros, a NaN code, NaN behind the end."""
    rng = random.Random(seed)
    heads_kv, page_size = rng.choice((1, 2)), rng.choice((None, 1, 7, 16))
    case = Fp8Case(
        "drawn", rng.choice((32, 48)), rng.choice((16, 32)), rng.choice((1, 3, 70)),
        (heads_kv * rng.choice((1, 3)), heads_kv), (rng.randint(1, 80), rng.randint(1, 80)), 80,
        (rng.choice(FORMS), rng.choice(FORMS)), page_size,
        rng.choice((torch.bfloat16, torch.float16)), is_hard=True,
    )  # fmt: skip
    call = make_call(case, seed)
    keywords = {**call.keywords, **SMALL, "return_lse": True}
    wide = _flash_attn_fwd(call.q, *call.numbers, **keywords)
    fp8 = _flash_attn_fwd(call.q, *call.codes, **keywords, **call.descales)
    assert_same_bits(wide[0], fp8[0], has_nan=True)
    assert wide[1] is not None and fp8[1] is not None
    assert_same_bits(wide[1], fp8[1], bool(wide[1].isnan().any()))


@pytest.mark.parametrize("rows", [24, 31])
@pytest.mark.parametrize("scales", [("token", "token"), ("head", "none")])
def test_entries_and_padding(rows: int, scales: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = 5, rows, 2
    k, v = (draw_codes((*shape, 32), generator) for _ in "kv")
    q = torch.randn(3, 2, 4, 32, generator=generator).bfloat16()
    where: dict[str, Any] = {
        "cache_batch_idx": torch.tensor([4, 0, 2], dtype=torch.int32),
        "cache_leftpad": torch.tensor([0, 3, 10], dtype=torch.int32),
        "cache_seqlens": torch.tensor([rows, 20, 11], dtype=torch.int32),
    }
    descales = [draw_descale(form, 3, shape, generator) for form in scales]
    found = over_cache(q, k, v, **where, k_descale=descales[0], v_descale=descales[1])
    owners = torch.tensor([1, 1, 2, 1, 0])
    k, v = (as_numbers(x, y, q.dtype, owners) for x, y in zip((k, v), descales, strict=True))
    assert torch.equal(found, over_cache(q, k, v, **where))


def test_all_rows_are_in_use_without_lengths() -> None:
    call = make_call(Fp8Case("all", 32, heads=(2, 1), lengths=(48, 48), capacity=48))
    found = over_cache(call.q, *call.codes, **call.descales)
    assert torch.equal(found, over_cache(call.q, *call.numbers))


def test_a_nan_stays_one() -> None:
    call = make_call(Fp8Case("nan", 32, heads=(2, 2), lengths=(20, 20), capacity=24))
    call.codes[1].view(torch.uint8)[1, 4, 0, 9] = NAN_CODE
    out = over_cache(call.q, *call.codes, cache_seqlens=20, **call.descales)
    where = out.isnan().nonzero()
    assert where.tolist() == [[1, 0, 0, 9]]


def test_compiled() -> None:
    torch._dynamo.reset()
    call = make_call(Fp8Case("compiled", 32, heads=(2, 1), lengths=(48, 13), capacity=48,
                             scales=("head", "token")))  # fmt: skip
    compiled = torch.compile(over_cache, backend="aot_eager", fullgraph=True)
    used = call.keywords["seqused_k"]
    with torch.no_grad():
        found = compiled(call.q, *call.codes, cache_seqlens=used, **call.descales)
    assert torch.equal(found, over_cache(call.q, *call.codes, cache_seqlens=used, **call.descales))


def test_autocast_leaves_the_codes() -> None:
    call = make_call(Fp8Case("autocast", 32, heads=(2, 1), lengths=(48, 13), capacity=48))
    used = call.keywords["seqused_k"]
    expected = over_cache(call.q, *call.codes, cache_seqlens=used, **call.descales)
    with torch.autocast("cpu", torch.bfloat16):
        found = over_cache(call.q.float(), *call.codes, cache_seqlens=used, **call.descales)
    assert torch.equal(found, expected)


@pytest.mark.shares(12)
def test_explained() -> None:
    call = make_call(Fp8Case("explained", 64, lengths=(700, 40), capacity=704, page_size=16))
    said = explain(call.q, *call.codes, **call.keywords, **call.descales)
    assert said.tiles.tile_m == 64 and "fp8" in said.reason and said.copies == ""
    assert said.backward is None and "no gradients" in said.note and said.spill_bytes == 0


def test_lengths_batches_pages_and_scales_are_not_in_the_kernel() -> None:
    kernels = set()
    for seed, (batch, capacity) in enumerate(((2, 2000), (3, 2000), (2, 4000))):
        lengths = (capacity - 9 * seed,) * batch
        case = Fp8Case("again", 64, lengths=lengths, capacity=capacity, scales=("token", "head"),
                       page_size=16, is_hard=bool(seed))  # fmt: skip
        call = make_call(case, seed)
        made = forward_call(call.q, *call.codes, **call.keywords, **call.descales)
        plan = planned(made, Target("sm_90a", num_sms=132))
        kernels.add((plan.problem, plan.fwd_choice.tiles))
    assert len(kernels) == 1


# -- new rows ------------------------------------------------------------------------------------


def quantised(x: Tensor, scale: Tensor | float) -> Tensor:
    """Codes of x / scale, found among all 256."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = codes.double()
    numbers[numbers.isnan()] = torch.inf
    distance = ((x.float() / scale).double()[..., None] - numbers).abs()
    # of two at the same distance the even one
    distance += (codes.view(torch.uint8) % 2) * 1e-12
    return codes[distance.argmin(-1)]


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("scales", [("none", "head"), ("token", "token"), ("head", "token")])
def test_new_rows_are_quantised(page_size: int | None, scales: tuple[str, str]) -> None:
    call = make_call(Fp8Case("new", 32, 16, 2, (4, 2), (9, 30), 40, scales, page_size))
    generator = torch.Generator().manual_seed(7)
    used, codes = call.keywords.pop("seqused_k"), [x.clone() for x in call.codes]
    scales_now = {name: None if x is None else x.clone() for name, x in call.descales.items()}
    new = [torch.randn(2, 2, 2, d, generator=generator).bfloat16() * 5 for d in (32, 16)]
    new[0][0, 1, 0] = 0.0
    new[1][1, 0] *= 1000  # of which some are beyond the largest code
    out = over_cache(call.q, *codes, *new, cache_seqlens=used, causal=True, **call.keywords,
                     **scales_now)  # fmt: skip
    for i, (name, x, cache) in enumerate(zip("kv", new, codes, strict=True)):
        scale = scales_now[f"{name}_descale"]
        for b, first in enumerate((9, 30)):
            entry = torch.full((2,), b)
            row = torch.arange(first, first + 2)
            if page_size is not None:
                entry, row = (
                    call.keywords["page_table"][b, row // page_size].long(),
                    row % page_size,
                )
            of_rows: Any = 1.0
            if scale is not None and scale.dim() == 2:
                of_rows = scale[b][:, None]
            elif scale is not None:
                of_rows = scale[entry, row][..., None]
                largest = x[b].float().abs().amax(-1, keepdim=True)
                assert torch.equal(of_rows, torch.where(largest == 0, 1.0, largest / 448))
            assert torch.equal(cache[entry, row].float(), quantised(x[b], of_rows).float())
            # and nothing else has changed
            call.codes[i][entry, row] = cache[entry, row]
        assert torch.equal(call.codes[i].view(torch.uint8), cache.view(torch.uint8))
    again = over_cache(
        call.q, *codes, cache_seqlens=used + 2, causal=True, **call.keywords, **scales_now
    )
    assert torch.equal(out, again)


def test_an_append_is_its_three_steps() -> None:
    """Rotated, rounded to the dtype of q, quantised."""
    call = make_call(Fp8Case("steps", 32, heads=(2, 1), lengths=(9, 30), capacity=40,
                             scales=("token", "head")))  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    k, v = (torch.randn(2, 1, 1, 32, generator=generator).bfloat16() for _ in "kv")
    cos, sin = (torch.randn(40, 16, generator=generator) for _ in "cs")
    used = call.keywords["seqused_k"]
    wide = [torch.zeros(2, 40, 1, 32).bfloat16() for _ in "kv"]
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "causal": True}
    over_cache(call.q, *wide, k, v, cache_seqlens=used, **rotary)
    rotated = torch.stack([wide[0][b, n] for b, n in enumerate((9, 30))])[:, None]
    results = []
    for rows, more in ((k, rotary), (rotated, {"causal": True})):
        codes = [x.clone() for x in call.codes]
        descales = {name: x.clone() for name, x in call.descales.items() if x is not None}
        over_cache(call.q, *codes, rows, v, cache_seqlens=used, **more, **descales)
        results.append([x.view(torch.uint8) for x in codes] + [descales["k_descale"]])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("scales", [("token", "head"), ("token", "token")])
def test_a_compiled_append_writes_codes_and_scales(scales: tuple[str, str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(over_cache, backend="aot_eager", fullgraph=True)
    results = []
    for call in (over_cache, compiled):
        given = make_call(Fp8Case("written", 32, heads=(2, 1), lengths=(9, 30), capacity=40,
                                  scales=scales))  # fmt: skip
        new = torch.ones(2, 1, 1, 32).bfloat16()
        with torch.no_grad():
            used = given.keywords["seqused_k"]
            out = call(given.q, *given.codes, new, 2 * new, cache_seqlens=used, **given.descales)
        written = [x.nan_to_num() for x in given.descales.values() if x is not None]
        assert written[0][0, 9, 0] == torch.tensor(1.0) / 448
        results.append((out, *(x.view(torch.uint8) for x in given.codes), *written))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_scales_in_padded_slots_of_their_cache() -> None:
    """As an engine keeps them: four bytes behind each row of a head, in the cache's own memory."""
    slots = torch.zeros(4, 8, 2, 48, dtype=torch.uint8)
    k_cache = slots[..., :32].view(FP8)
    k_scales = slots.view(torch.float32)[..., 8]
    v_cache = torch.zeros(4, 8, 2, 32).to(FP8)
    q, k = torch.randn(1, 1, 4, 32).bfloat16(), torch.randn(1, 3, 2, 32).bfloat16()
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    over_cache(q, k_cache, v_cache, k, k, cache_seqlens=6, page_table=table, k_descale=k_scales)
    places = [(2, 6), (2, 7), (1, 0)]
    for i, place in enumerate(places):
        found = k_cache[place].float() * k_scales[place][:, None]
        assert (found - k[0, i].float()).abs().max() <= k[0, i].abs().max() / 16
    k_scales[[2, 2, 1], [6, 7, 0]] = 0
    assert not k_scales.any()


NEW = {"k": torch.zeros(2, 1, 2, 32).bfloat16(), "v": torch.zeros(2, 1, 2, 32).bfloat16()}
SCALES = torch.ones(2, 24, 2)
REFUSED_NEW: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "in fp8": (
        {"k": NEW["k"].to(FP8)}, TypeError,
        "^k must have the dtype of q .torch.bfloat16. beside k_cache in float8_e4m3fn, .* got",
    ),
    "cache in e5m2": (
        {"k_cache": CODES.to(torch.float8_e5m2)}, TypeError, "^k_cache must be in float8_e4m3fn",
    ),
    "one cache": ({"v_cache": CODES.bfloat16()}, TypeError, "^k_cache and v_cache must both be"),
    "written twice": (
        {"v_descale": torch.ones(2, 1, 2).expand(2, 24, 2)}, ValueError,
        "^v_descale must not overlap itself",
    ),
    "of both": (
        {"k_descale": SCALES, "v_descale": SCALES}, ValueError,
        "^v_descale must not share memory with k_descale",
    ),
    "rank": ({"k_descale": torch.ones(2)}, ValueError, "^k_descale must have shape"),
    "gradient": (
        {"k_descale": SCALES.clone().requires_grad_()}, NotImplementedError,
        "^k_descale requires grad, and new rows are written",
    ),
    "beside 16 bits": (
        {"k_cache": CODES.bfloat16(), "v_cache": CODES.bfloat16(), "k_descale": ONE}, ValueError,
        "^k_descale is a scale of k_cache in float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_NEW)
def test_new_rows_are_refused(name: str) -> None:
    changed, error, message = REFUSED_NEW[name]
    given: dict[str, Any] = {"k_cache": CODES, "v_cache": CODES.clone(), **NEW} | changed
    before = [x.clone() for x in (given["k_cache"], given["v_cache"])]
    with pytest.raises(error, match=message):
        over_cache(Q, **given, cache_seqlens=USED)
    for x, y in zip(before, (given["k_cache"], given["v_cache"]), strict=True):
        assert torch.equal(x.float(), y.float())


# -- refusals ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "e5m2": (
        {"k": CODES.to(torch.float8_e5m2), "v": CODES.to(torch.float8_e5m2)}, TypeError,
        "^k must be in float8_e4m3fn, .* got torch.float8_e5m2, which is another format",
    ),
    "uint8": (
        {"k": CODES.view(torch.uint8), "v": CODES.view(torch.uint8)}, TypeError,
        r"^k must be in float8_e4m3fn, .* got torch.uint8: .* tensor.view\(torch.float8_e4m3fn\)",
    ),
    "one of the two": (
        {"v": CODES.bfloat16()}, TypeError,
        "^k(_cache)? and v(_cache)? must both be in .* got torch.float8_e4m3fn and torch.bfloat16",
    ),
    "the other": (
        {"k": CODES.bfloat16()}, TypeError, "^k(_cache)? and v(_cache)? must both be in float8",
    ),
    "q": (
        {"q": Q.to(FP8)}, TypeError, "^q must be in bfloat16 or float16 .* torch.float8_e4m3fn$",
    ),
    "q in 32": (
        {"q": Q.float()}, TypeError, "^q must be in bfloat16 or float16 .* got torch.float32$",
    ),
    "head_dim": (
        {"q": Q[..., :24], "k": CODES[..., :24], "v": CODES[..., :24]}, ValueError,
        r"^k in float8_e4m3fn must have a last dimension that is a multiple of 16, got shape",
    ),
    "strides": (
        {"v": torch.zeros(2, 24, 2, 40).to(FP8)[..., :32]}, ValueError,
        r"^v in float8_e4m3fn must have contiguous rows .* of 16 bytes, got strides \(1920, 80, 40",
    ),
    "address": (
        {"k": UNALIGNED}, ValueError, "^k in float8_e4m3fn must have an address .* 8 bytes past it",
    ),
    "rank": (
        {"k_descale": torch.ones(2)}, ValueError,
        r"^k_descale must have shape \(batch, heads_kv\) = \(2, 2\), .* \(2, 24, 2\), got \(2,\)",
    ),
    "heads": ({"v_descale": torch.ones(2, 4)}, ValueError, r"^v_descale .* got \(2, 4\)"),
    "rows": ({"v_descale": torch.ones(2, 20, 2)}, ValueError, r"^v_descale .* got \(2, 20, 2\)"),
    "dtype": ({"k_descale": ONE.half()}, TypeError, "^k_descale must have dtype float32, got .*16"),
    "number": ({"k_descale": 0.5}, TypeError, "^k_descale must be a torch.Tensor, got 0.5"),
    "device": (
        {"v_descale": ONE.to("meta")}, (TypeError, ValueError), "^v_descale .*meta",
    ),
    "beside 16 bits": (
        {"k": CODES.bfloat16(), "v": CODES.bfloat16(), "v_descale": ONE}, ValueError,
        "^v_descale is a scale of v(_cache)? in float8.*, .* None beside v(_cache)? in torch.bf",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", [over_cache, flash_attn_varlen_func, _flash_attn_fwd])
def test_refused(function: Any, name: str) -> None:
    changed, error, message = REFUSED[name]
    given: dict[str, Any] = {"q": Q, "k": CODES, "v": CODES} | changed
    q, k, v = (given.pop(x) for x in "qkv")
    used = "cache_seqlens" if function is over_cache else "seqused_k"
    with pytest.raises(error, match=message):
        function(q, k, v, **{used: USED}, **given)


def test_what_only_some_functions_take_is_refused() -> None:
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    packed = CODES.flatten(0, 1)
    for used in (None, USED):
        with pytest.raises(NotImplementedError, match="^cu_seqlens_k is not supported with k and"):
            flash_attn_varlen_func(Q, packed, packed, cu_seqlens_k=starts, seqused_k=used)
    for function in (flash_attn_func, flash_attn_varlen_func, _flash_attn_fwd):
        with pytest.raises(NotImplementedError, match="float8_e4m3fn need seqused_k or page_table"):
            function(Q, CODES, CODES)
    with pytest.raises(NotImplementedError, match="^q_descale is not supported"):
        over_cache(Q, CODES, CODES, cache_seqlens=USED, q_descale=ONE)
    for function in (flash_attn_varlen_func, _flash_attn_fwd):
        with pytest.raises(TypeError, match="q_descale .*q in fp8 is not supported"):
            function(Q, CODES, CODES, seqused_k=USED, q_descale=ONE)
    with pytest.raises(NotImplementedError, match="^there are no gradients over keys"):
        lse = torch.zeros(2, 4, 1)
        _flash_attn_bwd(Q, CODES, CODES, Q, Q, lse, seqused_k=USED)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn are not supported on Blackwell"):
        explain(Q, CODES, CODES, seqused_k=USED, target="sm_100a")


@pytest.mark.parametrize("name", ["q", "k", "k_descale", "v_descale"])
def test_gradients_are_refused(name: str) -> None:
    given = {"q": Q, "k": CODES, "v": CODES, "k_descale": ONE, "v_descale": ONE}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="^there are no gradients over keys and values"):
        flash_attn_varlen_func(**given, seqused_k=USED)
    with torch.no_grad():
        flash_attn_varlen_func(**given, seqused_k=USED)
