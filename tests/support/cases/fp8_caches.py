"""Caches in float8_e4m3fn with scales of every form, and the same numbers in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
NAN_CODE = 0x7F


@dataclass(frozen=True)
class Fp8Case:
    """heads: of queries and keys. lengths: rows in use of each sequence, or of each entry if `used`
    says how many keys a sequence has. scales: the forms of k_descale and v_descale, "none", "head",
    "expanded" (of strides 0) or "token". page_size: None for keys in rows. keywords: of the call,
    beside what this class makes. is_hard: scales from 1e-4 to 1e4 (in fp16 to 100) and some of 0,
    and a NaN code in a row in use."""

    name: str
    head_dim: int = 128
    head_dim_v: int | None = None
    seqlen_q: int = 1
    heads: tuple[int, int] = (8, 2)
    lengths: tuple[int, ...] = (300, 140)
    capacity: int = 320
    scales: tuple[str, str] = ("head", "head")
    page_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    keywords: dict[str, Any] = field(default_factory=dict)
    used: tuple[int, ...] | None = None
    is_hard: bool = False

    @property
    def decades(self) -> tuple[float, float]:
        """Logarithms of the least scale and of the largest one."""
        if self.is_hard:
            return -4, 4 if self.dtype == torch.bfloat16 else 2
        return -1.2, 0.6


@dataclass(frozen=True)
class Fp8Call:
    """q, and the keywords of `_flash_attn_fwd` over the codes (fp8) and over the numbers (wide)."""

    q: Tensor
    codes: tuple[Tensor, Tensor]
    numbers: tuple[Tensor, Tensor]
    descales: dict[str, Tensor | None]
    keywords: dict[str, Any]


def assert_same_bits(one: Tensor, other: Tensor, has_nan: bool) -> None:
    """Of results, of which those of the last sequence may have NaN, whose bits say nothing."""
    kind = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    assert bool(one.isnan().any()) == has_nan
    assert not one[:-1].isnan().any()
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(*(x.nan_to_num(0.0).contiguous().view(kind) for x in (one, other)))


def draw_codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Codes of numbers of every size, zeros of both signs and subnormal ones too, without NaN."""
    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    codes[(codes & NAN_CODE) == NAN_CODE] = 0
    # few are so large that they alone decide a softmax
    small = torch.randn(shape, generator=generator).to(FP8).view(torch.uint8)
    is_small = torch.rand(shape, generator=generator) < 0.9
    return torch.where(is_small, small, codes).view(FP8)


def draw_descale(
    form: str,
    batch: int,
    rows: tuple[int, ...],
    generator: torch.Generator,
    decades: tuple[float, float] = (-1.2, 0.6),
    zeros: float = 0.0,
) -> Tensor | None:
    """rows: the cache's shape without head_dim. zeros: the share of scales that are 0."""

    def numbers(*shape: int) -> Tensor:
        low, high = decades
        drawn = 10 ** (torch.rand(shape, generator=generator) * (high - low) + low)
        return drawn if zeros == 0 else drawn * (torch.rand(shape, generator=generator) >= zeros)

    if form == "none":
        return None
    if form == "head":
        return numbers(batch, rows[-1])
    if form == "expanded":
        return numbers(1).expand(batch, rows[-1])
    # strides that no contiguous tensor has
    return numbers(*rows[::-1]).permute(2, 1, 0)


def as_numbers(
    codes: Tensor, descale: Tensor | None, dtype: torch.dtype, owners: Tensor | None = None
) -> Tensor:
    """The definition: `(cache.float() * descale).to(dtype)`. owners: the sequence of each entry."""
    wide = codes.float()
    if descale is not None and descale.dim() == 2:
        descale = (descale if owners is None else descale[owners])[:, None]
    return (wide if descale is None else wide * descale[..., None]).to(dtype)


def make_call(case: Fp8Case, seed: int = 0) -> Fp8Call:
    """Rows that are not in use hold NaN codes, and so do their scales."""
    generator = torch.Generator().manual_seed(seed)
    batch, (heads, heads_kv) = len(case.lengths), case.heads
    d_v = case.head_dim_v or case.head_dim
    q = torch.randn(batch, case.seqlen_q, heads, case.head_dim, generator=generator)
    used = torch.tensor(case.lengths, dtype=torch.int32)
    keywords: dict[str, Any] = {"seqused_k": used, **case.keywords}
    if case.used is not None:
        keywords["seqused_k"] = torch.tensor(case.used, dtype=torch.int32)
    owners, entries, rows = torch.arange(batch), batch, case.capacity
    in_use = torch.arange(rows) < used[:, None]
    if case.page_size is not None:
        rows, of_sequence = case.page_size, -(-case.capacity // case.page_size)
        entries = batch * of_sequence + 2
        pages = torch.randperm(entries, generator=generator)[: batch * of_sequence]
        keywords["page_table"] = pages.view(batch, of_sequence).int()
        owners = torch.zeros(entries, dtype=torch.long)
        owners[pages] = torch.arange(batch).repeat_interleave(of_sequence)
        of_pages = torch.arange(of_sequence * rows).view(of_sequence, rows) < used[:, None, None]
        in_use = torch.zeros(entries, rows, dtype=torch.bool)
        in_use[pages] = of_pages.flatten(0, 1)
    shape = (entries, rows, heads_kv)
    codes, numbers, descales = [], [], []
    for dim, form in zip((case.head_dim, d_v), case.scales, strict=True):
        x = draw_codes((*shape, dim), generator)
        x.view(torch.uint8)[~in_use] = NAN_CODE
        if case.is_hard and used[-1] > 0:
            # of the last sequence, whose entry has a row that is in use
            entry = int((owners == batch - 1).logical_and(in_use.any(1)).nonzero()[0])
            x.view(torch.uint8)[entry, 0, -1, dim // 2] = NAN_CODE
        zeros = 0.05 if case.is_hard else 0.0
        descale = draw_descale(form, batch, shape, generator, case.decades, zeros)
        if form == "token" and descale is not None:
            descale[~in_use] = float("nan")
        codes.append(x)
        descales.append(descale)
        numbers.append(as_numbers(x, descale, case.dtype, owners))
    return Fp8Call(
        q.to(case.dtype),
        (codes[0], codes[1]),
        (numbers[0], numbers[1]),
        {"k_descale": descales[0], "v_descale": descales[1]},
        keywords,
    )
