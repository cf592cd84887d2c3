"""Masks and biases of a case as callables: for CuTe kernels, and for FlexAttention.

A mask is `Mask.definition`; a score_mod is one of the functions below. Both are written once, in
operators that every language here has, and get from `Language` what is spelled differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import BenchCase
from bench.masks import Mask

Mod = Callable[..., Any]
Tables = Mapping[str, Tensor]
SOFTCAP = 30.0


class Language(NamedTuple):
    """at(table, *index): an entry; real: an integer as a floating-point number; functions."""

    at: Callable[..., Any]
    real: Callable[[Any], Any]
    exp2: Callable[[Any], Any]
    tanh: Callable[[Any], Any]


def _alibi(score: Any, h: Any, q: Any, k: Any, has: Language, heads: int) -> Any:
    slope = has.exp2(has.real(h + 1) * (-8.0 / heads))
    return score - slope * has.real(abs(q - k))


def _t5_bias(score: Any, h: Any, q: Any, k: Any, has: Language) -> Any:
    return score + has.at("bias", h, abs(q - k))


def _softcap(score: Any, h: Any, q: Any, k: Any, has: Language) -> Any:
    return has.tanh(score * (1.0 / SOFTCAP)) * SOFTCAP


def score_definition(case: BenchCase) -> Mod:
    """(score, h, q, k, language) -> score, of a case with a score_mod; the score is scaled."""
    definitions: dict[str, Mod] = {
        "alibi": partial(_alibi, heads=case.heads),
        "t5_bias": _t5_bias,
        "softcap": _softcap,
    }
    return definitions[case.score_mod]


def score_tables(case: BenchCase, device: torch.device) -> dict[str, Tensor]:
    """What the score_mod of the case reads: the bias (heads, n) of T5, fp32 by distance."""
    if case.score_mod != "t5_bias":
        return {}
    generator = torch.Generator(device=device).manual_seed(case.n)
    return {"bias": torch.randn(case.heads, case.n, device=device, generator=generator)}


def mask_tables(mask: Mask, device: torch.device) -> dict[str, Tensor]:
    """The per-token tables of a mask, int32."""
    return {
        name: torch.from_numpy(table).to(torch.int32).to(device)
        for name, table in mask.tables.items()
    }


def cute_language(names: tuple[str, ...], tables: Any) -> Language:
    """For one-element vectors of the CuTe DSL; `tables` are cute tensors, called `names`."""
    import cutlass
    import cutlass.cute as cute

    def at(table: str, *index: Any) -> Any:
        place = tuple(i[0] for i in index)
        tensor = tables[names.index(table)]
        return cute.full((1,), tensor[place], tensor.element_type)

    math: Any = cute.math
    return Language(
        at,
        lambda x: x.to(cutlass.Float32),
        partial(math.exp2, fastmath=True),
        partial(math.tanh, fastmath=True),
    )


def cute_mask_mod(mask: Mask) -> Mod:
    """mask_mod(b_idx, h_idx, q_idx, kv_idx, aux_tensors) with the tables of `mask_tables`.

    flash-attn-4 hands over lengths before aux_tensors; they are not looked at.
    """
    names, definition = tuple(mask.tables), mask.definition

    def mask_mod(b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, *rest: Any) -> Any:
        return definition(q_idx, kv_idx, cute_language(names, rest[-1]).at)

    return mask_mod


def cute_score_mod(case: BenchCase, names: tuple[str, ...]) -> Mod:
    """score_mod(score, b_idx, h_idx, q_idx, kv_idx, aux_tensors), the tables in order of `names`.

    flash-attn-4 passes the last three by keyword, and lengths besides, which are not looked at.
    """
    definition = score_definition(case)

    def score_mod(
        score: Any, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any, **_: Any
    ) -> Any:
        return definition(score, h_idx, q_idx, kv_idx, cute_language(names, aux_tensors))

    return score_mod


def torch_language(tables: Tables, dtype: torch.dtype) -> Language:
    """For torch tensors; `real` makes `dtype` of integers."""
    return Language(
        lambda table, *index: tables[table][index],
        lambda x: x.to(dtype),
        torch.exp2,
        torch.tanh,
    )


def torch_mask_mod(mask: Mask, tables: Tables) -> Mod:
    """mask_mod(b, h, q_idx, kv_idx) for FlexAttention."""
    definition = mask.definition

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return definition(q_idx, kv_idx, lambda table, index: tables[table][index])

    return mask_mod


def torch_score_mod(case: BenchCase, tables: Tables) -> Mod:
    """score_mod(score, b, h, q_idx, kv_idx) for FlexAttention."""
    definition, has = score_definition(case), torch_language(tables, torch.float32)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return definition(score, h, q_idx, kv_idx, has)

    return score_mod
